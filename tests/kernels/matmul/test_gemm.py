"""Products over all steps: by convolution on CPUs, with transposed inputs on GPUs."""

import contextlib
import math
import random
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import ostinato
from comparisons import assert_close, same_bits
from layouts import strided
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.matmul import convolution, gemm

TILE = {"ROWS": gemm.TILE[0], "COLUMNS": gemm.TILE[1]}


def test_transposition_compiles_without_a_gpu():
    pytest.importorskip("cuda.core")
    assert nvrtc.compile_cubin(nvrtc.source("matmul/transpose.cu"), "sm_90", TILE)[:4] == b"\x7fELF"


def test_derivatives_of_a_linear_layer(monkeypatch):
    monkeypatch.setattr(gemm, "transposed", lambda x, zeroed=None: x.T.contiguous())
    monkeypatch.setattr(gemm, "_is_faster_transposed", lambda *_: True)
    torch.manual_seed(0)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (5, 4), (5,))]
    grad = torch.randn(2, 3, 5, dtype=torch.float64)
    want = torch.autograd.grad(F.linear(*inputs), inputs, grad)
    for ours, right in zip(torch.autograd.grad(gemm._Transposing.apply(*inputs), inputs, grad), want, strict=True):
        assert (ours - right).abs().max() < 1e-14
    assert torch.autograd.gradgradcheck(gemm._Transposing.apply, inputs)
    together = torch.autograd.grad(
        gemm._Transposing.apply(*inputs), inputs, torch.stack((grad, -grad)), is_grads_batched=True
    )
    for ours, right in zip(together, want, strict=True):
        assert (ours - torch.stack((right, -right))).abs().max() < 1e-14


@pytest.mark.parametrize("rows", [5, 200])
def test_gradient_of_a_weight_without_the_zeroed_rows(rows):
    grad, x = torch.randn(rows, 7, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)
    zeroed = torch.rand(rows) < 0.5
    x[zeroed] = torch.nan
    want = grad[~zeroed].T @ x[~zeroed]
    assert (gemm.gradient_of_weight(grad, x, zeroed) - want).abs().max() < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (130, 31), (33, 257), (1000, 64), (4096, 1000)])
def test_transposition(shape):
    x = torch.randn(shape, device="cuda")
    assert torch.equal(gemm.transposed(x), x.T)
    assert torch.equal(gemm.transposed(x.T), x)
    zeroed = torch.rand(2 * len(x), device="cuda").lt(0.3)[::2]
    assert torch.equal(gemm.transposed(x, zeroed), torch.where(zeroed, 0.0, x.T))
    assert torch.equal(gemm.transposed(x / 0, zeroed).isfinite().all(0), zeroed)


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


@pytest.mark.parametrize(("inputs", "outputs"), [(256, 10), (10, 256)])
def test_products_too_large_to_be_a_convolution_are_none(inputs, outputs, monkeypatch):
    called = []
    monkeypatch.setattr(convolution, "_is_amd", lambda: True)
    monkeypatch.setattr(F, "linear", lambda *_: called.append("linear"))
    monkeypatch.setattr(F, "conv2d", lambda *_: called.append("conv2d") or torch.zeros(0))
    number = torch.zeros(1)
    for rows in (2**23, 2**23 + 1):  # of one number in memory
        with contextlib.suppress(RuntimeError):  # the stand-in's result has another shape
            gemm.linear(number.expand(rows, inputs), number.expand(outputs, inputs))
    assert called == ["conv2d", "linear"]


@pytest.fixture
def by_convolution(monkeypatch):
    """Whatever the processor and the size; the list grows with each product that was a convolution."""
    calls, conv2d = [], F.conv2d
    monkeypatch.setattr(convolution, "_is_amd", lambda: True)
    monkeypatch.setattr(convolution, "LEAST_ROWS", 1)
    monkeypatch.setattr(F, "conv2d", lambda *args: calls.append(args) or conv2d(*args))
    return calls


@pytest.mark.parametrize("layout", ["contiguous", "time-major", "channels apart", "part of a row", "packed"])
@pytest.mark.parametrize(
    ("batch", "length", "channels", "width"),
    [(1, 1, 1, 1), (1, 7, 3, 5), (2, 150, 1, 2), (1, 5, 300, 1), (2, 129, 33, 17), (21, 5, 16, 48), (1, 1031, 65, 130)],
)
def test_a_product_by_convolution(by_convolution, batch, length, channels, width, layout):
    torch.manual_seed(0)
    x = strided(torch.randn(batch, length, channels), layout)
    x = (x.flatten(0, 1) if layout == "packed" else x).requires_grad_()
    weight = torch.randn(channels, width).t().requires_grad_()
    bias = torch.randn(width).requires_grad_() if layout != "packed" else None
    inputs = [y for y in (x, weight, bias) if y is not None]
    got = gemm.linear(*inputs)
    assert len(by_convolution) == 1
    assert got.is_contiguous()
    exact = [y.detach().double().requires_grad_() for y in inputs]
    expected = F.linear(*exact)
    grad = torch.randn_like(got)
    found = got, *torch.autograd.grad(got, inputs, grad)
    for y, z in zip(found, (expected, *torch.autograd.grad(expected, exact, grad.double())), strict=True):
        assert_close(y, z.float(), 1e-6)
    with torch.no_grad():
        assert torch.equal(gemm.linear(*inputs), got)


