// In place of the cell that is generated from a recurrence of the user's own: RNN, GRU and LSTM have none.

struct Generated {
    static constexpr int STATES = 0, PRODUCTS = 0, SEQUENCES = 1, PARAMETERS = 0, DERIVATIVES = 0;

    // The states after a step, from those before it and what the function is given.
    static __device__ void forward(const float* before, const float* x, const float* parameter, float* after) {}
    // The derivatives of these states, as far as they are not constant.
    static __device__ void differentiate(const float* before, const float* x, const float* parameter, float* slope) {}
    // The gradients of the states before and of what the function is given, from those of the states after.
    static __device__ void pull(const float* slope, const float* grad, float* of_states, float* of_arguments) {}
};
