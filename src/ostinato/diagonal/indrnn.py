"""IndRNN, the independently recurrent layer."""

import torch
from torch import Tensor, nn

from ostinato.checks import check_choice
from ostinato.kernels.matmul.gemm import linear
from ostinato.layers import draw_parameters
from ostinato.recurrence import recurrence
from ostinato.recurrence_layers import Parameters, RecurrenceLayers, Run
from ostinato.states import Hidden


@recurrence
def indrnn_relu(h: Tensor, x: Tensor, u: Tensor) -> Tensor:
    return torch.relu(x + u * h)


@recurrence
def indrnn_tanh(h: Tensor, x: Tensor, u: Tensor) -> Tensor:
    return torch.tanh(x + u * h)


class IndRNN(RecurrenceLayers[Tensor]):
    r"""Stacked independently recurrent layers (section 3 of Li et al. 2018, arXiv 1803.04831).

    .. math:: h_t = \phi(W x_t + u \odot h_{t-1} + b), \quad \phi = \operatorname{relu} \text{ or } \tanh

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        nonlinearity: "relu", the paper's, or "tanh".
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs and outputs: as :class:`ostinato.MinGRU`.

    Parameters: ``weight_ih_l{k}``, (hidden_size, in), ``weight_hh_l{k}`` and ``bias_ih_l{k}``, (hidden_size,).

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`, and an unknown nonlinearity.

    Example:
        >>> import torch, ostinato
        >>> ostinato.IndRNN(8, 16, num_layers=2)(torch.randn(100, 4, 8))[0].shape
        torch.Size([100, 4, 16])
    """

    settings = *RecurrenceLayers.settings, "nonlinearity"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        nonlinearity: str = "relu",
        backend: str = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("nonlinearity", nonlinearity, ("relu", "tanh"))
        self.nonlinearity = nonlinearity
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(*sizes, backend=backend, device=device, dtype=dtype)

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        return {"weight_ih": (hidden, width), "weight_hh": (hidden,), "bias_ih": (hidden,)}

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        function = indrnn_relu if self.nonlinearity == "relu" else indrnn_tanh
        return run(function, linear(x, p["weight_ih"], p["bias_ih"]), p["weight_hh"])

    def reset_parameters(self) -> None:
        """Draw as ``torch.nn.GRU`` does, but u from U(0, 1), the paper's range for long sequences (section 4.1)."""
        draw_parameters(self, self.hidden_size)
        for name, parameter in self.named_parameters():
            if name.startswith("weight_hh"):
                nn.init.uniform_(parameter, 0, 1)
