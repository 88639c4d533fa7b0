"""An allocator for results of CPU loops, which caches large blocks.

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

LARGE = 4 << 20  # bytes from which on blocks are cached
BLOCKS, SPARE = 16, 64 << 20  # the most blocks in the cache, and the most bytes that stay in it when none fits
_cached: list[mmap.mmap] = []  # each operation on it is atomic: a finalizer must not wait for a lock


def empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the CPU; a large one reuses a cached block, if one fits."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype, device="cpu")
    block = _take_block(size)
    if block is None:
        while sum(map(len, _cached)) > SPARE:  # free blocks of other sizes
            with suppress(IndexError):  # another thread was faster
                _cached.pop(0)
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # an operating system without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(block, NUMPY_DTYPES[dtype], count)
    weakref.finalize(array, _cache_block, block)  # runs when the last tensor that uses the block is gone
    return torch.from_numpy(array).view(shape)


def empty_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`empty` with the shape of `x`; faster for small tensors."""
    if x.numel() * dtype.itemsize >= LARGE:
        return empty(x.shape, dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _take_block(size: int) -> mmap.mmap | None:
    """Take the smallest block that fits from the cache, unless all are more than twice as large."""
    for block in sorted(_cached, key=len):
        if size <= len(block) <= 2 * size:
            with suppress(ValueError):  # another thread was faster
                _cached.remove(block)
                return block
    return None


def _cache_block(block: mmap.mmap) -> None:
    """Add a block to the cache, and let the operating system reclaim its pages if it needs them."""
    with suppress(OSError):  # an operating system without MADV_FREE
        block.madvise(mmap.MADV_FREE)
    _cached.append(block)
    del _cached[:-BLOCKS]
