"""What the process of a part tells the others, and hears."""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from ostinato.distributed.exchange import Gathered, Shared, Sum, gather
from ostinato.distributed.steps import Linear, Logarithmic
from ostinato.kernels.scan import compose as kernel
from ostinato.kernels.scan import operators

FIRST_PIECE = 1024  # steps before it is asked whether the state before them still counts
GROWTH = 32  # the next time, as the host waits for the answer
LONGEST_REACH = 1 / 8  # of a part, which may well be scanned twice


class Part(NamedTuple):
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


def dense_part(steps: int) -> Part:
    return Part(slice(0, steps), slice(0, steps), 0, 0, True, True, slice(0, 0))


def packed_part(bounds: list[int], low: int, high: int, reverse: bool) -> Part:
    """Of sequences that lie end to end, the steps from ``low`` to ``high``."""
    inside = [n for n in range(len(bounds) - 1) if max(bounds[n], low) < min(bounds[n + 1], high)]
    if not inside:
        return dense_part(0)

    def steps(n: int) -> slice:
        return slice(max(bounds[n], low) - low, min(bounds[n + 1], high) - low)

    cut_low, cut_high = bounds[inside[0]] < low, bounds[inside[-1] + 1] > high
    ended = slice(inside[0] + (reverse and cut_low), inside[-1] + 1 - (not reverse and cut_high))
    first, final = (inside[-1], inside[0]) if reverse else (inside[0], inside[-1])
    continues, goes_on = (cut_high, cut_low) if reverse else (cut_low, cut_high)
    through = continues and goes_on and first == final
    return Part(steps(first), steps(final), first, final, continues, through, ended)


def _pieces(steps: slice, first: int, largest: int, from_end: bool) -> Iterator[slice]:
    """Steps in pieces from one end on, ``first`` ones first: who finds that the rest does not count may stop."""
    taken, number = 0, steps.stop - steps.start
    while taken < number:
        size = min(max((GROWTH - 1) * taken, first), largest, number - taken)
        taken += size
        begin = steps.stop - taken if from_end else steps.start + taken - size
        yield slice(begin, begin + size)


