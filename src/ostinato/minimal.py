"""MinGRU and MinLSTM, layers and cells: gates do not depend on the previous state, so a layer is a scan over time."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from ostinato.diagonal.layers import DiagonalLayers, Parameters, Run
from ostinato.kernels.dispatch import Prepared, is_differentiated, is_eager
from ostinato.kernels.export import constant_to_compilers, refuse_script
from ostinato.kernels.gemm import linear
from ostinato.kernels.recurrence import operators
from ostinato.kernels.recurrence.trace import trace
from ostinato.kernels.scan import BACKENDS
from ostinato.kernels.scan.torch_ops import Packing
from ostinato.layers import (
    Hidden,
    StackedLayers,
    check_flags,
    check_input,
    check_like_weight,
    check_sizes,
    draw_parameters,
)
from ostinato.recurrence import Recurrence, recurrence
from ostinato.replay import recording
from ostinato.scan import check_choice, check_floating


def _positive(x: Tensor) -> Tensor:
    return torch.where(x >= 0, x + 0.5, torch.sigmoid(x))


def _linear(x: Tensor) -> Tensor:
    return x


CANDIDATES: dict[str, Callable[[Tensor], Tensor]] = {"positive": _positive, "linear": _linear, "tanh": torch.tanh}


def _mingru(candidate: Callable[[Tensor], Tensor]) -> Recurrence:
    @recurrence
    def mingru(z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(-z), torch.sigmoid(z) * candidate(h)

    return mingru


def _minlstm(candidate: Callable[[Tensor], Tensor]) -> Recurrence:
    @recurrence
    def minlstm(f: Tensor, i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        keep, mix = _Shares.apply(f, i)
        return keep, mix * candidate(h)

    return minlstm


def _shares(f: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """sigmoid(f) and sigmoid(i) over their sum, and the factors of their derivatives."""
    f, i = f.clamp(min=-1e30), i.clamp(min=-1e30)  # inf - inf is NaN
    low = torch.minimum(f, i).clamp(max=1e30)
    # sigmoid(f) / (sigmoid(f) + sigmoid(i)) = (1 + e^-i) / (2 + e^-i + e^-f).  Where a gate is below e^-80, numerator
    # and denominator are scaled down to avoid overflow; the ones, which then are negligible, are dropped.
    opened, one = (-low).clamp(max=80), torch.where(low < -80, 0.0, 1.0)
    of_f, of_i = torch.exp(opened + (low - f)), torch.exp(opened + (low - i))
    p, q = one + of_i, one + of_f
    r = 1 / (p + q)
    return p * r, q * r, of_f * r, of_i * r


class _Shares(torch.autograd.Function):
    """Two sigmoids divided by their sum, with derivatives free of the cancellation in those of the quotient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(f: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        return _shares(f, i)[:2]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        keep, mix, slope_f, slope_i = _shares(*ctx.saved_tensors)
        change = grads[0] - grads[1]
        return change * (keep * slope_f), -change * (mix * slope_i)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, Tensor]:
        with forward_ad._set_fwd_grad_enabled(True):  # PyTorch disables it here, which would drop nested tangents
            keep, mix, slope_f, slope_i = _shares(*(forward_ad.unpack_dual(x)[0] for x in ctx.saved_tensors))
            change = keep * slope_f * tangents[0] - mix * slope_i * tangents[1]
            return change, -change


RECURRENCES = {
    "mingru": {name: _mingru(candidate) for name, candidate in CANDIDATES.items()},
    "minlstm": {name: _minlstm(candidate) for name, candidate in CANDIDATES.items()},
}
GATES = {cell: len(variants["linear"].names) for cell, variants in RECURRENCES.items()}  # pre-activations per channel


@constant_to_compilers
def recurrence_of(cell: str, candidate: str, bias: bool) -> str:
    """The traced recurrence of a cell, in the operators' format; with ``bias``, it adds the bias to pre-activations."""
    return _traced(cell, candidate, bias)


