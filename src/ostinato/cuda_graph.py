"""A function of GPU tensors as a CUDA graph: a single launch for the host."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")


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
        stream = torch.cuda.current_stream()
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool):
                result = function()
        except Exception:  # a failed capture leaves PyTorch's allocator in capture mode, in which it frees no memory
            torch.cuda.set_stream(stream)
            with suppress(RuntimeError):  # the capture had ended
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
            raise
    return graph.replay, result
