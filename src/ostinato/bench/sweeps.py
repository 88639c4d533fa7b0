"""One size grown over many contestants: the tables of the documents this project comes from, and how to measure them.

==================  =============================================================================================
``lengths-*``       a course project's minGRU and minLSTM in CUDA on an RTX 4090 (CS179, Caltech), sizes not stated
``transfer-*``      the repository CUDA_RNN (NumPy and Numba) on an RTX 3070 Laptop, input 64, hidden 128
``density-*``       Zhu et al. 2018, "Sparse Persistent RNNs", arXiv 1804.10223: at H = 2304, batch 4, 30 %,
``hidden``          and over one of the sizes at a time
``batch``, ``steps``
``training-*``      Feng et al. 2024, "Were RNNs All We Needed?", arXiv 2410.01201, section 4.1: batch 64 on a T4
==================  =============================================================================================
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ostinato.bench.measure import Record, WrongResult, measure
from ostinato.bench.peers import CELL_LOOPS, FROM_HOST, TIME_LOOP
from ostinato.bench.workloads import GRAPHS, OURS, PLAIN, Layer, Recurrence, Workload, f32
from ostinato.masks import block_name

Values = dict[int | float, float]


@dataclass(frozen=True)
class Ratio:
    """How many times one line's value is another's, and what was published of it."""

    name: str
    of: str
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


Progress = Callable[[str], None]


def measure_sweep(
    sweep: Sweep, devices: list[torch.device], seconds: float, longest: float, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """What a JSON file holds of the sweep: the records, and the lines made of them.

    Args:
        devices: the CPU, and the GPU if there is one.
        seconds: that the CPU spends on the contestants of a workload.
        longest: a contestant of which a call would take longer is left out from there on.
        progress: told what is being measured.
    """
    results: list[Record] = []
    wrong: list[str] = []
    chosen = [device for device in devices if device.type in sweep.on]
    running = chosen if sweep.together else chosen[-1:]
    for device in running:
        last: dict[tuple[str, str], tuple[float, Workload]] = {}
        for work in sweep.on[device.type]:
            progress(f"{sweep.name}: {work} on {device.type}")
            try:
                records = measure(work, device, seconds, _left_out(work, sweep.axis, last, longest))
            except WrongResult as error:
                wrong.append(str(error))
                continue
            for record in records:
                for name, row in record["contestants"].items():
                    if "seconds" in row:
                        last[work.cell, name] = row["seconds"], work
                results.append({"device_type": device.type, **record})
    return {
        "table": sweep.name,
        "title": ": ".join([sweep.title, *(sweep.sizes[d.type] for d in running if d.type in sweep.sizes)]),
        "axis": sweep.axis,
        "axis_label": sweep.axis_label,
        "unit": sweep.unit,
        "lines": _lines(sweep, results),
        "published": sweep.published,
        "ratios": _ratios(sweep, results),
        "note": sweep.note,
        "missing": _missing(sweep, devices, results),
        "wrong": wrong,
        "results": results,
    }


def _left_out(
    work: Workload, axis: str, last: dict[tuple[str, str], tuple[float, Workload]], longest: float
) -> dict[str, str]:
    """Those whose next call would take too long, if its time grew as the number of time steps."""
    reasons = {}
    for (cell, name), (seconds, before) in last.items():
        expected = seconds * work.length / before.length
        if cell == work.cell and expected > longest:
            value = getattr(work, axis)
            reasons[name] = f"left out from {axis} {value:,} on, where a call would take about {expected:.0f} s"
    return reasons


def _lines(sweep: Sweep, results: list[Record]) -> dict[str, Any]:
    """For each contestant and limit, by what it is called, its values over the axis."""
    lines: dict[str, Any] = {}
    for record in results:
        x = record["workload"][sweep.axis]
        for name, row in {**record["contestants"], "limit": record.get("limit", {})}.items():
            if row.get("unavailable") == "is what the plan chooses":
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
        blocks = "" if work["block"] == (1, 1) else f" in {block_name(work['block'])} blocks"
        return f"{name}{blocks}" if name.startswith(OURS) else name
    return name + where


def _ratios(sweep: Sweep, results: list[Record]) -> list[dict[str, Any]]:
    values = {label: {p["x"]: p["value"] for p in line["points"]} for label, line in _lines(sweep, results).items()}
    values |= sweep.published
    rows = []
    for ratio in sweep.ratios:
        above, below = values.get(ratio.of, {}), values.get(ratio.to, {})
        points = [{"x": x, "value": above[x] / below[x]} for x in above if x in below]
        if points:
            published = [{"x": x, "value": value} for x, value in ratio.published.items()]
            rows.append({"name": ratio.name, "of": ratio.of, "to": ratio.to, "points": points, "published": published})
    return rows


def _missing(sweep: Sweep, devices: list[torch.device], results: list[Record]) -> list[str]:
    """Why a contestant has no value, or not everywhere."""
    reasons: dict[str, str] = {}
    if "cuda" in sweep.on and not any(device.type == "cuda" for device in devices):
        reasons["GPU"] = "this part of the table needs a CUDA device"
    for record in results:
        for name, row in record["contestants"].items():
            if "unavailable" in row and row["unavailable"] != "is what the plan chooses":
                where = {"cpu": "CPU", "cuda": "GPU"}[record["device_type"]]
                reasons.setdefault(f"{name} ({where})", row["unavailable"])
    return [f"{name}: {reason}" for name, reason in reasons.items()]


# The tables

LENGTHS = tuple(4**power for power in range(4, 9))  # 256 to 65,536
DEMO_LENGTHS = tuple(4**power for power in range(4, 10))  # 256 to 262,144
TRANSFER_LENGTHS = tuple(2**power for power in range(3, 11))  # 8 to 1,024
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
NAMES = {"mingru": "MinGRU", "minlstm": "MinLSTM"}
TORCH = {"mingru": "torch.nn.GRU", "minlstm": "torch.nn.LSTM"}

# Milliseconds by T.
PUBLISHED_LENGTHS: dict[str, dict[str, Values]] = {
    "mingru": {
        "published: CPU time loop": {256: 634, 1024: 2395, 4096: 5493},
        "published: CPU scan": {256: 32.8, 1024: 97.6, 4096: 300, 16384: 2683, 65536: 10989},
        "published: GPU scan": {256: 25.8, 1024: 92.1, 4096: 340, 16384: 1333, 65536: 5330},
    },
    "minlstm": {
        "published: CPU time loop": {256: 701.0, 1024: 2966.7, 4096: 12035.1},
        "published: CPU scan": {256: 37.0, 1024: 96.8, 4096: 416.5, 16384: 2993.6, 65536: 13005.4},
        "published: GPU scan": {256: 22.0, 1024: 107.8, 4096: 431.5, 16384: 1693.9, 65536: 6709.8},
    },
}
PUBLISHED_TRANSFER: dict[str, Values] = {"mingru": {1024: 6.31}, "minlstm": {1024: 9.44}}


# On the CPU, where persistent layers are pruned ones.
ON_CPU: dict[str, Any] = {"block": (16, 1), "dtype": f32, "who": (*PLAIN, Recurrence.limit_name)}
OVER_TORCH = Ratio("torch.nn / Ostinato", "torch.nn", OURS)
BLOCKS_OVER_TORCH = Ratio("torch.nn / Ostinato in 16x1 blocks", "torch.nn", f"{OURS} in 16x1 blocks")


def sweeps(quick: bool) -> list[Sweep]:
    """All tables; `quick` ends within two minutes on two cores."""
    tables = [lengths_sweep(cell, 512, [n for n in LENGTHS if n <= 16384] if quick else LENGTHS) for cell in NAMES]
    tables += [_transfer(cell) for cell in NAMES]
    tables += [_density(cell, quick) for cell in ("RNN", "LSTM")]
    tables += [_hidden(quick), _batch(quick), _steps(quick)]
    tables += [_training(512, quick)] if quick else [_training(512, quick), _training(4096, quick)]
    return tables


def lengths_sweep(cell: str, size: int, lengths: tuple[int, ...] | list[int]) -> Sweep:
    """One layer forward at growing lengths: a loop over time, the scan, and PyTorch's counterpart."""

    def works(*who: str) -> list[Workload]:
        return [Layer(cell, 1, n, size, size, passes=("forward",), who=who) for n in lengths]

    name = NAMES[cell]
    published = PUBLISHED_LENGTHS[cell] if size == 512 else {}
    return Sweep(
        f"lengths-{cell}",
        f"{name} forward, batch 1, {size} inputs, {size} hidden, float32",
        "length",
        "sequence length T (time steps)",
        {device: works(TIME_LOOP, OURS, TORCH[cell]) for device in ("cpu", "cuda")},
        together=True,
        quantity="latency_seconds",
        published=published,
        ratios=(
            Ratio("CPU: time loop / scan", f"{name}, time loop, CPU", f"{name}, scan, CPU"),
            Ratio(f"CPU: {TORCH[cell]} / scan", f"{TORCH[cell]}, CPU", f"{name}, scan, CPU"),
            Ratio(f"GPU: {TORCH[cell]} / scan", f"{TORCH[cell]}, GPU", f"{name}, scan, GPU"),
            Ratio("published GPU scan / GPU scan", "published: GPU scan", f"{name}, scan, GPU"),
            Ratio("published CPU scan / CPU scan", "published: CPU scan", f"{name}, scan, CPU"),
        ),
        note="Published: a course project's CUDA on an RTX 4090 and an i9-12900K; it does not state its sizes."
        if published
        else "",
    )


