"""Chained scans: several blocks share a chain, in one wave of blocks, with tiles as long as registers permit."""

import itertools
import math

from ostinato.kernels.scan.cuda.heuristics.criteria import (
    CHEAP,
    FILLED,
    FULL,
    LINEAR,
    LONG,
    STAGES,
    Criteria,
    lanes_across,
)
from ostinato.kernels.scan.cuda.heuristics.geometry import Geometry

EVENLY = 0.95  # the fraction of the multiprocessors that must have a block, if all chains have equally many blocks
BUSY = 32 << 10  # bytes in flight to a multiprocessor; with more, copying them would keep its warps busy
FEW_WAVES = 3  # waves of tiles; with fewer, drawing tiles from a counter does not balance the load
FEW_COMPANIONS = 24  # blocks per chain; with no more, look-back is faster than interleaved tiles


def staying(scan: Criteria) -> Geometry | None:
    """One tile of whole rows for each block, if the shared memory of all multiprocessors holds all tiles at once.

    Where more than half of the multiprocessors would have no block, the smaller tiles of look-back are faster.
    """
    unaligned = scan.itemsize * scan.aligned < 4 and scan.channels > 16
    if not (scan.contiguous and scan.element in CHEAP and unaligned) or scan.packed:
        return None
    lanes = 32 * -(-scan.channels // 32)
    for most, warps in itertools.product((8, 32), range(1, min(1024 // lanes, 15) + 1)):  # there are 15 named barriers
        geometry = Geometry(1, lanes, warps, 32, chained=True, narrow=scan.channels, stays=True)
        chunks = -(-scan.steps // geometry.tile)
        fits = geometry.shared_bytes(scan.inputs, 0, scan.itemsize) <= scan.device.shared_of_block
        # Each warp reads at most `most` messages of other blocks.
        blocks, processors = scan.sequences * chunks, scan.device.processors
        if fits and blocks <= processors and chunks - 1 <= most * warps:
            return geometry if 2 * blocks >= processors else None
    return None


def _chained_tile(scan: Criteria, warps: int = 8) -> Geometry:
    """A tile such that a thread keeps two, as loaded or computed, in half of the 128 registers that each of 512 has.

    Where rows do not consist of whole 16-byte pieces, pairs of channels take half as many copy instructions.
    """
    copied = scan.unaligned_rows or (scan.itemsize == 4 and scan.aligned == 2 and scan.channels > 32)
    pairs = scan.itemsize == 2 or (copied and scan.element in LINEAR)
    vec = min(scan.vector, 2) if pairs else 1
    chains = scan.sequences * -(-scan.channels // 64)
    many = FEW_COMPANIONS * chains >= 2 * scan.device.processors or (scan.packed and chains > 1)
    if scan.unaligned_rows and not many:
        vec = 1  # tiles are longer then, so that a carry passes through fewer tiles of a chain
    rows = max(4, 1 << (32 // scan.step_registers(vec)).bit_length() - 1)
    lanes = lanes_across(scan.channels, vec)
    return Geometry(vec, lanes, warps, rows, chained=True, resident=16 // warps, stages=STAGES)


def _mapped(scan: Criteria) -> Geometry | None:
    """A tile of a linear scan that tensor maps copy: one in flight is enough, as 512 threads do nothing but scan."""
    if scan.element not in LINEAR or scan.itemsize > 4 or not scan.mappable or scan.packed or scan.resets:
        return None
    return _chained_tile(scan, warps=16)._replace(rows=36 // scan.inputs // 4 * 4, stages=1, mapped=True)


def interleave_evenly(scan: Criteria) -> Geometry | None:
    """Interleave few chains that share all multiprocessors evenly, so that no block waits for a carry.

    Their rows consist of whole cache lines, or have all channels.  Chains of few blocks gain from that only where
    copies by each lane would keep the warps busy, and not in long backward passes.
    """
    tile = _mapped(scan)
    busy = scan.device.in_flight > BUSY and not (scan.backward and scan.steps > 8 * LONG)
    if not tile or (_has_few_companions(scan) and not busy):
        return None
    chains, processors = scan.chains(tile), scan.device.processors
    blocks = processors // chains * chains
    evenly = _crowded_chains(scan) < chains <= processors // 8 and blocks >= EVENLY * processors
    filled = not scan.ends_within_lines and scan.sequences * scan.channels >= FULL * chains * tile.group
    pays = evenly and (filled or scan.channels <= tile.group)
    return tile if pays and scan.waves(tile) >= FEW_WAVES else None


def _look_back_tile(scan: Criteria) -> Geometry:
    """The longest tile that registers permit with look-back, where a thread keeps a single tile."""
    tile = _chained_tile(scan)
    rows = 2 * tile.rows if tile.vec == 2 else max(4, 64 // scan.step_registers(1) // 4 * 4)
    if tile.vec == 2 and scan.element in LINEAR and (scan.unaligned_rows or scan.itemsize == 4):  # limited by registers
        rows = (36 if scan.itemsize == 2 else 48) // scan.step_registers(2) // 4 * 4
    return tile._replace(rows=rows, stages=1, looks_back=True)


def look_back_unless_longest(scan: Criteria) -> Geometry | None:
    """Look-back for linear and 16-bit scans, except the longest; tiles are half as long if there are few.

    The longest linear scans look back, too, if their rows share cache lines.  Where three groups of half or a quarter
    of the width have all channels, fewer lanes are idle, and a carry passes through fewer tiles, as these are longer,
    which matters with many tiles of few sequences.
    """
    back = _look_back_tile(scan)
    if scan.element in LINEAR and not scan.tests_resets:
        applies = scan.steps <= 8 * LONG or (back.lanes == 32 and scan.ends_within_lines)
        halves, quarters = (-(-scan.channels // (lanes * back.vec)) for lanes in (16, 8))
        whole = back.lanes == 32 and not scan.unaligned_rows
        if whole and halves == 3:
            back = back._replace(lanes=16)
        elif whole and quarters == 3 and back.vec == 2 and scan.sequences <= 8 and scan.steps > 32 * back.tile:
            back = back._replace(lanes=8)
    else:
        long = 8 * LONG if scan.element.startswith("Generated") and not scan.resets else LONG
        applies = scan.itemsize == 2 and scan.steps <= long
        back = back._replace(rows=min(back.rows, 16))
    if not applies:
        return None
    return back._replace(rows=max(4, back.rows // 8 * 4)) if scan.steps <= 2 * back.tile else back


def look_back_in_pairs(scan: Criteria) -> Geometry | None:
    """Look-back with pairs of 32-bit channels in long backward passes of few chains.

    Rows are longer then, and more bytes are in flight.
    """
    pairs = Geometry(2, 32, 16, 14, chained=True, looks_back=True)
    long_backward = scan.element == "LinearScanBackward" and scan.itemsize == 4 and scan.steps > LONG
    if not (long_backward and _has_single_chains(scan) and not scan.resets):
        return None
    even = scan.vector > 1 and scan.chains(_chained_tile(scan)) == 2 * scan.chains(pairs)
    return pairs if even and scan.fits(pairs) and scan.waves(pairs) >= 2 * FEW_WAVES else None


def _has_few_companions(scan: Criteria) -> bool:
    """Whether few blocks share a chain."""
    return 2 * scan.device.processors // scan.chains(_chained_tile(scan)) <= FEW_COMPANIONS


def _has_single_chains(scan: Criteria) -> bool:
    """Whether the time is that of a carry along a single chain, rather than that of the tiles of many chains.

    Chains that share cache lines wait for their copies instead; two blocks on a multiprocessor hide that.
    """
    tile = _chained_tile(scan)
    few_chains = 4 * scan.chains(tile) <= scan.device.processors
    split_lines = scan.channels > tile.group and scan.ends_within_lines
    aligned = scan.aligned * scan.itemsize >= 16 and scan.itemsize <= 4
    shares_lines = split_lines and aligned and scan.element in LINEAR
    return few_chains and not shares_lines and _has_few_companions(scan) and not scan.packed


def _crowded_chains(scan: Criteria) -> int:
    """Up to how many chains a 16-bit scan has too many blocks per chain to interleave: aggregates are twice as long."""
    tile, long = _chained_tile(scan), scan.steps > 32 * LONG
    pairs = scan.itemsize == 2 and tile.vec == 2 and tile.lanes == 32 and scan.element in LINEAR
    return 3 if pairs and long and not (scan.packed or scan.resets) else 1


def look_back(scan: Criteria) -> Geometry | None:
    """Look-back for long scans that have few blocks per chain, or whose blocks are kept from working in step.

    With packed sequences look-back is short: tiles in which a sequence begins publish their inclusive prefix at once.
    So do tiles with a reset, but a mask may have none.  One block of 512 threads publishes half as many messages as two
    blocks of 256, which matters where many blocks look back along one chain.
    """
    tile = _chained_tile(scan)
    vec, chains, whole_warps = tile.vec, scan.chains(tile), tile.lanes == 32
    raw = scan.element in CHEAP
    plain_halves = tile.lanes == 16 and scan.element in LINEAR and not scan.resets
    crowded = raw and scan.itemsize == 2 and (whole_warps or plain_halves) and chains <= _crowded_chains(scan)
    delayed = scan.resets or (raw and scan.aligned == 1 and scan.itemsize <= 4)  # by tests for resets, or small copies
    back_if_delayed = delayed and whole_warps and (scan.backward or chains > 2 or scan.itemsize == 2)
    pays = scan.packed or back_if_delayed or _has_few_companions(scan) or crowded
    if scan.steps <= LONG or not pays:
        return None
    # A carry takes fewer round trips along a single chain if tiles are longer; resets end its path early.
    plain, single = not (scan.packed or scan.resets), _has_single_chains(scan)
    longer = crowded and vec == 2 and scan.steps > (4 if scan.backward else 32) * LONG and plain
    if scan.step_registers(vec) > scan.inputs * scan.words:
        registers = 64  # more would spill
    elif vec == 1:
        registers = 64 if single != delayed or (scan.backward and scan.itemsize == 4 and plain) else 72
    elif longer or (single and scan.resets):
        registers = 60
    else:
        registers = 72 if single else 56
    most = max(4, min(32, registers // scan.step_registers(vec) // 4 * 4))
    for warps, rows in itertools.product((16, 8) if single or longer else (8,), range(most, most // 2 - 1, -4)):
        back = tile._replace(warps=warps, rows=rows, resident=16 // warps, stages=1, looks_back=True)
        if (longer or scan.waves(back) >= FEW_WAVES * warps / 8) and scan.fits(back):
            return back
    return None


def interleave(scan: Criteria) -> Geometry:
    """Interleaved tiles of two blocks of 256 threads per multiprocessor, or of one block of 512.

    Two blocks hide each other's latencies; one publishes half as many messages, which matters where a block cannot load
    those of all others at once.
    """
    small, large = _chained_tile(scan), _chained_tile(scan, warps=16)
    if scan.steps <= LONG:
        return small
    if scan.element in CHEAP and small.lanes == 32 and scan.words == 1:
        # In a forward pass, one stage of longer tiles has enough bytes in flight.
        rows, stages = (36 // scan.inputs // 4 * 4, STAGES) if scan.backward else (small.rows, 1)
        small, large = (g._replace(rows=rows, stages=stages) for g in (small, large))
    others = small.resident * scan.device.processors // scan.chains(small) - 1
    return small if others <= small.read_at_once(max(4, scan.itemsize)) else large


def keep_in_step(scan: Criteria, streaming: Geometry) -> Geometry | None:
    """Chained tiles for long scans whose blocks would end at different times or drift apart if they streamed.

    Streaming can leave some multiprocessors with more chains than others; with look-back, blocks draw tiles.  In a
    backward pass, whose blocks read half as much again at each step, that pays off only if the imbalance is greater, or
    the pass longer still.  And streaming blocks drift apart, so that L2 evicts a line before both groups of its
    channels have been read.  In 16 bits they drift less if they interleave tiles of whole lines, copied by tensor maps.
    """
    if scan.element not in LINEAR or scan.itemsize > 4 or streaming.cluster > 1:
        return None
    drifts = scan.shares_lines and scan.steps >= LONG // 8 and (scan.aligned != 2 or scan.channels > 64)
    waves, long = scan.chains(streaming) / scan.device.processors, scan.steps // LONG
    filled = waves / math.ceil(waves)
    if scan.itemsize == 2:
        if scan.unaligned_rows:
            return _look_back_tile(scan) if drifts else None
        if drifts and waves > 1 and scan.steps >= LONG // 4 and scan.channels > 64:
            return _mapped(scan)
        uneven = 2 * scan.steps >= LONG and 3 * filled < 2 and not (scan.packed or scan.resets)
        return _look_back_tile(scan) if uneven and not scan.ends_within_lines else None
    if scan.backward:
        uneven = (long >= 8 and filled < FULL) or (long >= 1 and filled < FILLED)
    else:
        uneven = long >= 1 and filled < FULL
    back = Geometry(2, 32, 8, 8 if scan.backward else 16, chained=True, resident=2, looks_back=True)
    if scan.aligned == 2:
        back = _look_back_tile(scan)
    pays = drifts or (uneven and not scan.packed)
    return back if pays and scan.fits(back) and (streaming.vec, streaming.group) == (back.vec, back.group) else None
