// One scan kernel for every operation in elements.cuh.
//
// A block owns GROUP neighbouring channels of one sequence and cuts its time into tiles.  In a tile every thread
// takes ROWS consecutive steps of VEC channels; LANES lanes of a warp lie along the channels, so SEGMENTS = 32 / LANES
// pieces of time share a warp, and WARPS warps lie along time:
//
//     tile = WARPS x SEGMENTS x ROWS steps,   GROUP = LANES * VEC channels
//
// A thread composes its own steps into one, these compositions meet through shuffles (within a warp) and shared
// memory (between warps), and each thread then takes its steps again from the state they begin in.  Where the state
// comes from when a tile begins is the only difference between the two ways to cover time:
//
//   streaming (CHAINED 0)  the block takes the tiles of its channels in order and keeps the state.  Best when there
//                            are channels enough to fill the chip: nothing is exchanged between blocks.
//   chained (CHAINED 1)    several blocks share the channels of one, each with every so manieth tile.  A block publishes
//                            the composition of a tile before it goes through its last one; for the state in between it
//                            composes what the others published of the tiles since its own last.
//
//   looking back             where as many blocks as are at work take the tiles of many chains, each draws one tile after
//   (CHAINED 1, LOOKS_BACK 1)  another and finds its state from what has been published of the tiles before (single-pass
//                            scan, decoupled look-back; Merrill & Garland 2016): the next tile goes to who is free.
//
// Blocks that look back cannot deadlock, in whatever order they are scheduled: they draw tiles from a counter and finish
// them in the order drawn, so every tile below a drawn one has been drawn, by a block that runs; a tile waits only on lower
// tiles; and the lowest unfinished tile is the one its block is working on and waits on none.  They give the same bits
// every time: however far back one has to look, the state goes forward through the same chain of multiply-adds.
//
// A block that takes its turn waits only on compositions, which wait on nothing but their inputs, so if all blocks of a launch run at
// once (a cooperative launch), none waits for ever.  The order of every product and sum depends on the number of blocks
// alone, so the same GPU gives the same bits every time.
//
// Tiles are copied to shared memory while those before them are worked on, so that memory is never idle.
//
// Steps are numbered in the order they are scanned.  Those outside the sequence (ragged ends, shorter packed
// sequences) read as inputs that leave the state alone.

#ifndef RESETS
#define RESETS 0  // 1: a mask says before which steps, as the forward scans them, the state is zero
#endif

enum { DENSE, CU_SEQLENS, OFFSETS };
constexpr bool FORGETS = PACKING == CU_SEQLENS || RESETS;

constexpr int SEGMENTS = 32 / LANES;
constexpr int THREADS = 32 * WARPS;
constexpr int GROUP = LANES * VEC;
constexpr int STRIP = SEGMENTS * ROWS;  // steps of a warp in a tile
constexpr int TILE = WARPS * STRIP;
constexpr int WATCHERS = WARPS * SEGMENTS;  // that read what was published, each of some neighbouring tiles
constexpr int WINDOW = WATCHERS < 32 ? 32 : WATCHERS;  // how far they look back at most
static_assert(!LOOKS_BACK || (CHAINED && STAGES == 1 && WATCHERS <= 256), "a block draws one tile ahead");
constexpr int TOGETHER = WIDE ? 16 / sizeof(Pack) : 1;  // neighbouring packs that a lane copies as one
constexpr bool EXCHANGED = NARROW || WIDE;  // lanes copy what other lanes of the warp read
static_assert(LANES % TOGETHER == 0 && ROWS % TOGETHER == 0);
constexpr int BUFFERS = CHAINED && !LOOKS_BACK ? 3 : 2;  // of what is known of a tile, as that of one may be read when the next begins

using Element = ELEMENT;
using Ring = Element::Ring;
using Step = Element::Step;
constexpr bool BACKWARD = Element::BACKWARD;
constexpr int PLAIN = Element::PLAIN, PREVIOUS = PLAIN, GRAD = PLAIN + 1;
constexpr int INPUTS = PLAIN + (BACKWARD ? 2 : 0), OUTPUTS = Element::OUTPUTS, FACTORS = Element::FACTORS;
constexpr int PARAMETERS = Element::PARAMETERS, OF_CHANNEL = PARAMETERS ? PARAMETERS : 1;  // no array is empty
constexpr bool SUMS = BACKWARD && PARAMETERS;

using Index = long long;
#if FAR
using Offset = Index;  // within a tile, in bytes
#else
using Offset = int;
#endif

// Of floats one message holds the composition of a tile, (b, a, low), of doubles the first holds b and the second a.
constexpr int MESSAGES = sizeof(Compute) / 4;

struct Strides { Index batch, time, direction; };  // channels are neighbours

struct Tensor : Strides {
    Scalar* data;  // null: all zero
    __device__ Tensor(Scalar* data, Strides strides) : Strides(strides), data(data) {}
};

struct Parameters {
    // Addresses first: the rest is the same at every call with the same shapes.
    Scalar* data[INPUTS + OUTPUTS];  // the element's plain inputs, then h, read a step earlier in time, grad; outputs
    const PARAMETER* parameters[OF_CHANNEL];  // (channels) each, in each direction
    const Scalar* initial;  // the state before the first step scanned, (directions * batch, channels), or null
    Scalar* final;          // the state after the last one, or null
    const Scalar* h0;       // backward: the state before the first step in time, or null
    Compute* sums;          // gradients of the parameters, one row for each block of a channel group
    const int* bounds;      // cu_seqlens or offsets
    const unsigned char* resets;  // with RESETS, a byte for each step of each sequence
    Message* published;     // chained: what is known of each tile
    unsigned* counter;      // looking back: of the tiles drawn
    unsigned epoch, drawn;  // chained: the launch's number, a multiple of MARKS; what the counter begins at
    Index companions;       // blocks that share their channels
    Index parameter_direction, resets_batch, resets_time, resets_direction;
    Strides strides[INPUTS + OUTPUTS];
    int batch, steps, channels, sequences, directions, reverse;

