"""Stacked recurrent layers as successive wavefronts: the layers of each wavefront run at the same time.

An eager call is one wavefront, of layers that were planned to run at once.  A compiled call is planned when it runs,
and may be several wavefronts.  A wavefront of one layer is that layer by itself.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.operators.several import OneOperator, of_several
from ostinato.kernels.persistent.arguments import INPUTS, TENSORS, Arguments
from ostinato.kernels.persistent.backends import is_captured, layers_at_once, plan_layer
from ostinato.kernels.persistent.executor import call_of, executor_of
from ostinato.kernels.persistent.operators import backward_arguments, context, grad, inputs, recurrent_layer
from ostinato.kernels.persistent.results import empty_results, whole
from ostinato.kernels.persistent.wavefront import Wavefront, layers_of, layers_passed, sum_of, times, wavefront_of


class _Stack(NamedTuple):
    """Stacked layers as successive wavefronts, each given by the indices of its layers."""

    wavefronts: tuple[range, ...]

    def __call__(self, *calls: tuple) -> list[tuple]:
        results: list[tuple] = []
        for wavefront in self.wavefronts:
            first, *others = ((*calls[i][:-1], len(wavefront)) for i in wavefront)
            if results:
                first = times(results[-1][0], first[0]), *first[1:]
            layers = first, *others
            results += wavefront_of(*layers)(*layers) if others else [executor_of(*first)(*first)]
        return results

    def backward(self, parts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]) -> list[tuple]:
        """The gradients of all inputs, given those of all results; differentiable if no wavefront has two layers."""
        passed = layers_passed(grads, [any(part.needs_input_grad) for part in parts])
        results: list[tuple] = [(None,) * INPUTS] * len(parts)
        grad_above = None  # the gradient of the output from the wavefront above
        for wavefront in reversed(self.wavefronts):
            first, last = wavefront.start, wavefront.stop - 1
            if last < passed.start or first >= passed.stop:
                continue
            layers = [_in_wavefront(parts[i], len(wavefront)) for i in wavefront]
            layer_grads = [grads[i] for i in wavefront]
            factor, *others = layers[0].saved_tensors
            if first:
                below = parts[first - 1].saved_tensors[TENSORS]
                needed = first > passed.start, *layers[0].needs_input_grad[1:]
                layers[0] = layers[0].with_saved((times(below, factor), *others), needed)
            grad_output, *grad_states = layer_grads[-1]
            layer_grads[-1] = sum_of(grad_output, grad_above), *grad_states
            if len(wavefront) > 1:
                calls = [*map(backward_arguments, layers, layer_grads)]
                input_grads = wavefront_of(*map(inputs, layers)).backward(calls)
            else:
                input_grads = [grad(layers[0], *layer_grads[0])]
            grad_x, *other_grads = input_grads[0]
            grad_above = None if grad_x is None else times(grad_x, factor if first else None)
            results[first : last + 1] = (None if first else grad_x, *other_grads), *input_grads[1:]
        return results


def _stack_of(layers: int, at_once: int) -> _Stack:
    return _Stack(tuple(range(i, min(i + at_once, layers)) for i in range(0, layers, at_once)))


def _in_wavefront(part: Any, layers: int) -> Any:
    """A copy of what a layer has saved, as one of so many layers in a wavefront."""
    copy = part.with_saved(part.saved_tensors, part.needs_input_grad)
    copy.settings = *copy.settings[:-1], layers
    return copy


def _planned(*calls: tuple) -> _Stack:
    """The fastest wavefronts for calls that are not planned yet, which are compiled ones.

    They are single layers if no kernel fits all layers of a wavefront at once.
    """
    first = Arguments(*calls[0])
    captured = first.mask_hh is None and is_captured(first.x.device)  # masks cannot be packed during a capture
    call = call_of(first)._replace(at_once=1, captured=captured)
    stack = _stack_of(len(calls), 1 if call.packed else layers_at_once(first.mask_hh, call, len(calls)))
    one_by_one = _stack_of(len(calls), 1)
    if stack == one_by_one:
        return stack
    masks = [Arguments(*args).mask_hh for args in calls]
    fit = (
        plan_layer(masks[i], call._replace(at_once=len(wavefront), captured=False)).has_kernel
        for wavefront in stack.wavefronts
        for i in wavefront
    )
    return stack if all(fit) else one_by_one


def _backward_of_compiled(
    stack: _Stack | None, parts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]
) -> list[tuple]:
    """The gradients of a compiled call; without a stack, layer by layer, which is differentiable."""
    return (stack or _stack_of(len(parts), 1)).backward(parts, grads)


def _backward(wavefront: Wavefront, parts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]) -> list[tuple]:
    """The gradients of an eager call; layer by layer if they are differentiated again, or batched."""
    calls = [*map(backward_arguments, parts, grads)]
    if torch.is_grad_enabled() or not is_eager([x for call in calls for x in call]):
        return _stack_of(len(parts), 1).backward(parts, grads)
    return wavefront.backward(calls)


def _empty(*calls: tuple) -> list[tuple]:
    return [empty_results(*layer) for layer in layers_of(calls)]


def _separately(*calls: tuple) -> list[tuple]:
    results: list[tuple] = []
    for x, *others in calls:
        results.append(recurrent_layer(times(results[-1][0], x) if results else x, *others))
    return results


_compiled = OneOperator("stacked_layers", _planned, context, _backward_of_compiled, inputs, _empty, whole)
stacked_layers = of_several("stacked_layers", _separately, wavefront_of, context, _backward, _compiled)
"""``recurrent_layer`` of each of several stacked layers, given the arguments of each.

x is the input of the first layer.  Of another, it is a factor of the output below, such as a dropout mask, or None.
"""
