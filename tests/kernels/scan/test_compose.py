"""The kernel that composes steps, against the states of a float64 scan."""

import pytest
import torch

import ostinato
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.scan.cuda import compose

TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("vector", "lanes"), [(1, 1), (1, 32), (2, 16), (4, 32)])
def test_it_compiles(dtype, vector, lanes):
    pytest.importorskip("cuda.core")
    code, definitions = nvrtc.source("scan/cuda/compose.cu"), dict(compose.macros(dtype, vector, lanes))
    assert nvrtc.compile_cubin(code, "sm_80", definitions)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(1, 1024, 256), (2, 70_001, 33), (3, 5000, 2), (1, 100_000, 1), (1, 1, 8)])
def test_it_gives_what_the_states_show(shape, reverse, dtype):
    torch.manual_seed(0)
    a = torch.rand(shape, dtype=torch.float64, device="cuda").mul_(2 / shape[1]).sub_(1 / shape[1]).add_(1)
    b = torch.randn(shape, dtype=torch.float64, device="cuda")
    h = torch.randn(shape[0], shape[2], device="cuda").double()
    resets = torch.rand(shape[:2], device="cuda") < 1 / shape[1]
    for mask, before in ((None, False), (resets, False), (None, True)):
        expected = ostinato.linear_scan(a, a * b if before else b, h, resets=mask, reverse=reverse)[1]
        P, L = compose.compose(a.to(dtype), b.to(dtype), mask, reverse=reverse, before=before)
        error = (P * h + L - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[dtype] * max(1, shape[1] / 1000) ** 0.5


@pytest.mark.gpu
def test_what_vanishes_in_the_dtype_is_zero():
    a = torch.full((1, 6000, 4), 0.98, device="cuda")
    assert not compose.compose(a, a)[0].any()
    assert compose.compose(a.double(), a.double())[0].all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_state_passes_through_the_parts(reverse, dtype):
    message = torch.randn(5, 2 * 6 + 3, dtype=torch.float64, device="cuda")  # of five parts, with something else in it
    P, L = message[:, :6].view(5, 2, 3), message[:, 6:12].view(5, 2, 3)
    start = torch.randn(2, 3, device="cuda").to(dtype)
    state, states = start.double(), {}
    for part in reversed(range(5)) if reverse else range(5):
        states[part] = state
        state = P[part] * state + L[part]
    for part in range(5):
        before, last = compose.pass_on(P, L, start, part, reverse)
        torch.testing.assert_close(before, states[part].to(dtype))
        torch.testing.assert_close(last, state.to(dtype))
