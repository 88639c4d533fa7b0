"""What the choice of a scan's algorithm and tiles depends on: the scan's shape and layout, and the GPU's properties."""

from typing import NamedTuple

from ostinato.kernels.scan.cuda.heuristics.geometry import Geometry

SHORT, LONG = 4, 4096  # steps at which most rules change; only two, as each geometry is another kernel to compile
LATENCY = 1.1e-6  # seconds, of memory under load
STAGES = 2  # tiles that a block prefetches
FILLED = 0.7  # the fraction of the multiprocessors that must have a block, if blocks have eight warps
FULL = 0.9  # the fraction of the last wave that must be filled, if a block has a multiprocessor to itself
LINE = 128  # bytes of a cache line
LINEAR = ("LinearScan", "LinearScanBackward")
CHEAP = (*LINEAR, "LogLinearScan")  # elements whose steps are cheap enough to be computed from the inputs twice


class Device(NamedTuple):
    """The properties of a GPU that the choice depends on."""

    processors: int
    bandwidth: float  # memory bandwidth, bytes per second
    shared_of_block: int  # the most bytes of shared memory that a block can have
    shared: int  # bytes of shared memory of a multiprocessor
    hopper: bool = False  # whether it is Hopper or later, with messages between the blocks of a cluster and tensor maps

    @property
    def in_flight(self) -> float:
        """Bytes that each multiprocessor must have in flight to keep the memory busy (Little's law)."""
        return self.bandwidth * LATENCY / self.processors


class Criteria(NamedTuple):
    """The properties of a scan that the choice depends on."""

    element: str  # the operation: a struct of ``elements.cuh``, or GeneratedN or GeneratedNBackward, with N tensors
    inputs: int  # the number of tensors that it reads
    itemsize: int  # bytes of a number
    aligned: int  # the widest vector access that alignment allows, in channels: a power of two
    contiguous: bool  # whether each sequence is contiguous in memory
    sequences: int  # independent sequences, times directions
    steps: int
    channels: int
    device: Device
    packed: bool = False  # whether sequences are packed in one by cu_seqlens
    resets: bool = False  # whether there is a mask of resets
    by_offsets: bool = False  # whether the rows of a step are found by offsets, as in a PackedSequence
    expanded: bool = False  # whether an input is expanded over steps, sequences or directions (has a stride of zero)

    @property
    def backward(self) -> bool:
        return self.element.endswith("Backward")

    @property
    def unaligned_rows(self) -> bool:
        """Whether rows are unaligned, so that they are copied in aligned 16-byte pieces (see ``Geometry.pitches``).

        The longer rows of linear scans count as such if they are aligned to pairs of 16-bit numbers only, as these are
        slow to copy one by one.
        """
        singles = self.aligned == 1 and self.itemsize <= 4 and self.channels > 16
        pairs = self.aligned == 2 and self.itemsize == 2 and self.channels > 64 and self.element in LINEAR
        return (singles or pairs) and not self.by_offsets

    @property
    def vector(self) -> int:
        """The most channels that a lane can have."""
        return 8 // self.itemsize if self.unaligned_rows and self.channels > 32 else self.aligned

    @property
    def narrow_vector(self) -> int:
        """Channels of a lane where there are few channels: a 16-bit pair takes as many instructions as one number."""
        return 2 if self.element in LINEAR and self.itemsize == 2 and self.aligned >= 2 and not self.packed else 1

    @property
    def ends_within_lines(self) -> bool:
        """Whether rows do not consist of whole cache lines."""
        return self.channels * self.itemsize % LINE > 0

    @property
    def shares_lines(self) -> bool:
        """Whether cache lines have channels of two groups, which different blocks read."""
        return self.channels > 32 and self.ends_within_lines

    @property
    def mappable(self) -> bool:
        """Whether tensor maps can describe the inputs."""
        aligned = self.aligned * self.itemsize >= 16
        return self.device.hopper and aligned and not (self.by_offsets or self.expanded)

    @property
    def tests_resets(self) -> bool:
        """Whether steps are tested for resets; where rows are unaligned, their coefficients are set to zero instead."""
        return self.resets and (self.packed or not self.unaligned_rows)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of a sequence in one input."""
        return self.steps * self.channels * self.itemsize

    @property
    def words(self) -> int:
        """The registers that a number takes."""
        return max(1, self.itemsize // 4)

    @property
    def composition_registers(self) -> int:
        """The registers that a step of a channel takes once it has been computed from its inputs."""
        return (self.inputs if self.backward else 2) * self.words

    def step_registers(self, vec: int) -> int:
        """The registers that a step of `vec` channels takes in a chained tile, as its inputs or computed from them."""
        if self.element in CHEAP:
            return self.inputs * max(1, vec * self.itemsize // 4)
        return self.composition_registers * vec

    def chains(self, geometry: Geometry) -> int:
        """The number of chains: groups of channels of a sequence, each scanned by one block or by several."""
        return self.sequences * -(-self.channels // geometry.group)

    def waves(self, geometry: Geometry) -> float:
        """How many waves of tiles there are, if every resident block scans one tile per wave; may be a fraction."""
        tiles = self.chains(geometry) * -(-self.steps // geometry.tile)
        return tiles / (geometry.resident * self.device.processors)

    def fits(self, geometry: Geometry) -> bool:
        """Whether all blocks that are to be resident fit in a multiprocessor's shared memory."""
        shared = geometry.shared_bytes(self.inputs, 0, self.itemsize, self.packed)
        return shared <= self.device.shared // geometry.resident - 1024


def lanes_across(channels: int, vec: int) -> int:
    """The lanes of a warp that span the channels, `vec` each: a power of two up to 32."""
    return min(32, 1 << (-(-channels // vec) - 1).bit_length())
