"""Tracing a recurrence's function: its graphs compute what PyTorch does, and what has none is refused by its line."""

import functools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from ostinato.kernels.recurrence.symbolic.builder import Builder
from ostinato.kernels.recurrence.symbolic.graph import evaluate
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.recurrence.symbolic.tracer import trace

FUNCTIONS = {
    "arithmetic": lambda x, y: (x + 2 * y - 1, (1 - x) / (y * y + 1)),
    "sigmoid": lambda x, y: (torch.sigmoid(-x), torch.sigmoid(x) * torch.tanh(y)),
    "exponentials": lambda x, y: (torch.exp(-x.abs()), torch.expm1(x) * torch.log1p(y * y) + torch.log(1 + y * y)),
    "roots": lambda x, y: (torch.sqrt(x * x + 1) / torch.sqrt(y * y + 2), torch.rsqrt(x * x + 1).reciprocal()),
    "powers": lambda x, y: (x**3 + 2**y, (x * x + 1) ** 1.7 + (y * y + 1) ** -2),
    "waves": lambda x, y: (x.sin() * y.cos(), torch.erf(x) * y.sign()),
    "angles": lambda x, y: (
        torch.atan2(x, y) + torch.atan(y),
        x.tan() + torch.asin(x.sin() / 2) * torch.acos(y.cos() / 2),
    ),
    "hyperbolas": lambda x, y: (
        torch.sinh(x) / torch.cosh(y) + torch.hypot(x, y),
        torch.asinh(x) + torch.atanh(y.sin() / 2),
    ),
    "of a cosine's inverse": lambda x, y: (torch.acosh(1.5 + x * x), y.sgn() * x),
    "rounding": lambda x, y: (
        x + x.floor() + (3 * x).ceil() * y,
        (4 * x).round() * y + (5 * y).trunc() + (2 * y).frac(),
    ),
    "remainders": lambda x, y: (x % y + x % 0.7, torch.fmod(x, y) + torch.fmod(x, -0.3) * y),
    "whole quotients": lambda x, y: (x.div(y, rounding_mode="floor") * y, x.div(y, rounding_mode="trunc") + x),
    "rounded straight through": lambda x, y: (x + (8 * x).round().div(8).sub(x).detach(), y),
    "branches": lambda x, y: (torch.where(x >= 0, x + 0.5, torch.sigmoid(x)), x.masked_fill((x > 0) & ~(y <= 1), 0.5)),
    "extremes": lambda x, y: (x.clamp(-1, 1) * y.clamp(max=0.3), torch.maximum(x, y) + torch.minimum(x, 2 * y)),
    "rectifiers": lambda x, y: (F.relu(x) + F.leaky_relu(y), F.hardtanh(x) + F.relu6(y)),
    "softplus": lambda x, y: (F.softplus(9 * x), F.logsigmoid(y) + F.softplus(x, 2.0, 3.0) + torch.logaddexp(x, y)),
    "shrunk": lambda x, y: (
        F.hardshrink(x) + F.softshrink(2 * x),
        F.hardswish(2 * y) + torch.fmax(x, y) * torch.fmin(x, 2 * y),
    ),
    "tests": lambda x, y: (
        torch.where((x > 0) ^ (y > 0), x, 2 * x),
        torch.where(torch.logical_xor(x > y, y > 0), y, x),
    ),
    "sums and products of tests": lambda x, y: (
        ((x > 0) + (y > 0)) * x + ((x > 0) * (y > 1)) * y,
        torch.where(x > 1, y > 0, x > 0) * x + torch.maximum(x > 0, y > 1) * y + (True + (x > 0)) * y,
    ),
    "smooth": lambda x, y: (F.silu(x) + F.gelu(y), F.gelu(x, approximate="tanh") + F.elu(y)),
    "of other scales": lambda x, y: (F.celu(x, 0.7), F.celu(2 * y, 1.5)),
    "mish": lambda x, y: (F.mish(x), F.mish(8 * y)),
    "other bases": lambda x, y: (torch.exp2(x) + torch.log2(y * y + 1), torch.log10(x * x + 1) * y.square()),
    "bounds": lambda x, y: (x.clamp_min(-0.5) * y.clamp_max(0.3), x + (3 * y).floor_divide(0.7).detach()),
    "signs": lambda x, y: (x * y.sgn(), (x % (x.abs() + 2) * y).sgn() * y),
    "copies": lambda x, y: (x.clone() * y, torch.where((x > 1) | (x != y), y, x)),
    "constants": lambda x, y: (torch.full_like(x, 0.3), torch.tensor(2.0) * y.detach() + (x > 0) * y),
    "fused": lambda x, y: (torch.lerp(x, y, 0.3), torch.addcmul(x, y, x, value=2).addcdiv(x, y * y + 1)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_compute_what_pytorch_does(name):
    function = FUNCTIONS[name]
    x, y, *cotangents = 2 * torch.randn(4, 5, 6, 7, dtype=torch.float64)
    x, y = x.requires_grad_(), y.requires_grad_()
    expected = function(x, y)
    traced = trace(function, (True, False))
    for got, want in zip(evaluate(traced.forward, [x, y]), expected, strict=True):
        torch.testing.assert_close(got.expand_as(want), want, rtol=1e-12, atol=1e-12)
    outputs, given = zip(*((e, g) for e, g in zip(expected, cotangents, strict=True) if e.requires_grad), strict=True)
    expected = torch.autograd.grad(outputs, [x, y], given, materialize_grads=True)
    for got, want in zip(evaluate(traced.backward, [x, y, *cotangents]), expected, strict=True):
        torch.testing.assert_close(got.expand_as(want), want, rtol=1e-12, atol=1e-12)


LARGEST = torch.finfo(torch.float32).max
SPECIAL = torch.tensor([0.0, 0.2, 0.5, 1.0, 3.0, 6.0, 1e10, 1e30, LARGEST, torch.inf])
OF_SPECIAL_VALUES = {
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "hardtanh": F.hardtanh,
    "relu": F.relu,
    "threshold": lambda x: F.threshold(x, 0.5, 0.1),
    "numbers for others": lambda x: x.nan_to_num(0.3, 4.0, -5.0) + x.nan_to_num(posinf=1.0, neginf=2.0),
    "times zero": lambda x: 0 * x,
    "powers of one": lambda x: x + 1.0**x,
    "zero over": lambda x: 0 / (x.detach() - 1) + x,
    "over infinity": lambda x: x / torch.inf,
    "constants beyond float32": lambda x: x * 1e30 * 1e30 + x / 1e-40 + x * 1e-30 * 1e-30,
    "over a large multiple": lambda x: torch.full_like(x, 1e30) / (1e30 * x.detach().abs().reciprocal()) + x,
    "a common factor": lambda x: x * x.detach().rsqrt() - 2.0 * x.detach().rsqrt(),
    "over a hardswish": lambda x: F.hardswish(x).reciprocal(),
    "times a test": lambda x: (x > 1) * x,
    "times a branch": lambda x: torch.where(x > 1, x, 0.0) * x.detach(),
    "a branch over": lambda x: torch.where(x > 1, x, 0.0) / (x.detach() - 1),
    "remainder": lambda x: torch.full_like(x, 2.0).div(x.detach(), rounding_mode="floor") * x + 2.0 % x.detach(),
    "weight of 1": lambda x: torch.lerp(x, 0.1 + x.detach().sqrt(), 1.0),
    "weights up to 1": lambda x: torch.lerp(x, 0.1 + x.detach().sqrt(), torch.sigmoid(x.detach())),
}


@pytest.mark.parametrize("name", OF_SPECIAL_VALUES)
def test_special_values_are_pytorchs(name):
    function = OF_SPECIAL_VALUES[name]
    x = torch.cat([SPECIAL, -SPECIAL, torch.tensor([torch.nan])]).requires_grad_()
    expected = function(x)
    traced = trace(lambda x: (function(x), x), (True,))
    (found, _), ones = evaluate(traced.forward, [x]), torch.ones_like(x)
    torch.testing.assert_close(found, expected, equal_nan=True)
    (found,) = evaluate(traced.backward, [x, ones, 0 * ones])
    torch.testing.assert_close(found, torch.autograd.grad(expected, x, ones)[0], equal_nan=True)


def test_a_hardswish_has_the_slopes_of_its_straight_parts_where_these_begin():
    """As in PyTorch 2.13; earlier ones go on with the curve's."""
    traced = trace(lambda x: (F.hardswish(x), x), (True,))
    x = torch.tensor([-3.0, 3.0])
    (found,) = evaluate(traced.backward, [x, torch.ones(2), torch.zeros(2)])
    assert found.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_quotients_that_are_whole_by_rounding(mode):
    x, y = torch.arange(-30, 31).outer(torch.tensor([0.1, 0.3, 0.7, 1.1])), torch.tensor([0.1, 0.3, 0.7, 1.1])
    traced = trace(lambda x, y: (x.div(y, rounding_mode=mode), x), (True, False))
    assert torch.equal(evaluate(traced.forward, [x, y])[0], x.div(y, rounding_mode=mode))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients_by_constants_are_rounded_once(dtype):
    """As products with the inverse, 41 / 41 in float32 and 49 / 49 in float64 are less than 1."""
    x = torch.arange(200, dtype=dtype)
    traced = trace(lambda x: (torch.floor(x / 41), (x / 49).frac() + torch.div(x, 47, rounding_mode="trunc")), (True,))
    quotients, parts = evaluate(traced.forward, [x])
    assert torch.equal(quotients, torch.floor(x / 41))
    assert torch.equal(parts, (x / 49).frac() + torch.div(x, 47, rounding_mode="trunc"))


@pytest.mark.parametrize(
    "function",
    [
        *(torch.asinh, torch.tanh, F.mish, F.elu, F.celu, functools.partial(F.gelu, approximate="tanh")),
        *(lambda x: torch.logaddexp(x, 2 * x), lambda x: torch.logaddexp2(x, 2 * x)),
    ],
)
def test_second_derivatives_are_finite(function):
    x = torch.tensor([0.0, 0.5, -0.5, 20.0, -20.0, 90.0, -90.0, 1e4, -1e4]).requires_grad_()
    exact = x.detach().double().requires_grad_()
    traced, ones = trace(lambda x, y: (y * function(x), x), (True, True)), torch.ones_like(x)
    slope, value = evaluate(traced.backward, [x, ones, ones, 0 * ones])
    expected = torch.autograd.grad(function(exact).sum(), exact, create_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(value.sum(), x, retain_graph=True)[0], expected.float())
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    (expected,) = torch.autograd.grad(expected.sum(), exact)
    known = expected.isfinite() & ((x != 0) | (function not in (F.elu, F.celu)))  # of which 0 is a corner
    torch.testing.assert_close(curvature[known], expected[known].float())
    assert curvature.isfinite().all()


def test_a_hard_sigmoid_is_pytorchs_but_for_its_sixth():
    """Which PyTorch rounds to float32."""
    x = (4 * torch.randn(50, dtype=torch.float64)).requires_grad_()
    traced = trace(lambda x: (F.hardsigmoid(x), x), (True,))
    expected = F.hardsigmoid(x)
    torch.testing.assert_close(evaluate(traced.forward, [x])[0], expected, rtol=1e-7, atol=1e-7)
    (found,) = evaluate(traced.backward, [x, torch.ones_like(x), torch.zeros_like(x)])
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), x)[0], rtol=1e-7, atol=1e-7)


