"""Small layers on a GPU: calls that are repeated become CUDA graphs, which the host launches as a whole.

The kernels of a small layer take less time than the host needs to launch them, and several layers or directions have
many.  Once calls with the same sizes and weights have come :data:`USES` times, they are captured, with memory of their
own: from then on a call copies its input there, replays, and copies its results.  So is the backward.  The kernels are
those of the calls before, and so is every bit of their results.

What the graphs keep for the backward is that of the last call.  A call that comes before the backward of the one
before it is therefore launched as usual, and a backward that comes too late, or a second time, computes its forward
again.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ostinato.cuda_graph import Pool, bytes_of, captured
from ostinato.kernels.operators.dispatch import apply_of, autograd_function
from ostinato.kernels.operators.eager import is_eager
from ostinato.kernels.persistent.backends import check_launches
from ostinato.recurrent.gradients import by_autograd

Run = Callable[[Tensor, list[Tensor], list[Tensor], Tensor | None], list[Tensor]]
"""A launched call: the output and last states, of the input, the states, the weights and resets."""

Graphs = dict[tuple[int, ...], Any]
"""Of calls of the same sizes, by addresses of weights: how often one has come, then its graphs, or None."""

USES = 16  # of equal calls before they are captured: more than most warm-ups of other captures
MOST_STEPS = 256  # longer sequences take a GPU longer than the host
MOST_BYTES = 128 << 20  # that a call keeps for its backward
MOST_KEPT = 512 << 20  # bytes of all calls whose graphs are kept
_DEFAULT_STREAM = 0
_STALE = 4096  # replays of others, after which those of a call may make room
_MOST_COUNTED = 512  # of calls of the same sizes, as of equal layers; graphs of as many have no room


def are_worth(weights: Sequence[Tensor], rows: int, steps: int) -> bool:
    """Whether calls of these sizes are captured: those of a small layer with parameters that stay where they are.

    None are if the environment variable ``OSTINATO_CUDA_GRAPHS`` is 0.
    """
    if os.environ.get("OSTINATO_CUDA_GRAPHS") == "0":
        return False
    if not weights[0].is_cuda or torch.cuda.get_allocator_backend() != "native":  # others end the process in a capture
        return False
    are_parameters = all(type(x) is nn.Parameter for x in weights)
    return are_parameters and steps <= MOST_STEPS and _bytes_of(weights, rows) <= MOST_BYTES


def _bytes_of(weights: Sequence[Tensor], rows: int) -> int:
    """About how many a call of so many rows keeps: of every gate one number, and of every unit some more."""
    return sum((x.shape[0] + 3 * x.shape[1]) * x.itemsize for x in weights if x.dim() == 2) * rows


def replay(
    graphs: Graphs,
    run: Run,
    layer: nn.Module,
    x: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    resets: Tensor | None,
    training: bool,
) -> Sequence[Tensor] | None:
    """The results of a call by its graphs; None if it has none, or not yet, and is to be launched."""
    if torch._C._cuda_getCurrentRawStream(x.get_device()) != _DEFAULT_STREAM:
        return None  # all graphs share the memory that cuBLAS works in, so they must not run at the same time
    if training and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None  # such as a checkpoint's, to which both of its calls must save the same
    key = _addresses_of(weights)
    found = graphs.get(key, 0)
    if type(found) is int:
        if found < USES:
            if not found and len(graphs) >= _MOST_COUNTED:
                for counted, uses in list(graphs.items()):
                    if type(uses) is int:
                        graphs.pop(counted, None)
            graphs[key] = found + 1
            return None
        graphs[key] = None  # other threads launch meanwhile
        found = graphs[key] = _captured_call(graphs, key, run, layer, [x, *states, *weights], len(states), resets)
    if found is None:
        return None
    if not training:
        return found.forward([x, *states], resets)[0]
    if (use := found.claim()) is None:
        return None
    results: Sequence[Tensor] = _apply(found, use, run, resets, x, *states, *weights)
    return results


def _addresses_of(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([x.data_ptr() for x in weights])


class _Use:
    """The right to the memory of a call's graphs, as long as autograd may ask for the backward."""


