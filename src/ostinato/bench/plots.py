"""Draws a sweep from the content of its JSON file, so that figure and file cannot differ."""

from pathlib import Path
from typing import Any

from ostinato.bench.report import Record, figures, size_name, sizes
from ostinato.files import replacing

MARKERS = "osD^vPX*<>"


def save(content: Record, path: Path) -> None:
    """Draw to an image file.  Raises ImportError without matplotlib."""
    figure = figure_of(content)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)


def figure_of(content: Record) -> Any:
    """Each contestant's line over the axis, logarithmic both ways; limits dotted, published values dashed.

    Raises ImportError without matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        """Numbers as they are read, and only a few between the powers of ten."""

        def _num_to_string(self, x: float, *_: float) -> str:
            return f"{x:,g}"

    figure = Figure(figsize=(9.5, 5.2), layout="constrained")
    axes = figure.subplots()
    colors = (f"C{index}" for index in range(100))
    for number, (label, line) in enumerate(content["lines"].items()):
        xs, values = _coordinates(line["points"])
        if line["limit"]:
            axes.plot(xs, values, ":", color="black", alpha=0.6, label=label)
            continue
        own = label.startswith(("Min", "Ostinato"))
        (drawn,) = axes.plot(xs, values, "-" + MARKERS[number % len(MARKERS)], color=next(colors), label=label)
        drawn.set(linewidth=2.2 if own else 1.2, markersize=7 if own else 5, zorder=3 if own else 2)
    for label, values in content["published"].items():
        axes.plot(list(map(float, values)), list(values.values()), "--x", color=next(colors), alpha=0.6, label=label)
    ticks = sizes(content)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [size_name(content, x) for x in ticks])
    axes.set_xticks([], minor=True)
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(Plain(labelOnlyBase=False, minor_thresholds=(1, 0.4)))
    axes.set_xlabel(content["axis_label"])
    axes.set_ylabel(content.get("value_label") or f"{content['unit'].replace('us', 'µs')} (less is better)")
    axes.set_title("\n".join([content["title"], *_subtitles(content)]), fontsize="medium", wrap=True)
    axes.grid(True, which="major", alpha=0.3)
    figure.legend(loc="outside right center", fontsize="small", frameon=False)
    return figure


def _coordinates(points: list[Record]) -> tuple[list[float], list[float]]:
    ordered = sorted(points, key=lambda point: point["x"])
    return [point["x"] for point in ordered], [point["value"] for point in ordered]


def _subtitles(content: Record) -> list[str]:
    """Where, and what it comes to: the largest ratios."""
    found = []
    for ratio in content["ratios"]:
        best = max(ratio["points"], key=lambda point: point["value"])
        found.append(f"{ratio['name']}: {figures(best['value'])} at {size_name(content, best['x'])}")
    return [content.get("subtitle") or content["device"], *found]
