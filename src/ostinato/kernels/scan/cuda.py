"""The CUDA backend: the scan kernel's launch.

The kernel is in ``scan.cu``, its operations in ``elements.cuh``, its launch geometry in ``geometry.py``; every
combination of operation, dtype and geometry is compiled on first use (:mod:`ostinato.kernels.nvrtc`).
"""

import functools
import itertools
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels import nvrtc
from ostinato.kernels.scan.geometry import Device, Geometry, choose_geometry, macros

SCALARS = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}

Strides = tuple[int, int, int]  # of batch, time and direction
MAX_STEPS = (1 << 31) - (1 << 20)  # the kernel counts steps, up to a tile past the last, in 32 bits


class Problem(NamedTuple):
    """Everything that a launch depends on except the addresses."""

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
    parameters: int = 0  # of each channel
    parameter_direction: int = 0  # their stride between directions
    code: str = ""  # of a generated element, if it is not one of ``elements.cuh``

    @property
    def backward(self) -> bool:
        return self.element.endswith("Backward")

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


class _Launch(NamedTuple):
    """How a problem is launched."""

    start: Callable[..., None]  # given the addresses, epoch and initial counter that ``Parameters`` begins with
    words: int  # of 8 bytes, for the messages of chained blocks; 0 if streaming
    draws: int  # by how much look-back advances its counter
    sum_rows: int  # of partial sums in the gradients of the parameters


# Allocates on the current device without PyTorch's dispatcher, as compiled code does.
empty: Callable[..., Tensor] = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]


