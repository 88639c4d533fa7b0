// What every persistent kernel shares: its parameters, and the exchange of a step's results between blocks.
//
// A block owns UNITS hidden units of COLUMNS sequences, a group, and updates them at every step.  Forward it needs the
// group's whole previous state; backward the gradients of all gates at the step after.  What is exchanged at all steps
// lies in memory that is first filled with a NaN which no block ever writes, and each of its words is written once.
// So a word that is no longer that NaN has arrived: there is no flag, no barrier between blocks and no buffer that is
// used twice.  A word is 8 or 4 aligned bytes, which the memory model keeps whole; it holds neighbouring numbers of one
// sequence.
//
// Backward that is GATES times more than forward.  There CLUSTER blocks each multiply one slice of it with the rows of
// all their units, and add up their products through distributed shared memory.

enum CellKind { RNN_TANH, RNN_RELU, GRU, LSTM };
constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // 255 registers a thread: all that a multiprocessor has
constexpr int WORD = 8 / sizeof(Scalar);         // numbers in 8 bytes
constexpr bool HALF_WORDS = UNITS % WORD != 0;   // blocks meet in the middle of 8 bytes: a word is 4
constexpr int PITCH = (HIDDEN + 2 * WORD - 1) / (2 * WORD) * (2 * WORD);  // units, in whole pieces
constexpr int WIDTH = BACKWARD ? GATES * PITCH : PITCH;  // numbers of a sequence that are exchanged: gate by gate
constexpr int CHUNK = CHUNK_BYTES;  // of a sequence, beside that of the next sequence
constexpr int ALIGNED = 64 / sizeof(Scalar);
constexpr int SLICE = CLUSTER == 1 ? WIDTH : (WIDTH + CLUSTER * ALIGNED - 1) / (CLUSTER * ALIGNED) * ALIGNED;
constexpr int ROW_BYTES = SLICE * int(sizeof(Scalar));
constexpr int CHUNKS = (ROW_BYTES + CHUNK - 1) / CHUNK;  // of a slice
constexpr int SLICE_BYTES = CHUNKS * COLUMNS * CHUNK;    // of a group's sequences
constexpr int GROUP_BYTES = CLUSTER * SLICE_BYTES;
constexpr int ROWS = BACKWARD ? CLUSTER * UNITS : GATES * UNITS;  // of a block's part of the matrix; see matrix.cuh
constexpr int ITEMS = (UNITS * COLUMNS + THREADS - 1) / THREADS;  // of a unit and a sequence, that a thread updates

struct Parameters {
    const Scalar *weight;         // (GATES * HIDDEN, HIDDEN), the recurrent matrix
    const Scalar *bias;           // (GATES * HIDDEN), or null
    const int *index;             // of a pruned matrix, with the next two: see Product
    const unsigned short *places, *spans;
    unsigned *packed;             // the weights as the blocks read them
    char *states;                 // (steps, or forward one more, groups, CLUSTER, CHUNKS, COLUMNS, CHUNK bytes)
    const int *offsets;           // (steps + 1), of the rows of each step; or null: every step has `batch` rows
    int *failure;                 // set to 1 if a wait was given up
    const Scalar *pre;            // (rows, GATES * HIDDEN): forward the input's part; backward pre-activations, or an
                                  // RNN's states
    const Scalar *h0, *c0;        // (batch, HIDDEN), or null for zeros
    Pack *output;                 // (rows, HIDDEN), forward
    float *cells;                 // (rows, HIDDEN), an LSTM's cell states: forward written if not null, backward read;
                                  // forward of a GRU, what the backward takes as `candidate`
    Scalar *gates;                // (rows, GATES * HIDDEN), forward, float32: what the backward takes as `pre`; or null
    Pack *h_n, *c_n;              // (batch, HIDDEN), forward
    const Scalar *candidate;      // (rows, HIDDEN), backward: the recurrent part of a GRU's candidate
    const Scalar *h_prev;         // (rows, HIDDEN), backward: the states before each step, of a GRU
    const Scalar *grad_output;    // (rows, HIDDEN), or null for zeros
    const Scalar *grad_h_n, *grad_c_n;  // (batch, HIDDEN), or null for zeros
    Pack *grads;                  // (rows, GRADS * HIDDEN), backward
    Pack *grad_h0, *grad_c0;      // (batch, HIDDEN), backward
    const unsigned char *resets;  // (rows), with RESETS: whether the state before is zero, in the order of the launch
    unsigned *marks;              // (words of 32 steps, batch): the same, a bit for each step
    int steps, batch, groups, first, reverse;  // first: the sequence with which this launch begins
};

