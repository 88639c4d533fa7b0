"""A matrix product and a generated loop or kernel for every step, for what no persistent kernel fits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.kernels.recurrence.arguments import Call
from ostinato.kernels.recurrence.backends import NonlinearKernels, nonlinear_kernels_on
from ostinato.kernels.recurrence.weighted.layer import Layer
from ostinato.kernels.scan import Order

_ONE_STEP = Order()


def forward(layer: Layer, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """See :class:`~ostinato.kernels.recurrence.weighted.layer.Executor`."""
    trace, sequences = layer.trace, layer.sequences
    kernels, work = _kernels_on(rows.device.type), _widened(rows)
    weight, width = layer.weight_hh.to(work.dtype).T, layer.weight_hh.shape[1]
    parameters = [x.to(work.dtype) for x in layer.parameters]
    states = [work.new_empty(len(rows), width) for _ in range(trace.states)]
    carried = _carried(layer.initial, trace.states, work.new_zeros(sequences.batch, width))
    for step in sequences.steps(rows):
        before = [x[: step.stop - step.start] for x in carried]
        if sequences.resets is not None:
            for x in before:
                x.masked_fill_(sequences.resets[step, None], 0.0)
        own = work[step]
        own[:, : layer.exchanged].addmm_(before[0], weight)
        _, after = kernels.steps(Call(trace, _arguments(own, width), parameters, before, _ONE_STEP))
        for rows_of, x, y in zip(states, before, after, strict=True):
            rows_of[step] = y
            x.copy_(y)
    return [x.to(rows.dtype) for x in states], [x.to(rows.dtype) for x in carried]


def backward(
    layer: Layer,
    rows: Tensor,
    before: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    grads_last: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """See :class:`~ostinato.kernels.recurrence.weighted.layer.Executor`."""
    trace, sequences = layer.trace, layer.sequences
    kernels, work = _kernels_on(rows.device.type), _widened(rows)
    weight, width = layer.weight_hh.to(work.dtype), layer.weight_hh.shape[1]
    parameters, before = [x.to(work.dtype) for x in layer.parameters], [_widened(x) for x in before]
    found, zeros = torch.empty_like(work), work.new_zeros(sequences.batch, width)
    carried = _carried(grads_last, trace.states, zeros)
    of_parameters = work.new_zeros(len(parameters), width)
    for step in reversed(sequences.steps(rows)):
        of_states = [x[: step.stop - step.start] for x in carried]
        for x, grad in zip(of_states, grads, strict=True):
            if grad is not None:
                x += grad[step]
        first = [x[step] for x in before]
        call = Call(trace, _arguments(work[step], width), parameters, first, _ONE_STEP)
        own, nothing = found[step], [None] * trace.states
        states = [x[:, None] for x in first]  # of which a single step needs none
        more, of_first = kernels.steps_backward(call, states, nothing, of_states, _arguments(own, width))
        of_parameters += more
        earlier = of_first or []  # never none, as the states before it are given
        earlier[0].addmm_(own[:, : layer.exchanged], weight)
        for x, y in zip(of_states, earlier, strict=True):
            x.copy_(y if sequences.resets is None else y.masked_fill_(sequences.resets[step, None], 0.0))
    return found.to(rows.dtype), of_parameters, [x.to(rows.dtype) for x in carried]


def _kernels_on(device_type: str) -> NonlinearKernels:
    kernels = nonlinear_kernels_on("auto", device_type)
    assert kernels is not None, "elsewhere the function itself runs"
    return kernels


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _carried(given: Sequence[Tensor | None] | None, count: int, zeros: Tensor) -> list[Tensor]:
    """The states, or their gradients, before the first step that is taken, in memory of their own."""
    return [zeros.clone() if x is None else x.to(zeros.dtype, copy=True) for x in given or [None] * count]


def _arguments(rows: Tensor, width: int) -> list[Tensor]:
    """Those of a step, as sequences of one step."""
    return [x[:, None] for x in rows.split(width, -1)]
