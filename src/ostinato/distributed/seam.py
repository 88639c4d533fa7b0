"""What the process of a part tells the others, and hears."""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ostinato.distributed.exchange import Gathered, Shared, gather
from ostinato.distributed.steps import Linear, Logarithmic
from ostinato.kernels.scan import compose as kernel
from ostinato.kernels.scan import operators

FIRST_REACH = 1024  # steps before it is asked whether the state before them still counts
GROWTH = 32  # the next time, as the host waits for the answer
LONGEST_REACH = 1 / 8  # of a part, which may well be scanned twice

Gradients = tuple[Tensor | None, ...]


class Seam:
    """Of a part that every row of the batch enters, and leaves."""

    likely = True  # that a part forgets: the last one did

    def __init__(self, steps: Linear, group: ProcessGroup, forgets: Callable[[], bool] | None = None) -> None:
        """``forgets`` says whether the part does within FIRST_REACH, if that has been asked before."""
        self.steps, self.group, self.rank, self.forgets = steps, group, group.rank(), forgets
        self.sequences = steps.batch
        self.head = self.tail = slice(0, steps.number)  # steps of the sequence that enters, and of the one that leaves
        self.reach = 0

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
        steps, forgets = self.steps, self.forgets or self.ask(FIRST_REACH)
        scanned = steps.run(None) if forgets and Seam.likely else None  # under way while the host hears the answer
        self.reach = self.find_reach(forgets)
        if not self.reach:
            del scanned
            entering, of_all = self.exchange(self.initial(h0), *self.composed())
            return steps.run(entering)[0], of_all, entering
        h, last = scanned or steps.run(None)  # and while it sees to the exchange
        entering, of_all = self.exchange(self.initial(h0), torch.zeros_like(last), last)
        head, _ = self.ends()
        first = steps.part(head)
        steps.by_batch(h)[:, head] = first.by_batch(first.run(entering)[0])
        return h, of_all, entering

    def backward(
        self, h0: Tensor | None, h: Tensor, entering: Tensor, grad_h: Tensor, grad_last: Tensor | None
    ) -> Gradients:
        """Gradients of h0 and of the inputs."""
        steps = self.steps
        if not self.reach:
            composed = self.carried_back(grad_h, h, entering)
            coming, grad_h0 = self.exchange_back(grad_last, *composed)
            return grad_h0, *steps.run_back(h, entering, grad_h, coming)[1:]
        of_start, *grads = steps.run_back(h, entering, grad_h, None)
        coming, grad_h0 = self.exchange_back(grad_last, torch.zeros_like(entering), cast(Tensor, of_start))
        _, tail = self.ends()  # gradients are linear: what the incoming one makes of these steps is added
        states, last = steps.by_batch(h), steps.part(tail)
        before = states[:, tail.stop if steps.reverse else tail.start - 1]
        _, *more = last.run_back(steps.by_batch(states[:, tail]).contiguous(), before, None, coming)
        for grad, rest in zip(steps.of(tuple(grads)).part(tail).inputs, more, strict=True):
            if grad is not None and rest is not None:
                grad += rest
        return grad_h0, *grads

    def run_plainly(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """h and the last state of all, of differentiable parts alone, for derivatives of higher order.

        Without a branch: all processes must have the same graph, or their exchanges would be out of step.
        """
        steps, initial = self.steps, Shared.apply(self.initial(h0), self.group)
        entering, of_all = self.exchange_plainly(initial, *steps.compose_by_scans())
        a, b = steps.coefficients()
        h, _ = steps.scan(a, b, entering.to(b.dtype), steps.resets)
        return steps.by_batch(h).to(steps.dtype), of_all.to(steps.dtype)

    # Which order

    def ask(self, reach: int) -> Callable[[], bool] | None:
        """What says whether a state is forgotten within so many steps from either end, if they are few enough."""
        steps = self.steps
        if not (steps.forgets and may_ask(steps.number, steps.device)):
            return None
        few = reach <= min(steps.number * LONGEST_REACH, steps.most_at_once)
        return steps.ends(reach).ask_whether_forgotten() if few else None

    def find_reach(self, forgets: Callable[[], bool] | None) -> int:
        """Within how many steps that is; 0 if not in few."""
        self.forgets, reach = None, FIRST_REACH
        while forgets:
            Seam.likely = forgets()
            if Seam.likely:
                return reach
            reach *= GROWTH
            forgets = self.ask(reach)
        return 0

    def ends(self) -> tuple[slice, slice]:
        """The steps within reach of where states enter, and of where they leave."""
        low, high = slice(0, self.reach), slice(self.steps.number - self.reach, self.steps.number)
        return (high, low) if self.steps.reverse else (low, high)

    # What is told

    def composed(self) -> tuple[Tensor, Tensor]:
        """P and L of the leaving sequence's steps."""
        steps = self.steps
        return self.over(self.tail, lambda piece: steps.part(piece).compose(), type(steps), steps.reverse)

    def carried_back(self, grad_h: Tensor, h: Tensor, entering: Tensor) -> tuple[Tensor, Tensor]:
        """P and L of the entering sequence's gradient, which goes in the other direction."""
        steps = self.steps
        h, grad_h = steps.by_batch(h), steps.by_batch(grad_h)

        def compose(piece: slice) -> tuple[Tensor, Tensor]:
            return steps.compose_back(steps.carries(piece, h, entering), grad_h[:, piece])

        return self.over(self.head, compose, Linear, not steps.reverse)

    def over(
        self, steps: slice, compose: Callable[[slice], tuple[Tensor, Tensor]], ring: type[Linear], reverse: bool
    ) -> tuple[Tensor, Tensor]:
        """P and L of steps, by pieces of which each may take memory."""
        begins = range(steps.start, steps.stop, self.steps.largest_piece)
        P = L = None
        for begin in reversed(begins) if reverse else begins:
            piece = slice(begin, min(begin + self.steps.largest_piece, steps.stop))
            next_P, next_L = (self.wide(x) for x in compose(piece))
            if P is None or L is None:
                P, L = next_P, next_L
            else:
                P, L = ring.times(next_P, P), ring.times_plus(next_P, L, next_L)
        if P is None or L is None:
            none = torch.zeros(self.steps.batch, self.steps.channels, device=self.steps.device)
            return self.wide(none + ring.one), self.wide(none + ring.zero)
        return P, L

    def resets_in(self, steps: slice) -> tuple[Tensor, ...]:
        """(B, 1): whether the state is zero before one of the steps; nothing to tell where it never is."""
        return () if self.steps.resets is None else (self.steps.resets[:, steps].any(1, keepdim=True),)

    def wide(self, x: Tensor) -> Tensor:
        """Products of float32 coefficients near 1 are all rounded alike, and these numbers are few."""
        return x.to(torch.float64 if x.device.type in ("cpu", "cuda") else torch.float32)

    # What is heard

    def exchange(self, initial: Tensor, P: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
        """The state that enters this part, and the last of all."""
        told = gather(self.group, self.wide(P), self.wide(L), *self.resets_in(self.tail))
        entering, of_all = self.enter(initial, *told)
        return entering.to(self.steps.dtype), of_all.to(self.steps.dtype)

    def exchange_back(self, grad_last: Tensor | None, P: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the state that leaves this part, and that of the initial one."""
        steps = self.steps
        grad_last = torch.zeros_like(L, dtype=steps.dtype) if grad_last is None else grad_last
        *told, of_each = gather(self.group, self.wide(P), self.wide(L), *self.resets_in(self.head), grad_last)
        coming, grad_h0 = self.come_in(of_each.sum(0), *told)
        return coming.to(steps.dtype), grad_h0.to(steps.dtype)

    def exchange_plainly(self, initial: Tensor, P: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`exchange`, differentiable."""
        mine = (P, L, *self.resets_in(self.tail))
        told = Gathered.apply(torch.cat([x.to(P.dtype) for x in mine], 1), self.group)
        return self.enter(initial, *told.split([x.shape[1] for x in mine], -1))

    def enter(self, initial: Tensor, P: Tensor, L: Tensor, *resets: Tensor) -> tuple[Tensor, Tensor]:
        """From all processes' P and L, (R, B, D)."""
        steps = self.steps
        if self.may_pass_on(resets) and type(steps) is not Logarithmic:
            return kernel.pass_on(P, L, initial, self.rank, steps.reverse)
        start = initial.to(P.dtype)
        after, last = steps.scan(P.transpose(0, 1), L.transpose(0, 1), start, self.forgotten(resets))
        return self.before(start, after, steps.reverse), last

    def come_in(self, grad_last: Tensor, P: Tensor, L: Tensor, *resets: Tensor) -> tuple[Tensor, Tensor]:
        """From all processes' P and L of the gradient."""
        reverse = not self.steps.reverse
        if self.may_pass_on(resets):
            return kernel.pass_on(P, L, grad_last, self.rank, reverse)
        start = grad_last.to(P.dtype)
        back = (None, self.forgotten(resets), reverse, self.steps.backend)
        after, last = operators.linear_scan(P.transpose(0, 1), L.transpose(0, 1), start, *back)
        return self.before(start, after, reverse), last

    def may_pass_on(self, resets: tuple[Tensor, ...]) -> bool:
        """Whether a kernel takes a state through all parts' compositions, which is not differentiable."""
        return self.steps.has_kernel and not (resets or torch.is_grad_enabled())

    def forgotten(self, resets: tuple[Tensor, ...]) -> Tensor | None:
        """(B, R): in which processes' parts no state passes from end to end."""
        return resets[0][..., 0].bool().T.contiguous() if resets else None

    def before(self, start: Tensor, after: Tensor, reverse: bool) -> Tensor:
        """Of the states after each process's part, (B, R, D), in the order of scanning, the one before this."""
        states = (after, start[:, None]) if reverse else (start[:, None], after)
        return torch.cat(states, 1)[:, self.rank + 1 if reverse else self.rank]

    def initial(self, h0: Tensor | None) -> Tensor:
        """The initial states, (B, D) or (N, D)."""
        steps = self.steps
        if h0 is not None:
            return h0
        return torch.full((self.sequences, steps.channels), steps.zero, dtype=steps.dtype, device=steps.device)


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
    def backward(ctx: Any, grad_h: Tensor | None, grad_last: Tensor | None) -> Gradients:
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


def may_ask(steps: int, device: torch.device) -> bool:
    """Whether so many steps are enough to ask whether they forget; a CUDA graph that is being captured cannot."""
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return steps * LONGEST_REACH >= FIRST_REACH and not captured
