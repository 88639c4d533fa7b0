"""The precision of matrix products: whether PyTorch's settings allow tf32 for float32 on a GPU, and autocast's dtype.

RNN, GRU and LSTM follow the setting of ``torch.nn``'s layers, ``torch.backends.cudnn.rnn.fp32_precision``, which is
"tf32" by default; all other products follow ``torch.backends.cuda.matmul.fp32_precision``, which is not.
"""

from typing import Any

import torch

from ostinato.kernels.matmul import cublas

_precision = torch._C._get_fp32_precision_getter  # torch.backends calls it, too, but takes ten times as long


def products_allow_tf32() -> bool:
    """Whether PyTorch's own products of float32 matrices may round to tf32."""
    return _precision("cuda", "matmul") == "tf32"


def product_switches() -> tuple[Any, ...]:
    """The values of all PyTorch settings that choose between kernels for matrix products on a GPU."""
    reduced_fp16 = torch._C._get_cublas_allow_fp16_reduced_precision_reduction()
    reduced_bf16 = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    return products_allow_tf32(), reduced_fp16, reduced_bf16, torch._C._get_cublas_allow_fp16_accumulation()


def layers_allow_tf32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the products in RNN, GRU and LSTM may round to tf32: only those of float32 on a GPU ever may."""
    if device.type != "cuda" or dtype != torch.float32:
        return False
    return _precision("cuda", "rnn") == "tf32" if cublas.is_loaded() else products_allow_tf32()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on a device; None where it is off, or not supported, as on "meta"."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
