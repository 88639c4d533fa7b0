"""The learning benchmarks: tasks, stages of training, and how runs are written and drawn."""

import json
import math

import pytest
import torch
from torch import nn

from ostinato.bench.learning.fit import Stage, TaskTrainer, remember
from ostinato.bench.learning.peers import with_torch_layers
from ostinato.bench.learning.plots import draw, figure_of
from ostinato.bench.learning.pruning import fine_tune_pruning
from ostinato.bench.learning.tasks import IGNORED, Bits, SelectiveCopying
from ostinato.cli import main
from ostinato.cli.learning.run import LearningRun
from ostinato.models import LanguageModel
from ostinato.training import Trainer, TrainingSettings


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_selective_copying_asks_for_the_data_in_order():
    batch, length, items, vocab_size = 200, 30, 5, 16
    inputs, targets = SelectiveCopying(items, vocab_size).draw(batch, length, seeded())
    assert inputs.shape == targets.shape == (batch, length + items)
    assert (inputs[:, length:] == vocab_size - 1).all()
    assert (targets[:, :length] == IGNORED).all()
    for row, answers in zip(inputs[:, :length].tolist(), targets[:, length:].tolist(), strict=True):
        assert [token for token in row if token != 0] == answers
    assert set(targets[:, length:].flatten().tolist()) == set(range(1, vocab_size - 1))
    # Every place is as likely: 200 * 5 / 30 = 33 of each, and 5.3 is the binomial's deviation.
    assert ((inputs[:, :length] != 0).sum(0) - 33.3).abs().max() < 4 * 5.3


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("first", lambda bits: bits[-1] == bits[0]),
        ("majority", lambda bits: sum(bits) > len(bits) / 2),
        ("parity", lambda bits: sum(bits) % 2 == 1),
    ],
)
def test_bits_are_answered_after_each(question, answer):
    inputs, targets = Bits(question).draw(20, 12, seeded())
    for bits, answers in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert answers == [answer(bits[: t + 1]) for t in range(12)]
    assert 0.3 < targets.float().mean() < 0.7


def trainer(stages, learning_rate=1e-2):
    torch.manual_seed(0)
    model = LanguageModel(3, width=16, num_layers=1, cell="minlstm", conv_kernel=0, dropout=0.0)
    return TaskTrainer(model, Bits("majority"), stages, learning_rate=learning_rate, warmup_steps=4)


def test_stages_follow_when_they_are_learned_or_over():
    training = trainer([Stage(1, 8, 400, accuracy=0.999), Stage(5, 4, 10)])
    while training.stage == 0:
        easy = training.advance(20)
    assert easy.train_accuracy >= 0.999
    assert training.step < 400
    assert training.learning_rate == 1e-2  # full, until the last stage
    tokens = training.tokens
    assert tokens == 8 * training.step
    rates = []
    while not training.finished:
        rates.append(training.learning_rate)
        hard = training.advance(4)  # the last time 2, which is what is left
    assert hard.tokens == training.tokens == tokens + 10 * 4 * 5
    assert rates == pytest.approx([1e-2 * 0.5 * (1 + math.cos(math.pi * done)) for done in (0, 0.4, 0.8)])
    assert training.progress == 1


def test_evaluation_counts_right_answers_at_each_step():
    training = trainer([Stage(4, 4, 1)])
    training.model.head = AlwaysOne()
    _inputs, targets = Bits("majority").draw(50, 7, seeded(3))
    assert torch.equal(training.evaluate(7, 50, seed=3, at_once=50), targets.float().mean(0))
    assert training.evaluate(7, 50, seed=3, at_once=20).shape == (7,)
    training.task = SelectiveCopying(2, vocab_size=3)  # the one data token is 1
    share = training.evaluate(3, 10, seed=3)
    assert share[:3].isnan().all()
    assert (share[3:] == 1).all()


class AlwaysOne(nn.Module):
    def forward(self, x):
        return torch.tensor([0.0, 1.0, 0.0]).expand(*x.shape[:2], 3)


