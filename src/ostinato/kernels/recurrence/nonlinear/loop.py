"""Generates the CPU's loops of non-linear recurrences from a trace, forward and backward.

A task is a group of sequences and a block of channels.  Time is the middle loop; channels are the inner loop,
contiguous and vectorised by LLVM.  ``state0`` and ``state1`` carry the states from step to step: the initial ones on
entry, the last ones on return; in the backward pass, their gradients.
"""

import functools
from collections.abc import Sequence

from ostinato.kernels.recurrence.arguments import in_order
from ostinato.kernels.recurrence.symbolic.print_cpu import lines_of
from ostinato.kernels.recurrence.symbolic.trace import Trace

_LOOP = """
def run(address):
    work = structure_at(address, WORK)
    bounds, resets = pointer_to(work.bounds, int64), pointer_to(work.resets, uint8)
{pointers}
    task = take_task(address)
    while task < work.tasks:
        block, part = divmod(task, work.parts)
        begin, end = block * work.width, min((block + 1) * work.width, work.channels)
        for n in range(part * work.sequences // work.parts, (part + 1) * work.sequences // work.parts):
            first, last = (bounds[n], bounds[n + 1]) if work.bounds else (0, work.length)
            at = n * work.channels
            for i in range(last - first):
{body}
        task = take_task(address)
"""

_FORWARD = """\
                t = last - 1 - i if work.reverse else first + i
                if work.resets and resets[n * work.resets_n + t * work.resets_t]:
                    for j in range(begin, end):
{zeros}
{offsets}
                for j in range(begin, end):
{lines}
{stores}"""

_BACKWARD = """\
                t = first + i if work.reverse else last - 1 - i
                t_before = t + 1 if work.reverse else t - 1
                reset = work.resets and resets[n * work.resets_n + t * work.resets_t]
{offsets}
                if i == last - first - 1:
{firsts}
                if reset:
{absents}
                for j in range(begin, end):
{lines}
{stores}
                if reset:
                    for j in range(begin, end):
{zeros}
                if i % FLUSH == FLUSH - 1 or i == last - first - 1:
                    for j in range(begin, end):
{flushes}"""


class Arrays:
    """The names of a loop's arrays.

    ``of_steps`` have a row for each step, ``first`` a row for each sequence; ``plain`` are contiguous.
    """

    def __init__(self, trace: Trace, backward: bool) -> None:
        states, count = range(trace.states), sum(trace.sequences)
        self.parameters = [f"p{k}" for k in range(len(trace.sequences) - count)]
        self.states = [f"state{k}" for k in states]
        self.sequences = [f"x{k}" for k in range(count)]
        if backward:
            self.before = [f"h{k}" for k in states]
            self.first = [f"first{k}" for k in states]
            self.grads = [f"grad_h{k}" for k in states]
            self.results = [f"grad_x{k}" for k in range(count)]
            self.sums = [f"sum{k}" for k in range(len(self.parameters))]
            self.of_steps = [*self.sequences, *self.before, *self.grads, *self.results]
            self.totals = [f"total{k}" for k in range(len(self.parameters))]
        else:
            self.results = [f"out{k}" for k in states]
            self.of_steps = [*self.sequences, *self.results]
            self.first, self.sums, self.totals = [], [], []
        self.plain = [*self.parameters, *self.states, *self.sums, "absent"]

    def names(self, trace: Trace) -> list[str]:
        """The arrays of the recurrence's arguments, in its order."""
        return in_order(trace.sequences, self.sequences, self.parameters)

    def arguments(self, trace: Trace) -> list[str]:
        """Expressions that load the recurrence's arguments at channel j, in its order."""
        return [_load(x, "j" if x in self.parameters else f"at_{x} + j") for x in self.names(trace)]


def _load(name: str, index: str, stream: str = "") -> str:
    return f'load({name}, {index}, "{stream or name}")'


def _indented(depth: int, lines: Sequence[str]) -> str:
    return "\n".join("    " * depth + line for line in lines or ["pass"])


@functools.lru_cache(maxsize=1024)
def print_loop(trace: Trace, backward: bool) -> str:
    """The source of ``run(address)``."""
    arrays = Arrays(trace, backward)
    pointers = [f"{x} = pointer_to(work.{x}, dtype)" for x in [*arrays.of_steps, *arrays.first, *arrays.plain]]
    pointers += [f"{x} = pointer_to(work.{x}, float64)" for x in arrays.totals]
    if backward:
        pointers += [f"before_{x} = {x}" for x in arrays.before]
    body = (_backward_body if backward else _forward_body)(trace, arrays)
    return _LOOP.format(pointers=_indented(1, pointers), body=body)


def _offset(x: str, t: str = "t") -> str:
    """The line that computes the offset of an array's row at a step."""
    return f"at_{x} = n * work.{x}_n + {t} * work.{x}_t"


def _zeros(arrays: Arrays) -> str:
    return _indented(6, [f"{x}[at + j] = 0" for x in arrays.states])


def _forward_body(trace: Trace, arrays: Arrays) -> str:
    """The lines of a forward step, which updates the states."""
    inputs = [_load(x, "at + j") for x in arrays.states] + arrays.arguments(trace)
    lines, results = lines_of(trace.forward, inputs)
    stores = [f'store({x}, at + j, {y}, "{x}")' for x, y in zip(arrays.states, results, strict=True)]
    stores += [f'store({x}, at_{x} + j, {y}, "{x}")' for x, y in zip(arrays.results, results, strict=True)]
    return _FORWARD.format(
        zeros=_zeros(arrays),
        offsets=_indented(4, [*map(_offset, arrays.of_steps)]),
        lines=_indented(4, lines),
        stores=_indented(5, stores),
    )


def _backward_body(trace: Trace, arrays: Arrays) -> str:
    """The lines of a backward step, which updates the states' gradients and sums those of the parameters."""
    offsets = [_offset(x, "t_before" if x in arrays.before else "t") for x in arrays.of_steps]
    offsets += [f"before_{x} = {x}" for x in arrays.before]
    firsts = [f"before_{x}, at_{x} = {y}, n * work.{y}_n" for x, y in zip(arrays.before, arrays.first, strict=True)]
    absents = [f"before_{x}, at_{x} = absent, 0" for x in arrays.before]
    inputs = [_load(f"before_{x}", f"at_{x} + j", x) for x in arrays.before] + arrays.arguments(trace)
    inputs += [
        f"{_load(x, f'at_{x} + j')} + {_load(y, 'at + j')}" for x, y in zip(arrays.grads, arrays.states, strict=True)
    ]
    lines, results = lines_of(trace.backward, inputs)
    stores = [f'store({x}, at + j, {y}, "{x}")' for x, y in zip(arrays.states, results, strict=False)]
    names = in_order(trace.sequences, arrays.results, arrays.sums)
    for sequence, x, y in zip(trace.sequences, names, results[trace.states :], strict=True):
        index, value = (f"at_{x} + j", y) if sequence else ("at + j", f"{_load(x, 'at + j')} + {y}")
        stores.append(f'store({x}, {index}, {value}, "{x}")')
    flushes = [
        line
        for x, total in zip(arrays.sums, arrays.totals, strict=True)
        for line in (f"{total}[at + j] += {x}[at + j]", f"{x}[at + j] = 0")
    ]
    return _BACKWARD.format(
        offsets=_indented(4, offsets),
        firsts=_indented(5, firsts),
        absents=_indented(5, absents),
        lines=_indented(4, lines),
        stores=_indented(5, stores),
        zeros=_zeros(arrays),
        flushes=_indented(6, flushes),
    )
