"""One step of RNN, GRU or LSTM layers by torch's cells."""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.states import of_one_layer


class Cells(Protocol):
    """A :class:`~ostinato.kernels.persistent.interface.Step` that torch's cells compute, whatever it is given."""

    def __call__(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], /
    ) -> tuple[Tensor, list[Tensor]]: ...


def by_cells(mode: str, layers: int, output_shape: tuple, state_shape: tuple, dropout: float = 0.0) -> Cells:
    """A step by two GEMMs and a kernel per layer, which with gradients take less of the host's time than cuDNN does."""
    cell: Any = getattr(torch, f"{mode.lower()}_cell")
    lstm, batched = mode == "LSTM", len(state_shape) == 3
    apart: Any = Tensor.unbind if batched else functools.partial(Tensor.split, split_size=1)  # each with a batch
    joined: Any = torch.stack if batched else torch.cat

    def step(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        y, last, size = x.reshape(-1, x.shape[-1]), [], len(weights) // layers
        states = states or [x.new_zeros(state_shape)] * (2 if lstm else 1)
        for layer, before in enumerate(zip(*map(apart, states), strict=True)):
            if layer and dropout:
                y = F.dropout(y, dropout)
            after = cell(y, before if lstm else before[0], *weights[layer * size : (layer + 1) * size])
            last.append(after if lstm else (after,))
            y = last[-1][0]
        h, *c = zip(*last, strict=True)
        alone = of_one_layer if batched else Tensor.clone
        states = [joined(h), *(alone(parts[0]) if layers == 1 else joined(parts) for parts in c)]
        return y.view(output_shape), states  # of which h is a copy: the output may be changed in place

    return step
