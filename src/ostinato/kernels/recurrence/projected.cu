// A linear recurrence of two inputs that are matrix products, z = x Wz' and h = x Wh': products, gates and scan in one.
//
// The products never reach memory.  A tile is STEPS time steps of CHANNELS channels.  The weight is the left factor of
// the tensor cores' product and x the right one, so that an accumulator's rows are channels and its columns are time.
// The rows of a 16-row slab are eight channels' z and then their h, and x is copied to shared memory in such an order
// of its steps (see `RUN`) that a thread holds both products of one channel at 64 consecutive steps.  It computes its
// gates and composes its steps in registers; four lanes make a tile of a channel, and what is before it comes from the
// tiles before through memory, as in scan.cu.
//
// A block is a producer warp, which has the copy engine fetch slices of x and the weight into a ring of stages, and two
// warpgroups of consumers, each with half of the channels.  The two blocks of a cluster take neighbouring channels at
// the same steps, and each fetches half of x for both.
//
// Tried, and no faster: one warpgroup some slices ahead of the other, so that they are at their gates in turn (what
// the ring holds then is held for longer than it takes to fetch); every other reciprocal from multiply-adds.
//
// Blocks take tiles in a fixed order, later steps last, and all blocks are on the chip at once (a cooperative launch),
// so a tile waits only for tiles that are done or being worked on.

constexpr int STEPS = 256, CHANNELS = 64, SLICE = 64;  // SLICE: input channels of a stage, 128 bytes
constexpr int CONSUMERS = 2, WARPGROUP = 128, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int ROWS = 2 * CHANNELS;      // of the weight, in a tile
constexpr int RUN = STEPS / 8;          // column n of an accumulator is step n % 8 * RUN + n / 8
constexpr int OWN = CHANNELS / CONSUMERS;  // channels of a warpgroup
constexpr int PADDED_RUN = RUN * OWN + 8;  // scalars, so that stores of steps RUN apart fall in different banks

using Element = ELEMENT;
using Index = long long;
static_assert(Element::PLAIN == 2 && sizeof(Scalar) == 2);
constexpr int PARAMETERS = Element::PARAMETERS, OF_CHANNEL = PARAMETERS ? PARAMETERS : 1;

struct alignas(64) TensorMap { unsigned char bytes[128]; };

struct Parameters {
    TensorMap x, weight;
    const Scalar* parameters[OF_CHANNEL];  // (channels) each
    const Scalar* initial;  // (sequences, channels), or null
    Scalar* h;
    Scalar* final;  // (sequences, channels)
    Message* published;
    Index line_stride, row_stride;  // of h
    unsigned epoch;  // the launch's number, a multiple of MARKS
    int lines, rows;  // rows of a line are neighbours in time, or the first of a sequence after the last of another
    int period;       // rows of a sequence
    int channels, depth;
};

struct Shared {
    struct alignas(1024) Stage {
        Scalar x[STEPS * SLICE];
        Scalar weight[ROWS * SLICE];
    } stage[STAGES];
    alignas(16) Scalar h[CONSUMERS][8 * PADDED_RUN];
    unsigned long long full[STAGES], empty[STAGES];
};

__device__ inline unsigned address(const void* of) { return unsigned(__cvta_generic_to_shared(of)); }

__device__ inline int block_of_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void meet_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ inline void wait(unsigned long long* barrier, unsigned phase) {
    unsigned done = 0;
    for (unsigned looks = 0; !done; ++looks) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(address(barrier)), "r"(phase) : "memory");
        if (looks == PATIENCE) __trap();
    }
}
__device__ inline void arrive(unsigned long long* barrier, int block) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }"
                 ::"r"(address(barrier)), "r"(block) : "memory");
}
__device__ inline void expect(unsigned long long* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(address(barrier)), "r"(bytes) : "memory");
}
__device__ inline void copy(
    void* to, const TensorMap& map, unsigned long long* barrier, int c0, int c1, int c2, int c3
) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(address(to)), "l"(&map), "r"(address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
// To the same place in every block of the cluster.
__device__ inline void copy_to_all(
    void* to, const TensorMap& map, unsigned long long* barrier, int c0, int c1, int c2, int c3
) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;"
                 ::"r"(address(to)), "l"(&map), "r"(address(barrier)), "h"((unsigned short)((1 << CLUSTER) - 1)),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// How the tensor cores find a matrix whose rows are 128 bytes, swizzled in groups of eight.
__device__ inline unsigned long long describe(const Scalar* matrix) {
    constexpr unsigned long long SWIZZLE_128 = 1ull << 62, GROUP = 1024 >> 4;
    return SWIZZLE_128 | GROUP << 32 | 1ull << 16 | (address(matrix) & 0x3ffff) >> 4;
}

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)

