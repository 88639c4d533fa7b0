"""The gradients of a function that is called again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import DispatchKeySet, Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

Gradients = Sequence[Tensor | None]

_BATCHES = DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))  # of torch.autograd


def by_autograd(
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    grads: Gradients,
    needed: Sequence[bool],
) -> Gradients:
    """The gradients of the tensors that need them, from those of the function's results, if any, by calling it again.

    They are differentiable where gradients are enabled.
    """
    if torch.compiler.is_compiling():  # compiled autograd would follow the function, and lose all gradients
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
        with _once_for_all_gradients():
            own = [tensor.view_as(tensor) for tensor in tensors]  # tells the same tensor given twice apart
            for tensor, need in zip(own, needed, strict=True):
                if need and not tensor.requires_grad:  # any longer, or as a copy of what did
                    tensor.requires_grad_()
            results = [y for y, grad in zip(function(own), grads, strict=True) if grad is not None]
        inputs = [tensor for tensor, need in zip(own, needed, strict=True) if need]
        given = without_none(grads)
        found = iter(torch.autograd.grad(results, inputs, given, create_graph=create_graph, allow_unused=True))
    return [next(found) if need else None for need in needed]


@contextmanager
def _once_for_all_gradients() -> Iterator[None]:
    """Outside of batches of gradients, in which PyTorch draws no random numbers and lets nothing require gradients."""
    with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(_BATCHES):
        yield


def without_none(grads: Gradients) -> list[Tensor]:
    return [grad for grad in grads if grad is not None]


def with_data(tensor: Tensor, data: Tensor) -> Tensor:
    """The tensor, with the data that it had at a call, in case that ``tensor.data = ...`` has given it other."""
    if tensor.data_ptr() == data.data_ptr():
        return tensor
    own = tensor.view_as(tensor)
    own.data = data
    return own
