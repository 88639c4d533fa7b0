# mypy: disable-error-code="no-untyped-def"
"""What CPU loops are written in: how Numba compiles them, addresses as arrays, and functions that LLVM vectorises.

A loop is a C function of one address, that of a structure of addresses, sizes and strides, so that any thread
can run it without the GIL at the cost of a function call.  The work is cut into independent pieces; every thread
that enters takes pieces from a shared counter until none is left.
"""

import ctypes
import inspect
import math
import os
import pickle
import sys
from collections.abc import Callable
from importlib import resources
from typing import Any

import llvmlite
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload, register_jitable

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
    compiled = cfunc("void(voidptr)", error_model="numpy")(function)
    return compiled.native_name, compiled._library


def _cache_key(function: Callable, codegen: Any, generated: str) -> str | None:
    """All that a loop's code depends on: its variant, the sources, the compiler and its options, the processor."""
    if _SOURCES is None:
        return None
    outside = inspect.getclosurevars(function).nonlocals
    variant = sorted((name, x) for name, x in outside.items() if not inspect.isfunction(x)), generated
    versions = sys.implementation.cache_tag, numba.__version__, llvmlite.__version__, numba.config.USING_SVML
    options = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    parts = function.__module__, function.__qualname__, variant, _SOURCES, versions, options, codegen.magic_tuple()
    return f"{cache.key_of(*map(str, parts))}.loop"


def _hash_sources() -> str | None:
    """None where they cannot be read, as in a frozen application: then nothing is cached."""
    try:
        folder = resources.files(__package__)
        places = [place for place in (folder, *folder.iterdir()) if place.is_dir()]
        files = [(place, file) for place in places for file in place.iterdir() if file.name.endswith(".py")]
        texts = sorted(f"{place.name}/{file.name}\n{file.read_text('utf-8')}" for place, file in files)
    except OSError:
        return None
    return cache.key_of(*texts) if texts else None


# Read now and not when a loop is compiled: the files may then be a newer release's, and what runs the older's.
_SOURCES = _hash_sources()


# Either would keep LLVM from vectorising a loop: a call left in it, a check for division by zero.
inline_options = {"forceinline": True, "error_model": "numpy"}
inline = register_jitable(**inline_options)


def inline_with_constants(function: Callable) -> Callable:
    """As ``inline``; arguments that are constants stay so, for an intrinsic that is made for their values."""
    overload(function, jit_options=inline_options, prefer_literal=True, strict=False)(lambda *_: function)
    return function


@intrinsic
def pointer_to(typing_context, address, dtype):
    """The address as a pointer to elements of a dtype."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), generate


@intrinsic
def take_piece(typing_context, work):
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


# Steps that several threads take together, each a part.  In lines of their own lie how many parts of all steps are
# done, and of each part the step that it is to be claimed for next and whether a thread has come for it.  A part is its
# thread's alone; those that none has come for, or whose thread seems to have lost its processor, are taken by the
# others, so that nobody waits for a thread that is not there.  What a step wrote is seen by whoever takes a part of the
# next.

COUNTERS = LINE // 8  # in a line
_NEXT, _TAKEN = 0, 1
_PATIENCE = 500  # polls, some microseconds, before the others' parts are taken over and the processor is yielded


@intrinsic
def _load_acquire(typing_context, count):
    """Load a counter with acquire semantics."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(arguments[0], "acquire", 8)

    return types.int64(count), generate


@intrinsic
def _count_up(typing_context, count):
    """Count up, atomically."""

    def generate(context, builder, signature, arguments):
        builder.atomic_rmw("add", arguments[0], ir.IntType(64)(1), "release")
        return context.get_dummy_value()

    return types.void(count), generate


@intrinsic
def _let_others_run(typing_context):
    """Yield the processor to a waiting thread, as there may be more threads than processors."""
    name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"

    def generate(context, builder, signature, arguments):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), name)
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _claim(typing_context, count, step):
    """Count up from `step`, atomically; whether no other thread had."""

    def generate(context, builder, signature, arguments):
        count, step = arguments
        swapped = builder.cmpxchg(count, step, builder.add(step, ir.IntType(64)(1)), "acq_rel", "acquire")
        return builder.extract_value(swapped, 1)

    return types.boolean(count, types.int64), generate


@inline
def start_part(progress, part):
    """A thread has come for the part."""
    _claim(offset(progress, (1 + part) * COUNTERS + _TAKEN), 0)