def test_states_have_a_jacobian():
    def lstm(state, x, u):
        h, c = state
        c = torch.sigmoid(u * h + x) * c + torch.tanh(h)
        return c.sin() * h, c

    traced = trace(lstm, (True, False), states=2)
    h, c, x, u = (torch.randn((), dtype=torch.float64) for _ in range(4))
    expected = torch.autograd.functional.jacobian(lambda *state: lstm(state, x, u), (h, c))
    got = evaluate(traced.jacobian, [h, c, x, u])
    torch.testing.assert_close(torch.stack(got).view(2, 2), torch.tensor(expected))
    gradients = evaluate(traced.backward, [h, c, x, u, torch.tensor(1.0).double(), torch.tensor(-2.0).double()])
    torch.testing.assert_close(gradients[1], expected[0][1] - 2 * expected[1][1])


def test_graphs_are_small():
    """The derivative of a gate and a piecewise candidate, with nothing idle in it."""
    traced = trace(lambda z, x: (torch.sigmoid(-z), torch.sigmoid(z) * F.relu(x)), (True, True))
    counts: dict[str, int] = {}
    for node in traced.backward.nodes:
        counts[node.name] = counts.get(node.name, 0) + 1
    # z: (relu(x) * grad_b - grad_a) * (sigmoid(z) * sigmoid(-z));  x: sigmoid(z) * grad_b where relu(x) > 0
    assert counts == {
        "input": 4, "constant": 1, "sigmoid": 2, "neg": 1, "maximum": 1, "le": 1, "mul": 4, "sub": 1, "where": 1
    }  # fmt: skip


