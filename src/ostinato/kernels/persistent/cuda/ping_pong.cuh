// Two groups of sequences in turn, as ping-pong GEMMs alternate between two tiles.  Half of a block's warps only
// multiply, the state of the one group and then of the other, with weights that serve both.  The other warps only
// update, half of them the units of one group and half those of the other.  So the elementwise work of a group and the
// transit of its state are hidden behind the product of the other group.
//
// Warps that update need few registers, and release the others to the warps that multiply.

// Named barriers of the hardware.  The warps that multiply and those that update a group wait for each other when the
// group's sums have been WRITTEN and when they have been READ; at BEGUN, the warps that multiply wait for each other.
enum NamedBarrier { WRITTEN = 1, READ = WRITTEN + BLOCK_GROUPS, BEGUN = READ + BLOCK_GROUPS };
static_assert(BEGUN < CopiedOperand::ALL_HAVE_READ && CopiedOperand::ALL_HAVE_READ + PARTS <= 16, "there are sixteen");

__device__ inline void sync_at(NamedBarrier barrier, int turn) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier + turn), "n"(THREADS + OWNERS) : "memory");
}
__device__ inline void arrive_at(NamedBarrier barrier, int turn) {
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier + turn), "n"(THREADS + OWNERS) : "memory");
}

// The units and sequences of an updating thread, given the first of the block's groups.
__device__ inline Block own_items(const Parameters& p, int block, int first_group) {
    const int sequence = (first_group + own_turn()) * COLUMNS;
    return {block * UNITS, sequence, min(COLUMNS, p.batch - sequence), int(own_thread())};
}

// Releases registers of the updating threads: one of them and one thread that multiplies have 256 together.
__device__ inline void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(256 - REGISTERS));
}

// Multiplies, in all steps and for both groups.  `state` is the first group's state before the first step, or the
// block's slice of it.  The next state is loaded last, after the sums have been stored.  If it was loaded before that,
// or into a buffer of its own as soon as the block had published its share, words were missing so often, each time at
// the cost of another copy and product, that steps took 1.1 to 1.8 times as long (H200).
__device__ inline void multiply_ping_pong(const Parameters& p, int block, uint4* weights, float* sums,
                                         const char* state) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
    Product product(p, block, weights);
    Timeout timeout(p.failure);
    asm volatile("bar.sync %0, %1;" :: "n"(int(BEGUN)), "n"(THREADS) : "memory");
    product.start_load(state, 0);
    for (int iteration = 0; iteration < p.steps; ++iteration) {
        const char* next = state + to_next_buffer(iteration) * ptrdiff_t(p.groups) * GROUP_BYTES;
#pragma unroll
        for (int turn = 0; turn < BLOCK_GROUPS; ++turn) {
            product(sums + turn * SUMS, timeout, [&] { if (iteration) sync_at(READ, turn); });
            arrive_at(WRITTEN, turn);
            const char* other = (turn ? next : state) + (1 - turn) * GROUP_BYTES;
            if (iteration + turn < p.steps) product.start_load(other, iteration + turn);
        }
        state = next;
    }
}

// Updates a group, in all steps.  `state` is its state before the first step.  In each iteration, prepare(iteration,
// state) does what does not need the sums, and update(iteration, sums, next state) the rest.
template <typename Update, typename Prepare>
__device__ void update_ping_pong(const Parameters& p, const float* sums, char* state, Update update, Prepare prepare) {
    const int turn = own_turn();
    for (int iteration = 0; iteration < p.steps; ++iteration) {
        prepare(iteration, state);
        state += to_next_buffer(iteration) * ptrdiff_t(p.groups) * GROUP_BYTES;
        sync_at(WRITTEN, turn);
        update(iteration, sums + turn * SUMS, state);
        if (iteration + 1 < p.steps) arrive_at(READ, turn);
    }
}
