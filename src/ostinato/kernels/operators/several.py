"""Several calls of an operator, such as of both directions of a layer, that run as one: eager ones and compiled."""

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
    """What one of several calls keeps of the context that they share."""

    settings: Any = None  # whatever ``setup_context`` sets beside the tensors
    saved_tensors: Sequence[Tensor | None]
    needs_input_grad: Sequence[bool]

    def with_saved(self, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> "Part":
        """A copy, which compilers can follow, with these tensors and what needs a gradient, as a backward takes it."""
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
    """A function of several calls' arguments that returns what an operator returns for each.

    In eager mode all are one node of autograd.  ``prepare(*calls)`` returns the function that computes all results of
    calls like these, ``setup_context`` saves what each needs, and ``backward(function, parts, grads)`` returns the
    gradients of each, given those of its results.  In compiled graphs ``compiled(*calls)`` computes all results, such
    as :func:`one_operator`, elsewhere ``separately(*calls)``.
    The function's ``prepared(*calls)`` is as that of :func:`~ostinato.kernels.operators.dispatch.operator`.
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
        is_pushed = forward_ad._current_level >= 0  # then this operator, unlike that of one call, would lose tangents
        runs_as_one = torch.compiler.is_dynamo_compiling() and not (export.is_portable() or is_pushed)
        return compiled(*calls) if runs_as_one else separately(*calls)

    several.prepared = prepared  # type: ignore[attr-defined]
    return cast(Operator, several)


def _eager(name: str, setup_context: Callable, backward: Callable) -> Callable:
    """A node of autograd around the function that is its last argument, for this number of calls, its first."""

    def run_and_keep(ctx: Any, count: int, *args: Any) -> tuple[Tensor, ...]:
        calls, ctx.run = _split(args[:-1], count), args[-1]
        results = ctx.run(*calls)
        ctx.parts = _kept(ctx, setup_context, calls, results)
        return tuple(x for result in results for x in result)

    def backward_of_all(ctx: Any, *grads: Tensor | None) -> tuple:
        count = len(ctx.parts)
        each = zip(ctx.parts, *(_split(x, count) for x in (ctx.saved_tensors, ctx.needs_input_grad[1:-1])), strict=True)
        parts = [part.with_saved(saved, needed) for part, saved, needed in each]
        found = backward(ctx.run, parts, _split(grads, count))
        return None, *(grad for of_one in found for grad in of_one), None

    return apply_of(autograd_function(name, forward=run_and_keep, backward=backward_of_all))


def one_operator(
    name: str,
    prepare: Callable,
    setup_context: Callable,
    backward: Callable,
    arguments_of: Callable,
    fake: Callable,
    whole: Callable,
) -> Callable:
    """The function as an operator in ``torch.library``, ``ostinato::name``, with another for its gradients.

    The arguments are as those of :func:`of_several`.  ``arguments_of(part)`` are a call's, of what it has saved;
    ``fake(*calls)`` are tensors like all results, and ``whole(call, result)`` those of a call with what the function
    may have left out.  Where gradients may be differentiated, or are batches, ``backward`` is given None for the
    function, and must then use no other operator of several calls.  What the calls hold beside tensors and numbers,
    which may be symbols to a compiler, is in a text.
    """

    operator = _OneOperator(name, prepare, setup_context, backward, arguments_of, fake, whole).operator
    return lambda *calls: _split(operator(*_flattened(calls)), len(calls))


class _OneOperator:
    """The two operators of :func:`one_operator`, of calls as :func:`_flattened` writes them."""

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
        self.operator.register_autograd(self.pull_back, setup_context=self.keep)
        self.gradient = torch.library.custom_op(f"ostinato::{name}_backward", self.run_backward, mutates_args=())
        self.gradient.register_fake(self.fake_backward)
        for operator in (self.operator, self.gradient):
            operator.register_vmap(functools.partial(_of_samples, name, operator))

    def run(self, form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        calls = _unflattened(form, numbers, tensors)
        if not len(tensors[0]):  # without rows, results have no elements
            return self.run_fake(form, numbers, tensors)
        with torch.no_grad():
            results = self._prepare(*calls)(*calls)
        return [x for call, result in zip(calls, results, strict=True) for x in self._whole(call, result)]

    def run_fake(self, form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x for result in self._fake(*_unflattened(form, numbers, tensors)) for x in result]

    def run_backward(self, form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        if not len(tensors[0]):
            return [x.zero_() for x in self.fake_backward(form, numbers, tensors)]
        each = [*_parts(form, numbers, tensors)]
        parts, calls = [part for part, _ in each], [self._arguments_of(part) for part, _ in each]
        with torch.no_grad():
            found = self._backward(self._prepare(*calls), parts, [grads for _, grads in each])
            return [
                x.new_zeros(x.shape) if grad is None else grad
                for call, part, of_call in zip(calls, parts, found, strict=True)
                for x, grad, needed in zip(call, of_call, part.needs_input_grad, strict=True)
                if needed
            ]

    def fake_backward(self, form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
        parts = [part for part, _ in _parts(form, numbers, tensors)]
        each = zip(map(self._arguments_of, parts), parts, strict=True)
        return [
            x.new_empty(x.shape)  # contiguous, as kernels write gradients, whatever x is
            for call, part in each
            for x, needed in zip(call, part.needs_input_grad, strict=True)
            if needed
        ]

    def keep(self, ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        calls = _unflattened(*inputs)
        ctx.calls = [[isinstance(x, Tensor) for x in call] for call in calls]
        ctx.parts = _kept(ctx, self._setup_context, calls, _split(output, len(calls)))

    def pull_back(self, ctx: Any, grads: Sequence[Tensor | None]) -> tuple:
        flags = iter(ctx.needs_input_grad[2])
        needed = [[is_tensor and next(flags) for is_tensor in call] for call in ctx.calls]
        saved, of_results = (_split(x, len(needed)) for x in (ctx.saved_tensors, grads))
        if torch.is_grad_enabled() or any(x is not None and is_batched(x) for x in grads):
            # Only operators of one call have derivatives themselves, and a rule for the rows of a Jacobian.
            own = zip(ctx.parts, saved, needed, strict=True)
            apart = self._backward(None, [part.with_saved(*kept) for part, *kept in own], of_results)
            of_all = zip(itertools.chain(*ctx.calls), itertools.chain(*apart), strict=True)
            return None, None, [grad for is_tensor, grad in of_all if is_tensor]
        fields = zip(saved, (part.settings for part in ctx.parts), of_results, needed, strict=True)
        found = iter(self.gradient(*_flattened([*itertools.chain(*fields)])))
        each = zip(itertools.chain(*ctx.calls), itertools.chain(*needed), strict=True)
        return None, None, [next(found) if need else None for is_tensor, need in each if is_tensor]


def _of_samples(
    name: str, operator: Callable, info: Any, in_dims: tuple, form: str, numbers: list[int], tensors: list[Tensor]
) -> tuple[list[Tensor], list[int]]:
    """What ``torch.vmap`` runs: a call for each sample."""
    rule = vmap_rule(name, lambda *own: tuple(operator(form, numbers, list(own))), None)
    results, dims = rule(info, tuple(in_dims[2]), *tensors)
    return list(results), list(dims)


def _kept(ctx: Any, setup_context: Callable, calls: Sequence[Sequence], results: Sequence[Sequence]) -> list[Part]:
    """What each call keeps, whose tensors are the context's to keep."""
    parts = [Part() for _ in calls]
    for part, call, result in zip(parts, calls, results, strict=True):
        setup_context(part, call, result)
    ctx.save_for_backward(*(x for part in parts for x in part.saved_tensors))
    ctx.set_materialize_grads(False)
    return [part.with_saved((), ()) for part in parts]


def _parts(form: str, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[tuple[Part, tuple]]:
    """What each call has kept, and the gradients of its results, of the fields that ``pull_back`` gives of it."""
    fields = _unflattened(form, numbers, tensors)
    for saved, settings, grads, needed in zip(*(fields[i::4] for i in range(4)), strict=True):
        part = Part()
        part.settings = settings
        yield part.with_saved(saved, needed), grads


_TENSOR, _NUMBER = "tensor", "number"


def _flattened(calls: Sequence[Sequence[Any]]) -> tuple[str, list[int], list[Tensor]]:
    """A text with the calls' constants, their numbers and their tensors, in which a compiler can follow."""
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
    """The calls of these texts, numbers and tensors."""
    given: dict[Any, Iterator[Any]] = {Tensor: iter(tensors), int: iter(numbers)}
    return [tuple([next(given[x]) if x in given else x for x in call]) for call in _constants(form)]


@functools.lru_cache(1024)
def _constants(form: str) -> list[list[Any]]:
    """Those of each call, and the types of what else there is; cached, as to parse them takes as long as a layer."""
    types = {_TENSOR: Tensor, _NUMBER: int}
    words = (call.split(",")[:-1] for call in form.split(";")[:-1])
    return [[types[x] if x in types else ast.literal_eval(x) for x in call] for call in words]


def _joined(calls: Sequence[tuple]) -> list[Any]:
    return [x for call in calls for x in call]


def _split(x: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """The parts of a sequence, which are as many and equally long."""
    size = len(x) // count
    return [x[first : first + size] for first in range(0, len(x), size)]
