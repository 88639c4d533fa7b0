// The exchange of a step's results between the blocks of a group.
//
// In the forward pass a block reads its group's whole previous state; in the backward pass, the gradients of all gates
// at the step after, which the code calls a state, too.  A word that has not been written yet is ABSENT, a NaN that no
// block writes.  So the data is its own flag: a word has arrived when it is no longer that NaN, and blocks need neither
// fences nor barriers.  A word is 8 or 4 aligned bytes, which are written atomically; it holds adjacent units of one
// sequence.
//
// In the forward pass every step has its own buffer, filled beforehand, and each word is written once.  Less is
// exchanged there than in the backward pass, and reusing a few buffers was measured to take longer than it saves.
//
// In the backward pass the steps use a few buffers in turn, which stay in L2.  The thread that wrote a word makes it
// absent again after half as many steps as there are buffers, and reuses it after another half.  No thread waits for a
// word that has been erased, or takes an old word for the new one, because:
//   - Each word has one writer, and all accesses are relaxed, as large as the word, and at the scope of the GPU.  So
//     there is no data race, and others see the word's values in the order of the writer's program.
//   - A word has been read when it is erased.  By the time a block writes a step, all blocks have read the last step
//     but one, as the block needs what they computed from it; in a cluster, threads that own no state may be a step
//     behind.  No load can return a value that depends on its own result.
//   - A word is absent before others poll for its next value: what a thread has stored has reached L2, where all polls
//     are served, by the time it has exchanged half as many steps as there are buffers with all others, several
//     microseconds later.
// The last point rests on timing.  PTX's memory model asks for a fence by the writer and one by the reader instead.
// With 16, 32 or 64 buffers a thread needs a fence every 6, 14 or 30 steps, and the median of 27 loops took 7.5, 3.9
// and 3.5 % longer (H200): a fence waits for all stores of a thread, and more buffers take more of L2.  Erasing by
// atomic exchanges whose results are waited for took 34 % longer, and a buffer for each step 12 %.  A bit in each word
// that alternates with every round of the buffers would tell a stale word from a new one, but would cost one of the
// numbers precision.  The model says nothing about bulk copies of words that are still being written, which ping-pong
// uses.
//
// Numbers rounded to tf32 have spare bits, which mma ignores.  There each number carries its step (TAGGED): a word has
// arrived when it carries the step that is waited for, and four buffers are enough in both passes.
//
// With DISTRIBUTED, all blocks of a group are one cluster.  In the forward pass each block has two buffers of the
// group's states in its shared memory, used in turn.  A block stores its words in the buffers of all blocks, and makes
// a word absent once it has read it.  So the word is absent when it is written again, two steps later: before that, the
// writer has read the step in between from this block, which published that after it had erased the word.  Here, too,
// the model asks for fences; but the erased words are in the block's own shared memory.
//
// The backward pass exchanges GATES times as much.  There each of CLUSTER blocks multiplies one slice of it with the
// rows of all units of the cluster, and the partial sums are reduced through distributed shared memory.  If the cluster
// is the whole group, the slice is what the block itself has computed, and only the sums are exchanged.

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

// The barrier of the cluster, if blocks form clusters: before the loop all blocks must have started, and none may exit
// before all are done.
__device__ inline void sync_if_clustered() {
    if constexpr (CLUSTER > 1 || DISTRIBUTED) sync_cluster();
}

// The distance from a step's buffer to that of the next step, in buffers.
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

// The PTX that loads words as they are stored: whole, or in halves.
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

// Loads a word again if it is absent, and returns whether it was.  The load is predicated, not branched around, so that
// many are in flight together.
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

// Loads a word for the first time, absent or not.  One that does not exist is zero, with the step's tag.
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

// Makes words in the block's own shared memory absent again.
__device__ inline void erase(const char* address, int words) {
    for (int i = 0; i < words; ++i)
        asm volatile("st.relaxed.cluster.shared::cta.b64 [%0], %1;"
                     :: "l"(state_address(address + i * 8)), "l"(ABSENT) : "memory");
}

// A timeout of some seconds, counted in polls, not by a clock, as the GPU may be preempted.  After it a thread no
// longer waits, and goes on with NaN.
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

// The bits of a number, or of zero; every NaN becomes the canonical one, which is not ABSENT.
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

// The bits of a number as an operand of mma.  Unless EXACT, float32 is rounded to tf32 here, once, instead of at every
// use.
__device__ inline unsigned operand_bits(float x, bool zero = false) {
    return sizeof(Scalar) == 4 && !EXACT ? round_to_tf32(bits(x, zero)) : bits(x, zero);
}

// The copies of a word in the shared memory of all blocks of a cluster.  Each lane that has a unit of the word stores
// some of the copies.
struct Copies {
    static constexpr int COUNT = (BLOCKS + WORD - 1) / WORD;  // copies that a lane stores
    unsigned lower[COUNT], upper;  // the lower halves of their generic addresses, and the upper half, which all share

    // The copies of the word that contains an address of this block.
    __device__ explicit Copies(const char* address) {
        const size_t here = reinterpret_cast<size_t>(address) & ~size_t(7);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            size_t copy;
            asm("mapa.u64 %0, %1, %2;" : "=l"(copy) : "l"(here), "r"(min(lane_id() % WORD + i * WORD, BLOCKS - 1u)));
            lower[i] = low(copy), upper = high(copy);
            asm volatile("" : "+r"(lower[i]), "+r"(upper));  // computed here, not while others wait for the word
        }
    }

    // Publishes a word, of which each of WORD consecutive lanes has one number, or zeros; all lanes must call it.
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
                         :: "r"(unsigned(wanted)), "l"(Word(upper) << 32 | lower[i]),
                            "l"(Word(half[1]) << 32 | half[0])
                         : "memory");
        }
    }

    __device__ void move(int bytes) {
#pragma unroll
        for (unsigned& address : lower) address += bytes;
    }
};

// Stores a word in global memory; if two blocks share its 8 bytes, only the lower half.
__device__ inline void store_if(bool wanted, char* address, Word word) {
    if (HALF_WORDS)
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.relaxed.gpu.global.b32 [%1], %2; }"
                     :: "r"(unsigned(wanted)), "l"(address), "r"(low(word)) : "memory");
    else
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.relaxed.gpu.global.b64 [%1], %2; }"
                     :: "r"(unsigned(wanted)), "l"(address), "l"(word) : "memory");
}

// Publishes a word, of which consecutive lanes have ADJACENT units each, at the first lane's `address`, or at its
// copies; all lanes must call it.
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

// Brings operands of a later step into L2.  Loads return in order, so one that misses L2 would delay the polls.
__device__ inline void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" :: "l"(address)); }
