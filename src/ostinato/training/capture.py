"""A batch's loss and gradients in one CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ostinato.cuda_graphs.capture import capture

Differentiated = Callable[[Tensor, Tensor], Tensor]
"""Maps inputs and targets to the detached loss, and leaves the parameters' gradients in their ``grad``."""

_WARM_UPS = 3  # some libraries set something up at their second call, too


def captured(
    differentiate: Differentiated, parameters: Sequence[Tensor], inputs: Tensor, targets: Tensor
) -> Differentiated:
    """Capture the function for tensors like these: returns one that replays it.

    Every call overwrites the loss and the gradients of the previous call.  The capture restores the random generator's
    state, so that random numbers are drawn as without it.
    """
    device = inputs.device
    random_state = torch.cuda.get_rng_state(device)
    static_batch = inputs.clone(), targets.clone()

    def run() -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        return differentiate(*static_batch)

    replay, loss = capture(run, device, _WARM_UPS)
    torch.cuda.set_rng_state(random_state, device)
    grads = [parameter.grad for parameter in parameters]

    def replayed(inputs: Tensor, targets: Tensor) -> Tensor:
        for target, source in zip(static_batch, (inputs, targets), strict=True):
            target.copy_(source)
        replay()
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        return loss

    return replayed
