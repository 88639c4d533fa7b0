// Wide batches of an LSTM: its recurrent matrix is multiplied with COLUMNS sequences at once by warpgroups (wgmma).
//
// Other kernels read the matrix from their registers and shared memory once for sixteen sequences or fewer.  Here two
// of a block's four warpgroups multiply 64 rows each, one updates units, and a warp of the last copies what is
// multiplied into a ring of buffers in shared memory.  A block has TURNS groups of COLUMNS sequences: updates of the
// one and their way to other blocks are hidden behind the product of the other.
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
constexpr int KEPT = TILES - HELD;                   // tiles whose weights are in shared memory, not in registers
constexpr int PIECE = COLUMNS == 32 ? 16 : 4;        // tiles that are copied at once: to ask for a copy takes a warp
constexpr int PIECES = (TILES + PIECE - 1) / PIECE;  // some 250 cycles, but of 64 sequences there is room for little
constexpr int ROUNDS = COLUMNS / 32;                 // of an updating thread, with two units of two sequences in each
constexpr int TERM = COLUMNS * UNITS / 4;            // float4 of a gate's sums, each of two units of two sequences
constexpr int TERMS = BACKWARD ? CLUSTER : CLUSTER * GATES;

// Shared memory: weights; cells, or their gradients; forward the sums; the ring with its barriers.
constexpr int AT_CELLS = 2 * KEPT * WEIGHT_BYTES, AT_SUMS = AT_CELLS + TURNS * TERM * 16;
constexpr int AT_RING = AT_SUMS + (BACKWARD ? 0 : TURNS * TERMS * TERM * 16), PIECE_BYTES = PIECE * STATE_BYTES;
constexpr int SLOTS = (SHARED_BYTES - AT_RING - 16) / (PIECE_BYTES + 16), AT_BARRIERS = AT_RING + SLOTS * PIECE_BYTES;

static_assert(CELL == LSTM && UNITS == 16 && BLOCKS * UNITS == PITCH && BLOCKS % CLUSTER == 0 && HIDDEN % 2 == 0);
static_assert(CLUSTER * UNITS * (BACKWARD ? 1 : GATES) == 128, "two warpgroups multiply 64 rows each");
static_assert(TILES % 2 == 0 && TILES <= 64, "a lane polls two flags");
static_assert(SLOTS >= 2);

// A block of a team, of the group with which its turns begin.
struct Place {
    int group, block, team, rank;

    __device__ explicit Place(const Parameters& p)
        : group(p.first / COLUMNS + blockIdx.x / BLOCKS * TURNS), block(blockIdx.x % BLOCKS), team(block / CLUSTER),
          rank(block % CLUSTER) {}
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
        start_copy(shared_address(shared + AT_RING) + number * PIECE_BYTES, from, bytes, filled(shared));
    }
};

