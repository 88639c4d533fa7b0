// JOINED: the bits of a thread's steps that are `before` steps before the first step of a sequence, in scan order.
__device__ inline unsigned sequence_starts(const Place& at, int chunk, int before) {
    const int period = at.p.period, step = at.first(chunk) + before;
    const int since = step - int(__umulhi(2 * step + 1, at.p.reciprocal)) * period;  // steps since the sequence began
    unsigned bits = 0;
#pragma unroll 1
    for (int u = since ? period - since : 0; u < ROWS; u += period) bits |= 1u << u;
    return bits & at.existing(chunk);
}

// The steps before which the state is reset, by the mask and where joined sequences begin.  The lanes of a warp load
// the mask's bytes for its steps long before use, since loads queue behind the copies, and a vote turns them into bits.
// If the steps are many, their bytes are copied with the tile, or, with ZEROES, each lane loads several bytes, and
// shuffles exchange the bits.
struct Resets {
    static constexpr bool SEVERAL = MASK && ZEROES && STRIP > 32, LOADED = MASK && !Mask::COPIED && !SEVERAL;
    static constexpr int TILES = STRIP <= 32 && !CHAINED && CLUSTER == 1 ? 32 / STRIP : 1;  // tiles loaded at once
    // Whether a block loads the next tile's resets before it looks back: if a register can hold them meanwhile.
    static constexpr bool EARLY = ZEROES || (PACKING == CU_SEQLENS && NARROW_SCALAR);
    // The bytes of a lane; those of lane 0 may begin before the strip.
    static constexpr int BYTES = STRIP <= 249 ? 8 : STRIP <= 497 ? 16 : 32;
    static constexpr int WORDS = LOADED ? (STRIP + 31) / 32 : SEVERAL ? BYTES / 4 : 1;
    static_assert(!SEVERAL || STRIP + BYTES - 1 <= 32 * BYTES);
    unsigned word[WORDS] = {};  // bytes as loaded; bits after share()

    __device__ void load(const Place& at, int chunk) {
        if constexpr (LOADED) {
            const int lane = at.lane % 32, i = (chunk + lane / STRIP) * TILE + at.warp * STRIP + lane % STRIP;
            word[0] = lane < TILES * STRIP && at.exists(i) ? Mask::of_step(at, i) : 0;
#pragma unroll
            for (int w = 1; w < WORDS; ++w)
                word[w] = at.lane < STRIP - 32 * w && at.exists(i + 32 * w) ? Mask::of_step(at, i + 32 * w) : 0;
        } else if constexpr (SEVERAL) {
            const int skipped = Mask::shift<BYTES>(at, chunk), first = BYTES * at.lane;
            const int t = at.start(chunk) - skipped + first;
#pragma unroll
            for (int w = 0; w < WORDS; ++w) word[w] = 0;
            if (first >= skipped + STRIP || t >= at.p.steps || t + BYTES <= 0) return;
            if (Mask::GAPLESS && t >= 0 && t + BYTES <= at.p.steps) {
                struct alignas(BYTES < 16 ? BYTES : 16) Words { unsigned word[WORDS]; };
                const Words words = *reinterpret_cast<const Words*>(Mask::sequence(at) + t);
#pragma unroll
                for (int w = 0; w < WORDS; ++w) word[w] = words.word[w];
                return;
            }
#pragma unroll 1
            for (int j = 0; j < BYTES; ++j) {
                const int i = at.time(t + j);
                const unsigned byte = i >= 0 && at.exists(i) ? Mask::of_step(at, i) : 0;
#pragma unroll
                for (int w = 0; w < WORDS; ++w)
                    word[w] = __funnelshift_r(word[w], w + 1 < WORDS ? word[w + 1] : byte, 8);
            }
        }
    }
    __device__ void share() {
#pragma unroll
        for (int w = 0; LOADED && w < WORDS; ++w) word[w] = __ballot_sync(~0u, word[w]);
        if constexpr (SEVERAL) {
            unsigned bits = 0;
#pragma unroll
            for (int w = 0; w < WORDS; w += 2) {
                const unsigned four = __dp4a(high_bits(word[w]), 0x08040201u, 0u);
                bits |= __dp4a(high_bits(word[w + 1]), 0x80402010u, four) >> 7 << 4 * w;
            }
            word[0] = bits;
        }
    }
    // The resets of a thread's steps, a bit each.
    __device__ unsigned of(const Place& at, const Shared& shared, int stage, int chunk) const {
        return of_mask(at, shared, stage, chunk) | (JOINED ? sequence_starts(at, chunk, BACKWARD) : 0);
    }
    __device__ unsigned of_mask(const Place& at, const Shared& shared, int stage, int chunk) const {
        if constexpr (!MASK) return 0;
        else if constexpr (SEVERAL) {
            const int row = at.segment * ROWS;
            const int first = Mask::shift<BYTES>(at, chunk) + (at.descending ? STRIP - ROWS - row : row);
            unsigned long long bits = 0;
#pragma unroll
            for (int n = 0; BYTES * n < ROWS + BYTES - 1; ++n)
                bits |= (unsigned long long)(__shfl_sync(~0u, word[0], first / BYTES + n)) << BYTES * n;
            const unsigned mine = unsigned(bits >> first % BYTES);
            return (at.descending ? __brev(mine) >> 32 - ROWS : mine) & OF_ROWS;
        } else if constexpr (!LOADED) return shared.mask[stage][at.warp].of(at, chunk);
        else if constexpr (WORDS == 1) return word[0] >> chunk % TILES * STRIP + at.segment * ROWS & OF_ROWS;
        else {
            const int first = at.segment * ROWS;
            unsigned low = word[0], high = word[1];
#pragma unroll
            for (int w = 1; w < WORDS; ++w)
                if (first >= 32 * w) low = word[w], high = w + 1 < WORDS ? word[w + 1] : 0;
            return __funnelshift_r(low, high, first) & OF_ROWS;
        }
    }
};
