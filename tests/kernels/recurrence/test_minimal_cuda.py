"""The CUDA kernels of minimal layers against the float64 reference: whole sequences and single steps."""

import copy
import itertools

import pytest
import torch

import ostinato
from gpus import ARCHITECTURES
from minimal_layers import GATES, layer, layer_backward
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.recurrence.linear import cuda as recurrence_cuda
from ostinato.minimal.recurrences import recurrence_of
from scan_kernels import TOLERANCE, assert_close, force, gpu, relative_error


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", ["chosen", "streaming", "chained", "one warp"])
@pytest.mark.parametrize("candidate", ["positive", "linear", "tanh"])
@pytest.mark.parametrize("cell", ["mingru", "minlstm"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_layers_match_the_reference(dtype, cell, candidate, geometry, nan_memory, monkeypatch):
    force(monkeypatch, geometry)
    torch.manual_seed(0)
    gates = GATES[cell]
    lengths = torch.tensor([4, 4, 3, 2, 2, 1])
    offsets = torch.cat((torch.tensor([0]), lengths.cumsum(0))).int()
    for batch, steps, channels in ((1, 1, 4), (4, 6, 33), (2, 300, 64), (3, 70, 5)):
        for layout, directions, with_bias in (("batch", 1, True), ("time", 2, True), ("offsets", 2, False)):
            batch = 4 if layout == "offsets" else batch
            rows = {"batch": (batch, steps), "time": (steps, batch), "offsets": (int(offsets[-1]),)}[layout]
            pre = (2 * torch.randn(*rows, directions * gates * channels)).to(dtype)
            bias = torch.randn(directions * gates * channels, dtype=torch.promote_types(dtype, torch.float32))
            bias = bias if with_bias else None
            h0, grad_last = (torch.randn(directions, batch, channels).to(dtype) for _ in range(2))
            grad = torch.randn(*rows, directions * channels).to(dtype)
            bounds = offsets if layout == "offsets" else None
            settings = (cell, candidate, layout == "batch", directions)
            wide = [z if z is None else z.double() for z in (pre, bias, h0)]
            want = layer("reference", *wide, bounds, *settings)
            on_gpu = None if bounds is None else bounds.cuda()
            got = layer("cuda", *gpu(pre, bias, h0), on_gpu, *settings)
            assert_close(got, want, TOLERANCE[dtype])
            arguments = (pre, bias, h0, want[0].to(dtype), grad, grad_last)
            wide = [z if z is None else z.double() for z in arguments]
            want = layer_backward("reference", *wide, bounds, *settings)
            got = layer_backward("cuda", *gpu(*arguments), on_gpu, *settings)
            assert_close(got, want, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [ostinato.MinGRU, ostinato.MinLSTM])
def test_compiled_captured_exported_and_autocast_agree(cell):
    torch.manual_seed(0)
    module = cell(16, 24, num_layers=2, batch_first=True).cuda()
    x = torch.randn(3, 50, 16, device="cuda")
    want, last = module(x)
    compiled = torch.compile(module, fullgraph=True)
    assert relative_error(compiled(x)[0], want.cpu()) < 1e-5
    gradients = []
    for run in (module, compiled):
        module.zero_grad()
        run(x)[0].square().sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
    for p, q in zip(*gradients, strict=True):
        assert relative_error(q, p.cpu()) < 1e-4
    exported = torch.export.export(module, (x,)).module()
    assert relative_error(exported(x)[0], want.cpu()) < 1e-5
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half, _ = module(x)
    assert half.dtype == torch.bfloat16
    assert relative_error(half, want.cpu()) < 2e-2
    with torch.no_grad():
        graph, h = torch.cuda.CUDAGraph(), last.clone()
        step_input = x[:, 0].clone()
        for _ in range(3):
            module.step(step_input, h)
        with torch.cuda.graph(graph):
            _, after = module.step(step_input, h)
            whole, _ = module(x)
        h.zero_()
        for t in range(50):
            step_input.copy_(x[:, t])
            graph.replay()
            h.copy_(after)
    assert relative_error(h, last.cpu()) < 1e-5
    assert torch.equal(whole, want)


@pytest.mark.parametrize("cell", GATES)
def test_steps_compile_without_a_gpu(cell):
    pytest.importorskip("cuda.core")
    for architecture, dtype, (batch, inputs) in zip(
        ARCHITECTURES, nvrtc.SCALARS, ((1, 64), (3, 33), (20, 6)), strict=False
    ):
        recurrence = recurrence_of(cell, "positive", False)
        code, definitions = (
            recurrence_cuda.step_source(recurrence),
            recurrence_cuda.step_macros(recurrence, dtype, batch, inputs),
        )
        assert nvrtc.compile_cubin(code, architecture, dict(definitions))[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cell", [ostinato.MinGRU, ostinato.MinLSTM])
def test_single_steps(cell, dtype):
    torch.manual_seed(0)
    settings = ("positive", True, True), ("linear", False, True), ("tanh", True, False)
    few = itertools.product((1, 3, 8, 9, 20), (1, 6, 33, 256), (5, 130))
    for batch, inputs, hidden in (*few, (33, 1024, 1024)):  # of the last, products are cuBLAS's
        candidate, bias, given = settings[(batch + hidden) % 3]
        module = cell(inputs, hidden, bias=bias, candidate=candidate, device="cuda", dtype=dtype)
        x = torch.randn(batch, inputs + 1, dtype=dtype, device="cuda")[:, 1:]
        x = x if inputs == 6 else x.flatten()[: batch * inputs].view(batch, inputs)
        h = torch.rand(1, batch, hidden, dtype=dtype, device="cuda") if given else None
        exact = copy.deepcopy(module).double().cpu()
        want = exact.step(x.double().cpu(), None if h is None else h.double().cpu())[0].detach()
        with torch.no_grad():
            for _ in range(2):  # checked, then remembered
                y, after = module.step(x, h)
                assert torch.equal(y[None], after)
                assert relative_error(y, want) < TOLERANCE[dtype]
            row, after = module.step(x[-1], None if h is None else h[:, -1])
            assert torch.equal(row[None], after)
            assert relative_error(row, want[-1]) < TOLERANCE[dtype]
            module.weight_ih_l0.data = module.weight_ih_l0.t().contiguous().t()
            assert relative_error(module.step(x, h)[0], want) < TOLERANCE[dtype]
            module.weight_ih_l0.data.zero_()
            assert relative_error(module.step(x, h)[0], want) > 1e-2
