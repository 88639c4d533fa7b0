"""Profiles: the kernels of a call, their times, and their minimal work."""

import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ostinato import kernels
from ostinato.bench import profile, report
from ostinato.bench.workloads import Layer, RecurrentLayer, Training
from ostinato.cli.bench import app as bench_app

pytestmark = pytest.mark.usefixtures("few_rounds")


def test_a_profile_accounts_for_the_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile, "measure_limits", functools.cache(profile.measure_limits))  # which takes two seconds
    sizes = ["--batch", "2", "--length", "300", "--hidden-size", "64", "--device", "cpu"]
    trace, path = tmp_path / "trace.json", tmp_path / "profile.json"
    for arguments, own, moved in (
        (["mingru"], "ostinato::minimal", 3 * 600 * 64 * 4),
        (["minlstm", "--backward"], "ostinato::minimal_backward", 8 * 600 * 64 * 4),
        (["gru", "--density", "0.1", "--block", "16x1"], "ostinato::recurrence", 4 * 600 * 64 * 4),
        (["gru", "--backward"], "ostinato::recurrence_backward", 8 * 600 * 64 * 4),
    ):
        files = ["--trace", str(trace), "--json", str(path)]
        bench_app(["profile", *arguments, *sizes, *files], standalone_mode=False)
        content = json.loads(path.read_text())
        rows = {row["kernel"]: row for row in content["kernels"]}
        assert rows[own]["bytes"] == moved
        assert rows[own]["launches_a_call"] == 1
        assert rows[own]["fraction_of_limit"] == pytest.approx(
            moved / rows[own]["seconds_a_call"] / content["limits"]["bytes_per_second"]
        )
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert own in names
        assert own in capsys.readouterr().out


def test_the_products_of_a_training_step_are_three():
    work = Layer("mingru", 2, 48, 4, 8, passes=("forward", "forward+backward"))
    for names in (["nvjet_hsh_64x32", "nvjet_hsh_128x8", "cutlass_80"], ["aten::mm", "aten::mm", "aten::addmm"]):
        flops = sum(profile.least_work(work, kernel, 1)["flops"] for kernel in names)
        assert flops == work.work("forward+backward")
    assert profile.least_work(work, "aten::mm", 3)["flops"] == work.work("forward+backward")
    assert profile.least_work(work, "aten::add", 1) == {}
    assert profile.least_work(work, "scan", 2) == {"bytes": (3 + 6) * 96 * 8 * 4}
    assert profile.least_work(work, "projected", 1) == {
        "bytes": (96 * (4 + 8) + 16 * 4) * 4,
        "flops": work.work("forward"),
    }
    lstm = RecurrentLayer("LSTM", 32, 2, 20)
    assert profile.least_work(lstm, "recur", 1) == {"bytes": 5 * 40 * 32 * 2}
    assert profile.least_work(lstm, "prepare", 1) == {"bytes": 40 * 32 * 2}
    trained = Training("LSTM", 32, 2, 20)
    assert profile.least_work(trained, "recur", 2) == {"bytes": (5 + 10) * 40 * 32 * 2}
    assert profile.least_work(trained, "prepare", 2) == {"bytes": 5 * 40 * 32 * 2}
    assert profile.least_work(trained, "states_before", 1) == {"bytes": 2 * 40 * 32 * 2}
    assert profile.least_work(lstm, "products", 1) == {"flops": 2 * 40 * 32 * 4 * 32}
    assert profile.least_work(trained, "products", 2) == {"flops": 4 * 2 * 40 * 32 * 4 * 32}


def test_the_time_of_a_product_is_that_of_the_operator_that_computes_it():
    times = {
        "convolution_backward": (2, 10.0),
        "_slow_conv2d_backward": (2, 90.0),
        "thnn_conv2d": (1, 5.0),
        "add": (1, 0.0),
    }
    rows = [SimpleNamespace(key=f"aten::{name}", count=n, self_cpu_time_total=t) for name, (n, t) in times.items()]
    found = list(profile._times(SimpleNamespace(key_averages=lambda: rows), "cpu"))
    assert found == [("aten::convolution_backward", 2, pytest.approx(1e-4)), ("aten::thnn_conv2d", 1, 5e-6)]
    assert all(profile.PRODUCT.search(name) for name, *_ in found)


def test_all_cuda_kernels_are_known():
    folder = Path(kernels.__path__[0])
    texts = (path.read_text() for path in folder.rglob("*") if path.suffix in (".cu", ".cuh", ".py"))
    compiled = [name for text in texts for name in re.findall(r"__global__ void [^{;]*?(\w+)\(const ", text)]
    assert len(compiled) == sum(path.read_text().count("__global__") for path in folder.rglob("*.cu*"))
    assert set(compiled) == profile.COUNTED | profile.UNCOUNTED
    assert not profile.COUNTED & profile.UNCOUNTED
    for work in (Layer("mingru", 2, 48, 4, 8), Training("LSTM", 32, 2, 20)):
        assert all(profile.least_work(work, kernel, 1) for kernel in profile.COUNTED)
        assert not any(profile.least_work(work, kernel, 1) for kernel in profile.UNCOUNTED)


def test_the_table_of_a_profile_tells_our_kernels_from_others():
    row = {"launches_a_call": 1.0, "seconds_a_launch": 1e-6, "seconds_a_call": 1e-6, "share": 0.25}
    names = ("biases", "CatArrayBatch")
    content = {"contestant": "Ostinato", "workload": {"name": "gru"}, "pass": "forward", "seconds": 4e-6}
    content |= {"kernels": [row | {"kernel": name} for name in names], "seconds_in_none": 2e-6}
    grid = report.profile(content | {"limits": {"bytes_per_second": 1e12, "flops_per_second": 1e12}})
    assert [cells[4] for cells in grid.rows] == ["not counted", "–", "–"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rwkv"], "cell must be one of mingru, minlstm, rnn, gru, lstm; got 'rwkv'"),
        (["gru", "--block", "2x2"], "block must be one of 16x1, 8x4, 1x1; got '2x2'"),
        (["mingru", "--hidden-size", "0"], "input_size must be at least 1; got 0"),
        (["mingru", "--dtype", "int8"], "dtype must be one of float32, float16, bfloat16; got 'int8'"),
        (
            ["mingru", "--contestant", "x"],
            "contestant must be one of Ostinato; minGRU-pytorch; minGRU-pytorch, autocast; torch.nn.GRU; ",
        ),
        (["gru", "--contestant", "cuSPARSE"], "cuSPARSE: needs a CUDA device"),
    ],
)
def test_a_profile_of_what_there_is_not(arguments, message, tmp_path):
    trace = tmp_path / "trace.json"
    with pytest.raises(ValueError, match=message):
        bench_app(["profile", *arguments, "--device", "cpu", "--trace", str(trace)], standalone_mode=False)
    assert not trace.exists()


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["mingru", "lstm"])
def test_a_profile_on_a_gpu(cell, tmp_path):
    size = {"mingru": 64, "lstm": 256}[cell]  # cuBLAS computes the products, of fewer a kernel of ours
    work = profile.workload(cell, batch=2, length=300, input_size=size, hidden_size=size, dtype="bfloat16")
    content = profile.profile(work, torch.device("cuda"), trace=tmp_path / "trace.json")
    rows = {row["kernel"]: row for row in content["kernels"]}
    own = {"mingru": {"scan", "projected"}, "lstm": {"recur"}}[cell] & rows.keys()
    assert [rows[kernel]["launches_a_call"] for kernel in own] == [1]
    assert any("flops" in row for row in content["kernels"])
    assert sum(row["share"] for row in content["kernels"]) < 1.5
