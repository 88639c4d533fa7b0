// Wide batches of an LSTM: warpgroups (wgmma) multiply the recurrent matrix with COLUMNS sequences at once.
//
// Other kernels read the matrix from registers and shared memory again for every sixteen sequences or fewer.  Here two
// of a block's four warpgroups multiply 64 rows each, one updates units, and a warp of the last copies states into a
// ring of buffers in shared memory.  A block has BLOCK_GROUPS groups of COLUMNS sequences in ping-pong: the update of
// one group and the transit of its state to other blocks are hidden behind the product of the other.
//
// A team of CLUSTER blocks shares the product of the rows of all their units: each block copies and multiplies only its
// SLICE of the columns.  A sum goes to the block that updates its unit: forward, where a team is a cluster of two,
// through distributed shared memory; backward through L2, as clusters of eight would leave too many multiprocessors
// idle.  The last bit of a sum tells whether its step is odd, so a new sum differs from the one that it overwrites.
//
// A flag for each block and group counts how often the block's updating warps have published.  States have two buffers,
// sums only one.  That suffices: a block publishes only after it has read its sums, for which its team has copied all
// of the last state, and its team sends the next sums only after the block has published.
//
// Operands of wgmma consist of matrices of 8 rows by 16 bytes, one after the other.  The states of a block's units,
// COLUMNS * 32 adjacent bytes, have this layout in global memory, too: a copy needs no tensor map, and no address is
// swizzled.

constexpr int TILES = SLICE / UNITS;                 // of a block's columns; each tile is the units of one block
constexpr int WEIGHT_BYTES = 64 * UNITS * 2;         // of a tile and a warpgroup
constexpr int STATE_BYTES = COLUMNS * UNITS * 2;     // of a tile
constexpr int IN_SHARED = TILES - IN_REGISTERS;      // tiles whose weights are in shared memory, not in registers
// Tiles per copy: to issue a copy takes a warp some 250 cycles, but with 64 sequences there is room for few tiles.
constexpr int COPIED = COLUMNS == 32 ? 16 : 4, COPIES = (TILES + COPIED - 1) / COPIED;
constexpr int ROUNDS = COLUMNS / 32;                 // in each of which a thread updates two units of two sequences
constexpr int TERM = COLUMNS * UNITS / 4;            // float4 of a gate's sums, each of two units of two sequences
constexpr int TERMS = BACKWARD ? CLUSTER : CLUSTER * GATES;  // that a block receives at a step

// Shared memory, in this order: weights; cells, or their gradients; forward, the sums; the ring and its barriers.
constexpr int AT_CELLS = 2 * IN_SHARED * WEIGHT_BYTES, AT_SUMS = AT_CELLS + BLOCK_GROUPS * TERM * 16;
constexpr int AT_RING = AT_SUMS + (BACKWARD ? 0 : BLOCK_GROUPS * TERMS * TERM * 16), COPY_BYTES = COPIED * STATE_BYTES;
constexpr int SLOTS = (SHARED_BYTES - AT_RING - 16) / (COPY_BYTES + 16), AT_BARRIERS = AT_RING + SLOTS * COPY_BYTES;

static_assert(KEPT == Kept::CELLS && HIDDEN % 2 == 0);
static_assert(UNITS == 16 && BLOCKS * UNITS == PITCH && BLOCKS % CLUSTER == 0);
static_assert(CLUSTER * UNITS * (BACKWARD ? 1 : GATES) == 128, "two warpgroups multiply 64 rows each");
static_assert(TILES % 2 == 0 && TILES <= 64, "a lane polls two flags");
static_assert(SLOTS >= 2);

// Where a block is: its first group, its index among the blocks of a group, its team, and its rank in the team.
struct Place {
    int group, block, team, rank;

    __device__ explicit Place(const Parameters& p)
        : group(p.first / COLUMNS + blockIdx.x / BLOCKS * BLOCK_GROUPS), block(blockIdx.x % BLOCKS),
          team(block / CLUSTER), rank(block % CLUSTER) {}
    // The buffer that the blocks of a turn's group publish for the `count`th time; forward, number 0 is the initial
    // state.
    __device__ char* published(const Parameters& p, int turn, int count) const {
        return p.states + (size_t(count & 1) * p.groups + group + turn) * GROUP_BYTES;
    }
    __device__ unsigned* flags(const Parameters& p, int turn) const { return p.flags + (group + turn) * BLOCKS; }
    // The sums of a block's units, in the backward pass.
    __device__ float4* sums(const Parameters& p, int turn, int of_block) const {
        return p.sums + (size_t(group + turn) * BLOCKS + of_block) * (TERMS * TERM);
    }
};

