// The backward kernel for wide batches; see wide.cuh.

struct Units : UpdatedUnits {
    const Parameters& p;
    float totals[GATES][2] = {};  // sums of two units' gradients of gates, over all steps and sequences
    // Of the step that is processed next: its rows; a bit for each sequence of a turn, whether it has the step and
    // whether it is reset before it; and each sequence's operands, for two units.
    Rows rows;
    unsigned lives, begins;
    Pack x[ROUNDS][2][GATES], grad_output[ROUNDS][2];
    float2 cell[ROUNDS][2], earlier[ROUNDS][2];
    unsigned lived = 0, began = 0;  // the same bits of the step processed last, four for each turn
    Pack grads[ROUNDS][2][GATES];   // the gradients of that step

    __device__ Units(const Parameters& p, const Place& place, char* shared)
        : UpdatedUnits(place), p(p), rows(p, step_of(p, 0)) {
        for (int turn = 0; turn < BLOCK_GROUPS; ++turn)
            for (int r = 0; r < ROUNDS; ++r) {
                float2 dc[2] = {};
                for (int s = 0; s < 2; ++s) {
                    const int b = sequence_of(turn, r, s);
                    if (b >= p.batch) continue;
                    const float2 dh = two(p.grad_h_n, b);
                    p.grad_h0[at(b) / 2] = pack({dh.x, dh.y});
                    dc[s] = two(p.grad_c_n[0], b);
                }
                cells(shared, turn, r) = {dc[0].x, dc[0].y, dc[1].x, dc[1].y};
            }
    }

    // Two units of a sequence's state, zeros without a tensor.
    __device__ float2 two(const Scalar* from, int sequence) const {
        return from ? float2{widen(from[at(sequence)]), widen(from[at(sequence) + 1])} : float2{0, 0};
    }
    __device__ static Pack load(const Scalar* from) { return __ldcs(reinterpret_cast<const Pack*>(from)); }

    // Starts to load the operands of an iteration's step.
    __device__ void fetch(int iteration, int turn) {
        const bool has_earlier = iteration + 1 < p.steps;
        rows = Rows(p, step_of(p, iteration));
        const Rows before(p, step_of(p, has_earlier ? iteration + 1 : iteration));
        lives = begins = 0;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int b = sequence_of(turn, r, s);
                const bool live = b < rows.live;
                const size_t row = rows.first + b;
#pragma unroll
                for (int g = 0; g < GATES; ++g) x[r][s][g] = live ? load(p.pre + at(row, GATES) + g * HIDDEN) : 0;
                grad_output[r][s] = live && p.grad_output ? load(p.grad_output + at(row)) : 0;
                cell[r][s] = earlier[r][s] = {0, 0};
                if (!live) continue;
                lives |= 1u << (2 * r + s);
                cell[r][s] = *reinterpret_cast<const float2*>(p.cells + at(row));
                if (RESETS && p.resets[row]) begins |= 1u << (2 * r + s);
                else if (!has_earlier || b >= before.live) earlier[r][s] = two(p.c0[0], b);
                else earlier[r][s] = *reinterpret_cast<const float2*>(p.cells + at(before.first + b));
            }
    }

    // The gradients of the states before the step processed last; unchanged if a sequence did not have that step.
    __device__ void sum(float (&dh)[4], const Place& place, char* shared, int iteration, int turn, int round,
                        Timeout& timeout) const {
        float4 terms[TERMS] = {};
        if (iteration)
            receive(terms, place.sums(p, turn, place.block) + round * OWNERS + thread, iteration, shared, timeout);
        float4 sum = terms[0];
#pragma unroll
        for (int i = 1; i < TERMS; ++i)
            sum.x += terms[i].x, sum.y += terms[i].y, sum.z += terms[i].z, sum.w += terms[i].w;
        const float of_units[4] = {sum.x, sum.z, sum.y, sum.w};
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const int b = sequence_of(turn, round, s), bit = turn * 4 + round * 2 + s;
            float kept[2] = {};
            if (!(lived >> bit & 1) && b < p.batch) unpack(p.grad_h0[at(b) / 2], kept);
#pragma unroll
            for (int u = 0; u < 2; ++u)
                dh[2 * s + u] = !(lived >> bit & 1) ? kept[u] : began >> bit & 1 ? 0 : of_units[2 * s + u];
        }
    }

    __device__ void update(const Place& place, char* shared, int iteration, int turn, Timeout& timeout) {
        char* published = place.published(p, turn, iteration + 1) + place.block * STATE_BYTES;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            // The derivatives are computed before the wait for the sums.
            float slope[4][Cell::DERIVATIVES], dh[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int s = i / 2, u = i % 2;
                float pre[GATES];
#pragma unroll
                for (int g = 0; g < GATES; ++g) {
                    float of_units[2];
                    unpack(x[r][s][g], of_units);
                    pre[g] = of_units[u];
                }
                const float before[] = {0, u ? earlier[r][s].y : earlier[r][s].x};
                const float after[] = {0, u ? cell[r][s].y : cell[r][s].x};
                Cell::differentiate(before, after, pre, nullptr, slope[i]);
#pragma unroll
                for (int k = 0; k < Cell::DERIVATIVES; ++k) asm volatile("" : "+f"(slope[i][k]));
            }
            sum(dh, place, shared, iteration, turn, r, timeout);
            const float4 last = cells(shared, turn, r);
            float dc[4] = {last.x, last.y, last.z, last.w}, d[4][GATES];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float of_units[2];
                unpack(grad_output[r][i / 2], of_units);
                const float total[] = {dh[i] + of_units[i % 2], dc[i]};
                const bool passes = OFFSETS && !(lives >> (2 * r + i / 2) & 1);
                float of_states[2];
                Cell::pull(slope[i], total, of_states, d[i]);
#pragma unroll
                for (int g = 0; g < GATES; ++g) {
                    if (passes) d[i][g] = 0;
                    totals[g][i % 2] += d[i][g];
                }
                dc[i] = begins >> (2 * r + i / 2) & 1 ? 0 : passes ? dc[i] : of_states[1];
            }
            cells(shared, turn, r) = {dc[0], dc[1], dc[2], dc[3]};
