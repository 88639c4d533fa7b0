# mypy: disable-error-code="no-untyped-def"
"""What CPU loops are written with: argument structures, tasks that threads take, and memory accesses.

The work of a loop is divided into independent tasks; every thread that enters takes tasks from a shared counter, the
first field of the argument structure, until none is left.
"""

import ctypes
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ostinato.kernels.cpu.compiler import inline

LINE = 64  # bytes of a cache line
NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def integers(*names: str) -> list[tuple[str, type]]:
    """Fields of a structure, all int64, which hold addresses, too."""
    return [(name, ctypes.c_int64) for name in names]


@intrinsic
def structure_at(typing_context, address, dtype):
    """The structure at an address, as a record of this dtype."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return dtype.dtype(types.voidptr, dtype), generate


@intrinsic
def pointer_to(typing_context, address, dtype):
    """The address as a pointer to elements of this dtype."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), generate


@intrinsic
def take_task(typing_context, work):
    """Atomic fetch-and-add of 1 on the structure's first field."""

    def generate(context, builder, signature, arguments):
        int64 = ir.IntType(64)
        counter = builder.bitcast(arguments[0], int64.as_pointer())
        return builder.atomic_rmw("add", counter, int64(1), "monotonic")

    return types.int64(types.voidptr), generate


@intrinsic
def offset(typing_context, pointer, index):
    """The address of an element."""

    def generate(context, builder, signature, arguments):
        return builder.gep(arguments[0], [arguments[1]])

    return pointer(pointer, types.int64), generate


def restricted(*names: str) -> tuple[Any, Any]:
    """``load(pointer, index, name)`` and ``store(pointer, index, value, name)`` for arrays that do not overlap.

    Each of the named arrays is what C calls restricted: none that is written overlaps with another.  Aliasing metadata
    on every access says so, and lets LLVM vectorise loops over more arrays than it is willing to check for overlap at
    run time.
    """

    def mark(builder: Any, instruction: Any, array: str) -> None:
        metadata = builder.module.add_metadata
        domain = metadata(["ostinato"])
        scopes = {name: metadata([name, domain]) for name in names}
        instruction.set_metadata("alias.scope", metadata([scopes[array]]))
        instruction.set_metadata("noalias", metadata([scope for name, scope in scopes.items() if name != array]))

    @intrinsic(prefer_literal=True)
    def load(typing_context, pointer, index, array):
        def generate(context, builder, signature, arguments):
            value = builder.load(builder.gep(arguments[0], [arguments[1]], inbounds=True))
            mark(builder, value, array.literal_value)
            return value

        return pointer.dtype(pointer, types.int64, array), generate

    @intrinsic(prefer_literal=True)
    def store(typing_context, pointer, index, value, array):
        def generate(context, builder, signature, arguments):
            target = builder.gep(arguments[0], [arguments[1]], inbounds=True)
            mark(builder, builder.store(arguments[2], target), array.literal_value)
            return context.get_dummy_value()

        return types.void(pointer, types.int64, pointer.dtype, array), generate

    return load, store


@intrinsic
def _prefetch_line(typing_context, pointer, index):
    """Prefetch the cache line of an element, which need not exist."""

    def generate(context, builder, signature, arguments):
        int32, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function)
        target = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        builder.call(prefetch, [target, int32(0), int32(3), int32(1)])  # for reading, high locality, data cache
        return context.get_dummy_value()

    return types.void(pointer, types.int64), generate


@inline
def prefetch(pointer, at, begin, end):
    """Prefetch elements `begin` to `end` of the row at an offset, 16 at a time: a cache line of float32."""
    for j in range(begin, end, 16):
        _prefetch_line(pointer, at + j)
