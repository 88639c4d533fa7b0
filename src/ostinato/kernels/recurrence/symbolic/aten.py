"""Lowering of PyTorch's elementwise operations to scalar operations of a graph: a table with one rule for each."""

import math
from collections.abc import Callable

import torch

from ostinato.kernels.recurrence.symbolic.graph import OPERATIONS
from ostinato.kernels.recurrence.symbolic.scalar import (
    Operand,
    Scalar,
    Unsupported,
    atan2,
    cos,
    erf,
    exp,
    expm1,
    fmod,
    log1p,
    maximum,
    minimum,
    named,
    reciprocal,
    sigmoid,
    sin,
    sqrt,
    tanh,
    tanh_slope,
    trunc,
    where,
)

# Rules that are longer than an expression precede the table.


def _to_copy(x: Scalar, *_: object, dtype: torch.dtype | None = None) -> Scalar:
    if dtype in (None, torch.float32, torch.float64):
        return x  # kernels compute in a single dtype and cannot round to another
    if dtype == torch.bool:
        return x != 0.0
    raise Unsupported(f"to {dtype}")


def _div(x: Operand, y: Operand, rounding_mode: str | None = None) -> Operand:
    if rounding_mode is None:
        return x / y
    if rounding_mode == "trunc":
        return trunc(x / y)  # PyTorch truncates the rounded quotient, but takes the floor of the exact one
    rest = fmod(x, y)
    whole = round((x - rest) / y)  # the quotient is an integer up to rounding, which may be downwards
    return where(y == 0.0, x / y, where(_are_opposite(rest, y), whole - 1.0, whole))


def _remainder(x: Operand, y: Operand) -> Scalar:
    """The remainder with the sign of y, whereas that of fmod has the sign of x."""
    rest = fmod(x, y)
    return where(_are_opposite(rest, y), rest + y, rest)


def _are_opposite(x: Scalar, y: Operand) -> Scalar:
    """Whether one is positive and the other negative."""
    return ((x < 0.0) & (y > 0.0)) | ((x > 0.0) & (y < 0.0))


def _round(x: Scalar, decimals: int = 0) -> Scalar:
    if decimals:
        raise Unsupported(f"with decimals={decimals}")
    return round(x)


