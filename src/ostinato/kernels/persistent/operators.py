"""One recurrent layer and direction as a differentiable operator, by the kernels of its device.

The forward saves its inputs, the states h, an LSTM's c and, where kernels keep them, the gates' pre-activations.  With
every h known these are no longer sequential, and elsewhere the backward recomputes them by two GEMMs over all steps.
It runs through time once, and gets the weights' gradients by GEMMs.  The layer and its tensors are defined in
``reference.py``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ostinato.kernels.dispatch import gradient, of_two, operator, or_empty
from ostinato.kernels.eager import is_dense, is_eager
from ostinato.kernels.gemm import gradient_of_input, gradient_of_weight, linear, transposes
from ostinato.kernels.persistent import plain, reference
from ostinato.kernels.persistent.backends import kernels_on, plan_layer
from ostinato.kernels.persistent.plan import GATES, Call, Plan
from ostinato.kernels.persistent.sequences import Sequences
from ostinato.kernels.streams import beside


def can_take(tensors: list[Tensor]) -> bool:
    """Whether the operator can be called: under what needs no rule of its own, which tangents and tracers do."""
    if forward_ad._current_level >= 0 or torch._C._is_tracing():
        return False
    if is_in_torch_dispatch_mode():
        _count_operations()
    return torch._C._functorch.peek_interpreter_stack() is not None or all(map(is_dense, tensors))


@functools.cache
def _count_operations() -> None:
    """Tell PyTorch's counter of operations, which is such a mode, how many of them a layer takes."""
    from torch.utils.flop_counter import register_flop_formula  # warns where there is a GPU without Triton

    def forward(x: Any, _h0: Any, _c0: Any, weight_ih: Any, weight_hh: Any, *_: Any, out_shape: Any) -> int:
        return 2 * x[0] * (math.prod(weight_ih) + math.prod(weight_hh))

    def backward(*args: Any, out_shape: Any) -> int:
        return 2 * forward(*args, out_shape=None)

    register_flop_formula(torch.ops.ostinato.recurrent_layer)(forward)
    register_flop_formula(torch.ops.ostinato.recurrent_layer_backward)(backward)


def is_vmapped() -> bool:
    """Whether ``torch.vmap`` is the innermost function transform: torch's kernels have no rule for it."""
    innermost = torch._C._functorch.peek_interpreter_stack()
    return innermost is not None and innermost.key() == torch._C._functorch.TransformType.Vmap


# On a GPU weight_hh may be any number where mask_hh is False, unless it is trained.
# recurrent_layer(x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets, batch, cell, reverse,
# training, path, directions) -> output, h_n, c_n, and what is kept for the backward, c and the gates' arguments; empty
# where there is none


class _Layer(NamedTuple):
    """Who computes a layer, which depends on sizes and mask only; called, the operator."""

    kernels: Any
    plan: Plan

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets, batch, cell, reverse, training = (
            args[:14]
        )
        if torch.is_autocast_enabled(x.device.type):  # the tensors are converted already
            with torch.autocast(x.device.type, enabled=False):
                return self(*args)
        if mask_hh is not None and x.is_cuda and not training and self.plan.path not in ("block", "sparse"):
            weight_hh = torch.where(mask_hh, weight_hh, 0.0)  # which these kernels need not, as they look weights up
        projected = linear(x, weight_ih, bias_ih)
        sequences = Sequences(batch, offsets, resets, reverse)
        layer = projected, h0, c0, weight_hh, bias_hh, mask_hh, cell, sequences
        output, h_n, c_n, c = self.kernels.forward(*layer, self.plan, training)
        c_width, gates_width = _kept_widths(x, cell, weight_hh.shape[1], training)
        if c is None or not c_width:
            c = x.new_empty(len(x), c_width, dtype=_dtype_of_c(x, cell))
        return output, h_n, or_empty(c_n, x), c, projected if gates_width else x.new_empty(len(x), 0)


def _layer_of(*args: Any) -> _Layer:
    """That of the operator's arguments: its kernels, or the loop over time where none fits."""
    x, _, _, _, weight_hh, _, _, mask_hh, offsets, resets, batch, cell, _, training, path, directions = args
    sizes, steps = (weight_hh.shape[1], batch, x.dtype), Sequences(batch, offsets).length(x)
    call = Call(x.device, cell, *sizes, training, steps, path, directions, resets is not None, offsets is not None)
    plan = plan_layer(mask_hh, call)
    return _Layer(reference if plan.path == "steps" else kernels_on(x.device), plan)


def without_autocast(device_type: str) -> AbstractContextManager:
    """Disables autocast, if it is enabled."""
    is_on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


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
    directions: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets
    args = *tensors, batch, cell, reverse, training, path, directions
    return _layer_of(*args)(*args)


def _dtype_of_c(x: Tensor, cell: str) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32) if cell == "lstm" else x.dtype


