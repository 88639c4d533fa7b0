"""Masks of pruned layers: a pruned weight counts as zero, gets no gradient, and is zeroed after every optimiser step.

The mask of a parameter such as ``weight_hh_l0`` is a buffer of its module, ``mask_hh_l0``, True where the weight
is kept, so that it is saved, moved and copied with the module.  Layers read their weights through :func:`masked`.
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ostinato.kernels.derived import derived_from
from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.persistent.masks import BLOCKS

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()  # from pruned parameters to their modules and names


def block_name(block: tuple[int, int]) -> str:
    """(16, 1) as "16x1"."""
    return f"{block[0]}x{block[1]}"


def block_named(name: str) -> tuple[int, int]:
    """The block of a name, (16, 1) of "16x1".  Raises ValueError for a block that is not in ``BLOCKS``."""
    blocks = {block_name(block): block for block in BLOCKS}
    if name not in blocks:
        raise ValueError(f"block must be one of {', '.join(blocks)}; got {name!r}")
    return blocks[name]


def mask_name(name: str) -> str:
    """The buffer with the mask of the parameter called ``name``."""
    return name.replace("weight", "mask", 1)


def mask_of(module: nn.Module, name: str) -> Tensor | None:
    """The mask of the parameter called ``name``, if it is pruned."""
    return module._buffers.get(mask_name(name))


def kept_weights(model: nn.Module) -> tuple[int, int]:
    """How many weights a model's masks keep, and of how many."""
    masks = [mask for name, mask in model.named_buffers() if name.rpartition(".")[2].startswith("mask_")]
    return sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)


def masked(module: nn.Module, name: str, weight: Tensor | None = None) -> Tensor:
    """The parameter called ``name``, or the given weight, with zeros where it is pruned; these get no gradient."""
    weight, mask = getattr(module, name) if weight is None else weight, mask_of(module, name)
    if mask is None:
        return weight
    if weight.requires_grad and torch.is_grad_enabled():
        if not torch.compiler.is_compiling():
            keep_pruned(module, name)
    elif weight.device.type == "cpu" and is_eager([weight, mask]):
        # Vectorised, unlike torch.where, which would take longer than a step of the layer.
        integers = _INTEGERS[weight.itemsize]
        bits = derived_from(mask, integers, lambda: -mask.to(integers))  # all ones where a weight is kept
        return torch.bitwise_and(weight.view(integers), bits).view(weight.dtype)
    return torch.where(mask, weight, 0.0)


def keep_pruned(module: nn.Module, name: str) -> None:
    """Zero the pruned weights after each optimiser step, as momentum from before pruning would update them."""
    _owners[getattr(module, name)] = weakref.ref(module), name
    _watch_optimizers()


def forget_pruned(module: nn.Module, name: str) -> None:
    """Undo :func:`keep_pruned`, which keeps a weak reference to the parameter."""
    _owners.pop(getattr(module, name), None)


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_zero_pruned)


@torch.no_grad()
def _zero_pruned(optimizer: Optimizer, *_: Any) -> None:
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter in _owners:
            owner, name = _owners[parameter]
            module = owner()
            mask = None if module is None else mask_of(module, name)
            if mask is not None:
                parameter.masked_fill_(~mask, 0.0)
