"""Pruning keeps the largest weights, and what it set to zero stays zero."""

import copy
import io
import os
import pickle
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

import ostinato
from ostinato.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ostinato.cli import main
from ostinato.kernels.persistent.masks import BLOCKS, block_of, cut
from ostinato.masks import kept_weights
from ostinato.models import LanguageModel
from ostinato.text import Vocabulary
from ostinato.training import Trainer

LAYERS = {nn.RNN: ostinato.RNN, nn.GRU: ostinato.GRU, nn.LSTM: ostinato.LSTM}
GATES = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}


def expected_mask(weight, gates, densities, block, keep_diagonal=False):
    """Block after block, in NumPy."""
    rows, columns = block
    matrices = weight.detach().numpy().reshape(gates, -1, weight.shape[1])
    mask = np.zeros(matrices.shape, bool)
    free = np.eye(*matrices.shape[1:], dtype=bool) & keep_diagonal
    for matrix, kept, density in zip(matrices, mask, densities, strict=True):
        cuts = [
            np.s_[i : i + rows, j : j + columns]
            for i in range(0, matrix.shape[0], rows)
            for j in range(0, matrix.shape[1], columns)
        ]
        counted = [cut for cut in cuts if not free[cut].all()]
        scores = [np.abs(matrix[cut][~free[cut]]).mean() for cut in counted]
        for n in np.argsort(scores)[::-1][: max(1, round(density * len(counted)))]:
            kept[counted[n]] = True
        kept |= free
    return torch.from_numpy(mask.reshape(weight.shape))


