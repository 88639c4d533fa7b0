"""How a layer runs on an NVIDIA GPU: by the launch geometries of its passes, or by torch's kernels if faster."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.derived import derived_from
from ostinato.kernels.matmul import grouped
from ostinato.kernels.persistent.cuda import small
from ostinato.kernels.persistent.cuda.heuristics import cudnn
from ostinato.kernels.persistent.cuda.heuristics.costs import microseconds
from ostinato.kernels.persistent.cuda.heuristics.cudnn_costs import torchs_microseconds
from ostinato.kernels.persistent.cuda.heuristics.geometry import Geometry
from ostinato.kernels.persistent.cuda.heuristics.search import choose_geometry
from ostinato.kernels.persistent.cuda.launch import compile_kernels, packing_of
from ostinato.kernels.persistent.plan import GATES, Call, KernelPath, Plan, keeps_gates, no_kernel

# Microseconds that the host takes to launch our kernels of a layer without gradients.  cuDNN's kernels for small layers
# take less, with gradients too; but cuDNN's backward cannot be differentiated, so with gradients launches do not count.
LAUNCHES = 100.0
TORCHS_LAUNCHES = {False: 60.0, True: 250.0}  # at least, of torch's, by training; a replayed CUDA graph takes less


class Geometries(NamedTuple):
    """The launch geometries of both passes: ``Plan.geometry`` on these devices."""

    forward: Geometry
    backward: Geometry | None  # None without training


def least_steps(cell: str, hidden_size: int, batch: int, dtype: torch.dtype, both: bool) -> int:
    """The least number of steps for our kernels: torch's launches for fewer cost the host no more than ours.

    Calls with resets, or that are replayed, may have fewer steps.
    """
    return 1 if cudnn.errs(cell, hidden_size, batch, dtype, both) else 4


def make_plan(
    call: Call,
    mask_hh: Tensor | None,
    block: tuple[int, int] | None,
    tf32: bool = False,
    distributed: bool = True,
    in_one_launch: bool = True,
) -> Plan:
    """The plan by which a layer runs.

    Args:
        call: the call of the layer.
        mask_hh: the mask of the recurrent weights; None if the layer is dense.
        block: the shape of pruned blocks.
        tf32: whether products of float32 may round to tf32.
        distributed: whether states may stay in the shared memory of clusters.
        in_one_launch: whether one launch may run both directions.

    Raises RuntimeError where a later call may succeed, as after a lack of free memory.
    """
    sizes = call.cell, call.hidden_size, call.batch, call.dtype
    both, resets = call.bidirectional, call.resets
    least = least_steps(*sizes, both)
    if call.compared and call.length < least and not (resets or call.replayed):
        return no_kernel(f"weights are worth keeping on the chip for {least} steps or more")
    index = torch.cuda.current_device() if call.device.index is None else call.device.index
    plan = plan_sizes(call, mask_hh, block, tf32, distributed)
    keeps = call.training and keeps_gates(call.cell)
    is_compared = call.compared and call.path is None and not resets and not cudnn.errs(*sizes, both and call.training)
    if plan.has_kernel and is_compared and (reason := _why_torch(plan, call, mask_hh is not None, tf32)):
        return no_kernel(reason)
    directions = 2 if both and in_one_launch and mask_hh is None and _fits_at_once(plan, call) else 1
    try:  # only the device knows whether all blocks can be resident, and only packing the sizes of sparse formats
        used = [geometry for geometry in plan.geometry or () if geometry is not None]
        if mask_hh is not None:
            used = [_packed(geometry, mask_hh) for geometry in used]
        # The input is not known yet; assume that it is no wider than the hidden size.
        product = call.length * call.batch, GATES[call.cell] * call.hidden_size, call.hidden_size
        if used and small.is_small(index, call.dtype, *product, call.training, call.captured):
            nvrtc.compile_ahead(*grouped.source(call.dtype, tf32, grouped.cluster_of(index)), index)
        compile_kernels(index, resets, call.packed, keeps, directions, *used)
    except (MemoryError, nvrtc.DoesNotCompile) as error:
        if directions > 1:
            return make_plan(call, mask_hh, block, tf32, distributed, in_one_launch=False)
        if distributed and any(geometry and geometry.distributed for geometry in plan.geometry):
            return make_plan(call, mask_hh, block, tf32, False, in_one_launch)
        return no_kernel(str(error).partition("\n")[0], plan.bytes_available)
    return plan._replace(directions=directions)


def _why_torch(plan: Plan, call: Call, pruned: bool, tf32: bool) -> str | None:
    """Why torch's kernels are faster, if they are: because our kernels, or the host's launches of them, take longer.

    The plan of `pruned` layers must not depend on whether a CUDA graph captures them, as masks cannot be packed then.
    """
    processors = torch.cuda.get_device_properties(call.device).multi_processor_count
    ours, torchs = call.length * step_microseconds(plan, call), torchs_microseconds(call, tf32, processors)
    waits = cudnn.is_one_launch(call) and not (call.training or call.captured or call.replayed or pruned)
    host = call.at_once * LAUNCHES if waits else 0.0
    if call.replayed:
        torchs = max(torchs, TORCHS_LAUNCHES[call.training])
    if torchs >= max(ours, host):
        return None
    slower = f"launches take about {host:.0f} microseconds" if host > ours else f"about {ours:.0f} microseconds"
    steps = "many steps" if call.steps is None else f"{call.steps} steps"
    return f"{slower}, where torch's kernels take about {torchs:.0f} for {steps}"


def plan_sizes(
    call: Call, mask_hh: Tensor | None, block: tuple[int, int] | None, tf32: bool, distributed: bool = True
) -> Plan:
    """:func:`make_plan` by sizes alone, without a comparison with torch's kernels, and without compiling any."""
    kept = None if mask_hh is None else derived_from(mask_hh, "kept", lambda: int(mask_hh.sum()))
    layer = call.cell, call.hidden_size, call.batch, call.dtype, kept, block
    index = torch.cuda.current_device() if call.device.index is None else call.device.index
    others = index, call.path, call.training, tf32
    return min(
        (_plan_of_share(layer, *others, share, distributed) for share in {1, call.at_once}),
        key=lambda plan: (not plan.has_kernel, step_microseconds(plan, call)),
    )


