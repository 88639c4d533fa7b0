// Common to all persistent kernels: the parameters, and the exchange of a step's results between blocks.
//
// A block owns UNITS hidden units of COLUMNS sequences, a group, or with FEWER of up to as many, and updates them at
// every step.  Forward it reads the group's whole previous state, backward the gradients of all gates at the step
// after.  Every step has its own buffer, filled beforehand with a NaN that no block writes, and each of its words is
// written once.  So the data is its own flag: a word that is no longer that NaN has arrived, and no fence, no barrier
// between blocks and no reuse of buffers is needed.  A word is 8 or 4 aligned bytes, which are written atomically; it
// holds adjacent units of one sequence.
//
// Numbers rounded to tf32 have spare bits, which mma ignores.  There each holds the number of its step (TAGGED): a word
// has arrived when that is the one waited for, and a few buffers are enough, taken in turn, which stay in L2 and need
// not be filled for every step.  By the time a block writes a step, all have read the last but one, as it needs what
// they made of that; in a cluster, threads without a state of their own may be a step ahead of this, so two are too
// few.
//
// With DISTRIBUTED all blocks of a group are one cluster.  Forward each has two buffers of the group's states in its
// shared memory, taken in turn.  A block stores its words in those of all others, and makes words absent again once it
// has read them.  By the time a word is written again, two steps later, it is: what the writer has read of the step
// between, this block published after that.
//
// With TURNS of 2 a block computes two groups of COLUMNS sequences each, one while what the other exchanges is on its
// way; see turns.cuh.
//
// With SHARES_WORK, where a block within clusters has few units, some of its warps only update them, and others do the
// rest of the elementwise work; see gather.cu and scatter.cu.
//
// Backward exchanges GATES times as much.  There each of CLUSTER blocks multiplies one slice of it with the rows of all
// the cluster's units, and the partial sums are reduced through distributed shared memory.  If the cluster is the whole
// group, the slice is what the block computed itself, and the sums are all that is exchanged.

enum CellKind { RNN_TANH, RNN_RELU, GRU, LSTM };
constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // with 255 registers each: all that a multiprocessor has
constexpr int WORD = 8 / sizeof(Scalar);         // numbers in 8 bytes
constexpr bool HALF_WORDS = UNITS % WORD != 0;   // two blocks share 8 bytes: a word is 4
constexpr int PITCH = (HIDDEN + 2 * WORD - 1) / (2 * WORD) * (2 * WORD);  // units, padded to 16 bytes
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
constexpr int OWNERS = THREADS / TURNS;  // threads that update a group's units: all, or half for each of two groups
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
    char* states;                 // (buffers, groups, CLUSTER, CHUNKS, COLUMNS, CHUNK bytes): of each step, and forward
                                  // the first state, or STATE_BUFFERS
    const int* offsets;           // (steps + 1), with OFFSETS: of the rows of each step; else all have `batch` rows
    int* failure;                 // set to 1 if a wait timed out
    const Scalar* pre;            // (rows, GATES * HIDDEN): forward the input's part; backward pre-activations, or an
                                  // RNN's states
    const Scalar *h0, *c0;        // (batch, HIDDEN), or null for zeros
    Pack* output;                 // (rows, HIDDEN), forward
    float* cells;                 // (rows, HIDDEN), an LSTM's cell states: forward written if not null, backward read
    Scalar* gates;                // (rows, GATES * HIDDEN), forward, with KEEPS: what the backward takes as `pre`
    Pack* candidates;             // (rows, HIDDEN), of a GRU, with KEEPS: what the backward takes as `candidate`
    Pack *h_n, *c_n;              // (batch, HIDDEN), forward
    const Scalar* candidate;      // (rows, HIDDEN), backward: the recurrent part of a GRU's candidate
    const Scalar* h;              // (rows, HIDDEN), backward: the states after each step, of a GRU
    const Scalar* grad_output;    // (rows, HIDDEN), or null for zeros
    const Scalar *grad_h_n, *grad_c_n;  // (batch, HIDDEN), or null for zeros
    Pack* grads;                  // (rows, GRADS * HIDDEN), backward
    Pack *grad_h0, *grad_c0;      // (batch, HIDDEN), backward
    const unsigned char* resets;  // (rows), with RESETS: whether the state before the step is zero, in launch order
    unsigned* marks;              // (words of 32 steps, batch): the same as bits, in the order in which steps are taken
    float* totals;                // (batch, GRADS * HIDDEN), backward: sums of grads over steps, and over sequences
    int steps, batch, groups, columns;  // columns: sequences of a group
    int first, reverse;                 // the first sequence of this launch
};

