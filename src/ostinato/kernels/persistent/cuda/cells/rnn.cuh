// RNN: h' = nonlinearity(x + s)

struct Cell {
    static constexpr int STATES = 1, PRODUCTS = 1, INPUTS = 1, PARAMETERS = 0, DERIVATIVES = 1, GRADIENTS = 1;
    static constexpr Kept KEPT = Kept::NOTHING;
    static constexpr bool HAS_BIASES = true;
    static __device__ constexpr int of_product(int) { return 0; }

    static __device__ void forward(const Compute*, Compute* x, const Compute* s, const Compute*, Compute* after) {
        after[0] = Nonlinearity::of(x[0] + s[0]);
    }
    static __device__ void differentiate(
        const Compute*, const Compute*, const Compute* h, const Compute*, Compute* slope
    ) {
        slope[0] = Nonlinearity::slope(h[0]);
    }
    static __device__ void pull(const Compute* slope, const Compute* grad, Compute* of_states, Compute* of_arguments) {
        of_arguments[0] = grad[0] * slope[0];
        of_states[0] = 0;
    }
};
