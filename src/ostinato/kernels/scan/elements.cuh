// What is scanned: for each operation, how one time step's inputs become the step of a recurrence.
//
// Forward, a step is (a, b) and the state goes h = a*h + b.  Backward, the state is the gradient s that flows into
// the step before: with g = grad + s the whole gradient of h[t], every input's gradient is g times a factor, and
// s = a*g.  That is again a scan, with b = a*grad, in the other direction.
//
// An Element says how many tensors it reads (PLAIN, and backward also h[t-1] and grad) and writes and whether they
// take a bias, and `read` turns their values at one channel, bias added, into a step.  `neutral` are inputs whose step
// changes nothing.

struct Linear {
    static constexpr bool LINEAR = true;
    static __device__ Compute times(Compute a, Compute b) { return a * b; }
    static __device__ Compute times_plus(Compute a, Compute h, Compute b) { return fma(a, h, b); }
    static __device__ Compute one() { return 1; }
    static __device__ Compute zero() { return 0; }
};

struct Logarithmic {
    static constexpr bool LINEAR = false;
    static __device__ Compute times(Compute a, Compute b) { return a + b; }
    static __device__ Compute times_plus(Compute a, Compute h, Compute b) { return log_add_exp(a + h, b); }
    static __device__ Compute one() { return 0; }
    static __device__ Compute zero() { return -infinity(); }
};

template <typename Ring_> struct Forward {
    using Ring = Ring_;
    static constexpr bool BACKWARD = false;
    static __device__ Compute absent_state() { return Ring::zero(); }
    static constexpr int OUTPUTS = 1;
    struct Step {
        Compute a, b;
        __device__ Compute low() const { return 0; }  // what rounding took from a
        __device__ Compute offset() const { return b; }
        __device__ Compute apply(Compute state, Compute (&out)[OUTPUTS]) const {
            return out[0] = Ring::times_plus(a, state, b);
        }
    };
};

template <int OUTPUTS_> struct Backward {
    using Ring = Linear;
    static constexpr bool BACKWARD = true;
    static __device__ Compute absent_state() { return 0; }
    static constexpr int OUTPUTS = OUTPUTS_;
    struct Step {
        Compute a, grad, factor[OUTPUTS];
        __device__ Compute low() const { return 0; }
        __device__ Compute offset() const { return a * grad; }
        __device__ Compute apply(Compute state, Compute (&out)[OUTPUTS]) const {
            const Compute g = grad + state;
#pragma unroll
            for (int k = 0; k < OUTPUTS; ++k) out[k] = g * factor[k];
            return a * g;
        }
    };
};

// h[t] = a[t] * h[t-1] + b[t]
struct LinearScan : Forward<Linear> {
    static constexpr bool BIASED = false;
    static constexpr int PLAIN = 2;
    static __device__ Compute neutral(int k) { return k == 0 ? 1 : 0; }
    static __device__ Step read(const Compute* x, Compute, Compute) { return {x[0], x[1]}; }
};

struct LinearScanBackward : Backward<2> {
    static constexpr bool BIASED = false;
    static constexpr int PLAIN = 1;
    static __device__ Compute neutral(int k) { return k == 0 ? 1 : 0; }
    static __device__ Step read(const Compute* x, Compute previous, Compute grad) {
        return {x[0], grad, {previous, 1}};
    }
};

// log h[t] = logaddexp(log a[t] + log h[t-1], log b[t])
struct LogLinearScan : Forward<Logarithmic> {
    static constexpr bool BIASED = false;
    static constexpr int PLAIN = 2;
    static __device__ Compute neutral(int k) { return k == 1 ? -infinity() : 0; }
    static __device__ Step read(const Compute* x, Compute, Compute) { return {x[0], x[1]}; }
};

// carried and added, the shares of h[t] that a[t]*h[t-1] and b[t] have, add up to 1.  They are not made from log h: few
// digits are left of the difference of large, rounded states.
struct LogLinearScanBackward : Backward<2> {
    static constexpr bool BIASED = false;
    static constexpr int PLAIN = 2;  // log a, log b
    static __device__ Compute absent_state() { return -infinity(); }
    static __device__ Compute neutral(int k) { return k == 1 ? -infinity() : 0; }
    struct Step : Backward<2>::Step {
        __device__ Compute low() const { return a >= Compute(0.5) ? 1 - a - factor[1] : Compute(0); }
    };
    static __device__ Step read(const Compute* x, Compute previous, Compute grad) {
        const Compute kept = x[0] + previous, ratio = kept - x[1];
        const Compute odds = exponential(ratio < 0 ? ratio : -ratio);
        const Compute large = reciprocal(1 + odds), small = odds * large;
        const bool nothing = kept == -infinity() && x[1] == -infinity();  // passes no gradient back: 0/0 is taken as 0
        const Compute carried = nothing ? 0 : ratio < 0 ? small : large;
        const Compute added = nothing ? 0 : ratio < 0 ? large : small;
        return {{carried, grad, {carried, added}}};
    }
};

