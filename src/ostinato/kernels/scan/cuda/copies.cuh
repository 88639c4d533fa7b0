// Copies of tiles between global and shared memory.

// Starts an asynchronous copy of BYTES from global to shared memory; bytes after the first `count` are filled with
// zeros.  The whole 128-byte line is fetched into L2: where a block's rows are half a line, another block uses the
// other half.  16-byte copies bypass L1 (.cg), where every copy in flight would hold a line and lines would run out.
// With STAYS every line is read only once, and is evicted first: L2 then writes back less of its other contents.
template <int BYTES> __device__ inline void copy_async(void* to, const void* from, int count = BYTES) {
    const unsigned shared = unsigned(__cvta_generic_to_shared(to));
    if constexpr (BYTES == 16 && STAYS) {
        unsigned long long policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
        asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared),
                     "l"(from), "r"(count), "l"(policy) : "memory");
    } else if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(count)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(BYTES),
                     "r"(count) : "memory");
}
// Copies the first `count` bytes of an aligned 16-byte piece; the other bytes are beyond the tensor.
__device__ inline void copy_part(char* to, const char* from, int count) {
#pragma unroll 1
    for (int i = 0; i + 4 <= count; i += 4) copy_async<4>(to + i, from + i);
    if (count % 4) *reinterpret_cast<short*>(to + count - 2) = *reinterpret_cast<const short*>(from + count - 2);
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all copies except those of the last LATER commits.
template <int LATER = STAGES - 1> __device__ inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Waits for the other threads of the warp, or of the warps abreast.
__device__ inline void sync_abreast() {
    if constexpr (ABREAST == 32) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / ABREAST), "n"(ABREAST) : "memory");
}

// A strip in shared memory: the steps that a warp, or the warps abreast, have of one tensor's tile.
//
// By default each thread copies its own steps.  Narrow sequences (NARROW is their number of channels) are contiguous in
// time: a warp copies its steps as one range in aligned 16-byte pieces, so that the first element is at offset `shift`.
// Single 16-bit channels are below cp.async's minimum of 4 bytes, so each is stored in four bytes (HALVES).
//
// Other unaligned rows (PITCHED) are copied in aligned pieces, too: the first piece begins before the row, and the last
// one ends after it.  In shared memory an input's rows are pitch() bytes apart.  The pitch is congruent to the stride
// in global memory modulo 16, so that a row has the same offset in its first piece in both.
//
// A tensor map copies a strip as it is, one row after the other.
//
// Both halves of a 32-byte sector are copied in one transaction only if they are halves of one sector in shared memory,
// too; so a strip begins with a sector there, as most strips do in global memory.
struct alignas(MAPPED ? 128 : 32) Strip {
    static constexpr int APART = NARROW ? NARROW / VEC : widest_pitch() / int(sizeof(Item));
    static constexpr int SIZE = NARROW || PITCHED ? STRIP * APART : 32 * ROWS;
    static constexpr int PER_PIECE = 16 / sizeof(Item), PIECES = (SIZE + PER_PIECE - 1) / PER_PIECE + 1;
    static constexpr int ALL = PIECES * PER_PIECE;  // elements of all pieces
    static constexpr bool HALVES = sizeof(Item) < 4 && !EXCHANGED;
    PackType<HALVES ? 4 : sizeof(Item)>::type element[NARROW || PITCHED ? PIECES * PER_PIECE + LANES : SIZE];

