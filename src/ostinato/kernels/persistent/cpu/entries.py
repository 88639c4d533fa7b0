"""The sparse format of pruned layers on CPUs: indices that depend only on the mask.

In the forward pass, the format is sliced ELLPACK (Kreutzer et al. 2014, arXiv 1307.6209): weights are stored in slices
of 8 or 16 rows, and an entry of a slice has one weight for each of its rows.  With blocks, the rows of an entry share a
column: an entry is a broadcast and one vector multiply-add, without gathers.  Without blocks, each row has its own
columns, and rows are sorted by their number of weights, so that slices need little padding.

In the backward pass, the weights are transposed, and a block is part of a row: an entry is one load of adjacent
gradients and one vector multiply-add, and the lanes of a sum are added at its end.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SLICE = 16  # rows in a slice without blocks


class Entries(NamedTuple):
    """The kept weights of a (gates * H, inputs) matrix, as indices into it; padding is the index of a pruned weight."""

    kind: str  # "shared": one column per entry; "own": one column per weight; "dots": an entry is part of a row
    height: int  # weights per entry
    padded: int  # rows of sums per gate, including padding
    places: Tensor  # (entries, height), the index of each weight
    columns: Tensor  # int32, (entries,) or for "own" (entries, height), the column of the weights; for "dots" the first
    starts: Tensor  # (slices + 1,), the first entry of each slice
    rows: Tensor  # (slices * height,), for "own" the row of each sum
    diagonal: Tensor  # (gates, padded), indices of weights on the diagonal that are in no entry


def forward_entries(mask: Tensor, block: tuple[int, int], gates: int) -> Entries:
    """The entries of a mask (gates * H, inputs) with at least one weight pruned, in blocks of `block`.

    In square matrices, such as recurrent weights, the diagonal is not part of the blocks.
    """
    hidden, inputs = len(mask) // gates, mask.shape[1]
    places, pruned = _places(mask, gates)
    if block == (1, 1):
        return _own_columns(mask, places, pruned, gates * hidden, hidden, gates)
    height = block[0]
    kept, alone = _blocks(mask.view(gates, hidden, inputs), height)
    padding = -hidden % height
    entries = F.pad(places.masked_fill(alone, pruned), (0, 0, 0, padding), value=pruned)
    entries = entries.view(gates, -1, height, inputs).transpose(2, 3)[kept]
    columns, starts = kept.nonzero()[:, 2].to(torch.int32), F.pad(kept.sum(2).flatten().cumsum(0), (1, 0))
    diagonal = F.pad(_alone_on_diagonal(alone, places, pruned), (0, padding), value=pruned)
    diagonal = diagonal if hidden == inputs else diagonal[:, :0]
    return Entries("shared", height, hidden + padding, entries, columns, starts, starts[:0], diagonal)


def backward_entries(mask: Tensor, block: tuple[int, int], gates: int) -> Entries:
    """The entries of the transposed weights, (H, gates * H), a GRU's gates in the order of their gradients: n, r, z."""
    hidden = mask.shape[1]
    places, pruned = _places(mask, gates)
    order = [2, 0, 1] if gates == 3 else list(range(gates))
    mask, places = mask.view(gates, hidden, hidden)[order], places[order]
    height = block[0]
    if block == (1, 1) or hidden % height:  # otherwise, an entry of "dots" would extend into the next gate
        transposed = mask.flatten(0, 1).T.contiguous()
        return _own_columns(transposed, places.flatten(0, 1).T.contiguous(), pruned, hidden, hidden, 1)
    kept, alone = _blocks(mask, height)
    entries = places.masked_fill(alone, pruned).view(gates, -1, height, hidden)
    entries, kept = entries.permute(3, 0, 1, 2), kept.permute(2, 0, 1)
    _, gate, part = kept.nonzero(as_tuple=True)
    starts = F.pad(kept.sum((1, 2)).cumsum(0), (1, 0))
    columns = (gate * hidden + part * height).to(torch.int32)
    return Entries(
        *("dots", height, hidden, entries[kept], columns, starts, starts[:0]),
        _alone_on_diagonal(alone, places, pruned),
    )


def _places(mask: Tensor, gates: int) -> tuple[Tensor, int]:
    """The index of each weight, (gates, H, inputs), the same for all pruned weights; and that index."""
    pruned = int((~mask).flatten().to(torch.uint8).argmax())
    places = torch.arange(mask.numel(), device="cpu").view(mask.shape).masked_fill(~mask, pruned)
    return places.view(gates, -1, mask.shape[1]), pruned


def _blocks(mask: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Which columns of each slice have weights off the diagonal, (gates, slices, inputs), and which weights remain."""
    hidden, inputs = mask.shape[1:]
    eye = torch.eye(hidden, dtype=torch.bool, device="cpu") if hidden == inputs else torch.zeros_like(mask[0])
    kept = F.pad(mask & ~eye, (0, 0, 0, -hidden % height)).unflatten(1, (-1, height)).any(2)
    return kept, eye & ~kept.repeat_interleave(height, 1)[:, :hidden]


def _alone_on_diagonal(alone: Tensor, places: Tensor, pruned: int) -> Tensor:
    """The indices of the weights on the diagonal that are in no entry, padded with a pruned one."""
    return torch.where(alone, places, pruned).diagonal(dim1=1, dim2=2).contiguous()


def _own_columns(mask: Tensor, places: Tensor, pruned: int, sums: int, padded: int, gates: int) -> Entries:
    """Entries with a column for each weight: rows are sorted by their number of weights, descending.

    Entry k of a slice has the k-th weight of each row.
    """
    counts, order = mask.sum(1).sort(descending=True, stable=True)
    slices = -(-len(order) // SLICE)
    starts = F.pad(counts[::SLICE].cumsum(0), (1, 0))
    row, column = mask[order].nonzero(as_tuple=True)
    rank = torch.arange(len(row), device="cpu") - (counts.cumsum(0) - counts)[row]
    at = (starts[row // SLICE] + rank, row % SLICE)
    entries = torch.full((int(starts[-1]), SLICE), pruned, device="cpu")
    columns = torch.zeros_like(entries, dtype=torch.int32)
    entries[at] = places.view(mask.shape)[order][row, column]
    columns[at] = column.to(torch.int32)
    spare = order.new_full((slices * SLICE - len(order),), sums)  # sums that nobody reads
    diagonal = torch.full((gates, 0), pruned, device="cpu")
    return Entries("own", SLICE, padded, entries, columns, starts, torch.cat([order, spare]), diagonal)