__device__ inline void arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ inline void wait_for(unsigned barrier, unsigned parity) {
    while (!try_wait(barrier, parity)) {}
}
// Whether a warp that copies has waited in vain.
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
__device__ constexpr int held_before(int tile) { return tile * HELD / TILES; }
__device__ constexpr bool is_held(int tile) { return held_before(tile + 1) > held_before(tile); }

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
    for (int number = 0; number < KEPT; ++number) {
        const int tile = number * TILES / (KEPT + !KEPT);
#pragma unroll
        for (int i = threadIdx.x; i < 2 * WORDS; i += TURNS * THREADS) {
            const int group = i / WORDS, in = i % WORDS;
            reinterpret_cast<unsigned*>(shared)[(group * KEPT + number) * WORDS + in] =
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

using Descriptor = unsigned long long;

// Of an operand in shared memory; `along_k`: from its first 8 columns to the next.  Within a cluster the upper bits of
// an address are the block's rank.
__device__ inline Descriptor descriptor(unsigned address, int along_k) {
    return Descriptor((address & 0x3ffff) >> 4) | Descriptor(along_k >> 4) << 16 | Descriptor(128 >> 4) << 32;
}
// Some bytes after the operand of a descriptor's lower half.  Made where it is used: hoisted, all would take registers.
__device__ inline Descriptor after(unsigned descriptor, int bytes) {
    return Descriptor(128 >> 4) << 32 | (descriptor + (bytes >> 4));
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define SUMS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#if COLUMNS == 32
#define SHAPE "m64n32k16"
#define SUMS "{" SUMS_16 "}"
#define SUM_OPERANDS D16(0)
#define FROM_REGISTERS "{%16,%17,%18,%19}, %20, p, 1, 1, 0"
#define FROM_MEMORY "%16, %17, p, 1, 1, 0, 0"
#else
#define SHAPE "m64n64k16"
#define SUMS "{" SUMS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define SUM_OPERANDS D16(0), D16(16)
#define FROM_REGISTERS "{%32,%33,%34,%35}, %36, p, 1, 1, 0"
#define FROM_MEMORY "%32, %33, p, 1, 1, 0, 0"
#endif
#define WGMMA(type, from, ...)                                                                                       \
    asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned." SHAPE ".f32." type "." type    \
                 " " SUMS ", " from "; }" : SUM_OPERANDS : __VA_ARGS__)

// Adds the product of a tile's weights, in registers or in shared memory, with its states.
__device__ inline void multiply(float (&d)[COLUMNS / 2], const uint4& a, Descriptor b) {
    if (BFLOAT16) WGMMA("bf16", FROM_REGISTERS, "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
    else WGMMA("f16", FROM_REGISTERS, "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
__device__ inline void multiply(float (&d)[COLUMNS / 2], Descriptor a, Descriptor b) {
    if (BFLOAT16) WGMMA("bf16", FROM_MEMORY, "l"(a), "l"(b));
    else WGMMA("f16", FROM_MEMORY, "l"(a), "l"(b));
}

// What a warpgroup multiplies.
struct Product {
    uint4 held[HELD];
    char* shared;
    unsigned kept, ring;  // descriptors' lower halves
    Slot slot;

    __device__ Product(const Parameters& p, const Place& place, char* shared) : shared(shared) {
        const int group = threadIdx.x / 128, row = warp_id() % 4 * 16 + lane_id() / 4, column = lane_id() % 4 * 2;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            if (!is_held(tile)) continue;
            const auto at = [&](int down, int across) {
                return two_weights(p, place, group, row + down, tile, column + across);
            };
            held[held_before(tile)] = {at(0, 0), at(8, 0), at(0, 8), at(8, 8)};
            if (tile % 4 == 3) asm volatile("" ::: "memory");  // not all loads at once
        }
        kept = unsigned(descriptor(shared_address(shared) + group * KEPT * WEIGHT_BYTES, WEIGHT_BYTES / 2));
        ring = unsigned(descriptor(shared_address(shared) + AT_RING, STATE_BYTES / 2));
    }

    // Keeps sums where wgmma writes them.
    __device__ static void pin(float (&d)[COLUMNS / 2]) {
#pragma unroll
        for (float& sum : d) asm volatile("" : "+f"(sum) :: "memory");
    }

    __device__ void operator()(float (&d)[COLUMNS / 2]) {
        unsigned last = 0;  // slot's barrier
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            wait_for(slot.filled(shared), slot.parity);
            if (piece == 0) {
#pragma unroll
                for (float& sum : d) sum = 0;
            }
            pin(d);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            const unsigned states = ring + slot.number * (PIECE_BYTES >> 4);
            unsigned weights = kept;
            asm volatile("" : "+r"(weights));
#pragma unroll
            for (int i = 0; i < PIECE; ++i) {
                const int tile = piece * PIECE + i;
                if (tile >= TILES) break;
                const Descriptor b = after(states, i * STATE_BYTES);
                if (is_held(tile)) multiply(d, held[held_before(tile)], b);
                else multiply(d, after(weights, (tile - held_before(tile)) * WEIGHT_BYTES), b);
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (piece) {
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (lane_id() == 0) arrive(last);
            }
            last = slot.emptied(shared);
            slot.next();
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        pin(d);
        if (lane_id() == 0) arrive(last);
    }
};

// A bit for each two tiles that have been published for the `count`th time; none before the team has, too.
__device__ inline unsigned poll(const unsigned* flags, const Place& place, unsigned count) {
    uint2 of_tiles = {~0u, ~0u}, of_team = of_tiles;
    const auto load = [](uint2& at, const unsigned* flag) {
        asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(at.x), "=r"(at.y) : "l"(flag) : "memory");
    };
    const int tile = 2 * lane_id();
    if (tile < TILES) load(of_tiles, flags + (place.rank * TILES + tile) % BLOCKS);
    if (tile < CLUSTER) load(of_team, flags + place.team * CLUSTER + tile);
    const unsigned least = count * (OWNERS / 32), ready = __ballot_sync(~0u, min(of_tiles.x, of_tiles.y) >= least);
    return __all_sync(~0u, min(of_team.x, of_team.y) >= least) ? ready : 0;
}

// Copies all that the block multiplies as soon as it is published, from number FIRST on.
__device__ inline void copy(const Parameters& p, const Place& place, char* shared) {
    if (warp_id() % 4) return;  // several would poll the same flags, and delay what they wait for
    constexpr int FIRST = BACKWARD;
    Timeout timeout(p.failure);
    Slot slot;
    for (int count = FIRST; count < p.steps + FIRST; ++count) {
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            const char* from = place.published(p, turn, count) + place.rank * TILES * STATE_BYTES;
            unsigned ready = 0;  // a bit for each two tiles
#pragma unroll 1
            for (int piece = 0; piece < PIECES; ++piece) {
                const int bytes = min(PIECE, TILES - piece * PIECE) * STATE_BYTES;
                const unsigned needed = (~0u >> (32 - PIECE / 2) << piece * (PIECE / 2)) & ~0u >> (32 - TILES / 2);
                if ((ready & needed) != needed) {
                    timeout.restart();
                    do ready = poll(place.flags(p, turn), place, count);
                    while ((ready & needed) != needed && __any_sync(~0u, timeout.may_poll()));
                    if (timeout.has_expired()) failed(shared) = 1;
                    asm volatile("fence.acq_rel.gpu;" ::: "memory");
                    asm volatile("fence.proxy.async.global;" ::: "memory");
                    __syncwarp();
                }
                wait_for(slot.emptied(shared), slot.parity ^ 1);
                if (lane_id() == 0) slot.fill(shared, from + piece * PIECE_BYTES, bytes);
                __syncwarp();
                slot.next();
            }
        }
    }
}

// What a thread of the updating warpgroup has: two adjacent units of two adjacent sequences in each round and turn.
// Unit u of sequence s is number 2 s + u of four.  Sequences of padding are far beyond the batch.
struct Share {
    static constexpr int BEYOND = 1 << 30;
    int thread = threadIdx.x % OWNERS, unit, sequence;

    __device__ explicit Share(const Place& place)
        : unit(place.block * UNITS + lane_id() / 4 * 2),
          sequence((exists(unit) ? 0 : BEYOND) + place.group * COLUMNS + thread / 32 * 8 + lane_id() % 4 * 2) {}
    __device__ int sequence_of(int turn, int round, int s) const { return sequence + turn * COLUMNS + round * 32 + s; }
    // The index in a row of `gates` times the units.
    __device__ size_t at(size_t row, int gates = 1) const { return row * (gates * HIDDEN) + unit; }
    // Where a round's sequence s is in the tile that the block publishes.
    __device__ int byte(int round, int s) const {
        return lane_id() / 16 * (COLUMNS * 16) + (round * 32 + sequence % 32 + s) * 16 + lane_id() / 4 % 4 * 4;
    }
    __device__ float4& cells(char* shared, int turn, int round) const {
        return reinterpret_cast<float4*>(shared + AT_CELLS)[(turn * ROUNDS + round) * OWNERS + thread];
    }
};

__device__ inline void publish(char* address, Pack units) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(address), "r"(units) : "memory");
}

__device__ inline float tagged(float sum, unsigned count) {
    return __uint_as_float((__float_as_uint(sum) & ~1u) | (count & 1));
}

// Multiplies in all steps, and sends each tile of eight sequences' sums by a function of the turn, the tile and a
// lane's sums of two units and two sequences.
template <typename Send>
__device__ inline void multiply_all(const Parameters& p, const Place& place, char* shared, Send send) {
    take_registers<REGISTERS>();
    Product product(p, place, shared);
    for (int count = 1; count <= p.steps; ++count) {
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            float d[COLUMNS / 2];
            product(d);
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; ++i) {
                const auto sum = [&](int k) { return tagged(d[4 * i + k], count); };
                send(turn, i, {sum(0), sum(1), sum(2), sum(3)});
            }
        }
    }
}

