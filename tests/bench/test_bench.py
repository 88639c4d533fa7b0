"""The benchmark tool: what it counts, what it finds wrong, and whom it names."""

import dataclasses
import itertools
import json
import re
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import ablation
from ostinato.bench import calls, capacity, check, measure, papers, peers, plots, report, runs, shapes, warm
from ostinato.bench.peers.prepare import captured
from ostinato.bench.workloads import OURS, Equation, Layer, ParaLayer, RecurrentLayer, Run, Scan, Training, Unavailable
from ostinato.cli.bench import app as bench_app

CPU = torch.device("cpu")
GRU = RecurrentLayer("GRU", 32, 2, 20, density=0.2, block=(16, 1), dtype=torch.float32)
SCAN, MINGRU, MINLSTM = Scan(2, 64, 8), Layer("mingru", 2, 48, 4, 8), Layer("minlstm", 2, 48, 4, 8)
STACKED = {"layers": 2, "bidirectional": True, "shortest": 8}
TRAINED = Training("LSTM", 16, 3, 20, dtype=torch.float32, who=shapes.IN_GRAPHS, **STACKED)
PRUNED = Training("GRU", 32, 2, 20, density=0.2, block=(16, 1), dtype=torch.float32, who=shapes.IN_GRAPHS)


@pytest.fixture(autouse=True)
def small(monkeypatch, few_rounds):
    """Tiny workloads."""
    quick = {"scan": [SCAN], "layer": [MINGRU, MINLSTM], "persistent": [GRU], "training": [TRAINED, PRUNED]}
    quick["recurrence"] = [Equation("invented", 2, 64, 8), ParaLayer("ParaLSTM", 2, 24, 4, 8)]
    quick["training-sweep"] = [Training("GRU", hidden, who=shapes.IN_GRAPHS) for hidden in (8, 16)]
    monkeypatch.setattr(shapes, "QUICK", quick)


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
    assert units == [{"bytes"}] * 2 + [{"flops"}] * 2
    n = 2 * 64 * 8 * 4
    assert [record["bytes"] for record in results[:2]] == [4 * n, 8 * n]
    for record in results:
        assert 0 < record["contestants"][OURS]["max_error"] < 1e-5
        peers = {*record["contestants"]} - {OURS}
        assert all("CUDA" in record["contestants"][name]["unavailable"] for name in peers)


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
        peers.CONTESTANTS["mingru"], "breaks when timed", lambda _work, _data: Run(_fail, same_function=False)
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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_peer_whose_result_is_not_finite_has_no_time(monkeypatch, value):
    def broken(work, data):
        right = peers.scan.ours(work, data)
        return Run(lambda: right.call() + value, right.inputs)

    monkeypatch.setitem(peers.CONTESTANTS["scan"], "broken", broken)
    for record in measure.measure(Scan(2, 16, 4), CPU, 0.01):
        assert record["contestants"]["broken"] == {"unavailable": "its result is not finite"}


@pytest.mark.parametrize(("width", "tables"), [(50, 1), (47, 1), (46, 2), (33, 2), (32, 3), (28, 3), (20, 3)])
def test_a_table_is_divided_where_the_console_is_too_narrow(width, tables):
    head = ["µs a step", "plan", "cuDNN", "in a CUDA graph"]
    rows = [["GRU 2304 B4", "dense", "**12.7 (5.5×)**", "–"], ["GRU 8192 B4", "block", "105 (31.2×)", "77.4 (23.1×)"]]
    console = Console(width=width)
    with console.capture() as shown:
        console.print(report.Grid(head, rows))
    text = shown.get()
    assert max(map(len, text.splitlines())) <= width
    assert len(re.findall("─\\s*\n", text)) == tables
    for cell in ("dense", "block", "12.7 (5.5×)", "105 (31.2×)", "77.4 (23.1×)"):
        assert text.count(cell) == 1
    assert text.count("GRU 8192 B4") == (tables if width >= 28 else 0)  # names are cut short, but no figure


def _fail():
    raise RuntimeError("no such luck\nand more")


@pytest.mark.parametrize("flaw", ["output", "gradient", "nan"])
def test_a_wrong_result_of_ours_is_not_timed(monkeypatch, flaw):
    def wrong(work, data):
        right = peers.scan.ours(work, data)
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

    monkeypatch.setitem(peers.CONTESTANTS["scan"], OURS, wrong)
    with pytest.raises(measure.WrongResult, match="against the float64 reference"):
        measure.measure(SCAN, CPU, 0.01)


