"""Small layers on a GPU: calls that repeat become CUDA graphs, which the host launches as a whole.

The kernels of a small layer take less time than the host needs to launch them, and a call of several layers or
directions has many of them.  Once calls of the same sizes and weights have repeated often enough, they are captured,
with memory of their own: from then on a call copies its input there, replays the graph, and copies the results out, and
so does its backward.  The kernels are those of the launched calls, and so is every bit of their results, except where
cuBLAS chooses a kernel by the addresses of its operands.

The graphs' memory holds what the most recent call has saved for its backward.  A call that comes before the backward of
the previous one is therefore launched as usual.  A backward that comes too late, or a second time, recomputes its
forward with the same random numbers.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.cuda_graphs.capture import Pool, bytes_of, captured
from ostinato.cuda_graphs.function import CapturedFunction
from ostinato.cuda_graphs.kept import KeptGraphs, Repeated
from ostinato.cuda_graphs.random import drawn_from, random_state
from ostinato.kernels.operators.autograd import Gradients, by_autograd, with_data, without_none
from ostinato.kernels.operators.dispatch import apply_of, autograd_function
from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.persistent.backends import check_launches
from ostinato.kernels.persistent.modes import without_autocast

Run = Callable[[Tensor, list[Tensor], list[Tensor], Tensor | None], list[Tensor]]
"""Launches a call: from the input, states, weights and resets to the output and the last states."""

MOST_BYTES = 128 << 20  # that a call may save for its backward
MOST_STEPS = 512  # of a loop over time: longer ones take longer on the GPU than their launches do on the host
_DEFAULT_STREAM = 0


def worth_capturing(weights: Sequence[Tensor], rows: int, most_bytes: int = MOST_BYTES) -> bool:
    """Whether to capture calls with this many rows: those of a small layer whose parameters stay at their addresses.

    No calls are captured if the environment variable ``OSTINATO_CUDA_GRAPHS`` is 0.
    """
    if os.environ.get("OSTINATO_CUDA_GRAPHS") == "0":
        return False
    if not weights[0].is_cuda or torch.cuda.get_allocator_backend() != "native":  # others abort in a capture
        return False
    return all(type(x) is nn.Parameter for x in weights) and _saved_bytes(weights, rows) <= most_bytes


def _saved_bytes(weights: Sequence[Tensor], rows: int) -> int:
    """Roughly what a call with this many rows saves for its backward: a number for each gate, a few for each unit."""
    matrices = [x for x in weights if x.dim() > 1]  # or several in one tensor, such as those of heads
    return sum((x.shape[-2] + 3 * x.shape[-1]) * x.shape[:-2].numel() * x.itemsize for x in matrices) * rows


class CallGraphs(KeptGraphs):
    """The graphs of a call and of its backward, with memory of their own."""

    def __init__(self, run: Run, draws: bool, tensors: list[Tensor], states: int, resets: Tensor | None) -> None:
        self.draws = draws
        self._device, self._pool = tensors[0].device, torch.cuda.graph_pool_handle()
        self.states, first = states, 1 + states
        self._addresses = addresses_of(tensors[first:])  # from which the graphs read the weights
        # Writing through `.data` bumps no version counter, by which autograd would refuse the backward.
        data = [x.data if i >= first else x.detach().clone() for i, x in enumerate(tensors)]
        self._leaves = [x.requires_grad_(y.requires_grad) for x, y in zip(data, tensors, strict=True)]
        self._inputs, self._resets = [x.data for x in self._leaves[:first]], None if resets is None else resets.clone()
        self._backwards: dict[tuple[bool, ...], CapturedFunction | None] = {}
        self._lock, self._version = threading.Lock(), 0  # of the memory
        self._claim: weakref.ref[_Claim] | None = None
        with captured(self._device, self._pool) as self._graph:
            x, *others = self._leaves
            self._results = run(x, others[:states], others[states:], self._resets)
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in self._leaves)
        if differentiable and not all(y.requires_grad for y in self._results):
            raise RuntimeError("autograd would give gradients of results that have none")
        self._outputs = [y.data for y in self._results]
        self.bytes = bytes_of(self._pool, self._results[0])

    def claim(self) -> "_Claim | None":
        """Claim the memory for a call; None while the backward of the previous one may still come."""
        with self._lock:
            if self._claim is not None and self._claim() is not None:
                return None
            claim = _Claim()
            self._claim = weakref.ref(claim)
            return claim

    def forward(self, tensors: Sequence[Tensor], resets: Tensor | None) -> tuple[list[Tensor], int]:
        """The results, and the version of the memory's contents, which the backward asks for."""
        check_launches(self._device)
        with self._lock:
            torch._foreach_copy_(self._inputs, [*tensors[: len(self._inputs)]])
            if self._resets is not None and resets is not None:
                self._resets.data.copy_(resets)
            self._graph.replay()
            self._version += 1
            self.count_replay()
            results = [torch.empty_like(y) for y in self._outputs]
            torch._foreach_copy_(results, self._outputs)
            return results, self._version

    def backward(self, version: int, tensors: Sequence[Tensor], grads: Gradients) -> Gradients | None:
        """The gradients of the tensors, each None where none is needed.

        Returns None for all if the memory no longer holds what this call has saved.  Gives the graphs up if the
        backward cannot be captured, or if weights have moved, as shards do when they are gathered again.
        """
        check_launches(self._device)
        with self._lock:
            if self._addresses != addresses_of(tensors[1 + self.states :]):
                self.give_up()
                return None
            if self._version != version:
                return None
            self._version += 1  # the kernels may have overwritten saved tensors at their last use
            self._claim = None
            present = tuple([grad is not None for grad in grads])
            if present not in self._backwards:
                self._backwards[present] = self._captured_backward(present)
            backward = self._backwards[present]
            if backward is None:
                self.give_up()
                return None
            return backward(without_none(grads))

    def _captured_backward(self, present: tuple[bool, ...]) -> CapturedFunction | None:
        """Capture the backward for gradients of the results that are `present`; None if that fails."""
        if self._addresses != addresses_of(self._leaves[1 + self.states :]):
            return None  # the captured weights have moved, and other tensors may be in their place
        try:
            results = [y for y, is_present in zip(self._results, present, strict=True) if is_present]
            backward = _captured_gradients(results, self._leaves, 1 + self.states, self._pool)
        except RuntimeError:  # such as out of memory
            return None
        self.bytes = backward.bytes
        return backward


