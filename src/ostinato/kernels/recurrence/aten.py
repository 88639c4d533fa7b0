"""Lowering of PyTorch's elementwise operations to scalar operations of a graph: one rule for each."""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ostinato.kernels.recurrence.graph import OPERATIONS
from ostinato.kernels.recurrence.scalar import (
    Operand,
    Scalar,
    Unsupported,
    atan2,
    cos,
    erf,
    exp,
    expm1,
    fmod,
    log,
    log1p,
    maximum,
    minimum,
    operation,
    reciprocal,
    sigmoid,
    sign,
    sin,
    sqrt,
    tanh,
    tanh_slope,
    trunc,
    where,
)

Rule = Callable[..., Operand]
R = TypeVar("R", bound=Rule)
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[R], R]:
    def register(rule: R) -> R:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _direct(name: str) -> Rule:
    return functools.partial(operation, name)


_OTHER_NAMES = {"and": "logical_and", "or": "logical_or", "not": "logical_not"}
RULES.update({_OTHER_NAMES.get(name, name): _direct(name) for name in OPERATIONS if name != "tanh_slope"})
RULES.update(sgn=_direct("sign"), bitwise_and=_direct("and"), bitwise_or=_direct("or"), bitwise_not=_direct("not"))


@_rule("_efficientzerotensor")
def _zero(*_: Any, **__: Any) -> float:
    return 0.0


@_rule("detach", "alias", "clone")
def _same(x: Scalar, **_: Any) -> Scalar:
    return x


@_rule("copy", "fill", "zero")
def _filled(value: Operand = 0.0, *_: Any) -> Operand:
    return value + 0.0


@_rule("_to_copy")
def _cast(x: Scalar, *_: Any, dtype: torch.dtype | None = None) -> Scalar:
    if dtype in (None, torch.float32, torch.float64):
        return x  # kernels compute in one dtype, and could not round to another
    if dtype == torch.bool:
        return x != 0.0
    raise Unsupported(f"to {dtype}")


@_rule("add")
def _add(x: Operand, y: Operand, alpha: float = 1) -> Operand:
    return x + y * alpha


@_rule("sub")
def _sub(x: Operand, y: Operand, alpha: float = 1) -> Operand:
    return x - y * alpha


@_rule("rsub")
def _rsub(x: Operand, y: Operand, alpha: float = 1) -> Operand:
    return y - x * alpha


@_rule("div")
def _div(x: Operand, y: Operand, rounding_mode: str | None = None) -> Operand:
    if rounding_mode is None:
        return x / y
    rest = fmod(x, y) if rounding_mode == "trunc" else _remainder(x, y)
    whole = round((x - rest) / y)  # also of a quotient that is a little too small
    return where(y == 0.0, x / y, whole)


@_rule("floor_divide")
def _floor_divide(x: Operand, y: Operand) -> Operand:
    return _div(x, y, "floor")


@_rule("remainder")
def _remainder(x: Operand, y: Operand) -> Scalar:
    """With the sign of y, where that of fmod has the sign of x."""
    rest = fmod(x, y)
    negative = (rest < 0.0) & (y > 0.0)
    positive = (rest > 0.0) & (y < 0.0)
    return where(negative | positive, rest + y, rest)


@_rule("round")
def _round(x: Scalar, decimals: int = 0) -> Scalar:
    if decimals:
        raise Unsupported(f"with decimals={decimals}")
    return round(x)


@_rule("frac")
def _frac(x: Scalar) -> Scalar:
    return x - trunc(x)


@_rule("fmax")
def _fmax(x: Scalar, y: Scalar) -> Scalar:
    return where((x >= y) | (y != y), x, y)


@_rule("fmin")
def _fmin(x: Scalar, y: Scalar) -> Scalar:
    return where((x <= y) | (y != y), x, y)


@_rule("logical_xor", "bitwise_xor")
def _xor(x: Scalar, y: Scalar) -> Scalar:
    return (x | y) & ~(x & y)


@_rule("tan")
def _tan(x: Scalar) -> Scalar:
    return sin(x) / cos(x)


