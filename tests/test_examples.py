"""The examples run to their end, and what they print is right."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch, capsys):
    """Runs an example's ``main`` and returns what it printed."""

    def run(name, *args):
        path = EXAMPLES / f"{name}.py"
        monkeypatch.setattr("sys.argv", [str(path)])
        with torch.random.fork_rng():
            runpy.run_path(str(path))["main"](*args)
        return capsys.readouterr().out

    return run


def numbers(text, row):
    """The numbers in the line that begins with ``row``."""
    line = re.search(rf"^{re.escape(row)}(.*)", text, re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+\.?\d*(?:e-?\d+)?", line[1])]


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "audio",
        "forecast",
        "reinforcement",
        "characters",
        "serve",
        "recurrent_gemma",
    }


def test_forecast_beats_the_linear_one_and_steps_agree(example):
    pytest.importorskip("matplotlib")
    output = example("forecast", 100)
    errors = {row: numbers(output, row)[-1] for row in ("minGRU", "linear", "last value")}
    assert errors["minGRU"] < 0.95 * errors["linear"] < errors["last value"]
    assert numbers(output, "step by step, the forecast differs from the parallel one by ")[0] < 1e-5


def test_characters_learn_and_are_written(example):
    output = example("characters", 50)
    losses = re.findall(r"held-out loss (\d\.\d+)", output)
    assert float(losses[-1]) < 2.8  # a guess by how often each character occurs costs 3.1
    assert len(output.partition("def ")[2]) == 301


def test_serve_forecasts_with_a_tenth_of_the_weights(example):
    pytest.importorskip("matplotlib")
    output = example("serve", 60, 64)
    assert "10% of the weights are left" in output
    (last_value,) = numbers(output, "last value         error")
    for row in ("dense, torch.nn", "10% of its weights", "the same, prepared"):
        error, *_, difference = numbers(output, row)
        assert error < 0.9 * last_value
        assert difference < 1e-4


def test_recurrent_gemma_is_the_same_without_its_loop(example):
    pytest.importorskip("transformers")
    output = example("recurrent_gemma", 64)
    for row in ("logits differ in float64 by", "gradients differ in float64 by"):
        assert numbers(output, row)[-1] < 1e-5
    assert "both write the same: True" in output


def test_audio_pruned_is_the_same_network_as_its_zeros(example):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    output = example("audio", 60)
    torch.set_num_threads(threads)
    assert "33% of the GRUs' weights are left" in output
    for row in ("dense differs from dense, torch.nn by ", "pruned differs from pruned, torch.nn by "):
        assert numbers(output, row)[0] < 1e-5
    assert "pruned elsewhere differs from pruned by 0e+00" in output


def test_the_documentation_shows_every_example():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'\n--8<-- "examples/{path.name}"\n' in page  # as pymdownx.snippets wants it