    __device__ Tensor input(int k) const { return {data[k], strides[k]}; }
    __device__ bool has_input(int k) const { return !BACKWARD || k != GRAD || data[k]; }
    __device__ Tensor output(int k) const { return {data[INPUTS + k], strides[INPUTS + k]}; }
};

struct alignas(sizeof(Compute) * VEC) Channels { Compute value[VEC]; };

// Gates near 1 lie so close to each other in float that a product of a few is rounded the same way every time, which
// a long memory adds up (4e-5 at T = 65,536 for gates within 1e-4 of 1).  So a product of floats keeps what rounding
// took from it, as the sum a + low.
constexpr bool EXTENDED = sizeof(Scalar) == 4 && Ring::LINEAR;

// The composition of consecutive steps.
struct Composition {
    Channels a, low, b;
    bool reset;  // a packed sequence begins within, or the state is reset: the one before does not matter

    __device__ static Composition none() {
        Composition c;
        c.reset = false;
#pragma unroll
        for (int v = 0; v < VEC; ++v) c.a.value[v] = Ring::one(), c.low.value[v] = 0, c.b.value[v] = Ring::zero();
        return c;
    }
    // a * h + b for one channel.
    __device__ Compute apply(int v, Compute h) const {
        return Ring::times_plus(a.value[v], h, EXTENDED ? fma(low.value[v], h, b.value[v]) : b.value[v]);
    }
    // Append a step; `settle` when there are no more.
    __device__ void append(int v, const Step& step) {
        if (!Step::EXACT) return append(v, step.a, step.low(), step.offset());
        const Compute product = Ring::times(step.a, a.value[v]);
        if (EXTENDED) low.value[v] = fma(step.a, low.value[v], fma(step.a, a.value[v], -product));
        a.value[v] = product;
        b.value[v] = Ring::times_plus(step.a, b.value[v], step.offset());
    }
    __device__ void settle() {
        if (!EXTENDED) return;
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            if (low.value[v] - low.value[v] != 0) low.value[v] = 0;  // an infinite product has none
    }
    // Append a composition of steps with its own low part.
    __device__ void append(int v, Compute next_a, Compute next_low, Compute next_b) {
        const Compute product = Ring::times(next_a, a.value[v]);
        if (EXTENDED) {
            const Compute rest = fma(next_low, a.value[v], fma(next_a, low.value[v], fma(next_a, a.value[v], -product)));
            low.value[v] = rest - rest == 0 ? rest : 0;
            next_b = fma(next_low, b.value[v], next_b);
        }
        a.value[v] = product;
        b.value[v] = Ring::times_plus(next_a, b.value[v], next_b);
    }
    __device__ void carry(Channels& state) const {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const Compute carried = apply(v, state.value[v]);
            state.value[v] = FORGETS && reset ? b.value[v] : carried;
        }
    }
    __device__ void forget() {
        reset = true;
#pragma unroll
        for (int v = 0; v < VEC; ++v) b.value[v] = Ring::zero();
    }
    __device__ Composition after(const Composition& first) const {
        if (FORGETS && reset) return *this;
        Composition both = first;
#pragma unroll
        for (int v = 0; v < VEC; ++v) both.append(v, a.value[v], low.value[v], b.value[v]);
        return both;
    }
    __device__ Composition from_lane_below(int lanes) const {
        Composition other;
        other.reset = FORGETS && __shfl_up_sync(~0u, int(reset), lanes);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            other.a.value[v] = __shfl_up_sync(~0u, a.value[v], lanes);
            other.low.value[v] = EXTENDED ? __shfl_up_sync(~0u, low.value[v], lanes) : 0;
            other.b.value[v] = __shfl_up_sync(~0u, b.value[v], lanes);
        }
        return other;
    }
};

// Where a thread works: which channels of which sequence, and in which direction time is scanned.
struct Place {
    const Parameters& p;
    int batch, direction, group, warp, lane, segment, channel;
    bool inside;      // this lane's channels exist
    bool descending;  // the scan goes from the last step in time to the first

    __device__ Place(const Parameters& p, int chain) : p(p) {
        const int groups = (p.channels + GROUP - 1) / GROUP;
        group = chain % groups;
        batch = chain / groups % p.batch;
        direction = chain / groups / p.batch;
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        asm("" : "+r"(warp), "+r"(lane));  // or the compiler reads the slow register anew at every use
        segment = lane / LANES;
        channel = group * GROUP + lane % LANES * VEC;
        inside = channel < p.channels;
        descending = (p.reverse != (direction == 1)) != BACKWARD;
    }
    __device__ int time(int i) const { return descending ? p.steps - 1 - i : i; }
    __device__ bool exists(int i) const {
        if (PACKING != OFFSETS) return i < p.steps;
        if (i >= p.steps) return false;
        const int t = time(i);
        return p.bounds[t] + batch < p.bounds[t + 1];
    }
    // Whether all of a tile exists, so that nothing in it need be checked but, in narrow ones, the channel.
    __device__ bool whole(int chunk) const {
        return PACKING != OFFSETS && (NARROW || (group + 1) * GROUP <= p.channels) &&
            (chunk + 1) * TILE + BACKWARD <= p.steps;
    }
    // Whether besides all that is copied for the sake of alignment exists.
    __device__ bool inner(int chunk) const {
        return whole(chunk) && (!NARROW || (chunk > 0 && (chunk + 1) * TILE + 16 < p.steps));
    }
    __device__ int first(int chunk) const { return chunk * TILE + warp * STRIP + segment * ROWS; }
    __device__ Scalar* sequence(const Tensor& x) const { return x.data + batch * x.batch + direction * x.direction; }
    __device__ Index state(int n) const {
        return Index(PACKING == CU_SEQLENS ? n : direction * p.batch + batch) * p.channels + channel;
    }
};