def _kept_widths(x: Tensor, cell: str, hidden: int, training: bool) -> tuple[int, int]:
    """The widths of the saved c and the saved pre-activations.

    Where those are kept, so is for a GRU in c's place the recurrent part of its candidate's.
    """
    if not training:
        return 0, 0
    keeps_gates = kernels_on(x.device).keeps_gates(cell)
    return hidden if cell == "lstm" or keeps_gates else 0, GATES[cell] * hidden if keeps_gates else 0


def _recurrent_layer_fake(
    x: Tensor, h0: Any, c0: Any, weight_ih: Tensor, weight_hh: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, cell, _, training, *_ = others[-6:]
    hidden = weight_hh.shape[1]
    output, h_n = x.new_empty(x.shape[0], hidden), x.new_empty(batch, hidden)
    c_width, gates_width = _kept_widths(x, cell, hidden, training)
    c = x.new_empty(x.shape[0], c_width, dtype=_dtype_of_c(x, cell))
    c_n = torch.empty_like(h_n) if cell == "lstm" else x.new_empty(0)
    return output, h_n, c_n, c, x.new_empty(x.shape[0], gates_width)


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.batch, ctx.cell, ctx.reverse, _, ctx.path, ctx.directions = inputs
    h, _, _, c, gates = output
    ctx.save_for_backward(*tensors, h, c, gates)
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, *grads: Tensor | None) -> tuple:
    args = _backward_arguments(ctx, grads)
    layer = getattr(ctx, "run", None)
    if torch.is_grad_enabled():
        kept = (x.detach() for x in args[10:13])  # which follow from the others, whose derivatives are all
        args = *args[:10], *kept, *args[13:]
        # The rows of a Jacobian are taken at once by a loop, one after the other by kernels.
        run = _differentiable_gradients if is_vmapped() else recurrent_layer_backward
        return _in_place(ctx, run(*args))
    if not isinstance(layer, _Layer) or not is_eager(args[:16]):  # the others are no tensors
        return _in_place(ctx, recurrent_layer_backward(*args))
    with without_autocast(args[0].device.type):
        return *_back_through_time(layer, *args)(), *[None] * 9


_BITS = tuple(1 << i for i in range(7))


