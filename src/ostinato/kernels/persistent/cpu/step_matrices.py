"""The formats in which one step reads a matrix: dense, or only the weights that a mask keeps, where that is faster."""

import torch
from torch import Tensor

from ostinato.kernels.derived import derived_from
from ostinato.kernels.persistent.cpu.entries import forward_entries
from ostinato.kernels.persistent.cpu.pruned import BLOCK_WIDTH
from ostinato.kernels.persistent.masks import block_of
from ostinato.kernels.persistent.plan import KernelPath

# The most sequences of a step for which torch's GEMMs are not faster.  Measured on two cores of a Zen 4: in float32 a
# step takes 0.2 to 0.8 of torch.nn's time with up to 128 sequences, and 0.8 to 1 with 512.
MOST_SEQUENCES = {torch.float32: 256, torch.float64: 16}
# The highest densities, by kind of block, for which reading only the kept weights is faster than reading all.  With
# several sequences, for each of which they are read again, this bounds the density times their number.
DENSEST = {"block": 0.6, "sparse": 0.25}


def most_sequences(kind: str, kept: int, weights: int) -> int:
    """The most sequences for which reading only the kept weights is faster; may be 0."""
    return int(DENSEST[kind] * weights / max(kept, 1))


class Matrix:
    """The format of a matrix: dense, or entries, which are read for at most `most` sequences."""

    def __init__(self, kind: str = "dense", height: int = 1, padded: int = 0, most: int = 0, **arrays: Tensor) -> None:
        self.kind, self.height, self.padded, self.most, self.arrays = kind, height, padded, most, arrays


DENSE = Matrix()


def matrix_of(mask: Tensor, gates: int, path: KernelPath | None) -> Matrix | None:
    """The entries by which the weights of a mask are read, cached by mask; None where all weights must be read."""
    matrix: Matrix | None = derived_from(mask, ("step", path), lambda: _make_matrix(mask, gates, path))
    return matrix


def _make_matrix(mask: Tensor, gates: int, path: KernelPath | None) -> Matrix | None:
    """None if reading all weights is faster, or a pruned weight on the diagonal is inside a block."""
    block = derived_from(mask, "block", lambda: block_of(mask, gates))
    kind, kept, inputs = "sparse" if block == (1, 1) else "block", int(mask.sum()), mask.shape[1]
    most = most_sequences(kind, kept, mask.numel()) if path is None else max(MOST_SEQUENCES.values()) * (path == kind)
    if kept == mask.numel() or not most:
        return None
    entries, hidden = forward_entries(mask, block, gates), len(mask) // gates
    if entries.kind == "shared":
        first, rows = entries.places[:, :1], torch.arange(entries.height, device="cpu") * inputs
        inside = first // inputs % hidden + rows // inputs < hidden
        if not mask.flatten()[(first + rows).where(inside, first)].all():
            return None
        if block[1] == BLOCK_WIDTH and inputs % BLOCK_WIDTH == 0:
            places, columns = (x[::BLOCK_WIDTH].contiguous() for x in (entries.places, entries.columns))
            starts = entries.starts // BLOCK_WIDTH
            entries = entries._replace(kind="blocks", places=places, columns=columns, starts=starts)

    def kept_places(places: Tensor) -> Tensor:
        """The places, with -1 for pruned weights."""
        return torch.where(mask.flatten()[places], places, -1).to(torch.int32)

    places = kept_places(entries.places) if entries.kind == "own" else entries.places[:, 0].to(torch.int32)
    arrays = {"columns": entries.columns, "starts": entries.starts, "rows": entries.rows}
    arrays |= {"places": places, "diagonal": kept_places(entries.diagonal)}
    return Matrix(entries.kind, entries.height, entries.padded, most, **arrays)


def packed_matrix(weight: Tensor, mask: Tensor | None, gates: int, batch: int) -> Matrix:
    """The format of a matrix with constant weights, which are packed in the order of the entries if it is pruned."""
    if mask is None:
        return Matrix(weights=weight)
    block = block_of(mask, gates)
    if batch > most_sequences("sparse" if block == (1, 1) else "block", int(mask.sum()), mask.numel()):
        return Matrix(weights=weight)
    entries = forward_entries(mask, block, gates)
    arrays = {"columns": entries.columns, "starts": entries.starts, "rows": entries.rows}
    values, diagonal = (weight.flatten()[places].contiguous() for places in (entries.places, entries.diagonal))
    arrays |= {"weights": values, "places": values, "diagonal": diagonal}
    return Matrix(entries.kind, entries.height, entries.padded, batch, **arrays)
