"""Linear recurrences on NVIDIA GPUs: launches of the scan's kernel with an element generated from a trace."""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.cuda.nvrtc import SCALARS, Macros, address, empty
from ostinato.kernels.recurrence.arguments import LayerArguments, by_kind
from ostinato.kernels.recurrence.linear.element import element_name, print_element
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.scan import Order
from ostinato.kernels.scan.cuda.launch import Scan
from ostinato.kernels.scan.cuda.problem import Problem, Strides
from ostinato.kernels.scan.cuda.scans import Element, along_channels, last_state, prepare_scan

MOST_AT_ONCE, STEP_WARPS = 8, 4  # of projected_step.cu: sequences that a warp accumulates at once, warps of a block
# The most weights, by bytes of one, that a step of many sequences reads in this kernel, once for each group of
# sequences: for more, a cuBLAS product and a scan are faster.  In 16 bits, on tensor cores, these are faster from half
# as many weights on, but two launches take the host twice as long.
MOST_READ = {2: 1 << 23, 4: 1 << 24, 8: 1 << 24}


def scan(recurrence: str, h0: Tensor | None, order: Order, *arguments: Tensor) -> tuple[Tensor, Tensor]:
    """See :class:`~ostinato.kernels.recurrence.backends.LinearKernels`."""
    inputs, parameters = _sequences_and_parameters(recurrence, arguments)
    h0 = None if h0 is None else h0.contiguous()
    h = inputs[0].new_empty(inputs[0].shape)
    h_last = last_state(h, h0, order, 0.0)
    strides = tuple([x.stride() for x in inputs])
    prepared = prepare_scan(element_of(recurrence, False), h, strides, 1, order, parameters)
    addresses = [x.data_ptr() for x in (*inputs, h, *parameters)] + [0] * (not parameters)
    prepared.launch(h, [*addresses, address(h0), h_last.data_ptr(), 0], order.cu_seqlens, order.resets)
    return h, h_last


