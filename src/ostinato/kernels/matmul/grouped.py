"""Several small products of matrices in one launch on an NVIDIA GPU, by ``grouped.cu``.

The host takes longer to launch a kernel of cuBLAS for each than the GPU to compute all.
"""

import itertools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc

TILE, SLAB = 32, 16  # rows and columns that a warp computes, alone or with others; what it sums at once
WARPS, BLOCKS = 8, 2  # of a block; at once on a multiprocessor
CLUSTER = 8  # blocks, where GPUs have clusters: from compute capability 9.0 on
ADDING = {1: 3.0, WARPS: 2.0, WARPS * CLUSTER: 4.0}  # what a tile takes beside its slabs, in their time, by its warps
FULL = 2.0  # times as long takes a slab on a multiprocessor that has no room for more
WAITING = 0.25  # of the work of all, for which the last ones wait
_TENSORS, _PRODUCTS = 22, 14  # at most
_ADDRESSES, _PRODUCT = struct.Struct(f"{_TENSORS}Q"), struct.Struct(4 * "q3i4x" + "q8i")


class Factor(NamedTuple):
    """A matrix, or a part of one, in memory."""

    tensor: int  # which of those given
    across: int  # elements from a row of the first factor, or a column of the second, to the next
    along: int  # the same along the summed dimension
    begin: int = 0  # its first element


NOTHING = Factor(-1, 0, 0)


class Product(NamedTuple):
    """``out = a @ b + bias``, where ``a @ b`` may be the sum of two such products.

    Where a is NOTHING, it is the sum of the rows of b, which is of float32 whatever the other tensors are.
    """

    pairs: Sequence[tuple[Factor, Factor, int]]  # a, b and the size of the summed dimension
    rows: int
    columns: int
    out: int  # which tensor
    begin: int = 0  # the element of it where the product begins, whose rows are contiguous
    bias: int | None = None  # which tensor, of a number for each column

    @property
    def tiles(self) -> int:
        return -(-self.rows // TILE) * -(-self.columns // TILE)

    @property
    def summed(self) -> int:
        return max(size for *_, size in self.pairs)

    @property
    def adds_rows(self) -> bool:
        return self.pairs[0][0] is NOTHING

    def blocks(self, sharers: int, cluster: int) -> int:
        """In whole clusters, if so many warps share a tile."""
        return -(-self.tiles * sharers // (WARPS * cluster)) * cluster

    def packed(self, sharers: int, cluster: int) -> bytes:
        firsts, seconds, sizes = zip(*self.pairs, *[(NOTHING, NOTHING, 0)] * (2 - len(self.pairs)), strict=True)
        bias = -1 if self.bias is None else self.bias
        factors = [x for tensor, across, along, begin in (*firsts, *seconds) for x in (begin, tensor, across, along)]
        shape = self.rows, self.columns, self.blocks(sharers, cluster), sharers
        return _PRODUCT.pack(*factors, self.begin, *sizes, self.out, bias, *shape)


class Products:
    """Prepared products of tensors of a dtype, float32 or of 16 bits, on a GPU; called with the tensors.

    They come in groups, each of which is computed as it would be alone, to the same bits.  ``tf32`` says whether
    float32 may be rounded to tf32.
    """

    def __init__(self, groups: Sequence[Sequence[Product]], dtype: torch.dtype, tf32: bool, device: int) -> None:
        assert sum(map(len, groups)) <= _PRODUCTS, "the kernel's parameters have room for no more"
        cluster, processors = cluster_of(device), torch.cuda.get_device_properties(device).multi_processor_count
        each = [pair for own in groups for pair in zip(own, sharers_of(own, cluster, processors), strict=True)]
        each.sort(key=lambda pair: -pair[0].summed / pair[1])  # the longest sums begin first
        packed = b"".join(product.packed(own, cluster) for product, own in each)
        self._packed = packed.ljust(_PRODUCTS * _PRODUCT.size, b"\0")
        self._blocks = sum(product.blocks(own, cluster) for product, own in each)
        self._kernel, self._device = nvrtc.load_kernel("products", *source(dtype, tf32, cluster), device), device

    def __call__(self, *tensors: Tensor | None) -> None:
        """Compute them; None for tensors that none of them has."""
        addresses = [nvrtc.address(x) for x in tensors] + [0] * (_TENSORS - len(tensors))
        parameters = _ADDRESSES.pack(*addresses) + self._packed
        if self._blocks:
            self._kernel.launch(self._device, self._blocks, 32 * WARPS, parameters)


def cluster_of(device: int) -> int:
    """Blocks of a cluster."""
    return CLUSTER if torch.cuda.get_device_properties(device).major >= 9 else 1


def sharers_of(products: Sequence[Product], cluster: int, processors: int) -> list[int]:
    """How many warps share a tile of each: one, a block's or a cluster's, with which all are estimated to end first.

    That is when the one of the longest sums ends, or when the GPU's warps have done all work.  Sums of about the same
    length are shared by the same number.
    """
    at_once = WARPS * BLOCKS * processors
    slabs = [0 if product.adds_rows else -(-product.summed // SLAB) for product in products]
    lengths = sorted({size.bit_length() for size in slabs if size})

    def ends(chosen: dict[int, int]) -> float:
        longest = work = 0.0
        for product, size in zip(products, slabs, strict=True):
            if size:
                own = chosen[size.bit_length()]
                each = -(-size // own)
                longest = max(longest, each + ADDING[own])
                work += product.tiles * own / at_once * (FULL * each + ADDING[own])
        return max(longest, work) + WAITING * work

    choices = itertools.product(dict.fromkeys((WARPS, 1, WARPS * cluster)), repeat=len(lengths))
    best = min((dict(zip(lengths, chosen, strict=True)) for chosen in choices), key=ends)
    return [best[size.bit_length()] if size else WARPS for size in slabs]


def source(dtype: torch.dtype, tf32: bool, cluster: int) -> tuple[str, nvrtc.Macros]:
    """CUDA C++ and its preprocessor definitions."""
    narrow = dtype.itemsize == 2
    sizes = ("TILE", TILE), ("SLAB", SLAB), ("WARPS", WARPS), ("BLOCKS", BLOCKS), ("CLUSTER", cluster)
    room = ("TENSORS", _TENSORS), ("PRODUCTS", _PRODUCTS)
    scalar = ("SCALAR", nvrtc.SCALARS[dtype]), ("VEC", 2 if narrow else 1), ("TENSOR_CORES", int(tf32 or narrow))
    files = "cuda/numeric.cuh", "cuda/barriers.cuh", "cuda/row_sums.cuh", "matmul/grouped.cu"
    return nvrtc.source(*files), (*scalar, *sizes, *room)
