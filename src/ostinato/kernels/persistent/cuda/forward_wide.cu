// The forward kernel for wide batches; see wide.cuh.

struct Units : UpdatedUnits {
    const Parameters& p;
    Pack bias[GATES];                             // of two units, as are all that follow
    Pack x[ROUNDS][2][GATES], h[ROUNDS][2] = {};  // of each sequence: projected inputs, then pre-activations; state
    unsigned begins = 0;                          // a bit for each sequence: whether it is reset before its next step

    __device__ Units(const Parameters& p, const Place& place, char* shared) : UpdatedUnits(place), p(p) {
        const Rows rows(p, step_of(p, 0));
#pragma unroll
        for (int g = 0; g < GATES; ++g) {
            const int at = g * HIDDEN + unit;
            bias[g] = p.bias && exists(unit) ? pack({widen(p.bias[at]), widen(p.bias[at + 1])}) : 0;
        }
        for (int turn = 0; turn < BLOCK_GROUPS; ++turn)
            for (int r = 0; r < ROUNDS; ++r) {
                float c[4] = {};
                for (int s = 0; s < 2; ++s) {
                    const int b = sequence_of(turn, r, s);
                    if (b >= p.batch) continue;
                    if (OFFSETS) p.h_n[at(b) / 2] = p.h0 ? pack({widen(p.h0[at(b)]), widen(p.h0[at(b) + 1])}) : 0;
                    if (!p.c0[0] || (RESETS && b < rows.live && p.resets[rows.first + b])) continue;
                    for (int u = 0; u < 2; ++u) c[2 * s + u] = widen(p.c0[0][at(b) + u]);
                }
                cells(shared, turn, r) = {c[0], c[1], c[2], c[3]};
            }
    }

    // Starts to load the operands of an iteration's step.
    __device__ void fetch(int iteration, int turn) {
        const Rows rows(p, step_of(p, iteration));
        const Rows next(p, step_of(p, RESETS ? min(iteration + 1, p.steps - 1) : iteration));
        begins = 0;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int b = sequence_of(turn, r, s);
                const bool live = b < rows.live;
                const Pack* pre = reinterpret_cast<const Pack*>(p.pre + at(rows.first + b, GATES));
#pragma unroll
                for (int g = 0; g < GATES; ++g) x[r][s][g] = live ? __ldcs(pre + g * HIDDEN / 2) : 0;
                if (OFFSETS && !live && b < p.batch) h[r][s] = p.h_n[at(b) / 2];
                if (RESETS && iteration + 1 < p.steps && b < next.live)
                    begins |= p.resets[next.first + b] << (2 * r + s);
            }
    }

    // Updates and publishes the units of a turn.  A sequence that does not have this step keeps its state.
    __device__ void update(const Place& place, char* shared, int iteration, int turn, Timeout& timeout) {
        const Rows rows(p, step_of(p, iteration));
        char* published = place.published(p, turn, iteration + 1) + place.block * STATE_BYTES;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            float4 terms[TERMS];
            receive(terms, sums(shared, turn) + r * OWNERS + thread, iteration + 1, shared, timeout);
            const float4 before = cells(shared, turn, r);
            float c[4] = {before.x, before.y, before.z, before.w}, after[4], s[4][GATES], pre[4][GATES];
#pragma unroll
            for (int g = 0; g < GATES; ++g) {
                const float4 a = terms[g], b = terms[GATES + g];
                float of_units[2];
                unpack(bias[g], of_units);
                s[0][g] = a.x + b.x + of_units[0], s[1][g] = a.z + b.z + of_units[1];
                s[2][g] = a.y + b.y + of_units[0], s[3][g] = a.w + b.w + of_units[1];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int g = 0; g < GATES; ++g) {
                    float projected[2];
                    unpack(x[r][i / 2][g], projected);
                    pre[i][g] = projected[i % 2];
                }
                const float states[] = {0, c[i]};  // an LSTM uses h only in its products
                float next[2];
                Cell::forward(states, pre[i], s[i], nullptr, next);
                after[i] = next[0];
                if (!OFFSETS || sequence_of(turn, r, i / 2) < rows.live) c[i] = next[1];
            }
            cells(shared, turn, r) = {c[0], c[1], c[2], c[3]};
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const bool live = !OFFSETS || sequence_of(turn, r, k) < rows.live;
                if (live) h[r][k] = pack({after[2 * k], after[2 * k + 1]});
                publish(published + byte(r, k), begins >> (2 * r + k) & 1 ? 0 : h[r][k]);
                if (!KEEPS_GATES) continue;