@inline
def next_part(progress, parts, own, steps):
    """The step and the part that a thread is to take next, once all before is done; `steps` when none is left."""
    if parts == 1:  # a processor's atomic operation waits for all that it has written
        return progress[0], np.int64(0)
    looks = 0
    while True:
        step = _load_acquire(progress) // parts
        if step >= steps:
            return step, np.int64(0)
        for part in range(parts):
            counters = offset(progress, (1 + part) * COUNTERS)
            is_mine = part == own or looks > _PATIENCE or _load_acquire(offset(counters, _TAKEN)) == 0
            if is_mine and _claim(offset(counters, _NEXT), step):
                return step, part
        looks += 1
        if looks > _PATIENCE:
            _let_others_run()


@inline
def finish_part(progress, parts):
    if parts == 1:
        progress[0] += 1
    else:
        _count_up(progress)


def streams(*names: str) -> tuple[Any, Any]:
    """``load(pointer, index, name)`` and ``store(pointer, index, value, name)`` of a family of loops.

    Each array of a loop is a stream; none that is written overlaps with another.  Saying so, as metadata of every
    access, lets LLVM vectorise loops over more arrays than it is willing to compare with each other at run time.
    """

    def mark(builder: Any, instruction: Any, stream: str) -> None:
        metadata = builder.module.add_metadata
        domain = metadata(["ostinato"])
        scopes = {name: metadata([name, domain]) for name in names}
        instruction.set_metadata("alias.scope", metadata([scopes[stream]]))
        instruction.set_metadata("noalias", metadata([scope for name, scope in scopes.items() if name != stream]))

    @intrinsic(prefer_literal=True)
    def load(typing_context, pointer, index, stream):
        def generate(context, builder, signature, arguments):
            value = builder.load(builder.gep(arguments[0], [arguments[1]], inbounds=True))
            mark(builder, value, stream.literal_value)
            return value

        return pointer.dtype(pointer, types.int64, stream), generate

    @intrinsic(prefer_literal=True)
    def store(typing_context, pointer, index, value, stream):
        def generate(context, builder, signature, arguments):
            target = builder.gep(arguments[0], [arguments[1]], inbounds=True)
            mark(builder, builder.store(arguments[2], target), stream.literal_value)
            return context.get_dummy_value()

        return types.void(pointer, types.int64, pointer.dtype, stream), generate

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


# Arithmetic, in float32 for float32.


@intrinsic
def cast(typing_context, value, like):
    """A number in the type of another: a bare 1.0 would make float64 of a float32 expression."""

    def generate(context, builder, signature, arguments):
        return context.cast(builder, arguments[0], signature.args[0], signature.return_type)

    return like(value, like), generate


