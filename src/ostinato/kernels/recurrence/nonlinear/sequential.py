"""The definition of a non-linear recurrence, step by step in PyTorch operations."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ostinato.kernels.operators import export
from ostinato.kernels.recurrence.arguments import by_kind, in_order
from ostinato.kernels.scan import Order, choose_backend
from ostinato.kernels.scan.torch_ops import REFERENCE


def sequential(
    step: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]],
    initial: Sequence[Tensor],
    arguments: Sequence[Tensor],
    order: Order,
) -> list[Tensor]:
    """All states, (B, T, D) each, then the last ones, (B, D) or (N, D) each.

    ``step(states, arguments)`` returns the next states, given states and arguments of (B, D), or (D,) if an argument is
    a parameter.
    """
    cu_seqlens, resets, reverse = order
    first = next(x for x in arguments if x.dim() == 3)
    batch, length, channels = first.shape
    if export.is_portable() and cu_seqlens is not None:
        export.refuse_packed()
    if export.is_portable() or (cu_seqlens is None and export.has_any_length(length)):
        return _in_a_loop(step, initial, arguments, resets, reverse)
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
            for values, x in zip(steps, state, strict=True):
                values.append(x)
        for k, values in enumerate(steps):
            rows[k] += reversed(values) if reverse else values
            ends[k].append(state[k])
    states = [torch.stack(values, 1) if values else first.clone() for values in rows]  # a clone keeps the gradient
    return states + [torch.cat(values) if values else x for values, x in zip(ends, initial, strict=True)]


def _in_a_loop(
    step: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]],
    initial: Sequence[Tensor],
    arguments: Sequence[Tensor],
    resets: Tensor | None,
    reverse: bool,
) -> list[Tensor]:
    """The same as :func:`sequential`, as one node of an exported graph, for any number of steps."""
    kinds = [x.dim() == 3 for x in arguments]
    sequences, parameters = by_kind(kinds, arguments)
    sequences = [x.transpose(0, 1) for x in sequences]
    if resets is not None:
        sequences.append(resets.t()[..., None])

    def loop_step(states: list[Tensor], rows: list[Tensor], constants: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        if resets is not None:
            *rows, reset = rows
            states = [x.masked_fill(reset, 0.0) for x in states]
        after = [x.expand_as(states[0]) for x in step(states, in_order(kinds, rows, constants))]
        return after, torch.stack(after)

    # Copied, as a layer's parameters are views of one tensor, which PyTorch does not allow here.
    parameters = [x.clone() for x in parameters]
    last, outputs = export.loop(loop_step, list(initial), sequences, parameters, reverse=reverse)
    return [*outputs.permute(1, 2, 0, 3), *last]


def compute_dtype(backend: str, x: Tensor) -> torch.dtype:
    """The dtype in which PyTorch's operations compute sequences like x."""
    is_reference = choose_backend(backend, x.device.type) is REFERENCE
    return torch.float64 if is_reference else torch.promote_types(x.dtype, torch.float32)
