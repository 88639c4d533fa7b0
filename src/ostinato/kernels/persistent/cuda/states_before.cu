// before[r] is the state before the step of row r: the state of its sequence one step earlier in the order of the
// recurrence, or the initial state; zero where it is reset.  The rows of a step are adjacent, and so are those of the
// same sequences one step earlier.  So a block copies a part of a step in words of type WORD, of which each of its
// THREADS has AHEAD in flight.

using Word = WORD;

struct Arguments {
    const Word *rows, *first;  // (rows, width); (batch, width), the initial states, or null for zeros
    Word* before;
    const int* offsets;           // the first row of each step, then the number of rows; null: `batch` rows a step
    const unsigned char* resets;  // of each row, or null
    int steps, batch, width, parts, reverse;
};

extern "C" __global__ void __launch_bounds__(THREADS) states_before(const __grid_constant__ Arguments p) {
    const auto begin_of = [&](int step) { return p.offsets ? p.offsets[step] : step * p.batch; };
    const int step = blockIdx.x / p.parts, earlier = p.reverse ? step + 1 : step - 1;
    const long long begin = begin_of(step), width = p.width, size = (begin_of(step + 1) - begin) * width;
    long long source = 0, earlier_size = 0;  // the earlier step's first row, and the number of its words
    if (earlier >= 0 && earlier < p.steps) {
        source = begin_of(earlier);
        earlier_size = (begin_of(earlier + 1) - source) * width;
    }
    const long long stride = (long long)p.parts * THREADS * AHEAD;
    for (long long at = (long long)(blockIdx.x % p.parts) * THREADS * AHEAD + threadIdx.x; at < size; at += stride) {
        Word words[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            const long long i = at + k * THREADS;
            words[k] = Word();
            if (i >= size || (p.resets && p.resets[begin + i / width])) continue;
            if (i < earlier_size) words[k] = p.rows[source * width + i];
            else if (p.first) words[k] = p.first[i];
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k)
            if (at + k * THREADS < size) p.before[begin * width + at + k * THREADS] = words[k];
    }
}
