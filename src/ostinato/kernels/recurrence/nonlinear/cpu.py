"""Non-linear recurrences on CPUs: sequential loops generated from a trace, compiled by Numba, and their calls."""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.kernels.cpu import elementary
from ostinato.kernels.cpu.compiler import compiled_loop
from ostinato.kernels.cpu.intrinsics import NUMPY_DTYPES, integers, pointer_to, restricted, structure_at, take_task
from ostinato.kernels.cpu.memory import empty
from ostinato.kernels.cpu.threads import run_loop, threads_for
from ostinato.kernels.recurrence.arguments import Call
from ostinato.kernels.recurrence.nonlinear.loop import Arrays, print_loop
from ostinato.kernels.recurrence.symbolic.trace import Trace, parse, with_state
from ostinato.kernels.scan import Order
from ostinato.kernels.scan.cpu import blocks_of, compute_dtype, constant, initial_state, rows

WIDTH = 64  # channels that a block has at least
FLUSH = 64  # steps whose gradients of parameters are summed in the loop's dtype before they join the float64 total


@functools.cache
def _loop(trace: Trace, backward: bool, dtype: type) -> tuple[Any, type[ctypes.Structure]]:
    """The compiled loop, and the structure that it is called with."""
    arrays = Arrays(trace, backward)
    fields = [
        *integers("next_task", "tasks", "parts", "width", "sequences", "length", "channels", "reverse"),
        *integers("bounds", "resets", "resets_n", "resets_t", *arrays.plain, *arrays.totals),
        *(field for x in arrays.of_steps for field in integers(x, f"{x}_n", f"{x}_t")),
        *(field for x in arrays.first for field in integers(x, f"{x}_n")),
    ]
    work = type("Work", (ctypes.Structure,), {"_fields_": fields})
    load, store = restricted(*arrays.of_steps, *arrays.first, *arrays.plain)
    source = print_loop(trace, backward)
    names: dict[str, Any] = {**vars(elementary), "load": load, "store": store, "dtype": dtype, "FLUSH": FLUSH}
    names |= {"pointer_to": pointer_to, "structure_at": structure_at, "take_task": take_task}
    names |= {"WORK": np.dtype(work), "int64": np.int64, "uint8": np.uint8, "float64": np.float64}
    exec(compile(source, f"<{trace.name}>", "exec"), names)
    return compiled_loop(names["run"], f"{np.dtype(dtype)}{source}"), work


