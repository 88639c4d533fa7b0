"""Non-linear recurrences on NVIDIA GPUs: the kernels of ``steps.cu`` around a generated cell."""

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels import nvrtc
from ostinato.kernels.recurrence.graph import Graph
from ostinato.kernels.recurrence.print_cuda import lines_of, name_of
from ostinato.kernels.recurrence.trace import Trace
from ostinato.kernels.scan.cuda import SCALARS, along_channels, last_state

THREADS = 32  # of a block: one warp, so that few channels spread over all multiprocessors
AHEAD = 4  # steps whose loads are issued at once, half of that for float64; twice as many are in flight
RESIDENT = 32  # the most blocks that a multiprocessor holds, and about as many as PARALLEL threads make for each
CHANNELS = 1 << 14  # from which on all of time is one chunk
PARALLEL = 1 << 17  # threads that the chunks of fewer channels make, if these are long enough
SHORTEST = 64  # steps of a chunk
PASSES = 5  # at most after the first, before a channel that has not converged is run as one chunk
Macros = tuple[tuple[str, object], ...]
_CELL = """
struct Cell {{
    static constexpr int STATES = {states}, SEQUENCES = {sequences}, PARAMETERS = {parameters};
    static __device__ void forward(const Compute* h, const Compute* x, const Compute* parameter, Compute* next) {{
{forward}
    }}
    static __device__ void jacobian(const Compute* h, const Compute* x, const Compute* parameter, Compute* result) {{
{jacobian}
    }}
    static __device__ void backward(
        const Compute* h, const Compute* x, const Compute* parameter, const Compute* grad,
        Compute* grad_h, Compute* grad_x, Compute* grad_parameter
    ) {{
{backward}
    }}
}};
"""


@functools.lru_cache(maxsize=1024)
def print_cell(trace: Trace) -> str:
    """The struct that ``steps.cu`` walks along."""
    arguments = _places(trace, "x", "parameter")
    given = [f"h[{k}]" for k in range(trace.states)] + arguments
    gradients = [f"grad_h[{k}]" for k in range(trace.states)] + _places(trace, "grad_x", "grad_parameter")
    return _CELL.format(
        states=trace.states,
        sequences=sum(trace.sequences),
        parameters=trace.sequences.count(False),
        forward=_body(trace.forward, given, [f"next[{k}]" for k in range(trace.states)]),
        jacobian=_body(trace.jacobian, given, [f"result[{k}]" for k in range(trace.states**2)]),
        backward=_body(trace.backward, [*given, *(f"grad[{k}]" for k in range(trace.states))], gradients),
    )


def _places(trace: Trace, of_sequence: str, of_parameter: str) -> list[str]:
    """What each argument is called."""
    counts = {True: 0, False: 0}
    names = []
    for sequence in trace.sequences:
        names.append(f"{of_sequence if sequence else of_parameter}[{counts[sequence]}]")
        counts[sequence] += 1
    return names


def _body(graph: Graph, inputs: list[str], outputs: list[str]) -> str:
    results = (f"        {y} = {name_of(graph, i)};" for y, i in zip(outputs, graph.outputs, strict=True))
    return "\n".join([lines_of(graph, inputs), *results])


@functools.cache
def source(trace: Trace) -> str:
    return nvrtc.source("numeric.cuh") + print_cell(trace) + nvrtc.source("recurrence/steps.cu")


def macros(
    dtype: torch.dtype, backward: bool, compose: bool, resets: bool = False, far: bool = False, dense: bool = False
) -> Macros:
    """`dense` is for as many blocks as fit: in few registers, with fewer steps on their way, they all run at once."""
    names = ("SCALAR", "VEC", "BACKWARD", "COMPOSE", "RESETS", "OFFSET", "AHEAD", "RESIDENT")
    ahead = AHEAD // 2 if dense or dtype.itemsize == 8 else AHEAD
    offset, resident = "Index" if far else "int", RESIDENT if dense else 0
    values = SCALARS[dtype], 1, int(backward), int(compose), int(resets), offset, ahead, resident
    return tuple(zip(names, values, strict=True))


