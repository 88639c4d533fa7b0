"""A training run with its text: its summary, its checkpoints and its loss curve."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.cli.corpus import digest_of

if TYPE_CHECKING:
    from ostinato.text import Corpus, Vocabulary
    from ostinato.training import Trainer


@dataclass
class Run:
    """A training run and its text."""

    trainer: "Trainer"
    vocabulary: "Vocabulary"
    corpus: "Corpus"
    text: Path | None

    def summary(self) -> str:
        """Describe text, model and training, one line each."""
        from ostinato.bench.runs import device_name

        trainer, corpus = self.trainer, self.corpus
        model, settings = trainer.model.settings, trainer.settings
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        skipped = f" ({corpus.skipped} files that are not UTF-8 left out)" if corpus.skipped else ""
        limit = (
            f"{settings.seconds:g} seconds"
            if settings.seconds
            else f"{settings.steps:,} step{'s' * (settings.steps > 1)}"
        )
        layers = f"{model['num_layers']} {model['cell']} layer{'s' * (model['num_layers'] > 1)}"
        return (
            f"Text:      {corpus.source}{skipped}, {len(corpus.text):,} characters, {len(self.vocabulary)} different\n"
            f"Model:     {layers}, width {model['width']}, {parameters:,} parameters\n"
            f"Training:  {limit}, {settings.batch_size} x {settings.chunk_length} characters a step, in "
            f"{trainer.precision} on {trainer.spread}{device_name(trainer.device)}"
        )

    def save(self, path: Path, weights_only: bool = False) -> None:
        """Write a checkpoint; with `weights_only` it has no optimiser state to resume from."""
        from ostinato.checkpoint import Checkpoint, save_checkpoint

        state, tensors = self.trainer.state()
        training = {"text": self.text and str(self.text), "digest": digest_of(self.corpus), "trainer": state}
        save_checkpoint(
            path, Checkpoint(self.trainer.model, self.vocabulary, training, {} if weights_only else tensors)
        )

    def write_curve(self, path: Path) -> None:
        """Write the loss curve, with its environment, model and settings, as JSON."""
        from ostinato.bench.runs import environment, write_json

        trainer = self.trainer
        write_json(
            path,
            {
                "environment": environment(trainer.device),
                "text": self.text.name if self.text else self.corpus.source,
                "precision": trainer.precision,
                "model": trainer.model.settings,
                "training": asdict(trainer.settings),
                "unit": "nats per character",
                "curve": [asdict(point) for point in trainer.curve],
            },
        )
