"""Both directions of a recurrent layer at once on a GPU: in one launch, or on two streams, as for pruned layers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.cuda.streams import beside
from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.operators.several import OneOperator, of_several
from ostinato.kernels.persistent.arguments import NOTHING
from ostinato.kernels.persistent.backward import back_through_time, back_through_time_of_both
from ostinato.kernels.persistent.executor import Executor, executor_of
from ostinato.kernels.persistent.modes import without_autocast
from ostinato.kernels.persistent.operators import backward_arguments, context, grad, inputs, recurrent_layer
from ostinato.kernels.persistent.results import empty_results, whole


class _Both(NamedTuple):
    """The executors of both directions; called with the arguments of each, it runs them at once."""

    first: Executor
    second: Executor

    @property
    def in_one_launch(self) -> bool:
        return self.first.plan.directions == self.second.plan.directions == 2

    def __call__(self, first: tuple, second: tuple) -> Sequence[tuple]:
        if self.in_one_launch:
            return self.first.both(first, second)
        return beside(Executor.__call__, (self.first, *first), (self.second, *second))


def _both(first: tuple, second: tuple) -> _Both:
    return _Both(*(executor_of(*call, bidirectional=True) for call in (first, second)))


def _backward(both: _Both, parts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]) -> list[tuple]:
    calls = tuple(map(backward_arguments, parts, grads))
    if torch.is_grad_enabled() or not is_eager([*calls[0], *calls[1]]):
        return [grad(part, *part_grads) for part, part_grads in zip(parts, grads, strict=True)]
    with without_autocast(calls[0][0].device.type):
        if both.in_one_launch:
            return [(*grads, *NOTHING) for grads in back_through_time_of_both(both.first, *calls)]
        first, second = ((executor, *args) for executor, args in zip(both, calls, strict=True))
        return [(*gradients(), *NOTHING) for gradients in beside(back_through_time, first, second)]


def _separately(*calls: tuple) -> list[tuple]:
    return [recurrent_layer(*call) for call in calls]


def _empty(*calls: tuple) -> list[tuple]:
    return [empty_results(*call) for call in calls]


_compiled = OneOperator("recurrent_layers", _both, context, _backward, inputs, _empty, whole)
recurrent_layers = of_several("recurrent_layers", _separately, _both, context, _backward, _compiled)
"""``recurrent_layer`` of both directions, given the arguments of each."""
