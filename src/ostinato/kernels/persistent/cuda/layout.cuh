// The parameters of a persistent kernel, and how its work is divided among blocks and threads.
//
// A group is COLUMNS sequences, or with TAKES_FEWER any smaller number, and the BLOCKS blocks that compute them.  Each
// block owns UNITS hidden units and updates them at every step.  A unit of one sequence is an item; a block's items are
// divided among its threads.  The blocks of a group exchange their results; see exchange.cuh.
//
// If BLOCK_GROUPS is 2, a block computes two groups of COLUMNS sequences in turn, one while the results of the other
// are in transit; see ping_pong.cuh.
//
// With SHARES_WORK, for blocks of few units within clusters, some warps only update units, and others do the rest of
// the elementwise work; see gather.cu and scatter.cu.
//
// These names, as others that no CUDA file defines, are preprocessor definitions: see source.py, and for their meaning
// heuristics/geometry.py.

// Per hidden unit: rows of the recurrent matrix, which in a user's cell need not be gates; numbers in `pre` at a step.
constexpr int GATES = Cell::PRODUCTS, INPUTS = Cell::INPUTS;
constexpr int OTHERS = Cell::STATES - 1;           // states beside h
constexpr int BESIDE_H = OTHERS > 1 ? OTHERS : 1;  // results of Cell::forward beside h, with Kept::RECURRENT one, too
constexpr int CHANNELS = HEADS * HIDDEN;           // of a state, or of an input, in a row of a tensor: see Parameters
constexpr Kept KEPT = Cell::KEPT;

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // at 255 registers each, all that a multiprocessor has
constexpr int WORD = 8 / sizeof(Scalar);         // numbers in 8 bytes
static_assert(PITCH >= HIDDEN && PITCH % (2 * WORD) == 0);  // HIDDEN, padded to a multiple of 16 bytes or more
constexpr int WIDTH = BACKWARD ? GATES * PITCH : PITCH;  // numbers exchanged per sequence, gate by gate
constexpr int CHUNK = CHUNK_BYTES;  // of one sequence, followed by the same chunk of the next sequence
constexpr int ALIGNED = 64 / sizeof(Scalar);  // numbers in 64 bytes, of which a slice has a multiple
constexpr int PART = CLUSTER == 1 ? WIDTH : (WIDTH + CLUSTER * ALIGNED - 1) / (CLUSTER * ALIGNED) * ALIGNED;
constexpr bool SCATTERS = BACKWARD && DISTRIBUTED;  // blocks multiply their own gradients, and exchange the sums
constexpr int SLICE = SCATTERS ? GATES * UNITS : PART;  // numbers of each sequence that a block multiplies
constexpr int ROW_BYTES = SLICE * int(sizeof(Scalar));
constexpr int CHUNKS = (ROW_BYTES + CHUNK - 1) / CHUNK;  // of a slice
constexpr int SLICE_BYTES = CHUNKS * COLUMNS * CHUNK;    // of all sequences of a group
constexpr int GROUP_BYTES = SCATTERS ? SLICE_BYTES : CLUSTER * SLICE_BYTES;  // of all slices that a block sees
constexpr int SHARED_STATES = DISTRIBUTED ? STATE_BUFFERS * GROUP_BYTES : 0;  // bytes
constexpr int ROWS = BACKWARD ? CLUSTER * UNITS : GATES * UNITS;  // of a block's part of the matrix; see matrix.cuh
constexpr int OWNERS = THREADS / BLOCK_GROUPS;  // threads that update the units of a group
constexpr int ITEMS = (UNITS * COLUMNS + OWNERS - 1) / OWNERS;  // that a thread updates, at most
constexpr int WHOLE = UNITS * COLUMNS / OWNERS;   // items that every thread has: they are computed without a branch,
                                                  // which would make each wait for the one before

static_assert(ADJACENT == 1 || (sizeof(Scalar) == 2 && UNITS * COLUMNS % (2 * OWNERS) == 0));

