"""How the scan kernel covers channels and time: the one place where its algorithm and shape are chosen."""

import functools
from typing import NamedTuple


class Geometry(NamedTuple):
    """How a block covers channels and time; see ``scan.cu``."""

    vec: int
    lanes: int
    warps: int
    rows: int
    chained: bool
    resident: int  # blocks a multiprocessor should hold at once, which bounds a thread's registers
    narrow: int  # channels, if a warp's steps are one piece of memory
    stages: int  # tiles copied ahead

    @property
    def group(self) -> int:
        return self.lanes * self.vec

    @property
    def tile(self) -> int:
        return self.warps * (32 // self.lanes) * self.rows

    def copies_wide(self, itemsize: int, aligned: int) -> bool:
        """Whether lanes copy 16 bytes each: rows consist of such pieces and lie so `aligned`, in channels.

        Only chained blocks: those that stream are no faster for it, some slower.
        """
        pieces = self.lanes * self.vec * itemsize % 16 == 0 and self.rows * self.vec * itemsize % 16 == 0
        return self.chained and not self.narrow and pieces and aligned * itemsize >= 16

    def shared_bytes(self, inputs: int, outputs: int, itemsize: int, backward: bool, packed: bool = False) -> int:
        """Enough for ``Shared`` in ``scan.cu``, which checks it."""
        pack, state = self.vec * itemsize, self.group * max(4, itemsize)
        strip = 32 * self.rows * pack
        if self.narrow:
            strip = 32 // self.lanes * self.rows * self.narrow * itemsize + 48 + self.lanes * itemsize
        strips = self.stages * self.warps * inputs + (self.warps if self.narrow else 1)
        between_warps = 2 * self.warps * (3 * state + 4)
        boundaries = 16 * self.tile if packed else 16
        bias = (self.warps if backward else 1) * outputs * state
        watchers = self.warps * 32 // self.lanes
        window = -(-min(256, 1024 // self.group) // watchers) * watchers if self.chained else 1
        return strips * strip + between_warps + boundaries + window * (3 * state + 4) + bias + 96


class Tuning(NamedTuple):
    """Measured on an H100; a lane moves up to eight bytes, so that a warp's row is two full lines."""

    warps: int
    rows: int
    resident: int
    stages: int
    fill: float  # blocks a multiprocessor needs before they are made wide; light steps need fewer


STREAMING = {
    ("LinearScan", 4): Tuning(4, 4, 2, 3, 0.7),
    ("LinearScanBackward", 4): Tuning(4, 8, 2, 1, 0.7),
    ("LinearScan", 2): Tuning(8, 8, 2, 2, 0.7),
    ("LinearScanBackward", 2): Tuning(8, 4, 1, 2, 0.7),
    ("MinGRU", 2): Tuning(8, 8, 2, 1, 1.5),
    ("MinGRUBackward", 2): Tuning(8, 4, 1, 2, 0.7),
    ("MinLSTM", 2): Tuning(8, 8, 2, 1, 1.5),
    ("MinLSTMBackward", 2): Tuning(8, 4, 1, 1, 1.5),
}
STREAMING |= {(name, 4): Tuning(8, 4, 2, 1, 1.0) for name in ("MinGRU", "MinGRUBackward", "MinLSTM", "MinLSTMBackward")}
STREAMING_OTHERWISE = Tuning(4, 4, 2, 1, 1.0)

# Rows of chained blocks of eight warps, two blocks a multiprocessor: as many as registers and shared memory hold.
CHAINED_ROWS = {
    ("LinearScan", 4): 40,
    ("LinearScanBackward", 4): 24,
    ("LinearScan", 2): 40,
    ("LinearScanBackward", 2): 24,
    ("MinGRU", 4): 32,
    ("MinGRUBackward", 4): 16,
    ("MinLSTM", 4): 16,
    ("MinLSTMBackward", 4): 12,
    ("MinGRU", 2): 24,
    ("MinGRUBackward", 2): 12,
    ("MinLSTM", 2): 24,
    ("MinLSTMBackward", 2): 8,
}


@functools.lru_cache(maxsize=4096)
def choose_geometry(
    element: str,
    itemsize: int,
    aligned: int,
    gapless: bool,
    sequences: int,
    steps: int,
    channels: int,
    processors: int,
) -> Geometry:
    """The one place where the algorithm is chosen.

    Args:
        element: the operation, a struct of ``elements.cuh``.
        itemsize: bytes of a channel in memory.
        aligned: how many neighbouring channels lie so aligned that they may be moved together, a power of two.
        gapless: whether each sequence is one piece of memory, step after step.
        sequences: independent sequences, times directions.
        steps, channels: the length of each and its width.
        processors: the GPU's multiprocessors.
    """

    def blocks(lanes: int, vec: int) -> int:
        return sequences * -(-channels // (lanes * vec))

    def lanes_across(vec: int) -> int:
        return min(32, 1 << (-(-channels // vec) - 1).bit_length())

    tuning = STREAMING.get((element, itemsize), STREAMING_OTHERWISE)
    vec = min(aligned, 8 // itemsize)
    lanes = lanes_across(vec)
    while lanes > 8 and blocks(lanes, vec) < tuning.fill * processors:
        lanes //= 2  # narrower blocks, as long as a row of one fills whole sectors
    warps = tuning.warps
    while warps > 1 and (warps // 2) * (32 // lanes) * tuning.rows >= steps:
        warps //= 2  # short sequences: no warps without a step
    streaming = Geometry(vec, lanes, warps, tuning.rows, False, tuning.resident, 0, tuning.stages)
    # A block that streams takes about a microsecond a tile, however idle the rest of the chip; a chained one takes ten,
    # but every block at once, and 64 bytes of channels a block no longer fill the chip.
    narrow = gapless and lanes_across(1) < 8
    if sequences * channels >= 32 * processors or steps <= 8 * streaming.tile:
        if narrow:
            lanes, rows, warps = lanes_across(1), 17, 8
            while warps > 1 and (warps // 2) * (32 // lanes) * rows >= steps:
                warps //= 2
            return Geometry(1, lanes, warps, rows, False, 2, channels, 1)
        return streaming

    if narrow:
        if itemsize == 4:
            return Geometry(1, lanes_across(1), 8, 16 if element.endswith("Backward") else 24, True, 2, channels, 1)
        return Geometry(1, lanes_across(1), 16 if itemsize == 2 else 8, 8, True, 1, channels, 1)
    vec = min(aligned, 2) if itemsize == 2 else 1
    lanes = lanes_across(vec)
    while lanes > (16 if itemsize == 4 else 8) and blocks(lanes, vec) < 8:
        lanes //= 2  # some groups: the fewer tiles in a chain, the shorter the way back
    found = CHAINED_ROWS.get((element, itemsize))
    return Geometry(vec, lanes, 8, found or 8, True, 2 if found else 1, 0, 1)


def macros(
    element: str,
    scalar: str,
    bias: str,
    candidate: int,
    packing: str,
    geometry: Geometry,
    shared: int,
    far: bool,
    wide: bool,
) -> tuple[tuple[str, object], ...]:
    """The definitions that make ``scan.cu`` one kernel."""
    return (
        ("ELEMENT", element),
        ("SCALAR", scalar),
        ("BIAS", bias),
        ("CANDIDATE", candidate),
        ("PACKING", packing),
        ("VEC", geometry.vec),
        ("LANES", geometry.lanes),
        ("WARPS", geometry.warps),
        ("ROWS", geometry.rows),
        ("CHAINED", int(geometry.chained)),
        ("RESIDENT", geometry.resident),
        ("NARROW", geometry.narrow),
        ("STAGES", geometry.stages),
        ("SHARED_BYTES", shared),
        ("FAR", int(far)),
        ("WIDE", int(wide)),
    )
