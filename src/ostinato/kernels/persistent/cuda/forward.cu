// The forward pass of one layer and direction: all steps in one launch, with the recurrent weights kept on chip.
//
// Product multiplies the recurrent matrix with the previous state and leaves partial sums in shared memory; Units
// reduces them, updates the block's own hidden units and publishes them.  With RESETS, a state that is reset before the
// next step is published as zero.

constexpr int PREFETCH = 3;  // steps in advance

// Keeps a number in a register: the compiler would compute it again at each use, from special registers and the
// parameters, while other blocks wait for the next words.  If some weights are not in registers, or there are more
// than 8 sequences, the registers are worth more for those.
template <typename T> __device__ inline T in_register(T x) {
    if constexpr (COLUMNS > 8 || !ALL_IN_REGISTERS) return x;
    else if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(x));
    else asm volatile("" : "+r"(x));
    return x;
}

struct Units : Block {
    const Parameters& p;
    float h[ITEMS], c[ITEMS][BESIDE_H], bias[ITEMS][GATES];  // c: the states beside h
    float parameter[UNITS_OF_THREAD][Cell::PARAMETERS + 1];  // no array may be empty
    Resets resets;  // before this step; from update() on, before the next one
    Adjacent<Scalar> projected[ITEMS / ADJACENT][INPUTS];
    Span spans[ITEMS][GATES] = {};

