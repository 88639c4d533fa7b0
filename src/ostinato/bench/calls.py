"""What a small call costs, most of which is the host's time: short scans and single steps."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

import ostinato
from ostinato.bench.measure import Record
from ostinato.bench.report import figures

CALLS, ROUNDS = 50, 20  # calls are issued one after the other, fewer than a GPU's queue takes; rounds in turn
UNIT = "torch.add(out=)"

Call = Callable[[], Any]


def calls(device: torch.device, rounds: int = ROUNDS) -> list[Record]:
    """One record a kind of call: each contestant's seconds, of Ostinato first and then of what else there is."""
    torch.manual_seed(0)
    x = torch.randn(8, device=device)
    unit: dict[str, Call] = {UNIT: partial(torch.add, x, x, out=x)}
    results = []
    with torch.no_grad():
        for name, contestants in (*_scans(device), *_steps(device)):
            seconds = _seconds(contestants | unit, device, rounds)
            rows = {who: {"seconds": value, "times_unit": value / seconds[UNIT]} for who, value in seconds.items()}
            results.append({"workload": {"kind": "calls", "name": name}, "contestants": rows})
    return results


def _seconds(contestants: dict[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """Of issuing a call: the least of the rounds, which are taken in turn, as others on the host only add to it."""
    wait: Call = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    samples: dict[str, list[float]] = {who: [] for who in contestants}
    for call in contestants.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for who, call in contestants.items():
            wait()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples[who].append((time.perf_counter() - start) / CALLS)
    wait()
    return {who: min(times) for who, times in samples.items()}


def _scans(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    for shape in ((1, 1, 1), (1, 1, 8), (1, 4, 8), (1, 64, 256)):
        a, b = torch.rand(shape, device=device), torch.randn(shape, device=device)
        leaf = a.clone().requires_grad_()

        def loop(a: Tensor = a, b: Tensor = b) -> Tensor:
            h, states = torch.zeros_like(a[:, 0]), []
            for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
                h = torch.addcmul(b_t, a_t, h)
                states.append(h)
            return torch.stack(states, 1)

        contestants: dict[str, Call] = {"Ostinato": partial(ostinato.linear_scan, a, b)}
        contestants["Ostinato, with gradient"] = torch.enable_grad()(partial(ostinato.linear_scan, leaf, b))
        if shape[1] < 64:
            contestants["loop of PyTorch operations"] = loop
        yield f"linear_scan {shape}", contestants


def _steps(device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    for hidden in (32, 128, 512):
        x = torch.randn(1, hidden, device=device)
        peers: dict[str, tuple[Any, Any]] = {"GRU": (nn.GRU, nn.GRUCell), "LSTM": (nn.LSTM, nn.LSTMCell)}
        for cell, ours in (("GRU", ostinato.MinGRU), ("GRU", ostinato.GRU), ("LSTM", ostinato.LSTM)):
            own = ours(hidden, hidden, device=device)
            layer, single = (kind(hidden, hidden, device=device) for kind in peers[cell])
            state = own.step(x)[1]
            contestants: dict[str, Call] = {
                "Ostinato": partial(own.step, x, state),
                "Ostinato, T = 1": partial(own, x[None]),
                "Ostinato, Stepper": partial(ostinato.Stepper(own, batch_size=1), x),
                "torch.nn, T = 1": partial(layer, x[None]),
                "torch.nn's cell": partial(single, x),
            }
            yield f"step of {ours.__name__} {hidden}", contestants


def table(records: list[Record]) -> Table:
    """One row a call: microseconds, and in brackets multiples of the addition."""
    names = list(dict.fromkeys(who for record in records for who in record["contestants"]))
    result = Table(title="microseconds a call, and times torch.add(out=)", title_justify="left", box=SIMPLE_HEAD)
    for name in ("", *names):
        result.add_column(name, justify="right" if name else "left")
    for record in records:
        rows = record["contestants"]
        cells = [
            f"{figures(1e6 * rows[n]['seconds'])} ({rows[n]['times_unit']:.1f})" if n in rows else "" for n in names
        ]
        result.add_row(record["workload"]["name"], *cells)
    return result
