"""The scans as differentiable operators, each run by the backend that the caller names."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ostinato.kernels.dispatch import Groups, gradient, operator, or_empty
from ostinato.kernels.export import refuse_packed
from ostinato.kernels.scan import choose_backend
from ostinato.kernels.scan.torch_ops import LOG, shares, shift, zeroed

_checked_cu_seqlens: WeakIdKeyDictionary = WeakIdKeyDictionary()


def check_cu_seqlens(cu_seqlens: Tensor | None, length: int) -> None:
    """Raise ValueError unless the boundaries rise from 0 to `length`.

    Reading them synchronises with the GPU, so a GPU tensor is read once per version of its contents (inference tensors
    have none), and not at all while a CUDA graph is being captured.
    """
    if cu_seqlens is None or (cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    counted = cu_seqlens.is_cuda and not cu_seqlens.is_inference()
    if counted and _checked_cu_seqlens.get(cu_seqlens) == (cu_seqlens._version, length):
        return
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of time steps, {length}; got {shortened(cu_seqlens)}"
        )
    if counted:
        _checked_cu_seqlens[cu_seqlens] = cu_seqlens._version, length


def shortened(numbers: Tensor) -> str:
    """The numbers of a vector, or the first and last of many, for an error message."""
    return str(numbers.tolist() if len(numbers) <= 8 else [*numbers[:4].tolist(), "...", *numbers[-3:].tolist()])


def _sequences(b: Tensor, cu_seqlens: Tensor | None) -> int:
    return b.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def initial_states(b: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None, zero: float) -> Tensor:
    return b.new_full((_sequences(b, cu_seqlens), b.shape[2]), zero) if h0 is None else h0.clone()


def _plain(implementation: Callable) -> Callable:
    """The scan's implementation with the "loop" backend, which an exported graph can contain."""

    def run(x: Tensor, y: Tensor | None, h0: Tensor | None, boundaries: Tensor | None, *how: Any) -> Any:
        if boundaries is not None:
            refuse_packed()
        return implementation(x, y, h0, None, *how[:-1], "loop")

    return run


# linear_scan(a, b, h0, cu_seqlens, resets, reverse, backend) -> h, h_last


def _linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    check_cu_seqlens(cu_seqlens, b.shape[1])
    kernels = choose_backend(backend, b.device.type)
    if b.numel() == 0:
        return b.new_empty(b.shape), initial_states(b, h0, cu_seqlens, 0.0)
    return kernels.linear_scan(a, b, h0, reverse, cu_seqlens, resets)


def _prepare_linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
) -> Callable | None:
    prepare = getattr(choose_backend(backend, b.device.type), "prepare_linear_scan", None)
    if prepare is None or cu_seqlens is not None or resets is not None or b.numel() == 0:
        return None
    return prepare(a, b, h0, reverse)


def _states_like(x: Tensor, cu_seqlens: Tensor | None, resets: Tensor | None, backend: str) -> Tensor:
    laid_out = getattr(choose_backend(backend, x.device.type), "states_like", None)  # contiguous of most backends
    return laid_out(x, cu_seqlens, resets) if laid_out else x.new_empty(x.shape)


def _linear_scan_fake(
    a: Tensor, b: Tensor, h0: Any, cu_seqlens: Tensor | None, resets: Tensor | None, _reverse: bool, backend: str
) -> tuple[Tensor, Tensor]:
    return _states_like(b, cu_seqlens, resets, backend), b.new_empty(_sequences(b, cu_seqlens), b.shape[2])


def _linear_scan_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    a, _, h0, cu_seqlens, resets, ctx.reverse, ctx.backend = inputs
    ctx.save_for_backward(a, output[0], h0, cu_seqlens, resets)
    ctx.set_materialize_grads(False)