@pytest.mark.parametrize(
    "work", [Scan(2, 64, 8, time_contiguous=True), Scan(9, 100, 3, shortest=1), Scan(2, 64, 8, resets=0.1)]
)
def test_scans_in_other_layouts_and_with_resets_are_checked(monkeypatch, work):
    monkeypatch.setattr(check, "CHECKED_STEPS", 400)
    (forward, backward) = measure.measure(dataclasses.replace(work, who=(OURS,)), CPU, 0.01)
    for record in (forward, backward):
        assert 0 < record["contestants"][OURS]["max_error"] < 1e-5
    steps = sum(work.lengths.tolist())
    assert forward["bytes"] == 3 * 4 * steps * work.channels
    assert steps < work.batch * work.length or not work.shortest


@pytest.mark.parametrize("work", [Scan(1, 700, 3), Layer("mingru", 2, 700, 4, 8), Layer("minlstm", 1, 700, 4, 8)])
def test_the_end_of_a_long_sequence_is_checked_without_its_beginning(monkeypatch, work):
    monkeypatch.setattr(check, "CHECKED_STEPS", 400)
    data = work.data(CPU)
    errors = check.check_of(work, data).errors(peers.contestants(work)[OURS](work, data))
    assert list(errors["forward+backward"]) == ["output", "a", "b"] if work.kind == "scan" else ["output", "input"]
    assert max(errors["forward+backward"].values()) < 1e-5


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_episodes_are_the_same_whether_reset_or_cut(cell):
    """The float64 check cuts the sequences, as torch.nn's contestant does; ours resets the state."""
    work = Training(cell, 16, 3, 20, dtype=torch.float32, resets=0.2, who=shapes.EPISODES, **STACKED)
    work = dataclasses.replace(work, shortest=0)
    assert work.resets_of(work.data(CPU)).any()
    (record,) = measure.measure(work, CPU, 0.01)
    for name in shapes.PLAIN:
        assert record["contestants"][name]["max_error"] < 1e-5, name


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


def test_a_wrong_recurrence_is_not_timed(monkeypatch):
    def wrong(work, data):
        right = peers.recurrent.ours(None, work, data)
        return dataclasses.replace(right, call=lambda: right.call() * 1.001)

    monkeypatch.setitem(peers.CONTESTANTS["GRU"], OURS, wrong)
    with pytest.raises(measure.WrongResult, match=r"GRU 32 B2 T20 20% 16x1 float32: relative error 1\.0e-03"):
        measure.measure(GRU, CPU, 0.01)


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


@pytest.mark.parametrize("work", [TRAINED, PRUNED], ids=str)
def test_gradients_are_those_of_backward(work):
    """By another way than the benchmark's: ``.backward()`` of our layer over padded tensors, one sequence at a time."""
    torch.manual_seed(0)
    data = work.data(CPU)
    found = dict(zip(work.differentiable, peers.contestants(work)[OURS](work, data).gradients(), strict=True))
    sizes, layer = work.batch_sizes, work.layer(data)
    lengths = [20] * work.batch if sizes is None else [int((sizes > index).sum()) for index in range(work.batch)]
    assert lengths == ([20, 14, 8] if work is TRAINED else [20, 20])
    x, *states = data[: 1 + work.states]
    output_grad, *state_grads = data[1 + work.states : 2 + 2 * work.states]

    def rows(tensor, index):  # of one sequence
        if sizes is None:
            return tensor[:, index]
        return tensor[sizes.cumsum(0)[: lengths[index]] - sizes[: lengths[index]] + index]

    for index in range(work.batch):
        hidden = tuple(state[:, index].clone() for state in states)
        output, last = layer(rows(x, index).clone(), hidden if work.cell == "LSTM" else hidden[0])
        loss = (output * rows(output_grad, index)).sum()
        for state, grad in zip(last if work.cell == "LSTM" else (last,), state_grads, strict=True):
            loss = loss + (state * grad[:, index]).sum()
        loss.backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_wrong_gradient_is_not_timed(monkeypatch, which):
    def wrong(work, data):
        right = peers.recurrent.ours(None, work, data)

        def gradients():
            results = list(right.gradients())
            results[which] = results[which] * 1.01
            return tuple(results)

        return dataclasses.replace(right, gradients=gradients)

    monkeypatch.setitem(peers.CONTESTANTS["GRU"], OURS, wrong)
    with pytest.raises(measure.WrongResult, match=r"GRU 32 B2 T20 20% 16x1 float32: relative error 1\.0e-02"):
        measure.measure(PRUNED, CPU, 0.01)


