# mypy: disable-error-code="no-untyped-def"
"""The loop of one step of a layer, which computes both products and the gates."""

import ctypes
import functools
from typing import Any

import numpy as np

from ostinato.kernels.cpu.compiler import compiled_loop, inline
from ostinato.kernels.cpu.intrinsics import integers, offset, pointer_to, structure_at, take_task
from ostinato.kernels.persistent.cpu.cells import FORWARD_UNIT
from ostinato.kernels.persistent.cpu.products import are_finite, multiply_rows
from ostinato.kernels.persistent.cpu.pruned import entries_adder
from ostinato.kernels.persistent.plan import GATES


class MatrixWork(ctypes.Structure):
    """The part of the loop's argument structure for one matrix: the sizes and addresses of its entries, if any.

    `places` and `diagonal` are int32 indices of the entries' weights, negative for none, or the weights themselves.
    """

    _fields_ = integers("row", "padded", "places", "columns", "starts", "rows", "slices", "diagonal")


class Work(ctypes.Structure):
    """The loop's argument structure: sizes, addresses, and the formats of both matrices."""

    _fields_ = [
        *integers("next_task", "tasks", "group", "batch", "hidden", "inputs", "not_finite"),
        *integers("x", "h", "new_h", "c", "new_c", "output", "projected", "sums", "kept"),
        *integers("weights_ih", "bias_ih", "weights_hh", "bias_hh"),
        *(("ih", MatrixWork), ("hh", MatrixWork)),
    ]


_WORK = np.dtype(Work)


@functools.cache
def _product(dtype: type, gates: int, kind: str, height: int, packed: bool) -> Any:
    """A function that sets the sums of some units' gates to their biases plus products with x.

    With pruned weights, it sets the sums of all units.
    """
    place = dtype if packed else np.int32
    if kind == "dense":

        @inline
        def multiply(work, how, weights, bias, x, count, sums, begin, end):
            hidden, batch, row, padded = work.hidden, work.batch, how.row, how.padded
            for g in range(gates):
                gate_weights, out = offset(weights, g * hidden * count), offset(sums, g * padded)
                multiply_rows(gate_weights, offset(bias, g * hidden), begin, end, count, x, batch, out, row)

    else:
        add_entries = entries_adder(kind, height, 1, gates, not packed)

        @inline
        def multiply(work, how, weights, bias, x, count, sums, begin, end):
            hidden, padded = work.hidden, how.padded
            places, diagonal = pointer_to(how.places, place), pointer_to(how.diagonal, place)
            columns, starts = pointer_to(how.columns, np.int32), pointer_to(how.starts, np.int64)
            rows = pointer_to(how.rows, np.int64)
            matrix = weights, places, columns, starts, rows, how.slices, diagonal, padded
            for b in range(work.batch):
                out = offset(sums, b * how.row)
                for g in range(gates):
                    for j in range(hidden):
                        out[g * padded + j] = bias[g * hidden + j]
                add_entries(matrix, hidden, count, offset(x, b * count), count, out, how.row, 1)

    return multiply


@functools.cache
def step_loop(
    dtype: type, cell: str, kind_ih: str, height_ih: int, kind_hh: str, height_hh: int, packed: bool, keep: bool = False
) -> Any:
    """The compiled loop.  Cells without c have the addresses of h for it; if `packed`, places are weights themselves.

    For the gradients, ``keep`` leaves in `projected` and `kept` what ``loops.forward`` does, and an RNN's new h.
    """
    unit, largest = FORWARD_UNIT[cell], dtype(np.finfo(dtype).max)
    multiply_x = _product(dtype, GATES[cell], kind_ih, height_ih, packed)
    multiply_h = _product(dtype, GATES[cell], kind_hh, height_hh, packed)

    @compiled_loop
    def run(address):
        work = structure_at(address, _WORK)
        x, h = pointer_to(work.x, dtype), pointer_to(work.h, dtype)
        c, new_h, new_c = pointer_to(work.c, dtype), pointer_to(work.new_h, dtype), pointer_to(work.new_c, dtype)
        output, kept = pointer_to(work.output, dtype), pointer_to(work.kept, dtype)
        projected, sums = pointer_to(work.projected, dtype), pointer_to(work.sums, dtype)
        batch, hidden, inputs, ih, hh = work.batch, work.hidden, work.inputs, work.ih, work.hh
        # Read once: a store might change them, which would keep the gates from being vectorised.
        row_ih, row_hh, padded_ih, padded_hh = ih.row, hh.row, ih.padded, hh.padded
        weights_ih, bias_ih = pointer_to(work.weights_ih, dtype), pointer_to(work.bias_ih, dtype)
        weights_hh, bias_hh = pointer_to(work.weights_hh, dtype), pointer_to(work.bias_hh, dtype)
        wrong = kind_ih != "dense" and not are_finite(x, 0, batch * inputs, largest)
        wrong |= kind_hh != "dense" and not are_finite(h, 0, batch * hidden, largest)
        if wrong:
            work.not_finite = 1
        task = take_task(address)
        while task < work.tasks and not wrong:
            begin = task * work.group
            end = min(begin + work.group, hidden)
            multiply_x(work, ih, weights_ih, bias_ih, x, inputs, projected, begin, end)
            multiply_h(work, hh, weights_hh, bias_hh, h, hidden, sums, begin, end)
            for b in range(batch):
                at = b * hidden
                arrays = projected, b * row_ih, sums, b * row_hh, new_h, new_c, at, output, kept, at
                for j in range(begin, end):  # a loop of its own, or the gates would not be vectorised
                    new_c[at + j] = c[at + j]
                    new_h[at + j] = h[at + j]
                for j in range(begin, end):
                    unit(keep, j, padded_ih, padded_hh, arrays)
            task = take_task(address)

    return run