def test_equal_functions_have_equal_graphs_and_others_not():
    def first(x, y):
        return torch.sigmoid(x), y * 2

    def second(q, p):
        return torch.sigmoid(q), p + p

    def third(x, y):
        return torch.sigmoid(x), y * 2.5

    graphs = [trace(f, (True, True))[1:] for f in (first, lambda x, y: (x.sigmoid(), 2 * y), second, third)]
    assert graphs[0] == graphs[1]
    assert len(set(graphs)) == 3
    assert trace(first, (True, False))[1:] != graphs[0]


def test_a_trace_is_read_from_its_text():
    traced = trace(lambda x, y: (torch.where(x > 0, x, float("-inf")), y.clamp(min=-1.5).exp()), (True, False))
    assert parse(traced.text) == traced


def refused(message, kind=ValueError):
    def decorate(function):
        return pytest.param(function, message, kind, id=function.__name__)

    return decorate


elsewhere = torch.randn(7)  # of a size that no traced tensor has


@refused(r"aten.sum is not one of .*test_trace.py:\d+: return x / x.sum\(-1, keepdim=True\), y")
def reduces(x, y):
    return x / x.sum(-1, keepdim=True), y


@refused("aten.roll")
def shifts(x, y):
    return x.roll(1, 1), y


@refused("reads the value of a tensor .*; use torch.where and functions of torch")
def takes_an_exponential_of_numbers(x, y):
    return math.exp(x), y


