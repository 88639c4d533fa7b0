"""The one place where a scan's algorithm and the shape of its tiles are chosen, by rules in order of precedence.

Each rule returns a geometry where it applies, else None.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from ostinato.kernels.scan.cuda.geometry import Geometry

LATENCY = 1.1e-6  # of memory under load, seconds
STAGES = 2  # tiles that a block prefetches
SHORT, LONG = 4, 4096  # steps: lengths between these share a geometry, as every kernel takes time to compile
FEW_STEPS = 32  # of which linear scans have a geometry of their own
FILLED = 0.7  # of the multiprocessors need a block of eight warps
FULL = 0.9  # of the last wave, where a block has a multiprocessor to itself
EVENLY = 0.95  # of the multiprocessors have a block, where each chain has as many
BUSY = 32 << 10  # bytes on their way to a multiprocessor, whose warps more would keep busy with copies
FEW_WAVES = 3  # waves of tiles: with fewer, drawing tiles from a counter balances nothing
LINE = 128  # bytes of memory that are moved together
FEW_COMPANIONS = 24  # blocks per chain: with no more, look-back is faster than interleaved tiles
LINEAR = ("LinearScan", "LinearScanBackward")
CHEAP = (*LINEAR, "LogLinearScan")  # to read twice
THREADS = 384  # a multiprocessor's occupancy target, with as many registers as they need


class Device(NamedTuple):
    """The properties of a GPU that the choice depends on."""

    processors: int
    bandwidth: float  # memory bandwidth, bytes a second
    shared_of_block: int  # bytes of shared memory that one block can have
    shared: int  # bytes of shared memory of a multiprocessor
    hopper: bool = False  # whether it is one or later: blocks send each other messages, tensor maps copy

    @property
    def in_flight(self) -> float:
        """Bytes that each multiprocessor has on their way when memory is busy (Little's law)."""
        return self.bandwidth * LATENCY / self.processors


class Criteria(NamedTuple):
    """A scan as far as the choice depends on it."""

    element: str  # the operation, a struct of ``elements.cuh``, or GeneratedN(Backward) of N tensors
    inputs: int  # tensors that it reads
    itemsize: int  # bytes of an element
    aligned: int  # the widest vector access that alignment allows, in channels, a power of two
    gapless: bool  # whether each sequence is contiguous in memory
    sequences: int  # independent ones, times directions
    steps: int
    channels: int
    device: Device
    packed: bool = False  # whether many sequences are packed in one by cu_seqlens
    resets: bool = False  # whether there is a mask of resets
    by_offsets: bool = False  # whether rows are found by offsets
    expanded: bool = False  # whether an input's step or sequence lies where the next does

    @property
    def backward(self) -> bool:
        return self.element.endswith("Backward")

    @property
    def anywhere(self) -> bool:
        """Whether rows begin anywhere, so that they are copied in aligned pieces (see ``Geometry.pitches``)."""
        return self.aligned == 1 and self.itemsize <= 4 and self.channels > 16 and not self.by_offsets

    @property
    def vector(self) -> int:
        """The most channels of a lane."""
        return 8 // self.itemsize if self.anywhere and self.channels > 32 else self.aligned

    @property
    def ends_within_lines(self) -> bool:
        """Whether rows are not whole lines of memory."""
        return self.channels * self.itemsize % LINE > 0

    @property
    def shares_lines(self) -> bool:
        """Whether lines of memory have channels of two groups."""
        return self.channels > 32 and self.ends_within_lines

    @property
    def mappable(self) -> bool:
        """Whether tensor maps can describe the inputs."""
        aligned = self.aligned * self.itemsize >= 16
        return self.device.hopper and aligned and not (self.by_offsets or self.expanded)

    @property
    def tests_resets(self) -> bool:
        """Whether steps are tested for resets, and not given coefficients of zero as where rows begin anywhere."""
        return self.resets and (self.packed or not self.anywhere)

    @property
    def words(self) -> int:
        """Registers of a number."""
        return max(1, self.itemsize // 4)

    @property
    def computed(self) -> int:
        """Registers of what a channel's step composes."""
        return (self.inputs if self.backward else 2) * self.words

    def numbers(self, vec: int) -> int:
        """Registers of a step of `vec` channels as a chained tile keeps it: its inputs, or what they compute."""
        if self.element in CHEAP:
            return self.inputs * max(1, vec * self.itemsize // 4)
        return self.computed * vec

    def chains(self, geometry: Geometry) -> int:
        """Groups of channels that are scanned apart, each by a block or by several."""
        return self.sequences * -(-self.channels // geometry.group)

    def waves(self, geometry: Geometry) -> float:
        """How many tiles each of the resident blocks has."""
        tiles = self.chains(geometry) * -(-self.steps // geometry.tile)
        return tiles / (geometry.resident * self.device.processors)

    def fits(self, geometry: Geometry) -> bool:
        """Whether a multiprocessor's shared memory holds all blocks that are to be resident."""
        shared = geometry.shared_bytes(self.inputs, 0, self.itemsize, self.packed)
        return shared <= self.device.shared // geometry.resident - 1024


@functools.lru_cache(maxsize=4096)
def choose_geometry(scan: Criteria) -> Geometry:
    """Choose the algorithm and the shape of its tiles: what the first rule that applies returns.

    A streaming block scans the tiles of its chain serially, about a microsecond each, even if the GPU is otherwise
    idle; a chained tile takes three, but all blocks work in parallel.  So streaming is chosen where the chains fill
    the GPU, and where sequences are short.
    """
    aside = _stream_narrow, _stream_few_steps, _stream_in_clusters
    streaming = _first(scan, *aside, _stream_alone, _stream_halves, _stream)
    if not _leaves_processors_idle(scan, streaming):
        return _keep_in_step(scan, streaming) or streaming
    looking_back = _look_back_soon, _look_back_in_pairs, _look_back
    return _first(scan, _staying, _chain_few_channels, _chain_narrow, _interleave_evenly, *looking_back, _interleave)


def _first(scan: Criteria, *rules: Callable[[Criteria], Geometry | None]) -> Geometry:
    return next(geometry for rule in rules if (geometry := rule(scan)))


def _leaves_processors_idle(scan: Criteria, streaming: Geometry) -> bool:
    """Whether chains are too few for all multiprocessors, and so long that blocks had better share them."""
    processors = scan.device.processors
    if streaming.cluster > 1:
        return False
    few = scan.sequences * scan.channels < 32 * processors and scan.steps > 8 * streaming.tile
    if streaming.narrow or (few and _chain_few_channels(scan)):
        return few
    least = (FILLED if streaming.warps == 8 else FULL if scan.itemsize == 4 else 1) * processors
    return scan.chains(streaming) < least and scan.steps > 4 * streaming.tile


def _lanes_across(channels: int, vec: int) -> int:
    return min(32, 1 << (-(-channels // vec) - 1).bit_length())


def _power_of_two(x: float, least: int, most: int) -> int:
    return max(least, min(most, 1 << max(0, round(math.log2(max(x, 1))))))


# Streaming: tiles such that the resident blocks have as many bytes on their way as Little's law asks for.


def _stream_narrow(scan: Criteria) -> Geometry | None:
    """Sequences of few channels: two warps each, for short barriers and many blocks.

    With an odd number of rows a warp's shared-memory reads are free of bank conflicts.
    """
    if not scan.gapless or scan.channels >= 8:
        return None
    lanes = _lanes_across(scan.channels, 1)
    warps, rows = 2, 11
    while rows > 1 and (32 // lanes) * (rows - 2) * warps >= scan.steps:
        rows -= 2
    return Geometry(1, lanes, warps, rows, resident=512 // (32 * warps), narrow=scan.channels)


def _stream_few_steps(scan: Criteria) -> Geometry | None:
    """Sequences of one tile of one warp, or many of few: further warps would have no steps, or leave blocks waiting."""
    if scan.element not in LINEAR or scan.steps > FEW_STEPS:
        return None
    vec = min(scan.vector, 8 // scan.itemsize)
    warp = Geometry(vec, _lanes_across(scan.channels, vec), 1, 4, resident=12)
    if scan.steps <= warp.tile:
        return warp
    return warp._replace(stages=STAGES) if scan.chains(warp) > 4 * scan.device.processors else None


def _stream_halves(scan: Criteria) -> Geometry | None:
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


def _stream_alone(scan: Criteria) -> Geometry | None:
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
    the memory a tenth slower.
    """
    row = scan.inputs * whole.warps * whole.group * scan.itemsize
    wanted = scan.device.in_flight / waves / row
    rows = whole.rows if wanted > 1.5 * whole.rows else 4
    return whole._replace(resident=1, rows=rows, stages=max(STAGES, math.ceil(wanted / rows)))


def _stream(scan: Criteria) -> Geometry:
    """A lane moves up to eight bytes, so that a warp's row is two full lines.

    Of 16 bits, narrower vectors spread a scan over more threads, where it would fill the GPU badly or computes or tests
    much besides, and 16-byte copies that bring whole lines into L2 make up for rows of half a line.
    """
    halved, processors = _is_halved(scan), scan.device.processors
    vec = 2 if halved else min(scan.vector, 8 // scan.itemsize)
    if scan.element in LINEAR and scan.anywhere and vec > 1 and 2 * scan.chains(Geometry(vec, 32, 1, 1)) <= processors:
        vec //= 2
    lanes = min(_lanes_across(scan.channels, vec), 16 if halved else 32)
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
    rows = _power_of_two(tile / (warps * segments), least, 4 if scan.inputs > 3 else most)
    if scan.steps <= min(SHORT, segments * rows) and blocks > 4 * processors:
        warps = 1  # more would have no steps
    threads = 512 if halved and rows * vec <= 8 else THREADS  # few steps need few registers
    return Geometry(vec, lanes, warps, rows, resident=threads // (32 * warps), stages=STAGES)


def _keep_in_step(scan: Criteria, streaming: Geometry) -> Geometry | None:
    """Tiles drawn by look-back, where the blocks of a long scan, streaming, would end or work at different times.

    Streaming leaves some multiprocessors with more chains than others; a backward pass, whose blocks read half as much
    again at a step, has to spread worse for that, or be longer still.  And blocks drift apart, so that L2 loses a line
    before both groups of its channels are read: of rows that are copied in pieces of 16 bytes, but aligned ones of 16
    bits stream as fast.
    """
    if scan.element not in LINEAR or scan.itemsize > 4 or streaming.cluster > 1:
        return None
    in_pieces = scan.anywhere or (scan.itemsize == 4 and scan.aligned == 4)
    drifts = scan.shares_lines and in_pieces and scan.steps >= LONG // 8
    if scan.itemsize == 2:
        return _look_back_tile(scan) if drifts else None
    waves, long = scan.chains(streaming) / scan.device.processors, scan.steps // LONG
    filled = waves / math.ceil(waves)
    if scan.backward:
        uneven = (long >= 8 and filled < FULL) or (long >= 1 and filled < FILLED)
    else:
        uneven = long >= 1 and filled < FULL
    back = Geometry(2, 32, 8, 8 if scan.backward else 16, chained=True, resident=2, looks_back=True)
    pays = drifts or (uneven and not scan.packed)
    return back if pays and scan.fits(back) and (streaming.vec, streaming.group) == (back.vec, back.group) else None


def _stream_in_clusters(scan: Criteria) -> Geometry | None:
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


# Chained: one wave of blocks, with tiles as long as their registers hold.


def _staying(scan: Criteria) -> Geometry | None:
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


def _chain_few_channels(scan: Criteria) -> Geometry | None:
    """Linear scans of few channels, by tiles of whole rows: several sequences look back, one or two take turns.

    Very few channels take turns up to eight sequences, with the rows of the next rule.  With a mask only a single one
    does: a tile with a reset has its inclusive prefix at once, so blocks do not look back far.
    """
    few = (0 if scan.resets else 2) < scan.channels < 32 and scan.gapless and not scan.packed
    if not few or scan.element not in LINEAR or scan.itemsize > 4:
        return None
    lanes, numbers = _lanes_across(scan.channels, 1), scan.numbers(1)
    if scan.sequences > (2 if scan.channels > 8 else 1 if scan.resets else 8):
        rows = 64 // numbers - 1 | 1
        if scan.channels in (3, 6) and scan.backward:
            rows = 20  # against bank conflicts, as odd rows of other channels
        return Geometry(1, lanes, 8, rows, True, 2, scan.channels, looks_back=True)
    if scan.channels <= 8 or (scan.resets and scan.itemsize == 2 and scan.aligned > 1):  # tests of pairs are cheaper
        return None
    return Geometry(1, lanes, 16, 36 // numbers - 1 | 1, True, 1, scan.channels)


def _chain_narrow(scan: Criteria) -> Geometry | None:
    """Sequences of few channels, or of eight that are stored in pieces of 16 bytes as narrower ones are."""
    channels, numbers = scan.channels, scan.computed
    eight = channels == 8 and scan.itemsize <= 4 and not scan.packed
    if not scan.gapless or not (channels < 8 or eight):
        return None
    lanes = _lanes_across(channels, 1)
    if lanes == channels:  # odd rows, against bank conflicts
        stages = 1 if lanes <= 2 or (scan.backward and lanes == 8) else STAGES  # by registers
        rows = ((40 if lanes <= 2 else 36) // numbers - 1) | 1
        return Geometry(1, lanes, 8, rows, chained=True, resident=2, narrow=channels, stages=stages)
    rows = (36 // numbers - 1) | 1
    if scan.itemsize == 2 and channels in (5, 7):  # segments begin in whole words, each in other banks
        rows = max(4, 36 // numbers // 4 * 4)
    elif channels in (3, 6) and scan.itemsize <= 4 and (scan.backward or scan.itemsize == 2):
        rows = 36 // numbers  # so do even rows of these
    return Geometry(1, lanes, 16, rows, chained=True, narrow=channels)


def _chained_tile(scan: Criteria, warps: int = 8) -> Geometry:
    """A tile of which a thread keeps two, raw or computed, in half of the 128 registers that each of 512 has."""
    pairs = scan.itemsize == 2 or (scan.anywhere and scan.element in LINEAR)
    vec = min(scan.vector, 2) if pairs else 1
    chains = scan.sequences * -(-scan.channels // 64)
    many = FEW_COMPANIONS * chains >= 2 * scan.device.processors or (scan.packed and chains > 1)
    if scan.anywhere and not many:
        vec = 1  # longer tiles make a carry's way along a chain shorter
    rows = max(4, 1 << (32 // scan.numbers(vec)).bit_length() - 1)
    lanes = _lanes_across(scan.channels, vec)
    return Geometry(vec, lanes, warps, rows, chained=True, resident=16 // warps, stages=STAGES)


def _interleave_evenly(scan: Criteria) -> Geometry | None:
    """Linear scans of few chains of whole lines, which share all multiprocessors evenly: no block waits for a carry.

    Tensor maps copy the tiles, so that one on its way is enough, and a block of 512 threads does nothing but scan.
    Chains of few blocks gain by that only where copies, lane by lane, would keep warps busy, and not over long
    backward passes.
    """
    whole = scan.element in LINEAR and scan.itemsize <= 4 and not (scan.shares_lines or scan.packed)
    if not (whole and scan.mappable) or scan.resets:
        return None
    busy = scan.device.in_flight > BUSY and not (scan.backward and scan.steps > 8 * LONG)
    if _has_few_companions(scan) and not busy:
        return None
    tile = _chained_tile(scan, warps=16)._replace(rows=36 // scan.inputs // 4 * 4, stages=1, mapped=True)
    chains, processors = scan.chains(tile), scan.device.processors
    blocks = processors // chains * chains
    evenly = _crowded_chains(scan) < chains <= processors // 8 and blocks >= EVENLY * processors
    filled = scan.sequences * scan.channels >= FULL * chains * tile.group
    return tile if evenly and filled and scan.waves(tile) >= FEW_WAVES else None


def _look_back_tile(scan: Criteria) -> Geometry:
    """A tile of which a thread keeps one, as look-back does, as long as registers hold."""
    tile = _chained_tile(scan)
    rows = 2 * tile.rows if tile.vec == 2 else max(4, 64 // scan.numbers(1) // 4 * 4)
    if scan.anywhere and tile.vec == 2 and scan.element in LINEAR:  # putting single elements together takes registers
        rows = (36 if scan.itemsize == 2 else 48) // scan.numbers(2) // 4 * 4
    return tile._replace(rows=rows, stages=1, looks_back=True)


def _look_back_soon(scan: Criteria) -> Geometry | None:
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


def _look_back_in_pairs(scan: Criteria) -> Geometry | None:
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


def _crowded_chains(scan: Criteria) -> int:
    """How many chains of 16 bits, whose aggregates are twice as long, have too many blocks to take turns."""
    tile, long = _chained_tile(scan), scan.steps > 32 * LONG
    pairs = scan.itemsize == 2 and tile.vec == 2 and tile.lanes == 32 and scan.element in LINEAR
    return 3 if pairs and long and not (scan.packed or scan.resets) else 1


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


def _look_back(scan: Criteria) -> Geometry | None:
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


def _interleave(scan: Criteria) -> Geometry:
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
