"""Persistent RNN, GRU and LSTM kernels: a layer's recurrent weights stay on the chip for all its steps.

One cooperative launch runs all steps of one layer and direction.  Every block keeps the rows of its own hidden
units in registers and shared memory; the hidden state goes from block to block through memory that is its own flag,
see ``exchange.cuh``.  There are three ways to multiply, each with its Product in ``<path>.cuh`` and the
weights packed for it here:

==========  ==================================================================
``dense``   the whole matrix, on tensor cores
``block``   of each strip of 16 rows the columns that are not zero, on tensor cores
``sparse``  single weights with their places, by ordinary instructions
==========  ==================================================================
"""

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels import nvrtc
from ostinato.kernels.persistent.plan import GATES, Plan

SCALARS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
WARPS = 8
THREADS = 32 * WARPS
TILE_BYTES = 512  # of weights: 16 rows by 32 bytes of columns
ZERO_PLACES = 16
REGISTERS = 255  # that a thread can have
_PARAMETERS = struct.Struct("12Q5i")


class Geometry(NamedTuple):
    """How a persistent kernel covers the layer and the batch."""

    path: str
    cell: str
    hidden_size: int
    dtype: torch.dtype
    units: int  # of a block
    columns: int  # sequences of a group of blocks
    groups: int  # that run at once, each with its own sequences and its own copy of the weights
    tiles: int = 0  # of a warp; of the sparse kernel: entries, two weights of a thread
    held: int = 0  # of them in registers, the others are in shared memory
    shares: int = 1  # of each strip of 16 rows of the block kernel; warps take one share after another
    share_tiles: tuple[int, ...] = ()  # of a warp's first share, of its second, ...

    @property
    def rows(self) -> int:
        return GATES[self.cell] * self.units

    @property
    def pitch(self) -> int:
        """Units in a row of states: the hidden size rounded up to 16 bytes."""
        return _round_up(self.hidden_size, 16 // self.dtype.itemsize)

    @property
    def chunk_bytes(self) -> int:
        """Of a sequence's state beside that of the next sequence: what four lanes read, or all."""
        return 64 if self.path == "dense" else self.pitch * self.dtype.itemsize

    @property
    def group_bytes(self) -> int:
        """Of the state of a group's sequences."""
        return _round_up(self.pitch * self.dtype.itemsize, self.chunk_bytes) * self.columns

    @property
    def blocks(self) -> int:
        """Of a group."""
        return _ceil(self.pitch, self.units)

    @property
    def row_tiles(self) -> int:
        return _ceil(self.rows, 16)

    @property
    def column_tiles(self) -> int:
        """Of a warp of the dense kernel."""
        return _ceil(self.pitch * self.dtype.itemsize, 32 * WARPS)

    @property
    def has_half_tiles(self) -> bool:
        """Whether a block of the dense kernel has no more than 8 rows in the last tile."""
        return (self.rows - 1) % 16 < 8

    @property
    def state_bytes(self) -> int:
        """Of a unit's batch in shared memory."""
        wide = self.columns > 4 or (self.path == "block" and self.dtype.itemsize == 2)
        return (8 if wide else 4) * self.dtype.itemsize

    @property
    def parts_of_sums(self) -> int:
        """In which the block kernel leaves a row's sum: for each share one, or one for each half of the places."""
        return self.shares * (2 if self.columns <= 4 and self.dtype.itemsize == 2 else 1)

    @property
    def banks(self) -> int:
        """Units whose batches a warp can gather from shared memory at once."""
        return 128 // self.state_bytes

    @property
    def words(self) -> int:
        """Of 8 bytes, that a thread brings to shared memory of each sequence's state."""
        return _ceil(self.pitch * self.dtype.itemsize, 8 * THREADS)

    @property
    def words_in_flight(self) -> int:
        """Of each sequence: no more than registers can hold."""
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
        state = 0 if self.path == "dense" else (self.pitch + ZERO_PLACES) * self.state_bytes
        return sums + state + (self.tiles - self.held) * self.tile_bytes

    @property
    def tile_bytes(self) -> int:
        """Of all warps' tiles, or of all threads' entries."""
        return self.parts * 4 * THREADS if self.path == "sparse" else WARPS * TILE_BYTES

    @property
    def bytes_on_chip(self) -> int:
        """Of weights, and of their places."""
        block = self.tiles * self.tile_bytes
        if self.path == "block":
            block += self.tiles * WARPS * self.tile_columns * 2
        return self.groups * self.blocks * block

    def deal(self, strip_columns: Sequence[int], shared_limit: int) -> "Geometry | None":
        """The block kernel's, with so many columns in each strip, with as few accesses to shared memory as can be.

        Or None if the weights do not fit on the chip.
        """
        strip_tiles = [max(1, _ceil(n, self.tile_columns)) for n in strip_columns]

        def dealt(shares: int) -> Geometry | None:
            at_once = WARPS // shares  # strips
            first = range(0, len(strip_tiles), at_once)
            tiles = tuple(_ceil(max(strip_tiles[i : i + at_once]), shares) for i in first)
            return self._replace(tiles=sum(tiles), shares=shares, share_tiles=tiles).hold(shared_limit)

        def accesses(geometry: Geometry) -> float:
            """A warp's: two to gather a tile, four if it is not in registers, four for a sum; and reads of sums."""
            kept = geometry.tiles - geometry.held
            of_warps = WARPS * (2 * geometry.tiles + 4 * kept + 4 * len(geometry.share_tiles))
            return of_warps + geometry.parts_of_sums * geometry.rows * geometry.columns / 32

        ways = (dealt(shares) for shares in (1, 2, 4, 8))
        return min((way for way in ways if way), key=accesses, default=None)

    @property
    def last_tiles(self) -> str:
        """A bit for each of a warp's tiles in the block kernel, set if it ends a share, as 64-bit numbers."""
        bits = sum(1 << end - 1 for end in itertools.accumulate(self.share_tiles))
        return ",".join(f"{bits >> first & 2**64 - 1}ull" for first in range(0, self.tiles, 64))

    def hold(self, shared_limit: int) -> "Geometry | None":
        """As many tiles in registers as they can hold beside all else, if the others fit into shared memory."""
        wide = self.dtype == torch.float32
        if self.path == "dense":
            sequence_tiles = _ceil(self.columns, 8)
            states = 2 * self.column_tiles * sequence_tiles
            products = self.row_tiles * sequence_tiles
            sums = 4 * products * (1 if products >= 4 else 2 if products >= 2 else 4)
            rest = 20 + 4 * sequence_tiles + 32 * wide
            if states > 128:
                return None
            free = (REGISTERS - states - sums - rest) // 4
        elif self.path == "block":
            words, places = 2 * self.columns * self.words_in_flight, self.tiles * self.tile_columns // 64
            free = (REGISTERS - places - words - 68 - 16 * wide) // 4
        else:
            free = (REGISTERS - 92) // self.parts
        geometry = self._replace(held=max(0, min(self.tiles, free)))
        return geometry if geometry.shared_bytes <= shared_limit else None

    def macros(self, exact: bool) -> tuple[tuple[str, object], ...]:
        """The definitions that make the CUDA files one kernel; `exact` if float32 is not rounded to tf32."""
        return (
            ("SCALAR", SCALARS[self.dtype]),
            ("VEC", 1),
            ("CELL", self.cell.upper()),
            ("HIDDEN", self.hidden_size),
            ("UNITS", self.units),
            ("COLUMNS", self.columns),
            ("BLOCKS", self.blocks),
            ("HELD", self.held),
            ("EXACT", int(exact)),
            ("CHUNK_BYTES", self.chunk_bytes),
            *{
                "dense": (),
                "block": (
                    ("TILES", self.tiles),
                    ("SHARES", self.shares),
                    ("LAST_TILES", self.last_tiles),
                    ("STATE_COLUMNS", self.state_bytes // self.dtype.itemsize),
                ),
                "sparse": (("ENTRIES", self.tiles), ("STATE_COLUMNS", self.state_bytes // self.dtype.itemsize)),
            }[self.path],
        )


def files(path: str) -> tuple[str, ...]:
    """The CUDA files of a path's kernel, in the order in which they are compiled."""
    needs = {
        "dense": ("mma.cuh",),
        "block": ("mma.cuh", "state.cuh"),
        "sparse": ("state.cuh",),
    }
    names = ("exchange.cuh", *needs[path], f"{path}.cuh", "forward.cu")
    return ("numeric.cuh", *(f"persistent/{name}" for name in names))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil(a, b) * b


# Microseconds of a step on an H100, fitted to five hundred layers, nearly all within 20 %: a step with nothing to do;
# 100 kB of state; 100 kB of weights read from shared memory; a hundred tiles of a warp or entries of a thread; ten
# gates that a thread computes.
_COSTS = {
    "dense": (0.79, 1.1, 0.11, 1.33, 0.30),
    "block": (0.85, 1.9, 0.37, 1.45, 0.26),
    "sparse": (0.80, 4.1, 0.80, 2.10, 2.00),
}
_HALF_WORDS = 0.2  # microseconds, if blocks of the dense kernel publish their state in words of 4 bytes
_SHARE = 0.054  # microseconds, for each share of a strip that a warp of the block kernel takes
_ROUND_TRIP = 1.3  # microseconds, for each further time that the block kernel has to wait for a part of the state


def _microseconds(geometry: Geometry, batch: int) -> float:
    """A step of all sequences, estimated."""
    step, read, kept, multiplied, updated = _COSTS[geometry.path]
    state = geometry.columns * geometry.pitch * geometry.dtype.itemsize
    passes = _ceil(geometry.columns, 8) * (3 if geometry.dtype == torch.float32 and geometry.path != "sparse" else 1)
    step += read * state / 1e5
    step += kept * (geometry.tiles - geometry.held) * geometry.tile_bytes / 1e5
    step += multiplied * geometry.tiles * passes / 1e2
    step += updated * _ceil(geometry.units * geometry.columns, THREADS) * GATES[geometry.cell] / 10
    if geometry.path == "dense":
        step += _HALF_WORDS if geometry.units * geometry.dtype.itemsize % 8 else 0
    if geometry.path == "block":
        step += _SHARE * len(geometry.share_tiles)
        step += _ROUND_TRIP * (_ceil(geometry.words, geometry.words_in_flight) - 1)
    return step * _ceil(batch, geometry.columns * geometry.groups)


def _coverings(
    path: str, cell: str, hidden_size: int, dtype: torch.dtype, batch: int, processors: int
) -> Iterator[Geometry]:
    """Ways to give units and sequences to blocks that can all be resident at once."""
    word, gates = 4 // dtype.itemsize, GATES[cell]
    for columns in sorted({_ceil(batch, n) for n in range(1, batch + 1)}):
        if path != "dense" and columns > 8:
            continue
        for groups in range(1, min(_ceil(batch, columns), processors) + 1):
            least = _ceil(_round_up(hidden_size, 16 // dtype.itemsize), processors // groups)
            if path == "block":
                choices = {_round_up(least, 16)}
            elif path == "sparse":  # every row has threads of its own
                choices = {units for units in (_round_up(least, word),) if gates * units <= THREADS}
            else:  # as many units as fill half a tile, in both sizes of a word: fewer blocks
                rows = range(_round_up(gates * least, 8), _round_up(gates * least, 8) + 24, 8)
                choices = {n // gates // w * w for n in rows for w in (word, 2 * word)}
            for units in choices:
                if units >= least:
                    yield Geometry(path, cell, hidden_size, dtype, units, columns, groups)


def _candidates(
    path: str, cell: str, hidden_size: int, dtype: torch.dtype, batch: int, density: float, rows: int, properties: Any
) -> Iterator[Geometry]:
    """The geometries that fit, estimated for a matrix pruned evenly, in blocks of so many rows."""
    shared = properties.shared_memory_per_block_optin
    for geometry in _coverings(path, cell, hidden_size, dtype, batch, properties.multi_processor_count):
        if path == "dense":
            half = geometry.has_half_tiles
            tiles = (geometry.row_tiles - half) * geometry.column_tiles + half * _ceil(geometry.column_tiles, 2)
            held = geometry._replace(tiles=tiles).hold(shared)
        elif path == "block":
            some, strips = 1 - (1 - density) ** _ceil(16, rows), geometry.rows // 16  # some of a strip's columns
            deviations = NormalDist().inv_cdf(1 - 0.05 / (strips * geometry.blocks))  # no strip has more, likely
            most = hidden_size * some + deviations * math.sqrt(hidden_size * some * (1 - some))
            held = geometry.deal([math.ceil(most)] * strips, shared)
        else:
            weights = 1.15 * density * geometry.rows * hidden_size
            held = geometry._replace(tiles=int(weights / THREADS / 2) + 1).hold(shared)
        if held:
            yield held


def make_plan(
    cell: str,
    hidden_size: int,
    batch: int,
    dtype: torch.dtype,
    mask_nnz: int | None,
    block: tuple[int, int] | None,
    properties: Any,
    path: str | None = None,
) -> Plan:
    """How to run a layer of `cell` ("rnn_tanh", "rnn_relu", "gru", "lstm") on a device; needs no GPU.

    Args:
        hidden_size, batch, dtype: of the layer and its input.
        mask_nnz: recurrent weights left by pruning; None if the layer is dense.
        block: the shape of pruned blocks.
        properties: what ``torch.cuda.get_device_properties`` returns.
        path: the only kernel to consider, "dense", "block" or "sparse"; None for the fastest.
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
    paths = [name for name in paths if path in (None, name)]
    rows = block[0] if block else 1
    geometry = min(
        (g for path in paths for g in _candidates(path, cell, hidden_size, dtype, batch, density, rows, properties)),
        key=lambda geometry: _microseconds(geometry, batch),
        default=None,
    )
    kept = f"{weights * dtype.itemsize * density / 1e6:.1f} MB of recurrent weights"
    if geometry is None:
        return steps(f"{kept} do not fit on the chip")
    how = {
        "dense": "fit on the chip" if mask_nnz is None else "fit on the chip with their zeros, fastest on tensor cores",
        "block": "fit on the chip in strips of 16 rows",
        "sparse": "fit on the chip, each with its place",
    }
    reason = f"{kept} {how[geometry.path]}"
    return Plan(geometry.path, geometry.bytes_on_chip, available, geometry.blocks * geometry.groups, reason, geometry)


class PackedWeights(NamedTuple):
    """Recurrent weights as a kernel reads them, see its Product."""

    geometry: Geometry  # how many tiles there really are
    weights: Tensor
    places: Tensor | None = None
    spans: Tensor | None = None


def pack(weight: Tensor, mask: Tensor | None, geometry: Geometry, shared_limit: int) -> PackedWeights:
    """(gates * H, H) weights for the geometry's kernel.

    Raises MemoryError if the mask is so uneven that the weights do not fit after all.
    """
    matrix = weight if mask is None else torch.where(mask.bool(), weight, 0)
    rows = _rows_of_blocks(matrix, geometry)
    if geometry.path == "dense":
        return PackedWeights(geometry, _pack_dense(rows, geometry))
    kept = _rows_of_blocks(matrix != 0 if mask is None else mask.bool(), geometry)
    return (_pack_block if geometry.path == "block" else _pack_sparse)(rows, kept, geometry, shared_limit)


def _fitting(geometry: Geometry | None, path: str) -> Geometry:
    if geometry is None:
        raise MemoryError(f"the recurrent weights that this mask leaves do not fit on the chip in the {path} kernel")
    return geometry


def _rows_of_blocks(matrix: Tensor, geometry: Geometry) -> Tensor:
    """(gates * H, H) to (blocks, gates * units, pitch), with zeros beyond H."""
    hidden, pitch = geometry.hidden_size, geometry.pitch
    rows = matrix.view(-1, hidden, hidden)
    rows = F.pad(rows, (0, pitch - hidden, 0, geometry.blocks * geometry.units - hidden))
    return rows.view(-1, geometry.blocks, geometry.units, pitch).transpose(0, 1).flatten(1, 2)


def _column_order(geometry: Geometry) -> Tensor:
    """The column of each number in the dense kernel's tiles: (warps, tiles, 4 lanes, 2 registers, numbers).

    A lane reads 16 bytes of state, its words of two neighbouring tiles; a last odd tile is read by words.
    """
    number = 4 // geometry.dtype.itemsize
    word, tile, tiles = 2 * number, 8 * number, geometry.column_tiles
    t, lane, place = torch.meshgrid(*(torch.arange(n, device="cpu") for n in (tiles, 4, word)), indexing="ij")
    paired = t < tiles // 2 * 2
    column = torch.where(paired, t // 2 * 2 * tile + lane * 2 * word + t % 2 * word, t * tile + lane * word) + place
    first = torch.arange(WARPS, device="cpu").view(-1, 1, 1, 1) * tiles * tile
    return (first + column).view(WARPS, tiles, 4, 2, number)


def _pack_dense(rows: Tensor, geometry: Geometry) -> Tensor:
    """(blocks, warps, tiles, 8 lanes, 4 lanes, 4 registers, numbers of a register)."""
    order = _column_order(geometry).to(rows.device)
    rows = F.pad(rows, (0, order.numel() - rows.shape[2], 0, 16 * geometry.row_tiles - rows.shape[1]))
    packed = rows[:, :, order.flatten()].view(-1, geometry.row_tiles, 2, 8, *order.shape)
    packed = packed.permute(0, 4, 5, 1, 3, 6, 7, 2, 8)  # a tile's rows are lanes and register, and so its columns
    if geometry.has_half_tiles:
        even, odd = F.pad(packed, (0, 0) * 6 + (0, geometry.column_tiles % 2)).unflatten(2, (-1, 2)).unbind(3)
        both = torch.cat((even[:, :, :, -1:, ..., :1, :], odd[:, :, :, -1:, ..., :1, :]), -2)
        packed = torch.cat((even[:, :, :, :-1], both, odd[:, :, :, :-1]), 3)
    return packed.flatten(2, 3)[:, :, : geometry.tiles].contiguous()


def _pack_block(rows: Tensor, kept: Tensor, geometry: Geometry, shared_limit: int) -> PackedWeights:
    """Strips of 16 rows, each with the columns it needs, in shares of equal numbers of tiles, dealt to the warps."""
    blocks, width, banks, pitch = rows.shape[0], geometry.tile_columns, geometry.banks, geometry.pitch
    column = _column_of_place(geometry).to(rows.device)
    strips = rows.view(blocks, -1, 16, pitch)[..., column]
    needed = kept.view(blocks, -1, 16, pitch).any(2)[..., column]
    counts = needed.sum(2)
    geometry = _fitting(geometry.deal(counts.amax(0).tolist(), shared_limit), "block")

    # Places in the order in which their rank among those of the same bank rises: runs of different banks.
    ranks = F.pad(needed, (0, -pitch % banks)).unflatten(2, (-1, banks)).cumsum(2).flatten(2)[..., :pitch]
    bank = torch.arange(pitch, device=rows.device) % banks
    order = (ranks * banks + bank).masked_fill(~needed, pitch * banks * 2).argsort(2)
    size = geometry.shares * width * max(geometry.share_tiles)
    order = F.pad(order, (0, max(0, size - pitch)))[..., :size]
    real = torch.arange(size, device=rows.device) < counts.unsqueeze(2)
    weights = strips.gather(3, order.unsqueeze(2).expand(-1, -1, 16, -1))
    weights = torch.where(real.unsqueeze(2), weights, 0)
    places = torch.where(real, order, pitch + torch.arange(size, device=rows.device) % ZERO_PLACES)

    at_once = WARPS // geometry.shares
    missing = -strips.shape[1] % at_once
    weights, places = F.pad(weights, (0, 0) * 2 + (0, missing)), F.pad(places, (0, 0, 0, missing), value=pitch)

    def deal(turn: int, tiles: int) -> tuple[Tensor, Tensor]:
        """The warps' shares of the strips that are their turn: (blocks, WARPS, tiles, 16, width), and their places."""
        mine, columns = slice(turn * at_once, (turn + 1) * at_once), slice(0, geometry.shares * tiles * width)
        dealt = weights[:, mine, :, columns].unflatten(3, (geometry.shares, tiles, width)).permute(0, 1, 3, 4, 2, 5)
        return dealt.flatten(1, 2), places[:, mine, columns].reshape(blocks, WARPS, tiles * width)

    dealt = [deal(turn, tiles) for turn, tiles in enumerate(geometry.share_tiles)]
    packed, all_places = torch.cat([w for w, _ in dealt], 2), torch.cat([p for _, p in dealt], 2)
    all_places = F.pad(all_places, (0, -all_places.shape[2] % 64), value=pitch)  # an even number for each lane
    number = 4 // rows.itemsize
    packed = packed.reshape(blocks, WARPS, geometry.tiles, 2, 8, 2, 4, number)  # row half, row, column half, lane
    packed = packed.permute(0, 1, 2, 4, 6, 5, 3, 7).contiguous()
    return PackedWeights(geometry, packed, _narrow(all_places, 16))


def _pack_sparse(rows: Tensor, kept: Tensor, geometry: Geometry, shared_limit: int) -> PackedWeights:
    """Each row's weights dealt to as many neighbouring threads as it needs."""
    blocks, banks, pitch, device = rows.shape[0], geometry.banks, geometry.pitch, rows.device
    column = _column_of_place(geometry).to(device)
    rows, kept = rows[..., column], kept[..., column]
    counts = kept.sum(2)
    size = _weights_of_a_thread(counts)
    geometry = _fitting(geometry._replace(tiles=size // 2).hold(shared_limit), "sparse")
    threads = (counts + size - 1) // size
    starts = threads.cumsum(1) - threads

    # A row's weights in rounds over the banks, dealt in turn: its threads, side by side, meet different banks, and
    # so do those of the next row, whose rounds begin as many banks later as there are threads before it.
    block, row, place = kept.nonzero(as_tuple=True)
    line, first, share = block * kept.shape[1] + row, starts[block, row], threads[block, row]
    turn = (place - first) % banks
    index = _rank_within(line, _rank_within(line * banks + turn) * banks + turn)
    thread, position = block * THREADS + first + index % share, index // share

    slot = thread * size + position
    all_weights = rows.new_zeros(blocks * THREADS * size)
    all_weights[slot] = rows[kept]
    lane, turns = torch.arange(THREADS, device=device)[:, None], torch.arange(size, device=device)
    zero = pitch + (lane + turns - pitch) % banks
    all_places = zero.repeat(blocks, 1, 1).flatten()
    all_places[slot] = place
    if rows.itemsize == 2:
        entries = (all_weights.view(torch.int16).int() << 16 | all_places.int()).view(blocks, THREADS, -1, 2)
    else:
        two = all_places.view(-1, 2).int()
        both = all_weights.view(torch.int32).view(-1, 2)
        entries = torch.cat(((two[:, :1] | two[:, 1:] << 16), both), 1).view(blocks, THREADS, -1, 3)
    spans = torch.where(threads > 0, starts + (starts + threads - 1 << 8), 1)  # of no threads: from 1 to 0
    return PackedWeights(geometry, entries.permute(0, 2, 3, 1).contiguous(), spans=_narrow(spans, 16))


def _column_of_place(geometry: Geometry) -> Tensor:
    """The unit at each place of the state in shared memory."""
    word = 8 // geometry.dtype.itemsize
    return torch.arange(geometry.pitch, device="cpu").view(-1, word).t().flatten()


def _weights_of_a_thread(counts: Tensor) -> int:
    """The smallest even number with which no block needs more threads than it has; `counts`: (blocks, rows)."""
    low, high = 1, int(counts.max()) // 2 + 1  # in twos
    while low < high:
        middle = (low + high) // 2
        enough = int(((counts + 2 * middle - 1) // (2 * middle)).sum(1).max()) <= THREADS
        low, high = (low, middle) if enough else (middle + 1, high)
    return 2 * low


def _rank_within(group: Tensor, key: Tensor | None = None) -> Tensor:
    """The number of elements of the same group before each, in the order of their keys."""
    order = group.argsort(stable=True)
    if key is not None:
        order = key.argsort(stable=True)
        order = order[group[order].argsort(stable=True)]
    grouped = group[order]
    index = torch.arange(len(group), device=group.device)
    begins = torch.ones_like(grouped, dtype=torch.bool)
    begins[1:] = grouped[1:] != grouped[:-1]
    first = torch.where(begins, index, 0).cummax(0).values
    rank = torch.empty_like(index)
    rank[order] = index - first
    return rank


def _narrow(numbers: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of fewer bits, as the signed type of that size."""
    signed = numbers - ((numbers >> bits - 1) << bits)
    return signed.to(torch.int16 if bits == 16 else torch.int32).contiguous()


class PersistentLayer:
    """One layer and direction, its recurrent weights packed for a plan.

    Args:
        cell: "rnn_tanh", "rnn_relu", "gru" or "lstm".
        weight_hh: (gates * H, H), gates in the order of ``torch.nn``; on the GPU.
        bias_hh_n: (H,), the recurrent bias of a GRU's candidate, or None.
        mask: like ``weight_hh``, zero where a weight is pruned, or None.
        block: the shape of the pruned blocks, or None.
        plan: from :func:`make_plan`, whose path is not "steps".

    Raises:
        MemoryError: if the weights left by the mask do not fit on the chip, though their number would.
        RuntimeError: if the device cannot hold all blocks at once.
    """

    def __init__(
        self,
        cell: str,
        weight_hh: Tensor,
        bias_hh_n: Tensor | None,
        mask: Tensor | None,
        block: tuple[int, int] | None,
        plan: Plan,
    ) -> None:
        assert plan.geometry is not None
        self.device = weight_hh.device.index
        properties: Any = torch.cuda.get_device_properties(self.device)
        self._packed = pack(weight_hh.detach(), mask, plan.geometry, properties.shared_memory_per_block_optin)
        self.geometry = geometry = self._packed.geometry
        self._bias = None if bias_hh_n is None else bias_hh_n.detach().clone()
        self._failure = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._fill = 8 * properties.multi_processor_count  # blocks
        exact = geometry.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
        kernels = (files(geometry.path), geometry.macros(exact), self.device)
        self._prepare = nvrtc.load_kernel("prepare", *kernels)
        self._persistent = nvrtc.load_kernel("persistent", *kernels)
        resident = self._persistent.resident_blocks(self.device, THREADS, geometry.shared_bytes)
        resident *= properties.multi_processor_count
        blocks = geometry.blocks * geometry.groups
        if resident < blocks:
            raise RuntimeError(f"the {self._name} needs {blocks} resident blocks; the device holds {resident}")

    @property
    def _name(self) -> str:
        geometry = self.geometry
        return f"persistent {geometry.path} {geometry.cell} kernel of {geometry.hidden_size} hidden units"

    def check(self) -> None:
        """Raise RuntimeError if a launch before this gave up waiting for another block; does not synchronize."""
        if self._failure.item():
            self._failure.zero_()
            raise RuntimeError(f"the {self._name} waited in vain for another of its blocks; its output was NaN")

    def __call__(
        self, projected: Tensor, h0: Tensor | None, c0: Tensor | None, reverse: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """All steps.

        Args:
            projected: (T, B, gates * H), the input's part of every gate with all biases but ``bias_hh_n``.
            h0, c0: (B, H), or None for zeros.
            reverse: whether time runs backwards.

        Returns:
            output (T, B, H), h_n (B, H), and an LSTM's c_n (B, H), else None.

        Raises:
            RuntimeError: if an earlier launch of this layer failed.
        """
        self.check()
        geometry = self.geometry
        steps, batch, _ = projected.shape
        hidden, groups = geometry.hidden_size, _ceil(batch, geometry.columns)
        projected = projected.contiguous()
        h0 = None if h0 is None else h0.contiguous()
        c0 = None if c0 is None else c0.contiguous()
        output = projected.new_empty(steps, batch, hidden)
        h_n = projected.new_empty(batch, hidden)
        c_n = projected.new_empty(batch, hidden) if geometry.cell == "lstm" else None
        states = projected.new_empty((steps + 1) * groups * geometry.group_bytes, dtype=torch.uint8)
        tensors = (projected, h0, c0, self._bias, *self._packed[1:], states, output, h_n, c_n, self._failure)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        fill = min(_ceil(states.numel(), 32 * THREADS), self._fill)
        for first in range(0, batch, geometry.columns * geometry.groups):
            parameters = _PARAMETERS.pack(*addresses, steps, batch, groups, first, int(reverse))
            if first == 0:
                self._prepare.launch(self.device, fill, THREADS, parameters)
            blocks = geometry.blocks * min(geometry.groups, _ceil(batch - first, geometry.columns))
            self._persistent.launch(self.device, blocks, THREADS, parameters, geometry.shared_bytes, cooperative=True)
        return output, h_n, c_n
