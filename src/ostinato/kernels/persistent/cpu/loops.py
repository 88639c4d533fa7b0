# mypy: disable-error-code="no-untyped-def"
"""Loops over time for recurrent layers on the CPU, compiled by Numba: forward and backward, dense and pruned.

The batch is divided into chunks of sequences, each of which one thread takes through all steps: no step waits for
another thread.  Where there are fewer sequences than threads, the hidden units of all are divided into parts instead,
one a thread, which keeps that part of the weights in its cache; a barrier separates the steps (``barrier.py``).

A step multiplies the recurrent weights with the states of a chunk and computes the gates, fused.  Dense weights are
packed in panels, (panels, K, rows): the sums of a panel's rows for a tile of sequences stay in registers for all K.
Pruned ones are the entries of ``entries.py``.  How the work is divided never changes a result: the order of each
sum is fixed.
"""

import ctypes
import functools
from typing import Any

import numpy as np

from ostinato.kernels.numba_loops import (
    compiled_loop,
    inline,
    integers,
    offset,
    pointer_to,
    prefetch,
    structure_at,
    take_task,
)
from ostinato.kernels.persistent.cpu.barrier import COUNTERS, arrive, claim_part, finish_part
from ostinato.kernels.persistent.cpu.cells import BACKWARD_UNIT, FORWARD_UNIT, load, store
from ostinato.kernels.persistent.cpu.products import add_panels, are_finite, panel_rows, vectors_of
from ostinato.kernels.persistent.cpu.pruned import add_entries
from ostinato.kernels.persistent.plan import GATES

_BOTH = (
    *("next_task", "tasks", "group", "batch", "length", "hidden", "reverse", "offsets", "resets"),
    *("weights", "row", "padded", "columns", "starts", "rows", "slices", "diagonal", "not_finite"),
    *("parts", "units", "part_row", "progress"),
)


class ForwardWork(ctypes.Structure):
    """The forward loop's arguments: sizes and addresses.

    A sequence's sums are a `row`: for each part a `part_row`, in which the gates of its `units` start `padded` apart.
    `weights` are panels or the values of entries; `columns` to `diagonal` belong to entries.  `shown` are the states
    published to the other parts, double-buffered by step.
    """

    _fields_ = integers(*_BOTH, "bias", "projected", "sums", "h", "shown", "c", "output", "kept")


class BackwardWork(ctypes.Structure):
    """The backward loop's arguments, as the forward's; the sums are dh."""

    _fields_ = integers(
        *(*_BOTH, "pre", "candidate", "h", "h0", "cells", "c0", "zeros", "grad_output", "grad_row"),
        *("dh", "dc", "grads"),
    )


_FORWARD, _BACKWARD = np.dtype(ForwardWork), np.dtype(BackwardWork)


@inline
def _rows_of(packed, offsets, t, batch, first, group):
    """The first row of a step, and the number of its rows that belong to a chunk."""
    begin, end = t * batch, (t + 1) * batch
    if packed:
        begin, end = np.int64(offsets[t]), np.int64(offsets[t + 1])
    return begin, min(end - begin - first, group)


@inline
def _begin_sums(gates, hidden, padded, bias, sums, at, begin, end):
    for g in range(gates):
        for j in range(begin, end):
            store(sums, at + g * padded + j, load(bias, g * hidden + j, "p0"), "s0")


