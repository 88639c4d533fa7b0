"""Copies of tensors whose steps, not channels, are contiguous."""

import pytest
import torch

from layouts import strided
from ostinato.kernels.cpu.transpose import is_transposable, transposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 17, 31), (2, 100, 257), (5, 64, 72)])
def test_transposed_copies_every_number_to_its_place(always_parallel, dtype, shape):
    batch, length, channels = shape
    x = torch.arange(2 * batch * length * channels, dtype=dtype).view(batch, 2 * channels, length).mT[..., :channels]
    for y in (x, x[:1].expand(shape), x[..., :1].expand(shape)):
        assert is_transposable(y)
        assert transposed(y).is_contiguous()
        assert torch.equal(transposed(y), y)


@pytest.mark.parametrize(("shape", "transposable"), [((3, 16, 16), True), ((3, 15, 16), False), ((3, 16, 15), False)])
def test_only_blocks_of_whole_cache_lines_are_transposed(shape, transposable):
    assert is_transposable(strided(torch.ones(shape), "time-contiguous")) == transposable
    assert not is_transposable(torch.ones(shape))
    assert is_transposable(strided(torch.ones(shape).double(), "time-contiguous"))
