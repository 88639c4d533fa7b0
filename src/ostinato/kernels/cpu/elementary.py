# mypy: disable-error-code="no-untyped-def"
"""Elementary functions for CPU loops, which LLVM vectorises in float32; in float64 they call those of ``math``.

A call in a loop keeps LLVM from vectorising it.  So in float32 each function is a polynomial without branches, computed
in float32 except for sin and cos.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from ostinato.kernels.cpu.compiler import inline, inline_options


def or_in_float64(double: Callable) -> Callable[[Callable], Any]:
    """Decorator for a function of float32: for float64, `double` takes its place."""

    def decorate(single: Callable) -> Any:
        def function(x: Any) -> Any:
            raise NotImplementedError("for compiled loops")

        overload(function, jit_options=inline_options)(lambda x: single if x == types.float32 else double)
        return function

    return decorate


@intrinsic
def cast(typing_context, value, like):
    """A number in the type of another: a literal 1.0 would promote a float32 expression to float64."""

    def generate(context, builder, signature, arguments):
        return context.cast(builder, arguments[0], signature.args[0], signature.return_type)

    return like(value, like), generate


@intrinsic
def multiply_add(typing_context, x, y, z):
    """``x*y + z``, rounded once where the processor can."""

    def generate(context, builder, signature, arguments):
        kind = arguments[0].type
        function = ir.FunctionType(kind, [kind] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fmuladd", [kind], function), arguments)

    return x(x, x, x), generate


@inline
def minimum(x, y):
    smaller = x if x < y else y
    return x if x != x else smaller  # a NaN in x, which the comparison drops; one in y is taken already


@inline
def maximum(x, y):
    larger = x if x > y else y
    return x if x != x else larger


@inline
def sign(x):
    zero, one = cast(0.0, x), cast(1.0, x)
    return (one if x > 0 else zero) - (one if x < 0 else zero)


# Exponentials: exp(x) is 2**n * exp(r) with |r| <= log(2)/2.  Adding _SHIFT rounds x/log(2) to the integer n and leaves
# n in the low bits of the sum.  log(2) is split so that n*_LOG2_HIGH is exact.  The polynomial is a minimax fit of
# (exp(r)-1-r)/r**2, to 0.05 ulp of exp.

_SHIFT = np.float32(1.5 * 2**23)
_LOG2_INVERSE = np.float32(1 / math.log(2))
_LOG2_HIGH = np.float32(355 / 512)
_LOG2_LOW = np.float32(math.log(2) - 355 / 512)
_LOG2 = np.float32(math.log(2))
_LOWEST, _HIGHEST = np.float32(-104), np.float32(89)  # arguments for which exp is 0 and inf
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = np.float32(-150), np.float32(129)  # the same of exp2
_ONE, _TWO, _TWENTY = np.float32(1), np.float32(2), np.float32(20)
_E2, _E3, _E4 = np.float32(0.5000000095), np.float32(0.166665186), np.float32(0.04166620508)
_E5, _E6 = np.float32(0.00836891795), np.float32(0.001395053969)


@intrinsic
def _times_power_of_two(typing_context, x, shifted):
    """``x * 2**n``, where shifted is n + _SHIFT, by two factors, as one may overflow its exponent."""

    def generate(context, builder, signature, arguments):
        x, shifted = arguments
        int32 = ir.IntType(32)
        n = builder.sub(builder.bitcast(shifted, int32), int32(int(_SHIFT.view(np.int32))))
        half = builder.ashr(n, int32(1))
        for exponent in (half, builder.sub(n, half)):
            bits = builder.shl(builder.add(exponent, int32(127)), int32(23))
            x = builder.fmul(x, builder.bitcast(bits, x.type))
        return x

    return types.float32(types.float32, types.float32), generate


@intrinsic
def _times_fraction(typing_context, x, shifted):
    """The same for n <= 0: ``x * 2**(n + 64)``, which is not denormal, times 2**-64."""

    def generate(context, builder, signature, arguments):
        x, shifted = arguments
        int32 = ir.IntType(32)
        exponent = builder.add(builder.bitcast(shifted, int32), int32(127 + 64 - int(_SHIFT.view(np.int32))))
        scale = builder.bitcast(builder.shl(exponent, int32(23)), x.type)
        return builder.fmul(builder.fmul(x, scale), ir.Constant(x.type, 2.0**-64))

    return types.float32(types.float32, types.float32), generate


@inline
def _reduce(x):
    """:func:`_reduce_fraction` for any x; NaN passes through the comparison."""
    return _reduce_fraction(_HIGHEST if x > _HIGHEST else x)


@inline
def _reduce_fraction(x):
    """n + _SHIFT and exp(r) - 1 for a float32 x = n*log(2) + r of at most _HIGHEST; NaN passes through."""
    x = _LOWEST if x < _LOWEST else x
    shifted = multiply_add(x, _LOG2_INVERSE, _SHIFT)
    n = shifted - _SHIFT
    return shifted, _excess(multiply_add(n, -_LOG2_LOW, multiply_add(n, -_LOG2_HIGH, x)))


@inline
def _excess(r):
    """exp(r) - 1, for |r| <= log(2)/2."""
    p = multiply_add(multiply_add(multiply_add(multiply_add(_E6, r, _E5), r, _E4), r, _E3), r, _E2)
    return multiply_add(r * r, p, r)


@or_in_float64(lambda x: math.exp(x))
def exp(x):
    shifted, excess = _reduce(x)
    return _times_power_of_two(_ONE + excess, shifted)


@or_in_float64(lambda x: np.exp2(x))
def exp2(x):
    """2**x, exact if x is an integer."""
    x = _LOWEST_EXPONENT if x < _LOWEST_EXPONENT else x
    x = _HIGHEST_EXPONENT if x > _HIGHEST_EXPONENT else x
    shifted = x + _SHIFT
    return _times_power_of_two(_ONE + _excess((x - (shifted - _SHIFT)) * _LOG2), shifted)


@or_in_float64(lambda x: math.exp(x))
def exp_fraction(x):
    """exp(x), for x <= 0."""
    shifted, excess = _reduce_fraction(x)
    return _times_fraction(_ONE + excess, shifted)


@or_in_float64(lambda x: (math.exp(x), math.expm1(x)))
def exp_expm1(x):
    """exp(x) and exp(x) - 1, for x <= 0."""
    shifted, excess = _reduce_fraction(x)
    scale = _times_power_of_two(_ONE, shifted)  # with _times_fraction, LLVM does not vectorise a GRU's backward
    return multiply_add(scale, excess, scale), multiply_add(scale, excess, scale - _ONE)


@or_in_float64(lambda x: math.expm1(x))
def expm1(x):
    shifted, excess = _reduce(x)
    scale = _times_power_of_two(_ONE, shifted)
    whole = _times_power_of_two(_ONE + excess, shifted)
    # Beyond 20, subtracting 1 makes no difference.  There `scale` may overflow before exp(x) does, and its product with
    # a negative excess would give NaN.
    return whole if x > _TWENTY else multiply_add(scale, excess, scale - _ONE)


@inline
def expm1_of_twice(x):
    """exp(2*x) - 1, for use where exp(x) is computed, too: they share most of the work."""
    y = expm1(x)
    return y * (y + cast(2.0, x))


@inline
def sigmoids(x):
    """sigmoid(x) and sigmoid(-x), the smaller one as accurate as the larger one."""
    one = cast(1.0, x)
    e = exp_fraction(-abs(x))
    large = one / (one + e)
    small = e * large
    return large if x >= 0 else small, small if x >= 0 else large


@inline
def tanh_and_slope(x):
    """tanh(x) and its derivative."""
    one = cast(1.0, x)
    e, e_minus_one = exp_expm1(-abs(x + x))
    scale = one / (one + e)
    size = -e_minus_one * scale
    return size if x >= 0 else -size, cast(4.0, x) * e * scale * scale


# Logarithms: with s = e/(2+e), the polynomial in s**2 is a minimax fit of (log1p(e)-2s)/s**3, to 0.08 ulp of log1p.

_L3, _L5 = np.float32(0.6666641204), np.float32(0.4002176993)
_L7, _L9 = np.float32(0.2799786346), np.float32(0.280312745)
_INFINITY = np.float32(math.inf)
_SMALLEST = np.float32(2.0**-126)  # the smallest normal number
_LOG10_INVERSE = np.float32(1 / math.log(10))


@or_in_float64(lambda x: math.log1p(x))
def log1p_fraction(x):
    """log(1 + x), for 0 <= x <= 1."""
    s = x / (x + _TWO)
    u = s * s
    p = multiply_add(multiply_add(multiply_add(_L9, u, _L7), u, _L5), u, _L3)
    return multiply_add(s * u, p, s + s)


@intrinsic
def _exponent_and_fraction(typing_context, x):
    """n, as a float32, and f in [3/4, 3/2), such that the positive float32 x is f * 2**n."""

    def generate(context, builder, signature, arguments):
        int32, float32 = ir.IntType(32), ir.FloatType()
        bits = builder.bitcast(arguments[0], int32)
        n = builder.ashr(builder.sub(bits, int32(0x3F400000)), int32(23))
        fraction = builder.bitcast(builder.sub(bits, builder.shl(n, int32(23))), float32)
        return context.make_tuple(builder, signature.return_type, (builder.sitofp(n, float32), fraction))

    return types.UniTuple(types.float32, 2)(types.float32), generate


@inline
def _exponent_and_log(x, rest):
    """n and log(f) + rest, where x is f * 2**n."""
    small = x < _SMALLEST
    n, f = _exponent_and_fraction(x * np.float32(2.0**24) if small else x)
    n = n - np.float32(24) if small else n
    e = f - _ONE
    s = e / (e + _TWO)
    u = s * s
    p = multiply_add(multiply_add(multiply_add(_L9, u, _L7), u, _L5), u, _L3)
    return n, multiply_add(s * u, p, multiply_add(_TWO, s, rest))


@inline
def _log_plus(x, rest):
    """log(x) + rest."""
    n, y = _exponent_and_log(x, rest)
    return _log_or_limit(x, multiply_add(n, _LOG2, y))


@inline
def _log_or_limit(x, y):
    """The logarithm y of x, or its limit or NaN if x is not positive and finite."""
    y = y if x > 0 else (-_INFINITY if x == 0 else np.float32(math.nan))
    return y if x < _INFINITY else x  # infinity, NaN


@or_in_float64(lambda x: math.log(x))
def log(x):
    return _log_plus(x, np.float32(0))


@or_in_float64(lambda x: np.log2(x))
def log2(x):
    """log2(x), exact if it is an integer."""
    n, y = _exponent_and_log(x, np.float32(0))
    return _log_or_limit(x, multiply_add(y, _LOG2_INVERSE, n))


@or_in_float64(lambda x: np.log10(x))
def log10(x):
    return log(x) * _LOG10_INVERSE


@or_in_float64(lambda x: math.log1p(x))
def log1p(x):
    """log(1 + x), for any x."""
    y = _ONE + x
    correction = (x - (y - _ONE)) / y if (y > 0) & (y < _INFINITY) else np.float32(0)  # for the rounding of y
    return _log_plus(y, correction)


# Sine and cosine, by Taylor polynomials of the angle minus the nearest multiple of pi/2, in float64, which represents
# that difference without loss below 2**51 multiples.  Results for larger angles are meaningless, as these are 10**7
# turns apart in float32.

_TURNS_SHIFT = 1.5 * 2.0**52
_QUARTER, _QUARTER_REST = math.pi / 2, 6.123233995736766e-17  # pi/2 as float64, and the rest of it
_S3, _S5, _S7, _S9 = -1 / 6, 1 / 120, -1 / 5040, 1 / 362880
_C2, _C4, _C6, _C8 = -1 / 2, 1 / 24, -1 / 720, 1 / 40320


@inline
def _sine(x, quarters):
    """The sine of the float32 x + quarters * pi/2."""
    wide = cast(x, 1.0)
    turns = multiply_add(wide, 2 / math.pi, _TURNS_SHIFT) - _TURNS_SHIFT
    r = multiply_add(turns, -_QUARTER_REST, multiply_add(turns, -_QUARTER, wide))
    u = r * r
    odd = r * multiply_add(multiply_add(multiply_add(multiply_add(_S9, u, _S7), u, _S5), u, _S3), u, 1.0)
    even = multiply_add(multiply_add(multiply_add(multiply_add(_C8, u, _C6), u, _C4), u, _C2), u, 1.0)
    turns += quarters
    quarter = turns - 4.0 * math.floor(turns * 0.25)
    size = even if (quarter == 1) | (quarter == 3) else odd
    return cast(-size if quarter >= 2 else size, x)


@or_in_float64(lambda x: math.sin(x))
def sin(x):
    return _sine(x, 0.0)


@or_in_float64(lambda x: math.cos(x))
def cos(x):
    return _sine(x, 1.0)
