"""Which module of this package computes a recurrence."""

import functools
import importlib
from types import ModuleType

from ostinato.kernels.scan import choose_backend
from ostinato.kernels.scan.torch_ops import TorchBackend


@functools.cache
def kernels_on(backend: str, device_type: str, family: str = "linear") -> ModuleType | None:
    """The module with the backend's kernels, of non-empty inputs; None for one that consists of PyTorch operations.

    ``cpu.py`` or ``cuda.py`` of the family of recurrences, "linear" or "nonlinear".
    """
    if isinstance(choose_backend(backend, device_type), TorchBackend):
        return None
    return importlib.import_module(f"{__package__}.{family}.{device_type}")
