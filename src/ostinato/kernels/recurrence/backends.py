"""The interface that each device's kernels of recurrences implement, and which of them computes a recurrence.

Kernels are called with validated, non-empty tensors on their device.
"""

import functools
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ostinato.kernels.recurrence.arguments import Call, LayerArguments
from ostinato.kernels.scan import Order, choose_backend
from ostinato.kernels.scan.torch_ops import TorchBackend


class LinearKernels(Protocol):
    """Kernels of linear recurrences, each given as the text of its trace: ``linear/cpu.py`` and ``linear/cuda.py``.

    Both modules also have a class ``Step``: one step of a layer, including its matrix product.
    """

    def scan(self, recurrence: str, h0: Tensor | None, order: Order, /, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        """h and the last state, as returned by the operator ``linear_recurrence``."""

    def scan_backward(
        self,
        recurrence: str,
        h: Tensor,
        h0: Tensor | None,
        grad_h: Tensor | None,
        grad_h_last: Tensor | None,
        order: Order,
        /,
        *arguments: Tensor,
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor | None]:
        """Gradients of the sequences, of the parameters, and of h0 (None if h0 is)."""

    def layer(self, call: LayerArguments, /) -> tuple[Tensor, Tensor]:
        """h and the last state, as returned by the operator ``layer_scan``."""

    def layer_backward(
        self, call: LayerArguments, h: Tensor, grad_h: Tensor | None, grad_h_last: Tensor | None, /
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of pre, bias and h0, None for absent inputs."""


class NonlinearKernels(Protocol):
    """Kernels of recurrences that are not linear in their states.

    They are ``nonlinear/cpu.py`` and ``nonlinear/cuda.py``.  The CPU's module also has a class ``Step``: one step of
    any recurrence, without a matrix product.
    """

    def steps(self, call: Call, /) -> tuple[list[Tensor], list[Tensor]]:
        """The states after every step, and the states after the last one."""

    def steps_backward(
        self,
        call: Call,
        states: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        grads_last: Sequence[Tensor | None],
        grad_sequences: Sequence[Tensor],
        /,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Gradients of the parameters, (parameters, D), in at least float32, and of the initial states.

        The latter are None if the call has no initial states.  Gradients of the sequences are written to
        ``grad_sequences``.
        """


@functools.cache
def kernels_on(backend: str, device_type: str) -> LinearKernels | None:
    """The backend's kernels for linear recurrences; None if it consists of PyTorch operations."""
    if isinstance(choose_backend(backend, device_type), TorchBackend):
        return None
    if device_type == "cuda":
        from ostinato.kernels.recurrence.linear import cuda

        return cuda
    from ostinato.kernels.recurrence.linear import cpu

    return cpu


@functools.cache
def nonlinear_kernels_on(backend: str, device_type: str) -> NonlinearKernels | None:
    """The backend's kernels for non-linear recurrences; None if it consists of PyTorch operations."""
    if isinstance(choose_backend(backend, device_type), TorchBackend):
        return None
    if device_type == "cuda":
        from ostinato.kernels.recurrence.nonlinear import cuda

        return cuda
    from ostinato.kernels.recurrence.nonlinear import cpu

    return cpu
