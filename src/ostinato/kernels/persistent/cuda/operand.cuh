// The B operand of a warp's products: its part of the columns of the state.  A lane reads it in pairs of words, of 16
// bytes, which are its fragments of two column tiles.
//
// Each warp multiplies an eighth of the columns.  In ping-pong, two warps share a quarter of them and multiply it with
// half of the rows each, if that moves less through shared memory: the state is read twice, but only half as many sums
// are written and read, and registers hold weights in place of the others.  SHARING is the number of warps per part.

static_assert(SHARING == 1 || (BLOCK_GROUPS > 1 && ROWS % 32 == 0), "copied parts are shared, in whole row tiles");
constexpr int PARTS = WARPS / SHARING;
constexpr int COLUMN_TILES = (ROW_BYTES + 32 * PARTS - 1) / (32 * PARTS);  // of a part
constexpr int PAIRS = COLUMN_TILES / 2, ODD = COLUMN_TILES % 2;  // pairs of tiles, 16 bytes of a lane; an odd tile, 8
constexpr int SEQUENCE_TILES = (COLUMNS + 7) / 8;
static_assert(COLUMNS <= 8 || COLUMNS % 8 == 0, "lanes beyond the last sequence have another's");
// Nearly always, all words have arrived with the first load, and to test them one by one only delays the product: they
// are tested together.  In tf32 fewer have arrived, and polling each absent word at once is faster.
constexpr bool TESTS_ALL = !TAGGED && !DISTRIBUTED;

__device__ inline unsigned part_id() { return warp_id() / SHARING; }

// The byte of the state at which a pair of a part begins, or with PAIRS as the pair, the part's odd tile.  In global
// memory the odd tile of every second part comes before its pairs: with the odd tile of the part before, it fills 64
// bytes, so that pairs are aligned.
__device__ inline int first_byte(int part, int pair) {
    const int first = part * 32 * COLUMN_TILES;
    if (ODD && !DISTRIBUTED && part % 2) return first + (pair < PAIRS ? 32 + pair * 64 : 0);
    return first + pair * 64;
}

// Tests whether any of several words is absent, by one instruction per word.
struct Arrivals {
    unsigned combined = 0;

    __device__ void add(unsigned half, unsigned step) {
        combined = TAGGED ? combined | (half ^ step) : max(combined, half);
    }
    __device__ void add(Word word, unsigned step) {
        add(high(word), step);
        if (HALF_WORDS) add(low(word), step);
    }
    __device__ bool any_absent() const { return TAGGED ? combined & TAG : combined == ~0u; }
};

// Loaded from global memory straight into the registers of mma.
struct LoadedOperand {
    static constexpr int SHARED = 0;  // bytes of shared memory

    unsigned sequence;            // this lane's in each tile of eight; lanes beyond the last sequence read another one
    unsigned offset, odd_offset;  // in bytes, of this lane's first word in a sequence's state, and in its odd tile
    const char *mine, *mine_odd;  // the addresses of these words in the state that is being loaded
    unsigned step;                // of that state
    WordPair pairs[SEQUENCE_TILES][PAIRS + 1];
    Word odd[SEQUENCE_TILES];

    __device__ LoadedOperand(const Parameters& p, uint4*)
        : sequence(lane_id() / 4 % (TAKES_FEWER ? sequences_of(p) : COLUMNS)),
          offset(first_byte(part_id(), 0) + lane_id() % 4 * 16),
          odd_offset(first_byte(part_id(), PAIRS) + lane_id() % 4 * 8) {}

