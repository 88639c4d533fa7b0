"""The gradients of one step of RNN, GRU or LSTM layers.

Autograd's records of torch's cells take the host longer than the kernels take the device.  So a step is one node.  On a
GPU its backward computes the step again and calls the kernels that autograd would, from a CUDA graph once steps repeat;
on a CPU it goes on from the gates, which the step saves.  For derivatives of higher order it differentiates the cells.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ostinato.cuda_graphs.calls import addresses_of, are_worth, on_default_stream
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

_MOST_BYTES = 48 << 20  # of weights, whose gradients are copied at a replay


class _Step(NamedTuple):
    """A step of layers of these sizes."""

    mode: str
    run: SavingStep
    cells: Cells
    graphs: "Repeated[_Graph] | None"  # of its gradients, if it is worth any


def differentiable(mode: str, step: SavingStep, cells: Cells, weights: Sequence[Tensor], batch: int) -> Cells:
    """A step without gradients, with those of `cells`, which compute the same, of weights like these and a batch."""
    apply = super(torch.autograd.Function, _Differentiable).apply  # skips a look for transforms
    has_graphs = sum(weight.nbytes for weight in weights) <= _MOST_BYTES and are_worth(weights, batch)
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
        # Of a parameter autograd keeps the object, whose data may be other by the backward.
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
        x, *others = ctx.saved_tensors
        others, saved = others[: len(needed) - 1], others[len(needed) - 1 :]
        states, weights = others[: ctx.count], others[ctx.count :]
        with without_autocast(x.device.type):
            if torch.is_grad_enabled() or (x.is_cpu and not is_eager(grads)):
                weights = [*map(with_data, weights, ctx.weights)]
                found = _by_cells(step.cells, [x, *states, *weights], ctx.count, grads, needed)
            elif x.is_cpu:
                found = gradients_of_step(step.mode.lower(), x, states, ctx.weights, saved, grads, needed)
            elif (graph := _graph_of(step, ctx.owner, x, states, ctx.weights, grads, needed)) is not None:
                found = graph.replay(x, states, grads)
            else:
                found = _by_kernels(step.mode, x, states, ctx.weights, grads, needed)
        return None, None, *found


def _by_cells(cells: Cells, tensors: list[Tensor], states: int, grads: Gradients, needed: Sequence[bool]) -> Gradients:
    """:func:`by_autograd` of a step's input, so many states, and weights."""

    def step(own: list[Tensor]) -> list[Tensor]:
        output, new = cells(own[0], own[1 : 1 + states], own[1 + states :])
        return [output, *new]

    return by_autograd(step, tensors, grads, needed)


class _Graph(KeptGraphs):
    """The gradients of a step in a CUDA graph, which reads the weights where they are."""

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
            found, inputs = _by_kernels(mode, x, states, weights, grads, needed), 1 + len(states)
            return found[:inputs], found[inputs:]

        self._gradients = CapturedFunction(differentiate, _given(*copies), torch.cuda.graph_pool_handle())
        self.bytes = self._gradients.bytes

    def replay(self, x: Tensor, states: list[Tensor], grads: Gradients) -> Gradients:
        with self._lock:
            self.count_replay()
            return self._gradients(_given(x, states, grads))


def _clone(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


def _given(x: Tensor, states: list[Tensor], grads: Gradients) -> list[Tensor]:
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
    """The graph of a step's gradients, which goes with its owner; None if there is none, or not yet."""
    if step.graphs is None or not is_eager(grads) or not on_default_stream(x):
        return None
    key = addresses_of(weights), tuple([grad is not None for grad in grads]), product_switches()
    bytes_needed = 2 * sum(weight.nbytes for weight in weights)  # of their gradients, and these as one tensor
    capture = functools.partial(_Graph, step.mode, x, states, weights, grads, needed)
    return step.graphs.graphs_of(key, capture, bytes_needed, x.device, owner)


def _by_kernels(
    mode: str, x: Tensor, states: list[Tensor], weights: list[Tensor], grads: Gradients, needed: Sequence[bool]
) -> Gradients:
    """The gradients of the tensors that need them, by the kernels of torch's cells on a GPU."""
    size = 4 if weights[2:] and weights[2].dim() == 1 else 2  # of a layer, with biases or without
    y, hidden = x.reshape(-1, x.shape[-1]), weights[1].shape[1]
    batch, count = len(y), len(grads) - 1
    before = [state.view(-1, batch, hidden) for state in states]
    before = before or [y.new_zeros(len(weights) // size, batch, hidden)] * count
    of_output, *of_states = (None if grad is None else grad.reshape(-1, batch, hidden) for grad in grads)

    layers: list[_Layer] = []
    for first in range(0, len(weights), size):
        own = [state[len(layers)] for state in before]
        layers.append(_run_layer(mode, y, own, weights[first : first + size]))
        y = layers[-1].after[0]

    of_weights: list[Tensor] = []
    of_before: list[list[Tensor]] = [[] for _ in before]
    of_y = None if of_output is None else of_output[0]
    for index, layer in reversed(list(enumerate(layers))):
        of_h, *of_c = (None if grad is None else grad[index] for grad in of_states)
        of_h = of_y if of_h is None else of_h if of_y is None else of_h + of_y
        of_ih, of_hh, of_biases, of_own = _differentiate_layer(mode, layer, of_h, *of_c)
        weight_ih, _, *biases = layer.weights
        of_weights[:0] = of_ih.t() @ layer.x, of_hh.t() @ layer.before[0], *of_biases[: len(biases)]
        for parts, part in zip(of_before, of_own, strict=True):
            parts.insert(0, part)
        of_y = of_ih @ weight_ih if index or needed[0] else None

    of_x = None if of_y is None else of_y.view(x.shape)
    of_given = [torch.stack(parts).view(state.shape) for parts, state in zip(of_before, states, strict=False)]
    found = of_x, *of_given, *of_weights
    return [grad if need else None for grad, need in zip(found, needed, strict=True)]


class _Layer(NamedTuple):
    """The step of a layer."""

    x: Tensor
    before: list[Tensor]  # h, and an LSTM's c
    weights: list[Tensor]
    after: tuple[Tensor, ...]  # likewise, and what torch's kernels save


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
    mode: str, layer: _Layer, of_h: Tensor | None, of_c: Tensor | None = None
) -> tuple[Tensor, Tensor, Sequence[Tensor], list[Tensor]]:
    """The gradients of both products, of the biases and of the states before, of one of the states after at least."""
    before, after, weight_hh, biased = layer.before, layer.after, layer.weights[1], len(layer.weights) > 2
    if mode == "LSTM":
        backward = torch.ops.aten._thnn_fused_lstm_cell_backward_impl
        gates, of_before, bias = backward(of_h, of_c, before[1], after[1], after[2], biased)
        return gates, gates, (bias, bias), [gates @ weight_hh, of_before]
    if mode == "GRU":
        backward = torch.ops.aten._thnn_fused_gru_cell_backward
        of_ih, of_hh, direct, *of_biases = backward(of_h, after[1], biased)
        return of_ih, of_hh, of_biases, [torch.addmm(direct, of_hh, weight_hh)]
    if mode == "RNN_TANH":
        gates = torch.ops.aten.tanh_backward(of_h, after[0])
    else:
        gates = torch.ops.aten.threshold_backward(of_h, after[0], 0)
    bias = gates.sum(0)
    return gates, gates, (bias, bias), [gates @ weight_hh]
