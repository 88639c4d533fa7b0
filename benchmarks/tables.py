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

from ostinato.bench import capacity, plots, report, sweeps
from ostinato.bench.learning import plots as learning_plots
from ostinato.bench.report import Grid, figures, short_name, speedup
from ostinato.files import replacing

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(?s)(<!-- figures: ([a-z0-9-]+) -->\n)(.*?)(<!-- /figures -->)")
OURS = "Ostinato"
BOTH = "forward+backward"
UNMEASURED = "Still to be measured.\n"

# The LSTM's peers share the columns of the GRU's.
COLUMNS = {"torch.nn.GRU": "torch.nn", "torch.nn.LSTM": "torch.nn"}
COLUMNS |= {
    f"minLSTM-pytorch{how}": f"minGRU-pytorch{how}" for how in ("", ", autocast", ", compiled", ", compiled, autocast")
}

Record = dict[str, Any]


@functools.cache
def load(name: str) -> Record:
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def source(*names: str) -> str:
    """Where the figures come from: devices and commits, and of each the files."""
    files: dict[str, list[str]] = {}
    for name in names:
        run = load(name)
        run = run.get("environment", run)
        threads = f", {run['threads']} thread{'s' * (run['threads'] > 1)}" if run["device_type"] == "cpu" else ""
        versions = f"PyTorch {run['versions']['torch']}, {run['date'][:10]}, commit `{run['commit'][:7]}`"
        files.setdefault(f"{run['device']}{threads}, {versions}", []).append(f"`benchmarks/results/{name}.json`")
    return "; ".join(f"{run}: {', '.join(paths)}" for run, paths in files.items()) + "."


def table(name: str, head: list[str], rows: list[list[str]], *notes: str) -> str:
    """With the notes, and where its figures come from."""
    return shown(name, Grid(head, rows, notes=list(filter(None, notes))))


def shown(name: str, grid: Grid) -> str:
    """A table, and where its figures come from."""
    return f"{grid.markdown()}\n{source(name)}\n"


# What a cell says of a contestant.


def milliseconds(row: Record) -> str:
    return figures(1e3 * row["seconds"])


def share(row: Record) -> str:
    return f"{row['fraction_of_limit']:.2f}" if row["fraction_of_limit"] >= 0.005 else "< 0.01"


def error(row: Record) -> str:
    return "another function" if row["max_error"] is None else f"{row['max_error']:.0e}"


def comparison(
    name: str, cell: Callable[[Record], str], *, leave_out: tuple[str, ...] = (), limit: bool = False, unit: str = ""
) -> str:
    """One row a workload and pass, one column a contestant: of all workloads, or those of a unit."""
    records = [record for record in load(name)["results"] if not unit or unit in record]
    if not records:
        return UNMEASURED
    columns = {who: COLUMNS.get(who, who) for record in records for who in record["contestants"]}
    columns = {who: column for who, column in columns.items() if column not in leave_out}
    names = list(dict.fromkeys(columns.values()))
    head = ["", "pass", *(["at least"] if limit else []), *names]
    rows: list[list[str]] = []
    for record in records:
        work = short_name(record) if not rows or record["pass"] == "forward" else ""
        row = [work, record["pass"], *([milliseconds(record["limit"])] if limit else [])]
        contestants = {columns.get(who): outcome for who, outcome in record["contestants"].items()}
        for who in names:
            outcome = contestants.get(who, {})
            text = cell(outcome) if "seconds" in outcome else "–"
            text += report.mark(outcome)
            row.append(f"**{text}**" if who == OURS else text)
        rows.append(row)
    least = f"At least: {records[0]['limit']['name']}." if limit else ""
    return table(name, head, rows, least, *report.dashes(records, columns))


def recurrences(
    name: str,
    only: Callable[[Record], bool] = lambda _: True,
    pass_name: str = "forward",
    leave_out: tuple[str, ...] = (),
) -> str:
    """The layers of a run that are asked for, one row each; nothing if there are none."""
    run = load(name)
    records = [r for r in run["results"] if r["pass"] == pass_name and only(r["workload"])]
    return shown(name, report.recurrences(records, run["device_type"], leave_out)) if records else ""


