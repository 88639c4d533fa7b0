"""What computes a recurrence on a device: what its modules provide, as types that mypy checks, and which it is.

All tensors that they are given are checked, not empty, and on the device.
"""

import functools
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ostinato.kernels.recurrence.arguments import Call, LayerArguments
from ostinato.kernels.scan import Order, choose_backend
from ostinato.kernels.scan.torch_ops import TorchBackend


class LinearKernels(Protocol):
    """Linear recurrences, given as the text of their trace: ``linear/cpu.py`` and ``linear/cuda.py``.

    Beside these, a module has ``Step``, one step of a layer, on a GPU with its matrix product.
    """

    def scan(self, recurrence: str, h0: Tensor | None, order: Order, /, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        """h and the last state, as the operator ``linear_recurrence``."""

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

    def layer(self, given: LayerArguments, /) -> tuple[Tensor, Tensor]:
        """h and the last state, as the operator ``layer_scan``."""

    def layer_backward(
        self, given: LayerArguments, h: Tensor, grad_h: Tensor | None, grad_h_last: Tensor | None, /
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of pre, bias and h0, None for absent ones."""


class NonlinearKernels(Protocol):
    """Recurrences that are not linear in their one or two states: ``nonlinear/cpu.py`` and ``nonlinear/cuda.py``.

    Beside these, the CPU's module has ``Step``, one step of a recurrence alone.
    """

    def steps(self, call: Call, /) -> tuple[list[Tensor], list[Tensor]]:
        """The states after every step, and those after the last."""

    def steps_backward(
        self,
        call: Call,
        states: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        grads_last: Sequence[Tensor | None],
        of_sequences: Sequence[Tensor],
        /,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Gradients of the parameters, (parameters, D), widened, and of the initial states, None if there are none.

        Those of the sequences are written to ``of_sequences``.
        """


@functools.cache
def kernels_on(backend: str, device_type: str) -> LinearKernels | None:
    """The backend's kernels of linear recurrences; None for a backend of PyTorch operations."""
    if isinstance(choose_backend(backend, device_type), TorchBackend):
        return None
    if device_type == "cuda":
        from ostinato.kernels.recurrence.linear import cuda

        return cuda
    from ostinato.kernels.recurrence.linear import cpu

    return cpu


@functools.cache
def nonlinear_kernels_on(backend: str, device_type: str) -> NonlinearKernels | None:
    """As :func:`kernels_on`, of other recurrences."""
    if isinstance(choose_backend(backend, device_type), TorchBackend):
        return None
    if device_type == "cuda":
        from ostinato.kernels.recurrence.nonlinear import cuda

        return cuda
    from ostinato.kernels.recurrence.nonlinear import cpu

    return cpu
