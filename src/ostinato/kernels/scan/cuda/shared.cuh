// The layout of a block's shared memory.

// A composition as other blocks have published it: an aggregate, or an inclusive prefix in b.
struct Known {
    Channels a, low, b;

    __device__ void carry(Channels& state) const {
        const Composition whole = {a, low, b, false};
        whole.carry(state);
    }
};

// A composition for each warp.
struct Compositions {
    Channels a[WARPS][LANES], low[EXTENDED ? WARPS : 1][EXTENDED ? LANES : 1], b[WARPS][LANES];
    alignas(WARPS % 16 ? 4 : 16) bool reset[(WARPS + 3) / 4 * 4];

    // A bit for each warp whose composition has a reset.
    __device__ unsigned resets() const {
        if constexpr (!FORGETS) return 0;
        struct alignas(WARPS % 16 ? 4 : 16) Words { unsigned word[(WARPS + 3) / 4]; };
        const Words words = *reinterpret_cast<const Words*>(reset);
        unsigned bits = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp += 4) bits |= __dp4a(words.word[warp / 4], 0x08040201u, 0u) << warp;
        return WARPS < 4 ? bits & (1u << WARPS) - 1 : bits;
    }
    __device__ Composition of(int warp, bool is_reset) const {
        const int slot = threadIdx.x % LANES;
        return {a[warp][slot], low[EXTENDED ? warp : 0][EXTENDED ? slot : 0], b[warp][slot], is_reset};
    }
    __device__ void put(int warp, const Composition& whole) {
        const int slot = threadIdx.x % LANES;
        a[warp][slot] = whole.a;
        if (EXTENDED) low[warp][slot] = whole.low;
        b[warp][slot] = whole.b;
    }
    // Scan exclusively over the warps, in place; called by one segment.  Slot 0 gets the total, every other slot the
    // composition of the warps before it; `reset` keeps the flags of the single warps.
    __device__ Composition scan_warps() {
        const unsigned resets = this->resets();
        Composition all = of(0, resets & 1);
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) {
            const Composition with_this = of(warp, resets >> warp & 1).after(all);
            put(warp, all);
            all = with_this;
        }
        put(0, all);
        return all;
    }
    // Scan the lanes' compositions over the warp's segments, and store that of the warp.  Returns the exclusive prefix.
    __device__ Composition scan_warp(const Place& at, Composition whole) {
        Composition before = Composition::none();
        if constexpr (SEGMENTS > 1) {
            // The bits of lanes with a reset, shifted so that this segment's is the highest: compositions reach back to
            // the nearest reset only.
            const unsigned resets =
                FORGETS ? __ballot_sync(~0u, whole.reset) << (SEGMENTS - 1 - at.segment) * LANES : 0;
            const int since = __clz(resets), reach = FORGETS && since < at.lane ? since : at.lane;
            whole.reset = false;
#pragma unroll
            for (int lanes = LANES; lanes < 32; lanes *= 2) {
                const Composition other = whole.from_lane_below(lanes);
                if (reach >= lanes) whole = whole.after(other);
            }
            const Composition other = whole.from_lane_below(LANES);
            if (at.segment > 0) before = other;
            whole.reset = resets, before.reset = resets << LANES;
        }
        if (at.segment == SEGMENTS - 1) put(at.warp, whole);
        if (FORGETS && at.lane == (SEGMENTS - 1) * LANES) reset[at.warp] = whole.reset;
        return before;
    }
};

// CU_SEQLENS: the steps of a tile at which sequences begin, or end, and the sequences' numbers.
struct Boundaries {
    static constexpr int STEPS = PACKING == CU_SEQLENS ? TILE : 1, WORDS = STEPS / 32 + 2;
    static constexpr int KEPT = PACKING == CU_SEQLENS ? 2048 : 1;
    unsigned bits[WORDS];
    int sequence[STEPS];  // valid where the bit is set

    __device__ void note(int i, int n) {
        atomicOr(&bits[i / 32], 1u << i % 32);
        sequence[i] = n;
    }
    // The bits of steps i to i + 31.
    __device__ unsigned of(int i) const { return __funnelshift_r(bits[i / 32], bits[i / 32 + 1], i % 32); }
};
static_assert(PACKING != CU_SEQLENS || Boundaries::WORDS <= THREADS);

// An array that may have no elements, and then takes almost no memory.
template <typename T, int COUNT> struct Array {
    T item[COUNT];
    __device__ T& operator[](int i) { return item[i]; }
};
template <typename T> struct Array<T, 0> {
    __device__ T& operator[](int) { return *reinterpret_cast<T*>(this); }
};

