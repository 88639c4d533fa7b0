// Reduces many steps of h = a*h + b to one, P*h + L, without writing states.
//
// A block reduces a tile of some steps of GROUP adjacent channels.  The tile is split along time into STRIPS strips,
// each reduced serially by LANES threads; a tree reduction combines them.  If there are several tiles, a second launch
// reduces their results.

using Scalar = SCALAR;
using Index = long long;

constexpr int STRIPS = THREADS / LANES;  // the LANES threads of a strip span the channels, VEC each
constexpr int GROUP = LANES * VEC;
constexpr bool EXTENDED = sizeof(Scalar) == 4;  // products of floats keep their rounding error, as in composition.cuh

struct alignas(sizeof(Scalar) * VEC) Pack { Scalar value[VEC]; };

struct Parameters {
    const Scalar* a;
    const Scalar* b;
    const unsigned char* resets;  // a byte per step, nonzero if the state before it is zero; or null
    double* P;  // (batch, tiles, channels)
    double* L;
    double least;  // any smaller |P| would underflow in Scalar, and becomes zero
    Index a_batch, a_time, b_batch, b_time, resets_batch, resets_time;
    int batch, steps, channels, tile, tiles, reverse;
    int before;  // b is added before a is multiplied: a * (h + b)
};

extern "C" __global__ void __launch_bounds__(THREADS) compose(const __grid_constant__ Parameters p) {
    __shared__ double shared_P[STRIPS][GROUP], shared_L[STRIPS][GROUP];
    const int groups = (p.channels + GROUP - 1) / GROUP;
    const int group = blockIdx.x % groups, number = blockIdx.x / groups % p.tiles, row = blockIdx.x / groups / p.tiles;
    const int lane = threadIdx.x % LANES, strip = threadIdx.x / LANES, channel = group * GROUP + lane * VEC;
    const bool inside = channel < p.channels;

    // Steps are numbered in scan order.
    const int of_tile = min(p.tile, p.steps - number * p.tile), length = (of_tile + STRIPS - 1) / STRIPS;
    const int begin = number * p.tile + min(strip * length, of_tile);
    const int end = number * p.tile + min((strip + 1) * length, of_tile);
    const auto time = [&](int step) { return Index(p.reverse ? p.steps - 1 - step : step); };
    const Scalar* const a = p.a + row * p.a_batch + channel;
    const Scalar* const b = p.b + row * p.b_batch + channel;

    Scalar product[VEC], low[VEC], state[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) product[v] = 1, low[v] = state[v] = 0;
    for (int step = begin; inside && step < end; step += AHEAD) {
        Pack factors[AHEAD], terms[AHEAD];
        bool reset[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            if (step + u >= end) continue;
            const Index t = time(step + u);
            factors[u] = *reinterpret_cast<const Pack*>(a + t * p.a_time);
            terms[u] = *reinterpret_cast<const Pack*>(b + t * p.b_time);
            reset[u] = p.resets && p.resets[row * p.resets_batch + t * p.resets_time];
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            if (step + u >= end) continue;
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                if (reset[u]) product[v] = low[v] = state[v] = 0;
                const Scalar next = factors[u].value[v], term = terms[u].value[v];
                state[v] = p.before ? next * (state[v] + term) : fma(next, state[v], term);
                const Scalar longer = next * product[v];
                const Scalar rest = EXTENDED ? fma(next, low[v], fma(next, product[v], -longer)) : 0;
                low[v] = rest - rest == 0 ? rest : 0;  // it is not finite after an overflow
                product[v] = longer;
            }
        }
    }

    double P[VEC], L[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) P[v] = double(product[v]) + low[v], L[v] = state[v];
    for (int apart = 1; apart < STRIPS; apart *= 2) {
        if (strip % (2 * apart) == apart) {
#pragma unroll
            for (int v = 0; v < VEC; ++v)
                shared_P[strip][lane * VEC + v] = P[v], shared_L[strip][lane * VEC + v] = L[v];
        }
        __syncthreads();
        if (strip % (2 * apart) == 0) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                const double next = shared_P[strip + apart][lane * VEC + v];
                L[v] = fma(next, L[v], shared_L[strip + apart][lane * VEC + v]);
                P[v] *= next;
            }
        }
    }
    if (strip > 0 || !inside) return;
    const Index at = (Index(row) * p.tiles + number) * p.channels + channel;
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        p.P[at + v] = fabs(P[v]) < p.least ? 0 : P[v];
        p.L[at + v] = L[v];
    }
}
