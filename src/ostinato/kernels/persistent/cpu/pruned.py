# mypy: disable-error-code="no-untyped-def"
"""Products of pruned weights with states, as ``products.py``: read as the entries of ``entries.py``."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from ostinato.kernels.numba_loops import inline_options, inline_with_constants, offset, restricted
from ostinato.kernels.numba_math import cast, multiply_add
from ostinato.kernels.persistent.cpu.products import fused_multiply_add

BLOCK_WIDTH = 4  # columns of blocks whose rows are read as vectors
CHAINS = 4  # independent partial sums of a row or tile, which hide the latency of additions

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_load, _store = restricted("weight", "state", "sum")


def _sum_of(builder, parts):
    """The sum of values, neighbours first."""
    while len(parts) > 1:
        parts = [builder.fadd(y, z) for y, z in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


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
    """Entries of pruned weights times the `live` of a tile of sequences b, for the kinds of ``entries.py``:

    shared: ``out[b, i] += sum_k values[k, i] * x[b, columns[k]]``
    own:    ``out[b, i]  = sum_k values[k, i] * x[b, columns[k, i]]``
    dots:   ``out[b]    += sum_k sum_i values[k, i] * x[b, columns[k] + i]``

    If places are integers, values are the whole matrix, and entry k has the weights at ``places[k, i]``, 0 where that
    is below 0; of "shared" those at ``places[k] + i * stride``, up to the last: rows beyond it add to sums that nobody
    reads.  Read so, the entries of a block's columns can be one, of kind "blocks", for one sequence:

    blocks: ``out[i]    += sum_k sum_j values[places[k] + i * stride + j] * x[columns[k] + j]``
    """
    what, rows, sequences = kind.literal_value, height.literal_value, tile.literal_value
    direct = isinstance(places.dtype, types.Integer)
    integer = types.int64
    arrays = values, places, integer, integer, columns, integer, integer, values, integer, values, integer
    signature = types.void(*arrays, integer, kind, height, tile)
    return signature, _block_adder(rows) if what == "blocks" else _entry_adder(what, rows, sequences, direct)


class _EntryReader:
    """Writes the instructions that read entries: vectors of weights, and of the states that they multiply."""

    def __init__(self, context, builder, signature, arguments, rows):
        self.builder, self.rows = builder, rows
        self.values, self.places, self.stride, self.last_place, self.columns = arguments[:5]
        number = context.get_value_type(signature.args[0].dtype)
        self.vector, self.size = ir.VectorType(number, rows), context.get_abi_sizeof(number)
        self.zero = ir.Constant(self.vector, [0.0] * rows)

    def pointer(self, array, index, kind=None):
        """A pointer to a vector of an array."""
        return self.builder.bitcast(self.builder.gep(array, [index]), (kind or self.vector).as_pointer())

    def read(self, array, index):
        """A vector of an array."""
        return self.builder.load(self.pointer(array, index), align=self.size)

    def read_one(self, array, index):
        return self.builder.load(self.builder.gep(array, [index]))

    def read_integer(self, array, index):
        return self.builder.sext(self.read_one(array, index), _INT64)

    def vector_of(self, lanes):
        result = ir.Constant(self.vector, ir.Undefined)
        for i, lane in enumerate(lanes):
            result = self.builder.insert_element(result, lane, _INT32(i))
        return result

    def lanes_of(self, k):
        """The indices of entry k's lanes in arrays of one element for each."""
        return (self.builder.add(self.builder.mul(k, _INT64(self.rows)), _INT64(i)) for i in range(self.rows))

    def packed_weights(self, k):
        return self.read(self.values, self.builder.mul(k, _INT64(self.rows)))

    def weights_of_column(self, k):
        """Those of neighbouring rows of the matrix; beyond the last row, the last weight."""
        start = self.read_integer(self.places, k)

        def place(i):
            at = self.builder.add(start, self.builder.mul(self.stride, _INT64(i)))
            return self.builder.select(self.builder.icmp_signed(">", at, self.last_place), self.last_place, at)

        return self.vector_of(self.read_one(self.values, place(i)) for i in range(self.rows))

    def weights_anywhere(self, k):
        """Those at the places of the lanes, 0 where a place is below 0."""
        none = _INT32(0)

        def weight(lane):
            place = self.read_one(self.places, lane)
            place = self.builder.select(self.builder.icmp_signed("<", place, none), none, place)
            return self.read_one(self.values, self.builder.sext(place, _INT64))

        result = self.vector_of(map(weight, self.lanes_of(k)))
        indices = ir.VectorType(_INT32, self.rows)
        first = self.builder.mul(k, _INT64(self.rows))
        places = self.builder.load(self.pointer(self.places, first, indices), align=4)
        absent = self.builder.icmp_signed("<", places, ir.Constant(indices, [0] * self.rows))
        return self.builder.select(absent, self.zero, result)

    def state_of_column(self, k, row):
        """The state of entry k's column, in all lanes."""
        one = self.vector_of([self.read_one(row, self.read_integer(self.columns, k))])
        return self.builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_INT32, self.rows), [0] * self.rows))

    def neighbouring_states(self, k, row):
        return self.read(row, self.read_integer(self.columns, k))

    def states_anywhere(self, k, row):
        return self.vector_of(self.read_one(row, self.read_integer(self.columns, lane)) for lane in self.lanes_of(k))


