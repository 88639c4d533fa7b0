"""The definition of a non-linear recurrence, one step after the other in PyTorch operations."""

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
    """All states, (B, T, D) each, and the last ones, (B, D) or (N, D).

    ``step(states, arguments)`` takes one: from states and arguments of (B, D), or (D,) if they are parameters.
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
            for own, x in zip(steps, state, strict=True):
                own.append(x)
        for k, own in enumerate(steps):
            rows[k] += reversed(own) if reverse else own
            ends[k].append(state[k])
    states = [torch.stack(own, 1) if own else first.clone() for own in rows]  # of no steps, with a gradient as others
    return states + [torch.cat(own) if own else x for own, x in zip(ends, initial, strict=True)]


def _in_a_loop(
    step: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]],
    initial: Sequence[Tensor],
    arguments: Sequence[Tensor],
    resets: Tensor | None,
    reverse: bool,
) -> list[Tensor]:
    """As :func:`sequential`, in one node of an exported graph, whatever the steps."""
    kinds = [x.dim() == 3 for x in arguments]
    sequences, parameters = by_kind(kinds, arguments)
    sequences = [x.transpose(0, 1) for x in sequences]
    if resets is not None:
        sequences.append(resets.t()[..., None])

    def of_loop(states: list[Tensor], rows: list[Tensor], constants: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        if resets is not None:
            *rows, begins = rows
            states = [x.masked_fill(begins, 0.0) for x in states]
        after = [x.expand_as(states[0]) for x in step(states, in_order(kinds, rows, constants))]
        return after, torch.stack(after)

    # Copied, as PyTorch allows no views of one tensor here, which a layer's parameters are.
    parameters = [x.clone() for x in parameters]
    last, outputs = export.loop(of_loop, list(initial), sequences, parameters, reverse=reverse)
    return [*outputs.permute(1, 2, 0, 3), *last]


def compute_dtype(backend: str, x: Tensor) -> torch.dtype:
    """What PyTorch's operations compute in, for sequences like x."""
    wide = choose_backend(backend, x.device.type) is REFERENCE
    return torch.float64 if wide else torch.promote_types(x.dtype, torch.float32)
