"""Several calls of an operator, such as both directions of a layer, as one call, in eager mode and compiled."""

import ast
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ostinato.kernels.operators import export
from ostinato.kernels.operators.dispatch import Operator, apply_of, autograd_function, is_batched
from ostinato.kernels.operators.eager import is_differentiated, is_eager
from ostinato.kernels.operators.vmap import vmap_rule


class Part:
    """One call's part of the autograd context that several calls share."""

    settings: Any = None  # whatever ``setup_context`` sets beside the tensors
    saved_tensors: Sequence[Tensor | None]
    needs_input_grad: Sequence[bool]

    def with_saved(self, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> "Part":
        """A copy with these tensors and flags, as a backward takes it; assignments that compilers can trace."""
        part = Part()
        part.settings, part.saved_tensors, part.needs_input_grad = self.settings, tensors, needed
        return part

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, _: bool) -> None:
        """Do nothing: gradients of several calls are never materialised."""


def of_several(
    name: str,
    separately: Callable,
    prepare: Callable,
    setup_context: Callable,
    backward: Callable,
    compiled: Callable,
) -> Operator:
    """A function that takes the arguments of several calls and returns an operator's results for each.

    In eager mode all calls are one autograd node.  ``prepare(*calls)`` returns the function that computes all results
    of calls like these, ``setup_context`` saves what each call needs, and ``backward(function, parts, grads)`` returns
    the gradients of each call's arguments, given those of its results.  In compiled graphs ``compiled(*calls)``, such
    as :class:`OneOperator`, computes all results, and everywhere else ``separately(*calls)``.
    The attribute ``prepared`` is that of :func:`~ostinato.kernels.operators.dispatch.operator`, for several calls.
    """
    apply = _eager(name, setup_context, backward)

    def prepared(*calls: tuple) -> Callable:
        run: Callable = prepare(*calls)
        if not is_differentiated(_joined(calls)):
            return run
        return lambda *calls: _split(apply(len(calls), *_joined(calls), run), len(calls))

    def several(*calls: tuple) -> Any:
        if is_eager(_joined(calls)):
            return prepared(*calls)(*calls)
        # In forward mode, unlike the operator of one call, this one would lose the tangents.
        is_forward_mode = forward_ad._current_level >= 0
        runs_as_one = torch.compiler.is_dynamo_compiling() and not (export.is_portable() or is_forward_mode)
        return compiled(*calls) if runs_as_one else separately(*calls)

    several.prepared = prepared  # type: ignore[attr-defined]
    return cast(Operator, several)


def _eager(name: str, setup_context: Callable, backward: Callable) -> Callable:
    """An autograd node that takes the number of calls, all their arguments, and the function that it runs."""

    def run_and_save(ctx: Any, count: int, *args: Any) -> tuple[Tensor, ...]:
        calls, ctx.run = _split(args[:-1], count), args[-1]
        results = ctx.run(*calls)
        ctx.parts = _saved(ctx, setup_context, calls, results)
        return tuple(x for result in results for x in result)

    def pull_back(ctx: Any, *grads: Tensor | None) -> tuple:
        count = len(ctx.parts)
        each = zip(ctx.parts, *(_split(x, count) for x in (ctx.saved_tensors, ctx.needs_input_grad[1:-1])), strict=True)
        parts = [part.with_saved(saved, needed) for part, saved, needed in each]
        call_grads = backward(ctx.run, parts, _split(grads, count))
        return None, *_joined(call_grads), None

    return apply_of(autograd_function(name, forward=run_and_save, backward=pull_back))


