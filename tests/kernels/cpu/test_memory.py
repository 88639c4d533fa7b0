"""The memory that large results of the CPU's loops reuse."""

import sys

import pytest
import torch

from comparisons import same_bits
from cpu_calls import everything
from ostinato.kernels.cpu import memory


def test_large_results_reuse_memory_only_when_it_is_free(monkeypatch):
    monkeypatch.setattr(memory, "LARGE", 1 << 12)
    expected = everything(0)
    kept = [everything(seed) for seed in (0, 1, 0)]
    addresses = {x.data_ptr() for x in kept[2] if x is not None}
    assert same_bits(kept[0], expected)
    assert same_bits(kept[2], expected)
    del kept[2]
    last = everything(0)
    if sys.platform == "linux":
        assert addresses & {x.data_ptr() for x in last if x is not None}
    assert same_bits(last, expected)
    assert same_bits(kept[0], expected)


@pytest.mark.skipif(sys.platform != "linux", reason="no memory is kept there")
def test_memory_cached_for_reuse_follows_the_sizes_in_use(monkeypatch):
    monkeypatch.setattr(memory, "LARGE", 1 << 12)
    monkeypatch.setattr(memory, "SPARE", 1 << 16)
    monkeypatch.setattr(memory, "_cached", [])

    def make(kilobytes):
        return memory.empty((kilobytes << 8,), torch.float32)

    for size in (900, 20, 300, 100, 40, 900, 8, 2000, 50):  # none fits what the one before left
        held = make(size)
        assert sum(map(len, memory._cached)) <= 1 << 16
        del held
        assert len(memory._cached[-1]) == size << 10
    small, large = make(400), make(700)
    addresses = small.data_ptr(), large.data_ptr()
    del large, small
    for _ in range(3):  # the smaller request does not take the larger block
        again = make(400), make(700)
        assert tuple(x.data_ptr() for x in again) == addresses
        del again
