"""Captures functions of GPU tensors as CUDA graphs, which the host launches as a whole."""

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
Pool = Any  # PyTorch's handle of a memory pool of graphs


def capture(
    function: Callable[[], T], device: torch.device | None = None, warm_ups: int = 1
) -> tuple[Callable[[], None], T]:
    """Capture the function: returns a replay, and the function's result, whose tensors every replay overwrites.

    The function first runs uncaptured, `warm_ups` times, since compilation, autotuning and what libraries set up in
    their first calls cannot be captured.  These runs are on the current stream, as cuBLAS keeps a workspace of some
    64 MB for every other one.
    """
    with torch.cuda.device(device):
        for _ in range(warm_ups):
            function()
        torch.cuda.empty_cache()  # a capture that runs out of memory cannot free any
        device, pool = torch.device("cuda", torch.cuda.current_device()), torch.cuda.graph_pool_handle()
        with captured(device, pool, "functions") as graph:
            result = function()
    return functools.partial(_replay, graph, function), result


def _replay(graph: torch.cuda.CUDAGraph, function: Callable) -> None:
    """Replay the graph; the function is an argument because it owns what the graph reads, and must live as long."""
    graph.replay()


@contextmanager
def captured(
    device: torch.device, pool: Pool, kind: Literal["calls", "functions"] = "calls"
) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what this thread launches in the block, which must have run before; other threads may go on launching.

    Unlike ``torch.cuda.graph``, it neither waits for the GPU nor frees the memory that PyTorch has cached.  Graphs of
    the same `pool` may use each other's results, if they are replayed in the order of their captures.
    """
    graph, stream = torch.cuda.CUDAGraph(), _capture_stream(device, kind)
    with (
        _one_capture,
        _without_garbage_collection(),
        _without_autocast_cache(),
        torch.cuda.stream(stream),
        torch.autograd.set_multithreading_enabled(False),  # otherwise the backward runs in another thread
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
    """The bytes of memory that the graphs of this pool keep, given a result of the last one.

    Raises RuntimeError if the result is not in the pool, as may happen under ``torch.cuda.use_mem_pool``: other tensors
    would then be given the graph's memory.
    """
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] == pool]
    address = result.data_ptr()
    if not any(0 <= address - segment["address"] < segment["total_size"] for segment in segments):
        raise RuntimeError("the memory of a captured graph is not its own")
    return sum(segment["total_size"] for segment in segments)


_one_capture = threading.Lock()  # captures run one at a time, as they share streams


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, which could free what must not be freed during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Disable autocast's cache of converted weights, which it frees when it ends: graphs would go on reading them."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@functools.cache
def _capture_stream(device: torch.device, kind: str) -> torch.cuda.Stream:
    """One stream for all captures of calls, as cuBLAS keeps a workspace of some 64 MB for every stream.

    Captures of functions have another, as they may be replayed while calls are.
    """
    return torch.cuda.Stream(device)


def _leave_capture(pool: Pool) -> None:
    """End a failed capture for PyTorch, too: until then its allocator frees nothing, and its generator raises."""
    with suppress(RuntimeError):  # the capture had ended
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
    with suppress(RuntimeError):  # the GPU has failed
        graph, x = torch.cuda.CUDAGraph(), torch.empty(1, device="cuda")
        graph.capture_begin(capture_error_mode="thread_local")
        x.zero_()  # PyTorch warns of an empty capture
        graph.capture_end()
