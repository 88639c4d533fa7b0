"""Splits a linear recurrence's trace into what is computed once per channel and what is computed at every step."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ostinato.kernels.recurrence.symbolic.builder import Builder
from ostinato.kernels.recurrence.symbolic.graph import Graph, Node
from ostinato.kernels.recurrence.symbolic.trace import Trace


class Steps(NamedTuple):
    """The graphs that a kernel computes.

    Attributes:
        sequences, parameters: the number of arguments (B, T, D), and that of arguments (D,).
        constants: from the parameters to the constants that steps use, computed once for each channel.
        step: from the sequences, the constants and, backward, the previous state, in this order, to (a, b).  Backward,
            to a and a factor for each argument, sequences first: the argument's gradient is that of h[t] times the
            factor, summed over all steps for a parameter.
    """

    sequences: int
    parameters: int
    constants: Graph
    step: Graph


_LARGEST = 2.0**16  # constants within this factor of 1 are moved out of products


@functools.lru_cache(maxsize=1024)
def steps_of(trace: Trace, backward: bool) -> Steps:
    """The steps of a linear recurrence, forward or backward."""
    sequences = [k for k, sequence in enumerate(trace.sequences) if sequence]
    parameters = [k for k, sequence in enumerate(trace.sequences) if not sequence]
    graph = trace.forward
    if backward:
        builder, count = Builder(), len(trace.sequences)
        a, _ = builder.repeated(graph)
        # The kernel multiplies by the gradient of h[t] last: without it, b's gradient is 1, a's the previous state.
        factors = builder.repeated(trace.backward, {count + 1: 1.0})
        graph = builder.graph([a, *(factors[k] for k in sequences + parameters)])
        sequences = [*sequences, count]
    for _ in range(2):  # twice, as the first pass may leave a factor with only one use, so that it can be merged, too
        graph = _merge_factors(graph, graph.made_of(parameters))
    per_channel = graph.made_of(parameters)
    used = {i for node, once in zip(graph.nodes, per_channel, strict=True) if not once for i in node.operands}
    used.update(graph.outputs)
    kept = [i for i in sorted(used) if per_channel[i] and graph.nodes[i].name != "constant"]
    constants = _subgraph(graph, kept, {}, {k: n for n, k in enumerate(parameters)})
    replaced = {index: len(trace.sequences) - len(parameters) + n for n, index in enumerate(kept)}
    inputs = {k: n if n < sum(trace.sequences) else n + len(kept) for n, k in enumerate(sequences)}
    step = _subgraph(graph, list(graph.outputs), replaced, inputs)
    return Steps(sum(trace.sequences), len(parameters), constants, step)


def _merge_factors(graph: Graph, per_channel: Sequence[bool]) -> Graph:
    """The graph with all per-channel and constant factors of a product merged into one, computed once per channel.

    Huge and tiny constants stay where they are: without them, the rest of the product may leave float32's range.
    """
    uses = Counter(i for node in graph.nodes for i in node.operands) + Counter(graph.outputs)
    builder = Builder()
    one, minus_one = builder.constant(1.0), builder.constant(-1.0)
    indices: list[int] = []
    products: dict[int, tuple[list[int], int]] = {}  # of each product, the factors per step, and the others merged
    for i, node in enumerate(graph.nodes):
        if node.name not in ("mul", "neg") or per_channel[i] or any(_is_extreme(graph.nodes[k]) for k in node.operands):
            indices.append(builder.repeat(node, indices))
            continue
        factors, merged = [], minus_one if node.name == "neg" else one
        is_scaled = any(per_channel[k] and graph.nodes[k].name != "constant" for k in node.operands)
        for k in node.operands:
            operand_factors, constant = products.get(k, ([], one))
            if per_channel[k]:
                operand_factors, constant = [], indices[k]
            elif not operand_factors or (uses[k] > 1 and not (is_scaled and len(operand_factors) == 1)):
                operand_factors, constant = [indices[k]], one
            factors += operand_factors
            merged = builder.add("mul", merged, constant)
        products[i] = factors, merged
        product = functools.reduce(lambda x, y: builder.add("mul", x, y), factors)
        indices.append(builder.add("mul", product, merged))
    return builder.graph([indices[i] for i in graph.outputs])


def _is_extreme(node: Node) -> bool:
    return node.name == "constant" and node.value != 0 and not 1 / _LARGEST <= abs(node.value) <= _LARGEST


def _subgraph(graph: Graph, outputs: list[int], replaced: Mapping[int, int], inputs: Mapping[int, int]) -> Graph:
    """The part of a graph that computes some nodes.

    `replaced` maps nodes that become inputs to their numbers, and `inputs` renumbers the inputs that are kept.
    """
    builder = Builder()
    indices: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        if i in replaced:
            indices[i] = builder.input(replaced[i])
        elif node.name == "constant":
            indices[i] = builder.constant(node.value)
        elif node.name == "input" and int(node.value) in inputs:
            indices[i] = builder.input(inputs[int(node.value)])
        elif node.operands and all(k in indices for k in node.operands):
            indices[i] = builder.add(node.name, *(indices[k] for k in node.operands))
    return builder.graph([indices[i] for i in outputs])