    // The address of the strip in global memory; with NARROW, plus 16 bytes for each lane before this one.
    static __device__ Item* memory(const Place& at, const Tensor& x, const Rows& rows, int chunk, int ahead) {
        if (KEEPS_ADDRESSES) return reinterpret_cast<Item*>(rows.tile(chunk));
        const Index row = Index(at.start(chunk, ahead)) * (NARROW ? NARROW : x.time);
        return reinterpret_cast<Item*>(at.sequence(x) + row + at.group * GROUP) + (NARROW ? at.lane * PER_PIECE : 0);
    }
    static __device__ int shift(const Place& at, const Tensor& x, const Rows& rows, int chunk, int ahead) {
        if (!NARROW && !PITCHED) return 0;
        if (ALIGNED) return (at.descending ? -ahead : ahead) * APART & (PER_PIECE - 1);
        const auto address = reinterpret_cast<unsigned long long>(memory(at, x, rows, chunk, ahead));
        return unsigned(address % 16) / sizeof(Item);
    }
    // The index in `element` of this thread's first channel in row u of input k.
    static __device__ int place(const Place& at, int u, int shift, int k = 0) {
        if (!NARROW && !PITCHED && !MAPPED) return 32 * u + at.lane;
        const int row = at.segment * ROWS, first = at.descending ? STRIP - 1 - row : row;
        const int apart = MAPPED ? LANES : NARROW ? APART : pitch(k) / int(sizeof(Item));
        return shift + first * apart + at.lane % LANES + u * (at.descending ? -apart : apart);
    }
    // Load this thread's channels from an index.
    __device__ Bits get(int place) const {
        Bits bits = element[place];
#pragma unroll
        for (int v = 1; v < ITEMS; ++v) bits |= Bits(element[place + v * NEXT]) << 8 * sizeof(Item) * v;
        return bits;
    }
    __device__ void put(int place, Pack bits) {
        element[place] = bits;
#pragma unroll
        for (int v = 1; v < ITEMS; ++v) element[place + v * NEXT] = bits >> 8 * sizeof(Item) * v;
    }
    // Clip a range of elements, relative to the first piece, to the elements of the sequence.
    static __device__ void clip(const Place& at, int chunk, int ahead, int skipped, int& begin, int& end) {
        const Index head = skipped - Index(at.start(chunk, ahead)) * APART, tail = head + Index(at.p.steps) * APART;
        begin = head > begin ? int(head < ALL ? head : ALL) : begin;
        end = tail < end ? int(tail > 0 ? tail : 0) : end;
    }
    // Call move(k, from, low, high) for each piece k of a part of the strip.  The elements from `low` to `high` of the
    // piece at `from` are within the sequence (checked only if CHECKED) and, if OWN, within the strip.
    template <bool CHECKED, bool OWN, typename Move>
    static __device__ void pieces(
        const Place& at, const Tensor& x, const Rows& rows, int chunk, int ahead, int part, Move move
    ) {
        constexpr int OF_PART = STRIP / PARTS * APART, MOST = (OF_PART - 1) / PER_PIECE + 2;
        const int skipped = shift(at, x, rows, chunk, ahead);
        int begin = OWN ? skipped : 0, end = OWN ? skipped + SIZE : ALL;
        if (CHECKED) clip(at, chunk, ahead, skipped, begin, end);
        // The piece between two parts is copied with the part that is scanned first, and stored with the other.
        const int place = at.descending ? PARTS - 1 - part : part, rest = at.descending == OWN ? PER_PIECE - 1 : 0;
        const int origin = place == 0 ? 0 : (skipped + place * OF_PART + rest) / PER_PIECE;
        const int bound = (skipped + (place + 1) * OF_PART + (place == PARTS - 1 ? PER_PIECE - 1 : rest)) / PER_PIECE;
        Item* first = memory(at, x, rows, chunk, ahead) - skipped + origin * PER_PIECE;
        if (KEEPS_ADDRESSES) first = keep_address(first);
#pragma unroll(CHECKED ? 1 : (MOST + ABREAST - 1) / ABREAST)  // the CHECKED path is rare: keep its code small
        for (int k = 0; k < (MOST + ABREAST - 1) / ABREAST; ++k) {
            const int piece = origin + at.lane + ABREAST * k,
                      low = begin - piece * PER_PIECE, high = end - piece * PER_PIECE;
            if (ABREAST * k + ABREAST >= MOST - 1 && piece >= bound) break;
            move(piece, first + ABREAST * k * PER_PIECE, low > 0 ? low : 0, high < PER_PIECE ? high : PER_PIECE);
        }
    }
    template <bool CHECKED>
    __device__ void fetch(const Place& at, int k, const Rows& rows, int chunk, int part) {
        const Tensor x = at.p.input(k);
        const int ahead = BACKWARD && k == PREVIOUS;  // h[t-1] belongs to the next step in scan order
        if constexpr (NARROW) {
            // A piece may begin before the sequence, which is still within the tensor's memory, but not end after it.
            pieces<CHECKED, false>(at, x, rows, chunk, ahead, part, [&](int n, const Item* from, int low, int high) {
                auto* const to = &element[n * PER_PIECE];
                if (!CHECKED || (low < PER_PIECE && high == PER_PIECE)) copy_async<16>(to, from);
                else if (high > low)
                    copy_part(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(from),
                              high * int(sizeof(Item)));
            });
        } else if constexpr (PITCHED) {
            constexpr int ROW = GROUP * int(sizeof(Scalar)), OF_ROW = (ROW + 15 + 15) / 16, COPIES = STRIP * OF_ROW;
            const int rest = (at.p.channels - at.group * GROUP) * int(sizeof(Scalar)), width = rest < ROW ? rest : ROW;
            const int time = at.start(chunk, ahead);
            const int skipped = shift(at, x, rows, chunk, ahead) * int(sizeof(Item));
            const char* const from = reinterpret_cast<const char*>(memory(at, x, rows, chunk, ahead));
            const Index apart = x.time * Index(sizeof(Scalar));
            const auto* const end =
                reinterpret_cast<const char*>(at.sequence(x) + Index(at.p.steps - 1) * x.time + at.p.channels);
#pragma unroll(CHECKED ? 1 : (COPIES + ABREAST - 1) / ABREAST)
            for (int i = 0; i < (COPIES + ABREAST - 1) / ABREAST; ++i) {
                const int n = at.lane + ABREAST * i, row = n / OF_ROW;
                const int to = skipped + row * pitch(k), offset = n % OF_ROW * 16 - to % 16;
                if (offset >= width || (COPIES % ABREAST && n >= COPIES)) continue;
                if (CHECKED && unsigned(time + row) >= unsigned(at.p.steps)) continue;
                char* const there = reinterpret_cast<char*>(element) + to + offset;
                const char* const piece = from + row * apart + offset;
                if (!CHECKED || piece + 16 <= end) copy_async<16>(there, piece);
                else copy_part(there, piece, int(end - piece));
            }
        } else {
            char* const tile = rows.tile(chunk);
#pragma unroll(CHECKED && PACKING != OFFSETS ? 1 : ROWS)
            for (int u = 0; u < ROWS; u += COPIED_PACKS) {
                const bool exists = !CHECKED || rows.exists(at, chunk, u);
                const auto* const from = reinterpret_cast<const Pack*>(exists ? rows.row(at, chunk, tile, u) : nullptr);
                auto* const to = &element[32 * u + at.lane * COPIED_PACKS];
                if constexpr (HALVES) {
                    *to = exists ? *from : 0;
                } else {
                    constexpr int BYTES = COPIED_PACKS * sizeof(Pack);
                    copy_async<BYTES>(to, from, exists ? BYTES : 0);
                }
            }
        }
    }
    // Copy the strip by a tensor map, called by one thread; steps outside the sequence are zero.
    __device__ void fetch(const Place& at, int k, Barrier& arrival, int chunk) {
        start_copy(shared_address(element), at.p.map(k), at.group * GROUP,
                   at.start(chunk, BACKWARD && k == PREVIOUS), at.batch, at.direction, shared_address(&arrival));
    }
    // Store the elements before the first whole piece and after the last one, one per lane.
    template <bool CHECKED> __device__ void store_ends(const Place& at, Item* memory, int chunk, int skipped) {
        int begin = skipped, end = skipped + SIZE;
        if (CHECKED) clip(at, chunk, 0, skipped, begin, end);
        const int whole = (begin + PER_PIECE - 1) / PER_PIECE * PER_PIECE, last = end / PER_PIECE * PER_PIECE;
        const bool first = at.lane < PER_PIECE;
        const int i = first ? begin + at.lane : last + at.lane - PER_PIECE;
        if (i < end && (first ? i < whole : i >= whole && at.lane < 2 * PER_PIECE))
            memory[i - skipped - at.lane * PER_PIECE] = element[i];
    }
    // Store a part of the strip, whose first element is at `offset`.
    template <bool CHECKED>
    __device__ void store(const Place& at, const Tensor& x, const Rows& rows, int chunk, int part, int offset) {
        // How many elements further into its pieces the strip begins here than in global memory.
        const int later = ALIGNED ? 0 : offset - shift(at, x, rows, chunk, 0);
        sync_abreast();
        pieces<CHECKED, true>(at, x, rows, chunk, 0, part, [&](int k, Item* to, int low, int high) {
            const Item* const from = &element[k * PER_PIECE + later];
            const bool whole = ALIGNED && !CHECKED ? k < SIZE / PER_PIECE : low == 0 && high == PER_PIECE && later == 0;
            if (whole) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
            else if (STAYS && (CHECKED || !ALIGNED)) {
#pragma unroll 1
                for (int i = low; i < high; ++i) to[i] = from[i];
            }
        });
        if (STAYS) return;
        if (CHECKED || !ALIGNED) store_ends<CHECKED>(at, memory(at, x, rows, chunk, 0), chunk, offset);
        sync_abreast();  // before the results of the next tile are written
    }
};