#define MULTIPLY(TYPE)                                                                                           \
    asm volatile(                                                                                                \
        "{ .reg .pred add; setp.ne.b32 add, %130, 0;\n\t"                                                        \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {"                                        \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                       \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                       \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                       \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                       \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                       \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "           \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "      \
        "%128, %129, add, 1, 1, 0, 0; }"                                                                         \
        : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112) \
        : "l"(a), "l"(b), "r"(add))

// d = rows of `a` times rows of `b`, 64 x 256, added to d or in its place.
__device__ inline void multiply(float (&d)[128], unsigned long long a, unsigned long long b, int add) {
    if constexpr (BFLOAT16) MULTIPLY("bf16");
    else MULTIPLY("f16");
}

// One of the tiles, the same for all threads.
struct Tile {
    int line, chunk, group, base, skip;  // its steps are those of the line from `base` on, less the first `skip`

    __device__ Tile(const Parameters& p, int number) {
        const int groups = count_groups(p);
        group = number % groups;
        line = number / groups % p.lines;
        chunk = number / groups / p.lines;
        base = min(chunk * STEPS, p.rows - STEPS);
        skip = chunk * STEPS - base;
    }
    static __device__ int count_groups(const Parameters& p) {
        return (p.channels + CHANNELS * CLUSTER - 1) / (CHANNELS * CLUSTER);
    }
    static __device__ int count_chunks(const Parameters& p) { return (p.rows + STEPS - 1) / STEPS; }
    static __device__ int count(const Parameters& p) { return count_groups(p) * p.lines * count_chunks(p); }
};

__device__ inline void produce(const Parameters& p, Shared& shared, int rank) {
    const int slices = (p.depth + SLICE - 1) / SLICE;
    int stage = 0;
    unsigned phase = 1;  // the ring begins empty
    for (int number = blockIdx.x / CLUSTER; number < Tile::count(p); number += gridDim.x / CLUSTER) {
        const Tile tile(p, number);
        const int slab = (tile.group * CLUSTER + rank) * (CHANNELS / 8);
        for (int slice = 0; slice < slices; ++slice) {
            Shared::Stage& to = shared.stage[stage];
            unsigned long long* full = &shared.full[stage];
            wait(&shared.empty[stage], phase);
            expect(full, sizeof(Shared::Stage));
            copy(to.weight, p.weight, full, slice * SLICE, 0, 0, slab);
            constexpr int PART = RUN / CLUSTER;
            Scalar* const part = to.x + rank * PART * 8 * SLICE;
            copy_to_all(part, p.x, full, slice * SLICE, 0, tile.base + rank * PART, tile.line);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
}

// The composition of consecutive steps; if the state is given anew within, the one before does not matter.
struct Composition {
    float a, b;
    bool reset;
    __device__ float carry(float state) const { return reset ? b : fma(a, state, b); }
    __device__ Composition of_lane(int lane) const {
        return {__shfl_sync(~0u, a, lane), __shfl_sync(~0u, b, lane), bool(__shfl_sync(~0u, int(reset), lane))};
    }
};

// What is published of a warp's eight channels of the tiles before one.  The four lanes of a channel each read every
// fourth of the last 32.
struct Published {
    static constexpr int ROUNDS = 8;
    const Message* here;
    Index pitch;
    int chunk;
    unsigned epoch;
    unsigned window;  // a bit for each tile before this one that may be in work at the same time

    __device__ Message read(int round) const {
        const int back = 4 * round + threadIdx.x % 4 + 1;
        if (back <= chunk) return load_message(here - back * pitch);
        return {{0, 0, 0, epoch + ABSENT}};
    }
    // Four bits: those of the lanes of a channel for which, at any channel, this holds.
    static __device__ unsigned any(bool holds) {
        unsigned lanes = __ballot_sync(~0u, holds);
        lanes |= lanes >> 16, lanes |= lanes >> 8;
        return (lanes | lanes >> 4) & 15;
    }
    // The state after the last tile; `early` was read in round 0 some time ago.  Forward from the nearest known state
    // it is the same chain of multiply-adds, however far back that is.
    __device__ float look_back(const Message& early) const {
        const int first = threadIdx.x % 32 & ~3;
        if (!(any(early.since(epoch) != KNOWN) & 1))  // mostly the tile before is long done
            return __shfl_sync(~0u, __uint_as_float(early.parts[0]), first);
        Message messages[ROUNDS] = {};
        unsigned missing = window;  // which tiles are not there, or known at some channels only
        for (unsigned looks = 0; looks < PATIENCE; ++looks) {
            unsigned open = 0;  // those that are not known
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round)
                if (missing >> 4 * round & 15) messages[round] = read(round);
            missing = 0;
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const Mark mark = messages[round].since(epoch);
                const unsigned unknown = any(mark != KNOWN), partly = unknown & any(mark == KNOWN);
                open |= unknown << 4 * round;
                missing |= (any(mark == ABSENT) | partly) << 4 * round;
            }
            const unsigned known = ~open;
            const int nearest = __ffs(known);
            if (!nearest || missing & ((known & -known) - 1)) {
                missing = nearest ? missing & window : window;
                continue;
            }
            float state = 0;
#pragma unroll
            for (int back = 4 * ROUNDS; back >= 1; --back) {
                const Message& message = messages[(back - 1) / 4];
                const float a = __shfl_sync(~0u, __uint_as_float(message.parts[1]), first + (back - 1) % 4);
                const float b = __shfl_sync(~0u, __uint_as_float(message.parts[0]), first + (back - 1) % 4);
                state = back < nearest ? fma(a, state, b) : b;
            }
            return state;
        }
        __trap();
    }
};

// A thread's steps, in two runs: of step j of run i, a is d[4j + i] and b is d[4j + 2 + i].
struct Steps {
    float (&d)[128];
    int begins[2];   // at which step of each run a sequence begins, RUN for none
    float begin[2];  // and in what state

    // With BETWEEN, sequences begin anywhere, else only where runs do.
    template <bool BETWEEN> __device__ void compose(Composition (&run)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) run[i] = {1, begin[i], begins[i] < RUN};
#pragma unroll
        for (int j = 0; j < RUN; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (BETWEEN && j == begins[i]) run[i].b = begin[i];
                run[i].a *= d[4 * j + i];
                run[i].b = fma(d[4 * j + i], run[i].b, d[4 * j + 2 + i]);
            }
    }
    template <bool BETWEEN> __device__ void apply(float (&state)[2], unsigned to) const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (begins[i] == 0) state[i] = begin[i];
#pragma unroll
        for (int j = 0; j < RUN; j += 4) {
            unsigned pairs[4];
#pragma unroll
            for (int k = j; k < j + 4; ++k) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (BETWEEN && k == begins[i]) state[i] = begin[i];
                    state[i] = fma(d[4 * k + i], state[i], d[4 * k + 2 + i]);
                }
                pairs[k - j] = pack_pair(state[0], state[1]);
            }
            asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                         ::"r"(to + unsigned(j * OWN * sizeof(Scalar))), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
                         "r"(pairs[3]) : "memory");
        }
    }
};

