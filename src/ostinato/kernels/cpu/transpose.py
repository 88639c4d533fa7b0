# mypy: disable-error-code="no-untyped-def"
"""Copies of tensors whose steps are contiguous to contiguous channels, in square blocks with rows of one cache line.

A block is transposed in vector registers.  PyTorch copies one number after the other and takes several times as long,
above all if the channels' addresses differ by a power of two and so map to a few sets of the caches.
"""

import ctypes
import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from ostinato.kernels.cpu.compiler import compiled_loop
from ostinato.kernels.cpu.intrinsics import LINE, NUMPY_DTYPES, integers, offset, pointer_to, structure_at, take_task
from ostinato.kernels.cpu.memory import empty_like
from ostinato.kernels.cpu.threads import run_loop, threads_for

STRIP = 64  # channels of a sequence that a task copies: few enough for the lines of a block of steps to stay cached


class TransposeWork(ctypes.Structure):
    _fields_ = integers("next_task", "tasks", "strips", "length", "channels", "x", "x_n", "x_d", "out")


TRANSPOSE_WORK = np.dtype(TransposeWork)


def transposed(x: Tensor) -> Tensor:
    """A contiguous copy of a tensor (B, T, D) whose steps are contiguous; neither T nor D may be less than a block."""
    batch, length, channels = x.shape
    out = empty_like(x, x.dtype)
    strips = -(-channels // STRIP)
    sizes = {"tasks": batch * strips, "strips": strips, "length": length, "channels": channels}
    work = TransposeWork(**sizes, x=x.data_ptr(), x_n=x.stride(0), x_d=x.stride(2), out=out.data_ptr())
    run_loop(_transpose(NUMPY_DTYPES[x.dtype]), work, threads_for(x.numel()))
    return out


def is_transposable(x: Tensor) -> bool:
    """Whether :func:`transposed` takes a tensor."""
    has_blocks = x.dim() == 3 and x.stride(1) == 1 and min(x.shape[1:]) >= LINE // x.itemsize
    return has_blocks and x.dtype in NUMPY_DTYPES


@intrinsic
def _transpose_block(typing_context, x, x_row, out, out_row):
    """``out[i*out_row + j] = x[j*x_row + i]`` for i and j below the number of elements in a cache line."""

    def generate(context, builder, signature, arguments):
        x, x_row, out, out_row = arguments
        size = signature.args[0].dtype.bitwidth // 8
        side = LINE // size
        vector = ir.VectorType(x.type.pointee, side)

        def line(pointer, row, i):
            return builder.bitcast(builder.gep(pointer, [builder.mul(row, row.type(i))]), vector.as_pointer())

        def shuffle(first, second, indices):
            return builder.shuffle_vector(first, second, ir.VectorType(ir.IntType(32), side)(indices))

        rows = [builder.load(line(x, x_row, i), align=size) for i in range(side)]
        half = side // 2
        while half:  # swap the upper right and the lower left quadrant of each square with sides of two halves
            left = [k if not k & half else side + k - half for k in range(side)]
            right = [k + half if not k & half else side + k for k in range(side)]
            for i in range(side):
                if not i & half:
                    pair = rows[i], rows[i + half]
                    rows[i], rows[i + half] = shuffle(*pair, left), shuffle(*pair, right)
            half //= 2
        for i in range(side):
            builder.store(rows[i], line(out, out_row, i), align=size)
        return context.get_dummy_value()

    return types.void(x, types.int64, out, types.int64), generate


@functools.cache
def _transpose(dtype: type) -> Any:
    side = LINE // np.dtype(dtype).itemsize

    @compiled_loop
    def run(address):
        work = structure_at(address, TRANSPOSE_WORK)
        x, x_n, x_d, out = pointer_to(work.x, dtype), work.x_n, work.x_d, pointer_to(work.out, dtype)
        length, channels = work.length, work.channels
        task = take_task(address)
        while task < work.tasks:
            n, strip = divmod(task, work.strips)
            for i in range(0, length, side):
                t = min(i, length - side)  # the last block overlaps the one before
                for j in range(strip * STRIP, min((strip + 1) * STRIP, channels), side):
                    d = min(j, channels - side)
                    at_x, at_out = n * x_n + t + d * x_d, (n * length + t) * channels + d
                    _transpose_block(offset(x, at_x), x_d, offset(out, at_out), channels)
            task = take_task(address)

    return run
