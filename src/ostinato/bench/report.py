"""Tabulate what was measured, with one function for each kind of run."""

import math
import re
import statistics
from collections.abc import Callable, Iterable

from ostinato.bench.grid import WRONG, Grid
from ostinato.bench.measure import Record
from ostinato.bench.peers import NOT_INSTALLED, PLANNED
from ostinato.bench.profile import is_ours
from ostinato.bench.workloads import OURS, short_name

UNITS = {"bytes": "B", "flops": "FLOP"}
COLUMNS = {  # the headings of the contestants in tables of recurrent layers
    "torch.nn": "torch.nn",
    "torch.nn in a CUDA graph": "in a CUDA graph",
    "Ostinato in a CUDA graph": "ours in a CUDA graph",
    "GEMMs in a CUDA graph": "GEMMs in a CUDA graph",
    "cuSPARSE": "cuSPARSE",
    "torchrl": "torchrl",
    "flashrnn": "FlashRNN",
    "Ostinato, from its equation": "from its equation",
    "Ostinato, from its equation, in a CUDA graph": "from its equation in a CUDA graph",
    "its equation in a loop": "in a loop",
    "its equation in a loop in a CUDA graph": "the loop in a CUDA graph",
    "Ostinato, dense kernel": "dense kernel",
    "Ostinato, sparse kernel": "sparse kernel",
    "Ostinato, block kernel": "block kernel",
}
WITH_ERRORS = "torch.nn", "torchrl", "flashrnn", "Ostinato, from its equation"  # whose errors may differ from ours


def workload(records: list[Record]) -> Grid:
    """Tabulate all passes of one workload, one row per contestant."""
    unit = "bytes" if "bytes" in records[0] else "flops"
    head = ["", "time", "rate", "of limit" if unit == "bytes" else "x limit", "x ours", "memory", "error"]
    rows: list[list[str]] = []
    notes: dict[str, str] = {}

    def add(name: str, row: Record, *cells: str) -> None:
        speed = [f"{figures(1e3 * row['seconds'])} ms", scaled(row[f"{unit}_per_second"], f"{UNITS[unit]}/s")]
        rows.append([f"  {name}", *speed, *cells])

    for record in records:
        rows.append([f"**{record['pass']}: {scaled(record[unit], UNITS[unit])}**", *[""] * 4, "–", ""])
        add(f"{record['limit']['name']}, the limit", record["limit"], "", "", "–", "")
        for name, row in record["contestants"].items():
            if "unavailable" in row:
                notes[name] = row["unavailable"]
                continue
            if row["max_error"] is None:
                notes[name] = "another function, so no error is stated"
            fraction = row["fraction_of_limit"] if unit == "bytes" else 1 / row["fraction_of_limit"]
            memory = scaled(row["extra_memory_bytes"], "B") if "extra_memory_bytes" in row else "–"
            error = "" if row["max_error"] is None else f"{row['max_error']:.0e}"
            add(name, row, f"{fraction:.2f}", f"{row['times_ostinato']:.2f}", memory, error)
    return Grid(
        head, rows, short_name(records[0]["workload"]["name"]), [f"{name}: {note}" for name, note in notes.items()]
    )


def recurrent_layers(records: list[Record], device_type: str, leave_out: Iterable[str] = ()) -> Grid:
    """Tabulate microseconds a step, the peers' also as multiples of ours; one row per layer."""
    ran = {who for record in records for who, row in record["contestants"].items() if "seconds" in row}
    columns = {who: column for who, column in COLUMNS.items() if who in ran and who not in leave_out}
    if device_type == "cuda" and "torch.nn" in columns:
        columns["torch.nn"] = "cuDNN"
    head = ["µs a step", "plan", OURS, "error"]
    for who, column in columns.items():
        head += [column, "its error"] if who in WITH_ERRORS else [column]
    rows = []
    for record in records:
        outcomes = record["contestants"]
        ours = outcomes[OURS]
        row = [
            short_name(record["workload"]["name"]),
            ours["plan"]["path"],
            f"**{step(ours)}**",
            f"{ours['max_error']:.0e}",
        ]
        for who in columns:
            peer = outcomes.get(who, {})
            timed = "seconds" in peer
            row.append(f"{step(peer)} ({times(peer['times_ostinato'])}){mark(peer)}" if timed else "–")
            if who in WITH_ERRORS:
                row.append(f"{peer['max_error']:.0e}" if timed else "–")
        best = speedup(record) if "torch.nn in a CUDA graph" in ran else None
        rows.append([*row, f"**{times(best)}**" if best else "–"])
    return Grid([*head, "cuDNN's best / ours"], rows, notes=dashes(records, columns))


