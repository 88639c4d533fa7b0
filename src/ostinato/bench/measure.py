"""Check each contestant against the float64 reference, then time it."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ostinato.bench.check import TOLERANCE, Check, Errors, check_of
from ostinato.bench.peers import Build, contestants
from ostinato.bench.workloads import OURS, ParaLayer, RecurrentLayer, Run, Unavailable, Workload, name_of
from ostinato.cuda_graphs.kept import USES

MIN_ROUNDS, MAX_ROUNDS = 3, 50
SLOW = 0.5  # seconds; slower calls are not repeated
GPU_SECONDS = 0.02  # spent on the repetitions of a GPU pass
FLUSH_BYTES = 512 << 20  # several times any cache
WARM_UPS = USES + 8  # untimed calls, after which our layers run as in a long training: USES calls become a CUDA graph
FLUSHES = 4  # before a timed call: they keep the GPU busy while the host launches most of its kernels
GRADIENT_FACTOR = 5  # on the tolerance: gradients of weights are sums over all steps, rounded at each
COLLECT_ABOVE = 1 << 30  # bytes in use on the GPU above which Python's garbage is collected

Record = dict[str, Any]


class WrongResult(RuntimeError):
    """Ostinato failed, or its result differs from the reference: its time would be meaningless."""


def measure(work: Workload, device: torch.device, seconds: float) -> list[Record]:
    """Return one record per pass, with the limit and every contestant; on a CPU a pass takes about `seconds`.

    The inputs are the same random numbers at every call.  Raises WrongResult if Ostinato's own result is wrong.
    """
    torch.manual_seed(0)
    with _precision(work):
        data = work.data(device)
        check = check_of(work, data)
        builds = contestants(work)
        if limited(work):
            builds[work.limit_name] = lambda work, data: work.limit(data)
        if device.type == "cpu":
            outcomes = _measure_together(work, data, check, builds, device, seconds)
        else:  # one at a time, so that each has the memory to itself
            outcomes = {}
            for name, build in builds.items():
                outcomes |= _measure_together(work, data, check, {name: build}, device, GPU_SECONDS)
                if torch.cuda.memory_allocated(device) > COLLECT_ABOVE:
                    gc.collect()
                torch.cuda.empty_cache()
    return [_record(work, pass_name, {name: outcomes[name][pass_name] for name in builds}) for pass_name in work.passes]


def limited(work: Workload) -> bool:
    """Whether the limit is measured: for recurrent layers it is itself a layer, run only if the workload names it."""
    return not isinstance(work, RecurrentLayer) or work.limit_name in work.who


@contextmanager
def _precision(work: Workload) -> Iterator[None]:
    """Allow or forbid tf32 for float32 products of recurrent layers, in all libraries alike."""
    if not isinstance(work, RecurrentLayer | ParaLayer):
        yield
        return
    libraries: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [library.allow_tf32 for library in libraries]
    try:
        for library in libraries:
            library.allow_tf32 = work.tf32
        yield
    finally:
        for library, allowed in zip(libraries, before, strict=True):
            library.allow_tf32 = allowed


def _measure_together(
    work: Workload,
    data: tuple[Tensor, ...],
    check: Check,
    builds: dict[str, Build],
    device: torch.device,
    seconds: float,
) -> dict[str, dict[str, Record]]:
    """Return the time and error of each contestant and pass, or why it is unavailable."""
    outcomes: dict[str, dict[str, Record]] = {name: {} for name in builds}
    runs: dict[str, Run] = {}
    for name, build in builds.items():
        start = time.perf_counter()
        try:
            runs[name] = build(work, data)
            checked = name != work.limit_name and runs[name].same_function
            errors = check.errors(runs[name]) if checked else {}
            if name != OURS and not all(math.isfinite(_largest_error(by_name)) for by_name in errors.values()):
                raise Unavailable("its result is not finite")  # and JSON has no NaN
        except Exception as error:
            if name == OURS:
                raise WrongResult(f"{work}: {_reason(error)}") from error
            runs.pop(name, None)
            outcomes[name] = {pass_name: {"unavailable": _reason(error)} for pass_name in work.passes}
            continue
        if name == OURS:
            _require_right(work, errors)
        details: Record = {"ready_after_seconds": time.perf_counter() - start}
        if runs[name].plan:
            details["plan"] = runs[name].plan
        outcomes[name] = {pass_name: details | _error_fields(errors.get(pass_name)) for pass_name in work.passes}
    for pass_name in work.passes:
        for name, timing in _timings(runs, pass_name, device, seconds).items():
            if name == OURS and "unavailable" in timing:
                raise WrongResult(f"{work}: {timing['unavailable']}")
            outcomes[name][pass_name] |= timing
    return outcomes


def _error_fields(errors: dict[str, float] | None) -> Record:
    """The fields of a record for the errors of a pass: the largest, and all of them if there are several."""
    if errors is None:
        return {"max_error": None}
    return {"max_error": _largest_error(errors)} | ({"errors": errors} if len(errors) > 1 else {})


def _largest_error(errors: dict[str, float]) -> float:
    """Return the maximum, or NaN if any error is NaN, unlike Python's ``max``."""
    return float(torch.tensor(list(errors.values()), dtype=torch.float64).max())


