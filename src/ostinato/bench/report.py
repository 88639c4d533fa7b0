"""The machine a run was made on, its tables and its JSON file."""

import json
import math
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

import ostinato
from ostinato.bench.measure import Record
from ostinato.files import replacing

PACKAGES = ("numpy", "numba", "triton", "cuda-core", "accelerated-scan", "minGRU-pytorch")
UNITS = {"bytes": "B", "flops": "FLOP"}


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure depends on: device, versions, commit and date."""
    versions = {
        "ostinato": ostinato.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{package: _version(package) for package in PACKAGES},
    }
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "device_type": device.type,
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
    """The commit of the checkout this package is in, "-dirty" if its files have changed; None outside one."""
    source = Path(__file__).parents[1]
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


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
        result.add_row(f"{record['pass']}: {_scaled(record[unit], UNITS[unit])}", style="bold")
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
                cells.append(_scaled(row["extra_memory_bytes"], "B"))
            if error is None:
                notes[name] = "another function, so no error is stated"
            cells.append("" if error is None else f"{error:.0e}")
            result.add_row(f"  {name}", *cells)
    result.caption = "\n".join(f"{name}: {note}" for name, note in notes.items())
    return result


def _speed(row: Record, unit: str) -> list[str]:
    return [f"{_three_figures(row['seconds'] * 1e3)} ms", _scaled(row[f"{unit}_per_second"], f"{UNITS[unit]}/s")]


def _scaled(value: float, unit: str) -> str:
    """With a prefix: 3.04 TB/s, 512 MB."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{_three_figures(value / size)} {prefix}{unit}"
    return f"{value} {unit}"


def _three_figures(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
