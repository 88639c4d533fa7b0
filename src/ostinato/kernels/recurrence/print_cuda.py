"""Generates CUDA C++ from a trace: Elements of ``scan.cu`` for linear recurrences, Cells of ``steps.cu`` for others."""

import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ostinato.kernels.recurrence.graph import LOGICAL, Graph, Node
from ostinato.kernels.recurrence.linear import steps_of
from ostinato.kernels.recurrence.trace import Trace

_FORMS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "neg": "-{}",
    "div": "quotient({}, {})",
    "abs": "absolute({})",
    "sign": "sign({})",
    "floor": "floor({})",
    "ceil": "ceil({})",
    "trunc": "trunc({})",
    "round": "rint({})",
    "fmod": "fmod({}, {})",
    "exp": "exponential({})",
    "expm1": "exponential_less_one({})",
    "log": "logarithm({})",
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

_FORWARD = """
struct {name} : Forward<Linear> {{
    static constexpr int PLAIN = {plain}, PARAMETERS = {parameters};
    struct Channel {{ {fields} }};
    static __device__ Channel prepare(const Compute* parameter) {{
{preparation}
        return {{{constants}}};
    }}
    static __device__ Step read(const Compute* x, const Channel& channel, Compute, Compute) {{
{body}
        return {{{results}}};
    }}
}};
"""

_BACKWARD = """
struct {name} : Backward<{plain}, {factors}> {{
    static constexpr int PLAIN = {plain}, PARAMETERS = {parameters};
    static __device__ constexpr int output_factor(int k) {{ return {of_outputs}; }}
    static __device__ constexpr int parameter_factor(int k) {{ return {of_parameters}; }}
    struct Channel {{ {fields} }};
    static __device__ Channel prepare(const Compute* parameter) {{
{preparation}
        return {{{constants}}};
    }}
    static __device__ Step read(const Compute* x, const Channel& channel, Compute previous, Compute grad) {{
{body}
        return {{{a}, grad, {{{results}}}}};
    }}
}};
"""

_CELL = """
struct Cell {{
    static constexpr int STATES = {states}, SEQUENCES = {sequences}, PARAMETERS = {parameters};
    static __device__ void forward(const Compute* h, const Compute* x, const Compute* parameter, Compute* next) {{
{forward}
    }}
    static __device__ void jacobian(const Compute* h, const Compute* x, const Compute* parameter, Compute* result) {{
{jacobian}
    }}
    static __device__ void backward(
        const Compute* h, const Compute* x, const Compute* parameter, const Compute* grad,
        Compute* grad_h, Compute* grad_x, Compute* grad_parameter
    ) {{
{backward}
    }}
}};
"""


def element_name(trace: Trace, backward: bool) -> str:
    """The name of the struct, by which its geometry is looked up: that of a step that moves as many tensors."""
    return f"Generated{sum(trace.sequences)}" + "Backward" * backward


@functools.lru_cache(maxsize=1024)
def print_cuda(trace: Trace, backward: bool) -> str:
    """The struct of a linear recurrence, for the place between ``elements.cuh`` and ``scan.cu``."""
    steps = steps_of(trace, backward)
    constants, step, count = steps.constants, steps.step, len(steps.constants.outputs)
    inputs = [f"x[{k}]" for k in range(steps.sequences)] + [f"channel.c{k}" for k in range(count)] + ["previous"]
    texts = {
        "name": element_name(trace, backward),
        "plain": steps.sequences,
        "parameters": steps.parameters,
        "fields": " ".join(f"{_type(constants.nodes[i])} c{k};" for k, i in enumerate(constants.outputs)),
        "preparation": lines_of(constants, [f"parameter[{k}]" for k in range(steps.parameters)]),
        "constants": ", ".join(name_of(constants, i) for i in constants.outputs),
        "body": lines_of(step, inputs, _paired_sigmoids(step)),
    }
    if not backward:
        return _FORWARD.format(**texts, results=", ".join(name_of(step, i) for i in step.outputs))
    a, *factors = step.outputs
    chosen = sorted(set(factors), key=factors.index)  # equal gradients, as of a sum's terms, are one
    return _BACKWARD.format(
        **texts,
        factors=len(chosen),
        of_outputs=_by_index([chosen.index(i) for i in factors[: steps.sequences]]),
        of_parameters=_by_index([chosen.index(i) for i in factors[steps.sequences :]]),
        a=name_of(step, a),
        results=", ".join(name_of(step, i) for i in chosen),
    )


