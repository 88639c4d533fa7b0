"""The trace of a recurrence's function, from which its kernels are generated, and its serialisation as text."""

import functools
import json
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ostinato.kernels.recurrence.symbolic.builder import Builder
from ostinato.kernels.recurrence.symbolic.graph import Graph, Node, evaluate


class Trace(NamedTuple):
    """One step of a recurrence, and its derivatives, as graphs of scalar operations.

    Attributes:
        name: the name of the traced function.
        sequences: for each argument, whether it is a sequence, (B, T, D), rather than a parameter per channel, (D,).
        states: 0 if the function returns the coefficients (a, b) of a linear recurrence; otherwise the number of
            states, which are its first arguments and whose next values it returns.
        forward: from the states and the arguments to the coefficients or the next states.
        backward: from the states, the arguments, and the gradients of what the function returns, to the gradients of
            the states and the arguments.
        jacobian: from the states and the arguments to the derivatives of the next states with respect to the states,
            row by row; without outputs for a linear recurrence.
    """

    name: str
    sequences: tuple[bool, ...]
    states: int
    forward: Graph
    backward: Graph
    jacobian: Graph

    def __hash__(self) -> int:  # of a few fields: hashing whole graphs would slow down every cache look-up
        return hash((self.name, self.sequences, self.states, len(self.forward.nodes)))

    @property
    def text(self) -> str:
        """The serialised trace, by which operators identify a recurrence in any process; see :func:`parse`."""
        return json.dumps(self)


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Trace:
    """The inverse of :attr:`Trace.text`."""
    name, sequences, states, *graphs = json.loads(text)
    return Trace(name, tuple(sequences), states, *map(_graph, graphs))


def _graph(fields: list) -> Graph:
    nodes, outputs = fields
    return Graph(tuple(Node(name, tuple(operands), value) for name, operands, value in nodes), tuple(outputs))


def derivatives(trace: Trace, inputs: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """For each result of the function, its derivatives with respect to the inputs, the states and the arguments.

    The function is elementwise, so its gradient is its derivative.
    """
    one, zero, results = inputs[0].new_ones(()), inputs[0].new_zeros(()), range(len(trace.forward.outputs))
    chosen = ([one if i == k else zero for i in results] for k in results)
    return [evaluate(trace.backward, [*inputs, *grads]) for grads in chosen]


def with_state(trace: Trace) -> Trace:
    """A trace whose forward graph returns the next state; made from a linear recurrence, it has no derivatives."""
    if trace.states:
        return trace
    builder, indices = Builder(), list[int]()
    for node in trace.forward.nodes:
        is_input = node.name == "input"
        indices.append(builder.input(int(node.value) + 1) if is_input else builder.repeat(node, indices))
    a, b = (indices[i] for i in trace.forward.outputs)
    next_state = builder.add("add", builder.add("mul", a, builder.input(0)), b)
    empty = builder.graph([])
    return trace._replace(states=1, forward=builder.graph([next_state]), backward=empty, jacobian=empty)
