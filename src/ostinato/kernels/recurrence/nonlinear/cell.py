"""Prints a traced non-linear recurrence as the struct ``Cell`` that ``steps.cu`` calls."""

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
    """The struct ``Cell`` of ``steps.cu``: one step, its Jacobian and its gradients."""
    inputs = [f"h[{k}]" for k in range(trace.states)] + names_of(trace, "x", "parameter")
    gradients = [f"grad_h[{k}]" for k in range(trace.states)] + names_of(trace, "grad_x", "grad_parameter")
    return _CELL.format(
        states=trace.states,
        sequences=sum(trace.sequences),
        parameters=trace.sequences.count(False),
        forward=body_of(trace.forward, inputs, [f"next[{k}]" for k in range(trace.states)]),
        jacobian=body_of(trace.jacobian, inputs, [f"result[{k}]" for k in range(trace.states**2)]),
        backward=body_of(trace.backward, [*inputs, *(f"grad[{k}]" for k in range(trace.states))], gradients),
    )


def names_of(trace: Trace, sequences: str, parameters: str) -> list[str]:
    """The element of the arrays `sequences` and `parameters` that holds each argument of the recurrence."""
    counts = {True: 0, False: 0}
    names = []
    for is_sequence in trace.sequences:
        names.append(f"{sequences if is_sequence else parameters}[{counts[is_sequence]}]")
        counts[is_sequence] += 1
    return names


def body_of(graph: Graph, inputs: list[str], outputs: list[str]) -> str:
    """The lines that compute a graph's results and assign them to `outputs`."""
    results = (f"        {y} = {name_of(graph, i)};" for y, i in zip(outputs, graph.outputs, strict=True))
    return "\n".join([lines_of(graph, inputs), *results])
