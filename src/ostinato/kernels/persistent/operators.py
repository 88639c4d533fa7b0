"""One recurrent layer and direction as a differentiable operator, by the kernels of its device.

The forward saves its inputs, the states h, an LSTM's c and, where kernels keep them, the gates' pre-activations.  With
every h known these are no longer sequential, and elsewhere the backward recomputes them by two GEMMs over all steps.
It runs through time once, and gets the weights' gradients by GEMMs.  The layer and its tensors are defined in
``arguments.py``, what is computed of them in ``reference.py``.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.matmul import cublas
from ostinato.kernels.matmul.gemm import (
    add_product,
    gradient_of_input,
    gradient_of_weight,
    linear,
    linear_into,
    transposes,
)
from ostinato.kernels.matmul.precision import layers_round
from ostinato.kernels.operators.dispatch import gradient, operator, or_empty
from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.persistent import plain, reference
from ostinato.kernels.persistent.arguments import DIFFERENTIABLE, INPUTS, NEEDED_BITS, TENSORS, Arguments, Layer, Saved
from ostinato.kernels.persistent.backends import in_portions, is_captured, kernels_on, plan_layer
from ostinato.kernels.persistent.interface import Found, Kernels, Results, SmallProducts
from ostinato.kernels.persistent.modes import is_vmapped_last, without_autocast
from ostinato.kernels.persistent.plan import GATES, Call, Plan

NOTHING = (None,) * (INPUTS - len(DIFFERENTIABLE))  # the gradients of the other inputs
OF_BIASES = sum(bit for bit, name in zip(NEEDED_BITS, DIFFERENTIABLE, strict=True) if name.startswith("bias"))


class Executor(NamedTuple):
    """Who computes a layer, chosen by its sizes and mask alone.

    Called with the operator's arguments, it returns its results, but None for those that are absent.
    """

    kernels: Kernels  # the device's, or the reference
    plan: Plan
    rounds: bool  # whether products of float32 may be rounded to tf32
    small: SmallProducts | None  # of a small layer

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        given = Arguments(*args)
        with without_autocast(given.x.device.type):  # the tensors are converted already
            projected = self.project(given.x, given.weight_ih, given.bias_ih)
            found = self.kernels.forward(self.layer_of(given), projected, self.plan, given.training)
        return _results(given, projected, found)

    def both(self, *calls: tuple) -> list[tuple]:
        """The results of both directions of a layer, whose loops are one launch."""
        each = [Arguments(*args) for args in calls]
        with without_autocast(each[0].x.device.type):
            products = [(given.x, given.weight_ih, given.bias_ih) for given in each]
            if self.small is not None:
                projected = self.small.linear(self.rounds, *((*product, None) for product in products))
            else:
                projected = [self.project(*product) for product in products]
            runs = [(given.layer, x, self.plan, given.training) for given, x in zip(each, projected, strict=True)]
            found = in_portions(self.kernels).forward_both(*runs)
        return [*map(_results, each, projected, found)]

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor | None = None) -> Tensor:
        """The product with the input, written `into` this tensor, if given."""
        if self.small is not None:
            return self.small.linear(self.rounds, (x, weight, bias, into))[0]
        product = x, weight, bias, self.rounds
        return linear(*product) if into is None else linear_into(into, *product)

    def layer_of(self, given: Arguments) -> Layer:
        """The layer as the kernels take it."""
        layer, mask = given.layer, given.mask_hh
        if mask is None or not mask.is_cuda or given.training or self.plan.path in ("block", "sparse"):
            return layer
        # The dense kernels multiply all weights; those of pruned ones read only what the mask keeps.
        return layer._replace(weight_hh=torch.where(mask, layer.weight_hh, 0.0))


def _results(given: Arguments, projected: Tensor, found: Results) -> tuple:
    """The operator's results, None for those that are absent, of what a forward returns."""
    output, h_n, c_n, c = found
    c_width, gates_width = _kept_widths(given)
    return output, h_n, c_n, c if c_width else None, projected if gates_width else None


def executor_of(*args: Any, bidirectional: bool = False) -> Executor:
    """Who computes a call with the operator's arguments: a device's kernels, or the loop over time where none fits."""
    given = Arguments(*args)
    plan = plan_layer(given.mask_hh, call_of(given)._replace(bidirectional=bidirectional))
    kernels: Kernels = kernels_on(given.x.device) if plan.has_kernel else reference
    captured = plan.has_kernel and is_captured(given.x.device)
    if captured:
        cublas.create_handle(given.x.device)  # calls before the capture may not have needed one
    small = _products_of_small(kernels, given, captured)
    return Executor(kernels, plan, layers_round(given.x.device, given.x.dtype), small)


def _products_of_small(kernels: Kernels, given: Arguments, captured: bool) -> SmallProducts | None:
    """What computes the products of a layer together, if it is small and there is such, else None."""
    small, hidden = kernels.small, given.weight_hh.shape[1]
    if small is None:
        return None
    rows, channels = given.x.shape
    sizes = rows, GATES[given.cell] * hidden, max(channels, hidden)
    of_call = given.x.get_device(), given.x.dtype, *sizes, given.training, captured
    return small if small.is_small(*of_call) else None