def test_weights_are_others_at_every_timed_call():
    weight, seen = torch.ones(3, requires_grad=True), []
    timed = Run(lambda: weight, gradients=lambda: seen.append(weight.tolist()), weights=(weight,))
    measure._timings({"any": timed}, "forward+backward", CPU, 0.01)
    assert len(seen) == 4
    assert all(before != after for before, after in itertools.pairwise(seen[1:]))


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
    (panel, _) = plots.ratios_of(content).axes
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
    axes, _ = plots.ratios_by_size(content).axes
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


def test_the_rest_is_measured_where_a_result_is_wrong(monkeypatch, tmp_path):
    right = peers.CONTESTANTS["mingru"][OURS]
    monkeypatch.setitem(peers.CONTESTANTS["mingru"], OURS, lambda *_: Run(_fail))
    with pytest.raises(RuntimeError, match=r"1 results are wrong: mingru .*: failed: RuntimeError: no such luck"):
        run("layer", tmp_path / "layer.json")
    results = json.loads((tmp_path / "layer.json").read_text())["results"]
    assert {record["workload"]["cell"] for record in results} == {"minlstm"}

    def late(work, data):  # right once, when it is checked
        calls, good = [], right(work, data)
        return dataclasses.replace(good, call=lambda: calls.append(1) or (good.call() if len(calls) < 2 else _fail()))

    monkeypatch.setitem(peers.CONTESTANTS["mingru"], OURS, late)
    sweep = papers.lengths_sweep("mingru", 16, (8, 32))
    content = sweep.shown(sweep.measure([CPU], 0.01))
    assert [message.split(": ", 1)[1] for message in content["wrong"]] == ["failed: RuntimeError: no such luck"] * 2
    assert content["lines"] == {}


def test_float32_is_rounded_to_tf32_only_where_the_workload_says_so(monkeypatch):
    libraries = torch.backends.cuda.matmul, torch.backends.cudnn
    seen = []

    def note(_work, data):
        seen.append([library.allow_tf32 for library in libraries])
        return Run(lambda: data[0], same_function=False)

    monkeypatch.setitem(peers.CONTESTANTS, "GRU", {"any": note})
    before = [library.allow_tf32 for library in libraries]
    for tf32 in (True, False):
        measure.measure(RecurrentLayer("GRU", 4, tf32=tf32, dtype=torch.float32), CPU, 0.01)
    assert seen == [[True, True], [False, False]]
    assert [library.allow_tf32 for library in libraries] == before


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


def test_what_the_ablation_replaces_stands_in_the_kernels():
    from ostinato.kernels.cuda import nvrtc
    from ostinato.kernels.persistent.cuda.heuristics.search import choose_geometry
    from ostinato.kernels.persistent.cuda.source import files

    for kernel in ablation.ALL:
        kept = None if kernel == "dense" else int(0.1 * 3 * 1024**2)
        plan = choose_geometry("gru", 1024, 4, torch.float16, kept, (16, 1), capacity.H100, path=kernel)
        text = nvrtc.source(*files(plan.geometry))
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


def test_calls_are_compared_with_an_addition(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "CALLS", 2)
    path = tmp_path / "calls.json"
    bench_app(["calls", "--quick", "--device", "cpu", "--json", str(path)], standalone_mode=False)
    results = json.loads(path.read_text())["results"]
    assert len(results) == 4 + 12 + 9 + 8 + 4 + 2
    for record in results:
        rows = record["contestants"]
        assert next(iter(rows)) == OURS
        assert rows[calls.UNIT]["times_unit"] == 1
        for row in rows.values():
            assert row["times_unit"] == pytest.approx(row["seconds"] / rows[calls.UNIT]["seconds"])


