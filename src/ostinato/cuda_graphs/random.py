"""Draws the random numbers of a call again, such as those of dropout, where the call is recomputed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def random_state(device: torch.device) -> Tensor:
    """The state of the device's generator, which determines its next random numbers."""
    return _generator_of(device).get_state()


@contextmanager
def drawn_from(state: Tensor, device: torch.device) -> Iterator[None]:
    """Draw random numbers from this state in the block, and go on after it as if it had drawn none."""
    generator = _generator_of(device)
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def _generator_of(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
