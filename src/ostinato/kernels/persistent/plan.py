"""How a recurrent layer is run: what the CPU's and the GPU's kernels plan alike."""

from typing import Any, NamedTuple

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}


class Plan(NamedTuple):
    """How a layer will be run, and why."""

    path: str  # "dense", "sparse" or "block": a kernel of our own; "steps": torch's
    bytes_on_chip: int  # recurrent weights in registers and shared memory, all blocks together
    bytes_available: int
    blocks: int
    reason: str
    geometry: Any = None  # what else the kernel has to know


def no_kernel(reason: str) -> Plan:
    """The plan to leave a layer to torch's kernels."""
    return Plan("steps", 0, 0, 0, reason)
