// In place of the cell that is generated from a recurrence of the user's own: RNN, GRU and LSTM have none.  It is
// printed by recurrence/weighted/cell.py and has these members:
//
// STATES        one or two, h first
// SEQUENCES     the function's arguments that are given at every step; to the first PRODUCTS of them, the products of
//               the recurrent matrix with h are added
// PARAMETERS    its arguments that are the same at every step
// DERIVATIVES   of a step, those that are kept until the gradients of its states arrive

struct Generated {
    static constexpr int STATES = 0, PRODUCTS = 0, SEQUENCES = 1, PARAMETERS = 0, DERIVATIVES = 0;

    // The states after a step, from those before it, the sequences, to which products have been added, and parameters.
    static __device__ void forward(const float* before, const float* x, const float* parameter, float* after) {}
    // The derivatives of these states, as far as they are not constant.
    static __device__ void differentiate(const float* before, const float* x, const float* parameter, float* slope) {}
    // The gradients of the states before, and of the sequences and then the parameters, from those of the states after.
    static __device__ void pull(const float* slope, const float* grad, float* of_states, float* of_arguments) {}
};
