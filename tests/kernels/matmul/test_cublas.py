"""Products by cuBLAS whose precision is an argument, against float64."""

import ctypes
import itertools
import subprocess
import sys

import pytest
import torch

from comparisons import same_bits
from ostinato.kernels.matmul import cublas
from threads import in_threads

SHAPES = [(1, 1, 1), (5, 3, 2), (33, 257, 130), (512, 96, 1024), (2000, 64, 7), (4096, 512, 256)]  # M, K, N


def test_what_cublas_writes_has_its_size():
    assert ctypes.sizeof(cublas._Algorithm) == 96


DESTROYED = """
import threading
from ostinato.kernels.matmul import cublas

class Library:
    def __getattr__(self, name):
        def call(*args):
            if "Destroy" in name:
                print("destroyed", flush=True)
            elif "Heuristic" in name:
                args[-1]._obj.value = 1
            return 0
        return call

library = Library()
cublas._library, cublas._handle = lambda: library, lambda: 0
layout = cublas._Layout(2, 2, False, 2)

def keep():
    cublas._thread.products["kept"] = cublas._Product(layout, layout, 16, False, True)
    kept.set()
    threading.Event().wait()

kept = threading.Event()
threading.Thread(target=keep, daemon=True).start()  # alive to the end, as autograd's
kept.wait()
cublas._Product(layout, layout, 16, False, True)
print("end", flush=True)
"""


def test_what_was_created_is_destroyed_but_not_as_the_interpreter_ends():
    """Then calls of ctypes now and then aborted the process."""
    run = subprocess.run([sys.executable, "-c", DESTROYED], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["destroyed"] * 6 + ["end"]  # a description, four layouts and a preference


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


def layouts(*shape):
    """A matrix of this shape, in several ways in memory."""
    rows, columns = shape
    yield torch.randn(shape, device="cuda")
    yield torch.randn(columns, rows, device="cuda").T
    yield torch.randn(rows, columns + 3, device="cuda")[:, 3:]  # begins at no multiple of 16 bytes
    yield torch.randn(columns + 1, 2 * rows, device="cuda")[1:, :rows].T
    yield torch.randn(rows, 2 * columns, device="cuda")[:, ::2]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape):
    torch.manual_seed(0)
    rows, summed, columns = shape
    bias = torch.randn(columns, device="cuda")
    for n, (a, b) in enumerate(itertools.product(layouts(rows, summed), layouts(summed, columns))):
        exact, before = a.double() @ b.double(), torch.randn(rows, columns, device="cuda")
        for tf32, most in ((False, 1e-6), (True, 1e-3)):
            results = []
            for _ in range(2):
                onto = before.clone()
                results.append([cublas.multiply(a, b, tf32=tf32), cublas.multiply(a, b, bias, tf32=tf32), onto])
                assert cublas.multiply(a, b, out=onto, accumulate=True, tf32=tf32) is onto
            assert same_bits(*results)
            y, biased, onto = results[0]
            assert error(y, exact) < most
            assert error(biased, exact + bias) < most
            assert error(onto, exact + before) < most
            if tf32 and n == 0 and min(shape) > 32:  # other layouts may have no kernel that rounds
                assert error(y, exact) > 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [True, False])
def test_pytorchs_switch_does_not_matter(allowed, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    a, b = torch.randn(2, 512, 512, device="cuda")
    exact = a.double() @ b.double()
    for tf32, least, most in ((False, 0, 1e-6), (True, 1e-5, 1e-3)):
        assert least <= error(cublas.multiply(a, b, tf32=tf32), exact) < most
    assert torch.backends.cuda.matmul.allow_tf32 == allowed


@pytest.mark.gpu
def test_in_several_threads_and_in_a_graph():
    torch.manual_seed(0)
    pairs = [(torch.randn(300, 64 + i, device="cuda"), torch.randn(64 + i, 90, device="cuda")) for i in range(4)]
    bias, wrong = torch.randn(90, device="cuda"), []

    def run(a, b):
        exact = a.double() @ b.double() + bias
        for _ in range(50):
            if error(cublas.multiply(a, b, bias, tf32=True), exact) > 1e-3:
                wrong.append(a.shape)

    in_threads(run, *zip(*pairs, strict=True))
    assert not wrong

    a, b = pairs[0]
    cublas.multiply(a, b, bias, tf32=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cublas.multiply(a, b, bias, tf32=True)
    a.copy_(torch.randn_like(a))
    y.zero_()
    graph.replay()
    assert error(y, a.double() @ b.double() + bias) < 1e-3


@pytest.mark.gpu
def test_what_is_prepared_is_bounded(monkeypatch):
    monkeypatch.setattr(cublas, "_MOST_PREPARED", 3)
    for rows in range(1, 12):
        a, b = torch.randn(rows, 40, device="cuda"), torch.randn(40, 50, device="cuda")
        assert error(cublas.multiply(a, b, tf32=False), a.double() @ b.double()) < 1e-6
    assert len(cublas._thread.products) <= 3