def _transfer(cell: str) -> Sweep:
    def works(*who: str) -> list[Workload]:
        return [Layer(cell, 1, n, 64, 128, passes=("forward",), who=who) for n in TRANSFER_LENGTHS]

    name = NAMES[cell]
    scans = f"{name}, scan, CPU", f"{name}, scan, GPU", f"{name}, scan and transfer, GPU"
    return Sweep(
        f"transfer-{cell}",
        f"{name} forward, batch 1, 64 inputs, 128 hidden, float32: CPU against GPU",
        "length",
        "sequence length T (time steps)",
        {"cpu": works(OURS, TORCH[cell]), "cuda": works(OURS, FROM_HOST, TORCH[cell])},
        together=True,
        quantity="latency_seconds",
        ratios=(
            Ratio("CPU / GPU", scans[0], scans[1], PUBLISHED_TRANSFER[cell]),
            Ratio("CPU / GPU with the transfer", scans[0], scans[2]),
        ),
        note="Published: CUDA_RNN on an RTX 3070 Laptop, whose CPU side is NumPy.",
    )


def _density(cell: str, quick: bool) -> Sweep:
    loops = (*GRAPHS, "cuSPARSE", "Ostinato, sparse kernel", Recurrence.limit_name)
    gpu = [Recurrence(cell, 2304, 4, density=density, who=loops) for density in DENSITIES]
    gpu += [
        Recurrence(cell, 2304, 4, density=density, block=(16, 1), who=(OURS, "Ostinato, block kernel"))
        for density in DENSITIES[:-1]
    ]
    size = 384 if quick else 1024
    cpu = [Recurrence(cell, size, density=density, **ON_CPU) for density in DENSITIES]
    return _recurrence(
        f"density-{cell.lower()}",
        f"{cell} forward over density",
        "density",
        "density of the recurrent weights",
        {"cpu": cpu, "cuda": gpu},
        {"cpu": f"{size} hidden, batch 1, float32", "cuda": "2304 hidden, batch 4, float16"},
        replace(OVER_TORCH, published={0.3: 6.0}),
        BLOCKS_OVER_TORCH,
        Ratio("cuSPARSE / Ostinato", "cuSPARSE", OURS),
        note="Published: 6 times the next best algorithm at 30 %, on the authors' GPU.",
    )


