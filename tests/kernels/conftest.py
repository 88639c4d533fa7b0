"""Fixtures of the tests of kernels."""

import pytest
import torch

from ostinato.kernels.cpu import threads as kernel_threads


@pytest.fixture
def always_parallel(monkeypatch):
    """Use two threads, also for small inputs and where the tests have one."""
    monkeypatch.setattr(kernel_threads, "PARALLEL", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
