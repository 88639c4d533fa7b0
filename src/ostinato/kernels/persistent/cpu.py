# mypy: disable-error-code="no-untyped-def"
"""Pruned RNN, GRU and LSTM layers on the CPU: all steps of a sequence in one call, over packed weights.

The recurrent weights are packed in slices of 8 or 16 rows (sliced ELLPACK; Kreutzer et al. 2014, arXiv 1307.6209);
an entry of a slice has one weight for each of its rows.  In blocks the rows of an entry share its column: it costs
a broadcast and one vector multiply-add, and nothing is gathered.  Otherwise each row has a column of its own, and
rows are sorted by how many weights they keep, so that the slices have little to pad.
"""

import ctypes
import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.numba_loops import (
    NUMPY_DTYPES,
    cast,
    compiled_loop,
    exp_expm1,
    inline,
    integers,
    multiply_add,
    pointer_to,
    sigmoids,
    take_piece,
)
from ostinato.kernels.persistent import cpu_loops
from ostinato.kernels.persistent.plan import GATES, Plan, no_kernel
from ostinato.kernels.threads import run_loop, threads_for

SLICE = 16  # rows of a slice that is not cut by blocks
TILE = 4  # sequences that share a weight while it is in a register
CHAINS = 4  # sums kept at once, so that none waits for its own last addition

# The densities up to which these loops were faster than torch's own, of one sequence and of many, on a Zen 5.
DENSEST_BLOCKS = {"rnn_tanh": 0.8, "rnn_relu": 0.8, "gru": 0.8, "lstm": 0.4}
DENSEST_ROWS = {"rnn_tanh": 0.2, "rnn_relu": 0.2, "gru": 0.2, "lstm": 0.075}


def make_plan(cell, hidden_size, batch, dtype, mask_hh, block, training, steps, *_) -> Plan:
    """How a layer runs on the CPU, whose caches hold what they can."""
    if dtype not in NUMPY_DTYPES:
        return no_kernel(f"layers on the CPU compute in float32 and float64, not in {dtype}")
    return Plan("dense", 0, 0, 0, "fast")
    path, densest = ("sparse", DENSEST_ROWS) if block == (1, 1) else ("block", DENSEST_BLOCKS)
    density = mask_nnz / (GATES[cell] * hidden_size**2)
    if dtype not in NUMPY_DTYPES:
        return no_kernel(f"pruned layers on the CPU compute in float32 and float64, not in {dtype}")
    if density > densest[cell]:
        what = "single weights" if block == (1, 1) else "blocks"
        return no_kernel(f"{density:.0%} of the weights are left; up to {densest[cell]:.0%} in {what} pay")
    return Plan(path, 0, 0, 0, f"{density:.0%} of the weights are left, packed for the CPU's caches")


def keeps_gates(_: torch.dtype) -> bool:
    """Whether the forward keeps the arguments of all gates: to make them anew are two large products of six."""
    return True