    __device__ Units(const Parameters& p, const Product& product, int block, Block owned_by) : Block(owned_by), p(p) {
        resets.look_up(p, *this, 0);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            h[i] = 0;
#pragma unroll
            for (int k = 0; k < BESIDE_H; ++k) c[i][k] = 0;
#pragma unroll
            for (int g = 0; g < GATES; ++g) bias[i][g] = 0;
            if (!owned(i)) continue;
#pragma unroll
            for (int g = 0; g < GATES; ++g) {
                spans[i][g] = product.span(p, block, g * UNITS + unit_of(i));
                if (p.bias) bias[i][g] = widen(p.bias[g * CHANNELS + unit + unit_of(i)]);
            }
#pragma unroll
            for (int k = 0; k < Cell::PARAMETERS; ++k)
                parameter[own_unit(i)][k] = p.parameters[k * CHANNELS + unit + unit_of(i)];
            if (p.h0) h[i] = widen(p.h0[index(0, i)]);
#pragma unroll
            for (int k = 0; k < OTHERS; ++k)
                if (p.c0[k]) c[i][k] = widen(p.c0[k][index(0, i)]);
        }
    }

    __device__ void zero_reset_states() {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (!resets.before[i / ADJACENT]) continue;
            h[i] = 0;
#pragma unroll
            for (int k = 0; k < BESIDE_H; ++k) c[i][k] = 0;
        }
    }

    __device__ void fetch(const Rows& rows) {
#pragma unroll
        for (int i = 0; i < ITEMS; i += ADJACENT) {
            if (!live(i, rows)) continue;
            const Scalar* pre = p.pre + index(rows.first, i, INPUTS);
#pragma unroll
            for (int g = 0; g < INPUTS; ++g)
                projected[i / ADJACENT][g] = Adjacent<Scalar>::load_once(pre + g * CHANNELS);
        }
    }

    // Computes the states of item i after a step.  With KEEPS_GATES, its pre-activations replace its projected inputs.
    __device__ void step(int i, const float (&s)[GATES], float (&after)[1 + BESIDE_H]) {
        float before[1 + BESIDE_H] = {h[i]}, x[INPUTS];
#pragma unroll
        for (int k = 0; k < BESIDE_H; ++k) before[1 + k] = c[i][k];
#pragma unroll
        for (int g = 0; g < INPUTS; ++g) x[g] = widen(projected[i / ADJACENT][g].x[i % ADJACENT]);
        Cell::forward(before, x, s, parameter[own_unit(i)], after);
#pragma unroll
        for (int g = 0; KEEPS_GATES && g < INPUTS; ++g) projected[i / ADJACENT][g].x[i % ADJACENT] = x[g];
    }

    template <typename State>
    __device__ void update(const Rows& rows, const Product& product, const float* sums, State state, int iteration) {
        if (idle(0)) return;
        update<0, WHOLE>(rows, product, sums, state, iteration);
        if (WHOLE < ITEMS && !idle(WHOLE)) update<WHOLE, ITEMS>(rows, product, sums, state, iteration);
    }

    // Updates and publishes the items from FIRST to END.  A sequence that does not have this step keeps its state.
    template <int FIRST, int END, typename State>
    __device__ void update(const Rows& rows, const Product& product, const float* sums, State state, int iteration) {
        float s[ITEMS][GATES];
#pragma unroll
        for (int i = FIRST; i < END; i += ADJACENT) {
#pragma unroll
            for (int g = 0; g < GATES; ++g) {
                const auto sum = product.sum(sums, spans[i][g], g * UNITS + unit_of(i), sequence_of_sums(i));
#pragma unroll
                for (int j = 0; j < ADJACENT; ++j) s[i + j][g] = sum.x[j] + bias[i + j][g];
            }
        }
#pragma unroll
        for (int i = FIRST; i < END; ++i) {
#pragma unroll
            for (int g = 0; g < GATES; ++g) asm volatile("" : "+f"(s[i][g]));  // all sums before the gates
        }
#pragma unroll
        for (int i = FIRST; i < END; ++i) {
            float after[1 + BESIDE_H] = {};
            step(i, s[i], after);
            if (!live(i, rows)) continue;
            h[i] = after[0];
#pragma unroll
            for (int k = 0; k < BESIDE_H; ++k) c[i][k] = after[1 + k];
        }
#pragma unroll
        for (int i = FIRST; i < END; i += ADJACENT) {
            const bool zero = resets.before[i / ADJACENT];
            if constexpr (SHARES_WORK) {
                state.publish(h[i], zero, in_word(i));
            } else {
                float published[ADJACENT];
#pragma unroll
                for (int j = 0; j < ADJACENT; ++j) published[j] = zero ? 0 : h[i + j];
                char* address = state + state_offset((unit + unit_of(i)) * sizeof(Scalar), sequence_of(i));
                publish(published, in_word(i), begins_word(i), address, iteration + 1);
            }
        }
    }

    __device__ void write(const Rows& rows) const {
#pragma unroll
        for (int i = 0; i < ITEMS; i += ADJACENT) {
            if (!live(i, rows)) continue;
            const size_t at = index(rows.first, i);
            adjacent_bits(h + i).store(p.output + at);
            if (KEPT == Kept::CELLS && p.cells) {
                Adjacent<float> cells;
#pragma unroll
                for (int j = 0; j < ADJACENT; ++j) cells.x[j] = c[i + j][0];
                cells.store(p.cells + at);
            }
#pragma unroll
            for (int k = 0; KEPT == Kept::ALL_STATES && k < OTHERS; ++k) bits_beside(i, k).store(p.c[k] + at);
            if constexpr (KEEPS_GATES) {
                if (KEPT == Kept::RECURRENT) bits_beside(i, 0).store(p.candidates + at);
                Scalar* gates = p.gates + index(rows.first, i, INPUTS);
#pragma unroll
                for (int g = 0; g < INPUTS; ++g) projected[i / ADJACENT][g].store(gates + g * CHANNELS);
            }
        }
    }

    // The states k beside h of item i and those adjacent to it, for storing.
    __device__ Adjacent<Pack> bits_beside(int i, int k) const {
        float x[ADJACENT];
#pragma unroll
        for (int j = 0; j < ADJACENT; ++j) x[j] = c[i + j][k];
        return adjacent_bits(x);
    }

    // Calls a function with each operand of a step that an item needs, and with whether its state is reset before the
    // next step; each_result() with each result of the step.
    template <typename Function> __device__ void each_operand(Function visit) {
        each_projected(visit);
        float flag = resets.before[0] ? 1.0f : 0.0f;
        if (RESETS) visit(flag);
        resets.before[0] = flag != 0;
    }
    template <typename Function> __device__ void each_result(Function visit) {
        visit(h[0]);
#pragma unroll
        for (int k = 0; k < (KEEPS_GATES ? BESIDE_H : OTHERS); ++k) visit(c[0][k]);
        if (KEEPS_GATES) each_projected(visit);
    }
    template <typename Function> __device__ void each_projected(Function visit) {
#pragma unroll
        for (int g = 0; g < INPUTS; ++g) {
            float x = widen(projected[0][g].x[0]);
            visit(x);
            projected[0][g].x[0] = x;
        }
    }

    __device__ void prefetch_step(const Rows& rows, const char* state) const {
        each_sector([&](int s, int u) {
            if (!STATE_BUFFERS) prefetch(state + state_offset(u * sizeof(Scalar), s));
            if (sequence + s >= rows.live) return;
            const Scalar* pre = p.pre + (rows.first + sequence + s) * (INPUTS * CHANNELS) + u;
#pragma unroll
            for (int g = 0; g < INPUTS; ++g) prefetch(pre + g * CHANNELS);
        });
    }

    __device__ void finish() const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (!owned(i)) continue;
            p.h_n[index(0, i)] = bits(h[i]);
