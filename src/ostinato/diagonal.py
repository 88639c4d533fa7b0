"""Recurrent layers whose channels do not see each other's states: an equation, a product or two, and where they begin.

Each recurrence is the equation of its paper, a few lines of PyTorch from which :func:`ostinato.recurrence` makes the
passes over time; each layer computes what the recurrence takes from the input, as matrix products.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.kernels.dispatch import is_eager
from ostinato.kernels.gemm import linear
from ostinato.kernels.recurrence.operators import kernels_on
from ostinato.layers import Hidden, StackedLayers, check_sizes, draw_parameters, each, stacked
from ostinato.recurrence import Recurrence, recurrence
from ostinato.replay import recording
from ostinato.scan import check_choice

Run = Callable[..., tuple[Any, Any]]
Parameters = dict[str, Any]  # tensors by name, None for an absent bias


class DiagonalLayers(StackedLayers):
    """Layers that run a :func:`ostinato.recurrence`; see :meth:`_cell`."""

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
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(*sizes, backend=backend, device=device, dtype=dtype)

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        """The outputs and last states of one layer in one direction, from its parameters `p`, by name, and its input.

        ``run(recurrence, *arguments)`` calls the recurrence, time and batch laid out as in `x`, and returns the states
        and the last ones; its sequences may be one argument, side by side, and its parameters another.  A recurrence
        of two states in a layer of one starts both from it.
        """
        raise NotImplementedError

    def _layers(
        self, x: Tensor, hx: Hidden | None, offsets: Tensor | None, resets: Tensor | None, batch_first: bool
    ) -> tuple[Tensor, Hidden]:
        if offsets is None:
            return super()._layers(x, hx, None, resets, batch_first)
        # Recurrences take sequences one after another where a PackedSequence has its steps one after another.
        rows = torch.arange(x.shape[0], device=x.device)
        step = torch.searchsorted(offsets, rows, right=True) - 1
        sequence = rows - offsets[step]
        order = torch.argsort(sequence, stable=True)
        batch = (hx[0] if isinstance(hx, tuple) else hx).shape[1]  # type: ignore[union-attr]
        lengths = torch.zeros(batch, dtype=torch.int32, device=x.device).index_add_(
            0, sequence, torch.ones_like(sequence, dtype=torch.int32)
        )
        bounds = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        resets = None if resets is None else resets[order][None]
        y, h_n = super()._layers(x[order][None], hx, bounds, resets, True)
        return y[0, torch.argsort(order)], h_n

    def _layer(
        self,
        layer: int,
        x: Tensor,
        h0: Any,
        offsets: Tensor | None,
        resets: Tensor | None,
        batch_first: bool,
    ) -> tuple[Tensor, Any]:
        """``offsets`` are ``cu_seqlens`` here, of sequences one after another."""
        resets = None if resets is None else resets if batch_first else resets.t()
        outputs: list[Tensor] = []
        lasts: list[Any] = []
        for direction, suffix in enumerate(self._suffixes(layer)):
            reverse = direction == 1
            begins = _seen_in_reverse(resets, offsets) if reverse and resets is not None else resets
            start = h0 if h0 is None else each(operator.itemgetter(direction), h0)
            options = {"h0": start, "resets": begins, "reverse": reverse, "cu_seqlens": offsets}
            run = functools.partial(self._run, options, batch_first)
            y, h_last = self._cell(suffix, self._parameters_of(suffix, x.shape[-1]), x, run)
            outputs.append(y)
            lasts.append(each(lambda state: state[None], h_last))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)), stacked(lasts)

    def _step_of_layer(self, layer: int, x: Tensor, h0: Any) -> tuple[Tensor, Hidden]:
        """On a CPU without gradients, :meth:`_cell` of tensors without a dimension of time."""
        parameters = self._parameters_of(f"l{layer}", x.shape[-1])
        states = [] if h0 is None else [state[0] for state in (h0 if isinstance(h0, tuple) else (h0,))]
        if not self._steps_alone([x, *states, *(y for y in parameters.values() if y is not None)]):
            step, recorder = super()._step_of_layer, recording()
            return step(layer, x, h0) if recorder is None else recorder.call(step, layer, x, h0)
        states = states or [x.new_zeros(len(x), self.hidden_size)] * self.states
        y, after = self._cell(f"l{layer}", parameters, x, functools.partial(_run_step, states))
        return y, each(lambda state: state[None], after)

    def _steps_alone(self, tensors: list[Tensor]) -> bool:
        """Whether a recurrence's prepared steps take the tensors of a layer."""
        x = tensors[0]
        return (
            x.is_cpu
            and x.dtype in (torch.float32, torch.float64)
            and x.numel() > 0
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and (is_eager(tensors) or recording() is not None)
            and {(y.dtype, y.is_contiguous()) for y in tensors} == {(x.dtype, True)}
            and self.sequence_group is None
            and kernels_on(self.backend, "cpu") is not None
        )

    def _run(
        self, options: dict[str, Any], batch_first: bool, function: Recurrence, *arguments: Tensor
    ) -> tuple[Any, Any]:
        h0 = options["h0"]
        if function.states == 2 and isinstance(h0, Tensor):
            options = {**options, "h0": (h0, h0)}
        run: Run = function.of_layer if len(arguments) < len(function.names) else function
        if self.sequence_group is not None:
            from ostinato import distributed

            if len(arguments) < len(function.names):
                arguments = function.apart(*arguments)
            run = functools.partial(distributed.run, function, group=self.sequence_group)
        if batch_first:
            return run(*arguments, **options, backend=self.backend)
        arguments = tuple(x.transpose(0, 1) if x.dim() == 3 else x for x in arguments)
        h, h_last = run(*arguments, **options, backend=self.backend)
        return each(lambda x: x.transpose(0, 1), h), h_last


