# mypy: disable-error-code="no-untyped-def"
"""A barrier between the steps of several threads that waits for no thread that is not running.

A step is divided into parts, one a thread, and starts when all parts of the step before are finished.  A thread claims
its own part of each step; parts whose thread has not arrived, or seems to be preempted, are stolen by the others.
Release and acquire order makes what a step wrote visible to whoever claims a part of the next.

The state of the barrier, ``progress``, is zero at first: in cache lines of their own the number of finished parts of
all steps and, of each part, the next step that it is to be claimed for and whether its thread has arrived.
"""

import sys

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ostinato.kernels.cpu.compiler import inline
from ostinato.kernels.cpu.intrinsics import LINE, offset

COUNTERS = LINE // 8  # in a line
_NEXT_STEP, _ARRIVED = 0, 1
_SPINS = 500  # some microseconds, before other threads' parts are stolen and the processor is yielded


@intrinsic
def _load_acquire(typing_context, counter):
    def generate(context, builder, signature, arguments):
        return builder.load_atomic(arguments[0], "acquire", 8)

    return types.int64(counter), generate


@intrinsic
def _increment_release(typing_context, counter):
    def generate(context, builder, signature, arguments):
        builder.atomic_rmw("add", arguments[0], ir.IntType(64)(1), "release")
        return context.get_dummy_value()

    return types.void(counter), generate


@intrinsic
def _increment_from(typing_context, counter, value):
    """Compare and swap: increment the counter if it is `value`; whether it was."""

    def generate(context, builder, signature, arguments):
        counter, value = arguments
        swapped = builder.cmpxchg(counter, value, builder.add(value, ir.IntType(64)(1)), "acq_rel", "acquire")
        return builder.extract_value(swapped, 1)

    return types.boolean(counter, types.int64), generate


@intrinsic
def _yield_processor(typing_context):
    """To a waiting thread, as there may be more threads than processors."""
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"

    def generate(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), name)
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@inline
def arrive(progress, part):
    """Say that the thread of a part is here; nobody steals the part unless the thread is then preempted."""
    _increment_from(offset(progress, (1 + part) * COUNTERS + _ARRIVED), 0)


@inline
def claim_part(progress, parts, own, steps):
    """Wait for the barrier; returns the step and the part that the thread is to compute, or `steps` after the last."""
    if parts == 1:  # an atomic operation would wait for all writes of the processor
        return progress[0], np.int64(0)
    spins = 0
    while True:
        step = _load_acquire(progress) // parts
        if step >= steps:
            return step, np.int64(0)
        for part in range(parts):
            counters = offset(progress, (1 + part) * COUNTERS)
            is_mine = part == own or spins > _SPINS or _load_acquire(offset(counters, _ARRIVED)) == 0
            if is_mine and _increment_from(offset(counters, _NEXT_STEP), step):
                return step, part
        spins += 1
        if spins > _SPINS:
            _yield_processor()


@inline
def finish_part(progress, parts):
    if parts == 1:
        progress[0] += 1
    else:
        _increment_release(progress)
