"""All steps of a recurrence with recurrent weights in one launch, which keeps the weights on the chip of an NVIDIA GPU.

The kernels are those of RNN, GRU and LSTM with a generated cell.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.matmul.precision import layers_allow_tf32
from ostinato.kernels.persistent import arguments
from ostinato.kernels.persistent.cuda.heuristics.cells import Cell
from ostinato.kernels.persistent.cuda.heuristics.costs import microseconds
from ostinato.kernels.persistent.cuda.heuristics.geometry import Geometry
from ostinato.kernels.persistent.cuda.heuristics.search import choose_geometry
from ostinato.kernels.persistent.cuda.launch import compile_kernels, launch, most_heads, names_beside_h
from ostinato.kernels.persistent.plan import Plan, no_kernel
from ostinato.kernels.recurrence.symbolic.trace import Trace
from ostinato.kernels.recurrence.weighted.cell import print_cell
from ostinato.kernels.recurrence.weighted.layer import Layer


class Persistent:
    """The persistent kernels of one pass; see :class:`~ostinato.kernels.recurrence.weighted.layer.Executor`."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def forward(self, layer: Layer, rows: Tensor, training: bool) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        batch, width = layer.sequences.batch, layer.width
        states = [rows.new_empty(len(rows), width) for _ in range(layer.trace.states)]
        last, parameters = [rows.new_empty(batch, width) for _ in states], layer.parameters.to(torch.float32)
        kept = torch.empty_like(rows) if training else None
        tensors = {"pre": rows, "parameters": parameters, "gates": kept}
        tensors |= _named("output", "c", states) | _named("h_n", "c_n", last)
        launch(self._geometry, _direction(layer, tensors))
        return states, last, kept

    def backward(
        self,
        layer: Layer,
        rows: Tensor,
        before: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        grads_last: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        batch, width, count = layer.sequences.batch, layer.width, len(layer.parameters)
        grad_rows, totals = torch.empty_like(rows), rows.new_empty(batch, count, width, dtype=torch.float32)
        grad_initial = [rows.new_empty(batch, width) for _ in before]
        tensors: dict[str, Tensor | None] = {"pre": rows, "parameters": layer.parameters.to(torch.float32)}
        tensors |= {"grads": grad_rows, "totals": totals}
        tensors |= _named("before", "c_before", before) | _named("grad_output", "grad_c", grads)
        tensors |= _named("grad_h_n", "grad_c_n", grads_last) | _named("grad_h0", "grad_c0", grad_initial)
        launch(self._geometry, _direction(layer, tensors))
        return grad_rows, totals.sum(0), grad_initial


def plan_of(layer: Layer, like: Tensor, backward: bool, training: bool) -> Plan:
    """The plan of the forward or backward pass for tensors like `like`, whose geometry :class:`Persistent` takes."""
    batch, offsets, resets, _ = layer.sequences
    sizes = layer.products, layer.width // layer.heads, layer.heads, batch, like.dtype, like.get_device()
    variant = resets is not None, offsets is not None, layers_allow_tf32(like.device, like.dtype)
    passes = (backward,) if backward or not training else (False, True)  # the next, too, is compiled
    return _plan(layer.trace, *sizes, *variant, training, passes)


@functools.lru_cache(4096)
def _plan(
    trace: Trace,
    products: int,
    width: int,
    heads: int,
    batch: int,
    dtype: torch.dtype,
    index: int,
    resets: bool,
    packed: bool,
    tf32: bool,
    training: bool,
    passes: tuple[bool, ...],
    distributed: bool = True,
) -> Plan:
    """Choose the passes' launch geometries and compile their kernels; returns the plan of the first pass.

    Args:
        trace: the recurrence's trace.
        products: the number of products with the state, the G of ``layer.py``.
        width: the channels of a head.
        heads: the number of heads.
        passes: for each pass, whether it is the backward pass.
        distributed: whether states may stay in the shared memory of clusters.
    """
    if reason := nvrtc.why_no_cuda():
        return no_kernel(reason)
    properties, cell = torch.cuda.get_device_properties(index), print_cell(trace, products)
    plans: list[Plan] = []
    for backward in passes:
        choose = functools.partial(choose_geometry, backward=backward, exact=not tf32, distributed=distributed)
        plan = _plan_of_heads(choose, cell, width, heads, batch, dtype, properties)
        if plan.has_kernel:
            plans.append(plan)
        elif not plans:
            return plan
    geometries = [plan.geometry for plan in plans]
    try:
        compile_kernels(index, resets, packed, training, 1, *geometries)
    except (MemoryError, nvrtc.DoesNotCompile) as error:
        call = trace, products, width, heads, batch, dtype, index, resets, packed, tf32, training
        if any(geometry.distributed for geometry in geometries):
            return _plan(*call, passes, False)
        return _plan(*call, passes[:1]) if len(passes) > 1 else no_kernel(str(error).partition("\n")[0])
    return plans[0]


def _plan_of_heads(
    choose: Callable[..., Plan], cell: Cell, width: int, heads: int, batch: int, dtype: torch.dtype, properties: Any
) -> Plan:
    """The fastest plan for a pass of all heads, which one launch computes or several in turn, or why there is none."""
    numbers = [n for n in range(1, min(heads, most_heads(cell)) + 1) if heads % n == 0]
    plans = {n: choose(cell, width, batch, dtype, None, None, properties, n) for n in numbers}
    times = {n: microseconds(plan.geometry, batch) * heads / n for n, plan in plans.items() if plan.has_kernel}
    if heads == 1 or not times:
        return plans[1]
    at_once = min(times, key=lambda n: times[n])
    plan = plans[at_once]
    return plan._replace(
        bytes_on_chip=at_once * plan.bytes_on_chip,
        blocks=at_once * plan.blocks,
        reason=f"of each of {heads} heads, {at_once} at once, {plan.reason}",
        geometry=plan.geometry._replace(heads=heads, heads_at_once=at_once),
    )


def _direction(layer: Layer, tensors: dict[str, Any]) -> tuple[arguments.Layer, dict[str, Any]]:
    """The layer and the other tensors as the persistent kernels' launch takes them."""
    initial = _named("h0", "c0", layer.initial or [])
    states = initial.get("h0"), initial.get("c0")
    weight = layer.weight_hh.contiguous()
    return arguments.Layer("generated", weight, None, None, *states, layer.sequences), tensors | initial


def _named(h: str, c: str, tensors: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """Tensors of all states by their names in the launch, given those of h and of the first state beside it."""
    return dict(zip((h, *names_beside_h(c, len(tensors) - 1)), tensors, strict=False))
