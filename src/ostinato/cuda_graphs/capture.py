"""A function of GPU tensors as a CUDA graph: a single launch for the host."""

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ostinato.kernels.cuda.workspaces import keep_workspace

T = TypeVar("T")
Pool = Any  # PyTorch's handle of the memory of graphs


def capture(
    function: Callable[[], T], device: torch.device | None = None, warm_ups: int = 1
) -> tuple[Callable[[], None], T]:
    """A replay of the function, and what the function returned, whose tensors every replay overwrites.

    The function first runs as it is, since compilation, autotuning and what libraries set up at their first calls
    cannot be captured.  It does so on the current stream: cuBLAS keeps some 64 MB for every other.
    """
    with torch.cuda.device(device):
        for _ in range(warm_ups):
            function()
        torch.cuda.empty_cache()  # a capture that needs memory cannot free any
        device, pool = torch.device("cuda", torch.cuda.current_device()), torch.cuda.graph_pool_handle()
        with captured(device, pool, "functions") as graph:
            result = function()
    return functools.partial(_replay, graph, function), result


def _replay(graph: torch.cuda.CUDAGraph, function: Callable) -> None:
    """Given also the function, which owns what the graph reads, so that both are kept."""
    graph.replay()


@contextmanager
def captured(
    device: torch.device, pool: Pool, what: Literal["calls", "functions"] = "calls"
) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what this thread launches in the block, which must have run before; other threads may go on.

    ``torch.cuda.graph`` would wait for the GPU and free all memory that PyTorch has cached.  Graphs of the same `pool`
    may use each other's results, if they are replayed in the order of their captures.
    """
    graph, stream = torch.cuda.CUDAGraph(), _capture_stream(device, what)
    with (
        _one_capture,
        _without_garbage_collection(),
        _without_copies_of_autocast(),
        torch.cuda.stream(stream),
        torch.autograd.set_multithreading_enabled(False),  # backwards have a thread of their own otherwise
    ):
        keep_workspace(device)
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield graph
            except BaseException:
                with suppress(RuntimeError):  # which would hide the cause
                    graph.capture_end()
                raise
            graph.capture_end()
        except BaseException:
            _leave_capture(pool)
            raise


def bytes_of(pool: Pool, result: Tensor) -> int:
    """The memory that graphs of this pool keep, given a result of the last one.

    Raises RuntimeError if the result lies elsewhere, where other tensors would be given the graph's memory, as might be
    under ``torch.cuda.use_mem_pool``.
    """
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == pool]
    address = result.data_ptr()
    if not any(0 <= address - segment["address"] < segment["total_size"] for segment in segments):
        raise RuntimeError("the memory of a captured graph is not its own")
    return sum(segment["total_size"] for segment in segments)


_one_capture = threading.Lock()  # at a time, as all have one stream


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Which could free what cannot be freed in a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _without_copies_of_autocast() -> Iterator[None]:
    """Of weights, which it makes once and frees at its end: graphs would go on reading them."""
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(keeps)


@functools.cache
def _capture_stream(device: torch.device, what: str) -> torch.cuda.Stream:
    """One for all captures of calls, as cuBLAS keeps some 64 MB for every stream.

    Another for functions, which may be replayed while calls are.
    """
    return torch.cuda.Stream(device)


def _leave_capture(pool: Pool) -> None:
    """After a failed capture, which leaves PyTorch in one: its allocator frees nothing, and its generator raises."""
    with suppress(RuntimeError):  # the capture had ended
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    with suppress(RuntimeError):  # the GPU has failed
        graph, x = torch.cuda.CUDAGraph(), torch.empty(1, device="cuda")
        graph.capture_begin(capture_error_mode="thread_local")
        x.zero_()  # an empty capture is warned of
        graph.capture_end()
