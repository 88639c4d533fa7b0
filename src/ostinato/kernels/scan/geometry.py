"""How the scan kernel covers channels and time: the one place where its algorithm and shape are chosen."""

import functools
import itertools
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
    looks_back: bool = False  # chained: whether blocks look back to states, not to compositions alone

    @property
    def group(self) -> int:
        return self.lanes * self.vec

    @property
    def tile(self) -> int:
        return self.warps * (32 // self.lanes) * self.rows

    def companions(self, chains: int, chunks: int, itemsize: int, processors: int) -> int:
        """How many blocks share the channels of one, if all of the launch are to be on the chip at once.

        Each reads what the others published of the tiles since its own last, so many tiles at a time; a rest of few is
        not worth a block.
        """
        if not self.chained or self.looks_back:
            return 1
        most = max(1, min(chunks, self.resident * processors // chains))
        rest = (most - 1) % self.read_at_once(itemsize)
        return most - rest if 10 * rest <= most else most

    def read_at_once(self, itemsize: int) -> int:
        """Of how many other tiles a block asks for the composition before it waits for any."""
        return self.warps * (32 // self.lanes) * max(1, 16 // itemsize // self.vec)

    def copies_wide(self, itemsize: int, aligned: int) -> bool:
        """Whether lanes copy 16 bytes each: rows consist of such pieces and lie so `aligned`, in channels.

        Not where blocks stream wider numbers than 16 bits: a lane's own piece is as large as half of these then.
        """
        pieces = self.lanes * self.vec * itemsize % 16 == 0 and self.rows * self.vec * itemsize % 16 == 0
        return (self.chained or itemsize == 2) and not self.narrow and pieces and aligned * itemsize >= 16

    def shared_bytes(self, inputs: int, sums: int, itemsize: int, packed: bool = False) -> int:
        """Enough for ``Shared`` in ``scan.cu``, which checks it; `sums` are those of parameters' gradients."""
        pack, state = self.vec * itemsize, self.group * max(4, itemsize)
        strip = 32 * self.rows * max(4, pack)
        if self.narrow:
            strip = 32 // self.lanes * self.rows * self.narrow * itemsize + 48 + self.lanes * itemsize
        strips = self.stages * self.warps * inputs + (self.warps if self.narrow else 1)
        buffers = 3 if self.chained and not self.looks_back else 2
        between_warps = (buffers + 1) * self.warps * (3 * state + self.lanes + 4)
        boundaries = 2 * buffers * (4 * self.tile + 4 * (self.tile // 32 + 2)) + 4 * 2048 if packed else 28
        window = (max(32, self.warps * 32 // self.lanes) * (3 * state + 4) if self.looks_back else 4) + 4 * state
        sum_rows = (self.warps * sums if sums else 1) * state
        return strips * strip + between_warps + boundaries + sum_rows + window + 144


class Device(NamedTuple):
    """What the choice depends on of a GPU."""

    processors: int
    bandwidth: float  # bytes a second, of the memory
    shared_of_block: int  # bytes that one block can have
    shared: int  # bytes of a multiprocessor


LATENCY = 1.1e-6  # seconds from asking for memory until it comes while others ask, too
STAGES = 2  # tiles that a block copies ahead
SHORT, LONG = 4, 4096  # steps: between these, lengths do not matter, as each kernel takes its time to compile
FEW_WAVES = 3  # of tiles: with fewer, none is left to be drawn by who is free
FEW_COMPANIONS = 24  # blocks for each chain: with as few, a tile is better drawn by who is free
THREADS = 384  # that a multiprocessor should hold, at least, with all the registers they want


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
) -> Geometry:
    """The one place where the algorithm is chosen.

    Blocks that stream take the tiles of their channels one after the other, each in about a microsecond, however idle
    the rest of the chip; chained ones take three, but every block at once.  So blocks stream where there are channels
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
        packed: whether many sequences are packed in one: none waits for the state of another.
        resets: whether a mask says where states are reset.
    """
    narrow = channels if gapless and channels < 8 else 0
    if narrow:
        geometry = _narrow_streaming(steps, channels)
    else:
        geometry = _streaming(element, inputs, itemsize, aligned, sequences, steps, channels, device)
    blocks = sequences * -(-channels // geometry.group)
    few = sequences * channels < 32 * device.processors if narrow else blocks < device.processors
    if few and steps > (8 if narrow else 4) * geometry.tile:
        return _chained(element, inputs, itemsize, aligned, sequences, steps, channels, narrow, device, packed, resets)
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

    A lane moves up to eight bytes, so that a warp's row is two full lines.  Rows of 16 bits are half a line at once:
    twice as much is computed of the same bytes then, which must be spread evenly, and copies of 16 bytes that bring
    whole lines to the L2 make up for it.
    """
    halved = itemsize == 2 and aligned >= 8
    vec = 2 if halved else min(aligned, 8 // itemsize)
    lanes = min(_lanes_across(channels, vec), 16 if halved else 32)
    blocks = sequences * -(-channels // (lanes * vec))
    at_once = min(max(blocks / device.processors, 1), 4)  # blocks of a multiprocessor
    wanted = device.bandwidth * LATENCY / device.processors / at_once
    tile = _power_of_two(wanted / (STAGES * inputs * lanes * vec * itemsize), 4, 64)
    segments = 32 // lanes
    warps = 4
    least, most = (4, 8) if element.endswith("Backward") else (8, 16)
    rows = _power_of_two(tile / (warps * segments), least, 4 if inputs > 3 else most)
    if steps <= min(SHORT, segments * rows) and blocks > 4 * device.processors:
        warps = 1  # the others would be without a step
    threads = 512 if halved and rows * vec <= 8 else THREADS  # few steps need few registers
    return Geometry(vec, lanes, warps, rows, False, threads // (32 * warps), 0, STAGES)


def _narrow_streaming(steps: int, channels: int) -> Geometry:
    """Two warps a sequence: what waits for what is then short, and blocks are many.

    An odd number of rows lets a warp's lanes read different banks of shared memory.
    """
    lanes = _lanes_across(channels, 1)
    warps, rows = 2, 11
    while rows > 1 and (32 // lanes) * (rows - 2) * warps >= steps:
        rows -= 2
    return Geometry(1, lanes, warps, rows, False, 512 // (32 * warps), channels, 1)


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
    """Blocks that fill the chip once, with as long tiles as their registers hold.

    A thread keeps the steps of two tiles, as they are in memory or computed, in half of the 128 registers that each of
    512 threads of a multiprocessor has.  Two blocks of these hide what the other waits for; one publishes half as much,
    which counts where blocks have so much to read of each other that they cannot ask for it at once, and where many
    look back along one chain.  Packed sequences settle the states that others would look back for.
    """
    backward, words = element.endswith("Backward"), max(1, itemsize // 4)
    if narrow:
        lanes, numbers = _lanes_across(channels, 1), (inputs if backward else 2) * words  # registers of a step
        if lanes == channels:  # odd, so that a warp's lanes read different banks of shared memory
            return Geometry(1, lanes, 8, (36 // numbers - 1) | 1, True, 2, narrow, STAGES)
        return Geometry(1, lanes, 16, 26 // numbers, True, 1, narrow, STAGES)
    vec = min(aligned, 2) if itemsize == 2 else 1
    if element in ("LinearScan", "LinearScanBackward", "LogLinearScan"):
        numbers = inputs * words
    else:
        numbers = (inputs if backward else 2) * words * vec
    lanes = _lanes_across(channels, vec)
    chains = sequences * -(-channels // (lanes * vec))
    rows = max(4, 1 << (32 // numbers).bit_length() - 1)
    small, large = (Geometry(vec, lanes, w, rows, True, 16 // w, 0, STAGES) for w in (8, 16))
    if steps <= LONG:
        return small._replace(stages=1, looks_back=True) if itemsize == 2 else small
    if packed or 2 * device.processors // chains <= FEW_COMPANIONS:
        registers = (72 if vec == 1 else 60) if numbers == inputs * words else 64
        most = max(4, min(32, registers // numbers // 4 * 4))
        along_one_chain = 4 * chains <= device.processors and not packed and not resets
        for warps, rows in itertools.product((16, 8) if along_one_chain else (8,), range(most, most // 2 - 1, -4)):
            back = Geometry(vec, lanes, warps, rows, True, 16 // warps, 0, 1, True)
            waves = chains * -(-steps // back.tile) / (back.resident * device.processors)
            shared = back.shared_bytes(inputs, 0, itemsize, packed)
            if waves >= FEW_WAVES * warps / 8 and shared <= device.shared // back.resident - 1024:
                return back
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
        ("LOOKS_BACK", int(geometry.chained and geometry.looks_back)),
        ("RESIDENT", geometry.resident),
        ("NARROW", geometry.narrow),
        ("STAGES", geometry.stages),
        ("SHARED_BYTES", shared),
        ("FAR", int(far)),
        ("WIDE", int(wide)),
    )
