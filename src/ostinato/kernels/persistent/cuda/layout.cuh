// The parameters of a persistent kernel, and how its work is divided.
//
// A block owns UNITS hidden units of COLUMNS sequences, a group, or with TAKES_FEWER of up to as many, and updates them
// at every step.  Its threads share these items, and the group's blocks exchange what comes of them; see exchange.cuh.
//
// With BLOCK_GROUPS of 2 a block computes two groups of COLUMNS sequences each, one while what the other exchanges is
// on its way; see ping_pong.cuh.
//
// With SHARES_WORK, where a block within clusters has few units, some of its warps only update them, and others do the
// rest of the elementwise work; see gather.cu and scatter.cu.

// Of a unit: rows of the recurrent matrix, which of a user's cell need not be gates; and numbers in `pre` at a step.
constexpr int GATES = Cell::PRODUCTS, INPUTS = Cell::INPUTS;
constexpr bool HAS_SECOND = Cell::STATES == 2;  // a state beside h
constexpr Kept KEPT = Cell::KEPT;

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // with 255 registers each: all that a multiprocessor has
constexpr int WORD = 8 / sizeof(Scalar);         // numbers in 8 bytes
static_assert(PITCH >= HIDDEN && PITCH % (2 * WORD) == 0);  // units, padded to 16 bytes or more
constexpr int WIDTH = BACKWARD ? GATES * PITCH : PITCH;  // numbers exchanged per sequence, gate by gate
constexpr int CHUNK = CHUNK_BYTES;  // of one sequence, followed by the next sequence's
constexpr int ALIGNED = 64 / sizeof(Scalar);
constexpr int PART = CLUSTER == 1 ? WIDTH : (WIDTH + CLUSTER * ALIGNED - 1) / (CLUSTER * ALIGNED) * ALIGNED;
constexpr bool SCATTERS = BACKWARD && DISTRIBUTED;  // multiplies the block's own gradients, and sends all sums
constexpr int SLICE = SCATTERS ? GATES * UNITS : PART;
constexpr int ROW_BYTES = SLICE * int(sizeof(Scalar));
constexpr int CHUNKS = (ROW_BYTES + CHUNK - 1) / CHUNK;  // of a slice
constexpr int SLICE_BYTES = CHUNKS * COLUMNS * CHUNK;    // of a group's sequences
constexpr int GROUP_BYTES = SCATTERS ? SLICE_BYTES : CLUSTER * SLICE_BYTES;  // of what a block sees of it
constexpr int SHARED_STATES = DISTRIBUTED ? STATE_BUFFERS * GROUP_BYTES : 0;  // bytes
constexpr int ROWS = BACKWARD ? CLUSTER * UNITS : GATES * UNITS;  // of a block's part of the matrix; see matrix.cuh
constexpr int OWNERS = THREADS / BLOCK_GROUPS;  // threads that update a group's units: all, or half for each of two
constexpr int ITEMS = (UNITS * COLUMNS + OWNERS - 1) / OWNERS;  // (unit, sequence) pairs that a thread updates
constexpr int WHOLE = UNITS * COLUMNS / OWNERS;   // of these every thread has: what comes of them is computed without a
                                                  // branch, which would make each item wait for the one before

static_assert(ADJACENT == 1 || (sizeof(Scalar) == 2 && UNITS * COLUMNS % (2 * OWNERS) == 0));

struct Parameters {
    const Scalar* weight;         // (GATES * HIDDEN, HIDDEN), the recurrent matrix
    const Scalar* bias;           // (GATES * HIDDEN), or null
    const int* index;             // of a pruned matrix, with the next two: see Product
    const unsigned short *places, *spans;
    unsigned* packed;             // the weights in the order in which the blocks load them
    char* states;                 // (buffers, groups, CLUSTER, CHUNKS, COLUMNS, CHUNK bytes): STATE_BUFFERS, or if that
                                  // is 0 those of the first state and of each step
    const int* offsets;           // (steps + 1), with OFFSETS: of the rows of each step; else all have `batch` rows
    int* failure;                 // set to 1 if a wait timed out
    const Scalar* pre;            // (rows, INPUTS * HIDDEN): forward the input's part; backward pre-activations, with
                                  // Kept::NOTHING the states
    const Scalar *h0, *c0;        // (batch, HIDDEN), or null for zeros
    Pack* output;                 // (rows, HIDDEN), forward
    float* cells;                 // (rows, HIDDEN), with Kept::CELLS: forward written if not null, backward read
    Scalar* gates;                // (rows, INPUTS * HIDDEN), forward, with KEEPS_GATES: what the backward takes as `pre`
    Pack* candidates;             // (rows, HIDDEN), with Kept::RECURRENT: what the backward takes as `candidate`
    Pack *h_n, *c_n;              // (batch, HIDDEN), forward
    const Scalar* candidate;      // (rows, HIDDEN), backward, with Kept::RECURRENT, as the next
    const Scalar* h;              // (rows, HIDDEN), backward: the states after each step
    const Scalar* grad_output;    // (rows, HIDDEN), or null for zeros
    const Scalar *grad_h_n, *grad_c_n;  // (batch, HIDDEN), or null for zeros
    Pack* grads;                  // (rows, GRADIENTS * HIDDEN), backward
    Pack *grad_h0, *grad_c0;      // (batch, HIDDEN), backward
    const unsigned char* resets;  // (rows), with RESETS: whether the state before the step is zero, in launch order
    unsigned* marks;              // (words of 32 steps, batch): the same as bits, in the order in which steps are taken
    unsigned* flags;              // (groups, BLOCKS), and
    float4* sums;                 // (groups, BLOCKS, CLUSTER, ...), backward: of wide batches, see wide.cuh
    float* totals;                // (batch, TOTALS * HIDDEN), backward: sums over steps, of grads or of the gradients
                                  // of parameters
    const float* parameters;      // (PARAMETERS, HIDDEN)
    Pack* second;                 // (rows, HIDDEN), forward, with Kept::ALL_STATES, as the next two: second states
    const Scalar *before, *second_before;  // (rows, HIDDEN), backward: the states before each step
    const Scalar* grad_second;    // (rows, HIDDEN), or null for zeros
    int steps, batch, groups, columns;  // columns: sequences of a group
    int first, reverse;                 // the first sequence of this launch
};

