"""Prints a traced linear recurrence as the structs ``Element`` that ``scan.cu`` calls, forward and backward."""

import functools
from collections.abc import Sequence

from ostinato.kernels.recurrence.linear.steps import steps_of
from ostinato.kernels.recurrence.symbolic.print_cuda import lines_of, name_of, paired_sigmoids, type_of
from ostinato.kernels.recurrence.symbolic.trace import Trace

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


def element_name(trace: Trace, backward: bool) -> str:
    """The name of the struct, by which the kernel's geometry is chosen: all with as many tensors share one."""
    return f"Generated{sum(trace.sequences)}" + "Backward" * backward


@functools.lru_cache(maxsize=1024)
def print_element(trace: Trace, backward: bool) -> str:
    """The struct of a linear recurrence, to be compiled after ``elements.cuh`` and before ``scan.cu``."""
    steps = steps_of(trace, backward)
    constants, step, count = steps.constants, steps.step, len(steps.constants.outputs)
    inputs = [f"x[{k}]" for k in range(steps.sequences)] + [f"channel.c{k}" for k in range(count)] + ["previous"]
    texts = {
        "name": element_name(trace, backward),
        "plain": steps.sequences,
        "parameters": steps.parameters,
        "fields": " ".join(f"{type_of(constants.nodes[i])} c{k};" for k, i in enumerate(constants.outputs)),
        "preparation": lines_of(constants, [f"parameter[{k}]" for k in range(steps.parameters)]),
        "constants": ", ".join(name_of(constants, i) for i in constants.outputs),
        "body": lines_of(step, inputs, paired_sigmoids(step)),
    }
    if not backward:
        return _FORWARD.format(**texts, results=", ".join(name_of(step, i) for i in step.outputs))
    a, *factors = step.outputs
    distinct = sorted(set(factors), key=factors.index)  # equal gradients, such as those of a sum's terms, count once
    return _BACKWARD.format(
        **texts,
        factors=len(distinct),
        of_outputs=_by_index([distinct.index(i) for i in factors[: steps.sequences]]),
        of_parameters=_by_index([distinct.index(i) for i in factors[steps.sequences :]]),
        a=name_of(step, a),
        results=", ".join(name_of(step, i) for i in distinct),
    )


def _by_index(values: Sequence[int]) -> str:
    """A C++ expression of ``values[k]``."""
    return "".join(f"k == {k} ? {value} : " for k, value in enumerate(values[:-1])) + str(values[-1] if values else 0)
