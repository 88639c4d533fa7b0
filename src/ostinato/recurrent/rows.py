"""Sequences as time-major rows, as in a PackedSequence: how many there are, and back again."""

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ostinato.checks import check_packed
from ostinato.states import Hidden, hidden_of


def in_rows(
    input: Any, states: list[Tensor], resets: Tensor | None, batch_first: bool
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """The input and resets as time-major rows, as in a PackedSequence, and the states batched and sorted like them."""
    if isinstance(input, PackedSequence):
        order = input.sorted_indices
        return input.data, states if order is None else [x.index_select(1, order) for x in states], resets
    if input.dim() == 2:
        return input, [x.unsqueeze(1) for x in states], resets
    if batch_first:
        input, resets = input.transpose(0, 1), None if resets is None else resets.t()
    return input.flatten(0, 1), states, None if resets is None else resets.flatten()


def as_given(input: Any, rows: Tensor, states: list[Tensor], batch_first: bool) -> tuple[Any, Hidden]:
    """The output and last states, laid out as the input and its initial states: the inverse of :func:`in_rows`."""
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


def size_of(input: Tensor | PackedSequence, states: list[Tensor], batch_first: bool) -> tuple[int, int] | None:
    """How many sequences, and steps of the longest; None where the input has not the dimensions of any."""
    if isinstance(input, PackedSequence):
        return check_packed(input, states), len(input.batch_sizes)
    if input.dim() == 3:
        return (input.shape[0], input.shape[1]) if batch_first else (input.shape[1], input.shape[0])
    return (1, input.shape[0]) if input.dim() == 2 else None


def has_several_lengths(input: Any, batch: int, steps: int) -> bool:
    """Whether the input is packed, and not all of its sequences have all steps."""
    return isinstance(input, PackedSequence) and batch * steps != len(input.data)