#pragma unroll
            for (int k = 0; k < OTHERS; ++k) p.c_n[k][index(0, i)] = bits(c[i][k]);
        }
    }
};

// The first buffer of a group's states: in global memory or, with DISTRIBUTED, in the block's shared memory, to which
// all buffers are copied.
__device__ inline char* first_state(const Parameters& p, int group, void* shared) {
    if (!DISTRIBUTED) return p.states + size_t(group) * GROUP_BYTES;
    for (int i = threadIdx.x; i < SHARED_STATES / 16; i += THREADS)
        static_cast<uint4*>(shared)[i] = reinterpret_cast<const uint4*>(
            p.states + (i * 16 / GROUP_BYTES * size_t(p.groups) + group) * GROUP_BYTES)[i % (GROUP_BYTES / 16)];
    return static_cast<char*>(shared);
}

#if BLOCK_GROUPS == 1 && !SHARES_WORK  // else the kernel is in forward_ping_pong.cu or gather.cu
// grid: BLOCKS blocks for each group of sequences, all resident at once
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) recur(const Launch launch) {
    const Parameters& p = launch.own();
    extern __shared__ uint4 shared[];
    const int block = blockIdx.x % BLOCKS, group = group_of(p);

    float* all_sums = reinterpret_cast<float*>(shared);   // double-buffered by the step's parity, if there is room
    uint4* states = shared + SUM_BUFFERS * SUMS / 4;
    Product product(p, block, states + SHARED_STATES / 16);
    const Block own{in_register(block * UNITS), in_register(group * p.columns), in_register(sequences_of(p)),
                    in_register(int(threadIdx.x))};
    Units units(p, product, block, own);
    Timeout timeout(p.failure);
    const size_t stride = in_register(DISTRIBUTED ? size_t(GROUP_BYTES) : size_t(p.groups) * GROUP_BYTES);
    char* state = first_state(p, group, states);
    sync_if_clustered();

    Rows rows(p, step_of(p, 0));
    for (int iteration = 0; iteration < p.steps; ++iteration) {
        // While the state is in transit, the last step's results are written and the next inputs are loaded.
        if (iteration) units.write(rows);
        units.zero_reset_states();
        rows = Rows(p, step_of(p, iteration));
        units.fetch(rows);
        if (iteration + PREFETCH < p.steps)
            units.prefetch_step(Rows(p, step_of(p, iteration + PREFETCH)), state + (PREFETCH + 1) * stride);
        units.pause<PAUSE>();
        product.start_load(state, iteration);
        units.resets.look_up(p, units, iteration + 1);
        float* sums = all_sums + iteration % SUM_BUFFERS * SUMS;
        product(sums, timeout);
        __syncthreads();
        state += to_next_buffer(iteration) * ptrdiff_t(stride);
        units.update(rows, product, sums, state, iteration);
        units.wait_for_update();
    }
    units.write(rows);
    units.finish();
    sync_if_clustered();
}
#endif
