"""The scan kernel's launch geometry: what follows from its algorithm and the shape of its tiles."""

from collections.abc import Sequence
from typing import NamedTuple

from ostinato.kernels.cuda.nvrtc import Macros


class Geometry(NamedTuple):
    """The algorithm and the shape of its tiles; see ``scan.cu``."""

    vec: int  # channels of a lane
    lanes: int  # of a warp, or of several abreast, that lie along the channels; the others along time
    warps: int  # of a block, one after the other in time
    rows: int  # consecutive steps of a thread
    chained: bool = False
    resident: int = 1  # blocks per multiprocessor, as in __launch_bounds__, which limits registers
    narrow: int = 0  # channels, if a warp's steps are contiguous in memory, else 0
    stages: int = 1  # tiles prefetched
    looks_back: bool = False  # chained: by decoupled look-back, not interleaved tiles
    stays: bool = False  # chained: every block has one tile, which stays in shared memory
    cluster: int = 1  # streaming: blocks of a cluster, which scan a chain's tiles in turn
    mapped: bool = False  # interleaved: a tensor map copies a warp's rows, by one instruction

    @property
    def group(self) -> int:
        """Adjacent channels that a block scans together: those of a chain."""
        return self.lanes * self.vec

    @property
    def segments(self) -> int:
        """Of time, each of `rows` steps, that the lanes of a warp cover."""
        return max(1, 32 // self.lanes)

    @property
    def tile(self) -> int:
        """Steps that a block scans at once."""
        return self.warps * self.segments * self.rows

    @property
    def threads(self) -> int:
        return self.warps * max(32, self.lanes)

    def companions(self, chains: int, chunks: int, itemsize: int, processors: int) -> int:
        """How many blocks share a chain: a cluster's, or as many as are resident at once for all chains.

        Those read the aggregates of the others' tiles in rounds of ``read_at_once``; a last round of few tiles is not
        worth the extra blocks.
        """
        if not self.chained or self.looks_back:
            return self.cluster
        if self.stays:
            return chunks
        most = max(1, min(chunks, self.resident * processors // chains))
        rest = (most - 1) % self.read_at_once(itemsize)
        return most - rest if 10 * rest <= most else most

    def read_at_once(self, itemsize: int) -> int:
        """How many other tiles' aggregates a block loads before it waits for any."""
        pollers = self.warps * self.segments
        return pollers * max(1, (16 if pollers < 256 else 8) // itemsize // self.vec)

    def copies_16_bytes(self, itemsize: int, aligned: int) -> bool:
        """Whether lanes copy 16 bytes at once, which needs rows of whole pieces, `aligned` (in channels) to 16 bytes.

        Smaller copies go through L1, and as many are on their way as it has lines beside the shared memory.
        """
        pieces = self.lanes * self.vec * itemsize % 16 == 0 and self.rows * self.vec * itemsize % 16 == 0
        return not (self.narrow or self.mapped) and pieces and aligned * itemsize >= 16

    def pitches(self, itemsize: int, strides: Sequence[int], anywhere: bool) -> tuple[int, ...]:
        """Bytes between an input's rows in shared memory if they begin `anywhere`, so that pieces are copied, else 0.

        Asynchronous copies of single channels are slow, or impossible below 4 bytes.  In memory rows are `strides`
        apart.  No piece has elements of two rows.
        """
        least = self.group * itemsize + 2 * 15
        pitched = anywhere and not self.narrow and (self.chained or self.group > 32)
        return tuple(least + (itemsize * stride - least) % 16 if pitched else 0 for stride in strides)

    def shared_bytes(
        self, inputs: int, sums: int, itemsize: int, packed: bool = False, resets: bool = False, pitch: int = 0
    ) -> int:
        """An upper bound of ``sizeof(Shared)``, which shared.cuh asserts; `sums`: parameters with gradients."""
        pack, state = self.vec * itemsize, self.group * max(4, itemsize)
        strip = 32 * self.rows * max(4, pack)
        if self.narrow:
            strip = self.segments * self.rows * self.narrow * itemsize + 64 + self.lanes * pack
        elif pitch:
            strip = self.segments * self.rows * pitch + 64 + self.lanes * self.vec * itemsize
        strips = self.stages * self.warps * inputs + (self.warps if self.narrow and not self.stays else 0)
        buffers = 1 if self.stays else 3 if self.chained and not self.looks_back else 2
        numbers = 3 if itemsize == 4 else 2  # of a composition: with the rounding errors of float32's products
        between_warps = (buffers + (not self.looks_back)) * self.warps * (numbers * state + 4)
        boundaries = 2 * buffers * (4 * self.tile + 4 * (self.tile // 32 + 2)) + 4 * 2048 if packed else 28
        window = (max(32, self.warps * self.segments) * (3 * state + 4) if self.looks_back else 16 * self.vec) + state
        sum_rows = self.warps * sums * state
        inbox = 2 * (self.cluster * 4 * max(4, itemsize) * self.group + 16) if self.cluster > 1 else 16
        arrivals = 8 * self.warps + 96 if self.mapped else 0
        steps = self.segments * self.rows
        mask = self.stages * self.warps * (steps + 36) if resets and steps > 96 else 16
        return strips * strip + between_warps + boundaries + sum_rows + window + mask + inbox + arrivals + 144


def macros(
    element: str,
    scalar: str,
    parameter: str,
    packing: str,
    geometry: Geometry,
    shared: int,
    long_offsets: bool,
    copies_16_bytes: bool,
    pitches: Sequence[int],
) -> Macros:
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
        ("LONG_OFFSETS", int(long_offsets)),
        ("COPIES_16_BYTES", int(copies_16_bytes)),
        ("MAPPED", int(geometry.mapped)),
        ("PITCHES", ", ".join(map(str, pitches))),
        ("STAYS", int(geometry.stays)),
        ("CLUSTER", geometry.cluster),
    )
