"""Layers of linear recurrences on Hopper GPUs: GEMM, gates and scan in one kernel, ``projected.cu``.

The kernel reads x and writes h; the two or three pre-activations of each channel never leave the chip.
"""

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.cuda.nvrtc import SCALARS, Macros, address
from ostinato.kernels.recurrence.linear.cuda import element_of
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.scan.cuda.workspace import start_in_workspace

SLICE, CLUSTER, CONSUMERS, THREADS = 64, 2, 2, 384  # SLICE: input channels of a pipeline stage


class _Tile(NamedTuple):
    """The tile of the output that a thread block computes at once."""

    steps: int
    channels: int
    stages: int  # of the ring buffer through which x and the weight are loaded


TILES = {2: _Tile(256, 64, 4), 3: _Tile(128, 128, 3)}  # by the number of gates; as large as registers allow

Layout = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # sizes, strides and a box, innermost first


class _Launch(NamedTuple):
    """The launch configuration of a layer's kernel, and its arguments that depend on sizes alone."""

    kernel: nvrtc.Kernel
    blocks: int
    shared: int  # bytes of shared memory per block
    words: int  # of 8 bytes, in the workspace through which blocks communicate
    x: Layout
    weight: Layout
    strides: bytes
    counts: bytes


def covers(
    recurrence: str, x: Tensor, weight: Tensor, bias: Tensor | None, h0: Tensor | None, batch_first: bool
) -> bool:
    """Whether :func:`scan` supports a layer; the only place that decides between this kernel and a GEMM and a scan.

    Wherever it runs, it was at least as fast as a GEMM and a scan at every size that was tried, except for a MinLSTM of
    only a few tiles, where the host's time for two launches is longer than either.
    """
    dtype = x.dtype
    for other in (weight, bias, h0):
        if other is not None and other.dtype is not dtype:
            return False
    if torch.is_grad_enabled():
        for tensor in (x, weight, bias, h0):
            if tensor is not None and tensor.requires_grad:
                return False
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is not dtype:
        return False
    return (
        _fits(recurrence, dtype, x.shape, weight.shape[0], batch_first, x.get_device())
        and x.is_contiguous()
        and weight.is_contiguous()
        and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    )