def gradients(name: str) -> str:
    """Each gradient's error, and the memory that a call takes: ours, and ``torch.nn``'s beside it."""
    parts = {"input": ("input",), "initial states": ("h0", "c0"), "input weights": ("weight_ih",)}
    parts |= {"recurrent weights": ("weight_hh",), "biases": ("bias",)}
    rows = []
    for record in load(name)["results"]:
        ours, theirs = (record["contestants"].get(who, {}) for who in (OURS, "torch.nn"))
        if record["pass"] != BOTH or not {"errors"} <= ours.keys() & theirs.keys():
            continue
        row = [short_name(record)]
        for prefixes in parts.values():
            pair = (max(e for n, e in who["errors"].items() if n.startswith(prefixes)) for who in (ours, theirs))
            row.append("**{:.0e}** / {:.0e}".format(*pair))
        if "extra_memory_bytes" in ours:
            pair = (who["extra_memory_bytes"] / 1e6 for who in (ours, theirs))
            row.append("**{:,.0f}** / {:,.0f}".format(*pair))
        rows.append(row)
    memory = ["memory, MB"] * (len(rows[0]) > 1 + len(parts))
    return table(name, ["layer", *parts, *memory], rows)


def ladder(name: str) -> str:
    """What each thing that the persistent kernels do is worth: the same layers without it, step by step."""
    steps = {
        "launches at every step": "torch.nn",
        "launches captured": "torch.nn in a CUDA graph",
        "no launches but GEMMs": "GEMMs in a CUDA graph",
        "weights stay on the chip": "Ostinato, dense kernel",
        "only single weights kept": "Ostinato, sparse kernel",
        "blocks kept": "Ostinato, block kernel",
        "what the plan chooses": OURS,
    }
    rows = []
    for record in load(name)["results"]:
        if not any(who in record["contestants"] for who in list(steps.values())[3:6]):
            continue
        outcomes, row = record["contestants"], [short_name(record)]
        for who in steps.values():
            found = outcomes.get(who, {})
            if found.get("unavailable") == sweeps.PLANNED:
                found = outcomes[OURS]
            row.append(report.step(found) if "seconds" in found else "–")
        rows.append(row)
    return table(
        name, ["layer", *steps], rows, "–: that kernel's weights do not fit on the chip, or it is not for this mask."
    )


def ablation(name: str) -> str:
    """Microseconds a step of the persistent kernels, and with one optimisation of each switched off."""
    layers: dict[tuple[str, str], dict[str, float]] = {}
    for row in load(name)["results"]:
        layers.setdefault((row["layer"], row["kernel"]), {})[row["switched_off"]] = row["microseconds_a_step"]
    switches = list(dict.fromkeys(off for times in layers.values() for off in times if off))
    rows = []
    for (layer, kernel), times in layers.items():
        cells = [f"{figures(times[off])} ({times[off] / times['']:.2f}×)" if off in times else "–" for off in switches]
        rows.append([short_name({"workload": {"name": layer}}), kernel, f"**{figures(times[''])}**", *cells])
    head = ["µs a step", "kernel", "as it is", *(f"without {off}" for off in switches)]
    return table(name, head, rows, "–: that kernel has no such thing.")


def calls(name: str, *of: str) -> str:
    """Of the calls whose names begin alike."""
    return shown(name, report.calls([r for r in load(name)["results"] if r["workload"]["name"].startswith(of)]))


def bounds(name: str) -> str:
    """What each shape of BOUND_BY should take by its limit, what it takes, and what the difference is."""
    rows = []
    for record in load(name)["results"]:
        work = record["workload"]["name"]
        if (work, record["pass"]) in BOUND_BY:
            ours, least = record["contestants"][OURS], record["limit"]
            row = [short_name(record), record["pass"], milliseconds(least), f"**{milliseconds(ours)}**"]
            rows.append([*row, share(ours), BOUND_BY[work, record["pass"]]])
    return table(name, ["", "pass", "at least, ms", "measured, ms", "share", "bound by"], rows)


def swept(name: str) -> Record:
    """A run of the sweep of this name, with what is said of it."""
    return sweeps.shown(SWEEPS[name], load(f"seeds-{name}-gpu"))


def sweep(name: str) -> str:
    content = swept(name)
    grid = report.sweep(content)
    if SWEEPS[name].together:
        grid.notes.append(f"CPU: {content.get('processor', 'of that machine')}, {content['threads']} threads.")
    plot = figure(f"seeds-{name}-gpu", name)
    return f"**{content['title']}.**\n\n{shown(f'seeds-{name}-gpu', grid)}\n{plot}"


