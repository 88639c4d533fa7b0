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


def _entry_adder(what, rows, sequences, direct):
    """The generator of :func:`_add_slice`, but for blocks."""

    def generate(context, builder, signature, arguments):
        values, places, stride, last_place, columns, begin, end, x, x_b, out, out_b, live = arguments[:12]
        int32, int64 = ir.IntType(32), ir.IntType(64)
        number = context.get_value_type(signature.args[0].dtype)
        vector = ir.VectorType(number, rows)
        size = context.get_abi_sizeof(number)
        fused = fused_multiply_add(builder, vector, size)
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
                total = _sum_of(builder, [builder.load(sums[b]) for sums in chains])
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

    return generate


def _block_adder(rows):
    """That for blocks: a row of a block is a vector, and so is the sum of a row, whose lanes are added at the end."""

    def generate(context, builder, signature, arguments):
        values, places, stride, last_place, columns, begin, end, x, _, out = arguments[:10]
        int32, int64 = ir.IntType(32), ir.IntType(64)
        number = context.get_value_type(signature.args[0].dtype)
        vector = ir.VectorType(number, BLOCK_WIDTH)
        size = context.get_abi_sizeof(number)
        fused = fused_multiply_add(builder, vector, size)

        def vector_at(pointer, index):
            return builder.load(builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer()), align=size)

        def at(pointer, index):
            return builder.sext(builder.load(builder.gep(pointer, [index])), int64)

        sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * BLOCK_WIDTH)) for _ in range(rows)]
        last = builder.sub(last_place, int64(BLOCK_WIDTH - 1))
        with cgutils.for_range_slice(builder, begin, end, int64(1), int64) as (k, _):
            start, states = at(places, k), vector_at(x, at(columns, k))
            for i, total in enumerate(sums):
                place = builder.add(start, builder.mul(stride, int64(i)))
                place = builder.select(builder.icmp_signed(">", place, last), last, place)
                builder.store(builder.call(fused, [vector_at(values, place), states, builder.load(total)]), total)
        for i, total in enumerate(sums):
            target, lanes = builder.gep(out, [int64(i)]), builder.load(total)
            row = _sum_of(builder, [builder.extract_element(lanes, int32(j)) for j in range(BLOCK_WIDTH)])
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
