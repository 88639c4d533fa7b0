"""Prints a traced linear recurrence as the Elements that ``scan.cu`` scans, forward and backward."""

import functools
import math

from ostinato.kernels.recurrence.graph import LOGICAL, Graph, Node, joined, with_constants
from ostinato.kernels.recurrence.trace import Trace

_FORMS = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "neg": "-{}",
    "div": "quotient({}, {})",
    "abs": "absolute({})",
    "sign": "sign({})",
    "exp": "exponential({})",
    "expm1": "exponential_less_one({})",
    "log": "logarithm({})",
    "log1p": "log_one_plus({})",
    "sqrt": "square_root({})",
    "rsqrt": "reciprocal_root({})",
    "reciprocal": "reciprocal({})",
    "sin": "sine({})",
    "cos": "cosine({})",
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
{channel}
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
{channel}
    static __device__ Step read(const Compute* x, const Channel& channel, Compute previous, Compute grad) {{
{body}
        return {{{a}, grad, {{{results}}}}};
    }}
}};
"""

_CHANNEL = """    struct Channel {{ {fields} }};
    static __device__ Channel prepare(const Compute* parameter) {{
{body}
        return {{{results}}};
    }}"""


def element_name(trace: Trace, backward: bool) -> str:
    """The name of the struct, by which its geometry is looked up: that of a step that moves as many tensors."""
    return f"Generated{sum(trace.sequences)}" + "Backward" * backward


@functools.lru_cache(maxsize=1024)
def print_cuda(trace: Trace, backward: bool) -> str:
    """The struct of a linear recurrence, for the place between ``elements.cuh`` and ``scan.cu``."""
    name, plain, parameters = element_name(trace, backward), sum(trace.sequences), trace.sequences.count(False)
    places = dict(zip(*_places(trace), strict=True))
    if not backward:
        graph = trace.forward
        results = [_name(graph, i) for i in graph.outputs]
        return _FORWARD.format(
            name=name,
            plain=plain,
            parameters=parameters,
            channel=_channel(graph, places),
            body=_lines(graph, places, of_channel=False),
            results=", ".join(results),
        )
    count = len(trace.sequences)
    places[count] = "previous"
    a, *factors = (graph := backward_graph(trace)).outputs
    chosen = sorted(set(factors), key=factors.index)  # equal gradients, as of a sum's terms, are one
    of = {
        kind: [chosen.index(i) for i, sequence in zip(factors, trace.sequences, strict=True) if sequence == kind]
        for kind in (True, False)
    }
    return _BACKWARD.format(
        name=name,
        plain=plain,
        parameters=parameters,
        factors=len(chosen),
        of_outputs=_by_index(of[True]),
        of_parameters=_by_index(of[False]),
        channel=_channel(graph, places),
        body=_lines(graph, places, of_channel=False),
        a=_name(graph, a),
        results=", ".join(_name(graph, i) for i in chosen),
    )


def backward_graph(trace: Trace) -> Graph:
    """From the arguments and the state before to a, and by what h's gradient is multiplied for each argument's."""
    count = len(trace.sequences)
    a = trace.forward._replace(outputs=trace.forward.outputs[:1])
    return joined(a, with_constants(trace.backward, {count + 1: 1.0}))


def _places(trace: Trace) -> tuple[list[int], list[str]]:
    """What each argument is called where it is read."""
    counts = {True: 0, False: 0}
    names = []
    for sequence in trace.sequences:
        names.append(f"{'x' if sequence else 'parameter'}[{counts[sequence]}]")
        counts[sequence] += 1
    return list(range(len(names))), names


def _by_index(values: list[int]) -> str:
    return "".join(f"k == {k} ? {value} : " for k, value in enumerate(values[:-1])) + str((values or [0])[-1])


def _of_channel(graph: Graph, places: dict[int, str]) -> tuple[list[bool], list[int]]:
    """Which nodes depend on per-channel parameters alone, and which of them are used where others are computed."""
    parameters = [k for k, place in places.items() if place.startswith("parameter")]
    alone = graph.made_of(parameters)
    used = {i for node, of_channel in zip(graph.nodes, alone, strict=True) if not of_channel for i in node.operands}
    used |= set(graph.outputs)
    return alone, [i for i in sorted(used) if alone[i] and graph.nodes[i].name != "constant"]


def _channel(graph: Graph, places: dict[int, str]) -> str:
    _, kept = _of_channel(graph, places)
    if not kept:
        return "    using Channel = NoParameters;\n    static __device__ Channel prepare(const Compute*) { return {}; }"
    return _CHANNEL.format(
        fields=" ".join(f"{_type(graph.nodes[i])} {_name(graph, i)};" for i in kept),
        body=_lines(graph, places, of_channel=True),
        results=", ".join(_name(graph, i) for i in kept),
    )


def _lines(graph: Graph, places: dict[int, str], of_channel: bool) -> str:
    """What computes the nodes of a channel that others use, or those of a step that the results need."""
    alone, kept = _of_channel(graph, places)
    lines: dict[int, str] = {}  # in order

    def add(i: int) -> None:
        node = graph.nodes[i]
        if i in lines or node.name == "constant":
            return
        if alone[i] and not of_channel:
            expression = f"channel.{_name(graph, i)}"
        elif node.name == "input":
            expression = places[int(node.value)]
        else:
            form, operands = _form(graph, node)
            for k in operands:
                add(k)
            expression = form.format(*(_name(graph, k) for k in operands))
        lines[i] = f"        const {_type(node)} {_name(graph, i)} = {expression};"

    for i in kept if of_channel else graph.outputs:
        add(i)
    return "\n".join(lines.values())


def _form(graph: Graph, node: Node) -> tuple[str, tuple[int, ...]]:
    """How the node is written, of which others."""
    inner = graph.nodes[node.operands[0]]
    if node.name == "sigmoid" and inner.name == "neg" and (other := _find(graph, "sigmoid", inner.operands)):
        return "1 - {}", other
    if node.name == "tanh_slope" and (tanh := _find(graph, "tanh", node.operands)):
        return "(1 - {0}) * (1 + {0})", tanh
    return _FORMS[node.name], node.operands


def _find(graph: Graph, name: str, operands: tuple[int, ...]) -> tuple[int, ...]:
    """The node of that name and operands, if there is one."""
    found = (k for k, node in enumerate(graph.nodes) if node.name == name and node.operands == operands)
    return tuple(found)[:1]


def _type(node: Node) -> str:
    return "bool" if node.name in LOGICAL else "Compute"


def _name(graph: Graph, i: int) -> str:
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
