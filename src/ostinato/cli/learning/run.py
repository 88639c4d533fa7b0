"""A run of ``ostinato bench learning``, and the options that its commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ostinato.cli.console import plain_console
from ostinato.cli.devices import choose_device

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress

    from ostinato.training import Trainer

Cells = Annotated[str, Option(help="Which layers to train, with commas between.")]
Json = Annotated[
    Path | None,
    Option(
        help="The run's file, or a folder for one named after the device; its plot is put beside it.",
        show_default="runs/learning-COMMAND.json",
    ),
]
Steps = Annotated[int, Option(help="Steps to train each.")]
Seed = Annotated[int, Option(help="Seed of all that is random.")]
Quick = Annotated[bool, Option("--quick", help="A tiny model for a few steps: shows in seconds that all parts run.")]


class LearningRun:
    """The run of one command: writes its file as the run grows, draws its plot, and handles Ctrl-C."""

    def __init__(self, name: str, path: Path | None, device: str, seed: int, quick: bool) -> None:
        from ostinato.bench.runs import environment, path_for, plot_for
        from ostinato.checks import check_integers
        from ostinato.cli.progress import stop_on_interrupt
        from ostinato.files import check_file, is_stream

        check_integers(0, seed=seed)
        self.console = plain_console(soft_wrap=True)
        self.device: torch.device = choose_device(device)
        self.path = path_for(path or Path(f"runs/learning-{name}.json"), f"learning-{name}", self.device)
        self.plot = plot_for(self.path)
        check_file(self.path)
        self._to_stream = is_stream(self.path)
        self.seed, self.quick = seed, quick
        self.content: dict[str, Any] = {"benchmark": f"learning-{name}", **environment(self.device), "seed": seed}
        self._interruptible = stop_on_interrupt()
        self._interrupted: Callable[[], bool]

    def __enter__(self) -> "LearningRun":
        self._interrupted = self._interruptible.__enter__()
        return self

    def __exit__(self, error_type: type | None, *rest: Any) -> None:
        self._interruptible.__exit__(error_type, *rest)
        if error_type is None:
            self._write()
            self._draw()

    def save(self) -> None:
        """Write what there is so far; a stream is written only once, at the end."""
        if not self._to_stream:
            self._write()

    def _write(self) -> None:
        from ostinato.bench.runs import write_json

        write_json(self.path, self.content)

    def stop_if_interrupted(self) -> None:
        """Exit with code 130 after Ctrl-C."""
        if self._interrupted():
            self.console.print(
                f"Interrupted; {self.path} has what was finished." if self.path.is_file() else "Interrupted."
            )
            raise typer.Exit(130)

    def train(self, trainer: "Trainer", on_point: Callable[[Any], None]) -> None:
        from ostinato.cli.progress import show_progress

        show_progress(trainer, self.console, on_point, self._interrupted)
        self.stop_if_interrupted()

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
            draw(self.content, self.plot)
        except ImportError:
            self.console.print(
                f"No matplotlib here; to draw it where there is:  ostinato bench learning plot {self.path}"
            )
        else:
            self.console.print(f"wrote {self.plot}")


def chosen_cells(names: str) -> list[str]:
    """Split the names of cells at commas; raises ValueError for an unknown one."""
    from ostinato.models import CELLS

    cells = names.split(",")
    for cell in cells:
        if cell not in CELLS:
            raise ValueError(f"cells must be some of {', '.join(CELLS)}; got {cell!r}")
    return cells


def parameters_of(model: "torch.nn.Module") -> int:
    return sum(parameter.numel() for parameter in model.parameters())
