"""Non-linear recurrences with recurrent weights as a differentiable operator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.matmul.gemm import gradient_of_weight, linear
from ostinato.kernels.matmul.precision import layers_allow_tf32
from ostinato.kernels.operators.dispatch import gradient, gradients, operator, or_empty
from ostinato.kernels.persistent.modes import without_autocast
from ostinato.kernels.persistent.reference import previous
from ostinato.kernels.recurrence.arguments import last_shape, or_zeros
from ostinato.kernels.recurrence.backends import nonlinear_kernels_on
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.recurrence.weighted import stepwise
from ostinato.kernels.recurrence.weighted.definition import by_steps
from ostinato.kernels.recurrence.weighted.layer import Executor, Layer
from ostinato.kernels.recurrence.weighted.rows import Rows
from ostinato.kernels.scan import Order, order_of
from ostinato.kernels.scan.operators import check_cu_seqlens

# weighted_recurrence(recurrence, weight_hh, sequences, parameters, h0, c0, cu_seqlens, resets, reverse, backend)
#   -> states, last states
#
# recurrence is a trace, as text; its arguments are given as N concatenated sequences, (B, T, N*D), and P parameters,
# (P*D,), of a dtype of their own.  To the first G sequences the products of weight_hh, (G*D, D), with the first of the
# states before a step are added.  h0 and c0 are the initial states, as in nonlinear_recurrence; the rest is as there.


def _forward(
    recurrence: str,
    weight_hh: Tensor,
    sequences: Tensor,
    parameters: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
) -> list[Tensor]:
    count, initial = parse(recurrence).states, (h0, c0)
    check_cu_seqlens(cu_seqlens, sequences.shape[1])
    kernels = nonlinear_kernels_on(backend, sequences.device.type)
    if sequences.numel() == 0:
        states, last = _like_states(recurrence, sequences, weight_hh, cu_seqlens)
        return [*states, *(y.zero_() if x is None else x.clone() for x, y in zip(initial, last, strict=False))]
    if kernels is None:
        args = recurrence, weight_hh, sequences, parameters, h0, c0, cu_seqlens, resets, reverse, backend
        stepped, (states, _) = by_steps(*args), _like_states(recurrence, sequences, weight_hh, cu_seqlens)
        return [*(y.copy_(x) for y, x in zip(states, stepped, strict=False)), *stepped[count:]]
    order = order_of(cu_seqlens, resets, reverse)
    rows, layer = _rows_and_layer(recurrence, weight_hh, sequences, parameters, initial[:count], order)
    with without_autocast(sequences.device.type):
        after, last = _executor_of(layer, sequences, False).forward(layer, rows.of(sequences))
    return [*map(rows.back, after), *map(rows.states_back, last)]


def _rows_and_layer(
    recurrence: str,
    weight_hh: Tensor,
    sequences: Tensor,
    parameters: Tensor,
    initial: Sequence[Tensor | None],
    order: Order,
) -> tuple[Rows, Layer]:
    """How sequences become rows, and the recurrence over these."""
    trace, width = parse(recurrence), weight_hh.shape[1]
    rows = Rows(sequences, order)
    states = None
    if any(x is not None for x in initial):
        zeros = sequences.new_zeros(rows.sequences.batch, width)
        states = [zeros if x is None else rows.of_states(x) for x in initial]
    return rows, Layer(trace, weight_hh, parameters.view(-1, width), states, rows.sequences)


def _executor_of(layer: Layer, like: Tensor, backward: bool) -> Executor:
    """Who takes sequences such as `like` through time in one direction, where there are kernels."""
    found = None
    if like.is_cuda:
        from ostinato.kernels.recurrence.weighted import persistent

        found = persistent.executor_of(layer, like, backward)
    return found or stepwise


def _like_states(
    recurrence: str, like: Tensor, weight_hh: Tensor, cu_seqlens: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that are laid out as the states over time, and as the last ones."""
    count, width = range(parse(recurrence).states), weight_hh.shape[1]
    last = [like.new_empty(last_shape(like, cu_seqlens)[0], width) for _ in count]
    return [_laid_out(like, width, cu_seqlens) for _ in count], last


def _laid_out(like: Tensor, width: int, cu_seqlens: Tensor | None) -> Tensor:
    """A tensor (B, T, width) as rows give it."""
    batch, length, _ = like.shape
    if cu_seqlens is not None:
        return like.new_empty(batch, length, width)
    return like.new_empty(length, batch, width).transpose(0, 1)


