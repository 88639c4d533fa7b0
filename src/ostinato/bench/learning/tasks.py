"""Sequence tasks with one right answer, drawn anew for every step, on the training device.

A task draws tokens and target answers, both (batch, time) int64; where no answer is asked, the target is ``IGNORED``,
which :func:`torch.nn.functional.cross_entropy` leaves out.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

IGNORED = -100
QUESTIONS = ("first", "majority", "parity")


class Task(Protocol):
    @property
    def vocab_size(self) -> int: ...

    def draw(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class SelectiveCopying:
    """Recall ``items`` data tokens, at random places in a sequence of noise, in their order (arXiv 2312.00752, 4.1.1).

    Of ``length`` tokens all but ``items``, which are drawn from 1 ... vocab_size - 2, are noise, 0.  As many
    markers, vocab_size - 1, follow, each to be answered with the next of the data tokens.

    >>> import torch
    >>> from ostinato.bench.learning.tasks import SelectiveCopying
    >>> SelectiveCopying(items=2).draw(1, 6, torch.Generator().manual_seed(0))
    (tensor([[ 0,  0,  0,  5,  0,  4, 15, 15]]), tensor([[-100, -100, -100, -100, -100, -100,    5,    4]]))
    """

    items: int = 16
    vocab_size: int = 16

    def draw(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        device = generator.device
        data = torch.randint(1, self.vocab_size - 1, (batch, self.items), generator=generator, device=device)
        # The positions of the largest of as many random numbers are a random subset.
        positions = torch.rand(batch, length, generator=generator, device=device).topk(self.items).indices.sort().values
        inputs = torch.zeros(batch, length + self.items, dtype=torch.int64, device=device)
        inputs[:, length:] = self.vocab_size - 1
        inputs.scatter_(1, positions, data)
        targets = torch.full_like(inputs, IGNORED)
        targets[:, length:] = data
        return inputs, targets


@dataclass(frozen=True)
class Bits:
    """Random bits, with an answer after each of them to a question about all bits so far.

    ============  ====================================================================
    ``first``     is this bit equal to the first?
    ``majority``  are there more ones than zeros?
    ``parity``    is the number of ones odd?
    ============  ====================================================================

    They are the tasks "even pairs", "majority" and "parity" of Delétang et al. 2023 (arXiv 2207.02098), asked at
    every step.

    >>> import torch
    >>> from ostinato.bench.learning.tasks import Bits
    >>> Bits("parity").draw(1, 6, torch.Generator().manual_seed(2))
    (tensor([[0, 1, 1, 0, 0, 1]]), tensor([[0, 1, 0, 0, 0, 1]]))
    """

    question: str
    vocab_size: int = 2

    def draw(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        bits = torch.randint(2, (batch, length), generator=generator, device=generator.device)
        return bits, self.answers(bits).long()

    def answers(self, bits: Tensor) -> Tensor:
        if self.question == "first":
            return bits == bits[:, :1]
        if self.question == "majority":
            return (2 * bits - 1).cumsum(1) > 0
        return bits.cumsum(1) % 2
