"""The plots that no command draws; ``ostinato.bench`` draws the others."""

from typing import Any

from ostinato.bench.grid import WRONG
from ostinato.bench.plots import MARKERS
from ostinato.bench.workloads import OURS, short_name
from rendering.runs import Record


def comparison_of(content: Record) -> Any:
    """Draw the time of every contestant of a run as a multiple of the limit, without wrong results.

    Shapes that only Ostinato computed are left out, too; the table has them.
    """
    from matplotlib.figure import Figure

    drawn = [(record, times) for record in content["results"] if len(times := _right_times(record)) > 1]
    figure = Figure(figsize=(8, 1.6 + 0.26 * len(drawn)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=1, label=f"the limit: {drawn[0][0]['limit']['name']}")
    points: dict[str, list[tuple[float, int]]] = {}
    for place, (_, times) in enumerate(drawn):
        for who, time in times.items():
            points.setdefault(who, []).append((time, place))
    for (who, places), marker in zip(points.items(), MARKERS, strict=False):
        x, y = zip(*places, strict=True)
        size, order = (42, 4) if who == OURS else (26, 3)
        axes.scatter(x, y, marker=marker, s=size, label=who, zorder=order)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    names = [f"{short_name(record['workload']['name'])}, {record['pass']}" for record, _ in drawn]
    axes.set_yticks(range(len(drawn)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("time, as a multiple of the limit (less is better)")
    axes.set_title(content["device"], fontsize="medium")
    axes.grid(True, axis="x", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def _right_times(record: Record) -> dict[str, float]:
    """Return multiples of the limit by contestant; minLSTM's peers are named as minGRU's, to share their markers."""
    return {
        who.replace("minLSTM-", "minGRU-").replace("nn.LSTM", "nn.GRU"): 1 / row["fraction_of_limit"]
        for who, row in record["contestants"].items()
        if "seconds" in row and (row["max_error"] or 0) <= WRONG
    }


def curve_of(content: Record) -> Any:
    """Draw the loss curve of an ``ostinato train`` run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes, points, model = figure.subplots(), content["curve"], content["model"]
    tokens = [point["tokens"] / 1e6 for point in points]
    for key, label in (("train_loss", "training"), ("held_out_loss", "held out")):
        axes.plot(tokens, [point[key] for point in points], "o-", label=label)
    best = min(points, key=lambda point: point["held_out_loss"])
    place = best["tokens"] / 1e6, best["held_out_loss"]
    axes.annotate(f"{place[1]:.3f}", place, xytext=(0, 8), textcoords="offset points", ha="center")
    axes.set(xlabel="characters seen (millions)", ylabel=f"loss ({content['unit']})")
    title = f"{content['text']}: {model['num_layers']} × {model['cell']}, width {model['width']}"
    axes.set_title(title, fontsize="medium")
    axes.grid(True, alpha=0.25)
    axes.legend(frameon=False)
    return figure
