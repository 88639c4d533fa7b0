"""Prints a traced linear recurrence as the functions that the loops of ``cpu_loops.py`` call, forward and backward."""

import functools

from ostinato.kernels.recurrence.linear.steps import Steps, steps_of
from ostinato.kernels.recurrence.symbolic.print_cpu import lines_of
from ostinato.kernels.recurrence.symbolic.trace import Trace

# x, c, grad and sum are tuples of pointers; at_x is the offset of a row's first channel from each pointer of x.
_FORWARD = """
def step(j, x, at_x, c, at_c, state, at, out, at_out):
{body}
    h = multiply_add({a}, load(state, at + j, "state"), {b})
    store(state, at + j, h, "state")
    store(out, at_out + j, h, "out")
"""

_BACKWARD = """
def step(j, x, at_x, c, at_c, h, at_h, grad_h, at_grad_h, state, at, grad, at_grad, sum, at_sum):
    total = load(grad_h, at_grad_h + j, "grad_h") + load(state, at + j, "state")
{body}
    store(state, at + j, total * {a}, "state")
"""


@functools.lru_cache(maxsize=1024)
def print_step(trace: Trace, backward: bool) -> str:
    """The source of ``step``, and of the functions that read, prefetch and flush the arrays it is called with."""
    steps = steps_of(trace, backward)
    constants = len(steps.constants.outputs)
    loads = [f'load(x[{k}], at_x + j, "x{k}")' for k in range(steps.sequences)]
    loads += [f'load(c[{k}], at_c + j, "c{k}")' for k in range(constants)]
    loads.append('load(h, at_h + j, "h")')
    lines, names = lines_of(steps.step, loads)
    if backward:
        a, *factors = names
        code = _BACKWARD.format(body="\n".join(lines + _gradients(steps, factors)), a=a)
    else:
        code = _FORWARD.format(body="\n".join(lines), a=names[0], b=names[1])
    counts = {"x": steps.sequences, "c": constants}
    if backward:
        counts |= {"grad": steps.sequences, "sum": steps.parameters}
    gathering = "".join(_GATHERING.format(name=name, pointers=_pointers(name, count)) for name, count in counts.items())
    return code + gathering + _prefetching(steps.sequences) + (_flushing(steps.parameters) if backward else "")


_GATHERING = """
def pointers_{name}(work):
    return ({pointers})
"""


def _pointers(name: str, count: int) -> str:
    return "".join(f"pointer_to(work.{name}{k}, dtype), " for k in range(count))


def _gradients(steps: Steps, factors: list[str]) -> list[str]:
    """Lines that store the sequences' gradients and sum the parameters'."""
    lines = []
    names: dict[str, str] = {}  # equal gradients, such as those of the terms of a sum, are computed once
    for k, factor in enumerate(factors):
        if factor not in names:
            names[factor] = f"g{k}"
            lines.append(f"    g{k} = total * {factor}")
        n = k - steps.sequences
        if n < 0:
            lines.append(f'    store(grad[{k}], at_grad + j, {names[factor]}, "grad{k}")')
        else:
            so_far = f'load(sum[{n}], at_sum + j, "sum{n}")'
            lines.append(f'    store(sum[{n}], at_sum + j, {so_far} + {names[factor]}, "sum{n}")')
    return lines


def _prefetching(count: int) -> str:
    lines = [f"    prefetch(x[{k}], at_x, begin, end)\n" for k in range(count)]
    return "\ndef prefetch_x(x, at_x, begin, end):\n" + "".join(lines)


def _flushing(count: int) -> str:
    lines = [
        f"""
    for j in range(begin, end):
        totals[{k} * work.groups * work.directions * work.hidden + at_sum + j] += sum[{k}][at_sum + j]
        sum[{k}][at_sum + j] = 0
"""
        for k in range(count)
    ]
    return "\ndef flush(work, totals, sum, at_sum, begin, end):\n    pass\n" + "".join(lines)
