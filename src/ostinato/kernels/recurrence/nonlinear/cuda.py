"""Non-linear recurrences on NVIDIA GPUs: the kernels of ``steps.cu`` around a generated cell."""

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.cuda.nvrtc import SCALARS, Macros, address
from ostinato.kernels.operators import eager
from ostinato.kernels.recurrence.arguments import Call
from ostinato.kernels.recurrence.nonlinear.cell import print_cell
from ostinato.kernels.recurrence.symbolic.trace import Trace
from ostinato.kernels.scan import Order
from ostinato.kernels.scan.cuda.scans import along_channels, last_state

THREADS = 32  # in a block: one warp, so that few channels spread over all multiprocessors
AHEAD = 4  # steps whose loads are issued at once, half of that for float64; twice as many are in flight
RESIDENT = 32  # the most blocks that a multiprocessor holds; PARALLEL threads make about as many for each
CHANNELS = 1 << 14  # from this many channels on, time is not cut into chunks
PARALLEL = 1 << 17  # threads that fewer channels are spread over by cutting time into chunks, if steps suffice
SHORTEST = 64  # the least number of steps in a chunk
PASSES = 5  # Newton iterations after the first, until channels that have not converged are run in one chunk


@functools.cache
def source(trace: Trace) -> str:
    """The CUDA C++ of a recurrence's kernels."""
    return nvrtc.source("cuda/numeric.cuh") + print_cell(trace) + nvrtc.source("recurrence/nonlinear/steps.cu")


def macros(
    dtype: torch.dtype, backward: bool, compose: bool, resets: int = 0, long_offsets: bool = False, dense: bool = False
) -> Macros:
    """The preprocessor definitions of one kernel.

    `resets`: 0 without a mask, 2 where the bytes of AHEAD steps are adjacent, aligned and in order, else 1.  `dense`
    limits registers and the steps in flight, so that RESIDENT blocks run on each multiprocessor at once.
    """
    names = ("SCALAR", "VEC", "BACKWARD", "COMPOSE", "RESETS", "OFFSET", "AHEAD", "RESIDENT")
    ahead = AHEAD // 2 if dense or dtype.itemsize == 8 else AHEAD
    offset, resident = "Index" if long_offsets else "int", RESIDENT if dense else 0
    if dense and backward:  # here one load of two bytes was slower than two loads
        resets = min(resets, 1)
    values = SCALARS[dtype], 1, int(backward), int(compose), resets, offset, ahead, resident
    return tuple(zip(names, values, strict=True))


@functools.lru_cache(maxsize=4096)
def _compile_ahead(
    trace: Trace,
    device: int,
    chunked: bool,
    differentiated: bool,
    dtype: torch.dtype,
    resets: int,
    long_offsets: bool,
    dense: bool,
) -> None:
    """Begin to compile all kernels of a call and its gradient but the first, which the caller compiles."""
    steps_macros = [
        macros(dtype, backward, compose, resets, long_offsets, dense)
        for backward in ((False, True) if differentiated else (False,))
        for compose in ((True, False) if chunked else (False,))
    ]
    link_macros = [macros(dtype, backward=False, compose=True, dense=dense)] if chunked else []
    for definitions in {*steps_macros, *link_macros} - {steps_macros[0]}:
        nvrtc.compile_ahead(source(trace), definitions, device)


