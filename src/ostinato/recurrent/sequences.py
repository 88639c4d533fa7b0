"""Whole sequences of RNN, GRU and LSTM by persistent kernels: which of these apply, and their calls."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from ostinato.cuda_graphs.calls import MOST_STEPS, RepeatedCalls, Run, worth_capturing
from ostinato.dropout import dropout_of
from ostinato.episodes import in_reverse_of_rows
from ostinato.kernels.derived import derived_from
from ostinato.kernels.matmul.precision import autocast_dtype, layers_allow_tf32, product_switches
from ostinato.kernels.operators.eager import Prepared, is_eager
from ostinato.kernels.operators.export import is_traced
from ostinato.kernels.persistent.arguments import Arguments
from ostinato.kernels.persistent.backends import WAVEFRONT_DEVICES, is_captured, layers_at_once, plan_layer
from ostinato.kernels.persistent.directions import recurrent_layers
from ostinato.kernels.persistent.modes import can_take, count_operations, is_vmapped
from ostinato.kernels.persistent.operators import recurrent_layer
from ostinato.kernels.persistent.plan import Call, Plan
from ostinato.kernels.persistent.stacks import stacked_layers
from ostinato.masks import mask_of
from ostinato.packed import offsets_of
from ostinato.recurrent.projections import project, without_projection
from ostinato.recurrent.rows import batch_and_steps, from_rows, has_several_lengths, to_rows
from ostinato.recurrent.torch_layers import state_sizes, takes_as_they_are
from ostinato.recurrent.weights import MaskedLayers, check_shapes, weights_of
from ostinato.states import distinct, hidden_of, of_one_layer, states_of


class KernelCall(NamedTuple):
    """How kernels compute a call that has been checked, or :data:`LEFT_TO_TORCH`."""

    batch: int
    steps: int
    autocast: torch.dtype | None
    training: bool  # whether gradients are needed
    at_once: int  # number of directions, or of stacked layers, that run at the same time
    prepared: dict[int, Callable] | None = None  # operators that have run, by first layer; None: use the dispatcher
    repeated: RepeatedCalls | None = None  # replays such calls, if they may gain by CUDA graphs


LEFT_TO_TORCH = KernelCall(batch=0, steps=0, autocast=None, training=False, at_once=0)
"""Stands for a call that torch's kernels compute, and whose arguments they take as they are."""


# Keyed by input, weights, states, resets, and the masks of recurrent weights.
_CALLS: Prepared[KernelCall | None] = Prepared()


def _without_dispatcher(call: KernelCall | None, tensors: list[Tensor | None]) -> KernelCall | None:
    """The call, to bypass PyTorch's dispatcher if kernels compute it and no tensor needs the dispatcher."""
    if call is None or call is LEFT_TO_TORCH or not is_eager(tensors):
        return call
    return call._replace(prepared={})


