"""The complex linear scan as a real recurrence of two states, the real and the imaginary part."""

import torch
from torch import Tensor

from ostinato.kernels.recurrence.arguments import concatenated_states
from ostinato.kernels.recurrence.nonlinear.operator import nonlinear_recurrence
from ostinato.kernels.recurrence.symbolic.tracer import trace
from ostinato.kernels.scan import Order, choose_backend
from ostinato.kernels.scan.operators import check_cu_seqlens
from ostinato.kernels.scan.torch_ops import TorchBackend


def _step(
    state: tuple[Tensor, Tensor], a: Tensor, a_imaginary: Tensor, b: Tensor, b_imaginary: Tensor
) -> tuple[Tensor, Tensor]:
    real, imaginary = state
    return a * real - a_imaginary * imaginary + b, a * imaginary + a_imaginary * real + b_imaginary


_RECURRENCE = trace(_step, [True] * 4, 2).text


def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The operator ``linear_scan`` for complex tensors; differentiable to any order."""
    if not torch.compiler.is_compiling() and b.numel() > 0:
        kernels = choose_backend(backend, b.device.type)
        if isinstance(kernels, TorchBackend):  # PyTorch operations support and differentiate complex numbers
            check_cu_seqlens(cu_seqlens, b.shape[1])
            return kernels.linear_scan(a, b, h0, Order(cu_seqlens, resets, reverse))
    initial = None if h0 is None else concatenated_states(_parts(h0))
    options = cu_seqlens, resets, reverse, backend
    h, h_imaginary, last, last_imaginary = nonlinear_recurrence(_RECURRENCE, initial, *options, *_parts(a), *_parts(b))
    return torch.complex(h, h_imaginary), torch.complex(last, last_imaginary)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """The real and the imaginary part, as views."""
    parts = torch.view_as_real(x.resolve_conj())
    # Views made by unbind would raise a different error if x is modified in place before the backward pass.
    return parts.select(-1, 0), parts.select(-1, 1)
