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

__device__ inline void produce(const Parameters& p, Shared& shared, int rank) {
    const int slices = (p.depth + SLICE - 1) / SLICE;
    int stage = 0;
    unsigned phase = 1;  // the ring starts empty
    for (int number = blockIdx.x / CLUSTER; number < Tile::count(p); number += gridDim.x / CLUSTER) {
        const Tile tile(p, number, rank);
        for (int slice = 0; slice < slices; ++slice) {
            Shared::Stage& to = shared.stage[stage];
            Barrier& full = shared.full[stage];
            wait(shared.empty[stage], phase);
            full.expect(sizeof(Shared::Stage));
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

__device__ inline void consume(const Parameters& p, Shared& shared, int rank, int warpgroup) {
    const int slices = (p.depth + SLICE - 1) / SLICE;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32, part = lane % 4;
    const int sequences = p.rows / p.period;  // of a line
    const auto sync_warpgroup = [&] {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warpgroup), "n"(WARPGROUP) : "memory");
    };
    const auto release = [&](int stage) { if (lane < CLUSTER) arrive(shared.empty[stage], lane); };
    const int behind = gridDim.x / (SHARE_WEIGHT ? 1 : CLUSTER) / (Tile::count_groups(p) * p.lines) + 2;
    int stage = 0;
    unsigned phase = 0;
    for (int number = blockIdx.x / CLUSTER; number < Tile::count(p); number += gridDim.x / CLUSTER) {
        float d[BLOCKS][STEPS / 2];
        const auto multiply_slice = [&](bool add) {
            wait(shared.full[stage], phase);
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

        resets.share(part, steps.resets);
        Element::Channel of_channel[HELD];
#pragma unroll
        for (int c = 0; c < HELD; ++c) of_channel[c] = Element::prepare(parameters[c]);
        Composition run[HELD][2];
        if (between) steps.compose<true>(of_channel, run);
        else steps.compose<false>(of_channel, run);

        Composition before[HELD], whole[HELD];  // exclusive prefix over the four lanes; aggregate
#pragma unroll
        for (int c = 0; c < HELD; ++c) compose_lanes(run[c], before[c], whole[c]);
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
        sync_warpgroup();  // the previous tile's states have been read
        Scalar* const h = shared.h[warpgroup];
        const unsigned to = shared_address(h + lane % 8 * PADDED_RUN + lane / 8 * OWN + warp * 8 * HELD);
        if (between) steps.apply<true>(states, to);
        else steps.apply<false>(states, to);
        sync_warpgroup();
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
    Shared& shared = *reinterpret_cast<Shared*>(memory + (-shared_address(memory) & 1023));
    const int rank = CLUSTER == 1 ? 0 : block_of_cluster(), warpgroup = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            shared.full[stage].init();
            shared.empty[stage].init<CLUSTER * CONSUMERS * 4>();
        }
        fence_barrier_init();
    }
    __syncthreads();
    sync_cluster();
    if (warpgroup < CONSUMERS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(p, shared, rank, warpgroup);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == CONSUMERS * WARPGROUP) produce(p, shared, rank);
        __syncwarp();
    }
    sync_cluster();  // no block may exit while the other writes to its shared memory
}