class SequenceLayers(MaskedLayers):
    """Adds plans, and the forward by persistent kernels where a plan has one."""

    def _plan_call(
        self,
        device: torch.device,
        batch: int,
        dtype: torch.dtype,
        training: bool,
        steps: int | None,
        resets: bool = False,
        packed: bool = False,
        weights: list[Tensor] | None = None,
    ) -> Plan:
        """The plan of a call with these weights, by default the parameters.

        Raises RuntimeError where the next call may get another plan.
        """
        # Masks cannot be packed in a capture: pruned layers run there as before it, when their masks were packed.
        captured = not self._buffers and is_captured(device)
        settings = device, self.mode.lower(), self.hidden_size, batch, dtype, training, steps, self._forced_path
        on_cpu = device.type == "cpu"
        threads = torch.get_num_threads() if on_cpu else 1
        compared = on_cpu or torch._C._get_cudnn_enabled()  # without cuDNN, torch launches several kernels a step
        call = Call(*settings, resets=resets, packed=packed, compared=compared, threads=threads, captured=captured)
        call = call._replace(at_once=_at_once(self, call), bidirectional=self.bidirectional, proj_size=self.proj_size)
        if not (packed or steps is None):
            call = call._replace(replayed=self._may_be_replayed(weights or [*self.parameters()], batch, steps))
        groups = {call.at_once, len(self._all_weights) % call.at_once} - {0}  # sizes; the last group may be smaller
        calls = [call._replace(at_once=size) for size in groups]
        plans = [plan_layer(mask, one) for mask in _masks_of(self) or [None] for one in calls]
        plan = max(plans, key=lambda plan: (not plan.has_kernel, plan.bytes_on_chip))
        return plan._replace(at_once=call.at_once) if plan.has_kernel else plan

    def _kernels_for(
        self, input: Any, states: list[Tensor], weights: list[Tensor], resets: Tensor | None
    ) -> KernelCall | None:
        """What computes the call, cached: kernels (a :class:`KernelCall`), or torch (:data:`LEFT_TO_TORCH` or None).

        None is for calls that torch's forward must check first: it raises the errors of invalid ones.
        """
        if weights[0].is_meta or torch.compiler.is_compiling():
            return self._find_kernels(input, states, weights, resets)
        if isinstance(input, PackedSequence):  # its lengths are not in any key
            return _without_dispatcher(
                self._find_kernels(input, states, weights, resets), [input.data, *weights, *states, resets]
            )
        tensors, device, dtype = [input, *weights, *distinct(states)], weights[0].device, weights[0].dtype
        if resets is not None:
            tensors.append(resets)
        autocast = autocast_dtype(device)
        sizes = self.input_size, self.hidden_size, self.num_layers, self.bidirectional, self.mode, self.batch_first
        of_layer = *sizes, dropout_of(self), self._forced_path
        # With the number of states, as an LSTM's two states could be taken for two biases.
        of_call = len(states), autocast, layers_allow_tf32(device, dtype), resets is None
        # The plan depends on these, too, and so do the kernels of the products in a CUDA graph.
        modes = is_captured(device), torch.get_num_threads(), torch._C._get_cudnn_enabled(), *product_switches()
        # An object for each mask, which is another one whenever the mask changes.
        masks = [mask if mask is None else derived_from(mask, "contents", object) for mask in _masks_of(self)]
        key = *of_layer, *of_call, *modes, *masks
        call = _CALLS.find(tensors, *key)
        if call is None and (call := self._find_kernels(input, states, weights, resets)) is not None:
            call = known = self._with_graphs(_without_dispatcher(call, tensors), weights)
            _CALLS.add(lambda: known, tensors, *key)
        return call

    def _with_graphs(self, call: KernelCall | None, weights: list[Tensor]) -> KernelCall | None:
        """The call with what replays it from CUDA graphs, if it may gain by them."""
        if call is None or call.prepared is None or not self._may_be_replayed(weights, call.batch, call.steps):
            return call
        return call._replace(repeated=RepeatedCalls(_launcher(self, call), draws=dropout_of(self) > 0))

    def _may_be_replayed(self, weights: list[Tensor], batch: int, steps: int) -> bool:
        """Whether such calls gain by CUDA graphs if they repeat; pruned layers have none."""
        if self._buffers or steps > MOST_STEPS or is_captured(weights[0].device):
            return False
        return worth_capturing(weights, batch * steps)

    def _find_kernels(
        self, input: Any, states: list[Tensor], weights: list[Tensor], resets: Tensor | None
    ) -> KernelCall | None:
        """As :meth:`_kernels_for`, uncached: checks the call and plans it."""
        if torch.jit.is_tracing():  # planning reads masks, which a trace would record
            return None
        if self.proj_size and is_traced():  # whose loops need no product of the weights
            return None
        size = batch_and_steps(input, states, self.batch_first)
        if size is None:
            return None
        (batch, steps), packed = size, isinstance(input, PackedSequence)
        if packed and torch.compiler.is_compiling():  # torch's forward would compare with a size known at run time only
            for state, width in zip(states, state_sizes(self), strict=False):
                self.check_hidden_size(state, (len(self._all_weights), batch, width))
        x = input.data if packed else input
        device = weights[0].device
        if device.type == "meta":
            return None
        autocast = autocast_dtype(device)
        computed = autocast or weights[0].dtype
        tensors = [*weights, x, *states]
        # In vmap, `requires_grad` does not tell what is differentiated around it.
        training = torch.is_grad_enabled() and (is_vmapped() or any(x.requires_grad for x in tensors))
        at_once, left_to_torch = 2 if self.bidirectional else 1, False
        if torch.compiler.is_compiling():  # planned at run time; if trained, so is how many layers run at once
            if training and not (self.bidirectional or packed or self.proj_size) and device.type in WAVEFRONT_DEVICES:
                at_once = self.num_layers
        elif batch * steps > 0:
            ragged = has_several_lengths(input, batch, steps)
            # Activation checkpointing calls without gradients first, which must drop what the call with them does.
            planned = training or dropout_of(self) > 0
            try:
                settings = int(batch), computed, planned, int(steps), resets is not None, ragged, weights
                plan = self._plan_call(device, *settings)
            except RuntimeError:
                return None
            if not can_take(tensors):
                return None
            left_to_torch = not (plan.has_kernel or is_vmapped())
            if not left_to_torch:
                count_operations()
            if plan.has_kernel:
                at_once = plan.at_once
        if not _suit_kernels(self, x, states, weights, batch, steps, packed, autocast is not None):
            return None
        check_shapes(self, weights)
        if left_to_torch:
            on_gpu = training and device.type != "cpu"  # where torch's kernels depend on the training mode, too
            converted = on_gpu or autocast or packed or x.dim() == 2 or self._buffers or resets is not None
            return None if converted or not takes_as_they_are(self, x, states, weights) else LEFT_TO_TORCH
        return KernelCall(batch, steps, computed if autocast else None, training, at_once)

    def _run_kernels(
        self, input: Any, states: list[Tensor], weights: list[Tensor], resets: Tensor | None, call: KernelCall
    ) -> tuple[Any, Any]:
        """``torch.nn``'s forward, by kernels that are launched, or replayed from CUDA graphs."""
        if call.repeated is not None:
            results = call.repeated.replay(self, input, states, weights, resets, call.training)
            if results is not None:
                return results[0], hidden_of(results[1:])
        return self._forward_kernels(input, states, weights, resets, call)

    def _forward_kernels(
        self, input: Any, states: list[Tensor], weights: list[Tensor], resets: Tensor | None, call: KernelCall
    ) -> tuple[Any, Any]:
        """``torch.nn``'s forward, by kernels that are launched."""
        rows, stack = _stack_of(self, input, states, weights, resets, call)
        layers = len(self._all_weights)
        last: list[tuple[Tensor, ...]] = []
        for first in range(0, layers, call.at_once):
            together = range(first, min(first + call.at_once, layers))
            if first and stack.drops:
                rows = F.dropout(rows, self.dropout)
            arguments = [_arguments_of(self, i, together, rows, stack) for i in together]
            if projections := stack.projections[first : first + call.at_once]:
                arguments = [*map(without_projection, arguments, projections)]
            results = _run_together(first, arguments, call, self.bidirectional)
            if projections:
                results = [*map(project, results, projections)]
            last += [(h_n, c_n) if self.mode == "LSTM" else (h_n,) for _, h_n, c_n, *_ in results]
            rows = torch.cat([output for output, *_ in results], 1) if self.bidirectional else results[-1][0]
        states = [of_one_layer(x[0]) if layers == 1 else torch.stack(x) for x in zip(*last, strict=True)]
        return from_rows(input, rows, states, self.batch_first)