def headlines(kind: str) -> str:
    """One row each of HEADLINES of a kind of run, with the limit and the fastest of the others that is right."""
    rows, names = [], []
    for what, name, workload, pass_name in HEADLINES:
        if not name.endswith(kind):
            continue
        (record,) = (r for r in load(name)["results"] if (r["workload"]["name"], r["pass"]) == (workload, pass_name))
        timed = {who: row for who, row in record["contestants"].items() if "seconds" in row}
        theirs = {who: row["seconds"] for who, row in timed.items() if who.startswith("torch.nn")}
        others = {
            who: row["seconds"]
            for who, row in timed.items()
            if not who.startswith((OURS, "torch.nn"))
            and row["max_error"] is not None
            and row["max_error"] <= report.WRONG
        }
        other = min(others, key=lambda who: others[who], default=None)
        ours, limit = timed[OURS]["seconds"], record.get("limit")
        row = [what, f"**{figures(1e3 * ours)} ms**", f"{figures(1e3 * limit['seconds'])}" if limit else "–"]
        row.append(f"{figures(1e3 * others[other])}, {other}" if other else "–")
        row.append(
            f"{figures(1e3 * min(theirs.values()))} ({report.times(min(theirs.values()) / ours)})" if theirs else "–"
        )
        rows.append([*row, f"`ostinato bench {name.partition('-')[0]}`"])
        names.append(name)
    head = ["", OURS, "limit", "fastest of the others", "torch.nn at its best", "command"]
    return f"{Grid(head, rows).markdown()}\n{source(*dict.fromkeys(names))}\n"


def cpu_or_gpu(cell: str) -> str:
    """One layer where its input is, and with the transfer."""
    content, name = swept(f"transfer-{cell}"), sweeps.NAMES[cell]
    labels = {"CPU": "scan, CPU", "GPU": "scan, GPU", "GPU, from and to the host": "scan and transfer, GPU"}
    lines = [content["lines"][f"{name}, {label}"]["points"] for label in labels.values()]
    rows = [
        [f"{points[0]['x']:,}", *(figures(1e3 * point["value"]) for point in points)]
        for points in zip(*lines, strict=True)
    ]
    run = f"seeds-transfer-{cell}-gpu"
    what = f"Microseconds of {content['title'].partition(':')[0]}."
    processor = f"CPU: {load(run)['processor']}, {load(run)['threads']} threads."
    return table(run, ["steps", *labels], rows, what, processor)


def claims() -> str:
    """Every claim of the documents that Ostinato goes back to, and what a run here makes of it."""

    def values(name: str, label: str) -> dict[float, float]:
        content = swept(name)
        points = content["lines"][label]["points"] if label in content["lines"] else []
        found = [ratio["points"] for ratio in content["ratios"] if ratio["name"] == label]
        return {point["x"]: point["value"] for point in (*points, *(found[0] if found else ()))}

    def listed(found: Mapping[float, float]) -> str:
        return ", ".join(f"{figures(value)}× (H {hidden:,})" for hidden, value in found.items())

    rows = []
    for cell, other, at_512 in (("MinGRU", "GRU", "175×"), ("MinLSTM", "LSTM", "235×")):
        for length, published in ((512, at_512), (4096, "over 1,300×")):
            for by in (f"torch.nn.{other}", f"torch.nn.{other}Cell, time loop"):
                here = listed(values(f"training-{length}", f"{by} / {cell}"))
                rows.append([f"training step, B 64, T {length:,}: {by} / {cell}", f"{published}, T4 [1]", here])
    for cell in ("RNN", "LSTM"):
        for label, what in (("Ostinato, sparse kernel", "our kernel of single weights"), (OURS, "our plan's choice")):
            here = values(f"density-{cell.lower()}", f"next best / {label}").get(0.3)
            if here:
                rows.append([f"{cell} 2304, B 4, 30 %: next best / {what}", "over 6× [2]", f"{figures(here)}×"])
    larger = values("hidden", f"next best / {sweeps.IN_BLOCKS}")
    here = listed({hidden: larger[hidden] for hidden in (4608, 8192) if hidden in larger})
    rows.append(
        ["RNN beyond what fits dense, B 4, 10 % in blocks: next best / ours", "2× at 5 times the size [2]", here]
    )
    for record in load("networks-gpu")["results"] if measured("networks-gpu") else ():
        work, best = record["workload"], speedup(record)
        if work["network"] in ("GNMT", "Deep Speech 2") and work["density"] < 1 and best:
            layers = f"{work['layers']} × {work['cell']} {work['hidden']:,}, 10 % in blocks"
            what = f"{work['network']}, {layers}: cuDNN's best / ours"
            rows.append([what, "up to 3× over the next best [2]", f"{figures(best)}×"])
    for cell, ratio in (("mingru", "6.31×"), ("minlstm", "9.44×")):
        here = f"{figures(values(f'transfer-{cell}', 'CPU / GPU with the transfer')[1024])}×"
        what = f"{sweeps.NAMES[cell]}, 64 inputs, H 128, T 1,024: CPU / GPU with the transfer"
        rows.append([what, f"{ratio}, RTX 3070 Laptop [3]", here])
    for cell, published in (("mingru", "5,330 ms"), ("minlstm", "6,709.8 ms")):
        here = f"{figures(values(f'lengths-{cell}', f'{sweeps.NAMES[cell]}, scan, GPU')[65536])} ms (512 inputs, H 512)"
        what = f"{sweeps.NAMES[cell]} forward, T 65,536, on a GPU"
        rows.append([what, f"{published}, RTX 4090, sizes not stated [4]", here])
    names = [f"seeds-{name}-gpu" for name in SWEEPS if name not in ("batch", "steps")]
    names += ["networks-gpu"] * measured("networks-gpu")
    return f"{Grid(['claim', 'published', 'here'], rows).markdown()}\n{source(*names)}\n"


