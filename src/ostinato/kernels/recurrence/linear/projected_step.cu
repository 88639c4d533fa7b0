// One step of a layer whose gates depend only on the input: GEMV and the next state, in one launch.
//
// A warp computes one channel of BATCH sequences; its lanes split the inputs.  The groups of sequences of a channel are
// neighbouring warps, which find its weights in the L1 cache.  x is (batch, inputs), the weights (gates * channels,
// inputs), the states (batch, channels), all contiguous.  A lane loads VEC numbers at once.

using Element = ELEMENT;
constexpr int GATES = Element::PLAIN;

struct Parameters {
    const Pack *x, *weight;
    const Scalar *bias, *before;  // null if absent
    Scalar* next;
    int packs, channels, batch, groups;  // packs: of a row's inputs
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) projected_step(const Parameters p) {
    const int lane = threadIdx.x % 32, warp = blockIdx.x * WARPS + threadIdx.x / 32;
    const int channel = warp / p.groups, first = warp % p.groups * BATCH, sequences = min(BATCH, p.batch - first);
    if (channel >= p.channels) return;
    Compute sum[GATES][BATCH] = {}, gate[GATES];  // the gates of sequence `lane` of the group
#pragma unroll
    for (int g = 0; g < GATES; ++g) gate[g] = p.bias ? widen(p.bias[size_t(g) * p.channels + channel]) : Compute(0);
    const size_t mine = size_t(first + lane) * p.channels + channel;
    const Compute before = p.before && lane < sequences ? widen(p.before[mine]) : Element::absent_state();
    const Pack *rows = p.weight + size_t(channel) * p.packs, *x = p.x + size_t(first) * p.packs;
    add_products(sum, rows, size_t(p.channels) * p.packs, x, p.packs, sequences);
    reduce(sum, gate);
    if (lane >= sequences) return;
    Compute state[1];
    Element::read(gate, Element::prepare(nullptr), before, 0).apply(before, state);
    p.next[mine] = Scalar(state[0]);
}