// This thread's rows of a tensor, `ahead` steps further.
struct Rows {
    const char* first;  // in the first tile; of OFFSETS, where the sequence would be if it were packed alone
    Offset stride;
    int local;  // the step of the first tile that the first is
    bool inside;

    __device__ Rows() {}
    __device__ Rows(const Place& at, const Tensor& x, int ahead, int row = 0)
        : local(at.first(0) + ahead + row), inside(at.inside) {
        const Index step = PACKING == OFFSETS ? 0 : at.time(local);
        first = reinterpret_cast<const char*>(at.sequence(x) + at.channel + step * x.time);
        stride = Offset(PACKING != OFFSETS && at.descending ? -x.time : x.time) * Offset(sizeof(Scalar));
    }
    __device__ bool exists(const Place& at, int chunk, int u) const { return inside && at.exists(chunk * TILE + local + u); }
    __device__ Pack* operator()(const Place& at, int chunk, int u) const {
        const Index row = PACKING == OFFSETS ? at.p.bounds[at.time(chunk * TILE + local + u)] : u;
        const Index tile = PACKING == OFFSETS ? 0 : Index(chunk) * Offset(TILE * stride);
        return reinterpret_cast<Pack*>(const_cast<char*>(first) + tile + row * stride);
    }
};

// Where a thread's rows of all tensors are, which is the same in every tile.
struct Memory {
    Rows input[INPUTS], output[OUTPUTS];

    __device__ explicit Memory(const Place& at) {
        Place piece = at;
        if (TOGETHER > 1) {  // a lane copies not its own steps, but a piece of a row; a warp, TOGETHER rows at once
            constexpr int PER_ROW = LANES / TOGETHER;
            piece.segment = at.lane / PER_ROW % SEGMENTS;
            piece.channel = at.group * GROUP + at.lane % PER_ROW * (TOGETHER * VEC);
            piece.inside = piece.channel < at.p.channels;
        }
#pragma unroll
        for (int k = 0; k < INPUTS; ++k)
            input[k] = Rows(piece, at.p.input(k), BACKWARD && k == PREVIOUS, at.lane / (LANES / TOGETHER * SEGMENTS));
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) output[k] = Rows(at, at.p.output(k), 0);
    }
};

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

// A composition as it is published.
struct Known {
    Channels a, low, b;

    __device__ void carry(Channels& state) const {
        const Composition whole = {a, low, b, false};
        whole.carry(state);
    }
};

// The compositions of a block's warps.
struct Joint {
    Channels a[WARPS][LANES], low[EXTENDED ? WARPS : 1][LANES], b[WARPS][LANES];
    int reset[WARPS];

    __device__ Composition of(int warp) const {
        const int slot = threadIdx.x % LANES;
        return {a[warp][slot], low[EXTENDED ? warp : 0][slot], b[warp][slot], FORGETS && reset[warp]};
    }
    __device__ Composition all() const {
        Composition all = of(0);
#pragma unroll
        for (int warp = 1; warp < WARPS; ++warp) all = of(warp).after(all);
        return all;
    }
    // Put in what the warps' lanes composed, one segment after the other.  Returns that of this warp's earlier segments.
    __device__ Composition join(const Place& at, Composition whole) {
        Composition before = Composition::none();
        if constexpr (SEGMENTS > 1) {
#pragma unroll
            for (int lanes = LANES; lanes < 32; lanes *= 2) {
                const Composition other = whole.from_lane_below(lanes);
                if (at.lane >= lanes) whole = whole.after(other);
            }
            const Composition other = whole.from_lane_below(LANES);
            if (at.segment > 0) before = other;
        }
        if (at.segment == SEGMENTS - 1) {
            const int slot = at.lane % LANES;
            a[at.warp][slot] = whole.a;
            if (EXTENDED) low[at.warp][slot] = whole.low;
            b[at.warp][slot] = whole.b;
            if (FORGETS) reset[at.warp] = whole.reset;
        }
        return before;
    }
};

// CU_SEQLENS: at which steps of a tile sequences begin, or end, and which.
struct Boundaries {
    static constexpr int STEPS = PACKING == CU_SEQLENS ? TILE : 1, WORDS = STEPS / 32 + 2;
    unsigned bits[WORDS];
    int sequence[STEPS];  // where the bit is set

    __device__ void note(int i, int n) {
        atomicOr(&bits[i / 32], 1u << i % 32);
        sequence[i] = n;
    }
    // The bits of the steps from i on.
    __device__ unsigned of(int i) const { return __funnelshift_r(bits[i / 32], bits[i / 32 + 1], i % 32); }
};
static_assert(PACKING != CU_SEQLENS || (ROWS <= 32 && Boundaries::WORDS <= THREADS));

struct Shared {
    Strip input[STAGES][WARPS][INPUTS];
    Strip output[NARROW ? WARPS : 1];
    Joint tile[BUFFERS];
    Joint between;  // chained: the tiles since the block's last
    // Looking back: the tiles before, the nearest first, and their marks; the state found; the tiles drawn.
    Known window[LOOKS_BACK ? WINDOW : 1][LANES];
    unsigned seen[LOOKS_BACK ? WATCHERS : 1];
    Channels found[LANES];
    int drawn[2];
    Boundaries begins[PACKING == CU_SEQLENS ? BUFFERS : 1], ends[PACKING == CU_SEQLENS ? BUFFERS : 1];
    Compute sums[SUMS ? WARPS : 1][SUMS ? PARAMETERS : 1][GROUP];

