"""Non-linear recurrences of one or two states as a differentiable operator, run by the backend that is asked for."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.operators.dispatch import gradient, operator
from ostinato.kernels.operators.vmap import Groups
from ostinato.kernels.recurrence.arguments import (
    Call,
    by_kind,
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

# nonlinear_recurrence(recurrence, h0, c0, cu_seqlens, resets, reverse, backend, *arguments) -> states, last states
#
# recurrence is a trace, as text; the arguments are sequences (B, T, D) of one floating dtype and parameters (D,) of
# any, or two tensors: G concatenated sequences, (B, T, G*D), as a layer's GEMM produces them, and P parameters, (P*D,),
# which saves concatenating their gradients.  h0 and c0 are the initial states, (B, D) or (N, D), zero if absent; c0 is
# that of the second state, if there are two.  The rest is as in linear_scan.


@functools.lru_cache(maxsize=1024)
def step_of(recurrence: str, batch: int, channels: int, dtype: torch.dtype) -> Any:
    """What makes one step on a CPU; see ``Step`` of ``cpu.py``."""
    from ostinato.kernels.recurrence.nonlinear import cpu

    return cpu.Step(recurrence, batch, channels, dtype)


def _forward(
    recurrence: str,
    h0: Tensor | None,
    c0: Tensor | None,
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
        last = [x.to(like.dtype, copy=True) for x in initial_states(trace, like, h0, c0, cu_seqlens)]
        return [like.new_empty(like.shape) for _ in last] + last
    if kernels is None:
        return _by_steps(recurrence, h0, c0, cu_seqlens, resets, reverse, backend, *arguments)
    given = None if h0 is None and c0 is None else initial_states(trace, like, h0, c0, cu_seqlens)
    states, last = kernels.steps(Call(trace, sequences, parameters, given, order_of(cu_seqlens, resets, reverse)))
    return [*states, *last]


def _by_steps(
    recurrence: str,
    h0: Tensor | None,
    c0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *arguments: Tensor,
) -> list[Tensor]:
    """As :func:`_forward`, in PyTorch operations."""
    trace = parse(recurrence)
    arguments = tuple(split(trace, arguments))
    like = by_kind(trace.sequences, arguments)[0][0]
    wide = compute_dtype(backend, like)

    def step(before: list[Tensor], of_step: list[Tensor]) -> Sequence[Tensor]:
        return evaluate(trace.forward, [*before, *of_step])

    initial = [x.to(wide) for x in initial_states(trace, like, h0, c0, cu_seqlens)]
    stepped = sequential(step, initial, [x.to(wide) for x in arguments], order_of(cu_seqlens, resets, reverse))
    return [x.to(like.dtype) for x in stepped]


def _fake(recurrence: str, h0: Any, c0: Any, cu_seqlens: Tensor | None, *others: Any) -> list[Tensor]:
    trace = parse(recurrence)
    like = by_kind(trace.sequences, split(trace, others[3:]))[0][0]
    shapes = [like.shape] * trace.states + [last_shape(like, cu_seqlens)] * trace.states
    return [like.new_empty(shape) for shape in shapes]


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.recurrence, h0, c0, cu_seqlens, resets, ctx.reverse, ctx.backend, *arguments = inputs
    states = output[: parse(ctx.recurrence).states]
    ctx.save_for_backward(h0, c0, cu_seqlens, resets, *states, *arguments)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, *grads: Tensor | None) -> tuple:
    h0, c0, cu_seqlens, resets, *tensors = ctx.saved_tensors
    count = len(tensors) - parse(ctx.recurrence).states
    if all(g is None for g in grads):
        return (None,) * (7 + count)
    given = [tensors[0].new_empty(0) if g is None else g for g in grads]
    found = _backward(ctx.recurrence, h0, c0, cu_seqlens, resets, ctx.reverse, ctx.backend, *given, *tensors)
    initial = [None if x is None else g for x, g in zip((h0, c0), found, strict=False)]
    return None, *initial, None, None, None, None, *found[2:]


def _backward_impl(
    recurrence: str,
    h0: Tensor | None,
    c0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *tensors: Tensor,
) -> list[Tensor]:
    """Gradients of h0, c0 (empty if both are absent, as that of a second state where there is one) and the arguments.

    ``tensors`` are the gradients of states and of last states, an empty one of zeros, the states and the arguments.
    """
    trace = parse(recurrence)
    grads, grads_last, states, arguments = tensors_of_backward(trace, tensors)
    like = states[0]
    check_cu_seqlens(cu_seqlens, like.shape[1])
    kernels = nonlinear_kernels_on(backend, like.device.type)
    absent = like.new_empty(0), like.new_empty(0)  # two, as what an operator returns must not share memory
    starts = h0 is not None or c0 is not None
    if like.numel() == 0:
        of_initial = [x.clone() for x in or_zeros(grads_last, last_shape(like, cu_seqlens))] if starts else []
        return [*of_initial, *absent][:2] + [torch.zeros_like(x) for x in arguments]
    if kernels is None:
        with torch.no_grad():
            found = composite(recurrence, h0, c0, cu_seqlens, resets, reverse, backend, *tensors)
            return [x.clone() for x in found]
    own = split(trace, arguments)
    sequences, parameters = by_kind(trace.sequences, own)
    initial = initial_states(trace, like, h0, c0, cu_seqlens) if starts else None
    concatenated = None if len(arguments) == len(own) else torch.empty_like(arguments[0])
    of_sequences = [x.new_empty(x.shape) for x in sequences]
    if concatenated is not None:
        of_sequences = list(concatenated.chunk(len(sequences), -1))
    call = Call(trace, sequences, parameters, initial, order_of(cu_seqlens, resets, reverse))
    of_results = _or_none(grads), _or_none(grads_last)
    of_parameters, grad_initial = kernels.steps_backward(call, states, *of_results, of_sequences)
    both = [*(grad_initial or ()), *absent][:2]
    if concatenated is not None:
        return [*both, concatenated, of_parameters.flatten().to(arguments[1].dtype)]
    copies = [g.to(x.dtype, copy=True) for g, x in zip(of_parameters, parameters, strict=True)]
    return [*both, *in_order(trace.sequences, of_sequences, copies)]


def _or_none(grads: Sequence[Tensor]) -> list[Tensor | None]:
    return [g if g.numel() else None for g in grads]


def _backward_fake(recurrence: str, h0: Any, c0: Any, cu_seqlens: Tensor | None, *others: Any) -> list[Tensor]:
    trace = parse(recurrence)
    *_, states, arguments = tensors_of_backward(trace, others[3:])
    absent = states[0].new_empty(0)
    starts = h0 is not None or c0 is not None
    of_initial = [x.new_empty(last_shape(x, cu_seqlens)) for x in states] if starts else []
    if len(arguments) == len(trace.sequences):
        return [*of_initial, absent, absent][:2] + [x.new_empty(x.shape) for x in arguments]
    return [*of_initial, absent, absent][:2] + [torch.empty_like(x) for x in arguments]


def _groups(recurrence: str, *others: Any) -> Groups:
    trace = parse(recurrence)
    return (None, 1, 1) + (None,) * 4 + _groups_of(trace, len(others) - 6), (1, 1) * trace.states


def _backward_groups(recurrence: str, *others: Any) -> Groups:
    trace = parse(recurrence)
    of_arguments = _groups_of(trace, len(others) - 6 - 3 * trace.states)
    return (None, 1, 1) + (None,) * 4 + (1,) * (3 * trace.states) + of_arguments, (1, 1, *of_arguments)


def _groups_of(trace: Trace, count: int) -> tuple[int, ...]:
    """The groups of channels of so many arguments."""
    return (1,) * count if count == len(trace.sequences) else (sum(trace.sequences), trace.sequences.count(False))


_backward = gradient("nonlinear_recurrence_backward", _backward_impl, _backward_fake, _backward_groups, composite)
nonlinear_recurrence = operator(
    "nonlinear_recurrence", _forward, _fake, _context, _grad, _groups, plain=_by_steps, jvp=jvp
)
