"""HighwayMinGRU, a minGRU whose layers have a highway connection."""

import torch
from torch import Tensor

from ostinato.kernels.matmul.gemm import linear
from ostinato.minimal.recurrences import RECURRENCES
from ostinato.recurrence_layers import Parameters, RecurrenceLayers, Run
from ostinato.states import Hidden


class HighwayMinGRU(RecurrenceLayers[Tensor]):
    r"""Stacked minimal GRU layers, each with a highway connection, as in PufferLib's policies.

    .. math::
        h_t = (1 - z_t) \odot h_{t-1} + z_t \odot g(W_h x_t + b_h), \quad z_t = \sigma(W_z x_t + b_z)

        y_t = r_t \odot h_t + (1 - r_t) \odot x_t, \quad r_t = \sigma(W_r x_t + b_r)

    with the :math:`g` of :class:`MinGRU` (Feng et al. 2024, arXiv 2410.01201, appendix B.3).  Where the input's width
    is not ``hidden_size``, a linear projection of x replaces x in the equation of y.  The output is y, the state h.
    PufferLib's layers have no bias.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        backend, device, dtype: as :class:`MinGRU`.

    Inputs and outputs: as :class:`MinGRU`.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), and ``bias_ih_l{k}``, rows z, h, r, followed by those of the
    projection of x if there is one.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`.

    Example:
        >>> import torch, ostinato
        >>> ostinato.HighwayMinGRU(16, 16, num_layers=4)(torch.randn(100, 4, 16))[0].shape
        torch.Size([100, 4, 16])
    """

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows = (3 if width == self.hidden_size else 4) * self.hidden_size
        return {"weight_ih": (rows, width), "bias_ih": (rows,)}

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        z, c, r, *skip = linear(x, p["weight_ih"], p["bias_ih"]).split(self.hidden_size, -1)
        h, h_last = run(RECURRENCES["mingru"]["positive"], z, c)
        return torch.lerp(skip[0] if skip else x.to(h.dtype), h, torch.sigmoid(r)), h_last
