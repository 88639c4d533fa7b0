"""The state of a layer, as ``hx`` and ``h_n``: a tensor, or of an LSTM, and of others with several, a tuple of them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Hidden = Tensor | tuple[Tensor, ...]
State = TypeVar("State", bound=Hidden)  # that of a class of layers


def states_of(hx: Hidden | None) -> list[Tensor]:
    """The tensors of a state: h, an LSTM's c too, or none."""
    if hx is None:
        return []
    if isinstance(hx, Tensor):
        return [hx]
    if not isinstance(hx, (tuple, list)):
        raise TypeError(f"state must be a tensor, or h and c in a tuple; got {type(hx).__name__}")
    return list(hx)


def distinct(states: list[Tensor]) -> list[Tensor]:
    """The states without c if that is the same tensor as h: calls are prepared for distinct tensors only."""
    return states[:1] if len(states) == 2 and states[0] is states[1] else states


def hidden_of(states: Sequence[Tensor]) -> Any:
    """The state of these tensors: the inverse of :func:`states_of`."""
    return tuple(states) if len(states) > 1 else states[0] if states else None


def each(function: Callable[[Tensor], Tensor], hidden: Hidden) -> Any:
    """Apply the function to every tensor of a state."""
    return tuple(map(function, hidden)) if isinstance(hidden, tuple) else function(hidden)


def stacked(states: list[Any]) -> Any:
    """The states of all layers concatenated."""
    if len(states) == 1:
        return states[0]
    return tuple(map(torch.cat, zip(*states, strict=True))) if isinstance(states[0], tuple) else torch.cat(states)


def of_one_layer(state: Tensor) -> Tensor:
    """(B, H) as (1, B, H), without a copy, but not a view: like ``torch.nn``'s states it can be detached in place."""
    return torch.ops.aten._unsafe_view.default(state, (1, *state.shape))
