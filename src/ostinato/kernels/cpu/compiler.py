# mypy: disable-error-code="no-untyped-def"
"""Compiles CPU loops, and the functions that they call, by Numba; caches loops on disk.

A loop is a C function of one pointer, to a structure of addresses, sizes and strides: any thread can run it without the
GIL, at the cost of a function call.
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
from numba import cfunc
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import register_jitable

from ostinato.kernels import cache


class Loop:
    """A compiled loop: the ``address`` of a C function, and ``ctypes``, which calls it without the GIL."""

    def __init__(self, name: str, library: Any) -> None:
        self._library = library  # owns the code's memory
        self.address: int = library.get_pointer_to_function(name)
        self.ctypes = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


@global_compiler_lock
def compiled_loop(function: Callable, generated: str = "") -> Loop:
    """Compile a loop, or load it if an earlier process compiled it; `generated` is the source of functions it calls.

    Numba's own cache keeps all variants of a function in one index, which is written before the code and without a
    lock, and does not notice changes in other files whose functions are inlined.  Here each variant and revision has a
    file of its own.
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
                # Two processes may give two variants the same name; a third that loads both would confuse them.
                function.__qualname__ += f"_{key.partition('.')[0]}"
                name, library = _compiled(function)
                cache.store(key, pickle.dumps((name, library.serialize_using_object_code())))
                return Loop(name, library)
    name, code = pickle.loads(stored)
    return Loop(name, target.codegen().unserialize_library(code))


def _compiled(function: Callable) -> tuple[str, Any]:
    disabled, numba.config.DISABLE_JIT = numba.config.DISABLE_JIT, 0  # loops cannot run uncompiled
    try:
        compiled = cfunc("void(voidptr)", error_model="numpy")(function)
    finally:
        numba.config.DISABLE_JIT = disabled
    return compiled.native_name, compiled._library


def _cache_key(function: Callable, codegen: Any, generated: str) -> str | None:
    """A hash of all that a loop's code depends on: variant, sources, compiler and its options, processor; or None."""
    if _SOURCES is None:
        return None
    versions = sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, numba.config.USING_SVML
    options = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    parts = function.__module__, _variant(function), generated, _SOURCES, versions, options, codegen.magic_tuple()
    return f"{cache.key_of(*map(str, parts))}.loop"


def _variant(function: Callable) -> tuple:
    """A function's name and the constants that it captures, recursively for captured functions."""
    captured = inspect.getclosurevars(function).nonlocals.items()
    variants = ((name, _variant(x) if inspect.isfunction(x) else x) for name, x in captured)
    return function.__qualname__, *sorted(variants)


def _hash_sources() -> str | None:
    """A hash of all kernels' Python sources; None if they cannot be read, as in a frozen application: no caching."""
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


# Read at import, not when a loop is compiled: by then, an upgrade may have replaced the files of the running release.
_SOURCES = _hash_sources()


class _InlinedLibrary(JITCodeLibrary):
    def _optimize_final_module(self):
        pass


class _InlinedCodegen(JITCPUCodegen):
    """Leaves functions as unoptimised LLVM IR: only the loop that contains them is optimised and made machine code."""

    _library_class = _InlinedLibrary

    def _add_module(self, module):
        pass

    def set_env(self, env_name, env):  # the default would look the environment up in the machine code
        pass


class _InlinedCompiler(Compiler):
    """Numba's compiler, which puts functions into such libraries."""

    def compile_extra(self, func):
        self.state.library = _inlined_codegen().create_library(func.__qualname__)
        return super().compile_extra(func)


@functools.cache
def _inlined_codegen() -> _InlinedCodegen:
    return _InlinedCodegen("ostinato.parts")


# Calls that are not inlined, and checks for division by zero, would keep LLVM from vectorising a loop.  Only loops call
# these functions, so they need no wrapper for C, which takes as long to compile as the function itself.
inline_options = {
    "forceinline": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "pipeline_class": _InlinedCompiler,
}
inline = register_jitable(**inline_options)
shared = register_jitable(**inline_options | {"forceinline": False})  # for large functions: one copy for all calls
