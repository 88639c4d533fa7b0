"""Non-linear recurrences of one or two states as a differentiable operator, run by the backend that the caller names.

With all states known, so is each step's Jacobian, and derivatives are linear scans: the gradient backward in time,
forward-mode derivatives forward, and both can be differentiated again.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels import export
from ostinato.kernels.dispatch import Groups, gradient, operator
from ostinato.kernels.recurrence.graph import evaluate
from ostinato.kernels.recurrence.operators import kernels_on
from ostinato.kernels.recurrence.trace import Trace, parse
from ostinato.kernels.scan import choose_backend
from ostinato.kernels.scan.operators import check_cu_seqlens, linear_scan
from ostinato.kernels.scan.torch_ops import REFERENCE, shift, zeroed

# nonlinear_recurrence(recurrence, h0, c0, cu_seqlens, resets, reverse, backend, *arguments) -> states, last states
#
# recurrence is a trace, as text; the arguments are sequences (B, T, D) of one floating dtype and parameters (D,) of
# any, or two tensors: G concatenated sequences, (B, T, G*D), as a layer's GEMM produces them, and P parameters, (P*D,),
# which saves concatenating their gradients.  h0 and c0 are the initial states, (B, D) or (N, D), zero if absent; c0 is
# that of the second state, if there are two.  The rest is as in linear_scan.


def _apart(trace: Trace, arguments: Sequence[Any]) -> list[Any]:
    """The recurrence's own arguments, split if concatenated."""
    if len(arguments) == len(trace.sequences):
        return list(arguments)
    counts = sum(trace.sequences), trace.sequences.count(False)
    both = ([None] * n if x is None else x.chunk(n, -1) for x, n in zip(arguments, counts, strict=True))
    return _joined(trace.sequences, *both)


