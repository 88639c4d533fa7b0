# mypy: disable-error-code="no-untyped-def"
"""How Numba compiles CPU loops, and the functions that these contain; the cache of loops on disk.

A loop is a C function of one address, that of a structure of addresses, sizes and strides, so that any thread can run
it without the GIL at the cost of a function call.
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
