"""RNN, GRU and LSTM layers without gradient: microseconds a step, dense or pruned, beside ``torch.nn``'s own."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

import ostinato
from ostinato.bench.measure import TOLERANCE, Record, WrongResult, _timings
from ostinato.bench.peers import OURS
from ostinato.bench.workloads import Run, name_of, named

LAYERS = {"RNN": (ostinato.RNN, nn.RNN), "GRU": (ostinato.GRU, nn.GRU), "LSTM": (ostinato.LSTM, nn.LSTM)}


@dataclass(frozen=True)
class Recurrence:
    """One layer over (T, B, H), its input as wide as its state; ``density`` 1 leaves it dense."""

    cell: str
    hidden: int
    batch: int = 1
    length: int = 1000
    density: float = 0.1
    block: tuple[int, int] = (16, 1)
    dtype: torch.dtype = torch.float32

    kind = "persistent"

    def __str__(self) -> str:
        rows, columns = self.block
        pruned = "dense" if self.density == 1 else f"{self.density:.0%} in {rows}x{columns}"
        return f"{self.cell} {self.hidden}, B {self.batch}, T {self.length}, {pruned}, {name_of(self.dtype)}"

    def layers(self, device: torch.device) -> dict[str, Any]:
        """Ours, and ``torch.nn``'s with the same weights, zeros included."""
        ours, theirs = LAYERS[self.cell]
        layer, peer = ours(self.hidden, self.hidden), theirs(self.hidden, self.hidden)
        if self.density < 1:
            ostinato.prune(layer, self.density, block=self.block)
        peer.load_state_dict(layer.state_dict(), strict=False)
        return {OURS: layer.to(device, self.dtype), f"torch.nn.{self.cell}": peer.to(device, self.dtype)}


@torch.no_grad()
def measure(work: Recurrence, device: torch.device, seconds: float) -> list[Record]:
    """The time of each contestant and its error against ``torch.nn`` in float64; `seconds` is what the CPU spends.

    Raises WrongResult if our own result is wrong.
    """
    layers = work.layers(device)
    x = torch.randn(work.length, work.batch, work.hidden, device=device, dtype=work.dtype)
    exact = work.layers(device)[f"torch.nn.{work.cell}"].double()
    exact.load_state_dict({name: value for name, value in layers[OURS].state_dict().items() if "mask" not in name})
    expected = exact(x.double())[0]
    errors = {name: float((layer(x)[0].double() - expected).abs().max()) for name, layer in layers.items()}
    if not errors[OURS] <= TOLERANCE[work.dtype]:
        raise WrongResult(f"{work}: error {errors[OURS]:.1e} against float64")
    runs = {name: Run(_forward(layer, x)) for name, layer in layers.items()}
    contestants = {
        name: {
            "seconds": timing["seconds"],
            "microseconds_a_step": timing["seconds"] / work.length * 1e6,
            "max_error": errors[name],
        }
        for name, timing in _timings(runs, "forward", device, seconds).items()
    }
    for row in contestants.values():
        row["times_ostinato"] = row["seconds"] / contestants[OURS]["seconds"]
    plan = layers[OURS].plan(work.batch)
    shown = ("path", "bytes_on_chip", "bytes_available", "blocks", "reason")
    return [
        {
            "workload": {"kind": work.kind, "name": str(work), **asdict(work), "dtype": name_of(work.dtype)},
            "plan": {name: getattr(plan, name) for name in shown},
            "contestants": contestants,
        }
    ]


def _forward(layer: Any, x: Tensor) -> Callable[[], Tensor]:
    return lambda: layer(x)[0]


def table(records: list[Record]) -> Table:
    """One row a contestant, and beneath them how ours runs."""
    result = Table(title=records[0]["workload"]["name"], title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    result.padding, result.pad_edge, result.min_width = (0, 1, 0, 0), False, 72
    for heading in ("", "us a step", "x ours", "error"):
        result.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for record in records:
        for name, row in record["contestants"].items():
            numbers = f"{row['microseconds_a_step']:.2f}", f"{row['times_ostinato']:.2f}", f"{row['max_error']:.0e}"
            result.add_row(name, *numbers)
    result.caption = f"{records[0]['plan']['path']}: {records[0]['plan']['reason']}"
    return result


QUICK = [Recurrence("GRU", 128, length=100)]
ON_CPU = [
    *(Recurrence(cell, hidden) for cell in LAYERS for hidden in (384, 1024)),
    Recurrence("GRU", 384, density=0.3),
    Recurrence("GRU", 384, block=(8, 4)),
    Recurrence("GRU", 384, block=(1, 1)),
    Recurrence("GRU", 384, batch=16, length=200),
    Recurrence("LSTM", 384, batch=16, length=200),
    Recurrence("GRU", 384, length=1),
]


def workloads(_device: torch.device, quick: bool = False, only: str = "") -> list[Recurrence]:
    """What is measured; `quick` is the part that ends within a minute.  Raises ValueError if no name has `only`."""
    return named(QUICK if quick else ON_CPU, only)
