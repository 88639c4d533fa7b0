"""What a mask of pruned weights consists of, and what is computed from it once, as long as it stays as it is."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

BLOCKS = ((16, 1), (8, 4), (1, 1))  # rows by columns of what is pruned as one

_derived: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of masks: what they were, and what was computed from them


def derived_from(mask: Tensor, key: Hashable, compute: Callable[[], Any]) -> Any:
    """``compute()``, or what it returned the last time for this key and this mask, if that has not changed since.

    A tensor made in inference mode counts no changes and is compared with a copy.
    """
    uncounted = mask.is_inference()
    seen = _derived.get(mask)
    if seen is None or not (torch.equal(mask, seen[0]) if uncounted else mask._version == seen[0]):
        seen = _derived[mask] = (mask.clone() if uncounted else mask._version, {})
    if key not in seen[1]:
        seen[1][key] = compute()
    return seen[1][key]


def cut(matrix: Tensor, block: tuple[int, int], fill: float = 0.0) -> Tensor:
    """(gates, R, C) cut into blocks, (gates, blocks down, blocks across, rows * columns of a block).

    The blocks of a gate begin at its first row and column; what the last ones lack is ``fill``.
    """
    gates, rows, columns = matrix.shape
    height, width = block
    padded = F.pad(matrix, (0, -columns % width, 0, -rows % height), value=fill)
    blocks = padded.view(gates, padded.shape[1] // height, height, padded.shape[2] // width, width)
    return blocks.transpose(2, 3).flatten(3)


def block_of(mask: Tensor, gates: int) -> tuple[int, int]:
    """The blocks that a (gates * H, inputs) mask consists of; (1, 1) if of none.

    Whatever it has on the diagonal, if it is square.
    """
    mask = mask.view(gates, -1, mask.shape[1])
    free = torch.zeros_like(mask)
    if mask.shape[1] == mask.shape[2]:
        free.diagonal(dim1=1, dim2=2).fill_(True)
    for block in BLOCKS:
        some = cut(mask & ~free, block, False).any(3)
        every = cut(mask | free, block, True).all(3)
        if torch.equal(some, every & ~cut(free, block, True).all(3)):
            return block
    return 1, 1
