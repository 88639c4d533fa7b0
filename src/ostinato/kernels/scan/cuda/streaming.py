"""Streaming: tiles such that the resident blocks have as many bytes on their way as Little's law asks for."""

import functools
import math
from collections import Counter

from ostinato.kernels.scan.cuda.criteria import (
    BEGINNING,
    FILLED,
    FULL,
    LINEAR,
    LONG,
    SHORT,
    STAGES,
    Criteria,
    lanes_across,
)
from ostinato.kernels.scan.cuda.geometry import Geometry

# Of narrow sequences, measured on an H200:
MOST_CHANNELS, FEW_CHANNELS = 31, 7  # of all, and of those that may be long, as no other geometry suits them
MOST_BYTES = 128 << 10  # of a sequence of one input, unless of few channels
WARPS, BUSY_WARPS = 16, 10  # of a multiprocessor: resident, with as many registers as they need, and to keep it busy
BYTES_OF_WARP = 24_000  # of a sequence, all inputs together
LINEAR_ROWS, ROWS = 15, 11  # of linear scans' tiles and of others'
CONFLICT = 0.1  # the time of a bank conflict at a row, in rows
BLOCK = 5  # the time of a block's beginning and end, in rows
JOINED_BYTES = 8 << 10  # of an input, at most, of sequences scanned as one
TESTS = 1.15  # by how much it takes longer to look for the ends of sequences, without a mask of resets
FEW_STEPS = 32  # of which linear scans have a geometry of their own
THREADS = 384  # a multiprocessor's occupancy target, with as many registers as they need


def _power_of_two(x: float, least: int, most: int) -> int:
    return max(least, min(most, 1 << max(0, round(math.log2(max(x, 1))))))


