"""The GEMM of every layer's inputs, and those of its backward pass, by the fastest of torch's implementations.

``tf32`` says whether float32 may be rounded to tf32 on a GPU; if it is None, torch's setting for matrix products does.
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

LONG, WIDE = 8192, 1024  # rows and width from which on a transposition pays off
TILE = 128, 32  # rows and columns that a thread block transposes
ALIGNMENT = 16  # bytes to which the rows of operands must be aligned for GEMMs to run at full speed on a GPU
LARGE = 2**34  # multiply-adds from which on copies with aligned rows pay off, even for the host, which launches them


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, tf32: bool | None = None) -> Tensor:
    """``F.linear(x, weight, bias)``; eager calls use the fastest implementation.  With `tf32`, not differentiable."""
    if x.dim() == 2 and not torch.compiler.is_compiling() and x.shape[0] < convolution.LEAST_ROWS:
        return _linear(x, weight, bias, tf32)  # saves the checks: nothing else pays off with so few rows
    if x.is_cpu:
        if is_eager([x, weight]):
            return _linear_cpu(x, weight, bias)
    elif _is_faster_padded(x, weight, weight.shape[0], tf32):
        rows, columns = (_padding(x, size) for size in weight.shape)
        bias = None if bias is None else F.pad(bias, (0, rows))
        padded = F.pad(x, (0, columns)), F.pad(weight, (0, columns, 0, rows)), bias
        return _first_columns(linear(*padded, tf32), weight.shape[0])
    elif tf32 is None and _needs_gradient(weight) and _is_faster_transposed(x, weight, weight.shape[0]):
        return _Transposing.apply(x, weight, bias)
    return _linear(x, weight, bias, tf32)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool) -> Tensor:
    """:func:`linear` for x of (rows, channels), written to `out`."""
    if _needs_cublas(x, weight, tf32):
        return cublas.multiply(x, weight.T, bias, out, tf32=tf32)
    if _is_faster_padded(x, weight, weight.shape[0], tf32):
        return out.copy_(linear(x, weight, bias, tf32))
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def _needs_gradient(weight: Tensor) -> bool:
    return torch.is_grad_enabled() and weight.requires_grad


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool | None) -> Tensor:
    if tf32 is not None and _needs_cublas(x, weight, tf32):
        return cublas.multiply(x, weight.T, bias, tf32=tf32)
    return F.linear(x, weight, bias)


def _matmul(a: Tensor, b: Tensor, tf32: bool | None) -> Tensor:
    if tf32 is not None and _needs_cublas(a, b, tf32):
        return cublas.multiply(a, b, tf32=tf32)
    return a @ b


def _needs_cublas(a: Tensor, b: Tensor, tf32: bool) -> bool:
    """Whether torch would round to tf32 where `tf32` forbids it, or the other way round."""
    return a.is_cuda and a.dtype == torch.float32 and tf32 != products_allow_tf32() and is_eager([a, b])


class _Transposing(torch.autograd.Function):
    """:func:`linear` in tf32; its backward pass transposes operands of GEMMs to the layout that the hardware takes."""

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
    """:func:`linear` of (rows, channels) by convolutions, with a backward pass of its own instead of theirs.

    The convolutions of parts, where the number of rows is not round, are not differentiable.  And oneDNN sums the
    gradient of a bias row by row, so that its error grows with the number of rows.
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
    (x, weight), (needs_x, needs_weight, needs_bias) = ctx.saved_tensors, ctx.needs_input_grad
    rows = grad.reshape(-1, grad.shape[-1])  # flatten does not work with is_grads_batched
    return (
        gradient_of_input(grad, weight) if needs_x else None,
        gradient_of_weight(rows, x.flatten(0, -2)) if needs_weight else None,
        rows.sum(0) if needs_bias else None,
    )


def _is_faster_padded(x: Tensor, other: Tensor, width: int, tf32: bool | None) -> bool:
    """Whether an eager product of x, (rows, channels), on a GPU, with `width` columns, pays for padding its operands.

    cuBLAS takes three to five times as long where rows are not aligned to 16 bytes.
    """
    return (
        (_padding(x, x.shape[-1]) > 0 or _padding(x, width) > 0)
        and x.is_cuda
        and x.numel() * width >= LARGE
        and not torch.compiler.is_compiling()
        and is_eager([x, other])
        and (x.itemsize == 2 or (x.dtype == torch.float32 and (products_allow_tf32() if tf32 is None else tf32)))
        and not torch.is_autocast_enabled("cuda")
    )