// Waits for the `count`th sums of a round, TERM float4 apart; NaN if the wait times out.  First each lane polls one:
// polls of all would be in the way of others.
__device__ inline void take(float4 (&sums)[TERMS], const float4* mine, unsigned count, char* shared,
                            Timeout& timeout) {
    const auto load = [](float4& x, const float4* from) {
        if (BACKWARD)
            asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
        else
            asm volatile("ld.relaxed.cluster.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(shared_address(from)) : "memory");
    };
    const auto absent = [&](float x) { return (__float_as_uint(x) ^ count) & 1; };
    timeout.restart();
    float one;
    do {
        const float4* from = mine + lane_id() % TERMS * TERM;
        if (BACKWARD) asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(one) : "l"(from) : "memory");
        else
            asm volatile("ld.relaxed.cluster.shared::cta.f32 %0, [%1];"
                         : "=f"(one) : "r"(shared_address(from)) : "memory");
    } while (__any_sync(~0u, absent(one)) && timeout.may_poll());
    bool waiting;
    do {
        waiting = false;
#pragma unroll
        for (int k = 0; k < TERMS; ++k) load(sums[k], mine + k * TERM);
#pragma unroll
        for (const float4& x : sums) waiting |= absent(x.x) | absent(x.y) | absent(x.z) | absent(x.w);
    } while (__any_sync(~0u, waiting) && timeout.may_poll());
    const float nan = __uint_as_float(0x7fffffff);
    if (timeout.has_expired() || failed(shared)) sums[0] = {nan, nan, nan, nan};
}

