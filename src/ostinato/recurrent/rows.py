"""Sequences of any layout as time-major rows, as in a PackedSequence, and back."""

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ostinato.checks import check_packed
from ostinato.states import Hidden, hidden_of


def to_rows(
    input: Any, states: list[Tensor], resets: Tensor | None, batch_first: bool
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """The input and resets as time-major rows, and the states batched, with sequences in the order of the rows."""
    if isinstance(input, PackedSequence):
        order = input.sorted_indices
        return input.data, states if order is None else [x.index_select(1, order) for x in states], resets
    if input.dim() == 2:
        return input, [x.unsqueeze(1) for x in states], resets
    if batch_first:
        input, resets = input.transpose(0, 1), None if resets is None else resets.t()
    return input.flatten(0, 1), states, None if resets is None else resets.flatten()


def from_rows(input: Any, rows: Tensor, states: list[Tensor], batch_first: bool) -> tuple[Any, Hidden]:
    """The output and last states in the layout of the input and its states: the inverse of :func:`to_rows`."""
    output: Any = rows
    if isinstance(input, PackedSequence):
        output = PackedSequence(rows, *input[1:])
        if input.unsorted_indices is not None:
            states = [x.index_select(1, input.unsorted_indices) for x in states]
    elif input.dim() == 2:
        states = [x.squeeze(1) for x in states]
    elif batch_first:
        output = rows.view(input.shape[1], input.shape[0], rows.shape[1]).transpose(0, 1)
    else:
        output = rows.view(*input.shape[:2], rows.shape[1])
    return output, hidden_of(states)


def batch_and_steps(input: Tensor | PackedSequence, states: list[Tensor], batch_first: bool) -> tuple[int, int] | None:
    """The numbers of sequences and of steps of the longest; None for an input of no valid number of dimensions."""
    if isinstance(input, PackedSequence):
        return check_packed(input, states), len(input.batch_sizes)
    if input.dim() == 3:
        return (input.shape[0], input.shape[1]) if batch_first else (input.shape[1], input.shape[0])
    return (1, input.shape[0]) if input.dim() == 2 else None


def has_several_lengths(input: Any, batch: int, steps: int) -> bool:
    """Whether the input is packed, and its sequences differ in length."""
    return isinstance(input, PackedSequence) and batch * steps != len(input.data)
