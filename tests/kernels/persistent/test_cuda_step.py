"""The kernel of one step of an RNN, GRU or LSTM layer, against torch's cells in float64."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn

import ostinato
from gpus import ARCHITECTURES
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.persistent.cuda import step as cuda_step
from ostinato.kernels.persistent.plan import GATES

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SIZES = (  # sequences, inputs, units
    *((1, 33, 5), (1, 256, 256), (3, 6, 34), (8, 600, 130), (2, 1030, 516)),
    *((9, 33, 5), (64, 24, 40), (37, 130, 66)),
)


def tensors(cell, batch, inputs, units, dtype, bias=True):
    """An input, states and weights on the CPU."""
    states = [torch.randn(batch, units).to(dtype) for _ in range(1 + (cell == "lstm"))]
    rows = GATES[cell] * units
    shapes = [(rows, inputs), (rows, units), (rows,), (rows,)]
    weights = [torch.randn(shape).div(units**0.5).to(dtype) for shape in (shapes if bias else shapes[:2])]
    return torch.randn(batch, inputs).to(dtype), states, weights


def on_gpu(cell, x, states, weights):
    """The output and the next states, by the kernel, of states that may be absent."""
    (batch, inputs), hidden = x.shape, weights[1].shape[1]
    x, states, weights = x.cuda(), [s[None].cuda() for s in states], [w.cuda() for w in weights]
    step = cuda_step.step_of(cell, x.dtype, hidden, inputs, batch, None, None, None)
    run = cuda_step.StepOfLayers([step], x, (1, batch, hidden), 1 + (cell == "lstm"))
    output, new = run(x, states, weights)
    return [output, *(s[0] for s in new)]


@pytest.mark.parametrize("cell", GATES)
def test_compiles_without_a_gpu(cell):
    pytest.importorskip("cuda.core")
    for architecture, dtype, sizes in zip(ARCHITECTURES, TOLERANCE, SIZES, strict=False):
        macros = dict(cuda_step.macros(dtype, *sizes))
        assert nvrtc.compile_cubin(cuda_step.source(cell), architecture, macros)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cell", GATES)
def test_against_float64(cell, dtype):
    torch.manual_seed(0)
    for sizes, (bias, given) in itertools.product(SIZES, ((True, True), (False, True), (True, False))):
        x, states, weights = tensors(cell, *sizes, dtype, bias)
        wide, exact = (
            [s.double() if given else torch.zeros_like(s).double() for s in states],
            getattr(torch, f"{cell}_cell"),
        )
        right = exact(x.double(), wide if cell == "lstm" else wide[0], *(w.double() for w in weights))
        right = right if cell == "lstm" else (right,)
        got, again = (on_gpu(cell, x, states if given else (), weights) for _ in range(2))
        for one, two, expected in zip(got, again, (right[0], *right), strict=True):
            assert torch.equal(one, two)
            assert (one.cpu().double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_layers_take_it(cell, monkeypatch):
    torch.manual_seed(0)
    calls, launch = [], cuda_step.StepOfLayers.__call__
    monkeypatch.setattr(cuda_step.StepOfLayers, "__call__", lambda *args: calls.append(1) or launch(*args))
    layer, exact = (getattr(module, cell)(33, 40, 3).double() for module in (ostinato, nn))
    exact.load_state_dict(layer.state_dict())
    layer, x = layer.cuda(), torch.randn(20, 2, 33, dtype=torch.float64)
    (whole, last), state = exact(x), None
    with torch.no_grad():
        for t, y in enumerate(x.cuda()):
            output, state = layer.step(y, state) if t % 2 else layer(y[None], state)
            torch.testing.assert_close(output.view(2, -1).cpu(), whole[t].detach())
        unbatched = layer.step(x[0, 0].cuda())[0]
    torch.testing.assert_close(unbatched.cpu(), whole[0, 0].detach())
    for one, other in zip(*((s if cell == "LSTM" else [s]) for s in (state, last)), strict=True):
        torch.testing.assert_close(one.cpu(), other.detach())
    assert len(calls) == 21
    assert layer.step(y, state)[0].requires_grad
    assert len(calls) == 22
    layer.step(torch.randn(9, 33, dtype=torch.float64, device="cuda"))
    assert len(calls) == 23
    layer.step(torch.randn(100_000, 33, dtype=torch.float64, device="cuda"))
    assert len(calls) == 23
    ostinato.prune(layer, 0.5)
    with torch.no_grad():
        layer.step(y, state)
    assert len(calls) == 24


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_in_a_stepper(cell, frozen, batch):
    torch.manual_seed(0)
    layer = ostinato.prune(getattr(ostinato, cell)(33, 40, 3), 0.5).double().cuda()
    x = torch.randn(20, batch, 33, dtype=torch.float64, device="cuda")
    stepper = ostinato.Stepper(layer, batch, frozen=frozen)
    assert hasattr(layer, "mask_hh_l0")
    whole = getattr(nn, cell)(33, 40, 3, dtype=torch.float64)
    whole.load_state_dict({k: v for k, v in layer.state_dict().items() if "mask" not in k})
    torch.testing.assert_close(torch.stack([stepper(y) for y in x]).cpu(), whole(x.cpu())[0].detach())


@pytest.mark.gpu
def test_the_first_use_of_cublas_is_in_a_captured_step():
    code = (
        "import torch, ostinato; x = torch.randn(4000, 64, device='cuda'); layer = ostinato.GRU(64, 64, device='cuda')"
    )
    code += "; assert ostinato.Stepper(layer, 4000)(x).isfinite().all()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
