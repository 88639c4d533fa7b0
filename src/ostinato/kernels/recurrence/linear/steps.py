"""A linear recurrence's trace, split into per-channel and per-step computation."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ostinato.kernels.recurrence.symbolic.builder import Builder, joined, with_constants
from ostinato.kernels.recurrence.symbolic.graph import Graph, Node
from ostinato.kernels.recurrence.symbolic.trace import Trace


class Steps(NamedTuple):
    """The graphs that a kernel computes.

    Attributes:
        sequences, parameters: how many arguments are (B, T, D), and how many (D,).
        constants: from the parameters to what steps need of them, once for each channel.
        step: from the sequences, the constants and, backward, the state before, in this order, to (a, b), or backward
            to a and the factors by which the gradient of h[t] is multiplied to become each argument's, those of the
            sequences before those of the parameters, which are summed over all steps.
    """

    sequences: int
    parameters: int
    constants: Graph
    step: Graph


_LARGEST = 2.0**16  # of the constants that are moved out of their place in a product, and the inverses of which are


@functools.lru_cache(maxsize=1024)
def steps_of(trace: Trace, backward: bool) -> Steps:
    """The steps of a linear recurrence, forward or backward."""
    sequences = [k for k, sequence in enumerate(trace.sequences) if sequence]
    parameters = [k for k, sequence in enumerate(trace.sequences) if not sequence]
    graph = trace.forward
    if backward:
        count = len(trace.sequences)
        # The gradient of b is that of h[t], which the kernel multiplies with last; that of a, as often the state.
        factors = with_constants(trace.backward, {count + 1: 1.0})
        factors = factors._replace(outputs=tuple(factors.outputs[k] for k in sequences + parameters))
        graph = joined(graph._replace(outputs=graph.outputs[:1]), factors)
        sequences = [*sequences, count]
    for _ in range(2):  # again, for factors that have lost their other uses
        graph = _gathered(graph, graph.made_of(parameters))
    of_channel = graph.made_of(parameters)
    used = {i for node, alone in zip(graph.nodes, of_channel, strict=True) if not alone for i in node.operands}
    used.update(graph.outputs)
    kept = [i for i in sorted(used) if of_channel[i] and graph.nodes[i].name != "constant"]
    constants = _part(graph, kept, {}, {k: n for n, k in enumerate(parameters)})
    given = {index: len(trace.sequences) - len(parameters) + n for n, index in enumerate(kept)}
    numbers = {k: n if n < sum(trace.sequences) else n + len(kept) for n, k in enumerate(sequences)}
    return Steps(sum(trace.sequences), len(parameters), constants, _part(graph, list(graph.outputs), given, numbers))


def _gathered(graph: Graph, of_channel: Sequence[bool]) -> Graph:
    """The graph with per-channel and constant factors of products merged, so that they leave the steps.

    Huge and tiny constants stay where they are: the rest of such a product may be out of float32's range by itself.
    """
    uses = Counter(i for node in graph.nodes for i in node.operands) + Counter(graph.outputs)
    builder = Builder()
    one, less = builder.constant(1.0), builder.constant(-1.0)
    indices: list[int] = []
    products: dict[int, tuple[list[int], int]] = {}  # their factors: per step, and the merged rest
    for i, node in enumerate(graph.nodes):
        if node.name not in ("mul", "neg") or of_channel[i] or any(_is_extreme(graph.nodes[k]) for k in node.operands):
            indices.append(builder.repeat(node, indices))
            continue
        factors, rest = [], less if node.name == "neg" else one
        scaled = any(of_channel[k] and graph.nodes[k].name != "constant" for k in node.operands)
        for k in node.operands:
            own, constant = products.get(k, ([], one))
            if of_channel[k]:
                own, constant = [], indices[k]
            elif not own or (uses[k] > 1 and not (scaled and len(own) == 1)):
                own, constant = [indices[k]], one
            factors += own
            rest = builder.add("mul", rest, constant)
        products[i] = factors, rest
        product = functools.reduce(lambda x, y: builder.add("mul", x, y), factors)
        indices.append(builder.add("mul", product, rest))
    return builder.graph([indices[i] for i in graph.outputs])


def _is_extreme(node: Node) -> bool:
    return node.name == "constant" and node.value != 0 and not 1 / _LARGEST <= abs(node.value) <= _LARGEST


def _part(graph: Graph, outputs: list[int], given: Mapping[int, int], numbers: Mapping[int, int]) -> Graph:
    """What computes some nodes, of which others are `given` as inputs; `numbers` are the graph's inputs' new ones."""
    builder = Builder()
    indices: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if i in given:
            indices[i] = builder.input(given[i])
        elif node.name == "constant":
            indices[i] = builder.constant(node.value)
        elif node.name == "input" and int(node.value) in numbers:
            indices[i] = builder.input(numbers[int(node.value)])
        elif node.operands and all(k in indices for k in node.operands):
            indices[i] = builder.add(node.name, *(indices[k] for k in node.operands))
    return builder.graph([indices[i] for i in outputs])
