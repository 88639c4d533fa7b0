"""One layer and direction of an RNN, GRU or LSTM on an NVIDIA GPU, forward and backward in time.

Weights are read from the parameters at every launch; only what depends on masks and sizes is cached between calls.
"""

import functools
import operator
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.kernels import nvrtc
from ostinato.kernels.derived import derived_from
from ostinato.kernels.persistent.costs import (
    SMALL,
    microseconds,
    microseconds_of_more_products,
    torchs_microseconds,
)
from ostinato.kernels.persistent.cuda_step import StepOfLayers as StepOfLayers
from ostinato.kernels.persistent.cuda_step import step_of as step_of
from ostinato.kernels.persistent.geometry import THREADS, Geometry, files
from ostinato.kernels.persistent.packing import Packing, pack
from ostinato.kernels.persistent.plan import GATES, Call, Plan, no_kernel
from ostinato.kernels.persistent.search import choose_geometry
from ostinato.kernels.streams import launch_stream

_POINTERS = (
    *("weight", "bias", "index", "places", "spans", "packed", "states", "offsets", "failure", "pre", "h0", "c0"),
    *("output", "cells", "gates", "candidates", "h_n", "c_n", "candidate", "h", "grad_output", "grad_h_n"),
    *("grad_c_n", "grads", "grad_h0", "grad_c0", "resets", "marks", "totals"),
)
_NOWHERE = dict.fromkeys(_POINTERS, 0)
_IN_PAIRS = {"pre", "h0", "cells", "candidate", "h", "grad_output"}  # loaded two numbers at a time, aligned
_PARAMETERS = struct.Struct(f"{len(_POINTERS)}Q6i")
UNITS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}  # of a copy, by bytes
UNITS_OF_THREAD = 4  # of a copy, at once
LEAST_STEPS = 4  # below this, launches per step cost the host no more than a persistent kernel's


class Geometries(NamedTuple):
    """``Plan.geometry`` of these kernels."""

    forward: Geometry
    backward: Geometry | None  # None without training


def make_plan(
    call: Call,
    mask_hh: Tensor | None,
    block: tuple[int, int] | None,
    tf32: tuple[bool, bool] = (False, False),
    distributed: bool = True,
) -> Plan:
    """How to run a layer.

    Args:
        call: of the layer.
        mask_hh: of the recurrent weights; None if the layer is dense.
        block: the shape of pruned blocks.
        tf32: whether products of float32 may round to tf32, ours and those in cuDNN's layers.
        distributed: whether states may stay in the shared memory of clusters.

    Raises RuntimeError for what another call may not meet, such as a lack of free memory.
    """
    device, cell, hidden_size, batch, dtype, training, steps, path, directions, resets, packed = call
    if steps is not None and steps < LEAST_STEPS and not resets:
        return no_kernel(f"{steps} steps are too few to be worth a kernel of their own")
    index = torch.cuda.current_device() if device.index is None else device.index
    kept = None if mask_hh is None else derived_from(mask_hh, "kept", lambda: int(mask_hh.sum()))
    layer = cell, hidden_size, batch, dtype, kept, block
    exact = not tf32[0] or hidden_size <= SMALL or batch == 1  # where cuDNN does not round either
    plan = min(
        (_plan_sizes(layer, index, path, training, exact, share, distributed) for share in {1, directions}),
        key=lambda plan: (plan.path == "steps", _microseconds(plan, batch, directions, index)),
    )
    keeps = training and keeps_gates(cell)
    if plan.path != "steps" and path is None and not resets:
        ours = _microseconds(plan, batch, directions, index)
        ours += directions * microseconds_of_more_products(call, tf32)
        torchs = directions * torchs_microseconds(call, tf32[1])
        if ours > torchs:
            return no_kernel(f"about {ours:.0f} microseconds a step, where torch's kernels take about {torchs:.0f}")
    try:  # residency is known only to the device, and sparse sizes only after packing
        used = [geometry for geometry in plan.geometry or () if geometry is not None]
        if mask_hh is not None:
            used = [_packed(geometry, mask_hh) for geometry in used]
        _compile(index, resets, packed, keeps, *used)
    except (MemoryError, nvrtc.DoesNotCompile) as error:
        if distributed and any(geometry and geometry.distributed for geometry in plan.geometry):
            return make_plan(call, mask_hh, block, tf32, distributed=False)
        return no_kernel(str(error).partition("\n")[0])._replace(bytes_available=plan.bytes_available)
    return plan