// Slots of the ring in the order in which they are filled, each with the parity of its barriers' phase.
struct Slot {
    unsigned number = 0, parity = 0;

    __device__ void next() {
        if (++number == SLOTS) number = 0, parity ^= 1;
    }
    __device__ unsigned filled(char* shared) const { return shared_address(shared + AT_BARRIERS) + number * 8; }
    __device__ unsigned emptied(char* shared) const { return filled(shared) + SLOTS * 8; }
    __device__ void fill(char* shared, const char* from, int bytes) const {
        expect(filled(shared), bytes);
        start_copy(shared_address(shared + AT_RING) + number * COPY_BYTES, from, bytes, filled(shared));
    }
};

__device__ inline void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ inline void wait_for(unsigned barrier, unsigned parity) {
    while (!try_wait(barrier, parity)) {}
}
// Whether a warp that copies has timed out.
__device__ inline volatile int& failed(char* shared) {
    return *reinterpret_cast<volatile int*>(shared + AT_BARRIERS + 2 * SLOTS * 8);
}
__device__ inline void make_barriers(char* shared) {
    if (threadIdx.x) return;
    failed(shared) = 0;
    for (Slot slot; !slot.parity; slot.next()) {
        init_barrier(slot.filled(shared));
        init_barrier<WARPS>(slot.emptied(shared));  // by all warps that multiply
    }
    fence_barrier_init();
}

// How many of the tiles before this one have their weights in registers, and whether this one has: they are evenly
// spread.
__device__ constexpr int registers_before(int tile) { return tile * IN_REGISTERS / TILES; }
__device__ constexpr bool is_in_registers(int tile) { return registers_before(tile + 1) > registers_before(tile); }

// Whether a unit is one of the layer's, not padding of the last blocks.
__device__ inline bool exists(int unit) { return PITCH == HIDDEN || unit < HIDDEN; }

// Two weights, of adjacent columns of a row of a tile.  Rows 8 apart are adjacent units, so a thread's accumulators
// have the sums of both.
__device__ inline unsigned two_weights(const Parameters& p, const Place& place, int group, int row, int tile,
                                       int column) {
    const int strip = group * 4 + row / 16, within = row % 8 * 2 + row % 16 / 8, k = place.rank * TILES + tile;
    if (BACKWARD) {
        const int unit = (place.team * CLUSTER + strip) * UNITS + within, from = k % BLOCKS * UNITS + column;
        if (!exists(unit) || !exists(from)) return 0;
        const Scalar* at = p.weight + size_t(k / BLOCKS * HIDDEN + from) * HIDDEN + unit;
        return at[0].bits | unsigned(at[HIDDEN].bits) << 16;
    }
    const int unit = (place.team * CLUSTER + strip / GATES) * UNITS + within;
    if (!exists(unit) || !exists(k * UNITS + column)) return 0;
    const Scalar* at = p.weight + size_t(strip % GATES * HIDDEN + unit) * HIDDEN + k * UNITS + column;
    return *reinterpret_cast<const Pack*>(at);
}

// What all threads do together before the first step: initialise the barriers and load weights into shared memory.
__device__ inline void begin(const Parameters& p, const Place& place, char* shared) {
    make_barriers(shared);
    constexpr int WORDS = WEIGHT_BYTES / 4;
    for (int number = 0; number < IN_SHARED; ++number) {
        const int tile = number * TILES / (IN_SHARED + !IN_SHARED);
#pragma unroll
        for (int i = threadIdx.x; i < 2 * WORDS; i += BLOCK_GROUPS * THREADS) {
            const int group = i / WORDS, in = i % WORDS;
            reinterpret_cast<unsigned*>(shared)[(group * IN_SHARED + number) * WORDS + in] =
                two_weights(p, place, group, in / 4 % 64, tile, in / 256 * 8 + in % 4 * 2);
        }
    }
    fence_async_proxy();
    __syncthreads();
}

// The roles of the warpgroups: two multiply, one updates, the last copies.
__device__ inline bool multiplies() { return threadIdx.x < THREADS; }
__device__ inline bool updates() { return threadIdx.x / OWNERS == THREADS / OWNERS; }

// Registers of a thread that copies, and of one that updates: what those that multiply leave of all 65,536.
constexpr int COPYING = 32, UPDATING = 512 - 2 * REGISTERS - COPYING;

template <int COUNT> __device__ inline void set_registers() {
    if constexpr (COUNT > 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}
