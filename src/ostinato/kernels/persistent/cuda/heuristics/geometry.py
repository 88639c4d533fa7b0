"""The launch geometry of persistent kernels: how a layer is divided among blocks, and what fits on chip.

One cooperative launch runs all steps of one layer and direction, forward or backward in time.  Every block keeps its
part of the recurrent matrix in registers and shared memory, or as much of it as fits there; the rest is streamed: read
from L2 at every step.  A *group* is a set of blocks that together hold the whole matrix, and the sequences that they
compute.  A batch is divided among groups, which are independent of each other.  The blocks of a group exchange states
and gradients through global memory, see ``exchange.cuh``.  There are three kinds of matrix product, each the
``Product`` of ``<path>.cuh``:

==========  ==================================================================
``dense``   the whole matrix, on tensor cores
``block``   the nonzero columns of each strip of 16 rows, on tensor cores
``sparse``  single weights with their indices, by FMA instructions
==========  ==================================================================

There are four dense kernels, distinguished by these fields of a :class:`Geometry`:

=====================  ==================================================================================
none of the others     a block computes one group and exchanges states through global memory, as for pruned layers
``distributed``        a group's blocks are one cluster, and the states stay in its shared memory
``block_groups`` of 2  a block computes two groups in turn: some of its warps multiply while others update units
``wide`` as well       so do the warpgroups of a block, with many sequences each; see ``wide.cuh``
=====================  ==================================================================================
"""

import math
from typing import NamedTuple

import torch

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.persistent.cuda.heuristics.cells import Cell
from ostinato.kernels.persistent.plan import KernelPath

