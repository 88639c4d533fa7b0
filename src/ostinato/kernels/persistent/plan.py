"""How a recurrent layer is run: what is asked of the kernels of a device, and what they answer."""

from typing import Any, Final, Literal, NamedTuple

import torch

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}
MANY_STEPS = 1000
KernelPath = Literal["dense", "block", "sparse"]
"""A persistent kernel, by the weights that it multiplies: all, blocks, or entries."""

NO_KERNEL: Final = "steps"  # the path of a plan without a persistent kernel: torch's, or on a GPU that of one step


class Call(NamedTuple):
    """A call of one layer and direction, as far as its plan depends on it."""

    device: torch.device
    cell: str  # of GATES
    hidden_size: int
    batch: int
    dtype: torch.dtype
    training: bool  # whether gradients will be computed
    steps: int | None  # of the longest sequence; None if they are many
    path: KernelPath | None = None  # the only kernel to consider; None for the fastest
    at_once: int = 1  # such layers that run at once: directions, or stacked layers
    resets: bool = False  # inside sequences, which torch's kernels do not support
    packed: bool = False  # sequences of different lengths
    compared: bool = False  # with torch's kernels, which run what they are faster at; else ours do wherever they fit
    threads: int = 1  # of a CPU
    bidirectional: bool = False  # the layers that run at once are both directions of one
    captured: bool = False  # in a CUDA graph, whose launches cost the host nothing; of dense layers alone
    replayed: bool = False  # from a CUDA graph once it has repeated, which costs the host less than torch's launches

    @property
    def length(self) -> int:
        """The steps, as many of them as are likely if it is not known."""
        return MANY_STEPS if self.steps is None else self.steps


class Plan(NamedTuple):
    """How a layer will be run, and why."""

    path: KernelPath | Literal["steps"]  # NO_KERNEL, which is "steps", for none
    bytes_on_chip: int = 0  # recurrent weights in registers and shared memory, summed over all blocks
    bytes_available: int = 0
    blocks: int = 0
    reason: str = ""
    geometry: Any = None  # the kernel's launch geometry
    at_once: int = 1  # stacked layers that run at the same time, or directions, which take turns unless they fit so
    directions: int = 1  # that one launch runs

    @property
    def has_kernel(self) -> bool:
        """Whether a persistent kernel runs the layer."""
        return self.path != NO_KERNEL


def no_kernel(reason: str, bytes_available: int = 0) -> Plan:
    """The plan to leave a layer to torch's kernels."""
    return Plan(NO_KERNEL, bytes_available=bytes_available, reason=reason)


def keeps_gates(cell: str) -> bool:
    """Whether the kernels' forward saves all gates' pre-activations instead of recomputing them in the backward.

    Recomputation takes two of a training step's six large GEMMs, or, of small layers on a GPU, of the host's launches.
    An RNN needs only its states.
    """
    return GATES[cell] > 1
