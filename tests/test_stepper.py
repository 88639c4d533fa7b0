"""The stepper keeps the state of a module between its steps, live or frozen."""

import copy
import dataclasses
import functools
import gc
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import ostinato
from ostinato.models import LanguageModel
from ostinato.states import states_of

LAYERS = ("RNN", "GRU", "LSTM", "MinGRU", "MinLSTM")
F32, F64 = torch.float32, torch.float64


def modules():
    torch.manual_seed(0)
    for name in LAYERS:
        yield getattr(ostinato, name)(5, 16, 2)
    yield nn.Sequential(nn.Linear(5, 7), nn.ReLU(), ostinato.LSTM(7, 16), ostinato.MinGRU(16, 8), nn.Linear(8, 2))


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_under_autocast_is_followed_by_one_outside(name):
    if name == "LSTM" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no LSTM in bfloat16 on this processor")
    torch.manual_seed(0)
    layer, x = getattr(ostinato, name)(5, 16), torch.randn(2, 3, 5)
    stepper = ostinato.Stepper(layer, 3)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = layer.step(x[0], layer.initial_state(3))
            assert torch.equal(stepper(x[0]), y)
        assert {kept.dtype for kept in states_of(stepper.state)} == {F32}
        state = tuple(own.float() for own in state) if name == "LSTM" else state.float()
        torch.testing.assert_close(stepper(x[1]), layer.step(x[1], state)[0], rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("module", list(modules()), ids=lambda module: type(module).__name__)
def test_the_stepper_keeps_the_state(module, device, frozen):
    module.to(device)
    stepper, x = ostinato.Stepper(module, 3, frozen=frozen), torch.randn(6, 3, 5, device=device)
    with torch.no_grad():
        whole = x
        for part in module if isinstance(module, nn.Sequential) else [module]:
            whole = part(whole)
            whole = whole[0] if isinstance(whole, tuple) else whole
    outputs = [stepper(x_t) for x_t in x]
    # Of so few units a sequence may be cuDNN's, whose error in float32 was measured as 7e-6.
    within = {"rtol": 0, "atol": 2e-6 if device == "cpu" else 2e-5}
    torch.testing.assert_close(torch.stack(outputs), whole, **within)
    kept = stepper.state
    mask = torch.tensor([True, False, True])
    stepper.reset(mask.to(device))
    y = stepper(x[0])
    torch.testing.assert_close(y[mask], whole[0][mask], **within)
    assert not torch.allclose(y[~mask], whole[0][~mask])
    stepper.state = kept
    torch.testing.assert_close(stepper(x[0])[~mask], y[~mask], **within)
    stepper.reset()
    torch.testing.assert_close(stepper(x[0]), whole[0], **within)
    assert not y.requires_grad


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("cell", ["mingru", "lstm"])
def test_language_models(cell, frozen):
    torch.manual_seed(0)
    model = LanguageModel(11, width=8, num_layers=2, cell=cell, dropout=0.0)
    tokens = torch.randint(11, (3, 6))
    stepper, whole = ostinato.Stepper(model, 3, frozen=frozen), model(tokens)[0]
    for t in range(6):
        torch.testing.assert_close(stepper(tokens[:, t]), whole[:, t], rtol=0, atol=1e-5)
    mask = torch.tensor([False, True, False])
    stepper.reset(mask)
    torch.testing.assert_close(stepper(tokens[:, 0])[mask], whole[mask, 0], rtol=0, atol=1e-5)


def test_an_optimiser_s_changes_are_seen():
    layer = ostinato.GRU(5, 16)
    stepper, x = ostinato.Stepper(layer, 2), torch.randn(2, 5)
    before = stepper(x)
    optimiser = torch.optim.SGD(layer.parameters(), 1.0)
    layer(x[None])[0].sum().backward()
    optimiser.step()
    stepper.reset()
    after = stepper(x)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, layer(x[None])[0][0].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("cell", "block", "density", "batch", "dtype"),  # products, which differ by blocks, know nothing of cells
    [
        *(("GRU", block, 0.2, batch, F64) for block in ((8, 4), (16, 1), (1, 1)) for batch in (1, 3)),
        *(("RNN", None, 1.0, 1, F64), ("LSTM", None, 1.0, 1, F64), ("LSTM", None, 1.0, 1, F32)),
        *(("GRU", None, 1.0, 3, F64), ("GRU", (16, 1), 0.9, 1, F64), ("GRU", (1, 1), 0.9, 3, F64)),
    ],
)
def test_a_frozen_stepper_has_weights_of_its_own(cell, block, density, batch, dtype):
    torch.manual_seed(0)
    layer = getattr(ostinato, cell)(36, 37, 2, dtype=dtype)
    if block is not None:
        ostinato.prune(layer, density, block=block, input_weights=True, keep_diagonal=True)
    live, frozen = ostinato.Stepper(layer, batch), ostinato.Stepper(layer, batch, frozen=True)
    x = torch.randn(6, batch, 36, dtype=dtype)
    whole = layer(x)[0].detach()
    for t in range(6):
        torch.testing.assert_close(frozen(x[t]), whole[t], rtol=0, atol=2e-6)
        live(x[t])
        if t == 3:
            with torch.no_grad():
                layer.weight_hh_l0.mul_(2)
    assert not torch.allclose(live(x[0]), frozen(x[0]))
    assert frozen._module._frozen_kernels  # what is tested here did run
    mask = torch.arange(batch) == 0
    frozen.reset(mask)
    x[0, 0, 1] = torch.inf  # pruned weights take it too
    expected = layer.__class__.forward(frozen._module, x[:1])[0][0]
    torch.testing.assert_close(frozen(x[0])[0], expected[0], rtol=0, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])  # without a kernel for a step
