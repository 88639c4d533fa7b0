"""Computes each step by a matrix product and a generated loop or kernel, where no persistent kernel fits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.recurrence.arguments import Call
from ostinato.kernels.recurrence.weighted.layer import Layer
from ostinato.kernels.scan import Order

_ONE_STEP = Order()


def forward(layer: Layer, rows: Tensor, training: bool) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """See :class:`~ostinato.kernels.recurrence.weighted.layer.Executor`."""
    trace, sequences = layer.trace, layer.sequences
    work, width = _widened(rows, copy=True), layer.width
    weight, parameters = layer.weight_hh.to(work.dtype), [*layer.parameters.to(work.dtype)]
    states = [work.new_empty(len(rows), width) for _ in range(trace.states)]
    carried = _carried(layer.initial, trace.states, work.new_zeros(sequences.batch, width))
    advance, add = _forward_step(layer, work, parameters, carried, states), _adder(layer, weight.mT)
    with_products = layer.with_products
    for step in sequences.steps(rows):
        live = step.stop - step.start
        if sequences.resets is not None:
            for x in carried:
                x[:live].masked_fill_(sequences.resets[step, None], 0.0)
        add(work[step, :with_products], carried[0][:live])
        advance(step)
    states, last = ([x.to(rows.dtype) for x in own] for own in (states, carried))
    return states, last, work.to(rows.dtype) if training else None


def backward(
    layer: Layer,
    rows: Tensor,
    before: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    grads_last: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """See :class:`~ostinato.kernels.recurrence.weighted.layer.Executor`."""
    trace, sequences = layer.trace, layer.sequences
    work, width = _widened(rows), layer.width
    weight, parameters = layer.weight_hh.to(work.dtype), [*layer.parameters.to(work.dtype)]
    grad_rows = torch.empty_like(work)
    carried = _carried(grads_last, trace.states, work.new_zeros(sequences.batch, width))
    grads = [None if x is None else _widened(x) for x in grads]
    step_back, totals = _backward_step(layer, work, parameters, carried, [*map(_widened, before)], grads, grad_rows)
    with_products, add = layer.with_products, _adder(layer, weight)
    for step in reversed(sequences.steps(rows)):
        live = step.stop - step.start
        step_back(step)
        add(carried[0][:live], grad_rows[step, :with_products])
        if sequences.resets is not None:
            for x in carried:
                x[:live].masked_fill_(sequences.resets[step, None], 0.0)
    return grad_rows.to(rows.dtype), totals(), [x.to(rows.dtype) for x in carried]


def _adder(layer: Layer, weight: Tensor) -> Callable[[Tensor, Tensor], Any]:
    """A function that adds to its first argument the product of its second, (rows, ...), with the layer's weights.

    `weight` are these weights or their transposes, in the dtype of both arguments; those of heads multiply each head's
    part.
    """
    if weight.dim() == 2:
        return lambda onto, x: onto.addmm_(x, weight)

    def add(onto: Tensor, x: Tensor) -> None:
        of_heads = layer.by_head(onto)
        of_heads.add_(torch.bmm(layer.by_head(x).flatten(2), weight).view(of_heads.shape))

    return add


def _widened(x: Tensor, copy: bool = False) -> Tensor:
    """The tensor in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=copy)


def _carried(initial: Sequence[Tensor | None] | None, count: int, zeros: Tensor) -> list[Tensor]:
    """Copies of the initial states, or of the last states' gradients, which the steps update in place."""
    return [torch.zeros_like(zeros).copy_(zeros if x is None else x) for x in initial or [None] * count]


def _forward_step(
    layer: Layer, work: Tensor, parameters: list[Tensor], carried: list[Tensor], states: list[Tensor]
) -> Callable[[slice], None]:
    """A function of a step's rows that updates the carried states in place and copies them to those of `states`."""
    if work.is_cpu:
        from ostinato.kernels.recurrence.nonlinear.cpu import StepsOfRows

        return StepsOfRows(layer.trace, work, parameters, carried, {"out": states}, backward=False)
    from ostinato.kernels.recurrence.nonlinear import cuda

    def advance(step: slice) -> None:
        before = [x[: step.stop - step.start] for x in carried]
        _, after = cuda.steps(Call(layer.trace, _sequences(layer, work[step]), parameters, before, _ONE_STEP))
        for rows, old, new in zip(states, before, after, strict=True):
            rows[step] = new
            old.copy_(new)

    return advance


def _backward_step(
    layer: Layer,
    work: Tensor,
    parameters: list[Tensor],
    carried: list[Tensor],
    before: list[Tensor],
    grads: list[Tensor | None],
    grad_rows: Tensor,
) -> tuple[Callable[[slice], None], Callable[[], Tensor]]:
    """A function for each step, and one that returns the parameters' gradients after all steps.

    The former, given a step's rows, propagates the carried gradients of the states back through the step, except
    through its matrix product, and writes the gradients of the arguments to `grad_rows`.
    """
    if work.is_cpu:
        from ostinato.kernels.recurrence.nonlinear.cpu import StepsOfRows

        width = carried[0].shape[1]
        others = {"first": before, "grad_h": grads, "grad_x": grad_rows.split(width, -1)}
        steps = StepsOfRows(layer.trace, work, parameters, carried, others, backward=True)
        return steps, lambda: torch.stack(steps.totals).sum(1) if parameters else work.new_empty(0, width)
    from ostinato.kernels.recurrence.nonlinear import cuda

    totals = work.new_zeros(len(parameters), carried[0].shape[1])
    no_grads = [None] * layer.trace.states

    def step_back(step: slice) -> None:
        after = [x[: step.stop - step.start] for x in carried]
        for x, grad in zip(after, grads, strict=True):
            if grad is not None:
                x += grad[step]
        first = [x[step] for x in before]
        call = Call(layer.trace, _sequences(layer, work[step]), parameters, first, _ONE_STEP)
        states = [x[:, None] for x in first]  # not read, as only `first` precedes a single step
        sums, grad_before = cuda.steps_backward(call, states, no_grads, after, _sequences(layer, grad_rows[step]))
        totals.add_(sums)
        for x, y in zip(after, grad_before or [], strict=True):
            x.copy_(y)

    return step_back, lambda: totals


def _sequences(layer: Layer, rows: Tensor) -> list[Tensor]:
    """The arguments in a step's rows, as sequences of one step."""
    return [x[:, None] for x in rows.split(layer.width, -1)]
