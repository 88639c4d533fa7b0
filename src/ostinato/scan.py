"""The linear scan, in real and in log space: the primitive behind every minimal layer."""

from collections.abc import Callable

import torch
from torch import Tensor

from ostinato.checks import FLOAT_DTYPES, check_choice, check_floating, check_resets, describe
from ostinato.kernels.operators.eager import Prepared
from ostinato.kernels.scan import BACKENDS, Order, operators

COMPLEX_DTYPES = (torch.complex64, torch.complex128)
_PREPARED: Prepared[Callable[..., tuple[Tensor, Tensor]]] = Prepared()


def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""First-order linear recurrence along time, differentiable in ``a``, ``b`` and ``h0``.

    .. math:: h_t = a_t \, h_{t-1} + b_t

    It is computed as an associative scan: two steps compose into one,
    ``(A2, B2) o (A1, B1) = (A2*A1, A2*B1 + B2)``, so T steps take O(log T) depth (Blelloch 1990; section 3
    of Feng et al. 2024, arXiv 2410.01201).  float16, bfloat16 and float32 accumulate in float32 or wider,
    float64 in float64; the same call on the same device gives the same bits.

    Args:
        a: coefficients, (B, T, D), any strides, float16, bfloat16, float32, float64, complex64 or complex128.
        b: offsets, of the same shape; where dtypes differ, both are promoted.
        h0: initial state, (B, D), or (N, D) with ``cu_seqlens``; zero if absent.  Taken in the dtype of a and b.
        resets: bool, (B, T), (1, T) with ``cu_seqlens``: where True, the state is zero before that step, and no
            gradient flows to the steps scanned before it, nor to ``h0``.
        reverse: run from the last step to the first, ``h[t] = a[t] * h[t+1] + b[t]``.
        cu_seqlens: int32, (N+1,): N sequences concatenated in a batch of one, sequence n being the steps
            ``cu_seqlens[n]`` to ``cu_seqlens[n+1]``; each starts from its own ``h0[n]``.  On a GPU its values
            are read back once, to check them.
        backend: "auto", "cpu" (Numba), "cuda", "torch" (PyTorch operations) or "reference" (float64 loop).

    Returns:
        h, (B, T, D), and h_last, (B, D) or (N, D), the state after the last step in scan order.

    Raises:
        TypeError: an argument that is not a tensor, or of an integer dtype; a complex ``h0`` of a real recurrence.
        ValueError: ranks, shapes, devices or boundaries that do not match, or an unknown backend.
        RuntimeError: the requested backend cannot run here.

    Example:
        >>> import torch, ostinato
        >>> a, b = torch.full((1, 4, 1), 0.5), torch.ones(1, 4, 1)
        >>> h, h_last = ostinato.linear_scan(a, b)
        >>> h.flatten().tolist()
        [1.0, 1.5, 1.75, 1.875]
    """
    arguments, tensors = (a, b, h0, cu_seqlens, resets, reverse, backend), None
    if resets is cu_seqlens is None and type(reverse) is bool and type(backend) is str:
        tensors = (a, b) if h0 is None else (a, b, h0)
        run = _PREPARED.find(tensors, reverse, backend)
        if run is not None:
            return run(*arguments)
    order = Order(cu_seqlens, resets, reverse)
    a, b, h0 = checked(a, b, h0, ("a", "b", "h0"), order, backend, FLOAT_DTYPES + COMPLEX_DTYPES)
    if b.is_complex():
        from ostinato.kernels.recurrence import complex

        return complex.linear_scan(a, b, h0, *order, backend)
    if tensors is not None and a is arguments[0] and b is arguments[1] and h0 is arguments[2]:
        _PREPARED.add(lambda: operators.linear_scan.prepared(*arguments), tensors, reverse, backend)
    return operators.linear_scan(a, b, h0, *order, backend)


def log_linear_scan(
    log_a: Tensor,
    log_b: Tensor,
    log_h0: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""The linear recurrence in log space: coefficients, offsets and states are given as logarithms.

    .. math:: \log h_t = \operatorname{logaddexp}(\log a_t + \log h_{t-1}, \; \log b_t)

    For states that leave the range of their dtype; :func:`linear_scan` is faster and at least as accurate
    where they do not.  Unlike the ``cumsum`` and ``logcumsumexp`` form of Feng et al. 2024 (appendix B), whose
    float32 error grows with T, it composes adjacent steps and stays accurate at any length.  float16 and bfloat16
    are computed, and saved for the gradient, in float32.

    Args:
        log_a: logarithms of the coefficients, (B, T, D).
        log_b: logarithms of the offsets, (B, T, D); ``-inf`` adds nothing.
        log_h0: logarithm of the initial state, (B, D), or (N, D) with ``cu_seqlens``; ``-inf`` (a state of
            zero) if absent.  No gradient flows through a state of zero.
        resets, reverse, cu_seqlens, backend: as in :func:`linear_scan`.

    Returns:
        log_h, (B, T, D), and log_h_last, (B, D) or (N, D).

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`linear_scan`.

    Example:
        >>> import torch, ostinato
        >>> log_a, log_b = torch.full((1, 3, 1), 100.0), torch.zeros(1, 3, 1)
        >>> ostinato.log_linear_scan(log_a, log_b)[1].item()  # e^200 + e^100 + 1
        200.0
    """
    order = Order(cu_seqlens, resets, reverse)
    log_a, log_b, log_h0 = checked(log_a, log_b, log_h0, ("log_a", "log_b", "log_h0"), order, backend)
    dtype = log_b.dtype
    wide = torch.promote_types(dtype, torch.float32)  # the gradient takes differences, too coarse in 16 bits
    log_a, log_b, log_h0 = log_a.to(wide), log_b.to(wide), None if log_h0 is None else log_h0.to(wide)
    log_h, log_h_last = operators.log_linear_scan(log_a, log_b, log_h0, *order, backend)
    return log_h.to(dtype), log_h_last.to(dtype)


