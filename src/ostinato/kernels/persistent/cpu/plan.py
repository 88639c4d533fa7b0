"""How a layer runs on a CPU: by loops over all weights or those that a mask keeps, or by torch's kernels if faster."""

import math

import torch
from torch import Tensor

from ostinato.kernels.cpu.intrinsics import NUMPY_DTYPES
from ostinato.kernels.persistent.cpu.products import FEATURES
from ostinato.kernels.persistent.cpu.step_matrices import MOST_SEQUENCES, most_sequences
from ostinato.kernels.persistent.plan import GATES, Call, KernelPath, Plan, no_kernel

# Measured on two cores of a Zen 5.
FEW_STEPS = {"rnn_tanh": 24, "rnn_relu": 24, "gru": 8, "lstm": 32}  # with fewer, packing weights does not pay off
FEW_TRAINED = {"rnn_tanh": 10, "rnn_relu": 10, "gru": 6, "lstm": 16}  # with gradients, on a Xeon of 2023
FEW_STEPS_OF_BLOCKS = 16  # the same for few sequences, if a tenth of the weights is left, in blocks
DENSEST_BLOCKS = {
    False: 0.4,
    True: 0.3,
}  # density above which dense loops are faster; by whether gradients are computed
DENSEST_ROWS = {False: 0.15, True: 0.04}  # the same without blocks, by whether there are several sequences
LARGE_RNN = 512  # units from which on torch takes longer for each step of an RNN, too
# Measured on two cores of a Zen 4.
FEW_OF_RNN = 16  # the most steps that FEW_STEPS and the size may require for an RNN, on AMD's processors
FEW_PACKED = {"rnn_tanh": 14, "rnn_relu": 14, "gru": 8, "lstm": 8}  # for packed sequences, which torch slices
# The most units of an LSTM in float32, by its most sequences, for which oneDNN's threads wait longer for each other at
# every step than ours take without gradients, where each thread has sequences of its own; half as many units with
# gradients.  One sequence takes one thread, up to SHARED units.
SMALL_LSTMS = {1: 80, 8: 256, 15: 32, 32: 80}
SHARED = 128
# On Intel's processors, unlike AMD's, torch's MKL multiplies at full speed.  Measured on two cores of a Xeon of 2023:
# there our loops need more steps to pay off, and it is better not to read weights in place that exceed a core's cache.
INTEL = FEATURES.get("sse4.2", False) and not FEATURES.get("sse4a", False)  # AMD's processors have both
FEW_OF_INTEL, CACHED = 1.6, 2 << 20  # the factor of these steps, and the bytes of that cache

# The most of :func:`_saved_by_projection` for which torch's kernels take longer all the same, by whether gradients are
# computed.  Measured on two cores of a Zen 3.
MOST_SAVED = {False: 60_000, True: 1_000_000}


def make_plan(call: Call, mask_hh: Tensor | None, block: tuple[int, int] | None, tf32: bool = False) -> Plan:
    """The plan by which a layer runs on the CPU; the arguments are those of ``cuda.make_plan``.

    Raises ValueError for a `path` that the layer's weights do not allow.
    """
    _, cell, hidden_size, batch, dtype, training, steps, path, at_once, resets, packed, compared, *_ = call
    if dtype not in NUMPY_DTYPES:
        return no_kernel(f"layers on the CPU compute in float32 and float64, not in {dtype}")
    entries: KernelPath | None = None
    kept, weights, density = 1, 1, 1.0
    if mask_hh is not None and block is not None:
        kept, weights = int(mask_hh.sum()), mask_hh.numel()
        density = kept / weights
        entries = None if density == 1 else "sparse" if block == (1, 1) else "block"
    if path is None:
        if steps == at_once == 1 and not resets:
            if entries and not training and batch <= most_sequences(entries, kept, weights):
                return _of_entries(entries, density, block)
            if not (entries and training) and batch <= MOST_SEQUENCES[dtype]:
                return Plan("dense", reason="one step reads the weights once, where they are")
        alone = at_once == 1 and not (training or resets or packed) and mask_hh is None
        if steps is not None and alone and 1 < steps <= most_single_steps(cell, hidden_size, batch, dtype):
            return Plan("dense", reason=f"each of {steps} steps reads the weights where they are")
        densest = DENSEST_BLOCKS[training] if entries == "block" else DENSEST_ROWS[batch > 1]
        if _in_onednn(call):  # the alternative is then oneDNN, not our own dense loops
            densest /= 2 if entries == "block" else 4
        path = entries if entries is not None and density <= densest else "dense"
        reason = _why_torch(call, path, density)
        if compared and reason and not resets:  # torch's kernels do not support resets
            return no_kernel(reason)
    elif path not in ("dense", entries):
        raise ValueError(f"path must be 'dense'{f' or {entries!r}' if entries else ''}; got {path!r}")
    if path == "dense":
        return Plan(path, reason="the weights stay in the CPU's caches for all steps")
    return _of_entries(path, density, block)


