// One layer and direction of an RNN, GRU or LSTM: all steps in one launch, recurrent weights on the chip throughout.
//
// Product multiplies the recurrent matrix with the previous state and leaves partial sums in shared memory; Units
// adds them up, updates the block's own hidden units and publishes them.

constexpr int PREFETCH = 4;  // steps

// The hidden units of this block: a thread owns up to ITEMS pairs of a unit and a sequence.
struct Units {
    static constexpr int ITEMS = (UNITS * COLUMNS + THREADS - 1) / THREADS;

    const Parameters &p;
    int first, column, columns;  // first unit; first sequence and how many
    float h[ITEMS], c[ITEMS], bias[ITEMS];
    Scalar projected[ITEMS][GATES];
    Span spans[ITEMS][GATES];

    __device__ Units(const Parameters &p, const Product &product, int block, int column, int columns)
        : p(p), first(block * UNITS), column(column), columns(columns) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            h[i] = c[i] = bias[i] = 0;
            if (!owned(i)) continue;
#pragma unroll
            for (int g = 0; g < GATES; ++g) spans[i][g] = product.span(p, block, g * UNITS + unit(i));
            if (p.h0) h[i] = widen(p.h0[place(0, i)]);
            if (p.c0) c[i] = widen(p.c0[place(0, i)]);
            if (p.bias) bias[i] = widen(p.bias[first + unit(i)]);
        }
    }

    __device__ static int item(int i) { return i * THREADS + threadIdx.x; }
    __device__ static int unit(int i) { return item(i) % UNITS; }
    __device__ static int sequence(int i) { return item(i) / UNITS; }
    __device__ bool owned(int i) const { return sequence(i) < columns && first + unit(i) < HIDDEN; }

    // Where this thread's unit is in (rows, gates * HIDDEN), from the `row` of the batch's first sequence on.
    __device__ size_t place(size_t row, int i, int gates = 1) const {
        return (row + column) * gates * HIDDEN + (sequence(i) * gates * HIDDEN + first + unit(i));
    }
    __device__ const Scalar *projected_of(int step, int i) const {
        return p.projected + place(size_t(step) * p.batch, i, GATES);
    }

    __device__ void fetch(int step) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (!owned(i)) continue;
#pragma unroll
            for (int g = 0; g < GATES; ++g) projected[i][g] = __ldcs(projected_of(step, i) + g * HIDDEN);
        }
    }

    __device__ float next(int i, const Product &product, const float *sums) {
        float x[GATES], s[GATES];
#pragma unroll
        for (int g = 0; g < GATES; ++g) {
            x[g] = widen(projected[i][g]);
            s[g] = product.sum(sums, spans[i][g], g * UNITS + unit(i), sequence(i));
        }
        if constexpr (CELL == RNN_TANH) return hyperbolic_tangent(x[0] + s[0]);
        if constexpr (CELL == RNN_RELU) return x[0] + s[0] < 0 ? 0 : x[0] + s[0];
        if constexpr (CELL == GRU) {
            const float reset = sigmoid(x[0] + s[0]), update = sigmoid(x[1] + s[1]);
            const float candidate = hyperbolic_tangent(x[2] + reset * (s[2] + bias[i]));
            return candidate + update * (h[i] - candidate);
        }
        if constexpr (CELL == LSTM) {
            const float input = sigmoid(x[0] + s[0]), forget = sigmoid(x[1] + s[1]);
            c[i] = forget * c[i] + input * hyperbolic_tangent(x[2] + s[2]);
            return sigmoid(x[3] + s[3]) * hyperbolic_tangent(c[i]);
        }
    }

    __device__ int state_place(int i) const { return place_of((first + unit(i)) * sizeof(Scalar), sequence(i)); }
    __device__ bool begins_word(int i) const {
        const bool exists = sequence(i) < columns && first + unit(i) < PITCH;
        return exists && unit(i) % (HALF_WORDS ? WORD / 2 : WORD) == 0;
    }

    __device__ void update(const Product &product, const float *sums, char *state) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (i * THREADS + warp_id() * 32 >= UNITS * COLUMNS) continue;
            h[i] = owned(i) ? next(i, product, sums) : 0;
            publish(h[i], begins_word(i), state + state_place(i));
        }
    }

    // Warps without units wait until the others have published theirs, which takes as long in other blocks.  Who looks
    // for the state too early has to look again, and that takes as long once more.
    __device__ static void wait_for_update() {
        if (UNITS * COLUMNS <= THREADS - 32) __syncthreads();
    }

    __device__ void write(int step) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (owned(i)) p.output[place(size_t(step) * p.batch, i)] = bits(h[i]);
    }

    // What this block will read and write at a later step comes into the cache.  Loads return in order: one that had
    // to wait for memory would keep those waiting that look for the state.
    __device__ void prefetch(int step, const char *state) const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (begins_word(i)) asm volatile("prefetch.global.L2 [%0];" :: "l"(state + state_place(i)));
            if (!owned(i)) continue;
