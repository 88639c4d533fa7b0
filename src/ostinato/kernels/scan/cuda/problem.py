"""The description of a scan: all that its launch depends on except addresses, and what the choice of a kernel needs."""

import functools
import itertools
import operator
from typing import Any, NamedTuple

import torch

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.scan.cuda.heuristics.criteria import Criteria, Device
from ostinato.kernels.scan.cuda.heuristics.narrow import sequences_joined

Strides = tuple[int, int, int]  # over batch, time and direction; channels are contiguous


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
    sequences: int = 0  # how many are packed in one by cu_seqlens
    resets: Strides | None = None  # the strides of the mask of resets, if there is one
    period: int = 0  # the steps of each of the sequences that are joined in one, or 0
    parameters: int = 0  # parameters of each channel
    parameter_direction: int = 0  # the stride of the parameters over directions
    code: str = ""  # the CUDA C++ of a generated element, which ``elements.cuh`` does not have

    @property
    def backward(self) -> bool:
        return self.element.endswith("Backward")

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def row_strides(self) -> list[int]:
        """The stride over time of each input and output."""
        return [time for _, time, _ in (*self.inputs, *self.outputs)]


@functools.cache
def describe_device(index: int) -> Device:
    """The properties of the GPU of this index."""
    properties: Any = torch.cuda.get_device_properties(index)
    return Device(
        properties.multi_processor_count,
        nvrtc.memory_bandwidth(index),
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
        properties.major >= 9,
    )


def criteria_of(problem: Problem, alignment: int) -> Criteria:
    """What the choice of a geometry depends on; `alignment` has the low bits of all addresses."""
    itemsize, rows = problem.dtype.itemsize, problem.row_strides
    counts = problem.batch, problem.steps, problem.directions
    numbers = itertools.chain([problem.channels, alignment // itemsize], *problem.inputs, *problem.outputs)
    units = functools.reduce(operator.or_, numbers)  # its lowest set bit is the alignment of vector accesses
    return Criteria(
        problem.element,
        len(problem.inputs),
        itemsize,
        aligned=min(units & -units, 16 // itemsize),
        contiguous=problem.packing != "OFFSETS" and all(row == problem.channels for row in rows),
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
    """The problem with sequences that follow one another in memory joined into fewer; None if that does not pay off.

    Their initial states are zero.  A joined problem is not joined again, as its period would be lost.
    """
    tensors = *problem.inputs, *problem.outputs, *([problem.resets] if problem.resets else [])
    adjacent = all(sequence == problem.steps * time for sequence, time, _ in tensors)
    if problem.period or problem.packing != "DENSE" or problem.batch < 2 or problem.directions > 1 or not adjacent:
        return None
    joined = sequences_joined(criteria_of(problem, 0))
    if joined == 1:
        return None

    def joined_strides(strides: Strides) -> Strides:
        return strides[0] * joined, *strides[1:]

    return problem._replace(
        batch=problem.batch // joined,
        steps=problem.steps * joined,
        inputs=tuple(map(joined_strides, problem.inputs)),
        outputs=tuple(map(joined_strides, problem.outputs)),
        resets=problem.resets and joined_strides(problem.resets),
        period=problem.steps,
    )
