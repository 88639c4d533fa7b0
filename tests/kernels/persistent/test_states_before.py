"""The states before each step, which a kernel copies."""

import itertools

import pytest
import torch

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.persistent import cuda, reference
from ostinato.kernels.persistent.cuda import states_before
from ostinato.kernels.persistent.sequences import Sequences

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


def states_to_shift():
    """Arguments of ``previous``: of widths that are multiples of 2 to 16 bytes, and of one part of a step or many."""
    for (hidden, dtype), flags in itertools.product(
        ((1, bf16), (6, f16), (515, bf16), (1024, f16), (33, f32), (64, f32)),
        itertools.product((False, True), repeat=4),
    ):
        packed, reverse, with_first, resets = flags
        lengths = torch.tensor([9] * 20 + [4] * 10 + [3, 1] if packed else [7] * 32)
        sizes = (lengths > torch.arange(lengths[0])[:, None]).sum(1)
        offsets = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int() if packed else None
        rows, first = torch.randn(int(lengths.sum()), hidden).to(dtype), torch.randn(2, 32, hidden).to(dtype)[1]
        marks = torch.rand(len(rows)) < 0.3 if resets else None
        yield rows, first if with_first else None, Sequences(32, offsets, marks, reverse)


def on_gpu(x):
    """A tensor, or the sequences with their tensors, there."""
    if isinstance(x, Sequences):
        return Sequences(*map(on_gpu, x))
    return x.cuda() if isinstance(x, torch.Tensor) else x


@pytest.mark.gpu
def test_the_state_before_each_step_equals_the_reference(nan_memory):
    torch.manual_seed(0)
    for given in states_to_shift():
        assert torch.equal(cuda.previous(*map(on_gpu, given)).cpu(), reference.previous(*given))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
def test_the_copy_of_states_compiles_without_a_gpu(architecture):
    pytest.importorskip("cuda.core")
    for macros in map(states_before.macros, states_before.WORDS):
        code = nvrtc.source("persistent/cuda/states_before.cu")
        assert nvrtc.compile_cubin(code, architecture, dict(macros))[:4] == b"\x7fELF"
