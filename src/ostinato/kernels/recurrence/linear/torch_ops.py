"""Linear recurrences in differentiable PyTorch operations: on devices without a kernel, and for higher derivatives."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ostinato.kernels.recurrence.arguments import LayerArguments, first_sequence
from ostinato.kernels.recurrence.symbolic.graph import evaluate
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.scan import Order, choose_backend, operators
from ostinato.kernels.scan.torch_ops import LINEAR, Packing, TorchBackend, at_least_float32


class Coefficients(torch.autograd.Function):
    """a and b from a recurrence and its arguments, (..., D) or (D,) of one floating dtype.

    Derivatives are evaluated from the trace, which has the function's own gradient: autograd through the forward graph
    would ignore where the function stops a gradient, and how its ``autograd.Function``s define theirs.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(recurrence: str, *arguments: Tensor) -> tuple[Tensor, ...]:
        shape = torch.broadcast_shapes(*(x.shape for x in arguments))
        a, b = evaluate(parse(recurrence).forward, arguments)
        return a.expand(shape).clone(), b.expand(shape).clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.recurrence, *arguments = inputs
        ctx.save_for_backward(*arguments)
        ctx.save_for_forward(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        arguments = ctx.saved_tensors
        results = evaluate(parse(ctx.recurrence).backward, [*arguments, *grads])
        shape = grads[0].shape
        return None, *(g.expand(shape).sum_to_size(x.shape) for g, x in zip(results, arguments, strict=True))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        with forward_ad._set_fwd_grad_enabled(True):  # PyTorch disables it here, which would drop nested tangents
            arguments = [forward_ad.unpack_dual(x)[0] for x in ctx.saved_tensors]
            shape = torch.broadcast_shapes(*(x.shape for x in arguments))
            one, zero = arguments[0].new_ones(()), arguments[0].new_zeros(())
            results = []
            for one_hot in ((one, zero), (zero, one)):  # the function is elementwise: its gradient is its derivative
                slopes = evaluate(parse(ctx.recurrence).backward, [*arguments, *one_hot])
                terms = [s * t for s, t in zip(slopes, tangents, strict=True) if t is not None]
                results.append(sum(terms, arguments[0].new_zeros(shape)))
            return tuple(results)


def _coefficients(recurrence: str, *arguments: Tensor) -> tuple[Tensor, ...]:
    """The same as :class:`Coefficients`, for graphs that run without this library, and without gradients."""
    shape = torch.broadcast_shapes(*(x.shape for x in arguments))
    a, b = evaluate(parse(recurrence).forward, arguments)
    return a.expand(shape), b.expand(shape)


def _in_a_loop(a: Tensor, b: Tensor, h0: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """The scan without its operator, for graphs that run without this library."""
    *parts, backend = options
    return choose_backend(backend, a.device.type).linear_scan(a, b, h0, Order(*parts))


def _dtype(x: Tensor, backend: str) -> torch.dtype:
    """The dtype to compute in."""
    kernels = choose_backend(backend, x.device.type)
    return kernels.compute_dtype(x) if isinstance(kernels, TorchBackend) else at_least_float32(x)


def scan(
    recurrence: str,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
    *arguments: Tensor,
) -> tuple[Tensor, Tensor]:
    """The operator :func:`~ostinato.kernels.recurrence.linear.operator.linear_recurrence`, differentiable."""
    like = first_sequence(recurrence, arguments)
    dtype = _dtype(like, backend)
    make, run = (_coefficients, _in_a_loop) if backend == "loop" else (Coefficients.apply, operators.linear_scan)
    a, b = make(recurrence, *(x.to(dtype) for x in arguments))
    start = None if h0 is None else h0.to(dtype)
    h, h_last = run(a, b, start, cu_seqlens, resets, reverse, backend)
    return h.to(like.dtype), h_last.to(like.dtype)


def layer(*args: Any) -> tuple[Tensor, Tensor]:
    """The operator :func:`~ostinato.kernels.recurrence.linear.layer.layer_scan`, differentiable."""
    pre, bias, h0, offsets, resets, recurrence, batch_first, directions, backend = call = LayerArguments(*args)
    dtype, gates = _dtype(pre, backend), call.gates
    packing = None if offsets is None else Packing.from_offsets(offsets)
    x, masks = pre.to(dtype), [None] * directions if resets is None else list(resets)
    if packing is not None:
        x = packing.unpack(x, 0.0)
        masks = [None if m is None else packing.unpack(m[:, None], False)[..., 0] for m in masks]
    elif not batch_first:
        x, masks = x.transpose(0, 1), [None if m is None else m.t() for m in masks]
    biases = () if bias is None else bias.to(dtype).chunk(directions * gates)
    make, run = (_coefficients, _in_a_loop) if backend == "loop" else (Coefficients.apply, operators.linear_scan)
    outputs, last = [], []
    for direction, part in enumerate(x.chunk(directions, -1)):
        parameters = biases[direction * gates : (direction + 1) * gates]
        a, b = make(recurrence, *part.chunk(gates, -1), *parameters)
        if packing is not None:
            a, b = packing.masked(a, LINEAR.one), packing.masked(b, LINEAR.zero)
        start = None if h0 is None else h0[direction].to(dtype)
        h, h_last = run(a, b, start, None, masks[direction], direction == 1, backend)
        outputs.append(h)
        last.append(h_last)
    out = torch.cat(outputs, -1)
    if packing is not None:
        out = packing.pack(out)
    elif not batch_first:
        out = out.transpose(0, 1)
    return out.to(pre.dtype).contiguous(), torch.stack(last).to(pre.dtype)