def choose_chunks(channels: int, steps: int) -> int:
    """The number of chunks along time, given the channels of all sequences in total."""
    if channels >= CHANNELS:
        return 1
    return max(1, min(PARALLEL // max(channels, 1), steps // SHORTEST))


def steps(
    trace: Trace,
    sequences: Sequence[Tensor],
    parameters: Sequence[Tensor],
    h0: Sequence[Tensor] | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """The states after every step, and those after the last."""
    inputs = _alike(sequences)
    like = inputs[0]
    initial = [None] * trace.states if h0 is None else [x.to(like.dtype).contiguous() for x in h0]
    states = [like.new_empty(like.shape) for _ in range(trace.states)]
    last = [last_state(y, first, cu_seqlens, 0.0) for y, first in zip(states, initial, strict=True)]
    wide = _widened(parameters, like)
    walk = _Walk.of(trace, like, cu_seqlens, resets, reverse)
    tensors = inputs, states, [None], [None]
    others = [*initial, *last, None, None, *wide, None]
    done = None
    if walk.chunks > 1:
        start, end, slope, done = walk.boundaries()
        # The first pass begins its chunks in zero, so that its states are no one's.
        guessed = inputs, [None] * trace.states, [None], [None]
        walk.launch(False, True, guessed, others, start, end, slope, done)
        walk.link(start, end, slope, done, -1.0)
        for _ in range(PASSES):
            walk.launch(False, True, tensors, others, start, end, slope, done)
            walk.link(start, end, slope, done, torch.finfo(start.dtype).eps)
    walk.one_chunk().launch(False, False, tensors, others, done=done)
    return states, last


def steps_backward(
    trace: Trace,
    sequences: Sequence[Tensor],
    parameters: Sequence[Tensor],
    h0: Sequence[Tensor] | None,
    states: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    grads_last: Sequence[Tensor | None],
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    of_sequences: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Gradients of the parameters, widened, and the initial states (None if there are none); writes those of the
    sequences."""
    inputs = _alike(sequences)
    like = inputs[0]
    given_last = [None if x is None else x.contiguous() for x in grads_last]
    initial = [None] * trace.states if h0 is None else [x.to(like.dtype).contiguous() for x in h0]
    grad_initial = [
        None if x is None else last_state(like, g, cu_seqlens, 0.0) for x, g in zip(initial, given_last, strict=True)
    ]
    wide = _widened(parameters, like)
    walk = _Walk.of(trace, like, cu_seqlens, resets, reverse)
    tensors = inputs, _alike(states), _alike(grads), of_sequences
    # Of each chunk, then of channels that are taken as one; zeros where nobody writes, as of chunks that a short
    # sequence lacks.
    rows = walk.sequences * (walk.chunks + (walk.chunks > 1))
    sums = like.new_zeros(rows, len(wide), like.shape[2], dtype=wide[0].dtype)
    others = [*initial, *[None] * trace.states, *given_last, *grad_initial, *wide]
    done = None
    if walk.chunks > 1:
        start, end, slope, done = walk.boundaries()
        walk.launch(True, True, tensors, [*others, None], None, end, slope)
        walk.link(start, end, slope, done, math.inf)
        walk.launch(True, False, tensors, [*others, sums], start, done=done, chosen=1)
    walk.one_chunk().launch(True, False, tensors, [*others, sums[-walk.sequences :]], done=done)
    of_parameters = list(sums.sum(0))[: len(parameters)]
    return of_parameters, None if h0 is None else grad_initial  # type: ignore[return-value]


def _alike(tensors: Sequence[Any]) -> list[Any]:
    """The same tensors with equal strides and contiguous channels."""
    some = [x for x in tensors if x is not None]
    if len({x.stride() for x in some}) == 1 and along_channels(some[0]) is some[0]:
        return list(tensors)
    return [None if x is None else x.contiguous() for x in tensors]


def _compute(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _widened(parameters: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    wide = _compute(like)
    return [x.to(wide).contiguous() for x in parameters] or [like]  # the kernel's array is never empty


class _Walk(NamedTuple):
    """How sequences are walked along, and the kernels that do."""

    trace: Trace
    like: Tensor  # a sequence
    cu_seqlens: Tensor | None
    resets: Tensor | None
    reverse: bool
    sequences: int
    chunks: int
    dense: bool

    @classmethod
    def of(cls, trace: Trace, like: Tensor, cu_seqlens: Tensor | None, resets: Tensor | None, reverse: bool) -> "_Walk":
        count = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        chunks = choose_chunks(count * like.shape[2], like.shape[1])
        dense = chunks > 1 and trace.states == 1 and like.dtype != torch.float64  # two states do not fit
        return cls(trace, like, cu_seqlens, resets, reverse, count, chunks, dense)

    def one_chunk(self) -> "_Walk":
        return self._replace(chunks=1)

    @property
    def chunk(self) -> int:
        """Steps of a chunk."""
        return -(-self.like.shape[1] // self.chunks)

    def boundaries(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What chunks begin and end in, the derivatives of the one with respect to the other, and which are done."""
        states, channels = self.trace.states, self.like.shape[2]
        shape = self.sequences, self.chunks, states, channels
        dtype = _compute(self.like)
        start = self.like.new_zeros(shape, dtype=dtype)
        slope = self.like.new_empty((*shape[:3], states, channels), dtype=dtype)
        done = start.new_zeros(self.sequences, channels, dtype=torch.uint8)
        return start, torch.empty_like(start), slope, done

    def launch(
        self,
        backward: bool,
        compose: bool,
        tensors: Sequence[Sequence[Tensor | None]],
        others: Sequence[Tensor | None],
        start: Tensor | None = None,
        end: Tensor | None = None,
        slope: Tensor | None = None,
        done: Tensor | None = None,
        chosen: int = 0,
    ) -> None:
        """Take all chunks through their steps: ``Arguments`` in their order, tensors with strides, others without."""
        numbers: list[int] = []
        far = False
        for alike in tensors:
            first = next((x for x in alike if x is not None), None)
            numbers += map(_address, alike)
            numbers += (0, 0) if first is None else first.stride()[:2]
            far |= first is not None and _last_offset(first) >= 1 << 31
        numbers += (_address(x) for x in (*others, self.cu_seqlens, self.resets))
        numbers += (0, 0) if self.resets is None else self.resets.stride()
        numbers += (_address(x) for x in (start, end, slope, done))
        _, length, channels = self.like.shape
        sizes = self.sequences, length, channels, int(self.reverse), self.chunks, self.chunk, chosen
        arguments = struct.pack(f"{len(numbers)}q7i", *numbers, *sizes)
        settings = macros(self.like.dtype, backward, compose, self.resets is not None, far, self.dense)
        self._launch("steps", settings, self.sequences * self.chunks, arguments)

    def link(self, start: Tensor, end: Tensor, slope: Tensor, done: Tensor, tolerance: float) -> None:
        """One Newton update of the chunks' initial states; marks converged channels as done."""
        addresses = [_address(x) for x in (start, end, slope, done, self.cu_seqlens)]
        _, length, channels = self.like.shape
        number = "d" if start.dtype == torch.float64 else "f"
        sizes = self.sequences, length, channels, self.chunks, self.chunk
        arguments = struct.pack(f"5Q{number}5i", *addresses, tolerance, *sizes)
        self._launch("link", macros(self.like.dtype, False, True, dense=self.dense), self.sequences, arguments)

    def _launch(self, name: str, settings: Macros, places: int, arguments: bytes) -> None:
        device, channels = self.like.get_device(), self.like.shape[2]
        kernel = nvrtc.load_kernel(name, source(self.trace), settings, device)
        kernel.launch(device, places * -(-channels // THREADS), THREADS, arguments)


def _last_offset(x: Tensor) -> int:
    """Of its elements, from the first."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
