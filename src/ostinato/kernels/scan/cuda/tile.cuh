// The shape of tiles, the kernel's parameters, compositions of steps, and the indices of a thread.

#ifndef RESETS
#define RESETS 0  // 1: a mask gives the steps before which, in the forward's order, the state is zero; 2: without gaps
#endif

enum { DENSE, CU_SEQLENS, OFFSETS };
constexpr bool FORGETS = PACKING == CU_SEQLENS || RESETS;

constexpr int ABREAST = LANES > 32 ? LANES : 32;  // threads of a warp, or of the warps that span the channels together
constexpr int SEGMENTS = ABREAST / LANES;
constexpr int THREADS = ABREAST * WARPS;
constexpr int GROUP = LANES * VEC;
constexpr int STRIP = SEGMENTS * ROWS;  // steps of a warp in a tile
constexpr int TILE = WARPS * STRIP;
constexpr unsigned OF_ROWS = ~0u >> (ROWS < 32 ? 32 - ROWS : 0);  // a bit for each of a thread's steps
static_assert(ROWS <= 32);
constexpr int POLLERS = WARPS * SEGMENTS;  // segments, which poll the messages of earlier tiles in parallel
constexpr int WINDOW = POLLERS < 32 ? 32 : POLLERS;  // tiles of the look-back window
static_assert(!LOOKS_BACK || (CHAINED && STAGES == 1 && POLLERS <= 256), "a block draws one tile ahead");
// Bytes from one row of input k to the next in shared memory, if rows are copied in pieces wherever they begin, else 0.
__device__ constexpr int pitch(int k) {
    constexpr int all[] = {PITCHES};
    return all[k];
}
__device__ constexpr int widest_pitch() {
    int most = 0;
    constexpr int all[] = {PITCHES};
    for (int one : all) most = one > most ? one : most;
    return most;
}
constexpr bool PITCHED = pitch(0) > 0;
// From a lane's first channel to the next lane's, and to its own next: those of a vector are adjacent, and where rows
// begin anywhere a lane accesses single elements beside its neighbours'.
constexpr int NEXT_LANE = PITCHED ? 1 : VEC, NEXT = PITCHED ? LANES : 1;
constexpr int ITEMS = PITCHED ? VEC : 1;  // vectors or elements that a lane accesses at a step
using Item = PackType<PITCHED ? sizeof(Scalar) : sizeof(Pack)>::type;
constexpr int COPIED_PACKS = COPIES_16_BYTES ? 16 / sizeof(Pack) : 1;  // adjacent packs in one copy of a lane
#ifndef SINGLE
#define SINGLE 0  // 1: with NARROW, there is one sequence
#endif
#ifndef ALIGNED
#define ALIGNED 0  // 1: with NARROW, the pieces of all tensors begin with a warp's steps
#endif
static_assert(CLUSTER == 1 || (!CHAINED && LANES <= 32), "the blocks of a cluster stream a chain of their own");
// Elements are copied by other lanes than read them, or by none: with MAPPED, by a map of their tensor.
constexpr bool EXCHANGED = NARROW || COPIES_16_BYTES || PITCHED || MAPPED;
static_assert(!MAPPED || (CHAINED && !LOOKS_BACK && STAGES == 1 && LANES <= 32 && PACKING != OFFSETS));
static_assert(!MAPPED || !(NARROW || COPIES_16_BYTES || PITCHED), "a map copies a strip of rows as they are");
static_assert(LANES % COPIED_PACKS == 0 && ROWS % COPIED_PACKS == 0);
static_assert(LANES <= 32 || (LANES % 32 == 0 && !LOOKS_BACK && !COPIES_16_BYTES), "both are of single warps");
static_assert(LANES <= 32 || NARROW, "warps abreast copy their steps in pieces");
// Of compositions: one may be read while the next is written.
constexpr int BUFFERS = STAYS ? 1 : CHAINED && !LOOKS_BACK ? 3 : 2;
constexpr int PARTS = STAYS ? 4 : 1;  // of a tile, copied one after the other and composed as they come
constexpr int PART = ROWS / PARTS;    // of a thread's rows
static_assert(ROWS % PARTS == 0);
static_assert(!STAYS || (CHAINED && !LOOKS_BACK && STAGES == 1 && NARROW && PACKING == DENSE && SEGMENTS == 1));

