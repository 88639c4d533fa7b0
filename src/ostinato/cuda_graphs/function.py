"""A function in a graph, called as any other."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ostinato.cuda_graphs.capture import Pool, bytes_of, captured
from ostinato.kernels.operators.autograd import Gradients, without_none


class CapturedFunction:
    """A function without arguments, which reads tensors that a call overwrites.

    A call copies others there, replays, and copies the results, some of which may be None.  They come in groups: those
    of a group and a dtype as one tensor, as launches are what it saves.  Who keeps one of them keeps the memory of all
    others of its group.
    """

    def __init__(self, function: Callable[[], Sequence[Gradients]], given: list[Tensor], pool: Pool) -> None:
        self._given = given
        with captured(given[0].device, pool) as self._graph:
            results = [(y, group) for group, own in enumerate(function()) for y in own]
            places: dict[tuple[int, torch.dtype], list[int]] = {}
            for place, (y, group) in enumerate(results):
                if y is not None:
                    places.setdefault((group, y.dtype), []).append(place)
            self._count, self._places = len(results), [*places.values()]
            self._results = [without_none([results[i][0] for i in group]) for group in self._places]
            self._flat = [torch.cat([y.flatten() for y in group]) for group in self._results]
        self.bytes = bytes_of(pool, self._flat[0])

    def __call__(self, tensors: list[Tensor]) -> Gradients:
        torch._foreach_copy_(self._given, tensors)
        self._graph.replay()
        copied = [torch.empty_like(flat) for flat in self._flat]
        torch._foreach_copy_(copied, self._flat)
        found: list[Tensor | None] = [None] * self._count
        for places, group, flat in zip(self._places, self._results, copied, strict=True):
            for i, y in zip(places, torch._C._nn.unflatten_dense_tensors(flat, group), strict=True):
                found[i] = y.data  # whose changes do not count as the others'
        return found
