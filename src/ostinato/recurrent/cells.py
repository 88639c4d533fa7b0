"""One step of RNN, GRU or LSTM layers, computed by torch's cells."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.states import of_one_layer


class Cells(Protocol):
    """A :class:`~ostinato.kernels.persistent.interface.Step` by torch's cells, which compute any step: never None."""

    def __call__(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], /
    ) -> tuple[Tensor, list[Tensor]]: ...


def step_by_cells(mode: str, layers: int, output_shape: tuple, state_shape: tuple, dropout: float = 0.0) -> Cells:
    """A step of two GEMMs and a kernel per layer, which with gradients takes less of the host's time than cuDNN."""
    cell: Any = getattr(torch, f"{mode.lower()}_cell")
    lstm, batched = mode == "LSTM", len(state_shape) == 3
    # Layers' states keep a batch dimension, of one if unbatched.
    unstack: Any = Tensor.unbind if batched else functools.partial(Tensor.split, split_size=1)
    stack: Any = torch.stack if batched else torch.cat

    def step(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        y, last, size = x.reshape(-1, x.shape[-1]), [], len(weights) // layers
        states = states or [x.new_zeros(state_shape)] * (2 if lstm else 1)
        for layer, before in enumerate(zip(*map(unstack, states), strict=True)):
            if layer and dropout:
                y = F.dropout(y, dropout)
            after = cell(y, before if lstm else before[0], *weights[layer * size : (layer + 1) * size])
            last.append(after if lstm else (after,))
            y = last[-1][0]
        h, *c = zip(*last, strict=True)
        of_single_layer = of_one_layer if batched else Tensor.clone
        states = [stack(h), *(of_single_layer(parts[0]) if layers == 1 else stack(parts) for parts in c)]
        return y.view(output_shape), states  # h is a copy, as the output may be changed in place

    return step
