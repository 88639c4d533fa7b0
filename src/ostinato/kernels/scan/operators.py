"""The scans as differentiable operators, each run by the backend that the caller names.

Each scan iterates a function of a step, ``h[t] = f(a[t], h[t-1], b[t])``: ``a*h + b``, or in log space
``logaddexp(a + h, b)``.  Its derivatives are linear scans, whose coefficients are f's partial derivatives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.derived import derived_from
from ostinato.kernels.operators.dispatch import gradient, operator, or_empty
from ostinato.kernels.operators.export import refuse_packed
from ostinato.kernels.operators.vmap import Groups
from ostinato.kernels.scan import Order, choose_backend, order_of
from ostinato.kernels.scan.torch_ops import LINEAR, LOG, Semiring, gradients_of_scan, partials_of_steps


def check_cu_seqlens(cu_seqlens: Tensor | None, length: int) -> None:
    """Raise ValueError unless the bounds rise from 0 to `length`.

    Reading them synchronises with the GPU, so a GPU tensor is read once per version of its contents (at every call if
    it is an inference tensor, which has no version), and not at all while a CUDA graph is being captured.
    """
    if cu_seqlens is None or (cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if cu_seqlens.is_cuda and not cu_seqlens.is_inference():
        derived_from(cu_seqlens, ("rise to", length), lambda: _check_cu_seqlens(cu_seqlens, length))
    else:
        _check_cu_seqlens(cu_seqlens, length)


def _check_cu_seqlens(cu_seqlens: Tensor, length: int) -> None:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of time steps, {length}; got {shortened(cu_seqlens)}"
        )


def shortened(numbers: Tensor) -> str:
    """The elements of a vector, or the first and last ones of many, for an error message."""
    return str(numbers.tolist() if len(numbers) <= 8 else [*numbers[:4].tolist(), "...", *numbers[-3:].tolist()])


def after_no_steps(b: Tensor, h0: Tensor | None, order: Order, zero: float) -> Tensor:
    """The last states of a scan without elements: a copy of the initial states."""
    return b.new_full((order.sequences(b), b.shape[2]), zero) if h0 is None else h0.clone()


def _states_like(x: Tensor, order: Order, backend: str) -> Tensor:
    return choose_backend(backend, x.device.type).states_like(x, order)


class _Scan:
    """A scan and its gradient as operators, which take the parts of an order in place of an ``Order``.

    ``name`` is that of the operator and of the backends' function; ``prepare`` is passed to :func:`operator`.

    run(a, b, h0, cu_seqlens, resets, reverse, backend) -> h, h_last
    gradients(a, b, h, h0, grad_h, grad_h_last, cu_seqlens, resets, reverse, backend) -> the gradients of a, b and h0;
    the last is empty if h0 is absent, and b is None for the linear scan.
    """

    def __init__(self, ring: Semiring, name: str, prepare: Callable | None = None) -> None:
        self.ring, self.name = ring, name
        backward = self.backward, self.fake_backward, self.backward_groups, self.differentiable_backward
        self.gradients = gradient(f"{name}_backward", *backward)
        forward = self.scan, self.fake, self.context, self.grad, self.groups
        self.run = operator(name, *forward, plain=self.plain, jvp=self.jvp, prepare=prepare)

    def scan(
        self,
        a: Tensor,
        b: Tensor,
        h0: Tensor | None,
        cu_seqlens: Tensor | None,
        resets: Tensor | None,
        reverse: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        check_cu_seqlens(cu_seqlens, b.shape[1])
        kernels, order = choose_backend(backend, b.device.type), order_of(cu_seqlens, resets, reverse)
        if b.numel() == 0:
            return b.new_empty(b.shape), after_no_steps(b, h0, order, self.ring.zero)
        h, h_last = getattr(kernels, self.name)(a, b, h0, order)
        return h, h_last

    def fake(self, _a: Any, b: Tensor, _h0: Any, *options: Any) -> tuple[Tensor, Tensor]:
        *parts, backend = options
        order = order_of(*parts)
        return _states_like(b, order, backend), b.new_empty(order.sequences(b), b.shape[2])

    def context(self, ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        a, b, h0, cu_seqlens, resets, ctx.reverse, ctx.backend = inputs
        ctx.save_for_backward(a, None if self.ring is LINEAR else b, output[0], h0, cu_seqlens, resets)
        ctx.set_materialize_grads(False)

    def grad(self, ctx: Any, grad_h: Tensor | None, grad_h_last: Tensor | None) -> tuple:
        if grad_h is None and grad_h_last is None:
            return (None,) * 7
        a, b, h, h0, cu_seqlens, resets = ctx.saved_tensors
        grads = self.gradients(a, b, h, h0, grad_h, grad_h_last, cu_seqlens, resets, ctx.reverse, ctx.backend)
        return grads[0], grads[1], None if h0 is None else grads[2], None, None, None, None

    def backward(
        self,
        a: Tensor,
        b: Tensor | None,
        h: Tensor,
        h0: Tensor | None,
        grad_h: Tensor | None,
        grad_h_last: Tensor | None,
        cu_seqlens: Tensor | None,
        resets: Tensor | None,
        reverse: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_cu_seqlens(cu_seqlens, h.shape[1])
        order = order_of(cu_seqlens, resets, reverse)
        if h.numel() == 0:
            return h.new_empty(h.shape), h.new_empty(h.shape), after_no_steps(h, grad_h_last, order, 0.0)
        run = getattr(choose_backend(backend, h.device.type), f"{self.name}_backward")
        inputs = (a,) if b is None else (a, b)
        grads = run(*inputs, h, h0, grad_h, grad_h_last, order)
        return grads[0], grads[1], or_empty(grads[2], h)

    def fake_backward(
        self, _a: Any, _b: Any, h: Tensor, h0: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        _grad_h, _grad_h_last, *parts, backend = rest
        grads = [_states_like(h, order_of(*parts), backend) for _ in range(2)]
        return grads[0], grads[1], h.new_empty(0 if h0 is None else h0.shape)

    def jvp(self, args: tuple, results: tuple[Tensor, Tensor], tangents: tuple) -> tuple[Tensor, Tensor]:
        a, b, h0, *options = args
        *parts, _backend = options
        by_h, *by_inputs = partials_of_steps(self.ring, a, b, results[0], h0, order_of(*parts))
        offsets = [partial * x for partial, x in zip(by_inputs, tangents[:2], strict=True) if x is not None]
        total = sum(offsets, torch.zeros_like(b))
        return linear_scan(by_h, total, tangents[2], *options)

    def differentiable_backward(
        self, a: Tensor, b: Tensor | None, h: Tensor, h0: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_h, grad_h_last, *parts, backend = rest

        def scan(a: Tensor, b: Tensor, h0: Tensor | None, order: Order) -> Any:
            return linear_scan(a, b, h0, *order, backend)

        *grads, grad_h0 = gradients_of_scan(self.ring, scan, a, b, h, h0, grad_h, grad_h_last, order_of(*parts))
        return grads[0], grads[1], or_empty(None if h0 is None else grad_h0, h)

    def plain(self, a: Tensor, b: Tensor, h0: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
        cu_seqlens, resets, reverse, _backend = options
        if cu_seqlens is not None:
            refuse_packed()
        return self.scan(a, b, h0, None, resets, reverse, "loop")

    def groups(self, *_: Any) -> Groups:
        return (1, 1, 1, None, None, None, None), (1, 1)

    def backward_groups(self, *_: Any) -> Groups:
        return (1, 1, 1, 1, 1, 1, None, None, None, None), (1, 1, 1)


def _prepare_linear_scan(a: Tensor, b: Tensor, h0: Tensor | None, *options: Any) -> Callable | None:
    *parts, backend = options
    order = order_of(*parts)
    if not order.is_plain or b.numel() == 0:
        return None
    return choose_backend(backend, b.device.type).prepare_linear_scan(a, b, h0, order)


_LINEAR, _LOG = _Scan(LINEAR, "linear_scan", _prepare_linear_scan), _Scan(LOG, "log_linear_scan")
linear_scan, linear_scan_backward = _LINEAR.run, _LINEAR.gradients
log_linear_scan, log_linear_scan_backward = _LOG.run, _LOG.gradients