    // Note where sequences begin and end in a tile.  `first`, the sequence that holds the first of its steps in time, goes
    // on from that of the block's tile before, or from -1.  All threads of the block take part.
    __device__ void find_sequences(const Place& at, int chunk, int buffer, int& first) {
        const Parameters& p = at.p;
        const int origin = chunk * TILE, count = p.steps - origin < TILE ? p.steps - origin : TILE;
        const int from = at.descending ? p.steps - origin - count : origin;
        if (threadIdx.x < Boundaries::WORDS)
            begins[buffer].bits[threadIdx.x] = ends[buffer].bits[threadIdx.x] = 0;
        if (first < 0) {
            first = 0;
            for (int high = p.sequences - 1; first < high;) {
                const int middle = (first + high + 1) / 2;
                if (p.bounds[middle] <= from) first = middle;
                else high = middle - 1;
            }
            __syncthreads();
        } else {
            for (int passed = THREADS; passed == THREADS;) {
                const int n = at.descending ? first - threadIdx.x : first + 1 + threadIdx.x;
                const bool passes = n > 0 && n < p.sequences && (p.bounds[n] <= from) != at.descending;
                passed = __syncthreads_count(passes);
                first += at.descending ? -passed : passed;
            }
        }
        for (int n = first + threadIdx.x; n < p.sequences; n += THREADS) {
            const int low = p.bounds[n] - from, high = p.bounds[n + 1] - 1 - from;  // its first and last step
            if (low >= count) break;
            if (low > high) continue;
            if (low >= 0) (at.descending ? ends : begins)[buffer].note(at.descending ? count - 1 - low : low, n);
            if (high < count) (at.descending ? begins : ends)[buffer].note(at.descending ? count - 1 - high : high, n);
        }
        __syncthreads();
    }
};
static_assert(sizeof(Shared) <= SHARED_BYTES);

__device__ inline Pack filled(Compute x) {
    Compute all[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) all[v] = x;
    return pack(all);
}

__device__ inline Pack load_pack(const Scalar* from) { return *reinterpret_cast<const Pack*>(from); }

__device__ inline void load_state(const Place& at, const Scalar* from, int n, Channels& state) {
    unpack(from && at.inside ? load_pack(from + at.state(n)) : filled(Ring::zero()), state.value);
}

__device__ inline void store_state(const Place& at, Scalar* to, int n, const Channels& state) {
    if (to && at.inside) *reinterpret_cast<Pack*>(to + at.state(n)) = pack(state.value);
}

// Before which of a thread's steps the state is reset.  The lanes of a segment have the same steps: each loads some, long
// before their use, as a load waits behind the copies, and they tell each other.
struct Resets {
    static constexpr int TILES = CHAINED || LANES < ROWS ? 1 : LANES / ROWS;  // loaded at once
    static constexpr int WORDS = RESETS ? (TILES * ROWS + LANES - 1) / LANES : 1;
    unsigned word[WORDS] = {};

    __device__ void load(const Place& at, int chunk) {
        if (!RESETS) return;
#pragma unroll
        for (int k = 0; k < WORDS; ++k) {
            const int v = k * LANES + at.lane % LANES, i = at.first(chunk + v / ROWS) + v % ROWS;
            word[k] = 0;
            if (v >= TILES * ROWS || !at.exists(i)) continue;
            const Index row = PACKING == OFFSETS ? at.p.bounds[at.time(i)] : at.time(i);
            const Index sequence = at.batch * at.p.resets_batch + at.direction * at.p.resets_direction;
            word[k] = at.p.resets[sequence + row * at.p.resets_time];
        }
    }
    __device__ void share() {
        if (!RESETS) return;
#pragma unroll
        for (int k = 0; k < WORDS; ++k)
            word[k] = __ballot_sync(~0u, word[k]) >> threadIdx.x % 32 / LANES * LANES;
    }
    __device__ Resets of(int chunk) const {
        Resets tile = *this;
        if (TILES > 1) tile.word[0] >>= chunk % TILES * ROWS;
        return tile;
    }
    __device__ bool operator[](int u) const { return RESETS && word[u / LANES] >> u % LANES & 1; }
};

using OfChannels = Element::Channel[VEC];  // what the parameters make of a thread's channels
using Sums = Compute[OF_CHANNEL][VEC];     // of the gradients of the parameters

// The steps of one thread in a tile.  Chained blocks keep two tiles' for long, as they are in memory if little need be
// computed of them: 16-bit ones take half of the registers so.
struct Steps {
    static constexpr bool RAW = CHAINED && Element::RAW;
    Step step[RAW ? 1 : ROWS][VEC];
    Pack raw[RAW ? ROWS : 1][INPUTS];
    Resets resets;
    unsigned begins, ends;  // CU_SEQLENS: bits of the steps with which sequences do

