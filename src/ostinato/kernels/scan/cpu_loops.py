# mypy: disable-error-code="no-untyped-def"
"""The CPU loops of the scans, compiled by Numba.

The work of a loop is cut into sequences by channels.  How it is cut never changes a result: each channel of each
sequence sees the same operations in the same order.

Time is the middle loop.  Channels are the inner one, contiguous, vectorised by LLVM.  Between two steps the
state lives in ``state``: the initial state on entry, the last one on return; in a backward loop the gradient
that goes back through time.
"""

import ctypes
import functools
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ostinato.kernels.numba_loops import (
    LINE,
    compiled_loop,
    inline,
    integers,
    pointer_to,
    restricted,
    structure_at,
    take_task,
)
from ostinato.kernels.numba_math import cast, exp, log1p, multiply_add, sigmoids


class ScanWork(ctypes.Structure):
    """What a scan's loop is called with: of each array the address, and the strides between sequences and in time.

    If a result is to be streamed, its ``_row`` is the address of a row for each sequence, shaped as the state.
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
    """Copy a cache line to an aligned one by non-temporal stores, which avoid reading the line first.

    Such a store waits in a buffer, which the next atomic operation empties.
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


@inline
def _logaddexp(x, y, like):
    """``log(exp(x) + exp(y))``; what it adds to the larger, at most log 2, is computed in the type of `like`."""
    high = x if x > y else y
    gap = cast(0.0, x) if x == y else -abs(x - y)  # two equal infinities have no difference
    return high + cast(log1p(exp(cast(gap, like))), x)


# The loops.  dtype and log are constants to the compiler: there is a loop for each combination in use, compiled when
# first asked for, and a step for each log, since Numba compiles all branches of a function that it inlines.  Where time
# runs backwards so do the channels, because memory is fast only where addresses keep going one way (measured: a third
# faster).


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


@inline
def _log_step(j, arrays):
    a, at_a, b, at_b, state, at, out, at_out = arrays
    a_j, b_j, h_j = load(a, at_a + j, "a"), load(b, at_b + j, "b"), load(state, at + j, "state")
    h_j = _logaddexp(cast(a_j, h_j) + h_j, cast(b_j, h_j), a_j)
    store(state, at + j, h_j, "state")
    store(out, at_out + j, cast(h_j, a_j), "out")


@functools.cache
def scan(dtype: type, log: bool) -> Any:
    """``state = a[t]*state + b[t]``, or ``logaddexp(a[t] + state, b[t])``; out[t] is the state after step t."""
    line = LINE // np.dtype(dtype).itemsize
    step = _log_step if log else _linear_step

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
                    if reverse:
                        for j in range(end - begin):
                            step(end - 1 - j, arrays)
                    else:
                        for j in range(begin, end):
                            step(j, arrays)
                    if work.out_row:
                        _stream(out, at_out + begin, row, at + begin, end - begin, line)
            task = take_task(address)

    return run


@inline
def linear_gradients(a, before, grad_h, carried):
    """The gradients of a, of b and of the state before, which is carried on."""
    total = cast(grad_h, carried) + carried
    return cast(total, a) * before, cast(total, a), total * cast(a, total)


@inline
def _linear_backward_step(j, inputs, outputs):
    a, at_a, _, _, before, at_before, grad_h, at_grad = inputs
    state, at, grad_a, grad_b, at_out = outputs
    a_j, carried = load(a, at_a + j, "a"), load(state, at + j, "state")
    grad_j, before_j = load(grad_h, at_grad + j, "grad_h"), load(before, at_before + j, "before")
    grad_a_j, grad_b_j, carried = linear_gradients(a_j, before_j, grad_j, carried)
    store(grad_a, at_out + j, grad_a_j, "grad_a")
    store(grad_b, at_out + j, grad_b_j, "grad_b")
    store(state, at + j, carried, "state")


@inline
def _log_backward_step(j, inputs, outputs):
    a, at_a, b, at_b, before, at_before, grad_h, at_grad = inputs
    state, at, grad_a, grad_b, at_out = outputs
    a_j, carried = load(a, at_a + j, "a"), load(state, at + j, "state")
    total = cast(load(grad_h, at_grad + j, "grad_h"), carried) + carried
    # The shares of the state that what was kept and what was added have: not exp(kept - h), as h is rounded.  The
    # smaller is exact to its own last digits, and both make up the whole.
    b_j, kept_j = load(b, at_b + j, "b"), a_j + load(before, at_before + j, "before")
    nothing = kept_j == b_j == -math.inf  # a state of exactly zero has no gradient: 0/0 = 0
    total = cast(0.0, total) if nothing else total
    share = cast(min(sigmoids(cast(0.0, a_j) if nothing else kept_j - b_j)), total)
    smaller, larger = total * share, total * (cast(1.0, total) - share)
    carried, added = (larger, smaller) if kept_j >= b_j else (smaller, larger)
    store(grad_a, at_out + j, cast(carried, a_j), "grad_a")
    store(grad_b, at_out + j, cast(added, a_j), "grad_b")
    store(state, at + j, carried, "state")


@functools.cache
def scan_backward(dtype: type, log: bool) -> Any:
    """The gradients of a scan; state brings the last state's and returns the initial state's."""
    line = LINE // np.dtype(dtype).itemsize
    step = _log_backward_step if log else _linear_backward_step

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
        out_n, out_t = work.grad_a_n, work.grad_a_t  # grad_b's too
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
                    inputs = a, at_a, b, at_b, before, at_before, grad_h, at_grad
                    targets = (row_a, row_b, at) if work.grad_a_row else (grad_a, grad_b, at_out)
                    outputs = state, at, *targets
                    if reverse:
                        for j in range(begin, end):
                            step(j, inputs, outputs)
                    else:
                        for j in range(end - begin):
                            step(end - 1 - j, inputs, outputs)
                    if reset:
                        for j in range(begin, end):
                            state[at + j] = 0.0
                    if work.grad_a_row:
                        _stream(grad_a, at_out + begin, row_a, at + begin, end - begin, line)
                        _stream(grad_b, at_out + begin, row_b, at + begin, end - begin, line)
            task = take_task(address)

    return run
