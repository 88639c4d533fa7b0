// The B operand of a warp's products: its part of the columns of the state, in pairs of words, 16 bytes, which are a
// lane's fragments of two column tiles.
//
// A part is an eighth of the columns.  In ping-pong it is a quarter, which two warps multiply with half of the rows
// each, where that moves less in shared memory: the state is read twice, but of sums half as many are written and read,
// and registers hold weights in place of the others.  SHARING is the number of warps of a part.

static_assert(SHARING == 1 || (BLOCK_GROUPS > 1 && ROWS % 32 == 0), "copied parts are shared, in whole row tiles");
constexpr int PARTS = WARPS / SHARING;
constexpr int COLUMN_TILES = (ROW_BYTES + 32 * PARTS - 1) / (32 * PARTS);  // of a part
constexpr int PAIRS = COLUMN_TILES / 2, ODD = COLUMN_TILES % 2;  // of two tiles, 16 bytes; an odd one has 8
constexpr int SEQUENCE_TILES = (COLUMNS + 7) / 8;
static_assert(COLUMNS <= 8 || COLUMNS % 8 == 0, "lanes beyond the last sequence have another's");
// Nearly always all has arrived with the first load, and tests of one word after the other only delay the product: all
// are tested together.  Less of rounded float32 has, and there it is faster to poll each absent word at once.
constexpr bool TESTS_ALL = !TAGGED && !DISTRIBUTED;

__device__ inline unsigned part_id() { return warp_id() / SHARING; }

// The byte of the state with which a pair of a part begins, or its odd tile, as number PAIRS.  In global memory that of
// every second part comes before its pairs: with the one of the part before it fills 64 bytes, and pairs are aligned.
__device__ inline int first_byte(int part, int pair) {
    const int first = part * 32 * COLUMN_TILES;
    if (ODD && !DISTRIBUTED && part % 2) return first + (pair < PAIRS ? 32 + pair * 64 : 0);
    return first + pair * 64;
}

// Whether any of several words has not arrived, for one instruction each.
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

    unsigned sequence;            // of this lane in each tile of eight; lanes beyond the last have another's
    unsigned offset, odd_offset;  // in bytes, of this lane's first word in a sequence's state, and of an odd tile's
    const char *mine, *mine_odd;  // the same of the state that is being loaded
    unsigned step;                // of that
    WordPair pairs[SEQUENCE_TILES][PAIRS + 1];
    Word odd[SEQUENCE_TILES];

    __device__ LoadedOperand(const Parameters& p, uint4*)
        : sequence(lane_id() / 4 % (TAKES_FEWER ? sequences_of(p) : COLUMNS)),
          offset(first_byte(part_id(), 0) + lane_id() % 4 * 16),
          odd_offset(first_byte(part_id(), PAIRS) + lane_id() % 4 * 8) {}

    // Calls a function for each pair of the state that this lane multiplies, the odd tile's word being the last of a
    // sequence tile: with the tile, its number there, its address and whether it exists.
    template <typename Function> __device__ void each(Function take) const {
        constexpr bool WHOLE = ROW_BYTES % (32 * PARTS) == 0;
#pragma unroll
        for (int s = 0; s < SEQUENCE_TILES; ++s) {
#pragma unroll
            for (int i = 0; i < PAIRS; ++i)
                take(s, i, mine + (i * COLUMNS + s * 8) * CHUNK, WHOLE || offset + i * 64 < ROW_BYTES);
            if (ODD) take(s, PAIRS, mine_odd + s * 8 * CHUNK, WHOLE || odd_offset < ROW_BYTES);
        }
    }

    // Starts to load the `state`, whether it is there or not.
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

    // Waits for all of it.
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
    __device__ static bool lacked_any(Timeout&) { return false; }   // it was waited for
};

// Copied into shared memory by the asynchronous proxy, one bulk copy a part: what is on its way takes no registers.
// Nearly always all has arrived with the first copy, so it is multiplied before that is known, and once more if not.
struct CopiedOperand {
    static constexpr int BYTES = PAIRS * COLUMNS * CHUNK;  // of a part
    static constexpr int SHARED = PARTS * (BYTES + 16);     // with the barriers
    static constexpr int ALL_HAVE_READ = 8;                 // barriers of warps that share a part: that of the first

    char* copy;                   // this warp's part
    unsigned barrier;             // which a copy completes
    unsigned phase = 0, awaited;  // of the next copy, and of the last
    const char* mine;             // the same part of the state that is being loaded
    unsigned step;                // of that
    Arrivals arrivals;

    CopiedOperand() = default;
    // A barrier of the warps that multiply must follow.
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

    // Starts to copy the `state`, whether it is there or not.
    __device__ void start_load(const char* state, unsigned of_step) {
        step = of_step, mine = state + part_id() * BYTES;
        request();
    }

    __device__ void request() {
        if (SHARING == 1) __syncwarp();  // all have read the last copy
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

    // Whether any of it had not arrived; if so, copies it again.  Warps that share a part have read the same.
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
