"""The threads that run the CPU's loops: PyTorch's or our own, one or many, and after a fork."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from comparisons import same_bits
from cpu_calls import everything
from ostinato.kernels.cpu import threads as kernel_threads


@pytest.fixture(params=["OpenMP's threads", "our own threads"])
def threads(request, always_parallel, monkeypatch):
    if request.param == "our own threads":
        monkeypatch.setattr(kernel_threads, "_openmp_parallel", lambda: None)
    elif kernel_threads._openmp_parallel() is None:
        pytest.skip("no OpenMP of GCC's kind")


def test_results_do_not_depend_on_the_number_of_threads(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = everything(0)
        for count in (2, 3, 7):
            torch.set_num_threads(count)
            assert same_bits(everything(0), expected)
    finally:
        torch.set_num_threads(before)


def test_many_threads_at_once(threads):
    expected = [everything(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        for seed, got in enumerate(pool.map(everything, [0, 1, 2, 3] * 8)):
            assert same_bits(got, expected[seed % 4])


FORK = """
import os, signal, torch
torch.set_num_threads(2)  # where the tests have one, no team of OpenMP would be lost
from ostinato.kernels.cpu import threads
from ostinato.kernels.scan import Order, cpu
a, b = torch.rand(2, 500, 300), torch.rand(2, 500, 300)
def scan():
    return cpu.linear_scan(a, b, None, Order())[0].numpy().tobytes()
expected = scan()
for openmp in (True, False):
    if not openmp:
        threads._openmp_parallel = lambda: None
        scan()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if scan() == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert scan() == expected
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_forked_worker_after_first_use():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)
