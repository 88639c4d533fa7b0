"""Stacked recurrent layers, cut into wavefronts: these run one after the other, the layers of each at the same time.

An eager call is one wavefront, of layers that were planned to run at once; a compiled call is planned when it runs, and
may be several.  A wavefront of one layer is that layer by itself.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.operators.several import of_several, one_operator
from ostinato.kernels.persistent.arguments import INPUTS, TENSORS, Arguments
from ostinato.kernels.persistent.backends import is_captured, layers_at_once, plan_layer
from ostinato.kernels.persistent.executor import call_of, executor_of
from ostinato.kernels.persistent.operators import backward_arguments, context, grad, inputs, recurrent_layer
from ostinato.kernels.persistent.results import empty_results, whole
from ostinato.kernels.persistent.wavefront import Wavefront, layers_of, layers_passed, sum_of, times, wavefront_of


class _Stack(NamedTuple):
    """Stacked layers as wavefronts, one after the other, each given by the numbers of its layers."""

    wavefronts: tuple[range, ...]

    def __call__(self, *calls: tuple) -> list[tuple]:
        results: list[tuple] = []
        for wavefront in self.wavefronts:
            first, *others = ((*calls[i][:-1], len(wavefront)) for i in wavefront)
            if results:
                first = times(results[-1][0], first[0]), *first[1:]
            own = first, *others
            results += wavefront_of(*own)(*own) if others else [executor_of(*first)(*first)]
        return results

    def backward(self, parts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]) -> list[tuple]:
        """The gradients of all inputs, given those of all results; differentiable if no wavefront has two layers."""
        passed = layers_passed(grads, [any(part.needs_input_grad) for part in parts])
        results: list[tuple] = [(None,) * INPUTS] * len(parts)
        from_above = None
        for wavefront in reversed(self.wavefronts):
            first, last = wavefront.start, wavefront.stop - 1
            if last < passed.start or first >= passed.stop:
                continue
            own = [_in_wavefront(parts[i], len(wavefront)) for i in wavefront]
            given = [grads[i] for i in wavefront]
            factor, *others = own[0].saved_tensors
            if first:
                below = parts[first - 1].saved_tensors[TENSORS]
                needed = first > passed.start, *own[0].needs_input_grad[1:]
                own[0] = own[0].with_saved((times(below, factor), *others), needed)
            of_output, *of_states = given[-1]
            given[-1] = sum_of(of_output, from_above), *of_states
            if len(wavefront) > 1:
                found = wavefront_of(*map(inputs, own)).backward([*map(backward_arguments, own, given)])
            else:
                found = [grad(own[0], *given[0])]
            of_x, *of_others = found[0]
            from_above = None if of_x is None else times(of_x, factor if first else None)
            results[first : last + 1] = (None if first else of_x, *of_others), *found[1:]
        return results


def _stack_of(layers: int, at_once: int) -> _Stack:
    return _Stack(tuple(range(i, min(i + at_once, layers)) for i in range(0, layers, at_once)))


def _in_wavefront(part: Any, layers: int) -> Any:
    """What a layer has kept, as one of so many in its wavefront."""
    own = part.with_saved(part.saved_tensors, part.needs_input_grad)
    own.settings = *own.settings[:-1], layers
    return own


def _planned(*calls: tuple) -> _Stack:
    """As many layers at once as are faster, for calls that are not planned: the compiled ones.

    One by one where no kernel fits all layers of each wavefront at once.
    """
    first = Arguments(*calls[0])
    captured = first.mask_hh is None and is_captured(first.x.device)  # in a capture masks cannot be packed
    call = call_of(first)._replace(at_once=1, captured=captured)
    found = _stack_of(len(calls), 1 if call.packed else layers_at_once(first.mask_hh, call, len(calls)))
    one_by_one = _stack_of(len(calls), 1)
    if found == one_by_one:
        return found
    masks = [Arguments(*given).mask_hh for given in calls]
    fit = (
        plan_layer(masks[i], call._replace(at_once=len(wavefront), captured=False)).has_kernel
        for wavefront in found.wavefronts
        for i in wavefront
    )
    return found if all(fit) else one_by_one


def _backward_of_compiled(
    stack: _Stack | None, parts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]
) -> list[tuple]:
    """The gradients of a compiled call; of no stack one by one, which is differentiable."""
    return (stack or _stack_of(len(parts), 1)).backward(parts, grads)


def _backward(wavefront: Wavefront, parts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]) -> list[tuple]:
    """The gradients of an eager call; one by one where they are differentiated, or are batches."""
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


_compiled = one_operator("stacked_layers", _planned, context, _backward_of_compiled, inputs, _empty, whole)
stacked_layers = of_several("stacked_layers", _separately, wavefront_of, context, _backward, _compiled)
"""The ``recurrent_layer`` of each of stacked layers, given its arguments.

The first's x is the input.  That of another is what the output below is multiplied with, such as by dropout, or None.
"""
