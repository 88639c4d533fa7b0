"""How the operators of recurrences are given their tensors."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.recurrence.symbolic.trace import Trace, parse
from ostinato.kernels.scan import Order


class LayerArguments(NamedTuple):
    """The arguments of the operator ``layer_scan``, in its order: a layer of a linear recurrence.

    Attributes:
        pre: the recurrence's arguments, G pre-activations, side by side: (B, T, S*G*H), or (T, B, S*G*H) unless
            batch_first, or (rows, S*G*H) if packed.
        bias: (S*G*H,), G parameters more, in a dtype of its own.
        h0: (S, B, H), the initial state, None for zeros.
        offsets: int32, (T + 1,), packs pre as PackedSequence does: step t of sequence b is row offsets[t] + b if that
            is below offsets[t + 1].
        resets: bool, (S, ...), for each direction laid out as pre without channels.
        recurrence: the text of its trace.
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


TENSORS = LayerArguments._fields.index("recurrence")  # so many, which come first, are tensors
DIFFERENTIABLE = LayerArguments._fields.index("offsets")  # so many of these have gradients
NOTHING = (None,) * (len(LayerArguments._fields) - DIFFERENTIABLE)  # of all others: gradients, groups of channels


class Call(NamedTuple):
    """What kernels take of a call of a non-linear recurrence."""

    trace: Trace
    sequences: Sequence[Tensor]  # (B, T, D)
    parameters: Sequence[Tensor]  # (D,)
    h0: Sequence[Tensor] | None  # the initial states, (B, D) or (N, D); None for zeros
    order: Order


def first_sequence(recurrence: str, arguments: Sequence[Tensor]) -> Tensor:
    """The argument whose shape, dtype and device are those of the states over time."""
    return arguments[parse(recurrence).sequences.index(True)]


def split(trace: Trace, arguments: Sequence[Any]) -> list[Any]:
    """The recurrence's own arguments, split if concatenated."""
    if len(arguments) == len(trace.sequences):
        return list(arguments)
    counts = sum(trace.sequences), trace.sequences.count(False)
    both = ([None] * n if x is None else x.chunk(n, -1) for x, n in zip(arguments, counts, strict=True))
    return in_order(trace.sequences, *both)


def by_kind(kinds: Sequence[bool], arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The sequences, and the parameters."""
    return list(itertools.compress(arguments, kinds)), list(itertools.compress(arguments, (not k for k in kinds)))


def in_order(kinds: Sequence[bool], sequences: Sequence[Any], parameters: Sequence[Any]) -> list[Any]:
    """The inverse of :func:`by_kind`."""
    of = {True: iter(sequences), False: iter(parameters)}
    return [next(of[kind]) for kind in kinds]


def initial_states(
    trace: Trace, like: Tensor, h0: Tensor | None, c0: Tensor | None, cu_seqlens: Tensor | None
) -> list[Tensor]:
    """The initial states that are given, and zeros for the others."""
    given = (h0, c0)[: trace.states]
    return [like.new_zeros(last_shape(like, cu_seqlens)) if x is None else x for x in given]


def last_shape(x: Tensor, cu_seqlens: Tensor | None) -> torch.Size:
    """The shape of the states after the last steps, one row a sequence."""
    return torch.Size((Order(cu_seqlens).sequences(x), x.shape[2]))


def tensors_of_backward(
    trace: Trace, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients of states, those of last states, the states, and the arguments."""
    count = trace.states
    return (
        list(tensors[:count]),
        list(tensors[count : 2 * count]),
        list(tensors[2 * count : 3 * count]),
        list(tensors[3 * count :]),
    )


def or_zeros(grads: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
    """Gradients of this shape, where an empty one stands for zeros."""
    return [g if g.shape == shape else g.new_zeros(shape) for g in grads]
