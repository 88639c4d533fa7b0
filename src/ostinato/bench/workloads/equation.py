"""Linear recurrences given by their equation, bound by the memory."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import ostinato
from ostinato.bench.workloads.run import name_of
from ostinato.bench.workloads.scan import MemoryBound
from ostinato.diagonal.hgrn import hgrn
from ostinato.diagonal.rg_lru import rg_lru
from ostinato.kernels.scan import reference


@ostinato.recurrence
def invented(x: Tensor, r: Tensor, i: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """A made-up recurrence that no library implements, with as many tensors as RG-LRU."""
    a = torch.exp(-rate * F.softplus(r))
    return a, (1 - a) * torch.tanh(i) * x


EQUATIONS = {"RG-LRU": rg_lru, "HGRN": hgrn, "invented": invented}


@dataclass(frozen=True)
class Equation(MemoryBound):
    """A linear recurrence given by its equation, over (B, T, D)."""

    cell: str
    batch: int
    length: int
    channels: int
    dtype: torch.dtype = torch.float32
    who: tuple[str, ...] = ()

    kind = "recurrence"

    def __str__(self) -> str:
        return f"{self.cell} ({self.batch}, {self.length}, {self.channels}) {name_of(self.dtype)}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the arguments (B, T, D), without the last, a parameter (D,)."""
        return EQUATIONS[self.cell].names[:-1]

    @property
    def steps(self) -> int:
        return self.batch * self.length

    def tensors(self, pass_name: str) -> int:
        """Forward: the inputs and h; backward: these, the gradient of h, and those of the inputs."""
        return (1 if pass_name == "forward" else 2) * (len(self.inputs) + 1)

    def data(self, device: torch.device) -> tuple[Tensor, ...]:
        """Draw normal pre-activations and a parameter in (0, 1); RG-LRU's gives decays in (0.3, 0.996) per step."""
        shape = self.batch, self.length, self.channels
        sequences = (torch.randn(shape, device=device, dtype=self.dtype) for _ in self.inputs)
        parameter = torch.rand(self.channels, device=device)
        return *sequences, (-1 - 5 * parameter if self.cell == "RG-LRU" else parameter)

    def reference(self, inputs: list[Tensor], data: tuple[Tensor, ...], channels: list[int], _bias: bool) -> Tensor:
        a, b = EQUATIONS[self.cell].function(*inputs, data[-1][channels].to(inputs[0]))
        return reference.linear_scan(a, b, torch.zeros_like(a[:, 0]))[0]