struct Shared {
    Strip input[STAGES][WARPS][INPUTS];
    Array<Strip, NARROW && !STAYS ? WARPS : 0> output;
    Mask mask[Mask::COPIED ? STAGES : 1][Mask::COPIED ? WARPS : 1];
    // The warps' compositions of a tile.  Interleaved, the last ones are those of other blocks' tiles in between.
    Compositions tile[BUFFERS + !LOOKS_BACK];
    // Look-back: the earlier tiles, nearest first, and their flags; the carry that was found; the tiles drawn.
    Known window[LOOKS_BACK ? WINDOW : 1][LOOKS_BACK ? LANES : 1];
    unsigned seen[LOOKS_BACK ? POLLERS : 1];
    Channels found[LANES];
    int drawn[2];
    Boundaries begins[PACKING == CU_SEQLENS ? BUFFERS : 1], ends[PACKING == CU_SEQLENS ? BUFFERS : 1];
    int bounds[Boundaries::KEPT];  // a copy of cu_seqlens, if it fits
    Compute sums[SUMS ? WARPS : 1][SUMS ? PARAMETERS : 1][SUMS ? GROUP : 1];
    Array<Inbox, (CLUSTER > 1)> inbox;
    Array<Barrier, MAPPED ? WARPS : 0> arrival;  // of a warp's strips

    // Find where sequences begin and end in a tile.  `first` becomes the sequence of the tile's first step in time; it
    // is searched from that of the block's previous tile, or from scratch if it is -1.  Called by all threads of the
    // block.
    __device__ void find_sequences(const Place& at, int chunk, int buffer, int& first) {
        const Parameters& p = at.p;
        const int origin = chunk * TILE, count = p.steps - origin < TILE ? p.steps - origin : TILE;
        const int from = at.descending ? p.steps - origin - count : origin;
        if (threadIdx.x < Boundaries::WORDS)
            begins[buffer].bits[threadIdx.x] = ends[buffer].bits[threadIdx.x] = 0;
        const bool kept = p.sequences < Boundaries::KEPT;
        const int* const bounds = kept ? this->bounds : p.bounds;
        if (first < 0) {
            for (int n = threadIdx.x; kept && n <= p.sequences; n += THREADS) this->bounds[n] = p.bounds[n];
            __syncthreads();
            first = 0;
            for (int high = p.sequences - 1; first < high;) {
                const int middle = (first + high + 1) / 2;
                if (bounds[middle] <= from) first = middle;
                else high = middle - 1;
            }
        } else {
            for (int passed = THREADS; passed == THREADS;) {
                const int n = at.descending ? first - threadIdx.x : first + 1 + threadIdx.x;
                const bool passes = n > 0 && n < p.sequences && (bounds[n] <= from) != at.descending;
                passed = __syncthreads_count(passes);
                first += at.descending ? -passed : passed;
            }
        }
        for (int n = first + threadIdx.x; n < p.sequences; n += THREADS) {
            const int low = bounds[n] - from, high = bounds[n + 1] - 1 - from;  // its first and last step
            if (low >= count) break;
            if (low > high) continue;
            if (low >= 0) (at.descending ? ends : begins)[buffer].note(at.descending ? count - 1 - low : low, n);
            if (high < count) (at.descending ? begins : ends)[buffer].note(at.descending ? count - 1 - high : high, n);
        }
        __syncthreads();
    }
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

// All channels of a lane set to x.
__device__ inline Pack filled(Compute x) {
    if (x == 0) return 0;  // a constant, which a conversion to 16 bits would not be
    Compute all[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) all[v] = x;
    return pack(all);
}

// Load or store a lane's channels at one step; the first channel, at `from` or `to`, must exist.
__device__ inline Pack load_pack(const Place& at, const Scalar* from) {
    const Item* const items = reinterpret_cast<const Item*>(from);
    Pack bits = items[0];
#pragma unroll
    for (int v = 1; v < ITEMS; ++v)
        if (at.has(v)) bits |= Pack(items[v * NEXT]) << 8 * sizeof(Item) * v;
    return bits;
}
__device__ inline void store_pack(const Place& at, Scalar* to, Pack bits) {
    Item* const items = reinterpret_cast<Item*>(to);
    items[0] = Item(bits);
#pragma unroll
    for (int v = 1; v < ITEMS; ++v)
        if (at.has(v)) items[v * NEXT] = Item(bits >> 8 * sizeof(Item) * v);
}

__device__ inline void load_state(const Place& at, const Scalar* from, int n, Channels& state) {
    unpack(from && at.inside ? load_pack(at, from + at.state(n)) : filled(Ring::zero()), state.value);
}

__device__ inline void store_state(const Place& at, Scalar* to, int n, const Channels& state) {
    if (to && at.inside) store_pack(at, to + at.state(n), pack(state.value));
}
