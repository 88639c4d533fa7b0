"""The gradients of a layer's biases, which are sums of rows, by ``biases.cu``."""

import functools
import struct

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc

WARPS, COLUMNS = 8, 32  # of a block


def gradients_of_biases(totals: Tensor, dtype: torch.dtype, cell: str) -> tuple[Tensor, Tensor]:
    """The gradients of both biases in one launch; see :mod:`ostinato.kernels.persistent.reference`."""
    batch, width = totals.shape
    shift = width // 4 if cell == "gru" else 0
    grad_ih, grad_hh = (totals.new_empty(width - shift, dtype=dtype) for _ in range(2))
    addresses = totals.data_ptr(), grad_ih.data_ptr(), grad_hh.data_ptr()
    device = totals.get_device()
    parameters = struct.pack("3Q3i", *addresses, batch, width, shift)
    _kernel(dtype, device).launch(device, -(-width // COLUMNS), 32 * WARPS, parameters)
    return grad_ih, grad_hh


@functools.cache
def _kernel(dtype: torch.dtype, device: int) -> nvrtc.Kernel:
    return nvrtc.load_kernel("biases", *source(dtype), device)


def source(dtype: torch.dtype) -> tuple[str, nvrtc.Macros]:
    """CUDA C++ and its preprocessor definitions."""
    definitions = ("SCALAR", nvrtc.SCALARS[dtype]), ("VEC", 1), ("WARPS", WARPS)
    return nvrtc.source("cuda/numeric.cuh", "cuda/row_sums.cuh", "persistent/cuda/biases.cu"), definitions
