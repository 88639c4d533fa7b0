"""A function in a graph, called as any other."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ostinato.cuda_graphs.capture import Pool, bytes_of, captured


class CapturedFunction:
    """A function without arguments, which reads tensors that a call overwrites.

    A call copies others there, replays, and copies the results, those of a dtype as one tensor: launches are what it
    saves.
    """

    def __init__(self, function: Callable[[], Sequence[Tensor]], given: list[Tensor], pool: Pool) -> None:
        self._given = given
        with captured(given[0].device, pool) as self._graph:
            results = function()
            self._places = [[i for i, y in enumerate(results) if y.dtype == x] for x in {y.dtype: 0 for y in results}]
            self._results = [[results[i] for i in places] for places in self._places]
            self._flat = [torch.cat([y.flatten() for y in group]) for group in self._results]
        self.bytes = bytes_of(pool, self._flat[0])

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        torch._foreach_copy_(self._given, tensors)
        self._graph.replay()
        found: dict[int, Tensor] = {}
        for places, group, flat in zip(self._places, self._results, self._flat, strict=True):
            copies = torch._C._nn.unflatten_dense_tensors(flat.clone(), group)
            # The data of each, whose changes do not count as the others'.
            found |= {i: y.data for i, y in zip(places, copies, strict=True)}
        return [found[i] for i in range(len(found))]
