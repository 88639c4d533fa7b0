"""Compiles all kernels of the benchmarks beforehand, in parallel processes, into the caches on disk."""

import multiprocessing
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from ostinato.bench.papers import sweeps
from ostinato.bench.peers import contestants
from ostinato.bench.shapes import ON_CUDA
from ostinato.bench.workloads import OURS, Workload

# Contestants that compile kernels.
COMPILED = re.compile(rf"^{OURS}$|kernel$|^accelerated-scan|associative_scan$|compiled|^pararnn|^torchrl|^flashrnn")
EXTENSION = "accelerated-scan warp"  # built once for all workloads
LARGE = 1 << 30  # bytes of an input above which the processes' tensors would not fit on the GPU together
PATIENCE = 240.0  # seconds without a finished task before giving up: the compilers of some peers hang

Task = tuple[Workload, str, tuple[str, ...]]  # workload, contestant, passes


def tasks(kinds: Sequence[str] = ()) -> list[Task]:
    """List the workloads of all GPU benchmarks, or of some kinds, with each contestant that compiles, slowest first.

    PyTorch's compiler takes half a minute for a pass of some peers, so their passes are separate tasks.
    Raises ValueError for an unknown kind.
    """
    every_kind = ON_CUDA | {
        "papers": [work for sweep in sweeps(quick=False) for work in sweep.workloads.get("cuda", [])]
    }
    if not set(kinds) <= every_kind.keys():
        raise ValueError(f"kinds must be some of {', '.join(every_kind)}; got {', '.join(kinds)}")
    works = [work for kind in kinds or every_kind for work in every_kind[kind]]
    once: dict[object, Task] = {}
    for work in works:
        for name in filter(COMPILED.search, contestants(work)):
            for passes in zip(work.passes) if "compiled" in name else (work.passes,):
                task = work, name, passes
                once.setdefault(name if name == EXTENSION else task, task)
    return sorted(once.values(), key=lambda task: (task[1] != EXTENSION, "compiled" not in task[1], OURS in task[1]))


def call_once(task: Task) -> None:
    """Run a task to fill the caches; errors are left to the benchmark to report."""
    work, name, passes = task
    torch.set_num_threads(1)
    torch.manual_seed(0)  # as in `measure`: kernels of pruned layers are compiled for their mask
    with suppress(Exception):
        data = work.data(torch.device("cuda"))
        if data[0].nbytes <= LARGE:
            run = contestants(work)[name](work, data)
            for pass_name in passes:
                run.prepare(pass_name)()
            torch.cuda.synchronize()
        del data
        torch.cuda.empty_cache()


def warm(processes: int, kinds: Sequence[str] = ()) -> Iterator[int]:
    """Run all tasks, and yield how many are left, at first and after each.

    Ends early if none finishes for PATIENCE seconds: what is left is compiled when it is measured.
    """
    waiting = tasks(kinds)
    os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in each process
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        done = pool.imap_unordered(call_once, waiting)
        yield len(waiting)
        for left in reversed(range(len(waiting))):
            try:
                done.next(PATIENCE)
            except multiprocessing.TimeoutError:
                return
            yield left
