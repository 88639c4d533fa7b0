"""Exported graphs that run without this library: operators become PyTorch's own, or ONNX's."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ostinato.kernels.operators.captured import Replacing, captured_tensors

_is_portable = False


@contextmanager
def portable() -> Iterator[None]:
    """See :func:`ostinato.portable`."""
    global _is_portable
    before, _is_portable = _is_portable, True
    try:
        yield
    finally:
        _is_portable = before


def is_portable() -> bool:
    """Whether the current trace must run without this library."""
    return _is_portable or torch.onnx.is_in_onnx_export()


def is_traced() -> bool:
    """Whether an exporter traces the program operation by operation, so that it can take in a loop as one node."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def has_any_length(length: int | SymInt) -> bool:
    """Whether a program is traced for any number of steps: a Python loop would fix that of the example input."""
    return is_traced() and isinstance(length, SymInt)


def has_unknown_size(x: Tensor) -> bool:
    """Whether an exporter knows the tensor's first size only once the program runs, as it depends on other data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(x.shape[0]))


def write(plain: Callable, name: str, args: tuple) -> Any:
    """Trace ``plain(*args)`` into the graph in place of the operator."""
    if not torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling():
        exporters = "torch.export.export(strict=False) and torch.onnx.export(dynamo=True)"
        raise NotImplementedError(f"{name} is written in PyTorch's own operators by {exporters} alone")
    with _Elementary():
        return plain(*args)


def refuse_packed() -> None:
    raise NotImplementedError("packed sequences need this library where they run: export padded ones")


def refuse_script(module: Any, why: str = "") -> Any:
    """A module's ``__prepare_scriptable__``, which ``torch.jit.script`` calls first: raises a clear error."""
    kind = f"{type(module).__name__} {why}".rstrip()
    raise NotImplementedError(f"torch.jit.script cannot compile {kind}: use torch.export.export")


