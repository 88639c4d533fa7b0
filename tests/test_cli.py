"""The command line, in this process and in others."""

import errno
import io
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file

from ostinato import models, training
from ostinato.bench import report
from ostinato.checkpoint import load_checkpoint, save_checkpoint
from ostinato.cli import app, main
from ostinato.cli.devices import choose_device
from ostinato.cli.train import CELLS, _trainer
from ostinato.files import locked
from ostinato.models import LanguageModel
from ostinato.training import TrainingSettings

TEXT = "the quick brown fox jumps over the lazy dog\n" * 40
SMALL = ["--width", "8", "--num-layers", "1", "--batch-size", "2", "--chunk-length", "16"]
SMALL += ["--steps", "6", "--evaluate-every", "2", "--device", "cpu"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a command in a folder that holds only text.txt; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("text.txt").write_text(TEXT)

    def call(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return stopped.value.code or 0, output.out, output.err

    return call


def train(run, *arguments):
    return run("train", "--text", "text.txt", "--output", "out", *SMALL, *arguments)


def weights(path):
    return load_checkpoint(Path(path)).model.state_dict()


def test_a_run_is_named_after_its_text_even_where_that_is_the_current_folder(run):
    code, _, err = run("train", "--text", ".", *SMALL)
    assert code == 0, err
    assert Path(f"runs/mingru-{Path.cwd().name}/last.safetensors").exists()


def test_help_and_version(run):
    from ostinato import __version__

    assert run("--version") == (0, f"ostinato {__version__}\n", "")
    _, help_text, _ = run()
    for command in ("demo", "train", "generate", "bench"):
        assert re.search(rf"\b{command}\b", help_text)
    assert run("train", "--help")[0] == 0


def test_defaults_are_the_librarys(run):
    panels = {"Model": {}, "Training": {}}
    for option in typer.main.get_command(app).commands["train"].params:
        panels.get(option.rich_help_panel, {})[option.name] = option.default
    assert panels["Model"] == LanguageModel.__init__.__kwdefaults__
    assert panels["Training"] | {"seconds": None} == asdict(TrainingSettings())
    assert tuple(models.CELLS) == CELLS


def test_train_then_generate(run):
    code, out, _ = train(run, "--curve", "curves/curve.json")
    assert code == 0
    assert re.search(r"6 steps, 2 x 16 characters a step.* [\d,]+ characters/s", out, re.DOTALL)
    curve = json.loads(Path("curves/curve.json").read_text())["curve"]
    assert [(point["step"], point["tokens"]) for point in curve] == [(2, 64), (4, 128), (6, 192)]
    lowest = min(point["held_out_loss"] for point in curve)
    assert f"{lowest:.4f} nats, {lowest / 0.6931471805599453:.4f} bits per character" in out.splitlines()[-2]
    assert sorted(os.listdir("out")) == ["best.safetensors", "last.safetensors"]
    best = min(
        load_checkpoint(Path("out/best.safetensors")).training["trainer"]["curve"], key=lambda p: p["held_out_loss"]
    )
    assert best["held_out_loss"] == lowest

    arguments = ("generate", "out/best.safetensors", "--prompt", "the ", "--length", 30, "--device", "cpu", "--seed")
    code, first, _ = run(*arguments, 1)
    assert code == 0
    assert first.startswith("the ")
    assert len(first) == len("the ") + 30 + len("\n")
    assert set(first) <= set(TEXT)
    assert run(*arguments, 1)[1] == first
    assert run(*arguments, 2)[1] != first


@pytest.fixture
def after_three_steps(monkeypatch):
    """Make something happen after the third step of every training run, which is between two evaluations."""
    from ostinato.training import Trainer

    advance = Trainer.advance

    def happens(action):
        def stepping(self, steps):
            loss = advance(self, 1)
            if self.step == 3:
                action()
            return loss

        monkeypatch.setattr(Trainer, "advance", stepping)

    return happens


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_resumed_equals_uninterrupted(run, after_three_steps, number):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"these tests were started with {number.name} ignored")
    assert train(run)[0] == 0
    previous = signal.getsignal(number)
    after_three_steps(lambda: os.kill(os.getpid(), number))
    code, out, _ = run("train", "--text", "text.txt", "--output", "cut", *SMALL)
    assert code == 130
    assert out.splitlines()[-1] == "Interrupted at step 3. To go on:  ostinato train --resume cut/last.safetensors"
    assert load_checkpoint(Path("cut/last.safetensors")).training["trainer"]["step"] == 3
    assert signal.getsignal(number) is previous
    after_three_steps(lambda: None)
    torch.manual_seed(123)
    assert run("train", "--resume", "cut/last.safetensors", "--device", "cpu")[0] == 0
    for name, tensor in weights("out/last.safetensors").items():
        assert torch.equal(tensor, weights("cut/last.safetensors")[name]), name
    whole, cut = (load_checkpoint(Path(folder) / "last.safetensors").training["trainer"] for folder in ("out", "cut"))
    for point, other in zip(whole["curve"], cut["curve"], strict=True):
        assert {**point, "seconds": 0} == {**other, "seconds": 0}


def test_a_signal_that_is_ignored_stays_so(run, after_three_steps):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        after_three_steps(lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert train(run)[0] == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_lost_terminal_ends_a_training_saved(run, monkeypatch):
    last = Path("out/last.safetensors")

    class Terminal(io.StringIO):
        def write(self, text):
            if last.exists():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return len(text)

    monkeypatch.setattr(sys, "stdout", Terminal())
    code, _, err = train(run)
    assert code == 130
    assert err == f"Interrupted at step 2 (Input/output error). To go on:  ostinato train --resume {last}\n"
    assert load_checkpoint(last).training["trainer"]["step"] == 2


def test_a_closed_pipe_ends_a_training_saved(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    command = [sys.executable, "-m", "ostinato", "train", "--text", "text.txt", "--output", "out", *SMALL]
    command += ["--steps", "1000000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        err = process.stderr.read()
    assert process.returncode == 130, err
    step = int(re.search(r"Interrupted at step (\d+)", err)[1])
    assert load_checkpoint(tmp_path / "out" / "last.safetensors").training["trainer"]["step"] == step


@pytest.mark.parametrize("writes", range(1, 5))
def test_a_run_killed_between_two_checkpoints_goes_on_to_the_same_best(run, monkeypatch, writes):
    from ostinato.training import Trainer

    evaluate, losses = Trainer.evaluate, {2: 2.0, 4: 1.0, 6: 3.0}

    def evaluated(self):
        point = evaluate(self)
        self.curve[-1] = replace(point, held_out_loss=losses[self.step])
        return self.curve[-1]

    monkeypatch.setattr(Trainer, "evaluate", evaluated)
    train(run)
    whole = load_checkpoint(Path("out/best.safetensors"))
    assert whole.training["trainer"]["step"] == 4

    written = []

    def killed(path, checkpoint):
        if len(written) == writes:
            raise KeyboardInterrupt
        save_checkpoint(path, checkpoint)
        written.append(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ostinato.checkpoint.save_checkpoint", killed)
        assert run("train", "--text", "text.txt", "--output", "cut", *SMALL)[0] == 130
    if writes == 1:  # nothing to go on from yet
        message = error(run("train", "--text", "text.txt", "--output", "cut", *SMALL))
        assert message == "cut/best.safetensors is there already: expected another --output, or --overwrite"
        assert run("train", "--text", "text.txt", "--output", "cut", *SMALL, "--overwrite")[0] == 0
    else:
        assert run("train", "--resume", "cut/last.safetensors", "--device", "cpu")[0] == 0
    best = load_checkpoint(Path("cut/best.safetensors"))
    assert best.training["trainer"]["step"] == 4
    assert all(torch.equal(tensor, best.model.state_dict()[name]) for name, tensor in whole.model.state_dict().items())


def test_resuming_what_is_done_is_no_error(run):
    _, out, _ = train(run)
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    code, again, err = run("train", "--resume", "out/last.safetensors", "--device", "cpu", "--curve", "curve.json")
    assert (code, err) == (0, "")
    assert again.splitlines()[-2:] == out.splitlines()[-2:]
    assert again.splitlines()[3] == "All its steps are done; a larger --steps goes on."
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before
    assert [point["step"] for point in json.loads(Path("curve.json").read_text())["curve"]] == [2, 4, 6]


def test_two_trainings_into_one_folder(run):
    train(run)
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    with locked(Path("out")):
        message = "out: expected a folder that no other process writes to; one does now"
        assert error(train(run, "--overwrite")) == message
        assert error(run("train", "--resume", "out/last.safetensors", "--device", "cpu", "--steps", 8)) == message
        assert {path: path.read_bytes() for path in Path("out").iterdir()} == before
        assert run("train", "--text", "text.txt", "--output", "other", *SMALL)[0] == 0
    assert train(run, "--overwrite")[0] == 0


def test_a_full_disk_names_the_file(run):
    train(run)  # what is compiled is written too
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = weights("out/last.safetensors")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        result = train(run, "--seed", 1, "--overwrite")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error(result) == "out/best.safetensors: File too large"
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights("out/last.safetensors").items())
    assert sorted(os.listdir("out")) == ["best.safetensors", "last.safetensors"]


def test_the_curve_stays_out_of_the_text(run):
    Path("texts").mkdir()
    Path("text.txt").rename("texts/text.txt")
    Path("link").symlink_to("texts")
    for text, curve in (("texts", "texts/new/curve.json"), ("texts", "link/curve.json"), ("texts/text.txt",) * 2):
        message = error(run("train", "--text", text, "--output", "out", *SMALL, "--curve", curve))
        assert message == f"curve must be outside the text, {text}, or --resume would find another text; got {curve}"
    assert os.listdir("texts") == ["text.txt"]
    assert run("train", "--text", "texts", "--output", "out", *SMALL)[0] == 0
    on = ("train", "--resume", "out/last.safetensors", "--steps", 8, "--device", "cpu")
    assert "curve must be outside the text, texts" in error(run(*on, "--curve", "texts/curve.json"))
    assert run(*on, "--curve", "curve.json")[0] == 0


def test_the_curve_replaces_no_checkpoint(run):
    refused = "curve must be another file than the checkpoints, which it would replace; got "
    Path("link").symlink_to("out")
    for curve in ("out/last.safetensors", "link/best.safetensors"):
        assert error(train(run, "--curve", curve)) == refused + curve
    assert train(run)[0] == 0
    before = Path("out/last.safetensors").read_bytes()
    for steps, output in ((6, "out"), (8, "out"), (8, "other")):  # the first has nothing left to train
        on = ("train", "--resume", "out/last.safetensors", "--steps", steps, "--output", output, "--device", "cpu")
        assert error(run(*on, "--curve", "out/last.safetensors")) == refused + "out/last.safetensors"
    assert Path("out/last.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--text", "text.txt", "--output", "out", *SMALL, "--curve"],
        ["bench", "learning", "characters", "--text", "text.txt", "--cells", "mingru", "--quick", "--json"],
        ["bench", "persistent", "--quick", "--only", "GRU", "--device", "cpu", "--json"],
    ],
)
def test_a_fifo_gets_one_content(run, command):
    os.mkfifo("fifo")
    contents = []
    reader = threading.Thread(target=lambda: contents.append(Path("fifo").read_text()), daemon=True)
    reader.start()
    code, _, err = run(*command, "fifo")
    assert (code, err) == (0, "")
    reader.join(10)
    assert json.loads(contents[0])
    assert not [name for name in os.listdir() if name.startswith("fifo") and name != "fifo"]


def test_a_path_is_shown_as_it_is(run):
    Path("[red]").mkdir()
    Path("text.txt").rename("[red]/:fire:[b].txt")
    code, out, _ = run("train", "--text", "[red]/:fire:[b].txt", "--output", "[red]/out[/b]", *SMALL)
    assert code == 0
    assert out.startswith("Text:      [red]/:fire:[b].txt, ")
    assert out.endswith("ostinato generate [red]/out[/b]/best.safetensors\n")


def test_generation_without_stdout(run, monkeypatch):
    train(run)
    monkeypatch.setattr(sys, "stdout", None)
    code, _, err = run("generate", "out/best.safetensors", "--length", 3, "--device", "cpu")
    assert (code, err) == (0, "")


@pytest.mark.parametrize("device", ["mps", "hip", "hpu", "vulkan", "cuda:99"])
def test_a_device_that_is_not_there_is_named_in_a_line(device):
    with pytest.raises(ValueError, match=f"one that PyTorch can use here; got '{device}'") as caught:
        choose_device(device)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_resume_refuses_what_would_change_the_run(run):
    train(run)
    last = ("train", "--resume", "out/last.safetensors", "--device", "cpu")
    for steps in (4, 5):
        message = f"steps must be above the 6 that out/last.safetensors has done; got {steps}"
        assert error(run(*last, "--steps", steps)) == message
    assert "width of out/last.safetensors is 8; got 16" in error(run(*last, "--width", 16, "--steps", 8))
    assert run(*last, "--width", 8, "--steps", 8)[0] == 0
    Path("text.txt").write_text(TEXT.replace("fox", "ox"))
    assert "text.txt: expected the text that out/last.safetensors was trained on" in error(run(*last, "--steps", 10))
    assert "it holds weights only" in error(run("train", "--resume", "out/best.safetensors"))
    Path("text.txt").rename("moved.txt")
    message = "text.txt: expected the text that out/last.safetensors was trained on; --text may say where it is now"
    assert error(run(*last, "--steps", 10)) == message
    Path("moved.txt").write_text(TEXT)
    assert run(*last, "--steps", 10, "--text", "moved.txt")[0] == 0


def test_does_not_overwrite_another_run(run):
    train(run)
    before = weights("out/last.safetensors")
    assert "out/last.safetensors is there already" in error(train(run, "--seed", 5))
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights("out/last.safetensors").items())
    assert train(run, "--seed", 5, "--overwrite")[0] == 0
    run("train", "--text", "text.txt", "--output", "other", *SMALL)
    on = ("train", "--resume", "other/last.safetensors", "--device", "cpu", "--steps", 8)
    assert "out/last.safetensors is there already" in error(run(*on, "--output", "out"))
    Path("out/last.safetensors").unlink()
    assert "out/best.safetensors is there already" in error(run(*on, "--output", "out"))
    assert run(*on, "--output", "out", "--overwrite")[0] == 0


def test_a_run_that_goes_on_elsewhere_names_the_best_checkpoint_there_is(run, monkeypatch):
    from ostinato.training import trainer

    losses = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(trainer, "held_out", lambda *_: next(losses))
    run("train", "--text", "text.txt", "--output", "first", *SMALL)
    on = ("train", "--resume", "first/last.safetensors", "--device", "cpu", "--steps", 8, "--output", "second")
    code, out, _ = run(*on)
    assert code == 0
    assert out.splitlines()[-1] == "To see what it writes:  ostinato generate first/best.safetensors"
    assert not Path("second/best.safetensors").exists()


def test_damaged_training_state(run):
    train(run)
    path = Path("out/last.safetensors")
    with safe_open(path, "pt") as file:
        metadata, names = file.metadata(), file.keys()
        tensors = {name: file.get_tensor(name).clone() for name in names}  # the file is overwritten
    trainer = json.loads(metadata["training"])

    def resumed(training, changed=None, **settings):
        content = {name: x for name, x in (tensors | (changed or {})).items() if x is not None}
        save_file(content, path, metadata | {"training": json.dumps(training)} | settings)
        return error(run("train", "--resume", path, "--device", "cpu", "--steps", 8))

    assert "expected the state of a training; KeyError: 'trainer'" in resumed({})
    assert "expected the state of a training as a JSON object; got NoneType" in resumed(None)
    without_curve = {name: value for name, value in trainer["trainer"].items() if name != "curve"}
    assert "expected the state of a training; KeyError: 'curve'" in resumed(trainer | {"trainer": without_curve})
    point = trainer["trainer"]["curve"][0]
    for changed, message in (
        ({"step": "4"}, "step must be an int; got str"),
        ({"step": -4}, "step must be at least 0; got -4"),
        ({"seconds": math.nan}, "seconds must be at least 0 and finite; got nan"),
        ({"curve": [point | {"step": None}]}, "step must be an int; got NoneType"),
        ({"curve": [point | {"held_out_loss": "2"}]}, "held_out_loss must be a number; got str"),
    ):
        state = trainer["trainer"] | changed
        found = resumed(trainer | {"trainer": state})
        assert re.search(f"{path}: expected the state of a training; .*{message}", found)
    assert f"{path}: expected the path of the text that it was trained on; got 5" in resumed(trainer | {"text": 5})
    for name in ("windows", "dropout"):
        key = f"training.{name}"
        damaged = torch.full_like(tensors[key], 255)
        assert f"{path}: expected the state of a training; Invalid mt19937 state" in resumed(trainer, {key: damaged})
    moment = "training.optimizer.0.exp_avg"
    expected = "optimizer.0.exp_avg should be (28, 8) of torch.float32 and is"
    assert f"{expected} (3,) of torch.float32" in resumed(trainer, {moment: torch.zeros(3)})
    assert f"{expected} (28, 8) of torch.int64" in resumed(trainer, {moment: tensors[moment].long()})
    windows = tensors["training.windows"].long()
    assert "of torch.uint8 and is (5056,) of torch.int64" in resumed(trainer, {"training.windows": windows})
    assert "windows should be" in resumed(trainer, {"training.windows": None})
    assert "expected a checkpoint's settings and vocabulary" in resumed(trainer, vocabulary="null")


def error(result):
    """Return the message of a command that failed as it should: exit code 1 and one line on stderr."""
    code, _, err = result
    assert code == 1, result
    assert re.fullmatch(r"ostinato: error: .+\n", err)
    return err.removeprefix("ostinato: error: ").strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "absent.txt"], "absent.txt: No such file or directory"),
        (["--text", "binary"], "binary: expected UTF-8 text; byte 0 is 0xff"),
        (["--text", "empty"], "empty: expected text; the file is empty"),
        (["--text", "short"], "the text is too short: .* need about 170 tokens; got 5"),
        (["--width", "0"], "width must be at least 1; got 0"),
        (["--num-layers", str(10**12)], ".*, num_layers 1000000000000, .* must fit into memory, .* got .* or more"),
        (["--mlp-ratio", "1e12"], ".* mlp_ratio 1000000000000.0 must fit into memory"),
        (["--batch-size", str(10**12)], "batch_size 1000000000000 must fit into memory"),
        (["--mlp-ratio", "inf"], "mlp_ratio must be above 0 and finite; got inf"),
        (["--steps", "-1"], "steps must be at least 1; got -1"),
        (["--cell", "rnn"], "cell must be one of mingru, minlstm, gru, lstm, .*; got 'rnn'"),
        (["--precision", "half"], "precision must be one of auto, float32, bfloat16; got 'half'"),
        (["--device", "tpu9"], "device must be auto, or one that PyTorch can use here; got 'tpu9'"),
        (["--shard"], "shard needs several processes, which torchrun starts"),
        (["--graph"], "graph must be False except on a CUDA device, in one process"),
        (["--device", "meta"], "device must be auto, or one that PyTorch can use here; got 'meta'"),
        (["--output", "text.txt/out"], "text.txt/out: expected a folder to write in; Not a directory"),
        (["--curve", "text.txt/curve.json"], "text.txt: expected a folder to write in; it is a file"),
        (["--curve", "folder"], "folder: expected a file to write; it is a folder"),
        (["--resume", "text.txt"], "text.txt: expected a whole safetensors file"),
    ],
)
def test_bad_training(run, arguments, message):
    Path("binary").write_bytes(b"\xff\xfe\x00")
    Path("empty").touch()
    Path("short").write_text("short")
    Path("folder").mkdir()
    before = sorted(os.listdir())
    assert re.match(message, error(train(run, *arguments)))
    assert not [path for path in Path("out").rglob("*") if path.is_file()]
    assert [path for path in sorted(os.listdir()) if path != "out"] == before


