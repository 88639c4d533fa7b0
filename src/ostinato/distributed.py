r"""One sequence over several processes, each of which holds a contiguous part of its steps.

A part is to the others what a step is: it turns the state that enters it into the one that leaves, ``P * h + L``,
where P is the product of its coefficients and L its last state from zero.  So the processes exchange (P, L), scan them,
and each scans its own part from the state that enters it:

    1. P and L of the part, from its end backwards, as far as P has not vanished
    2. one all-gather of P and L, and a scan over the processes: the entering state, and the last of all
    3. the scan of the part

The gradient goes the same way in the other direction, and a scan's backward then starts from the gradient that comes
in from the parts after it.  Where coefficients forget, as gates do, step 1 reads little and step 3 is all the work.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ostinato import scan
from ostinato.kernels import nvrtc
from ostinato.kernels.recurrence.operators import layer_scan
from ostinato.kernels.scan import compose as kernel
from ostinato.kernels.scan import operators
from ostinato.kernels.scan.torch_ops import shares, zeroed
from ostinato.minimal import GATES, RECURRENCES, recurrence_of
from ostinato.recurrence import Recurrence

FIRST_PIECE = 1024  # steps that are reduced before it is asked whether the state before them still counts
LARGEST_PIECE = 1 << 26  # elements, where composing them takes memory

_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor  # till PyTorch 2.12


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

    The state that enters a part is found from the steps before it as far back as the product of their coefficients
    is not exactly zero: a NaN or infinity from farther back does not reach the next part.

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
    a, b, h0 = scan._checked(a, b, h0, ("a", "b", "h0"), resets, reverse, cu_seqlens, backend)
    return _Seam(_Linear(a, b, resets, reverse, backend), group, cu_seqlens).run(h0)


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
    log_a, log_b, log_h0 = scan._checked(log_a, log_b, log_h0, names, resets, reverse, cu_seqlens, backend)
    dtype = log_b.dtype
    wide = torch.promote_types(dtype, torch.float32)
    log_a, log_b, log_h0 = log_a.to(wide), log_b.to(wide), None if log_h0 is None else log_h0.to(wide)
    log_h, log_h_last = _Seam(_Logarithmic(log_a, log_b, resets, reverse, backend), group, cu_seqlens).run(log_h0)
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
    return _Seam(_Recurrence(recurrence, arguments, resets, reverse, backend), group, cu_seqlens).run(h0)


def minimal_scan(
    pre: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    cell: str,
    candidate: str,
    batch_first: bool,
    backend: str,
    *,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """As ``layer_scan`` of a minimal cell in one direction, of a part of ``pre``; h0 and h_last are (1, B, H)."""
    if group.size() == 1:
        recurrence = recurrence_of(cell, candidate, bias is not None)
        return layer_scan(pre, bias, h0, None, None, recurrence, batch_first, 1, backend)
    steps = _Minimal(pre, bias, cell, candidate, batch_first, backend)
    h, h_last = _Seam(steps, group).run(None if h0 is None else h0[0])
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
    tails = _Gathered.apply(F.pad(marked, (0, 0, number - marked.shape[1], 0)), group)
    begin = F.pad(_Shared.apply(initial, group), (0, 1), value=1.0).to(tails.dtype)
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


# What a part consists of


class _Linear:
    """Steps of ``h = a*h + b``: how they are run, and how they compose."""

    one, zero = 1.0, 0.0

    def __init__(self, a: Tensor, b: Tensor, resets: Tensor | None, reverse: bool, backend: str) -> None:
        self.inputs: tuple[Tensor | None, ...] = (a, b)
        self.resets, self.reverse, self.backend = resets, reverse, backend
        self.batch, self.number, self.channels = b.shape
        self.dtype, self.device = b.dtype, b.device

    def of(self, inputs: tuple[Tensor | None, ...]) -> Self:
        """The same of other inputs; of none, to be kept without their memory."""
        other = copy.copy(self)
        other.inputs = inputs
        return other

    def part(self, steps: slice) -> Self:
        """Some of the steps."""
        other = self.of(self.inputs_of(steps))
        other.resets, other.number = self.resets_of(steps), steps.stop - steps.start
        return other

    def inputs_of(self, steps: slice) -> tuple[Tensor | None, ...]:
        return tuple(x[:, steps] for x in self.inputs if x is not None)

    def run(self, h0: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """The scan itself, differentiable."""
        return operators.linear_scan(*self.inputs, h0, cu_seqlens, self.resets, self.reverse, self.backend)

    def coefficients(self, steps: slice) -> tuple[Tensor, Tensor]:
        """a and b of some steps, in float32 or wider: what is exchanged is not rounded to 16 bits."""
        a, b = self.inputs
        assert a is not None
        assert b is not None
        wide = torch.promote_types(self.dtype, torch.float32)
        return a[:, steps].to(wide), b[:, steps].to(wide)

    def scan(
        self, a: Tensor, b: Tensor, h0: Tensor | None, resets: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same recurrence of other steps."""
        return operators.linear_scan(a, b, h0, cu_seqlens, resets, self.reverse, self.backend)

    @staticmethod
    def times(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def times_plus(a: Tensor, h: Tensor, b: Tensor) -> Tensor:
        return a * h + b

    def compose(self, steps: slice) -> tuple[Tensor, Tensor]:
        """P and L of some steps."""
        if self.has_kernel:
            return kernel.compose(*self.coefficients(steps), self.resets_of(steps), reverse=self.reverse)
        return self.compose_by_scans(steps)

    def compose_by_scans(self, steps: slice) -> tuple[Tensor, Tensor]:
        """The same, differentiable: P by a scan, which keeps more digits of it than a product does."""
        a, b = self.coefficients(steps)
        resets = self.resets_of(steps)
        nothing, one = a.new_full((1, 1, 1), self.zero).expand_as(a), a.new_full((a.shape[0], a.shape[2]), self.one)
        return self.scan(a, nothing, one, resets)[1], self.scan(a, b, None, resets)[1]

    def compose_back(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """P and L of steps ``h = a * (h + b)`` in the other direction."""
        if self.has_kernel:
            return kernel.compose(a, b.to(a.dtype), reverse=not self.reverse, before=True)
        nothing, one = a.new_zeros(1, 1, 1).expand_as(a), torch.ones_like(a[:, 0])
        back = (None, None, not self.reverse, self.backend)
        return operators.linear_scan(a, nothing, one, *back)[1], operators.linear_scan(a, a * b, None, *back)[1]

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel composes steps without writing the states between."""
        return self.device.type == "cuda" and self.backend in ("auto", "cuda") and _can_launch()

    @property
    def largest_piece(self) -> int:
        """Steps to be composed at once, not many where that takes memory."""
        as_they_are = type(self) is _Linear and self.resets is None and self.dtype in (torch.float32, torch.float64)
        if self.has_kernel and as_they_are:
            return max(self.number, 1)
        return max(LARGEST_PIECE // max(self.batch * self.channels, 1), 1)

    def carries(self, steps: slice, h: Tensor, entering: Tensor) -> Tensor:
        """For some steps, how much of the gradient of the state after it each hands to the state before."""
        return zeroed(self.coefficients(steps)[0], self.resets_of(steps))

    def resets_of(self, steps: slice) -> Tensor | None:
        return None if self.resets is None else self.resets[:, steps]

    def by_batch(self, h: Tensor) -> Tensor:
        """h as (B, T, D)."""
        return h


class _Logarithmic(_Linear):
    """Steps of ``log_h = logaddexp(log_a + log_h, log_b)``."""

    one, zero = 0.0, float("-inf")

    def compose(self, steps: slice) -> tuple[Tensor, Tensor]:
        return self.compose_by_scans(steps)

    def run(self, h0: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return operators.log_linear_scan(*self.inputs, h0, cu_seqlens, self.resets, self.reverse, self.backend)

    def scan(
        self, a: Tensor, b: Tensor, h0: Tensor | None, resets: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return operators.log_linear_scan(a, b, h0, cu_seqlens, resets, self.reverse, self.backend)

    @staticmethod
    def times(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def times_plus(a: Tensor, h: Tensor, b: Tensor) -> Tensor:
        return torch.logaddexp(a + h, b)

    def carries(self, steps: slice, h: Tensor, entering: Tensor) -> Tensor:
        if self.reverse:
            before = torch.cat((h, entering[:, None]), 1)[:, steps.start + 1 : steps.stop + 1]
        else:
            before = torch.cat((entering[:, None], h), 1)[:, steps]
        a, b = self.coefficients(steps)
        return shares(a + zeroed(before, self.resets_of(steps), self.zero), b)[0]


class _Minimal(_Linear):
    """Steps of a minimal layer in one direction, from their pre-activations."""

    def __init__(
        self, pre: Tensor, bias: Tensor | None, cell: str, candidate: str, batch_first: bool, backend: str
    ) -> None:
        self.inputs = (pre, bias)
        self.settings = (cell, candidate, batch_first)
        self.resets, self.reverse, self.backend = None, False, backend
        self.batch, self.number, gates = pre.shape if batch_first else (pre.shape[1], pre.shape[0], pre.shape[2])
        self.channels = gates // GATES[cell]
        self.dtype, self.device = pre.dtype, pre.device

    def run(self, h0: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        cell, candidate, batch_first = self.settings
        recurrence = recurrence_of(cell, candidate, self.inputs[1] is not None)
        h, h_last = layer_scan(*self.inputs, h0[None], None, None, recurrence, batch_first, 1, self.backend)
        return h, h_last[0]

    def coefficients(self, steps: slice) -> tuple[Tensor, Tensor]:
        pre, bias = self.inputs
        assert pre is not None
        return _gates(self.by_batch(pre)[:, steps], bias, *self.settings[:2])

    def by_batch(self, h: Tensor) -> Tensor:
        return h if self.settings[2] else h.transpose(0, 1)

    def inputs_of(self, steps: slice) -> tuple[Tensor | None, ...]:
        pre, bias = self.inputs
        assert pre is not None
        return self.by_batch(self.by_batch(pre)[:, steps]), bias


class _Recurrence(_Linear):
    """Steps of a linear recurrence of the user's."""

    def __init__(
        self, recurrence: Recurrence, arguments: tuple[Tensor, ...], resets: Tensor | None, reverse: bool, backend: str
    ) -> None:
        self.recurrence, self.inputs = recurrence, arguments
        self.resets, self.reverse, self.backend = resets, reverse, backend
        sequences = [x for x in arguments if x.dim() == 3]
        self.batch, self.number, self.channels = sequences[0].shape
        self.dtype = functools.reduce(torch.promote_types, (x.dtype for x in sequences))
        self.device = sequences[0].device

    def run(self, h0: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"reverse": self.reverse, "cu_seqlens": cu_seqlens, "backend": self.backend}
        return self.recurrence(*cast(tuple[Tensor, ...], self.inputs), h0=h0, resets=self.resets, **options)

    def coefficients(self, steps: slice) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(self.dtype, torch.float32)
        own = (x.to(wide) for x in self.inputs_of(steps) if x is not None)
        shape = (self.batch, steps.stop - steps.start, self.channels)
        a, b = self.recurrence.function(*own)
        return a.expand(shape), b.expand(shape)

    def inputs_of(self, steps: slice) -> tuple[Tensor | None, ...]:
        return tuple(x[:, steps] if x.dim() == 3 else x for x in self.inputs if x is not None)


def _gates(pre: Tensor, bias: Tensor | None, cell: str, candidate: str) -> tuple[Tensor, Tensor]:
    """a and b, of float32 or wider, as the layers' kernels compute them."""
    wide = torch.promote_types(pre.dtype, torch.float32)
    total = pre.to(wide) if bias is None else pre.to(wide) + bias.to(wide)
    return RECURRENCES[cell][candidate].function(*total.chunk(GATES[cell], -1))


# Which sequences cross the seams between the parts


class _Part(NamedTuple):
    """Of one process's steps: those of the sequence that enters, and of the one that leaves, in the order of scanning.

    One not packed enters and leaves every part, for each row of the batch.
    """

    head: slice  # the entering sequence's steps
    tail: slice  # the leaving sequence's
    entering: int  # which sequence that is
    leaving: int
    continues: bool  # the entering one has begun in a part before
    through: bool  # and goes on in a part after
    ended: slice  # the sequences of which the last step is here


def _dense(steps: int) -> _Part:
    return _Part(slice(0, steps), slice(0, steps), 0, 0, True, True, slice(0, 0))


def _packed(bounds: list[int], low: int, high: int, reverse: bool) -> _Part:
    """Of sequences that lie end to end, the steps from ``low`` to ``high``."""
    inside = [n for n in range(len(bounds) - 1) if max(bounds[n], low) < min(bounds[n + 1], high)]
    if not inside:
        return _dense(0)

    def steps(n: int) -> slice:
        return slice(max(bounds[n], low) - low, min(bounds[n + 1], high) - low)

    cut_low, cut_high = bounds[inside[0]] < low, bounds[inside[-1] + 1] > high
    ended = slice(inside[0] + (reverse and cut_low), inside[-1] + 1 - (not reverse and cut_high))
    first, final = (inside[-1], inside[0]) if reverse else (inside[0], inside[-1])
    continues, goes_on = (cut_high, cut_low) if reverse else (cut_low, cut_high)
    through = continues and goes_on and first == final
    return _Part(steps(first), steps(final), first, final, continues, through, ended)


def _pieces(steps: slice, largest: int, from_end: bool) -> Iterator[slice]:
    """Steps in pieces from one end on, the first ones short: who finds that the rest does not count may stop."""
    taken, number = 0, steps.stop - steps.start
    while taken < number:
        size = min(max(2 * taken, FIRST_PIECE), largest, number - taken)
        taken += size
        begin = steps.stop - taken if from_end else steps.start + taken - size
        yield slice(begin, begin + size)


class _Seam:
    """What the process of a part tells the others, and hears."""

    def __init__(self, steps: _Linear, group: ProcessGroup, cu_seqlens: Tensor | None = None) -> None:
        self.steps, self.group, self.rank = steps, group, group.rank()
        self.sequences = steps.batch
        self.forgets = False  # whether what enters a part from either end is known to count in its first piece alone
        self.first_carries: Tensor | None = None
        self.cu_seqlens: Tensor | None = None
        if cu_seqlens is None:
            self.parts = [_dense(steps.number)] * group.size()
        else:
            lengths = _gather(group, torch.tensor([steps.number], device=steps.device))[0]
            ends = [0, *lengths.flatten().cumsum(0).tolist()]
            operators.check_cu_seqlens(cu_seqlens, ends[-1])
            bounds = cu_seqlens.tolist()
            self.parts = [_packed(bounds, low, high, steps.reverse) for low, high in pairwise(ends)]
            low, high = ends[self.rank], ends[self.rank + 1]
            self.cu_seqlens, self.sequences = cu_seqlens.clamp(low, high) - low, len(bounds) - 1
            self.empty = cu_seqlens.diff()[:, None] == 0
            self.ended = self.rows(self.parts[self.rank].ended) & ~self.empty
        self.part = self.parts[self.rank]

    def without_inputs(self) -> "_Seam":
        """To be kept, when the inputs' memory is not."""
        other = copy.copy(self)
        other.steps = self.steps.of(())
        return other

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """h of this part and the last state of all."""
        if not self.sequences:
            return self.steps.run(self.initial(h0), self.cu_seqlens)
        shared = _Shared.apply(self.initial(h0), self.group) if self.packed else self.initial(h0)
        steps = self.steps
        start = None
        with torch.no_grad():
            passes = self.passes_first_piece()
            P, L = self.composed()
            self.forgets = passes is not None and not bool(passes)
            if not self.forgets:
                self.first_carries = None
        if self.forgets:  # the exchange, which takes the host its time, is then behind the scan
            start = self.initial(None)
            h, last = steps.run(start, None)
        with torch.no_grad():
            told = _gather(self.group, *self.begun(P, L, shared), *self.resets_in(self.part.tail))
            entering, of_all = self.enter(shared, *told)
        # Constants to the scan: _Across hands their gradients on.
        entering, of_all = (x.detach().to(steps.dtype) for x in (entering, of_all))
        if start is None:
            h, last = steps.run(self.local(shared, entering), self.cu_seqlens)
        else:
            self.begin_again(h, start, entering)
        return _Across.apply(self.without_inputs(), entering, of_all, h, last, h0, *steps.inputs)

    def begin_again(self, h: Tensor, start: Tensor, entering: Tensor) -> None:
        """Of a scan from no state, the steps of the first piece, in which the entering one is forgotten.

        Into the memory of what the scan has kept for its backward.
        """
        piece = next(self.pieces_onwards())
        with torch.no_grad():
            first = self.steps.part(piece)
            states, _ = first.run(entering, None)
            first.by_batch(h.data)[:, piece] = first.by_batch(states)
            start.data.copy_(entering)

    def run_plainly(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same of differentiable parts alone, for derivatives of higher order.

        Without a branch: all processes must have the same graph, or their exchanges would be out of step.
        """
        steps, group = self.steps, self.group
        shared = _Shared.apply(self.initial(h0), group)
        P, L = steps.compose_by_scans(self.part.tail)
        told = (*self.begun(P, L, shared), *self.resets_in(self.part.tail))
        told_by_all = _Gathered.apply(torch.cat([x.to(P.dtype) for x in told], 1), group)
        entering, of_all = self.enter(shared, *told_by_all.split([x.shape[1] for x in told], -1))
        everything = slice(0, steps.number)
        a, b = steps.coefficients(everything)
        h, last = steps.scan(a, b, self.local(shared, entering).to(b.dtype), steps.resets, self.cu_seqlens)
        if self.packed:
            of_all = torch.where(self.empty, shared, _Sum.apply(last.masked_fill(~self.ended, 0.0), group))
        return steps.by_batch(h).to(steps.dtype), of_all.to(steps.dtype)

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    def rows(self, sequences: int | slice) -> Tensor:
        """Which of the packed sequences these are, (N, 1)."""
        chosen = torch.zeros(self.sequences, 1, dtype=torch.bool)
        chosen[sequences] = True
        return chosen.to(self.steps.device)

    def initial(self, h0: Tensor | None) -> Tensor:
        """The initial states, (B, D) or (N, D)."""
        steps = self.steps
        if h0 is not None:
            return h0
        return torch.full((self.sequences, steps.channels), steps.zero, dtype=steps.dtype, device=steps.device)

    def local(self, initial: Tensor, entering: Tensor) -> Tensor:
        """The states that this part's own scan starts from."""
        if not self.packed:
            return entering
        enters = self.part.continues and self.steps.number > 0
        return torch.where(self.rows(self.part.entering) & enters, entering, initial)

    def resets_in(self, steps: slice) -> tuple[Tensor, ...]:
        """(B, 1): whether the state is zero before one of the steps; nothing to tell where it never is."""
        return () if self.steps.resets is None else (self.steps.resets[:, steps].any(1, keepdim=True),)

    def may_pass_on(self, resets: tuple[Tensor, ...]) -> bool:
        """Whether a kernel takes a state through all parts' compositions, which is not differentiable."""
        return self.steps.has_kernel and not (self.packed or resets or torch.is_grad_enabled())

    def forgotten(self, resets: tuple[Tensor, ...]) -> Tensor | None:
        """(B, R): in which processes' parts no state passes from end to end, of all processes' resets."""
        if not (self.packed or resets):
            return None
        ends = self.each(lambda part: not part.through)
        return (resets[0][..., 0].bool() | ends if resets else ends).T.contiguous()

    def wide(self, x: Tensor) -> Tensor:
        """Products of float32 coefficients near 1 are all rounded alike, and these numbers are few."""
        return x.to(torch.float64 if x.device.type in ("cpu", "cuda") else torch.float32)

    def composed(self) -> tuple[Tensor, Tensor]:
        """P and L of the leaving sequence's steps, from the last one back, until no state before them counts."""
        steps = self.steps
        pieces = _pieces(self.part.tail, steps.largest_piece, from_end=not steps.reverse)
        return self.over(pieces, steps.compose, type(steps))

    def passes_first_piece(self) -> Tensor | None:
        """Whether anything of the state that enters passes the first piece of a dense part, if a kernel can tell.

        So much of the gradient that comes in at the piece's other end leaves by it, too.
        """
        steps, piece = self.steps, next(self.pieces_onwards(), None)
        if piece is None or self.packed or not steps.has_kernel or isinstance(steps, _Logarithmic):
            return None
        self.first_carries = zeroed(steps.coefficients(piece)[0], steps.resets_of(piece))
        return steps.compose_back(self.first_carries, self.first_carries)[0].any()

    def pieces_onwards(self) -> Iterator[slice]:
        """Of the entering sequence's steps, in the order of scanning."""
        head = self.part.head if self.part.continues else slice(0, 0)
        return _pieces(head, self.steps.largest_piece, from_end=self.steps.reverse)

    def over(
        self,
        pieces: Iterator[slice],
        compose: Callable[[slice], tuple[Tensor, Tensor]],
        ring: type[_Linear],
        known: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """P and L of pieces until P has vanished, which it does in the first if that is ``known``."""
        so_far = None
        for piece in pieces:
            P, L = (self.wide(x) for x in compose(piece))
            if so_far:
                P, L = ring.times(so_far[0], P), ring.times_plus(so_far[0], L, so_far[1])
            so_far = P, L
            if known or _has_vanished(P, ring.zero):
                break
        if so_far:
            return so_far
        none = torch.zeros(self.steps.batch, self.steps.channels, device=self.steps.device)
        return self.wide(none + ring.one), self.wide(none + ring.zero)

    def begun(self, P: Tensor, L: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """P and L, if the leaving sequence has begun in this part from that."""
        if not self.packed:
            return P, L
        part = self.part
        begins = torch.tensor(not (part.continues and part.entering == part.leaving), device=P.device)
        return P, torch.where(begins, self.steps.times_plus(P, initial[part.leaving], L), L)

    def enter(self, initial: Tensor, P: Tensor, L: Tensor, *resets: Tensor) -> tuple[Tensor, Tensor]:
        """From all processes', (R, B, D), the state that enters this part, and the last one of a dense sequence."""
        steps = self.steps
        if self.may_pass_on(resets) and type(steps) is not _Logarithmic:
            return kernel.pass_on(P, L, initial, self.rank, steps.reverse)
        start = torch.full_like(P[0], steps.zero) if self.packed else initial.to(P.dtype)
        after, last = steps.scan(P.transpose(0, 1), L.transpose(0, 1), start, self.forgotten(resets))
        return self.before(start, after, steps.reverse), last

    def carried_back(self, grad_h: Tensor, h: Tensor, entering: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`composed`, of the entering sequence and its gradient: from the first step on."""
        steps = self.steps
        h, grad_h = steps.by_batch(h), steps.by_batch(grad_h)

        def compose(piece: slice) -> tuple[Tensor, Tensor]:
            a = steps.carries(piece, h, entering) if self.first_carries is None else self.first_carries
            return steps.compose_back(a, grad_h[:, piece])

        return self.over(self.pieces_onwards(), compose, _Linear, self.forgets)

    def come_in(self, grad_last: Tensor, P: Tensor, L: Tensor, *resets: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the state that leaves this part, and that of a dense sequence's initial state."""
        reverse = not self.steps.reverse
        if self.may_pass_on(resets):
            return kernel.pass_on(P, L, grad_last, self.rank, reverse)
        start = grad_last.to(P.dtype)
        if self.packed:  # a sequence that ends in a part has its own last gradient come in there
            ends = self.each(lambda part: part.continues and not part.through)[..., None]
            at_end = start[[part.entering for part in self.parts]][:, None]
            goes_back = ends & ~resets[0] if resets else ends
            L = L + torch.where(goes_back, P * at_end, 0.0)
            L = torch.where(self.each(lambda part: part.continues)[..., None], L, 0.0)
            start = torch.zeros_like(P[0])
        back = (None, self.forgotten(resets), reverse, self.steps.backend)
        after, last = operators.linear_scan(P.transpose(0, 1), L.transpose(0, 1), start, *back)
        return self.before(start, after, reverse), last

    def each(self, what: Callable[[_Part], bool]) -> Tensor:
        """(R, 1): of each process's part."""
        return torch.tensor([[what(part)] for part in self.parts], device=self.steps.device)

    def before(self, start: Tensor, after: Tensor, reverse: bool) -> Tensor:
        """Of the states after each process's part, (B, R, D), in the order of scanning, the one before this."""
        states = (after, start[:, None]) if reverse else (start[:, None], after)
        return torch.cat(states, 1)[:, self.rank + 1 if reverse else self.rank]


class _Across(torch.autograd.Function):
    """Between a part's scan and who uses it: has the gradient that comes in from other parts start its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        seam: _Seam,
        entering: Tensor,
        of_all: Tensor,
        h: Tensor,
        last: Tensor,
        h0: Tensor | None,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.seam = seam
        ctx.save_for_backward(h, entering, last, h0, *inputs)
        ctx.set_materialize_grads(False)
        if seam.packed:
            ended = last.masked_fill(~seam.ended, 0.0)
            distributed.all_reduce(ended, group=seam.group)
            of_all = torch.where(seam.empty, seam.initial(h0), ended)
        return h, of_all

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_last: Tensor | None) -> tuple:
        seam: _Seam = copy.copy(ctx.seam)
        h, entering, last, h0, *inputs = ctx.saved_tensors
        seam.steps = seam.steps.of(tuple(inputs))
        grad_h = torch.zeros_like(h) if grad_h is None else grad_h
        grad_last = torch.zeros_like(last) if grad_last is None else grad_last
        nothing = (None,) * 3
        if torch.is_grad_enabled():
            wanted = [x for x in (h0, *inputs) if x is not None and x.requires_grad]
            grads = iter(torch.autograd.grad(seam.run_plainly(h0), wanted, (grad_h, grad_last), create_graph=True))
            given = (next(grads) if x is not None and x.requires_grad else None for x in (h0, *inputs))
            return *nothing, None, None, *given
        head = seam.part.head
        mine = (*seam.carried_back(grad_h, h, entering), *seam.resets_in(head))
        if seam.packed:  # of as many states as there are sequences
            grad_last = grad_last.clone(memory_format=torch.contiguous_format)
            distributed.all_reduce(grad_last, group=seam.group)
            told = _gather(seam.group, *mine)
        else:
            told = _gather(seam.group, *mine, grad_last)
            told, grad_last = told[:-1], told[-1].sum(0)
        coming, grad_h0 = (x.to(last.dtype) for x in seam.come_in(grad_last, *told))
        if seam.packed:
            grad_h0 = grad_last.masked_fill(~seam.empty, 0.0)
            leaving = seam.rows(seam.part.leaving if seam.steps.number else slice(0))
            coming = torch.where(leaving, coming, 0.0) + grad_last.masked_fill(~seam.ended, 0.0)
        return *nothing, grad_h, coming, None if h0 is None else grad_h0, *(None for _ in inputs)


class _Sum(torch.autograd.Function):
    """The sum of all processes' tensors; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None


class _Gathered(torch.autograd.Function):
    """All processes' tensors, (R, ...): each gets the gradient of all uses of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(group, x)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group)[ctx.group.rank()], None


class _Shared(torch.autograd.Function):
    """A tensor that is the same on all processes: each gets the gradient of all its uses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else _Sum.apply(grad, ctx.group), None


def _gather(group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Each tensor of all processes, (R, ...), by one exchange in the widest dtype."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    mine = torch.cat([x.to(dtype).flatten() for x in tensors])
    gathered = mine.new_empty(group.size() * len(mine))
    _all_gather(gathered, mine, group=group)
    parts = gathered.view(group.size(), -1).split([x.numel() for x in tensors], 1)
    return tuple(part.reshape(-1, *x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True))


@functools.cache
def _can_launch() -> bool:
    return nvrtc.why_no_cuda() is None


def _has_vanished(P: Tensor, zero: float) -> bool:
    """Waits for the GPU, which a capture cannot."""
    if P.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return not bool(P.any() if zero == 0 else P.ne(zero).any())
