"""Non-linear recurrences as a differentiable operator, run by the backend that is asked for."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.operators.dispatch import gradient, operator, or_empty
from ostinato.kernels.operators.vmap import Groups
from ostinato.kernels.recurrence.arguments import (
    Call,
    by_kind,
    concatenated_states,
    in_order,
    initial_states,
    last_shape,
    or_zeros,
    split,
    tensors_of_backward,
)
from ostinato.kernels.recurrence.backends import nonlinear_kernels_on
from ostinato.kernels.recurrence.nonlinear.linearised import composite, jvp
from ostinato.kernels.recurrence.nonlinear.sequential import compute_dtype, sequential
from ostinato.kernels.recurrence.symbolic.graph import evaluate
from ostinato.kernels.recurrence.symbolic.trace import Trace, parse
from ostinato.kernels.scan import order_of
from ostinato.kernels.scan.operators import check_cu_seqlens

# nonlinear_recurrence(recurrence, h0, cu_seqlens, resets, reverse, backend, *arguments) -> states, last states
#
# recurrence is the text of a trace.  The arguments are sequences, (B, T, D), of one floating dtype, and parameters,
# (D,), of any; or two tensors, G concatenated sequences, (B, T, G*D), as a layer's GEMM produces them, and P
# concatenated parameters, (P*D,), which saves concatenating their gradients.  h0 are the S initial states, concatenated
# to (B, S*D) or (N, S*D), zero if absent.  The rest is as in linear_scan.


@functools.lru_cache(maxsize=1024)
def step_of(recurrence: str, batch: int, channels: int, dtype: torch.dtype) -> Any:
    """The cached ``Step`` of ``cpu.py`` for one step on a CPU."""
    from ostinato.kernels.recurrence.nonlinear import cpu

    return cpu.Step(recurrence, batch, channels, dtype)


def _forward(
    recurrence: str,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *arguments: Tensor,
) -> list[Tensor]:
    trace = parse(recurrence)
    arguments = tuple(split(trace, arguments))
    sequences, parameters = by_kind(trace.sequences, arguments)
    like = sequences[0]
    check_cu_seqlens(cu_seqlens, like.shape[1])
    kernels = nonlinear_kernels_on(backend, like.device.type)
    if like.numel() == 0:
        last = [x.to(like.dtype, copy=True) for x in initial_states(trace, like, h0, cu_seqlens)]
        return [like.new_empty(like.shape) for _ in last] + last
    if kernels is None:
        return _by_steps(recurrence, h0, cu_seqlens, resets, reverse, backend, *arguments)
    initial = None if h0 is None else initial_states(trace, like, h0, cu_seqlens)
    states, last = kernels.steps(Call(trace, sequences, parameters, initial, order_of(cu_seqlens, resets, reverse)))
    return [*states, *last]


def _by_steps(
    recurrence: str,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *arguments: Tensor,
) -> list[Tensor]:
    """The same as :func:`_forward`, in PyTorch operations."""
    trace = parse(recurrence)
    arguments = tuple(split(trace, arguments))
    like = by_kind(trace.sequences, arguments)[0][0]
    dtype = compute_dtype(backend, like)

    def step(before: list[Tensor], step_arguments: list[Tensor]) -> Sequence[Tensor]:
        return evaluate(trace.forward, [*before, *step_arguments])

    initial = [x.to(dtype) for x in initial_states(trace, like, h0, cu_seqlens)]
    results = sequential(step, initial, [x.to(dtype) for x in arguments], order_of(cu_seqlens, resets, reverse))
    return [x.to(like.dtype) for x in results]


def _fake(recurrence: str, h0: Any, cu_seqlens: Tensor | None, *others: Any) -> list[Tensor]:
    trace = parse(recurrence)
    like = by_kind(trace.sequences, split(trace, others[3:]))[0][0]
    shapes = [like.shape] * trace.states + [last_shape(like, cu_seqlens)] * trace.states
    return [like.new_empty(shape) for shape in shapes]


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.recurrence, h0, cu_seqlens, resets, ctx.reverse, ctx.backend, *arguments = inputs
    states = output[: parse(ctx.recurrence).states]
    ctx.save_for_backward(h0, cu_seqlens, resets, *states, *arguments)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, *grads: Tensor | None) -> tuple:
    h0, cu_seqlens, resets, *tensors = ctx.saved_tensors
    count = len(tensors) - parse(ctx.recurrence).states
    if all(g is None for g in grads):
        return (None,) * (6 + count)
    cotangents = [tensors[0].new_empty(0) if g is None else g for g in grads]
    options = cu_seqlens, resets, ctx.reverse, ctx.backend
    grad_h0, *grad_arguments = _backward(ctx.recurrence, h0, *options, *cotangents, *tensors)
    return None, None if h0 is None else grad_h0, None, None, None, None, *grad_arguments


def _backward_impl(
    recurrence: str,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *tensors: Tensor,
) -> list[Tensor]:
    """Gradients of h0, empty if that is absent, and of the arguments.

    ``tensors`` are the gradients of the states and of the last states, empty for zeros, then the states and the
    arguments.
    """
    trace = parse(recurrence)
    grads, grads_last, states, arguments = tensors_of_backward(trace, tensors)
    like = states[0]
    check_cu_seqlens(cu_seqlens, like.shape[1])
    kernels = nonlinear_kernels_on(backend, like.device.type)
    if like.numel() == 0:
        last = [x.clone() for x in or_zeros(grads_last, last_shape(like, cu_seqlens))]
        grad_h0 = None if h0 is None else concatenated_states(last)
        return [or_empty(grad_h0, like), *map(torch.zeros_like, arguments)]
    if kernels is None:
        with torch.no_grad():
            results = composite(recurrence, h0, cu_seqlens, resets, reverse, backend, *tensors)
            return [x.clone() for x in results]
    split_arguments = split(trace, arguments)
    sequences, parameters = by_kind(trace.sequences, split_arguments)
    initial = None if h0 is None else initial_states(trace, like, h0, cu_seqlens)
    concatenated = None if len(arguments) == len(split_arguments) else torch.empty_like(arguments[0])
    grad_sequences = [x.new_empty(x.shape) for x in sequences]
    if concatenated is not None:
        grad_sequences = list(concatenated.chunk(len(sequences), -1))
    call = Call(trace, sequences, parameters, initial, order_of(cu_seqlens, resets, reverse))
    cotangents = _or_none(grads), _or_none(grads_last)
    grad_parameters, grads_h0 = kernels.steps_backward(call, states, *cotangents, grad_sequences)
    grad_h0 = or_empty(None if grads_h0 is None else concatenated_states(grads_h0), like)
    if concatenated is not None:
        return [grad_h0, concatenated, grad_parameters.flatten().to(arguments[1].dtype)]
    copies = [g.to(x.dtype, copy=True) for g, x in zip(grad_parameters, parameters, strict=True)]
    return [grad_h0, *in_order(trace.sequences, grad_sequences, copies)]


def _or_none(grads: Sequence[Tensor]) -> list[Tensor | None]:
    return [g if g.numel() else None for g in grads]


def _backward_fake(recurrence: str, h0: Any, cu_seqlens: Tensor | None, *others: Any) -> list[Tensor]:
    trace = parse(recurrence)
    *_, states, arguments = tensors_of_backward(trace, others[3:])
    batch, width = last_shape(states[0], cu_seqlens)
    grad_h0 = states[0].new_empty(0) if h0 is None else states[0].new_empty(batch, trace.states * width)
    if len(arguments) == len(trace.sequences):
        return [grad_h0, *(x.new_empty(x.shape) for x in arguments)]
    return [grad_h0, *map(torch.empty_like, arguments)]


def _groups(recurrence: str, *others: Any) -> Groups:
    trace = parse(recurrence)
    return (None, trace.states, *(None,) * 4, *_argument_groups(trace, len(others) - 5)), (1, 1) * trace.states


def _backward_groups(recurrence: str, *others: Any) -> Groups:
    trace = parse(recurrence)
    groups = _argument_groups(trace, len(others) - 5 - 3 * trace.states)
    return (None, trace.states, *(None,) * 4, *(1,) * (3 * trace.states), *groups), (trace.states, *groups)


def _argument_groups(trace: Trace, count: int) -> tuple[int, ...]:
    """The number of channel groups in each of `count` arguments, which may be concatenated."""
    return (1,) * count if count == len(trace.sequences) else (sum(trace.sequences), trace.sequences.count(False))


_backward = gradient("nonlinear_recurrence_backward", _backward_impl, _backward_fake, _backward_groups, composite)
nonlinear_recurrence = operator(
    "nonlinear_recurrence", _forward, _fake, _context, _grad, _groups, plain=_by_steps, jvp=jvp
)
