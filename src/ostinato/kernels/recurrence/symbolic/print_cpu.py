"""Prints graphs as lines of Python for Numba, which call the functions of ``cpu/elementary.py``."""

import math
from collections import Counter

from ostinato.kernels.recurrence.symbolic.graph import Graph, Node

_FORMS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "detach": "{}",
    "abs": "abs({})",
    "sign": "sign({})",
    "floor": "np.floor({})",
    "ceil": "np.ceil({})",
    "trunc": "np.trunc({})",
    "round": "np.rint({})",
    "fmod": "np.fmod({}, {})",
    "exp": "exp({})",
    "exp2": "exp2({})",
    "expm1": "expm1({})",
    "log": "log({})",
    "log2": "log2({})",
    "log10": "log10({})",
    "log1p": "log1p({})",
    "sqrt": "math.sqrt({})",
    "rsqrt": "one / math.sqrt({})",
    "reciprocal": "one / {}",
    "sin": "sin({})",
    "cos": "cos({})",
    "atan2": "np.arctan2({}, {})",
    "hypot": "np.hypot({}, {})",
    "erf": "cast(math.erf({0}), {0})",
    "tanh": "tanh_and_slope({})[0]",
    "tanh_slope": "tanh_and_slope({})[1]",
    "sigmoid": "sigmoids({})[0]",
    "pow": "cast(math.pow({0}, {1}), {0})",
    "minimum": "minimum({}, {})",
    "maximum": "maximum({}, {})",
    "where": "{1} if {0} else {2}",
    "lt": "{} < {}",
    "le": "{} <= {}",
    "gt": "{} > {}",
    "ge": "{} >= {}",
    "eq": "{} == {}",
    "ne": "{} != {}",
    "and": "{} & {}",
    "or": "{} | {}",
    "not": "not {}",
}


def lines_of(graph: Graph, inputs: list[str]) -> tuple[list[str], list[str]]:
    """The lines that compute the results, and the names of the results in them."""
    lines = [f"    one = cast(1.0, {inputs[0]})"]
    uses = Counter(i for node in graph.nodes for i in node.operands)
    names = []
    for i, node in enumerate(graph.nodes):
        names.append(_constant(node) if node.name == "constant" else f"v{i}")
        if node.name != "constant":
            lines.append(f"    v{i} = {_expression(graph, node, names, uses, inputs)}")
    return lines, [names[i] for i in graph.outputs]


def _expression(graph: Graph, node: Node, names: list[str], uses: Counter[int], inputs: list[str]) -> str:
    """The expression of a node, by a fused or faster function where the node's operands allow it."""
    if node.name == "input":
        return inputs[int(node.value)]
    operands = [names[i] for i in node.operands]
    inner = graph.nodes[node.operands[0]]
    if node.name in ("add", "sub"):
        for one, other in ((0, 1), (1, 0)):
            product = graph.nodes[node.operands[one]]
            if product.name == "mul" and uses[node.operands[one]] == 1:
                x, y = (names[i] for i in product.operands)
                minus_x, minus_rest = ("-" * (node.name == "sub" and k == one) for k in (1, 0))
                return f"multiply_add({minus_x}{x}, {y}, {minus_rest}{operands[other]})"
    if node.name in ("minimum", "maximum") and graph.nodes[node.operands[1]].name == "constant":
        return "{1} if {0} {2} {1} else {0}".format(*operands, ">" if node.name == "minimum" else "<")
    if node.name == "sigmoid" and inner.name == "neg":
        return f"sigmoids({names[inner.operands[0]]})[1]"
    if node.name == "exp" and _is_never_positive(graph, inner):
        return f"exp_fraction({operands[0]})"
    if node.name == "expm1" and (half := graph.doubled_by(inner)) and Node("exp", half) in graph.nodes:
        return f"expm1_of_twice({names[half[0]]})"
    if node.name == "log1p" and inner.name == "exp" and graph.nodes[inner.operands[0]].name == "neg":
        exponent = graph.nodes[inner.operands[0]]
        if graph.nodes[exponent.operands[0]].name == "abs":
            return f"log1p_fraction({operands[0]})"
    return _FORMS[node.name].format(*operands)


def _is_never_positive(graph: Graph, node: Node) -> bool:
    """Whether a node is of a form whose value is never positive; False if that is not known."""
    operands = [graph.nodes[i] for i in node.operands]
    if node.name == "minimum":
        return any(x.name == "constant" and x.value <= 0 for x in operands)
    return node.name == "neg" and operands[0].name == "abs"


def _constant(node: Node) -> str:
    if isinstance(node.value, bool):
        return str(node.value)
    value = repr(node.value) if math.isfinite(node.value) else f"math.{str(node.value).lstrip('-')}"
    return f"cast({'-' * (not math.isfinite(node.value) and node.value < 0)}{value}, one)"
