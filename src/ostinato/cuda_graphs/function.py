"""A captured function that is called with new inputs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ostinato.cuda_graphs.capture import Pool, bytes_of, captured
from ostinato.kernels.operators.autograd import Gradients, without_none


class CapturedFunction:
    """The graph of a function without arguments that reads given input tensors, which each call overwrites.

    A call copies its tensors into the inputs, replays the graph, and copies the results out, some of which may be None.
    The function returns its results in groups.  Those of a group and dtype are copied as one tensor, to save launches;
    whoever keeps one of them keeps the memory of all.
    """

    def __init__(self, function: Callable[[], Sequence[Gradients]], inputs: list[Tensor], pool: Pool) -> None:
        self._inputs = inputs
        with captured(inputs[0].device, pool) as self._graph:
            results = [(y, group) for group, members in enumerate(function()) for y in members]
            places: dict[tuple[int, torch.dtype], list[int]] = {}
            for place, (y, group) in enumerate(results):
                if y is not None:
                    places.setdefault((group, y.dtype), []).append(place)
            self._count, self._places = len(results), [*places.values()]
            self._results = [without_none([results[i][0] for i in group]) for group in self._places]
            self._flat = [torch.cat([y.flatten() for y in group]) for group in self._results]
        self.bytes = bytes_of(pool, self._flat[0])

    def __call__(self, tensors: list[Tensor]) -> Gradients:
        torch._foreach_copy_(self._inputs, tensors)
        self._graph.replay()
        copies = [torch.empty_like(flat) for flat in self._flat]
        torch._foreach_copy_(copies, self._flat)
        results: list[Tensor | None] = [None] * self._count
        for places, group, flat in zip(self._places, self._results, copies, strict=True):
            for i, y in zip(places, torch._C._nn.unflatten_dense_tensors(flat, group), strict=True):
                results[i] = y.data  # with a version counter of its own
        return results
