"""``ostinato demo``: what the library does, in about two minutes."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ostinato.cli.console import plain_console
from ostinato.cli.devices import Device, choose_device
from ostinato.cli.plots import plot_beside

if TYPE_CHECKING:
    import torch
    from rich.console import Console


INDENT = " " * 4


def demo(
    output: Annotated[Path, Option(help="Folder for the model, the table and the plot.")] = Path("demo"),
    seconds: Annotated[float, Option(help="Seconds to train for.")] = 85,
    device: Device = "auto",
) -> None:
    """Train a small minGRU on real text, let it write, and time a layer at growing lengths: two minutes on two cores.

    The text is this Python's own standard library, so nothing is downloaded.
    """
    from ostinato.files import check_folder

    chosen = choose_device(device)
    check_folder(output)
    console = plain_console()
    _train_and_write(console, chosen, seconds, output / "model.safetensors")
    _compare_times(console, chosen, output)


def _train_and_write(console: "Console", device: "torch.device", seconds: float, path: Path) -> None:
    import torch

    from ostinato.cli.progress import show_progress
    from ostinato.cli.run import Run
    from ostinato.models import LanguageModel
    from ostinato.text import Vocabulary, standard_library
    from ostinato.training import Trainer, TrainingSettings

    console.rule("Training a small minGRU on real text")
    corpus = standard_library()
    # Indentation as tabs: a model of this size, trained for a minute, cannot count spaces well.
    corpus = replace(corpus, text=corpus.text.replace(INDENT, "\t"))
    vocabulary = Vocabulary.of(corpus.text)
    settings = TrainingSettings(
        steps=1_000_000,  # `seconds` ends it
        seconds=seconds,
        batch_size=8,
        chunk_length=128,
        learning_rate=1e-2,
        warmup_steps=50,
        weight_decay=0.01,
        evaluate_every=1_000_000,
        held_out_limit=1 << 16,
    )
    torch.manual_seed(settings.seed)
    model = LanguageModel(len(vocabulary), width=192, num_layers=2, expansion=2.0, mlp_ratio=2.0, dropout=0.0)
    trainer = Trainer(model, vocabulary.encode(corpus.text), settings, device=device, graph=device.type == "cuda")
    run = Run(trainer, vocabulary, corpus, None)
    console.print(run.summary(), soft_wrap=True)
    show_progress(run.trainer, console, lambda point: run.save(path, weights_only=True))

    console.rule("What it writes")
    prompt = "def read_"
    generator = torch.Generator(device).manual_seed(settings.seed)
    tokens = model.generate(vocabulary.encode(prompt).to(device)[None], 600, temperature=0.6, generator=generator)
    console.out(prompt, end="", style="bold", highlight=False)
    for token in tokens:
        console.out(vocabulary.decode(token.tolist()).replace("\t", INDENT), end="", highlight=False)
    console.print(f"\n\nMore of it:  ostinato generate {path} --prompt 'class '", soft_wrap=True)


def _compare_times(console: "Console", device: "torch.device", output: Path) -> None:
    import torch

    from ostinato.bench import papers, report, runs
    from ostinato.files import replacing

    console.rule("One layer at growing lengths")
    if device.type not in ("cpu", "cuda"):
        device = torch.device("cpu")
    sweep = papers.lengths_sweep("mingru", 256, papers.DEMO_LENGTHS)
    with console.status("measuring"):
        content = runs.environment(device) | sweep.measure([device], 0.5)
    shown = sweep.shown(content)
    table = report.sweep(shown)
    console.print(table)
    with replacing(output / "times.md") as temporary:
        temporary.write_text(f"{shown['title']}, {shown['device']}\n\n{table.markdown()}")
    runs.write_json(output / "times.json", content)
    plot = plot_beside(console, shown, output / "times.json")
    written = ["model.safetensors", "times.md", "times.json", *([plot.name] if plot else [])]
    console.print(f"Written to {output}: {', '.join(written)}", soft_wrap=True)
