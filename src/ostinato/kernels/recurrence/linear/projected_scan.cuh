// The scan of a tile's products, which stay in the registers that wgmma leaves them in; see projected.cu.

// The composition of consecutive steps; with `reset` it does not depend on the state before.
struct Composition {
    float a, b;
    bool reset;
    __device__ float carry(float state) const { return reset ? b : fma(a, state, b); }
    __device__ Composition then(const Composition& next) const {
        return {a * next.a, next.carry(b), reset || next.reset};
    }
    __device__ Composition of_lane(int lane) const {
        return {__shfl_sync(~0u, a, lane), __shfl_sync(~0u, b, lane), bool(__shfl_sync(~0u, int(reset), lane))};
    }
};

// The steps of a channel's four lanes: those before this lane's, and all, given the runs of each.
__device__ inline void compose_lanes(const Composition (&run)[2], Composition& before, Composition& whole) {
    const int lane = threadIdx.x % 32;
    const Composition mine = run[0].then(run[1]);
    before = whole = {1, 0, false};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i == lane % 4) before = whole;
        whole = whole.then(mine.of_lane((lane & ~3) + i));
    }
}

// The messages of earlier tiles for a warp's eight channels: an aggregate {b, a} or an inclusive prefix {state, state}.
// Each of a channel's four lanes reads every fourth of the latest tiles.
struct Published {
    const Message* here;
    Index pitch;
    int chunk;
    unsigned epoch;
    int behind;  // earlier tiles of the line that may be in progress at the same time

    // Four bits, one per lane of a channel: whether the predicate holds for that lane of any channel.
    static __device__ unsigned any(bool holds) {
        unsigned lanes = __ballot_sync(~0u, holds);
        lanes |= lanes >> 16, lanes |= lanes >> 8;
        return (lanes | lanes >> 4) & 15;
    }
    // The carry, given the previous tile's message, which was loaded early.  All its parts are tested: the compiler
    // would split the load into one for each part that is used.
    __device__ float look_back(const Message& last) const {
        const bool known = last.mark == epoch + KNOWN && last.parts[2] == 0 && last.parts[0] == last.parts[1];
        if (!any(!known)) return __uint_as_float(last.parts[0]);  // the common case
        return behind <= 8 ? walk_back<2>() : walk_back<8>();
    }
    // Deterministic: from the nearest prefix on, however far back, it is the same sequence of multiply-adds.  Loads are
    // unconditional, to be in flight at once; those past the first tile repeat it.
    template <int ROUNDS> __device__ float walk_back() const {
        const int lane = threadIdx.x % 32, first = lane & ~3;
        for (unsigned polls = 0; polls < MOST_POLLS; ++polls) {
            Message messages[ROUNDS];
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round)
                messages[round] = load_message(here - min(4 * round + lane % 4 + 1, chunk) * pitch);
            unsigned known = 0, missing = 0;  // missing: absent, or a prefix for some channels only
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const Mark mark = messages[round].since(epoch);
                const unsigned open = any(mark != KNOWN);
                known |= (open ^ 15) << 4 * round;
                missing |= (any(mark == ABSENT) | open & any(mark == KNOWN)) << 4 * round;
            }
            if (!known || missing & ((known & -known) - 1)) continue;
            const int nearest = __ffs(known);
            float state = 0;
#pragma unroll
            for (int back = 4 * ROUNDS; back >= 1; --back) {
                const Message& message = messages[(back - 1) / 4];
                const float a = __shfl_sync(~0u, __uint_as_float(message.parts[1]), first + (back - 1) % 4);
                const float b = __shfl_sync(~0u, __uint_as_float(message.parts[0]), first + (back - 1) % 4);
                state = back < nearest ? fma(a, state, b) : b;
            }
            return state;
        }
        __trap();
    }
};

// The steps before which the state is reset.  A warp's lanes load the bytes of a tile's steps long before use, each
// those of some consecutive steps, and share bits of them.
struct Resets {
    static constexpr int EACH = STEPS / 32;
    unsigned byte[EACH];

