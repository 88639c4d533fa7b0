"""Kernels beside each other on a GPU that neither fills alone."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Thread(threading.local):
    side: torch.cuda.Stream | None = None  # on which kernels are launched now
    used: list[Any] | None = None  # the memory of those that were


_thread = _Thread()


def beside(function: Callable[..., Any], first: tuple, second: tuple) -> tuple[Any, Any]:
    """``function(*first), function(*second)``; kernels that the second launches on :func:`launch_stream` run beside.

    All else, and all memory, stays on the current stream, which waits for those kernels before it goes on.
    """
    device = next(x.device for x in first if isinstance(x, Tensor))
    if device.type != "cuda":
        return function(*first), function(*second)
    side = _side_stream(device)
    used: list[Any] = []
    _thread.side, _thread.used = side, used
    try:
        try:
            results = function(*second)
        finally:
            _thread.side = _thread.used = None
        return function(*first), results
    finally:
        if used:
            torch.cuda.current_stream(device).wait_stream(side)


def launch_stream(device: int, memory: Any) -> int:
    """The stream, as the driver's handle, for kernels that use this memory and may run :func:`beside` others.

    They run after what has been launched on the current stream so far.
    """
    side, used = _thread.side, _thread.used
    if side is None or used is None:
        return torch._C._cuda_getCurrentRawStream(device)
    used.append(memory)  # else the first function could be given it while they run
    side.wait_stream(torch.cuda.current_stream(device))
    return side.cuda_stream


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
