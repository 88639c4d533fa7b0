// A linear recurrence whose inputs are matrix products, such as z = x Wz' and h = x Wh': GEMM, gates and scan fused.
//
// The products stay in registers.  A tile is STEPS time steps of CHANNELS channels.  The weight is the A operand of
// wgmma and x the B operand, so an accumulator's rows are channels and its columns are time.  The order of x's steps in
// shared memory (see `RUN`) and of the weight's rows (see `Steps`) is such that a thread holds all products of one or
// two channels at two runs of consecutive steps.  It computes their gates and reduces its steps in registers; four
// lanes cover a channel's tile, whose carry comes from earlier tiles by decoupled look-back, as in scan.cu.
//
// A block has a producer warp, which fetches slices of x and the weight by TMA into a ring of stages, and two consumer
// warpgroups, each with half of the channels.  The two blocks of a cluster share the larger operand by multicast, half
// fetched by each: they work on adjacent channels at the same steps, or on the same channels.
//
// Tried without gain: staggering the warpgroups such that their gates alternate (stages are then occupied for longer
// than it takes to fetch them); every other reciprocal from multiply-adds.
//
// Blocks take tiles in a fixed order, later steps last, and all blocks are resident (a cooperative launch), so a tile
// waits only for tiles that are finished or in progress.

using Element = ELEMENT;
using Index = long long;
static_assert(sizeof(Scalar) == 2);
constexpr int GATES = Element::PLAIN, PARAMETERS = Element::PARAMETERS, OF_CHANNEL = PARAMETERS ? PARAMETERS : 1;

constexpr int HELD = GATES % 2 ? 2 : 1;   // channels of a thread, which holds two rows of each accumulator block
constexpr int BLOCKS = GATES * HELD / 2;  // of 64 rows
constexpr int SLICE = 64;                 // input channels of a stage, 128 bytes
constexpr int CONSUMERS = 2, WARPGROUP = 128, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int OWN = 32 * HELD, CHANNELS = CONSUMERS * OWN;  // channels of a warpgroup, of a tile
constexpr int ROWS = GATES * OWN;                           // of the weight, of a warpgroup
constexpr int RUN = STEPS / 8;             // column n of an accumulator is step n % 8 * RUN + n / 8
constexpr int PADDED_RUN = RUN * OWN + 8;  // scalars, padded against bank conflicts of stores to steps RUN apart
constexpr bool SHARE_WEIGHT = CONSUMERS * ROWS > STEPS;

struct Parameters {
    TensorMap x, weight;
    const Scalar* parameters[OF_CHANNEL];  // (channels) each
    const Scalar* initial;  // (sequences, channels), or null
    Scalar* h;
    Scalar* final;  // (sequences, channels)
    const unsigned char* resets;  // with RESETS, a byte for each row: whether the state before it is zero
    Message* published;
    Index line_stride, row_stride;  // in rows, of h and of the resets
    unsigned epoch;  // the launch's number, a multiple of MARKS
    int lines, rows;  // a line is one sequence, or several concatenated
    int period;       // rows of a sequence
    int channels, depth;
};

// The composition of consecutive steps; with `reset` it does not depend on the state before.
struct Composition {
    float a, b;
    bool reset;
    __device__ float carry(float state) const { return reset ? b : fma(a, state, b); }
    __device__ Composition then(const Composition& next) const {
        return {a * next.a, next.carry(b), reset || next.reset};
    }
    __device__ Composition of_lane(int lane) const {
        return {__shfl_sync(~0u, a, lane), __shfl_sync(~0u, b, lane), bool(__shfl_sync(~0u, int(reset), lane))};
    }
};

struct Shared {
    struct alignas(1024) Stage {
        Scalar x[STEPS * SLICE];
        Scalar weight[CONSUMERS][ROWS * SLICE];
    } stage[STAGES];
    alignas(16) Scalar h[CONSUMERS][8 * PADDED_RUN];
    unsigned long long full[STAGES], empty[STAGES];
};

// One of the tiles of a cluster.
struct Tile {
    int channel;                  // the first
    int line, chunk, base, skip;  // its steps are those of the line from `base` on, less the first `skip`

