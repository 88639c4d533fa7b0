"""Differentiable collectives of a process group."""

import functools
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

_all_gather = (
    getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
)  # its name up to PyTorch 2.12


class Sum(torch.autograd.Function):
    """All-reduce, whose gradient is an all-reduce too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Sum.apply(grad, ctx.group), None


class Gathered(torch.autograd.Function):
    """All-gather to (R, ...); the gradient of a process's tensor is the sum of all processes' gradients of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gather(group, x)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Sum.apply(grad, ctx.group)[ctx.group.rank()], None


class Shared(torch.autograd.Function):
    """The identity for a tensor that all processes share; its gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grad is None else Sum.apply(grad, ctx.group), None


def gather(group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Each tensor of all processes, (R, ...), by one all-gather in the widest dtype."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    local = torch.cat([x.to(dtype).flatten() for x in tensors])
    gathered = local.new_empty(group.size() * len(local))
    _all_gather(gathered, local, group=group)
    parts = gathered.view(group.size(), -1).split([x.numel() for x in tensors], 1)
    return tuple(part.reshape(len(part), *x.shape).to(x.dtype) for part, x in zip(parts, tensors, strict=True))


def group_of(group: ProcessGroup | DeviceMesh) -> ProcessGroup:
    """The process group itself, or that of a device mesh of one dimension."""
    if isinstance(group, DeviceMesh):
        if group.ndim > 1:
            raise ValueError(f"group must be a device mesh of one dimension; got {group}")
        return group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a process group or a device mesh that this process is in; got {group!r}")
    return group
