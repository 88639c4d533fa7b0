"""A loop over time as one node of a graph: PyTorch's own ``scan``, whose number of steps is the input's."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from torch import SymInt, Tensor


def loop(
    step: Callable[..., tuple[list[Tensor], Tensor]],
    states: list[Tensor],
    inputs: list[Tensor],
    constants: Sequence[Tensor] = (),
) -> tuple[list[Tensor], Tensor]:
    """``states, output[t] = step(states, inputs[t], constants)`` for every t of the first dimension.

    To be called while PyTorch traces a graph: what the step uses comes in by its arguments.

    Returns:
        The last states, and all outputs, (T, ...).
    """
    from torch._higher_order_ops.scan import scan_op  # longer to import than the whole library

    sizes = _symbols(*states, *inputs, *constants)

    def body(*given: Any) -> list[Tensor]:
        rest = iter(given)
        new, output = step(*(list(islice(rest, len(group))) for group in (states, inputs, constants)))
        return [*new, output.clone()]  # nothing that is returned may share its memory

    *last, outputs = scan_op(body, states, inputs, (*constants, *sizes))
    return last, outputs


def _symbols(*tensors: Tensor) -> list[SymInt]:
    """The unknowns of all sizes: PyTorch's compiler lays out the outputs with those that the loop is given."""
    sizes = [size.node for x in tensors for size in x.shape if isinstance(size, SymInt)]
    found = {symbol: node for node in sizes for symbol in sorted(node.expr.free_symbols, key=str)}
    return [node.shape_env.create_symintnode(symbol, hint=None) for symbol, node in found.items()]
