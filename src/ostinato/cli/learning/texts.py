"""Learning a text character by character: with each of the layers, and with an LSTM that is pruned."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from ostinato.cli.devices import Device, Precision
from ostinato.cli.learning.run import Cells, Json, LearningRun, Quick, Seed, Steps, chosen_cells, parameters_of

if TYPE_CHECKING:
    import torch

    from ostinato.models import LanguageModel
    from ostinato.training import Trainer, TrainingSettings

BLOCKS = ("1x1", "16x1")
Text = Annotated[Path, Option(help="A UTF-8 file, or a folder of them: tinyshakespeare.txt for the published task.")]
Width = Annotated[int, Option(help="Channels between the blocks.")]
Blocks = Annotated[int, Option(help="Blocks.")]
BatchSize = Annotated[int, Option(help="Chunks a step.")]
ChunkLength = Annotated[int, Option(help="Characters a chunk.")]

# With `--quick`.
TINY_MODEL: dict[str, Any] = {"width": 32, "num_layers": 2}
TINY_TRAINING: dict[str, Any] = {
    "steps": 30,
    "batch_size": 4,
    "chunk_length": 32,
    "warmup_steps": 5,
    "held_out_limit": 4096,
}


def characters(
    text: Text,
    cells: Cells = "mingru,minlstm,gru,lstm",
    torch_too: Annotated[
        bool, Option("--torch", help="Train gru and lstm also in torch.nn's own layers: same weights, same data.")
    ] = False,
    steps: Steps = 1000,
    width: Width = 384,
    expansion: Annotated[float, Option(help="Hidden size over width.")] = 1.5,
    num_layers: Blocks = 3,
    batch_size: BatchSize = 64,
    chunk_length: ChunkLength = 256,
    seed: Seed = 0,
    quick: Quick = False,
    device: Device = "auto",
    precision: Precision = "auto",
    json: Json = None,
) -> None:
    """Character language models of each layer: held-out loss over characters and over seconds."""
    from ostinato.bench.learning.peers import TORCH_LAYERS, with_torch_layers

    chosen = [(cell, layer) for cell in chosen_cells(cells) for layer in ("ostinato", "torch.nn")[: 1 + torch_too]]
    with LearningRun("characters", json, device, seed, quick) as run:
        sizes = {"width": width, "expansion": expansion, "num_layers": num_layers}
        settings = {"steps": steps, "batch_size": batch_size, "chunk_length": chunk_length}

        def fresh_trainer(cell: str, layer: str) -> "Trainer":
            change = with_torch_layers if layer == "torch.nn" else None
            return _trainer(run, text, cell, sizes, settings, precision, change)

        run.content |= {"text": text.name, "runs": []}
        for cell, layer in chosen:
            if layer == "torch.nn" and cell not in TORCH_LAYERS:
                continue
            fresh_trainer(cell, layer).advance(1)  # compiles the kernels, whose time is not the training's
            trainer = fresh_trainer(cell, layer)
            row: dict[str, Any] = {"cell": cell, "layer": layer, **_describe(trainer)}
            run.content["runs"].append(row)
            run.console.print(f"{cell} of {layer}, {row['parameters']:,} parameters")

            def keep(_point: object, row: dict[str, Any] = row, trainer: "Trainer" = trainer) -> None:
                row["curve"] = [asdict(point) for point in trainer.curve]
                row["lowest_held_out_loss"] = min(point.held_out_loss for point in trainer.curve)
                run.save()

            run.train(trainer, keep)


def pruning(
    text: Text,
    densities: Annotated[str, Option(help="Fractions of the recurrent weights to keep.")] = "0.5,0.3,0.2,0.1,0.05",
    steps: Annotated[int, Option(help="Steps to train the dense model.")] = 1000,
    finetune: Annotated[int, Option(help="Steps to train each pruned one; the first half prunes.")] = 300,
    learning_rate: Annotated[float, Option(help="AdamW's peak learning rate for those.")] = 1e-3,
    width: Width = 384,
    num_layers: Blocks = 3,
    batch_size: BatchSize = 64,
    chunk_length: ChunkLength = 256,
    seed: Seed = 0,
    quick: Quick = False,
    device: Device = "auto",
    precision: Precision = "auto",
    json: Json = None,
) -> None:
    """A trained character LSTM, pruned to several densities: held-out loss beside the dense one's."""
    from dataclasses import replace

    from ostinato.checks import check_integers

    chosen = _densities(densities)  # raises before the work begins
    check_integers(1, finetune=finetune)
    with LearningRun("pruning", json, device, seed, quick) as run:
        sizes = {"width": width, "num_layers": num_layers}
        chunks = {"steps": steps, "batch_size": batch_size, "chunk_length": chunk_length}
        trainer = _trainer(run, text, "lstm", sizes, chunks, precision)
        settings = replace(
            trainer.settings,
            steps=20 if quick else finetune,
            learning_rate=learning_rate,
            warmup_steps=min(100, finetune // 10),
        )
        run.console.print("dense")
        run.train(trainer, lambda point: None)
        dense = _Dense(run, trainer.model, _tokens(text)[0], settings, precision)
        run.content |= {
            "text": text.name,
            "fine_tuning": asdict(settings),
            "dense": {
                **_describe(trainer),
                "curve": [asdict(point) for point in trainer.curve],
                "held_out_loss": trainer.curve[-1].held_out_loss,
                "fine_tuned_loss": dense.fine_tuned(1.0, (1, 1), "dense, fine-tuned alike").evaluate().held_out_loss,
            },
            "runs": [],
        }

        def show(what: str, before: float, after: float) -> None:
            run.console.print(f"{what:<19}{before:10.4f}{after:14.4f}")

        run.console.print("held-out loss, nats    pruned    fine-tuned")
        show("dense", run.content["dense"]["held_out_loss"], run.content["dense"]["fine_tuned_loss"])
        for name in BLOCKS:
            for density in chosen:
                what = f"{density:.0%} in {name}"
                row = dense.pruned(density, name, what)
                run.content["runs"].append(row)
                run.save()
                show(what, row["pruned_loss"], row["fine_tuned_loss"])


class _Dense(NamedTuple):
    """A trained dense model, copies of which are pruned, and the settings of their fine-tuning."""

    run: LearningRun
    model: "LanguageModel"
    tokens: "torch.Tensor"
    settings: "TrainingSettings"
    precision: str

    def copy(self) -> "Trainer":
        from copy import deepcopy

        from ostinato.training import Trainer

        model = deepcopy(self.model)
        return Trainer(model, self.tokens, self.settings, device=self.run.device, precision=self.precision)

    def fine_tuned(self, density: float, block: tuple[int, int], what: str) -> "Trainer":
        from ostinato.bench.learning.pruning import fine_tune_pruning

        tuned = self.copy()
        with self.run.progress() as progress:
            task = progress.add_task(what, total=1.0)
            for done in fine_tune_pruning(tuned, density, block):
                progress.update(task, completed=done)
                self.run.stop_if_interrupted()
        return tuned

    def pruned(self, density: float, name: str, what: str) -> dict[str, Any]:
        """Measure the losses of pruning to a density in named blocks: at once, and step by step while fine-tuning."""
        import ostinato
        from ostinato.masks import block_named, kept_weights

        at_once, block = self.copy(), block_named(name)
        tuned = self.fine_tuned(density, block, what)
        ostinato.prune(at_once.model, density, block=block)
        kept, of = kept_weights(tuned.model)
        return {
            "block": name,
            "density": density,
            "kept_weights": kept,
            "of_weights": of,
            "pruned_loss": at_once.evaluate().held_out_loss,
            "fine_tuned_loss": tuned.evaluate().held_out_loss,
            "seconds": tuned.seconds,
        }


def _densities(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value <= 1 for value in values):
        raise ValueError(f"densities must be above 0 and at most 1, with commas between; got {text!r}")
    return values


def _trainer(
    run: LearningRun,
    text: Path,
    cell: str,
    sizes: dict[str, Any],
    settings: dict[str, int],
    precision: str,
    change: "Callable[[LanguageModel], LanguageModel] | None" = None,
) -> "Trainer":
    """Make the trainer of a model on a text; `change` is applied to the model before it moves to the device.

    A quick run replaces sizes and settings by tiny ones.
    """
    import torch

    from ostinato.models import LanguageModel
    from ostinato.training import Trainer, TrainingSettings

    tokens, vocab_size = _tokens(text)
    if run.quick:
        sizes, settings = TINY_MODEL, TINY_TRAINING
    evaluate_every = max(settings["steps"] // 10, 10 if run.quick else 1)
    torch.manual_seed(run.seed)
    model = LanguageModel(vocab_size, cell=cell, **sizes)
    return Trainer(
        change(model) if change else model,
        tokens,
        TrainingSettings(evaluate_every=evaluate_every, seed=run.seed, **settings),
        device=run.device,
        precision=precision,
        graph=Trainer.can_capture(run.device, compile=False, mesh=None, accumulate=1),
    )


def _tokens(text: Path) -> "tuple[torch.Tensor, int]":
    """Return the text's characters as tokens, and the size of the vocabulary."""
    from ostinato.text import Vocabulary, read_corpus

    corpus = read_corpus(text)
    vocabulary = Vocabulary.of(corpus.text)
    return vocabulary.encode(corpus.text), len(vocabulary)


def _describe(trainer: "Trainer") -> dict[str, Any]:
    return {
        "model": trainer.model.settings,
        "parameters": parameters_of(trainer.model),
        "precision": trainer.precision,
        "training": asdict(trainer.settings),
    }