@functools.lru_cache(4096)
def _plan_sizes(
    layer: tuple, index: int, path: str | None, training: bool, exact: bool, share: int, distributed: bool
) -> Plan:
    """The plan by sizes alone, on a fraction 1 / `share` of the device."""
    choose: Any = choose_geometry
    layer = *layer, torch.cuda.get_device_properties(index), share
    how = {"exact": exact, "distributed": distributed}
    forward: Plan = choose(*layer, path, **how)
    if forward.path == "steps" or not training:
        return forward._replace(geometry=forward.geometry and Geometries(forward.geometry, None))
    backward: Plan = choose(*layer, backward=True, **how)
    if backward.path == "steps":
        return backward
    return forward._replace(geometry=Geometries(forward.geometry, backward.geometry))


def _microseconds(plan: Plan, batch: int, directions: int, index: int) -> float:
    """The estimated time of a step of all directions: concurrent if they fit, else serial."""
    processors, total = torch.cuda.get_device_properties(index).multi_processor_count, 0.0
    for geometry in plan.geometry or ():
        if geometry is not None:
            together = geometry.blocks * geometry.groups * directions <= processors
            total += microseconds(geometry, batch) * (1 if together else directions)
    return total


def _packed(geometry: Geometry, mask: Tensor) -> Geometry:
    """The geometry with as many tiles as the mask needs."""
    return geometry if geometry.path == "dense" else packing_of(mask, geometry).geometry


