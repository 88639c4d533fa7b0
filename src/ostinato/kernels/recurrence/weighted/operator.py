"""Non-linear recurrences with recurrent weights as a differentiable operator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.matmul.gemm import gradient_of_weight, linear
from ostinato.kernels.matmul.precision import layers_allow_tf32
from ostinato.kernels.operators.dispatch import gradient, gradients, operator, or_empty
from ostinato.kernels.persistent.reference import previous
from ostinato.kernels.recurrence.arguments import by_kind, in_order, last_shape, or_zeros, tensors_of_backward
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.recurrence.weighted import stepwise
from ostinato.kernels.recurrence.weighted.definition import by_steps
from ostinato.kernels.recurrence.weighted.layer import Executor, Layer
from ostinato.kernels.recurrence.weighted.rows import Rows
from ostinato.kernels.scan import order_of
from ostinato.kernels.scan.operators import check_cu_seqlens

# weighted_recurrence(recurrence, weight_hh, h0, c0, cu_seqlens, resets, reverse, backend, *arguments)
#   -> states, last states
#
# As nonlinear_recurrence, but that to the first G arguments, which are sequences, the products of weight_hh, (G*D, D),
# with the first of the states before a step are added.  All tensors but parameters have the dtype of the sequences.


def _forward(
    recurrence: str,
    weight_hh: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *arguments: Tensor,
) -> list[Tensor]:
    trace = parse(recurrence)
    sequences, parameters = by_kind(trace.sequences, arguments)
    like, states = sequences[0], (h0, c0)[: trace.states]
    check_cu_seqlens(cu_seqlens, like.shape[1])
    if like.numel() == 0:
        last = [like.new_zeros(last_shape(like, cu_seqlens)) if x is None else x.clone() for x in states]
        return [*(torch.empty_like(y) for y in _like_states(like, cu_seqlens, trace.states)), *last]
    rows = Rows(like, order_of(cu_seqlens, resets, reverse))
    layer = Layer(trace, weight_hh, parameters, _initial(rows, states, like), rows.sequences)
    after, last = _executor_of(layer, like, False).forward(layer, rows.of(sequences))
    return [*map(rows.back, after), *map(rows.states_back, last)]


def _initial(rows: Rows, states: Sequence[Tensor | None], like: Tensor) -> list[Tensor] | None:
    """The states before the first steps as the rows have them, None if all are absent."""
    if all(x is None for x in states):
        return None
    zeros = like.new_zeros(rows.sequences.batch, like.shape[2])
    return [zeros if x is None else rows.of_states(x) for x in states]


def _executor_of(layer: Layer, like: Tensor, backward: bool) -> Executor:
    """Who takes sequences such as `like` through time in one direction."""
    found = None
    if like.is_cuda:
        from ostinato.kernels.recurrence.weighted import persistent

        found = persistent.executor_of(layer, like, backward)
    return found or stepwise


def _like_states(like: Tensor, cu_seqlens: Tensor | None, count: int) -> list[Tensor]:
    """Tensors that are laid out as the states over time."""
    batch, length, width = like.shape
    if cu_seqlens is not None:
        return [like.new_empty(like.shape) for _ in range(count)]
    return [like.new_empty(length, batch, width).transpose(0, 1) for _ in range(count)]


def _fake(recurrence: str, weight_hh: Any, h0: Any, c0: Any, cu_seqlens: Tensor | None, *others: Any) -> list[Tensor]:
    trace, like = parse(recurrence), others[3]
    last = [like.new_empty(last_shape(like, cu_seqlens)) for _ in range(trace.states)]
    return [*_like_states(like, cu_seqlens, trace.states), *last]


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.recurrence, weight_hh, h0, c0, cu_seqlens, resets, ctx.reverse, ctx.backend, *arguments = inputs
    states = output[: parse(ctx.recurrence).states]
    ctx.save_for_backward(weight_hh, h0, c0, cu_seqlens, resets, *states, *arguments)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, *grads: Tensor | None) -> tuple:
    weight_hh, h0, c0, cu_seqlens, resets, *tensors = ctx.saved_tensors
    if all(g is None for g in grads):
        return (None,) * (8 + len(tensors) - parse(ctx.recurrence).states)
    given = [tensors[0].new_empty(0) if g is None else g for g in grads]
    of = ctx.recurrence, weight_hh, h0, c0, cu_seqlens, resets, ctx.reverse, ctx.backend
    of_weight, *found = _backward(*of, *given, *tensors)
    initial = [None if x is None else g for x, g in zip((h0, c0), found, strict=False)]
    return None, of_weight, *initial, None, None, None, None, *found[2:]


def _backward_impl(
    recurrence: str,
    weight_hh: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *tensors: Tensor,
) -> list[Tensor]:
    """Gradients of weight_hh, h0, c0 (empty ones of what is absent) and the arguments.

    ``tensors`` are the gradients of states and of last states, an empty one of zeros, the states and the arguments.
    """
    trace = parse(recurrence)
    grads, grads_last, states, arguments = tensors_of_backward(trace, tensors)
    sequences, parameters = by_kind(trace.sequences, arguments)
    like, initial = sequences[0], (h0, c0)[: trace.states]
    if like.numel() == 0:
        last = or_zeros(grads_last, last_shape(like, cu_seqlens))
        of_initial = [or_empty(None if x is None else g.clone(), like) for x, g in zip(initial, last, strict=True)]
        zeros = [torch.zeros_like(x) for x in (weight_hh, *arguments)]
        return [zeros[0], *[*of_initial, like.new_empty(0)][:2], *zeros[1:]]
    rows = Rows(like, order_of(cu_seqlens, resets, reverse))
    layer = Layer(trace, weight_hh, parameters, _initial(rows, initial, like), rows.sequences)
    firsts: Sequence[Tensor | None] = layer.initial or [None] * trace.states
    before = [previous(rows.of([y]), x, layer.sequences) for y, x in zip(states, firsts, strict=True)]
    tf32, sums = layers_allow_tf32(like.device, like.dtype), rows.of(sequences)
    sums[:, : layer.exchanged] += linear(before[0], weight_hh, None, tf32)
    of_rows = [rows.of([g]) if g.numel() else None for g in grads]
    of_last: list[Tensor | None] = [rows.of_states(g) if g.numel() else None for g in grads_last]
    executor = _executor_of(layer, like, True)
    found, of_parameters, of_firsts = executor.backward(layer, sums, before, of_rows, of_last)
    of_weight = gradient_of_weight(found[:, : layer.exchanged], before[0], tf32=tf32)
    of_initial = [
        like.new_empty(0) if x is None else rows.states_back(g) for x, g in zip(initial, of_firsts, strict=True)
    ]
    of_sequences = [rows.back(g) for g in found.split(like.shape[2], -1)]
    copies = [g.to(x.dtype, copy=True) for g, x in zip(of_parameters, parameters, strict=True)]
    both = [*of_initial, like.new_empty(0)][:2]
    return [of_weight, *both, *in_order(trace.sequences, [x.contiguous() for x in of_sequences], copies)]


def _backward_fake(recurrence: str, weight_hh: Tensor, h0: Any, c0: Any, *others: Any) -> list[Tensor]:
    *_, arguments = tensors_of_backward(parse(recurrence), others[4:])
    empty = arguments[0].new_empty(0)
    of_initial = [torch.empty_like(empty if x is None else x) for x in (h0, c0)]
    return [torch.empty_like(weight_hh), *of_initial, *(x.new_empty(x.shape) for x in arguments)]


def _composite(recurrence: str, weight_hh: Tensor, h0: Any, c0: Any, *others: Any) -> tuple[Tensor, ...]:
    """The gradient, as :func:`_backward_impl` returns it, in differentiable operations."""
    trace, options = parse(recurrence), others[:4]
    grads, grads_last, _, arguments = tensors_of_backward(trace, others[4:])
    args = recurrence, weight_hh, h0, c0, *options, *arguments
    cotangents = [g if g.numel() else None for g in (*grads, *grads_last)]
    wanted = [isinstance(x, Tensor) and x.is_floating_point() for x in args]
    _, of_weight, of_h0, of_c0, _, _, _, _, *of_arguments = gradients(by_steps, args, cotangents, wanted)
    return tuple(or_empty(g, arguments[0]) for g in (of_weight, of_h0, of_c0, *of_arguments))


_backward = gradient("weighted_recurrence_backward", _backward_impl, _backward_fake, composite=_composite)
weighted_recurrence = operator(
    "weighted_recurrence", _forward, _fake, _context, _grad, plain=by_steps, composite=by_steps
)