def _run_step(states: list[Tensor], function: Recurrence, *arguments: Tensor) -> tuple[Any, Any]:
    if len(arguments) < len(function.names):
        arguments = function.apart(*arguments)
    if function.states == 2 and len(states) == 1:
        states = states * 2
    after = function.step(arguments, states)
    result = tuple(after) if function.states == 2 else after[0]
    return result, result


def _seen_in_reverse(resets: Tensor, bounds: Tensor | None) -> Tensor:
    """The steps before which a scan from the last to the first enters another episode, each at its own last step."""
    begins = F.pad(resets, (0, 1))[:, 1:]
    return begins if bounds is None else begins.index_fill(1, bounds[1:].long() - 1, False)


TINY = 1e-37  # too small to change any other number; added under a root, whose derivative at 0 is infinite


@recurrence
def rg_lru(x: Tensor, r: Tensor, i: Tensor, log_lambda: Tensor) -> tuple[Tensor, Tensor]:
    log_a = -8 * torch.sigmoid(r) * F.softplus(log_lambda)
    return torch.exp(log_a), torch.sqrt(TINY - torch.expm1(2 * log_a)) * torch.sigmoid(i) * x


class RGLRU(DiagonalLayers):
    r"""Stacked real-gated linear recurrent units (section 2.4 of De et al. 2024, Griffin, arXiv 2402.19427).

    .. math::
        u_t = W_x x_t + b_x, \quad r_t = \sigma(W_r u_t + b_r), \quad i_t = \sigma(W_i u_t + b_i), \quad
        \log a_t = -8 \, r_t \odot \operatorname{softplus}(\Lambda)

        h_t = a_t \odot h_{t-1} + \sqrt{1 - a_t^2} \odot i_t \odot u_t

    The gates' matrices are block-diagonal.  The first product is the layer before the recurrence in Griffin's block;
    its convolution and output gate are not here.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        num_blocks: blocks of each gate's matrix, a divisor of ``hidden_size``; if absent, the paper's 16 or the
            largest power of 2 below it that is one.
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs, outputs and ``resets``: as :class:`ostinato.MinGRU`.

    Parameters: ``weight_ih_l{k}``, (hidden_size, in), ``weight_gate_l{k}``, (2, num_blocks, hidden_size / num_blocks,
    hidden_size / num_blocks), those of r and of i, ``log_lambda_l{k}``, (hidden_size,), ``bias_ih_l{k}``,
    (hidden_size,), and ``bias_gate_l{k}``, (2 * hidden_size,); ``_reverse`` appended for the second direction.

    Raises:
        TypeError: an input or state that is no tensor of the parameters' dtype.
        ValueError: sizes, shapes or devices that do not fit, or an unknown backend.

    Example:
        >>> import torch, ostinato
        >>> layer = ostinato.RGLRU(8, 32, batch_first=True)
        >>> output, h_n = layer(torch.randn(4, 100, 8))
        >>> output.shape, h_n.shape
        (torch.Size([4, 100, 32]), torch.Size([1, 4, 32]))
    """

    num_blocks: int

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes(hidden_size=hidden_size)
        blocks = math.gcd(hidden_size, 16) if num_blocks is None else num_blocks
        check_sizes(num_blocks=blocks)
        if hidden_size % blocks:
            raise ValueError(f"num_blocks must divide hidden_size, {hidden_size}; got {blocks}")
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        StackedLayers.__init__(self, *sizes, backend=backend, device=device, dtype=dtype, num_blocks=blocks)

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        hidden, block = self.hidden_size, self.hidden_size // self.num_blocks
        gates = {"weight_gate": (2, self.num_blocks, block, block), "bias_gate": (2 * hidden,)}
        return {"weight_ih": (hidden, width), "bias_ih": (hidden,), **gates, "log_lambda": (hidden,)}

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        u = linear(x, p["weight_ih"], p["bias_ih"])
        blocks, weight = u.unflatten(-1, (self.num_blocks, -1)), p["weight_gate"]
        if u.dim() == 2:  # one step, in which einsum would take longer than its product
            gates = (blocks.transpose(0, 1) @ weight.mT).permute(2, 0, 1, 3).flatten(1)
            gates = gates.contiguous()  # where a block is one channel, flattening is a view whose channels lie apart
        else:
            gates = torch.einsum("...nj,gnij->...gni", blocks, weight).flatten(-3)
        r, i = (gates if p["bias_gate"] is None else gates + p["bias_gate"].to(u.dtype)).chunk(2, -1)
        return run(rg_lru, u, r, i, p["log_lambda"])

    def reset_parameters(self) -> None:
        """LeCun's initialisation of the weights, zero biases, and a decay, where r is 1, from U(0.9, 0.999)."""
        for name, parameter in self.named_parameters():
            if name.startswith("weight"):
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            elif name.startswith("bias"):
                nn.init.zeros_(parameter)
            else:  # softplus(log_lambda) = -log(decay) / 8
                nn.init.uniform_(parameter, 0.9, 0.999)
                with torch.no_grad():
                    parameter.copy_(torch.log(torch.expm1(-torch.log(parameter.double()) / 8)))