def _padding(x: Tensor, size: int) -> int:
    """How many elements of x's dtype pad `size` elements to a multiple of 16 bytes."""
    return -size % (ALIGNMENT // x.itemsize)


def _padded(x: Tensor) -> Tensor:
    """x if all its rows are aligned to 16 bytes, else a copy whose rows are, padded with zeros."""
    is_aligned = x.data_ptr() % ALIGNMENT == 0 and not any(_padding(x, stride) for stride in x.stride()[:-1])
    return x if is_aligned else F.pad(x, (0, _padding(x, x.shape[-1])))


def _first_columns(x: Tensor, columns: int) -> Tensor:
    return x if x.shape[-1] == columns else x[..., :columns].contiguous()


def _is_faster_transposed(x: Tensor, other: Tensor, width: int, tf32: bool | None = None) -> bool:
    """Whether transposing pays off in the GEMM of the gradient of a weight of that width, in an eager call.

    Hopper's tensor cores take tf32 operands only if they are K-major (contiguous along the summed dimension).  cuBLAS's
    kernels for two operands in the other layout reach half of the speed.
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
    """``x.T.contiguous()`` of float32 on a GPU at memory bandwidth; PyTorch's copy takes three times as long.

    Rows of x where the bool tensor `zeroed` is true count as zeros.
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
    """Differentiable ``F.linear(x, weight, bias)``, as a convolution where that is faster."""
    if x.dtype != weight.dtype or not convolution.is_faster(x, weight.shape[0]):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    sums_bias = len(rows) > convolution.WHOLE_ROWS and bias is not None and _needs_gradient(bias)
    product = convolution.product if convolution.is_round(len(rows)) and not sums_bias else _Convolved.apply
    return product(rows, weight, bias).view(*x.shape[:-1], -1)


def gradient_of_input(grad: Tensor, weight: Tensor, tf32: bool | None = None) -> Tensor:
    """The gradient of the input of :func:`linear`: ``grad @ weight``, (..., width) times (width, channels)."""
    if grad.is_cpu:
        return linear(grad, weight.T)
    channels = weight.shape[1]
    if not torch.is_grad_enabled():
        if _is_faster_padded(grad, weight, channels, tf32):
            grad = _padded(grad)
            weight = F.pad(weight, (0, _padding(weight, channels), 0, grad.shape[-1] - len(weight)))
        if _is_faster_transposed(grad, weight, weight.shape[0], tf32):
            weight = transposed(weight).T
    return _first_columns(_matmul(grad, weight, tf32), channels)


def transposes(grad: Tensor, x: Tensor, tf32: bool | None) -> bool:
    """Whether :func:`gradient_of_weight` transposes x, and so zeroes rows of it without a copy for that alone."""
    is_transposable = grad.dtype == x.dtype and not torch.is_grad_enabled()
    return is_transposable and _is_faster_transposed(x, grad, grad.shape[1], tf32)


def gradient_of_weight(grad: Tensor, x: Tensor, zeroed: Tensor | None = None, tf32: bool | None = None) -> Tensor:
    """The gradient of the weight of :func:`linear`: ``grad.T @ x``, where grad is (rows, width), x (rows, channels).

    Rows of x where the bool tensor `zeroed` is true count as zeros.
    """
    width, channels = grad.shape[1], x.shape[1]
    if not torch.is_grad_enabled() and _is_faster_padded(x, grad, width, tf32):
        grad, x = _padded(grad), _padded(x)
    if transposes(grad, x, tf32):
        return _first_columns(_matmul(grad.T, transposed(x, zeroed).T, tf32)[:width], channels)
    if zeroed is not None:
        x = torch.where(zeroed[:, None], 0.0, x)
    is_eager_on_cpu = x.is_cpu and grad.dtype == x.dtype and is_eager([grad, x])
    if is_eager_on_cpu and convolution.is_faster(x, width):
        return convolution.gradient_of_weight(grad, x)
    return _first_columns(_matmul(grad.T, x, tf32)[:width], channels)


def add_product(onto: Tensor, a: Tensor, b: Tensor, tf32: bool | None) -> Tensor:
    """``onto.addmm_(a, b)`` for a contiguous matrix `onto`."""
    if tf32 is not None and _needs_cublas(a, b, tf32):
        return cublas.multiply(a, b, out=onto, accumulate=True, tf32=tf32)
    return onto.addmm_(a, b)