# Learning


def lowest(run: Record) -> Record:
    return min(run["curve"], key=lambda point: point["held_out_loss"])


def curve(name: str) -> str:
    run, rows = load(name), []
    for point in run["curve"]:
        held_out = f"{point['held_out_loss']:.3f}"
        held_out = f"**{held_out}**" if point == lowest(run) else held_out
        row = [f"{point['step']:,}", f"{point['tokens']:,}", f"{point['seconds']:.1f}"]
        rows.append([*row, f"{point['train_loss']:.3f}", held_out])
    head = ["step", "characters", "seconds", "training loss", "held-out loss"]
    return table(name, head, rows, f"Losses in {run['unit']}.")


def learned(name: str) -> str:
    run = load(name)
    model, best, text = run["model"], lowest(run), run["text"].removesuffix(".txt")
    size = f"{model['num_layers']} × {model['cell']}, width {model['width']}"
    row = [text, size, f"**{best['held_out_loss']:.3f}**", f"{best['tokens']:,}", f"{best['seconds']:.0f} s"]
    return table(name, ["text", "model", "held-out loss, nats per character", "characters seen", "after"], [row])


def copied(name: str) -> str:
    published = {"mingru": "99.5 ± 0.2 %", "minlstm": "96.0 ± 2.8 %"}
    rows = []
    for run in load(name)["runs"]:
        last = run["curve"][-1]
        rows.append([NAMES[run["cell"]], f"**{run['accuracy']:.2%}**", published[run["cell"]]])
        rows[-1] += [f"{run['parameters']:,}", f"{last['tokens']:,}", f"{last['seconds']:.0f} s"]
    head = ["layer", "right tokens", "published", "parameters", "tokens trained on", "after"]
    return table(name, head, rows, "Published: Feng et al. 2024.")


def characters(name: str) -> str:
    rows = []
    for run in load(name)["runs"]:
        best, last = lowest(run), run["curve"][-1]
        published = learning_plots.PUBLISHED_LOSS.get(run["cell"])
        row = [layer_of(run), f"**{best['held_out_loss']:.3f}**", f"{published:.3f}" if published else "–"]
        row += [f"{best['tokens']:,}", f"{best['seconds']:.0f} s", f"{last['held_out_loss']:.3f}"]
        rows.append([*row, f"{last['seconds']:.0f} s"])
    head = ["layer", "lowest held-out loss", "published", "after characters", "and time", "at the end", "after"]
    note = ""
    if any(row[2] != "–" for row in rows):
        others = learning_plots.PUBLISHED_LOSS_OF_OTHERS
        rows += [[model, "–", f"{loss:.3f}", *"––––"] for model, loss in others.items()]
        note = " Published: Feng et al. 2024, table 4; –: not published, or not trained here."
    return table(name, head, rows, f"Losses in nats per character.{note}")


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
    return table(name, head, rows, "Held-out loss in nats per character.")


