// Carries a state through shards that are reduced to h -> P*h + L, in order; writes the state that enters shard `of`
// and the last state.

using Index = long long;

struct Parameters {
    const double* P;  // (parts, numbers); the rows of P, and of L, are `stride` elements apart
    const double* L;
    const Scalar* start;  // (numbers), or null: zero
    Scalar* before;       // the state entering shard `of`
    Scalar* last;
    Index stride;
    int parts, numbers, of, reverse;
};

extern "C" __global__ void __launch_bounds__(THREADS) pass_on(const __grid_constant__ Parameters p) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.numbers) return;
    double state = p.start ? double(widen(p.start[i])) : 0;
    for (int k = 0; k < p.parts; ++k) {
        const int part = p.reverse ? p.parts - 1 - k : k;
        if (part == p.of) p.before[i] = Scalar(Compute(state));
        state = fma(p.P[part * p.stride + i], state, p.L[part * p.stride + i]);
    }
    p.last[i] = Scalar(Compute(state));
}