def _entry_adder(what, rows, sequences, direct):
    """The generator of :func:`_add_slice`, but for blocks."""

    def generate(context, builder, signature, arguments):
        begin, end, x, x_b, out, out_b, live = arguments[5:12]
        entries = _EntryReader(context, builder, signature, arguments, rows)
        # Numba compiles this for dense weights, too, in branches that are never taken.
        readers = {"own": entries.states_anywhere, "dots": entries.neighbouring_states}
        states = readers.get(what, entries.state_of_column)
        weights = entries.packed_weights
        if direct:
            weights = entries.weights_of_column if what == "shared" else entries.weights_anywhere
        fused = fused_multiply_add(builder, entries.vector, entries.size)
        last = builder.sub(live, _INT64(1))
        which = [builder.select(builder.icmp_signed("<", _INT64(b), live), _INT64(b), last) for b in range(sequences)]
        x_rows = [builder.gep(x, [builder.mul(x_b, b)]) for b in which]
        chains = [
            [cgutils.alloca_once_value(builder, entries.zero) for _ in range(sequences)]
            for _ in range(CHAINS // sequences)
        ]

        def add(k, sums):
            entry = weights(k)
            for row, total in zip(x_rows, sums, strict=True):
                builder.store(builder.call(fused, [entry, states(k, row), builder.load(total)]), total)

        many = _INT64(len(chains))
        odd = builder.sub(end, builder.srem(builder.sub(end, begin), many))
        with cgutils.for_range_slice(builder, begin, odd, many, _INT64) as (k, _):
            for ahead, sums in enumerate(chains):
                add(builder.add(k, _INT64(ahead)), sums)
        with cgutils.for_range_slice(builder, odd, end, _INT64(1), _INT64) as (k, _):
            add(k, chains[0])
        for b in range(sequences):
            with builder.if_then(builder.icmp_signed("<", _INT64(b), live)):
                target = builder.gep(out, [builder.mul(out_b, _INT64(b))])
                total = _sum_of(builder, [builder.load(sums[b]) for sums in chains])
                if what == "dots":
                    total = _sum_of_lanes(builder, total)
                    builder.store(builder.fadd(total, builder.load(target)), target)
                    continue
                place = entries.pointer(target, _INT64(0))
                if what == "shared":
                    total = builder.fadd(total, builder.load(place, align=entries.size))
                builder.store(total, place, align=entries.size)
        return context.get_dummy_value()

    return generate


def _sum_of_lanes(builder, vector):
    """The sum of a vector's lanes, by halves added onto each other, which stay vectors."""
    lanes = [builder.extract_element(vector, _INT32(i)) for i in range(vector.type.count)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [builder.fadd(y, z) for y, z in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


def _block_adder(rows):
    """That for blocks: a row of a block is a vector, and so is the sum of a row, whose lanes are added at the end."""

    def generate(context, builder, signature, arguments):
        values, places, stride, last_place, _, begin, end, x, _, out = arguments[:10]
        block = _EntryReader(context, builder, signature, arguments, BLOCK_WIDTH)
        fused = fused_multiply_add(builder, block.vector, block.size)
        sums = [cgutils.alloca_once_value(builder, block.zero) for _ in range(rows)]
        last = builder.sub(last_place, _INT64(BLOCK_WIDTH - 1))
        with cgutils.for_range_slice(builder, begin, end, _INT64(1), _INT64) as (k, _):
            start, states = block.read_integer(places, k), block.neighbouring_states(k, x)
            for i, total in enumerate(sums):
                place = builder.add(start, builder.mul(stride, _INT64(i)))
                place = builder.select(builder.icmp_signed(">", place, last), last, place)
                builder.store(builder.call(fused, [block.read(values, place), states, builder.load(total)]), total)
        for i, total in enumerate(sums):
            target, lanes = builder.gep(out, [_INT64(i)]), builder.load(total)
            row = _sum_of(builder, [builder.extract_element(lanes, _INT32(j)) for j in range(BLOCK_WIDTH)])
            builder.store(builder.fadd(row, builder.load(target)), target)
        return context.get_dummy_value()

    return generate


def _weight_at(values, places, index):
    """``values[places[index]]``, or 0 where that place is below 0; ``places[index]`` if places are weights."""


@overload(_weight_at, jit_options=inline_options)
def _weight_at_of(values, places, index):
    if isinstance(places.dtype, types.Float):
        return lambda values, places, index: _load(places, index, "weight")

    def look_up(values, places, index):
        place = places[index]
        return values[place] if place >= 0 else cast(0.0, values[0])

    return look_up


@inline_with_constants
def add_entries(kind, height, tile, gates, hidden, inputs, entries, x, x_b, sums, row, live):
    """Add the product of pruned weights with the numbers x of `live` sequences to the sums of each.

    Sums of entries of kind "own" are made behind the others of their sequence, then scattered.  The diagonal is that of
    a square matrix only: `inputs` is the number of columns.
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
                    new = multiply_add(weight, _load(x, at_x + j, "state"), _load(sums, at + j, "sum"))
                    _store(sums, at + j, new, "sum")
