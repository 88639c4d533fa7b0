"""Small layers on a GPU: calls that are repeated become CUDA graphs, which the host launches as a whole.

The kernels of a small layer take less time than the host needs to launch them, and several layers or directions have
many.  Once calls with the same sizes and weights have come often enough, they are captured, with memory of their own:
from then on a call copies its input there, replays, and copies its results, and so does its backward.  The kernels are
those of the calls before, and so is every bit of their results, but where cuBLAS chooses one by the addresses it is
given.

What the graphs keep for the backward is that of the last call.  A call that comes before the backward of the one
before it is therefore launched as usual, and a backward that comes too late, or a second time, computes its forward
again, with the same random numbers.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
"""A launched call: the output and last states, of the input, the states, the weights and resets."""

MOST_BYTES = 128 << 20  # that a call keeps for its backward
MOST_STEPS = 512  # of a loop over time: longer ones take a GPU longer than the host
_DEFAULT_STREAM = 0


def are_worth(weights: Sequence[Tensor], rows: int, most_bytes: int = MOST_BYTES) -> bool:
    """Whether calls of so many rows are captured: those of a small layer with parameters that stay where they are.

    None are if the environment variable ``OSTINATO_CUDA_GRAPHS`` is 0.
    """
    if os.environ.get("OSTINATO_CUDA_GRAPHS") == "0":
        return False
    if not weights[0].is_cuda or torch.cuda.get_allocator_backend() != "native":  # others end the process in a capture
        return False
    return all(type(x) is nn.Parameter for x in weights) and _bytes_of(weights, rows) <= most_bytes


def _bytes_of(weights: Sequence[Tensor], rows: int) -> int:
    """About how many a call of so many rows keeps: of every gate one number, and of every unit some more."""
    return sum((x.shape[0] + 3 * x.shape[1]) * x.itemsize for x in weights if x.dim() == 2) * rows


class CallGraphs(KeptGraphs):
    """A call, and its backward, captured with memory of their own."""

    def __init__(self, run: Run, draws: bool, tensors: list[Tensor], states: int, resets: Tensor | None) -> None:
        self.draws = draws
        self._device, self._pool = tensors[0].device, torch.cuda.graph_pool_handle()
        self.states, first = states, 1 + states
        self._addresses = addresses_of(tensors[first:])  # where the weights are read
        # The data of tensors have no count of changes, by which autograd would refuse the backward.
        data = [x.data if i >= first else x.detach().clone() for i, x in enumerate(tensors)]
        self._leaves = [x.requires_grad_(given.requires_grad) for x, given in zip(data, tensors, strict=True)]
        self._given, self._resets = [x.data for x in self._leaves[:first]], None if resets is None else resets.clone()
        self._backwards: dict[tuple[bool, ...], CapturedFunction | None] = {}
        self._lock, self._version = threading.Lock(), 0  # of the memory
        self._use: weakref.ref[_Use] | None = None
        with captured(self._device, self._pool) as self._graph:
            x, *others = self._leaves
            self._results = run(x, others[:states], others[states:], self._resets)
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in self._leaves)
        if differentiable and not all(y.requires_grad for y in self._results):
            raise RuntimeError("autograd would give gradients of results that have none")
        self._outputs = [y.data for y in self._results]
        self.bytes = bytes_of(self._pool, self._results[0])

    def claim(self) -> "_Use | None":
        """The right to the memory; None while the call before may have its backward yet."""
        with self._lock:
            if self._use is not None and self._use() is not None:
                return None
            use = _Use()
            self._use = weakref.ref(use)
            return use

    def forward(self, tensors: Sequence[Tensor], resets: Tensor | None) -> tuple[list[Tensor], int]:
        """The results, and the version of the memory, which the backward needs."""
        check_launches(self._device)
        with self._lock:
            torch._foreach_copy_(self._given, [*tensors[: len(self._given)]])
            if self._resets is not None and resets is not None:
                self._resets.data.copy_(resets)
            self._graph.replay()
            self._version += 1
            self.count_replay()
            results = [torch.empty_like(y) for y in self._outputs]
            torch._foreach_copy_(results, self._outputs)
            return results, self._version

    def backward(self, version: int, tensors: Sequence[Tensor], grads: Gradients) -> Gradients | None:
        """The gradients of the tensors, None for those that need none.

        Or None if the memory is another call's.  The graphs are given up if there can be none of the backward, or if
        weights have been moved, as shards are when gathered again.
        """
        check_launches(self._device)
        with self._lock:
            if self._addresses != addresses_of(tensors[1 + self.states :]):
                self.give_up()
                return None
            if self._version != version:
                return None
            self._version += 1  # nothing says that kernels leave whole what they have read for the last time
            self._use = None
            present = tuple([grad is not None for grad in grads])
            if present not in self._backwards:
                self._backwards[present] = self._captured_backward(present)
            found = self._backwards[present]
            if found is None:
                self.give_up()
                return None
            return found(without_none(grads))

    def _captured_backward(self, present: tuple[bool, ...]) -> CapturedFunction | None:
        if self._addresses != addresses_of(self._leaves[1 + self.states :]):
            return None  # those of the first call have moved, and others are in their place
        try:
            results = [y for y, is_present in zip(self._results, present, strict=True) if is_present]
            found = _captured_gradients(results, self._leaves, 1 + self.states, self._pool)
        except RuntimeError:  # as where memory is short
            return None
        self.bytes = found.bytes
        return found


class _Use:
    """The right to the memory of a call's graphs, as long as autograd may ask for the backward."""


