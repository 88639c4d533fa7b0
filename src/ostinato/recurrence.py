"""User-defined recurrences: forward and backward kernels generated from one elementwise PyTorch function."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ostinato.checks import FLOAT_DTYPES, check_flags, check_floating, check_integers, describe
from ostinato.kernels.operators import export
from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.persistent.plan import Plan
from ostinato.kernels.recurrence.arguments import by_kind, concatenated_states
from ostinato.kernels.recurrence.backends import kernels_on
from ostinato.kernels.recurrence.linear.operator import linear_recurrence
from ostinato.kernels.recurrence.nonlinear.operator import nonlinear_recurrence, step_of
from ostinato.kernels.recurrence.nonlinear.sequential import sequential
from ostinato.kernels.recurrence.symbolic.tracer import call_function, expected_results, trace
from ostinato.kernels.recurrence.weighted.definition import with_products
from ostinato.kernels.recurrence.weighted.operator import plan_of
from ostinato.kernels.scan import Order
from ostinato.kernels.scan.operators import check_cu_seqlens
from ostinato.replay import recording
from ostinato.scan import COMPLEX_DTYPES, check_scan, linear_scan
from ostinato.weighted import run_all_steps

# The number of states, by the name of the first parameter; none, a linear recurrence, for any other name.
STATES = {"h": 1, "state": 2}
MOST_STATES = 8
OPTIONS = ("weight_hh", "h0", "resets", "reverse", "cu_seqlens", "backend")


@overload
def recurrence(function: Callable) -> "Recurrence": ...
@overload
def recurrence(*, states: int) -> "Callable[[Callable], Recurrence]": ...
def recurrence(function: Callable | None = None, *, states: int | None = None) -> Any:
    r"""Decorator: make a recurrence over time from the elementwise function of one step.

    .. math:: h_t = a(x_t) \, h_{t-1} + b(x_t) \qquad \text{or} \qquad h_t = f(h_{t-1}, x_t)
        \qquad \text{or} \qquad h_t = f(h_{t-1}, x_t + W_{hh} h_{t-1})

    The function is written in elementwise PyTorch operations.  The name of its first parameter selects the kind:

    - ``h``: the previous state; the function returns the next state.
    - ``state``: two previous states, ``h, c = state``; the function returns the next two, ``h, c``.  With
      ``@recurrence(states=n)``, n of them, 2 to 8.
    - any other: the function takes no state, and returns the coefficients ``a, b`` of the linear recurrence.

    A linear recurrence is an associative scan, see :func:`ostinato.linear_scan`; others run sequentially.  On CPUs and
    NVIDIA GPUs both run in kernels generated from the function and its derivatives, which save only inputs and states;
    elsewhere, and with ``backend="torch"`` and ``"reference"``, the function itself runs in PyTorch.  Channels are
    independent: whatever mixes them comes before or after the recurrence, except for the products of a matrix,
    ``weight_hh``, with the state before each step.  With these, on an NVIDIA GPU, the kernels of
    :class:`ostinato.LSTM` run the function in place of their own cell, and keep the matrix on the chip where it fits;
    the arguments with the products added are saved, too.

    The result is called as ``h, h_last = f(*arguments, weight_hh=None, h0=None, resets=None, reverse=False,
    cu_seqlens=None, backend="auto")`` and differentiable in the arguments, ``weight_hh`` and ``h0``.

    Args:
        function: a function of the state, if any, and of its arguments.  A call gives each argument as a tensor, (B, T,
            D), or (D,) if it is the same for every sequence and step.  The function must not depend on their shapes or
            dtypes, nor branch on their values, nor change them in place.  Kernels are generated at its first call, so
            numbers that it reads from outside keep the values that they have then.
        states: the number of states, for a function of ``state``.

    Inputs: the ``arguments``, by position or by name, of the dtypes of :func:`ostinato.linear_scan`, complex ones only
    if the recurrence is linear.  Those of shape (B, T, D) are promoted to one dtype, which is also that of the results.
    float16 and bfloat16 are computed in float32.
    ``weight_hh``, (G * D, D), for recurrences with a state: its products with ``h`` before the step are added to the
    first G arguments, those of its first D rows to the first argument, and so on.  It is rounded to the results' dtype.
    Of H heads that only see their own part of the state, it is (H, G * D / H, D / H), the matrix of each.
    ``h0``, the initial state, (B, D), or (N, D) of N sequences with ``cu_seqlens``, a tuple of them for several states,
    zero if absent.
    ``resets``, bool, (B, T): where True, the state is zero before that step, in scan order.
    ``reverse``, ``cu_seqlens`` and ``backend`` as in :func:`ostinato.linear_scan`.
    The result's ``plan``, of the arguments of a call with ``weight_hh``, says how it runs.

    Outputs: ``h``, (B, T, D), the state after every step, and ``h_last``, (B, D), or (N, D) with ``cu_seqlens``, that
    after the last step in scan order; each a tuple for several states.

    Raises:
        TypeError: a function with ``self``, with parameters that are not positional, or that have a default or an
            option's name, or ``states`` for one whose first parameter is not ``state``; in a call, missing or unknown
            arguments, one of a wrong type or dtype, a wrong return type of the function, a function that takes its
            states for another number, or ``weight_hh`` without a state.
        ValueError: ``states`` below 2 or above 8, shapes, devices or boundaries that do not match, a function that is
            not elementwise or has an operation that no kernel can be generated for, with its line, or an unknown
            backend.
        RuntimeError: the requested backend cannot run here; a CUDA graph captures a call with ``weight_hh`` and with
            ``cu_seqlens`` that no earlier call had; ``torch.compile`` traces the creation of the recurrence, or a call
            with ``cu_seqlens`` and ``backend="torch"``.

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

        >>> @ostinato.recurrence
        ... def janet(h, f, c):  # van der Westhuizen and Lasenby, arXiv 1804.04849
        ...     return torch.sigmoid(f) * h + (1 - torch.sigmoid(f - 1)) * torch.tanh(c)
        >>> h, h_last = janet(*torch.randn(2, 2, 100, 8), weight_hh=torch.randn(16, 8))
    """
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError("torch.compile cannot trace how a recurrence is made: make it before, as in __init__")
    if function is None:
        return functools.partial(Recurrence, states=states)
    return Recurrence(function, states)


class Recurrence:
    """The callable that :func:`recurrence` returns."""

    __qualname__: str

    def __init__(self, function: Callable, states: int | None = None) -> None:
        if not callable(function):
            raise TypeError(f"recurrence takes a function; got {describe(function)}")
        functools.update_wrapper(self, function, updated=())  # its attributes could hide methods of this class
        try:
            parameters = inspect.signature(function).parameters
        except ValueError:  # it is not written in Python
            raise TypeError(f"recurrence takes a function whose parameters have names; got {function}") from None
        for name, parameter in parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                raise TypeError(f"{self} must have positional parameters, each with a name; got {parameter}")
            if name in OPTIONS:
                raise TypeError(f"{self} cannot have a parameter {name}: a recurrence has an option of that name")
            if parameter.default is not parameter.empty:
                numbers = "a number can come from around the function"
                raise TypeError(f"{self} cannot have a default of {name}: every call gives all arguments; {numbers}")
            if name == "self":  # it would be taken for an argument
                raise TypeError(
                    f"{self} cannot be a method: write it without self, and give it tensors as arguments, or make the "
                    f"recurrence of an object's own method in its __init__, recurrence(self.{self})"
                )
        names = tuple(parameters)
        self.function = function
        self.states = STATES.get(names[0], 0) if names else 0
        if states is not None:
            check_integers(2, states=states)
            if states > MOST_STATES:
                raise ValueError(f"states must be at most {MOST_STATES}; got {states}")
            if self.states != 2:
                raise TypeError(f"the first parameter of {self} must be named state, as it has {states} states")
            self.states = states
        self.names = names[1:] if self.states else names
        self.__signature__ = self._signature(parameters)
        self.traces: dict[tuple[bool, ...], str] = {}
        _recurrences[id(self)] = self

    def _signature(self, parameters: Mapping[str, inspect.Parameter]) -> inspect.Signature:
        """The signature of a call, which has no state and has options, for editors and ``help``."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        arguments = [inspect.Parameter(name, kind, annotation=parameters[name].annotation) for name in self.names]
        call = inspect.signature(Recurrence.__call__).parameters
        return inspect.Signature([*arguments, *(call[option] for option in OPTIONS)])

    def __repr__(self) -> str:
        return f"<recurrence {self}({', '.join(self.names)})>"

    def __str__(self) -> str:
        return getattr(self, "__name__", "the recurrence")

    def __reduce__(self) -> str | tuple:
        if isinstance(self.function, types.FunctionType):
            return self.__qualname__  # pickled by name, which refers to this object, not to the function
        # A method's or partial's own object is copied with what refers to it.
        return Recurrence, (self.function, self.states if self.states > 1 else None)

    def __call__(
        self,
        /,
        *arguments: Tensor,
        weight_hh: Tensor | None = None,
        h0: Any = None,
        resets: Tensor | None = None,
        reverse: bool = False,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
        **named: Tensor,
    ) -> tuple[Any, Any]:
        """All steps; see :func:`recurrence`."""
        if named:
            arguments = self.in_order(arguments, named)
        order = Order(cu_seqlens, resets, reverse)
        first, dtype, initial = self.check(arguments, h0, order, backend)
        if weight_hh is not None:
            arguments = self._with_products(weight_hh, arguments, first)
        if self._has_kernels(arguments, initial, backend):
            arguments = tuple(x.to(dtype) if x.dim() == 3 else x for x in arguments)
            result = self._by_one_step(arguments, first, list(initial.values()), order, backend, weight_hh)
            if result is not None:
                return result
            traced = self.traced(arguments)
            if weight_hh is not None:
                by_kinds = by_kind([x.dim() == 3 for x in arguments], arguments)
                given = traced, weight_hh, dtype, *by_kinds, [*initial.values()], order, backend
                return self._grouped(run_all_steps(*given))
            return self._by_kernels(traced, dtype, initial, (*order, backend), arguments)
        return self._by_torch(arguments, first, dtype, initial, order, backend, weight_hh)

    def of_layer(
        self,
        sequences: Tensor,
        parameters: Tensor,
        *,
        weight_hh: Tensor | None = None,
        h0: Any = None,
        resets: Tensor | None = None,
        reverse: bool = False,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
    ) -> tuple[Any, Any]:
        """A call with all sequences concatenated in one tensor, (B, T, G * D), and all parameters in another, (P * D,).

        A layer's GEMM produces the former.  Where the recurrence is not linear, gradients come concatenated too, which
        saves a copy.  With `weight_hh` no sequence may follow a parameter among the arguments.
        """
        initial, concatenated = self._check_states(h0), (sequences, parameters)
        dtypes = FLOAT_DTYPES if self.states else FLOAT_DTYPES + COMPLEX_DTYPES
        check_floating("sequences", sequences, dtypes)
        check_floating("parameters", parameters, dtypes)
        count = len(self.names)
        width = self._width(*concatenated) if sequences.dim() == 3 and parameters.dim() == 1 else 0
        gates = sequences.shape[-1] // width if width else 0
        if not gates or gates * width != sequences.shape[-1] or parameters.shape[-1] != (count - gates) * width:
            raise ValueError(
                f"the arguments of {self} must be concatenated as (B, T, G * D) and ({count} - G) * D; "
                f"got {tuple(sequences.shape)} and {tuple(parameters.shape)}"
            )
        order = Order(cu_seqlens, resets, reverse)
        if self.states == 0 or not self._has_kernels(concatenated, initial, backend):
            arguments, options = self.split_arguments(*concatenated), order._asdict()
            return self(*arguments, weight_hh=weight_hh, h0=h0, **options, backend=backend)
        if parameters.device != sequences.device:
            raise ValueError(
                f"parameters must be on the device of sequences, {sequences.device}; got {parameters.device}"
            )
        check_scan("sequences", sequences[..., :width], initial, order, backend)
        traced = _traced(id(self), (True,) * gates + (False,) * (count - gates))
        if weight_hh is not None:
            self._check_weights(weight_hh, "sequences", sequences, width, gates)
            given = traced, weight_hh, sequences.dtype, [sequences], [parameters], [*initial.values()], order, backend
            return self._grouped(run_all_steps(*given))
        return self._by_kernels(traced, sequences.dtype, initial, (*order, backend), concatenated)

    def split_arguments(self, sequences: Tensor, parameters: Tensor) -> tuple[Tensor, ...]:
        """Split the arguments of :meth:`of_layer` into those of a call."""
        width = self._width(sequences, parameters)
        return *sequences.chunk(sequences.shape[-1] // width, -1), *parameters.unflatten(0, (-1, width)).unbind()

    def _width(self, sequences: Tensor, parameters: Tensor) -> int:
        """The channels of each argument of :meth:`of_layer`."""
        return (sequences.shape[-1] + parameters.shape[-1]) // len(self.names)

    def traced(self, arguments: Sequence[Tensor]) -> str:
        """The trace for arguments with these dimensions, in the operators' format."""
        return _traced(id(self), tuple([x.dim() > 1 for x in arguments]))

    def plan(
        self,
        /,
        *arguments: Tensor,
        weight_hh: Tensor,
        resets: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
        training: bool = False,
        **named: Tensor,
    ) -> Plan:
        """How a call with recurrent weights runs, and why; the kernels are compiled for it.

        Args:
            arguments, weight_hh, resets, cu_seqlens, backend: those of the call; of tensors, only shapes, dtypes and
                devices count.
            training: whether gradients will be computed.

        Returns:
            ``path``, "dense" for a persistent kernel, "steps" where every step is computed by itself; ``has_kernel``,
            whether it is a persistent kernel; ``bytes_on_chip``, of the weights, out of ``bytes_available``;
            ``blocks``, the number of thread blocks; and the ``reason``.

        Raises:
            TypeError, ValueError: as the call.

        Example:
            >>> import torch, ostinato
            >>> @ostinato.recurrence
            ... def elman(h, x):
            ...     return torch.tanh(x)
            >>> elman.plan(torch.randn(2, 9, 8), weight_hh=torch.randn(8, 8)).reason  # on a CPU
            'on a CPU, every step is a matrix product and a generated loop'
        """
        check_flags(training=training)
        if named:
            arguments = self.in_order(arguments, named)
        order = Order(cu_seqlens, resets, False)
        first, dtype, _ = self.check(arguments, None, order, backend)
        check_cu_seqlens(cu_seqlens, arguments[first].shape[1])
        arguments = self._with_products(weight_hh, arguments, first)
        return plan_of(self.traced(arguments), weight_hh, arguments[first].to(dtype), order, backend, training)

    def check(
        self, arguments: tuple[Tensor, ...], h0: Any, order: Order, backend: str
    ) -> tuple[int, torch.dtype, dict[str, Tensor]]:
        """Raise TypeError or ValueError unless a call is valid.

        Returns the index of the first sequence, (B, T, D), the dtype that all sequences are promoted to, and the
        initial states, by their names in error messages.
        """
        first, dtype = self._check_arguments(arguments)
        states = self._check_states(h0)
        check_scan(self.names[first], arguments[first], states, order, backend)
        return first, dtype, states

    def step(self, arguments: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        """The states after one step on a CPU, without gradients or checks.

        Arguments are (B, D) or (D,), states (B, D), all of one dtype, float32 or float64, with contiguous channels.
        """
        step = step_of(self.traced(arguments), *states[0].shape, states[0].dtype)
        if (recorder := recording()) is not None:
            return recorder.call(step, arguments, states, prepare=functools.partial(step.replay, arguments, states))
        return step(arguments, states)

    def _by_torch(
        self,
        arguments: tuple[Tensor, ...],
        first: int,
        dtype: torch.dtype,
        initial: dict[str, Tensor],
        order: Order,
        backend: str,
        weight_hh: Tensor | None = None,
    ) -> tuple[Any, Any]:
        """All steps, by the function itself in PyTorch; `first` is the index of the first sequence."""
        double = backend == "reference" or dtype in (torch.float64, torch.complex128)
        arguments = _widened(arguments, double)
        like = arguments[first]
        states = [x if x.is_complex() or dtype.is_complex else x.to(dtype) for x in initial.values()]
        start = _widened(states, double)
        if self.states == 0:
            a, b = self._results(2, self._call((), arguments), like.shape)
            h, h_last = linear_scan(a, b, *start, **order._asdict(), backend=backend)
            dtype = torch.promote_types(dtype, torch.complex64) if h.is_complex() else dtype
            return h.to(dtype), h_last.to(dtype)
        if order.cu_seqlens is not None and torch.compiler.is_compiling():
            loop = f"{self} is a loop in PyTorch with backend={backend!r}"
            raise RuntimeError(f"{loop}, whose steps compilers cannot take from cu_seqlens: give them padded sequences")
        if not start:
            start = (like.new_zeros(order.sequences(like), like.shape[2]),) * self.states
        check_cu_seqlens(order.cu_seqlens, like.shape[1])
        weight = None if weight_hh is None else weight_hh.to(dtype).to(like.dtype)  # rounded as the kernels round it

        def step(state: list[Tensor], of_step: list[Tensor]) -> tuple[Tensor, ...]:
            if weight is not None:
                of_step = with_products(of_step, state[0], weight)
            return self._results(self.states, self._call(state, of_step), tuple(state[0].shape))

        results = [x.to(dtype) for x in sequential(step, start, arguments, order)]
        return self._grouped(results)

    def _call(self, states: Sequence[Tensor], arguments: Sequence[Tensor]) -> Any:
        """Call the function, which must not change its inputs in place: they are results, or belong to the caller."""
        inputs = (*states, *arguments)
        if torch.compiler.is_compiling() or any(x.is_inference() for x in inputs):  # there are no version counters
            return call_function(self.function, [x.clone() for x in states], [x.clone() for x in arguments])
        versions = [x._version for x in inputs]
        results = call_function(self.function, states, arguments)
        if [x._version for x in inputs] != versions:
            raise ValueError(f"{self} must not change its arguments in place")
        return results

    def _has_kernels(self, arguments: tuple[Tensor, ...], initial: dict[str, Tensor], backend: str) -> bool:
        """Whether generated kernels compute the call: it is real, and its backend and device have some."""
        if any(x.is_complex() for x in (*arguments, *initial.values())):
            return False
        return backend in ("cpu", "cuda") or (backend == "auto" and arguments[0].device.type in ("cpu", "cuda"))

    def _by_one_step(
        self,
        arguments: Sequence[Tensor],
        first: int,
        states: list[Tensor],
        order: Order,
        backend: str,
        weight_hh: Tensor | None,
    ) -> tuple[Any, Any] | None:
        """A call of one step by :meth:`step`, faster than the operator and replayed by a Stepper; None for others."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or order.resets is not None:
            return None
        if order.cu_seqlens is not None or arguments[first].shape[1] != 1:
            return None
        arguments = [x[:, 0] if x.dim() == 3 else x for x in arguments]
        states = states or [torch.zeros_like(arguments[first])] * max(self.states, 1)
        weights = [] if weight_hh is None else [weight_hh]
        if not takes_steps([*arguments, *states, *weights], backend):
            return None
        if weight_hh is not None:
            arguments = with_products(arguments, states[0], weight_hh)
        after = self.step(arguments, states)
        return self._grouped([*(x.unsqueeze(1) for x in after), *(x.clone() for x in after)])

    def _by_kernels(
        self, traced: str, dtype: torch.dtype, initial: dict[str, Tensor], options: tuple, arguments: tuple[Tensor, ...]
    ) -> tuple[Any, Any]:
        """All steps, by the generated kernels."""
        if self.states == 0:
            start = next((x.to(dtype) for x in initial.values()), None)
            return linear_recurrence(traced, start, *options, *arguments)
        wide = torch.promote_types(dtype, torch.float32)
        h0 = concatenated_states([x.to(wide) for x in initial.values()]) if initial else None
        return self._grouped(nonlinear_recurrence(traced, h0, *options, *arguments))

    def _grouped(self, results: Sequence[Tensor]) -> tuple[Any, Any]:
        """An operator's results as the states over time and the last states, tuples if there are several states."""
        count = len(results) // 2
        states, last = tuple(results[:count]), tuple(results[count:])
        return (states, last) if count > 1 else (states[0], last[0])

    def _results(self, count: int, results: Any, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The function's results, validated and expanded to the shape."""
        expected = expected_results(self.states)
        results = (results,) if count == 1 else results
        if not isinstance(results, tuple | list) or len(results) != count:
            came = f"{len(results)} values" if isinstance(results, tuple | list) else describe(results)
            raise TypeError(f"{self} must return {expected}; got {came}")
        for x in results:
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
                raise TypeError(f"{self} must return {expected}, floating-point tensors; got {describe(x)}")
            if x.dim() not in (len(shape), 1, 0) or x.shape != shape[len(shape) - x.dim() :]:
                raise ValueError(f"{self} must be elementwise; of arguments {shape} it made {tuple(x.shape)}")
        # ONNX's exporter expands no complex numbers.
        return tuple(x if x.dim() == len(shape) else x.expand(shape) for x in results)

    def in_order(self, arguments: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """All arguments by position, given some by position and the others by name."""
        others = self.names[len(arguments) :]
        if named.keys() != set(others):
            given = f"{len(arguments)} by position and {', '.join(named)} by name"
            raise TypeError(f"{self} takes the arguments {', '.join(self.names)}; got {given}")
        return *arguments, *(named[name] for name in others)

    def _check_arguments(self, arguments: tuple[Tensor, ...]) -> tuple[int, torch.dtype]:
        """The index of the first sequence, (B, T, D), and the dtype that all sequences are promoted to."""
        if len(arguments) != len(self.names):
            takes = f"{len(self.names)} argument{'s' if len(self.names) != 1 else ''} ({', '.join(self.names)})"
            named = not self.states and len(arguments) == len(self.names) - 1
            hint = f", a state only if {self.names[0]} were named h or state" if named else ""
            hint += ", and options by name" if len(arguments) > len(self.names) else ""
            raise TypeError(f"{self} takes {takes}{hint}; got {len(arguments)}")
        for name, x in zip(self.names, arguments, strict=True):
            check_floating(name, x, FLOAT_DTYPES + COMPLEX_DTYPES)
            if x.is_complex() and self.states:
                raise TypeError(f"{name} must be real, as only linear recurrences may be complex; got {describe(x)}")
        sequences = [k for k, x in enumerate(arguments) if x.dim() == 3]
        if not sequences:
            raise ValueError(f"{self} needs an argument of shape (B, T, D); got {[tuple(x.shape) for x in arguments]}")
        first = arguments[sequences[0]]
        shape, device = tuple(first.shape), first.device
        for name, x in zip(self.names, arguments, strict=True):
            # Chosen by rank: comparing (D,) with (B, T, D) would compare D with B, which export must not know.
            if x.shape != (shape if x.dim() == 3 else shape[2:]):
                raise ValueError(f"{name} must have shape {shape} or {shape[2:]}; got {tuple(x.shape)}")
            if x.device != device:
                raise ValueError(
                    f"{name} must be on the device of {self.names[sequences[0]]}, {device}; got {x.device}"
                )
        return sequences[0], functools.reduce(torch.promote_types, (arguments[k].dtype for k in sequences))

    def _with_products(self, weight_hh: Tensor, arguments: tuple[Tensor, ...], first: int) -> tuple[Tensor, ...]:
        """The arguments, those that the checked weights' products are added to expanded to sequences."""
        like = arguments[first]
        products = self._check_weights(weight_hh, self.names[first], like, like.shape[2], len(arguments))
        return *(x.expand_as(like) for x in arguments[:products]), *arguments[products:]

    def _check_weights(self, weight_hh: Tensor, name: str, like: Tensor, width: int, most: int) -> int:
        """Check ``weight_hh``, of `width` channels, against an argument; returns the number of its products.

        These are added to at most `most` arguments.
        """
        if not self.states:
            raise TypeError(f"weight_hh needs a state: the first parameter of {self} would be named h or state")
        check_floating("weight_hh", weight_hh)
        heads, rows, columns = (1, *weight_hh.shape)[-3:] if weight_hh.dim() in (2, 3) else (0, 0, 0)
        products = max(1, rows // max(columns, 1))
        if heads * columns != width or rows != products * columns or not heads or products > most:
            shape = f"(G * {width}, {width}), or (H, G * {width} / H, {width} / H) of H heads"
            shape = f"{shape}, for the first G of {most} arguments"
            raise ValueError(f"weight_hh must have shape {shape}; got {tuple(weight_hh.shape)}")
        if weight_hh.device != like.device:
            raise ValueError(f"weight_hh must be on the device of {name}, {like.device}; got {weight_hh.device}")
        return products

    def _check_states(self, h0: Any) -> dict[str, Tensor]:
        """The initial states, by their names in error messages."""
        if h0 is None:
            return {}
        if self.states > 1 and not (isinstance(h0, tuple | list) and len(h0) == self.states):
            several = "pair of" if self.states == 2 else f"tuple of {self.states}"
            raise TypeError(f"h0 must be a {several} tensors, as {self} has {self.states} states; got {describe(h0)}")
        initial = {f"h0[{k}]": x for k, x in enumerate(h0)} if self.states > 1 else {"h0": h0}
        for name, x in initial.items():
            check_floating(name, x, FLOAT_DTYPES if self.states else FLOAT_DTYPES + COMPLEX_DTYPES)
        return initial


def takes_steps(tensors: Sequence[Tensor], backend: str) -> bool:
    """Whether :meth:`Recurrence.step` may be called, of tensors such as these."""
    x = tensors[0]
    return (
        x.is_cpu
        and x.dtype in (torch.float32, torch.float64)
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and (is_eager(tensors) or recording() is not None)
        and {(y.dtype, y.stride(-1)) for y in tensors} == {(x.dtype, 1)}
        and kernels_on(backend, "cpu") is not None
    )


_recurrences: weakref.WeakValueDictionary[int, Recurrence] = weakref.WeakValueDictionary()


@export.constant_to_compilers
def _traced(key: int, sequences: tuple[bool, ...]) -> str:
    """:meth:`Recurrence.traced` by the recurrence's id, which compilers take for a constant."""
    function = _recurrences[key]
    if sequences not in function.traces:
        function.traces[sequences] = trace(function.function, sequences, function.states).text
    return function.traces[sequences]


def _widened(tensors: Sequence[Tensor], double: bool) -> tuple[Tensor, ...]:
    """In float64 or float32, or the complex dtype of that precision."""
    real, imaginary = (torch.float64, torch.complex128) if double else (torch.float32, torch.complex64)
    return tuple(x.to(imaginary if x.is_complex() else real) for x in tensors)