@pytest.mark.parametrize("cell", ["RNN", "GRU"])  # torch's cells run that, but not for frozen layers
def test_a_layer_is_frozen_after_steps_like_its_own(cell, dtype):
    torch.manual_seed(0)
    layer, x = getattr(ostinato, cell)(5, 16, dtype=dtype), torch.randn(4, 2, 5).to(dtype)
    live, frozen = ostinato.Stepper(layer, 2), ostinato.Stepper(layer, 2, frozen=True)
    expected = torch.stack([live(x_t) for x_t in x])
    torch.testing.assert_close(torch.stack([frozen(x_t) for x_t in x]), expected)


class Doubling(ostinato.GRU):
    def forward(self, input, hx=None, **options):
        return super().forward(2 * input, hx, **options)

    def step(self, x, state=None):
        return super().step(2 * x, state)


class ByForward(nn.Module):
    """A step written as a sequence of one."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.initial_state = layer, layer.initial_state

    def step(self, x, state):
        time = 1 if self.layer.batch_first else 0
        y, state = self.layer(x.unsqueeze(time), state)
        return y.squeeze(time), state


@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])  # which has no packed kernel
@pytest.mark.parametrize("module", [lambda layer: layer, ByForward], ids=["step", "forward"])
@pytest.mark.parametrize("layer", [Doubling, ostinato.LSTM])
def test_steps_and_sequences_of_one_are_repeated_alike(layer, module, dtype):
    torch.manual_seed(0)
    layer, x = layer(36, 37, 2, batch_first=layer is Doubling).to(dtype), torch.randn(4, 3, 36).to(dtype)
    whole = layer(x.transpose(0, 1))[0].transpose(0, 1) if layer.batch_first else layer(x)[0]
    stepper = ostinato.Stepper(module(layer), 3, frozen=True)
    for x_t, expected in zip(x, whole, strict=True):
        with torch.profiler.profile() as profile:
            y = stepper(x_t)
        torch.testing.assert_close(y, expected, rtol=0, atol=2e-6 if dtype == F32 else 2e-2)
    products = {"aten::mm", "aten::addmm"} & {event.key for event in profile.key_averages()}
    assert not products or dtype != F32


class ActorCritic(nn.Module):
    """With an output of several tensors, one of them the state itself."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.gru, self.value = kind, ostinato.GRU(3, 5), nn.Linear(5, 1)
        self.initial_state = self.gru.initial_state

    def step(self, x, state):
        y, after = self.gru.step(x, state)
        return self.kind(state, self.value(y)), after


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [lambda *y: y, lambda *y: dict(zip("ab", y, strict=True))], ids=["tuple", "dict"])
def test_outputs_of_several_tensors(kind, frozen, device):
    torch.manual_seed(0)
    module, x = ActorCritic(kind).to(device), torch.randn(5, 2, 3, device=device)
    stepper, state = ostinato.Stepper(module, 2, frozen=frozen), module.initial_state(2)
    outputs = [stepper(x_t) for x_t in x]
    for x_t, output in zip(x, outputs, strict=True):
        with torch.no_grad():
            expected, state = module.step(x_t, state)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-6 if device == "cpu" else 1e-3)