def loop(
    step: Callable[..., tuple[list[Tensor], Tensor]],
    states: list[Tensor],
    inputs: list[Tensor],
    constants: Sequence[Tensor] = (),
    *,
    reverse: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """``states, output[t] = step(states, inputs[t], constants)`` for every t of the inputs' first dimension.

    The loop is one node of the graph, PyTorch's ``scan``, for any number of steps.  ``output[t]`` must not be an
    argument of the step.  Tensors that the step captures become inputs of the node: its graph would otherwise hold them
    as they are during tracing.  With ``reverse`` the loop runs from the last t to the first.

    Returns:
        The last states, and all outputs, (T, ...).
    """
    from torch._higher_order_ops.scan import scan_op  # takes longer to import than this whole library
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    if reverse:
        last, outputs = loop(step, states, [x.flip(0) for x in inputs], constants)
        return last, outputs.flip(0)

    with disable_proxy_modes_tracing():  # this step must not become part of the graph
        captured = captured_tensors(step, states, [x[0] for x in inputs], list(constants))
    copies = [_copy(x) for x in captured]  # these are part of the graph, and no views of each other

    def body(*operands: Any) -> list[Tensor]:
        rest = iter(operands)
        *arguments, replacements = (list(islice(rest, len(group))) for group in (states, inputs, constants, captured))
        # Both modes are entered here, as modes are off inside the functions that they forward.
        with _Elementary(), Replacing(captured, replacements):
            next_states, output = step(*arguments)
        return [*map(_copy, next_states), output]  # results must alias neither each other nor arguments

    # Copies, as one tensor may be passed as two states, and as a step's results must have the strides of these.
    states = [_copy(x) for x in states]
    if torch.onnx.is_in_onnx_export():
        *last, outputs = scan_op(body, states, inputs, (*constants, *copies))
        return last, outputs
    if torch.__version__ < "2.13":  # compared as versions
        states = _differentiable(states, (*(x[0] for x in inputs), *constants, *copies))
    sizes = _symbols(*states, *inputs, *constants, *copies)
    *last, outputs = scan_op(body, states, inputs, (*constants, *copies, *sizes))
    # A copy in other memory: PyTorch 2.13's packages do not compile if the next operation would overwrite the loop's
    # result with its own.
    return last, torch.cat([outputs[:1], outputs])[1:]


def _differentiable(states: list[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The same states, requiring gradients if any of the others does.

    If the initial states do not, PyTorch 2.11's loops do not propagate gradients through the states of later steps.
    """
    norms = [x.abs().sum() for x in (*others, *states) if x.is_floating_point() or x.is_complex()]
    unused = torch.stack([x.to(norms[0].dtype) for x in norms]).sum()
    return [torch.where(torch.ones_like(x, dtype=torch.bool), x, unused.to(x.dtype)) for x in states]


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _symbols(*tensors: Tensor) -> list[SymInt]:
    """The symbols in all sizes: PyTorch's compiler lays out a loop's outputs by those among the loop's arguments."""
    sizes: list[Any] = [size for x in tensors for size in x.shape if isinstance(size, SymInt)]
    nodes = {symbol: size.node for size in sizes for symbol in sorted(size.node.expr.free_symbols, key=str)}
    return [node.shape_env.create_symintnode(symbol, hint=None) for symbol, node in nodes.items()]


class _Elementary(TorchFunctionMode):
    """In ONNX exports, replaces functions that PyTorch cannot write, or writes as formulas that overflow or cancel."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if torch.onnx.is_in_onnx_export():
            func = _FORMULAS.get(func, func)
        return func(*args, **(kwargs or {}))


def _log_sigmoid(x: Tensor) -> Tensor:
    return x.clamp(max=0.0) - _log1p(torch.exp(-x.abs()))


def _log_add_exp(x: Tensor, y: Tensor) -> Tensor:
    differ = torch.maximum(x, y) + _log1p(torch.exp(-(x - y).abs()))
    return torch.where(x == y, x + math.log(2.0), differ)  # the difference of equal infinities would be NaN


def _expm1(x: Tensor) -> Tensor:
    return torch.tanh(0.5 * x) * (torch.exp(x) + 1.0)


def _log1p(x: Tensor) -> Tensor:
    rounded = (x + 1.0) - 1.0  # the logarithm is that of 1 + rounded, which the factor x / rounded corrects
    corrected = torch.log(x + 1.0) * torch.where(rounded == x, 1.0, x / rounded)
    return torch.where(rounded == 0.0, x, corrected)


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    low, high = torch.minimum(x.abs(), y.abs()), torch.maximum(x.abs(), y.abs())
    ratio = torch.where(low == high, 1.0, low / high)  # the quotient of two zeros or infinities would be NaN
    return high * torch.sqrt(1.0 + ratio * ratio)


_FORMULAS: dict[Any, Callable] = {
    F.logsigmoid: _log_sigmoid,
    torch.logaddexp: _log_add_exp,
    torch.expm1: _expm1,
    Tensor.expm1: _expm1,
    torch.log1p: _log1p,
    Tensor.log1p: _log1p,
    torch.hypot: _hypot,
}


def proxy_among(*arguments: Any) -> Proxy | None:
    """The first proxy of ``torch.fx`` among the arguments and their elements; None unless it traces the call."""
    parts = (part for x in arguments for part in (x if isinstance(x, (tuple, list)) else (x,)))
    return next((part for part in parts if isinstance(part, Proxy)), None)


def node_of(module: nn.Module, own_forward: Callable, tracer: Any, input: Any, **options: Any) -> Any:
    """A node for a call of a layer in the graph that ``torch.fx`` traces: by default only torch.nn's layers become one.

    As the node calls the whole layer, an error is raised if the tracer is already inside it, or in code around its
    ``own_forward``: hooks, or a subclass's forward.
    """
    hooked = module._forward_hooks or module._forward_pre_hooks
    if module is tracer.root or hooked or type(module).forward is not own_forward:
        raise TypeError(
            f"torch.fx cannot trace the inside of {type(module).__name__}, nor hooks or a forward around it: give a "
            "torch.fx.Tracer an is_leaf_module that is true for it"
        )
    kwargs = {name: x for name, x in options.items() if x is not None}
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (input,), kwargs)


def constant_to_compilers(function: Callable) -> Callable:
    """``torch.compiler.assume_constant_result`` without importing the compiler, which takes several seconds.

    A compiler calls the function instead of tracing it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
