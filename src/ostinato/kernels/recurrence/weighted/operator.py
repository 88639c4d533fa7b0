"""Non-linear recurrences with recurrent weights as a differentiable operator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.matmul.gemm import gradient_of_weight
from ostinato.kernels.matmul.precision import layers_allow_tf32
from ostinato.kernels.operators.dispatch import gradient, gradients, operator, or_empty
from ostinato.kernels.persistent.modes import without_autocast
from ostinato.kernels.persistent.plan import Plan, no_kernel
from ostinato.kernels.persistent.reference import previous
from ostinato.kernels.persistent.sequences import Sequences
from ostinato.kernels.recurrence.arguments import concatenated_states, last_shape, or_zeros, split_states
from ostinato.kernels.recurrence.backends import nonlinear_kernels_on
from ostinato.kernels.recurrence.symbolic.trace import Trace, parse
from ostinato.kernels.recurrence.weighted import stepwise
from ostinato.kernels.recurrence.weighted.definition import by_steps, differentiable_by_steps, empty_kept, width_of
from ostinato.kernels.recurrence.weighted.layer import Executor, Layer
from ostinato.kernels.recurrence.weighted.rows import Rows
from ostinato.kernels.scan import Order, order_of
from ostinato.kernels.scan.operators import check_cu_seqlens

# weighted_recurrence(
#     recurrence, weight_hh, sequences, parameters, h0, cu_seqlens, resets, reverse, backend, training
# ) -> states, last states, and what is kept for the backward pass
#
# recurrence is the text of a trace.  Its arguments are N concatenated sequences, (B, T, N*D), and P concatenated
# parameters, (P*D,), whose dtype may differ.  The products of weight_hh, (G*D, D), with the first state before a step
# are added to the first G sequences; those of (H, G*D/H, D/H), of H heads, with each head's part of the state to its
# part of the sequences.  The other arguments are those of nonlinear_recurrence.  In training, kernels keep the
# sequences with the products added, (rows, N*D), in the order of Rows; else a backward pass computes them again.


def _forward(
    recurrence: str,
    weight_hh: Tensor,
    sequences: Tensor,
    parameters: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    training: bool,
) -> list[Tensor]:
    trace = parse(recurrence)
    count = trace.states
    check_cu_seqlens(cu_seqlens, sequences.shape[1])
    kernels = nonlinear_kernels_on(backend, sequences.device.type)
    if sequences.numel() == 0:
        states, last = _like_states(recurrence, sequences, weight_hh, cu_seqlens)
        last = [y.zero_() for y in last] if h0 is None else [x.clone() for x in split_states(h0, count)]
        return [*states, *last, empty_kept(sequences, backend, training)]
    if kernels is None:
        args = recurrence, weight_hh, sequences, parameters, h0, cu_seqlens, resets, reverse, backend, training
        results, (states, _) = by_steps(*args), _like_states(recurrence, sequences, weight_hh, cu_seqlens)
        return [*(y.copy_(x) for y, x in zip(states, results, strict=False)), *results[count:]]
    order = order_of(cu_seqlens, resets, reverse)
    rows, layer = _rows_and_layer(trace, weight_hh, sequences, parameters, h0, order)
    with without_autocast(sequences.device.type):
        executor = _executor_of(layer, sequences, False, training)
        after, last, kept = executor.forward(layer, rows.of(sequences), training)
    return [*map(rows.back, after), *map(rows.states_back, last), or_empty(kept, sequences)]


def _rows_and_layer(
    trace: Trace, weight_hh: Tensor, sequences: Tensor, parameters: Tensor, h0: Tensor | None, order: Order
) -> tuple[Rows, Layer]:
    """The conversion of the sequences to rows and back, and the recurrence over these rows."""
    rows = Rows(sequences, order)
    states = None if h0 is None else [*map(rows.of_states, split_states(h0, trace.states))]
    return rows, Layer(trace, weight_hh, parameters.view(-1, width_of(weight_hh)), states, rows.sequences)


def _executor_of(layer: Layer, like: Tensor, backward: bool, training: bool) -> Executor:
    """The executor of the forward or backward pass, for sequences like `like`: persistent if the weights fit."""
    if like.is_cuda:
        from ostinato.kernels.recurrence.weighted import persistent

        if (plan := persistent.plan_of(layer, like, backward, training)).has_kernel:
            return persistent.Persistent(plan.geometry)
    return stepwise


def plan_of(recurrence: str, weight_hh: Tensor, like: Tensor, order: Order, backend: str, training: bool) -> Plan:
    """How a call with sequences like `like`, (B, T, D), runs."""
    if like.numel() == 0:
        return no_kernel("there is nothing to compute")
    if nonlinear_kernels_on(backend, like.device.type) is None:
        return no_kernel("the function itself runs in PyTorch, step by step")
    if not like.is_cuda:
        return no_kernel("on a CPU, every step is a matrix product and a generated loop")
    from ostinato.kernels.recurrence.weighted import persistent

    sequences = Sequences(order.sequences(like), order.cu_seqlens, order.resets, order.reverse)
    layer = Layer(parse(recurrence), weight_hh, like.new_empty(0), None, sequences)
    forward = persistent.plan_of(layer, like, False, training)
    if not training or not forward.has_kernel:
        return forward
    backward = persistent.plan_of(layer, like, True, True)
    gradients = "" if backward.has_kernel else f"; gradients are computed step by step: {backward.reason}"
    return forward._replace(reason=forward.reason + gradients)


def _like_states(
    recurrence: str, like: Tensor, weight_hh: Tensor, cu_seqlens: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Empty tensors with the shapes and strides of the states over time, and of the last states."""
    count, width = range(parse(recurrence).states), width_of(weight_hh)
    last = [like.new_empty(last_shape(like, cu_seqlens)[0], width) for _ in count]
    return [_empty_like_rows(like, width, cu_seqlens) for _ in count], last


