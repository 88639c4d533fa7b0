// The shape of tiles, and the kernel's parameters.

#ifndef MASK
#define MASK 0  // 1: a mask has the steps before which, in the forward pass's order, the state is zero; 2: contiguous
#endif
#ifndef JOINED
#define JOINED 0  // 1: a sequence consists of several, of p.period steps each, that begin with a state of zero
#endif

enum { DENSE, CU_SEQLENS, OFFSETS };
constexpr bool RESETS = MASK || JOINED;
constexpr bool FORGETS = PACKING == CU_SEQLENS || RESETS;

constexpr int ABREAST = LANES > 32 ? LANES : 32;  // threads of a warp, or of the warps abreast that span the channels
constexpr int SEGMENTS = ABREAST / LANES;
constexpr int THREADS = ABREAST * WARPS;
constexpr int GROUP = LANES * VEC;
constexpr int STRIP = SEGMENTS * ROWS;  // steps of a tile that a warp scans
constexpr int TILE = WARPS * STRIP;
constexpr unsigned OF_ROWS = ~0u >> (ROWS < 32 ? 32 - ROWS : 0);  // a bit for each of a thread's steps
static_assert(ROWS <= 32);
constexpr int POLLERS = WARPS * SEGMENTS;  // segments of a block, which poll the messages of earlier tiles in parallel
constexpr int WINDOW = POLLERS < 32 ? 32 : POLLERS;  // tiles of the look-back window
static_assert(!LOOKS_BACK || (CHAINED && STAGES == 1 && POLLERS <= 256), "a block draws one tile ahead");
// The pitch in bytes of input k's rows in shared memory, if rows are unaligned and copied in aligned pieces, else 0.
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
// The distance from a lane's first channel to that of the next lane, and from one of its channels to its next.  A lane
// has adjacent channels, which it accesses as a vector; in unaligned rows it accesses single elements, LANES apart.
constexpr int NEXT_LANE = PITCHED ? 1 : VEC, NEXT = PITCHED ? LANES : 1;
constexpr int ITEMS = PITCHED ? VEC : 1;  // vectors or elements that a lane accesses at a step
using Item = PackType<PITCHED ? sizeof(Scalar) : sizeof(Pack)>::type;
constexpr int COPIED_PACKS = COPIES_16_BYTES ? 16 / sizeof(Pack) : 1;  // adjacent packs in one copy of a lane
#ifndef SINGLE
#define SINGLE 0  // 1: with NARROW, there is one sequence
#endif
#ifndef ALIGNED
#define ALIGNED 0  // 1: with NARROW, a warp's steps begin with an aligned 16-byte piece in all tensors
#endif
static_assert(CLUSTER == 1 || (!CHAINED && LANES <= 32), "the blocks of a cluster stream a chain of their own");
// Whether an element may be copied by another lane than reads it, or, with MAPPED, by a tensor map.
constexpr bool EXCHANGED = NARROW || COPIES_16_BYTES || PITCHED || MAPPED;
static_assert(!MAPPED || (CHAINED && !LOOKS_BACK && STAGES == 1 && LANES <= 32 && PACKING != OFFSETS));
static_assert(!MAPPED || !(NARROW || COPIES_16_BYTES || PITCHED), "a map copies a strip of rows as they are");
static_assert(LANES % COPIED_PACKS == 0 && ROWS % COPIED_PACKS == 0);
static_assert(LANES <= 32 || (LANES % 32 == 0 && !LOOKS_BACK && !COPIES_16_BYTES), "both are of single warps");
static_assert(LANES <= 32 || NARROW, "warps abreast copy their steps in pieces");
static_assert(NARROW % VEC == 0, "a lane has all of its channels");
// Buffers of compositions: one may be read while the next is written.
constexpr int BUFFERS = STAYS ? 1 : CHAINED && !LOOKS_BACK ? 3 : 2;
constexpr int PARTS = STAYS ? 4 : 1;  // parts of a tile, copied one after the other and composed as they arrive
constexpr int PART = ROWS / PARTS;    // a thread's rows in a part
static_assert(ROWS % PARTS == 0);
static_assert(!JOINED || (NARROW && !CHAINED && PACKING == DENSE), "last states are read from a narrow strip");
static_assert(!STAYS || (CHAINED && !LOOKS_BACK && STAGES == 1 && NARROW && PACKING == DENSE && SEGMENTS == 1));

