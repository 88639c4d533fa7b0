"""Saving and loading models in the format of the Hugging Face hub."""

import json

import pytest
import torch
from safetensors.torch import load_file

import ostinato
from ostinato.models import LanguageModel


@pytest.fixture
def saved(tmp_path):
    pytest.importorskip("huggingface_hub")
    model = LanguageModel(11, width=8, num_layers=2, cell="gru", conv_kernel=0)
    ostinato.prune(model.blocks[1], 0.3)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def test_a_saved_model_is_the_same_function(saved):
    model, folder = saved
    again = LanguageModel.from_pretrained(folder)
    assert again.settings == model.settings
    assert not again.training
    assert json.loads((folder / "config.json").read_text()) == model.settings
    assert set(load_file(folder / "model.safetensors")) == set(model.state_dict())
    tokens = torch.randint(11, (3, 20))
    torch.testing.assert_close(again(tokens)[0], model.eval()(tokens)[0], rtol=0, atol=0)
    weight, mask = again.blocks[1].recurrent.weight_hh_l0, again.blocks[1].recurrent.mask_hh_l0
    optimiser = torch.optim.SGD(again.parameters(), 0.1)
    again(tokens)[0].sum().backward()
    optimiser.step()
    assert not weight[~mask].any()
    assert "library_name: ostinato" in (folder / "README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_model_comes_back_in_its_dtype(dtype, tmp_path):
    """Not rounded to PyTorch's default, nor computing in it."""
    pytest.importorskip("huggingface_hub")
    model = LanguageModel(11, width=8, num_layers=1, cell="lstm").to(dtype)
    ostinato.prune(model, 0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.rand_like(parameter))  # float64 that float32 does not hold
    model.save_pretrained(tmp_path)
    again = LanguageModel.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)
    tokens = torch.randint(11, (3, 20))
    torch.testing.assert_close(again(tokens)[0], model.eval()(tokens)[0], rtol=0, atol=0)


def test_weights_of_another_model_are_refused(saved):
    _, folder = saved
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_layers": 3}))
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.2"):
        LanguageModel.from_pretrained(folder)


def test_pickled_weights_are_not_read(saved, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    _, folder = saved
    torch.save({}, folder / "pytorch_model.bin")

    def download(*, filename, **_):
        if filename == "model.safetensors":
            raise huggingface_hub.errors.EntryNotFoundError("not there")
        return str(folder / filename)

    monkeypatch.setattr("huggingface_hub.hub_mixin.hf_hub_download", download)
    with pytest.raises(ValueError, match="must be a safetensors file; got"):
        LanguageModel.from_pretrained("somebody/something")
