// The backward kernel within clusters, see scatter.cuh, in which warps share the elementwise work.
//
// All of that work would take one warp longer than the exchange.  So some threads only update units, others compute the
// derivatives of the step after the next, and others write the last step's gradients.  They pass numbers through shared
// memory, in two buffers used in turn; the barrier after each update separates the writes to a buffer from its reads.

constexpr int LANES = (UNITS * COLUMNS + 31) / 32 * 32;                      // threads of a part, one for each item
constexpr int DERIVATIVES = Cell::DERIVATIVES + OUTPUTS + RESETS + OFFSETS;  // of an item: see each_derivative()
constexpr bool WRITES_APART = 3 * LANES <= THREADS;                          // else those that differentiate also write
static_assert(2 * LANES <= THREADS, "an item for each thread of a part");

// grid: BLOCKS blocks for each group of sequences, all resident at once
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) recur(const Launch launch) {
    const Parameters& p = launch.own();
    extern __shared__ uint4 shared[];
    const int block = blockIdx.x % BLOCKS, group = group_of(p), sequences = sequences_of(p);
    const int part = threadIdx.x / LANES, thread = threadIdx.x % LANES;
    const bool updates = part == 0, differentiates = part == 1, writes = part == 1 + WRITES_APART;

    uint4* states = shared + Mailbox::WORDS / 2;
    float* derivatives = reinterpret_cast<float*>(states + SHARED_STATES / 16) + thread;
    float* gradients = derivatives + 2 * DERIVATIVES * LANES;
    Mailbox mailbox(block, shared);
    Product product(p, block, states);
    Units units(p, product, block, Block{block * UNITS, group * p.columns, sequences, thread});
    const Sender sender(mailbox);
    Timeout timeout(p.failure);
    const auto fetch = [&](int iteration) {
        if (iteration >= p.steps) return;
        units.resets.load(p, units, iteration);
        units.fetch(iteration);
    };
    const auto differentiate = [&](int iteration) {
        if (iteration >= p.steps) return;
        units.resets.take();
        units.differentiate(Rows(p, step_of(p, iteration)));
        float* slot = derivatives + iteration % 2 * DERIVATIVES * LANES;
        units.each_derivative([&](float& x) { *slot = x, slot += LANES; });
    };
    const auto take_derivatives = [&](int iteration) {
        const float* slot = derivatives + iteration % 2 * DERIVATIVES * LANES;
        units.each_derivative([&](float& x) { x = *slot, slot += LANES; });
    };

    if (differentiates) {
        fetch(0);
        differentiate(0);
        fetch(1);
        differentiate(1);
        fetch(2);
    }
    __syncthreads();
    const auto gates_of = [&](int iteration) { return reinterpret_cast<char*>(states) + iteration % 2 * SLICE_BYTES; };
    const auto gradients_of = [&](int iteration) { return gradients + iteration % 2 * PULLED * LANES; };
    const auto multiply = [&](int iteration) {
        __syncthreads();
        product(gates_of(iteration));
        sender.send(product, sequences, iteration);
    };
    if (updates) {  // in a loop of its own, as the work of the others would cost it registers and branches
        take_derivatives(0);
        for (int iteration = 0; iteration < p.steps; ++iteration) {
            units.update(gates_of(iteration), iteration);
#pragma unroll
            for (int g = 0; g < PULLED; ++g) gradients_of(iteration)[g * LANES] = units.d[0][g];
            multiply(iteration);
            take_derivatives(iteration + 1);
            units.add(product, nullptr, mailbox, iteration, timeout);
        }
        units.write_states();
    } else {
        for (int iteration = 0; iteration < p.steps; ++iteration) {
            multiply(iteration);
            if (differentiates) {
                differentiate(iteration + 2);
                fetch(iteration + 3);
            }
            if (writes) {
#pragma unroll
                for (int g = 0; g < PULLED; ++g) units.d[0][g] = gradients_of(iteration)[g * LANES];
                units.write(Rows(p, step_of(p, iteration)));
            }
            if (Block::has_sectors() && iteration + PREFETCH < p.steps)
                units.prefetch_step(Rows(p, step_of(p, iteration + PREFETCH)));
        }
        if (writes) units.write_totals(p.steps - 1);
    }
    sync_if_clustered();
}
