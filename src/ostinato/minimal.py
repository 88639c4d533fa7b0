"""MinGRU and MinLSTM, layers and cells: gates that do not look at the previous state, so time is a scan."""

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ostinato.kernels.gemm import linear
from ostinato.kernels.scan import BACKENDS, GATES, operators
from ostinato.scan import check_batch_sizes, check_choice, check_floating

CANDIDATES = ("positive", "linear", "tanh")


class _MinimalLayers(nn.Module):
    """Stacked layers of one minimal cell: :class:`torch.nn.GRU`'s contract around ``operators.minimal_scan``."""

    cell: str
    weight_ih_l0: Tensor

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
        proj_size: int = 0,
        candidate: str = "positive",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        if proj_size != 0:
            raise ValueError(f"proj_size must be 0, projections are not supported; got {proj_size!r}")
        check_choice("candidate", candidate, CANDIDATES)
        check_choice("backend", backend, BACKENDS)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, 0 to 1; got {dropout!r}")
        if dropout > 0 and num_layers == 1:
            warnings.warn("dropout acts between layers, and num_layers is 1: nothing will be dropped", stacklevel=2)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, float(dropout), bidirectional
        self.candidate, self.backend = candidate, backend
        rows = GATES[self.cell] * hidden_size
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size * self.num_directions
            for suffix in self._suffixes(layer):
                weight = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype))
                self.register_parameter(f"weight_ih_{suffix}", weight)
                if bias:
                    self.register_parameter(
                        f"bias_ih_{suffix}", nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
                    )
        self.reset_parameters()

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _suffixes(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"][: self.num_directions]

    def reset_parameters(self) -> None:
        """Draw every weight and bias from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)), as ``torch.nn.GRU`` does."""
        _draw_parameters(self, self.hidden_size)

    def extra_repr(self) -> str:
        shown = [f"{self.input_size}, {self.hidden_size}"]
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
        for name, default in {**defaults, "candidate": "positive", "backend": "auto"}.items():
            if getattr(self, name) != default:
                shown.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(shown)

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the whole sequence; see the class."""
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        _check_input(self, input, (2, 3), "(T, B, input_size), (B, T, input_size) if batch_first, or (T, input_size)")
        batched = input.dim() == 3
        batch_dim = 0 if self.batch_first else 1
        x = input if batched else input.unsqueeze(batch_dim)
        self._check_state(hx, (x.shape[batch_dim],) if batched else ())
        if hx is not None and not batched:
            hx = hx.unsqueeze(1)
        output, h_n = self._layers(x, hx, None)
        return (output, h_n) if batched else (output.squeeze(batch_dim), h_n.squeeze(1))

    def _forward_packed(self, packed: PackedSequence, hx: Tensor | None) -> tuple[PackedSequence, Tensor]:
        data, batch_sizes, sorted_indices, unsorted_indices = packed
        _check_input(self, data, (2,), "(total steps, input_size) in a PackedSequence")
        if not torch.compiler.is_compiling():
            check_batch_sizes(batch_sizes, data.shape[0])
        batch = int(batch_sizes[0])
        self._check_state(hx, (batch,))
        if hx is None:
            hx = data.new_zeros(self.num_layers * self.num_directions, batch, self.hidden_size)
        elif sorted_indices is not None:
            hx = hx.index_select(1, sorted_indices)
        offsets = F.pad(batch_sizes.cumsum(0), (1, 0)).to(data.device, torch.int32, non_blocking=True)
        output, h_n = self._layers(data, hx, offsets)
        if unsorted_indices is not None:
            h_n = h_n.index_select(1, unsorted_indices)
        return PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices), h_n

    def _layers(self, x: Tensor, hx: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        states = []
        for layer in range(self.num_layers):
            if layer > 0 and self.dropout > 0 and self.training:
                x = F.dropout(x, self.dropout)
            h0 = None if hx is None else hx[layer * self.num_directions : (layer + 1) * self.num_directions]
            x, h_last = self._layer(layer, x, h0, offsets, self.batch_first)
            states.append(h_last)
        return x, states[0] if self.num_layers == 1 else torch.cat(states)

    def _layer(
        self, layer: int, x: Tensor, h0: Tensor | None, offsets: Tensor | None, batch_first: bool
    ) -> tuple[Tensor, Tensor]:
        """One GEMM for all gates and directions, then one fused pass; the bias is added in the latter."""
        weights = [getattr(self, f"weight_ih_{suffix}") for suffix in self._suffixes(layer)]
        biases = [getattr(self, f"bias_ih_{suffix}") for suffix in self._suffixes(layer)] if self.bias else []
        pre = linear(x, weights[0] if len(weights) == 1 else torch.cat(weights))
        bias = None if not biases else biases[0] if len(biases) == 1 else torch.cat(biases)
        return operators.minimal_scan(
            pre,
            bias,
            None if h0 is None else h0.to(pre.dtype),
            offsets,
            self.cell,
            self.candidate,
            batch_first,
            self.num_directions,
            self.backend,
        )

    def step(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One time step, in constant memory: ``y, h = module.step(x, h)``.

        Args:
            x: the input at this step, (B, input_size) or (input_size,).
            h: the state so far, (num_layers, B, hidden_size), without B if x has none; zero if absent.

        Returns:
            y, (B, hidden_size), the last layer's new state, and h, the new state of every layer.

        Raises:
            TypeError: an input or state that is no tensor of the parameters' dtype.
            ValueError: shapes that do not fit, or a bidirectional module, which needs the whole sequence.

        Example:
            >>> import torch, ostinato
            >>> module, x = ostinato.MinGRU(3, 5), torch.randn(7, 3)
            >>> h = None
            >>> for x_t in x:
            ...     y, h = module.step(x_t, h)
            >>> torch.allclose(y, module(x)[0][-1], atol=1e-6)
            True
        """
        if self.bidirectional:
            raise ValueError("step needs a module that runs forward in time; this one is bidirectional")
        _check_input(self, x, (1, 2), "(B, input_size) or (input_size,)")
        batched = x.dim() == 2
        self._check_state(h, x.shape[:-1], "h")
        if not batched:
            x, h = x[None], None if h is None else h[:, None]
        y, states = x, []
        for layer in range(self.num_layers):
            if layer > 0 and self.dropout > 0 and self.training:
                y = F.dropout(y, self.dropout)
            output, h_last = self._layer(layer, y[:, None], None if h is None else h[layer : layer + 1], None, True)
            y = output[:, 0]
            states.append(h_last)
        h = states[0] if self.num_layers == 1 else torch.cat(states)
        return (y, h) if batched else (y[0], h[:, 0])

    def _check_state(self, hx: Tensor | None, batch: tuple[int, ...], name: str = "hx") -> None:
        if hx is None:
            return
        check_floating(name, hx)
        expected = (self.num_layers * self.num_directions, *batch, self.hidden_size)
        if hx.shape != expected:
            raise ValueError(f"{name} must have shape {expected}; got {tuple(hx.shape)}")
        _check_like_weight(name, hx, self.weight_ih_l0)


class MinGRU(_MinimalLayers):
    r"""Stacked minimal GRU layers (section 3.1 of Feng et al. 2024, arXiv 2410.01201).

    .. math::
        z_t = \sigma(W_z x_t + b_z), \quad c_t = \phi(W_h x_t + b_h), \quad
        h_t = (1 - z_t) \odot h_{t-1} + z_t \odot c_t

    Neither the update gate z nor the candidate c sees the previous state, so the whole sequence is one matrix
    product and one scan.  Arguments, shapes and results are :class:`torch.nn.GRU`'s; the parallel forward,
    :meth:`step` and a sequence split in two with the state carried over compute the same function.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional: as ``torch.nn.GRU``.
        proj_size: 0, as ``torch.nn.LSTM``'s default; there are no projections.
        candidate: :math:`\phi`.  "positive" is the paper's g, x + 0.5 for x >= 0 and sigmoid(x) below, which keeps
            the state positive (appendix B.3); "linear" the identity of section 3.1; "tanh" a bounded state.
        backend: see :func:`ostinato.linear_scan`.
        device, dtype: of the parameters.

    Inputs: ``input``, (T, B, input_size), (B, T, input_size) with ``batch_first``, (T, input_size) unbatched, or a
    ``PackedSequence``; ``hx``, (num_layers * D, B, hidden_size), D = 2 if bidirectional, zero if absent.

    Outputs: ``output``, the last layer's states, D * hidden_size channels laid out as ``input``; ``h_n``, the
    last state of every layer and direction, shaped as ``hx``.

    Parameters: ``weight_ih_l{k}``, (2 * hidden_size, in), and ``bias_ih_l{k}``, rows z then h; ``_reverse``
    appended for the second direction.

    Raises:
        TypeError: an input or state that is no tensor of the parameters' dtype.
        ValueError: sizes, shapes or devices that do not fit, a ``proj_size``, or an unknown candidate or backend.

    Example:
        >>> import torch, ostinato
        >>> gru = ostinato.MinGRU(input_size=8, hidden_size=16, num_layers=2, batch_first=True)
        >>> output, h_n = gru(torch.randn(4, 100, 8))
        >>> output.shape, h_n.shape
        (torch.Size([4, 100, 16]), torch.Size([2, 4, 16]))
    """

    cell = "mingru"


class MinLSTM(_MinimalLayers):
    r"""Stacked minimal LSTM layers (section 3.2 of Feng et al. 2024, arXiv 2410.01201).

    .. math::
        f_t = \sigma(W_f x_t + b_f), \quad i_t = \sigma(W_i x_t + b_i), \quad c_t = \phi(W_h x_t + b_h), \quad
        h_t = \frac{f_t}{f_t + i_t} \odot h_{t-1} + \frac{i_t}{f_t + i_t} \odot c_t

    The normalised gates are computed without the division of 0 by 0 that two closed gates would bring.
    Everything else is as :class:`MinGRU`; there is one state, so ``hx`` and ``h_n`` are single tensors.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), and ``bias_ih_l{k}``, rows f, i, h.

    Raises:
        TypeError, ValueError: as :class:`MinGRU`.

    Example:
        >>> import torch, ostinato
        >>> lstm = ostinato.MinLSTM(8, 16, bidirectional=True)
        >>> output, h_n = lstm(torch.randn(100, 4, 8))
        >>> output.shape, h_n.shape
        (torch.Size([100, 4, 32]), torch.Size([2, 4, 16]))
    """

    cell = "minlstm"


class _MinimalCell(nn.Module):
    """One step of a minimal layer: :class:`torch.nn.GRUCell`'s contract."""

    cell: str

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        candidate: str = "positive",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(input_size=input_size, hidden_size=hidden_size)
        check_choice("candidate", candidate, CANDIDATES)
        check_choice("backend", backend, BACKENDS)
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.candidate, self.backend = candidate, backend
        rows = GATES[self.cell] * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(rows, input_size, device=device, dtype=dtype))
        self.bias_ih = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight and bias from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)), as ``torch.nn.GRUCell`` does."""
        _draw_parameters(self, self.hidden_size)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias}, candidate={self.candidate!r}"

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The next state, (B, hidden_size) or (hidden_size,), from the input and the state before it."""
        _check_input(self, input, (1, 2), "(B, input_size) or (input_size,)")
        if hx is not None:
            check_floating("hx", hx)
            if hx.shape != (*input.shape[:-1], self.hidden_size):
                raise ValueError(f"hx must have shape {(*input.shape[:-1], self.hidden_size)}; got {tuple(hx.shape)}")
            _check_like_weight("hx", hx, self.weight_ih)
        pre = linear(input.view(-1, 1, self.input_size), self.weight_ih)
        h0 = None if hx is None else hx.to(pre.dtype).view(1, -1, self.hidden_size)
        _, h = operators.minimal_scan(pre, self.bias_ih, h0, None, self.cell, self.candidate, True, 1, self.backend)
        return h.view(*input.shape[:-1], self.hidden_size)


