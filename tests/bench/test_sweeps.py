"""Sweeps: the lines, ratios, plots and tables made from runs over many sizes."""

import dataclasses
import json
import re

import pytest
import torch
from rich.console import Console

from ostinato.bench import papers, report, shapes
from ostinato.bench.sweep import Ratio, Sweep, _lines, _ratios
from ostinato.bench.workloads import OURS, RecurrentLayer
from ostinato.cli.bench import app as bench_app

pytestmark = pytest.mark.usefixtures("few_rounds")
CPU = torch.device("cpu")
GRU = RecurrentLayer("GRU", 32, 2, 20, density=0.2, block=(16, 1), dtype=torch.float32)


def small_lengths():
    return papers.lengths_sweep("mingru", 16, (8, 32))


def measured(sweep):
    """As its table shows it: from what its file holds."""
    run = json.loads(json.dumps(sweep.measure([CPU], 0.01)))
    return sweep.shown(run)


def test_a_sweep_becomes_lines_and_ratios():
    content = measured(small_lengths())
    loop, scan = (content["lines"][f"MinGRU, {way}, CPU"]["points"] for way in ("time loop", "scan"))
    assert [point["x"] for point in scan] == [8, 32]
    for record, point in zip(content["results"], scan, strict=True):
        row = record["contestants"][OURS]
        assert point == {
            "x": record["workload"]["length"],
            "value": 1e3 * row["seconds"],
            "max_error": row["max_error"],
        }
        assert 0 < row["max_error"] < 1e-5
    assert content["lines"]["MinGRU's GEMM alone, CPU"]["limit"]
    ratio = content["ratios"][0]
    assert ratio["name"] == "CPU: time loop / scan"
    assert [p["value"] for p in ratio["points"]] == [a["value"] / b["value"] for a, b in zip(loop, scan, strict=True)]
    assert content["notes"] == ["The GPU's part needs a CUDA device."]
    console = Console(record=True, width=150)
    console.print(report.sweep(content))
    content["device"] = "somewhere"
    text = console.export_text()
    for line in report.sweep(content).markdown().partition("\n\n")[0].splitlines()[2:]:
        assert re.search(" +".join(map(re.escape, re.split(r"[ |]+", line.strip("| ")))), text), line


def test_published_figures_stand_beside_and_are_compared():
    sweep = dataclasses.replace(
        small_lengths(),
        published={"published: CPU scan": {8: 100.0, 64: 300.0}},
    )
    content = measured(sweep)
    assert report.sizes(content) == [8, 32, 64]
    (row,) = (row for row in report.sweep(content).markdown().splitlines() if "published" in row)
    assert row == "| published: CPU scan | 100 |  | 300 |  |"


def test_a_ratio_is_to_the_fastest_of_several():
    lines = {"a": {8: 4.0, 16: 9.0}, "b": {8: 5.0, 16: 6.0, 32: 8.0}, "ours": {8: 2.0, 16: 2.0, 32: 2.0}}
    found = _ratios((Ratio("next best / ours", ("a", "b", "absent"), "ours"),), lines)
    assert [point["value"] for point in found[0]["points"]] == [2.0, 3.0, 4.0]


def test_a_kernel_that_the_plan_chooses_has_the_plans_time():
    record = {
        "device_type": "cuda",
        "workload": {"kind": "persistent", "cell": "RNN", "density": 0.1, "block": (1, 1)},
        "steps": 10,
        "contestants": {
            OURS: {"seconds": 1e-5},
            "Ostinato, sparse kernel": {"unavailable": "is what the plan chooses"},
        },
    }
    (sweep,) = (sweep for sweep in papers.sweeps(True) if sweep.name == "density-rnn")
    lines = _lines(sweep, [record])
    assert [line["points"] for line in lines.values()] == [[{"x": 0.1, "value": pytest.approx(1.0)}]] * 2
    assert report.dashes([record]) == []


def test_papers_write_a_file_and_a_plot_a_table(tmp_path, monkeypatch, capsys):
    tables = [
        small_lengths(),
        Sweep(
            "steps",
            "GRU",
            "length",
            "steps",
            {"cpu": [dataclasses.replace(GRU, length=n, who=(*shapes.PLAIN, GRU.limit_name)) for n in (5, 20)]},
            unit="us a step",
        ),
        Sweep("batch", "on a GPU", "batch", "B", {"cuda": [GRU]}, unit="us a step"),
    ]
    monkeypatch.setattr(papers, "sweeps", lambda quick: tables)
    bench_app(["papers", "--device", "cpu", "--json", str(tmp_path)], standalone_mode=False)
    written = {path.name.removeprefix("papers-").split("-")[0]: path for path in tmp_path.glob("*.json")}
    assert set(written) == {"lengths", "steps", "batch", "capacity"}
    for name, path in written.items():
        content = json.loads(path.read_text())
        assert content["device_type"] == "cpu"
        assert bool(content["results"]) == (name != "batch")
        assert path.with_suffix(".png").exists() == (name not in ("batch", "capacity"))
        if path.with_suffix(".png").exists():
            assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    steps = tables[1].shown(json.loads(written["steps"].read_text()))
    for record, ours, limit in zip(
        steps["results"],
        steps["lines"]["Ostinato in 16x1 blocks"]["points"],
        steps["lines"]["the limit: hardly any recurrent weights"]["points"],
        strict=True,
    ):
        length = record["workload"]["length"]
        assert ours["value"] == pytest.approx(1e6 * record["contestants"][OURS]["seconds"] / length)
        assert limit["value"] == pytest.approx(1e6 * record["limit"]["seconds"] / length)
    assert "needs a CUDA device" in capsys.readouterr().out
    with pytest.raises(ValueError, match="only must be part of one of lengths-mingru, steps, batch, capacity; got 'x'"):
        bench_app(["papers", "--only", "x", "--json", str(tmp_path)], standalone_mode=False)
