# mypy: disable-error-code="no-untyped-def"
"""The CPU's loops over time, which call the steps generated for a linear recurrence; compiled by Numba.

A task is a direction, a group of sequences and a block of channels.  Time is the middle loop; channels are the inner
loop, contiguous and vectorised by LLVM.  ``state`` carries the state from step to step: the initial one on entry, the
last one on return; in the backward pass, its gradient.
"""

import ctypes
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ostinato.kernels.cpu import elementary
from ostinato.kernels.cpu.compiler import compiled_loop, inline
from ostinato.kernels.cpu.intrinsics import integers, pointer_to, prefetch, restricted, structure_at, take_task
from ostinato.kernels.recurrence.linear.cpu_step import print_step
from ostinato.kernels.recurrence.linear.steps import steps_of
from ostinato.kernels.recurrence.symbolic.trace import Trace

FLUSH = 64  # steps over which parameter gradients are summed in the loop's dtype before they join the float64 total
STRIDES = ("_t", "_b", "_d")  # of time, sequences and directions


@functools.cache
def work_type(sequences: int, constants: int, sums: int, backward: bool) -> type[ctypes.Structure]:
    """The argument structure of a loop.

    Step t of sequence b in a direction is at ``t * x_t + b * x_b + direction * x_d`` in each array x.  In this formula,
    ``offsets[t]`` takes the place of t for packed sequences, and t counts from ``bounds[b]`` for concatenated ones.
    """

    def strided(name: str, count: int) -> list[tuple[str, type]]:
        return integers(*(f"{name}{k}" for k in range(count)), *(name + of for of in STRIDES))

    fields = [
        *integers("next_task", "tasks", "groups", "together", "width", "directions", "batch", "length", "hidden"),
        *integers("reverse", "offsets", "bounds", "state", "resets", *("resets" + of for of in STRIDES)),
        *strided("x", sequences),
        *integers(*(f"c{k}" for k in range(constants)), "c_d"),
    ]
    if backward:
        fields += [*strided("h", 1), *strided("grad_h", 1), *strided("grad", sequences)]
        fields += integers("before", "before_b", "zeros", *(f"sum{k}" for k in range(sums)), "totals")
    else:
        fields += strided("out", 1)
    return type("Work", (ctypes.Structure,), {"_fields_": fields})


def _generated(trace: Trace, backward: bool, dtype: type) -> tuple[str, dict[str, Callable]]:
    """The source of the functions generated for a recurrence, and the functions by name."""
    source = print_step(trace, backward)
    load, store = restricted(*dict.fromkeys(re.findall(r'"(\w+)"', source)))  # all arrays that the source names
    names: dict[str, Any] = {
        **vars(elementary),
        "pointer_to": pointer_to,
        "prefetch": prefetch,
        "load": load,
        "store": store,
        "dtype": dtype,
    }
    existing = set(names)
    exec(compile(source, f"<{trace.name}>", "exec"), names)
    return source, {name: inline(f) for name, f in names.items() if name not in existing and callable(f)}


def work_of(trace: Trace, backward: bool) -> Any:
    """The argument structure of a recurrence's loop."""
    steps = steps_of(trace, backward)
    sums = steps.parameters if backward else 0
    return work_type(steps.sequences, len(steps.constants.outputs), sums, backward)