    __device__ Tile(const Parameters& p, int number, int rank) {
        const int groups = count_groups(p), group = number % groups;
        int place = number / groups;
        if (SHARE_WEIGHT) place = place * CLUSTER + rank;
        channel = (SHARE_WEIGHT ? group : group * CLUSTER + rank) * CHANNELS;
        line = place % p.lines;
        chunk = place / p.lines;  // past the end for a cluster's idle last block, which then skips all steps
        base = min(chunk * STEPS, p.rows - STEPS);
        skip = chunk * STEPS - base;
    }
    // Where a step is in h and among the resets.
    __device__ Index row(const Parameters& p, int step) const {
        return line * p.line_stride + (base + step) * p.row_stride;
    }
    static __device__ int count_groups(const Parameters& p) {
        constexpr int WIDTH = SHARE_WEIGHT ? CHANNELS : CHANNELS * CLUSTER;
        return (p.channels + WIDTH - 1) / WIDTH;
    }
    static __device__ int count(const Parameters& p) {
        constexpr int AT_ONCE = SHARE_WEIGHT ? CLUSTER : 1;
        return count_groups(p) * ((p.lines * ((p.rows + STEPS - 1) / STEPS) + AT_ONCE - 1) / AT_ONCE);
    }
};

__device__ inline void produce(const Parameters& p, Shared& shared, int rank) {
    const int slices = (p.depth + SLICE - 1) / SLICE;
    int stage = 0;
    unsigned phase = 1;  // the ring starts empty
    for (int number = blockIdx.x / CLUSTER; number < Tile::count(p); number += gridDim.x / CLUSTER) {
        const Tile tile(p, number, rank);
        for (int slice = 0; slice < slices; ++slice) {
            Shared::Stage& to = shared.stage[stage];
            unsigned long long* full = &shared.full[stage];
            wait(&shared.empty[stage], phase);
            expect(full, sizeof(Shared::Stage));
            const int column = slice * SLICE;
#pragma unroll
            for (int k = 0; k < CONSUMERS; ++k) {
                const int slab = (tile.channel + k * OWN) / 8, third = HELD == 1 ? 0 : slab, fourth = slab - third;
                if (SHARE_WEIGHT && k != rank) continue;
                copy<SHARE_WEIGHT>(to.weight[k], p.weight, full, column, 0, third, fourth);
            }
            constexpr int PART = SHARE_WEIGHT ? RUN : RUN / CLUSTER;
            const int first = rank * PART % RUN;
            copy<!SHARE_WEIGHT>(to.x + first * 8 * SLICE, p.x, full, column, 0, tile.base + first, tile.line);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
}

// The messages of earlier tiles for a warp's eight channels: an aggregate {b, a} or an inclusive prefix {state, state}.
// Each of a channel's four lanes reads every fourth of the latest tiles.
struct Published {
    const Message* here;
    Index pitch;
    int chunk;
    unsigned epoch;
    int behind;  // earlier tiles of the line that may be in progress at the same time

    // Four bits, one per lane of a channel: whether the predicate holds for that lane of any channel.
    static __device__ unsigned any(bool holds) {
        unsigned lanes = __ballot_sync(~0u, holds);
        lanes |= lanes >> 16, lanes |= lanes >> 8;
        return (lanes | lanes >> 4) & 15;
    }
    // The carry, given the previous tile's message, which was loaded early.  All its parts are tested: the compiler
    // would split the load into one for each part that is used.
    __device__ float look_back(const Message& last) const {
        const bool known = last.mark == epoch + KNOWN && last.parts[2] == 0 && last.parts[0] == last.parts[1];
        if (!any(!known)) return __uint_as_float(last.parts[0]);  // the common case
        return behind <= 8 ? walk_back<2>() : walk_back<8>();
    }
    // Deterministic: from the nearest prefix on, however far back, it is the same sequence of multiply-adds.  Loads are
    // unconditional, to be in flight at once; those past the first tile repeat it.
    template <int ROUNDS> __device__ float walk_back() const {
        const int lane = threadIdx.x % 32, first = lane & ~3;
        for (unsigned looks = 0; looks < PATIENCE; ++looks) {
            Message messages[ROUNDS];
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round)
                messages[round] = load_message(here - min(4 * round + lane % 4 + 1, chunk) * pitch);
            unsigned known = 0, missing = 0;  // missing: absent, or a prefix for some channels only
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const Mark mark = messages[round].since(epoch);
                const unsigned open = any(mark != KNOWN);
                known |= (open ^ 15) << 4 * round;
                missing |= (any(mark == ABSENT) | open & any(mark == KNOWN)) << 4 * round;
            }
            if (!known || missing & ((known & -known) - 1)) continue;
            const int nearest = __ffs(known);
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

// The steps before which the state is reset.  A warp's lanes load the bytes of a tile's steps long before use, and a
// vote makes bits of them.
struct Resets {
    static constexpr int WORDS = RESETS ? STEPS / 32 : 1;
    unsigned word[WORDS] = {};  // bytes; after share(), bits

    __device__ void load(const Parameters& p, const Tile& tile) {
        const int lane = threadIdx.x % 32, apart = 32 * int(p.row_stride);
        const unsigned char* const from = p.resets + tile.row(p, lane);
        if constexpr (RESETS)
#pragma unroll
            for (int w = 0; w < WORDS; ++w) word[w] = 32 * w + lane >= tile.skip ? from[w * apart] : 0;
    }
    __device__ void share() {
#pragma unroll
        for (int w = 0; RESETS && w < WORDS; ++w) word[w] = __ballot_sync(~0u, word[w]);
    }
    // A bit for each step of a part's run i.
    __device__ unsigned of(int part, int i) const {
        if constexpr (!RESETS) return 0;
        constexpr int APART = WORDS / 4;  // the words of a part
        const unsigned* const of_first = word + i * RUN / 32;
        const unsigned early = part % 2 ? of_first[APART] : of_first[0];
        const unsigned late = part % 2 ? of_first[3 * APART] : of_first[2 * APART];
        return (part / 2 ? late : early) >> i * RUN % 32 & ~0u >> 32 - RUN;
    }
};

// A thread's steps, two runs for each channel.  Its rows, two of each accumulator block, are the first gate's channels,
// then the second's.  compose() overwrites the first gate's products with a and the second's with b.
struct Steps {
    float (&d)[BLOCKS][STEPS / 2];
    int begins[2];         // the step of each run at which a sequence begins, RUN for none
    float begin[HELD][2];  // its initial state, for each channel and run
    int skipped[2];        // leading steps of each run that are skipped
    unsigned resets[2];    // bits of the steps before which the state is zero

    // The product of a gate and channel at step j of run i.
    __device__ float& at(int gate, int c, int j, int i) const {
        const int row = gate * HELD + c;
        return d[row / 2][4 * j + row % 2 * 2 + i];
    }
    __device__ bool is_reset(int j, int i) const { return RESETS && resets[i] >> j & 1; }
    // Applies the gates and reduces each channel's runs.  With BETWEEN, sequences and tiles may begin within a run.
    template <bool BETWEEN>
    __device__ void compose(const Element::Channel (&channel)[HELD], Composition (&run)[HELD][2]) const {
#pragma unroll
        for (int c = 0; c < HELD; ++c)
#pragma unroll
            for (int i = 0; i < 2; ++i) run[c][i] = {1, begin[c][i], begins[i] < RUN || (RESETS && resets[i])};
#pragma unroll
        for (int j = 0; j < RUN; ++j)
#pragma unroll
            for (int c = 0; c < HELD; ++c)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    Compute x[GATES];
#pragma unroll
                    for (int gate = 0; gate < GATES; ++gate) x[gate] = at(gate, c, j, i);
                    const Element::Step step = Element::read(x, channel[c], 0, 0);
                    const bool skip = BETWEEN && j < skipped[i];
                    const float a = at(0, c, j, i) = skip ? 1 : step.a, b = at(1, c, j, i) = skip ? 0 : step.b;
                    Composition& all = run[c][i];
                    if (BETWEEN && j == begins[i]) all.b = begin[c][i];
                    if (is_reset(j, i)) all.b = 0;
                    all.a *= a;
                    all.b = fma(a, all.b, b);
                }
    }
    // Computes the states and stores them to shared memory.
    template <bool BETWEEN> __device__ void apply(float (&state)[HELD][2], unsigned to) const {
#pragma unroll
        for (int c = 0; c < HELD; ++c) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (begins[i] == 0) state[c][i] = begin[c][i];
#pragma unroll
            for (int j = 0; j < RUN; j += 4) {
                unsigned pairs[4];
#pragma unroll
                for (int k = j; k < j + 4; ++k) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        if (BETWEEN && k == begins[i]) state[c][i] = begin[c][i];
                        if (is_reset(k, i)) state[c][i] = 0;
                        state[c][i] = fma(at(0, c, k, i), state[c][i], at(1, c, k, i));
                    }
                    pairs[k - j] = pack_pair(state[c][0], state[c][1]);
                }
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                             ::"r"(to + unsigned((j * OWN + c * 8) * sizeof(Scalar))), "r"(pairs[0]), "r"(pairs[1]),
                             "r"(pairs[2]), "r"(pairs[3]) : "memory");
            }
        }
    }
};

