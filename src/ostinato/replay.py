"""Record the PyTorch operator calls of a function on the CPU and replay them on the same memory, as a CUDA graph does.

With small tensors the overhead of modules, checks, views and allocation exceeds the kernels' run time.  A replay only
calls the operators, into preallocated outputs; views cost nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}  # functions that read values without calling an operator
_VALUE_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Unrepeatable(Exception):
    """Raised for an operation whose output shape, or whose following control flow, depends on tensor values."""


class Recorder(TorchDispatchMode):
    """A context that records operator calls; :meth:`repeat` replays them.

    A replay reads the current contents of inputs, weights and states, but does not run the program's control flow.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], Any]] = []
        self._reading = _Reading()

    def __enter__(self) -> "Recorder":
        self._reading.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reading.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _VALUE_DEPENDENT.intersection(func.tags):
            raise Unrepeatable(str(func))
        result = func(*args, **kwargs)
        # Names of other namespaces mean nothing to PyTorch.
        name = func.overloadpacket.__name__ if func.namespace == "aten" else ""
        if func._schema.is_mutable and name.endswith("_"):
            self._calls.append(functools.partial(getattr(Tensor, name, func), *args, **kwargs))
        elif func._schema.is_mutable:  # its results may alias the arguments that it writes to
            self._calls.append(functools.partial(_run_and_copy, tree_leaves(result), func, args, kwargs))
        elif not func.is_view and not name.startswith(("empty", "new_empty")):
            self._calls.append(_into(result, name, func, args, kwargs))
        return result

    def call(
        self, function: Callable, *args: Any, prepare: Callable[[Any], Callable[[], Any] | None] = lambda _: None
    ) -> Any:
        """Record a function as one call, replayed by ``prepare(result)``, or by the function itself if that is None."""
        self.__exit__(None, None, None)
        try:
            result = function(*args)
            replay = prepare(result) or functools.partial(_run_and_copy, tree_leaves(result), function, args, {})
        finally:
            self.__enter__()
        self._calls.append(replay)
        return result

    def repeat(self) -> None:
        """Replay all calls in order, without gradients."""
        grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # the context manager costs as much as a call
        try:
            for call in self._calls:
                call()
        finally:
            torch._C._set_grad_enabled(grad)


class _Reading(TorchFunctionMode):
    """Refuses the functions that read values without calling an operator."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in _READING:
            raise Unrepeatable(func.__name__)
        return func(*args, **(kwargs or {}))


def recording() -> Recorder | None:
    """The active recorder of this thread, if any."""
    if torch.compiler.is_compiling():
        return None
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Recorder) else None


def _into(result: Any, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """A replay of the call into the memory of its result: by an out= variant if there is one, else by a copy."""
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
    return functools.partial(_run_and_copy, tree_leaves(result), func, args, kwargs)


def _run_and_copy(outputs: Sequence[Any], function: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Call the function, and copy the tensors of its result into the outputs."""
    for output, result in zip(outputs, tree_leaves(function(*args, **kwargs)), strict=True):
        if isinstance(output, Tensor):
            output.copy_(result)