    static __device__ void make(const Pack (&bits)[INPUTS], const OfChannels& of_channels, Step (&row)[VEC]) {
        Compute x[INPUTS][VEC];
#pragma unroll
        for (int k = 0; k < INPUTS; ++k) unpack(bits[k], x[k]);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            Compute plain[PLAIN];
#pragma unroll
            for (int k = 0; k < PLAIN; ++k) plain[k] = x[k][v];
            row[v] = Element::read(plain, of_channels[v], x[BACKWARD ? PREVIOUS : 0][v], x[BACKWARD ? GRAD : 0][v]);
        }
    }
    __device__ void get(int u, Step (&row)[VEC]) const {
        if constexpr (RAW) {
            const OfChannels nothing = {};
            make(raw[u], nothing, row);
        } else {
#pragma unroll
            for (int v = 0; v < VEC; ++v) row[v] = step[u][v];
        }
    }

    // The sequence that begins, or ends, with the thread's step u, or -1.
    __device__ int beginning(const Place& at, const Shared& shared, int buffer, int u) const {
        return PACKING == CU_SEQLENS && begins >> u & 1 ? shared.begins[buffer].sequence[at.first(0) + u] : -1;
    }
    __device__ int ending(const Place& at, const Shared& shared, int buffer, int u) const {
        return PACKING == CU_SEQLENS && ends >> u & 1 ? shared.ends[buffer].sequence[at.first(0) + u] : -1;
    }

    template <bool CHECKED>
    static __device__ void fetch(const Place& at, const Memory& memory, Strip (&strips)[INPUTS], int chunk) {
#pragma unroll
        for (int k = 0; k < INPUTS; ++k)  // backward, the step before in time is the one scanned after
            if (at.p.has_input(k))
                strips[k].fetch<CHECKED>(at, at.p.input(k), memory.input[k], chunk, BACKWARD && k == PREVIOUS);
    }

    template <bool CHECKED>
    __device__ void read(
        const Place& at, const Shared& shared, int stage, int buffer, int chunk, const OfChannels& of_channels
    ) {
        const Parameters& p = at.p;
        const Strip (&strips)[INPUTS] = shared.input[stage][at.warp];
        const int i = at.first(chunk);
        if (PACKING == CU_SEQLENS)
            begins = shared.begins[buffer].of(at.first(0)), ends = shared.ends[buffer].of(at.first(0));
        int shift[INPUTS];
#pragma unroll
        for (int k = 0; k < INPUTS; ++k) shift[k] = Strip::shift(at, p.input(k), chunk, BACKWARD && k == PREVIOUS);
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            Pack bits[INPUTS];
#pragma unroll
            for (int k = 0; k < INPUTS; ++k)
                bits[k] = p.has_input(k) ? strips[k].element[Strip::place(at, u, shift[k])] : filled(0);
            const bool exists = !CHECKED || (at.inside && at.exists(i + u));
            if (exists && BACKWARD && (CHECKED || PACKING == CU_SEQLENS)) {
                const int n = ending(at, shared, buffer, u);
                if ((CHECKED && !at.exists(i + u + 1)) || n >= 0)
                    bits[INPUTS - 2] = p.h0 && at.inside ? load_pack(p.h0 + at.state(n)) : filled(Element::absent_state());
            }
            if (BACKWARD && resets[u]) bits[INPUTS - 2] = filled(Element::absent_state());
            if constexpr (RAW) {  // a step that does not exist leaves the state alone
#pragma unroll
                for (int k = 0; k < INPUTS; ++k)
                    raw[u][k] = exists ? bits[k] : filled(k == 0 ? Ring::one() : Ring::zero());
            } else {
                make(bits, of_channels, step[u]);
#pragma unroll
                for (int v = 0; v < VEC; ++v)
                    if (!exists) step[u][v] = Step::none();
            }
        }
    }

    __device__ Composition compose(const Place& at, const Shared& shared, int buffer) const {
        Composition whole = Composition::none();
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (const int n = beginning(at, shared, buffer, u); n >= 0) {
                load_state(at, at.p.initial, n, whole.b);
                whole.reset = true;
            }
            if (!BACKWARD && resets[u]) whole.forget();
            Step row[VEC];
            get(u, row);
#pragma unroll
            for (int v = 0; v < VEC; ++v) whole.append(v, row[v]);
            if (BACKWARD && resets[u]) whole.forget();
        }
        whole.settle();
        return whole;
    }

    // Take the steps from `state`, writing the results; `sums` gathers the gradients of the parameters.
    template <bool CHECKED>
    __device__ void apply(
        const Place& at, const Memory& memory, Shared& shared, int buffer, int chunk, Channels& state, Sums& sums
    ) const {
        const Parameters& p = at.p;
        const int i = at.first(chunk);
        Pack results[ROWS][OUTPUTS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (const int n = beginning(at, shared, buffer, u); n >= 0) load_state(at, p.initial, n, state);
            Compute out[OUTPUTS][VEC];
            Step row[VEC];
            get(u, row);
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                Compute result[FACTORS];
                if (!BACKWARD && resets[u]) state.value[v] = Ring::zero();
                state.value[v] = row[v].apply(state.value[v], result);
                if (BACKWARD && resets[u]) state.value[v] = Ring::zero();
#pragma unroll
                for (int k = 0; k < OUTPUTS; ++k) out[k][v] = result[Element::output_factor(k)];
#pragma unroll
                for (int k = 0; k < (SUMS ? PARAMETERS : 0); ++k) sums[k][v] += result[Element::parameter_factor(k)];
            }
            if (const int n = ending(at, shared, buffer, u); n >= 0) store_state(at, p.final, n, state);
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) results[u][k] = pack(out[k]);
        }
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) {
            Strip& strip = shared.output[NARROW ? at.warp : 0];
            const int shift = Strip::shift(at, p.output(k), chunk, 0);
#pragma unroll
            for (int u = 0; u < ROWS; ++u)
                if (!(CHECKED || (NARROW && NARROW < LANES)) || (at.inside && (!CHECKED || at.exists(i + u))))
                    *(NARROW ? &strip.element[Strip::place(at, u, shift)] : memory.output[k](at, chunk, u)) = results[u][k];
            if constexpr (NARROW) strip.store<CHECKED>(at, p.output(k), chunk);
        }
    }
};

// What is published of the tiles of one chain.
struct Published {
    Message* messages;
    unsigned epoch;

