"""Traces a recurrence's function to graphs of scalar operations that compute its values and its derivatives.

The function runs once on small tensors.  Every PyTorch operation that it calls is recorded as operations on one
element; then so is every operation that autograd calls to differentiate it.  Operations that are not elementwise,
depend on values or shapes, or have no scalar form, raise an error with their name and source line.
"""

import linecache
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ostinato.kernels.recurrence.symbolic.aten import RULES
from ostinato.kernels.recurrence.symbolic.builder import Builder
from ostinato.kernels.recurrence.symbolic.scalar import Operand, Scalar, Unsupported
from ostinato.kernels.recurrence.symbolic.trace import Trace

_SHAPE = (2, 3, 4)
_DTYPE = torch.float32  # the dtype that kernels compute in, except for float64 tensors
_VALUES = ("_local_scalar_dense", "equal", "nonzero")
_READS = "it reads the value of a tensor (if, float(), .item(), math, NumPy); use torch.where and functions of torch"
_CREATING = (
    *("zeros", "ones", "full", "scalar_tensor", "lift_fresh", "lift_fresh_copy"),
    *("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "_efficientzerotensor"),
)
_FILLING = ("fill", "copy", "zero")  # overwrite all previous values
_COMPLEX = ("complex", "polar")  # make complex numbers of real ones
_PRODUCTS = ("matmul", "rmatmul", "linear", "mm", "addmm", "einsum")
_SETTINGS = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy")


def trace(function: Callable, sequences: Sequence[bool], states: int = 0) -> Trace:
    """Trace an elementwise function of (B, T, D) and per-channel tensors, and its derivatives.

    Args:
        function: returns ``(a, b)`` if `states` is 0; otherwise its first argument is the state h, or the tuple of
            several states, and it returns the next.
        sequences: for each argument but the states, whether it is (B, T, D) rather than (D,).
        states: the number of states, 0 for a linear recurrence.

    Raises:
        TypeError: a result that is not a tensor, or a wrong number of results.
        ValueError: an operation for which no code can be generated, with its source line.
    """
    with ThreadPoolExecutor(1) as thread:  # where the caller's modes, transforms and autocast are not active
        return thread.submit(_trace, function, tuple(map(bool, sequences)), states).result()


def _trace(function: Callable, sequences: tuple[bool, ...], states: int) -> Trace:
    recorder = _Recorder(function)
    builder = recorder.builder
    with torch.enable_grad(), _Calls(recorder), recorder:
        inputs = [recorder.input(k) for k in range(states + len(sequences))]
        results = _checked(recorder, call_function(function, inputs[:states], inputs[states:]), states)
        recorder.stop_gradients_at(results)
        values = [recorder.index_of(x) for x in results]
        builder.differentiating = True
        cotangents = [recorder.input(len(inputs) + k) for k in range(len(results))]
        one = torch.ones(_SHAPE, dtype=_DTYPE)
        backward = _gradients(recorder, results, inputs, cotangents)
        jacobian = [g for y in results[:states] for g in _gradients(recorder, [y], inputs[:states], [one])]
    graphs = [builder.graph([builder.number(i) for i in outputs]) for outputs in (values, backward, jacobian)]
    if not graphs[1].is_linear_in(range(len(inputs), len(inputs) + len(results))):
        raise recorder.refusal("its gradient is not proportional to that of its results, as if one were clipped")
    return Trace(recorder.name, sequences, states, *graphs)


def call_function(function: Callable, states: Sequence[Tensor], arguments: Sequence[Tensor]) -> Any:
    """Call a recurrence's function, passing several states as one tuple.

    Raises TypeError if the function unpacks the tuple into another number of states, or returns several for one state.
    """
    if len(states) < 2:
        results = function(*states, *arguments)
        if states and isinstance(results, tuple | list):
            several = f"{len(results)} values; several states are one parameter, a tuple named state"
            raise TypeError(f"{_name(function)} must return the next state; got {several}")
        return results
    try:
        return function(tuple(states), *arguments)
    except (ValueError, IndexError) as error:
        if "to unpack" in str(error) or "tuple index" in str(error):
            given = "two states, h and c" if len(states) == 2 else f"{len(states)} states"
            hint = "; @ostinato.recurrence(states=n) gives it n" if len(states) == 2 else ""
            raise TypeError(f"{_name(function)} is given {given}; {error}{hint}") from error
        raise


def expected_results(states: int) -> str:
    """What the function of a recurrence with this number of states returns."""
    if states < 2:
        return "the next state" if states else "the coefficients a and b"
    return f"the next {'two' if states == 2 else states} states"


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _checked(recorder: "_Recorder", results: Any, states: int) -> list[Tensor]:
    """What the function returned, as a list of tensors; raises TypeError if it is anything else."""
    expected = expected_results(states)
    results = [results] if states == 1 else results
    if not isinstance(results, tuple | list) or len(results) != max(states, 1) + (states == 0):
        came = f"{len(results)} values" if isinstance(results, tuple | list) else type(results).__name__
        raise TypeError(f"{recorder.name} must return {expected}; got {came}")
    for y in results:
        if not isinstance(y, Tensor):
            raise TypeError(f"{recorder.name} must return {expected} as tensors; got {type(y).__name__}")
        if not y.is_floating_point():
            raise TypeError(f"{recorder.name} must return floating-point tensors; got {y.dtype}")
    return list(results)


def _gradients(
    recorder: "_Recorder", results: Sequence[Tensor], inputs: list[Tensor], cotangents: Sequence[Tensor]
) -> list[int]:
    """The nodes of the inputs' gradients, given those of the results."""
    differentiable = [(y, g) for y, g in zip(results, cotangents, strict=True) if y.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(inputs)
    if differentiable and inputs:
        outputs, grad_outputs = zip(*differentiable, strict=True)
        try:
            grads = torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise recorder.refusal(str(error)) from error
    return [recorder.builder.constant(0.0) if g is None else recorder.index_of(g) for g in grads]


class _Calls(TorchFunctionMode):
    """Rejects calls that read values or shapes or modify tensors in place; notes the source lines of derivatives."""

    _VALUES = (
        *("item", "tolist", "numpy", "__array__", "equal"),
        *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
    )
    _SHAPES = ("shape", "size", "numel", "nelement", "stride", "__len__", "dim", "ndim", "ndimension", "nbytes")
    _IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__")

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if not self._recorder.builder.differentiating and args and isinstance(args[0], Tensor):
            if name in self._VALUES:
                raise self._recorder.refusal(_READS)
            if name in self._SHAPES:
                raise self._recorder.refusal(f"it asks for the {name} of a tensor, but must treat every element alike")
            if name in self._IN_PLACE or (name.endswith("_") and not name.endswith("__")):
                raise self._recorder.refusal(f"{name} changes a tensor in place")
            if (kwargs or {}).get("out") is not None:
                raise self._recorder.refusal(f"{name} writes to a tensor, out")
            self._recorder.called = name
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._recorder.stop_gradients_at(operands)
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            raise self._recorder.refusal(str(error)) from error
        for y in result if isinstance(result, tuple) else (result,):
            if isinstance(y, Tensor) and y.grad_fn is not None:
                self._recorder.lines.setdefault(y.grad_fn, f"the derivative of {name}, {self._recorder.line()}")
            elif isinstance(y, Tensor) and y.is_floating_point():
                self._recorder.made_without_gradient(y, operands)
        return result


class _Recorder(TorchDispatchMode):
    """Runs every operation and records it as scalar operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import the compiler

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.builder = Builder()
        self.name = _name(function)
        self.called = ""  # the PyTorch function whose operations are being dispatched
        self.lines: dict[Any, str] = {}  # for each node of autograd's graph, where it was called
        self._file = getattr(getattr(function, "__code__", None), "co_filename", None)
        self._indices: dict[int, tuple[Tensor, int]] = {}  # by id; keeping the tensor keeps its id from being reused
        self._without_gradient: set[int] = set()  # ids

    def input(self, k: int) -> Tensor:
        """A tensor that stands for the graph's input `k`."""
        x = torch.full(_SHAPE, 0.5, dtype=_DTYPE, requires_grad=True)
        self._indices[id(x)] = x, self.builder.input(k)
        return x

    def made_without_gradient(self, y: Tensor, operands: Sequence[Tensor]) -> None:
        """Note a result that has lost its operands' gradient, by ``torch.no_grad`` or ``detach``."""
        if any(x.requires_grad or id(x) in self._without_gradient for x in operands):
            self._without_gradient.add(id(y))
            self.stop_gradients_at([y])

    def stop_gradients_at(self, tensors: Sequence[Tensor]) -> None:
        """Stop higher derivatives where autograd stops the gradient: at tensors that have lost theirs.

        A tensor made under ``torch.no_grad`` is treated so only once it is used outside: the results of an
        ``autograd.Function`` get their gradient only after its forward, which runs without gradients, has returned.
        """
        if not torch.is_grad_enabled() or self.builder.differentiating:
            return
        for x in tensors:
            if id(x) in self._without_gradient and not x.requires_grad:
                self._without_gradient.remove(id(x))
                index = self.index_of(x)
                if self.builder.value(index) is None:
                    self._indices[id(x)] = x, self.builder.add("detach", index)

    def index_of(self, x: Tensor) -> int:
        """The node that computes a tensor's elements."""
        if id(x) not in self._indices:
            raise self.refusal("it uses a tensor that is not among its arguments; make it one")
        return self._indices[id(x)][1]

    def line(self) -> str:
        """The function's current source line: that of the innermost frame in its file."""
        frame = sys._getframe(1)
        while frame is not None:
            file, number = frame.f_code.co_filename, frame.f_lineno
            if file == self._file:
                text = linecache.getline(file, number, frame.f_globals).strip()
                return f"{file}:{number}" + (f": {text}" if text else "")
            frame = frame.f_back  # type: ignore[assignment]
        return "in a function that it calls"

    def refusal(self, reason: str) -> ValueError:
        """The error for a function that cannot be traced, with the source line."""
        where = self.line()
        if self.builder.differentiating:
            where = self.lines.get(torch._C._current_autograd_node(), "in its derivative")
        return ValueError(f"no kernel can be made of {self.name}: {reason} ({where}); backend='torch' runs it as it is")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation and record it by its rule in ``aten.py``, or by its decomposition."""
        called = func.overloadpacket.__name__
        in_place = called.endswith("_") and not called.endswith("__")
        name = called[:-1] if in_place else called
        if name in _VALUES:
            raise self.refusal(_READS)
        if name in _COMPLEX or any(isinstance(x, complex) for x in args):
            raise self.refusal(f"{func.overloadpacket} makes complex numbers: pass what is complex as an argument")
        if name in _CREATING:
            # A clone, as PyTorch dispatches zero tensors without memory differently.
            return self._created(func, func(*args, **kwargs).clone(), args)
        if name in ("empty_like", "empty") and self.builder.differentiating:  # autograd fills it next
            return func(*args, **kwargs)
        if name not in RULES:
            return self._decomposed(func, args, kwargs)
        settings = {key: self._operand(value) for key, value in kwargs.items() if key not in _SETTINGS}
        operands = [self._operand(value) for value in args[in_place and name in _FILLING :]]
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        if results[0].shape not in (_SHAPE, ()):
            raise self.refusal(f"{func.overloadpacket} makes a tensor of another shape: it is not elementwise")
        is_bool = results[0].dtype == torch.bool
        try:
            if name.startswith("bitwise_") and not is_bool:
                raise Unsupported("of integers")
            index = self._index_of_result(RULES[name](*operands, **settings))
        except Unsupported as error:
            raise self.refusal(f"{func.overloadpacket} {error} cannot be generated") from None
        if is_bool and not self.builder.is_logical(index):  # the sum True + True is True, not 2
            index = self.builder.add("ne", index, self.builder.constant(0.0))
        for y in results:
            self._indices[id(y)] = y, index
        return result

    def _index_of_result(self, result: Operand) -> int:
        return result.index if isinstance(result, Scalar) else self.builder.constant(result)

    def _operand(self, x: Any) -> Any:
        return Scalar(self.builder, self.index_of(x)) if isinstance(x, Tensor) else x

    def _created(self, func: Any, made: Tensor, args: tuple) -> Tensor:
        """Record a tensor whose elements are all the same number, as a constant."""
        if not self.builder.differentiating and made.shape not in (_SHAPE, ()):
            shape = tuple(made.shape)
            raise self.refusal(f"{func.overloadpacket} makes a tensor of shape {shape}, where a number would do")
        first = made.flatten()[0].item() if made.numel() else None
        if not isinstance(first, int | float) or not bool(((made == first) | (made != made)).all()):
            raise self.refusal(f"{func.overloadpacket} makes a tensor that is not one real number everywhere")
        if made.is_floating_point():  # the number in full precision, not as the tensor's dtype rounds it
            first = next((x for x in args if isinstance(x, float)), first)
        self._indices[id(made)] = made, self.builder.constant(first)
        return made

    def _decomposed(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Record PyTorch's decomposition of the operation, if there is one."""
        from torch._decomp import decomposition_table

        name = str(func.overloadpacket)
        if not self.builder.differentiating and self.called.strip("_") not in name:
            name = f"{self.called}, which calls {name},"
        reason = f"{name} is not one of the elementwise operations that can be generated"
        if self.called.strip("_") in _PRODUCTS:
            reason += ", and products of a matrix with the state are those of weight_hh"
        refusal = self.refusal(reason)
        if func in decomposition_table and torch.Tag.pointwise in func.tags:
            with self:
                try:
                    return decomposition_table[func](*args, **kwargs)
                except ValueError:
                    raise refusal from None
        raise refusal
