"""What the tests of kernels run with."""

import pytest
import torch

from ostinato.kernels.cpu import threads as kernel_threads


@pytest.fixture
def always_parallel(monkeypatch):
    """By two threads, also where the tests have one."""
    monkeypatch.setattr(kernel_threads, "PARALLEL", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
