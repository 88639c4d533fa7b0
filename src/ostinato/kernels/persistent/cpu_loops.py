# mypy: disable-error-code="no-untyped-def"
"""Loops over time for recurrent layers on the CPU, compiled by Numba: forward and backward, dense and pruned.

The batch is divided into chunks of sequences, each of which one thread takes through all steps: no step waits for
another thread.  Where there are fewer sequences than threads, the hidden units of all are divided into parts instead,
one a thread, which keeps that part of the weights in its cache; a barrier separates the steps (``cpu_barrier.py``).

A step multiplies the recurrent weights with the states of a chunk and computes the gates, fused.  Dense weights are
packed in panels, (panels, K, rows): the sums of a panel's rows for a tile of sequences stay in registers for all K.
Pruned ones are the entries of ``cpu_entries.py``.  How the work is divided never changes a result: the order of each
sum is fixed.
"""

import ctypes
import functools
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from ostinato.kernels.numba_loops import (
    LINE,
    compiled_loop,
    inline,
    inline_options,
    inline_with_constants,
    integers,
    offset,
    pointer_to,
    prefetch,
    streams,
    take_task,
)
from ostinato.kernels.numba_math import cast, multiply_add, sigmoids, tanh_slope
from ostinato.kernels.persistent.cpu_barrier import COUNTERS, arrive, claim_part, finish_part
from ostinato.kernels.persistent.plan import GATES

TILES = (1, 2, 4, 8)  # sequences whose sums are computed together
BLOCK_WIDTH = 4  # columns of blocks whose rows are read as vectors
CHAINS = 4  # independent partial sums of a pruned row or tile, which hide the latency of additions


