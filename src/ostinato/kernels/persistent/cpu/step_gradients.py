# mypy: disable-error-code="no-untyped-def"
"""The gradients of one step of stacked layers on the CPU, from the tensors that the step saved.

There are two loops.  The first computes the gradients of the gates, and from these those of the weights' rows; threads
share the hidden units.  The second needs the gates of all units; threads share the columns of the input and the state.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.kernels.cpu.compiler import compiled_loop
from ostinato.kernels.cpu.intrinsics import NUMPY_DTYPES, integers, offset, pointer_to, structure_at, take_task
from ostinato.kernels.cpu.threads import run_loop
from ostinato.kernels.persistent.cpu.cells import BACKWARD_UNIT
from ostinato.kernels.persistent.cpu.products import combiner
from ostinato.kernels.persistent.cpu.step import GROUP, threads_of
from ostinato.kernels.persistent.plan import GATES

COLUMNS = 64  # in a task


class Work(ctypes.Structure):
    """The loops' argument structure: sizes and addresses.

    The gates of a sequence are `pitch` apart.  `grad_h` and `grad_c` are the gradients of the states after the step, or
    0, and `grad_y` is the gradient of h as the layer's output; `dh` and `dc` are those of the states before the step.
    """

    _fields_ = integers(
        *("next_task", "tasks", "tasks_x", "batch", "hidden", "inputs", "pitch"),
        *("pre", "kept", "before", "x", "h", "weights_ih", "weights_hh", "grad_h", "grad_c", "grad_y"),
        *("grads", "dh", "dc", "dx", "grad_weights_ih", "grad_weights_hh", "grad_bias_ih", "grad_bias_hh"),
    )


_WORK = np.dtype(Work)


@functools.cache
def _unit_loop(dtype: type, cell: str) -> Any:
    """The loop that sets the gradients of gates, weights, biases, c, and h, except for what passes through weights."""
    gates, unit, combine, zero = GATES[cell], BACKWARD_UNIT[cell], combiner(dtype), dtype(0)
    width, gru = 1 if gates == 1 else 4, cell == "gru"  # a GRU has gradients of n's recurrent part, r, z, and n

    @compiled_loop
    def run(address):
        work = structure_at(address, _WORK)
        pre, kept, before = pointer_to(work.pre, dtype), pointer_to(work.kept, dtype), pointer_to(work.before, dtype)
        grad_h, grad_c = pointer_to(work.grad_h, dtype), pointer_to(work.grad_c, dtype)
        grad_y = pointer_to(work.grad_y, dtype)
        grads, dh, dc = pointer_to(work.grads, dtype), pointer_to(work.dh, dtype), pointer_to(work.dc, dtype)
        x, h = pointer_to(work.x, dtype), pointer_to(work.h, dtype)
        grad_weights_ih = pointer_to(work.grad_weights_ih, dtype)
        grad_weights_hh = pointer_to(work.grad_weights_hh, dtype)
        grad_bias_ih, grad_bias_hh = pointer_to(work.grad_bias_ih, dtype), pointer_to(work.grad_bias_hh, dtype)
        batch, hidden, inputs, pitch = work.batch, work.hidden, work.inputs, work.pitch
        has_h, has_c, row = work.grad_h != 0, work.grad_c != 0, width * pitch
        task = take_task(address)
        while task < work.tasks:
            begin = task * GROUP
            end = min(begin + GROUP, hidden)
            units = end - begin
            for b in range(batch):
                at = b * hidden
                for j in range(at + begin, at + end):
                    dh[j] = grad_h[j] if has_h else zero
                    if cell == "lstm":
                        dc[j] = grad_c[j] if has_c else zero
                unit_inputs = pre, b * gates * pitch, kept, before, at, kept, at, grad_y, at
                unit_outputs = dh, at, dc, at, grads, b * row
                for j in range(begin, end):
                    unit(j, pitch, unit_inputs, unit_outputs)
            for g in range(gates):
                first = g * hidden + begin
                gates_ih = offset(grads, (g + gru) * pitch + begin)
                gates_hh = offset(grads, ((g + 1) % 3 if gru else g) * pitch + begin)
                sum_ih, sum_hh = offset(grad_bias_ih, first), offset(grad_bias_hh, first)
                for j in range(units):
                    sum_ih[j], sum_hh[j] = gates_ih[j], gates_hh[j]
                for b in range(1, batch):
                    for j in range(units):
                        sum_ih[j] += gates_ih[b * row + j]
                        sum_hh[j] += gates_hh[b * row + j]
                rows_ih, rows_hh = offset(grad_weights_ih, first * inputs), offset(grad_weights_hh, first * hidden)
                combine(gates_ih, 1, row, batch, x, inputs, rows_ih, inputs, units, inputs, 1)
                combine(gates_hh, 1, row, batch, h, hidden, rows_hh, hidden, units, hidden, 1)
            task = take_task(address)

    return run


@functools.cache
def _column_loop(dtype: type, cell: str) -> Any:
    """The loop that sets the gradient of x, and adds to that of h the part that passes through the weights."""
    gates, combine = GATES[cell], combiner(dtype)
    width, gru = 1 if gates == 1 else 4, cell == "gru"

    @compiled_loop
    def run(address):
        work = structure_at(address, _WORK)
        grads, dh, dx = pointer_to(work.grads, dtype), pointer_to(work.dh, dtype), pointer_to(work.dx, dtype)
        weights_ih, weights_hh = pointer_to(work.weights_ih, dtype), pointer_to(work.weights_hh, dtype)
        batch, hidden, inputs, pitch = work.batch, work.hidden, work.inputs, work.pitch
        task = take_task(address)
        while task < work.tasks:
            is_x = task < work.tasks_x
            begin = (task if is_x else task - work.tasks_x) * COLUMNS
            count, out, weights = (inputs, dx, weights_ih) if is_x else (hidden, dh, weights_hh)
            columns, out = min(COLUMNS, count - begin), offset(out, begin)
            for g in range(gates):
                place = g + gru if is_x else (g + 1) % 3 if gru else g
                gate, rows = offset(grads, place * pitch), offset(weights, g * hidden * count + begin)
                fresh = 1 if is_x and g == 0 else 0
                combine(gate, width * pitch, 1, hidden, rows, count, out, count, batch, columns, fresh)
            task = take_task(address)

    return run


def gradients_of_step(
    cell: str,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradients of a step's input, states and weights, where needed, given those of its output and next states.

    `saved` are the tensors that ``StepOfLayers.with_saved`` returned.
    """
    pre, kept, outputs = saved
    (layers, batch, hidden), dtype, gates = kept.shape, NUMPY_DTYPES[x.dtype], GATES[cell]
    pitch, width, size = pre.shape[2] // gates, 1 if gates == 1 else 4, len(weights) // layers
    zeros, grads = torch.zeros_like(kept), x.new_empty(batch, width, pitch)
    grad_output, *grad_states = (None if grad is None else grad.contiguous() for grad in upstream)
    before, grad_y, dx = states or [zeros], zeros if grad_output is None else grad_output, None
    grad_before = [torch.empty_like(kept) for _ in grad_states]
    grad_weights: list[Tensor] = []
    for layer in reversed(range(layers)):
        skipped = layer * batch * hidden * x.itemsize  # bytes of the states of the layers below
        layer_weights, source = weights[layer * size : (layer + 1) * size], outputs[layer - 1] if layer else x
        layer_grads, inputs = [torch.empty_like(weight) for weight in layer_weights], source.shape[-1]
        grad_biases = layer_grads[2:] or [x.new_empty(gates * hidden)] * 2
        dx = torch.empty_like(source) if layer or needed[0] else None
        tasks_x = 0 if dx is None else -(-inputs // COLUMNS)
        tasks_h = -(-hidden // COLUMNS) if any(needed[1 : 1 + len(states)]) else 0
        work = Work(
            tasks=-(-hidden // GROUP),
            tasks_x=tasks_x,
            batch=batch,
            hidden=hidden,
            inputs=inputs,
            pitch=pitch,
            pre=pre[layer].data_ptr(),
            kept=kept.data_ptr() + skipped,
            before=before[-1].data_ptr() + skipped,
            x=source.data_ptr(),
            h=before[0].data_ptr() + skipped,
            weights_ih=layer_weights[0].data_ptr(),
            weights_hh=layer_weights[1].data_ptr(),
            grad_h=0 if grad_states[0] is None else grad_states[0].data_ptr() + skipped,
            grad_c=0 if grad_states[-1] is None else grad_states[-1].data_ptr() + skipped,
            grad_y=grad_y.data_ptr(),
            grads=grads.data_ptr(),
            dh=grad_before[0].data_ptr() + skipped,
            dc=grad_before[-1].data_ptr() + skipped,
            dx=0 if dx is None else dx.data_ptr(),
            grad_weights_ih=layer_grads[0].data_ptr(),
            grad_weights_hh=layer_grads[1].data_ptr(),
            grad_bias_ih=grad_biases[0].data_ptr(),
            grad_bias_hh=grad_biases[1].data_ptr(),
        )
        threads = threads_of(gates, hidden, inputs, batch)
        run_loop(_unit_loop(dtype, cell), work, threads)
        work.next_task, work.tasks = 0, tasks_x + tasks_h
        if work.tasks:
            run_loop(_column_loop(dtype, cell), work, threads)
        grad_weights[:0], grad_y = layer_grads, zeros if dx is None else dx
    state_grads = [grad.view(state.shape) for grad, state in zip(grad_before, states, strict=False)]
    return [grad if need else None for grad, need in zip((dx, *state_grads, *grad_weights), needed, strict=True)]
