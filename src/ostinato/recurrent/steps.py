"""RNN, GRU and LSTM one step at a time: what depends on sizes only is prepared once."""

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
from ostinato.recurrent.cells import by_cells
from ostinato.recurrent.gradients import differentiable
from ostinato.recurrent.torch_layers import check_hidden, state_sizes
from ostinato.recurrent.weights import MaskedLayers, check_shapes, computes_list, unmasked_weights, weights_of
from ostinato.replay import Recorder, recording
from ostinato.states import State, distinct, hidden_of, states_of

_STEPS: Prepared[Step] = Prepared()  # keyed by input, weights and states


class StepLayers(MaskedLayers, Generic[State]):
    """Adds :meth:`step` and its fast paths."""

    _own_forward: Callable[..., tuple[Any, Any]]  # not a subclass's, which is no part of a step
    _frozen_kernels: Prepared[StepOnCPU] | None = None  # steps with packed weights, of layers with constant weights

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """One time step, in constant memory: ``y, state = layer.step(x, state)``.

        Args:
            x: the input at this step, (B, input_size) or (input_size,).
            state: the state so far, as ``forward`` takes it: (num_layers, B, hidden_size), without B if x has none, of
                an LSTM two of them; zero if absent.

        Returns:
            y, (B, hidden_size), the last layer's h, and the next state.

        Raises:
            TypeError: an input or state that is not a tensor of the parameters' dtype, or not h and c of an LSTM.
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
            if tensor.shape != shape:  # torch would speak of sequences
                raise ValueError(f"state must have shape {shape}; got {tuple(tensor.shape)}")
            check_like_weight("state", tensor, x)
        if x.is_cuda and x.dim() == 2 and states and not self.proj_size and not torch.is_autocast_enabled("cuda"):
            if torch.cuda.is_current_stream_capturing():  # elsewhere cuDNN's fewer launches win
                shapes = (len(x), self.hidden_size), states[0].shape
                run = by_cells(self.mode, self.num_layers, *shapes, dropout_of(self))
                output, new = run(x, states, weights_of(self))
                return output, hidden_of(new)
            torch.cuda.current_blas_handle()  # which a later capture needs for the cells, and cannot create
        time = 1 if self.batch_first and x.dim() == 2 else 0
        output, state = self._own_forward(x.unsqueeze(time), state)
        return output.squeeze(time), state

    step.__qualname__ = "step"  # in Python's errors, in place of a class that no user wrote

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

        `rank` is that of x without its time dimension, if any.  Host overhead dominates here, so look-ups and copies
        are avoided.
        """
        if torch.compiler.is_compiling() or not isinstance(x, Tensor) or self.proj_size or self.bidirectional:
            return None
        trained = torch.is_grad_enabled()
        if not x.is_cpu and (not x.is_cuda or (trained and self._buffers)):
            return None
        frozen = self._frozen_kernels
        if frozen is not None and not trained and (result := _step_frozen(frozen, x, state)) is not None:
            return result
        states, own = states_of(state), unmasked_weights(self)
        how = self.mode, self.num_layers, self._forced_path, frozen is None
        like = [x, *own, *distinct(states)], rank, type(state), len(states), *how
        run = None if self._buffers or dropout_of(self) else _STEPS.find(*like)
        if run is None:
            run = self._prepared_step(x, state, own, rank)
            if run is None:
                return None
            if not self._buffers:
                _STEPS.add(lambda: run, *like)
        result = run(x, states, own)
        if result is None:
            return None
        is_kept = frozen is not None and not trained and states and x.is_cpu
        if is_kept and all(tensor.is_contiguous() for tensor in (x, *states)):
            _freeze_step(self, x, states, x.numel() // self.input_size)
        output, new = result
        return output, hidden_of(new)

    def _forward_single_steps(self, x: Tensor, state: Any, time: int) -> tuple[Tensor, Any] | None:
        """A short sequence without gradients, one step after the other; None where that is slower or does not apply."""
        if not x.is_cpu or self._buffers or self._forced_path is not None or recording() is not None:
            return None
        if "parametrizations" in self._modules or computes_list(self):  # each step would, anew, and may get others
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

    def _prepared_step(self, x: Tensor, state: Any, own: list[Tensor], rank: int) -> Step | None:
        """A function that computes a step of tensors like these, or None where the fast path does not apply.

        The function itself returns None where torch's layers are faster.  Where there is no kernel for the layer and
        the batch, it is torch's cells with gradients, and on a CPU often without.  `own` is updated to the weights that
        the function takes.
        """
        check_hidden("state", state, self.mode == "LSTM")
        layers, hidden, masks, states = self.num_layers, self.hidden_size, self._buffers, states_of(state)
        tensors = [x, *own, *states]
        if not _are_plain(self, tensors, rank):
            return None
        batch = x.numel() // self.input_size
        shape = (layers, batch, hidden) if rank == 2 else (layers, hidden)
        for tensor in states:
            if tensor.shape != shape:
                return None
        check_shapes(self, own)
        trained = is_differentiated(tensors)
        is_contiguous = all(tensor.is_contiguous() for tensor in (x, *states))
        cells = by_cells(self.mode, layers, (*x.shape[:-1], hidden), shape)
        is_readable = (is_contiguous or x.is_cpu) and all(weight.is_contiguous() for weight in own)
        if not is_readable or (trained and masks):
            return cells if trained and not masks else None
        steps = _steps_of_layers(self, x, batch, own)
        if steps is None:
            if trained and not masks and x.is_cuda:
                return differentiable(self.mode, cells, cells, own, batch)
            # On a CPU torch's layers are its cells, called more slowly, but for the LSTMs that oneDNN runs.
            are_cells = x.is_cpu and self._frozen_kernels is None and (self.mode != "LSTM" or x.dtype == torch.float64)
            return cells if not masks and (trained or are_cells) else _left_to_torch
        if masks and x.is_cuda:
            own[:] = weights_of(self)
        run = step_of_layers(x.device, steps, x, shape, 2 if self.mode == "LSTM" else 1)
        if trained:
            saving = cast(StepOnCPU, run).with_saved if x.is_cpu else run
            run = differentiable(self.mode, saving, cells, own, batch)
        return run if is_contiguous else _of_contiguous(run)


def freeze(layer: StepLayers) -> None:
    """Have the layer assume constant weights in its :meth:`step`, used by one thread: a frozen stepper's own copy."""
    layer._frozen_kernels = Prepared()
    if layer.weight_hh_l0.is_cuda:  # a step reads all weights there, whose zeros need no mask
        for name, weight in layer._parameters.items():
            if weight is not None and mask_name(name) in layer._buffers:
                weight.data = masked(layer, name)
                del layer._buffers[mask_name(name)]


def _freeze_step(layer: StepLayers, x: Tensor, states: list[Tensor], batch: int) -> None:
    """Prepare :func:`_step_frozen` for an input and states like these."""
    weights, steps, frozen = weights_of(layer), [], cast(Prepared[StepOnCPU], layer._frozen_kernels)
    size = len(weights) // layer.num_layers
    for k in range(layer.num_layers):
        masks = (layer._buffers.get(f"mask_{which}_l{k}") for which in ("ih", "hh"))
        own = [weight.contiguous() for weight in weights[k * size : (k + 1) * size]]
        steps.append(frozen_step(layer.mode.lower(), batch, own, *masks))
    like = x.device, steps, x, tuple(states[0].shape), len(states)
    frozen.add(lambda: cast(StepOnCPU, step_of_layers(*like)), [x, *states])


def _are_plain(layer: StepLayers, tensors: list[Tensor], rank: int) -> bool:
    """Whether a step of the input, the first, and all else is a kernel's alone: nothing to convert or to refuse."""
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


def _steps_of_layers(layer: StepLayers, x: Tensor, batch: int, own: list[Tensor]) -> list[LayerStep] | None:
    """The kernel of each layer's step, None if one has none; `own` as in :meth:`_prepared_step`."""
    masks, cell, hidden, inputs = layer._buffers, layer.mode.lower(), layer.hidden_size, layer.input_size
    size, steps = len(own) // layer.num_layers, []
    for k in range(layer.num_layers):
        mask_ih = mask_hh = None
        if masks and x.is_cpu:  # a GPU's kernel reads all weights
            mask_ih, mask_hh = masks.get(f"mask_ih_l{k}"), masks.get(f"mask_hh_l{k}")
        step = step_of(x.device, cell, x.dtype, hidden, inputs, batch, mask_ih, mask_hh, layer._forced_path)
        if step is None and mask_ih is not None:  # too dense for a sparse product
            own[k * size] = masked(layer, f"weight_ih_l{k}", own[k * size])
            step = step_of(x.device, cell, x.dtype, hidden, inputs, batch, None, mask_hh, layer._forced_path)
        if step is None and mask_hh is not None:
            own[k * size + 1] = masked(layer, f"weight_hh_l{k}", own[k * size + 1])
            step = step_of(x.device, cell, x.dtype, hidden, inputs, batch, None, None, layer._forced_path)
        if step is None:
            return None
        steps.append(step)
        inputs = hidden
    return steps


def _step_frozen(frozen: Prepared[StepOnCPU], x: Tensor, state: Any) -> tuple[Tensor, Any] | None:
    states = states_of(state)
    run = frozen.find([x, *states])
    result = None if run is None else run(x, states, ())
    if result is None:
        return None
    output, new = result
    return output, hidden_of(new)


def recorded(layer: StepLayers, recorder: Recorder, function: Callable, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Record `function`, :meth:`step` or the forward of one step, as one call.

    It is this class's: that of a subclass, which has called it, would do what it adds a second time.
    """
    repeated = functools.partial(_repeat_frozen, layer, function, x, state)
    return recorder.call(function, layer, x, state, prepare=repeated)


def _repeat_frozen(
    layer: StepLayers, function: Callable, x: Tensor, state: Any, result: tuple[Tensor, Any]
) -> Callable[[], None] | None:
    """A function that repeats the step from and into the same memory, if weights are frozen, else None."""
    states, (output, after) = states_of(state), result
    new, run = states_of(after), layer._frozen_kernels and layer._frozen_kernels.find([x, *states])
    if not run:
        return None

    def repeat() -> None:
        if run.into(output, new, x, states, ()):
            return
        y, right = function(layer, x, state)  # the packed kernel refuses values that are not finite
        for own, other in zip((output, *new), (y, *states_of(right)), strict=True):
            own.copy_(other)

    return repeat


def _of_contiguous(run: Step) -> Step:
    """The step of copies of an input and states that are not contiguous."""

    def step(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]] | None:
        return run(x.contiguous(), [state.contiguous() for state in states], weights)

    return step


def _left_to_torch(*_: Any) -> None:
    """No step."""
