// The tiles of weights that a lane multiplies at every step, and where they are kept between steps.
//
// Of ALL tiles, STREAMED do not fit on chip and are read from L2 at every step.  These loads are issued AHEAD tiles in
// advance, the first ones while the block waits for the state.  Of the other tiles, IN_REGISTERS stay in registers, and
// the rest in shared memory.  The FIRST tiles on chip are in shared memory; apart from that, each kind is spread evenly
// among all tiles.

// Where the tiles are in memory, with 16 bytes for each lane.
struct Tiles {
    const uint4* packed;  // (BLOCKS, WARPS, tiles, 32 lanes), from this lane's first tile
    uint4* shared;        // (tiles, THREADS), from this thread's first

    __device__ uint4 load(int tile) const { return __ldcg(packed + tile * 32); }
    __device__ uint4& in_shared(int i) const { return shared[i * THREADS]; }
};

template <int ALL> __device__ inline Tiles tiles_of_lane(const Parameters& p, int block, uint4* shared) {
    const int first = (block * WARPS + warp_id()) * ALL * 32 + lane_id();
    return {reinterpret_cast<const uint4*>(p.packed) + first, shared + threadIdx.x};
}

template <int ALL, int FIRST = 0> struct Weights {
    static constexpr int ON_CHIP = ALL - STREAMED;
    Tiles memory;
    uint4 in_registers[IN_REGISTERS + 1], ahead[STREAMED ? AHEAD : 1];  // no array is empty

    static __device__ constexpr int streamed_before(int tile) { return (tile * STREAMED + ALL - 1) / ALL; }
    static __device__ constexpr bool is_streamed(int tile) {
        return streamed_before(tile + 1) > streamed_before(tile);
    }
    // How many of the first i tiles on chip are in registers, and whether tile i is.
    static __device__ constexpr int registers_before(int i) {
        return i <= FIRST ? 0 : (i - FIRST) * IN_REGISTERS / (ON_CHIP - FIRST);
    }
    static __device__ constexpr bool is_in_registers(int i) { return registers_before(i + 1) > registers_before(i); }

    Weights() = default;
    __device__ explicit Weights(const Tiles& memory) : memory(memory) {
#pragma unroll
        for (int tile = 0; tile < ALL; ++tile) {
            if (is_streamed(tile)) continue;
            const int i = tile - streamed_before(tile);
            const int before = registers_before(i);
            (is_in_registers(i) ? in_registers[before] : memory.in_shared(i - before)) = memory.load(tile);
        }
#pragma unroll
        for (int i = 0; i < AHEAD && i < STREAMED; ++i) ahead[i] = stream(i);
    }

    // Returns a tile.  The slot of a streamed tile is refilled with a later one, of this step or the next.
    __device__ uint4 take(int tile) {
        const int before = streamed_before(tile), i = tile - before;
        if (is_streamed(tile)) {
            const uint4 taken = ahead[before % AHEAD];
            ahead[before % AHEAD] = stream(before + AHEAD < STREAMED ? before + AHEAD : before % AHEAD);
            return taken;
        }
        return is_in_registers(i) ? in_registers[registers_before(i)] : memory.in_shared(i - registers_before(i));
    }

private:
    __device__ uint4 stream(int i) const { return memory.load(i * ALL / (STREAMED + !STREAMED)); }
};
