"""A recurrence of your own: its equation once, as a PyTorch function, and the passes over time from it."""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels import export
from ostinato.kernels.recurrence.nonlinear import nonlinear_recurrence
from ostinato.kernels.recurrence.operators import linear_recurrence
from ostinato.kernels.recurrence.trace import trace
from ostinato.scan import check_scan, describe, linear_scan

STATES = {"h": 1, "state": 2}  # what a first parameter of that name holds; any other makes a linear recurrence
OPTIONS = ("h0", "resets", "reverse", "cu_seqlens", "backend")


def recurrence(function: Callable) -> "Recurrence":
    r"""Make a recurrence over time of the elementwise function that is its equation: a decorator.

    .. math:: h_t = a(x_t) \, h_{t-1} + b(x_t) \qquad \text{or} \qquad h_t = f(h_{t-1}, x_t)

    The function is written in PyTorch operations that treat every element by itself.  Its first parameter's name
    says which of the two it is:

    - ``h``: the state before the step; the function returns the next state.
    - ``state``: two states before the step, ``h, c = state``; the function returns the next two, ``h, c``.
    - any other: the function sees no state, and returns the coefficients ``a, b`` of the linear recurrence.

    A linear recurrence is an associative scan, see :func:`ostinato.linear_scan`; others take one step after the other.
    On CPUs and NVIDIA GPUs both run in kernels generated from the function and its derivatives, which keep nothing but
    inputs and states; elsewhere, and by ``backend="torch"`` and ``"reference"``, the function itself runs in PyTorch.
    Channels do not see each other's states: what mixes them, as a matrix does, stands before the recurrence or after.

    The result is called as ``h, h_last = f(*arguments, h0=None, resets=None, reverse=False, cu_seqlens=None,
    backend="auto")`` and differentiable in the arguments and ``h0``.

    Args:
        function: of the state, if any, and of its arguments, each of which is given as a tensor (B, T, D), or
            (D,), the same for every sequence and step.  It must not look at their shapes or values.

    Inputs: the ``arguments``; those of (B, T, D) are promoted to one dtype, which is the results'.  float16 and
    bfloat16 are computed in float32.  ``h0``, the initial state, (B, D), a pair of them for two states, zero if absent.
    ``resets``, bool, (B, T): where True, the state is zero before that step, in the order in which steps are taken.
    ``reverse``, ``cu_seqlens`` and ``backend`` as in :func:`ostinato.linear_scan`.

    Outputs: ``h``, (B, T, D), the state after every step, and ``h_last``, (B, D), or (N, D) with ``cu_seqlens``, that
    after the last step taken; each a pair for two states.

    Raises:
        TypeError: a function with parameters that are not positional, or named as an option is; in a call, a wrong
            number of arguments, one of another type or dtype, or a function that returns something else.
        ValueError: shapes, devices or boundaries that do not fit, a function that is not elementwise or does what
            no kernel can be generated for, with the line where it does, or an unknown backend.

    Example:
        >>> import torch, ostinato
        >>> from torch.nn import functional as F
        >>> @ostinato.recurrence
        ... def rg_lru(x, r, i, log_lambda):  # equations 1 to 4 of Griffin, arXiv 2402.19427
        ...     log_a = -8 * F.softplus(log_lambda) * torch.sigmoid(r)
        ...     return torch.exp(log_a), torch.sqrt(-torch.expm1(2 * log_a)) * torch.sigmoid(i) * x
        >>> h, h_last = rg_lru(*torch.randn(3, 2, 100, 8), torch.randn(8))
        >>> h.shape, h_last.shape
        (torch.Size([2, 100, 8]), torch.Size([2, 8]))

        >>> @ostinato.recurrence
        ... def indrnn(h, x, u):  # equation 2 of IndRNN, arXiv 1803.04831
        ...     return torch.relu(x + u * h)
        >>> h, h_last = indrnn(torch.ones(1, 3, 1), torch.tensor([0.5]), h0=torch.tensor([[2.0]]))
        >>> h.flatten().tolist()
        [2.0, 2.0, 2.0]
    """
    return Recurrence(function)


