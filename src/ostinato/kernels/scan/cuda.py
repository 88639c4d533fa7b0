"""The CUDA backend: the scan kernel's launch.

The kernel is in ``scan.cu``, what it scans in ``elements.cuh``, its shape in ``geometry.py``; every combination
of operation, dtype and shape is compiled on first use (:mod:`ostinato.kernels.nvrtc`).
"""

import functools
import itertools
import struct
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels import nvrtc
from ostinato.kernels.scan import is_time_contiguous, states_like
from ostinato.kernels.scan.geometry import Device, choose_geometry, macros

SCALARS = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}

Strides = tuple[int, int, int]  # of batch, time and direction
MAX_STEPS = (1 << 31) - (1 << 20)  # the kernel counts steps, with a tile's more, in 32 bits


class Problem(NamedTuple):
    """All that a launch depends on but the addresses."""

    element: str
    dtype: torch.dtype
    device: int
    batch: int
    steps: int
    channels: int
    inputs: tuple[Strides, ...]
    outputs: tuple[Strides, ...]
    directions: int = 1
    reverse: bool = False
    packing: str = "DENSE"
    sequences: int = 0  # packed in one by cu_seqlens
    resets: Strides | None = None  # of the mask
    parameters: int = 0  # that each channel has
    parameter_direction: int = 0  # from those of one direction to the other's
    code: str = ""  # the element, if it is not one of ``elements.cuh``

    @property
    def backward(self) -> bool:
        return self.element.endswith("Backward")

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class _Launch(NamedTuple):
    """How a problem is launched."""

    kernel: nvrtc.Kernel
    blocks: int
    threads: int
    shared: int
    words: int  # of 8 bytes, that chained blocks tell each other; 0 where blocks stream
    draws: int  # what the blocks draw from their counter
    sum_rows: int  # of partial sums in the gradients of the parameters
    rest: bytes  # of ``Parameters`` in scan.cu, after the addresses


@functools.cache
def source(code: str = "") -> str:
    """The CUDA file of the scan, with an element that is generated."""
    return nvrtc.source("numeric.cuh", "scan/elements.cuh") + code + nvrtc.source("scan/scan.cu")


@functools.cache
def describe_device(index: int) -> Device:
    """The GPU of this index."""
    properties: Any = torch.cuda.get_device_properties(index)
    return Device(
        properties.multi_processor_count,
        nvrtc.memory_bandwidth(index),
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
    )


