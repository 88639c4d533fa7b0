// The exchange of a step's results between the blocks of a group.
//
// Forward a block reads its group's whole previous state, backward the gradients of all gates at the step after.  A
// word that is not there yet is ABSENT, a NaN that no block writes.  So the data is its own flag: a word that is no
// longer that NaN has arrived, and no fence and no barrier between blocks is needed.  A word is 8 or 4 aligned bytes,
// which are written atomically; it holds adjacent units of one sequence.
//
// Forward every step has its own buffer, filled beforehand, and each word is written once.  Where less is exchanged
// than backward, a few buffers were measured to take longer than they save.
//
// Backward steps take a few buffers in turn, which stay in L2.  The thread that wrote a word makes it absent again half
// of the buffers later, and writes there anew another half later.  This is why nobody waits for a word that is gone, or
// takes an old one for the new one:
//   - A word has one writer, and all accesses are relaxed, as large as the word, and of the GPU's scope.  So they are
//     no data race, and what is seen of a word follows the writer's program.
//   - Words are erased when they have been read.  By the time a block writes a step, all have read the last but one, as
//     it needs what they made of that; in a cluster, threads without a state of their own may be a step behind.  No
//     load returns what depends on its own result.
//   - Words are absent before others poll for the next: what was stored has reached L2, which answers all polls of
//     words, when the same thread has exchanged half of the buffers' steps with all others, several microseconds later.
// The last rests on time.  PTX's memory model asks for a fence of the writer and one of the reader in between.  With
// 16, 32 or 64 buffers a thread needs a fence every 6, 14 or 30 steps, and the median of 27 loops took 7.5, 3.9 and
// 3.5 % longer (H200): a fence waits for all that a thread has stored, and more buffers take more of L2.  To erase by
// atomic exchanges and wait for their results took 34 % longer, a buffer for each step 12 %.  A bit of each word
// that tells laps apart would make a stale word one that is absent, but takes precision from one of the numbers.  Of
// bulk copies of what is being written, as of two groups in turn, the model says nothing.
//
// Numbers rounded to tf32 have spare bits, which mma ignores.  There each holds the number of its step (TAGGED): a word
// has arrived when that is the one waited for, and four buffers are enough both ways.
//
// With DISTRIBUTED all blocks of a group are one cluster.  Forward each has two buffers of the group's states in its
// shared memory, taken in turn.  A block stores its words in those of all others, and makes words absent again once it
// has read them.  By the time a word is written again, two steps later, it is: what the writer has read of the step
// between, this block published after that.
// Here, too, the model asks for fences; what is erased is in the block's own shared memory.
//
// Backward exchanges GATES times as much.  There each of CLUSTER blocks multiplies one slice of it with the rows of all
// the cluster's units, and the partial sums are reduced through distributed shared memory.  If the cluster is the whole
// group, the slice is what the block computed itself, and the sums are all that is exchanged.

using Word = unsigned long long;
struct WordPair { Word word[2]; };  // 16 bytes, which are loaded together

constexpr Word ABSENT = ~0ull;
constexpr unsigned TAG = TAGGED ? 0x1fff : 0;

__device__ inline unsigned low(Word word) { return unsigned(word); }
__device__ inline unsigned high(Word word) { return unsigned(word >> 32); }
__device__ inline bool absent(unsigned half, unsigned step) { return TAGGED ? (half ^ step) & TAG : half == ~0u; }
__device__ inline bool absent(Word word, unsigned step) {
    return absent(high(word), step) || (HALF_WORDS && absent(low(word), step));
}
__device__ inline bool absent(const WordPair& pair, unsigned step) {
    return absent(pair.word[0], step) || absent(pair.word[1], step);
}

// Where blocks form clusters, the cluster's barrier: all blocks have started, and none exits before all are done.
__device__ inline void sync_if_clustered() {
    if constexpr (CLUSTER > 1 || DISTRIBUTED) sync_cluster();
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

// Loads words as they are stored: whole, or by halves.
#if HALF_WORDS
#define LOAD_WORD(address)                                                                                           \
    "{ .reg .b32 h<2>; mov.b64 {h0, h1}, %0; @p " LOAD_STATE ".v2.b32 {h0, h1}, [" address "]; mov.b64 %0, {h0, h1}; }"
#define LOAD_PAIR(address)                                                                                           \
    "{ .reg .b32 h<4>; mov.b64 {h0, h1}, %0; mov.b64 {h2, h3}, %1; @p " LOAD_STATE ".v4.b32 {h0, h1, h2, h3},"       \
    " [" address "]; mov.b64 %0, {h0, h1}; mov.b64 %1, {h2, h3}; }"
#else
#define LOAD_WORD(address) "@p " LOAD_STATE ".b64 %0, [" address "];"
#define LOAD_PAIR(address) "@p " LOAD_STATE ".v2.b64 {%0, %1}, [" address "];"
#endif

__device__ inline size_t state_address(const char* address) {
    return DISTRIBUTED ? __cvta_generic_to_shared(address) : reinterpret_cast<size_t>(address);
}

// Polls: loads only what is absent, predicated so that many loads are in flight together.  True if it was absent.
__device__ inline bool poll(Word& word, const char* address, unsigned step) {
    const bool wanted = absent(word, step);
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; " LOAD_WORD("%2") " }"
                 : "+l"(word) : "r"(unsigned(wanted)), "l"(state_address(address)) : "memory");
    return wanted;
}