#pragma unroll
            for (int g = 0; g < GATES; ++g)
                asm volatile("prefetch.global.L2 [%0];" :: "l"(projected_of(step, i) + g * HIDDEN));
        }
    }

    __device__ void finish() const {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (!owned(i)) continue;
            p.h_n[place(0, i)] = bits(h[i]);
            if (CELL == LSTM) p.c_n[place(0, i)] = bits(c[i]);
        }
    }
};

// grid: as many groups of BLOCKS blocks as there are groups of COLUMNS sequences, all resident at once
extern "C" __global__ void __launch_bounds__(THREADS, 1) persistent(const Parameters p) {
    extern __shared__ uint4 shared[];
    const int block = blockIdx.x % BLOCKS, group = p.first / COLUMNS + blockIdx.x / BLOCKS;
    const int columns = min(COLUMNS, p.batch - group * COLUMNS);

    float *all_sums = reinterpret_cast<float *>(shared);  // two, by the step's parity: one is read, the other written
    Product product(p, block, shared + SUMS / 2);
    Units units(p, product, block, group * COLUMNS, columns);
    Patience patience(p.failure);
    const size_t stride = size_t(p.groups) * GROUP_BYTES;
    char *state = p.states + size_t(group) * GROUP_BYTES;

    units.fetch(p.reverse ? p.steps - 1 : 0);
    for (int taken = 0; taken < p.steps; ++taken, state += stride) {
        const int step = p.reverse ? p.steps - 1 - taken : taken;
        float *sums = all_sums + taken % 2 * SUMS;
        product(state, columns, sums, patience);
        __syncthreads();
        units.update(product, sums, state + stride);
        units.wait_for_update();
        units.write(step);
        if (taken + 1 < p.steps) units.fetch(p.reverse ? step - 1 : step + 1);
        if (taken + PREFETCH < p.steps)
            units.prefetch(p.reverse ? step - PREFETCH : step + PREFETCH, state + PREFETCH * stride);
    }
    units.finish();
}

// Fills the states: the first with h0, the others with what no block writes.
extern "C" __global__ void __launch_bounds__(THREADS) prepare(const Parameters p) {
    const size_t row = size_t(p.groups) * GROUP_BYTES / 8, words = (p.steps + size_t(1)) * row;
    const size_t stride = size_t(gridDim.x) * THREADS;
    for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; i < words; i += stride) {
        Word word = ABSENT;
        if (i < row) {
            word = 0;
            const int place = i * 8 % GROUP_BYTES, line = place / CHUNK;
            const int sequence = i * 8 / GROUP_BYTES * COLUMNS + line % COLUMNS;
            const int unit = (line / COLUMNS * CHUNK + place % CHUNK) / sizeof(Scalar);
            for (int j = 0; p.h0 && sequence < p.batch && j < WORD && unit + j < HIDDEN; ++j)
                word |= Word(bits(widen(p.h0[size_t(sequence) * HIDDEN + unit + j]))) << (j * 8 * sizeof(Scalar));
        }
        reinterpret_cast<Word *>(p.states)[i] = word;
    }
}
