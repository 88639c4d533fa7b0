# mypy: disable-error-code="no-untyped-def"
"""CPU loops: how Numba compiles them, their cache on disk, and how they access memory.

A loop is a C function of one address, that of a structure of addresses, sizes and strides, so that any thread can run
it without the GIL at the cost of a function call.  The work is divided into independent tasks; every thread that
enters takes tasks from a shared counter until none is left.
"""

import ctypes
import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import llvmlite
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, types
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic, register_jitable

from ostinato.kernels import cache

LINE = 64  # bytes of a cache line
NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def integers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_int64) for name in names]


class Loop:
    """A compiled loop: the ``address`` of a C function, and ``ctypes``, which calls it without the GIL."""

    def __init__(self, name: str, library: Any) -> None:
        self._library = library  # owns the code's memory
        self.address: int = library.get_pointer_to_function(name)
        self.ctypes = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


@global_compiler_lock
def compiled_loop(function: Callable, generated: str = "") -> Loop:
    """Compile a loop, or load what an earlier process compiled; `generated` is the source of functions it calls.

    Numba's own cache keeps all variants of a function in one index, written before the code and without a lock, and
    does not see changes of what is inlined from other files.  Here each variant and revision has a file of its own.
    """
    target = cpu_target.target_context
    target.refresh()
    key = _cache_key(function, target.codegen(), generated)
    if key is None:
        return Loop(*_compiled(function))
    stored = cache.load(key)
    if stored is None:
        with cache.alone(key):
            stored = cache.load(key)
            if stored is None:
                # Two processes may name two variants alike, and a third would confuse them.
                function.__qualname__ += f"_{key.partition('.')[0]}"
                name, library = _compiled(function)
                cache.store(key, pickle.dumps((name, library.serialize_using_object_code())))
                return Loop(name, library)
    name, code = pickle.loads(stored)
    return Loop(name, target.codegen().unserialize_library(code))


def _compiled(function: Callable) -> tuple[str, Any]:
    disabled, numba.config.DISABLE_JIT = numba.config.DISABLE_JIT, 0  # of functions that can run without: not of these
    try:
        compiled = cfunc("void(voidptr)", error_model="numpy")(function)
    finally:
        numba.config.DISABLE_JIT = disabled
    return compiled.native_name, compiled._library


def _cache_key(function: Callable, codegen: Any, generated: str) -> str | None:
    """All that a loop's code depends on: its variant, the sources, the compiler and its options, the processor."""
    if _SOURCES is None:
        return None
    versions = sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, numba.config.USING_SVML
    options = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    parts = function.__module__, _variant(function), generated, _SOURCES, versions, options, codegen.magic_tuple()
    return f"{cache.key_of(*map(str, parts))}.loop"


def _variant(function: Callable) -> tuple:
    """A function's name and the constants around it, and so of the functions among these."""
    outside = inspect.getclosurevars(function).nonlocals.items()
    variants = ((name, _variant(x) if inspect.isfunction(x) else x) for name, x in outside)
    return function.__qualname__, *sorted(variants)


def _hash_sources() -> str | None:
    """None where they cannot be read, as in a frozen application: then nothing is cached."""
    try:
        texts = sorted(_texts(resources.files("ostinato.kernels")))
    except OSError:
        return None
    return cache.key_of(*texts) if texts else None


def _texts(folder: Any) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _texts(entry)
        elif entry.name.endswith(".py"):
            yield f"{folder.name}/{entry.name}\n{entry.read_text('utf-8')}"


# Read now and not when a loop is compiled: the files may then be a newer release's, and what runs the older's.
_SOURCES = _hash_sources()


class _PartLibrary(JITCodeLibrary):
    def _optimize_final_module(self):
        pass


class _PartCodegen(JITCPUCodegen):
    """Leaves functions as they are lowered: only the loop that contains them is optimised and becomes machine code."""

    _library_class = _PartLibrary

    def _add_module(self, module):
        pass

    def set_env(self, env_name, env):  # which would look for it in the machine code
        pass


class _PartCompiler(Compiler):
    """Numba's own, but with a library of those."""

    def compile_extra(self, func):
        self.state.library = _part_codegen().create_library(func.__qualname__)
        return super().compile_extra(func)


@functools.cache
def _part_codegen() -> _PartCodegen:
    return _PartCodegen("ostinato.parts")


# Either would keep LLVM from vectorising a loop: a call left in it, a check for division by zero.  Nothing but loops
# calls these functions, and a wrapper for C takes as long to compile as the function itself.
inline_options = {
    "forceinline": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "pipeline_class": _PartCompiler,
}
inline = register_jitable(**inline_options)
shared = register_jitable(**inline_options | {"forceinline": False})  # large: one function for all its calls in a loop


@intrinsic
def structure_at(typing_context, address, dtype):
    """The structure at an address, as a record of a dtype."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return dtype.dtype(types.voidptr, dtype), generate


@intrinsic
def pointer_to(typing_context, address, dtype):
    """The address as a pointer to elements of a dtype."""

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
    """``load(pointer, index, name)`` and ``store(pointer, index, value, name)`` of a family of loops.

    Each array of a loop is what C calls restricted: none that is written overlaps with another.  Saying so, as metadata
    of every access, lets LLVM vectorise loops over more arrays than it is willing to compare with each other at run
    time.
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
    """Ask for the cache line of an element, which need not exist."""

    def generate(context, builder, signature, arguments):
        int32, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], function)
        target = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        builder.call(prefetch, [target, int32(0), int32(3), int32(1)])  # to read, to keep, data
        return context.get_dummy_value()

    return types.void(pointer, types.int64), generate


@inline
def prefetch(pointer, at, begin, end):
    for j in range(begin, end, 16):
        _prefetch_line(pointer, at + j)
