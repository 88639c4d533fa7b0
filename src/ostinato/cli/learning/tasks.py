"""Learning tasks with one right answer: selective copying, and questions about strings of bits."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from ostinato.cli.devices import Device
from ostinato.cli.learning.run import Cells, Json, LearningRun, Quick, Seed, Steps, chosen_cells, parameters_of

if TYPE_CHECKING:
    from torch import Tensor

    from ostinato.bench.learning.fit import Progress, Stage, TaskTrainer

REPORT_EVERY = 50  # steps
TEST_EVERY = 5 * REPORT_EVERY  # steps between tests of copying


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
    """Selective copying: recall a few tokens among thousands of noise, in order; lengths grow in stages."""
    import torch

    from ostinato.bench.learning.fit import TaskTrainer, remember
    from ostinato.bench.learning.tasks import SelectiveCopying
    from ostinato.models import LanguageModel

    width, learning_rate = 128, 4e-3
    if quick:
        length, items, width, steps = 64, 2, 16, 20
    if not 0 < items <= length:
        raise ValueError(f"items must be at least 1 and at most length, {length}; got {items}")
    stages = _curriculum(length, items, steps)
    sequences, test_sequences = (32, 64) if quick else (128, 1024)
    task = SelectiveCopying(items)
    torch.set_float32_matmul_precision("high")  # tf32 on a GPU: the gates and the scan stay in float32
    with LearningRun("copying", json, device, seed, quick) as run:
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
        for cell in chosen_cells(cells):
            torch.manual_seed(seed)
            model = LanguageModel(task.vocab_size, width=width, num_layers=3, cell=cell, expansion=2.0, dropout=0.0)
            remember(model, length)
            trainer = TaskTrainer(model, task, stages, learning_rate=learning_rate, seed=seed, device=run.device)
            row: dict[str, Any] = {
                "cell": cell,
                "model": model.settings,
                "parameters": parameters_of(model),
                "curve": [],
            }
            run.content["runs"].append(row)
            _follow_copying(run, trainer, row, length, sequences)
            row["accuracy"] = trainer.evaluate(length, test_sequences, seed=seed + 2)[length:].mean().item()
            run.save()
            run.console.print(f"{cell}: {row['accuracy']:.2%} of {test_sequences * items:,} tokens right")


def _follow_copying(run: LearningRun, trainer: "TaskTrainer", row: dict[str, Any], length: int, sequences: int) -> None:
    """Train to the end, and add to the curve of `row` the accuracy on `sequences` sequences of the full length."""
    for point in _trained(run, trainer, row["cell"]):
        if trainer.stage_step % TEST_EVERY:  # 0 also where a stage has ended
            continue
        accuracy = trainer.evaluate(length, sequences, seed=run.seed + 1)[length:].mean().item()
        row["curve"].append({**asdict(point), "accuracy": accuracy})
        run.save()
        run.console.print(
            f"{row['cell']}  step {point.step:6,}  {point.seconds:4.0f} s  length {point.length:5,}: "
            f"loss {point.train_loss:.4f}, {point.train_accuracy:.2%} right; "
            f"length {length:,}: {accuracy:.2%}"
        )


def _curriculum(length: int, items: int, steps: int) -> "list[Stage]":
    from ostinato.bench.learning.fit import Stage

    last = Stage(length, 32, steps)
    shorter = Stage(64, 512, 3 * steps, 0.98), Stage(256, 256, steps, 0.98), Stage(1024, 64, steps, 0.98)
    return [*(stage for stage in shorter if items < stage.length < length), last]


def _trained(run: LearningRun, trainer: "TaskTrainer", name: str) -> "Iterator[Progress]":
    """Train to the end, and yield the progress every few steps."""
    with run.progress() as progress:
        bar = progress.add_task(name, total=1.0)
        while not trainer.finished:
            point = trainer.advance(10 if run.quick else REPORT_EVERY)
            what = f"{name}  length {point.length:,}  loss {point.train_loss:.3f}"
            progress.update(bar, completed=trainer.progress, description=what)
            run.stop_if_interrupted()
            yield point


def bits(
    cells: Cells = "mingru,minlstm,gru,lstm",
    questions: Annotated[str, Option(help="Which, with commas between.")] = "first,majority,parity",
    depths: Annotated[str, Option(help="Numbers of layers.")] = "1,2,3",
    steps: Steps = 500,
    seed: Seed = 0,
    quick: Quick = False,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Questions about a string of bits, by depth: trained on 40 bits, asked about 41 to 256.

    After every bit: is it equal to the first, are there more ones, is the number of ones odd?
    """
    from ostinato.bench.learning.fit import Stage
    from ostinato.bench.learning.tasks import QUESTIONS

    trained, longest, learning_rate = 40, 256, 5e-3
    stage = Stage(trained, batch_size=8 if quick else 64, steps=10 if quick else steps)
    sequences = 16 if quick else 1024
    chosen = questions.split(",")
    for question in chosen:
        if question not in QUESTIONS:
            raise ValueError(f"questions must be some of {', '.join(QUESTIONS)}; got {question!r}")
    if not all(depth.isdecimal() and int(depth) > 0 for depth in depths.split(",")):
        raise ValueError(f"depths must be numbers from 1 on, with commas between; got {depths!r}")
    works = [(q, cell, int(depth)) for q in chosen for cell in chosen_cells(cells) for depth in depths.split(",")]
    with LearningRun("bits", json, device, seed, quick) as run:
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
                trainer = _trainer_of_bits(run, question, cell, depth, stage, learning_rate)
                curve = []
                while not trainer.finished:
                    curve.append(asdict(trainer.advance(100)))
                    run.stop_if_interrupted()
                row = {"question": question, "cell": cell, "num_layers": depth, "model": trainer.model.settings}
                row |= {"parameters": parameters_of(trainer.model), "curve": curve}
                row |= _accuracies(trainer.evaluate(longest, sequences, seed=seed + 1, at_once=sequences), trained)
                run.content["runs"].append(row)
                run.save()
                progress.console.print(f"{what:<25}{row['accuracy_within']:12.1%}{row['accuracy_beyond']:20.1%}")
                progress.advance(bar)


def _trainer_of_bits(
    run: LearningRun, question: str, cell: str, depth: int, stage: "Stage", learning_rate: float
) -> "TaskTrainer":
    """Make the trainer of a model in which only the recurrence reaches back in time: it has no convolution."""
    import torch

    from ostinato.bench.learning.fit import TaskTrainer, remember
    from ostinato.bench.learning.tasks import Bits
    from ostinato.models import LanguageModel

    torch.manual_seed(run.seed)
    alone: dict[str, Any] = {"expansion": 1, "conv_kernel": 0, "mlp_ratio": 2, "dropout": 0.0}
    model = LanguageModel(2, width=16 if run.quick else 32, num_layers=depth, cell=cell, **alone)
    remember(model, stage.length)
    return TaskTrainer(model, Bits(question), [stage], learning_rate=learning_rate, seed=run.seed, device=run.device)


def _accuracies(right: "Tensor", trained: int) -> dict[str, Any]:
    """Average the accuracy over the lengths trained on, over those beyond, and over groups of eight."""
    return {
        "accuracy_within": right[:trained].mean().item(),
        "accuracy_beyond": right[trained:].mean().item(),
        "accuracy_by_8_lengths": [round(share.mean().item(), 4) for share in right.split(8)],
    }
