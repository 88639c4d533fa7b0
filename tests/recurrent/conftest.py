"""Which kernels compute the layers of these tests, when calls are captured, and a compiler without compiled code."""

import pytest
import torch

from ostinato.cuda_graphs import kept
from ostinato.kernels.persistent import backends, cpu, reference
from ostinato.kernels.persistent.cuda import plan as cuda_plan
from recurrent_layers import forget_calls, use_kernels


@pytest.fixture(autouse=True, params=["reference"])
def kernels(request, monkeypatch):
    """Who computes what a kernel fits: the loop over time that defines it, or the CPU's loops, whatever they plan.

    On a GPU its kernels, faster or not.
    """
    forget_calls(monkeypatch)
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(cuda_plan, "_why_torch", lambda *_: None)
        backends._plan_dense.cache_clear()
    elif request.param != "as planned":
        use_kernels(monkeypatch, {"reference": reference, "the CPU's": cpu}[request.param])
    yield
    backends._plan_dense.cache_clear()


@pytest.fixture
def soon(monkeypatch):
    """Captures at the second equal call."""
    monkeypatch.setattr(kept, "USES", 1)
    monkeypatch.setattr(kept, "_kept", kept._AllKept())


@pytest.fixture
def fresh_compiler():
    """PyTorch's gives up on code that it has compiled too often, by whatever test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
