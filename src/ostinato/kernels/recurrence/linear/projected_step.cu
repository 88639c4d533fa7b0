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
    Compute sum[GATES][BATCH] = {}, gate[GATES];  // the gates of sequence `lane`, whose state this lane computes
#pragma unroll
    for (int g = 0; g < GATES; ++g) gate[g] = p.bias ? widen(p.bias[size_t(g) * p.channels + channel]) : Compute(0);
    const size_t mine = size_t(lane) * p.channels + channel;
    const Compute before = p.before && lane < BATCH ? widen(p.before[mine]) : Element::absent_state();
    add_products(sum, p.weight + size_t(channel) * p.packs, size_t(p.channels) * p.packs, p.x, p.packs);
    reduce(sum, gate);
    if (lane >= BATCH) return;
    Compute state[1];
    Element::read(gate, Element::prepare(nullptr), before, 0).apply(before, state);
    p.next[mine] = Scalar(state[0]);
}
