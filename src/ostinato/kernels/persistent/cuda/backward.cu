// Backpropagation through time of one layer and direction: all steps in one launch, with the recurrent weights kept on
// chip.
//
// At every step, Units computes the gradients of the block's own gates and publishes them; Product multiplies the
// transposed recurrent matrix with the gate gradients of all units, which gives the gradients of the previous states.
// The pre-activations are those that the forward pass has saved, rounded to the layer's dtype; an RNN needs only its
// states.  Gradients of states stay in float32.
//
// A step's other operands are loaded two steps ahead, and turned into derivatives one step ahead, while the blocks wait
// for each other.

constexpr int PREFETCH = 6;                          // steps in advance
constexpr int SUMMED = 64;                           // steps after which a thread's sums are added to those in memory
constexpr int GRADIENTS = Cell::GRADIENTS;           // of a unit, written at each step
// The results of Cell::pull() that are summed over steps: the GRADIENTS, for biases, or the parameters', which follow.
constexpr int FIRST_SUMMED = Cell::HAS_BIASES ? 0 : GRADIENTS;
constexpr int TOTALS = Cell::HAS_BIASES ? GRADIENTS : Cell::PARAMETERS, PULLED = FIRST_SUMMED + TOTALS;
// States that have gradients at each step, and whose values before it are read: h and, of those beside it, RETURNED.
constexpr int RETURNED = KEPT == Kept::ALL_STATES ? OTHERS : 0, OUTPUTS = 1 + RETURNED;

// The distance from a step's buffer to the one that is half of all buffers away.
__device__ inline int to_opposite_buffer(int step) {
    return step % STATE_BUFFERS < STATE_BUFFERS / 2 ? STATE_BUFFERS / 2 : -(STATE_BUFFERS / 2);
}

// The type in which gradients are summed: float32 over SUMMED steps, or over all steps if the cluster is the whole
// group; there float64 if products are exact, which takes the warps that write less time than to test for the end of
// SUMMED steps.
template <bool EXACT_IN_CLUSTER> struct Total { using type = float; };
template <> struct Total<true> { using type = double; };

struct Units : Block {
    const Parameters& p;
    float dh[ITEMS], dc[ITEMS][BESIDE_H];  // gradients of the states after the step that is processed next
    float d[ITEMS][PULLED];                // gradients of the cell's arguments at this step, and of its parameters
    using Sum = typename Total<SCATTERS && EXACT>::type;
    Sum totals[UNITS_OF_THREAD][TOTALS + 1] = {};  // sums of the last TOTALS of `d`, over steps and the items of a unit
    float parameter[UNITS_OF_THREAD][Cell::PARAMETERS + 1];
    Span spans[ITEMS] = {};
    // Of the step that is processed next, computed before the gradients of its states arrive:
    float slope[ITEMS][Cell::DERIVATIVES + 1];
    float grad_outputs[ITEMS][OUTPUTS];     // the gradients of its outputs
    bool takes_step[ITEMS];                 // whether the sequence has the step
    bool begins[ITEMS] = {}, began[ITEMS];  // whether the states before it, and before the last step, are reset
    // Loaded operands, with adjacent numbers packed: unpacking them would wait for the loads.
    static constexpr int LOADS = ITEMS / ADJACENT;
    Adjacent<Scalar>::Bits pre[LOADS][INPUTS], grad[LOADS][OUTPUTS], candidate[LOADS];
    Adjacent<Scalar>::Bits before[LOADS], c_before[LOADS][RETURNED + 1];
    Adjacent<float> cell[LOADS], cell_before[LOADS];
    Resets resets;  // before the step that is differentiated next

    __device__ Units(const Parameters& p, const Product& product, int block, Block owned_by) : Block(owned_by), p(p) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            dh[i] = 0;
#pragma unroll
            for (int k = 0; k < BESIDE_H; ++k) dc[i][k] = 0;
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) grad[i / ADJACENT][k] = {};
            if (!owned(i)) continue;
#pragma unroll
            for (int k = 0; k < Cell::PARAMETERS; ++k)
                parameter[own_unit(i)][k] = p.parameters[k * CHANNELS + unit + unit_of(i)];
            spans[i] = product.span(p, block, block % CLUSTER * UNITS + unit_of(i));
            if (p.grad_h_n) dh[i] = widen(p.grad_h_n[index(0, i)]);
