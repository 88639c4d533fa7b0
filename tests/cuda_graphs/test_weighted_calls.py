"""Recurrences with recurrent weights whose calls repeat: replayed, they give what launched ones do."""

import gc
import importlib
import itertools

import pytest
import torch

from comparisons import same_bits
from ostinato import weighted
from ostinato.cuda_graphs import kept
from simulated_graphs import launched, simulate
from weighted_cells import CELLS, call, inputs

STEPS, BATCH, WIDTH = 5, 2, 4


@pytest.fixture
def simulated(monkeypatch):
    """On a CPU: a call that comes a second time is captured."""
    importlib.import_module("torch._dynamo")  # a simulated capture would, and leave frames that keep its call
    simulate(monkeypatch, 100)
    monkeypatch.setattr(weighted, "worth_capturing", lambda weights, rows: type(weights[0]) is torch.nn.Parameter)


@pytest.fixture
def soon(monkeypatch):
    """On a GPU: a call that comes a second time is captured."""
    monkeypatch.setattr(kept, "USES", 1)
    monkeypatch.setattr(kept, "_kept", kept._AllKept())


def made(cell, dtype=torch.float32, device="cpu", width=WIDTH):
    """A weight, and what else a call is given, which is not always the same."""
    weight, *_ = inputs(cell, BATCH, STEPS, width, dtype=dtype, device=device)
    weight = torch.nn.Parameter(weight.detach())

    def others(seed):
        torch.manual_seed(seed)
        return inputs(cell, BATCH, STEPS, width, dtype=dtype, device=device)[1:]

    return weight, others


def run(cell, weight, arguments, h0, **options):
    """The results of a call, and the gradients of all it is given."""
    leaves = [weight, *arguments, *h0]
    results = call(cell, weight, arguments, h0, **options)
    return [x.detach() for x in (*results, *torch.autograd.grad(results, leaves, [y.detach().cos() for y in results]))]


def assert_as_launched(found, expected):
    """The same bits, but for the gradient of the GRU's bias, (D,), which PyTorch sums from another layout."""
    for x, y in zip(found, expected, strict=True):
        if x.dim() == 1:
            torch.testing.assert_close(x, y)
        else:
            assert same_bits([x], [y])


def replays_of(function, *args, **options):
    """Of four calls, which are captured at the second."""
    before = kept._kept.replays
    for _ in range(4):
        function(*args, **options)
    return kept._kept.replays - before


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("with_resets", [False, True])
def test_replayed_calls_give_what_launched_ones_do(cell, with_resets, simulated):
    weight, others = made(cell)
    for seed in range(4):
        options = {"resets": torch.rand(BATCH, STEPS) < 0.3} if with_resets else {}
        given = others(seed)
        with launched():
            expected = run(cell, weight, *given, **options)
        assert_as_launched(run(cell, weight, *given, **options), expected)
        with torch.no_grad():
            weight.mul_(0.9)  # as by an optimiser
    assert kept._kept.replays == 3


def test_calls_of_other_kinds_have_graphs_of_their_own(simulated):
    weight, others = made("peephole")
    arguments, h0 = others(0)
    expanded = [*arguments[:3], torch.randn(1, 1, 4).expand(BATCH, STEPS, 4), *arguments[4:]]
    kinds = itertools.product([arguments, expanded], [h0, []], [False, True], [None, torch.rand(BATCH, STEPS) < 0.5])
    kinds = [(given, {"reverse": reverse, "resets": resets}) for *given, reverse, resets in kinds]
    with torch.no_grad(), launched():
        expected = [call("peephole", weight, *given, **options) for given, options in kinds]
    for k in range(3):
        with torch.no_grad():
            found = [call("peephole", weight, *given, **options) for given, options in kinds]
        assert all(map(same_bits, found, expected))
        assert kept._kept.replays == k * len(kinds)


def test_which_calls_are_launched(simulated, monkeypatch):
    weight, others = made("janet")
    arguments, h0 = others(0)
    assert replays_of(call, "janet", weight, arguments, h0) == 3
    assert replays_of(call, "janet", weight * 1, arguments, h0) == 0  # elsewhere in another call
    joined = [torch.cat([*x]).unsqueeze(0) for x in arguments]
    packed = torch.tensor([0, 5, 10], dtype=torch.int32)
    assert replays_of(call, "janet", weight, joined, h0, cu_seqlens=packed) == 0
    long = [torch.randn(BATCH, 513, WIDTH) for _ in arguments]
    assert replays_of(call, "janet", weight, [x[:, :512].contiguous() for x in long], h0) == 3
    assert replays_of(call, "janet", weight, long, h0) == 0
    for batch, length, width in ((0, STEPS, WIDTH), (BATCH, 0, WIDTH), (BATCH, STEPS, 0)):
        empty, *rest = inputs("janet", batch, length, width)
        assert replays_of(call, "janet", torch.nn.Parameter(empty.detach()), *rest) == 0
    monkeypatch.setattr(weighted, "product_switches", lambda: ("other",))
    assert replays_of(call, "janet", weight, arguments, h0) == 3  # counted anew
    monkeypatch.setattr(weighted, "is_captured", lambda device: True)
    assert replays_of(call, "janet", weight, arguments, h0) == 0


def test_second_derivatives_of_replayed_calls(simulated):
    weight, others = made("gru", torch.float64)
    arguments, h0 = others(0)

    def second():
        h, _ = call("gru", weight, arguments, h0)
        (grad,) = torch.autograd.grad(h.square().sum(), arguments[0], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [weight, *arguments, *h0])

    with launched():
        expected = second()
    for _ in range(3):
        torch.testing.assert_close(second(), expected)
    assert kept._kept.replays == 2


def test_graphs_go_with_the_weight(simulated):
    weight, others = made("elman")
    replays_of(run, "elman", weight, *others(0))
    assert len(kept._kept._all) == 1
    del weight
    gc.collect()
    assert kept._kept._all == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("cell", "width"), [*((cell, 64) for cell in CELLS), ("gru", 513)])
def test_replayed_calls_on_a_gpu(cell, width, dtype, soon):
    weight, others = made(cell, dtype, "cuda", width)
    for seed in range(4):
        options = {"resets": torch.rand(BATCH, STEPS, device="cuda") < 0.3, "reverse": True}
        given = others(seed)
        with launched():
            expected = run(cell, weight, *given, **options)
        assert_as_launched(run(cell, weight, *given, **options), expected)
        with torch.no_grad():
            weight.mul_(0.9)
    assert kept._kept.replays == 3