def bits(name: str) -> str:
    """Right answers beyond the trained lengths; one row a question and depth, one column a cell."""
    runs = load(name)["runs"]
    rows: dict[tuple[str, int], list[str]] = {}
    for run in runs:
        rows.setdefault((run["question"], run["num_layers"]), []).append(f"{run['accuracy_beyond']:.1%}")
    head = ["question", "layers", *dict.fromkeys(NAMES[run["cell"]] for run in runs)]
    return table(name, head, [[question, str(depth), *shares] for (question, depth), shares in rows.items()])


# Others


def exchange(name: str) -> str:
    """A prediction: what the exchange between parts costs, and what is left of linear scaling."""
    run, rows = load(name), []
    for row in run["results"]:
        sizes = [f"{row[key]:,}" for key in ("processes", "channels", "steps")]
        times = [f"{1e6 * row[way]['seconds']:,.0f}" for way in ("ring", "doubling", "log-step")]
        rows.append([*sizes, f"{row['ring']['bytes'] / 1e6:,.2f}", *times, f"{row['share_of_linear']:.2f}"])
    head = ["GPUs", "channels", "steps a GPU", "MB received", "all-gather, ring, µs", "all-gather, doubling, µs"]
    given = run["inputs"]
    inside, between = given["inside"], given["between"]
    assumed = [
        f"{1e6 * inside['latency']:g} µs inside a machine",
        f"{1e6 * between['latency']:g} µs and {between['rate'] / 1e9:g} GB/s between two",
    ]
    return (
        f"{Grid([*head, 'log-step, µs', 'forward, of linear'], rows).markdown()}\n"
        f"Simulated. Measured: {1e6 * given['exchange_seconds']:g} µs for an exchange of a few bytes between two H200, "
        f"{inside['rate'] / 1e9:g} GB/s that each of four receives in a large one, "
        f"{1e3 * given['host_seconds']:g} ms a call on the host, and the memory's rate, "
        f"{given['memory_rate'] / 1e12:g} TB/s. Assumed: {', '.join(assumed)}. "
        f"`benchmarks/results/{name}.json`.\n"
    )


def several_gpus(name: str) -> str:
    """What several GPUs do, in ms or tokens a second, and the share of as many times what one does alone."""
    run, rows = load(name), []
    gpus = run["gpus"]

    def row(what: str, of_one: str, of_all: str, share: float) -> None:
        rows.append([what, of_one, of_all, f"{share:.2f}"])

    for scan in run["weak_scaling"]:
        alone, together = scan["seconds"]["alone"], scan["seconds"]["all"]
        for way in alone:
            what = f"scan, {scan['steps']:,} steps a GPU of {scan['channels']} channels, {scan['gates']}: {way}"
            row(what, f"{1e3 * alone[way]:.2f} ms", f"{1e3 * together[way]:.2f} ms", alone[way] / together[way])
    layer = run["strong_scaling"]
    alone, together = layer["seconds"]["alone"], layer["seconds"]["all"]
    what = f"MinGRU of {layer['hidden_size']:,}, {layer['dtype']}, {layer['steps']:,} steps: forward and backward"
    row(what, f"{1e3 * alone:.2f} ms", f"{1e3 * together:.2f} ms", alone / together / gpus)
    models = run["language_model"]
    of_one = models["alone"]["tokens_per_second"]
    for way in ("DDP", "FSDP2"):
        model = models[way]
        held = f"{model['bytes_between_steps'] / 1e9:.2f} GB a GPU between steps"
        what = f"language model, {model['parameters'] / 1e6:.0f} million parameters, {way}, {held}"
        rate = model["tokens_per_second"]
        row(what, f"{of_one:,.0f} tokens/s", f"{rate:,.0f} tokens/s", rate / of_one / gpus)
    head = ["", "one GPU alone", f"{gpus} GPUs", f"share of {gpus} times one"]
    long, trained = run["long_sequence"], run["four_steps_of_adamw"]
    errors: dict[str, float] = {}
    for case, error in run["max_relative_errors"].items():
        what = case.partition(",")[0]
        errors[what] = max(error, errors.get(what, 0.0))
    as_one = max(found["max_relative_error"] for found in trained.values())
    layers = len({case.rpartition(", ")[0] for case in trained})
    return table(
        name,
        head,
        rows,
        f"{long['steps']:,} steps of {long['channels']} channels, float32, forward and backward, once: "
        f"{1e3 * long['seconds']:.0f} ms, with relative errors up to {long['max_relative_error']:.0e} in samples, the "
        "boundaries between parts among them.",
        "Errors in parts, in float32 against one process in float64 and relative to the largest value: "
        f"{', '.join(f'{what} {error:.0e}' for what, error in errors.items())}.",
        f"After four steps of AdamW by DDP and FSDP2 the outputs of {layers} kinds of layers are within {as_one:.0e} "
        "of one process's.",
    )


