"""The checks of results before they are timed, and which contestants are measured."""

import dataclasses
import itertools
import json

import pytest
import torch

from bench_runs import CPU, GRU, MINGRU, MINLSTM, PRUNED, SCAN, STACKED, TRAINED, fail, run
from ostinato.bench import check, measure, papers, peers, shapes
from ostinato.bench.workloads import OURS, Layer, RecurrentLayer, Run, Scan, Training

pytestmark = pytest.mark.usefixtures("small")


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
        """Return an error that is in the last step of the last channel only."""
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
    assert list(errors["forward+backward"]) == ["output", *(("a", "b") if work.kind == "scan" else ("input",))]
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


def test_a_wrong_recurrence_is_not_timed(monkeypatch):
    def wrong(work, data):
        right = peers.recurrent.ours(None, work, data)
        return dataclasses.replace(right, call=lambda: right.call() * 1.001)

    monkeypatch.setitem(peers.CONTESTANTS["GRU"], OURS, wrong)
    with pytest.raises(measure.WrongResult, match=r"GRU 32 B2 T20 20% 16x1 float32: relative error 1\.0e-03"):
        measure.measure(GRU, CPU, 0.01)


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


def test_a_slow_call_is_timed_once(monkeypatch):
    monkeypatch.setattr(measure, "SLOW", 0)
    calls = []
    timings = measure._timings({"slow": Run(lambda: calls.append(1))}, "forward", CPU, 1.0)
    assert len(calls) == 2
    assert timings["slow"]["seconds"] > 0


def test_the_rest_is_measured_where_a_result_is_wrong(monkeypatch, tmp_path):
    right = peers.CONTESTANTS["mingru"][OURS]
    monkeypatch.setitem(peers.CONTESTANTS["mingru"], OURS, lambda *_: Run(fail))
    with pytest.raises(RuntimeError, match=r"1 results are wrong: mingru .*: failed: RuntimeError: no such luck"):
        run("layer", tmp_path / "layer.json")
    results = json.loads((tmp_path / "layer.json").read_text())["results"]
    assert {record["workload"]["cell"] for record in results} == {"minlstm"}

    def late(work, data):  # right once, when it is checked
        calls, good = [], right(work, data)
        return dataclasses.replace(good, call=lambda: calls.append(1) or (good.call() if len(calls) < 2 else fail()))

    monkeypatch.setitem(peers.CONTESTANTS["mingru"], OURS, late)
    sweep = papers.lengths_sweep("mingru", 16, (8, 32))
    content = sweep.shown(sweep.measure([CPU], 0.01))
    assert [message.split(": ", 1)[1] for message in content["wrong"]] == ["failed: RuntimeError: no such luck"] * 2
    assert content["lines"] == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_peer_whose_result_is_not_finite_has_no_time(monkeypatch, value):
    def broken(work, data):
        right = peers.scan.ours(work, data)
        return Run(lambda: right.call() + value, right.inputs)

    monkeypatch.setitem(peers.CONTESTANTS["scan"], "broken", broken)
    for record in measure.measure(Scan(2, 16, 4), CPU, 0.01):
        assert record["contestants"]["broken"] == {"unavailable": "its result is not finite"}


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
@pytest.mark.parametrize("work", [Scan(2, 64, 8), Scan(2, 64, 8, torch.bfloat16), MINGRU, MINLSTM])
def test_on_a_gpu(work):
    for record in measure.measure(work, torch.device("cuda"), 0.01):
        ours = record["contestants"][OURS]
        assert ours["seconds"] > 0
        assert ours["extra_memory_bytes"] > 0