class _CallGraphs:
    """A call, and its backward, captured with memory of their own."""

    def __init__(self, run: Run, tensors: list[Tensor], states: int, resets: Tensor | None) -> None:
        self._device, self._pool = tensors[0].device, torch.cuda.graph_pool_handle()
        self.states, first = states, 1 + states
        self._addresses = _addresses_of(tensors[first:])  # where the weights are read
        # The data of tensors have no count of changes, by which autograd would refuse the backward.
        data = [x.data if i >= first else x.detach().clone() for i, x in enumerate(tensors)]
        self._leaves = [x.requires_grad_(given.requires_grad) for x, given in zip(data, tensors, strict=True)]
        self._given, self._resets = [x.data for x in self._leaves[:first]], None if resets is None else resets.clone()
        self._backwards: dict[tuple[bool, ...], _Backward | None] = {}
        self._lock, self._version = threading.Lock(), 0  # of the memory
        self._use: weakref.ref[_Use] | None = None
        self.last_replay = _kept.replays
        with captured(self._device, self._pool) as self._graph:
            x, *others = self._leaves
            self._results = run(x, others[:states], others[states:], self._resets)
        self._outputs = [y.data for y in self._results]
        self.bytes = bytes_of(self._pool, self._results[0])

    def claim(self) -> _Use | None:
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
            for own, x in zip(self._given, tensors, strict=False):
                own.copy_(x)
            if self._resets is not None and resets is not None:
                self._resets.data.copy_(resets)
            self._graph.replay()
            self._version += 1
            _kept.replays += 1
            self.last_replay = _kept.replays
            return [y.clone() for y in self._outputs], self._version

    def backward(
        self, version: int, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None] | None:
        """The gradients of the tensors, None for those that need none.

        Or None if the memory is another call's.  The graphs are given up if there can be none of the backward, or if
        weights have been moved, as shards are when gathered again.
        """
        check_launches(self._device)
        with self._lock:
            if self._addresses != _addresses_of(tensors[1 + self.states :]):
                _kept.give_up(self)
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
                _kept.give_up(self)
                return None
            return found.replay(grads)

    def _captured_backward(self, present: tuple[bool, ...]) -> "_Backward | None":
        if self._addresses != _addresses_of(self._leaves[1 + self.states :]):
            return None  # those of the first call have moved, and others are in their place
        try:
            found = _Backward(self._results, self._leaves, present, self._pool)
            self.bytes = bytes_of(self._pool, found.flat)
        except RuntimeError:  # as where memory is short
            return None
        return found