// The candidate state and its derivative.  CANDIDATE: 0 "positive", 1 "linear", 2 "tanh".
__device__ inline Compute candidate_state(Compute x, Compute& derivative) {
    if constexpr (CANDIDATE == 0) {
        const Compute s = sigmoid(x);
        derivative = x >= 0 ? 1 : s * (1 - s);
        return x >= 0 ? x + Compute(0.5) : s;
    } else if constexpr (CANDIDATE == 1) {
        derivative = 1;
        return x;
    } else {
        const Compute t = hyperbolic_tangent(x);
        derivative = (1 - t) * (1 + t);
        return t;
    }
}

// z = sigmoid(x[0]), c = candidate(x[1]), h[t] = (1-z)*h[t-1] + z*c
struct MinGRU : Forward<Linear> {
    static constexpr bool BIASED = true;
    static constexpr int PLAIN = 2;
    static __device__ Compute neutral(int k) { return k == 0 ? -infinity() : 0; }
    static __device__ Step read(const Compute* x, Compute, Compute) {
        Compute derivative;
        const Compute z = sigmoid(x[0]);
        return {1 - z, z * candidate_state(x[1], derivative)};
    }
};

struct MinGRUBackward : Backward<2> {
    static constexpr bool BIASED = true;
    static constexpr int PLAIN = 2;
    static __device__ Compute neutral(int k) { return k == 0 ? -infinity() : 0; }
    static __device__ Step read(const Compute* x, Compute previous, Compute grad) {
        Compute derivative;
        const Compute z = sigmoid(x[0]), c = candidate_state(x[1], derivative);
        return {1 - z, grad, {(c - previous) * z * (1 - z), z * derivative}};
    }
};

// f = sigmoid(x[0]), i = sigmoid(x[1]), c = candidate(x[2]), h[t] = f/(f+i)*h[t-1] + i/(f+i)*c.
// f/(f+i) = (1+e^-i) / (2 + e^-i + e^-f); every term is scaled by e^-max(0, -f, -i), so none overflows and the
// largest is 1.
struct NormalisedGates {
    Compute forget, input, forget_slope, input_slope;  // slopes: d forget / d f_pre, -d forget / d i_pre

    __device__ NormalisedGates(Compute f, Compute i) {
        f = finite(f), i = finite(i);
        const Compute low = f < i ? f : i, scale = low < 0 ? low : 0;
        const Compute unit = exponential(scale), ef = exponential(scale - f), ei = exponential(scale - i);
        const Compute p = unit + ei, q = unit + ef, r = reciprocal(p + q);
        forget = p * r, input = q * r;
        forget_slope = forget * (ef * r), input_slope = input * (ei * r);
    }
};

struct MinLSTM : Forward<Linear> {
    static constexpr bool BIASED = true;
    static constexpr int PLAIN = 3;
    static __device__ Compute neutral(int k) { return k == 0 ? infinity() : k == 1 ? -infinity() : 0; }
    static __device__ Step read(const Compute* x, Compute, Compute) {
        Compute derivative;
        const NormalisedGates gate(x[0], x[1]);
        return {gate.forget, gate.input * candidate_state(x[2], derivative)};
    }
};

struct MinLSTMBackward : Backward<3> {
    static constexpr bool BIASED = true;
    static constexpr int PLAIN = 3;
    static __device__ Compute neutral(int k) { return k == 0 ? infinity() : k == 1 ? -infinity() : 0; }
    static __device__ Step read(const Compute* x, Compute previous, Compute grad) {
        Compute derivative;
        const NormalisedGates gate(x[0], x[1]);
        const Compute c = candidate_state(x[2], derivative), difference = previous - c;
        return {gate.forget, grad,
                {difference * gate.forget_slope, -difference * gate.input_slope, gate.input * derivative}};
    }
};