@functools.lru_cache(4096)
def _plan_of_share(
    layer: tuple, index: int, path: KernelPath | None, training: bool, tf32: bool, share: int, distributed: bool
) -> Plan:
    """The plan by sizes alone, on 1 / `share` of the device; products are rounded to tf32 only where cuDNN's are."""
    cell, hidden_size, batch, *_ = layer

    def choose(backward: bool, path: KernelPath | None) -> Plan:
        exact = not (tf32 and cudnn.uses_tf32(cell, hidden_size, batch, backward))
        arguments: Any = *layer, torch.cuda.get_device_properties(index), share, path
        return choose_geometry(*arguments, backward=backward, exact=exact, distributed=distributed)

    forward = choose(False, path)
    if not (forward.has_kernel and training):
        return forward._replace(geometry=forward.geometry and Geometries(forward.geometry, None))
    backward = choose(True, None)
    if not backward.has_kernel:
        return backward
    return forward._replace(geometry=Geometries(forward.geometry, backward.geometry))


def step_microseconds(plan: Plan, call: Call) -> float:
    """The estimated time of a step of all layers that are to run at once; if they do not fit, they run in turn."""
    used = [geometry for geometry in plan.geometry or () if geometry is not None]
    return sum(microseconds(x, call.batch) * (1 if _fits(x, call) else call.at_once) for x in used)


def _fits_at_once(plan: Plan, call: Call) -> bool:
    """Whether the device has room for all layers or directions that are to run at once, in both passes."""
    return plan.has_kernel and all(geometry is None or _fits(geometry, call) for geometry in plan.geometry)


def _fits(geometry: Geometry, call: Call) -> bool:
    processors = torch.cuda.get_device_properties(call.device).multi_processor_count
    return geometry.blocks * geometry.groups * call.at_once <= processors


def _packed(geometry: Geometry, mask: Tensor) -> Geometry:
    """The geometry with as many tiles as packing the mask takes."""
    return geometry if geometry.path == "dense" else packing_of(mask, geometry).geometry
