"""Writes what was measured into README.md and docs/: tables between markers, and plots, all from benchmarks/results/.

    python benchmarks/tables.py            writes what is out of date
    python benchmarks/tables.py --check    names it, and exits with 1 if there is any

A table stands between ``<!-- figures: NAME -->`` and ``<!-- /figures -->``, NAME one of TABLES.  No other measured
figure belongs in those files; tests/test_docs.py holds them to that.
"""

import functools
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ostinato.bench.report import figures, recurrence_name, speedup, sweep_markdown
from ostinato.files import replacing

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(?s)(<!-- figures: ([a-z0-9-]+) -->\n)(.*?)(<!-- /figures -->)")
WRONG = 0.1  # an error, relative to the reference, from which on a result is no result
WRONG_NOTE = f"\n† its error against float64 is more than {WRONG:g} of the result.\n"

# The LSTM's peers share the columns of the GRU's.
COLUMNS = {"minLSTM-pytorch": "minGRU-pytorch", "torch.nn.GRU": "torch.nn", "torch.nn.LSTM": "torch.nn"}
COLUMNS["minLSTM-pytorch, compiled"] = "minGRU-pytorch, compiled"

Record = dict[str, Any]


@functools.cache
def load(name: str) -> Record:
    return json.loads((RESULTS / f"{name}.json").read_text())


def once_measured(name: str, table: Callable[[], str]) -> Callable[[], str]:
    """A table of a run that may not have been made yet: nothing until then."""
    return lambda: table() if (RESULTS / f"{name}.json").exists() else ""