@functools.cache
def forward(trace: Trace, dtype: type) -> Any:
    """The compiled loop of ``state = a[t] * state + b[t]``; out[t] is the state after step t."""
    source, functions = _generated(trace, False, dtype)
    step, prefetch_x = functions["step"], functions["prefetch_x"]
    pointers_x, pointers_c = functions["pointers_x"], functions["pointers_c"]
    work_dtype = np.dtype(work_of(trace, False))

    def run(address):
        work = structure_at(address, work_dtype)
        offsets, bounds = pointer_to(work.offsets, np.int64), pointer_to(work.bounds, np.int64)
        resets = pointer_to(work.resets, np.uint8)
        out, state = pointer_to(work.out0, dtype), pointer_to(work.state, dtype)
        x, x_t, x_b, x_d, c, c_d = pointers_x(work), work.x_t, work.x_b, work.x_d, pointers_c(work), work.c_d
        out_t, out_b, out_d = work.out_t, work.out_b, work.out_d
        groups, directions, together = work.groups, work.directions, work.together
        batch, hidden = work.batch, work.hidden
        resets_t, resets_b, resets_d = work.resets_t, work.resets_b, work.resets_d
        task = take_task(address)
        while task < work.tasks:
            block, group, direction = task // (groups * directions), task % groups, task // groups % directions
            begin, end = block * work.width, min((block + 1) * work.width, hidden)
            descending = direction != work.reverse
            at_c = direction * c_d
            group_end = (group + 1) * batch // groups
            for b_begin in range(group * batch // groups, group_end, together):
                first, last = (bounds[b_begin], bounds[b_begin + 1]) if work.bounds else (0, work.length)
                for i in range(last - first):
                    t, t_next = (last - 1 - i, last - 2 - i) if descending else (first + i, first + i + 1)
                    row, row_next, b_end = t, t_next, min(b_begin + together, group_end)
                    if work.offsets:
                        row, b_end = offsets[t], min(b_end, offsets[t + 1] - offsets[t])
                        row_next = offsets[max(t_next, 0)]
                    for k in range(b_end - b_begin):
                        b = b_end - 1 - k if descending else b_begin + k
                        at_x = row * x_t + b * x_b + direction * x_d
                        at_out = row * out_t + b * out_b + direction * out_d
                        if together > 1:
                            prefetch(out, at_out + (row_next - row) * out_t, begin, end)
                            prefetch_x(x, at_x + (row_next - row) * x_t, begin, end)
                        at = (direction * batch + b) * hidden
                        if work.resets and resets[row * resets_t + b * resets_b + direction * resets_d]:
                            for j in range(begin, end):
                                state[at + j] = 0
                        if descending:
                            for j in range(end - begin):
                                step(end - 1 - j, x, at_x, c, at_c, state, at, out, at_out)
                        else:
                            for j in range(begin, end):
                                step(j, x, at_x, c, at_c, state, at, out, at_out)
            task = take_task(address)

    return compiled_loop(run, source)


@functools.cache
def backward(trace: Trace, dtype: type) -> Any:
    """The compiled loop of the gradients, which recomputes a and b.

    ``state`` is the gradient of the last state on entry, of the initial state on return.  Each group of sequences sums
    its gradients of the parameters separately, in ``totals``.
    """
    source, functions = _generated(trace, True, dtype)
    step, prefetch_x = functions["step"], functions["prefetch_x"]
    pointers_x, pointers_c = functions["pointers_x"], functions["pointers_c"]
    pointers_grad, pointers_sum = functions["pointers_grad"], functions["pointers_sum"]
    work_dtype, flush = np.dtype(work_of(trace, True)), functions["flush"]

    def run(address):
        work = structure_at(address, work_dtype)
        offsets, bounds = pointer_to(work.offsets, np.int64), pointer_to(work.bounds, np.int64)
        resets, totals = pointer_to(work.resets, np.uint8), pointer_to(work.totals, np.float64)
        h, h0, zeros = pointer_to(work.h0, dtype), pointer_to(work.before, dtype), pointer_to(work.zeros, dtype)
        grad_h, state, h0_b = pointer_to(work.grad_h0, dtype), pointer_to(work.state, dtype), work.before_b
        x, x_t, x_b, x_d, c, c_d = pointers_x(work), work.x_t, work.x_b, work.x_d, pointers_c(work), work.c_d
        grad, grad_t, grad_b, grad_d = pointers_grad(work), work.grad_t, work.grad_b, work.grad_d
        sums, h_t, h_b, h_d = pointers_sum(work), work.h_t, work.h_b, work.h_d
        grad_h_t, grad_h_b, grad_h_d = work.grad_h_t, work.grad_h_b, work.grad_h_d
        groups, directions, together = work.groups, work.directions, work.together
        batch, hidden = work.batch, work.hidden
        resets_t, resets_b, resets_d = work.resets_t, work.resets_b, work.resets_d
        task = take_task(address)
        while task < work.tasks:
            block, group, direction = task // (groups * directions), task % groups, task // groups % directions
            begin, end = block * work.width, min((block + 1) * work.width, hidden)
            descending = direction != work.reverse  # the time order of the forward pass, opposite to this loop's
            at_c, at_sum = direction * c_d, (group * directions + direction) * hidden
            group_end = (group + 1) * batch // groups
            for b_begin in range(group * batch // groups, group_end, together):
                first, last = (bounds[b_begin], bounds[b_begin + 1]) if work.bounds else (0, work.length)
                for i in range(last - first):
                    t, t_before = (first + i, first + i + 1) if descending else (last - 1 - i, last - 2 - i)
                    row, row_before, b_end = t, t_before, min(b_begin + together, group_end)
                    b_start = b_end if i < last - first - 1 else 0  # sequences from this one on have no earlier step
                    if work.offsets:
                        row, b_end = offsets[t], min(b_end, offsets[t + 1] - offsets[t])
                        if i < last - first - 1:
                            row_before = offsets[t_before]
                            b_start = offsets[t_before + 1] - row_before
                    for k in range(b_end - b_begin):
                        b = b_begin + k if descending else b_end - 1 - k
                        at_x = row * x_t + b * x_b + direction * x_d
                        at_grad_h = row * grad_h_t + b * grad_h_b + direction * grad_h_d
                        before, at_before = h, row_before * h_t + b * h_b + direction * h_d
                        if together > 1:
                            prefetch(grad_h, at_grad_h + (row_before - row) * grad_h_t, begin, end)
                            prefetch(h, at_before + (row_before - row) * h_t, begin, end)
                            prefetch_x(x, at_x + (row_before - row) * x_t, begin, end)
                        at_state = direction * batch + b
                        if b >= b_start:
                            before, at_before = h0, at_state * h0_b
                        reset = work.resets and resets[row * resets_t + b * resets_b + direction * resets_d]
                        if reset:
                            before, at_before = zeros, 0
                        at_grad = row * grad_t + b * grad_b + direction * grad_d
                        at, targets = at_state * hidden, (grad, at_grad, sums, at_sum)
                        if descending:
                            for j in range(begin, end):
                                step(j, x, at_x, c, at_c, before, at_before, grad_h, at_grad_h, state, at, *targets)
                        else:
                            for j in range(begin, end):
                                k = begin + end - 1 - j
                                step(k, x, at_x, c, at_c, before, at_before, grad_h, at_grad_h, state, at, *targets)
                        if reset:
                            for j in range(begin, end):
                                state[at + j] = 0
                    if i % FLUSH == FLUSH - 1 or i == last - first - 1:
                        flush(work, totals, sums, at_sum, begin, end)
            task = take_task(address)

    return compiled_loop(run, source)