@settings(max_examples=60, deadline=None)
@given(
    base=st.sampled_from(list(LAYERS)),
    hidden=st.integers(1, 40),
    inputs=st.integers(1, 20),
    block=st.sampled_from(BLOCKS),
    densities=st.lists(st.floats(0.001, 1), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_keeps_the_largest_blocks_of_each_gate(base, hidden, inputs, block, densities, seed):
    torch.manual_seed(seed)
    gates = GATES[base]
    layer = base(inputs, hidden, num_layers=2, bidirectional=True, dtype=torch.float64)
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    assert ostinato.prune(layer, densities[:gates], block=block, input_weights=True) is layer
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            assert torch.equal(parameter, before[name])
            continue
        mask = expected_mask(before[name], gates, densities[:gates], block)
        assert torch.equal(getattr(layer, name.replace("weight", "mask")), mask)
        assert torch.equal(parameter, before[name] * mask)


@pytest.mark.parametrize("base", LAYERS)
def test_densities(base):
    layer = base(30, 100)
    ostinato.prune(layer, 0.3)
    for gate in layer.mask_hh_l0.view(-1, 100, 100):
        assert gate.sum() == 3000
    assert not hasattr(layer, "mask_ih_l0")
    assert ostinato.prune(layer, 1).mask_hh_l0.all()


def test_density_by_name():
    gru = ostinato.prune(nn.GRU(8, 100), {"n": 0.2, "r": 0.05, "z": 0.1})
    assert [int(gate.sum()) for gate in gru.mask_hh_l0.view(3, 100, 100)] == [500, 1000, 2000]
    lstm = ostinato.prune(nn.LSTM(8, 50), (0.1, 0.2, 0.3, 0.4))
    assert [int(gate.sum()) for gate in lstm.mask_hh_l0.view(4, 50, 50)] == [250, 500, 750, 1000]


@pytest.mark.parametrize("block", BLOCKS)
def test_diagonal(block):
    torch.manual_seed(0)
    layer = nn.GRU(20, 33)
    with torch.no_grad():
        layer.weight_hh_l0[torch.eye(33, dtype=torch.bool).repeat(3, 1)] *= 10  # large, and kept anyway
    before = copy.deepcopy(layer)
    ostinato.prune(layer, 0.1, block=block, keep_diagonal=True, input_weights=True)
    assert torch.equal(layer.mask_hh_l0, expected_mask(before.weight_hh_l0, 3, [0.1] * 3, block, True))
    assert torch.equal(layer.mask_ih_l0, expected_mask(before.weight_ih_l0, 3, [0.1] * 3, block))
    assert block_of(layer.mask_hh_l0, 3) == block


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("hidden", [1, 40, 45])
def test_pruning_again_to_the_same_density_keeps_the_same(block, hidden):
    torch.manual_seed(0)
    layer = nn.LSTM(20, hidden)
    with torch.no_grad():
        layer.weight_hh_l0[torch.eye(hidden, dtype=torch.bool).repeat(4, 1)] *= 100
    options = {"block": block, "keep_diagonal": True}
    first = ostinato.prune(layer, 0.2, **options).mask_hh_l0
    assert torch.equal(ostinato.prune(layer, 0.2, **options).mask_hh_l0, first)
    assert torch.equal(ostinato.prune(layer, None, **options).mask_hh_l0, first)


def test_a_density_of_none_keeps_the_zeros_that_are_there():
    torch.manual_seed(0)
    layer = nn.GRU(8, 40, num_layers=2)
    kept = {name: torch.rand(parameter.shape) < 0.02 for name, parameter in layer.named_parameters()}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.mul_(kept[name])
    before, x = copy.deepcopy(layer), torch.randn(5, 3, 8)
    ostinato.prune(layer, None)
    for name in ("hh_l0", "hh_l1"):
        assert torch.equal(getattr(layer, f"mask_{name}"), kept[f"weight_{name}"])
        assert torch.equal(getattr(layer, f"weight_{name}"), getattr(before, f"weight_{name}"))
    assert not hasattr(layer, "mask_ih_l0")
    torch.testing.assert_close(layer(x)[0], before(x)[0], rtol=0, atol=1e-6)

    blocks = ostinato.prune(copy.deepcopy(before), None, block=(8, 4), input_weights=True)
    for name in ("hh_l0", "hh_l1", "ih_l0"):
        some = cut(kept[f"weight_{name}"].unflatten(0, (3, 40)), (8, 4)).any(3)
        mask = some.repeat_interleave(8, 1).repeat_interleave(4, 2).flatten(0, 1)
        assert torch.equal(getattr(blocks, f"mask_{name}"), mask)
        assert 0 < mask.float().mean() < 1


def test_a_density_of_none_keeps_one_block_of_a_gate_of_zeros():
    gru = nn.GRU(8, 32)
    with torch.no_grad():
        gru.weight_hh_l0[32:64] = 0.0
    mask = ostinato.prune(gru, None, block=(16, 1)).mask_hh_l0
    assert [int(gate.sum()) for gate in mask.view(3, 32, 32)] == [1024, 16, 1024]
    with torch.no_grad():
        assert gru(torch.ones(3, 8))[0].isfinite().all()


def test_what_a_mask_consists_of():
    mask = torch.zeros(96, 48, dtype=torch.bool)
    mask[16:32, 3] = mask[48:64, 47] = True
    assert block_of(mask, 2) == (16, 1)
    mask[47, 40] = True
    assert block_of(mask, 2) == (1, 1)
    mask = torch.zeros(21, 21, dtype=torch.bool)
    mask[8:16, 4:8] = mask[16:, 20:] = True
    assert block_of(mask, 1) == (8, 4)
    for size in (1, 2, 17):
        assert block_of(torch.ones(3 * size, size, dtype=torch.bool), 3) == (16, 1)


def train(layer, optimiser, steps=3):
    for _ in range(steps):
        optimiser.zero_grad()
        layer(torch.randn(5, 3, 8))[0].square().sum().backward()
        optimiser.step()
        yield


OPTIMISERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=0.1, fused=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("copied", [False, True])
def test_optimisers_leave_pruned_weights_at_zero(name, copied):
    torch.manual_seed(0)
    layer = nn.GRU(8, 24)
    optimiser = OPTIMISERS[name](layer.parameters())
    list(train(layer, optimiser))  # momentum, older than the mask
    ostinato.prune(layer, 0.2, block=(16, 1), input_weights=True)
    if copied:
        state = optimiser.state_dict()
        layer = copy.deepcopy(layer)
        optimiser = OPTIMISERS[name](layer.parameters())
        optimiser.load_state_dict(state)
    before = layer.weight_hh_l0.detach().clone()
    for _ in train(layer, optimiser):
        for weight, mask in ((layer.weight_hh_l0, layer.mask_hh_l0), (layer.weight_ih_l0, layer.mask_ih_l0)):
            assert torch.equal(weight[~mask], torch.zeros(int((~mask).sum())))
            assert torch.equal(weight.grad[~mask], torch.zeros(int((~mask).sum())))
    assert (layer.weight_hh_l0 != before)[layer.mask_hh_l0].all()


def loaded(layer, assign):
    other = ostinato.GRU(8, 24)
    other.load_state_dict(layer.state_dict(), assign=assign)
    return other


def converted(layer, swap):
    """To another dtype, where PyTorch swaps a parameter's contents, or puts a new parameter in its place."""
    future = torch.__future__
    set_flag = future.set_swap_module_params_on_conversion if swap else future.set_overwrite_module_params_on_conversion
    layer(torch.randn(5, 3, 8))[0].sum().backward()
    set_flag(True)
    try:
        return layer.to(torch.float64)
    finally:
        set_flag(False)


NEW_PARAMETERS = {
    "loaded": lambda layer: loaded(layer, assign=False),
    "assigned": lambda layer: loaded(layer, assign=True),
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(layer)),
    "swapped": lambda layer: converted(layer, swap=True),
    "overwritten": lambda layer: converted(layer, swap=False),
}


@pytest.mark.parametrize("how", NEW_PARAMETERS)
def test_an_optimiser_leaves_new_parameters_at_zero_before_the_layer_has_run(how):
    """As where only a compiled forward runs, which registers nothing."""
    layer = NEW_PARAMETERS[how](ostinato.prune(nn.GRU(8, 24), 0.2))
    layer.weight_hh_l0.grad = torch.ones_like(layer.weight_hh_l0)
    torch.optim.SGD([layer.weight_hh_l0], 0.1).step()
    assert torch.equal(layer.weight_hh_l0 != 0, layer.mask_hh_l0)


def test_optimisers_of_other_layers_are_let_be():
    pruned, other = ostinato.prune(nn.GRU(8, 24), 0.1), ostinato.GRU(8, 24)
    optimiser = torch.optim.AdamW([*other.parameters(), *pruned.parameters()], 0.1)
    list(train(other, optimiser))
    assert (other.weight_hh_l0 != 0).all()


def test_pruning_again_only_removes():
    torch.manual_seed(0)
    layer = nn.LSTM(8, 40)
    optimiser = torch.optim.Adam(layer.parameters(), 0.01)
    last = torch.ones(160, 40, dtype=torch.bool)
    for step in range(6):
        list(train(layer, optimiser, 1))
        ostinato.prune(layer, ostinato.cubic_density(step, 0.1, end=5), block=(16, 1))
        assert not (layer.mask_hh_l0 & ~last).any()
        last = layer.mask_hh_l0
    assert last.float().mean() == pytest.approx(0.1, abs=0.01)


def test_cubic_density():
    densities = [ostinato.cubic_density(step, 0.2, begin=10, end=20, initial=0.9) for step in range(30)]
    assert densities[:11] == [0.9] * 11
    assert densities[20:] == [0.2] * 10
    assert densities[15] == pytest.approx(0.2 + 0.7 / 8)
    assert densities[12] == pytest.approx(0.2 + 0.7 * 0.8**3)
    with pytest.raises(ValueError, match="end must come after begin, 5; got 5"):
        ostinato.cubic_density(0, 0.1, begin=5, end=5)
    with pytest.raises(ValueError, match="final must be a number above 0 and at most 1; got 0"):
        ostinato.cubic_density(0, 0, end=5)
    with pytest.raises(TypeError, match="end must be a number; got str"):
        ostinato.cubic_density(5, 0.1, end="9")
    with pytest.raises(ValueError, match="step must be finite; got nan"):
        ostinato.cubic_density(float("nan"), 0.1, end=5)
    with pytest.raises(ValueError, match="begin must be finite; got -inf"):
        ostinato.cubic_density(3, 0.1, begin=-float("inf"), end=5)
    with pytest.raises(ValueError, match="end must be finite; got inf"):
        ostinato.cubic_density(3, 0.1, end=float("inf"))
    for steps in ({"step": 10**400, "end": 5}, {"step": 3, "end": 10**400}, {"step": 3, "begin": -1e308, "end": 1e308}):
        with pytest.raises(ValueError, match=r"(step|begin|end) must be below 2\*\*63 in magnitude; got -?1"):
            ostinato.cubic_density(final=0.1, **steps)


def through_safetensors(layer, fresh):
    fresh.load_state_dict(load(save(layer.state_dict())))
    return fresh


def through_torch_save(layer, fresh):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    return fresh


def through_meta(layer, fresh):
    fresh.to("meta").load_state_dict(layer.state_dict(), assign=True)
    return fresh


WAYS = {
    "safetensors": through_safetensors,
    "torch.save": through_torch_save,
    "meta": through_meta,
    "deepcopy": lambda layer, fresh: copy.deepcopy(layer),
    "to": lambda layer, fresh: layer.to(torch.float64).to(torch.float32),
    "pruned otherwise before": lambda layer, fresh: through_safetensors(layer, ostinato.prune(fresh, 0.5)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", LAYERS)
def test_masks_survive(base, way):
    torch.manual_seed(0)
    options = {"num_layers": 2, "bidirectional": True}
    layer = ostinato.prune(base(8, 24, **options), 0.1, block=(16, 1), keep_diagonal=True)
    expected = {name: mask.clone() for name, mask in layer.named_buffers()}
    x = torch.randn(5, 3, 8)
    with torch.no_grad():
        output = layer(x)[0]
        other = WAYS[way](layer, LAYERS[base](8, 24, **options))
        assert torch.equal(other(x)[0], output)
    masks = dict(other.named_buffers())
    assert masks.keys() == expected.keys() == {f"mask_hh_l{k}{r}" for k in (0, 1) for r in ("", "_reverse")}
    assert all(mask.dtype == torch.bool and torch.equal(mask, expected[name]) for name, mask in masks.items())
    other(x)[0].sum().backward()
    assert (other.weight_hh_l1.grad[~other.mask_hh_l1] == 0).all()


def test_masks_of_another_size_are_refused():
    state = ostinato.prune(nn.GRU(8, 24), 0.1).state_dict()
    state["mask_hh_l0"] = state["mask_hh_l0"][:, :12]
    with pytest.raises(RuntimeError, match="size mismatch for mask_hh_l0"):
        ostinato.GRU(8, 24).load_state_dict(state)


@pytest.mark.parametrize("base", LAYERS)
def test_layers_of_torch_become_ours_and_can_go_back(base):
    layer = base(8, 24)
    parameters, x = list(layer.parameters()), torch.randn(5, 3, 8)
    ostinato.prune(layer, 0.1)
    assert type(layer) is LAYERS[base]
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    back = base(8, 24)
    assert back.load_state_dict(layer.state_dict(), strict=False).unexpected_keys == ["mask_hh_l0"]
    torch.testing.assert_close(back(x)[0], layer(x)[0], rtol=0, atol=1e-6)


def test_models_are_pruned_layer_by_layer():
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.GRU(8, 24), ostinato.LSTM(8, 24)]))
    assert ostinato.prune(model, 0.1) is model
    assert sorted(name for name, _ in model.named_buffers()) == ["1.0.mask_hh_l0", "1.1.mask_hh_l0"]