#pragma unroll
                for (int g = 0; g < GATES; ++g) x[r][k][g] = pack({pre[2 * k][g], pre[2 * k + 1][g]});
            }
        }
    }

    __device__ void write(char* shared, int iteration, int turn) {
        const Rows rows(p, step_of(p, iteration));
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            float4& cell = cells(shared, turn, r);
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int b = sequence_of(turn, r, s);
                float2& mine = reinterpret_cast<float2*>(&cell)[s];
                if (b < rows.live) {
                    const size_t row = rows.first + b;
                    p.output[at(row) / 2] = h[r][s];
                    if (p.cells) *reinterpret_cast<float2*>(p.cells + at(row)) = mine;
                    Pack* gates = reinterpret_cast<Pack*>(p.gates + at(row, GATES));
#pragma unroll
                    for (int g = 0; KEEPS_GATES && g < GATES; ++g) __stcs(gates + g * HIDDEN / 2, x[r][s][g]);
                    if (OFFSETS || iteration + 1 == p.steps) p.h_n[at(b) / 2] = h[r][s];
                }
                if (begins >> (2 * r + s) & 1) mine = {0, 0};
            }
        }
    }

    __device__ void finish(const Place &, char* shared, Timeout &) const {
        for (int turn = 0; turn < BLOCK_GROUPS; ++turn)
            for (int r = 0; r < ROUNDS; ++r)
                for (int s = 0; s < 2; ++s) {
                    const int b = sequence_of(turn, r, s);
                    const float2 mine = reinterpret_cast<float2*>(&cells(shared, turn, r))[s];
                    if (b < p.batch) p.c_n[0][at(b) / 2] = pack({mine.x, mine.y});
                }
    }

    // The sums of a turn, (CLUSTER, GATES, TERM).
    __device__ static const float4* sums(const char* shared, int turn) {
        return reinterpret_cast<const float4*>(shared + AT_SUMS) + turn * TERMS * TERM;
    }
};

// grid: BLOCKS blocks for each BLOCK_GROUPS groups of sequences, all resident at once
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(BLOCK_GROUPS * THREADS, 1) recur(const Launch launch) {
    const Parameters& p = launch.own();
    extern __shared__ __align__(128) char shared[];
    const Place place(p);
    for (int i = threadIdx.x; i < BLOCK_GROUPS * TERMS * TERM; i += BLOCK_GROUPS * THREADS)
        reinterpret_cast<float4*>(shared + AT_SUMS)[i] = {0, 0, 0, 0};
    begin(p, place, shared);
    sync_if_clustered();
    if (multiplies()) {
        // Each warpgroup has the rows of one block of the team, to which its sums go, and each of its warps one gate.
        const int gate = warp_id() % 4;
        const char* here = shared + AT_SUMS + ((place.rank * GATES + gate) * TERM + lane_id()) * 16;
        const unsigned to = shared_address(here, threadIdx.x / 128);
        multiply_all(p, place, shared, [&](int turn, int tile, const float4& x) {
            asm volatile("st.relaxed.cluster.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                         :: "r"(to + (turn * TERMS * TERM + tile * 32) * 16), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                         : "memory");
        });
    } else if (updates()) {
        update_all<Units>(p, place, shared);
    } else {
        set_registers<COPYING>();
        copy(p, place, shared);
    }
    __syncthreads();
    sync_if_clustered();
}