@functools.cache
def forward(dtype: type, cell: str, keep: bool, kind: str, height: int, tile: int, shared: bool) -> Any:
    """The forward loop for weights that are "dense", or entries of a kind and height.

    h and c hold the initial state, then the last one.  For the backward, ``keep`` leaves the gates' pre-activations in
    `projected`, of a GRU's n only the input's part, and in `kept` an LSTM's c or the other part of a GRU's n.
    """
    gates, vectors, panel, largest = GATES[cell], vectors_of(tile), panel_rows(dtype, tile), dtype(np.finfo(dtype).max)
    unit = FORWARD_UNIT[cell]

    @compiled_loop
    def run(address):
        work = structure_at(address, _FORWARD)
        offsets, resets = pointer_to(work.offsets, np.int32), pointer_to(work.resets, np.uint8)
        weights, bias = pointer_to(work.weights, dtype), pointer_to(work.bias, dtype)
        projected, sums = pointer_to(work.projected, dtype), pointer_to(work.sums, dtype)
        h, c = pointer_to(work.h, dtype), pointer_to(work.c, dtype)
        output, kept = pointer_to(work.output, dtype), pointer_to(work.kept, dtype)
        batch, length, hidden, group = work.batch, work.length, work.hidden, work.group
        row, padded = work.row, work.padded
        columns, starts = pointer_to(work.columns, np.int32), pointer_to(work.starts, np.int64)
        rows, diagonal = pointer_to(work.rows, np.int64), pointer_to(work.diagonal, dtype)
        entries = weights, weights, columns, starts, rows, work.slices, diagonal, padded
        parts, units, part_row = (work.parts, work.units, work.part_row) if shared else (1, hidden, row)
        counters, shown = pointer_to(work.progress, np.int64), pointer_to(work.shown, dtype)
        task = take_task(address)
        while task < work.tasks:
            chunk, own = task // parts, task % parts
            progress, first = offset(counters, chunk * (1 + parts) * COUNTERS), chunk * group
            arrive(progress, own)
            wrong = kind != "dense" and not are_finite(h, first * hidden, min(first + group, batch) * hidden, largest)
            step, part = claim_part(progress, parts, own, length)
            while step < length:
                t = length - 1 - step if work.reverse else step
                at_step, live = _rows_of(work.offsets, offsets, t, batch, first, group)
                begin, end = part * units, min((part + 1) * units, hidden)
                mine = part * part_row - begin  # where the sums of the first unit would be
                if live > 0 and not wrong:
                    for b in range(first, first + live):
                        if work.resets and resets[at_step + b]:
                            for j in range(begin, end):
                                h[b * hidden + j] = 0
                                if cell == "lstm":
                                    c[b * hidden + j] = 0
                        _begin_sums(gates, hidden, padded, bias, sums, b * row + mine, begin, end)
                    x, chunk_sums = offset(h, first * hidden), offset(sums, first * row)
                    if kind == "dense":
                        if parts > 1:
                            x = offset(shown, (step % 2 * batch + first) * hidden)
                            prefetch(x, 0, 0, live * hidden)  # from other processors' caches
                        many, skipped = part_row // panel, part * part_row
                        part_sums, part_weights = offset(chunk_sums, skipped), offset(weights, skipped * hidden)
                        add_panels(vectors, panel, tile, many, hidden, part_weights, x, hidden, part_sums, row, live)
                    else:
                        add_entries(
                            kind, height, tile, gates, hidden, hidden, entries, x, hidden, chunk_sums, row, live
                        )
                    for b in range(first, first + live):
                        if parts > 1 and work.resets and resets[at_step + b]:  # the others show what was before
                            _begin_sums(gates, hidden, padded, bias, sums, b * row + mine, begin, end)
                        at, at_out = b * hidden, (at_step + b) * hidden
                        arrays = projected, at_out * gates, sums, b * row + mine, h, c, at, output, kept, at_out
                        for j in range(begin, end):
                            unit(keep, j, hidden, padded, arrays)
                        if parts > 1:
                            next_shown = ((step + 1) % 2 * batch + b) * hidden
                            for j in range(begin, end):
                                store(shown, next_shown + j, load(h, at + j, "h"), "before")
                    if kind != "dense":
                        wrong = not are_finite(h, first * hidden, (first + live) * hidden, largest)
                finish_part(progress, parts)
                step, part = claim_part(progress, parts, own, length)
            if wrong:
                work.not_finite = 1
            task = take_task(address)

    return run


