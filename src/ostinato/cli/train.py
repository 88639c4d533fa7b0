"""``ostinato train``: trains a character language model on any text."""

import os
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ostinato.cli.console import plain_console
from ostinato.cli.corpus import digest_of, place_of_text, read_text
from ostinato.cli.progress import bits, train_or_save
from ostinato.cli.run import Run

if TYPE_CHECKING:
    from rich.console import Console
    from torch import Tensor

    from ostinato.models import LanguageModel
    from ostinato.training import Point, Trainer, TrainingSettings

CELLS = (  # as in ostinato.models, which is too slow to import for a help text
    "mingru",
    "minlstm",
    "gru",
    "lstm",
    "highwaymingru",
    "rglru",
    "hgrn",
    "lru",
    "qrnn",
    "sru",
    "indrnn",
    "paragru",
    "paralstm",
    "slstm",
)
Files, Model, Training, Machine = (
    partial(Option, rich_help_panel=panel) for panel in ("Files", "Model", "Training", "Machine")
)


def train(
    context: typer.Context,
    text: Annotated[
        Path | None,
        Files(help="A UTF-8 file, or a folder of them.", show_default="the Python standard library's own source"),
    ] = None,
    output: Annotated[
        Path | None,
        Files(help="Folder for last.safetensors and best.safetensors.", show_default="runs/CELL-TEXT"),
    ] = None,
    resume: Annotated[Path | None, Files(help="Go on from this last.safetensors, with its text and settings.")] = None,
    overwrite: Annotated[bool, Files("--overwrite", help="Replace the checkpoints of another run.")] = False,
    curve: Annotated[Path | None, Files(help="Write the loss curve to this JSON file.")] = None,
    cell: Annotated[str, Model(help=f"One of {', '.join(CELLS)}.")] = "mingru",
    width: Annotated[int, Model(help="Channels between the blocks.")] = 384,
    num_layers: Annotated[int, Model(help="Blocks.")] = 3,
    expansion: Annotated[float, Model(help="Hidden size over width.")] = 1.5,
    conv_kernel: Annotated[int, Model(help="Steps the causal convolution sees; 0 for none.")] = 4,
    mlp_ratio: Annotated[float, Model(help="Inner size of the MLP over width.")] = 4.0,
    dropout: Annotated[float, Model(help="Share of each block's output dropped.")] = 0.3,
    steps: Annotated[int, Training(help="Steps to train.")] = 3000,
    batch_size: Annotated[int, Training(help="Chunks a step.")] = 64,
    chunk_length: Annotated[int, Training(help="Characters a chunk.")] = 256,
    learning_rate: Annotated[float, Training(help="AdamW's peak learning rate.")] = 4e-3,
    final_rate: Annotated[float, Training(help="Share of it left at the end of the cosine.")] = 0.05,
    warmup_steps: Annotated[int, Training(help="Steps of linear warm-up.")] = 100,
    weight_decay: Annotated[float, Training(help="AdamW's weight decay, for matrices only.")] = 0.1,
    beta2: Annotated[float, Training(help="AdamW's second momentum.")] = 0.98,
    clip_norm: Annotated[float, Training(help="Largest norm of the gradient.")] = 1.0,
    held_out: Annotated[float, Training(help="Share of the text, at its end, never trained on.")] = 0.1,
    held_out_limit: Annotated[int, Training(help="Most characters of it to take the held-out loss over.")] = 1 << 17,
    evaluate_every: Annotated[int, Training(help="Steps between held-out losses and checkpoints.")] = 250,
    seed: Annotated[int, Training(help="Seed of all that is random.")] = 0,
    device: Annotated[str, Machine(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    precision: Annotated[
        str, Machine(help="float32, bfloat16 (autocast), or auto: bfloat16 on a GPU that has it.")
    ] = "auto",
    compile: Annotated[bool, Machine("--compile", help="Compile the model with torch.compile.")] = False,
    graph: Annotated[
        bool | None,
        Machine(
            "--graph/--no-graph",
            help="Replay each step's forward and backward from a CUDA graph.",
            show_default="where one GPU trains without --compile and --accumulate",
        ),
    ] = None,
    accumulate: Annotated[int, Machine(help="Parts of a process's batch whose gradients are added up.")] = 1,
    shard: Annotated[bool, Machine("--shard", help="Under torchrun: a part of the weights on each process.")] = False,
    sequence_parallel: Annotated[
        int, Machine(help="Under torchrun: processes that share each chunk, part by part.")
    ] = 1,
) -> None:
    """Train a character language model on any text.

    Ctrl-C, SIGTERM and SIGHUP save the run; --resume goes on from there as if nothing had happened.
    Several processes, one a GPU, share the training under torchrun:  torchrun --nproc-per-node 4 -m ostinato train
    """
    from ostinato.cli.devices import joined_job
    from ostinato.processes import is_first, make_mesh

    if shard and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "shard needs several processes, which torchrun starts: torchrun --nproc-per-node 4 -m ostinato train"
        )
    with joined_job(device) as own_device:
        mesh = make_mesh(own_device.type, shard=shard, sequence_parallel=sequence_parallel)
        machine = {"device": own_device, "precision": precision, "compile": compile}
        machine |= {"mesh": mesh, "shard": shard, "accumulate": accumulate, "graph": graph}
        run = _start(context, text, machine) if resume is None else _resume(context, resume, text, machine)
        if output is None:
            named = text.resolve().stem if text else "standard-library"
            output = resume.parent if resume else Path("runs") / f"{cell}-{named}"
        console = plain_console(soft_wrap=True, quiet=not is_first())
        _train(run, console, output, resume, overwrite, curve)


def _train(
    run: Run, console: "Console", output: Path, resume: Path | None, overwrite: bool, curve: Path | None
) -> None:
    """Train to the end; of several processes, only the first prints and writes."""
    from ostinato.files import check_file, check_folder, is_stream, locked
    from ostinato.processes import is_first

    trainer = run.trainer
    last, best = output / "last.safetensors", output / "best.safetensors"
    if curve and is_first():
        _check_apart(curve, run.text, (last, best, resume))
        check_file(curve)

    def keep(point: "Point | None") -> None:
        # Best before last: if interrupted in between, a run resumed from the older last reaches the same best again.
        if point and point.held_out_loss <= min(other.held_out_loss for other in trainer.curve):
            run.save(best, weights_only=True)
        run.save(last)
        if curve and is_first() and not is_stream(curve):
            run.write_curve(curve)

    if trainer.progress < 1:
        if is_first():
            check_folder(output)
        with locked(output) if is_first() else nullcontext():
            continues = resume is not None and last.exists() and last.samefile(resume)
            existing = next((path for path in (last, best) if path.exists()), None)
            if is_first() and existing and not continues and not overwrite:
                resuming = f"--resume {last}, " if existing == last else ""
                raise ValueError(f"{existing} is there already: expected {resuming}another --output, or --overwrite")
            console.print(run.summary())
            train_or_save(trainer, console, keep, f"To go on:  ostinato train --resume {last}")
    else:
        console.print(f"{run.summary()}\nAll its steps are done; a larger --steps goes on.")
    if not is_first():
        return
    if curve:
        run.write_curve(curve)
    if not best.exists() and resume:  # the lowest loss is that of the run it was resumed from
        best = resume.with_name(best.name)
    lowest = min(trainer.curve, key=lambda point: point.held_out_loss)
    console.print(
        f"Lowest held-out loss: {lowest.held_out_loss:.4f} nats, {bits(lowest.held_out_loss):.4f} bits per character, "
        f"at step {lowest.step}.\nTo see what it writes:  ostinato generate {best}"
    )


def _check_apart(curve: Path, text: Path | None, checkpoints: tuple[Path | None, ...]) -> None:
    """Raise ValueError if the curve would replace a checkpoint or become part of the text, which --resume needs."""
    target, source = curve.resolve(), text and text.resolve()
    if target in (path.resolve() for path in checkpoints if path):
        raise ValueError(f"curve must be another file than the checkpoints, which it would replace; got {curve}")
    if source and (target == source or (source.is_dir() and target.is_relative_to(source))):
        raise ValueError(f"curve must be outside the text, {text}, or --resume would find another text; got {curve}")


def _start(context: typer.Context, text: Path | None, machine: dict[str, Any]) -> Run:
    import torch

    from ostinato.models import LanguageModel
    from ostinato.processes import all_have
    from ostinato.text import Vocabulary
    from ostinato.training import TrainingSettings

    settings = TrainingSettings(**_options(context, "Training"))
    corpus = read_text(text)
    if not all_have(bytes.fromhex(digest_of(corpus))):
        raise ValueError(f"{corpus.source}: expected the same text in all processes; it differs")
    vocabulary = Vocabulary.of(corpus.text)
    torch.manual_seed(settings.seed)
    sizes = _options(context, "Model")
    _check_memory(settings.batch_size, **sizes)
    model = LanguageModel(len(vocabulary), **sizes)
    return Run(_trainer(model, vocabulary.encode(corpus.text), settings, machine), vocabulary, corpus, text)


def _check_memory(
    batch_size: int, *, width: int, num_layers: int, expansion: float, conv_kernel: int, mlp_ratio: float, **_: Any
) -> None:
    """Raise ValueError if the model, or the positions of a step's chunks, would exceed the machine's memory."""
    from ostinato.checks import check_integers

    check_integers(width=width, num_layers=num_layers, conv_kernel=conv_kernel)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    weights = num_layers * width * (width * (expansion + 2 * mlp_ratio) + conv_kernel)
    model = (
        f"width {width}, num_layers {num_layers}, expansion {expansion}, conv_kernel {conv_kernel} and "
        f"mlp_ratio {mlp_ratio}"
    )
    for sizes, needed in ((model, 4 * weights), (f"batch_size {batch_size}", 8 * batch_size)):
        if memory < needed < float("inf"):
            least, most = (f"{size / 1e9:,.0f} GB" for size in (needed, memory))
            raise ValueError(f"{sizes} must fit into memory, {most}; got {least} or more")


def _resume(context: typer.Context, path: Path, text: Path | None, machine: dict[str, Any]) -> Run:
    from ostinato.checkpoint import load_checkpoint
    from ostinato.training import TrainingSettings

    checkpoint = load_checkpoint(path)
    saved = checkpoint.training
    if not checkpoint.training_tensors:
        raise ValueError(f"{path}: expected a checkpoint to go on from, as last.safetensors is; it holds weights only")
    try:
        settings = TrainingSettings(**saved["trainer"]["settings"])
        source, digest = saved["text"], saved["digest"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected the state of a training; {type(error).__name__}: {error}") from None
    steps, set_options = settings.steps, {name for name in context.params if _is_given(context, name)}
    for name, value in {**checkpoint.model.settings, **asdict(settings)}.items():
        if name in set_options - {"steps"} and context.params[name] != value:
            raise ValueError(f"{name} of {path} is {value}; got {context.params[name]}, and only steps can change")
    if "steps" in set_options and context.params["steps"] != settings.steps:
        settings = replace(settings, steps=context.params["steps"])
    if text is None:
        text = place_of_text(path, source)
    corpus = read_text(text)
    if digest_of(corpus) != digest:
        raise ValueError(f"{corpus.source}: expected the text that {path} was trained on; it differs")
    tokens = checkpoint.vocabulary.encode(corpus.text)
    trainer = _trainer(checkpoint.model, tokens, settings, machine)
    try:
        trainer.restore(saved["trainer"], checkpoint.training_tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if settings.steps != steps and trainer.step >= settings.steps:
        raise ValueError(f"steps must be above the {trainer.step} that {path} has done; got {settings.steps}")
    return Run(trainer, checkpoint.vocabulary, corpus, text)


def _trainer(
    model: "LanguageModel", tokens: "Tensor", settings: "TrainingSettings", machine: dict[str, Any]
) -> "Trainer":
    from ostinato.training import Trainer

    if machine["graph"] is None:
        conditions = (machine[name] for name in ("device", "compile", "mesh", "accumulate"))
        machine = machine | {"graph": Trainer.can_capture(*conditions)}
    return Trainer(model, tokens, settings, **machine)


def _options(context: typer.Context, panel: str) -> dict[str, Any]:
    """Return the options of a help panel: "Model" has LanguageModel's arguments, "Training" TrainingSettings'."""
    names = [option.name for option in context.command.params if getattr(option, "rich_help_panel", None) == panel]
    return {name: context.params[name] for name in names if name}


def _is_given(context: typer.Context, option: str) -> bool:
    """Whether an option was set by the user, rather than by default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"
