"""Derivatives of non-linear recurrences in PyTorch operations, which can be differentiated again.

Once all states are known, each step's Jacobian is, too, and derivatives are linear scans: gradients backward in time,
forward-mode derivatives forward.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.kernels.recurrence.arguments import (
    by_kind,
    concatenated_states,
    initial_states,
    last_shape,
    or_zeros,
    split,
    tensors_of_backward,
)
from ostinato.kernels.recurrence.nonlinear.sequential import compute_dtype, sequential
from ostinato.kernels.recurrence.symbolic.graph import evaluate
from ostinato.kernels.recurrence.symbolic.trace import Trace, derivatives, parse
from ostinato.kernels.scan import Order, order_of
from ostinato.kernels.scan.operators import linear_scan
from ostinato.kernels.scan.torch_ops import shift, zeroed


def composite(
    recurrence: str,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients, as ``nonlinear_recurrence_backward`` returns them, in differentiable operations."""
    trace = parse(recurrence)
    grads, grads_last, states, unsplit = tensors_of_backward(trace, tensors)
    arguments = split(trace, unsplit)
    dtype, order = compute_dtype(backend, states[0]), order_of(cu_seqlens, resets, reverse)
    before, jacobian = _linearised(trace, states, h0, order, arguments, dtype)
    transposed = [list(column) for column in zip(*jacobian, strict=True)]
    wide = [g.to(dtype) for g in or_zeros(grads, states[0].shape)]
    last = [g.to(dtype) for g in or_zeros(grads_last, last_shape(states[0], cu_seqlens))]
    # s[t] = J[t]^T (grad[t] + s[t+1]) is the gradient of the state before step t.
    offsets = [sum((j * g for j, g in zip(row, wide, strict=True)), torch.zeros_like(wide[0])) for row in transposed]
    back = Order(cu_seqlens, None, not reverse)
    scanned = _scan(transposed, offsets, last, back, backend)
    carried, first = scanned[: trace.states], scanned[trace.states :]
    total = [g + shift(s, end, back.reverse, cu_seqlens) for g, s, end in zip(wide, carried, last, strict=True)]
    slopes = evaluate(trace.backward, [*before, *(x.to(dtype) for x in arguments), *total])[trace.states :]
    shape = states[0].shape
    grad_arguments = [s.expand(shape).sum_to_size(x.shape).to(x.dtype) for s, x in zip(slopes, arguments, strict=True)]
    if len(unsplit) < len(arguments):
        grad_arguments = [torch.cat(x, -1) for x in by_kind(trace.sequences, grad_arguments)]
    grad_h0 = states[0].new_empty(0) if h0 is None else concatenated_states(first).to(states[0].dtype)
    return grad_h0, *grad_arguments


def jvp(args: tuple, results: tuple[Tensor, ...], tangents: tuple) -> tuple[Tensor, ...]:
    """The tangents of the operator's results, given those of its arguments, None for an argument without one."""
    recurrence, h0, cu_seqlens, resets, reverse, backend, *unsplit = args
    trace, order = parse(recurrence), order_of(cu_seqlens, resets, reverse)
    arguments, argument_tangents = split(trace, unsplit), split(trace, tangents[6:])
    states = results[: trace.states]
    dtype = compute_dtype(backend, states[0])
    before, jacobian = _linearised(trace, states, h0, order, arguments, dtype)
    wide = [x.to(dtype) for x in arguments]
    offsets = []
    for slopes in derivatives(trace, [*before, *wide]):
        of_arguments = zip(slopes[trace.states :], argument_tangents, strict=True)
        moving = [s * x.to(dtype) for s, x in of_arguments if x is not None]
        offsets.append(sum(moving, torch.zeros_like(before[0])))
    initial = [x.to(dtype) for x in initial_states(trace, states[0], tangents[1], cu_seqlens)]
    result_tangents = _scan(jacobian, offsets, initial, order._replace(resets=None), backend)
    return tuple(x.to(states[0].dtype) for x in result_tangents)


def _linearised(
    trace: Trace,
    states: Sequence[Tensor],
    h0: Tensor | None,
    order: Order,
    arguments: Sequence[Tensor],
    dtype: torch.dtype,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The states before each step, and the step's Jacobian, which is zero where the state is reset before it."""
    cu_seqlens, resets, reverse = order
    if h0 is None:  # absent initial states are constant, and a derivative at zero may be infinite
        first = shift(torch.ones_like(states[0][..., :1]), None, reverse, cu_seqlens)[..., 0] == 0
        resets = first if resets is None else resets | first
    initial = [None] * trace.states if h0 is None else initial_states(trace, states[0], h0, cu_seqlens)
    before = [
        zeroed(shift(x.to(dtype), start, reverse, cu_seqlens), resets) for x, start in zip(states, initial, strict=True)
    ]
    # Jacobians after a reset are discarded, but evaluated at 0.5 instead of zero: if their own derivatives were
    # infinite, these times zero would be NaN.
    points = [zeroed(x, resets, zero=0.5) for x in before]
    slopes = evaluate(trace.jacobian, [*points, *(x.to(dtype) for x in arguments)])
    flat = [zeroed(x.expand(before[0].shape), resets) for x in slopes]
    return before, [flat[k : k + trace.states] for k in range(0, len(flat), trace.states)]


def _scan(
    a: Sequence[Sequence[Tensor]], b: Sequence[Tensor], initial: Sequence[Tensor], order: Order, backend: str
) -> list[Tensor]:
    """All states, then the last ones, of a linear recurrence of S states with an S x S matrix per step."""
    count = len(b)
    if count == 1:
        return list(linear_scan(a[0][0], b[0], initial[0], *order, backend))

    def step(before: list[Tensor], row: list[Tensor]) -> list[Tensor]:
        offsets, matrix = row[:count], row[count:]
        products = [x * y for x, y in zip(matrix, before * count, strict=True)]
        return [sum(products[k * count : (k + 1) * count], offset) for k, offset in enumerate(offsets)]

    return sequential(step, initial, [*b, *itertools.chain(*a)], order)
