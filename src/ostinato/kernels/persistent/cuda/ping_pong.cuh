// Two groups of sequences in turn, as ping-pong GEMMs take two tiles: half of a block's warps multiply what the one
// exchanges, then what the other does; the weights serve both.  Of the other warps each half updates the units of one
// group.  So the elementwise work of a group, and the way of what it exchanges to other blocks, are hidden behind the
// product of the other.
//
// Warps that update need few registers, and give the others up to those that multiply.

// Barriers, numbered as in hardware, of the warps that multiply with those that update a group: its sums are written,
// and have been read; and of the first among themselves.
enum NamedBarrier { WRITTEN = 1, READ = WRITTEN + BLOCK_GROUPS, BEGUN = READ + BLOCK_GROUPS };
static_assert(BEGUN < CopiedOperand::ALL_HAVE_READ && CopiedOperand::ALL_HAVE_READ + PARTS <= 16, "there are sixteen");

__device__ inline void sync_at(NamedBarrier barrier, int turn) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier + turn), "n"(THREADS + OWNERS) : "memory");
}
__device__ inline void arrive_at(NamedBarrier barrier, int turn) {
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier + turn), "n"(THREADS + OWNERS) : "memory");
}

// The units and sequences that an updating thread has, given the first of the block's groups.
__device__ inline Block own_items(const Parameters& p, int block, int first_group) {
    const int sequence = (first_group + own_turn()) * COLUMNS;
    return {block * UNITS, sequence, min(COLUMNS, p.batch - sequence), int(own_thread())};
}

// What the updating threads keep of 256 registers for each two threads.
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(256 - REGISTERS));
}

// Multiplies in all steps.  Before the first, `state` is what the first group exchanges, or the block's slice of it.
// The next state is loaded last.  Where it was before the sums were stored, or as soon as the block had published
// its share, into a buffer of its own, so many loads lacked words, each of which costs a copy and a product, that steps
// took 1.1 to 1.8 times as long (H200).
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

// Updates a group in all steps.  Before the first, `state` is what it exchanges.  update(step, sums, next state) ends a
// step; prepare(step, state) does what can be done before the sums are there.
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