def reinforcement(name: str) -> str:
    """What the policies of the example reach, after how many rollouts, and how fast."""
    rows = []
    for row in load(name)["results"]:
        curve = row["curve"]
        first = next((str(i) for i, share in enumerate(curve, 1) if share >= 0.95), "–")
        rows.append([row["policy"], f"{sum(curve[-5:]) / 5:.0%}", first, f"{row['steps_per_second']:,.0f}"])
    rollouts = len(load(name)["results"][0]["curve"])
    head = ["policy", f"right in the last 5 of {rollouts} rollouts", "first 95 % right", "steps a second"]
    return table(name, head, rows)


def audio(name: str) -> str:
    """The time of a frame in the example on audio, and the speed beside the first network's."""
    results = load(name)["results"]
    rows = []
    for row in results:
        microseconds = [f"{1e6 * row[key]:.0f}" for key in ("median", "slow")]
        rows.append([row["network"], *microseconds, f"{results[0]['median'] / row['median']:.1f}×"])
    return table(name, ["network", "µs a frame", "99 % below", "speed"], rows)


def recurrent_gemma(name: str) -> str:
    """Milliseconds of RecurrentGemma with its loop, and with a recurrence in its place."""
    rows = []
    for row in load(name)["results"]:
        loop, recurrence = row["loop"], row["recurrence"]
        rows.append([row["work"], figures(1e3 * loop), figures(1e3 * recurrence), f"{loop / recurrence:.1f}×"])
    return table(name, ["ms, forward and backward", "with its loop", "with a recurrence", "speed"], rows)


def profile(name: str) -> str:
    """The kernels of a call, the longest first."""
    grid = report.profile(load(name), 6)
    return f"{grid.title}.\n\n{shown(name, grid)}"


def published_profile() -> str:
    """Of minGRU at T = 4,096 in the course project, as its page has it."""
    head = ["kernel", "µs a launch", "launches", "share of the time"]
    rows = [
        ["gates of all steps, fused (`min_gru_extract_scan_params_kernel`)", "180", "1", "8 %"],
        ["up-sweep (`compose_offset_kernel`)", "about 3", "12", "< 1 %"],
        ["down-sweep (`apply_scan_op_kernel`)", "about 2", "4,096", "10 %"],
        ["output projection (`matvec_kernel`), at 23 GB/s", "about 93", "4,096", "72 %"],
    ]
    return (
        f"{Grid(head, rows).markdown()}\nPublished, on an RTX 4090, at sizes that are not stated; by Nsight Compute.\n"
    )


def figure(name: str, what: str, folder: str = "../plots") -> str:
    return f"![{what}]({folder}/{name}.svg)\n"