def _fake(recurrence: str, weight_hh: Tensor, sequences: Tensor, *others: Any) -> list[Tensor]:
    states, last = _like_states(recurrence, sequences, weight_hh, others[3])
    return [*states, *last]


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.recurrence, *tensors, ctx.reverse, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output[: parse(ctx.recurrence).states])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, *grads: Tensor | None) -> tuple:
    if all(g is None for g in grads):
        return (None,) * 10
    saved = ctx.saved_tensors  # asked for once: checkpoints compute them anew
    *tensors, h0, c0, cu_seqlens, resets = saved[:7]
    states = saved[7:]
    given = [states[0].new_empty(0) if g is None else g for g in grads]
    options = cu_seqlens, resets, ctx.reverse, ctx.backend
    *found, of_h0, of_c0 = _backward(ctx.recurrence, *tensors, h0, c0, *options, *given, *states)
    of_initial = (None if x is None else g for x, g in zip((h0, c0), (of_h0, of_c0), strict=True))
    return None, *found, *of_initial, None, None, None, None


def _backward_impl(
    recurrence: str,
    weight_hh: Tensor,
    sequences: Tensor,
    parameters: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *tensors: Tensor,
) -> list[Tensor]:
    """Gradients of weight_hh, the sequences, the parameters, h0 and c0; empty ones of absent states.

    ``tensors`` are the gradients of states and of last states, an empty one of zeros, and the states.
    """
    count = parse(recurrence).states
    grads, grads_last, states = (tensors[k * count : (k + 1) * count] for k in range(3))
    absent, initial = [sequences.new_empty(0) for _ in range(2)], (h0, c0)[:count]
    if sequences.numel() == 0:
        last = or_zeros(grads_last, torch.Size((Order(cu_seqlens).sequences(sequences), weight_hh.shape[1])))
        of_initial = [or_empty(None if x is None else g.clone(), sequences) for x, g in zip(initial, last, strict=True)]
        return [*map(torch.zeros_like, (weight_hh, sequences, parameters)), *[*of_initial, *absent][:2]]
    if nonlinear_kernels_on(backend, sequences.device.type) is None:
        args = recurrence, weight_hh, sequences, parameters, h0, c0, cu_seqlens, resets, reverse, backend
        with torch.no_grad():
            of_weight, of_sequences, *others = (x.clone() for x in _composite(*args, *tensors))
        own = _laid_out(sequences, sequences.shape[2], cu_seqlens)
        return [of_weight, own.copy_(of_sequences), *others]
    order = order_of(cu_seqlens, resets, reverse)
    rows, layer = _rows_and_layer(recurrence, weight_hh, sequences, parameters, initial, order)
    firsts: Sequence[Tensor | None] = layer.initial or [None] * count
    before = [previous(rows.of(y), x, layer.sequences) for y, x in zip(states, firsts, strict=True)]
    tf32, given = layers_allow_tf32(sequences.device, sequences.dtype), rows.of(sequences)
    of_rows = [rows.of(g) if g.numel() else None for g in grads]
    of_last: list[Tensor | None] = [rows.of_states(g) if g.numel() else None for g in grads_last]
    executor = _executor_of(layer, sequences, True)
    with without_autocast(sequences.device.type):
        sums = linear(before[0], weight_hh, None, tf32).add_(given[:, : layer.with_products])
        if layer.with_products < given.shape[1]:
            sums = torch.cat([sums, given[:, layer.with_products :]], 1)
        found, of_parameters, of_firsts = executor.backward(layer, sums, before, of_rows, of_last)
        of_weight = gradient_of_weight(found[:, : layer.with_products], before[0], tf32=tf32)
    of_initial = [
        sequences.new_empty(0) if x is None else rows.states_back(g) for x, g in zip(initial, of_firsts, strict=True)
    ]
    of_arguments = rows.back(found), of_parameters.flatten().to(parameters.dtype, copy=True)
    return [of_weight, *of_arguments, *[*of_initial, *absent][:2]]


def _backward_fake(
    recurrence: str, weight_hh: Tensor, sequences: Tensor, parameters: Tensor, h0: Any, c0: Any, *others: Any
) -> list[Tensor]:
    empty = sequences.new_empty(0)
    of_sequences = _laid_out(sequences, sequences.shape[2], others[0])
    of_initial = [torch.empty_like(empty if x is None else x) for x in (h0, c0)]
    return [torch.empty_like(weight_hh), of_sequences, torch.empty_like(parameters), *of_initial]


def _composite(recurrence: str, *others: Any) -> tuple[Tensor, ...]:
    """The gradient, as :func:`_backward_impl` returns it, in differentiable operations."""
    given, tensors = (recurrence, *others[:9]), others[9:]
    cotangents = [g if g.numel() else None for g in tensors[: 2 * parse(recurrence).states]]
    wanted = [isinstance(x, Tensor) and x.is_floating_point() for x in given]
    return tuple(or_empty(g, given[2]) for g in gradients(by_steps, given, cotangents, wanted)[1:6])


_backward = gradient("weighted_recurrence_backward", _backward_impl, _backward_fake, composite=_composite)
weighted_recurrence = operator(
    "weighted_recurrence", _forward, _fake, _context, _grad, plain=by_steps, composite=by_steps
)
