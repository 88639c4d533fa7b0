"""Memory in which an element that no kernel wrote is seen."""

import pytest
import torch


@pytest.fixture
def nan_memory():
    """Memory that PyTorch hands out is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
