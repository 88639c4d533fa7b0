// The previous state in shared memory, for products that gather columns by index.
//
// A place holds one unit of all sequences of the group, STATE_COLUMNS numbers.  Unit u of a word is at place
// u * WORDS + word, so that consecutive threads, which load consecutive words, store to consecutive places.  After the
// state come ZERO_PLACES places that are always zero, one per bank, which weights of padding read.
//
// If the sequences fit in half a place (HALVES), eight places hold them in their lower half, the next eight in their
// upper half, and so on, to avoid bank conflicts of the stores; the other halves are always zero.

constexpr int WORDS = SLICE / WORD;  // of a sequence's state
constexpr int ZERO_PLACES = 16;
constexpr int STATE_BYTES = STATE_COLUMNS * int(sizeof(Scalar));  // of a place
constexpr bool HALVES = STATE_BYTES == 16 && sizeof(Scalar) == 2 && COLUMNS <= 4;
constexpr int STATE_PIECES = (SLICE + ZERO_PLACES) * STATE_BYTES / 16;   // of 16 bytes
constexpr int ROUNDS = (WORDS + THREADS - 1) / THREADS;           // of loads, in each of which a thread loads a word
constexpr int AT_ONCE = ROUNDS * COLUMNS <= 32 ? ROUNDS : 32 / COLUMNS;  // rounds whose words are in flight together

struct SharedState {
    char* places;
    const char* mine;  // this thread's first word of the state that is being loaded
    unsigned step;     // of that state
    Word words[AT_ONCE][COLUMNS];

    __device__ static int half(int place) { return HALVES ? place & 8 : 0; }  // offset in bytes

    __device__ explicit SharedState(void* shared) : places(static_cast<char*>(shared)) {
        for (int place = threadIdx.x; HALVES && place < SLICE; place += THREADS)
            *reinterpret_cast<Word*>(places + place * STATE_BYTES + 8 - half(place)) = 0;
        for (int i = threadIdx.x; i < ZERO_PLACES * STATE_BYTES / 8; i += THREADS)
            reinterpret_cast<Word*>(places + SLICE * STATE_BYTES)[i] = 0;
    }

    // The j-th 16-bit numbers of two words, in one register.
    __device__ static unsigned pair(Word a, Word b, int j) {
        return __byte_perm(j < 2 ? low(a) : high(a), j < 2 ? low(b) : high(b), j % 2 ? 0x7632 : 0x5410);
    }

    // Stores the units of word `index` of all sequences, each unit at its place.
    __device__ void store(int index, const Word (&words)[COLUMNS]) {
        constexpr int BYTES = HALVES ? 8 : STATE_BYTES;
#pragma unroll
        for (int j = 0; j < WORD; ++j) {
            unsigned values[BYTES / 4];
#pragma unroll
            for (int i = 0; i < BYTES / 4; ++i) {
                if (sizeof(Scalar) == 4) {
                    values[i] = i >= COLUMNS ? 0 : j ? high(words[i]) : low(words[i]);
                } else {
                    const Word a = 2 * i < COLUMNS ? words[2 * i] : 0, b = 2 * i + 1 < COLUMNS ? words[2 * i + 1] : 0;
                    values[i] = pair(a, b, j);
                }
            }
            const int place = j * WORDS + index;
            char* address = places + place * STATE_BYTES + half(place);
            if (BYTES == 8) {
                *reinterpret_cast<uint2*>(address) = {values[0], values[1]};
            } else {
#pragma unroll
                for (int i = 0; i < BYTES / 16; ++i)
                    reinterpret_cast<uint4*>(address)[i] = {values[4 * i], values[4 * i + 1], values[4 * i + 2],
                                                             values[4 * i + 3]};
            }
        }
    }

    // The address of this thread's word in a round; if it has none, that of the last word.
    __device__ const char* address(int round, int sequence) const {
        const int first = round * THREADS;
        const bool all = first + THREADS <= WORDS;
        return mine + sequence * ROW_BYTES + (all ? first : min(first, WORDS - 1 - int(threadIdx.x))) * 8;
    }

    __device__ void load(int round) {
#pragma unroll
        for (int i = 0; i < AT_ONCE && round + i < ROUNDS; ++i) {
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) read(words[i][c], address(round + i, c), true, step);
        }
    }

    // Starts to load a state, whether it has arrived or not.
    __device__ void start_load(const char* state, unsigned of_step) {
        step = of_step;
        mine = state + threadIdx.x * 8;
        load(0);
    }

    // Waits for the whole state that is being loaded, and stores it; a barrier must follow before it is used.
    __device__ void wait_and_store(Timeout& timeout) {
        timeout.restart();
#pragma unroll
        for (int round = 0; round < ROUNDS; round += AT_ONCE) {
            if (round) load(round);
            bool waiting;
            do {
                waiting = false;
#pragma unroll
                for (int i = 0; i < AT_ONCE && round + i < ROUNDS; ++i) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) waiting |= poll(words[i][c], address(round + i, c), step);
                }
            } while (waiting && timeout.may_poll());
#pragma unroll
            for (int i = 0; i < AT_ONCE && round + i < ROUNDS; ++i) {
                const int index = (round + i) * THREADS + threadIdx.x;
                const bool all = (round + i + 1) * THREADS <= WORDS;  // no branches: each would wait for the one before
                if (all || index < WORDS) store(index, words[i]);
            }
        }
    }
};
