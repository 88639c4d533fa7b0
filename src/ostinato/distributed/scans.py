"""Scans and linear recurrences of a sequence that is sharded along time."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ostinato import scan
from ostinato.checks import check_floating, describe
from ostinato.distributed.boundary import Boundary
from ostinato.distributed.collectives import group_of
from ostinato.distributed.kinds import General, LinearScan, LogLinearScan
from ostinato.distributed.packed import PackedBoundary
from ostinato.distributed.steps import Steps
from ostinato.kernels.scan import Order
from ostinato.recurrence import Recurrence


def linear_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    *,
    group: ProcessGroup | DeviceMesh,
    resets: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""As :func:`ostinato.linear_scan` of a sequence that is sharded along time over the processes of ``group``.

    .. math:: h_t = a_t \, h_{t-1} + b_t

    Every process calls it with the same options, and calls ``backward`` through it.  Shards are in the order of the
    ranks, and may have any length, 0 included.  Gradients are those of the sum of all processes' losses; derivatives of
    any order can be taken.  In a group of one it is :func:`ostinato.linear_scan`, to the last bit.

    The carry into a shard is propagated until the product of the coefficients underflows in their dtype: a NaN or
    infinity need not reach the shard's end.

    Args:
        a, b: this process's shard, (B, T, D); T may differ between processes.
        h0: initial state of the whole sequence, (B, D), or (N, D) with ``cu_seqlens``, the same on all processes, as is
            its gradient.
        group: a process group, or a device mesh of one dimension.
        resets: bool, (B, T), of this shard's steps; given by all processes or by none, even where no step is reset.
        cu_seqlens: boundaries in the whole sequence, the same on all processes, independent of those of shards.
        reverse, backend: as in :func:`ostinato.linear_scan`.

    Returns:
        h, (B, T, D), of this shard, and h_last, (B, D) or (N, D), of the whole sequence, the same on all processes.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`ostinato.linear_scan`.  A process that raises leaves the others
            waiting until it ends.

    Example:
        >>> import torch, ostinato.distributed
        >>> group = torch.distributed.new_group([0, 1])  # doctest: +SKIP
        >>> h, h_last = ostinato.distributed.linear_scan(a, b, group=group)  # doctest: +SKIP
    """
    group = group_of(group)
    if group.size() == 1:
        return scan.linear_scan(a, b, h0, resets=resets, reverse=reverse, cu_seqlens=cu_seqlens, backend=backend)
    a, b, h0 = scan.checked(a, b, h0, ("a", "b", "h0"), Order(cu_seqlens, resets, reverse), backend)
    return _boundary(LinearScan(a, b, resets, reverse, backend), group, cu_seqlens).run(h0)


def log_linear_scan(
    log_a: Tensor,
    log_b: Tensor,
    log_h0: Tensor | None = None,
    *,
    group: ProcessGroup | DeviceMesh,
    resets: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""As :func:`ostinato.log_linear_scan` of a sequence that is sharded along time over the processes of ``group``.

    .. math:: \log h_t = \operatorname{logaddexp}(\log a_t + \log h_{t-1}, \; \log b_t)

    Arguments and results are those of :func:`linear_scan` here, as logarithms.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`linear_scan` here.

    Example:
        >>> import torch, ostinato.distributed
        >>> group = torch.distributed.new_group([0, 1])  # doctest: +SKIP
        >>> log_h, log_h_last = ostinato.distributed.log_linear_scan(log_a, log_b, group=group)  # doctest: +SKIP
    """
    group = group_of(group)
    options: dict[str, Any] = {"resets": resets, "reverse": reverse, "cu_seqlens": cu_seqlens, "backend": backend}
    if group.size() == 1:
        return scan.log_linear_scan(log_a, log_b, log_h0, **options)
    order = Order(cu_seqlens, resets, reverse)
    log_a, log_b, log_h0 = scan.checked(log_a, log_b, log_h0, ("log_a", "log_b", "log_h0"), order, backend)
    dtype = log_b.dtype
    wide = torch.promote_types(dtype, torch.float32)
    log_a, log_b, log_h0 = log_a.to(wide), log_b.to(wide), None if log_h0 is None else log_h0.to(wide)
    log_h, log_h_last = _boundary(LogLinearScan(log_a, log_b, resets, reverse, backend), group, cu_seqlens).run(log_h0)
    return log_h.to(dtype), log_h_last.to(dtype)


def run_recurrence(
    recurrence: Recurrence,
    /,
    *arguments: Tensor,
    group: ProcessGroup | DeviceMesh,
    weight_hh: Tensor | None = None,
    h0: Any = None,
    resets: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    **named: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""A linear recurrence (:func:`ostinato.recurrence`) over a sequence that is sharded along time.

    .. math:: h_t = a(x_t) \, h_{t-1} + b(x_t)

    Arguments and results are those of the recurrence and of :func:`linear_scan` here.  In a group of one it is the
    recurrence itself, of any kind.

    Raises:
        TypeError, ValueError, RuntimeError: as the recurrence, and as :func:`linear_scan` here.
        TypeError: complex arguments, in a group of several.
        ValueError: a recurrence that is not linear in its state, and so inherently sequential, in such a group.

    Example:
        >>> import torch, ostinato, ostinato.distributed
        >>> @ostinato.recurrence
        ... def average(x, decay):
        ...     return torch.sigmoid(decay), torch.sigmoid(-decay) * x
        >>> group = torch.distributed.new_group([0, 1])  # doctest: +SKIP
        >>> h, h_last = ostinato.distributed.run_recurrence(average, x, decay, group=group)  # doctest: +SKIP
    """
    group = group_of(group)
    if not isinstance(recurrence, Recurrence):
        raise TypeError(f"recurrence must be made by ostinato.recurrence; got {describe(recurrence)}")
    if named:
        arguments = recurrence.in_order(arguments, named)
    options: dict[str, Any] = {"resets": resets, "reverse": reverse, "cu_seqlens": cu_seqlens, "backend": backend}
    if group.size() == 1:
        return recurrence(*arguments, weight_hh=weight_hh, h0=h0, **options)
    if recurrence.states:
        raise ValueError(f"recurrence must be linear in its state to run over a sharded sequence; {recurrence} is not")
    if weight_hh is not None:
        raise TypeError(f"weight_hh needs a state; {recurrence} is linear and has none")
    _, dtype, states = recurrence.check(arguments, h0, Order(cu_seqlens, resets, reverse), backend)
    for name, x in (*zip(recurrence.names, arguments, strict=True), *states.items()):
        check_floating(name, x)
    steps = General(recurrence, tuple(x.to(dtype) if x.dim() == 3 else x for x in arguments), resets, reverse, backend)
    return _boundary(steps, group, cu_seqlens).run(None if h0 is None else h0.to(dtype))


def _boundary(steps: Steps, group: ProcessGroup, cu_seqlens: Tensor | None) -> Boundary:
    return Boundary(steps, group) if cu_seqlens is None else PackedBoundary(steps, group, cu_seqlens)
