"""The recurrences of minGRU and minLSTM for each candidate function, traced with or without a bias."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ostinato.kernels.operators.export import constant_to_compilers
from ostinato.kernels.recurrence.symbolic.tracer import trace
from ostinato.recurrence import Recurrence, recurrence


def _positive(x: Tensor) -> Tensor:
    return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))


def _linear(x: Tensor) -> Tensor:
    return x


CANDIDATES: dict[str, Callable[[Tensor], Tensor]] = {"positive": _positive, "linear": _linear, "tanh": torch.tanh}


def _mingru(candidate: Callable[[Tensor], Tensor]) -> Recurrence:
    @recurrence
    def mingru(z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(-z), torch.sigmoid(z) * candidate(h)

    return mingru


def _minlstm(candidate: Callable[[Tensor], Tensor]) -> Recurrence:
    @recurrence
    def minlstm(f: Tensor, i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        compiled = torch.compiler.is_compiling() and forward_ad._current_level < 0
        keep, mix = (_NormalisedGatesReverse if compiled else _NormalisedGates).apply(f, i)
        return keep, mix * candidate(h)

    return minlstm


def _normalised_gates(f: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """sigmoid(f) and sigmoid(i), each divided by their sum, and the factors of their derivatives."""
    f, i = f.clamp(min=-1e30), i.clamp(min=-1e30)  # inf - inf is NaN
    low = torch.minimum(f, i).clamp(max=1e30)
    # sigmoid(f) / (sigmoid(f) + sigmoid(i)) = (1 + e^-i) / (2 + e^-i + e^-f).  Where a gate is below e^-80, numerator
    # and denominator are scaled down to avoid overflow; the ones, which then are negligible, are dropped.
    shift, one = (-low).clamp(max=80), torch.where(low < -80, 0.0, 1.0)
    exp_f, exp_i = torch.exp(shift + (low - f)), torch.exp(shift + (low - i))
    p, q = one + exp_i, one + exp_f
    r = 1 / (p + q)
    return p * r, q * r, exp_f * r, exp_i * r


class _NormalisedGatesReverse(torch.autograd.Function):
    """sigmoid(f) and sigmoid(i), each divided by their sum; differentiating the quotients would cause cancellation.

    The derivative is in reverse mode only: PyTorch's compiler refuses functions with a ``jvp``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(f: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        return _normalised_gates(f, i)[:2]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        keep, mix, slope_f, slope_i = _normalised_gates(*ctx.saved_tensors)
        change = grads[0] - grads[1]
        return change * (keep * slope_f), -change * (mix * slope_i)


class _NormalisedGates(_NormalisedGatesReverse):
    """As :class:`_NormalisedGatesReverse`, with derivatives in both modes."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, Tensor]:
        with forward_ad._set_fwd_grad_enabled(True):  # PyTorch disables it here, which would drop nested tangents
            keep, mix, slope_f, slope_i = _normalised_gates(*(forward_ad.unpack_dual(x)[0] for x in ctx.saved_tensors))
            change = keep * slope_f * tangents[0] - mix * slope_i * tangents[1]
            return change, -change


RECURRENCES = {
    "mingru": {name: _mingru(candidate) for name, candidate in CANDIDATES.items()},
    "minlstm": {name: _minlstm(candidate) for name, candidate in CANDIDATES.items()},
}


GATES = {cell: len(variants["linear"].names) for cell, variants in RECURRENCES.items()}  # pre-activations per channel


@constant_to_compilers
def recurrence_of(cell: str, candidate: str, bias: bool) -> str:
    """The traced recurrence of a cell, in the operators' format; with ``bias``, it adds the bias to pre-activations."""
    return _traced(cell, candidate, bias)


@functools.cache
def _traced(cell: str, candidate: str, bias: bool) -> str:
    function, gates = RECURRENCES[cell][candidate].function, GATES[cell]

    def with_bias(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        return function(*map(torch.add, arguments[:gates], arguments[gates:]))

    return trace(with_bias if bias else function, [True] * gates + [False] * (gates * bias)).text