__device__ inline bool poll(WordPair& pair, const char* address, unsigned step) {
    const bool wanted = absent(pair, step);
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; " LOAD_PAIR("%3") " }"
                 : "+l"(pair.word[0]), "+l"(pair.word[1])
                 : "r"(unsigned(wanted)), "l"(state_address(address)) : "memory");
    return wanted;
}

// The first load of a word, absent or not; zero, of any step, if it does not exist.
__device__ inline void read(Word& word, const char* address, bool exists, unsigned step) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; mov.b64 %0, {%3, %3}; " LOAD_WORD("%2") " }"
                 : "=&l"(word) : "r"(unsigned(exists)), "l"(state_address(address)), "r"(step & TAG) : "memory");
}

__device__ inline void read(WordPair& pair, const char* address, bool exists, unsigned step) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.b64 %0, {%4, %4}; mov.b64 %1, {%4, %4}; "
                 LOAD_PAIR("%3") " }"
                 : "=&l"(pair.word[0]), "=&l"(pair.word[1])
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
struct Timeout {
    int limit = 1 << 23, polls = 0;
    int* failure;

    __device__ explicit Timeout(int* failure) : failure(failure) {}
    __device__ void restart() { polls = 0; }
    __device__ bool has_expired() const { return !limit; }
    __device__ bool may_poll() {
        if (polls++ < limit) return true;
        if (limit) {
            limit = 0;
            *reinterpret_cast<volatile int*>(failure) = 1;
            __threadfence_system();
        }
        return false;
    }
};

// The bits of a number, or of zero, with every NaN canonical and so different from ABSENT.
__device__ inline Pack bits(float x, bool zero = false) {
    const float one[1] = {x};
    const Pack other = zero ? 0 : sizeof(Scalar) == 4 ? 0x7fffffffu : 0x7fffu;
    return zero || x != x ? other : pack(one);
}

__device__ inline unsigned round_to_tf32(unsigned x) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(x)));
    return rounded;
}

// The bits of a number as an operand of mma.  Unless EXACT, float32 is rounded to tf32 here, once, not at every use.
__device__ inline unsigned operand_bits(float x, bool zero = false) {
    return sizeof(Scalar) == 4 && !EXACT ? round_to_tf32(bits(x, zero)) : bits(x, zero);
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

    // Publishes a number of each of consecutive lanes, a word's, or zero; all lanes must call it.
    __device__ void publish(float x, bool zero, bool within) const {
        const unsigned mine = operand_bits(x, zero), lane = lane_id() / WORD * WORD;
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

// Stores a word in global memory; of one that two blocks share, its lower half.
__device__ inline void store_if(bool wanted, char* address, Word word) {
    if (HALF_WORDS)
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.relaxed.gpu.global.b32 [%1], %2; }"
                     :: "r"(unsigned(wanted)), "l"(address), "r"(low(word)) : "memory");
    else
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.relaxed.gpu.global.b64 [%1], %2; }"
                     :: "r"(unsigned(wanted)), "l"(address), "l"(word) : "memory");
}

// Publishes the units of a word, ADJACENT from each of consecutive lanes, at the first's `address`, or its copies; all
// lanes must call it.
__device__ inline void publish(const float (&x)[ADJACENT], bool within, bool first, char* address, unsigned step) {
    if constexpr (DISTRIBUTED) return Copies(address).publish(x[0], false, within);
    unsigned mine = (operand_bits(x[0]) & ~TAG) | (step & TAG);
    if (ADJACENT == 2) mine |= operand_bits(x[ADJACENT - 1]) << 16;
    else if (sizeof(Scalar) == 2) mine |= __shfl_down_sync(~0u, mine, 1) << 16;
    store_if(first, address, HALF_WORDS ? mine : mine | Word(__shfl_down_sync(~0u, mine, WORD / 2 / ADJACENT)) << 32);
}

// Numbers of ADJACENT units, loaded and stored together.
template <typename T> struct Adjacent {
    using Bits = typename PackType<ADJACENT * sizeof(T)>::type;
    T x[ADJACENT];

    __device__ static Adjacent of(Bits bits) { return reinterpret_cast<const Adjacent&>(bits); }
    __device__ static Adjacent load(const T* address) { return of(*reinterpret_cast<const Bits*>(address)); }
    __device__ static Bits bits_once(const T* address) { return __ldcs(reinterpret_cast<const Bits*>(address)); }
    __device__ static Adjacent load_once(const T* address) { return of(bits_once(address)); }
    __device__ void store(T* address) const { *reinterpret_cast<Bits*>(address) = reinterpret_cast<const Bits&>(x); }

    __device__ Adjacent operator+(const Adjacent& other) const {
        Adjacent sum;
#pragma unroll
        for (int j = 0; j < ADJACENT; ++j) sum.x[j] = x[j] + other.x[j];
        return sum;
    }
};

__device__ inline Adjacent<Pack> adjacent_bits(const float* x) {
    Adjacent<Pack> all;
#pragma unroll
    for (int j = 0; j < ADJACENT; ++j) all.x[j] = bits(x[j]);
    return all;
}

// Brings the operands of a later step into L2.  Loads return in order: one that missed L2 would delay the polls.
__device__ inline void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" :: "l"(address)); }
