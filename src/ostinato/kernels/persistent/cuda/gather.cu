// The forward kernel within clusters whose blocks have few units, in which warps share the elementwise work, as in
// scatter.cu.
//
// A warp that updates units would otherwise write the step's results and load the next operands while all others wait
// for its share of the product.  So some threads only update units, others load the operands from global memory, and
// others write the results.  They pass numbers through shared memory, in two buffers used in turn; the barrier after
// each product separates the writes to a buffer from its reads.

constexpr int LANES = (UNITS * COLUMNS + 31) / 32 * 32;       // threads of a part, one for each item
constexpr int OPERANDS = INPUTS + RESETS;                     // of an item at a step: see each_operand()
constexpr int RESULTS = 1 + (KEEPS_GATES ? BESIDE_H + INPUTS : OTHERS);  // of an item at a step: see each_result()
constexpr int HANDED = 2 * (OPERANDS + RESULTS) * LANES * 4;  // bytes of the buffers
constexpr bool WRITES_APART = 3 * LANES <= THREADS;           // else those that load operands also write
static_assert(2 * LANES <= THREADS, "an item for each thread of a part");

// grid: BLOCKS blocks for each group of sequences, all resident at once
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) recur(const Launch launch) {
    const Parameters& p = launch.own();
    extern __shared__ uint4 shared[];
    const int block = blockIdx.x % BLOCKS, group = group_of(p);
    const int part = threadIdx.x / LANES, thread = threadIdx.x % LANES;
    const bool updates = part == 0, carries = part == 1, writes = part == 1 + WRITES_APART;

    float* all_sums = reinterpret_cast<float*>(shared);   // double-buffered by the step's parity, if there is room
    uint4* states = shared + SUM_BUFFERS * SUMS / 4;
    float* operands = reinterpret_cast<float*>(states + SHARED_STATES / 16) + thread;
    float* results = operands + 2 * OPERANDS * LANES;
    Product product(p, block, states + SHARED_STATES / 16 + HANDED / 16);
    const Block own{in_register(block * UNITS), in_register(group * p.columns), in_register(sequences_of(p)),
                    in_register(thread)};
    Units units(p, product, block, own), carrier = units;
    Timeout timeout(p.failure);
    char* state = reinterpret_cast<char*>(states);
    Copies copies(state + GROUP_BYTES + state_offset((own.unit + own.unit_of(0)) * sizeof(Scalar), own.sequence_of(0)));
    first_state(p, group, states);  // copies the initial buffers to `states`

    const auto fetch = [&](int iteration) {
        if (iteration >= p.steps) return;
        carrier.resets.look_up(p, carrier, iteration + 1);  // first: it would wait for the other loads, too
        carrier.fetch(Rows(p, step_of(p, iteration)));
    };
    const auto hand_operands = [&](int iteration) {
        float* slot = operands + iteration % 2 * OPERANDS * LANES;
        carrier.each_operand([&](float& x) { *slot = x, slot += LANES; });
    };
    const auto take_operands = [&](int iteration) {
        const float* slot = operands + iteration % 2 * OPERANDS * LANES;
        units.each_operand([&](float& x) { x = *slot, slot += LANES; });
    };
    const auto hand_results = [&](int iteration) {
        float* slot = results + iteration % 2 * RESULTS * LANES;
        units.each_result([&](float& x) { *slot = x, slot += LANES; });
    };
    const auto write = [&](int iteration) {
        const float* slot = results + iteration % 2 * RESULTS * LANES;
        carrier.each_result([&](float& x) { x = *slot, slot += LANES; });
        carrier.write(Rows(p, step_of(p, iteration)));
    };

    if (carries) {
        fetch(0);
        hand_operands(0);
        fetch(1);
        hand_operands(1);
        fetch(2);
    }
    sync_if_clustered();
    if (updates) {
        units.zero_reset_states();
        take_operands(0);
    }
    for (int iteration = 0; iteration < p.steps; ++iteration) {
        product.start_load(state + iteration % 2 * GROUP_BYTES, iteration);
        float* sums = all_sums + iteration % SUM_BUFFERS * SUMS;
        product(sums, timeout);
        __syncthreads();
        if (updates) {
            units.update(Rows(p, step_of(p, iteration)), product, sums, copies, iteration);
            copies.move(iteration % 2 ? GROUP_BYTES : -GROUP_BYTES);
            hand_results(iteration);
            units.zero_reset_states();
            take_operands(iteration + 1);
            continue;
        }
        if (carries) hand_operands(iteration + 2);
        if (writes && iteration) write(iteration - 1);
        if (carries) fetch(iteration + 3);
        if (Block::has_sectors() && iteration + PREFETCH < p.steps)
            units.prefetch_step(Rows(p, step_of(p, iteration + PREFETCH)), nullptr);
    }
    __syncthreads();
    if (writes) write(p.steps - 1);
    if (updates) units.finish();
    sync_if_clustered();
}
