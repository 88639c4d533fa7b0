"""The search for the geometry with the least estimated time among all that fit a layer; needs no GPU."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import torch

from ostinato.kernels.persistent.cuda.heuristics.cells import CELLS, Cell
from ostinato.kernels.persistent.cuda.heuristics.costs import microseconds
from ostinato.kernels.persistent.cuda.heuristics.fitting import fill_registers, most_streamed, split_strips
from ostinato.kernels.persistent.cuda.heuristics.geometry import (
    SCALARS,
    THREADS,
    WARPS,
    ZERO_PLACES,
    Geometry,
    ceil_div,
    round_up,
)
from ostinato.kernels.persistent.plan import KernelPath, Plan, no_kernel

LEAST_COPIED = 1024  # the least bytes of a sequence's state for two groups in turn
LEAST_TILES = {False: 16, True: 24}  # the least tiles of a warp for two groups in turn, forward and backward
MOST_WIDE = 2048  # the most units whose weights fit into registers and shared memory of blocks with 16 units each
ROUNDED = 1.1  # how many times as long a step may take, so that training with many batch sizes needs few kernels


class Device(NamedTuple):
    """The fields of ``torch.cuda.get_device_properties`` that the search uses."""

    multi_processor_count: int
    shared_memory_per_block_optin: int
    regs_per_multiprocessor: int
    L2_cache_size: int
    major: int


def _coverings(start: Geometry, batch: int, device: Device, share: int) -> Iterator[Geometry]:
    """All divisions of units and sequences among blocks that can be resident at once."""
    dense, largest = start.path == "dense", batch if start.path == "dense" else min(batch, 8)
    clusters = (1, 2, 4) if start.backward and device.major >= 9 else (1,)
    for cluster in clusters:
        pitch = start._replace(cluster=cluster).pitch
        resident = resident_blocks(device, cluster) // share
        parts = cluster if start.backward else start.products  # rows of a block for each of its units
        numbers = {ceil_div(batch, n) for n in range(ceil_div(batch, largest), batch + 1)}
        for columns in sorted({n if n <= 8 else round_up(n, 8) for n in numbers}):  # beyond 8, whole tiles
            all_groups = ceil_div(batch, columns)
            fewest = {ceil_div(all_groups, launches) for launches in range(1, all_groups + 1)}
            # With one sequence, fewer blocks may be faster, as all read the same few cache lines of its state.
            divisors = (1, 2, 3) if dense and columns == 1 and not start.backward else (1,)
            for groups, divisor in itertools.product(sorted(fewest), divisors):
                blocks = resident // cluster // (groups * divisor) * cluster
                if not blocks:
                    continue
                least = ceil_div(pitch, blocks)
                for units in sorted(_units_of_block(start, least, parts)):
                    covering = start._replace(units=units, columns=columns, groups=groups, cluster=cluster)
                    # Blocks of a cluster stay in step only if the slice of each contains data that others write.
                    is_whole = (cluster - 1) * covering.slice < start.products * pitch
                    if units >= least and covering.blocks <= blocks and is_whole:
                        yield covering


def _units_of_block(start: Geometry, least: int, rows: int) -> set[int]:
    """The numbers of hidden units that a block may have, `least` or a few more, with so many rows for each unit."""
    word = 4 // start.dtype.itemsize
    if start.path == "block":  # whole strips
        return {round_up(least * rows, 16) // rows if start.backward else round_up(least, 16)}
    if start.path == "sparse":  # a thread works on one row only
        return {units for units in (round_up(least, word),) if rows * units <= THREADS}
    # Also more units, up to the next half row tiles, for both word sizes, which leaves fewer blocks.
    first = round_up(rows * least, 8)
    return {n // rows // w * w for n in range(first, first + 24, 8) for w in (word, 2 * word)}


def _clusters(start: Geometry, batch: int, device: Device, share: int) -> Iterator[Geometry]:
    """The divisions of units and sequences among blocks in which all that share a sequence are one cluster."""
    for units in {round_up(ceil_div(start.pitch, most), 8 // start.dtype.itemsize) for most in (2, 4, 8, 16)}:
        cluster = start._replace(units=units, distributed=True)
        if start.backward:
            cluster = cluster._replace(cluster=ceil_div(start.hidden_size, units))
        size = 1 << (cluster.blocks - 1).bit_length()  # other sizes take as much of a GPC as the next power of two
        resident = resident_blocks(device, size) // share // size
        # Sending sums of several sequences to sixteen blocks takes as long as everything else together.
        most_columns = 1 if start.backward and size == 16 else 8
        for columns in sorted({ceil_div(batch, n) for n in range(ceil_div(batch, most_columns), batch + 1)}):
            if resident and size > 1:  # one block would exchange with itself
                yield cluster._replace(columns=columns, groups=min(resident, ceil_div(batch, columns)))


def _ping_pong(start: Geometry, batch: int, device: Device, share: int) -> Iterator[Geometry]:
    """The divisions of units and sequences in which each block computes two groups in turn.

    This was measured to pay off for gated layers, unless states are small or products exact, and only if there are not
    enough multiprocessors for both groups.
    """
    processors = device.multi_processor_count // share
    exact = start.exact and start.dtype == torch.float32
    start = start._replace(block_groups=2)
    if start.products > 1 and not exact and start.pitch * start.dtype.itemsize >= LEAST_COPIED:
        for covering in _coverings(start, round_up(ceil_div(batch, 2), 8), device, share):
            shared = covering.blocks * covering.groups * covering.block_groups > processors
            if shared and covering.columns % 8 == covering.pitch % covering.units == 0:
                yield covering


def _wide(start: Geometry, device: Device, share: int) -> Iterator[Geometry]:
    """The divisions of many sequences among blocks whose warpgroups multiply, on Hopper only; see ``wide.cuh``.

    Only for LSTMs of so many units that the blocks of two groups would not fit: otherwise two groups were measured to
    be faster.
    """
    units, cluster = 16, 8 if start.backward else 2
    fits = start.cell.name == "lstm" and start.hidden_size % 2 == 0 and start.hidden_size <= MOST_WIDE
    if not fits or start.dtype.itemsize != 2 or device.major != 9:
        return
    for columns, in_registers in ((32, 38), (64, 34)):
        wide = start._replace(units=units, columns=columns, groups=1, cluster=cluster, block_groups=2, wide=True)
        resident = resident_blocks(device, wide.blocks_of_a_cluster)
        room = device.shared_memory_per_block_optin >= wide.shared_bytes
        if room and share * wide.blocks <= resident < 2 * wide.blocks:
            tiles = wide.slice // units
            yield wide._replace(tiles=tiles, in_registers=min(tiles, in_registers - 4 * start.backward))


@functools.lru_cache(maxsize=4096)
def _entries(height: int, width: int, blocks: int, density: float, rows: int, columns: int) -> int:
    """The likely number of entries (pairs of weights) per thread of the sparse kernel, for parts of this size.

    The matrix is pruned evenly in blocks of `rows` by `columns`.  A thread takes weights of only one row, so some have
    few or none: the result is the smallest number for which the threads of every part likely suffice.
    """
    strips, mean = height / rows, width * density
    deviation = math.sqrt(columns * width * density * (1 - density)) + 1e-9
    row = NormalDist(mean, deviation)
    unlikely = NormalDist().inv_cdf(1 - 0.01 / blocks)

    def fits(weights: int) -> bool:
        """Whether the threads of each part likely suffice, with this many weights each."""
        # The probability that the same number of threads for each row does not suffice.
        overflow = 1 - row.cdf(THREADS // height * weights + 0.5)
        if strips * blocks * overflow < 0.2:
            return True
        most = math.ceil((mean + 6 * deviation) / weights)
        more = [1 - row.cdf(n * weights + 0.5) for n in range(1, most)]  # P(a row needs more than n threads)
        expected = 1 + sum(more)
        variance = sum((2 * n + 1) * p for n, p in enumerate(more, 1)) + 1 - expected**2
        return rows * (strips * expected + unlikely * math.sqrt(strips * max(variance, 0.0))) <= THREADS

    low, high = 1, math.ceil((mean + 6 * deviation) / 2) + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(2 * middle) else (middle + 1, high)
    return low


def resident_blocks(device: Device, cluster: int) -> int:
    """The number of blocks that can be resident at once, one per multiprocessor.

    A cluster must fit within one GPC, and GPCs differ in their number of multiprocessors: an H200 can use 120 of its
    132 with clusters of 4.
    """
    processors = device.multi_processor_count
    return (processors if cluster <= 2 else processors * 10 // 11) // cluster * cluster


def candidates(
    start: Geometry, batch: int, density: float, block: tuple[int, int] | None, device: Device, share: int = 1
) -> Iterator[Geometry]:
    """The geometries that fit a layer, assuming that its matrix is pruned evenly in blocks of this shape."""
    if start.path == "dense":
        yield from _wide(start, device, share)
    coverings = _coverings(start, batch, device, share)
    if start.path == "dense" and device.major >= 9:
        coverings = itertools.chain(coverings, _clusters(start, batch, device, share))
        coverings = itertools.chain(coverings, _ping_pong(start, batch, device, share))
    for covering in coverings:
        filled = _with_weights(covering, density, block or (1, 1), device.shared_memory_per_block_optin)
        if filled is None:
            continue
        most = most_streamed(device) if filled.block_groups == 1 else 0  # ping-pong would read weights twice a step
        # With two groups in turn, products of few tiles hide little of the exchange.
        enough = filled.block_groups == 1 or filled.tiles >= LEAST_TILES[start.backward]
        if enough and filled.bytes_streamed * share <= most:
            yield filled


def _with_weights(geometry: Geometry, density: float, block: tuple[int, int], shared: int) -> Geometry | None:
    """The geometry with all tiles that its weights take, placed by :func:`fill_registers`; None if they do not fit."""
    if geometry.scatters:
        tiles = ceil_div(geometry.row_tiles, WARPS) * ceil_div(geometry.slice * geometry.dtype.itemsize, 32)
        return fill_registers(geometry._replace(tiles=tiles), shared)
    if geometry.path == "dense":
        half, column_tiles = geometry.has_half_tiles, geometry.column_tiles
        tiles = (geometry.row_tiles_of_warp - half) * column_tiles + half * ceil_div(column_tiles, 2)
        filled = fill_registers(geometry._replace(tiles=tiles), shared)
        if geometry.block_groups == 1 and (filled is None or filled.streamed):
            filled = fill_registers(geometry._replace(tiles=tiles, sum_buffers=1), shared) or filled
        return filled
    rows, columns = reversed(block) if geometry.backward else block  # of a pruned block, backward transposed
    if geometry.path == "block":
        # The share of a strip's columns that are not empty; then a bound on their number that likely holds everywhere.
        share, strips = 1 - (1 - density) ** ceil_div(16, rows), geometry.rows // 16
        deviations = NormalDist().inv_cdf(1 - 0.05 / (strips * geometry.blocks))
        most = geometry.slice * share + deviations * math.sqrt(geometry.slice * share * (1 - share))
        return split_strips(geometry, [math.ceil(most)] * strips, shared)
    entries = _entries(geometry.rows, geometry.slice, geometry.blocks, density, rows, columns)
    return fill_registers(geometry._replace(tiles=entries), shared)


@functools.lru_cache(maxsize=4096)
def _fastest(
    starts: tuple[Geometry, ...],
    batch: int,
    density: float,
    block: tuple[int, int] | None,
    device: Device,
    share: int,
    distributed: bool,
) -> Geometry | None:
    """The geometry with the least estimated time, starting from the kernels and the layer in `starts`."""
    fitting = (
        geometry
        for start in starts
        for geometry in candidates(start, batch, density, block, device, share)
        if distributed or not geometry.distributed
    )
    return min(fitting, key=lambda geometry: microseconds(geometry, batch, density < 1), default=None)


def _rounded(batch: int) -> Iterator[set[int]]:
    """The powers of four up to the one above a batch, then the numbers around it with one to three binary digits."""
    digits = (batch - 1).bit_length()
    yield {4**half for half in range(ceil_div(digits, 2) + 1)}
    for leading in (1, 2, 3):
        unit = 1 << max(0, digits - leading)
        yield {batch // unit * unit, round_up(batch, unit)} - {0}


def _for_batch(geometry: Geometry, batch: int, device: Device, share: int) -> Iterator[Geometry]:
    """The ways in which a geometry's kernel can run a batch: with more groups, or with groups of more sequences."""
    size = 1 << (geometry.blocks_of_a_cluster - 1).bit_length()
    most = resident_blocks(device, size) // share // max(size, geometry.blocks)
    all_groups = ceil_div(batch, geometry.capacity * geometry.block_groups)
    launches = ceil_div(all_groups, most)
    for groups in range(ceil_div(all_groups, launches), most + 1):
        columns = (
            ceil_div(batch, launches * groups * geometry.block_groups) if geometry.takes_fewer else geometry.columns
        )
        way = geometry._replace(columns=columns, groups=min(groups, ceil_div(batch, columns * geometry.block_groups)))
        if way.capacity == geometry.capacity:
            yield way


