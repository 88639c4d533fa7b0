"""RNN, GRU and LSTM in TorchScript, which runs torch.nn's kernels without this library."""

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ostinato
from recurrent_layers import CELLS, OPTIONS, assert_results_close, by, flat, make, pruned, twin

pytestmark = [
    by("as planned"),
    pytest.mark.filterwarnings("ignore:.*quint8", "ignore:.*grad attribute", "ignore::torch.jit.TracerWarning"),
]


class OfTensor(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor):
        return self.layer(x)


class OfTensorFromState(OfTensor):
    def forward(self, x: Tensor, hx: Tensor):
        return self.layer(x, hx)


class OfTensorFromStates(OfTensor):
    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor]):
        return self.layer(x, hx)


class OfPacked(OfTensor):
    def forward(self, x: PackedSequence):
        return self.layer(x)


class OfPackedFromState(OfTensor):
    def forward(self, x: PackedSequence, hx: Tensor):
        return self.layer(x, hx)


class OfPackedFromStates(OfTensor):
    def forward(self, x: PackedSequence, hx: tuple[Tensor, Tensor]):
        return self.layer(x, hx)


def scripted(layer):
    """The layer in a module that calls it, as torch.nn's, too, cannot be called when scripted alone."""
    return torch.jit.script(OfTensor(layer))


def states(layer, *batch):
    directions = layer.num_layers * (2 if layer.bidirectional else 1)
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size][: 2 if layer.mode == "LSTM" else 1]
    hidden = [torch.randn(directions, *batch, size, dtype=layer.weight_hh_l0.dtype) for size in sizes]
    return tuple(hidden) if layer.mode == "LSTM" else hidden[0]


@pytest.mark.parametrize("options", [*OPTIONS, {"dtype": torch.float64}])
@pytest.mark.parametrize("cell", CELLS)
def test_what_is_scripted_computes_the_same(cell, options):
    layer = make(cell, 5, 8, **options)
    of_tensor = OfTensorFromStates if cell == "LSTM" else OfTensorFromState
    of_packed = OfPackedFromStates if cell == "LSTM" else OfPackedFromState
    plain, from_state, packed, packed_from_state = (
        torch.jit.script(kind(layer)) for kind in (OfTensor, of_tensor, OfPacked, of_packed)
    )
    for shape in [(1, 2, 5), (7, 3, 5), (30, 1, 5), (6, 5)]:
        x = torch.randn(shape, dtype=layer.weight_hh_l0.dtype)
        batch = () if x.dim() == 2 else (x.shape[0 if layer.batch_first else 1],)
        hx = states(layer, *batch)
        assert_results_close(plain(x), layer(x), 1e-6)
        assert_results_close(from_state(x, hx), layer(x, hx), 1e-6)
    sequences = [torch.randn(steps, 5, dtype=layer.weight_hh_l0.dtype) for steps in (3, 9, 1, 9)]
    for x in (pack_sequence(sequences, enforce_sorted=False), pack_sequence(sequences[1:2])):
        hx = states(layer, int(x.batch_sizes[0]))
        for (y, last), expected in ((packed(x), layer(x)), (packed_from_state(x, hx), layer(x, hx))):
            assert_results_close((PackedSequence(*y), last), expected, 1e-6)  # Python gets a tuple of another class
            assert torch.equal(y.batch_sizes, x.batch_sizes)


def test_projections_are_scripted():
    layer = ostinato.LSTM(5, 8, 2, proj_size=3, bidirectional=True)
    x, hx = torch.randn(7, 3, 5), states(layer, 3)
    assert_results_close(torch.jit.script(OfTensorFromStates(layer))(x, hx), layer(x, hx), 1e-6)
    assert_results_close(scripted(layer)(x), layer(x), 1e-6)


