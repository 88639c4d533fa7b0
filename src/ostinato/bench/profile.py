"""Where a layer's time goes: its kernels, their minimal work, and the fraction of the hardware's limit they reach."""

import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ostinato.bench.measure import Record
from ostinato.bench.peers import CONTESTANTS
from ostinato.bench.workloads import OURS, Layer, RecurrentLayer, name_of
from ostinato.checks import check_integers
from ostinato.files import replacing
from ostinato.kernels.persistent.plan import NO_KERNEL
from ostinato.minimal.recurrences import GATES

PRODUCT = re.compile(
    r"gemm|cutlass|nvjet|xmma|::mm$|addmm$|_linear_pointwise|mkldnn_convolution|thnn_conv2d$|convolution_backward$"
)
# CPU operators of PyTorch that do the work of their caller where that does not delegate to oneDNN: one row for both.
WORKERS = {
    "aten::_slow_conv2d_forward": "aten::thnn_conv2d",
    "aten::_slow_conv2d_backward": "aten::convolution_backward",
}
# Our CUDA kernels whose minimal work `least_work` knows, and those whose it does not.
COUNTED = frozenset(
    {
        "scan",
        "projected",  # matrix product, gates and scan fused
        "prepare",  # fills the buffer in which the blocks of a persistent kernel exchange states, or gates
        "recur",  # the persistent kernel, of the forward or the backward pass
        "states_before",  # copies the state before each step
        "products",  # a small layer's matrix products, before its loop or after that of the backward pass
    }
)
UNCOUNTED = frozenset(
    {
        *("biases", "transpose"),  # their sizes do not follow from the layer's
        *("step", "projected_step"),  # single steps, as a layer's `step` takes them
        *("steps", "link"),  # nonlinear recurrences, which are not profiled
        *("compose", "pass_on"),  # shards of a sequence, which are not profiled
    }
)


def profile(work: Layer | RecurrentLayer, device: torch.device, name: str = OURS, trace: Path | None = None) -> Record:
    """Profile the kernels of one call of a contestant.

    Args:
        work: a layer and its shape; the last of its passes is profiled.
        name: the contestant.
        trace: where to write a trace for chrome://tracing or Perfetto.

    Raises:
        ValueError: this layer has no contestant of that name.
        Unavailable: the contestant cannot run here.
    """
    torch.manual_seed(0)
    data = work.data(device)
    builds = CONTESTANTS[work.cell]
    if name not in builds:
        raise ValueError(f"contestant must be one of {'; '.join(builds)}; got {name!r}")
    run = builds[name](work, data)
    call = run.prepare(work.passes[-1])
    for _ in range(3):
        call()
    wall = _wall(call, device)
    calls = max(1, min(20, int(1.0 / wall)))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with _cpu_kernels_recorded(), torch.profiler.profile(activities=activities) as profiler:
        for _ in range(calls):
            call()
        torch.get_device_module(device).synchronize()
    if trace is not None:
        with replacing(trace) as temporary:
            profiler.export_chrome_trace(str(temporary))
    limits = measure_limits(device, work.dtype)
    kernels = [_kernel_row(*times, calls, wall) for times in _times(profiler, device.type)]
    kernels.sort(key=lambda row: -row["seconds_a_call"])
    if name == OURS and run.plan.get("path") != NO_KERNEL:
        for row in kernels:
            least = least_work(work, row["kernel"], int(row["launches_a_call"]))
            row |= _rates(least, row["seconds_a_call"], limits)
    return {
        "workload": {"kind": work.kind, "name": str(work)},
        "pass": work.passes[-1],
        "contestant": name,
        "plan": run.plan,
        "seconds": wall,
        "limits": limits,
        "kernels": kernels,
        "seconds_in_none": max(0.0, wall - sum(row["seconds_a_call"] for row in kernels)),
    }


