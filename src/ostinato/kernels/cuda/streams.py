"""Concurrent kernels: work that does not fill a GPU alone is spread over several streams."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda.nvrtc import permitted_in_captures
from ostinato.kernels.cuda.workspaces import keep_workspace


class _Overlap(NamedTuple):
    """The streams of a call of :func:`beside`, and what its second function uses on the side stream."""

    side: torch.cuda.Stream
    current: torch.cuda.Stream
    event: torch.cuda.Event
    memory: list[Any]  # kept alive: the allocator could give it to kernels on the current stream, which run meanwhile


class _Thread(threading.local):
    overlap: _Overlap | None = None  # while the second function of `beside` runs


_thread = _Thread()


def beside(function: Callable[..., Any], first: tuple, second: tuple) -> tuple[Any, Any]:
    """``function(*first), function(*second)``, whose kernels may overlap.

    Those of the second call that are launched on :func:`launch_stream` run on a side stream.  All other kernels, and
    all memory, stay on the current stream, which waits for the side stream at the end.
    """
    device = next(x.device for x in first if isinstance(x, Tensor))
    if device.type != "cuda":
        return function(*first), function(*second)
    current = torch.cuda.current_stream(device)
    (side,), (begin, end) = _streams_beside(device, current.cuda_stream, 2)
    _thread.overlap = overlap = _Overlap(side, current, begin, [])
    try:
        try:
            results = function(*second)
        finally:
            _thread.overlap = None
        return function(*first), results
    finally:
        if overlap.memory:
            _make_wait([current], side, end)


def launch_stream(device: int, memory: Any) -> int:
    """The handle of the stream for kernels that use this memory and may run :func:`beside` others.

    They run after all that has been launched on the current stream so far.
    """
    overlap = _thread.overlap
    if overlap is None:
        return torch._C._cuda_getCurrentRawStream(device)
    overlap.memory.append(memory)
    _make_wait([overlap.side], overlap.current, overlap.event)
    return overlap.side.cuda_stream


def in_wavefront(
    device: torch.device, chains: int, links: int, run: Callable[[int, int], Sequence[Tensor | None]]
) -> None:
    """Call ``run(chain, link)`` for all links of all chains by diagonals, whose kernels may run concurrently.

    Link n of a chain depends on its link n - 1, and on link n of the chain before it; so the links of a diagonal, where
    ``chain + link`` is the same, are independent.  Each chain has a stream of its own, the first one the current
    stream, which waits for all others at the end.  Until then memory that several chains use must not be freed.
    ``run`` returns the tensors it has allocated that are used outside of its chain: another thread, with the same
    current stream, could reuse their memory at once.
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
            _make_wait(sides, current, events[0])
            for chain, link in order:
                torch.cuda.set_stream(streams[chain])  # a context manager costs the host as much as a launch
                if chain:  # the chain before has launched this link, and nothing after it yet
                    _make_wait([streams[chain]], streams[chain - 1], events[chain - 1])
                for x in run(chain, link):
                    if chain and x is not None:
                        x.record_stream(current)
        finally:
            torch.cuda.set_stream(current)
            for side, event in zip(sides, events[1:], strict=True):
                _make_wait([current], side, event)


def _keep_workspaces(streams: Sequence[torch.cuda.Stream], device: torch.device) -> None:
    """Allocate cuBLAS's workspaces for streams that are about to join a capture."""
    with permitted_in_captures():
        for stream in streams:
            with torch.cuda.stream(stream):
                keep_workspace(device)


def _make_wait(waiting: Sequence[torch.cuda.Stream], stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
    """Make other streams wait for all that has been launched on a stream so far."""
    event.record(stream)
    for other in waiting:
        other.wait_event(event)


@functools.cache
def _streams_beside(
    device: torch.device, stream: int, chains: int
) -> tuple[list[torch.cuda.Stream], list[torch.cuda.Event]]:
    """The streams of all chains but the first, and an event for each chain.

    Each current stream has streams and events of its own, as it may be under capture.
    """
    return [torch.cuda.Stream(device) for _ in range(chains - 1)], [torch.cuda.Event() for _ in range(chains)]
