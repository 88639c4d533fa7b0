// The scan kernel, for every operation in elements.cuh.
//
// A chain is GROUP adjacent channels of one sequence, cut along time into tiles.  In a tile every thread scans ROWS
// consecutive steps of VEC channels, adjacent or, if rows are unaligned (PITCHED), LANES apart; LANES lanes of a warp
// span the channels, so a warp covers SEGMENTS = 32 / LANES segments of time, and a block's WARPS warps are consecutive
// in time:
//
//     tile = WARPS x SEGMENTS x ROWS steps,   GROUP = LANES * VEC channels
//
// A `chunk` is the index of a tile in its chain, which has `chunks` tiles.
//
// If LANES exceeds 32, several warps side by side ("abreast") span the channels, and count as one.
//
// Each thread reduces its steps to one composition (a, b); these are scanned by shuffles within a warp and through
// shared memory between warps; then each thread replays its steps from the state they start in.  The three algorithms
// differ only in where a tile's carry (the state before its first step) comes from:
//
//   streaming        one block per chain scans its tiles in order and keeps the carry in registers.  Best with enough
//   (CHAINED 0)      channels to fill the GPU: blocks do not communicate.  With half as many channels, the blocks of a
//                    cluster (CLUSTER blocks) take a chain's tiles in turn, and exchange the aggregates of every round.
//   interleaved      few channels: P blocks share a chain, each scanning every P-th tile.  A block publishes the
//   (CHAINED 1)      aggregate of its next tile before it finishes the current one; it gets the current tile's carry by
//                    composing the aggregates of the other blocks' tiles since its own previous tile.  If there are as
//                    many blocks as tiles, the tiles stay in shared memory and results replace inputs (STAYS 1).
//   look-back        in between: a block begins with the tile of its own index and draws others, of any chain, from a
//   (CHAINED 1,      counter, which balances the load; it gets the carry by decoupled look-back over the aggregates
//    LOOKS_BACK 1)   and inclusive prefixes of earlier tiles (single-pass scan; Merrill & Garland 2016).
//
// The blocks of a chain wait for each other, so a cooperative launch makes all of them resident.
//
// Look-back cannot deadlock then: every block begins with its first tile at once, further tiles are drawn in order, and
// each block finishes its tiles in order, so all tiles before one that has begun belong to running blocks; a tile waits
// only for earlier ones; and the earliest unfinished tile, which its block is working on, waits for none.  Results are
// deterministic: however far a block looks back, the state runs forward through the same sequence of multiply-adds.
//
// Interleaved blocks wait only for aggregates, which depend only on inputs, so they cannot deadlock.  The order of all
// products and sums depends only on the number of blocks, so results are deterministic on one GPU.
//
// Later tiles are prefetched into shared memory while the current one is scanned.
//
// Short sequences of few channels that follow one another in memory are scanned as one sequence, with a reset where
// each of them begins (JOINED).
//
// Steps are numbered in scan order.  Steps outside the sequence (ragged ends, shorter packed sequences) act as the
// identity.
//
// The files that are compiled before this one are listed in launch.py.

// Sums the parameters' gradients over a block's segments, then over its warps, in a fixed order, into the block's row.
__device__ inline void store_sums(const Place& at, Shared& shared, int part, Sums& sums) {
#pragma unroll
    for (int k = 0; k < PARAMETERS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
#pragma unroll
            for (int lanes = LANES; lanes < 32; lanes *= 2) sums[k][v] += __shfl_down_sync(~0u, sums[k][v], lanes);
            if (at.segment == 0) shared.sums[at.warp][k][at.lane * NEXT_LANE + v * NEXT] = sums[k][v];
        }
    __syncthreads();
    const Parameters& p = at.p;
    const Index row = Index(part) * p.batch + at.batch;
    for (int i = threadIdx.x; i < PARAMETERS * GROUP; i += THREADS) {
        const int k = i / GROUP, channel = at.group * GROUP + i % GROUP;
        if (channel >= p.channels) continue;
        Compute sum = 0;
        for (int warp = 0; warp < WARPS; ++warp) sum += shared.sums[warp][k][i % GROUP];
        p.sums[((row * p.directions + at.direction) * PARAMETERS + k) * p.channels + channel] = sum;
    }
}