def _captured_gradients(results: list[Tensor], leaves: list[Tensor], inputs: int, pool: Pool) -> CapturedFunction:
    """The gradients of the leaves, of which so many are inputs and the others weights, from those of the results."""
    given = [torch.zeros_like(y) for y in results]

    def differentiate() -> tuple[Gradients, Gradients]:
        needed = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(results, needed, given, retain_graph=True, allow_unused=True))
        grads = [next(found) if x.requires_grad else None for x in leaves]
        return grads[:inputs], grads[inputs:]

    return CapturedFunction(differentiate, given, pool)


class RepeatedCalls:
    """Calls of the same sizes, which are replayed once they have repeated often enough."""

    def __init__(self, run: Run, draws: bool) -> None:
        self.run, self.graphs = run, Repeated[CallGraphs]()
        self._draws = draws  # random numbers

    def replay(
        self,
        owner: nn.Module | nn.Parameter,
        x: Tensor,
        states: list[Tensor],
        weights: list[Tensor],
        resets: Tensor | None,
        training: bool,
    ) -> Sequence[Tensor] | None:
        """The results of a call by its graphs; None if it has none, or not yet, and is to be launched.

        The graphs go with their owner: the layer, or a parameter of it.
        """
        if not on_default_stream(x):
            return None
        if training and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return None  # such as a checkpoint's, to which both of its calls must save the same

        def capture() -> CallGraphs:
            differentiable = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
                return CallGraphs(self.run, self._draws, [x, *states, *weights], len(states), resets)

        bytes_needed = _bytes_of(weights, x.numel() // x.shape[-1])
        if training:  # gradients, and these as one tensor
            bytes_needed += 2 * sum(weight.nbytes for weight in weights if weight.requires_grad)
        found = self.graphs.graphs_of((addresses_of(weights),), capture, bytes_needed, x.device, owner)
        if found is None:
            return None
        if not training:
            return found.forward([x, *states], resets)[0]
        if (use := found.claim()) is None:
            return None
        results: Sequence[Tensor] = _apply(found, use, self.run, resets, x, *states, *weights)
        return results


def on_default_stream(x: Tensor) -> bool:
    """All graphs share the memory that cuBLAS works in, so they must not run at the same time."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) == _DEFAULT_STREAM


def addresses_of(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([x.data_ptr() for x in weights])


def _forward(
    ctx: Any, graphs: CallGraphs, use: _Use, run: Run, resets: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, ...]:
    ctx.random_state = random_state(tensors[0].device) if graphs.draws else None
    results, ctx.version = graphs.forward(tensors, resets)
    ctx.graphs, ctx.use, ctx.run = graphs, use, run
    # Of a parameter autograd keeps the object, whose data may be other by the backward.
    ctx.weights = [weight.detach() for weight in tensors[1 + graphs.states :]]
    ctx.save_for_backward(*tensors, resets)
    ctx.set_materialize_grads(False)
    return tuple(results)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, resets = ctx.saved_tensors
    if all(grad is None for grad in grads):
        return (None,) * len(ctx.needs_input_grad)
    found: Any = None
    first, needed = 1 + ctx.graphs.states, ctx.needs_input_grad[-len(saved) :]
    weights = map(with_data, saved[first:], ctx.weights) if torch.is_grad_enabled() else ctx.weights
    tensors = [*saved[:first], *weights]
    with without_autocast(tensors[0].device.type):  # as the forward had it, whatever there is around the backward
        if not torch.is_grad_enabled() and is_eager(grads) and not torch.cuda.is_current_stream_capturing():
            found = ctx.graphs.backward(ctx.version, tensors, grads)
        if found is None:

            def launched(own: list[Tensor]) -> list[Tensor]:
                launch: Run = ctx.run
                state = ctx.random_state
                with nullcontext() if state is None else drawn_from(state, own[0].device):
                    return launch(own[0], own[1:first], own[first:], resets)

            found = by_autograd(launched, tensors, grads, needed)
    return None, None, None, None, *found


_apply = apply_of(autograd_function("replayed", forward=_forward, backward=_backward))
