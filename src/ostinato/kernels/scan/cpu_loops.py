# mypy: disable-error-code="no-untyped-def"
"""The CPU loops, compiled by Numba: scans, and minGRU and minLSTM layers from their pre-activations.

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
from numba import carray, types
from numba.extending import intrinsic

from ostinato.kernels.numba_loops import (
    LINE,
    cast,
    compiled_loop,
    exp,
    inline,
    integers,
    log1p,
    multiply_add,
    pointer_to,
    sigmoids,
    streams,
    take_piece,
    tanh_slope,
)
from ostinato.kernels.scan import GATES

FLUSH = 64  # steps whose bias gradients are summed in the loop's dtype before they join the float64 total


class ScanWork(ctypes.Structure):
    """What a scan's loop is called with: of each array the address, and the strides between sequences and in time.

    If a result is to be streamed, its ``_row`` is the address of a row for each sequence, shaped as the state.
    """

    _fields_ = [
        *integers("next_piece", "pieces", "parts", "width", "sequences", "length", "channels"),
        *integers("reverse", "bounds", "state"),
        *integers("a", "a_n", "a_t", "b", "b_n", "b_t", "out", "out_n", "out_t"),
        *integers("h", "h_n", "h_t", "h0", "h0_n", "grad_h", "grad_h_n", "grad_h_t"),
        *integers("grad_a", "grad_a_n", "grad_a_t", "grad_b", "grad_b_n", "grad_b_t"),
        *integers("out_row", "grad_a_row", "grad_b_row", "resets", "resets_n", "resets_t", "absent", "absent_n"),
    ]


class LayerWork(ctypes.Structure):
    """What a layer's loop is called with; step t of sequence b is row ``t*row_t + b*row_b``, or as `offsets` say."""

    _fields_ = [
        *integers("next_piece", "pieces", "groups", "together", "width", "directions", "batch", "length", "hidden"),
        *integers("offsets", "row_t", "row_b", "pre", "bias", "state", "out"),
        *integers("h", "h0", "h0_b", "grad_h", "grad_row", "grad_pre", "sums", "totals"),
    ]


_SCAN_WORK, _LAYER_WORK = np.dtype(ScanWork), np.dtype(LayerWork)


_load, _store = streams(
    *("a", "b", "h", "before", "grad_h", "state", "grad_a", "grad_b", "out"),
    *("pre0", "pre1", "pre2", "bias0", "bias1", "bias2", "grad0", "grad1", "grad2", "sum0", "sum1", "sum2"),
)


@intrinsic
def _prefetch_line(typing_context, pointer, index):
    """Ask for the cache line of an element, which need not exist."""

    def generate(context, builder, signature, arguments):
        int32, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function)
        target = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        builder.call(prefetch, [target, int32(0), int32(3), int32(1)])  # to read, to keep, data
        return context.get_dummy_value()

    return types.void(pointer, types.int64), generate


@inline
def _prefetch(pointer, at, begin, end):
    for j in range(begin, end, 16):
        _prefetch_line(pointer, at + j)


