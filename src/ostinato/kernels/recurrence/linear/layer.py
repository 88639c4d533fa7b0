"""A layer of a linear recurrence as a differentiable operator, and its single steps.

The operator takes the recurrence as the text of its trace, so that exported programs and compiled graphs are
self-contained.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.operators.dispatch import gradient, gradients, operator, or_empty
from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.operators.export import refuse_packed
from ostinato.kernels.operators.vmap import Groups
from ostinato.kernels.recurrence.arguments import DIFFERENTIABLE, NOTHING, TENSORS, LayerArguments
from ostinato.kernels.recurrence.backends import kernels_on
from ostinato.kernels.recurrence.linear import torch_ops


def _shapes(call: LayerArguments) -> tuple[tuple, tuple]:
    """The shapes of h and h_last."""
    pre, directions, channels = call.pre, call.directions, call.pre.shape[-1] // call.gates
    if call.offsets is None:
        batch = pre.shape[0 if call.batch_first else 1]
    else:
        assert call.h0 is not None, "packed sequences come with an initial state, which says how many there are"
        batch = call.h0.shape[1]
    return (*pre.shape[:-1], channels), (directions, batch, channels // directions)


def _forward(
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    recurrence: str,
    batch_first: bool,
    directions: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """h, with the layout of pre and S*H channels, and h_last, (S, B, H)."""
    call = LayerArguments(pre, bias, h0, offsets, resets, recurrence, batch_first, directions, backend)
    kernels = kernels_on(backend, pre.device.type)
    if pre.numel() == 0:
        h_shape, last_shape = _shapes(call)
        return pre.new_empty(h_shape), pre.new_zeros(last_shape) if h0 is None else h0.clone()
    return torch_ops.layer(*call) if kernels is None else kernels.layer(call)


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = LayerArguments(*args)
    h_shape, last_shape = _shapes(call)
    return call.pre.new_empty(h_shape), call.pre.new_empty(last_shape)


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], output[0])
    ctx.settings = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad_h: Tensor | None, grad_h_last: Tensor | None) -> tuple:
    if grad_h is None and grad_h_last is None:
        return (None,) * len(LayerArguments._fields)
    *tensors, h = ctx.saved_tensors
    backward_args = *tensors, *ctx.settings, h, grad_h, grad_h_last
    grads = layer_scan_backward(*backward_args)
    _, bias, h0, *_ = tensors
    return grads[0], None if bias is None else grads[1], None if h0 is None else grads[2], *NOTHING


def _backward_impl(
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    recurrence: str,
    batch_first: bool,
    directions: int,
    backend: str,
    h: Tensor,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of pre, bias and h0, empty for absent inputs."""
    call = LayerArguments(pre, bias, h0, offsets, resets, recurrence, batch_first, directions, backend)
    if pre.numel() == 0:
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_h0 = None if h0 is None else torch.zeros_like(h0) if grad_h_last is None else grad_h_last.clone()
        return torch.zeros_like(pre), or_empty(grad_bias, pre), or_empty(grad_h0, pre)
    kernels = kernels_on(backend, pre.device.type)
    if kernels is None:
        with torch.no_grad():
            grads = _composite(*call, h, grad_h, grad_h_last)
            return grads[0].clone(), grads[1].clone(), grads[2].clone()
    grad_pre, grad_bias, grad_h0 = kernels.layer_backward(call, h, grad_h, grad_h_last)
    return grad_pre, or_empty(grad_bias, pre), or_empty(grad_h0, pre)


def _backward_fake(pre: Tensor, bias: Tensor | None, h0: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = None if bias is None else bias.new_empty(bias.shape)
    grad_h0 = None if h0 is None else h0.new_empty(h0.shape)
    return pre.new_empty(pre.shape), or_empty(grad_bias, pre), or_empty(grad_h0, pre)


def _composite(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *args, _, grad_h, grad_h_last = args  # type: ignore[assignment]
    wanted = [isinstance(x, Tensor) for x in args[:DIFFERENTIABLE]] + [False] * len(NOTHING)
    grads = gradients(torch_ops.layer, args, (grad_h, grad_h_last), wanted)
    return grads[0], or_empty(grads[1], args[0]), or_empty(grads[2], args[0])  # type: ignore[return-value]


def _groups(*args: Any) -> Groups:
    call = LayerArguments(*args)
    gates = call.directions * call.gates
    return (gates, gates, 1, *NOTHING), (call.directions, 1)


def _backward_groups(*args: Any) -> Groups:
    inputs, (h, h_last) = _groups(*args[:-3])
    return (*inputs, h, h, h_last), (*inputs[:DIFFERENTIABLE],)  # type: ignore[arg-type]


layer_scan_backward = gradient("layer_scan_backward", _backward_impl, _backward_fake, _backward_groups, _composite)


def _plain(*args: Any) -> tuple[Tensor, Tensor]:
    call = LayerArguments(*args)
    if call.offsets is not None:
        refuse_packed()
    return torch_ops.layer(*call._replace(backend="loop"))


layer_scan = operator("layer_scan", _forward, _fake, _context, _grad, _groups, plain=_plain, composite=torch_ops.layer)


def projected_scan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    resets: Tensor | None,
    recurrence: str,
    batch_first: bool,
    backend: str,
) -> tuple[Tensor, Tensor] | None:
    """``layer_scan`` of the pre-activations ``x @ weight.T``, if one kernel computes both faster; otherwise None."""
    if not x.is_cuda or x.dtype.itemsize != 2 or backend not in ("auto", "cuda"):
        return None
    if not is_eager((x, weight, bias, h0, resets)) or kernels_on(backend, "cuda") is None:
        return None
    from ostinato.kernels.recurrence.linear import projected

    if not projected.covers(recurrence, x, weight, bias, h0, batch_first):
        return None
    return projected.scan(recurrence, x, weight, bias, h0, resets, batch_first)


@functools.lru_cache(maxsize=1024)
def step_of(recurrence: str, batch: int, inputs: int, hidden: int, dtype: torch.dtype, device: int) -> Any:
    """The cached ``Step`` of ``cuda.py`` for one step of a layer on a GPU, or of ``cpu.py`` if `device` is -1."""
    if device < 0:
        from ostinato.kernels.recurrence.linear import cpu

        return cpu.Step(recurrence, batch, hidden, dtype)
    from ostinato.kernels.recurrence.linear import cuda

    return cuda.Step(recurrence, batch, inputs, hidden, dtype, device)