@functools.lru_cache(maxsize=4096)
def sequences_joined(scan: Criteria) -> int:
    """How many short sequences of few channels are scanned as one: a divisor of their number, one if none are.

    A block of its own takes as long to begin as to scan some dozens of steps, and few tiles fit the steps of a short
    sequence.  But while the last blocks end, as the first begin, the memory is not busy.
    """
    if scan.sequences < 2 or scan.sequence_bytes == 0 or stream_narrow(scan) is None:
        return 1
    processors = scan.device.processors
    tests = 1 if scan.resets else TESTS
    most = max(1, min(JOINED_BYTES // scan.sequence_bytes, scan.sequences // (BUSY_WARPS * processors)))

    def cost(joined: int) -> float:
        whole = scan._replace(sequences=scan.sequences // joined, steps=scan.steps * joined)
        geometry = stream_narrow(whole)
        assert geometry is not None
        waves = whole.sequences * geometry.warps / (WARPS * processors)
        return (waves + 1) * ((tests if joined > 1 else 1) * _rows_of_block(whole, geometry) + BLOCK)

    def divisor(limit: int) -> int:
        return next(n for n in range(limit, 0, -1) if scan.sequences % n == 0)

    return min((divisor(most >> n) for n in reversed(range(most.bit_length()))), key=cost)


def stream_narrow(scan: Criteria) -> Geometry | None:
    """Sequences of few channels: a warp each, without barriers, or several where sequences are few or long.

    The rows are those that take the least time: to scan and to begin each of the tiles that cover the steps.  Of two
    that differ by one, those count that have fewer bank conflicts: lengths that change then share kernels.
    """
    long = scan.channels > FEW_CHANNELS and scan.sequence_bytes > MOST_BYTES
    if not scan.gapless or scan.channels > MOST_CHANNELS or long:
        return None
    vec = scan.narrow_vector
    lanes = lanes_across(scan.channels, vec)
    wanted = max(
        BUSY_WARPS * scan.device.processors / scan.sequences, scan.inputs * scan.sequence_bytes / BYTES_OF_WARP
    )
    wanted = min(wanted, scan.steps * lanes / 64)  # that have two steps for each segment
    warps = next((n for n in (1, 2, 4) if n >= wanted), 8)
    one = Geometry(vec, lanes, warps, 1, resident=WARPS // warps, narrow=scan.channels)

    most = LINEAR_ROWS if scan.element in LINEAR and scan.itemsize <= 4 else ROWS  # by registers
    tiles = [one._replace(rows=rows) for rows in range(1, most + 1)]
    pairs = zip(tiles[1::2], tiles[2::2], strict=False)
    fewest = (min(pair, key=lambda tile: (_bank_conflicts(tile, scan.itemsize), -tile.rows)) for pair in pairs)
    return min((tiles[0], *fewest), key=functools.partial(_rows_of_block, scan))


def _rows_of_block(scan: Criteria, geometry: Geometry) -> float:
    """The time of a block of narrow sequences, as that of rows."""
    each = geometry.rows * (1 + CONFLICT * _bank_conflicts(geometry, scan.itemsize)) + BEGINNING
    return -(-scan.steps // geometry.tile) * each


@functools.cache
def _bank_conflicts(geometry: Geometry, itemsize: int) -> int:
    """How often a bank of shared memory is read once more when a warp reads a row of each segment."""
    words = {
        (segment * geometry.rows * geometry.narrow + channel) * itemsize // 4
        for segment in range(geometry.segments)
        for channel in range(geometry.narrow)
    }
    return max(Counter(word % 32 for word in words).values()) - 1


def stream_few_steps(scan: Criteria) -> Geometry | None:
    """Sequences of one tile of one warp, or many of few: further warps would have no steps, or leave blocks waiting."""
    if scan.element not in LINEAR or scan.steps > FEW_STEPS:
        return None
    vec = min(scan.vector, 8 // scan.itemsize)
    warp = Geometry(vec, lanes_across(scan.channels, vec), 1, 4, resident=12)
    if scan.steps <= warp.tile:
        return warp
    return warp._replace(stages=STAGES) if scan.chains(warp) > 4 * scan.device.processors else None


def stream_halves(scan: Criteria) -> Geometry | None:
    """Rows of two full lines of 16 bits, with twice the warps for their arithmetic, if they fill the GPU or are long.

    Blocks of half the warps need a last wave that is filled.  Over a long sequence blocks drift apart, so that L2 would
    lose the other half of a line before it is used.
    """
    whole = Geometry(4, 32, 8, 4 if scan.backward else 8, resident=2, stages=STAGES)
    fits = whole.shared_bytes(scan.inputs, 0, scan.itemsize) <= scan.device.shared_of_block
    if not (_is_halved(scan) and scan.channels > 64 and scan.steps > SHORT and fits):
        return None
    waves = scan.chains(whole) / scan.device.processors
    if scan.element in LINEAR and waves > 1:
        waves /= 2  # two blocks a multiprocessor
        return whole._replace(warps=4, rows=8) if waves <= 1 or waves >= FILLED * math.ceil(waves) else None
    if scan.element in LINEAR and scan.steps > LONG:
        return _alone(scan, whole, max(waves, FILLED))
    generated = scan.element.startswith("Generated") and scan.backward and scan.inputs <= 5
    if generated and scan.steps >= LONG and not scan.resets and waves >= FULL * math.ceil(waves):
        return whole._replace(resident=1)  # its factors take more than 128 registers
    return None


def _is_halved(scan: Criteria) -> bool:
    """Whether a lane's eight bytes are more 16-bit channels than its registers compute well."""
    return scan.itemsize == 2 and scan.aligned >= 8


def stream_alone(scan: Criteria) -> Geometry | None:
    """A block on each multiprocessor, of two lines or of one."""
    if scan.element not in LINEAR or scan.itemsize > 4 or scan.itemsize * scan.aligned < 16:
        return None
    for vec in (8 // scan.itemsize, 4 // scan.itemsize):
        block = Geometry(vec, 32, 8, 8)
        waves = scan.chains(block) / scan.device.processors
        fills = FILLED <= waves <= 1 and scan.channels >= block.group
        if fills and block.tile < scan.steps <= LONG:
            return _alone(scan, block, waves)
    return None


def _alone(scan: Criteria, whole: Geometry, waves: float) -> Geometry:
    """Tiles of a block that has a multiprocessor to itself, with all the registers that it can use.

    It has as many stages as Little's law asks for, and no more: on an H100, half as much again on its way as that made
    the memory a tenth slower, and where rows share lines, blocks that are further ahead of others lose them sooner.
    """
    row = scan.inputs * whole.warps * whole.group * scan.itemsize
    wanted = scan.device.in_flight / (1 if scan.shares_lines else waves) / row
    rows = whole.rows if wanted > 1.5 * whole.rows else 4
    return whole._replace(resident=1, rows=rows, stages=max(STAGES, math.ceil(wanted / rows)))


def stream(scan: Criteria) -> Geometry:
    """A lane moves up to eight bytes, so that a warp's row is two full lines.

    Of 16 bits, narrower vectors spread a scan over more threads, where it would fill the GPU badly or computes or tests
    much besides, and 16-byte copies that bring whole lines into L2 make up for rows of half a line.
    """
    halved, processors = _is_halved(scan), scan.device.processors
    vec = 2 if halved else min(scan.vector, 8 // scan.itemsize)
    if scan.element in LINEAR and scan.anywhere and vec > 1 and 2 * scan.chains(Geometry(vec, 32, 1, 1)) <= processors:
        vec //= 2
    lanes = min(lanes_across(scan.channels, vec), 16 if halved else 32)
    segments, warps = 32 // lanes, 4
    least, most = (4, 8) if scan.backward else (8, 16)
    longer = Geometry(vec, lanes, warps, most, resident=2)
    blocks = scan.chains(longer)
    at_once = min(max(blocks / processors, 1), 4)  # blocks of a multiprocessor
    wanted = scan.device.in_flight / at_once
    enough = longer.tile * longer.group * scan.inputs * scan.itemsize >= wanted  # one tile on its way
    long_backward = scan.element == "LinearScanBackward" and scan.itemsize == 4 and scan.steps >= LONG
    if long_backward and at_once < FULL * 2 and enough:
        return longer
    tile = _power_of_two(wanted / (STAGES * scan.inputs * lanes * vec * scan.itemsize), 4, 64)
    whole = scan.steps <= warps * segments * least  # one tile
    rows = least if whole else _power_of_two(tile / (warps * segments), least, 4 if scan.inputs > 3 else most)
    if scan.steps <= min(SHORT, segments * rows) and blocks > 4 * processors:
        warps = 1  # more would have no steps
    threads = 512 if halved and rows * vec <= 8 else THREADS  # few steps need few registers
    return Geometry(vec, lanes, warps, rows, resident=threads // (32 * warps), stages=STAGES)


def stream_in_clusters(scan: Criteria) -> Geometry | None:
    """Two blocks a chain where these fill the GPU, one on a multiprocessor.

    A cluster must fit within a GPC: larger ones would leave more multiprocessors without a block.  Clusters drift
    apart, so rows must not share lines.
    """
    words = scan.inputs * scan.itemsize // 2  # of a row of two channels, in registers
    pair = Geometry(2, 32, 8, 1 << (64 // max(words, 2)).bit_length() - 1, resident=2, cluster=2)
    lines = scan.itemsize <= 4 and not scan.ends_within_lines
    wide = lines and scan.aligned * scan.itemsize >= 16 and not scan.by_offsets
    if not (scan.device.hopper and scan.element in LINEAR and wide) or scan.packed:
        return None
    filled = scan.chains(pair) * pair.cluster / scan.device.processors
    fills = FILLED <= filled <= 1 and scan.channels >= pair.group
    return pair if fills and scan.steps > 4 * pair.tile and scan.fits(pair) else None
