"""Gradients of a function by calling it again in the backward pass, with autograd enabled."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import DispatchKeySet, Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

Gradients = Sequence[Tensor | None]

_VMAP_MODE = DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))  # active in torch.autograd's batched gradients


def by_autograd(
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    grads: Gradients,
    needed: Sequence[bool],
) -> Gradients:
    """The gradients of the tensors that need them, given those of the function's results, by calling it again.

    They are differentiable if gradients are enabled.
    """
    if torch.compiler.is_compiling():  # compiled autograd would trace into the function and lose all gradients
        return torch.compiler.disable(_by_autograd)(function, tensors, grads, needed)
    return _by_autograd(function, tensors, grads, needed)


def _by_autograd(
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    grads: Gradients,
    needed: Sequence[bool],
) -> Gradients:
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        with _outside_batched_gradients():
            views = [tensor.view_as(tensor) for tensor in tensors]  # distinct even if a tensor is passed twice
            for tensor, need in zip(views, needed, strict=True):
                if need and not tensor.requires_grad:  # it no longer does, or is a copy of one that does
                    tensor.requires_grad_()
            results = [y for y, grad in zip(function(views), grads, strict=True) if grad is not None]
        inputs = [tensor for tensor, need in zip(views, needed, strict=True) if need]
        grad_outputs = without_none(grads)
        computed = iter(
            torch.autograd.grad(results, inputs, grad_outputs, create_graph=create_graph, allow_unused=True)
        )
    return [next(computed) if need else None for need in needed]


@contextmanager
def _outside_batched_gradients() -> Iterator[None]:
    """Leave batches of gradients, in which PyTorch draws no random numbers and lets no tensor require gradients.

    So the function runs once for all gradients of a batch.
    """
    with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(_VMAP_MODE):
        yield


def without_none(grads: Gradients) -> list[Tensor]:
    return [grad for grad in grads if grad is not None]


def with_data(tensor: Tensor, data: Tensor) -> Tensor:
    """The tensor, or a view with the `data` that it had at a call, if ``tensor.data = ...`` has replaced it since."""
    if tensor.data_ptr() == data.data_ptr():
        return tensor
    view = tensor.view_as(tensor)
    view.data = data
    return view