#pragma unroll
            for (int k = 0; k < OTHERS; ++k)
                if (p.grad_c_n[k]) dc[i][k] = widen(p.grad_c_n[k][index(0, i)]);
        }
    }

    // Starts to load the operands of an iteration's step, and returns its rows.
    __device__ Rows fetch(int iteration) {
        const bool has_earlier = iteration + 1 < p.steps;  // whether there is an earlier step
        const Rows rows(p, step_of(p, iteration)), earlier(p, step_of(p, has_earlier ? iteration + 1 : iteration));
#pragma unroll
        for (int i = 0; i < ITEMS; i += ADJACENT) {
            if (!live(i, rows)) continue;
            const int k = i / ADJACENT;
            const size_t at = index(rows.first, i);
            const Scalar* gates = p.pre + index(rows.first, i, INPUTS);
#pragma unroll
            for (int g = 0; g < INPUTS; ++g) pre[k][g] = Adjacent<Scalar>::bits_once(gates + g * CHANNELS);
            if (p.grad_output) grad[k][0] = Adjacent<Scalar>::bits_once(p.grad_output + at);
            if (KEPT == Kept::ALL_STATES) before[k] = Adjacent<Scalar>::bits_once(p.before + at);
#pragma unroll
            for (int n = 0; n < RETURNED; ++n) {
                c_before[k][n] = Adjacent<Scalar>::bits_once(p.c_before[n] + at);
                if (p.grad_c[n]) grad[k][1 + n] = Adjacent<Scalar>::bits_once(p.grad_c[n] + at);
            }
            if (KEPT == Kept::RECURRENT) {
                candidate[k] = Adjacent<Scalar>::bits_once(p.candidate + at);
                const bool begins_here = !has_earlier || !live(i, earlier);
                const Scalar* state = begins_here ? p.h0 : p.h;
                before[k] = {};
                if (state) before[k] = Adjacent<Scalar>::bits_once(state + index(begins_here ? 0 : earlier.first, i));
            }
            if (KEPT == Kept::CELLS) {
                cell[k] = Adjacent<float>::load(p.cells + at);
                cell_before[k] = {};
                if (has_earlier && live(i, earlier)) {
                    cell_before[k] = Adjacent<float>::load(p.cells + index(earlier.first, i));
                } else if (p.c0[0]) {
#pragma unroll
                    for (int j = 0; j < ADJACENT; ++j) cell_before[k].x[j] = widen(p.c0[0][index(0, i + j)]);
                }
            }
        }
        return rows;
    }

    // Computes the derivatives of the step whose operands were loaded last.
    __device__ void differentiate(const Rows& rows) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (idle(i)) continue;
            const int k = i / ADJACENT, j = i % ADJACENT;
            takes_step[i] = live(i, rows), begins[i] = resets.before[k];
            const auto unpacked = [&](Adjacent<Scalar>::Bits loaded) {
                return widen(Adjacent<Scalar>::of(loaded).x[j]);
            };
            float x[INPUTS], states_before[1 + BESIDE_H] = {}, after[2] = {};
#pragma unroll
            for (int g = 0; g < INPUTS; ++g) x[g] = unpacked(pre[k][g]);
            if (KEPT == Kept::RECURRENT) {
                states_before[0] = begins[i] ? 0 : unpacked(before[k]);
                after[1] = unpacked(candidate[k]);
            }
            if (KEPT == Kept::CELLS) {
                states_before[1] = begins[i] ? 0 : cell_before[k].x[j];
                after[1] = cell[k].x[j];
            }
            if (KEPT == Kept::ALL_STATES) states_before[0] = unpacked(before[k]);  // zero where a sequence begins
#pragma unroll
            for (int n = 0; n < RETURNED; ++n) states_before[1 + n] = unpacked(c_before[k][n]);
            Cell::differentiate(states_before, after, x, parameter[own_unit(i)], slope[i]);
