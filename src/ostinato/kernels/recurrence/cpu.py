"""Linear recurrences on CPUs: tensors in and out around the loops of :mod:`~ostinato.kernels.recurrence.cpu_loops`."""

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.numba_loops import NUMPY_DTYPES
from ostinato.kernels.recurrence import cpu_loops
from ostinato.kernels.recurrence.graph import evaluate
from ostinato.kernels.recurrence.linear import Steps, steps_of
from ostinato.kernels.recurrence.trace import parse
from ostinato.kernels.scan.cpu import blocks_of, compute_dtype, constant, empty, initial_state, rows
from ostinato.kernels.threads import run_loop, threads_for

WIDTH = 32  # channels a piece has at least
GROUPS = 16  # of sequences, each of which sums its gradients of the parameters alone, whatever the threads

Array = tuple[int, int, int, int]  # an address, and the strides of time, sequences and directions


class _Layout(NamedTuple):
    """Where the steps of sequences are; see :func:`~ostinato.kernels.recurrence.cpu_loops.work_type`."""

    directions: int
    batch: int
    length: int
    hidden: int
    together: int = 1  # sequences that are taken through time side by side
    reverse: bool = False
    offsets: Tensor | None = None
    bounds: Tensor | None = None
    resets: Tensor | None = None
    resets_strides: tuple[int, int, int] = (0, 0, 0)  # of time, sequences and directions


@functools.lru_cache(maxsize=1024)
def _steps(recurrence: str, backward: bool) -> Steps:
    return steps_of(parse(recurrence), backward)


@functools.lru_cache(maxsize=1024)
def _loop(recurrence: str, backward: bool, dtype: torch.dtype) -> tuple[Any, type[ctypes.Structure]]:
    """The compiled loop, and the structure that it is called with."""
    make = cpu_loops.backward if backward else cpu_loops.forward
    return make(parse(recurrence), NUMPY_DTYPES[dtype]), cpu_loops.work_of(parse(recurrence), backward)


def scan(
    recurrence: str,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    *arguments: Tensor,
) -> tuple[Tensor, Tensor]:
    sequences, parameters = _parted(recurrence, arguments)
    like, dtype = sequences[0], sequences[0].dtype
    layout = _layout(like, cu_seqlens, resets, reverse)
    h = empty(like.shape, dtype)
    state = initial_state(None if h0 is None else h0[None], (1, layout.batch, layout.hidden), dtype)
    arrays = {f"x{k}": _array(x, cu_seqlens) for k, x in enumerate(sequences)}
    _run(recurrence, False, layout, parameters, state, arrays | {"out": _array(h, cu_seqlens)})
    result = arguments[parse(recurrence).sequences.index(True)].dtype
    return h.to(result), state[0].to(result)


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
    dtype = sequences[0].dtype
    layout = _layout(sequences[0], cu_seqlens, resets, reverse)
    state = initial_state(None if grad_h_last is None else grad_h_last[None], (1, layout.batch, layout.hidden), dtype)
    grads = [empty(h.shape, dtype) for _ in sequences]
    given = rows(h, dtype), constant(0.0, h.shape, dtype) if grad_h is None else rows(grad_h, dtype)
    arrays = {f"x{k}": _array(x, cu_seqlens) for k, x in enumerate(sequences)}
    arrays |= {f"grad{k}": _array(x, cu_seqlens) for k, x in enumerate(grads)}
    arrays |= {name: _array(x, cu_seqlens) for name, x in zip(("h", "grad_h"), given, strict=True)}
    initial = None if h0 is None else h0.to(dtype).contiguous()
    sums = _run(recurrence, True, layout, parameters, state, arrays, initial)
    of_parameters = [x[0] for x in sums]
    return [g.to(h.dtype) for g in grads], of_parameters, None if h0 is None else state[0].to(h0.dtype)


