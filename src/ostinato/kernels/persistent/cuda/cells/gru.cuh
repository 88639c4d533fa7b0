// GRU: r = σ(x_r + s_r), z = σ(x_z + s_z), n = tanh(x_n + r * s_n), h' = (1 - z) * n + z * h
//
// The backward pass needs both parts of the candidate's argument, x_n and s_n.  Of the four gradients, the first is
// that of s_n and the last that of x_n, so that the gradients of x are adjacent, and so are those of s.

struct Cell {
    static constexpr int STATES = 1, PRODUCTS = 3, INPUTS = 3, PARAMETERS = 0, DERIVATIVES = 5, GRADIENTS = 4;
    static constexpr Kept KEPT = Kept::RECURRENT;
    static constexpr bool HAS_BIASES = true;
    static __device__ constexpr int of_product(int gate) { return (gate + 1) % 3; }

    static __device__ void forward(
        const Compute* before, Compute* x, const Compute* s, const Compute*, Compute* after
    ) {
        x[0] += s[0], x[1] += s[1];
        const Compute reset = sigmoid(x[0]), update = sigmoid(x[1]);
        const Compute candidate = hyperbolic_tangent(x[2] + reset * s[2]);
        after[0] = candidate + update * (before[0] - candidate);
        after[1] = s[2];
    }
    static __device__ void differentiate(
        const Compute* before, const Compute* after, const Compute* x, const Compute*, Compute* slope
    ) {
        const Compute reset = sigmoid(x[0]), update = sigmoid(x[1]), recurrent = after[1];
        const Compute candidate = hyperbolic_tangent(x[2] + reset * recurrent);
        slope[0] = recurrent * reset * (1 - reset);
        slope[1] = (before[0] - candidate) * update * (1 - update);
        slope[2] = (1 - update) * (1 - candidate * candidate);
        slope[3] = reset, slope[4] = update;
    }
    static __device__ void pull(const Compute* slope, const Compute* grad, Compute* of_states, Compute* of_arguments) {
        const Compute of_candidate = grad[0] * slope[2];
        of_arguments[0] = of_candidate * slope[3];
        of_arguments[1] = of_candidate * slope[0];
        of_arguments[2] = grad[0] * slope[1];
        of_arguments[3] = of_candidate;
        of_states[0] = grad[0] * slope[4];
    }
};
