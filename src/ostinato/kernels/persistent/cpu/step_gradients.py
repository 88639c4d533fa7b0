# mypy: disable-error-code="no-untyped-def"
"""The gradients of one step of stacked layers on the CPU, from what the step saved.

The first of two loops is divided among threads by hidden units: it computes the gradients of their gates, and so of
their rows of the weights.  The second needs the gates of all units, and is divided by columns of the input and state.
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

COLUMNS = 64  # of a task


class Work(ctypes.Structure):
    """The loops' arguments: sizes and addresses.

    The gates of a sequence are `pitch` apart.  `of_h` and `of_c` are the gradients of the states after the step, or 0,
    and `of_y` another one of h; `dh` and `dc` are those of the states before.
    """

    _fields_ = integers(
        *("next_task", "tasks", "tasks_x", "batch", "hidden", "inputs", "pitch"),
        *("pre", "kept", "before", "x", "h", "weights_ih", "weights_hh", "of_h", "of_c", "of_y"),
        *("grads", "dh", "dc", "dx", "of_weights_ih", "of_weights_hh", "of_bias_ih", "of_bias_hh"),
    )


_WORK = np.dtype(Work)


@functools.cache
def _of_units(dtype: type, cell: str) -> Any:
    """The loop that sets the gradients of gates, weights, biases and c, and of h what does not pass through weights."""
    gates, unit, combine, zero = GATES[cell], BACKWARD_UNIT[cell], combiner(dtype), dtype(0)
    width, gru = 1 if gates == 1 else 4, cell == "gru"  # whose gradients are of n's recurrent part, r, z, and n

    @compiled_loop
    def run(address):
        work = structure_at(address, _WORK)
        pre, kept, before = pointer_to(work.pre, dtype), pointer_to(work.kept, dtype), pointer_to(work.before, dtype)
        of_h, of_c, of_y = pointer_to(work.of_h, dtype), pointer_to(work.of_c, dtype), pointer_to(work.of_y, dtype)
        grads, dh, dc = pointer_to(work.grads, dtype), pointer_to(work.dh, dtype), pointer_to(work.dc, dtype)
        x, h = pointer_to(work.x, dtype), pointer_to(work.h, dtype)
        of_weights_ih, of_weights_hh = pointer_to(work.of_weights_ih, dtype), pointer_to(work.of_weights_hh, dtype)
        of_bias_ih, of_bias_hh = pointer_to(work.of_bias_ih, dtype), pointer_to(work.of_bias_hh, dtype)
        batch, hidden, inputs, pitch = work.batch, work.hidden, work.inputs, work.pitch
        has_h, has_c, row = work.of_h != 0, work.of_c != 0, width * pitch
        task = take_task(address)
        while task < work.tasks:
            begin = task * GROUP
            end = min(begin + GROUP, hidden)
            units = end - begin
            for b in range(batch):
                at = b * hidden
                for j in range(at + begin, at + end):
                    dh[j] = of_h[j] if has_h else zero
                    if cell == "lstm":
                        dc[j] = of_c[j] if has_c else zero
                given = pre, b * gates * pitch, kept, before, at, kept, at, of_y, at
                found = dh, at, dc, at, grads, b * row
                for j in range(begin, end):
                    unit(j, pitch, given, found)
            for g in range(gates):
                first = g * hidden + begin
                own_ih = offset(grads, (g + gru) * pitch + begin)
                own_hh = offset(grads, ((g + 1) % 3 if gru else g) * pitch + begin)
                sum_ih, sum_hh = offset(of_bias_ih, first), offset(of_bias_hh, first)
                for j in range(units):
                    sum_ih[j], sum_hh[j] = own_ih[j], own_hh[j]
                for b in range(1, batch):
                    for j in range(units):
                        sum_ih[j] += own_ih[b * row + j]
                        sum_hh[j] += own_hh[b * row + j]
                rows_ih, rows_hh = offset(of_weights_ih, first * inputs), offset(of_weights_hh, first * hidden)
                combine(own_ih, 1, row, batch, x, inputs, rows_ih, inputs, units, inputs, 1)
                combine(own_hh, 1, row, batch, h, hidden, rows_hh, hidden, units, hidden, 1)
            task = take_task(address)

    return run


@functools.cache
def _of_columns(dtype: type, cell: str) -> Any:
    """The loop that sets the gradient of x, and adds to that of h what passes through the weights."""
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
                own, rows = offset(grads, place * pitch), offset(weights, g * hidden * count + begin)
                fresh = 1 if is_x and g == 0 else 0
                combine(own, width * pitch, 1, hidden, rows, count, out, count, batch, columns, fresh)
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
    """The gradients of a step's input, states and weights, where needed, from those of its output and states.

    `saved` is what ``StepOfLayers.with_saved`` saved.
    """
    pre, kept, outputs = saved
    (layers, batch, hidden), dtype, gates = kept.shape, NUMPY_DTYPES[x.dtype], GATES[cell]
    pitch, width, size = pre.shape[2] // gates, 1 if gates == 1 else 4, len(weights) // layers
    zeros, grads = torch.zeros_like(kept), x.new_empty(batch, width, pitch)
    of_output, *of_states = (None if grad is None else grad.contiguous() for grad in upstream)
    before, of_y, dx = states or [zeros], zeros if of_output is None else of_output, None
    of_before = [torch.empty_like(kept) for _ in of_states]
    of_weights: list[Tensor] = []
    for layer in reversed(range(layers)):
        skipped = layer * batch * hidden * x.itemsize  # bytes of the layers before
        own, source = weights[layer * size : (layer + 1) * size], outputs[layer - 1] if layer else x
        of_own, inputs = [torch.empty_like(weight) for weight in own], source.shape[-1]
        of_biases = of_own[2:] or [x.new_empty(gates * hidden)] * 2
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
            weights_ih=own[0].data_ptr(),
            weights_hh=own[1].data_ptr(),
            of_h=0 if of_states[0] is None else of_states[0].data_ptr() + skipped,
            of_c=0 if of_states[-1] is None else of_states[-1].data_ptr() + skipped,
            of_y=of_y.data_ptr(),
            grads=grads.data_ptr(),
            dh=of_before[0].data_ptr() + skipped,
            dc=of_before[-1].data_ptr() + skipped,
            dx=0 if dx is None else dx.data_ptr(),
            of_weights_ih=of_own[0].data_ptr(),
            of_weights_hh=of_own[1].data_ptr(),
            of_bias_ih=of_biases[0].data_ptr(),
            of_bias_hh=of_biases[1].data_ptr(),
        )
        threads = threads_of(gates, hidden, inputs, batch)
        run_loop(_of_units(dtype, cell), work, threads)
        work.next_task, work.tasks = 0, tasks_x + tasks_h
        if work.tasks:
            run_loop(_of_columns(dtype, cell), work, threads)
        of_weights[:0], of_y = of_own, zeros if dx is None else dx
    of_given = [grad.view(state.shape) for grad, state in zip(of_before, states, strict=False)]
    return [grad if need else None for grad, need in zip((dx, *of_given, *of_weights), needed, strict=True)]
