"""The gradients of one step of RNN, GRU or LSTM layers.

Recording torch's cells for autograd takes the host longer than their kernels take the device, so a step is a single
node.  On a GPU its backward recomputes the step and calls the kernels that autograd would call, from a CUDA graph once
steps repeat; on a CPU it continues from the gates that the step saves.  Derivatives of higher order are those of the
cells.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.cuda_graphs.calls import addresses_of, on_default_stream, worth_capturing
from ostinato.cuda_graphs.function import CapturedFunction
from ostinato.cuda_graphs.kept import KeptGraphs, Repeated
from ostinato.kernels.matmul.precision import product_switches
from ostinato.kernels.operators.autograd import Gradients, by_autograd, with_data, without_none
from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.persistent.backends import gradients_of_step
from ostinato.kernels.persistent.modes import without_autocast
from ostinato.recurrent.cells import Cells

SavingStep = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Any]
"""A :class:`~ostinato.kernels.persistent.interface.Step` that on a CPU also returns what gradients need."""

_MOST_BYTES = 48 << 20  # of weights: every replay copies their gradients


class _Step(NamedTuple):
    """What computes a step of layers of given sizes, and its gradients."""

    mode: str
    run: SavingStep
    cells: Cells
    graphs: "Repeated[_Graph] | None"  # of the gradients; None if not worth capturing


def differentiable(mode: str, step: SavingStep, cells: Cells, weights: Sequence[Tensor], batch: int) -> Cells:
    """Make a step differentiable, for weights like these and a batch of this size; `cells` compute the same step."""
    apply = super(torch.autograd.Function, _Differentiable).apply  # without its check for function transforms
    has_graphs = sum(weight.nbytes for weight in weights) <= _MOST_BYTES and worth_capturing(weights, batch)
    prepared = _Step(mode, step, cells, Repeated() if has_graphs else None)

    def run(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        output, *new = apply(prepared, len(states), x, *states, *weights)
        return output, new

    return run


class _Differentiable(torch.autograd.Function):
    """See :func:`differentiable`."""

    @staticmethod
    def forward(ctx: Any, step: _Step, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.count = step, count
        x, states, weights = tensors[0], tensors[1 : 1 + count], tensors[1 + count :]
        # Autograd saves a parameter as an object, whose `.data` may have been replaced by the time of the backward.
        ctx.weights, ctx.owner = [weight.detach() for weight in weights], weights[0]
        output, new, *saved = step.run(x, states, weights)
        ctx.save_for_backward(*tensors, *itertools.chain(*saved))
        ctx.set_materialize_grads(False)
        return output, *new

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        step, needed = ctx.step, ctx.needs_input_grad[2:]
        x, *others = ctx.saved_tensors  # read only once: checkpoints that are not reentrant refuse a second time
        states, others = others[: ctx.count], others[ctx.count :]
        weights, saved = others[: len(ctx.weights)], others[len(ctx.weights) :]
        with without_autocast(x.device.type):
            if torch.is_grad_enabled() or (x.is_cpu and not is_eager(grads)):
                weights = [*map(with_data, weights, ctx.weights)]
                grads_of_inputs = _by_cells(step.cells, [x, *states, *weights], ctx.count, grads, needed)
            elif x.is_cpu:
                mode = step.mode.lower()
                grads_of_inputs = gradients_of_step(mode, x, states, ctx.weights, saved, grads, needed)
            elif (graph := _graph_of(step, ctx.owner, x, states, ctx.weights, grads, needed)) is not None:
                grads_of_inputs = graph.replay(x, states, grads)
            else:
                grads_of_inputs = _by_kernels(step.mode, x, states, ctx.weights, grads, needed)
        return None, None, *grads_of_inputs


def _by_cells(cells: Cells, tensors: list[Tensor], states: int, grads: Gradients, needed: Sequence[bool]) -> Gradients:
    """The gradients of a step by torch's cells, of which `tensors` are the input, `states` states, and the weights."""

    def step(tensors: list[Tensor]) -> list[Tensor]:
        output, new = cells(tensors[0], tensors[1 : 1 + states], tensors[1 + states :])
        return [output, *new]

    return by_autograd(step, tensors, grads, needed)


class _Graph(KeptGraphs):
    """The gradients of a step in a CUDA graph, which reads the weights from their own memory."""

    def __init__(
        self,
        mode: str,
        x: Tensor,
        states: list[Tensor],
        weights: list[Tensor],
        grads: Gradients,
        needed: Sequence[bool],
    ) -> None:
        copies = _clone(x), [_clone(state) for state in states], [None if y is None else _clone(y) for y in grads]
        self._lock = threading.Lock()

        def differentiate() -> tuple[Gradients, Gradients]:
            x, states, grads = copies
            computed, inputs = _by_kernels(mode, x, states, weights, grads, needed), 1 + len(states)
            return computed[:inputs], computed[inputs:]

        self._gradients = CapturedFunction(differentiate, _inputs_of_graph(*copies), torch.cuda.graph_pool_handle())
        self.bytes = self._gradients.bytes

    def replay(self, x: Tensor, states: list[Tensor], grads: Gradients) -> Gradients:
        """The gradients of the input, states and weights, given those of the results."""
        with self._lock:
            self.count_replay()
            return self._gradients(_inputs_of_graph(x, states, grads))


