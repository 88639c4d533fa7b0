"""Checks each contestant against the float64 reference, then times it."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ostinato.bench.peers import OURS, Build, Unavailable, contestants
from ostinato.bench.workloads import Run, Workload, name_of

CHECKED_STEPS = 8192
CHECKED_CHANNELS = 8
FORGOTTEN_AFTER = 256  # steps: random gates leave nothing of a state older than this, to float64's last bit
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
MIN_ROUNDS, MAX_ROUNDS = 5, 100

Record = dict[str, Any]


class WrongResult(RuntimeError):
    """Ostinato failed, or its result is not the reference's: its time would mean nothing."""


def measure(work: Workload, device: torch.device, seconds: float) -> list[Record]:
    """One record a pass, of the limit and every contestant; `seconds` is what the CPU spends on a pass.

    Raises WrongResult if Ostinato's own result is wrong.
    """
    data = work.data(device)
    check = Check(work, data)
    builds: dict[str, Build] = {work.limit_name: lambda work, data: work.limit(data), **contestants(work)}
    if device.type == "cpu":
        outcomes = _measure_together(work, data, check, builds, device, seconds)
    else:  # one at a time, so that each has the memory to itself
        outcomes = {}
        for name, build in builds.items():
            outcomes |= _measure_together(work, data, check, {name: build}, device, seconds)
            gc.collect()
            torch.cuda.empty_cache()
    return [_record(work, pass_name, {name: outcomes[name][pass_name] for name in builds}) for pass_name in work.passes]


def _measure_together(
    work: Workload,
    data: tuple[Tensor, ...],
    check: "Check",
    builds: dict[str, Build],
    device: torch.device,
    seconds: float,
) -> dict[str, dict[str, Record]]:
    """For each name and pass its time and error, or why there is none."""
    outcomes: dict[str, dict[str, Record]] = {name: {} for name in builds}
    runs: dict[str, Run] = {}
    for name, build in builds.items():
        try:
            runs[name] = build(work, data)
            errors = check.errors(runs[name]) if name != work.limit_name and runs[name].same_function else {}
        except Exception as error:
            if name == OURS:
                raise WrongResult(f"{work}: {_reason(error)}") from error
            runs.pop(name, None)
            outcomes[name] = {pass_name: {"unavailable": _reason(error)} for pass_name in work.passes}
            continue
        if name == OURS and not errors["forward+backward"] <= TOLERANCE[work.dtype]:
            raise WrongResult(f"{work}: relative error {errors['forward+backward']:.1e} against the float64 reference")
        outcomes[name] = {pass_name: {"max_error": errors.get(pass_name)} for pass_name in work.passes}
    for pass_name in work.passes:
        for name, timing in _timings(runs, pass_name, device, seconds).items():
            outcomes[name][pass_name] |= timing
    return outcomes


def _timings(runs: dict[str, Run], pass_name: str, device: torch.device, seconds: float) -> dict[str, Record]:
    functions: dict[str, Callable[[], object]] = {}
    timings: dict[str, Record] = {}
    estimates = []
    for name, run in runs.items():
        try:
            function = run.prepare(pass_name)
            function()
            estimates.append(_elapsed(function))
            functions[name] = function
        except Exception as error:
            timings[name] = {"unavailable": _reason(error)}
    if device.type == "cuda":
        return timings | {name: _gpu_timing(function) for name, function in functions.items()}
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / sum(estimates)))) if estimates else 0
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):  # in turn, so that whatever else the machine does meets all of them alike
        for name, function in functions.items():
            samples[name].append(_elapsed(function))
    return timings | {name: {"seconds": statistics.median(times)} for name, times in samples.items()}


def _elapsed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _gpu_timing(function: Callable[[], object]) -> Record:
    """The median time and the most memory taken beside what there was before the call."""
    from triton.testing import do_bench

    milliseconds = do_bench(function, return_mode="median")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return {"seconds": milliseconds / 1e3, "extra_memory_bytes": torch.cuda.max_memory_allocated() - before}


def _record(work: Workload, pass_name: str, outcomes: dict[str, Record]) -> Record:
    """The figures of one pass, and the ratios that follow from them."""
    limit = outcomes.pop(work.limit_name)["seconds"] * work.limit_share(pass_name)
    ours = outcomes[OURS].get("seconds")
    for outcome in outcomes.values():
        if seconds := outcome.get("seconds"):
            outcome[f"{work.unit}_per_second"] = work.work(pass_name) / seconds
            outcome["fraction_of_limit"] = limit / seconds
            outcome["times_ostinato"] = seconds / ours if ours else None
    return {
        "workload": {"kind": work.kind, "name": str(work), **asdict(work), "dtype": name_of(work.dtype)},
        "pass": pass_name,
        work.unit: work.work(pass_name),
        "limit": {
            "name": work.limit_name,
            "seconds": limit,
            f"{work.unit}_per_second": work.work(pass_name) / limit,
        },
        "contestants": outcomes,
    }


def _reason(error: Exception) -> str:
    if isinstance(error, Unavailable):
        return str(error)
    first_line = next(iter(str(error).splitlines()), "")
    return f"failed: {type(error).__name__}: {first_line}"


class Check:
    """Some channels of the last sequence, in float64 on the CPU, over the end of the time axis.

    Gradients are taken of the same window: the gradient that comes in is zero outside it.
    """

    def __init__(self, work: Workload, data: tuple[Tensor, ...]) -> None:
        self.work, self.data = work, data
        self.start = max(0, work.length - CHECKED_STEPS)
        self.skip = FORGOTTEN_AFTER if self.start else 0
        count = min(work.channels, CHECKED_CHANNELS)
        self.channels = torch.linspace(0, work.channels - 1, count).long().tolist()
        steps = work.length - self.start - self.skip
        self.grad = torch.randn(1, steps, count, dtype=work.dtype)
        self._expected: dict[bool, list[Tensor]] = {}

    def expected(self, bias: bool) -> list[Tensor]:
        """The output and the gradient of each input."""
        if bias not in self._expected:
            windows = [self.work.window(x, self.start, self.channels) for x in self._inputs(self.data)]
            inputs = [x.detach().cpu().double().requires_grad_() for x in windows]
            output = self.work.reference(inputs, self.data, self.channels, bias)[:, self.skip :]
            grads = torch.autograd.grad(output, inputs, self.grad.double())
            self._expected[bias] = [output.detach(), *(x[:, self.skip :] for x in grads)]
        return self._expected[bias]

    def errors(self, run: Run) -> dict[str, float]:
        """The error of each pass, relative in the Euclidean norm."""
        output = run.layout(run.call())
        begin = self.start + self.skip
        grad = torch.zeros_like(output)
        grad[-1:, begin:][..., self.channels] = self.grad.to(grad)
        grads = torch.autograd.grad(output, self._inputs(run.inputs), grad)
        found = [output[-1:, begin:][..., self.channels]]
        found += [self.work.window(run.layout(x), begin, self.channels) for x in grads]
        errors = [
            float((x.detach().cpu().double() - y).norm() / y.norm())
            for x, y in zip(found, self.expected(run.has_bias), strict=True)
        ]
        # torch's maximum, unlike Python's, is NaN where any of them is
        backward, both = float(torch.tensor(errors[1:]).max()), float(torch.tensor(errors).max())
        return {"forward": errors[0], "backward": backward, "forward+backward": both}

    def _inputs(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs with a time axis: a and b of a scan, x of a layer."""
        return tuple(x for x in tensors if x.dim() == 3)