// Computes what depends on the parameters of this thread's channels alone.
__device__ inline void prepare(const Place& at, OfChannels& of_channels) {
    const Parameters& p = at.p;
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        Compute parameters[OF_CHANNEL] = {};
#pragma unroll
        for (int k = 0; k < PARAMETERS; ++k)
            if (at.has(v))
                parameters[k] = widen(p.parameters[k][at.direction * p.parameter_direction + at.channel + v * NEXT]);
        of_channels[v] = Element::prepare(parameters);
    }
}

// Replays a composed tile from the carry `state`, which becomes the state after the tile.
__device__ inline void apply(
    const Place& at, const Memory& memory, Shared& shared, int buffer, int chunk, const Steps& steps,
    const Composition& before, Channels& state, Sums& sums
) {
    const Compositions& tile = shared.tile[buffer];
    Channels mine = state;  // before this thread's first step
    const unsigned resets = tile.resets();
    if constexpr (CHAINED || CLUSTER > 1) {
        if (at.warp > 0) tile.of(at.warp, resets & (1u << at.warp) - 1).carry(mine);
        tile.of(0, resets).carry(state);
    } else {
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            if (warp == at.warp) mine = state;
            tile.of(warp, resets >> warp & 1).carry(state);
        }
    }
    if (SEGMENTS > 1) before.carry(mine);
    const Channels first = mine;
#pragma unroll(KEPT_ROWS ? PARTS : 1)  // keeps `steps.kept` in registers
    for (int part = 0; part < PARTS; ++part) {
        const bool unchecked = at.whole(chunk) && !steps.bounded;
        if (unchecked && steps.apply<false>(at, memory, shared, buffer, chunk, part, mine, sums)) continue;
        steps.apply<true>(at, memory, shared, buffer, chunk, part, mine, sums);
    }
    if (steps.is_lost(at, mine, mine)) rescan(at.p, at.chain(), chunk, steps.resets, first);
}

__device__ inline void read(
    const Place& at, const Memory& memory, Shared& shared, int stage, int buffer, int chunk,
    const OfChannels& of_channels, Steps& steps
) {
    steps.look_for_bounds(at, shared, buffer);
    steps.read(at, memory, shared, stage, buffer, chunk, of_channels);
    if (!STAYS && (EXCHANGED || Mask::COPIED)) sync_abreast();
}

// Copies a tile to shared memory.  The first tiles of blocks that share a narrow sequence are copied with checks, so
// that the code of the unchecked path is generated only once: it matters for the many later tiles only.
template <bool FIRST = false>
__device__ inline void fetch(const Place& at, const Memory& memory, Shared& shared, int stage, int chunk, int chunks) {
    if constexpr (MAPPED) {
        if (at.lane == 0 && chunk < chunks)
            fetch_strips(at, shared.input[stage][at.warp], shared.arrival[at.warp], chunk);
        return;
    }
    if (Mask::COPIED && chunk < chunks) shared.mask[stage][at.warp].fetch(at, chunk);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        if (chunk < chunks) {
            if (!(FIRST && NARROW && CHAINED && !STAYS) && at.inner(chunk))
                fetch_strips<false>(at, memory, shared.input[stage][at.warp], chunk, part);
            else
                fetch_strips<true>(at, memory, shared.input[stage][at.warp], chunk, part);
        }
        commit_copies();
    }
}

