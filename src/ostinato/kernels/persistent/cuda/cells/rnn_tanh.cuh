// RNN with tanh; see rnn.cuh

struct Nonlinearity {
    static __device__ Compute of(Compute x) { return hyperbolic_tangent(x); }
    static __device__ Compute slope(Compute h) { return 1 - h * h; }  // its derivative, from its value
};
