"""The backward of a recurrent layer: through time in one kernel, then the gradients of all inputs by GEMMs.

With every h known the gates' pre-activations are no longer sequential: where kernels did not keep them they are
computed again, by two GEMMs over all steps.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.matmul.gemm import add_product, gradient_of_input, gradient_of_weight, linear, transposes
from ostinato.kernels.persistent import reference
from ostinato.kernels.persistent.arguments import DIFFERENTIABLE, INPUTS, NEEDED_BITS, Arguments, Layer, Saved
from ostinato.kernels.persistent.backends import as_gpu
from ostinato.kernels.persistent.executor import Executor
from ostinato.kernels.persistent.interface import LoopGradients

_OF_BIASES = sum(bit for bit, name in zip(NEEDED_BITS, DIFFERENTIABLE, strict=True) if name.startswith("bias"))


def back_through_time(executor: Executor, *args: Any) -> Callable[[], tuple[Tensor | None, ...]]:
    """The sequential part of the backward; the function that it returns computes the gradients that are needed."""
    given, (h, c, gates, *upstream, needed) = Arguments(*args[:INPUTS]), args[INPUTS:]
    saved = saved_by(executor, given, (h, c, gates))
    found = executor.kernels.backward(given.layer, saved, upstream, executor.plan)
    return lambda: gradients(executor, given, h, found, needed)


def back_through_time_of_both(executor: Executor, *calls: tuple) -> list[tuple[Tensor | None, ...]]:
    """As :func:`back_through_time` of both directions of a layer, in one launch, and then the gradients."""
    each = [(Arguments(*args[:INPUTS]), *args[INPUTS:]) for args in calls]
    runs = [
        (given.layer, saved_by(executor, given, (h, c, gates)), upstream, executor.plan)
        for given, h, c, gates, *upstream, _ in each
    ]
    found = as_gpu(executor.kernels).backward_both(*runs)
    of_each = [(given, h, own, needed) for (given, h, *_, needed), own in zip(each, found, strict=True)]
    if executor.small is not None:
        return executor.small.gradients(executor.tf32, *of_each)
    return [gradients(executor, *own) for own in of_each]


def saved_by(executor: Executor, given: Arguments, kept: tuple[Tensor, Tensor | None, Tensor | None]) -> Saved:
    """What the kernels' backward takes of the forward: h, c and gates as it kept them, or the gates computed again."""
    h, c, gates = kept
    rnn, lstm, gru = given.cell.startswith("rnn"), given.cell == "lstm", given.cell == "gru"
    if lstm and (c is None or c.shape != h.shape):  # kernels would read beyond its end
        raise RuntimeError(
            "an LSTM exported without gradients keeps nothing for them: export it with gradients enabled"
        )
    pre: Any = h if rnn else gates
    candidate = c if gru else None
    if not rnn and (executor.kernels is reference or pre is None or not pre.numel()):
        pre, candidate = _recomputed(given, executor.kernels.previous(h, given.h0, given.sequences))
    return Saved(pre, candidate, h, c if lstm else None)


def _recomputed(given: Arguments, h_prev: Tensor) -> tuple[Tensor, Tensor | None]:
    """All gates' pre-activations, from the states before each step; of a GRU's candidate the two parts separately."""
    weight_hh, bias, bias_hh = given.weight_hh, given.bias_hh, given.bias_hh
    hidden, gru = weight_hh.shape[1], given.cell == "gru"
    added = (2 if gru else 4) * hidden  # gates whose argument is a sum of both products
    if gru and bias is not None:
        bias = F.pad(bias[:added], (0, hidden))
    if given.bias_ih is not None:
        bias = given.bias_ih if bias is None else given.bias_ih + bias
    pre = linear(given.x, given.weight_ih, bias)
    pre[:, :added].addmm_(h_prev, weight_hh[:added].T)
    if not gru:
        return pre, None
    return pre, linear(h_prev, weight_hh[added:], None if bias_hh is None else bias_hh[added:])


def gradients(
    executor: Executor, given: Arguments, h: Tensor, of_loop: LoopGradients, needed: int
) -> tuple[Tensor | None, ...]:
    """The gradients of the DIFFERENTIABLE inputs, None unless its bit is set in `needed`.

    ``of_loop`` is what the kernels' backward returns.
    """
    kernels, _, tf32, small = executor
    if small is not None:
        return small.gradients(tf32, (given, h, of_loop, needed))[0]
    grads, grad_h0, grad_c0, totals = of_loop
    hidden, cell, gru = given.weight_hh.shape[1], given.cell, given.cell == "gru"
    inputs, recurrent = of_input(grads, cell), grads[:, : 3 * hidden] if gru else grads
    of_biases: Any = kernels.gradients_of_biases(totals, grads.dtype, cell) if needed & _OF_BIASES else None

    def of_weight_hh() -> Tensor:
        found = _weight_gradient_by_rows(recurrent, h, given.layer, tf32)
        if found is None:
            before = kernels.previous(h, given.h0, given.sequences)
            found = gradient_of_weight(recurrent, before, tf32=tf32)
        return found.roll(-hidden, 0) if gru else found

    compute: tuple[Callable[[], Any], ...] = (
        lambda: gradient_of_input(inputs, given.weight_ih, tf32),
        lambda: grad_h0,
        lambda: grad_c0,
        lambda: gradient_of_weight(inputs, given.x, tf32=tf32),
        of_weight_hh,
        lambda: of_biases[0],
        lambda: of_biases[1],
    )
    return tuple(one() if needed & bit else None for one, bit in zip(compute, NEEDED_BITS, strict=True))


def of_input(grads: Tensor, cell: str) -> Tensor:
    """The gradients of the product with the input, from those of the gates.

    A GRU's gates are n's share of the hidden product, r, z, n's share of the input's: each product's are neighbours.
    """
    return grads[:, grads.shape[1] // 4 :] if cell == "gru" else grads


def _weight_gradient_by_rows(grad: Tensor, h: Tensor, layer: Layer, tf32: bool) -> Tensor | None:
    """The gradient of the recurrent weights, if the states before all steps but the first are simply rows of h.

    On CPUs it is left out: their number would not be round.
    """
    batch, offsets, resets, reverse = layer.sequences
    if not h.is_cuda or offsets is not None or not (resets is None or transposes(grad, h, tf32)):
        return None
    first, others = (slice(-batch, None), slice(-batch)) if reverse else (slice(batch), slice(batch, None))
    earlier, zeroed = h[batch:] if reverse else h[:-batch], None if resets is None else resets[others]
    found = gradient_of_weight(grad[others], earlier, zeroed, tf32)
    if layer.h0 is None:
        return found
    start = layer.h0 if resets is None else torch.where(resets[first, None], 0.0, layer.h0)
    return add_product(found, grad[first].T, start, tf32)