@dataclasses.dataclass
class Outputs:
    logits: torch.Tensor
    value: torch.Tensor


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_output_that_the_next_step_would_overwrite_is_refused(device):
    stepper = ostinato.Stepper(ActorCritic(Outputs).to(device), 2, frozen=True)
    before = stepper.state
    message = "ActorCritic.step's output must be made of tensors, in tuples, lists and dicts; got Outputs"
    for _ in range(2):
        with pytest.raises(TypeError, match=message):
            stepper(torch.randn(2, 3, device=device))
    assert torch.equal(stepper.state, before)


@pytest.mark.parametrize(
    ("result", "got"),
    [(lambda x, state: (x, x, state), "3 values"), (lambda x, state: x, "a tensor of torch.float32")],
)
def test_a_step_that_returns_no_pair_is_named(result, got):
    module = nn.Linear(3, 3)
    module.step, module.initial_state = result, lambda batch: torch.zeros(batch, 3)
    for frozen in (False, True):
        with pytest.raises(TypeError, match=rf"Linear.step must return its output and the next state; got {got}"):
            ostinato.Stepper(module, 2, frozen=frozen)(torch.randn(2, 3))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("frozen", [False, True])
def test_memory_does_not_grow_with_steps(frozen, device):
    layer = nn.Sequential(nn.Linear(5, 16), ostinato.GRU(16, 16, 2)).to(device)
    stepper, x = ostinato.Stepper(layer, 1, frozen=frozen), torch.randn(1, 5, device=device)

    def used_after(steps):
        for _ in range(steps):
            stepper(x)
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resident, torch.cuda.memory_allocated() if device == "cuda" else 0

    before, after = used_after(2_000), used_after(20_000)
    assert after[0] - before[0] < 1 << 20  # 52 bytes a step: less than any tensor
    assert after[1] == before[1]


def test_bad_input_is_refused():
    gru = ostinato.GRU(5, 16)
    with pytest.raises(TypeError, match="frozen must be a bool; got str"):
        ostinato.Stepper(gru, 1, frozen="no")
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        ostinato.Stepper(gru, 0)
    with pytest.raises(TypeError, match="batch_size must be an int; got float"):
        ostinato.Stepper(gru, 2.0)
    with pytest.raises(
        TypeError,
        match=r"module must have y, state = step\(x, state\) and state = initial_state\(batch_size\); "
        r"got torch\.nn\.modules\.linear\.Linear$",
    ):
        ostinato.Stepper(nn.Linear(2, 2), 1)
    stepper = ostinato.Stepper(gru, 2)
    assert repr(stepper) == "Stepper(GRU(5, 16), batch_size=2)"
    with pytest.raises(ValueError, match=r"x must have 2 rows, one a sequence; got \(3, 5\)"):
        stepper(torch.randn(3, 5))
    with pytest.raises(TypeError, match="x must be a tensor; got ndarray"):
        stepper(np.zeros((2, 5)))
    with pytest.raises(TypeError, match="mask must be a bool tensor; got ndarray"):  # as environments give it
        stepper.reset(np.zeros(2, bool))
    with pytest.raises(TypeError, match=r"mask must be a bool tensor; got a tensor of torch.int64"):
        stepper.reset(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"mask must have shape \(2,\); got \(3,\)"):
        stepper.reset(torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"state must have the shapes \(1, 2, 16\); got \(1, 3, 16\)"):
        stepper.state = torch.zeros(1, 3, 16)
    with pytest.raises(ValueError, match=r"state must have the shapes \(1, 2, 16\); got no tensor"):
        stepper.state = None
    with pytest.raises(TypeError, match="state must be made of tensors, in tuples and lists; got str"):
        stepper.state = "zero"
    with pytest.raises(TypeError, match=r"module must have y, state = step\(.*; got .*MinGRUCell"):
        ostinato.Stepper(nn.Sequential(ostinato.MinGRUCell(5, 16)), 2)  # which would forget every step
    with pytest.raises(ValueError, match="module must run forward in time; got a bidirectional SRU"):
        ostinato.Stepper(nn.Sequential(nn.Linear(5, 5), ostinato.SRU(5, 16, bidirectional=True)), 2)
    with pytest.raises(ValueError, match="this one is bidirectional"):
        ostinato.GRU(5, 16, bidirectional=True).step(torch.randn(2, 5))
    with pytest.raises(ValueError, match=r"x must have shape \(B, input_size\) or \(input_size,\); got \(1, 2, 5\)"):
        gru.step(torch.randn(1, 2, 5))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["GRU", "MinGRU", "SRU"])
