"""QRNN, the quasi-recurrent layer."""

import torch
from torch import Tensor

from ostinato.kernels.matmul.gemm import linear
from ostinato.recurrence import recurrence
from ostinato.recurrence_layers import Parameters, RecurrenceLayers, Run
from ostinato.states import Hidden


@recurrence
def qrnn(z: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(f), torch.sigmoid(-f) * torch.tanh(z)


class QRNN(RecurrenceLayers[Tensor]):
    r"""Stacked quasi-recurrent layers with fo-pooling (section 2 of Bradbury et al. 2016, arXiv 1611.01576).

    .. math::
        z_t = \tanh(W_z x_t + b_z), \quad f_t = \sigma(W_f x_t + b_f), \quad o_t = \sigma(W_o x_t + b_o)

        c_t = f_t \odot c_{t-1} + (1 - f_t) \odot z_t, \quad h_t = o_t \odot c_t

    The filters are of width 1.  For wider ones put a causal convolution in front, whose last inputs are then another
    state to carry.  The output is h, the state c.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs and outputs: as :class:`ostinato.MinGRU`.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), and ``bias_ih_l{k}``, rows z, f, o.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`.

    Example:
        >>> import torch, ostinato
        >>> ostinato.QRNN(8, 16)(torch.randn(100, 4, 8))[0].shape
        torch.Size([100, 4, 16])
    """

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return {"weight_ih": (3 * self.hidden_size, width), "bias_ih": (3 * self.hidden_size,)}

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        z, f, o = linear(x, p["weight_ih"], p["bias_ih"]).chunk(3, -1)
        c, c_last = run(qrnn, z, f)
        return torch.sigmoid(o) * c, c_last