def test_bad_generation(run):
    train(run)
    best = "out/best.safetensors"
    generate = ("generate", best, "--device", "cpu")
    assert error(run(*generate, "--prompt", "fox€")).startswith("character '€' at position 3 is not one of the 28")
    assert error(run(*generate, "--prompt", "")).startswith("prompt must have at least one character")
    assert error(run(*generate, "--seed", 1 << 63)).startswith("seed must be at least 0 and below 2**63; got 92")
    assert error(run(*generate, "--length", 0)) == "length must be at least 1; got 0"
    assert error(run(*generate, "--temperature", -1)) == "temperature must be finite and at least 0; got -1.0"
    assert error(run("generate", "absent")) == "absent: No such file or directory"
    Path(best).write_bytes(Path(best).read_bytes()[:-1])
    assert error(run(*generate)).startswith(f"{best}: expected a whole safetensors file")
    assert run("generate")[0] == 2
    assert run("generate", best, "--length", "many")[0] == 2


@pytest.mark.parametrize(
    ("asked", "machine", "graph"),
    [
        (None, {}, True),
        (False, {}, False),
        (None, {"device": torch.device("cpu")}, False),
        (None, {"compile": True}, False),
    ],
)
def test_one_gpu_replays_its_steps(asked, machine, graph, monkeypatch):
    made = []
    monkeypatch.setattr(training.Trainer, "__init__", lambda *_, **machine: made.append(machine["graph"]))
    machine = {
        "device": torch.device("cuda"),
        "compile": False,
        "mesh": None,
        "accumulate": 1,
        "graph": asked,
    } | machine
    _trainer(LanguageModel(3, width=8, num_layers=1), torch.arange(9), TrainingSettings(), machine)
    assert made == [graph]


