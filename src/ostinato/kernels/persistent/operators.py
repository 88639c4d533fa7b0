"""One recurrent layer and direction as a differentiable operator, registered with PyTorch.

The forward saves its inputs, the states h, an LSTM's c and, where kernels keep them, the gates' pre-activations.  The
layer and its tensors are defined in ``arguments.py``, what is computed of them in ``reference.py``.
"""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.operators.dispatch import gradient, operator, or_empty
from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.persistent import plain, reference
from ostinato.kernels.persistent.arguments import DIFFERENTIABLE, INPUTS, NEEDED_BITS, NOTHING, TENSORS, Arguments
from ostinato.kernels.persistent.backward import back_through_time
from ostinato.kernels.persistent.executor import Executor, executor_of
from ostinato.kernels.persistent.modes import is_vmapped_last, without_autocast
from ostinato.kernels.persistent.results import empty_results, whole


def _recurrent_layer(
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    mask_hh: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    batch: int,
    cell: str,
    reverse: bool,
    training: bool,
    path: str | None,
    at_once: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, h_n, c_n, and what is kept for the backward: c and the gates' pre-activations; empty for absent ones.

    Its signature is the operator's schema; all else names the arguments by
    :class:`~ostinato.kernels.persistent.arguments.Arguments`.
    """
    tensors = x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets
    args = *tensors, batch, cell, reverse, training, path, at_once
    if not batch:
        return empty_results(*args)  # which have no elements
    return whole(args, executor_of(*args)(*args))


def context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    h, _, _, c, gates = output
    # As an executor has it, where the operator's are empty: checkpoints compare how many tensors two calls save.
    kept = (None if x is None or not x.shape[-1] else x for x in (c, gates))
    ctx.save_for_backward(*inputs[:TENSORS], h, *kept)
    ctx.settings = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def inputs(part: Any) -> tuple:
    """The operator's arguments, of what a part of several calls has kept."""
    return *part.saved_tensors[:TENSORS], *part.settings


def grad(ctx: Any, *grads: Tensor | None) -> tuple:
    args = backward_arguments(ctx, grads)
    executor, differentiable = getattr(ctx, "run", None), torch.is_grad_enabled()
    if isinstance(executor, Executor) and not differentiable and is_eager(args):
        with without_autocast(args[0].device.type):
            return *back_through_time(executor, *args)(), *NOTHING
    inputs, (h, c, gates, *rest) = args[:INPUTS], args[INPUTS:]
    kept = [h, or_empty(c, h), or_empty(gates, h)]
    if differentiable:  # what the forward kept follows from its inputs, whose derivatives are all
        kept = [x.detach() for x in kept]
    # The rows of a Jacobian are taken at once by a loop, one after the other by kernels.
    vmapped = differentiable and is_vmapped_last()
    run = _differentiable_gradients if vmapped else recurrent_layer_backward
    return _of_all_inputs(ctx, run(*inputs, *kept, *rest))


def backward_arguments(ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
    """What ``recurrent_layer_backward`` is called with: the forward's arguments, what it kept, gradients, `needed`."""
    needed = sum(compress(NEEDED_BITS, ctx.needs_input_grad))
    tensors = ctx.saved_tensors  # asked for once: checkpoints compute them anew
    return *tensors[:TENSORS], *ctx.settings, *tensors[TENSORS:], *grads[:3], needed


def _of_all_inputs(ctx: Any, found: Sequence[Tensor | None]) -> tuple:
    """Gradients of the first arguments as those of all, None where they are not needed."""
    needed = ctx.needs_input_grad[: len(DIFFERENTIABLE)]
    return *(grad if need else None for grad, need in zip(found, needed, strict=True)), *NOTHING


def _recurrent_layer_backward(
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    mask_hh: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    batch: int,
    cell: str,
    reverse: bool,
    training: bool,
    path: str | None,
    at_once: int,
    h: Tensor,
    c: Tensor,
    gates: Tensor,
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    needed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the DIFFERENTIABLE inputs, each empty unless its bit is set in `needed`."""
    tensors = x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets
    args = *tensors, batch, cell, reverse, training, path, at_once
    kept_and_grads = h, c, gates, grad_output, grad_h_n, grad_c_n
    if not batch:
        return tuple(x.zero_() for x in _recurrent_layer_backward_fake(*args, needed))  # type: ignore[return-value]
    with without_autocast(x.device.type):
        found: Any = back_through_time(executor_of(*args), *args, *kept_and_grads, needed)()
    return tuple(or_empty(grad, x) for grad in found)  # type: ignore[return-value]


def _recurrent_layer_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    tensors, needed = args[: len(DIFFERENTIABLE)], args[-1]
    return tuple(args[0].new_empty(x.shape if needed & bit else 0) for x, bit in zip(tensors, NEEDED_BITS, strict=True))


def _differentiable_gradients(*args: Any) -> tuple[Tensor, ...]:
    """As :func:`_recurrent_layer_backward`, through the reference's loop, which is differentiable itself."""
    given, (*_, grad_output, grad_h_n, grad_c_n, needed) = Arguments(*args[:INPUTS]), args[INPUTS:]
    names = [*compress(DIFFERENTIABLE, (needed & bit for bit in NEEDED_BITS))]
    grads = grad_output, grad_h_n, grad_c_n

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        changed: Any = zip(names, inputs, strict=True)
        own = given._replace(**dict(changed))
        results: Any = reference.forward(own.layer, F.linear(own.x, own.weight_ih, own.bias_ih))[:3]
        return tuple(y for y, grad in zip(results, grads, strict=True) if grad is not None)

    pull: Any = torch.func.vjp(forward, *(getattr(given, name) for name in names))[1]
    found = dict(zip(names, pull(tuple(grad for grad in grads if grad is not None)), strict=True))
    return tuple(or_empty(found.get(name), given.x) for name in DIFFERENTIABLE)


recurrent_layer_backward = gradient(
    "recurrent_layer_backward",
    _recurrent_layer_backward,
    _recurrent_layer_backward_fake,
    composite=_differentiable_gradients,
)
recurrent_layer = operator(
    "recurrent_layer",
    _recurrent_layer,
    empty_results,
    context,
    grad,
    plain=plain.recurrent_layer,
    prepare=executor_of,
)
