"""All steps of a recurrence with recurrent weights in one launch, which keeps the weights on the chip of an NVIDIA GPU.

The kernels are those of RNN, GRU and LSTM with a generated cell.
"""

import functools
import math
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
from ostinato.kernels.persistent.cuda.launch import compile_kernels, launch, most_heads
from ostinato.kernels.persistent.plan import Plan
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


def executor_of(layer: Layer, like: Tensor, backward: bool, training: bool) -> Persistent | None:
    """The executor of the forward or backward pass for tensors like `like`; None if the weights do not fit on chip."""
    batch, offsets, resets, _ = layer.sequences
    sizes = layer.products, layer.width // layer.heads, layer.heads, batch, like.dtype, like.get_device()
    variant = resets is not None, offsets is not None, layers_allow_tf32(like.device, like.dtype)
    passes = (backward,) if backward or not training else (False, True)  # the next, too, is compiled
    geometries = _geometries(layer.trace, *sizes, *variant, training, passes)
    return None if geometries is None else Persistent(geometries[0])


@functools.lru_cache(4096)
def _geometries(
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
) -> list[Geometry] | None:
    """Choose the passes' launch geometries and compile their kernels; None if there is none for the first pass.

    Args:
        trace: the recurrence's trace.
        products: the number of products with the state, the G of ``layer.py``.
        width: the channels of a head.
        heads: the number of heads.
        passes: for each pass, whether it is the backward pass.
        distributed: whether states may stay in the shared memory of clusters.
    """
    if nvrtc.why_no_cuda():
        return None
    properties, cell = torch.cuda.get_device_properties(index), print_cell(trace, products)
    geometries = []
    for backward in passes:
        choose = functools.partial(choose_geometry, backward=backward, exact=not tf32, distributed=distributed)
        geometry = _geometry_of_heads(choose, cell, width, heads, batch, dtype, properties)
        if geometry is not None:
            geometries.append(geometry)
        elif not geometries:
            return None
    try:
        compile_kernels(index, resets, packed, training, 1, *geometries)
    except (MemoryError, nvrtc.DoesNotCompile):
        call = trace, products, width, heads, batch, dtype, index, resets, packed, tf32, training
        if any(geometry.distributed for geometry in geometries):
            return _geometries(*call, passes, False)
        return _geometries(*call, passes[:1]) if len(passes) > 1 else None
    return geometries


def _geometry_of_heads(
    choose: Callable[..., Plan], cell: Cell, width: int, heads: int, batch: int, dtype: torch.dtype, properties: Any
) -> Geometry | None:
    """The fastest geometry of a pass of all heads, which one launch computes or several in turn; None if none fits."""
    fastest, least = None, math.inf
    for at_once in range(1, min(heads, most_heads(cell)) + 1):
        if heads % at_once:
            continue
        plan = choose(cell, width, batch, dtype, None, None, properties, at_once)
        if plan.has_kernel and (time := microseconds(plan.geometry, batch) * heads / at_once) < least:
            fastest, least = plan.geometry._replace(heads=heads, heads_at_once=at_once), time
    return fastest


def _direction(layer: Layer, tensors: dict[str, Any]) -> tuple[arguments.Layer, dict[str, Any]]:
    """The layer and the other tensors as the persistent kernels' launch takes them."""
    initial = _named("h0", "c0", layer.initial or [])
    states = initial.get("h0"), initial.get("c0")
    weight = layer.weight_hh.contiguous()
    return arguments.Layer("generated", weight, None, None, *states, layer.sequences), tensors | initial


def _named(h: str, c: str, tensors: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """Tensors of all states by their names in the launch: that of h, and those of the states beside it."""
    return {h if k == 0 else c if k == 1 else f"{c}{k - 1}": x for k, x in enumerate(tensors)}
