"""The CUDA backend: which shape of the scan kernel fits a problem, and its launch.

The kernel is in ``scan.cu``, what it scans in ``elements.cuh``; every combination of operation, dtype and shape is
compiled on first use (:mod:`ostinato.kernels.nvrtc`).
"""

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.kernels import nvrtc

FILES = ("numeric.cuh", "elements.cuh", "scan.cu")
SCALARS = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}
CANDIDATES = {"positive": 0, "linear": 1, "tanh": 2}
FORWARD = {"mingru": "MinGRU", "minlstm": "MinLSTM"}
GATES = {"mingru": 2, "minlstm": 3}
_PARAMETERS = struct.Struct("32q9Q6i")
_ABSENT = (0, 0, 0, 0)

Strided = tuple[int, int, int, int]  # address, then the strides of batch, time and direction


class Geometry(NamedTuple):
    """How a block covers channels and time; see ``scan.cu``."""

    vec: int
    lanes: int
    warps: int
    rows: int
    look_back: bool
    resident: int  # blocks a multiprocessor should hold at once, which bounds a thread's registers
    staged: bool  # a warp's steps are one piece of memory, turned in shared memory

    @property
    def group(self) -> int:
        return self.lanes * self.vec

    @property
    def tile(self) -> int:
        return self.warps * (32 // self.lanes) * self.rows


@functools.lru_cache(maxsize=4096)
def choose_geometry(
    element: str,
    itemsize: int,
    pairs: bool,
    gapless: bool,
    sequences: int,
    steps: int,
    channels: int,
    processors: int,
) -> Geometry:
    """The one place where the algorithm is chosen.

    Args:
        element: the operation, a struct of ``elements.cuh``.
        itemsize: bytes of a channel in memory.
        pairs: whether two neighbouring 16-bit channels are aligned to be moved together.
        gapless: whether each sequence is one piece of memory, step after step.
        sequences: independent sequences, times directions.
        steps, channels: the length of each and its width.
        processors: the GPU's multiprocessors.
    """
    vec = 2 if itemsize == 2 and pairs else 1
    # A warp reads 32 lanes of one step: a full 128-byte line.  Narrower layers put time in the rest of the warp.
    lanes = min(32, 1 << (-(-channels // vec) - 1).bit_length())
    # The state of a thread's steps lives in registers: backward holds up to five numbers a step, forward two.
    rows = 4 if element.endswith("Backward") or itemsize == 8 else 8
    segments = 32 // lanes
    warps = 8
    while warps > 1 and (warps // 2) * segments * rows >= steps:
        warps //= 2  # short sequences: no warps without a step
    blocks = sequences * -(-channels // (lanes * vec))
    tiles = -(-steps // (warps * segments * rows))
    look_back = tiles > 1 and blocks < processors
    return Geometry(vec, lanes, warps, rows, look_back, 2, gapless and vec == 1 and lanes < 32)


@functools.cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def macros(
    element: str, scalar: str, bias: str, candidate: int, packing: str, geometry: Geometry
) -> tuple[tuple[str, object], ...]:
    """The definitions that make ``scan.cu`` one kernel."""
    return (
        ("ELEMENT", element),
        ("SCALAR", scalar),
        ("BIAS", bias),
        ("CANDIDATE", candidate),
        ("PACKING", packing),
        ("VEC", geometry.vec),
        ("LANES", geometry.lanes),
        ("WARPS", geometry.warps),
        ("ROWS", geometry.rows),
        ("LOOK_BACK", int(geometry.look_back)),
        ("RESIDENT", geometry.resident),
        ("STAGED", int(geometry.staged)),
    )


def _scan(
    element: str,
    like: Tensor,
    inputs: list[Strided],
    outputs: list[Strided],
    *,
    batch: int,
    steps: int,
    channels: int,
    directions: int = 1,
    reverse: bool = False,
    initial: Tensor | None = None,
    final: Tensor | None = None,
    h0: Tensor | None = None,
    bias: Tensor | None = None,
    candidate: str = "positive",
    packing: str = "DENSE",
    bounds: Tensor | None = None,
) -> Tensor | None:
    """Launch the kernel for `element` on the device and in the dtype of `like`.

    Backward with a `bias`, returns its gradient, (directions * gates * channels,), in the dtype of computation.
    """
    device = like.device.index
    itemsize = like.element_size()
    pairs = itemsize == 2 and channels % 2 == 0
    pairs = pairs and all(x[0] % 4 == 0 and (x[1] | x[2] | x[3]) % 2 == 0 for x in (*inputs, *outputs))
    gapless = packing != "OFFSETS" and all(x[2] == channels for x in (*inputs, *outputs) if x[0])
    backward = element.endswith("Backward")
    geometry = choose_geometry(
        element, itemsize, pairs, gapless, batch * directions, steps, channels, _processors(device)
    )
    compute = torch.float64 if itemsize == 8 else torch.float32
    scalar = SCALARS[like.dtype]
    bias_scalar = scalar if bias is None else SCALARS[bias.dtype]
    definitions = macros(element, scalar, bias_scalar, CANDIDATES[candidate], packing, geometry)
    kernel = nvrtc.load_kernel("scan", FILES, definitions, device)

    chunks = -(-steps // geometry.tile)
    blocks = batch * directions * -(-channels // geometry.group)
    status = aggregate = inclusive = None
    if geometry.look_back:
        blocks *= chunks
        status = torch.zeros(1 + blocks, dtype=torch.int32, device=like.device)
        aggregate = torch.empty(blocks * 2 * geometry.group, dtype=compute, device=like.device)
        inclusive = torch.empty(blocks * geometry.group, dtype=compute, device=like.device)
    grad_bias = None
    if backward and bias is not None:
        rows = batch * chunks if geometry.look_back else batch
        grad_bias = torch.empty(rows, directions * len(outputs) * channels, dtype=compute, device=like.device)

    numbers = [n for x in inputs for n in x] + [0] * (4 * (5 - len(inputs)))
    numbers += [n for x in outputs for n in x] + [0] * (4 * (3 - len(outputs)))
    pointers = (initial, final, h0, bias, grad_bias, bounds, status, aggregate, inclusive)
    parameters = _PARAMETERS.pack(
        *numbers,
        *(0 if x is None else x.data_ptr() for x in pointers),
        *(batch, steps, channels, 0 if bounds is None else bounds.shape[0] - 1, directions, int(reverse)),
    )
    kernel.launch(device, blocks, 32 * geometry.warps, parameters)
    return None if grad_bias is None else grad_bias.sum(0)


def _strided(x: Tensor | None) -> Strided:
    """A (B, T, D) tensor as the kernel takes it."""
    return _ABSENT if x is None else (x.data_ptr(), x.stride(0), x.stride(1), 0)


def _along_channels(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def _last_state(b: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None, zero: float) -> Tensor:
    if cu_seqlens is None:
        return b.new_empty(b.shape[0], b.shape[2])
    # An empty sequence ends in the state it begins in, and no step of the kernel writes it.
    return b.new_full((cu_seqlens.shape[0] - 1, b.shape[2]), zero) if h0 is None else h0.clone()


def _forward_scan(
    element: str, a: Tensor, b: Tensor, h0: Tensor | None, reverse: bool, cu_seqlens: Tensor | None, zero: float
) -> tuple[Tensor, Tensor]:
    a, b = _along_channels(a), _along_channels(b)
    h0 = None if h0 is None else h0.contiguous()
    h = b.new_empty(b.shape)
    h_last = _last_state(b, h0, cu_seqlens, zero)
    batch, steps, channels = b.shape
    _scan(
        element,
        b,
        [_strided(a), _strided(b)],
        [_strided(h)],
        batch=batch,
        steps=steps,
        channels=channels,
        reverse=reverse,
        initial=h0,
        final=h_last,
        packing="DENSE" if cu_seqlens is None else "CU_SEQLENS",
        bounds=cu_seqlens,
    )
    return h, h_last


def _backward_scan(
    element: str,
    plain: list[Tensor],
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    h0 = None if h0 is None else h0.contiguous()
    grad_h_last = None if grad_h_last is None else grad_h_last.contiguous()
    tensors = [_along_channels(x) for x in (*plain, h)]
    grad = None if grad_h is None else _along_channels(grad_h)
    first, second = h.new_empty(h.shape), h.new_empty(h.shape)
    grad_h0 = None if h0 is None else _last_state(h, grad_h_last, cu_seqlens, 0.0)
    batch, steps, channels = h.shape
    _scan(
        element,
        h,
        [*(_strided(x) for x in tensors), _strided(grad)],
        [_strided(first), _strided(second)],
        batch=batch,
        steps=steps,
        channels=channels,
        reverse=reverse,
        initial=grad_h_last,
        final=grad_h0,
        h0=h0,
        packing="DENSE" if cu_seqlens is None else "CU_SEQLENS",
        bounds=cu_seqlens,
    )
    return first, second, grad_h0


def linear_scan(
    a: Tensor, b: Tensor, h0: Tensor | None, reverse: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _forward_scan("LinearScan", a, b, h0, reverse, cu_seqlens, 0.0)


def linear_scan_backward(
    a: Tensor,
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    return _backward_scan("LinearScanBackward", [a], h, h0, grad_h, grad_h_last, reverse, cu_seqlens)


def log_linear_scan(
    log_a: Tensor, log_b: Tensor, log_h0: Tensor | None, reverse: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _forward_scan("LogLinearScan", log_a, log_b, log_h0, reverse, cu_seqlens, float("-inf"))


def log_linear_scan_backward(
    log_a: Tensor,
    log_b: Tensor,
    log_h: Tensor,
    log_h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    plain = [log_a, log_b, log_h]
    return _backward_scan("LogLinearScanBackward", plain, log_h, log_h0, grad_h, grad_h_last, reverse, cu_seqlens)


class _Layout(NamedTuple):
    """Where the steps of a layer's tensors lie, whatever their number of channels."""

    batch: int
    steps: int
    batch_rows: int  # rows from one sequence to the next
    time_rows: int  # rows from one step to the next; with offsets, of one row
    packing: str

    @classmethod
    def of(cls, pre: Tensor, h0: Tensor | None, offsets: Tensor | None, batch_first: bool) -> "_Layout":
        if offsets is not None:
            assert h0 is not None
            return cls(h0.shape[1], offsets.shape[0] - 1, 1, 1, "OFFSETS")
        if batch_first:
            return cls(pre.shape[0], pre.shape[1], pre.shape[1], 1, "DENSE")
        return cls(pre.shape[1], pre.shape[0], 1, pre.shape[1], "DENSE")

    def gates(self, x: Tensor, gates: int, directions: int) -> list[Strided]:
        """The gates of a contiguous tensor whose channels are (direction, gate, channel)."""
        width = x.shape[-1]
        channels = width // (gates * directions)
        strides = (self.batch_rows * width, self.time_rows * width, gates * channels)
        return [(x.data_ptr() + k * channels * x.element_size(), *strides) for k in range(gates)]


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
    layout = _Layout.of(pre, h0, offsets, batch_first)
    channels = pre.shape[-1] // (GATES[cell] * directions)
    h = pre.new_empty(*pre.shape[:-1], directions * channels)
    h_last = pre.new_empty(directions, layout.batch, channels)
    _scan(
        FORWARD[cell],
        pre,
        layout.gates(pre, GATES[cell], directions),
        layout.gates(h, 1, directions),
        batch=layout.batch,
        steps=layout.steps,
        channels=channels,
        directions=directions,
        initial=None if h0 is None else h0.contiguous(),
        final=h_last,
        bias=None if bias is None else bias.contiguous(),
        candidate=candidate,
        packing=layout.packing,
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
    layout = _Layout.of(pre, h0, offsets, batch_first)
    gates = GATES[cell]
    channels = pre.shape[-1] // (gates * directions)
    h0 = None if h0 is None else h0.contiguous()
    bias = None if bias is None else bias.contiguous()
    grad_h = None if grad_h is None else grad_h.contiguous()
    grad_pre = torch.empty_like(pre)
    grad_h0 = None if h0 is None else torch.empty_like(h0)
    grad_bias = _scan(
        FORWARD[cell] + "Backward",
        pre,
        [
            *layout.gates(pre, gates, directions),
            *layout.gates(h, 1, directions),
            _ABSENT if grad_h is None else layout.gates(grad_h, 1, directions)[0],
        ],
        layout.gates(grad_pre, gates, directions),
        batch=layout.batch,
        steps=layout.steps,
        channels=channels,
        directions=directions,
        initial=None if grad_h_last is None else grad_h_last.contiguous(),
        final=grad_h0,
        h0=h0,
        bias=bias,
        candidate=candidate,
        packing=layout.packing,
        bounds=offsets,
    )
    return grad_pre, None if bias is None or grad_bias is None else grad_bias.to(bias.dtype), grad_h0
