"""Fixtures of the tests of benchmarks."""

import pytest

from bench_runs import GRU, MINGRU, MINLSTM, PRUNED, SCAN, TRAINED
from ostinato.bench import shapes
from ostinato.bench.workloads import Equation, ParaLayer, SLSTMLayer, Training


@pytest.fixture
def small(monkeypatch, few_rounds):
    """Replace the quick workloads by tiny ones."""
    quick = {"scan": [SCAN], "layer": [MINGRU, MINLSTM], "persistent": [GRU], "training": [TRAINED, PRUNED]}
    layers = ParaLayer("ParaLSTM", 2, 24, 4, 8), SLSTMLayer("SLSTM", 2, 24, 4, 8, heads=2)
    quick["recurrence"] = [Equation("invented", 2, 64, 8), *layers]
    quick["training-sweep"] = [Training("GRU", hidden, who=shapes.IN_GRAPHS) for hidden in (8, 16)]
    monkeypatch.setattr(shapes, "QUICK", quick)
