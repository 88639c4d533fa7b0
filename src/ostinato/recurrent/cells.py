"""One step of RNN, GRU or LSTM layers by torch's cells, of which autograd takes the gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.persistent.operators import without_autocast

Step = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Any]
"""From an input, the states, if any, and all layers' weights to the output and a list of the next states."""


def by_cells(mode: str, layers: int, output_shape: tuple, state_shape: tuple, dropout: float = 0.0) -> Step:
    """A step by two GEMMs and a kernel per layer, which with gradients take less of the host's time than cuDNN does."""
    cell: Any = getattr(torch, f"{mode.lower()}_cell")
    lstm, batched = mode == "LSTM", len(state_shape) == 3
    apart: Any = Tensor.unbind if batched else functools.partial(Tensor.split, split_size=1)  # each with a batch
    joined: Any = torch.stack if batched else torch.cat

    def step(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        y, last, size = x.reshape(-1, x.shape[-1]), [], len(weights) // layers
        states = states or [x.new_zeros(state_shape)] * (2 if lstm else 1)
        for layer, before in enumerate(zip(*map(apart, states), strict=True)):
            if layer and dropout:
                y = F.dropout(y, dropout)
            after = cell(y, before if lstm else before[0], *weights[layer * size : (layer + 1) * size])
            last.append(after if lstm else (after,))
            y = last[-1][0]
        h, *c = zip(*last, strict=True)
        states = [joined(h), *(parts[0].view(state_shape) if layers == 1 else joined(parts) for parts in c)]
        return y.view(output_shape), states  # of which h is a copy: the output may be changed in place

    return step


def differentiable(step: Step, same: Step) -> Step:
    """The step with the gradients of another one that computes the same, from the inputs again."""
    apply = super(torch.autograd.Function, _Differentiable).apply  # skips a look for transforms

    def run(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        output, *new = apply(step, same, len(states), x, *states, *weights)
        return output, new

    return run


class _Differentiable(torch.autograd.Function):
    """See :func:`differentiable`."""

    @staticmethod
    def forward(ctx: Any, step: Step, same: Step, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.same, ctx.count = same, count
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        output, new = step(tensors[0], tensors[1 : 1 + count], tensors[1 + count :])
        return output, *new

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        needed, first = ctx.needs_input_grad[3:], 1 + ctx.count
        again = torch.is_grad_enabled()  # to be differentiated again
        with torch.enable_grad(), without_autocast(ctx.saved_tensors[0].device.type):
            own = [x.view_as(x) for x in ctx.saved_tensors]  # views tell the same tensor given twice apart
            output, new = ctx.same(own[0], own[1:first], own[first:])
            results = [y for y, grad in zip((output, *new), grads, strict=True) if grad is not None]
            inputs = [x for x, need in zip(own, needed, strict=True) if need]
            given = [grad for grad in grads if grad is not None]
            found = iter(torch.autograd.grad(results, inputs, given, create_graph=again, allow_unused=True))
        return None, None, None, *(next(found) if need else None for need in needed)
