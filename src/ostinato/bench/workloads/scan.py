"""Scans, and the base class of workloads that are bound by the memory bandwidth."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.bench.workloads.run import Run, name_of
from ostinato.kernels.scan import reference


class MemoryBound:
    """A workload that reads or writes (B, T, D) tensors once each; an addition's memory bandwidth is its limit."""

    passes = ("forward", "backward")
    unit = "bytes"
    limit_name = "torch.add(out=)"
    channels: int
    dtype: torch.dtype

    @property
    def steps(self) -> int:
        """Time steps of all sequences."""
        raise NotImplementedError

    def tensors(self, pass_name: str) -> int:
        """The number of (B, T, D) tensors that a pass must read or write."""
        raise NotImplementedError

    def work(self, pass_name: str) -> int:
        """Bytes that must move."""
        return self.tensors(pass_name) * self.steps * self.channels * self.dtype.itemsize

    def limit(self, data: tuple[Tensor, ...]) -> Run:
        """The addition of two tensors of the same size, which moves three."""
        output = torch.empty_like(data[0])
        return Run(lambda: torch.add(data[0], data[1], out=output))

    def limit_share(self, pass_name: str) -> float:
        """The least time of the pass, as a multiple of the limit's."""
        return self.tensors(pass_name) / 3

    def window(self, x: Tensor, start: int, channels: list[int]) -> Tensor:
        """The part of an input, or of its gradient, that some channels of the last sequence depend on."""
        return x[-1:, start:][..., channels]


@dataclass(frozen=True)
class Scan(MemoryBound):
    """``h[t] = a[t] * h[t-1] + b[t]`` over (B, T, D)."""

    batch: int
    length: int
    channels: int
    dtype: torch.dtype = torch.float32
    who: tuple[str, ...] = ()  # the contestants' names; all usual ones if empty
    time_contiguous: bool = False  # (B, D, T) in memory
    shortest: int = 0  # steps of the shortest of sequences laid end to end, whose lengths are evenly spaced; 0 for none
    resets: float = 0.0  # share of the steps before which the state is zero

    kind = cell = "scan"
    inputs: ClassVar[tuple[str, ...]] = ("a", "b")

    def __str__(self) -> str:
        length = f"{self.shortest} to {self.length}" if self.shortest else f"{self.length}"
        more = ", time-contiguous" * self.time_contiguous + ", packed" * bool(self.shortest)
        more += f", {self.resets:.0%} resets" * bool(self.resets)
        return f"linear_scan ({self.batch}, {length}, {self.channels}) {name_of(self.dtype)}{more}"

    @cached_property
    def lengths(self) -> Tensor:
        """Steps of each sequence."""
        return torch.linspace(self.shortest or self.length, self.length, self.batch).round().int()

    @property
    def steps(self) -> int:
        return int(self.lengths.sum())

    def tensors(self, pass_name: str) -> int:
        """Forward: a, b and h; backward: a, h and three gradients."""
        return 3 if pass_name == "forward" else 5

    def cu_seqlens(self, device: torch.device) -> Tensor | None:
        """The boundaries of packed sequences; None without packing."""
        if not self.shortest:
            return None
        return F.pad(self.lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(device)

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """Draw a, uniform in (0, 1), b, normal, and the reset mask (B, T) if there are resets."""
        batch, length = (1, self.steps) if self.shortest else (self.batch, self.length)
        shape = (batch, self.channels, length) if self.time_contiguous else (batch, length, self.channels)
        a = torch.rand(shape, device=device, dtype=self.dtype)
        b = torch.randn(shape, device=device, dtype=self.dtype)
        resets = [torch.rand(batch, length, device=device) < self.resets] if self.resets else []
        return (a.mT, b.mT, *resets) if self.time_contiguous else (a, b, *resets)

    def resets_of(self, data: tuple[Tensor, ...]) -> Tensor | None:
        """The reset mask of :meth:`data`, true at the steps before which the state is zero; None without resets."""
        return data[2] if self.resets else None

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], _channels: list[int], _bias: bool) -> Tensor:
        (a, b), resets, starts = inputs, self.resets_of(data), self.cu_seqlens(inputs[0].device)
        begins = torch.zeros(1, data[0].shape[1], dtype=torch.bool) if resets is None else resets[-1:].cpu()
        if starts is not None:
            begins[0, starts[:-1].long()] = True
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]), resets=begins[:, -a.shape[1] :])[0]
