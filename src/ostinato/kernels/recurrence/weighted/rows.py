"""The layout in which the steps of all sequences are computed: time-major rows, with the longest sequences first."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.derived import derived_from
from ostinato.kernels.persistent.sequences import Sequences
from ostinato.kernels.scan import Order


class _Permutations(NamedTuple):
    """The permutations between sequences that are concatenated in a batch of one, (1, T, D), and rows."""

    offsets: Tensor  # see Sequences
    sequences: Tensor  # (N,), the sequence of each row of a step, the longest first
    sequences_back: Tensor  # the inverse permutation
    steps: Tensor  # (T,), the concatenated step of each row
    steps_back: Tensor  # the inverse permutation


class Rows:
    """Converts sequences, (B, T, D), to rows and back; see :mod:`~ostinato.kernels.persistent.sequences`."""

    def __init__(self, like: Tensor, order: Order) -> None:
        cu_seqlens, resets, reverse = order
        self._permutations = None
        if cu_seqlens is not None:
            self._permutations = derived_from(cu_seqlens, "rows", functools.partial(_permutations, cu_seqlens))
        self._batch, self._length, _ = like.shape
        row_resets = None if resets is None else self.of(resets[..., None])[:, 0]
        offsets = None if self._permutations is None else self._permutations.offsets
        self.sequences = Sequences(order.sequences(like), offsets, row_resets, reverse)

    def of(self, x: Tensor) -> Tensor:
        """The rows, (B * T, D), of a tensor (B, T, D); a view if it is stored time-major."""
        if self._permutations is None:
            return x.transpose(0, 1).contiguous().flatten(0, 1)
        return x[0].index_select(0, self._permutations.steps)

    def back(self, rows: Tensor) -> Tensor:
        """The tensor (B, T, D) of these rows."""
        if self._permutations is None:
            return rows.view(self._length, self._batch, -1).transpose(0, 1)
        return rows.index_select(0, self._permutations.steps_back)[None]

    def of_states(self, x: Tensor) -> Tensor:
        """States, (N, D), in the order of the rows of a step."""
        return x if self._permutations is None else x.index_select(0, self._permutations.sequences)

    def states_back(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`of_states`."""
        return x if self._permutations is None else x.index_select(0, self._permutations.sequences_back)


def _permutations(cu_seqlens: Tensor) -> _Permutations:
    """The permutations of concatenated sequences; reads ``cu_seqlens`` on the host."""
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
    fields = offsets, order, order.argsort(), rows, rows.argsort()
    return _Permutations(*(x.to(cu_seqlens.device) for x in fields))