class Seam:
    """What the process of a part tells the others, and hears."""

    def __init__(self, steps: Linear, group: ProcessGroup, cu_seqlens: Tensor | None = None) -> None:
        self.steps, self.group, self.rank = steps, group, group.rank()
        self.sequences, self.packed = steps.batch, cu_seqlens is not None
        if cu_seqlens is None:
            self.parts = [dense_part(steps.number)] * group.size()
        else:
            lengths = gather(group, torch.tensor([steps.number], device=steps.device))[0]
            ends = [0, *lengths.flatten().cumsum(0).tolist()]
            operators.check_cu_seqlens(cu_seqlens, ends[-1])
            bounds = cu_seqlens.tolist()
            self.parts = [packed_part(bounds, low, high, steps.reverse) for low, high in pairwise(ends)]
            low, high = ends[self.rank], ends[self.rank + 1]
            steps.cu_seqlens, self.sequences = cu_seqlens.clamp(low, high) - low, len(bounds) - 1
            self.empty = cu_seqlens.diff()[:, None] == 0
            part = self.parts[self.rank]
            self.ended = self.rows(part.ended) & ~self.empty
            self.enters = self.rows(part.entering if part.continues and steps.number else slice(0))
        self.part = self.parts[self.rank]

    def of(self, inputs: tuple[Tensor | None, ...]) -> "Seam":
        """The same of other inputs; of none, to be kept without their memory."""
        other = copy.copy(self)
        other.steps = self.steps.of(inputs)
        return other

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """h of this part and the last state of all."""
        if not self.sequences:
            return self.steps.run(self.initial(h0))
        return _InParts.apply(self, h0, *self.steps.inputs)

    def forward(self, h0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """h of this part, the last state of all, and the state that enters."""
        steps = self.steps
        self.reach = self.find_reach()
        if self.reach:
            h, last = steps.run(None)
            P, L, initial = torch.zeros_like(last), last, self.initial(h0)
        else:
            initial = self.initial(h0)
            P, L = self.begun(*self.composed(), initial)
        told = gather(self.group, self.wide(P), self.wide(L), *self.resets_in(self.part.tail))
        entering, of_all = (x.to(steps.dtype) for x in self.enter(initial, *told))
        if self.reach:
            head, _ = self.ends(self.reach)
            first = steps.part(head)
            steps.by_batch(h)[:, head] = first.by_batch(first.run(entering)[0])
        else:
            h, last = steps.run(self.local(initial, entering))
        if self.packed:
            ended = last.masked_fill(~self.ended, 0.0)
            distributed.all_reduce(ended, group=self.group)
            of_all = torch.where(self.empty, initial, ended)
        return h, of_all, entering

    def backward(
        self, h0: Tensor | None, h: Tensor, entering: Tensor, grad_h: Tensor, grad_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of h0 and of the inputs."""
        steps = self.steps
        if self.reach:
            of_start, *grads = steps.run_back(h, entering, grad_h, None)
            P, L = torch.zeros_like(entering), cast(Tensor, of_start)
        else:
            P, L = self.carried_back(grad_h, h, entering)
        mine = self.wide(P), self.wide(L), *self.resets_in(self.part.head)
        initial = self.initial(h0)
        grad_last = torch.zeros_like(initial) if grad_last is None else grad_last
        if self.packed:  # of as many states as there are sequences
            grad_last = grad_last.clone(memory_format=torch.contiguous_format)
            distributed.all_reduce(grad_last, group=self.group)
            told = gather(self.group, *mine)
        else:
            told = gather(self.group, *mine, grad_last)
            told, grad_last = told[:-1], told[-1].sum(0)
        coming, grad_h0 = (x.to(steps.dtype) for x in self.come_in(grad_last, *told))
        if self.reach:
            self.add_to_last_steps(grads, h, coming)
            return grad_h0, *grads
        if self.packed:
            leaving = self.rows(self.part.leaving if steps.number else slice(0))
            coming = torch.where(leaving, coming, 0.0) + grad_last.masked_fill(~self.ended, 0.0)
        of_start, *grads = steps.run_back(h, self.local(initial, entering), grad_h, coming)
        if self.packed and h0 is not None:
            grad_h0 = torch.where(self.enters, 0.0, cast(Tensor, of_start))
            distributed.all_reduce(grad_h0, group=self.group)
            grad_h0 += grad_last.masked_fill(~self.empty, 0.0)
        return grad_h0, *grads

    def add_to_last_steps(self, grads: list[Tensor | None], h: Tensor, coming: Tensor) -> None:
        """To the gradients of a part in which it is soon forgotten, what comes in from the parts after it."""
        steps, (_, tail) = self.steps, self.ends(self.reach)
        states, part = steps.by_batch(h), steps.part(tail)
        before = states[:, tail.stop if steps.reverse else tail.start - 1]
        _, *more = part.run_back(steps.by_batch(states[:, tail]).contiguous(), before, None, coming)
        for grad, rest in zip(steps.of(tuple(grads)).inputs_at(tail), more, strict=True):
            if grad is not None and rest is not None:
                grad += rest

    def run_plainly(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same of differentiable parts alone, for derivatives of higher order.

        Without a branch: all processes must have the same graph, or their exchanges would be out of step.
        """
        steps, group = self.steps, self.group
        shared = Shared.apply(self.initial(h0), group)
        P, L = steps.part(self.part.tail).compose_by_scans()
        told = (*self.begun(P, L, shared), *self.resets_in(self.part.tail))
        told_by_all = Gathered.apply(torch.cat([x.to(P.dtype) for x in told], 1), group)
        entering, of_all = self.enter(shared, *told_by_all.split([x.shape[1] for x in told], -1))
        a, b = steps.coefficients()
        h, last = steps.scan(a, b, self.local(shared, entering).to(b.dtype), steps.resets, steps.cu_seqlens)
        if self.packed:
            of_all = torch.where(self.empty, shared, Sum.apply(last.masked_fill(~self.ended, 0.0), group))
        return steps.by_batch(h).to(steps.dtype), of_all.to(steps.dtype)

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
        return torch.where(self.enters, entering, initial)

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

    def find_reach(self) -> int:
        """Within how many steps a state is forgotten that enters a dense part from either end; 0 if not in few."""
        steps, reach = self.steps, FIRST_PIECE
        if self.packed or not steps.forgets or _is_captured(steps.device):
            return 0
        while reach <= min(steps.number * LONGEST_REACH, steps.most_at_once):
            if steps.ends(reach).forget_all():
                return reach
            reach *= GROWTH
        return 0

    def ends(self, reach: int) -> tuple[slice, slice]:
        """So many steps from where states enter, and so many before they leave."""
        low, high = slice(0, reach), slice(self.steps.number - reach, self.steps.number)
        return (high, low) if self.steps.reverse else (low, high)

    def composed(self) -> tuple[Tensor, Tensor]:
        """P and L of the leaving sequence's steps, from the last one back, until no state before them counts."""
        steps = self.steps
        return self.over(self.pieces(self.part.tail, not steps.reverse), lambda p: steps.part(p).compose(), type(steps))

    def carried_back(self, grad_h: Tensor, h: Tensor, entering: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`composed`, of the entering sequence and its gradient: from the first step on."""
        steps = self.steps
        h, grad_h = steps.by_batch(h), steps.by_batch(grad_h)

        def compose(piece: slice) -> tuple[Tensor, Tensor]:
            return steps.compose_back(steps.carries(piece, h, entering), grad_h[:, piece])

        head = self.part.head if self.part.continues else slice(0, 0)
        return self.over(self.pieces(head, steps.reverse), compose, Linear)

    def pieces(self, steps: slice, from_end: bool) -> Iterator[slice]:
        """The first ones short, unless it is known that states are not forgotten so soon."""
        largest = self.steps.largest_piece
        return _pieces(steps, FIRST_PIECE if self.packed else largest, largest, from_end)

    def over(
        self, pieces: Iterator[slice], compose: Callable[[slice], tuple[Tensor, Tensor]], ring: type[Linear]
    ) -> tuple[Tensor, Tensor]:
        """P and L of pieces until P has vanished."""
        so_far = None
        for piece in pieces:
            if so_far and not _is_captured(self.steps.device) and not so_far[0].ne(ring.zero).any():
                break
            P, L = (self.wide(x) for x in compose(piece))
            if so_far:
                P, L = ring.times(so_far[0], P), ring.times_plus(so_far[0], L, so_far[1])
            so_far = P, L
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
        if self.may_pass_on(resets) and type(steps) is not Logarithmic:
            return kernel.pass_on(P, L, initial, self.rank, steps.reverse)
        start = torch.full_like(P[0], steps.zero) if self.packed else initial.to(P.dtype)
        after, last = steps.scan(P.transpose(0, 1), L.transpose(0, 1), start, self.forgotten(resets))
        return self.before(start, after, steps.reverse), last

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

    def each(self, what: Callable[[Part], bool]) -> Tensor:
        """(R, 1): of each process's part."""
        return torch.tensor([[what(part)] for part in self.parts], device=self.steps.device)

    def before(self, start: Tensor, after: Tensor, reverse: bool) -> Tensor:
        """Of the states after each process's part, (B, R, D), in the order of scanning, the one before this."""
        states = (after, start[:, None]) if reverse else (start[:, None], after)
        return torch.cat(states, 1)[:, self.rank + 1 if reverse else self.rank]


class _InParts(torch.autograd.Function):
    """What :class:`Seam` makes of h0 and a part's inputs; derivatives of higher order are those of its plain form."""

    @staticmethod
    def forward(ctx: Any, seam: Seam, h0: Tensor | None, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        h, of_all, entering = seam.forward(h0)
        ctx.seam = seam.of(())
        ctx.save_for_backward(h0, h, entering, *inputs)
        ctx.set_materialize_grads(False)
        return h, of_all

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_last: Tensor | None) -> tuple[Tensor | None, ...]:
        h0, h, entering, *inputs = ctx.saved_tensors
        seam = ctx.seam.of(tuple(inputs))
        grad_h = torch.zeros_like(h) if grad_h is None else grad_h
        if torch.is_grad_enabled():
            wanted = [x for x in (h0, *inputs) if x is not None and x.requires_grad]
            results = seam.run_plainly(h0)
            grad_last = torch.zeros_like(results[1]) if grad_last is None else grad_last
            grads = iter(torch.autograd.grad(results, wanted, (grad_h, grad_last), create_graph=True))
            return None, *(next(grads) if x is not None and x.requires_grad else None for x in (h0, *inputs))
        grad_h0, *of_inputs = seam.backward(h0, h, entering, grad_h, grad_last)
        return None, None if h0 is None else grad_h0, *of_inputs


def _is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, when what depends on a number cannot be decided."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
