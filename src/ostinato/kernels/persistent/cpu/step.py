# mypy: disable-error-code="no-untyped-def"
"""One step of a layer on the CPU: both products and the gates in one loop, which reads the parameters in place.

Each weight is used once, so packing would not pay off.  Beyond reading the weights, a call costs mostly Python's time:
all that depends on sizes and masks only is prepared.  Dense layers are divided among threads by hidden units.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.kernels.derived import derived_from
from ostinato.kernels.numba_loops import (
    NUMPY_DTYPES,
    compiled_loop,
    inline,
    integers,
    offset,
    pointer_to,
    structure_at,
    take_task,
)
from ostinato.kernels.persistent.cpu.cells import FORWARD_UNIT
from ostinato.kernels.persistent.cpu.entries import SLICE, forward_entries
from ostinato.kernels.persistent.cpu.products import ROWS, are_finite, multiply_rows
from ostinato.kernels.persistent.cpu.pruned import BLOCK_WIDTH, entries_adder
from ostinato.kernels.persistent.masks import block_of
from ostinato.kernels.persistent.plan import GATES
from ostinato.kernels.threads import run_loop, threads_for

GROUP = 16  # units of a task: a cache line of float32
# Sequences of a step up to which torch's GEMMs are no faster.  Measured on two cores of a Zen 4: in float32 a step
# takes 0.2 to 0.8 of torch.nn's time with up to 128 sequences, and 0.8 to 1 with 512.
MOST_SEQUENCES = {torch.float32: 256, torch.float64: 16}
# Densities, by kind of block, up to which reading the kept weights alone is faster than all of them with zeros.  Of
# several sequences, for each of which they are read again, it is the density times their number.
DENSEST = {"block": 0.6, "sparse": 0.25}


def most_sequences(kind: str, kept: int, weights: int) -> int:
    """With how many sequences at most reading the kept weights alone is faster; 0 if with none."""
    return int(DENSEST[kind] * weights / max(kept, 1))


class _Entries(ctypes.Structure):
    """How a matrix is read; see ``entries.py``.

    `places` and `diagonal` are the int32 indices of the entries' weights, below 0 for none, or the weights themselves.
    """

    _fields_ = integers("row", "padded", "places", "columns", "starts", "rows", "slices", "diagonal")


class Work(ctypes.Structure):
    """The loop's arguments: sizes, addresses, and the entries of both matrices."""

    _fields_ = [
        *integers("next_task", "tasks", "group", "batch", "hidden", "inputs", "not_finite"),
        *integers("x", "h", "new_h", "c", "new_c", "output", "projected", "sums", "kept"),
        *integers("weights_ih", "bias_ih", "weights_hh", "bias_hh"),
        *(("ih", _Entries), ("hh", _Entries)),
    ]


_WORK = np.dtype(Work)

empty: Any = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]  # faster than through the dispatcher


@functools.cache
def _product(dtype: type, gates: int, kind: str, height: int, packed: bool) -> Any:
    """What sets the sums of some units' gates, or, of pruned weights, of all, to their bias and product with x."""
    place = dtype if packed else np.int32
    if kind == "dense":

        @inline
        def multiply(work, entries, weights, bias, x, count, sums, begin, end):
            hidden, batch, row, padded = work.hidden, work.batch, entries.row, entries.padded
            for g in range(gates):
                own, out = offset(weights, g * hidden * count), offset(sums, g * padded)
                multiply_rows(own, offset(bias, g * hidden), begin, end, count, x, batch, out, row)

    else:
        add_entries = entries_adder(kind, height, 1, gates, not packed)

        @inline
        def multiply(work, entries, weights, bias, x, count, sums, begin, end):
            hidden, padded = work.hidden, entries.padded
            places, diagonal = pointer_to(entries.places, place), pointer_to(entries.diagonal, place)
            columns, starts = pointer_to(entries.columns, np.int32), pointer_to(entries.starts, np.int64)
            rows = pointer_to(entries.rows, np.int64)
            matrix = weights, places, columns, starts, rows, entries.slices, diagonal, padded
            for b in range(work.batch):
                out = offset(sums, b * entries.row)
                for g in range(gates):
                    for j in range(hidden):
                        out[g * padded + j] = bias[g * hidden + j]
                add_entries(matrix, hidden, count, offset(x, b * count), count, out, entries.row, 1)

    return multiply


