// A state through the compositions of all parts, P*h + L each, one after the other: the state before one of them, and
// that after all.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Scalar = SCALAR;
using Index = long long;

struct Parameters {
    const double* P;  // (parts, numbers), `stride` apart, and L
    const double* L;
    const Scalar* start;  // (numbers), or null: zero
    Scalar* before;       // before the part `of`
    Scalar* last;
    Index stride;
    int parts, numbers, of, reverse;
};

extern "C" __global__ void __launch_bounds__(THREADS) pass_on(const __grid_constant__ Parameters p) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.numbers) return;
    double state = p.start ? double(p.start[i]) : 0;
    for (int k = 0; k < p.parts; ++k) {
        const int part = p.reverse ? p.parts - 1 - k : k;
        if (part == p.of) p.before[i] = Scalar(state);
        state = fma(p.P[part * p.stride + i], state, p.L[part * p.stride + i]);
    }
    p.last[i] = Scalar(state);
}
