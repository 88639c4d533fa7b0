"""The gradients of biases, which a kernel sums."""

import pytest
import torch

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.persistent import cuda, reference
from ostinato.kernels.persistent.cuda import biases

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize(("batch", "hidden"), [(1, 1), (3, 8), (17, 33), (200, 515)])
@pytest.mark.parametrize("cell", ["rnn_tanh", "gru", "lstm"])
def test_gradients_of_biases_equal_the_reference(cell, batch, hidden, dtype, nan_memory):
    torch.manual_seed(0)
    totals = torch.randn(batch, hidden * (1 if cell == "rnn_tanh" else 4), device="cuda")
    exact = reference.gradients_of_biases(totals.double(), torch.float64, cell)
    for ours, expected in zip(cuda.gradients_of_biases(totals, dtype, cell), exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=torch.finfo(dtype).eps, atol=batch * 1e-6)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
def test_the_sums_of_biases_compile_without_a_gpu(architecture, dtype):
    pytest.importorskip("cuda.core")
    code, macros = biases.source(dtype)
    assert nvrtc.compile_cubin(code, architecture, dict(macros))[:4] == b"\x7fELF"