def call_of(given: Arguments) -> Call:
    """What the plan depends on."""
    x, sequences = given.x, given.sequences
    return Call(
        x.device,
        given.cell,
        given.weight_hh.shape[1],
        given.batch,
        x.dtype,
        given.training,
        sequences.length(x),
        given.path,
        given.at_once,
        resets=given.resets is not None,
        packed=given.offsets is not None,
    )


def _recurrent_layer(
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    mask_hh: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    batch: int,
    cell: str,
    reverse: bool,
    training: bool,
    path: str | None,
    at_once: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, h_n, c_n, and what is kept for the backward: c and the gates' pre-activations; empty for absent ones.

    Its signature is the operator's schema; all else names the arguments by
    :class:`~ostinato.kernels.persistent.arguments.Arguments`.
    """
    tensors = x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets
    args = *tensors, batch, cell, reverse, training, path, at_once
    if not batch:
        return empty_results(*args)  # which have no elements
    return whole(args, executor_of(*args)(*args))


def whole(args: tuple, results: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """An executor's results as the operator's, with empty tensors for absent ones."""
    output, h_n, c_n, c, gates = results
    if c is None:
        given = Arguments(*args)
        c = output.new_empty(len(output), _kept_widths(given)[0], dtype=_dtype_of_c(given))
    return output, h_n, or_empty(c_n, output), c, output.new_empty(len(output), 0) if gates is None else gates


def _dtype_of_c(given: Arguments) -> torch.dtype:
    dtype = given.weight_hh.dtype
    return torch.promote_types(dtype, torch.float32) if given.cell == "lstm" else dtype


def _kept_widths(given: Arguments) -> tuple[int, int]:
    """The widths of the saved c and of the saved pre-activations, 0 of what is not kept.

    A GRU, which has no c, keeps the recurrent part of its candidate's pre-activation there, if it keeps any.
    """
    if not given.training:
        return 0, 0
    cell, hidden = given.cell, given.weight_hh.shape[1]
    keeps_gates = kernels_on(given.weight_hh.device).keeps_gates(cell)
    return hidden if cell == "lstm" or keeps_gates else 0, GATES[cell] * hidden if keeps_gates else 0


def empty_results(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tensors like the operator's results."""
    given = Arguments(*args)
    x, hidden = given.x, given.weight_hh.shape[1]
    output, h_n = x.new_empty(x.shape[0], hidden), x.new_empty(given.batch, hidden)
    c_width, gates_width = _kept_widths(given)
    c = x.new_empty(x.shape[0], c_width, dtype=_dtype_of_c(given))
    c_n = torch.empty_like(h_n) if given.cell == "lstm" else x.new_empty(0)
    return output, h_n, c_n, c, x.new_empty(x.shape[0], gates_width)


def context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    h, _, _, c, gates = output
    # As an executor has it, where the operator's are empty: checkpoints compare how many tensors two calls save.
    kept = (None if x is None or not x.shape[-1] else x for x in (c, gates))
    ctx.save_for_backward(*inputs[:TENSORS], h, *kept)
    ctx.settings = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def inputs(part: Any) -> tuple:
    """The operator's arguments, of what a part of several calls has kept."""
    return *part.saved_tensors[:TENSORS], *part.settings


def grad(ctx: Any, *grads: Tensor | None) -> tuple:
    args = backward_arguments(ctx, grads)
    executor, differentiable = getattr(ctx, "run", None), torch.is_grad_enabled()
    if isinstance(executor, Executor) and not differentiable and is_eager(args):
        with without_autocast(args[0].device.type):
            return *back_through_time(executor, *args)(), *NOTHING
    inputs, (h, c, gates, *rest) = args[:INPUTS], args[INPUTS:]
    kept = [h, or_empty(c, h), or_empty(gates, h)]
    if differentiable:  # what the forward kept follows from its inputs, whose derivatives are all
        kept = [x.detach() for x in kept]
    # The rows of a Jacobian are taken at once by a loop, one after the other by kernels.
    vmapped = differentiable and is_vmapped_last()
    run = _differentiable_gradients if vmapped else recurrent_layer_backward
    return _of_all_inputs(ctx, run(*inputs, *kept, *rest))


def backward_arguments(ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
    """What ``recurrent_layer_backward`` is called with: the forward's arguments, what it kept, gradients, `needed`."""
    needed = sum(compress(NEEDED_BITS, ctx.needs_input_grad))
    tensors = ctx.saved_tensors  # asked for once: checkpoints compute them anew
    return *tensors[:TENSORS], *ctx.settings, *tensors[TENSORS:], *grads[:3], needed


def _of_all_inputs(ctx: Any, found: Sequence[Tensor | None]) -> tuple:
    """Gradients of the first arguments as those of all, None where they are not needed."""
    needed = ctx.needs_input_grad[: len(DIFFERENTIABLE)]
    return *(grad if need else None for grad, need in zip(found, needed, strict=True)), *NOTHING


def _differentiable_gradients(*args: Any) -> tuple[Tensor, ...]:
    """As :func:`_recurrent_layer_backward`, through the reference's loop, which is differentiable itself."""
    given, (*_, grad_output, grad_h_n, grad_c_n, needed) = Arguments(*args[:INPUTS]), args[INPUTS:]
    names = [*compress(DIFFERENTIABLE, (needed & bit for bit in NEEDED_BITS))]
    grads = grad_output, grad_h_n, grad_c_n

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        changed: Any = zip(names, inputs, strict=True)
        own = given._replace(**dict(changed))
        results: Any = reference.forward(own.layer, F.linear(own.x, own.weight_ih, own.bias_ih))[:3]
        return tuple(y for y, grad in zip(results, grads, strict=True) if grad is not None)

    pull: Any = torch.func.vjp(forward, *(getattr(given, name) for name in names))[1]
    found = dict(zip(names, pull(tuple(grad for grad in grads if grad is not None)), strict=True))
    return tuple(or_empty(found.get(name), given.x) for name in DIFFERENTIABLE)


def _recurrent_layer_backward(
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    mask_hh: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    batch: int,
    cell: str,
    reverse: bool,
    training: bool,
    path: str | None,
    at_once: int,
    h: Tensor,
    c: Tensor,
    gates: Tensor,
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    needed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the DIFFERENTIABLE inputs, each empty unless its bit is set in `needed`."""
    tensors = x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets
    args = *tensors, batch, cell, reverse, training, path, at_once
    kept_and_grads = h, c, gates, grad_output, grad_h_n, grad_c_n
    if not batch:
        return tuple(x.zero_() for x in _recurrent_layer_backward_fake(*args, needed))  # type: ignore[return-value]
    with without_autocast(x.device.type):
        found: Any = back_through_time(executor_of(*args), *args, *kept_and_grads, needed)()
    return tuple(or_empty(grad, x) for grad in found)  # type: ignore[return-value]


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
    found = in_portions(executor.kernels).backward_both(*runs)
    of_each = [(given, h, own, needed) for (given, h, *_, needed), own in zip(each, found, strict=True)]
    if executor.small is not None:
        return executor.small.gradients(executor.rounds, *of_each)
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


def gradients(executor: Executor, given: Arguments, h: Tensor, found: Found, needed: int) -> tuple[Tensor | None, ...]:
    """The gradients of the DIFFERENTIABLE inputs, None unless its bit is set in `needed`.

    ``found`` is what the kernels' backward returns.
    """
    kernels, _, rounds, small = executor
    if small is not None:
        return small.gradients(rounds, (given, h, found, needed))[0]
    grads, grad_h0, grad_c0, totals = found
    hidden, cell, gru = given.weight_hh.shape[1], given.cell, given.cell == "gru"
    inputs, recurrent = of_input(grads, cell), grads[:, : 3 * hidden] if gru else grads
    of_biases: Any = kernels.gradients_of_biases(totals, grads.dtype, cell) if needed & OF_BIASES else None

    def of_weight_hh() -> Tensor:
        found = _weight_gradient_by_rows(recurrent, h, given.layer, rounds)
        if found is None:
            before = kernels.previous(h, given.h0, given.sequences)
            found = gradient_of_weight(recurrent, before, rounds=rounds)
        return found.roll(-hidden, 0) if gru else found

    compute: tuple[Callable[[], Any], ...] = (
        lambda: gradient_of_input(inputs, given.weight_ih, rounds),
        lambda: grad_h0,
        lambda: grad_c0,
        lambda: gradient_of_weight(inputs, given.x, rounds=rounds),
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


def _weight_gradient_by_rows(grad: Tensor, h: Tensor, layer: Layer, rounds: bool) -> Tensor | None:
    """The gradient of the recurrent weights, if the states before all steps but the first are simply rows of h.

    On CPUs it is left out: their number would not be round.
    """
    batch, offsets, resets, reverse = layer.sequences
    if not h.is_cuda or offsets is not None or not (resets is None or transposes(grad, h, rounds)):
        return None
    first, others = (slice(-batch, None), slice(-batch)) if reverse else (slice(batch), slice(batch, None))
    earlier, zeroed = h[batch:] if reverse else h[:-batch], None if resets is None else resets[others]
    found = gradient_of_weight(grad[others], earlier, zeroed, rounds)
    if layer.h0 is None:
        return found
    start = layer.h0 if resets is None else torch.where(resets[first, None], 0.0, layer.h0)
    return add_product(found, grad[first].T, start, rounds)


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


def _recurrent_layer_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    tensors, needed = args[: len(DIFFERENTIABLE)], args[-1]
    return tuple(args[0].new_empty(x.shape if needed & bit else 0) for x, bit in zip(tensors, NEEDED_BITS, strict=True))


recurrent_layer_backward = gradient(
    "recurrent_layer_backward",
    _recurrent_layer_backward,
    _recurrent_layer_backward_fake,
    composite=_differentiable_gradients,
)
recurrent_layer = operator(
    "recurrent_layer",
    _recurrent_layer,
    empty_results,
    context,
    grad,
    plain=plain.recurrent_layer,
    prepare=executor_of,
)
