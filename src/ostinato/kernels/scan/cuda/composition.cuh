// The composition of consecutive steps into one: tiles are reduced to compositions, and blocks exchange them.

struct alignas(sizeof(Compute) * VEC) Channels { Compute value[VEC]; };

// Floats are so coarse near 1 that products of gates there are all rounded in the same direction, and the bias
// accumulates over time (4e-5 at T = 65,536 for gates within 1e-4 of 1).  So a product of floats keeps its rounding
// error, as the unevaluated sum a + low.
constexpr bool EXTENDED = sizeof(Scalar) == 4 && Ring::LINEAR;

// The composition of consecutive steps.
struct Composition {
    Channels a, low, b;
    bool reset;  // whether a packed sequence begins in it or the state is reset: the state before does not matter then

    __device__ static Composition none() {
        Composition c;
        c.reset = false;
#pragma unroll
        for (int v = 0; v < VEC; ++v) c.a.value[v] = Ring::one(), c.low.value[v] = 0, c.b.value[v] = Ring::zero();
        return c;
    }
    // a * h + b for one channel.
    __device__ Compute apply(int v, Compute h) const {
        return Ring::times_plus(a.value[v], h, EXTENDED ? fma(low.value[v], h, b.value[v]) : b.value[v]);
    }
    // Append a step; call `settle` after the last one.
    __device__ void append(int v, const Step& step) {
        if (!Step::EXACT) return append(v, step.a, step.low(), step.offset());
        const Compute product = Ring::times(step.a, a.value[v]);
        if (EXTENDED) low.value[v] = fma(step.a, low.value[v], fma(step.a, a.value[v], -product));
        a.value[v] = product;
        b.value[v] = Ring::times_plus(step.a, b.value[v], step.offset());
    }
    __device__ void settle() {
        if (!EXTENDED) return;
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            if (!(absolute(low.value[v]) < infinity())) low.value[v] = 0;  // it is not finite after an overflow
    }
    // Append a composition that has a low part.
    __device__ void append(int v, Compute next_a, Compute next_low, Compute next_b) {
        const Compute product = Ring::times(next_a, a.value[v]);
        if (EXTENDED) {
            const Compute rest =
                fma(next_low, a.value[v], fma(next_a, low.value[v], fma(next_a, a.value[v], -product)));
            low.value[v] = absolute(rest) < infinity() ? rest : 0;
            next_b = fma(next_low, b.value[v], next_b);
        }
        a.value[v] = product;
        b.value[v] = Ring::times_plus(next_a, b.value[v], next_b);
    }
    __device__ void carry(Channels& state) const {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const Compute carried = apply(v, state.value[v]);
            state.value[v] = FORGETS && reset ? b.value[v] : carried;
        }
    }
    __device__ Composition after(const Composition& first) const {
        Composition both = first;
        both.reset |= FORGETS && reset;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            both.append(v, a.value[v], low.value[v], b.value[v]);
            if (FORGETS && reset) both.b.value[v] = b.value[v];  // `a` is unused then
        }
        return both;
    }
    // Message k of channel v; `take` is the inverse.
    __device__ Message message(int v, int k, unsigned mark) const {
        const Compute numbers[] = {b.value[v], a.value[v], EXTENDED ? low.value[v] : 0};
        const unsigned* const parts = reinterpret_cast<const unsigned*>(numbers);
        return {parts[2 * k], parts[2 * k + 1], MESSAGES == 1 ? parts[2] : 0, mark};
    }
    __device__ void take(int v, const Message (&messages)[MESSAGES]) {
        Compute numbers[3];
        unsigned* const parts = reinterpret_cast<unsigned*>(numbers);
#pragma unroll
        for (int k = 0; k < MESSAGES; ++k)
#pragma unroll
            for (int i = 0; i < 4 - MESSAGES; ++i) parts[2 * k + i] = messages[k].parts[i];
        b.value[v] = numbers[0], a.value[v] = numbers[1], low.value[v] = EXTENDED ? numbers[2] : 0;
    }
    // The composition of the lane `lanes` below this one, without its `reset`.
    __device__ Composition from_lane_below(int lanes) const {
        Composition other;
        other.reset = false;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            other.a.value[v] = __shfl_up_sync(~0u, a.value[v], lanes);
            other.low.value[v] = EXTENDED ? __shfl_up_sync(~0u, low.value[v], lanes) : 0;
            other.b.value[v] = __shfl_up_sync(~0u, b.value[v], lanes);
        }
        return other;
    }
};