def measure_limits(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Measure the rates of ``torch.add(out=)`` on tensors larger than the caches and of a square matrix product."""
    power, size = (28, 8192) if device.type == "cuda" else (26, 1024)
    numbers = (1 << power) // dtype.itemsize
    a, b, out = (torch.ones(numbers, device=device, dtype=dtype) for _ in range(3))
    m = torch.randn(size, size, device=device, dtype=dtype)
    add, product = _wall(lambda: torch.add(a, b, out=out), device), _wall(lambda: m @ m, device)
    return {"bytes_per_second": 3 * numbers * dtype.itemsize / add, "flops_per_second": 2 * size**3 / product}


def _wall(call: Callable[[], object], device: torch.device) -> float:
    """Return the median latency of as many calls as fit into half a second: at least one, at most 50."""
    wait = torch.get_device_module(device).synchronize
    samples: list[float] = []
    call()
    wait()
    while not samples or (sum(samples) < 0.5 and len(samples) < 50):
        start = time.perf_counter()
        call()
        wait()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


@contextmanager
def _cpu_kernels_recorded() -> Iterator[None]:
    """Make the profiler see our CPU kernels, which are not PyTorch operators, as named ranges."""
    from ostinato.kernels.persistent import cpu as persistent
    from ostinato.kernels.recurrence.linear import cpu as minimal
    from ostinato.kernels.scan import cpu

    def named(function: Any, name: str) -> Any:
        def call(*args: Any) -> Any:
            with torch.profiler.record_function(f"ostinato::{name}"):
                return function(*args)

        return call

    with ExitStack() as stack:
        for name in ("linear_scan", "linear_scan_backward"):
            stack.enter_context(mock.patch.object(cpu, name, named(getattr(cpu, name), name)))
        for name, label in (("layer", "minimal"), ("layer_backward", "minimal_backward")):
            stack.enter_context(mock.patch.object(minimal, name, named(getattr(minimal, name), label)))
        for name, label in (("forward", "recurrence"), ("backward", "recurrence_backward")):
            stack.enter_context(mock.patch.object(persistent, name, named(getattr(persistent, name), label)))
        yield


def _times(profiler: Any, device_type: str) -> Iterator[tuple[str, int, float]]:
    """Yield the name, launches and total seconds of each kernel, or on a CPU of each operator."""
    if device_type == "cpu":
        rows = {row.key: [row.count, row.self_cpu_time_total / 1e6] for row in profiler.key_averages()}
        for worker, caller in WORKERS.items():
            if worker in rows and caller in rows:
                rows[caller][1] += rows.pop(worker)[1]
        yield from ((name, launches, total) for name, (launches, total) in rows.items() if total > 0)
        return
    durations: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            durations.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    for name, seconds in durations.items():
        yield name, len(seconds), sum(seconds)


def _kernel_row(name: str, launches: int, seconds: float, calls: int, wall: float) -> Record:
    """Convert a kernel's totals over all profiled calls to figures per call and per launch."""
    return {
        "kernel": name,
        "launches_a_call": launches / calls,
        "seconds_a_launch": seconds / launches,
        "seconds_a_call": seconds / calls,
        "share": seconds / calls / wall,
    }


def _rates(work: dict[str, int], seconds: float, limits: dict[str, float]) -> Record:
    """Return the work, its rates, and the largest fraction of its limit that a rate reaches; {} for no work."""
    if not work:
        return {}
    rates = {f"{unit}_per_second": amount / seconds for unit, amount in work.items()}
    return {**work, **rates, "fraction_of_limit": max(rate / limits[unit] for unit, rate in rates.items())}


def is_ours(kernel: str) -> bool:
    return kernel in COUNTED | UNCOUNTED or kernel.startswith("ostinato::")


def least_work(work: Layer | RecurrentLayer, kernel: str, launches: int) -> dict[str, int]:
    """Return the bytes that our kernel must move in a call, or the operations of a product; {} if unknown."""
    if isinstance(work, Layer):
        gates, states = GATES[work.cell], work.batch * work.length * work.channels
        # One product for the gates, and in the backward pass one each for the gradients of input and weight.
        if PRODUCT.search(kernel):
            return {"flops": launches * work.work("forward") * (2 if kernel.endswith("convolution_backward") else 1)}
        if kernel == "projected":
            inputs = work.batch * work.length * work.input_size
            moved = (inputs + states + gates * work.channels * work.input_size) * work.dtype.itemsize
            return {"bytes": moved, "flops": work.work("forward")}
    else:
        gates, states = work.gates, work.batch * work.length * work.hidden
        product = 2 * states * gates * work.hidden
        if PRODUCT.search(kernel):
            return {"flops": launches * product}
        # Forward, the input's; backward, also those of the gradients of input and both weights.
        if kernel == "products":
            return {"flops": (1 if launches == 1 else 1 + 3) * product}
    # Forward reads pre-activations and writes states; backward reads both and a gradient, and writes gradients.
    forward, backward, trained = gates + 1, 2 * gates + 2, work.passes[-1] != "forward"
    if kernel.startswith("ostinato::"):
        tensors = backward if kernel.endswith("_backward") else forward
    elif kernel == "prepare":
        tensors = 1 + gates * trained
    elif kernel == "states_before":
        tensors = 2 * launches
    elif kernel in COUNTED:
        tensors = forward + backward * trained
    else:
        return {}
    return {"bytes": tensors * states * work.dtype.itemsize}


def workload(
    cell: str,
    *,
    batch: int,
    length: int,
    input_size: int,
    hidden_size: int,
    dtype: str,
    backward: bool = False,
    density: float = 1.0,
    block: tuple[int, int] = (1, 1),
) -> Layer | RecurrentLayer:
    """Return the workload of these sizes.  Raises ValueError for an unknown cell or dtype, or a size below 1."""
    dtypes = {name_of(kind): kind for kind in (torch.float32, torch.float16, torch.bfloat16)}
    cells = ("mingru", "minlstm", "rnn", "gru", "lstm")
    if cell not in cells:
        raise ValueError(f"cell must be one of {', '.join(cells)}; got {cell!r}")
    if dtype not in dtypes:
        raise ValueError(f"dtype must be one of {', '.join(dtypes)}; got {dtype!r}")
    check_integers(1, batch=batch, length=length, input_size=input_size, hidden_size=hidden_size)
    if cell in ("mingru", "minlstm"):
        passes = ("forward", "forward+backward") if backward else ("forward",)
        return Layer(cell, batch, length, input_size, hidden_size, dtypes[dtype], passes=passes)
    passes = ("forward+backward" if backward else "forward",)
    return RecurrentLayer(cell.upper(), hidden_size, batch, length, density, block, dtypes[dtype], passes=passes)
