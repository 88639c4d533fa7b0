"""What a contestant prepares for a workload: a computation to be timed and checked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

OURS = "Ostinato"


class Unavailable(Exception):
    """Raised with the reason why a contestant cannot run a workload on this machine."""


@dataclass(frozen=True)
class Run:
    """A prepared computation: what is timed, and how its tensors map to (B, T, channels)."""

    call: Callable[[], Tensor]  # the output
    inputs: tuple[Tensor, ...] = ()  # what is differentiated by: the data, then parameters
    layout: Callable[[Tensor], Tensor] = lambda x: x  # from its own layout to (B, T, channels) and back
    has_bias: bool = False
    same_function: bool = True  # False for a layer that computes something else, such as nn.GRU
    plan: dict[str, Any] = field(default_factory=dict)  # how our own layer runs
    forward_only: str = ""  # why no other pass is measured
    gradients: Callable[[], tuple[Tensor, ...]] | None = None  # forward and backward, if not autograd of `call`
    weights: tuple[Tensor, ...] = ()  # which change between calls, as in training

    def prepare(self, pass_name: str) -> Callable[[], Any]:
        """Return the function to time; without inputs to differentiate by, every pass is the call itself."""
        if pass_name == "forward+backward" and self.gradients is not None:
            return self.gradients
        if pass_name == "forward" or not self.inputs:
            return torch.no_grad()(self.call)
        if self.forward_only:
            raise Unavailable(self.forward_only)
        grad = torch.randn_like(self.call())
        if pass_name == "forward+backward":
            return lambda: torch.autograd.grad(self.call(), self.inputs, grad)
        output = self.call()
        return lambda: torch.autograd.grad(output, self.inputs, grad, retain_graph=True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Change all weights as an optimiser would, so that whatever was derived from them is out of date."""
        for weight in self.weights:
            weight.neg_()  # keeps their distribution


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def short_name(name: str) -> str:
    """Abbreviate a workload's name for tables, where it has to fit on one line."""
    name = name.replace("mingru", "MinGRU").replace("minlstm", "MinLSTM")
    for long, short in (("bfloat16", "bf16"), ("float", "fp"), ("linear_scan ", ""), (") to ", ") → ")):
        name = name.replace(long, short)
    return name
