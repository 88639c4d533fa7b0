"""Matrix products in float32 on AMD CPUs, computed as convolutions.

PyTorch multiplies matrices with MKL, which leaves half of an AMD processor idle, and convolves with oneDNN, which does
not (with one thread, it uses MKL for convolutions too).  A 1x1 convolution of one line of pixels in channels-last
format is the same product of the same memory.

oneDNN compiles and caches a convolution for each number of rows, which fragments the heap when lengths vary.  So
convolutions have one of a few numbers of rows only, and MKL multiplies the remaining rows.
"""

import functools
import platform
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_ROWS = 128  # from which on a convolution is worth its overhead
WHOLE_ROWS, ROUND = 2048, 128  # see is_round
PARTS = 2048, 1024, 512, 256  # the rows of single convolutions, where the total is not round


def is_faster(x: Tensor, width: int) -> bool:
    """Whether a convolution is faster than MKL at multiplying x, (..., channels), by a weight of `width` rows."""
    rows = x.shape[:-1].numel()
    return (
        x.dtype == torch.float32
        and LEAST_ROWS <= rows <= 2**31 // max(width, x.shape[-1])  # oneDNN has 32-bit element counts
        and not torch.is_autocast_enabled("cpu")
        and bool(torch.backends.mkldnn.enabled)
        and _is_amd()
    )


@functools.cache
def _is_amd() -> bool:
    try:
        name = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        name = platform.processor()
    return "AuthenticAMD" in name


def is_round(rows: int) -> bool:
    """Whether a number of rows is likely to recur: it is small, or a small multiple of a power of two.

    The latter is typical of batches of a fixed size.
    """
    return rows < WHOLE_ROWS or rows <= ROUND * (rows & -rows)


def _parts(rows: int) -> list[int]:
    """The sizes of the parts in which rows are multiplied: some of `PARTS`, then the remainder, possibly 0."""
    sizes = []
    for size in PARTS:
        sizes += [size] * (rows // size)
        rows %= size
    return [*sizes, rows]


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of (rows, channels); differentiable."""
    pixels = F.conv2d(_pixels(x), weight[:, :, None, None], bias)
    return pixels.permute(0, 2, 3, 1).reshape(-1, len(weight)).contiguous()


def product_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`product` for a number of rows that is not round; not differentiable."""
    result, weight, sizes = x.new_empty(len(x), len(weight)), weight.contiguous(), _parts(len(x))
    for rows, part in zip(x.split(sizes), result.split(sizes), strict=True):
        part.copy_((product if len(rows) in PARTS else F.linear)(rows, weight, bias))
    return result


def gradient_of_weight(grad: Tensor, x: Tensor) -> Tensor:
    """``grad.T @ x``, where grad is (rows, width) and x is (rows, channels)."""
    if is_round(len(x)):
        return _gradient_of_weight(grad, x)
    sizes = _parts(len(x))
    products = (
        _gradient_of_weight(g, y) if len(y) in PARTS else g.T @ y
        for g, y in zip(grad.split(sizes), x.split(sizes), strict=True)
    )
    return functools.reduce(Tensor.add_, products)


def _gradient_of_weight(grad: Tensor, x: Tensor) -> Tensor:
    weight = x.new_empty(grad.shape[1], x.shape[1], 1, 1)  # only its shape is used
    ones, zeros = [1, 1], [0, 0]
    convolution = None, ones, zeros, ones, False, zeros, 1, [False, True, False]
    return torch.ops.aten.convolution_backward(_pixels(grad), _pixels(x), weight, *convolution)[1][:, :, 0, 0]


def _pixels(x: Tensor) -> Tensor:
    """Rows as the pixels of one line, in channels-last format."""
    return x[None, None].permute(0, 3, 1, 2)
