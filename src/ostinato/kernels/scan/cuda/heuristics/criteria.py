"""What the choice of a scan's algorithm and tiles depends on."""

from typing import NamedTuple

from ostinato.kernels.scan.cuda.heuristics.geometry import Geometry

SHORT, LONG = 4, 4096  # steps at which most rules change: at few lengths, as each geometry is a kernel to compile
LATENCY = 1.1e-6  # of memory under load, seconds
STAGES = 2  # tiles that a block prefetches
FILLED = 0.7  # of the multiprocessors need a block of eight warps
FULL = 0.9  # of the last wave, where a block has a multiprocessor to itself
LINE = 128  # bytes of memory that are moved together
LINEAR = ("LinearScan", "LinearScanBackward")
CHEAP = (*LINEAR, "LogLinearScan")  # to read twice


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
        """Whether rows begin anywhere, so that they are copied in aligned pieces (see ``Geometry.pitches``).

        So are longer ones of linear scans that begin with whole pairs of 16 bits, which are slow to copy one by one.
        """
        singles = self.aligned == 1 and self.itemsize <= 4 and self.channels > 16
        pairs = self.aligned == 2 and self.itemsize == 2 and self.channels > 64 and self.element in LINEAR
        return (singles or pairs) and not self.by_offsets

    @property
    def vector(self) -> int:
        """The most channels of a lane."""
        return 8 // self.itemsize if self.anywhere and self.channels > 32 else self.aligned

    @property
    def narrow_vector(self) -> int:
        """Channels of a lane where there are few: a pair of 16 bits is as many accesses and instructions as one."""
        return 2 if self.element in LINEAR and self.itemsize == 2 and self.aligned >= 2 and not self.packed else 1

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
    def sequence_bytes(self) -> int:
        """Bytes of a sequence of one input."""
        return self.steps * self.channels * self.itemsize

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
        """How often the resident blocks take a tile each until all tiles are scanned; a fraction in the last wave."""
        tiles = self.chains(geometry) * -(-self.steps // geometry.tile)
        return tiles / (geometry.resident * self.device.processors)

    def fits(self, geometry: Geometry) -> bool:
        """Whether a multiprocessor's shared memory holds all blocks that are to be resident."""
        shared = geometry.shared_bytes(self.inputs, 0, self.itemsize, self.packed)
        return shared <= self.device.shared // geometry.resident - 1024


def lanes_across(channels: int, vec: int) -> int:
    return min(32, 1 << (-(-channels // vec) - 1).bit_length())