def dashes(records: list[Record], columns: dict[str, str] | None = None) -> list[str]:
    """Say why contestants have no value in some rows, or no column because their package is missing.

    `columns` maps the contestants that are shown to their headings; without it, all that ran stand under their names.
    """
    ran = {who for record in records for who, row in record["contestants"].items() if "seconds" in row}
    headings = {who: who for who in ran} if columns is None else {w: c for w, c in columns.items() if w in ran}
    reasons: dict[str, dict[str, None]] = {}
    for record in records:
        for who, row in record["contestants"].items():
            if who in headings and "unavailable" in row:
                reasons.setdefault(row["unavailable"].removeprefix("failed: ").rstrip("."), {})[headings[who]] = None
    parts = [f"{' and '.join(who)}: {reason}" for reason, who in reasons.items() if reason != PLANNED]
    if columns and any(not headings.keys() <= record["contestants"].keys() for record in records):
        parts.append("not asked for at that shape")
    rows = [item for record in records for item in record["contestants"].items()]
    missing = (row.get("unavailable", "").partition(NOT_INSTALLED) for who, row in rows if who not in ran)
    packages = dict.fromkeys(package for package, is_missing, _ in missing if is_missing)
    notes = [f"–: {'; '.join(parts)}."] if parts else []
    return [*notes, f"Not installed for this run: {', '.join(packages)}."] if packages else notes


def calls(records: list[Record]) -> Grid:
    """Tabulate microseconds a call, also as multiples of the time of ``torch.add``."""
    names = list(dict.fromkeys(who for record in records for who in record["contestants"]))
    rows = []
    for record in records:
        cells = {
            who: f"{figures(1e6 * row['seconds'])} ({times(row['times_unit'])})"
            for who, row in record["contestants"].items()
        }
        cells[OURS] = f"**{cells[OURS]}**"
        rows.append([record["workload"]["name"], *(cells.get(who, "–") for who in names)])
    return Grid(["µs a call", *names], rows)


def profile(content: Record, count: int = 12) -> Grid:
    """Tabulate the `count` kernels that take longest, the others together, and the time outside of all kernels."""
    head = ["kernel", "µs a launch", "launches", "share", "work", "rate", "of the limit"]
    rows = []
    for row in content["kernels"][:count]:
        name = re.sub(r"^(void|std::enable_if<.*?>::type) ", "", row["kernel"])[:48]
        cells = [f"`{name}`", figures(1e6 * row["seconds_a_launch"]), f"{row['launches_a_call']:,g}"]
        work = {unit: shown for unit, shown in UNITS.items() if unit in row}
        done = ", ".join(scaled(row[unit], shown) for unit, shown in work.items())
        rate = ", ".join(scaled(row[f"{unit}_per_second"], f"{shown}/s") for unit, shown in work.items())
        no_work = ["not counted" if is_ours(row["kernel"]) else "–", "–", "–"]
        of_limit = [done, rate, f"{row['fraction_of_limit']:.2f}"] if work else no_work
        rows.append([*cells, f"{row['share']:.1%}", *of_limit])
    if others := content["kernels"][count:]:
        launches, share = (sum(row[key] for row in others) for key in ("launches_a_call", "share"))
        rows.append([f"{len(others)} others", "–", f"{launches:,g}", f"{share:.1%}", "–", "–", "–"])
    idle = f"{content['seconds_in_none'] / content['seconds']:.1%}"
    rows.append(["no kernel: launches, Python", "–", "–", idle, "–", "–", "–"])
    time = f"{figures(1e3 * content['seconds'])} ms a call"
    layer = short_name(content["workload"]["name"])
    title = f"{content['contestant']}, {layer}, {content['pass']}: {time}"
    limits = content["limits"]
    note = (
        f"Limits measured here: torch.add(out=) {scaled(limits['bytes_per_second'], 'B/s')}, a square product in this "
        f"dtype {scaled(limits['flops_per_second'], 'FLOP/s')}. –: not a kernel of ours, or none at all."
    )
    return Grid(head, rows, title, [note])


