"""sLSTM, the LSTM with exponential gates and memory mixing within heads of xLSTM."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.checks import parts_of
from ostinato.kernels.matmul.gemm import linear
from ostinato.layers import draw_parameters
from ostinato.recurrence import recurrence
from ostinato.recurrence_layers import Parameters, RecurrenceLayers, Run
from ostinato.states import Hidden

FourTensors = tuple[Tensor, Tensor, Tensor, Tensor]


@recurrence(states=4)
def slstm(state: FourTensors, i: Tensor, f: Tensor, z: Tensor, o: Tensor) -> FourTensors:
    _, c, n, m_before = state
    log_f = F.logsigmoid(f) + m_before
    m = torch.where(n == 0, i, torch.maximum(log_f, i))  # n is zero only where a sequence begins
    i, f = torch.exp(i - m), torch.exp(torch.clamp(log_f - m, max=0))  # above 0 only where c and n are zero
    c, n = f * c + i * torch.tanh(z), f * n + i
    return torch.sigmoid(o) * c / n, c, n, m


class SLSTM(RecurrenceLayers[FourTensors]):
    r"""Stacked sLSTM layers (section 2.2 and appendix A.2 of Beck et al. 2024, xLSTM, arXiv 2405.04517).

    .. math::
        \tilde i_t, \tilde f_t, \tilde z_t, \tilde o_t = W x_t + R h_{t-1} + b, \quad
        m_t = \max(\log \sigma(\tilde f_t) + m_{t-1}, \tilde i_t)

        i_t = e^{\tilde i_t - m_t}, \quad f_t = e^{\log \sigma(\tilde f_t) + m_{t-1} - m_t}, \quad
        c_t = f_t \odot c_{t-1} + i_t \odot \tanh(\tilde z_t), \quad n_t = f_t \odot n_{t-1} + i_t

        h_t = \sigma(\tilde o_t) \odot c_t / n_t

    m keeps the exponents in range, and cancels out of h; where a sequence begins, it is the input gate's exponent.  R
    is block-diagonal: a head's gates see only the head's own part of h.  The block around the layer, with its
    convolution, its norm and its projections, is not included.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        num_heads: a divisor of ``hidden_size``; if absent, the paper's 4, or else 2 or 1.
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs, outputs and ``resets``: as :class:`ostinato.MinGRU`, except that ``hx`` and ``h_n`` are tuples of h, c, n
    and m, all zero if absent.

    Parameters: ``weight_ih_l{k}``, (4 * hidden_size, in), and ``bias_ih_l{k}``, (4 * hidden_size,), rows i, f, z, o;
    ``weight_hh_l{k}``, (num_heads, 4 * hidden_size / num_heads, hidden_size / num_heads), the same rows of each head;
    ``_reverse`` appended for the second direction.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`, and ``num_heads`` that does not divide ``hidden_size``.

    Example:
        >>> import torch, ostinato
        >>> output, (h_n, c_n, n_n, m_n) = ostinato.SLSTM(8, 32)(torch.randn(100, 4, 8))
        >>> output.shape, c_n.shape
        (torch.Size([100, 4, 32]), torch.Size([1, 4, 32]))
    """

    states = 4
    settings = *RecurrenceLayers.settings, "num_heads"

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
        num_heads: int | None = None,
        backend: str = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.num_heads = parts_of(hidden_size, 4, num_heads=num_heads)
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(*sizes, backend=backend, device=device, dtype=dtype)

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows, heads = 4 * self.hidden_size, self.num_heads
        weight_hh = heads, rows // heads, self.hidden_size // heads
        return {"weight_ih": (rows, width), "weight_hh": weight_hh, "bias_ih": (rows,)}

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        gates = linear(x, p["weight_ih"], p["bias_ih"])
        (h, *_), last = run(slstm, gates, gates.new_empty(0), weight_hh=p["weight_hh"])
        return h, last

    def reset_parameters(self) -> None:
        """Draw the weights as ``torch.nn.LSTM``; biases are zero, except for those of the forget gates.

        In each head these are spread from 5 to -7 so that it has units with long and with short memories, as in the
        authors' code: the last layers have more of the long ones.
        """
        draw_parameters(self, self.hidden_size)
        units = self.hidden_size // self.num_heads
        for name, parameter in self.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
                layer = int(name.removesuffix("_reverse").rpartition("_l")[2])
                depth = layer / max(1, self.num_layers - 1)
                spread = torch.linspace(0, 1, units, device=parameter.device) ** (0.3 + 1.3 * depth)
                with torch.no_grad():
                    parameter[self.hidden_size : 2 * self.hidden_size] = (5 - 12 * spread).repeat(self.num_heads)