@functools.cache
def _loop(
    dtype: type, cell: str, kind_ih: str, height_ih: int, kind_hh: str, height_hh: int, packed: bool, keep: bool = False
) -> Any:
    """The loop; addresses of c are those of h where there is none.  If `packed`, places are the values themselves.

    For the gradients, ``keep`` leaves in `projected` and `kept` what ``loops.forward`` does, and of an RNN the new h.
    """
    unit, largest = FORWARD_UNIT[cell], dtype(np.finfo(dtype).max)
    multiply_x = _product(dtype, GATES[cell], kind_ih, height_ih, packed)
    multiply_h = _product(dtype, GATES[cell], kind_hh, height_hh, packed)

    @compiled_loop
    def run(address):
        work = structure_at(address, _WORK)
        x, h = pointer_to(work.x, dtype), pointer_to(work.h, dtype)
        c, new_h, new_c = pointer_to(work.c, dtype), pointer_to(work.new_h, dtype), pointer_to(work.new_c, dtype)
        output, kept = pointer_to(work.output, dtype), pointer_to(work.kept, dtype)
        projected, sums = pointer_to(work.projected, dtype), pointer_to(work.sums, dtype)
        batch, hidden, inputs, ih, hh = work.batch, work.hidden, work.inputs, work.ih, work.hh
        # Read once: a store might change them, which would keep the gates from being vectorised.
        row_ih, row_hh, padded_ih, padded_hh = ih.row, hh.row, ih.padded, hh.padded
        weights_ih, bias_ih = pointer_to(work.weights_ih, dtype), pointer_to(work.bias_ih, dtype)
        weights_hh, bias_hh = pointer_to(work.weights_hh, dtype), pointer_to(work.bias_hh, dtype)
        wrong = kind_ih != "dense" and not are_finite(x, 0, batch * inputs, largest)
        wrong |= kind_hh != "dense" and not are_finite(h, 0, batch * hidden, largest)
        if wrong:
            work.not_finite = 1
        task = take_task(address)
        while task < work.tasks and not wrong:
            begin = task * work.group
            end = min(begin + work.group, hidden)
            multiply_x(work, ih, weights_ih, bias_ih, x, inputs, projected, begin, end)
            multiply_h(work, hh, weights_hh, bias_hh, h, hidden, sums, begin, end)
            for b in range(batch):
                at = b * hidden
                arrays = projected, b * row_ih, sums, b * row_hh, new_h, new_c, at, output, kept, at
                for j in range(begin, end):  # a loop of its own, or the gates would not be vectorised
                    new_c[at + j] = c[at + j]
                    new_h[at + j] = h[at + j]
                for j in range(begin, end):
                    unit(keep, j, padded_ih, padded_hh, arrays)
            task = take_task(address)

    return run


class _Matrix:
    """How a matrix is read: dense, or by entries, then for at most so many sequences."""

    def __init__(self, kind: str = "dense", height: int = 1, padded: int = 0, most: int = 0, **arrays: Tensor) -> None:
        self.kind, self.height, self.padded, self.most, self.arrays = kind, height, padded, most, arrays


_DENSE = _Matrix()


def _matrix_of(mask: Tensor, gates: int, path: str | None) -> _Matrix | None:
    """None if reading all weights is faster, or a pruned weight on the diagonal is inside a block."""
    block = derived_from(mask, "block", lambda: block_of(mask, gates))
    kind, kept, inputs = "sparse" if block == (1, 1) else "block", int(mask.sum()), mask.shape[1]
    most = most_sequences(kind, kept, mask.numel()) if path is None else max(MOST_SEQUENCES.values()) * (path == kind)
    if kept == mask.numel() or not most:
        return None
    entries, hidden = forward_entries(mask, block, gates), len(mask) // gates
    if entries.kind == "shared":
        first, rows = entries.places[:, :1], torch.arange(entries.height, device="cpu") * inputs
        inside = first // inputs % hidden + rows // inputs < hidden
        if not mask.flatten()[(first + rows).where(inside, first)].all():
            return None
        if block[1] == BLOCK_WIDTH and inputs % BLOCK_WIDTH == 0:
            places, columns = (x[::BLOCK_WIDTH].contiguous() for x in (entries.places, entries.columns))
            starts = entries.starts // BLOCK_WIDTH
            entries = entries._replace(kind="blocks", places=places, columns=columns, starts=starts)

    def kept_places(places: Tensor) -> Tensor:
        """With -1 for those that are pruned."""
        return torch.where(mask.flatten()[places], places, -1).to(torch.int32)

    places = kept_places(entries.places) if entries.kind == "own" else entries.places[:, 0].to(torch.int32)
    arrays = {"columns": entries.columns, "starts": entries.starts, "rows": entries.rows}
    arrays |= {"places": places, "diagonal": kept_places(entries.diagonal)}
    return _Matrix(entries.kind, entries.height, entries.padded, most, **arrays)