// Rows of tensors hold the HIDDEN units of all heads side by side.  The pointers are those of one head: to its weights,
// and to the first of its units.
struct Parameters {
    const Scalar* weight;         // (GATES * HIDDEN, HIDDEN), the recurrent matrix
    const Scalar* bias;           // (GATES * CHANNELS), or null
    const int* index;             // as the next two, of a pruned matrix: see Product in block.cuh and sparse.cuh
    const unsigned short *places, *spans;
    unsigned* packed;             // the weights in the order in which the blocks load them
    char* states;                 // (buffers, groups, CLUSTER, CHUNKS, COLUMNS, CHUNK bytes), with STATE_BUFFERS
                                  // buffers or, if that is 0, one for the initial state and one for each step
    const int* offsets;           // (steps + 1), with OFFSETS: the first row of each step; else steps have `batch` rows
    int* failure;                 // set to 1 if a wait timed out
    const Scalar* pre;            // (rows, INPUTS * CHANNELS): forward, the projected inputs; backward, the
                                  // pre-activations, or with Kept::NOTHING the states
    const Scalar* h0;             // (batch, CHANNELS), or null for zeros
    Pack* output;                 // (rows, CHANNELS), forward
    float* cells;                 // (rows, CHANNELS), with Kept::CELLS: forward, written unless null; backward, read
    Scalar* gates;                // (rows, INPUTS * CHANNELS), forward, with KEEPS_GATES: `pre` of the backward pass
    Pack* candidates;             // (rows, CHANNELS), forward, with Kept::RECURRENT: `candidate` of the backward pass
    Pack* h_n;                    // (batch, CHANNELS), forward
    const Scalar* candidate;      // (rows, CHANNELS), backward; as h, read only with Kept::RECURRENT
    const Scalar* h;              // (rows, CHANNELS), backward: the states after each step
    const Scalar* grad_output;    // (rows, CHANNELS), or null for zeros
    const Scalar* grad_h_n;       // (batch, CHANNELS), or null for zeros
    Pack* grads;                  // (rows, GRADIENTS * CHANNELS), backward
    Pack* grad_h0;                // (batch, CHANNELS), backward
    const unsigned char* resets;  // (rows), with RESETS: whether the state from which the row's step starts is zero
    unsigned* marks;              // (words of 32 steps, batch): the same as bits, in the order of iterations
    unsigned* flags;              // (groups, BLOCKS), for wide batches; see wide.cuh
    float4* sums;                 // (groups, BLOCKS, CLUSTER, ...), backward, for wide batches
    float* totals;                // (batch, TOTALS * CHANNELS), backward: sums over steps of `grads`, or of the
                                  // gradients of `parameters`
    const float* parameters;      // (PARAMETERS, CHANNELS), of a user's cell
    const Scalar* before;         // (rows, CHANNELS), backward, with Kept::ALL_STATES: h before each step
    // The same of the states beside h:
    const Scalar* c0[BESIDE_H];        // (batch, CHANNELS), or null for zeros
    Pack* c_n[BESIDE_H];               // (batch, CHANNELS), forward
    const Scalar* grad_c_n[BESIDE_H];  // (batch, CHANNELS), or null for zeros
    Pack* grad_c0[BESIDE_H];           // (batch, CHANNELS), backward
    Pack* c[BESIDE_H];                 // (rows, CHANNELS), forward, with Kept::ALL_STATES: the states after each step
    const Scalar* c_before[BESIDE_H];  // (rows, CHANNELS), backward, with Kept::ALL_STATES
    const Scalar* grad_c[BESIDE_H];    // (rows, CHANNELS), or null for zeros, backward, with Kept::ALL_STATES
    int steps, batch, groups, columns;  // columns: sequences of a group
    int first, reverse;                 // the first sequence of this launch
};

// The parameters of one direction of a layer, or of both, or of heads, each of which has its own row of the grid.
struct Launch {
    Parameters of_row[GRID_ROWS];

    __device__ const Parameters& own() const { return of_row[GRID_ROWS == 1 ? 0 : blockIdx.y]; }
};