def _how_they_fit(geometry: Geometry, pruned: bool) -> str:
    """How a plan's reason describes where the weights of a `pruned` or dense layer are."""
    if geometry.wide:
        return f"fit on the chip, multiplied by warpgroups with {geometry.columns} sequences at once"
    if geometry.streamed:
        missing = geometry.bytes_streamed / geometry.groups / 1e6  # of each copy
        return f"fit on the chip but for {missing:.1f} MB, read from L2 at every step"
    if geometry.path == "block":
        return "fit on the chip in strips of 16 rows"
    if geometry.path == "sparse":
        return "fit on the chip, each with its place"
    return "fit on the chip with their zeros, fastest on tensor cores" if pruned else "fit on the chip"


def _rounder(
    exact: Geometry,
    batch: int,
    pruned: bool,
    fastest: Callable[[int], Geometry | None],
    device: Device,
    share: int,
) -> Geometry:
    """The fastest kernel of a rounder batch size, if a step takes at most ``ROUNDED`` times as long as with `exact`.

    A kernel is compiled for the sequences of a group and runs any number of groups, so that many batch sizes share it.
    """
    longest = ROUNDED * microseconds(exact, batch, pruned)
    for sizes in _rounded(batch):
        ways = (way for size in sizes if (other := fastest(size)) for way in _for_batch(other, batch, device, share))
        rounder = min(ways, key=lambda way: microseconds(way, batch, pruned), default=exact)
        if microseconds(rounder, batch, pruned) <= longest:
            return rounder
    return exact


