// One step of a recurrent layer for few sequences: both products and the cell, in one launch.
//
// A warp computes one hidden unit of up to BATCH sequences; its lanes split the sums over inputs and state.  All groups
// of sequences of a unit are neighbouring warps, which find its weights in the L1 cache.  x is (batch, inputs), states
// are (batch, units), and weights (GATES * units, inputs or units), all contiguous.  A lane loads VEC numbers at once.

constexpr int GATES = Cell::PRODUCTS;

struct Parameters {
    const Pack *x, *h, *weight_ih, *weight_hh;
    const Scalar *bias_ih, *bias_hh;  // null if absent; h and c are null for zeros
    const Scalar* c;                  // as next_c, of a cell with two states
    Scalar *next_h, *next_c, *output;
    int inputs, units, batch, groups;
};

__device__ inline Compute state_at(const Scalar* state, size_t at) { return state ? widen(state[at]) : Compute(0); }

extern "C" __global__ void __launch_bounds__(32 * WARPS) step(const Parameters p) {
    const int lane = threadIdx.x % 32, warp = blockIdx.x * WARPS + threadIdx.x / 32;
    const int unit = warp / p.groups, first = warp % p.groups * BATCH, sequences = min(BATCH, p.batch - first);
    if (unit >= p.units) return;
    const int packs_ih = p.inputs / VEC, packs_hh = p.units / VEC;
    const Pack *of_state = p.weight_hh + size_t(unit) * packs_hh, *of_input = p.weight_ih + size_t(unit) * packs_ih;
    Compute from_state[GATES][BATCH] = {}, from_input[GATES][BATCH] = {};
    if (p.h) {
        const Pack* own = p.h + size_t(first) * packs_hh;
        add_products(from_state, of_state, size_t(p.units) * packs_hh, own, packs_hh, sequences);
    }
    const Pack* own = p.x + size_t(first) * packs_ih;
    add_products(from_input, of_input, size_t(p.units) * packs_ih, own, packs_ih, sequences);
    Compute x[GATES], s[GATES];
#pragma unroll
    for (int g = 0; g < GATES; ++g) {
        x[g] = p.bias_ih ? widen(p.bias_ih[g * p.units + unit]) : Compute(0);
        s[g] = p.bias_hh ? widen(p.bias_hh[g * p.units + unit]) : Compute(0);
    }
    reduce(from_state, s);
    reduce(from_input, x);
    if (lane >= sequences) return;

    const size_t at = size_t(first + lane) * p.units + unit;
    const Compute before[] = {state_at(reinterpret_cast<const Scalar*>(p.h), at), state_at(p.c, at)};
    Compute after[2];
    Cell::forward(before, x, s, nullptr, after);
    if (Cell::STATES == 2) p.next_c[at] = Scalar(after[1]);
    p.next_h[at] = p.output[at] = Scalar(after[0]);
}
