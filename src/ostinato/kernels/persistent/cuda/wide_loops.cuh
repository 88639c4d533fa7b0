// The loops over time of the warps that copy, that multiply and that update, for wide batches; see wide.cuh.

// One bit for each two tiles, set if both have been published for the `count`th time; no bit is set before all blocks
// of the team have published, too.
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

// Copies all states that the block multiplies, as soon as they are published, beginning with number FIRST.
__device__ inline void copy(const Parameters& p, const Place& place, char* shared) {
    if (warp_id() % 4) return;  // more warps would poll the same flags, and delay what they wait for
    constexpr int FIRST = BACKWARD;
    Timeout timeout(p.failure);
    Slot slot;
    for (int count = FIRST; count < p.steps + FIRST; ++count) {
#pragma unroll 1
        for (int turn = 0; turn < BLOCK_GROUPS; ++turn) {
            const char* from = place.published(p, turn, count) + place.rank * TILES * STATE_BYTES;
            unsigned ready = 0;  // one bit for each two tiles
#pragma unroll 1
            for (int part = 0; part < COPIES; ++part) {
                const int bytes = min(COPIED, TILES - part * COPIED) * STATE_BYTES;
                const unsigned needed = (~0u >> (32 - COPIED / 2) << part * (COPIED / 2)) & ~0u >> (32 - TILES / 2);
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
                if (lane_id() == 0) slot.fill(shared, from + part * COPY_BYTES, bytes);
                __syncwarp();
                slot.next();
            }
        }
    }
}

// The items of a thread of the updating warpgroup: two adjacent units of two adjacent sequences in each round and turn.
// Unit u of sequence s is number 2 s + u of these four.  Units of padding get sequences far beyond the batch.
struct UpdatedUnits {
    static constexpr int BEYOND = 1 << 30;
    int thread = threadIdx.x % OWNERS, unit, sequence;

    __device__ explicit UpdatedUnits(const Place& place)
        : unit(place.block * UNITS + lane_id() / 4 * 2),
          sequence((exists(unit) ? 0 : BEYOND) + place.group * COLUMNS + thread / 32 * 8 + lane_id() % 4 * 2) {}
    __device__ int sequence_of(int turn, int round, int s) const { return sequence + turn * COLUMNS + round * 32 + s; }
    // The index of the first unit in a row of a (rows, gates * HIDDEN) tensor.
    __device__ size_t at(size_t row, int gates = 1) const { return row * (gates * HIDDEN) + unit; }
    // The byte offset of a round's sequence s in the tile that the block publishes.
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

// The sum, with the last bit of `count` in place of its own.
__device__ inline float tagged(float sum, unsigned count) {
    return __uint_as_float((__float_as_uint(sum) & ~1u) | (count & 1));
}

// Multiplies, in all steps.  `send` is called for each tile of eight sequences with the turn, the tile and the lane's
// sums, of two units of two sequences.
template <typename Send>
__device__ inline void multiply_all(const Parameters& p, const Place& place, char* shared, Send send) {
    set_registers<REGISTERS>();
    Product product(p, place, shared);
    for (int count = 1; count <= p.steps; ++count) {
#pragma unroll 1
        for (int turn = 0; turn < BLOCK_GROUPS; ++turn) {
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

// Waits for the `count`th sums of a round, which are TERM float4 apart; NaN if the wait times out.  At first each lane
// polls a single word, as polls of all would delay other accesses.
__device__ inline void receive(float4 (&sums)[TERMS], const float4* mine, unsigned count, char* shared,
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

// Announces that this warp has published; waiting for the block's other warps to do so once would take longer.
__device__ inline void announce(const Parameters& p, const Place& place, int turn) {
    __syncwarp();
    if (lane_id()) return;
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(place.flags(p, turn) + place.block) : "memory");
}

// Updates, publishes and writes units, in all steps.
template <typename Units> __device__ inline void update_all(const Parameters& p, const Place& place, char* shared) {
    set_registers<UPDATING>();
    Timeout timeout(p.failure);
    Units units(p, place, shared);
    units.fetch(0, 0);
    for (int iteration = 0; iteration < p.steps; ++iteration) {
#pragma unroll 1
        for (int turn = 0; turn < BLOCK_GROUPS; ++turn) {
            units.update(place, shared, iteration, turn, timeout);
            announce(p, place, turn);
            units.write(shared, iteration, turn);
            const int next = (turn + 1) % BLOCK_GROUPS;
            if (iteration + !next < p.steps) units.fetch(iteration + !next, next);
        }
    }
    units.finish(place, shared, timeout);
}

// The kernel that runs before the loop over time: clears the flags and, backward, the sums; forward, writes the initial
// state.
extern "C" __global__ void __launch_bounds__(THREADS) prepare(const Launch launch) {
    const Parameters& p = launch.own();
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