__device__ inline void consume(const Parameters& p, Shared& shared, int rank, int warpgroup) {
    const int slices = (p.depth + SLICE - 1) / SLICE;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32, part = lane % 4;
    const int sequences = p.rows / p.period;  // of a line
    const auto meet = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + warpgroup), "n"(WARPGROUP) : "memory"); };
    const auto release = [&](int stage) { if (lane < CLUSTER) arrive(&shared.empty[stage], lane); };
    const int behind = gridDim.x / (SHARE_WEIGHT ? 1 : CLUSTER) / (Tile::count_groups(p) * p.lines) + 2;
    int stage = 0;
    unsigned phase = 0;
    for (int number = blockIdx.x / CLUSTER; number < Tile::count(p); number += gridDim.x / CLUSTER) {
        float d[BLOCKS][STEPS / 2];
        const auto multiply_slice = [&](bool add) {
            wait(&shared.full[stage], phase);
            const unsigned long long a = describe(shared.stage[stage].weight[warpgroup]);
            const unsigned long long b = describe(shared.stage[stage].x);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < SLICE / 16; ++k)
#pragma unroll
                for (int block = 0; block < BLOCKS; ++block)
                    multiply(d[block], a + block * (64 * SLICE * sizeof(Scalar) >> 4) + 2 * k, b + 2 * k, add || k > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (++stage == STAGES) stage = 0, phase ^= 1;
        };
        multiply_slice(false);

        // Overlapped with the wgmmas in flight: the tile's coordinates.
        const Tile tile(p, number, rank);
        const int first_channel = tile.channel + warpgroup * OWN;
        const int channel = first_channel + warp * 8 * HELD + lane / 4;  // and the eighth after it
        bool inside[HELD];  // the same for a warp
        const Index pitch = Index(p.lines) * p.channels;  // messages of a chunk
        Message* here[HELD];
        Compute parameters[HELD][OF_CHANNEL] = {};
#pragma unroll
        for (int c = 0; c < HELD; ++c) {
            inside[c] = channel + 8 * c < p.channels && tile.skip < STEPS;
            here[c] = p.published + (inside[c] ? tile.chunk * pitch + tile.line * p.channels + channel + 8 * c : 0);
#pragma unroll
            for (int k = 0; k < PARAMETERS; ++k)
                if (inside[c]) parameters[c][k] = widen(p.parameters[k][channel + 8 * c]);
        }
        const int begun = tile.base / p.period, past = tile.base % p.period;  // whole sequences before, and rows since
        const bool continues = past > 0 || tile.skip > 0;
        const bool ends = past + STEPS > p.period;  // a sequence ends within, and another begins
        const bool between = tile.skip > 0 || (ends && (past % RUN > 0 || p.period % RUN > 0));
        Steps steps = {d, {RUN, RUN}, {}, {}, {}};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int local = (2 * part + i) * RUN, row = past + local;
            steps.skipped[i] = tile.skip - local;
            if (past > 0 && !ends) continue;
            const int sequence = (row + p.period - 1) / p.period, first = sequence * p.period - row;
            if (first >= RUN || local + first < tile.skip) continue;
            steps.begins[i] = first;
            const Index which = tile.line * sequences + begun + sequence;
#pragma unroll
            for (int c = 0; c < HELD; ++c)
                if (p.initial && inside[c])
                    steps.begin[c][i] = widen(p.initial[which * p.channels + channel + 8 * c]);
        }
        Resets resets;
        // Last, as loads return in order and those before are in the L1 cache, and with two slices in flight.
        if (slices == 1) resets.load(p, tile);

        for (int slice = 1; slice < slices; ++slice) {
            const int before = stage == 0 ? STAGES - 1 : stage - 1;
            multiply_slice(true);
            if (slice == 1) resets.load(p, tile);
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            release(before);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        release(stage == 0 ? STAGES - 1 : stage - 1);
        Message last_tile[HELD];
        // An early, unconditional load; the first tile loads its own message instead.
#pragma unroll
        for (int c = 0; c < HELD; ++c)
            last_tile[c] = load_message(inside[c] && tile.chunk > 0 ? here[c] - pitch : here[c]);

        resets.share();
#pragma unroll
        for (int i = 0; i < 2; ++i) steps.resets[i] = resets.of(part, i);
        Element::Channel of_channel[HELD];
#pragma unroll
        for (int c = 0; c < HELD; ++c) of_channel[c] = Element::prepare(parameters[c]);
        Composition run[HELD][2];
        if (between) steps.compose<true>(of_channel, run);
        else steps.compose<false>(of_channel, run);

        Composition before[HELD], whole[HELD];  // exclusive prefix over the four lanes; aggregate
#pragma unroll
        for (int c = 0; c < HELD; ++c) {
            const Composition mine = run[c][0].then(run[c][1]);
            before[c] = whole[c] = {1, 0, false};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i == part) before[c] = whole[c];
                whole[c] = whole[c].then(mine.of_lane((lane & ~3) + i));
            }
        }
        const auto publish = [&](int c, Mark mark, float b) {
            const float a = mark == KNOWN ? b : whole[c].a;
            if (part == 0 && inside[c])
                store_message(here[c], {{__float_as_uint(b), __float_as_uint(a), 0, p.epoch + mark}});
        };
