"""Reducing many steps of a linear recurrence to one without writing states, by ``compose.cu`` and ``pass_on.cu``.

A sequence that several GPUs share is scanned this way: each reduces its shard, and a state is carried through all
shards.
"""

import functools
import struct

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.cuda.nvrtc import SCALARS, Macros, address
from ostinato.kernels.scan.cuda.problem import describe_device
from ostinato.kernels.scan.cuda.scans import along_channels

THREADS = 512
AHEAD = 4  # steps whose loads are in flight at once
SHORTEST = 8 * AHEAD  # the fewest steps of a strip: with fewer, more tiles are not worth a second launch
BLOCKS = 8  # per multiprocessor
PASSING = 128  # threads per block of pass_on


def compose(
    a: Tensor, b: Tensor, resets: Tensor | None = None, *, reverse: bool = False, before: bool = False
) -> tuple[Tensor, Tensor]:
    """P and L, (B, D) in float64, such that all steps together take a state h to ``P * h + L``.

    A step is ``a * h + b``, or ``a * (h + b)`` with ``before``.  a and b are (B, T, D), in float32 or float64, on a
    GPU; a P that underflows in their dtype is zero.
    """
    a, b = along_channels(a), along_channels(b)
    batch, steps, channels = a.shape
    vector = _vector(a, b)
    lanes = min(32, _power_of_two(-(-channels // vector)))
    groups, strips = -(-channels // (lanes * vector)), THREADS // lanes
    wanted = max(BLOCKS * describe_device(a.device.index).processors // (groups * batch), 1)
    wanted = min(wanted, strips * SHORTEST)  # few enough for one block of the second launch
    tile = max(-(-steps // wanted), strips * SHORTEST, 1)
    tiles = max(-(-steps // tile), 1)
    P, L = torch.empty(2, batch, tiles, channels, dtype=torch.float64, device=a.device)
    least = 2.0**-150 if a.dtype == torch.float32 else 0.0
    strides = a.stride()[:2], b.stride()[:2], (0, 0) if resets is None else resets.stride()
    parameters = struct.pack(
        "5Qd6q7i",
        *map(address, (a, b, resets, P, L)),
        least,
        *(number for of_tensor in strides for number in of_tensor),
        *(batch, steps, channels, tile, tiles, reverse, before),
    )
    kernel = _kernel(a.dtype, vector, lanes, a.device.index)
    kernel.launch(a.device.index, batch * tiles * groups, THREADS, parameters)
    if tiles == 1:
        return P[:, 0], L[:, 0]
    return compose(P, L)


def pass_on(P: Tensor, L: Tensor, start: Tensor, of: int, reverse: bool) -> tuple[Tensor, Tensor]:
    """Carry the state ``start``, (B, D), through shards that are reduced to P and L, (R, B, D).

    Returns the state that enters shard ``of``, and the state after all shards, in the dtype of ``start``.  P and L are
    float64; with ``reverse``, the last shard comes first.
    """
    start = start.contiguous()
    before, last = torch.empty_like(start), torch.empty_like(start)
    numbers = start.numel()
    P, L = P.flatten(1), L.flatten(1)
    parameters = struct.pack(
        "5Qq4i",
        *(x.data_ptr() for x in (P, L, start, before, last)),
        P.stride(0),
        *(len(P), numbers, of, reverse),
    )
    kernel = _passing_kernel(start.dtype, start.device.index)
    kernel.launch(start.device.index, -(-numbers // PASSING), PASSING, parameters)
    return before, last


def _vector(a: Tensor, b: Tensor) -> int:
    """How many adjacent channels a thread loads at once: as many as all rows are aligned to, up to 16 bytes."""
    units = a.shape[2] | 16 // a.element_size()
    for x in (a, b):
        units |= x.stride(0) | x.stride(1) | (x.data_ptr() & 15) // x.element_size()
    return units & -units


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


@functools.cache
def macros(dtype: torch.dtype, vector: int, lanes: int) -> Macros:
    numbers = {"THREADS": THREADS, "AHEAD": AHEAD, "VEC": vector, "LANES": lanes}
    return (("SCALAR", SCALARS[dtype]), *numbers.items())


@functools.cache
def _kernel(dtype: torch.dtype, vector: int, lanes: int, device: int) -> nvrtc.Kernel:
    return nvrtc.load_kernel("compose", nvrtc.source("scan/cuda/compose.cu"), macros(dtype, vector, lanes), device)


@functools.cache
def _passing_kernel(dtype: torch.dtype, device: int) -> nvrtc.Kernel:
    code = nvrtc.source("cuda/numeric.cuh", "scan/cuda/pass_on.cu")
    return nvrtc.load_kernel("pass_on", code, (("SCALAR", SCALARS[dtype]), ("VEC", 1), ("THREADS", PASSING)), device)