def _launcher(layer: SequenceLayers, call: KernelCall) -> Run:
    """A function that launches such calls of any layer.

    It holds nothing of this layer, as autograd keeps the function for as long as the results, which hooks may keep with
    the layer.
    """
    bare = object.__new__(SequenceLayers)
    names = "mode", "hidden_size", "proj_size", "num_layers", "bias", "bidirectional", "batch_first", "_all_weights"
    attributes = {name: getattr(layer, name) for name in (*names, "_forced_path")}
    bare.__dict__.update(attributes, dropout=dropout_of(layer), training=True, _buffers={})

    def run(x: Tensor, states: list[Tensor], weights: list[Tensor], resets: Tensor | None) -> list[Tensor]:
        output, last = bare._forward_kernels(x, states, weights, resets, call)
        return [output, *states_of(last)]

    return run


def _at_once(layer: MaskedLayers, call: Call) -> int:
    """How many directions, or stacked layers, run at the same time; `call` is that of a single one."""
    if layer.bidirectional:
        return 2
    if call.packed or layer.proj_size:  # a layer's input is the projection of all steps of the one below
        return 1
    first = next(iter(_masks_of(layer)), None)
    return layers_at_once(first, call, layer.num_layers)


def _masks_of(layer: MaskedLayers) -> list[Tensor | None]:
    """The masks of the recurrent weights of all layers and directions, none if nothing is pruned."""
    return [mask_of(layer, names[1]) for names in layer._all_weights] if layer._buffers else []


def _suit_kernels(
    layer: MaskedLayers,
    x: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    batch: int,
    steps: int,
    packed: bool,
    autocast: bool,
) -> bool:
    """Whether kernels take these tensors, which autocast, if enabled, converts to its dtype.

    Torch's forward raises the errors of tensors that no layer takes.
    """
    dtype, device = weights[0].dtype, weights[0].device
    accepted = (torch.float32, torch.float16, torch.bfloat16) if autocast else (dtype,)
    unbatched = x.dim() == 2 and not packed
    lead = (len(layer._all_weights), *(() if unbatched else (batch,)))
    return (
        (x.numel() > 0 or (torch.compiler.is_compiling() and steps > 0))
        and (x.dim() == 2 or not packed)
        and x.shape[-1] == layer.input_size
        and len(states) in (0, 2 if layer.mode == "LSTM" else 1)
        and x.dtype in accepted
        and all(state.shape == (*lead, size) for state, size in zip(states, state_sizes(layer), strict=False))
        and all(state.dtype in accepted for state in states)
        and all(weight.dtype == dtype for weight in weights)
        and all(tensor.device == device for tensor in (x, *states, *weights))
        and (dtype == torch.float32 or not autocast)
    )


