"""Prints graphs as lines of CUDA C++, which call the functions of ``cuda/numeric.cuh``."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ostinato.kernels.recurrence.symbolic.graph import LOGICAL, Graph, Node

_FORMS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "neg": "-{}",
    "div": "quotient({}, {})",
    "detach": "{}",
    "abs": "absolute({})",
    "sign": "sign({})",
    "floor": "floor({})",
    "ceil": "ceil({})",
    "trunc": "trunc({})",
    "round": "rint({})",
    "fmod": "fmod({}, {})",
    "exp": "exponential({})",
    "exp2": "power_of_two({})",
    "expm1": "exponential_less_one({})",
    "log": "logarithm({})",
    "log2": "binary_logarithm({})",
    "log10": "decimal_logarithm({})",
    "log1p": "log_one_plus({})",
    "sqrt": "square_root({})",
    "rsqrt": "reciprocal_root({})",
    "reciprocal": "reciprocal({})",
    "sin": "sine({})",
    "cos": "cosine({})",
    "atan2": "atan2({}, {})",
    "hypot": "hypot({}, {})",
    "erf": "error_function({})",
    "tanh": "hyperbolic_tangent({})",
    "tanh_slope": "hyperbolic_tangent_slope({})",
    "sigmoid": "sigmoid({})",
    "pow": "power({}, {})",
    "minimum": "minimum({}, {})",
    "maximum": "maximum({}, {})",
    "where": "{} ? {} : {}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "and": "{} && {}",
    "or": "{} || {}",
    "not": "!{}",
}


def lines_of(graph: Graph, inputs: Sequence[str], paired: Mapping[int, int] = MappingProxyType({})) -> str:
    """The definitions of the nodes that the results depend on.

    ``paired`` maps sigmoids that are computed together to each other; see :func:`paired_sigmoids`.
    """
    lines: dict[int, str] = {}  # by node, in the order of printing

    def add(i: int) -> None:
        node = graph.nodes[i]
        if i in lines or node.name == "constant":
            return
        if i in paired:
            first, second = sorted((i, paired[i]))
            x, y = graph.nodes[first].operands + graph.nodes[second].operands
            add(x)
            add(y)
            names = [name_of(graph, k) for k in (x, y, first, second)]
            lines[first] = f"        Compute {names[2]}, {names[3]};"
            lines[second] = f"        sigmoids({', '.join(names)});"
            return
        if node.name == "input":
            expression = inputs[int(node.value)]
        else:
            form, operands = _form(graph, node)
            for k in operands:
                add(k)
            expression = form.format(*(name_of(graph, k) for k in operands))
        lines[i] = f"        const {type_of(node)} {name_of(graph, i)} = {expression};"

    for i in graph.outputs:
        add(i)
    return "\n".join(lines.values())


def _form(graph: Graph, node: Node) -> tuple[str, tuple[int, ...]]:
    """The format string of a node, and the nodes that fill it."""
    inner = graph.nodes[node.operands[0]]
    if node.name == "sigmoid" and inner.name == "neg" and (other := _find(graph, "sigmoid", inner.operands)):
        return "1 - {}", other
    if node.name == "expm1" and (root := _find(graph, "exp", graph.doubled_by(inner))):
        return "exponential_less_one({}, {})", node.operands + root
    if node.name == "tanh_slope" and (tanh := _find(graph, "tanh", node.operands)):
        return "(1 - {0}) * (1 + {0})", tanh
    return _FORMS[node.name], node.operands


def paired_sigmoids(graph: Graph) -> dict[int, int]:
    """Pairs of independent sigmoids that are computed together, each node mapped to its partner.

    There are none in a graph with a ``where``, which may mask a NaN: if one sigmoid of a pair is NaN, both are.
    """
    if any(node.name == "where" for node in graph.nodes):
        return {}
    pairs: dict[int, int] = {}
    unpaired: int | None = None
    for i, node in enumerate(graph.nodes):
        if node.name != "sigmoid" or _form(graph, node)[0] != _FORMS["sigmoid"]:
            continue
        if unpaired is None or _depends(graph, i, unpaired):
            unpaired = i
        else:
            pairs |= {i: unpaired, unpaired: i}
            unpaired = None
    return pairs


def _depends(graph: Graph, i: int, k: int) -> bool:
    """Whether node `i` is node `k` or depends on it."""
    needed = {i}
    for n in range(i, k, -1):  # nodes are in topological order
        if n in needed:
            needed.update(graph.nodes[n].operands)
    return k in needed


def _find(graph: Graph, name: str, operands: tuple[int, ...]) -> tuple[int, ...]:
    """The first node with this name and these operands, in a tuple, which is empty if there is none."""
    matches = (k for k, node in enumerate(graph.nodes) if node.name == name and node.operands == operands)
    return tuple(matches)[:1]


def type_of(node: Node) -> str:
    """The C++ type of a node's value."""
    return "bool" if node.name in LOGICAL else "Compute"


def name_of(graph: Graph, i: int) -> str:
    """The variable of a node, or the literal of a constant."""
    node = graph.nodes[i]
    if node.name != "constant":
        return f"v{i}"
    if isinstance(node.value, bool):
        return str(node.value).lower()
    if math.isnan(node.value):
        return "(infinity() - infinity())"
    if math.isinf(node.value):
        return "infinity()" if node.value > 0 else "(-infinity())"
    return f"Compute({node.value!r})"
