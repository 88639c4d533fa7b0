# mypy: disable-error-code="no-untyped-def"
"""The CPU loops of the scans, compiled by Numba.

A loop's work is split into tasks of some channels of some sequences.  The split never changes a result: each channel of
each sequence sees the same operations in the same order.

Sequences are the outer loop, time is the middle one, and contiguous channels are the inner one, which LLVM vectorises.
Between two steps the state is in ``state``: the initial state on entry, the last state on return.  In a backward loop,
``state`` is the gradient that is propagated back through time.
"""

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ostinato.kernels.cpu.compiler import compiled_loop, inline
from ostinato.kernels.cpu.elementary import cast, exp, log1p_fraction, multiply_add, sigmoids
from ostinato.kernels.cpu.intrinsics import LINE, integers, pointer_to, restricted, structure_at, take_task


class ScanWork(ctypes.Structure):
    """The argument of a loop: the address of each array, and its strides over sequences, time steps and channels.

    If a result is to bypass the caches, its ``_row`` is the address of a buffer of the state's shape, a row for each
    sequence.
    """

    _fields_ = [
        *integers("next_task", "tasks", "parts", "width", "sequences", "length", "channels"),
        *integers("reverse", "bounds", "state"),
        *integers("a", "a_n", "a_t", "a_d", "b", "b_n", "b_t", "b_d", "out", "out_n", "out_t", "out_d"),
        *integers("h", "h_n", "h_t", "h_d", "h0", "h0_n", "grad_h", "grad_h_n", "grad_h_t", "grad_h_d"),
        *integers("grad_a", "grad_a_n", "grad_a_t", "grad_a_d", "grad_b", "grad_b_n", "grad_b_t", "grad_b_d"),
        *integers("out_row", "grad_a_row", "grad_b_row", "resets", "resets_n", "resets_t", "absent", "absent_n"),
    ]


SCAN_WORK = np.dtype(ScanWork)


load, store = restricted("a", "b", "h", "before", "grad_h", "state", "grad_a", "grad_b", "out")


@intrinsic
def _stream_line(typing_context, target, to, source, at):
    """Copy a cache line to an aligned one by non-temporal stores, which do not read the line first.

    Such stores wait in a buffer, which the next atomic operation flushes.
    """

    def generate(context, builder, signature, arguments):
        target, to, source, at = arguments
        line = ir.VectorType(ir.IntType(32), 16).as_pointer()
        value = builder.load(builder.bitcast(builder.gep(source, [at]), line), align=4)
        store = builder.store(value, builder.bitcast(builder.gep(target, [to]), line), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64), generate


@inline
def _stream(target, to, source, at, count, line):
    for j in range(0, count, line):
        _stream_line(target, to + j, source, at + j)


# `dtype`, `log` and `split` are constants to the compiler: each combination in use has a loop, compiled at its first
# use.  The steps are functions of their own for `log`, since Numba compiles all branches of a function that it inlines.


def _row(step: Callable) -> Callable:
    """The loop over channels of a step.

    It runs backwards where time does: memory is fast only if addresses keep moving in one direction (measured: a third
    faster).
    """

    @inline
    def run(begin, end, backwards, arrays):
        if backwards:
            for j in range(end - begin):
                step(end - 1 - j, arrays)
        else:
            for j in range(begin, end):
                step(j, arrays)

    return run


@inline
def linear(a, b, h):
    return multiply_add(cast(a, h), h, cast(b, h))


@inline
def _linear_step(j, arrays):
    a, at_a, b, at_b, state, at, out, at_out = arrays
    a_j, b_j, h_j = load(a, at_a + j, "a"), load(b, at_b + j, "b"), load(state, at + j, "state")
    h_j = linear(a_j, b_j, h_j)
    store(state, at + j, h_j, "state")
    store(out, at_out + j, cast(h_j, a_j), "out")


_linear_row = _row(_linear_step)


@inline
def _log_larger(j, arrays):
    """The first part of logaddexp: stores its larger argument as the new state, the difference to it in `out`."""
    a, at_a, b, at_b, state, at, out, at_out = arrays
    a_j, b_j, h_j = load(a, at_a + j, "a"), load(b, at_b + j, "b"), load(state, at + j, "state")
    x, y = cast(a_j, h_j) + h_j, cast(b_j, h_j)
    gap = cast(0.0, x) if x == y else -abs(x - y)  # the difference of equal infinities would be NaN
    store(state, at + j, x if x > y else y, "state")
    store(out, at_out + j, cast(gap, a_j), "out")


@inline
def _log_excess(j, arrays):
    """The second part: what the smaller argument adds to the larger one, at most log 2."""
    out, at_out = arrays[6:]
    store(out, at_out + j, log1p_fraction(exp(load(out, at_out + j, "out"))), "out")