    __device__ void load(const Parameters& p, const Tile& tile) {
        const int first = threadIdx.x % 32 * EACH, apart = int(p.row_stride);
        const unsigned char* const from = p.resets + tile.row(p, first);
#pragma unroll
        for (int j = 0; RESETS && j < EACH; ++j) byte[j] = first + j >= tile.skip ? from[j * apart] : 0;
    }
    // A bit for each step of a part's two runs, of which each is four lanes'.
    __device__ void share(int part, unsigned (&runs)[2]) const {
        if (!RESETS) return;
        unsigned bits = 0;
#pragma unroll
        for (int j = 0; j < EACH; ++j) bits |= unsigned(byte[j] != 0) << j;
        bits <<= threadIdx.x % 4 * EACH;
        bits |= __shfl_xor_sync(~0u, bits, 1);
        bits |= __shfl_xor_sync(~0u, bits, 2);
#pragma unroll
        for (int i = 0; i < 2; ++i) runs[i] = __shfl_sync(~0u, bits, (2 * part + i) * 4);
    }
};

// A thread's steps, two runs for each channel.  Its rows, two of each accumulator block, are the first gate's channels,
// then the second's.  compose() overwrites the first gate's products with a and the second's with b.
struct Steps {
    float (&d)[BLOCKS][STEPS / 2];
    int begins[2];         // the step of each run at which a sequence begins, RUN for none
    float begin[HELD][2];  // its initial state, for each channel and run
    int skipped[2];        // leading steps of each run that are skipped
    unsigned resets[2];    // bits of the steps before which the state is zero

    // The product of a gate and channel at step j of run i.
    __device__ float& at(int gate, int c, int j, int i) const {
        const int row = gate * HELD + c;
        return d[row / 2][4 * j + row % 2 * 2 + i];
    }
    __device__ bool is_reset(int j, int i) const { return RESETS && resets[i] >> j & 1; }
    // Applies the gates and reduces each channel's runs.  With BETWEEN, sequences and tiles may begin within a run.
    template <bool BETWEEN>
    __device__ void compose(const Element::Channel (&channel)[HELD], Composition (&run)[HELD][2]) const {
#pragma unroll
        for (int c = 0; c < HELD; ++c)
#pragma unroll
            for (int i = 0; i < 2; ++i) run[c][i] = {1, begin[c][i], begins[i] < RUN || (RESETS && resets[i])};
#pragma unroll
        for (int j = 0; j < RUN; ++j)
#pragma unroll
            for (int c = 0; c < HELD; ++c)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    Compute x[GATES];
#pragma unroll
                    for (int gate = 0; gate < GATES; ++gate) x[gate] = at(gate, c, j, i);
                    const Element::Step step = Element::read(x, channel[c], 0, 0);
                    const bool skip = BETWEEN && j < skipped[i];
                    const float a = at(0, c, j, i) = skip ? 1 : step.a, b = at(1, c, j, i) = skip ? 0 : step.b;
                    Composition& all = run[c][i];
                    if (BETWEEN && j == begins[i]) all.b = begin[c][i];
                    if (is_reset(j, i)) all.b = 0;
                    all.a *= a;
                    all.b = fma(a, all.b, b);
                }
    }
    // Computes the states and stores them to shared memory.
    template <bool BETWEEN> __device__ void apply(float (&state)[HELD][2], unsigned to) const {
#pragma unroll
        for (int c = 0; c < HELD; ++c) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (begins[i] == 0) state[c][i] = begin[c][i];
#pragma unroll
            for (int j = 0; j < RUN; j += 4) {
                unsigned pairs[4];
#pragma unroll
                for (int k = j; k < j + 4; ++k) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        if (BETWEEN && k == begins[i]) state[c][i] = begin[c][i];
                        if (is_reset(k, i)) state[c][i] = 0;
                        state[c][i] = fma(at(0, c, k, i), state[c][i], at(1, c, k, i));
                    }
                    pairs[k - j] = pack_pair(state[c][0], state[c][1]);
                }
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                             ::"r"(to + unsigned((j * OWN + c * 8) * sizeof(Scalar))), "r"(pairs[0]), "r"(pairs[1]),
                             "r"(pairs[2]), "r"(pairs[3]) : "memory");
            }
        }
    }
};