SCALARS = {dtype: nvrtc.SCALARS[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)}
WARPS = 8
THREADS = 32 * WARPS
TILE_BYTES = 512  # of weights: 16 rows by 32 bytes of columns
ZERO_PLACES = 16
REGISTERS = 255  # the limit per thread
MANY_BYTES = 64 << 10  # see Geometry.loads_early
WIDE_BYTES = 227 << 10  # of shared memory: the most that a block may have on Hopper


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is not below a."""
    return ceil_div(a, b) * b


class Strips(NamedTuple):
    """How the warps of the block kernel divide strips of 16 rows."""

    shares: int  # the number of warps that share a strip
    tiles: tuple[int, ...]  # of a warp's first share, of its second, ...


class Geometry(NamedTuple):
    """How the units and sequences of a layer are divided among the blocks of a persistent kernel."""

    path: KernelPath
    cell: Cell
    hidden_size: int
    dtype: torch.dtype
    units: int  # hidden units per block
    columns: int  # sequences per group, at most its `capacity`
    groups: int  # resident at once, each with its own sequences and its own copy of the weights
    backward: bool = False
    exact: bool = True  # whether float32 is not rounded to tf32 for the tensor cores
    cluster: int = 1  # blocks that each multiply a slice of the exchanged vector and reduce their products
    tiles: int = 0  # per warp; for the sparse kernel entries, two weights each, per thread
    in_registers: int = 0  # the number of these tiles in registers; others are in shared memory
    streamed: int = 0  # the number of these tiles that do not fit on chip and are read from L2 at every step

    # For the dense product only, see above.
    distributed: bool = False  # whether states stay in the shared memory of a cluster of all blocks of a group
    block_groups: int = 1  # groups that a block computes in turn, in ping-pong
    wide: bool = False  # whether warpgroups multiply many sequences, shared by `cluster` blocks
    sum_buffers: int = 2  # for the partial sums of a step; with one, warps wait for each other before they write theirs

    # For the block product only.
    strips: Strips = Strips(1, ())

    # For recurrences with block-diagonal weights only.
    heads: int = 1  # whose units lie side by side in rows of tensors; each is computed like a layer of its own
    heads_at_once: int = 1  # computed by one launch, a divisor of `heads`

    # Units, sequences and blocks.

    @property
    def products(self) -> int:
        """Rows of the recurrent matrix for each unit."""
        return self.cell.products

    @property
    def rows(self) -> int:
        """Rows of a block's part of the matrix; backward, of the transposed matrix, for all units of the cluster."""
        return self.cluster * self.units if self.backward else self.products * self.units

    @property
    def pitch(self) -> int:
        """The hidden size, rounded up to 16 bytes.

        With two groups in turn it is rounded up further, so that all parts of a slice are copied alike; for wide
        batches, to the units of whole teams of eight blocks, as the backward has.
        """
        whole = 16 // self.dtype.itemsize
        if self.wide:
            whole = 8 * 16
        elif self.block_groups > 1:
            whole = self.cluster * WARPS * 64 // self.dtype.itemsize
            whole //= math.gcd(whole, self.products if self.backward else 1)
        return round_up(self.hidden_size, whole)

    @property
    def takes_fewer(self) -> bool:
        """Whether one compiled kernel runs groups of any number of sequences from two to its `capacity`.

        A tensor core tile has room for eight sequences in any case.  A kernel without room for the sums of so many, or
        that divides its threads among the sequences, is compiled for its actual number.
        """
        whole = self.path == "dense" and self.block_groups == 1 and not self.distributed and not self.streamed
        return whole and 1 < self.columns <= 8

    @property
    def capacity(self) -> int:
        """Sequences per group that the kernel is compiled for."""
        return 8 if self.takes_fewer else self.columns

    @property
    def sequences_at_once(self) -> int:
        """Sequences of all groups that are resident at once."""
        return self.groups * self.block_groups * self.columns

    @property
    def blocks(self) -> int:
        """Blocks per group."""
        if self.scatters:
            return self.cluster
        return ceil_div(self.pitch, self.units * self.cluster) * self.cluster

    @property
    def blocks_of_a_cluster(self) -> int:
        """Blocks launched as one cluster."""
        if self.wide and self.backward:
            return 1
        return self.blocks if self.distributed else self.cluster

    @property
    def scatters(self) -> bool:
        """Whether a block multiplies only the gradients that it has computed itself, for all units of its group."""
        return self.backward and self.distributed

    # What blocks exchange.

    @property
    def slice(self) -> int:
        """Numbers of a sequence that a block multiplies: the exchanged vector, or in a cluster its slice of that."""
        if self.scatters:
            return self.products * self.units
        width = self.products * self.pitch if self.backward else self.pitch
        return width if self.cluster == 1 else round_up(ceil_div(width, self.cluster), 64 // self.dtype.itemsize)

    @property
    def chunk_bytes(self) -> int:
        """Bytes by which the states of sequences are interleaved: what four lanes read, or a whole slice."""
        return 64 if self.path == "dense" else self.slice * self.dtype.itemsize

    @property
    def group_bytes(self) -> int:
        """Bytes of the state of a group's sequences."""
        slices = 1 if self.scatters else self.cluster
        return slices * round_up(self.slice * self.dtype.itemsize, self.chunk_bytes) * self.capacity

    @property
    def state_buffers(self) -> int:
        """Buffers that the steps' exchanged numbers use in rotation; 0 if each step has a buffer of its own.

        In shared memory a buffer is cleared when it has been read.  In global memory it is cleared when half of the
        others have been written, unless its numbers, or for wide batches flags, show which step they belong to.
        """
        return 2 if self.distributed or self.wide else 4 if self.tagged else 8 if self.backward else 0

    @property
    def tagged(self) -> bool:
        """Whether exchanged numbers show which step they belong to."""
        padded = self.backward and self.cluster * self.slice > self.products * self.pitch  # with numbers nobody writes
        rounded = self.dtype == torch.float32 and not self.exact and self.path != "sparse"
        return rounded and not padded and not self.distributed

    @property
    def loads_early(self) -> bool:
        """Whether a backward block loads exchanged numbers before it loads the other operands of later steps.

        That pays off only if many sequences exchange so many numbers that these take as long to arrive as those
        operands.  Otherwise, the other blocks have not written anything yet by then.
        """
        size = self.slice * self.columns * self.dtype.itemsize
        many = self.columns >= 16 and size > MANY_BYTES
        return self.backward and self.path == "dense" and self.cluster == 1 and self.tagged and many

    # Threads and their registers.

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, and with two groups in turn, as many again that update units."""
        return THREADS * self.block_groups

    @property
    def owners(self) -> int:
        """Threads of a block that update a group's units."""
        return THREADS // self.block_groups

    @property
    def adjacent(self) -> int:
        """Adjacent units of a sequence that a thread updates, and loads and stores together.

        More than one was measured to take longer in float32, and for an RNN, which has little to load.
        """
        narrow = self.path == "dense" and self.dtype.itemsize == 2 and self.products > 1 and not self.distributed
        even = self.hidden_size % 2 == self.units % 2 == self.units * self.capacity % (2 * self.owners) == 0
        return 2 if narrow and even else 1

    @property
    def is_uneven(self) -> bool:
        """Whether a thread updates different units, apart from adjacent ones."""
        return self.owners * self.adjacent % self.units > 0

    @property
    def gates(self) -> int:
        """Gates that a thread computes."""
        return ceil_div(self.units * self.capacity, self.owners) * self.products

    @property
    def shares_work(self) -> bool:
        """Whether some warps only update units, and others do the rest of the elementwise work; see ``gather.cu``."""
        return self.distributed and self.units * self.capacity <= THREADS // 2

    @property
    def registers(self) -> int:
        """Registers of a thread that multiplies; with two groups in turn, what updating leaves of two threads' 256."""
        if self.wide:
            return 184 if self.backward else 200
        if self.block_groups == 1:
            return REGISTERS
        updating = 40 + 8 * self.gates if self.backward else 18 + 7 * self.gates
        return 256 - round_up(updating + self.registers_of_cell + 8 * self.is_uneven, 8)

    @property
    def registers_of_cell(self) -> int:
        """Registers that a thread needs for updating units, beyond those for their products."""
        return ceil_div(self.units * self.capacity, self.owners) * self.cell.registers(self.backward)

    # Tiles of weights.

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows in a block's part of the matrix."""
        return ceil_div(self.rows, 16)

    @property
    def column_parts(self) -> int:
        """Parts of a dense matrix's columns, each for one warp, or for two that take half of the rows each.

        See ``operand.cuh``.
        """
        short = self.slice * self.dtype.itemsize <= 2 * self.rows * min(self.columns, 16)
        return WARPS // 2 if short and self.block_groups > 1 and self.rows % 32 == 0 and not self.wide else WARPS

    @property
    def row_tiles_of_warp(self) -> int:
        """Row tiles of a dense matrix that one warp multiplies."""
        return self.row_tiles * self.column_parts // WARPS

    @property
    def column_tiles(self) -> int:
        """Column tiles in each of the `column_parts`."""
        return ceil_div(self.slice * self.dtype.itemsize, 32 * self.column_parts)

    @property
    def has_half_tiles(self) -> bool:
        """Whether the last row tile of a block of the dense kernel has at most 8 rows."""
        return (self.rows - 1) % 16 < 8

    @property
    def tile_columns(self) -> int:
        """Columns of a tile."""
        return 32 // self.dtype.itemsize

    @property
    def parts(self) -> int:
        """4-byte numbers in an entry of the sparse kernel."""
        return 2 if self.dtype.itemsize == 2 else 3

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile of every warp, or one entry of every thread."""
        return self.parts * 4 * THREADS if self.path == "sparse" else WARPS * TILE_BYTES

    @property
    def in_shared(self) -> int:
        """Tiles in shared memory: those neither in registers nor streamed."""
        return self.tiles - self.in_registers - self.streamed

    @property
    def bytes_on_chip(self) -> int:
        """Bytes of weights, and of their indices, on chip."""
        block = (self.tiles - self.streamed) * self.tile_bytes
        if self.path == "block":
            block += self.tiles * WARPS * self.tile_columns * 2
        return self.groups * self.blocks * block

    @property
    def bytes_streamed(self) -> int:
        """Bytes of weights that all blocks read from L2 at every step."""
        return self.groups * self.blocks * self.streamed * self.tile_bytes

    # Shared memory.

    @property
    def state_bytes(self) -> int:
        """Bytes of shared memory for a unit's states of all sequences in a group."""
        wide = self.columns > 4 or (self.path == "block" and self.dtype.itemsize == 2)
        return (8 if wide else 4) * self.dtype.itemsize

    @property
    def banks(self) -> int:
        """Units whose states a warp can gather from shared memory without bank conflicts."""
        return 128 // self.state_bytes

    @property
    def words(self) -> int:
        """8-byte words of each sequence's state that a thread copies to shared memory."""
        return ceil_div(self.slice * self.dtype.itemsize, 8 * THREADS)

    @property
    def prefetched(self) -> int:
        """Tiles or entries whose loads from L2 are in flight at once, limited by registers."""
        return 4 if self.path != "sparse" else 16 if self.columns <= 2 else 8

    @property
    def words_in_flight(self) -> int:
        """Words of each sequence whose loads are in flight at once, limited by registers."""
        return min(self.words, 32 // self.columns)

    @property
    def parts_of_sums(self) -> int:
        """Partial sums of a row in the block kernel: one for each share, or for each share and half of the places."""
        return self.strips.shares * (2 if self.columns <= 4 and self.dtype.itemsize == 2 else 1)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        if self.wide:  # all that is left becomes a ring buffer of copied states
            return WIDE_BYTES
        if self.path == "sparse":
            rows = WARPS * 32
        elif self.path == "dense":
            rows = self.column_parts * (16 * self.row_tiles + 4)
        else:
            rows = self.parts_of_sums * (16 * len(self.strips.tiles) * WARPS // self.strips.shares + 4)
        sums = 0 if self.scatters else self.sum_buffers * rows * self.capacity * 4
        state = 0 if self.path == "dense" else (self.slice + ZERO_PLACES) * self.state_bytes
        mail = self.block_groups * 2 * (self.cluster - (not self.scatters)) * self.units * self.capacity * 8
        state += self.distributed * self.state_buffers * self.group_bytes
        if self.block_groups > 1:  # a copy of the operand, with a barrier for each part
            state += self.slice * self.columns * self.dtype.itemsize + 16 * self.column_parts
        if self.shares_work:  # operands and results of updates that threads pass to each other
            state += 2 * self.cell.exchanged(self.backward) * round_up(self.units * self.capacity, 32) * 4
        return sums + state + mail + self.in_shared * self.tile_bytes