@refused("reads the value of a tensor .*; use torch.where and functions of torch")
def asks_numpy(x, y):
    return x, np.tanh(y)


@refused("reads the value of a tensor")
def branches(x, y):
    return (x, y) if torch.where(x > 0, 1.0, 0.0).detach().item() else (y, x)


@refused("asks for the ndim of a tensor")
def scales_by_dimensions(x, y):
    return x / x.ndim, y


@refused("asks for the dim of a tensor")
def takes_dimensions_for_a_kind(x, y):
    return (x, y) if x.dim() == 3 else (y, x)


@refused("asks for the shape of a tensor")
def scales_by_width(x, y):
    return x / x.shape[-1], y


@refused("mul_ changes a tensor in place")
def works_in_place(x, y):
    return x.mul_(2), y


@refused("exp writes to a tensor, out")
def writes_to_a_tensor(x, y):
    with torch.no_grad():
        return torch.exp(x, out=torch.zeros_like(x)), y


@refused("uses a tensor that is not among its arguments; make it one .*x \\* elsewhere")
def closes_over(x, y):
    return x * elsewhere, y


@refused(r"aten.ones makes a tensor of shape \(4,\), where a number would do")
def makes_a_row(x, y):
    return x * torch.ones(4), y


@refused("aten._to_copy to torch.bfloat16 cannot be generated")
def rounds(x, y):
    return x.bfloat16().float(), y


@refused("aten.bitwise_and of integers cannot be generated")
def picks_bits(x, y):
    return (torch.where(x > 0, 3, 1) & 2) * x, y


@refused("aten.mul makes complex numbers: pass what is complex as an argument")
def turns(x, y):
    return x * 1j, y