@functools.cache
def backward(dtype: type, cell: str, kind: str, height: int, tile: int, shared: bool) -> Any:
    """The backward loop; dh and dc hold the last state's gradients, then the initial state's."""
    gates, vectors, panel, largest = GATES[cell], vectors_of(tile), panel_rows(dtype, tile), dtype(np.finfo(dtype).max)
    unit = BACKWARD_UNIT[cell]
    width = 1 if gates == 1 else 4  # gradients of a unit

    @compiled_loop
    def run(address):
        work = structure_at(address, _BACKWARD)
        offsets, weights = pointer_to(work.offsets, np.int32), pointer_to(work.weights, dtype)
        resets, zeros = pointer_to(work.resets, np.uint8), pointer_to(work.zeros, dtype)
        pre, candidate = pointer_to(work.pre, dtype), pointer_to(work.candidate, dtype)
        h, h0 = pointer_to(work.h, dtype), pointer_to(work.h0, dtype)
        cells, c0 = pointer_to(work.cells, dtype), pointer_to(work.c0, dtype)
        states, initial = (cells, c0) if cell == "lstm" else (h, h0)
        grad_output, grads = pointer_to(work.grad_output, dtype), pointer_to(work.grads, dtype)
        dh, dc = pointer_to(work.dh, dtype), pointer_to(work.dc, dtype)
        batch, length, hidden, group = work.batch, work.length, work.hidden, work.group
        row, padded = work.row, work.padded
        columns, starts = pointer_to(work.columns, np.int32), pointer_to(work.starts, np.int64)
        rows, diagonal = pointer_to(work.rows, np.int64), pointer_to(work.diagonal, dtype)
        entries = weights, weights, columns, starts, rows, work.slices, diagonal, padded
        grads_row, width_in = width * hidden, gates * hidden
        parts, units, part_row = (work.parts, work.units, work.part_row) if shared else (1, hidden, row)
        counters = pointer_to(work.progress, np.int64)
        task = take_task(address)
        while task < work.tasks:
            chunk, own = task // parts, task % parts
            progress, first = offset(counters, chunk * (1 + parts) * COUNTERS), chunk * group
            arrive(progress, own)
            wrong = False
            # The product of a step needs all parts' gradients, so it is computed after the barrier, in the next step.
            step, part = claim_part(progress, parts, own, length + 1)
            while step <= length:
                begin, end = part * units, min((part + 1) * units, hidden)
                mine = part * part_row - begin
                if step > 0 and not wrong:
                    t = step - 1 if work.reverse else length - step
                    at_step, live = _rows_of(work.offsets, offsets, t, batch, first, group)
                    if live > 0:
                        x, sums = offset(grads, (at_step + first) * grads_row), offset(dh, first * row)
                        if kind == "dense":
                            many, skipped = part_row // panel, part * part_row
                            part_sums, part_weights = offset(sums, skipped), offset(weights, skipped * width_in)
                            add_panels(
                                vectors, panel, tile, many, width_in, part_weights, x, grads_row, part_sums, row, live
                            )
                        else:
                            wrong = not are_finite(x, 0, live * grads_row, largest)
                            add_entries(
                                kind, height, tile, gates, hidden, hidden, entries, x, grads_row, sums, row, live
                            )
                        if work.resets:
                            for b in range(first, first + live):
                                if resets[at_step + b]:
                                    for j in range(begin, end):
                                        dh[b * row + mine + j] = 0
                                        if cell == "lstm":
                                            dc[b * hidden + j] = 0
                if step < length and not wrong:
                    t, t_before = (step, step + 1) if work.reverse else (length - 1 - step, length - 2 - step)
                    at_step, live = _rows_of(work.offsets, offsets, t, batch, first, group)
                    at_before_step, live_before = np.int64(0), np.int64(0)
                    if 0 <= t_before < length:
                        at_before_step, live_before = _rows_of(work.offsets, offsets, t_before, batch, 0, batch)
                    for b in range(first, first + live):
                        at_row = (at_step + b) * hidden
                        before, at_before = states, (at_before_step + b) * hidden
                        if b >= live_before:
                            before, at_before = initial, b * hidden
                        if work.resets and resets[at_step + b]:
                            before, at_before = zeros, np.int64(0)
                        at_grad = (at_step + b) * work.grad_row
                        at_gates, at_before, at_grad = at_row * gates + begin, at_before + begin, at_grad + begin
                        at_grads, at_row = at_row * width + begin, at_row + begin
                        inputs = pre, at_gates, candidate, before, at_before, cells, at_row, grad_output, at_grad
                        outputs = dh, b * row + part * part_row, dc, b * hidden + begin, grads, at_grads
                        for j in range(end - begin):
                            unit(j, hidden, inputs, outputs)
                finish_part(progress, parts)
                step, part = claim_part(progress, parts, own, length + 1)
            if wrong:
                work.not_finite = 1
            task = take_task(address)

    return run