def _hidden(quick: bool) -> Sweep:
    who = (*GRAPHS, "cuSPARSE", Recurrence.limit_name)
    gpu = [
        Recurrence("RNN", hidden, 4, density=0.1, block=(16, 1), who=who)
        for hidden in (256, 768, 1024, 2304, 4608, 8192)
    ]
    sizes = (256, 512) if quick else (256, 512, 1024, 2304)
    cpu = [Recurrence("RNN", hidden, density=0.1, **ON_CPU) for hidden in sizes]
    return _recurrence(
        "hidden",
        "RNN forward over hidden size, 10 % in 16x1 blocks",
        "hidden",
        "hidden size H",
        {"cpu": cpu, "cuda": gpu},
        {"cpu": "batch 1, float32", "cuda": "batch 4, float16"},
        Ratio("torch.nn / Ostinato", "torch.nn", f"{OURS} in 16x1 blocks"),
    )


def _batch(quick: bool) -> Sweep:
    who = (*GRAPHS, "cuSPARSE", "Ostinato, sparse kernel", Recurrence.limit_name)
    gpu = [Recurrence("LSTM", 2304, batch, density=0.3, who=who) for batch in (1, 2, 4, 8, 16, 32, 64)]
    sizes = (1, 4) if quick else (1, 4, 16, 64)
    cpu = [Recurrence("LSTM", 384, batch, 100, density=0.1, **ON_CPU) for batch in sizes]
    return _recurrence(
        "batch",
        "LSTM forward over batch",
        "batch",
        "batch size B",
        {"cpu": cpu, "cuda": gpu},
        {"cpu": "384 hidden, 10 % in 16x1 blocks, float32", "cuda": "2304 hidden, 30 %, float16"},
        OVER_TORCH,
        BLOCKS_OVER_TORCH,
    )


