"""The backends of the scans, their common interface, and how one is chosen.

=============  =============================================================
``reference``  the float64 recurrence, one step at a time, on any device
``torch``      chunked scans in PyTorch operations, on any device
``cpu``        Numba, for CPU tensors
``cuda``       CUDA C++ compiled at run time, for NVIDIA GPUs
``auto``       ``cpu`` or ``cuda`` where they can run, ``torch`` elsewhere
``loop``       for exported programs: PyTorch's ``scan``, one step at a time
=============  =============================================================

``reference.py`` defines what they compute.  ``torch_ops.py`` has the backends that consist of PyTorch operations.
``cpu.py`` calls the loops in ``cpu_loops.py`` and, for few channels, in ``cpu_narrow.py``; ``cuda/`` has the kernels.
``operators.py`` makes the scans differentiable operators.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor | None]
BACKENDS = ("auto", "reference", "torch", "cpu", "cuda")


class Order(NamedTuple):
    """Where the sequences of a scan begin and end, and the direction of time.

    Attributes:
        cu_seqlens: bounds, (N+1,), of packed sequences, which are concatenated in a batch of one.
        resets: bool, (B, T), True where the state before the step, in scan order, is zero.
        reverse: whether the scan runs from the last step to the first.
    """

    cu_seqlens: Tensor | None = None
    resets: Tensor | None = None
    reverse: bool = False

    @property
    def is_plain(self) -> bool:
        return self.cu_seqlens is None and self.resets is None

    def sequences(self, x: Tensor) -> int:
        """The number of sequences in x, (B, T, D)."""
        return x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


_PLAIN = Order(), Order(reverse=True)


def order_of(cu_seqlens: Tensor | None, resets: Tensor | None, reverse: bool) -> Order:
    """``Order(cu_seqlens, resets, reverse)``; the plain ones, which most calls have, are created only once."""
    return _PLAIN[reverse] if cu_seqlens is None and resets is None else Order(cu_seqlens, resets, reverse)


class Backend(Protocol):
    """Scans over checked, non-empty inputs of one floating dtype on one device.

    ``a``, ``b``, ``h`` are (B, T, D) with any strides, ``h0`` and ``h_last`` (B, D), or (N, D) with ``cu_seqlens``; an
    absent ``h0`` is the zero state, an absent gradient is zero.  Results of (B, T, D) are laid out as ``states_like``
    says, others contiguous; all have the inputs' dtype and do not alias anything.  float32 and narrower accumulate in
    float32 or wider, float64 in float64.
    """

    def states_like(self, x: Tensor, order: Order) -> Tensor:
        """An empty tensor like x, (B, T, D), with the strides that the states of a scan over x have."""
        ...

    def prepare_linear_scan(self, a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> Callable | None:
        """A faster ``linear_scan`` for inputs of the same layouts, in a plain order; None if there is none.

        It is called with the operator's arguments, so with the parts of an order in place of an ``Order``.
        """
        ...

    def linear_scan(self, a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
        """``h[t] = a[t] * h[t-1] + b[t]``; returns h and the state after the last step in scan order."""
        ...

    def linear_scan_backward(
        self, a: Tensor, h: Tensor, h0: Tensor | None, grad_h: Tensor | None, grad_h_last: Tensor | None, order: Order
    ) -> Gradients:
        """The gradients of a, b and h0 (None if h0 is)."""
        ...

    def log_linear_scan(self, a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
        """``h[t] = logaddexp(a[t] + h[t-1], b[t])``, where a, b and h are logarithms."""
        ...

    def log_linear_scan_backward(
        self,
        a: Tensor,
        b: Tensor,
        h: Tensor,
        h0: Tensor | None,
        grad_h: Tensor | None,
        grad_h_last: Tensor | None,
        order: Order,
    ) -> Gradients:
        """The gradients of a, b and h0 (None if h0 is)."""
        ...


@functools.cache
def choose_backend(name: str, device_type: str) -> Backend:
    """The backend called `name` for tensors on a device such as "cpu" or "cuda".

    Raises ValueError if no backend has that name, RuntimeError if it cannot run on that device.
    """
    from ostinato.kernels.cuda import nvrtc

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
    if name == "cuda":
        from ostinato.kernels.scan import cuda

        return cuda
    from ostinato.kernels.scan import cpu

    return cpu
