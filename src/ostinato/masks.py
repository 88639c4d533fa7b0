"""Masks of pruned layers: a pruned weight counts as zero, gets no gradient, and is zero again after every step.

The mask of a parameter such as ``weight_hh_l0`` is a buffer of its module, ``mask_hh_l0``, True where the weight
is kept, so that it is saved, moved and copied with the module.  Layers read their weights through :func:`masked`.
"""

import weakref

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from ostinato.optimizers import after_every_step

BLOCKS = ((16, 1), (8, 4), (1, 1))  # rows by columns of what is pruned as one

_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of pruned parameters: their modules and names


def block_name(block: tuple[int, int]) -> str:
    """Such as "16x1" of (16, 1)."""
    return f"{block[0]}x{block[1]}"


def block_named(name: str) -> tuple[int, int]:
    """Such as (16, 1) of "16x1".  Raises ValueError for a block that is none of ``BLOCKS``."""
    blocks = {block_name(block): block for block in BLOCKS}
    if name not in blocks:
        raise ValueError(f"block must be one of {', '.join(blocks)}; got {name!r}")
    return blocks[name]


def mask_name(name: str) -> str:
    """The buffer with the mask of the parameter called ``name``."""
    return name.replace("weight", "mask", 1)


def mask_of(module: nn.Module, name: str) -> Tensor | None:
    return module._buffers.get(mask_name(name))


def masked(module: nn.Module, name: str) -> Tensor:
    """The weight with zeros where it is pruned, which get no gradient."""
    weight, mask = getattr(module, name), mask_of(module, name)
    if mask is None:
        return weight
    if weight.requires_grad and torch.is_grad_enabled():
        keep_pruned(module, name)
    return torch.where(mask, weight, 0.0)


def keep_pruned(module: nn.Module, name: str) -> None:
    """Set the pruned weights to zero after each step of any optimiser, whose momentum may be older than the mask."""
    _owners[getattr(module, name)] = weakref.ref(module), name
    after_every_step(_zero_pruned)


@torch.no_grad()
def _zero_pruned(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        if parameter in _owners:
            owner, name = _owners[parameter]
            module = owner()
            mask = None if module is None else mask_of(module, name)
            if mask is not None:
                parameter.masked_fill_(~mask, 0.0)


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
    """The blocks that a (gates * H, H) mask consists of, whatever it has on the diagonal; (1, 1) if of none."""
    mask = mask.view(gates, -1, mask.shape[1])
    free = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device).expand(mask.shape)
    for block in BLOCKS:
        some = cut(mask & ~free, block, False).any(3)
        every = cut(mask | free, block, True).all(3)
        if torch.equal(some, every & ~cut(free, block, True).all(3)):
            return block
    return 1, 1
