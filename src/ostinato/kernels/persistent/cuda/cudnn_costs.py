"""The estimated time of a layer in cuDNN, by which it is left to torch."""

from typing import NamedTuple

import torch

from ostinato.kernels.persistent.cuda import cudnn
from ostinato.kernels.persistent.plan import GATES, Call


class _TorchsCost(NamedTuple):
    """Microseconds of a step in cuDNN without the GEMMs over all steps, in a CUDA graph on an H200.

    Fitted to 190 GRUs and LSTMs of 128 to 2048 units with 1 to 512 sequences, nearly all within 25 %.
    """

    step: float  # fixed, for launches
    weights: float  # per million weights read
    gates: float  # per hundred thousand gates of all sequences
    products: float = 0.0  # per hundred million multiplications


# By "16" bits, "tf32" or exact "float32", and whether gradients are taken.
_TORCHS_COSTS = {
    ("16", False): _TorchsCost(step=5.54, weights=0.35, gates=0.25, products=0.07),
    ("16", True): _TorchsCost(step=11.4, weights=0.63, gates=1.29),
    ("tf32", False): _TorchsCost(step=7.31, weights=1.09, gates=0.08, products=0.97),
    ("tf32", True): _TorchsCost(step=22.2, weights=2.08, gates=1.97, products=0.8),
    ("float32", False): _TorchsCost(step=8.11, weights=1.52, gates=0.75, products=4.03),
    ("float32", True): _TorchsCost(step=19.8, weights=4.3, gates=3.7, products=6.63),
}
# Times as long on tensor cores, at least, if rows of states and weights do not begin at multiples of 16 bytes: 1.7 to 3
# were measured.
_MISALIGNED = 1.7


def _precision(dtype: torch.dtype, tf32: bool) -> str:
    return "16" if dtype.itemsize == 2 else "tf32" if tf32 else "float32"


def torchs_microseconds(call: Call, tf32: bool) -> float:
    """The estimated time of a step in cuDNN, without the GEMMs over all steps."""
    is_small = call.hidden_size <= cudnn.most_units_of_small(call.cell, backward=True)
    if call.training and call.cell == "gru" and call.dtype == torch.float32 and is_small:
        return 1.5 + 0.046 * call.batch
    precision = _precision(call.dtype, tf32)
    cost = _TORCHS_COSTS[precision, call.training]
    gates = GATES[call.cell] * call.hidden_size
    weights = gates * call.hidden_size
    step = cost.step + cost.weights * weights / 1e6
    step += cost.gates * call.batch * gates / 1e5 + cost.products * call.batch * weights / 1e8
    return step * (_MISALIGNED if precision != "float32" and call.hidden_size * call.dtype.itemsize % 16 else 1)
