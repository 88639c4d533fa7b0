"""Linear recurrences on CPUs: calls the loops of :mod:`~ostinato.kernels.recurrence.linear.cpu_loops`."""

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.cpu.intrinsics import NUMPY_DTYPES
from ostinato.kernels.cpu.memory import empty, empty_like
from ostinato.kernels.cpu.threads import run_loop, threads_for
from ostinato.kernels.recurrence.arguments import LayerArguments, by_kind, first_sequence
from ostinato.kernels.recurrence.linear import cpu_loops
from ostinato.kernels.recurrence.linear.steps import Steps, steps_of
from ostinato.kernels.recurrence.symbolic.graph import Graph, evaluate
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.scan import Order
from ostinato.kernels.scan.cpu import as_dtype, blocks_of, compute_dtype, constant, initial_state, rows

WIDTH = 32  # the least number of channels in a task
GROUPS = 16  # groups of sequences with separate sums of parameter gradients: results do not depend on the threads

Strides = tuple[int, int, int]  # of time, sequences and directions
Arrays = list[int]  # the addresses of arrays with equal strides, then these strides


class _Layout(NamedTuple):
    """The memory layout of sequences; see :func:`~ostinato.kernels.recurrence.linear.cpu_loops.work_type`."""

    directions: int
    batch: int
    length: int
    hidden: int
    together: int = 1  # sequences that advance through time together
    reverse: bool = False
    offsets: Tensor | None = None
    bounds: Tensor | None = None
    resets: Tensor | None = None
    resets_strides: Strides = (0, 0, 0)


@functools.lru_cache(maxsize=1024)
def _steps(recurrence: str, backward: bool) -> Steps:
    return steps_of(parse(recurrence), backward)


@functools.lru_cache(maxsize=1024)
def _loop(recurrence: str, backward: bool, dtype: torch.dtype) -> tuple[Any, type[ctypes.Structure]]:
    """The compiled loop, and the type of its argument structure."""
    make = cpu_loops.backward if backward else cpu_loops.forward
    return make(parse(recurrence), NUMPY_DTYPES[dtype]), cpu_loops.work_of(parse(recurrence), backward)


def scan(recurrence: str, h0: Tensor | None, order: Order, *arguments: Tensor) -> tuple[Tensor, Tensor]:
    """See :class:`~ostinato.kernels.recurrence.backends.LinearKernels`."""
    sequences, parameters = _sequences_and_parameters(recurrence, arguments)
    like, dtype = sequences[0], sequences[0].dtype
    layout = _layout(like, order)
    h = empty(like.shape, dtype)
    state = initial_state(h0, (layout.batch, layout.hidden), dtype)
    _run(recurrence, layout, parameters, state, _arrays(sequences, order), _arrays([h], order))
    result = first_sequence(recurrence, arguments).dtype
    return h.to(result), state.to(result)


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
    dtype = sequences[0].dtype
    layout = _layout(sequences[0], order)
    state = initial_state(grad_h_last, (layout.batch, layout.hidden), dtype)
    grads = [empty(h.shape, dtype) for _ in sequences]
    h_rows, grad_rows = rows(h, dtype), constant(0.0, h.shape, dtype) if grad_h is None else rows(grad_h, dtype)
    rest = [*_arrays([h_rows], order), *_arrays([grad_rows], order), *_arrays(grads, order)]
    initial = None if h0 is None else h0.to(dtype).contiguous()
    sums = _run_backward(recurrence, layout, parameters, state, _arrays(sequences, order), rest, initial)
    return [g.to(h.dtype) for g in grads], [x[0] for x in sums], None if h0 is None else state.to(h0.dtype)


