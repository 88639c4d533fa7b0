"""The scan kernel's launch geometry: the one place where its algorithm and tile shape are chosen."""

import functools
import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple


class Geometry(NamedTuple):
    """The algorithm and the shape of its tiles; see ``scan.cu``."""

    vec: int
    lanes: int
    warps: int
    rows: int
    chained: bool
    resident: int  # blocks per multiprocessor, as in __launch_bounds__, which limits registers
    narrow: int  # channels, if a warp's steps are contiguous in memory, else 0
    stages: int  # tiles prefetched
    looks_back: bool = False  # chained: by decoupled look-back, not interleaved tiles
    stays: bool = False  # chained: every block has one tile, which stays in shared memory

    @property
    def group(self) -> int:
        return self.lanes * self.vec

    @property
    def segments(self) -> int:
        return max(1, 32 // self.lanes)

    @property
    def tile(self) -> int:
        return self.warps * self.segments * self.rows

    @property
    def threads(self) -> int:
        return self.warps * max(32, self.lanes)

    def companions(self, chains: int, chunks: int, itemsize: int, processors: int) -> int:
        """How many blocks share a chain such that all blocks of the launch are resident at once.

        Each reads the aggregates of the others' tiles in rounds of ``read_at_once``; a last round of few tiles is not
        worth the extra blocks.
        """
        if not self.chained or self.looks_back:
            return 1
        if self.stays:
            return chunks
        most = max(1, min(chunks, self.resident * processors // chains))
        rest = (most - 1) % self.read_at_once(itemsize)
        return most - rest if 10 * rest <= most else most

    def read_at_once(self, itemsize: int) -> int:
        """How many other tiles' aggregates a block loads before it waits for any."""
        watchers = self.warps * self.segments
        return watchers * max(1, (16 if watchers < 256 else 8) // itemsize // self.vec)

    def copies_wide(self, itemsize: int, aligned: int) -> bool:
        """Whether lanes copy 16 bytes each, which needs rows of whole pieces, `aligned` (in channels) to 16 bytes.

        Smaller copies go through L1, and as many are on their way as it has lines beside the shared memory.
        """
        pieces = self.lanes * self.vec * itemsize % 16 == 0 and self.rows * self.vec * itemsize % 16 == 0
        return not self.narrow and pieces and aligned * itemsize >= 16

    def pitch(self, itemsize: int, aligned: int, strides: Iterable[int]) -> int:
        """Bytes between rows in shared memory if they are copied in pieces of 16 wherever they begin, else 0.

        That is for single 16-bit channels (`aligned` to one), which are below the 4 bytes of an asynchronous copy; rows
        are `strides` apart in the tensors.  No piece has elements of two rows.
        """
        offset = row_offset(itemsize, strides)
        streaming = not self.chained and self.lanes <= 32
        if itemsize * aligned >= 4 or self.narrow or self.group < 32 or offset is None or streaming:
            return 0
        least = self.group * itemsize + 2 * 15
        return least + (offset - least) % 16

    def shared_bytes(
        self, inputs: int, sums: int, itemsize: int, packed: bool = False, resets: bool = False, pitch: int = 0
    ) -> int:
        """An upper bound of ``sizeof(Shared)``, which shared.cuh asserts; `sums`: parameters with gradients."""
        pack, state = self.vec * itemsize, self.group * max(4, itemsize)
        strip = 32 * self.rows * max(4, pack)
        if self.narrow:
            strip = self.segments * self.rows * self.narrow * itemsize + 48 + self.lanes * itemsize
        elif pitch:
            strip = self.segments * self.rows * pitch + 48 + self.lanes * self.vec * itemsize
        strips = self.stages * self.warps * inputs + (self.warps if self.narrow and not self.stays else 0)
        buffers = 1 if self.stays else 3 if self.chained and not self.looks_back else 2
        numbers = 3 if itemsize == 4 else 2  # of a composition: with the rounding errors of float32's products
        between_warps = (buffers + (not self.looks_back)) * self.warps * (numbers * state + 4)
        boundaries = 2 * buffers * (4 * self.tile + 4 * (self.tile // 32 + 2)) + 4 * 2048 if packed else 28
        window = (max(32, self.warps * self.segments) * (3 * state + 4) if self.looks_back else 16 * self.vec) + state
        sum_rows = self.warps * sums * state
        steps = self.segments * self.rows
        mask = self.stages * self.warps * (steps + 36) if resets and steps > 96 else 16
        return strips * strip + between_warps + boundaries + sum_rows + window + mask + 144


def row_offset(itemsize: int, strides: Iterable[int]) -> int | None:
    """By how many bytes of a piece of 16 each row of a tensor begins after the last; None if that differs by tensor."""
    offsets = {itemsize * stride % 16 for stride in strides}
    return offsets.pop() if len(offsets) == 1 else None


class Device(NamedTuple):
    """The properties of a GPU that the choice depends on."""

    processors: int
    bandwidth: float  # memory bandwidth, bytes a second
    shared_of_block: int  # bytes of shared memory that one block can have
    shared: int  # bytes of shared memory of a multiprocessor


LATENCY = 1.1e-6  # of memory under load, seconds
STAGES = 2  # tiles that a block prefetches
SHORT, LONG = 4, 4096  # steps: lengths between these share a geometry, as every kernel takes time to compile
FILLED = 0.7  # of the multiprocessors need a block of eight warps
FULL = 0.9  # of the last wave, where a block has a multiprocessor to itself
FEW_WAVES = 3  # waves of tiles: with fewer, drawing tiles from a counter balances nothing
FEW_COMPANIONS = 24  # blocks per chain: with no more, look-back is faster than interleaved tiles
CHEAP = ("LinearScan", "LinearScanBackward", "LogLinearScan")  # to read twice
THREADS = 384  # a multiprocessor's occupancy target, with as many registers as they need


@functools.lru_cache(maxsize=4096)
def choose_geometry(
    element: str,
    inputs: int,
    itemsize: int,
    aligned: int,
    gapless: bool,
    sequences: int,
    steps: int,
    channels: int,
    device: Device,
    packed: bool = False,
    resets: bool = False,
    congruent: bool = True,
) -> Geometry:
    """Choose the algorithm and the shape of its tiles.

    A streaming block scans the tiles of its chain serially, about a microsecond each, even if the GPU is otherwise
    idle; a chained tile takes three, but all blocks work in parallel.  So streaming is chosen where the chains fill
    the GPU, and where sequences are short.  Where it leaves some multiprocessors with more chains than others, a long
    forward pass of 32 bits draws tiles of whole steps by look-back, which keeps all busy to the end.

    Args:
        element: the operation, a struct of ``elements.cuh``, or GeneratedN(Backward) of N tensors.
        inputs: how many tensors it reads.
        itemsize: bytes of an element.
        aligned: the widest vector access that alignment allows, in channels, a power of two.
        gapless: whether each sequence is contiguous in memory.
        sequences: independent sequences, times directions.
        steps, channels: the length of each and its width.
        device: the GPU.
        packed: whether many sequences are packed in one by cu_seqlens.
        resets: whether there is a mask of resets.
        congruent: whether all tensors have the same :func:`row_offset`, and rows are not found by offsets.
    """
    narrow = channels if gapless and channels < 8 else 0
    if narrow:
        geometry = _narrow_streaming(steps, channels)
    else:
        geometry = _streaming(element, inputs, itemsize, aligned, sequences, steps, channels, device, resets, congruent)
    blocks = sequences * -(-channels // geometry.group)
    waves = blocks / device.processors
    least = FILLED * device.processors if geometry.warps == 8 else device.processors
    few = sequences * channels < 32 * device.processors if narrow else blocks < least
    if few and steps > (8 if narrow else 4) * geometry.tile:
        if gapless and element in CHEAP and itemsize * aligned < 4 and channels > 16 and not packed:
            staying = _staying(inputs, itemsize, sequences, steps, channels, device)
            if staying:
                return staying
        if gapless and channels == 8 and itemsize <= 4 and not packed:
            narrow = 8  # stored in pieces of 16 bytes, as narrower sequences are
        geometry = _chained(
            element, inputs, itemsize, aligned, sequences, steps, channels, narrow, device, packed, resets
        )
    elif _spreads_unevenly(element, waves, steps) and itemsize == 4 and not packed:
        back = Geometry(2, 32, 8, 8 if element.endswith("Backward") else 16, True, 2, 0, 1, True)
        fits = back.shared_bytes(inputs, 0, itemsize) <= device.shared // back.resident - 1024
        if fits and geometry.group == back.group:
            geometry = back
    return geometry


def _spreads_unevenly(element: str, waves: float, steps: int) -> bool:
    """Whether a scan streamed by so many waves of blocks is slower than by look-back.

    Backward, whose blocks read half as much again at a step, it is where the last wave is emptier or time longer still.
    """
    filled, long = waves / math.ceil(waves), steps // LONG
    if element == "LinearScanBackward":
        return (long >= 8 and filled < FULL) or (long >= 1 and filled < FILLED)
    return element == "LinearScan" and long >= 1 and filled < FULL


def _lanes_across(channels: int, vec: int) -> int:
    return min(32, 1 << (-(-channels // vec) - 1).bit_length())


def _power_of_two(x: float, least: int, most: int) -> int:
    return max(least, min(most, 1 << max(0, round(math.log2(max(x, 1))))))


def _streaming(
    element: str,
    inputs: int,
    itemsize: int,
    aligned: int,
    sequences: int,
    steps: int,
    channels: int,
    device: Device,
    resets: bool,
    congruent: bool,
) -> Geometry:
    """Tiles such that the resident blocks have bandwidth times latency bytes in flight (Little's law).

    A lane moves up to eight bytes, so that a warp's row is two full lines.  16-bit rows of that size need twice the
    warps for their arithmetic.  Where these would fill the GPU badly, or an operation computes or tests much besides,
    narrower vectors spread it over more threads, and 16-byte copies that bring whole lines into L2 make up for rows of
    half a line; but over a long sequence blocks drift apart, and L2 has lost the other half before it is used.

    Rows of 16 bits that begin anywhere, but in all tensors alike, are copied whole, by two warps abreast.
    """
    halved = itemsize == 2 and aligned >= 8
    backward = element.endswith("Backward")
    if congruent and itemsize * aligned < 4 and channels > 32 and element in ("LinearScan", "LinearScanBackward"):
        return Geometry(1, 64, 2 if backward else 4, 8, False, 4 if backward else 2, 0, STAGES)
    whole = Geometry(4, 32, 8, 4 if backward else 8, False, 2, 0, STAGES)
    small = whole._replace(warps=4, rows=8)
    waves = sequences * -(-channels // whole.group) / device.processors
    fits = whole.shared_bytes(inputs, 0, itemsize) <= device.shared_of_block
    if halved and channels > 64 and steps > SHORT and fits:
        if element in ("LinearScan", "LinearScanBackward") and (waves >= FILLED or steps > LONG):
            return small if waves > 1 else _alone(whole, inputs, itemsize, max(waves, FILLED), device)
        alone = element.startswith("Generated") and backward and inputs <= 5 and steps >= LONG and not resets
        if alone and waves >= FULL * math.ceil(waves):
            return whole._replace(resident=1)  # its factors take more than 128 registers
    vec = 2 if halved else min(aligned, 8 // itemsize)
    lanes = min(_lanes_across(channels, vec), 16 if halved else 32)
    blocks = sequences * -(-channels // (lanes * vec))
    at_once = min(max(blocks / device.processors, 1), 4)  # blocks of a multiprocessor
    wanted = device.bandwidth * LATENCY / device.processors / at_once
    tile = _power_of_two(wanted / (STAGES * inputs * lanes * vec * itemsize), 4, 64)
    segments = 32 // lanes
    warps = 4
    least, most = (4, 8) if backward else (8, 16)
    rows = _power_of_two(tile / (warps * segments), least, 4 if inputs > 3 else most)
    if steps <= min(SHORT, segments * rows) and blocks > 4 * device.processors:
        warps = 1  # more would have no steps
    threads = 512 if halved and rows * vec <= 8 else THREADS  # few steps need few registers
    longer = Geometry(vec, lanes, warps, most, False, 2, 0, 1)
    enough = longer.tile * longer.group * inputs * itemsize >= wanted  # one tile on its way
    if element == "LinearScanBackward" and itemsize == 4 and steps >= LONG and at_once < FULL * 2 and enough:
        return longer
    return Geometry(vec, lanes, warps, rows, False, threads // (32 * warps), 0, STAGES)


def _alone(whole: Geometry, inputs: int, itemsize: int, waves: float, device: Device) -> Geometry:
    """Tiles of a block that has a multiprocessor to itself, with all the registers that it can use.

    It has as many stages as Little's law asks for, and no more: on an H100, half as much again on its way as that made
    the memory a tenth slower.
    """
    row = inputs * whole.warps * whole.group * itemsize
    wanted = device.bandwidth * LATENCY / device.processors / waves / row
    rows = whole.rows if wanted > 1.5 * whole.rows else 4
    return whole._replace(resident=1, rows=rows, stages=max(STAGES, math.ceil(wanted / rows)))


def _narrow_streaming(steps: int, channels: int) -> Geometry:
    """Two warps per sequence: short barriers, and many blocks.

    With an odd number of rows a warp's shared-memory reads are free of bank conflicts.
    """
    lanes = _lanes_across(channels, 1)
    warps, rows = 2, 11
    while rows > 1 and (32 // lanes) * (rows - 2) * warps >= steps:
        rows -= 2
    return Geometry(1, lanes, warps, rows, False, 512 // (32 * warps), channels, 1)


def _staying(inputs: int, itemsize: int, sequences: int, steps: int, channels: int, device: Device) -> Geometry | None:
    """A tile for each block, of whole rows, if the shared memory of all multiprocessors holds them all at once."""
    lanes = 32 * -(-channels // 32)
    for most, warps in itertools.product((8, 32), range(1, min(1024 // lanes, 15) + 1)):  # by the number of barriers
        geometry = Geometry(1, lanes, warps, 32, True, 1, channels, 1, stays=True)
        chunks = -(-steps // geometry.tile)
        fits = geometry.shared_bytes(inputs, 0, itemsize) <= device.shared_of_block
        # Each warp reads a part of the others' messages.
        if fits and sequences * chunks <= device.processors and chunks - 1 <= most * warps:
            return geometry
    return None


def _chained(
    element: str,
    inputs: int,
    itemsize: int,
    aligned: int,
    sequences: int,
    steps: int,
    channels: int,
    narrow: int,
    device: Device,
    packed: bool,
    resets: bool,
) -> Geometry:
    """One wave of blocks, with tiles as long as their registers hold.

    A thread keeps the steps of two tiles, raw or computed, in half of the 128 registers that 512 threads of a
    multiprocessor have each.  Two blocks of 256 hide each other's waits; one of 512 publishes half as many messages,
    which counts where a block cannot load all others' at once, and where many blocks look back along one chain.  With
    packed sequences look-back is short: tiles in which a sequence begins publish a prefix at once.  So do those with a
    reset, but a mask may have none.
    """
    backward, words = element.endswith("Backward"), max(1, itemsize // 4)
    if narrow:
        lanes, numbers = _lanes_across(channels, 1), (inputs if backward else 2) * words  # registers of a step
        if lanes == channels:  # odd rows, against bank conflicts
            stages = 1 if lanes <= 2 or (backward and lanes == 8) else STAGES  # by registers
            return Geometry(1, lanes, 8, ((40 if lanes <= 2 else 36) // numbers - 1) | 1, True, 2, narrow, stages)
        rows = (36 // numbers - 1) | 1
        if itemsize == 2 and channels in (5, 7):  # segments begin in whole words, each in other banks
            rows = max(4, 36 // numbers // 4 * 4)
        elif channels in (3, 6) and itemsize <= 4 and (backward or itemsize == 2):  # so do even rows of these
            rows = 36 // numbers
        return Geometry(1, lanes, 16, rows, True, 1, narrow, 1)
    vec = min(aligned, 2) if itemsize == 2 else 1
    raw = element in CHEAP
    numbers = inputs * words if raw else (inputs if backward else 2) * words * vec
    lanes = _lanes_across(channels, vec)
    chains = sequences * -(-channels // (lanes * vec))
    rows = max(4, 1 << (32 // numbers).bit_length() - 1)
    small, large = (Geometry(vec, lanes, w, rows, True, 16 // w, 0, STAGES) for w in (8, 16))
    if steps <= LONG and itemsize == 2:  # look-back keeps one tile: a backward pass uses the other's registers
        return small._replace(rows=2 * rows if backward else rows, stages=1, looks_back=True)
    if steps <= LONG:
        return small
    few_companions = 2 * device.processors // chains <= FEW_COMPANIONS
    crowded = raw and itemsize == 2 and lanes == 32 and chains == 1  # 16-bit aggregates are twice as long as others
    starts_anywhere = raw and aligned == 1 and itemsize <= 4
    delayed = resets or starts_anywhere  # by tests, or by small copies
    back_if_delayed = delayed and lanes == 32 and (backward or chains > 2 or itemsize == 2)
    if packed or back_if_delayed or few_companions or crowded:
        along_one_chain = 4 * chains <= device.processors and few_companions and not packed
        # A carry goes along a single chain in fewer round trips if tiles are longer; resets cut its way short.
        longer = crowded and vec == 2 and steps > (4 if backward else 32) * LONG and not packed and not resets
        registers = 72 if along_one_chain or vec == 1 else 56
        plain_backward = backward and itemsize == 4 and not (packed or resets)
        if numbers > inputs * words or (vec == 1 and (along_one_chain != delayed or plain_backward)):
            registers = 64  # with more, some are spilled
        elif vec == 2 and (longer or (along_one_chain and resets)):
            registers = 60
        pairs = Geometry(2, 32, 16, 14, True, 1, 0, 1, True)  # of channels: longer rows, and more on its way
        even = aligned > 1 and chains == 2 * sequences * -(-channels // pairs.group)
        waves = chains / 2 * -(-steps // pairs.tile) / device.processors
        fits = pairs.shared_bytes(inputs, 0, itemsize) <= device.shared - 1024 and waves >= 2 * FEW_WAVES
        if element == "LinearScanBackward" and itemsize == 4 and along_one_chain and even and fits and not resets:
            return pairs
        most = max(4, min(32, registers // numbers // 4 * 4))
        many = (16, 8) if along_one_chain or longer else (8,)
        for warps, rows in itertools.product(many, range(most, most // 2 - 1, -4)):
            back = Geometry(vec, lanes, warps, rows, True, 16 // warps, 0, 1, True)
            waves = chains * -(-steps // back.tile) / (back.resident * device.processors)
            shared = back.shared_bytes(inputs, 0, itemsize, packed)
            if (longer or waves >= FEW_WAVES * warps / 8) and shared <= device.shared // back.resident - 1024:
                return back
    if raw and lanes == 32 and words == 1:  # forward, the longer tiles of one stage are enough on their way
        rows, stages = (36 // numbers // 4 * 4, STAGES) if backward else (small.rows, 1)
        small, large = (g._replace(rows=rows, stages=stages) for g in (small, large))
    others = small.resident * device.processors // chains - 1
    return small if others <= small.read_at_once(max(4, itemsize)) else large


def macros(
    element: str,
    scalar: str,
    parameter: str,
    packing: str,
    geometry: Geometry,
    shared: int,
    far: bool,
    wide: bool,
    pitch: int,
) -> tuple[tuple[str, object], ...]:
    """The preprocessor definitions with which ``scan.cu`` is compiled."""
    return (
        ("ELEMENT", element),
        ("SCALAR", scalar),
        ("PARAMETER", parameter),
        ("PACKING", packing),
        ("VEC", geometry.vec),
        ("LANES", geometry.lanes),
        ("WARPS", geometry.warps),
        ("ROWS", geometry.rows),
        ("CHAINED", int(geometry.chained)),
        ("LOOKS_BACK", int(geometry.chained and geometry.looks_back)),
        ("RESIDENT", geometry.resident),
        ("NARROW", geometry.narrow),
        ("STAGES", geometry.stages),
        ("SHARED_BYTES", shared),
        ("FAR", int(far)),
        ("WIDE", int(wide)),
        ("PITCH", pitch),
        ("STAYS", int(geometry.stays)),
    )
