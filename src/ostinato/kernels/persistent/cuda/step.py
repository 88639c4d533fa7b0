"""One step of RNN, GRU or LSTM layers for few sequences on NVIDIA GPUs: one kernel per layer, ``step.cu``.

A step in cuDNN takes more launches, and two GEMMs and a kernel for the gates take longer to launch than to run.
"""

import functools
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.cuda.nvrtc import SCALARS, Macros, empty
from ostinato.kernels.persistent.cuda.heuristics.cells import CELLS
from ostinato.kernels.persistent.cuda.source import cell_code
from ostinato.kernels.persistent.plan import GATES, KernelPath

WARPS = 4  # in a block
MOST_AT_ONCE = 8  # sequences that a warp computes at once
# The most weights, counted once for each group of sequences, that a step of more than 2 sequences reads here: for more,
# tensor cores are faster.
MOST_READ = 1 << 23


class LayerStep:
    """One step of a layer, prepared for its sizes."""

    def __init__(self, cell: str, dtype: torch.dtype, hidden: int, inputs: int, batch: int) -> None:
        self._layer = cell, dtype, batch, inputs, hidden
        self.rows = GATES[cell] * hidden  # of the weight matrices
        self._launches: dict[tuple[int, int], Callable[..., None]] = {}  # by device and the addresses' low bits

    def __call__(
        self, device: int, x: int, h: int, c: int, new_h: int, new_c: int, output: int, weights: Sequence[Tensor]
    ) -> None:
        """Write the next states, and h also to the output.

        All arguments but the device and the weights, in torch.nn's order, are addresses; h or c 0 stands for zeros.
        """
        addresses = [weight.data_ptr() for weight in weights]
        low_bits = (x | h | addresses[0] | addresses[1]) & 7
        launch = self._launches.get((device, low_bits))
        if launch is None:
            launch = self._launches[device, low_bits] = self._prepare(device, low_bits)
        biases = addresses[2:] or (0, 0)
        launch(x, h, *addresses[:2], *biases, c, new_h, new_c, output)

    def _prepare(self, device: int, low_bits: int) -> Callable[..., None]:
        """A function that launches the kernel for addresses with these low bits."""
        cell, dtype, batch, inputs, hidden = self._layer
        kernel = nvrtc.load_kernel("step", source(cell), macros(dtype, batch, inputs, hidden, low_bits), device)
        groups = _groups(batch)
        pack, sizes = struct.Struct("=10Q").pack, struct.pack("=4i", inputs, hidden, batch, groups)
        return kernel.prepared(device, -(-hidden * groups // WARPS), 32 * WARPS, 0, pack, sizes)


class StepOfLayers:
    """One step through stacked layers, one after the other, prepared for the shapes of an input and of states."""

    def __init__(self, steps: Sequence[LayerStep], x: Tensor, state_shape: tuple[int, ...], count: int) -> None:
        hidden = state_shape[-1]
        self._steps, self._count, self._device = steps, count, x.get_device()
        self._width = x.numel() // x.shape[-1] * hidden * x.itemsize  # bytes of a layer's state
        self._state, self._output = (
            (tuple(y.shape), y.stride(), y.dtype)
            for y in (x.new_empty(state_shape), x.new_empty((*x.shape[:-1], hidden)))
        )

    def __call__(self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The output and the next states, given a contiguous input and states, if any, and all layers' weights."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self(x, states, weights)
        output, new = empty(*self._output), [empty(*self._state) for _ in range(self._count)]
        h, c = (states[0].data_ptr(), states[-1].data_ptr()) if states else (0, 0)
        new_h, new_c = new[0].data_ptr(), new[-1].data_ptr()
        source, target, size = x.data_ptr(), output.data_ptr(), len(weights) // len(self._steps)
        for layer, step in enumerate(self._steps):
            layer_weights = weights[layer * size : (layer + 1) * size]
            # All layers write to the output, so that it ends up with the last one's.
            step(self._device, source, h, c, new_h, new_c, target, layer_weights)
            source, width = new_h, self._width
            new_h, new_c = new_h + width, new_c + width
            if states:
                h, c = h + width, c + width
        return output, new


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
    """One step of a layer, prepared once for its sizes; None where torch's kernels are as fast."""
    large = batch > 2 and _groups(batch) * GATES[cell] * hidden * (inputs + hidden) > MOST_READ
    pruned = mask_ih is not None or mask_hh is not None
    if large or pruned or dtype not in SCALARS or not nvrtc.can_launch():
        return None
    return _make(cell, dtype, hidden, inputs, batch)


def _groups(batch: int) -> int:
    """The number of groups of sequences that warps compute at once."""
    return -(-batch // MOST_AT_ONCE)


@functools.cache
def source(cell: str) -> str:
    """The CUDA C++ of ``step.cu``, with everything that it includes."""
    own = cell_code(CELLS[cell]) + nvrtc.source("persistent/cuda/step.cu")
    return nvrtc.source("cuda/numeric.cuh", "cuda/gemv.cuh") + own


def macros(dtype: torch.dtype, batch: int, inputs: int, hidden: int, low_bits: int = 0) -> Macros:
    """The preprocessor definitions of ``step.cu``.

    `low_bits` are those of the addresses of inputs, states and weights, whose alignment limits the width of loads.
    """
    sizes = 8 // dtype.itemsize | inputs | hidden | low_bits // dtype.itemsize
    names = {"SCALAR": SCALARS[dtype], "VEC": sizes & -sizes, "WARPS": WARPS}
    return (*names.items(), ("BATCH", min(batch, MOST_AT_ONCE)))
