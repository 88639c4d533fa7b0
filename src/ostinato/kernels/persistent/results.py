"""The results of the operator ``recurrent_layer``: their shapes and dtypes, and which of them are empty."""

from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.operators.dispatch import or_empty
from ostinato.kernels.persistent.arguments import Arguments
from ostinato.kernels.persistent.backends import kernels_on
from ostinato.kernels.persistent.plan import GATES


def kept_widths(arguments: Arguments) -> tuple[int, int]:
    """The widths of the saved c and of the saved pre-activations, 0 for what is not saved.

    In place of c, a GRU saves the recurrent part of its candidate's pre-activation, if it saves pre-activations.
    """
    if not arguments.training:
        return 0, 0
    cell, hidden = arguments.cell, arguments.weight_hh.shape[1]
    keeps_gates = kernels_on(arguments.weight_hh.device).keeps_gates(cell)
    return hidden if cell == "lstm" or keeps_gates else 0, GATES[cell] * hidden if keeps_gates else 0


def _dtype_of_c(arguments: Arguments) -> torch.dtype:
    dtype = arguments.weight_hh.dtype
    return torch.promote_types(dtype, torch.float32) if arguments.cell == "lstm" else dtype


def empty_results(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Uninitialised tensors with the shapes and dtypes of the operator's results."""
    arguments = Arguments(*args)
    x, hidden = arguments.x, arguments.weight_hh.shape[1]
    output, h_n = x.new_empty(x.shape[0], hidden), x.new_empty(arguments.batch, hidden)
    c_width, gates_width = kept_widths(arguments)
    c = x.new_empty(x.shape[0], c_width, dtype=_dtype_of_c(arguments))
    c_n = torch.empty_like(h_n) if arguments.cell == "lstm" else x.new_empty(0)
    return output, h_n, c_n, c, x.new_empty(x.shape[0], gates_width)


def whole(args: tuple, results: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """An executor's results as the operator returns them: with empty tensors in place of None."""
    output, h_n, c_n, c, gates = results
    if c is None:
        arguments = Arguments(*args)
        c = output.new_empty(len(output), kept_widths(arguments)[0], dtype=_dtype_of_c(arguments))
    return output, h_n, or_empty(c_n, output), c, output.new_empty(len(output), 0) if gates is None else gates
