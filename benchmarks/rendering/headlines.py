"""The tables of README.md: what a reader may ask first, gathered from several runs."""

import statistics

from ostinato.bench import report
from ostinato.bench.grid import WRONG, Grid
from ostinato.bench.peers.recurrent import FROM_EQUATION
from ostinato.bench.report import figures
from ostinato.bench.workloads import OURS
from rendering import runs
from rendering.runs import Record
from rendering.speeds import milliseconds

# By type of device: the row's title, and the kind of run, workload and pass that it is of.
HEADLINES = {
    "gpu": (
        (
            "minGRU trained, 16 × 4,096 steps, 1,024 units, bf16",
            "layer",
            "mingru (16, 4096, 1024) to 1024 bfloat16",
            "forward+backward",
        ),
        ("the scan alone, (8, 4096, 1536), fp32", "scan", "linear_scan (8, 4096, 1536) float32", "forward"),
        (
            "GRU trained, 16 × 512 steps, 1,024 units, bf16",
            "training",
            "GRU 1024 B16 T512 dense bfloat16",
            "forward+backward",
        ),
        (
            "LSTM trained, 16 × 512 steps, 1,024 units, bf16",
            "flashrnn",
            "LSTM 1024 B16 T512 dense bfloat16",
            "forward+backward",
        ),
        (
            "an LSTM from its equation, trained, 16 × 256 steps, 1,024 units, bf16",
            "equations",
            "LSTM 1024 B16 T256 dense bfloat16",
            "forward+backward",
        ),
        (
            "sLSTM in 4 heads, trained, 16 × 512 steps, 1,024 units, bf16",
            "slstm",
            "SLSTM (16, 512, 1024) to 1024 bfloat16 in 4 heads",
            "forward+backward",
        ),
        ("GRU, 16 × 256 steps, 1,024 units, bf16", "persistent", "GRU 1024 B16 T256 dense bfloat16", "forward"),
        (
            "LSTM, 4 × 256 steps, 4,608 units, a tenth kept, fp16",
            "persistent",
            "LSTM 4608 B4 T256 10% 16x1 float16",
            "forward",
        ),
    ),
    "cpu": (
        (
            "minGRU trained, 4,096 steps, 256 units, fp32",
            "layer",
            "mingru (1, 4096, 256) to 256 float32",
            "forward+backward",
        ),
        (
            "GRU trained, 16 × 200 steps, 256 units, fp32",
            "training",
            "GRU 256 B16 T200 dense float32",
            "forward+backward",
        ),
        (
            "LSTM, 1,000 steps, 1,024 units, a tenth kept, fp32",
            "persistent",
            "LSTM 1024 B1 T1000 10% 16x1 float32",
            "forward",
        ),
    ),
}


# By type of device: groups of layers whose speedups differ most, and whether a workload belongs to them.
GROUPS = {
    "gpu": (
        ("in bfloat16 or float16", lambda work: work["dtype"] != "float32"),
        ("in float32, rounded to tf32", lambda work: work["dtype"] == "float32"),
    ),
    "cpu": (
        ("RNN and GRU, and packed LSTM, in float32", lambda work: work["cell"] != "LSTM" or work["shortest"]),
        ("LSTM that is not packed, in float32", lambda work: work["cell"] == "LSTM" and not work["shortest"]),
    ),
}
# Where a run measured only some workloads of another kind: its command; and which contestant is ours, if not OURS.
COMMANDS = {
    "flashrnn": 'training --only "T512 dense"',
    "equations": "training --only T256",
    "slstm": "recurrence --only SLSTM",
}
OWN = {"equations": FROM_EQUATION}


def headlines(device: str) -> str:
    """Tabulate HEADLINES, with the limit and the fastest of the others whose result is right."""
    rows, names = [], []
    for what, kind, workload, pass_name in HEADLINES[device]:
        name = f"{kind}-{device}"
        (record,) = (
            r for r in runs.load(name)["results"] if (r["workload"]["name"], r["pass"]) == (workload, pass_name)
        )
        timed = {who: row for who, row in record["contestants"].items() if "seconds" in row}
        ours, limit = timed[OWN.get(kind, OURS)]["seconds"], record.get("limit")
        theirs = [row["seconds"] for who, row in timed.items() if who.startswith("torch.nn")]
        others = [
            (row["seconds"], who)
            for who, row in timed.items()
            if not who.startswith((OURS, "torch.nn")) and is_right(row)
        ]
        cells = ["–", "–", "–"]
        if limit:
            cells[0] = milliseconds(limit)
        if others:
            seconds, who = min(others)
            cells[1] = f"{figures(1e3 * seconds)}, {report.COLUMNS.get(who, who)}"
        if theirs:
            cells[2] = f"{figures(1e3 * min(theirs))} ({report.times(min(theirs) / ours)})"
        command = f"`ostinato bench {COMMANDS.get(kind, kind)}`"
        rows.append([what, f"**{figures(1e3 * ours)} ms**", *cells, command])
        names.append(name)
    head = ["", OURS, "limit", "fastest of the others", "torch.nn", "command"]
    return runs.sourced(Grid(head, rows), *dict.fromkeys(names))


def expected(device: str) -> str:
    """Tabulate the speedups of layers of random sizes, which nothing was tuned to, by the groups of GROUPS."""
    name = f"training-random-{device}"
    records, rows = runs.load(name)["results"], []
    for what, belongs in GROUPS[device]:
        group = [record for record in records if belongs(record["workload"])]
        launched = [r["contestants"]["torch.nn"]["seconds"] / r["contestants"][OURS]["seconds"] for r in group]
        cells = [spread(launched)]
        if device == "gpu":
            cells.append(spread([report.speedup(record) for record in group]))
        rows.append([what, str(len(group)), *cells])
    ratios = ["torch.nn / Ostinato", "each in a CUDA graph where that is faster"]
    return runs.table(name, ["trained at random sizes", "layers", *ratios][: len(rows[0])], rows)


def spread(ratios: list[float]) -> str:
    """Format the median, the least and the greatest ratio."""
    median, least, most = map(report.times, (statistics.median(ratios), min(ratios), max(ratios)))
    return f"**{median}** ({least} to {most})"


def is_right(row: Record) -> bool:
    return row["max_error"] is not None and row["max_error"] <= WRONG
