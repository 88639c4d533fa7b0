# mypy: disable-error-code="no-untyped-def"
"""Products of pruned weights, in the format of ``entries.py``, with states; in LLVM's instructions, for Numba."""

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ostinato.kernels.cpu.compiler import inline
from ostinato.kernels.cpu.elementary import cast, multiply_add
from ostinato.kernels.cpu.intrinsics import offset, restricted
from ostinato.kernels.persistent.cpu.products import INT32, INT64, Vectors

BLOCK_WIDTH = 4  # columns of those blocks whose rows are read as vectors
CHAINS = 4  # independent partial sums of a row or tile, which hide the latency of additions

_load, _store = restricted("weight", "state", "sum")


def _sum_of(builder, parts):
    """The sum of values, adjacent pairs first."""
    while len(parts) > 1:
        parts = [builder.fadd(y, z) for y, z in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _slice_adder(kind: str, height: int, tile: int, direct: bool) -> Any:
    """``add_slice(matrix, begin, end, x, x_b, out, out_b, live)``, compiled for a kind of ``entries.py`` and a tile.

    It multiplies the entries of a slice by the states of the `live` sequences b of a tile:

    shared: ``out[b, i] += sum_k values[k, i] * x[b, columns[k]]``
    own:    ``out[b, i]  = sum_k values[k, i] * x[b, columns[k, i]]``
    dots:   ``out[b]    += sum_k sum_i values[k, i] * x[b, columns[k] + i]``

    ``matrix`` is (values, places, columns, stride, last_place).  If `direct`, values are the whole matrix, and entry k
    has the weights at ``places[k, i]``, 0 where that is negative; for "shared", those at ``places[k] + i * stride``, up
    to the last place: rows beyond it add to sums that nobody reads.  The entries of all columns of a block can then be
    a single one, of kind "blocks", for one sequence:

    blocks: ``out[i]    += sum_k sum_j values[places[k] + i * stride + j] * x[columns[k] + j]``
    """
    generate = _block_adder(height) if kind == "blocks" else _entry_adder(kind, height, tile, direct)

    @intrinsic
    def add_slice(typing_context, matrix, begin, end, x, x_b, out, out_b, live):
        integer = types.int64
        return types.void(matrix, integer, integer, x, integer, out, integer, integer), generate

    return add_slice


class _EntryReader(Vectors):
    """Writes the instructions that read entries: vectors of weights, and of the states that they multiply."""

    def __init__(self, context, builder, kind, matrix, rows):
        super().__init__(context, builder, kind[0], rows)
        self.values, self.places, self.columns, self.stride, self.last_place = cgutils.unpack_tuple(builder, matrix)

    def read_integer(self, array, index):
        return self.builder.sext(self.read_one(array, index), INT64)

    def lanes_of(self, k):
        """The indices of entry k's lanes, in arrays with one element for each lane."""
        return (self.builder.add(self.builder.mul(k, INT64(self.lanes)), INT64(i)) for i in range(self.lanes))

    def packed_weights(self, k):
        return self.read(self.values, self.builder.mul(k, INT64(self.lanes)))

    def weights_of_column(self, k):
        """The weights of a column in adjacent rows of the matrix; beyond the last row, the last weight."""
        start = self.read_integer(self.places, k)

        def place(i):
            at = self.builder.add(start, self.builder.mul(self.stride, INT64(i)))
            return self.builder.select(self.builder.icmp_signed(">", at, self.last_place), self.last_place, at)

        return self.of(self.read_one(self.values, place(i)) for i in range(self.lanes))

    def weights_anywhere(self, k):
        """The weights at the places of the lanes, 0 where a place is negative."""
        none = INT32(0)

        def weight(lane):
            place = self.read_one(self.places, lane)
            place = self.builder.select(self.builder.icmp_signed("<", place, none), none, place)
            return self.read_one(self.values, self.builder.sext(place, INT64))

        result = self.of(map(weight, self.lanes_of(k)))
        indices = ir.VectorType(INT32, self.lanes)
        first = self.builder.mul(k, INT64(self.lanes))
        places = self.builder.load(self.pointer(self.places, first, indices), align=4)
        absent = self.builder.icmp_signed("<", places, ir.Constant(indices, [0] * self.lanes))
        return self.builder.select(absent, self.zero, result)

    def state_of_column(self, k, row):
        """The state of entry k's column, in all lanes."""
        return self.filled(self.read_one(row, self.read_integer(self.columns, k)))

    def neighbouring_states(self, k, row):
        return self.read(row, self.read_integer(self.columns, k))

    def states_anywhere(self, k, row):
        return self.of(self.read_one(row, self.read_integer(self.columns, lane)) for lane in self.lanes_of(k))


def _entry_adder(what, rows, sequences, direct):
    """The code generator of :func:`_slice_adder`'s function, for all kinds but blocks."""

    def generate(context, builder, signature, arguments):
        matrix, begin, end, x, x_b, out, out_b, live = arguments
        entries = _EntryReader(context, builder, signature.args[0], matrix, rows)
        readers = {
            "shared": entries.state_of_column,
            "own": entries.states_anywhere,
            "dots": entries.neighbouring_states,
        }
        states = readers[what]
        weights = entries.packed_weights
        if direct:
            weights = entries.weights_of_column if what == "shared" else entries.weights_anywhere
        last = builder.sub(live, INT64(1))
        which = [builder.select(builder.icmp_signed("<", INT64(b), live), INT64(b), last) for b in range(sequences)]
        x_rows = [builder.gep(x, [builder.mul(x_b, b)]) for b in which]
        chains = [
            [cgutils.alloca_once_value(builder, entries.zero) for _ in range(sequences)]
            for _ in range(CHAINS // sequences)
        ]

        def add(k, sums):
            entry = weights(k)
            for row, total in zip(x_rows, sums, strict=True):
                entries.add_product(total, entry, states(k, row))

        many = INT64(len(chains))
        odd = builder.sub(end, builder.srem(builder.sub(end, begin), many))
        with cgutils.for_range_slice(builder, begin, odd, many, INT64) as (k, _):
            for ahead, sums in enumerate(chains):
                add(builder.add(k, INT64(ahead)), sums)
        with cgutils.for_range_slice(builder, odd, end, INT64(1), INT64) as (k, _):
            add(k, chains[0])
        for b in range(sequences):
            with builder.if_then(builder.icmp_signed("<", INT64(b), live)):
                target = builder.gep(out, [builder.mul(out_b, INT64(b))])
                total = _sum_of(builder, [builder.load(sums[b]) for sums in chains])
                if what == "dots":
                    total = _sum_of_lanes(builder, total)
                    builder.store(builder.fadd(total, builder.load(target)), target)
                    continue
                place = entries.pointer(target, INT64(0))
                if what == "shared":
                    total = builder.fadd(total, builder.load(place, align=entries.align))
                builder.store(total, place, align=entries.align)
        return context.get_dummy_value()

    return generate


def _sum_of_lanes(builder, vector):
    """The sum of a vector's lanes, by adding halves onto each other, which LLVM keeps in vectors."""
    lanes = [builder.extract_element(vector, INT32(i)) for i in range(vector.type.count)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [builder.fadd(y, z) for y, z in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


def _block_adder(rows):
    """The code generator of :func:`_slice_adder`'s function for blocks.

    A row of a block is a vector, and so is the sum of a row, whose lanes are added at the end.
    """

    def generate(context, builder, signature, arguments):
        matrix, begin, end, x, _, out, *_ = arguments
        block = _EntryReader(context, builder, signature.args[0], matrix, BLOCK_WIDTH)
        sums = [cgutils.alloca_once_value(builder, block.zero) for _ in range(rows)]
        last = builder.sub(block.last_place, INT64(BLOCK_WIDTH - 1))
        with cgutils.for_range_slice(builder, begin, end, INT64(1), INT64) as (k, _):
            start, states = block.read_integer(block.places, k), block.neighbouring_states(k, x)
            for i, total in enumerate(sums):
                place = builder.add(start, builder.mul(block.stride, INT64(i)))
                place = builder.select(builder.icmp_signed(">", place, last), last, place)
                block.add_product(total, block.read(block.values, place), states)
        for i, total in enumerate(sums):
            target, lanes = builder.gep(out, [INT64(i)]), builder.load(total)
            row = _sum_of(builder, [builder.extract_element(lanes, INT32(j)) for j in range(BLOCK_WIDTH)])
            builder.store(builder.fadd(row, builder.load(target)), target)
        return context.get_dummy_value()

    return generate


@inline
def _weight_looked_up(values, places, index):
    place = places[index]
    return values[place] if place >= 0 else cast(0.0, values[0])


@inline
def _packed_weight(values, places, index):
    return _load(places, index, "weight")


@functools.cache
def entries_adder(kind: str, height: int, tile: int, gates: int, direct: bool) -> Any:
    """A function that adds the products of pruned weights and the numbers x of `live` sequences to the sums of each.

    If `direct`, weights are looked up by their places, which are negative for none; otherwise the places are the
    weights themselves.  Sums of entries of kind "own" are computed behind the other sums of their sequence, then
    scattered.  Only a square matrix has a diagonal: `inputs` is the number of columns.
    """
    add_slice = _slice_adder(kind, height, tile, direct)
    weight_at = _weight_looked_up if direct else _packed_weight

    @inline
    def add_entries(entries, hidden, inputs, x, x_b, sums, row, live):
        values, places, columns, starts, rows, slices, diagonal, padded = entries
        matrix, spare = (values, places, columns, inputs, gates * hidden * inputs - 1), row - height
        for s in range(slices):
            for b in range(0, live, tile):
                out = offset(sums, b * row + (spare if kind == "own" else s if kind == "dots" else s * height))
                add_slice(matrix, starts[s], starts[s + 1], offset(x, b * x_b), x_b, out, row, live - b)
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
                        weight = weight_at(values, diagonal, g * padded + j)
                        new = multiply_add(weight, _load(x, at_x + j, "state"), _load(sums, at + j, "sum"))
                        _store(sums, at + j, new, "sum")

    return add_entries
