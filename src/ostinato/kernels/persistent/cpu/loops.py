# mypy: disable-error-code="no-untyped-def"
"""Loops over time for recurrent layers on the CPU, compiled by Numba: forward and backward, dense and pruned.

The batch is divided into chunks of sequences, and one thread runs all steps of a chunk, so that no step waits for
another thread.  If there are fewer sequences than threads, or few sequences and more weights than a cache holds, the
hidden units of all sequences are divided into parts instead, one for each thread, which keeps its part of the weights
in its cache; a barrier separates the steps (``barrier.py``).

A step multiplies the recurrent weights by the states of a chunk and computes the gates, fused.  Dense weights are
packed in panels, (panels, K, rows): the sums of a panel's rows for a tile of sequences stay in registers for all K.
Pruned weights are the entries of ``entries.py``.  The division of work never changes a result, as the order of each sum
is fixed.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ostinato.kernels.cpu.compiler import compiled_loop, inline
from ostinato.kernels.cpu.intrinsics import integers, offset, pointer_to, prefetch, structure_at, take_task
from ostinato.kernels.persistent.cpu.barrier import COUNTERS, arrive, claim_part, finish_part
from ostinato.kernels.persistent.cpu.cells import BACKWARD_UNIT, FORWARD_UNIT, load, store
from ostinato.kernels.persistent.cpu.products import are_finite, panel_rows, panels_adder
from ostinato.kernels.persistent.cpu.pruned import entries_adder
from ostinato.kernels.persistent.plan import GATES

_BOTH = (
    *("next_task", "tasks", "chunk_size", "batch", "length", "hidden", "reverse", "offsets", "resets"),
    *("weights", "row", "padded", "columns", "starts", "rows", "slices", "diagonal", "not_finite"),
    *("parts", "units", "part_row", "progress"),
)


class ForwardWork(ctypes.Structure):
    """The forward loop's argument structure: sizes and addresses.

    A sequence's sums are a `row`: for each part a `part_row`, in which the gates of its `units` start `padded` apart.
    `weights` are panels or the values of entries; `columns` to `diagonal` belong to entries.  `shown` are the states
    published to the other parts, double-buffered by step.
    """

    _fields_ = integers(*_BOTH, "bias", "projected", "sums", "h", "shown", "c", "output", "kept")


class BackwardWork(ctypes.Structure):
    """The backward loop's argument structure, like the forward's; here the sums are dh."""

    _fields_ = integers(
        *(*_BOTH, "pre", "candidate", "h", "h0", "cells", "c0", "zeros", "grad_output", "grad_row"),
        *("dh", "dc", "grads"),
    )


_FORWARD, _BACKWARD = np.dtype(ForwardWork), np.dtype(BackwardWork)


@inline
def _rows_of(work, t, first, size):
    """The first row of a step, and the number of its rows in the chunk of `size` sequences that begins at `first`."""
    begin, end = t * work.batch, (t + 1) * work.batch
    if work.offsets:
        offsets = pointer_to(work.offsets, np.int32)
        begin, end = np.int64(offsets[t]), np.int64(offsets[t + 1])
    return begin, min(end - begin - first, size)


@inline
def _clear(x, begin, end):
    for j in range(begin, end):
        x[j] = 0


@inline
def _set_to_bias(gates, hidden, padded, bias, sums, at, begin, end):
    for g in range(gates):
        for j in range(begin, end):
            store(sums, at + g * padded + j, load(bias, g * hidden + j, "p0"), "s0")


@functools.cache
def _product(dtype: type, gates: int, kind: str, height: int, tile: int, backward: bool) -> Any:
    """A function that adds the products of a part's weights and x, rows of `live` sequences, to their sums."""
    if kind == "dense":
        panel, factor, add_panels = panel_rows(dtype, tile), gates if backward else 1, panels_adder(dtype, tile)

        @inline
        def multiply(work, part, part_row, x, x_row, sums, live):
            skipped, columns = part * part_row, factor * work.hidden
            weights, out = offset(pointer_to(work.weights, dtype), skipped * columns), offset(sums, skipped)
            add_panels(part_row // panel, columns, weights, x, x_row, out, work.row, live)

    else:
        add_entries = entries_adder(kind, height, tile, gates, direct=False)

        @inline
        def multiply(work, part, part_row, x, x_row, sums, live):
            weights, diagonal = pointer_to(work.weights, dtype), pointer_to(work.diagonal, dtype)
            columns, starts = pointer_to(work.columns, np.int32), pointer_to(work.starts, np.int64)
            rows, hidden = pointer_to(work.rows, np.int64), work.hidden
            entries = weights, weights, columns, starts, rows, work.slices, diagonal, work.padded
            add_entries(entries, hidden, hidden, x, x_row, sums, work.row, live)

    return multiply


def _over_time(record: np.dtype, shared: bool, more: int, advance: Callable) -> Any:
    """The compiled loop that calls ``advance(work, chunk, step, part)`` for `more` steps than the sequences have.

    ``advance`` returns True if pruned weights, which count as zeros, would be multiplied by an infinite number or NaN.
    """

    @compiled_loop
    def run(address):
        work = structure_at(address, record)
        parts, steps = work.parts if shared else 1, work.length + more
        task = take_task(address)
        while task < work.tasks:
            chunk, own_part = task // parts, task % parts
            progress = offset(pointer_to(work.progress, np.int64), chunk * (1 + parts) * COUNTERS)
            arrive(progress, own_part)
            wrong = False
            step, part = claim_part(progress, parts, own_part, steps)
            while step < steps:
                if not wrong:
                    wrong = advance(work, chunk, step, part)
                finish_part(progress, parts)
                step, part = claim_part(progress, parts, own_part, steps)
            if wrong:
                work.not_finite = 1
            task = take_task(address)

    return run


@functools.cache
def forward(dtype: type, cell: str, keep: bool, kind: str, height: int, tile: int, shared: bool) -> Any:
    """The compiled forward loop for weights whose `kind` is "dense", or entries of a kind and height.

    h and c are the initial states on entry, the last ones on return.  For the backward, ``keep`` leaves in `projected`
    the gates' pre-activations, with only the input's part of a GRU's n, and in `kept` an LSTM's c or the other part of
    a GRU's n.
    """
    gates, unit, largest = GATES[cell], FORWARD_UNIT[cell], dtype(np.finfo(dtype).max)
    multiply = _product(dtype, gates, kind, height, tile, backward=False)

    @inline
    def advance(work, chunk, step, part):
        resets, bias = pointer_to(work.resets, np.uint8), pointer_to(work.bias, dtype)
        projected, sums = pointer_to(work.projected, dtype), pointer_to(work.sums, dtype)
        h, c, shown = pointer_to(work.h, dtype), pointer_to(work.c, dtype), pointer_to(work.shown, dtype)
        output, kept = pointer_to(work.output, dtype), pointer_to(work.kept, dtype)
        batch, hidden, row, padded = work.batch, work.hidden, work.row, work.padded
        has_resets = work.resets != 0  # read once, as a store might change it
        units, part_row = (work.units, work.part_row) if shared else (hidden, row)
        first, t = chunk * work.chunk_size, work.length - 1 - step if work.reverse else step
        at_step, live = _rows_of(work, t, first, work.chunk_size)
        begin, end = part * units, min((part + 1) * units, hidden)
        mine = part * part_row - begin  # the offset at which the sums of unit 0 would be in this part
        for b in range(first, first + live):
            if has_resets and resets[at_step + b]:
                _clear(h, b * hidden + begin, b * hidden + end)
                if cell == "lstm":
                    _clear(c, b * hidden + begin, b * hidden + end)
            _set_to_bias(gates, hidden, padded, bias, sums, b * row + mine, begin, end)
        x = offset(h, first * hidden)
        if shared:
            x = offset(shown, (step % 2 * batch + first) * hidden)
            prefetch(x, 0, 0, live * hidden)  # from other processors' caches
        if kind != "dense" and not are_finite(x, 0, live * hidden, largest):
            return True
        multiply(work, part, part_row, x, hidden, offset(sums, first * row), live)
        for b in range(first, first + live):
            if shared and has_resets and resets[at_step + b]:  # other parts have published states from before the reset
                _set_to_bias(gates, hidden, padded, bias, sums, b * row + mine, begin, end)
            at, at_out = b * hidden, (at_step + b) * hidden
            arrays = projected, at_out * gates, sums, b * row + mine, h, c, at, output, kept, at_out
            for j in range(begin, end):
                unit(keep, j, hidden, padded, arrays)
            if shared:
                next_shown = ((step + 1) % 2 * batch + b) * hidden
                for j in range(begin, end):
                    store(shown, next_shown + j, load(h, at + j, "h"), "before")
        return False

    return _over_time(_FORWARD, shared, 0, advance)


@functools.cache
def backward(dtype: type, cell: str, kind: str, height: int, tile: int, shared: bool) -> Any:
    """The compiled backward loop; dh and dc are the last states' gradients on entry, the initial ones' on return."""
    gates, unit, largest = GATES[cell], BACKWARD_UNIT[cell], dtype(np.finfo(dtype).max)
    width = 1 if gates == 1 else 4  # gradients of a unit
    multiply = _product(dtype, gates, kind, height, tile, backward=True)

    @inline
    def propagate(work, chunk, t, part, part_row, begin, end):
        """Add the product of step t's gate gradients and the weights to dh."""
        resets, grads = pointer_to(work.resets, np.uint8), pointer_to(work.grads, dtype)
        dh, dc = pointer_to(work.dh, dtype), pointer_to(work.dc, dtype)
        hidden, row, grads_row = work.hidden, work.row, width * work.hidden
        first, mine = chunk * work.chunk_size, part * part_row - begin
        at_step, live = _rows_of(work, t, first, work.chunk_size)
        x = offset(grads, (at_step + first) * grads_row)
        if kind != "dense" and not are_finite(x, 0, live * grads_row, largest):
            return True
        multiply(work, part, part_row, x, grads_row, offset(dh, first * row), live)
        if work.resets:
            for b in range(first, first + live):
                if resets[at_step + b]:
                    _clear(dh, b * row + mine + begin, b * row + mine + end)
                    if cell == "lstm":
                        _clear(dc, b * hidden + begin, b * hidden + end)
        return False

    @inline
    def differentiate(work, chunk, t, t_before, part, part_row, begin, end):
        """Compute the gradients of the gates at step t from dh and dc."""
        resets, zeros = pointer_to(work.resets, np.uint8), pointer_to(work.zeros, dtype)
        pre, candidate = pointer_to(work.pre, dtype), pointer_to(work.candidate, dtype)
        h, h0 = pointer_to(work.h, dtype), pointer_to(work.h0, dtype)
        cells, c0 = pointer_to(work.cells, dtype), pointer_to(work.c0, dtype)
        states, initial = (cells, c0) if cell == "lstm" else (h, h0)
        grad_output, grads = pointer_to(work.grad_output, dtype), pointer_to(work.grads, dtype)
        dh, dc = pointer_to(work.dh, dtype), pointer_to(work.dc, dtype)
        hidden, row, first, has_resets = work.hidden, work.row, chunk * work.chunk_size, work.resets != 0
        at_step, live = _rows_of(work, t, first, work.chunk_size)
        at_before_step, live_before = np.int64(0), np.int64(0)
        if 0 <= t_before < work.length:
            at_before_step, live_before = _rows_of(work, t_before, 0, work.batch)
        for b in range(first, first + live):
            at_row = (at_step + b) * hidden
            before, at_before = states, (at_before_step + b) * hidden
            if b >= live_before:
                before, at_before = initial, b * hidden
            if has_resets and resets[at_step + b]:
                before, at_before = zeros, np.int64(0)
            at_grad = (at_step + b) * work.grad_row
            at_gates, at_before, at_grad = at_row * gates + begin, at_before + begin, at_grad + begin
            at_grads, at_row = at_row * width + begin, at_row + begin
            inputs = pre, at_gates, candidate, before, at_before, cells, at_row, grad_output, at_grad
            outputs = dh, b * row + part * part_row, dc, b * hidden + begin, grads, at_grads
            for j in range(end - begin):
                unit(j, hidden, inputs, outputs)

    @inline
    def advance(work, chunk, step, part):
        # The product of a step needs the gradients of all parts, so it is computed after the barrier, in the next step.
        length, reverse = work.length, work.reverse
        units, part_row = (work.units, work.part_row) if shared else (work.hidden, work.row)
        begin, end = part * units, min((part + 1) * units, work.hidden)
        t, later, earlier = length - 1 - step, length - step, length - 2 - step
        if reverse:
            t, later, earlier = step, step - 1, step + 1
        if step > 0 and propagate(work, chunk, later, part, part_row, begin, end):
            return True
        if step < length:
            differentiate(work, chunk, t, earlier, part, part_row, begin, end)
        return False

    return _over_time(_BACKWARD, shared, 1, advance)
