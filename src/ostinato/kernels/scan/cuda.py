"""The CUDA backend: the scan kernel's launch.

The kernel is in ``scan.cu``, what it scans in ``elements.cuh``, its shape in ``geometry.py``; every combination
of operation, dtype and shape is compiled on first use (:mod:`ostinato.kernels.nvrtc`).
"""

import functools
import struct
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels import nvrtc
from ostinato.kernels.scan import GATES, is_time_contiguous, states_like
from ostinato.kernels.scan.geometry import Device, choose_geometry, macros

FILES = ("numeric.cuh", "scan/elements.cuh", "scan/scan.cu")
SCALARS = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}
CANDIDATES = {"positive": 0, "linear": 1, "tanh": 2}
FORWARD = {"mingru": "MinGRU", "minlstm": "MinLSTM"}

Strides = tuple[int, int, int]  # of batch, time and direction
_NO_STRIDES = (0, 0, 0)
MAX_STEPS = (1 << 31) - (1 << 20)  # the kernel counts steps, with a tile's more, in 32 bits
# ``Parameters`` in scan.cu, in two halves.
_ADDRESSES = struct.Struct("16Q2I")
_REST = struct.Struct("26q6i")


class _Problem(NamedTuple):
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
    candidate: str = "positive"
    packing: str = "DENSE"
    sequences: int = 0  # packed in one by cu_seqlens
    resets: tuple[int, int] | None = None  # the mask's strides, of batch and time

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
    bias_rows: int  # of partial sums in the gradient of the bias
    parameters: bytes  # those after the addresses


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
def _prepare(problem: _Problem, bias_dtype: torch.dtype, alignment: int) -> _Launch:
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
    tensors = (len(problem.inputs), len(problem.outputs), itemsize, problem.backward, packed)
    most = min(device.shared_of_block, device.shared // (geometry.resident if geometry.chained else 1) - 1024)
    while (shared := geometry.shared_bytes(*tensors)) > most:
        geometry = geometry._replace(rows=geometry.rows // 2)
    far = geometry.tile * itemsize * max(time for _, time, _ in strides) >= 1 << 31
    definitions = macros(
        problem.element,
        SCALARS[problem.dtype],
        SCALARS[bias_dtype],
        CANDIDATES[problem.candidate],
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
    padded = [*problem.inputs, *[_NO_STRIDES] * (5 - len(problem.inputs)), *problem.outputs]
    padded += [_NO_STRIDES] * (8 - len(padded))
    return _Launch(
        nvrtc.load_kernel("scan", FILES, definitions, problem.device),
        blocks,
        32 * geometry.warps,
        shared,
        words,
        draws,
        problem.batch * (chunks if geometry.chained else 1),
        _REST.pack(
            *(problem.resets or (0, 0)),
            *(number for tensor in padded for number in tensor),
            *(problem.batch, problem.steps, problem.channels, problem.sequences, problem.directions),
            int(problem.reverse),
        ),
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


def _scan(
    problem: _Problem,
    like: Tensor,
    inputs: Sequence[int],
    outputs: Sequence[int],
    *,
    initial: Tensor | None = None,
    final: Tensor | None = None,
    h0: Tensor | None = None,
    bias: Tensor | None = None,
    bounds: Tensor | None = None,
    resets: Tensor | None = None,
) -> Tensor | None:
    """Launch the kernel on tensors at these addresses, 0 for one that is absent and counts as zero.

    Backward with a `bias`, returns its gradient, (directions * gates * channels,), in the dtype of computation.
    """
    states = [0 if x is None else x.data_ptr() for x in (initial, final, h0)]
    alignment = 0
    for address in (*inputs, *outputs, *states):
        alignment |= address & 15
    launch = _prepare(problem, problem.dtype if bias is None else bias.dtype, alignment)
    grad_bias = None
    if bias is not None and problem.backward:
        columns = problem.directions * len(outputs) * problem.channels
        grad_bias = like.new_empty(launch.bias_rows, columns, dtype=problem.compute)
    tensors = (
        *inputs,
        *(0,) * (5 - len(inputs)),
        *outputs,
        *(0,) * (3 - len(outputs)),
        *states,
        *(0 if x is None else x.data_ptr() for x in (bias, grad_bias, bounds, resets)),
    )
    with _launching if launch.words else nullcontext():
        published = _published(problem.device, launch) if launch.words else (0, 0, 0)
        parameters = _ADDRESSES.pack(*tensors, *published) + launch.parameters
        launch.kernel.launch(problem.device, launch.blocks, launch.threads, parameters, launch.shared)
    return None if grad_bias is None else grad_bias.sum(0)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _along_channels(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _along_time(x: Tensor) -> Tensor:
    """As (B, D, T) lies in memory, channels of neighbouring sequences as far apart as those of one."""
    if x.stride(1) == 1 and x.stride(0) == x.shape[2] * x.stride(2):
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _last_state(b: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None, zero: float) -> Tensor:
    if cu_seqlens is None:
        return b.new_empty(b.shape[0], b.shape[2])
    # An empty sequence ends in the state it begins in, and no step of the kernel writes it.
    return b.new_full((cu_seqlens.shape[0] - 1, b.shape[2]), zero) if h0 is None else h0.clone()


def _scan_problem(
    element: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    reverse: bool,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    by_time: bool,
) -> _Problem:
    like = outputs[0]
    batch, steps, channels = like.shape

    def strides(tensors: Sequence[Tensor]) -> tuple[Strides, ...]:
        return tuple((x.stride(2) if by_time else x.stride(0), x.stride(1), 0) for x in tensors)

    return _Problem(
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
        resets=None if resets is None else resets.stride(),  # type: ignore[arg-type]  # of a matrix: two
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
    inputs = [(_along_time if by_time else _along_channels)(x) for x in (a, b)]
    h0 = None if h0 is None else h0.contiguous()
    h = states_like(b, cu_seqlens, resets)
    h_last = _last_state(b, h0, cu_seqlens, zero)
    problem = _scan_problem(element, inputs, (h,), reverse, cu_seqlens, resets, by_time)
    addresses = [x.data_ptr() for x in inputs]
    _scan(problem, h, addresses, (h.data_ptr(),), initial=h0, final=h_last, bounds=cu_seqlens, resets=resets)
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
    inputs = [(_along_time if by_time else _along_channels)(x) for x in (*plain, h, h if grad_h is None else grad_h)]
    outputs = states_like(h, cu_seqlens, resets), states_like(h, cu_seqlens, resets)
    grad_h0 = None if h0 is None else _last_state(h, grad_h_last, cu_seqlens, 0.0)
    problem = _scan_problem(element, inputs, outputs, reverse, cu_seqlens, resets, by_time)
    addresses = [x.data_ptr() for x in inputs]
    if grad_h is None:
        addresses[-1] = 0
    _scan(
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


@functools.lru_cache(maxsize=4096)
def _layer_problem(
    element: str,
    cell: str,
    dtype: torch.dtype,
    device: int,
    shape: tuple[int, ...],
    packed: tuple[int, int],
    batch_first: bool,
    directions: int,
    candidate: str,
) -> _Problem:
    """The problem of a layer whose pre-activations have this shape; `packed` is (sequences, steps), or zeros."""
    gates = GATES[cell]
    channels = shape[-1] // (gates * directions)
    if packed[0]:
        (batch, steps), batch_rows, time_rows = packed, 1, 1
    elif batch_first:
        batch, steps, batch_rows, time_rows = shape[0], shape[1], shape[1], 1
    else:
        batch, steps, batch_rows, time_rows = shape[1], shape[0], 1, shape[1]

    def strides(gates: int) -> tuple[Strides, ...]:
        """Of the gates of a contiguous tensor whose channels are (direction, gate, channel)."""
        width = directions * gates * channels
        return ((batch_rows * width, time_rows * width, gates * channels),) * gates

    backward = element.endswith("Backward")
    inputs = strides(gates) + (strides(1) * 2 if backward else ())
    outputs = strides(gates if backward else 1)
    packing = "OFFSETS" if packed[0] else "DENSE"
    return _Problem(
        element, dtype, device, batch, steps, channels, inputs, outputs, directions, False, candidate, packing
    )


def _gates(x: Tensor, gates: int, channels: int) -> list[int]:
    """The addresses of each gate's first channel."""
    first = x.data_ptr()
    return [first + k * channels * x.element_size() for k in range(gates)]


def minimal(
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    offsets: Tensor | None,
    cell: str,
    candidate: str,
    batch_first: bool,
    directions: int,
) -> tuple[Tensor, Tensor]:
    packed = (0, 0) if offsets is None or h0 is None else (h0.shape[1], offsets.shape[0] - 1)
    settings = (cell, pre.dtype, pre.device.index, tuple(pre.shape), packed, batch_first, directions, candidate)
    problem = _layer_problem(FORWARD[cell], *settings)
    h = pre.new_empty(*pre.shape[:-1], directions * problem.channels)
    h_last = pre.new_empty(directions, problem.batch, problem.channels)
    _scan(
        problem,
        pre,
        _gates(pre, GATES[cell], problem.channels),
        (h.data_ptr(),),
        initial=None if h0 is None else h0.contiguous(),
        final=h_last,
        bias=None if bias is None else bias.contiguous(),
        bounds=offsets,
    )
    return h, h_last


def minimal_backward(
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    h: Tensor,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    offsets: Tensor | None,
    cell: str,
    candidate: str,
    batch_first: bool,
    directions: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    packed = (0, 0) if offsets is None or h0 is None else (h0.shape[1], offsets.shape[0] - 1)
    settings = (cell, pre.dtype, pre.device.index, tuple(pre.shape), packed, batch_first, directions, candidate)
    problem = _layer_problem(FORWARD[cell] + "Backward", *settings)
    h0 = None if h0 is None else h0.contiguous()
    bias = None if bias is None else bias.contiguous()
    grad_h = None if grad_h is None else grad_h.contiguous()
    grad_pre = torch.empty_like(pre)
    grad_h0 = None if h0 is None else torch.empty_like(h0)
    gates, channels = GATES[cell], problem.channels
    grad_bias = _scan(
        problem,
        pre,
        [*_gates(pre, gates, channels), h.data_ptr(), _address(grad_h)],
        _gates(grad_pre, gates, channels),
        initial=None if grad_h_last is None else grad_h_last.contiguous(),
        final=grad_h0,
        h0=h0,
        bias=bias,
        bounds=offsets,
    )
    return grad_pre, None if bias is None or grad_bias is None else grad_bias.to(bias.dtype), grad_h0