def _stack_of(
    layer: MaskedLayers,
    input: Any,
    states: list[Tensor],
    weights: list[Tensor],
    resets: Tensor | None,
    call: KernelCall,
) -> tuple[Tensor, "_Stack"]:
    """The input's rows, and the layers' other inputs, as the kernels take them."""
    batch, steps, autocast, training, *_ = call
    compiled = torch.compiler.is_compiling()
    rows, states, resets = to_rows(input, states, resets, layer.batch_first)
    if layer._buffers:
        weights = weights_of(layer, recurrent=training or not rows.is_cuda or compiled)
    offsets = None
    if isinstance(input, PackedSequence) and (compiled or has_several_lengths(input, batch, steps)):
        offsets = offsets_of(input.batch_sizes, rows.device)
    resets_of_directions: list[Tensor | None] = [resets, None]
    if resets is not None and layer.bidirectional:
        resets_of_directions[1] = in_reverse_of_rows(resets, offsets, batch)
    if autocast is not None:
        rows, *states = (x.to(autocast) for x in (rows, *states))
        weights = [x.to(autocast) for x in weights]
    elif training and not compiled:
        # Autograd saves a parameter as an object, whose `.data` may have been replaced by the time of the backward.
        weights = [x.view_as(x) for x in weights]
    single = len(layer._all_weights) == 1  # its states need no copy, nor do their gradients
    initial: list[Any] = [[x.squeeze(0)] if single else x.unbind(0) for x in states]
    drops = dropout_of(layer) > 0
    per_layer = len(layer._all_weights[0])
    projections = weights[per_layer - 1 :: per_layer] if layer.proj_size else []
    of_layers = initial, weights, projections, _masks_of(layer)
    return rows, _Stack(*of_layers, offsets, resets_of_directions, batch, training, drops)


def _arguments_of(layer: MaskedLayers, index: int, together: range, rows: Tensor, stack: "_Stack") -> Arguments:
    """The operator's arguments for one of the layers or directions that run together on these rows."""
    per_layer, is_first = len(layer._all_weights[0]), index == together.start
    h0, c0, *_ = *(state[index] for state in stack.initial), None, None
    weight_ih, weight_hh, *rest = stack.weights[index * per_layer : (index + 1) * per_layer]
    bias_ih, bias_hh = rest[:2] if layer.bias else (None, None)
    mask = stack.masks[index] if stack.masks else None
    x: Any = rows
    if not (is_first or layer.bidirectional):  # its input is yet to be computed: only the dropout is given
        x = F.dropout(rows.new_ones(len(rows), layer.hidden_size), layer.dropout) if stack.drops else None
    reverse = layer.bidirectional and not is_first
    resets = stack.resets[int(reverse)]
    tensors = x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask, stack.offsets, resets
    settings = layer.mode.lower(), reverse, stack.training, layer._forced_path, len(together)
    return Arguments(*tensors, stack.batch, *settings)


def _run_together(first: int, arguments: list[Arguments], call: KernelCall, bidirectional: bool) -> Any:
    """The operator's results for layers or directions that run together, given the number of the first one."""
    several = len(arguments) > 1
    run: Any = recurrent_layers if bidirectional else stacked_layers if several else recurrent_layer
    unpacked = arguments if several else arguments[0]
    if call.prepared is not None:
        if first not in call.prepared:
            call.prepared[first] = run.prepared(*unpacked)
        run = call.prepared[first]
    return run(*unpacked) if several else [run(*unpacked)]


class _Stack(NamedTuple):
    """The inputs of all layers and directions of a call, but for the rows."""

    initial: list[Any]  # h, and an LSTM's c: a tensor for each layer and direction
    weights: list[Tensor]  # of all layers and directions, in torch.nn's order
    projections: list[Tensor]  # those of them that project h; empty if none does
    masks: list[Tensor | None]  # of their recurrent weights; empty if nothing is pruned
    offsets: Tensor | None  # of packed sequences of several lengths
    resets: list[Tensor | None]  # of each direction
    batch: int
    training: bool
    drops: bool  # whether there is dropout between layers
