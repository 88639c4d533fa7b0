"""The hyperparameters of a training, and checks of them, alone and against a text and the processes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.checks import check_integers, check_numbers, check_tensor, describe
from ostinato.processes import Share


@dataclass(frozen=True)
class TrainingSettings:
    """Hyperparameters: AdamW with a linear warm-up, then a cosine decay to ``final_rate`` of the learning rate.

    Args:
        steps: optimiser steps.
        seconds: a time limit in place of ``steps``, which the cosine then follows.
        batch_size, chunk_length: chunks of the text per step, and tokens per chunk.
        learning_rate, final_rate, warmup_steps: the highest rate, the fraction of it that is left at the end, and the
            steps of the warm-up.
        weight_decay, beta2: AdamW's; only matrices decay.
        clip_norm: the largest norm of the gradient.
        held_out, held_out_limit: the fraction of the text, at its end, that is never trained on, and how many of its
            first tokens the held-out loss is computed on.
        evaluate_every: steps between evaluations.
        seed: of the random chunks.

    Raises:
        TypeError: a count or seed that is not an integer, or another value that is not a number.
        ValueError: a value outside its range.

    Example:
        >>> from ostinato.training import TrainingSettings
        >>> TrainingSettings(steps=500, learning_rate=1e-3).batch_size
        64
    """

    steps: int = 3000
    seconds: float | None = None
    batch_size: int = 64
    chunk_length: int = 256
    learning_rate: float = 4e-3
    final_rate: float = 0.05
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta2: float = 0.98
    clip_norm: float = 1.0
    held_out: float = 0.1
    held_out_limit: int = 1 << 17
    evaluate_every: int = 250
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_size": 1, "chunk_length": 1, "held_out_limit": 2, "evaluate_every": 1, "seed": 0}
        for name, lowest in least.items():
            check_integers(lowest, **{name: getattr(self, name)})
        for name in ("learning_rate", "clip_norm", "warmup_steps", "weight_decay", "final_rate", "held_out", "beta2"):
            check_numbers(**{name: getattr(self, name)})
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite; got {getattr(self, name)}")
        for name in ("warmup_steps", "weight_decay", "final_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite; got {getattr(self, name)}")
        for name in ("held_out", "beta2"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1; got {getattr(self, name)}")
        if self.seconds is not None:
            check_numbers(seconds=self.seconds)
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds must be above 0 and finite; got {self.seconds}")


def train_size(tokens: Tensor, settings: TrainingSettings) -> int:
    """The number of tokens to train on, which are the first ones of ``tokens``, (N,).

    Raises TypeError for what is not a tensor of integers, ValueError for one that is not (N,), or too short.
    """
    check_tensor("tokens", tokens)
    if tokens.dtype is torch.bool or tokens.is_floating_point() or tokens.is_complex():
        raise TypeError(f"tokens must be integers; got {describe(tokens)}")
    if tokens.dim() != 1:
        raise ValueError(f"tokens must have shape (N,); got {tuple(tokens.shape)}")
    size = len(tokens) - int(len(tokens) * settings.held_out)
    if min(size, len(tokens) - size) <= settings.chunk_length:
        least = math.ceil((settings.chunk_length + 1) / min(settings.held_out, 1 - settings.held_out))
        raise ValueError(
            f"the text is too short: a chunk of {settings.chunk_length} tokens, and a share of "
            f"{settings.held_out} held out, need about {least} tokens; got {len(tokens)}"
        )
    return size


def check_share(settings: TrainingSettings, share: Share, accumulate: int) -> None:
    """Raise ValueError unless every process has a row of each micro-batch, and a step of each chunk."""
    rows = accumulate * share.rows_of
    if rows > settings.batch_size:
        raise ValueError(
            f"batch_size must be at least {rows}, a row for each of {accumulate} parts on {share.rows_of} processes; "
            f"got {settings.batch_size}"
        )
    if share.steps_of > settings.chunk_length:
        raise ValueError(
            f"chunk_length must be at least {share.steps_of}, the processes that share a chunk; "
            f"got {settings.chunk_length}"
        )