__device__ inline unsigned lane_id() { return threadIdx.x % 32; }
__device__ inline unsigned warp_id() { return threadIdx.x / 32; }

// The rows of a step: the first one, and how many sequences are at it.
struct Rows {
    size_t first;
    int live, step;

    __device__ Rows(const Parameters &p, int step)
        : first(p.offsets ? p.offsets[step] : size_t(step) * p.batch),
          live(p.offsets ? p.offsets[step + 1] - p.offsets[step] : p.batch), step(step) {}
};

// The units and sequences of a block, and which of them are a thread's.
struct Block {
    int unit, sequence, sequences;  // the first unit; the first sequence, and how many
    int thread;

    __device__ int item(int i) const { return i * THREADS + thread; }
    __device__ int unit_of(int i) const { return item(i) % UNITS; }
    __device__ int sequence_of(int i) const { return item(i) / UNITS; }

    // Of a thread that has less to update.
    __device__ Block mirrored() const { return {unit, sequence, sequences, THREADS - 1 - thread}; }
    __device__ bool owned(int i) const { return sequence_of(i) < sequences && unit + unit_of(i) < HIDDEN; }
    __device__ bool live(int i, const Rows &rows) const { return owned(i) && sequence + sequence_of(i) < rows.live; }

    // Where this thread's unit is in (rows, gates * HIDDEN), from the first row of a step on.
    __device__ size_t place(size_t row, int i, int gates = 1) const {
        return (row + sequence + sequence_of(i)) * (gates * HIDDEN) + unit + unit_of(i);
    }
    __device__ bool begins_word(int i) const {
        const bool exists = sequence_of(i) < sequences && unit + unit_of(i) < PITCH;
        return exists && unit_of(i) % (HALF_WORDS ? WORD / 2 : WORD) == 0;
    }
    // Whether this warp has nothing to update in a round.
    __device__ static bool idle(int i) { return i * THREADS + warp_id() * 32 >= UNITS * COLUMNS; }

    // Warps without units wait until the others have published theirs, which takes as long in other blocks.  A warp
    // that looks for the state too early has to look again, and that takes as long once more.
    __device__ static void wait_for_update() {
        if (UNITS * COLUMNS <= THREADS - 32) __syncthreads();
    }
};

// Before which steps the state of a thread's sequences is zero.  Of 32 steps at once and without a branch, since to look
// in memory at each takes a twentieth of a step.
struct Resets {
    unsigned marks[ITEMS] = {};
    int word = -1;  // of the marks

    __device__ void read(const Parameters &p, const Block &own, int step) {
        if (!RESETS) return;
        const bool wanted = step / 32 != word;
        word = step / 32;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const unsigned *mine = p.marks + size_t(word) * p.batch + own.sequence + own.sequence_of(i);
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p ld.global.b32 %0, [%2]; }"
                         : "+r"(marks[i]) : "r"(unsigned(wanted && own.owned(i))), "l"(mine) : "memory");
        }
    }
    __device__ bool before(int step, int i) const { return RESETS && marks[i] >> step % 32 & 1; }
};

// Where byte `k` of a sequence's slice is among those of its group, and where byte `k` of all that is exchanged is.
__device__ inline int place_in_slice(int k, int sequence) {
    return (k / CHUNK * COLUMNS + sequence) * CHUNK + k % CHUNK;
}
__device__ inline int place_of(int k, int sequence) {
    if (CLUSTER == 1) return place_in_slice(k, sequence);
    return k / ROW_BYTES * SLICE_BYTES + place_in_slice(k % ROW_BYTES, sequence);
}

