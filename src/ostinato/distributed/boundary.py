"""The boundary between shards: the exchange of carries, forward and backward."""

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ostinato.distributed.collectives import Gathered, Shared, gather
from ostinato.distributed.steps import Steps
from ostinato.kernels.scan import operators
from ostinato.kernels.scan.cuda import compose as kernel
from ostinato.kernels.scan.torch_ops import LINEAR, Semiring

FIRST_REACH = 1024  # steps over which the coefficients' product is first tested for underflow
GROWTH = 32  # factor to the next number of steps: every test synchronises with the host
LONGEST_REACH = 1 / 8  # of a shard, the largest fraction worth scanning twice

Gradients = tuple[Tensor | None, ...]


class _Prediction:
    """The prediction whether a shard forgets the state that enters it: as the last shard of this process did."""

    forgets = True


_PREDICTION = _Prediction()


class Boundary:
    """The boundary of a shard that every sequence of the batch crosses.

    If the state is forgotten within ``reach`` steps, these are scanned a second time, from the carry; a reach of 0
    means that it is not, and that P and L are computed before the scan.
    """

    def __init__(self, steps: Steps, group: ProcessGroup, forgets: Callable[[], bool] | None = None) -> None:
        """``forgets`` returns the test's result for FIRST_REACH, if it has been launched already."""
        self.steps, self.group, self.rank, self.forgets = steps, group, group.rank(), forgets
        self.sequences = steps.batch
        self.head = self.tail = slice(0, steps.length)  # steps of the entering sequence, and of the leaving one
        self.reach = 0

    def with_inputs(self, inputs: tuple[Tensor | None, ...]) -> "Boundary":
        """A copy with other inputs; with none, it can be saved for the backward without holding their memory."""
        other = copy.copy(self)
        other.steps = self.steps.with_inputs(inputs)
        return other

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """h of this shard and the last state of the sequence."""
        if not (self.sequences and self.steps.channels):
            return self.steps.run(self.initial_state(h0))
        return _Sharded.apply(self, h0, *self.steps.inputs)

    def forward(self, h0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """h of this shard, the last state of the sequence, and the carry."""
        steps, forgets = self.steps, self.forgets or self.launch_test(FIRST_REACH)
        scanned = steps.run(None) if forgets and _PREDICTION.forgets else None  # speculative, in flight during the test
        self.reach = self.find_reach(forgets)
        if not self.reach:
            del scanned
            carry, h_last = self.exchange(self.initial_state(h0), *self.reduced())
            return steps.run(carry)[0], h_last, carry
        h, last = scanned or steps.run(None)  # overlaps with the exchange
        carry, h_last = self.exchange(self.initial_state(h0), torch.zeros_like(last), last)
        head, _ = self.ends()
        first = steps.part(head)
        steps.by_batch(h)[:, head] = first.by_batch(first.run(carry)[0])
        return h, h_last, carry

    def backward(
        self, h0: Tensor | None, h: Tensor, carry: Tensor, grad_h: Tensor, grad_last: Tensor | None
    ) -> Gradients:
        """Gradients of h0 and of the inputs."""
        steps = self.steps
        if not self.reach:
            composed = self.reduced_backward(grad_h, h, carry)
            incoming, grad_h0 = self.exchange_backward(grad_last, *composed)
            return grad_h0, *steps.run_backward(h, carry, grad_h, incoming)[1:]
        grad_start, *grads = steps.run_backward(h, carry, grad_h, None)
        incoming, grad_h0 = self.exchange_backward(grad_last, torch.zeros_like(carry), cast(Tensor, grad_start))
        _, tail = self.ends()  # gradients are linear: the contribution of the incoming one is added
        states, last = steps.by_batch(h), steps.part(tail)
        before = states[:, tail.stop if steps.reverse else tail.start - 1]
        _, *grads_tail = last.run_backward(steps.by_batch(states[:, tail]).contiguous(), before, None, incoming)
        for grad, addend in zip(steps.with_inputs(tuple(grads)).part(tail).inputs, grads_tail, strict=True):
            if grad is not None and addend is not None:
                grad += addend
        return grad_h0, *grads

    def run_differentiable(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """As :meth:`run`, of differentiable operations only, for derivatives of higher order.

        No data-dependent branches: all processes must build the same graph, or their collectives would not match.
        """
        steps, initial = self.steps, Shared.apply(self.initial_state(h0), self.group)
        carry, h_last = self.exchange_differentiable(initial, *steps.compose_by_scans())
        a, b = steps.coefficients()
        h, _ = steps.scan(a, b, carry.to(b.dtype), steps.resets)
        return steps.by_batch(h).to(steps.dtype), h_last.to(steps.dtype)

    # Whether the scan or the exchange comes first

    def launch_test(self, reach: int) -> Callable[[], bool] | None:
        """Launch the test whether states are forgotten within ``reach`` steps at either end; None if these are many."""
        steps = self.steps
        if not (steps.forgets and can_test(steps.length, steps.device)):
            return None
        few = reach <= min(steps.length * LONGEST_REACH, steps.most_at_once)
        return steps.ends(reach).launch_test() if few else None

    def find_reach(self, forgets: Callable[[], bool] | None) -> int:
        """The number of steps within which states are forgotten; 0 if it is too large."""
        self.forgets, reach = None, FIRST_REACH
        while forgets:
            _PREDICTION.forgets = forgets()
            if _PREDICTION.forgets:
                return reach
            reach *= GROWTH
            forgets = self.launch_test(reach)
        return 0

    def ends(self) -> tuple[slice, slice]:
        """The first and the last ``reach`` steps in scan order."""
        low, high = slice(0, self.reach), slice(self.steps.length - self.reach, self.steps.length)
        return (high, low) if self.steps.reverse else (low, high)

    # What is sent

    def reduced(self) -> tuple[Tensor, Tensor]:
        """P and L of the steps of the sequence that leaves the shard."""
        steps = self.steps
        return self.reduce(self.tail, lambda chunk: steps.part(chunk).compose(), steps.ring, steps.reverse)

    def reduced_backward(self, grad_h: Tensor, h: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """P and L of the gradient, which flows in the opposite direction, of the sequence that enters the shard."""
        steps = self.steps
        h, grad_h = steps.by_batch(h), steps.by_batch(grad_h)

        def compose(chunk: slice) -> tuple[Tensor, Tensor]:
            return steps.compose_backward(steps.derivatives(chunk, h, carry), grad_h[:, chunk])

        return self.reduce(self.head, compose, LINEAR, not steps.reverse)

    def reduce(
        self, span: slice, compose: Callable[[slice], tuple[Tensor, Tensor]], ring: Semiring, reverse: bool
    ) -> tuple[Tensor, Tensor]:
        """P and L of a span of the steps, chunk by chunk to bound the temporary memory."""
        starts = range(span.start, span.stop, self.steps.largest_chunk)
        P = L = None
        for start in reversed(starts) if reverse else starts:
            chunk = slice(start, min(start + self.steps.largest_chunk, span.stop))
            next_P, next_L = (self.widened(x) for x in compose(chunk))
            if P is None or L is None:
                P, L = next_P, next_L
            else:
                P, L = ring.times(next_P, P), ring.times_plus(next_P, L, next_L)
        if P is None or L is None:
            zeros = torch.zeros(self.steps.batch, self.steps.channels, device=self.steps.device)
            return self.widened(zeros + ring.one), self.widened(zeros + ring.zero)
        return P, L

    def resets_in(self, span: slice) -> tuple[Tensor, ...]:
        """(B, 1): whether any of these steps is reset; empty without resets."""
        return () if self.steps.resets is None else (self.steps.resets[:, span].any(1, keepdim=True),)

    def widened(self, x: Tensor) -> Tensor:
        """In float64 if possible: rounding of products near 1 is biased, and these tensors are small."""
        return x.to(torch.float64 if x.device.type in ("cpu", "cuda") else torch.float32)

    # What is received

    def exchange(self, initial: Tensor, P: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
        """The carry into this shard, and the last state of the sequence."""
        gathered = gather(self.group, self.widened(P), self.widened(L), *self.resets_in(self.tail))
        carry, h_last = self.enter(initial, *gathered)
        return carry.to(self.steps.dtype), h_last.to(self.steps.dtype)

    def exchange_backward(self, grad_last: Tensor | None, P: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the state that leaves this shard, and that of the initial state."""
        steps = self.steps
        grad_last = torch.zeros_like(L, dtype=steps.dtype) if grad_last is None else grad_last
        sent = self.widened(P), self.widened(L), *self.resets_in(self.head), grad_last
        *gathered, grads_last = gather(self.group, *sent)
        incoming, grad_h0 = self.enter_backward(grads_last.sum(0), *gathered)
        return incoming.to(steps.dtype), grad_h0.to(steps.dtype)

    def exchange_differentiable(self, initial: Tensor, P: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`exchange`, differentiable."""
        local = (P, L, *self.resets_in(self.tail))
        gathered = Gathered.apply(torch.cat([x.to(P.dtype) for x in local], 1), self.group)
        return self.enter(initial, *gathered.split([x.shape[1] for x in local], -1))

    def enter(self, initial: Tensor, P: Tensor, L: Tensor, *resets: Tensor) -> tuple[Tensor, Tensor]:
        """The carry and the last state, from all processes' P and L, (R, B, D)."""
        steps = self.steps
        if self.can_pass_on(resets) and steps.ring is LINEAR:
            return kernel.pass_on(P, L, initial, self.rank, steps.reverse)
        start = initial.to(P.dtype)
        after, last = steps.scan(P.transpose(0, 1), L.transpose(0, 1), start, self.forgotten(resets))
        return self.before(start, after, steps.reverse), last

    def enter_backward(self, grad_last: Tensor, P: Tensor, L: Tensor, *resets: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of :meth:`exchange_backward`, from all processes' P and L of the gradient."""
        reverse = not self.steps.reverse
        if self.can_pass_on(resets):
            return kernel.pass_on(P, L, grad_last, self.rank, reverse)
        start = grad_last.to(P.dtype)
        back = (None, self.forgotten(resets), reverse, self.steps.backend)
        after, last = operators.linear_scan(P.transpose(0, 1), L.transpose(0, 1), start, *back)
        return self.before(start, after, reverse), last

    def can_pass_on(self, resets: tuple[Tensor, ...]) -> bool:
        """Whether to carry states through all shards by a kernel, which takes no resets and is not differentiable."""
        return self.steps.has_kernel and not (resets or torch.is_grad_enabled())

    def forgotten(self, resets: tuple[Tensor, ...]) -> Tensor | None:
        """(B, R): which shards no state crosses, because of a reset."""
        return resets[0][..., 0].bool().T.contiguous() if resets else None

    def before(self, start: Tensor, after: Tensor, reverse: bool) -> Tensor:
        """The state before this shard, given the state before all shards and those after each, (B, R, D)."""
        states = (after, start[:, None]) if reverse else (start[:, None], after)
        return torch.cat(states, 1)[:, self.rank + 1 if reverse else self.rank]

    def initial_state(self, h0: Tensor | None) -> Tensor:
        """The initial states, (B, D) or (N, D)."""
        steps = self.steps
        if h0 is not None:
            return h0
        return torch.full((self.sequences, steps.channels), steps.ring.zero, dtype=steps.dtype, device=steps.device)


class _Sharded(torch.autograd.Function):
    """:meth:`Boundary.run` as an autograd function; derivatives of higher order are those of ``run_differentiable``."""

    @staticmethod
    def forward(ctx: Any, boundary: Boundary, h0: Tensor | None, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        h, h_last, carry = boundary.forward(h0)
        ctx.boundary = boundary.with_inputs(())
        ctx.save_for_backward(h0, h, carry, *inputs)
        ctx.set_materialize_grads(False)
        return h, h_last

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_last: Tensor | None) -> Gradients:
        h0, h, carry, *inputs = ctx.saved_tensors
        boundary = ctx.boundary.with_inputs(tuple(inputs))
        grad_h = torch.zeros_like(h) if grad_h is None else grad_h
        if torch.is_grad_enabled():
            wanted = [x for x in (h0, *inputs) if x is not None and x.requires_grad]
            results = boundary.run_differentiable(h0)
            grad_last = torch.zeros_like(results[1]) if grad_last is None else grad_last
            grads = iter(torch.autograd.grad(results, wanted, (grad_h, grad_last), create_graph=True))
            return None, *(next(grads) if x is not None and x.requires_grad else None for x in (h0, *inputs))
        grad_h0, *grads_inputs = boundary.backward(h0, h, carry, grad_h, grad_last)
        return None, None if h0 is None else grad_h0, *grads_inputs


def can_test(steps: int, device: torch.device) -> bool:
    """Whether a shard is long enough to test whether it forgets; not during CUDA graph capture, as the test syncs."""
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return steps * LONGEST_REACH >= FIRST_REACH and not captured
