"""The results of the operator ``recurrent_layer``: which of them there are, of which shapes and dtypes."""

from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.operators.dispatch import or_empty
from ostinato.kernels.persistent.arguments import Arguments
from ostinato.kernels.persistent.backends import kernels_on
from ostinato.kernels.persistent.plan import GATES


def kept_widths(given: Arguments) -> tuple[int, int]:
    """The widths of the saved c and of the saved pre-activations, 0 of what is not kept.

    A GRU, which has no c, keeps the recurrent part of its candidate's pre-activation there, if it keeps any.
    """
    if not given.training:
        return 0, 0
    cell, hidden = given.cell, given.weight_hh.shape[1]
    keeps_gates = kernels_on(given.weight_hh.device).keeps_gates(cell)
    return hidden if cell == "lstm" or keeps_gates else 0, GATES[cell] * hidden if keeps_gates else 0


def _dtype_of_c(given: Arguments) -> torch.dtype:
    dtype = given.weight_hh.dtype
    return torch.promote_types(dtype, torch.float32) if given.cell == "lstm" else dtype


def empty_results(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors like the operator's results."""
    given = Arguments(*args)
    x, hidden = given.x, given.weight_hh.shape[1]
    output, h_n = x.new_empty(x.shape[0], hidden), x.new_empty(given.batch, hidden)
    c_width, gates_width = kept_widths(given)
    c = x.new_empty(x.shape[0], c_width, dtype=_dtype_of_c(given))
    c_n = torch.empty_like(h_n) if given.cell == "lstm" else x.new_empty(0)
    return output, h_n, c_n, c, x.new_empty(x.shape[0], gates_width)


def whole(args: tuple, results: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """An executor's results as the operator's, with empty tensors for absent ones."""
    output, h_n, c_n, c, gates = results
    if c is None:
        given = Arguments(*args)
        c = output.new_empty(len(output), kept_widths(given)[0], dtype=_dtype_of_c(given))
    return output, h_n, or_empty(c_n, output), c, output.new_empty(len(output), 0) if gates is None else gates
