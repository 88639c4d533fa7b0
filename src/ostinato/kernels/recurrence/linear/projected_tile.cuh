// Sizes, parameters and tiles of projected.cu, which says how they are used.

using Element = ELEMENT;
using Index = long long;
static_assert(sizeof(Scalar) == 2);
constexpr int GATES = Element::PLAIN, PARAMETERS = Element::PARAMETERS, OF_CHANNEL = PARAMETERS ? PARAMETERS : 1;

constexpr int HELD = GATES % 2 ? 2 : 1;   // channels of a thread, which holds two rows of each accumulator block
constexpr int BLOCKS = GATES * HELD / 2;  // of 64 rows
constexpr int SLICE = 64;                 // input channels of a stage, 128 bytes
constexpr int CONSUMERS = 2, WARPGROUP = 128, THREADS = (CONSUMERS + 1) * WARPGROUP;
constexpr int OWN = 32 * HELD, CHANNELS = CONSUMERS * OWN;  // channels of a warpgroup, of a tile
constexpr int ROWS = GATES * OWN;                           // of the weight, of a warpgroup
constexpr int RUN = STEPS / 8;             // column n of an accumulator is step n % 8 * RUN + n / 8
constexpr int PADDED_RUN = RUN * OWN + 8;  // scalars, padded against bank conflicts of stores to steps RUN apart
constexpr bool SHARE_WEIGHT = CONSUMERS * ROWS > STEPS;

struct Parameters {
    TensorMap x, weight;
    const Scalar* parameters[OF_CHANNEL];  // (channels) each
    const Scalar* initial;  // (sequences, channels), or null
    Scalar* h;
    Scalar* final;  // (sequences, channels)
    const unsigned char* resets;  // with RESETS, a byte for each row: whether the state before it is zero
    Message* published;
    Index line_stride, row_stride;  // in rows, of h and of the resets
    unsigned epoch;  // the launch's number, a multiple of MARKS
    int lines, rows;  // a line is one sequence, or several concatenated
    int period;       // rows of a sequence
    int channels, depth;
};

struct Shared {
    struct alignas(1024) Stage {
        Scalar x[STEPS * SLICE];
        Scalar weight[CONSUMERS][ROWS * SLICE];
    } stage[STAGES];
    alignas(16) Scalar h[CONSUMERS][8 * PADDED_RUN];
    Barrier full[STAGES], empty[STAGES];
};

// One of the tiles of a cluster.
struct Tile {
    int channel;                  // the first
    int line, chunk, base, skip;  // its steps are those of the line from `base` on, less the first `skip`

    __device__ Tile(const Parameters& p, int number, int rank) {
        const int groups = count_groups(p), group = number % groups;
        int place = number / groups;
        if (SHARE_WEIGHT) place = place * CLUSTER + rank;
        channel = (SHARE_WEIGHT ? group : group * CLUSTER + rank) * CHANNELS;
        line = place % p.lines;
        chunk = place / p.lines;  // past the end for a cluster's idle last block, which then skips all steps
        base = min(chunk * STEPS, p.rows - STEPS);
        skip = chunk * STEPS - base;
    }
    // Where a step is in h and among the resets.
    __device__ Index row(const Parameters& p, int step) const {
        return line * p.line_stride + (base + step) * p.row_stride;
    }
    static __device__ int count_groups(const Parameters& p) {
        constexpr int WIDTH = SHARE_WEIGHT ? CHANNELS : CHANNELS * CLUSTER;
        return (p.channels + WIDTH - 1) / WIDTH;
    }
    static __device__ int count(const Parameters& p) {
        constexpr int AT_ONCE = SHARE_WEIGHT ? CLUSTER : 1;
        return count_groups(p) * ((p.lines * ((p.rows + STEPS - 1) / STEPS) + AT_ONCE - 1) / AT_ONCE);
    }
};

