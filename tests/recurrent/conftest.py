"""Fixtures that choose the kernels of these tests' layers, capture calls early, and reset the compiler."""

import pytest
import torch

from ostinato.cuda_graphs import kept
from ostinato.kernels.persistent import backends, cpu, reference
from ostinato.kernels.persistent.cuda import plan as cuda_plan
from recurrent_layers import forget_calls, use_kernels


@pytest.fixture(autouse=True, params=["reference"])
def kernels(request, monkeypatch):
    """Choose the kernels: the reference loop over time, the CPU's loops for all calls, or the planned ones.

    On a GPU, always use its kernels, faster or not.
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
    """Capture calls at the second equal one."""
    monkeypatch.setattr(kept, "USES", 1)
    monkeypatch.setattr(kept, "_kept", kept._AllKept())


@pytest.fixture
def fresh_compiler():
    """Reset PyTorch's compiler, which gives up on code that any tests have compiled too often."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
