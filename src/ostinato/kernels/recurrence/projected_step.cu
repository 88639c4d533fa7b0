// One step of a layer whose gates depend only on the input: GEMV and the next state, in one launch.
//
// A warp computes one channel of all sequences; its lanes split the inputs.  x is (BATCH, inputs), the weights
// (gates * channels, inputs), the states (BATCH, channels), all contiguous.  A lane loads VEC numbers at once.

using Element = ELEMENT;
constexpr int GATES = Element::PLAIN;

struct Parameters {
    const Pack *x, *weight;
    const Scalar *bias, *before;  // null if absent
    Scalar* next;
    int packs, channels;  // packs: of a row's inputs
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) projected_step(const Parameters p) {
    const int lane = threadIdx.x % 32, channel = blockIdx.x * WARPS + threadIdx.x / 32;
    if (channel >= p.channels) return;
    const Pack* row[GATES];
    Compute gate[GATES];  // of sequence `lane`, whose state this lane computes
#pragma unroll
    for (int g = 0; g < GATES; ++g) {
        const size_t at = size_t(g) * p.channels + channel;
        row[g] = p.weight + at * p.packs;
        gate[g] = p.bias ? widen(p.bias[at]) : Compute(0);
    }
    const size_t mine = size_t(lane) * p.channels + channel;
    const Compute before = p.before && lane < BATCH ? widen(p.before[mine]) : Element::absent_state();

    Compute sum[GATES][BATCH] = {};
#pragma unroll(BATCH > 2 ? 2 : 8)
    for (int i = lane; i < p.packs; i += 32) {
        Compute x[BATCH][VEC], weight[VEC];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) unpack(p.x[size_t(b) * p.packs + i], x[b]);
#pragma unroll
        for (int g = 0; g < GATES; ++g) {
            unpack(row[g][i], weight);
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
#pragma unroll
                for (int v = 0; v < VEC; ++v) sum[g][b] = fma(weight[v], x[b][v], sum[g][b]);
        }
    }
#pragma unroll
    for (int g = 0; g < GATES; ++g)
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            Compute whole = sum[g][b];
#pragma unroll
            for (int far = 16; far > 0; far /= 2) whole += __shfl_xor_sync(~0u, whole, far);
            if (lane == b) gate[g] += whole;
        }
    if (lane >= BATCH) return;
    Compute state[1];
    Element::read(gate, Element::prepare(nullptr), before, 0).apply(before, state);
    p.next[mine] = Scalar(state[0]);
}