HEADLINES = (  # what it is, its run, workload and pass
    (
        "minGRU trained, 16 × 4,096 steps, 1,024 units, bf16",
        "layer-gpu",
        "mingru (16, 4096, 1024) to 1024 bfloat16",
        BOTH,
    ),
    ("the scan alone, (8, 4096, 1536), fp32", "scan-gpu", "linear_scan (8, 4096, 1536) float32", "forward"),
    ("GRU trained, 16 × 512 steps, 1,024 units, bf16", "training-gpu", "GRU 1024 B16 T512 dense bfloat16", BOTH),
    ("GRU, 16 × 256 steps, 1,024 units, bf16", "persistent-gpu", "GRU 1024 B16 T256 dense bfloat16", "forward"),
    (
        "LSTM, 4 × 256 steps, 4,608 units, a tenth kept, fp16",
        "persistent-gpu",
        "LSTM 4608 B4 T256 10% 16x1 float16",
        "forward",
    ),
    ("minGRU trained, 4,096 steps, 256 units, fp32", "layer-cpu", "mingru (1, 4096, 256) to 256 float32", BOTH),
    ("GRU trained, 16 × 200 steps, 256 units, fp32", "training-cpu", "GRU 256 B16 T200 dense float32", BOTH),
    (
        "LSTM, 1,000 steps, 1,024 units, a tenth kept, fp32",
        "persistent-cpu",
        "LSTM 1024 B1 T1000 10% 16x1 float32",
        "forward",
    ),
)
MEMORY = "memory: nothing else to gain"
TWICE = "memory, and instructions: twice as many a byte"
BOUND_BY = {
    ("linear_scan (8, 4096, 1536) float32", "forward"): MEMORY,
    ("linear_scan (8, 4096, 1536) float32", "backward"): MEMORY,
    ("linear_scan (8, 65536, 1536) float32", "forward"): MEMORY,
    ("linear_scan (8, 65536, 1536) float32", "backward"): MEMORY,
    ("linear_scan (8, 4096, 1536) bfloat16", "forward"): TWICE,
    ("linear_scan (8, 4096, 1536) bfloat16", "backward"): TWICE,
    ("linear_scan (8, 65536, 1536) bfloat16", "forward"): TWICE,
    ("linear_scan (8, 65536, 1536) bfloat16", "backward"): TWICE,
    ("linear_scan (1, 65536, 256) float32", "forward"): "filling and emptying the chip",
    ("linear_scan (1, 1048576, 64) float32", "forward"): "chained blocks: what they tell each other",
    ("linear_scan (1, 16777216, 1) float32", "forward"): "instructions, and transposition through shared memory",
    ("mingru (16, 4096, 1024) to 1024 bfloat16", "forward"): "the GEMM, then memory",
    ("mingru (16, 4096, 1024) to 1024 bfloat16", BOTH): "the GEMMs, then memory",
    ("minlstm (16, 4096, 1024) to 1024 bfloat16", "forward"): "the GEMM, then memory",
    ("minlstm (16, 4096, 1024) to 1024 bfloat16", BOTH): "the GEMMs, then memory",
    ("mingru (1, 65536, 256) to 256 bfloat16", "forward"): "chained blocks",
    ("mingru (64, 1000, 10) to 100 float32", BOTH): "Python: launches",
    ("mingru (256, 128, 256) to 256 bfloat16", BOTH): "Python: launches",
    ("mingru (256, 256, 1024) to 1024 bfloat16", "forward"): "the GEMM, then memory",
    ("mingru (1, 65536, 1024) to 1024 bfloat16", "forward"): "the GEMM, then chained blocks",
}
NAMES = {"mingru": "minGRU", "minlstm": "minLSTM", "gru": "nn.GRU", "lstm": "nn.LSTM"}
SWEEPS = {sweep.name: sweep for sweep in sweeps.sweeps(quick=False)}


KERNELS = tuple(f"Ostinato, {path} kernel" for path in ("dense", "sparse", "block"))