// Streaming: one block scans all tiles of its chain, or the blocks of a cluster take them in turn.
__device__ inline void stream(const Parameters& p, Shared& shared, int chunks) {
    const Place at(p, blockIdx.x / CLUSTER);
    const int rank = blockIdx.x % CLUSTER;
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) shared.inbox[0].init();
        arrive_in_cluster();
    }
    const Memory memory(at);
    Resets resets, later;
    later.load(at, rank);  // before the copies, as it would queue behind them
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) fetch<true>(at, memory, shared, stage, rank + stage * CLUSTER, chunks);
    OfChannels of_channels;
    prepare(at, of_channels);
    Channels state;
    load_state(at, PACKING == CU_SEQLENS ? nullptr : p.initial, 0, state);
    Sums sums = {};
    int sequence = -1, parity = 0;
    if constexpr (CLUSTER > 1) wait_for_cluster();
    for (int chunk = rank, stage = 0, buffer = 0; chunk < chunks; chunk += CLUSTER, parity ^= buffer, buffer ^= 1) {
        if (PACKING == CU_SEQLENS) shared.find_sequences(at, chunk, buffer, sequence);
        wait_for_copies();
        if (EXCHANGED || Mask::COPIED) sync_abreast();
        Steps steps;
        if (chunk % Resets::TILES == 0) {
            resets = later;
            resets.share();
            later.load(at, chunk + Resets::TILES * CLUSTER);
        }
        steps.resets = resets.of(at, shared, stage, chunk);
        read(at, memory, shared, stage, buffer, chunk, of_channels, steps);
        fetch(at, memory, shared, stage, chunk + STAGES * CLUSTER, chunks);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        const Composition before = shared.tile[buffer].scan_warp(at, steps.compose(at, shared, buffer, chunk));
        __syncthreads();
        const int left = chunks - (chunk - rank), count = left < CLUSTER ? left : CLUSTER;  // blocks that have a tile
        if constexpr (CLUSTER > 1) {
            Inbox& inbox = shared.inbox[0];
            if (threadIdx.x < LANES) inbox.send(buffer, rank, count, shared.tile[buffer].scan_warps());
            inbox.carry_over_lower(buffer, parity, rank, state);
        }
        apply(at, memory, shared, buffer, chunk, steps, before, state, sums);
        if constexpr (CLUSTER > 1) shared.inbox[0].carry_over_higher(buffer, parity, rank, count, state);
    }
    if constexpr (SUMS) store_sums(at, shared, rank, sums);
}

// Carries a state over the first `parts` compositions of other blocks' tiles.
__device__ inline void carry_over(const Compositions& others, int parts, Channels& state) {
    int part = 0;
    if (const unsigned resets = others.resets() & (1u << parts) - 1) {  // nothing before the last reset matters
        part = 32 - __clz(resets);
        state = others.of(part - 1, true).b;
    }
#pragma unroll 4
    for (; part < parts; ++part) others.of(part, false).carry(state);
}

// Interleaved with as many blocks as tiles: each tile stays in shared memory.
__device__ inline void stay(const Parameters& p, Shared& shared, int chunks) {
    const int chain = blockIdx.x / chunks, chunk = blockIdx.x - chain * chunks;
    const Place at(p, chain);
    const Memory memory(at);
    const Published published(p, chain, chunks);
    Resets resets;
    resets.load(at, chunk);  // before the copies, as it would queue behind them
    fetch(at, memory, shared, 0, chunk, chunks);
    Channels state;
    load_state(at, p.initial, 0, state);
    Steps steps;
    resets.share();
    steps.resets = resets.of(at, shared, 0, chunk);
    read(at, memory, shared, 0, 0, chunk, {}, steps);
    const Composition before = shared.tile[0].scan_warp(at, steps.compose(at, shared, 0, chunk));
    __syncthreads();
    if (at.warp == WARPS - 1) {  // the last warp has the fewest aggregates to read
        const Composition all = shared.tile[0].scan_warps();
        if (chunks > 1) published.write(chunk, all);
    }
    // The earlier tiles are divided among the warps.
    const int share = (chunks - 1 + WARPS - 1) / WARPS, parts = chunk > 0 ? (chunks - 1 + share - 1) / share : 0;
    const int first = at.warp * share, end = first + share < chunk ? first + share : chunk;
    if (at.warp < parts) {
        Composition between = Composition::none();
        for (int i = first; i < end; i += Prefetched::SIZE) {
            Prefetched prefetched;
            prefetched.load(published, i, end);
            prefetched.compose(published, i, end, between, i == first);
        }
        shared.tile[1].scan_warp(at, between);
    }
    __syncthreads();
    carry_over(shared.tile[1], parts, state);
    Sums sums = {};
    apply(at, memory, shared, 0, chunk, steps, before, state, sums);
}

