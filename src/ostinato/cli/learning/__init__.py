"""``ostinato bench learning``: what the layers learn; each command reproduces one result with a fixed seed."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ostinato.cli.learning.tasks import bits, copying
from ostinato.cli.learning.texts import characters, pruning

app = typer.Typer(help="Train on tasks and texts, and draw what is learned.", no_args_is_help=True)
for command in (characters, pruning, copying, bits):
    app.command()(command)


@app.command()
def plot(
    json: Annotated[Path, typer.Argument(help="The JSON file of a run.")],
    output: Annotated[Path | None, Option(help="The image.", show_default="beside it")] = None,
) -> None:
    """Draw a run again from its file."""
    from json import loads

    from ostinato.bench.learning.plots import draw
    from ostinato.bench.runs import plot_for

    try:
        content = loads(json.read_text())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except ValueError as error:
        raise ValueError(f"{json}: expected the JSON file of a run; {error}") from None
    output = output or plot_for(json)
    draw(content, output)
    typer.echo(f"wrote {output}")