@functools.cache
def _traced(cell: str, candidate: str, bias: bool) -> str:
    function, gates = RECURRENCES[cell][candidate].function, GATES[cell]

    def with_bias(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        return function(*map(torch.add, arguments[:gates], arguments[gates:]))

    return trace(with_bias if bias else function, [True] * gates + [False] * (gates * bias)).text


def _steps_alone(x: Tensor, weight: Tensor, backend: str) -> bool:
    """Whether one step is computed by :func:`next_state`: the layer's usual host overhead exceeds its run time."""
    if x.dtype is not weight.dtype or backend != "auto":
        return False
    if x.is_cpu:
        return x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda"):
        return False
    return operators.kernels_on("auto", "cuda") is not None


def next_state(cell: str, candidate: str, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None) -> Tensor:
    """The state after one step, by the fused kernel, or in PyTorch operations if it is traced or differentiated.

    The state before is (B, H) or (1, B, H), as is the result.
    """
    tensors = [y for y in (x, weight, bias, h) if y is not None]
    if is_eager(tensors) and not is_differentiated(tensors) and _is_plain_step(GATES[cell], x, weight, bias, h):
        layer = recurrence_of(cell, candidate, False), *x.shape, weight.shape[0] // GATES[cell], x.dtype
        return operators.step_of(*layer, x.get_device())(x, weight, bias, h)
    a, b = RECURRENCES[cell][candidate].function(*F.linear(x, weight, bias).chunk(GATES[cell], -1))
    return b if h is None else torch.addcmul(b, a, h)


def _is_plain_step(gates: int, x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None) -> bool:
    """Whether shapes, dtypes, devices and layout suit the kernel; all else, errors included, is left to PyTorch."""
    rows = weight.shape[0]
    return (
        x.numel() > 0
        and weight.shape == (rows, x.shape[1])
        and rows % gates == 0
        and (bias is None or bias.shape == (rows,))
        and (h is None or h.numel() == len(x) * rows // gates)
        and all(y is None or (y.dtype is x.dtype and y.device == x.device) for y in (weight, bias, h))
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
    )


_STEPS = Prepared()  # keyed by inputs and weights


class _MinimalLayers(DiagonalLayers):
    """Stacked layers of one minimal cell, around ``operators.layer_scan``."""

    cell: str
    candidate: str

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
        if proj_size != 0:
            raise ValueError(f"proj_size must be 0, projections are not supported; got {proj_size!r}")
        check_choice("candidate", candidate, tuple(CANDIDATES))
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        StackedLayers.__init__(self, *sizes, backend=backend, device=device, dtype=dtype, candidate=candidate)

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows = GATES[self.cell] * self.hidden_size
        return {"weight_ih": (rows, width), "bias_ih": (rows,)}

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        gates = linear(x, p["weight_ih"], p["bias_ih"]).chunk(GATES[self.cell], -1)
        return run(RECURRENCES[self.cell][self.candidate], *gates)

    def _layers(
        self, x: Tensor, hx: Hidden | None, offsets: Tensor | None, resets: Tensor | None, batch_first: bool
    ) -> tuple[Tensor, Hidden]:
        if self._is_apart(resets):
            return super()._layers(x, hx, offsets, resets, batch_first)
        return StackedLayers._layers(self, x, hx, offsets, resets, batch_first)

    def _is_apart(self, resets: Tensor | None) -> bool:
        """Whether the sequence is sharded and each direction must be run separately."""
        return self.sequence_group is not None and (resets is not None or self.bidirectional)

    def _step_again(self, x: Any, h: Any) -> tuple[Tensor, Any] | None:
        return self._layer_again(0, x, h) if self.num_layers == 1 else None

    def _layer_again(self, layer: int, x: Any, h: Any) -> tuple[Tensor, Any] | None:
        """The step of a layer, if one like it is cached."""
        if torch.is_grad_enabled():
            return None
        weight, bias = self._parameter(f"weight_ih_l{layer}"), self._parameter(f"bias_ih_l{layer}")
        step = _STEPS.find(*self._like_step(x, h, weight, bias))
        if step is None:
            return None
        state = step(x, weight, bias, h)
        return (state, state.unsqueeze(0)) if h is None else (state.squeeze(0), state)

    def _remember_step(self, x: Tensor, h: Tensor | None, weight: Tensor, bias: Tensor | None) -> None:
        """Cache a step for :meth:`_layer_again`."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if not _is_plain_step(GATES[self.cell], x, weight, bias, h):
            return
        recurrence = recurrence_of(self.cell, self.candidate, False)
        step = recurrence, *x.shape, self.hidden_size, x.dtype, x.get_device()
        _STEPS.add(lambda: operators.step_of(*step), *self._like_step(x, h, weight, bias))

    def _like_step(self, x: Tensor, h: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple:
        """The cache key of a step: its tensors and settings."""
        given = (x, weight) if h is None else (x, weight, h)
        given = given if bias is None else (*given, bias)
        return given, h is None, self.cell, self.candidate, self.backend

    def _step_of_layer(self, layer: int, x: Tensor, h0: Any) -> tuple[Tensor, Hidden]:
        if recording() is not None:
            return super()._step_of_layer(layer, x, h0)
        if self.num_layers > 1 and not torch.compiler.is_compiling():
            again = self._layer_again(layer, x, h0)
            if again is not None:
                return again
        weight, bias = self._parameters_of(f"l{layer}", x.shape[-1]).values()
        if _steps_alone(x, weight, self.backend):
            state = next_state(self.cell, self.candidate, x, weight, bias, h0)
            self._remember_step(x, h0, weight, bias)
            return (state, state.unsqueeze(0)) if h0 is None else (state.squeeze(0), state)
        if self.sequence_group is not None:
            return super()._step_of_layer(layer, x, h0)
        h, h_last = self._scan(linear(x, weight).unsqueeze(0), bias, h0, None, None, batch_first=False)
        return h.squeeze(0), h_last

    def _layer(
        self,
        layer: int,
        x: Tensor,
        h0: Any,
        offsets: Tensor | None,
        resets: Tensor | None,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        """One GEMM for all gates and directions, then one fused kernel, which also adds the bias."""
        if self._is_apart(resets):
            return super()._layer(layer, x, h0, offsets, resets, batch_first)
        own = [self._parameters_of(suffix, x.shape[-1]).values() for suffix in self._suffixes(layer)]
        weights, biases = zip(*own, strict=True)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = None if not self.bias else biases[0] if len(biases) == 1 else torch.cat(biases)
        if x.is_cuda and not self.bidirectional and self.sequence_group is None and offsets is None and resets is None:
            recurrence = recurrence_of(self.cell, self.candidate, self.bias)
            found = operators.projected_scan(x, weight, bias, h0, recurrence, batch_first, self.backend)
            if found is not None:
                return found
        if self.sequence_group is not None:
            from ostinato import distributed

            settings = self.cell, self.candidate, batch_first, self.backend
            return distributed.minimal_layer(x, weight, bias, h0, *settings, group=self.sequence_group)
        pre = linear(x, weight)
        resets = None if resets is None else self._of_directions(resets, offsets, batch_first)
        return self._scan(pre, bias, h0, offsets, resets, batch_first)

    def _scan(
        self,
        pre: Tensor,
        bias: Tensor | None,
        h0: Tensor | None,
        offsets: Tensor | None,
        resets: Tensor | None,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        if h0 is not None and h0.dtype is not pre.dtype:  # even a no-op .to() costs
            h0 = h0.to(pre.dtype)
        recurrence = recurrence_of(self.cell, self.candidate, self.bias)
        directions, backend = self.num_directions, self.backend
        return operators.layer_scan(pre, bias, h0, offsets, resets, recurrence, batch_first, directions, backend)

    def _of_directions(self, resets: Tensor, offsets: Tensor | None, batch_first: bool) -> Tensor:
        """The mask of each direction: in reverse, an episode starts at the step before the next one's first."""
        if not self.bidirectional:
            return resets[None]
        packing = None if offsets is None else Packing.from_offsets(offsets)
        marks = resets if packing is None else packing.unpack(resets[:, None], False)[..., 0]
        dim = 0 if packing is None and not batch_first else 1
        ended = F.pad(marks, (0, 1) if dim == 1 else (0, 0, 0, 1)).narrow(dim, 1, marks.shape[dim])
        return torch.stack((resets, ended if packing is None else packing.pack(ended[..., None])[:, 0]))


class MinGRU(_MinimalLayers):
    r"""Stacked minimal GRU layers (section 3.1 of Feng et al. 2024, arXiv 2410.01201).

    .. math::
        z_t = \sigma(W_z x_t + b_z), \quad c_t = \phi(W_h x_t + b_h), \quad
        h_t = (1 - z_t) \odot h_{t-1} + z_t \odot c_t

    Neither the update gate z nor the candidate c depends on the previous state, so the whole sequence is one matrix
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
    ``PackedSequence``; ``hx``, (num_layers * D, B, hidden_size), D = 2 if bidirectional, zero if absent; ``resets``,
    keyword-only, bool, of ``input``'s shape without channels: where True, an episode begins at that step.  The state
    is zero before it; in the reverse direction, before the last step of the previous episode.

    Outputs: ``output``, the last layer's states, D * hidden_size channels laid out as ``input``; ``h_n``, the
    last state of every layer and direction, shaped as ``hx``.

    Parameters: ``weight_ih_l{k}``, (2 * hidden_size, in), and ``bias_ih_l{k}``, rows z then h; ``_reverse``
    appended for the second direction.

    Raises:
        TypeError: an input or state that is not a tensor of the parameters' dtype.
        ValueError: sizes, shapes or devices that do not match, a ``proj_size``, or an unknown candidate or backend.

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

    The normalised gates are computed without the 0/0 of two closed gates.  Everything else is as in :class:`MinGRU`;
    there is one state, so ``hx`` and ``h_n`` are single tensors.

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


class HighwayMinGRU(DiagonalLayers):
    r"""Stacked minimal GRU layers, each with a highway connection, as in PufferLib's policies.

    .. math::
        h_t = (1 - z_t) \odot h_{t-1} + z_t \odot g(W_h x_t + b_h), \quad z_t = \sigma(W_z x_t + b_z)

        y_t = r_t \odot h_t + (1 - r_t) \odot x_t, \quad r_t = \sigma(W_r x_t + b_r)

    with the :math:`g` of :class:`MinGRU` (Feng et al. 2024, arXiv 2410.01201, appendix B.3).  Where the input's width
    is not ``hidden_size``, a linear projection of x replaces the last x.  The output is y, the state h.  PufferLib's
    layers have no bias.

    Args, inputs and outputs: as :class:`MinGRU`, but for ``candidate``.

    Parameters: ``weight_ih_l{k}``, (3 * hidden_size, in), and ``bias_ih_l{k}``, rows z, h, r, followed by those of the
    projection of x if there is one.

    Raises:
        TypeError, ValueError: as :class:`ostinato.RGLRU`.

    Example:
        >>> import torch, ostinato
        >>> ostinato.HighwayMinGRU(16, 16, num_layers=4)(torch.randn(100, 4, 16))[0].shape
        torch.Size([100, 4, 16])
    """

    def _shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows = (3 if width == self.hidden_size else 4) * self.hidden_size
        return {"weight_ih": (rows, width), "bias_ih": (rows,)}

    def _cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        z, c, r, *skip = linear(x, p["weight_ih"], p["bias_ih"]).split(self.hidden_size, -1)
        h, h_last = run(RECURRENCES["mingru"]["positive"], z, c)
        return torch.lerp(skip[0] if skip else x.to(h.dtype), h, torch.sigmoid(r)), h_last


class _MinimalCell(nn.Module):
    """One step of a minimal layer: :class:`torch.nn.GRUCell`'s contract."""

    cell: str
    __prepare_scriptable__ = refuse_script

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
        check_sizes(input_size=input_size, hidden_size=hidden_size)
        check_flags(bias=bias)
        check_choice("candidate", candidate, tuple(CANDIDATES))
        check_choice("backend", backend, BACKENDS)
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.candidate, self.backend = candidate, backend
        rows = GATES[self.cell] * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(rows, input_size, device=device, dtype=dtype))
        self.bias_ih = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight and bias from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)), as ``torch.nn.GRUCell`` does."""
        draw_parameters(self, self.hidden_size)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, bias={self.bias}, candidate={self.candidate!r}"

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """The next state, (B, hidden_size) or (hidden_size,), from the input and the previous state."""
        check_input(self, input, (1, 2), "(B, input_size) or (input_size,)")
        if hx is not None:
            check_floating("hx", hx)
            if hx.shape != (*input.shape[:-1], self.hidden_size):
                raise ValueError(f"hx must have shape {(*input.shape[:-1], self.hidden_size)}; got {tuple(hx.shape)}")
            check_like_weight("hx", hx, self.weight_ih)
        if _steps_alone(input, self.weight_ih, self.backend):
            rows, state = input.view(-1, self.input_size), None if hx is None else hx.view(-1, self.hidden_size)
            h = next_state(self.cell, self.candidate, rows, self.weight_ih, self.bias_ih, state)
            return h if input.dim() == 2 else h[0]
        pre = linear(input.view(-1, 1, self.input_size), self.weight_ih)
        h0 = None if hx is None else hx.to(pre.dtype).view(1, -1, self.hidden_size)
        recurrence = recurrence_of(self.cell, self.candidate, self.bias)
        _, h = operators.layer_scan(pre, self.bias_ih, h0, None, None, recurrence, True, 1, self.backend)
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
