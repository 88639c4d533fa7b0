"""The CUDA C++ of a geometry's kernels: its files, preprocessor definitions and architecture-specific feature."""

import itertools

import torch

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.cuda.nvrtc import Macros
from ostinato.kernels.persistent.cuda.heuristics.cells import Cell
from ostinato.kernels.persistent.cuda.heuristics.geometry import SCALARS, WARPS, Geometry

_COMMON = "cuda/numeric.cuh", "cuda/barriers.cuh"


def code(geometry: Geometry) -> str:
    """The source of a geometry's kernels: common headers, the cell, and their own files."""
    return nvrtc.source(*_COMMON) + cell_code(geometry.cell) + nvrtc.source(*_files(geometry))


def cell_code(cell: Cell) -> str:
    """The source of a cell: its interface and its struct."""
    return nvrtc.source(*_paths("cell.cuh", *(f"cells/{name}" for name in cell.files))) + cell.code


def _files(geometry: Geometry) -> tuple[str, ...]:
    """The CUDA files of a kernel after the cell, in the order in which they are compiled."""
    if geometry.wide:
        kernel = "backward_wide.cu" if geometry.backward else "forward_wide.cu"
        return _paths("layout.cuh", "exchange.cuh", "wide.cuh", "wide_product.cuh", "wide_loops.cuh", kernel)
    needs = {
        "dense": ("mma.cuh", "weights.cuh"),
        "block": ("mma.cuh", "state.cuh", "weights.cuh"),
        "sparse": ("state.cuh",),
    }
    product: tuple[str, ...] = ("operand.cuh", "dense.cuh") if geometry.path == "dense" else (f"{geometry.path}.cuh",)
    products: tuple[str, ...] = (*product, "prepare.cuh", "forward.cu")
    if geometry.backward:
        products = ("cluster.cuh", *product, "split.cuh", "prepare.cuh", "backward.cu")
    if geometry.block_groups > 1:
        products += ("ping_pong.cuh", "backward_ping_pong.cu" if geometry.backward else "forward_ping_pong.cu")
    if geometry.scatters:
        products = ("cluster.cuh", "scatter.cuh", "prepare.cuh", "backward.cu", "scatter.cu")
    elif geometry.shares_work:
        products += ("gather.cu",)
    return _paths("layout.cuh", "exchange.cuh", "matrix.cuh", *needs[geometry.path], *products)


def _paths(*names: str) -> tuple[str, ...]:
    return tuple(f"persistent/cuda/{name}" for name in names)


def macros(
    geometry: Geometry, resets: bool = False, packed: bool = False, keeps: bool = False, rows: int = 1
) -> Macros:
    """The preprocessor definitions of a geometry's kernels.

    Args:
        geometry: the launch geometry.
        resets: whether states are reset inside sequences.
        packed: whether sequences are packed.
        keeps: whether the forward saves the gates' pre-activations.
        rows: of the launch's grid, one for each direction of a layer or head of a recurrence.
    """
    return (
        ("SCALAR", SCALARS[geometry.dtype]),
        ("VEC", 2 if geometry.wide else 1),
        ("HIDDEN", geometry.hidden_size),
        ("HEADS", geometry.heads),
        ("PITCH", geometry.pitch),
        ("UNITS", geometry.units),
        ("COLUMNS", geometry.capacity),
        ("TAKES_FEWER", int(geometry.takes_fewer)),
        ("BLOCKS", geometry.blocks),
        ("HALF_WORDS", int(geometry.units * geometry.dtype.itemsize % 8 > 0)),  # words of 4 bytes, as blocks share 8
        ("ADJACENT", geometry.adjacent),
        ("IN_REGISTERS", geometry.in_registers),
        ("ALL_IN_REGISTERS", int(geometry.in_registers == geometry.tiles)),
        ("PAUSE", _pause(geometry)),
        ("EXACT", int(geometry.dtype == torch.float32 and (geometry.exact or geometry.path == "sparse"))),
        ("CHUNK_BYTES", geometry.chunk_bytes),
        ("BACKWARD", int(geometry.backward)),
        ("CLUSTER", geometry.cluster),
        ("LOADS_EARLY", int(geometry.loads_early)),
        ("SUM_BUFFERS", geometry.sum_buffers),
        ("BLOCK_GROUPS", geometry.block_groups),
        ("REGISTERS", geometry.registers),
        ("STATE_BUFFERS", geometry.state_buffers),
        ("TAGGED", int(geometry.tagged)),
        ("DISTRIBUTED", int(geometry.distributed)),
        ("SHARES_WORK", int(geometry.shares_work)),
        ("RESETS", int(resets)),
        ("OFFSETS", int(packed)),
        ("KEEPS_GATES", int(keeps)),
        ("GRID_ROWS", rows),
        *_macros_of_product(geometry),
    )


def _macros_of_product(geometry: Geometry) -> Macros:
    """The definitions for the file with the matrix product."""
    if geometry.wide:
        return (("SHARED_BYTES", geometry.shared_bytes),)
    streamed = ("STREAMED", geometry.streamed), ("AHEAD", geometry.prefetched)
    if geometry.path == "dense":
        return *streamed, ("SHARING", WARPS // geometry.column_parts)
    state = ("STATE_COLUMNS", geometry.state_bytes // geometry.dtype.itemsize)
    if geometry.path == "sparse":
        return ("ENTRIES", geometry.tiles), *streamed, state
    shares = ("SHARES", geometry.strips.shares), ("LAST_TILES", _last_tiles(geometry))
    return ("TILES", geometry.tiles), *streamed, *shares, state


def feature(geometry: Geometry) -> str:
    """The architecture-specific feature that ``load_kernel`` compiles for: "a" if warps pass registers to others."""
    return "a" if geometry.block_groups > 1 else ""


def _pause(geometry: Geometry) -> int:
    """Cycles that a block waits before it polls for the results of other blocks.

    The more blocks there are, the more of them poll the same cache lines, and polls that come too early delay the
    writes that they wait for.
    """
    if geometry.path == "sparse":
        return 400
    if geometry.path == "block":
        return 200 if geometry.backward or geometry.blocks > 72 or geometry.columns > 2 else 100
    if geometry.distributed or geometry.capacity > 1:
        return 0
    if geometry.backward:
        return 80
    return 200 if geometry.blocks > 64 else 0 if geometry.state_buffers else 30 * geometry.dtype.itemsize


def _last_tiles(geometry: Geometry) -> str:
    """For the block kernel, a bit for each of a warp's tiles, set for the last tile of a share, as 64-bit literals."""
    bits = sum(1 << end - 1 for end in itertools.accumulate(geometry.strips.tiles))
    return ",".join(f"{bits >> first & 2**64 - 1}ull" for first in range(0, geometry.tiles, 64))
