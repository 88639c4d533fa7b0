"""Linear recurrences on NVIDIA GPUs: the scan's kernel around an element printed from a trace."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.kernels.recurrence.print_cuda import element_name, print_cuda
from ostinato.kernels.recurrence.trace import parse
from ostinato.kernels.scan.cuda import Problem, Strides, along_channels, last_state, launch, scan_problem


def scan(
    recurrence: str,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    *arguments: Tensor,
) -> tuple[Tensor, Tensor]:
    inputs, parameters = _parted(recurrence, arguments)
    h0 = None if h0 is None else h0.contiguous()
    h = inputs[0].new_empty(inputs[0].shape)
    h_last = last_state(h, h0, cu_seqlens, 0.0)
    launch(
        _problem(recurrence, False, inputs, (h,), len(parameters), cu_seqlens, resets, reverse),
        h,
        [x.data_ptr() for x in inputs],
        [h.data_ptr()],
        initial=h0,
        final=h_last,
        parameters=[x.data_ptr() for x in parameters],
        parameter_dtype=parameters[0].dtype if parameters else None,
        bounds=cu_seqlens,
        resets=resets,
    )
    return h, h_last


def scan_backward(
    recurrence: str,
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    *arguments: Tensor,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    sequences, parameters = _parted(recurrence, arguments)
    h0 = None if h0 is None else h0.contiguous()
    grad_h_last = None if grad_h_last is None else grad_h_last.contiguous()
    inputs = [*sequences, *map(along_channels, (h, h if grad_h is None else grad_h))]
    grads = [h.new_empty(h.shape) for _ in sequences]
    grad_h0 = None if h0 is None else last_state(h, grad_h_last, cu_seqlens, 0.0)
    addresses = [x.data_ptr() for x in inputs]
    if grad_h is None:
        addresses[-1] = 0
    sums = launch(
        _problem(recurrence, True, inputs, grads, len(parameters), cu_seqlens, resets, reverse),
        h,
        addresses,
        [x.data_ptr() for x in grads],
        initial=grad_h_last,
        final=grad_h0,
        h0=h0,
        parameters=[x.data_ptr() for x in parameters],
        parameter_dtype=parameters[0].dtype if parameters else None,
        bounds=cu_seqlens,
        resets=resets,
    )
    return grads, [] if sums is None else list(sums[0]), grad_h0


def _parted(recurrence: str, arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The sequences, channels side by side, and the parameters, in one dtype."""
    kinds = parse(recurrence).sequences
    parameters = [x.contiguous() for x, sequence in zip(arguments, kinds, strict=True) if not sequence]
    if len({x.dtype for x in parameters}) > 1:
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in parameters))
        parameters = [x.to(dtype) for x in parameters]
    return [along_channels(x) for x, sequence in zip(arguments, kinds, strict=True) if sequence], parameters


def _problem(
    recurrence: str,
    backward: bool,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    parameters: int,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
) -> Problem:
    name, code = _element(recurrence, backward)
    problem = scan_problem(name, inputs, outputs, reverse, cu_seqlens, resets, by_time=False)
    return problem._replace(parameters=parameters, code=code)


@functools.lru_cache(maxsize=1024)
def _element(recurrence: str, backward: bool) -> tuple[str, str]:
    """The name and the code of a struct."""
    trace = parse(recurrence)
    return element_name(trace, backward), print_cuda(trace, backward)


@functools.lru_cache(maxsize=4096)
def _layer_problem(
    recurrence: str,
    backward: bool,
    dtype: torch.dtype,
    device: int,
    shape: tuple[int, ...],
    packed: tuple[int, int],
    batch_first: bool,
    directions: int,
    resets: Strides | None,
) -> Problem:
    """The problem of a layer whose pre-activations have this shape; `packed` is (sequences, steps), or zeros."""
    kinds = parse(recurrence).sequences
    name, code = _element(recurrence, backward)
    gates = sum(kinds)
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

    return Problem(
        name,
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
        code=code,
    )


def _gates(x: Tensor | None, gates: int, channels: int) -> list[int]:
    """The addresses of each gate's first channel."""
    return [] if x is None else [x.data_ptr() + k * channels * x.element_size() for k in range(gates)]


def layer(
    recurrence: str,
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    batch_first: bool,
    directions: int,
) -> tuple[Tensor, Tensor]:
    problem = _layer_problem(recurrence, False, *_layer_key(pre, h0, offsets, resets, batch_first, directions))
    gates, channels = len(problem.inputs), problem.channels
    h = pre.new_empty(*pre.shape[:-1], directions * channels)
    h_last = pre.new_empty(directions, problem.batch, channels)
    bias = None if bias is None else bias.contiguous()
    launch(
        problem,
        pre,
        _gates(pre, gates, channels),
        [h.data_ptr()],
        initial=None if h0 is None else h0.contiguous(),
        final=h_last,
        parameters=_gates(bias, gates, channels),
        parameter_dtype=None if bias is None else bias.dtype,
        bounds=offsets,
        resets=resets,
    )
    return h, h_last


def layer_backward(
    recurrence: str,
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    h: Tensor,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    batch_first: bool,
    directions: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    problem = _layer_problem(recurrence, True, *_layer_key(pre, h0, offsets, resets, batch_first, directions))
    gates, channels = len(problem.outputs), problem.channels
    h0 = None if h0 is None else h0.contiguous()
    bias = None if bias is None else bias.contiguous()
    grad_h = None if grad_h is None else grad_h.contiguous()
    grad_pre = torch.empty_like(pre)
    grad_h0 = None if h0 is None else torch.empty_like(h0)
    sums = launch(
        problem,
        pre,
        [*_gates(pre, gates, channels), h.data_ptr(), 0 if grad_h is None else grad_h.data_ptr()],
        _gates(grad_pre, gates, channels),
        initial=None if grad_h_last is None else grad_h_last.contiguous(),
        final=grad_h0,
        h0=h0,
        parameters=_gates(bias, gates, channels),
        parameter_dtype=None if bias is None else bias.dtype,
        bounds=offsets,
        resets=resets,
    )
    return grad_pre, None if bias is None or sums is None else sums.flatten().to(bias.dtype), grad_h0


def _layer_key(
    pre: Tensor, h0: Tensor | None, offsets: Tensor | None, resets: Tensor | None, batch_first: bool, directions: int
) -> tuple:
    packed = (0, 0) if offsets is None or h0 is None else (h0.shape[1], offsets.shape[0] - 1)
    marks = None
    if resets is not None:  # for each direction laid out as pre is, of which a packed one has no dimension of sequences
        direction, *rows = resets.stride()
        marks = (*(rows * 2 if packed[0] else rows if batch_first else rows[::-1]), direction)
    return pre.dtype, pre.device.index, tuple(pre.shape), packed, batch_first, directions, marks
