r"""Sequence parallelism: one sequence over several processes, each of which holds a contiguous shard of its steps.

A shard as a whole acts like one step: it takes the state that enters it to ``P * h + L``, where P is the product of
its coefficients and L its last state from zero.  So the processes all-gather (P, L), and each scans these for its
carry, the state that enters its shard, and for the last state of the sequence.

Gates forget.  If P underflows within the first steps of a shard,

    1. the shard is scanned from zero, so L is its last state, while the host waits to learn whether P underflows
    2. the processes exchange L, with P = 0
    3. the first steps are scanned again from the carry

and the exchange, with its host overhead, overlaps with the scan.  Otherwise P and L are computed first, the processes
exchange, and each scans its shard once.  Gradients take the same two ways in the opposite direction.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ostinato import scan
from ostinato.distributed import boundary
from ostinato.distributed.boundary import Boundary
from ostinato.distributed.exchange import Gathered, Shared
from ostinato.distributed.packed import PackedBoundary
from ostinato.distributed.steps import General, Linear, Logarithmic, Minimal, ends
from ostinato.kernels.gemm import linear
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

    Every process calls it, with the same options, and calls ``backward`` through it; shards are in the order of the
    ranks, of any lengths, 0 included.  Gradients are those of the sum of all processes' losses; derivatives of any
    order can be taken.  In a group of one it is :func:`ostinato.linear_scan`, to the last bit.

    The carry into a shard is propagated until the product of the coefficients underflows in their dtype: a NaN or
    infinity need not reach the shard's end.

    Args:
        a, b: this process's shard, (B, T, D); T may differ between processes.
        h0: initial state of the whole sequence, (B, D), or (N, D) with ``cu_seqlens``, the same on all processes; so
            is its gradient.
        group: a process group, or a device mesh of one dimension.
        resets: bool, (B, T): of this shard's steps.
        cu_seqlens: boundaries in the whole sequence, the same on all processes, independent of those of shards.
        reverse, backend: as in :func:`ostinato.linear_scan`.

    Returns:
        h, (B, T, D), of this shard, and h_last, (B, D) or (N, D), that of the whole sequence, the same on all
        processes.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`ostinato.linear_scan`.  A process that raises leaves the others
            waiting until it ends.

    Example:
        >>> import torch, ostinato.distributed
        >>> group = torch.distributed.new_group([0, 1])  # doctest: +SKIP
        >>> h, h_last = ostinato.distributed.linear_scan(a, b, group=group)  # doctest: +SKIP
    """
    group = _group_of(group)
    if group.size() == 1:
        return scan.linear_scan(a, b, h0, resets=resets, reverse=reverse, cu_seqlens=cu_seqlens, backend=backend)
    a, b, h0 = scan.checked(a, b, h0, ("a", "b", "h0"), resets, reverse, cu_seqlens, backend)
    return _boundary(Linear(a, b, resets, reverse, backend), group, cu_seqlens).run(h0)


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

    Args, results and errors as those of :func:`linear_scan` here, with logarithms.

    Example:
        >>> import torch, ostinato.distributed
        >>> group = torch.distributed.new_group([0, 1])  # doctest: +SKIP
        >>> log_h, log_h_last = ostinato.distributed.log_linear_scan(log_a, log_b, group=group)  # doctest: +SKIP
    """
    group = _group_of(group)
    options: dict[str, Any] = {"resets": resets, "reverse": reverse, "cu_seqlens": cu_seqlens, "backend": backend}
    if group.size() == 1:
        return scan.log_linear_scan(log_a, log_b, log_h0, **options)
    names = ("log_a", "log_b", "log_h0")
    log_a, log_b, log_h0 = scan.checked(log_a, log_b, log_h0, names, resets, reverse, cu_seqlens, backend)
    dtype = log_b.dtype
    wide = torch.promote_types(dtype, torch.float32)
    log_a, log_b, log_h0 = log_a.to(wide), log_b.to(wide), None if log_h0 is None else log_h0.to(wide)
    log_h, log_h_last = _boundary(Logarithmic(log_a, log_b, resets, reverse, backend), group, cu_seqlens).run(log_h0)
    return log_h.to(dtype), log_h_last.to(dtype)


def run(
    recurrence: Recurrence,
    *arguments: Tensor,
    group: ProcessGroup | DeviceMesh,
    h0: Tensor | None = None,
    resets: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A linear recurrence (:func:`ostinato.recurrence`) over a sequence that is sharded along time.

    Args, results and errors as those of the recurrence and of :func:`linear_scan` here.  Also raises ValueError for a
    recurrence that is not linear in its state, which is inherently sequential, and for complex ones.

    Example:
        >>> import torch, ostinato, ostinato.distributed
        >>> @ostinato.recurrence
        ... def average(x, decay):
        ...     return torch.sigmoid(decay), torch.sigmoid(-decay) * x
        >>> group = torch.distributed.new_group([0, 1])  # doctest: +SKIP
        >>> h, h_last = ostinato.distributed.run(average, x, decay, group=group)  # doctest: +SKIP
    """
    group = _group_of(group)
    options: dict[str, Any] = {"resets": resets, "reverse": reverse, "cu_seqlens": cu_seqlens, "backend": backend}
    if group.size() == 1:
        return recurrence(*arguments, h0=h0, **options)
    if recurrence.states or any(x.is_complex() for x in arguments):
        raise ValueError(
            f"recurrence must be real and linear in its state to run over a sharded sequence; {recurrence} is not"
        )
    _, dtype, _ = recurrence.check(arguments, h0, resets, reverse, cu_seqlens, backend)
    steps = General(recurrence, tuple(x.to(dtype) if x.dim() == 3 else x for x in arguments), resets, reverse, backend)
    return _boundary(steps, group, cu_seqlens).run(None if h0 is None else h0.to(dtype))


