// Tiles between memory and shared memory.

// 16 bytes of memory to shared memory, in the background.  The line that they are of comes to the L2 as a whole: where a
// block's rows are half a line, the other half is a neighbour's.
__device__ inline void copy_async_16(Pack* to, const Pack* from, bool exists = true) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(exists ? 16 : 0) : "memory");
}
// Copies memory to shared memory in the background; where `exists` is false it reads nothing and leaves zeros.
// 16 bytes go past the first-level cache: each copy through it keeps a line, of which there are too few.
template <int BYTES = sizeof(Pack)> __device__ inline void copy_async(Pack* to, const Pack* from, bool exists) {
    if constexpr (BYTES == 16)
        copy_async_16(to, from, exists);
    else if constexpr (BYTES < 4)
        *to = exists ? *from : 0;  // too small for the copy engine
    else
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
                     "l"(from), "n"(BYTES), "r"(exists ? BYTES : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ inline void wait_for_oldest_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
}

// A warp's part of one tensor in a tile, in shared memory.
//
// Mostly every thread keeps its own steps.  Narrow sequences lie in memory step after step without a gap (NARROW, their
// number of channels): a warp copies its steps as one piece of memory, 16 bytes at a time from where these are aligned,
// so the first element lies `shift` elements into the strip.
struct alignas(16) Strip {
    static constexpr int SIZE = NARROW ? STRIP * NARROW : 32 * ROWS, PER_PIECE = 16 / sizeof(Pack);
    static constexpr int PIECES = (SIZE + PER_PIECE - 1) / PER_PIECE + 1;
    Pack element[NARROW ? PIECES * PER_PIECE + LANES : SIZE];

    // Where the strip of a narrow sequence that begins at scanned step `i` begins in memory, in elements.
    static __device__ Index start(const Place& at, int i) {
        return Index(at.descending ? at.p.steps - i - STRIP : i) * NARROW;
    }
    static __device__ int shift(const Place& at, const Tensor& x, int chunk, int ahead) {
        if (!NARROW) return 0;
        const Index first = start(at, at.first(chunk) + ahead - at.segment * ROWS);
        return unsigned(reinterpret_cast<unsigned long long>(at.sequence(x) + first) % 16) / sizeof(Pack);
    }
    static __device__ int place(const Place& at, int u, int shift) {
        if (!NARROW) return 32 * u + at.lane;
        const int row = at.segment * ROWS;
        return shift + (at.descending ? STRIP - 1 - row : row) * NARROW + at.channel + u * (at.descending ? -NARROW : NARROW);
    }
    // Call move(k, from, low, high) for each piece k: its elements low to high of those at `from` are the sequence's,
    // which is CHECKED where it may end, and, if OWN, the strip's.
    template <bool CHECKED, bool OWN, typename Move>
    static __device__ void pieces(const Place& at, const Tensor& x, int chunk, int ahead, Move move) {
        constexpr Index ALL = PIECES * PER_PIECE;
        const Index first = start(at, at.first(chunk) + ahead - at.segment * ROWS);
        const int skipped = shift(at, x, chunk, ahead);
        int begin = OWN ? skipped : 0, end = OWN ? skipped + SIZE : int(ALL);
        if (CHECKED) {  // where the sequence lies, counted from the first piece
            const Index head = skipped - first, tail = head + Index(at.p.steps) * NARROW;
            begin = head > begin ? int(head < ALL ? head : ALL) : begin;
            end = tail < end ? int(tail > 0 ? tail : 0) : end;
        }
        Pack* const memory = reinterpret_cast<Pack*>(at.sequence(x)) + (first - skipped) + at.lane * PER_PIECE;
#pragma unroll
        for (int k = 0; k < (PIECES + 31) / 32; ++k) {
            const int piece = at.lane + 32 * k, low = begin - piece * PER_PIECE, high = end - piece * PER_PIECE;
            if (PIECES % 32 && piece >= PIECES) break;
            move(piece, memory + 32 * k * PER_PIECE, low > 0 ? low : 0, high < PER_PIECE ? high : PER_PIECE);
        }
    }
    template <bool CHECKED>
    __device__ void fetch(const Place& at, const Tensor& x, const Rows& rows, int chunk, int ahead) {
        if constexpr (NARROW) {
            pieces<CHECKED, false>(at, x, chunk, ahead, [&](int k, const Pack* from, int low, int high) {
                Pack* const to = &element[k * PER_PIECE];
                if (!CHECKED || high - low == PER_PIECE) copy_async_16(to, from);
                else {
#pragma unroll 1
                    for (int i = low; i < high; ++i) to[i] = from[i];
                }
            });
        } else {
#pragma unroll
            for (int u = 0; u < ROWS; u += TOGETHER) {
                const bool exists = !CHECKED || rows.exists(at, chunk, u);
                copy_async<TOGETHER * sizeof(Pack)>(
                    &element[32 * u + at.lane * TOGETHER], exists ? rows(at, chunk, u) : nullptr, exists
                );
            }
        }
    }
    template <bool CHECKED> __device__ void store(const Place& at, const Tensor& x, int chunk) {
        __syncwarp();
        pieces<CHECKED, true>(at, x, chunk, 0, [&](int k, Pack* to, int low, int high) {
            const Pack* const from = &element[k * PER_PIECE];
            if (low == 0 && high == PER_PIECE) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
            else {
#pragma unroll 1
                for (int i = low; i < high; ++i) to[i] = from[i];
            }
        });
        __syncwarp();
    }
};