class _Backward:
    """The gradients of the leaves, of those of the results that are present."""

    def __init__(self, results: list[Tensor], leaves: list[Tensor], present: tuple[bool, ...], pool: Pool) -> None:
        chosen = [y for y, is_present in zip(results, present, strict=True) if is_present]
        needed = [x for x in leaves if x.requires_grad]
        self._given = [torch.zeros_like(y) for y in chosen]
        with torch.autograd.set_multithreading_enabled(False), captured(leaves[0].device, pool) as self._graph:
            found = torch.autograd.grad(chosen, needed, self._given, retain_graph=True, allow_unused=True)
            self._found = [grad for grad in found if grad is not None]
            self.flat = torch.cat([grad.flatten() for grad in self._found])
        of_needed = iter([grad is not None for grad in found])
        self._is_found = [x.requires_grad and next(of_needed) for x in leaves]

    def replay(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        for own, grad in zip(self._given, [grad for grad in grads if grad is not None], strict=True):
            own.copy_(grad)
        self._graph.replay()
        # Of one copy, as launches are what this saves; the data of each, whose changes do not count as the others'.
        found = iter(torch._C._nn.unflatten_dense_tensors(self.flat.clone(), self._found))
        return [next(found).data if is_found else None for is_found in self._is_found]


def _forward(
    ctx: Any, graphs: _CallGraphs, use: _Use, run: Run, resets: Tensor | None, *tensors: Tensor
) -> tuple[Tensor, ...]:
    results, ctx.version = graphs.forward(tensors, resets)
    ctx.graphs, ctx.use, ctx.run = graphs, use, run
    ctx.save_for_backward(*tensors, resets)
    ctx.set_materialize_grads(False)
    return tuple(results)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, resets = ctx.saved_tensors
    if all(grad is None for grad in grads):
        return (None,) * len(ctx.needs_input_grad)
    found: Any = None
    if not torch.is_grad_enabled() and is_eager(grads) and not torch.cuda.is_current_stream_capturing():
        found = ctx.graphs.backward(ctx.version, tensors, grads)
    if found is None:
        run, first = ctx.run, 1 + ctx.graphs.states

        def launched(own: list[Tensor]) -> list[Tensor]:
            return run(own[0], own[1:first], own[first:], resets)

        # Compiled autograd would follow the launches, and lose all gradients.
        differentiate = torch.compiler.disable(by_autograd) if torch.compiler.is_compiling() else by_autograd
        found = differentiate(launched, tensors, grads, ctx.needs_input_grad[-len(tensors) :])
    return None, None, None, None, *found


_apply = apply_of(autograd_function("replayed", forward=_forward, backward=_backward))


class _Kept(NamedTuple):
    """The graphs of a call, and where they are found."""

    call: _CallGraphs
    graphs: Graphs
    key: tuple[int, ...]
    layer: weakref.ref[nn.Module]


def _is_of(call: _CallGraphs) -> Callable[[_Kept], bool]:
    return lambda kept: kept.call is call


class _AllKept:
    """All graphs that there are, whose memory is bounded."""

    def __init__(self) -> None:
        self.replays, self._all = 0, list[_Kept]()

    def drop(self, is_meant: Callable[[_Kept], bool]) -> list[_Kept]:
        """Free some of the graphs, which are returned; their calls are counted anew."""
        found = [*filter(is_meant, self._all[:])]
        for kept in found:
            with suppress(ValueError):  # another thread, or the collection of garbage, may have come first
                self._all.remove(kept)
            kept.graphs.pop(kept.key, None)
        return found

    def give_up(self, call: _CallGraphs) -> None:
        """Free graphs whose call is launched from now on."""
        for kept in self.drop(_is_of(call)):
            kept.graphs[kept.key] = None

    def make_room(self, bytes_needed: int) -> bool:
        """Whether there is room, of graphs that have not been used for long, too."""
        while (all_kept := self._all[:]) and sum(kept.call.bytes for kept in all_kept) + bytes_needed > MOST_KEPT:
            oldest = min(all_kept, key=lambda kept: kept.call.last_replay)
            if self.replays - oldest.call.last_replay < _STALE:
                return False
            self.drop(_is_of(oldest.call))
        return True

    def add(self, call: _CallGraphs, graphs: Graphs, key: tuple[int, ...], layer: nn.Module) -> None:
        for kept in self._all[:]:
            if kept.layer() is layer and kept.key != key:  # its weights before, which are kept too
                self.give_up(kept.call)
        # They go with the layer, whose weights would be kept too.
        of_layer = weakref.ref(layer, lambda _: self.drop(_is_of(call)))
        self._all.append(_Kept(call, graphs, key, of_layer))


_kept = _AllKept()


def forget(layer: nn.Module) -> None:
    """Free the graphs of a layer, which keep its weights in memory, where these will be elsewhere."""
    _kept.drop(lambda kept: kept.layer() is layer)


def _captured_call(
    graphs: Graphs,
    key: tuple[int, ...],
    run: Run,
    layer: nn.Module,
    tensors: list[Tensor],
    states: int,
    resets: Tensor | None,
) -> _CallGraphs | None:
    """The graphs of a call; None if it cannot be captured, or the others leave no room."""
    if not _kept.make_room(_bytes_of(tensors[1 + states :], tensors[0].numel() // tensors[0].shape[-1])):
        return None
    differentiable = torch.is_grad_enabled()
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
            found = _CallGraphs(run, tensors, states, resets)
    except RuntimeError:
        return None
    _kept.add(found, graphs, key, layer)
    return found