def minimal_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    cell: str,
    candidate: str,
    batch_first: bool,
    backend: str,
    *,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """A minimal layer in one direction over this process's shard ``x``; h0 and h_last are (1, B, H)."""

    def steps(x: Tensor) -> Minimal:
        return Minimal(linear(x, weight), bias, cell, candidate, batch_first, backend)

    time, forgets = 1 if batch_first else 0, None
    if group.size() > 1 and boundary.can_test(x.shape[time], x.device):
        with torch.no_grad():  # launched before the large GEMM, which then hides the host's work
            forgets = steps(ends(x, time, boundary.FIRST_REACH)).launch_test()
    part = steps(x)
    start = None if h0 is None else h0[0].to(part.dtype)
    h, h_last = part.run(start) if group.size() == 1 else Boundary(part, group, forgets).run(start)
    return h, h_last[None]


def sequence_parallel(module: nn.Module, group: ProcessGroup | DeviceMesh) -> nn.Module:
    """Make the layers in ``module`` process sequences that are sharded along time; returns the module.

    Inputs and outputs are then contiguous shards, in the order of the ranks, of any lengths; initial and last states
    are those of the whole sequence, the same on all processes.  Weights get their own process's gradient, to be summed
    or averaged as in data parallelism.  Layers with a scan and the causal convolution of :mod:`ostinato.models`
    communicate; for anything else in a module that mixes time steps the caller must provide.

    Raises ValueError for a module with an ``RNN``, ``GRU`` or ``LSTM``, whose steps are inherently sequential.

    Example:
        >>> import torch, ostinato, ostinato.distributed
        >>> model = ostinato.MinGRU(8, 16, batch_first=True)
        >>> group = torch.distributed.new_group([0, 1])  # doctest: +SKIP
        >>> model = ostinato.distributed.sequence_parallel(model, group)  # doctest: +SKIP
        >>> y, h_n = model(x)  # of this process's steps  # doctest: +SKIP
    """
    group = _group_of(group)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase):
            raise ValueError(
                f"module must not have a layer whose steps are inherently sequential; got {name or 'one'}, a "
                f"{type(layer).__name__}"
            )
        if hasattr(layer, "sequence_group"):
            layer.sequence_group = group
    return module


def steps_before(x: Tensor, initial: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The halo of the shards x, (B, T, W): the K steps before this one, and the last K of the sequence.

    ``initial``, (B, K, W), are the steps before the whole sequence, the same on all processes.
    """
    number = initial.shape[1]
    if not number:
        return initial, initial
    marked = F.pad(x[:, -number:], (0, 1), value=1.0)  # an extra channel tells steps from padding
    tails = Gathered.apply(F.pad(marked, (0, 0, number - marked.shape[1], 0)), group)
    begin = F.pad(Shared.apply(initial, group), (0, 1), value=1.0).to(tails.dtype)
    steps = torch.cat((begin, *tails.unbind()), 1)

    def last(of: Tensor) -> Tensor:
        order = of[:1, :, -1].argsort(dim=1, stable=True)[0]  # padding first
        return of[:, order[-number:], :-1].to(x.dtype)

    return last(steps[:, : (group.rank() + 1) * number]), last(steps)


def _group_of(group: ProcessGroup | DeviceMesh) -> ProcessGroup:
    if isinstance(group, DeviceMesh):
        return group.get_group()  # raises if it has several dimensions
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a process group or a device mesh that this process is in; got {group!r}")
    return group


def _boundary(steps: Linear, group: ProcessGroup, cu_seqlens: Tensor | None) -> Boundary:
    return Boundary(steps, group) if cu_seqlens is None else PackedBoundary(steps, group, cu_seqlens)