    __device__ Published(const Parameters& p, int chain, int chunks)
        : messages(p.published + Index(chain) * chunks * MESSAGES * GROUP), epoch(p.epoch) {}

    __device__ Message* at(int chunk, int k, int v) const {
        return messages + ((Index(chunk) * MESSAGES + k) * VEC + v) * LANES + threadIdx.x % LANES;
    }
    __device__ void write(int chunk, const Composition& tile) const {
        const unsigned mark = epoch + (tile.reset ? RESET : COMPOSED);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const Compute numbers[] = {tile.b.value[v], tile.a.value[v], EXTENDED ? tile.low.value[v] : 0};
            const unsigned* const parts = reinterpret_cast<const unsigned*>(numbers);
#pragma unroll
            for (int k = 0; k < MESSAGES; ++k)
                store_message(at(chunk, k, v), {parts[2 * k], parts[2 * k + 1], MESSAGES == 1 ? parts[2] : 0, mark});
        }
    }
    __device__ void write(int chunk, const Channels& after) const {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const unsigned* const parts = reinterpret_cast<const unsigned*>(&after.value[v]);
            store_message(at(chunk, 0, v), {parts[0], MESSAGES == 1 ? 0 : parts[1], 0, epoch + KNOWN});
        }
    }
    // Publish the state after a tile, given the one it begins in.
    __device__ void write_after(int chunk, const Composition& tile, Channels state) const {
        tile.carry(state);
        if (threadIdx.x < LANES) write(chunk, state);
    }
    // What is there of a tile: ABSENT as long as not all of it is marked alike; if it is KNOWN, b is the state.
    __device__ unsigned read(int chunk, Known& tile) const {
        unsigned every = COMPOSED | KNOWN, any = 0;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            Compute numbers[3];
            unsigned* const parts = reinterpret_cast<unsigned*>(numbers);
#pragma unroll
            for (int k = 0; k < MESSAGES; ++k) {
                const Message message = load_message(at(chunk, k, v));
#pragma unroll
                for (int i = 0; i < 4 - MESSAGES; ++i) parts[2 * k + i] = message.parts[i];
                if (k > 0 && every == KNOWN) continue;  // nobody needs the a of a double then
                const unsigned mark = message.since(epoch);
                every &= mark, any |= mark;
            }
            tile.b.value[v] = numbers[0], tile.a.value[v] = numbers[1], tile.low.value[v] = numbers[2];
        }
        return every == any ? every : ABSENT;
    }
};

// What is published of some neighbouring tiles, asked for long before it is needed.
struct Asked {
    static constexpr int SIZE = 4 / MESSAGES / VEC > 0 ? 4 / MESSAGES / VEC : 1;
    Message message[SIZE][MESSAGES][VEC];

    __device__ void ask(const Published& published, int first, int end) {
#pragma unroll
        for (int i = 0; i < SIZE; ++i)
            if (first + i < end)
#pragma unroll
                for (int k = 0; k < MESSAGES; ++k)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) message[i][k][v] = load_message(published.at(first + i, k, v));
    }
    // Append the tiles, waiting for them; `alone`: to nothing.
    __device__ void compose(const Published& published, int first, int end, Composition& whole, bool alone) {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            if (first + i >= end) break;
            Composition tile;
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                Compute numbers[3];
                unsigned* const parts = reinterpret_cast<unsigned*>(numbers);
#pragma unroll
                for (int k = 0; k < MESSAGES; ++k) {
                    Message& got = message[i][k][v];
                    for (unsigned looks = 0; got.mark - published.epoch - 1 >= MARKS - 1;) {
                        if (++looks == PATIENCE) __trap();
                        got = load_message(published.at(first + i, k, v));
                    }
#pragma unroll
                    for (int j = 0; j < 4 - MESSAGES; ++j) parts[2 * k + j] = got.parts[j];
                    tile.reset = FORGETS && got.mark - published.epoch == RESET;
                }
                tile.b.value[v] = numbers[0], tile.a.value[v] = numbers[1], tile.low.value[v] = EXTENDED ? numbers[2] : 0;
            }
            whole = i == 0 && alone ? tile : tile.after(whole);
        }
    }
};

// The state this tile begins in; publishes that after it, unless it is `settled`.  All threads of the block take part.
__device__ inline Channels look_back(
    const Place& at, Shared& shared, const Published& published, int chunk, const Composition& tile, bool settled
) {
    const int slot = at.lane % LANES, watcher = at.warp * SEGMENTS + at.segment;
    // Whether all lanes of this segment agree; every lane of the warp must ask.
    const unsigned lanes = (LANES == 32 ? ~0u : (1u << LANES) - 1) << (at.segment * LANES);
    const auto all = [&](bool ready) { return (__ballot_sync(~0u, ready) & lanes) == lanes; };
    unsigned seen = ABSENT;
    int nearest = -1;  // tile before this one whose state is known
    unsigned looks = 0;
    for (int first = 0;;) {
        const int other = chunk - 1 - first - watcher;
        Known there;
        // One read for all of a tile, and none of a known one: while memory is busy, it waits in line.
        const unsigned mark = other >= 0 && seen != KNOWN ? published.read(other, there) : ABSENT;
        const bool composed = all(mark == COMPOSED), known = all(mark == KNOWN);
        if (known || (composed && seen == ABSENT)) {
            shared.window[first + watcher][slot] = there;
            seen = mark;
        }
        shared.seen[watcher] = seen;
        __syncthreads();
        // The nearest tile whose state is known, if of every tile between it and this one the composition is there.
        bool gap = false;
#pragma unroll
        for (int i = 0; i < WATCHERS; i += 32) {
            const unsigned other = i + at.lane < WATCHERS ? shared.seen[i + at.lane] : COMPOSED;
            const unsigned known = __ballot_sync(~0u, other == KNOWN), missing = __ballot_sync(~0u, other == ABSENT);
            if (known && !(missing & ((known & -known) - 1))) nearest = first + i + __ffs(known) - 1;
            gap = known || missing;
            if (gap) break;
        }
        if (nearest >= 0) break;
        if (!gap && first + 2 * WATCHERS <= WINDOW) first += WATCHERS, seen = ABSENT;
        if (++looks == PATIENCE) __trap();
        __syncthreads();
    }
    if (at.warp == 0) {  // the others would only wait for shared memory
        Channels state = shared.window[nearest][slot].b;
#pragma unroll 4
        for (int back = nearest - 1; back >= 0; --back) shared.window[back][slot].carry(state);
        if (!settled) published.write_after(chunk, tile, state);
        if (at.segment == 0) shared.found[slot] = state;
    }
    __syncthreads();
    return shared.found[slot];
}

