"""Settings of all tests, and fixtures that many share; tests marked `gpu` are skipped where there is none."""

import gc
import os
import signal

import pytest
from hypothesis import settings

# Hypothesis draws the same examples in every run, so that a failure is due to a change of the code.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


if "PYTEST_XDIST_WORKER" in os.environ:  # one thread for each of several workers, as more would compete for cores
    import torch  # by workers alone: importing it in the process that distributes the tests would delay them

    os.environ["OMP_NUM_THREADS"] = "1"  # for processes that tests start
    torch.set_num_threads(1)

# Numba highlights the error message of every overload that does not match: a hundred per loop, none of which is shown.
os.environ["NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"] = "1"

# Compiling loops and graphs makes many objects, few of them garbage in cycles: garbage collections through all objects
# took a twelfth of the tests' time, and those of the youngest generation alone a twenty-fifth.
gc.set_threshold(1_000_000)


def pytest_collection_finish():
    gc.freeze()


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background job; some tests send SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # after deselection
def pytest_collection_modifyitems(items):
    import torch

    # Tests with the pool run together, before the last quarter, which is stolen from the second of two workers, so that
    # it alone starts the pool; and not earlier, as most loops have been compiled by then, for which all would wait.
    pooled = [item for item in items if "processes" in item.fixturenames]
    others = [item for item in items if "processes" not in item.fixturenames]
    quarter = len(others) // 4
    items[:] = others[:-quarter] + pooled + others[-quarter:] if quarter else others + pooled
    torch.backends.cudnn.allow_tf32 = False  # ours and cuDNN's float32 are compared in full precision
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """A pool of processes, for tests of several."""
    from pool import Pool

    pool = Pool(4, tmp_path_factory.mktemp("processes"))
    yield pool
    pool.close()


@pytest.fixture
def nan_memory():
    """Fill memory that PyTorch allocates with NaN, so that an element that no kernel wrote is noticed."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def few_rounds(monkeypatch):
    """Run benchmarks with few rounds and without compiled peers, which take longer than everything else together."""
    from ostinato.bench import measure, peers

    monkeypatch.setattr(measure, "MIN_ROUNDS", 2)
    monkeypatch.setattr(measure, "MAX_ROUNDS", 2)
    for cell, builds in peers.CONTESTANTS.items():
        kept = {name: build for name, build in builds.items() if "compiled" not in name}
        monkeypatch.setitem(peers.CONTESTANTS, cell, kept)
