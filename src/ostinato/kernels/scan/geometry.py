"""How the scan kernel covers channels and time: the one place where its algorithm and shape are chosen."""

import functools
import math
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

    def shared_bytes(self, inputs: int, sums: int, itemsize: int, packed: bool = False) -> int:
        """Enough for ``Shared`` in ``scan.cu``, which checks it; `sums` are those of parameters' gradients."""
        pack, state = self.vec * itemsize, self.group * max(4, itemsize)
        strip = 32 * self.rows * pack
        if self.narrow:
            strip = 32 // self.lanes * self.rows * self.narrow * itemsize + 48 + self.lanes * itemsize
        strips = self.stages * self.warps * inputs + (self.warps if self.narrow else 1)
        between_warps = 2 * self.warps * (3 * state + 4)
        boundaries = 16 * self.tile if packed else 16
        sum_rows = (self.warps * sums if sums else 1) * state
        window = max(32, min(256, self.warps * 32 // self.lanes)) if self.chained else 1
        return strips * strip + between_warps + boundaries + window * (3 * state + 4) + sum_rows + 96


class Device(NamedTuple):
    """What the choice depends on of a GPU."""

    processors: int
    bandwidth: float  # bytes a second, of the memory
    shared_of_block: int  # bytes that one block can have
    shared: int  # bytes of a multiprocessor


LATENCY = 1.1e-6  # seconds from asking for memory until it comes while others ask, too
STAGES = 2  # tiles that a streaming block copies ahead
THREADS = 384  # that a multiprocessor should hold, at least, with all the registers they want

# Rows of chained blocks of eight warps, two blocks a multiprocessor: as many as registers and shared memory hold.
CHAINED_ROWS = {
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
    inputs: int,
    itemsize: int,
    aligned: int,
    gapless: bool,
    sequences: int,
    steps: int,
    channels: int,
    device: Device,
) -> Geometry:
    """The one place where the algorithm is chosen.

    Blocks that stream take the tiles of their channels one after the other, each in about a microsecond, however idle
    the rest of the chip; chained ones take ten, but every block at once.  So blocks stream where there are channels
    enough to fill the chip, and where sequences are short.

    Args:
        element: the operation, a struct of ``elements.cuh``, or GeneratedN(Backward) of N tensors.
        inputs: how many tensors it reads.
        itemsize: bytes of a channel in memory.
        aligned: how many neighbouring channels lie so aligned that they may be moved together, a power of two.
        gapless: whether each sequence is one piece of memory, step after step.
        sequences: independent sequences, times directions.
        steps, channels: the length of each and its width.
        device: the GPU.
    """
    narrow = channels if gapless and channels < 8 else 0
    if narrow:
        geometry = _narrow_streaming(inputs, steps, channels)
    else:
        geometry = _streaming(element, inputs, itemsize, aligned, sequences, steps, channels, device)
    if sequences * channels < 32 * device.processors and steps > 8 * geometry.tile:
        return _chained(element, itemsize, aligned, narrow, channels)
    return geometry


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
) -> Geometry:
    """Blocks of which those at work at once ask for as much memory as comes in the time it takes to come.

    A lane moves up to eight bytes, so that a warp's row is two full lines; blocks become narrower, as long as a row of
    one fills whole sectors, until there is one for each multiprocessor.
    """
    vec = min(aligned, 8 // itemsize)
    lanes = _lanes_across(channels, vec)

    def blocks() -> int:
        return sequences * -(-channels // (lanes * vec))

    fill = 0.7 if element == "LinearScanBackward" else 1.0  # it reads the most for what little it computes
    while lanes > 8 and blocks() < fill * device.processors:
        lanes //= 2
    at_once = min(max(blocks() / device.processors, 0.5), 4)  # blocks of a multiprocessor
    wanted = device.bandwidth * LATENCY / device.processors / at_once
    tile = _power_of_two(wanted / (STAGES * inputs * lanes * vec * itemsize), 4, 64)
    segments = 32 // lanes
    warps = 4
    least, most = (4, 8) if element.endswith("Backward") else (8, 16)
    rows = _power_of_two(tile / (warps * segments), least, 4 if inputs > 3 else most)
    while warps > 1 and (warps // 2) * segments * rows >= steps:
        warps //= 2  # short sequences: no warps without a step
    return Geometry(vec, lanes, warps, rows, False, THREADS // (32 * warps), 0, STAGES)


def _narrow_streaming(inputs: int, steps: int, channels: int) -> Geometry:
    """One warp a sequence, or two of a backward pass: what waits for what is then short, and blocks are many.

    An odd number of rows lets a warp's lanes read different banks of shared memory.
    """
    lanes = _lanes_across(channels, 1)
    warps, rows = (2, 11) if inputs > 2 else (1, 11)
    while rows > 1 and (32 // lanes) * (rows - 2) * warps >= steps:
        rows -= 2
    return Geometry(1, lanes, warps, rows, False, 512 // (32 * warps), channels, 1)


def _chained(element: str, itemsize: int, aligned: int, narrow: int, channels: int) -> Geometry:
    if narrow:
        rows = 24 if itemsize == 4 and not element.endswith("Backward") else 16
        if channels in (1, 2, 4):
            rows -= 1  # odd, so that a warp's lanes read different banks of shared memory
        return Geometry(1, _lanes_across(channels, 1), 8, rows, True, 2 if itemsize == 4 else 1, narrow, 1)
    vec = min(aligned, 2) if itemsize == 2 else 1
    found = CHAINED_ROWS.get((element, itemsize))
    return Geometry(vec, _lanes_across(channels, vec), 8, found or 8, True, 2 if found else 1, 0, 1)


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
        ("CHAINED", int(geometry.chained)),
        ("RESIDENT", geometry.resident),
        ("NARROW", geometry.narrow),
        ("STAGES", geometry.stages),
        ("SHARED_BYTES", shared),
        ("FAR", int(far)),
        ("WIDE", int(wide)),
    )