__device__ inline void consume(const Parameters& p, Shared& shared, int rank, int warpgroup) {
    const int slices = (p.depth + SLICE - 1) / SLICE;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32, part = lane % 4;
    const int sequences = p.rows / p.period;  // of a line
    const int behind = gridDim.x / CLUSTER / (Tile::count_groups(p) * p.lines) + 2;  // tiles of a channel in work
    const unsigned window = behind < 32 ? (1u << behind) - 1 : ~0u;
    const auto meet = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + warpgroup), "n"(WARPGROUP) : "memory"); };
    int stage = 0;
    unsigned phase = 0;
    for (int number = blockIdx.x / CLUSTER; number < Tile::count(p); number += gridDim.x / CLUSTER) {
        const Tile tile(p, number);
        const int first_channel = (tile.group * CLUSTER + rank) * CHANNELS + warpgroup * OWN;
        const int channel = first_channel + warp * 8 + lane / 4;
        const bool inside = channel < p.channels;  // the same for a warp
        Compute parameters[OF_CHANNEL] = {};
#pragma unroll
        for (int k = 0; k < PARAMETERS; ++k)
            if (inside) parameters[k] = widen(p.parameters[k][channel]);

        const Index pitch = Index(p.lines) * p.channels;  // messages of a chunk
        Message* const here = p.published + tile.chunk * pitch + tile.line * p.channels + channel;
        const int begun = tile.base / p.period, past = tile.base % p.period;  // sequences, and rows of the last, before
        const bool continues = inside && (past > 0 || tile.skip > 0);
        const Published published = {here, pitch, continues ? tile.chunk : 0, p.epoch, window};

        float d[128];
        const auto release = [&](int stage) { if (lane < CLUSTER) arrive(&shared.empty[stage], lane); };
        for (int slice = 0; slice < slices; ++slice) {
            wait(&shared.full[stage], phase);
            const unsigned long long a = describe(shared.stage[stage].weight + warpgroup * 64 * SLICE);
            const unsigned long long b = describe(shared.stage[stage].x);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < SLICE / 16; ++k) multiply(d, a + 2 * k, b + 2 * k, slice > 0 || k > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (slice > 0) release(stage == 0 ? STAGES - 1 : stage - 1);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        release(stage == 0 ? STAGES - 1 : stage - 1);
        const Message early = published.read(0);

        const Element::Channel of_channel = Element::prepare(parameters);
#pragma unroll
        for (int j = 0; j < RUN; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Compute x[2] = {d[4 * j + i], d[4 * j + 2 + i]};
                const Element::Step step = Element::read(x, of_channel, 0, 0);
                d[4 * j + i] = step.a, d[4 * j + 2 + i] = step.b;
            }
        Steps steps = {d, {RUN, RUN}, {0, 0}};
        const bool between = past % RUN > 0 || p.period % RUN > 0 || tile.skip > 0;
        if (past == 0 || past + STEPS > p.period) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int local = (2 * part + i) * RUN, row = past + local;
                const int sequence = (row + p.period - 1) / p.period, first = sequence * p.period - row;
                if (first >= RUN || local + first < tile.skip) continue;
                steps.begins[i] = first;
                const Index which = tile.line * sequences + begun + sequence;
                if (p.initial && inside) steps.begin[i] = widen(p.initial[which * p.channels + channel]);
            }
        }
        if (tile.skip > 0) {
#pragma unroll
            for (int j = 0; j < RUN; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if ((2 * part + i) * RUN + j < tile.skip) d[4 * j + i] = 1, d[4 * j + 2 + i] = 0;
        }
        Composition run[2];
        if (between) steps.compose<true>(run);
        else steps.compose<false>(run);
        const Composition mine = {run[0].a * run[1].a, run[1].carry(run[0].b), run[0].reset || run[1].reset};
        Composition of_part[4], whole = {1, 0, false};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            of_part[i] = mine.of_lane((lane & ~3) + i);
            whole = {whole.a * of_part[i].a, of_part[i].carry(whole.b), whole.reset || of_part[i].reset};
        }

        const auto publish = [&](Mark mark, float b) {
            if (part == 0 && inside)
                store_message(here, {{__float_as_uint(b), __float_as_uint(whole.a), 0, p.epoch + mark}});
        };
        float state = 0;
        publish(whole.reset ? KNOWN : COMPOSED, whole.b);
        if (continues) {
            state = published.look_back(early);
            if (!whole.reset) publish(KNOWN, whole.carry(state));
        }
