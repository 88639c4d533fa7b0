"""The benchmark commands: what they count, what their runs record, and which contestants they name."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench_runs import CPU, MINGRU, MINLSTM, SCAN, fail, run
from ostinato.bench import calls, measure, papers, peers, report, runs, shapes
from ostinato.bench.grid import Grid
from ostinato.bench.peers.prepare import captured
from ostinato.bench.workloads import OURS, Layer, Run, Scan, Unavailable
from ostinato.cli.bench import app as bench_app

pytestmark = pytest.mark.usefixtures("small")


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
    works = shapes.QUICK[command]
    assert [r["workload"]["name"] for r in content["results"]] == [str(w) for w in works for _ in w.passes]
    for record, work in zip(content["results"], [w for w in works for _ in w.passes], strict=True):
        assert record[unit] == work.work(record["pass"])
        ours = record["contestants"][OURS]
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


def test_recurrences_are_bounded_by_their_bytes_or_products(tmp_path):
    results = run("recurrence", tmp_path / "recurrence.json")["results"]
    units = [{"bytes", "flops"} & {*record} for record in results]
    assert units == [{"bytes"}] * 2 + [{"flops"}] * 4
    n = 2 * 64 * 8 * 4
    assert [record["bytes"] for record in results[:2]] == [4 * n, 8 * n]
    for record in results:
        assert 0 < record["contestants"][OURS]["max_error"] < 1e-5
        peers = {*record["contestants"]} - {OURS, "its equation in a loop"}
        assert all("CUDA" in record["contestants"][name]["unavailable"] for name in peers)
    for record in results[4:]:
        assert record["workload"]["name"] == "SLSTM (2, 24, 4) to 8 float32 in 2 heads"
        assert 0 < record["contestants"]["its equation in a loop"]["max_error"] < 1e-5


@pytest.mark.parametrize("command", ["scan", "layer", "persistent", "training", "profile"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(command, tmp_path, monkeypatch):
    for name in ("measure.measure", "profile.profile"):
        monkeypatch.setattr(f"ostinato.bench.{name}", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="expected a folder to write in; it is a file"):
        bench_app([command, "--device", "cpu", "--json", str(tmp_path / "file" / "x.json")], standalone_mode=False)


def test_a_plot_does_not_replace_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr("ostinato.bench.measure.measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match=r"json must not end in \.png, as the plot beside it does; got .*x\.png"):
        bench_app(["training", "--sweep", "--quick", "--json", str(tmp_path / "x.png")], standalone_mode=False)


@pytest.mark.parametrize("folder", ["", "new/"])
def test_a_folder_gets_a_file_named_after_the_kind_of_device(tmp_path, folder):
    bench_app(["scan", "--quick", "--device", "cpu", "--json", f"{tmp_path}/{folder}"], standalone_mode=False)
    (path,) = (tmp_path / folder).iterdir()
    assert path.name == "scan-cpu.json"
    assert json.loads(path.read_text())["processor"]


def test_the_commit_of_copied_files_is_what_is_said(monkeypatch):
    monkeypatch.setenv("OSTINATO_COMMIT", "0123abc")
    assert runs.environment(CPU)["commit"] == "0123abc"


def test_one_workload_is_chosen_by_part_of_its_name():
    assert shapes.workloads("layer", CPU, quick=True, only="minlstm") == [MINLSTM]
    with pytest.raises(ValueError, match=r"only must be part of one of MinGRU .*; got 'gru2'"):
        shapes.workloads("layer", CPU, quick=True, only="gru2")


@pytest.mark.parametrize("only", ["MinLSTM (2, 48, 4) → 8 fp32", "minlstm (2, 48, 4) to 8 float32", "lstm"])
def test_a_workload_is_chosen_by_its_name_in_a_table_or_a_file_in_capitals_or_not(only):
    assert shapes.workloads("layer", CPU, quick=True, only=only) == [MINLSTM]


def test_the_console_names_workloads_as_their_choice_does(capsys):
    bench_app(["scan", "--quick", "--device", "cpu", "--only", "FP32"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "(2, 64, 8) fp32" in shown
    assert "float32" not in shown


@pytest.mark.parametrize(("threads", "shown"), [(1, "1 thread,"), (2, "2 threads,")])
def test_one_thread_is_no_threads(threads, shown, monkeypatch, capsys):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    bench_app(["scan", "--quick", "--device", "cpu"], standalone_mode=False)
    assert shown in capsys.readouterr().out


def test_missing_and_failing_peers_are_named_and_the_rest_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "minGRU_pytorch.minGRU", None)
    monkeypatch.setitem(
        peers.CONTESTANTS["mingru"], "breaks when timed", lambda _work, _data: Run(fail, same_function=False)
    )
    records = measure.measure(MINGRU, CPU, 0.01)
    rows = records[0]["contestants"]
    assert rows["minGRU-pytorch"]["unavailable"].startswith("minGRU-pytorch is not installed")
    assert rows["breaks when timed"]["unavailable"] == "failed: RuntimeError: no such luck"
    assert rows["torch.nn.GRU"]["seconds"] > 0
    console = Console(record=True, width=100)
    console.print(report.workload(records))
    text = console.export_text()
    assert "minGRU-pytorch is not installed" in text
    assert "failed: RuntimeError: no such luck" in text


@pytest.mark.parametrize(("width", "tables"), [(50, 1), (47, 1), (46, 2), (33, 2), (32, 3), (28, 3), (20, 3)])
def test_a_table_is_divided_where_the_console_is_too_narrow(width, tables):
    head = ["µs a step", "plan", "cuDNN", "in a CUDA graph"]
    rows = [["GRU 2304 B4", "dense", "**12.7 (5.5×)**", "–"], ["GRU 8192 B4", "block", "105 (31.2×)", "77.4 (23.1×)"]]
    console = Console(width=width)
    with console.capture() as shown:
        console.print(Grid(head, rows))
    text = shown.get()
    assert max(map(len, text.splitlines())) <= width
    assert len(re.findall("─\\s*\n", text)) == tables
    for cell in ("dense", "block", "12.7 (5.5×)", "105 (31.2×)", "77.4 (23.1×)"):
        assert text.count(cell) == 1
    assert text.count("GRU 8192 B4") == (tables if width >= 28 else 0)  # names are cut short, but no figure


def test_recurrences_state_steps_plan_and_error(tmp_path):
    content = run("persistent", tmp_path / "persistent.json")
    (record,) = content["results"]
    rows = record["contestants"]
    assert record["steps"] == 20
    assert rows[OURS]["plan"]["path"] == "block"
    for name in (OURS, "torch.nn"):
        assert rows[name]["microseconds_a_step"] == pytest.approx(1e6 * rows[name]["seconds"] / 20)
        assert 0 < rows[name]["max_error"] < 1e-5
    assert rows["GEMMs in a CUDA graph"]["unavailable"] == "needs a CUDA device"


def test_training_states_the_error_of_every_gradient(tmp_path):
    content = run("training", tmp_path / "training.json")
    stacked, pruned = content["results"]
    assert stacked["steps"] == 20
    assert stacked["workload"]["layers"] == 2
    names = ["input", "h0", "c0", *torch.nn.LSTM(16, 16, 2, bidirectional=True).state_dict()]
    assert list(stacked["contestants"][OURS]["errors"]) == list(stacked["contestants"]["torch.nn"]["errors"]) == names
    assert list(pruned["contestants"][OURS]["errors"])[:3] == ["input", "h0", "weight_ih_l0"]
    for record in (stacked, pruned):
        for name in (OURS, "torch.nn"):
            row = record["contestants"][name]
            assert 0 < min(row["errors"].values()) <= max(row["errors"].values()) == row["max_error"] < 1e-5
            assert row["microseconds_a_step"] == pytest.approx(1e6 * row["seconds"] / 20)
        assert record["contestants"][OURS]["plan"]["reason"]
        assert record["contestants"]["torch.nn in a CUDA graph"]["unavailable"] == "needs a CUDA device"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n", "AMD EPYC (family 25, model 17)"),
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC 9654\n", "AMD EPYC 9654"),
        ("model name\t: of another kind\n", "of another kind"),
    ],
)
def test_processors_whose_name_says_nothing_are_numbered(cpuinfo, name, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda _: cpuinfo)
    assert runs.device_name(CPU) == name


def test_calls_that_were_timed_outlive_an_interruption(tmp_path, monkeypatch, capsys):
    def interrupted(device):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(calls, "KINDS", (lambda device: itertools.islice(calls._scans(device), 2), interrupted))
    path = tmp_path / "calls.json"
    assert bench_app(["calls", "--quick", "--device", "cpu", "--json", str(path)], standalone_mode=False) == 130
    names = [record["workload"]["name"] for record in json.loads(path.read_text())["results"]]
    assert names == ["linear_scan (1, 1, 1)", "linear_scan (1, 1, 8)"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_calls_are_compared_with_an_addition(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "CALLS", 2)
    monkeypatch.setattr(calls, "RANDOM_LAYERS", 2)
    monkeypatch.setattr(calls, "DIAGONAL", calls.DIAGONAL[:2])
    path = tmp_path / "calls.json"
    bench_app(["calls", "--quick", "--device", "cpu", "--json", str(path)], standalone_mode=False)
    results = json.loads(path.read_text())["results"]
    assert len(results) == 4 + 12 + 2 + 8 + 4 + 6 + 2 * 2 + 2 + 2
    for record in results:
        rows = record["contestants"]
        assert next(iter(rows)) == OURS
        assert rows[calls.UNIT]["times_unit"] == 1
        for row in rows.values():
            assert row["times_unit"] == pytest.approx(row["seconds"] / rows[calls.UNIT]["seconds"])


def everything():
    yield from (work for works in (shapes.ON_CPU, shapes.ON_CUDA) for kind in works.values() for work in kind)
    for quick in (False, True):
        yield from (work for sweep in papers.sweeps(quick) for works in sweep.workloads.values() for work in works)


def test_all_contestants_named_exist_and_ours_is_measured_first():
    for work in everything():
        known = {*peers.CONTESTANTS[work.cell], work.limit_name}
        assert {name for name in work.who if "compiled" not in name} <= known, work
        assert next(iter(peers.contestants(work))) in (OURS, peers.TIME_LOOP), work


@pytest.mark.parametrize(("who", "length"), [(peers.TIME_LOOP, 16384), ("torch.nn.GRU", 65536)])
def test_what_would_take_too_long_is_left_out(who, length):
    work = Layer("mingru", 1, length + 1, 1, 1)
    with pytest.raises(Unavailable, match=f"left out above T = {length:,}"):
        peers.CONTESTANTS["mingru"][who](work, work.data(CPU))


@pytest.mark.gpu
def test_what_cannot_be_captured_leaves_no_trace():
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        captured(torch.cuda.synchronize)
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()
    assert captured(lambda: torch.ones(3, device="cuda"))().tolist() == [1, 1, 1]


def test_files_are_json_even_of_numbers_that_are_not_finite(tmp_path):
    path = tmp_path / "run.json"
    runs.write_json(path, {"losses": (1.5, float("nan")), "limit": {"accuracy": float("inf")}})

    def refuse(constant):
        raise AssertionError(constant)

    content = json.loads(path.read_text(), parse_constant=refuse)
    assert content == {"losses": [1.5, None], "limit": {"accuracy": None}}