@_rule("atan")
def _atan(x: Scalar) -> Scalar:
    return atan2(x, 1.0)


@_rule("asin")
def _asin(x: Scalar) -> Scalar:
    return atan2(x, _leg(x))


@_rule("acos")
def _acos(x: Scalar) -> Scalar:
    return atan2(_leg(x), x)


def _leg(x: Scalar) -> Scalar:
    """The root of 1 - x * x, precise where x is near 1."""
    return sqrt((1.0 - x) * (1.0 + x))


@_rule("sinh")
def _sinh(x: Scalar) -> Scalar:
    return (expm1(x) - expm1(-x)) * 0.5


@_rule("cosh")
def _cosh(x: Scalar) -> Scalar:
    return (exp(x) + exp(-x)) * 0.5


@_rule("asinh")
def _asinh(x: Scalar) -> Scalar:
    size = abs(x)
    inverse = reciprocal(size)
    share = reciprocal(inverse + sqrt(inverse * inverse + 1.0))
    return sign(x) * log1p(size + size * share)


@_rule("acosh")
def _acosh(x: Scalar) -> Scalar:
    beyond = x - 1.0
    return log1p(beyond + sqrt(beyond) * sqrt(x + 1.0))


@_rule("atanh")
def _atanh(x: Scalar) -> Scalar:
    return (log1p(x) - log1p(-x)) * 0.5


@_rule("addcmul")
def _addcmul(x: Scalar, y: Scalar, z: Scalar, value: float = 1) -> Scalar:
    return x + y * z * value


@_rule("addcdiv")
def _addcdiv(x: Scalar, y: Scalar, z: Scalar, value: float = 1) -> Scalar:
    return x + y / z * value


@_rule("lerp")
def _lerp(x: Scalar, y: Scalar, weight: Operand) -> Scalar:
    return x + weight * (y - x)


@_rule("exp2")
def _exp2(x: Scalar) -> Scalar:
    return exp(x * math.log(2))


@_rule("log2")
def _log2(x: Scalar) -> Scalar:
    return log(x) * (1 / math.log(2))


@_rule("log10")
def _log10(x: Scalar) -> Scalar:
    return log(x) * (1 / math.log(10))


@_rule("isnan")
def _isnan(x: Scalar) -> Scalar:
    return x != x


@_rule("clamp")
def _clamp(x: Scalar, min: Operand | None = None, max: Operand | None = None) -> Scalar:
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


@_rule("clamp_min")
def _clamp_min(x: Scalar, min: Operand) -> Scalar:
    return maximum(x, min)


@_rule("clamp_max")
def _clamp_max(x: Scalar, max: Operand) -> Scalar:
    return minimum(x, max)


@_rule("masked_fill")
def _masked_fill(x: Scalar, mask: Scalar, value: Operand) -> Scalar:
    return where(mask, value, x)


@_rule("relu")
def _relu(x: Scalar) -> Scalar:
    return maximum(x, 0.0)


@_rule("threshold_backward")
def _threshold_backward(grad: Scalar, x: Scalar, threshold: float) -> Scalar:
    return where(x > threshold, grad, 0.0)


@_rule("leaky_relu")
def _leaky_relu(x: Scalar, slope: float = 0.01) -> Scalar:
    return where(x > 0.0, x, x * slope)


@_rule("leaky_relu_backward")
def _leaky_relu_backward(grad: Scalar, x: Scalar, slope: float, _: bool) -> Scalar:
    return where(x > 0.0, grad, grad * slope)


@_rule("hardtanh")
def _hardtanh(x: Scalar, low: float = -1.0, high: float = 1.0) -> Scalar:
    return _clamp(x, low, high)


@_rule("hardtanh_backward")
def _hardtanh_backward(grad: Scalar, x: Scalar, low: float, high: float) -> Scalar:
    return where((x > low) & (x < high), grad, 0.0)


@_rule("hardsigmoid")
def _hardsigmoid(x: Scalar) -> Scalar:
    return _clamp(x * (1 / 6) + 0.5, 0.0, 1.0)


