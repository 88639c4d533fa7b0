"""``ostinato bench``: speeds on this machine, beside the hardware's limit and the peers."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ostinato.cli.console import plain_console
from ostinato.cli.devices import choose_device
from ostinato.cli.plots import plot_beside

if TYPE_CHECKING:
    import torch
    from rich.console import Console

Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Quick = Annotated[bool, Option("--quick", help="Small shapes and few repetitions: ends within a minute.")]
Only = Annotated[str, Option(help="Only workloads whose name contains this, such as bf16.")]
Json = Annotated[
    Path | None,
    Option(help="Write all figures to this file; in a folder (no suffix), to KIND-gpu.json or KIND-cpu.json."),
]

app = typer.Typer(help="Measure speed against the machine's limit and other implementations.", no_args_is_help=True)


KINDS = {
    "scan": "linear_scan against torch.add, accelerated-scan and PyTorch's own scan and loop.",
    "layer": "MinGRU and MinLSTM against their own matrix product, minGRU-pytorch, nn.GRU and nn.LSTM.",
    "recurrence": "Recurrences made of equations against torch.add and fla's; ParaGRU and ParaLSTM against pararnn's, "
    "SLSTM against FlashRNN's.",
    "persistent": "RNN, GRU and LSTM in inference, dense or pruned, against cuDNN, GEMMs and cuSPARSE.",
    "networks": "The recurrent layers of published networks, dense and pruned, against torch.nn's.",
}


def _command(kind: str) -> Callable[..., None]:
    def command(device: Device = "auto", quick: Quick = False, only: Only = "", json: Json = None) -> None:
        _measure(kind, device, quick, only, json)

    return command


for kind, what in KINDS.items():
    app.command(kind, help=what)(_command(kind))


@app.command()
def training(
    device: Device = "auto",
    quick: Quick = False,
    only: Only = "",
    sweep: Annotated[
        bool, Option("--sweep", help="Over hidden and batch sizes instead, with a plot of the ratios to torch.nn.")
    ] = False,
    random: Annotated[
        int,
        Option(
            min=0, max=10_000, help="This many layers of random sizes instead, with a plot of the ratios to torch.nn."
        ),
    ] = 0,
    seed: Annotated[int, Option(help="Of --random: another seed draws other layers.")] = 0,
    json: Json = None,
) -> None:
    """RNN, GRU and LSTM forward and backward, with weights that change at every call, against cuDNN.

    On a GPU cuDNN is timed both as PyTorch launches it and captured in a CUDA graph. The errors are those of all
    gradients against float64.
    """
    if sweep and random:
        raise ValueError("only one of --sweep and --random can be given")
    if random and only:
        raise ValueError(f"only must be empty with --random, whose layers have no names; got {only!r}")
    kind = "training-random" if random else "training-sweep" if sweep else "training"
    _measure(kind, device, quick, only, json, random=(random, seed) if random else None)


@app.command()
def calls(
    device: Device = "auto",
    quick: Annotated[bool, Option("--quick", help="Fewer repetitions.")] = False,
    json: Json = None,
) -> None:
    """The host's time for small calls and single steps, beside torch.add and torch.nn."""
    from rich.live import Live

    from ostinato.bench import calls, report, runs

    chosen, console = _device(device), _console()
    path = _path(json, "calls", chosen)
    results: list[dict[str, Any]] = []
    content = _content(console, "calls", chosen, quick) | {"results": results}
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:  # no refreshes while measuring
            for record in calls.calls(chosen, 3 if quick else calls.ROUNDS):
                results.append(record)
                live.update(f"measured {record['workload']['name']}", refresh=True)
                _write_so_far(path, content)
    finally:
        for _, alike in itertools.groupby(results, key=lambda record: list(record["contestants"])):
            console.print(report.calls(list(alike)))
    if path is not None:
        runs.write_json(path, content)
        console.print(f"wrote {path}", soft_wrap=True)


