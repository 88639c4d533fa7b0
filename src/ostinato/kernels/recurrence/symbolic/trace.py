"""What a recurrence's function is to kernels: its trace, as graphs of its values and derivatives, or as a text."""

import functools
import json
from typing import NamedTuple

from ostinato.kernels.recurrence.symbolic.builder import Builder
from ostinato.kernels.recurrence.symbolic.graph import Graph, Node


class Trace(NamedTuple):
    """What a recurrence computes of one element.

    Attributes:
        name: the function's.
        sequences: for each argument, whether it is (B, T, D) rather than per channel, (D,).
        states: 0 if the function returns the coefficients (a, b) of a linear recurrence; otherwise how many states
            it takes first and returns the next of.
        forward: from the states and the arguments to the coefficients or the next states.
        backward: from the states, the arguments, and the gradients of what the function returns, to the gradients of
            the states and the arguments.
        jacobian: from the states and the arguments to the derivatives of the next states with respect to the states,
            row by row; no results for a linear recurrence.
    """

    name: str
    sequences: tuple[bool, ...]
    states: int
    forward: Graph
    backward: Graph
    jacobian: Graph

    def __hash__(self) -> int:  # of a part: all of it would be hashed at every look-up in a cache
        return hash((self.name, self.sequences, self.states, len(self.forward.nodes)))

    @property
    def text(self) -> str:
        """A serialisation for :func:`parse`, by which operators identify a recurrence, in any process."""
        return json.dumps(self)


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Trace:
    """The trace with this text."""
    name, sequences, states, *graphs = json.loads(text)
    return Trace(name, tuple(sequences), states, *map(_graph, graphs))


def _graph(parts: list) -> Graph:
    nodes, outputs = parts
    return Graph(tuple(Node(name, tuple(operands), value) for name, operands, value in nodes), tuple(outputs))


def with_state(trace: Trace) -> Trace:
    """The recurrence as a function of the state; of one that is linear, without derivatives."""
    if trace.states:
        return trace
    builder, indices = Builder(), list[int]()
    for node in trace.forward.nodes:
        is_input = node.name == "input"
        indices.append(builder.input(int(node.value) + 1) if is_input else builder.repeat(node, indices))
    a, b = (indices[i] for i in trace.forward.outputs)
    following = builder.add("add", builder.add("mul", a, builder.input(0)), b)
    nothing = builder.graph([])
    return trace._replace(states=1, forward=builder.graph([following]), backward=nothing, jacobian=nothing)