@recurrence
def hgrn(c: Tensor, f: Tensor, lower_bound: Tensor) -> tuple[Tensor, Tensor]:
    return lower_bound + (1 - lower_bound) * torch.sigmoid(f), (1 - lower_bound) * torch.sigmoid(-f) * F.silu(c)


class HGRN(DiagonalLayers):
    r"""Stacked hierarchically gated recurrent units (section 3 of Qin et al. 2023, arXiv 2311.04823), the state real.

    .. math::
        f_t = \gamma^k + (1 - \gamma^k) \odot \sigma(W_f x_t + b_f), \quad
        c_t = \operatorname{SiLU}(W_c x_t + b_c), \quad
        h_t = f_t \odot h_{t-1} + (1 - f_t) \odot c_t

        y_t = \sigma(W_g x_t + b_g) \odot h_t, \qquad \gamma^k = \sum_{j=2}^{k} \operatorname{softmax}(\Gamma)_j

    The softmax is over the layers, so that layer k forgets no faster than its lower bound, which rises from 0 at the
    first layer.  The output is y, the state h.  The paper's state turns by an angle of its own as well, which later
    versions left out; its normalisation and output projection are not here.

    Args, inputs and outputs: as :class:`ostinato.MinGRU`.

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

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows = 3 * self.hidden_size
        return {"weight_ih": (rows, width), "bias_ih": (rows,), "gamma": (self.hidden_size,)}

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        c, f, g = linear(x, p["weight_ih"], p["bias_ih"]).chunk(3, -1)
        layer, _, reverse = suffix[1:].partition("_")
        gammas = [getattr(self, f"gamma_l{k}_{reverse}".rstrip("_")) for k in range(self.num_layers)]
        lower_bound = torch.softmax(torch.stack(gammas), 0)[1 : int(layer) + 1].sum(0)
        h, h_last = run(hgrn, c, f, lower_bound)
        return torch.sigmoid(g) * h, h_last

    def reset_parameters(self) -> None:
        """As ``torch.nn.GRU`` does, with lower bounds that rise evenly from layer to layer."""
        draw_parameters(self, self.hidden_size)
        for name, parameter in self.named_parameters():
            if name.startswith("gamma"):
                nn.init.ones_(parameter)


@recurrence
def lru(
    state: tuple[Tensor, Tensor], u: Tensor, v: Tensor, log_nu: Tensor, log_theta: Tensor, log_gamma: Tensor
) -> tuple[Tensor, Tensor]:
    real, imaginary = state
    modulus, phase, gamma = torch.exp(-torch.exp(log_nu)), torch.exp(log_theta), torch.exp(log_gamma)
    a, b = modulus * torch.cos(phase), modulus * torch.sin(phase)
    return a * real - b * imaginary + gamma * u, a * imaginary + b * real + gamma * v


class LRU(DiagonalLayers):
    r"""Stacked linear recurrent units (section 3 of Orvieto et al. 2023, arXiv 2303.06349), of complex state.

    .. math::
        h_t = \lambda \odot h_{t-1} + \gamma \odot (B x_t), \quad \lambda = e^{-e^\nu + i e^\theta}, \quad
        y_t = \operatorname{Re}(C h_t) + D x_t + b

    The output is y, the state h, of which ``hx`` and ``h_n`` are pairs: its real and its imaginary part.  There is no
    nonlinearity between stacked layers; the paper's blocks have theirs around the layer.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        radius: least and largest modulus of :math:`\lambda` in a new layer, which is uniform on that ring.
        max_phase: its largest phase there.
        backend, device, dtype: as :class:`ostinato.MinGRU`.

    Inputs and outputs: as :class:`ostinato.MinGRU`, but for the pairs.

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
    radius: tuple[float, float]
    max_phase: float

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not 0 <= radius[0] < radius[1] <= 1:
            raise ValueError(f"radius must be two numbers that rise, from 0 to 1; got {radius}")
        if not 0 < max_phase <= 2 * math.pi:
            raise ValueError(f"max_phase must be above 0, to 2 pi; got {max_phase}")
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        options: dict[str, Any] = {"backend": backend, "device": device, "dtype": dtype}
        StackedLayers.__init__(self, *sizes, **options, radius=radius, max_phase=max_phase)

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        products = {"weight_ih": (2 * hidden, width), "weight_ho": (2, hidden, hidden), "weight_io": (hidden, width)}
        return {**products, **dict.fromkeys(("log_nu", "log_theta", "log_gamma", "bias_io"), (hidden,))}

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        u, v = linear(x, p["weight_ih"]).chunk(2, -1)
        (real, imaginary), last = run(lru, u, v, p["log_nu"], p["log_theta"], p["log_gamma"])
        y = linear(real, p["weight_ho"][0]) - linear(imaginary, p["weight_ho"][1])
        return y + linear(x, p["weight_io"], p["bias_io"]), last

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Eigenvalues uniform on the ring, gamma that keeps the input's variance, Glorot's matrices (appendix A)."""
        least, largest = self.radius
        for suffix in (suffix for layer in range(self.num_layers) for suffix in self._suffixes(layer)):
            square = torch.rand(self.hidden_size, dtype=torch.float64) * (largest**2 - least**2) + least**2
            square = square.clamp(1e-12, 1 - 1e-7)
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


@recurrence
def qrnn(z: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(f), torch.sigmoid(-f) * torch.tanh(z)


class QRNN(DiagonalLayers):
    r"""Stacked quasi-recurrent layers with fo-pooling (section 2 of Bradbury et al. 2016, arXiv 1611.01576).

    .. math::
        z_t = \tanh(W_z x_t + b_z), \quad f_t = \sigma(W_f x_t + b_f), \quad o_t = \sigma(W_o x_t + b_o)

        c_t = f_t \odot c_{t-1} + (1 - f_t) \odot z_t, \quad h_t = o_t \odot c_t

    The filters are of width 1.  For wider ones put a causal convolution in front; its last inputs would be a state of
    their own.  The output is h, the state c.

    Args, inputs and outputs: as :class:`ostinato.MinGRU`.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), and ``bias_ih_l{k}``, rows z, f, o.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`.

    Example:
        >>> import torch, ostinato
        >>> ostinato.QRNN(8, 16)(torch.randn(100, 4, 8))[0].shape
        torch.Size([100, 4, 16])
    """

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        return {"weight_ih": (3 * self.hidden_size, width), "bias_ih": (3 * self.hidden_size,)}

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        z, f, o = linear(x, p["weight_ih"], p["bias_ih"]).chunk(3, -1)
        c, c_last = run(qrnn, z, f)
        return torch.sigmoid(o) * c, c_last


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


class SRU(DiagonalLayers):
    r"""Stacked simple recurrent units (section 3 of Lei et al. 2018, arXiv 1709.02755).

    .. math::
        f_t = \sigma(W_f x_t + v_f \odot c_{t-1} + b_f), \quad c_t = f_t \odot c_{t-1} + (1 - f_t) \odot (W x_t)

        r_t = \sigma(W_r x_t + v_r \odot c_{t-1} + b_r), \quad h_t = r_t \odot c_t + (1 - r_t) \odot \alpha x_t

    with :math:`\alpha = \sqrt 3`, that of a highway gate whose bias begins at 0.  Where the input has not
    ``hidden_size`` channels, a linear projection of x replaces the last x.  The output is h, the
    state c.

    Args, inputs and outputs: as :class:`ostinato.MinGRU`.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), rows of W, f and r, and after them those of the highway's
    input where it has any; ``weight_hh_l{k}``, (2 * hidden_size,), and ``bias_ih_l{k}``, those of f and r.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`.

    Example:
        >>> import torch, ostinato
        >>> ostinato.SRU(16, 16, num_layers=4)(torch.randn(100, 4, 16))[0].shape
        torch.Size([100, 4, 16])
    """

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        rows = 3 * hidden if width == hidden else 4 * hidden
        return {"weight_ih": (rows, width), "weight_hh": (2 * hidden,), "bias_ih": (2 * hidden,)}

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        groups = p["weight_ih"].shape[0] // self.hidden_size
        bias = (
            None if p["bias_ih"] is None else F.pad(p["bias_ih"], (self.hidden_size, (groups - 3) * self.hidden_size))
        )
        z, f, r, *skip = linear(x, p["weight_ih"], bias).chunk(groups, -1)
        (h, _), (_, c_last) = run(sru, z, f, r, skip[0] if skip else x.to(z.dtype), *p["weight_hh"].chunk(2))
        return h, c_last

    def reset_parameters(self) -> None:
        """Weights of variance 1 over the input's width, half of it for the gates, and no bias (section 3.2)."""
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


