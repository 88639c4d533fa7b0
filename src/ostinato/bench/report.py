"""The machine a run was made on, its tables and its JSON file."""

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

import ostinato
from ostinato.bench.measure import Record
from ostinato.bench.peers import PLANNED
from ostinato.bench.workloads import OURS
from ostinato.files import replacing

PACKAGES = ("numpy", "numba", "triton", "cuda-core", "accelerated-scan", "minGRU-pytorch", "torchrl")
UNITS = {"bytes": "B", "flops": "FLOP"}
PEERS_WITHOUT_GRADIENT = {
    "cuda": {
        "cuDNN": "torch.nn",
        "cuDNN, graph": "torch.nn in a CUDA graph",
        "GEMMs": "GEMMs in a CUDA graph",
        "cuSPARSE": "cuSPARSE",
        "dense": "Ostinato, dense kernel",
        "sparse": "Ostinato, sparse kernel",
        "block": "Ostinato, block kernel",
    },
    "cpu": {"torch.nn": "torch.nn"},
}
PEERS_WITH_GRADIENT = {
    "cuda": {
        "in a graph": "Ostinato in a CUDA graph",
        "cuDNN": "torch.nn",
        "cuDNN, graph": "torch.nn in a CUDA graph",
        "torchrl": "torchrl",
    },
    "cpu": {"torch.nn": "torch.nn"},
}


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on: device, versions, commit and date."""
    versions = {
        "ostinato": ostinato.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **{package: _version(package) for package in PACKAGES},
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "device_type": device.type,
        "processor": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "commit": _commit(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    return model[1] if model else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout this package is in, "-dirty" if its files have changed; None outside one.

    Where the files were copied without their history, what ``OSTINATO_COMMIT`` says.
    """
    source = Path(__file__).parents[1]
    if commit := os.environ.get("OSTINATO_COMMIT"):
        return commit
    try:
        git = ["git", "-C", str(source)]
        top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True)
        if Path(top.stdout.strip()) / "src" / "ostinato" != source:
            return None
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", str(source)], check=False)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + "-dirty" * (changed.returncode != 0)


