"""The launch geometry of persistent kernels, and a cost model to choose the fastest; needs no GPU.

One cooperative launch runs all steps of one layer and direction, forward or backward in time.  Every block keeps its
part of the recurrent matrix in registers and shared memory; states and gradients pass between blocks through global
memory, see ``exchange.cuh``.  There are three kinds of matrix product, each the Product of ``<path>.cuh``:

==========  ==================================================================
``dense``   the whole matrix, on tensor cores
``block``   the nonzero columns of each strip of 16 rows, on tensor cores
``sparse``  single weights with their indices, by FMA instructions
==========  ==================================================================
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import torch

from ostinato.kernels.persistent.plan import GATES, Plan

SCALARS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
WARPS = 8
THREADS = 32 * WARPS
TILE_BYTES = 512  # of weights: 16 rows by 32 bytes of columns
ZERO_PLACES = 16
REGISTERS = 255  # the limit per thread


class Geometry(NamedTuple):
    """How the units and sequences of a layer are divided among the blocks of a persistent kernel."""

    path: str
    cell: str
    hidden_size: int
    dtype: torch.dtype
    units: int  # hidden units per block
    columns: int  # sequences per group of blocks
    groups: int  # resident at once, each with its own sequences and its own copy of the weights
    backward: bool = False
    exact: bool = True  # float32 is not rounded to tf32 for the tensor cores
    cluster: int = 1  # blocks that reduce their products, each over its slice of the exchanged vector
    tiles: int = 0  # of a warp; of the sparse kernel: entries, two weights of a thread
    held: int = 0  # of these in registers; the others are in shared memory
    streamed: int = 0  # of the dense kernel's: read from L2 at every step, as they do not fit on chip
    shares: int = 1  # into which the block kernel splits each strip of 16 rows
    share_tiles: tuple[int, ...] = ()  # tiles of a warp's first share, of its second, ...

    @property
    def rows(self) -> int:
        """Rows of a block's part of the matrix; backward of the transposed one, for all units of the cluster."""
        return self.cluster * self.units if self.backward else GATES[self.cell] * self.units

    @property
    def pitch(self) -> int:
        """The hidden size rounded up to 16 bytes."""
        return _round_up(self.hidden_size, 16 // self.dtype.itemsize)

    @property
    def slice(self) -> int:
        """Numbers of a sequence that a block multiplies: the exchanged vector, or its slice of it in a cluster."""
        width = GATES[self.cell] * self.pitch if self.backward else self.pitch
        return width if self.cluster == 1 else _round_up(_ceil(width, self.cluster), 64 // self.dtype.itemsize)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a sequence's state before the next sequence's: what four lanes read, or a whole slice."""
        return 64 if self.path == "dense" else self.slice * self.dtype.itemsize

    @property
    def group_bytes(self) -> int:
        """Bytes of the state of a group's sequences."""
        return self.cluster * _round_up(self.slice * self.dtype.itemsize, self.chunk_bytes) * self.columns

    @property
    def blocks(self) -> int:
        """Blocks per group."""
        return _ceil(self.pitch, self.units * self.cluster) * self.cluster

    @property
    def row_tiles(self) -> int:
        return _ceil(self.rows, 16)

    @property
    def column_tiles(self) -> int:
        """Column tiles of a warp of the dense kernel."""
        return _ceil(self.slice * self.dtype.itemsize, 32 * WARPS)

    @property
    def has_half_tiles(self) -> bool:
        """Whether the last row tile of a block of the dense kernel has at most 8 rows."""
        return (self.rows - 1) % 16 < 8

    @property
    def state_bytes(self) -> int:
        """Bytes of a unit's batch in shared memory."""
        wide = self.columns > 4 or (self.path == "block" and self.dtype.itemsize == 2)
        return (8 if wide else 4) * self.dtype.itemsize

    @property
    def parts_of_sums(self) -> int:
        """Partial sums of a row in the block kernel: one per share, or one per share and half of the places."""
        return self.shares * (2 if self.columns <= 4 and self.dtype.itemsize == 2 else 1)

    @property
    def banks(self) -> int:
        """Units whose batches a warp can gather from shared memory without bank conflicts."""
        return 128 // self.state_bytes

    @property
    def words(self) -> int:
        """Words of 8 bytes of each sequence's state that a thread copies to shared memory."""
        return _ceil(self.slice * self.dtype.itemsize, 8 * THREADS)

    @property
    def words_in_flight(self) -> int:
        """Words of each sequence whose loads are in flight together, limited by registers."""
        return min(self.words, 32 // self.columns)

    @property
    def tile_columns(self) -> int:
        return 32 // self.dtype.itemsize

    @property
    def parts(self) -> int:
        """4-byte numbers in an entry of the sparse kernel."""
        return 2 if self.dtype.itemsize == 2 else 3

    @property
    def shared_bytes(self) -> int:
        if self.path == "sparse":
            rows = WARPS * 32
        elif self.path == "dense":
            rows = WARPS * (16 * self.row_tiles + 4)
        else:
            rows = self.parts_of_sums * (16 * len(self.share_tiles) * WARPS // self.shares + 4)
        sums = 2 * rows * self.columns * 4
        state = 0 if self.path == "dense" else (self.slice + ZERO_PLACES) * self.state_bytes
        mail = 2 * (self.cluster - 1) * self.units * self.columns * 8
        return sums + state + mail + (self.tiles - self.held - self.streamed) * self.tile_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile of every warp, or one entry of every thread."""
        return self.parts * 4 * THREADS if self.path == "sparse" else WARPS * TILE_BYTES

    @property
    def bytes_on_chip(self) -> int:
        """Bytes of weights, and of their indices."""
        block = (self.tiles - self.streamed) * self.tile_bytes
        if self.path == "block":
            block += self.tiles * WARPS * self.tile_columns * 2
        return self.groups * self.blocks * block

    @property
    def bytes_streamed(self) -> int:
        """Bytes of weights that all blocks read from L2 at every step."""
        return self.groups * self.blocks * self.streamed * self.tile_bytes

    def deal(self, strip_columns: Sequence[int], shared_limit: int) -> "Geometry | None":
        """The geometry of the block kernel with the fewest accesses to shared memory, given the columns of each strip.

        None if the weights do not fit on chip.
        """
        strip_tiles = [max(1, _ceil(n, self.tile_columns)) for n in strip_columns]

        def dealt(shares: int) -> Geometry | None:
            at_once = WARPS // shares  # strips
            first = range(0, len(strip_tiles), at_once)
            tiles = tuple(_ceil(max(strip_tiles[i : i + at_once]), shares) for i in first)
            return self._replace(tiles=sum(tiles), shares=shares, share_tiles=tiles).hold(shared_limit)

        def accesses(geometry: Geometry) -> float:
            """Two to gather a tile, four to load one that is not in registers, four for a sum; and reads of sums."""
            kept = geometry.tiles - geometry.held
            of_warps = WARPS * (2 * geometry.tiles + 4 * kept + 4 * len(geometry.share_tiles))
            return of_warps + geometry.parts_of_sums * geometry.rows * geometry.columns / 32

        ways = (dealt(shares) for shares in (1, 2, 4, 8))
        return min((way for way in ways if way), key=accesses, default=None)

    @property
    def last_tiles(self) -> str:
        """A bit for each of a warp's tiles in the block kernel, set for the last of a share, as 64-bit literals."""
        bits = sum(1 << end - 1 for end in itertools.accumulate(self.share_tiles))
        return ",".join(f"{bits >> first & 2**64 - 1}ull" for first in range(0, self.tiles, 64))

    def hold(self, shared_limit: int) -> "Geometry | None":
        """Keep as many tiles as possible in registers; None if the others do not fit into shared memory."""
        wide = self.dtype == torch.float32
        streamed = 0
        if self.path == "dense":
            sequence_tiles = _ceil(self.columns, 8)
            states = 2 * self.column_tiles * sequence_tiles
            products = self.row_tiles * sequence_tiles
            sums = 4 * products * (1 if products >= 4 else 2 if products >= 2 else 4)
            gates = _ceil(self.units * self.columns, THREADS) * GATES[self.cell]  # that a thread computes
            rest = 20 + 4 * sequence_tiles + 32 * wide + max(24, 6 * gates) * self.backward
            if states > 128 or (self.backward and gates > 8):
                return None
            free = (REGISTERS - states - sums - rest) // 4
            room = (shared_limit - self._replace(tiles=0).shared_bytes) // self.tile_bytes
            if room < 0:
                return None
            if self.tiles > max(0, free) + room:  # prefetched tiles take registers, too
                free -= 4
                streamed = self.tiles - max(0, free) - room
        elif self.path == "block":
            words, places = 2 * self.columns * self.words_in_flight, self.tiles * self.tile_columns // 64
            free = (REGISTERS - places - words - 68 - 16 * wide - 24 * self.backward) // 4
        else:
            free = (REGISTERS - 92 - 24 * self.backward) // self.parts
        geometry = self._replace(held=max(0, min(self.tiles, free)), streamed=streamed)
        return geometry if geometry.shared_bytes <= shared_limit else None

    def macros(self, resets: bool = False, packed: bool = False) -> tuple[tuple[str, object], ...]:
        """The preprocessor definitions for CUDA files, for calls with or without resets and packed sequences."""
        return (
            ("SCALAR", SCALARS[self.dtype]),
            ("VEC", 1),
            ("CELL", self.cell.upper()),
            ("HIDDEN", self.hidden_size),
            ("UNITS", self.units),
            ("COLUMNS", self.columns),
            ("BLOCKS", self.blocks),
            ("HELD", self.held),
            ("EXACT", int(self.dtype == torch.float32 and (self.exact or self.path == "sparse"))),
            ("CHUNK_BYTES", self.chunk_bytes),
            ("BACKWARD", int(self.backward)),
            ("CLUSTER", self.cluster),
            ("RESETS", int(resets)),
            ("OFFSETS", int(packed)),
            *{
                "dense": (("STREAMED", self.streamed),),
                "block": (
                    ("TILES", self.tiles),
                    ("SHARES", self.shares),
                    ("LAST_TILES", self.last_tiles),
                    ("STATE_COLUMNS", self.state_bytes // self.dtype.itemsize),
                ),
                "sparse": (("ENTRIES", self.tiles), ("STATE_COLUMNS", self.state_bytes // self.dtype.itemsize)),
            }[self.path],
        )


def files(geometry: Geometry) -> tuple[str, ...]:
    """The CUDA files of a kernel, in the order in which they are compiled."""
    needs = {
        "dense": ("mma.cuh",),
        "block": ("mma.cuh", "state.cuh"),
        "sparse": ("state.cuh",),
    }
    direction = ("cluster.cuh", "backward.cu") if geometry.backward else ("forward.cu",)
    names = ("exchange.cuh", "matrix.cuh", *needs[geometry.path], f"{geometry.path}.cuh", "prepare.cuh", *direction)
    return ("numeric.cuh", *(f"persistent/{name}" for name in names))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil(a, b) * b


class _Cost(NamedTuple):
    """Microseconds of a step on a Hopper GPU, fitted to some hundred layers, nearly all within 20 %."""

    step: float  # fixed
    read: float  # per 100 kB of state
    row: float  # per 10 kB of a sequence's state, for a lane's number of loads
    kept: float  # per 100 kB of weights read from shared memory
    multiplied: float  # per hundred tiles of a warp or entries of a thread
    updated: float  # per ten gates that a thread computes
    summed: float  # per 64 row tiles of a sequence, for the reduction of partial sums
    cluster: float = 0.0  # per doubling of the cluster, for the reduction over its blocks


_COSTS = {
    ("dense", False): _Cost(0.87, 0.69, 0.0, 0.14, 0.98, 0.59, 0.34),
    ("dense", True): _Cost(0.23, 0.22, 0.66, 0.22, 0.41, 3.08, 2.18, 0.33),
    ("block", False): _Cost(0.85, 1.9, 0.0, 0.37, 1.45, 0.26, 0.0),
    ("block", True): _Cost(0.85, 1.9, 0.0, 0.37, 1.45, 0.26, 0.0, 0.25),
    ("sparse", False): _Cost(0.80, 4.1, 0.0, 0.80, 2.10, 2.00, 0.0),
    ("sparse", True): _Cost(0.80, 4.1, 0.0, 0.80, 2.10, 2.00, 0.0, 0.25),
}
_EXACT = {False: 4.5, True: 7.0}  # the cost factor of exact products, three of split numbers; by backward
_STREAMED = 0.9  # microseconds per 100 kB of weights that a block of the dense kernel reads from L2
_HALF_WORDS = 0.17  # microseconds, if blocks of the dense kernel publish their state in words of 4 bytes
_SHARE = 0.054  # microseconds per share of a strip of a warp of the block kernel
_ROUND_TRIP = 1.3  # microseconds per additional round of loads in which the block kernel waits for the state


def microseconds(geometry: Geometry, batch: int) -> float:
    """The estimated time of a step of all sequences."""
    cost, row = _COSTS[geometry.path, geometry.backward], geometry.slice * geometry.dtype.itemsize
    on_tensor_cores = geometry.path == "block" or (geometry.path == "dense" and geometry.columns > 1)
    thrice = geometry.exact and geometry.dtype == torch.float32 and on_tensor_cores
    passes = _ceil(geometry.columns, 8) * (_EXACT[geometry.backward] if thrice else 1)
    step = cost.step + cost.read * geometry.columns * row / 1e5 + cost.row * row / 1e4
    step += cost.kept * (geometry.tiles - geometry.held - geometry.streamed) * geometry.tile_bytes / 1e5
    step += _STREAMED * geometry.streamed * geometry.tile_bytes / 1e5
    step += cost.multiplied * geometry.tiles * passes / 1e2
    step += cost.updated * _ceil(geometry.units * geometry.columns, THREADS) * GATES[geometry.cell] / 10
    step += cost.summed * geometry.row_tiles * geometry.columns / 64
    step += cost.cluster * math.log2(geometry.cluster)
    if geometry.path == "dense":
        step += _HALF_WORDS if geometry.units * geometry.dtype.itemsize % 8 and not geometry.backward else 0
    if geometry.path == "block":
        step += _SHARE * len(geometry.share_tiles)
        step += _ROUND_TRIP * (_ceil(geometry.words, geometry.words_in_flight) - 1)
    return step * _ceil(batch, geometry.columns * geometry.groups)


def _coverings(start: Geometry, batch: int, properties: Any, share: int) -> Iterator[Geometry]:
    """All divisions of units and sequences among blocks that can be resident at once."""
    word, pitch = 4 // start.dtype.itemsize, start.pitch
    dense, largest = start.path == "dense", batch if start.path == "dense" else min(batch, 8)
    clusters = (1, 2, 4) if start.backward and properties.major >= 9 else (1,)
    for cluster in clusters:
        resident = resident_blocks(properties, cluster) // share
        parts = cluster if start.backward else GATES[start.cell]  # rows of a block for each of its units
        for columns in sorted({_ceil(batch, n) for n in range(_ceil(batch, largest), batch + 1)}):
            for groups in range(1, min(_ceil(batch, columns), resident // cluster) + 1):
                blocks = resident // cluster // groups * cluster
                least = _ceil(pitch, blocks)
                if start.path == "block":
                    choices = {_round_up(least * parts, 16) // parts if start.backward else _round_up(least, 16)}
                elif not dense:  # a thread works on one row only
                    choices = {units for units in (_round_up(least, word),) if parts * units <= THREADS}
                else:  # enough units to fill half a row tile, for both word sizes: fewer blocks
                    rows = range(_round_up(parts * least, 8), _round_up(parts * least, 8) + 24, 8)
                    choices = {n // parts // w * w for n in rows for w in (word, 2 * word)}
                for units in sorted(choices):
                    covering = start._replace(units=units, columns=columns, groups=groups, cluster=cluster)
                    # Blocks of a cluster stay in step only if each one's slice contains data that others write.
                    is_whole = (cluster - 1) * covering.slice < GATES[start.cell] * pitch
                    if units >= least and covering.blocks <= blocks and is_whole:
                        yield covering


@functools.lru_cache(maxsize=4096)
def _entries(height: int, width: int, blocks: int, density: float, rows: int, columns: int) -> int:
    """The likely number of entries (pairs of weights) per thread of the sparse kernel, for blocks' parts of this size.

    The matrix is pruned evenly in blocks of `rows` by `columns`.  A thread takes weights of one row only, so some have
    few or none: the result is the smallest with which, likely, the threads of every part suffice.
    """
    strips, mean = height / rows, width * density
    deviation = math.sqrt(columns * width * density * (1 - density)) + 1e-9
    row = NormalDist(mean, deviation)
    unlikely = NormalDist().inv_cdf(1 - 0.01 / blocks)

    def fits(weights: int) -> bool:
        """Whether the threads of each part likely suffice, with this many weights each."""
        alike = 1 - row.cdf(THREADS // height * weights + 0.5)  # the probability that an equal number per row does not
        if strips * blocks * alike < 0.2:
            return True
        most = math.ceil((mean + 6 * deviation) / weights)
        more = [1 - row.cdf(n * weights + 0.5) for n in range(1, most)]  # P(a row needs more than n threads)
        expected = 1 + sum(more)
        variance = sum((2 * n + 1) * p for n, p in enumerate(more, 1)) + 1 - expected**2
        return rows * (strips * expected + unlikely * math.sqrt(strips * max(variance, 0.0))) <= THREADS

    low, high = 1, math.ceil((mean + 6 * deviation) / 2) + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(2 * middle) else (middle + 1, high)
    return low


def resident_blocks(properties: Any, cluster: int) -> int:
    """The number of blocks that can be resident at once, one per multiprocessor.

    A cluster must fit within one GPC, and GPCs differ in their number of multiprocessors: an H200 can use 120 of its
    132 with clusters of 4.
    """
    processors: int = properties.multi_processor_count
    return (processors if cluster <= 2 else processors * 10 // 11) // cluster * cluster


def candidates(
    start: Geometry, batch: int, density: float, block: tuple[int, int] | None, properties: Any, share: int = 1
) -> Iterator[Geometry]:
    """The geometries that fit a layer, assuming that the matrix is pruned evenly in such blocks."""
    shared = properties.shared_memory_per_block_optin
    rows = 1 if block is None else block[1] if start.backward else block[0]
    for geometry in _coverings(start, batch, properties, share):
        width = geometry.slice
        if geometry.path == "dense":
            half = geometry.has_half_tiles
            tiles = (geometry.row_tiles - half) * geometry.column_tiles + half * _ceil(geometry.column_tiles, 2)
            held = geometry._replace(tiles=tiles).hold(shared)
        elif geometry.path == "block":
            some, strips = 1 - (1 - density) ** _ceil(16, rows), geometry.rows // 16  # some of a strip's columns
            deviations = NormalDist().inv_cdf(1 - 0.05 / (strips * geometry.blocks))  # a likely bound for all strips
            most = width * some + deviations * math.sqrt(width * some * (1 - some))
            held = geometry.deal([math.ceil(most)] * strips, shared)
        else:
            together = 1 if block is None else block[0] if start.backward else block[1]
            entries = _entries(geometry.rows, width, geometry.blocks, density, rows, together)
            held = geometry._replace(tiles=entries).hold(shared)
        if held and held.bytes_streamed * share <= properties.L2_cache_size * 2 / 3:
            yield held


def choose_geometry(
    cell: str,
    hidden_size: int,
    batch: int,
    dtype: torch.dtype,
    mask_nnz: int | None,
    block: tuple[int, int] | None,
    properties: Any,
    share: int = 1,
    path: str | None = None,
    *,
    backward: bool = False,
    exact: bool = True,
) -> Plan:
    """The fastest way to run a layer of `cell` ("rnn_tanh", "rnn_relu", "gru", "lstm") in one direction of time.

    Args:
        hidden_size, batch, dtype: of the layer and its input.
        mask_nnz: recurrent weights left by pruning; None if the layer is dense.
        block: the shape of pruned blocks.
        properties: what ``torch.cuda.get_device_properties`` returns.
        share: how many such layers share the device at the same time.
        path: the only kernel to consider, "dense", "block" or "sparse"; None for the fastest.
        backward: whether the gradients go back through time, or the states forward.
        exact: whether float32 products must not be rounded to tf32.
    """
    processors, shared = properties.multi_processor_count, properties.shared_memory_per_block_optin
    available = processors * (properties.regs_per_multiprocessor * 4 + shared)

    def steps(reason: str) -> Plan:
        return Plan("steps", 0, available, 0, reason)

    if dtype not in SCALARS:
        return steps(f"persistent kernels compute in float32, float16 and bfloat16, not in {dtype}")
    if properties.major < 8:
        return steps("persistent kernels need compute capability 8.0")
    weights = GATES[cell] * hidden_size**2
    density = 1.0 if mask_nnz is None else mask_nnz / weights
    paths = ["dense"]
    if mask_nnz is not None and hidden_size < 2**16 - ZERO_PLACES:
        paths += ["sparse"] if block in (None, (1, 1)) else ["block", "sparse"]
    starts = [
        Geometry(name, cell, hidden_size, dtype, 0, 0, 0, backward, exact) for name in paths if path in (None, name)
    ]
    geometry = min(
        (geometry for start in starts for geometry in candidates(start, batch, density, block, properties, share)),
        key=lambda geometry: microseconds(geometry, batch),
        default=None,
    )
    kept = f"{weights * dtype.itemsize * density / 1e6:.1f} MB of recurrent weights"
    if geometry is None:
        return steps(f"{kept} do not fit on the chip" + (" beside their gradients" if backward else ""))
    how = {
        "dense": "fit on the chip" if mask_nnz is None else "fit on the chip with their zeros, fastest on tensor cores",
        "block": "fit on the chip in strips of 16 rows",
        "sparse": "fit on the chip, each with its place",
    }
    reason = f"{kept} {how[geometry.path]}"
    if geometry.streamed:
        missing = geometry.bytes_streamed / geometry.groups / 1e6  # of each copy
        reason = f"{kept} fit on the chip but for {missing:.1f} MB, read from L2 at every step"
    return Plan(geometry.path, geometry.bytes_on_chip, available, geometry.blocks * geometry.groups, reason, geometry)
