"""Tests marked `gpu` skip where there is none; `processes` are a pool for what takes several."""

import gc
import os
import signal

import pytest
from hypothesis import settings

# The same examples at every run: a change that fails is the change's fault.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


if "PYTEST_XDIST_WORKER" in os.environ:  # each of several processes: one thread, as more would wait for each other
    import torch  # by these alone: the process that hands out the tests would keep them waiting

    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
    torch.set_num_threads(1)

# Numba styles the message of every overload that does not fit, of which there are a hundred a loop and none is shown.
os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"

# What compiles a loop, a graph or an export makes many objects, few of them garbage in cycles: the collector, which
# looked again and again through all that modules and tests are made of, took a twelfth of the time, and through the
# newest objects alone a twenty-fifth.
gc.set_threshold(1_000_000)


def pytest_collection_finish():
    gc.freeze()


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job: some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # of what is selected
def pytest_collection_modifyitems(items):
    import torch

    # Together and before the last quarter, of which the second of two workers is robbed, that it alone starts the pool;
    # not before, as most loops are compiled by then, for which all would wait.
    pooled = [item for item in items if "processes" in item.fixturenames]
    others = [item for item in items if "processes" not in item.fixturenames]
    quarter = len(others) // 4
    items[:] = others[:-quarter] + pooled + others[-quarter:] if quarter else others + pooled
    torch.backends.cudnn.allow_tf32 = False  # float32 is compared in full precision, ours and cuDNN's
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    from pool import Pool

    pool = Pool(4, tmp_path_factory.mktemp("processes"))
    yield pool
    pool.close()


@pytest.fixture
def nan_memory():
    """Memory that PyTorch hands out is full of NaN: an element that no kernel wrote is seen."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def few_rounds(monkeypatch):
    """Benchmarks of few rounds, without compiled peers: the compiler takes longer than everything else together."""
    from ostinato.bench import measure, peers

    monkeypatch.setattr(measure, "MIN_ROUNDS", 2)
    monkeypatch.setattr(measure, "MAX_ROUNDS", 2)
    for cell, everyone in peers.CONTESTANTS.items():
        kept = {name: build for name, build in everyone.items() if "compiled" not in name}
        monkeypatch.setitem(peers.CONTESTANTS, cell, kept)