def _sequences_and_parameters(recurrence: str, arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The sequences, in the compute dtype and with equal strides, and the parameters, (1, D)."""
    sequences, parameters = by_kind(parse(recurrence).sequences, arguments)
    dtype = compute_dtype(sequences[0])
    sequences = [rows(x, dtype) for x in sequences]
    if any(x.stride() != sequences[0].stride() for x in sequences):
        sequences = [x.contiguous() for x in sequences]
    return sequences, [x[None] for x in parameters]


def _layout(x: Tensor, order: Order) -> _Layout:
    """The layout of a tensor (B, T, D)."""
    cu_seqlens, resets, reverse = order
    batch, length, hidden = x.shape
    together = batch if x.stride(0) < x.stride(1) else 1
    bounds = None
    if cu_seqlens is not None:
        batch, together, bounds = cu_seqlens.shape[0] - 1, 1, cu_seqlens.to(torch.int64).contiguous()
    resets_strides = (0, 0, 0)
    if resets is not None:
        resets_strides = (resets.stride(1), 0 if bounds is not None else resets.stride(0), 0)
    return _Layout(1, batch, length, hidden, together, reverse, None, bounds, resets, resets_strides)


def _arrays(tensors: Sequence[Tensor], order: Order) -> Arrays:
    """The arrays of tensors (B, T, D) with equal strides."""
    x = tensors[0]
    return [*(y.data_ptr() for y in tensors), x.stride(1), 0 if order.cu_seqlens is not None else x.stride(0), 0]


def layer(call: LayerArguments) -> tuple[Tensor, Tensor]:
    """See :class:`~ostinato.kernels.recurrence.backends.LinearKernels`."""
    pre, bias, h0, _, _, recurrence, _, directions, _ = call
    dtype, gates = compute_dtype(pre), call.gates
    layout, row = _layer_layout(call)
    wide = as_dtype(pre, dtype).contiguous()
    h = empty((*pre.shape[:-1], directions * layout.hidden), dtype)
    state = initial_state(h0, (directions, layout.batch, layout.hidden), dtype)
    inputs, result = _gates(wide, gates, layout, row), _gates(h, 1, layout, row)
    _run(recurrence, layout, _gate_biases(bias, layout), state, inputs, result)
    return as_dtype(h, pre.dtype), as_dtype(state, pre.dtype)


def layer_backward(
    call: LayerArguments, h: Tensor, grad_h: Tensor | None, grad_h_last: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See :class:`~ostinato.kernels.recurrence.backends.LinearKernels`."""
    pre, bias, h0, _, _, recurrence, _, directions, _ = call
    dtype, gates = compute_dtype(pre), call.gates
    layout, row = _layer_layout(call)
    state = initial_state(grad_h_last, (directions, layout.batch, layout.hidden), dtype)
    grad_pre, wide, wide_h = empty_like(pre, dtype), as_dtype(pre, dtype).contiguous(), as_dtype(h, dtype).contiguous()
    rest = _gates(wide_h, 1, layout, row)
    if grad_h is None:
        zeros = pre.new_zeros(layout.hidden, dtype=dtype)
        rest += [zeros.data_ptr(), 0, 0, 0]
    else:
        grad_h = as_dtype(grad_h, dtype).contiguous()
        rest += _gates(grad_h, 1, layout, row)
    rest += _gates(grad_pre, gates, layout, row)
    initial = None if h0 is None else h0.to(dtype).contiguous()
    inputs = _gates(wide, gates, layout, row)
    sums = _run_backward(recurrence, layout, _gate_biases(bias, layout), state, inputs, rest, initial)
    grad_bias = None if bias is None else sums.transpose(0, 1).flatten().to(bias.dtype)
    return as_dtype(grad_pre, pre.dtype), grad_bias, None if h0 is None else as_dtype(state, h0.dtype)


class Step:
    """One step of a layer, by a GEMM and the loop, prepared for a number of sequences and channels."""

    def __init__(self, recurrence: str, batch: int, hidden: int, dtype: torch.dtype) -> None:
        layout = _Layout(1, batch, 1, hidden)
        self._loop, self._work_type = _loop(recurrence, False, dtype)
        self._threads, tasks, groups, width = _parts(recurrence, layout)
        gates = _steps(recurrence, False).sequences
        self._gates = [(f"x{k}", k * hidden * dtype.itemsize) for k in range(gates)]
        # The loop's output over time: for one step it equals the last state, which is what callers get.
        self._output = empty((batch, hidden), dtype)
        sizes = {"together": 1, "width": width, "directions": 1, "batch": batch, "length": 1, "hidden": hidden}
        rows = {"x_b": gates * hidden, "out0": self._output.data_ptr(), "out_b": hidden}
        self._work = self._work_type(tasks=tasks, groups=groups, **sizes, **rows)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None) -> Tensor:
        """The state after the step, from an input, (B, I), and the previous state, None for zeros.

        The result has the shape of the previous state, or (B, H) without one.
        """
        pre = F.linear(x, weight, bias)
        state = torch.zeros_like(self._output) if h is None else h.clone(memory_format=torch.contiguous_format)
        work, address = self._work_type.from_buffer_copy(self._work), pre.data_ptr()
        work.state = state.data_ptr()
        for gate, offset in self._gates:
            setattr(work, gate, address + offset)
        run_loop(self._loop, work, self._threads)
        return state


def _layer_layout(call: LayerArguments) -> tuple[_Layout, tuple[int, int]]:
    """The layout of a layer, and the strides of time and of sequences, in rows of pre."""
    pre, _, _, offsets, resets, _, batch_first, directions, _ = call
    hidden = pre.shape[-1] // (directions * call.gates)
    if offsets is not None:
        offsets = offsets.to(torch.int64).contiguous()
        batch, length, row = int(offsets[1] - offsets[0]), offsets.shape[0] - 1, (1, 1)
    elif batch_first:
        batch, length, row = pre.shape[0], pre.shape[1], (1, pre.shape[1])
    else:
        batch, length, row = pre.shape[1], pre.shape[0], (pre.shape[1], 1)
    resets = None if resets is None else resets.contiguous()  # each direction's mask has the rows of pre
    resets_strides = (0, 0, 0) if resets is None else (*row, resets[0].numel())
    together = 1 if batch_first and offsets is None else batch
    return _Layout(directions, batch, length, hidden, together, False, offsets, None, resets, resets_strides), row


