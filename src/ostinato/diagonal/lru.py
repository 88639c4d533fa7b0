"""LRU, the linear recurrent unit, whose state is complex."""

import math

import torch
from torch import Tensor, nn

from ostinato.checks import check_numbers
from ostinato.kernels.matmul.gemm import linear
from ostinato.recurrence import recurrence
from ostinato.recurrence_layers import Parameters, RecurrenceLayers, Run
from ostinato.states import Hidden


@recurrence
def lru(
    state: tuple[Tensor, Tensor], u: Tensor, v: Tensor, log_nu: Tensor, log_theta: Tensor, log_gamma: Tensor
) -> tuple[Tensor, Tensor]:
    real, imaginary = state
    modulus, phase, gamma = torch.exp(-torch.exp(log_nu)), torch.exp(log_theta), torch.exp(log_gamma)
    a, b = modulus * torch.cos(phase), modulus * torch.sin(phase)
    return a * real - b * imaginary + gamma * u, a * imaginary + b * real + gamma * v


class LRU(RecurrenceLayers[tuple[Tensor, Tensor]]):
    r"""Stacked linear recurrent units with a complex state (section 3 of Orvieto et al. 2023, arXiv 2303.06349).

    .. math::
        h_t = \lambda \odot h_{t-1} + \gamma \odot (B x_t), \quad \lambda = e^{-e^\nu + i e^\theta}, \quad
        y_t = \operatorname{Re}(C h_t) + D x_t + b

    The output is y, the state h, of which ``hx`` and ``h_n`` are pairs: its real and its imaginary part.  There is no
    nonlinearity between stacked layers; the paper's blocks have theirs around the layer.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        radius: smallest and largest modulus of :math:`\lambda` in a new layer, which is uniform on that ring.
        max_phase: largest phase of :math:`\lambda` in a new layer.
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs and outputs: as :class:`ostinato.MinGRU`, except for the pairs.

    Parameters: ``weight_ih_l{k}``, (2 * hidden_size, in), the real rows of B, then the imaginary; ``weight_ho_l{k}``,
    (2, hidden_size, hidden_size), the same of C; ``weight_io_l{k}``, (hidden_size, in), D; ``log_nu_l{k}``,
    ``log_theta_l{k}`` and ``log_gamma_l{k}``, (hidden_size,); and ``bias_io_l{k}``, (hidden_size,), which begins as 0
    and is not the paper's.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`, and a radius that is no ring inside the unit circle.

    Example:
        >>> import torch, ostinato
        >>> output, (real, imaginary) = ostinato.LRU(8, 16)(torch.randn(100, 4, 8))
        >>> output.shape, imaginary.shape
        (torch.Size([100, 4, 16]), torch.Size([1, 4, 16]))
    """

    states = 2

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
        radius: tuple[float, float] = (0.0, 1.0),
        max_phase: float = 2 * math.pi,
        backend: str = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(radius, tuple | list) or len(radius) != 2:
            raise TypeError(f"radius must be a pair of numbers; got {radius!r}")
        check_numbers(**{"radius[0]": radius[0], "radius[1]": radius[1], "max_phase": max_phase})
        if not 0 <= radius[0] < radius[1] <= 1:
            raise ValueError(f"radius must be two numbers that rise, from 0 to 1; got {radius}")
        if not 0 < max_phase <= 2 * math.pi:
            raise ValueError(f"max_phase must be above 0, to 2 pi; got {max_phase}")
        self.radius, self.max_phase = radius, max_phase
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(*sizes, backend=backend, device=device, dtype=dtype)

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        products = {"weight_ih": (2 * hidden, width), "weight_ho": (2, hidden, hidden), "weight_io": (hidden, width)}
        return {**products, **dict.fromkeys(("log_nu", "log_theta", "log_gamma", "bias_io"), (hidden,))}

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        u, v = linear(x, p["weight_ih"]).chunk(2, -1)
        (real, imaginary), last = run(lru, u, v, p["log_nu"], p["log_theta"], p["log_gamma"])
        y = linear(real, p["weight_ho"][0]) - linear(imaginary, p["weight_ho"][1])
        return y + linear(x, p["weight_io"], p["bias_io"]), last

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw eigenvalues uniform on the ring and Glorot's matrices; gamma keeps the input's variance (appendix A)."""
        smallest, largest = self.radius
        for suffix in (suffix for layer in range(self.num_layers) for suffix in self._parameter_suffixes(layer)):
            square = torch.rand(self.hidden_size, dtype=torch.float64) * (largest**2 - smallest**2) + smallest**2
            square = square.clamp(1e-12, 1 - 1e-7)  # so that all logarithms are finite
            values = {
                "log_nu": torch.log(-0.5 * torch.log(square)),
                "log_theta": torch.log(self.max_phase * torch.rand(self.hidden_size, dtype=torch.float64) + 1e-9),
                "log_gamma": 0.5 * torch.log1p(-square),
            }
            for name, value in values.items():
                getattr(self, f"{name}_{suffix}").copy_(value)
            width = getattr(self, f"weight_ih_{suffix}").shape[1]
            nn.init.normal_(getattr(self, f"weight_ih_{suffix}"), std=(2 * width) ** -0.5)
            nn.init.normal_(getattr(self, f"weight_ho_{suffix}"), std=self.hidden_size**-0.5)
            nn.init.normal_(getattr(self, f"weight_io_{suffix}"), std=width**-0.5)
            if self.bias:
                nn.init.zeros_(getattr(self, f"bias_io_{suffix}"))
