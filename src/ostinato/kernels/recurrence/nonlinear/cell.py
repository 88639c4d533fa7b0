"""A traced non-linear recurrence as the Cell of ``steps.cu``."""

import functools

from ostinato.kernels.recurrence.symbolic.graph import Graph
from ostinato.kernels.recurrence.symbolic.print_cuda import lines_of, name_of
from ostinato.kernels.recurrence.symbolic.trace import Trace

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


@functools.lru_cache(maxsize=1024)
def print_cell(trace: Trace) -> str:
    """The struct that ``steps.cu`` walks along."""
    arguments = names_of(trace, "x", "parameter")
    given = [f"h[{k}]" for k in range(trace.states)] + arguments
    gradients = [f"grad_h[{k}]" for k in range(trace.states)] + names_of(trace, "grad_x", "grad_parameter")
    return _CELL.format(
        states=trace.states,
        sequences=sum(trace.sequences),
        parameters=trace.sequences.count(False),
        forward=body_of(trace.forward, given, [f"next[{k}]" for k in range(trace.states)]),
        jacobian=body_of(trace.jacobian, given, [f"result[{k}]" for k in range(trace.states**2)]),
        backward=body_of(trace.backward, [*given, *(f"grad[{k}]" for k in range(trace.states))], gradients),
    )


def names_of(trace: Trace, of_sequence: str, of_parameter: str) -> list[str]:
    """What each argument is called."""
    counts = {True: 0, False: 0}
    names = []
    for sequence in trace.sequences:
        names.append(f"{of_sequence if sequence else of_parameter}[{counts[sequence]}]")
        counts[sequence] += 1
    return names


def body_of(graph: Graph, inputs: list[str], outputs: list[str]) -> str:
    results = (f"        {y} = {name_of(graph, i)};" for y, i in zip(outputs, graph.outputs, strict=True))
    return "\n".join([lines_of(graph, inputs), *results])
