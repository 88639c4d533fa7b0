"""The matrix product that feeds every layer: torch's, but on the CPU the fastest way to it."""

import functools
import platform
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.dispatch import is_eager

GEMM_ROWS = 128  # rows from which on a convolution's overhead is made up for


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)``, eager on the CPU by the kernels' own choice of how."""
    if x.device.type == "cpu" and is_eager([x, weight]):
        return _linear_cpu(x, weight, bias)
    return F.linear(x, weight, bias)


def _linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)`` and its gradients, on AMD's processors as a convolution.

    PyTorch multiplies matrices by MKL, which leaves half of an AMD processor idle, and convolves by oneDNN, which
    does not (with one thread it takes MKL there too).  A 1x1 convolution along one line of pixels, channels last,
    is the same product of the same memory.
    """
    rows, width = x.shape[:-1].numel(), weight.shape[0]
    if (
        not x.dtype == weight.dtype == torch.float32
        or not GEMM_ROWS <= rows <= 2**31 // max(width, x.shape[-1])  # oneDNN counts some elements in 32 bits
        or torch.is_autocast_enabled("cpu")
        or not torch.backends.mkldnn.enabled
        or not _is_amd()
    ):
        return F.linear(x, weight, bias)
    pixels = x.reshape(1, 1, rows, x.shape[-1]).permute(0, 3, 1, 2)
    product = F.conv2d(pixels, weight[:, :, None, None], bias)
    return product.permute(0, 2, 3, 1).reshape(*x.shape[:-1], width).contiguous()


@functools.cache
def _is_amd() -> bool:
    try:
        name = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        name = platform.processor()
    return "AuthenticAMD" in name
