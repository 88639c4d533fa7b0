"""The steps of a shard, for each kind of recurrence: how they are run, and how they are reduced to P and L."""

import copy
from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor

from ostinato import scan
from ostinato.kernels import nvrtc
from ostinato.kernels.recurrence.linear.layer import layer_scan, layer_scan_backward
from ostinato.kernels.recurrence.linear.operator import linear_recurrence, linear_recurrence_backward
from ostinato.kernels.scan import operators
from ostinato.kernels.scan.cuda import compose as kernel
from ostinato.kernels.scan.torch_ops import LOG, zeroed
from ostinato.minimal.recurrences import GATES, RECURRENCES, recurrence_of
from ostinato.recurrence import Recurrence

MOST_AT_ONCE = 1 << 26  # elements of a temporary tensor


class Linear:
    """Steps of ``h = a*h + b``."""

    one, zero = 1.0, 0.0
    forgets = True  # whether a product of few coefficients may underflow
    time = 1  # the dimension of time
    cu_seqlens: Tensor | None = None

    def __init__(self, a: Tensor, b: Tensor, resets: Tensor | None, reverse: bool, backend: str) -> None:
        self.inputs: tuple[Tensor | None, ...] = (a, b)
        self.resets, self.reverse, self.backend = resets, reverse, backend
        self.batch, self.length, self.channels = b.shape
        self.dtype, self.device = b.dtype, b.device

    def of(self, inputs: tuple[Tensor | None, ...]) -> Self:
        """A copy with other inputs; with none, it can be kept without holding their memory."""
        other = copy.copy(self)
        other.inputs = inputs
        return other

    def cut(self, cut: Callable[[Tensor, int], Tensor]) -> Self:
        """A copy with some of the steps; ``cut`` gets each tensor that has steps, and its dimension of time."""
        other = self.of(tuple(x if x is None or x.dim() < 3 else cut(x, self.time) for x in self.inputs))
        other.resets = None if self.resets is None else cut(self.resets, 1)
        return other

    def part(self, steps: slice) -> Self:
        other = self.cut(lambda x, time: x.narrow(time, steps.start, steps.stop - steps.start))
        other.length = steps.stop - steps.start
        return other

    def ends(self, number: int) -> Self:
        """The first and the last ``number`` steps, as (2, B, number, D)."""
        return self.cut(lambda x, time: ends(x, time, number))

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """The scan itself: h and the last state."""
        a, b = cast(tuple[Tensor, Tensor], self.inputs)
        options: dict[str, Any] = {"resets": self.resets, "reverse": self.reverse, "backend": self.backend}
        return scan.linear_scan(a, b, h0, cu_seqlens=self.cu_seqlens, **options)  # caches its launches

    def run_backward(
        self, h: Tensor, h0: Tensor, grad_h: Tensor | None, grad_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of h0 and of the inputs, which alias nothing."""
        given = h, h0, grad_h, grad_last, self.cu_seqlens, self.resets, self.reverse, self.backend
        grad_a, grad_b, grad_h0 = operators.linear_scan_backward(self.inputs[0], None, *given)
        return grad_h0, grad_a, grad_b

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """a and b in float32 or wider, so that P and L are not rounded to 16 bits."""
        wide = torch.promote_types(self.dtype, torch.float32)
        a, b = (x.to(wide) for x in self.inputs if x is not None)
        return a, b

    def scan(
        self, a: Tensor, b: Tensor, h0: Tensor | None, resets: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same recurrence with other coefficients, differentiable."""
        return operators.linear_scan(a, b, h0, cu_seqlens, resets, self.reverse, self.backend)

    @staticmethod
    def times(a: Tensor, b: Tensor) -> Tensor:
        return a * b

    @staticmethod
    def times_plus(a: Tensor, h: Tensor, b: Tensor) -> Tensor:
        return a * h + b

    def compose(self) -> tuple[Tensor, Tensor]:
        """P and L."""
        if self.has_kernel:
            return kernel.compose(*self.coefficients(), self.resets, reverse=self.reverse)
        return self.compose_by_scans()

    def compose_by_scans(self) -> tuple[Tensor, Tensor]:
        """P and L, differentiable; P by a scan, which is more accurate than ``prod``."""
        a, b = self.coefficients()
        nothing, one = a.new_full((1, 1, 1), self.zero).expand_as(a), a.new_full((a.shape[0], a.shape[2]), self.one)
        return self.scan(a, nothing, one, self.resets)[1], self.scan(a, b, None, self.resets)[1]

    def compose_backward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """P and L of steps ``h = a * (h + b)`` in the opposite direction."""
        if self.has_kernel:
            return kernel.compose(a, b.to(a.dtype), reverse=not self.reverse, before=True)
        nothing, one = a.new_zeros(1, 1, 1).expand_as(a), torch.ones_like(a[:, 0])
        back = (None, None, not self.reverse, self.backend)
        return operators.linear_scan(a, nothing, one, *back)[1], operators.linear_scan(a, a * b, None, *back)[1]

    def launch_test(self) -> Callable[[], bool]:
        """Launch the test whether the coefficients' product over time underflows; the result waits when called."""
        products = zeroed(self.coefficients()[0], self.resets).prod(-2)
        computed = torch.cuda.current_stream().record_event() if products.is_cuda else None

        def answer() -> bool:
            values = products if computed is None else _read_beside(products, computed)
            return values.abs().amax().item() < torch.finfo(values.dtype).tiny

        return answer

    @property
    def has_kernel(self) -> bool:
        """Whether the reduction kernel can be used, which does not write the states in between."""
        return self.device.type == "cuda" and self.backend in ("auto", "cuda") and nvrtc.can_launch()

    @property
    def most_at_once(self) -> int:
        """Steps for which temporary tensors stay within MOST_AT_ONCE."""
        return max(MOST_AT_ONCE // max(self.batch * self.channels, 1), 1)

    @property
    def largest_chunk(self) -> int:
        """Steps to be reduced at once."""
        as_they_are = type(self) is Linear and self.resets is None and self.dtype in (torch.float32, torch.float64)
        return max(self.length, 1) if self.has_kernel and as_they_are else self.most_at_once

    def derivatives(self, steps: slice, h: Tensor, carry: Tensor) -> Tensor:
        """The derivative of the state after each step with respect to the state before it."""
        part = self.part(steps)
        return zeroed(part.coefficients()[0], part.resets)

    def by_batch(self, h: Tensor) -> Tensor:
        """h as (B, T, D)."""
        return h if self.time == 1 else h.transpose(-3, -2)


class Logarithmic(Linear):
    """Steps of ``log_h = logaddexp(log_a + log_h, log_b)``."""

    one, zero = 0.0, float("-inf")
    forgets = False

    def compose(self) -> tuple[Tensor, Tensor]:
        return self.compose_by_scans()

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        return operators.log_linear_scan(*self.inputs, h0, self.cu_seqlens, self.resets, self.reverse, self.backend)

    def run_backward(
        self, h: Tensor, h0: Tensor, grad_h: Tensor | None, grad_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        given = h, h0, grad_h, grad_last, self.cu_seqlens, self.resets, self.reverse, self.backend
        grad_a, grad_b, grad_h0 = operators.log_linear_scan_backward(*self.inputs, *given)
        return grad_h0, grad_a, grad_b

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

    def derivatives(self, steps: slice, h: Tensor, carry: Tensor) -> Tensor:
        if self.reverse:
            before = torch.cat((h, carry[:, None]), 1)[:, steps.start + 1 : steps.stop + 1]
        else:
            before = torch.cat((carry[:, None], h), 1)[:, steps]
        part = self.part(steps)
        a, b = part.coefficients()
        return LOG.partials(a, b, zeroed(before, part.resets, self.zero))[0]


class Minimal(Linear):
    """Steps of a minimal layer in one direction, given its pre-activations."""

    def __init__(
        self, pre: Tensor, bias: Tensor | None, cell: str, candidate: str, batch_first: bool, backend: str
    ) -> None:
        self.inputs = (pre, bias)
        self.function, self.time = RECURRENCES[cell][candidate].function, 1 if batch_first else 0
        self.settings = recurrence_of(cell, candidate, bias is not None), batch_first, 1, backend
        self.resets, self.reverse, self.backend = None, False, backend
        self.batch, self.length, gates = self.by_batch(pre).shape[-3:]
        self.channels = gates // GATES[cell]
        self.dtype, self.device = pre.dtype, pre.device

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        start = None if h0 is None else h0[None]
        h, h_last = layer_scan(*self.inputs, start, None, None, *self.settings)
        return h, h_last[0]

    def run_backward(
        self, h: Tensor, h0: Tensor, grad_h: Tensor | None, grad_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad_last = None if grad_last is None else grad_last[None]
        given = *self.inputs, h0[None], None, None, *self.settings, h, grad_h, grad_last
        grad_pre, grad_bias, grad_h0 = layer_scan_backward(*given)
        return grad_h0[0], grad_pre, None if self.inputs[1] is None else grad_bias

    def coefficients(self) -> tuple[Tensor, Tensor]:
        pre, bias = self.inputs
        assert pre is not None
        wide = torch.promote_types(self.dtype, torch.float32)
        total = self.by_batch(pre).to(wide)
        total = total if bias is None else total + bias.to(wide)
        return self.function(*total.chunk(total.shape[-1] // self.channels, -1))


class General(Linear):
    """Steps of a user's linear recurrence."""

    def __init__(
        self, recurrence: Recurrence, arguments: tuple[Tensor, ...], resets: Tensor | None, reverse: bool, backend: str
    ) -> None:
        self.function, self.inputs = recurrence.function, arguments
        self.traced = recurrence.traced(arguments)
        self.resets, self.reverse, self.backend = resets, reverse, backend
        sequences = [x for x in arguments if x.dim() == 3]
        self.batch, self.length, self.channels = sequences[0].shape
        self.dtype, self.device = sequences[0].dtype, sequences[0].device

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        given = h0, self.cu_seqlens, self.resets, self.reverse, self.backend
        return linear_recurrence(self.traced, *given, *self.inputs)

    def run_backward(
        self, h: Tensor, h0: Tensor, grad_h: Tensor | None, grad_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        given = h0, h, grad_h, grad_last, self.cu_seqlens, self.resets, self.reverse, self.backend
        return tuple(linear_recurrence_backward(self.traced, *given, *self.inputs))

    def coefficients(self) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(self.dtype, torch.float32)
        own = [x.to(wide) for x in self.inputs if x is not None]
        shape = max((x.shape for x in own), key=len)
        a, b = self.function(*own)
        return a.expand(shape), b.expand(shape)


def ends(x: Tensor, time: int, number: int) -> Tensor:
    """The first and the last ``number`` steps, (2, ...), as a view."""
    shape, strides = list(x.shape), x.stride()
    between = (shape[time] - number) * strides[time]
    shape[time] = number
    return x.as_strided((2, *shape), (between, *strides))


def _read_beside(x: Tensor, computed: torch.cuda.Event) -> Tensor:
    """Copy x to the host on a side stream as soon as it is computed, without waiting for later launches."""
    with torch.cuda.stream(torch.cuda.Stream(x.device)):
        computed.wait()
        return x.cpu()
