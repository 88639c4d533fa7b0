"""Layers of a sequence that is sharded along time."""

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ostinato.distributed import boundary
from ostinato.distributed.boundary import Boundary
from ostinato.distributed.collectives import Gathered, Shared, group_of
from ostinato.distributed.kinds import Minimal
from ostinato.distributed.steps import ends
from ostinato.kernels.matmul.gemm import linear

Module = TypeVar("Module", bound=nn.Module)


def sequence_parallel(module: Module, group: ProcessGroup | DeviceMesh) -> Module:
    """Make the layers in ``module`` process sequences that are sharded along time.

    Inputs and outputs are then contiguous shards of any lengths, in the order of the ranks; initial and last states are
    those of the whole sequence, the same on all processes.  Each process computes its own gradients of the weights, to
    be summed or averaged as in data parallelism.  Layers with a scan and the causal convolution of
    :mod:`ostinato.models` communicate; whatever else in a module mixes time steps is left to the caller.  ``step``, and
    whatever calls it, needs a module of whole sequences: load the weights into another one.

    Args:
        module: a layer, or a model that contains some.
        group: a process group, or a device mesh of one dimension.

    Returns:
        ``module``, changed in place.

    Raises:
        TypeError: a ``module`` or ``group`` of another type.
        ValueError: a module with an ``RNN``, ``GRU`` or ``LSTM``, whose steps are inherently sequential.  Layers whose
            recurrence is nonlinear or complex (SRU, IndRNN, ParaGRU, ParaLSTM, SLSTM, LRU) raise it at the first call.

    Example:
        >>> import torch, ostinato, ostinato.distributed
        >>> model = ostinato.MinGRU(8, 16, batch_first=True)
        >>> group = torch.distributed.new_group([0, 1])  # doctest: +SKIP
        >>> model = ostinato.distributed.sequence_parallel(model, group)  # doctest: +SKIP
        >>> y, h_n = model(x)  # x and y: this process's steps  # doctest: +SKIP
    """
    group = group_of(group)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module; got {type(module).__name__}")
    for name, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase):
            raise ValueError(
                f"module must not have a layer whose steps are inherently sequential; got {name or 'one'}, a "
                f"{type(layer).__name__}"
            )
        if hasattr(layer, "sequence_group"):
            layer.sequence_group = lambda: group  # a function, as a process group cannot be deep-copied
    return module


def minimal_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    h0: Tensor | None,
    cell: str,
    candidate: str,
    batch_first: bool,
    backend: str,
    *,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """A minimal layer in one direction over this process's shard ``x``; h0 and h_last are (1, B, H)."""

    def steps(x: Tensor) -> Minimal:
        return Minimal(linear(x, weight), bias, cell, candidate, batch_first, backend)

    time, forgets = 1 if batch_first else 0, None
    if group.size() > 1 and boundary.can_test(x.shape[time], x.device):
        with torch.no_grad():  # launched before the large GEMM, which then hides the host's work
            forgets = steps(ends(x, time, boundary.FIRST_REACH)).launch_test()
    part = steps(x)
    start = None if h0 is None else h0[0].to(part.dtype)
    h, h_last = part.run(start) if group.size() == 1 else Boundary(part, group, forgets).run(start)
    return h, h_last[None]


def steps_before(x: Tensor, initial: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The halo of the shard x, (B, T, W): the K steps before it; and the last K steps of the whole sequence.

    ``initial``, (B, K, W), are the steps before the whole sequence, the same on all processes.
    """
    count = initial.shape[1]
    if not count:
        return initial, initial
    marked = F.pad(x[:, -count:], (0, 1), value=1.0)  # an extra channel tells steps from padding
    tails = Gathered.apply(F.pad(marked, (0, 0, count - marked.shape[1], 0)), group)
    first = F.pad(Shared.apply(initial, group), (0, 1), value=1.0).to(tails.dtype)
    steps = torch.cat((first, *tails.unbind()), 1)

    def last(steps: Tensor) -> Tensor:
        order = steps[:, :, -1].sum(0).argsort(stable=True)  # padding first
        return steps[:, order[-count:], :-1].to(x.dtype)

    return last(steps[:, : (group.rank() + 1) * count]), last(steps)
