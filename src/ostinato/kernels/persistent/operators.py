"""One recurrent layer and direction as a differentiable operator, registered with PyTorch.

The forward saves its inputs, the states h, an LSTM's c and, where kernels keep them, the gates' pre-activations.
``arguments.py`` defines the layer and its tensors, ``reference.py`` what is computed from them.
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
    """The output, h_n, c_n, and what is saved for the backward: c and the gates' pre-activations; empty if absent.

    The signature is the operator's schema; other code refers to the arguments as fields of
    :class:`~ostinato.kernels.persistent.arguments.Arguments`.
    """
    tensors = x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets
    args = *tensors, batch, cell, reverse, training, path, at_once
    if not batch:
        return empty_results(*args)  # they have no elements
    return whole(args, executor_of(*args)(*args))


def context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    """Save what the gradient needs, for ``setup_context``."""
    h, _, _, c, gates = output
    # None for the operator's empty tensors, as executors have it: checkpointing compares how many tensors calls save.
    kept = (None if x is None or not x.shape[-1] else x for x in (c, gates))
    ctx.save_for_backward(*inputs[:TENSORS], h, *kept)
    ctx.settings = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def inputs(part: Any) -> tuple:
    """The operator's arguments, from what one of several calls has saved."""
    return *part.saved_tensors[:TENSORS], *part.settings


def grad(ctx: Any, *grads: Tensor | None) -> tuple:
    """The operator's gradient: eager calls bypass the backward operator."""
    args = backward_arguments(ctx, grads)
    executor, differentiable = getattr(ctx, "run", None), torch.is_grad_enabled()
    if isinstance(executor, Executor) and not differentiable and is_eager(args):
        with without_autocast(args[0].device.type):
            return *back_through_time(executor, *args)(), *NOTHING
    inputs, (h, c, gates, *rest) = args[:INPUTS], args[INPUTS:]
    kept = [h, or_empty(c, h), or_empty(gates, h)]
    if differentiable:  # saved tensors are functions of the inputs, whose derivatives already include theirs
        kept = [x.detach() for x in kept]
    # The reference loop computes all rows of a Jacobian at once, the kernels would one after the other.
    vmapped = differentiable and is_vmapped_last()
    run = _differentiable_gradients if vmapped else recurrent_layer_backward
    return _for_all_inputs(ctx, run(*inputs, *kept, *rest))


def backward_arguments(ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
    """The arguments of ``recurrent_layer_backward``: the forward's, what it saved, the results' gradients, `needed`."""
    needed = sum(compress(NEEDED_BITS, ctx.needs_input_grad))
    tensors = ctx.saved_tensors  # read only once, as checkpointing recomputes them at every access
    return *tensors[:TENSORS], *ctx.settings, *tensors[TENSORS:], *grads[:3], needed


def _for_all_inputs(ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
    """Gradients of all arguments from those of the DIFFERENTIABLE ones, None where they are not needed."""
    needed = ctx.needs_input_grad[: len(DIFFERENTIABLE)]
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), *NOTHING


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
        grads: Any = back_through_time(executor_of(*args), *args, *kept_and_grads, needed)()
    return tuple(or_empty(grad, x) for grad in grads)  # type: ignore[return-value]


def _recurrent_layer_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    tensors, needed = args[: len(DIFFERENTIABLE)], args[-1]
    return tuple(args[0].new_empty(x.shape if needed & bit else 0) for x, bit in zip(tensors, NEEDED_BITS, strict=True))


def _differentiable_gradients(*args: Any) -> tuple[Tensor, ...]:
    """The same as :func:`_recurrent_layer_backward`, by autograd through the reference loop; differentiable."""
    arguments, (*_, grad_output, grad_h_n, grad_c_n, needed) = Arguments(*args[:INPUTS]), args[INPUTS:]
    names = [*compress(DIFFERENTIABLE, (needed & bit for bit in NEEDED_BITS))]
    grads = grad_output, grad_h_n, grad_c_n

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        replaced: Any = zip(names, inputs, strict=True)
        call = arguments._replace(**dict(replaced))
        results: Any = reference.forward(call.layer, F.linear(call.x, call.weight_ih, call.bias_ih))[:3]
        return tuple(y for y, grad in zip(results, grads, strict=True) if grad is not None)

    pull: Any = torch.func.vjp(forward, *(getattr(arguments, name) for name in names))[1]
    input_grads = dict(zip(names, pull(tuple(grad for grad in grads if grad is not None)), strict=True))
    return tuple(or_empty(input_grads.get(name), arguments.x) for name in DIFFERENTIABLE)


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