def _steps(quick: bool) -> Sweep:
    who = (*GRAPHS, "cuSPARSE", Recurrence.limit_name)
    gpu = [Recurrence("LSTM", 2304, 4, length, density=0.3, who=who) for length in (16, 64, 256, 1024, 4096)]
    lengths = (1, 16, 256) if quick else (1, 16, 256, 4096)
    cpu = [Recurrence("LSTM", 384, 1, length, density=0.1, **ON_CPU) for length in lengths]
    return _recurrence(
        "steps",
        "LSTM forward over time steps",
        "length",
        "time steps T",
        {"cpu": cpu, "cuda": gpu},
        {"cpu": "384 hidden, batch 1, 10 % in 16x1 blocks, float32", "cuda": "2304 hidden, batch 4, 30 %, float16"},
        OVER_TORCH,
        BLOCKS_OVER_TORCH,
    )


def _recurrence(
    name: str,
    title: str,
    axis: str,
    axis_label: str,
    on: dict[str, Any],
    sizes: dict[str, str],
    *ratios: Ratio,
    note: str = "",
) -> Sweep:
    return Sweep(name, title, axis, axis_label, on, unit="us a step", ratios=ratios, note=note, sizes=sizes)


def _training(length: int, quick: bool) -> Sweep:
    def works(*sizes: int) -> list[Workload]:
        return [
            Layer(cell, 64, length, n, n, passes=("forward+backward",), who=(OURS, TORCH[cell], CELL_LOOPS[cell]))
            for n in sizes
            for cell in NAMES
        ]

    on_cpu = (64,) if quick or length > 512 else (64, 256)
    pairs = [(cell, other) for cell in NAMES for other in (TORCH[cell], CELL_LOOPS[cell])]
    return Sweep(
        f"training-{length}",
        f"forward and backward, batch 64, T = {length:,}, as many inputs as hidden units, float32",
        "channels",
        "hidden size H",
        {"cpu": works(*on_cpu), "cuda": works(64, 256, 1024)},
        ratios=tuple(Ratio(f"{other} / {NAMES[cell]}", other, f"{NAMES[cell]}, scan") for cell, other in pairs),
        note="Published: GRU takes 175 and LSTM 235 times as long at T = 512, both over 1,300 times at 4,096, on a T4.",
    )
