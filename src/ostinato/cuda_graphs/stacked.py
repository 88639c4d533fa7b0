"""Stacked layers of recurrences: small calls that repeat are replayed from CUDA graphs."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ostinato.cuda_graphs.calls import RepeatedCalls, Run, launched_as_a_whole, worth_capturing
from ostinato.dropout import dropout_of
from ostinato.kernels.matmul.precision import autocast_dtype, product_switches
from ostinato.kernels.operators.eager import Prepared, is_eager
from ostinato.states import Hidden, distinct, hidden_of, states_of

if TYPE_CHECKING:
    from ostinato.layers import StackedLayers

MOST_BYTES = 64 << 20  # that a layer saves: calls that save more take a GPU longer than the host

_CALLS: Prepared[RepeatedCalls | Literal[False]] = Prepared()  # False for calls that are always launched


def replayed(
    layer: "StackedLayers", x: Tensor, hx: Hidden | None, resets: Tensor | None, or_launched: bool = False
) -> Any:
    """The results of the layers for a dense input, replayed from CUDA graphs; None if they must be launched.

    With `or_launched`, calls that will be replayed once they have repeated often enough are launched until then.
    """
    if torch.compiler.is_compiling() or not _may_be_small(layer, x):
        return None
    states, weights = states_of(hx), list[Any](layer._parameters.values())
    tensors = [x, *weights, *distinct(states)]
    if resets is not None:
        tensors.append(resets)
    settings = [getattr(layer, name) for name in layer.settings]
    key = type(layer), *settings, dropout_of(layer), *layer._parameters, autocast_dtype(x.device), *product_switches()
    calls = _CALLS.find(tensors, *key)
    if calls is None and None not in weights:
        _CALLS.add(lambda: _prepared(layer, x, weights), tensors, *key)
    if not calls:
        return None
    training = torch.is_grad_enabled() and any(y.requires_grad for y in tensors)
    results = calls.replay(layer, x, states, weights, resets, training)
    if results is None:
        if not or_launched:
            return None
        with launched_as_a_whole():
            return layer._run_layers(x, hx, None, resets, layer.batch_first)
    return results[0], hidden_of(results[1:])


def _may_be_small(layer: "StackedLayers", x: Tensor) -> bool:
    """A cheap test whether a call may be small enough.  Classes from elsewhere never are: they may compute more."""
    if not _is_on_gpu(x) or layer.sequence_group is not None or not type(layer).__module__.startswith("ostinato."):
        return False
    return is_eager([x]) and 0 < x.nbytes <= MOST_BYTES


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _prepared(layer: "StackedLayers", x: Tensor, weights: list[Tensor]) -> RepeatedCalls | Literal[False]:
    """The calls of layers like this one with inputs like `x`; False if they are not worth capturing."""
    is_complete = set(layer._parameters) == set(layer._shapes_by_name())  # parametrized ones are registered elsewhere
    if not is_complete or not worth_capturing(weights, x.numel() // x.shape[-1], MOST_BYTES * layer.num_layers):
        return False
    return RepeatedCalls(_launcher(layer, autocast_dtype(x.device)), draws=dropout_of(layer) > 0)


def _launcher(layer: "StackedLayers", autocast: torch.dtype | None) -> Run:
    """A function that launches such calls of any layer.

    It holds nothing of this layer, as autograd keeps the function for as long as the results.
    """
    kind, names = type(layer), [*layer._parameters]
    attributes: dict[str, Any] = {name: getattr(layer, name) for name in layer.settings}
    attributes |= {"training": dropout_of(layer) > 0, "_buffers": {}, "_modules": {}}

    def run(x: Tensor, states: list[Tensor], weights: list[Tensor], resets: Tensor | None) -> list[Tensor]:
        bare = object.__new__(kind)
        bare.__dict__.update(attributes, _parameters=dict(zip(names, weights, strict=True)))
        with nullcontext() if autocast is None else torch.autocast(x.device.type, autocast):
            output, last = bare._run_layers(x, hidden_of(states), None, resets, bare.batch_first)
        return [output, *states_of(last)]

    return run
