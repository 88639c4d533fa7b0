"""Differentiable operators: eager calls go straight to a backend, traced calls through ``torch.library``.

A registered operator is one opaque node to ``torch.compile``, ``torch.export`` and ``opcheck``, at some tens of
microseconds per call.  Eager mode bypasses it and uses an ``autograd.Function`` with the same implementation, context
and gradient; so do the transforms of ``torch.func``.

Higher-order and forward-mode derivatives come from a second implementation in differentiable operations
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

    ``forward`` may end in ``*tensors``, and return any number of tensors if it is annotated as ``list[Tensor]``.
    ``fake``, ``setup_context`` and ``backward`` are those of ``torch.library``.  ``groups(*args)`` lets ``torch.vmap``
    batch calls into one: see ``vmap.py``.

    In forward mode ``composite(*args)`` runs in place of the operator; or, if the composite itself consists of such
    operators, ``jvp(args, results, tangents)`` returns the results' tangents, where inputs without one have None.
    ``plain(*args)``, by default the composite, computes the same in PyTorch's own operators, for graphs that must run
    without this library.

    The returned function has an attribute ``prepared``: ``prepared(*args)`` returns the function that
    :class:`~ostinato.kernels.operators.eager.Prepared` calls run: ``prepare(*args)`` or, if that is None, ``forward``.
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
            if forward_ad._current_level >= 0:  # compilation would lose the tangents
                torch._dynamo.graph_break()
                return torch._dynamo.disable(call)(*args)
            return registered(*args)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return transformed.apply(*args)
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled() and any(map(_has_tangent, tensors)):
            return transformed.apply(*args) if composite is None else composite(*args)
        if composite is not None and is_variadic and any(map(is_batched, tensors)):
            return composite(*args)  # PyTorch's fallback for these batches, a call for each row, does not take lists
        return registered(*args)

    def prepared(*args: Any) -> Callable:
        """The function that runs eager calls with arguments like these."""
        run = (prepare and prepare(*args)) or forward
        return (lambda *args: apply(*args, run)) if is_differentiated(args) else run

    transformed = _transformed(name, call, setup_context, backward, groups, composite, jvp)
    call.prepared = prepared  # type: ignore[attr-defined]
    return cast(Operator[P, R_co], call)


def _eager(name: str, setup_context: Callable, backward: Callable) -> Callable:
    """An autograd node for calls outside of transforms, which runs the function passed as its last argument."""

    def run_and_save(ctx: Any, *args: Any) -> Any:  # a separate setup_context costs more than the call
        args, ctx.run = args[:-1], args[-1]
        eager.current_call.differentiated = True
        try:
            output = _tuple(ctx.run(*args))
        finally:
            eager.current_call.differentiated = False
        setup_context(ctx, args, output)
        return output

    def pull_back(ctx: Any, *grads: Any) -> tuple:
        return (*backward(ctx, *grads), None)  # None for the function

    return apply_of(autograd_function(name, forward=run_and_save, backward=pull_back))


def _transformed(
    name: str,
    call: Callable,
    setup_context: Callable,
    backward: Callable,
    groups: Callable[..., Groups] | None,
    composite: Callable | None,
    jvp: Callable | None,
) -> Any:
    """The ``autograd.Function`` for the transforms of ``torch.func``, with rules for reverse and forward mode."""

    def save_for_both_modes(ctx: Any, args: tuple, output: Any) -> None:
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
        setup_context=save_for_both_modes,
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
    """:func:`operator` for a gradient, whose own derivatives are those of ``composite``; without one, it has none."""

    def save(ctx: Any, inputs: tuple, output: Any) -> None:
        if composite is not None:
            ctx.args = _without_tensors(inputs)
            ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))

    def pull_back(ctx: Any, *cotangents: Tensor | None) -> tuple:
        if composite is None:
            raise NotImplementedError(f"{name} has no derivative: gradients of gradients through it cannot be taken")
        args = _with_tensors(ctx.args, iter(ctx.saved_tensors))
        return gradients(composite, args, cotangents, _flat(ctx.needs_input_grad))

    return operator(name, implementation, fake, save, pull_back, groups, composite=composite)


def gradients(
    function: Callable, args: Sequence[Any], cotangents: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Differentiable gradients of a function's arguments: None for those that are not ``wanted``.

    ``cotangents`` are the gradients of the function's results, None for zeros.
    """
    positions = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    args = unwrap_dead_wrappers(tuple(args))  # PyTorch's own operators do so, too, after a transform has ended
    function = _with_others_fixed(function, args, positions)
    outputs, pull = torch.func.vjp(function, *(args[i] for i in positions))  # type: ignore[misc]  # no third, aux
    grads = pull(tuple(torch.zeros_like(y) if g is None else g for y, g in zip(outputs, cotangents, strict=True)))
    by_position = dict(zip(positions, grads, strict=True))
    return tuple(map(by_position.get, range(len(args))))


