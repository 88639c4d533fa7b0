"""``ostinato bench learning``: what the layers learn, each result one command with a fixed seed."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ostinato.cli.devices import Device, Precision, choose_device

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

    from ostinato.models import LanguageModel
    from ostinato.training import Trainer

BLOCKS = ("1x1", "16x1")

Text = Annotated[Path, Option(help="A UTF-8 file, or a folder of them: tinyshakespeare.txt for the published task.")]
Cells = Annotated[str, Option(help="Which layers to train, with commas between.")]
Json = Annotated[
    Path | None,
    Option(
        help="The run's file, or a folder for one named after the device; its plot is put beside it.",
        show_default="runs/learning-COMMAND.json",
    ),
]
Seed = Annotated[int, Option(help="Seed of all that is random.")]
Quick = Annotated[bool, Option("--quick", help="A tiny model for a few steps: shows in seconds that all parts run.")]

# For `--quick`.
TINY_MODEL: dict[str, Any] = {"width": 32, "num_layers": 2}
TINY_TRAINING: dict[str, Any] = {
    "steps": 30,
    "batch_size": 4,
    "chunk_length": 32,
    "warmup_steps": 5,
    "held_out_limit": 4096,
}

app = typer.Typer(help="Train on tasks and texts, and draw what is learned.", no_args_is_help=True)


@app.command()
def characters(
    text: Text,
    cells: Cells = "mingru,minlstm,gru,lstm",
    torch_too: Annotated[
        bool, Option("--torch", help="Train gru and lstm also in torch.nn's own layers: same weights, same data.")
    ] = False,
    steps: Annotated[int, Option(help="Steps to train each.")] = 1000,
    width: Annotated[int, Option(help="Channels between the blocks.")] = 384,
    expansion: Annotated[float, Option(help="Hidden size over width.")] = 1.5,
    num_layers: Annotated[int, Option(help="Blocks.")] = 3,
    batch_size: Annotated[int, Option(help="Chunks a step.")] = 64,
    chunk_length: Annotated[int, Option(help="Characters a chunk.")] = 256,
    seed: Seed = 0,
    quick: Quick = False,
    device: Device = "auto",
    precision: Precision = "auto",
    json: Json = None,
) -> None:
    """Character language models of each layer: held-out loss over characters and over seconds."""
    from ostinato.bench.learning.peers import TORCH_LAYERS, with_torch_layers

    chosen = [(cell, layer) for cell in _cells(cells) for layer in ("ostinato", "torch.nn")[: 1 + torch_too]]
    with _Benchmark("characters", json, device, seed, quick, precision) as run:
        sizes = {"width": width, "expansion": expansion, "num_layers": num_layers}
        settings = {"steps": steps, "batch_size": batch_size, "chunk_length": chunk_length}

        def fresh_trainer(cell: str, layer: str) -> "Trainer":
            change = with_torch_layers if layer == "torch.nn" else None
            return run.language_trainer(text, cell, sizes, settings, change)

        run.content |= {"text": text.name, "runs": []}
        for cell, layer in chosen:
            if layer == "torch.nn" and cell not in TORCH_LAYERS:
                continue
            fresh_trainer(cell, layer).advance(1)  # compiles what is compiled at first use, which is no learning
            trainer = fresh_trainer(cell, layer)
            row: dict[str, Any] = {"cell": cell, "layer": layer, **_describe(trainer)}
            run.content["runs"].append(row)
            run.console.print(f"{cell} of {layer}, {row['parameters']:,} parameters")

            def keep(_point: object, row: dict[str, Any] = row, trainer: "Trainer" = trainer) -> None:
                row["curve"] = [asdict(point) for point in trainer.curve]
                row["lowest_held_out_loss"] = min(point.held_out_loss for point in trainer.curve)
                run.save()

            run.train(trainer, keep)


@app.command()
def pruning(
    text: Text,
    densities: Annotated[str, Option(help="Parts of the recurrent weights to keep.")] = "0.5,0.3,0.2,0.1,0.05",
    steps: Annotated[int, Option(help="Steps to train the dense model.")] = 1000,
    finetune: Annotated[int, Option(help="Steps to train each pruned one; the first half prunes.")] = 300,
    learning_rate: Annotated[float, Option(help="AdamW's for those, at its highest.")] = 1e-3,
    width: Annotated[int, Option(help="Channels between the blocks.")] = 384,
    num_layers: Annotated[int, Option(help="Blocks.")] = 3,
    batch_size: Annotated[int, Option(help="Chunks a step.")] = 64,
    chunk_length: Annotated[int, Option(help="Characters a chunk.")] = 256,
    seed: Seed = 0,
    quick: Quick = False,
    device: Device = "auto",
    precision: Precision = "auto",
    json: Json = None,
) -> None:
    """A trained character LSTM, pruned to several densities: held-out loss beside the dense one's."""
    from copy import deepcopy
    from dataclasses import replace

    import ostinato
    from ostinato.bench.learning.pruning import fine_tune_pruning
    from ostinato.masks import block_named

    kept = [float(part) for part in densities.split(",")]
    with _Benchmark("pruning", json, device, seed, quick, precision) as run:
        sizes = {"width": width, "num_layers": num_layers}
        chunks = {"steps": steps, "batch_size": batch_size, "chunk_length": chunk_length}
        trainer = run.language_trainer(text, "lstm", sizes, chunks)
        run.console.print("dense")
        run.train(trainer, lambda point: None)
        dense, tokens = trainer.model, _tokens(text)[0]
        settings = replace(
            trainer.settings,
            steps=20 if quick else finetune,
            learning_rate=learning_rate,
            warmup_steps=min(100, finetune // 10),
        )

        def fine_tuned(density: float, block: tuple[int, int], what: str) -> "tuple[float, Trainer]":
            from ostinato.training import Trainer

            new = Trainer(deepcopy(dense), tokens, settings, device=run.device, precision=precision)
            with run.progress() as progress:
                task = progress.add_task(what, total=1.0)
                for done in fine_tune_pruning(new, density, block):
                    progress.update(task, completed=done)
                    run.stop_if_interrupted()
            return new.evaluate().held_out_loss, new

        def pruned_at_once(density: float, block: tuple[int, int]) -> float:
            from ostinato.training import Trainer

            model = deepcopy(dense)
            ostinato.prune(model, density, block=block)
            return Trainer(model, tokens, settings, device=run.device, precision=precision).evaluate().held_out_loss

        run.content |= {
            "text": text.name,
            "fine_tuning": asdict(settings),
            "dense": {
                **_describe(trainer),
                "curve": [asdict(point) for point in trainer.curve],
                "held_out_loss": trainer.curve[-1].held_out_loss,
                "fine_tuned_loss": fine_tuned(1.0, (1, 1), "dense, fine-tuned alike")[0],
            },
            "runs": [],
        }
        run.console.print("held-out loss, nats    pruned    fine-tuned")
        shown = run.content["dense"]
        run.console.print(f"dense              {shown['held_out_loss']:10.4f}{shown['fine_tuned_loss']:14.4f}")
        for name in BLOCKS:
            block = block_named(name)
            for density in kept:
                what = f"{density:.0%} in {name}"
                loss, new = fine_tuned(density, block, what)
                masks = [mask for name, mask in new.model.named_buffers() if ".mask_" in name]
                row = {
                    "block": name,
                    "density": density,
                    "kept_weights": sum(int(mask.sum()) for mask in masks),
                    "of_weights": sum(mask.numel() for mask in masks),
                    "pruned_loss": pruned_at_once(density, block),
                    "fine_tuned_loss": loss,
                    "seconds": new.seconds,
                }
                run.content["runs"].append(row)
                run.save()
                run.console.print(f"{what:<19}{row['pruned_loss']:10.4f}{loss:14.4f}")


@app.command()
def copying(
    cells: Cells = "mingru,minlstm",
    length: Annotated[int, Option(help="Tokens to look for the data in, at the end of the curriculum.")] = 4096,
    items: Annotated[int, Option(help="Data tokens among them, to be remembered.")] = 16,
    steps: Annotated[int, Option(help="Steps at the full length; those at shorter ones are in proportion.")] = 1000,
    seed: Seed = 0,
    quick: Quick = False,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Selective copying: which tokens, among thousands of noise, in which order; lengths grow by stages."""
    import torch

    from ostinato.bench.learning.fit import Stage, TaskTrainer, remember
    from ostinato.bench.learning.tasks import SelectiveCopying
    from ostinato.models import LanguageModel

    width, learning_rate = 128, 4e-3
    if quick:
        length, items, width, steps = 64, 2, 16, 20
    if not 0 < items <= length:
        raise ValueError(f"items must be at least 1 and at most length, {length}; got {items}")
    stages = [Stage(length, batch_size=32, steps=steps)]
    for shorter, batch_size, times in ((1024, 64, 1), (256, 256, 1), (64, 512, 3)):
        if items < shorter < length:
            stages.insert(0, Stage(shorter, batch_size, times * steps, accuracy=0.98))
    sequences, test_sequences = (32, 64) if quick else (128, 1024)
    task = SelectiveCopying(items)
    torch.set_float32_matmul_precision("high")  # tf32 on a GPU: the gates and the scan stay in float32
    with _Benchmark("copying", json, device, seed, quick) as run:
        run.content |= {
            "length": length,
            "items": items,
            "vocab_size": task.vocab_size,
            "learning_rate": learning_rate,
            "stages": [asdict(stage) for stage in stages],
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "test_sequences": test_sequences,
            "runs": [],
        }
        for cell in _cells(cells):
            torch.manual_seed(seed)
            model = LanguageModel(task.vocab_size, width=width, num_layers=3, cell=cell, expansion=2.0, dropout=0.0)
            remember(model, length)
            trainer = TaskTrainer(model, task, stages, learning_rate=learning_rate, seed=seed, device=run.device)
            row: dict[str, Any] = {"cell": cell, "model": model.settings, "parameters": _count(model), "curve": []}
            run.content["runs"].append(row)
            with run.progress() as progress:
                bar = progress.add_task(cell, total=1.0)
                while not trainer.finished:
                    point = trainer.advance(10 if quick else 50)
                    what = f"{cell}  length {point.length:,}  loss {point.train_loss:.3f}"
                    progress.update(bar, completed=trainer.progress, description=what)
                    run.stop_if_interrupted()
                    if trainer.stage_step % (5 * 50) == 0:
                        accuracy = trainer.evaluate(length, sequences, seed=seed + 1)[length:].mean().item()
                        row["curve"].append({**asdict(point), "accuracy": accuracy})
                        run.save()
                        progress.console.print(
                            f"{cell}  step {point.step:6,}  {point.seconds:4.0f} s  length {point.length:5,}: "
                            f"loss {point.train_loss:.4f}, {point.train_accuracy:.2%} right; "
                            f"length {length:,}: {accuracy:.2%}"
                        )
            row["accuracy"] = trainer.evaluate(length, test_sequences, seed=seed + 2)[length:].mean().item()
            run.save()
            run.console.print(f"{cell}: {row['accuracy']:.2%} of {test_sequences * items:,} tokens right")


@app.command()
def bits(
    cells: Cells = "mingru,minlstm,gru,lstm",
    questions: Annotated[str, Option(help="Which, with commas between.")] = "first,majority,parity",
    depths: Annotated[str, Option(help="Numbers of layers.")] = "1,2,3",
    steps: Annotated[int, Option(help="Steps to train each.")] = 500,
    seed: Seed = 0,
    quick: Quick = False,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Questions about a string of bits, by depth: trained on 40 bits, asked about 41 to 256.

    After every bit: is it equal to the first, are there more ones, is the number of ones odd?
    """
    import torch

    from ostinato.bench.learning.fit import Stage, TaskTrainer, remember
    from ostinato.bench.learning.tasks import QUESTIONS, Bits
    from ostinato.models import LanguageModel

    trained, longest, width, learning_rate = 40, 256, 16 if quick else 32, 5e-3
    stage = Stage(trained, batch_size=8 if quick else 64, steps=10 if quick else steps)
    sequences = 16 if quick else 1024
    chosen = questions.split(",")
    for question in chosen:
        if question not in QUESTIONS:
            raise ValueError(f"questions must be some of {', '.join(QUESTIONS)}; got {question!r}")
    if not all(depth.isdecimal() and int(depth) > 0 for depth in depths.split(",")):
        raise ValueError(f"depths must be numbers from 1 on, with commas between; got {depths!r}")
    works = [(q, cell, int(depth)) for q in chosen for cell in _cells(cells) for depth in depths.split(",")]
    with _Benchmark("bits", json, device, seed, quick) as run:
        run.content |= {
            "trained_length": trained,
            "test_lengths": [trained + 1, longest],
            "test_sequences": sequences,
            "learning_rate": learning_rate,
            "stage": asdict(stage),
            "runs": [],
        }
        run.console.print(f"right answers             1 to {trained} bits    {trained + 1} to {longest} bits")
        with run.progress() as progress:
            bar = progress.add_task("", total=len(works))
            for question, cell, depth in works:
                what = f"{question:<9}{cell:<8}{depth} layer{'s' if depth > 1 else ' '}"
                progress.update(bar, description=what)
                torch.manual_seed(seed)
                # Nothing but the recurrence may look back.
                model = LanguageModel(
                    2, width=width, num_layers=depth, cell=cell, expansion=1, conv_kernel=0, mlp_ratio=2, dropout=0.0
                )
                remember(model, trained)
                task = Bits(question)
                trainer = TaskTrainer(model, task, [stage], learning_rate=learning_rate, seed=seed, device=run.device)
                curve = []
                while not trainer.finished:
                    curve.append(asdict(trainer.advance(100)))
                    run.stop_if_interrupted()
                right = trainer.evaluate(longest, sequences, seed=seed + 1, at_once=sequences)
                within, beyond = right[:trained].mean().item(), right[trained:].mean().item()
                run.content["runs"].append(
                    {
                        "question": question,
                        "cell": cell,
                        "num_layers": depth,
                        "model": model.settings,
                        "parameters": _count(model),
                        "curve": curve,
                        "accuracy_within": within,
                        "accuracy_beyond": beyond,
                        "accuracy_by_8_lengths": [round(share.mean().item(), 4) for share in right.split(8)],
                    }
                )
                run.save()
                progress.console.print(f"{what:<25}{within:12.1%}{beyond:20.1%}")
                progress.advance(bar)


@app.command()
def plot(
    json: Annotated[Path, typer.Argument(help="The JSON file of a run.")],
    output: Annotated[Path | None, Option(help="The image.", show_default="beside it")] = None,
) -> None:
    """Draw a run again from its file."""
    from json import loads

    from ostinato.bench.learning.plots import draw

    try:
        content = loads(json.read_text())
    except ValueError as error:
        raise ValueError(f"{json}: expected the JSON file of a run; {error}") from None
    output = output or json.with_suffix(".png")
    draw(content, output)
    typer.echo(f"wrote {output}")


class _Benchmark:
    """One command's run: its file, which is written again as the run grows, its plot, and Ctrl-C."""

    def __init__(
        self, name: str, path: Path | None, device: str, seed: int, quick: bool, precision: str = "auto"
    ) -> None:
        from rich.console import Console

        from ostinato.bench.runs import environment, path_for
        from ostinato.cli.train import stop_on_interrupt
        from ostinato.files import check_file, is_stream

        self.console = Console(highlight=False, soft_wrap=True)
        self.device: torch.device = choose_device(device)
        self.path = path_for(path or Path(f"runs/learning-{name}.json"), f"learning-{name}", self.device)
        check_file(self.path)
        self._to_stream = is_stream(self.path)
        self.seed, self.quick, self.precision = seed, quick, precision
        self.content: dict[str, Any] = {"benchmark": f"learning-{name}", **environment(self.device), "seed": seed}
        self._interruptible = stop_on_interrupt()
        self._interrupted: Callable[[], bool]

    def __enter__(self) -> "_Benchmark":
        self._interrupted = self._interruptible.__enter__()
        return self

    def __exit__(self, kind: type | None, *rest: Any) -> None:
        self._interruptible.__exit__(kind, *rest)
        if kind is None:
            self._write()
            self._draw()

    def save(self) -> None:
        """What there is so far; a stream takes but one content, at the end."""
        if not self._to_stream:
            self._write()

    def _write(self) -> None:
        from ostinato.bench.runs import write_json

        write_json(self.path, self.content)

    def stop_if_interrupted(self) -> None:
        if self._interrupted():
            self.console.print(
                f"Interrupted; {self.path} has what was finished." if self.path.is_file() else "Interrupted."
            )
            raise typer.Exit(130)

    def train(self, trainer: "Trainer", on_point: Callable[[Any], None]) -> None:
        from ostinato.cli.train import show_progress

        show_progress(trainer, self.console, on_point, self._interrupted)
        self.stop_if_interrupted()

    def language_trainer(
        self,
        text: Path,
        cell: str,
        sizes: dict[str, Any],
        settings: dict[str, int],
        change: "Callable[[LanguageModel], LanguageModel] | None" = None,
    ) -> "Trainer":
        """For a model of these sizes on a text, tiny and short if quick; the model changed before it is moved."""
        import torch

        from ostinato.models import LanguageModel
        from ostinato.training import Trainer, TrainingSettings

        tokens, vocab_size = _tokens(text)
        if self.quick:
            sizes, settings = TINY_MODEL, TINY_TRAINING
        evaluate_every = max(settings["steps"] // 10, 10 if self.quick else 1)
        torch.manual_seed(self.seed)
        model = LanguageModel(vocab_size, cell=cell, **sizes)
        return Trainer(
            change(model) if change else model,
            tokens,
            TrainingSettings(evaluate_every=evaluate_every, seed=self.seed, **settings),
            device=self.device,
            precision=self.precision,
        )

    def progress(self) -> "Progress":
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
        return Progress(*columns, console=self.console, transient=True)

    def _draw(self) -> None:
        from ostinato.bench.learning.plots import draw

        self.console.print(f"wrote {self.path}")
        if self._to_stream:
            return
        try:
            draw(self.content, self.path.with_suffix(".png"))
        except ImportError:
            self.console.print(
                f"No matplotlib here; to draw it where there is:  ostinato bench learning plot {self.path}"
            )
        else:
            self.console.print(f"wrote {self.path.with_suffix('.png')}")


def _cells(names: str) -> list[str]:
    from ostinato.models import CELLS

    cells = names.split(",")
    for cell in cells:
        if cell not in CELLS:
            raise ValueError(f"cells must be some of {', '.join(CELLS)}; got {cell!r}")
    return cells


def _tokens(text: Path) -> "tuple[torch.Tensor, int]":
    """The text's characters as tokens, and how many there are to tell apart."""
    from ostinato.text import Vocabulary, read_corpus

    corpus = read_corpus(text)
    vocabulary = Vocabulary.of(corpus.text)
    return vocabulary.encode(corpus.text), len(vocabulary)


def _describe(trainer: "Trainer") -> dict[str, Any]:
    return {
        "model": trainer.model.settings,
        "parameters": _count(trainer.model),
        "precision": trainer.precision,
        "training": asdict(trainer.settings),
    }


def _count(model: "torch.nn.Module") -> int:
    return sum(parameter.numel() for parameter in model.parameters())
