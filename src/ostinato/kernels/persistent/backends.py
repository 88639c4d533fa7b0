"""The kernels of each device, imported lazily, and the plans by which they run layers, cached."""

import functools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.derived import derived_from
from ostinato.kernels.matmul.precision import layers_allow_tf32
from ostinato.kernels.persistent import reference
from ostinato.kernels.persistent.interface import Kernels, KernelsOfCPU, KernelsOfGPU, LayerStep, Step
from ostinato.kernels.persistent.masks import block_of
from ostinato.kernels.persistent.plan import GATES, Call, KernelPath, Plan, no_kernel

WAVEFRONT_DEVICES = ("cuda",)  # devices on which stacked layers can run at the same time


def kernels_on(device: torch.device) -> Kernels:
    """The module with a device's kernels, imported lazily; the reference on other devices."""
    return _kernels_on(device.type)


@functools.cache  # as an import statement takes longer than a step
def _kernels_on(device_type: str) -> Kernels:
    if device_type == "cuda":
        from ostinato.kernels.persistent import cuda

        kernels: KernelsOfGPU = cuda
        return kernels
    return _kernels_of_cpu() if device_type == "cpu" else reference


@functools.cache
def _kernels_of_cpu() -> KernelsOfCPU:
    from ostinato.kernels.persistent import cpu

    return cpu


def plan_layer(mask_hh: Tensor | None, call: Call) -> Plan:
    """The plan by which a layer and direction runs, cached by mask, or for all layers without one.

    Raises RuntimeError, which is not cached, where a later call may succeed, as after a lack of free memory.
    """
    key = call, layers_allow_tf32(call.device, call.dtype)
    return _plan_dense(*key) if mask_hh is None else derived_from(mask_hh, key, lambda: _plan(mask_hh, *key))


def _plan(mask_hh: Tensor | None, call: Call, tf32: bool) -> Plan:
    if call.device.type == "cuda" and (reason := nvrtc.why_no_cuda()):
        return no_kernel(reason)
    kernels = kernels_on(call.device)
    block = None if kernels is reference else _block(mask_hh, call)  # of a mask that may be on the meta device
    return kernels.make_plan(call, mask_hh, block, tf32)


def _block(mask_hh: Tensor | None, call: Call) -> tuple[int, int] | None:
    """The shape of a mask's pruned blocks, cached; None without a mask."""
    return None if mask_hh is None else derived_from(mask_hh, "block", lambda: block_of(mask_hh, GATES[call.cell]))


_plan_dense = functools.lru_cache(4096)(functools.partial(_plan, None))


def layers_at_once(mask_hh: Tensor | None, call: Call, layers: int) -> int:
    """How many of so many stacked layers run at the same time, cached like plans; ``call`` is that of one layer."""
    if layers == 1 or call.device.type not in WAVEFRONT_DEVICES or not nvrtc.can_launch():
        return 1
    key = call, layers_allow_tf32(call.device, call.dtype), layers
    return _dense_at_once(*key) if mask_hh is None else derived_from(mask_hh, key, lambda: _at_once(mask_hh, *key))


def as_gpu(kernels: Kernels) -> KernelsOfGPU:
    """Kernels of one of WAVEFRONT_DEVICES, cast to their type."""
    return cast(KernelsOfGPU, kernels)


def is_captured(device: torch.device) -> bool:
    """Whether kernels are being captured in a CUDA graph, so that more launches will cost the host nothing."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_launches(device: torch.device) -> None:
    """Raise RuntimeError if an earlier kernel on the GPU failed; does not wait for running ones."""
    as_gpu(kernels_on(device)).check(device.index)


def _at_once(mask_hh: Tensor | None, call: Call, tf32: bool, layers: int) -> int:
    kernels = as_gpu(kernels_on(call.device))
    return kernels.layers_at_once(call, layers, mask_hh, _block(mask_hh, call), tf32)


_dense_at_once = functools.lru_cache(4096)(functools.partial(_at_once, None))


@functools.lru_cache(4096)
def least_steps(device_type: str, cell: str, hidden_size: int, batch: int, dtype: torch.dtype, both: bool) -> int:
    """The least number of steps for our kernels: torch's run calls of fewer steps that have no resets.

    ``both``: whether the layer has both directions.
    """
    return _kernels_on(device_type).least_steps(cell, hidden_size, batch, dtype, both)


@functools.lru_cache(4096)
def most_single_steps(device_type: str, cell: str, hidden_size: int, batch: int, dtype: torch.dtype) -> int:
    """The most steps, without gradients, resets or masks, for which successive single steps are fastest."""
    return _kernels_on(device_type).most_single_steps(cell, hidden_size, batch, dtype)


def step_of(
    device: torch.device,
    cell: str,
    dtype: torch.dtype,
    hidden_size: int,
    input_size: int,
    batch: int,
    mask_ih: Tensor | None,
    mask_hh: Tensor | None,
    path: KernelPath | None,
) -> LayerStep | None:
    """One step of a layer without gradients, if the device has a kernel that is faster than torch's, else None."""
    return kernels_on(device).step_of(cell, dtype, hidden_size, input_size, batch, mask_ih, mask_hh, path)


def frozen_step(
    cell: str, batch: int, weights: list[Tensor], mask_ih: Tensor | None, mask_hh: Tensor | None
) -> LayerStep:
    """One step of a layer on the CPU with constant weights."""
    return _kernels_of_cpu().FrozenStep(cell, batch, weights, mask_ih, mask_hh)


def step_of_layers(
    device: torch.device, steps: Sequence[LayerStep], x: Tensor, state_shape: tuple[int, ...], states: int
) -> Step:
    """The steps of stacked layers, frozen or not, as one, for inputs like x and this number of states of this shape."""
    return kernels_on(device).StepOfLayers(steps, x, state_shape, states)


def gradients_of_step(
    cell: str,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> Sequence[Tensor | None]:
    """The gradients of one step of stacked layers on the CPU; see ``cpu/step_gradients.py``."""
    return _kernels_of_cpu().gradients_of_step(cell, x, states, weights, saved, grads, needed)
