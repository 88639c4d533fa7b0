"""The CPU backend: tensors in and out around the loops of :mod:`~ostinato.kernels.scan.cpu_loops`."""

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

SCAN_WIDTH = 1024  # channels a task has at least: a scan moves memory, fastest in long rows
WIDE = 32  # channels from which on each part of a step in log space takes a loop of its own
NARROW = 3  # channels up to which a linear scan takes one after the other: more fill vector registers
NARROW_APART = 64  # the same of tensors that are contiguous in time, which are copied otherwise
TURNS = 16  # how many channels and sequences then take turns: a cache line of channels
STREAMED = 32 << 20  # bytes from which on a scan's result does not stay in the caches until it is read


def states_like(x: Tensor, _order: Order) -> Tensor:
    return x.new_empty(x.shape)


def linear_scan(a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> tuple[Tensor, Tensor]:
    if b.shape[1] == 1 and order.is_plain and b.dtype in NUMPY_DTYPES:
        h = b.clone(memory_format=torch.contiguous_format) if h0 is None else torch.addcmul(b, a, h0[:, None])
        return h, h[:, 0].clone()  # faster than calling a loop for one step
    return _scan(False, a, b, h0, order)


def prepare_linear_scan(a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> Callable:
    """A fast path of :func:`linear_scan` for tensors laid out like these, in a plain order."""
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
    return x if x.dtype is dtype else x.to(dtype)  # a call that changes nothing costs as much as a short scan


def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, with contiguous channels."""
    x = as_dtype(x, dtype)
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    return transposed(x) if is_transposable(x) else x.contiguous()


def initial_state(initial: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, absent: float = 0.0) -> Tensor:
    """What a loop's state starts from, in memory of its own."""
    if initial is None:
        return torch.full(shape, absent, dtype=dtype, device="cpu")
    return initial.to(dtype, copy=True, memory_format=torch.contiguous_format)


def constant(value: float, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor filled with a number: one row in memory, expanded to the shape."""
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
    """Whether each part of a step takes a loop of its own."""
    return log and dtype is torch.float32 and x.shape[2] >= WIDE


def _is_narrow(order: Order, x: Tensor, y: Tensor) -> bool:
    """Whether to take one channel after the other: few of many steps, or more where an input is contiguous in time."""
    batch, length, channels = x.shape
    if channels <= NARROW:
        return 4 * channels * order.sequences(x) <= batch * length  # a turn of fewer costs more than it saves
    return channels <= NARROW_APART and (x.stride(1) == 1 < x.stride(2) or y.stride(1) == 1 < y.stride(2))


def _run_scan(loop: Any, narrow: bool, order: Order, state: Tensor, **arrays: Tensor) -> None:
    """Call the loop with (B, T, D) arrays, a mask (B, T), and h0, which is (N, D) like the state."""
    a, (cu_seqlens, resets, reverse) = arrays["a"], order
    strides = tuple([x.stride() for x in arrays.values()])
    marks = None if resets is None else resets.stride()
    sizes = state.shape, a.shape[1], tuple(arrays), strides, marks, cu_seqlens is not None, reverse, narrow
    threads = threads_for(a.numel())
    work = cpu_loops.ScanWork.from_buffer_copy(_prepared(*sizes, threads))
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
        rows = {name: x.new_empty(state.shape) for name, x in results.items() if _has_whole_lines(x)}
        if len(rows) == len(results):
            for name, row in rows.items():
                setattr(work, f"{name}_row", row.data_ptr())
    run_loop(loop, work, threads)


@functools.lru_cache(maxsize=4096)
def _prepared(
    shape: torch.Size,
    length: int,
    names: tuple[str, ...],
    strides: tuple[tuple[int, ...], ...],
    marks: tuple[int, ...] | None,
    packed: bool,
    reverse: bool,
    narrow: bool,
    threads: int,
) -> cpu_loops.ScanWork:
    """What a loop is called with but for addresses, of a state's shape and the strides of the arrays and the mask."""
    sequences, channels = shape
    if narrow:
        width = min(channels, TURNS)
        parts, blocks = max(min(sequences, threads), sequences * width // TURNS), -(-channels // width)
    else:
        parts = min(sequences, 4 * threads)
        blocks, width = blocks_of(channels, SCAN_WIDTH, threads, parts)
    fields = {}
    for name, of_array in zip(names, strides, strict=True):
        fields[f"{name}_n"] = of_array[0] if len(of_array) == 2 or not packed else 0
        if len(of_array) == 3:
            fields |= {f"{name}_t": of_array[1], f"{name}_d": of_array[2]}
    if marks is not None:
        fields |= {"resets_n": 0 if packed else marks[0], "resets_t": marks[1]}
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
    """Whether its rows consist of whole cache lines."""
    return result.data_ptr() % LINE == result.shape[-1] * result.itemsize % LINE == 0


def blocks_of(channels: int, narrowest: int, threads: int, parts: int) -> tuple[int, int]:
    """Into how many blocks of channels to cut each of `parts`, that threads be busy to the end; and their width."""
    blocks = threads // math.gcd(parts, threads) if parts < 4 * threads else 1
    blocks = max(1, min(blocks, channels // narrowest))
    width = max(16, -(-channels // (16 * blocks)) * 16)  # whole cache lines, so that no two threads write to one
    return -(-channels // width), width
