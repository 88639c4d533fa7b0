"""Writes the measured figures of benchmarks/results/ into README.md and docs/: tables between markers, and plots.

    python benchmarks/tables.py            rewrites the files that are out of date
    python benchmarks/tables.py --check    names them, and exits with 1 if there are any

A table stands between ``<!-- figures: NAME -->`` and ``<!-- /figures -->``, NAME one of TABLES.  No other measured
figure belongs in those files; tests/test_docs.py checks that.
"""

import io
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ostinato.bench.learning import plots as learning_plots
from ostinato.bench.plots import FIGURES
from ostinato.bench.shapes import KERNELS
from ostinato.files import replacing
from rendering import examples, gpus, kernels, learning, papers, plots, runs
from rendering.headlines import expected, headlines
from rendering.runs import Record
from rendering.speeds import calls, comparison, drawn, error, gradients, layers, milliseconds, share

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?s)(<!-- figures: ([a-z0-9-]+) -->\n)(.*?)(<!-- /figures -->)")

LEARNED: dict[str, Callable[[str], str]] = {
    "learning-copying-gpu": learning.copied,
    "learning-characters-gpu": learning.characters,
    "learning-recurrent-gpu": learning.characters,
    "learning-pruning-gpu": learning.pruned,
    "learning-pruning-small-gpu": learning.pruned,
    "learning-bits-gpu": learning.bits,
}
PLOTS: dict[str, Callable[[Record], Any]] = {
    **{f"papers-{name}-gpu": partial(papers.plot_of, name) for name in papers.SWEEPS},
    **dict.fromkeys(LEARNED, learning_plots.figure_of),
    "tinyshakespeare-gpu": plots.curve_of,
    "scan-gpu": plots.comparison_of,
    "layer-gpu": plots.comparison_of,
    **{f"{benchmark}-gpu": figure for benchmark, figure in FIGURES.items()},
}


def with_plot(table: Callable[[str], str], name: str, what: str, folder: str = "../plots") -> str:
    """Return a table of a run, followed by the run's plot."""
    return f"{table(name)}\n{runs.plot(name, what, folder)}"


def plot_alone(name: str, what: str) -> str:
    """Return the plot of a run, and where its figures come from."""
    return f"{runs.plot(name, what)}\n{runs.source(name)}\n"


def tables_of_device(device: str) -> dict[str, Callable[[], str]]:
    """The tables that exist for GPUs as well as for CPUs."""
    return {
        f"headlines-{device}": partial(headlines, device),
        f"expected-{device}": partial(expected, device),
        f"calls-scan-{device}": partial(calls, f"calls-{device}", "linear_scan"),
        f"calls-step-{device}": partial(calls, f"calls-{device}", "step of"),
        f"calls-trained-{device}": partial(calls, f"calls-{device}", "GRU", "LSTM"),
        f"calls-loop-{device}": partial(calls, f"calls-{device}", "loop of"),
        f"calls-sequences-{device}": partial(calls, f"calls-{device}", "sequences of"),
        f"calls-short-{device}": partial(calls, f"calls-{device}", "training of", "inference of"),
        f"calls-layer-{device}": partial(calls, f"calls-{device}", "Stepper", "2 layers of"),
        f"scan-{device}": partial(comparison, f"scan-{device}", share),
        f"scan-{device}-errors": partial(comparison, f"scan-{device}", error),
        f"layer-{device}": partial(comparison, f"layer-{device}", milliseconds, limit=True),
        f"layer-{device}-errors": partial(comparison, f"layer-{device}", error, leave_out=("torch.nn",)),
        f"networks-{device}": partial(layers, f"networks-{device}"),
        f"recurrent-gemma-{device}": partial(examples.recurrent_gemma, f"recurrent-gemma-{device}"),
    }


