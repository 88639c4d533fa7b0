"""This process among the others, and what all parts of ``distributed.py`` use."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

Record = dict[str, Any]
GATES = {"forgets": (0.0, 1.0), "never forgets": (12.0, 1.0)}  # mean and deviation before the sigmoid


class Job:
    """This process, its device, and how large the problems are."""

    def __init__(self, scale: int) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.world = distributed.group.WORLD
        self.scale = scale  # shifts sizes to the right

    def seconds(self, call: Callable[[], object], runs: int = 15) -> float:
        """The median of several calls, each as long as its slowest process, after two that do not count."""
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
        """The largest of all processes', which is NaN if any is, unlike Python's maximum."""
        found = torch.tensor(errors, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(found) for _ in range(self.size)]
        distributed.all_gather(everyone, found)
        return torch.stack(everyone).max().item()

    def random(self, *shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)


def gates(job: Job, *shape: int, kind: str, seed: int) -> Tensor:
    mean, deviation = GATES[kind]
    return job.random(*shape, seed=seed).mul_(deviation).add_(mean).sigmoid_()


def relative(x: Tensor, y: Tensor) -> float:
    if not x.numel():
        return 0.0
    return ((x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=1e-30)).item()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