// The group of this block, and the number of its sequences.
__device__ inline int group_of(const Parameters& p) { return p.first / p.columns + blockIdx.x / BLOCKS; }
__device__ inline int sequences_of(const Parameters& p) { return min(p.columns, p.batch - group_of(p) * p.columns); }

__device__ inline unsigned lane_id() { return threadIdx.x % 32; }
__device__ inline unsigned warp_id() { return threadIdx.x / 32; }
// Which of the block's groups this thread updates, and its index among the threads that update that group.
__device__ inline unsigned own_turn() { return BLOCK_GROUPS == 1 ? 0 : threadIdx.x / OWNERS % BLOCK_GROUPS; }
__device__ inline unsigned own_thread() { return BLOCK_GROUPS == 1 ? threadIdx.x : threadIdx.x % OWNERS; }

// The rows of a time step: the first row, and the number of sequences that have the step.
struct Rows {
    size_t first;
    int live;

    __device__ Rows(const Parameters& p, int step)
        : first(OFFSETS ? p.offsets[step] : size_t(step) * p.batch),
          live(OFFSETS ? p.offsets[step + 1] - p.offsets[step] : p.batch) {}
};

// The time step of an iteration; the backward pass starts with the last one.
__device__ inline int step_of(const Parameters& p, int iteration) {
    int step = bool(p.reverse) != bool(BACKWARD) ? p.steps - 1 - iteration : iteration;
    // Hides from the compiler that one direction begins with step 0: code generated by CUDA 13.0 may read such a
    // zero, extended to 64 bits, too early, as in matrix.cuh.
    if (GRID_ROWS > 1) asm volatile("" : "+r"(step));
    return step;
}

// The units and sequences of a block, and a thread's items among them.
struct Block {
    int unit, sequence, sequences;  // the first unit; the first sequence, and the number of sequences
    int thread;                     // this thread's index among those that divide the items

    __device__ int item(int i) const { return (i / ADJACENT * OWNERS + thread) * ADJACENT + i % ADJACENT; }
    // Whether a thread's items, apart from adjacent ones, are of one unit: then their addresses differ by constants.
    static constexpr bool ONE_UNIT = OWNERS * ADJACENT % UNITS == 0;
    __device__ int unit_of(int i) const {
        return ONE_UNIT ? unsigned(thread * ADJACENT) % UNITS + i % ADJACENT : unsigned(item(i)) % UNITS;
    }
    static constexpr int UNITS_OF_THREAD = ONE_UNIT ? ADJACENT : ITEMS;
    __device__ static int own_unit(int i) { return ONE_UNIT ? i % ADJACENT : i; }  // the item's, among these
    __device__ int sequence_of(int i) const {
        if (!ONE_UNIT) return unsigned(item(i)) / UNITS;
        return unsigned(thread * ADJACENT) / UNITS + i / ADJACENT * (OWNERS * ADJACENT / UNITS);
    }

    // Whether item i exists, and whether its sequence has the step.
    __device__ bool owned(int i) const {
        return sequence_of(i) < sequences && (BLOCKS * UNITS == HIDDEN || unit + unit_of(i) < HIDDEN);
    }
    __device__ bool live(int i, const Rows& rows) const {
        return owned(i) && (!OFFSETS || sequence + sequence_of(i) < rows.live);
    }

