"""Stacked recurrent layers in a wavefront on a GPU: each is a chunk of the steps behind the one below it.

So they run at the same time (Appleyard et al. 2016, "Optimizing Performance of Recurrent Neural Networks on GPUs",
arXiv 1604.01946).  Chunks are slices of the rows of whole tensors.  What has no order in time, the gradients of the
weights, is computed of whole tensors afterwards.
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
from ostinato.kernels.persistent.backward import gradients, of_input, saved_by
from ostinato.kernels.persistent.executor import Executor, call_of, executor_of
from ostinato.kernels.persistent.modes import without_autocast
from ostinato.kernels.persistent.plan import GATES
from ostinato.kernels.persistent.results import empty_results

UNIT = 8  # steps, at multiples of which chunks begin, so that their rows are aligned in 16 bits, too


class Wavefront(NamedTuple):
    """Who computes stacked layers; called with the arguments of each, it does so."""

    executors: tuple[Executor, ...]
    chunks: int

    def __call__(self, *calls: tuple) -> list[tuple]:
        layers, device = layers_of(calls), calls[0][0].device
        sizes, results = self._sizes(layers[0]), [list(empty_results(*layer)) for layer in layers]
        outputs, cs, gates = ([result[i].split(sizes) for result in results] for i in (0, 3, 4))
        inputs, factors = layers[0].x.split(sizes), [_split(call[0], sizes) for call in calls]
        sequences = [layer.sequences.parts(sizes) for layer in layers]
        given = [
            each.layer_of(layer)._replace(packed_weights={}) for each, layer in zip(self.executors, layers, strict=True)
        ]
        states: list[Any] = [(layer.h0, layer.c0) for layer in layers]

        def run(i: int, chunk: int) -> Sequence[Tensor | None]:
            executor, layer, kept = self.executors[i], layers[i], gates[i][chunk]
            x = times(outputs[i - 1][chunk], factors[i][chunk]) if i else inputs[chunk]
            projected = executor.project(x, layer.weight_ih, layer.bias_ih, kept if kept.numel() else None)
            h0, c0 = states[i]
            own = given[i]._replace(h0=h0, c0=c0, sequences=sequences[i][chunk])
            into = outputs[i][chunk], cs[i][chunk]
            _, *states[i], _ = as_gpu(executor.kernels).forward(own, projected, executor.plan, layer.training, into)
            return states[i]

        with without_autocast(device.type):  # the tensors are converted already
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
        found = [_empty_gradients(layer, self.chunks) for layer in layers]
        of_gates = [grads.split(sizes) for grads, _ in found]
        of_outputs = [[*_split(of_output, sizes)] for of_output, *_ in grads]
        factors = [_split(call[0], sizes) for call in calls]
        sequences = [layer.sequences.parts(sizes) for layer in layers]
        given = [layer.layer._replace(packed_weights={}) for layer in layers]
        states: list[Any] = [of_states for _, *of_states in grads]

        def run(depth: int, link: int) -> Sequence[Tensor | None]:
            i, chunk = len(layers) - 1 - depth, self.chunks - 1 - link
            if i not in passed:
                return ()
            (kernels, plan, tf32, _), layer = self.executors[i], layers[i]
            own = given[i]._replace(sequences=sequences[i][chunk])
            if chunk:
                own = _continued(own, saved[i][chunk - 1])
            upstream = of_outputs[i][chunk], *states[i]
            into = of_gates[i][chunk], found[i][1][chunk]
            _, *states[i], _ = as_gpu(kernels).backward(own, saved[i][chunk], upstream, plan, into)
            if i == passed[0]:
                return states[i]
            of_x = gradient_of_input(of_input(into[0], layer.cell), layer.weight_ih, tf32)
            of_outputs[i - 1][chunk] = sum_of(of_outputs[i - 1][chunk], times(of_x, factors[i][chunk]))
            return of_outputs[i - 1][chunk], *states[i]

        results: list[tuple] = [(None,) * INPUTS] * len(layers)
        with without_autocast(device.type):
            in_wavefront(device, len(layers), self.chunks, run)
            for i in passed:
                (of_all_gates, totals), (h, *_) = found[i], kept[i]
                of_layer = of_all_gates, *states[i], totals.flatten(0, 1)
                results[i] = *gradients(self.executors[i], layers[i], h, of_layer, needed[i]), *NOTHING
        return results

    def _sizes(self, layer: Arguments) -> list[int]:
        """How many rows each chunk has."""
        rows, unit = len(layer.x), UNIT * layer.batch
        units = -(-rows // unit)
        bounds = [min(units * i // self.chunks * unit, rows) for i in range(self.chunks + 1)]
        return [end - begin for begin, end in pairwise(bounds)]


def layers_of(calls: Sequence[tuple], outputs: Sequence[Tensor] = ()) -> list[Arguments]:
    """The arguments of each layer.  Their inputs are those of the first, if no `outputs` of the layers are given."""
    layers = [Arguments(*calls[0][:INPUTS])]
    for i, (factor, *others) in enumerate(calls[1:]):
        x = times(outputs[i], factor) if outputs else layers[0].x  # which has as many rows
        layers.append(Arguments(x, *others[: INPUTS - 1]))
    return layers


def _split(x: Tensor | None, sizes: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if x is None else x.split(sizes)


def _parts(saved: Saved, sizes: list[int]) -> list[Saved]:
    """What was saved, cut into what each chunk needs."""
    return [Saved(*parts) for parts in zip(*(_split(x, sizes) for x in saved), strict=True)]


def _continued(layer: Layer, before: Saved) -> Layer:
    """The layer from the last states of another chunk on, as the forward passed them on."""
    last = slice(-layer.sequences.batch, None)
    return layer._replace(h0=before.h[last], c0=None if before.c is None else before.c[last].to(before.h.dtype))


def _empty_gradients(layer: Arguments, chunks: int) -> tuple[Tensor, Tensor]:
    """What the kernels' backward writes: the gradients of gates, and their totals of each chunk."""
    width = layer.weight_hh.shape[1] * (1 if GATES[layer.cell] == 1 else 4)
    of_gates = layer.x.new_empty(len(layer.x), width)
    wide = torch.promote_types(of_gates.dtype, torch.float32)
    return of_gates, of_gates.new_empty(chunks, layer.batch, width, dtype=wide)


def layers_passed(grads: Sequence[Sequence[Tensor | None]], needed: Sequence[int]) -> range:
    """The layers on the way from gradients that are given to those that are needed."""
    first = next((i for i, bits in enumerate(needed) if bits), len(needed))
    given = [i for i, of_layer in enumerate(grads) if any(x is not None for x in of_layer)]
    return range(first, 1 + max(given, default=-1))


def times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def sum_of(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y


def wavefront_of(*calls: tuple) -> Wavefront:
    layers = layers_of(calls)
    executors = tuple(executor_of(*layer) for layer in layers)
    kernels, plan, *_ = executors[0]
    call = call_of(layers[0])._replace(captured=is_captured(layers[0].x.device))
    return Wavefront(executors, as_gpu(kernels).chunks(call, plan))