def test_inside_and_outside_of_inference_mode(name, frozen):
    torch.manual_seed(0)
    layer, x = getattr(ostinato, name)(3, 5), torch.randn(4, 2, 3)
    whole = layer(x)[0]
    for made_inside in (False, True):
        with torch.inference_mode(made_inside):
            stepper = ostinato.Stepper(layer, 2, frozen=frozen)
        for inside in (True, False, True):
            with torch.inference_mode(inside):
                stepper(x[3])
            stepper.reset()
            stepper.reset(torch.tensor([True, False]))
            stepper.state = stepper.state
        found = [stepper(x_t) for x_t in x]
        torch.testing.assert_close(torch.stack(found), whole)
        assert not found[0].is_inference()  # may be multiplied with weights that are trained


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["GRU", "MinGRU", "SRU"])
def test_a_copy_goes_on_by_itself(name, frozen):
    torch.manual_seed(0)
    layer, x = getattr(ostinato, name)(3, 5), torch.randn(6, 2, 3)
    whole = layer(x)[0]
    stepper = ostinato.Stepper(layer, 2, frozen=frozen)
    for x_t in x[:3]:
        stepper(x_t)
    for copied in (copy.deepcopy(stepper), pickle.loads(pickle.dumps(stepper))):
        for x_t, expected in zip(x[3:], whole[3:], strict=True):
            torch.testing.assert_close(copied(x_t), expected)
    torch.testing.assert_close(stepper(x[3]), whole[3])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["GRU", "MinGRU", "IndRNN", "ParaLSTM", "SLSTM"])
def test_outputs_and_inputs_are_the_caller_s(name, frozen):
    """Neither does a reset write to them, nor a write to them change the state."""

    class Difference(nn.Module):
        def initial_state(self, batch_size):
            return torch.zeros(batch_size, 3, dtype=torch.float64)

        def step(self, x, last):
            return x - last, x

    torch.manual_seed(0)
    layer, x = getattr(ostinato, name)(3, 4, dtype=torch.float64), torch.randn(4, 2, 3, dtype=torch.float64)
    network = nn.Sequential(Difference(), layer)
    stepper, other = (ostinato.Stepper(network, 2, frozen=frozen) for _ in range(2))
    expected = [stepper(x_t).clone() for x_t in x]
    buffer = torch.empty_like(x[0])
    for x_t, right in zip(x, expected, strict=True):
        y = other(buffer.copy_(x_t))
        torch.testing.assert_close(y, right, rtol=0, atol=0)
        y.zero_()
    for change in (other.reset, functools.partial(setattr, other, "state", stepper.state)):
        y = other(buffer)
        before = y.clone()
        change()
        assert torch.equal(y, before)
        assert torch.equal(buffer, x[-1])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["MinGRU", "RGLRU", "ParaGRU", "ParaLSTM", "SLSTM", "LSTM"])
def test_a_part_that_works_in_place_leaves_states_alone(name, frozen):
    torch.manual_seed(0)
    layer, x = getattr(ostinato, name)(3, 4, dtype=torch.float64), torch.randn(6, 2, 3, dtype=torch.float64)
    stepper = ostinato.Stepper(nn.Sequential(layer, nn.Hardtanh(-0.05, 0.05, inplace=True)), 2, frozen=frozen)
    found = torch.stack([stepper(x_t) for x_t in x])
    torch.testing.assert_close(found, layer(x)[0].clamp(-0.05, 0.05))


class Pair(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


@pytest.mark.parametrize("kind", [tuple, list, Pair._make])
def test_states_of_a_module_s_own_kind(kind):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(3, 5)

        def initial_state(self, batch_size):
            return kind([torch.zeros(batch_size, 5)] * 2)

        def step(self, x, state):
            h, c = self.cell(x, tuple(state))
            return h, kind([h, c])

    module = Cell()
    stepper, x = ostinato.Stepper(module, 2), torch.randn(2, 3)
    first = stepper(x)
    assert type(stepper.state) is type(module.initial_state(2))
    stepper.reset(torch.tensor([True, False]))
    second = stepper(x)
    assert torch.equal(second[0], first[0])
    assert not torch.equal(second[1], first[1])


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (lambda batch: {"h": torch.zeros(batch, 3)}, TypeError, "made of tensors, in tuples and lists; got dict"),
        (lambda batch: (torch.zeros(batch, 3), 0), TypeError, "made of tensors, in tuples and lists; got int"),
        (lambda batch: torch.zeros(3), ValueError, r"with a row for each sequence; got \(3,\)"),
    ],
)
def test_a_state_that_cannot_be_kept_is_named(state, error, message):
    module = nn.Linear(3, 3)
    module.step, module.initial_state = (lambda x, state: (x, state)), state
    with pytest.raises(error, match=message):
        ostinato.Stepper(module, 2)