@intrinsic
def _stream_line(typing_context, target, to, source, at):
    """Copy a cache line to an aligned one past the caches, which then need not first read what it replaces.

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


_POSITIVE, _LINEAR, _TANH = range(3)
_CANDIDATES = {"positive": _POSITIVE, "linear": _LINEAR, "tanh": _TANH}


@inline
def _candidate(x, kind):
    """The candidate state and its slope."""
    one = cast(1.0, x)
    if kind == _POSITIVE:
        above, below = sigmoids(x)
        return x + cast(0.5, x) if x >= 0 else above, one if x >= 0 else above * below
    if kind == _TANH:
        return tanh_slope(x)
    return x, one


@inline
def _min_lstm_gates(f, i):
    """f' = P_i/(P_f+P_i), i' = P_f/(P_f+P_i) with P = 1 + exp(-pre), and f'i'sigmoid(-f), f'i'sigmoid(-i).

    P_f and P_i are divided by the largest of the three terms 1, exp(-f), exp(-i), so that none overflows and
    one is exactly 1; the slopes of f' are made without ever dividing by P_f or P_i, which may both be tiny.
    """
    one = cast(1.0, f)
    low, high = (f if f < i else i), (i if f < i else f)
    e_low = exp(-abs(low))
    unit, from_low = (one if low >= 0 else e_low), (e_low if low >= 0 else one)
    from_high = exp((-high) if low >= 0 else low - high)
    p_low, p_high = one + e_low, unit + from_high
    r = one / (p_low + p_high)
    gate_high, gate_low = p_low * r, p_high * r
    slope_high, slope_low = gate_high * (from_high * r), gate_low * (from_low * r)
    return (
        gate_low if f < i else gate_high,
        gate_high if f < i else gate_low,
        slope_low if f < i else slope_high,
        slope_high if f < i else slope_low,
    )


# The loops.  dtype, log, cell and candidate are constants to the compiler: there is a loop for each combination
# in use, compiled when first asked for.  Where time runs backwards so do the channels, because memory is fast
# only where addresses keep going one way (measured: a third faster).


@inline
def _scan_step(log, j, arrays):
    a, at_a, b, at_b, state, at, out, at_out = arrays
    a_j, b_j, h_j = _load(a, at_a + j, "a"), _load(b, at_b + j, "b"), _load(state, at + j, "state")
    wide_a, wide_b = cast(a_j, h_j), cast(b_j, h_j)
    h_j = _logaddexp(wide_a + h_j, wide_b, a_j) if log else multiply_add(wide_a, h_j, wide_b)
    _store(state, at + j, h_j, "state")
    _store(out, at_out + j, cast(h_j, a_j), "out")


@functools.cache
def scan(dtype: type, log: bool) -> Any:
    """``state = a[t]*state + b[t]``, or ``logaddexp(a[t] + state, b[t])``; out[t] is the state after step t."""
    line = LINE // np.dtype(dtype).itemsize

    @compiled_loop
    def run(address):
        work = carray(address, 1, _SCAN_WORK)[0]
        bounds, reverse = pointer_to(work.bounds, np.int64), work.reverse
        a, a_n, a_t = pointer_to(work.a, dtype), work.a_n, work.a_t
        b, b_n, b_t = pointer_to(work.b, dtype), work.b_n, work.b_t
        out, out_n, out_t = pointer_to(work.out, dtype), work.out_n, work.out_t
        row = pointer_to(work.out_row, dtype)
        state = pointer_to(work.state, np.float64)
        resets, resets_n, resets_t = pointer_to(work.resets, np.uint8), work.resets_n, work.resets_t
        parts, sequences, channels = work.parts, work.sequences, work.channels
        piece = take_piece(address)
        while piece < work.pieces:
            block, part = divmod(piece, parts)
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
                            _scan_step(log, end - 1 - j, arrays)
                    else:
                        for j in range(begin, end):
                            _scan_step(log, j, arrays)
                    if work.out_row:
                        _stream(out, at_out + begin, row, at + begin, end - begin, line)
            piece = take_piece(address)

    return run


@inline
def _scan_backward_step(log, j, inputs, outputs):
    a, at_a, b, at_b, before, at_before, grad_h, at_grad = inputs
    state, at, grad_a, grad_b, at_out = outputs
    a_j, before_j = _load(a, at_a + j, "a"), _load(before, at_before + j, "before")
    carried = _load(state, at + j, "state")
    total = cast(_load(grad_h, at_grad + j, "grad_h"), carried) + carried
    if log:
        # The shares of the state that what was kept and what was added have: not exp(kept - h), as h is rounded.  The
        # smaller is exact to its own last digits, and both make up the whole.
        b_j, kept_j = _load(b, at_b + j, "b"), a_j + before_j
        nothing = kept_j == b_j == -math.inf  # a state of exactly zero passes no gradient back: 0/0 is taken as 0
        total = cast(0.0, total) if nothing else total
        share = cast(min(sigmoids(cast(0.0, a_j) if nothing else kept_j - b_j)), total)
        smaller, larger = total * share, total * (cast(1.0, total) - share)
        carried, added = (larger, smaller) if kept_j >= b_j else (smaller, larger)
        _store(grad_a, at_out + j, cast(carried, a_j), "grad_a")
        _store(grad_b, at_out + j, cast(added, a_j), "grad_b")
        _store(state, at + j, carried, "state")
    else:
        _store(grad_a, at_out + j, cast(total, a_j) * before_j, "grad_a")
        _store(grad_b, at_out + j, cast(total, a_j), "grad_b")
        _store(state, at + j, total * cast(a_j, total), "state")


@functools.cache
def scan_backward(dtype: type, log: bool) -> Any:
    """The gradients of a scan; state brings the last state's and returns the initial state's."""
    line = LINE // np.dtype(dtype).itemsize

    @compiled_loop
    def run(address):
        work = carray(address, 1, _SCAN_WORK)[0]
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
        piece = take_piece(address)
        while piece < work.pieces:
            block, part = divmod(piece, parts)
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
                            _scan_backward_step(log, j, inputs, outputs)
                    else:
                        for j in range(end - begin):
                            _scan_backward_step(log, end - 1 - j, inputs, outputs)
                    if reset:
                        for j in range(begin, end):
                            state[at + j] = 0.0
                    if work.grad_a_row:
                        _stream(grad_a, at_out + begin, row_a, at + begin, end - begin, line)
                        _stream(grad_b, at_out + begin, row_b, at + begin, end - begin, line)
            piece = take_piece(address)

    return run


@inline
def _layer_step(lstm, kind, j, hidden, arrays):
    pre, at_pre, bias, at_bias, state, at, out, at_out = arrays
    p0 = _load(pre, at_pre + j, "pre0") + _load(bias, at_bias + j, "bias0")
    p1 = _load(pre, at_pre + hidden + j, "pre1") + _load(bias, at_bias + hidden + j, "bias1")
    if lstm:
        keep, mix, _, _ = _min_lstm_gates(p0, p1)
        x = _load(pre, at_pre + 2 * hidden + j, "pre2") + _load(bias, at_bias + 2 * hidden + j, "bias2")
    else:
        mix, keep = sigmoids(p0)
        x = p1
    h_j = multiply_add(keep, _load(state, at + j, "state"), mix * _candidate(x, kind)[0])
    _store(state, at + j, h_j, "state")
    _store(out, at_out + j, h_j, "out")


@functools.cache
def layer(dtype: type, cell: str, candidate: str) -> Any:
    """``state = keep*state + mix*c`` with the gates made from pre + bias; out[t] is the state after step t."""
    lstm, gates, kind = cell == "minlstm", GATES[cell], _CANDIDATES[candidate]

    @compiled_loop
    def run(address):
        work = carray(address, 1, _LAYER_WORK)[0]
        offsets = pointer_to(work.offsets, np.int64)
        pre, bias = pointer_to(work.pre, dtype), pointer_to(work.bias, dtype)
        out, state = pointer_to(work.out, dtype), pointer_to(work.state, dtype)
        groups, batch, length, hidden, together = work.groups, work.batch, work.length, work.hidden, work.together
        directions, row_t, row_b = work.directions, work.row_t, work.row_b
        piece = take_piece(address)
        while piece < work.pieces:
            block, group, direction = piece // (groups * directions), piece % groups, piece // groups % directions
            begin, end = block * work.width, min((block + 1) * work.width, hidden)
            group_end = (group + 1) * batch // groups
            at_bias = direction * gates * hidden
            for b_begin in range(group * batch // groups, group_end, together):
                for i in range(length):
                    t, t_next = (length - 1 - i, length - 2 - i) if direction else (i, i + 1)
                    row, row_next, b_end = t * row_t, t_next * row_t, min(b_begin + together, group_end)
                    if work.offsets:
                        row, b_end = offsets[t], min(b_end, offsets[t + 1] - offsets[t])
                        row_next = offsets[max(t_next, 0)]
                    for k in range(b_end - b_begin):
                        b = b_end - 1 - k if direction else b_begin + k
                        at_out = ((row + b * row_b) * directions + direction) * hidden
                        if together > 1:
                            at_next = ((row_next + b * row_b) * directions + direction) * hidden
                            _prefetch(out, at_next, begin, end)
                            for gate in range(gates):
                                _prefetch(pre, at_next * gates + gate * hidden, begin, end)
                        at_pre, at = at_out * gates, (direction * batch + b) * hidden
                        arrays = pre, at_pre, bias, at_bias, state, at, out, at_out
                        if direction:
                            for j in range(end - begin):
                                _layer_step(lstm, kind, end - 1 - j, hidden, arrays)
                        else:
                            for j in range(begin, end):
                                _layer_step(lstm, kind, j, hidden, arrays)
            piece = take_piece(address)

    return run


@inline
def _layer_backward_step(lstm, kind, j, hidden, inputs, outputs):
    pre, at_pre, bias, at_bias, before, at_before, grad_h, at_grad = inputs
    state, at, grad_pre, sums, at_sum = outputs
    p0 = _load(pre, at_pre + j, "pre0") + _load(bias, at_bias + j, "bias0")
    p1 = _load(pre, at_pre + hidden + j, "pre1") + _load(bias, at_bias + hidden + j, "bias1")
    total = _load(grad_h, at_grad + j, "grad_h") + _load(state, at + j, "state")
    before_j = _load(before, at_before + j, "before")
    if lstm:
        keep, mix, slope0, slope1 = _min_lstm_gates(p0, p1)
        x = _load(pre, at_pre + 2 * hidden + j, "pre2") + _load(bias, at_bias + 2 * hidden + j, "bias2")
        c, slope = _candidate(x, kind)
        change = total * (c - before_j)
        grad0, grad1, grad2 = -change * slope0, change * slope1, total * mix * slope
        _store(grad_pre, at_pre + 2 * hidden + j, grad2, "grad2")
        _store(sums, at_sum + 2 * hidden + j, _load(sums, at_sum + 2 * hidden + j, "sum2") + grad2, "sum2")
    else:
        mix, keep = sigmoids(p0)
        c, slope = _candidate(p1, kind)
        grad0, grad1 = total * (c - before_j) * (keep * mix), total * mix * slope
    _store(grad_pre, at_pre + j, grad0, "grad0")
    _store(grad_pre, at_pre + hidden + j, grad1, "grad1")
    _store(sums, at_sum + j, _load(sums, at_sum + j, "sum0") + grad0, "sum0")
    _store(sums, at_sum + hidden + j, _load(sums, at_sum + hidden + j, "sum1") + grad1, "sum1")
    _store(state, at + j, total * keep, "state")


@functools.cache
def layer_backward(dtype: type, cell: str, candidate: str) -> Any:
    """The gradients of a layer, its gates made again from pre + bias; state brings h_last's and returns h0's.

    Each group of sequences adds up its own gradient of the bias, in ``totals``.
    """
    lstm, gates, kind = cell == "minlstm", GATES[cell], _CANDIDATES[candidate]

    @compiled_loop
    def run(address):
        work = carray(address, 1, _LAYER_WORK)[0]
        offsets, totals = pointer_to(work.offsets, np.int64), pointer_to(work.totals, np.float64)
        pre, bias, sums = (
            pointer_to(work.pre, dtype),
            pointer_to(work.bias, dtype),
            pointer_to(work.sums, dtype),
        )
        h, h0, grad_h = pointer_to(work.h, dtype), pointer_to(work.h0, dtype), pointer_to(work.grad_h, dtype)
        state, grad_pre = pointer_to(work.state, dtype), pointer_to(work.grad_pre, dtype)
        groups, batch, length, hidden, together = work.groups, work.batch, work.length, work.hidden, work.together
        directions, row_t, row_b, grad_row, h0_b = work.directions, work.row_t, work.row_b, work.grad_row, work.h0_b
        piece = take_piece(address)
        while piece < work.pieces:
            block, group, direction = piece // (groups * directions), piece % groups, piece // groups % directions
            begin, end = block * work.width, min((block + 1) * work.width, hidden)
            group_end = (group + 1) * batch // groups
            at_bias = direction * gates * hidden
            at_sum = (group * directions + direction) * gates * hidden
            for b_begin in range(group * batch // groups, group_end, together):
                for i in range(length):
                    t, t_before = (i, i + 1) if direction else (length - 1 - i, length - 2 - i)
                    row, row_before, b_end = t * row_t, t_before * row_t, min(b_begin + together, group_end)
                    b_start = b_end if i < length - 1 else 0  # sequences from here on have no earlier step
                    if work.offsets:
                        row, b_end = offsets[t], min(b_end, offsets[t + 1] - offsets[t])
                        if i < length - 1:
                            row_before = offsets[t_before]
                            b_start = offsets[t_before + 1] - row_before
                    for k in range(b_end - b_begin):
                        b = b_begin + k if direction else b_end - 1 - k
                        if together > 1:
                            at_next = (row_before + b * row_b) * directions + direction
                            _prefetch(grad_h, (row_before + b * row_b) * grad_row + direction * hidden, begin, end)
                            _prefetch(h, (at_next + (row_before - row) * directions) * hidden, begin, end)
                            for gate in range(gates):
                                _prefetch(pre, (at_next * gates + gate) * hidden, begin, end)
                        at_row, at_state = row + b * row_b, direction * batch + b
                        at_pre = (at_row * directions + direction) * gates * hidden
                        before, at_before = h, ((row_before + b * row_b) * directions + direction) * hidden
                        if b >= b_start:
                            before, at_before = h0, at_state * h0_b
                        at_grad = at_row * grad_row + direction * hidden
                        inputs = pre, at_pre, bias, at_bias, before, at_before, grad_h, at_grad
                        outputs = state, at_state * hidden, grad_pre, sums, at_sum
                        if direction:
                            for j in range(begin, end):
                                _layer_backward_step(lstm, kind, j, hidden, inputs, outputs)
                        else:
                            for j in range(end - begin):
                                _layer_backward_step(lstm, kind, end - 1 - j, hidden, inputs, outputs)
                    if i % FLUSH == FLUSH - 1 or i == length - 1:
                        for gate in range(gates):
                            at = at_sum + gate * hidden
                            for j in range(begin, end):
                                totals[at + j] += sums[at + j]
                                sums[at + j] = 0
            piece = take_piece(address)

    return run
