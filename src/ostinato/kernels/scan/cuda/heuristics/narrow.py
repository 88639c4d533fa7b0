"""Few channels ("narrow" sequences): tiles have whole rows, so that a warp's steps are contiguous in memory."""

import functools
import math
from collections import Counter

from ostinato.kernels.scan.cuda.heuristics.criteria import FULL, LINEAR, STAGES, Criteria, lanes_across
from ostinato.kernels.scan.cuda.heuristics.geometry import Geometry

# Measured on an H200:
MOST_CHANNELS, FEW_CHANNELS = 31, 7  # of narrow sequences; of those that may be long, as no other geometry suits them
MOST_BYTES = 128 << 10  # of a sequence in one input, unless it has few channels
WARPS, BUSY_WARPS = 16, 10  # warps of a multiprocessor: resident, by their registers; and enough to keep it busy
BYTES_OF_WARP = 24_000  # bytes of a sequence, in all inputs together, for which it gets another warp
LINEAR_ROWS, ROWS = 15, 11  # the most rows of the tiles of linear scans, and of other elements
CONFLICT, BEGINNING = 0.1, 2  # the time of a bank conflict at a row, and of the beginning of a tile, in rows
BLOCK = 5  # the time of the beginning and end of a block, in rows
JOINED_BYTES = 8 << 10  # the most bytes, in one input, of sequences that are scanned as one
TESTS = 1.15  # the slowdown by tests for the ends of joined sequences, if there is no mask of resets
SEVERAL_WAVES = 5  # waves of tiles; with fewer, longer tiles would leave multiprocessors idle
# Bytes of a sequence in one input from which on several blocks should share it: if there are fewer streaming blocks
# than multiprocessors, and if their last wave, which takes as long as the others, is not filled.
ALONE_BYTES, LONG_BYTES = 32 << 10, 192 << 10