def _linear_scan_grad(ctx: Any, grad_h: Tensor | None, grad_h_last: Tensor | None) -> tuple:
    if grad_h is None and grad_h_last is None:
        return (None,) * 7
    a, h, h0, cu_seqlens, resets = ctx.saved_tensors
    grads = linear_scan_backward(a, h, h0, grad_h, grad_h_last, cu_seqlens, resets, ctx.reverse, ctx.backend)
    return grads[0], grads[1], None if h0 is None else grads[2], None, None, None, None


def _linear_scan_backward_impl(
    a: Tensor,
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
    if h.numel() == 0:
        return h.new_empty(h.shape), h.new_empty(h.shape), initial_states(h, grad_h_last, cu_seqlens, 0.0)
    grads = choose_backend(backend, h.device.type).linear_scan_backward(
        a, h, h0, grad_h, grad_h_last, reverse, cu_seqlens, resets
    )
    return grads[0], grads[1], or_empty(grads[2], h)


def _linear_scan_backward_fake(
    a: Tensor, h: Tensor, h0: Tensor | None, _grad_h: Any, _grad_h_last: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    cu_seqlens, resets, _reverse, backend = rest
    grads = [_states_like(h, cu_seqlens, resets, backend) for _ in range(2)]
    return grads[0], grads[1], h.new_empty(0 if h0 is None else h0.shape)


def _linear_scan_jvp(args: tuple, results: tuple[Tensor, Tensor], tangents: tuple) -> tuple[Tensor, Tensor]:
    a, b, h0, cu_seqlens, resets, reverse, backend = args
    a_dot, b_dot, h0_dot = tangents[:3]
    offsets = torch.zeros_like(b) if b_dot is None else b_dot
    if a_dot is not None:
        offsets = offsets + a_dot * zeroed(shift(results[0], h0, reverse, cu_seqlens), resets)
    return linear_scan(a, offsets, h0_dot, cu_seqlens, resets, reverse, backend)


def _linear_scan_backward_composite(
    a: Tensor,
    h: Tensor,
    h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    carry, before = zeroed(a, resets), zeroed(shift(h, h0, reverse, cu_seqlens), resets)
    total, grad_h0 = _carry_back(carry, grad_h, grad_h_last, cu_seqlens, reverse, backend)
    return total * before, total, or_empty(None if h0 is None else grad_h0, h)


def _carry_back(
    a: Tensor,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    cu_seqlens: Tensor | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The total gradient of each state, by a scan in the opposite direction, and the initial state's."""
    grad = torch.zeros_like(a) if grad_h is None else grad_h
    carried, first = linear_scan(a, a * grad, grad_h_last, cu_seqlens, None, not reverse, backend)
    return grad + shift(carried, grad_h_last, not reverse, cu_seqlens), first


def _scan_groups(*_: Any) -> Groups:
    return (1, 1, 1, None, None, None, None), (1, 1)


def _linear_scan_backward_groups(*_: Any) -> Groups:
    return (1, 1, 1, 1, 1, None, None, None, None), (1, 1, 1)


linear_scan_backward = gradient(
    "linear_scan_backward",
    _linear_scan_backward_impl,
    _linear_scan_backward_fake,
    _linear_scan_backward_groups,
    _linear_scan_backward_composite,
)
linear_scan = operator(
    "linear_scan",
    _linear_scan,
    _linear_scan_fake,
    _linear_scan_context,
    _linear_scan_grad,
    _scan_groups,
    plain=_plain(_linear_scan),
    jvp=_linear_scan_jvp,
    prepare=_prepare_linear_scan,
)


# log_linear_scan(log_a, log_b, log_h0, cu_seqlens, resets, reverse, backend) -> log_h, log_h_last


def _log_linear_scan(
    log_a: Tensor,
    log_b: Tensor,
    log_h0: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    check_cu_seqlens(cu_seqlens, log_b.shape[1])
    kernels = choose_backend(backend, log_b.device.type)
    if log_b.numel() == 0:
        return log_b.new_empty(log_b.shape), initial_states(log_b, log_h0, cu_seqlens, float("-inf"))
    return kernels.log_linear_scan(log_a, log_b, log_h0, reverse, cu_seqlens, resets)


def _log_linear_scan_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    log_a, log_b, log_h0, cu_seqlens, resets, ctx.reverse, ctx.backend = inputs
    ctx.save_for_backward(log_a, log_b, output[0], log_h0, cu_seqlens, resets)
    ctx.set_materialize_grads(False)


def _log_linear_scan_grad(ctx: Any, grad_h: Tensor | None, grad_h_last: Tensor | None) -> tuple:
    if grad_h is None and grad_h_last is None:
        return (None,) * 7
    log_a, log_b, log_h, log_h0, cu_seqlens, resets = ctx.saved_tensors
    args = (log_a, log_b, log_h, log_h0, grad_h, grad_h_last, cu_seqlens, resets, ctx.reverse, ctx.backend)
    grads = log_linear_scan_backward(*args)
    return grads[0], grads[1], None if log_h0 is None else grads[2], None, None, None, None


def _log_linear_scan_backward_impl(
    log_a: Tensor,
    log_b: Tensor,
    log_h: Tensor,
    log_h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    check_cu_seqlens(cu_seqlens, log_h.shape[1])
    if log_h.numel() == 0:
        return (
            log_h.new_empty(log_h.shape),
            log_h.new_empty(log_h.shape),
            initial_states(log_h, grad_h_last, cu_seqlens, 0.0),
        )
    kernels = choose_backend(backend, log_h.device.type)
    grads = kernels.log_linear_scan_backward(
        log_a, log_b, log_h, log_h0, grad_h, grad_h_last, reverse, cu_seqlens, resets
    )
    return grads[0], grads[1], or_empty(grads[2], log_h)


def _log_linear_scan_backward_fake(
    log_a: Tensor, log_b: Tensor, log_h: Tensor, log_h0: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _linear_scan_backward_fake(log_a, log_h, log_h0, *rest)


def _log_linear_scan_jvp(args: tuple, results: tuple[Tensor, Tensor], tangents: tuple) -> tuple[Tensor, Tensor]:
    log_a, log_b, log_h0, cu_seqlens, resets, reverse, backend = args
    kept = log_a + zeroed(shift(results[0], log_h0, reverse, cu_seqlens, LOG.zero), resets, LOG.zero)
    weights = shares(kept, log_b)
    offsets = [share * x for share, x in zip(weights, tangents[:2], strict=True) if x is not None]
    total = sum(offsets, torch.zeros_like(kept))
    return linear_scan(weights[0], total, tangents[2], cu_seqlens, None, reverse, backend)


def _log_linear_scan_backward_composite(
    log_a: Tensor,
    log_b: Tensor,
    log_h: Tensor,
    log_h0: Tensor | None,
    grad_h: Tensor | None,
    grad_h_last: Tensor | None,
    cu_seqlens: Tensor | None,
    resets: Tensor | None,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    kept = log_a + zeroed(shift(log_h, log_h0, reverse, cu_seqlens, LOG.zero), resets, LOG.zero)
    carried, added = shares(kept, log_b)
    total, grad_h0 = _carry_back(carried, grad_h, grad_h_last, cu_seqlens, reverse, backend)
    return total * carried, total * added, or_empty(None if log_h0 is None else grad_h0, log_h)


def _log_linear_scan_backward_groups(*_: Any) -> Groups:
    return (1, 1, 1, 1, 1, 1, None, None, None, None), (1, 1, 1)


log_linear_scan_backward = gradient(
    "log_linear_scan_backward",
    _log_linear_scan_backward_impl,
    _log_linear_scan_backward_fake,
    _log_linear_scan_backward_groups,
    _log_linear_scan_backward_composite,
)
log_linear_scan = operator(
    "log_linear_scan",
    _log_linear_scan,
    _linear_scan_fake,
    _log_linear_scan_context,
    _log_linear_scan_grad,
    _scan_groups,
    plain=_plain(_log_linear_scan),
    jvp=_log_linear_scan_jvp,
)
