"""Streaming: tiles of such a size that the resident blocks have as many bytes in flight as Little's law asks for."""

import math

from ostinato.kernels.scan.cuda.heuristics.criteria import (
    FILLED,
    FULL,
    LINEAR,
    LONG,
    SHORT,
    STAGES,
    Criteria,
    lanes_across,
)
from ostinato.kernels.scan.cuda.heuristics.geometry import Geometry

FEW_STEPS = 32  # the steps up to which linear scans have a geometry of their own
THREADS = 384  # the target occupancy of a multiprocessor: threads then have as many registers as they need


def _power_of_two(x: float, least: int, most: int) -> int:
    return max(least, min(most, 1 << max(0, round(math.log2(max(x, 1))))))


def stream_few_steps(scan: Criteria) -> Geometry | None:
    """Blocks of one warp for short sequences that fit in one tile of it, or for many sequences of few tiles.

    More warps would have no steps, or keep blocks waiting.
    """
    if scan.element not in LINEAR or scan.steps > FEW_STEPS:
        return None
    vec = min(scan.vector, 8 // scan.itemsize)
    warp = Geometry(vec, lanes_across(scan.channels, vec), 1, 4, resident=12)
    if scan.steps <= warp.tile:
        return warp
    return warp._replace(stages=STAGES) if scan.chains(warp) > 4 * scan.device.processors else None


def stream_halves(scan: Criteria) -> Geometry | None:
    """Rows of two cache lines in 16 bits, with twice the warps for their arithmetic, if they fill the GPU or are long.

    Blocks with half the warps need a filled last wave.  In a long sequence blocks drift apart, so that L2 would evict a
    line before its other half is used.
    """
    whole = Geometry(4, 32, 8, 4 if scan.backward else 8, resident=2, stages=STAGES)
    fits = whole.shared_bytes(scan.inputs, 0, scan.itemsize) <= scan.device.shared_of_block
    if not (_is_halved(scan) and scan.channels > 64 and scan.steps > SHORT and fits):
        return None
    waves = scan.chains(whole) / scan.device.processors
    if scan.element in LINEAR and waves > 1:
        waves /= 2  # two blocks per multiprocessor
        return whole._replace(warps=4, rows=8) if waves <= 1 or waves >= FILLED * math.ceil(waves) else None
    if scan.element in LINEAR and scan.steps > LONG:
        return _alone(scan, whole, max(waves, FILLED))
    generated = scan.element.startswith("Generated") and scan.backward and scan.inputs <= 5
    if generated and scan.steps >= LONG and not scan.resets and waves >= FULL * math.ceil(waves):
        return whole._replace(resident=1)  # the factors of its steps take more than 128 registers
    return None


def _is_halved(scan: Criteria) -> bool:
    """Whether eight bytes per lane would be more 16-bit channels than its registers can handle well."""
    return scan.itemsize == 2 and scan.aligned >= 8


def stream_alone(scan: Criteria) -> Geometry | None:
    """One block per multiprocessor, with rows of two cache lines or of one."""
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
    """The tiles of a block that has a multiprocessor to itself, with all the registers that it can use.

    It has as many stages as Little's law asks for, and no more: on an H100, half as many bytes again in flight made the
    memory a tenth slower, and where rows share cache lines, L2 evicts them sooner the further ahead a block is.
    """
    row = scan.inputs * whole.warps * whole.group * scan.itemsize
    wanted = scan.device.in_flight / (1 if scan.shares_lines else waves) / row
    rows = whole.rows if wanted > 1.5 * whole.rows else 4
    return whole._replace(resident=1, rows=rows, stages=max(STAGES, math.ceil(wanted / rows)))


def stream(scan: Criteria) -> Geometry:
    """The usual streaming tiles: a lane has up to eight bytes of a row, so that a warp's row is two full cache lines.

    In 16 bits, narrower vectors spread a scan over more threads where it would not fill the GPU, or needs much other
    arithmetic or many tests; 16-byte copies that bring whole lines into L2 make up for rows of half a line.
    """
    halved, processors = _is_halved(scan), scan.device.processors
    vec = 2 if halved else min(scan.vector, 8 // scan.itemsize)
    too_few = 2 * scan.chains(Geometry(vec, 32, 1, 1)) <= processors
    if scan.element in LINEAR and scan.unaligned_rows and vec > 1 and too_few:
        vec //= 2
    lanes = min(lanes_across(scan.channels, vec), 16 if halved else 32)
    segments, warps = 32 // lanes, 4
    least, most = (4, 8) if scan.backward else (8, 16)
    longer = Geometry(vec, lanes, warps, most, resident=2)
    blocks = scan.chains(longer)
    blocks_per_processor = min(max(blocks / processors, 1), 4)
    wanted = scan.device.in_flight / blocks_per_processor
    enough = longer.tile * longer.group * scan.inputs * scan.itemsize >= wanted  # with one tile in flight
    long_backward = scan.element == "LinearScanBackward" and scan.itemsize == 4 and scan.steps >= LONG
    if long_backward and blocks_per_processor < FULL * 2 and enough:
        return longer
    tile = _power_of_two(wanted / (STAGES * scan.inputs * lanes * vec * scan.itemsize), 4, 64)
    is_one_tile = scan.steps <= warps * segments * least
    rows = least if is_one_tile else _power_of_two(tile / (warps * segments), least, 4 if scan.inputs > 3 else most)
    if scan.steps <= min(SHORT, segments * rows) and blocks > 4 * processors:
        warps = 1  # more would have no steps
    threads = 512 if halved and rows * vec <= 8 else THREADS  # few steps per thread take few registers
    return Geometry(vec, lanes, warps, rows, resident=threads // (32 * warps), stages=STAGES)


def stream_in_clusters(scan: Criteria) -> Geometry | None:
    """Clusters of two blocks for each chain, if these fill the GPU with one block per multiprocessor.

    A cluster must fit within a GPC: larger ones would leave more multiprocessors without a block.  Clusters drift
    apart, so rows must not share cache lines.
    """
    words = scan.inputs * scan.itemsize // 2  # the registers of a row of two channels
    pair = Geometry(2, 32, 8, 1 << (64 // max(words, 2)).bit_length() - 1, resident=2, cluster=2)
    lines = scan.itemsize <= 4 and not scan.ends_within_lines
    wide = lines and scan.aligned * scan.itemsize >= 16 and not scan.by_offsets
    if not (scan.device.hopper and scan.element in LINEAR and wide) or scan.packed:
        return None
    filled = scan.chains(pair) * pair.cluster / scan.device.processors
    fills = FILLED <= filled <= 1 and scan.channels >= pair.group
    return pair if fills and scan.steps > 4 * pair.tile and scan.fits(pair) else None