def _nan_to_num(
    x: Scalar, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Scalar:
    if posinf is None or neginf is None:  # these are the largest numbers of the dtype, which a graph does not know
        raise Unsupported("without posinf and neginf")
    x = where(x != x, nan or 0.0, x)
    return where(x == math.inf, posinf, where(x == -math.inf, neginf, x))


def _clamp(x: Scalar, min: Operand | None = None, max: Operand | None = None) -> Scalar:
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


def _cosine_of_asin(x: Scalar) -> Scalar:
    """sqrt(1 - x * x), accurate where x is near 1."""
    return sqrt((1.0 - x) * (1.0 + x))


def _asinh(x: Scalar) -> Scalar:
    """log(1 + x + x * x / (1 + sqrt(1 + x * x))) for positive x, without squares that overflow."""
    size = where(x < 0.0, -x, x)  # |x|, with a derivative at 0
    bounded, inverse = minimum(size, 1.0), reciprocal(maximum(size, 1.0))
    share = bounded / (inverse + sqrt(inverse * inverse + bounded * bounded))  # x / (1 + sqrt(1 + x * x))
    result = _log_of_sum(size, size * share)
    return where(x < 0.0, -result, result)


def _acosh(x: Scalar) -> Scalar:
    """log(x + sqrt(x * x - 1)), accurate where x is near 1."""
    beyond = x - 1.0
    return _log_of_sum(beyond, sqrt(beyond) * sqrt(x + 1.0))


def _log_of_sum(x: Scalar, y: Scalar) -> Scalar:
    """log(1 + x + y); for large x, whose sum with y may overflow, y must equal x up to rounding."""
    is_large = x > 2.0**60
    return log1p(where(is_large, x, x + y)) + where(is_large, math.log(2), 0.0)


def _hardsigmoid(x: Scalar) -> Scalar:
    return _clamp(x * (1 / 6) + 0.5, 0.0, 1.0)


# The tests that stop a gradient are PyTorch's: every comparison with NaN is false, so that the gradient passes or stops
# at NaN as it does there.


def _threshold_backward(grad: Scalar, x: Scalar, threshold: float) -> Scalar:
    return where(x <= threshold, 0.0, grad)


def _hardtanh_backward(grad: Scalar, x: Scalar, low: float, high: float) -> Scalar:
    return where((x <= low) | (x >= high), 0.0, grad)


def _shrink_backward(grad: Scalar, x: Scalar, bound: float) -> Scalar:
    return where(abs(x) <= bound, 0.0, grad)


def _hardsigmoid_backward(grad: Scalar, x: Scalar) -> Scalar:
    return where((x > -3.0) & (x < 3.0), grad, 0.0) * (1 / 6)


def _hardswish_backward(grad: Scalar, x: Scalar) -> Scalar:
    slope = x * (1 / 3) + 0.5
    return where(x <= -3.0, 0.0, where(x >= 3.0, grad, grad * slope))


def _lerp(x: Scalar, y: Scalar, weight: Scalar) -> Scalar:
    """``x + weight * (y - x)``, exact for the weights 0 and 1."""
    gap = y - x
    return where(abs(weight) < 0.5, x + weight * gap, y - gap * (1.0 - weight))


def _not_positive(x: Scalar) -> Scalar:
    """min(x, 0), so that the exponential and its derivatives are finite even where x itself is not used."""
    return where(x > 0.0, 0.0, x)


def _elu(x: Scalar, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Scalar:
    below = expm1(_not_positive(x) * input_scale) * alpha
    return where(x > 0.0, x, below) * scale


def _elu_backward(grad: Scalar, alpha: float, scale: float, input_scale: float, is_result: bool, x: Scalar) -> Scalar:
    if is_result:
        raise Unsupported("in place")
    below = exp(_not_positive(x) * input_scale) * (alpha * input_scale)
    return grad * (where(x > 0.0, 1.0, below) * scale)


def _sigmoid_backward(grad: Scalar, y: Scalar) -> Scalar:
    x = y.operand_of("sigmoid")  # sigmoid(-x) is more accurate than 1 - sigmoid(x), which cancels near 1
    rest = 1.0 - y if x is None else sigmoid(-x)
    return grad * (y * rest)


def _tanh_backward(grad: Scalar, y: Scalar) -> Scalar:
    x = y.operand_of("tanh")
    slope = 1.0 - y * y if x is None else tanh_slope(x)
    return grad * slope


def _silu_backward(grad: Scalar, x: Scalar) -> Scalar:
    y = sigmoid(x)
    return grad * (y * (1.0 + x * sigmoid(-x)))


def _log_one_plus_exp(x: Scalar) -> Scalar:
    return maximum(x, 0.0) + log1p(exp(-abs(x)))


def _softplus(x: Scalar, beta: float = 1, threshold: float = 20) -> Scalar:
    scaled = x * beta
    return where(scaled > threshold, x, _log_one_plus_exp(scaled) * (1 / beta))


def _softplus_backward(grad: Scalar, x: Scalar, beta: float, threshold: float) -> Scalar:
    scaled = x * beta
    return grad * where(scaled > threshold, 1.0, sigmoid(scaled))


def _mish_backward(grad: Scalar, x: Scalar) -> Scalar:
    inner = _log_one_plus_exp(x)
    slope = tanh_slope(inner) * (x * sigmoid(x))
    return grad * (tanh(inner) + slope)


def _logaddexp(x: Scalar, y: Scalar) -> Scalar:
    gap = where(x == y, 0.0, -abs(x - y))  # equal infinities have no difference
    return maximum(x, y) + log1p(exp(gap))


_CUBIC = 0.044715  # the cubic coefficient in GELU's tanh approximation


def _gelu_inner(x: Scalar) -> Scalar:
    """The argument of tanh in GELU's tanh approximation."""
    return x * (1.0 + x * x * _CUBIC) * math.sqrt(2 / math.pi)


def _gelu(x: Scalar, approximate: str = "none") -> Scalar:
    inner = tanh(_gelu_inner(x)) if approximate == "tanh" else erf(x * math.sqrt(0.5))
    return x * 0.5 * (1.0 + inner)


def _gelu_backward(grad: Scalar, x: Scalar, approximate: str = "none") -> Scalar:
    square = x * x
    if approximate == "tanh":
        inner = _gelu_inner(x)
        slope = (1.0 + square * (3 * _CUBIC)) * math.sqrt(2 / math.pi)
        share, change = tanh(inner), tanh_slope(inner) * slope
    else:
        share = erf(x * math.sqrt(0.5))
        change = exp(square * -0.5) * math.sqrt(2 / math.pi)
    half = (1.0 + share) * 0.5
    return grad * (half + x * 0.5 * change)


_OTHER_NAMES = {"and": "logical_and", "or": "logical_or", "not": "logical_not"}

RULES: dict[str, Callable[..., Operand]] = {
    **{_OTHER_NAMES.get(name, name): named(name) for name in OPERATIONS if name not in ("tanh_slope", "detach")},
    "sgn": named("sign"),
    "bitwise_and": named("and"),
    "bitwise_or": named("or"),
    "bitwise_not": named("not"),
    **dict.fromkeys(("logical_xor", "bitwise_xor"), lambda x, y: (x | y) & ~(x & y)),
    # Copies and constants.
    **dict.fromkeys(("detach", "alias", "clone"), lambda x, **_: x),
    **dict.fromkeys(("copy", "fill", "zero"), lambda value=0.0, *_: value + 0.0),
    "_to_copy": _to_copy,
    # Arithmetic.
    "add": lambda x, y, alpha=1: x + y * alpha,
    "sub": lambda x, y, alpha=1: x - y * alpha,
    "rsub": lambda x, y, alpha=1: y - x * alpha,
    **dict.fromkeys(("div", "true_divide"), _div),
    "floor_divide": lambda x, y: _div(x, y, "floor"),
    "remainder": _remainder,
    "addcmul": lambda x, y, z, value=1: x + y * value * z,  # in PyTorch's order, which determines what overflows
    "addcdiv": lambda x, y, z, value=1: x + y * value / z,
    "lerp": _lerp,
    # Rounding, extremes, choices.
    "round": _round,
    "frac": lambda x: x - trunc(x),
    "fmax": lambda x, y: where((x >= y) | (y != y), x, y),
    "fmin": lambda x, y: where((x <= y) | (y != y), x, y),
    "clamp": _clamp,
    "clamp_min": maximum,
    "clamp_max": minimum,
    "masked_fill": lambda x, mask, value: where(mask, value, x),
    "isnan": lambda x: x != x,
    "nan_to_num": _nan_to_num,
    # Exponentials, angles, hyperbolas.
    "logaddexp": _logaddexp,
    "tan": lambda x: sin(x) / cos(x),
    "atan": lambda x: atan2(x, 1.0),
    "asin": lambda x: atan2(x, _cosine_of_asin(x)),
    "acos": lambda x: atan2(_cosine_of_asin(x), x),
    "sinh": lambda x: (expm1(x) - expm1(-x)) * 0.5,
    "cosh": lambda x: (exp(x) + exp(-x)) * 0.5,
    "asinh": _asinh,
    "acosh": _acosh,
    "atanh": lambda x: (log1p(x) - log1p(-x)) * 0.5,
    # Activations, and the derivatives that autograd calls.
    "sigmoid_backward": _sigmoid_backward,
    "tanh_backward": _tanh_backward,
    "relu": lambda x: maximum(x, 0.0),
    "threshold_backward": _threshold_backward,
    "leaky_relu": lambda x, slope=0.01: where(x > 0.0, x, x * slope),
    "leaky_relu_backward": lambda grad, x, slope, _: where(x > 0.0, grad, grad * slope),
    "hardtanh": lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    "hardtanh_backward": _hardtanh_backward,
    "hardsigmoid": _hardsigmoid,
    "hardsigmoid_backward": _hardsigmoid_backward,
    "hardswish": lambda x: x * _hardsigmoid(x),
    "hardswish_backward": _hardswish_backward,
    "hardshrink_backward": _shrink_backward,
    "softshrink_backward": _shrink_backward,
    "elu": _elu,
    "elu_backward": _elu_backward,
    "celu": lambda x, alpha=1.0: _elu(x, alpha, input_scale=1 / alpha),
    "silu": lambda x: x * sigmoid(x),
    "silu_backward": _silu_backward,
    "softplus": _softplus,
    "softplus_backward": _softplus_backward,
    "mish_backward": _mish_backward,
    "log_sigmoid_forward": lambda x: minimum(x, 0.0) - log1p(exp(-abs(x))),
    "log_sigmoid_backward": lambda grad, x, _: grad * sigmoid(-x),
    "gelu": _gelu,
    "gelu_backward": _gelu_backward,
}
