"""A layer of a linear recurrence as a differentiable operator, and its single steps.

The operator takes the recurrence as the text of its trace, so that exported programs and compiled graphs are
self-contained.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.dispatch import gradient, gradients, operator, or_empty
from ostinato.kernels.eager import is_eager
from ostinato.kernels.export import refuse_packed
from ostinato.kernels.recurrence.backends import kernels_on
from ostinato.kernels.recurrence.linear import torch_ops
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.vmap import Groups

# layer_scan(pre, bias, h0, offsets, resets, recurrence, batch_first, directions, backend) -> h, h_last
#
# A layer of a linear recurrence whose arguments, G pre-activations, are side by side.  pre is (B, T, S*G*H), or
# (T, B, S*G*H) unless batch_first, or (rows, S*G*H) if offsets, (T+1,) int32, packs it as PackedSequence does: step t
# of sequence b is row offsets[t] + b if that is below offsets[t+1].  S is `directions`; the second runs backwards in
# time.  resets, bool, (S, ...), is for each laid out as pre without channels.  bias, (S*G*H,), are G parameters more,
# in a dtype of its own.  h is laid out as pre with S*H channels; h_last is (S, B, H), as is h0.


def _gates(recurrence: str) -> int:
    return sum(parse(recurrence).sequences)


def _layer_shapes(
    pre: Tensor, offsets: Tensor | None, h0: Tensor | None, recurrence: str, batch_first: bool, directions: int
) -> tuple[tuple, tuple]:
    """Shapes of h and h_last."""
    channels = pre.shape[-1] // _gates(recurrence)
    if offsets is None:
        batch = pre.shape[0 if batch_first else 1]
    else:
        assert h0 is not None, "packed sequences come with an initial state, which says how many there are"
        batch = h0.shape[1]
    return (*pre.shape[:-1], channels), (directions, batch, channels // directions)


def _layer_scan(
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
    kernels = kernels_on(backend, pre.device.type)
    if pre.numel() == 0:
        h_shape, last_shape = _layer_shapes(pre, offsets, h0, recurrence, batch_first, directions)
        return pre.new_empty(h_shape), pre.new_zeros(last_shape) if h0 is None else h0.clone()
    if kernels is None:
        return torch_ops.layer(pre, bias, h0, offsets, resets, recurrence, batch_first, directions, backend)
    return kernels.layer(recurrence, pre.contiguous(), bias, h0, offsets, resets, batch_first, directions)


def _layer_scan_fake(pre: Tensor, _bias: Any, h0: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    offsets, _, *settings, _ = others
    h_shape, last_shape = _layer_shapes(pre, offsets, h0, *settings)
    return pre.new_empty(h_shape), pre.new_empty(last_shape)


def _layer_scan_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    pre, bias, h0, offsets, resets, *ctx.settings = inputs
    ctx.save_for_backward(pre, bias, h0, output[0], offsets, resets)
    ctx.set_materialize_grads(False)


def _layer_scan_grad(ctx: Any, grad_h: Tensor | None, grad_h_last: Tensor | None) -> tuple:
    if grad_h is None and grad_h_last is None:
        return (None,) * 9
    pre, bias, h0, h, offsets, resets = ctx.saved_tensors
    grads = layer_scan_backward(pre, bias, h0, h, grad_h, grad_h_last, offsets, resets, *ctx.settings)
    return (grads[0], None if bias is None else grads[1], None if h0 is None else grads[2]) + (None,) * 6


def _layer_scan_backward_impl(
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    h: Tensor,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    offsets: Tensor | None,
    resets: Tensor | None,
    recurrence: str,
    batch_first: bool,
    directions: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if pre.numel() == 0:
        grad_bias = None if bias is None else torch.zeros_like(bias)
        grad_h0 = None if h0 is None else torch.zeros_like(h0) if grad_h_last is None else grad_h_last.clone()
        return torch.zeros_like(pre), or_empty(grad_bias, pre), or_empty(grad_h0, pre)
    kernels = kernels_on(backend, pre.device.type)
    settings = recurrence, batch_first, directions, backend
    if kernels is None:
        args = pre, bias, h0, h, grad_h, grad_h_last, offsets, resets
        with torch.no_grad():
            grads = _layer_scan_backward_composite(*args, *settings)
            return grads[0].clone(), grads[1].clone(), grads[2].clone()
    args = pre.contiguous(), bias, h0, h, grad_h, grad_h_last, offsets, resets
    grad_pre, grad_bias, grad_h0 = kernels.layer_backward(recurrence, *args, batch_first, directions)
    return grad_pre, or_empty(grad_bias, pre), or_empty(grad_h0, pre)


def _layer_scan_backward_fake(
    pre: Tensor, bias: Tensor | None, h0: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    grad_bias = None if bias is None else bias.new_empty(bias.shape)
    grad_h0 = None if h0 is None else h0.new_empty(h0.shape)
    return pre.new_empty(pre.shape), or_empty(grad_bias, pre), or_empty(grad_h0, pre)


def _layer_scan_backward_composite(
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    h: Tensor,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    args = pre, bias, h0, *settings
    wanted = [isinstance(x, Tensor) for x in args[:3]] + [False] * len(settings)
    grads = gradients(torch_ops.layer, args, (grad_h, grad_h_last), wanted)
    return grads[0], or_empty(grads[1], pre), or_empty(grads[2], pre)  # type: ignore[return-value]


def _layer_scan_groups(*args: Any) -> Groups:
    gates = args[7] * _gates(args[5])
    return (gates, gates, 1) + (None,) * 6, (args[7], 1)


def _layer_scan_backward_groups(*args: Any) -> Groups:
    directions = args[10]
    gates = directions * _gates(args[8])
    return (gates, gates, 1, directions, directions, 1) + (None,) * 6, (gates, gates, 1)


layer_scan_backward = gradient(
    "layer_scan_backward",
    _layer_scan_backward_impl,
    _layer_scan_backward_fake,
    _layer_scan_backward_groups,
    _layer_scan_backward_composite,
)


def _plain_layer(*args: Any) -> tuple[Tensor, Tensor]:
    if args[3] is not None:  # offsets
        refuse_packed()
    pre, bias, h0, _, resets, recurrence, batch_first, directions, _ = args
    return torch_ops.layer(pre, bias, h0, None, resets, recurrence, batch_first, directions, "loop")


layer_scan = operator(
    "layer_scan",
    _layer_scan,
    _layer_scan_fake,
    _layer_scan_context,
    _layer_scan_grad,
    _layer_scan_groups,
    plain=_plain_layer,
    composite=torch_ops.layer,
)


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
    """``layer_scan`` of ``x @ weight.T``, where there is a kernel for both that is faster; None elsewhere."""
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
    """What makes one step of a layer on a GPU, or for -1 on a CPU: ``Step`` of ``cuda.py`` or ``cpu.py``."""
    if device < 0:
        from ostinato.kernels.recurrence.linear import cpu

        return cpu.Step(recurrence, batch, hidden, dtype)
    from ostinato.kernels.recurrence.linear import cuda

    return cuda.Step(recurrence, batch, inputs, hidden, dtype, device)
