"""A function's PyTorch calls on the CPU, recorded once and repeated on the same memory: what a CUDA graph is on a GPU.

Where tensors are small, the way to the kernels takes longer than they do: modules, checks, views, memory for every
result.  Repeated, a call is one of PyTorch's, or of ours, into memory that is there already, and a view is nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Unrepeatable(Exception):
    """An operation whose result's shape, or what follows, depends on values."""


class Recorder(TorchDispatchMode):
    """While it is on, remembers what is done to tensors; :meth:`repeat` does it again.

    What is read from outside, as inputs, weights and states, is read anew; what a program decides in between is not
    decided again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _BY_VALUE.intersection(func.tags):
            raise Unrepeatable(str(func))
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func._schema.is_mutable and name.endswith("_"):
            self._calls.append(functools.partial(getattr(Tensor, name, func), *args, **kwargs))
        elif func._schema.is_mutable:  # what it returns may be what it was given to write to, or not
            self._calls.append(functools.partial(_copied, tree_leaves(result), func, args, kwargs))
        elif not func.is_view and not name.startswith(("empty", "new_empty")):
            self._calls.append(_into(result, name, func, args, kwargs))
        return result

    def call(
        self, function: Callable, *args: Any, prepare: Callable[[Any], Callable[[], Any] | None] = lambda _: None
    ) -> Any:
        """What the function returns, its insides unseen: repeated by what ``prepare`` makes of the result, or as is."""
        self.__exit__(None, None, None)
        try:
            result = function(*args)
            again = prepare(result) or functools.partial(_copied, tree_leaves(result), function, args, {})
        finally:
            self.__enter__()
        self._calls.append(again)
        return result

    def repeat(self) -> None:
        """All calls again, in their order."""
        for call in self._calls:
            call()


def recording() -> Recorder | None:
    """The recorder that is on, in this thread."""
    if torch.compiler.is_compiling():
        return None
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Recorder) else None


def _into(result: Any, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """The call again, into the memory of its result: by ``torch.name``, or the operator's own form, if one takes it."""
    for function in (getattr(torch, name, None), getattr(func.overloadpacket, "out", None)):
        if function is None or not isinstance(result, Tensor):
            continue
        other = torch.empty_like(result)
        try:
            function(*args, **kwargs, out=other)
        except (TypeError, RuntimeError):
            continue
        if torch.equal(other.nan_to_num(), result.nan_to_num()):
            return functools.partial(function, *args, **kwargs, out=result)
    return functools.partial(_copied, tree_leaves(result), func, args, kwargs)


def _copied(kept: Sequence[Any], function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    for own, new in zip(kept, tree_leaves(function(*args, **kwargs)), strict=True):
        if isinstance(own, Tensor):
            own.copy_(new)