@pytest.mark.parametrize("rows", [2049, 2304 + 3, 5631])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_of_rows_that_are_not_round_is_one_of_parts(by_convolution, rows, bias):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in [(3, rows // 3, 5), (7, 5), (7,)][: 2 + bias]]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, expected = gemm.linear(*inputs), F.linear(*exact)
    assert {x.shape[3] for x, *_ in by_convolution} <= set(convolution.PARTS)
    assert_close(got, expected.float(), 3e-6)
    grad = torch.randn_like(got)
    first, second = (
        torch.autograd.grad(y, leaves, g, create_graph=True)
        for y, leaves, g in [(got, inputs, grad), (expected, exact, grad.double())]
    )
    for y, z in zip(first, second, strict=True):
        assert_close(y.detach(), z.detach().float(), 3e-6)
    again = [
        torch.autograd.grad(sum(y.square().sum() for y in grads[:2]), leaves[:2])
        for grads, leaves in [(first, inputs), (second, exact)]
    ]
    for y, z in zip(*again, strict=True):
        assert_close(y, z.float(), 1e-5)
    together = torch.autograd.grad(gemm.linear(*inputs), inputs, torch.stack((grad, 2 * grad)), is_grads_batched=True)
    for y, z in zip(together, first, strict=True):
        assert_close(y[1], 2 * z.detach(), 3e-6)
    with torch.no_grad():
        assert torch.equal(gemm.linear(*inputs), got)


def test_the_error_of_a_biass_gradient_does_not_grow_with_the_rows(by_convolution):
    x, weight, bias = torch.randn(1 << 17, 3), torch.randn(16, 3), torch.zeros(16, requires_grad=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # one would take MKL
    (0.3 * gemm.linear(x, weight, bias)).sum().backward()
    torch.set_num_threads(threads)
    assert len(by_convolution) == 1
    torch.testing.assert_close(bias.grad, torch.full((16,), 0.3 * (1 << 17)), rtol=1e-6, atol=0)


def test_changing_numbers_of_rows_are_few_to_the_convolution(by_convolution):
    weight = torch.ones(1, 1)
    for rows in range(2048, 20480, 16 * 7):
        gemm.linear(torch.ones(rows, 1), weight)
    assert len({x.shape[3] for x, *_ in by_convolution}) <= len(convolution.PARTS) + 40


def growth(pipe):
    """By how much this process grows, in MB, when it trains MinGRU(256) on sequences of changing lengths."""
    random.seed(0)
    torch.set_num_threads(2)  # one takes no oneDNN
    layer = ostinato.MinGRU(256, 256)

    def resident(steps):
        for length in random.choices(range(1030, 2000), k=steps):
            layer.zero_grad()
            layer(torch.randn(length, 2, 256))[0].square().mean().backward()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    resident(2)
    pipe.send(-resident(2) + resident(20))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_training_on_changing_lengths_leaves_little_memory(processes):
    """Above 80 MB when each length was a convolution of its own."""
    ours, theirs = processes.context.Pipe()
    processes.apart(growth, theirs)
    theirs.close()  # or nobody would notice that the process has failed
    assert ours.recv() < 60


def test_a_product_by_convolution_keeps_what_is_not_finite_or_tiny_in_its_row(by_convolution):
    torch.manual_seed(0)
    x, weight = torch.rand(200, 37), torch.rand(19, 37) + 2
    expected = F.linear(x, weight)
    special = {3: math.nan, 5: math.inf, 190: -math.inf, 199: 3.4e38}
    for row, value in special.items():
        x[row, row % 37] = value
    x[100] = 1e-40
    got = gemm.linear(x, weight)
    assert len(by_convolution) == 1
    others = [row for row in range(200) if row not in special and row != 100]
    assert_close(got[others], expected[others], 1e-6)
    exact = x.double() @ weight.double().t()
    assert same_bits(got[list(special)], exact[list(special)].float(), equal_nan=True)
    assert_close(got[100] * 1e38, exact[100].float() * 1e38, 1e-4)


@pytest.mark.parametrize("why", ["float64", "few rows", "no rows", "autocast", "oneDNN is off", "another processor"])
def test_other_products_are_torchs(by_convolution, monkeypatch, why):
    torch.manual_seed(0)
    inputs = torch.randn(0 if why == "no rows" else 200, 16), torch.randn(24, 16), torch.randn(24)
    if why == "float64":
        inputs = tuple(y.double() for y in inputs)
    monkeypatch.setattr(convolution, "LEAST_ROWS", 201 if why == "few rows" else 1)
    monkeypatch.setattr(convolution, "_is_amd", lambda: why != "another processor")
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", why != "oneDNN is off")
    with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
        got, expected = gemm.linear(*inputs), F.linear(*inputs)
    assert not by_convolution
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "channels", "width"), [(3000, 333, 999), (2000, 650, 2600), (5000, 1030, 1031)])
def test_products_of_rows_that_begin_anywhere(rows, channels, width, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    monkeypatch.setattr(gemm, "LARGE", 1)
    padded, pad = [], F.pad
    monkeypatch.setattr(F, "pad", lambda *args: padded.append(args) or pad(*args))
    torch.manual_seed(0)
    x, weight = (torch.randn(n, channels, device="cuda").to(dtype) for n in (rows, width))
    bias, zeroed = torch.randn(width, device="cuda").to(dtype), torch.rand(rows, device="cuda") < 0.3
    more = torch.randn(rows, width + channels, device="cuda").to(dtype)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-3}[dtype]
    for grad in (more[:, channels:], more[:, :width], more[:, :width].contiguous()):
        with torch.no_grad():
            found = (
                gemm.linear(x, weight, bias),
                gemm.linear(x[:, None], weight),
                gemm.gradient_of_input(grad, weight),
                gemm.gradient_of_weight(grad, x),
                gemm.gradient_of_weight(grad, x, zeroed),
            )
        assert padded
        exact = x.double(), weight.double(), grad.double()
        product = exact[0] @ exact[1].T
        expected = (
            *(product + bias, product[:, None], exact[2] @ exact[1], exact[2].T @ exact[0]),
            exact[2][~zeroed].T @ exact[0][~zeroed],
        )
        for y, z in zip(found, expected, strict=True):
            assert y.is_contiguous()
            assert y.shape == z.shape
            assert (y.double() - z).norm() < tolerance * z.norm()
    leaves = [y.requires_grad_() for y in (x, weight, bias)]
    exact = [y.detach().double().requires_grad_() for y in leaves]
    grads = torch.autograd.grad(gemm.linear(*leaves), leaves, grad)
    for y, z in zip(grads, torch.autograd.grad(F.linear(*exact), exact, grad.double()), strict=True):
        assert (y.double() - z).norm() < tolerance * z.norm()