// Interleaved: P blocks (`companions`) share a chain, each scanning every P-th tile.
__device__ inline void interleave(const Parameters& p, Shared& shared, int chunks) {
    const int companions = p.companions;
    const int chain = SINGLE ? 0 : blockIdx.x / companions, first_tile = blockIdx.x - chain * companions;
    const Place at(p, chain);
    const Memory memory(at);
    const Published published(p, chain, chunks);
    int next = first_tile;  // the tile to be composed next
    // The tiles of other blocks between two tiles of this block are divided among its segments.
    const int share = (companions - 1 + POLLERS - 1) / POLLERS, of_warp = SEGMENTS * share;
    const int parts = companions > 1 ? (companions - 1 + of_warp - 1) / of_warp : 0;
    if constexpr (MAPPED) {
        if (at.lane == 0) {
            shared.arrival[at.warp].init();
            fence_barrier_init();
        }
        __syncwarp();
    }
    Resets later;
    later.load(at, next);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage)
        fetch<true>(at, memory, shared, stage, next + stage * companions, chunks);
    OfChannels of_channels;
    prepare(at, of_channels);
    Channels state;
    load_state(at, PACKING == CU_SEQLENS ? nullptr : p.initial, 0, state);
    Steps steps;
    Composition before;
    Sums sums = {};
    int sequence = -1;
    // The sequences of a tile are looked up one tile ahead, to overlap with other waits.
    if (PACKING == CU_SEQLENS && next < chunks) shared.find_sequences(at, next, 0, sequence);
    int parity = 0;
    for (int now = -1, since = 0, stage = 0, last = 0, buffer = 0;; since = now + 1, now = next, next += companions) {
        const int first = since + at.warp * of_warp + at.segment * share,
                  end = first + share < now ? first + share : now;
        Prefetched prefetched;
        prefetched.load(published, first, end);
        Steps coming;
        Composition composed;
        if (next < chunks) {
            if constexpr (MAPPED) {
                shared.arrival[at.warp].wait(parity);
                parity ^= 1;
            } else {
                wait_for_copies();
                if (EXCHANGED || Mask::COPIED) sync_abreast();
            }
            later.share();
            coming.resets = later.of(at, shared, stage, next);
            later.load(at, next + companions);
            read(at, memory, shared, stage, buffer, next, of_channels, coming);
            fetch(at, memory, shared, stage, next + STAGES * companions, chunks);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            composed = shared.tile[buffer].scan_warp(at, coming.compose(at, shared, buffer, next));
        }
        __syncthreads();
        // The last warp publishes, as it has the fewest aggregates to read.
        if (next < chunks && at.warp == WARPS - 1 && at.segment == 0) {
            const Composition all = shared.tile[buffer].scan_warps();
            if (companions > 1) published.write(next, all);
        }
        const int following = buffer + 1 == BUFFERS ? 0 : buffer + 1;
        if (PACKING == CU_SEQLENS && next + companions < chunks)
            shared.find_sequences(at, next + companions, following, sequence);
        if (now >= 0) {
            if (now > since) {
                if (at.warp < parts) {
                    Composition between = Composition::none();
                    if constexpr (NARROW) {  // one copy of the code compiles faster
#pragma unroll 1
                        for (int i = first;;) {
                            prefetched.compose(published, i, end, between, i == first);
                            if ((i += Prefetched::SIZE) >= end) break;
                            prefetched.load(published, i, end);
                        }
                    } else {  // in a single copy the compiler would not see what is uniform across threads
                        prefetched.compose(published, first, end, between, true);
                        for (int i = first + Prefetched::SIZE; i < end; i += Prefetched::SIZE) {
                            prefetched.load(published, i, end);
                            prefetched.compose(published, i, end, between, false);
                        }
                    }
                    __syncwarp();
                    shared.tile[BUFFERS].scan_warp(at, between);
                }
                __syncthreads();
                carry_over(shared.tile[BUFFERS], parts, state);
            }
            apply(at, memory, shared, last, now, steps, before, state, sums);
        }
        if (next >= chunks) break;
        steps = coming, before = composed, last = buffer, buffer = following;
    }
    if constexpr (SUMS) store_sums(at, shared, first_tile, sums);
}

