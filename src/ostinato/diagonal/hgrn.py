"""HGRN, the hierarchically gated recurrent unit."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.kernels.matmul.gemm import linear
from ostinato.layers import draw_parameters
from ostinato.recurrence import recurrence
from ostinato.recurrence_layers import Parameters, RecurrenceLayers, Run
from ostinato.states import Hidden


@recurrence
def hgrn(c: Tensor, f: Tensor, lower_bound: Tensor) -> tuple[Tensor, Tensor]:
    return lower_bound + (1 - lower_bound) * torch.sigmoid(f), (1 - lower_bound) * torch.sigmoid(-f) * F.silu(c)


class HGRN(RecurrenceLayers[Tensor]):
    r"""Stacked hierarchically gated recurrent units with a real state (section 3 of Qin et al. 2023, arXiv 2311.04823).

    .. math::
        f_t = \gamma^k + (1 - \gamma^k) \odot \sigma(W_f x_t + b_f), \quad
        c_t = \operatorname{SiLU}(W_c x_t + b_c), \quad
        h_t = f_t \odot h_{t-1} + (1 - f_t) \odot c_t

        y_t = \sigma(W_g x_t + b_g) \odot h_t, \qquad \gamma^k = \sum_{j=2}^{k} \operatorname{softmax}(\Gamma)_j

    The softmax is over the layers, so the forget gate of layer k is never below a bound, which rises from 0 at the
    first layer.  The output is y, the state h.  The paper's state is complex, and also rotated by a learned angle at
    each step, which later versions left out; its normalisation and output projection are not included.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs and outputs: as :class:`ostinato.MinGRU`.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), and ``bias_ih_l{k}``, rows c, f, g; ``gamma_l{k}``,
    (hidden_size,), the logits of the layer's share of the lower bounds.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`.

    Example:
        >>> import torch, ostinato
        >>> layer = ostinato.HGRN(8, 16, num_layers=3)
        >>> output, h_n = layer(torch.randn(100, 4, 8))
        >>> output.shape, h_n.shape
        (torch.Size([100, 4, 16]), torch.Size([3, 4, 16]))
    """

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows = 3 * self.hidden_size
        return {"weight_ih": (rows, width), "bias_ih": (rows,), "gamma": (self.hidden_size,)}

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        c, f, g = linear(x, p["weight_ih"], p["bias_ih"]).chunk(3, -1)
        layer, _, reverse = suffix[1:].partition("_")
        gammas = [getattr(self, f"gamma_l{k}_{reverse}".rstrip("_")) for k in range(self.num_layers)]
        lower_bound = torch.softmax(torch.stack(gammas), 0)[1 : int(layer) + 1].sum(0)
        h, h_last = run(hgrn, c, f, lower_bound)
        return torch.sigmoid(g) * h, h_last

    def reset_parameters(self) -> None:
        """Initialise as ``torch.nn.GRU`` does, with lower bounds that rise evenly from layer to layer."""
        draw_parameters(self, self.hidden_size)
        for name, parameter in self.named_parameters():
            if name.startswith("gamma"):
                nn.init.ones_(parameter)
