"""The block structure of pruning masks."""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCKS = ((16, 1), (8, 4), (1, 1))  # rows by columns that are pruned as a unit


def cut(matrix: Tensor, block: tuple[int, int], fill: float = 0.0) -> Tensor:
    """Cut matrices, (gates, R, C), into blocks: (gates, blocks down, blocks across, rows * columns of a block).

    Each gate is padded with ``fill`` to whole blocks.
    """
    gates, rows, columns = matrix.shape
    height, width = block
    padded = F.pad(matrix, (0, -columns % width, 0, -rows % height), value=fill)
    blocks = padded.view(gates, padded.shape[1] // height, height, padded.shape[2] // width, width)
    return blocks.transpose(2, 3).flatten(3)


def block_of(mask: Tensor, gates: int) -> tuple[int, int]:
    """The block size in which a (gates * H, inputs) mask is pruned; (1, 1) if unstructured.

    The diagonal of square gates is ignored.
    """
    mask = mask.view(gates, -1, mask.shape[1])
    ignored = torch.zeros_like(mask)
    if mask.shape[1] == mask.shape[2]:
        ignored.diagonal(dim1=1, dim2=2).fill_(True)
    for block in BLOCKS:
        any_kept = cut(mask & ~ignored, block, False).any(3)
        all_kept = cut(mask | ignored, block, True).all(3)
        if torch.equal(any_kept, all_kept & ~cut(ignored, block, True).all(3)):
            return block
    return 1, 1
