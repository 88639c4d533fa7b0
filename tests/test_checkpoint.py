"""Checkpoints are restored completely, or refused with a reason."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ostinato
from comparisons import same_bits
from ostinato.checkpoint import FORMAT, Checkpoint, load_checkpoint, save_checkpoint
from ostinato.models import LanguageModel
from ostinato.text import Vocabulary


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    model = LanguageModel(4, width=8, num_layers=2, cell="minlstm", conv_kernel=2)
    tensors = {"windows": torch.arange(5, dtype=torch.uint8)}
    save_checkpoint(tmp_path / "a.safetensors", Checkpoint(model, Vocabulary("\nabü"), {"step": 3}, tensors))
    return tmp_path / "a.safetensors"


def rewrite(path, metadata=None, tensors=None):
    """The checkpoint with some of its metadata and tensors replaced."""
    with safe_open(path, "pt") as file:
        old_metadata, old_tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file({**old_tensors, **(tensors or {})}, path, {**old_metadata, **(metadata or {})})


def test_round_trip(path):
    loaded = load_checkpoint(path)
    torch.manual_seed(0)
    model = LanguageModel(4, width=8, num_layers=2, cell="minlstm", conv_kernel=2)
    assert loaded.model.settings == model.settings
    assert same_bits(loaded.model.parameters(), model.parameters())
    assert loaded.vocabulary.characters == "\nabü"
    assert loaded.training == {"step": 3}
    assert torch.equal(loaded.training_tensors["windows"], torch.arange(5, dtype=torch.uint8))


def test_paths_may_be_strings(path, tmp_path):
    again = str(tmp_path / "again.safetensors")
    save_checkpoint(again, load_checkpoint(str(path)))
    assert load_checkpoint(again).training == {"step": 3}


def test_truncated_anywhere(path):
    content = path.read_bytes()
    for size in (0, 4, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"a\.safetensors: expected a whole safetensors file"):
            load_checkpoint(path)


def test_no_file():
    with pytest.raises(ValueError, match=f"{os.devnull}: expected a whole safetensors file"):
        load_checkpoint(os.devnull)


def test_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "absent.safetensors")
    with pytest.raises(IsADirectoryError, match=r"expected a checkpoint; got a folder$"):
        load_checkpoint(tmp_path)
    for name in ("last.safetensors", "best.safetensors", "log.txt"):
        (tmp_path / name).touch()
    with pytest.raises(IsADirectoryError, match=r"got a folder with best\.safetensors, last\.safetensors$"):
        load_checkpoint(tmp_path)


def test_not_ours(tmp_path):
    save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=f"expected a checkpoint of format '{FORMAT}'; got 'none'"):
        load_checkpoint(tmp_path / "other.safetensors")


def test_weights_of_another_model(path):
    settings = json.dumps({**load_checkpoint(path).model.settings, "width": 16})
    rewrite(path, {"model": settings})
    with pytest.raises(ValueError, match=r"conv.bias should be \(16,\) and is \(8,\)"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model": "{}"}, "settings and vocabulary; .*vocab_size"),
        ({"model": json.dumps({"vocab_size": 4, "cell": "transformer"})}, "got 'transformer'"),
        ({"model": "not JSON"}, "settings and vocabulary"),
        ({"vocabulary": json.dumps("ab")}, "a vocabulary of 4 characters; got 2"),
    ],
)
def test_settings_that_do_not_fit(path, metadata, message):
    rewrite(path, metadata)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(path)


def test_a_huge_model_is_refused_before_it_is_built(path):
    """Each would take more memory, or more time, than there is."""
    settings = load_checkpoint(path).model.settings
    for changed, message in (
        ({"width": 10_000_000}, r"should be \(10000000,\) and is \(8,\)"),
        ({"width": 1 << 62}, "settings and vocabulary"),
        ({"expansion": 1e300}, "settings and vocabulary"),
        ({"vocab_size": 1 << 40}, r"embedding.weight should be \(1099511627776, 8\)"),
        ({"num_layers": 1_000_000_000}, "num_layers is 1000000000 in a file of 24 tensors"),
    ):
        rewrite(path, {"model": json.dumps({**settings, **changed})})
        with pytest.raises(ValueError, match=message):
            load_checkpoint(path)


def test_weights_that_are_no_floating_point_numbers(path):
    name = "model.blocks.0.recurrent.weight_ih_l0"
    weight = load_checkpoint(path).model.state_dict()[name.removeprefix("model.")]
    for dtype in (torch.int8, torch.int64, torch.bool):
        rewrite(path, tensors={name: weight.to(dtype)})
        with pytest.raises(
            ValueError, match=f"expected blocks.0.recurrent.weight_ih_l0 to be floating-point; got {dtype}"
        ):
            load_checkpoint(path)
    rewrite(path, tensors={name: weight.bfloat16()})


@pytest.mark.parametrize("cell", ["gru", "minlstm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_keep_their_dtype(path, cell, dtype):
    model = LanguageModel(4, width=8, num_layers=2, cell=cell).to(dtype)
    save_checkpoint(path, Checkpoint(model, Vocabulary("\nabü")))
    loaded = load_checkpoint(path).model
    for name, weight in model.named_parameters():
        found = loaded.get_parameter(name)
        assert (found.dtype, found.requires_grad) == (dtype, True)
        assert torch.equal(found, weight)
    tokens = torch.randint(4, (2, 9))
    torch.testing.assert_close(loaded.eval()(tokens)[0], model.eval()(tokens)[0])


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_masks(path, cell):
    model = ostinato.prune(LanguageModel(4, width=8, num_layers=2, cell=cell), 0.3)
    save_checkpoint(path, Checkpoint(model, Vocabulary("\nabü")))
    loaded = load_checkpoint(path).model
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    tokens = torch.randint(4, (2, 9))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens)[0], model.eval()(tokens)[0])
    name = "model.blocks.0.recurrent.mask_hh_l0"
    rewrite(path, tensors={name: torch.ones(loaded.blocks[0].recurrent.mask_hh_l0.shape)})
    with pytest.raises(ValueError, match=r"expected blocks.0.recurrent.mask_hh_l0 to be bool; got torch.float32"):
        load_checkpoint(path)


def test_missing_and_surplus_weights(path):
    rewrite(path, tensors={"model.other": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"other should be absent and is \(3,\)"):
        load_checkpoint(path)
