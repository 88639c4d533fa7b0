"""The base class of stacked recurrent layers: :class:`torch.nn.GRU`'s interface for any cell."""

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, Generic, Protocol, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ostinato.checks import (
    ONE_STEP,
    check_choice,
    check_dtype,
    check_flags,
    check_floating,
    check_input,
    check_integers,
    check_like_weight,
    check_numbers,
    check_packed,
    check_resets,
    check_tensor,
    check_unsharded,
)
from ostinato.cuda_graphs.kept import FreesGraphs
from ostinato.cuda_graphs.stacked import replayed
from ostinato.kernels.operators.export import node_of, proxy_among, refuse_script
from ostinato.kernels.scan import BACKENDS
from ostinato.packed import offsets_of
from ostinato.states import Hidden, State, each, stacked


class LayerCall(Protocol[State]):
    """A call of a layer, as type checkers see it: ``torch.nn.Module``'s takes and returns anything."""

    @overload
    def __call__(
        self, input: Tensor, hx: State | None = None, *, resets: Tensor | None = None
    ) -> tuple[Tensor, State]: ...
    @overload
    def __call__(
        self, input: PackedSequence, hx: State | None = None, *, resets: Tensor | None = None
    ) -> tuple[PackedSequence, State]: ...


class StackedLayers(FreesGraphs, Generic[State]):
    """Stacked layers in one direction or two, without the computation of a layer.

    A subclass defines the shapes of a layer's parameters in :meth:`_parameter_shapes` and its computation in
    :meth:`_run_layer`.  It sets attributes for its own arguments before it calls ``super().__init__``, which draws the
    parameters.  Methods have names that attributes of users' subclasses are unlikely to have.
    """

    states = 1  # tensors per state; several are a tuple, as torch.nn.LSTM's
    settings: tuple[str, ...] = (  # the attributes, besides parameters, on which the computation depends
        *("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "backend"),
    )
    weight_ih_l0: Tensor
    backend: str
    sequence_group: Callable[[], ProcessGroup] | None = None  # over whose processes sequences are sharded
    __call__: LayerCall[State]
    __prepare_scriptable__ = refuse_script

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
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers(1, input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        check_flags(bias=bias, batch_first=batch_first, bidirectional=bidirectional)
        check_choice("backend", backend, BACKENDS)
        check_dtype(dtype)
        check_numbers(dropout=dropout)
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, 0 to 1; got {dropout!r}")
        if dropout > 0 and num_layers == 1:
            caller = 2 + (type(self).__init__ is not StackedLayers.__init__)
            warnings.warn("dropout acts between layers, and num_layers is 1: nothing is dropped", stacklevel=caller)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, float(dropout), bidirectional
        self.backend = backend
        for name, shape in self._shapes_by_name().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    __init__.__qualname__ = "__init__"  # Python's errors then do not name a private class

    def _shapes_by_name(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters."""
        shapes = {}
        for layer in range(self.num_layers):
            width = self.input_size if layer == 0 else self.hidden_size * self.num_directions
            for suffix in self._parameter_suffixes(layer):
                for name, shape in self._parameter_shapes(width).items():
                    if self.bias or not name.startswith("bias"):
                        shapes[f"{name}_{suffix}"] = shape
        return shapes

    def _parameter_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters of a layer and direction whose input has `width` channels."""
        raise NotImplementedError

    def _run_layer(
        self,
        layer: int,
        x: Tensor,
        h0: Hidden | None,
        offsets: Tensor | None,
        resets: Tensor | None,
        batch_first: bool,
    ) -> tuple[Tensor, Hidden]:
        """One layer in all its directions: the output, laid out as `x`, and the last states, as `h0`.

        x is (B, T, width), or (T, B, width) unless ``batch_first``, or (rows, width) if ``offsets``, (T+1,), are given:
        step t of sequence b is then row ``offsets[t] + b``, as in ``PackedSequence``.  h0 is (directions, B, hidden
        size), never None with packed rows.  ``resets`` are laid out as `x`.
        """
        raise NotImplementedError

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _parameter_suffixes(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"][: self.num_directions]

    def reset_parameters(self) -> None:
        """Draw every weight and bias from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size)), as ``torch.nn.GRU`` does."""
        draw_parameters(self, self.hidden_size)

    def extra_repr(self) -> str:
        shown = [f"{self.input_size}, {self.hidden_size}"]
        for name, argument in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, argument.default)
            if argument.default not in (argument.empty, value):
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)

    def forward(
        self, input: Tensor | PackedSequence, hx: State | None = None, *, resets: Tensor | None = None
    ) -> tuple[Any, Any]:
        """Run the whole sequence; see the class."""
        if is_fx_symbolic_tracing() and (proxy := proxy_among(input, hx, resets)) is not None:
            return node_of(self, StackedLayers.forward, proxy.tracer, input, hx=hx, resets=resets)
        is_sharded, packed = self.sequence_group is not None, isinstance(input, PackedSequence)
        if is_sharded and (packed or (resets is not None and self.bidirectional)):
            raise ValueError("a sharded sequence cannot be a PackedSequence, nor have resets if bidirectional")
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, resets)
        as_step = resets is None and self._runs_as_step(input)
        if as_step and (result := self._run_cached_step(input.squeeze(int(self.batch_first)), hx)) is not None:
            return self._step_as_sequence(*result)
        layout = "(T, B, input_size), (B, T, input_size) if batch_first, or (T, input_size)"
        check_input(input, self.input_size, self._parameter_named("weight_ih_l0"), (2, 3), layout)
        if resets is not None:
            check_resets(resets, "input", input)
        batched = input.dim() == 3
        batch_dim = 0 if self.batch_first else 1
        x = input if batched else input.unsqueeze(batch_dim)
        self._check_given_state(hx, (x.shape[batch_dim],) if batched else ())
        if as_step:
            return self._step_as_sequence(*self.step(x.squeeze(int(self.batch_first)), hx))
        if hx is not None and not batched:
            hx = each(lambda state: state.unsqueeze(1), hx)
        if resets is not None and not batched:
            resets = resets.unsqueeze(batch_dim)
        result = replayed(self, x, hx, resets, or_launched=True)
        output, h_n = self._run_layers(x, hx, None, resets, self.batch_first) if result is None else result
        return (output, h_n) if batched else (output.squeeze(batch_dim), each(lambda state: state.squeeze(1), h_n))

    forward.__qualname__ = "forward"

    def _runs_as_step(self, input: Any) -> bool:
        """Whether the subclass runs this sequence, of one step, faster by :meth:`step`."""
        return False

    def _step_as_sequence(self, y: Tensor, h_n: Hidden) -> tuple[Tensor, Hidden]:
        """The results of a step as those of a sequence of one step, whose output and state never share memory."""
        return y.clone().unsqueeze(int(self.batch_first)), h_n

    def _forward_packed(
        self, packed: PackedSequence, hx: Hidden | None, resets: Tensor | None
    ) -> tuple[PackedSequence, Hidden]:
        data, batch_sizes, sorted_indices, unsorted_indices = packed
        layout = "(total steps, input_size) in a PackedSequence"
        check_input(data, self.input_size, self._parameter_named("weight_ih_l0"), (2,), layout)
        if resets is not None:
            check_resets(resets, "input.data", data)
        batch = check_packed(packed, hx)
        self._check_given_state(hx, (batch,))
        if hx is None:
            hx = self._zero_state_for(data, batch)
        elif sorted_indices is not None:
            hx = each(lambda state: state.index_select(1, sorted_indices), hx)
        output, h_n = self._run_layers(data, hx, offsets_of(batch_sizes, data.device), resets, self.batch_first)
        if unsorted_indices is not None:
            h_n = each(lambda state: state.index_select(1, unsorted_indices), h_n)
        return PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices), h_n

    def _run_layers(
        self, x: Tensor, hx: Hidden | None, offsets: Tensor | None, resets: Tensor | None, batch_first: bool
    ) -> tuple[Tensor, Hidden]:
        """All layers; see :meth:`_run_layer`."""
        return self._run_in_turn(
            lambda layer, x, h0: self._run_layer(layer, x, h0, offsets, resets, batch_first), x, hx
        )

    def _run_in_turn(self, run: Callable[[int, Tensor, Any], tuple[Tensor, Hidden]], x: Tensor, hx: Any) -> Any:
        """The output of all layers, with dropout between them, and their last states.

        ``run`` computes one layer, from its number, its input and its initial states.
        """
        states = []
        for layer in range(self.num_layers):
            if layer > 0 and self.dropout > 0 and self.training:
                x = F.dropout(x, self.dropout)
            x, h_last = run(layer, x, None if hx is None else self._state_of_layer(hx, layer))
            states.append(h_last)
        return x, stacked(states)

    def _parameter_named(self, name: str) -> Any:
        """The parameter, parametrized or not, or None for an absent bias; faster than ``getattr`` on a module."""
        parameter: Any = self._parameters.get(name)
        if parameter is None:
            parameter = getattr(self, name, None)
            if self.bias or not name.startswith("bias"):
                check_tensor(name, parameter)
        return parameter

    def _parameters_of(self, suffix: str, width: int) -> dict[str, Any]:
        """The parameters of a layer and direction whose input has `width` channels, by name; None for an absent bias.

        Raises ValueError for one that was replaced by a tensor of another shape, or is not on the input's device.
        """
        parameters, device = {}, self._parameter_named("weight_ih_l0").device
        for name, shape in self._parameter_shapes(width).items():
            full_name = f"{name}_{suffix}"
            parameters[name] = parameter = self._parameter_named(full_name)
            if parameter is None:
                continue
            if parameter.shape != shape:
                raise ValueError(f"{full_name} must have shape {shape}; got {tuple(parameter.shape)}")
            if parameter.device != device:
                raise ValueError(f"{full_name} must be on the device of weight_ih_l0, {device}; got {parameter.device}")
        return parameters

    def _state_of_layer(self, hx: Hidden, layer: int) -> Hidden:
        if self.num_layers == 1:
            return hx
        first = layer * self.num_directions
        return each(lambda state: state[first : first + self.num_directions], hx)

    def initial_state(self, batch_size: int) -> State:
        """The state before the first step, as ``forward`` and :meth:`step` take it: zeros, shaped as ``hx``.

        Raises:
            TypeError: a batch size that is no integer.
            ValueError: one below 0.

        Example:
            >>> import torch, ostinato
            >>> layer = ostinato.MinGRU(3, 5, num_layers=2)
            >>> y, state = layer.step(torch.randn(7, 3), layer.initial_state(7))
            >>> state.shape
            torch.Size([2, 7, 5])
        """
        check_integers(0, batch_size=batch_size)
        return self._zero_state_for(self.weight_ih_l0, batch_size)

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One time step, in constant memory: ``y, state = module.step(x, state)``.

        Args:
            x: the input at this step, (B, input_size) or (input_size,).
            state: the state before the step, (num_layers, B, hidden_size), without B if x has none; zero if absent.

        Returns:
            y, (B, hidden_size), the last layer's output, and the new state of every layer.  They may share memory:
            change neither in place.

        Raises:
            TypeError: an input or state that is not a tensor of the parameters' dtype.
            ValueError: shapes that do not match, a bidirectional module, which needs the whole sequence, or one that
                takes shards of sequences.

        Example:
            >>> import torch, ostinato
            >>> module, x = ostinato.MinGRU(3, 5), torch.randn(7, 3)
            >>> state = None
            >>> for x_t in x:
            ...     y, state = module.step(x_t, state)
            >>> torch.allclose(y, module(x)[0][-1], atol=1e-6)
            True
        """
        if self.bidirectional:
            raise ValueError("step needs a module that runs forward in time; this one is bidirectional")
        check_unsharded("step", self.sequence_group)
        result = None if torch.compiler.is_compiling() else self._run_cached_step(x, state)
        if result is not None:
            return result
        check_input(x, self.input_size, self._parameter_named("weight_ih_l0"), (1, 2), ONE_STEP, "x")
        batched = x.dim() == 2
        self._check_given_state(state, x.shape[:-1], "state")
        if not batched:
            x, state = x[None], None if state is None else each(lambda part: part.unsqueeze(1), state)
        y, new = self._run_step(x, state)
        return (y, new) if batched else (y[0], each(lambda part: part.squeeze(1), new))

    step.__qualname__ = "step"

    def _run_cached_step(self, x: Any, state: Any) -> tuple[Tensor, Any] | None:
        """The fast path of :meth:`step` for a call like one that was validated before, if the subclass caches these."""
        return None

    def _run_step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """All layers at one step."""
        time = 1 if self.batch_first else 0
        # With gradients a step comes before the backward of the previous one, which still uses the graph's memory.
        result = None if torch.is_grad_enabled() else replayed(self, x.unsqueeze(time), state, None)
        if result is None:
            return self._run_in_turn(self._step_of_layer, x, state)
        return result[0].squeeze(time), result[1]

    def _step_of_layer(self, layer: int, x: Tensor, h0: Any) -> tuple[Tensor, Hidden]:
        """The output (B, width) at one step, and the new state."""
        output, h_last = self._run_layer(layer, x[:, None], h0, None, None, True)
        return output[:, 0], h_last

    def _zero_state_for(self, x: Tensor, batch: int) -> Any:
        """The state before the first step of a batch of sequences like `x`."""
        zero = x.new_zeros(self.num_layers * self.num_directions, batch, self.hidden_size)
        return zero if self.states == 1 else (zero,) * self.states

    def _check_given_state(self, hx: Hidden | None, batch: tuple[int, ...], name: str = "hx") -> None:
        """Raise TypeError or ValueError unless `hx` is a state of a batch of sequences."""
        if hx is None:
            return
        if self.states == 1:
            self._check_state_tensor(name, hx, batch)
            return
        if not isinstance(hx, tuple) or len(hx) != self.states:
            raise TypeError(f"{name} must be a tuple of {self.states} tensors; got {type(hx).__name__}")
        for k, state in enumerate(hx):
            self._check_state_tensor(f"{name}[{k}]", state, batch)

    def _check_state_tensor(self, name: str, state: Any, batch: tuple[int, ...]) -> None:
        check_floating(name, state)
        expected = (self.num_layers * self.num_directions, *batch, self.hidden_size)
        if state.shape != expected:
            raise ValueError(f"{name} must have shape {expected}; got {tuple(state.shape)}")
        check_like_weight(name, state, self._parameter_named("weight_ih_l0"))


def draw_parameters(module: nn.Module, hidden_size: int) -> None:
    """Draw every parameter from U(-1/sqrt(hidden_size), 1/sqrt(hidden_size))."""
    bound = 1 / math.sqrt(hidden_size)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -bound, bound)
