"""Shards of packed sequences (``cu_seqlens``), some of which cross boundaries between shards."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from ostinato.distributed.boundary import Boundary, Gradients
from ostinato.distributed.collectives import Shared, Sum, gather
from ostinato.distributed.steps import Steps
from ostinato.kernels.scan.operators import check_cu_seqlens


class Crossing(NamedTuple):
    """The sequences that enter and leave a shard, and which of its steps are theirs, in scan order."""

    head: slice = slice(0, 0)  # the entering sequence's steps
    tail: slice = slice(0, 0)  # the leaving sequence's
    entering: int = 0  # that sequence's number
    leaving: int = 0
    continues: bool = True  # the entering one has begun in an earlier shard
    through: bool = True  # and continues in a later one
    ended: slice = slice(0, 0)  # the sequences whose last step is in this shard

    @classmethod
    def between(cls, low: int, high: int, bounds: list[int], reverse: bool) -> "Crossing":
        """Those of the shard from step ``low`` to ``high``, given all sequences' bounds; none if the shard is empty."""
        inside = [n for n, (begin, end) in enumerate(pairwise(bounds)) if max(begin, low) < min(end, high)]
        if not inside:
            return cls()

        def steps(n: int) -> slice:
            return slice(max(bounds[n], low) - low, min(bounds[n + 1], high) - low)

        cut_low, cut_high = bounds[inside[0]] < low, bounds[inside[-1] + 1] > high
        ended = slice(inside[0] + (reverse and cut_low), inside[-1] + 1 - (not reverse and cut_high))
        first, final = (inside[-1], inside[0]) if reverse else (inside[0], inside[-1])
        continues, goes_on = (cut_high, cut_low) if reverse else (cut_low, cut_high)
        through = continues and goes_on and first == final
        return cls(steps(first), steps(final), first, final, continues, through, ended)


class PackedBoundary(Boundary):
    """The boundary of a shard of packed sequences: one may enter it, and the same or another leave it."""

    def __init__(self, steps: Steps, group: ProcessGroup, cu_seqlens: Tensor) -> None:
        super().__init__(steps, group)
        lengths = gather(group, torch.tensor([steps.length], device=steps.device))[0]
        ends = [0, *lengths.flatten().cumsum(0).tolist()]
        check_cu_seqlens(cu_seqlens, ends[-1])
        bounds = cu_seqlens.tolist()
        self.sequences = len(bounds) - 1
        self.crossings = [Crossing.between(low, high, bounds, steps.reverse) for low, high in pairwise(ends)]
        self.crossing = crossing = self.crossings[self.rank]
        self.head, self.tail = crossing.head if crossing.continues else slice(0, 0), crossing.tail
        low, high = ends[self.rank], ends[self.rank + 1]
        steps.cu_seqlens = cu_seqlens.clamp(low, high) - low
        self.empty = cu_seqlens.diff()[:, None] == 0
        self.ended = self.rows(crossing.ended) & ~self.empty
        self.enters = self.rows(crossing.entering if crossing.continues and steps.length else slice(0))
        self.leaves = self.rows(crossing.leaving if steps.length else slice(0))

    def rows(self, sequences: int | slice) -> Tensor:
        """A mask (N, 1) of these sequences."""
        chosen = torch.zeros(self.sequences, 1, dtype=torch.bool)
        chosen[sequences] = True
        return chosen.to(self.steps.device)

    def each(self, predicate: Callable[[Crossing], bool]) -> Tensor:
        """The value of a predicate for each process's shard, (R, 1)."""
        return torch.tensor([[predicate(crossing)] for crossing in self.crossings], device=self.steps.device)

    def forward(self, h0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        initial = self.initial_state(h0)
        carry, _ = self.exchange(initial, *self.from_initial(*self.reduced(), initial))
        h, last = self.steps.run(torch.where(self.enters, carry, initial))
        ended = last.masked_fill(~self.ended, 0.0)
        distributed.all_reduce(ended, group=self.group)
        return h, torch.where(self.empty, initial, ended), carry

    def backward(
        self, h0: Tensor | None, h: Tensor, carry: Tensor, grad_h: Tensor, grad_last: Tensor | None
    ) -> Gradients:
        initial = self.initial_state(h0)
        total = torch.zeros_like(initial) if grad_last is None else grad_last.clone()
        distributed.all_reduce(total, group=self.group)
        P, L = self.reduced_backward(grad_h, h, carry)
        gathered = gather(self.group, self.widened(P), self.widened(L), *self.resets_in(self.head))
        incoming = self.enter_backward(total, *gathered)[0].to(self.steps.dtype)
        incoming = torch.where(self.leaves, incoming, 0.0) + total.masked_fill(~self.ended, 0.0)
        start = torch.where(self.enters, carry, initial)
        grad_start, *grads = self.steps.run_backward(h, start, grad_h, incoming)
        if h0 is None:
            return None, *grads
        grad_h0 = torch.where(self.enters, 0.0, cast(Tensor, grad_start))
        distributed.all_reduce(grad_h0, group=self.group)
        return grad_h0 + total.masked_fill(~self.empty, 0.0), *grads

    def run_differentiable(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        steps, initial = self.steps, Shared.apply(self.initial_state(h0), self.group)
        composed = steps.part(self.tail).compose_by_scans()
        carry, _ = self.exchange_differentiable(initial, *self.from_initial(*composed, initial))
        a, b = steps.coefficients()
        start = torch.where(self.enters, carry, initial).to(b.dtype)
        h, last = steps.scan(a, b, start, steps.resets, steps.cu_seqlens)
        h_last = torch.where(self.empty, initial, Sum.apply(last.masked_fill(~self.ended, 0.0), self.group))
        return h.to(steps.dtype), h_last.to(steps.dtype)

    def from_initial(self, P: Tensor, L: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        """P and L, with L from the initial state, not from zero, if the leaving sequence begins in this shard."""
        crossing = self.crossing
        begins = torch.tensor(not (crossing.continues and crossing.entering == crossing.leaving), device=P.device)
        start = initial[crossing.leaving][None].to(P.dtype)
        _, after = self.steps.scan(P[:, None], L[:, None], start)  # a scan's derivatives are finite where P is zero
        return P, torch.where(begins, after, L)

    def enter(self, initial: Tensor, P: Tensor, L: Tensor, *resets: Tensor) -> tuple[Tensor, Tensor]:
        return super().enter(torch.full_like(P[0], self.steps.ring.zero), P, L, *resets)

    def enter_backward(self, grad_last: Tensor, P: Tensor, L: Tensor, *resets: Tensor) -> tuple[Tensor, Tensor]:
        """As without packing, but the gradient of a sequence's last state enters at the shard in which it ends."""
        ends = self.each(lambda crossing: crossing.continues and not crossing.through)[..., None]
        at_end = grad_last.to(P.dtype)[[crossing.entering for crossing in self.crossings]][:, None]
        L = L + torch.where(ends & ~resets[0] if resets else ends, P * at_end, 0.0)
        L = torch.where(self.each(lambda crossing: crossing.continues)[..., None], L, 0.0)
        return super().enter_backward(torch.zeros_like(P[0]), P, L, *resets)

    def can_pass_on(self, resets: tuple[Tensor, ...]) -> bool:
        return False

    def forgotten(self, resets: tuple[Tensor, ...]) -> Tensor:
        ends = self.each(lambda crossing: not crossing.through)
        return (resets[0][..., 0].bool() | ends if resets else ends).T.contiguous()
