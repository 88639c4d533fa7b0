"""The rounding errors of the CUDA scans, and that they are the same at every run."""

import functools
import itertools

import pytest
import torch

import ostinato
from ostinato.kernels.scan import operators
from scan_kernels import GEOMETRIES, force, relative_error


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["near one", "signed", "unit"])
def test_float32_error_stays_small_over_long_sequences(kind):
    torch.manual_seed(0)
    uniform = torch.rand(1, 65536, 16, dtype=torch.float64)
    a = {"near one": 1 - 1e-4 * uniform, "signed": 2 * uniform - 1, "unit": uniform}[kind].float()
    b = torch.randn(1, 65536, 16)
    want, _ = ostinato.linear_scan(a.double(), b.double(), backend="cpu")
    got, _ = ostinato.linear_scan(a.cuda(), b.cuda())
    assert relative_error(got, want) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("rate", [0.1, -1e-4, None])
def test_the_error_of_log_space_gradients_does_not_grow_with_length(rate, geometry, monkeypatch):
    force(monkeypatch, geometry)
    torch.manual_seed(0)
    for shape in ((1, 4000, 3), (2, 4000, 64)):
        log_a, log_b = torch.randn(shape) if rate is None else torch.full(shape, rate), torch.randn(shape)
        wide = [x.double().requires_grad_() for x in (log_a, log_b)]
        narrow = [x.cuda().requires_grad_() for x in (log_a, log_b)]
        want = torch.autograd.grad(ostinato.log_linear_scan(*wide, backend="reference")[1].sum(), wide)
        got = torch.autograd.grad(ostinato.log_linear_scan(*narrow)[1].sum(), narrow)
        loop = [x.detach().float().requires_grad_() for x in wide]
        last = loop[1][:, 0]
        for t in range(1, shape[1]):
            last = torch.logaddexp(loop[0][:, t] + last, loop[1][:, t])
        rounded = torch.autograd.grad(last.sum(), loop)  # what rounding the states alone does: 1e-6 to 3e-4
        for g, w, r in zip(got, want, rounded, strict=True):
            assert relative_error(g, w) < max(4e-6, 2 * relative_error(r, w))

        def excess(gradient):
            return (gradient.double().sum(1) - 1).abs().max().item()

        assert excess(got[1]) < max(2e-6, 2 * excess(rounded[1]))


@pytest.mark.gpu
def test_same_bits_every_time():
    torch.manual_seed(0)
    shapes = (1, 20000, 40), (1, 300000, 1), (64, 300, 256)
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        a, b = torch.rand(shape, device="cuda", dtype=dtype), torch.randn(shape, device="cuda", dtype=dtype)
        first = operators.linear_scan(a, b, None, None, None, False, "cuda")
        for _ in range(20):
            again = operators.linear_scan(a, b, None, None, None, False, "cuda")
            assert torch.equal(first[0], again[0])
            assert torch.equal(first[1], again[1])
    module = ostinato.MinLSTM(32, 48, bidirectional=True).cuda()
    x = torch.randn(5000, 2, 32, device="cuda")
    grads = []
    for _ in range(20):
        module.zero_grad()
        module(x)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    assert all(torch.equal(p, q) for other in grads[1:] for p, q in zip(grads[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 3, 3, 19, 40], dtype=torch.int32)])
def test_gradients_in_float64(cu_seqlens):
    torch.manual_seed(0)
    a, b = (torch.rand(1, 40, 3, dtype=torch.float64, device="cuda").requires_grad_() for _ in range(2))
    h0 = torch.randn(1 if cu_seqlens is None else 4, 3, dtype=torch.float64, device="cuda").requires_grad_()
    bounds = None if cu_seqlens is None else cu_seqlens.cuda()
    for reverse in (False, True):
        for scan in (ostinato.linear_scan, ostinato.log_linear_scan):
            settled = functools.partial(scan, reverse=reverse, cu_seqlens=bounds)
            torch.autograd.gradcheck(settled, (a, b, h0))