def forward(
    projected: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weight_hh: Tensor,
    bias_hh: Tensor | None,
    mask_hh: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    batch: int,
    cell: str,
    reverse: bool,
    plan: Plan,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """All steps of a layer; see :mod:`ostinato.kernels.persistent.reference`.

    With ``keep``, where :func:`keeps_gates`, `projected` is overwritten with the backward's `pre`, and c is a GRU's
    `candidate`.

    Raises RuntimeError if an earlier launch on the device failed.
    """
    geometry, rows, lstm = plan.geometry.forward, projected.shape[0], cell == "lstm"
    hidden = geometry.hidden_size
    tensors = {
        "output": projected.new_empty(rows, hidden),
        "h_n": projected.new_empty(batch, hidden),
        "c_n": projected.new_empty(batch, hidden) if lstm else None,
        "cells": None,
    }
    gates = projected if keep and keeps_gates(cell) else None
    if keep and (lstm or gates is not None):
        tensors["cells"] = projected.new_empty(rows, hidden, dtype=torch.float32 if lstm else projected.dtype)
    results = tuple(tensors.values())
    tensors |= {"pre": projected, "h0": h0, "c0": c0, "weight": weight_hh, "bias": bias_hh}
    tensors |= {"gates": gates, "candidates": tensors["cells"], "offsets": offsets, "resets": resets}
    _launch(geometry, mask_hh, batch, reverse, tensors)
    return results  # type: ignore[return-value]


def keeps_gates(cell: str) -> bool:
    """Whether the forward saves all gates' pre-activations instead of recomputing them in the backward.

    Recomputation takes two of a training step's six large GEMMs, or, in small layers, of the host's launches.  An RNN
    needs only its states.
    """
    return GATES[cell] > 1


def backward(
    pre: Tensor,
    candidate: Tensor | None,
    h: Tensor | None,
    h0: Tensor | None,
    c: Tensor | None,
    c0: Tensor | None,
    weight_hh: Tensor,
    mask_hh: Tensor | None,
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    batch: int,
    cell: str,
    reverse: bool,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The gradients of all steps; see :mod:`ostinato.kernels.persistent.reference`.

    Raises RuntimeError if an earlier launch on the device failed.
    """
    geometry, rows, lstm = plan.geometry.backward, pre.shape[0], cell == "lstm"
    hidden = geometry.hidden_size
    width = (1 if cell.startswith("rnn") else 4) * hidden
    tensors = {
        "grads": pre.new_empty(rows, width),
        "grad_h0": pre.new_empty(batch, hidden),
        "grad_c0": pre.new_empty(batch, hidden) if lstm else None,
        "totals": pre.new_empty(batch, width, dtype=torch.float32),
    }
    results = tuple(tensors.values())
    tensors |= {"pre": pre, "weight": weight_hh, "h0": h0, "c0": c0, "candidate": candidate, "h": h, "cells": c}
    tensors |= {"grad_output": grad_output, "grad_h_n": grad_h_n, "grad_c_n": grad_c_n}
    tensors |= {"offsets": offsets, "resets": resets}
    _launch(geometry, mask_hh, batch, reverse, tensors)
    return results  # type: ignore[return-value]


def previous(
    rows: Tensor,
    first: Tensor | None,
    offsets: Tensor | None,
    batch: int,
    reverse: bool,
    resets: Tensor | None = None,
) -> Tensor:
    """The state before each step, in one launch; see :mod:`ostinato.kernels.persistent.reference`."""
    rows, first = rows.contiguous(), None if first is None else first.to(rows.dtype).contiguous()
    resets = None if resets is None else resets.contiguous()
    steps = len(rows) // batch if offsets is None else len(offsets) - 1
    before = torch.empty_like(rows)
    addresses = [0 if x is None else x.data_ptr() for x in (rows, first, before, offsets, resets)]
    size = rows.shape[1] * rows.itemsize
    unit = functools.reduce(operator.or_, addresses[:3], size | max(UNITS))
    unit &= -unit  # the bytes that all are multiples of
    parts = -(-batch * size // (unit * THREADS * UNITS_OF_THREAD))
    source, device = nvrtc.source("persistent/previous.cu"), rows.get_device()
    kernel = nvrtc.load_kernel("previous", source, macros_of_copy(unit), device)
    parameters = struct.pack("5Q5i", *addresses, steps, batch, size // unit, parts, int(reverse))
    kernel.launch(device, steps * parts, THREADS, parameters)
    return before


def macros_of_copy(unit: int) -> tuple[tuple[str, object], ...]:
    """The preprocessor definitions for ``previous.cu``."""
    return ("UNIT", UNITS[unit]), ("THREADS", THREADS), ("AHEAD", UNITS_OF_THREAD)


def gradients_of_biases(totals: Tensor, dtype: torch.dtype, cell: str) -> tuple[Tensor, Tensor]:
    """Both in one launch; see :mod:`ostinato.kernels.persistent.reference`."""
    batch, width = totals.shape
    shift = width // 4 if cell == "gru" else 0
    of_ih, of_hh = (totals.new_empty(width - shift, dtype=dtype) for _ in range(2))
    addresses = totals.data_ptr(), of_ih.data_ptr(), of_hh.data_ptr()
    device = totals.get_device()
    parameters = struct.pack("3Q3i", *addresses, batch, width, shift)
    _kernel_of_biases(dtype, device).launch(device, -(-width // 32), 256, parameters)
    return of_ih, of_hh


@functools.cache
def _kernel_of_biases(dtype: torch.dtype, device: int) -> nvrtc.Kernel:
    return nvrtc.load_kernel("biases", *source_of_biases(dtype), device)


def source_of_biases(dtype: torch.dtype) -> tuple[str, tuple[tuple[str, object], ...]]:
    """CUDA C++ and its preprocessor definitions."""
    macros = ("SCALAR", nvrtc.SCALARS[dtype]), ("VEC", 1)
    return nvrtc.source("numeric.cuh", "persistent/biases.cu"), macros


class _Kernels(NamedTuple):
    prepare: nvrtc.Kernel
    recur: nvrtc.Kernel
    processors: int


@functools.cache
def kernels(
    geometry: Geometry, device: int, resets: bool = False, packed: bool = False, keeps: bool = False
) -> _Kernels:
    """The compiled kernels of a geometry, specialised as its :meth:`~Geometry.macros`.

    Raises MemoryError if the device cannot hold all blocks at once.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    compiled = (nvrtc.source(*files(geometry)), geometry.macros(resets, packed, keeps), device)
    if geometry.backward:
        nvrtc.compile_ahead(*source_of_biases(geometry.dtype), device)
    prepare, recur = (nvrtc.load_kernel(name, *compiled, geometry.feature) for name in ("prepare", "recur"))
    resident = recur.resident_blocks(device, geometry.threads, geometry.shared_bytes, geometry.blocks_of_a_cluster)
    blocks = geometry.blocks * geometry.groups
    if resident < blocks:
        raise MemoryError(f"the {_name(geometry)} needs {blocks} resident blocks; the device holds {resident}")
    return _Kernels(prepare, recur, properties.multi_processor_count)


def _compile(device: int, resets: bool, packed: bool, keeps: bool, *geometries: Geometry) -> None:
    """Compile the kernels of a layer at the same time; as :func:`kernels`."""
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(kernels, g, device, resets, packed, keeps and not g.backward) for g in geometries]
    for kernel in found:
        kernel.result()


def packing_of(mask: Tensor, geometry: Geometry) -> Packing:
    """The packing of a mask for a geometry, cached until the mask changes.

    Raises MemoryError if the mask is so uneven that the weights do not fit on chip.
    """

    def make() -> Packing:
        properties: Any = torch.cuda.get_device_properties(mask.device)
        packing = pack(mask, geometry, properties.shared_memory_per_block_optin)
        if not torch.cuda.is_current_stream_capturing():  # the next use may be on another stream
            torch.cuda.current_stream(mask.device).synchronize()
        return packing

    found: Packing = derived_from(mask, geometry, make)
    return found


class _Failure(NamedTuple):
    """A flag in pinned memory that a kernel sets on a timeout; the host reads it without synchronizing."""

    flag: np.ndarray  # of one number
    address: int


@functools.cache
def _failure(device: int) -> _Failure:
    flag = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
    return _Failure(flag.numpy(), flag.data_ptr())


def check(geometry: Geometry, device: int) -> None:
    """Raise RuntimeError if an earlier launch timed out waiting for another block; does not synchronize."""
    flag = _failure(device).flag
    if flag[0]:
        flag[0] = 0
        raise RuntimeError(f"a {_name(geometry)} waited in vain for another of its blocks; its output was NaN")


def _name(geometry: Geometry) -> str:
    direction = "backward" if geometry.backward else "forward"
    return f"persistent {geometry.path} {geometry.cell} {direction} kernel of {geometry.hidden_size} hidden units"


class _Launch(NamedTuple):
    """What of a launch depends only on sizes."""

    kernels: _Kernels
    bytes: dict[str, int]  # of memory for the launch alone
    fill: int  # blocks that prepare
    shared: int  # bytes of a block
    parts: tuple[tuple[int, int], ...]  # of the batch, one after the other: the first sequence, and blocks
    sizes: tuple[int, int, int, int]  # steps, batch, groups, and sequences of a group


@functools.lru_cache(4096)
def _launch_of(geometry: Geometry, device: int, steps: int, batch: int, *special: bool) -> _Launch:
    found, of_block = kernels(geometry, device, *special), geometry.columns * geometry.turns
    groups = -(-batch // of_block) * geometry.turns
    buffers = 0 if geometry.scatters else geometry.state_buffers or steps + (not geometry.backward)
    sizes = {
        "packed": geometry.tiles * geometry.tile_bytes * geometry.blocks,
        "states": buffers * groups * geometry.group_bytes,
    }
    if special[0]:
        sizes["marks"] = 4 * -(-steps // 32) * batch
    # A thread prepares 32 bytes, or one of 32 steps of a mark's four.
    fill = -(-max(sizes["packed"], sizes["states"], 256 * sizes.get("marks", 0)) // (32 * THREADS))
    fill = min(fill, 8 * found.processors)
    parts = [
        (first, geometry.blocks * min(geometry.groups, -(-(batch - first) // of_block)))
        for first in range(0, batch, geometry.sequences_at_once)
    ]
    sizes = {name: size for name, size in sizes.items() if size}
    numbers = steps, batch, groups, geometry.columns
    return _Launch(found, sizes, fill, geometry.shared_bytes, tuple(parts), numbers)


def _launch(geometry: Geometry, mask: Tensor | None, batch: int, reverse: bool, tensors: dict[str, Any]) -> None:
    """Run the kernel on tensors by the names of ``_POINTERS``, None for absent ones."""
    pre, offsets = tensors["pre"], tensors["offsets"]
    device = pre.get_device()
    check(geometry, device)
    steps = len(pre) // batch if offsets is None else len(offsets) - 1
    if mask is not None and geometry.path != "dense":
        packing = packing_of(mask, geometry)
        geometry = packing.geometry
        tensors |= {"index": packing.indices, "places": packing.places, "spans": packing.spans}
    special = tensors["resets"] is not None, offsets is not None, tensors.get("gates") is not None
    prepared = _launch_of(geometry, device, steps, batch, *special)
    addresses = _NOWHERE.copy()
    for name, x in tensors.items():
        if x is not None:
            address = x.data_ptr()
            if not x.is_contiguous() or (address & 7 and name in _IN_PAIRS and address % (2 * x.itemsize)):
                tensors[name] = x = x.clone(memory_format=torch.contiguous_format)
                address = x.data_ptr()
            addresses[name] = address
    for name, size in prepared.bytes.items():
        tensors[name] = memory = pre.new_empty(size, dtype=torch.uint8)
        addresses[name] = memory.data_ptr()
    addresses["failure"] = _failure(device).address
    stream, (prepare, recur, _) = launch_stream(device, tensors), prepared.kernels
    for first, blocks in prepared.parts:
        parameters = _PARAMETERS.pack(*addresses.values(), *prepared.sizes, first, int(reverse))
        if first == 0:
            prepare.launch(device, prepared.fill, THREADS, parameters, stream=stream)
        recur.launch(device, blocks, geometry.threads, parameters, prepared.shared, True, stream)