def _empty_like_rows(like: Tensor, width: int, cu_seqlens: Tensor | None) -> Tensor:
    """An empty tensor (B, T, width) with the strides that :meth:`Rows.back` returns."""
    batch, length, _ = like.shape
    if cu_seqlens is not None:
        return like.new_empty(batch, length, width)
    return like.new_empty(length, batch, width).transpose(0, 1)


def _fake(recurrence: str, weight_hh: Tensor, sequences: Tensor, *others: Any) -> list[Tensor]:
    *_, cu_seqlens, _, _, backend, training = others
    states, last = _like_states(recurrence, sequences, weight_hh, cu_seqlens)
    return [*states, *last, empty_kept(sequences, backend, training)]


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.recurrence, *tensors, ctx.reverse, ctx.backend, _ = inputs
    ctx.save_for_backward(*tensors, *output[: parse(ctx.recurrence).states], output[-1])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, *grads: Tensor | None) -> tuple:
    grads = grads[:-1]
    if all(g is None for g in grads):
        return (None,) * 10
    saved = ctx.saved_tensors  # read only once, as checkpointing recomputes them at every access
    *tensors, h0, cu_seqlens, resets = saved[:6]
    kept = [x.detach() for x in saved[6:]]  # follows from the inputs, as do all derivatives
    cotangents = [kept[0].new_empty(0) if g is None else g for g in grads]
    options = cu_seqlens, resets, ctx.reverse, ctx.backend
    *grad_tensors, grad_h0 = _backward(ctx.recurrence, *tensors, h0, *options, *cotangents, *kept)
    return None, *grad_tensors, None if h0 is None else grad_h0, *(None,) * 5


