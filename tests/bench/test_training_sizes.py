"""Training benchmarks over many sizes, swept or random: which are drawn, and the speedups shown."""

import json
import statistics

import pytest
import torch

from bench_runs import TRAINED
from ostinato.bench import peers, plots, report, shapes
from ostinato.bench.workloads import OURS, Training, Unavailable
from ostinato.cli.bench import app as bench_app

pytestmark = pytest.mark.usefixtures("small")


def test_a_speedup_compares_the_faster_of_each():
    rows = {OURS: 3.0, f"{OURS} in a CUDA graph": 4.0, "torch.nn": 24.0, "torch.nn in a CUDA graph": 12.0}
    record = {"contestants": {name: {"seconds": seconds} for name, seconds in rows.items()}}
    assert report.speedup(record) == 4.0
    record["contestants"]["torch.nn in a CUDA graph"] = {"unavailable": "needs a CUDA device"}
    assert report.speedup(record) == 8.0
    del record["contestants"]["torch.nn"], record["contestants"]["torch.nn in a CUDA graph"]
    assert report.speedup(record) is None


def test_a_sweep_of_training_is_drawn(tmp_path):
    arguments = ["training", "--sweep", "--quick", "--device", "cpu", "--json", str(tmp_path)]
    bench_app(arguments, standalone_mode=False)
    (path,) = tmp_path.glob("training-sweep-*.json")
    content = json.loads(path.read_text())
    assert [record["workload"]["hidden"] for record in content["results"]] == [8, 16]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    (panel, _) = plots.speedup_maps(content).axes
    assert panel.get_title() == "GRU float16"
    ratios = [f"{report.speedup(record):.2g}" for record in content["results"]]
    assert [text.get_text() for text in panel.texts] == ratios
    assert {text.get_fontstyle() for text in panel.texts} == {"italic"}  # torch's own loops, says the plan


def test_layers_of_random_sizes_are_those_of_the_seed(tmp_path):
    on_gpu = shapes.random_layers(torch.device("cuda"), 400, 0)
    assert (
        on_gpu
        == shapes.random_layers(torch.device("cuda"), 400, 0)
        != shapes.random_layers(torch.device("cuda"), 400, 1)
    )
    assert on_gpu[:7] == shapes.random_layers(torch.device("cuda"), 7, 0)
    for field, values in {"hidden": (16, 2048), "batch": (1, 256), "length": (16, 1000)}.items():
        drawn = [getattr(work, field) for work in on_gpu]
        assert (min(drawn), max(drawn)) == pytest.approx(values, rel=0.1)
    assert {work.hidden % 8 for work in on_gpu} == {0}
    assert statistics.mean(work.hidden < 181 for work in on_gpu) == pytest.approx(
        0.5, abs=0.05
    )  # half of 2**4 to 2**11
    assert statistics.mean(work.bidirectional for work in on_gpu) == pytest.approx(0.25, abs=0.05)


def test_layers_of_random_sizes_are_measured_and_drawn(monkeypatch, tmp_path):
    works = [
        Training("GRU", hidden, batch, 10, dtype=torch.float32, who=shapes.IN_GRAPHS)
        for hidden, batch in ((8, 1), (16, 3))
    ]
    monkeypatch.setattr(shapes, "random_layers", lambda device, count, seed, quick: works[: count + seed])
    arguments = ["training", "--random", "1", "--seed", "1", "--quick", "--device", "cpu", "--json", str(tmp_path)]
    bench_app(arguments, standalone_mode=False)
    (path,) = tmp_path.glob("training-random-*.json")
    content = json.loads(path.read_text())
    assert content["seed"] == 1
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    ratios = [report.speedup(record) for record in content["results"]]
    axes, _ = plots.speedups_by_size(content).axes
    (points,) = (x for x in axes.collections if len(x.get_offsets()) == 2)
    assert points.get_offsets().tolist() == [[8, pytest.approx(ratios[0])], [16, pytest.approx(ratios[1])]]
    assert points.get_array().tolist() == [1, 3]
    low, high = (report.times(ratio) for ratio in sorted(ratios))
    assert f"of 2 layers: from {low} to {high}, " in report.summary(content["results"])


def test_layers_that_torch_does_not_run_are_not_compared(monkeypatch, tmp_path):
    def fail(*_):
        raise Unavailable("out of memory")

    for name in [name for name in peers.CONTESTANTS["LSTM"] if name.startswith("torch.nn")]:
        monkeypatch.setitem(peers.CONTESTANTS["LSTM"], name, fail)
    monkeypatch.setattr(shapes, "random_layers", lambda *_: [TRAINED])
    bench_app(["training", "--random", "1", "--device", "cpu", "--json", str(tmp_path)], standalone_mode=False)
    (path,) = tmp_path.iterdir()  # without a picture
    (record,) = json.loads(path.read_text())["results"]
    assert report.speedup(record) is None


@pytest.mark.parametrize("arguments", [["--sweep"], ["--only", "GRU"]])
def test_layers_of_random_sizes_have_no_names(arguments):
    with pytest.raises(ValueError, match="--random"):
        bench_app(["training", "--random", "2", *arguments], standalone_mode=False)
