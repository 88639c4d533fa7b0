"""One step of a traced recurrence in PyTorch operations, with the derivatives of the trace, of any order."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ostinato.kernels.operators.dispatch import autograd_function
from ostinato.kernels.recurrence.symbolic.graph import evaluate
from ostinato.kernels.recurrence.symbolic.trace import Trace, derivatives


@functools.lru_cache(maxsize=256)
def one_step(trace: Trace) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """The function of one step: from the states and the arguments, (B, D) or (D,), to the next states, (B, D).

    Its derivatives are those of the trace, which autograd would not find for the operations of a function that replaces
    its gradient.  Their own derivatives are those of the operations that compute them.
    """

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.expand(inputs[0].shape).clone() for x in evaluate(trace.forward, inputs))

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
            moves = (
                [s * x for s, x in zip(slopes, tangents, strict=True) if x is not None]
                for slopes in derivatives(trace, inputs)
            )
            return tuple(sum(of_state, torch.zeros_like(inputs[0])) for of_state in moves)

    function = autograd_function(
        trace.name, forward=forward, setup_context=setup_context, backward=backward, jvp=push_forward
    )
    function.generate_vmap_rule = True
    return lambda inputs: function.apply(*inputs)
