"""Compiles and launches the kernels of a geometry on an NVIDIA GPU, with their workspace, and checks for failures."""

import functools
import itertools
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.cuda.streams import launch_stream
from ostinato.kernels.derived import derived_from
from ostinato.kernels.persistent.arguments import Layer
from ostinato.kernels.persistent.cuda import biases
from ostinato.kernels.persistent.cuda.heuristics.cells import Cell
from ostinato.kernels.persistent.cuda.heuristics.geometry import THREADS, Geometry
from ostinato.kernels.persistent.cuda.packing import Packing, pack
from ostinato.kernels.persistent.cuda.source import code, feature, macros

_POINTERS = (
    *("weight", "bias", "index", "places", "spans", "packed", "states", "offsets", "failure", "pre", "h0", "output"),
    *("cells", "gates", "candidates", "h_n", "candidate", "h", "grad_output", "grad_h_n", "grads", "grad_h0"),
    *("resets", "marks", "flags", "sums", "totals", "parameters", "before"),
)
_OF_ALL_HEADS = "offsets", "resets"
_OF_STATES_BESIDE_H = "c0", "c_n", "grad_c_n", "grad_c0", "c", "c_before", "grad_c"
_IN_PAIRS = {*("pre", "h0", "cells", "candidate", "h", "grad_output", "weight", "before", "c_before", "grad_c")}


class _Kernels(NamedTuple):
    """The compiled kernels of a geometry: the one that prepares the workspace, and the loop over time."""

    prepare: nvrtc.Kernel
    recur: nvrtc.Kernel
    processors: int


class _Parameters(NamedTuple):
    """The fields of ``Parameters`` in ``layout.cuh``."""

    pointers: dict[str, int]  # by name, all of them null
    in_pairs: frozenset[str]  # the pointers to numbers that are loaded two at a time, which must be aligned
    all: struct.Struct  # the pointers and the sizes


@functools.cache
def _parameters(beside: int) -> _Parameters:
    """The fields for cells with so many states beside h."""
    of_each = {name: names_beside_h(name, beside) for name in _OF_STATES_BESIDE_H}
    pointers = dict.fromkeys((*_POINTERS, *itertools.chain(*of_each.values())), 0)
    in_pairs = frozenset(itertools.chain(*(of_each.get(name, [name]) for name in _IN_PAIRS)))
    return _Parameters(pointers, in_pairs, struct.Struct(f"{len(pointers)}Q6i"))


def names_beside_h(name: str, count: int) -> list[str]:
    """The names of the tensors of so many states beside h, given that of the first."""
    return [f"{name}{k or ''}" for k in range(count)]


def most_heads(cell: Cell) -> int:
    """The most heads that one launch can compute: all have parameters of their own."""
    return nvrtc.most_parameter_bytes() // _parameters(cell.beside).all.size


