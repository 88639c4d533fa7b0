"""The workspaces of cuBLAS: PyTorch allocates one for each thread and stream, when it is first needed."""

import functools

import torch


def keep_workspace(device: torch.device) -> None:
    """Allocate cuBLAS's workspace for the current stream before a capture.

    A capture would allocate it in the memory pool of its graph.  Graphs that other layers capture later use the same
    workspace, and may outlive that graph.
    """
    if torch.cuda.get_allocator_backend() == "native":  # others have no memory pools
        with torch.cuda.use_mem_pool(_workspaces(device)):
            torch.cuda.current_blas_handle()


@functools.cache
def _workspaces(device: torch.device) -> torch.cuda.MemPool:
    """A pool of the workspaces alone, so that nothing else gets their memory when PyTorch frees them.

    It frees them before its own captures, while graphs may still use them.
    """
    return torch.cuda.MemPool()
