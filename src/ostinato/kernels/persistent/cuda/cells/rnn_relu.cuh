// RNN with relu, which propagates NaN; see rnn.cuh

struct Nonlinearity {
    static __device__ Compute of(Compute x) { return x < 0 ? 0 : x; }
    static __device__ Compute slope(Compute h) { return h > 0 ? 1 : h <= 0 ? 0 : h; }  // its derivative, from its value
};
