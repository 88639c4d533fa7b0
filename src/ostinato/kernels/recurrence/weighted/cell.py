"""A traced recurrence as the cell of the persistent kernels, see ``persistent/cuda/generated.cuh``."""

import functools
import math

from ostinato.kernels.persistent.cuda.heuristics.geometry import Generated
from ostinato.kernels.recurrence.nonlinear.cell import body_of, names_of
from ostinato.kernels.recurrence.symbolic.builder import Builder
from ostinato.kernels.recurrence.symbolic.trace import Trace

_CELL = """
struct Generated {{
    static constexpr int STATES = {states}, PRODUCTS = {products}, SEQUENCES = {sequences}, PARAMETERS = {parameters};
    static constexpr int DERIVATIVES = {derivatives};
    static __device__ void forward(const float* before, const float* x, const float* parameter, float* after) {{
{forward}
    }}
    static __device__ void differentiate(const float* before, const float* x, const float* parameter, float* slope) {{
{differentiate}
    }}
    static __device__ void pull(const float* slope, const float* grad, float* of_states, float* of_arguments) {{
{pull}
    }}
}};
"""


@functools.lru_cache(maxsize=1024)
def print_cell(trace: Trace, products: int) -> Generated:
    """The struct of a recurrence with so many products."""
    states, sequences, parameters = trace.states, sum(trace.sequences), trace.sequences.count(False)
    given = [f"before[{k}]" for k in range(states)] + names_of(trace, "x", "parameter")
    builder = Builder()
    builder.differentiating = True
    rows = []  # the derivatives of each state, by the states before and the arguments
    for k in range(states):
        one_hot = {len(given) + i: float(i == k) for i in range(states)}
        rows.append(builder.repeated(trace.backward, one_hot))
    values = {i: builder.value(i) for row in rows for i in row}
    kept = [i for i, value in values.items() if value is None or not math.isfinite(value)]
    factors = {i: f"Compute({value!r})" for i, value in values.items()} | {i: f"slope[{k}]" for k, i in enumerate(kept)}
    pulled = []
    for column, gradient in enumerate(zip(*rows, strict=True)):
        terms = [f"{factors[i]} * grad[{k}]" for k, i in enumerate(gradient) if values[i] != 0]
        pulled.append(f"        {_gradient_of(trace, column)} = {' + '.join(terms) or '0'};")
    code = _CELL.format(
        states=states,
        products=products,
        sequences=sequences,
        parameters=parameters,
        derivatives=len(kept),
        forward=body_of(trace.forward, given, [f"after[{k}]" for k in range(states)]),
        differentiate=body_of(builder.graph(kept), given, [f"slope[{k}]" for k in range(len(kept))]),
        pull="\n".join(pulled),
    )
    return Generated(code, products, sequences, parameters, states, len(kept))


def _gradient_of(trace: Trace, column: int) -> str:
    """The gradient of a state or of an argument: those of parameters come after those of all sequences."""
    if column < trace.states:
        return f"of_states[{column}]"
    name = names_of(trace, "x", "parameter")[column - trace.states]
    kind, _, number = name.rstrip("]").partition("[")
    return f"of_arguments[{int(number) + (kind == 'parameter') * sum(trace.sequences)}]"
