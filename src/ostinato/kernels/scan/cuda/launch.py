"""Launching the scan kernel: how it is compiled for a problem, and the parameters of its launch.

The kernel is in ``scan.cu``, its operations are in ``elements.cuh``, and ``heuristics/`` chooses the launch geometry.
Every combination of operation, dtype and geometry is compiled on first use (:mod:`ostinato.kernels.cuda.nvrtc`).
"""

import functools
import itertools
import operator
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.cuda.nvrtc import SCALARS, Macros, address
from ostinato.kernels.operators import eager
from ostinato.kernels.scan.cuda.heuristics.choice import choose_geometry
from ostinato.kernels.scan.cuda.heuristics.geometry import Geometry, macros
from ostinato.kernels.scan.cuda.problem import Problem, criteria_of, join
from ostinato.kernels.scan.cuda.workspace import start_in_workspace

MAX_STEPS = (1 << 31) - (1 << 20)  # the kernel counts steps in 32 bits, up to a tile past the last one


class _Launch(NamedTuple):
    """A prepared launch of a problem."""

    start: Callable[..., None]  # takes the addresses, epoch and initial counter, the first members of ``Parameters``
    words: int  # the size of the workspace of chained blocks, in words of 8 bytes; 0 for streaming
    draws: int  # by how much a launch with look-back advances its counter
    sum_rows: int  # rows of partial sums for the gradients of the parameters


@functools.cache
def source(code: str = "") -> str:
    """The source of the scan kernel, with the code of a generated element."""
    before = nvrtc.source("cuda/numeric.cuh", "cuda/barriers.cuh", "scan/cuda/elements.cuh", "scan/cuda/messages.cuh")
    shapes, memory = ("tile.cuh", "composition.cuh", "place.cuh"), ("copies.cuh", "cluster.cuh", "shared.cuh")
    parts = (*shapes, *memory, "resets.cuh", "steps.cuh", "rescan.cuh", "chain.cuh", "scan.cu")
    return before + code + nvrtc.source(*(f"scan/cuda/{name}" for name in parts))


class _Kernel(NamedTuple):
    """How the kernel is compiled for a problem."""

    geometry: Geometry
    shared: int  # bytes of shared memory per block
    definitions: Macros
    processors: int  # multiprocessors of the GPU