    // Calls a function for each pair of words that this lane multiplies, with the sequence tile, the pair's index in
    // it, its address, and whether it exists.  The word of an odd tile has the index PAIRS.
    template <typename Function> __device__ void each(Function visit) const {
        constexpr bool WHOLE = ROW_BYTES % (32 * PARTS) == 0;
#pragma unroll
        for (int s = 0; s < SEQUENCE_TILES; ++s) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i)
                visit(s, i, mine + (i * COLUMNS + s * 8) * CHUNK, WHOLE || offset + i * 64 < ROW_BYTES);
            if (ODD) visit(s, PAIRS, mine_odd + s * 8 * CHUNK, WHOLE || odd_offset < ROW_BYTES);
        }
    }

    // Starts to load the `state`, whether it has arrived or not.
    __device__ void start_load(const char* state, unsigned of_step) {
        step = of_step;
        mine = state + slice_offset(offset, sequence), mine_odd = state + slice_offset(odd_offset, sequence);
        each([&](int s, int i, const char* address, bool exists) {
            if (i < PAIRS) read(pairs[s][i], address, exists, step);
            else read(odd[s], address, exists, step);
        });
    }

    __device__ bool lacks_any() const {
        Arrivals arrivals;
        each([&](int s, int i, const char *, bool) {
            if (i < PAIRS) arrivals.add(pairs[s][i].word[0], step), arrivals.add(pairs[s][i].word[1], step);
            else arrivals.add(odd[s], step);
        });
        return arrivals.any_absent();
    }

    // Waits until all of the state has arrived.
    __device__ void wait(Timeout& timeout) {
        const auto poll_again = [&](int s, int i, const char* address, bool) {
            return i < PAIRS ? poll(pairs[s][i], address, step) : poll(odd[s], address, step);
        };
        if constexpr (TESTS_ALL) {
            while (lacks_any() && timeout.may_poll()) each(poll_again);
        } else {
            bool waiting;
            do {
                waiting = false;
                each([&](int s, int i, const char* address, bool exists) {
                    waiting |= poll_again(s, i, address, exists);
                });
            } while (waiting && timeout.may_poll());
        }
        __syncwarp();
        if constexpr (DISTRIBUTED) each([&](int, int i, const char* address, bool exists) {
            if (exists) erase(address, i < PAIRS ? 2 : 1);
        });
    }

    __device__ WordPair pair(int s, int i) const { return i < PAIRS ? pairs[s][i] : WordPair{odd[s], 0}; }
    __device__ static bool lacked_any(Timeout&) { return false; }   // wait() has waited for all
};

// Copied into shared memory, by one bulk copy per part: unlike loads in flight, copies take no registers.  Nearly
// always the whole state has arrived when it is copied, so it is multiplied before that is known, and again if not.
struct CopiedOperand {
    static constexpr int BYTES = PAIRS * COLUMNS * CHUNK;  // of a part
    static constexpr int SHARED = PARTS * (BYTES + 16);     // bytes of shared memory, with the barriers
    static constexpr int ALL_HAVE_READ = 8;                 // the first named barrier of warps that share a part

    char* copy;                   // of this warp's part
    unsigned barrier;             // which a copy completes
    unsigned phase = 0, awaited;  // the barrier's phase for the next copy, and for the last
    const char* mine;             // this warp's part of the state that is being loaded
    unsigned step;                // of that state
    Arrivals arrivals;

    CopiedOperand() = default;
    // A barrier of all warps that multiply must follow, as one thread initialises the barriers.
    __device__ CopiedOperand(const Parameters &, uint4* shared)
        : copy(reinterpret_cast<char*>(shared) + part_id() * BYTES), barrier(barrier_of(shared, part_id())) {
        if (threadIdx.x == 0) {
            for (int part = 0; part < PARTS; ++part) init_barrier(barrier_of(shared, part));
            fence_barrier_init();
        }
    }
    __device__ static unsigned barrier_of(uint4* shared, int part) {
        return shared_address(shared + PARTS * BYTES / 16) + part * 8;
    }

    // Starts to copy the `state`, whether it has arrived or not.
    __device__ void start_load(const char* state, unsigned of_step) {
        step = of_step, mine = state + part_id() * BYTES;
        request();
    }

    __device__ void request() {
        if (SHARING == 1) __syncwarp();  // all lanes have read the last copy
        else asm volatile("bar.sync %0, %1;" :: "r"(ALL_HAVE_READ + part_id()), "n"(32 * SHARING) : "memory");
        if (lane_id() == 0 && warp_id() % SHARING == 0) {
            expect(barrier, BYTES);
            start_copy(shared_address(copy), mine, BYTES, barrier);
        }
        awaited = phase, phase ^= 1;
    }

    // Waits for the copy.
    __device__ void wait(Timeout&) {
        while (!try_wait(barrier, awaited)) {}
        arrivals = {};
    }

    __device__ WordPair pair(int s, int i) {
        const char* address = copy + (i * COLUMNS + s * 8) * CHUNK + lane_id() * 16;
        const ulonglong2 both = *reinterpret_cast<const ulonglong2*>(address);
        arrivals.add(both.x, step), arrivals.add(both.y, step);
        return {both.x, both.y};
    }

    // Whether some words had not arrived; if so, copies the part again.  Warps that share a part have read the same
    // copy, and so agree.
    __device__ bool lacked_any(Timeout& timeout) {
        const bool lacks = __any_sync(~0u, arrivals.any_absent()) && timeout.may_poll();
        if (lacks) request();
        return lacks;
    }
};

#if BLOCK_GROUPS == 1
using Operand = LoadedOperand;
#else
using Operand = CopiedOperand;
static_assert(ROW_BYTES == PARTS * PAIRS * 64 && COLUMNS % 8 == 0, "all that is copied is multiplied");
#endif
