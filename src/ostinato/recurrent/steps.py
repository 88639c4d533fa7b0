"""Single steps of RNN, GRU and LSTM: whatever depends on sizes only is prepared once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, cast

import torch
from torch import Tensor

from ostinato.checks import ONE_STEP, check_input, check_integers, check_like_weight
from ostinato.dropout import dropout_of
from ostinato.kernels.operators.eager import Prepared, is_differentiated, is_eager
from ostinato.kernels.persistent.backends import frozen_step, most_single_steps, step_of, step_of_layers
from ostinato.kernels.persistent.interface import LayerStep, Step, StepOnCPU
from ostinato.masks import mask_name, masked
from ostinato.recurrent.cells import step_by_cells
from ostinato.recurrent.gradients import differentiable
from ostinato.recurrent.torch_layers import check_hidden, state_sizes
from ostinato.recurrent.weights import MaskedLayers, check_shapes, computes_list, unmasked_weights, weights_of
from ostinato.replay import Recorder, recording
from ostinato.states import State, distinct, hidden_of, states_of

_STEPS: Prepared[Step] = Prepared()  # keyed by input, weights and states


class StepLayers(MaskedLayers, Generic[State]):
    """Adds :meth:`step` and its fast paths."""

    _own_forward: Callable[..., tuple[Any, Any]]  # this library's: a subclass's is no part of a step
    _frozen_kernels: Prepared[StepOnCPU] | None = None  # steps with packed weights, if weights are constant

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One time step, in constant memory: ``y, state = layer.step(x, state)``.

        Args:
            x: the input at this step, (B, input_size) or (input_size,).
            state: the state before the step, as ``forward`` takes it: (num_layers, B, hidden_size), without B if x has
                none, a pair of them for an LSTM; zero if absent.

        Returns:
            y, (B, hidden_size), the last layer's h, and the next state.

        Raises:
            TypeError: an input or state that is not a tensor of the parameters' dtype, or for an LSTM not h and c.
            ValueError: an input or a state that does not fit, or a bidirectional layer, which needs the whole sequence.

        Example:
            >>> import torch, ostinato
            >>> layer, x = ostinato.LSTM(3, 5), torch.randn(7, 2, 3)
            >>> state = None
            >>> for x_t in x:
            ...     y, state = layer.step(x_t, state)
            >>> torch.allclose(y, layer(x)[0][-1], atol=1e-6)
            True
        """
        if (recorder := recording()) is not None:  # torch.jit.script takes a sequence of one step instead
            return recorded(self, recorder, StepLayers.step, x, state)
        result = self._fast_step(x, state, x.dim() if isinstance(x, Tensor) else 0)
        if result is not None:
            return result
        if self.bidirectional:
            raise ValueError("step needs a layer that runs forward in time; this one is bidirectional")
        check_input(x, self.input_size, self.weight_ih_l0, (1, 2), ONE_STEP, "x")
        check_hidden("state", state, self.mode == "LSTM")
        states = states_of(state)
        for tensor, size in zip(states, state_sizes(self), strict=False):
            shape = self.num_layers, *x.shape[:-1], size
            if tensor.shape != shape:  # torch's own error would speak of sequences
                raise ValueError(f"state must have shape {shape}; got {tuple(tensor.shape)}")
            check_like_weight("state", tensor, x)
        if x.is_cuda and x.dim() == 2 and states and not self.proj_size and not torch.is_autocast_enabled("cuda"):
            if torch.cuda.is_current_stream_capturing():  # otherwise cuDNN is faster, with fewer launches
                shapes = (len(x), self.hidden_size), states[0].shape
                run = step_by_cells(self.mode, self.num_layers, *shapes, dropout_of(self))
                output, new = run(x, states, weights_of(self))
                return output, hidden_of(new)
            torch.cuda.current_blas_handle()  # creates it: a later capture needs it for the cells, and cannot
        time = 1 if self.batch_first and x.dim() == 2 else 0
        output, state = self._own_forward(x.unsqueeze(time), state)
        return output.squeeze(time), state

    step.__qualname__ = "step"  # Python's errors then do not name a private class

    def initial_state(self, batch_size: int) -> State:
        """The state before the first step, as ``forward`` and :meth:`step` take it: zeros, shaped as ``hx``.

        Raises:
            TypeError: a batch size that is no integer.
            ValueError: one below 0.

        Example:
            >>> import torch, ostinato
            >>> layer = ostinato.GRU(3, 5, num_layers=2)
            >>> y, state = layer.step(torch.randn(7, 3), layer.initial_state(7))
            >>> state.shape
            torch.Size([2, 7, 5])
        """
        check_integers(0, batch_size=batch_size)
        shape = len(self._all_weights), batch_size
        states = [self.weight_hh_l0.new_zeros(*shape, size) for size in state_sizes(self)]
        return hidden_of(states if self.mode == "LSTM" else states[:1])

    def _fast_step(self, x: Any, state: Any, rank: int) -> tuple[Tensor, Any] | None:
        """The fast path of :meth:`step`; None where it does not apply.

        `rank` is the number of dimensions of x without time, if it has any.  Host overhead dominates here, so look-ups
        and copies are avoided.
        """
        if torch.compiler.is_compiling() or not isinstance(x, Tensor) or self.proj_size or self.bidirectional:
            return None
        trained = torch.is_grad_enabled()
        if not x.is_cpu and (not x.is_cuda or (trained and self._buffers)):
            return None
        frozen = self._frozen_kernels
        if frozen is not None and not trained and (result := _step_frozen(frozen, x, state)) is not None:
            return result
        states, weights = states_of(state), unmasked_weights(self)
        settings = self.mode, self.num_layers, self._forced_path, frozen is None
        key = [x, *weights, *distinct(states)], rank, type(state), len(states), *settings
        run = None if self._buffers or dropout_of(self) else _STEPS.find(*key)
        if run is None:
            run = self._prepared_step(x, state, weights, rank)
            if run is None:
                return None
            if not self._buffers:
                _STEPS.add(lambda: run, *key)
        result = run(x, states, weights)
        if result is None:
            return None
        can_freeze = frozen is not None and not trained and states and x.is_cpu
        if can_freeze and all(tensor.is_contiguous() for tensor in (x, *states)):
            _freeze_step(self, x, states, x.numel() // self.input_size)
        output, new = result
        return output, hidden_of(new)

    def _forward_single_steps(self, x: Tensor, state: Any, time: int) -> tuple[Tensor, Any] | None:
        """A short sequence without gradients, step by step; None where that is slower or does not apply."""
        if not x.is_cpu or self._buffers or self._forced_path is not None or recording() is not None:
            return None
        if "parametrizations" in self._modules or computes_list(self):  # every step would compute the weights again
            return None
        batch = x.shape[1 - time] if x.dim() == 3 else 1
        if x.shape[time] > most_single_steps("cpu", self.mode.lower(), self.hidden_size, batch, x.dtype):
            return None
        if torch.jit.is_tracing() or is_differentiated([x, *unmasked_weights(self), *states_of(state)]):
            return None
        outputs = []
        for x_t in x.unbind(time):
            result = self._fast_step(x_t, state, x_t.dim())
            if result is None:
                return None
            output, state = result
            outputs.append(output)
        return (torch.stack(outputs).transpose(0, time), state) if outputs else None

    def _prepared_step(self, x: Tensor, state: Any, weights: list[Tensor], rank: int) -> Step | None:
        """A function that computes a step of tensors like these, or None where the fast path does not apply.

        The function itself returns None where torch's layers are faster.  Where there is no kernel for the layer and
        the batch, it calls torch's cells with gradients, and on a CPU often also without.  `weights` is updated in
        place to what the function takes.
        """
        check_hidden("state", state, self.mode == "LSTM")
        layers, hidden, masks, states = self.num_layers, self.hidden_size, self._buffers, states_of(state)
        tensors = [x, *weights, *states]
        if not _are_plain(self, tensors, rank):
            return None
        batch = x.numel() // self.input_size
        shape = (layers, batch, hidden) if rank == 2 else (layers, hidden)
        for tensor in states:
            if tensor.shape != shape:
                return None
        check_shapes(self, weights)
        trained = is_differentiated(tensors)
        is_contiguous = all(tensor.is_contiguous() for tensor in (x, *states))
        cells = step_by_cells(self.mode, layers, (*x.shape[:-1], hidden), shape)
        is_readable = (is_contiguous or x.is_cpu) and all(weight.is_contiguous() for weight in weights)
        if not is_readable or (trained and masks):
            return cells if trained and not masks else None
        steps = _steps_of_layers(self, x, batch, weights)
        if steps is None:
            if trained and not masks and x.is_cuda:
                return differentiable(self.mode, cells, cells, weights, batch)
            # On a CPU torch's layers call its cells with more overhead, except for the LSTMs that oneDNN runs.
            are_cells = x.is_cpu and self._frozen_kernels is None and (self.mode != "LSTM" or x.dtype == torch.float64)
            return cells if not masks and (trained or are_cells) else _left_to_torch
        if masks and x.is_cuda:
            weights[:] = weights_of(self)
        run = step_of_layers(x.device, steps, x, shape, 2 if self.mode == "LSTM" else 1)
        if trained:
            saving = cast(StepOnCPU, run).with_saved if x.is_cpu else run
            run = differentiable(self.mode, saving, cells, weights, batch)
        return run if is_contiguous else _of_contiguous(run)


def freeze(layer: StepLayers) -> None:
    """Make the layer, a frozen stepper's own copy, assume in :meth:`step` constant weights and a single thread."""
    layer._frozen_kernels = Prepared()
    if layer.weight_hh_l0.is_cuda:  # a step reads all weights there, so zeros need no mask
        for name, weight in layer._parameters.items():
            if weight is not None and mask_name(name) in layer._buffers:
                weight.data = masked(layer, name)
                del layer._buffers[mask_name(name)]


def _freeze_step(layer: StepLayers, x: Tensor, states: list[Tensor], batch: int) -> None:
    """Prepare :func:`_step_frozen` for an input and states like these, with packed weights."""
    weights, steps, frozen = weights_of(layer), [], cast(Prepared[StepOnCPU], layer._frozen_kernels)
    per_layer = len(weights) // layer.num_layers
    for k in range(layer.num_layers):
        masks = (layer._buffers.get(f"mask_{which}_l{k}") for which in ("ih", "hh"))
        of_layer = [weight.contiguous() for weight in weights[k * per_layer : (k + 1) * per_layer]]
        steps.append(frozen_step(layer.mode.lower(), batch, of_layer, *masks))
    prepared = x.device, steps, x, tuple(states[0].shape), len(states)
    frozen.add(lambda: cast(StepOnCPU, step_of_layers(*prepared)), [x, *states])


def _are_plain(layer: StepLayers, tensors: list[Tensor], rank: int) -> bool:
    """Whether kernels can take the tensors of a step, the input first: nothing is to be converted or refused."""
    x, dtype, device = tensors[0], tensors[0].dtype, tensors[0].device
    if (
        (rank != 2 and rank != 1)
        or x.numel() == 0
        or x.shape[-1] != layer.input_size
        or dropout_of(layer)
        or torch.is_autocast_enabled(x.device.type)
        or not is_eager(tensors)
    ):
        return False
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.device != device:
            return False
    return True


def _steps_of_layers(layer: StepLayers, x: Tensor, batch: int, weights: list[Tensor]) -> list[LayerStep] | None:
    """The kernel of each layer's step, or None if any layer has none; `weights` as in :meth:`_prepared_step`."""
    masks, cell, hidden, inputs = layer._buffers, layer.mode.lower(), layer.hidden_size, layer.input_size
    per_layer, steps = len(weights) // layer.num_layers, []
    for k in range(layer.num_layers):
        mask_ih = mask_hh = None
        if masks and x.is_cpu:  # a GPU's kernel reads all weights
            mask_ih, mask_hh = masks.get(f"mask_ih_l{k}"), masks.get(f"mask_hh_l{k}")
        step = step_of(x.device, cell, x.dtype, hidden, inputs, batch, mask_ih, mask_hh, layer._forced_path)
        if step is None and mask_ih is not None:  # too dense for a sparse product
            weights[k * per_layer] = masked(layer, f"weight_ih_l{k}", weights[k * per_layer])
            step = step_of(x.device, cell, x.dtype, hidden, inputs, batch, None, mask_hh, layer._forced_path)
        if step is None and mask_hh is not None:
            weights[k * per_layer + 1] = masked(layer, f"weight_hh_l{k}", weights[k * per_layer + 1])
            step = step_of(x.device, cell, x.dtype, hidden, inputs, batch, None, None, layer._forced_path)
        if step is None:
            return None
        steps.append(step)
        inputs = hidden
    return steps


def _step_frozen(frozen: Prepared[StepOnCPU], x: Tensor, state: Any) -> tuple[Tensor, Any] | None:
    """A step with packed weights; None if none is prepared for such tensors, or torch's layers must compute it."""
    states = states_of(state)
    run = frozen.find([x, *states])
    result = None if run is None else run(x, states, ())
    if result is None:
        return None
    output, new = result
    return output, hidden_of(new)


def recorded(layer: StepLayers, recorder: Recorder, function: Callable, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Record `function`, :meth:`step` or the forward of one step, as one call.

    `function` is this library's: a subclass's method that has called it would do its own part a second time.
    """
    repeated = functools.partial(_repeat_frozen, layer, function, x, state)
    return recorder.call(function, layer, x, state, prepare=repeated)


def _repeat_frozen(
    layer: StepLayers, function: Callable, x: Tensor, state: Any, result: tuple[Tensor, Any]
) -> Callable[[], None] | None:
    """A function that repeats the step in the same memory if the weights are frozen, else None."""
    states, (output, after) = states_of(state), result
    new, run = states_of(after), layer._frozen_kernels and layer._frozen_kernels.find([x, *states])
    if not run:
        return None

    def repeat() -> None:
        if run.into(output, new, x, states, ()):
            return
        y, computed = function(layer, x, state)  # the packed kernel refuses values that are not finite
        for target, source in zip((output, *new), (y, *states_of(computed)), strict=True):
            target.copy_(source)

    return repeat


def _of_contiguous(run: Step) -> Step:
    """The step, of contiguous copies of its input and states."""

    def step(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]] | None:
        return run(x.contiguous(), [state.contiguous() for state in states], weights)

    return step


def _left_to_torch(*_: Any) -> None:
    """A step that torch's layers must compute."""