using Element = ELEMENT;
using Ring = Element::Ring;
using Step = Element::Step;
constexpr bool BACKWARD = Element::BACKWARD;
constexpr int PLAIN = Element::PLAIN, PREVIOUS = PLAIN, GRAD = PLAIN + 1;
constexpr int INPUTS = PLAIN + (BACKWARD ? 2 : 0), OUTPUTS = Element::OUTPUTS, FACTORS = Element::FACTORS;
constexpr int PARAMETERS = Element::PARAMETERS, OF_CHANNEL = PARAMETERS ? PARAMETERS : 1;  // no array is empty
constexpr bool SUMS = BACKWARD && PARAMETERS;
// With STAYS, rows of which a thread keeps both inputs of 16 bits in a register, and reads them only once.  With resets
// there are too few registers for all.
constexpr int KEPT_ROWS = STAYS && INPUTS == 2 ? RESETS ? 3 * ROWS / 4 : ROWS : 0;

// Blocks that look back over whole rows of few channels, or over rows that begin anywhere, read a coefficient of zero
// where a step is reset, and scan the tile as if there were no mask: that forgets every state that is finite, and a
// thread in which one is not scans its steps again, with tests.  So do those that take turns at 5 to 16 channels of 32
// bits; with fewer, or of 16 bits, it was slower than tests.
constexpr bool ZEROES = RESETS && CHAINED && !STAYS && PACKING == DENSE && Element::RAW &&
                        (LOOKS_BACK ? NARROW || PITCHED : NARROW > 4 && NARROW <= 16 && sizeof(Scalar) == 4);

using Bits = PackType<sizeof(Pack) < 4 ? 4 : sizeof(Pack)>::type;  // in registers: two shorts would share one

using Index = long long;
#if LONG_OFFSETS
using Offset = Index;  // within a tile, in bytes
#else
using Offset = int;
#endif

// A composition is one message of floats, (b, a, low), or two of doubles, b and a.
constexpr int MESSAGES = sizeof(Compute) / 4;

struct Strides { Index batch, time, direction; };  // that of channels is 1

struct Tensor : Strides {
    Scalar* data;  // null: all zero
    __device__ Tensor(Scalar* data, Strides strides) : Strides(strides), data(data) {}
};

struct alignas(64) TensorMap { unsigned char bytes[128]; };

struct Parameters {
#if MAPPED
    TensorMap maps[INPUTS];
#endif
    // Addresses first: the rest is the same for all calls with the same shapes.
    Scalar* data[INPUTS + OUTPUTS];  // the element's plain inputs, then h (read one step earlier) and grad; outputs
    const PARAMETER* parameters[OF_CHANNEL];  // (channels) each, in each direction
    const Scalar* initial;  // the state before the first step scanned, (directions * batch, channels), or null
    Scalar* final;          // the state after the last one, or null
    const Scalar* h0;       // backward: the state before the first step in time, or null
    Compute* sums;          // gradients of the parameters, one row for each block of a channel group
    const int* bounds;      // cu_seqlens or offsets
    const unsigned char* resets;  // with RESETS, a byte for each step of each sequence
    Message* published;     // chained: the messages of each tile
    unsigned* counter;      // look-back: counts the tiles drawn
    unsigned epoch, drawn;  // chained: the launch's number, a multiple of MARKS; the counter's initial value
    Index companions;       // interleaved: blocks per chain
    Index parameter_direction, resets_batch, resets_time, resets_direction;
    Strides strides[INPUTS + OUTPUTS];
    int batch, steps, channels, sequences, directions, reverse;

    __device__ Tensor input(int k) const { return {data[k], strides[k]}; }
    __device__ const TensorMap* map(int k) const {
#if MAPPED
        return &maps[k];
#else
        return nullptr;
#endif
    }
    __device__ bool has_input(int k) const { return !BACKWARD || k != GRAD || data[k]; }
    __device__ Tensor output(int k) const { return {data[INPUTS + k], strides[INPUTS + k]}; }
};

