"""Loads the committed runs, and renders what all of their tables have: figures, notes, and their origin."""

import functools
import json
from pathlib import Path
from typing import Any

from ostinato.bench.grid import Grid

RESULTS = Path(__file__).parents[1] / "results"
UNMEASURED = "Still to be measured.\n"  # in place of a table

Record = dict[str, Any]


@functools.cache
def load(name: str) -> Record:
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def source(*names: str) -> str:
    """Say where figures come from: for each device, the files, with the date and commit of their runs."""
    devices: dict[str, dict[str, list[str]]] = {}
    for name in names:
        run = load(name)
        run = run.get("environment", run)
        threads = f", {run['threads']} thread{'s' * (run['threads'] > 1)}" if run["device_type"] == "cpu" else ""
        commits = devices.setdefault(f"{run['device']}{threads}, PyTorch {run['versions']['torch']}", {})
        made = f"{run['date'][:10]}, commit `{run['commit'][:7]}`"
        commits.setdefault(made, []).append(f"`benchmarks/results/{name}.json`")
    parts = []
    for device, commits in devices.items():
        runs = "; ".join(f"{', '.join(files)} ({made})" for made, files in commits.items())
        parts.append(f"{device}: {runs}.")
    return " ".join(parts)


def sourced(grid: Grid, *names: str) -> str:
    """Return a table as Markdown, with the runs that its figures come from."""
    return f"{grid.markdown()}\n{source(*names)}\n"


def table(name: str, head: list[str], rows: list[list[str]], *notes: str) -> str:
    """Return a table of one run, with those of the notes that are not empty."""
    return sourced(Grid(head, rows, notes=list(filter(None, notes))), name)


def plot(name: str, what: str, folder: str = "../plots") -> str:
    """Return the plot of a run; `folder` is relative to the page."""
    return f"![{what}]({folder}/{name}.svg)\n"