def _clone(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _inputs_of_graph(x: Tensor, states: list[Tensor], grads: Gradients) -> list[Tensor]:
    return [x, *states, *without_none(grads)]


def _graph_of(
    step: _Step,
    owner: nn.Parameter,
    x: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    grads: Gradients,
    needed: Sequence[bool],
) -> _Graph | None:
    """The graph of a step's gradients, which is freed with its owner; None if there is none, or none yet."""
    if step.graphs is None or not is_eager(grads) or not on_default_stream(x):
        return None
    key = addresses_of(weights), tuple([grad is not None for grad in grads]), product_switches()
    bytes_needed = 2 * sum(weight.nbytes for weight in weights)  # the gradients, and their copies in one tensor
    capture = functools.partial(_Graph, step.mode, x, states, weights, grads, needed)
    return step.graphs.find_or_capture(key, capture, bytes_needed, x.device, owner)


def _by_kernels(
    mode: str, x: Tensor, states: list[Tensor], weights: list[Tensor], grads: Gradients, needed: Sequence[bool]
) -> Gradients:
    """The gradients of the tensors that need them, by the GPU kernels of torch's cells."""
    per_layer = 4 if weights[2:] and weights[2].dim() == 1 else 2  # with biases or without
    y, hidden = x.reshape(-1, x.shape[-1]), weights[1].shape[1]
    batch, count = len(y), len(grads) - 1
    before = [state.view(-1, batch, hidden) for state in states]
    before = before or [y.new_zeros(len(weights) // per_layer, batch, hidden)] * count
    grad_output, *grads_after = (None if grad is None else grad.reshape(-1, batch, hidden) for grad in grads)

    layers: list[_Layer] = []
    for first in range(0, len(weights), per_layer):
        of_layer = [state[len(layers)] for state in before]
        layers.append(_run_layer(mode, y, of_layer, weights[first : first + per_layer]))
        y = layers[-1].after[0]

    grads_weights: list[Tensor] = []
    grads_before: list[list[Tensor]] = [[] for _ in before]
    grad_y = None if grad_output is None else grad_output[0]
    for index, layer in reversed(list(enumerate(layers))):
        grad_h, *grad_c = (None if grad is None else grad[index] for grad in grads_after)
        grad_h = grad_y if grad_h is None else grad_h if grad_y is None else grad_h + grad_y
        grad_ih, grad_hh, grads_biases, grads_states = _differentiate_layer(mode, layer, grad_h, *grad_c)
        weight_ih, _, *biases = layer.weights
        grads_weights[:0] = grad_ih.t() @ layer.x, grad_hh.t() @ layer.before[0], *grads_biases[: len(biases)]
        for parts, part in zip(grads_before, grads_states, strict=True):
            parts.insert(0, part)
        grad_y = grad_ih @ weight_ih if index or needed[0] else None

    grad_x = None if grad_y is None else grad_y.view(x.shape)
    grads_given = [torch.stack(parts).view(state.shape) for parts, state in zip(grads_before, states, strict=False)]
    computed = grad_x, *grads_given, *grads_weights
    return [grad if need else None for grad, need in zip(computed, needed, strict=True)]


class _Layer(NamedTuple):
    """The step of one layer: its inputs and results."""

    x: Tensor
    before: list[Tensor]  # h, and an LSTM's c
    weights: list[Tensor]
    after: tuple[Tensor, ...]  # the same after the step, followed by what torch's kernels save


def _run_layer(mode: str, x: Tensor, before: list[Tensor], weights: list[Tensor]) -> _Layer:
    weight_ih, weight_hh, *biases = weights
    products = F.linear(x, weight_ih), F.linear(before[0], weight_hh)
    if mode == "LSTM":
        after = torch.ops.aten._thnn_fused_lstm_cell(*products, before[1], *biases)
    elif mode == "GRU":
        after = torch.ops.aten._thnn_fused_gru_cell(*products, before[0], *biases)
    else:
        total = sum(biases, products[0] + products[1])
        after = (total.tanh() if mode == "RNN_TANH" else total.relu(),)
    return _Layer(x, before, weights, after)


def _differentiate_layer(
    mode: str, layer: _Layer, grad_h: Tensor | None, grad_c: Tensor | None = None
) -> tuple[Tensor, Tensor, Sequence[Tensor], list[Tensor]]:
    """The gradients of both products, of the biases and of the states before, given that of a state after at least."""
    before, after, weight_hh, biased = layer.before, layer.after, layer.weights[1], len(layer.weights) > 2
    if mode == "LSTM":
        backward = torch.ops.aten._thnn_fused_lstm_cell_backward_impl
        gates, grad_before, bias = backward(grad_h, grad_c, before[1], after[1], after[2], biased)
        return gates, gates, (bias, bias), [gates @ weight_hh, grad_before]
    if mode == "GRU":
        backward = torch.ops.aten._thnn_fused_gru_cell_backward
        grad_ih, grad_hh, direct, *grads_biases = backward(grad_h, after[1], biased)
        return grad_ih, grad_hh, grads_biases, [torch.addmm(direct, grad_hh, weight_hh)]
    if mode == "RNN_TANH":
        gates = torch.ops.aten.tanh_backward(grad_h, after[0])
    else:
        gates = torch.ops.aten.threshold_backward(grad_h, after[0], 0)
    bias = gates.sum(0)
    return gates, gates, (bias, bias), [gates @ weight_hh]