// One direction of a layer, or both, each of which has a row of the grid.
struct Launch {
    Parameters directions[DIRECTIONS];

    __device__ const Parameters& own() const { return directions[DIRECTIONS == 1 ? 0 : blockIdx.y]; }
};

// The group of this block, and how many sequences it has.
__device__ inline int group_of(const Parameters& p) { return p.first / p.columns + blockIdx.x / BLOCKS; }
__device__ inline int sequences_of(const Parameters& p) { return min(p.columns, p.batch - group_of(p) * p.columns); }

__device__ inline unsigned lane_id() { return threadIdx.x % 32; }
__device__ inline unsigned warp_id() { return threadIdx.x / 32; }
// Which of the block's groups this thread updates, and its number among those that do.
__device__ inline unsigned own_turn() { return BLOCK_GROUPS == 1 ? 0 : threadIdx.x / OWNERS % BLOCK_GROUPS; }
__device__ inline unsigned own_thread() { return BLOCK_GROUPS == 1 ? threadIdx.x : threadIdx.x % OWNERS; }

// The rows of a step: the first, and how many sequences have the step.
struct Rows {
    size_t first;
    int live;

    __device__ Rows(const Parameters& p, int step)
        : first(OFFSETS ? p.offsets[step] : size_t(step) * p.batch),
          live(OFFSETS ? p.offsets[step + 1] - p.offsets[step] : p.batch) {}
};

// The time step of an iteration; backward starts with the last.
__device__ inline int step_of(const Parameters& p, int iteration) {
    int step = bool(p.reverse) != bool(BACKWARD) ? p.steps - 1 - iteration : iteration;
    // The first step of one of the directions is zero.  Known to be, and extended to 64 bits, it is what CUDA 13.0 may
    // read too early, as in matrix.cuh.
    if (DIRECTIONS > 1) asm volatile("" : "+r"(step));
    return step;
}

// The units and sequences of a block, and a thread's items among them.
struct Block {
    int unit, sequence, sequences;  // the first unit; the first sequence, and how many
    int thread;

    __device__ int item(int i) const { return (i / ADJACENT * OWNERS + thread) * ADJACENT + i % ADJACENT; }
    // Where a thread's items, but for those adjacent, are of one unit, their addresses differ by constants.
    static constexpr bool ONE_UNIT = OWNERS * ADJACENT % UNITS == 0;
    __device__ int unit_of(int i) const {
        return ONE_UNIT ? unsigned(thread * ADJACENT) % UNITS + i % ADJACENT : unsigned(item(i)) % UNITS;
    }
    static constexpr int UNITS_OF_THREAD = ONE_UNIT ? ADJACENT : ITEMS;
    __device__ static int own_unit(int i) { return ONE_UNIT ? i % ADJACENT : i; }  // of an item, among these
    __device__ int sequence_of(int i) const {
        if (!ONE_UNIT) return unsigned(item(i)) / UNITS;
        return unsigned(thread * ADJACENT) / UNITS + i / ADJACENT * (OWNERS * ADJACENT / UNITS);
    }

    __device__ bool owned(int i) const {
        return sequence_of(i) < sequences && (BLOCKS * UNITS == HIDDEN || unit + unit_of(i) < HIDDEN);
    }
    __device__ bool live(int i, const Rows& rows) const {
        return owned(i) && (!OFFSETS || sequence + sequence_of(i) < rows.live);
    }

