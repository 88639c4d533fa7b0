"""``ostinato bench``: speeds beside the limit and the peers, on this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

Device = Annotated[str, Option(help="auto, cpu or cuda.")]
Quick = Annotated[bool, Option("--quick", help="Small shapes and few repetitions: ends within a minute.")]
Only = Annotated[str, Option(help="Only workloads whose name contains this, such as bfloat16.")]
Json = Annotated[
    Path | None, Option(help="Write all figures to this file; in a folder, to one named after the device.")
]

app = typer.Typer(help="Measure speed against the machine's limit and other implementations.", no_args_is_help=True)


@app.command()
def scan(device: Device = "auto", quick: Quick = False, only: Only = "", json: Json = None) -> None:
    """linear_scan against torch.add, accelerated-scan and PyTorch's own scan and loop."""
    _measure("scan", device, quick, only, json)


@app.command()
def layer(device: Device = "auto", quick: Quick = False, only: Only = "", json: Json = None) -> None:
    """MinGRU and MinLSTM against their own matrix product, minGRU-pytorch, nn.GRU and nn.LSTM."""
    _measure("layer", device, quick, only, json)


@app.command()
def persistent(device: Device = "auto", quick: Quick = False, only: Only = "", json: Json = None) -> None:
    """RNN, GRU and LSTM without gradient, dense or pruned, against torch.nn's own."""
    _measure("persistent", device, quick, only, json)


def _measure(kind: str, device_name: str, quick: bool, only: str, path: Path | None) -> None:
    import re
    import sys
    from functools import partial

    from rich.console import Console

    from ostinato.bench import measure, persistent, report
    from ostinato.bench.workloads import workloads
    from ostinato.cli.devices import choose_device

    device = choose_device(device_name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda for a benchmark; got {device}")
    of_kind: dict[str, Any] = {"persistent": (persistent.workloads, persistent.measure, persistent.table)}
    choose, run, table = of_kind.get(kind, (partial(workloads, kind), measure.measure, report.table))
    works = choose(device, quick, only)
    console = Console(width=None if sys.stdout.isatty() else 100)
    machine = report.environment(device)
    seconds = 1.0 if quick else 5.0
    content = {
        "benchmark": kind,
        **machine,
        "settings": {"quick": quick, "only": only, "cpu_seconds_a_pass": seconds},
        "results": [],
    }
    console.print(f"{machine['device']}, {machine['threads']} threads, PyTorch {machine['versions']['torch']}")
    if path is not None and path.is_dir():
        path /= f"{kind}-{re.sub('[^a-z0-9]+', '-', machine['device'].lower()).strip('-')}.json"
    for work in works:
        with console.status(str(work)):
            records = run(work, device, seconds)
        console.print(table(records))
        content["results"] += records
        if path is not None:  # after every workload, so that what is measured outlives an interruption
            report.write_json(path, content)
    if path is not None:
        console.print(f"wrote {path}")
