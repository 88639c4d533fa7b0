"""A batch's loss and gradients in one CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ostinato.cuda_graphs.capture import capture

Differentiated = Callable[[Tensor, Tensor], Tensor]
"""The loss of inputs and targets, detached; the parameters' gradients are in their ``grad``."""

_WARM_UPS = 3  # some libraries set something up at their second call, too


def captured(
    differentiate: Differentiated, parameters: Sequence[Tensor], inputs: Tensor, targets: Tensor
) -> Differentiated:
    """The same function of tensors like these, replayed.

    Every call overwrites the loss and the gradients of the call before.  Random numbers are drawn as without the
    capture, whose own draws are taken back.
    """
    device = inputs.device
    drawn = torch.cuda.get_rng_state(device)
    given = inputs.clone(), targets.clone()

    def run() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        return differentiate(*given)

    replay, loss = capture(run, device, _WARM_UPS)
    torch.cuda.set_rng_state(drawn, device)
    grads = [parameter.grad for parameter in parameters]

    def replayed(inputs: Tensor, targets: Tensor) -> Tensor:
        for own, x in zip(given, (inputs, targets), strict=True):
            own.copy_(x)
        replay()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        return loss

    return replayed
