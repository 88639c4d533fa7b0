"""Non-linear recurrences on CPUs: compiles the loops that ``loop.py`` prints, by Numba, and calls them."""

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

WIDTH = 64  # the least number of channels in a block
FLUSH = 64  # steps over which parameter gradients are summed in the loop's dtype before they join the float64 total


@functools.cache
def _loop(trace: Trace, backward: bool, dtype: type) -> tuple[Any, type[ctypes.Structure]]:
    """The compiled loop, and the type of its argument structure."""
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
    """The states after every step, and the states after the last one."""
    trace, (like, *_), _, h0, order = call
    dtype, shape = compute_dtype(like), (order.sequences(like), like.shape[2])
    initial: Sequence[Tensor | None] = [None] * trace.states if h0 is None else h0
    state = [initial_state(x, shape, dtype) for x in initial]
    outs = [empty(like.shape, dtype) for _ in state]
    run_loop(*_prepared(call, False, state, {"out": outs}))
    return [x.to(like.dtype) for x in outs], [x.to(like.dtype) for x in state]


class Step:
    """One step of a recurrence, linear or not, prepared for a number of sequences and channels."""

    def __init__(self, recurrence: str, batch: int, channels: int, dtype: torch.dtype) -> None:
        trace = with_state(parse(recurrence))
        arrays = Arrays(trace, False)
        self._loop, self._work_type = _loop(trace, False, NUMPY_DTYPES[dtype])
        self._arguments, self._states = [*zip(arrays.names(trace), trace.sequences, strict=True)], arrays.states
        # The loop's output over time: for one step it equals the last state, which is what callers get.
        self._out = empty((batch, channels), dtype)
        self._work = self._work_type(tasks=1, parts=1, width=channels, sequences=batch, length=1, channels=channels)
        for name in arrays.results:
            setattr(self._work, name, self._out.data_ptr())

    def __call__(self, arguments: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        """The states after the step, (B, D), from arguments, (B, D) or (D,), and the previous states, in one dtype."""
        next_states = [x.clone(memory_format=torch.contiguous_format) for x in states]
        self._run(self._work_on(arguments, next_states))
        return next_states

    def replay(
        self, arguments: Sequence[Tensor], states: Sequence[Tensor], next_states: Sequence[Tensor]
    ) -> Callable[[], None]:
        """A function that repeats the step, reading and writing the memory of these tensors."""
        prepared = self._work_on(arguments, next_states)

        def repeat(_: Any = arguments) -> None:  # the default keeps the arguments' memory alive
            for after, before in zip(next_states, states, strict=True):
                after.copy_(before)
            self._run(prepared)

        return repeat

    def _run(self, prepared: ctypes.Structure) -> None:
        work = self._work_type.from_buffer_copy(prepared)  # a copy, as the loop advances the task counter in it
        self._loop.ctypes(ctypes.addressof(work))

    def _work_on(self, arguments: Sequence[Tensor], states: Sequence[Tensor]) -> ctypes.Structure:
        """The loop's argument structure; the loop updates `states` in place."""
        work = self._work_type.from_buffer_copy(self._work)
        for (name, is_sequence), x in zip(self._arguments, arguments, strict=True):
            setattr(work, name, x.data_ptr())
            if is_sequence:
                setattr(work, f"{name}_n", x.stride(0))
        for name, x in zip(self._states, states, strict=True):
            setattr(work, name, x.data_ptr())
        return work


def steps_backward(
    call: Call,
    states: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    grads_last: Sequence[Tensor | None],
    grad_sequences: Sequence[Tensor],
) -> tuple[Tensor, list[Tensor] | None]:
    """Gradients of the parameters, (parameters, D), in float64, and of the initial states (None if there are none).

    Gradients of the sequences are written to ``grad_sequences``.
    """
    trace, sequences, parameters, h0, order = call
    like = sequences[0]
    dtype, shape = compute_dtype(like), (order.sequences(like), like.shape[2])
    state = [initial_state(g, shape, dtype) for g in grads_last]
    absent = constant(0.0, shape, dtype)
    results = grad_sequences if like.dtype == dtype else [empty(like.shape, dtype) for _ in sequences]
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
    run_loop(*_prepared(call, True, state, arrays))
    grad_parameters = torch.stack(totals).sum(1) if totals else state[0].new_empty(0, like.shape[2])
    grad_h0 = None if h0 is None else [x.to(like.dtype) for x in state]
    if results is not grad_sequences:
        for grad, x in zip(grad_sequences, results, strict=True):
            grad.copy_(x)
    return grad_parameters, grad_h0


class StepsOfRows:
    """Takes the steps of a recurrence over time-major rows one at a time, forward or backward.

    Each call takes one step of the first sequences, as many as the step has rows.

    Attributes:
        totals: backward, the parameters' gradients summed over the steps so far, (sequences, D) each, in float64.
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
        """Prepare the steps.

        Args:
            trace: the recurrence's trace.
            rows: the N arguments over time, concatenated, (rows, N * D), in float32 or float64, as all other tensors.
            parameters: (D,) each.
            state: the carried states, (sequences, D), which each step updates in place; backward, their gradients.
            others: the loop's other arrays, (rows, D) each, by their names in it without the number.  Forward: "out",
                the states after each step, which are written.  Backward: "first", the states before each step,
                "grad_h", the gradients of the states after it, and "grad_x", the arguments' gradients, which are
                written.  None stands for zeros.
            backward: whether the steps compute gradients.
        """
        count, width = state[0].shape
        named = {"x": rows.split(width, -1), **others}
        self._row_pointers = []  # of each array with rows: its field in the structure, its address, the bytes of a row
        arrays: dict[str, Any] = {}
        for kind, tensors in named.items():
            arrays[kind] = []
            for k, x in enumerate(tensors):
                if x is None:
                    arrays[kind].append(constant(0.0, (count, 1, width), rows.dtype))
                    continue
                arrays[kind].append(x[:count] if kind == "first" else x[:count, None])
                self._row_pointers.append((f"{kind}{k}", x.data_ptr(), x.stride(0) * x.itemsize))
        sequences = arrays.pop("x")
        if backward:
            # Not read: of a single step, the loop reads the states before it from "first".
            arrays |= {"h": arrays["grad_x"][:1] * trace.states}
            arrays |= {"sum": [torch.zeros_like(state[0]) for _ in parameters]}
            arrays |= {"total": [torch.zeros_like(x, dtype=torch.float64) for x in arrays["sum"]]}
            self.totals = arrays["total"]
        call = Call(trace, sequences, parameters, None, Order())
        self._tensors = rows, state, arrays  # keeps the memory of the addresses alive
        self._loop, self._work, self._threads = _prepared(call, backward, state, arrays)

    def __call__(self, step: slice) -> None:
        """Take the step with these rows."""
        work = self._work
        for name, address, row_bytes in self._row_pointers:
            setattr(work, name, address + step.start * row_bytes)
        work.next_task, work.sequences = 0, step.stop - step.start
        run_loop(self._loop, work, self._threads)


def _prepared(
    call: Call, backward: bool, state: Sequence[Tensor], others: dict[str, Sequence[Tensor]]
) -> tuple[Any, ctypes.Structure, int]:
    """The loop of a call, its argument structure, and the number of threads.

    `state` are the carried states, which the loop updates in place; `others` its remaining arrays, by their names in it
    without the number.
    """
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
    work._tensors = named, bounds  # keeps the memory of the addresses alive
    return loop, work, threads


def _addresses(work_type: type[ctypes.Structure], named: dict[str, Tensor], packed: bool) -> dict[str, int]:
    """The address of each array, and those of its strides for which the structure has a field."""
    known = {field[0] for field in work_type._fields_}
    fields: dict[str, int] = {}
    for name, x in named.items():
        fields[name] = x.data_ptr()
        if f"{name}_n" in known:
            fields[f"{name}_n"] = 0 if packed and x.dim() == 3 else x.stride(0)
        if f"{name}_t" in known:
            fields[f"{name}_t"] = x.stride(1)
    return fields
