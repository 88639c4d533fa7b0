"""Lowering of PyTorch's elementwise operations to scalar operations of a graph: one rule for each."""

import math
from collections.abc import Callable
from typing import Any

import torch

from ostinato.kernels.recurrence.graph import OPERATIONS, Builder


class Place(int):
    """A node's index in the graph, as distinct from a number."""


Operand = Place | float


class Unsupported(Exception):
    """Raised for an operation without a scalar form."""


class Scalars:
    """Builds nodes from places and numbers: ``s("mul", x, 2.0)``."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def __call__(self, name: str, *operands: Operand) -> Place:
        if any(isinstance(x, complex) for x in operands):
            raise Unsupported("with a complex number")
        places = (int(x) if isinstance(x, Place) else self.builder.constant(x) for x in operands)
        return Place(self.builder.add(name, *places))

    def operand_of(self, name: str, x: Operand) -> Place | None:
        """x of ``name(x)``, if that is what the operand is."""
        node = self.builder.node(x) if isinstance(x, Place) else None
        return Place(node.operands[0]) if node is not None and node.name == name else None


Rule = Callable[..., Place]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def _direct(name: str) -> Rule:
    return lambda s, *operands: s(name, *operands)


_OTHER_NAMES = {"and": "logical_and", "or": "logical_or", "not": "logical_not"}
RULES.update({_OTHER_NAMES.get(name, name): _direct(name) for name in OPERATIONS if name != "tanh_slope"})
RULES.update(sgn=_direct("sign"), bitwise_and=_direct("and"), bitwise_or=_direct("or"), bitwise_not=_direct("not"))
RULES.update(multiply=_direct("mul"), true_divide=_direct("div"), special_expit=_direct("sigmoid"))


@_rule("_efficientzerotensor")
def _zero(s: Scalars, *_: Any, **__: Any) -> Place:
    return s("add", 0.0, 0.0)


@_rule("detach", "alias", "clone", "contiguous", "positive")
def _same(s: Scalars, x: Place, **_: Any) -> Place:
    return x


@_rule("copy", "fill", "zero")
def _filled(s: Scalars, value: Operand = 0.0, *_: Any) -> Place:
    return s("add", value, 0.0)


@_rule("_to_copy", "to")
def _cast(s: Scalars, x: Place, *_: Any, dtype: torch.dtype | None = None) -> Place:
    if dtype in (None, torch.float32, torch.float64):
        return x  # kernels compute in one dtype, and could not round to another
    if dtype == torch.bool:
        return s("ne", x, 0.0)
    raise Unsupported(f"to {dtype}")


@_rule("add")
def _add(s: Scalars, x: Operand, y: Operand, alpha: float = 1) -> Place:
    return s("add", x, s("mul", y, alpha))


@_rule("sub", "subtract")
def _sub(s: Scalars, x: Operand, y: Operand, alpha: float = 1) -> Place:
    return s("sub", x, s("mul", y, alpha))


@_rule("rsub")
def _rsub(s: Scalars, x: Operand, y: Operand, alpha: float = 1) -> Place:
    return s("sub", y, s("mul", x, alpha))


@_rule("div", "divide")
def _div(s: Scalars, x: Operand, y: Operand, rounding_mode: str | None = None) -> Place:
    if rounding_mode is None:
        return s("div", x, y)
    rest = s("fmod", x, y) if rounding_mode == "trunc" else _remainder(s, x, y)
    whole = s("round", s("div", s("sub", x, rest), y))  # also of a quotient that is a little too small
    return s("where", s("eq", y, 0.0), s("div", x, y), whole)


@_rule("floor_divide")
def _floor_divide(s: Scalars, x: Operand, y: Operand) -> Place:
    return _div(s, x, y, "floor")


@_rule("remainder")
def _remainder(s: Scalars, x: Operand, y: Operand) -> Place:
    """With the sign of y, where that of fmod has the sign of x."""
    rest = s("fmod", x, y)
    negative, positive = (
        s("and", s(test, rest, 0.0), s(other, y, 0.0)) for test, other in (("lt", "gt"), ("gt", "lt"))
    )
    return s("where", s("or", negative, positive), s("add", rest, y), rest)


@_rule("round")
def _round(s: Scalars, x: Place, decimals: int = 0) -> Place:
    if decimals:
        raise Unsupported(f"with decimals={decimals}")
    return s("round", x)


@_rule("frac")
def _frac(s: Scalars, x: Place) -> Place:
    return s("sub", x, s("trunc", x))


@_rule("fmax")
def _fmax(s: Scalars, x: Place, y: Place) -> Place:
    return s("where", s("or", s("ge", x, y), s("ne", y, y)), x, y)


@_rule("fmin")
def _fmin(s: Scalars, x: Place, y: Place) -> Place:
    return s("where", s("or", s("le", x, y), s("ne", y, y)), x, y)


@_rule("logical_xor", "bitwise_xor")
def _xor(s: Scalars, x: Place, y: Place) -> Place:
    return s("and", s("or", x, y), s("not", s("and", x, y)))


@_rule("tan")
def _tan(s: Scalars, x: Place) -> Place:
    return s("div", s("sin", x), s("cos", x))


@_rule("atan")
def _atan(s: Scalars, x: Place) -> Place:
    return s("atan2", x, 1.0)


@_rule("asin")
def _asin(s: Scalars, x: Place) -> Place:
    return s("atan2", x, _leg(s, x))


@_rule("acos")
def _acos(s: Scalars, x: Place) -> Place:
    return s("atan2", _leg(s, x), x)


def _leg(s: Scalars, x: Place) -> Place:
    """The root of 1 - x * x, precise where x is near 1."""
    return s("sqrt", s("mul", s("sub", 1.0, x), s("add", 1.0, x)))


@_rule("sinh")
def _sinh(s: Scalars, x: Place) -> Place:
    return s("mul", s("sub", s("expm1", x), s("expm1", s("neg", x))), 0.5)


@_rule("cosh")
def _cosh(s: Scalars, x: Place) -> Place:
    return s("mul", s("add", s("exp", x), s("exp", s("neg", x))), 0.5)


@_rule("asinh")
def _asinh(s: Scalars, x: Place) -> Place:
    size = s("abs", x)
    inverse = s("reciprocal", size)
    share = s("reciprocal", s("add", inverse, s("sqrt", s("add", s("mul", inverse, inverse), 1.0))))
    return s("mul", s("sign", x), s("log1p", s("add", size, s("mul", size, share))))


@_rule("acosh")
def _acosh(s: Scalars, x: Place) -> Place:
    beyond = s("sub", x, 1.0)
    return s("log1p", s("add", beyond, s("mul", s("sqrt", beyond), s("sqrt", s("add", x, 1.0)))))


@_rule("atanh")
def _atanh(s: Scalars, x: Place) -> Place:
    return s("mul", s("sub", s("log1p", x), s("log1p", s("neg", x))), 0.5)


@_rule("square")
def _square(s: Scalars, x: Place) -> Place:
    return s("mul", x, x)


@_rule("addcmul")
def _addcmul(s: Scalars, x: Place, y: Place, z: Place, value: float = 1) -> Place:
    return s("add", x, s("mul", s("mul", y, z), value))


@_rule("addcdiv")
def _addcdiv(s: Scalars, x: Place, y: Place, z: Place, value: float = 1) -> Place:
    return s("add", x, s("mul", s("div", y, z), value))


@_rule("lerp")
def _lerp(s: Scalars, x: Place, y: Place, weight: Operand) -> Place:
    return s("add", x, s("mul", weight, s("sub", y, x)))


@_rule("exp2")
def _exp2(s: Scalars, x: Place) -> Place:
    return s("exp", s("mul", x, math.log(2)))


@_rule("log2")
def _log2(s: Scalars, x: Place) -> Place:
    return s("mul", s("log", x), 1 / math.log(2))


@_rule("log10")
def _log10(s: Scalars, x: Place) -> Place:
    return s("mul", s("log", x), 1 / math.log(10))


@_rule("isnan")
def _isnan(s: Scalars, x: Place) -> Place:
    return s("ne", x, x)


@_rule("clamp", "clip")
def _clamp(s: Scalars, x: Place, min: Operand | None = None, max: Operand | None = None) -> Place:
    x = x if min is None else s("maximum", x, min)
    return x if max is None else s("minimum", x, max)


@_rule("clamp_min")
def _clamp_min(s: Scalars, x: Place, min: Operand) -> Place:
    return s("maximum", x, min)


@_rule("clamp_max")
def _clamp_max(s: Scalars, x: Place, max: Operand) -> Place:
    return s("minimum", x, max)


@_rule("masked_fill")
def _masked_fill(s: Scalars, x: Place, mask: Place, value: Operand) -> Place:
    return s("where", mask, value, x)


@_rule("relu")
def _relu(s: Scalars, x: Place) -> Place:
    return s("maximum", x, 0.0)


@_rule("threshold_backward")
def _threshold_backward(s: Scalars, grad: Place, x: Place, threshold: float) -> Place:
    return s("where", s("gt", x, threshold), grad, 0.0)


@_rule("leaky_relu")
def _leaky_relu(s: Scalars, x: Place, slope: float = 0.01) -> Place:
    return s("where", s("gt", x, 0.0), x, s("mul", x, slope))


@_rule("leaky_relu_backward")
def _leaky_relu_backward(s: Scalars, grad: Place, x: Place, slope: float, _: bool) -> Place:
    return s("where", s("gt", x, 0.0), grad, s("mul", grad, slope))


@_rule("hardtanh")
def _hardtanh(s: Scalars, x: Place, low: float = -1.0, high: float = 1.0) -> Place:
    return _clamp(s, x, low, high)


@_rule("hardtanh_backward")
def _hardtanh_backward(s: Scalars, grad: Place, x: Place, low: float, high: float) -> Place:
    return s("where", s("and", s("gt", x, low), s("lt", x, high)), grad, 0.0)


@_rule("hardsigmoid")
def _hardsigmoid(s: Scalars, x: Place) -> Place:
    return _clamp(s, s("add", s("mul", x, 1 / 6), 0.5), 0.0, 1.0)


@_rule("hardsigmoid_backward")
def _hardsigmoid_backward(s: Scalars, grad: Place, x: Place) -> Place:
    return s("mul", _hardtanh_backward(s, grad, x, -3.0, 3.0), 1 / 6)


@_rule("hardswish")
def _hardswish(s: Scalars, x: Place) -> Place:
    return s("mul", x, _hardsigmoid(s, x))


@_rule("hardswish_backward")
def _hardswish_backward(s: Scalars, grad: Place, x: Place) -> Place:
    slope = s("add", s("mul", x, 1 / 3), 0.5)
    return s("mul", grad, s("where", s("gt", s("abs", x), 3.0), s("gt", x, 0.0), slope))


@_rule("hardshrink_backward", "softshrink_backward")
def _shrink_backward(s: Scalars, grad: Place, x: Place, bound: float) -> Place:
    return s("where", s("gt", s("abs", x), bound), grad, 0.0)


@_rule("elu")
def _elu(s: Scalars, x: Place, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Place:
    below = s("mul", s("expm1", s("mul", x, input_scale)), alpha)
    return s("mul", s("where", s("gt", x, 0.0), x, below), scale)


@_rule("elu_backward")
def _elu_backward(
    s: Scalars, grad: Place, alpha: float, scale: float, input_scale: float, is_result: bool, x: Place
) -> Place:
    if is_result:
        raise Unsupported("in place")
    below = s("mul", s("exp", s("mul", x, input_scale)), alpha * input_scale)
    return s("mul", grad, s("mul", s("where", s("gt", x, 0.0), 1.0, below), scale))


@_rule("sigmoid_backward")
def _sigmoid_backward(s: Scalars, grad: Place, y: Place) -> Place:
    x = s.operand_of("sigmoid", y)  # the complement of a sigmoid near 1 is a sigmoid too, and more precise
    rest = s("sub", 1.0, y) if x is None else s("sigmoid", s("neg", x))
    return s("mul", grad, s("mul", y, rest))


@_rule("tanh_backward")
def _tanh_backward(s: Scalars, grad: Place, y: Place) -> Place:
    x = s.operand_of("tanh", y)
    slope = s("sub", 1.0, s("mul", y, y)) if x is None else s("tanh_slope", x)
    return s("mul", grad, slope)


@_rule("silu")
def _silu(s: Scalars, x: Place) -> Place:
    return s("mul", x, s("sigmoid", x))


@_rule("silu_backward")
def _silu_backward(s: Scalars, grad: Place, x: Place) -> Place:
    y = s("sigmoid", x)
    return s("mul", grad, s("mul", y, s("add", 1.0, s("mul", x, s("sigmoid", s("neg", x))))))


@_rule("softplus")
def _softplus(s: Scalars, x: Place, beta: float = 1, threshold: float = 20) -> Place:
    scaled = s("mul", x, beta)
    return s("where", s("gt", scaled, threshold), x, s("mul", _log_one_plus_exp(s, scaled), 1 / beta))


def _log_one_plus_exp(s: Scalars, x: Operand) -> Place:
    return s("add", s("maximum", x, 0.0), s("log1p", s("exp", s("neg", s("abs", x)))))


@_rule("softplus_backward")
def _softplus_backward(s: Scalars, grad: Place, x: Place, beta: float, threshold: float) -> Place:
    scaled = s("mul", x, beta)
    return s("mul", grad, s("where", s("gt", scaled, threshold), 1.0, s("sigmoid", scaled)))


@_rule("mish_backward")
def _mish_backward(s: Scalars, grad: Place, x: Place) -> Place:
    inner = _log_one_plus_exp(s, x)
    slope = s("mul", s("tanh_slope", inner), s("mul", x, s("sigmoid", x)))
    return s("mul", grad, s("add", s("tanh", inner), slope))


@_rule("log_sigmoid_forward", "log_sigmoid")
def _log_sigmoid(s: Scalars, x: Place) -> Place:
    return s("sub", s("minimum", x, 0.0), s("log1p", s("exp", s("neg", s("abs", x)))))


@_rule("log_sigmoid_backward")
def _log_sigmoid_backward(s: Scalars, grad: Place, x: Place, _: Any) -> Place:
    return s("mul", grad, s("sigmoid", s("neg", x)))


@_rule("logaddexp")
def _logaddexp(s: Scalars, x: Place, y: Place) -> Place:
    gap = s("where", s("eq", x, y), 0.0, s("neg", s("abs", s("sub", x, y))))  # equal infinities have no difference
    return s("add", s("maximum", x, y), s("log1p", s("exp", gap)))


_CUBIC = 0.044715


def _gelu_inner(s: Scalars, x: Place) -> Place:
    return s("mul", s("mul", x, s("add", 1.0, s("mul", s("mul", x, x), _CUBIC))), math.sqrt(2 / math.pi))


@_rule("gelu")
def _gelu(s: Scalars, x: Place, approximate: str = "none") -> Place:
    inner = s("tanh", _gelu_inner(s, x)) if approximate == "tanh" else s("erf", s("mul", x, math.sqrt(0.5)))
    return s("mul", s("mul", x, 0.5), s("add", 1.0, inner))


@_rule("gelu_backward")
def _gelu_backward(s: Scalars, grad: Place, x: Place, approximate: str = "none") -> Place:
    square = s("mul", x, x)
    if approximate == "tanh":
        inner = _gelu_inner(s, x)
        slope = s("mul", s("add", 1.0, s("mul", square, 3 * _CUBIC)), math.sqrt(2 / math.pi))
        share, change = s("tanh", inner), s("mul", s("tanh_slope", inner), slope)
    else:
        share = s("erf", s("mul", x, math.sqrt(0.5)))
        change = s("mul", s("exp", s("mul", square, -0.5)), math.sqrt(2 / math.pi))
    half = s("mul", s("add", 1.0, share), 0.5)
    return s("mul", grad, s("add", half, s("mul", s("mul", x, 0.5), change)))