#pragma unroll
            for (int output = 0; output < OUTPUTS; ++output) grad_outputs[i][output] = unpacked(grad[k][output]);
        }
    }

    // Calls a function with each number that update() needs from differentiate().
    template <typename Function> __device__ void each_derivative(Function visit) {
        const auto visit_flag = [&](bool& x) {
            float flag = x ? 1.0f : 0.0f;
            visit(flag);
            x = flag != 0;
        };
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
            for (int k = 0; k < Cell::DERIVATIVES; ++k) visit(slope[i][k]);
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) visit(grad_outputs[i][k]);
            if (RESETS) visit_flag(begins[i]);
            if (OFFSETS) visit_flag(takes_step[i]);
        }
    }

    __device__ static int gate_offset(int unit, int sequence, int g) {
        return state_offset((g * PITCH + unit) * sizeof(Scalar), sequence);
    }

    // Computes and publishes the gradients of a step.  If a sequence does not have it, its gradients stay as they are.
    __device__ void update(char* state, int iteration) {
#pragma unroll
        for (int first = 0; first < ITEMS; first += ADJACENT) {
            if (idle(first)) continue;
            float published[GATES][ADJACENT];
#pragma unroll
            for (int j = 0; j < ADJACENT; ++j) {
                const int i = first + j;
                const bool passes = OFFSETS && !takes_step[i];
                float total[1 + BESIDE_H] = {dh[i] + grad_outputs[i][0]}, of_states[1 + BESIDE_H];
#pragma unroll
                for (int n = 0; n < OTHERS; ++n)
                    total[1 + n] = n < RETURNED ? dc[i][n] + grad_outputs[i][n < RETURNED ? 1 + n : 0] : dc[i][n];
                Cell::pull(slope[i], total, of_states, d[i]);
                dh[i] = passes ? dh[i] : of_states[0];
#pragma unroll
                for (int n = 0; n < OTHERS; ++n) dc[i][n] = passes ? dc[i][n] : of_states[1 + n];
                began[i] = begins[i];
#pragma unroll
                for (int g = 0; g < GATES; ++g) published[g][j] = passes ? 0 : d[i][Cell::of_product(g)];
#pragma unroll
                for (int g = 0; g < GATES; ++g) published[g][j] = owned(i) ? published[g][j] : 0;
            }
#pragma unroll
            for (int g = 0; g < GATES; ++g) {
                if constexpr (SCATTERS) {
                    const int offset = slice_offset((g * UNITS + unit_of(first)) * sizeof(Scalar), sequence_of(first));
                    if (owned(first)) *reinterpret_cast<Pack*>(state + offset) = operand_bits(published[g][0]);
                } else {
                    publish(published[g], in_word(first), begins_word(first),
                            state + gate_offset(unit + unit_of(first), sequence_of(first), g), iteration);
                }
            }
        }
    }

    // Makes the words that the block has published in this buffer absent again.
    __device__ void erase(char* state) const {
        if (TAGGED) return;
#pragma unroll
        for (int i = 0; i < ITEMS; i += ADJACENT) {
#pragma unroll
            for (int g = 0; g < GATES; ++g)
                store_if(begins_word(i), state + gate_offset(unit + unit_of(i), sequence_of(i), g), ABSENT);
        }
    }

    // Writes the gradients of a step, and adds them to the sums over steps.
    __device__ void write(const Rows& rows) {
#pragma unroll
        for (int i = 0; i < ITEMS; i += ADJACENT) {
            if (!live(i, rows)) continue;
            Pack* grads = p.grads + index(rows.first, i, GRADIENTS);
#pragma unroll
            for (int g = 0; g < GRADIENTS; ++g) {
                float of_gate[ADJACENT];
#pragma unroll
                for (int j = 0; j < ADJACENT; ++j) of_gate[j] = d[i + j][g];
                adjacent_bits(of_gate).store(grads + g * CHANNELS);
            }
#pragma unroll
            for (int g = 0; g < TOTALS; ++g) {
#pragma unroll
                for (int j = 0; j < ADJACENT; ++j) totals[own_unit(i + j)][g] += d[i + j][FIRST_SUMMED + g];
            }
        }
    }

    // Adds the products to the gradients of the previous states.
    __device__ void add(const Product& product, const float* sums, const Mailbox& mailbox, int step,
                        Timeout& timeout) {
        if (idle(0)) return;
        Adjacent<float> sum[LOADS];
#pragma unroll
        for (int i = 0; i < ITEMS; i += ADJACENT)
            sum[i / ADJACENT] = product.sum(sums, spans[i], mailbox.rank * UNITS + unit_of(i), sequence_of_sums(i));
        mailbox.add(sum, *this, step, timeout);
#pragma unroll
        for (int i = 0; i < ITEMS; i += ADJACENT) {
            if (!owned(i)) continue;
#pragma unroll
            for (int j = 0; j < ADJACENT; ++j) {
                dh[i + j] += sum[i / ADJACENT].x[j];
                if (!began[i + j]) continue;
                dh[i + j] = 0;
#pragma unroll
                for (int k = 0; k < BESIDE_H; ++k) dc[i + j][k] = 0;
            }
        }
    }

    __device__ void prefetch_step(const Rows& rows) const {
        each_sector([&](int s, int u) {
            const size_t row = rows.first + sequence + s, at = row * CHANNELS + u;
            if (sequence + s >= rows.live) return;
#pragma unroll
            for (int g = 0; g < INPUTS; ++g) prefetch(p.pre + row * (INPUTS * CHANNELS) + g * CHANNELS + u);
            if (p.grad_output) prefetch(p.grad_output + at);
            if (KEPT == Kept::ALL_STATES) prefetch(p.before + at);
#pragma unroll
            for (int n = 0; n < RETURNED; ++n) prefetch(p.c_before[n] + at);
            if (KEPT == Kept::RECURRENT) prefetch(p.candidate + at), prefetch(p.h + at);
            if (KEPT == Kept::CELLS) prefetch(p.cells + at);
        });
    }

    __device__ void write_states() const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (!owned(i)) continue;
            p.grad_h0[index(0, i)] = bits(dh[i]);
