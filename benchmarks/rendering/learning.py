"""Tables of what the layers learned: losses and accuracies, and after how much training."""

from ostinato.bench.learning import plots
from rendering import runs
from rendering.runs import Record

NAMES = {"mingru": "minGRU", "minlstm": "minLSTM", "gru": "nn.GRU", "lstm": "nn.LSTM"}


def lowest(run: Record) -> Record:
    return min(run["curve"], key=lambda point: point["held_out_loss"])


def curve(name: str) -> str:
    run, rows = runs.load(name), []
    for point in run["curve"]:
        held_out = f"{point['held_out_loss']:.3f}"
        held_out = f"**{held_out}**" if point == lowest(run) else held_out
        row = [f"{point['step']:,}", f"{point['tokens']:,}", f"{point['seconds']:.1f}"]
        rows.append([*row, f"{point['train_loss']:.3f}", held_out])
    head = ["step", "characters", "seconds", "training loss", "held-out loss"]
    return runs.table(name, head, rows, f"Losses in {run['unit']}.")


def learned(name: str) -> str:
    run = runs.load(name)
    model, best, text = run["model"], lowest(run), run["text"].removesuffix(".txt")
    size = f"{model['num_layers']} × {model['cell']}, width {model['width']}"
    row = [text, size, f"**{best['held_out_loss']:.3f}**", f"{best['tokens']:,}", _time(best)]
    return runs.table(name, ["text", "model", "held-out loss, nats per character", "characters seen", "after"], [row])


def copied(name: str) -> str:
    published = {"mingru": "99.5 ± 0.2 %", "minlstm": "96.0 ± 2.8 %"}
    rows = []
    for run in runs.load(name)["runs"]:
        last = run["curve"][-1]
        rows.append([NAMES[run["cell"]], f"**{run['accuracy']:.2%}**", published[run["cell"]]])
        rows[-1] += [f"{run['parameters']:,}", f"{last['tokens']:,}", _time(last)]
    head = ["layer", "right tokens", "published", "parameters", "tokens trained on", "after"]
    return runs.table(name, head, rows, "Published: Feng et al. 2024.")


def characters(name: str) -> str:
    rows = []
    for run in runs.load(name)["runs"]:
        best, last = lowest(run), run["curve"][-1]
        published = plots.PUBLISHED_LOSS.get(run["cell"])
        row = [layer_of(run), f"**{best['held_out_loss']:.3f}**", f"{published:.3f}" if published else "–"]
        row += [f"{best['tokens']:,}", _time(best), f"{last['held_out_loss']:.3f}"]
        rows.append([*row, _time(last)])
    head = ["layer", "lowest held-out loss", "published", "after characters", "and time", "at the end", "after"]
    note = ""
    if any(row[2] != "–" for row in rows):
        others = {"Transformer": 1.547, "Mamba": 1.575}
        rows += [[model, "–", f"{loss:.3f}", *"––––"] for model, loss in others.items()]
        note = " Published: Feng et al. 2024, table 4; –: not published, or not trained here."
    return runs.table(name, head, rows, f"Losses in nats per character.{note}")


def _time(point: Record) -> str:
    seconds = point["seconds"]
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"


def layer_of(run: Record) -> str:
    """Return the name of the layer that was trained; a run may say that a GRU or LSTM was ours."""
    return NAMES[run["cell"]].removeprefix("nn." * (run.get("layer") == "ostinato"))


def pruned(name: str) -> str:
    content = runs.load(name)
    dense = content["dense"]
    rows = [["dense", f"{dense['held_out_loss']:.3f}", f"**{dense['fine_tuned_loss']:.3f}**"]]
    for run in content["runs"]:
        kept = f"{run['density']:.0%} in {run['block'].replace('x', '×')}"
        rows.append([kept, f"{run['pruned_loss']:.3f}", f"**{run['fine_tuned_loss']:.3f}**"])
    head = ["recurrent weights kept", "pruned at once", "pruned while fine-tuned"]
    return runs.table(name, head, rows, "Held-out loss in nats per character.")


def bits(name: str) -> str:
    """Tabulate accuracies beyond the trained lengths: a row per question and depth, a column per cell."""
    answers = runs.load(name)["runs"]
    rows: dict[tuple[str, int], list[str]] = {}
    for run in answers:
        rows.setdefault((run["question"], run["num_layers"]), []).append(f"{run['accuracy_beyond']:.1%}")
    head = ["question", "layers", *dict.fromkeys(NAMES[run["cell"]] for run in answers)]
    return runs.table(name, head, [[question, str(depth), *shares] for (question, depth), shares in rows.items()])