// Copies a part of the strips of all inputs.
template <bool CHECKED>
__device__ inline void fetch_strips(
    const Place& at, const Memory& memory, Strip (&strips)[INPUTS], int chunk, int part
) {
#pragma unroll(CHECKED && NARROW && !STAYS ? 1 : INPUTS)  // the CHECKED path is rare: keep its code small
    for (int k = 0; k < INPUTS; ++k)
        if (at.p.has_input(k)) {
            if constexpr (CHECKED && KEEPS_ADDRESSES) {  // `memory` is in registers, which a loop cannot index
                const Rows rows(at, at.p.input(k), BACKWARD && k == PREVIOUS);
                strips[k].fetch<CHECKED>(at, k, rows, chunk, part);
            } else strips[k].fetch<CHECKED>(at, k, memory.input[k], chunk, part);
        }
}

// Copies the whole strips of all inputs by tensor maps; called by one thread.
__device__ inline void fetch_strips(const Place& at, Strip (&strips)[INPUTS], Barrier& arrival, int chunk) {
    int bytes = 0;
#pragma unroll
    for (int k = 0; k < INPUTS; ++k) bytes += at.p.has_input(k) ? int(sizeof(strips[k].element)) : 0;
    arrival.expect(bytes);
#pragma unroll
    for (int k = 0; k < INPUTS; ++k)
        if (at.p.has_input(k)) strips[k].fetch(at, k, arrival, chunk);
}