def _require_right(work: Workload, errors: Errors) -> None:
    """Raise WrongResult if an error is above the tolerance of the workload's dtype."""
    tolerance = TOLERANCE[torch.float16 if isinstance(work, RecurrentLayer | ParaLayer) and work.tf32 else work.dtype]
    if isinstance(work, RecurrentLayer) and work.trained:
        tolerance *= GRADIENT_FACTOR
    for error in map(_largest_error, errors.values()):
        if not error <= tolerance:
            raise WrongResult(f"{work}: relative error {error:.1e} against the float64 reference")


def _timings(runs: dict[str, Run], pass_name: str, device: torch.device, seconds: float) -> dict[str, Record]:
    """Time one pass of each contestant: on a CPU in interleaved rounds, on a GPU one after the other."""
    functions: dict[str, Callable[[], object]] = {}
    timings: dict[str, Record] = {}
    estimates: dict[str, float] = {}
    for name, run in runs.items():
        try:
            function = run.prepare(pass_name)
            function()
            if device.type == "cuda":
                timings[name] = _gpu_timing(function, run, seconds)
                continue
            run.refresh()
            estimates[name] = _elapsed(function)
            functions[name] = function
        except Exception as error:
            timings[name] = {"unavailable": _reason(error)}
    samples = {name: [estimate] for name, estimate in estimates.items() if estimate > SLOW}
    quick = [name for name in functions if name not in samples]
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / sum(estimates[name] for name in quick)))) if quick else 0
    samples |= {name: [] for name in quick}
    for _ in range(rounds):  # interleaved, so that noise affects all alike
        for name in quick:
            runs[name].refresh()
            samples[name].append(_elapsed(functions[name]))
    return timings | {name: {"seconds": statistics.median(times)} for name, times in samples.items()}


def _elapsed(function: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def _gpu_timing(function: Callable[[], object], run: Run, seconds: float) -> Record:
    """The median GPU time with cold caches, the median latency of a call, and its peak additional memory."""
    gc.collect()  # so that garbage of earlier calls is not freed during this one
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    samples = latencies = [_gpu_elapsed(function, run)]
    memory = torch.cuda.max_memory_allocated() - before
    if samples[0] <= SLOW:
        estimate = min(samples[0], _gpu_elapsed(function, run))  # the first alone may be an outlier
        rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / estimate)))
        for _ in range(WARM_UPS if estimate < seconds else 0):
            _gpu_elapsed(function, run)
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        samples = [_gpu_elapsed(function, run, flush) for _ in range(rounds)]
        latencies = [_elapsed(function, torch.cuda.synchronize) for _ in range(rounds)]
    return {
        "seconds": statistics.median(samples),
        "latency_seconds": statistics.median(latencies),
        "extra_memory_bytes": memory,
    }


def _gpu_elapsed(function: Callable[[], object], run: Run, flush: Tensor | None = None) -> float:
    """Return the GPU seconds of one call with changed weights, and with cold caches if given a buffer to `flush`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run.refresh()
    if flush is not None:
        for _ in range(FLUSHES):
            flush.zero_()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


def _record(work: Workload, pass_name: str, outcomes: dict[str, Record]) -> Record:
    """Assemble the record of one pass, with rates and ratios."""
    limit = outcomes.pop(work.limit_name, {}).get("seconds")
    limit = limit and limit * work.limit_share(pass_name)
    ours = outcomes.get(OURS, {}).get("seconds")
    for outcome in outcomes.values():
        if seconds := outcome.get("seconds"):
            outcome[f"{work.unit}_per_second"] = work.work(pass_name) / seconds
            if isinstance(work, RecurrentLayer):
                outcome["microseconds_a_step"] = 1e6 * seconds / work.length
            if limit:
                outcome["fraction_of_limit"] = limit / seconds
            outcome["times_ostinato"] = seconds / ours if ours else None
    shown = {name: value for name, value in asdict(work).items() if name not in ("who", "passes")}
    record: Record = {
        "workload": {"kind": work.kind, "name": str(work), **shown, "dtype": name_of(work.dtype)},
        "pass": pass_name,
        work.unit: work.work(pass_name),
        "contestants": outcomes,
    }
    if limit:
        rate = work.work(pass_name) / limit
        record["limit"] = {"name": work.limit_name, "seconds": limit, f"{work.unit}_per_second": rate}
    return record


def _reason(error: Exception) -> str:
    if isinstance(error, Unavailable):
        return str(error)
    first_line = next(iter(str(error).splitlines()), "")
    return f"failed: {type(error).__name__}: {first_line}"