@pytest.mark.parametrize("cell", ["mingru", "minlstm"])
def test_remembering_gates_forget_over_a_spread_of_steps(cell):
    torch.manual_seed(0)
    model = LanguageModel(3, width=400, num_layers=1, cell=cell, expansion=1)
    remember(model, 1000)
    layer = model.blocks[0].recurrent
    bias = layer.bias_ih_l0.detach()
    if cell == "mingru":
        opening = bias[:400].sigmoid()
    else:
        forget, new = bias[:800].sigmoid().view(2, 400)
        opening = new / (forget + new)
    steps = opening.reciprocal().log10() * (1 if cell == "mingru" else 2)
    assert 0 <= steps.min() < 0.7
    assert 2.8 < steps.max() < 3.1
    assert abs(steps.median() - 1.5) < 0.2


@pytest.mark.parametrize("block", [(1, 1), (16, 1)])
def test_fine_tuning_ends_at_the_density(block):
    torch.manual_seed(0)
    model = LanguageModel(4, width=32, num_layers=1, cell="lstm", expansion=1, dropout=0.0)
    settings = TrainingSettings(steps=25, batch_size=2, chunk_length=8, warmup_steps=2, held_out=0.2)
    progress = list(
        fine_tune_pruning(trained := Trainer(model, torch.arange(500) % 4, settings), density=0.25, block=block)
    )
    layer = model.blocks[0].recurrent
    assert progress == [0.4, 0.8, 1]
    assert trained.step == 25
    assert layer.mask_hh_l0.float().mean() == 0.25
    assert (layer.weight_hh_l0[~layer.mask_hh_l0] == 0).all()


def test_nothing_is_pruned_at_density_1():
    model = LanguageModel(4, width=8, num_layers=1, cell="lstm")
    settings = TrainingSettings(steps=3, batch_size=2, chunk_length=8, held_out=0.2)
    list(fine_tune_pruning(Trainer(model, torch.arange(500) % 4, settings), density=1.0, block=(1, 1)))
    assert not list(model.buffers())


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        (["characters", "--cells", "mingru,lstm"], 2),
        (["characters", "--cells", "lstm", "--torch"], 2),
        (["characters", "--cells", "lru,paralstm"], 2),
        (["pruning", "--densities", "0.5,0.1"], 4),
        (["copying", "--cells", "minlstm"], 1),
        (["bits", "--cells", "mingru", "--questions", "parity,first", "--depths", "2"], 2),
    ],
)
def test_a_run_is_written_and_drawn(command, rows, tmp_path):
    text, folder = tmp_path / "text.txt", tmp_path / "runs"
    folder.mkdir()
    text.write_text("to be or not to be, that is the question\n" * 100)
    options = ["--text", str(text)] if command[0] in ("characters", "pruning") else []
    with pytest.raises(SystemExit) as end:
        main(["bench", "learning", *command, *options, "--quick", "--device", "cpu", "--json", str(folder)])
    assert end.value.code == 0
    (path,) = folder.glob(f"learning-{command[0]}-*.json")
    content = json.loads(path.read_text())
    assert content["benchmark"] == f"learning-{command[0]}"
    assert content["versions"]["torch"] == torch.__version__
    assert content["seed"] == 0
    assert len(content["runs"]) == rows
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit) as end:
        main(["bench", "learning", "plot", str(path), "--output", str(folder / "image")])
    assert end.value.code == 0
    assert (folder / "image").read_bytes() == path.with_suffix(".png").read_bytes()


@pytest.mark.parametrize(("seed", "message"), [(1 << 64, "below 2**63"), (-1, "at least 0")])
def test_a_seed_that_cannot_be_is_named(seed, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "learning", "bits", "--quick", "--seed", str(seed), "--json", str(tmp_path / "run.json")])
    assert (end.value.code, capsys.readouterr().err) == (1, f"ostinato: error: seed must be {message}; got {seed}\n")
    assert not [*tmp_path.iterdir()]


def test_torchs_layers_learn_the_same_from_the_same_beginning(tmp_path):
    text, path = tmp_path / "text.txt", tmp_path / "run.json"
    text.write_text("to be or not to be, that is the question\n" * 100)
    options = ["--text", str(text), "--cells", "gru,lstm", "--torch", "--quick", "--device", "cpu", "--json", str(path)]
    with pytest.raises(SystemExit):
        main(["bench", "learning", "characters", *options])
    runs = json.loads(path.read_text())["runs"]
    layers = [("gru", "ostinato"), ("gru", "torch.nn"), ("lstm", "ostinato"), ("lstm", "torch.nn")]
    assert [(run["cell"], run["layer"]) for run in runs] == layers
    curves = [[point["held_out_loss"] for point in run["curve"]] for run in runs]
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)
    assert curves[2] == pytest.approx(curves[3], rel=1e-3)
    assert curves[0] != pytest.approx(curves[2], rel=1e-3)


