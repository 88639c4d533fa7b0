"""The arguments of the recurrences' operators and kernels: how they are grouped, split and ordered."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.recurrence.symbolic.trace import Trace, parse
from ostinato.kernels.scan import Order


class LayerArguments(NamedTuple):
    """The arguments of the operator ``layer_scan``, a layer of a linear recurrence, in the operator's order.

    Attributes:
        pre: the pre-activations of G gates, concatenated: (B, T, S*G*H), or (T, B, S*G*H) unless batch_first, or
            (rows, S*G*H) if packed.
        bias: (S*G*H,), the recurrence's G parameters, one for each gate; its dtype may differ from that of pre.
        h0: (S, B, H), the initial state, None for zeros.
        offsets: int32, (T + 1,), if pre is packed as in a PackedSequence: step t of sequence b is row offsets[t] + b,
            provided that this is below offsets[t + 1].
        resets: bool, (S, ...), one mask for each direction, with the shape of pre without channels.
        recurrence: the text of the recurrence's trace.
        batch_first: see pre.
        directions: S; the second runs backwards in time.
        backend: see ``choose_backend``.
    """

    pre: Tensor
    bias: Tensor | None
    h0: Tensor | None
    offsets: Tensor | None
    resets: Tensor | None
    recurrence: str
    batch_first: bool
    directions: int
    backend: str

    @property
    def gates(self) -> int:
        return sum(parse(self.recurrence).sequences)


TENSORS = LayerArguments._fields.index("recurrence")  # the number of tensors, which come first
DIFFERENTIABLE = LayerArguments._fields.index("offsets")  # the number of leading tensors that have gradients
NOTHING = (None,) * (len(LayerArguments._fields) - DIFFERENTIABLE)  # None for each argument without a gradient


class Call(NamedTuple):
    """The arguments of a non-linear recurrence's kernels."""

    trace: Trace
    sequences: Sequence[Tensor]  # (B, T, D)
    parameters: Sequence[Tensor]  # (D,)
    h0: Sequence[Tensor] | None  # the initial states, (B, D) or (N, D); None for zeros
    order: Order


def first_sequence(recurrence: str, arguments: Sequence[Tensor]) -> Tensor:
    """The first argument over time, (B, T, D): the states have its shape, dtype and device."""
    return arguments[parse(recurrence).sequences.index(True)]


def split(trace: Trace, arguments: Sequence[Any]) -> list[Any]:
    """One entry for each argument of the recurrence, split if all sequences and all parameters are concatenated."""
    if len(arguments) == len(trace.sequences):
        return list(arguments)
    counts = sum(trace.sequences), trace.sequences.count(False)
    chunks = ([None] * n if x is None else x.chunk(n, -1) for x, n in zip(arguments, counts, strict=True))
    return in_order(trace.sequences, *chunks)


def by_kind(kinds: Sequence[bool], arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The sequences and the parameters among the arguments; `kinds` tells for each whether it is a sequence."""
    return list(itertools.compress(arguments, kinds)), list(itertools.compress(arguments, (not k for k in kinds)))


def in_order(kinds: Sequence[bool], sequences: Sequence[Any], parameters: Sequence[Any]) -> list[Any]:
    """The inverse of :func:`by_kind`."""
    remaining = {True: iter(sequences), False: iter(parameters)}
    return [next(remaining[kind]) for kind in kinds]


def initial_states(trace: Trace, like: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The initial states, (B, D) or (N, D) each, of concatenated ones, (B, S * D); zeros in place of absent ones."""
    if h0 is None:
        return [like.new_zeros(last_shape(like, cu_seqlens)) for _ in range(trace.states)]
    return split_states(h0, trace.states)


def split_states(x: Tensor, count: int) -> list[Tensor]:
    """The states, (B, D) each, that are concatenated in a tensor, (B, count * D), as views."""
    return [*x.chunk(count, -1)]


def concatenated_states(states: Sequence[Tensor]) -> Tensor:
    """The inverse of :func:`split_states`."""
    return states[0] if len(states) == 1 else torch.cat([*states], -1)


def last_shape(x: Tensor, cu_seqlens: Tensor | None) -> torch.Size:
    """The shape of the states after the last steps, one row for each sequence."""
    return torch.Size((Order(cu_seqlens).sequences(x), x.shape[2]))


def tensors_of_backward(
    trace: Trace, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """A backward operator's tensors: gradients of the states and of the last states, the states, the arguments."""
    count = trace.states
    return (
        list(tensors[:count]),
        list(tensors[count : 2 * count]),
        list(tensors[2 * count : 3 * count]),
        list(tensors[3 * count :]),
    )


def or_zeros(grads: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
    """The gradients, with zeros of this shape in place of empty ones."""
    return [g if g.shape == shape else g.new_zeros(shape) for g in grads]