def scan_backward(
    recurrence: str,
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    order: Order,
    *arguments: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """See :class:`~ostinato.kernels.recurrence.backends.LinearKernels`."""
    sequences, parameters = _sequences_and_parameters(recurrence, arguments)
    h0 = None if h0 is None else h0.contiguous()
    grad_h_last = None if grad_h_last is None else grad_h_last.contiguous()
    inputs = [*sequences, *map(along_channels, (h, h if grad_h is None else grad_h))]
    grads = [h.new_empty(h.shape) for _ in sequences]
    grad_h0 = None if h0 is None else last_state(h, grad_h_last, order, 0.0)
    strides = tuple([x.stride() for x in inputs])
    prepared = prepare_scan(element_of(recurrence, True), h, strides, len(grads), order, parameters)
    addresses = [x.data_ptr() for x in (*inputs, *grads, *parameters)] + [0] * (not parameters)
    if grad_h is None:
        addresses[len(sequences) + 1] = 0
    addresses += map(address, (grad_h_last, grad_h0, h0))
    sums = prepared.launch(h, addresses, order.cu_seqlens, order.resets)
    return grads, [] if sums is None else list(sums[0]), grad_h0


def _sequences_and_parameters(recurrence: str, arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The sequences, with contiguous channels, and the parameters, all of one dtype."""
    sequences, parameters = by_kind(parse(recurrence).sequences, arguments)
    parameters = [x.contiguous() for x in parameters]
    if len({x.dtype for x in parameters}) > 1:
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in parameters))
        parameters = [x.to(dtype) for x in parameters]
    return [along_channels(x) for x in sequences], parameters


@functools.lru_cache(maxsize=1024)
def element_of(recurrence: str, backward: bool) -> Element:
    """A recurrence as the operation that the scan's kernel applies."""
    trace = parse(recurrence)
    gradient = None if backward else functools.partial(element_of, recurrence, True)
    return Element(element_name(trace, backward), print_element(trace, backward), gradient)


@functools.lru_cache(maxsize=4096)
def _prepare_layer(
    recurrence: str,
    backward: bool,
    dtype: torch.dtype,
    device: int,
    shape: tuple[int, ...],
    packed: tuple[int, int],
    batch_first: bool,
    directions: int,
    resets: Strides | None,
    bias_dtype: torch.dtype | None,
) -> Scan:
    """The scan of a layer, prepared for pre-activations of this shape; `packed` is (sequences, steps) or (0, 0)."""
    kinds = parse(recurrence).sequences
    element = element_of(recurrence, backward)
    gates = sum(kinds)
    channels = shape[-1] // (gates * directions)
    if packed[0]:
        (batch, steps), batch_rows, time_rows = packed, 1, 1
    elif batch_first:
        batch, steps, batch_rows, time_rows = shape[0], shape[1], shape[1], 1
    else:
        batch, steps, batch_rows, time_rows = shape[1], shape[0], 1, shape[1]

    def strides(gates: int) -> tuple[Strides, ...]:
        """The strides of each gate in a contiguous tensor whose last dimension is (direction, gate, channel)."""
        width = directions * gates * channels
        return ((batch_rows * width, time_rows * width, gates * channels),) * gates

    problem = Problem(
        element.name,
        dtype,
        device,
        batch,
        steps,
        channels,
        strides(gates) + (strides(1) * 2 if backward else ()),
        strides(gates if backward else 1),
        directions,
        packing="OFFSETS" if packed[0] else "DENSE",
        resets=resets,
        parameters=kinds.count(False),
        parameter_direction=gates * channels,
        code=element.code,
    )
    if backward:
        return Scan(problem, bias_dtype)
    layer = dtype, device, shape, packed, batch_first, directions, resets, bias_dtype
    return Scan(problem, bias_dtype, functools.partial(_prepare_layer, recurrence, True, *layer))


def _gates(x: Tensor | None, gates: int, channels: int) -> Sequence[int]:
    """The address of each gate's first channel; a single 0 without a tensor."""
    if x is None:
        return (0,)
    first, size = x.data_ptr(), channels * x.itemsize
    return range(first, first + gates * size, size)


def layer(call: LayerArguments) -> tuple[Tensor, Tensor]:
    """See :class:`~ostinato.kernels.recurrence.backends.LinearKernels`."""
    pre, bias, h0, offsets, resets, recurrence, _, directions, _ = call
    pre = pre.contiguous()
    scan = _prepare_layer(recurrence, False, *_layer_key(call))
    gates, channels = len(scan.problem.inputs), scan.problem.channels
    h = pre.new_empty(*pre.shape[:-1], directions * channels)
    h_last = pre.new_empty(directions, scan.problem.batch, channels)
    h0 = None if h0 is None else h0.contiguous()
    bias = None if bias is None else bias.contiguous()
    addresses = *_gates(pre, gates, channels), h.data_ptr(), *_gates(bias, gates, channels)
    scan.launch(pre, (*addresses, address(h0), h_last.data_ptr(), 0), offsets, resets)
    return h, h_last


def layer_backward(
    call: LayerArguments, h: Tensor, grad_h: Tensor | None, grad_h_last: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See :class:`~ostinato.kernels.recurrence.backends.LinearKernels`."""
    pre, bias, h0, offsets, resets, recurrence, *_ = call
    pre = pre.contiguous()
    scan = _prepare_layer(recurrence, True, *_layer_key(call))
    gates, channels = len(scan.problem.outputs), scan.problem.channels
    h0 = None if h0 is None else h0.contiguous()
    bias = None if bias is None else bias.contiguous()
    grad_h = None if grad_h is None else grad_h.contiguous()
    grad_h_last = None if grad_h_last is None else grad_h_last.contiguous()
    grad_pre = torch.empty_like(pre)
    grad_h0 = None if h0 is None else torch.empty_like(h0)
    inputs = *_gates(pre, gates, channels), h.data_ptr(), address(grad_h)
    addresses = *inputs, *_gates(grad_pre, gates, channels), *_gates(bias, gates, channels)
    sums = scan.launch(pre, (*addresses, address(grad_h_last), address(grad_h0), address(h0)), offsets, resets)
    return grad_pre, None if bias is None or sums is None else sums.flatten().to(bias.dtype), grad_h0


def _layer_key(call: LayerArguments) -> tuple:
    """The arguments of :func:`_prepare_layer` after `backward`."""
    pre, bias, h0, offsets, resets, _, batch_first, directions, _ = call
    packed = (0, 0) if offsets is None or h0 is None else (h0.shape[1], offsets.shape[0] - 1)
    strides = None
    if resets is not None:  # (directions, rows) if packed, when both strides of rows are the same
        direction, *rows = resets.stride()
        strides = (*(rows * 2 if packed[0] else rows if batch_first else rows[::-1]), direction)
    bias_dtype = None if bias is None else bias.dtype
    return pre.dtype, pre.get_device(), pre.shape, packed, batch_first, directions, strides, bias_dtype


class Step:
    """One step of a layer, prepared for its sizes: one kernel, or GEMM and scan for many sequences of large layers."""

    def __init__(self, recurrence: str, batch: int, inputs: int, hidden: int, dtype: torch.dtype, device: int) -> None:
        self._recurrence, self._sizes, self._dtype, self._device = recurrence, (batch, inputs, hidden), dtype, device
        self._shape, self._strides = (batch, hidden), (hidden, 1)
        gates = sum(parse(recurrence).sequences)
        self._launches: dict[int, Callable[..., None]] = {}  # by the low bits of the addresses
        self._scan: Scan | None = None
        self._groups = -(-batch // MOST_AT_ONCE)
        few = 4 if dtype.itemsize == 2 else MOST_AT_ONCE  # sequences, for which a GEMM and a scan are never faster
        if batch > few and self._groups * gates * hidden * inputs > MOST_READ[dtype.itemsize]:
            layer = (1, batch, gates * hidden), (0, 0), False, 1, None, None
            self._scan = _prepare_layer(recurrence, False, dtype, device, *layer)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None) -> Tensor:
        """The state after the step, from an input, (B, I), contiguous weights, and the previous state, None for zeros.

        The result has the shape of the previous state, or (B, H) without one.
        """
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self(x, weight, bias, h)
        if h is None:
            initial, state = 0, empty(self._shape, self._strides, self._dtype)
        else:
            h = h if h.is_contiguous() else h.contiguous()
            initial, state = h.data_ptr(), empty(tuple(h.shape), h.stride(), self._dtype)
        if self._scan is not None:
            pre = F.linear(x, weight, bias)
            gates = _gates(pre, len(self._scan.problem.inputs), self._sizes[-1])
            self._scan.launch(pre, (*gates, state.data_ptr(), 0, initial, 0, 0))
            return state
        x = x if x.is_contiguous() else x.contiguous()
        x_address, weight_address = x.data_ptr(), weight.data_ptr()
        low_bits = (x_address | weight_address) & 7
        launch = self._launches.get(low_bits)
        if launch is None:
            launch = self._launches[low_bits] = self._prepare(low_bits)
        launch(x_address, weight_address, 0 if bias is None else bias.data_ptr(), initial, state.data_ptr())
        return state

    def _prepare(self, low_bits: int) -> Callable[..., None]:
        """A function that launches the kernel for addresses with these low bits."""
        batch, inputs, hidden = self._sizes
        macros = step_macros(self._recurrence, self._dtype, batch, inputs, low_bits)
        kernel = nvrtc.load_kernel("projected_step", step_source(self._recurrence), macros, self._device)
        vector: Any = dict(macros)["VEC"]
        rest = struct.pack("=4i", inputs // vector, hidden, batch, self._groups)
        blocks, pack = -(-hidden * self._groups // STEP_WARPS), struct.Struct("=5Q").pack
        return kernel.prepared(self._device, blocks, 32 * STEP_WARPS, 0, pack, rest)


@functools.cache
def step_source(recurrence: str) -> str:
    """The CUDA C++ of ``projected_step.cu`` for a recurrence, with everything that it includes."""
    headers = nvrtc.source("cuda/numeric.cuh", "cuda/gemv.cuh", "scan/cuda/elements.cuh")
    return headers + element_of(recurrence, False).code + nvrtc.source("recurrence/linear/projected_step.cu")


def step_macros(recurrence: str, dtype: torch.dtype, batch: int, inputs: int, low_bits: int = 0) -> Macros:
    """The preprocessor definitions of ``projected_step.cu``.

    `low_bits` are those of the addresses of inputs and weights, whose alignment limits the width of vector loads.
    """
    units = 8 // dtype.itemsize | inputs | low_bits // dtype.itemsize
    element = element_of(recurrence, False).name
    macros = {"ELEMENT": element, "SCALAR": SCALARS[dtype], "VEC": units & -units, "WARPS": STEP_WARPS}
    return (*macros.items(), ("BATCH", min(batch, MOST_AT_ONCE)))
