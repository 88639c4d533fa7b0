"""The backward pass of a recurrent layer: through time in one kernel, then the gradients of all inputs by GEMMs.

Once every h is known, the gates' pre-activations no longer depend on each other: where kernels did not save them, two
GEMMs over all steps recompute them.
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

_BIAS_BITS = sum(bit for bit, name in zip(NEEDED_BITS, DIFFERENTIABLE, strict=True) if name.startswith("bias"))


def back_through_time(executor: Executor, *args: Any) -> Callable[[], tuple[Tensor | None, ...]]:
    """Run the sequential part of the backward pass; returns a function that computes the needed gradients from it."""
    arguments, (h, c, gates, *upstream, needed) = Arguments(*args[:INPUTS]), args[INPUTS:]
    saved = saved_by(executor, arguments, (h, c, gates))
    loop_grads = executor.kernels.backward(arguments.layer, saved, upstream, executor.plan)
    return lambda: gradients(executor, arguments, h, loop_grads, needed)


def back_through_time_of_both(executor: Executor, *calls: tuple) -> list[tuple[Tensor | None, ...]]:
    """The gradients of both directions of a layer, whose loops over time run in one launch."""
    each = [(Arguments(*args[:INPUTS]), *args[INPUTS:]) for args in calls]
    runs = [
        (arguments.layer, saved_by(executor, arguments, (h, c, gates)), upstream, executor.plan)
        for arguments, h, c, gates, *upstream, _ in each
    ]
    results = as_gpu(executor.kernels).backward_both(*runs)
    directions = [
        (arguments, h, grads, needed) for (arguments, h, *_, needed), grads in zip(each, results, strict=True)
    ]
    if executor.small is not None:
        return executor.small.gradients(executor.tf32, *directions)
    return [gradients(executor, *direction) for direction in directions]


def saved_by(executor: Executor, arguments: Arguments, kept: tuple[Tensor, Tensor | None, Tensor | None]) -> Saved:
    """The saved tensors for the kernels' backward, from the h, c and gates that the forward kept, or recomputed."""
    h, c, gates = kept
    rnn, lstm, gru = arguments.cell.startswith("rnn"), arguments.cell == "lstm", arguments.cell == "gru"
    if lstm and (c is None or c.shape != h.shape):  # kernels would read out of bounds
        raise RuntimeError(
            "an LSTM exported without gradients keeps nothing for them: export it with gradients enabled"
        )
    pre: Any = h if rnn else gates
    candidate = c if gru else None
    if not rnn and (executor.kernels is reference or pre is None or not pre.numel()):
        pre, candidate = _recomputed(arguments, executor.kernels.previous(h, arguments.h0, arguments.sequences))
    return Saved(pre, candidate, h, c if lstm else None)


def _recomputed(arguments: Arguments, h_prev: Tensor) -> tuple[Tensor, Tensor | None]:
    """All gates' pre-activations, from the states before each step; for a GRU's candidate, its two parts separately."""
    weight_hh, bias, bias_hh = arguments.weight_hh, arguments.bias_hh, arguments.bias_hh
    hidden, gru = weight_hh.shape[1], arguments.cell == "gru"
    added = (2 if gru else 4) * hidden  # rows of the gates whose pre-activation is the sum of both products
    if gru and bias is not None:
        bias = F.pad(bias[:added], (0, hidden))
    if arguments.bias_ih is not None:
        bias = arguments.bias_ih if bias is None else arguments.bias_ih + bias
    pre = linear(arguments.x, arguments.weight_ih, bias)
    pre[:, :added].addmm_(h_prev, weight_hh[:added].T)
    if not gru:
        return pre, None
    return pre, linear(h_prev, weight_hh[added:], None if bias_hh is None else bias_hh[added:])


def gradients(
    executor: Executor, arguments: Arguments, h: Tensor, loop_grads: LoopGradients, needed: int
) -> tuple[Tensor | None, ...]:
    """The gradients of the DIFFERENTIABLE inputs, each None unless its bit is set in `needed`.

    ``loop_grads`` is what the kernels' backward returns.
    """
    kernels, _, tf32, small = executor
    if small is not None:
        return small.gradients(tf32, (arguments, h, loop_grads, needed))[0]
    grads, grad_h0, grad_c0, totals = loop_grads
    hidden, cell, gru = arguments.weight_hh.shape[1], arguments.cell, arguments.cell == "gru"
    inputs, recurrent = input_gates(grads, cell), grads[:, : 3 * hidden] if gru else grads
    grad_biases: Any = kernels.gradients_of_biases(totals, grads.dtype, cell) if needed & _BIAS_BITS else None

    def grad_weight_hh() -> Tensor:
        grad = _weight_gradient_by_rows(recurrent, h, arguments.layer, tf32)
        if grad is None:
            before = kernels.previous(h, arguments.h0, arguments.sequences)
            grad = gradient_of_weight(recurrent, before, tf32=tf32)
        return grad.roll(-hidden, 0) if gru else grad

    compute: tuple[Callable[[], Any], ...] = (
        lambda: gradient_of_input(inputs, arguments.weight_ih, tf32),
        lambda: grad_h0,
        lambda: grad_c0,
        lambda: gradient_of_weight(inputs, arguments.x, tf32=tf32),
        grad_weight_hh,
        lambda: grad_biases[0],
        lambda: grad_biases[1],
    )
    return tuple(one() if needed & bit else None for one, bit in zip(compute, NEEDED_BITS, strict=True))


def input_gates(grads: Tensor, cell: str) -> Tensor:
    """The columns of the gates' gradients that are those of the product with the input.

    The columns of a GRU are n's part of the hidden product, r, z, and n's part of the input product, so that those of
    each product are adjacent.
    """
    return grads[:, grads.shape[1] // 4 :] if cell == "gru" else grads


def _weight_gradient_by_rows(grad: Tensor, h: Tensor, layer: Layer, tf32: bool) -> Tensor | None:
    """The gradient of the recurrent weights, if the states before all steps but the first are simply rows of h.

    None otherwise, and on CPUs, where the number of these rows would not be round.
    """
    batch, offsets, resets, reverse = layer.sequences
    if not h.is_cuda or offsets is not None or not (resets is None or transposes(grad, h, tf32)):
        return None
    first, others = (slice(-batch, None), slice(-batch)) if reverse else (slice(batch), slice(batch, None))
    earlier, zeroed = h[batch:] if reverse else h[:-batch], None if resets is None else resets[others]
    grad_weight = gradient_of_weight(grad[others], earlier, zeroed, tf32)
    if layer.h0 is None:
        return grad_weight
    start = layer.h0 if resets is None else torch.where(resets[first, None], 0.0, layer.h0)
    return add_product(grad_weight, grad[first].T, start, tf32)
