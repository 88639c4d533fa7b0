"""Tables of sweeps beside the published figures, and of every published claim beside our measurement."""

from collections.abc import Iterator, Mapping
from typing import Any

from ostinato.bench import capacity, papers, plots, report
from ostinato.bench.grid import Grid
from ostinato.bench.report import figures, speedup
from ostinato.bench.workloads import OURS
from rendering import runs
from rendering.runs import Record

SWEEPS = {sweep.name: sweep for sweep in papers.sweeps(quick=False)}


def swept(name: str) -> Record:
    """Load the run of a sweep, with all that its table and plot show."""
    return SWEEPS[name].shown(runs.load(f"papers-{name}-gpu"))


def sweep(name: str) -> str:
    content = swept(name)
    grid = report.sweep(content)
    if SWEEPS[name].together:
        grid.notes.append(f"CPU: {content.get('processor', 'of that machine')}, {content['threads']} threads.")
    plot = runs.plot(f"papers-{name}-gpu", content["title"])
    return f"**{content['title']}.**\n\n{runs.sourced(grid, f'papers-{name}-gpu')}\n{plot}"


def cpu_or_gpu(cell: str) -> str:
    """Tabulate one layer on the CPU, on the GPU, and on the GPU with transfers from and to the host."""
    content, name = swept(f"transfer-{cell}"), papers.NAMES[cell]
    labels = {"CPU": "scan, CPU", "GPU": "scan, GPU", "GPU, from and to the host": "scan and transfer, GPU"}
    lines = [content["lines"][f"{name}, {label}"]["points"] for label in labels.values()]
    rows = [
        [f"{points[0]['x']:,}", *(figures(1e3 * point["value"]) for point in points)]
        for points in zip(*lines, strict=True)
    ]
    run = f"papers-transfer-{cell}-gpu"
    what = f"Microseconds of {content['title'].partition(':')[0]}."
    processor = f"CPU: {runs.load(run)['processor']}, {runs.load(run)['threads']} threads."
    return runs.table(run, ["steps", *labels], rows, what, processor)


def plot_of(name: str, run: Record) -> Any:
    return plots.figure_of(SWEEPS[name].shown(run))


def capacities(name: str) -> str:
    """Tabulate the largest layers that fit on a chip, by the kernels' plans."""
    return runs.sourced(capacity.table(runs.load(name)["results"]), name)


Claims = Iterator[list[str]]  # the claim, the published figure, and ours


def claims() -> str:
    """Tabulate every claim of the papers and projects behind this library, by their numbers on the page."""
    rows = [*_of_min_rnns(), *_of_sparse_persistent_rnns(), *_of_cuda_rnn(), *_of_the_course_project()]
    names = [f"papers-{name}-gpu" for name in SWEEPS if name not in ("batch", "steps")]
    names += ["networks-gpu"] * runs.measured("networks-gpu")
    return runs.sourced(Grid(["claim", "published", "here"], rows), *names)


def _of_min_rnns() -> Claims:
    for cell, other, at_512 in (("MinGRU", "GRU", "175×"), ("MinLSTM", "LSTM", "235×")):
        for length, published in ((512, at_512), (4096, "over 1,300×")):
            for by in (f"torch.nn.{other}", f"torch.nn.{other}Cell, time loop"):
                here = _ratios_by_size(_values(f"training-{length}", f"{by} / {cell}"))
                yield [f"training step, B 64, T {length:,}: {by} / {cell}", f"{published}, T4 [1]", here]


def _of_sparse_persistent_rnns() -> Claims:
    for cell in ("RNN", "LSTM"):
        for label, what in (("Ostinato, sparse kernel", "our kernel of single weights"), (OURS, "our plan's choice")):
            here = _values(f"density-{cell.lower()}", f"next best / {label}").get(0.3)
            if here:
                yield [f"{cell} 2304, B 4, 30 %: next best / {what}", "over 6× [2]", f"{figures(here)}×"]
    larger = _values("hidden", f"next best / {papers.IN_BLOCKS}")
    here = _ratios_by_size({hidden: larger[hidden] for hidden in (4608, 8192) if hidden in larger})
    yield ["RNN beyond what fits dense, B 4, 10 % in blocks: next best / ours", "2× at 5 times the size [2]", here]
    for record in runs.load("networks-gpu")["results"] if runs.measured("networks-gpu") else ():
        work, best = record["workload"], speedup(record)
        if work["network"] in ("GNMT", "Deep Speech 2") and work["density"] < 1 and best:
            layers = f"{work['layers']} × {work['cell']} {work['hidden']:,}, 10 % in blocks"
            what = f"{work['network']}, {layers}: cuDNN's best / ours"
            yield [what, "up to 3× over the next best [2]", f"{figures(best)}×"]


def _of_cuda_rnn() -> Claims:
    for cell, ratio in (("mingru", "6.31×"), ("minlstm", "9.44×")):
        here = f"{figures(_values(f'transfer-{cell}', 'CPU / GPU with the transfer')[1024])}×"
        what = f"{papers.NAMES[cell]}, 64 inputs, H 128, T 1,024: CPU / GPU with the transfer"
        yield [what, f"{ratio}, RTX 3070 Laptop [3]", here]


def _of_the_course_project() -> Claims:
    for cell, published in (("mingru", "5,330 ms"), ("minlstm", "6,709.8 ms")):
        milliseconds = _values(f"lengths-{cell}", f"{papers.NAMES[cell]}, scan, GPU")[65536]
        what = f"{papers.NAMES[cell]} forward, T 65,536, on a GPU"
        here = f"{figures(milliseconds)} ms (512 inputs, H 512)"
        yield [what, f"{published}, RTX 4090, sizes not stated [4]", here]


def _values(name: str, label: str) -> dict[float, float]:
    """Return a line or ratio of a sweep, by size."""
    content = swept(name)
    lines = {label: line["points"] for label, line in content["lines"].items()}
    lines |= {ratio["name"]: ratio["points"] for ratio in content["ratios"]}
    return {point["x"]: point["value"] for point in lines.get(label, ())}


def _ratios_by_size(ratios: Mapping[float, float]) -> str:
    return ", ".join(f"{figures(value)}× (H {hidden:,})" for hidden, value in ratios.items())