@functools.lru_cache(maxsize=4096)  # called twice for a gradient: to compile it ahead, and to launch it
def _choose_kernel(problem: Problem, parameter_dtype: torch.dtype, alignment: int) -> _Kernel:
    """Choose the geometry, with as many rows as fit in shared memory, and the macros of the kernel.

    `alignment` has the low bits of all addresses.
    """
    criteria = criteria_of(problem, alignment)
    geometry, device, itemsize = choose_geometry(criteria), criteria.device, criteria.itemsize
    pitches = geometry.pitches(itemsize, problem.row_strides[: criteria.inputs], criteria.unaligned_rows)
    sums = problem.parameters if problem.backward else 0
    tensors = criteria.inputs, sums, itemsize, criteria.packed, criteria.resets, max(pitches)
    most = min(device.shared_of_block, device.shared // (geometry.resident if geometry.chained else 1) - 1024)
    while (shared := geometry.shared_bytes(*tensors)) > most:
        fewer = geometry.rows - 4 if geometry.looks_back and geometry.rows > 4 else geometry.rows // 2
        geometry = geometry._replace(rows=fewer)
    definitions = macros(
        problem.element,
        SCALARS[problem.dtype],
        SCALARS[parameter_dtype],
        problem.packing,
        geometry,
        shared,
        long_offsets=geometry.tile * itemsize * max(problem.row_strides) >= 1 << 31,
        copies_16_bytes=geometry.copies_16_bytes(itemsize, criteria.aligned),
        pitches=pitches,
    )
    if problem.resets is not None:
        definitions += (("MASK", 2 if problem.resets[1] == 1 else 1),)
    if problem.period:
        definitions += (("JOINED", 1),)
    if problem.directions == 1:
        if geometry.narrow:
            definitions += _addressing(problem, geometry, alignment)
        elif pitches[0] or geometry.mapped:  # makes the offsets of rows constants
            definitions += (("DESCENDING", int(problem.reverse != problem.backward)),)
    return _Kernel(geometry, shared, definitions, device.processors)


@functools.lru_cache(maxsize=4096)
def _prepare(problem: Problem, parameter_dtype: torch.dtype, alignment: int) -> _Launch:
    """Choose, compile and load the kernel, and pack its parameters; `alignment` has the low bits of all addresses."""
    if problem.steps > MAX_STEPS:
        raise ValueError(f"a GPU scans sequences of at most {MAX_STEPS} steps; got {problem.steps}")
    geometry, shared, definitions, processors = _choose_kernel(problem, parameter_dtype, alignment)
    itemsize = problem.compute.itemsize
    chunks = -(-problem.steps // geometry.tile)
    chains = problem.batch * problem.directions * -(-problem.channels // geometry.group)
    companions = geometry.companions(chains, chunks, itemsize, processors)
    blocks = chains * companions
    words = draws = 0
    if geometry.chained:
        tiles = chains * chunks
        words = 2 * (1 + tiles * geometry.group * itemsize // 4)  # the last 16 bytes are for a counter
    if geometry.looks_back:
        blocks = min(tiles, geometry.resident * processors)
        draws = tiles  # a block draws once for each tile that it scans; its last draw finds none left
    strides = *problem.inputs, *problem.outputs
    integers = [problem.parameter_direction, *(problem.resets or (0, 0, 0)), *itertools.chain(*strides)]
    counts = problem.batch, problem.steps, problem.channels, problem.sequences, problem.directions
    addresses = len(strides) + max(1, problem.parameters) + 8
    kernel = nvrtc.load_kernel("scan", source(problem.code), definitions, problem.device)
    varying = struct.Struct(f"={addresses}Q2I")
    end = problem.period, _reciprocal(problem.period), _outer(problem, geometry)
    rest = struct.pack(f"={1 + len(integers)}q7iIi", companions, *integers, *counts, problem.reverse, *end)
    pack: Callable[..., bytes] = varying.pack
    if geometry.mapped:
        pack = _with_maps(pack, problem, geometry)
        rest += bytes(-(varying.size + len(rest)) % 64)
    return _Launch(
        # The blocks of a chain wait for each other: a cooperative launch makes all of them resident.
        kernel.prepared(
            problem.device,
            blocks,
            geometry.threads,
            shared,
            pack,
            rest,
            cooperative=geometry.chained and (geometry.looks_back or companions > 1),
        ),
        words,
        draws,
        problem.batch * (chunks if geometry.looks_back else companions),
    )


def _reciprocal(period: int) -> int:
    """The factor with which the kernel divides steps by the period: ``factor * (2*step + 1) >> 32`` is the quotient.

    That is exact below 2^15 steps, and joined sequences have fewer.
    """
    return (1 << 31) // period if period else 0


def _outer(problem: Problem, geometry: Geometry) -> int:
    """How many of the first, and of the last, sequences have tiles that may extend beyond all sequences, if narrow.

    Any other tile that begins before its sequence, or ends after it, may be copied as a whole: other sequences are
    there.
    """
    stride = min(sequence for sequence, _, _ in problem.inputs)
    reach = geometry.tile * geometry.narrow + 16  # elements; alignment adds some
    return min(problem.batch, -(-reach // stride)) if stride else problem.batch


def _with_maps(pack: Callable[..., bytes], problem: Problem, geometry: Geometry) -> Callable[..., bytes]:
    """A function like `pack` that puts the inputs' tensor maps first; its first arguments are the inputs' addresses."""
    sizes = problem.channels, problem.steps, problem.batch, problem.directions
    box = geometry.group, geometry.segments * geometry.rows, 1, 1
    # A stride of 0, as a single step, sequence or direction may have, is not valid in a tensor map.
    strides = [(time or 16, batch or 16, direction or 16) for batch, time, direction in problem.inputs]

    def packed(*arguments: int) -> bytes:
        maps = (
            nvrtc.tensor_map(at, problem.dtype.itemsize, sizes, input_strides, box) if at else bytes(128)
            for at, input_strides in zip(arguments, strides, strict=False)
        )
        return b"".join(maps) + pack(*arguments)

    return packed


def _addressing(problem: Problem, geometry: Geometry, alignment: int) -> Macros:
    """Macros for what is known of the addresses of narrow sequences, on which most instructions are spent otherwise."""
    itemsize, descending = problem.dtype.itemsize, problem.reverse != problem.backward
    offsets = [geometry.tile // geometry.warps * problem.channels]
    if descending:
        offsets.append(problem.steps * problem.channels)
    if problem.batch > 1:
        offsets += [batch for batch, _, _ in (*problem.inputs, *problem.outputs)]
    aligned = geometry.chained and alignment == 0 and all(offset * itemsize % 16 == 0 for offset in offsets)
    return ("DESCENDING", int(descending)), ("ALIGNED", int(aligned)), ("SINGLE", int(problem.batch == 1))


class Scan:
    """Launches of a problem: the kernel is chosen once for each alignment of the addresses.

    ``gradient`` returns the scan that the backward pass will probably need.  Short sequences are joined and scanned as
    one where that is faster and they have no initial state.
    """

    def __init__(
        self,
        problem: Problem,
        parameter_dtype: torch.dtype | None = None,
        gradient: "Callable[[], Scan] | None" = None,
    ) -> None:
        self.problem, self._gradient = problem, gradient
        self._parameter_dtype = parameter_dtype or problem.dtype
        self._launches: dict[int, _Launch] = {}
        self._joined: Scan | None = None
        if (joined := join(problem)) is not None:
            self._joined = Scan(joined, parameter_dtype, gradient)
        self._sum_shape: tuple[int, ...] = ()  # of the parameters' gradients
        if problem.parameters and problem.backward:
            self._sum_shape = problem.directions, problem.parameters, problem.channels

    def launch(
        self, like: Tensor, addresses: Sequence[int], bounds: Tensor | None = None, resets: Tensor | None = None
    ) -> Tensor | None:
        """Launch the kernel on tensors given by their addresses, 0 for an absent one.

        These are, in order: the inputs (zero if absent), outputs and parameters (a single 0 if there are none), the
        state before the first step in scan order, where to write the state after the last, and, for a backward pass,
        the state before the first step in time.  A backward pass with parameters returns their gradients,
        (directions, parameters, channels), in the compute dtype.
        """
        if self._joined is not None:
            initial, last, first = addresses[-3:]
            if not (initial or first) and (last or self.problem.backward):  # a forward pass writes all last states
                return self._joined.launch(like, addresses, bounds, resets)
        alignment = functools.reduce(operator.or_, addresses) & 15
        launch = self._launches.get(alignment)
        if launch is None:
            if self._gradient is not None and eager.current_call.differentiated:
                self._gradient().compile_ahead(alignment, from_state=addresses[-3] != 0)
            launch = self._launches[alignment] = _prepare(self.problem, self._parameter_dtype, alignment)
        sums, optional = None, (0, 0, 0)
        if self._sum_shape:
            sums = like.new_empty((launch.sum_rows, *self._sum_shape), dtype=self.problem.compute)
        if sums is not None or bounds is not None or resets is not None:
            optional = address(sums), address(bounds), address(resets)
        arguments = *addresses, *optional
        if launch.words:
            start_in_workspace(launch.start, self.problem.device, launch.words, launch.draws, arguments)
        else:
            launch.start(*arguments, 0, 0, 0, 0)
        return None if sums is None else sums.sum(0)

    def compile_ahead(self, alignment: int, *, from_state: bool) -> None:
        """Start to compile the kernel of a gradient, for addresses with these low bits.

        `from_state` says whether the scan has an initial state.  The last state is assumed to have no gradient.
        """
        problem = self.problem if from_state or self._joined is None else self._joined.problem
        kernel = _choose_kernel(problem, self._parameter_dtype, alignment)
        nvrtc.compile_ahead(source(problem.code), kernel.definitions, problem.device)
