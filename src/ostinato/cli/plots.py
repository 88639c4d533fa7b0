"""The plot of a run, beside its file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def plot_beside(console: "Console", content: dict[str, Any], path: Path) -> Path | None:
    """Draw a run beside its JSON file and return the image's path; without matplotlib, print a note and return None."""
    from importlib.util import find_spec

    from ostinato.bench import plots
    from ostinato.bench.runs import plot_for

    if find_spec("matplotlib") is None:
        console.print("No plot: matplotlib is not installed; pip install 'ostinato[plots]'")
        return None
    plot = plot_for(path)
    plots.save(content, plot)
    return plot
