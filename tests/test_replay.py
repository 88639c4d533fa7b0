"""Recording and replaying the steps of a module in a frozen stepper."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import ostinato
from ostinato.replay import Recorder


class Network(nn.Module):
    """Much that a step may do: views, parts, changes in place, and states that move to another's place or come out."""

    def __init__(self, decide=lambda y, last: last):
        super().__init__()
        self.linear, self.gru, self.torchs, self.decide = nn.Linear(6, 8), ostinato.GRU(8, 8), nn.GRU(8, 8, 2), decide

    def initial_state(self, batch_size):
        shapes = (batch_size, 3), (batch_size, 3), (1, batch_size, 8), (2, batch_size, 8)
        return [self.linear.weight.new_zeros(shape) for shape in shapes]

    def step(self, x, state):
        last, before, h, h2 = state
        y, h = self.gru.step(torch.relu_(self.linear(torch.cat([last, before], 1))), h)
        z, h2 = self.torchs(y[None], h2)
        first, second = (z[0] + torch.full_like(y, 0.5)).chunk(2, 1)
        y = nn.functional.layer_norm(first, (4,)).mul(second.softmax(1)).clamp_(-1, 1)
        return self.decide(y, last), [x + y[:, :3], last, h, h2]


def stepped(network, x):
    """Its outputs and last state, without a stepper."""
    state, outputs = network.initial_state(x.shape[1]), []
    with torch.no_grad():
        for x_t in x:
            y, state = network.step(x_t, state)
            outputs.append(y)
    return torch.stack(outputs), state


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_is_recorded_and_repeated(device):
    torch.manual_seed(0)
    network, x = Network().to(device), torch.randn(7, 2, 3, device=device)
    stepper, (expected, last) = ostinato.Stepper(network, 2, frozen=True), stepped(network, x)
    outputs = [stepper(x_t) for x_t in x]
    assert stepper._replay is not None
    for ours, right in zip((torch.stack(outputs), *stepper.state), (expected, *last), strict=True):
        # On a GPU cuDNN takes products in tf32, by other kernels for weights that were copied.
        torch.testing.assert_close(ours, right, rtol=0, atol=0 if device == "cpu" else 1e-3)
    with pytest.raises(ValueError, match=r"first step, \(2, 3\) of torch.float32; got \(2, 1\) of torch.float32"):
        stepper(x[0, :, :1])
    with pytest.raises(TypeError, match=r"first step, \(2, 3\) of torch.float32; got \(2, 3\) of torch.float64"):
        stepper(x[0].double())
    with pytest.raises(TypeError, match="x must be a tensor; got list"):
        stepper(x[0].tolist())


class Counter(nn.Module):
    """Changes its buffers in place, one of them as an operation's ``out``."""

    def __init__(self):
        super().__init__()
        self.gru = ostinato.GRU(3, 8)
        self.initial_state = self.gru.initial_state
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2, 8))

    def step(self, x, state):
        y, state = self.gru.step(x, state)
        self.steps += 1
        before = self.last.clone()
        torch.add(y, self.steps, out=self.last)
        return self.last - before, state


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_buffers_change_once_a_step(device):
    torch.manual_seed(0)
    module, x = Counter().to(device), torch.randn(5, 2, 3, device=device)
    stepper, expected = ostinato.Stepper(module, 2, frozen=True), stepped(module, x)[0]
    outputs = [stepper(x_t) for x_t in x]
    assert stepper._replay is not None
    torch.testing.assert_close(torch.stack(outputs), expected, rtol=0, atol=1e-6 if device == "cpu" else 1e-3)


@torch.library.custom_op("replaytest::sin", mutates_args=())
def library_sin(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


@torch.library.custom_op("replaytest::sin_", mutates_args=("x",))
def library_sin_(x: torch.Tensor) -> None:
    x += 1


@torch.library.custom_op("replaytest::relu", mutates_args=())
def library_relu(x: torch.Tensor) -> torch.Tensor:
    return x.abs()


@torch.library.custom_op("replaytest::empty", mutates_args=())
def library_empty(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_operators_are_not_taken_for_torchs_of_their_names():
    x, counted, functions = torch.zeros(3), torch.zeros(3), (library_sin, library_relu, library_empty)
    with torch.no_grad():
        with Recorder() as recorder:
            outputs = [function(x) for function in functions]
            library_sin_(counted)
        x -= 0.5
        recorder.repeat()
        for y, function in zip(outputs, functions, strict=True):
            assert torch.equal(y, function(x))
        assert torch.equal(counted, torch.full((3,), 2.0))


def test_other_threads_step_while_one_is_recorded():
    torch.manual_seed(0)
    layer, x = ostinato.GRU(3, 4), torch.randn(1, 3)
    with torch.no_grad(), ThreadPoolExecutor(1) as other:
        expected = layer.step(x)[0]
        with Recorder() as recorder:
            theirs = other.submit(torch.no_grad()(layer.step), x).result()[0]
            assert not recorder._calls
            ours = layer.step(x)[0]
            assert len(recorder._calls) == 1
        torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "decide",
    [
        lambda y, _: -y if y.sum() > 0 else y,
        lambda y, _: y[y > 0].sum()[None],
        lambda y, _: y * y.abs().max().item(),
        lambda y, _: y * max(map(max, y.tolist())),
        lambda y, _: y * float(np.asarray(y).max()),
    ],
)
def test_a_step_that_looks_at_values_is_not_recorded(decide):
    torch.manual_seed(0)
    network, x = Network(decide), torch.randn(7, 2, 3)
    stepper, (expected, _) = ostinato.Stepper(network, 2, frozen=True), stepped(network, x)
    for x_t, right in zip(x, expected, strict=True):
        assert torch.equal(stepper(x_t), right)
    assert stepper._replay is None