TABLES: dict[str, Callable[[], str]] = {
    "claims": claims,
    "cpu-or-gpu": lambda: cpu_or_gpu("mingru"),
    "learning": lambda: learned("tinyshakespeare-gpu"),
    "curve": lambda: f"{curve('tinyshakespeare-gpu')}\n{figure('tinyshakespeare-gpu', 'Loss', 'plots')}",
    "recurrence-gpu": lambda: comparison("recurrence-gpu", share, unit="bytes"),
    "recurrence-layers-gpu": lambda: comparison("recurrence-gpu", milliseconds, limit=True, unit="flops"),
    "recurrence-cpu": lambda: comparison("recurrence-cpu", milliseconds),
    "recurrence-errors-gpu": lambda: comparison("recurrence-gpu", error),
    "persistent-pruned": lambda: recurrences(
        "persistent-gpu", lambda w: w["density"] < 1 and w["length"] == 256, leave_out=KERNELS
    ),
    "persistent-dense": lambda: recurrences("persistent-gpu", lambda w: w["density"] == 1 and w["length"] == 256),
    "persistent-errors": lambda: recurrences("persistent-gpu", lambda w: w["length"] > 256),
    "persistent-ladder": lambda: ladder("persistent-gpu"),
    "ablation": lambda: ablation("ablation-gpu"),
    "persistent-cpu": lambda: recurrences("persistent-cpu"),
    "networks-gpu": lambda: recurrences("networks-gpu"),
    "networks-cpu": lambda: recurrences("networks-cpu"),
    "training": lambda: recurrences(
        "training-gpu", lambda work: work["length"] < 2000 and not work.get("resets"), BOTH
    ),
    "training-resets": lambda: recurrences("training-gpu", lambda work: work.get("resets", 0) > 0, BOTH),
    "training-errors": lambda: gradients("training-gpu"),
    "training-sweep": lambda: (
        f"{figure('training-sweep-gpu', 'cuDNN over ours, by hidden size and batch')}\n{source('training-sweep-gpu')}\n"
    ),
    "training-cpu": lambda: recurrences("training-cpu", pass_name=BOTH),
    "inference-cpu": lambda: recurrences("training-cpu"),
    "exchange": lambda: exchange("exchange-simulated"),
    "reinforcement": lambda: reinforcement("reinforcement-cpu"),
    "audio": lambda: audio("audio-cpu"),
    "recurrent-gemma-cpu": lambda: recurrent_gemma("recurrent-gemma-cpu"),
    "recurrent-gemma-gpu": lambda: recurrent_gemma("recurrent-gemma-gpu"),
    "several-gpus": lambda: several_gpus("distributed-gpu"),
    "capacity": lambda: shown("seeds-capacity-cpu", capacity.table(load("seeds-capacity-cpu")["results"])),
    "bounds-scan": lambda: bounds("scan-gpu"),
    "bounds-layer": lambda: bounds("layer-gpu"),
    "profile": lambda: profile("profile-mingru-gpu"),
    "profile-published": published_profile,
    "profile-loop": lambda: profile("profile-loop-gpu"),
    **{f"seeds-{name}": functools.partial(sweep, name) for name in SWEEPS},
}
for kind in ("gpu", "cpu"):
    TABLES |= {
        f"headlines-{kind}": functools.partial(headlines, kind),
        f"calls-scan-{kind}": functools.partial(calls, f"calls-{kind}", "linear_scan"),
        f"calls-step-{kind}": functools.partial(calls, f"calls-{kind}", "step of"),
        f"calls-layer-{kind}": functools.partial(calls, f"calls-{kind}", "GRU", "LSTM", "Stepper", "2 layers of"),
        f"scan-{kind}": functools.partial(comparison, f"scan-{kind}", share),
        f"scan-{kind}-errors": functools.partial(comparison, f"scan-{kind}", error),
        f"layer-{kind}": functools.partial(comparison, f"layer-{kind}", milliseconds, limit=True),
        f"layer-{kind}-errors": functools.partial(comparison, f"layer-{kind}", error, leave_out=("torch.nn",)),
    }
LEARNED: dict[str, Callable[[str], str]] = {
    "learning-copying-gpu": copied,
    "learning-characters-gpu": characters,
    "learning-recurrent-gpu": characters,
    "learning-pruning-gpu": pruned,
    "learning-pruning-small-gpu": pruned,
    "learning-bits-gpu": bits,
}
TABLES |= {
    name: lambda name=name, show=show: f"{show(name)}\n{figure(name, 'What is learned')}"
    for name, show in LEARNED.items()
}
PLOTS: dict[str, Callable[[Record], Any]] = {
    **{f"seeds-{name}-gpu": lambda run: plots.figure_of(sweeps.shown(SWEEPS[run["table"]], run)) for name in SWEEPS},
    **dict.fromkeys(LEARNED, learning_plots.figure_of),
    "tinyshakespeare-gpu": learning_plots.curve_of,
    "scan-gpu": plots.comparison_of,
    "layer-gpu": plots.comparison_of,
    "training-sweep-gpu": plots.ratios_of,
}


def svg(name: str) -> str:
    """The plot of a run: text that is the same at every run of one Matplotlib."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "ostinato"}):
        PLOTS[name](load(name)).savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def table_of(name: str) -> str:
    """As it should stand on a page, which says so if the run is still to be made."""
    try:
        return TABLES[name]()
    except FileNotFoundError:
        return UNMEASURED


def with_tables(text: str) -> str:
    """A page with its tables as they should be."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{table_of(match[2])}\n{match[4]}", text)


def pages() -> Iterator[tuple[Path, str]]:
    """README.md and the pages of docs/, and what they should be."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield path, with_tables(path.read_text())


def plotted() -> Iterator[tuple[Path, str]]:
    for name in PLOTS:
        if measured(name):
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