class OwnGRU(nn.GRU):
    pass


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (nn.GRU(4, 8), {"density": 0}, ValueError, "density must be a number above 0 and at most 1; got 0"),
        (nn.GRU(4, 8), {"density": 1.1}, ValueError, "density must be a number above 0 and at most 1; got 1.1"),
        (nn.GRU(4, 8), {"density": float("nan")}, ValueError, "density must be a number above 0"),
        (nn.GRU(4, 8), {"density": "0.1"}, TypeError, "density must be a number; got str"),
        (nn.GRU(4, 8), {"density": [None] * 3}, TypeError, "density must be a number; got NoneType"),
        (nn.GRU(4, 8), {"density": [0.1, 0.2]}, ValueError, "density must be one number, or 3 for r, z, n; got "),
        (nn.GRU(4, 8), {"density": {"r": 0.1}}, ValueError, "density must name the gates r, z, n; got r"),
        (nn.GRU(4, 8), {"density": 0.1, "block": (2, 2)}, ValueError, r"block must be one of .*; got \(2, 2\)"),
        (nn.GRU(4, 8), {"density": 0.1, "block": "16x1"}, ValueError, "block must be one of .*; got '16x1'"),
        (nn.GRU(4, 8), {"density": 0.1, "block": (16, 1.0)}, ValueError, r"block must be one of .*; got \(16, 1.0\)"),
        (nn.GRU(4, 8), {"density": 0.1, "block": (1, True)}, ValueError, r"block must be one of .*; got \(1, True\)"),
        (nn.GRU(4, 8), {"density": 0.1, "block": np.ones(2)}, ValueError, r"block must be one of .*; got array"),
        (nn.GRU(4, 8), {"density": 0.1, "keep_diagonal": 1}, TypeError, "keep_diagonal must be a bool; got int"),
        (nn.LSTM(4, 8, proj_size=4), {"density": 0.1}, ValueError, "proj_size must be 0"),
        (nn.GRU(4, 8, device="meta"), {"density": 0.1}, ValueError, "got a layer on the meta device"),
        (ostinato.MinGRU(4, 8), {"density": 0.1}, ValueError, "contain an RNN, GRU or LSTM; got MinGRU without one"),
        (OwnGRU(4, 8), {"density": 0.1}, TypeError, "got OwnGRU"),
        (torch.zeros(8, 8), {"density": 0.1}, TypeError, "module must be a torch.nn.Module; got Tensor"),
    ],
)
def test_bad_arguments_change_nothing(module, options, error, message):
    good = nn.GRU(4, 8)
    model = nn.ModuleList([good, module]) if isinstance(module, nn.RNNBase) else module
    with pytest.raises(error, match=message):
        ostinato.prune(model, **options)
    assert type(good) is nn.GRU
    assert not list(good.buffers())