@functools.cache
def kernels(geometry: Geometry, device: int, resets: bool, packed: bool, keeps: bool, directions: int = 1) -> _Kernels:
    """The compiled kernels of a geometry, for so many directions of a layer.

    The other arguments are those of :func:`~ostinato.kernels.persistent.cuda.source.macros`.

    Raises MemoryError if the blocks cannot all be resident on the device at once.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    rows = directions * geometry.heads_at_once
    compiled = (code(geometry), macros(geometry, resets, packed, keeps, rows), device)
    if geometry.backward and not geometry.cell.is_generated:
        nvrtc.compile_ahead(*biases.source(geometry.dtype), device)
    prepare, recur = (nvrtc.load_kernel(name, *compiled, feature(geometry)) for name in ("prepare", "recur"))
    resident = recur.resident_blocks(device, geometry.threads, geometry.shared_bytes, geometry.blocks_of_a_cluster)
    blocks = rows * geometry.blocks * geometry.groups
    if resident < blocks:
        raise MemoryError(f"the {_name(geometry)} needs {blocks} resident blocks; the device holds {resident}")
    return _Kernels(prepare, recur, properties.multi_processor_count)


@functools.cache  # every length of a layer is planned, and threads take longer to start than a step of a small layer
def compile_kernels(
    device: int, resets: bool, packed: bool, keeps: bool, directions: int, *geometries: Geometry
) -> None:
    """Compile the kernels of all passes of a layer at the same time; see :func:`kernels`."""
    with ThreadPoolExecutor() as pool:
        futures = [
            pool.submit(kernels, g, device, resets, packed, keeps and not g.backward, directions) for g in geometries
        ]
    for future in futures:
        future.result()


def packing_of(mask: Tensor, geometry: Geometry) -> Packing:
    """The packing of a mask for a geometry, cached until the mask changes.

    Raises MemoryError if the mask is so uneven that the weights do not fit on chip.
    """

    def make() -> Packing:
        properties: Any = torch.cuda.get_device_properties(mask.device)
        packing = pack(mask, geometry, properties)
        torch.cuda.current_stream(mask.device).synchronize()  # the next use may be on another stream
        return packing

    packing: Packing = derived_from(mask, geometry, make)
    return packing


class _Failure(NamedTuple):
    """A flag in pinned memory that a kernel sets on a timeout; the host reads it without synchronizing."""

    flag: np.ndarray  # with a single number
    address: int


@functools.cache
def _failure(device: int) -> _Failure:
    with nvrtc.permitted_in_captures():
        flag = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
    return _Failure(flag.numpy(), flag.data_ptr())


def check(device: int) -> None:
    """Raise RuntimeError if an earlier launch, of any layer, timed out waiting for a block; does not synchronize."""
    flag = _failure(device).flag
    if flag[0]:
        flag[0] = 0
        raise RuntimeError(
            f"an earlier persistent kernel on GPU {device} timed out waiting for one of its blocks; its output was NaN"
        )


def _name(geometry: Geometry) -> str:
    direction = "backward" if geometry.backward else "forward"
    return f"persistent {geometry.path} {geometry.cell.name} {direction} kernel of {geometry.hidden_size} hidden units"


class _Launch(NamedTuple):
    """The part of a launch that depends only on sizes."""

    kernels: _Kernels
    bytes: dict[str, int]  # of the workspace, by name
    fill: int  # blocks of the kernel that prepares the workspace
    shared: int  # bytes of shared memory per block
    parts: tuple[tuple[int, int], ...]  # of the batch, launched in turn: the first sequence, and the number of blocks
    sizes: tuple[int, int, int, int]  # steps, batch, groups, and sequences in a group


@functools.lru_cache(4096)
def _launch_of(
    geometry: Geometry, device: int, steps: int, batch: int, resets: bool, packed: bool, keeps: bool, directions: int
) -> _Launch:
    """The launch of a geometry for these sizes."""
    compiled = kernels(geometry, device, resets, packed, keeps, directions)
    block_sequences = geometry.columns * geometry.block_groups
    groups = -(-batch // block_sequences) * geometry.block_groups
    buffers = 0 if geometry.scatters else geometry.state_buffers or steps + 1
    sizes = {"states": buffers * groups * geometry.group_bytes}
    if geometry.wide:
        sizes["flags"] = 4 * groups * geometry.blocks
        sizes["sums"] = geometry.backward * groups * geometry.blocks * geometry.rows * geometry.columns * 4
    else:
        sizes["packed"] = geometry.tiles * geometry.tile_bytes * geometry.blocks
    if resets and not geometry.wide:
        sizes["marks"] = 4 * -(-steps // 32) * batch
    # A thread prepares 32 bytes of the workspace, or one bit of the marks: 4 bytes are 32 steps.
    fill = -(-max(*sizes.values(), 256 * sizes.get("marks", 0)) // (32 * THREADS))
    fill = min(fill, 8 * compiled.processors)
    parts = [
        (first, geometry.blocks * min(geometry.groups, -(-(batch - first) // block_sequences)))
        for first in range(0, batch, geometry.sequences_at_once)
    ]
    sizes = {name: size for name, size in sizes.items() if size}
    numbers = steps, batch, groups, geometry.columns
    return _Launch(compiled, sizes, fill, geometry.shared_bytes, tuple(parts), numbers)


def launch(geometry: Geometry, *directions: tuple[Layer, dict[str, Any]]) -> None:
    """Run the kernel of one pass, for one direction of a layer or for both, or for all heads of a recurrence.

    Each direction has its layer, and other tensors by their names in :func:`_parameters`, None for absent ones.
    """
    layer, tensors = directions[0]
    pre, (batch, offsets, resets, _) = tensors["pre"], layer.sequences
    device = pre.get_device()
    check(device)
    if layer.mask_hh is not None and geometry.path != "dense":  # then there is only one direction
        packing = packing_of(layer.mask_hh, geometry)
        geometry = packing.geometry
        tensors |= {"index": packing.indices, "places": packing.places, "spans": packing.spans}
    rows, keeps = len(directions) * geometry.heads_at_once, tensors.get("gates") is not None
    variant = resets is not None, offsets is not None, keeps, len(directions)
    prepared = _launch_of(geometry, device, layer.sequences.length(pre), batch, *variant)
    addresses = [head for direction in directions for head in _addresses(geometry, prepared, *direction)]
    stream, (prepare, recur, _) = launch_stream(device, directions), prepared.kernels
    pack_parameters = _parameters(geometry.cell.beside).all.pack
    for begin in range(0, len(addresses), rows):
        at_once = addresses[begin : begin + rows]
        for first, blocks in prepared.parts:
            parameters = b"".join(
                [pack_parameters(*pointers, *prepared.sizes, first, reverse) for pointers, reverse in at_once]
            )
            if first == 0:
                prepare.launch(device, prepared.fill, THREADS, parameters, stream=stream, rows=rows)
            recur.launch(device, blocks, geometry.threads, parameters, prepared.shared, True, stream, rows=rows)


def _addresses(
    geometry: Geometry, prepared: _Launch, layer: Layer, tensors: dict[str, Any]
) -> list[tuple[Iterable[int], bool]]:
    """The addresses of the kernel's parameters, and whether the direction is reversed, for each head.

    Adds to ``tensors`` all that must live until the kernels have been launched.
    """
    _, weight, _, _, h0, c0, (_, offsets, resets, reverse), packed_weights = layer
    tensors |= {"weight": weight, "h0": h0, "c0": c0, "offsets": offsets, "resets": resets}
    if packed_weights and geometry in packed_weights:  # an earlier launch has packed them
        tensors |= {"weight": None, "packed": packed_weights[geometry]}
    pre, (pointers, in_pairs, _) = tensors["pre"], _parameters(geometry.cell.beside)
    addresses = pointers.copy()
    for name, x in tensors.items():
        if x is not None:
            address = x.data_ptr()
            if not x.is_contiguous() or (address & 7 and name in in_pairs and address % (2 * x.itemsize)):
                tensors[name] = x = x.clone(memory_format=torch.contiguous_format)
                address = x.data_ptr()
            addresses[name] = address
    for name, size in prepared.bytes.items():
        if name not in tensors:
            tensors[name] = memory = pre.new_empty(geometry.heads * _head_bytes(size), dtype=torch.uint8)
            addresses[name] = memory.data_ptr()
    if packed_weights is not None and "packed" in tensors:
        packed_weights[geometry] = tensors["packed"]
    addresses["failure"] = _failure(pre.get_device()).address
    if geometry.heads == 1:
        return [(addresses.values(), reverse)]
    strides = dict.fromkeys(addresses, 0)  # bytes between heads
    for name, x in tensors.items():
        if x is None or name in _OF_ALL_HEADS:
            continue
        strides[name] = x.nbytes // geometry.heads if name == "weight" else geometry.hidden_size * x.itemsize
    strides |= {name: _head_bytes(size) for name, size in prepared.bytes.items()}
    return [([addresses[x] + k * strides[x] for x in addresses], reverse) for k in range(geometry.heads)]


def _head_bytes(size: int) -> int:
    """The bytes between two heads' parts of the workspace, of this size each, aligned as the kernels need."""
    return -(-size // 256) * 256
