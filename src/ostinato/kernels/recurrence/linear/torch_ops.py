"""Linear recurrences in differentiable PyTorch operations: on devices without a kernel, and for higher derivatives."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.recurrence.arguments import LayerArguments, first_sequence
from ostinato.kernels.recurrence.symbolic.differentiable import differentiable
from ostinato.kernels.recurrence.symbolic.graph import evaluate
from ostinato.kernels.recurrence.symbolic.trace import Trace, parse
from ostinato.kernels.scan import Order, choose_backend, operators
from ostinato.kernels.scan.torch_ops import LINEAR, Packing, TorchBackend, at_least_float32


def _coefficients_and_scan(recurrence: str, backend: str) -> tuple[Callable[..., tuple], Callable[..., tuple]]:
    """The functions that compute a and b from the arguments, and that scan them.

    With the backend "loop", for graphs that run without this library, they consist of PyTorch operations alone.
    """
    trace = parse(recurrence)
    if backend == "loop":
        return functools.partial(_coefficients, trace), _in_a_loop
    return differentiable(trace), operators.linear_scan


def _coefficients(trace: Trace, *arguments: Tensor) -> tuple[Tensor, ...]:
    shape = torch.broadcast_shapes(*(x.shape for x in arguments))
    a, b = evaluate(trace.forward, arguments)
    return a.expand(shape), b.expand(shape)


def _in_a_loop(a: Tensor, b: Tensor, h0: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
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
    coefficients, run = _coefficients_and_scan(recurrence, backend)
    a, b = coefficients(*(x.to(dtype) for x in arguments))
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
    coefficients, run = _coefficients_and_scan(recurrence, backend)
    outputs, last = [], []
    for direction, part in enumerate(x.chunk(directions, -1)):
        parameters = biases[direction * gates : (direction + 1) * gates]
        a, b = coefficients(*part.chunk(gates, -1), *parameters)
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