#pragma unroll
            for (int s = 0; s < 2; ++s) {
#pragma unroll
                for (int g = 0; g < GATES; ++g) {
                    grads[r][s][g] = pack({d[2 * s][g], d[2 * s + 1][g]});
                    publish(published + g * BLOCKS * STATE_BYTES + byte(r, s), grads[r][s][g]);
                }
                const int b = sequence_of(turn, r, s);
                if (OFFSETS && b >= rows.live && b < p.batch)
                    p.grad_h0[at(b) / 2] = pack({dh[2 * s], dh[2 * s + 1]});
            }
        }
        const unsigned others = ~(15u << 4 * turn);
        lived = (lived & others) | lives << 4 * turn, began = (began & others) | begins << 4 * turn;
    }

    __device__ void write(char *, int, int turn) const {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int b = sequence_of(turn, r, s);
                if (b >= rows.live) continue;
#pragma unroll
                for (int g = 0; g < GATES; ++g)
                    __stcs(p.grads + (at(rows.first + b, GATES) + g * HIDDEN) / 2, grads[r][s][g]);
            }
    }

    __device__ void finish(const Place& place, char* shared, Timeout& timeout) const {
        for (int turn = 0; turn < BLOCK_GROUPS; ++turn)
            for (int r = 0; r < ROUNDS; ++r) {
                float dh[4];
                sum(dh, place, shared, p.steps, turn, r, timeout);
                const float4 dc = cells(shared, turn, r);
                for (int s = 0; s < 2; ++s) {
                    const int b = sequence_of(turn, r, s);
                    if (b >= p.batch) continue;
                    p.grad_h0[at(b) / 2] = pack({dh[2 * s], dh[2 * s + 1]});
                    p.grad_c0[0][at(b) / 2] = s ? pack({dc.z, dc.w}) : pack({dc.x, dc.y});
                    const bool first = !turn && !r && !s;  // this row gets the sums over all sequences of the thread
                    for (int g = 0; g < GATES; ++g)
                        *reinterpret_cast<float2*>(p.totals + at(b, GATES) + g * HIDDEN) =
                            first ? float2{totals[g][0], totals[g][1]} : float2{0, 0};
                }
            }
    }
};

// grid: BLOCKS blocks for each BLOCK_GROUPS groups of sequences, all resident at once
extern "C" __global__ void __launch_bounds__(BLOCK_GROUPS * THREADS, 1) recur(const Launch launch) {
    const Parameters& p = launch.own();
    extern __shared__ __align__(128) char shared[];
    const Place place(p);
    begin(p, place, shared);
    if (multiplies()) {
        // Each warp has the rows of one block of the team, to which its sums go.
        const int of_block = place.team * CLUSTER + warp_id();
        multiply_all(p, place, shared, [&](int turn, int tile, const float4& x) {
            float4* to = place.sums(p, turn, of_block) + place.rank * TERM + tile * 32 + lane_id();
            asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};"
                         :: "l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
        });
    } else if (updates()) {
        update_all<Units>(p, place, shared);
    } else {
        set_registers<COPYING>();
        copy(p, place, shared);
    }
}