def threads_of(gates: int, hidden: int, inputs: int, batch: int) -> int:
    """How many threads a step of a dense layer takes."""
    return threads_for(gates * hidden * (inputs + hidden) * batch // 8)  # weights are multiplied 8 at once


class Step:
    """One step of a layer of some sizes and masks."""

    def __init__(
        self,
        cell: str,
        dtype: torch.dtype,
        hidden: int,
        inputs: int,
        batch: int,
        ih: _Matrix,
        hh: _Matrix,
        packed: bool = False,
    ) -> None:
        gates = GATES[cell]
        dense = ih.kind == hh.kind == "dense"
        self._threads = threads_of(gates, hidden, inputs, batch) if dense else 1
        variant = NUMPY_DTYPES[dtype], cell, ih.kind, ih.height, hh.kind, hh.height, packed
        self._loop, self._keeping = _loop(*variant), functools.partial(_loop, *variant, keep=True)
        self._no_bias = torch.zeros(gates * hidden, dtype=dtype, device="cpu")
        self._kept_alive = ih, hh
        sizes: dict[str, Any] = {"tasks": 1, "group": hidden, "batch": batch, "hidden": hidden, "inputs": inputs}
        if dense and self._threads > 1:
            sizes |= {"tasks": -(-hidden // GROUP), "group": GROUP}
        rows = []
        for name, matrix in (("ih", ih), ("hh", hh)):
            padded = matrix.padded or -(-hidden // ROWS) * ROWS
            rows.append(gates * padded + (SLICE if matrix.kind == "own" else 0))
            addresses = {key: x.data_ptr() for key, x in matrix.arrays.items()}
            bias, weights = self._no_bias.data_ptr(), addresses.pop("weights", 0)
            slices = len(matrix.arrays["starts"]) - 1 if "starts" in addresses else 0
            entries = _Entries(row=rows[-1], padded=padded, slices=slices, **addresses)
            sizes |= {f"weights_{name}": weights, f"bias_{name}": bias, name: entries}
        self._work = Work(**sizes)
        self._sums = batch * rows[0] * dtype.itemsize  # their offset in the scratch memory, in bytes
        self.rows = rows[0]  # of a sequence's products with x
        self.scratch = batch * sum(rows)  # numbers of scratch memory that a call needs

    def __call__(
        self,
        x: int,
        h: int,
        c: int,
        new_h: int,
        new_c: int,
        output: int,
        scratch: int,
        weights: Sequence[Tensor],
        pre: int = 0,
        kept: int = 0,
    ) -> bool:
        """Compute the next state; all but the weights, in torch.nn's order, are addresses.

        `pre` and `kept`, if given, are where to leave what the gradients need, see :func:`_loop`.
        False if something was not finite, to which pruned weights contribute: the results are then invalid.
        """
        work = Work.from_buffer_copy(self._work)
        work.x, work.h, work.c, work.new_h, work.new_c, work.output = x, h, c, new_h, new_c, output
        work.projected, work.sums, work.kept = pre or scratch, scratch + self._sums, kept
        work.weights_ih, work.weights_hh = weights[0].data_ptr(), weights[1].data_ptr()
        if len(weights) == 4:
            work.bias_ih, work.bias_hh = weights[2].data_ptr(), weights[3].data_ptr()
        return self._run(work, self._keeping() if pre else self._loop)

    def _run(self, work: Work, loop: Any) -> bool:
        if self._threads > 1:
            run_loop(loop, work, self._threads)
        else:
            loop.ctypes(ctypes.addressof(work))
        return not work.not_finite


class FrozenStep(Step):
    """A step of a layer with constant weights, pruned ones packed; for one thread at a time."""

    def __init__(
        self, cell: str, batch: int, weights: list[Tensor], mask_ih: Tensor | None, mask_hh: Tensor | None
    ) -> None:
        ih, hh = (_packed(weights[i], mask, GATES[cell], batch) for i, mask in enumerate((mask_ih, mask_hh)))
        dtype, inputs, hidden = weights[0].dtype, weights[0].shape[1], weights[1].shape[1]
        super().__init__(cell, dtype, hidden, inputs, batch, ih, hh, packed=True)
        self._weights, self._scratch = weights, weights[0].new_empty(self.scratch)
        work, room = self._work, self._scratch.data_ptr()
        work.projected, work.sums = room, room + self._sums
        if len(weights) == 4:
            work.bias_ih, work.bias_hh = weights[2].data_ptr(), weights[3].data_ptr()

    def __call__(self, x: int, h: int, c: int, new_h: int, new_c: int, output: int, *_: Any) -> bool:
        """As a step's, which has scratch memory and weights already, without gradients."""
        work = self._work
        work.next_task = work.not_finite = 0
        work.x, work.h, work.c, work.new_h, work.new_c, work.output = x, h, c, new_h, new_c, output
        return self._run(work, self._loop)


class StepOfLayers:
    """One step through stacked layers, prepared for the shapes of an input and of states."""

    def __init__(self, steps: Sequence[Step], x: Tensor, state_shape: tuple[int, ...], states: int) -> None:
        hidden = state_shape[-1]
        self._steps, self._states, self._zero = steps, range(states), x.new_zeros(state_shape)
        self._width = x.numel() // x.shape[-1] * hidden * x.itemsize  # bytes of a layer's state
        self._state = state_shape, self._zero.stride(), x.dtype
        output = x.new_empty((*x.shape[:-1], hidden))
        self._output = tuple(output.shape), output.stride(), x.dtype
        self._room = (max(step.scratch for step in steps),), (1,), x.dtype
        batch, layers = x.numel() // x.shape[-1], len(steps)
        sizes = (layers, batch, steps[0].rows), (layers, batch, hidden), (layers - 1, batch, hidden)
        self._rows = batch * steps[0].rows * x.itemsize  # bytes of what a layer saves of its gates
        self._saved = [(size, x.new_empty(size).stride(), x.dtype) for size in sizes]

    def __call__(self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> Any:
        """The output and the next states, given a contiguous input and states and all layers' weights.

        None if something was not finite, as for a :class:`Step`.
        """
        output, new = empty(*self._output), [empty(*self._state) for _ in self._states]
        return (output, new) if self.into(output, new, x, states, weights) else None

    def with_saved(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The same of dense layers, and what their gradients need: see ``step_gradients.py``."""
        output, new = empty(*self._output), [empty(*self._state) for _ in self._states]
        saved = [empty(*one) for one in self._saved]
        self.into(output, new, x, states, weights, saved)
        return output, new, saved

    def into(
        self,
        output: Tensor,
        new: Sequence[Tensor],
        x: Tensor,
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        saved: Sequence[Tensor] = (),
    ) -> bool:
        """The same into the memory of the results; False if something was not finite."""
        old, room = states or (self._zero,), empty(*self._room)
        h, c, new_h, new_c = old[0].data_ptr(), old[-1].data_ptr(), new[0].data_ptr(), new[-1].data_ptr()
        source, target, scratch = x.data_ptr(), output.data_ptr(), room.data_ptr()
        size, last, width = len(weights) // len(self._steps), len(self._steps) - 1, self._width
        pre, kept, below = (tensor.data_ptr() for tensor in saved) if saved else (0, 0, 0)
        for layer, step in enumerate(self._steps):
            own = weights[layer * size : (layer + 1) * size]
            to = below if saved and layer < last else target  # of layers without `saved` the last one's stays
            if not step(source, h, c, new_h, new_c, to, scratch, own, pre, kept):
                return False
            source = new_h
            h, c, new_h, new_c = h + width, c + width, new_h + width, new_c + width
            if saved:
                pre, kept, below = pre + self._rows, kept + width, below + width
        return True


def _packed(weight: Tensor, mask: Tensor | None, gates: int, batch: int) -> _Matrix:
    """How a matrix with constant weights is read; those of a pruned one are packed in the order of the entries."""
    if mask is None:
        return _Matrix(weights=weight)
    block = block_of(mask, gates)
    if batch > most_sequences("sparse" if block == (1, 1) else "block", int(mask.sum()), mask.numel()):
        return _Matrix(weights=weight)
    entries = forward_entries(mask, block, gates)
    arrays = {"columns": entries.columns, "starts": entries.starts, "rows": entries.rows}
    values, diagonal = (weight.flatten()[places].contiguous() for places in (entries.places, entries.diagonal))
    arrays |= {"weights": values, "places": values, "diagonal": diagonal}
    return _Matrix(entries.kind, entries.height, entries.padded, batch, **arrays)


_make = functools.lru_cache(256)(Step)


def step_of(
    cell: str,
    dtype: torch.dtype,
    hidden: int,
    inputs: int,
    batch: int,
    mask_ih: Tensor | None,
    mask_hh: Tensor | None,
    path: str | None,
) -> Step | None:
    """A layer's step, prepared once for its sizes and masks; None where that would not be faster.

    Without ``mask_ih`` all input weights are read.
    """
    if batch > MOST_SEQUENCES.get(dtype, 0):
        return None
    matrices = []
    for mask in (mask_ih, mask_hh):
        matrix = _DENSE if mask is None else _prepared(mask, GATES[cell], path)
        if matrix is None or (mask is not None and batch > matrix.most):
            return None
        matrices.append(matrix)
    return _make(cell, dtype, hidden, inputs, batch, *matrices)


def _prepared(mask: Tensor, gates: int, path: str | None) -> _Matrix | None:
    found: _Matrix | None = derived_from(mask, ("step", path), lambda: _matrix_of(mask, gates, path))
    return found
