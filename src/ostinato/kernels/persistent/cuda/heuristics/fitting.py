"""Places a geometry's weights in registers, in shared memory and in L2, as far as they fit."""

from collections.abc import Sequence
from typing import Any

import torch

from ostinato.kernels.persistent.cuda.heuristics.geometry import REGISTERS, WARPS, Geometry, Strips, ceil_div


def most_streamed(properties: Any) -> float:
    """The most bytes of weights that all blocks may read from L2 at every step, leaving room for other data."""
    return properties.L2_cache_size * 3 / 4


def split_strips(geometry: Geometry, strip_columns: Sequence[int], shared_limit: int) -> Geometry | None:
    """The geometry of the block kernel with the fewest accesses to shared memory, given the columns of each strip.

    Weights that do not fit on chip are streamed; None if a thread has too few registers even without weights.
    """
    strip_tiles = [max(1, ceil_div(n, geometry.tile_columns)) for n in strip_columns]

    def split(shares: int) -> Geometry | None:
        at_once = WARPS // shares  # strips that the warps multiply at the same time
        first = range(0, len(strip_tiles), at_once)
        tiles = tuple(ceil_div(max(strip_tiles[i : i + at_once]), shares) for i in first)
        return fill_registers(geometry._replace(tiles=sum(tiles), strips=Strips(shares, tiles)), shared_limit)

    def accesses(way: Geometry) -> float:
        """Two to gather for a tile, four to load a tile that is not in registers, four for a sum; and reads of sums."""
        by_warps = WARPS * (2 * way.tiles + 4 * (way.tiles - way.in_registers) + 4 * len(way.strips.tiles))
        return by_warps + way.parts_of_sums * way.rows * way.columns / 32

    ways = (split(shares) for shares in (1, 2, 4, 8))
    return min((way for way in ways if way), key=accesses, default=None)


def fill_registers(geometry: Geometry, shared_limit: int) -> Geometry | None:
    """The geometry with its tiles in registers, then in shared memory; tiles that fit into neither are streamed.

    None if even that does not fit, or if the kernel cannot stream.  Callers check how much may be streamed.
    """
    if geometry.scatters:
        return _fill_scattering(geometry)
    if geometry.path == "dense":
        return _fill_dense(geometry, shared_limit)
    geometry = geometry._replace(streamed=0)  # it may be that of a plan, made before the mask's tiles were counted
    if geometry.path == "block":
        words, places = 2 * geometry.columns * geometry.words_in_flight, geometry.tiles * geometry.tile_columns // 64
        others = places + words + 68 + 16 * (geometry.dtype == torch.float32) + 24 * geometry.backward
        free = (REGISTERS - others) // 4
        return _hold(geometry, free, shared_limit) or _stream(geometry, free - geometry.prefetched, shared_limit)
    sums = 48 * (geometry.columns > 4)  # registers of sums, twice as many if a loop loads streamed entries
    free = REGISTERS - 92 - 24 * geometry.backward - sums
    return _hold(geometry, free // geometry.parts, shared_limit) or _stream(
        geometry, (free - sums) // geometry.parts - geometry.prefetched, shared_limit
    )


def _hold(geometry: Geometry, most: int, shared_limit: int) -> Geometry | None:
    """The geometry with at most `most` tiles in registers; None if the others do not fit into shared memory."""
    geometry = geometry._replace(in_registers=max(0, min(geometry.tiles, most)))
    return geometry if geometry.shared_bytes <= shared_limit else None


def _stream(geometry: Geometry, most: int, shared_limit: int) -> Geometry | None:
    """The geometry with `most` tiles in registers, as many as fit in shared memory, and the others streamed from L2."""
    room = (shared_limit - geometry._replace(tiles=0, in_registers=0).shared_bytes) // geometry.tile_bytes
    if room < 0 or most < 0:  # even without weights the compiler would spill
        return None
    return geometry._replace(in_registers=most, streamed=geometry.tiles - most - room)


def _fill_scattering(geometry: Geometry) -> Geometry | None:
    """The geometry with all tiles in registers, where this kernel needs them; None if they do not fit."""
    rows = ceil_div(geometry.row_tiles, WARPS)
    sums = rows * (8 + 4 * _chains(rows))
    splits = geometry.exact and geometry.dtype == torch.float32
    others = 40 + 12 * geometry.products + geometry.registers_of_cell + 2 * geometry.cluster + 32 * splits
    fits = geometry.tiles <= (REGISTERS - sums - others) // 4
    return geometry._replace(in_registers=geometry.tiles) if fits and geometry.shares_work else None


def _fill_dense(geometry: Geometry, shared_limit: int) -> Geometry | None:
    """:func:`fill_registers` of the dense kernel."""
    states = _registers_of_states(geometry)
    most_gates = 6 if geometry.block_groups > 1 and geometry.is_uneven else 8  # with more, updating threads would spill
    if states > 128 or (geometry.backward and geometry.gates > most_gates):
        return None
    if geometry.block_groups > 1 and geometry.registers < 128:  # updating threads can only pass on registers of theirs
        return None
    free = (geometry.registers - states - _registers_beside_states(geometry)) // 4
    room = (shared_limit - geometry._replace(tiles=geometry.streamed).shared_bytes) // geometry.tile_bytes
    if room < 0 or free < 0:  # even without weights the compiler would spill
        return None
    if geometry.tiles <= free + room:
        return _hold(geometry, free, shared_limit)
    if geometry.takes_fewer:  # a kernel that streams is compiled for its number of sequences, and may then not need to
        return fill_registers(geometry._replace(streamed=1), shared_limit)
    # Prefetched tiles take registers, too, unless a large state in tf32 no longer needs its own by then.
    tf32 = geometry.dtype == torch.float32 and not geometry.exact
    free = max(0, free - (0 if tf32 and states == 128 else geometry.prefetched))
    return _hold(geometry._replace(streamed=geometry.tiles - free - room), free, shared_limit)


def _registers_of_states(geometry: Geometry) -> int:
    """Registers of the dense kernel's operands; in ping-pong, two of their column tiles are loaded at a time."""
    return (2 * geometry.column_tiles if geometry.block_groups == 1 else 8) * ceil_div(geometry.capacity, 8)


def _registers_beside_states(geometry: Geometry) -> int:
    """Registers that the dense kernel needs beside operands and weights."""
    sequence_tiles = ceil_div(geometry.capacity, 8)
    products = geometry.row_tiles_of_warp * sequence_tiles
    count = 4 * products * _chains(products) + 20 + 4 * sequence_tiles
    if geometry.dtype == torch.float32:
        count += 32 if geometry.exact else 20
    if geometry.block_groups == 1:  # otherwise, other threads update units
        count += max(24, 6 * geometry.gates) if geometry.backward else 0
        count += geometry.registers_of_cell
    # Values that each step derives from the number of sequences, kept where there is room: beside what a cluster's
    # blocks send, a state beside h, or a tile taken twice.
    if geometry.takes_fewer:
        more = geometry.cluster > 1 if geometry.backward else 2 * (geometry.cell.states > 1 or geometry.has_half_tiles)
        count += 4 * more
    return count


def _chains(products: int) -> int:
    """Independent accumulators of each of a warp's products, which hide the latency of mma."""
    return 1 if products >= 4 else 2 if products >= 2 else 4
