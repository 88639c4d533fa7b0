"""The loss of a batch in CUDA graphs, one of its forward and one of its backward, each a single launch for the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


class _LossOf(nn.Module):
    """A loss as a module, whose parameters are the model's."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(inputs, targets)


def captured(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor) -> Loss:
    """The loss, and its gradients by the model's parameters, of tensors like these.

    Random numbers are drawn as without the capture, whose own draws are taken back.
    """
    device = inputs.device
    drawn = torch.cuda.get_rng_state(device)
    capture: Any = torch.cuda.make_graphed_callables
    with torch.cuda.device(device):
        replayed: Loss = capture(_LossOf(model, loss), (inputs.clone(), targets.clone()))
    torch.cuda.set_rng_state(drawn, device)
    return replayed