// The group of this block, and how many sequences it has.
__device__ inline int group_of(const Parameters& p) { return p.first / p.columns + blockIdx.x / BLOCKS; }
__device__ inline int sequences_of(const Parameters& p) { return min(p.columns, p.batch - group_of(p) * p.columns); }

__device__ inline unsigned lane_id() { return threadIdx.x % 32; }
__device__ inline unsigned warp_id() { return threadIdx.x / 32; }
// Which of the block's groups this thread updates, and its number among those that do.
__device__ inline unsigned own_turn() { return TURNS == 1 ? 0 : threadIdx.x / OWNERS % TURNS; }
__device__ inline unsigned own_thread() { return TURNS == 1 ? threadIdx.x : threadIdx.x % OWNERS; }

// The rows of a step: the first, and how many sequences have the step.
struct Rows {
    size_t first;
    int live;

    __device__ Rows(const Parameters& p, int step)
        : first(OFFSETS ? p.offsets[step] : size_t(step) * p.batch),
          live(OFFSETS ? p.offsets[step + 1] - p.offsets[step] : p.batch) {}
};

// The step that is taken as number `taken`; backward starts with the last.
__device__ inline int step_of(const Parameters& p, int taken) {
    return bool(p.reverse) != bool(BACKWARD) ? p.steps - 1 - taken : taken;
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
    __device__ size_t place(size_t row, int i, int gates = 1) const {
        return (row + sequence) * (gates * HIDDEN) + unit + unsigned(sequence_of(i) * (gates * HIDDEN) + unit_of(i));
    }
    __device__ int exchanged() const { return FEWER ? sequences : COLUMNS; }  // sequences
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
        if (SHARES_WORK || (i < WHOLE && (BACKWARD || !FEWER))) return false;
        return (i / ADJACENT * OWNERS + own_thread() / 32 * 32) * ADJACENT >= UNITS * exchanged();
    }
    // The sequence of an item, whose sums are then read: the last where there is no item.
    __device__ int sequence_of_sums(int i) const {
        return i < WHOLE ? sequence_of(i) : min(sequence_of(i), COLUMNS - 1);
    }

    // Warps without items wait until the others have published: other blocks take as long, and a poll that comes too
    // early costs another round trip.
    __device__ void wait_for_update() const {
        constexpr bool LOOKS = DISTRIBUTED && HELD <= 12;  // in shared memory, with little else to load, it costs less
        if (UNITS * exchanged() <= THREADS - 32 && !LOOKS) __syncthreads();
    }
    // Looks too early delay what they look for, where all blocks look for a few lines or a look is many loads.
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

    // taken: 0, then 1, and so on
    __device__ void look_up(const Parameters& p, const Block& own, int taken) {
        load(p, own, taken);
        take();
    }
    // Apart, where nobody is to wait for the marks.
    __device__ void load(const Parameters& p, const Block& own, int taken) {
        if (!RESETS) return;
        if (taken % 32 == 0 && taken < p.steps) {
#pragma unroll
            for (int k = 0; k < SEQUENCES; ++k) {
                const int i = k * ADJACENT;
                if (own.owned(i)) marks[k] = p.marks[taken / 32 * p.batch + own.sequence + own.sequence_of(i)];
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
constexpr bool TAGGED = STATE_BUFFERS > 0 && !DISTRIBUTED;
constexpr unsigned TAG = TAGGED ? 0x1fff : 0;

__device__ inline unsigned low(Word word) { return unsigned(word); }
__device__ inline unsigned high(Word word) { return unsigned(word >> 32); }
__device__ inline bool absent(unsigned half, unsigned step) { return TAGGED ? (half ^ step) & TAG : half == ~0u; }
__device__ inline bool absent(Word word, unsigned step) {
    return absent(high(word), step) || (HALF_WORDS && absent(low(word), step));
}
__device__ inline bool absent(const Piece& piece, unsigned step) {
    return absent(piece.word[0], step) || absent(piece.word[1], step);
}

// Cluster barrier: all blocks have started, and none exits before all are done.
__device__ inline void meet() {
    if constexpr (CLUSTER > 1 || DISTRIBUTED)
        asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
}

// From the buffer of a step to that of the next.
__device__ inline int to_next_buffer(int step) {
    return STATE_BUFFERS && (step + 1) % (STATE_BUFFERS + !STATE_BUFFERS) == 0 ? 1 - STATE_BUFFERS : 1;
}

#if CLUSTER > 1 || DISTRIBUTED
#define IN_CLUSTERS __cluster_dims__(DISTRIBUTED ? BLOCKS : CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

#if DISTRIBUTED
#define LOAD_STATE "ld.relaxed.cluster.shared::cta"
#else
#define LOAD_STATE "ld.relaxed.gpu.global"
#endif

__device__ inline size_t state_address(const char* address) {
    return DISTRIBUTED ? __cvta_generic_to_shared(address) : reinterpret_cast<size_t>(address);
}

// Polls: loads only what is absent, predicated so that many loads are in flight together.  True if it was absent.
__device__ inline bool look(Word& word, const char* address, unsigned step) {
    const bool wanted = absent(word, step);
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p " LOAD_STATE ".b64 %0, [%2]; }"
                 : "+l"(word) : "r"(unsigned(wanted)), "l"(state_address(address)) : "memory");
    return wanted;
}

__device__ inline bool look(Piece& piece, const char* address, unsigned step) {
    const bool wanted = absent(piece, step);
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p " LOAD_STATE ".v2.b64 {%0, %1}, [%3]; }"
                 : "+l"(piece.word[0]), "+l"(piece.word[1])
                 : "r"(unsigned(wanted)), "l"(state_address(address)) : "memory");
    return wanted;
}

