"""Sequences in which episodes end: cut there, for layers that take whole sequences only."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence


def check_resets(resets: Tensor, x: Tensor) -> None:
    """Raise TypeError or ValueError unless there is a bool for each step of the input, on its device."""
    if not isinstance(resets, Tensor) or resets.dtype != torch.bool:
        got = resets.dtype if isinstance(resets, Tensor) else type(resets).__name__
        raise TypeError(f"resets must be a tensor of torch.bool; got {got}")
    if resets.shape != x.shape[:-1]:
        expected = f"{tuple(x.shape[:-1])}, the input's without its features"
        raise ValueError(f"resets must have shape {expected}; got {tuple(resets.shape)}")
    if resets.device != x.device:
        raise ValueError(f"resets must be on the input's device, {x.device}; got {resets.device}")


class Rows(NamedTuple):
    """Which step of which sequence the rows of time-major sequences are, in the order of sequences, then of steps."""

    order: Tensor  # (rows,): the row of each
    episode: Tensor  # (rows,): which it belongs to
    lengths: list[int]  # of the episodes
    first: Tensor  # (B,): the first episode of each sequence
    last: Tensor


def rows_of_episodes(batch_sizes: Tensor, resets: Tensor) -> Rows:
    """The episodes of sequences with ``batch_sizes`` (T,) rows a step, which begin where ``resets`` (rows,) says."""
    device, batch = resets.device, int(batch_sizes[0])
    sizes = batch_sizes.to(device)
    step = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
    sequence = torch.arange(len(resets), device=device) - (sizes.cumsum(0) - sizes)[step]
    order = (sequence * len(sizes) + step).argsort()
    begins = (resets | (step == 0))[order]
    episode = begins.cumsum(0) - 1
    lengths = sequence.bincount(minlength=batch)
    ends = lengths.cumsum(0)
    return Rows(order, episode, episode.bincount().tolist(), episode[ends - lengths], episode[ends - 1])


def forward_by_episodes(
    forward: Callable[[PackedSequence, Any], tuple[PackedSequence, Any]],
    x: Tensor,
    states: list[Tensor],
    batch_sizes: Tensor,
    resets: Tensor,
    directions: int,
) -> tuple[Tensor, list[Tensor]]:
    """``forward`` of each episode by itself: the sequences' first have their states, in reverse the last.

    Args:
        forward: of a PackedSequence and a list of states, zero if it is empty; returns as it is called.
        x: (rows, features), time-major: the rows of the first step, then of the second.
        states: each (layers * directions, B, H), or none.
        batch_sizes, resets: see :func:`rows_of_episodes`.
    """
    rows = rows_of_episodes(batch_sizes, resets)
    packed = pack_sequence(x[rows.order].split(rows.lengths), enforce_sorted=False)
    at_first = ~resets[: int(batch_sizes[0]), None]

    def of_episodes(state: Tensor) -> Tensor:
        state = state.unflatten(0, (-1, directions))
        wide = state.new_zeros(*state.shape[:2], len(rows.lengths), state.shape[3])
        parts = [wide[:, 0].index_copy(1, rows.first, state[:, 0].where(at_first, 0.0))]
        if directions == 2:
            parts.append(wide[:, 1].index_copy(1, rows.last, state[:, 1]))
        return torch.stack(parts, 1).flatten(0, 1)

    def of_sequences(state: Tensor) -> Tensor:
        state = state.unflatten(0, (-1, directions))
        parts = [state[:, 0, rows.last]] + ([state[:, 1, rows.first]] if directions == 2 else [])
        return torch.stack(parts, 1).flatten(0, 1)

    output, last = forward(packed, [of_episodes(state) for state in states])
    in_order = torch.cat(unpack_sequence(output))
    return in_order[rows.order.argsort()], [of_sequences(state) for state in last]