def test_diverged_training_keeps_the_checkpoint_before(run):
    from ostinato.training import Trainer

    evaluate = Trainer.evaluate

    def poisoned(self):
        if self.step == 4:
            torch.nn.init.constant_(self.model.head.weight, torch.nan)
        return evaluate(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", poisoned)
        message = error(train(run))
    assert message == "the held-out loss is nan at step 4; a lower learning rate than 0.004 may help"
    for path in ("out/last.safetensors", "out/best.safetensors"):
        assert load_checkpoint(Path(path)).training["trainer"]["step"] == 2
        assert all(tensor.isfinite().all() for tensor in weights(path).values())


def test_best_is_the_lowest_held_out_loss(run, monkeypatch):
    losses = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr("ostinato.training.trainer.held_out", lambda *_: next(losses))
    assert "Lowest held-out loss: 1.0000 nats" in train(run)[1]
    assert load_checkpoint(Path("out/best.safetensors")).training["trainer"]["step"] == 4
    assert load_checkpoint(Path("out/last.safetensors")).training["trainer"]["step"] == 6


def test_demo(run, monkeypatch, few_rounds):
    from ostinato.bench import papers

    monkeypatch.setattr(papers, "DEMO_LENGTHS", (16, 64))
    code, out, _ = run("demo", "--seconds", 0.5, "--output", "shown", "--device", "cpu")
    assert code == 0
    assert sorted(os.listdir("shown")) == ["model.safetensors", "times.json", "times.md", "times.png"]
    run_of_it = json.loads(Path("shown/times.json").read_text())
    lines = papers.lengths_sweep("mingru", 256, (16, 64)).shown(run_of_it)["lines"]
    ways = ["MinGRU, time loop, CPU", "MinGRU, scan, CPU", "torch.nn.GRU, CPU", "MinGRU's GEMM alone, CPU"]
    assert list(lines) == ways
    assert all([point["x"] for point in line["points"]] == [16, 64] for line in lines.values())
    table = Path("shown/times.md").read_text()
    for way in ways:
        shown = " | ".join(report.figures(point["value"]) for point in lines[way]["points"])
        assert f"| {way} | {shown} |" in table
        assert re.search(rf"{re.escape(way)} +{shown.replace(' | ', ' +')}", out)
    assert Path("shown/times.png").read_bytes().startswith(b"\x89PNG")
    assert run("generate", "shown/model.safetensors", "--length", 5, "--device", "cpu")[0] == 0


def test_the_demo_draws_nothing_without_matplotlib(run, monkeypatch, few_rounds):
    from ostinato.bench import papers

    monkeypatch.setattr(papers, "DEMO_LENGTHS", (16, 32))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = run("demo", "--seconds", 0.1, "--output", "shown", "--device", "cpu")
    assert code == 0
    assert "No plot: matplotlib is not installed; pip install 'ostinato[plots]'" in out
    assert out.endswith("Written to shown: model.safetensors, times.md, times.json\n")
    assert sorted(os.listdir("shown")) == ["model.safetensors", "times.json", "times.md"]