def choose_geometry(
    cell: str | Cell,
    hidden_size: int,
    batch: int,
    dtype: torch.dtype,
    mask_nnz: int | None,
    block: tuple[int, int] | None,
    properties: Any,
    share: int = 1,
    path: KernelPath | None = None,
    *,
    backward: bool = False,
    exact: bool = True,
    distributed: bool = True,
) -> Plan:
    """The plan with the fastest geometry for one pass of a layer, or why there is none.

    Args:
        cell: one of ``CELLS`` by its name, or another one.
        hidden_size: of the layer.
        batch: the number of sequences.
        dtype: of the layer and its input.
        mask_nnz: the number of recurrent weights left by pruning; None if the layer is dense.
        block: the shape of pruned blocks.
        properties: those of ``torch.cuda.get_device_properties``.
        share: how many such layers share the device at the same time.
        path: the only kernel to consider; None for the fastest.
        backward: whether this is the backward pass.
        exact: whether float32 products must not be rounded to tf32.
        distributed: whether states may stay in the shared memory of clusters.
    """
    processors, shared = properties.multi_processor_count, properties.shared_memory_per_block_optin
    available = processors * (properties.regs_per_multiprocessor * 4 + shared)

    if dtype not in SCALARS:
        reason = f"persistent kernels compute in float32, float16 and bfloat16, not in {dtype}"
        return no_kernel(reason, available)
    if properties.major < 8:
        return no_kernel("persistent kernels need compute capability 8.0", available)
    cell = CELLS[cell] if isinstance(cell, str) else cell
    weights = cell.products * hidden_size**2
    density = 1.0 if mask_nnz is None else mask_nnz / weights
    paths: list[KernelPath] = ["dense"]
    if mask_nnz is not None and hidden_size < 2**16 - ZERO_PLACES:
        paths += ["sparse"] if block in (None, (1, 1)) else ["block", "sparse"]
    starts = tuple(
        Geometry(name, cell, hidden_size, dtype, 0, 0, 0, backward, exact) for name in paths if path in (None, name)
    )
    device = Device(*(getattr(properties, name) for name in Device._fields))

    def fastest(batch: int) -> Geometry | None:
        return _fastest(starts, batch, density, block, device, share, distributed)

    geometry = fastest(batch)
    kept = f"{weights * dtype.itemsize * density / 1e6:.1f} MB of recurrent weights"
    if geometry is None:
        reason = f"{kept} do not fit on the chip" + (" beside their gradients" if backward else "")
        return no_kernel(reason, available)
    geometry = _rounder(geometry, batch, density < 1, fastest, device, share)
    reason = f"{kept} {_how_they_fit(geometry, pruned=mask_nnz is not None)}"
    return Plan(geometry.path, geometry.bytes_on_chip, available, geometry.blocks * geometry.groups, reason, geometry)