@_rule("hardsigmoid_backward")
def _hardsigmoid_backward(grad: Scalar, x: Scalar) -> Scalar:
    return _hardtanh_backward(grad, x, -3.0, 3.0) * (1 / 6)


@_rule("hardswish")
def _hardswish(x: Scalar) -> Scalar:
    return x * _hardsigmoid(x)


@_rule("hardswish_backward")
def _hardswish_backward(grad: Scalar, x: Scalar) -> Scalar:
    slope = x * (1 / 3) + 0.5
    return grad * where(abs(x) > 3.0, x > 0.0, slope)


@_rule("hardshrink_backward", "softshrink_backward")
def _shrink_backward(grad: Scalar, x: Scalar, bound: float) -> Scalar:
    return where(abs(x) > bound, grad, 0.0)


@_rule("elu")
def _elu(x: Scalar, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Scalar:
    below = expm1(x * input_scale) * alpha
    return where(x > 0.0, x, below) * scale


@_rule("elu_backward")
def _elu_backward(grad: Scalar, alpha: float, scale: float, input_scale: float, is_result: bool, x: Scalar) -> Scalar:
    if is_result:
        raise Unsupported("in place")
    below = exp(x * input_scale) * (alpha * input_scale)
    return grad * (where(x > 0.0, 1.0, below) * scale)


@_rule("sigmoid_backward")
def _sigmoid_backward(grad: Scalar, y: Scalar) -> Scalar:
    x = y.operand_of("sigmoid")  # the complement of a sigmoid near 1 is a sigmoid too, and more precise
    rest = 1.0 - y if x is None else sigmoid(-x)
    return grad * (y * rest)


@_rule("tanh_backward")
def _tanh_backward(grad: Scalar, y: Scalar) -> Scalar:
    x = y.operand_of("tanh")
    slope = 1.0 - y * y if x is None else tanh_slope(x)
    return grad * slope


@_rule("silu")
def _silu(x: Scalar) -> Scalar:
    return x * sigmoid(x)


@_rule("silu_backward")
def _silu_backward(grad: Scalar, x: Scalar) -> Scalar:
    y = sigmoid(x)
    return grad * (y * (1.0 + x * sigmoid(-x)))


@_rule("softplus")
def _softplus(x: Scalar, beta: float = 1, threshold: float = 20) -> Scalar:
    scaled = x * beta
    return where(scaled > threshold, x, _log_one_plus_exp(scaled) * (1 / beta))


def _log_one_plus_exp(x: Scalar) -> Scalar:
    return maximum(x, 0.0) + log1p(exp(-abs(x)))


@_rule("softplus_backward")
def _softplus_backward(grad: Scalar, x: Scalar, beta: float, threshold: float) -> Scalar:
    scaled = x * beta
    return grad * where(scaled > threshold, 1.0, sigmoid(scaled))


@_rule("mish_backward")
def _mish_backward(grad: Scalar, x: Scalar) -> Scalar:
    inner = _log_one_plus_exp(x)
    slope = tanh_slope(inner) * (x * sigmoid(x))
    return grad * (tanh(inner) + slope)


@_rule("log_sigmoid_forward")
def _log_sigmoid(x: Scalar) -> Scalar:
    return minimum(x, 0.0) - log1p(exp(-abs(x)))


@_rule("log_sigmoid_backward")
def _log_sigmoid_backward(grad: Scalar, x: Scalar, _: Any) -> Scalar:
    return grad * sigmoid(-x)


@_rule("logaddexp")
def _logaddexp(x: Scalar, y: Scalar) -> Scalar:
    gap = where(x == y, 0.0, -abs(x - y))  # equal infinities have no difference
    return maximum(x, y) + log1p(exp(gap))


_CUBIC = 0.044715


def _gelu_inner(x: Scalar) -> Scalar:
    return x * (1.0 + x * x * _CUBIC) * math.sqrt(2 / math.pi)


@_rule("gelu")
def _gelu(x: Scalar, approximate: str = "none") -> Scalar:
    inner = tanh(_gelu_inner(x)) if approximate == "tanh" else erf(x * math.sqrt(0.5))
    return x * 0.5 * (1.0 + inner)


@_rule("gelu_backward")
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