// Announces what this warp has published: to wait for the block's other warps would take longer.
__device__ inline void announce(const Parameters& p, const Place& place, int turn) {
    __syncwarp();
    if (lane_id()) return;
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(place.flags(p, turn) + place.block) : "memory");
}

// Updates, publishes and writes units in all steps.
template <typename Units> __device__ inline void update_all(const Parameters& p, const Place& place, char* shared) {
    take_registers<UPDATING>();
    Timeout timeout(p.failure);
    Units units(p, place, shared);
    units.fetch(0, 0);
    for (int taken = 0; taken < p.steps; ++taken) {
#pragma unroll 1
        for (int turn = 0; turn < TURNS; ++turn) {
            units.update(place, shared, taken, turn, timeout);
            announce(p, place, turn);
            units.write(shared, taken, turn);
            const int next = (turn + 1) % TURNS;
            if (taken + !next < p.steps) units.fetch(taken + !next, next);
        }
    }
    units.finish(place, shared, timeout);
}

// Before the first step.
extern "C" __global__ void __launch_bounds__(THREADS) prepare(const Parameters p) {
    const int stride = gridDim.x * THREADS, thread = blockIdx.x * THREADS + threadIdx.x;
    for (int i = thread; i < p.groups * BLOCKS; i += stride) p.flags[i] = 0;
    if (BACKWARD) {
        for (int i = thread; i < p.groups * BLOCKS * TERMS * TERM; i += stride) p.sums[i] = {0, 0, 0, 0};
        return;
    }
    const Rows rows(p, step_of(p, 0));
    for (int i = thread; i < p.groups * GROUP_BYTES / 4; i += stride) {  // pairs of units
        constexpr int PAIRS = STATE_BYTES / 4;
        const int unit = i / PAIRS % BLOCKS * UNITS + i % PAIRS / (COLUMNS * 4) * 8 + i % 4 * 2;
        const int sequence = i / PAIRS / BLOCKS * COLUMNS + i / 4 % COLUMNS;
        const bool begins = RESETS && sequence < rows.live && p.resets[rows.first + sequence];
        const Pack* from = reinterpret_cast<const Pack*>(p.h0 + size_t(sequence) * HIDDEN + unit);
        reinterpret_cast<Pack*>(p.states)[i] = p.h0 && sequence < p.batch && exists(unit) && !begins ? *from : 0;
    }
}