class _Claim:
    """A call's claim to the memory of its graphs, which autograd holds for as long as the backward may come."""


def _captured_gradients(results: list[Tensor], leaves: list[Tensor], inputs: int, pool: Pool) -> CapturedFunction:
    """Capture the gradients of the leaves, given those of the results; the leaves from `inputs` on are weights."""
    grads_of_results = [torch.zeros_like(y) for y in results]

    def differentiate() -> tuple[Gradients, Gradients]:
        needed = [x for x in leaves if x.requires_grad]
        computed = iter(torch.autograd.grad(results, needed, grads_of_results, retain_graph=True, allow_unused=True))
        grads = [next(computed) if x.requires_grad else None for x in leaves]
        return grads[:inputs], grads[inputs:]

    return CapturedFunction(differentiate, grads_of_results, pool)


class _Thread(threading.local):
    launches = False  # see launched_as_a_whole()


_thread = _Thread()


@contextmanager
def launched_as_a_whole() -> Iterator[None]:
    """Within the block calls are launched: they are parts of a call that will itself be captured."""
    _thread.launches, before = True, _thread.launches
    try:
        yield
    finally:
        _thread.launches = before


class RepeatedCalls:
    """Calls of the same sizes, replayed from CUDA graphs once they have repeated often enough."""

    def __init__(self, run: Run, draws: bool) -> None:
        self.run, self.graphs = run, Repeated[CallGraphs]()
        self._draws = draws  # whether the calls draw random numbers

    def replay(
        self,
        owner: nn.Module | nn.Parameter,
        x: Tensor,
        states: list[Tensor],
        weights: list[Tensor],
        resets: Tensor | None,
        training: bool,
    ) -> Sequence[Tensor] | None:
        """The results of a call, replayed; None where it must be launched, as it has no graphs, or none yet.

        Its graphs are freed with their owner, the layer or a parameter of it.
        """
        if _thread.launches or not on_default_stream(x):
            return None
        if training and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return None  # such as those of a checkpoint, both of whose calls must save the same tensors

        def capture() -> CallGraphs:
            differentiable = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
                return CallGraphs(self.run, self._draws, [x, *states, *weights], len(states), resets)

        bytes_needed = _saved_bytes(weights, x.numel() // x.shape[-1])
        if training:  # the gradients, and their copies in one tensor
            bytes_needed += 2 * sum(weight.nbytes for weight in weights if weight.requires_grad)
        graphs = self.graphs.find_or_capture((addresses_of(weights),), capture, bytes_needed, x.device, owner)
        if graphs is None:
            return None
        if not training:
            return graphs.forward([x, *states], resets)[0]
        if (claim := graphs.claim()) is None:
            return None
        results: Sequence[Tensor] = _apply(graphs, claim, self.run, resets, x, *states, *weights)
        return results


def on_default_stream(x: Tensor) -> bool:
    """Whether work on x is launched on the default stream: all graphs share cuBLAS's workspace and must not overlap."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) == _DEFAULT_STREAM


def addresses_of(weights: Sequence[Tensor]) -> tuple[int, ...]:
    """The address of each weight's data."""
    return tuple([x.data_ptr() for x in weights])


def _forward(
    ctx: Any, graphs: CallGraphs, claim: _Claim, run: Run, resets: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, ...]:
    ctx.random_state = random_state(tensors[0].device) if graphs.draws else None
    results, ctx.version = graphs.forward(tensors, resets)
    ctx.graphs, ctx.claim, ctx.run = graphs, claim, run
    # Autograd saves a parameter as an object, whose `.data` may have been replaced by the time of the backward.
    ctx.weights = [weight.detach() for weight in tensors[1 + graphs.states :]]
    ctx.save_for_backward(*tensors, resets)
    ctx.set_materialize_grads(False)
    return tuple(results)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, resets = ctx.saved_tensors
    if all(grad is None for grad in grads):
        return (None,) * len(ctx.needs_input_grad)
    computed: Any = None
    first, needed = 1 + ctx.graphs.states, ctx.needs_input_grad[-len(saved) :]
    weights = map(with_data, saved[first:], ctx.weights) if torch.is_grad_enabled() else ctx.weights
    tensors = [*saved[:first], *weights]
    with without_autocast(tensors[0].device.type):  # as in the forward, whatever context the backward is in
        if not torch.is_grad_enabled() and is_eager(grads) and not torch.cuda.is_current_stream_capturing():
            computed = ctx.graphs.backward(ctx.version, tensors, grads)
        if computed is None:

            def launched(tensors: list[Tensor]) -> list[Tensor]:
                launch: Run = ctx.run
                state = ctx.random_state
                with nullcontext() if state is None else drawn_from(state, tensors[0].device):
                    return launch(tensors[0], tensors[1:first], tensors[first:], resets)

            computed = by_autograd(launched, tensors, grads, needed)
    return None, None, None, None, *computed


_apply = apply_of(autograd_function("replayed", forward=_forward, backward=_backward))
