"""What :mod:`~ostinato.distributed.boundary` asks of the steps of a shard; ``kinds.py`` has each kind of recurrence."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.scan import operators
from ostinato.kernels.scan.cuda import compose as kernel
from ostinato.kernels.scan.torch_ops import LINEAR, zeroed

MOST_AT_ONCE = 1 << 26  # elements of a temporary tensor


class Steps(ABC):
    """The steps of a shard: how they are scanned, sliced, and reduced to P and L."""

    ring = LINEAR  # the semiring in which steps compose
    forgets = True  # whether a product of few coefficients may underflow
    time = 1  # the dimension of time
    cu_seqlens: Tensor | None = None
    inputs: tuple[Tensor | None, ...]  # all that have gradients, except for the initial state
    resets: Tensor | None
    reverse: bool
    backend: str
    batch: int
    length: int
    channels: int
    dtype: torch.dtype
    device: torch.device

    # What a kind of recurrence defines.

    @abstractmethod
    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        """The scan itself, from h0: h and the last state."""

    @abstractmethod
    def run_backward(
        self, h: Tensor, h0: Tensor, grad_h: Tensor | None, grad_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of h0 and of the inputs, which share no memory with other tensors."""

    @abstractmethod
    def coefficients(self) -> tuple[Tensor, Tensor]:
        """a and b, in the dtype :attr:`wide`."""

    @abstractmethod
    def scan(
        self, a: Tensor, b: Tensor, h0: Tensor | None, resets: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same recurrence with other coefficients, differentiable."""

    @abstractmethod
    def compose(self) -> tuple[Tensor, Tensor]:
        """P and L."""

    @abstractmethod
    def derivatives(self, steps: slice, h: Tensor, carry: Tensor) -> Tensor:
        """The derivative of the state after each step with respect to the state before it."""

    @property
    def largest_chunk(self) -> int:
        """The number of steps to reduce at once."""
        return self.most_at_once

    # What all kinds share.

    def with_inputs(self, inputs: tuple[Tensor | None, ...]) -> Self:
        """A copy with other inputs; with none, it can be kept without holding their memory."""
        other = copy.copy(self)
        other.inputs = inputs
        return other

    def sliced(self, take: Callable[[Tensor, int], Tensor]) -> Self:
        """A copy with some of the steps, which ``take`` takes from each tensor, given its dimension of time."""
        other = self.with_inputs(tuple(x if x is None or x.dim() < 3 else take(x, self.time) for x in self.inputs))
        other.resets = None if self.resets is None else take(self.resets, 1)
        return other

    def part(self, steps: slice) -> Self:
        """A copy with only these steps."""
        other = self.sliced(lambda x, time: x.narrow(time, steps.start, steps.stop - steps.start))
        other.length = steps.stop - steps.start
        return other

    def ends(self, number: int) -> Self:
        """The first and the last ``number`` steps, as (2, B, number, D)."""
        return self.sliced(lambda x, time: ends(x, time, number))

    def by_batch(self, h: Tensor) -> Tensor:
        """h as (B, T, D)."""
        return h if self.time == 1 else h.transpose(-3, -2)

    def compose_by_scans(self) -> tuple[Tensor, Tensor]:
        """P and L, differentiable; P by a scan, which is more accurate than ``prod``."""
        a, b = self.coefficients()
        nothing = a.new_full((1, 1, 1), self.ring.zero).expand_as(a)
        one = a.new_full((a.shape[0], a.shape[2]), self.ring.one)
        return self.scan(a, nothing, one, self.resets)[1], self.scan(a, b, None, self.resets)[1]

    def compose_backward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """P and L of steps ``h = a * (h + b)`` in the opposite direction."""
        if self.has_kernel:
            return kernel.compose(a, b.to(a.dtype), reverse=not self.reverse, before=True)
        nothing, one = a.new_zeros(1, 1, 1).expand_as(a), torch.ones_like(a[:, 0])
        back = (None, None, not self.reverse, self.backend)
        return operators.linear_scan(a, nothing, one, *back)[1], operators.linear_scan(a, a * b, None, *back)[1]

    def launch_test(self) -> Callable[[], bool]:
        """Launch the test whether the coefficients' product over time underflows; what is returned waits for it."""
        products = zeroed(self.coefficients()[0], self.resets).prod(-2)
        computed = torch.cuda.current_stream().record_event() if products.is_cuda else None

        def underflows() -> bool:
            values = products if computed is None else _read_beside(products, computed)
            return values.abs().amax().item() < torch.finfo(values.dtype).tiny

        return underflows

    @property
    def wide(self) -> torch.dtype:
        """float32 or wider, so that P and L are not rounded to 16 bits."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def has_kernel(self) -> bool:
        """Whether the reduction kernel can be used, which does not write intermediate states."""
        return self.device.type == "cuda" and self.backend in ("auto", "cuda") and nvrtc.can_launch()

    @property
    def most_at_once(self) -> int:
        """Steps for which temporary tensors stay within MOST_AT_ONCE."""
        return max(MOST_AT_ONCE // max(self.batch * self.channels, 1), 1)


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
