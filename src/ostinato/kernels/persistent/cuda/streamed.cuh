// Weights that do not fit on chip.
//
// Of ALL pieces of weights that a lane multiplies, tiles or entries, STREAMED are read from L2 at every step, AHEAD of
// them in advance: the first while the block waits for the state.  They are spread evenly among all.

// This lane's part of packed tiles: (BLOCKS, WARPS, tiles, 32 lanes) of 16 bytes.
struct PackedTiles {
    const uint4* lane;
    __device__ uint4 load(int tile) const { return __ldcg(lane + tile * 32); }
};

template <int ALL, typename Packed> struct Streamed {
    static constexpr int AHEAD = 4;
    Packed packed;
    decltype(packed.load(0)) ahead[STREAMED ? AHEAD : 1];

    static __device__ constexpr int before(int piece) { return (piece * STREAMED + ALL - 1) / ALL; }
    static __device__ constexpr bool has(int piece) { return before(piece + 1) > before(piece); }

    __device__ void begin() {
#pragma unroll
        for (int i = 0; i < AHEAD && i < STREAMED; ++i) ahead[i] = load(i);
    }
    // A piece of weights.  Its slot is refilled with a later one, of this step or the next.
    __device__ auto take(int piece) {
        const int i = before(piece);
        const auto taken = ahead[i % AHEAD];
        ahead[i % AHEAD] = load(i + AHEAD < STREAMED ? i + AHEAD : i % AHEAD);
        return taken;
    }

private:
    __device__ auto load(int i) const { return packed.load(i * ALL / (STREAMED + !STREAMED)); }
};
