"""The definition of a recurrence with recurrent weights, step by step in PyTorch operations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.persistent.modes import without_autocast
from ostinato.kernels.recurrence.arguments import in_order, initial_states
from ostinato.kernels.recurrence.backends import nonlinear_kernels_on
from ostinato.kernels.recurrence.nonlinear.sequential import compute_dtype, sequential
from ostinato.kernels.recurrence.symbolic.differentiable import differentiable
from ostinato.kernels.recurrence.symbolic.graph import evaluate
from ostinato.kernels.recurrence.symbolic.trace import Trace, parse
from ostinato.kernels.scan import order_of


def width_of(weight_hh: Tensor) -> int:
    """D, the number of channels of a state."""
    return weight_hh.shape[-1] * (weight_hh.shape[0] if weight_hh.dim() == 3 else 1)


def with_products(arguments: Sequence[Tensor], h: Tensor, weight_hh: Tensor) -> list[Tensor]:
    """The arguments of one step, (B, D) or (D,), with the products of the weights and h added to the first ones."""
    products: Sequence[Tensor]
    with without_autocast(h.device.type):  # like the kernels, which do not round the products
        if weight_hh.dim() == 2:
            products = F.linear(h, weight_hh).split(weight_hh.shape[1], -1)
        else:
            heads, rows, width = weight_hh.shape
            of_heads = torch.bmm(h.unflatten(-1, (heads, width)).transpose(0, 1), weight_hh.mT)  # (heads, B, G * width)
            parts = of_heads.unflatten(-1, (rows // max(width, 1), width))
            products = parts.permute(2, 1, 0, 3).flatten(2).unbind()
    sums = [x + product for x, product in zip(arguments, products, strict=False)]
    return [*sums, *arguments[len(sums) :]]


def by_steps(recurrence: str, *others: Any) -> tuple[Tensor, ...]:
    """The operator ``weighted_recurrence`` in PyTorch operations; differentiable, so that zeros are kept."""
    trace = parse(recurrence)
    return _by_steps(trace, lambda *inputs: evaluate(trace.forward, inputs), *others)


def differentiable_by_steps(recurrence: str, *others: Any) -> tuple[Tensor, ...]:
    """The same with the trace's own derivatives, as the function may replace those of its operations."""
    trace = parse(recurrence)
    return _by_steps(trace, differentiable(trace), *others)


def _by_steps(
    trace: Trace,
    advance: Callable[..., Sequence[Tensor]],
    weight_hh: Tensor,
    sequences: Tensor,
    parameters: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    training: bool,
) -> tuple[Tensor, ...]:
    """The operator, given the function of one step, from the states and the arguments to the next states."""
    width = width_of(weight_hh)
    arguments = in_order(trace.sequences, sequences.split(width, -1), parameters.split(width))
    like = arguments[0]
    dtype = compute_dtype(backend, like)
    weight = weight_hh.to(dtype)

    def step(before: list[Tensor], step_arguments: list[Tensor]) -> Sequence[Tensor]:
        return advance(*before, *with_products(step_arguments, before[0], weight))

    initial = [x.to(dtype) for x in initial_states(trace, like, h0, cu_seqlens)]
    results = sequential(step, initial, [x.to(dtype) for x in arguments], order_of(cu_seqlens, resets, reverse))
    return *(x.to(like.dtype) for x in results), empty_kept(sequences, backend, training).zero_()


def empty_kept(like: Tensor, backend: str, training: bool) -> Tensor:
    """An empty tensor of the shape of what the forward pass of the operator keeps for sequences like these."""
    if not training or nonlinear_kernels_on(backend, like.device.type) is None:
        return like.new_empty(0)
    batch, length, width = like.shape
    return like.new_empty(batch * length, width)
