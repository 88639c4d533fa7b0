"""Chained: one wave of blocks, with tiles as long as their registers hold."""

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

EVENLY = 0.95  # of the multiprocessors have a block, where each chain has as many
BUSY = 32 << 10  # bytes on their way to a multiprocessor, whose warps more would keep busy with copies
FEW_WAVES = 3  # waves of tiles: with fewer, drawing tiles from a counter balances nothing
FEW_COMPANIONS = 24  # blocks per chain: with no more, look-back is faster than interleaved tiles


def staying(scan: Criteria) -> Geometry | None:
    """A tile of whole rows for each block, if the shared memory of all multiprocessors holds them all at once.

    Where that leaves half of the multiprocessors without a block, the smaller tiles of look-back are faster.
    """
    unaligned = scan.itemsize * scan.aligned < 4 and scan.channels > 16
    if not (scan.gapless and scan.element in CHEAP and unaligned) or scan.packed:
        return None
    lanes = 32 * -(-scan.channels // 32)
    for most, warps in itertools.product((8, 32), range(1, min(1024 // lanes, 15) + 1)):  # by the number of barriers
        geometry = Geometry(1, lanes, warps, 32, chained=True, narrow=scan.channels, stays=True)
        chunks = -(-scan.steps // geometry.tile)
        fits = geometry.shared_bytes(scan.inputs, 0, scan.itemsize) <= scan.device.shared_of_block
        # Each warp reads a part of the others' messages.
        blocks, processors = scan.sequences * chunks, scan.device.processors
        if fits and blocks <= processors and chunks - 1 <= most * warps:
            return geometry if 2 * blocks >= processors else None
    return None


def _chained_tile(scan: Criteria, warps: int = 8) -> Geometry:
    """A tile of which a thread keeps two, raw or computed, in half of the 128 registers that each of 512 has.

    Where rows are not whole pieces of 16 bytes, pairs of channels are copied by half as many instructions.
    """
    copied = scan.anywhere or (scan.itemsize == 4 and scan.aligned == 2 and scan.channels > 32)
    pairs = scan.itemsize == 2 or (copied and scan.element in LINEAR)
    vec = min(scan.vector, 2) if pairs else 1
    chains = scan.sequences * -(-scan.channels // 64)
    many = FEW_COMPANIONS * chains >= 2 * scan.device.processors or (scan.packed and chains > 1)
    if scan.anywhere and not many:
        vec = 1  # longer tiles make a carry's way along a chain shorter
    rows = max(4, 1 << (32 // scan.numbers(vec)).bit_length() - 1)
    lanes = lanes_across(scan.channels, vec)
    return Geometry(vec, lanes, warps, rows, chained=True, resident=16 // warps, stages=STAGES)


def _mapped(scan: Criteria) -> Geometry | None:
    """Linear scans' tiles that tensor maps copy, so that one on its way is enough: 512 threads do nothing but scan."""
    if scan.element not in LINEAR or scan.itemsize > 4 or not scan.mappable or scan.packed or scan.resets:
        return None
    return _chained_tile(scan, warps=16)._replace(rows=36 // scan.inputs // 4 * 4, stages=1, mapped=True)


def interleave_evenly(scan: Criteria) -> Geometry | None:
    """Few chains of whole lines or of all channels, which share all multiprocessors evenly: no block awaits a carry.

    Chains of few blocks gain by that only where copies, lane by lane, would keep warps busy, and not over long
    backward passes.
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
    """A tile of which a thread keeps one, as look-back does, as long as registers hold."""
    tile = _chained_tile(scan)
    rows = 2 * tile.rows if tile.vec == 2 else max(4, 64 // scan.numbers(1) // 4 * 4)
    if tile.vec == 2 and scan.element in LINEAR and (scan.anywhere or scan.itemsize == 4):  # by registers
        rows = (36 if scan.itemsize == 2 else 48) // scan.numbers(2) // 4 * 4
    return tile._replace(rows=rows, stages=1, looks_back=True)


def look_back_soon(scan: Criteria) -> Geometry | None:
    """Linear scans and those of 16 bits, but the longest: half as long tiles if there are few.

    The longest linear ones look back, too, if their rows share lines.  Where three groups half as wide, or a quarter,
    have all channels, fewer lanes are idle, and a carry's way along many tiles of few sequences is shorter, as these
    are longer.
    """
    back = _look_back_tile(scan)
    if scan.element in LINEAR and not scan.tests_resets:
        soon = scan.steps <= 8 * LONG or (back.lanes == 32 and scan.ends_within_lines)
        halves, quarters = (-(-scan.channels // (lanes * back.vec)) for lanes in (16, 8))
        whole = back.lanes == 32 and not scan.anywhere
        if whole and halves == 3:
            back = back._replace(lanes=16)
        elif whole and quarters == 3 and back.vec == 2 and scan.sequences <= 8 and scan.steps > 32 * back.tile:
            back = back._replace(lanes=8)
    else:
        long = 8 * LONG if scan.element.startswith("Generated") and not scan.resets else LONG
        soon = scan.itemsize == 2 and scan.steps <= long
        back = back._replace(rows=min(back.rows, 16))
    if not soon:
        return None
    return back._replace(rows=max(4, back.rows // 8 * 4)) if scan.steps <= 2 * back.tile else back


def look_back_in_pairs(scan: Criteria) -> Geometry | None:
    """Pairs of 32-bit channels, of which rows are longer and more is on its way, where a pass has few chains."""
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
    """Whether a carry's way along one chain takes the time, rather than the tiles of many chains.

    Chains that share lines of memory wait for their copies instead, which two blocks of a multiprocessor hide.
    """
    tile = _chained_tile(scan)
    few_chains = 4 * scan.chains(tile) <= scan.device.processors
    cut = scan.channels > tile.group and scan.ends_within_lines  # rows
    aligned = scan.aligned * scan.itemsize >= 16 and scan.itemsize <= 4
    shares_lines = cut and aligned and scan.element in LINEAR
    return few_chains and not shares_lines and _has_few_companions(scan) and not scan.packed


def _crowded_chains(scan: Criteria) -> int:
    """How many chains of 16 bits, whose aggregates are twice as long, have too many blocks to interleave them."""
    tile, long = _chained_tile(scan), scan.steps > 32 * LONG
    pairs = scan.itemsize == 2 and tile.vec == 2 and tile.lanes == 32 and scan.element in LINEAR
    return 3 if pairs and long and not (scan.packed or scan.resets) else 1


def look_back(scan: Criteria) -> Geometry | None:
    """Long scans of few blocks a chain, and those whose blocks are kept from working in step.

    With packed sequences look-back is short: tiles in which a sequence begins publish a prefix at once.  So do those
    with a reset, but a mask may have none.  One block of 512 threads publishes half as many messages as two of 256,
    which counts where many blocks look back along one chain.
    """
    tile = _chained_tile(scan)
    vec, chains, whole_warps = tile.vec, scan.chains(tile), tile.lanes == 32
    raw = scan.element in CHEAP
    plain_halves = tile.lanes == 16 and scan.element in LINEAR and not scan.resets
    crowded = raw and scan.itemsize == 2 and (whole_warps or plain_halves) and chains <= _crowded_chains(scan)
    delayed = scan.resets or (raw and scan.aligned == 1 and scan.itemsize <= 4)  # by tests, or by small copies
    back_if_delayed = delayed and whole_warps and (scan.backward or chains > 2 or scan.itemsize == 2)
    pays = scan.packed or back_if_delayed or _has_few_companions(scan) or crowded
    if scan.steps <= LONG or not pays:
        return None
    # A carry goes along a single chain in fewer round trips if tiles are longer; resets cut its way short.
    plain, single = not (scan.packed or scan.resets), _has_single_chains(scan)
    longer = crowded and vec == 2 and scan.steps > (4 if scan.backward else 32) * LONG and plain
    if scan.numbers(vec) > scan.inputs * scan.words:
        registers = 64  # with more, some are spilled
    elif vec == 1:
        registers = 64 if single != delayed or (scan.backward and scan.itemsize == 4 and plain) else 72
    elif longer or (single and scan.resets):
        registers = 60
    else:
        registers = 72 if single else 56
    most = max(4, min(32, registers // scan.numbers(vec) // 4 * 4))
    for warps, rows in itertools.product((16, 8) if single or longer else (8,), range(most, most // 2 - 1, -4)):
        back = tile._replace(warps=warps, rows=rows, resident=16 // warps, stages=1, looks_back=True)
        if (longer or scan.waves(back) >= FEW_WAVES * warps / 8) and scan.fits(back):
            return back
    return None


def interleave(scan: Criteria) -> Geometry:
    """Two blocks of 256 threads, which hide each other's waits, or one of 512, which publishes half as many messages.

    That counts where a block cannot load all others' at once.
    """
    small, large = _chained_tile(scan), _chained_tile(scan, warps=16)
    if scan.steps <= LONG:
        return small
    if scan.element in CHEAP and small.lanes == 32 and scan.words == 1:
        # Forward, the longer tiles of one stage are enough on their way.
        rows, stages = (36 // scan.inputs // 4 * 4, STAGES) if scan.backward else (small.rows, 1)
        small, large = (g._replace(rows=rows, stages=stages) for g in (small, large))
    others = small.resident * scan.device.processors // scan.chains(small) - 1
    return small if others <= small.read_at_once(max(4, scan.itemsize)) else large


def keep_in_step(scan: Criteria, streaming: Geometry) -> Geometry | None:
    """Tiles for long scans whose blocks, streaming, would end or work at different times: look-back draws them.

    Streaming leaves some multiprocessors with more chains than others; a backward pass, whose blocks read half as much
    again at a step, has to spread worse for that, or be longer still.  And blocks drift apart, so that L2 loses a line
    before both groups of its channels are read.  Of 16 bits, they do so less where tensor maps copy whole lines.
    """
    if scan.element not in LINEAR or scan.itemsize > 4 or streaming.cluster > 1:
        return None
    drifts = scan.shares_lines and scan.steps >= LONG // 8 and (scan.aligned != 2 or scan.channels > 64)
    waves, long = scan.chains(streaming) / scan.device.processors, scan.steps // LONG
    filled = waves / math.ceil(waves)
    if scan.itemsize == 2:
        if scan.anywhere:
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
