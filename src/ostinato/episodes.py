"""Sequences with several episodes, split at resets for layers that do not support these."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class Episodes(NamedTuple):
    """The episodes of some sequences as a PackedSequence, longest first."""

    rows: Tensor  # the row in the sequences of each row of the episodes
    batch_sizes: Tensor  # (steps of the longest,), on the CPU
    first: Tensor  # (B,): the first episode of each sequence
    last: Tensor


def cut(batch_sizes: Tensor, resets: Tensor) -> Episodes:
    """Split sequences, ``batch_sizes`` (T,) rows per step, before each row where ``resets`` (rows,) is True."""
    device, sizes = resets.device, batch_sizes.to(resets.device)
    steps = len(sizes)
    step = torch.arange(steps, device=device).repeat_interleave(sizes)
    sequence = torch.arange(len(resets), device=device) - (sizes.cumsum(0) - sizes)[step]
    order = (sequence * steps + step).argsort()  # one sequence after the other, as the rows are from here on
    begins = (resets | (step == 0))[order]
    episode, starts = begins.cumsum(0) - 1, begins.nonzero()[:, 0]
    lengths = episode.bincount()
    rank = torch.empty_like(lengths)  # of each episode, the longest first
    rank[lengths.argsort(descending=True, stable=True)] = torch.arange(len(lengths), device=device)
    age = torch.arange(len(resets), device=device) - starts[episode]  # steps since the episode began
    packed = (age * len(lengths) + rank[episode]).argsort()
    ends = sequence.bincount().cumsum(0)
    at_first = torch.cat([ends.new_zeros(1), ends[:-1]])
    return Episodes(order[packed], age.bincount().cpu(), rank[episode[at_first]], rank[episode[ends - 1]])


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
    keep = ~resets[: int(batch_sizes[0]), None]

    def of_episodes(state: Tensor) -> Tensor:
        state = state.unflatten(0, (-1, directions))
        zeros = state.new_zeros(state.shape[0], int(episodes.batch_sizes[0]), state.shape[3])
        parts = [zeros.index_copy(1, episodes.first, state[:, 0].where(keep, 0.0))]
        if directions == 2:
            parts.append(zeros.index_copy(1, episodes.last, state[:, 1]))
        return torch.stack(parts, 1).flatten(0, 1)

    def of_sequences(state: Tensor) -> Tensor:
        state = state.unflatten(0, (-1, directions))
        parts = [state[:, 0, episodes.last]] + ([state[:, 1, episodes.first]] if directions == 2 else [])
        return torch.stack(parts, 1).flatten(0, 1)

    packed = PackedSequence(x[episodes.rows], episodes.batch_sizes)
    output, last = forward(packed, [of_episodes(state) for state in states])
    return output.data[episodes.rows.argsort()], [of_sequences(state) for state in last]