@intrinsic
def multiply_add(typing_context, x, y, z):
    """``x*y + z``, rounded once where the processor can."""

    def generate(context, builder, signature, arguments):
        kind = arguments[0].type
        function = ir.FunctionType(kind, [kind] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fmuladd", [kind], function), arguments)

    return x(x, x, x), generate


# exp of a float32 is 2**n * exp(r), |r| <= log(2)/2.  Adding _SHIFT rounds x/log(2) to the integer n and leaves it
# in the low bits of the sum.  log(2) is split so that n*_LOG2_HIGH is exact.  The polynomials are minimax fits,
# (exp(r)-1-r)/r**2 to 0.05 ulp of exp, (log1p(e)-2s)/s**3 in s**2, s = e/(2+e), to 0.08 ulp of log1p.

_SHIFT = np.float32(1.5 * 2**23)
_LOG2_INVERSE = np.float32(1 / math.log(2))
_LOG2_HIGH = np.float32(355 / 512)
_LOG2_LOW = np.float32(math.log(2) - 355 / 512)
_LOWEST, _HIGHEST = np.float32(-104), np.float32(89)  # where exp has become 0 and inf
_ONE, _TWO = np.float32(1), np.float32(2)
_E2, _E3, _E4 = np.float32(0.5000000095), np.float32(0.166665186), np.float32(0.04166620508)
_E5, _E6 = np.float32(0.00836891795), np.float32(0.001395053969)
_L3, _L5 = np.float32(0.6666641204), np.float32(0.4002176993)
_L7, _L9 = np.float32(0.2799786346), np.float32(0.280312745)


@intrinsic
def _times_power_of_two(typing_context, x, shifted):
    """``x * 2**n`` where shifted is n + _SHIFT, by two factors so that neither overflows its exponent."""

    def generate(context, builder, signature, arguments):
        x, shifted = arguments
        int32 = ir.IntType(32)
        n = builder.sub(builder.bitcast(shifted, int32), int32(int(_SHIFT.view(np.int32))))
        half = builder.ashr(n, int32(1))
        for exponent in (half, builder.sub(n, half)):
            bits = builder.shl(builder.add(exponent, int32(127)), int32(23))
            x = builder.fmul(x, builder.bitcast(bits, x.type))
        return x

    return types.float32(types.float32, types.float32), generate


@intrinsic
def _times_fraction(typing_context, x, shifted):
    """The same for n <= 0: ``x * 2**(n + 64)``, which is no denormal number, times 2**-64."""

    def generate(context, builder, signature, arguments):
        x, shifted = arguments
        int32 = ir.IntType(32)
        exponent = builder.add(builder.bitcast(shifted, int32), int32(127 + 64 - int(_SHIFT.view(np.int32))))
        scale = builder.bitcast(builder.shl(exponent, int32(23)), x.type)
        return builder.fmul(builder.fmul(x, scale), ir.Constant(x.type, 2.0**-64))

    return types.float32(types.float32, types.float32), generate


@inline
def _reduce(x):
    """As the next, for any x; NaN passes through the comparison."""
    return _reduce_fraction(_HIGHEST if x > _HIGHEST else x)


@inline
def _reduce_fraction(x):
    """n + _SHIFT and exp(r) - 1 for the float32 x = n*log(2) + r, no more than _HIGHEST; NaN passes through."""
    x = _LOWEST if x < _LOWEST else x
    shifted = multiply_add(x, _LOG2_INVERSE, _SHIFT)
    n = shifted - _SHIFT
    r = multiply_add(n, -_LOG2_LOW, multiply_add(n, -_LOG2_HIGH, x))
    p = multiply_add(multiply_add(multiply_add(multiply_add(_E6, r, _E5), r, _E4), r, _E3), r, _E2)
    return shifted, multiply_add(r * r, p, r)


def exp(x: Any) -> Any:
    """exp(x)."""


def exp_fraction(x: Any) -> Any:
    """exp(x), for x <= 0."""


def exp_expm1(x: Any) -> Any:
    """exp(x) and exp(x) - 1, for x <= 0."""


def log1p(x: Any) -> Any:
    """log(1 + x), for 0 <= x <= 1."""


@overload(exp, jit_options=inline_options)
def _exp_of(x):
    def single(x):
        shifted, excess = _reduce(x)
        return _times_power_of_two(_ONE + excess, shifted)

    return single if x == types.float32 else lambda x: math.exp(x)


@overload(exp_fraction, jit_options=inline_options)
def _exp_fraction_of(x):
    def single(x):
        shifted, excess = _reduce_fraction(x)
        return _times_fraction(_ONE + excess, shifted)

    return single if x == types.float32 else lambda x: math.exp(x)


@overload(exp_expm1, jit_options=inline_options)
def _exp_expm1_of(x):
    def single(x):
        shifted, excess = _reduce_fraction(x)
        scale = _times_power_of_two(_ONE, shifted)  # with _times_fraction a GRU's backward is not vectorised
        return multiply_add(scale, excess, scale), multiply_add(scale, excess, scale - _ONE)

    return single if x == types.float32 else lambda x: (math.exp(x), math.expm1(x))


@overload(log1p, jit_options=inline_options)
def _log1p_of(x):
    def single(x):
        s = x / (x + _TWO)
        u = s * s
        p = multiply_add(multiply_add(multiply_add(_L9, u, _L7), u, _L5), u, _L3)
        return multiply_add(s * u, p, s + s)

    return single if x == types.float32 else lambda x: math.log1p(x)


@inline
def sigmoids(x):
    """sigmoid(x) and sigmoid(-x), the small one as precise as the large one."""
    one = cast(1.0, x)
    e = exp_fraction(-abs(x))
    large = one / (one + e)
    small = e * large
    return large if x >= 0 else small, small if x >= 0 else large


@inline
def tanh_slope(x):
    """tanh(x) and its derivative."""
    one = cast(1.0, x)
    e, less = exp_expm1(-abs(x + x))
    scale = one / (one + e)
    size = -less * scale
    return size if x >= 0 else -size, cast(4.0, x) * e * scale * scale


# The vocabulary of generated loops, beyond the above.  math's functions are calls, which keep a loop from being
# vectorised, and stand for float64 only.


@inline
def minimum(x, y):
    smaller = x if x < y else y
    return x if x != x else smaller  # NaN, as y is then taken


@inline
def maximum(x, y):
    larger = x if x > y else y
    return x if x != x else larger


@inline
def sign(x):
    zero, one = cast(0.0, x), cast(1.0, x)
    return (one if x > 0 else zero) - (one if x < 0 else zero)


def expm1(x: Any) -> Any:
    """exp(x) - 1."""


def log(x: Any) -> Any:
    """log(x)."""


def log1p_general(x: Any) -> Any:
    """log(1 + x)."""


def sin(x: Any) -> Any:
    """sin(x)."""


def cos(x: Any) -> Any:
    """cos(x)."""


@overload(expm1, jit_options=inline_options)
def _expm1_of(x):
    def single(x):
        shifted, excess = _reduce(x)
        scale = _times_power_of_two(_ONE, shifted)
        whole = _times_power_of_two(_ONE + excess, shifted)
        return whole if x > _TWENTY else multiply_add(scale, excess, scale - _ONE)

    return single if x == types.float32 else lambda x: math.expm1(x)


@inline
def expm1_of_twice(x):
    """exp(2*x) - 1, where exp(x) is computed too: the two have most of the work in common."""
    y = expm1(x)
    return y * (y + cast(2.0, x))


_TWENTY = np.float32(20)
_INFINITY = np.float32(math.inf)
_SMALLEST = np.float32(2.0**-126)  # that is not denormal
_LOG2 = np.float32(math.log(2))


@intrinsic
def _exponent_and_fraction(typing_context, x):
    """n, as a float32, and f in [3/4, 3/2) of a positive float32 x = f * 2**n."""

    def generate(context, builder, signature, arguments):
        int32, float32 = ir.IntType(32), ir.FloatType()
        bits = builder.bitcast(arguments[0], int32)
        n = builder.ashr(builder.sub(bits, int32(0x3F400000)), int32(23))
        fraction = builder.bitcast(builder.sub(bits, builder.shl(n, int32(23))), float32)
        return context.make_tuple(builder, signature.return_type, (builder.sitofp(n, float32), fraction))

    return types.UniTuple(types.float32, 2)(types.float32), generate


@inline
def _log_single(x, rest):
    """log(x) + rest."""
    small = x < _SMALLEST
    n, f = _exponent_and_fraction(x * np.float32(2.0**24) if small else x)
    n = n - np.float32(24) if small else n
    e = f - _ONE
    s = e / (e + _TWO)
    u = s * s
    p = multiply_add(multiply_add(multiply_add(_L9, u, _L7), u, _L5), u, _L3)
    y = multiply_add(n, _LOG2, multiply_add(s * u, p, multiply_add(_TWO, s, rest)))
    y = y if x > 0 else (-_INFINITY if x == 0 else np.float32(math.nan))
    return y if x < _INFINITY else x  # infinity, NaN


@overload(log, jit_options=inline_options)
def _log_of(x):
    return (lambda x: _log_single(x, np.float32(0))) if x == types.float32 else lambda x: math.log(x)


@overload(log1p_general, jit_options=inline_options)
def _log1p_general_of(x):
    def single(x):
        y = _ONE + x
        lost = (x - (y - _ONE)) / y if (y > 0) & (y < _INFINITY) else np.float32(0)
        return _log_single(y, lost)

    return single if x == types.float32 else lambda x: math.log1p(x)


# A float32 angle less the nearest multiple of pi/2, in float64, where no digit of it is lost.

_TURNS_SHIFT = 1.5 * 2.0**52
_S3, _S5, _S7, _S9 = -1 / 6, 1 / 120, -1 / 5040, 1 / 362880
_C2, _C4, _C6, _C8 = -1 / 2, 1 / 24, -1 / 720, 1 / 40320


@inline
def _sine(x, quarters):
    """The sine of the float32 x + quarters * pi/2."""
    wide = cast(x, 1.0)
    turns = multiply_add(wide, 2 / math.pi, _TURNS_SHIFT) - _TURNS_SHIFT
    r = multiply_add(turns, -math.pi / 2, wide)
    u = r * r
    odd = r * multiply_add(multiply_add(multiply_add(multiply_add(_S9, u, _S7), u, _S5), u, _S3), u, 1.0)
    even = multiply_add(multiply_add(multiply_add(multiply_add(_C8, u, _C6), u, _C4), u, _C2), u, 1.0)
    turns += quarters
    quarter = turns - 4.0 * math.floor(turns * 0.25)
    size = even if (quarter == 1) | (quarter == 3) else odd
    return cast(-size if quarter >= 2 else size, x)


@overload(sin, jit_options=inline_options)
def _sin_of(x):
    return (lambda x: _sine(x, 0.0)) if x == types.float32 else lambda x: math.sin(x)


@overload(cos, jit_options=inline_options)
def _cos_of(x):
    return (lambda x: _sine(x, 1.0)) if x == types.float32 else lambda x: math.cos(x)
