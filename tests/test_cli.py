"""The command line, in this process and in others."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ostinato.bench import report
from ostinato.checkpoint import load_checkpoint
from ostinato.cli import app, main
from ostinato.cli.train import MODEL_OPTIONS, TRAINING_OPTIONS
from ostinato.models import LanguageModel
from ostinato.training import TrainingSettings

TEXT = "the quick brown fox jumps over the lazy dog\n" * 40
SMALL = ["--width", "8", "--num-layers", "1", "--batch-size", "2", "--chunk-length", "16"]
SMALL += ["--steps", "6", "--evaluate-every", "2", "--device", "cpu"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder that holds text.txt; returns exit code, stdout and stderr."""
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


def test_help_and_version(run):
    from ostinato import __version__

    assert run("--version") == (0, f"ostinato {__version__}\n", "")
    _, help_text, _ = run()
    for command in ("demo", "train", "generate", "bench"):
        assert re.search(rf"\b{command}\b", help_text)
    assert run("train", "--help")[0] == 0


def test_defaults_are_the_librarys(run):
    (command,) = (command for command in app.registered_commands if command.callback.__name__ == "train")
    arguments = command.callback.__defaults__
    names = command.callback.__code__.co_varnames[1 : 1 + len(arguments)]
    defaults = dict(zip(names, arguments, strict=True))
    assert {name: defaults[name] for name in MODEL_OPTIONS} == LanguageModel.__init__.__kwdefaults__
    library = {name: getattr(TrainingSettings(), name) for name in TRAINING_OPTIONS}
    assert {name: defaults[name] for name in TRAINING_OPTIONS} == library


def test_train_then_generate(run):
    code, out, _ = train(run, "--curve", "curves/curve.json")
    assert code == 0
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


def test_resumed_equals_uninterrupted(run):
    assert train(run)[0] == 0
    # A run that stops between evaluations: killed by a signal after its third step.
    from ostinato.training import Trainer

    advance, trainer_steps = Trainer.advance, []

    def interrupted(self, steps):
        loss = advance(self, 1)
        trainer_steps.append(self.step)
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "advance", interrupted)
        code, out, _ = run("train", "--text", "text.txt", "--output", "cut", *SMALL)
    assert code == 130
    assert trainer_steps == [1, 2, 3]
    assert out.splitlines()[-1] == "Interrupted at step 3. To go on:  ostinato train --resume cut/last.safetensors"
    torch.manual_seed(123)
    assert run("train", "--resume", "cut/last.safetensors", "--device", "cpu")[0] == 0
    for name, tensor in weights("out/last.safetensors").items():
        assert torch.equal(tensor, weights("cut/last.safetensors")[name]), name
    whole, cut = (load_checkpoint(Path(folder) / "last.safetensors").training["trainer"] for folder in ("out", "cut"))
    for point, other in zip(whole["curve"], cut["curve"], strict=True):
        assert {**point, "seconds": 0} == {**other, "seconds": 0}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_resume_refuses_what_would_change_the_run(run):
    train(run)
    last = ("train", "--resume", "out/last.safetensors", "--device", "cpu")
    assert error(run(*last)) == "out/last.safetensors: all its 6 steps are done; expected a larger --steps to go on"
    assert "width of out/last.safetensors is 8; got 16" in error(run(*last, "--width", 16, "--steps", 8))
    assert run(*last, "--width", 8, "--steps", 8)[0] == 0
    Path("text.txt").write_text(TEXT.replace("fox", "ox"))
    assert "text.txt: expected the text that out/last.safetensors was trained on" in error(run(*last, "--steps", 10))
    assert "it holds weights only" in error(run("train", "--resume", "out/best.safetensors"))


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
    from ostinato import training

    losses = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(training, "held_out", lambda *_: next(losses))
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
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    trainer = json.loads(metadata["training"])

    def resumed(training, changed=None, **settings):
        content = {name: x for name, x in (tensors | (changed or {})).items() if x is not None}
        save_file(content, path, metadata | {"training": json.dumps(training)} | settings)
        return error(run("train", "--resume", path, "--device", "cpu", "--steps", 8))

    assert "expected the state of a training; KeyError: 'trainer'" in resumed({})
    assert "expected the state of a training; TypeError" in resumed(None)
    without_curve = {name: value for name, value in trainer["trainer"].items() if name != "curve"}
    assert "expected the state of a training; KeyError: 'curve'" in resumed(trainer | {"trainer": without_curve})
    moment = "training.optimizer.0.exp_avg"
    assert "optimizer.0.exp_avg should be (28, 8) and is (3,)" in resumed(trainer, {moment: torch.zeros(3)})
    assert "windows should be" in resumed(trainer, {"training.windows": None})
    assert "expected a checkpoint's settings and vocabulary" in resumed(trainer, vocabulary="null")


def error(result):
    """The message of a command that failed as it should: exit code 1 and one line on stderr."""
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
        (["--steps", "-1"], "steps must be at least 1; got -1"),
        (["--cell", "rnn"], "cell must be one of mingru, minlstm, gru, lstm; got 'rnn'"),
        (["--precision", "half"], "precision must be one of auto, float32, bfloat16; got 'half'"),
        (["--device", "tpu9"], "device must be auto, or one that PyTorch can use here; got 'tpu9'"),
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
    assert error(run(*generate, "--length", -1)) == "length must be at least 0; got -1"
    assert error(run(*generate, "--temperature", -1)) == "temperature must be finite and at least 0; got -1.0"
    assert error(run("generate", "absent")) == "absent: No such file or directory"
    Path(best).write_bytes(Path(best).read_bytes()[:-1])
    assert error(run(*generate)).startswith(f"{best}: expected a whole safetensors file")
    assert run("generate")[0] == 2
    assert run("generate", best, "--length", "many")[0] == 2


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
    monkeypatch.setattr("ostinato.training.held_out", lambda *_: next(losses))
    assert "Lowest held-out loss: 1.0000 nats" in train(run)[1]
    assert load_checkpoint(Path("out/best.safetensors")).training["trainer"]["step"] == 4
    assert load_checkpoint(Path("out/last.safetensors")).training["trainer"]["step"] == 6


def test_demo(run, monkeypatch):
    from ostinato.bench import sweeps

    monkeypatch.setattr(sweeps, "DEMO_LENGTHS", (16, 64))
    code, out, _ = run("demo", "--seconds", 0.5, "--output", "shown", "--device", "cpu")
    assert code == 0
    assert sorted(os.listdir("shown")) == ["model.safetensors", "times.json", "times.md", "times.png"]
    lines = json.loads(Path("shown/times.json").read_text())["lines"]
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


def test_demo_without_matplotlib_says_so_at_once(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib" in error(run("demo", "--output", "shown"))
    assert not Path("shown").exists()


def test_ctrl_c_in_a_terminal_saves(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    command = [sys.executable, "-m", "ostinato", "train", "--text", "text.txt", "--output", "out", *SMALL]
    command += ["--steps", "1000000"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "out" / "last.safetensors").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "To go on:  ostinato train --resume out/last.safetensors" in out
    step = int(re.search(r"Interrupted at step (\d+)", out)[1])
    assert load_checkpoint(tmp_path / "out" / "last.safetensors").training["trainer"]["step"] == step
