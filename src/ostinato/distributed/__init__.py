r"""One sequence over several processes, each of which holds a contiguous part of its steps.

A part is to the others what a step is: it turns the state that enters it into the one that leaves, ``P * h + L``,
where P is the product of its coefficients and L its last state from zero.  So the processes exchange (P, L), all of
them by one all-gather, and scan these: that gives each the state that enters its part, and the last of all.

Gates forget.  Where P underflows within the first steps of a part,

    1. the part is scanned from zero, and L is its last state, while the host still hears whether it does forget
    2. the processes exchange
    3. the first steps are scanned again, from the state that enters

and the exchange, with all that it takes the host, is hidden behind the scan.  Elsewhere P and L are composed first, the
processes exchange, and each scans its part once.  The gradient goes the same ways in the other direction.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ostinato import scan
from ostinato.distributed import seam
from ostinato.distributed.exchange import Gathered, Shared
from ostinato.distributed.packed import PackedSeam
from ostinato.distributed.seam import Seam
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
    r"""As :func:`ostinato.linear_scan` of a sequence whose steps the processes of ``group`` hold part by part.

    .. math:: h_t = a_t \, h_{t-1} + b_t

    Every process calls it, with the same options, and calls ``backward`` through it; parts are in the order of the
    ranks, of any lengths, 0 included.  Gradients are those of the sum of all processes' losses; derivatives of any
    order can be taken.  In a group of one it is :func:`ostinato.linear_scan`, to the last bit.

    The state that enters a part is followed until the product of the coefficients underflows in their dtype: a NaN or
    infinity need not reach the part's end.

    Args:
        a, b: this process's part, (B, T, D); T may differ between processes.
        h0: initial state of the whole sequence, (B, D), or (N, D) with ``cu_seqlens``, the same on all processes; so
            is its gradient.
        group: a process group, or a device mesh of one dimension.
        resets: bool, (B, T): of this part's steps.
        cu_seqlens: boundaries in the whole sequence, the same on all processes.  Those between parts may be anywhere.
        reverse, backend: as in :func:`ostinato.linear_scan`.

    Returns:
        h, (B, T, D), of this part, and h_last, (B, D) or (N, D), that of the whole sequence, the same on all
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
    return _seam(Linear(a, b, resets, reverse, backend), group, cu_seqlens).run(h0)


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
    r"""As :func:`ostinato.log_linear_scan` of a sequence whose steps the processes of ``group`` hold part by part.

    .. math:: \log h_t = \operatorname{logaddexp}(\log a_t + \log h_{t-1}, \; \log b_t)

    Args, results and errors as :func:`linear_scan` here, of the logarithms.

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
    log_h, log_h_last = _seam(Logarithmic(log_a, log_b, resets, reverse, backend), group, cu_seqlens).run(log_h0)
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
    """A linear recurrence (:func:`ostinato.recurrence`) over a sequence whose steps the processes hold part by part.

    Args, results and errors as those of the recurrence and of :func:`linear_scan` here.  Also raises ValueError for a
    recurrence that is not linear in its state, whose steps can only be taken one after another, and for complex ones.

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
            f"recurrence must be real and linear in its state for a sequence in parts; {recurrence} is not"
        )
    first, dtype = recurrence._check_arguments(arguments)
    states = recurrence._check_states(h0)
    scan.check_scan(recurrence.names[first], arguments[first], states, resets, reverse, cu_seqlens, backend)
    steps = General(recurrence, tuple(x.to(dtype) if x.dim() == 3 else x for x in arguments), resets, reverse, backend)
    return _seam(steps, group, cu_seqlens).run(None if h0 is None else h0.to(dtype))


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
    """A minimal cell in one direction over a part of ``x``; h0 and h_last are (1, B, H)."""

    def steps(x: Tensor) -> Minimal:
        return Minimal(linear(x, weight), bias, cell, candidate, batch_first, backend)

    time, forgets = 1 if batch_first else 0, None
    if group.size() > 1 and seam.may_ask(x.shape[time], x.device):
        with torch.no_grad():  # asked before the large product, behind which the host then has time for all else
            forgets = steps(ends(x, time, seam.FIRST_REACH)).ask_whether_forgotten()
    part = steps(x)
    start = None if h0 is None else h0[0].to(part.dtype)
    h, h_last = part.run(start) if group.size() == 1 else Seam(part, group, forgets).run(start)
    return h, h_last[None]


def sequence_parallel(module: nn.Module, group: ProcessGroup | DeviceMesh) -> nn.Module:
    """Have the layers in ``module`` take this process's part of each sequence, from now on; returns the module.

    Inputs and outputs are then contiguous parts, in the order of the ranks, of any lengths; initial and last states
    are those of the whole sequence, the same on all processes.  Weights get the gradient of their own process's use,
    to be added up or averaged as in data parallelism.  The layers with a scan and the causal convolution of
    :mod:`ostinato.models` can; what else in a module looks from one step to another is the caller's to see to.

    Raises ValueError for a module with an ``RNN``, ``GRU`` or ``LSTM``, whose steps wait for each other.

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
                f"module must have no layer whose steps wait for each other; got {name or 'one'}, a "
                f"{type(layer).__name__}"
            )
        if hasattr(layer, "sequence_group"):
            layer.sequence_group = group
    return module


def steps_before(x: Tensor, initial: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Of parts x, (B, T, W), the steps just before this one, and the last of all; both as many as in ``initial``.

    ``initial``, (B, K, W), are those before the whole sequence, the same on all processes.
    """
    number = initial.shape[1]
    if not number:
        return initial, initial
    marked = F.pad(x[:, -number:], (0, 1), value=1.0)  # a last channel tells steps from what fills up
    tails = Gathered.apply(F.pad(marked, (0, 0, number - marked.shape[1], 0)), group)
    begin = F.pad(Shared.apply(initial, group), (0, 1), value=1.0).to(tails.dtype)
    steps = torch.cat((begin, *tails.unbind()), 1)

    def last(of: Tensor) -> Tensor:
        order = of[:1, :, -1].argsort(dim=1, stable=True)[0]  # what fills up goes first
        return of[:, order[-number:], :-1].to(x.dtype)

    return last(steps[:, : (group.rank() + 1) * number]), last(steps)


def _group_of(group: ProcessGroup | DeviceMesh) -> ProcessGroup:
    if isinstance(group, DeviceMesh):
        return group.get_group()  # raises if it has several dimensions
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a process group or a device mesh that this process is in; got {group!r}")
    return group


def _seam(steps: Linear, group: ProcessGroup, cu_seqlens: Tensor | None) -> Seam:
    return Seam(steps, group) if cu_seqlens is None else PackedSeam(steps, group, cu_seqlens)
