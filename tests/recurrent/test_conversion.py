"""Layers of torch.nn become this library's, in place, for all who hold a reference to them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import ostinato

LAYERS = {nn.RNN: ostinato.RNN, nn.GRU: ostinato.GRU, nn.LSTM: ostinato.LSTM}


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([kind(4, 8, batch_first=True), kind(8, 8, 2, batch_first=True)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x


@pytest.mark.parametrize("kind", LAYERS)
def test_the_model_stays_what_it_is(kind):
    torch.manual_seed(0)
    model, x = Model(kind), torch.randn(3, 40, 4)
    original = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, original)]
    layers, state = list(model.layers), model.state_dict()
    assert ostinato.convert(model) is model
    assert [type(layer) for layer in model.layers] == [LAYERS[kind]] * 2
    assert all(one is other for one, other in zip(model.layers, layers, strict=True))
    assert all(state[name].data_ptr() == x.data_ptr() for name, x in model.state_dict().items())
    for _ in range(3):
        outputs = [m(x) for m in (model, original)]
        torch.testing.assert_close(*outputs)
        for y, optimizer in zip(outputs, optimizers, strict=True):
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert model.layers[1].step(x[:, 0].repeat(1, 2))[0].shape == (3, 8)  # which torch.nn's have not


def test_a_layer_alone_and_twice():
    layer = nn.LSTM(3, 4, proj_size=2)
    assert type(ostinato.convert(ostinato.convert(layer))) is ostinato.LSTM
    assert layer(torch.randn(5, 1, 3))[0].shape == (5, 1, 2)


class Own(nn.GRU):
    def forward(self, input, hx=None):
        return super().forward(2 * input, hx)


class Named(nn.RNN):
    pass


class Ours(Own, ostinato.GRU):
    pass


def test_a_class_of_both_keeps_its_own_forward_and_calls_ours(monkeypatch):
    layer, x = Own(3, 4), torch.randn(20, 2, 3)
    expected, calls = layer(x), []
    layer.__class__ = Ours
    monkeypatch.setattr(ostinato.GRU, "_kernels_for", lambda *args: calls.append(args))
    assert ostinato.convert(layer) is layer
    assert type(layer) is Ours
    torch.testing.assert_close(layer(x), expected)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (nn.Linear(3, 4), ValueError, "must be or contain an RNN, GRU or LSTM; got Linear without one"),
        (nn.Sequential(nn.GRU(3, 4), Own(4, 4)), TypeError, r"got Own, .* class Ours\(Own, ostinato.GRU\)"),
        (Named(3, 4), TypeError, r"class Ours\(Named, ostinato.RNN\)"),
        (torch.jit.script(nn.GRU(3, 4)), ValueError, "got RecursiveScriptModule without one, or with scripted ones"),
        (weight_norm(nn.LSTM(3, 4), "weight_hh_l0"), TypeError, "before a parametrization .*; got ParametrizedLSTM$"),
        ("model", TypeError, r"must be a torch.nn.Module; got str"),
    ],
)
def test_what_cannot_be_converted_is_named_and_left(module, error, message):
    with pytest.raises(error, match=message):
        ostinato.convert(module)
    if isinstance(module, nn.Sequential):
        assert type(module[0]) is nn.GRU