def sizes(content: Record) -> list[float]:
    """Return the sizes of a sweep's columns: all that were measured or published."""
    measured = {point["x"] for line in content["lines"].values() for point in line["points"]}
    return sorted(measured.union(*content["published"].values()))


def size_name(content: Record, x: float) -> str:
    return f"{x:.0%}" if content["axis"] == "density" else f"{x:,}"


def sweep(content: Record) -> Grid:
    """Tabulate a sweep by size, with the largest error: contestants, then published values, then ratios."""
    columns = sizes(content)
    rows: list[list[str]] = []

    def add(name: str, points: list[Record], shown: Callable[[float], str], key: str = "value", gap: str = "") -> None:
        by_x = {point["x"]: shown(point[key]) for point in points if key in point}
        errors = [point["max_error"] for point in points if key == "value" and "max_error" in point]
        if by_x:
            rows.append([name, *(by_x.get(x, gap) for x in columns), f"{max(errors):.0e}" if errors else ""])

    for label, line in content["lines"].items():
        add(label, line["points"], figures, gap="–")
        if content["axis"] == "channels":
            add("  memory", line["points"], lambda size: scaled(size, "B"), "extra_memory_bytes")
    for label, values in content["published"].items():
        add(label, [{"x": x, "value": value} for x, value in values.items()], figures)
    for ratio in content["ratios"]:
        add(ratio["name"], ratio["points"], lambda value: f"{figures(value)}×")
        add("  published", ratio["published"], lambda value: f"{figures(value)}×")
    unit = content["unit"].replace("us", "µs")
    return Grid([unit, *(size_name(content, x) for x in columns), "error"], rows, content["title"], content["notes"])


def speedup(record: Record) -> float | None:
    """Return ``torch.nn``'s time over ours, each the faster of launched and in a CUDA graph; None unless both ran."""
    best: dict[str, float] = {}
    for name, row in record["contestants"].items():
        if "seconds" in row:
            who = name.removesuffix(" in a CUDA graph")
            best[who] = min(row["seconds"], best.get(who, row["seconds"]))
    return best["torch.nn"] / best[OURS] if {"torch.nn", OURS} <= best.keys() else None


def summary(records: list[Record]) -> str:
    """Summarise the :func:`speedup` of a run's layers in a sentence."""
    ratios = sorted(ratio for record in records if (ratio := speedup(record)) is not None)
    return (
        f"The faster of torch.nn's times over the faster of ours, of {len(ratios)} layers: "
        f"from {times(ratios[0])} to {times(ratios[-1])}, "
        f"half of them {times(statistics.median(ratios))} or more."
    )


def mark(row: Record) -> str:
    """Return a dagger if the result is wrong, else nothing."""
    return " †" if (row.get("max_error") or 0) > WRONG else ""


def step(row: Record) -> str:
    return figures(row["microseconds_a_step"])


def times(ratio: float) -> str:
    return f"{ratio:.1f}×" if ratio < 100 else f"{ratio:,.0f}×"


def figures(value: float) -> str:
    """Format a number with three significant figures, or with all digits before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def scaled(value: float, unit: str) -> str:
    """Format a quantity with a prefix: 3.04 TB/s, 512 MB."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{figures(value / size)} {prefix}{unit}"
    return f"{value} {unit}"
