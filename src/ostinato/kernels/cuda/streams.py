"""Kernels beside each other on a GPU that neither fills alone."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda.nvrtc import permitted_in_captures
from ostinato.kernels.cuda.workspaces import keep_workspace


class _Beside(NamedTuple):
    """Of kernels that are launched beside others: where, and where those are."""

    side: torch.cuda.Stream
    current: torch.cuda.Stream
    event: torch.cuda.Event
    used: list[Any]  # their memory, else the others could be given it while they run


class _Thread(threading.local):
    now: _Beside | None = None


_thread = _Thread()


def beside(function: Callable[..., Any], first: tuple, second: tuple) -> tuple[Any, Any]:
    """``function(*first), function(*second)``; kernels that the second launches on :func:`launch_stream` run beside.

    All else, and all memory, stays on the current stream, which waits for those kernels before it goes on.
    """
    device = next(x.device for x in first if isinstance(x, Tensor))
    if device.type != "cuda":
        return function(*first), function(*second)
    current = torch.cuda.current_stream(device)
    (side,), (begin, end) = _streams_beside(device, current.cuda_stream, 2)
    _thread.now = now = _Beside(side, current, begin, [])
    try:
        try:
            results = function(*second)
        finally:
            _thread.now = None
        return function(*first), results
    finally:
        if now.used:
            _pass_on(side, [current], end)


def launch_stream(device: int, memory: Any) -> int:
    """The stream, as the driver's handle, for kernels that use this memory and may run :func:`beside` others.

    They run after what has been launched on the current stream so far.
    """
    now = _thread.now
    if now is None:
        return torch._C._cuda_getCurrentRawStream(device)
    now.used.append(memory)
    _pass_on(now.current, [now.side], now.event)
    return now.side.cuda_stream


def in_wavefront(
    device: torch.device, chains: int, links: int, run: Callable[[int, int], Sequence[Tensor | None]]
) -> None:
    """``run(chain, link)`` for all: after the chain's link before, and after the same link of the chain before.

    So those whose ``chain + link`` is the same, a diagonal, may run at the same time; diagonals are launched in order.
    The kernels of each chain run on a stream of its own, of the first on the current one, which waits for all others
    at the end.  Until then memory that several chains use must not be freed.  ``run`` returns what it has made that is
    used outside of its chain: another thread, with the same current stream, could reuse that memory at once.
    """
    order = [
        (chain, diagonal - chain)
        for diagonal in range(chains + links - 1)
        for chain in reversed(range(max(0, diagonal - links + 1), min(diagonal + 1, chains)))
    ]
    if device.type != "cuda":
        for chain, link in order:
            run(chain, link)
        return
    current = torch.cuda.current_stream(device)
    sides, events = _streams_beside(device, current.cuda_stream, chains)
    streams = [current, *sides]
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            _keep_workspaces(sides, device)
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


def _keep_workspaces(streams: Sequence[torch.cuda.Stream], device: torch.device) -> None:
    """Those of cuBLAS, on streams that a capture will reach."""
    with permitted_in_captures():
        for stream in streams:
            with torch.cuda.stream(stream):
                keep_workspace(device)


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