@functools.cache
def vectors_of(tile: int) -> int:
    """The vectors of rows in a panel, such that its sums for a tile fill the registers.

    AVX-512 and NEON have 32 registers, AVX2 has 16; some of them hold weights and states.
    """
    features = binding.get_host_cpu_features()
    sums = 8 if features.get("avx") and not features.get("avx512f") else 16
    return max(1, min(8, sums // tile))


def panel_rows(dtype: type, tile: int) -> int:
    return vectors_of(tile) * (LINE // np.dtype(dtype).itemsize)


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
        *(*_BOTH, "pre", "candidate", "h_prev", "cells", "c0", "zeros", "grad_output", "grad_row"),
        *("dh", "dc", "grads"),
    )


_FORWARD, _BACKWARD = np.dtype(ForwardWork), np.dtype(BackwardWork)

_load, _store = streams(
    *("p0", "p1", "p2", "p3", "s0", "s1", "s2", "s3", "h", "c", "out", "kept"),
    *("q", "before", "grad", "dh", "dc", "g0", "g1", "g2", "g3"),
)


@intrinsic(prefer_literal=True)
def _add_panel(typing_context, weights, count, x, x_b, out, out_b, live, vectors, tile):
    """``out[b, i] += sum_k weights[k, i] * x[b, k]`` for a panel's rows i and the `live` of a tile of sequences b.

    The sums stay in registers: a loop over memory would store them.  Those beyond the live sequences are computed from
    the last live one and dropped.
    """
    many, sequences = vectors.literal_value, tile.literal_value

    def generate(context, builder, signature, arguments):
        weights, count, x, x_b, out, out_b, live = arguments[:7]
        int32, int64 = ir.IntType(32), ir.IntType(64)
        number = context.get_value_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(number)
        width = LINE // size
        vector = ir.VectorType(number, width)
        name = f"llvm.fma.v{width}f{8 * size}"
        fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
        everywhere = ir.Constant(ir.VectorType(int32, width), [0] * width)

        def vector_at(pointer, index):
            return builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())

        last = builder.sub(live, int64(1))
        which = [
            builder.select(builder.icmp_signed("<", int64(b), live), int64(b), last) if b else int64(0)
            for b in range(sequences)
        ]
        rows = [builder.gep(x, [builder.mul(x_b, b)]) for b in which]
        sums = []
        for b in which:
            begin = builder.gep(out, [builder.mul(out_b, b)])
            first = [builder.load(vector_at(begin, int64(v * width)), align=size) for v in range(many)]
            sums.append([cgutils.alloca_once_value(builder, value) for value in first])
        with cgutils.for_range(builder, count, intp=int64) as loop:
            at = builder.mul(loop.index, int64(many * width))
            panel = [
                builder.load(vector_at(weights, builder.add(at, int64(v * width))), align=size) for v in range(many)
            ]
            for row, totals in zip(rows, sums, strict=True):
                one = builder.load(builder.gep(row, [loop.index]))
                one = builder.insert_element(ir.Constant(vector, ir.Undefined), one, int32(0))
                one = builder.shuffle_vector(one, one, everywhere)
                for weight, total in zip(panel, totals, strict=True):
                    builder.store(builder.call(fused, [weight, one, builder.load(total)]), total)
        for b, totals in enumerate(sums):
            with builder.if_then(builder.icmp_signed("<", int64(b), live)):
                end = builder.gep(out, [builder.mul(out_b, int64(b))])
                for v, total in enumerate(totals):
                    builder.store(builder.load(total), vector_at(end, int64(v * width)), align=size)
        return context.get_dummy_value()

    return types.void(*(weights, types.int64) * 3, types.int64, vectors, tile), generate


@intrinsic(prefer_literal=True)
def _add_slice(
    typing_context,
    values,
    places,
    stride,
    last_place,
    columns,
    begin,
    end,
    x,
    x_b,
    out,
    out_b,
    live,
    kind,
    height,
    tile,
):
    """Entries of pruned weights times the `live` of a tile of sequences b, for the kinds of ``cpu_entries.py``:

    shared: ``out[b, i] += sum_k values[k, i] * x[b, columns[k]]``
    own:    ``out[b, i]  = sum_k values[k, i] * x[b, columns[k, i]]``
    dots:   ``out[b]    += sum_k sum_i values[k, i] * x[b, columns[k] + i]``

    If places are integers, values are the whole matrix, and entry k has the weights at ``places[k, i]``, 0 where that
    is below 0; of "shared" those at ``places[k] + i * stride``, up to the last: rows beyond it add to sums that nobody
    reads.  Read so, the entries of a block's columns can be one, of kind "blocks":

    blocks: ``out[i]    += sum_k sum_j values[places[k] + i * stride + j] * x[columns[k] + j]``
    """
    direct = isinstance(places.dtype, types.Integer)
    what, rows, sequences = kind.literal_value, height.literal_value, tile.literal_value

    def generate(context, builder, signature, arguments):
        values, places, stride, last_place, columns, begin, end, x, x_b, out, out_b, live = arguments[:12]
        int32, int64 = ir.IntType(32), ir.IntType(64)
        number = context.get_value_type(signature.args[0].dtype)
        vector = ir.VectorType(number, rows)
        size = context.get_abi_sizeof(number)
        name = f"llvm.fma.v{rows}f{8 * size}"
        fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
        zero = ir.Constant(vector, [0.0] * rows)

        def vector_at(pointer, index, kind=vector):
            return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())

        def weights(k):
            """Entry k."""
            first = builder.mul(k, int64(rows))
            if not direct:
                return builder.load(vector_at(values, first), align=size)
            result = ir.Constant(vector, ir.Undefined)
            if what == "shared":
                start = builder.sext(builder.load(builder.gep(places, [k])), int64)
                for i in range(rows):
                    place = builder.add(start, builder.mul(stride, int64(i)))
                    place = builder.select(builder.icmp_signed(">", place, last_place), last_place, place)
                    one = builder.load(builder.gep(values, [place]))
                    result = builder.insert_element(result, one, int32(i))
                return result
            for i in range(rows):
                place = builder.load(builder.gep(places, [builder.add(first, int64(i))]))
                place = builder.select(builder.icmp_signed("<", place, int32(0)), int32(0), place)
                one = builder.load(builder.gep(values, [builder.sext(place, int64)]))
                result = builder.insert_element(result, one, int32(i))
            indices = ir.VectorType(int32, rows)
            absent = builder.load(vector_at(places, first, indices), align=4)
            absent = builder.icmp_signed("<", absent, ir.Constant(indices, [0] * rows))
            return builder.select(absent, zero, result)

        def column(index):
            return builder.sext(builder.load(builder.gep(columns, [index])), int64)

        def states(k, row):
            """The vector of states that entry k is multiplied with."""
            if what == "dots":
                return builder.load(vector_at(row, column(k)), align=size)
            result = ir.Constant(vector, ir.Undefined)
            for i in range(rows if what == "own" else 1):
                at = builder.add(builder.mul(k, int64(rows)), int64(i)) if what == "own" else k
                result = builder.insert_element(result, builder.load(builder.gep(row, [column(at)])), int32(i))
            if what == "own":
                return result
            return builder.shuffle_vector(result, result, ir.Constant(ir.VectorType(int32, rows), [0] * rows))

        def add_blocks():
            """A vector of sums for each row, whose lanes are added at the end."""
            part = ir.VectorType(number, BLOCK_WIDTH)
            name = f"llvm.fma.v{BLOCK_WIDTH}f{8 * size}"
            fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(part, [part] * 3), name)
            nothing = ir.Constant(part, [0.0] * BLOCK_WIDTH)
            sums = [cgutils.alloca_once_value(builder, nothing) for _ in range(rows)]
            last = builder.sub(last_place, int64(BLOCK_WIDTH - 1))
            with cgutils.for_range_slice(builder, begin, end, int64(1), int64) as (k, _):
                start = builder.sext(builder.load(builder.gep(places, [k])), int64)
                states = builder.load(vector_at(x, column(k), part), align=size)
                for i, total in enumerate(sums):
                    place = builder.add(start, builder.mul(stride, int64(i)))
                    place = builder.select(builder.icmp_signed(">", place, last), last, place)
                    block_row = builder.load(vector_at(values, place, part), align=size)
                    builder.store(builder.call(fused, [block_row, states, builder.load(total)]), total)
            for i, total in enumerate(sums):
                target, lanes = builder.gep(out, [int64(i)]), builder.load(total)
                lanes = [builder.extract_element(lanes, int32(j)) for j in range(BLOCK_WIDTH)]
                while len(lanes) > 1:
                    lanes = [builder.fadd(y, z) for y, z in zip(lanes[::2], lanes[1::2], strict=True)]
                builder.store(builder.fadd(lanes[0], builder.load(target)), target)

        if what == "blocks":
            add_blocks()
            return context.get_dummy_value()

        last = builder.sub(live, int64(1))
        which = [builder.select(builder.icmp_signed("<", int64(b), live), int64(b), last) for b in range(sequences)]
        x_rows = [builder.gep(x, [builder.mul(x_b, b)]) for b in which]
        chains = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(sequences)] for _ in range(CHAINS // sequences)
        ]

        def add(k, sums):
            entry = weights(k)
            for row, total in zip(x_rows, sums, strict=True):
                builder.store(builder.call(fused, [entry, states(k, row), builder.load(total)]), total)

        many = int64(len(chains))
        odd = builder.sub(end, builder.srem(builder.sub(end, begin), many))
        with cgutils.for_range_slice(builder, begin, odd, many, int64) as (k, _):
            for ahead, sums in enumerate(chains):
                add(builder.add(k, int64(ahead)), sums)
        with cgutils.for_range_slice(builder, odd, end, int64(1), int64) as (k, _):
            add(k, chains[0])
        for b in range(sequences):
            with builder.if_then(builder.icmp_signed("<", int64(b), live)):
                target = builder.gep(out, [builder.mul(out_b, int64(b))])
                parts = [builder.load(sums[b]) for sums in chains]
                while len(parts) > 1:
                    parts = [builder.fadd(y, z) for y, z in zip(parts[::2], parts[1::2], strict=True)]
                (total,) = parts
                if what == "dots":
                    lanes = [builder.extract_element(total, int32(i)) for i in range(rows)]
                    while len(lanes) > 1:  # halves onto each other, which stay vectors
                        half = len(lanes) // 2
                        lanes = [builder.fadd(y, z) for y, z in zip(lanes[:half], lanes[half:], strict=True)]
                    builder.store(builder.fadd(lanes[0], builder.load(target)), target)
                else:
                    place = vector_at(target, int64(0))
                    if what == "shared":
                        total = builder.fadd(total, builder.load(place, align=size))
                    builder.store(total, place, align=size)
        return context.get_dummy_value()

    integer = types.int64
    arrays = values, places, integer, integer, columns, integer, integer, values, integer, values, integer
    return types.void(*arrays, integer, kind, height, tile), generate


