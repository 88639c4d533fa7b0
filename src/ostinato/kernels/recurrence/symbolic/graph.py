"""Graphs of scalar operations: their nodes, their dependence on their inputs, and their evaluation in PyTorch."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Number = float | bool


class Node(NamedTuple):
    """An operation of :data:`OPERATIONS` on earlier nodes; or a "constant" or "input", which have a value."""

    name: str
    operands: tuple[int, ...] = ()
    value: Number = 0.0  # of a constant its number, of an input its index


class Graph(NamedTuple):
    """Nodes in topological order, and the indices of those that are the results."""

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    def made_of(self, inputs: Sequence[int]) -> list[bool]:
        """For each node, whether it depends on no other inputs than these."""
        is_made_of: list[bool] = []
        for node in self.nodes:
            within = int(node.value) in inputs if node.name == "input" else all(is_made_of[i] for i in node.operands)
            is_made_of.append(within)
        return is_made_of

    def doubled_by(self, node: Node) -> tuple[int, ...]:
        """The operand x of a node ``x * 2``, in a tuple, which is empty for any other node."""
        doubles = node.name == "mul" and self.nodes[node.operands[1]] == Node("constant", value=2.0)
        return node.operands[:1] if doubles else ()

    def is_linear_in(self, inputs: Collection[int]) -> bool:
        """Whether each result is a sum of these inputs times factors that depend on none of them."""
        linear: list[bool] = []  # for each node, whether it is such a sum; the constants 0 and NaN are
        fixed: list[bool] = []  # for each node, whether it depends on none of these inputs
        for node in self.nodes:
            sums, factors = [linear[i] for i in node.operands], [fixed[i] for i in node.operands]
            is_linear, is_fixed = False, all(factors)
            match node.name:
                case "input":
                    is_linear, is_fixed = int(node.value) in inputs, int(node.value) not in inputs
                case "constant":
                    is_linear = node.value == 0 or node.value != node.value
                case "add" | "sub" | "neg":
                    is_linear = all(sums)
                case "mul":
                    is_linear = (sums[0] and factors[1]) or (factors[0] and sums[1])
                case "div":
                    is_linear = sums[0] and factors[1]
                case "where":
                    is_linear = factors[0] and sums[1] and sums[2]
                case "eq" | "ne":
                    is_fixed |= all(sums)  # scaling both by the same factor does not change whether they are equal
            if not (is_linear or is_fixed):
                return False
            linear.append(is_linear)
            fixed.append(is_fixed)
        return all(linear[i] for i in self.outputs)


def tanh_slope(x: Tensor) -> Tensor:
    """The derivative of tanh."""
    return 4.0 * torch.sigmoid(2.0 * x) * torch.sigmoid(-2.0 * x)  # not by cosh, which overflows in its derivatives


OPERATIONS: dict[str, Callable] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "detach": torch.detach,
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "round": torch.round,
    "fmod": torch.fmod,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "tanh_slope": tanh_slope,
    "sigmoid": torch.sigmoid,
    "pow": torch.pow,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "where": torch.where,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
}
LOGICAL = frozenset(("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"))  # the operations with a Boolean result


def evaluate(graph: Graph, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results, computed in PyTorch from tensors of one dtype that broadcast with each other."""
    values: list[Tensor] = []
    for node in graph.nodes:
        if node.name == "input":
            values.append(inputs[int(node.value)])
        elif node.name == "constant":
            like = inputs[0]
            dtype = torch.bool if isinstance(node.value, bool) else like.dtype
            # Not torch.tensor, which would become a constant of a graph that is being traced.
            values.append(torch.full((), node.value, dtype=dtype, device=like.device))
        else:
            values.append(OPERATIONS[node.name](*(values[i] for i in node.operands)))
    return tuple(values[i] for i in graph.outputs)
