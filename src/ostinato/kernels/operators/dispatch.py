"""Differentiable operators: eager calls go straight to a backend, traced ones through ``torch.library``.

A registered operator is one opaque node to ``torch.compile``, ``torch.export`` and ``opcheck``, at some tens of
microseconds a call.  Eager mode bypasses it and uses an ``autograd.Function`` with the same implementation, context
and gradient; so do the transforms of ``torch.func``.

Derivatives of higher order, and those in forward mode, come from a second implementation in differentiable operations
(``composite``), some of which are operators again.  It runs only where such a derivative is taken.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from ostinato.kernels.operators import eager, export
from ostinato.kernels.operators.eager import is_differentiated, is_eager
from ostinato.kernels.operators.vmap import Groups, vmap_rule

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Operator(Protocol[P, R_co]):
    """A differentiable function with the arguments and results of the ``forward`` of :func:`operator`."""

    prepared: Callable[..., Callable]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def operator(
    name: str,
    forward: Callable[P, R_co],
    fake: Callable,
    setup_context: Callable,
    backward: Callable,
    groups: Callable[..., Groups] | None = None,
    *,
    plain: Callable | None = None,
    composite: Callable | None = None,
    jvp: Callable | None = None,
    prepare: Callable | None = None,
) -> Operator[P, R_co]:
    """Register ``ostinato::name`` and return a function that calls it, or bypasses it where possible.

    ``groups(*args)`` lets ``torch.vmap`` batch calls into one: see ``vmap.py``.  In forward mode ``composite(*args)``
    runs in place of the operator; or, where composites themselves are made of the operator,
    ``jvp(args, results, tangents)`` returns the results' tangents, given None for inputs without one.
    ``plain(*args)``, or else the composite, computes the same in PyTorch's own operators, for graphs that must run
    without this library.

    The function's ``prepared(*args)`` returns the function that calls of
    :class:`~ostinato.kernels.operators.eager.Prepared` run: ``prepare(*args)`` or, if that is None, ``forward``.

    ``forward`` may end in ``*tensors``, and return any number of tensors if it is annotated as ``list[Tensor]``.
    """
    plain = plain or composite
    is_variadic = inspect.getfullargspec(forward).varargs is not None
    registered = _registered(name, forward, fake, setup_context, backward, groups)
    apply = _eager(name, setup_context, backward)

    def call(*args: Any) -> Any:
        if is_eager(args):
            return apply(*args, forward) if is_differentiated(args) else forward(*args)  # type: ignore[call-arg]
        tensors = [x for x in args if isinstance(x, Tensor)]
        if plain is not None and export.is_portable():
            return export.write(plain, name, args)
        if torch.compiler.is_compiling():
            if forward_ad._current_level >= 0:  # compiled, the tangents would be lost
                torch._dynamo.graph_break()
                return torch._dynamo.disable(call)(*args)
            return registered(*args)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return transformed.apply(*args)
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled() and any(map(_has_tangent, tensors)):
            return transformed.apply(*args) if composite is None else composite(*args)
        if composite is not None and is_variadic and any(map(is_batched, tensors)):
            return composite(*args)  # PyTorch's fallback for these batches, a call for each row, takes no lists
        return registered(*args)

    def prepared(*args: Any) -> Callable:
        """The function that eager calls with arguments like these run."""
        run = (prepare and prepare(*args)) or forward
        return (lambda *args: apply(*args, run)) if is_differentiated(args) else run

    transformed = _transformed(name, call, setup_context, backward, groups, composite, jvp)
    call.prepared = prepared  # type: ignore[attr-defined]
    return cast(Operator[P, R_co], call)


def _eager(name: str, setup_context: Callable, backward: Callable) -> Callable:
    """A node of autograd around the function that is its last argument, for calls outside of transforms."""

    def run_and_keep(ctx: Any, *args: Any) -> Any:  # a separate setup_context costs more than the call
        args, ctx.run = args[:-1], args[-1]
        eager.current_call.differentiated = True
        try:
            output = _tuple(ctx.run(*args))
        finally:
            eager.current_call.differentiated = False
        setup_context(ctx, args, output)
        return output

    def backward_of_all(ctx: Any, *grads: Any) -> tuple:
        return (*backward(ctx, *grads), None)

    return apply_of(autograd_function(name, forward=run_and_keep, backward=backward_of_all))


def _transformed(
    name: str,
    call: Callable,
    setup_context: Callable,
    backward: Callable,
    groups: Callable[..., Groups] | None,
    composite: Callable | None,
    jvp: Callable | None,
) -> Any:
    """The ``autograd.Function`` for the transforms of ``torch.func``, which have rules for it in both modes."""

    def keep_for_both_modes(ctx: Any, args: tuple, output: Any) -> None:
        setup_context(ctx, args, output)
        ctx.forward_args = _without_tensors(args)
        ctx.save_for_forward(*(x for x in args if isinstance(x, Tensor)), *output)

    def push_forward(ctx: Any, *tangents: Tensor | None) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):  # PyTorch disables it here, which would drop nested tangents
            saved = (forward_ad.unpack_dual(x)[0] for x in ctx.saved_tensors)
            args = _with_tensors(ctx.forward_args, saved)
            if jvp is not None:
                return jvp(args, tuple(saved), tangents)
            if composite is not None:
                return _tangents_of(composite, args, tangents)
        raise NotImplementedError(f"{name} has no forward-mode derivative: take gradients by backward()")

    return autograd_function(
        name,
        forward=lambda *args: _tuple(call(*args)),
        setup_context=keep_for_both_modes,
        backward=backward,
        jvp=push_forward,
        vmap=vmap_rule(name, call, groups),
    )


def gradient(
    name: str,
    implementation: Callable[P, R_co],
    fake: Callable,
    groups: Callable[..., Groups] | None = None,
    composite: Callable | None = None,
) -> Operator[P, R_co]:
    """:func:`operator` for a gradient, whose own derivatives are those of ``composite``, if given."""

    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        if composite is not None:
            ctx.args = _without_tensors(inputs)
            ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))

    def pull_back(ctx: Any, *cotangents: Tensor | None) -> tuple:
        if composite is None:
            raise NotImplementedError(f"{name} has no derivative: gradients of gradients through it cannot be taken")
        args = _with_tensors(ctx.args, iter(ctx.saved_tensors))
        return gradients(composite, args, cotangents, _flat(ctx.needs_input_grad))

    return operator(name, implementation, fake, keep, pull_back, groups, composite=composite)


def gradients(
    function: Callable, args: Sequence[Any], cotangents: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Differentiable gradients of the arguments that are ``wanted``, None for the others.

    ``cotangents`` are the gradients of the function's results, None for zeros.
    """
    positions = [i for i, chosen in enumerate(wanted) if chosen]
    args = unwrap_dead_wrappers(tuple(args))  # of transforms that have ended, as PyTorch's own operators do
    function = _of_some(function, args, positions)
    outputs, pull = torch.func.vjp(function, *(args[i] for i in positions))  # type: ignore[misc]  # no third, aux
    found = pull(tuple(torch.zeros_like(y) if g is None else g for y, g in zip(outputs, cotangents, strict=True)))
    at = dict(zip(positions, found, strict=True))
    return tuple(map(at.get, range(len(args))))


