"""Prints a traced recurrence as the cell of the persistent kernels; see ``persistent/cuda/cell.cuh``."""

import functools
import math

from ostinato.kernels.persistent.cuda.heuristics.cells import Cell
from ostinato.kernels.recurrence.nonlinear.cell import body_of, names_of
from ostinato.kernels.recurrence.symbolic.builder import Builder
from ostinato.kernels.recurrence.symbolic.trace import Trace

_CELL = """
struct Cell {{
    static constexpr int STATES = {states}, PRODUCTS = {products}, INPUTS = {sequences}, PARAMETERS = {parameters};
    static constexpr int DERIVATIVES = {derivatives}, GRADIENTS = INPUTS;
    static constexpr Kept KEPT = Kept::ALL_STATES;
    static constexpr bool HAS_BIASES = false;
    static __device__ constexpr int of_product(int k) {{ return k; }}

    static __device__ void forward(
        const Compute* before, Compute* x, const Compute* s, const Compute* parameter, Compute* after
    ) {{
{add_products}
{forward}
    }}
    static __device__ void differentiate(
        const Compute* before, const Compute*, const Compute* x, const Compute* parameter, Compute* slope
    ) {{
{differentiate}
    }}
    static __device__ void pull(const Compute* slope, const Compute* grad, Compute* of_states, Compute* of_arguments) {{
{pull}
    }}
}};
"""


@functools.lru_cache(maxsize=1024)
def print_cell(trace: Trace, products: int) -> Cell:
    """The struct of a recurrence; `products` of the weights with the state are added to its first arguments."""
    states, sequences, parameters = trace.states, sum(trace.sequences), trace.sequences.count(False)
    inputs = [f"before[{k}]" for k in range(states)] + names_of(trace, "x", "parameter")
    builder = Builder()
    builder.differentiating = True
    rows = []  # for each next state, its derivatives with respect to the previous states and the arguments
    for k in range(states):
        one_hot = {len(inputs) + i: float(i == k) for i in range(states)}
        rows.append(builder.repeated(trace.backward, one_hot))
    values = {i: builder.value(i) for row in rows for i in row}
    kept = [i for i, value in values.items() if value is None or not math.isfinite(value)]  # all but finite constants
    factors = {i: f"Compute({value!r})" for i, value in values.items()} | {i: f"slope[{k}]" for k, i in enumerate(kept)}
    kinds = trace.sequences
    order = sorted(range(len(kinds)), key=lambda k: not kinds[k])  # all sequences, then all parameters
    names = [f"of_states[{k}]" for k in range(states)] + [f"of_arguments[{order.index(k)}]" for k in range(len(kinds))]
    pull = []
    for name, gradient in zip(names, zip(*rows, strict=True), strict=True):
        terms = [f"{factors[i]} * grad[{k}]" for k, i in enumerate(gradient) if values[i] != 0]
        pull.append(f"        {name} = {' + '.join(terms) or '0'};")
    code = _CELL.format(
        states=states,
        products=products,
        sequences=sequences,
        parameters=parameters,
        derivatives=len(kept),
        add_products="\n".join(f"        x[{k}] += s[{k}];" for k in range(products)),
        forward=body_of(trace.forward, inputs, [f"after[{k}]" for k in range(states)]),
        differentiate=body_of(builder.graph(kept), inputs, [f"slope[{k}]" for k in range(len(kept))]),
        pull="\n".join(pull),
    )
    gradients = sequences + parameters
    return Cell("generated", products, sequences, parameters, states, states, len(kept), gradients, code=code)
