"""Which calls run in plain eager mode, and a cache of functions that were prepared for such calls.

Any list of the tensors that need PyTorch's dispatcher would be incomplete.  So calls bypass it only if the types and
dispatch keys of all tensors are among those that are known not to need it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import DispatchKey, DispatchKeySet, Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Run = TypeVar("Run")

_MOST_PREPARED, _MOST_ALIKE = 4096, 8  # cache sizes: keys, and entries per key


class _CurrentCall(threading.local):
    """See :data:`current_call`."""

    differentiated = False


current_call = _CurrentCall()
"""Whether gradients will be taken of the eager call that this thread is computing."""


def is_differentiated(args: Sequence[Any]) -> bool:
    """Whether gradients of the call will be taken, considering only plain tensors and parameters."""
    if torch.is_grad_enabled():
        for x in args:  # a generator costs more than the check
            if type(x) in _PLAIN_TYPES and x.requires_grad:
                return True
    return False


def _plain_keys() -> frozenset[int]:
    """The dispatch key sets of plain dense tensors, as bits: for each device, with autograd's keys and without.

    Tensors made in inference mode have none of autograd's keys.
    """
    keys = set()
    for device in ("CPU", "CUDA", "MPS", "XPU"):
        bare = DispatchKeySet(getattr(DispatchKey, device)).add(getattr(DispatchKey, f"Autocast{device}"))
        tracked = bare.add(getattr(DispatchKey, f"Autograd{device}")).add(DispatchKey.ADInplaceOrView)
        keys |= {bare.raw_repr(), tracked.raw_repr()}
    return frozenset(keys)


_PLAIN_KEYS = _plain_keys()
_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
_OTHER_TYPES = frozenset((type(None), bool, int, str))  # of most other arguments; faster than isinstance
_dispatch_keys = torch._C._dispatch_keys


def is_eager(args: Sequence[Any]) -> bool:
    """Whether a call runs in plain eager mode on plain tensors.

    That is, without a compiler, tracer, dispatch mode, function transform or tangents, and without tensor subclasses,
    wrappers, zero tensors without memory, and lazy negation or conjugation.
    """
    if _is_intercepted():
        return False
    for x in args:
        kind = type(x)
        if kind in _PLAIN_TYPES:
            if _dispatch_keys(x).raw_repr() not in _PLAIN_KEYS:  # is_dense, inlined
                return False
        elif kind not in _OTHER_TYPES and isinstance(x, Tensor):
            return False
    return True


def is_dense(x: Tensor) -> bool:
    """Whether a tensor is a plain one, or of a class that leaves all operators to PyTorch's dispatcher."""
    return _dispatch_keys(x).raw_repr() in _PLAIN_KEYS


class Prepared(Generic[Run]):
    """A cache of functions that run calls which differ from an earlier, validated one only in addresses and values."""

    def __init__(self) -> None:
        self._runs: dict[tuple, list[tuple[Callable[..., bool], Run]]] = {}

    def __reduce__(self) -> tuple:
        return Prepared, ()  # a copy begins empty

    def find(self, tensors: Sequence[Any], *settings: Any) -> Run | None:
        """The function cached for tensors like these and these settings, if the call :func:`is_eager`; else None."""
        if _is_intercepted():
            return None
        for x in tensors:
            if type(x) not in _PLAIN_TYPES or x.is_nested:  # PyTorch's guards read strides, and crash on nested ones
                return None
        key = torch.is_grad_enabled(), len(tensors), tensors[0].shape, *settings
        for is_like, run in self._runs.get(key, ()):
            if is_like(*tensors):
                return run
        return None

    def add(self, make: Callable[[], Run], tensors: Sequence[Tensor], *settings: Any) -> None:
        """Cache the function that `make` returns, unless the call is not cacheable."""
        if not is_eager(tensors) or len(set(map(id, tensors))) < len(tensors):  # guards reject duplicate tensors
            return
        if len(self._runs) >= _MOST_PREPARED:
            self._runs.clear()
        runs = self._runs.setdefault((torch.is_grad_enabled(), len(tensors), tensors[0].shape, *settings), [])
        if len(runs) >= _MOST_ALIKE:
            runs.clear()
        # Compares types, devices, dtypes, shapes, strides, requires_grad and dispatch keys in one call.
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        runs.append((guards.check, make()))


def _is_intercepted() -> bool:
    """Whether a compiler, tracer, dispatch mode, function transform or forward-mode derivative may see operations."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or is_in_torch_dispatch_mode()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )
