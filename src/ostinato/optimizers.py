"""What has to happen after every step of any optimiser."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


@functools.cache
def after_every_step(react: Callable[[list[Tensor]], None]) -> None:
    """From now on call ``react`` with an optimiser's parameters after each of its steps; once, however often asked."""

    def hook(optimizer: Optimizer, *_: Any) -> None:
        react([parameter for group in optimizer.param_groups for parameter in group["params"]])

    register_optimizer_step_post_hook(hook)
