"""This process as one of several, and helpers of all parts of ``distributed.py``."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

Record = dict[str, Any]
GATES = {"forgets": (0.0, 1.0), "never forgets": (12.0, 1.0)}  # mean and standard deviation before the sigmoid


class Job:
    """This process's rank and device, and the scale of the problems."""

    def __init__(self, scale: int) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.world = distributed.group.WORLD
        self.scale = scale  # sizes are shifted right by it

    def seconds(self, call: Callable[[], object], runs: int = 15) -> float:
        """Return the median time of calls, each being that of its slowest process, after two warm-up calls."""
        times = []
        for number in range(runs + 2):
            distributed.barrier()
            self.wait()
            begin = time.perf_counter()
            call()
            self.wait()
            if number >= 2:
                times.append(time.perf_counter() - begin)
        slowest = torch.tensor(times, dtype=torch.float64, device=self.device)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        return statistics.median(slowest.tolist())

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def worst(self, *errors: float) -> float:
        """Return the largest error of all processes, or NaN if any error is NaN, unlike Python's ``max``."""
        local = torch.tensor(errors, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(local) for _ in range(self.size)]
        distributed.all_gather(everyone, local)
        return torch.stack(everyone).max().item()

    def random(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)


def gates(job: Job, *shape: int, kind: str, seed: int) -> Tensor:
    """Draw random gates of a kind of GATES."""
    mean, deviation = GATES[kind]
    return job.random(*shape, seed=seed).mul_(deviation).add_(mean).sigmoid_()


def relative(x: Tensor, y: Tensor) -> float:
    """Return the largest error of x, relative to the largest value of y."""
    if not x.numel():
        return 0.0
    return ((x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=1e-30)).item()


def free() -> None:
    """Free unused memory, and reset its peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
