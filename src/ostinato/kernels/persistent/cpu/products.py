# mypy: disable-error-code="no-untyped-def"
"""Products of dense weights in the CPU's loops, in registers: written in LLVM's instructions for Numba.

For the states, weights are read in panels, packed for many steps, or in rows, where the parameters are; for the
gradients of a step, where those are, too.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ostinato.kernels.numba_loops import LINE, inline, offset, shared

TILES = (1, 2, 4, 8)  # sequences whose sums are computed together
_FEATURES = binding.get_host_cpu_features()
REGISTER = 64 if _FEATURES.get("avx512f") else 32 if _FEATURES.get("avx") else 16  # bytes of a vector register
FEW = REGISTER == 32  # AVX2 has 16 of them, AVX-512 and NEON have 32
# Of unpacked weights, the rows whose sums are made together: with one sequence, and with two.
ROWS, ROWS_OF_TWO = 8, 4 if FEW else 8
COMBINED, VECTORS = 4, 2 if FEW else 4  # rows of a combination, and vectors of its columns


def fused_multiply_add(builder, kind, size):
    """LLVM's function of three numbers of `size` bytes, or of three vectors of such."""
    lanes = f"v{kind.count}" if isinstance(kind, ir.VectorType) else ""
    function = ir.FunctionType(kind, [kind] * 3)
    return cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.{lanes}f{8 * size}")


