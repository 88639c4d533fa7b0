"""The GEMM before every layer, and those of its gradients: the fastest of torch's implementations.

``tf32`` says whether float32 may be rounded to tf32 on a GPU; if it is None, torch's switch for products does.
"""

import functools
import struct
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.matmul import convolution, cublas
from ostinato.kernels.matmul.precision import products_allow_tf32
from ostinato.kernels.operators.eager import is_eager

LONG, WIDE = 8192, 1024  # rows and width from which a transposition pays off
TILE = 128, 32  # rows and columns that a block transposes
LINE = 16  # bytes, at multiples of which rows begin that GPUs multiply at full speed
LARGE = 2**34  # multiply-adds, from which copies pay off whose rows do, for the host too, which has to launch them


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tf32: bool | None = None) -> Tensor:
    """``F.linear(x, weight, bias)``; eager calls choose the fastest implementation.  With `tf32`, no gradients."""
    if x.dim() == 2 and not torch.compiler.is_compiling() and x.shape[0] < convolution.LEAST_ROWS:
        return _linear(x, weight, bias, tf32)  # before the checks for what pays off with more rows
    if x.is_cpu:
        if is_eager([x, weight]):
            return _linear_cpu(x, weight, bias)
    elif _is_faster_padded(x, weight, weight.shape[0], tf32):
        rows, columns = (_missing(x, size) for size in weight.shape)
        bias = None if bias is None else F.pad(bias, (0, rows))
        padded = F.pad(x, (0, columns)), F.pad(weight, (0, columns, 0, rows)), bias
        return _first(linear(*padded, tf32), weight.shape[0])
    elif tf32 is None and _is_trained(weight) and _is_faster_transposed(x, weight, weight.shape[0]):
        return _Transposing.apply(x, weight, bias)
    return _linear(x, weight, bias, tf32)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool) -> Tensor:
    """:func:`linear` of (rows, channels), written to `out`."""
    if _is_cublas(x, weight, tf32):
        return cublas.multiply(x, weight.T, bias, out, tf32=tf32)
    if _is_faster_padded(x, weight, weight.shape[0], tf32):
        return out.copy_(linear(x, weight, bias, tf32))
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def _is_trained(weight: Tensor) -> bool:
    return torch.is_grad_enabled() and weight.requires_grad


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool | None) -> Tensor:
    if tf32 is not None and _is_cublas(x, weight, tf32):
        return cublas.multiply(x, weight.T, bias, tf32=tf32)
    return F.linear(x, weight, bias)


def _matmul(a: Tensor, b: Tensor, tf32: bool | None) -> Tensor:
    if tf32 is not None and _is_cublas(a, b, tf32):
        return cublas.multiply(a, b, tf32=tf32)
    return a @ b


def _is_cublas(a: Tensor, b: Tensor, tf32: bool) -> bool:
    """Whether torch's product would round, and this must not, or the other way."""
    return a.is_cuda and a.dtype == torch.float32 and tf32 != products_allow_tf32() and is_eager([a, b])


class _Transposing(torch.autograd.Function):
    """:func:`linear` in tf32; operands of the gradients' GEMMs are transposed to the layout that the hardware takes."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad)


class _Convolved(torch.autograd.Function):
    """:func:`linear` of (rows, channels) by convolutions, without their gradients.

    Parts have none, where the number of rows is not round.  That of a bias oneDNN sums row after row, so that its error
    grows with their number.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        product = convolution.product if convolution.is_round(len(x)) else convolution.product_in_parts
        return product(x, weight, bias)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad
    rows = grad.reshape(-1, grad.shape[-1])  # is_grads_batched cannot flatten
    return (
        gradient_of_input(grad, weight) if of_x else None,
        gradient_of_weight(rows, x.flatten(0, -2)) if of_weight else None,
        rows.sum(0) if of_bias else None,
    )


def _is_faster_padded(x: Tensor, other: Tensor, width: int, tf32: bool | None) -> bool:
    """Whether copies pay off, in an eager call on a GPU, whose rows begin at multiples of 16 bytes.

    Of others, (rows, channels) and `width` columns, cuBLAS's products take three to five times as long.
    """
    missing = _missing(x, x.shape[-1]) or _missing(x, width)
    return (
        missing > 0
        and x.is_cuda
        and x.numel() * width >= LARGE
        and not torch.compiler.is_compiling()
        and is_eager([x, other])
        and (x.itemsize == 2 or (x.dtype == torch.float32 and (products_allow_tf32() if tf32 is None else tf32)))
        and not torch.is_autocast_enabled("cuda")
    )


