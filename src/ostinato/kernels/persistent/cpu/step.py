"""One step of a layer on the CPU: both products and the gates in one loop, which reads the parameters in place.

Each weight is used only once, so packing would not pay off.  Apart from reading the weights, a call costs mostly
Python's time, so everything that depends only on sizes and masks is prepared.  Threads share the hidden units of dense
layers.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.cpu.intrinsics import NUMPY_DTYPES
from ostinato.kernels.cpu.threads import run_loop, threads_for
from ostinato.kernels.persistent.cpu.entries import SLICE
from ostinato.kernels.persistent.cpu.products import ROWS
from ostinato.kernels.persistent.cpu.step_loop import MatrixWork, Work, step_loop
from ostinato.kernels.persistent.cpu.step_matrices import DENSE, MOST_SEQUENCES, Matrix, matrix_of, packed_matrix
from ostinato.kernels.persistent.plan import GATES, KernelPath

GROUP = 16  # units in a task: a cache line of float32
empty: Any = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]  # faster than through the dispatcher


def threads_of(gates: int, hidden: int, inputs: int, batch: int) -> int:
    """The number of threads for a step of a dense layer."""
    return threads_for(gates * hidden * (inputs + hidden) * batch // 8)  # 8 weights are multiplied at once


class LayerStep:
    """One step of a layer, prepared for its sizes and masks."""

    def __init__(
        self,
        cell: str,
        dtype: torch.dtype,
        hidden: int,
        inputs: int,
        batch: int,
        ih: Matrix,
        hh: Matrix,
        packed: bool = False,
    ) -> None:
        gates = GATES[cell]
        dense = ih.kind == hh.kind == "dense"
        self._threads = threads_of(gates, hidden, inputs, batch) if dense else 1
        variant = NUMPY_DTYPES[dtype], cell, ih.kind, ih.height, hh.kind, hh.height, packed
        self._loop, self._keeping = step_loop(*variant), functools.partial(step_loop, *variant, keep=True)
        self._no_bias = torch.zeros(gates * hidden, dtype=dtype, device="cpu")
        self._matrices = ih, hh  # keeps the memory of the addresses alive
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
            matrix_work = MatrixWork(row=rows[-1], padded=padded, slices=slices, **addresses)
            sizes |= {f"weights_{name}": weights, f"bias_{name}": bias, name: matrix_work}
        self._work = Work(**sizes)
        self._sums = batch * rows[0] * dtype.itemsize  # byte offset of the products with h in the scratch memory
        self.rows = rows[0]  # numbers of a sequence's products with x
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
        """Compute the next states; all arguments but the weights, in torch.nn's order, are addresses.

        `pre` and `kept`, if given, receive what the gradients need, see :func:`step_loop`.  Returns False if an input
        or state by which pruned weights are multiplied is not finite: the results are then invalid.
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


class FrozenStep(LayerStep):
    """A step of a layer with constant weights, pruned ones packed; for one thread at a time."""

    def __init__(
        self, cell: str, batch: int, weights: list[Tensor], mask_ih: Tensor | None, mask_hh: Tensor | None
    ) -> None:
        ih, hh = (packed_matrix(weights[i], mask, GATES[cell], batch) for i, mask in enumerate((mask_ih, mask_hh)))
        dtype, inputs, hidden = weights[0].dtype, weights[0].shape[1], weights[1].shape[1]
        super().__init__(cell, dtype, hidden, inputs, batch, ih, hh, packed=True)
        self._weights, self._scratch = weights, weights[0].new_empty(self.scratch)
        work, room = self._work, self._scratch.data_ptr()
        work.projected, work.sums = room, room + self._sums
        if len(weights) == 4:
            work.bias_ih, work.bias_hh = weights[2].data_ptr(), weights[3].data_ptr()

    def __call__(self, x: int, h: int, c: int, new_h: int, new_c: int, output: int, *_: Any) -> bool:
        """:class:`LayerStep`'s call with its own scratch memory and weights, and without gradients."""
        work = self._work
        work.next_task = work.not_finite = 0
        work.x, work.h, work.c, work.new_h, work.new_c, work.output = x, h, c, new_h, new_c, output
        return self._run(work, self._loop)


class StepOfLayers:
    """One step through stacked layers, prepared for the shapes of an input and of states."""

    def __init__(self, steps: Sequence[LayerStep], x: Tensor, state_shape: tuple[int, ...], states: int) -> None:
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

    def __call__(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The output and the next states, given a contiguous input and states and all layers' weights.

        None if a :class:`LayerStep` meets a number that is not finite.
        """
        output, new = empty(*self._output), [empty(*self._state) for _ in self._states]
        return (output, new) if self.into(output, new, x, states, weights) else None

    def with_saved(
        self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The results, and for dense layers the tensors that ``step_gradients.py`` needs."""
        output, new = empty(*self._output), [empty(*self._state) for _ in self._states]
        saved = [empty(*size_stride_dtype) for size_stride_dtype in self._saved]
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
        """Write the results to `output` and `new`; returns False if a layer meets a number that is not finite."""
        old, room = states or (self._zero,), empty(*self._room)
        h, c, new_h, new_c = old[0].data_ptr(), old[-1].data_ptr(), new[0].data_ptr(), new[-1].data_ptr()
        source, target, scratch = x.data_ptr(), output.data_ptr(), room.data_ptr()
        size, last, width = len(weights) // len(self._steps), len(self._steps) - 1, self._width
        pre, kept, below = (tensor.data_ptr() for tensor in saved) if saved else (0, 0, 0)
        for layer, step in enumerate(self._steps):
            layer_weights = weights[layer * size : (layer + 1) * size]
            # Without `saved`, all layers write to the output, so that it ends up with the last one's.
            to = below if saved and layer < last else target
            if not step(source, h, c, new_h, new_c, to, scratch, layer_weights, pre, kept):
                return False
            source = new_h
            h, c, new_h, new_c = h + width, c + width, new_h + width, new_c + width
            if saved:
                pre, kept, below = pre + self._rows, kept + width, below + width
        return True


_make = functools.lru_cache(256)(LayerStep)


def step_of(
    cell: str,
    dtype: torch.dtype,
    hidden: int,
    inputs: int,
    batch: int,
    mask_ih: Tensor | None,
    mask_hh: Tensor | None,
    path: KernelPath | None,
) -> LayerStep | None:
    """One step of a layer, prepared once for its sizes and masks; None where that would not be faster.

    Without ``mask_ih``, all input weights are read.
    """
    if batch > MOST_SEQUENCES.get(dtype, 0):
        return None
    matrices = []
    for mask in (mask_ih, mask_hh):
        matrix = DENSE if mask is None else matrix_of(mask, GATES[cell], path)
        if matrix is None or (mask is not None and batch > matrix.most):
            return None
        matrices.append(matrix)
    return _make(cell, dtype, hidden, inputs, batch, *matrices)
