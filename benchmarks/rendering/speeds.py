"""Tables that compare contestants: their times, errors and memory."""

from collections.abc import Callable

from ostinato.bench import report
from ostinato.bench.report import figures
from ostinato.bench.workloads import OURS, short_name
from rendering import runs
from rendering.runs import Record

# The LSTM's peers share the columns of the GRU's.
COLUMNS = {"torch.nn.GRU": "torch.nn", "torch.nn.LSTM": "torch.nn"}
COLUMNS |= {
    f"minLSTM-pytorch{how}": f"minGRU-pytorch{how}" for how in ("", ", autocast", ", compiled", ", compiled, autocast")
}


def milliseconds(row: Record) -> str:
    return figures(1e3 * row["seconds"])


def share(row: Record) -> str:
    return f"{row['fraction_of_limit']:.2f}" if row["fraction_of_limit"] >= 0.005 else "< 0.01"


def error(row: Record) -> str:
    return "another function" if row["max_error"] is None else f"{row['max_error']:.0e}"


def comparison(
    name: str, cell: Callable[[Record], str], *, leave_out: tuple[str, ...] = (), limit: bool = False, unit: str = ""
) -> str:
    """Tabulate a run, or its workloads of one unit: a row per workload and pass, a column per contestant."""
    records = [record for record in runs.load(name)["results"] if not unit or unit in record]
    if not records:
        return runs.UNMEASURED
    columns = {who: COLUMNS.get(who, who) for record in records for who in record["contestants"]}
    columns = {who: column for who, column in columns.items() if column not in leave_out}
    names = list(dict.fromkeys(columns.values()))
    head = ["", "pass", *(["at least"] if limit else []), *names]
    rows: list[list[str]] = []
    for record in records:
        work = short_name(record["workload"]["name"]) if not rows or record["pass"] == "forward" else ""
        row = [work, record["pass"], *([milliseconds(record["limit"])] if limit else [])]
        contestants = {columns.get(who): outcome for who, outcome in record["contestants"].items()}
        for who in names:
            outcome = contestants.get(who, {})
            text = cell(outcome) if "seconds" in outcome else "–"
            text += report.mark(outcome)
            row.append(f"**{text}**" if who == OURS else text)
        rows.append(row)
    least = f"At least: {records[0]['limit']['name']}." if limit else ""
    return runs.table(name, head, rows, least, *report.dashes(records, columns))


def layers(
    name: str,
    only: Callable[[Record], bool] = lambda _: True,
    pass_name: str = "forward",
    leave_out: tuple[str, ...] = (),
) -> str:
    """Tabulate microseconds a step of the layers of a run that `only` selects."""
    run = runs.load(name)
    records = [r for r in run["results"] if r["pass"] == pass_name and only(r["workload"])]
    if not records:
        return runs.UNMEASURED
    return runs.sourced(report.recurrent_layers(records, run["device_type"], leave_out), name)


def drawn(name: str) -> str:
    """Tabulate the layers of a run that were drawn at random, after a summary."""
    run = runs.load(name)
    return f"{report.summary(run['results'])}\n\n{layers(name, pass_name='forward+backward')}"


def gradients(name: str) -> str:
    """Tabulate each gradient's error and the memory of a call, ours beside ``torch.nn``'s."""
    parts = {"input": ("input",), "initial states": ("h0", "c0"), "input weights": ("weight_ih",)}
    parts |= {"recurrent weights": ("weight_hh",), "biases": ("bias",)}
    rows = []
    for record in runs.load(name)["results"]:
        ours, theirs = (record["contestants"].get(who, {}) for who in (OURS, "torch.nn"))
        if record["pass"] != "forward+backward" or not {"errors"} <= ours.keys() & theirs.keys():
            continue
        row = [short_name(record["workload"]["name"])]
        for prefixes in parts.values():
            pair = (max(e for n, e in who["errors"].items() if n.startswith(prefixes)) for who in (ours, theirs))
            row.append("**{:.0e}** / {:.0e}".format(*pair))
        if "extra_memory_bytes" in ours:
            pair = (who["extra_memory_bytes"] / 1e6 for who in (ours, theirs))
            row.append("**{:,.0f}** / {:,.0f}".format(*pair))
        rows.append(row)
    memory = ["memory, MB"] * (len(rows[0]) > 1 + len(parts))
    return runs.table(name, ["layer", *parts, *memory], rows)


def calls(name: str, *of: str) -> str:
    """Tabulate those calls of a run whose names begin with one of these."""
    records = [record for record in runs.load(name)["results"] if record["workload"]["name"].startswith(of)]
    return runs.sourced(report.calls(records), name) if records else runs.UNMEASURED
