"""The random numbers of a call, for dropout, when it is computed again."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """From which the device's next random numbers follow."""
    return _generator_of(device).get_state()


@contextmanager
def drawn_from(state: Tensor, device: torch.device) -> Iterator[None]:
    """Draw random numbers from this state; those after the block are the same as if there were none in it."""
    generator = _generator_of(device)
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


def _generator_of(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
