"""Products whose gradients take a way of their own."""

import pytest
import torch
from torch.nn import functional as F

from ostinato.kernels import gemm, nvrtc

TILE = {"ROWS": gemm.TILE[0], "COLUMNS": gemm.TILE[1]}


def test_transposition_compiles_without_a_gpu():
    pytest.importorskip("cuda.core")
    assert nvrtc.compile_cubin(nvrtc.source("transpose.cu"), "sm_90", TILE)[:4] == b"\x7fELF"


def test_derivatives_of_a_linear_layer(monkeypatch):
    monkeypatch.setattr(gemm, "transposed", lambda x: x.T.contiguous())
    monkeypatch.setattr(gemm, "_is_faster_transposed", lambda *_: True)
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (5, 4), (5,))]
    grad = torch.randn(2, 3, 5, dtype=torch.float64)
    want = torch.autograd.grad(F.linear(*inputs), inputs, grad)
    for ours, right in zip(torch.autograd.grad(gemm._Transposing.apply(*inputs), inputs, grad), want, strict=True):
        assert (ours - right).abs().max() < 1e-14
    assert torch.autograd.gradgradcheck(gemm._Transposing.apply, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (130, 31), (33, 257), (1000, 64), (4096, 1000)])
def test_transposition(shape):
    x = torch.randn(shape, device="cuda")
    assert torch.equal(gemm.transposed(x), x.T)
    assert torch.equal(gemm.transposed(x.T), x)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 3000, 96, 1024), (1, 9001, 130, 1101)])
def test_gradients_rounded_to_tf32(shape, monkeypatch):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    torch.manual_seed(0)
    batch, length, channels, width = shape
    x = torch.randn(batch, length, channels, device="cuda").requires_grad_()
    weight = torch.randn(width, channels, device="cuda").requires_grad_()
    grad = torch.randn(batch, length, width, device="cuda")
    y = gemm.linear(x, weight)
    assert "_Transposing" in y.grad_fn.name()
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    want = torch.autograd.grad(F.linear(*exact), exact, grad.double())
    for again in (False, True):
        found = torch.autograd.grad(y, (x, weight), grad, retain_graph=True, create_graph=again)
        for ours, right in zip(found, want, strict=True):
            assert (ours - right).norm() < 1e-3 * right.norm()
