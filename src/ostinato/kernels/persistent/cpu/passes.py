"""The forward and backward pass of one layer and direction on the CPU, dense or pruned, which call ``loops.py``."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.cpu.intrinsics import LINE, NUMPY_DTYPES
from ostinato.kernels.cpu.threads import run_loop, threads_for
from ostinato.kernels.derived import derived_from
from ostinato.kernels.persistent.arguments import Layer, Saved
from ostinato.kernels.persistent.cpu import loops, products, pruned
from ostinato.kernels.persistent.cpu.barrier import COUNTERS
from ostinato.kernels.persistent.cpu.entries import SLICE, Entries, backward_entries, forward_entries
from ostinato.kernels.persistent.plan import GATES, Plan, keeps_gates

PART = 1 << 16  # the weights of a step's part from which on a thread for it pays off
# The bytes of weights that a core's own cache does not hold beside other data, and the most sequences for which threads
# then share the units instead.  Measured on two cores of an Intel Xeon of 2023.
BEYOND_CACHE, FEW_SEQUENCES = 3 << 19, 16


def forward(
    layer: Layer, projected: Tensor, plan: Plan, keep: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run all steps of a layer; see ``reference.forward``.

    With ``keep``, all that :func:`backward` needs is saved: ``projected`` is overwritten with the gates'
    pre-activations, and the last result is an LSTM's c or a GRU's `candidate`.
    """
    cell, weight_hh, bias_hh, mask_hh, h0, c0, sequences, _ = layer
    hidden, gates, lstm = weight_hh.shape[1], GATES[cell], cell == "lstm"
    batch, offsets, resets, reverse = sequences
    h, c = _state(h0, batch, hidden, projected), _state(c0, batch if lstm else 0, hidden, projected)
    output = projected.new_empty(len(projected), hidden)
    keep = keep and keeps_gates(cell)
    kept = torch.empty_like(output) if keep else None
    share = _share(weight_hh, batch, sequences.length(projected), plan)
    entries, backup = None, None
    if plan.path != "dense":
        entries = _entries(forward_entries, mask_hh, plan, gates)
        backup = projected.clone() if keep else None
    weights = _dense_panels(weight_hh, gates, share) if entries is None else _values(weight_hh, entries, gates)
    arrays = {
        "bias": h.new_zeros(gates * hidden) if bias_hh is None else bias_hh.contiguous(),
        "sums": h.new_empty(batch, weights.row),
        "offsets": offsets,
        "resets": None if resets is None else resets.contiguous(),
        "projected": projected,
        "h": h,
        "shown": h.expand(2, batch, hidden).contiguous() if weights.parts > 1 else None,
        "c": c,
        "output": output,
        "kept": kept,
    }
    loop = loops.forward(NUMPY_DTYPES[h.dtype], cell, keep, weights.kind, weights.height, share.tile, weights.parts > 1)
    if not _run(loop, loops.ForwardWork, share, weights, arrays, batch=batch, hidden=hidden, reverse=reverse):
        # Zero times infinity is NaN, so pruned weights count here, and only the dense loop reads them.
        if backup is not None:
            projected.copy_(backup)
        return forward(layer, projected, plan._replace(path="dense"), keep)
    return output, h, c if lstm else None, kept


