"""Several small products of matrices in one launch on an NVIDIA GPU, by ``products.cu``.

The host takes longer to launch a kernel of cuBLAS for each than the GPU to compute all.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.kernels import nvrtc

WARPS, TILE = 8, 32  # of a block: warps, rows and columns that it computes
_TENSORS, _PRODUCTS = 22, 14  # at most
_ADDRESSES, _FACTOR, _PRODUCT = struct.Struct(f"{_TENSORS}Q"), struct.Struct("q3i4x"), struct.Struct("q7i4x")


class Factor(NamedTuple):
    """A matrix, or a part of one, in memory."""

    tensor: int  # which of those given
    across: int  # elements from a row of the first factor, or a column of the second, to the next
    along: int  # the same along the summed dimension
    begin: int = 0  # its first element

    def packed(self) -> bytes:
        return _FACTOR.pack(self.begin, self.tensor, self.across, self.along)


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

    def packed(self) -> bytes:
        firsts, seconds, sizes = zip(*self.pairs, *[(NOTHING, NOTHING, 0)] * (2 - len(self.pairs)), strict=True)
        bias = -1 if self.bias is None else self.bias
        numbers = self.begin, *sizes, self.out, bias, self.rows, self.columns, self.tiles
        return b"".join(factor.packed() for factor in (*firsts, *seconds)) + _PRODUCT.pack(*numbers)


class Products:
    """Prepared products of tensors of a dtype, float32 or of 16 bits, on a GPU; called with the tensors.

    ``rounds`` says whether float32 may be rounded to tf32.
    """

    def __init__(self, products: Sequence[Product], dtype: torch.dtype, rounds: bool, device: int) -> None:
        assert len(products) <= _PRODUCTS, "the kernel's parameters have room for no more"
        packed = b"".join(product.packed() for product in products)
        self._packed = packed.ljust(_PRODUCTS * (4 * _FACTOR.size + _PRODUCT.size), b"\0")
        self._blocks, self._device = sum(product.tiles for product in products), device
        self._kernel = nvrtc.load_kernel("products", *source(dtype, rounds), device)

    def __call__(self, *tensors: Tensor | None) -> None:
        """Compute them; None for tensors that none of them has."""
        addresses = [nvrtc.address(x) for x in tensors] + [0] * (_TENSORS - len(tensors))
        parameters = _ADDRESSES.pack(*addresses) + self._packed
        if self._blocks:
            self._kernel.launch(self._device, self._blocks, 32 * WARPS, parameters)


def source(dtype: torch.dtype, rounds: bool) -> tuple[str, nvrtc.Macros]:
    """CUDA C++ and its preprocessor definitions."""
    narrow = dtype.itemsize == 2
    sizes = ("WARPS", WARPS), ("TILE", TILE), ("TENSORS", _TENSORS), ("PRODUCTS", _PRODUCTS)
    scalar = ("SCALAR", nvrtc.SCALARS[dtype]), ("VEC", 2 if narrow else 1), ("TENSOR_CORES", int(rounds or narrow))
    return nvrtc.source("numeric.cuh", "products.cu"), (*scalar, *sizes)
