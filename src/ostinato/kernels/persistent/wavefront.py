"""Stacked recurrent layers in a wavefront on a GPU: each layer is one chunk of steps behind the one below it.

So they run at the same time (Appleyard et al. 2016, "Optimizing Performance of Recurrent Neural Networks on GPUs",
arXiv 1604.01946).  Chunks are slices of the rows of whole tensors.  The gradients of the weights, which have no order
in time, are computed from whole tensors afterwards.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda.streams import in_wavefront
from ostinato.kernels.matmul.gemm import gradient_of_input
from ostinato.kernels.operators.dispatch import or_empty
from ostinato.kernels.persistent.arguments import INPUTS, NOTHING, Arguments, Layer, Saved
from ostinato.kernels.persistent.backends import as_gpu, is_captured
from ostinato.kernels.persistent.backward import gradients, input_gates, saved_by
from ostinato.kernels.persistent.executor import Executor, call_of, executor_of
from ostinato.kernels.persistent.modes import without_autocast
from ostinato.kernels.persistent.plan import GATES
from ostinato.kernels.persistent.results import empty_results

UNIT = 8  # chunks begin at multiples of this many steps, so that their rows are aligned even in 16 bits


class Wavefront(NamedTuple):
    """The executors of stacked layers; called with the arguments of each layer, it runs them in a wavefront."""

    executors: tuple[Executor, ...]
    chunks: int

    def __call__(self, *calls: tuple) -> list[tuple]:
        layers, device = layers_of(calls), calls[0][0].device
        sizes, results = self._sizes(layers[0]), [list(empty_results(*layer)) for layer in layers]
        outputs, cs, gates = ([result[i].split(sizes) for result in results] for i in (0, 3, 4))
        inputs, factors = layers[0].x.split(sizes), [_split(call[0], sizes) for call in calls]
        sequences = [layer.sequences.parts(sizes) for layer in layers]
        kernel_layers = [
            each.layer_of(layer)._replace(packed_weights={}) for each, layer in zip(self.executors, layers, strict=True)
        ]
        states: list[Any] = [(layer.h0, layer.c0) for layer in layers]  # after the chunks that have been launched

        def run(i: int, chunk: int) -> Sequence[Tensor | None]:
            executor, layer, kept = self.executors[i], layers[i], gates[i][chunk]
            x = times(outputs[i - 1][chunk], factors[i][chunk]) if i else inputs[chunk]
            projected = executor.project(x, layer.weight_ih, layer.bias_ih, kept if kept.numel() else None)
            h0, c0 = states[i]
            part = kernel_layers[i]._replace(h0=h0, c0=c0, sequences=sequences[i][chunk])
            into = outputs[i][chunk], cs[i][chunk]
            _, *states[i], _ = as_gpu(executor.kernels).forward(part, projected, executor.plan, layer.training, into)
            return states[i]

        with without_autocast(device.type):  # the tensors have been converted already
            in_wavefront(device, len(layers), self.chunks, run)
        for result, (h_n, c_n) in zip(results, states, strict=True):
            result[1:3] = h_n, or_empty(c_n, h_n)
        return [tuple(result) for result in results]

    def backward(self, calls: Sequence[tuple]) -> list[tuple]:
        """The gradients of all inputs, given the arguments of each layer's ``recurrent_layer_backward``."""
        kept, grads, needed = zip(*((x[INPUTS : INPUTS + 3], x[INPUTS + 3 : -1], x[-1]) for x in calls), strict=True)
        layers, device = layers_of(calls, [h for h, *_ in kept]), calls[0][0].device
        sizes, passed = self._sizes(layers[0]), layers_passed(grads, needed)
        saved = [_parts(saved_by(*each), sizes) for each in zip(self.executors, layers, kept, strict=True)]
        loop_grads = [_empty_gradients(layer, self.chunks) for layer in layers]
        grad_gates = [all_gates.split(sizes) for all_gates, _ in loop_grads]
        grad_outputs = [[*_split(grad_output, sizes)] for grad_output, *_ in grads]
        factors = [_split(call[0], sizes) for call in calls]
        sequences = [layer.sequences.parts(sizes) for layer in layers]
        kernel_layers = [layer.layer._replace(packed_weights={}) for layer in layers]
        grad_states: list[Any] = [of_layer for _, *of_layer in grads]  # before the chunks that have been launched

        def run(depth: int, link: int) -> Sequence[Tensor | None]:
            i, chunk = len(layers) - 1 - depth, self.chunks - 1 - link
            if i not in passed:
                return ()
            (kernels, plan, tf32, _), layer = self.executors[i], layers[i]
            part = kernel_layers[i]._replace(sequences=sequences[i][chunk])
            if chunk:
                part = _continued(part, saved[i][chunk - 1])
            upstream = grad_outputs[i][chunk], *grad_states[i]
            into = grad_gates[i][chunk], loop_grads[i][1][chunk]
            _, *grad_states[i], _ = as_gpu(kernels).backward(part, saved[i][chunk], upstream, plan, into)
            if i == passed[0]:
                return grad_states[i]
            grad_x = gradient_of_input(input_gates(into[0], layer.cell), layer.weight_ih, tf32)
            grad_outputs[i - 1][chunk] = sum_of(grad_outputs[i - 1][chunk], times(grad_x, factors[i][chunk]))
            return grad_outputs[i - 1][chunk], *grad_states[i]

        results: list[tuple] = [(None,) * INPUTS] * len(layers)
        with without_autocast(device.type):
            in_wavefront(device, len(layers), self.chunks, run)
            for i in passed:
                (all_gates, totals), (h, *_) = loop_grads[i], kept[i]
                of_layer = all_gates, *grad_states[i], totals.flatten(0, 1)
                results[i] = *gradients(self.executors[i], layers[i], h, of_layer, needed[i]), *NOTHING
        return results

    def _sizes(self, layer: Arguments) -> list[int]:
        """The number of rows of each chunk."""
        rows, unit = len(layer.x), UNIT * layer.batch
        units = -(-rows // unit)
        bounds = [min(units * i // self.chunks * unit, rows) for i in range(self.chunks + 1)]
        return [end - begin for begin, end in pairwise(bounds)]


def layers_of(calls: Sequence[tuple], outputs: Sequence[Tensor] = ()) -> list[Arguments]:
    """The arguments of each layer, with x computed from the `outputs` below, or else a stand-in with as many rows."""
    layers = [Arguments(*calls[0][:INPUTS])]
    for i, (factor, *others) in enumerate(calls[1:]):
        x = times(outputs[i], factor) if outputs else layers[0].x
        layers.append(Arguments(x, *others[: INPUTS - 1]))
    return layers


def _split(x: Tensor | None, sizes: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if x is None else x.split(sizes)


def _parts(saved: Saved, sizes: list[int]) -> list[Saved]:
    """The saved tensors of each chunk."""
    return [Saved(*parts) for parts in zip(*(_split(x, sizes) for x in saved), strict=True)]


def _continued(layer: Layer, before: Saved) -> Layer:
    """The layer, continued from the last states of the chunk before, rounded as the forward passed them on."""
    last = slice(-layer.sequences.batch, None)
    return layer._replace(h0=before.h[last], c0=None if before.c is None else before.c[last].to(before.h.dtype))


def _empty_gradients(layer: Arguments, chunks: int) -> tuple[Tensor, Tensor]:
    """Memory for what the kernels' backward writes: the gradients of the gates, and their sums over each chunk."""
    width = layer.weight_hh.shape[1] * (1 if GATES[layer.cell] == 1 else 4)
    grad_gates = layer.x.new_empty(len(layer.x), width)
    dtype = torch.promote_types(grad_gates.dtype, torch.float32)
    return grad_gates, grad_gates.new_empty(chunks, layer.batch, width, dtype=dtype)


def layers_passed(grads: Sequence[Sequence[Tensor | None]], needed: Sequence[int]) -> range:
    """The layers that gradients pass through: from the first that needs any to the last whose results have any."""
    first = next((i for i, bits in enumerate(needed) if bits), len(needed))
    sources = [i for i, layer_grads in enumerate(grads) if any(x is not None for x in layer_grads)]
    return range(first, 1 + max(sources, default=-1))


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    """The product, where None stands for ones."""
    return x if factor is None else x * factor


def sum_of(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """The sum, where None stands for zeros."""
    return y if x is None else x if y is None else x + y


def wavefront_of(*calls: tuple) -> Wavefront:
    """The wavefront of stacked layers, given the arguments of each."""
    layers = layers_of(calls)
    executors = tuple(executor_of(*layer) for layer in layers)
    kernels, plan, *_ = executors[0]
    call = call_of(layers[0])._replace(captured=is_captured(layers[0].x.device))
    return Wavefront(executors, as_gpu(kernels).chunks(call, plan))
