"""A linear recurrence as a differentiable operator, computed by the backend that the caller names.

Like the operator of ``layer.py``, it takes the recurrence as the text of its trace.
"""

from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.operators.dispatch import gradient, gradients, operator, or_empty
from ostinato.kernels.operators.export import refuse_packed
from ostinato.kernels.operators.vmap import Groups
from ostinato.kernels.recurrence.arguments import first_sequence, in_order
from ostinato.kernels.recurrence.backends import kernels_on
from ostinato.kernels.recurrence.linear import torch_ops
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.scan import order_of
from ostinato.kernels.scan.operators import after_no_steps, check_cu_seqlens

# linear_recurrence(recurrence, h0, cu_seqlens, resets, reverse, backend, *arguments) -> h, h_last
#
# The arguments are those of the recurrence: sequences, (B, T, D), of any strides and one dtype, and parameters, (D,),
# each of any dtype.  The rest is as in linear_scan.


def _forward(
    recurrence: str,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *arguments: Tensor,
) -> tuple[Tensor, Tensor]:
    like = first_sequence(recurrence, arguments)
    check_cu_seqlens(cu_seqlens, like.shape[1])
    kernels, order = kernels_on(backend, like.device.type), order_of(cu_seqlens, resets, reverse)
    if like.numel() == 0:
        return like.new_empty(like.shape), after_no_steps(like, h0, order, 0.0)
    if kernels is None:
        return torch_ops.scan(recurrence, h0, cu_seqlens, resets, reverse, backend, *arguments)
    return kernels.scan(recurrence, h0, order, *arguments)


def _fake(recurrence: str, _h0: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    cu_seqlens, resets, reverse, _backend, *arguments = rest
    like = first_sequence(recurrence, arguments)
    order = order_of(cu_seqlens, resets, reverse)
    return like.new_empty(like.shape), like.new_empty(order.sequences(like), like.shape[2])


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.recurrence, h0, cu_seqlens, resets, ctx.reverse, ctx.backend, *arguments = inputs
    ctx.save_for_backward(h0, output[0], cu_seqlens, resets, *arguments)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad_h: Tensor | None, grad_h_last: Tensor | None) -> tuple:
    h0, h, cu_seqlens, resets, *arguments = ctx.saved_tensors
    if grad_h is None and grad_h_last is None:
        return (None,) * (6 + len(arguments))
    tensors = h0, h, grad_h, grad_h_last, cu_seqlens, resets
    grad_h0, *grads = linear_recurrence_backward(ctx.recurrence, *tensors, ctx.reverse, ctx.backend, *arguments)
    return None, None if h0 is None else grad_h0, None, None, None, None, *grads


def _backward_impl(
    recurrence: str,
    h0: Tensor | None,
    h: Tensor,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *arguments: Tensor,
) -> list[Tensor]:
    """Gradients of h0, empty without one, and of the arguments."""
    check_cu_seqlens(cu_seqlens, h.shape[1])
    order = order_of(cu_seqlens, resets, reverse)
    if h.numel() == 0:
        return [after_no_steps(h, grad_h_last, order, 0.0), *map(torch.zeros_like, arguments)]
    kernels = kernels_on(backend, h.device.type)
    if kernels is None:
        with torch.no_grad():
            others = h0, h, grad_h, grad_h_last, *order, backend
            results = _composite(recurrence, *others, *arguments)
        return [x.clone() for x in results]
    states = h, h0, grad_h, grad_h_last
    grad_sequences, grad_parameters, grad_h0 = kernels.scan_backward(recurrence, *states, order, *arguments)
    grads = in_order(parse(recurrence).sequences, grad_sequences, grad_parameters)
    # The parameters' gradients are rows of one tensor, but the results of an operator must not share memory.
    grad_arguments = (grad.to(x.dtype, copy=x.dim() == 1) for grad, x in zip(grads, arguments, strict=True))
    return [or_empty(grad_h0, h), *grad_arguments]


def _backward_fake(recurrence: str, h0: Tensor | None, h: Tensor, *rest: Any) -> list[Tensor]:
    return [h.new_empty(0 if h0 is None else h0.shape), *(x.new_empty(x.shape) for x in rest[6:])]


def _composite(
    recurrence: str,
    h0: Tensor | None,
    h: Tensor,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    args = recurrence, h0, *rest
    wanted = [False, h0 is not None, False, False, False, False] + [True] * (len(args) - 6)
    grads = gradients(torch_ops.scan, args, (grad_h, grad_h_last), wanted)
    return or_empty(grads[1], h), *(g for g in grads[6:] if g is not None)


def _groups(*args: Any) -> Groups:
    return (None, 1, None, None, None, None) + (1,) * (len(args) - 6), (1, 1)


def _backward_groups(*args: Any) -> Groups:
    count = len(args) - 9
    return (None, 1, 1, 1, 1) + (None,) * 4 + (1,) * count, (1,) * (1 + count)


linear_recurrence_backward = gradient(
    "linear_recurrence_backward", _backward_impl, _backward_fake, _backward_groups, _composite
)


def _plain(
    recurrence: str, h0: Tensor | None, cu_seqlens: Tensor | None, resets: Tensor | None, reverse: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    if cu_seqlens is not None:
        refuse_packed()
    return torch_ops.scan(recurrence, h0, None, resets, reverse, "loop", *rest[1:])


linear_recurrence = operator(
    "linear_recurrence", _forward, _fake, _context, _grad, _groups, plain=_plain, composite=torch_ops.scan
)
