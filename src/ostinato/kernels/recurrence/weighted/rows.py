"""The layout in which the steps of all sequences are computed: time-major rows, with the longest sequences first."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.derived import derived_from
from ostinato.kernels.persistent.sequences import Sequences
from ostinato.kernels.scan import Order


class Packing(NamedTuple):
    """How sequences that are concatenated in a batch of one, (1, T, D), become rows."""

    offsets: Tensor  # as those of Sequences
    sequences: Tensor  # (N,), which are the rows of a step, those with the most steps first
    sequences_back: Tensor  # the inverse
    steps: Tensor  # (T,), which step is each row
    steps_back: Tensor  # the inverse


class Rows:
    """Converts (B, T, D) to rows of all sequences and back; see :class:`~ostinato.kernels.persistent.sequences`."""

    def __init__(self, like: Tensor, order: Order) -> None:
        cu_seqlens, resets, reverse = order
        self._packing = None
        if cu_seqlens is not None:
            self._packing = derived_from(cu_seqlens, "rows", functools.partial(_packing, cu_seqlens))
        self._batch, self._length, _ = like.shape
        marks = None if resets is None else self.of(resets[..., None])[:, 0]
        offsets = None if self._packing is None else self._packing.offsets
        self.sequences = Sequences(order.sequences(like), offsets, marks, reverse)

    def of(self, x: Tensor) -> Tensor:
        """The rows of (B, T, D), a view of it where it is laid out so."""
        if self._packing is None:
            return x.transpose(0, 1).contiguous().flatten(0, 1)
        return x[0].index_select(0, self._packing.steps)

    def back(self, rows: Tensor) -> Tensor:
        """(B, T, D) of its rows."""
        if self._packing is None:
            return rows.view(self._length, self._batch, -1).transpose(0, 1)
        return rows.index_select(0, self._packing.steps_back)[None]

    def of_states(self, x: Tensor) -> Tensor:
        """(N, D) in the order of the rows of a step."""
        return x if self._packing is None else x.index_select(0, self._packing.sequences)

    def states_back(self, x: Tensor) -> Tensor:
        """The inverse."""
        return x if self._packing is None else x.index_select(0, self._packing.sequences_back)


def _packing(cu_seqlens: Tensor) -> Packing:
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph can capture a recurrence with weight_hh and cu_seqlens only after a call with the same "
            "cu_seqlens, which the host reads"
        )
    bounds = cu_seqlens.to("cpu", torch.int64)
    lengths, order = bounds.diff().sort(descending=True, stable=True)
    steps = torch.arange(int(lengths[0]) if len(lengths) else 0, device="cpu")[:, None]
    exists = steps < lengths
    rows = (bounds[order] + steps)[exists]
    offsets = F.pad(exists.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    numbers = offsets, order, order.argsort(), rows, rows.argsort()
    return Packing(*(x.to(cu_seqlens.device) for x in numbers))
