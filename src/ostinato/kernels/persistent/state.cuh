// The previous state in shared memory, for products that gather columns by index.
//
// A place holds the batch of one unit, STATE_COLUMNS numbers.  Unit u of a word is at place u * WORDS + word, so that
// consecutive threads, which load consecutive words, store to consecutive places.  After the state come places that are
// always zero, for padding, one per bank.
//
// If the batch fits in half a place (HALVES), eight places hold it in their lower half, the next eight in their upper
// half, and so on, against bank conflicts of the stores; the other halves are always zero.

constexpr int WORDS = SLICE / WORD;  // of a sequence's state
constexpr int ZERO_PLACES = 16;
constexpr int STATE_BYTES = STATE_COLUMNS * int(sizeof(Scalar));  // of a place
constexpr bool HALVES = STATE_BYTES == 16 && sizeof(Scalar) == 2 && COLUMNS <= 4;
constexpr int STATE_PIECES = (SLICE + ZERO_PLACES) * STATE_BYTES / 16;
constexpr int ROUNDS = (WORDS + THREADS - 1) / THREADS;           // of loads, a word per thread
constexpr int AT_ONCE = ROUNDS * COLUMNS <= 32 ? ROUNDS : 32 / COLUMNS;  // rounds whose words are in flight together

struct SharedState {
    char *places;

    __device__ static int half(int place) { return HALVES ? place & 8 : 0; }  // in bytes

    __device__ explicit SharedState(void *shared) : places(static_cast<char *>(shared)) {
        for (int place = threadIdx.x; HALVES && place < SLICE; place += THREADS)
            *reinterpret_cast<Word *>(places + place * STATE_BYTES + 8 - half(place)) = 0;
        for (int i = threadIdx.x; i < ZERO_PLACES * STATE_BYTES / 8; i += THREADS)
            reinterpret_cast<Word *>(places + SLICE * STATE_BYTES)[i] = 0;
    }

    // Number j of each of two words, side by side.
    __device__ static unsigned pair(Word a, Word b, int j) {
        return __byte_perm(j < 2 ? low(a) : high(a), j < 2 ? low(b) : high(b), j % 2 ? 0x7632 : 0x5410);
    }

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
            char *address = places + place * STATE_BYTES + half(place);
            if (BYTES == 8) {
                *reinterpret_cast<uint2 *>(address) = {values[0], values[1]};
            } else {
#pragma unroll
                for (int i = 0; i < BYTES / 16; ++i)
                    reinterpret_cast<uint4 *>(address)[i] = {values[4 * i], values[4 * i + 1], values[4 * i + 2],
                                                             values[4 * i + 3]};
            }
        }
    }

    // Loads the whole state, waiting for it; a barrier must follow before it is used.
    __device__ void bring(const char *state, int columns, Patience &patience) {
        patience.renew();
#pragma unroll
        for (int from = 0; from < ROUNDS; from += AT_ONCE) {
            Word words[AT_ONCE][COLUMNS];
            const char *mine = state + (from * THREADS + threadIdx.x) * 8;
            const auto exists = [&](int i) { return (from + i) * THREADS + threadIdx.x < WORDS; };
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) words[i][c] = c < columns && exists(i) ? ABSENT : 0;
            }
            bool waiting;
            do {
                waiting = false;
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) waiting |= look(words[i][c], mine + c * ROW_BYTES + i * THREADS * 8);
                }
            } while (waiting && patience.lasts());
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (exists(i)) store((from + i) * THREADS + threadIdx.x, words[i]);
        }
    }
};