def _missing(x: Tensor, size: int) -> int:
    """Elements of x's dtype from a size to the next multiple of 16 bytes."""
    return -size % (LINE // x.itemsize)


def _padded(x: Tensor) -> Tensor:
    """x, or a copy with zeros, in which all rows begin at multiples of 16 bytes."""
    begin_there = x.data_ptr() % LINE == 0 and not any(_missing(x, stride) for stride in x.stride()[:-1])
    return x if begin_there else F.pad(x, (0, _missing(x, x.shape[-1])))


def _first(x: Tensor, columns: int) -> Tensor:
    """The first columns of (..., columns)."""
    return x if x.shape[-1] == columns else x[..., :columns].contiguous()


def _is_faster_transposed(x: Tensor, other: Tensor, width: int, tf32: bool | None = None) -> bool:
    """Whether transposing pays off in the GEMM for the gradient of a weight of that width, in an eager call.

    Hopper's tensor cores take tf32 operands only if K-major (contiguous along the summed dimension).  cuBLAS's kernels
    for two operands in the other layout reach half of the speed.
    """
    return (
        not torch.compiler.is_compiling()
        and x.dtype == torch.float32
        and x.is_cuda
        and width >= WIDE
        and x.shape[:-1].numel() >= LONG
        and is_eager([x, other])
        and (products_allow_tf32() if tf32 is None else tf32)
        and not torch.is_autocast_enabled("cuda")
        and _can_transpose(x.get_device())
    )


@functools.cache
def _can_transpose(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9 and nvrtc.why_no_cuda() is None


def transposed(x: Tensor, zeroed: Tensor | None = None) -> Tensor:
    """``x.T.contiguous()`` of float32 on a GPU, at the memory's speed; PyTorch's copy takes three times as long.

    Rows of x where `zeroed`, a bool tensor, count as zeros.
    """
    x = x.contiguous()
    rows, columns = x.shape
    y = x.new_empty(columns, rows)
    blocks = -(-rows // TILE[0]) * -(-columns // TILE[1])
    macros = ("ROWS", TILE[0]), ("COLUMNS", TILE[1])
    zeroed = None if zeroed is None else zeroed.contiguous()
    addresses = x.data_ptr(), nvrtc.address(zeroed), y.data_ptr()
    kernel = nvrtc.load_kernel("transpose", nvrtc.source("matmul/transpose.cu"), macros, x.get_device())
    kernel.launch(x.get_device(), blocks, 256, struct.pack("QQQqq", *addresses, rows, columns))
    return y


def _linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear(x, weight, bias)`` and its gradients, as a convolution where that is faster."""
    if x.dtype != weight.dtype or not convolution.is_faster(x, weight.shape[0]):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    sums = len(rows) > convolution.WHOLE_ROWS and bias is not None and bias.requires_grad and torch.is_grad_enabled()
    product = convolution.product if convolution.is_round(len(rows)) and not sums else _Convolved.apply
    return product(rows, weight, bias).view(*x.shape[:-1], -1)


def gradient_of_input(grad: Tensor, weight: Tensor, tf32: bool | None = None) -> Tensor:
    """``grad @ weight`` of (..., width) and (width, channels), the input's gradient of :func:`linear`, and as fast."""
    if grad.is_cpu:
        return linear(grad, weight.T)
    channels = weight.shape[1]
    if not torch.is_grad_enabled():
        if _is_faster_padded(grad, weight, channels, tf32):
            grad = _padded(grad)
            weight = F.pad(weight, (0, _missing(weight, channels), 0, grad.shape[-1] - len(weight)))
        if _is_faster_transposed(grad, weight, weight.shape[0], tf32):
            weight = transposed(weight).T
    return _first(_matmul(grad, weight, tf32), channels)


def transposes(grad: Tensor, x: Tensor, tf32: bool | None) -> bool:
    """Whether :func:`gradient_of_weight` transposes x, and so leaves out rows of it without another copy."""
    is_alone = grad.dtype == x.dtype and not torch.is_grad_enabled()
    return is_alone and _is_faster_transposed(x, grad, grad.shape[1], tf32)


def gradient_of_weight(grad: Tensor, x: Tensor, zeroed: Tensor | None = None, tf32: bool | None = None) -> Tensor:
    """``grad.T @ x`` of (rows, width) and (rows, channels), the weight's gradient of :func:`linear`, and as fast.

    Rows of x where `zeroed`, a bool tensor, count as zeros.
    """
    width, channels = grad.shape[1], x.shape[1]
    if not torch.is_grad_enabled() and _is_faster_padded(x, grad, width, tf32):
        grad, x = _padded(grad), _padded(x)
    if transposes(grad, x, tf32):
        return _first(_matmul(grad.T, transposed(x, zeroed).T, tf32)[:width], channels)
    if zeroed is not None:
        x = torch.where(zeroed[:, None], 0.0, x)
    own = x.is_cpu and grad.dtype == x.dtype and is_eager([grad, x])
    if own and convolution.is_faster(x, width):
        return convolution.gradient_of_weight(grad, x)
    return _first(_matmul(grad.T, x, tf32)[:width], channels)


def add_product(onto: Tensor, a: Tensor, b: Tensor, tf32: bool | None) -> Tensor:
    """``onto.addmm_(a, b)`` of a contiguous matrix."""
    if tf32 is not None and _is_cublas(a, b, tf32):
        return cublas.multiply(a, b, out=onto, adds=True, tf32=tf32)
    return onto.addmm_(a, b)