def _gates(x: Tensor, gates: int, layout: _Layout, row: tuple[int, int]) -> Arrays:
    """The arrays of gates that are concatenated in a contiguous tensor."""
    width, size, first = x.shape[-1], layout.hidden * x.element_size(), x.data_ptr()
    return [*(first + k * size for k in range(gates)), row[0] * width, row[1] * width, gates * layout.hidden]


def _gate_biases(bias: Tensor | None, layout: _Layout) -> Sequence[Tensor]:
    """The bias of each gate, (directions, H)."""
    return () if bias is None else bias.view(layout.directions, -1, layout.hidden).unbind(1)


def _run(
    recurrence: str,
    layout: _Layout,
    parameters: Sequence[Tensor],
    state: Tensor,
    inputs: Arrays,
    rest: Arrays,
    backward: bool = False,
) -> None:
    """Run a loop; `rest` are the fields after the constants in its structure: forward, the arrays of the result."""
    loop, work_type = _loop(recurrence, backward, state.dtype)
    constants = _constants(recurrence, backward, layout, parameters, state)
    threads, tasks, groups, width = _parts(recurrence, layout)
    per_channel = [*(x.data_ptr() for x in constants), constants[0].stride(0) if constants else 0]
    work = work_type(0, tasks, groups, *_layout_fields(layout, width, state), *inputs, *per_channel, *rest)
    run_loop(loop, work, threads)


def _run_backward(
    recurrence: str,
    layout: _Layout,
    parameters: Sequence[Tensor],
    state: Tensor,
    inputs: Arrays,
    rest: Arrays,
    h0: Tensor | None,
) -> Tensor:
    """Run the backward loop; returns the gradients of the parameters, (parameters, directions, D), in float64.

    `rest` are the arrays of the states, of the states' gradients, and of the inputs' gradients.
    """
    zeros, (_, _, groups, _) = state.new_zeros(layout.hidden), _parts(recurrence, layout)
    before = [zeros.data_ptr(), 0] if h0 is None else [h0.data_ptr(), layout.hidden]
    sums = state.new_zeros(len(parameters), groups, layout.directions, layout.hidden)
    totals = torch.zeros_like(sums, dtype=torch.float64)
    rest = [*rest, *before, zeros.data_ptr(), *(x.data_ptr() for x in sums), totals.data_ptr()]
    _run(recurrence, layout, parameters, state, inputs, rest, backward=True)
    return totals.sum(1)


def _constants(
    recurrence: str, backward: bool, layout: _Layout, parameters: Sequence[Tensor], state: Tensor
) -> Sequence[Tensor]:
    """The steps' constants, computed from the parameters: (directions, D), with equal strides and D contiguous."""
    wide = [rows(x, state.dtype) for x in parameters]
    graph = _steps(recurrence, backward).constants
    if _is_nothing_but_inputs(graph):
        constants = [wide[int(graph.nodes[i].value)] for i in graph.outputs]
    else:
        constants = [as_dtype(x, state.dtype) for x in evaluate(graph, wide)]  # Boolean ones become 1 and 0
    if layout.directions > 1 and any(x.stride() != constants[0].stride() for x in constants):
        constants = [x.contiguous() for x in constants]
    return constants


@functools.lru_cache(maxsize=1024)
def _is_nothing_but_inputs(graph: Graph) -> bool:
    return all(node.name == "input" for node in graph.nodes)


def _parts(recurrence: str, layout: _Layout) -> tuple[int, int, int, int]:
    """Threads, tasks, groups of sequences, and the width of a task."""
    threads = threads_for(_steps(recurrence, False).sequences * math.prod(layout[:4]))
    groups = min(layout.batch, GROUPS)
    blocks, width = blocks_of(layout.hidden, WIDTH, threads, layout.directions * groups)
    return threads, layout.directions * groups * blocks, groups, width


def _layout_fields(layout: _Layout, width: int, state: Tensor) -> list[int]:
    """The fields of a loop's structure from ``together`` to the strides of the resets."""
    return [
        *(layout.together, width, layout.directions, layout.batch, layout.length, layout.hidden, layout.reverse),
        0 if layout.offsets is None else layout.offsets.data_ptr(),
        0 if layout.bounds is None else layout.bounds.data_ptr(),
        state.data_ptr(),
        0 if layout.resets is None else layout.resets.data_ptr(),
        *layout.resets_strides,
    ]
