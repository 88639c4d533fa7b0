"""How the scan kernel covers channels and time: the one place where its algorithm and shape are chosen."""

import functools
from typing import NamedTuple


class Geometry(NamedTuple):
    """How a block covers channels and time; see ``scan.cu``."""

    vec: int
    lanes: int
    warps: int
    rows: int
    look_back: bool
    resident: int  # blocks a multiprocessor should hold at once, which bounds a thread's registers
    staged: bool  # a warp's steps are one piece of memory, turned in shared memory
    stages: int  # tiles copied ahead

    @property
    def group(self) -> int:
        return self.lanes * self.vec

    @property
    def tile(self) -> int:
        return self.warps * (32 // self.lanes) * self.rows

    def copies_wide(self, itemsize: int, aligned: int) -> bool:
        """Whether lanes copy 16 bytes each: rows consist of such pieces and lie so `aligned`, in channels.

        Only blocks that look back: those that stream are no faster for it, some slower.
        """
        pieces = self.lanes * self.vec * itemsize % 16 == 0 and self.rows * self.vec * itemsize % 16 == 0
        return self.look_back and not self.staged and pieces and aligned * itemsize >= 16

    def shared_bytes(self, inputs: int, outputs: int, sums: int, itemsize: int) -> int:
        """Enough for ``Shared`` in ``scan.cu``, which checks it; `sums` are those of parameters' gradients."""
        pack, state = self.vec * itemsize, self.group * max(4, itemsize)
        strip = (32 + self.staged) * self.rows * pack
        strips = self.stages * self.warps * inputs + (self.warps if self.staged else 1)
        between_warps = 2 * self.warps * (3 * state + 4)
        watchers = min(256, self.warps * 32 // self.lanes)
        window = 4 * watchers + (max(32, watchers) if self.look_back else 1) * 4 * state
        sum_rows = (self.warps * sums if sums else 1) * state
        return strips * strip + between_warps + window + sum_rows + 64


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
    ("Generated2", 2): Tuning(8, 8, 2, 1, 1.5),
    ("Generated2Backward", 2): Tuning(8, 4, 1, 2, 0.7),
    ("Generated3", 2): Tuning(8, 8, 2, 1, 1.5),
    ("Generated3Backward", 2): Tuning(8, 4, 1, 1, 1.5),
}
STREAMING |= {(f"Generated{n}{way}", 4): Tuning(8, 4, 2, 1, 1.0) for n in (2, 3) for way in ("", "Backward")}
STREAMING_OTHERWISE = Tuning(4, 4, 2, 1, 1.0)

# Rows of a look-back by eight warps, two blocks a multiprocessor: as many as registers and shared memory hold.
LOOK_BACK_ROWS = {
    ("LinearScan", 4): 40,
    ("LinearScanBackward", 4): 24,
    ("LinearScan", 2): 40,
    ("LinearScanBackward", 2): 24,
    ("Generated2", 4): 32,
    ("Generated2Backward", 4): 16,
    ("Generated3", 4): 16,
    ("Generated3Backward", 4): 12,
    ("Generated2", 2): 24,
    ("Generated2Backward", 2): 12,
    ("Generated3", 2): 24,
    ("Generated3Backward", 2): 8,
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
        element: the operation, a struct of ``elements.cuh``, or GeneratedN(Backward) of N tensors.
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
    streaming = Geometry(vec, lanes, warps, tuning.rows, False, tuning.resident, False, tuning.stages)
    # A block that streams takes about a microsecond a tile, however idle the rest of the chip; looking back takes ten,
    # but every block at once, and 64 bytes of channels a block no longer fill the chip.
    if sequences * channels >= 32 * processors or steps <= 8 * streaming.tile:
        return streaming

    if gapless and lanes_across(1) < 8:
        if itemsize == 4:
            return Geometry(1, lanes_across(1), 8, 16 if element.endswith("Backward") else 24, True, 2, True, 1)
        return Geometry(1, lanes_across(1), 16 if itemsize == 2 else 8, 8, True, 1, True, 1)
    vec = min(aligned, 2) if itemsize == 2 else 1
    lanes = lanes_across(vec)
    while lanes > (16 if itemsize == 4 else 8) and blocks(lanes, vec) < 8:
        lanes //= 2  # some groups: the fewer tiles in a chain, the shorter the way back
    found = LOOK_BACK_ROWS.get((element, itemsize))
    return Geometry(vec, lanes, 8, found or 8, True, 2 if found else 1, False, 1)


def macros(
    element: str,
    scalar: str,
    parameter: str,
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
        ("PARAMETER", parameter),
        ("PACKING", packing),
        ("VEC", geometry.vec),
        ("LANES", geometry.lanes),
        ("WARPS", geometry.warps),
        ("ROWS", geometry.rows),
        ("LOOK_BACK", int(geometry.look_back)),
        ("RESIDENT", geometry.resident),
        ("STAGED", int(geometry.staged)),
        ("STAGES", geometry.stages),
        ("SHARED_BYTES", shared),
        ("FAR", int(far)),
        ("WIDE", int(wide)),
    )