#pragma unroll
        for (int c = 0; c < HELD; ++c) publish(c, whole[c].reset ? KNOWN : COMPOSED, whole[c].b);
        float state[HELD] = {};
        if (continues) {
#pragma unroll
            for (int c = 0; c < HELD; ++c) {
                if (!inside[c]) continue;
                state[c] = Published{here[c], pitch, tile.chunk, p.epoch, behind}.look_back(last_tile[c]);
                if (!whole[c].reset) publish(c, KNOWN, whole[c].carry(state[c]));
            }
        }
        float states[HELD][2];
#pragma unroll
        for (int c = 0; c < HELD; ++c) {
            states[c][0] = before[c].carry(state[c]);
            states[c][1] = run[c][0].carry(states[c][0]);
        }
        constexpr int LANES = OWN / 8, AT_ONCE = WARPGROUP / LANES;  // lanes that store a row; rows at once
        const int piece = thread % LANES * 8, row = thread / LANES;
        const int from = first_channel + piece < p.channels ? tile.skip : STEPS;  // the first step to be stored
        Scalar* line = p.h + tile.row(p, row) * p.channels + first_channel + piece;
        meet();  // the previous tile's states have been read
        Scalar* const h = shared.h[warpgroup];
        const unsigned to = address(h + lane % 8 * PADDED_RUN + lane / 8 * OWN + warp * 8 * HELD);
        if (between) steps.apply<true>(states, to);
        else steps.apply<false>(states, to);
        meet();
        const auto eight = [&](int row) {
            return *reinterpret_cast<const uint4*>(h + row / RUN * PADDED_RUN + row % RUN * OWN + piece);
        };
#pragma unroll
        for (int k = 0; k < STEPS; k += AT_ONCE, line += AT_ONCE * p.row_stride * p.channels)
            if (k + row >= from) *reinterpret_cast<uint4*>(line) = eight(k + row);
        Index sequence = tile.line * sequences + begun;
        for (int last = p.period - 1 - past; last < STEPS; last += p.period, ++sequence) {
            if (last % AT_ONCE != row || last < from) continue;
            *reinterpret_cast<uint4*>(p.final + sequence * p.channels + first_channel + piece) = eight(last);
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
    meet_cluster();  // no block may exit while the other writes to its shared memory
}