@inline_with_constants
def _add_panels(vectors, rows, tile, panels, count, weights, x, x_b, sums, row, live):
    """Add the product of dense weights with the `count` numbers x of `live` sequences to the sums of each."""
    for panel in range(panels):
        panel_weights = offset(weights, panel * rows * count)
        for b in range(0, live, tile):
            out = offset(sums, b * row + panel * rows)
            _add_panel(panel_weights, count, offset(x, b * x_b), x_b, out, row, live - b, vectors, tile)


def _weight_at(values, places, index):
    """``values[places[index]]``, or 0 where that place is below 0; ``places[index]`` if places are weights."""


@overload(_weight_at, jit_options=inline_options)
def _weight_at_of(values, places, index):
    if isinstance(places.dtype, types.Float):
        return lambda values, places, index: _load(places, index, "p0")

    def look_up(values, places, index):
        place = places[index]
        return values[place] if place >= 0 else cast(0.0, values[0])

    return look_up


@inline_with_constants
def add_entries(kind, height, tile, gates, hidden, inputs, entries, x, x_b, sums, row, live):
    """The same with pruned weights; the sums of kind "own" are computed at the end of a row, then scattered.

    The diagonal is that of a square matrix only: `inputs` is the number of columns.
    """
    values, places, columns, starts, rows, slices, diagonal, padded = entries
    spare, last = row - height, gates * hidden * inputs - 1
    for s in range(slices):
        for b in range(0, live, tile):
            out = offset(sums, b * row + (spare if kind == "own" else s if kind == "dots" else s * height))
            states = offset(x, b * x_b)
            begin, end = starts[s], starts[s + 1]
            rest = live - b
            _add_slice(
                values, places, inputs, last, columns, begin, end, states, x_b, out, row, rest, kind, height, tile
            )
        if kind == "own":
            for b in range(live):
                for i in range(height):
                    sums[b * row + rows[s * height + i]] += sums[b * row + spare + i]
    if kind != "own" and inputs == hidden:
        for b in range(live):
            for g in range(gates):
                at, at_x = b * row, b * x_b
                if kind == "dots":
                    at_x += g * hidden
                else:
                    at += g * padded
                for j in range(hidden):
                    weight = _weight_at(values, diagonal, g * padded + j)
                    new = multiply_add(weight, _load(x, at_x + j, "h"), _load(sums, at + j, "dh"))
                    _store(sums, at + j, new, "dh")


