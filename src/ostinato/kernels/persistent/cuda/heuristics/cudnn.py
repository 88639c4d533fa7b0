"""How PyTorch runs a layer in cuDNN: by which kernels, with which precision, and for which layers wrongly."""

import torch

from ostinato.kernels.persistent.plan import GATES, Call


def _most_units_of_small(cell: str, backward: bool) -> int:
    """The most units for which PyTorch takes cuDNN's kernels for small layers, if sequences are not packed."""
    if GATES[cell] == 1:
        return 256 if backward else 384
    return 128 if backward else 192


def is_one_launch(call: Call) -> bool:
    """Whether PyTorch takes cuDNN's kernels for small layers: one launch for all steps, directions and layers."""
    is_small = call.hidden_size <= _most_units_of_small(call.cell, call.training)
    return is_small and not (call.packed or call.proj_size) and call.dtype in (torch.float32, torch.float16)


def uses_tf32(cell: str, hidden_size: int, batch: int, backward: bool) -> bool:
    """Whether the recurrent products of float32 layers round to tf32 where that is allowed.

    Apart from small layers, cuDNN keeps the states of some batches exact, for RNNs of up to 512 units.  That matters
    for relu, whose gradients pass or stop by the sign of a sum.
    """
    exact = 512 if cell == "rnn_relu" and not backward else _most_units_of_small(cell, backward)
    return batch > 1 and hidden_size > exact


def errs(cell: str, hidden_size: int, batch: int, dtype: torch.dtype, both: bool) -> bool:
    """Whether cuDNN's results are wrong, as they are for small layers in float16 if the batch is a multiple of 8.

    PyTorch computes in float16 under any autocast.  Seen with PyTorch 2.11 in GRUs and LSTMs of only these sizes, but
    not in GRUs of 48 and 72 units, and in the gradients of RNNs of these sizes that have `both` directions.
    """
    if dtype.itemsize != 2 or batch % 8 or hidden_size % 8:
        return False
    if GATES[cell] == 1:
        return both and hidden_size % 32 == 0 and hidden_size <= _most_units_of_small(cell, backward=True)
    return hidden_size % 32 > 0 and 32 < hidden_size <= _most_units_of_small(cell, backward=False)