using Element = ELEMENT;
using Ring = Element::Ring;
using Step = Element::Step;
constexpr bool BACKWARD = Element::BACKWARD;
constexpr int PLAIN = Element::PLAIN, PREVIOUS = PLAIN, GRAD = PLAIN + 1;
constexpr int INPUTS = PLAIN + (BACKWARD ? 2 : 0), OUTPUTS = Element::OUTPUTS, FACTORS = Element::FACTORS;
constexpr int PARAMETERS = Element::PARAMETERS, OF_CHANNEL = PARAMETERS ? PARAMETERS : 1;  // arrays must not be empty
constexpr bool SUMS = BACKWARD && PARAMETERS;
// With STAYS, the rows whose two 16-bit inputs a thread keeps in a register, so that it reads them only once.  With
// resets there are too few registers for all rows.
constexpr int KEPT_ROWS = STAYS && INPUTS == 2 ? RESETS ? 3 * ROWS / 4 : ROWS : 0;

// With ZEROES, the coefficient of a step with a reset is read as zero, and a tile is scanned as if there were no mask:
// zero forgets every finite state, and a thread that meets a state that is not finite scans its steps again, with
// tests.  Blocks that look back do this for few channels and for unaligned rows, and interleaved blocks for 5 to 16
// channels of 32 bits; with fewer channels, or 16 bits, it was slower than tests.
constexpr bool ZEROES = RESETS && CHAINED && !STAYS && PACKING == DENSE && Element::RAW &&
                        (LOOKS_BACK ? NARROW || PITCHED : NARROW > 4 && NARROW <= 16 && sizeof(Scalar) == 4);

using Bits = PackType<sizeof(Pack) < 4 ? 4 : sizeof(Pack)>::type;  // a Pack in registers, where shorts would share one

using Index = long long;
#if LONG_OFFSETS
using Offset = Index;  // in bytes, within a tile
#else
using Offset = int;
#endif

// A composition takes one message if it has floats (b, a, low), or two, for b and a, if it has doubles.
constexpr int MESSAGES = sizeof(Compute) / 4;

struct Strides { Index batch, time, direction; };  // the stride of channels is 1

struct Tensor : Strides {
    Scalar* data;  // null: all zero
    __device__ Tensor(Scalar* data, Strides strides) : Strides(strides), data(data) {}
};

struct Parameters {
#if MAPPED
    TensorMap maps[INPUTS];
#endif
    // Addresses come first: all else is the same in all calls with the same shapes.
    Scalar* data[INPUTS + OUTPUTS];  // the element's plain inputs; backward, h (read at t-1) and grad; then the outputs
    const PARAMETER* parameters[OF_CHANNEL];  // (channels) each, for each direction
    const Scalar* initial;  // the state before the first step scanned, (directions * batch, channels), or null
    Scalar* final;          // the state after the last one, or null
    const Scalar* h0;       // backward: the state before the first step in time, or null
    Compute* sums;          // partial sums of the parameters' gradients: a row for each block of a channel group
    const int* bounds;      // cu_seqlens or offsets
    const unsigned char* resets;  // with MASK, a byte for each step of each sequence
    Message* published;     // chained: the messages of each tile
    unsigned* counter;      // look-back: counts the tiles drawn
    unsigned epoch, drawn;  // chained: the number of the launch, a multiple of MARKS; the counter's initial value
    Index companions;       // interleaved: blocks per chain
    Index parameter_direction, resets_batch, resets_time, resets_direction;
    Strides strides[INPUTS + OUTPUTS];
    int batch, steps, channels, sequences, directions, reverse, period;
    unsigned reciprocal;  // of the period, times 2^31
    int outer;  // with NARROW, how many sequences at either end of the batch have tiles that may exceed their tensors

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