class OneOperator:
    """The function of several calls as an operator ``ostinato::name`` in ``torch.library``; a second has its gradients.

    Other arguments are those of :func:`of_several`.  ``arguments_of(part)`` returns a call's arguments, from what it
    has saved; ``fake(*calls)`` returns tensors like all results, and ``whole(call, result)`` a call's results including
    those that the function may leave out.  Where gradients may be differentiated or are batched, ``backward`` is called
    with None for the function, and must then use no other operator of several calls.  The operators take calls as
    :func:`_flattened` encodes them: all tensors, all numbers, which may be symbols to a compiler, and a text with
    everything else.
    """

    def __init__(
        self,
        name: str,
        prepare: Callable,
        setup_context: Callable,
        backward: Callable,
        arguments_of: Callable,
        fake: Callable,
        whole: Callable,
    ) -> None:
        self._prepare, self._setup_context, self._backward = prepare, setup_context, backward
        self._arguments_of, self._fake, self._whole = arguments_of, fake, whole
        self.operator = torch.library.custom_op(f"ostinato::{name}", self.run, mutates_args=())
        self.operator.register_fake(self.run_fake)
        self.operator.register_autograd(self.pull_back, setup_context=self.save)
        self.gradient = torch.library.custom_op(f"ostinato::{name}_backward", self.run_backward, mutates_args=())
        self.gradient.register_fake(self.fake_backward)
        for operator in (self.operator, self.gradient):
            operator.register_vmap(functools.partial(_of_samples, name, operator))

    def __call__(self, *calls: tuple) -> list[Sequence[Any]]:
        return _split(self.operator(*_flattened(calls)), len(calls))

    def run(self, form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The implementation of the operator."""
        calls = _unflattened(form, numbers, tensors)
        if not len(tensors[0]):  # without rows, the results have no elements
            return self.run_fake(form, numbers, tensors)
        with torch.no_grad():
            results = self._prepare(*calls)(*calls)
        return [x for call, result in zip(calls, results, strict=True) for x in self._whole(call, result)]

    def run_fake(self, form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x for result in self._fake(*_unflattened(form, numbers, tensors)) for x in result]

    def run_backward(self, form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The implementation of the gradient's operator, which returns zeros for gradients that are None."""
        if not len(tensors[0]):
            return [x.zero_() for x in self.fake_backward(form, numbers, tensors)]
        each = [*_parts(form, numbers, tensors)]
        parts, calls = [part for part, _ in each], [self._arguments_of(part) for part, _ in each]
        with torch.no_grad():
            results = self._backward(self._prepare(*calls), parts, [grads for _, grads in each])
            return [
                x.new_zeros(x.shape) if grad is None else grad
                for call, part, call_grads in zip(calls, parts, results, strict=True)
                for x, grad, needed in zip(call, call_grads, part.needs_input_grad, strict=True)
                if needed
            ]

    def fake_backward(self, form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        parts = [part for part, _ in _parts(form, numbers, tensors)]
        each = zip(map(self._arguments_of, parts), parts, strict=True)
        return [
            x.new_empty(x.shape)  # contiguous, as kernels write gradients, whatever the strides of x
            for call, part in each
            for x, needed in zip(call, part.needs_input_grad, strict=True)
            if needed
        ]

    def save(self, ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        calls = _unflattened(*inputs)
        ctx.is_tensor = [[isinstance(x, Tensor) for x in call] for call in calls]
        ctx.parts = _saved(ctx, self._setup_context, calls, _split(output, len(calls)))

    def pull_back(self, ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
        flags = iter(ctx.needs_input_grad[2])
        needed = [[is_tensor and next(flags) for is_tensor in call] for call in ctx.is_tensor]
        saved, result_grads = (_split(x, len(needed)) for x in (ctx.saved_tensors, grads))
        if torch.is_grad_enabled() or any(x is not None and is_batched(x) for x in grads):
            # Only operators of one call are differentiable themselves, and have a rule for the rows of a Jacobian.
            each = zip(ctx.parts, saved, needed, strict=True)
            call_grads = self._backward(None, [part.with_saved(*fields) for part, *fields in each], result_grads)
            all_grads = zip(itertools.chain(*ctx.is_tensor), itertools.chain(*call_grads), strict=True)
            return None, None, [grad for is_tensor, grad in all_grads if is_tensor]
        fields = zip(saved, (part.settings for part in ctx.parts), result_grads, needed, strict=True)
        computed = iter(self.gradient(*_flattened([*itertools.chain(*fields)])))
        inputs = zip(itertools.chain(*ctx.is_tensor), itertools.chain(*needed), strict=True)
        return None, None, [next(computed) if need else None for is_tensor, need in inputs if is_tensor]


def _of_samples(
    name: str, operator: Callable, info: Any, in_dims: tuple, form: str, numbers: list[int], tensors: list[Tensor]
) -> tuple[list[Tensor], list[int]]:
    """The rule for ``torch.vmap``: a call for each sample."""
    rule = vmap_rule(name, lambda *samples: tuple(operator(form, numbers, list(samples))), None)
    results, dims = rule(info, tuple(in_dims[2]), *tensors)
    return list(results), list(dims)


def _saved(ctx: Any, setup_context: Callable, calls: Sequence[Sequence], results: Sequence[Sequence]) -> list[Part]:
    """Each call's part, after its tensors have been saved in the context."""
    parts = [Part() for _ in calls]
    for part, call, result in zip(parts, calls, results, strict=True):
        setup_context(part, call, result)
    ctx.save_for_backward(*(x for part in parts for x in part.saved_tensors))
    ctx.set_materialize_grads(False)
    return [part.with_saved((), ()) for part in parts]


def _parts(form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[tuple[Part, tuple]]:
    """Each call's part and the gradients of its results, from the four fields of each that ``pull_back`` encodes."""
    fields = _unflattened(form, numbers, tensors)
    for saved, settings, grads, needed in zip(*(fields[i::4] for i in range(4)), strict=True):
        part = Part()
        part.settings = settings
        yield part.with_saved(saved, needed), grads


_TENSOR, _NUMBER = "tensor", "number"


def _flattened(calls: Sequence[Sequence[Any]]) -> tuple[str, list[int], list[Tensor]]:
    """Encode calls as a text with their constants, their numbers and their tensors; compilers can trace this code."""
    form, numbers, tensors = "", [], []
    for call in calls:
        for x in call:
            if isinstance(x, Tensor):
                tensors.append(x)
                form += _TENSOR
            elif x is None or isinstance(x, (bool, str)):
                form += f"{x!r}"
            else:
                numbers.append(x)
                form += _NUMBER
            form += ","
        form += ";"
    return form, numbers, tensors


def _unflattened(form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[tuple]:
    """The inverse of :func:`_flattened`."""
    remaining: dict[Any, Iterator[Any]] = {Tensor: iter(tensors), int: iter(numbers)}
    return [tuple([next(remaining[x]) if x in remaining else x for x in call]) for call in _constants(form)]


@functools.lru_cache(1024)
def _constants(form: str) -> list[list[Any]]:
    """Each call's constants, with types for tensors and numbers; cached, as parsing takes as long as a layer does."""
    types = {_TENSOR: Tensor, _NUMBER: int}
    words = (call.split(",")[:-1] for call in form.split(";")[:-1])
    return [[types[x] if x in types else ast.literal_eval(x) for x in call] for call in words]


def _joined(calls: Sequence[tuple]) -> list[Any]:
    return [x for call in calls for x in call]


def _split(x: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """A sequence cut into `count` parts of equal length."""
    size = len(x) // count
    return [x[first : first + size] for first in range(0, len(x), size)]