def test_a_kernel_can_be_asked_for():
    from ostinato.kernels.persistent.cuda.heuristics.search import choose_geometry

    layer = ("lstm", 2304, 4, torch.float16, int(0.1 * 4 * 2304**2), (16, 1), capacity.H100)
    paths = ["dense", "sparse", "block"]
    assert [choose_geometry(*layer, path=path).path for path in paths] == paths
    assert choose_geometry(*layer).path == "block"
    assert choose_geometry(*layer[:4], None, None, capacity.H100, path="sparse").path == "steps"


def test_a_slow_call_is_timed_once(monkeypatch):
    monkeypatch.setattr(measure, "SLOW", 0)
    calls = []
    timings = measure._timings({"slow": Run(lambda: calls.append(1))}, "forward", CPU, 1.0)
    assert len(calls) == 2
    assert timings["slow"]["seconds"] > 0


def everything():
    yield from (work for works in (shapes.ON_CPU, shapes.ON_CUDA) for kind in works.values() for work in kind)
    for quick in (False, True):
        yield from (work for sweep in papers.sweeps(quick) for works in sweep.on.values() for work in works)


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
def test_transfer_and_time_loop_on_a_gpu():
    who = (OURS, peers.TIME_LOOP, peers.FROM_HOST, "torch.nn.GRU", peers.CELL_LOOPS["mingru"])
    work = Layer("mingru", 1, 32, 8, 16, passes=("forward",), who=who)
    (record,) = measure.measure(work, torch.device("cuda"), 0.01)
    for name, row in record["contestants"].items():
        assert row["latency_seconds"] > 0, name
        assert row["max_error"] is None or row["max_error"] < 1e-5, name


@pytest.mark.gpu
@pytest.mark.parametrize("cell", shapes.CELLS)
def test_recurrences_on_a_gpu(cell):
    who = (*shapes.SPARSE, *shapes.KERNELS)
    work = RecurrentLayer(cell, 256, 3, 40, density=0.2, block=(16, 1), who=who)
    (record,) = measure.measure(work, torch.device("cuda"), 0.01)
    chosen = record["contestants"][OURS]["plan"]["path"]
    for name, row in record["contestants"].items():
        if chosen in name:
            assert row["unavailable"] == "is what the plan chooses"
        else:
            assert row["max_error"] < 2e-3, name
            assert row["microseconds_a_step"] > 0, name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "work",
    [
        TRAINED,
        PRUNED,
        Training("LSTM", 128, 3, 40, who=shapes.IN_GRAPHS),
        Training("GRU", 32, 3, 40, dtype=torch.float32, resets=0.1, who=shapes.EPISODES),
    ],
    ids=str,
)
def test_training_on_a_gpu(work):
    (record,) = measure.measure(work, torch.device("cuda"), 0.01)
    for name, row in record["contestants"].items():
        if name == "torchrl" and "unavailable" in row:
            continue  # it may not be installed
        if name == "torch.nn in a CUDA graph" and work is TRAINED and "unavailable" in row:
            continue  # whether packed sequences can be captured is cuDNN's affair
        assert row["max_error"] < 5e-3, name
        assert row["microseconds_a_step"] > 0, name
    padded = record["contestants"]["torch.nn"].get("plan")  # where that is faster
    assert padded is None or (work.is_plain and padded == {"padded_batch": 8})


@pytest.mark.gpu
def test_what_cannot_be_captured_leaves_no_trace():
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        captured(torch.cuda.synchronize)
    assert torch.cuda.current_stream() == before
    torch.cuda.empty_cache()
    assert captured(lambda: torch.ones(3, device="cuda"))().tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("work", [Scan(2, 64, 8), Scan(2, 64, 8, torch.bfloat16), MINGRU, MINLSTM])
def test_on_a_gpu(work):
    for record in measure.measure(work, torch.device("cuda"), 0.01):
        ours = record["contestants"][OURS]
        assert ours["seconds"] > 0
        assert ours["extra_memory_bytes"] > 0


def test_files_are_json_even_of_numbers_that_are_not_finite(tmp_path):
    path = tmp_path / "run.json"
    runs.write_json(path, {"losses": (1.5, float("nan")), "limit": {"accuracy": float("inf")}})

    def refuse(constant):
        raise AssertionError(constant)

    content = json.loads(path.read_text(), parse_constant=refuse)
    assert content == {"losses": [1.5, None], "limit": {"accuracy": None}}
