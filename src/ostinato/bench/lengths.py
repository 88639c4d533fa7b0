"""One layer at growing lengths three ways: a loop over time, the parallel scan, and ``torch.nn.GRU``."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import ostinato

CHANNELS = 256
LENGTHS = tuple(4**power for power in range(4, 10))  # 256 to 262,144
LOOP, SCAN, GRU = "MinGRU, time loop", "MinGRU, scan", "torch.nn.GRU"
WAYS = (LOOP, SCAN, GRU)

Times = dict[str, dict[int, float]]


@torch.no_grad()
def measure_lengths(device: torch.device, longest: float = 4.0) -> Times:
    """Seconds of a forward pass of each way at each length, batch 1, float32: medians.

    A way that is linear in T and would take more than ``longest`` seconds at the next length stops there.
    Raises RuntimeError if the loop and the scan, which compute the same function, do not agree.
    """
    minimal = ostinato.MinGRU(CHANNELS, CHANNELS, batch_first=True, device=device)
    gru = nn.GRU(CHANNELS, CHANNELS, batch_first=True, device=device)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        LOOP: lambda x: _loop(minimal, x),
        SCAN: lambda x: minimal(x)[0],
        GRU: lambda x: gru(x)[0],
    }
    x = torch.randn(1, LENGTHS[0], CHANNELS, device=device)
    error = (ways[LOOP](x) - ways[SCAN](x)).abs().max().item()
    if not error < 1e-4:
        raise RuntimeError(f"the loop over time and the parallel scan differ by {error}")
    times: Times = {way: {} for way in WAYS}
    for length in LENGTHS:
        x = torch.randn(1, length, CHANNELS, device=device)
        for way, run in ways.items():
            before = times[way].get(length // 4, 0.0)
            if length == LENGTHS[0] or 0 < 4 * before < longest:
                times[way][length] = _median_seconds(lambda: run(x), device)  # noqa: B023 (it runs at once)
    return times


def _loop(module: ostinato.MinGRU, x: Tensor) -> Tensor:
    h, outputs = None, []
    for x_t in x.unbind(1):
        y, h = module.step(x_t, h)
        outputs.append(y)
    return torch.stack(outputs, 1)


def _median_seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """The median of as many runs as fit in a second, one at least and nine at most, after one that is not counted."""
    samples: list[float] = []
    _seconds(run, device)
    while len(samples) < 9 and sum(samples) < 1:
        samples.append(_seconds(run, device))
    return statistics.median(samples)


def _seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def plot_lengths(times: Times, title: str, path: Path) -> None:
    """Draw time over length, both logarithmic, to an image file.  Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    from ostinato.files import replacing

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for (way, by_length), style in zip(times.items(), ("s--", "o-", "^-."), strict=True):
        lengths = sorted(by_length)
        axes.plot(lengths, [1e3 * by_length[length] for length in lengths], style, label=way)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
    axes.set_xlabel("sequence length T (time steps)")
    axes.set_ylabel("time of one forward pass (ms)")
    axes.set_title(title, fontsize="medium", wrap=True)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
