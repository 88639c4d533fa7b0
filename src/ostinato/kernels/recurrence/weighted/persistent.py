"""All steps of a recurrence with recurrent weights in one launch, which keeps the weights on the chip of an NVIDIA GPU.

The kernels are those of RNN, GRU and LSTM with a generated cell.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.matmul.precision import layers_allow_tf32
from ostinato.kernels.persistent import arguments
from ostinato.kernels.persistent.cuda.heuristics.geometry import Geometry
from ostinato.kernels.persistent.cuda.heuristics.search import choose_geometry
from ostinato.kernels.persistent.cuda.launch import compile_kernels, launch
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
        tensors |= dict(zip(("output", "second"), states, strict=False))
        tensors |= dict(zip(("h_n", "c_n"), last, strict=False))
        launch(self._geometry, (_arguments(layer), tensors))
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
        tensors |= dict(zip(("before", "second_before"), before, strict=False))
        tensors |= dict(zip(("grad_output", "grad_second"), grads, strict=False))
        tensors |= dict(zip(("grad_h_n", "grad_c_n"), grads_last, strict=False))
        tensors |= dict(zip(("grad_h0", "grad_c0"), grad_initial, strict=False))
        launch(self._geometry, (_arguments(layer), tensors))
        return grad_rows, totals.sum(0), grad_initial


def executor_of(layer: Layer, like: Tensor, backward: bool, training: bool) -> Persistent | None:
    """The executor of the forward or backward pass for tensors like `like`; None if the weights do not fit on chip."""
    batch, offsets, resets, _ = layer.sequences
    sizes = layer.with_products // layer.width, layer.width, batch, like.dtype, like.get_device()
    variant = resets is not None, offsets is not None, layers_allow_tf32(like.device, like.dtype)
    passes = (backward,) if backward or not training else (False, True)  # the next, too, is compiled
    geometries = _geometries(layer.trace, *sizes, *variant, training, passes)
    return None if geometries is None else Persistent(geometries[0])


@functools.lru_cache(4096)
def _geometries(
    trace: Trace,
    products: int,
    width: int,
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
        passes: for each pass, whether it is the backward pass.
        distributed: whether states may stay in the shared memory of clusters.
    """
    if nvrtc.why_no_cuda():
        return None
    properties, cell = torch.cuda.get_device_properties(index), print_cell(trace, products)
    geometries = []
    for backward in passes:
        sizes: Any = cell, width, batch, dtype, None, None, properties
        plan = choose_geometry(*sizes, backward=backward, exact=not tf32, distributed=distributed)
        if plan.has_kernel:
            geometries.append(plan.geometry)
        elif not geometries:
            return None
    try:
        compile_kernels(index, resets, packed, training, 1, *geometries)
    except (MemoryError, nvrtc.DoesNotCompile):
        call = trace, products, width, batch, dtype, index, resets, packed, tf32, training
        if any(geometry.distributed for geometry in geometries):
            return _geometries(*call, passes, False)
        return _geometries(*call, passes[:1]) if len(passes) > 1 else None
    return geometries


def _arguments(layer: Layer) -> arguments.Layer:
    """The layer as the persistent kernels' launch takes it."""
    h0, c0 = [*(layer.initial or ()), None, None][:2]
    return arguments.Layer("generated", layer.weight_hh.contiguous(), None, None, h0, c0, layer.sequences)