def checked(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None,
    names: tuple[str, str, str],
    order: Order,
    backend: str,
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inputs, validated and promoted to one dtype."""
    check_floating(names[0], a, dtypes)
    check_floating(names[1], b, dtypes)
    if h0 is not None:
        check_floating(names[2], h0, dtypes)
    if a.dim() != 3:
        raise ValueError(f"{names[0]} must have shape (B, T, D); got {tuple(a.shape)}")
    if b.shape != a.shape:
        raise ValueError(f"{names[1]} must have the shape of {names[0]}, {tuple(a.shape)}; got {tuple(b.shape)}")
    if b.device != a.device:
        raise ValueError(f"{names[1]} must be on the device of {names[0]}, {a.device}; got {b.device}")
    check_scan(names[0], a, {} if h0 is None else {names[2]: h0}, order, backend)
    dtype = a.dtype
    if b.dtype is not dtype:
        dtype = torch.promote_types(dtype, b.dtype)
        a, b = a.to(dtype), b.to(dtype)
    if h0 is None or h0.dtype is dtype:
        return a, b, h0  # even a no-op .to() costs
    if h0.is_complex() and not dtype.is_complex:
        raise TypeError(f"{names[2]} must be real as {names[0]} and {names[1]} are; got {describe(h0)}")
    return a, b, h0.to(dtype)


def check_scan(name: str, x: Tensor, states: dict[str, Tensor], order: Order, backend: str) -> None:
    """Raise TypeError or ValueError unless the initial states and options fit a scan over `x`, (B, T, D)."""
    cu_seqlens, resets, reverse = order
    sequences = x.shape[0]
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
            raise TypeError(f"cu_seqlens must be an int32 tensor; got {describe(cu_seqlens)}")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens must have shape (N + 1,); got {tuple(cu_seqlens.shape)}")
        if x.shape[0] != 1:
            raise ValueError(f"{name} must have a batch of 1 with cu_seqlens; got shape {tuple(x.shape)}")
        sequences = cu_seqlens.shape[0] - 1
    for state_name, state in states.items():
        if state.shape != (sequences, x.shape[2]):
            raise ValueError(f"{state_name} must have shape {(sequences, x.shape[2])}; got {tuple(state.shape)}")
    if resets is not None:
        check_resets(resets, name, x)
    for other_name, other in {**states, "cu_seqlens": cu_seqlens}.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{other_name} must be on the device of {name}, {x.device}; got {other.device}")
    if not isinstance(reverse, bool):
        raise TypeError(f"reverse must be a bool; got {describe(reverse)}")
    check_choice("backend", backend, BACKENDS)
