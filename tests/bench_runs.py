"""Small workloads for the tests of benchmarks, and runs of the benchmark commands."""

import json

import torch

from ostinato.bench import shapes
from ostinato.bench.workloads import Layer, RecurrentLayer, Scan, Training
from ostinato.cli.bench import app as bench_app

CPU = torch.device("cpu")
GRU = RecurrentLayer("GRU", 32, 2, 20, density=0.2, block=(16, 1), dtype=torch.float32)
SCAN, MINGRU, MINLSTM = Scan(2, 64, 8), Layer("mingru", 2, 48, 4, 8), Layer("minlstm", 2, 48, 4, 8)
STACKED = {"layers": 2, "bidirectional": True, "shortest": 8}
TRAINED = Training("LSTM", 16, 3, 20, dtype=torch.float32, who=shapes.IN_GRAPHS, **STACKED)
PRUNED = Training("GRU", 32, 2, 20, density=0.2, block=(16, 1), dtype=torch.float32, who=shapes.IN_GRAPHS)


def run(command, path):
    bench_app([command, "--quick", "--device", "cpu", "--json", str(path)], standalone_mode=False)
    return json.loads(path.read_text())


def fail():
    raise RuntimeError("no such luck\nand more")
