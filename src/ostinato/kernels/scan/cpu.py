"""The CPU backend: lays tensors out for the loops of ``cpu_loops.py`` and ``cpu_narrow.py``, and splits their work."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.cpu.intrinsics import LINE, NUMPY_DTYPES
from ostinato.kernels.cpu.memory import empty_like
from ostinato.kernels.cpu.threads import run_loop, threads_for
from ostinato.kernels.cpu.transpose import is_transposable, transposed
from ostinato.kernels.scan import Gradients, Order, cpu_loops, cpu_narrow

SCAN_WIDTH = 1024  # the fewest channels of a task: scans are bound by memory, which is fastest in long rows
WIDE = 32  # channels from which on each part of a log-space step has a loop of its own
NARROW = 3  # the most channels that a linear scan processes one at a time: more fill vector registers
NARROW_APART = 64  # the same for time-contiguous tensors, which would be copied otherwise
TURNS = 16  # channels, of one sequence or several, that a task then interleaves: a cache line of channels
STREAMED = 32 << 20  # bytes from which on a result bypasses the caches, which it would leave before it is read


def states_like(x: Tensor, _order: Order) -> Tensor:
    return x.new_empty(x.shape)


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
    if b.shape[1] == 1 and order.is_plain and b.dtype in NUMPY_DTYPES:
        h = b.clone(memory_format=torch.contiguous_format) if h0 is None else torch.addcmul(b, a, h0[:, None])
        return h, h[:, 0].clone()  # for a single step, faster than calling a loop
    return _scan(False, a, b, h0, order)


def prepare_linear_scan(a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> Callable:
    """A fast path of :func:`linear_scan` for tensors of the same layouts, in a plain order."""
    if b.shape[1] == 1 and h0 is None and b.is_contiguous() and b.dtype in NUMPY_DTYPES:
        return lambda a, b, *_: (b.clone(), b.squeeze(1).clone())
    return lambda a, b, h0, *_: linear_scan(a, b, h0, order)


def linear_scan_backward(
    a: Tensor, h: Tensor, h0: Tensor | None, grad_h: Tensor | None, grad_h_last: Tensor | None, order: Order
) -> Gradients:
    return _scan_backward(False, a, a, h, h0, grad_h, grad_h_last, order)


def log_linear_scan(a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
    return _scan(True, a, b, h0, order)


def log_linear_scan_backward(
    a: Tensor, b: Tensor, h: Tensor, h0: Tensor | None, grad_h: Tensor | None, grad_h_last: Tensor | None, order: Order
) -> Gradients:
    return _scan_backward(True, a, b, h, h0, grad_h, grad_h_last, order)


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)  # even a `to` that changes nothing costs as much as a short scan


def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype, with contiguous channels; copied only where necessary."""
    x = as_dtype(x, dtype)
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    return transposed(x) if is_transposable(x) else x.contiguous()


def initial_state(initial: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, absent: float = 0.0) -> Tensor:
    """A new contiguous tensor with the initial state of a loop, filled with `absent` if there is none."""
    if initial is None:
        return torch.full(shape, absent, dtype=dtype, device="cpu")
    return initial.to(dtype, copy=True, memory_format=torch.contiguous_format)


