"""Stacked recurrent layers: groups of them one after the other, the layers of each at the same time in a wavefront.

An eager call is one group, of layers that were planned to run at once; a compiled call is planned when it runs, and may
be several groups.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.eager import is_eager
from ostinato.kernels.persistent.arguments import INPUTS, TENSORS, Arguments
from ostinato.kernels.persistent.backends import is_captured, layers_at_once, plan_layer
from ostinato.kernels.persistent.operators import (
    backward_arguments,
    call_of,
    context,
    empty_results,
    executor_of,
    grad,
    inputs,
    recurrent_layer,
    whole,
)
from ostinato.kernels.persistent.wavefront import Wavefront, layers_of, layers_passed, sum_of, times, wavefront_of
from ostinato.kernels.several import of_several, one_operator


class _InTurn(NamedTuple):
    """Groups of stacked layers, one after the other; the layers of each run at the same time."""

    groups: tuple[range, ...]

    def __call__(self, *calls: tuple) -> list[tuple]:
        results: list[tuple] = []
        for group in self.groups:
            first, *others = ((*calls[i][:-1], len(group)) for i in group)
            if results:
                first = times(results[-1][0], first[0]), *first[1:]
            own = first, *others
            results += wavefront_of(*own)(*own) if others else [executor_of(*first)(*first)]
        return results

    def backward(self, parts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]) -> list[tuple]:
        """The gradients of all inputs, given those of the results of each layer; of groups of one, differentiable."""
        passed = layers_passed(grads, [any(part.needs_input_grad) for part in parts])
        results: list[tuple] = [(None,) * INPUTS] * len(parts)
        from_above = None
        for group in reversed(self.groups):
            first, last = group.start, group.stop - 1
            if last < passed.start or first >= passed.stop:
                continue
            own, given = [_of_group(parts[i], len(group)) for i in group], [grads[i] for i in group]
            factor, *others = own[0].saved_tensors
            if first:
                below = parts[first - 1].saved_tensors[TENSORS]
                needed = first > passed.start, *own[0].needs_input_grad[1:]
                own[0] = own[0].with_saved((times(below, factor), *others), needed)
            of_output, *of_states = given[-1]
            given[-1] = sum_of(of_output, from_above), *of_states
            if len(group) > 1:
                found = wavefront_of(*map(inputs, own)).backward([*map(backward_arguments, own, given)])
            else:
                found = [grad(own[0], *given[0])]
            of_x, *of_others = found[0]
            from_above = None if of_x is None else times(of_x, factor if first else None)
            results[first : last + 1] = (None if first else of_x, *of_others), *found[1:]
        return results


def _in_turn(layers: int, at_once: int) -> _InTurn:
    return _InTurn(tuple(range(i, min(i + at_once, layers)) for i in range(0, layers, at_once)))


def _of_group(part: Any, size: int) -> Any:
    """What a layer has kept, with so many in its group."""
    own = part.with_saved(part.saved_tensors, part.needs_input_grad)
    own.settings = *own.settings[:-1], size
    return own


def _planned(*calls: tuple) -> _InTurn:
    """As many layers at once as are faster, for calls that are not planned: the compiled ones.

    One by one where no kernel fits all layers of each group at once.
    """
    first = Arguments(*calls[0])
    captured = first.mask_hh is None and is_captured(first.x.device)  # in a capture masks cannot be packed
    call = call_of(first)._replace(at_once=1, captured=captured)
    found = _in_turn(len(calls), 1 if call.packed else layers_at_once(first.mask_hh, call, len(calls)))
    one_by_one = _in_turn(len(calls), 1)
    if found == one_by_one:
        return found
    masks = [Arguments(*given).mask_hh for given in calls]
    fit = (
        plan_layer(masks[i], call._replace(at_once=len(group), captured=False)).has_kernel
        for group in found.groups
        for i in group
    )
    return found if all(fit) else one_by_one


def _backward_in_turn(
    groups: _InTurn | None, parts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]
) -> list[tuple]:
    """The gradients of a compiled call; of no groups one by one, which is differentiable."""
    return (groups or _in_turn(len(parts), 1)).backward(parts, grads)


def _backward(wavefront: Wavefront, parts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]) -> list[tuple]:
    """The gradients of an eager call; one by one where they are differentiated, or are batches."""
    calls = [*map(backward_arguments, parts, grads)]
    if torch.is_grad_enabled() or not is_eager([x for call in calls for x in call]):
        return _in_turn(len(parts), 1).backward(parts, grads)
    return wavefront.backward(calls)


def _empty(*calls: tuple) -> list[tuple]:
    return [empty_results(*layer) for layer in layers_of(calls)]


def _separately(*calls: tuple) -> list[tuple]:
    results: list[tuple] = []
    for x, *others in calls:
        results.append(recurrent_layer(times(results[-1][0], x) if results else x, *others))
    return results


_compiled = one_operator("stacked_layers", _planned, context, _backward_in_turn, inputs, _empty, whole)
stacked_layers = of_several("stacked_layers", _separately, wavefront_of, context, _backward, _compiled)
"""The ``recurrent_layer`` of each of stacked layers, given its arguments.

The first's x is the input.  That of another is what the output below is multiplied with, such as by dropout, or None.
"""
