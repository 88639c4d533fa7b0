"""Generates the functions that the CPU's loops call from a traced linear recurrence, forward and backward."""

import functools
import math

from ostinato.kernels.recurrence.graph import Graph, Node
from ostinato.kernels.recurrence.linear import Steps, steps_of
from ostinato.kernels.recurrence.trace import Trace

_FORMS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "abs": "abs({})",
    "sign": "sign({})",
    "floor": "np.floor({})",
    "ceil": "np.ceil({})",
    "trunc": "np.trunc({})",
    "round": "np.rint({})",
    "fmod": "np.fmod({}, {})",
    "exp": "exp({})",
    "expm1": "expm1({})",
    "log": "log({})",
    "log1p": "log1p_general({})",
    "sqrt": "math.sqrt({})",
    "rsqrt": "one / math.sqrt({})",
    "reciprocal": "one / {}",
    "sin": "sin({})",
    "cos": "cos({})",
    "atan2": "np.arctan2({}, {})",
    "hypot": "np.hypot({}, {})",
    "erf": "cast(math.erf({0}), {0})",
    "tanh": "tanh_slope({})[0]",
    "tanh_slope": "tanh_slope({})[1]",
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

# x, c, grad and sum are tuples of pointers, and at_... the place of a row's first channel behind each of them.
_FORWARD = """
def step(j, x, at_x, c, at_c, state, at, out, at_out):
{body}
    h = multiply_add({a}, load(state, at + j, "state"), {b})
    store(state, at + j, h, "state")
    store(out, at_out + j, h, "out")
"""

_BACKWARD = """
def step(j, x, at_x, c, at_c, h, at_h, grad_h, at_grad_h, state, at, grad, at_grad, sum, at_sum):
    total = load(grad_h, at_grad_h + j, "grad_h") + load(state, at + j, "state")
{body}
    store(state, at + j, total * {a}, "state")
"""


@functools.lru_cache(maxsize=1024)
def print_cpu(trace: Trace, backward: bool) -> str:
    """The source of ``step``, and of functions that gather its arguments from the loop's ``work``."""
    steps = steps_of(trace, backward)
    constants = len(steps.constants.outputs)
    loads = [f'load(x[{k}], at_x + j, "x{k}")' for k in range(steps.sequences)]
    loads += [f'load(c[{k}], at_c + j, "c{k}")' for k in range(constants)]
    loads.append('load(h, at_h + j, "h")')
    lines, names = lines_of(steps.step, loads)
    if backward:
        a, *factors = names
        code = _BACKWARD.format(body="\n".join(lines + _gradients(steps, factors)), a=a)
    else:
        code = _FORWARD.format(body="\n".join(lines), a=names[0], b=names[1])
    counts = {"x": steps.sequences, "c": constants}
    if backward:
        counts |= {"grad": steps.sequences, "sum": steps.parameters}
    gathering = "".join(_GATHERING.format(name=name, pointers=_pointers(name, count)) for name, count in counts.items())
    return code + gathering + _prefetching(steps.sequences) + (_flushing(steps.parameters) if backward else "")


_GATHERING = """
def pointers_{name}(work):
    return ({pointers})
"""


def _pointers(name: str, count: int) -> str:
    return "".join(f"pointer_to(work.{name}{k}, dtype), " for k in range(count))


def _gradients(steps: Steps, factors: list[str]) -> list[str]:
    lines = []
    names: dict[str, str] = {}  # equal gradients, as of a sum's terms, are one
    for k, factor in enumerate(factors):
        if factor not in names:
            names[factor] = f"g{k}"
            lines.append(f"    g{k} = total * {factor}")
        n = k - steps.sequences
        if n < 0:
            lines.append(f'    store(grad[{k}], at_grad + j, {names[factor]}, "grad{k}")')
        else:
            so_far = f'load(sum[{n}], at_sum + j, "sum{n}")'
            lines.append(f'    store(sum[{n}], at_sum + j, {so_far} + {names[factor]}, "sum{n}")')
    return lines


def _prefetching(count: int) -> str:
    lines = [f"    prefetch(x[{k}], at_x, begin, end)\n" for k in range(count)]
    return "\ndef prefetch_x(x, at_x, begin, end):\n" + "".join(lines)


def _flushing(count: int) -> str:
    lines = [
        f"""
    for j in range(begin, end):
        totals[{k} * work.groups * work.directions * work.hidden + at_sum + j] += sum[{k}][at_sum + j]
        sum[{k}][at_sum + j] = 0
"""
        for k in range(count)
    ]
    return "\ndef flush(work, totals, sum, at_sum, begin, end):\n    pass\n" + "".join(lines)


def lines_of(graph: Graph, inputs: list[str]) -> tuple[list[str], list[str]]:
    """Lines that compute the results, and what these are called in them."""
    lines = [f"    one = cast(1.0, {inputs[0]})"]
    uses = [0] * len(graph.nodes)
    for node in graph.nodes:
        for i in node.operands:
            uses[i] += 1
    names = []
    for i, node in enumerate(graph.nodes):
        names.append(_constant(node) if node.name == "constant" else f"v{i}")
        if node.name != "constant":
            lines.append(f"    v{i} = {_expression(graph, node, names, uses, inputs)}")
    return lines, [names[i] for i in graph.outputs]


def _expression(graph: Graph, node: Node, names: list[str], uses: list[int], inputs: list[str]) -> str:
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
    if node.name == "expm1" and (half := _doubled(graph, inner)) is not None and Node("exp", (half,)) in graph.nodes:
        return f"expm1_of_twice({names[half]})"
    if node.name == "log1p" and inner.name == "exp" and graph.nodes[inner.operands[0]].name == "neg":
        exponent = graph.nodes[inner.operands[0]]
        if graph.nodes[exponent.operands[0]].name == "abs":
            return f"log1p({operands[0]})"
    return _FORMS[node.name].format(*operands)


def _is_never_positive(graph: Graph, node: Node) -> bool:
    operands = [graph.nodes[i] for i in node.operands]
    if node.name == "minimum":
        return any(x.name == "constant" and x.value <= 0 for x in operands)
    return node.name == "neg" and operands[0].name == "abs"


def _doubled(graph: Graph, node: Node) -> int | None:
    """Of which node this one is twice the value."""
    is_twice = node.name == "mul" and graph.nodes[node.operands[1]] == Node("constant", (), 2.0)
    return node.operands[0] if is_twice else None


def _constant(node: Node) -> str:
    if isinstance(node.value, bool):
        return str(node.value)
    value = repr(node.value) if math.isfinite(node.value) else f"math.{str(node.value).lstrip('-')}"
    return f"cast({'-' * (not math.isfinite(node.value) and node.value < 0)}{value}, one)"