def choose_chunks(channels: int, steps: int) -> int:
    """The number of chunks along time; `channels` is the total over all sequences."""
    if channels >= CHANNELS:
        return 1
    return max(1, min(PARALLEL // max(channels, 1), steps // SHORTEST))


def steps(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """The states after every step, and the states after the last one."""
    trace, sequences, parameters, h0, order = call
    inputs = _with_equal_strides(sequences)
    like = inputs[0]
    initial = [None] * trace.states if h0 is None else [x.to(like.dtype).contiguous() for x in h0]
    states = [like.new_empty(like.shape) for _ in range(trace.states)]
    last = [last_state(y, first, order, 0.0) for y, first in zip(states, initial, strict=True)]
    wide = _widened(parameters, like)
    launches = _Launches(trace, like, order, (like, states[0]))
    launches.compile_ahead()
    sequences_and_strides, absent = _tensors(inputs), _tensors([None]) * 2
    others = [*absent, *map(address, (*initial, *last, None, None, *wide, None))]
    arguments = [*sequences_and_strides, *_tensors(states), *others]
    done = 0
    if launches.chunks > 1:
        boundaries = launches.boundaries()
        # The first pass starts its chunks from zero: its states are not the result, and are not saved.
        unsaved = [*sequences_and_strides, *_tensors([None] * trace.states), *others]
        launches.steps(unsaved, boundaries, backward=False, compose=True)()
        launches.link(boundaries, -1.0)()
        tolerance = torch.finfo(launches.compute).eps
        compose = launches.steps(arguments, boundaries, backward=False, compose=True)
        passes = compose, launches.link(boundaries, tolerance)
        for _ in range(PASSES):
            for launch in passes:
                launch()
        done = boundaries.done
    launches.steps(arguments, _NOWHERE._replace(done=done), backward=False, chunks=1)()
    return states, last


def steps_backward(
    call: Call,
    states: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    grads_last: Sequence[Tensor | None],
    grad_sequences: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor] | None]:
    """Gradients of the parameters, (parameters, D), in at least float32, and of the initial states.

    The latter are None if the call has none.  Gradients of the sequences are written to ``grad_sequences``.
    """
    trace, sequences, parameters, h0, order = call
    inputs = _with_equal_strides(sequences)
    like = inputs[0]
    grads_last = [None if x is None else x.contiguous() for x in grads_last]
    initial = [None] * trace.states if h0 is None else [x.to(like.dtype).contiguous() for x in h0]
    grad_initial = [
        None if x is None else last_state(like, g, order, 0.0) for x, g in zip(initial, grads_last, strict=True)
    ]
    wide, states, grads = _widened(parameters, like), _with_equal_strides(states), _with_equal_strides(grads)
    launches = _Launches(trace, like, order, (like, states[0], *grads, grad_sequences[0]))
    # The parameters' gradients of each chunk, then of the channels that are run in one chunk.  Zeros, as not all are
    # written: a short sequence has fewer chunks.
    rows = launches.sequences * (launches.chunks + (launches.chunks > 1))
    sums = like.new_zeros(rows, len(wide), like.shape[2], dtype=wide[0].dtype)
    arguments = [number for alike in (inputs, states, grads, grad_sequences) for number in _tensors(alike)]
    arguments += map(address, (*initial, *[None] * trace.states, *grads_last, *grad_initial, *wide))
    done = 0
    if launches.chunks > 1:
        boundaries = launches.boundaries()
        launches.steps([*arguments, 0], boundaries._replace(start=0, done=0), backward=True, compose=True)()
        launches.link(boundaries, math.inf)()
        launches.steps([*arguments, sums.data_ptr()], boundaries, backward=True, chosen=1)()
        done = boundaries.done
    unchunked_sums = sums[-launches.sequences :].data_ptr()
    launches.steps([*arguments, unchunked_sums], _NOWHERE._replace(done=done), backward=True, chunks=1)()
    return sums.sum(0)[: len(parameters)], None if h0 is None else grad_initial  # type: ignore[return-value]


def _with_equal_strides(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, copied unless all have the same strides and contiguous channels."""
    present = [x for x in tensors if x is not None]
    if len({x.stride() for x in present}) == 1 and along_channels(present[0]) is present[0]:
        return list(tensors)
    return [None if x is None else x.contiguous() for x in tensors]


def _widened(parameters: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """The parameters, in at least float32; any tensor if there are none, as the kernel's array is never empty."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return [x.to(dtype).contiguous() for x in parameters] or [like]


class _Boundaries(NamedTuple):
    """The addresses of the workspace that chunks communicate through: see ``Arguments`` in ``steps.cu``."""

    start: int
    end: int
    slope: int
    done: int
    memory: Tensor | None  # the workspace


_NOWHERE = _Boundaries(0, 0, 0, 0, None)


class _Launches:
    """Prepares the kernel launches of a call, and chooses the number of chunks along time.

    ``tensors`` has one of each kind that the kernels address: if any is large, all offsets are 64-bit.
    """

    def __init__(
        self,
        trace: Trace,
        like: Tensor,
        order: Order,
        tensors: Sequence[Tensor | None],
    ) -> None:
        cu_seqlens, resets, reverse = order
        self.length, self.channels = like.shape[1:]
        self.sequences = order.sequences(like)
        self.chunks = choose_chunks(self.sequences * self.channels, self.length)
        self.compute = torch.promote_types(like.dtype, torch.float32)
        self._trace, self._like, self._reverse = trace, like, int(reverse)
        self._bounds = address(cu_seqlens)
        self._marks = address(resets), *((0, 0) if resets is None else resets.stride())
        # Each group of AHEAD steps starts at an aligned byte of the mask if these are all multiples of AHEAD.
        starts = self._marks[0] | self._marks[1] | self.length | -(-self.length // self.chunks)
        adjacent = self._marks[2] == 1 and not reverse and cu_seqlens is None and starts % AHEAD == 0
        self._resets = 0 if resets is None else 1 + adjacent
        self._long_offsets = any(x is not None and _needs_long_offsets(x) for x in tensors)
        # Several states do not fit into as few registers.
        self._dense = self.chunks > 1 and trace.states == 1 and like.dtype != torch.float64

    def compile_ahead(self) -> None:
        """Begin to compile the kernels that follow the first, in other threads."""
        how = self._resets, self._long_offsets, self._dense
        chunked, differentiated = self.chunks > 1, eager.current_call.differentiated
        _compile_ahead(self._trace, self._like.get_device(), chunked, differentiated, self._like.dtype, *how)

    def boundaries(self) -> _Boundaries:
        """A workspace for all chunks, filled with zeros.

        It holds the chunks' initial and final states, the derivatives of the final with respect to the initial ones,
        and a flag for each channel that is done.
        """
        states = self._trace.states
        size = self.sequences * self.chunks * states * self.channels
        marks = -(-self.sequences * self.channels // self.compute.itemsize)
        memory = self._like.new_zeros((2 + states) * size + marks, dtype=self.compute)
        start, size = memory.data_ptr(), size * self.compute.itemsize
        return _Boundaries(start, start + size, start + 2 * size, start + (2 + states) * size, memory)

    def steps(
        self,
        arguments: Sequence[int],
        boundaries: _Boundaries,
        *,
        backward: bool,
        compose: bool = False,
        chunks: int | None = None,
        chosen: int = 0,
    ) -> Callable[[], None]:
        """A function that launches the kernel which runs the steps of all chunks.

        Args:
            arguments: the fields of ``Arguments`` in ``steps.cu`` up to the gradients of parameters.
            boundaries: the workspace of the chunks.
            backward: whether gradients are computed rather than states.
            compose: whether each chunk computes its final states and their derivatives with respect to its initial
                ones, for `link`.
            chunks: the number of chunks, if it is not ``self.chunks``.
            chosen: the value of `boundaries.done` for the channels that are run.
        """
        chunks = chunks or self.chunks
        numbers = *arguments, self._bounds, *self._marks, *boundaries[:4]
        sizes = self.sequences, self.length, self.channels, self._reverse, chunks, -(-self.length // chunks), chosen
        settings = macros(self._like.dtype, backward, compose, self._resets, self._long_offsets, self._dense)
        packed = struct.pack(f"{len(numbers)}q7i", *numbers, *sizes)
        return self._launch("steps", settings, self.sequences * chunks, packed)

    def link(self, boundaries: _Boundaries, tolerance: float) -> Callable[[], None]:
        """A function that launches one Newton update of the chunks' initial states, which marks converged channels."""
        number = "d" if self.compute == torch.float64 else "f"
        sizes = self.sequences, self.length, self.channels, self.chunks, -(-self.length // self.chunks)
        packed = struct.pack(f"5Q{number}5i", *boundaries[:4], self._bounds, tolerance, *sizes)
        settings = macros(self._like.dtype, backward=False, compose=True, dense=self._dense)
        return self._launch("link", settings, self.sequences, packed)

    def _launch(self, name: str, settings: Macros, tasks: int, packed: bytes) -> Callable[[], None]:
        device = self._like.get_device()
        kernel = nvrtc.load_kernel(name, source(self._trace), settings, device)
        return functools.partial(kernel.launch, device, tasks * -(-self.channels // THREADS), THREADS, packed)


def _tensors(alike: Sequence[Tensor | None]) -> list[int]:
    """The fields of ``Tensors`` in ``steps.cu``: the addresses of tensors with equal strides, then two strides."""
    first = next((x for x in alike if x is not None), None)
    return [*map(address, alike), *((0, 0) if first is None else first.stride()[:2])]


def _needs_long_offsets(x: Tensor) -> bool:
    """Whether 32 bits are too few for the offset of the last element."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) >= 1 << 31
