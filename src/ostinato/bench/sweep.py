"""Many contestants over one growing size: how a sweep is measured, and which lines and ratios present it."""

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
    """One line's values, or the least of several lines', divided by another's, and what was published of that."""

    name: str
    of: str | tuple[str, ...]
    to: str
    published: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """Workloads that differ in one size, and how their results are presented."""

    name: str
    title: str
    axis: str  # the field of the workloads that grows
    axis_label: str
    workloads: dict[str, list[Workload]]  # by type of device
    together: bool = False  # whether CPU and GPU are compared; otherwise the GPU runs alone, if there is one
    unit: str = "ms"
    quantity: str = "seconds"
    published: dict[str, Values] = field(default_factory=dict)  # by label, in the same unit
    ratios: tuple[Ratio, ...] = ()
    note: str = ""
    sizes: dict[str, str] = field(default_factory=dict)  # the other sizes, if they depend on the type of device
    small: float = math.inf  # the largest size of the quick tables, 0 for none

    def measure(self, devices: list[torch.device], seconds: float) -> dict[str, Any]:
        """Measure all workloads; return their records, and the wrong results of ours.

        Args:
            devices: the CPU, and the GPU if there is one.
            seconds: time that the CPU spends on the contestants of a workload.
        """
        results: list[Record] = []
        wrong: list[str] = []
        running = [device for device in devices if device.type in self.workloads]
        for device in running if self.together else running[-1:]:
            for work in self.workloads[device.type]:
                try:
                    results += ({"device_type": device.type, **record} for record in measure(work, device, seconds))
                except WrongResult as error:
                    wrong.append(str(error))
        return {"table": self.name, "wrong": wrong, "results": results}

    def shown(self, run: Record) -> Record:
        """Return a run with all that its table and plot show: lines over the axis, published values, ratios, notes."""
        results = run["results"]
        lines = _lines(self, results)
        values: dict[str, Values] = {
            label: {point["x"]: point["value"] for point in line["points"]} for label, line in lines.items()
        }
        ran = dict.fromkeys(record["device_type"] for record in results)
        named = [
            {"contestants": {_label(self, record, who): row for who, row in record["contestants"].items()}}
            for record in results
        ]
        needs_gpu = "cuda" in self.workloads and "cuda" not in ran
        return run | {
            "title": ": ".join([self.title, *(self.sizes[kind] for kind in ran if kind in self.sizes)]),
            "axis": self.axis,
            "axis_label": self.axis_label,
            "unit": self.unit,
            "lines": lines,
            "published": self.published,
            "ratios": _ratios(self.ratios, values),
            "notes": [
                *report.dashes(named),
                *["The GPU's part needs a CUDA device."] * needs_gpu,
                *[self.note] * bool(self.note),
            ],
        }


def _lines(sweep: Sweep, results: list[Record]) -> dict[str, Any]:
    """Return the points over the axis of each contestant and of the limit, by label."""
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
    """Return the label of a contestant, or of the limit, in the table and plot."""
    work = record["workload"]
    where = {"cpu": ", CPU", "cuda": ", GPU"}[record["device_type"]] if sweep.together else ""
    if work["kind"] == "layer":
        layer = {"mingru": "MinGRU", "minlstm": "MinLSTM"}[work["cell"]]
        ours = {OURS: f"{layer}, scan", TIME_LOOP: f"{layer}, time loop", FROM_HOST: f"{layer}, scan and transfer"}
        return ours.get(name, f"{layer}'s GEMM alone" if name == "limit" else name) + where
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
        numerators = [values.get(label, {}) for label in ((ratio.of,) if isinstance(ratio.of, str) else ratio.of)]
        least = {x: min(line[x] for line in numerators if x in line) for x in chain(*numerators)}
        points = [{"x": x, "value": least[x] / value} for x, value in values.get(ratio.to, {}).items() if x in least]
        if points:
            published = [{"x": x, "value": value} for x, value in ratio.published.items()]
            rows.append({"name": ratio.name, "points": points, "published": published})
    return rows