#pragma unroll
            for (int k = 0; k < OTHERS; ++k) p.grad_c0[k][index(0, i)] = bits(dc[i][k]);
        }
    }

    // Every SUMMED steps, adds the sums over these to the sums in memory, so that rounding errors do not grow with the
    // number of all steps.  With SCATTERS, called only after the last step, to write the sums over all: see Total.
    __device__ void write_totals(int iteration) {
        if (!SCATTERS && iteration % SUMMED < SUMMED - 1 && iteration + 1 < p.steps) return;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (!owned(i)) continue;
#pragma unroll
            for (int g = 0; g < TOTALS; ++g) {
                Sum& latest = totals[own_unit(i)][g];
                float* all = p.totals + index(0, i, TOTALS) + g * CHANNELS;
                if (SCATTERS || iteration < SUMMED) *all = latest;
                else atomicAdd(all, latest);  // unlike a load, nothing waits for it
                latest = 0;
            }
        }
    }
};

#if BLOCK_GROUPS == 1 && !DISTRIBUTED  // else the kernel is in backward_ping_pong.cu or scatter.cu
// grid: BLOCKS blocks for each group of sequences, all resident at once
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) recur(const Launch launch) {
    const Parameters& p = launch.own();
    extern __shared__ uint4 shared[];
    const int block = blockIdx.x % BLOCKS, group = group_of(p), sequences = sequences_of(p);

    float* all_sums = reinterpret_cast<float*>(shared);   // double-buffered by the step's parity, if there is room
    uint4 *mail = shared + SUM_BUFFERS * SUMS / 4, *rest = mail + Mailbox::WORDS / 2;
    Mailbox mailbox(block, mail);
    Product product(p, block, rest);
    Units units(p, product, block, Block{block * UNITS, group * p.columns, sequences, int(threadIdx.x)});
    Sender sender(p, product, mailbox, block);
    Timeout timeout(p.failure);
    const size_t stride = size_t(p.groups) * GROUP_BYTES;
    char* state = p.states + size_t(group) * GROUP_BYTES;

    Rows rows = units.fetch(0), next = rows;
    units.resets.look_up(p, units, 0);
    units.differentiate(rows);
    if (p.steps > 1) next = units.fetch(1);
    units.resets.look_up(p, units, 1);
    for (int iteration = 0; iteration < p.steps; ++iteration) {
        units.update(state, iteration);
        units.wait_for_update();
        const auto start_load = [&] { product.start_load(state + block % CLUSTER * SLICE_BYTES, iteration); };
        const Rows written = rows;
        rows = next;
        units.differentiate(rows);
        if (LOADS_EARLY) start_load();
        if (iteration + 2 < p.steps) next = units.fetch(iteration + 2);
        if (iteration + PREFETCH < p.steps)
            units.prefetch_step(Rows(p, step_of(p, iteration + PREFETCH)));
        units.pause<PAUSE>();
        if (!LOADS_EARLY) start_load();
        units.resets.look_up(p, units, iteration + 2);
        units.erase(state + to_opposite_buffer(iteration) * ptrdiff_t(stride));
        state += to_next_buffer(iteration) * ptrdiff_t(stride);
        units.write(written);
        units.write_totals(iteration);
        float* sums = all_sums + iteration % SUM_BUFFERS * SUMS;
        product(sums, timeout);
        __syncthreads();
        sender.send(product, sums, sequences, iteration);
        units.add(product, sums, mailbox, iteration, timeout);
    }
    units.write_states();
    sync_if_clustered();
}
#endif