def _parted(recurrence: str, arguments: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The sequences, in the dtype of computation, and the parameters, (1, D)."""
    kinds = parse(recurrence).sequences
    dtype = compute_dtype(arguments[kinds.index(True)])
    sequences = [rows(x, dtype) for x, sequence in zip(arguments, kinds, strict=True) if sequence]
    return sequences, [x[None] for x, sequence in zip(arguments, kinds, strict=True) if not sequence]


def _layout(x: Tensor, cu_seqlens: Tensor | None, resets: Tensor | None, reverse: bool) -> _Layout:
    batch, length, hidden = x.shape
    together = batch if x.stride(0) < x.stride(1) else 1
    bounds = None
    if cu_seqlens is not None:
        batch, together, bounds = cu_seqlens.shape[0] - 1, 1, cu_seqlens.to(torch.int64).contiguous()
    marks = (0, 0, 0) if resets is None else (resets.stride(1), 0 if bounds is not None else resets.stride(0), 0)
    return _Layout(1, batch, length, hidden, together, reverse, None, bounds, resets, marks)


def _array(x: Tensor, cu_seqlens: Tensor | None) -> Array:
    return x.data_ptr(), x.stride(1), 0 if cu_seqlens is not None else x.stride(0), 0


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
    dtype = compute_dtype(pre)
    layout, row = _layer_layout(recurrence, pre, offsets, resets, batch_first, directions)
    wide = pre.to(dtype).contiguous()
    h = empty((*pre.shape[:-1], directions * layout.hidden), dtype)
    state = initial_state(h0, (directions, layout.batch, layout.hidden), dtype)
    arrays = _gates("x", wide, layout, row) | {"out": _gate(h, 1, layout, row)}
    _run(recurrence, False, layout, _of_gates(bias, layout), state, arrays)
    return h.to(pre.dtype), state.to(pre.dtype)


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
    dtype = compute_dtype(pre)
    layout, row = _layer_layout(recurrence, pre, offsets, resets, batch_first, directions)
    state = initial_state(grad_h_last, (directions, layout.batch, layout.hidden), dtype)
    grad_pre, wide, wide_h = empty(pre.shape, dtype), pre.to(dtype).contiguous(), h.to(dtype).contiguous()
    arrays = _gates("x", wide, layout, row) | _gates("grad", grad_pre, layout, row)
    arrays["h"] = _gate(wide_h, 1, layout, row)
    if grad_h is None:
        nothing = pre.new_zeros(layout.hidden, dtype=dtype)
        arrays["grad_h"] = nothing.data_ptr(), 0, 0, 0
    else:
        grad_h = grad_h.to(dtype).contiguous()
        arrays["grad_h"] = _gate(grad_h, 1, layout, row)
    initial = None if h0 is None else h0.to(dtype).contiguous()
    sums = _run(recurrence, True, layout, _of_gates(bias, layout), state, arrays, initial)
    grad_bias = None if bias is None else sums.transpose(0, 1).flatten().to(bias.dtype)
    return grad_pre.to(pre.dtype), grad_bias, None if h0 is None else state.to(h0.dtype)


def _layer_layout(
    recurrence: str, pre: Tensor, offsets: Tensor | None, resets: Tensor | None, batch_first: bool, directions: int
) -> tuple[_Layout, tuple[int, int]]:
    """The layout, and how many rows lie between steps and between sequences."""
    hidden = pre.shape[-1] // (directions * _steps(recurrence, False).sequences)
    if offsets is not None:
        offsets = offsets.to(torch.int64).contiguous()
        batch, length, row = int(offsets[1] - offsets[0]), offsets.shape[0] - 1, (1, 1)
    elif batch_first:
        batch, length, row = pre.shape[0], pre.shape[1], (1, pre.shape[1])
    else:
        batch, length, row = pre.shape[1], pre.shape[0], (pre.shape[1], 1)
    resets = None if resets is None else resets.contiguous()  # for each direction laid out as pre is
    marks = (0, 0, 0) if resets is None else (*row, resets[0].numel())
    together = 1 if row[1] > 1 or batch == 1 else batch
    return _Layout(directions, batch, length, hidden, together, False, offsets, None, resets, marks), row


def _gate(x: Tensor, gates: int, layout: _Layout, row: tuple[int, int], gate: int = 0) -> Array:
    width, hidden = x.shape[-1], layout.hidden
    return x.data_ptr() + gate * hidden * x.element_size(), row[0] * width, row[1] * width, gates * hidden


def _gates(name: str, x: Tensor, layout: _Layout, row: tuple[int, int]) -> dict[str, Array]:
    """The gates side by side in a contiguous tensor."""
    gates = x.shape[-1] // (layout.directions * layout.hidden)
    return {f"{name}{k}": _gate(x, gates, layout, row, k) for k in range(gates)}


def _of_gates(bias: Tensor | None, layout: _Layout) -> Sequence[Tensor]:
    return () if bias is None else bias.view(layout.directions, -1, layout.hidden).unbind(1)


def _run(
    recurrence: str,
    backward: bool,
    layout: _Layout,
    parameters: Sequence[Tensor],
    state: Tensor,
    arrays: dict[str, Array],
    h0: Tensor | None = None,
) -> Tensor:
    """Call the loop; returns the gradients of the parameters, (parameters, directions, D), in float64."""
    loop, work_type = _loop(recurrence, backward, state.dtype)
    dtype, device = state.dtype, state.device
    constants = evaluate(_steps(recurrence, backward).constants, [x.to(dtype) for x in parameters])
    threads = threads_for(_steps(recurrence, False).sequences * math.prod(layout[:4]))
    groups = min(layout.batch, GROUPS)
    blocks, width = blocks_of(layout.hidden, WIDTH, threads, layout.directions * groups)
    fields: dict[str, int] = {}
    for name, (address, time, sequence, direction) in arrays.items():
        fields[name], fields[f"{name}_t"], fields[f"{name}_b"], fields[f"{name}_d"] = address, time, sequence, direction
    for k, x in enumerate(constants):
        fields[f"c{k}"], fields[f"c{k}_d"] = x.data_ptr(), x.stride(0)
    sums = totals = torch.empty(0, 1)
    if backward:
        zeros = torch.zeros(layout.hidden, dtype=dtype, device=device)
        fields["zeros"] = zeros.data_ptr()
        fields["h0"], fields["h0_b"] = (zeros if h0 is None else h0).data_ptr(), 0 if h0 is None else layout.hidden
        if parameters:
            sums = torch.zeros(len(parameters), groups, layout.directions, layout.hidden, dtype=dtype, device=device)
            totals = torch.zeros_like(sums, dtype=torch.float64)
            fields |= {f"sum{k}": x.data_ptr() for k, x in enumerate(sums)}
            fields["totals"] = totals.data_ptr()
    marks = layout.resets_strides
    work = work_type(
        pieces=layout.directions * groups * blocks,
        groups=groups,
        together=layout.together,
        width=width,
        directions=layout.directions,
        batch=layout.batch,
        length=layout.length,
        hidden=layout.hidden,
        reverse=layout.reverse,
        offsets=0 if layout.offsets is None else layout.offsets.data_ptr(),
        bounds=0 if layout.bounds is None else layout.bounds.data_ptr(),
        state=state.data_ptr(),
        resets=0 if layout.resets is None else layout.resets.data_ptr(),
        resets_t=marks[0],
        resets_b=marks[1],
        resets_d=marks[2],
        **fields,
    )
    run_loop(loop, work, threads)
    return totals.sum(1)