// The first load of a word, absent or not; zero, of any step, if it does not exist.
__device__ inline void read(Word& word, const char* address, bool exists, unsigned step) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; mov.b64 %0, {%3, %3}; @p " LOAD_STATE ".b64 %0, [%2]; }"
                 : "=&l"(word) : "r"(unsigned(exists)), "l"(state_address(address)), "r"(step & TAG) : "memory");
}

__device__ inline void read(Piece& piece, const char* address, bool exists, unsigned step) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.b64 %0, {%4, %4}; mov.b64 %1, {%4, %4};"
                 " @p " LOAD_STATE ".v2.b64 {%0, %1}, [%3]; }"
                 : "=&l"(piece.word[0]), "=&l"(piece.word[1])
                 : "r"(unsigned(exists)), "l"(state_address(address)), "r"(step & TAG) : "memory");
}

// Makes words of the block's own buffers absent again.
__device__ inline void erase(const char* address, int words) {
    for (int i = 0; i < words; ++i)
        asm volatile("st.relaxed.cluster.shared::cta.b64 [%0], %1;"
                     :: "l"(state_address(address + i * 8)), "l"(ABSENT) : "memory");
}

// A timeout of some seconds, counted in polls, not by a clock, since the GPU may be preempted.  After it a thread no
// longer waits, and computes on with NaN.
struct Patience {
    static constexpr int LOOKS = 1 << 23;
    int limit = LOOKS, looks = 0;
    int* failure;

    __device__ explicit Patience(int* failure) : failure(failure) {}
    __device__ void renew() { looks = 0; }
    __device__ bool lasts() {
        if (looks++ < limit) return true;
        if (limit) {
            limit = 0;
            *reinterpret_cast<volatile int*>(failure) = 1;
            __threadfence_system();
        }
        return false;
    }
};

// The bits of a number, with every NaN canonical and so different from ABSENT.
__device__ inline Pack bits(float x) {
    const float one[1] = {x};
    return x != x ? Pack(sizeof(Scalar) == 4 ? 0x7fffffffu : 0x7fffu) : pack(one);
}

__device__ inline unsigned round_to_tf32(unsigned x) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(x)));
    return rounded;
}

// The bits of a number as an operand of mma.  Unless EXACT, float32 is rounded to tf32 here, once, not at every use.
__device__ inline unsigned shown(float x) {
    return sizeof(Scalar) == 4 && !EXACT ? round_to_tf32(bits(x)) : bits(x);
}

