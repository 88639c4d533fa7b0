"""The scan kernel's launch geometry: its algorithm and the shape of its tiles, and the sizes that follow from these."""

from collections.abc import Sequence
from typing import NamedTuple

from ostinato.kernels.cuda.nvrtc import Macros


class Geometry(NamedTuple):
    """The algorithm of a scan and the shape of its tiles; see ``scan.cu``."""

    vec: int  # channels of a lane
    lanes: int  # lanes that span the channels, of one warp or of several abreast; the other lanes of a warp span time
    warps: int  # warps of a block (or groups of warps abreast), consecutive in time
    rows: int  # consecutive steps of a thread
    chained: bool = False  # whether several blocks share a chain, not one block or a cluster
    resident: int = 1  # blocks per multiprocessor, as in __launch_bounds__, which limits registers
    narrow: int = 0  # the number of channels if a warp's steps are contiguous in memory, else 0
    stages: int = 1  # tiles that are prefetched
    looks_back: bool = False  # chained: by decoupled look-back instead of interleaved tiles
    stays: bool = False  # chained: every block has a single tile, which stays in shared memory
    cluster: int = 1  # streaming: blocks of a cluster, which scan a chain's tiles in turn
    mapped: bool = False  # interleaved: a tensor map copies a warp's rows by a single instruction

    @property
    def group(self) -> int:
        """The channels of a chain: adjacent ones that a block scans together."""
        return self.lanes * self.vec

    @property
    def segments(self) -> int:
        """The segments of time, of `rows` steps each, that the lanes of a warp span."""
        return max(1, 32 // self.lanes)

    @property
    def tile(self) -> int:
        """The steps of a tile, which a block scans at once."""
        return self.warps * self.segments * self.rows

    @property
    def threads(self) -> int:
        return self.warps * max(32, self.lanes)

    def companions(self, chains: int, chunks: int, itemsize: int, processors: int) -> int:
        """How many blocks share a chain: those of a cluster, or as many as can be resident at once for all chains.

        Chained blocks read the aggregates of the others' tiles in rounds of ``read_at_once``; a last round of few tiles
        is not worth the extra blocks.
        """
        if not self.chained or self.looks_back:
            return self.cluster
        if self.stays:
            return chunks
        most = max(1, min(chunks, self.resident * processors // chains))
        rest = (most - 1) % self.read_at_once(itemsize)
        return most - rest if 10 * rest <= most else most

    def read_at_once(self, itemsize: int) -> int:
        """How many aggregates of other blocks' tiles a block loads before it waits for any."""
        pollers = self.warps * self.segments
        return pollers * max(1, (16 if pollers < 256 else 8) // itemsize // self.vec)

    def copies_16_bytes(self, itemsize: int, aligned: int) -> bool:
        """Whether lanes copy 16 bytes at once, if rows consist of whole pieces of 16 bytes, `aligned` (in channels).

        Smaller copies go through L1, so that no more of them are in flight than it has lines beside the shared memory.
        """
        pieces = self.lanes * self.vec * itemsize % 16 == 0 and self.rows * self.vec * itemsize % 16 == 0
        return not (self.narrow or self.mapped) and pieces and aligned * itemsize >= 16

    def pitches(self, itemsize: int, strides: Sequence[int], unaligned: bool) -> tuple[int, ...]:
        """The pitch in bytes of each input's rows in shared memory if they are copied in aligned pieces, else 0.

        Unaligned rows are: asynchronous copies of single channels are slow, or impossible below 4 bytes.  In global
        memory rows are `strides` apart.  No piece in shared memory has elements of two rows.
        """
        least = self.group * itemsize + 2 * 15
        pitched = unaligned and not self.narrow and (self.chained or self.group > 32)
        return tuple(least + (itemsize * stride - least) % 16 if pitched else 0 for stride in strides)

    def shared_bytes(
        self, inputs: int, sums: int, itemsize: int, packed: bool = False, resets: bool = False, pitch: int = 0
    ) -> int:
        """An upper bound of ``sizeof(Shared)``, which ``shared.cuh`` asserts; `sums` parameters have gradients."""
        pack, state = self.vec * itemsize, self.group * max(4, itemsize)
        strip = 32 * self.rows * max(4, pack)
        if self.narrow:
            strip = self.segments * self.rows * self.narrow * itemsize + 64 + self.lanes * pack
        elif pitch:
            strip = self.segments * self.rows * pitch + 64 + self.lanes * self.vec * itemsize
        strips = self.stages * self.warps * inputs + (self.warps if self.narrow and not self.stays else 0)
        buffers = 1 if self.stays else 3 if self.chained and not self.looks_back else 2
        numbers = 3 if itemsize == 4 else 2  # of a composition, in float32 with the rounding error of its product
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
        ("LOOKS_BACK", int(geometry.looks_back)),
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
