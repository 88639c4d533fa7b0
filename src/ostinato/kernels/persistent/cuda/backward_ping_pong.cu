// The backward kernel for two groups in turn; see ping_pong.cuh.

// grid: BLOCKS blocks for each two groups of COLUMNS sequences, all resident at once
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(BLOCK_GROUPS * THREADS, 1) recur(const Launch launch) {
    const Parameters& p = launch.own();
    extern __shared__ uint4 shared[];
    const int block = blockIdx.x % BLOCKS, group = p.first / COLUMNS + blockIdx.x / BLOCKS * BLOCK_GROUPS;
    char* state = p.states + size_t(group) * GROUP_BYTES;
    float* sums = reinterpret_cast<float*>(shared);
    uint4 *mail = shared + BLOCK_GROUPS * SUMS / 4, *weights = mail + BLOCK_GROUPS * Mailbox::WORDS / 2;
    Mailbox mailbox(block, mail);
    if (threadIdx.x < THREADS) {
        multiply_ping_pong(p, block, weights, sums, state + block % CLUSTER * SLICE_BYTES);
    } else {
        release_registers();
        const Product product{};
        Units units(p, product, block, own_items(p, block, group));
        Sender sender(p, product, mailbox, block);
        Timeout timeout(p.failure);

        Rows rows = units.fetch(0), next = rows;
        units.resets.look_up(p, units, 0);
        units.differentiate(rows);
        if (p.steps > 1) next = units.fetch(1);
        units.resets.look_up(p, units, 1);
        const auto prepare = [&](int iteration, char* state) {
            const Rows written = rows;
            rows = next;
            units.differentiate(rows);
            if (iteration + 2 < p.steps) next = units.fetch(iteration + 2);
            if (iteration + PREFETCH < p.steps)
                units.prefetch_step(Rows(p, step_of(p, iteration + PREFETCH)));
            units.resets.look_up(p, units, iteration + 2);
            units.write(written);
            units.write_totals(iteration);
            units.erase(state + to_opposite_buffer(iteration) * ptrdiff_t(p.groups) * GROUP_BYTES);
        };
        const auto update = [&](int iteration, const float* sums, char* state) {
            sender.send(product, sums, units.sequences, iteration);
            units.add(product, sums, mailbox, iteration, timeout);
            if (iteration + 1 < p.steps) units.update(state, iteration + 1);
        };
        state += own_turn() * GROUP_BYTES;
        units.update(state, 0);
        update_ping_pong(p, sums, state, update, prepare);
        units.write_states();
    }
    sync_if_clustered();
}
