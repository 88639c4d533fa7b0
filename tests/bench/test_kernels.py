"""Kernels in benchmarks: the largest layers that fit, forced paths, ablations, and compiling beforehand."""

import time
from types import SimpleNamespace

import pytest
import torch

import ablation
from bench_runs import CPU
from ostinato.bench import capacity, shapes, warm
from ostinato.bench.workloads import OURS

pytestmark = pytest.mark.usefixtures("small")


def test_the_largest_layer_fits_and_the_next_does_not():
    from ostinato.kernels.persistent.cuda.heuristics.search import choose_geometry

    rows = capacity.capacity(CPU)
    sizes = {(row["cell"], capacity.shape_name(row)): row["hidden_size"] for row in rows}
    assert sizes["RNN", "dense"] > sizes["GRU", "dense"] > sizes["LSTM", "dense"] > 2000
    for row in rows:
        arguments = {"cell": capacity.CELLS[row["cell"]], "batch": 4, "dtype": torch.float16, "block": row["block"]}
        gates, hidden = {"RNN": 1, "GRU": 3, "LSTM": 4}[row["cell"]], row["hidden_size"]
        assert 2 * gates * row["density"] * hidden**2 < row["bytes_on_chip"] <= row["bytes_available"]
        for size, fits in ((hidden, True), (hidden + capacity.STEP, False)):
            kept = None if row["block"] is None else int(row["density"] * gates * size**2)
            properties = SimpleNamespace(**vars(capacity.H100) | {"L2_cache_size": 0})
            plan = choose_geometry(hidden_size=size, mask_nnz=kept, properties=properties, **arguments)
            assert plan.has_kernel == fits


def test_a_kernel_can_be_asked_for():
    from ostinato.kernels.persistent.cuda.heuristics.search import choose_geometry

    layer = ("lstm", 2304, 4, torch.float16, int(0.1 * 4 * 2304**2), (16, 1), capacity.H100)
    paths = ["dense", "sparse", "block"]
    assert [choose_geometry(*layer, path=path).path for path in paths] == paths
    assert choose_geometry(*layer).path == "block"
    assert choose_geometry(*layer[:4], None, None, capacity.H100, path="sparse").path == "steps"


def test_what_the_ablation_replaces_stands_in_the_kernels():
    from ostinato.kernels.persistent.cuda.heuristics.search import choose_geometry
    from ostinato.kernels.persistent.cuda.source import code

    for kernel in ablation.ALL:
        kept = None if kernel == "dense" else int(0.1 * 3 * 1024**2)
        plan = choose_geometry("gru", 1024, 4, torch.float16, kept, (16, 1), capacity.H100, path=kernel)
        text = code(plan.geometry)
        for kernels, replaced in ablation.SWITCHES.values():
            assert kernel not in kernels or all(old in text for old in replaced)


def test_an_ablation_that_compiles_nothing_is_an_error():
    with (
        pytest.raises(RuntimeError, match="no kernel was compiled without prefetches"),
        ablation.switched_off("prefetches"),
    ):
        pass


def test_what_takes_longest_to_compile_comes_first_and_nothing_twice():
    tasks = warm.tasks()
    assert len(set(tasks)) == len(tasks)
    (work, name, _), *rest = tasks
    assert (str(work), name) == ("linear_scan (8, 4096, 1536) float32", warm.EXTENSION)
    assert warm.EXTENSION not in {name for _, name, _ in rest}
    own = [name.startswith(OURS) for _, name, _ in rest]
    assert own == sorted(own)
    assert {work for work, name, _ in rest if name == OURS} >= set(shapes.ON_CUDA["persistent"])
    assert {work for work, _, _ in warm.tasks(["scan"])} == set(shapes.ON_CUDA["scan"])
    with pytest.raises(ValueError, match="kinds must be some of scan, layer"):
        warm.tasks(["scam"])


def test_compiling_beforehand_does_not_wait_for_a_compiler_that_hangs(monkeypatch):
    monkeypatch.setattr(warm, "tasks", lambda kinds: [0.0, 600.0])
    monkeypatch.setattr(warm, "call_once", time.sleep)
    left = warm.warm(2)
    assert [next(left), next(left)] == [2, 1]  # processes take their time to start
    monkeypatch.setattr(warm, "PATIENCE", 0.1)
    assert list(left) == []