#pragma unroll
        for (int i = 0; i < 3; ++i)
            if (i < part) state = of_part[i].carry(state);
        float states[2] = {state, run[0].carry(state)};
        meet();  // nobody reads the last tile's any more
        Scalar* const h = shared.h[warpgroup];
        const unsigned to = address(h + lane % 8 * PADDED_RUN + lane / 8 * OWN + warp * 8);
        if (between) steps.apply<true>(states, to);
        else steps.apply<false>(states, to);
        meet();
        const int piece = thread % 4 * 8, row = thread / 4;
        const auto eight = [&](int run, int row) {
            return *reinterpret_cast<const uint4*>(h + run * PADDED_RUN + row * OWN + piece);
        };
        if (first_channel + piece < p.channels) {
            Scalar* line = p.h + tile.line * p.line_stride + (tile.base + row) * p.row_stride + first_channel + piece;
#pragma unroll
            for (int i = 0; i < 8; ++i, line += RUN * p.row_stride)
                if (i * RUN + row >= tile.skip) *reinterpret_cast<uint4*>(line) = eight(i, row);
            Index sequence = tile.line * sequences + begun;
            for (int last = p.period - 1 - past; last < STEPS; last += p.period, ++sequence) {
                if (row != last % RUN || last < tile.skip) continue;
                Scalar* const final = p.final + sequence * p.channels + first_channel + piece;
                *reinterpret_cast<uint4*>(final) = eight(last / RUN, row);
            }
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
projected(const __grid_constant__ Parameters p) {
    extern __shared__ unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-address(memory) & 1023));
    const int rank = CLUSTER == 1 ? 0 : block_of_cluster(), warpgroup = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&shared.full[stage])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                         ::"r"(address(&shared.empty[stage])), "r"(CLUSTER * CONSUMERS * 4) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    meet_cluster();
    if (warpgroup < CONSUMERS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(p, shared, rank, warpgroup);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == CONSUMERS * WARPGROUP) produce(p, shared, rank);
        __syncwarp();
    }
    meet_cluster();  // nobody leaves while another writes to its memory
}
