"""Draws sweeps and training runs from the content of their JSON files, so that plot and file cannot differ.

Raises ImportError without matplotlib.
"""

from pathlib import Path
from typing import Any

from ostinato.bench.measure import Record
from ostinato.bench.report import size_name, sizes, speedup
from ostinato.bench.workloads import OURS
from ostinato.files import replacing
from ostinato.kernels.persistent.plan import NO_KERNEL

MARKERS = "osD^vPX*<>"
LIMIT_STYLES = ("-", "--", "-.", ":")  # of the limits, whose lines are all grey


def save(content: Record, path: Path) -> None:
    """Draw a run to an image file."""
    figure = FIGURES.get(content.get("benchmark", ""), figure_of)(content)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)


def figure_of(content: Record) -> Any:
    """Draw each contestant's line over the axis, both logarithmic; limits are grey, published values dashed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        """Numbers without exponents, and labels at only a few between the powers of ten."""

        def _num_to_string(self, x: float, *_: float) -> str:
            return f"{x:,g}"

    figure = Figure(figsize=(9.5, 5.2), layout="constrained")
    axes = figure.subplots()
    colors, limits = (f"C{index}" for index in range(100)), iter(LIMIT_STYLES)
    for number, (label, line) in enumerate(content["lines"].items()):
        xs, values = _coordinates(line["points"])
        if line["limit"]:
            axes.plot(xs, values, next(limits), color="grey", linewidth=1, label=label)
            continue
        is_ours = label.startswith(("Min", OURS))
        (drawn,) = axes.plot(xs, values, "-" + MARKERS[number % len(MARKERS)], color=next(colors), label=label)
        drawn.set(linewidth=2.2 if is_ours else 1.2, markersize=7 if is_ours else 5, zorder=3 if is_ours else 2)
    for (label, published), marker in zip(content["published"].items(), "x+1234", strict=False):
        axes.plot(list(published), list(published.values()), f"--{marker}", color="black", markersize=9, label=label)
    ticks = sizes(content)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [size_name(content, x) for x in ticks])
    axes.set_xticks([], minor=True)
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(Plain(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
    axes.set_xlabel(content["axis_label"])
    axes.set_ylabel(f"{content['unit'].replace('us', 'µs')} (less is better)")
    axes.set_title(f"{content['title']}\n{content['device']}", fontsize="medium")
    axes.grid(True, which="major", alpha=0.3)
    figure.legend(loc="outside right center", fontsize="small", frameon=False)
    return figure


def _coordinates(points: list[Record]) -> tuple[list[float], list[float]]:
    ordered = sorted(points, key=lambda point: point["x"])
    return [point["x"] for point in ordered], [point["value"] for point in ordered]


def speedup_maps(content: Record) -> Any:
    """Draw ``torch.nn``'s time over ours by hidden size and batch, one panel per cell and dtype.

    Figures are italic where our layer runs in ``torch.nn``'s kernel.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    panels: dict[str, dict[tuple[int, int], tuple[float, bool]]] = {}
    for record in content["results"]:
        work, ratio = record["workload"], speedup(record)
        if ratio is not None:
            has_kernel = record["contestants"][OURS]["plan"]["path"] != NO_KERNEL
            panel = panels.setdefault(f"{work['cell']} {'tf32' if work['tf32'] else work['dtype']}", {})
            panel[work["hidden"], work["batch"]] = ratio, has_kernel
    rows, columns = -(-len(panels) // 3), min(len(panels), 3)
    figure = Figure(figsize=(1.5 + 3 * columns, 0.6 + 3.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    shades: Any = None
    for axes, (name, panel) in zip(grid, panels.items(), strict=False):
        heights, widths = (sorted({size[axis] for size in panel}) for axis in (0, 1))
        ratios = [[panel.get((hidden, batch), (float("nan"),))[0] for batch in widths] for hidden in heights]
        shades = axes.pcolormesh(ratios, cmap="RdYlGn", norm=LogNorm(1 / 8, 8), edgecolors="white", linewidth=0.5)
        for (hidden, batch), (ratio, has_kernel) in panel.items():
            centre = widths.index(batch) + 0.5, heights.index(hidden) + 0.5
            style = "normal" if has_kernel else "italic"
            color = "black" if 1 / 5 < ratio < 5 else "white"
            axes.text(*centre, f"{ratio:.2g}", ha="center", va="center", fontsize="small", fontstyle=style, color=color)
        axes.set_xticks([index + 0.5 for index in range(len(widths))], widths)
        axes.set_yticks([index + 0.5 for index in range(len(heights))], heights)
        axes.set(title=name, xlabel="batch", ylabel="hidden size")
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    bar = figure.colorbar(shades, ax=list(grid), label="time of torch.nn / time of Ostinato")
    bar.set_ticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], labels=["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    bar.minorticks_off()
    steps = content["results"][0]["steps"]
    figure.suptitle(f"forward and backward, {steps} steps, {content['device']}", fontsize="medium")
    return figure


def speedups_by_size(content: Record) -> Any:
    """Draw ``torch.nn``'s time over ours against the hidden size, for layers of random sizes."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1, color="black", linewidth=1)
    drawn = [(record, ratio) for record in content["results"] if (ratio := speedup(record)) is not None]
    batches = [record["workload"]["batch"] for record, _ in drawn]
    shades = LogNorm(1, max(2, *batches))
    points: Any = None
    for cell, marker in zip(dict.fromkeys(record["workload"]["cell"] for record, _ in drawn), MARKERS, strict=False):
        of_cell = [(record["workload"], ratio) for record, ratio in drawn if record["workload"]["cell"] == cell]
        hidden, ratios = [work["hidden"] for work, _ in of_cell], [ratio for _, ratio in of_cell]
        colors = [work["batch"] for work, _ in of_cell]
        points = axes.scatter(hidden, ratios, c=colors, norm=shades, marker=marker, s=36, cmap="viridis", label=cell)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="hidden size", ylabel="time of torch.nn / time of Ostinato")
    axes.grid(True, alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.colorbar(points, ax=axes, label="sequences")
    axes.set_title(f"forward and backward of layers of random sizes, {content['device']}", fontsize="medium")
    return figure


FIGURES = {"training-sweep": speedup_maps, "training-random": speedups_by_size}  # of benchmarks that are not sweeps
