# mypy: disable-error-code="no-untyped-def"
"""Products of dense weights in the CPU's loops, with sums in registers; written in LLVM's instructions for Numba.

For states, weights are read in panels, packed for many steps, or in rows, directly from the parameters; for the
gradients of a step, also directly.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ostinato.kernels.cpu.compiler import inline, shared
from ostinato.kernels.cpu.intrinsics import LINE, offset

TILES = (1, 2, 3, 4, 5, 6, 8)  # sequences whose sums are computed together
FEATURES = binding.get_host_cpu_features()
REGISTER = 64 if FEATURES.get("avx512f") else 32 if FEATURES.get("avx") else 16  # bytes of a vector register
FEW_REGISTERS = REGISTER == 32  # AVX2 has 16 of them, AVX-512 and NEON have 32
# Rows of unpacked weights whose sums are computed together: with one sequence, and with two.
ROWS, ROWS_OF_TWO = 8, 4 if FEW_REGISTERS else 8
COMBINED, VECTORS = 4, 2 if FEW_REGISTERS else 4  # of a combination: rows, and vectors of columns
INT32, INT64 = ir.IntType(32), ir.IntType(64)


class Vectors:
    """Writes instructions for vectors of an array's type, with so many numbers, `lanes`, or bytes, `size`."""

    def __init__(self, context, builder, array, lanes=None, size=None):
        self.builder = builder
        number = context.get_value_type(array.dtype)
        self.align = context.get_abi_sizeof(number)  # vectors may start at any number
        self.lanes = size // self.align if lanes is None else lanes
        self.type = ir.VectorType(number, self.lanes)
        self.zero = ir.Constant(self.type, [0.0] * self.lanes)
        function, name = ir.FunctionType(self.type, [self.type] * 3), f"llvm.fma.v{self.lanes}f{8 * self.align}"
        self._fused = cgutils.get_or_insert_function(builder.module, function, name)

    def pointer(self, array, index, kind=None):
        """A pointer to the vector that starts at an index of an array."""
        return self.builder.bitcast(self.builder.gep(array, [index]), (kind or self.type).as_pointer())

    def read(self, array, index):
        """The vector that starts at an index of an array."""
        return self.builder.load(self.pointer(array, index), align=self.align)

    def read_one(self, array, index):
        return self.builder.load(self.builder.gep(array, [index]))

    def of(self, numbers):
        """The vector with these numbers."""
        result = ir.Constant(self.type, ir.Undefined)
        for i, number in enumerate(numbers):
            result = self.builder.insert_element(result, number, INT32(i))
        return result

    def filled(self, number):
        """The vector with a number in all lanes."""
        one = self.of([number])
        return self.builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT32, self.lanes), [0] * self.lanes))

    def add_product(self, total, x, y):
        """Add the product of two vectors to a total in memory."""
        self.builder.store(self.builder.call(self._fused, [x, y, self.builder.load(total)]), total)


