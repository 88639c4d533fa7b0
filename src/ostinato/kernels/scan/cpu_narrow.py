# mypy: disable-error-code="no-untyped-def"
"""The CPU loops of linear scans over few channels, or over channels that are not contiguous in memory.

Such channels do not fill a vector register.  Time is the inner loop here, so that the state stays in a register: the
loops of :mod:`~ostinato.kernels.scan.cpu_loops` store and load it at every step, which takes longer than the step
itself.  The channels and sequences of a task take turns of a few steps each: cache lines that they share stay in the
cache, and the processor begins one turn while it waits for the dependent operations of another.  The operations, and so
the results, are the same.
"""

import functools
from typing import Any

import numpy as np

from ostinato.kernels.cpu.compiler import compiled_loop
from ostinato.kernels.cpu.intrinsics import pointer_to, structure_at, take_task
from ostinato.kernels.scan.cpu_loops import SCAN_WORK, linear, linear_gradients, load, store

TURN = 32  # the steps of a turn


@functools.cache
def scan(dtype: type) -> Any:
    """``state = a[t]*state + b[t]``; out[t] is the state after step t."""

    @compiled_loop
    def run(address):
        work = structure_at(address, SCAN_WORK)
        bounds = pointer_to(work.bounds, np.int64)
        a, a_n, a_t, a_d = pointer_to(work.a, dtype), work.a_n, work.a_t, work.a_d
        b, b_n, b_t, b_d = pointer_to(work.b, dtype), work.b_n, work.b_t, work.b_d
        out, out_n, out_t, out_d = pointer_to(work.out, dtype), work.out_n, work.out_t, work.out_d
        state = pointer_to(work.state, np.float64)
        resets, resets_n, resets_t = pointer_to(work.resets, np.uint8), work.resets_n, work.resets_t
        parts, sequences, channels = work.parts, work.sequences, work.channels
        ahead = -1 if work.reverse else 1
        task = take_task(address)
        while task < work.tasks:
            block, part = divmod(task, parts)
            begin, end = block * work.width, min((block + 1) * work.width, channels)
            done, longest = 0, 1
            while done < longest:
                for n in range(part * sequences // parts, (part + 1) * sequences // parts):
                    first, last = (bounds[n], bounds[n + 1]) if work.bounds else (0, work.length)
                    start = first if ahead == 1 else last - 1
                    longest = max(longest, last - first)
                    for j in range(begin, end):
                        h = state[n * channels + j]
                        for i in range(done, min(done + TURN, last - first)):
                            t = start + i * ahead
                            if work.resets and resets[n * resets_n + t * resets_t]:
                                h = 0.0
                            a_j = load(a, n * a_n + t * a_t + j * a_d, "a")
                            h = linear(a_j, load(b, n * b_n + t * b_t + j * b_d, "b"), h)
                            store(out, n * out_n + t * out_t + j * out_d, dtype(h), "out")
                        state[n * channels + j] = h
                done += TURN
            task = take_task(address)

    return run


@functools.cache
def scan_backward(dtype: type) -> Any:
    """The gradients of a scan; `state` is the last state's gradient on entry, the initial state's on return."""

    @compiled_loop
    def run(address):
        work = structure_at(address, SCAN_WORK)
        bounds = pointer_to(work.bounds, np.int64)
        a, a_n, a_t, a_d = pointer_to(work.a, dtype), work.a_n, work.a_t, work.a_d
        h, h_n, h_t, h_d = pointer_to(work.h, dtype), work.h_n, work.h_t, work.h_d
        h0, h0_n = pointer_to(work.h0, dtype), work.h0_n
        state = pointer_to(work.state, np.float64)
        resets, resets_n, resets_t = pointer_to(work.resets, np.uint8), work.resets_n, work.resets_t
        grad_h, grad_n, grad_t, grad_d = pointer_to(work.grad_h, dtype), work.grad_h_n, work.grad_h_t, work.grad_h_d
        grad_a, grad_b = pointer_to(work.grad_a, dtype), pointer_to(work.grad_b, dtype)
        out_n, out_t, out_d = work.grad_a_n, work.grad_a_t, work.grad_a_d  # those of grad_b, too
        parts, sequences, channels = work.parts, work.sequences, work.channels
        ahead = 1 if work.reverse else -1
        task = take_task(address)
        while task < work.tasks:
            block, part = divmod(task, parts)
            begin, end = block * work.width, min((block + 1) * work.width, channels)
            done, longest = 0, 1
            while done < longest:
                for n in range(part * sequences // parts, (part + 1) * sequences // parts):
                    first, last = (bounds[n], bounds[n + 1]) if work.bounds else (0, work.length)
                    start = first if ahead == 1 else last - 1
                    longest = max(longest, last - first)
                    for j in range(begin, end):
                        carried, initial = state[n * channels + j], h0[n * h0_n + j]
                        for i in range(done, min(done + TURN, last - first)):
                            t = start + i * ahead
                            before = initial
                            if i < last - first - 1:
                                before = load(h, n * h_n + (t + ahead) * h_t + j * h_d, "before")
                            if work.resets and resets[n * resets_n + t * resets_t]:
                                before = dtype(0.0)
                            a_j = load(a, n * a_n + t * a_t + j * a_d, "a")
                            grad_j = load(grad_h, n * grad_n + t * grad_t + j * grad_d, "grad_h")
                            grad_a_j, grad_b_j, carried = linear_gradients(a_j, before, grad_j, carried)
                            store(grad_a, n * out_n + t * out_t + j * out_d, grad_a_j, "grad_a")
                            store(grad_b, n * out_n + t * out_t + j * out_d, grad_b_j, "grad_b")
                            if work.resets and resets[n * resets_n + t * resets_t]:
                                carried = 0.0
                        state[n * channels + j] = carried
                done += TURN
            task = take_task(address)

    return run
