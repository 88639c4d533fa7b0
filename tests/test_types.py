"""The interface as type checkers see it: `make lint` checks this file, and the tests run it."""

from typing import Any, assert_type

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ostinato


@pytest.mark.parametrize("kind", [ostinato.GRU, ostinato.MinGRU, ostinato.RGLRU])
def test_layers(kind: type[ostinato.GRU] | type[ostinato.MinGRU] | type[ostinato.RGLRU]) -> None:
    layer = kind(4, 8, device="cpu")
    output, h_n = layer(torch.randn(5, 2, 4), resets=torch.zeros(5, 2, dtype=torch.bool))
    assert_type(output, Tensor)
    assert_type(h_n, Tensor)
    packed, h_n = layer(pack_sequence([torch.randn(5, 4), torch.randn(3, 4)]), h_n)
    assert_type(packed, PackedSequence)
    assert_type(layer.step(torch.randn(2, 4), h_n), tuple[Tensor, Tensor])
    with pytest.raises(TypeError):
        layer(output, hidden=h_n)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        kind(4, 8, layers=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [ostinato.LSTM, ostinato.LRU, ostinato.ParaLSTM])
def test_layers_of_two_states(kind: type[ostinato.LSTM] | type[ostinato.LRU] | type[ostinato.ParaLSTM]) -> None:
    layer = kind(4, 8)
    assert_type(layer.initial_state(2), tuple[Tensor, Tensor])
    output, state = layer(torch.randn(5, 2, 4), layer.initial_state(2))
    assert_type(output, Tensor)
    assert_type(state, tuple[Tensor, Tensor])
    assert_type(layer.step(torch.randn(2, 4), state), tuple[Tensor, tuple[Tensor, Tensor]])
    with pytest.raises(TypeError):
        layer(output[..., :4], state[0])  # type: ignore[call-overload]


def test_cells() -> None:
    cell = ostinato.MinGRUCell(4, 8)
    assert_type(cell(torch.randn(2, 4), hx=torch.randn(2, 8)), Tensor)
    with pytest.raises(TypeError):
        cell(torch.randn(2, 4), state=torch.randn(2, 8))  # type: ignore[call-arg]


def test_functions() -> None:
    @ostinato.recurrence
    def average(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return a, (1 - a) * x

    x = torch.rand(1, 5, 2)
    assert_type(ostinato.linear_scan(x, x), tuple[Tensor, Tensor])
    assert_type(average(x, torch.rand(2)), tuple[Any, Any])  # pairs, of two states


def test_modules() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 8))
    assert_type(ostinato.prune(model, density=0.5), nn.Sequential)
    assert_type(ostinato.Stepper(model, batch_size=2)(torch.randn(2, 3)), Any)  # several tensors, of some modules
