// ZEROES: scanning a thread's steps of a tile again, where a coefficient of zero met a state that was not finite.

// Recomputes the results from global memory, with a test for a reset at each step, after the other threads have stored
// theirs.  It is not inlined, as code that is hardly ever needed would cost registers.
static __device__ __noinline__ void rescan(
    const Parameters& p, int chain, int chunk, unsigned resets, Channels state
) {
    const Place at(p, chain);
#pragma unroll 1
    for (int u = 0; u < ROWS; ++u, resets >>= 1) {
        const int i = at.first(chunk) + u;
        if (!at.exists(i)) break;
        const bool reset = resets & 1, last = !at.exists(i + 1);
        const auto element = [&](const Tensor& x, int step) {
            return at.sequence(x) + Index(at.time(step)) * x.time + at.channel;
        };
        Bits bits[INPUTS];
#pragma unroll
        for (int k = 0; k < INPUTS; ++k)
            if (BACKWARD && k == PREVIOUS && (reset || last))
                bits[k] = p.h0 && !reset ? load_pack(at, p.h0 + at.state(0)) : filled(Element::absent_state());
            else bits[k] = p.has_input(k) ? load_pack(at, element(p.input(k), i + (BACKWARD && k == PREVIOUS))) : 0;
        Step row[VEC];
        make_row(bits, {}, row);
        Compute out[OUTPUTS][VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            Compute result[FACTORS];
            if (!BACKWARD && reset) state.value[v] = Ring::zero();
            state.value[v] = row[v].apply(state.value[v], result);
            if (BACKWARD && reset) state.value[v] = Ring::zero();
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) out[k][v] = result[Element::output_factor(k)];
        }
#pragma unroll
        for (int k = 0; k < OUTPUTS; ++k) store_pack(at, element(p.output(k), i), pack(out[k]));
        if (last) store_state(at, p.final, 0, state);
    }
}
