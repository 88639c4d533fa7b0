"""Grouped GEMM: several small matrix products in one launch on an NVIDIA GPU, by ``grouped.cu``.

Launching a cuBLAS kernel for each would take the host longer than computing all of them takes the GPU.
"""

import itertools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc

TILE, SLAB = 32, 16  # rows and columns of a tile of the result; elements of the summed dimension in a slab
WARPS, BLOCKS = 8, 2  # warps of a block; blocks resident on a multiprocessor
CLUSTER = 8  # blocks of a cluster, where the GPU has clusters: from compute capability 9.0 on
# The model of the time that products take, in units of the time of a slab:
ADDING = {1: 3.0, WARPS: 2.0, WARPS * CLUSTER: 4.0}  # a tile's overhead, by the number of warps that share it
FULL = 2.0  # the slowdown of a slab on a multiprocessor with as many warps as it holds
WAITING = 0.25  # the fraction of the total work for which the last tiles wait
_TENSORS, _PRODUCTS = 22, 14  # at most
_ADDRESSES, _PRODUCT = struct.Struct(f"{_TENSORS}Q"), struct.Struct(4 * "q3i4x" + "q8i")


class Factor(NamedTuple):
    """A matrix, or a part of one, in the memory of a tensor."""

    tensor: int  # the tensor's index among those that Products is called with
    across: int  # the stride of the rows of the first factor, or of the columns of the second
    along: int  # the stride of the summed dimension
    begin: int = 0  # the offset of its first element in the tensor


NOTHING = Factor(-1, 0, 0)


class Product(NamedTuple):
    """``out = a @ b + bias``, where ``a @ b`` may be the sum of two such products.

    If a is NOTHING, the product is the sum of the rows of b, which is in float32 whatever the other tensors are.
    """

    pairs: Sequence[tuple[Factor, Factor, int]]  # a, b and the size of the summed dimension
    rows: int
    columns: int
    out: int  # the tensor's index
    begin: int = 0  # the offset of the product's first element in `out`; its rows follow one another without a gap
    bias: int | None = None  # the index of a tensor with one number for each column

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
        """How many blocks compute it, in whole clusters, if `sharers` warps share each tile."""
        return -(-self.tiles * sharers // (WARPS * cluster)) * cluster

    def packed(self, sharers: int, cluster: int) -> bytes:
        """The struct ``Product`` of ``grouped.cu``."""
        firsts, seconds, sizes = zip(*self.pairs, *[(NOTHING, NOTHING, 0)] * (2 - len(self.pairs)), strict=True)
        bias = -1 if self.bias is None else self.bias
        factors = [x for tensor, across, along, begin in (*firsts, *seconds) for x in (begin, tensor, across, along)]
        shape = self.rows, self.columns, self.blocks(sharers, cluster), sharers
        return _PRODUCT.pack(*factors, self.begin, *sizes, self.out, bias, *shape)


class Products:
    """Prepared products of tensors of one dtype, float32 or a 16-bit one, on a GPU; called with the tensors.

    The results of each group are bitwise those that it would have alone.  ``tf32`` says whether float32 may be rounded
    to tf32.
    """

    def __init__(self, groups: Sequence[Sequence[Product]], dtype: torch.dtype, tf32: bool, device: int) -> None:
        assert sum(map(len, groups)) <= _PRODUCTS, "the kernel's parameters have room for no more"
        cluster, processors = cluster_of(device), torch.cuda.get_device_properties(device).multi_processor_count
        tasks = [pair for group in groups for pair in zip(group, sharers_of(group, cluster, processors), strict=True)]
        tasks.sort(key=lambda pair: -pair[0].summed / pair[1])  # the longest sums begin first
        packed = b"".join(product.packed(sharers, cluster) for product, sharers in tasks)
        self._packed = packed.ljust(_PRODUCTS * _PRODUCT.size, b"\0")
        self._blocks = sum(product.blocks(sharers, cluster) for product, sharers in tasks)
        self._kernel, self._device = nvrtc.load_kernel("products", *source(dtype, tf32, cluster), device), device

    def __call__(self, *tensors: Tensor | None) -> None:
        """Compute all products; a tensor that none of them uses may be None."""
        addresses = [nvrtc.address(x) for x in tensors] + [0] * (_TENSORS - len(tensors))
        parameters = _ADDRESSES.pack(*addresses) + self._packed
        if self._blocks:
            self._kernel.launch(self._device, self._blocks, 32 * WARPS, parameters)


def cluster_of(device: int) -> int:
    """The number of blocks of a cluster: 1 where the GPU has no clusters."""
    return CLUSTER if torch.cuda.get_device_properties(device).major >= 9 else 1


def sharers_of(products: Sequence[Product], cluster: int, processors: int) -> list[int]:
    """How many warps share a tile of each product (one, a block's or a cluster's), so that all end soonest.

    The time is estimated as that of the longest sum, or as that of all work spread over the GPU's warps if that is
    more.  Products whose sums are about equally long have the same number of sharers.
    """
    resident_warps = WARPS * BLOCKS * processors
    slabs = [0 if product.adds_rows else -(-product.summed // SLAB) for product in products]
    lengths = sorted({size.bit_length() for size in slabs if size})

    def time(chosen: dict[int, int]) -> float:
        longest = work = 0.0
        for product, size in zip(products, slabs, strict=True):
            if size:
                sharers = chosen[size.bit_length()]
                of_warp = -(-size // sharers)
                longest = max(longest, of_warp + ADDING[sharers])
                work += product.tiles * sharers / resident_warps * (FULL * of_warp + ADDING[sharers])
        return max(longest, work) + WAITING * work

    choices = itertools.product(dict.fromkeys((WARPS, 1, WARPS * cluster)), repeat=len(lengths))
    best = min((dict(zip(lengths, chosen, strict=True)) for chosen in choices), key=time)
    return [best[size.bit_length()] if size else WARPS for size in slabs]


def source(dtype: torch.dtype, tf32: bool, cluster: int) -> tuple[str, nvrtc.Macros]:
    """The CUDA C++ of the kernel, and its preprocessor definitions."""
    narrow = dtype.itemsize == 2
    sizes = ("TILE", TILE), ("SLAB", SLAB), ("WARPS", WARPS), ("BLOCKS", BLOCKS), ("CLUSTER", cluster)
    capacity = ("TENSORS", _TENSORS), ("PRODUCTS", _PRODUCTS)
    scalar = ("SCALAR", nvrtc.SCALARS[dtype]), ("VEC", 2 if narrow else 1), ("TENSOR_CORES", int(tf32 or narrow))
    files = "cuda/numeric.cuh", "cuda/barriers.cuh", "cuda/row_sums.cuh", "matmul/grouped.cu"
    return nvrtc.source(*files), (*scalar, *sizes, *capacity)
