"""``ostinato prune``: prunes the recurrent weights of a trained GRU or LSTM, and shows what that costs."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ostinato.cli.console import plain_console
from ostinato.cli.corpus import digest_of, place_of_text, read_text
from ostinato.cli.devices import Device, Precision, choose_device
from ostinato.cli.progress import bits, train_or_save

if TYPE_CHECKING:
    from ostinato.checkpoint import Checkpoint
    from ostinato.training import TrainingSettings


def prune(
    checkpoint: Annotated[Path, typer.Argument(help="best.safetensors or last.safetensors of a training.")],
    density: Annotated[
        str, Option(help="Fraction of the recurrent weights to keep; or one for each gate: 0.05,0.05,0.2.")
    ],
    block: Annotated[str, Option(help="Weights that are pruned together: 1x1, 16x1 or 8x4.")] = "1x1",
    keep_diagonal: Annotated[
        bool, Option("--keep-diagonal", help="Also keep every unit's weight to itself, beyond the density.")
    ] = False,
    input_weights: Annotated[bool, Option("--input-weights", help="Prune the input weights too.")] = False,
    finetune: Annotated[int, Option(help="Steps to train what is left.")] = 0,
    learning_rate: Annotated[float, Option(help="AdamW's peak learning rate for that.")] = 1e-3,
    text: Annotated[
        Path | None,
        Option(help="A UTF-8 file, or a folder of them.", show_default="what the model was trained on"),
    ] = None,
    output: Annotated[
        Path | None, Option(help="The pruned model's file.", show_default="CHECKPOINT-pruned.safetensors")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file if it exists.")] = False,
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Prune a trained GRU or LSTM by magnitude, train what is left, and show the held-out loss before and after."""
    import ostinato
    from ostinato.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
    from ostinato.checks import check_integers
    from ostinato.files import check_file
    from ostinato.masks import block_named, kept_weights
    from ostinato.training import Trainer

    console = plain_console(soft_wrap=True)
    options: dict[str, Any] = {
        "density": _densities(density),
        "block": block_named(block),
        "keep_diagonal": keep_diagonal,
        "input_weights": input_weights,
    }
    check_integers(0, finetune=finetune)
    loaded = load_checkpoint(checkpoint)
    output = output or checkpoint.with_stem(f"{checkpoint.stem}-pruned")
    check_file(output)  # after loading, as this would create the folder of a checkpoint that does not exist
    if output.exists() and not overwrite:
        raise ValueError(f"{output} is there already: expected another --output, or --overwrite")
    if loaded.model.settings["cell"] not in ("gru", "lstm"):
        raise ValueError(f"{checkpoint}: expected a gru or lstm to prune; got a {loaded.model.settings['cell']}")
    settings = _settings(checkpoint, loaded, finetune, learning_rate)
    ostinato.prune(copy.deepcopy(loaded.model), **options)  # raises before the work begins
    tokens = loaded.vocabulary.encode(_text_of(checkpoint, loaded, text))
    trainer = Trainer(loaded.model, tokens, settings, device=choose_device(device), precision=precision)

    def show(what: str) -> None:
        loss = trainer.evaluate().held_out_loss
        console.print(f"{what:<24} held out {loss:.4f} nats, {bits(loss):.4f} bits per character")

    def save() -> None:
        training = {**loaded.training, "pruning": {**options, "finetuned": trainer.step}}
        save_checkpoint(output, Checkpoint(loaded.model, loaded.vocabulary, training))

    show("before")
    ostinato.prune(loaded.model, **options)
    kept, of = kept_weights(loaded.model)
    show(f"{kept / of:.1%} of {of:,} weights")
    save()
    if finetune:
        train_or_save(trainer, console, lambda point: save(), f"{output} has what there was.")
        show("fine-tuned")
    console.print(f"To see what it writes:  ostinato generate {output}")


def _densities(text: str) -> float | list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"density must be a number, or one for each gate with commas between; got {text!r}") from None
    return values[0] if len(values) == 1 else values


def _settings(path: Path, loaded: "Checkpoint", finetune: int, learning_rate: float) -> "TrainingSettings":
    """Return the settings of fine-tuning; all others are the training's, so that the held-out part is the same."""
    from ostinato.training import TrainingSettings

    try:
        trained = TrainingSettings(**loaded.training.get("trainer", {}).get("settings", {}))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path}: expected the state of a training; {type(error).__name__}: {error}") from None
    return replace(
        trained,
        seconds=None,
        steps=max(finetune, 1),
        learning_rate=learning_rate,
        warmup_steps=min(100, finetune // 10),
        evaluate_every=max(finetune // 4, 1),
    )


def _text_of(path: Path, loaded: "Checkpoint", text: Path | None) -> str:
    """Return the text to take the held-out loss of: by default that of the training, which must not have changed."""
    corpus = read_text(text or place_of_text(path, loaded.training.get("text")))
    if text is None and "digest" in loaded.training and digest_of(corpus) != loaded.training["digest"]:
        raise ValueError(f"{corpus.source}: expected the text that {path} was trained on; it differs")
    return corpus.text
