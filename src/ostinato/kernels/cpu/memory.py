"""An allocator for results of the CPU's loops, which caches large blocks.

The C library returns large blocks to the system as soon as they are freed, and faulting the pages in again takes
several times as long as the scan that fills them.  The operating system may reclaim cached blocks when it is short of
memory; new ones use huge pages.
"""

import math
import mmap
import sys
import weakref
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from ostinato.kernels.cpu.intrinsics import NUMPY_DTYPES

LARGE = 4 << 20  # bytes from which blocks are cached
BLOCKS, SPARE = 16, 64 << 20  # the most cached blocks, and bytes of them that stay when none fits
_kept: list[mmap.mmap] = []  # each operation on it is atomic: a finalizer must not wait for a lock


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU; a large one reuses a cached block, if one fits."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype, device="cpu")
    block = _take_block(size)
    if block is None:
        while sum(map(len, _kept)) > SPARE:  # those of other sizes
            with suppress(IndexError):  # another thread was faster
                _kept.pop(0)
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(block, NUMPY_DTYPES[dtype], count)
    weakref.finalize(array, _keep_block, block)  # when the last tensor over it is gone
    return torch.from_numpy(array).view(shape)


def empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As :func:`empty`, of the shape of `x`; for small tensors faster."""
    if x.numel() * dtype.itemsize >= LARGE:
        return empty(x.shape, dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _take_block(size: int) -> mmap.mmap | None:
    for block in sorted(_kept, key=len):
        if size <= len(block) <= 2 * size:
            with suppress(ValueError):  # another thread was faster
                _kept.remove(block)
                return block
    return None


def _keep_block(block: mmap.mmap) -> None:
    with suppress(OSError):  # a kernel that does not know how
        block.madvise(mmap.MADV_FREE)
    _kept.append(block)
    del _kept[:-BLOCKS]