def test_sequences_within_a_sequence_keep_their_state_too():
    torch.manual_seed(0)
    gru, head, x = ostinato.GRU(3, 5), nn.Linear(5, 2), torch.randn(4, 2, 3)
    stepper = ostinato.Stepper(nn.Sequential(nn.Sequential(nn.Identity(), gru), head), 2)
    torch.testing.assert_close(torch.stack([stepper(x_t) for x_t in x]), head(gru(x)[0]))
    for other, remedy in ((nn.GRU(3, 5), ", to which ostinato.convert gives them"), (nn.GRUCell(3, 5), "")):
        with pytest.raises(
            TypeError, match=rf"module must have y, state = step\(.*; got .*\.{type(other).__name__}{remedy}$"
        ):
            ostinato.Stepper(nn.Sequential(nn.Linear(3, 3), other), 2)


@pytest.mark.parametrize("inner", [ostinato.GRU(3, 3), ostinato.HGRN(3, 3), nn.LSTM(3, 3), nn.GRUCell(3, 3)])
def test_a_recurrent_layer_inside_a_part_is_not_taken_for_stateless(inner):
    """Its forward would take the batch for steps, and begin anew at each."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 3), inner)

        def forward(self, x):
            return self.layers(x)[0]

    class Stepping(Block):
        def initial_state(self, batch_size):
            return ()  # such as one whose layer runs over the bands of a frame

        def step(self, x, state):
            return self(x), state

    with pytest.raises(TypeError, match=r"module must have y, state = step\(.*; got .*\.Block$"):
        ostinato.Stepper(nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)), Block()), 2)
    x = torch.randn(2, 3)
    for frozen in (False, True):
        stepper = ostinato.Stepper(nn.Sequential(nn.Linear(3, 3), Stepping()), 2, frozen=frozen)
        assert torch.equal(stepper(x), stepper(x))


def test_what_a_subclass_of_sequential_adds_is_not_left_out():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    class Last(nn.Sequential):
        def initial_state(self, batch_size):
            return self[0].initial_state(batch_size)

        def step(self, x, state):
            return self[0].step(2 * x, state)

    torch.manual_seed(0)
    network = nn.Sequential(Residual(nn.Linear(3, 3), nn.ReLU()), ostinato.GRU(3, 5))
    x = torch.randn(4, 2, 3)
    for frozen in (False, True):
        stepper = ostinato.Stepper(network, 2, frozen=frozen)
        torch.testing.assert_close(torch.stack([stepper(x_t) for x_t in x]), network(x)[0])
        stepper = ostinato.Stepper(Last(network[1]), 2, frozen=frozen)
        torch.testing.assert_close(torch.stack([stepper(x_t) for x_t in x]), network[1](2 * x)[0])
    with pytest.raises(TypeError, match=r"module must have y, state = step\(.*; got .*\.Residual$"):
        ostinato.Stepper(nn.Sequential(Residual(ostinato.GRU(3, 3))), 2)


def test_a_counter_or_a_part_called_step_is_no_step():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("step", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            return 2 * x

    torch.manual_seed(0)
    parts = {"step": nn.Linear(3, 3), "rnn": ostinato.GRU(3, 5), "last": nn.Sequential(nn.Identity(), Counting())}
    network = nn.Sequential(OrderedDict(parts))
    x = torch.randn(4, 2, 3)
    expected = 2 * parts["rnn"](parts["step"](x))[0]
    for frozen in (False, True):
        stepper = ostinato.Stepper(network, 2, frozen=frozen)
        torch.testing.assert_close(torch.stack([stepper(x_t) for x_t in x]), expected)


@pytest.mark.gpu
def test_a_stepper_that_is_gone_leaves_no_memory():
    module, x = nn.Sequential(nn.Linear(64, 64), ostinato.GRU(64, 64)).cuda(), torch.randn(4, 64, device="cuda")

    def kept():
        ostinato.Stepper(module, batch_size=4)(x)
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    first = kept()  # what libraries keep
    assert [kept() for _ in range(3)] == [first] * 3


@pytest.mark.parametrize(
    "module",
    [ostinato.GRU(3, 5), ostinato.MinLSTM(3, 5), ostinato.models.LanguageModel(vocab_size=3, width=8)],
    ids=lambda module: type(module).__name__,
)
def test_a_batch_that_is_none_has_no_initial_state(module):
    for batch, error, message in (("a", TypeError, "an int; got str"), (-1, ValueError, "at least 0; got -1")):
        with pytest.raises(error, match=f"batch_size must be {message}"):
            module.initial_state(batch)