@app.command()
def papers(
    quick: Annotated[bool, Option("--quick", help="Fewer and smaller sizes: ends within two minutes.")] = False,
    only: Annotated[str, Option(help="Only tables whose name contains this, or one of these: lengths,density.")] = "",
    device: Annotated[str, Option(help="auto for the CPU and the GPU if there is one, or cpu.")] = "auto",
    json: Annotated[Path, Option(help="Folder for a JSON file and a plot of each table.")] = Path("bench"),
) -> None:
    """The tables of the papers and projects behind this library, measured here, beside their published figures.

    minGRU and minLSTM over length and against transfers; training against GRU and LSTM; pruned persistent layers
    over density, hidden size, batch and time steps; and the largest layers that fit on the chip.
    """
    import torch

    from ostinato.bench import capacity, papers, report, runs
    from ostinato.files import check_folder

    chosen, console = _device(device), _console()
    devices = [torch.device("cpu"), *([chosen] if chosen.type == "cuda" else [])]
    tables = {sweep.name: sweep for sweep in papers.sweeps(quick)}
    names = [name for name in (*tables, "capacity") if any(part in name for part in only.lower().split(","))]
    if not names:
        raise ValueError(f"only must be part of one of {', '.join((*tables, 'capacity'))}; got {only!r}")
    check_folder(json)
    head = _content(console, "papers", chosen, quick)
    wrong: list[str] = []
    for name in names:
        path = runs.path_for(json, f"papers-{name}", chosen)
        written, content = [path], head | {"table": name}
        with console.status(name):
            if name == "capacity":
                content |= {"results": capacity.capacity(chosen)}
                console.print(capacity.table(content["results"]))
            else:
                content |= tables[name].measure(devices, 0.2 if quick else 0.4)
                wrong += content["wrong"]
                shown = tables[name].shown(content)
                console.print(report.sweep(shown))
                if shown["lines"] and (plot := plot_beside(console, shown, path)):
                    written.append(plot)
        runs.write_json(path, content)
        console.print(f"wrote {', '.join(map(str, written))}\n", soft_wrap=True)
    _fail_if(wrong)


@app.command()
def warm(
    kinds: Annotated[
        list[str] | None, typer.Argument(help="The benchmarks to compile for; all if none is named.")
    ] = None,
    processes: Annotated[int, Option(help="Processes at once; more would wait for the GPU, which they share.")] = 14,
) -> None:
    """Compile in many processes what the GPU benchmarks would otherwise compile one kernel after the other."""
    from ostinato.bench.warm import warm as compile_all

    console = _console()
    if _device("auto").type != "cuda":
        raise ValueError("only what runs on a GPU is compiled beforehand, and there is none here")
    left = 0
    for left in compile_all(processes, kinds or ()):
        if left % 50 == 0:
            console.print(f"compiling: {left} left")
    if left:
        console.print(f"{left} left, as their compilers do not end: compiled when they are measured")


@app.command()
def profile(
    cell: Annotated[str, typer.Argument(help="mingru, minlstm, rnn, gru or lstm.")] = "mingru",
    batch: Annotated[int, Option(help="Sequences.")] = 16,
    length: Annotated[int, Option(help="Time steps.")] = 1024,
    input_size: Annotated[int | None, Option(help="Inputs of mingru and minlstm; by default the hidden size.")] = None,
    hidden_size: Annotated[int, Option(help="Hidden units.")] = 256,
    dtype: Annotated[str, Option(help="float32, float16 or bfloat16.")] = "float32",
    backward: Annotated[bool, Option("--backward", help="Include the backward pass.")] = False,
    density: Annotated[float, Option(help="Of the recurrent weights of rnn, gru and lstm.")] = 1.0,
    block: Annotated[str, Option(help="Pruned blocks, rows x columns: 1x1, 8x4 or 16x1.")] = "1x1",
    contestant: Annotated[str, Option(help="What to profile, by its name in the other benchmarks.")] = "Ostinato",
    device: Device = "auto",
    trace: Annotated[Path, Option(help="Trace file, for chrome://tracing or Perfetto.")] = Path("bench/trace.json"),
    json: Json = None,
) -> None:
    """Where a layer's time goes: each kernel's time, launches, share, bytes or operations, and part of the limit."""
    from ostinato.bench import profile, report, runs
    from ostinato.bench.workloads import Unavailable
    from ostinato.files import check_file
    from ostinato.masks import block_named

    chosen, console = _device(device), _console()
    work = profile.workload(
        cell,
        batch=batch,
        length=length,
        input_size=hidden_size if input_size is None else input_size,
        hidden_size=hidden_size,
        dtype=dtype,
        backward=backward,
        density=density,
        block=block_named(block),
    )
    path = _path(json, f"profile-{cell}", chosen)
    check_file(trace)
    content = _content(console, "profile", chosen, False)
    try:
        with console.status(str(work)):
            content |= profile.profile(work, chosen, contestant, trace)
    except Unavailable as error:
        raise ValueError(f"{contestant}: {error}") from None
    console.print(report.profile(content))
    if path is not None:
        runs.write_json(path, content)
    console.print(f"wrote {', '.join(map(str, filter(None, (trace, path))))}", soft_wrap=True)