class Recurrence:
    """What :func:`recurrence` makes of a function, which is called in its place."""

    __qualname__: str

    def __init__(self, function: Callable) -> None:
        if not callable(function):
            raise TypeError(f"recurrence takes a function; got {describe(function)}")
        functools.update_wrapper(self, function)
        parameters = inspect.signature(function).parameters
        for name, parameter in parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                raise TypeError(f"{self} must have positional parameters, each with a name; got {parameter}")
            if name in OPTIONS:
                raise TypeError(f"{self} cannot have a parameter {name}: a recurrence has an option of that name")
        names = tuple(parameters)
        self.function = function
        self.states = STATES.get(names[0], 0) if names else 0
        self.names = names[1:] if self.states else names
        self.traces: dict[tuple[bool, ...], str] = {}
        _recurrences[id(self)] = self

    def __str__(self) -> str:
        return getattr(self, "__name__", "the recurrence")

    def __reduce__(self) -> str:
        return self.__qualname__  # the function's own name leads here, not to the function

    def __call__(
        self,
        *arguments: Tensor,
        h0: Any = None,
        resets: Tensor | None = None,
        reverse: bool = False,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> tuple[Any, Any]:
        """All steps; see :func:`recurrence`."""
        return self._run(arguments, None, h0, resets, reverse, cu_seqlens, backend)

    def of_layer(self, sequences: Tensor, parameters: Tensor, **options: Any) -> tuple[Any, Any]:
        """As a call whose sequences are side by side in one tensor, (B, T, G * D), and the parameters after them in
        another, (P * D,).

        A layer's product makes them so.  Their gradients are too, where the recurrence is not linear: nobody has to put
        them together.
        """
        defaults = {"h0": None, "resets": None, "reverse": False, "cu_seqlens": None, "backend": "auto"}
        return self._run(self.apart(sequences, parameters), (sequences, parameters), **defaults | options)

    def apart(self, sequences: Tensor, parameters: Tensor) -> tuple[Tensor, ...]:
        """The arguments of a call from those of :meth:`of_layer`."""
        width = (sequences.shape[-1] + parameters.shape[-1]) // len(self.names)
        return *sequences.split(width, -1), *parameters.split(width)

    def _run(
        self,
        arguments: tuple[Tensor, ...],
        together: tuple[Tensor, Tensor] | None,
        h0: Any,
        resets: Tensor | None,
        reverse: bool,
        cu_seqlens: Tensor | None,
        backend: str,
    ) -> tuple[Any, Any]:
        first, dtype = self._check_arguments(arguments)
        given = self._check_states(h0)
        check_scan(self.names[first], arguments[first], given, resets, reverse, cu_seqlens, backend)
        if self._has_kernels(arguments, given, backend):
            options = cu_seqlens, resets, reverse, backend
            return self._by_kernels(arguments, together, dtype, list(given.values()), *options)
        shape = arguments[first].shape
        double = backend == "reference" or dtype in (torch.float64, torch.complex128)
        arguments = _widened(arguments, double)
        initial = _widened([x if x.is_complex() or dtype.is_complex else x.to(dtype) for x in given.values()], double)
        if self.states == 0:
            a, b = self._results(2, self.function(*arguments), shape)
            h, h_last = linear_scan(
                a, b, *initial, resets=resets, reverse=reverse, cu_seqlens=cu_seqlens, backend=backend
            )
            dtype = torch.promote_types(dtype, torch.complex64) if h.is_complex() else dtype
            return h.to(dtype), h_last.to(dtype)
        if not initial:
            sequences = shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            initial = (arguments[0].new_zeros(sequences, shape[2]),) * self.states
        if cu_seqlens is None:
            states, last = self._steps(arguments, initial, resets, reverse, shape)
        else:
            states, last = self._packed_steps(arguments, initial, resets, reverse, cu_seqlens.tolist(), shape)
        results = tuple(x.to(dtype) for x in states), tuple(x.to(dtype) for x in last)
        return results if self.states == 2 else (results[0][0], results[1][0])

    def _has_kernels(self, arguments: tuple[Tensor, ...], given: dict[str, Tensor], backend: str) -> bool:
        if any(x.is_complex() for x in (*arguments, *given.values())) or (self.states and export.is_portable()):
            return False
        return backend in ("cpu", "cuda") or (backend == "auto" and arguments[0].device.type in ("cpu", "cuda"))

    def _by_kernels(
        self,
        arguments: tuple[Tensor, ...],
        together: tuple[Tensor, Tensor] | None,
        dtype: torch.dtype,
        initial: list[Tensor],
        *options: Any,
    ) -> tuple[Any, Any]:
        """All steps, by what the function was traced to."""
        sequences = tuple(x.dim() == 3 for x in arguments)
        traced = _traced(id(self), sequences)
        if together is None or self.states == 0:
            arguments = tuple(x.to(dtype) if x.dim() == 3 else x for x in arguments)
        if self.states == 0:
            start = initial[0].to(dtype) if initial else None
            return linear_recurrence(traced, start, *options, *arguments)
        starts = [x.to(torch.promote_types(dtype, torch.float32)) for x in initial] + [None, None]
        results = nonlinear_recurrence(traced, *starts[:2], *options, *(together or arguments))
        states, last = tuple(results[: self.states]), tuple(results[self.states :])
        return (states, last) if self.states == 2 else (states[0], last[0])

    def _steps(
        self,
        arguments: Sequence[Tensor],
        state: tuple[Tensor, ...],
        resets: Tensor | None,
        reverse: bool,
        shape: torch.Size,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The definition: one step after the other."""
        batch, length, channels = shape
        each = [x.unbind(1) if x.dim() == 3 else (x,) * length for x in arguments]
        states: list[tuple[Tensor, ...]] = [()] * length
        for t in reversed(range(length)) if reverse else range(length):
            if resets is not None:
                state = tuple(x.masked_fill(resets[:, t, None], 0.0) for x in state)
            following = self.function(state if self.states == 2 else state[0], *(x[t] for x in each))
            state = states[t] = self._results(self.states, following, (batch, channels))
        if length == 0:
            return tuple(x.new_empty(shape) for x in state), state
        return tuple(torch.stack(x, 1) for x in zip(*states, strict=True)), state

    def _packed_steps(
        self,
        arguments: Sequence[Tensor],
        initial: tuple[Tensor, ...],
        resets: Tensor | None,
        reverse: bool,
        bounds: list[int],
        shape: torch.Size,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """As :meth:`_steps`, of each sequence by itself."""
        if bounds[0] != 0 or bounds[-1] != shape[1] or bounds != sorted(bounds):
            raise ValueError(f"cu_seqlens must rise from 0 to the number of time steps, {shape[1]}; got {bounds}")
        parts = []
        for n, (first, end) in enumerate(itertools.pairwise(bounds)):
            own = [x[:, first:end] if x.dim() == 3 else x for x in arguments]
            reset = None if resets is None else resets[:, first:end]
            start = tuple(x[n : n + 1] for x in initial)
            parts.append(self._steps(own, start, reset, reverse, torch.Size((1, end - first, shape[2]))))
        if not parts:
            return tuple(x.new_empty(shape) for x in initial), initial
        states, last = zip(*parts, strict=True)
        return tuple(torch.cat(x, 1) for x in zip(*states, strict=True)), tuple(map(torch.cat, zip(*last, strict=True)))

    def _results(self, count: int, results: Any, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """What the function has returned, every one of the shape, or the error that says what is wrong."""
        expected = ("the next state", "the next two states")[count - 1] if self.states else "the coefficients a and b"
        results = (results,) if count == 1 else results
        if not isinstance(results, tuple | list) or len(results) != count:
            came = f"{len(results)} values" if isinstance(results, tuple | list) else describe(results)
            raise TypeError(f"{self} must return {expected}; got {came}")
        for x in results:
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
                raise TypeError(f"{self} must return {expected}, floating-point tensors; got {describe(x)}")
            if x.shape not in (shape, shape[-1:], ()):
                raise ValueError(f"{self} must be elementwise; of arguments {shape} it made {tuple(x.shape)}")
        return tuple(x.expand(shape) for x in results)

    def _check_arguments(self, arguments: tuple[Tensor, ...]) -> tuple[int, torch.dtype]:
        """The place of the first sequence, (B, T, D), and the dtype that all sequences are promoted to."""
        if len(arguments) != len(self.names):
            takes = f"{len(self.names)} argument{'s' if len(self.names) != 1 else ''} ({', '.join(self.names)})"
            raise TypeError(f"{self} takes {takes}; got {len(arguments)}")
        for name, x in zip(self.names, arguments, strict=True):
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
                raise TypeError(f"{name} must be a floating-point tensor; got {describe(x)}")
            if x.is_complex() and self.states:
                raise TypeError(f"{name} must be real, as only linear recurrences may be complex; got {describe(x)}")
            if x.layout != torch.strided or x.is_nested:
                raise TypeError(f"{name} must be a dense tensor; got a {'nested' if x.is_nested else x.layout} one")
        sequences = [k for k, x in enumerate(arguments) if x.dim() == 3]
        if not sequences:
            raise ValueError(f"{self} needs an argument of shape (B, T, D); got {[tuple(x.shape) for x in arguments]}")
        first = arguments[sequences[0]]
        shape, device = tuple(first.shape), first.device
        for name, x in zip(self.names, arguments, strict=True):
            if x.shape not in (shape, shape[2:]):
                raise ValueError(f"{name} must have shape {shape} or {shape[2:]}; got {tuple(x.shape)}")
            if x.device != device:
                raise ValueError(
                    f"{name} must be on the device of {self.names[sequences[0]]}, {device}; got {x.device}"
                )
        return sequences[0], functools.reduce(torch.promote_types, (arguments[k].dtype for k in sequences))

    def _check_states(self, h0: Any) -> dict[str, Tensor]:
        """The initial states by what to call them."""
        if h0 is None:
            return {}
        if self.states == 2 and not (isinstance(h0, tuple | list) and len(h0) == 2):
            raise TypeError(f"h0 must be a pair of tensors, as {self} has two states; got {describe(h0)}")
        initial = {"h0[0]": h0[0], "h0[1]": h0[1]} if self.states == 2 else {"h0": h0}
        for name, x in initial.items():
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
                raise TypeError(f"{name} must be a floating-point tensor; got {describe(x)}")
        return initial


_recurrences: weakref.WeakValueDictionary[int, Recurrence] = weakref.WeakValueDictionary()


@export.constant_to_compilers
def _traced(key: int, sequences: tuple[bool, ...]) -> str:
    """The trace of a recurrence by its id, as operators take it, for arguments that are sequences or not."""
    function = _recurrences[key]
    if sequences not in function.traces:
        function.traces[sequences] = trace(function.function, sequences, function.states).text
    return function.traces[sequences]


def _widened(tensors: Sequence[Tensor], double: bool) -> tuple[Tensor, ...]:
    """In float64 or float32, or the complex dtype of that precision."""
    real, imaginary = (torch.float64, torch.complex128) if double else (torch.float32, torch.complex64)
    return tuple(x.to(imaginary if x.is_complex() else real) for x in tensors)
