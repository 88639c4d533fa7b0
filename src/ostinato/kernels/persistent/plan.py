"""How a recurrent layer is run: the plan, common to CPU and GPU kernels."""

from typing import Any, NamedTuple

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}


class Plan(NamedTuple):
    """How a layer will be run, and why."""

    path: str  # "dense", "sparse" or "block": a persistent kernel; "steps": torch's
    bytes_on_chip: int  # recurrent weights in registers and shared memory, summed over all blocks
    bytes_available: int
    blocks: int
    reason: str
    geometry: Any = None  # the kernel's launch geometry


def no_kernel(reason: str) -> Plan:
    """The plan to leave a layer to torch's kernels."""
    return Plan("steps", 0, 0, 0, reason)