// The highest bit of each of the four bytes is set where the byte is not zero.
__device__ inline unsigned high_bits(unsigned bytes) {
    return ((bytes & 0x7f7f7f7f) + 0x7f7f7f7f | bytes) & 0x80808080;
}

// The bytes of the mask of resets for the steps of a warp, in the order of time; in shared memory if there are many.
struct alignas(16) Mask {
    static constexpr bool COPIED = MASK && STRIP > 96 && !ZEROES, GAPLESS = MASK == 2 && PACKING != OFFSETS;
    // The first piece begins up to 15 bytes early, and a thread reads up to 6 bytes past its own.
    static constexpr int PIECES = (STRIP + 36) / 16;
    unsigned char byte[COPIED ? 16 * PIECES : 1];

    static __device__ const unsigned char* sequence(const Place& at) {
        return KEEPS_ADDRESSES ? at.resets : at.resets_of_sequence();
    }
    // The byte of step `i` in scan order.
    static __device__ unsigned of_step(const Place& at, int i) {
        const int t = at.time(i);
        return sequence(at)[GAPLESS ? t : (PACKING == OFFSETS ? at.p.bounds[t] : t) * at.p.resets_time];
    }
    // The offset of the warp's first byte in its aligned piece.
    template <int BYTES = 16> static __device__ int shift(const Place& at, int chunk) {
        return GAPLESS ? unsigned(reinterpret_cast<unsigned long long>(sequence(at)) + at.start(chunk)) % BYTES : 0;
    }
    // Copy a tile's bytes in aligned pieces, which may include bytes of adjacent sequences.
    __device__ void fetch(const Place& at, int chunk) {
        const Parameters& p = at.p;
        const int from = at.start(chunk) - shift(at, chunk);
        const Index last = (p.batch - 1) * p.resets_batch + (p.directions - 1) * p.resets_direction;  // sequence
#pragma unroll
        for (int k = 0; k < PIECES; k += 32) {
            const int piece = k + at.lane, t = from + 16 * piece;
            if (piece >= PIECES || t >= p.steps) break;
            if (t <= -16) continue;
            if (GAPLESS && sequence(at) + t + 16 <= p.resets + last + p.steps) {
                copy_async<16>(&byte[16 * piece], sequence(at) + t);
                continue;
            }
#pragma unroll 1
            for (int j = 0; j < 16; ++j) {
                const int i = at.time(t + j);
                byte[16 * piece + j] = i >= 0 && at.exists(i) ? of_step(at, i) : 0;
            }
        }
    }
    // The resets of a thread's steps, a bit each.
    __device__ unsigned of(const Place& at, int chunk) const {
        const int row = at.segment * ROWS, skipped = shift(at, chunk);
        unsigned bits = 0;
        if constexpr (LANES < 4) {  // each thread reads the bytes of its steps
            constexpr int WORDS = (ROWS + 6) / 4;
            const int first = skipped + (at.descending ? STRIP - ROWS - row : row);
            const unsigned* const words = reinterpret_cast<const unsigned*>(byte) + first / 4;
            unsigned word[WORDS], eight = 0;
#pragma unroll
            for (int k = 0; k < WORDS; ++k) word[k] = words[k];
#pragma unroll
            for (int k = 0; 4 * k < ROWS; ++k) {
                const unsigned bytes = __funnelshift_r(word[k], word[k + 1 < WORDS ? k + 1 : k], first % 4 * 8);
                eight = __dp4a(high_bits(bytes), k % 2 ? 0x80402010u : 0x08040201u, k % 2 ? eight : 0u);
                if (k % 2 || 4 * k + 4 >= ROWS) bits |= k < 2 ? eight >> 7 : eight << (4 * (k / 2 * 2) - 7);
            }
            if (at.descending) bits = __brev(bits) >> 32 - ROWS;
        } else {  // the lanes of a segment vote
#pragma unroll
            for (int u = 0; u < ROWS; u += LANES) {
                const int step = row + u + at.lane % LANES;
                const bool mine = (ROWS % LANES == 0 || u + at.lane % LANES < ROWS);
                const unsigned votes =
                    __ballot_sync(~0u, mine && byte[skipped + (at.descending ? STRIP - 1 - step : step)]);
                bits |= (votes >> at.segment * LANES & ~0u >> 32 - LANES) << u;
            }
        }
        return bits & at.existing(chunk);
    }
};
