// Storage and compute types, and the math functions of kernels.
//
// Scalar is the storage type, Compute the compute type: float for everything up to 32 bits, double for double.  A lane
// loads and stores VEC adjacent channels as one Pack of raw bits, so that 16-bit channels go two at a time.

// 16-bit floating-point types with the conversions that kernels need.  Parsing CUDA's own headers of them takes as long
// as compiling a small kernel.

struct Half {
    unsigned short bits;

    Half() = default;
    static __device__ Half of_bits(unsigned bits) {
        Half x;
        x.bits = bits;
        return x;
    }
    __device__ Half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ operator float() const {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};

struct BFloat16 {
    unsigned short bits;

    BFloat16() = default;
    __device__ BFloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ operator float() const {
        float x;
#if __CUDA_ARCH__ >= 900
        asm("cvt.f32.bf16 %0, %1;" : "=f"(x) : "h"(bits));
#else
        asm("mov.b32 %0, {0, %1};" : "=f"(x) : "h"(bits));
#endif
        return x;
    }
};

// Streaming loads and stores, evicted first from the caches, as CUDA has them for other types.
template <typename T> __device__ inline T load_16_bits_once(const T* from) {
    T x;
    asm("ld.global.cs.b16 %0, [%1];" : "=h"(x.bits) : "l"(from));
    return x;
}
__device__ inline Half __ldcs(const Half* from) { return load_16_bits_once(from); }
__device__ inline BFloat16 __ldcs(const BFloat16* from) { return load_16_bits_once(from); }
template <typename T> __device__ inline void store_16_bits_once(T* to, T x) {
    asm("st.global.cs.b16 [%0], %1;" ::"l"(to), "h"(x.bits) : "memory");
}
__device__ inline void __stcs(Half* to, Half x) { store_16_bits_once(to, x); }
__device__ inline void __stcs(BFloat16* to, BFloat16 x) { store_16_bits_once(to, x); }

using Scalar = SCALAR;

template <typename T> struct ComputeType { using type = float; };
template <> struct ComputeType<double> { using type = double; };
using Compute = ComputeType<Scalar>::type;

constexpr bool NARROW_SCALAR = sizeof(Scalar) == 2;
template <typename T> constexpr bool is_bfloat16 = false;
template <> constexpr bool is_bfloat16<BFloat16> = true;
constexpr bool BFLOAT16 = is_bfloat16<Scalar>;

template <int BYTES> struct PackType;
template <> struct PackType<2> { using type = unsigned short; };
template <> struct PackType<4> { using type = unsigned int; };
template <> struct PackType<8> { using type = unsigned long long; };
using Pack = PackType<sizeof(Scalar) * VEC>::type;

__device__ inline double widen(double x) { return x; }
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(Half x) { return x; }
__device__ inline float widen(BFloat16 x) { return x; }

__device__ inline void unpack(Pack bits, double (&x)[1]) { x[0] = __longlong_as_double(bits); }
__device__ inline Pack pack(const double (&x)[1]) { return __double_as_longlong(x[0]); }

template <int N> __device__ inline void unpack(Pack bits, float (&x)[N]) {
#pragma unroll
    for (int v = 0; v < N; ++v) {
        if constexpr (sizeof(Scalar) == 4) {
            x[v] = __uint_as_float(unsigned(bits >> 16 * v >> 16 * v));
        } else {
            const unsigned pair = unsigned(bits >> 16 * (v & ~1));
            if constexpr (BFLOAT16) x[v] = __uint_as_float(v % 2 ? pair & 0xffff0000u : pair << 16);
            else x[v] = Half::of_bits(v % 2 ? pair >> 16 : pair);
        }
    }
}

// Converts two numbers to adjacent 16-bit ones by one instruction.
__device__ inline unsigned pack_pair(float low, float high) {
    unsigned both;
    if (BFLOAT16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

template <int N> __device__ inline Pack pack(const float (&x)[N]) {
    Pack bits = 0;
    if constexpr (sizeof(Scalar) == 4) {
#pragma unroll
        for (int v = 0; v < N; ++v) bits |= Pack(__float_as_uint(x[v])) << 16 * v << 16 * v;
    } else {
#pragma unroll
        for (int v = 0; v < N; v += 2) bits |= Pack(pack_pair(x[v], v + 1 < N ? x[v + 1] : 0)) << 16 * v;
    }
    return bits;
}

__device__ inline Compute infinity() { return Compute(__longlong_as_double(0x7ff0000000000000)); }

// NaN if either operand is, as in PyTorch.
__device__ inline float minimum(float x, float y) {
    float z;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ inline float maximum(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}
__device__ inline double minimum(double x, double y) { return x < y || x != x ? x : y; }
__device__ inline double maximum(double x, double y) { return x > y || x != x ? x : y; }

// 16-bit results do not need float's last bits, so they use the hardware's approximations if their relative error is
// everywhere a small fraction of half a 16-bit ulp.  tanh.approx is not: its error of 2^-11 would change a gate near 1,
// and so the length of its memory.
constexpr float LOG2_E = 1.4426950408889634f;
__device__ inline float fast_power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float fast_exponential(float x) { return fast_power_of_two(x * LOG2_E); }
__device__ inline float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float exponential(float x) { return NARROW_SCALAR ? fast_exponential(x) : expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float power_of_two(float x) { return NARROW_SCALAR ? fast_power_of_two(x) : exp2f(x); }
__device__ inline double power_of_two(double x) { return exp2(x); }
__device__ inline float reciprocal(float x) { return NARROW_SCALAR ? fast_reciprocal(x) : __frcp_rn(x); }
__device__ inline double reciprocal(double x) { return 1.0 / x; }
// The sum is at least 1, where rcp.approx is off by at most one ulp.
__device__ inline float sigmoid(float x) { return fast_reciprocal(1.0f + exponential(-x)); }
__device__ inline double sigmoid(double x) { return reciprocal(1.0 + exponential(-x)); }

// Two sigmoids at once.  16-bit ones share one reciprocal, that of the product of both denominators: gates are limited
// by the special function unit, which computes exponentials and reciprocals at an eighth of the rate of
// multiplications.  To keep the product in range, the first denominator is scaled, and both inputs are clamped at -79,
// where a sigmoid is 5e-35.
__device__ inline void sigmoids(float x, float y, float& of_x, float& of_y) {
    if (!NARROW_SCALAR) {
        of_x = sigmoid(x), of_y = sigmoid(y);
        return;
    }
    constexpr float SCALE = 0x1p-102f;
    const float a = SCALE + fast_power_of_two(fmaf(maximum(x, -79.0f), -LOG2_E, -102.0f));
    const float b = 1.0f + fast_exponential(-maximum(y, -79.0f)), r = fast_reciprocal(a * b);
    of_x = b * r * SCALE, of_y = a * r;
}
__device__ inline void sigmoids(double x, double y, double& of_x, double& of_y) {
    of_x = sigmoid(x), of_y = sigmoid(y);
}

__device__ inline float hyperbolic_tangent(float x) {
    if (!NARROW_SCALAR) return tanhf(x);
    const float far = 1.0f - 2.0f * fast_reciprocal(1.0f + fast_exponential(2.0f * x));
    return fabsf(x) < 0.0625f ? fmaf(-0.33333333f * x * x, x, x) : far;
}
__device__ inline double hyperbolic_tangent(double x) { return tanh(x); }

__device__ inline float fast_binary_logarithm(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float fast_logarithm(float x) { return fast_binary_logarithm(x) * 0.6931471805599453f; }
__device__ inline float logarithm(float x) { return NARROW_SCALAR ? fast_logarithm(x) : logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float binary_logarithm(float x) { return NARROW_SCALAR ? fast_binary_logarithm(x) : log2f(x); }
__device__ inline double binary_logarithm(double x) { return log2(x); }
__device__ inline float decimal_logarithm(float x) {
    return NARROW_SCALAR ? fast_binary_logarithm(x) * 0.3010299956639812f : log10f(x);
}
__device__ inline double decimal_logarithm(double x) { return log10(x); }

// Near 0 the first terms of the series are more accurate than the logarithm of the rounded sum.
__device__ inline float log_one_plus(float x) {
    if (!NARROW_SCALAR) return log1pf(x);
    return fabsf(x) < 0.015625f ? fmaf(-0.5f * x, x, x) : fast_logarithm(1.0f + x);
}
__device__ inline double log_one_plus(double x) { return log1p(x); }

__device__ inline float exponential_less_one(float x) {
    if (!NARROW_SCALAR) return expm1f(x);
    return fabsf(x) < 0.015625f ? fmaf(0.5f * x, x, x) : fast_exponential(x) - 1.0f;
}
__device__ inline double exponential_less_one(double x) { return expm1(x); }
// The same, given `root` = exp(x / 2).
__device__ inline float exponential_less_one(float x, float root) {
    if (!NARROW_SCALAR) return expm1f(x);
    return fabsf(x) < 0.015625f ? fmaf(0.5f * x, x, x) : fmaf(root, root, -1.0f);
}
__device__ inline double exponential_less_one(double x, double) { return expm1(x); }

__device__ inline float square_root(float x) {
    if (!NARROW_SCALAR) return sqrtf(x);
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline double square_root(double x) { return sqrt(x); }
__device__ inline float reciprocal_root(float x) {
    if (!NARROW_SCALAR) return rsqrtf(x);
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline double reciprocal_root(double x) { return rsqrt(x); }
__device__ inline float quotient(float x, float y) { return NARROW_SCALAR ? x * fast_reciprocal(y) : x / y; }
__device__ inline double quotient(double x, double y) { return x / y; }

__device__ inline float absolute(float x) { return fabsf(x); }
__device__ inline double absolute(double x) { return fabs(x); }
__device__ inline Compute sign(Compute x) { return Compute(x > 0) - Compute(x < 0); }
__device__ inline float sine(float x) { return sinf(x); }
__device__ inline double sine(double x) { return sin(x); }
__device__ inline float cosine(float x) { return cosf(x); }
__device__ inline double cosine(double x) { return cos(x); }
__device__ inline float error_function(float x) { return erff(x); }
__device__ inline double error_function(double x) { return erf(x); }
__device__ inline float power(float x, float y) { return powf(x, y); }
__device__ inline double power(double x, double y) { return pow(x, y); }
__device__ inline Compute hyperbolic_tangent_slope(Compute x) {
    const Compute t = hyperbolic_tangent(x);
    return (1 - t) * (1 + t);
}

__device__ inline Compute log_add_exp(Compute x, Compute y) {
    if (x == y) return x + Compute(0.69314718055994530942);  // also avoids inf - inf
    const Compute low = x < y ? x : y, high = x < y ? y : x;
    return high + log_one_plus(exponential(low - high));
}