# The command.

TEXT = "a quick brown fox jumps over the lazy dog. " * 120


@pytest.fixture
def checkpoint(tmp_path):
    def make(cell="lstm", **training):
        torch.manual_seed(0)
        vocabulary = Vocabulary.of(TEXT)
        model = LanguageModel(len(vocabulary), width=32, num_layers=2, cell=cell, dropout=0.0)
        small = {"batch_size": 8, "chunk_length": 32, "held_out_limit": 400}
        training = {"text": str(tmp_path / "text.txt"), "trainer": {"settings": small}, **training}
        save_checkpoint(tmp_path / "model.safetensors", Checkpoint(model, vocabulary, training))
        return tmp_path / "model.safetensors"

    (tmp_path / "text.txt").write_text(TEXT)
    return make


def run(capsys, *arguments):
    try:
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as error:
        code = error.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_command(checkpoint, capsys, cell):
    path = checkpoint(cell)
    code, out, err = run(
        capsys, "prune", path, "--density", 0.2, "--block", "16x1", "--finetune", 60, "--device", "cpu"
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    before, pruned, *_, finetuned = (
        float(line.split("held out ")[1].split()[0]) for line in lines if "held out" in line
    )
    assert before < pruned + 1
    assert finetuned < before - 1
    model = load_checkpoint(path.with_stem("model-pruned")).model
    for block in model.blocks:
        layer = block.recurrent
        assert block_of(layer.mask_hh_l0, {"gru": 3, "lstm": 4}[cell]) == (16, 1)
        assert layer.mask_hh_l0.float().mean() == pytest.approx(0.2, abs=0.01)
        assert (layer.weight_hh_l0[~layer.mask_hh_l0] == 0).all()
    code, out, _ = run(capsys, "generate", path.with_stem("model-pruned"), "--length", 20, "--prompt", "a quick ")
    assert code == 0
    assert len(out) == 29


def test_fine_tuning_that_is_interrupted_is_saved(checkpoint, capsys, monkeypatch):
    advance = Trainer.advance

    def interrupted(self, steps):
        os.kill(os.getpid(), signal.SIGTERM)
        return advance(self, 1)

    monkeypatch.setattr(Trainer, "advance", interrupted)
    path = checkpoint()
    pruned = path.with_stem("model-pruned")
    code, out, err = run(capsys, "prune", path, "--density", 0.2, "--finetune", 60, "--device", "cpu")
    assert (code, err) == (130, "")
    assert out.splitlines()[-1] == f"Interrupted at step 1. {pruned} has what there was."
    assert load_checkpoint(pruned).training["pruning"]["finetuned"] == 1


def test_command_complains(checkpoint, capsys, tmp_path):
    path = checkpoint()
    cases = [
        (["--density", "0"], "density must be a number above 0 and at most 1; got 0.0"),
        (["--density", "much"], "density must be a number, or one for each gate with commas between; got 'much'"),
        (["--density", "0.1", "--block", "2x2"], "block must be one of 16x1, 8x4, 1x1; got '2x2'"),
        (["--density", "0.1", "--finetune", "-1"], "finetune must be at least 0; got -1"),
        (["--density", "0.1", "--finetune", 1 << 63], "finetune must be below 2**63; got 92"),
        (["--density", "0.1", "--output", path], f"{path} is there already"),
        (["--density", "1.5"], "density must be a number above 0 and at most 1; got 1.5"),
        (["--density", "0.1", "--output", tmp_path], f"{tmp_path}: expected a file to write"),
    ]
    for options, message in cases:
        code, out, err = run(capsys, "prune", path, "--device", "cpu", *options)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert message in err
    gone = tmp_path / "gone" / "model.safetensors"
    code, _, err = run(capsys, "prune", gone, "--density", 0.1, "--device", "cpu")
    assert (code, err) == (1, f"ostinato: error: {gone}: No such file or directory\n")
    for cell, training, message in (
        ("mingru", {}, "expected a gru or lstm to prune; got a mingru"),
        ("gru", {"digest": "another"}, "expected the text that"),
        ("gru", {"text": "gone.txt"}, "gone.txt: expected the text that"),
        ("gru", {"text": 5}, "expected the path of the text that it was trained on; got 5"),
        ("gru", {"trainer": []}, "expected the state of a training; AttributeError"),
    ):
        code, _, err = run(capsys, "prune", checkpoint(cell, **training), "--density", 0.1, "--device", "cpu")
        assert code == 1
        assert message in err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors", "text.txt"]


def test_what_is_shown_of_a_pruned_layer():
    layer = ostinato.prune(ostinato.GRU(4, 32), 0.25)
    assert repr(layer) == "GRU(4, 32, pruned to 25%)"
    assert repr(copy.deepcopy(layer).to("meta")) == repr(ostinato.GRU(4, 32)) == "GRU(4, 32)"
    assert kept_weights(layer) == kept_weights(torch.nn.Sequential(layer)) == (768, 3 * 32**2)
