# mypy: disable-error-code="no-untyped-def"
"""Loops over time for dense recurrent layers on the CPU, compiled by Numba: forward and backward.

Sequences are cut into pieces, each of which one thread takes through all steps: no step waits for another thread.
A step is a product of the recurrent weights with the states of a piece, then the gates, fused.  The weights are
packed in panels, (panels, K, rows): the sums of a panel's rows with a tile of sequences stay in registers for all K.
Each sum is made in the order of K, so that neither tiles nor threads change a bit.
"""

import ctypes
import functools
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from ostinato.kernels.numba_loops import (
    LINE,
    cast,
    compiled_loop,
    inline,
    integers,
    multiply_add,
    offset,
    pointer_to,
    sigmoids,
    streams,
    take_piece,
    tanh_slope,
)
from ostinato.kernels.persistent.plan import GATES

TILES = (1, 2, 4, 8)  # sequences whose sums are made together


@functools.cache
def vectors_of(tile: int) -> int:
    """Vectors of rows that a panel has: as many as give each register for sums one, up to half of them for one sequence.

    AVX-512 has 32 registers and so has NEON; AVX2 has 16.  Some are for weights and states.
    """
    features = binding.get_host_cpu_features()
    sums = 8 if features.get("avx") and not features.get("avx512f") else 16
    return max(1, min(8, sums // tile))


def panel_rows(dtype: type, tile: int) -> int:
    return vectors_of(tile) * (LINE // np.dtype(dtype).itemsize)


class ForwardWork(ctypes.Structure):
    """What the forward loop is called with: sizes and addresses.  `weights` are packed by rows, `padded` of them."""

    _fields_ = [
        *integers("next_piece", "pieces", "group", "batch", "length", "hidden", "padded", "reverse"),
        *integers("offsets", "weights", "bias", "projected", "sums", "h", "c", "output", "kept"),
    ]


class BackwardWork(ctypes.Structure):
    """What the backward loop is called with.  `weights` are packed by columns, `padded` of them, as are dh's rows."""

    _fields_ = [
        *integers("next_piece", "pieces", "group", "batch", "length", "hidden", "padded", "reverse"),
        *integers("offsets", "weights", "pre", "candidate", "h_prev", "cells", "c0", "grad_output", "grad_row"),
        *integers("dh", "dc", "grads"),
    ]


_FORWARD, _BACKWARD = np.dtype(ForwardWork), np.dtype(BackwardWork)

_load, _store = streams(
    *("p0", "p1", "p2", "p3", "s0", "s1", "s2", "s3", "h", "c", "out", "kept"),
    *("q", "before", "grad", "dh", "dc", "g0", "g1", "g2", "g3"),
)


@intrinsic(prefer_literal=True)
def _multiply(typing_context, weights, count, x, x_b, start, start_b, out, out_b, live, vectors, tile):
    """``out[b, i] = start[b, i] + sum_k weights[k, i] * x[b, k]`` for a panel's rows i and the `live` of a tile b.

    The sums stay in registers: a loop over memory would store them.  Those of sequences that are not live are made
    of the last live one and dropped.
    """
    many, sequences = vectors.literal_value, tile.literal_value

    def generate(context, builder, signature, arguments):
        weights, count, x, x_b, start, start_b, out, out_b, live = arguments[:9]
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
            begin = builder.gep(start, [builder.mul(start_b, b)])
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

    pointers = weights, types.int64, weights, types.int64, weights, types.int64, weights, types.int64
    return types.void(*pointers, types.int64, vectors, tile), generate


@inline
def _relu(x):
    return cast(0.0, x) if x < 0 else x


# One unit of one sequence.  `arrays` are pointers and where their rows begin; the gates of a row lie `hidden` apart.


@inline
def _forward_unit(cell, keep, j, hidden, arrays):
    projected, at_p, sums, at_s, h, c, at, output, kept, at_out = arrays
    x0 = _load(projected, at_p + j, "p0") + _load(sums, at_s + j, "s0")
    if keep:
        _store(projected, at_p + j, x0, "p0")
    if cell == "rnn_tanh":
        new = tanh_slope(x0)[0]
    elif cell == "rnn_relu":
        new = _relu(x0)
    else:
        x1 = _load(projected, at_p + hidden + j, "p1") + _load(sums, at_s + hidden + j, "s1")
        p2, s2 = _load(projected, at_p + 2 * hidden + j, "p2"), _load(sums, at_s + 2 * hidden + j, "s2")
        if keep:
            _store(projected, at_p + hidden + j, x1, "p1")
        if cell == "gru":
            n = tanh_slope(multiply_add(sigmoids(x0)[0], s2, p2))[0]
            new = multiply_add(sigmoids(x1)[0], _load(h, at + j, "h") - n, n)
            if keep:
                _store(kept, at_out + j, s2, "kept")
        else:
            x3 = _load(projected, at_p + 3 * hidden + j, "p3") + _load(sums, at_s + 3 * hidden + j, "s3")
            added = sigmoids(x0)[0] * tanh_slope(p2 + s2)[0]
            c_j = multiply_add(sigmoids(x1)[0], _load(c, at + j, "c"), added)
            _store(c, at + j, c_j, "c")
            new = sigmoids(x3)[0] * tanh_slope(c_j)[0]
            if keep:
                _store(projected, at_p + 2 * hidden + j, p2 + s2, "p2")
                _store(projected, at_p + 3 * hidden + j, x3, "p3")
                _store(kept, at_out + j, c_j, "kept")
    _store(h, at + j, new, "h")
    _store(output, at_out + j, new, "out")


@functools.cache
def forward(dtype: type, cell: str, tile: int, keep: bool) -> Any:
    """h and c hold the initial state, then the last one.

    To keep what the backward needs is to leave the gates' arguments in `projected`, of a GRU's n only the input's
    part, and in `kept` an LSTM's c after every step and the other part of a GRU's n.
    """
    gates, vectors, rows = GATES[cell], vectors_of(tile), panel_rows(dtype, tile)

    @compiled_loop
    def run(address):
        work = carray(address, 1, _FORWARD)[0]
        offsets = pointer_to(work.offsets, np.int32)
        weights, bias = pointer_to(work.weights, dtype), pointer_to(work.bias, dtype)
        projected, sums = pointer_to(work.projected, dtype), pointer_to(work.sums, dtype)
        h, c = pointer_to(work.h, dtype), pointer_to(work.c, dtype)
        output, kept = pointer_to(work.output, dtype), pointer_to(work.kept, dtype)
        batch, length, hidden, padded, group = work.batch, work.length, work.hidden, work.padded, work.group
        piece = take_piece(address)
        while piece < work.pieces:
            first = piece * group
            for step in range(length):
                t = length - 1 - step if work.reverse else step
                row, live = t * batch, min(batch - first, group)
                if work.offsets:
                    row = np.int64(offsets[t])
                    live = min(np.int64(offsets[t + 1]) - row - first, group)
                if live <= 0:
                    continue
                for panel in range(padded // rows):
                    for b in range(0, live, tile):
                        _multiply(
                            offset(weights, panel * rows * hidden),
                            hidden,
                            offset(h, (first + b) * hidden),
                            hidden,
                            offset(bias, panel * rows),
                            0,
                            offset(sums, (first + b) * padded + panel * rows),
                            padded,
                            live - b,
                            vectors,
                            tile,
                        )
                for b in range(first, first + live):
                    at, at_out = b * hidden, (row + b) * hidden
                    arrays = projected, at_out * gates, sums, b * padded, h, c, at, output, kept, at_out
                    for j in range(hidden):
                        _forward_unit(cell, keep, j, hidden, arrays)
            piece = take_piece(address)

    return run


@inline
def _backward_unit(cell, j, hidden, inputs, outputs):
    """The gradients of the gates' arguments; in dh is left what goes back without the weights."""
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
def backward(dtype: type, cell: str, tile: int) -> Any:
    """dh and dc bring the last state's gradients and return the initial state's."""
    gates, vectors, rows = GATES[cell], vectors_of(tile), panel_rows(dtype, tile)
    width = 1 if gates == 1 else 4  # gradients of a unit

    @compiled_loop
    def run(address):
        work = carray(address, 1, _BACKWARD)[0]
        offsets, weights = pointer_to(work.offsets, np.int32), pointer_to(work.weights, dtype)
        pre, candidate = pointer_to(work.pre, dtype), pointer_to(work.candidate, dtype)
        h_prev, cells, c0 = pointer_to(work.h_prev, dtype), pointer_to(work.cells, dtype), pointer_to(work.c0, dtype)
        grad_output, grads = pointer_to(work.grad_output, dtype), pointer_to(work.grads, dtype)
        dh, dc = pointer_to(work.dh, dtype), pointer_to(work.dc, dtype)
        batch, length, hidden, padded, group = work.batch, work.length, work.hidden, work.padded, work.group
        piece = take_piece(address)
        while piece < work.pieces:
            first = piece * group
            for step in range(length):
                t, t_before = (step, step + 1) if work.reverse else (length - 1 - step, length - 2 - step)
                row, live = t * batch, min(batch - first, group)
                row_before, live_before = t_before * batch, batch
                if work.offsets:
                    row = np.int64(offsets[t])
                    live = min(np.int64(offsets[t + 1]) - row - first, group)
                    if 0 <= t_before < length:
                        row_before = np.int64(offsets[t_before])
                        live_before = np.int64(offsets[t_before + 1]) - row_before
                if not 0 <= t_before < length:
                    live_before = 0
                if live <= 0:
                    continue
                for b in range(first, first + live):
                    at_row = (row + b) * hidden
                    before, at_before = h_prev, at_row
                    if cell == "lstm":
                        before, at_before = cells, (row_before + b) * hidden
                        if b >= live_before:
                            before, at_before = c0, b * hidden
                    at_grad = (row + b) * work.grad_row
                    inputs = pre, at_row * gates, candidate, before, at_before, cells, at_row, grad_output, at_grad
                    outputs = dh, b * padded, dc, b * hidden, grads, at_row * width
                    for j in range(hidden):
                        _backward_unit(cell, j, hidden, inputs, outputs)
                for panel in range(padded // rows):
                    for b in range(0, live, tile):
                        at = (first + b) * padded + panel * rows
                        _multiply(
                            offset(weights, panel * rows * gates * hidden),
                            gates * hidden,
                            offset(grads, (row + first + b) * width * hidden),
                            width * hidden,
                            offset(dh, at),
                            padded,
                            offset(dh, at),
                            padded,
                            live - b,
                            vectors,
                            tile,
                        )
            piece = take_piece(address)

    return run