@functools.lru_cache(maxsize=4096)
def sequences_joined(scan: Criteria) -> int:
    """How many short sequences of few channels are joined, to be scanned as one: a divisor of their number; 1 if none.

    To begin, a block takes as long as to scan some dozens of steps, and the steps of a short sequence seldom fill its
    tiles.  But the longer blocks are, the longer memory is not busy while the first ones begin and the last ones end.
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
        return (waves + 1) * ((tests if joined > 1 else 1) * _time_of_block(whole, geometry) + BLOCK)

    def divisor(limit: int) -> int:
        return next(n for n in range(limit, 0, -1) if scan.sequences % n == 0)

    return min((divisor(most >> n) for n in reversed(range(most.bit_length()))), key=cost)


@functools.lru_cache(maxsize=4096)
def stream_narrow(scan: Criteria) -> Geometry | None:
    """Streaming for few channels: a warp for each sequence, without barriers, or several if sequences are few or long.

    The number of rows is that which takes the least time to begin and scan all tiles.  Of two numbers that differ by
    one, only that with fewer bank conflicts is considered, so that varying lengths share kernels.
    """
    long = scan.channels > FEW_CHANNELS and scan.sequence_bytes > MOST_BYTES
    if not scan.contiguous or scan.channels > MOST_CHANNELS or long:
        return None
    vec = scan.narrow_vector
    lanes = lanes_across(scan.channels, vec)
    wanted = max(
        BUSY_WARPS * scan.device.processors / scan.sequences, scan.inputs * scan.sequence_bytes / BYTES_OF_WARP
    )
    wanted = min(wanted, scan.steps * lanes / 64)  # leaves at least two steps for each segment
    warps = next((n for n in (1, 2, 4) if n >= wanted), 8)
    one = Geometry(vec, lanes, warps, 1, resident=WARPS // warps, narrow=scan.channels)

    most = LINEAR_ROWS if scan.element in LINEAR and scan.itemsize <= 4 else ROWS  # limited by registers
    tiles = [one._replace(rows=rows) for rows in range(1, most + 1)]
    pairs = zip(tiles[1::2], tiles[2::2], strict=False)
    fewest = (min(pair, key=lambda tile: (_bank_conflicts(tile, scan.itemsize), -tile.rows)) for pair in pairs)
    return min((tiles[0], *fewest), key=functools.partial(_time_of_block, scan))


def _time_of_block(scan: Criteria, geometry: Geometry) -> float:
    """The time of a block of narrow sequences, in units of the time of a row."""
    tile_time = geometry.rows * (1 + CONFLICT * _bank_conflicts(geometry, scan.itemsize)) + BEGINNING
    return -(-scan.steps // geometry.tile) * tile_time


@functools.cache
def _bank_conflicts(geometry: Geometry, itemsize: int) -> int:
    """How many additional accesses to one bank of shared memory a warp needs to read a row of each segment."""
    words = {
        (segment * geometry.rows * geometry.narrow + channel) * itemsize // 4
        for segment in range(geometry.segments)
        for channel in range(geometry.narrow)
    }
    return max(Counter(word % 32 for word in words).values()) - 1


def narrow_leaves_processors_idle(scan: Criteria, streaming: Geometry) -> bool:
    """Whether narrow sequences leave multiprocessors idle, and are long enough to be shared by several blocks."""
    processors = scan.device.processors
    waves = scan.sequences / (streaming.resident * processors)
    few, filled = scan.sequences < processors, waves >= FULL * math.ceil(waves)
    return scan.sequence_bytes > (ALONE_BYTES if few else LONG_BYTES) and (few or not filled)


def chain_narrow(scan: Criteria) -> Geometry | None:
    """Chained tiles for few channels, interleaved or with look-back.

    With a mask of resets fewer sequences interleave: a tile with a reset has its inclusive prefix at once, so blocks do
    not look back far.
    """
    return _chain_pairs(scan) or _look_back(scan) or _interleave(scan)


def _chain_pairs(scan: Criteria) -> Geometry | None:
    """Pairs of 16-bit channels: up to eight sequences interleave, more of them look back.

    Tiles are smaller where larger ones would begin another wave, or not fill one.
    """
    if scan.narrow_vector == 1 or not scan.contiguous or scan.channels > MOST_CHANNELS:
        return None
    lanes = lanes_across(scan.channels, 2)
    interleaved = min(
        (Geometry(2, lanes, 16, rows, True, 1, scan.channels) for rows in ((11, 7) if scan.backward else (15, 11))),
        key=lambda tile: math.ceil(scan.waves(tile)) * (tile.rows + BEGINNING),
    )
    if scan.sequences <= (1 if scan.resets else 8) and scan.waves(interleaved) >= 0.5:
        return interleaved
    short, long = (Geometry(2, lanes, 8, rows, True, 2, scan.channels, looks_back=True) for rows in (11, 23))
    return short if scan.waves(short) <= 1 else long


def _look_back(scan: Criteria) -> Geometry | None:
    """Look-back for several sequences of a linear scan."""
    few = (0 if scan.resets else 2) < scan.channels <= MOST_CHANNELS and scan.contiguous and not scan.packed
    several = scan.sequences > (2 if scan.channels > 8 else 1 if scan.resets else 8)
    if not (few and several) or scan.element not in LINEAR or scan.itemsize > 4:
        return None
    rows = 64 // scan.step_registers(1) - 1 | 1
    if scan.channels in (3, 6) and scan.backward:
        rows = 20  # avoids bank conflicts, as odd numbers do for other numbers of channels
    return Geometry(1, lanes_across(scan.channels, 1), 8, rows, True, 2, scan.channels, looks_back=True)


def _interleave(scan: Criteria) -> Geometry | None:
    """Interleave few sequences of up to seven channels; not packed, in up to 32 bits, also of 8, or of 31 if linear."""
    channels, registers, small = scan.channels, scan.composition_registers, scan.itemsize <= 4 and not scan.packed
    most = FEW_CHANNELS if not small else MOST_CHANNELS if scan.element in LINEAR else 8
    if not scan.contiguous or channels > most:
        return None
    lanes = lanes_across(channels, 1)
    if lanes == channels <= 8:  # an odd number of rows avoids bank conflicts
        stages = 1 if lanes <= 2 or (scan.backward and lanes == 8) else STAGES  # limited by registers
        rows = ((40 if lanes <= 2 else 36) // registers - 1) | 1
        return _with_longer_tiles(scan, Geometry(1, lanes, 8, rows, True, 2, channels, stages))
    rows = (36 // registers - 1) | 1
    if scan.itemsize == 2 and channels in (5, 7):  # segments begin with whole words, in different banks
        rows = max(4, 36 // registers // 4 * 4)
    elif channels in (3, 6) and scan.itemsize <= 4 and (scan.backward or scan.itemsize == 2):
        rows = 36 // registers  # with these channels an even number avoids conflicts, too
    return _with_longer_tiles(scan, Geometry(1, lanes, 16, rows, True, 1, channels))


def _with_longer_tiles(scan: Criteria, interleaved: Geometry) -> Geometry:
    """The geometry with as many rows as registers hold of two 16-bit inputs, if blocks have several such tiles each.

    Fewer tiles are composed and published then.  With three or six channels segments would conflict in shared memory's
    banks, and where shared memory is small, such tiles would be cut to fewer rows than the original ones.
    """
    rows = 32 // -(-scan.inputs // 2)
    longer = interleaved._replace(rows=rows if scan.channels in (5, 7) else rows - 1 | 1)
    pays = scan.itemsize == 2 and scan.element in LINEAR and scan.channels not in (3, 6) and not scan.packed
    return longer if pays and scan.fits(longer) and scan.waves(longer) >= SEVERAL_WAVES else interleaved