def path_for(path: Path | None, name: str, device: torch.device) -> Path | None:
    """Where a run's file goes: `path` itself, or in that folder a file named after the run and the kind of device."""
    if path is None or not path.is_dir():
        return path
    return path / f"{name}-{'gpu' if device.type == 'cuda' else device.type}.json"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the file whole or not at all; a number that is not finite, which JSON lacks, as null."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def table(records: list[Record]) -> Table:
    """All passes of one workload, one row a contestant; notes beneath name those without time or error, and why."""
    unit = "bytes" if "bytes" in records[0] else "flops"
    with_memory = any("extra_memory_bytes" in row for record in records for row in record["contestants"].values())
    result = Table(title=records[0]["workload"]["name"], title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    result.padding, result.pad_edge = (0, 1, 0, 0), False
    result.add_column("", no_wrap=True)
    of_limit = "of limit" if unit == "bytes" else "x limit"
    for heading in ("time", "rate", of_limit, "x ours", *["memory"] * with_memory, "error"):
        result.add_column(heading, justify="right", no_wrap=True)
    notes: dict[str, str] = {}
    for record in records:
        result.add_row(f"{record['pass']}: {scaled(record[unit], UNITS[unit])}", style="bold")
        result.add_row(f"  {record['limit']['name']}, the limit", *_speed(record["limit"], unit), style="dim")
        for name, row in record["contestants"].items():
            if "unavailable" in row:
                notes[name] = row["unavailable"]
                continue
            fraction, times, error = row["fraction_of_limit"], row["times_ostinato"], row["max_error"]
            cells = _speed(row, unit)
            cells.append(f"{fraction:.2f}" if unit == "bytes" else f"{1 / fraction:.2f}")
            cells.append(f"{times:.2f}")
            if with_memory:
                cells.append(scaled(row["extra_memory_bytes"], "B"))
            if error is None:
                notes[name] = "another function, so no error is stated"
            cells.append("" if error is None else f"{error:.0e}")
            result.add_row(f"  {name}", *cells)
    result.caption = "\n".join(f"{name}: {note}" for name, note in notes.items())
    return result


def _speed(row: Record, unit: str) -> list[str]:
    return [f"{_three_figures(row['seconds'] * 1e3)} ms", scaled(row[f"{unit}_per_second"], f"{UNITS[unit]}/s")]


def scaled(value: float, unit: str) -> str:
    """With a prefix: 3.04 TB/s, 512 MB."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{_three_figures(value / size)} {prefix}{unit}"
    return f"{value} {unit}"


def _three_figures(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def recurrence_table(records: list[Record], device_type: str, first: bool) -> Table:
    """One row a workload: microseconds a step, and how many times ours, so that tables can follow each other."""
    training = records[0]["workload"]["kind"] == "training"
    peers = (PEERS_WITH_GRADIENT if training else PEERS_WITHOUT_GRADIENT)[device_type]
    result = Table(box=None, show_header=first, padding=(0, 1, 0, 0), pad_edge=False)
    result.add_column("microseconds a step", width=40)
    for heading, width in (("plan", 6), ("Ostinato", 8), ("error", 7)):
        result.add_column(heading, width=width, justify="right", no_wrap=True)
    for heading in peers:
        result.add_column(heading, width=14, justify="right", no_wrap=True)
        if heading in ("cuDNN", "torch.nn"):
            result.add_column("error", width=7, justify="right", no_wrap=True)
    if training:
        result.add_column("best to best", width=12, justify="right", no_wrap=True)
    for record in records:
        rows = record["contestants"]
        ours = rows[OURS]
        cells = [recurrence_name(record), ours["plan"]["path"], _microseconds(ours), f"{ours['max_error']:.1e}"]
        for name in peers.values():
            row = rows.get(name, {})
            timed = "seconds" in row
            cells.append(f"{_microseconds(row)} {_times(row['times_ostinato'])}" if timed else "-")
            if name == "torch.nn":
                cells.append(f"{row['max_error']:.1e}" if timed else "-")
        if training:
            ratio = speedup(record)
            cells.append("-" if ratio is None else f"{_three_figures(ratio)}x")
        result.add_row(*cells)
    return result


def recurrence_name(record: Record) -> str:
    """Of its workload, and of its pass where that is not the one its kind of benchmark is about."""
    work = record["workload"]
    inference = work["kind"] == "training" and record["pass"] == "forward"
    return f"{work['name']}, without gradient" if inference else work["name"]


def short_name(record: Record) -> str:
    """Of its workload, to fit on one line of a table."""
    name = record["workload"]["name"].replace("mingru", "MinGRU").replace("minlstm", "MinLSTM")
    for long, short in (("bfloat16", "bf16"), ("float", "fp"), ("linear_scan ", ""), (") to ", ") → ")):
        name = name.replace(long, short)
    return name


def speedup(record: Record) -> float | None:
    """``torch.nn``'s time over ours, each as launched or in a CUDA graph, whichever is faster; None if not both ran."""
    best: dict[str, float] = {}
    for name, row in record["contestants"].items():
        if "seconds" in row:
            who = name.removesuffix(" in a CUDA graph")
            best[who] = min(row["seconds"], best.get(who, row["seconds"]))
    return best["torch.nn"] / best[OURS] if {"torch.nn", OURS} <= best.keys() else None


def _microseconds(row: Record) -> str:
    return _three_figures(row["microseconds_a_step"])


def _times(ratio: float) -> str:
    return f"({_three_figures(ratio)}x)"


def why_missing(records: list[Record]) -> list[str]:
    """Each peer that could not run, and the first reason given for each."""
    reasons: dict[str, str] = {}
    for record in records:
        for name, row in record["contestants"].items():
            if "unavailable" in row and row["unavailable"] != PLANNED:
                reasons.setdefault(name, f"{row['unavailable']} ({record['workload']['name']})")
    return [f"{name}: {reason}" for name, reason in reasons.items()]


def sizes(content: Record) -> list[float]:
    """What the columns of a sweep's table stand for, its published values included."""
    measured = {point["x"] for line in content["lines"].values() for point in line["points"]}
    return sorted(measured.union(*content["published"].values()))


def size_name(content: Record, x: float) -> str:
    return f"{x:.0%}" if content["axis"] == "density" else f"{x:,}"


def sweep_rows(content: Record) -> list[tuple[str, str, list[str]]]:
    """A sweep as rows of name, style and cells: each contestant, its errors and memory, then published values and
    ratios."""
    rows = []

    def add(name: str, points: list[Record], key: str, shown: Callable[[float], str], style: str) -> None:
        by_x = {point["x"]: shown(point[key]) for point in points if key in point}
        if by_x:
            rows.append((name, style, [by_x.get(x, "") for x in sizes(content)]))

    for label, line in content["lines"].items():
        add(label, line["points"], "value", figures, "dim" if line["limit"] else "")
        add("  relative error", line["points"], "max_error", "{:.0e}".format, "dim")
        if content["axis"] == "channels":
            add("  memory", line["points"], "extra_memory_bytes", lambda size: scaled(size, "B"), "dim")
    for label, values in content["published"].items():
        add(label, [{"x": x, "value": value} for x, value in values.items()], "value", figures, "italic")
    for ratio in content["ratios"]:
        add(ratio["name"], ratio["points"], "value", lambda value: f"{figures(value)}x", "bold")
        add("  published", ratio["published"], "value", lambda value: f"{figures(value)}x", "italic")
    return rows


def sweep_table(content: Record) -> Table:
    """One column a size."""
    result = Table(title=content["title"], title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    result.add_column(content.get("value_label") or content["unit"], no_wrap=True)
    for x in sizes(content):
        result.add_column(size_name(content, x), justify="right", no_wrap=True)
    for name, style, cells in sweep_rows(content):
        result.add_row(name, *cells, style=style)
    return result


def sweep_markdown(content: Record) -> str:
    """The same as text."""
    header = [content.get("value_label") or content["unit"], *(size_name(content, x) for x in sizes(content))]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[name.strip(), *cells] for name, _, cells in sweep_rows(content)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{content['title']}, {content['device']}\n\n{table}\n"


def figures(value: float) -> str:
    """Three of them, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else _three_figures(value)