    // The index of item i in a (rows, gates * CHANNELS) tensor; `row` is the first row of the step.  Only the part that
    // all threads share has 64 bits: a thread's own offsets live through all steps and would need too many registers.
    __device__ size_t index(size_t row, int i, int gates = 1) const {
        return (row + sequence) * (gates * CHANNELS) + unit +
               unsigned(sequence_of(i) * (gates * CHANNELS) + unit_of(i));
    }
    __device__ int exchanged() const { return TAKES_FEWER ? sequences : COLUMNS; }  // sequences
    // Whether item i is part of an exchanged word, and whether it is the first of one.
    __device__ bool in_word(int i) const { return sequence_of(i) < exchanged() && unit + unit_of(i) < PITCH; }
    __device__ bool begins_word(int i) const { return in_word(i) && unit_of(i) % (HALF_WORDS ? WORD / 2 : WORD) == 0; }
    static constexpr int SECTOR = 32 / sizeof(Scalar);                          // numbers in 32 bytes
    static constexpr int SECTORS = UNITS / SECTOR + (UNITS % SECTOR ? 2 : 0);  // of a sequence's units, if not aligned
    // Calls a function with one sequence and unit of each 32-byte sector of the block's items, to prefetch it; once per
    // sector, as a multiprocessor takes 8 cycles for each prefetch of a warp.  The last threads, which have fewer
    // items, take the first sectors.
    template <typename Function> __device__ void each_sector(Function visit) const {
#pragma unroll
        for (int first = 0; first < SECTORS * COLUMNS; first += OWNERS) {
            const unsigned i = first + OWNERS - 1 - (SHARES_WORK ? int(threadIdx.x) : thread);
            const int s = i / SECTORS, u = min(int(i % SECTORS) * SECTOR, UNITS - 1);
            if (s < sequences && (BLOCKS * UNITS == HIDDEN || unit + u < HIDDEN)) visit(s, unit + u);
        }
    }
    __device__ static bool has_sectors() { return warp_id() * 32 + 31 >= THREADS - SECTORS * COLUMNS; }
    // Whether no thread of this warp has an item i.  Backward, items that every thread of a full group has are never
    // skipped: with a branch, derivatives would no longer be computed while loads are in flight.
    __device__ bool idle(int i) const {
        if (SHARES_WORK || (i < WHOLE && (BACKWARD || !TAKES_FEWER))) return false;
        return (i / ADJACENT * OWNERS + own_thread() / 32 * 32) * ADJACENT >= UNITS * exchanged();
    }
    // The sequence whose sums are read for item i; the last one if the thread has no such item.
    __device__ int sequence_of_sums(int i) const {
        return i < WHOLE ? sequence_of(i) : min(sequence_of(i), COLUMNS - 1);
    }

    // Makes warps without items wait until the others have published: other blocks take about as long to publish, and a
    // poll that comes too early costs another round trip.
    __device__ void wait_for_update() const {
        // An early poll costs less in shared memory, if there is little else to load.
        constexpr bool POLLS_EARLY = DISTRIBUTED && IN_REGISTERS <= 12;
        if (UNITS * exchanged() <= THREADS - 32 && !POLLS_EARLY) __syncthreads();
    }
    // Waits before polling.  Where all blocks poll the same few cache lines, or a poll takes many loads, polls that
    // come too early delay the words that they wait for.
    template <int CYCLES> __device__ static void pause() {
        for (const unsigned since = clock(); CYCLES && unsigned(clock()) - since < unsigned(CYCLES);) {}
    }
};

// Whether the states of a thread's sequences are reset before a step.  The marks of 32 steps are loaded at once, while
// the block waits for others, since a load at every step would take a twentieth of the step.
struct Resets {
    static constexpr int SEQUENCES = ITEMS / ADJACENT;  // adjacent items are of one sequence
    unsigned marks[SEQUENCES] = {};                     // of this step, in the lowest bit, and of later ones
    bool before[SEQUENCES] = {};

    // Sets `before` for an iteration; called for 0, then 1, and so on.
    __device__ void look_up(const Parameters& p, const Block& own, int iteration) {
        load(p, own, iteration);
        take();
    }
    // The two parts of look_up(), which are called apart where no thread should wait for the marks.
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

// The offset of byte `k` of a sequence's slice within the group's slice, and of byte `k` of a sequence's whole
// exchanged vector within the group's buffer.
__device__ inline int slice_offset(int k, int sequence) {
    return (k / CHUNK * COLUMNS + sequence) * CHUNK + k % CHUNK;
}
__device__ inline int state_offset(int k, int sequence) {
    if (CLUSTER == 1) return slice_offset(k, sequence);
    return k / ROW_BYTES * SLICE_BYTES + slice_offset(k % ROW_BYTES, sequence);
}