@recurrence
def indrnn_relu(h: Tensor, x: Tensor, u: Tensor) -> Tensor:
    return torch.relu(x + u * h)


@recurrence
def indrnn_tanh(h: Tensor, x: Tensor, u: Tensor) -> Tensor:
    return torch.tanh(x + u * h)


class IndRNN(DiagonalLayers):
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

    nonlinearity: str

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("nonlinearity", nonlinearity, ("relu", "tanh"))
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        StackedLayers.__init__(self, *sizes, backend=backend, device=device, dtype=dtype, nonlinearity=nonlinearity)

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        hidden = self.hidden_size
        return {"weight_ih": (hidden, width), "weight_hh": (hidden,), "bias_ih": (hidden,)}

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        function = indrnn_relu if self.nonlinearity == "relu" else indrnn_tanh
        return run(function, linear(x, p["weight_ih"], p["bias_ih"]), p["weight_hh"])

    def reset_parameters(self) -> None:
        """As ``torch.nn.GRU`` does, but u from U(0, 1): the paper's range for long sequences (section 4.1)."""
        draw_parameters(self, self.hidden_size)
        for name, parameter in self.named_parameters():
            if name.startswith("weight_hh"):
                nn.init.uniform_(parameter, 0, 1)


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


class _ParaLayers(DiagonalLayers):
    """What ParaGRU and ParaLSTM share.

    The recurrence adds the bias, not the product: its gradient is then summed where that of the gates is made.
    """

    def _gates_and_vectors(self, p: Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
        bias = torch.zeros_like(p["weight_hh"]) if p["bias_ih"] is None else p["bias_ih"]
        weights = (x for name, x in p.items() if name in ("weight_hh", "weight_ch"))
        return linear(x, p["weight_ih"]), torch.cat((*weights, bias))

    def reset_parameters(self) -> None:
        """Xavier's uniform weights of the input; N(0, 4 / (5 hidden_size)) of the state, as the authors' own code."""
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


class ParaGRU(_ParaLayers):
    r"""Stacked GRU layers with diagonal recurrent matrices (section 3.1 of Danieli et al. 2025, arXiv 2510.21450).

    .. math::
        z_t = \sigma(a_z \odot h_{t-1} + B_z x_t + b_z), \quad r_t = \sigma(a_r \odot h_{t-1} + B_r x_t + b_r)

        c_t = \tanh(a_c \odot (h_{t-1} \odot r_t) + B_c x_t + b_c), \quad h_t = (1 - z_t) \odot h_{t-1} + z_t \odot c_t

    Args, inputs and outputs: as :class:`ostinato.MinGRU`.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), ``weight_hh_l{k}``, (3 * hidden_size,), and ``bias_ih_l{k}``,
    rows z, r, c.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`.

    Example:
        >>> import torch, ostinato
        >>> ostinato.ParaGRU(8, 16)(torch.randn(100, 4, 8))[0].shape
        torch.Size([100, 4, 16])
    """

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows = 3 * self.hidden_size
        return {"weight_ih": (rows, width), "weight_hh": (rows,), "bias_ih": (rows,)}

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        return run(para_gru, *self._gates_and_vectors(p, x))


class ParaLSTM(_ParaLayers):
    r"""Stacked LSTM layers with diagonal recurrent matrices, peepholes, and one gate for input and forgetting
    (section 3.1 of Danieli et al. 2025, arXiv 2510.21450).

    .. math::
        f_t = \sigma(a_f \odot h_{t-1} + p_f \odot c_{t-1} + B_f x_t + b_f), \quad
        c_t = f_t \odot c_{t-1} + (1 - f_t) \odot \tanh(a_c \odot h_{t-1} + B_c x_t + b_c)

        o_t = \sigma(a_o \odot h_{t-1} + p_o \odot c_t + B_o x_t + b_o), \quad h_t = o_t \odot \tanh(c_t)

    Args, inputs and outputs: as :class:`ostinato.MinGRU`, but that ``hx`` and ``h_n`` are pairs of h and c, as those of
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

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows = 3 * self.hidden_size
        return {
            "weight_ih": (rows, width),
            "weight_hh": (rows,),
            "weight_ch": (2 * self.hidden_size,),
            "bias_ih": (rows,),
        }

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        (h, _), last = run(para_lstm, *self._gates_and_vectors(p, x))
        return h, last