@functools.cache
def vectors_of(tile: int) -> int:
    """The vectors of rows in a panel: its sums for a tile fill the registers that weights and states leave."""
    return max(1, min(8, (8 if FEW_REGISTERS else 16) // tile))


def panel_rows(dtype: type, tile: int) -> int:
    """The number of rows in a panel."""
    return vectors_of(tile) * (LINE // np.dtype(dtype).itemsize)


def _panel_adder(tile: int) -> Any:
    """``add_panel(weights, count, x, x_b, out, out_b, live)``, compiled for panels of a tile.

    It computes ``out[b, i] += sum_k weights[k, i] * x[b, k]`` for a panel's rows i and a tile's `live` sequences b.
    The sums stay in registers, whereas a loop over memory would store them.  Those beyond the live sequences are
    computed from the last live one and dropped.
    """
    many = vectors_of(tile)

    def generate(context, builder, signature, arguments):
        weights, count, x, x_b, out, out_b, live = arguments
        vectors = Vectors(context, builder, signature.args[0], size=LINE)
        width, align = vectors.lanes, vectors.align
        last = builder.sub(live, INT64(1))
        which = [
            builder.select(builder.icmp_signed("<", INT64(b), live), INT64(b), last) if b else INT64(0)
            for b in range(tile)
        ]
        rows = [builder.gep(x, [builder.mul(x_b, b)]) for b in which]
        sums = []
        for b in which:
            begin = builder.gep(out, [builder.mul(out_b, b)])
            first = [vectors.read(begin, INT64(v * width)) for v in range(many)]
            sums.append([cgutils.alloca_once_value(builder, value) for value in first])
        with cgutils.for_range(builder, count, intp=INT64) as loop:
            at = builder.mul(loop.index, INT64(many * width))
            panel = [vectors.read(weights, builder.add(at, INT64(v * width))) for v in range(many)]
            for row, totals in zip(rows, sums, strict=True):
                state = vectors.filled(vectors.read_one(row, loop.index))
                for weight, total in zip(panel, totals, strict=True):
                    vectors.add_product(total, weight, state)
        for b, totals in enumerate(sums):
            with builder.if_then(builder.icmp_signed("<", INT64(b), live)):
                end = builder.gep(out, [builder.mul(out_b, INT64(b))])
                for v, total in enumerate(totals):
                    builder.store(builder.load(total), vectors.pointer(end, INT64(v * width)), align=align)
        return context.get_dummy_value()

    @intrinsic
    def add_panel(typing_context, weights, count, x, x_b, out, out_b, live):
        return types.void(*(weights, types.int64) * 3, types.int64), generate

    return add_panel


@functools.cache
def panels_adder(dtype: type, tile: int) -> Any:
    """A function that adds the products of panels and the `count` numbers x of `live` sequences to their sums."""
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
    """``dots(weights, bias, first, last, count, x, out, row)``, compiled for `many` rows and a `tile` of sequences.

    ``out[b, i] = bias[i] + sum_k weights[i, k] * x[b, k]`` for `many` rows i from `first` on; beyond `last`, results of
    that row are repeated.  The sums stay in registers, and are added up in an order that depends on neither number.
    """

    def generate(context, builder, signature, arguments):
        weights, bias, first, last, count, x, out, row = arguments
        vectors = Vectors(context, builder, signature.args[0], size=REGISTER)
        columns = Vectors(context, builder, signature.args[0], many)  # one number of each row
        which = [builder.add(first, INT64(i)) for i in range(many)]
        which = [builder.select(builder.icmp_signed("<", i, last), i, last) for i in which]
        starts = [builder.gep(weights, [builder.mul(i, count)]) for i in which]
        states = [builder.gep(x, [builder.mul(count, INT64(b))]) for b in range(tile)]
        begin = columns.of([columns.read_one(bias, i) for i in which])
        sums = [[cgutils.alloca_once_value(builder, vectors.zero) for _ in starts] for _ in states]
        rests = [cgutils.alloca_once_value(builder, begin) for _ in states]
        width = vectors.lanes
        whole = builder.and_(count, INT64(-width))
        with cgutils.for_range_slice(builder, INT64(0), whole, INT64(width), INT64) as (k, _):
            inputs = [vectors.read(state, k) for state in states]
            for i, start in enumerate(starts):
                weight = vectors.read(start, k)
                for state, totals in zip(inputs, sums, strict=True):
                    vectors.add_product(totals[i], weight, state)
        with cgutils.for_range_slice(builder, whole, count, INT64(1), INT64) as (k, _):
            weight = columns.of([columns.read_one(start, k) for start in starts])
            for state, rest in zip(states, rests, strict=True):
                columns.add_product(rest, weight, columns.filled(columns.read_one(state, k)))
        for b, (totals, rest) in enumerate(zip(sums, rests, strict=True)):
            total = columns.of(_sums_of_lanes(builder, [builder.load(total) for total in totals]))
            target = columns.pointer(out, builder.add(builder.mul(row, INT64(b)), first))
            builder.store(builder.fadd(total, builder.load(rest)), target, align=columns.align)
        return context.get_dummy_value()

    @intrinsic
    def dots(typing_context, weights, bias, first, last, count, x, out, row):
        return types.void(weights, weights, *(types.int64,) * 3, weights, weights, types.int64), generate

    return dots


def _sums_of_lanes(builder, vectors):
    """The sum of the lanes of each vector: lanes of two vectors are halved at once, until there is one for each sum."""
    partial = [(vector, [row]) for row, vector in enumerate(vectors)]  # with the rows whose lanes a vector has
    while partial[0][0].type.count > len(partial[0][1]):
        step = -(-len(partial) // 2)
        partial = [_halves_added(builder, partial[i::step]) for i in range(step)]
    sums = {row: (vector, INT32(lane)) for vector, rows in partial for lane, row in enumerate(rows)}
    return [builder.extract_element(*sums[row]) for row in range(len(vectors))]


def _halves_added(builder, partial):
    """Merge one or two vectors into one in which each row has half as many lanes."""
    vectors, rows = zip(*partial, strict=True)
    lanes = vectors[0].type.count
    length = lanes // len(rows[0])
    parts = [
        (n * lanes + i * length, vector_rows[i]) for i in range(len(rows[0])) for n, vector_rows in enumerate(rows)
    ]
    halves = []
    for begin in (0, length // 2):
        which = [part + begin + lane for part, _ in parts for lane in range(length // 2)]
        mask = ir.Constant(ir.VectorType(INT32, len(which)), which)
        halves.append(builder.shuffle_vector(vectors[0], vectors[-1], mask))
    return builder.fadd(*halves), [row for _, row in parts]


_dots_of_one, _dots_of_two = _dots(ROWS, 1), _dots(ROWS_OF_TWO, 2)


@shared
def multiply_rows(weights, bias, begin, end, count, x, batch, out, row):
    """``out[b, i] = bias[i] + sum_k weights[i, k] * x[b, k]`` for rows `begin` to `end` of `count` weights.

    The elements that follow in ``out[b]``, up to a multiple of ROWS, are overwritten.
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
    """``combine(a, a_m, a_n, count, x, x_row, out, out_row, live, fresh)``, compiled for `lanes` columns k.

    ``out[m, k] += sum_n a[m, n] * x[n, k]`` for the first `live` of COMBINED rows m, whose sums stay in registers and,
    if `fresh`, start at 0.
    """

    def generate(context, builder, signature, arguments):
        a, a_m, a_n, count, x, x_row, out, out_row, live, fresh = arguments
        vectors = Vectors(context, builder, signature.args[0], lanes)
        last = builder.sub(live, INT64(1))
        which = [builder.select(builder.icmp_signed("<", INT64(m), live), INT64(m), last) for m in range(COMBINED)]
        factors = [builder.gep(a, [builder.mul(m, a_m)]) for m in which]
        targets = [vectors.pointer(out, builder.mul(m, out_row)) for m in which]
        sums = [cgutils.alloca_once_value(builder, vectors.zero) for _ in which]
        with builder.if_then(builder.icmp_signed("==", fresh, INT64(0))):
            for target, total in zip(targets, sums, strict=True):
                builder.store(builder.load(target, align=vectors.align), total)
        with cgutils.for_range(builder, count, intp=INT64) as loop:
            row, at = vectors.read(x, builder.mul(loop.index, x_row)), builder.mul(loop.index, a_n)
            for factor, total in zip(factors, sums, strict=True):
                vectors.add_product(total, vectors.filled(vectors.read_one(factor, at)), row)
        for target, total in zip(targets, sums, strict=True):
            builder.store(builder.load(total), target, align=vectors.align)
        return context.get_dummy_value()

    @intrinsic
    def combine(typing_context, a, a_m, a_n, count, x, x_row, out, out_row, live, fresh):
        return types.void(a, *(types.int64,) * 3, a, types.int64, a, *(types.int64,) * 3), generate

    return combine


@functools.cache
def combiner(dtype: type) -> Any:
    """A function that adds the product of a matrix a, of any strides, and `count` rows x to a submatrix of out."""
    width = REGISTER // np.dtype(dtype).itemsize
    wide = VECTORS * width
    combine_wide, combine_vector, combine_one = (_combination(lanes) for lanes in (wide, width, 1))

    @shared
    def combine(a, a_m, a_n, count, x, x_row, out, out_row, rows, columns, fresh):
        for m in range(0, rows, COMBINED):
            a_rows, out_rows, live, k = offset(a, m * a_m), offset(out, m * out_row), rows - m, 0
            for _ in range(columns // wide):
                combine_wide(a_rows, a_m, a_n, count, offset(x, k), x_row, offset(out_rows, k), out_row, live, fresh)
                k += wide
            for _ in range((columns - k) // width):
                combine_vector(a_rows, a_m, a_n, count, offset(x, k), x_row, offset(out_rows, k), out_row, live, fresh)
                k += width
            for j in range(k, columns):
                combine_one(a_rows, a_m, a_n, count, offset(x, j), x_row, offset(out_rows, j), out_row, live, fresh)

    return combine


@inline
def are_finite(x, begin, end, largest):
    """Whether no number is infinite or NaN; a branch-free loop, which LLVM vectorises."""
    wrong = 0
    for j in range(begin, end):
        wrong += 0 if abs(x[j]) <= largest else 1
    return wrong == 0
