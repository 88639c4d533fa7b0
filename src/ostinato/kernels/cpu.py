"""The CPU backend: tensors in and out around the loops of :mod:`~ostinato.kernels.cpu_loops`.

The threads of a loop are PyTorch's where they can be had, else our own.  Numba's are no choice: they abort the
process when two Python threads use them at once.
"""

import ctypes
import functools
import math
import mmap
import os
import platform
import sys
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels import GATES, cpu_loops

PARALLEL = 1 << 15  # loop iterations that are worth waking threads for
SCAN_WIDTH = 1024  # channels a piece has at least: a scan moves memory, fastest in long rows
LAYER_WIDTH = 32
LAYER_GROUPS = 16  # groups of sequences, each of which sums its bias gradient alone, whatever the threads
LARGE = 4 << 20  # bytes from which on memory is kept for reuse
STREAMED = 32 << 20  # bytes from which on a scan's result does not stay in the caches until it is read
GEMM_ROWS = 128  # rows from which on a convolution's overhead is made up for

NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def linear_scan(
    a: Tensor, b: Tensor, h0: Tensor | None, reverse: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _scan(False, a, b, h0, reverse, cu_seqlens)


def linear_scan_backward(
    a: Tensor,
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    return _scan_backward(False, a, a, h, h0, grad_h, grad_h_last, reverse, cu_seqlens)


def log_linear_scan(
    log_a: Tensor, log_b: Tensor, log_h0: Tensor | None, reverse: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _scan(True, log_a, log_b, log_h0, reverse, cu_seqlens)


def log_linear_scan_backward(
    log_a: Tensor,
    log_b: Tensor,
    log_h: Tensor,
    log_h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    return _scan_backward(True, log_a, log_b, log_h, log_h0, grad_h, grad_h_last, reverse, cu_seqlens)


def minimal(
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    offsets: Tensor | None,
    cell: str,
    candidate: str,
    batch_first: bool,
    directions: int,
) -> tuple[Tensor, Tensor]:
    dtype = _compute_dtype(pre)
    batch, hidden = _layer_sizes(pre, offsets, cell, batch_first, directions)
    h = _empty((*pre.shape[:-1], directions * hidden), dtype)
    state = _state(h0, (directions, batch, hidden), dtype)
    loop = cpu_loops.layer(NUMPY_DTYPES[dtype], cell, candidate)
    _run_layer(loop, pre, bias, offsets, batch_first, state, out=h)
    return h.to(pre.dtype), state.to(pre.dtype)


def minimal_backward(
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    h: Tensor,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    offsets: Tensor | None,
    cell: str,
    candidate: str,
    batch_first: bool,
    directions: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dtype = _compute_dtype(pre)
    batch, hidden = _layer_sizes(pre, offsets, cell, batch_first, directions)
    state = _state(grad_h_last, (directions, batch, hidden), dtype)
    grad_pre = _empty(pre.shape, dtype)
    sums = pre.new_zeros(_layer_groups(batch), pre.shape[-1], dtype=dtype)
    totals = torch.zeros_like(sums, dtype=torch.float64)
    _run_layer(
        cpu_loops.layer_backward(NUMPY_DTYPES[dtype], cell, candidate),
        pre,
        bias,
        offsets,
        batch_first,
        state,
        h=h.to(dtype).contiguous(),
        h0=pre.new_zeros(hidden, dtype=dtype) if h0 is None else h0.to(dtype).contiguous(),
        h0_b=0 if h0 is None else hidden,
        grad_h=pre.new_zeros(directions * hidden, dtype=dtype) if grad_h is None else grad_h.to(dtype).contiguous(),
        grad_row=0 if grad_h is None else directions * hidden,
        grad_pre=grad_pre,
        sums=sums,
        totals=totals,
    )
    grad_bias = None if bias is None else totals.sum(0).to(bias.dtype)
    return grad_pre.to(pre.dtype), grad_bias, None if h0 is None else state.to(h0.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)`` and its gradients, on AMD's processors as a convolution.

    PyTorch multiplies matrices by MKL, which leaves half of an AMD processor idle, and convolves by oneDNN, which
    does not (with one thread it takes MKL there too).  A 1x1 convolution along one line of pixels, channels last,
    is the same product of the same memory.
    """
    rows, width = x.shape[:-1].numel(), weight.shape[0]
    if (
        not x.dtype == weight.dtype == torch.float32
        or not GEMM_ROWS <= rows <= 2**31 // max(width, x.shape[-1])  # oneDNN counts some elements in 32 bits
        or torch.is_autocast_enabled("cpu")
        or not torch.backends.mkldnn.enabled
        or not _is_amd()
    ):
        return F.linear(x, weight, bias)
    pixels = x.reshape(1, 1, rows, x.shape[-1]).permute(0, 3, 1, 2)
    product = F.conv2d(pixels, weight[:, :, None, None], bias)
    return product.permute(0, 2, 3, 1).reshape(*x.shape[:-1], width).contiguous()


@functools.cache
def _is_amd() -> bool:
    try:
        name = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        name = platform.processor()
    return "AuthenticAMD" in name


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, neighbouring channels side by side."""
    x = x.to(dtype)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _state(initial: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, absent: float = 0.0) -> Tensor:
    """What a loop's state starts from, in memory of its own."""
    if initial is None:
        return torch.full(shape, absent, dtype=dtype, device="cpu")
    return initial.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _constant(value: float, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that is the same everywhere, of which only one row exists."""
    return torch.full(shape[-1:], value, dtype=dtype, device="cpu").expand(shape)


def _empty(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor; a large one in a block of memory kept from an earlier one, if there is one that fits.

    The C library returns large blocks to the system as soon as they are freed, and to get the pages anew takes
    several times as long as the scan that fills them.  The kernel may have the blocks kept here whenever it is
    short of memory; new ones are made of huge pages.
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < LARGE or sys.platform != "linux":
        return torch.empty(shape, dtype=dtype, device="cpu")
    block = _take_block(size)
    if block is None:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(block, NUMPY_DTYPES[dtype], count)
    weakref.finalize(array, _keep_block, block)  # when the last tensor over it is gone
    return torch.from_numpy(array).view(shape)


_kept: deque[mmap.mmap] = deque(maxlen=16)


def _take_block(size: int) -> mmap.mmap | None:
    for _ in range(len(_kept)):  # each operation is atomic, so no lock is needed, which a finalizer must not wait for
        try:
            block = _kept.popleft()
        except IndexError:
            break
        if size <= len(block) <= 2 * size:
            return block
        _kept.append(block)
    return None


def _keep_block(block: mmap.mmap) -> None:
    with suppress(OSError):  # a kernel that does not know how
        block.madvise(mmap.MADV_FREE)
    _kept.append(block)


def _state_shape(x: Tensor, cu_seqlens: Tensor | None) -> tuple[int, int]:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, x.shape[2]


def _scan(
    log: bool, a: Tensor, b: Tensor, h0: Tensor | None, reverse: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = _compute_dtype(b)
    state = _state(h0, _state_shape(b, cu_seqlens), torch.float64, -math.inf if log else 0.0)
    out = _empty(b.shape, dtype)
    loop = cpu_loops.scan(NUMPY_DTYPES[dtype], log)
    _run_scan(loop, reverse, cu_seqlens, state, a=_rows(a, dtype), b=_rows(b, dtype), out=out)
    return out.to(b.dtype), state.to(b.dtype)


def _scan_backward(
    log: bool,
    a: Tensor,
    b: Tensor,
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    dtype = _compute_dtype(a)
    state_shape = _state_shape(a, cu_seqlens)
    state = _state(grad_h_last, state_shape, torch.float64)
    grad_a, grad_b = _empty(a.shape, dtype), _empty(a.shape, dtype)
    _run_scan(
        cpu_loops.scan_backward(NUMPY_DTYPES[dtype], log),
        reverse,
        cu_seqlens,
        state,
        a=_rows(a, dtype),
        b=_rows(b, dtype),
        h=_rows(h, dtype),
        h0=_constant(-math.inf if log else 0.0, state_shape, dtype) if h0 is None else _rows(h0, dtype),
        grad_h=_constant(0.0, a.shape, dtype) if grad_h is None else _rows(grad_h, dtype),
        grad_a=grad_a,
        grad_b=grad_b,
    )
    return grad_a.to(a.dtype), grad_b.to(a.dtype), None if h0 is None else state.to(h0.dtype)


def _run_scan(loop: Any, reverse: bool, cu_seqlens: Tensor | None, state: Tensor, **arrays: Tensor) -> None:
    """Call the loop with (B, T, D) arrays and h0, which is (N, D) like the state."""
    packed = cu_seqlens is not None
    bounds = cu_seqlens.to(torch.int64).contiguous() if cu_seqlens is not None else None
    a = arrays["a"]
    sequences, channels = state.shape
    threads = threads_for(a.numel())
    parts = min(sequences, 4 * threads)
    blocks, width = _blocks(channels, SCAN_WIDTH, threads, parts)
    fields = {}
    for name, x in arrays.items():
        fields[name] = x.data_ptr()
        fields[f"{name}_n"] = x.stride(0) if x.dim() == 2 or not packed else 0
        if x.dim() == 3:
            fields[f"{name}_t"] = x.stride(1)
    results = {name: x for name, x in arrays.items() if name in ("out", "grad_a", "grad_b")}
    rows = {}
    if all(_worth_streaming(x) for x in results.values()):
        rows = {f"{name}_row": x.new_empty(state.shape) for name, x in results.items()}
    work = cpu_loops.ScanWork(
        pieces=parts * blocks,
        parts=parts,
        width=width,
        sequences=sequences,
        length=a.shape[1],
        channels=channels,
        bounds=0 if bounds is None else bounds.data_ptr(),
        reverse=reverse,
        state=state.data_ptr(),
        **fields,
        **{name: row.data_ptr() for name, row in rows.items()},
    )
    run_loop(loop, work, threads)


def _worth_streaming(result: Tensor) -> bool:
    """Whether it is large and its rows consist of whole cache lines."""
    aligned = result.data_ptr() % cpu_loops.LINE == result.shape[-1] * result.itemsize % cpu_loops.LINE == 0
    return aligned and result.nbytes >= STREAMED


def _layer_sizes(pre: Tensor, offsets: Tensor | None, cell: str, batch_first: bool, directions: int) -> tuple[int, int]:
    """Sequences and hidden units."""
    batch = pre.shape[0 if batch_first else 1] if offsets is None else int(offsets[1] - offsets[0])
    return batch, pre.shape[-1] // (directions * GATES[cell])


def _layer_groups(batch: int) -> int:
    return min(batch, LAYER_GROUPS)


def _run_layer(
    loop: Any,
    pre: Tensor,
    bias: Tensor | None,
    offsets: Tensor | None,
    batch_first: bool,
    state: Tensor,
    **fields: Tensor | int,
) -> None:
    """Call the loop; `fields` are what only one of the two directions of time has."""
    directions, batch, hidden = state.shape
    if offsets is not None:
        offsets = offsets.to(torch.int64).contiguous()
        length = offsets.shape[0] - 1
    else:
        length = pre.shape[1 if batch_first else 0]
    by_sequence = batch_first and offsets is None
    fields["pre"] = pre.to(state.dtype).contiguous()
    fields["bias"] = (
        pre.new_zeros(pre.shape[-1], dtype=state.dtype) if bias is None else bias.to(state.dtype).contiguous()
    )
    threads = threads_for(pre.numel())
    groups = _layer_groups(batch)
    blocks, width = _blocks(hidden, LAYER_WIDTH, threads, directions * groups)
    work = cpu_loops.LayerWork(
        pieces=directions * groups * blocks,
        groups=groups,
        together=1 if by_sequence else batch,
        width=width,
        directions=directions,
        batch=batch,
        length=length,
        hidden=hidden,
        offsets=0 if offsets is None else offsets.data_ptr(),
        row_t=1 if by_sequence else batch,
        row_b=length if by_sequence else 1,
        state=state.data_ptr(),
        **{name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in fields.items()},
    )
    run_loop(loop, work, threads)


def threads_for(iterations: int) -> int:
    return torch.get_num_threads() if iterations >= PARALLEL else 1


def _blocks(channels: int, narrowest: int, threads: int, parts: int) -> tuple[int, int]:
    """Into how many blocks of channels to cut each of `parts`, that threads be busy to the end; and their width."""
    blocks = threads // math.gcd(parts, threads) if parts < 4 * threads else 1
    blocks = max(1, min(blocks, channels // narrowest))
    width = max(16, -(-channels // (16 * blocks)) * 16)  # whole cache lines, so that no two threads write to one
    return -(-channels // width), width


def run_loop(loop: Any, work: ctypes.Structure, threads: int) -> None:
    """Call the loop in the caller's thread, and in others that join for as long as there are pieces left."""
    address, threads = ctypes.addressof(work), min(threads, work.pieces)
    openmp = _openmp_parallel()
    if threads <= 1:
        loop.ctypes(address)
    elif openmp is not None:
        openmp(loop.address, address, torch.get_num_threads(), 0)  # always the whole team: resizing it is slow
    else:
        helpers = [_helpers().submit(loop.ctypes, address) for _ in range(threads - 1)]
        try:
            loop.ctypes(address)
        finally:  # no helper may be left writing to memory that is about to be freed
            wait([helper for helper in helpers if not helper.cancel()])


@functools.cache
def _openmp_parallel() -> Any:
    """GCC's entry to OpenMP, which calls a function in every thread of the caller's team; None where there is none.

    PyTorch's threads are that team.  After one of its operations they spin for some milliseconds, so they start at
    once, where threads of our own would wait for the processors that they occupy.
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
    """No thread survives a fork, and OpenMP would wait for its own for ever."""
    global _forked
    _forked = True
    _helpers.cache_clear()
    _openmp_parallel.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
