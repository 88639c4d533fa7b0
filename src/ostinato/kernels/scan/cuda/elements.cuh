// The scanned operations: how each turns one time step's inputs into a step of a linear recurrence.
//
// Forward, a step is (a, b) and the state is h = a*h + b.  Backward, the state is the gradient s that flows to the
// previous time step: with g = grad + s the total gradient of h[t], every input's gradient is g times a factor, and
// s = a*g.  That is again a linear scan, with b = a*grad, in the opposite direction.
//
// An Element states how many tensors it reads (PLAIN; backward also h[t-1] and grad) and writes, and how many
// parameters a channel has.  `prepare` computes once what depends on the parameters alone; `read` makes a step from the
// tensors' values at one channel.  Step::none() is the identity.  The Elements here have no parameters; those generated
// by recurrence/linear/element.py may.

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

struct NoParameters {};

struct WithoutParameters {
    static constexpr bool RAW = false;  // whether `read` is cheap enough to run twice
    static constexpr int PARAMETERS = 0;
    using Channel = NoParameters;
    static __device__ Channel prepare(const Compute*) { return {}; }
    static __device__ constexpr int parameter_factor(int) { return 0; }
};

template <typename Ring_> struct Forward : WithoutParameters {
    using Ring = Ring_;
    static constexpr bool BACKWARD = false;
    static __device__ Compute absent_state() { return Ring::zero(); }
    static constexpr int OUTPUTS = 1, FACTORS = 1;
    static __device__ constexpr int output_factor(int) { return 0; }
    struct Step {
        static constexpr bool EXACT = true;  // a has no rounding error
        Compute a, b;
        static __device__ Step none() { return {Ring::one(), Ring::zero()}; }
        __device__ Compute low() const { return 0; }  // a's rounding error
        __device__ Compute offset() const { return b; }
        __device__ Compute apply(Compute state, Compute (&out)[FACTORS]) const {
            return out[0] = Ring::times_plus(a, state, b);
        }
    };
};

// Outputs with equal gradients share a factor.
template <int OUTPUTS_, int FACTORS_ = OUTPUTS_> struct Backward : WithoutParameters {
    using Ring = Linear;
    static constexpr bool BACKWARD = true;
    static __device__ Compute absent_state() { return 0; }
    static constexpr int OUTPUTS = OUTPUTS_, FACTORS = FACTORS_;
    static __device__ constexpr int output_factor(int k) { return k; }
    struct Step {
        static constexpr bool EXACT = true;
        Compute a, grad, factor[FACTORS];
        static __device__ Step none() { return {1}; }
        __device__ Compute low() const { return 0; }
        __device__ Compute offset() const { return a * grad; }
        __device__ Compute apply(Compute state, Compute (&out)[FACTORS]) const {
            const Compute g = grad + state;
#pragma unroll
            for (int k = 0; k < FACTORS; ++k) out[k] = g * factor[k];
            return a * g;
        }
    };
};

// h[t] = a[t] * h[t-1] + b[t]
struct LinearScan : Forward<Linear> {
    static constexpr bool RAW = true;
    static constexpr int PLAIN = 2;
    static __device__ Step read(const Compute* x, NoParameters, Compute, Compute) { return {x[0], x[1]}; }
};

struct LinearScanBackward : Backward<2> {
    static constexpr bool RAW = true;
    static constexpr int PLAIN = 1;
    static __device__ Step read(const Compute* x, NoParameters, Compute previous, Compute grad) {
        return {x[0], grad, {previous, 1}};
    }
};

// log h[t] = logaddexp(log a[t] + log h[t-1], log b[t])
struct LogLinearScan : Forward<Logarithmic> {
    static constexpr bool RAW = true;
    static constexpr int PLAIN = 2;
    static __device__ Step read(const Compute* x, NoParameters, Compute, Compute) { return {x[0], x[1]}; }
};

// carried and added, the shares of a[t]*h[t-1] and b[t] in h[t], sum to 1.  They are not computed from log h: the
// difference of large, rounded states cancels.
struct LogLinearScanBackward : Backward<2> {
    static constexpr int PLAIN = 2;  // log a, log b
    static __device__ Compute absent_state() { return -infinity(); }
    struct Step : Backward<2>::Step {
        static constexpr bool EXACT = false;
        static __device__ Step none() { return {Backward<2>::Step::none()}; }
        __device__ Compute low() const { return a >= Compute(0.5) ? 1 - a - factor[1] : Compute(0); }
    };
    static __device__ Step read(const Compute* x, NoParameters, Compute previous, Compute grad) {
        const Compute kept = x[0] + previous, ratio = kept - x[1];
        const Compute odds = exponential(ratio < 0 ? ratio : -ratio);
        const Compute large = reciprocal(1 + odds), small = odds * large;
        const bool nothing = kept == -infinity() && x[1] == -infinity();  // a state of zero has no gradient: 0/0 = 0
        const Compute carried = nothing ? 0 : ratio < 0 ? small : large;
        const Compute added = nothing ? 0 : ratio < 0 ? large : small;
        return {{carried, grad, {carried, added}}};
    }
};