def steps(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """The states after every step, and those after the last."""
    trace, (like, *_), _, h0, order = call
    dtype, shape = compute_dtype(like), (order.sequences(like), like.shape[2])
    initial: Sequence[Tensor | None] = [None] * trace.states if h0 is None else h0
    state = [initial_state(x, shape, dtype) for x in initial]
    outs = [empty(like.shape, dtype) for _ in state]
    _run(call, False, state, {"out": outs})
    return [x.to(like.dtype) for x in outs], [x.to(like.dtype) for x in state]


class Step:
    """One step of any recurrence, prepared for a number of sequences and channels."""

    def __init__(self, recurrence: str, batch: int, channels: int, dtype: torch.dtype) -> None:
        trace = with_state(parse(recurrence))
        arrays = Arrays(trace, False)
        self._loop, self._work_type = _loop(trace, False, NUMPY_DTYPES[dtype])
        self._arguments, self._states = [*zip(arrays.names(trace), trace.sequences, strict=True)], arrays.states
        self._out = empty((batch, channels), dtype)  # of all steps: here the state, which the loop keeps as well
        self._work = self._work_type(tasks=1, parts=1, width=channels, sequences=batch, length=1, channels=channels)
        for name in arrays.results:
            setattr(self._work, name, self._out.data_ptr())

    def __call__(self, arguments: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        """The states after the step, (B, D), from arguments, (B, D) or (D,), and the states before, in one dtype."""
        following = [x.clone(memory_format=torch.contiguous_format) for x in states]
        self._run(self._work_on(arguments, following))
        return following

    def replay(
        self, arguments: Sequence[Tensor], states: Sequence[Tensor], following: Sequence[Tensor]
    ) -> Callable[[], None]:
        """A function that repeats a call from and into the same memory."""
        prepared = self._work_on(arguments, following)

        def repeat(_: Any = arguments) -> None:  # whose memory it keeps
            for own, x in zip(following, states, strict=True):
                own.copy_(x)
            self._run(prepared)

        return repeat

    def _run(self, prepared: ctypes.Structure) -> None:
        work = self._work_type.from_buffer_copy(prepared)  # the loop counts in it
        self._loop.ctypes(ctypes.addressof(work))

    def _work_on(self, arguments: Sequence[Tensor], states: Sequence[Tensor]) -> ctypes.Structure:
        work = self._work_type.from_buffer_copy(self._work)
        for (name, sequence), x in zip(self._arguments, arguments, strict=True):
            setattr(work, name, x.data_ptr())
            if sequence:
                setattr(work, f"{name}_n", x.stride(0))
        for name, x in zip(self._states, states, strict=True):
            setattr(work, name, x.data_ptr())
        return work


def steps_backward(
    call: Call,
    states: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    grads_last: Sequence[Tensor | None],
    of_sequences: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor] | None]:
    """Gradients of the parameters, (parameters, D), widened, and of the initial states (None if there are none).

    Those of the sequences are written to ``of_sequences``.
    """
    trace, sequences, parameters, h0, order = call
    like = sequences[0]
    dtype, shape = compute_dtype(like), (order.sequences(like), like.shape[2])
    state = [initial_state(g, shape, dtype) for g in grads_last]
    absent = constant(0.0, shape, dtype)
    results = of_sequences if like.dtype == dtype else [empty(like.shape, dtype) for _ in sequences]
    sums = [torch.zeros_like(state[0]) for _ in parameters]
    totals = [torch.zeros_like(x, dtype=torch.float64) for x in sums]
    arrays = {
        "h": [rows(x, dtype) for x in states],
        "first": [absent] * trace.states if h0 is None else [rows(x, dtype) for x in h0],
        "grad_h": [constant(0.0, like.shape, dtype) if g is None else rows(g, dtype) for g in grads],
        "grad_x": results,
        "sum": sums,
        "total": totals,
    }
    _run(call, True, state, arrays)
    of_parameters = torch.stack(totals).sum(1) if totals else state[0].new_empty(0, like.shape[2])
    grad_h0 = None if h0 is None else [x.to(like.dtype) for x in state]
    if results is not of_sequences:
        for own, x in zip(of_sequences, results, strict=True):
            own.copy_(x)
    return of_parameters, grad_h0


class StepsOfRows:
    """Steps of a recurrence whose sequences are rows, one step after the other, forward or backward.

    A call takes the sequences that have a step through it, the first of all; its rows are theirs.

    Attributes:
        totals: backward, the gradients of the parameters over the steps so far, (sequences, D) each, in float64.
    """

    def __init__(
        self,
        trace: Trace,
        rows: Tensor,
        parameters: Sequence[Tensor],
        state: Sequence[Tensor],
        others: dict[str, Sequence[Tensor | None]],
        backward: bool,
    ) -> None:
        """Prepare steps.

        Args:
            trace: of the recurrence.
            rows: the arguments' rows, side by side, (rows, N * D), in float32 or float64, as is all else.
            parameters: (D,) each.
            state: the states before the first step, (sequences, D), which become those after each step in place; or
                backward their gradients.
            others: rows of the loop's other arrays, (rows, D) each, by their names in it without number: "out", the
                states, which are written; or backward "first", the states before each step, "grad_h", gradients of
                those after, and "grad_x", which are written.  None for zeros.
            backward: whether the gradients are taken.
        """
        count, width = state[0].shape
        named = {"x": rows.split(width, -1), **others}
        self._moving = []
        arrays: dict[str, Any] = {}
        for kind, tensors in named.items():
            arrays[kind] = []
            for k, x in enumerate(tensors):
                if x is None:
                    arrays[kind].append(constant(0.0, (count, 1, width), rows.dtype))
                    continue
                arrays[kind].append(x[:count] if kind == "first" else x[:count, None])
                self._moving.append((f"{kind}{k}", x.data_ptr(), x.stride(0) * x.itemsize))
        sequences = arrays.pop("x")
        if backward:
            arrays |= {"h": arrays["grad_x"][:1] * trace.states}  # not read: only `first` is before it
            arrays |= {"sum": [torch.zeros_like(state[0]) for _ in parameters]}
            arrays |= {"total": [torch.zeros_like(x, dtype=torch.float64) for x in arrays["sum"]]}
            self.totals = arrays["total"]
        call = Call(trace, sequences, parameters, None, Order())
        self._kept = rows, state, arrays
        self._loop, self._work, self._threads = _prepared(call, backward, state, arrays)

    def __call__(self, step: slice) -> None:
        """Take the step of these rows."""
        work = self._work
        for name, address, row in self._moving:
            setattr(work, name, address + step.start * row)
        work.next_task, work.sequences = 0, step.stop - step.start
        run_loop(self._loop, work, self._threads)


def _run(call: Call, backward: bool, state: Sequence[Tensor], others: dict[str, Sequence[Tensor]]) -> None:
    """Call the loop on the arrays of the call, of the states that it keeps, and others, by their names in the loop."""
    run_loop(*_prepared(call, backward, state, others))


def _prepared(
    call: Call, backward: bool, state: Sequence[Tensor], others: dict[str, Sequence[Tensor]]
) -> tuple[Any, ctypes.Structure, int]:
    """The loop of :func:`_run`, what it is called with, and by how many threads."""
    trace, sequences, parameters, _, (cu_seqlens, resets, reverse) = call
    (count, channels), dtype = state[0].shape, state[0].dtype
    packed, bounds = cu_seqlens is not None, None
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(torch.int64).contiguous()
    arrays = {
        "x": [rows(x, dtype) for x in sequences],
        "p": [x.to(dtype).contiguous() for x in parameters],
        "state": state,
        **others,
    }
    named = {f"{kind}{k}": x for kind, tensors in arrays.items() for k, x in enumerate(tensors)}
    named["absent"] = constant(0.0, state[0].shape, dtype)
    loop, work_type = _loop(trace, backward, NUMPY_DTYPES[dtype])
    threads = threads_for(sequences[0].numel())
    parts = min(count, 4 * threads)
    blocks, width = blocks_of(channels, WIDTH, threads, parts)
    work = work_type(
        tasks=parts * blocks,
        parts=parts,
        width=width,
        sequences=count,
        length=sequences[0].shape[1],
        channels=channels,
        reverse=reverse,
        bounds=0 if bounds is None else bounds.data_ptr(),
        resets=0 if resets is None else resets.data_ptr(),
        resets_n=0 if resets is None or packed else resets.stride(0),
        resets_t=0 if resets is None else resets.stride(1),
        **_addresses(work_type, named, packed),
    )
    work._kept = named, bounds
    return loop, work, threads


def _addresses(work_type: type[ctypes.Structure], named: dict[str, Tensor], packed: bool) -> dict[str, int]:
    """The address of each array, and those of its strides that the loop asks for."""
    known = {field[0] for field in work_type._fields_}
    fields: dict[str, int] = {}
    for name, x in named.items():
        fields[name] = x.data_ptr()
        if f"{name}_n" in known:
            fields[f"{name}_n"] = 0 if packed and x.dim() == 3 else x.stride(0)
        if f"{name}_t" in known:
            fields[f"{name}_t"] = x.stride(1)
    return fields
