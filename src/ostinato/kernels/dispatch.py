"""Differentiable operators: eager calls go straight to a backend, traced ones through ``torch.library``.

A registered operator lets ``torch.compile``, ``torch.export`` and ``opcheck`` see one opaque node, at some
tens of microseconds a call.  Eager mode needs none of that and takes an ``autograd.Function`` over the same
implementation, context and gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def operator(name: str, forward: Callable, fake: Callable, setup_context: Callable, backward: Callable) -> Callable:
    """Register ``ostinato::name`` and return the function that calls it, or goes round it where it can."""
    registered = torch.library.custom_op(f"ostinato::{name}", forward, mutates_args=())
    registered.register_fake(fake)
    registered.register_autograd(backward, setup_context=setup_context)

    def run_and_keep(ctx: Any, *args: Any) -> Any:  # a setup_context of its own costs more than the call
        output = forward(*args)
        setup_context(ctx, args, output)
        return output

    members = {"forward": run_and_keep, "backward": backward}
    function: Any = type(name, (torch.autograd.Function,), {k: staticmethod(v) for k, v in members.items()})

    def call(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if forward_ad._current_level >= 0 and any(_has_tangent(x) for x in tensors):
            raise NotImplementedError(f"{name} has no forward-mode derivative: take gradients by backward()")
        if not is_eager(tensors):
            return registered(*args)
        return function.apply(*args) if _is_differentiated(tensors) else forward(*args)

    return call


def gradient(name: str, implementation: Callable, fake: Callable) -> Callable:
    """Register ``ostinato::name``, a gradient that has none of its own, and return the function that calls it."""
    registered = torch.library.custom_op(f"ostinato::{name}", implementation, mutates_args=())
    registered.register_fake(fake)

    def refuse(ctx: Any, *grads: Any) -> None:
        raise NotImplementedError(f"{name} has no derivative: gradients of gradients through a scan cannot be taken")

    registered.register_autograd(refuse)

    def call(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        return (implementation if is_eager(tensors) and not _is_differentiated(tensors) else registered)(*args)

    return call


def _is_differentiated(tensors: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def is_eager(tensors: list[Tensor]) -> bool:
    """Whether nobody is watching: no compiler, no tracer, no dispatch mode, no function transform, no tangent, no
    subclass; and whether the tensors' memory holds what they stand for: no negation is left to do."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not is_in_torch_dispatch_mode()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_neg() for x in tensors)
    )


def _has_tangent(x: Tensor) -> bool:
    """Whether a forward-mode derivative is being taken with respect to x, under whatever function transforms."""
    wrappers = torch._C._functorch
    while True:
        if not wrappers.is_batchedtensor(x) and forward_ad.unpack_dual(x).tangent is not None:
            return True
        if not wrappers.is_functorch_wrapped_tensor(x):
            return False
        x = wrappers.get_unwrapped(x)


def or_empty(grad: Tensor | None, like: Tensor) -> Tensor:
    """Operators return tensors: an empty one stands for the gradient of an absent input."""
    return like.new_empty(0) if grad is None else grad