def gradients_through(module, layer, x):
    layer.zero_grad()
    sum(part.square().sum() for part in flat(module(x))).backward()
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters() if parameter.requires_grad}


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
def test_scripts_run_on_a_gpu(cell, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer, x = make(cell, 5, 64, num_layers=2, bidirectional=True), torch.randn(7, 3, 5).cuda()
    moved = scripted(layer).cuda()  # and with it the layer, whose parameters are the script's
    found, expected = gradients_through(moved, layer, x), gradients_through(layer, layer, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert_results_close(moved(x), layer(x), 1e-5)
    assert_results_close(torch.jit.trace(layer, x)(x), layer(x), 1e-5)
    layer = pruned(cell, 5, 64).cuda()
    assert_results_close(scripted(layer)(x), layer(x), 1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_a_script_has_the_same_parameters_and_gives_them_the_same_gradients(cell):
    layer, x = make(cell, 5, 8, num_layers=2, dropout=0.3), torch.randn(7, 3, 5)
    layer.bias_ih_l1.requires_grad_(False)
    script = scripted(layer)
    assert list(script.state_dict()) == list(OfTensor(layer).state_dict())
    assert [p.requires_grad for p in script.parameters()] == [p.requires_grad for p in layer.parameters()]
    assert script.training
    assert not torch.equal(script(x)[0], script(x)[0])  # of dropout
    script.eval()
    layer.eval()
    found, expected = gradients_through(script, layer, x), gradients_through(layer, layer, x)
    assert len(found) == 7
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(0.5)
    assert_results_close(script(x), layer(x), 1e-6)


def test_a_model_is_the_same_after_scripting():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.again = ostinato.GRU(4, 4)
            self.rest = nn.Sequential(nn.Linear(4, 4), ostinato.GRU(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.again(self.first(x)[0])[0])[0]

    model, x = Model(), torch.randn(5, 2, 4)
    layers, script = list(model.modules()), torch.jit.script(model)
    assert all(one is other for one, other in zip(model.modules(), layers, strict=True))
    assert type(model.first) is ostinato.GRU
    assert not any(name.startswith("_scripted") for name in vars(model.first))
    torch.testing.assert_close(script(x), model(x))
    begins = torch.rand(5, 2) < 0.5
    assert_results_close(model.first(x, resets=begins), copy.deepcopy(model).first(x, resets=begins), 0)
    assert_results_close(model.rest[1].step(x[0]), (model.rest[1](x[:1])[0][0], model.rest[1](x[:1])[1]), 1e-6)
    torch.testing.assert_close(torch.jit.script(model)(x), model(x))
    torch.testing.assert_close(torch.jit.trace(model, (x,))(x), model(x))


def test_what_is_frozen_or_optimised_computes_the_same():
    layer, x = ostinato.LSTM(5, 8, 2, bidirectional=True).eval(), torch.randn(7, 3, 5)
    for change in (torch.jit.freeze, torch.jit.optimize_for_inference):
        assert_results_close(change(scripted(layer).eval())(x), layer(x), 1e-6)


def test_parameters_that_were_replaced_are_those_that_are_scripted():
    layer, x = ostinato.GRU(5, 8), torch.randn(7, 3, 5)
    layer._parameters["weight_hh_l0"] = nn.Parameter(torch.randn(24, 8))
    expected, script = layer(x), scripted(layer)
    assert_results_close(script(x), expected, 1e-6)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(0.5)
    assert_results_close(script(x), layer(x), 1e-6)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("cell", CELLS)
def test_pruned_weights_are_zero_in_a_script(cell, options):
    torch.manual_seed(0)
    layer, x = pruned(cell, 5, 16, density=0.3, block=(1, 1), **options), torch.randn(7, 3, 5)
    for name, weight in layer.named_parameters():
        if "weight_hh" in name:
            weight.data.add_(1.0)  # as a checkpoint may
    expected = layer(x)
    script = scripted(layer)
    assert_results_close(script(x), expected, 1e-6)
    assert_results_close(layer(x), expected, 0)
    assert "layer.mask_hh_l0" in script.state_dict()


def test_classes_derived_without_a_forward_are_scripted():
    class Scaled(ostinato.GRU):
        def __init__(self, scale):
            super().__init__(5, 8)
            self.scale = scale

        @property
        def twice(self) -> int:
            return 2 * self.hidden_size

    layer, x = Scaled(2.0), torch.randn(7, 3, 5)
    assert_results_close(scripted(layer)(x), layer(x), 1e-6)


def test_a_forward_of_a_derived_class_is_what_is_scripted():
    class Doubled(ostinato.GRU):
        def forward(self, x: Tensor):
            h = x.new_zeros(1, x.size(1), self.hidden_size)
            return torch._VF.gru(2 * x, h, self._flat_weights, True, 1, 0.0, False, False, False)

    layer, x = Doubled(5, 8), torch.randn(7, 3, 5)
    assert_results_close(torch.jit.script(layer)(x), twin(layer)(2 * x), 1e-6)

    class Super(ostinato.GRU):
        def forward(self, x: Tensor):
            return super().forward(2 * x)

    with pytest.raises(NotImplementedError, match=r"^torch.jit.script cannot compile Super with a forward that calls "):
        scripted(Super(5, 8))


def _weight_norm(layer):
    return parametrizations.weight_norm(layer, "weight_hh_l0")


def _older_weight_norm(layer):
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer, "weight_hh_l0")


def _listed(layer):
    layer._flat_weights = [2 * weight for weight in layer._flat_weights]
    return layer


def _with_hook(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_weight_norm, "weights that are no parameters"),
        (_older_weight_norm, "weights that are no parameters"),
        (_listed, "weights that are no parameters"),
        (_with_hook, "hooks of its forward"),
    ],
)
def test_a_script_that_would_compute_something_else_is_refused(change, why):
    layer = change(ostinato.GRU(5, 8))
    message = rf"^torch.jit.script cannot compile \w*GRU with {why}.*: use torch.export.export$"
    with pytest.raises(NotImplementedError, match=message):
        scripted(layer)
    layer(torch.randn(7, 3, 5))


def test_a_script_has_no_resets():
    class WithResets(OfTensor):
        def forward(self, x: Tensor, begins: Tensor):
            return self.layer(x, resets=begins)

    with pytest.raises(RuntimeError, match="Keyword argument resets unknown"):
        torch.jit.script(WithResets(ostinato.GRU(5, 8)))


@pytest.mark.parametrize("kind", [ostinato.GRU, ostinato.LSTM])
def test_the_error_about_a_scripted_step_shows_what_to_call_in_its_place(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(5, 8)

        def forward(self, x: Tensor):
            return self.layer.step(x)

    with pytest.raises(torch.jit.frontend.NotSupportedError, match="takes a sequence of one step instead"):
        torch.jit.script(Model())


def test_wrong_inputs_of_a_script_are_errors():
    gru, lstm = scripted(ostinato.GRU(5, 8)), torch.jit.script(OfTensorFromStates(ostinato.LSTM(5, 8)))
    with pytest.raises(torch.jit.Error, match="input must have 3 dimensions, got 4"):
        gru(torch.randn(1, 7, 3, 5))
    with pytest.raises(torch.jit.Error, match="Expected 5, got 4"):
        gru(torch.randn(7, 3, 4))
    with pytest.raises(torch.jit.Error, match="Expected hidden"):
        lstm(torch.randn(7, 3, 5), (torch.zeros(1, 3, 8), torch.zeros(1, 4, 8)))


ELSEWHERE = """
import sys, torch
sys.modules["ostinato"] = None
module, (x, hx, y, *last) = torch.jit.load(sys.argv[1]), torch.load(sys.argv[2])
output, states = module(x, hx)
for found, expected in zip((output, *states), (y, *last), strict=True):
    torch.testing.assert_close(found, expected)
"""


def test_a_saved_script_runs_without_this_library(tmp_path):
    layer, x = ostinato.LSTM(5, 8, 2, bidirectional=True, batch_first=True), torch.randn(3, 7, 5)
    hx, script = states(layer, 3), torch.jit.script(OfTensorFromStates(layer))
    torch.jit.save(script, tmp_path / "lstm.pt")
    with torch.no_grad():
        torch.save([x, hx, *flat(layer(x, hx))], tmp_path / "expected.pt")
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, tmp_path / "lstm.pt", tmp_path / "expected.pt"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_loaded_script_is_trained():
    layer, x, file = ostinato.GRU(5, 8), torch.randn(7, 3, 5), io.BytesIO()
    torch.jit.save(scripted(layer), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert_results_close(loaded(x), layer(x), 1e-6)
    found = gradients_through(loaded, loaded, x)
    expected = gradients_through(layer, layer, x)
    torch.testing.assert_close(found, {f"layer.{name}": grad for name, grad in expected.items()})
    again = ostinato.GRU(5, 8)
    again.load_state_dict(loaded.layer.state_dict())
    assert_results_close(again(x), layer(x), 0)


def test_scripts_are_quantised():
    from torch.ao.quantization import default_dynamic_qconfig, quantize_dynamic_jit

    layer, x = ostinato.GRU(5, 8).eval(), torch.randn(7, 3, 5)
    model = torch.jit.script(nn.Sequential(nn.Linear(5, 5), layer))  # of which PyTorch takes the linear layers
    assert_results_close(quantize_dynamic_jit(model.eval(), {"": default_dynamic_qconfig})(x), model(x), 0.05)
