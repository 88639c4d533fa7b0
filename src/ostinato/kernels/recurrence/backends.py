"""Which module of this package computes a recurrence."""

import functools
import importlib
from typing import Any

from ostinato.kernels.scan import choose_backend
from ostinato.kernels.scan.torch_ops import TorchBackend


@functools.cache
def kernels_on(backend: str, device_type: str, prefix: str = "") -> Any:
    """The module with the backend's kernels, of non-empty inputs; None for one that consists of PyTorch operations.

    ``cpu.py`` or ``cuda.py``; of recurrences that are not linear, with the prefix "steps_".
    """
    if isinstance(choose_backend(backend, device_type), TorchBackend):
        return None
    return importlib.import_module(f"{__package__}.{prefix}{device_type}")
