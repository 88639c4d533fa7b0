"""Simulates, message by message, the exchange between the shards of a sequence on many GPUs.

    python benchmarks/exchange.py --output benchmarks/results/exchange-simulated.json

Every process has the product P of its shard's coefficients and its local last state L, and needs the state carried into
its shard.  Three algorithms:

    ring       an all-gather that passes messages around a ring, R - 1 times
    doubling   an all-gather by recursive doubling: log2(R) rounds, whose messages double
    log-step   a scan over the processes by recursive doubling, whose messages are composed and so do not grow

The last is also computed, and compared with a scan in one process.  A message costs ``latency + bytes / rate``, with
one latency and rate inside a machine and another between machines.  An exchange also has a fixed cost, which was
measured: an all-gather of 2 x 256 floats on two H200 took 32 microseconds.  INPUTS says which others are measured.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ostinato
from ostinato.bench.runs import environment, write_json

INPUTS = {
    "exchange_seconds": 32e-6,  # measured: a whole all-gather of a few bytes on two GPUs
    "gpus_a_machine": 8,
    "inside": {"latency": 2e-6, "rate": 330e9},  # assumed; measured: large all-gathers among four H200, each receiving
    "between": {"latency": 5e-6, "rate": 50e9},  # assumed; a network card of 400 Gb/s for each GPU
    "memory_rate": 4e12,  # measured: torch.add on an H200
    "scan_share": 0.8,  # of that rate, what a scan reaches; measured 0.79 to 0.83
    "host_seconds": 0.4e-3,  # measured 0.36 to 0.50: what a call takes on the host before and after its own scan
}
BYTES = 16  # per channel: P and L, both in float64
PROCESSES = (2, 8, 64, 256, 1024, 4096)
WIDTHS = (256, 1024, 8192)


def hop(sender: int, receiver: int, size: int) -> float:
    """Seconds of one message of `size` bytes."""
    machine = INPUTS["gpus_a_machine"]
    link = INPUTS["inside" if sender // machine == receiver // machine else "between"]
    return link["latency"] + size / link["rate"]


def ring(processes: int, size: int) -> tuple[float, int]:
    """Seconds until the last process has all messages, and the bytes that each process receives."""
    ready = [0.0] * processes  # when a process has what it sends next
    hops = [hop(rank - 1 if rank else processes - 1, rank, size) for rank in range(processes)]
    for _ in range(processes - 1):
        ready = [max(ready[rank], ready[rank - 1] + hops[rank]) for rank in range(processes)]
    return max(ready), (processes - 1) * size


def doubling(processes: int, size: int) -> tuple[float, int]:
    ready, reach = [0.0] * processes, 1
    while reach < processes:
        number = min(reach, processes - reach)
        ready = [
            max(ready[rank], ready[rank - reach] + hop((rank - reach) % processes, rank, number * size))
            for rank in range(processes)
        ]
        reach *= 2
    return max(ready), (processes - 1) * size


def log_step(processes: int, size: int) -> tuple[float, int]:
    ready, reach, rounds = [0.0] * processes, 1, 0
    while reach < processes:
        ready = [
            max(ready[rank], ready[rank - reach] + hop(rank - reach, rank, size)) if rank >= reach else ready[rank]
            for rank in range(processes)
        ]
        reach, rounds = 2 * reach, rounds + 1
    return max(ready), rounds * size


def log_step_states(P: Tensor, L: Tensor) -> Tensor:
    """The states after each of R shards, (R, D), by recursive doubling: a Hillis-Steele scan over the processes."""
    reach = 1
    while reach < len(P):
        received_P = torch.cat((torch.ones_like(P[:reach]), P[:-reach]))
        received_L = torch.cat((torch.zeros_like(L[:reach]), L[:-reach]))
        P, L = P * received_P, P * received_L + L
        reach *= 2
    return L


def largest_error(processes: int) -> float:
    generator = torch.Generator().manual_seed(0)
    P, L = torch.rand(2, processes, 64, dtype=torch.float64, generator=generator)
    states, _ = ostinato.linear_scan(P[None], L[None], backend="reference")
    return (log_step_states(P, L) - states[0]).abs().max().item()


ALGORITHMS: dict[str, Callable[[int, int], tuple[float, int]]] = {
    "ring": ring,
    "doubling": doubling,
    "log-step": log_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    rows: list[dict[str, Any]] = []
    for width in WIDTHS:
        for processes in PROCESSES:
            row: dict[str, Any] = {"processes": processes, "channels": width}
            for name, algorithm in ALGORITHMS.items():
                seconds, received = algorithm(processes, BYTES * width)
                row[name] = {"seconds": INPUTS["exchange_seconds"] + seconds, "bytes": received}
            steps = 1 << 30 - int(math.log2(width))  # 2^30 elements per GPU
            scan = 3 * 4 * steps * width / (INPUTS["memory_rate"] * INPUTS["scan_share"])
            best = min(row[name]["seconds"] for name in ("ring", "doubling"))
            row["steps"] = steps
            row["scan_seconds"] = scan
            row["share_of_linear"] = scan / (scan + best + INPUTS["host_seconds"])
            rows.append(row)
    errors = {str(processes): largest_error(processes) for processes in PROCESSES}
    write_json(
        output,
        {"environment": environment(torch.device("cpu")), "inputs": INPUTS, "errors": errors, "results": rows},
    )
    for row in rows:
        print(row)
    print(errors)


if __name__ == "__main__":
    main()
