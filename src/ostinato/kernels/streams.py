"""Two computations in parallel on a GPU that neither fills alone."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor, ...]


def beside(function: Callable[..., Results], first: tuple, second: tuple) -> tuple[Results, Results]:
    """``function(*first), function(*second)``; on a GPU the second, backward too, has a stream of its own."""
    device = next(x.device for x in first if isinstance(x, Tensor))
    if device.type != "cuda" or torch.compiler.is_compiling():
        return function(*first), function(*second)
    here, side = torch.cuda.current_stream(device), _side_stream(device)
    # Views made on the current stream make autograd deliver the parameters' gradients on it.
    arguments = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in second]
    side.wait_stream(here)
    with torch.cuda.stream(side):
        results = function(*arguments)
    own = function(*first)
    here.wait_stream(side)
    _used_on(side, arguments)
    _used_on(here, results)
    return own, results


def _used_on(stream: torch.cuda.Stream, values: Any) -> None:
    """Keep the allocator from reusing memory while this stream still uses it."""
    for x in values:
        if isinstance(x, Tensor) and x.is_cuda:
            x.record_stream(stream)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
