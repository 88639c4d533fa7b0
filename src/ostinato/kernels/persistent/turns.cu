// The forward kernel of blocks that compute two groups of sequences in turn: while the states of one are on their way
// from block to block, the other is multiplied and updated.
//
// Each group has its own sums and its own items in every thread; the weights serve both.  Before a group's sums are
// written again, the other's barrier has come after they were read.

struct Turn {
    Units units;
    Rows rows;
    float *sums;
    char *state;  // the group's, before the step

    __device__ Turn(const Parameters &p, const Product &product, int block, int group, float *sums)
        : units(p, product, block, own(p, block, group)), rows(p, step_of(p, 0)), sums(sums),
          state(p.states + size_t(group) * GROUP_BYTES) {}

    __device__ static Block own(const Parameters &p, int block, int group) {
        return {block * UNITS, group * COLUMNS, min(COLUMNS, p.batch - group * COLUMNS), int(threadIdx.x)};
    }

    // Stores what the last step left, and loads what this one takes.
    __device__ void begin(const Parameters &p, int taken, size_t stride) {
        if (taken) units.write(rows);
        units.forget();
        rows = Rows(p, step_of(p, taken));
        units.fetch(rows);
        if (taken + PREFETCH < p.steps)
            units.prefetch_step(Rows(p, step_of(p, taken + PREFETCH)), state + (PREFETCH + 1) * stride);
    }

    __device__ void ask(const Parameters &p, Product &product, int taken) {
        product.ask(state, taken);
        units.resets.look_up(p, units, taken + 1);
    }
};

// grid: BLOCKS blocks for each two groups of COLUMNS sequences, all resident at once
extern "C" __global__ void __launch_bounds__(THREADS, 1) recur(const Parameters p) {
    extern __shared__ uint4 shared[];
    const int block = blockIdx.x % BLOCKS, group = p.first / COLUMNS + blockIdx.x / BLOCKS * TURNS;
    const size_t stride = size_t(p.groups) * GROUP_BYTES;

    float *sums = reinterpret_cast<float *>(shared);
    Product product(p, block, shared + TURNS * SUMS / 4);
    Turn turns[TURNS] = {Turn(p, product, block, group, sums), Turn(p, product, block, group + 1, sums + SUMS)};
    Patience patience(p.failure);

    for (Turn &turn : turns) turn.begin(p, 0, stride);
    turns[0].ask(p, product, 0);
    for (int taken = 0; taken < p.steps; ++taken) {
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            Turn &turn = turns[i], &other = turns[1 - i];
            product(turn.sums, patience);
            if (taken + i < p.steps) other.ask(p, product, taken + i);
            __syncthreads();
            turn.state += to_next_buffer(taken) * ptrdiff_t(stride);
            turn.units.update(turn.rows, product, turn.sums, turn.state, taken);
            if (taken + 1 < p.steps) turn.begin(p, taken + 1, stride);
        }
    }
    for (Turn &turn : turns) turn.units.write(turn.rows), turn.units.finish();
}