def test_torchs_layers_are_put_in_without_a_random_number():
    torch.manual_seed(0)
    model = LanguageModel(9, width=8, num_layers=2, cell="lstm")
    weights, expected = {name: x.clone() for name, x in model.state_dict().items()}, torch.random.get_rng_state()
    changed = with_torch_layers(model)
    assert {type(block.recurrent) for block in changed.blocks} == {torch.nn.LSTM}
    assert torch.equal(torch.random.get_rng_state(), expected)
    for name, weight in changed.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    with pytest.raises(ValueError, match=r"cell must be one of gru, lstm, which torch\.nn has too; got 'mingru'"):
        with_torch_layers(LanguageModel(9, width=8, num_layers=1))


def run_pruning(text, path, *options):
    command = ["bench", "learning", "pruning", "--text", str(text), "--quick", "--device", "cpu", "--json", str(path)]
    with pytest.raises(SystemExit):
        main([*command, *options])


def test_pruned_losses_are_those_of_the_densities(tmp_path):
    """At density 1 nothing is pruned, so that loss is the dense model's."""
    text, path = tmp_path / "text.txt", tmp_path / "run.json"
    text.write_text("to be or not to be, that is the question\n" * 100)
    run_pruning(text, path, "--densities", "1,0.05")
    content = json.loads(path.read_text())
    full, sparse = content["runs"][:2]
    assert full["pruned_loss"] == pytest.approx(content["dense"]["held_out_loss"], abs=1e-5)
    assert sparse["pruned_loss"] != pytest.approx(content["dense"]["held_out_loss"], abs=1e-5)
    assert sparse["kept_weights"] / sparse["of_weights"] == pytest.approx(0.05, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["characters", "--text", "absent.txt"], "absent.txt: No such file"),
        (["copying", "--cells", "gruu"], "slstm; got 'gruu'"),
        (["copying", "--items", "9", "--length", "8"], "items must be at least 1 and at most length, 8; got 9"),
        (["bits", "--questions", "parity,odd"], "questions must be some of first, majority, parity; got 'odd'"),
        (["pruning", "--text", "other.json", "--densities", "0.5,a"], "with commas between; got '0.5,a'"),
        (["pruning", "--text", "other.json", "--densities", "1.5"], "densities must be above 0 and at most 1, with"),
        (["copying", "--steps", "-1"], "steps must be at least 1; got -1"),
        (["bits", "--steps", "0"], "steps must be at least 1; got 0"),
        (["pruning", "--text", "other.json", "--finetune", "0"], "finetune must be at least 1; got 0"),
        (["bits", "--json", "x.png"], "json must not end in .png, as the plot beside it does; got x.png"),
        (["plot", "other.json"], "benchmark must be one of characters, pruning, copying, bits; got 'scan'"),
        (["plot", "list.json"], "list.json: expected the JSON file of a run; it holds a list"),
        (["plot", "part.json"], "content must be a whole run; KeyError: 'test_lengths'"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text('{"benchmark": "scan"}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "part.json").write_text('{"benchmark": "learning-bits"}')
    with pytest.raises(SystemExit) as end:
        main(["bench", "learning", *arguments])
    assert end.value.code == 1
    assert message in capsys.readouterr().err


def test_settings_of_fine_tuning_are_refused_before_the_dense_model_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LearningRun, "train", lambda *_: pytest.fail("trained"))
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question\n" * 100)
    run_pruning(text, tmp_path, "--learning-rate", "0")
    assert "learning_rate must be above 0 and finite; got 0.0" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "published"), [("tinyshakespeare.txt", ["minGRU as published"]), ("mine.txt", [])])
def test_a_published_loss_is_drawn_beside_that_of_its_text_only(text, published):
    point = {"tokens": 1, "seconds": 1.0, "held_out_loss": 2.0}
    run = {"cell": "mingru", "model": {"num_layers": 1, "width": 8}, "curve": [point], "lowest_held_out_loss": 2.0}
    figure = figure_of({"benchmark": "learning-characters", "text": text, "device": "a CPU", "runs": [run]})
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == ["minGRU: 2.000 at its lowest", *published]


def test_drawing_says_what_it_can(tmp_path):
    with pytest.raises(ValueError, match="benchmark must be one of"):
        draw({}, tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())
