"""Compiling CUDA kernels, and keeping what was compiled."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import pytest
import torch

from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.scan import choose_backend


def test_compiler_errors_are_reported():
    pytest.importorskip("cuda.core")
    with pytest.raises(RuntimeError, match="undefined"):
        nvrtc.compile_cubin('extern "C" __global__ void f() { undefined_name(); }', "sm_90", {})


def test_a_gpu_without_the_packages_it_needs_is_told_of(monkeypatch):
    def version(package):
        if package == "cuda-core":
            raise metadata.PackageNotFoundError
        return "13.0"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(metadata, "version", version)
    missing = r"the package cuda-core is missing; pip install 'ostinato\[cuda\]'$"
    choose_backend.cache_clear()
    with pytest.warns(UserWarning, match=rf"^layers and scans run in PyTorch's operations on this GPU: {missing}"):
        assert choose_backend("auto", "cuda") is choose_backend("torch", "cuda")
    choose_backend.cache_clear()


FIRST_CALL = """
import time, torch, ostinato
torch.manual_seed(0)
a = torch.rand(2, 100, 64, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
h, _ = ostinato.linear_scan(a, a)
torch.cuda.synchronize()
print(time.perf_counter() - start, h.double().sum().item())
"""


@pytest.mark.gpu
def test_compiled_kernels_are_kept_and_mended(tmp_path, monkeypatch):
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path))

    def first_call():
        output = subprocess.run(
            [sys.executable, "-c", FIRST_CALL],
            capture_output=True,
            text=True,
            check=True,
        )
        return [float(word) for word in output.stdout.split()]

    cold, result = first_call()
    (cubin,) = (tmp_path / "ostinato").iterdir()
    whole = cubin.read_bytes()
    warm, again = first_call()
    assert again == result
    print(f"first call: {cold:.2f} s cold, {warm:.2f} s warm")
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + b"\0"):
        cubin.write_bytes(damaged)
        assert first_call()[1] == result
        assert cubin.read_bytes() == whole
    monkeypatch.setenv("OSTINATO_CACHE_DIR", "/dev/null/nowhere")
    assert first_call()[1] == result


def compile_at_once():
    together = threading.Barrier(4)

    def compiled(k):
        together.wait()
        return nvrtc.compile_cubin(f'extern "C" __global__ void kernel{k}() {{}}', "sm_90", {})[:4]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(compiled, range(4))) == [b"\x7fELF"] * 4


def test_threads_may_compile_a_process_s_first_kernels_at_once(processes):
    pytest.importorskip("cuda.core")
    process = processes.apart(compile_at_once)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    ("compiler", "installed", "most"),
    [("12.0", 13000, 4096), ("12.1", 12010, 32764), ("13.0", 12000, 4096), ("13.0", 13000, 32764)],
)
def test_kernels_may_have_more_parameters_since_cuda_12_1(compiler, installed, most, monkeypatch):
    driver = pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(torch.version, "cuda", compiler)
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (driver.CUresult.CUDA_SUCCESS, installed))
    assert nvrtc.most_parameter_bytes.__wrapped__() == most