def _backward_arguments(ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
    needed = sum(compress(_BITS, ctx.needs_input_grad))
    return *ctx.saved_tensors, *grads[:3], ctx.batch, ctx.cell, ctx.reverse, ctx.path, ctx.directions, needed


def _in_place(ctx: Any, found: Sequence[Tensor | None]) -> tuple:
    """Gradients of the first arguments as those of all, None where they are not needed."""
    return *(grad if need else None for grad, need in zip(found, ctx.needs_input_grad[:7], strict=True)), *[None] * 9


def _differentiable_gradients(*args: Any) -> tuple[Tensor, ...]:
    """As :func:`_recurrent_layer_backward`, through the reference's loop, which is differentiable itself."""
    *grads, batch, cell, reverse, _, _, needed = args[13:]
    places = [k for k, bit in enumerate(_BITS) if needed & bit]

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        given = [*args[:10]]
        for place, x in zip(places, inputs, strict=True):
            given[place] = x
        x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets = given
        sequences = Sequences(batch, offsets, resets, reverse)
        layer = F.linear(x, weight_ih, bias_ih), h0, c0, weight_hh, bias_hh, mask_hh, cell, sequences
        results: Any = reference.forward(*layer)[:3]
        return tuple(y for y, grad in zip(results, grads, strict=True) if grad is not None)

    pull: Any = torch.func.vjp(forward, *(args[k] for k in places))[1]
    found = dict(zip(places, pull(tuple(grad for grad in grads if grad is not None)), strict=True))
    return tuple(or_empty(found.get(k), args[0]) for k in range(len(_BITS)))


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
    h: Tensor,
    c: Tensor,
    gates: Tensor,
    grad_output: Tensor | None,
    grad_h_n: Tensor | None,
    grad_c_n: Tensor | None,
    batch: int,
    cell: str,
    reverse: bool,
    path: str | None,
    directions: int,
    needed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the first seven tensors, each empty unless its bit is set in `needed`."""
    tensors = x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets, h, c, gates
    grads = grad_output, grad_h_n, grad_c_n
    layer = _layer_of(*tensors[:10], batch, cell, reverse, True, path, directions)
    with without_autocast(x.device.type):
        found: Any = _back_through_time(layer, *tensors, *grads, batch, cell, reverse, path, directions, needed)()
    return tuple(or_empty(grad, x) for grad in found)  # type: ignore[return-value]


def _back_through_time(layer: _Layer, *args: Any) -> Callable[[], tuple[Tensor | None, ...]]:
    """The sequential part of the backward; the function that it returns computes the gradients that are needed."""
    x, h0, c0, weight_ih, weight_hh, bias_ih, bias_hh, mask_hh, offsets, resets, h, c, gates = args[:13]
    *grads_of_results, batch, cell, reverse, _, _, needed = args[13:]
    (kernels, plan), hidden, gru = layer, weight_hh.shape[1], cell == "gru"
    sequences = Sequences(batch, offsets, resets, reverse)
    recomputes = not cell.startswith("rnn") and (kernels is reference or not gates.numel())

    def before() -> Tensor:
        states: Tensor = kernels.previous(h, h0, sequences)
        return states

    if recomputes:
        pre, candidate = _arguments(x, before(), weight_ih, weight_hh, bias_ih, bias_hh, cell)
    else:
        pre, candidate = (h, None) if cell.startswith("rnn") else (gates, c if gru else None)
    through = pre, candidate, h, h0, c if cell == "lstm" else None, c0, weight_hh, mask_hh
    grads, grad_h0, grad_c0, totals = kernels.backward(*through, *grads_of_results, cell, sequences, plan)

    def gradients() -> tuple[Tensor | None, ...]:
        # A GRU's grads are n's share of the hidden product, r, z, n's share of the input's: three neighbours for each.
        inputs, recurrent = (grads[:, hidden:], grads[:, : 3 * hidden]) if gru else (grads, grads)
        of_biases: Any = kernels.gradients_of_biases(totals, grads.dtype, cell) if needed >> 5 else None

        def of_weight_hh() -> Tensor:
            if not x.is_cuda or offsets is not None or (resets is not None and not transposes(recurrent, h)):
                return gradient_of_weight(recurrent, before())
            # The states before all steps but the first are simply rows of h; on CPUs their number would not be round.
            first, others = (slice(-batch, None), slice(-batch)) if reverse else (slice(batch), slice(batch, None))
            earlier, zeroed = h[batch:] if reverse else h[:-batch], None if resets is None else resets[others]
            found = gradient_of_weight(recurrent[others], earlier, zeroed)
            if h0 is None:
                return found
            start = h0 if resets is None else torch.where(resets[first, None], 0.0, h0)
            return found.addmm_(recurrent[first].T, start)

        compute: tuple[Callable[[], Any], ...] = (
            lambda: gradient_of_input(inputs, weight_ih),
            lambda: grad_h0,
            lambda: grad_c0,
            lambda: gradient_of_weight(inputs, x),
            lambda: of_weight_hh().roll(-hidden, 0) if gru else of_weight_hh(),
            lambda: of_biases[0],
            lambda: of_biases[1],
        )
        return tuple(one() if needed >> i & 1 else None for i, one in enumerate(compute))

    return gradients


def _arguments(
    x: Tensor,
    h_prev: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    cell: str,
) -> tuple[Tensor, Tensor | None]:
    """All gates' pre-activations; of a GRU's candidate the two parts separately."""
    hidden, gru = weight_hh.shape[1], cell == "gru"
    added = (2 if gru else 4) * hidden  # gates whose argument is a sum of both products
    bias = bias_hh if bias_hh is None or not gru else F.pad(bias_hh[:added], (0, hidden))
    if bias_ih is not None:
        bias = bias_ih if bias is None else bias_ih + bias
    pre = linear(x, weight_ih, bias)
    pre[:, :added].addmm_(h_prev, weight_hh[:added].T)
    if not gru:
        return pre, None
    return pre, linear(h_prev, weight_hh[added:], None if bias_hh is None else bias_hh[added:])


def _recurrent_layer_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    tensors, needed = args[:7], args[-1]
    return tuple(args[0].new_empty(x.shape if needed >> i & 1 else 0) for i, x in enumerate(tensors))


recurrent_layer_backward = gradient(
    "recurrent_layer_backward",
    _recurrent_layer_backward,
    _recurrent_layer_backward_fake,
    composite=_differentiable_gradients,
)
recurrent_layer = operator(
    "recurrent_layer",
    _recurrent_layer,
    _recurrent_layer_fake,
    _context,
    _grad,
    plain=plain.recurrent_layer,
    prepare=_layer_of,
)


class _TwoLayers(NamedTuple):
    """Who computes both directions; called with the arguments of each, their operators beside each other."""

    first: _Layer
    second: _Layer

    def __call__(self, first: tuple, second: tuple) -> tuple[Any, Any]:
        return beside(_Layer.__call__, (self.first, *first), (self.second, *second))


def _layers_of(first: tuple, second: tuple) -> _TwoLayers:
    return _TwoLayers(_layer_of(*first), _layer_of(*second))


def _both_backward(
    layers: _TwoLayers, contexts: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]
) -> list[tuple]:
    calls = tuple(map(_backward_arguments, contexts, grads))
    if torch.is_grad_enabled() or not is_eager([*calls[0], *calls[1]]):
        return [_grad(ctx, *given) for ctx, given in zip(contexts, grads, strict=True)]
    first, second = ((layer, *args) for layer, args in zip(layers, calls, strict=True))
    with without_autocast(calls[0][0].device.type):
        return [(*gradients(), *[None] * 9) for gradients in beside(_back_through_time, first, second)]


recurrent_layers = of_two("recurrent_layers", recurrent_layer, _layers_of, _context, _both_backward)
"""Both directions' ``recurrent_layer``, given the arguments of each, beside each other on a GPU."""
