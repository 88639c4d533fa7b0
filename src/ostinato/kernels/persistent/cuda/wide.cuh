// Wide batches of an LSTM: its recurrent matrix is multiplied with COLUMNS sequences at once by warpgroups (wgmma).
//
// Other kernels read the matrix from their registers and shared memory once for sixteen sequences or fewer.  Here two
// of a block's four warpgroups multiply 64 rows each, one updates units, and a warp of the last copies what is
// multiplied into a ring of buffers in shared memory.  A block has BLOCK_GROUPS groups of COLUMNS sequences in
// ping-pong: updates of the one and their way to other blocks are hidden behind the product of the other.
//
// CLUSTER blocks, a team, share the product of the rows of all their units: each copies and multiplies only its SLICE
// of the columns.  Sums go to the block that updates the unit: forward to the shared memory of the pair, backward
// through L2, as clusters of eight would leave too many multiprocessors idle.  Their last bit tells whether they are of
// an odd step: what has arrived is known from what was there before.
//
// A flag of each block and group counts how often its updating warps have published.  What is published has two
// buffers, sums have one: who publishes has taken all sums, made of all that its team copied, and its team sends the
// next after that.
//
// Operands of wgmma are matrices of 8 rows by 16 bytes, one after the other.  So the states of a block's units lie in
// global memory, too, COLUMNS * 32 adjacent bytes: a copy needs no tensor map, and no address is swizzled.

constexpr int TILES = SLICE / UNITS;                 // of a block's columns, each a block's units
constexpr int WEIGHT_BYTES = 64 * UNITS * 2;         // of a tile and a warpgroup
constexpr int STATE_BYTES = COLUMNS * UNITS * 2;     // of a tile
constexpr int IN_SHARED = TILES - IN_REGISTERS;      // tiles whose weights are in shared memory, not in registers
// Tiles that are copied at once: to ask for a copy takes a warp some 250 cycles, but of 64 sequences there is room for
// little.
constexpr int COPIED = COLUMNS == 32 ? 16 : 4, COPIES = (TILES + COPIED - 1) / COPIED;
constexpr int ROUNDS = COLUMNS / 32;                 // of an updating thread, with two units of two sequences in each
constexpr int TERM = COLUMNS * UNITS / 4;            // float4 of a gate's sums, each of two units of two sequences
constexpr int TERMS = BACKWARD ? CLUSTER : CLUSTER * GATES;

// Shared memory: weights; cells, or their gradients; forward the sums; the ring with its barriers.
constexpr int AT_CELLS = 2 * IN_SHARED * WEIGHT_BYTES, AT_SUMS = AT_CELLS + BLOCK_GROUPS * TERM * 16;
constexpr int AT_RING = AT_SUMS + (BACKWARD ? 0 : BLOCK_GROUPS * TERMS * TERM * 16), COPY_BYTES = COPIED * STATE_BYTES;
constexpr int SLOTS = (SHARED_BYTES - AT_RING - 16) / (COPY_BYTES + 16), AT_BARRIERS = AT_RING + SLOTS * COPY_BYTES;

static_assert(KEPT == Kept::CELLS && HIDDEN % 2 == 0);
static_assert(UNITS == 16 && BLOCKS * UNITS == PITCH && BLOCKS % CLUSTER == 0);
static_assert(CLUSTER * UNITS * (BACKWARD ? 1 : GATES) == 128, "two warpgroups multiply 64 rows each");
static_assert(TILES % 2 == 0 && TILES <= 64, "a lane polls two flags");
static_assert(SLOTS >= 2);

// A block of a team, of the group with which its turns begin.
struct Place {
    int group, block, team, rank;

    __device__ explicit Place(const Parameters& p)
        : group(p.first / COLUMNS + blockIdx.x / BLOCKS * BLOCK_GROUPS), block(blockIdx.x % BLOCKS),
          team(block / CLUSTER), rank(block % CLUSTER) {}
    // What blocks have published for the `count`th time, forward beginning with the initial state as number 0.
    __device__ char* published(const Parameters& p, int turn, int count) const {
        return p.states + (size_t(count & 1) * p.groups + group + turn) * GROUP_BYTES;
    }
    __device__ unsigned* flags(const Parameters& p, int turn) const { return p.flags + (group + turn) * BLOCKS; }
    // Backward: the sums of a block's units.
    __device__ float4* sums(const Parameters& p, int turn, int of_block) const {
        return p.sums + (size_t(group + turn) * BLOCKS + of_block) * (TERMS * TERM);
    }
};

// Slots of the ring in the order in which they are filled, with the parity of the barriers' phase.
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
        init_barrier<WARPS>(slot.emptied(shared));  // by all that multiply
    }
    fence_barrier_init();
}

// Which tiles' weights are in registers, evenly spread; and the number among those, or among the others.
__device__ constexpr int registers_before(int tile) { return tile * IN_REGISTERS / TILES; }
__device__ constexpr bool is_in_registers(int tile) { return registers_before(tile + 1) > registers_before(tile); }

// Whether a unit is one of the layer's, not of the last blocks' padding.
__device__ inline bool exists(int unit) { return PITCH == HIDDEN || unit < HIDDEN; }

// Two adjacent columns of a row of a tile.  Rows 8 apart are adjacent units: in the sums a thread has both.
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

// All that precedes the first step, but what threads do for themselves.
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

// What a warpgroup does: two multiply, one updates, the last copies.
__device__ inline bool multiplies() { return threadIdx.x < THREADS; }
__device__ inline bool updates() { return threadIdx.x / OWNERS == THREADS / OWNERS; }

// Registers of a thread that updates, and of one that copies: what those that multiply leave of all 65,536.
constexpr int COPYING = 32, UPDATING = 512 - 2 * REGISTERS - COPYING;

template <int COUNT> __device__ inline void take_registers() {
    if constexpr (COUNT > 128) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}
