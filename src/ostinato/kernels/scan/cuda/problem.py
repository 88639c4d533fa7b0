"""What a scan is launched with, but for addresses; and what of that the choice of a kernel depends on."""

import functools
import itertools
import operator
from typing import Any, NamedTuple

import torch

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.scan.cuda.heuristics.criteria import Criteria, Device
from ostinato.kernels.scan.cuda.heuristics.narrow import sequences_joined

Strides = tuple[int, int, int]  # of batch, time and direction


class Problem(NamedTuple):
    """Everything that a launch depends on except the addresses."""

    element: str
    dtype: torch.dtype
    device: int
    batch: int
    steps: int
    channels: int
    inputs: tuple[Strides, ...]
    outputs: tuple[Strides, ...]
    directions: int = 1
    reverse: bool = False
    packing: str = "DENSE"
    sequences: int = 0  # packed in one by cu_seqlens
    resets: Strides | None = None  # of the mask
    period: int = 0  # steps of each of the sequences that are joined in one
    parameters: int = 0  # of each channel
    parameter_direction: int = 0  # their stride between directions
    code: str = ""  # of a generated element, if it is not one of ``elements.cuh``

    @property
    def backward(self) -> bool:
        return self.element.endswith("Backward")

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def row_strides(self) -> list[int]:
        """Elements from one step of each input and output to the next."""
        return [time for _, time, _ in (*self.inputs, *self.outputs)]


@functools.cache
def describe_device(index: int) -> Device:
    """The GPU of this index."""
    properties: Any = torch.cuda.get_device_properties(index)
    return Device(
        properties.multi_processor_count,
        nvrtc.memory_bandwidth(index),
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
        properties.major >= 9,
    )


def criteria_of(problem: Problem, alignment: int) -> Criteria:
    """What the choice of a geometry depends on; `alignment` has the low bits of every address."""
    itemsize, rows = problem.dtype.itemsize, problem.row_strides
    counts = problem.batch, problem.steps, problem.directions
    numbers = itertools.chain([problem.channels, alignment // itemsize], *problem.inputs, *problem.outputs)
    units = functools.reduce(operator.or_, numbers)  # its lowest set bit is the alignment of vector accesses
    return Criteria(
        problem.element,
        len(problem.inputs),
        itemsize,
        aligned=min(units & -units, 16 // itemsize),
        gapless=problem.packing != "OFFSETS" and all(row == problem.channels for row in rows),
        sequences=problem.batch * problem.directions,
        steps=problem.steps,
        channels=problem.channels,
        device=describe_device(problem.device),
        packed=problem.packing == "CU_SEQLENS",
        resets=problem.resets is not None,
        by_offsets=problem.packing == "OFFSETS",
        expanded=any(n > 1 and not stride for x in problem.inputs for n, stride in zip(counts, x, strict=True)),
    )


def join(problem: Problem) -> Problem | None:
    """The problem with several sequences, of which one begins where the other ends, as one; None if it stays as it is.

    Their states are zero at first.  What is joined stays as it is: its period would be lost.
    """
    tensors = *problem.inputs, *problem.outputs, *([problem.resets] if problem.resets else [])
    adjacent = all(sequence == problem.steps * time for sequence, time, _ in tensors)
    if problem.period or problem.packing != "DENSE" or problem.batch < 2 or problem.directions > 1 or not adjacent:
        return None
    joined = sequences_joined(criteria_of(problem, 0))
    if joined == 1:
        return None

    def of(strides: Strides) -> Strides:
        return strides[0] * joined, *strides[1:]

    return problem._replace(
        batch=problem.batch // joined,
        steps=problem.steps * joined,
        inputs=tuple(map(of, problem.inputs)),
        outputs=tuple(map(of, problem.outputs)),
        resets=problem.resets and of(problem.resets),
        period=problem.steps,
    )