TABLES: dict[str, Callable[[], str]] = {
    **tables_of_device("gpu"),
    **tables_of_device("cpu"),
    "claims": papers.claims,
    "cpu-or-gpu": partial(papers.cpu_or_gpu, "mingru"),
    **{f"papers-{name}": partial(papers.sweep, name) for name in papers.SWEEPS},
    "recurrence-gpu": partial(comparison, "recurrence-gpu", share, unit="bytes"),
    "recurrence-layers-gpu": partial(comparison, "recurrence-gpu", milliseconds, limit=True, unit="flops"),
    "recurrence-slstm": partial(comparison, "slstm-gpu", milliseconds, limit=True),
    "recurrence-cpu": partial(comparison, "recurrence-cpu", milliseconds),
    "recurrence-errors-gpu": partial(comparison, "recurrence-gpu", error),
    "persistent-pruned": partial(
        layers, "persistent-gpu", lambda work: work["density"] < 1 and work["length"] == 256, leave_out=KERNELS
    ),
    "persistent-dense": partial(layers, "persistent-gpu", lambda work: work["density"] == 1 and work["length"] == 256),
    "persistent-errors": partial(layers, "persistent-gpu", lambda work: work["length"] > 256),
    "persistent-ladder": partial(kernels.ladder, "persistent-gpu"),
    "persistent-cpu": partial(layers, "persistent-cpu"),
    "ablation": partial(kernels.ablation, "ablation-gpu"),
    "capacity": partial(papers.capacities, "papers-capacity-cpu"),
    "training": partial(
        layers,
        "training-gpu",
        lambda work: (
            work["length"] not in (256, 2000)
            and not (work.get("resets") or work.get("projection"))
            and (work["layers"] == 1 or work["bidirectional"])
        ),
        "forward+backward",
    ),
    "training-resets": partial(layers, "training-gpu", lambda work: work.get("resets", 0) > 0, "forward+backward"),
    "training-equations": partial(layers, "equations-gpu", pass_name="forward+backward"),
    "training-equations-cpu": partial(layers, "equations-cpu", pass_name="forward+backward"),
    "training-flashrnn": partial(
        layers, "flashrnn-gpu", lambda work: work["layers"] == 1 and not work["resets"], "forward+backward"
    ),
    "training-stacks": partial(
        layers, "training-gpu", lambda work: work["layers"] > 1 and not work["bidirectional"], "forward+backward"
    ),
    "training-projections": partial(
        layers, "training-gpu", lambda work: work.get("projection", 0) > 0, "forward+backward"
    ),
    "training-errors": partial(gradients, "training-gpu"),
    "training-sweep": partial(
        plot_alone, "training-sweep-gpu", "The time of cuDNN over ours, by hidden size and batch"
    ),
    "training-random": partial(
        with_plot, drawn, "training-random-gpu", "The time of cuDNN over ours, of layers of random sizes"
    ),
    "training-random-cpu": partial(drawn, "training-random-cpu"),
    "calls-drawn-gpu": partial(calls, "calls-gpu", "drawn"),
    "calls-drawn-cpu": partial(calls, "calls-cpu", "drawn"),
    "training-cpu": partial(layers, "training-cpu", lambda work: work["length"] != 64, "forward+backward"),
    "inference-cpu": partial(layers, "training-cpu"),
    "bounds-scan": partial(kernels.bounds, "scan-gpu"),
    "bounds-layer": partial(kernels.bounds, "layer-gpu"),
    "profile": partial(kernels.profile, "profile-mingru-gpu"),
    "profile-published": kernels.published_profile,
    "profile-loop": partial(kernels.profile, "profile-loop-gpu"),
    "learning": partial(learning.learned, "tinyshakespeare-gpu"),
    "curve": partial(with_plot, learning.curve, "tinyshakespeare-gpu", "Training and held-out loss", "plots"),
    **{
        name: partial(with_plot, table, name, f"What is learned: {name.split('-')[1]}")
        for name, table in LEARNED.items()
    },
    "several-gpus": partial(gpus.measured, "distributed-gpu"),
    "exchange": partial(gpus.simulated, "exchange-simulated"),
    "reinforcement": partial(examples.reinforcement, "reinforcement-cpu"),
    "audio": partial(examples.audio, "audio-cpu"),
}


def svg(name: str) -> str:
    """Draw the plot of a run as SVG, which is reproducible with one version of Matplotlib."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "ostinato"}):
        PLOTS[name](runs.load(name)).savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def table_of(name: str) -> str:
    """Return a table as a page should have it, or a note if the run is still to be made."""
    try:
        return TABLES[name]()
    except FileNotFoundError:
        return runs.UNMEASURED


def with_tables(text: str) -> str:
    """Return a page with all of its tables up to date."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{table_of(match[2])}\n{match[4]}", text)


def pages() -> Iterator[tuple[Path, str]]:
    """Yield README.md and the pages of docs/, each with its up-to-date text."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield path, with_tables(path.read_text())


def plotted() -> Iterator[tuple[Path, str]]:
    """Yield the files of the plots, each with its up-to-date content."""
    for name in PLOTS:
        if runs.measured(name):
            yield ROOT / "docs" / "plots" / f"{name}.svg", svg(name)


def main() -> int:
    stale = [(path, text) for path, text in [*pages(), *plotted()] if not path.exists() or path.read_text() != text]
    check = "--check" in sys.argv
    for path, text in stale:
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            with replacing(path) as temporary:
                temporary.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
