"""RG-LRU, the real-gated linear recurrent unit of Griffin."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.checks import parts_of
from ostinato.kernels.matmul.gemm import linear
from ostinato.recurrence import recurrence
from ostinato.recurrence_layers import Parameters, RecurrenceLayers, Run
from ostinato.states import Hidden

DECAY_SCALE = 8  # the paper's c
TINY = 1e-37  # added under a square root, whose derivative at 0 is infinite; too small to change other values


@recurrence
def rg_lru(x: Tensor, r: Tensor, i: Tensor, log_lambda: Tensor) -> tuple[Tensor, Tensor]:
    log_a = -DECAY_SCALE * torch.sigmoid(r) * F.softplus(log_lambda)
    return torch.exp(log_a), torch.sqrt(TINY - torch.expm1(2 * log_a)) * torch.sigmoid(i) * x


class RGLRU(RecurrenceLayers[Tensor]):
    r"""Stacked real-gated linear recurrent units (section 2.4 of De et al. 2024, Griffin, arXiv 2402.19427).

    .. math::
        u_t = W_x x_t + b_x, \quad r_t = \sigma(W_r u_t + b_r), \quad i_t = \sigma(W_i u_t + b_i), \quad
        \log a_t = -8 \, r_t \odot \operatorname{softplus}(\Lambda)

        h_t = a_t \odot h_{t-1} + \sqrt{1 - a_t^2} \odot i_t \odot u_t

    The gates' matrices are block-diagonal.  The first product is the linear layer before the recurrence in Griffin's
    block, whose convolution and output gate are not included.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        num_blocks: blocks of each gate's matrix, a divisor of ``hidden_size``; if absent, the paper's 16, or the
            largest smaller power of 2 that is a divisor.
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs, outputs and ``resets``: as :class:`ostinato.MinGRU`.

    Parameters: ``weight_ih_l{k}``, (hidden_size, in), ``weight_gate_l{k}``, (2, num_blocks, hidden_size / num_blocks,
    hidden_size / num_blocks), those of r and of i, ``log_lambda_l{k}``, (hidden_size,), ``bias_ih_l{k}``,
    (hidden_size,), and ``bias_gate_l{k}``, (2 * hidden_size,); ``_reverse`` appended for the second direction.

    Raises:
        TypeError: an input or state that is not a tensor of the parameters' dtype.
        ValueError: sizes, shapes or devices that do not fit, or an unknown backend.

    Example:
        >>> import torch, ostinato
        >>> layer = ostinato.RGLRU(8, 32, batch_first=True)
        >>> output, h_n = layer(torch.randn(4, 100, 8))
        >>> output.shape, h_n.shape
        (torch.Size([4, 100, 32]), torch.Size([1, 4, 32]))
    """

    settings = *RecurrenceLayers.settings, "num_blocks"

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
        num_blocks: int | None = None,
        backend: str = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.num_blocks = parts_of(hidden_size, 16, num_blocks=num_blocks)
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(*sizes, backend=backend, device=device, dtype=dtype)

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        hidden, block = self.hidden_size, self.hidden_size // self.num_blocks
        gates = {"weight_gate": (2, self.num_blocks, block, block), "bias_gate": (2 * hidden,)}
        return {"weight_ih": (hidden, width), "bias_ih": (hidden,), **gates, "log_lambda": (hidden,)}

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        u = linear(x, p["weight_ih"], p["bias_ih"])
        # In autocast's dtype, to which the product would not convert where a block is one channel.
        blocks, weight = u.unflatten(-1, (self.num_blocks, -1)), p["weight_gate"].to(u.dtype)
        if u.dim() == 2:  # one step, for which einsum takes longer than its product alone
            gates = (blocks.transpose(0, 1) @ weight.mT).permute(2, 0, 1, 3).flatten(1)
            gates = gates.contiguous()  # where a block is one channel, flattening gives a view with strided channels
        else:
            gates = torch.einsum("...nj,gnij->...gni", blocks, weight).flatten(-3)
        r, i = (gates if p["bias_gate"] is None else gates + p["bias_gate"].to(u.dtype)).chunk(2, -1)
        return run(rg_lru, u, r, i, p["log_lambda"])

    def reset_parameters(self) -> None:
        """Draw weights as LeCun's normal, and decays, which hold where r is 1, from U(0.9, 0.999); biases are zero."""
        for name, parameter in self.named_parameters():
            if name.startswith("weight"):
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            elif name.startswith("bias"):
                nn.init.zeros_(parameter)
            else:  # softplus(log_lambda) = -log(decay) / DECAY_SCALE
                nn.init.uniform_(parameter, 0.9, 0.999)
                with torch.no_grad():
                    parameter.copy_(torch.log(torch.expm1(-torch.log(parameter.double()) / DECAY_SCALE)))
