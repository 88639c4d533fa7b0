"""How ``torch.vmap`` runs an operator: once over the channels of all samples, or once for each sample."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Groups = tuple[tuple[int | None, ...], tuple[int, ...]]
"""The number of channel groups (a layer's directions and gates) of each argument and result; None without channels."""


def vmap_rule(name: str, call: Callable, groups: Callable[..., Groups] | None) -> Callable:
    """The rule by which ``torch.vmap`` runs an operator on tensors with an additional dimension of samples.

    If the operator treats channels, the last dimension, independently, ``groups(*args)`` returns the :data:`Groups` of
    its arguments and results, and one call runs on the channels of all samples, concatenated.
    """

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size = info.batch_size
        if size == 0:
            raise ValueError(f"vmap over {name} needs samples; got a dimension of size 0")
        arg_groups, result_groups = groups(*args) if groups else ((None,) * len(args), ())
        if any(n is None and dim is not None for n, dim in zip(arg_groups, in_dims, strict=True)):
            samples = [call(*map(functools.partial(_sample, i), args, in_dims)) for i in range(size)]
            results = tuple(map(torch.stack, zip(*samples, strict=True)))
        else:
            folded = call(*map(functools.partial(_folded, size), args, in_dims, arg_groups))
            results = tuple(map(functools.partial(_unfolded, size), folded, result_groups))
        return results, (0,) * len(results)

    return vmap


def _sample(i: int, x: Any, dim: int | None) -> Any:
    return x if dim is None else x.select(dim, i)


def _folded(size: int, x: Any, dim: int | None, groups: int | None) -> Any:
    """(..., groups * channels), with samples along `dim` or the same for all, to (..., groups * size * channels)."""
    if groups is None or x is None:
        return x
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.unflatten(-1, (groups, x.shape[-1] // groups)).movedim(0, -2).flatten(-3)


def _unfolded(size: int, x: Tensor, groups: int) -> Tensor:
    """The inverse of :func:`_folded`, with samples in the first dimension."""
    return x.unflatten(-1, (groups, size, x.shape[-1] // (groups * size))).movedim(-2, 0).flatten(-2)
