"""One size grown over many contestants: how it is measured, and as which lines and ratios it is shown."""

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from ostinato.bench import report
from ostinato.bench.measure import Record, WrongResult, measure
from ostinato.bench.peers import FROM_HOST, PLANNED, TIME_LOOP
from ostinato.bench.workloads import OURS, Workload
from ostinato.masks import block_name

Values = dict[int | float, float]


@dataclass(frozen=True)
class Ratio:
    """How many times one line's value, or the least of several, is another's, and what was published of it."""

    name: str
    of: str | tuple[str, ...]
    to: str
    published: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """Workloads that differ in one size, and what is said of them."""

    name: str
    title: str
    axis: str  # the workload's field that grows
    axis_label: str
    on: dict[str, list[Workload]]  # by kind of device
    together: bool = False  # whether CPU and GPU stand side by side; otherwise the GPU, if there is one, runs alone
    unit: str = "ms"
    quantity: str = "seconds"
    published: dict[str, Values] = field(default_factory=dict)  # lines in the same unit
    ratios: tuple[Ratio, ...] = ()
    note: str = ""
    sizes: dict[str, str] = field(default_factory=dict)  # of the other sizes, where they differ with the device
    small: float = math.inf  # the largest size of the quick tables, 0 for none

    def measure(self, devices: list[torch.device], seconds: float) -> dict[str, Any]:
        """The records, and what was wrong.

        Args:
            devices: the CPU, and the GPU if there is one.
            seconds: that the CPU spends on the contestants of a workload.
        """
        results: list[Record] = []
        wrong: list[str] = []
        running = [device for device in devices if device.type in self.on]
        for device in running if self.together else running[-1:]:
            for work in self.on[device.type]:
                try:
                    results += ({"device_type": device.type, **record} for record in measure(work, device, seconds))
                except WrongResult as error:
                    wrong.append(str(error))
        return {"table": self.name, "wrong": wrong, "results": results}

    def shown(self, run: Record) -> Record:
        """A run with what is said of it: lines over the axis, what was published, and ratios."""
        results = run["results"]
        lines = _lines(self, results)
        values: dict[str, Values] = {
            label: {p["x"]: p["value"] for p in line["points"]} for label, line in lines.items()
        }
        ran = dict.fromkeys(record["device_type"] for record in results)
        named = [
            {"contestants": {_label(self, record, who): row for who, row in record["contestants"].items()}}
            for record in results
        ]
        unseen = ["The GPU's part needs a CUDA device."] if "cuda" in self.on and "cuda" not in ran else []
        return run | {
            "title": ": ".join([self.title, *(self.sizes[kind] for kind in ran if kind in self.sizes)]),
            "axis": self.axis,
            "axis_label": self.axis_label,
            "unit": self.unit,
            "lines": lines,
            "published": self.published,
            "ratios": _ratios(self.ratios, values),
            "notes": [*report.dashes(named), *unseen, *filter(None, [self.note])],
        }


def _lines(sweep: Sweep, results: list[Record]) -> dict[str, Any]:
    """For each contestant and limit, by what it is called, its values over the axis."""
    lines: dict[str, Any] = {}
    for record in results:
        x = record["workload"][sweep.axis]
        for name, row in {**record["contestants"], "limit": record.get("limit", {})}.items():
            if row.get("unavailable") == PLANNED:
                row = record["contestants"][OURS]
            if "seconds" not in row:
                continue
            line = lines.setdefault(_label(sweep, record, name), {"limit": name == "limit", "points": []})
            value = row.get(sweep.quantity, row["seconds"])
            point = {"x": x, "value": 1e3 * value if sweep.unit == "ms" else 1e6 * value / record["steps"]}
            for key in ("max_error", "extra_memory_bytes"):
                if row.get(key) is not None:
                    point[key] = row[key]
            line["points"].append(point)
    return lines


def _label(sweep: Sweep, record: Record, name: str) -> str:
    work = record["workload"]
    where = {"cpu": ", CPU", "cuda": ", GPU"}[record["device_type"]] if sweep.together else ""
    if work["kind"] == "layer":
        layer = {"mingru": "MinGRU", "minlstm": "MinLSTM"}[work["cell"]]
        own = {OURS: f"{layer}, scan", TIME_LOOP: f"{layer}, time loop", FROM_HOST: f"{layer}, scan and transfer"}
        return own.get(name, f"{layer}'s GEMM alone" if name == "limit" else name) + where
    if name == "limit":
        return f"the limit: {record['limit']['name']}"
    if work["kind"] == "persistent":
        block = tuple(work["block"])  # a list, if it comes from a file
        blocks = "" if block == (1, 1) else f" in {block_name(block)} blocks"
        return f"{name}{blocks}" if name.startswith(OURS) else name
    return name + where


def _ratios(ratios: tuple[Ratio, ...], values: dict[str, Values]) -> list[Record]:
    rows = []
    for ratio in ratios:
        above = [values.get(label, {}) for label in ((ratio.of,) if isinstance(ratio.of, str) else ratio.of)]
        least = {x: min(line[x] for line in above if x in line) for x in chain(*above)}
        points = [{"x": x, "value": least[x] / value} for x, value in values.get(ratio.to, {}).items() if x in least]
        if points:
            published = [{"x": x, "value": value} for x, value in ratio.published.items()]
            rows.append({"name": ratio.name, "points": points, "published": published})
    return rows