def _backward_impl(
    recurrence: str,
    weight_hh: Tensor,
    sequences: Tensor,
    parameters: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *tensors: Tensor,
) -> list[Tensor]:
    """Gradients of weight_hh, the sequences, the parameters and h0, empty if that is absent.

    ``tensors`` are the gradients of the states and of the last states, empty for zeros, then the states, and what else
    the forward pass kept.
    """
    trace = parse(recurrence)
    count = trace.states
    grads, grads_last, states = (tensors[k * count : (k + 1) * count] for k in range(3))
    if sequences.numel() == 0:
        last = or_zeros(grads_last, torch.Size((Order(cu_seqlens).sequences(sequences), width_of(weight_hh))))
        grad_h0 = None if h0 is None else concatenated_states(last).clone()
        return [*map(torch.zeros_like, (weight_hh, sequences, parameters)), or_empty(grad_h0, sequences)]
    if nonlinear_kernels_on(backend, sequences.device.type) is None:
        args = recurrence, weight_hh, sequences, parameters, h0, cu_seqlens, resets, reverse, backend
        with torch.no_grad():
            grad_weight, grad_sequences, *others = (x.clone() for x in _composite(*args, *tensors))
        strided = _empty_like_rows(sequences, sequences.shape[2], cu_seqlens)
        return [grad_weight, strided.copy_(grad_sequences), *others]
    order = order_of(cu_seqlens, resets, reverse)
    rows, layer = _rows_and_layer(trace, weight_hh, sequences, parameters, h0, order)
    firsts: Sequence[Tensor | None] = layer.initial or [None] * count
    before = [previous(rows.of(y), x, layer.sequences) for y, x in zip(states, firsts, strict=True)]
    tf32 = layers_allow_tf32(sequences.device, sequences.dtype)
    row_grads = [rows.of(g) if g.numel() else None for g in grads]
    row_grads_last: list[Tensor | None] = [rows.of_states(g) if g.numel() else None for g in grads_last]
    kept, executor = tensors[-1], _executor_of(layer, sequences, True, True)
    if kept.numel() == 0:  # nothing told the call of its backward, as in an exported program, or inside torch.func.jvp
        args = recurrence, weight_hh, sequences, parameters, h0, cu_seqlens, resets, reverse, backend
        *_, kept = _forward(*args, True)
    with without_autocast(sequences.device.type):
        grad_rows, grad_parameters, grads_h0 = executor.backward(layer, kept, before, row_grads, row_grads_last)
        grad_weight = _gradient_of_weights(layer, grad_rows, before[0], tf32)
    grad_h0 = None if h0 is None else rows.states_back(concatenated_states(grads_h0))
    grad_arguments = rows.back(grad_rows), grad_parameters.flatten().to(parameters.dtype, copy=True)
    return [grad_weight, *grad_arguments, or_empty(grad_h0, sequences)]


def _gradient_of_weights(layer: Layer, grad_rows: Tensor, before: Tensor, tf32: bool) -> Tensor:
    """The gradient of the layer's weights, given those of the arguments and the first state before each step."""
    grad_products = grad_rows[:, : layer.with_products]
    if layer.weight_hh.dim() == 2:
        return gradient_of_weight(grad_products, before, tf32=tf32)
    heads = zip(layer.by_head(grad_products), layer.by_head(before), strict=True)
    return torch.stack([gradient_of_weight(g.flatten(1), x[:, 0], tf32=tf32) for g, x in heads])


def _backward_fake(
    recurrence: str, weight_hh: Tensor, sequences: Tensor, parameters: Tensor, h0: Any, *others: Any
) -> list[Tensor]:
    empty = sequences.new_empty(0)
    grad_sequences = _empty_like_rows(sequences, sequences.shape[2], others[0])
    grad_h0 = torch.empty_like(empty if h0 is None else h0)
    return [torch.empty_like(weight_hh), grad_sequences, torch.empty_like(parameters), grad_h0]


def _composite(recurrence: str, *others: Any) -> tuple[Tensor, ...]:
    """The gradients, as :func:`_backward_impl` returns them, in differentiable operations."""
    args, tensors = (recurrence, *others[:8], False), others[8:]
    cotangents = [*(g if g.numel() else None for g in tensors[: 2 * parse(recurrence).states]), None]
    wanted = [isinstance(x, Tensor) and x.is_floating_point() for x in args]
    return tuple(or_empty(g, args[2]) for g in gradients(differentiable_by_steps, args, cotangents, wanted)[1:5])


_backward = gradient("weighted_recurrence_backward", _backward_impl, _backward_fake, composite=_composite)
weighted_recurrence = operator(
    "weighted_recurrence", _forward, _fake, _context, _grad, plain=by_steps, composite=differentiable_by_steps
)