def _measure(
    kind: str, device_name: str, quick: bool, only: str, json: Path | None, random: tuple[int, int] | None = None
) -> None:
    """Measure the workloads of a kind, or layers drawn at random, given their number and a seed."""
    import gc

    from rich.console import Group
    from rich.live import Live

    from ostinato.bench import measure, report, runs
    from ostinato.bench.plots import FIGURES
    from ostinato.bench.shapes import random_layers, workloads
    from ostinato.bench.workloads import short_name

    device, console = _device(device_name), _console()
    works = random_layers(device, *random, quick) if random else workloads(kind, device, quick, only)
    path = _path(json, kind, device)
    plotted = kind in FIGURES
    if plotted and path is not None:
        runs.plot_for(path)  # raises before anything is measured
    results: list[dict[str, Any]] = []
    selection: dict[str, Any] = {"seed": random[1]} if random else {"only": only}
    content = _content(console, kind, device, quick) | selection | {"results": results}
    wrong: list[str] = []
    gc.freeze()  # exempts all that the imports made from the garbage collections before each measurement
    tables: list[Any] = []
    try:
        with Live(console=console, auto_refresh=False, transient=True) as live:  # no refreshes while measuring
            for work in works:
                live.update(Group(*tables, f"measuring {short_name(str(work))}"), refresh=True)
                try:
                    records = measure.measure(work, device, 1.0 if quick else 5.0)
                except measure.WrongResult as error:
                    wrong.append(str(error))
                    continue
                results += records
                if "steps" in records[0]:
                    tables = [report.recurrent_layers(results, device.type)]
                else:
                    tables.append(report.workload(records))
                _write_so_far(path, content)
    finally:
        console.print(*tables)
        compared = any(report.speedup(record) is not None for record in results)
        if random and compared:
            console.print(report.summary(results))
    if path is not None:
        runs.write_json(path, content)
        plot = plot_beside(console, content, path) if plotted and compared else None
        console.print(f"wrote {', '.join(map(str, filter(None, (path, plot))))}", soft_wrap=True)
    _fail_if(wrong)


def _write_so_far(path: Path | None, content: dict[str, Any]) -> None:
    """Write what was measured so far, to survive an interruption; a stream is written only once, at the end."""
    from ostinato.bench.runs import write_json
    from ostinato.files import is_stream

    if path is not None and not is_stream(path):
        write_json(path, content)


def _path(json: Path | None, name: str, device: "torch.device") -> Path | None:
    """Return the file of a run, after checking that it can be written: measuring may take long."""
    from ostinato.bench.runs import path_for
    from ostinato.files import check_file

    if json is None:
        return None
    path = path_for(json, name, device)
    check_file(path)
    return path


def _fail_if(wrong: list[str]) -> None:
    """Raise RuntimeError at the end of a run if results of ours were wrong: the others have been written by then."""
    if wrong:
        raise RuntimeError(f"{len(wrong)} results are wrong: {'; '.join(wrong)}")


def _device(name: str) -> "torch.device":
    """Choose a CPU or CUDA device, and make it the current one."""
    import torch

    device = choose_device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda for a benchmark; got {device}")
    if device.index is not None:
        torch.cuda.set_device(device)  # events and synchronisation are the current device's
    return device


def _console() -> "Console":
    import sys

    return plain_console(width=None if sys.stdout.isatty() else 180)


def _content(console: "Console", name: str, device: "torch.device", quick: bool) -> dict[str, Any]:
    """Return the head of a JSON file, and print it."""
    from ostinato.bench.runs import environment

    machine = environment(device)
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    console.print(f"{machine['device']}, {threads}, PyTorch {machine['versions']['torch']}")
    return {"benchmark": name, **machine, "quick": quick}