using Word = unsigned long long;
struct Piece { Word word[2]; };

constexpr Word ABSENT = ~0ull;

__device__ inline unsigned low(Word word) { return unsigned(word); }
__device__ inline unsigned high(Word word) { return unsigned(word >> 32); }
__device__ inline bool absent(Word word) { return high(word) == ~0u || (HALF_WORDS && low(word) == ~0u); }
__device__ inline bool absent(const Piece &piece) { return absent(piece.word[0]) || absent(piece.word[1]); }

// Loads only what is absent, without a branch, so that many loads are in flight together.  True if it was absent.
__device__ inline bool look(Word &word, const char *address) {
    const bool wanted = absent(word);
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p ld.relaxed.gpu.global.b64 %0, [%2]; }"
                 : "+l"(word) : "r"(unsigned(wanted)), "l"(address) : "memory");
    return wanted;
}

__device__ inline bool look(Piece &piece, const char *address) {
    const bool wanted = absent(piece);
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%3]; }"
                 : "+l"(piece.word[0]), "+l"(piece.word[1]) : "r"(unsigned(wanted)), "l"(address) : "memory");
    return wanted;
}

// Loads what exists, be it absent; the rest is zero.
__device__ inline void read(Word &word, const char *address, bool exists) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; mov.b64 %0, 0; @p ld.relaxed.gpu.global.b64 %0, [%2]; }"
                 : "=&l"(word) : "r"(unsigned(exists)), "l"(address) : "memory");
}

__device__ inline void read(Piece &piece, const char *address, bool exists) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.b64 %0, 0; mov.b64 %1, 0;"
                 " @p ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%3]; }"
                 : "=&l"(piece.word[0]), "=&l"(piece.word[1]) : "r"(unsigned(exists)), "l"(address) : "memory");
}

// How often a thread still looks for a word before it gives up: some seconds.  A count, not a clock, since the
// GPU may be taken away for a while.  A thread that has given up waits no more, and computes on with NaN.
struct Patience {
    static constexpr int LOOKS = 1 << 23;
    int limit = LOOKS, looks = 0;
    int *failure;

    __device__ explicit Patience(int *failure) : failure(failure) {}
    __device__ void renew() { looks = 0; }
    __device__ bool lasts() {
        if (looks++ < limit) return true;
        if (limit) {
            limit = 0;
            *reinterpret_cast<volatile int *>(failure) = 1;
            __threadfence_system();
        }
        return false;
    }
};

// A number as it is published: any NaN as the one that is not ABSENT.
__device__ inline Pack bits(float x) {
    const float one[1] = {x};
    return x != x ? Pack(sizeof(Scalar) == 4 ? 0x7fffffffu : 0x7fffu) : pack(one);
}

__device__ inline unsigned round_to_tf32(unsigned x) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(x)));
    return rounded;
}

// A number as the others multiply it.  Unless EXACT, float32 is rounded here, once, and not where it is read.
__device__ inline unsigned shown(float x) {
    return sizeof(Scalar) == 4 && !EXACT ? round_to_tf32(bits(x)) : bits(x);
}

// Publishes the units of a word, one from each of neighbouring lanes, the first at `address`; all lanes take part.
__device__ inline void publish(float x, bool first, char *address) {
    unsigned mine = shown(x);
    if (sizeof(Scalar) == 2) mine |= __shfl_down_sync(~0u, mine, 1) << 16;
    const Word word = HALF_WORDS ? mine : mine | Word(__shfl_down_sync(~0u, mine, WORD / 2)) << 32;
    if (!first) return;
    if (HALF_WORDS) asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" :: "l"(address), "r"(mine) : "memory");
    else asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" :: "l"(address), "l"(word) : "memory");
}

// What a block will read or write at a later step comes into the cache.  Loads return in order: one that had to wait
// for memory would keep those waiting that look for the state.
__device__ inline void prefetch(const void *address) { asm volatile("prefetch.global.L2 [%0];" :: "l"(address)); }
