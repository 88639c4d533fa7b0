"""Fine-tuning a language model while its recurrent weights are pruned step by step."""

from collections.abc import Iterator

from ostinato.pruning import cubic_density, prune
from ostinato.training import Trainer

PRUNE_EVERY = 10


def fine_tune_pruning(trainer: Trainer, density: float, block: tuple[int, int]) -> Iterator[float]:
    """Train to the end of ``trainer``'s steps, yielding its progress, 0 to 1, every ten steps.

    The density falls along :func:`ostinato.cubic_density` to ``density`` at half of the steps; the other half trains
    what is left.  A density of 1 prunes nothing.
    """
    end = max(trainer.settings.steps // 2, 1)
    while trainer.step < trainer.settings.steps:
        trainer.advance(min(PRUNE_EVERY, trainer.settings.steps - trainer.step))
        # The first pruning past the end has the final density, and those after it would change nothing.
        if density < 1 and trainer.step < end + PRUNE_EVERY:
            prune(trainer.model, cubic_density(trainer.step, density, end=end), block=block)
        yield trainer.progress
