"""MinGRUCell and MinLSTMCell: one step, with the contract of ``torch.nn.GRUCell``."""

from typing import Protocol

import torch
from torch import Tensor, nn

from ostinato.checks import (
    ONE_STEP,
    check_choice,
    check_dtype,
    check_flags,
    check_floating,
    check_input,
    check_integers,
    check_like_weight,
)
from ostinato.kernels.matmul.gemm import linear
from ostinato.kernels.operators.export import refuse_script
from ostinato.kernels.recurrence.linear.layer import layer_scan
from ostinato.kernels.scan import BACKENDS
from ostinato.layers import draw_parameters
from ostinato.minimal.recurrences import CANDIDATES, GATES, recurrence_of
from ostinato.minimal.steps import StepCache, next_state, uses_next_state

_STEPS = StepCache()


class CellCall(Protocol):
    """A call of a cell, as type checkers see it."""

    def __call__(self, input: Tensor, hx: Tensor | None = None) -> Tensor: ...


class _MinimalCell(nn.Module):
    """One step of a minimal layer: :class:`torch.nn.GRUCell`'s contract."""

    cell: str
    __call__: CellCall
    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        candidate: str = "positive",
        backend: str = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers(1, input_size=input_size, hidden_size=hidden_size)
        check_flags(bias=bias)
        check_choice("candidate", candidate, tuple(CANDIDATES))
        check_choice("backend", backend, BACKENDS)
        check_dtype(dtype)
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.candidate, self.backend = candidate, backend
        rows = GATES[self.cell] * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(rows, input_size, device=device, dtype=dtype))
        self.bias_ih = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    __init__.__qualname__ = "__init__"  # Python's errors then do not name a private class

    def reset_parameters(self) -> None:
        """Draw the weight and bias from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)), as ``torch.nn.GRUCell`` does."""
        draw_parameters(self, self.hidden_size)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias}, candidate={self.candidate!r}"

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The next state, (B, hidden_size) or (hidden_size,), from the input and the previous state."""
        weight, bias, settings = self.weight_ih, self.bias_ih, (self.cell, self.candidate, self.backend)
        if not torch.compiler.is_compiling():
            state = _STEPS.run(settings, input, weight, bias, hx)
            if state is not None:
                return state
        check_input(input, self.input_size, weight, (1, 2), ONE_STEP)
        if hx is not None:
            check_floating("hx", hx)
            if hx.shape != (*input.shape[:-1], self.hidden_size):
                raise ValueError(f"hx must have shape {(*input.shape[:-1], self.hidden_size)}; got {tuple(hx.shape)}")
            check_like_weight("hx", hx, weight)
        if uses_next_state(input, weight, self.backend):
            rows, state = input.view(-1, self.input_size), None if hx is None else hx.view(-1, self.hidden_size)
            h = next_state(self.cell, self.candidate, rows, weight, bias, state)
            _STEPS.add(settings, rows, weight, bias, state)
            return h if input.dim() == 2 else h[0]
        pre = linear(input.view(-1, 1, self.input_size), weight)
        h0 = None if hx is None else hx.to(pre.dtype).view(1, -1, self.hidden_size)
        recurrence = recurrence_of(self.cell, self.candidate, self.bias)
        _, h = layer_scan(pre, bias, h0, None, None, recurrence, True, 1, self.backend)
        return h.view(*input.shape[:-1], self.hidden_size)

    forward.__qualname__ = "forward"


class MinGRUCell(_MinimalCell):
    r"""One step of a minimal GRU, the counterpart of :class:`torch.nn.GRUCell`; equations as :class:`MinGRU`.

    Args:
        input_size, hidden_size, bias, candidate, backend, device, dtype: as :class:`MinGRU`.

    Inputs: ``input``, (B, input_size) or (input_size,); ``hx``, (B, hidden_size) or (hidden_size,), zero if absent.
    Output: the next state, shaped as ``hx``.

    Parameters: ``weight_ih``, (2 * hidden_size, input_size), and ``bias_ih``, rows z then h.

    Raises:
        TypeError, ValueError: as :class:`MinGRU`.

    Example:
        >>> import torch, ostinato
        >>> cell = ostinato.MinGRUCell(8, 16)
        >>> h = cell(torch.randn(4, 8))
        >>> cell(torch.randn(4, 8), h).shape
        torch.Size([4, 16])
    """

    cell = "mingru"


class MinLSTMCell(_MinimalCell):
    r"""One step of a minimal LSTM; equations as :class:`MinLSTM`, the rest as :class:`MinGRUCell`.

    Parameters: ``weight_ih``, (3 * hidden_size, input_size), and ``bias_ih``, rows f, i, h.

    Raises:
        TypeError, ValueError: as :class:`MinGRU`.

    Example:
        >>> import torch, ostinato
        >>> ostinato.MinLSTMCell(8, 16)(torch.randn(8)).shape
        torch.Size([16])
    """

    cell = "minlstm"