@functools.cache
def vectors_of(tile: int) -> int:
    """The vectors of rows in a panel, such that its sums for a tile fill the registers but for weights and states."""
    return max(1, min(8, (8 if FEW else 16) // tile))


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


@functools.cache
def _dots(many: int, tile: int) -> Any:
    """``dots(weights, bias, first, last, count, x, out, row)``, compiled for so many rows and sequences.

    ``out[b, i] = bias[i] + sum_k weights[i, k] * x[b, k]`` for `many` rows i from `first` on; beyond `last` that row's
    results are repeated.  The sums stay in registers, and are added up in an order that depends on neither number.
    """

    def generate(context, builder, signature, arguments):
        weights, bias, first, last, count, x, out, row = arguments
        int32, int64 = ir.IntType(32), ir.IntType(64)
        number = context.get_value_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(number)
        width = REGISTER // size
        vector, column = ir.VectorType(number, width), ir.VectorType(number, many)
        wide, tall = (fused_multiply_add(builder, kind, size) for kind in (vector, column))

        def element(pointer, index):
            return builder.load(builder.gep(pointer, [index]))

        def at(pointer, index, kind):
            return builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer())

        def column_of(numbers):
            values = ir.Constant(column, ir.Undefined)
            for i, value in enumerate(numbers):
                values = builder.insert_element(values, value, int32(i))
            return values

        def halves_added(some):
            """One vector of one or two, in which the lanes of each row are half as many."""
            values, rows = zip(*some, strict=True)
            lanes = values[0].type.count
            length = lanes // len(rows[0])
            parts = [(n * lanes + i * length, own[i]) for i in range(len(rows[0])) for n, own in enumerate(rows)]
            halves = []
            for begin in (0, length // 2):
                which = [part + begin + lane for part, _ in parts for lane in range(length // 2)]
                mask = ir.Constant(ir.VectorType(int32, len(which)), which)
                halves.append(builder.shuffle_vector(values[0], values[-1], mask))
            return builder.fadd(*halves), [row for _, row in parts]

        which = [builder.add(first, int64(i)) for i in range(many)]
        which = [builder.select(builder.icmp_signed("<", i, last), i, last) for i in which]
        starts = [builder.gep(weights, [builder.mul(i, count)]) for i in which]
        states = [builder.gep(x, [builder.mul(count, int64(b))]) for b in range(tile)]
        zero, begin = ir.Constant(vector, [0.0] * width), column_of([element(bias, i) for i in which])
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in starts] for _ in states]
        rests = [cgutils.alloca_once_value(builder, begin) for _ in states]
        whole = builder.and_(count, int64(-width))
        with cgutils.for_range_slice(builder, int64(0), whole, int64(width), int64) as (k, _):
            some = [builder.load(at(state, k, vector), align=size) for state in states]
            for i, start in enumerate(starts):
                weight = builder.load(at(start, k, vector), align=size)
                for state, totals in zip(some, sums, strict=True):
                    builder.store(builder.call(wide, [weight, state, builder.load(totals[i])]), totals[i])
        with cgutils.for_range_slice(builder, whole, count, int64(1), int64) as (k, _):
            weight = column_of([element(start, k) for start in starts])
            for state, rest in zip(states, rests, strict=True):
                same = column_of([element(state, k)] * many)
                builder.store(builder.call(tall, [weight, same, builder.load(rest)]), rest)
        for b, (totals, rest) in enumerate(zip(sums, rests, strict=True)):
            some = [(builder.load(total), [i]) for i, total in enumerate(totals)]
            while some[0][0].type.count > len(some[0][1]):
                step = -(-len(some) // 2)
                some = [halves_added(some[i::step]) for i in range(step)]
            found = {row: (value, int32(lane)) for value, rows in some for lane, row in enumerate(rows)}
            total = column_of([builder.extract_element(*found[i]) for i in range(many)])
            target = at(out, builder.add(builder.mul(row, int64(b)), first), column)
            builder.store(builder.fadd(total, builder.load(rest)), target, align=size)
        return context.get_dummy_value()

    @intrinsic
    def dots(typing_context, weights, bias, first, last, count, x, out, row):
        return types.void(weights, weights, *(types.int64,) * 3, weights, weights, types.int64), generate

    return dots


_dots_of_one, _dots_of_two = _dots(ROWS, 1), _dots(ROWS_OF_TWO, 2)


@shared
def multiply_rows(weights, bias, begin, end, count, x, batch, out, row):
    """``out[b, i] = bias[i] + sum_k weights[i, k] * x[b, k]`` for rows `begin` to `end` of `count` weights.

    What follows in ``out[b]`` up to a multiple of ROWS is overwritten.
    """
    for first in range(begin, end, ROWS_OF_TWO):
        for b in range(0, batch - 1, 2):
            _dots_of_two(weights, bias, first, end - 1, count, offset(x, b * count), offset(out, b * row), row)
    if batch % 2:
        x, out = offset(x, (batch - 1) * count), offset(out, (batch - 1) * row)
        for first in range(begin, end, ROWS):
            _dots_of_one(weights, bias, first, end - 1, count, x, out, row)


@functools.cache
def _combination(lanes: int) -> Any:
    """``combine(a, a_m, a_n, count, x, x_row, out, out_row, live, fresh)``, compiled for so many columns k.

    ``out[m, k] += sum_n a[m, n] * x[n, k]`` for the first `live` of COMBINED rows m, whose sums stay in registers; if
    `fresh`, they begin at 0.
    """

    def generate(context, builder, signature, arguments):
        a, a_m, a_n, count, x, x_row, out, out_row, live, fresh = arguments
        int32, int64 = ir.IntType(32), ir.IntType(64)
        number = context.get_value_type(signature.args[0].dtype)
        size = context.get_abi_sizeof(number)
        vector = ir.VectorType(number, lanes)
        fused = fused_multiply_add(builder, vector, size)
        unset, everywhere = ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(int32, lanes), [0] * lanes)

        def vector_at(pointer, index):
            return builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())

        last, zero = builder.sub(live, int64(1)), ir.Constant(vector, [0.0] * lanes)
        which = [builder.select(builder.icmp_signed("<", int64(m), live), int64(m), last) for m in range(COMBINED)]
        factors = [builder.gep(a, [builder.mul(m, a_m)]) for m in which]
        targets = [vector_at(out, builder.mul(m, out_row)) for m in which]
        sums = [cgutils.alloca_once_value(builder, zero) for _ in which]
        with builder.if_then(builder.icmp_signed("==", fresh, int64(0))):
            for target, total in zip(targets, sums, strict=True):
                builder.store(builder.load(target, align=size), total)
        with cgutils.for_range(builder, count, intp=int64) as loop:
            some = builder.load(vector_at(x, builder.mul(loop.index, x_row)), align=size)
            at = builder.mul(loop.index, a_n)
            for factor, total in zip(factors, sums, strict=True):
                one = builder.insert_element(unset, builder.load(builder.gep(factor, [at])), int32(0))
                one = builder.shuffle_vector(one, one, everywhere)
                builder.store(builder.call(fused, [one, some, builder.load(total)]), total)
        for target, total in zip(targets, sums, strict=True):
            builder.store(builder.load(total), target, align=size)
        return context.get_dummy_value()

    @intrinsic
    def combine(typing_context, a, a_m, a_n, count, x, x_row, out, out_row, live, fresh):
        return types.void(a, *(types.int64,) * 3, a, types.int64, a, *(types.int64,) * 3), generate

    return combine


@functools.cache
def combiner(dtype: type) -> Any:
    """What adds the product of a matrix a, of any strides, with `count` rows x to some rows and columns of out."""
    width = REGISTER // np.dtype(dtype).itemsize
    wide = VECTORS * width
    combine_wide, combine_vector, combine_one = (_combination(lanes) for lanes in (wide, width, 1))

    @shared
    def combine(a, a_m, a_n, count, x, x_row, out, out_row, rows, columns, fresh):
        for m in range(0, rows, COMBINED):
            own, to, live, k = offset(a, m * a_m), offset(out, m * out_row), rows - m, 0
            for _ in range(columns // wide):
                combine_wide(own, a_m, a_n, count, offset(x, k), x_row, offset(to, k), out_row, live, fresh)
                k += wide
            for _ in range((columns - k) // width):
                combine_vector(own, a_m, a_n, count, offset(x, k), x_row, offset(to, k), out_row, live, fresh)
                k += width
            for j in range(k, columns):
                combine_one(own, a_m, a_n, count, offset(x, j), x_row, offset(to, j), out_row, live, fresh)

    return combine


@inline
def are_finite(x, begin, end, largest):
    wrong = 0
    for j in range(begin, end):
        wrong += 0 if abs(x[j]) <= largest else 1
    return wrong == 0
