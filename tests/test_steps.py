"""Steps of recurrent layers one at a time equal the whole sequence."""

import pytest
import torch
from torch import nn

import ostinato
from comparisons import same_bits
from ostinato.kernels.cpu import threads
from ostinato.kernels.persistent.cpu import step as cpu_step
from ostinato.recurrent.cells import step_by_cells
from ostinato.recurrent.weights import weights_of
from ostinato.states import states_of

LAYERS = ("RNN", "GRU", "LSTM", "MinGRU", "MinLSTM")
F64 = torch.float64


@pytest.mark.parametrize("batch", [None, 1, 3, 20])
@pytest.mark.parametrize("name", LAYERS)
def test_steps_equal_the_whole(name, batch):
    torch.manual_seed(0)
    for options in ({}, {"num_layers": 2, "bias": False, "batch_first": True}):
        layer = getattr(ostinato, name)(5, 37, **options, dtype=F64)
        shape = (9, 5) if batch is None else (9, batch, 5)
        x = torch.randn(shape, dtype=F64)
        whole, last = layer(x.transpose(0, 1) if batch and layer.batch_first else x)
        whole = whole.transpose(0, 1) if batch and layer.batch_first else whole
        for grad in (False, True):
            state = None
            with torch.set_grad_enabled(grad):
                for x_t, expected in zip(x, whole, strict=True):
                    before = None if state is None else [y.clone() for y in states_of(state)]
                    y, new = layer.step(x_t, state)
                    assert before is None or same_bits(before, states_of(state))
                    state = new
                    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
            for ours, right in zip(states_of(state), states_of(last), strict=True):
                torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)
            assert y.requires_grad == grad


@pytest.mark.parametrize(("hidden", "inputs", "batch"), [(1, 1, 1), (64, 65, 8), (70, 3, 2), (256, 40, 1)])
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_one_loop_for_a_step(cell, hidden, inputs, batch, monkeypatch):
    """Against torch in float64; by one thread and by two, which share out the units, with the same bits."""
    torch.manual_seed(0)
    layer = getattr(ostinato, cell)(inputs, hidden)
    exact = getattr(nn, cell)(inputs, hidden).double()
    exact.load_state_dict(layer.state_dict())
    x, state = torch.randn(batch, inputs), layer.initial_state(batch)
    state = tuple(map(torch.randn_like, state)) if cell == "LSTM" else torch.randn_like(state)
    results = []
    with torch.no_grad():
        for parallel in (1 << 40, 0):
            monkeypatch.setattr(threads, "PARALLEL", parallel)
            cpu_step._make.cache_clear()
            y, after = layer._fast_step(x, state, x.dim())
            results.append([y, *states_of(after)])
        wide = tuple(s.double() for s in state) if cell == "LSTM" else state.double()
        right, last = exact(x.double()[None], wide)
    cpu_step._make.cache_clear()
    for one, two, expected in zip(*results, [right[0], *states_of(last)], strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("block", [(8, 4), (16, 1), (1, 1)])
@pytest.mark.parametrize(("inputs", "hidden", "batch"), [(40, 40, 1), (36, 48, 3), (5, 37, 1)])
def test_pruned_inputs_are_not_looked_at(block, inputs, hidden, batch):
    torch.manual_seed(0)
    layer = ostinato.GRU(inputs, hidden, 2).double()
    ostinato.prune(layer, 0.2, block=block, input_weights=True, keep_diagonal=True)
    exact = nn.GRU(inputs, hidden, 2).double()
    exact.load_state_dict({k: v for k, v in layer.state_dict().items() if "mask" not in k})
    x = torch.randn(6, batch, inputs, dtype=F64)
    with torch.no_grad():
        for name, mask in list(layer.named_buffers()):
            layer.get_parameter(name.replace("mask", "weight"))[~mask] = torch.nan
        state, (whole, last) = None, exact(x)
        for x_t, expected in zip(x, whole, strict=True):
            assert layer._fast_step(x_t, state, x_t.dim()) is not None
            y, state = layer.step(x_t, state)
            torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(state, last, rtol=0, atol=1e-12)
        for name, mask in list(layer.named_buffers()):
            layer.get_parameter(name.replace("mask", "weight"))[~mask] = 0
        x[0, 0, 1] = torch.inf  # zero times infinity is NaN
        torch.testing.assert_close(layer.step(x[0])[0], exact(x[:1])[0][0], equal_nan=True, rtol=0, atol=1e-12)


def test_weights_that_are_changed_in_any_way_are_seen():
    torch.manual_seed(0)
    layer, x = ostinato.GRU(8, 8), torch.randn(2, 8)
    with torch.no_grad():
        layer.step(x)
        weight = layer.weight_hh_l0
        for change in (
            lambda: weight.mul_(-1),
            lambda: setattr(weight, "data", torch.randn(24, 8)),
            lambda: setattr(weight, "data", weight.data.view(8, 24).t()),
            lambda: setattr(layer, "weight_hh_l0", nn.Parameter(torch.randn(24, 8))),
        ):
            change()
            exact = nn.GRU(8, 8)
            exact.load_state_dict(layer.state_dict())
            torch.testing.assert_close(layer.step(x, x[None])[0], exact(x[None], x[None])[0][0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_steps_by_cells(cell):
    """What GPUs do."""
    torch.manual_seed(0)
    layer = ostinato.prune(getattr(ostinato, cell)(5, 16, 2), 0.5).double()
    x, state = torch.randn(3, 5, dtype=F64), [torch.randn(2, 3, 16, dtype=F64) for _ in range(1 + (cell == "LSTM"))]
    with torch.no_grad():
        y, new = step_by_cells(layer.mode, 2, (3, 16), (2, 3, 16))(x, state, weights_of(layer))
    ours = y, tuple(new)
    right = layer.step(x, tuple(state) if cell == "LSTM" else state[0])
    for one, other in zip([*states_of(ours[1]), ours[0]], [*states_of(right[1]), right[0]], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