@inline
def are_finite(x, begin, end, largest):
    wrong = 0
    for j in range(begin, end):
        wrong += 0 if abs(x[j]) <= largest else 1
    return wrong == 0


@inline
def _relu(x):
    return cast(0.0, x) if x < 0 else x


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
            _store(sums, at + g * padded + j, _load(bias, g * hidden + j, "p0"), "s0")


# One unit of one sequence.  `arrays` are pointers and the offsets of their rows; gates are `pitch` apart in a row, and
# `padded` apart in the sums.


@inline
def forward_unit(cell, keep, j, pitch, padded, arrays):
    projected, at_p, sums, at_s, h, c, at, output, kept, at_out = arrays
    x0 = _load(projected, at_p + j, "p0") + _load(sums, at_s + j, "s0")
    if cell == "rnn_tanh":
        new = tanh_slope(x0)[0]
    elif cell == "rnn_relu":
        new = _relu(x0)
    else:
        x1 = _load(projected, at_p + pitch + j, "p1") + _load(sums, at_s + padded + j, "s1")
        p2, s2 = _load(projected, at_p + 2 * pitch + j, "p2"), _load(sums, at_s + 2 * padded + j, "s2")
        if keep:
            _store(projected, at_p + j, x0, "p0")
            _store(projected, at_p + pitch + j, x1, "p1")
        if cell == "gru":
            n = tanh_slope(multiply_add(sigmoids(x0)[0], s2, p2))[0]
            new = multiply_add(sigmoids(x1)[0], _load(h, at + j, "h") - n, n)
            if keep:
                _store(kept, at_out + j, s2, "kept")
        else:
            x3 = _load(projected, at_p + 3 * pitch + j, "p3") + _load(sums, at_s + 3 * padded + j, "s3")
            added = sigmoids(x0)[0] * tanh_slope(p2 + s2)[0]
            c_j = multiply_add(sigmoids(x1)[0], _load(c, at + j, "c"), added)
            _store(c, at + j, c_j, "c")
            new = sigmoids(x3)[0] * tanh_slope(c_j)[0]
            if keep:
                _store(projected, at_p + 2 * pitch + j, p2 + s2, "p2")
                _store(projected, at_p + 3 * pitch + j, x3, "p3")
                _store(kept, at_out + j, c_j, "kept")
    _store(h, at + j, new, "h")
    _store(output, at_out + j, new, "out")


