"""The forward and backward pass of one layer and direction of an RNN, GRU or LSTM on an NVIDIA GPU.

Weights are read from the parameters at every launch; only what depends on masks and sizes is cached between calls.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.matmul import cublas
from ostinato.kernels.persistent.arguments import Layer, Saved
from ostinato.kernels.persistent.cuda.launch import launch
from ostinato.kernels.persistent.interface import ForwardResults, LoopGradients
from ostinato.kernels.persistent.plan import Plan, keeps_gates


def forward(
    layer: Layer, projected: Tensor, plan: Plan, keep: bool, into: tuple[Tensor, Tensor] | None = None
) -> ForwardResults:
    """Run all steps of a layer; see :mod:`ostinato.kernels.persistent.reference`.

    With ``keep``, for cells that :func:`keeps_gates`, `projected` is overwritten with the backward's `pre`, and for a
    GRU, the last result is its `candidate`.  The first and the last result are written `into` these tensors, if given.

    Raises RuntimeError if an earlier launch on the device failed.
    """
    direction, results = _forward_tensors(layer, projected, plan, keep, into)
    launch(plan.geometry.forward, direction)
    return results


def forward_both(*directions: tuple[Layer, Tensor, Plan, bool]) -> list[ForwardResults]:
    """:func:`forward` of both directions of a layer in one launch, given the arguments of each."""
    launched, results = zip(*(_forward_tensors(*direction) for direction in directions), strict=True)
    (_, _, plan, _), _ = directions
    launch(plan.geometry.forward, *launched)
    return [*results]


def _forward_tensors(
    layer: Layer, projected: Tensor, plan: Plan, keep: bool, into: tuple[Tensor, Tensor] | None = None
) -> tuple[tuple[Layer, dict[str, Any]], ForwardResults]:
    """The layer and the tensors that :func:`launch` takes for a forward pass, and which of these are the results."""
    cell, batch = layer.cell, layer.sequences.batch
    rows, hidden, lstm = projected.shape[0], plan.geometry.forward.hidden_size, cell == "lstm"
    output, cells = into or (projected.new_empty(rows, hidden), None)
    h_n = projected.new_empty(batch, hidden)
    c_n, gates = torch.empty_like(h_n) if lstm else None, projected if keep and keeps_gates(cell) else None
    if not keep or not (lstm or gates is not None):
        cells = None
    elif cells is None:
        cells = projected.new_empty(rows, hidden, dtype=torch.float32 if lstm else projected.dtype)
    tensors = {"pre": projected, "bias": layer.bias_hh, "gates": gates, "output": output, "h_n": h_n, "c_n": c_n}
    tensors |= {"cells": cells, "candidates": cells}
    return (layer, tensors), (output, h_n, c_n, cells)


def backward(
    layer: Layer,
    saved: Saved,
    upstream: Sequence[Tensor | None],
    plan: Plan,
    into: tuple[Tensor, Tensor] | None = None,
) -> LoopGradients:
    """Backpropagate through all steps of a layer; see :mod:`ostinato.kernels.persistent.reference`.

    The gradients of the gates, and their totals, are written `into` these tensors, if given.

    Raises RuntimeError if an earlier launch on the device failed.
    """
    direction, results = _backward_tensors(layer, saved, upstream, plan, into)
    launch(plan.geometry.backward, direction)
    return results


def backward_both(*directions: tuple[Layer, Saved, Sequence[Tensor | None], Plan]) -> list[LoopGradients]:
    """:func:`backward` of both directions of a layer in one launch, given the arguments of each."""
    launched, results = zip(*(_backward_tensors(*direction) for direction in directions), strict=True)
    (*_, plan), _ = directions
    launch(plan.geometry.backward, *launched)
    return [*results]


def _backward_tensors(
    layer: Layer,
    saved: Saved,
    upstream: Sequence[Tensor | None],
    plan: Plan,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[tuple[Layer, dict[str, Any]], LoopGradients]:
    """The layer and the tensors that :func:`launch` takes for a backward pass, and which of these are the results."""
    cublas.create_handle(saved.h.device)  # for the products that follow
    cell, batch = layer.cell, layer.sequences.batch
    (pre, candidate, h, c), (grad_output, grad_h_n, grad_c_n) = saved, upstream
    rows, hidden, lstm = pre.shape[0], plan.geometry.backward.hidden_size, cell == "lstm"
    width = (1 if cell.startswith("rnn") else 4) * hidden
    grads, totals = into or (pre.new_empty(rows, width), pre.new_empty(batch, width, dtype=torch.float32))
    grad_h0 = pre.new_empty(batch, hidden)
    grad_c0 = torch.empty_like(grad_h0) if lstm else None
    tensors = {"pre": pre, "candidate": candidate, "h": h, "cells": c}
    tensors |= {"grad_output": grad_output, "grad_h_n": grad_h_n, "grad_c_n": grad_c_n}
    tensors |= {"grads": grads, "grad_h0": grad_h0, "grad_c0": grad_c0, "totals": totals}
    return (layer, tensors), (grads, grad_h0, grad_c0, totals)
