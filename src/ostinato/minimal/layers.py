"""MinGRU and MinLSTM: gates do not depend on the previous state, so a layer is a scan over time."""

from typing import Any

import torch
from torch import Tensor

from ostinato.checks import check_choice, check_integers
from ostinato.episodes import in_reverse, in_reverse_of_rows
from ostinato.kernels.matmul.gemm import linear
from ostinato.kernels.matmul.precision import autocast_dtype
from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.recurrence.linear.layer import layer_scan, projected_scan
from ostinato.minimal.recurrences import CANDIDATES, GATES, RECURRENCES, recurrence_of
from ostinato.minimal.steps import StepCache, next_state, uses_next_state
from ostinato.recurrence_layers import Parameters, RecurrenceLayers, Run
from ostinato.replay import recording
from ostinato.states import Hidden

_STEPS = StepCache()


class _MinimalLayers(RecurrenceLayers[Tensor]):
    """Stacked layers of one minimal cell, around ``layer_scan``."""

    cell: str
    reads_packed = True
    settings = *RecurrenceLayers.settings, "candidate"

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
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_integers(proj_size=proj_size)
        if proj_size != 0:
            raise ValueError(f"proj_size must be 0, projections are not supported; got {proj_size!r}")
        check_choice("candidate", candidate, tuple(CANDIDATES))
        self.candidate = candidate
        sizes = input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional
        super().__init__(*sizes, backend=backend, device=device, dtype=dtype)

    __init__.__qualname__ = "__init__"  # Python's errors then do not name a private class

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        rows = GATES[self.cell] * self.hidden_size
        return {"weight_ih": (rows, width), "bias_ih": (rows,)}

    def _run_cell(self, suffix: str, p: Parameters, x: Tensor, run: Run) -> tuple[Tensor, Hidden]:
        gates = linear(x, p["weight_ih"], p["bias_ih"]).chunk(GATES[self.cell], -1)
        return run(RECURRENCES[self.cell][self.candidate], *gates)

    def _runs_as_step(self, input: Any) -> bool:
        return (
            not (torch.is_grad_enabled() or self.bidirectional)
            and self.sequence_group is None
            and isinstance(input, Tensor)
            and is_eager([input])  # a program that is traced may be run with more steps
            and input.dim() == 3
            and input.shape[int(self.batch_first)] == 1
            and autocast_dtype(input.device) is None
            and recording() is None
        )

    def _run_cached_step(self, x: Any, state: Any) -> tuple[Tensor, Any] | None:
        return self._cached_step_of_layer(0, x, state) if self.num_layers == 1 else None

    def _cached_step_of_layer(self, layer: int, x: Any, h: Any) -> tuple[Tensor, Any] | None:
        """The step of a layer, if one like it is cached."""
        weight, bias = self._parameter_named(f"weight_ih_l{layer}"), self._parameter_named(f"bias_ih_l{layer}")
        state = _STEPS.run((self.cell, self.candidate, self.backend), x, weight, bias, h)
        return None if state is None else _output_and_state(state, h)

    def _run_step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """All layers at one step; it is launched, not replayed from a CUDA graph, as it is only a few kernels."""
        return self._run_in_turn(self._step_of_layer, x, state)

    def _step_of_layer(self, layer: int, x: Tensor, h0: Any) -> tuple[Tensor, Hidden]:
        if recording() is not None:
            return super()._step_of_layer(layer, x, h0)
        if self.num_layers > 1 and not torch.compiler.is_compiling():
            result = self._cached_step_of_layer(layer, x, h0)
            if result is not None:
                return result
        weight, bias = self._parameters_of(f"l{layer}", x.shape[-1]).values()
        if uses_next_state(x, weight, self.backend):
            state = next_state(self.cell, self.candidate, x, weight, bias, h0)
            _STEPS.add((self.cell, self.candidate, self.backend), x, weight, bias, h0)
            return _output_and_state(state, h0)
        h, h_last = self._run_scan(linear(x, weight).unsqueeze(0), bias, h0, None, None, batch_first=False)
        return h.squeeze(0), h_last

    def _run_layer(
        self,
        layer: int,
        x: Tensor,
        h0: Any,
        offsets: Tensor | None,
        resets: Tensor | None,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor]:
        """One GEMM for all gates and directions, then one fused kernel, which also adds the bias."""
        if self.sequence_group is not None and (resets is not None or self.bidirectional):
            return super()._run_layer(layer, x, h0, offsets, resets, batch_first)  # minimal_layer supports neither
        of_directions = [self._parameters_of(suffix, x.shape[-1]) for suffix in self._parameter_suffixes(layer)]
        weights, biases = zip(*(parameters.values() for parameters in of_directions), strict=True)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = None if not self.bias else biases[0] if len(biases) == 1 else torch.cat(biases)
        if self.sequence_group is not None:
            from ostinato.distributed.layers import minimal_layer

            settings = self.cell, self.candidate, batch_first, self.backend
            return minimal_layer(x, weight, bias, h0, *settings, group=self.sequence_group())
        if x.is_cuda and not self.bidirectional and offsets is None:
            recurrence = recurrence_of(self.cell, self.candidate, self.bias)
            result = projected_scan(x, weight, bias, h0, resets, recurrence, batch_first, self.backend)
            if result is not None:
                return result
        pre = linear(x, weight)
        resets = None if resets is None else self._resets_of_directions(resets, h0, offsets, batch_first)
        return self._run_scan(pre, bias, h0, offsets, resets, batch_first)

    def _run_scan(
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
        return layer_scan(pre, bias, h0, offsets, resets, recurrence, batch_first, directions, backend)

    def _resets_of_directions(
        self, resets: Tensor, h0: Tensor | None, offsets: Tensor | None, batch_first: bool
    ) -> Tensor:
        """The resets of each direction, stacked."""
        if not self.bidirectional:
            return resets[None]
        if offsets is None:
            return torch.stack((resets, in_reverse(resets, batch_first)))
        assert h0 is not None, "packed sequences come with an initial state, which says how many there are"
        return torch.stack((resets, in_reverse_of_rows(resets, offsets, h0.shape[1])))


def _output_and_state(state: Tensor, before: Any) -> tuple[Tensor, Tensor]:
    """The output, (B, H), and the state, (1, B, H), of a new state shaped as the one before, or (B, H) if None."""
    return (state, state.unsqueeze(0)) if before is None else (state.squeeze(0), state)


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
    is zero before it and, in the reverse direction, before the last step of the previous episode.

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
