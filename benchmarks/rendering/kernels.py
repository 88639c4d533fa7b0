"""Tables of where a kernel's time goes, and of what each of its optimisations is worth."""

from ostinato.bench import report
from ostinato.bench.grid import Grid
from ostinato.bench.peers import PLANNED
from ostinato.bench.report import figures
from ostinato.bench.shapes import KERNELS
from ostinato.bench.workloads import OURS, short_name
from rendering import runs
from rendering.speeds import milliseconds, share

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
    ("mingru (16, 4096, 1024) to 1024 bfloat16", "forward+backward"): "the GEMMs, then memory",
    ("minlstm (16, 4096, 1024) to 1024 bfloat16", "forward"): "the GEMM, then memory",
    ("minlstm (16, 4096, 1024) to 1024 bfloat16", "forward+backward"): "the GEMMs, then memory",
    ("mingru (1, 65536, 256) to 256 bfloat16", "forward"): "chained blocks",
    ("mingru (64, 1000, 10) to 100 float32", "forward+backward"): "Python: launches",
    ("mingru (256, 128, 256) to 256 bfloat16", "forward+backward"): "Python: launches",
    ("mingru (256, 256, 1024) to 1024 bfloat16", "forward"): "the GEMM, then memory",
    ("mingru (1, 65536, 1024) to 1024 bfloat16", "forward"): "the GEMM, then chained blocks",
}


def ladder(name: str) -> str:
    """Tabulate how the time of layers falls as optimisations of the persistent kernels are added one by one."""
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
    for record in runs.load(name)["results"]:
        if not any(who in record["contestants"] for who in KERNELS):
            continue
        outcomes, row = record["contestants"], [short_name(record["workload"]["name"])]
        for who in steps.values():
            outcome = outcomes.get(who, {})
            if outcome.get("unavailable") == PLANNED:
                outcome = outcomes[OURS]
            row.append(report.step(outcome) if "seconds" in outcome else "–")
        rows.append(row)
    return runs.table(
        name, ["layer", *steps], rows, "–: that kernel's weights do not fit on the chip, or it is not for this mask."
    )


def ablation(name: str) -> str:
    """Tabulate microseconds a step of the persistent kernels, with one optimisation at a time switched off."""
    layers: dict[tuple[str, str], dict[str, float]] = {}
    for row in runs.load(name)["results"]:
        layers.setdefault((row["layer"], row["kernel"]), {})[row["switched_off"]] = row["microseconds_a_step"]
    switches = list(dict.fromkeys(off for times in layers.values() for off in times if off))
    rows = []
    for (layer, kernel), times in layers.items():
        cells = [f"{figures(times[off])} ({times[off] / times['']:.2f}×)" if off in times else "–" for off in switches]
        rows.append([short_name(layer), kernel, f"**{figures(times[''])}**", *cells])
    head = ["µs a step", "kernel", "as it is", *(f"without {off}" for off in switches)]
    return runs.table(name, head, rows, "–: that kernel has no such thing.")


def bounds(name: str) -> str:
    """Tabulate the limit of each shape of BOUND_BY, its time, and what it is bound by."""
    rows = []
    for record in runs.load(name)["results"]:
        work = record["workload"]["name"]
        if (work, record["pass"]) in BOUND_BY:
            ours, least = record["contestants"][OURS], record["limit"]
            row = [short_name(work), record["pass"], milliseconds(least), f"**{milliseconds(ours)}**"]
            rows.append([*row, share(ours), BOUND_BY[work, record["pass"]]])
    return runs.table(name, ["", "pass", "at least, ms", "measured, ms", "share", "bound by"], rows)


def profile(name: str) -> str:
    """Tabulate the kernels of a call, the longest first."""
    grid = report.profile(runs.load(name), 6)
    return f"{grid.title}.\n\n{runs.sourced(grid, name)}"


def published_profile() -> str:
    """Tabulate the course project's own profile of minGRU at T = 4,096, as published on its page."""
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
