"""Layers made of recurrences compute in CUDA graphs, real or simulated, what launched calls compute."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch.nn.utils import parametrize

import ostinato
from ostinato import weighted
from ostinato.cuda_graphs import calls, kept, stacked
from ostinato.states import each, states_of
from simulated_graphs import launched, simulate

KINDS = {
    "MinGRU": {},
    "MinLSTM": {"candidate": "tanh"},
    "HighwayMinGRU": {},
    "RGLRU": {"num_blocks": 2},
    "HGRN": {},
    "IndRNN": {"nonlinearity": "tanh"},
    "LRU": {},
    "QRNN": {},
    "SRU": {},
    "ParaGRU": {},
    "ParaLSTM": {},
    "SLSTM": {"num_heads": 2},
}
SIZES = {
    "one layer": {},
    "two layers, without biases": {"num_layers": 2, "bias": False},
    "both directions": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}
STEPS, BATCH, SIZE = 5, 3, 8


@pytest.fixture
def device(request, monkeypatch):
    """Where calls are captured from the second equal one on."""
    monkeypatch.setattr(stacked, "_CALLS", stacked.Prepared())
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(kept, "USES", 1)
        monkeypatch.setattr(kept, "_kept", kept._AllKept())
        return "cuda"
    simulate(monkeypatch, 100)
    monkeypatch.setattr(stacked, "worth_capturing", lambda *_: True)
    monkeypatch.setattr(stacked, "_is_on_gpu", lambda x: True)
    return "cpu"


def make(kind, device, **options):
    torch.manual_seed(0)
    return getattr(ostinato, kind)(SIZE, SIZE, **KINDS[kind], **options, device=device)


def inputs_of(layer, seed, given=()):
    """The input, and a state and resets if given."""
    device, shape = layer.weight_ih_l0.device, (STEPS, BATCH)
    torch.manual_seed(seed)
    x = torch.randn(*(reversed(shape) if layer.batch_first else shape), SIZE).to(device).requires_grad_()
    hx = layer.initial_state(BATCH)
    hx = tuple(torch.rand(y.shape).to(device).requires_grad_() for y in states_of(hx))
    found = {"hx": hx if layer.states > 1 else hx[0]} if "hx" in given else {}
    if "resets" in given:
        found["resets"] = (torch.rand(x.shape[:2]) < 0.3).to(device)
    return x, found


def gradients(layer, results, *inputs, **options):
    results = [results[0], *states_of(results[1])]
    loss = sum((y * y.detach().cos()).sum() for y in results)
    return torch.autograd.grad(loss, [*inputs, *layer.parameters()], **options)


def check(found, expected):
    for y, right in zip(found, expected, strict=True):
        assert torch.equal(y, right) if y.is_cuda else torch.allclose(y, right, rtol=1e-4, atol=1e-5)


def check_layer(layer):
    for seed, given in enumerate(((), (), ("hx",), ("resets",), ("hx", "resets"), ("hx", "resets"))):
        x, others = inputs_of(layer, seed, given)
        inputs = x, *states_of(others.get("hx"))
        with launched():
            expected = layer(x, **others)
            right = gradients(layer, expected, *inputs)
        for _ in range(2):
            results = layer(x, **others)
            assert [y.shape for y in states_of(results[1])] == [y.shape for y in states_of(expected[1])]
            check([results[0], *states_of(results[1])], [expected[0], *states_of(expected[1])])
            check(gradients(layer, results, *inputs), right)
    assert kept._kept.replays == 12 - 4  # of each kind of call one is counted


@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_launched_calls(kind, options, device):
    check_layer(make(kind, device, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_launched_calls(kind, options, device):
    check_layer(make(kind, device, **options))


def replays_of(layer, times=4, **others):
    """How many of so many calls and backwards replay."""
    before, (x, _) = kept._kept.replays, inputs_of(layer, 0)
    for _ in range(times):
        gradients(layer, layer(x, **others))
    return kept._kept.replays - before


def test_recurrences_with_weights_are_captured_with_their_layer_alone(device, monkeypatch):
    """Until then they are launched, but replayed where the layer is not worth capturing."""
    monkeypatch.setattr(weighted, "worth_capturing", lambda *_: True)
    captures = []
    capture = calls.CallGraphs
    monkeypatch.setattr(calls, "CallGraphs", lambda *given: captures.append(given) or capture(*given))
    layer = make("SLSTM", device, num_layers=2)
    assert replays_of(layer) == 2
    assert len(captures) == 1
    monkeypatch.setattr(stacked, "MOST_BYTES", 0)
    assert replays_of(layer) == 2 * 4  # the first of all calls was launched, too
    assert len(captures) == 1 + 2


def test_which_calls_are_captured(device, monkeypatch):
    layer = make("MinGRU", device, num_layers=2)
    assert replays_of(layer) == 2
    x, _ = inputs_of(layer, 0)
    with monkeypatch.context() as smaller:
        smaller.setattr(stacked, "MOST_BYTES", x.nbytes - 1)
        assert replays_of(layer) == 0
    layer.sequence_group = lambda: None  # of processes that share its sequences
    assert [stacked.replayed(layer, x, None, None) for _ in range(4)] == [None] * 4


def test_dropout(device):
    layer, (x, _) = make("MinGRU", device, num_layers=3, dropout=0.5), inputs_of(make("MinGRU", device), 0)
    options = [0] if device == "cuda" else []

    def run(seed):
        with torch.random.fork_rng(devices=options):
            torch.manual_seed(seed)
            results = layer(x)
            return [*results, *gradients(layer, results, x)]

    for training in (True, False):
        layer.train(training)
        with launched():
            expected = [run(seed) for seed in range(3)]
        for _ in range(2):
            for seed in range(3):
                check(run(seed), expected[seed])
        assert training != torch.equal(expected[0][0], expected[1][0])
    assert kept._kept.replays == 2 * 5
    layer.dropout = 0.25
    check(run(0), expected[0])
    layer.train()
    assert (run(0)[0] - expected[0][0]).abs().max() > 0.01
    for _ in range(4):
        results = layer(x)
        first = gradients(layer, results, x, retain_graph=True)
        for one, two in zip(gradients(layer, results, x), first, strict=True):  # drops the same
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_switches_of_products_count(device, monkeypatch):
    layer = make("MinGRU", device)
    assert replays_of(layer) == 2
    monkeypatch.setattr(stacked, "product_switches", lambda: ("other",))
    assert replays_of(layer) == 2


@pytest.mark.parametrize("shape", [(STEPS, 0, SIZE), (0, BATCH, SIZE)])
def test_calls_without_an_element_are_launched(shape, device):
    layer = make("MinGRU", device)
    for _ in range(4):
        output, last = layer(torch.empty(shape, requires_grad=True))
        gradients(layer, (output, last))
    assert output.shape == shape
    assert kept._kept.replays == 0


def test_changed_settings_count(device):
    layer = make("IndRNN", device)
    assert replays_of(layer) == 2
    layer.nonlinearity = "relu"
    x, _ = inputs_of(layer, 0)
    expected = make("IndRNN", device)
    expected.nonlinearity = "relu"
    with launched():
        right = expected(x)[0]
    for _ in range(4):
        check([layer(x)[0]], [right])


def test_classes_of_others_are_launched(device):
    class Doubled(ostinato.MinGRU):
        def _run_cell(self, *args):
            y, last = super()._run_cell(*args)
            return 2 * y, last

    assert replays_of(Doubled(SIZE, SIZE, device=device)) == 0


def test_a_weight_that_is_made_of_another_is_launched(device):
    layer = make("MinGRU", device, bias=False)
    assert replays_of(layer) == 2
    raw = layer._parameters.pop("weight_ih_l0")
    layer.register_parameter("raw", raw)  # as of dropped weights
    layer.weight_ih_l0 = raw / 2
    x, _ = inputs_of(layer, 0)
    with launched():
        expected = layer(x)[0]
    for _ in range(4):
        layer.weight_ih_l0 = raw / 2
        check([layer(x)[0]], [expected])


def test_a_missing_parameter_is_an_error_as_before(device):
    layer = make("MinGRU", device)
    layer.bias_ih_l0 = None
    with pytest.raises(TypeError, match="bias_ih_l0"):
        replays_of(layer)


def test_parametrized_weights_are_launched(device):
    class Half(torch.nn.Module):
        def forward(self, x):
            return x / 2

    layer = make("MinGRU", device)
    parametrize.register_parametrization(layer, "weight_ih_l0", Half())
    assert replays_of(layer) == 0


def test_results_without_gradients_have_none(device):
    layer = make("LRU", device)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith("bias"))
    x, _ = inputs_of(layer, 0)
    for _ in range(4):
        output, last = layer(x.detach())
        assert output.requires_grad
        assert not any(y.requires_grad for y in states_of(last))
    assert kept._kept.replays == 0


def test_a_parameter_that_a_result_does_not_depend_on_has_no_gradient(device):
    layer = make("LRU", device)
    x, _ = inputs_of(layer, 0)

    def run():
        last = layer(x)[1]
        return torch.autograd.grad(sum(y.sum() for y in last), [x, *layer.parameters()], allow_unused=True)

    with launched():
        expected = run()
    assert None in expected
    for _ in range(4):
        found = run()
        assert [y is None for y in found] == [y is None for y in expected]
        check([y for y in found if y is not None], [y for y in expected if y is not None])
    assert kept._kept.replays == 3


@pytest.mark.parametrize("kind", ["MinGRU", "SRU"])
def test_autocast_is_that_of_the_call(kind, device):
    layer = make(kind, device)
    x, _ = inputs_of(layer, 0)
    found = []
    for how in (launched, contextlib.nullcontext, contextlib.nullcontext, contextlib.nullcontext):
        with how(), torch.autocast(device, torch.bfloat16):
            results = layer(x)
        once = gradients(layer, results, x, retain_graph=True)
        found.append([results[0], *once, *gradients(layer, results, x)])  # the second time by launched calls
        for y, right in zip(found[-1], found[0], strict=True):
            assert y.dtype == right.dtype
            torch.testing.assert_close(y, right, rtol=2e-2, atol=2e-2)
        for late, right in zip(found[-1][1 + len(once) :], found[0][1:], strict=False):
            torch.testing.assert_close(late, right, rtol=1e-5, atol=1e-5)
    assert kept._kept.replays == 2
    right = layer(x)[0]
    for _ in range(4):
        assert torch.equal(layer(x)[0], right)  # without autocast
        assert right.dtype == torch.float32


def test_late_backwards_and_moved_weights(device):
    layer = make("MinLSTM", device)
    assert replays_of(layer) == 2
    (x, _), (other, _) = inputs_of(layer, 1), inputs_of(layer, 2)
    with launched():
        right = [gradients(layer, layer(y), y) for y in (x, other)]
    one, two = layer(x), layer(other)
    check(gradients(layer, two, other), right[1])
    check(gradients(layer, one, x, retain_graph=True), right[0])
    check(gradients(layer, one, x), right[0])
    layer.weight_ih_l0.data = layer.weight_ih_l0.data.clone()
    for _ in range(4):
        check(gradients(layer, layer(x), x), right[0])


def test_graphs_go_with_their_layer(device):
    layer = make("MinGRU", device)
    layer.register_forward_hook(lambda layer, _, results: setattr(layer, "results", results))
    assert replays_of(layer) == 2
    other = copy.deepcopy(make("MinGRU", device))
    assert replays_of(other) == 3  # prepared for the other
    assert len(kept._kept._all) == 2
    other.double()
    assert len(kept._kept._all) == 1
    other.float()
    assert replays_of(other) == 3
    other.weight_ih_l0 = torch.nn.Parameter(other.weight_ih_l0.detach().clone())
    assert len(kept._kept._all) == 1
    freed = weakref.ref(layer)
    del layer
    gc.collect()
    assert freed() is None
    assert kept._kept._all == []


def test_parameters_that_are_replaced_at_every_call_are_captured_once(device, monkeypatch):
    layer, captures, capture = make("MinGRU", device), [], calls.CallGraphs
    monkeypatch.setattr(calls, "CallGraphs", lambda *args: captures.append(args) or capture(*args))
    whole, shard = layer.weight_ih_l0, torch.nn.Parameter(torch.empty(0))
    for _ in range(8):
        layer.weight_ih_l0 = whole
        replays_of(layer, times=1)
        layer.weight_ih_l0 = shard
    assert len(captures) == 1


def check_steps(layer):
    xs, others = inputs_of(layer, 0, ("hx",))
    xs = xs.detach().unbind(1 if layer.batch_first else 0)
    runs = []
    for how in (launched, contextlib.nullcontext):
        for _ in range(2):
            state, outputs = each(torch.Tensor.detach, others["hx"]), []
            with how(), torch.no_grad():
                for x in xs:
                    y, state = layer.step(x, state)
                    outputs.append(y)
            runs.append([*outputs, *states_of(state)])
    for run in runs:
        check(run, runs[0])
    assert kept._kept.replays == 2 * STEPS - 1
    for x in xs:
        layer.step(x)  # with gradients they are launched, but for recurrences with weights, each of which is replayed
    with_weights = layer.num_layers * (STEPS - 1) if isinstance(layer, ostinato.SLSTM) else 0
    assert kept._kept.replays == 2 * STEPS - 1 + with_weights


@pytest.mark.parametrize("kind", ["RGLRU", "LRU", "ParaLSTM"])
def test_steps(kind, device):
    check_steps(make(kind, device, num_layers=2, batch_first=kind == "LRU"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("MinGRU", "MinLSTM")])
def test_bits_of_steps(kind, device):
    check_steps(make(kind, device, num_layers=2, batch_first=kind == "LRU"))
