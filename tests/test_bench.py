"""The benchmark tool: what it counts, what it finds wrong, and whom it names."""

import json
import sys

import pytest
import torch
from rich.console import Console

from ostinato.bench import measure, peers, report, workloads
from ostinato.bench.workloads import Layer, Run, Scan
from ostinato.cli.bench import app as bench_app

CPU = torch.device("cpu")
SCAN, MINGRU, MINLSTM = Scan(2, 64, 8), Layer("mingru", 2, 48, 4, 8), Layer("minlstm", 2, 48, 4, 8)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiny workloads, and no compiled peers: the compiler takes longer than everything else together."""
    monkeypatch.setattr(measure, "MIN_ROUNDS", 2)
    monkeypatch.setattr(measure, "MAX_ROUNDS", 2)
    monkeypatch.setattr(workloads, "QUICK", {"scan": [SCAN], "layer": [MINGRU, MINLSTM]})
    for cell, everyone in peers.LAYERS.items():
        kept = {name: build for name, build in everyone.items() if "compiled" not in name}
        monkeypatch.setitem(peers.LAYERS, cell, kept)


def run(command, path):
    bench_app([command, "--quick", "--device", "cpu", "--json", str(path)], standalone_mode=False)
    return json.loads(path.read_text())


def test_least_work():
    n = 2 * 64 * 8
    assert (SCAN.work("forward"), SCAN.work("backward")) == (3 * n * 4, 5 * n * 4)
    assert Scan(2, 64, 8, torch.bfloat16).work("forward") == 3 * n * 2
    assert SCAN.limit_share("backward") == pytest.approx(5 / 3)
    assert MINGRU.work("forward") == 2 * (2 * 48) * 4 * 16
    assert MINLSTM.work("forward+backward") == 3 * 2 * (2 * 48) * 4 * 24


@pytest.mark.parametrize(("command", "unit"), [("scan", "bytes"), ("layer", "flops")])
def test_a_run_writes_figures_that_agree(command, unit, tmp_path):
    content = run(command, tmp_path / "figures.json")
    assert content["benchmark"] == command
    assert content["device_type"] == "cpu"
    assert content["versions"]["torch"] == torch.__version__
    works = workloads.QUICK[command]
    assert [r["workload"]["name"] for r in content["results"]] == [str(w) for w in works for _ in w.passes]
    for record, work in zip(content["results"], [w for w in works for _ in w.passes], strict=True):
        assert record[unit] == work.work(record["pass"])
        ours = record["contestants"][peers.OURS]
        assert 0 < ours["max_error"] < 1e-5
        timed = [row for row in record["contestants"].values() if "unavailable" not in row]
        assert len(timed) == (2 if command == "scan" else 3)
        for row in timed:
            assert row[f"{unit}_per_second"] == pytest.approx(record[unit] / row["seconds"])
            assert row["fraction_of_limit"] == pytest.approx(record["limit"]["seconds"] / row["seconds"])
            assert row["times_ostinato"] == pytest.approx(row["seconds"] / ours["seconds"])


def test_peers_compute_the_same_and_others_state_no_error(tmp_path):
    gru, _, lstm, _ = (record["contestants"] for record in run("layer", tmp_path / "layer.json")["results"])
    assert gru["minGRU-pytorch"]["max_error"] < 1e-4
    assert lstm["minLSTM-pytorch"]["max_error"] < 1e-4
    assert gru["torch.nn.GRU"]["max_error"] is None
    loop = run("scan", tmp_path / "scan.json")["results"][1]["contestants"]["PyTorch time loop"]
    assert loop["max_error"] < 1e-6


def test_a_folder_gets_a_file_named_after_the_device(tmp_path):
    bench_app(["scan", "--quick", "--device", "cpu", "--json", str(tmp_path)], standalone_mode=False)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("scan-")
    assert path.suffix == ".json"


def test_one_workload_is_chosen_by_part_of_its_name():
    assert workloads.workloads("layer", CPU, quick=True, only="minlstm") == [MINLSTM]
    with pytest.raises(ValueError, match=r"only must be part of one of mingru .*; got 'gru2'"):
        workloads.workloads("layer", CPU, quick=True, only="gru2")


def test_missing_and_failing_peers_are_named_and_the_rest_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "minGRU_pytorch.minGRU", None)
    monkeypatch.setitem(
        peers.LAYERS["mingru"], "breaks when timed", lambda _work, _data: Run(_fail, same_function=False)
    )
    records = measure.measure(MINGRU, CPU, 0.01)
    rows = records[0]["contestants"]
    assert rows["minGRU-pytorch"]["unavailable"].startswith("minGRU-pytorch is not installed")
    assert rows["breaks when timed"]["unavailable"] == "failed: RuntimeError: no such luck"
    assert rows["torch.nn.GRU"]["seconds"] > 0
    console = Console(record=True, width=100)
    console.print(report.table(records))
    text = console.export_text()
    assert "minGRU-pytorch is not installed" in text
    assert "failed: RuntimeError: no such luck" in text


def _fail():
    raise RuntimeError("no such luck\nand more")


@pytest.mark.parametrize("flaw", ["output", "gradient", "nan"])
def test_a_wrong_result_of_ours_is_not_timed(monkeypatch, flaw):
    def wrong(work, data):
        right = peers.ostinato_scan(work, data)
        damage = {
            "output": lambda h: h + late(h, 1e-2),
            "gradient": lambda h: h.detach() + 0.9 * (h - h.detach()),
            "nan": lambda h: h + late(h, float("nan")),
        }[flaw]
        return Run(lambda: damage(right.call()), right.inputs)

    def late(h, value):
        """An error in the last step of the last channel only."""
        error = torch.zeros_like(h)
        error[-1, -1, -1] = value
        return error

    monkeypatch.setitem(peers.SCANS, peers.OURS, wrong)
    with pytest.raises(measure.WrongResult, match="against the float64 reference"):
        measure.measure(SCAN, CPU, 0.01)


@pytest.mark.parametrize("work", [Scan(1, 700, 3), Layer("mingru", 2, 700, 4, 8), Layer("minlstm", 1, 700, 4, 8)])
def test_the_end_of_a_long_sequence_is_checked_without_its_beginning(monkeypatch, work):
    monkeypatch.setattr(measure, "CHECKED_STEPS", 400)
    data = work.data(CPU)
    errors = measure.Check(work, data).errors(peers.contestants(work)[peers.OURS](work, data))
    assert errors["forward+backward"] < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("work", [Scan(2, 64, 8), Scan(2, 64, 8, torch.bfloat16), MINGRU, MINLSTM])
def test_on_a_gpu(work):
    for record in measure.measure(work, torch.device("cuda"), 0.01):
        ours = record["contestants"][peers.OURS]
        assert ours["seconds"] > 0
        assert ours["extra_memory_bytes"] > 0