@functools.lru_cache(maxsize=4096)
def _fits(
    recurrence: str, dtype: torch.dtype, shape: tuple[int, int, int], width: int, batch_first: bool, device: int
) -> bool:
    """Whether the kernel supports a layer of these sizes, dtype and device."""
    gates = gates_of(recurrence)
    if gates not in TILES:
        return False
    tile, channels = TILES[gates], width // gates
    lines = lines_of(*shape[:2], batch_first, tile.steps)
    return (
        dtype in (torch.bfloat16, torch.float16)
        and shape[2] % 8 == 0
        and channels % 8 == 0
        and 2 * channels > tile.channels  # an emptier tile costs as much as a full one
        and lines is not None
        and lines[0] * lines[1] < 1 << 30  # rows are counted in 32 bits
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


@functools.cache
def gates_of(recurrence: str) -> int:
    """The number of gates: pre-activations of a channel."""
    return sum(parse(recurrence).sequences)


def lines_of(first: int, second: int, batch_first: bool, tile: int) -> tuple[int, int] | None:
    """The number of lines that are cut into tiles of `tile` steps, and their length; None if that is less than a tile.

    A line is one sequence; or all of them, joined so that short sequences which are adjacent in memory share tiles.
    """
    batch, steps = (first, second) if batch_first else (second, first)
    apart, joined = batch * -(-steps // tile), -(-batch * steps // tile)  # the number of tiles
    # Tiles of one line wait for each other, which costs about one sixteenth of their work.
    if batch_first and steps >= tile // 8 and (steps < tile or 16 * joined < 15 * apart):
        batch, steps = 1, batch * steps
    return (batch, steps) if batch and steps >= tile else None


def scan(
    recurrence: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """h and h_last of a layer: x is (B, T, I), or (T, B, I) unless `batch_first`, weight (G * H, I), bias (G * H,).

    ``resets``, bool, has the first two dimensions of x: where True, the state is zero before that step.
    """
    dtype, device, shape, gates = x.dtype, x.get_device(), x.shape, gates_of(recurrence)
    channels = weight.shape[0] // gates
    launch = _prepare(recurrence, dtype, device, shape, batch_first, channels, resets is not None)
    h = x.new_empty(shape[0], shape[1], channels)
    h_last = x.new_empty(1, shape[0 if batch_first else 1], channels)
    biases = [0]
    if bias is not None:
        bias = bias.contiguous()
        biases = [bias.data_ptr() + 2 * k * channels for k in range(gates)]
    h0 = None if h0 is None else h0.contiguous()
    resets = None if resets is None else resets.contiguous()
    layouts = (x, launch.x), (weight, launch.weight)
    maps = b"".join(nvrtc.tensor_map(y.data_ptr(), 2, *layout, swizzled=True, promoted=256) for y, layout in layouts)
    others = map(address, (h0, h, h_last, resets))
    addresses = struct.pack(f"{len(biases) + 4}Q", *biases, *others)

    def start(messages: int, _counter: int, epoch: int, _drawn: int) -> None:
        rest = struct.pack("Q", messages) + launch.strides + struct.pack("I", epoch) + launch.counts
        packed = maps + addresses + rest
        packed += bytes(-len(packed) % 64)
        launch.kernel.launch(device, launch.blocks, THREADS, packed, launch.shared, cooperative=True)

    start_in_workspace(start, device, launch.words)
    return h, h_last


@functools.lru_cache(maxsize=4096)
def _prepare(
    recurrence: str,
    dtype: torch.dtype,
    device: int,
    shape: tuple[int, int, int],
    batch_first: bool,
    channels: int,
    resets: bool,
) -> _Launch:
    """The launch of a layer, as far as it depends on sizes and dtype."""
    gates = gates_of(recurrence)
    tile = TILES[gates]
    run, consumer_channels = tile.steps // 8, tile.channels // CONSUMERS  # steps of a run, channels of a warpgroup
    share_weight = gates * tile.channels > tile.steps
    lines = lines_of(*shape[:2], batch_first, tile.steps)
    assert lines is not None
    (count, rows), steps, depth = lines, shape[1 if batch_first else 0], shape[2]
    line, row = (rows, 1) if batch_first else (1, count)  # strides of lines and steps, in rows of x, h and resets
    across, chunks = -(-channels // tile.channels), -(-rows // tile.steps)
    along = count * chunks
    if share_weight:  # a cluster's tiles are adjacent in time; otherwise, in channels
        along += along % CLUSTER
    else:
        across += across % CLUSTER
    kernel = nvrtc.load_kernel("projected", source(recurrence), macros(recurrence, dtype, resets), device, "a")
    stage, states = (tile.steps + gates * tile.channels) * SLICE * 2, CONSUMERS * 8 * (run * consumer_channels + 8) * 2
    shared = tile.stages * (stage + 16) + states + 1024
    # Dimensions of the weight's tensor map beyond the input channels and eight output channels: the next eight, and the
    # next gate; or in the opposite order.  Each has a size, a stride and its size in a box.
    slabs, products = (channels // 8, 8 * depth, consumer_channels // 8), (gates, channels * depth, gates)
    third, fourth = (slabs, products) if gates % 2 else (products, slabs)
    return _Launch(
        kernel,
        min(kernel.resident_blocks(device, THREADS, shared, CLUSTER), across * along),
        shared,
        2 * chunks * count * channels,
        # The box of x: the first step of each of a tile's eight runs, then the steps after these.
        (
            (depth, 8, rows - 7 * run, count),
            (run * row * depth, row * depth, line * depth),
            (SLICE, 8, run if share_weight else run // CLUSTER, 1),
        ),
        ((depth, 8, third[0], fourth[0]), (depth, third[1], fourth[1]), (SLICE, 8, third[2], fourth[2])),
        struct.pack("2q", line, row),
        struct.pack("5i", count, rows, steps, channels, depth),
    )


@functools.lru_cache(maxsize=64)
def source(recurrence: str) -> str:
    """The CUDA C++ of the kernel for a recurrence."""
    shared = nvrtc.source("cuda/numeric.cuh", "cuda/barriers.cuh", "scan/cuda/elements.cuh", "scan/cuda/messages.cuh")
    code = element_of(recurrence, False).code
    files = "hopper.cuh", "projected_tile.cuh", "projected_scan.cuh", "projected.cu"
    return shared + code + nvrtc.source(*(f"recurrence/linear/{name}" for name in files))


def macros(recurrence: str, dtype: torch.dtype, resets: bool = False) -> Macros:
    """The preprocessor definitions of one kernel."""
    tile = TILES[gates_of(recurrence)]
    return (
        ("ELEMENT", element_of(recurrence, False).name),
        ("SCALAR", SCALARS[dtype]),
        ("VEC", 2),
        ("STEPS", tile.steps),
        ("STAGES", tile.stages),
        ("CLUSTER", CLUSTER),
        ("RESETS", int(resets)),
    )