def constant(value: float, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor filled with `value`: a single row in memory, expanded to the shape."""
    return torch.full(shape[-1:], value, dtype=dtype, device="cpu").expand(shape)


def _scan(log: bool, a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(b)
    state = initial_state(h0, (order.sequences(b), b.shape[2]), torch.float64, -math.inf if log else 0.0)
    out = empty_like(b, dtype)
    narrow = not log and _is_narrow(order, a, b)
    if narrow:
        loop, laid_out = cpu_narrow.scan(NUMPY_DTYPES[dtype]), as_dtype
    else:
        loop, laid_out = cpu_loops.scan(NUMPY_DTYPES[dtype], log, _is_split(log, b, dtype)), rows
    _run_scan(loop, narrow, order, state, a=laid_out(a, dtype), b=laid_out(b, dtype), out=out)
    return as_dtype(out, b.dtype), as_dtype(state, b.dtype)


def _scan_backward(
    log: bool,
    a: Tensor,
    b: Tensor,
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    order: Order,
) -> Gradients:
    dtype, state_shape = compute_dtype(a), (order.sequences(a), a.shape[2])
    state = initial_state(grad_h_last, state_shape, torch.float64)
    absent = constant(-math.inf if log else 0.0, state_shape, dtype)
    grad_a, grad_b = empty_like(a, dtype), empty_like(a, dtype)
    grad_h = constant(0.0, a.shape, dtype) if grad_h is None else grad_h
    narrow = not log and _is_narrow(order, a, grad_h)
    if narrow:
        loop, laid_out = cpu_narrow.scan_backward(NUMPY_DTYPES[dtype]), as_dtype
    else:
        loop, laid_out = cpu_loops.scan_backward(NUMPY_DTYPES[dtype], log, _is_split(log, a, dtype)), rows
    _run_scan(
        loop,
        narrow,
        order,
        state,
        a=laid_out(a, dtype),
        b=laid_out(b, dtype),
        h=laid_out(h, dtype),
        h0=absent if h0 is None else rows(h0, dtype),
        absent=absent,
        grad_h=laid_out(grad_h, dtype),
        grad_a=grad_a,
        grad_b=grad_b,
    )
    return as_dtype(grad_a, a.dtype), as_dtype(grad_b, a.dtype), None if h0 is None else state.to(h0.dtype)


def _is_split(log: bool, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether each part of a step has a loop of its own over the channels."""
    return log and dtype is torch.float32 and x.shape[2] >= WIDE


def _is_narrow(order: Order, x: Tensor, y: Tensor) -> bool:
    """Whether to process one channel at a time: few of many steps, or more where an input is time-contiguous."""
    batch, length, channels = x.shape
    if channels <= NARROW:
        return 4 * channels * order.sequences(x) <= batch * length  # with fewer steps, it costs more than it saves
    return channels <= NARROW_APART and (x.stride(1) == 1 < x.stride(2) or y.stride(1) == 1 < y.stride(2))


def _run_scan(loop: Any, narrow: bool, order: Order, state: Tensor, **arrays: Tensor) -> None:
    """Call the loop with its arrays: those over time are (B, T, D), `h0` and `absent` (N, D) like the state."""
    a, (cu_seqlens, resets, reverse) = arrays["a"], order
    strides = tuple([x.stride() for x in arrays.values()])
    mask_strides = None if resets is None else resets.stride()
    key = state.shape, a.shape[1], tuple(arrays), strides, mask_strides, cu_seqlens is not None, reverse, narrow
    threads = threads_for(a.numel())
    work = cpu_loops.ScanWork.from_buffer_copy(_work_without_addresses(*key, threads))
    work.state = state.data_ptr()
    for name, x in arrays.items():
        setattr(work, name, x.data_ptr())
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(torch.int64).contiguous()
        work.bounds = bounds.data_ptr()
    if resets is not None:
        work.resets = resets.data_ptr()
    if a.nbytes >= STREAMED and not narrow:
        results = {name: x for name, x in arrays.items() if name in ("out", "grad_a", "grad_b")}
        buffers = {name: x.new_empty(state.shape) for name, x in results.items() if _has_whole_lines(x)}
        if len(buffers) == len(results):
            for name, buffer in buffers.items():
                setattr(work, f"{name}_row", buffer.data_ptr())
    run_loop(loop, work, threads)


@functools.lru_cache(maxsize=4096)
def _work_without_addresses(
    shape: torch.Size,
    length: int,
    names: tuple[str, ...],
    strides: tuple[tuple[int, ...], ...],
    mask_strides: tuple[int, ...] | None,
    packed: bool,
    reverse: bool,
    narrow: bool,
    threads: int,
) -> cpu_loops.ScanWork:
    """The argument of a loop, without addresses: `shape` is the state's, `strides` are those of the arrays `names`."""
    sequences, channels = shape
    if narrow:
        width = min(channels, TURNS)
        parts, blocks = max(min(sequences, threads), sequences * width // TURNS), -(-channels // width)
    else:
        parts = min(sequences, 4 * threads)
        blocks, width = blocks_of(channels, SCAN_WIDTH, threads, parts)
    fields = {}
    for name, stride in zip(names, strides, strict=True):
        fields[f"{name}_n"] = stride[0] if len(stride) == 2 or not packed else 0
        if len(stride) == 3:
            fields |= {f"{name}_t": stride[1], f"{name}_d": stride[2]}
    if mask_strides is not None:
        fields |= {"resets_n": 0 if packed else mask_strides[0], "resets_t": mask_strides[1]}
    return cpu_loops.ScanWork(
        tasks=parts * blocks,
        parts=parts,
        width=width,
        sequences=sequences,
        length=length,
        channels=channels,
        reverse=reverse,
        **fields,
    )


def _has_whole_lines(result: Tensor) -> bool:
    """Whether each row of a contiguous result consists of whole cache lines."""
    return result.data_ptr() % LINE == result.shape[-1] * result.itemsize % LINE == 0


def blocks_of(channels: int, narrowest: int, threads: int, parts: int) -> tuple[int, int]:
    """How many blocks of channels to split each of `parts` into so that all threads stay busy; and their width."""
    blocks = threads // math.gcd(parts, threads) if parts < 4 * threads else 1
    blocks = max(1, min(blocks, channels // narrowest))
    width = max(16, -(-channels // (16 * blocks)) * 16)  # whole cache lines, so that no two threads write to the same
    return -(-channels // width), width