struct alignas(sizeof(Compute) * VEC) Channels { Compute value[VEC]; };

// Floats are so coarse near 1 that products of gates there are all rounded in the same direction, and the bias
// accumulates over time (4e-5 at T = 65,536 for gates within 1e-4 of 1).  So a product of floats keeps its rounding
// error, as the unevaluated sum a + low.
constexpr bool EXTENDED = sizeof(Scalar) == 4 && Ring::LINEAR;

// The composition of consecutive steps.
struct Composition {
    Channels a, low, b;
    bool reset;  // a packed sequence begins within, or the state is reset: it does not depend on the state before

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
            if (!(absolute(low.value[v]) < infinity())) low.value[v] = 0;  // not finite after overflow
    }
    // Append a composition that has a low part.
    __device__ void append(int v, Compute next_a, Compute next_low, Compute next_b) {
        const Compute product = Ring::times(next_a, a.value[v]);
        if (EXTENDED) {
            const Compute rest =
                fma(next_low, a.value[v], fma(next_a, low.value[v], fma(next_a, a.value[v], -product)));
            low.value[v] = absolute(rest) < infinity() ? rest : 0;
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
    __device__ Composition after(const Composition& first) const {
        Composition both = first;
        both.reset |= FORGETS && reset;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            both.append(v, a.value[v], low.value[v], b.value[v]);
            if (FORGETS && reset) both.b.value[v] = b.value[v];  // a is then unused
        }
        return both;
    }
    // A channel's numbers as messages, and back.
    __device__ Message message(int v, int k, unsigned mark) const {
        const Compute numbers[] = {b.value[v], a.value[v], EXTENDED ? low.value[v] : 0};
        const unsigned* const parts = reinterpret_cast<const unsigned*>(numbers);
        return {parts[2 * k], parts[2 * k + 1], MESSAGES == 1 ? parts[2] : 0, mark};
    }
    __device__ void take(int v, const Message (&messages)[MESSAGES]) {
        Compute numbers[3];
        unsigned* const parts = reinterpret_cast<unsigned*>(numbers);
#pragma unroll
        for (int k = 0; k < MESSAGES; ++k)
#pragma unroll
            for (int i = 0; i < 4 - MESSAGES; ++i) parts[2 * k + i] = messages[k].parts[i];
        b.value[v] = numbers[0], a.value[v] = numbers[1], low.value[v] = EXTENDED ? numbers[2] : 0;
    }
    // Of the lane below, but for `reset`.
    __device__ Composition from_lane_below(int lanes) const {
        Composition other;
        other.reset = false;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            other.a.value[v] = __shfl_up_sync(~0u, a.value[v], lanes);
            other.low.value[v] = EXTENDED ? __shfl_up_sync(~0u, low.value[v], lanes) : 0;
            other.b.value[v] = __shfl_up_sync(~0u, b.value[v], lanes);
        }
        return other;
    }
};

// A thread's coordinates: its sequence, channels and position along time, and the direction of the scan.
struct Place {
    const Parameters& p;
    int batch, direction, group, warp, lane, segment, channel;
    bool inside;      // this lane's first channel exists, and with it all of a vector
    bool descending;  // the scan runs backward in time