@functools.cache
def forward(dtype: type, cell: str, keep: bool, kind: str, height: int, tile: int, shared: bool) -> Any:
    """The forward loop for weights that are "dense", or entries of a kind and height.

    h and c hold the initial state, then the last one.  For the backward, ``keep`` leaves the gates' pre-activations in
    `projected`, of a GRU's n only the input's part, and in `kept` an LSTM's c or the other part of a GRU's n.
    """
    gates, vectors, panel, largest = GATES[cell], vectors_of(tile), panel_rows(dtype, tile), dtype(np.finfo(dtype).max)

    @compiled_loop
    def run(address):
        work = carray(address, 1, _FORWARD)[0]
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
                        _add_panels(vectors, panel, tile, many, hidden, part_weights, x, hidden, part_sums, row, live)
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
                            forward_unit(cell, keep, j, hidden, padded, arrays)
                        if parts > 1:
                            next_shown = ((step + 1) % 2 * batch + b) * hidden
                            for j in range(begin, end):
                                _store(shown, next_shown + j, _load(h, at + j, "h"), "before")
                    if kind != "dense":
                        wrong = not are_finite(h, first * hidden, (first + live) * hidden, largest)
                finish_part(progress, parts)
                step, part = claim_part(progress, parts, own, length)
            if wrong:
                work.not_finite = 1
            task = take_task(address)

    return run