def backward(
    layer: Layer, saved: Saved, upstream: Sequence[Tensor | None], plan: Plan
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Backpropagate through all steps of a layer; see ``reference.backward``."""
    cell, weight_hh, _, mask_hh, h0, c0, sequences, _ = layer
    (pre, candidate, h, c), (grad_output, grad_h_n, grad_c_n) = saved, upstream
    hidden, gates, lstm = weight_hh.shape[1], GATES[cell], cell == "lstm"
    batch, offsets, resets, reverse = sequences
    share = _share(weight_hh.T, batch, sequences.length(pre), plan)
    if plan.path == "dense":
        ordered = weight_hh.roll(hidden, 0) if cell == "gru" else weight_hh  # n, r, z, in the order of the gradients
        weights = _dense_panels(ordered.T, 1, share)
    else:
        weights = _values(weight_hh, _entries(backward_entries, mask_hh, plan, gates), 1)
    dh = pre.new_zeros(batch, weights.row)
    dh_units = dh.view(batch, weights.parts, -1)[:, :, : weights.units]  # without the padding of each part
    if grad_h_n is not None:
        dh_units.copy_(F.pad(grad_h_n, (0, dh_units[0].numel() - hidden)).view_as(dh_units))
    dc = _state(grad_c_n, batch if lstm else 0, hidden, pre)
    grads = pre.new_empty(len(pre), hidden * (1 if gates == 1 else 4))
    arrays = {
        "pre": pre.contiguous(),
        "candidate": candidate,
        "h": h.contiguous(),
        "h0": _state(h0, batch if cell == "gru" else 0, hidden, pre),
        "cells": c,
        "c0": _state(c0, batch if lstm else 0, hidden, pre),
        "zeros": None if resets is None else pre.new_zeros(hidden),
        "grad_output": pre.new_zeros(hidden) if grad_output is None else grad_output.contiguous(),
        "offsets": offsets,
        "resets": None if resets is None else resets.contiguous(),
        "dh": dh,
        "dc": dc,
        "grads": grads,
    }
    loop = loops.backward(NUMPY_DTYPES[pre.dtype], cell, weights.kind, weights.height, share.tile, weights.parts > 1)
    grad_row = 0 if grad_output is None else hidden
    sizes = {"batch": batch, "hidden": hidden, "reverse": reverse, "grad_row": grad_row}
    if not _run(loop, loops.BackwardWork, share, weights, arrays, **sizes):
        return backward(layer, saved, upstream, plan._replace(path="dense"))
    return grads, dh_units.reshape(batch, -1)[:, :hidden].contiguous(), dc if lstm else None, grads


class _Weights(NamedTuple):
    """The weights in the format that the loops read; see ``loops.ForwardWork``."""

    kind: str
    height: int
    row: int
    padded: int
    slices: int
    parts: int
    units: int
    arrays: dict[str, Tensor]


class _Share(NamedTuple):
    """How the work is divided among threads."""

    threads: int
    parts: int  # into which the hidden units are divided
    chunk_size: int  # sequences in a chunk
    tile: int  # sequences whose sums are computed together
    length: int  # time steps


def _share(weight: Tensor, batch: int, length: int, plan: Plan) -> _Share:
    """The division of a layer's work, whose steps multiply by this matrix, among threads."""
    threads = threads_for(weight.numel() * batch * length)
    chunk_size = -(-batch // threads)
    if plan.path == "dense":
        divides = batch < threads or (batch <= FEW_SEQUENCES and weight.nbytes >= BEYOND_CACHE)
        parts = max(min(threads, weight.numel() // PART), 1) if divides else 1
        chunk_size = batch if parts > 1 else chunk_size
        tile = _tile_of(chunk_size, len(weight) // parts, NUMPY_DTYPES[weight.dtype])
        return _Share(threads, parts, chunk_size, tile, length)
    # The tile determines the order of sums, so here it must not depend on the number of threads.
    tile = pruned.CHAINS if batch >= 2 * pruned.CHAINS else 1
    return _Share(threads, 1, chunk_size, tile, length)


def _tile_of(chunk_size: int, rows: int, dtype: type) -> int:
    """The number of sequences whose sums are computed together: few are padding, and few passes over the rows suffice.

    Each pass takes as long as one more sequence.
    """

    def cost(tile: int) -> int:
        passes, panel = -(-chunk_size // tile), products.panel_rows(dtype, tile)
        return passes * (tile + 1) * -(-rows // panel) * panel

    return min(reversed(products.TILES), key=cost)


def _dense_panels(weight: Tensor, gates: int, share: _Share) -> _Weights:
    """A matrix with `gates` rows per unit, packed in panels of each part's rows, (parts, panels, columns, rows)."""
    dtype, hidden, columns = NUMPY_DTYPES[weight.dtype], len(weight) // gates, weight.shape[1]
    rows = products.panel_rows(dtype, share.tile)
    units, parts = hidden, share.parts
    transposed = weight.T.contiguous()  # two fast copies instead of a slow one
    if parts > 1:  # parts are whole cache lines, so that no two threads write to the same one
        line = LINE // weight.itemsize
        units = -(-hidden // (parts * line)) * line
        parts = -(-hidden // units)
        transposed = F.pad(transposed.view(columns, gates, hidden), (0, parts * units - hidden))
        transposed = transposed.view(columns, gates, parts, units).transpose(1, 2)
    transposed = F.pad(transposed.reshape(columns, parts, gates * units), (0, -gates * units % rows))
    panels = transposed.view(columns, -1, rows).transpose(0, 1).contiguous()
    return _Weights("dense", 1, transposed[0].numel(), units, 0, parts, units, {"weights": panels})


def _entries(make: Callable[..., Entries], mask_hh: Tensor | None, plan: Plan, gates: int) -> Entries:
    """The entries of a mask, cached until it changes."""
    assert mask_hh is not None
    return derived_from(mask_hh, make, lambda: make(mask_hh, plan.geometry, gates))


def _values(weight_hh: Tensor, entries: Entries, gates: int) -> _Weights:
    """The current weights, gathered in the order of the entries."""
    flat = weight_hh.reshape(-1)
    arrays = {
        "weights": flat[entries.places],
        "diagonal": flat[entries.diagonal],
        "columns": entries.columns,
        "starts": entries.starts,
        "rows": entries.rows,
    }
    row = gates * entries.padded + (SLICE if entries.kind == "own" else 0)
    slices = len(entries.starts) - 1
    return _Weights(entries.kind, entries.height, row, entries.padded, slices, 1, weight_hh.shape[1], arrays)


def _state(initial: Tensor | None, batch: int, hidden: int, like: Tensor) -> Tensor:
    """A copy of an initial state or of its gradient, which the loop updates in place."""
    if initial is None:
        return like.new_zeros(batch, hidden)
    return initial.to(like.dtype, copy=True, memory_format=torch.contiguous_format)


def _run(
    loop: Any, structure: Any, share: _Share, weights: _Weights, arrays: dict[str, Tensor | None], **sizes: int
) -> bool:
    """Run a loop; returns False if pruned weights would have been multiplied by a number that is not finite."""
    chunks = -(-sizes["batch"] // share.chunk_size)
    progress = torch.zeros(chunks, 1 + weights.parts, COUNTERS, dtype=torch.int64, device="cpu")
    arrays = arrays | {"progress": progress}
    addresses = {name: 0 if x is None else x.data_ptr() for name, x in (arrays | weights.arrays).items()}
    work = structure(
        tasks=chunks * weights.parts,
        parts=weights.parts,
        units=weights.units,
        part_row=weights.row // weights.parts,
        chunk_size=share.chunk_size,
        length=share.length,
        row=weights.row,
        padded=weights.padded,
        slices=weights.slices,
        **addresses,
        **sizes,
    )
    run_loop(loop, work, share.threads)
    return not work.not_finite
