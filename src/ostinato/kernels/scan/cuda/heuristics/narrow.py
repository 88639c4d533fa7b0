"""Few channels: tiles of whole rows, which are contiguous in memory, so that a warp's steps are one piece of it."""

import functools
import math
from collections import Counter

from ostinato.kernels.scan.cuda.heuristics.criteria import FULL, LINEAR, STAGES, Criteria, lanes_across
from ostinato.kernels.scan.cuda.heuristics.geometry import Geometry

# Measured on an H200:
MOST_CHANNELS, FEW_CHANNELS = 31, 7  # of all, and of those that may be long, as no other geometry suits them
MOST_BYTES = 128 << 10  # of a sequence of one input, unless of few channels
WARPS, BUSY_WARPS = 16, 10  # of a multiprocessor: resident, with as many registers as they need, and to keep it busy
BYTES_OF_WARP = 24_000  # of a sequence, all inputs together
LINEAR_ROWS, ROWS = 15, 11  # of linear scans' tiles and of others'
CONFLICT, BEGINNING = 0.1, 2  # the time of a bank conflict at a row and of a tile's beginning, in rows
BLOCK = 5  # the time of a block's beginning and end, in rows
JOINED_BYTES = 8 << 10  # of an input, at most, of sequences scanned as one
TESTS = 1.15  # by how much it takes longer to look for the ends of sequences, without a mask of resets
SEVERAL_WAVES = 5  # of tiles: with fewer, longer ones leave multiprocessors idle
# Bytes of an input's sequence from which on blocks had better share it: if blocks that stream are fewer than
# multiprocessors, and if the last of their waves, as long as the others, is not filled.
ALONE_BYTES, LONG_BYTES = 32 << 10, 192 << 10


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


@functools.lru_cache(maxsize=4096)
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


def narrow_leaves_processors_idle(scan: Criteria, streaming: Geometry) -> bool:
    """Whether narrow sequences are too few for all multiprocessors, and so long that blocks had better share them."""
    processors = scan.device.processors
    waves = scan.sequences / (streaming.resident * processors)
    few, filled = scan.sequences < processors, waves >= FULL * math.ceil(waves)
    return scan.sequence_bytes > (ALONE_BYTES if few else LONG_BYTES) and (few or not filled)


def chain_narrow(scan: Criteria) -> Geometry | None:
    """Sequences that several blocks share: some interleave their tiles, others look back.

    With a mask fewer sequences interleave: a tile with a reset has its inclusive prefix at once, so blocks do not look
    back far.
    """
    return _chain_pairs(scan) or _look_back(scan) or _interleave(scan)


def _chain_pairs(scan: Criteria) -> Geometry | None:
    """Channels in pairs: up to eight sequences interleave, more of them look back.

    Tiles are smaller where larger ones would begin another wave, or not fill one.
    """
    if scan.narrow_vector == 1 or not scan.gapless or scan.channels > MOST_CHANNELS:
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
    """Several sequences of a linear scan."""
    few = (0 if scan.resets else 2) < scan.channels <= MOST_CHANNELS and scan.gapless and not scan.packed
    several = scan.sequences > (2 if scan.channels > 8 else 1 if scan.resets else 8)
    if not (few and several) or scan.element not in LINEAR or scan.itemsize > 4:
        return None
    rows = 64 // scan.numbers(1) - 1 | 1
    if scan.channels in (3, 6) and scan.backward:
        rows = 20  # against bank conflicts, as odd rows of other channels
    return Geometry(1, lanes_across(scan.channels, 1), 8, rows, True, 2, scan.channels, looks_back=True)


def _interleave(scan: Criteria) -> Geometry | None:
    """Few sequences of up to seven channels, of eight in pieces of 16 bytes, or of up to 31 of a linear scan."""
    channels, numbers, pieces = scan.channels, scan.computed, scan.itemsize <= 4 and not scan.packed
    most = FEW_CHANNELS if not pieces else MOST_CHANNELS if scan.element in LINEAR else 8
    if not scan.gapless or channels > most:
        return None
    lanes = lanes_across(channels, 1)
    if lanes == channels <= 8:  # odd rows, against bank conflicts
        stages = 1 if lanes <= 2 or (scan.backward and lanes == 8) else STAGES  # by registers
        rows = ((40 if lanes <= 2 else 36) // numbers - 1) | 1
        return _with_longer_tiles(scan, Geometry(1, lanes, 8, rows, True, 2, channels, stages))
    rows = (36 // numbers - 1) | 1
    if scan.itemsize == 2 and channels in (5, 7):  # segments begin in whole words, each in other banks
        rows = max(4, 36 // numbers // 4 * 4)
    elif channels in (3, 6) and scan.itemsize <= 4 and (scan.backward or scan.itemsize == 2):
        rows = 36 // numbers  # so do even rows of these
    return _with_longer_tiles(scan, Geometry(1, lanes, 16, rows, True, 1, channels))


def _with_longer_tiles(scan: Criteria, interleaved: Geometry) -> Geometry:
    """The geometry with as many rows as registers hold of two inputs of 16 bits, if blocks have several tiles of them.

    Fewer tiles are then composed and published.  Segments of rows of three or six channels would share banks, and where
    shared memory is small, such tiles would be cut to less than the others.
    """
    rows = 32 // -(-scan.inputs // 2)
    longer = interleaved._replace(rows=rows if scan.channels in (5, 7) else rows - 1 | 1)
    pays = scan.itemsize == 2 and scan.element in LINEAR and scan.channels not in (3, 6) and not scan.packed
    return longer if pays and scan.fits(longer) and scan.waves(longer) >= SEVERAL_WAVES else interleaved
