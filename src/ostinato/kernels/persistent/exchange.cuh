// What every persistent kernel shares: its parameters, and the exchange of the hidden state between blocks.
//
// A block owns UNITS hidden units of COLUMNS sequences, a group, and computes them at every step from the group's
// whole previous state.  The states of all steps lie in memory that is first filled with a NaN which no block ever
// writes, and each of their words is written once.  So a word that is no longer that NaN has arrived: there is no
// flag, no barrier between blocks and no buffer that is used twice.  A word is 8 or 4 aligned bytes, which the
// memory model keeps whole; it holds neighbouring units of one sequence.

enum CellKind { RNN_TANH, RNN_RELU, GRU, LSTM };
constexpr int GATES = CELL == LSTM ? 4 : CELL == GRU ? 3 : 1;

constexpr int WARPS = 8, THREADS = 32 * WARPS;  // 255 registers a thread: all that a multiprocessor has
constexpr int WORD = 8 / sizeof(Scalar);         // units in 8 bytes
constexpr bool HALF_WORDS = UNITS % WORD != 0;   // blocks meet in the middle of 8 bytes: a word is 4
constexpr int PITCH = (HIDDEN + 2 * WORD - 1) / (2 * WORD) * (2 * WORD);  // units of a sequence's state: whole pieces
constexpr int ROW_BYTES = PITCH * int(sizeof(Scalar));
constexpr int CHUNK = CHUNK_BYTES;  // of a sequence's state, beside that of the next sequence
constexpr int CHUNKS = (ROW_BYTES + CHUNK - 1) / CHUNK;
constexpr int GROUP_BYTES = CHUNKS * COLUMNS * CHUNK;  // the state of a group
constexpr int ROWS = GATES * UNITS;  // of the recurrent matrix in a block: row g * UNITS + u is gate g of unit u

struct Parameters {
    const Scalar *projected;      // (steps, batch, GATES * HIDDEN)
    const Scalar *h0, *c0;        // (batch, HIDDEN), or null for zeros
    const Scalar *bias;           // (HIDDEN) of a GRU's candidate, or null
    const unsigned *weights;      // packed for the blocks, as are the next two; see Product
    const unsigned short *places, *spans;
    char *states;                 // (steps + 1, groups, CHUNKS, COLUMNS, CHUNK bytes), from h0 on
    Pack *output;                 // (steps, batch, HIDDEN)
    Pack *h_n, *c_n;              // (batch, HIDDEN)
    int *failure;                 // set to 1 if a wait was given up
    int steps, batch, groups, first, reverse;  // first: the sequence with which this launch begins
};

__device__ inline unsigned lane_id() { return threadIdx.x % 32; }
__device__ inline unsigned warp_id() { return threadIdx.x / 32; }

// Where byte `k` of a sequence's state is in its group's.
__device__ inline int place_of(int k, int sequence) { return (k / CHUNK * COLUMNS + sequence) * CHUNK + k % CHUNK; }

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

// How often a thread still looks for a word before it gives up: some seconds.  A count, not a clock, since the
// GPU may be taken away for a while.  Who has given up waits no more, and computes on with NaN.
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

// Publishes the units of a word, one from each of neighbouring lanes, the first at `address`; all lanes take part.
__device__ inline void publish(float x, bool first, char *address) {
    unsigned mine = bits(x);
    if (sizeof(Scalar) == 2) mine |= __shfl_down_sync(~0u, mine, 1) << 16;
    const Word word = HALF_WORDS ? mine : mine | Word(__shfl_down_sync(~0u, mine, WORD / 2)) << 32;
    if (!first) return;
    if (HALF_WORDS) asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" :: "l"(address), "r"(mine) : "memory");
    else asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" :: "l"(address), "l"(word) : "memory");
}
