"""Estimates the time of a layer in cuDNN, to decide whether torch's kernels are faster than ours."""

from typing import NamedTuple

import torch

from ostinato.kernels.persistent.cuda.heuristics import cudnn
from ostinato.kernels.persistent.cuda.heuristics.geometry import ceil_div
from ostinato.kernels.persistent.plan import GATES, Call


class _TorchsCost(NamedTuple):
    """Microseconds of a step in cuDNN without the GEMMs over all steps, in a CUDA graph on an H200.

    Fitted to 190 GRUs and LSTMs of 128 to 2048 units with 1 to 512 sequences, nearly all within 25 %.
    """

    step: float  # fixed, for launches
    weights: float  # per million weights read
    gates: float  # per hundred thousand gates of all sequences
    products: float = 0.0  # per hundred million multiplications


# By precision, "16" bits, "tf32" or exact "float32", and by whether gradients are computed.
_TORCHS_COSTS = {
    ("16", False): _TorchsCost(step=5.54, weights=0.35, gates=0.25, products=0.07),
    ("16", True): _TorchsCost(step=11.4, weights=0.63, gates=1.29),
    ("tf32", False): _TorchsCost(step=7.31, weights=1.09, gates=0.08, products=0.97),
    ("tf32", True): _TorchsCost(step=22.2, weights=2.08, gates=1.97, products=0.8),
    ("float32", False): _TorchsCost(step=8.11, weights=1.52, gates=0.75, products=4.03),
    ("float32", True): _TorchsCost(step=19.8, weights=4.3, gates=3.7, products=6.63),
}
_KEPT = 48.0  # the thousands of weights that fit into the registers of a multiprocessor
# The least cost factor on tensor cores if rows of states and weights do not begin at multiples of 16 bytes: 1.7 to 3
# was measured.
_MISALIGNED = 1.7
# The cost factor of projecting h, beside the weights read: 1.1 to 1.9 was measured, 0.8 in exact float32 without
# gradients.
_PROJECTED = 1.5


def _precision(dtype: torch.dtype, tf32: bool) -> str:
    return "16" if dtype.itemsize == 2 else "tf32" if tf32 else "float32"


def torchs_microseconds(call: Call, tf32: bool, processors: int) -> float:
    """The estimated time of all steps of a call in cuDNN, on a GPU with so many multiprocessors.

    Like the estimates of our kernels, it leaves out the GEMMs over all steps, but for small layers it includes by how
    much cuDNN's take longer than ours.
    """
    if not call.training and cudnn.is_one_launch(call):
        return call.at_once * _small_layer(call, processors)
    return call.at_once * call.length * _step(call, tf32)


def _small_layer(call: Call, processors: int) -> float:
    """The time of all steps of a layer that cuDNN runs in one launch, without gradients.

    A thread block keeps one sequence and, up to ``_KEPT`` thousand, the weights.  Layers in float16 that cuDNN runs on
    tensor cores take about as long for any number of sequences.  Fitted to 380 layers of 16 to 384 units with 1 to 1024
    sequences, in a CUDA graph on an H200: half within 7 %, and more than 20 % off only where ours are faster.
    """
    hidden, gates = call.hidden_size, GATES[call.cell]
    if call.dtype == torch.float16 and hidden % 32 == call.batch % 8 == 0:
        return call.length * (0.65 + 0.0075 * hidden if gates > 1 else 0.48 + 0.0021 * hidden)
    weights = gates * hidden**2 / 1e3
    blocks = min(max(1, int(_KEPT / weights)), 8)  # resident on a multiprocessor at once
    sequences = ceil_div(call.batch, processors)  # per multiprocessor
    step = 0.25 + 0.0085 * min(weights, _KEPT) + (0.07 if gates > 1 else 0.0)
    step *= 1 + 0.086 * (min(sequences, blocks) - 1)
    step += 0.018 * min(call.batch / processors, blocks) * gates * hidden * call.dtype.itemsize / 100
    step += 0.07 * max(0.0, weights - _KEPT)
    return 0.5 * min(weights, 80.0) - 4.0 + call.length * ceil_div(sequences, blocks) * step


def _step(call: Call, tf32: bool) -> float:
    """The time of one step of any other layer; small GRUs in float32 with gradients have an estimate of their own."""
    if call.training and call.cell == "gru" and call.dtype == torch.float32 and cudnn.is_one_launch(call):
        return 1.5 + 0.046 * call.batch
    precision = _precision(call.dtype, tf32)
    cost = _TORCHS_COSTS[precision, call.training]
    gates = GATES[call.cell] * call.hidden_size
    inputs = call.proj_size or call.hidden_size
    weights = gates * inputs + call.proj_size * call.hidden_size
    step = cost.step + cost.weights * weights / 1e6
    step += cost.gates * call.batch * gates / 1e5 + cost.products * call.batch * weights / 1e8
    misaligned = precision != "float32" and inputs * call.dtype.itemsize % 16
    return step * (_MISALIGNED if misaligned else 1) * (_PROJECTED if call.proj_size else 1)
