"""The kernels that compute the layers of these tests; a compiler that has compiled nothing yet."""

import pytest
import torch

from ostinato.kernels.persistent import backends, cpu, reference
from recurrent_layers import forget_calls, use_kernels


@pytest.fixture(autouse=True, params=["reference"])
def kernels(request, monkeypatch):
    """Who computes what a kernel fits: the loop over time that defines it, or the CPU's loops, whatever they plan."""
    forget_calls(monkeypatch)
    if request.param != "as planned" and not request.node.get_closest_marker("gpu"):
        use_kernels(monkeypatch, {"reference": reference, "the CPU's": cpu}[request.param])
    yield
    backends._plan_dense.cache_clear()


@pytest.fixture
def fresh_compiler():
    """PyTorch's gives up on code that it has compiled too often, by whatever test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