// Add up the gradients of the parameters over the block's segments, then warps, in order, into a row of their own.
__device__ inline void store_sums(const Place& at, Shared& shared, int part, Sums& sums) {
#pragma unroll
    for (int k = 0; k < PARAMETERS; ++k)
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
#pragma unroll
            for (int lanes = LANES; lanes < 32; lanes *= 2) sums[k][v] += __shfl_down_sync(~0u, sums[k][v], lanes);
            if (at.segment == 0) shared.sums[at.warp][k][at.lane * VEC + v] = sums[k][v];
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


__device__ inline void prepare(const Place& at, OfChannels& of_channels) {
    const Parameters& p = at.p;
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        Compute parameters[OF_CHANNEL] = {};
#pragma unroll
        for (int k = 0; k < PARAMETERS; ++k)
            if (at.inside)
                parameters[k] = widen(p.parameters[k][at.direction * p.parameter_direction + at.channel + v]);
        of_channels[v] = Element::prepare(parameters);
    }
}

// Take a composed tile from `state`, which goes on to its end.
__device__ inline void apply(
    const Place& at, const Memory& memory, Shared& shared, int buffer, int chunk, const Steps& steps,
    const Composition& before, Channels& state, Sums& sums
) {
    Channels mine;  // the state that this thread's steps begin in
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        if (warp == at.warp) mine = state;
        shared.tile[buffer].of(warp).carry(state);
    }
    if (SEGMENTS > 1) before.carry(mine);
    if (at.whole(chunk)) steps.apply<false>(at, memory, shared, buffer, chunk, mine, sums);
    else steps.apply<true>(at, memory, shared, buffer, chunk, mine, sums);
}

__device__ inline void read(
    const Place& at, const Shared& shared, int stage, int buffer, int chunk, const OfChannels& of_channels, Steps& steps
) {
    if (at.whole(chunk)) steps.read<false>(at, shared, stage, buffer, chunk, of_channels);
    else steps.read<true>(at, shared, stage, buffer, chunk, of_channels);
    if (EXCHANGED) __syncwarp();
}

__device__ inline void fetch(const Place& at, const Memory& memory, Shared& shared, int stage, int chunk, int chunks) {
    if (chunk < chunks) {
        if (at.inner(chunk)) Steps::fetch<false>(at, memory, shared.input[stage][at.warp], chunk);
        else Steps::fetch<true>(at, memory, shared.input[stage][at.warp], chunk);
    }
    commit_copies();
}

// A block takes the tiles of its chain one after the other.
__device__ inline void stream(const Parameters& p, Shared& shared, int chunks) {
    const Place at(p, blockIdx.x);
    const Memory memory(at);
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) fetch(at, memory, shared, stage, stage, chunks);
    Resets resets, later;
    later.load(at, 0);
    OfChannels of_channels;
    prepare(at, of_channels);
    Channels state;
    load_state(at, PACKING == CU_SEQLENS ? nullptr : p.initial, 0, state);
    Sums sums = {};
    int sequence = -1;
    for (int chunk = 0, stage = 0, buffer = 0; chunk < chunks; ++chunk, buffer ^= 1) {
        if (PACKING == CU_SEQLENS) shared.find_sequences(at, chunk, buffer, sequence);
        wait_for_oldest_copies();
        if (EXCHANGED) __syncwarp();
        Steps steps;
        if (chunk % Resets::TILES == 0) {
            resets = later;
            resets.share();
            later.load(at, chunk + Resets::TILES);
        }
        steps.resets = resets.of(chunk);
        read(at, shared, stage, buffer, chunk, of_channels, steps);
        fetch(at, memory, shared, stage, chunk + STAGES, chunks);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        const Composition before = shared.tile[buffer].join(at, steps.compose(at, shared, buffer));
        __syncthreads();
        apply(at, memory, shared, buffer, chunk, steps, before, state, sums);
    }
    if (PACKING != CU_SEQLENS && at.warp == 0 && at.segment == 0) store_state(at, p.final, 0, state);
    if constexpr (SUMS) store_sums(at, shared, 0, sums);
}