def forward(
    projected: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weight_hh: Tensor,
    bias_hh: Tensor | None,
    mask_hh: Tensor | None,
    offsets: Tensor | None,
    batch: int,
    cell: str,
    reverse: bool,
    plan: Plan,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    dtype, hidden, lstm = projected.dtype, weight_hh.shape[1], cell == "lstm"
    projected = projected.contiguous()
    h, c = _state(h0, batch, hidden, projected), _state(c0, batch if lstm else 0, hidden, projected)
    output = projected.new_empty(len(projected), hidden)
    kept = torch.empty_like(output) if keep and len(weight_hh) > hidden else None
    length = len(projected) // batch if offsets is None else len(offsets) - 1
    threads, group, tile = _shares(batch, weight_hh.numel() * length)
    rows = cpu_loops.panel_rows(NUMPY_DTYPES[dtype], tile)
    padding = -len(weight_hh) % rows
    panels = F.pad(weight_hh, (0, 0, 0, padding)).view(-1, rows, hidden).transpose(1, 2).contiguous()
    bias = h.new_zeros(len(weight_hh)) if bias_hh is None else bias_hh
    bias = F.pad(bias, (0, padding))
    sums = h.new_empty(batch, len(bias))
    arrays = {"weights": panels, "bias": bias, "projected": projected, "sums": sums, "h": h, "c": c}
    arrays |= {"output": output, "kept": kept, "offsets": offsets}
    work = cpu_loops.ForwardWork(
        pieces=-(-batch // group),
        group=group,
        batch=batch,
        length=length,
        hidden=hidden,
        padded=len(bias),
        reverse=reverse,
        **_addresses(arrays),
    )
    run_loop(cpu_loops.forward(NUMPY_DTYPES[dtype], cell, tile, keep), work, threads)
    return output, h, c if lstm else None, kept


def backward(
    pre: Tensor,
    candidate: Tensor | None,
    h_prev: Tensor,
    c: Tensor | None,
    c0: Tensor | None,
    weight_hh: Tensor,
    mask_hh: Tensor | None,
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    offsets: Tensor | None,
    batch: int,
    cell: str,
    reverse: bool,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor | None]:
    dtype, hidden, lstm = pre.dtype, weight_hh.shape[1], cell == "lstm"
    length = len(pre) // batch if offsets is None else len(offsets) - 1
    threads, group, tile = _shares(batch, weight_hh.numel() * length)
    columns = cpu_loops.panel_rows(NUMPY_DTYPES[dtype], tile)
    padding = -hidden % columns
    weight = weight_hh.roll(hidden, 0) if cell == "gru" else weight_hh  # n before r and z, as their gradients lie
    panels = F.pad(weight, (0, padding)).view(len(weight), -1, columns).transpose(0, 1).contiguous()
    dh = pre.new_zeros(batch, hidden + padding)
    if grad_h_n is not None:
        dh[:, :hidden] = grad_h_n
    dc = _state(grad_c_n, batch if lstm else 0, hidden, pre)
    grads = pre.new_empty(len(pre), hidden if len(weight) == hidden else 4 * hidden)
    arrays = {
        "weights": panels,
        "pre": pre.contiguous(),
        "candidate": None if candidate is None else candidate.contiguous(),
        "h_prev": h_prev.contiguous(),
        "cells": c,
        "c0": _state(c0, batch if lstm else 0, hidden, pre),
        "grad_output": pre.new_zeros(hidden) if grad_output is None else grad_output.contiguous(),
        "dh": dh,
        "dc": dc,
        "grads": grads,
        "offsets": offsets,
    }
    work = cpu_loops.BackwardWork(
        pieces=-(-batch // group),
        group=group,
        batch=batch,
        length=length,
        hidden=hidden,
        padded=hidden + padding,
        reverse=reverse,
        grad_row=0 if grad_output is None else hidden,
        **_addresses(arrays),
    )
    run_loop(cpu_loops.backward(NUMPY_DTYPES[dtype], cell, tile), work, threads)
    return grads, dh[:, :hidden], dc if lstm else None


def _state(initial: Tensor | None, batch: int, hidden: int, like: Tensor) -> Tensor:
    """A copy, which a loop writes to."""
    if initial is None:
        return like.new_zeros(batch, hidden)
    return initial.to(like.dtype, copy=True, memory_format=torch.contiguous_format)


def _addresses(arrays: dict[str, Tensor | None]) -> dict[str, int]:
    return {name: 0 if x is None else x.data_ptr() for name, x in arrays.items()}


def _shares(batch: int, products: int) -> tuple[int, int, int]:
    """Threads, sequences of a piece, and sequences of a tile."""
    threads = threads_for(products * batch)
    group = -(-batch // threads)
    tile = max(tile for tile in cpu_loops.TILES if tile <= group)
    return threads, group, tile


class SparseLayer:
    """The recurrent weights of one layer and direction, packed.

    Args:
        cell: "rnn_tanh", "rnn_relu", "gru" or "lstm".
        weight_hh: (gates * H, H), float32 or float64, zero where `mask` is False.
        bias_hh_n: (H,), the recurrent bias of a GRU's candidate, inside the reset gate's product; else None.
        mask: which weights are kept, shaped as `weight_hh`.
        block: what `mask` consists of, with or without the diagonal: (1, 1), (16, 1) or (8, 4).
    """

    def __init__(
        self, cell: str, weight_hh: Tensor, bias_hh_n: Tensor | None, mask: Tensor, block: tuple[int, int]
    ) -> None:
        self.cell, self.dtype, self.hidden = cell, weight_hh.dtype, weight_hh.shape[1]
        gates = GATES[cell]
        self.height, self.shared = (SLICE, False) if block == (1, 1) else (block[0], True)
        self.padded = -(-self.hidden // self.height) * self.height
        pack = self._pack_blocks if self.shared else self._pack_rows
        self.diagonal = weight_hh.new_zeros(gates, self.padded)
        self.values, self.columns, self.starts, self.rows = pack(
            weight_hh.view(gates, self.hidden, self.hidden), mask.view(gates, self.hidden, self.hidden)
        )
        self.bias = weight_hh.new_zeros(self.hidden) if bias_hh_n is None else bias_hh_n.contiguous()

    def _pack_blocks(self, weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """An entry for each column of a slice with a weight off the diagonal; the rest of that is kept by itself."""
        gates, hidden, _ = weight.shape
        slices = self.padded // self.height
        eye = torch.eye(hidden, dtype=torch.bool, device="cpu")
        padding = (0, 0, 0, self.padded - hidden)
        blocks = F.pad(mask & ~eye, padding).view(gates, slices, self.height, hidden)
        kept = blocks.any(2)
        alone = eye & ~kept.repeat_interleave(self.height, 1)[:, :hidden]
        self.diagonal[:, :hidden] = torch.where(alone, weight, 0.0).sum(2)
        entries = F.pad(torch.where(alone, 0.0, weight), padding).view(gates, slices, self.height, hidden)
        values = entries.transpose(2, 3)[kept]
        columns = kept.nonzero()[:, 2].to(torch.int32)
        starts = F.pad(kept.sum(2).flatten().cumsum(0), (1, 0))
        return values.contiguous(), columns, starts, torch.arange(gates * self.padded, device="cpu")

    def _pack_rows(self, weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows with the most weights first; entry k of a slice has the k-th weight of each row, or 0 past its last."""
        gates, hidden, _ = weight.shape
        rows = torch.arange(gates * self.padded, device="cpu").view(gates, self.padded)[:, :hidden].flatten()
        counts, order = mask.flatten(0, 1).sum(1).sort(descending=True, stable=True)
        slices = -(-len(order) // SLICE)
        longest = counts[::SLICE]
        starts = F.pad(longest.cumsum(0), (1, 0))
        row, column = mask.flatten(0, 1)[order].nonzero(as_tuple=True)
        rank = torch.arange(len(row), device="cpu") - (counts.cumsum(0) - counts)[row]
        place = (starts[row // SLICE] + rank, row % SLICE)
        values = weight.new_zeros(int(starts[-1]), SLICE)
        columns = weight.new_zeros(values.shape, dtype=torch.int32)
        values[place] = weight.flatten(0, 1)[order][row, column]
        columns[place] = column.to(torch.int32)
        spare = rows.new_full((slices * SLICE - len(order),), gates * self.padded)  # where nobody reads
        return values, columns, starts, torch.cat([rows[order], spare])

    def __call__(
        self, projected: Tensor, h0: Tensor | None, c0: Tensor | None, reverse: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run a sequence.

        Args:
            projected: (T, B, gates * H), ``x W_ih^T + b_ih + b_hh``, for a GRU without the candidate's ``b_hh``.
            h0, c0: (B, H), the initial state, None for zeros; c0 for an LSTM.
            reverse: from the last step to the first.

        Returns output (T, B, H), h_n (B, H) and c_n (B, H), None but for an LSTM.

        Raises FloatingPointError if a hidden state is not finite: 0 times it is NaN, so that what is pruned would
        have a part in the result.
        """
        length, batch, _ = projected.shape
        tile = TILE if batch >= 2 * TILE else 1
        pieces = -(-batch // tile)
        h = projected.new_zeros(pieces * tile, self.hidden)
        if h0 is not None:
            h[:batch] = h0
        c = h.new_zeros(batch if self.cell == "lstm" else 0, self.hidden)
        if c0 is not None:
            c.copy_(c0)
        sums = h.new_empty(pieces * tile, GATES[self.cell] * self.padded + SLICE)
        output = h.new_empty(length, batch, self.hidden)
        projected = projected.contiguous()
        arrays = {"projected": projected, "h": h, "c": c, "sums": sums, "output": output}
        arrays |= {name: getattr(self, name) for name in ("values", "columns", "starts", "rows", "diagonal", "bias")}
        work = Work(
            pieces=pieces,
            batch=batch,
            length=length,
            hidden=self.hidden,
            padded=self.padded,
            slices=len(self.starts) - 1,
            reverse=reverse,
            **{name: x.data_ptr() for name, x in arrays.items()},
        )
        loop = layer(NUMPY_DTYPES[self.dtype], self.cell, self.height, self.shared, tile)
        run_loop(loop, work, threads_for(len(self.values) * length * batch))
        if work.not_finite:
            raise FloatingPointError("a hidden state is not finite")
        return output, h[:batch], c if self.cell == "lstm" else None


class Work(ctypes.Structure):
    """What the loop is called with: sizes and addresses."""

    _fields_ = [
        *integers("next_piece", "pieces", "not_finite", "reverse", "batch", "length", "hidden", "padded", "slices"),
        *integers("values", "columns", "starts", "rows", "diagonal", "bias", "projected", "h", "c", "sums", "output"),
    ]


_WORK = np.dtype(Work)


@intrinsic(prefer_literal=True)
def _multiply_slice(typing_context, values, columns, begin, end, h, h_b, out, out_b, height, shared, tile):
    """``out[b, i] = sum_k values[k, i] * h[b, columns[k]]`` for the rows of a slice and `tile` sequences b.

    ``columns[k, i]`` if it is not `shared`.  The sums stay in registers: a loop over memory would store them.
    """
    rows, sequences, broadcast = height.literal_value, tile.literal_value, shared.literal_value

    def generate(context, builder, signature, arguments):
        values, columns, begin, end, h, h_b, out, out_b = arguments[:8]
        int32, int64 = ir.IntType(32), ir.IntType(64)
        number = context.get_value_type(signature.args[0].dtype)
        vector = ir.VectorType(number, rows)
        alignment = context.get_abi_sizeof(number)
        fused = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [vector] * 3),
            f"llvm.fmuladd.v{rows}{'f32' if alignment == 4 else 'f64'}",
        )

        def vector_at(pointer, index):
            return builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())

        def states(k, b):
            """The vector of states that entry k is multiplied with."""
            result = ir.Constant(vector, ir.Undefined)
            row = builder.gep(h, [builder.mul(h_b, int64(b))])
            for i in range(1 if broadcast else rows):
                at = k if broadcast else builder.add(builder.mul(k, int64(rows)), int64(i))
                column = builder.sext(builder.load(builder.gep(columns, [at])), int64)
                result = builder.insert_element(result, builder.load(builder.gep(row, [column])), int32(i))
            if not broadcast:
                return result
            return builder.shuffle_vector(result, result, ir.Constant(ir.VectorType(int32, rows), [0] * rows))

        def add(k, sums):
            entry = builder.load(vector_at(values, builder.mul(k, int64(rows))), align=alignment)
            for b, total in enumerate(sums):
                builder.store(builder.call(fused, [entry, states(k, b), builder.load(total)]), total)

        zero = ir.Constant(vector, [0.0] * rows)
        chains = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(sequences)] for _ in range(CHAINS // sequences)
        ]
        many = int64(len(chains))
        odd = builder.sub(end, builder.srem(builder.sub(end, begin), many))
        with cgutils.for_range_slice(builder, begin, odd, many, int64) as (k, _):
            for offset, sums in enumerate(chains):
                add(builder.add(k, int64(offset)), sums)
        with cgutils.for_range_slice(builder, odd, end, int64(1), int64) as (k, _):
            add(k, chains[0])
        for b in range(sequences):
            total = [builder.load(sums[b]) for sums in chains]
            while len(total) > 1:
                total = [builder.fadd(x, y) for x, y in zip(total[::2], total[1::2], strict=True)]
            builder.store(total[0], vector_at(out, builder.mul(out_b, int64(b))), align=alignment)
        return context.get_dummy_value()

    signature = types.void(
        values, columns, types.int64, types.int64, h, types.int64, out, types.int64, height, shared, tile
    )
    return signature, generate


@intrinsic
def _offset(typing_context, pointer, index):
    """The address of an element."""

    def generate(context, builder, signature, arguments):
        return builder.gep(arguments[0], [arguments[1]])

    return pointer(pointer, types.int64), generate


@inline
def _tanh(x):
    e, less = exp_expm1(-abs(x + x))
    size = -less / (cast(1.0, x) + e)
    return size if x >= 0 else -size


@functools.cache
def layer(dtype: type, cell: str, height: int, shared: bool, tile: int) -> Any:
    """The loop over time of `tile` sequences a piece; h and c hold the initial state, then the last one."""
    gates = GATES[cell]
    largest = dtype(np.finfo(dtype).max)

    @compiled_loop
    def run(address):
        work = carray(address, 1, _WORK)[0]
        values, columns = pointer_to(work.values, dtype), pointer_to(work.columns, np.int32)
        starts, rows = pointer_to(work.starts, np.int64), pointer_to(work.rows, np.int64)
        batch, length, hidden, padded = work.batch, work.length, work.hidden, work.padded
        diagonal, bias, projected = (
            pointer_to(work.diagonal, dtype),
            pointer_to(work.bias, dtype),
            pointer_to(work.projected, dtype),
        )
        output = pointer_to(work.output, dtype)
        h, c = pointer_to(work.h, dtype), pointer_to(work.c, dtype)
        width = gates * padded + SLICE
        piece = take_piece(address)
        while piece < work.pieces:
            first = piece * tile
            sums = _offset(pointer_to(work.sums, dtype), first * width)
            wrong = 0
            for j in range(first * hidden, (first + tile) * hidden):
                wrong += 0 if abs(h[j]) <= largest else 1
            for step in range(length):
                if wrong:
                    break
                t = length - 1 - step if work.reverse else step
                for s in range(work.slices):
                    out = _offset(sums, s * height if shared else gates * padded)
                    _multiply_slice(
                        values,
                        columns,
                        starts[s],
                        starts[s + 1],
                        _offset(h, first * hidden),
                        hidden,
                        out,
                        width,
                        height,
                        shared,
                        tile,
                    )
                    if not shared:
                        for b in range(tile):
                            for i in range(height):
                                sums[b * width + rows[s * height + i]] = out[b * width + i]
                for b in range(first, min(first + tile, batch)):
                    at, at_x, at_s = b * hidden, (t * batch + b) * gates * hidden, (b - first) * width
                    for j in range(hidden):
                        h_j = h[at + j]
                        p0 = projected[at_x + j] + multiply_add(diagonal[j], h_j, sums[at_s + j])
                        if gates > 1:
                            s1, s2 = sums[at_s + padded + j], sums[at_s + 2 * padded + j]
                            p1 = projected[at_x + hidden + j] + multiply_add(diagonal[padded + j], h_j, s1)
                            p2 = multiply_add(diagonal[2 * padded + j], h_j, s2)
                        if cell == "rnn_tanh":
                            h_j = _tanh(p0)
                        elif cell == "rnn_relu":
                            h_j = cast(0.0, p0) if p0 < 0 else p0
                        elif cell == "gru":
                            n = _tanh(multiply_add(sigmoids(p0)[0], p2 + bias[j], projected[at_x + 2 * hidden + j]))
                            h_j = multiply_add(sigmoids(p1)[0], h_j - n, n)
                        else:
                            s3 = sums[at_s + 3 * padded + j]
                            p3 = projected[at_x + 3 * hidden + j] + multiply_add(diagonal[3 * padded + j], h_j, s3)
                            new = sigmoids(p0)[0] * _tanh(projected[at_x + 2 * hidden + j] + p2)
                            new = multiply_add(sigmoids(p1)[0], c[at + j], new)
                            c[at + j] = new
                            h_j = sigmoids(p3)[0] * _tanh(new)
                        h[at + j] = h_j
                        output[(t * batch + b) * hidden + j] = h_j
                        wrong += 0 if abs(h_j) <= largest else 1
            if wrong:
                work.not_finite = 1
            piece = take_piece(address)

    return run