def _tangents_of(function: Callable, args: tuple, tangents: tuple) -> Any:
    """The tangents of a function's results, given those of its arguments, None for an argument without one."""
    moving = [i for i, x in enumerate(tangents) if x is not None]
    # An expanded primal, such as the gradient of a sum, cannot hold a tangent that is not expanded.
    primals, directions = tuple(args[i].contiguous() for i in moving), tuple(tangents[i] for i in moving)
    return torch.func.jvp(_of_some(function, args, moving), primals, directions)[1]


def _of_some(function: Callable, args: Sequence[Any], positions: Sequence[int]) -> Callable:
    """The function of the arguments at these positions, with the others fixed."""

    def of_some(*tensors: Any) -> Any:
        given = list(args)
        for i, x in zip(positions, tensors, strict=True):
            given[i] = x
        return function(*given)

    return of_some


def _registered(
    name: str,
    forward: Callable,
    fake: Callable,
    setup_context: Callable,
    backward: Callable,
    groups: Callable[..., Groups] | None,
) -> Callable:
    """Register the operator in ``torch.library``, where ``*tensors``, or a list of results, are one list."""
    signature = inspect.signature(forward)
    *first, last = signature.parameters.values()
    variadic = last.kind is inspect.Parameter.VAR_POSITIONAL
    returns_list = signature.return_annotation == list[Tensor]

    def listed(function: Callable) -> Callable:
        return lambda *args: function(*_flat(args)) if variadic else function(*args)

    def pull_back(ctx: Any, *grads: Any) -> Any:
        found = backward(ctx, *(grads[0] if returns_list else grads))
        return (*found[: len(first)], list(found[len(first) :])) if variadic else found

    def keep(ctx: Any, inputs: tuple, output: Any) -> None:
        setup_context(ctx, tuple(_flat(inputs)), output)

    run = listed(forward)
    if variadic:
        tensors = last.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Sequence[Tensor])
        run.__signature__ = signature.replace(parameters=[*first, tensors])  # type: ignore[attr-defined]
    operator = torch.library.custom_op(f"ostinato::{name}", run if variadic else forward, mutates_args=())
    operator.register_fake(listed(fake))
    operator.register_autograd(pull_back, setup_context=keep if variadic else setup_context)

    def call(*args: Any) -> Any:
        result = operator(*args[: len(first)], list(args[len(first) :])) if variadic else operator(*args)
        return tuple(result) if returns_list else result

    rule = vmap_rule(name, call, groups)

    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:
        results, dims = rule(info, tuple(_flat(in_dims)), *_flat(args)) if variadic else rule(info, in_dims, *args)
        return (list(results), list(dims)) if returns_list else (results, dims)

    operator.register_vmap(vmap)
    return call