def _of_entries(path: KernelPath, density: float, block: tuple[int, int] | None) -> Plan:
    return Plan(path, reason=f"{density:.0%} of the weights are left, and only these are read", geometry=block)


def _few_steps(cell: str, hidden_size: int) -> int:
    return FEW_STEPS[cell] + hidden_size // 16


def _few_dense_steps(cell: str, hidden_size: int) -> int:
    return int(_few_steps(cell, hidden_size) * (FEW_OF_INTEL if INTEL else 1))


def most_single_steps(cell: str, hidden_size: int, batch: int, dtype: torch.dtype) -> int:
    """The most steps of a dense layer without gradients for which single steps, reading weights in place, are fastest.

    Measured on two cores of a Zen 4: 0.2 to 0.9 of torch's time.  For an LSTM in float32, oneDNN first packs the
    weights, and then takes less time for each step.  An RNN of few units takes less time than our calls of its steps.
    """
    both_matrices = 2 * GATES[cell] * hidden_size**2 * dtype.itemsize  # bytes that each step reads; torch's reads one
    if not 0 < batch <= MOST_SEQUENCES.get(dtype, 0) or (INTEL and both_matrices >= CACHED):
        return 0
    if cell == "gru" or (cell != "lstm" and hidden_size >= LARGE_RNN):
        return _few_dense_steps(cell, hidden_size) - 1
    return min(6, 48 // batch) if cell == "lstm" else 4


def _few_steps_of_entries(call: Call, path: KernelPath, density: float) -> float:
    """The number of steps from which on packing the kept weights pays off: about the same for layers of any size.

    It is less for large layers in oneDNN, which packs weights, too.  Measured on two cores of an Intel Xeon of 2023,
    with 32 to 1024 units and a twentieth to a quarter of the weights.
    """
    few = (512 / call.hidden_size if _in_onednn(call) else 1.0) * FEW_STEPS_OF_BLOCKS * (0.5 + 5 * density)
    few *= (1.5 if path == "sparse" else 1) / (2 if call.training or call.batch >= 4 else 1)
    return min(few, _few_steps(call.cell, call.hidden_size) / (2 if call.training else 1))


def _why_torch(call: Call, path: KernelPath, density: float) -> str | None:
    """Why torch's kernels are faster for a layer, if they are, by the measured number of steps from which ours are."""
    cell, hidden_size, training = call.cell, call.hidden_size, call.training
    if call.proj_size and _saved_by_projection(call) > MOST_SAVED[training]:
        return "the projections save torch's kernels more multiplications than ours save time"
    if path == "dense" and _in_onednn(call):
        return None if _is_faster_than_onednn(call) else "oneDNN's LSTM, which torch calls, is faster"
    if path != "dense":
        few = round(_few_steps_of_entries(call, path, density))
    elif call.packed and not INTEL:
        few = round(FEW_PACKED[cell] * (0.6 if training else 1)) + hidden_size // 128
    else:
        like = "gru" if call.packed and cell == "lstm" else cell
        few = FEW_TRAINED[like] + hidden_size // 128 if training else _few_dense_steps(like, hidden_size)
        if cell.startswith("rnn") and not (training or INTEL):
            few = min(few, FEW_OF_RNN)
    if call.steps is not None and call.steps < few:
        return f"weights are worth preparing for {few} steps or more"
    return None


def _saved_by_projection(call: Call) -> int:
    """The multiply-adds of a step that torch's kernels save, as ours multiply by the product of both weights."""
    return call.batch * call.hidden_size * (4 * call.hidden_size - 5 * call.proj_size)


def _in_onednn(call: Call) -> bool:
    """Whether torch runs the layer in oneDNN."""
    return call.cell == "lstm" and call.dtype == torch.float32 and not (call.packed or call.proj_size)


def _is_faster_than_onednn(call: Call) -> bool:
    """Whether dense loops are faster than oneDNN.

    Measured on two cores of a Zen 4, with 8 to 1024 units and 1 to 32 sequences.
    """
    hidden_size, batch, training = call.hidden_size, call.batch, call.training
    steps = math.inf if call.steps is None else call.steps
    if training and batch >= 16 and 256 <= hidden_size <= 512:
        return steps >= max(20, 3000 / batch)
    if call.threads == 1:
        return False
    least = 12 + 45 * (hidden_size / 128) ** 3
    if batch == 1 and SHARED < hidden_size <= 256:
        return steps >= (300 if training else least)
    most = next((units for sequences, units in SMALL_LSTMS.items() if batch <= sequences), 0)
    return hidden_size <= most / 2 and steps >= 8 * least if training else hidden_size <= most and steps >= least


def least_steps(*_: object) -> int:
    """The least number of steps for these loops: torch runs a single step, unless ``step.py`` does."""
    return 2
