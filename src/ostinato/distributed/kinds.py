"""The steps of each kind of recurrence: scans, scans of logarithms, minimal layers, and user-defined recurrences."""

from typing import Any, cast

import torch
from torch import Tensor

from ostinato import scan
from ostinato.distributed.steps import Steps
from ostinato.kernels.recurrence.linear.layer import layer_scan, layer_scan_backward
from ostinato.kernels.recurrence.linear.operator import linear_recurrence, linear_recurrence_backward
from ostinato.kernels.scan import operators
from ostinato.kernels.scan.cuda import compose as kernel
from ostinato.kernels.scan.torch_ops import LOG, zeroed
from ostinato.minimal.recurrences import GATES, RECURRENCES, recurrence_of
from ostinato.recurrence import Recurrence


class Linear(Steps):
    """Steps of ``h = a*h + b``, whatever a and b are computed from."""

    def scan(
        self, a: Tensor, b: Tensor, h0: Tensor | None, resets: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return operators.linear_scan(a, b, h0, cu_seqlens, resets, self.reverse, self.backend)

    def compose(self) -> tuple[Tensor, Tensor]:
        if self.has_kernel:
            return kernel.compose(*self.coefficients(), self.resets, reverse=self.reverse)
        return self.compose_by_scans()

    def derivatives(self, steps: slice, h: Tensor, carry: Tensor) -> Tensor:
        part = self.part(steps)
        return zeroed(part.coefficients()[0], part.resets)


class _Coefficients(Steps):
    """Steps whose inputs are the coefficients a and b."""

    def __init__(self, a: Tensor, b: Tensor, resets: Tensor | None, reverse: bool, backend: str) -> None:
        self.inputs = (a, b)
        self.resets, self.reverse, self.backend = resets, reverse, backend
        self.batch, self.length, self.channels = b.shape
        self.dtype, self.device = b.dtype, b.device

    @property
    def a_and_b(self) -> tuple[Tensor, Tensor]:
        """a and b."""
        return cast(tuple[Tensor, Tensor], self.inputs)

    def coefficients(self) -> tuple[Tensor, Tensor]:
        a, b = self.a_and_b
        return a.to(self.wide), b.to(self.wide)


class LinearScan(_Coefficients, Linear):
    """Steps of ``h = a*h + b`` of given a and b."""

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"resets": self.resets, "reverse": self.reverse, "backend": self.backend}
        return scan.linear_scan(*self.a_and_b, h0, cu_seqlens=self.cu_seqlens, **options)  # caches its launches

    def run_backward(
        self, h: Tensor, h0: Tensor, grad_h: Tensor | None, grad_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        rest = h, h0, grad_h, grad_last, self.cu_seqlens, self.resets, self.reverse, self.backend
        grad_a, grad_b, grad_h0 = operators.linear_scan_backward(self.a_and_b[0], None, *rest)
        return grad_h0, grad_a, grad_b

    @property
    def largest_chunk(self) -> int:
        """All steps where the reduction kernel reads the inputs themselves, without temporary tensors."""
        reads_inputs = self.resets is None and self.dtype in (torch.float32, torch.float64)
        return max(self.length, 1) if self.has_kernel and reads_inputs else self.most_at_once


class LogLinearScan(_Coefficients):
    """Steps of ``log_h = logaddexp(log_a + log_h, log_b)``."""

    ring = LOG
    forgets = False

    def compose(self) -> tuple[Tensor, Tensor]:
        return self.compose_by_scans()

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        return operators.log_linear_scan(*self.a_and_b, h0, self.cu_seqlens, self.resets, self.reverse, self.backend)

    def run_backward(
        self, h: Tensor, h0: Tensor, grad_h: Tensor | None, grad_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        a, b = self.a_and_b
        rest = h, h0, grad_h, grad_last, self.cu_seqlens, self.resets, self.reverse, self.backend
        grad_a, grad_b, grad_h0 = operators.log_linear_scan_backward(a, b, *rest)
        return grad_h0, grad_a, grad_b

    def scan(
        self, a: Tensor, b: Tensor, h0: Tensor | None, resets: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return operators.log_linear_scan(a, b, h0, cu_seqlens, resets, self.reverse, self.backend)

    def derivatives(self, steps: slice, h: Tensor, carry: Tensor) -> Tensor:
        if self.reverse:
            before = torch.cat((h, carry[:, None]), 1)[:, steps.start + 1 : steps.stop + 1]
        else:
            before = torch.cat((carry[:, None], h), 1)[:, steps]
        part = self.part(steps)
        a, b = part.coefficients()
        return self.ring.partials(a, b, zeroed(before, part.resets, self.ring.zero))[0]


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

    @property
    def pre_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """The pre-activations and the bias."""
        return cast(tuple[Tensor, Tensor | None], self.inputs)

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        start = None if h0 is None else h0[None]
        pre, bias = self.pre_and_bias
        h, h_last = layer_scan(pre, bias, start, None, None, *self.settings)
        return h, h_last[0]

    def run_backward(
        self, h: Tensor, h0: Tensor, grad_h: Tensor | None, grad_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grad_last = None if grad_last is None else grad_last[None]
        pre, bias = self.pre_and_bias
        rest = h0[None], None, None, *self.settings, h, grad_h, grad_last
        grad_pre, grad_bias, grad_h0 = layer_scan_backward(pre, bias, *rest)
        return grad_h0[0], grad_pre, None if bias is None else grad_bias

    def coefficients(self) -> tuple[Tensor, Tensor]:
        pre, bias = self.pre_and_bias
        total = self.by_batch(pre).to(self.wide)
        total = total if bias is None else total + bias.to(self.wide)
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

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """The arguments of the recurrence."""
        return cast(tuple[Tensor, ...], self.inputs)

    def run(self, h0: Tensor | None) -> tuple[Tensor, Tensor]:
        options = h0, self.cu_seqlens, self.resets, self.reverse, self.backend
        return linear_recurrence(self.traced, *options, *self.arguments)

    def run_backward(
        self, h: Tensor, h0: Tensor, grad_h: Tensor | None, grad_last: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        rest = h0, h, grad_h, grad_last, self.cu_seqlens, self.resets, self.reverse, self.backend
        return tuple(linear_recurrence_backward(self.traced, *rest, *self.arguments))

    def coefficients(self) -> tuple[Tensor, Tensor]:
        arguments = [x.to(self.wide) for x in self.arguments]
        shape = max((x.shape for x in arguments), key=len)
        a, b = self.function(*arguments)
        return a.expand(shape), b.expand(shape)
