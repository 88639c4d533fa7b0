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
    width = weight.shape[0]
    if x.dtype != weight.dtype or not _is_faster_convolved(x, width):
        return F.linear(x, weight, bias)
    product = F.conv2d(_pixels(x), weight[:, :, None, None], bias)
    return product.permute(0, 2, 3, 1).reshape(*x.shape[:-1], width).contiguous()


def gradient_of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """``grad.T @ x`` of (rows, width) and (rows, channels): what is :func:`linear`'s gradient, and as fast."""
    width, channels = grad.shape[1], x.shape[1]
    if x.device.type != "cpu" or grad.dtype != x.dtype or not _is_faster_convolved(x, width):
        return grad.T @ x
    weight = x.new_empty(width, channels, 1, 1)  # of which only the shape is looked at
    ones, zeros = [1, 1], [0, 0]
    convolution = None, ones, zeros, ones, False, zeros, 1, [False, True, False]
    return torch.ops.aten.convolution_backward(_pixels(grad), _pixels(x), weight, *convolution)[1][:, :, 0, 0]


def _is_faster_convolved(x: Tensor, width: int) -> bool:
    rows = x.shape[:-1].numel()
    return (
        x.dtype == torch.float32
        and GEMM_ROWS <= rows <= 2**31 // max(width, x.shape[-1])  # oneDNN counts some elements in 32 bits
        and not torch.is_autocast_enabled("cpu")
        and bool(torch.backends.mkldnn.enabled)
        and _is_amd()
    )


def _pixels(x: Tensor) -> Tensor:
    """Rows as pixels of one line, channels last."""
    return x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)


@functools.cache
def _is_amd() -> bool:
    try:
        name = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        name = platform.processor()
    return "AuthenticAMD" in name
