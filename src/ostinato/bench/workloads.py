"""What is computed: shapes, random inputs, the least work it takes, and its float64 reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels import reference
from ostinato.kernels.operators import GATES_OF


@dataclass(frozen=True)
class Run:
    """A computation made ready: what is timed, and how its tensors map to (B, T, channels)."""

    call: Callable[[], Tensor]
    inputs: tuple[Tensor, ...] = ()  # what gradients are taken of: the data, then parameters
    layout: Callable[[Tensor], Tensor] = lambda x: x  # from its own layout to (B, T, channels) and back
    has_bias: bool = False
    same_function: bool = True  # False for a layer that computes something else, such as nn.GRU

    def prepare(self, pass_name: str) -> Callable[[], object]:
        """The function to time; without inputs to differentiate, every pass is the call itself."""
        if not self.inputs:
            return self.call
        if pass_name == "forward":
            return torch.no_grad()(self.call)
        grad = torch.randn_like(self.call())
        if pass_name == "forward+backward":
            return lambda: torch.autograd.grad(self.call(), self.inputs, grad)
        output = self.call()
        return lambda: torch.autograd.grad(output, self.inputs, grad, retain_graph=True)


@dataclass(frozen=True)
class Scan:
    """``h[t] = a[t] * h[t-1] + b[t]`` over (B, T, D), bounded by the memory's speed."""

    batch: int
    length: int
    channels: int
    dtype: torch.dtype = torch.float32

    kind = "scan"
    passes = ("forward", "backward")
    unit = "bytes"
    limit_name = "torch.add(out=)"

    def __str__(self) -> str:
        return f"linear_scan ({self.batch}, {self.length}, {self.channels}) {name_of(self.dtype)}"

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """a in (0, 1) and b, normal."""
        shape = (self.batch, self.length, self.channels)
        a = torch.rand(shape, device=device, dtype=self.dtype)
        return a, torch.randn(shape, device=device, dtype=self.dtype)

    def work(self, pass_name: str) -> int:
        """Bytes that must move: forward a, b and h; backward a, h and the gradient in, two gradients out."""
        tensors = 3 if pass_name == "forward" else 5
        return tensors * self.batch * self.length * self.channels * self.dtype.itemsize

    def limit(self, data: tuple[Tensor, ...]) -> Run:
        """The addition of two tensors of the same size, which moves three."""
        output = torch.empty_like(data[0])
        return Run(lambda: torch.add(*data, out=output))

    def limit_share(self, pass_name: str) -> float:
        """How many times the limit's time the pass takes at least."""
        return self.work(pass_name) / self.work("forward")

    def window(self, x: Tensor, start: int, channels: list[int]) -> Tensor:
        """The part of an input, or of its gradient, that some channels of the last sequence depend on."""
        return x[-1:, start:][..., channels]

    def reference(self, inputs: list[Tensor], _data: tuple[Tensor, ...], _channels: list[int], _bias: bool) -> Tensor:
        a, b = inputs
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]))[0]


