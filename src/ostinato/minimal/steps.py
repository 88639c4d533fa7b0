"""One step of a minimal layer or cell: a product and the gates, fused where a kernel fits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.operators.eager import Prepared, is_differentiated, is_eager
from ostinato.kernels.recurrence.backends import kernels_on
from ostinato.kernels.recurrence.linear.layer import step_of
from ostinato.minimal.recurrences import GATES, RECURRENCES, recurrence_of


def uses_next_state(x: Tensor, weight: Tensor, backend: str) -> bool:
    """Whether :func:`next_state` computes a step, as the layer's usual host overhead would exceed its run time."""
    if x.dtype is not weight.dtype or backend != "auto":
        return False
    if x.is_cpu:
        return x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda"):
        return False
    return kernels_on("auto", "cuda") is not None


def next_state(cell: str, candidate: str, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None) -> Tensor:
    """The state after one step, by the fused kernel, or in PyTorch operations if it is traced or differentiated.

    The state before is (B, H) or (1, B, H), as is the result.
    """
    tensors = [y for y in (x, weight, bias, h) if y is not None]
    if is_eager(tensors) and not is_differentiated(tensors) and _is_plain_step(GATES[cell], x, weight, bias, h):
        return _kernel_of(cell, candidate, x, weight)(x, weight, bias, h)
    a, b = RECURRENCES[cell][candidate].function(*F.linear(x, weight, bias).chunk(GATES[cell], -1))
    return b if h is None else torch.addcmul(b, a, h)


def _kernel_of(cell: str, candidate: str, x: Tensor, weight: Tensor) -> Callable[..., Tensor]:
    """The fused kernel of a step of these sizes."""
    recurrence, hidden = recurrence_of(cell, candidate, False), weight.shape[0] // GATES[cell]
    return step_of(recurrence, *x.shape, hidden, x.dtype, x.get_device())


Settings = tuple[str, str, str]
"""The recurrence, candidate and backend of a layer or cell."""


class StepCache:
    """A cache of the kernels of validated steps, for layers or for cells, whose states differ in shape."""

    def __init__(self) -> None:
        self._steps: Prepared[Callable[..., Tensor]] = Prepared()  # by tensors and settings

    def run(self, settings: Settings, x: Any, weight: Tensor, bias: Tensor | None, h: Any) -> Tensor | None:
        """The state after the step if one like it is cached, else None."""
        if torch.is_grad_enabled():
            return None
        step = self._steps.find(*_key(x, weight, bias, h), *settings)
        return None if step is None else step(x, weight, bias, h)

    def add(self, settings: Settings, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None) -> None:
        """Cache a validated step, if there is a kernel for it."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        cell, candidate, _ = settings
        if not _is_plain_step(GATES[cell], x, weight, bias, h):
            return
        self._steps.add(lambda: _kernel_of(cell, candidate, x, weight), *_key(x, weight, bias, h), *settings)


def _key(x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None) -> tuple[tuple[Tensor, ...], bool]:
    """The key of a step besides its settings: its tensors, and whether they lack a state."""
    tensors = (x, weight) if h is None else (x, weight, h)
    return tensors if bias is None else (*tensors, bias), h is None


def _is_plain_step(gates: int, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None) -> bool:
    """Whether shapes, dtypes, devices and layout suit the kernel; all else, errors included, is left to PyTorch."""
    rows = weight.shape[0]
    return (
        x.numel() > 0
        and weight.shape == (rows, x.shape[1])
        and rows % gates == 0
        and (bias is None or bias.shape == (rows,))
        and (h is None or h.numel() == len(x) * rows // gates)
        and all(y is None or (y.dtype is x.dtype and y.device == x.device) for y in (weight, bias, h))
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
    )
