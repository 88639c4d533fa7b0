# mypy: disable-error-code="no-untyped-def"
"""A barrier between the steps of several threads that does not wait for threads that are not running.

A step is divided into parts, one for each thread, and starts when all parts of the step before are finished.  A thread
claims its own part of each step; parts whose thread has not arrived, or seems to be preempted, are stolen by others.
Release-acquire ordering makes what a step wrote visible to the thread that claims a part of the next.

The state of the barrier, ``progress``, is initialised to zeros.  In separate cache lines, it has the number of finished
parts of all steps and, for each part, the next step to be claimed and whether its thread has arrived.
"""

import sys

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ostinato.kernels.cpu.compiler import inline
from ostinato.kernels.cpu.intrinsics import LINE, offset

COUNTERS = LINE // 8  # in a cache line
_NEXT_STEP, _ARRIVED = 0, 1
_SPINS = 500  # some microseconds of polling before a thread steals parts of others and yields its processor


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
    """Compare and swap: increment the counter if it equals `value`; returns whether it did."""

    def generate(context, builder, signature, arguments):
        counter, value = arguments
        swapped = builder.cmpxchg(counter, value, builder.add(value, ir.IntType(64)(1)), "acq_rel", "acquire")
        return builder.extract_value(swapped, 1)

    return types.boolean(counter, types.int64), generate


@intrinsic
def _yield_processor(typing_context):
    """Yield the processor to a waiting thread, as there may be more threads than processors."""
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"

    def generate(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), name)
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@inline
def arrive(progress, part):
    """Announce the thread of a part, so that no other steals the part unless this thread seems to be preempted."""
    _increment_from(offset(progress, (1 + part) * COUNTERS + _ARRIVED), 0)


@inline
def claim_part(progress, parts, own_part, steps):
    """Wait at the barrier; returns the step and the part that the thread must compute, or `steps` after the last."""
    if parts == 1:  # without atomic operations, which would wait for all pending writes of the processor
        return progress[0], np.int64(0)
    spins = 0
    while True:
        step = _load_acquire(progress) // parts
        if step >= steps:
            return step, np.int64(0)
        for part in range(parts):
            counters = offset(progress, (1 + part) * COUNTERS)
            may_claim = part == own_part or spins > _SPINS or _load_acquire(offset(counters, _ARRIVED)) == 0
            if may_claim and _increment_from(offset(counters, _NEXT_STEP), step):
                return step, part
        spins += 1
        if spins > _SPINS:
            _yield_processor()


@inline
def finish_part(progress, parts):
    """Count a part of the current step as finished."""
    if parts == 1:
        progress[0] += 1
    else:
        _increment_release(progress)