@dataclass(frozen=True)
class Layer:
    """One layer of minGRU or minLSTM, bounded by the matrix product that makes its pre-activations."""

    cell: str
    batch: int
    length: int
    input_size: int
    channels: int
    dtype: torch.dtype = torch.float32
    against_peers: bool = True

    kind = "layer"
    passes = ("forward", "forward+backward")
    unit = "flops"
    limit_name = "its GEMM alone"

    def __str__(self) -> str:
        sizes = f"({self.batch}, {self.length}, {self.input_size}) to {self.channels}"
        return f"{self.cell} {sizes} {name_of(self.dtype)}"

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """x, the weight (gates * H, input_size) and the bias, all random."""
        rows = GATES_OF[self.cell] * self.channels
        x = torch.randn(self.batch, self.length, self.input_size, device=device, dtype=self.dtype)
        weight = torch.randn(rows, self.input_size, device=device, dtype=self.dtype) * self.input_size**-0.5
        return x, weight, torch.randn(rows, device=device, dtype=self.dtype)

    def work(self, pass_name: str) -> int:
        """Floating-point operations of the matrix products: one forward, two more backward."""
        products = 1 if pass_name == "forward" else 3
        rows = GATES_OF[self.cell] * self.channels
        return products * 2 * self.batch * self.length * self.input_size * rows

    def limit(self, data: tuple[Tensor, ...]) -> Run:
        """The same pass of the matrix product and nothing else."""
        x, weight = (tensor.detach().requires_grad_() for tensor in data[:2])
        return Run(lambda: F.linear(x, weight), (x, weight))

    def limit_share(self, _pass_name: str) -> float:
        return 1.0

    def window(self, x: Tensor, start: int, _channels: list[int]) -> Tensor:
        return x[-1:, start:]

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], channels: list[int], bias: bool) -> Tensor:
        gates, x = GATES_OF[self.cell], inputs[0]
        weight, offset = (part.unflatten(0, (gates, -1))[:, channels].flatten(0, 1).to(x) for part in data[1:])
        pre = F.linear(x, weight)
        # Pre-activations are stored in the layer's dtype; g's derivative jumps at 0, which they must not cross here.
        pre = pre + (pre.to(self.dtype).to(pre) - pre).detach()
        a, b = reference.GATES[self.cell](pre + offset if bias else pre, "positive")
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]))[0]


Workload = Scan | Layer


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def workloads(kind: str, device: torch.device, quick: bool = False, only: str = "") -> list[Workload]:
    """The shapes measured on a kind of device; `quick` is the part that ends within a minute.

    Raises ValueError if no name contains `only`.
    """
    return named((QUICK if quick else ON_CUDA if device.type == "cuda" else ON_CPU)[kind], only)


def named(works: list[Any], part: str) -> list[Any]:
    """Those whose name contains `part`.  Raises ValueError if none does."""
    chosen = [work for work in works if part in str(work)]
    if not chosen:
        raise ValueError(f"only must be part of one of {'; '.join(map(str, works))}; got {part!r}")
    return chosen


bf16 = torch.bfloat16

QUICK: dict[str, list[Workload]] = {
    "scan": [Scan(1, 4096, 256)],
    "layer": [Layer("mingru", 1, 1024, 256, 256), Layer("minlstm", 1, 1024, 256, 256)],
}
ON_CPU: dict[str, list[Workload]] = {
    "scan": [Scan(16, 4096, 256), Scan(1, 65536, 256)],
    "layer": [
        Layer("mingru", 1, 256, 256, 256),
        Layer("mingru", 1, 4096, 256, 256),
        Layer("mingru", 1, 16384, 256, 256),
        Layer("mingru", 16, 512, 256, 256),
        Layer("minlstm", 1, 4096, 256, 256),
    ],
}
ON_CUDA: dict[str, list[Workload]] = {
    "scan": [
        Scan(8, 512, 1536),
        Scan(8, 4096, 1536),
        Scan(8, 4096, 1536, bf16),
        Scan(8, 16384, 1536),
        Scan(8, 65536, 1536),
        Scan(8, 65536, 1536, bf16),
        Scan(1, 65536, 64),
        Scan(1, 65536, 256),
        Scan(1, 2**20, 64),
        Scan(1, 2**24, 1),
    ],
    "layer": [
        Layer("mingru", 16, 4096, 1024, 1024, bf16),
        Layer("minlstm", 16, 4096, 1024, 1024, bf16),
        Layer("mingru", 16, 4096, 1024, 1024),
        Layer("mingru", 64, 512, 512, 512, bf16),
        Layer("mingru", 1, 65536, 256, 256, bf16),
        Layer("mingru", 64, 1000, 10, 100),
        Layer("mingru", 64, 512, 256, 256),
        Layer("mingru", 64, 4096, 256, 256),
        Layer("minlstm", 64, 4096, 256, 256),
        Layer("mingru", 1, 4096, 256, 256),
        # The same work at every length: the time should not depend on how it is split into sequences.
        *(Layer("mingru", 65536 // t, t, 1024, 1024, bf16, against_peers=False) for t in (256, 1024, 16384, 65536)),
    ],
}
