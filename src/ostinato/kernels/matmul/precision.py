"""The precision of products: whether PyTorch's switches round those of float32 to tf32 on a GPU, and autocast's dtype.

Of RNN, GRU and LSTM the switch is that of ``torch.nn``'s layers, ``torch.backends.cudnn.rnn.fp32_precision``, which is
"tf32" by default; of all other products it is ``torch.backends.cuda.matmul.fp32_precision``, which is not.
"""

from typing import Any

import torch

from ostinato.kernels.matmul import cublas

_precision = torch._C._get_fp32_precision_getter  # torch.backends' own, whose attributes take ten times as long


def products_allow_tf32() -> bool:
    """Whether PyTorch's own products of float32 may be rounded to tf32."""
    return _precision("cuda", "matmul") == "tf32"


def product_switches() -> tuple[Any, ...]:
    """All of PyTorch's switches that choose between kernels of products on a GPU."""
    reduced_fp16 = torch._C._get_cublas_allow_fp16_reduced_precision_reduction()
    reduced_bf16 = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    return products_allow_tf32(), reduced_fp16, reduced_bf16, torch._C._get_cublas_allow_fp16_accumulation()


def layers_allow_tf32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether those in RNN, GRU and LSTM may be; never of other dtypes, nor elsewhere than on a GPU."""
    if device.type != "cuda" or dtype != torch.float32:
        return False
    return _precision("cuda", "rnn") == "tf32" if cublas.is_loaded() else products_allow_tf32()


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes in on a device; None where it is off, or unknown, as it is to "meta"."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