@functools.lru_cache(maxsize=1024)
def print_cell(trace: Trace) -> str:
    """The struct that ``steps.cu`` walks along."""
    arguments = _places(trace, "x", "parameter")
    given = [f"h[{k}]" for k in range(trace.states)] + arguments
    gradients = [f"grad_h[{k}]" for k in range(trace.states)] + _places(trace, "grad_x", "grad_parameter")
    return _CELL.format(
        states=trace.states,
        sequences=sum(trace.sequences),
        parameters=trace.sequences.count(False),
        forward=_body(trace.forward, given, [f"next[{k}]" for k in range(trace.states)]),
        jacobian=_body(trace.jacobian, given, [f"result[{k}]" for k in range(trace.states**2)]),
        backward=_body(trace.backward, [*given, *(f"grad[{k}]" for k in range(trace.states))], gradients),
    )


def _by_index(values: Sequence[int]) -> str:
    return "".join(f"k == {k} ? {value} : " for k, value in enumerate(values[:-1])) + str(values[-1] if values else 0)


def lines_of(graph: Graph, inputs: Sequence[str], paired: Mapping[int, int] = MappingProxyType({})) -> str:
    """The definitions of what the results need; ``paired`` nodes are computed together, each with the other."""
    lines: dict[int, str] = {}  # in order

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
        lines[i] = f"        const {_type(node)} {name_of(graph, i)} = {expression};"

    for i in graph.outputs:
        add(i)
    return "\n".join(lines.values())


def _form(graph: Graph, node: Node) -> tuple[str, tuple[int, ...]]:
    """How the node is written, of which others."""
    inner = graph.nodes[node.operands[0]]
    if node.name == "sigmoid" and inner.name == "neg" and (other := _find(graph, "sigmoid", inner.operands)):
        return "1 - {}", other
    if node.name == "expm1" and (root := _find(graph, "exp", _half(graph, inner))):
        return "exponential_less_one({}, {})", node.operands + root
    if node.name == "tanh_slope" and (tanh := _find(graph, "tanh", node.operands)):
        return "(1 - {0}) * (1 + {0})", tanh
    return _FORMS[node.name], node.operands


def _paired_sigmoids(graph: Graph) -> dict[int, int]:
    """Sigmoids to be computed together, each with the other.

    None in a graph with a ``where``, which may mask a NaN: of a pair, both are NaN if either is.
    """
    if any(node.name == "where" for node in graph.nodes):
        return {}
    pairs: dict[int, int] = {}
    alone: int | None = None
    for i, node in enumerate(graph.nodes):
        if node.name != "sigmoid" or _form(graph, node)[0] != _FORMS["sigmoid"]:
            continue
        if alone is None or _depends(graph, i, alone):
            alone = i
        else:
            pairs |= {i: alone, alone: i}
            alone = None
    return pairs


def _depends(graph: Graph, i: int, k: int) -> bool:
    """Whether node `i` is `k`, or made of it."""
    return i == k or (i > k and any(_depends(graph, operand, k) for operand in graph.nodes[i].operands))


def _find(graph: Graph, name: str, operands: tuple[int, ...]) -> tuple[int, ...]:
    """The node of that name and operands, if there is one."""
    found = (k for k, node in enumerate(graph.nodes) if node.name == name and node.operands == operands)
    return tuple(found)[:1]


def _half(graph: Graph, node: Node) -> tuple[int, ...]:
    """The node that is doubled."""
    double = node.name == "mul" and graph.nodes[node.operands[1]] == Node("constant", value=2.0)
    return node.operands[:1] if double else ()


def _type(node: Node) -> str:
    return "bool" if node.name in LOGICAL else "Compute"


def name_of(graph: Graph, i: int) -> str:
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


def _places(trace: Trace, of_sequence: str, of_parameter: str) -> list[str]:
    """What each argument is called."""
    counts = {True: 0, False: 0}
    names = []
    for sequence in trace.sequences:
        names.append(f"{of_sequence if sequence else of_parameter}[{counts[sequence]}]")
        counts[sequence] += 1
    return names


def _body(graph: Graph, inputs: list[str], outputs: list[str]) -> str:
    results = (f"        {y} = {name_of(graph, i)};" for y, i in zip(outputs, graph.outputs, strict=True))
    return "\n".join([lines_of(graph, inputs), *results])
