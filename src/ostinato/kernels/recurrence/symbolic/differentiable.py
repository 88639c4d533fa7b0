"""A traced function as a differentiable PyTorch function, with the derivatives of the trace, of any order."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ostinato.kernels.operators.dispatch import autograd_function
from ostinato.kernels.recurrence.symbolic.graph import evaluate
from ostinato.kernels.recurrence.symbolic.trace import Trace, derivatives


@functools.lru_cache(maxsize=1024)
def differentiable(trace: Trace) -> Callable[..., tuple[Tensor, ...]]:
    """The function that was traced, of the states and the arguments, (..., D) or (D,), all of one floating dtype.

    Its derivatives are those of the trace: autograd through the forward graph would ignore where the function stops a
    gradient, and how its ``autograd.Function``s define theirs.  Their own derivatives are those of the operations that
    compute them.
    """

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        shape = torch.broadcast_shapes(*(x.shape for x in inputs))
        return tuple(x.expand(shape).clone() for x in evaluate(trace.forward, inputs))

    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], _: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors
        slopes = evaluate(trace.backward, [*inputs, *grads])
        shape = grads[0].shape
        return tuple(s.expand(shape).sum_to_size(x.shape) for s, x in zip(slopes, inputs, strict=True))

    def push_forward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        with forward_ad._set_fwd_grad_enabled(True):  # PyTorch disables it here, which would drop nested tangents
            inputs = [forward_ad.unpack_dual(x)[0] for x in ctx.saved_tensors]
            zeros = inputs[0].new_zeros(torch.broadcast_shapes(*(x.shape for x in inputs)))
            moves = (
                [s * x for s, x in zip(slopes, tangents, strict=True) if x is not None]
                for slopes in derivatives(trace, inputs)
            )
            return tuple(sum(of_result, zeros) for of_result in moves)

    function = autograd_function(
        trace.name, forward=forward, setup_context=setup_context, backward=backward, jvp=push_forward
    )
    function.generate_vmap_rule = True
    return function.apply