@refused("aten.polar makes complex numbers: pass what is complex as an argument")
def turns_by_an_angle(x, y):
    return torch.polar(x, y), y


@refused(
    "matmul, which calls aten.view, is not one of the elementwise operations .* those of weight_hh .*x @ elsewhere"
)
def mixes_channels(x, y):
    return x @ elsewhere, y


@refused("linear, which calls aten.t, is not one of .*, and products of a matrix with the state are those of weight_hh")
def has_a_layer(x, y):
    return torch.nn.functional.linear(x, elsewhere), y


@refused("aten.nan_to_num without posinf and neginf cannot be generated")
def has_bounds_of_its_dtype(x, y):
    return torch.nan_to_num(x), y


@refused("aten.rand_like .*backend='torch' runs it as it is")
def draws(x, y):
    return torch.rand_like(x), y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return torch.lgamma(grad)


@refused("aten.lgamma .*in its derivative")
def has_no_derivative(x, y):
    return Doubled.apply(x), y


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1, 1)


@refused("its gradient is not proportional to that of its results.*in its derivative")
def clips_its_gradient(x, y):
    return x, Clipped.apply(y)


@refused("its gradient is not proportional to that of its results")
def has_a_gradient_of_its_own(x, y):
    z = 2 * x
    z.register_hook(torch.ones_like)
    return z, y


@refused("derivative for aten::floor_divide is not implemented")
def divides_and_floors(x, y):
    return x // y, y


@refused("Found parameter numbers = 24 .*F.prelu")
def has_channels_elsewhere(x, y):
    return F.prelu(x, y), y


@refused("must return the coefficients a and b; got Tensor", TypeError)
def returns_one(x, y):
    return x


@refused("must return the coefficients a and b as tensors; got float", TypeError)
def returns_a_number(x, y):
    return x, 0.5


ELEMENTWISE = (
    closes_over,
    rounds,
    turns,
    turns_by_an_angle,
    has_bounds_of_its_dtype,
    draws,
    has_no_derivative,
    picks_bits,
    clips_its_gradient,
    has_a_gradient_of_its_own,
    returns_one,
)
SHAPED = (
    shifts,
    scales_by_width,
    scales_by_dimensions,
    takes_dimensions_for_a_kind,
    makes_a_row,
    mixes_channels,
    has_a_layer,
    has_channels_elsewhere,
)
REFUSED = (reduces, works_in_place, writes_to_a_tensor, divides_and_floors, *SHAPED, *ELEMENTWISE)

READING = (branches, takes_an_exponential_of_numbers, asks_numpy)


@pytest.mark.parametrize(("function", "message", "kind"), [*REFUSED, *READING, returns_a_number])
def test_what_cannot_be_generated_is_refused(function, message, kind):
    with pytest.raises(kind, match=message):
        trace(function, (True, True))


def test_a_gradient_may_skip_where_that_of_the_results_is_zero():
    """As the gradient of xlogy does, which is xlogy too."""
    traced = trace(lambda x, y: (torch.xlogy(x, y), x), (True, True))
    x, y, g = torch.rand(3, 20, dtype=torch.float64)
    found = evaluate(traced.backward, [x, y, g, torch.zeros_like(g)])
    for got, want in zip(found, (g * y.log(), g * x / y), strict=True):
        torch.testing.assert_close(got, want)


def test_the_callers_modes_do_not_reach_the_trace():
    def gates(z, x):
        return torch.sigmoid(z), x.relu()

    expected = trace(gates, (True, True))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.device("meta"):
        assert trace(gates, (True, True)) == expected
    torch.func.grad(lambda x: (trace(gates, (True, True)) == expected) * x)(torch.tensor(1.0))


def test_defaults_do_not_reach_the_trace():
    def shifted(x):
        return torch.where(x > 0, x, 0.1), x + torch.finfo(x.dtype).eps

    expected = trace(shifted, (True,))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert trace(shifted, (True,)) == expected
    finally:
        torch.set_default_dtype(torch.float32)
    builder = Builder()
    with torch.device("meta"):
        product = builder.add("mul", builder.constant(2.0), builder.constant(3.0))
    assert builder.value(product) == 6.0
