"""Draws a run from the content of its JSON file, so that plot and file cannot differ."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ostinato.files import replacing
from ostinato.models import CELLS

# Published losses on a text, drawn beside the measured ones: arXiv 2410.01201, table 4.
PUBLISHED_TEXT = "tinyshakespeare.txt"
PUBLISHED_LOSS = {"mingru": 1.548, "minlstm": 1.555}
NAMES = {name: cell.__name__ for name, cell in CELLS.items()} | {"mingru": "minGRU", "minlstm": "minLSTM"}
COLORS = dict(zip(CELLS, (*(f"C{number}" for number in range(10)), "black", "gold", "navy", "teal"), strict=True))


def name_of(run: dict[str, Any]) -> str:
    """The name of the layers that a run trained."""
    return f"torch.nn.{NAMES[run['cell']]}" if run.get("layer") == "torch.nn" else NAMES[run["cell"]]


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the run ``content`` to an image file, a PNG if it has no suffix.  Raises what :func:`figure_of` raises."""
    figure = figure_of(content)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix[1:] or "png")  # else matplotlib would append a suffix


def figure_of(content: dict[str, Any]) -> Any:
    """Draw a run.

    Raises ImportError without matplotlib, and ValueError if ``content`` is not a complete run of a learning benchmark.
    """
    from matplotlib.figure import Figure

    drawings = {"characters": _characters, "pruning": _pruning, "copying": _copying, "bits": _bits}
    kind = str(content.get("benchmark", "")).removeprefix("learning-")
    if kind not in drawings:
        raise ValueError(f"benchmark must be one of {', '.join(drawings)}; got {kind!r}")
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    try:
        drawings[kind](figure, content)
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"content must be a whole run; {type(error).__name__}: {error}") from error
    return figure


def _over_training(figure: Any, what: str) -> Iterator[tuple[Any, Callable[[list[Any]], list[float]]]]:
    """Yield two panels, over what is trained on and over seconds: the axes, and a function from points to their x."""
    panels = (("tokens", 1e6, f"millions of {what} trained on"), ("seconds", 1, "seconds of training"))
    for axes, (key, unit, label) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        axes.set_xlabel(label)
        yield axes, partial(_along, key, unit)


def _along(key: str, unit: float, points: list[dict[str, Any]]) -> list[float]:
    return [point[key] / unit for point in points]


def _characters(figure: Any, content: dict[str, Any]) -> None:
    settings = content["runs"][0]["model"]
    layers = f"{settings['num_layers']} layer{'s' * (settings['num_layers'] > 1)}"
    figure.suptitle(f"Characters of {content['text']}: {layers}, width {settings['width']}, on {content['device']}")
    for axes, along in _over_training(figure, "characters"):
        for run in content["runs"]:
            points, name = run["curve"], name_of(run)
            axes.plot(
                along(points),
                [point["held_out_loss"] for point in points],
                "s:" if name.startswith("torch") else "o-",
                markersize=3,
                color=COLORS[run["cell"]],
                label=f"{name}: {run['lowest_held_out_loss']:.3f} at its lowest",
            )
        for cell, loss in PUBLISHED_LOSS.items():
            if content["text"] == PUBLISHED_TEXT and any(run["cell"] == cell for run in content["runs"]):
                axes.axhline(loss, color=COLORS[cell], linestyle=":", linewidth=1, label=f"{NAMES[cell]} as published")
        axes.grid(alpha=0.3, which="both")
    figure.axes[0].set_ylabel("held-out loss, nats per character")
    figure.axes[1].legend()


def _pruning(figure: Any, content: dict[str, Any]) -> None:
    axes = figure.subplots()
    figure.suptitle(f"LSTM pruned and fine-tuned on {content['text']}, on {content['device']}")
    for color, block in enumerate(sorted({run["block"] for run in content["runs"]}, key=len)):
        runs = [run for run in content["runs"] if run["block"] == block]
        for key, line, label in (
            ("fine_tuned_loss", "o-", "pruned while fine-tuned"),
            ("pruned_loss", "o:", "pruned at once, not trained"),
        ):
            axes.plot(
                [run["density"] for run in runs],
                [run[key] for run in runs],
                line,
                markersize=4,
                color=f"C{color}",
                label=f"{block.replace('x', '×')} {label}",
            )
    axes.axhline(content["dense"]["held_out_loss"], color="black", linewidth=1, label="dense")
    axes.axhline(
        content["dense"]["fine_tuned_loss"], color="black", linestyle="--", linewidth=1, label="dense, fine-tuned alike"
    )
    axes.set(xlabel="recurrent weights kept", ylabel="held-out loss, nats per character", xscale="log")
    densities = sorted({run["density"] for run in content["runs"]})
    axes.set_xticks(densities, [f"{density:.0%}" for density in densities])
    axes.minorticks_off()
    # Pruned at once, the sparsest models forget everything; their losses would flatten the range that matters here.
    lowest = min(content["dense"]["held_out_loss"], *(run["fine_tuned_loss"] for run in content["runs"]))
    highest = max(content["dense"]["held_out_loss"], *(run["fine_tuned_loss"] for run in content["runs"]))
    axes.set_ylim(lowest - 0.05, highest + max(0.25, highest - lowest))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", frameon=False)  # curves cross the whole of the axes


def _copying(figure: Any, content: dict[str, Any]) -> None:
    layers = content["runs"][0]["model"]["num_layers"]
    figure.suptitle(
        f"Selective copying: {content['items']} tokens out of {content['length']:,}, {layers} layers, "
        f"on {content['device']}"
    )
    for axes, along in _over_training(figure, "tokens"):
        for run in content["runs"]:
            name, color, points = NAMES[run["cell"]], COLORS[run["cell"]], run["curve"]
            x = along(points)
            label_of_run = f"{name}: {run['accuracy']:.1%} at last" if "accuracy" in run else name
            axes.plot(x, [point["accuracy"] for point in points], "o-", markersize=3, color=color, label=label_of_run)
            axes.plot(
                x,
                [point["train_accuracy"] for point in points],
                ":",
                color=color,
                label=f"{name} at the length of its stage",
            )
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel(f"right tokens at length {content['length']:,}")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)


def _bits(figure: Any, content: dict[str, Any]) -> None:
    first, last = content["test_lengths"]
    figure.suptitle(
        f"Trained on {content['trained_length']} bits, asked about {first} to {last}, on {content['device']}"
    )
    titles = {"first": "equal to the first bit?", "majority": "more ones than zeros?", "parity": "ones odd?"}
    questions = list(dict.fromkeys(run["question"] for run in content["runs"]))
    for axes, question in zip(
        figure.subplots(1, len(questions), sharey=True, squeeze=False)[0], questions, strict=True
    ):
        runs = [run for run in content["runs"] if run["question"] == question]
        for number, cell in enumerate(dict.fromkeys(run["cell"] for run in runs)):
            of_cell = [run for run in runs if run["cell"] == cell]
            axes.plot(
                # Shifted sideways, as the curves of cells that are always right would coincide.
                [run["num_layers"] + (number - 1.5) * 0.04 for run in of_cell],
                [run["accuracy_beyond"] for run in of_cell],
                "o-",
                color=COLORS[cell],
                label=NAMES[cell],
            )
        axes.axhline(0.5, color="black", linestyle=":", linewidth=1, label="a coin")
        axes.set(title=titles[question], xlabel="layers", ylim=(0.35, 1.03))
        axes.set_xticks(sorted({run["num_layers"] for run in runs}))
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("right answers")
    figure.axes[-1].legend()