def source(name: str) -> str:
    """Where the figures come from."""
    run = load(name)
    run = run.get("environment", run)
    threads = f", {run['threads']} thread{'s' * (run['threads'] > 1)}" if run["device_type"] == "cpu" else ""
    return (
        f"{run['device']}{threads}, PyTorch {run['versions']['torch']}, {run['date'][:10]}, commit "
        f"`{run['commit'][:7]}`: `benchmarks/results/{name}.json`."
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# What a cell says of a contestant.


def milliseconds(row: Record) -> str:
    return figures(1e3 * row["seconds"])


def share(row: Record) -> str:
    return f"{row['fraction_of_limit']:.2f}" if row["fraction_of_limit"] >= 0.005 else "< 0.01"


def error(row: Record) -> str:
    return "another function" if row["max_error"] is None else f"{row['max_error']:.0e}"


def comparison(
    name: str,
    cell: Callable[[Record], str],
    *,
    only: tuple[str, ...] | None = None,
    leave_out: tuple[str, ...] = (),
    limit: bool = False,
) -> str:
    """One row a workload and pass, one column a contestant: of all workloads, or those called as in ``only``."""
    records = [record for record in load(name)["results"] if only is None or record["workload"]["name"] in only]
    if only is not None and {record["workload"]["name"] for record in records} != set(only):
        raise ValueError(f"{name}.json has no {set(only) - {record['workload']['name'] for record in records}}")
    everyone = dict.fromkeys(COLUMNS.get(who, who) for record in records for who in record["contestants"])
    names = [who for who in everyone if who not in leave_out]
    head = ["", "pass", *([records[0]["limit"]["name"]] if limit else []), *names]
    rows: list[list[str]] = []
    wrong = False
    for record in records:
        work = record["workload"]["name"] if not rows or record["pass"] == "forward" else ""
        row = [work, record["pass"], *([milliseconds(record["limit"])] if limit else [])]
        contestants = {COLUMNS.get(who, who): outcome for who, outcome in record["contestants"].items()}
        for who in names:
            outcome = contestants.get(who, {})
            text = cell(outcome) if "seconds" in outcome else "–"
            if (outcome.get("max_error") or 0) > WRONG:
                text, wrong = f"{text} †", True
            row.append(f"**{text}**" if who == "Ostinato" else text)
        rows.append(row)
    return f"{markdown(head, rows)}{WRONG_NOTE if wrong else ''}\n{source(name)}\n"


def learning(name: str) -> str:
    run, rows = load(name), []
    for point in run["curve"]:
        held_out = f"{point['held_out_loss']:.3f}"
        if point == lowest(run):
            held_out = f"**{held_out}**"
        rows.append([f"{point['step']:,}", f"{point['tokens']:,}", f"{point['seconds']:.1f}"])
        rows[-1] += [f"{point['train_loss']:.3f}", held_out]
    head = ["step", "characters", "seconds", "training loss", "held-out loss"]
    return f"{markdown(head, rows)}\nLosses in {run['unit']}. {source(name)}\n"


def exchange(name: str) -> str:
    """A prediction: what the exchange between parts costs, and what is left of linear scaling."""
    run, rows = load(name), []
    for row in run["results"]:
        sizes = [f"{row[key]:,}" for key in ("processes", "channels", "steps")]
        times = [f"{1e6 * row[way]['seconds']:,.0f}" for way in ("ring", "doubling", "log-step")]
        rows.append([*sizes, f"{row['ring']['bytes'] / 1e6:,.2f}", *times, f"{row['share_of_linear']:.2f}"])
    head = ["GPUs", "channels", "steps a GPU", "MB received", "all-gather, ring, µs", "all-gather, doubling, µs"]
    given = run["inputs"]
    links = (given["inside"], "inside a machine"), (given["between"], "between two")
    assumed = [f"{1e6 * link['latency']:g} µs and {link['rate'] / 1e9:g} GB/s {where}" for link, where in links]
    assumed.append(f"{1e3 * given['host_seconds']:g} ms a call on the host")
    return (
        f"{markdown([*head, 'log-step, µs', 'forward, of linear'], rows)}\n"
        f"Simulated. Measured: {1e6 * given['exchange_seconds']:g} µs for an exchange of a few bytes between two H200, "
        f"and the memory's rate, {given['memory_rate'] / 1e12:g} TB/s. Assumed: {', '.join(assumed)}. "
        f"`benchmarks/results/{name}.json`.\n"
    )


def lowest(run: Record) -> Record:
    return min(run["curve"], key=lambda point: point["held_out_loss"])


def learning_summary(*names: str) -> str:
    rows = []
    for name in names:
        model, best, text = load(name)["model"], lowest(load(name)), load(name)["text"].removesuffix(".txt")
        size = f"{model['num_layers']} × {model['cell']}, width {model['width']}"
        rows.append([text, size, f"**{best['held_out_loss']:.3f}**", f"{best['tokens']:,}", f"{best['seconds']:.0f} s"])
    head = ["text", "model", "held-out loss, nats per character", "characters seen", "after"]
    return f"{markdown(head, rows)}\n" + "\n".join(source(name) for name in names) + "\n"


def recurrences(name: str, only: Callable[[Record], bool], peers: Mapping[str, str], pass_name: str = "forward") -> str:
    """Microseconds a step, and each peer's as a multiple of ours; one row a layer."""
    records = [r for r in load(name)["results"] if r["pass"] == pass_name and only(r["workload"])]
    ran = {who for record in records for who, row in record["contestants"].items() if "seconds" in row}
    if records[0]["workload"]["kind"] == "training":  # some of its peers are seldom installed
        peers = {peer: who for peer, who in peers.items() if who in ran}
    has_graphs = "torch.nn in a CUDA graph" in ran
    head = ["layer", "plan", "Ostinato", "error"]
    for peer, who in peers.items():
        head += [peer, "its error"] if who == "torch.nn" else [peer]
    rows = []
    for record in records:
        outcomes = record["contestants"]
        ours = outcomes["Ostinato"]
        row = [
            record["workload"]["name"],
            ours["plan"]["path"],
            f"**{microseconds(ours)}**",
            f"{ours['max_error']:.1e}",
        ]
        for who in peers.values():
            found = outcomes.get(who, {})
            wrong = " †" if (found.get("max_error") or 0) > WRONG else ""
            time = f"{microseconds(found)} ({found['times_ostinato']:.1f} ×){wrong}" if "seconds" in found else "–"
            row.append(time)
            if who == "torch.nn":
                row.append(f"{found['max_error']:.1e}")
        rows.append([*row, f"**{speedup(record):.1f} ×**"] if has_graphs else row)
    note = WRONG_NOTE if any("†" in cell for row in rows for cell in row) else ""
    return f"{markdown([*head, 'at best'] if has_graphs else head, rows)}{note}\n{source(name)}\n"


def gradients(name: str, only: Callable[[Record], bool]) -> str:
    """Each gradient's error, and the memory that a call takes: ours, and ``torch.nn``'s beside it."""
    parts = {"input": ("input",), "initial states": ("h0", "c0"), "input weights": ("weight_ih",)}
    parts |= {"recurrent weights": ("weight_hh",), "biases": ("bias",)}
    rows = []
    for record in load(name)["results"]:
        ours, theirs = (record["contestants"][who] for who in ("Ostinato", "torch.nn"))
        if record["pass"] != "forward+backward" or not only(record["workload"]):
            continue
        row = [recurrence_name(record)]
        for prefixes in parts.values():
            pair = (max(e for n, e in who["errors"].items() if n.startswith(prefixes)) for who in (ours, theirs))
            row.append("**{:.1e}** / {:.1e}".format(*pair))
        if "extra_memory_bytes" in ours:
            pair = (who["extra_memory_bytes"] / 1e6 for who in (ours, theirs))
            row.append("**{:,.0f}** / {:,.0f}".format(*pair))
        rows.append(row)
    memory = ["memory, MB"] * (len(rows[0]) > 1 + len(parts))
    return f"{markdown(['layer', *parts, *memory], rows)}\n{source(name)}\n"


def picture(name: str, what: str) -> str:
    """A plot that is there only if its run is."""
    return f"![{what}](plots/{name}.svg)\n"


def microseconds(row: Record) -> str:
    return figures(row["microseconds_a_step"])


def capacities(name: str) -> str:
    """The largest hidden size on the chip, by the kernels' plans."""
    sizes: dict[str, dict[str, str]] = {}
    for row in load(name)["results"]:
        block = "" if row["block"] is None else f" in {row['block'][0]}×{row['block'][1]}"
        kept = "dense" if row["density"] == 1 else f"{row['density']:.0%}{block}"
        sizes.setdefault(kept, {})[row["cell"]] = f"{row['hidden_size']:,}"
    cells = list(next(iter(sizes.values())))
    rows = [[kept, *row.values()] for kept, row in sizes.items()]
    return f"{markdown(['weights kept', *cells], rows)}\n{source(name)}\n"


def bounds(*names: str) -> str:
    """What each shape of BOUND_BY should take by its limit, what it takes, and what the difference is."""
    rows = []
    for name in names:
        for record in load(name)["results"]:
            work = record["workload"]["name"]
            if (work, record["pass"]) in BOUND_BY:
                ours, least = record["contestants"]["Ostinato"], record["limit"]
                row = [work, record["pass"], f"{milliseconds(least)} ({least['name']})", f"**{milliseconds(ours)}**"]
                rows.append([*row, share(ours), BOUND_BY[work, record["pass"]]])
    head = ["", "pass", "at least, ms", "measured, ms", "share", "bound by"]
    return f"{markdown(head, rows)}\n" + "\n".join(source(name) for name in names) + "\n"


def sweep(name: str) -> str:
    content = load(name)
    _, _, table = sweep_markdown(content).partition("\n\n")
    note = f"{content['note']} " if content["note"] else ""
    return f"{table}\n{note}{source(name)}\n"


def copied(name: str) -> str:
    rows = []
    for run in load(name)["runs"]:
        last = run["curve"][-1]
        rows.append([NAMES[run["cell"]], f"**{run['accuracy']:.2%}**", f"{run['parameters']:,}"])
        rows[-1] += [f"{last['tokens']:,}", f"{last['seconds']:.0f} s"]
    head = ["layer", "right tokens", "parameters", "tokens trained on", "after"]
    return f"{markdown(head, rows)}\n{source(name)}\n"


def characters(name: str) -> str:
    rows = []
    for run in load(name)["runs"]:
        best, last = lowest(run), run["curve"][-1]
        rows.append(
            [layer_of(run), f"**{best['held_out_loss']:.3f}**", f"{best['tokens']:,}", f"{best['seconds']:.0f} s"]
        )
        rows[-1] += [f"{last['held_out_loss']:.3f}", f"{last['seconds']:.0f} s"]
    head = ["layer", "lowest held-out loss", "after characters", "and time", "at the end", "after"]
    return f"{markdown(head, rows)}\nLosses in nats per character. {source(name)}\n"


def layer_of(run: Record) -> str:
    """Whose GRU or LSTM was trained, in a run that says it."""
    return NAMES[run["cell"]].removeprefix("nn." * (run.get("layer") == "ostinato"))


def pruned(name: str) -> str:
    content = load(name)
    dense = content["dense"]
    rows = [["dense", f"{dense['held_out_loss']:.3f}", f"**{dense['fine_tuned_loss']:.3f}**"]]
    for run in content["runs"]:
        kept = f"{run['density']:.0%} in {run['block'].replace('x', '×')}"
        rows.append([kept, f"{run['pruned_loss']:.3f}", f"**{run['fine_tuned_loss']:.3f}**"])
    head = ["recurrent weights kept", "pruned at once", "pruned while fine-tuned"]
    return f"{markdown(head, rows)}\nHeld-out loss in nats per character. {source(name)}\n"


def bits(name: str) -> str:
    """Right answers beyond the trained lengths; one row a question and depth, one column a cell."""
    runs = load(name)["runs"]
    cells = list(dict.fromkeys(run["cell"] for run in runs))
    rows: dict[tuple[str, int], list[str]] = {}
    for run in runs:
        rows.setdefault((run["question"], run["num_layers"]), []).append(f"{run['accuracy_beyond']:.1%}")
    head = ["question", "layers", *(NAMES[cell] for cell in cells)]
    body = [[question, str(depth), *shares] for (question, depth), shares in rows.items()]
    return f"{markdown(head, body)}\n{source(name)}\n"


README_CPU = ("mingru (1, 4096, 256) to 256 float32", "mingru (16, 512, 256) to 256 float32")
README_GPU = (
    "mingru (16, 4096, 1024) to 1024 bfloat16",
    "minlstm (16, 4096, 1024) to 1024 bfloat16",
    "mingru (16, 4096, 1024) to 1024 float32",
)
SHAKESPEARE = "tinyshakespeare-mingru-nvidia-h100"
PERSISTENT = "persistent-nvidia-h100"
NAMES = {"mingru": "minGRU", "minlstm": "minLSTM", "gru": "nn.GRU", "lstm": "nn.LSTM"}
PEERS = {"cuDNN": "torch.nn", "GEMMs in a CUDA graph": "GEMMs in a CUDA graph", "cuSPARSE": "cuSPARSE"}
TRAINING, TRAINING_CPU, SWEPT = "training-nvidia-h200", "training-amd-epyc", "training-sweep-nvidia-h200"
LEARNING_RECURRENT = "learning-characters-nvidia-h200"
TRAINED_BY = {"in a CUDA graph": "Ostinato in a CUDA graph", "cuDNN": "torch.nn"}
TRAINED_BY |= {"cuDNN in a CUDA graph": "torch.nn in a CUDA graph", "torchrl": "torchrl", "flashrnn": "flashrnn"}
README_TRAINED = (
    "GRU 1024 B16 T512 dense bfloat16",
    "LSTM 1024 B16 T512 dense bfloat16",
    "LSTM 768 B16 T512 dense float16",
    "GRU 512 B256 T128 dense tf32",
    "GRU 2304 B4 T512 10% 16x1 float16",
    "LSTM 512 B32 T512 dense bfloat16, 2 layers, bidirectional, packed 50-512",
)
BOTH = "forward+backward"
KERNELS = {f"our {path} kernel": f"Ostinato, {path} kernel" for path in ("dense", "sparse", "block")}
README_LAYERS = (
    "GRU 1024 B16 T256 dense bfloat16",
    "LSTM 768 B16 T256 dense float16",
    "RNN 2304 B4 T256 30% 1x1 float16",
    "GRU 2304 B4 T256 10% 16x1 float16",
    "LSTM 2304 B4 T256 10% 16x1 float16",
    "LSTM 4608 B4 T256 10% 16x1 float16",
    "RNN 8192 B4 T256 10% 16x1 float16",
)
MEMORY = "memory: nothing else to gain"
BOUND_BY = {
    ("linear_scan (8, 4096, 1536) float32", "forward"): MEMORY,
    ("linear_scan (8, 4096, 1536) float32", "backward"): MEMORY,
    ("linear_scan (8, 65536, 1536) float32", "forward"): MEMORY,
    ("linear_scan (8, 65536, 1536) float32", "backward"): MEMORY,
    ("linear_scan (8, 4096, 1536) bfloat16", "forward"): "memory, and instructions: two channels a lane",
    ("linear_scan (8, 4096, 1536) bfloat16", "backward"): "memory, and instructions: two channels a lane",
    ("linear_scan (8, 65536, 1536) bfloat16", "forward"): "memory",
    ("linear_scan (8, 65536, 1536) bfloat16", "backward"): "memory, and instructions: two channels a lane",
    ("linear_scan (1, 65536, 256) float32", "forward"): "filling and emptying the chip",
    ("linear_scan (1, 1048576, 64) float32", "forward"): "the way back: a tile waits for those before it",
    ("linear_scan (1, 16777216, 1) float32", "forward"): "the way back, and turning steps in shared memory",
    ("mingru (16, 4096, 1024) to 1024 bfloat16", "forward"): "the GEMM, then memory",
    ("mingru (16, 4096, 1024) to 1024 bfloat16", "forward+backward"): "the GEMMs, then memory",
    ("minlstm (16, 4096, 1024) to 1024 bfloat16", "forward"): "the GEMM, then memory",
    ("minlstm (16, 4096, 1024) to 1024 bfloat16", "forward+backward"): "the GEMMs, then memory",
    ("mingru (1, 65536, 256) to 256 bfloat16", "forward"): "the way back",
    ("mingru (64, 1000, 10) to 100 float32", "forward+backward"): "Python: launches",
    ("mingru (256, 256, 1024) to 1024 bfloat16", "forward"): "the GEMM, then memory",
    ("mingru (1, 65536, 1024) to 1024 bfloat16", "forward"): "the GEMM, then the way back",
}
SWEEPS = (
    *("lengths-mingru", "lengths-minlstm", "transfer-mingru", "transfer-minlstm", "training-512", "training-4096"),
    *("density-rnn", "density-lstm", "hidden", "batch", "steps"),
)

TABLES: dict[str, Callable[[], str]] = {
    "readme-layer-nvidia-h100": lambda: comparison("layer-nvidia-h100", milliseconds, only=README_GPU, limit=True),
    "readme-layer-amd-epyc": lambda: comparison("layer-amd-epyc", milliseconds, only=README_CPU, limit=True),
    "learning": lambda: learning_summary(SHAKESPEARE),
    SHAKESPEARE: lambda: learning(SHAKESPEARE),
    "readme-persistent": lambda: recurrences(PERSISTENT, lambda work: work["name"] in README_LAYERS, PEERS),
    "persistent-pruned": lambda: recurrences(
        PERSISTENT, lambda work: work["density"] < 1 and work["length"] == 256, PEERS | KERNELS
    ),
    "persistent-dense": lambda: recurrences(
        PERSISTENT, lambda work: work["density"] == 1 and work["length"] == 256, dict(list(PEERS.items())[:2])
    ),
    "persistent-errors": lambda: recurrences(PERSISTENT, lambda work: work["length"] > 256, {"cuDNN": "torch.nn"}),
    "persistent-cpu": lambda: recurrences("persistent-amd-epyc", lambda work: True, {"torch.nn": "torch.nn"}),
    "readme-training": once_measured(
        TRAINING,
        lambda: recurrences(
            TRAINING,
            lambda work: work["name"] in README_TRAINED,
            {peer: TRAINED_BY[peer] for peer in ("cuDNN", "cuDNN in a CUDA graph")},
            BOTH,
        ),
    ),
    "training": once_measured(
        TRAINING, lambda: recurrences(TRAINING, lambda work: work["length"] < 2000, TRAINED_BY, BOTH)
    ),
    "training-errors": once_measured(TRAINING, lambda: gradients(TRAINING, lambda work: True)),
    "training-sweep": once_measured(
        SWEPT, lambda: f"{picture(SWEPT, 'cuDNN over ours, by hidden size and batch')}\n{source(SWEPT)}\n"
    ),
    "training-cpu": once_measured(
        TRAINING_CPU, lambda: recurrences(TRAINING_CPU, lambda work: True, {"torch.nn": "torch.nn"}, BOTH)
    ),
    "inference-cpu": once_measured(
        TRAINING_CPU, lambda: recurrences(TRAINING_CPU, lambda work: True, {"torch.nn": "torch.nn"})
    ),
    "learning-recurrent": once_measured(
        LEARNING_RECURRENT,
        lambda: f"{characters(LEARNING_RECURRENT)}\n{picture(LEARNING_RECURRENT, 'Held-out loss over time')}",
    ),
    "exchange": lambda: exchange("exchange-simulated"),
    "capacity": lambda: capacities("seeds-capacity-amd-epyc"),
    "bounds": lambda: bounds("scan-nvidia-h100", "layer-nvidia-h100"),
    "learning-copying": lambda: copied("learning-copying-nvidia-h100"),
    "learning-characters": lambda: characters("learning-characters-nvidia-h100"),
    "learning-pruning": lambda: pruned("learning-pruning-nvidia-h100"),
    "learning-pruning-cpu": lambda: pruned("learning-pruning-amd-epyc"),
    "learning-bits": lambda: bits("learning-bits-amd-epyc"),
    **{f"seeds-{name}": functools.partial(sweep, f"seeds-{name}-nvidia-h100") for name in SWEEPS},
}
for device in ("nvidia-h100", "amd-epyc"):
    TABLES |= {
        f"scan-{device}": functools.partial(comparison, f"scan-{device}", share),
        f"scan-{device}-errors": functools.partial(comparison, f"scan-{device}", error),
        f"layer-{device}": functools.partial(comparison, f"layer-{device}", milliseconds, limit=True),
        f"layer-{device}-errors": functools.partial(comparison, f"layer-{device}", error, leave_out=("torch.nn",)),
    }


def plot_comparison(name: str) -> Any:
    """The time of every contestant as a multiple of the limit, which is drawn."""
    from matplotlib.figure import Figure

    run = load(name)
    records = run["results"]
    figure = Figure(figsize=(8, 1.6 + 0.3 * len(records)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(1, color="black", linewidth=1, label=f"the limit: {records[0]['limit']['name']}")
    points: dict[str, list[tuple[float, int]]] = {}
    for place, record in enumerate(records):
        for who, row in record["contestants"].items():
            if "seconds" in row and (row["max_error"] or 0) <= WRONG:
                points.setdefault(COLUMNS.get(who, who), []).append((1 / row["fraction_of_limit"], place))
    for (who, places), marker in zip(points.items(), "osD^v", strict=False):
        x, y = zip(*places, strict=True)
        axes.scatter(x, y, marker=marker, s=42 if who == "Ostinato" else 26, label=who, zorder=3)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks(
        range(len(records)), [f"{record['workload']['name']}, {record['pass']}" for record in records], fontsize="small"
    )
    axes.invert_yaxis()
    axes.set_xlabel("time, as a multiple of the limit (less is better)")
    axes.set_title(run["device"], fontsize="medium")
    axes.grid(True, axis="x", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    return figure


def plot_learning(name: str) -> Any:
    from matplotlib.figure import Figure

    run = load(name)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    tokens = [point["tokens"] / 1e6 for point in run["curve"]]
    for key, label in (("train_loss", "training"), ("held_out_loss", "held out")):
        axes.plot(tokens, [point[key] for point in run["curve"]], "o-", label=label)
    best = lowest(run)
    axes.annotate(
        f"{best['held_out_loss']:.3f}",
        (best["tokens"] / 1e6, best["held_out_loss"]),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
    )
    axes.set_xlabel("characters seen (millions)")
    axes.set_ylabel(f"loss ({run['unit']})")
    model = run["model"]
    axes.set_title(f"{run['text']}: {model['num_layers']} × {model['cell']}, width {model['width']}", fontsize="medium")
    axes.grid(True, alpha=0.25)
    axes.legend(frameon=False)
    return figure


def plot_sweep(name: str) -> Any:
    from ostinato.bench.plots import figure_of

    return figure_of(load(name))


def plot_ratios(name: str) -> Any:
    from ostinato.bench.plots import ratios_of

    return ratios_of(load(name))


def plot_task(name: str) -> Any:
    from ostinato.bench.learning.plots import figure_of

    return figure_of(load(name))


PLOTS: dict[str, Callable[[str], Any]] = {
    **{f"seeds-{name}-nvidia-h100": plot_sweep for name in SWEEPS},
    **{f"learning-{name}-nvidia-h100": plot_task for name in ("copying", "characters", "pruning")},
    **{f"learning-{name}-amd-epyc": plot_task for name in ("pruning", "bits")},
    **{f"{kind}-{device}": plot_comparison for kind in ("scan", "layer") for device in ("nvidia-h100", "amd-epyc")},
    SHAKESPEARE: plot_learning,
}
for name, draw in ((SWEPT, plot_ratios), (LEARNING_RECURRENT, plot_task)):
    if (RESULTS / f"{name}.json").exists():
        PLOTS[name] = draw


def svg(figure: Any) -> str:
    """Text that is the same at every run of one Matplotlib."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "ostinato"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def with_tables(text: str) -> str:
    """A page with its tables as they should be."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[4]}", text)


def pages() -> Iterator[tuple[Path, str]]:
    """README.md and the pages of docs/, and what they should be."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield path, with_tables(path.read_text())


def plots() -> Iterator[tuple[Path, str]]:
    for name, draw in PLOTS.items():
        yield ROOT / "docs" / "plots" / f"{name}.svg", svg(draw(name))


def main() -> int:
    stale = [(path, text) for path, text in [*pages(), *plots()] if not path.exists() or path.read_text() != text]
    check = "--check" in sys.argv
    for path, text in stale:
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            with replacing(path) as temporary:
                temporary.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