@inline
def _backward_unit(cell, j, hidden, inputs, outputs):
    """The gradients of the gates' pre-activations; dh keeps the part that does not pass through the weights.

    For an RNN, `pre` is its output.
    """
    pre, at_pre, candidate, before, at_before, cells, at_row, grad, at_grad = inputs
    dh, at_dh, dc, at_dc, grads, at = outputs
    x0, zero = _load(pre, at_pre + j, "p0"), cast(0.0, _load(pre, at_pre + j, "p0"))
    d = _load(dh, at_dh + j, "dh") + _load(grad, at_grad + j, "grad")
    if cell == "rnn_tanh":
        _store(grads, at + j, multiply_add(-d * x0, x0, d), "g0")
        past = zero
    elif cell == "rnn_relu":
        _store(grads, at + j, zero if x0 <= 0 else d, "g0")
        past = zero
    else:
        x1, x2 = _load(pre, at_pre + hidden + j, "p1"), _load(pre, at_pre + 2 * hidden + j, "p2")
        if cell == "gru":
            q = _load(candidate, at_row + j, "q")
            r, not_r = sigmoids(x0)
            z, not_z = sigmoids(x1)
            n, slope = tanh_slope(multiply_add(r, q, x2))
            d_n = d * not_z * slope
            _store(grads, at + j, d_n * r, "g0")
            _store(grads, at + hidden + j, d_n * q * (r * not_r), "g1")
            _store(grads, at + 2 * hidden + j, d * (_load(before, at_before + j, "before") - n) * (z * not_z), "g2")
            _store(grads, at + 3 * hidden + j, d_n, "g3")
            past = d * z
        else:
            i, not_i = sigmoids(x0)
            f, not_f = sigmoids(x1)
            g, slope_g = tanh_slope(x2)
            o, not_o = sigmoids(_load(pre, at_pre + 3 * hidden + j, "p3"))
            tanh_c, slope_c = tanh_slope(_load(cells, at_row + j, "c"))
            d_c = multiply_add(d * o, slope_c, _load(dc, at_dc + j, "dc"))
            _store(grads, at + j, d_c * g * (i * not_i), "g0")
            _store(grads, at + hidden + j, d_c * _load(before, at_before + j, "before") * (f * not_f), "g1")
            _store(grads, at + 2 * hidden + j, d_c * i * slope_g, "g2")
            _store(grads, at + 3 * hidden + j, d * tanh_c * (o * not_o), "g3")
            _store(dc, at_dc + j, d_c * f, "dc")
            past = zero
    _store(dh, at_dh + j, past, "dh")


@functools.cache
def backward(dtype: type, cell: str, kind: str, height: int, tile: int, shared: bool) -> Any:
    """The backward loop; dh and dc hold the last state's gradients, then the initial state's."""
    gates, vectors, panel, largest = GATES[cell], vectors_of(tile), panel_rows(dtype, tile), dtype(np.finfo(dtype).max)
    width = 1 if gates == 1 else 4  # gradients of a unit

    @compiled_loop
    def run(address):
        work = carray(address, 1, _BACKWARD)[0]
        offsets, weights = pointer_to(work.offsets, np.int32), pointer_to(work.weights, dtype)
        resets, zeros = pointer_to(work.resets, np.uint8), pointer_to(work.zeros, dtype)
        pre, candidate = pointer_to(work.pre, dtype), pointer_to(work.candidate, dtype)
        h_prev, cells, c0 = pointer_to(work.h_prev, dtype), pointer_to(work.cells, dtype), pointer_to(work.c0, dtype)
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
                            _add_panels(
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
                        before, at_before = h_prev, at_row
                        if cell == "lstm":
                            before, at_before = cells, (at_before_step + b) * hidden
                            if b >= live_before:
                                before, at_before = c0, b * hidden
                            if work.resets and resets[at_step + b]:
                                before, at_before = zeros, np.int64(0)
                        at_grad = (at_step + b) * work.grad_row
                        at_gates, at_before, at_grad = at_row * gates + begin, at_before + begin, at_grad + begin
                        at_grads, at_row = at_row * width + begin, at_row + begin
                        inputs = pre, at_gates, candidate, before, at_before, cells, at_row, grad_output, at_grad
                        outputs = dh, b * row + part * part_row, dc, b * hidden + begin, grads, at_grads
                        for j in range(end - begin):
                            _backward_unit(cell, j, hidden, inputs, outputs)
                finish_part(progress, parts)
                step, part = claim_part(progress, parts, own, length + 1)
            if wrong:
                work.not_finite = 1
            task = take_task(address)

    return run
