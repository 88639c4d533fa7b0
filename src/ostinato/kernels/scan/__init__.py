"""The backends of the scan, their interface, and how one is chosen.

=============  =============================================================
``reference``  the float64 recurrence, one step at a time, on any device
``torch``      chunked scans in PyTorch operations, on any device
``cpu``        Numba, for CPU tensors
``cuda``       CUDA C++ compiled at run time, for NVIDIA GPUs
``auto``       the last two where they can run, ``torch`` elsewhere
``loop``       for exported programs: PyTorch's ``scan``, one step at a time
=============  =============================================================
"""

import functools
import importlib
from typing import Protocol, cast

from torch import Tensor

BACKENDS = ("auto", "reference", "torch", "cpu", "cuda")


class Backend(Protocol):
    """Scans over checked, non-empty inputs of one floating dtype on one device.

    ``a``, ``b``, ``h`` are (B, T, D) with any strides, ``h0`` and ``h_last`` (B, D), or (N, D) with
    ``cu_seqlens``; an absent ``h0`` is the zero state, an absent gradient is zero; ``resets``, bool, (B, T), is True
    where, in scan order, the state is zero before the step.  Results are contiguous, or laid out as the backend's
    ``states_like`` does, do not alias anything, and have the inputs' dtype; float32 and narrower accumulate in float32,
    float64 in float64.
    """

    def linear_scan(
        self,
        a: Tensor,
        b: Tensor,
        h0: Tensor | None,
        reverse: bool,
        cu_seqlens: Tensor | None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``h[t] = a[t] * h[t-1] + b[t]``; returns h and the state after the last step taken."""
        ...

    def linear_scan_backward(
        self,
        a: Tensor,
        h: Tensor,
        h0: Tensor | None,
        grad_h: Tensor | None,
        grad_h_last: Tensor | None,
        reverse: bool,
        cu_seqlens: Tensor | None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of a, b and h0 (None if h0 is)."""
        ...

    def log_linear_scan(
        self,
        log_a: Tensor,
        log_b: Tensor,
        log_h0: Tensor | None,
        reverse: bool,
        cu_seqlens: Tensor | None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``log_h[t] = logaddexp(log_a[t] + log_h[t-1], log_b[t])``."""
        ...

    def log_linear_scan_backward(
        self,
        log_a: Tensor,
        log_b: Tensor,
        log_h: Tensor,
        log_h0: Tensor | None,
        grad_h: Tensor | None,
        grad_h_last: Tensor | None,
        reverse: bool,
        cu_seqlens: Tensor | None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of log_a, log_b and log_h0 (None if log_h0 is)."""
        ...


@functools.cache
def choose_backend(name: str, device_type: str) -> Backend:
    """The backend called `name` for tensors on a device such as "cpu" or "cuda".

    Raises ValueError if there is none of that name, RuntimeError if it cannot run there.
    """
    from ostinato.kernels import nvrtc

    if name == "auto":
        can_launch = device_type == "cuda" and nvrtc.why_no_cuda() is None
        name = device_type if device_type == "cpu" or can_launch else "torch"
    if name in ("torch", "reference", "loop"):
        from ostinato.kernels.scan import torch_ops

        named = {"torch": torch_ops.CHUNKED, "reference": torch_ops.REFERENCE, "loop": torch_ops.LOOPED}
        return named[name]
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    if name != device_type:
        raise RuntimeError(f"backend {name!r} runs on {name} tensors; got tensors on {device_type}")
    if name == "cuda" and (reason := nvrtc.why_no_cuda()):
        raise RuntimeError(f"backend 'cuda' cannot run: {reason}")
    return cast(Backend, importlib.import_module(f"ostinato.kernels.scan.{name}"))