    __device__ Place(const Parameters& p, int chain) : p(p) {
        const int groups = NARROW ? 1 : (p.channels + GROUP - 1) / GROUP;
        group = chain % groups;
#ifdef DESCENDING
        batch = SINGLE ? 0 : chain / groups, direction = 0;
#else
        batch = chain / groups % p.batch, direction = chain / groups / p.batch;
#endif
        warp = threadIdx.x / ABREAST, lane = threadIdx.x % ABREAST;
        asm("" : "+r"(warp), "+r"(lane));  // or the compiler re-reads the slow special register at every use
        segment = lane / LANES;
        channel = group * GROUP + lane % LANES * NEXT_LANE;
        inside = channel < (NARROW ? NARROW : p.channels);
#ifdef DESCENDING
        descending = DESCENDING;
#else
        descending = (p.reverse != (direction == 1)) != BACKWARD;
#endif
    }
    // Whether the lane's channel v exists.
    __device__ bool has(int v) const { return PITCHED && v > 0 ? channel + v * NEXT < p.channels : inside; }
    __device__ int chain() const {
        return (direction * p.batch + batch) * (NARROW ? 1 : (p.channels + GROUP - 1) / GROUP) + group;
    }
    __device__ int time(int i) const { return descending ? p.steps - 1 - i : i; }
    __device__ bool exists(int i) const {
        if (PACKING != OFFSETS) return i < p.steps;
        if (i >= p.steps) return false;
        const int t = time(i);
        return p.bounds[t] + batch < p.bounds[t + 1];
    }
    // Whether all steps of the tile exist.
    __device__ bool whole(int chunk) const { return PACKING != OFFSETS && (chunk + 1) * TILE <= p.steps; }
    // Whether everything copied for the tile exists, including what alignment adds after it.
    __device__ bool inner(int chunk) const {
        const bool last = descending ? chunk == 0 : (chunk + 1) * TILE + 16 >= p.steps;  // in time
        const bool exact = ALIGNED && (descending || !BACKWARD);  // no piece ends after the tile
        if ((NARROW || PITCHED) && last && !exact) return false;
        return PACKING != OFFSETS && (chunk + 1) * TILE + BACKWARD <= p.steps;
    }
    __device__ int first(int chunk) const { return chunk * TILE + warp * STRIP + segment * ROWS; }
    __device__ Scalar* sequence(const Tensor& x) const { return x.data + batch * x.batch + direction * x.direction; }
    __device__ Index state(int n) const {
        return Index(PACKING == CU_SEQLENS ? n : direction * p.batch + batch) * p.channels + channel;
    }
};

// This thread's rows of a tensor, `ahead` steps later.
struct Rows {
    const char* first;  // in the first tile; with OFFSETS, the address for a packed row number of 0
    Offset stride;
    int local;  // step of the first row within a tile
    bool inside;

    __device__ Rows() {}
    __device__ Rows(const Place& at, const Tensor& x, int ahead, int row = 0)
        : local(at.first(0) + ahead + row), inside(at.inside) {
        const Index step = PACKING == OFFSETS ? 0 : at.time(local);
        const int channel = inside ? at.channel : at.group * GROUP;  // lanes without channels may read the first
        first = reinterpret_cast<const char*>(at.sequence(x) + channel + step * x.time);
        stride = Offset(PACKING != OFFSETS && at.descending ? -x.time : x.time) * Offset(sizeof(Scalar));
    }
    __device__ bool exists(const Place& at, int chunk, int u) const {
        return inside && at.exists(chunk * TILE + local + u);
    }
    __device__ char* tile(int chunk) const {
        return const_cast<char*>(first) + (PACKING == OFFSETS ? 0 : Index(chunk) * Offset(TILE * stride));
    }
    // Row u of the tile.
    __device__ Scalar* row(const Place& at, int chunk, char* tile, int u) const {
        const Index row = PACKING == OFFSETS ? at.p.bounds[at.time(chunk * TILE + local + u)] : u;
        return reinterpret_cast<Scalar*>(tile + row * stride);
    }
};

// Addresses of a thread's rows of all tensors, computed once for all tiles.
struct Memory {
    Rows input[INPUTS], output[OUTPUTS];

    __device__ explicit Memory(const Place& at) {
        Place piece = at;
        if (COPIED_PACKS > 1) {  // a lane copies 16 bytes of a row, not its own steps; a warp copies as many rows
            constexpr int PER_ROW = LANES / COPIED_PACKS;
            piece.segment = at.lane / PER_ROW % SEGMENTS;
            piece.channel = at.group * GROUP + at.lane % PER_ROW * (COPIED_PACKS * VEC);
            piece.inside = piece.channel < at.p.channels;
        }
#pragma unroll
        for (int k = 0; k < INPUTS; ++k)
            input[k] =
                Rows(piece, at.p.input(k), BACKWARD && k == PREVIOUS, at.lane / (LANES / COPIED_PACKS * SEGMENTS));
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) output[k] = Rows(at, at.p.output(k), 0);
    }
};
