"""Kernels beside each other on a GPU that neither fills alone."""

import functools
import threading
from collections.abc import Callable, Sequence
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


def in_waves(device: torch.device, chains: int, links: int, run: Callable[[int, int], Sequence[Tensor | None]]) -> None:
    """``run(chain, link)`` for all: after the chain's link before, and after the same link of the chain before.

    The kernels of each chain run on a stream of its own, of the first on the current one, which waits for all others
    at the end.  Until then memory that several chains use must not be freed.  ``run`` returns what it has made that is
    used outside of its chain: another thread, with the same current stream, could reuse that memory at once.
    """
    order = [
        (chain, wave - chain)
        for wave in range(chains + links - 1)
        for chain in reversed(range(max(0, wave - links + 1), min(wave + 1, chains)))
    ]
    if device.type != "cuda":
        for chain, link in order:
            run(chain, link)
        return
    current = torch.cuda.current_stream(device)
    sides, events = _streams_beside(device, current.cuda_stream, chains)
    streams = [current, *sides]
    with torch.cuda.device(device):
        try:
            _pass_on(current, sides, events[0])
            for chain, link in order:
                torch.cuda.set_stream(streams[chain])  # a context manager costs the host as much as a launch
                if chain:  # the chain before has not been given its next link yet
                    _pass_on(streams[chain - 1], [streams[chain]], events[chain - 1])
                for x in run(chain, link):
                    if chain and x is not None:
                        x.record_stream(current)
        finally:
            torch.cuda.set_stream(current)
            for side, event in zip(sides, events[1:], strict=True):
                _pass_on(side, [current], event)


def _pass_on(stream: torch.cuda.Stream, others: Sequence[torch.cuda.Stream], event: torch.cuda.Event) -> None:
    """Let others wait for what a stream has been given so far."""
    event.record(stream)
    for other in others:
        other.wait_event(event)


@functools.cache
def _streams_beside(
    device: torch.device, stream: int, chains: int
) -> tuple[list[torch.cuda.Stream], list[torch.cuda.Event]]:
    """Those of all chains but the first, and an event of each, for one current stream alone: it may be captured."""
    return [torch.cuda.Stream(device) for _ in range(chains - 1)], [torch.cuda.Event() for _ in range(chains)]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