// Blocks share a chain and take every so manieth tile of it.
__device__ inline void chain(const Parameters& p, Shared& shared, int chunks) {
    const int companions = p.companions;
    const Place at(p, blockIdx.x / companions);
    const Memory memory(at);
    const Published published(p, blockIdx.x / companions, chunks);
    int next = blockIdx.x % companions;  // the tile to be composed
#pragma unroll 1
    for (int stage = 0; stage < STAGES; ++stage) fetch(at, memory, shared, stage, next + stage * companions, chunks);
    Resets later;
    later.load(at, next);
    OfChannels of_channels;
    prepare(at, of_channels);
    Channels state;
    load_state(at, PACKING == CU_SEQLENS ? nullptr : p.initial, 0, state);
    Steps steps;
    Composition before;
    Sums sums = {};
    int sequence = -1;
    for (int now = -1, since = 0, stage = 0, last = 0, buffer = 0;; since = now + 1, now = next, next += companions) {
        // The tiles between the block's last and `now`: each segment has a share of them, as far as they go.
        const int share = (now - since + WATCHERS - 1) / WATCHERS, of_warp = SEGMENTS * share;
        const int first = since + at.warp * of_warp + at.segment * share, end = first + share < now ? first + share : now;
        Asked asked;
        asked.ask(published, first, end);
        Steps coming;
        Composition composed;
        if (next < chunks) {
            if (PACKING == CU_SEQLENS) shared.find_sequences(at, next, buffer, sequence);
            wait_for_oldest_copies();
            if (EXCHANGED) __syncwarp();
            later.share();
            coming.resets = later;
            later.load(at, next + companions);
            read(at, shared, stage, buffer, next, of_channels, coming);
            fetch(at, memory, shared, stage, next + STAGES * companions, chunks);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            composed = shared.tile[buffer].join(at, coming.compose(at, shared, buffer));
        }
        __syncthreads();
        if (next < chunks && companions > 1 && at.warp == 0) {
            const Composition all = shared.tile[buffer].all();
            if (at.segment == 0) published.write(next, all);
        }
        if (now >= 0) {
            if (now > since) {
                if (since + at.warp * of_warp < now) {
                    Composition between = Composition::none();
                    asked.compose(published, first, end, between, true);
                    for (int i = first + Asked::SIZE; i < end; i += Asked::SIZE) {
                        asked.ask(published, i, end);
                        asked.compose(published, i, end, between, false);
                    }
                    __syncwarp();
                    shared.between.join(at, between);
                }
                __syncthreads();
                for (int warp = 0, tile = since; tile < now; ++warp, tile += of_warp) shared.between.of(warp).carry(state);
            }
            apply(at, memory, shared, last, now, steps, before, state, sums);
            if (PACKING != CU_SEQLENS && now == chunks - 1 && at.warp == 0 && at.segment == 0)
                store_state(at, p.final, 0, state);
        }
        if (next >= chunks) break;
        steps = coming, before = composed, last = buffer;
        buffer = buffer + 1 == BUFFERS ? 0 : buffer + 1;
    }
    if constexpr (SUMS) store_sums(at, shared, blockIdx.x % companions, sums);
}

// A block draws one tile after another, of any chain.
__device__ inline void chain_looking_back(const Parameters& p, Shared& shared, int chunks) {
    const int chains = (p.channels + GROUP - 1) / GROUP * p.batch * p.directions;
    struct Tile { int chain, chunk; };
    const auto draw = [&] { return threadIdx.x == 0 ? int(atomicAdd(p.counter, 1u) - p.drawn) : 0; };
    const auto tell = [&](int buffer, int number) { if (threadIdx.x == 0) shared.drawn[buffer] = number; };
    const auto drawn = [&](int buffer) -> Tile {
        return {shared.drawn[buffer] % chains, shared.drawn[buffer] / chains};
    };
    tell(1, draw());
    __syncthreads();
    Tile tile = drawn(1);
    Resets later;
    {
        const Place at(p, tile.chain);
        fetch(at, Memory(at), shared, 0, tile.chunk, chunks);
        if (tile.chunk < chunks) later.load(at, tile.chunk);
    }
    int sequence = -1;
    for (int buffer = 0; tile.chunk < chunks; buffer ^= 1) {
        const Place at(p, tile.chain);
        const int chunk = tile.chunk, number = draw();
        OfChannels of_channels;
        prepare(at, of_channels);
        Channels state;
        load_state(at, PACKING == CU_SEQLENS ? nullptr : p.initial, 0, state);
        if (PACKING == CU_SEQLENS) shared.find_sequences(at, chunk, buffer, sequence);
        wait_for_oldest_copies();
        if (EXCHANGED) __syncwarp();
        later.share();
        Steps steps;
        steps.resets = later;
        read(at, shared, 0, buffer, chunk, of_channels, steps);
        const Composition before = shared.tile[buffer].join(at, steps.compose(at, shared, buffer));
        tell(buffer, number);  // late, so that nobody waits for it
        __syncthreads();
        const Published published(p, tile.chain, chunks);
        Composition all;
        bool settled = false;
        if (at.warp == 0) {
            all = shared.tile[buffer].all();
            // Of a tile that resets the state, that after it is all there is to know.
            settled = chunk == 0 || all.reset;
            if (settled) published.write_after(chunk, all, state);
            else if (threadIdx.x < LANES) published.write(chunk, all);
        }
        const Tile next = drawn(buffer);
        const Place there(p, next.chain);
        fetch(there, Memory(there), shared, 0, next.chunk, chunks);
        if (chunk > 0) state = look_back(at, shared, published, chunk, all, settled);
        if (next.chunk < chunks) later.load(there, next.chunk);
        Sums sums = {};
        apply(at, Memory(at), shared, buffer, chunk, steps, before, state, sums);
        if (PACKING != CU_SEQLENS && chunk == chunks - 1 && at.warp == 0 && at.segment == 0)
            store_state(at, p.final, 0, state);
        if constexpr (SUMS) store_sums(at, shared, chunk, sums);
        tile = next;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) scan(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int chunks = (p.steps + TILE - 1) / TILE;
    if constexpr (LOOKS_BACK) chain_looking_back(p, shared, chunks);
    else if constexpr (CHAINED) chain(p, shared, chunks);
    else stream(p, shared, chunks);
}
