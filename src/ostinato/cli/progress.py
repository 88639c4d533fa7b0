"""Training under a progress bar, until it is done or a signal stops it."""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from ostinato.cli.console import plain_console

if TYPE_CHECKING:
    from rich.console import Console

    from ostinato.training import Point, Trainer


def bits(nats: float) -> float:
    return nats / math.log(2)


def show_progress(
    trainer: "Trainer",
    console: "Console",
    on_point: Callable[["Point"], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Train under a progress bar to the end or until ``interrupted``; ``on_point`` gets each point of the curve."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from ostinato.processes import agree

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    every, steps = trainer.settings.evaluate_every, 1
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("first step", total=1.0)
        progress.update(task, completed=trainer.progress)
        while trainer.progress < 1:
            steps, stop = agree(steps, interrupted())
            if stop:
                break
            before = trainer.seconds
            steps = min(steps, every - trainer.step % every, trainer.settings.steps - trainer.step)
            loss = trainer.advance(steps)
            seconds = trainer.seconds - before
            speed = f"{trainer.step * trainer.tokens_per_step / trainer.seconds:,.0f} characters/s"
            description = f"step {trainer.step:,}  loss {loss:.3f}  {speed}"
            progress.update(task, completed=trainer.progress, description=description)
            # The loss is read four times a second: often enough to watch, too rarely to slow a GPU down.
            steps = max(round(steps * 0.25 / seconds), 1)
            if trainer.step % every == 0 or trainer.progress == 1:
                point = trainer.evaluate()
                on_point(point)  # before printing, which fails if the terminal is gone
                progress.console.print(
                    f"step {point.step:6,}  train {point.train_loss:.4f} nats  held out {point.held_out_loss:.4f} "
                    f"nats, {bits(point.held_out_loss):.4f} bits per character  {point.seconds:,.0f} s",
                    soft_wrap=True,
                )


def train_or_save(trainer: "Trainer", console: "Console", keep: Callable[["Point | None"], None], advice: str) -> None:
    """Train to the end, under a progress bar; ``keep`` gets each point of the loss curve.

    If a signal or the loss of stdout (its terminal or pipe) ends it early, call ``keep(None)``, print ``advice``, and
    exit with code 130.
    """
    with stop_on_interrupt() as interrupted:
        reason = ""
        try:
            show_progress(trainer, console, keep, interrupted)
        except (OSError, SystemExit) as error:  # rich turns a broken pipe into a SystemExit
            if getattr(error, "filename", None) is not None:  # the error is a file's, not stdout's
                raise
            reason = f" ({error.strerror})" if isinstance(error, OSError) else ""
            console = plain_console(stderr=True, soft_wrap=True)
        if trainer.progress < 1:
            keep(None)
            console.print(f"Interrupted at step {trainer.step}{reason}. {advice}")
            raise typer.Exit(130)


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C (or SIGTERM, or SIGHUP) into a flag that is read between steps; a second stops at once.

    Signals that are ignored, such as SIGHUP under nohup, stay ignored.
    """
    received = []

    def record(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    previous: dict[int, Any] = {
        number: signal.signal(number, record) for number in numbers if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
