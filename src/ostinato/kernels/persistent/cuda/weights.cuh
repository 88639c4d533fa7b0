// The weights that a lane multiplies at every step, and where they are in between.
//
// Of ALL pieces, tiles or entries, STREAMED do not fit on chip: they are read from L2 at every step, AHEAD of them in
// advance, the first while the block waits for the state.  HELD of the others stay in registers, the rest in shared
// memory: FIRST of these come first.  Apart from that, each kind is spread evenly among all.

// Tiles in memory, of 16 bytes for a lane.
struct Tiles {
    using Piece = uint4;
    const Piece* packed;  // this lane's part: (BLOCKS, WARPS, tiles, 32 lanes)
    Piece* shared;        // (tiles, THREADS), from this thread's first

    __device__ Piece load(int tile) const { return __ldcg(packed + tile * 32); }
    __device__ Piece kept(int i) const { return shared[i * THREADS]; }
    __device__ void keep(int i, Piece piece) const { shared[i * THREADS] = piece; }
    static __device__ void pin(Piece&) {}
};

template <int ALL> __device__ inline Tiles tiles_of_lane(const Parameters& p, int block, uint4* shared) {
    const int first = (block * WARPS + warp_id()) * ALL * 32 + lane_id();
    return {reinterpret_cast<const uint4*>(p.packed) + first, shared + threadIdx.x};
}

template <int ALL, typename Memory, int FIRST = 0> struct Weights {
    using Piece = typename Memory::Piece;
    static constexpr int AHEAD = 4, ON_CHIP = ALL - STREAMED;
    Memory memory;
    Piece held[HELD + 1], ahead[STREAMED ? AHEAD : 1];  // no array is empty

    static __device__ constexpr int streamed_before(int piece) { return (piece * STREAMED + ALL - 1) / ALL; }
    static __device__ constexpr bool is_streamed(int piece) {
        return streamed_before(piece + 1) > streamed_before(piece);
    }
    // Of the pieces on chip.
    static __device__ constexpr int held_before(int i) {
        return i <= FIRST ? 0 : (i - FIRST) * HELD / (ON_CHIP - FIRST);
    }
    static __device__ constexpr bool is_held(int i) { return held_before(i + 1) > held_before(i); }

    Weights() = default;
    __device__ explicit Weights(const Memory& memory) : memory(memory) {
#pragma unroll
        for (int piece = 0; piece < ALL; ++piece) {
            if (is_streamed(piece)) continue;
            const Piece loaded = memory.load(piece);
            const int i = piece - streamed_before(piece);
            if (is_held(i)) held[held_before(i)] = loaded;
            else memory.keep(i - held_before(i), loaded);
        }
#pragma unroll
        for (int i = 0; i < AHEAD && i < STREAMED; ++i) ahead[i] = stream(i);
    }

    // A piece.  The slot of one that is streamed is refilled with a later one, of this step or the next.
    __device__ Piece take(int piece) {
        const int before = streamed_before(piece), i = piece - before;
        if (is_streamed(piece)) {
            const Piece taken = ahead[before % AHEAD];
            ahead[before % AHEAD] = stream(before + AHEAD < STREAMED ? before + AHEAD : before % AHEAD);
            return taken;
        }
        if (!is_held(i)) return memory.kept(i - held_before(i));
        Piece taken = held[held_before(i)];
        Memory::pin(taken);
        return taken;
    }

private:
    __device__ Piece stream(int i) const { return memory.load(i * ALL / (STREAMED + !STREAMED)); }
};