@inline
def _log_sum(j, arrays):
    """The last part: the sum of both."""
    state, at, out, at_out = arrays[4:]
    excess, h_j = load(out, at_out + j, "out"), load(state, at + j, "state")
    h_j += cast(excess, h_j)
    store(state, at + j, h_j, "state")
    store(out, at_out + j, cast(h_j, excess), "out")


@inline
def _log_step(j, arrays):
    _log_larger(j, arrays)
    _log_excess(j, arrays)
    _log_sum(j, arrays)


_log_row, _log_row_larger, _log_row_excess, _log_row_sum = map(_row, (_log_step, _log_larger, _log_excess, _log_sum))


@inline
def _split_log_row(begin, end, backwards, arrays):
    """A loop for each part: one without float64 has twice as many channels in a vector register."""
    _log_row_larger(begin, end, backwards, arrays)
    _log_row_excess(begin, end, backwards, arrays)
    _log_row_sum(begin, end, backwards, arrays)


@functools.cache
def scan(dtype: type, log: bool, split: bool) -> Any:
    """``state = a[t]*state + b[t]``, or ``logaddexp(a[t] + state, b[t])``; out[t] is the state after step t.

    With `split`, each part of logaddexp has a loop over the channels, which is faster in float32 unless they are few.
    """
    line = LINE // np.dtype(dtype).itemsize
    take_row = (_split_log_row if split else _log_row) if log else _linear_row

    @compiled_loop
    def run(address):
        work = structure_at(address, SCAN_WORK)
        bounds, reverse = pointer_to(work.bounds, np.int64), work.reverse
        a, a_n, a_t = pointer_to(work.a, dtype), work.a_n, work.a_t
        b, b_n, b_t = pointer_to(work.b, dtype), work.b_n, work.b_t
        out, out_n, out_t = pointer_to(work.out, dtype), work.out_n, work.out_t
        row = pointer_to(work.out_row, dtype)
        state = pointer_to(work.state, np.float64)
        resets, resets_n, resets_t = pointer_to(work.resets, np.uint8), work.resets_n, work.resets_t
        parts, sequences, channels = work.parts, work.sequences, work.channels
        task = take_task(address)
        while task < work.tasks:
            block, part = divmod(task, parts)
            begin, end = block * work.width, min((block + 1) * work.width, channels)
            for n in range(part * sequences // parts, (part + 1) * sequences // parts):
                first, last = (bounds[n], bounds[n + 1]) if work.bounds else (0, work.length)
                at = n * channels
                for i in range(last - first):
                    t = last - 1 - i if reverse else first + i
                    at_a, at_b, at_out = n * a_n + t * a_t, n * b_n + t * b_t, n * out_n + t * out_t
                    target, at_target = (row, at) if work.out_row else (out, at_out)
                    arrays = a, at_a, b, at_b, state, at, target, at_target
                    if work.resets and resets[n * resets_n + t * resets_t]:
                        for j in range(begin, end):
                            state[at + j] = -math.inf if log else 0.0
                    take_row(begin, end, reverse, arrays)
                    if work.out_row:
                        _stream(out, at_out + begin, row, at + begin, end - begin, line)
            task = take_task(address)

    return run


@inline
def linear_gradients(a, before, grad_h, carried):
    """The gradients of a, b and the state before the step; the last is carried to the previous step."""
    total = cast(grad_h, carried) + carried
    return cast(total, a) * before, cast(total, a), total * cast(a, total)


@inline
def _linear_backward_step(j, arrays):
    a, at_a, _, _, before, at_before, grad_h, at_grad, state, at, grad_a, grad_b, at_out = arrays
    a_j, carried = load(a, at_a + j, "a"), load(state, at + j, "state")
    grad_j, before_j = load(grad_h, at_grad + j, "grad_h"), load(before, at_before + j, "before")
    grad_a_j, grad_b_j, carried = linear_gradients(a_j, before_j, grad_j, carried)
    store(grad_a, at_out + j, grad_a_j, "grad_a")
    store(grad_b, at_out + j, grad_b_j, "grad_b")
    store(state, at + j, carried, "state")


_linear_backward_row = _row(_linear_backward_step)


@inline
def _kept_and_added(j, arrays):
    """The arguments of logaddexp, and whether both stand for zero: such a state has no gradient."""
    a, at_a, b, at_b, before, at_before = arrays[:6]
    added = load(b, at_b + j, "b")
    kept = load(a, at_a + j, "a") + load(before, at_before + j, "before")
    return kept, added, kept == added == -math.inf


@inline
def _log_share(j, arrays):
    """Store the smaller argument's share of the state in `grad_a` for the time being.

    It is not computed as exp(kept - h), as h is rounded.
    """
    grad_a, _, at_out = arrays[10:]
    kept, added, is_zero = _kept_and_added(j, arrays)
    gap = cast(0.0, kept) if is_zero else kept - added
    store(grad_a, at_out + j, min(sigmoids(gap)), "grad_a")


@inline
def _log_gradients(j, arrays):
    """The gradients of both arguments: the smaller share has full relative precision, and both shares add up to 1."""
    grad_h, at_grad, state, at, grad_a, grad_b, at_out = arrays[6:]
    kept, added, is_zero = _kept_and_added(j, arrays)
    carried = load(state, at + j, "state")
    total = cast(load(grad_h, at_grad + j, "grad_h"), carried) + carried
    total = cast(0.0, total) if is_zero else total
    share = cast(load(grad_a, at_out + j, "grad_a"), total)
    smaller, larger = total * share, total * (cast(1.0, total) - share)
    grad_kept, grad_added = (larger, smaller) if kept >= added else (smaller, larger)
    store(grad_a, at_out + j, cast(grad_kept, kept), "grad_a")
    store(grad_b, at_out + j, cast(grad_added, kept), "grad_b")
    store(state, at + j, grad_kept, "state")


@inline
def _log_backward_step(j, arrays):
    _log_share(j, arrays)
    _log_gradients(j, arrays)


_log_backward_row, _log_row_share, _log_row_gradients = map(_row, (_log_backward_step, _log_share, _log_gradients))


@inline
def _split_log_backward_row(begin, end, backwards, arrays):
    _log_row_share(begin, end, backwards, arrays)
    _log_row_gradients(begin, end, backwards, arrays)


@functools.cache
def scan_backward(dtype: type, log: bool, split: bool) -> Any:
    """The gradients of a scan; `state` is the last state's gradient on entry, the initial state's on return."""
    line = LINE // np.dtype(dtype).itemsize
    take_row = (_split_log_backward_row if split else _log_backward_row) if log else _linear_backward_row

    @compiled_loop
    def run(address):
        work = structure_at(address, SCAN_WORK)
        bounds, reverse = pointer_to(work.bounds, np.int64), work.reverse
        a, a_n, a_t = pointer_to(work.a, dtype), work.a_n, work.a_t
        b, b_n, b_t = pointer_to(work.b, dtype), work.b_n, work.b_t
        h, h_n, h_t = pointer_to(work.h, dtype), work.h_n, work.h_t
        h0, h0_n = pointer_to(work.h0, dtype), work.h0_n
        state = pointer_to(work.state, np.float64)
        resets, resets_n, resets_t = pointer_to(work.resets, np.uint8), work.resets_n, work.resets_t
        absent = pointer_to(work.absent, dtype)
        grad_h, grad_n, grad_t = pointer_to(work.grad_h, dtype), work.grad_h_n, work.grad_h_t
        grad_a, grad_b = pointer_to(work.grad_a, dtype), pointer_to(work.grad_b, dtype)
        out_n, out_t = work.grad_a_n, work.grad_a_t  # those of grad_b, too
        row_a, row_b = pointer_to(work.grad_a_row, dtype), pointer_to(work.grad_b_row, dtype)
        parts, sequences, channels = work.parts, work.sequences, work.channels
        task = take_task(address)
        while task < work.tasks:
            block, part = divmod(task, parts)
            begin, end = block * work.width, min((block + 1) * work.width, channels)
            for n in range(part * sequences // parts, (part + 1) * sequences // parts):
                first, last = (bounds[n], bounds[n + 1]) if work.bounds else (0, work.length)
                at = n * channels
                for i in range(last - first):
                    t = first + i if reverse else last - 1 - i
                    before, at_before = h, n * h_n + (t + 1 if reverse else t - 1) * h_t
                    if i == last - first - 1:
                        before, at_before = h0, n * h0_n
                    reset = work.resets and resets[n * resets_n + t * resets_t]
                    if reset:
                        before, at_before = absent, 0
                    at_a, at_b = n * a_n + t * a_t, n * b_n + t * b_t
                    at_grad, at_out = n * grad_n + t * grad_t, n * out_n + t * out_t
                    targets = (row_a, row_b, at) if work.grad_a_row else (grad_a, grad_b, at_out)
                    arrays = a, at_a, b, at_b, before, at_before, grad_h, at_grad, state, at, *targets
                    take_row(begin, end, not reverse, arrays)
                    if reset:
                        for j in range(begin, end):
                            state[at + j] = 0.0
                    if work.grad_a_row:
                        _stream(grad_a, at_out + begin, row_a, at + begin, end - begin, line)
                        _stream(grad_b, at_out + begin, row_b, at + begin, end - begin, line)
            task = take_task(address)

    return run
