"""SRU, the simple recurrent unit."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.kernels.matmul.gemm import linear
from ostinato.recurrence import recurrence
from ostinato.recurrence_layers import Parameters, RecurrenceLayers, Run
from ostinato.states import Hidden

SRU_SCALE = math.sqrt(3)  # keeps the variance of the highway's input at initialisation, where its gate is half open


@recurrence
def sru(
    state: tuple[Tensor, Tensor], z: Tensor, f: Tensor, r: Tensor, skip: Tensor, v_f: Tensor, v_r: Tensor
) -> tuple[Tensor, Tensor]:
    _, c_before = state
    f = torch.sigmoid(f + v_f * c_before)
    r = torch.sigmoid(r + v_r * c_before)
    c = f * c_before + (1 - f) * z
    return r * c + (1 - r) * SRU_SCALE * skip, c


class SRU(RecurrenceLayers[Tensor]):
    r"""Stacked simple recurrent units (section 3 of Lei et al. 2018, arXiv 1709.02755).

    .. math::
        f_t = \sigma(W_f x_t + v_f \odot c_{t-1} + b_f), \quad c_t = f_t \odot c_{t-1} + (1 - f_t) \odot (W x_t)

        r_t = \sigma(W_r x_t + v_r \odot c_{t-1} + b_r), \quad h_t = r_t \odot c_t + (1 - r_t) \odot \alpha x_t

    with :math:`\alpha = \sqrt 3`, the scale for a highway gate whose bias begins at 0.  Where the input's width is not
    ``hidden_size``, a linear projection of x replaces x in the equation of h.  The output is h, the state c.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs and outputs: as :class:`ostinato.MinGRU`.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), rows of W, f and r, followed by those of the projection of x
    if there is one; ``weight_hh_l{k}``, (2 * hidden_size,), and ``bias_ih_l{k}``, those of f and r.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`.

    Example:
        >>> import torch, ostinato
        >>> ostinato.SRU(16, 16, num_layers=4)(torch.randn(100, 4, 16))[0].shape
        torch.Size([100, 4, 16])
    """

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        rows = 3 * hidden if width == hidden else 4 * hidden
        return {"weight_ih": (rows, width), "weight_hh": (2 * hidden,), "bias_ih": (2 * hidden,)}

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        groups = p["weight_ih"].shape[0] // self.hidden_size
        bias = (
            None if p["bias_ih"] is None else F.pad(p["bias_ih"], (self.hidden_size, (groups - 3) * self.hidden_size))
        )
        z, f, r, *skip = linear(x, p["weight_ih"], bias).chunk(groups, -1)
        (h, _), (_, c_last) = run(sru, z, f, r, skip[0] if skip else x.to(z.dtype), *p["weight_hh"].chunk(2))
        return h, c_last

    def reset_parameters(self) -> None:
        """Draw weights of variance 1 / (input width), half of that for the gates; biases are zero (section 3.2)."""
        for name, parameter in self.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
            elif name.startswith("weight_hh"):
                nn.init.uniform_(parameter, -math.sqrt(1.5), math.sqrt(1.5))
            else:
                bound = math.sqrt(3 / parameter.shape[1])
                nn.init.uniform_(parameter, -bound, bound)
                with torch.no_grad():
                    parameter[self.hidden_size : 3 * self.hidden_size] *= math.sqrt(0.5)
