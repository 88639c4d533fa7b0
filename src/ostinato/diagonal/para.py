"""ParaGRU and ParaLSTM, GRU and LSTM with diagonal recurrent matrices."""

import math

import torch
from torch import Tensor, nn

from ostinato.kernels.matmul.gemm import linear
from ostinato.recurrence import recurrence
from ostinato.recurrence_layers import Parameters, RecurrenceLayers, Run
from ostinato.states import Hidden, State


@recurrence
def para_gru(
    h: Tensor,
    z: Tensor,
    r: Tensor,
    c: Tensor,
    a_z: Tensor,
    a_r: Tensor,
    a_c: Tensor,
    b_z: Tensor,
    b_r: Tensor,
    b_c: Tensor,
) -> Tensor:
    z = torch.sigmoid(a_z * h + z + b_z)
    r = torch.sigmoid(a_r * h + r + b_r)
    c = torch.tanh(a_c * (h * r) + c + b_c)
    return (1 - z) * h + z * c


@recurrence
def para_lstm(
    state: tuple[Tensor, Tensor],
    f: Tensor,
    o: Tensor,
    c: Tensor,
    a_f: Tensor,
    a_o: Tensor,
    a_c: Tensor,
    p_f: Tensor,
    p_o: Tensor,
    b_f: Tensor,
    b_o: Tensor,
    b_c: Tensor,
) -> tuple[Tensor, Tensor]:
    h_before, c_before = state
    f = torch.sigmoid(a_f * h_before + p_f * c_before + f + b_f)
    c = f * c_before + (1 - f) * torch.tanh(a_c * h_before + c + b_c)
    return torch.sigmoid(a_o * h_before + p_o * c + o + b_o) * torch.tanh(c), c


class _ParaLayers(RecurrenceLayers[State]):
    """The base class of ParaGRU and ParaLSTM.

    The bias is added by the recurrence, not by the matrix product: its gradient is then summed where that of the gates
    is computed.
    """

    def _recurrence_arguments(self, p: Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
        """The recurrence's arguments: its sequences concatenated, and its parameters concatenated."""
        bias = torch.zeros_like(p["weight_hh"]) if p["bias_ih"] is None else p["bias_ih"]
        weights = (weight for name, weight in p.items() if name in ("weight_hh", "weight_ch"))
        return linear(x, p["weight_ih"]), torch.cat((*weights, bias))

    def reset_parameters(self) -> None:
        """Draw Xavier's uniform input weights, the others from N(0, 4 / (5 hidden_size)), as the authors' code does."""
        for name, parameter in self.named_parameters():
            if name.startswith("weight_ih"):
                bound = math.sqrt(6 / (parameter.shape[1] + self.hidden_size))
                nn.init.uniform_(parameter, -bound, bound)
            elif name.startswith("weight"):
                nn.init.normal_(parameter, std=2 / math.sqrt(5 * self.hidden_size))
            else:
                nn.init.zeros_(parameter)
                with torch.no_grad():
                    parameter[: self.hidden_size] = -torch.linspace(0, 1, self.hidden_size, device=parameter.device)


class ParaGRU(_ParaLayers[Tensor]):
    r"""Stacked GRU layers with diagonal recurrent matrices (section 3.1 of Danieli et al. 2025, arXiv 2510.21450).

    .. math::
        z_t = \sigma(a_z \odot h_{t-1} + B_z x_t + b_z), \quad r_t = \sigma(a_r \odot h_{t-1} + B_r x_t + b_r)

        c_t = \tanh(a_c \odot (h_{t-1} \odot r_t) + B_c x_t + b_c), \quad h_t = (1 - z_t) \odot h_{t-1} + z_t \odot c_t

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs and outputs: as :class:`ostinato.MinGRU`.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), ``weight_hh_l{k}``, (3 * hidden_size,), and ``bias_ih_l{k}``,
    rows z, r, c.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`.

    Example:
        >>> import torch, ostinato
        >>> ostinato.ParaGRU(8, 16)(torch.randn(100, 4, 8))[0].shape
        torch.Size([100, 4, 16])
    """

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows = 3 * self.hidden_size
        return {"weight_ih": (rows, width), "weight_hh": (rows,), "bias_ih": (rows,)}

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        return run(para_gru, *self._recurrence_arguments(p, x))


class ParaLSTM(_ParaLayers[tuple[Tensor, Tensor]]):
    r"""Stacked LSTM layers with diagonal recurrent matrices (section 3.1 of Danieli et al. 2025, arXiv 2510.21450).

    They have peephole connections, and one gate in place of the input and forget gates:

    .. math::
        f_t = \sigma(a_f \odot h_{t-1} + p_f \odot c_{t-1} + B_f x_t + b_f), \quad
        c_t = f_t \odot c_{t-1} + (1 - f_t) \odot \tanh(a_c \odot h_{t-1} + B_c x_t + b_c)

        o_t = \sigma(a_o \odot h_{t-1} + p_o \odot c_t + B_o x_t + b_o), \quad h_t = o_t \odot \tanh(c_t)

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs and outputs: as :class:`ostinato.MinGRU`, except that ``hx`` and ``h_n`` are pairs of h and c, as in
    ``torch.nn.LSTM``.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), ``weight_hh_l{k}``, (3 * hidden_size,), and ``bias_ih_l{k}``,
    rows f, o, c; ``weight_ch_l{k}``, (2 * hidden_size,), the peepholes of f and o.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`.

    Example:
        >>> import torch, ostinato
        >>> output, (h_n, c_n) = ostinato.ParaLSTM(8, 16)(torch.randn(100, 4, 8))
        >>> output.shape, c_n.shape
        (torch.Size([100, 4, 16]), torch.Size([1, 4, 16]))
    """

    states = 2

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows = 3 * self.hidden_size
        return {
            "weight_ih": (rows, width),
            "weight_hh": (rows,),
            "weight_ch": (2 * self.hidden_size,),
            "bias_ih": (rows,),
        }

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        (h, _), last = run(para_lstm, *self._recurrence_arguments(p, x))
        return h, last