@functools.cache
def source(code: str = "") -> str:
    """The source of the scan kernel, with a generated element's code."""
    before = nvrtc.source("numeric.cuh", "scan/elements.cuh", "scan/messages.cuh")
    parts = ("tile.cuh", "copies.cuh", "shared.cuh", "steps.cuh", "chain.cuh", "scan.cu")
    return before + code + nvrtc.source(*(f"scan/{name}" for name in parts))


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
    units = problem.channels | alignment // itemsize  # its lowest set bit is the alignment of vector accesses
    for stride in (number for tensor in strides for number in tensor):
        units |= stride
    aligned = min(units & -units, 16 // itemsize)
    gapless = problem.packing != "OFFSETS" and all(time == problem.channels for _, time, _ in strides)
    sequences = problem.batch * problem.directions
    device = describe_device(problem.device)
    packed = problem.packing == "CU_SEQLENS"
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
        packed,
        problem.resets is not None,
    )
    sums = problem.parameters if problem.backward else 0
    tensors = len(problem.inputs), sums, itemsize, packed, problem.resets is not None
    most = min(device.shared_of_block, device.shared // (geometry.resident if geometry.chained else 1) - 1024)
    while (shared := geometry.shared_bytes(*tensors)) > most:
        fewer = geometry.rows - 4 if geometry.looks_back and geometry.rows > 4 else geometry.rows // 2
        geometry = geometry._replace(rows=fewer)
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
        definitions += (("RESETS", 2 if problem.resets[1] == 1 else 1),)
    if geometry.narrow and problem.directions == 1:
        definitions += _addressing(problem, geometry, alignment)
    chunks = -(-problem.steps // geometry.tile)
    blocks = chains = sequences * -(-problem.channels // geometry.group)
    companions = geometry.companions(chains, chunks, problem.compute.itemsize, device.processors)
    words = draws = 0
    if geometry.chained:
        tiles = chains * chunks
        words = 2 * (1 + tiles * geometry.group * problem.compute.itemsize // 4)  # the last is a counter
        blocks = min(tiles, geometry.resident * device.processors) if geometry.looks_back else chains * companions
        draws = tiles + blocks if geometry.looks_back else 0
    integers = [problem.parameter_direction, *(problem.resets or (0, 0, 0)), *itertools.chain(*strides)]
    counts = problem.batch, problem.steps, problem.channels, problem.sequences, problem.directions, problem.reverse
    addresses = len(strides) + max(1, problem.parameters) + 8
    kernel = nvrtc.load_kernel("scan", source(problem.code), definitions, problem.device)
    first = struct.Struct(f"={addresses}Q2I")
    rest = struct.pack(f"={1 + len(integers)}q6i", companions, *integers, *counts)
    return _Launch(
        # Interleaved blocks wait for each other: a cooperative launch makes all of them resident.
        kernel.prepared(problem.device, blocks, 32 * geometry.warps, shared, first.pack, rest, companions > 1),
        words,
        draws,
        problem.batch * (chunks if geometry.looks_back else companions),
    )


def _addressing(problem: Problem, geometry: Geometry, alignment: int) -> tuple[tuple[str, object], ...]:
    """What the kernel knows about the addresses of a narrow sequence, most of whose instructions compute them."""
    itemsize, descending = problem.dtype.itemsize, problem.reverse != problem.backward
    offsets = [geometry.tile // geometry.warps * problem.channels]
    if descending:
        offsets.append(problem.steps * problem.channels)
    if problem.batch > 1:
        offsets += [batch for batch, _, _ in (*problem.inputs, *problem.outputs)]
    aligned = geometry.chained and alignment == 0 and all(offset * itemsize % 16 == 0 for offset in offsets)
    return ("DESCENDING", int(descending)), ("ALIGNED", int(aligned))


class _Workspace:
    """The messages of chained blocks, reused by one stream's successive launches."""

    def __init__(self, words: int, device: int) -> None:
        self.memory = torch.zeros(words, dtype=torch.int64, device=torch.device("cuda", device))
        self.counter = self.memory.new_zeros(1)
        self.epoch = self.drawn = 0
        self.drawing = False  # while a look-back launch is being made


launching = threading.Lock()  # launches must be queued on the stream in the order of their epochs
_workspaces: dict[tuple[int, int], _Workspace] = {}
_MARKS = 4  # kinds of ``Mark``


def published_of(device: int, words: int) -> tuple[int, int]:
    """The address of the current stream's workspace and the epoch of this launch.

    A captured launch is replayed with the same epoch, so it gets a workspace of its own, cleared by a captured memset.
    A workspace is discarded if a look-back launch was interrupted: its counter is then unknown.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(words, dtype=torch.int64, device=torch.device("cuda", device)).data_ptr(), _MARKS
    key = device, torch._C._cuda_getCurrentRawStream(device)
    workspace = _workspaces.get(key)
    if (
        workspace is None
        or len(workspace.memory) < words
        or workspace.drawing
        or workspace.epoch >= (1 << 32) - 2 * _MARKS
    ):
        workspace = _workspaces[key] = _Workspace(words, device)
    workspace.epoch += _MARKS
    return workspace.memory.data_ptr(), workspace.epoch


def _start_drawing(device: int, launch: _Launch, published: int, epoch: int, given: Sequence[int]) -> None:
    """Launch look-back blocks, whose counter continues from the previous launch.

    The counter is the workspace's; that of a captured launch follows the messages.
    """
    if torch.cuda.is_current_stream_capturing():
        launch.start(*given, published, published + 8 * (launch.words - 2), epoch, 0)
        return
    workspace = _workspaces[device, torch._C._cuda_getCurrentRawStream(device)]
    workspace.drawing = True
    launch.start(*given, published, workspace.counter.data_ptr(), epoch, workspace.drawn)
    workspace.drawn = (workspace.drawn + launch.draws) % (1 << 32)
    workspace.drawing = False


class Scan:
    """A problem's launches: the kernel is chosen once for each alignment of the addresses."""

    def __init__(self, problem: Problem, parameter_dtype: torch.dtype | None = None) -> None:
        self.problem = problem
        self._parameter_dtype = parameter_dtype or problem.dtype
        self._launches: dict[int, _Launch] = {}
        self._sums: tuple[int, ...] = ()  # their shape
        if problem.parameters and problem.backward:
            self._sums = problem.directions, problem.parameters, problem.channels

    def launch(
        self, like: Tensor, addresses: Sequence[int], bounds: Tensor | None = None, resets: Tensor | None = None
    ) -> Tensor | None:
        """Launch the kernel on tensors given by address, 0 for an absent one.

        In this order: inputs (zero if absent), outputs, parameters (a single 0 if there are none), the state before
        the first step in scan order, where to write that after the last, and, of a backward pass, the state before
        the first step in time.  Backward with parameters, returns their gradients, (directions, parameters, channels),
        in the dtype of computation.
        """
        alignment = functools.reduce(operator.or_, addresses) & 15
        launch = self._launches.get(alignment)
        if launch is None:
            launch = self._launches[alignment] = _prepare(self.problem, self._parameter_dtype, alignment)
        sums, others = None, (0, 0, 0)
        if self._sums:
            sums = like.new_empty((launch.sum_rows, *self._sums), dtype=self.problem.compute)
        if sums is not None or bounds is not None or resets is not None:
            others = address(sums), address(bounds), address(resets)
        if not launch.words:
            launch.start(*addresses, *others, 0, 0, 0, 0)
        else:
            with launching:
                published, epoch = published_of(self.problem.device, launch.words)
                if launch.draws:
                    _start_drawing(self.problem.device, launch, published, epoch, (*addresses, *others))
                else:
                    launch.start(*addresses, *others, published, 0, epoch, 0)
        return None if sums is None else sums.sum(0)


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def along_channels(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _along_time(x: Tensor) -> Tensor:
    """With the strides of a (B, D, T) tensor whose batch and channel dimensions can be merged."""
    if x.stride(1) == 1 and x.stride(0) == x.shape[2] * x.stride(2):
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _is_time_contiguous(x: Tensor, cu_seqlens: Tensor | None, resets: Tensor | None) -> bool:
    """Whether (B, T, D) is stored as (B, D, T), which the kernel reads in place unless packed or with resets."""
    plain = cu_seqlens is None and resets is None
    return plain and x.stride(1) == 1 and x.stride(2) != 1 and x.shape[1] > 1 and x.shape[2] > 1


def states_like(x: Tensor, cu_seqlens: Tensor | None, resets: Tensor | None) -> Tensor:
    """An empty tensor of the shape of `x`: time-contiguous if `x` is, else contiguous."""
    if _is_time_contiguous(x, cu_seqlens, resets):
        return x.new_empty(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)
    return x.new_empty(x.shape)


def last_state(b: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None, zero: float) -> Tensor:
    if cu_seqlens is None:
        return b.new_empty(b.shape[0], b.shape[2])
    # An empty sequence ends in its initial state, which the kernel does not write.
    return b.new_full((cu_seqlens.shape[0] - 1, b.shape[2]), zero) if h0 is None else h0.clone()


def prepare_scan(
    element: str,
    code: str,
    like: Tensor,
    strides: tuple[tuple[int, ...], ...],
    outputs: int,
    reverse: bool,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    parameters: Sequence[Tensor] = (),
    by_time: bool = False,
) -> Scan:
    """The scan over inputs of the shape and dtype of `like`, (B, T, D), with the given strides.

    Outputs are contiguous, as (B, D, T) if ``by_time``.  ``code`` is that of an element not in ``elements.cuh``.
    """
    return _prepare_scan(
        element,
        code,
        like.dtype,
        like.get_device(),
        like.shape,
        strides,
        outputs,
        reverse,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        None if resets is None else resets.stride(),
        len(parameters),
        parameters[0].dtype if parameters else None,
        by_time,
    )


@functools.lru_cache(maxsize=4096)
def _prepare_scan(
    element: str,
    code: str,
    dtype: torch.dtype,
    device: int,
    shape: tuple[int, int, int],
    strides: tuple[tuple[int, ...], ...],
    outputs: int,
    reverse: bool,
    sequences: int | None,
    resets: tuple[int, int] | None,
    parameters: int,
    parameter_dtype: torch.dtype | None,
    by_time: bool,
) -> Scan:
    batch, steps, channels = shape
    return Scan(
        Problem(
            element,
            dtype,
            device,
            batch * channels if by_time else batch,  # sequences of one channel each
            steps,
            1 if by_time else channels,
            tuple((channel if by_time else sequence, time, 0) for sequence, time, channel in strides),
            ((steps, 1, 0) if by_time else (steps * channels, channels, 0),) * outputs,
            reverse=reverse,
            packing="DENSE" if sequences is None else "CU_SEQLENS",
            sequences=sequences or 0,
            resets=None if resets is None else (*resets, 0),
            parameters=parameters,
            code=code,
        ),
        parameter_dtype,
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
    by_time = _is_time_contiguous(b, cu_seqlens, resets)
    lie = _along_time if by_time else along_channels
    a, b, h0 = lie(a), lie(b), None if h0 is None else h0.contiguous()
    h = torch.empty_like(b) if b.is_contiguous() else states_like(b, cu_seqlens, resets)  # new_empty costs more
    h_last = last_state(b, h0, cu_seqlens, zero)
    scan = prepare_scan(element, "", b, (a.stride(), b.stride()), 1, reverse, cu_seqlens, resets, by_time=by_time)
    addresses = a.data_ptr(), b.data_ptr(), h.data_ptr(), 0, address(h0), h_last.data_ptr(), 0
    scan.launch(h, addresses, cu_seqlens, resets)
    return h, h_last


def prepare_linear_scan(a: Tensor, b: Tensor, h0: Tensor | None, reverse: bool) -> Callable | None:
    """A fast path with ``linear_scan``'s arguments for tensors laid out like these; None if they must be copied."""
    if not b.is_contiguous() or along_channels(a) is not a or (h0 is not None and not h0.is_contiguous()):
        return None
    scan = prepare_scan("LinearScan", "", b, (a.stride(), b.stride()), 1, reverse, None, None)
    device, dtype, shape = b.get_device(), b.dtype, tuple(b.shape)
    batch, steps, channels = shape
    strides, last = (steps * channels, channels, 1), (batch, channels)

    def run(a: Tensor, b: Tensor, h0: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
        if torch._C._cuda_getDevice() != device:
            return linear_scan(a, b, h0, reverse, None)
        h, h_last = empty(shape, strides, dtype), empty(last, (channels, 1), dtype)
        initial = 0 if h0 is None else h0.data_ptr()
        scan.launch(h, (a.data_ptr(), b.data_ptr(), h.data_ptr(), 0, initial, h_last.data_ptr(), 0))
        return h, h_last

    return run


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
    by_time = _is_time_contiguous(h, cu_seqlens, resets)
    h0 = None if h0 is None else h0.contiguous()
    grad_h_last = None if grad_h_last is None else grad_h_last.contiguous()
    inputs = [(_along_time if by_time else along_channels)(x) for x in (*plain, h, h if grad_h is None else grad_h)]
    outputs = states_like(h, cu_seqlens, resets), states_like(h, cu_seqlens, resets)
    grad_h0 = None if h0 is None else last_state(h, grad_h_last, cu_seqlens, 0.0)
    strides = tuple([x.stride() for x in inputs])
    scan = prepare_scan(element, "", h, strides, 2, reverse, cu_seqlens, resets, by_time=by_time)
    addresses = [x.data_ptr() for x in (*inputs, *outputs)]
    if grad_h is None:
        addresses[len(plain) + 1] = 0
    addresses += 0, address(grad_h_last), address(grad_h0), address(h0)
    scan.launch(h, addresses, cu_seqlens, resets)
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