// The copies of a word in the shared memory of all blocks of a cluster.  Each lane of a word stores it for some of
// them.
struct Copies {
    static constexpr int COUNT = (BLOCKS + WORD - 1) / WORD;  // of a lane
    unsigned there[COUNT], window;  // the lower halves of generic addresses, and the upper half of all

    // Of the word in which this block has an address.
    __device__ explicit Copies(const char* address) {
        const size_t here = reinterpret_cast<size_t>(address) & ~size_t(7);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            size_t copy;
            asm("mapa.u64 %0, %1, %2;" : "=l"(copy) : "l"(here), "r"(min(lane_id() % WORD + i * WORD, BLOCKS - 1u)));
            there[i] = low(copy), window = high(copy);
            asm volatile("" : "+r"(there[i]), "+r"(window));  // computed here, not where others wait for the word
        }
    }

    // Publishes a number of each of consecutive lanes, a word's; all lanes must call it.
    __device__ void publish(float x, bool within) const {
        const unsigned mine = shown(x), lane = lane_id() / WORD * WORD;
        unsigned half[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            half[i] = __shfl_sync(~0u, mine, lane + i * WORD / 2);
            if (WORD == 4) half[i] |= __shfl_sync(~0u, mine, lane + i * 2 + 1) << 16;
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool wanted = within && (BLOCKS % WORD == 0 || lane_id() % WORD + i * WORD < BLOCKS);
            asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.relaxed.cluster.b64 [%1], %2; }"
                         :: "r"(unsigned(wanted)), "l"(Word(window) << 32 | there[i]),
                            "l"(Word(half[1]) << 32 | half[0])
                         : "memory");
        }
    }

    __device__ void move(int bytes) {
#pragma unroll
        for (unsigned& address : there) address += bytes;
    }
};

// Publishes the units of a word, ADJACENT from each of consecutive lanes, at the first's `address`, or its copies; all
// lanes must call it.
__device__ inline void publish(const float (&x)[ADJACENT], bool within, bool first, char* address, unsigned step) {
    if constexpr (DISTRIBUTED) return Copies(address).publish(x[0], within);
    unsigned mine = (shown(x[0]) & ~TAG) | (step & TAG);
    if (ADJACENT == 2) mine |= shown(x[ADJACENT - 1]) << 16;
    else if (sizeof(Scalar) == 2) mine |= __shfl_down_sync(~0u, mine, 1) << 16;
    const Word word = HALF_WORDS ? mine : mine | Word(__shfl_down_sync(~0u, mine, WORD / 2 / ADJACENT)) << 32;
    if (HALF_WORDS)
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.relaxed.gpu.global.b32 [%1], %2; }"
                     :: "r"(unsigned(first)), "l"(address), "r"(mine) : "memory");
    else
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.relaxed.gpu.global.b64 [%1], %2; }"
                     :: "r"(unsigned(first)), "l"(address), "l"(word) : "memory");
}

// Numbers of ADJACENT units, loaded and stored together.
template <typename T> struct Few {
    using Bits = typename PackType<ADJACENT * sizeof(T)>::type;
    T x[ADJACENT];

    __device__ static Few of(Bits bits) { return reinterpret_cast<const Few&>(bits); }
    __device__ static Few load(const T* address) { return of(*reinterpret_cast<const Bits*>(address)); }
    __device__ static Bits bits_once(const T* address) { return __ldcs(reinterpret_cast<const Bits*>(address)); }
    __device__ static Few load_once(const T* address) { return of(bits_once(address)); }
    __device__ void store(T* address) const { *reinterpret_cast<Bits*>(address) = reinterpret_cast<const Bits&>(x); }

    __device__ Few operator+(const Few& other) const {
        Few sum;
#pragma unroll
        for (int j = 0; j < ADJACENT; ++j) sum.x[j] = x[j] + other.x[j];
        return sum;
    }
};

__device__ inline Few<Pack> few_bits(const float* x) {
    Few<Pack> few;
#pragma unroll
    for (int j = 0; j < ADJACENT; ++j) few.x[j] = bits(x[j]);
    return few;
}

// Brings the operands of a later step into L2.  Loads return in order: one that missed L2 would delay the polls.
__device__ inline void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" :: "l"(address)); }
