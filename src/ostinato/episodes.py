"""Episodes inside sequences: resets for the reverse direction, and for layers without resets each episode alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ostinato.kernels.persistent.reference import previous
from ostinato.kernels.persistent.sequences import Sequences


def in_reverse(resets: Tensor, batch_first: bool, cu_seqlens: Tensor | None = None) -> Tensor:
    """The resets for the recurrence from the last step to the first: at the last step of every episode but the last.

    Args:
        resets: (B, T), or (T, B) unless ``batch_first``; (1, T) with ``cu_seqlens``.
        cu_seqlens: (N + 1,), the bounds of N sequences one after the other, none of them empty.
    """
    shifted = F.pad(resets, (0, 1))[:, 1:] if batch_first else F.pad(resets, (0, 0, 0, 1))[1:]
    return shifted if cu_seqlens is None else shifted.index_fill(1, cu_seqlens[1:].long() - 1, False)


def in_reverse_of_rows(resets: Tensor, offsets: Tensor | None, batch: int) -> Tensor:
    """As :func:`in_reverse`, of time-major rows; see :class:`~ostinato.kernels.persistent.sequences.Sequences`."""
    return previous(resets[:, None], None, Sequences(batch, offsets, reverse=True))[:, 0]


class Episodes(NamedTuple):
    """The episodes of some sequences as a PackedSequence, longest first."""

    number: int
    rows: Tensor  # for each row of the episodes, the row of the sequences that it is
    batch_sizes: Tensor  # (steps of the longest,), on the CPU
    first: Tensor  # (B,): the first episode of each sequence
    last: Tensor  # (B,): the last one


def cut(batch_sizes: Tensor, resets: Tensor) -> Episodes:
    """Split sequences, ``batch_sizes`` (T,) rows per step, before each row where ``resets`` (rows,) is True.

    Sizes are read from shapes: ``torch.jit.trace`` records what ``len`` and ``int`` return as constants.
    """
    device, sizes = resets.device, batch_sizes.to(resets.device)
    steps = sizes.shape[0]
    step = torch.arange(steps, device=device).repeat_interleave(sizes)
    sequence = torch.arange(resets.shape[0], device=device) - (sizes.cumsum(0) - sizes)[step]
    order = (sequence * steps + step).argsort()  # one sequence after the other, as the rows are from here on
    begins = (resets | (step == 0))[order]
    episode, starts = begins.cumsum(0) - 1, begins.nonzero()[:, 0]
    lengths = episode.bincount()
    longest_first, number = lengths.argsort(descending=True, stable=True), lengths.shape[0]
    rank = torch.empty_like(lengths).index_copy(0, longest_first, torch.arange(number, device=device))
    age = torch.arange(resets.shape[0], device=device) - starts[episode]  # steps since the episode began
    packed = (age * number + rank[episode]).argsort()
    ends = sequence.bincount().cumsum(0)
    at_first = torch.cat([ends.new_zeros(1), ends[:-1]])
    return Episodes(number, order[packed], age.bincount().cpu(), rank[episode[at_first]], rank[episode[ends - 1]])


def forward_by_episodes(
    forward: Callable[[PackedSequence, Any], tuple[PackedSequence, Any]],
    x: Tensor,
    states: list[Tensor],
    batch_sizes: Tensor,
    resets: Tensor,
    directions: int,
) -> tuple[Tensor, list[Tensor]]:
    """Run ``forward`` on each episode; a sequence's first one (in reverse, its last) starts from the given state.

    Args:
        forward: takes and returns a PackedSequence and a list of states, zero if the list is empty.
        x: (rows, features), time-major: the rows of the first step, then of the second.
        states: each (layers * directions, B, H), or none.
        batch_sizes, resets: see :func:`cut`.
    """
    episodes = cut(batch_sizes, resets)
    keep = ~resets[: batch_sizes[0], None]

    def to_episodes(state: Tensor) -> Tensor:
        state = state.unflatten(0, (-1, directions))
        zeros = state.new_zeros(state.shape[0], episodes.number, state.shape[3])
        parts = [zeros.index_copy(1, episodes.first, state[:, 0].where(keep, 0.0))]
        if directions == 2:
            parts.append(zeros.index_copy(1, episodes.last, state[:, 1]))
        return torch.stack(parts, 1).flatten(0, 1)

    def to_sequences(state: Tensor) -> Tensor:
        state = state.unflatten(0, (-1, directions))
        parts = [state[:, 0, episodes.last]] + ([state[:, 1, episodes.first]] if directions == 2 else [])
        return torch.stack(parts, 1).flatten(0, 1)

    packed = PackedSequence(x[episodes.rows], episodes.batch_sizes)
    output, last = forward(packed, [to_episodes(state) for state in states])
    return output.data[episodes.rows.argsort()], [to_sequences(state) for state in last]