@functools.lru_cache(maxsize=4096)
def _prepare(problem: Problem, parameter_dtype: torch.dtype, alignment: int) -> _Launch:
    """Choose and compile the kernel; `alignment` has the low bits of every address."""
    if problem.steps > MAX_STEPS:
        raise ValueError(f"a GPU scans sequences of at most {MAX_STEPS} steps; got {problem.steps}")
    strides = [*problem.inputs, *problem.outputs]
    itemsize = problem.dtype.itemsize
    units = problem.channels | alignment // itemsize  # the lowest set bit of all that wide accesses must respect
    for stride in (number for tensor in strides for number in tensor):
        units |= stride
    aligned = min(units & -units, 16 // itemsize)
    gapless = problem.packing != "OFFSETS" and all(time == problem.channels for _, time, _ in strides)
    sequences = problem.batch * problem.directions
    device = describe_device(problem.device)
    geometry = choose_geometry(
        problem.element,
        len(problem.inputs),
        itemsize,
        aligned,
        gapless,
        sequences,
        problem.steps,
        problem.channels,
        device,
    )
    packed = problem.packing == "CU_SEQLENS"
    tensors = (len(problem.inputs), problem.parameters if problem.backward else 0, itemsize, packed)
    most = min(device.shared_of_block, device.shared // (geometry.resident if geometry.chained else 1) - 1024)
    while (shared := geometry.shared_bytes(*tensors)) > most:
        geometry = geometry._replace(rows=geometry.rows // 2)
    far = geometry.tile * itemsize * max(time for _, time, _ in strides) >= 1 << 31
    definitions = macros(
        problem.element,
        SCALARS[problem.dtype],
        SCALARS[parameter_dtype],
        problem.packing,
        geometry,
        shared,
        far,
        geometry.copies_wide(itemsize, aligned),
    )
    if problem.resets is not None:
        definitions += (("RESETS", 1),)
    chunks = -(-problem.steps // geometry.tile)
    blocks = chains = sequences * -(-problem.channels // geometry.group)
    words = draws = 0
    if geometry.chained:
        tiles = chains * chunks
        words = 2 * (1 + tiles * geometry.group * problem.compute.itemsize // 4)
        blocks = min(tiles, geometry.resident * device.processors)
        draws = tiles + blocks
    integers = [problem.parameter_direction, *(problem.resets or (0, 0, 0)), *itertools.chain(*strides)]
    counts = problem.batch, problem.steps, problem.channels, problem.sequences, problem.directions, problem.reverse
    return _Launch(
        nvrtc.load_kernel("scan", source(problem.code), definitions, problem.device),
        blocks,
        32 * geometry.warps,
        shared,
        words,
        draws,
        problem.batch * (chunks if geometry.chained else 1),
        struct.pack(f"{len(integers)}q6i", *integers, *counts),
    )


class _Workspace:
    """Where the chained blocks of one stream's launches, one after the other, tell each other what they know."""

    def __init__(self, words: int, device: int) -> None:
        self.memory = torch.zeros(words, dtype=torch.int64, device=torch.device("cuda", device))
        self.epoch = self.drawn = 0


_launching = threading.Lock()  # a launch's number and place on its stream go together
_workspaces: dict[tuple[int, int], _Workspace] = {}
_MARKS = 4  # kinds of ``Mark``


def _published(device: int, launch: _Launch) -> tuple[int, int, int]:
    """The address of the current stream's workspace, what its counter begins at, and the epoch of this launch.

    A launch that is being captured begins anew whenever it is replayed: its own workspace is cleared before it.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(launch.words, dtype=torch.int64, device=torch.device("cuda", device)).data_ptr(), 0, _MARKS
    key = device, torch._C._cuda_getCurrentRawStream(device)
    workspace = _workspaces.get(key)
    if workspace is None or len(workspace.memory) < launch.words or workspace.epoch >= (1 << 32) - 2 * _MARKS:
        workspace = _workspaces[key] = _Workspace(launch.words, device)
    drawn = workspace.drawn
    workspace.epoch += _MARKS
    workspace.drawn = (drawn + launch.draws) % (1 << 32)
    return workspace.memory.data_ptr(), drawn, workspace.epoch


def launch(
    problem: Problem,
    like: Tensor,
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    initial: Tensor | None = None,
    final: Tensor | None = None,
    h0: Tensor | None = None,
    parameters: Sequence[int] = (),
    parameter_dtype: torch.dtype | None = None,
    bounds: Tensor | None = None,
    resets: Tensor | None = None,
) -> Tensor | None:
    """Launch the kernel on tensors at these addresses, 0 for one that is absent and counts as zero.

    Backward with parameters, returns their gradients, (directions, parameters, channels), in the dtype of computation.
    """
    states = [0 if x is None else x.data_ptr() for x in (initial, final, h0)]
    alignment = 0
    for address in (*inputs, *outputs, *states):
        alignment |= address & 15
    plan = _prepare(problem, parameter_dtype or problem.dtype, alignment)
    sums = None
    if parameters and problem.backward:
        shape = plan.sum_rows, problem.directions, len(parameters), problem.channels
        sums = like.new_empty(shape, dtype=problem.compute)
    others = [0 if x is None else x.data_ptr() for x in (sums, bounds, resets)]
    tensors = [*inputs, *outputs, *(parameters or (0,)), *states, *others]
    with _launching if plan.words else nullcontext():
        published = _published(problem.device, plan) if plan.words else (0, 0, 0)
        packed = struct.pack(f"{len(tensors) + 1}Q2I", *tensors, *published) + plan.rest
        plan.kernel.launch(problem.device, plan.blocks, plan.threads, packed, plan.shared)
    return None if sums is None else sums.sum(0)


def along_channels(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _along_time(x: Tensor) -> Tensor:
    """As (B, D, T) lies in memory, channels of neighbouring sequences as far apart as those of one."""
    if x.stride(1) == 1 and x.stride(0) == x.shape[2] * x.stride(2):
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def last_state(b: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None, zero: float) -> Tensor:
    if cu_seqlens is None:
        return b.new_empty(b.shape[0], b.shape[2])
    # An empty sequence ends in the state it begins in, and no step of the kernel writes it.
    return b.new_full((cu_seqlens.shape[0] - 1, b.shape[2]), zero) if h0 is None else h0.clone()


def scan_problem(
    element: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reverse: bool,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    by_time: bool,
) -> Problem:
    like = outputs[0]
    batch, steps, channels = like.shape

    def strides(tensors: Sequence[Tensor]) -> tuple[Strides, ...]:
        return tuple((x.stride(2) if by_time else x.stride(0), x.stride(1), 0) for x in tensors)

    return Problem(
        element,
        like.dtype,
        like.device.index,
        batch * channels if by_time else batch,  # sequences of one channel each
        steps,
        1 if by_time else channels,
        strides(inputs),
        strides(outputs),
        reverse=reverse,
        packing="DENSE" if cu_seqlens is None else "CU_SEQLENS",
        sequences=0 if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        resets=None if resets is None else (resets.stride(0), resets.stride(1), 0),
    )


def _forward_scan(
    element: str,
    a: Tensor,
    b: Tensor,
    h0: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    zero: float,
) -> tuple[Tensor, Tensor]:
    by_time = is_time_contiguous(b, cu_seqlens, resets)
    inputs = [(_along_time if by_time else along_channels)(x) for x in (a, b)]
    h0 = None if h0 is None else h0.contiguous()
    h = states_like(b, cu_seqlens, resets)
    h_last = last_state(b, h0, cu_seqlens, zero)
    problem = scan_problem(element, inputs, (h,), reverse, cu_seqlens, resets, by_time)
    addresses = [x.data_ptr() for x in inputs]
    launch(problem, h, addresses, (h.data_ptr(),), initial=h0, final=h_last, bounds=cu_seqlens, resets=resets)
    return h, h_last


def _backward_scan(
    element: str,
    plain: Sequence[Tensor],
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    by_time = is_time_contiguous(h, cu_seqlens, resets)
    h0 = None if h0 is None else h0.contiguous()
    grad_h_last = None if grad_h_last is None else grad_h_last.contiguous()
    inputs = [(_along_time if by_time else along_channels)(x) for x in (*plain, h, h if grad_h is None else grad_h)]
    outputs = states_like(h, cu_seqlens, resets), states_like(h, cu_seqlens, resets)
    grad_h0 = None if h0 is None else last_state(h, grad_h_last, cu_seqlens, 0.0)
    problem = scan_problem(element, inputs, outputs, reverse, cu_seqlens, resets, by_time)
    addresses = [x.data_ptr() for x in inputs]
    if grad_h is None:
        addresses[-1] = 0
    launch(
        problem,
        h,
        addresses,
        [x.data_ptr() for x in outputs],
        initial=grad_h_last,
        final=grad_h0,
        h0=h0,
        bounds=cu_seqlens,
        resets=resets,
    )
    return *outputs, grad_h0


def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _forward_scan("LinearScan", a, b, h0, reverse, cu_seqlens, resets, 0.0)


def linear_scan_backward(
    a: Tensor,
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    return _backward_scan("LinearScanBackward", [a], h, h0, grad_h, grad_h_last, reverse, cu_seqlens, resets)


def log_linear_scan(
    log_a: Tensor,
    log_b: Tensor,
    log_h0: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _forward_scan("LogLinearScan", log_a, log_b, log_h0, reverse, cu_seqlens, resets, float("-inf"))


def log_linear_scan_backward(
    log_a: Tensor,
    log_b: Tensor,
    log_h: Tensor,
    log_h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    plain = [log_a, log_b]
    return _backward_scan(
        "LogLinearScanBackward", plain, log_h, log_h0, grad_h, grad_h_last, reverse, cu_seqlens, resets
    )
