"""The memory in which cuBLAS works, of which every thread has one for each stream."""

import functools

import torch


def keep_workspace(device: torch.device) -> None:
    """Give cuBLAS its memory on the current stream before a capture, whose graph's memory it would be otherwise.

    Graphs that other layers capture later use it, too, and outlive that one.
    """
    if torch.cuda.get_allocator_backend() == "native":  # others have no such memory
        with torch.cuda.use_mem_pool(_workspaces(device)):
            torch.cuda.current_blas_handle()


@functools.cache
def _workspaces(device: torch.device) -> torch.cuda.MemPool:
    """Memory that is nothing else's, even when PyTorch takes it from cuBLAS, as it does before captures of its own."""
    return torch.cuda.MemPool()
