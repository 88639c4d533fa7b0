"""Kernels of a first training step that are compiled at the same time, rather than one after the other."""

import threading
from types import SimpleNamespace

import pytest
import torch

import ostinato
from ostinato.kernels import cache
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.recurrence.linear import cuda
from ostinato.kernels.recurrence.linear import layer as layer_scan
from ostinato.kernels.recurrence.linear import operator as linear_recurrence
from ostinato.kernels.recurrence.nonlinear import cuda as steps_cuda
from ostinato.kernels.recurrence.nonlinear import operator as nonlinear
from ostinato.kernels.scan import operators as scan_operators
from ostinato.kernels.scan.cuda import launch, problem, scans
from ostinato.kernels.scan.cuda.heuristics.criteria import Device

CACHED = (
    launch._choose_kernel,
    launch._prepare,
    scans._prepare_scan,
    cuda._prepare_layer,
    steps_cuda._compile_ahead,
)


@pytest.fixture
def asked(monkeypatch):
    """Calls of the CUDA backend with tensors on the CPU: what is compiled ahead, and what is loaded; nothing runs."""
    ahead, loaded = [], []
    kernel = SimpleNamespace(prepared=lambda *_, **__: lambda *_: None, launch=lambda *_, **__: None)

    def load_kernel(name, code, macros, device):
        loaded.append((code, tuple(macros)))
        return kernel

    for prepared in CACHED:
        prepared.cache_clear()  # of other tests, and for them
    monkeypatch.setattr(nvrtc, "load_kernel", load_kernel)
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda code, macros, device: ahead.append((code, tuple(macros))))
    monkeypatch.setattr(problem, "describe_device", lambda index: Device(132, 4.9e12, 227 << 10, 228 << 10))
    monkeypatch.setattr(scan_operators, "choose_backend", lambda *_: scans)
    monkeypatch.setattr(scans, "prepare_linear_scan", lambda *_: None)  # which allocates on a GPU
    for module in (layer_scan, linear_recurrence):
        monkeypatch.setattr(module, "kernels_on", lambda *_: cuda)
    monkeypatch.setattr(nonlinear, "nonlinear_kernels_on", lambda *_: steps_cuda)
    yield ahead, loaded
    for prepared in CACHED:
        prepared.cache_clear()


def uniform(*shape, dtype=torch.float32):
    return torch.rand(shape, dtype=dtype).requires_grad_()


@ostinato.recurrence
def gated(x, z, u):
    return torch.sigmoid(z + u), x * (1 - torch.sigmoid(z))


@ostinato.recurrence
def nonlinear_gated(h, x, u):
    return torch.tanh(x + u * h)


CALLS = {
    "linear_scan": lambda: ostinato.linear_scan(uniform(300, 9, 40), uniform(300, 9, 40), uniform(300, 40)),
    "reversed": lambda: ostinato.linear_scan(*uniform(2, 300, 9, 40, dtype=torch.bfloat16), reverse=True),
    "packed": lambda: ostinato.linear_scan(
        *uniform(2, 1, 99, 4096), cu_seqlens=torch.tensor([0, 9, 99], dtype=torch.int32)
    ),
    "along time": lambda: ostinato.linear_scan(*uniform(2, 300, 40, 9).mT),
    "short": lambda: ostinato.linear_scan(*uniform(2, 6000, 12, 3)),
    "short from a state": lambda: ostinato.linear_scan(*uniform(2, 6000, 12, 3), uniform(6000, 3)),
    "log_linear_scan": lambda: ostinato.log_linear_scan(*uniform(2, 300, 9, 40), resets=torch.ones(300, 9) > 0),
    "a recurrence": lambda: gated(*uniform(2, 300, 9, 40), uniform(40)),
    "MinGRU": lambda: ostinato.MinGRU(3, 40, bidirectional=True)(torch.rand(9, 300, 3)),
    "MinLSTM in 16 bits": lambda: ostinato.MinLSTM(3, 41, dtype=torch.bfloat16)(torch.rand(9, 300, 3).bfloat16()),
    "a recurrence in one chunk": lambda: nonlinear_gated(uniform(300, 9, 400), uniform(400)),
    "a recurrence in chunks": lambda: nonlinear_gated(uniform(3, 999, 40), uniform(40), resets=torch.ones(3, 999) > 0),
    "ParaGRU": lambda: ostinato.ParaGRU(3, 40)(torch.rand(999, 3, 3)),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_gradient_needs_is_compiled_beside_the_forward(asked, call):
    ahead, loaded = asked
    output, _ = CALLS[call]()
    first, forward = loaded[0], set(loaded)
    loaded.clear()
    output.sum().backward()
    assert loaded
    assert first not in ahead
    assert set(ahead) == (forward | set(loaded)) - {first}
    assert len(set(ahead)) == len(ahead)


def test_a_scans_kernels_are_chosen_once(asked, monkeypatch):
    """A gradient's is asked for ahead of it, and by it."""
    chosen, macros = [], launch.macros
    monkeypatch.setattr(launch, "macros", lambda *args, **options: chosen.append(args[0]) or macros(*args, **options))
    output, _ = CALLS["linear_scan"]()
    output.sum().backward()
    assert sorted(chosen) == ["LinearScan", "LinearScanBackward"]


@pytest.mark.parametrize("call", ["linear_scan", "MinGRU", "ParaGRU"])
def test_nothing_else_is_compiled_ahead(asked, call):
    ahead, loaded = asked
    with torch.no_grad():
        CALLS[call]()
    assert set(ahead) == set(loaded) - {loaded[0]}
    ahead.clear()
    with torch.no_grad():
        CALLS[call]()
    assert ahead == []


def test_what_is_compiled_ahead_is_found_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    begun, go_on, compiled = threading.Event(), threading.Event(), []

    def compile_cubin(*args):
        begun.set()
        assert go_on.wait(20)
        compiled.append(args)
        return b"machine code"

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    nvrtc.compile_ahead("code", (("A", 1), ("B", 2)), 0)
    assert begun.wait(20)  # while this thread goes on
    go_on.set()
    assert nvrtc.cached_cubin("code", "sm_90", {"A": 1, "B": 2}) == b"machine code"
    assert compiled == [("code", "sm_90", {"A": 1, "B": 2})]
    kept = {file.suffix for file in cache._folder().iterdir()} - {".lock"}  # which the other thread may still hold
    assert kept == {".cubin"}


def test_what_cannot_be_compiled_ahead_says_so_when_it_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def compile_cubin(*_):
        raise nvrtc.DoesNotCompile("a log")

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    nvrtc.compile_ahead("code", (), 0)
    with pytest.raises(nvrtc.DoesNotCompile, match="a log"):
        nvrtc.cached_cubin("code", "sm_90", {})
