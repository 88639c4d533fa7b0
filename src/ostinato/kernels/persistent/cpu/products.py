# mypy: disable-error-code="no-untyped-def"
"""Products of dense weights with states in the CPU's loops, in registers: written in LLVM's instructions for Numba.

Weights are read in panels, packed for many steps, or in rows, where the parameters are.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ostinato.kernels.numba_loops import LINE, inline, offset

TILES = (1, 2, 4, 8)  # sequences whose sums are computed together
ROWS = 8 if binding.get_host_cpu_features().get("avx512f") else 4  # of unpacked weights whose sums are made together


def fused_multiply_add(builder, kind, size):
    """LLVM's function of three numbers of `size` bytes, or of three vectors of such."""
    lanes = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    function = ir.FunctionType(kind, [kind] * 3)
    return cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.{lanes}f{8 * size}")


@functools.cache
def vectors_of(tile: int) -> int:
    """The vectors of rows in a panel, such that its sums for a tile fill the registers.

    AVX-512 and NEON have 32 registers, AVX2 has 16; some of them hold weights and states.
    """
    features = binding.get_host_cpu_features()
    sums = 8 if features.get("avx") and not features.get("avx512f") else 16
    return max(1, min(8, sums // tile))


def panel_rows(dtype: type, tile: int) -> int:
    """The rows of a panel."""
    return vectors_of(tile) * (LINE // np.dtype(dtype).itemsize)


def _panel_adder(tile: int) -> Any:
    """``add_panel(weights, count, x, x_b, out, out_b, live)``, compiled for panels of a tile.

    It adds ``out[b, i] += sum_k weights[k, i] * x[b, k]`` for a panel's rows i and the `live` of a tile of sequences b.
    The sums stay in registers: a loop over memory would store them.  Those beyond the live sequences are computed from
    the last live one and dropped.
    """
    many = vectors_of(tile)

    def generate(context, builder, signature, arguments):
        weights, count, x, x_b, out, out_b, live = arguments
        int32, int64 = ir.IntType(32), ir.IntType(64)
        number = context.get_value_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(number)
        width = LINE // size
        vector = ir.VectorType(number, width)
        fused = fused_multiply_add(builder, vector, size)
        everywhere = ir.Constant(ir.VectorType(int32, width), [0] * width)

        def vector_at(pointer, index):
            return builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())

        last = builder.sub(live, int64(1))
        which = [
            builder.select(builder.icmp_signed("<", int64(b), live), int64(b), last) if b else int64(0)
            for b in range(tile)
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

    @intrinsic
    def add_panel(typing_context, weights, count, x, x_b, out, out_b, live):
        return types.void(*(weights, types.int64) * 3, types.int64), generate

    return add_panel


@functools.cache
def panels_adder(dtype: type, tile: int) -> Any:
    """What adds the product of dense weights in panels with the `count` numbers x of `live` sequences to their sums."""
    rows, add_panel = panel_rows(dtype, tile), _panel_adder(tile)

    @inline
    def add_panels(panels, count, weights, x, x_b, sums, row, live):
        for panel in range(panels):
            panel_weights = offset(weights, panel * rows * count)
            for b in range(0, live, tile):
                out = offset(sums, b * row + panel * rows)
                add_panel(panel_weights, count, offset(x, b * x_b), x_b, out, row, live - b)

    return add_panels


@intrinsic
def _dot_rows(typing_context, weights, bias, first, last, count, x, out):
    """``out[i] = bias[i] + sum_k weights[i, k] * x[k]`` for ROWS rows from `first` on, none after `last`."""

    def generate(context, builder, signature, arguments):
        weights, bias, first, last, count, x, out = arguments
        int32, int64 = ir.IntType(32), ir.IntType(64)
        number = context.get_value_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(number)
        width = LINE // size
        vector = ir.VectorType(number, width)

        def vector_at(pointer, index):
            return builder.load(builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer()), align=size)

        wide, narrow = (fused_multiply_add(builder, kind, size) for kind in (vector, number))
        which = []
        for i in range(ROWS):
            row = builder.add(first, int64(i))
            which.append(builder.select(builder.icmp_signed("<", row, last), row, last))
        starts = [builder.gep(weights, [builder.mul(row, count)]) for row in which]
        sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * width)) for _ in starts]
        rests = [cgutils.alloca_once_value(builder, builder.load(builder.gep(bias, [row]))) for row in which]
        whole = builder.and_(count, int64(-width))
        with cgutils.for_range_slice(builder, int64(0), whole, int64(width), int64) as (k, _):
            some = vector_at(x, k)
            for start, total in zip(starts, sums, strict=True):
                builder.store(builder.call(wide, [vector_at(start, k), some, builder.load(total)]), total)
        with cgutils.for_range_slice(builder, whole, count, int64(1), int64) as (k, _):
            one = builder.load(builder.gep(x, [k]))
            for start, rest in zip(starts, rests, strict=True):
                weight = builder.load(builder.gep(start, [k]))
                builder.store(builder.call(narrow, [weight, one, builder.load(rest)]), rest)
        for row, total, rest in zip(which, sums, rests, strict=True):
            lanes, left = builder.load(total), width
            while left > 1:
                left //= 2
                halves = [
                    builder.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(int32, left), list(which_lanes)))
                    for which_lanes in (range(left), range(left, 2 * left))
                ]
                lanes = builder.fadd(*halves)
            value = builder.fadd(builder.extract_element(lanes, int32(0)), builder.load(rest))
            builder.store(value, builder.gep(out, [row]))
        return context.get_dummy_value()

    return types.void(weights, weights, *(types.int64,) * 3, weights, weights), generate


@inline
def multiply_rows(weights, bias, begin, end, count, x, batch, out, row):
    """``out[b, i] = bias[i] + sum_k weights[i, k] * x[b, k]`` for rows `begin` to `end` of `count` weights."""
    for first in range(begin, end, ROWS):
        for b in range(batch):
            _dot_rows(weights, bias, first, end - 1, count, offset(x, b * count), offset(out, b * row))


@inline
def are_finite(x, begin, end, largest):
    wrong = 0
    for j in range(begin, end):
        wrong += 0 if abs(x[j]) <= largest else 1
    return wrong == 0