    // Index of this thread's item i in (rows, gates * HIDDEN); `row` is the first of the step.  Only what all threads
    // share takes 64 bits: of offsets of its own, which live through all steps, a thread would need too many registers.
    __device__ size_t index(size_t row, int i, int gates = 1) const {
        return (row + sequence) * (gates * HIDDEN) + unit + unsigned(sequence_of(i) * (gates * HIDDEN) + unit_of(i));
    }
    __device__ int exchanged() const { return TAKES_FEWER ? sequences : COLUMNS; }  // sequences
    __device__ bool in_word(int i) const { return sequence_of(i) < exchanged() && unit + unit_of(i) < PITCH; }
    __device__ bool begins_word(int i) const { return in_word(i) && unit_of(i) % (HALF_WORDS ? WORD / 2 : WORD) == 0; }
    static constexpr int SECTOR = 32 / sizeof(Scalar);                          // numbers
    static constexpr int SECTORS = UNITS / SECTOR + (UNITS % SECTOR ? 2 : 0);  // of a sequence, two of them not aligned
    // Calls a function with a sequence and a unit in each sector of 32 bytes of the block's results, for prefetches: a
    // multiprocessor takes 8 cycles for each of a warp.  The last threads, which have fewer updates, are the first.
    template <typename Function> __device__ void each_sector(Function take) const {
#pragma unroll
        for (int first = 0; first < SECTORS * COLUMNS; first += OWNERS) {
            const unsigned i = first + OWNERS - 1 - (SHARES_WORK ? int(threadIdx.x) : thread);
            const int s = i / SECTORS, u = min(int(i % SECTORS) * SECTOR, UNITS - 1);
            if (s < sequences && (BLOCKS * UNITS == HIDDEN || unit + u < HIDDEN)) take(s, unit + u);
        }
    }
    __device__ static bool has_sectors() { return warp_id() * 32 + 31 >= THREADS - SECTORS * COLUMNS; }
    // Whether this warp has nothing to update in a round.  Backward, rounds in which a full group has work for all are
    // not skipped: derivatives would no longer be computed while loads are in flight.
    __device__ bool idle(int i) const {
        if (SHARES_WORK || (i < WHOLE && (BACKWARD || !TAKES_FEWER))) return false;
        return (i / ADJACENT * OWNERS + own_thread() / 32 * 32) * ADJACENT >= UNITS * exchanged();
    }
    // The sequence of an item, whose sums are then read: the last where there is no item.
    __device__ int sequence_of_sums(int i) const {
        return i < WHOLE ? sequence_of(i) : min(sequence_of(i), COLUMNS - 1);
    }

    // Warps without items wait until the others have published: other blocks take as long, and a poll that comes too
    // early costs another round trip.
    __device__ void wait_for_update() const {
        // In shared memory, with little else to load, such a poll costs less.
        constexpr bool POLLS_EARLY = DISTRIBUTED && IN_REGISTERS <= 12;
        if (UNITS * exchanged() <= THREADS - 32 && !POLLS_EARLY) __syncthreads();
    }
    // Polls that come too early delay what they wait for, where all blocks poll a few lines or a poll is many loads.
    template <int CYCLES> __device__ static void pause() {
        for (const unsigned since = clock(); CYCLES && unsigned(clock()) - since < unsigned(CYCLES);) {}
    }
};

// Whether the states of a thread's sequences are zero before a step.  Marks are loaded for 32 steps at once while the
// block waits, since a load at every step takes a twentieth of it.
struct Resets {
    static constexpr int SEQUENCES = ITEMS / ADJACENT;  // adjacent items are of one sequence
    unsigned marks[SEQUENCES] = {};                     // of this step and later ones, from the lowest bit on
    bool before[SEQUENCES] = {};

    // iteration: 0, then 1, and so on
    __device__ void look_up(const Parameters& p, const Block& own, int iteration) {
        load(p, own, iteration);
        take();
    }
    // Apart, where nobody is to wait for the marks.
    __device__ void load(const Parameters& p, const Block& own, int iteration) {
        if (!RESETS) return;
        if (iteration % 32 == 0 && iteration < p.steps) {
#pragma unroll
            for (int k = 0; k < SEQUENCES; ++k) {
                const int i = k * ADJACENT;
                if (own.owned(i)) marks[k] = p.marks[iteration / 32 * p.batch + own.sequence + own.sequence_of(i)];
            }
        }
    }
    __device__ void take() {
        if (!RESETS) return;
#pragma unroll
        for (int k = 0; k < SEQUENCES; ++k) before[k] = marks[k] & 1, marks[k] >>= 1;
    }
};

// The offset of byte `k` of a sequence's slice in the group's slice; and of byte `k` of its whole exchanged vector.
__device__ inline int slice_offset(int k, int sequence) {
    return (k / CHUNK * COLUMNS + sequence) * CHUNK + k % CHUNK;
}
__device__ inline int state_offset(int k, int sequence) {
    if (CLUSTER == 1) return slice_offset(k, sequence);
    return k / ROW_BYTES * SLICE_BYTES + slice_offset(k % ROW_BYTES, sequence);
}