def _tangents_of(function: Callable, args: tuple, tangents: tuple) -> Any:
    """The tangents of a function's results, given those of its arguments, None for an argument without one."""
    positions = [i for i, x in enumerate(tangents) if x is not None]
    # An expanded primal, such as the gradient of a sum, cannot hold a tangent that is not expanded.
    primals, directions = tuple(args[i].contiguous() for i in positions), tuple(tangents[i] for i in positions)
    return torch.func.jvp(_with_others_fixed(function, args, positions), primals, directions)[1]


def _with_others_fixed(function: Callable, args: Sequence[Any], positions: Sequence[int]) -> Callable:
    """A function of the arguments at these positions alone, with the others fixed."""

    def partial(*tensors: Any) -> Any:
        all_args = list(args)
        for i, x in zip(positions, tensors, strict=True):
            all_args[i] = x
        return function(*all_args)

    return partial


def _registered(
    name: str,
    forward: Callable,
    fake: Callable,
    setup_context: Callable,
    backward: Callable,
    groups: Callable[..., Groups] | None,
) -> Callable:
    """Register the operator with ``torch.library``, where ``*tensors`` are one list, as are any number of results."""
    signature = inspect.signature(forward)
    *first, last = signature.parameters.values()
    variadic = last.kind is inspect.Parameter.VAR_POSITIONAL
    returns_list = signature.return_annotation == list[Tensor]

    def listed(function: Callable) -> Callable:
        return lambda *args: function(*_flat(args)) if variadic else function(*args)

    def pull_back(ctx: Any, *grads: Any) -> Any:
        input_grads = backward(ctx, *(grads[0] if returns_list else grads))
        return (*input_grads[: len(first)], list(input_grads[len(first) :])) if variadic else input_grads

    def save(ctx: Any, inputs: tuple, output: Any) -> None:
        setup_context(ctx, tuple(_flat(inputs)), output)

    run = listed(forward)
    if variadic:
        tensors = last.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Sequence[Tensor])
        run.__signature__ = signature.replace(parameters=[*first, tensors])  # type: ignore[attr-defined]
    operator = torch.library.custom_op(f"ostinato::{name}", run if variadic else forward, mutates_args=())
    operator.register_fake(listed(fake))
    operator.register_autograd(pull_back, setup_context=save if variadic else setup_context)

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
    """Results, with a list as a tuple: an ``autograd.Function`` would not track the tensors of a list."""
    return tuple(output) if isinstance(output, list) else output


def _flat(args: Sequence[Any]) -> list[Any]:
    return [y for x in args for y in (x if isinstance(x, list | tuple) else (x,))]


_TENSOR = object()  # a placeholder for tensors, which the context saves separately


def _without_tensors(args: tuple) -> tuple:
    return tuple(_TENSOR if isinstance(x, Tensor) else x for x in args)


def _with_tensors(args: tuple, tensors: Iterator[Tensor]) -> tuple:
    return tuple(next(tensors) if x is _TENSOR else x for x in args)


def autograd_function(name: str, **members: Callable) -> Any:
    """A subclass of ``torch.autograd.Function`` with these static methods."""
    return type(name, (torch.autograd.Function,), {k: staticmethod(v) for k, v in members.items()})


def apply_of(function: Any) -> Callable:
    """``function.apply`` without its check for transforms, for calls outside of them."""
    return super(torch.autograd.Function, function).apply


def is_batched(x: Tensor) -> bool:
    """Whether a tensor is batched by torch.autograd, as with ``is_grads_batched``, rather than by torch.func."""
    return torch._C._dispatch_keys(x).has("Batched")


def _has_tangent(x: Tensor) -> bool:
    # PyTorch cannot tell for such batches, which are tangents themselves and have none.
    return not is_batched(x) and forward_ad.unpack_dual(x).tangent is not None


def or_empty(grad: Tensor | None, like: Tensor) -> Tensor:
    """The gradient, or an empty tensor for None, as operators must return tensors."""
    return like.new_empty(0) if grad is None else grad