def _tuple(output: Any) -> Any:
    """A list as a tuple: an ``autograd.Function`` would not track the tensors of a list."""
    return tuple(output) if isinstance(output, list) else output


def _flat(args: Sequence[Any]) -> list[Any]:
    return [y for x in args for y in (x if isinstance(x, list | tuple) else (x,))]


_TENSOR = object()  # a placeholder for tensors, which ctx saves separately


def _without_tensors(args: tuple) -> tuple:
    return tuple(_TENSOR if isinstance(x, Tensor) else x for x in args)


def _with_tensors(args: tuple, tensors: Iterator[Tensor]) -> tuple:
    return tuple(next(tensors) if x is _TENSOR else x for x in args)


def autograd_function(name: str, **members: Callable) -> Any:
    return type(name, (torch.autograd.Function,), {k: staticmethod(v) for k, v in members.items()})


def apply_of(function: Any) -> Callable:
    """``function.apply`` without its check for transforms, for calls where there are none."""
    return super(torch.autograd.Function, function).apply


def is_batched(x: Tensor) -> bool:
    """Whether it is a batch of torch.autograd's, such as of ``is_grads_batched``, not of torch.func's."""
    return torch._C._dispatch_keys(x).has("Batched")


def _has_tangent(x: Tensor) -> bool:
    # PyTorch cannot tell of these batches, which are tangents and have none.
    return not is_batched(x) and forward_ad.unpack_dual(x).tangent is not None


def or_empty(grad: Tensor | None, like: Tensor) -> Tensor:
    """The gradient, or an empty tensor for that of an absent input, as operators must return tensors."""
    return like.new_empty(0) if grad is None else grad
