"""Prints the CPU seconds that NVRTC takes for each kernel of typical scans and layers, slowest first; needs no GPU.

python benchmarks/compiling.py [PART OF A NAME]
"""

import functools
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from cuda import core

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.persistent.cuda import source
from ostinato.kernels.persistent.cuda.heuristics import search
from ostinato.kernels.recurrence.linear import cuda, projected
from ostinato.kernels.scan.cuda import launch, problem
from ostinato.kernels.scan.cuda.heuristics.criteria import Device
from ostinato.minimal.recurrences import GATES, recurrence_of

f32, bf16 = torch.float32, torch.bfloat16
H200 = {"multi_processor_count": 132, "shared_memory_per_block_optin": 227 << 10, "regs_per_multiprocessor": 1 << 16}
REPETITIONS = 3
SCANS = (
    *((8, 4096, 1536), (2, 100000, 384), (3, 5000, 1000), (128, 512, 256), (1, 65536, 256), (8, 2048, 255)),
    *((1, 2**20, 64), (1, 2**18, 16), (4, 2**20, 8), (1, 3_000_000, 7), (1, 2**24, 1)),
)
MINIMAL = (16, 4096, 1024), (64, 512, 512), (1, 65536, 256)
RECURRENT = ("gru", 128, 64), ("gru", 512, 256), ("gru", 1024, 16), ("lstm", 256, 64), ("lstm", 1024, 16)

Source = tuple[str, Any, str]  # code, macros, architecture


def scans() -> Iterator[tuple[str, launch.Scan]]:
    for batch, steps, channels in SCANS:
        strides = ((steps * channels, channels, 0),)
        for dtype, backward, masked in ((d, b, m) for d in (f32, bf16) for b in (False, True) for m in (False, True)):
            scan = problem.Problem(
                "LinearScan" + "Backward" * backward,
                dtype,
                0,
                *(batch, steps, channels),
                *(strides * n for n in ((3, 2) if backward else (2, 1))),
                resets=(steps, 1, 0) if masked else None,
            )
            yield f"{scan.element} {dtype} {(batch, steps, channels)}{' resets' * masked}", launch.Scan(scan)


def minimal() -> Iterator[tuple[str, launch.Scan]]:
    for cell, (batch, steps, channels) in ((c, s) for c in ("mingru", "minlstm") for s in MINIMAL):
        recurrence = recurrence_of(cell, "positive", True)
        for dtype, backward in ((d, b) for d in (f32, bf16) for b in (False, True)):
            shape = batch, steps, GATES[cell] * channels
            scan = cuda._prepare_layer(recurrence, backward, dtype, 0, shape, (0, 0), True, 1, None, dtype)
            yield f"{cell}{' backward' * backward} {dtype} {(batch, steps, channels)}", scan


def sources() -> Iterator[tuple[str, Source]]:
    """Yield every kernel's name and source, as the heuristics choose it for an H200.

    Functions that need a GPU are replaced for the rest of the process: kernels are recorded instead of loaded.
    """
    recorded: list[Source] = []

    def load(name: str, code: str, macros: Any, device: int) -> Any:
        recorded.append((code, macros, "sm_90"))
        return SimpleNamespace(prepared=lambda *_, **__: None)

    nvrtc.load_kernel = load  # type: ignore[assignment]
    problem.describe_device = lambda index: Device(132, 4.9e12, 227 << 10, 228 << 10, True)  # type: ignore[assignment]
    for name, scan in (*scans(), *minimal()):
        launch._prepare(scan.problem, scan.problem.dtype, 0)
        yield name, recorded[-1]
    for cell in ("mingru", "minlstm"):
        recurrence = recurrence_of(cell, "positive", False)
        yield f"{cell} with its product", (projected.source(recurrence), projected.macros(recurrence, bf16), "sm_90a")
    properties = SimpleNamespace(**H200, L2_cache_size=60 << 20, major=9)
    for cell, hidden, batch in RECURRENT:
        for dtype, backward in ((d, b) for d in (f32, bf16) for b in (False, True)):
            plan = search.choose_geometry(cell, hidden, batch, dtype, None, None, properties, backward=backward)
            code = source.code(plan.geometry)
            macros = source.macros(plan.geometry, keeps=not backward)
            arch = f"sm_90{source.feature(plan.geometry)}"
            yield f"{cell} {hidden}{' backward' * backward} {dtype}, {batch} sequences", (code, macros, arch)


def seconds(kernel: Source) -> tuple[float, int]:
    """Return the least CPU time of a few compilations, and the bytes of machine code."""
    code, macros, arch = kernel
    least, size = float("inf"), 0
    for _ in range(REPETITIONS):
        start = time.process_time()
        size = len(nvrtc.compile_cubin(code, arch, dict(macros)))
        least = min(least, time.process_time() - start)
    return least, size


if __name__ == "__main__":
    # With a driver present, NVRTC caches machine code, also for another program with the same source.
    core.ProgramOptions = functools.partial(core.ProgramOptions, no_cache=True)
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    rows = [(*seconds(kernel), name) for name, kernel in sources() if part in name]
    for row in sorted(rows, reverse=True):
        print("{:5.2f} s {:6} bytes  {}".format(*row))
