"""The command line.  Commands import what they need when they run, so that help texts wait for PyTorch only."""

import os
import sys
from typing import Annotated

import typer

from ostinato.cli.bench import app as bench
from ostinato.cli.demo import demo
from ostinato.cli.generate import generate
from ostinato.cli.learning import app as learning
from ostinato.cli.prune import prune
from ostinato.cli.train import train

app = typer.Typer(
    name="ostinato",
    help="Recurrent networks at hardware speed for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for command in (demo, train, generate, prune):
    app.command()(command)
bench.add_typer(learning, name="learning")
app.add_typer(bench, name="bench")


def _show_version(asked: bool) -> None:
    if asked:
        from ostinato import __version__

        typer.echo(f"ostinato {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Recurrent networks at hardware speed for PyTorch."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors that a user can fix end as one line on stderr and exit code 1, usage errors as 2."""
    try:
        app(arguments)
    except OSError as error:
        _fail(error, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ValueError, ArithmeticError, RuntimeError) as error:
        _fail(error, str(error))


def _fail(error: Exception, message: str) -> None:
    """Print the first line of a message, and exit; under torchrun, also record the error for its report."""
    first_line = message.strip().partition("\n")[0]
    process = ""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun reports what the first process to fail has written there
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        process = f" process {os.environ['RANK']}:"
    print(f"ostinato: error:{process} {first_line}", file=sys.stderr)
    raise SystemExit(1)
