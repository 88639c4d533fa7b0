"""Measures what each optimisation of the persistent kernels is worth, by switching off one at a time.

    python benchmarks/ablation.py --output benchmarks/results/ablation-gpu.json

A switch replaces text in the kernels' source before it is compiled, so the kernels themselves need no switches.  Every
variant is checked against float64 before it is timed, as in ``ostinato bench persistent``.
"""

import argparse
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from ostinato.bench.measure import measure
from ostinato.bench.runs import environment, write_json
from ostinato.bench.shapes import KERNELS, PRUNED
from ostinato.bench.workloads import OURS, RecurrentLayer
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.persistent.cuda import launch as cuda_launch
from ostinato.kernels.persistent.cuda.heuristics.geometry import Geometry

LAYERS = (  # each with the kernel that runs it
    (RecurrentLayer("GRU", 1024, 16, dtype=torch.bfloat16, who=(OURS,)), "dense"),
    (RecurrentLayer("LSTM", 768, 16, who=(OURS,)), "dense"),
    (RecurrentLayer("LSTM", 2304, 4, who=(OURS,), **PRUNED), "block"),
    (RecurrentLayer("RNN", 8192, 4, who=(OURS,), **PRUNED), "block"),
    (RecurrentLayer("LSTM", 2304, 4, density=0.1, who=(OURS, KERNELS[1])), "sparse"),
)
COUNTER = """
__device__ unsigned arrived[1024];  // by group: arrivals of blocks, over all steps and launches so far

__device__ inline unsigned count(int group) {
    unsigned count;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(count) : "l"(arrived + group) : "memory");
    return count;
}

__device__ inline void await(int group, unsigned wanted) {
    if (threadIdx.x == 0)
        for (int polls = 0; polls < 1 << 22 && int(count(group) - wanted) < 0; ++polls);
    __syncthreads();
}

__device__ inline void raise(int group) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(arrived + group, 1u);
}

"""
KERNEL = 'extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) recur('
TIMEOUT = "    Timeout timeout(p.failure);\n"
WAIT = "if (UNITS * exchanged() <= THREADS - 32 && !POLLS_EARLY) __syncthreads();"
LOAD = "        product.start_load(state, iteration);\n"
UPDATE = "        units.update(rows, product, sums, state, iteration);\n"
TAKE = "if (READS_AHEAD && !weights.is_in_registers(tile)) {"
WIDE = '@p " LOAD_STATE ".v2.b64 {%0, %1}, [" address "];"'
ALL = ("dense", "block", "sparse")
# By the name of the optimisation: the kernels that have it, and the replacements in their source that switch it off.
SWITCHES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "weights on the chip": (  # instead, they are read from the L2 cache
        ("dense",),
        {TAKE: f"return weights.memory.load(tile); {TAKE}"},
    ),
    "states as their own flags": (  # instead, a counter that a block increments when its states are visible
        ALL,
        {
            KERNEL: COUNTER + KERNEL,
            TIMEOUT: TIMEOUT + "    const unsigned begun = count(group) / BLOCKS * BLOCKS;\n",
            LOAD: f"        await(group, begun + unsigned(iteration) * BLOCKS);\n{LOAD}",
            UPDATE: f"{UPDATE}        raise(group);\n",
        },
    ),
    "loads of 16 bytes": (
        ("dense",),
        {WIDE: '@p " LOAD_STATE ".b64 %0, [" address "]; @p " LOAD_STATE ".b64 %1, [" address "+8];"'},
    ),
    "prefetches": (ALL, {"if (iteration + PREFETCH < p.steps)": "if (false)"}),
    "waiting before the first look": (ALL, {WAIT: ""}),
    "columns in the order of banks": (("block", "sparse"), {}),  # the order is chosen in Python, see below
}


@contextmanager
def switched_off(name: str) -> Iterator[None]:
    """Compile kernels without the named optimisation, or unchanged for "".

    Raises RuntimeError if a replacement was never made: the kernels would then have been timed unchanged.
    """
    source, substitutions = nvrtc.source, SWITCHES[name][1] if name else {}
    replaced: set[str] = set()

    def patched(*files: str) -> str:
        text = source(*files)
        for old, new in substitutions.items():
            if old in text:
                replaced.add(old)
            text = text.replace(old, new)
        return text

    banks = property(lambda _: 1) if name and not substitutions else Geometry.banks
    _forget_kernels()
    with mock.patch.object(nvrtc, "source", patched), mock.patch.object(Geometry, "banks", banks):
        yield
    _forget_kernels()
    if replaced != set(substitutions):
        raise RuntimeError(f"no kernel was compiled without {name}")


def _forget_kernels() -> None:
    for cached in (cuda_launch.kernels, cuda_launch._launch_of):
        cached.cache_clear()


def variant(work: RecurrentLayer, path: str, name: str) -> float:
    """Measure the microseconds a step of a layer without an optimisation."""
    with switched_off(name):
        (record,) = measure(work, torch.device("cuda"), 1.0)
    outcome = record["contestants"][work.who[-1]]
    if "unavailable" not in outcome:
        assert outcome["plan"]["path"] == path, outcome
        return outcome["microseconds_a_step"]
    assert record["contestants"][OURS]["plan"]["path"] == path, outcome  # the kernel asked for is the plan's own choice
    return record["contestants"][OURS]["microseconds_a_step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--processes", type=int, default=14, help="that compile the kernels beforehand")
    arguments = parser.parse_args()
    content = {**environment(torch.device("cuda")), "results": []}
    tasks = [
        (*layer, name) for layer in LAYERS for name in ("", *SWITCHES) if not name or layer[1] in SWITCHES[name][0]
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        pool.starmap(variant, tasks, chunksize=1)
    for work, path, name in tasks:
        time = variant(work, path, name)
        print(f"{work}, {path}, without {name or 'anything'}: {time:.2f} us a step", flush=True)
        row = {"layer": str(work), "kernel": path, "switched_off": name, "microseconds_a_step": time}
        content["results"].append(row)
        write_json(arguments.output, content)


if __name__ == "__main__":
    main()
