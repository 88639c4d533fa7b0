"""How a recurrent layer is run: the properties of a call, and the plan that a device's kernels make for it."""

from typing import Any, Final, Literal, NamedTuple

import torch

GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}
MANY_STEPS = 1000
KernelPath = Literal["dense", "block", "sparse"]
"""A persistent kernel, by the weights that it multiplies: all, blocks, or single entries."""

NO_KERNEL: Final = "steps"  # the path without a persistent kernel: torch's kernels, or on a GPU that of a single step


class Call(NamedTuple):
    """The properties of a call of one layer and direction that its plan depends on."""

    device: torch.device
    cell: str  # a key of GATES
    hidden_size: int
    batch: int
    dtype: torch.dtype
    training: bool  # whether gradients will be computed
    steps: int | None  # of the longest sequence; None for an unknown, large number
    path: KernelPath | None = None  # the only kernel to consider; None for the fastest
    at_once: int = 1  # the number of such layers that run at once: directions, or stacked layers
    resets: bool = False  # whether states are reset inside sequences, which torch's kernels do not support
    packed: bool = False  # whether sequences have different lengths
    compared: bool = False  # whether torch's kernels run the call if they are faster; else ours do wherever they fit
    threads: int = 1  # of a CPU
    bidirectional: bool = False  # whether the layers that run at once are both directions of one
    captured: bool = False  # in a CUDA graph, where launches cost the host nothing; only for dense layers
    proj_size: int = 0  # of an LSTM's projection of h: torch's kernels read other weights then
    replayed: bool = False  # from a CUDA graph once it repeats, which costs the host less than torch's launches

    @property
    def length(self) -> int:
        """The number of steps, or a likely one if it is not known."""
        return MANY_STEPS if self.steps is None else self.steps


class Plan(NamedTuple):
    """How a layer will be run, and why."""

    path: KernelPath | Literal["steps"]  # "steps" is NO_KERNEL
    bytes_on_chip: int = 0  # of recurrent weights in registers and shared memory, summed over all thread blocks
    bytes_available: int = 0
    blocks: int = 0
    reason: str = ""
    geometry: Any = None  # the kernel's launch geometry
    at_once: int = 1  # stacked layers, or directions, that run at the same time; directions that do not fit take turns
    directions: int = 1  # the number of directions that one launch runs

    @property
    def has_kernel(self) -> bool:
        """Whether a persistent kernel runs the layer."""
        return self.path != NO_KERNEL


def no_kernel(reason: str, bytes_available: int = 0) -> Plan:
    """The plan to leave a layer to torch's kernels."""
    return Plan(NO_KERNEL, bytes_available=bytes_available, reason=reason)


def keeps_gates(cell: str) -> bool:
    """Whether the kernels' forward saves all gates' pre-activations, so that the backward need not recompute them.

    Recomputation would add two large GEMMs, or launches of small layers on a GPU, to the four of a training step.  An
    RNN needs only its states.
    """
    return GATES[cell] > 1
