"""Layers of a recurrence, bound by the GEMM of their pre-activations."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

import ostinato
from ostinato.bench.workloads.run import Run, name_of
from ostinato.diagonal.para import para_gru, para_lstm
from ostinato.kernels.matmul.gemm import linear
from ostinato.kernels.scan import reference
from ostinato.minimal.recurrences import GATES, RECURRENCES
from ostinato.slstm import slstm


@dataclass(frozen=True)
class Layer:
    """A layer of minGRU or minLSTM, whose limit is the GEMM of its pre-activations."""

    cell: str
    batch: int
    length: int
    input_size: int
    channels: int
    dtype: torch.dtype = torch.float32
    passes: tuple[str, ...] = ("forward", "forward+backward")
    who: tuple[str, ...] = ()

    kind = "layer"
    inputs: ClassVar[tuple[str, ...]] = ("input",)
    unit = "flops"
    limit_name = "its GEMM alone"
    tf32: ClassVar[bool] = False  # whether float32 products may be rounded to tf32

    def __str__(self) -> str:
        sizes = f"({self.batch}, {self.length}, {self.input_size}) to {self.channels}"
        return f"{self.cell} {sizes} {'tf32' if self.tf32 else name_of(self.dtype)}"

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """Draw x, the weight (gates * H, input_size) and the bias."""
        rows = self.gates * self.channels
        x = torch.randn(self.batch, self.length, self.input_size, device=device, dtype=self.dtype)
        weight = torch.randn(rows, self.input_size, device=device, dtype=self.dtype) * self.input_size**-0.5
        return x, weight, torch.randn(rows, device=device, dtype=self.dtype)

    def work(self, pass_name: str) -> int:
        """Floating-point operations of the matrix products: one forward, two more backward."""
        products = 1 if pass_name == "forward" else 3
        rows = self.gates * self.channels
        return products * 2 * self.batch * self.length * self.input_size * rows

    def limit(self, data: tuple[Tensor, ...]) -> Run:
        """The same pass of the GEMM alone."""
        x, weight = (tensor.detach().requires_grad_() for tensor in data[:2])
        return Run(lambda: linear(x, weight), (x, weight))

    def limit_share(self, _pass_name: str) -> float:
        return 1.0

    def window(self, x: Tensor, start: int, _channels: list[int]) -> Tensor:
        return x[-1:, start:]

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], channels: list[int], bias: bool) -> Tensor:
        gates, x = GATES[self.cell], inputs[0]
        weight, offset = (part.unflatten(0, (gates, -1))[:, channels].flatten(0, 1).to(x) for part in data[1:])
        pre = F.linear(x, weight)
        # Rounded to the layer's dtype, as the layer stores them: the derivative of the candidate jumps at 0.
        pre = pre + (pre.to(self.dtype).to(pre) - pre).detach()
        function = RECURRENCES[self.cell]["positive"].function
        a, b = function(*(pre + offset if bias else pre).chunk(gates, -1))
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]))[0]


@dataclass(frozen=True)
class ParaLayer(Layer):
    """A layer of ParaGRU or ParaLSTM, with a GEMM in tf32."""

    kind = "recurrence"
    tf32: ClassVar[bool] = True
    gates: ClassVar[int] = 3

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """Draw the tensors of a :class:`Layer`, then the diagonal recurrent weights and an LSTM's peepholes."""
        vectors = 3 if self.cell == "ParaGRU" else 5
        recurrent = torch.randn(vectors, self.channels, device=device) * self.channels**-0.5
        return *super().data(device), *recurrent

    def layer(self, data: tuple[Tensor, ...]) -> Any:
        """Our layer."""
        x, weight, bias, *recurrent = data
        layer = getattr(ostinato, self.cell)(self.input_size, self.channels, batch_first=True, device=x.device)
        weights = {"weight_ih_l0": weight, "bias_ih_l0": bias, "weight_hh_l0": torch.cat(recurrent[:3])}
        if self.cell == "ParaLSTM":
            weights["weight_ch_l0"] = torch.cat(recurrent[3:])
        layer.load_state_dict(weights)
        return layer

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], channels: list[int], _bias: bool) -> Tensor:
        x = inputs[0]
        weight, bias = (part.unflatten(0, (3, -1))[:, channels].flatten(0, 1).to(x) for part in data[1:3])
        recurrent = [part[channels].to(x) for part in data[3:]]
        function = para_gru if self.cell == "ParaGRU" else para_lstm
        h, _ = function(*F.linear(x, weight).chunk(3, -1), *recurrent, *bias.chunk(3), backend="cpu")
        return h if self.cell == "ParaGRU" else h[0]


@dataclass(frozen=True)
class SLSTMLayer(Layer):
    """A layer of SLSTM."""

    heads: int = 4

    kind = "recurrence"
    gates: ClassVar[int] = 4

    def __str__(self) -> str:
        return f"{super().__str__()} in {'one head' if self.heads == 1 else f'{self.heads} heads'}"

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """Draw the tensors of a :class:`Layer`, then the recurrent weights of each head, (4 * units, units)."""
        units = self.channels // self.heads
        shape = self.heads, 4 * units, units
        return *super().data(device), *(torch.randn(shape, device=device, dtype=self.dtype) * units**-0.5)

    def layer(self, data: tuple[Tensor, ...]) -> Any:
        """Our layer."""
        x, weight, bias, *recurrent = data
        sizes = self.input_size, self.channels
        layer = ostinato.SLSTM(*sizes, batch_first=True, num_heads=self.heads, device=x.device, dtype=self.dtype)
        layer.load_state_dict({"weight_ih_l0": weight, "bias_ih_l0": bias, "weight_hh_l0": torch.stack(recurrent)})
        return layer

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], channels: list[int], _bias: bool) -> Tensor:
        x = inputs[0]
        weight, bias, *recurrent = (part.to(x) for part in data[1:])
        gates = F.linear(x, weight, bias).chunk(4, -1)
        (h, *_), _ = slstm(*gates, weight_hh=torch.stack(recurrent), backend="cpu")
        return h[..., channels]
