"""RNN, GRU and LSTM: torch.nn's layers, dense or pruned, run and trained by persistent kernels where these fit."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ostinato.episodes import check_resets
from ostinato.kernels.dispatch import Prepared, is_eager
from ostinato.kernels.export import refuse_script
from ostinato.kernels.persistent.cuda_step import BATCH as MOST_SEQUENCES
from ostinato.kernels.persistent.operators import (
    can_take,
    frozen_step,
    least_steps,
    plan_layer,
    recurrent_layer,
    step_of,
    step_of_layers,
)
from ostinato.kernels.persistent.plan import GATES, Call, Plan
from ostinato.kernels.persistent.reference import previous
from ostinato.kernels.streams import beside
from ostinato.layers import check_integers
from ostinato.masks import keep_pruned, mask_name, mask_of, masked
from ostinato.replay import recording
from ostinato.scan import check_batch_sizes
from ostinato.torch_layers import Hidden, TorchLayers, as_given, in_rows, states_of

_STEPS = Prepared()  # keyed by input, weights and states


class _Recurrent(TorchLayers):
    """Adds masks, resets and the choice of kernels to ``torch.nn``'s layers.

    Every call reads the current parameters: ``torch.nn``'s own list of them can be stale.
    """

    weight_hh_l0: Tensor
    __prepare_scriptable__ = refuse_script
    _frozen: Prepared | None = None  # steps with packed weights, of layers with constant weights
    _path: str | None = None  # the only kernel to consider on a GPU; None for the fastest

    def forward(
        self, input: Tensor | PackedSequence, hx: Hidden | None = None, *, resets: Tensor | None = None
    ) -> tuple[Any, Any]:
        """Run the whole sequence; see the class."""
        if resets is not None:
            check_resets(resets, input.data if isinstance(input, PackedSequence) else input)
            if isinstance(input, Tensor) and input.dim() > 1 and input.shape[1 if self._is_swapped(input) else 0] == 1:
                hx, resets = self._begun(hx, resets.flatten()), None
        if resets is None and isinstance(input, Tensor) and input.dim() > 1 and not torch.compiler.is_compiling():
            steps = input.shape[1 if self._is_swapped(input) else 0]
            if steps == 1 and (result := self._step(input, hx, input.dim() - 1)) is not None:
                return result
            if 0 < steps < least_steps(input.device.type):
                return self._forward_torch(input, hx, self._weights())
        states = states_of(hx)
        call = self._kernels_for(input, states, self._unmasked_weights(), resets)
        if call is not None:
            return self._forward_kernels(input, states, resets, *call)
        weights = self._weights()
        if resets is None or not resets.numel():
            return self._forward_torch(input, hx, weights)
        return self._forward_torch_by_episodes(input, hx, weights, resets)

    def step(self, x: Tensor, state: Hidden | None = None) -> tuple[Tensor, Any]:
        """One time step, in constant memory: ``y, state = layer.step(x, state)``.

        Args:
            x: the input at this step, (B, input_size) or (input_size,).
            state: the state so far, as ``forward`` takes it: (num_layers, B, hidden_size), without B if x has none, of
                an LSTM two of them; zero if absent.

        Returns:
            y, (B, hidden_size), the last layer's h, and the next state.

        Raises:
            ValueError: an input that does not fit, or a bidirectional layer, which needs the whole sequence.

        Example:
            >>> import torch, ostinato
            >>> layer, x = ostinato.LSTM(3, 5), torch.randn(7, 2, 3)
            >>> state = None
            >>> for x_t in x:
            ...     y, state = layer.step(x_t, state)
            >>> torch.allclose(y, layer(x)[0][-1], atol=1e-6)
            True
        """
        if (recorder := recording()) is not None:
            return recorder.call(self.step, x, state, prepare=functools.partial(self._repeat_frozen, x, state))
        result = self._step(x, state, x.dim() if isinstance(x, Tensor) else 0)
        if result is not None:
            return result
        if self.bidirectional:
            raise ValueError("step needs a layer that runs forward in time; this one is bidirectional")
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor; got {type(x).__name__}")
        if x.dim() not in (1, 2) or x.shape[-1] != self.input_size:
            raise ValueError(
                f"x must have shape (B, {self.input_size}) or ({self.input_size},), one step; got {tuple(x.shape)}"
            )
        states = states_of(state)
        captured = x.is_cuda and not torch.is_autocast_enabled("cuda") and torch.cuda.is_current_stream_capturing()
        if captured and x.dim() == 2 and states:
            return self._step_by_cells(x, states)
        time = 1 if self.batch_first and x.dim() == 2 else 0
        output, state = self.forward(x.unsqueeze(time), state)
        return output.squeeze(time), state

    def initial_state(self, batch_size: int) -> Any:
        """The state before the first step, all zeros, as ``forward`` and :meth:`step` take it."""
        shape = len(self._all_weights), batch_size, self.hidden_size
        zeros = self.weight_hh_l0.new_zeros(shape)
        return (zeros, torch.zeros_like(zeros)) if self.mode == "LSTM" else zeros

    def plan(
        self, batch: int, dtype: torch.dtype | None = None, training: bool = False, steps: int | None = None
    ) -> Plan:
        """How a call with ``batch`` sequences runs.

        Args:
            batch: number of sequences.
            dtype: the compute dtype; the parameters' if absent, though autocast overrides it.
            training: whether gradients will be computed.
            steps: of the longest sequence; many if absent.

        Returns:
            ``path``, "dense", "sparse" or "block" for a persistent kernel and "steps" for torch's; ``bytes_on_chip``
            of recurrent weights, of ``bytes_available``; ``blocks``, of threads; and the ``reason``.  If any layer or
            direction needs torch's kernels, all use them; otherwise this is the plan of the largest one.

        Raises:
            ValueError: a batch below 1, or steps.
            TypeError: a dtype that is none; a batch, or steps, that are no integer.

        Example:
            >>> import torch, ostinato
            >>> ostinato.GRU(8, 16).plan(batch=1, dtype=torch.float16, training=True).path  # on a CPU
            'steps'
        """
        sizes = {"batch": batch, "steps": 1 if steps is None else steps}
        check_integers(**sizes)
        for name, number in sizes.items():
            if number < 1:
                raise ValueError(f"{name} must be at least 1; got {number}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype; got {dtype!r}")
        weight = self.weight_hh_l0
        return self._plan(weight.device, batch, dtype or weight.dtype, training, steps)

    def _warn_unquantised(self, _: object) -> None:
        if self.mode in ("GRU", "LSTM"):  # torch.nn's RNN is left as it is too
            warnings.warn(
                f"torch.ao.quantization leaves ostinato's {type(self).__name__} as it is; to quantise its weights, "
                f"load them into a torch.nn.{self.mode} first, with strict=False",
                stacklevel=2,
            )

    # torch.ao.quantization sets a qconfig on every module, and skips those whose exact class it does not know.
    qconfig = property(None, _warn_unquantised)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Register the mask buffers of a pruned layer, which a new one lacks."""
        for name in self._flat_weights_names:
            if "weight" in name and prefix + mask_name(name) in state_dict and mask_of(self, name) is None:
                self.register_buffer(mask_name(name), torch.ones_like(getattr(self, name), dtype=torch.bool))
                keep_pruned(self, name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _unmasked_weights(self) -> list[Tensor]:
        """All parameters in torch.nn's order."""
        own: Any = self._parameters  # faster than getattr, which also finds parametrized ones
        return [own[name] if name in own else getattr(self, name) for name in self._flat_weights_names]

    def _check_shapes(self, weights: list[Tensor]) -> None:
        """Raise ValueError for a parameter that was replaced by a tensor of another shape."""
        directions = 2 if self.bidirectional else 1
        sizes = self.input_size, self.hidden_size, self.num_layers, directions, self.bias
        for name, weight, shape in zip(self._flat_weights_names, weights, _shapes_of(self.mode, *sizes), strict=True):
            if weight.shape != shape:
                raise ValueError(f"{name} must have shape {shape}; got {tuple(weight.shape)}")

    def _weights(self, recurrent: bool = True) -> list[Tensor]:
        """All parameters in torch.nn's order, with zeros where pruned; recurrent weights only if ``recurrent``.

        Raises ValueError for one of another shape.
        """
        weights = self._unmasked_weights()
        if not torch.compiler.is_compiling():
            self._check_shapes(weights)
        if self._buffers:
            for i, name in enumerate(self._flat_weights_names):
                if mask_name(name) in self._buffers and (recurrent or "_hh_" not in name):
                    weights[i] = masked(self, name)
        return weights

    def _plan(
        self,
        device: torch.device,
        batch: int,
        dtype: torch.dtype,
        training: bool,
        steps: int | None,
        resets: bool = False,
    ) -> Plan:
        directions = 2 if self.bidirectional else 1
        sizes = self.hidden_size, batch, dtype
        call = Call(device, self.mode.lower(), *sizes, training, steps, self._path, directions, resets)
        if not self._buffers:
            return plan_layer(None, call)
        plans = [plan_layer(mask_of(self, names[1]), call) for names in self._all_weights]
        return max(plans, key=lambda plan: (plan.path == "steps", plan.bytes_on_chip))

    def _kernels_for(
        self, input: Any, states: list[Tensor], weights: list[Tensor], resets: Tensor | None
    ) -> tuple[int, int, torch.dtype | None, bool] | None:
        """Batch size and steps of a call, autocast's dtype, and whether gradients are needed; None for torch's kernels.

        Torch also raises the errors of invalid calls.
        """
        packed = isinstance(input, PackedSequence)
        x = input.data if packed else input
        rank = x.dim() if isinstance(x, Tensor) else 0
        if packed:
            batch_sizes = input.batch_sizes
            if not torch.compiler.is_compiling():
                check_batch_sizes(batch_sizes, len(x))
            batch, steps = int(batch_sizes[0]), len(batch_sizes)
        elif rank == 3:
            steps, batch, _ = x.shape
            if self.batch_first:
                steps, batch = batch, steps
        elif rank == 2:
            steps, batch = x.shape[0], 1
        else:
            return None
        device, dtype = weights[0].device, weights[0].dtype
        if device.type == "meta":  # has no autocast
            return None
        autocast = torch.is_autocast_enabled(device.type)
        computed = torch.get_autocast_dtype(device.type) if autocast else dtype
        given = (torch.float32, torch.float16, torch.bfloat16) if autocast else (dtype,)
        tensors = [*weights, x, *states]
        training = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if not torch.compiler.is_compiling() and batch * steps > 0:  # compiled calls are planned at run time
            plan = self._plan(device, int(batch), computed, training, int(steps), resets is not None)
            if plan.path == "steps" or not can_take(tensors):
                return None
        shape = (len(self._all_weights), *(() if rank == 2 and not packed else (batch,)), self.hidden_size)
        fits = (
            x.numel() > 0
            and (rank == 2 or not packed)
            and x.shape[-1] == self.input_size
            and len(states) in (0, 2 if self.mode == "LSTM" else 1)
            and x.dtype in given
            and all(state.shape == shape and state.dtype in given for state in states)
            and all(x.dtype == dtype for x in weights)
            and all(x.device == device for x in tensors)
            and (dtype == torch.float32 or not autocast)
        )
        return (batch, steps, computed if autocast else None, training) if fits else None

    def _forward_kernels(
        self,
        input: Any,
        states: list[Tensor],
        resets: Tensor | None,
        batch: int,
        steps: int,
        autocast: torch.dtype | None,
        training: bool,
    ) -> tuple[Any, Any]:
        """As ``torch.nn``'s forward, one layer and direction after another."""
        rows, states, resets = in_rows(input, states, resets, self.batch_first)
        weights = self._weights(recurrent=training or not rows.is_cuda or torch.compiler.is_compiling())
        offsets = None
        if isinstance(input, PackedSequence) and batch * steps != len(rows):
            offsets = _offsets(input.batch_sizes, rows.device)
        begins: list[Tensor | None] = [resets, None]
        if resets is not None and self.bidirectional:  # in reverse an episode starts before the next one's first step
            begins[1] = previous(resets[:, None], None, offsets, batch, reverse=True)[:, 0]
        if autocast is not None:
            rows, *states = (x.to(autocast) for x in (rows, *states))
            weights = [x.to(autocast) for x in weights]

        cell, lstm, directions = self.mode.lower(), self.mode == "LSTM", 2 if self.bidirectional else 1
        size, initial, last = len(self._all_weights[0]), [state.unbind(0) for state in states], []
        for first in range(0, len(self._all_weights), directions):
            if first and self.training and self.dropout:
                rows = F.dropout(rows, self.dropout)
            arguments: list[tuple] = []
            for index in range(first, first + directions):
                h0, c0, *_ = *(state[index] for state in initial), None, None
                weight_ih, weight_hh, *biases = weights[index * size : (index + 1) * size]
                bias_ih, bias_hh = biases or (None, None)
                mask = mask_of(self, self._all_weights[index][1]) if self._buffers else None
                tensors = rows, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask, offsets, begins[index - first]
                arguments.append((*tensors, batch, cell, index > first, training, self._path, directions))
            both = directions == 2
            results = beside(recurrent_layer, *arguments) if both else (recurrent_layer(*arguments[0]),)
            last += [(h_n, c_n) if lstm else (h_n,) for _, h_n, c_n, *_ in results]
            rows = torch.cat([output for output, *_ in results], 1) if both else results[0][0]

        alone = len(last) == 1  # a view is enough
        states = [x[0].unsqueeze(0) if alone else torch.stack(x) for x in zip(*last, strict=True)]
        return as_given(input, rows, states, self.batch_first)

    def _step(self, x: Any, state: Any, rank: int) -> tuple[Tensor, Any] | None:
        """The fast path of :meth:`step`; None where it does not apply.

        `rank` is that of x without its time dimension, if any.  Host overhead dominates here, so look-ups and copies
        are avoided.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or not isinstance(x, Tensor):
            return None
        if not x.is_cpu and (not x.is_cuda or self._buffers or x.numel() > MOST_SEQUENCES * self.input_size):
            return None
        if self._frozen is not None and (result := self._step_frozen(x, state)) is not None:
            return result
        states, own = states_of(state), self._unmasked_weights()
        like = [x, *own, *states], rank, state is None, self.mode, self.num_layers, self._path
        changing = self.training and self.dropout > 0 and self.num_layers > 1
        run = None if self._buffers or changing else _STEPS.find(*like)
        if run is None:
            run = self._prepared_step(x, state, own, rank)
            if run is None:
                return None
            if not self._buffers:
                _STEPS.add(lambda: run, *like)
        result = run(x, states, own)
        if result is None:
            return None
        if self._frozen is not None and states and x.is_cpu:
            self._freeze_step(x, states, x.numel() // self.input_size)
        output, new = result
        return output, tuple(new) if self.mode == "LSTM" else new[0]

    def _prepared_step(self, x: Tensor, state: Any, own: list[Tensor], rank: int) -> Any:
        """A function that computes a step of tensors like these, or None where the fast path does not apply.

        `own` is updated to the weights that the function takes.
        """
        layers, hidden, dtype, masks = self.num_layers, self.hidden_size, x.dtype, self._buffers
        states, count = states_of(state), 2 if self.mode == "LSTM" else 1
        tensors = [x, *own, *states]
        if (
            (rank != 2 and rank != 1)
            or x.numel() == 0
            or x.shape[-1] != self.input_size
            or self.bidirectional
            or (self.training and self.dropout and layers > 1)
            or len(states) != (0 if state is None else count)
            or torch.is_autocast_enabled(x.device.type)
            or not is_eager(tensors)
        ):
            return None
        for tensor in tensors:
            if tensor.dtype != dtype or tensor.device != x.device or not tensor.is_contiguous():
                return None
        batch = x.numel() // self.input_size
        shape = (layers, batch, hidden) if rank == 2 else (layers, hidden)
        for tensor in states:
            if tensor.shape != shape:
                return None
        self._check_shapes(own)

        size, inputs, steps = len(own) // layers, self.input_size, []
        for layer in range(layers):
            mask_ih = mask_hh = None
            if masks:
                mask_ih, mask_hh = masks.get(f"mask_ih_l{layer}"), masks.get(f"mask_hh_l{layer}")
            step = step_of(x.device, self.mode.lower(), dtype, hidden, inputs, batch, mask_ih, mask_hh, self._path)
            if step is None and mask_ih is not None:  # too dense for a sparse product
                own[layer * size] = masked(self, f"weight_ih_l{layer}")
                step = step_of(x.device, self.mode.lower(), dtype, hidden, inputs, batch, None, mask_hh, self._path)
            if step is None:
                return None
            steps.append(step)
            inputs = hidden
        return step_of_layers(x.device, steps, x, shape, count)

    def freeze(self) -> None:
        """Assume constant weights in :meth:`step`, for use by one thread: for a frozen stepper's own copy."""
        self._frozen = Prepared()

    def _step_frozen(self, x: Tensor, state: Any) -> tuple[Tensor, Any] | None:
        frozen: Any = self._frozen
        states = states_of(state)
        run = frozen.find([x, *states])
        result = None if run is None else run(x, states, ())
        if result is None:
            return None
        output, new = result
        return output, tuple(new) if self.mode == "LSTM" else new[0]

    def _repeat_frozen(self, x: Tensor, state: Any, result: tuple[Tensor, Any]) -> Callable[[], None] | None:
        """A function that repeats the step from and into the same memory, if weights are frozen, else None."""
        states, (output, after) = states_of(state), result
        new, run = states_of(after), self._frozen and self._frozen.find([x, *states])
        if not run:
            return None

        def repeat() -> None:
            if run.into(output, new, x, states, ()):
                return
            y, right = self.step(x, state)  # the packed kernel refuses values that are not finite
            for own, other in zip((output, *new), (y, *states_of(right)), strict=True):
                own.copy_(other)

        return repeat

    def _freeze_step(self, x: Tensor, states: list[Tensor], batch: int) -> None:
        """Prepare :meth:`_step_frozen` for an input and states like these."""
        weights, steps, frozen = self._weights(), [], cast(Any, self._frozen)
        size = len(weights) // self.num_layers
        for layer in range(self.num_layers):
            masks = (self._buffers.get(f"mask_{which}_l{layer}") for which in ("ih", "hh"))
            own = [weight.contiguous() for weight in weights[layer * size : (layer + 1) * size]]
            steps.append(frozen_step(self.mode.lower(), batch, own, *masks))
        frozen.add(lambda: step_of_layers(x.device, steps, x, tuple(states[0].shape), len(states)), [x, *states])

    def _step_by_cells(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, Any]:
        """:meth:`step` of many sequences in CUDA graphs, by two GEMMs and a kernel per layer; elsewhere cuDNN's fewer
        launches win."""
        weights, last = self._weights(), []
        size = len(weights) // self.num_layers
        for layer, before in enumerate(zip(*(state.unbind(0) for state in states), strict=True)):
            if layer and self.training and self.dropout:
                x = F.dropout(x, self.dropout)
            own = weights[layer * size : (layer + 1) * size]
            cell: Any = getattr(torch, f"{self.mode.lower()}_cell")
            after = cell(x, before if self.mode == "LSTM" else before[0], *own)
            last.append(after if self.mode == "LSTM" else (after,))
            x = last[-1][0]
        new = [torch.stack(parts) for parts in zip(*last, strict=True)]
        return x, tuple(new) if self.mode == "LSTM" else new[0]

    def _is_swapped(self, x: Tensor) -> bool:
        return self.batch_first and x.dim() == 3

    def _begun(self, hx: Any, resets: Tensor) -> Any:
        """The state before a single step; resets do not affect the reverse direction, whose state is a later one."""
        if hx is None or not isinstance(hx, Tensor):
            return hx if hx is None else tuple(self._begun(state, resets) for state in hx)
        keep = ~resets[:, None] if hx.dim() == 3 else ~resets
        if hx.dim() == 3 and hx.shape[1] != len(resets):
            return hx  # torch raises
        if not self.bidirectional:
            return hx.where(keep, 0.0)
        return torch.stack([hx[0::2].where(keep, 0.0), hx[1::2]], 1).flatten(0, 1)


@functools.lru_cache(4096)
def _shapes_of(
    mode: str, input_size: int, hidden_size: int, layers: int, directions: int, bias: bool
) -> tuple[tuple[int, ...], ...]:
    rows = GATES[mode.lower()] * hidden_size
    widths = [input_size] * directions + [directions * hidden_size] * (directions * (layers - 1))
    return tuple(
        shape for width in widths for shape in ((rows, width), (rows, hidden_size), *([(rows,)] * 2 if bias else ()))
    )


def _offsets(batch_sizes: Tensor, device: torch.device) -> Tensor:
    """The first row of each step of a PackedSequence, then the number of rows: (T + 1,), int32."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return F.pad(batch_sizes.cumsum(0, dtype=torch.int32), (1, 0)).to(device)
    parts, first = [], 0  # a CUDA graph can capture constants, but not host memory
    for batch, steps in zip(
        *(x.tolist() for x in torch.unique_consecutive(batch_sizes, return_counts=True)), strict=True
    ):
        parts.append(torch.arange(first, first + batch * steps, batch, dtype=torch.int32, device=device))
        first += batch * steps
    return torch.cat([*parts, torch.full((1,), first, dtype=torch.int32, device=device)])


class RNN(_Recurrent, nn.RNN):
    r"""Stacked Elman layers, a drop-in for :class:`torch.nn.RNN` that can be pruned.

    .. math:: h_t = \phi(W_{ih} x_t + b_{ih} + W_{hh} h_{t-1} + b_{hh}), \quad \phi = \tanh \text{ or relu}

    Arguments, parameters, ``state_dict``, inputs, outputs, gradients and errors are :class:`torch.nn.RNN`'s.  On
    CPUs and NVIDIA GPUs layers run and train in kernels that keep the recurrent weights on chip or in cache
    for the whole sequence (Zhu et al. 2018, "Sparse Persistent RNNs", arXiv 1804.10223), where one fits; see
    :meth:`plan`.  The parameters are read at every call.  See :func:`ostinato.prune`, which adds a buffer
    with the mask of each pruned weight, ``mask_hh_l{k}`` and ``mask_ih_l{k}``; ``load_state_dict`` makes them as
    needed.

    Episodes that end inside a sequence: ``forward(input, hx=None, *, resets=None)`` takes a bool tensor of
    the input's shape without features, (T, B), (B, T) with ``batch_first``, (T,) unbatched, or (rows,) as the data of a
    PackedSequence.  Where it is True an episode begins with that step: the state before the step is zero, an LSTM's
    c too, and neither states nor gradients flow between it and the previous step, in either direction of a
    bidirectional layer.  True at the first step means that ``hx`` is ignored.

    Raises:
        TypeError: ``resets`` that are not a bool tensor.
        ValueError: ``resets`` of another shape or on another device than the input.

    Example:
        >>> import torch, ostinato
        >>> trained = torch.nn.RNN(8, 16, nonlinearity="relu")
        >>> rnn = ostinato.RNN(8, 16, nonlinearity="relu")
        >>> rnn.load_state_dict(trained.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(100, 4, 8)
        >>> torch.allclose(rnn(x)[0], trained(x)[0], atol=1e-6)
        True
        >>> resets = torch.arange(100).eq(60)[:, None].expand(100, 4)  # in all sequences, before step 60
        >>> torch.allclose(rnn(x, resets=resets)[0][60:], trained(x[60:])[0], atol=1e-6)
        True
    """


class GRU(_Recurrent, nn.GRU):
    r"""Stacked gated recurrent units, a drop-in for :class:`torch.nn.GRU` that can be pruned; see :class:`RNN`.

    .. math::
        r_t = \sigma(W_{ir} x_t + b_{ir} + W_{hr} h_{t-1} + b_{hr}), \quad
        z_t = \sigma(W_{iz} x_t + b_{iz} + W_{hz} h_{t-1} + b_{hz})

        n_t = \tanh(W_{in} x_t + b_{in} + r_t \odot (W_{hn} h_{t-1} + b_{hn})), \quad
        h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1}

    Example:
        >>> import torch, ostinato
        >>> gru = ostinato.GRU(8, 16, num_layers=2, batch_first=True)
        >>> output, h_n = gru(torch.randn(4, 100, 8))
        >>> output.shape, h_n.shape
        (torch.Size([4, 100, 16]), torch.Size([2, 4, 16]))
    """


class LSTM(_Recurrent, nn.LSTM):
    r"""Stacked LSTM layers, a drop-in for :class:`torch.nn.LSTM` that can be pruned; see :class:`RNN`.

    .. math::
        i_t, f_t, o_t = \sigma(W_i x_t + b_i + W_h h_{t-1} + b_h), \quad
        g_t = \tanh(W_{ig} x_t + b_{ig} + W_{hg} h_{t-1} + b_{hg})

        c_t = f_t \odot c_{t-1} + i_t \odot g_t, \quad h_t = o_t \odot \tanh(c_t)

    Raises:
        ValueError: ``proj_size`` above 0, which has no kernels here.

    Example:
        >>> import torch, ostinato
        >>> lstm = ostinato.LSTM(8, 16, bidirectional=True)
        >>> output, (h_n, c_n) = lstm(torch.randn(100, 4, 8))
        >>> output.shape, c_n.shape
        (torch.Size([100, 4, 32]), torch.Size([2, 4, 16]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.proj_size:
            raise ValueError(f"proj_size must be 0, projections are not supported; got {self.proj_size}")
