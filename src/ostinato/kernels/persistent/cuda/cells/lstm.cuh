// LSTM: i, f, o = σ(x + s), each of its own x and s, g = tanh(x_g + s_g), c' = f * c + i * g, h' = o * tanh(c')
//
// Gates are in PyTorch's order: i, f, g, o.

struct Cell {
    static constexpr int STATES = 2, PRODUCTS = 4, INPUTS = 4, PARAMETERS = 0, DERIVATIVES = 6, GRADIENTS = 4;
    static constexpr Kept KEPT = Kept::CELLS;
    static constexpr bool HAS_BIASES = true;
    static __device__ constexpr int of_product(int gate) { return gate; }

    static __device__ void forward(
        const Compute* before, Compute* x, const Compute* s, const Compute*, Compute* after
    ) {
#pragma unroll
        for (int gate = 0; gate < 4; ++gate) x[gate] += s[gate];
        const Compute input = sigmoid(x[0]), forget = sigmoid(x[1]);
        after[1] = forget * before[1] + input * hyperbolic_tangent(x[2]);
        after[0] = sigmoid(x[3]) * hyperbolic_tangent(after[1]);
    }
    static __device__ void differentiate(
        const Compute* before, const Compute* after, const Compute* x, const Compute*, Compute* slope
    ) {
        const Compute input = sigmoid(x[0]), forget = sigmoid(x[1]), output = sigmoid(x[3]);
        const Compute new_cell = hyperbolic_tangent(x[2]), tanh_cell = hyperbolic_tangent(after[1]);
        slope[0] = new_cell * input * (1 - input);
        slope[1] = before[1] * forget * (1 - forget);
        slope[2] = input * (1 - new_cell * new_cell);
        slope[3] = tanh_cell * output * (1 - output);
        slope[4] = forget;
        slope[5] = output * (1 - tanh_cell * tanh_cell);
    }
    static __device__ void pull(const Compute* slope, const Compute* grad, Compute* of_states, Compute* of_arguments) {
        const Compute of_cell = grad[1] + grad[0] * slope[5];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) of_arguments[gate] = of_cell * slope[gate];
        of_arguments[3] = grad[0] * slope[3];
        of_states[0] = 0;
        of_states[1] = of_cell * slope[4];
    }
};