def _parted(kinds: Sequence[bool], arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The sequences and the parameters."""
    return list(itertools.compress(arguments, kinds)), list(itertools.compress(arguments, (not k for k in kinds)))


def _joined(kinds: Sequence[bool], sequences: Sequence[Any], parameters: Sequence[Any]) -> list[Any]:
    """The inverse."""
    of = {True: iter(sequences), False: iter(parameters)}
    return [next(of[kind]) for kind in kinds]


def _initial(
    trace: Trace, like: Tensor, h0: Tensor | None, c0: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    given = (h0, c0)[: trace.states]
    return [like.new_zeros(_last_shape(like, cu_seqlens)) if x is None else x for x in given]


@functools.lru_cache(maxsize=1024)
def step_of(recurrence: str, batch: int, channels: int, dtype: torch.dtype) -> Any:
    """What makes one step on a CPU; see ``Step`` of ``steps_cpu.py``."""
    return kernels_on("cpu", "cpu", "steps_").Step(recurrence, batch, channels, dtype)


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
    arguments = tuple(_apart(trace, arguments))
    sequences, parameters = _parted(trace.sequences, arguments)
    like = sequences[0]
    check_cu_seqlens(cu_seqlens, like.shape[1])
    kernels = kernels_on(backend, like.device.type, "steps_")
    if like.numel() == 0:
        last = [x.to(like.dtype, copy=True) for x in _initial(trace, like, h0, c0, cu_seqlens)]
        return [like.new_empty(like.shape) for _ in last] + last
    if kernels is None:
        stepped = _by_steps(recurrence, h0, c0, cu_seqlens, resets, reverse, backend, *arguments)
        return [x.clone() for x in stepped]
    given = None if h0 is None and c0 is None else _initial(trace, like, h0, c0, cu_seqlens)
    states, last = kernels.steps(trace, sequences, parameters, given, cu_seqlens, resets, reverse)
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
    arguments = tuple(_apart(trace, arguments))
    like = _parted(trace.sequences, arguments)[0][0]
    wide = _compute_dtype(backend, like)

    def step(before: list[Tensor], of_step: list[Tensor]) -> Sequence[Tensor]:
        return evaluate(trace.forward, [*before, *of_step])

    initial = [x.to(wide) for x in _initial(trace, like, h0, c0, cu_seqlens)]
    stepped = sequential(step, initial, [x.to(wide) for x in arguments], cu_seqlens, resets, reverse)
    return [x.to(like.dtype) for x in stepped]


def _compute_dtype(backend: str, x: Tensor) -> torch.dtype:
    wide = choose_backend(backend, x.device.type) is REFERENCE
    return torch.float64 if wide else torch.promote_types(x.dtype, torch.float32)


def sequential(
    step: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]],
    initial: Sequence[Tensor],
    arguments: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
) -> list[Tensor]:
    """The definition, one step after the other: all states, (B, T, D) each, and the last ones, (B, D) or (N, D).

    ``step(states, arguments)`` takes one: from states and arguments of (B, D), or (D,) if they are parameters.
    """
    if export.is_portable():
        if cu_seqlens is not None:
            export.refuse_packed()
        return _in_a_loop(step, initial, arguments, resets, reverse)
    batch, length, channels = shape = next(x.shape for x in arguments if x.dim() == 3)
    columns = [x.unbind(1) if x.dim() == 3 else (x,) * length for x in arguments]
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    rows: list[list[Tensor]] = [[] for _ in initial]
    ends: list[list[Tensor]] = [[] for _ in initial]
    for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
        state = [x if cu_seqlens is None else x[n : n + 1] for x in initial]
        steps: list[list[Tensor]] = [[] for _ in initial]
        for t in reversed(range(begin, end)) if reverse else range(begin, end):
            if resets is not None:
                state = [x.masked_fill(resets[:, t, None], 0.0) for x in state]
            state = [x.expand(batch, channels) for x in step(state, [x[t] for x in columns])]
            for own, x in zip(steps, state, strict=True):
                own.append(x)
        for k, own in enumerate(steps):
            rows[k] += reversed(own) if reverse else own
            ends[k].append(state[k])
    states = [torch.stack(own, 1) if own else x.new_empty(shape) for own, x in zip(rows, initial, strict=True)]
    return states + [torch.cat(own) if own else x for own, x in zip(ends, initial, strict=True)]


def _in_a_loop(
    step: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]],
    initial: Sequence[Tensor],
    arguments: Sequence[Tensor],
    resets: Tensor | None,
    reverse: bool,
) -> list[Tensor]:
    """The same as one node of a graph that is to run without this library, whatever the number of steps."""
    kinds = [x.dim() == 3 for x in arguments]
    sequences, parameters = _parted(kinds, arguments)
    sequences = [x.transpose(0, 1) for x in sequences]
    if resets is not None:
        sequences.append(resets.t()[..., None])
    if reverse:
        sequences = [x.flip(0) for x in sequences]

    def of_loop(states: list[Tensor], rows: list[Tensor], constants: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        if resets is not None:
            *rows, begins = rows
            states = [x.masked_fill(begins, 0.0) for x in states]
        after = [x.expand_as(states[0]) for x in step(states, _joined(kinds, rows, constants))]
        return after, torch.stack(after)

    # Copied, as PyTorch allows no views of one tensor here: a layer's parameters are, and the same state given twice.
    initial, parameters = [x.clone() for x in initial], [x.clone() for x in parameters]
    last, outputs = export.loop(of_loop, initial, sequences, parameters)
    states = outputs.flip(0) if reverse else outputs
    return [*states.permute(1, 2, 0, 3), *last]


def _fake(recurrence: str, h0: Any, c0: Any, cu_seqlens: Tensor | None, *others: Any) -> list[Tensor]:
    trace = parse(recurrence)
    like = _parted(trace.sequences, _apart(trace, others[3:]))[0][0]
    shapes = [like.shape] * trace.states + [_last_shape(like, cu_seqlens)] * trace.states
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
    grads, grads_last, states, arguments = _grouped(trace, tensors)
    like = states[0]
    check_cu_seqlens(cu_seqlens, like.shape[1])
    kernels = kernels_on(backend, like.device.type, "steps_")
    absent = like.new_empty(0), like.new_empty(0)  # two, as what an operator returns must not share memory
    starts = h0 is not None or c0 is not None
    if like.numel() == 0:
        of_initial = [x.clone() for x in _or_zeros(grads_last, _last_shape(like, cu_seqlens))] if starts else []
        return [*of_initial, *absent][:2] + [torch.zeros_like(x) for x in arguments]
    if kernels is None:
        with torch.no_grad():
            found = _composite(recurrence, h0, c0, cu_seqlens, resets, reverse, backend, *tensors)
            return [x.clone() for x in found]
    apart = _apart(trace, arguments)
    sequences, parameters = _parted(trace.sequences, apart)
    initial = _initial(trace, like, h0, c0, cu_seqlens) if starts else None
    given = [_or_none(x) for x in (grads, grads_last)]
    together = None if len(arguments) == len(apart) else torch.empty_like(arguments[0])
    of_sequences = [x.new_empty(x.shape) for x in sequences]
    if together is not None:
        of_sequences = list(together.chunk(len(sequences), -1))
    of_parameters, grad_initial = kernels.steps_backward(
        trace, sequences, parameters, initial, states, *given, cu_seqlens, resets, reverse, of_sequences
    )
    both = [*(grad_initial or ()), *absent][:2]
    if together is not None:
        return [*both, together, of_parameters.flatten().to(arguments[1].dtype)]
    copies = [g.to(x.dtype, copy=True) for g, x in zip(of_parameters, parameters, strict=True)]
    return [*both, *_joined(trace.sequences, of_sequences, copies)]


def _or_none(grads: Sequence[Tensor]) -> list[Tensor | None]:
    return [g if g.numel() else None for g in grads]


def _or_zeros(grads: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
    return [g if g.shape == shape else g.new_zeros(shape) for g in grads]


def _last_shape(x: Tensor, cu_seqlens: Tensor | None) -> torch.Size:
    return torch.Size((x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, x.shape[2]))


def _grouped(trace: Trace, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    count = trace.states
    return (
        list(tensors[:count]),
        list(tensors[count : 2 * count]),
        list(tensors[2 * count : 3 * count]),
        list(tensors[3 * count :]),
    )


def _backward_fake(recurrence: str, h0: Any, c0: Any, cu_seqlens: Tensor | None, *others: Any) -> list[Tensor]:
    trace = parse(recurrence)
    *_, states, arguments = _grouped(trace, others[3:])
    absent = states[0].new_empty(0)
    starts = h0 is not None or c0 is not None
    of_initial = [x.new_empty(_last_shape(x, cu_seqlens)) for x in states] if starts else []
    if len(arguments) == len(trace.sequences):
        return [*of_initial, absent, absent][:2] + [x.new_empty(x.shape) for x in arguments]
    return [*of_initial, absent, absent][:2] + [torch.empty_like(x) for x in arguments]


def _composite(
    recurrence: str,
    h0: Tensor | None,
    c0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    """As :func:`_backward_impl`, in differentiable operations."""
    trace = parse(recurrence)
    grads, grads_last, states, given = _grouped(trace, tensors)
    arguments = _apart(trace, given)
    dtype = _compute_dtype(backend, states[0])
    before, jacobian = _linearised(trace, states, h0, c0, cu_seqlens, resets, reverse, arguments, dtype)
    transposed = [list(column) for column in zip(*jacobian, strict=True)]
    wide = [g.to(dtype) for g in _or_zeros(grads, states[0].shape)]
    last = [g.to(dtype) for g in _or_zeros(grads_last, _last_shape(states[0], cu_seqlens))]
    # s[t] = J[t]^T (grad[t] + s[t+1]) goes back over step t.
    offsets = [sum((j * g for j, g in zip(row, wide, strict=True)), torch.zeros_like(wide[0])) for row in transposed]
    found = _scan(transposed, offsets, last, cu_seqlens, not reverse, backend)
    carried, first = found[: trace.states], found[trace.states :]
    total = [g + shift(s, end, not reverse, cu_seqlens) for g, s, end in zip(wide, carried, last, strict=True)]
    slopes = evaluate(trace.backward, [*before, *(x.to(dtype) for x in arguments), *total])[trace.states :]
    shape = states[0].shape
    of_arguments = [s.expand(shape).sum_to_size(x.shape).to(x.dtype) for s, x in zip(slopes, arguments, strict=True)]
    if len(given) < len(arguments):
        of_arguments = [torch.cat(x, -1) for x in _parted(trace.sequences, of_arguments)]
    of_initial = [x.to(states[0].dtype) for x in first] if h0 is not None or c0 is not None else []
    absent = states[0].new_empty(0)
    return *[*of_initial, absent, absent][:2], *of_arguments


def _linearised(
    trace: Trace,
    states: Sequence[Tensor],
    h0: Tensor | None,
    c0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    arguments: Sequence[Tensor],
    dtype: torch.dtype,
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The states before each step, and the derivatives of those after it, which do not cross a reset."""
    before = [
        zeroed(shift(x.to(dtype), first, reverse, cu_seqlens), resets)
        for x, first in zip(states, (h0, c0), strict=False)
    ]
    slopes = evaluate(trace.jacobian, [*before, *(x.to(dtype) for x in arguments)])
    flat = [zeroed(x.expand(before[0].shape), resets) for x in slopes]
    return before, [flat[k : k + trace.states] for k in range(0, len(flat), trace.states)]


def _scan(
    a: Sequence[Sequence[Tensor]],
    b: Sequence[Tensor],
    initial: Sequence[Tensor],
    cu_seqlens: Tensor | None,
    reverse: bool,
    backend: str,
) -> list[Tensor]:
    """The linear recurrence of one state, or of two by their matrix; all states, and the last."""
    if len(b) == 1:
        return list(linear_scan(a[0][0], b[0], initial[0], cu_seqlens, None, reverse, backend))

    def step(before: list[Tensor], row: list[Tensor]) -> list[Tensor]:
        return [x * before[0] + y * before[1] + z for x, y, z in (row[:3], row[3:])]

    rows = [*a[0], b[0], *a[1], b[1]]
    return sequential(step, initial, rows, cu_seqlens, None, reverse)


def _jvp(args: tuple, results: tuple[Tensor, ...], tangents: tuple) -> tuple[Tensor, ...]:
    recurrence, h0, c0, cu_seqlens, resets, reverse, backend, *given = args
    trace = parse(recurrence)
    arguments, of_arguments = _apart(trace, given), _apart(trace, tangents[7:])
    states = results[: trace.states]
    dtype = _compute_dtype(backend, states[0])
    before, jacobian = _linearised(trace, states, h0, c0, cu_seqlens, resets, reverse, arguments, dtype)
    wide = [x.to(dtype) for x in arguments]
    one, zero = wide[0].new_ones(()), wide[0].new_zeros(())
    offsets = []
    for k in range(trace.states):  # the function is elementwise: its gradient is its derivative
        chosen = [one if i == k else zero for i in range(trace.states)]
        slopes = evaluate(trace.backward, [*before, *wide, *chosen])[trace.states :]
        moving = [s * x.to(dtype) for s, x in zip(slopes, of_arguments, strict=True) if x is not None]
        offsets.append(sum(moving, torch.zeros_like(before[0])))
    initial = [
        torch.zeros_like(x) if d is None else d.to(dtype)
        for x, d in zip(results[trace.states :], tangents[1:3], strict=False)
    ]
    moved = _scan(jacobian, offsets, [x.to(dtype) for x in initial], cu_seqlens, reverse, backend)
    return tuple(x.to(states[0].dtype) for x in moved)


def _groups(recurrence: str, *others: Any) -> Groups:
    trace = parse(recurrence)
    return (None, 1, 1) + (None,) * 4 + _groups_of(trace, len(others) - 6), (1, 1) * trace.states


def _backward_groups(recurrence: str, *others: Any) -> Groups:
    trace = parse(recurrence)
    of_arguments = _groups_of(trace, len(others) - 6 - 3 * trace.states)
    return (None, 1, 1) + (None,) * 4 + (1,) * (3 * trace.states) + of_arguments, (1, 1, *of_arguments)


def _groups_of(trace: Trace, count: int) -> tuple[int, ...]:
    """Of so many arguments."""
    return (1,) * count if count == len(trace.sequences) else (sum(trace.sequences), trace.sequences.count(False))


_backward = gradient("nonlinear_recurrence_backward", _backward_impl, _backward_fake, _backward_groups, _composite)
nonlinear_recurrence = operator(
    "nonlinear_recurrence", _forward, _fake, _context, _grad, _groups, plain=_by_steps, jvp=_jvp
)
