"""Threads for CPU loops: PyTorch's OpenMP team if available, else a pool of our own.

Numba's threads are not used, as they abort the process if two Python threads use them at once.
"""

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

PARALLEL = 1 << 15  # loop iterations from which threads pay off


def threads_for(iterations: int) -> int:
    """The number of threads to run a loop of so many iterations with."""
    return torch.get_num_threads() if iterations >= PARALLEL else 1


def run_loop(loop: Any, work: ctypes.Structure, threads: int) -> None:
    """Run a loop in the caller's thread and in others, which take part for as long as tasks are left."""
    address, threads = ctypes.addressof(work), min(threads, work.tasks)
    openmp = _openmp_parallel()
    if threads <= 1:
        loop.ctypes(address)
    elif openmp is not None:
        openmp(loop.address, address, torch.get_num_threads(), 0)  # always the whole team, as resizing it is slow
    else:
        helpers = [_helpers().submit(loop.ctypes, address) for _ in range(threads - 1)]
        try:
            loop.ctypes(address)
        finally:  # no helper may be left writing to memory that is about to be freed
            wait([helper for helper in helpers if not helper.cancel()])


@functools.cache
def _openmp_parallel() -> Any:
    """``GOMP_parallel``, which calls a function in every thread of the caller's OpenMP team; None if not available.

    PyTorch's threads are that team.  After a PyTorch operation they spin for some milliseconds, so they start at once,
    whereas threads of our own would wait for the processors that these occupy.
    """
    if _forked:
        return None
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, TypeError):
        return None
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return function


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "ostinato")


_forked = False


def _after_fork() -> None:
    """Forget all threads, as none survive a fork: OpenMP would wait for its own forever."""
    global _forked
    _forked = True
    _helpers.cache_clear()
    _openmp_parallel.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