// Look-back: after the tile of its own index, a block draws tiles of any chain from a counter, one tile ahead.
__device__ inline void chain_looking_back(const Parameters& p, Shared& shared, int chunks) {
    const int chains = (p.channels + GROUP - 1) / GROUP * p.batch * p.directions;
    struct Tile { int chain, chunk; };
    const auto tile_of = [&](int number) -> Tile { return {number % chains, number / chains}; };
    const auto draw = [&] { return threadIdx.x == 0 ? int(gridDim.x + atomicAdd(p.counter, 1u) - p.drawn) : 0; };
    Tile tile = tile_of(blockIdx.x);
    Resets later;
    int sequence = -1;
    const auto find_sequences = [&](const Place& at, int chunk, int buffer) {
        if (PACKING == CU_SEQLENS && chunk < chunks) shared.find_sequences(at, chunk, buffer, sequence);
    };
    {
        const Place at(p, tile.chain);
        if (tile.chunk < chunks) later.load(at, tile.chunk);
        fetch(at, Memory(at), shared, 0, tile.chunk, chunks);
        find_sequences(at, tile.chunk, 0);
    }
    for (int buffer = 0; tile.chunk < chunks; buffer ^= 1) {
        const Place at(p, tile.chain);
        const int chunk = tile.chunk, number = draw();
        OfChannels of_channels;
        prepare(at, of_channels);
        Channels state;
        load_state(at, PACKING == CU_SEQLENS ? nullptr : p.initial, 0, state);
        later.share();
        Steps steps;
        if (!Mask::COPIED) steps.resets = later.of(at, shared, 0, chunk);
        wait_for_copies();
        if (EXCHANGED || Mask::COPIED) sync_abreast();
        if (Mask::COPIED) steps.resets = later.of(at, shared, 0, chunk);
        read(at, Memory(at), shared, 0, buffer, chunk, of_channels, steps);
        const Composition before = shared.tile[buffer].scan_warp(at, steps.compose(at, shared, buffer, chunk));
        if (threadIdx.x == 0) shared.drawn[buffer] = number;  // only here, as the atomic has returned by now
        __syncthreads();
        const Published published(p, tile.chain, chunks);
        Composition all;
        bool settled = false;
        if (threadIdx.x < LANES) {
            all = shared.tile[buffer].scan_warps();
            // The first tile, and one that resets the state, has its inclusive prefix without looking back.
            settled = chunk == 0 || all.reset;
            if (settled) published.write_after(chunk, all, state);
            else published.write(chunk, all);
        }
        const Tile next = tile_of(shared.drawn[buffer]);
        const Place there(p, next.chain);
        if (Resets::EARLY && next.chunk < chunks) later.load(there, next.chunk);  // before the copies
        fetch(there, Memory(there), shared, 0, next.chunk, chunks);
        find_sequences(there, next.chunk, buffer ^ 1);  // while other blocks finish the earlier tiles
        if (chunk > 0) state = look_back(at, shared, published, chunk, all, settled);
        else __syncthreads();
        if (!Resets::EARLY && next.chunk < chunks) later.load(there, next.chunk);
        Sums sums = {};
        apply(at, Memory(at), shared, buffer, chunk, steps, before, state, sums);
        if constexpr (SUMS) store_sums(at, shared, chunk, sums);
        tile = next;
    }
}

#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER)
#else
#define IN_CLUSTERS
#endif
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, RESIDENT) scan(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int chunks = (p.steps + TILE - 1) / TILE;
    if constexpr (LOOKS_BACK) chain_looking_back(p, shared, chunks);
    else if constexpr (STAYS) stay(p, shared, chunks);
    else if constexpr (CHAINED) interleave(p, shared, chunks);
    else stream(p, shared, chunks);
}
