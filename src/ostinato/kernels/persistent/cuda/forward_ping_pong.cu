// The forward kernel for two groups in turn; see ping_pong.cuh.

// grid: BLOCKS blocks for each two groups of COLUMNS sequences, all resident at once
extern "C" __global__ void __launch_bounds__(BLOCK_GROUPS * THREADS, 1) recur(const Launch launch) {
    const Parameters& p = launch.own();
    extern __shared__ uint4 shared[];
    const int block = blockIdx.x % BLOCKS, group = p.first / COLUMNS + blockIdx.x / BLOCKS * BLOCK_GROUPS;
    char* state = p.states + size_t(group) * GROUP_BYTES;
    float* sums = reinterpret_cast<float*>(shared);
    if (threadIdx.x < THREADS) return multiply_ping_pong(p, block, shared + BLOCK_GROUPS * SUMS / 4, sums, state);

    release_registers();
    const Product product{};
    Units units(p, product, block, own_items(p, block, group));
    Rows rows(p, step_of(p, 0));
    const auto prepare = [&](int iteration, const char* state) {
        if (iteration) units.write(rows);
        units.zero_reset_states();
        rows = Rows(p, step_of(p, iteration));
        units.fetch(rows);
        if (iteration + PREFETCH < p.steps)
            units.prefetch_step(Rows(p, step_of(p, iteration + PREFETCH)),
                                state + (PREFETCH + 1) * size_t(p.groups) * GROUP_BYTES);
        units.resets.look_up(p, units, iteration + 1);
    };
    const auto update = [&](int iteration, const float* sums, char* next) {
        units.update(rows, product, sums, next, iteration);
    };
    update_ping_pong(p, sums, state + own_turn() * GROUP_BYTES, update, prepare);
    units.write(rows);
    units.finish();
}