class MinGRUCell(_MinimalCell):
    r"""One step of a minimal GRU, the counterpart of :class:`torch.nn.GRUCell`; equations as :class:`MinGRU`.

    Args:
        input_size, hidden_size, bias, candidate, backend, device, dtype: as :class:`MinGRU`.

    Inputs: ``input``, (B, input_size) or (input_size,); ``hx``, (B, hidden_size) or (hidden_size,), zero if absent.
    Output: the next state, shaped as ``hx``.

    Parameters: ``weight_ih``, (2 * hidden_size, input_size), and ``bias_ih``, rows z then h.

    Raises:
        TypeError, ValueError: as :class:`MinGRU`.

    Example:
        >>> import torch, ostinato
        >>> cell = ostinato.MinGRUCell(8, 16)
        >>> h = cell(torch.randn(4, 8))
        >>> cell(torch.randn(4, 8), h).shape
        torch.Size([4, 16])
    """

    cell = "mingru"


class MinLSTMCell(_MinimalCell):
    r"""One step of a minimal LSTM; equations as :class:`MinLSTM`, the rest as :class:`MinGRUCell`.

    Parameters: ``weight_ih``, (3 * hidden_size, input_size), and ``bias_ih``, rows f, i, h.

    Raises:
        TypeError, ValueError: as :class:`MinGRU`.

    Example:
        >>> import torch, ostinato
        >>> ostinato.MinLSTMCell(8, 16)(torch.randn(8)).shape
        torch.Size([16])
    """

    cell = "minlstm"


def _draw_parameters(module: nn.Module, hidden_size: int) -> None:
    bound = 1 / math.sqrt(hidden_size)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -bound, bound)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer; got {type(value).__name__}")
        if value <= 0:
            raise ValueError(f"{name} must be positive; got {value}")


def _check_input(module: _MinimalLayers | _MinimalCell, x: Tensor, ranks: tuple[int, ...], shape: str) -> None:
    check_floating("input", x)
    if x.dim() not in ranks:
        raise ValueError(f"input must have shape {shape}; got {tuple(x.shape)}")
    if x.shape[-1] != module.input_size:
        raise ValueError(f"input must have input_size = {module.input_size} features last; got shape {tuple(x.shape)}")
    _check_like_weight("input", x, module.weight_ih_l0 if isinstance(module, _MinimalLayers) else module.weight_ih)


def _check_like_weight(name: str, x: Tensor, weight: Tensor) -> None:
    if x.device != weight.device:
        raise ValueError(f"{name} must be on the module's device, {weight.device}; got {x.device}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name} must have the parameters' dtype, {weight.dtype}; got {x.dtype}")
