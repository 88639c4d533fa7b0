"""Small layers in CUDA graphs give the bits of launched calls, whatever happens between the passes."""

import copy
import gc
import itertools
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import ostinato
from comparisons import same_bits
from ostinato.cuda_graphs import calls, kept
from ostinato.recurrent import sequences
from ostinato.states import each
from recurrent_graphs import DTYPES, HIDDEN, flat, gradients, input_of, layer_of, states_of
from simulated_graphs import launched, move, simulate
from threads import in_threads

SIZES = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "both directions": {"num_layers": 2, "bidirectional": True},
    "batch first, without biases": {"batch_first": True, "bias": False},
}


def test_which_layers_are_captured(monkeypatch):
    weights = [torch.nn.Parameter(torch.empty(96, 16)), torch.nn.Parameter(torch.empty(96, 24))]
    assert not calls.worth_capturing(weights, 21)  # on a CPU
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.delenv("OSTINATO_CUDA_GRAPHS", raising=False)
    assert calls.worth_capturing(weights, 21)
    assert calls.worth_capturing(weights, 107_000)  # 4 bytes of 96 + 3*16 and of 96 + 3*24 numbers: 128 MB
    assert not calls.worth_capturing(weights, 108_000)
    heads = [torch.nn.Parameter(torch.empty(4, 24, 16))]  # 4 bytes of 24 + 3*16 numbers of each
    assert calls.worth_capturing(heads, 116_000)
    assert not calls.worth_capturing(heads, 117_000)
    assert not calls.worth_capturing([x.data for x in weights], 21)  # which another call has elsewhere
    with monkeypatch.context() as other:
        other.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
        assert not calls.worth_capturing(weights, 21)
    monkeypatch.setenv("OSTINATO_CUDA_GRAPHS", "0")
    assert not calls.worth_capturing(weights, 21)


def warmed(layer, *args, **options):
    """So that the next call replays."""
    for _ in range(2):
        gradients(layer, layer(*args, **options), ())
    return kept._kept.replays


@pytest.fixture
def simulated(monkeypatch):
    """A layer on a CPU, whose calls are captured."""
    simulate(monkeypatch, 100)
    monkeypatch.setattr(sequences, "worth_capturing", lambda *args: True)

    def make():
        layer, x = ostinato.GRU(16, 24), torch.randn(7, 3, 16)
        for _ in range(3):
            gradients(layer, layer(x), ())
        assert kept._kept.replays == 2
        return layer

    return make


def test_hooks_may_keep_results(simulated):
    layer = simulated()
    layer.register_forward_hook(lambda layer, _, results: setattr(layer, "results", results))
    layer(torch.randn(7, 3, 16))
    assert kept._kept.replays == 3
    freed = weakref.ref(layer)
    del layer
    gc.collect()
    assert freed() is None
    assert kept._kept._all == []


def test_attributes_may_change_before_a_late_backward(simulated):
    layer, x = simulated(), torch.randn(7, 3, 16)
    expected = gradients(layer, layer(x), ())
    results = layer(x)
    gradients(layer, results, (), retain_graph=True)
    layer.batch_first, layer.dropout, layer.hidden_size = True, 0.5, 7
    for found, grad in zip(gradients(layer, results, ()), expected, strict=True):
        torch.testing.assert_close(found, grad)


def test_replaced_parameters_are_freed(simulated):
    layer = simulated()
    layer.load_state_dict({name: x.clone() for name, x in layer.state_dict().items()})
    assert len(kept._kept._all) == 1
    layer.load_state_dict({name: x.clone() for name, x in layer.state_dict().items()}, assign=True)
    assert kept._kept._all == []


def test_converted_parameters_are_freed(simulated):
    layer = simulated()
    layer.double()
    assert kept._kept._all == []


def test_autocast_in_simulated_graphs(simulated):
    layer, x = simulated(), torch.randn(7, 3, 16)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            results = layer(x)
        return [*results, *gradients(layer, results, ())]

    before, expected = kept._kept.replays, run()
    assert expected[0].dtype == torch.bfloat16
    for _ in range(2):
        assert same_bits(run(), expected)
    assert kept._kept.replays == before + 2


def test_evaluation_drops_nothing_after_calls_in_training(simulated):
    simulated()
    layer, x = ostinato.GRU(16, 24, 2, dropout=0.5).requires_grad_(False), torch.randn(7, 3, 16)
    before = kept._kept.replays
    for training in (True, False):
        layer.train(training)
        torch.manual_seed(0)
        with launched():
            expected = layer(x)
        for _ in range(4):
            torch.manual_seed(0)
            assert same_bits(layer(x), expected)
    assert kept._kept.replays == before + 2 * 3
    torch.testing.assert_close(expected[0], ostinato.GRU.forward(copy.deepcopy(layer).train(False), x)[0])


def test_a_late_backward_drops_the_same(simulated):
    simulated()
    layer, x, before = ostinato.GRU(16, 24, 2, dropout=0.5), torch.randn(7, 3, 16), kept._kept.replays
    for _ in range(4):
        results = layer(x)
        first = gradients(layer, results, (), retain_graph=True)
        for one, two in zip(gradients(layer, results, ()), first, strict=True):
            torch.testing.assert_close(one, two)
    assert kept._kept.replays == before + 3


def reentrant(layer, x):
    return checkpoint(lambda x: layer(x)[0], x, use_reentrant=True)


USES_OF_DROPOUT = {
    "call": lambda layer, x: layer(x)[0],
    "two calls": lambda layer, x: layer(x)[0] + layer(2 * x)[0],
    "checkpoint": reentrant,
    "nested": lambda layer, x: checkpoint(lambda x: reentrant(layer, x), x, use_reentrant=True),
    "resets": lambda layer, x: layer(x, resets=torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) % 5 == 3)[0],
}


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "batch_first": True}], ids=["forward", "both"])
@pytest.mark.parametrize("use", USES_OF_DROPOUT.values(), ids=USES_OF_DROPOUT)
def test_calls_with_dropout_compute_what_launched_ones_do(use, options, p, simulated):
    layer = ostinato.GRU(16, 24, 2, dropout=p, **options)

    def run(seed):
        torch.manual_seed(seed)
        x = torch.randn(7, 3, 16, requires_grad=True)
        layer.zero_grad()
        output = use(layer, x)
        output.square().sum().backward()
        return [output, x.grad, *(weight.grad.clone() for weight in layer.parameters()), torch.rand(3)]

    with launched():
        expected = [run(seed) for seed in range(3)]
    for _ in range(2):
        for seed in range(3):
            for found, right in zip(run(seed), expected[seed], strict=True):
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert kept._kept.replays >= 4


def replays_of(layer, x):
    """How many of some calls and backwards replay."""
    before = kept._kept.replays
    for _ in range(4):
        output = layer(x)[0]
        (output if isinstance(output, torch.Tensor) else output.data).sum().backward()
    return kept._kept.replays - before


def test_which_calls_are_launched(simulated, monkeypatch):
    layer, x = simulated(), torch.randn(7, 3, 16)
    assert replays_of(layer, x) == 4
    assert replays_of(layer, pack_sequence([*x.unbind(1)])) == 0
    assert replays_of(ostinato.prune(ostinato.GRU(16, 24), 0.5), x) == 0
    monkeypatch.setattr(sequences, "product_switches", lambda: ("other",))
    assert replays_of(layer, x) == 3  # counted anew
    monkeypatch.setattr(sequences, "MOST_STEPS", 7)
    assert replays_of(ostinato.GRU(16, 24, 2), x) == 3
    assert replays_of(ostinato.GRU(16, 24, 2), torch.randn(8, 3, 16)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(cell, dtype, soon):
    layer = layer_of(cell, num_layers=2)

    def run(seed, late=False):
        x = input_of(layer, seed)
        with torch.autocast("cuda", dtype):
            results = layer(x)
        if late:
            gradients(layer, results, (x,), retain_graph=True)
        return [*flat(*results), *gradients(layer, results, (x,))]

    for seed in range(4):
        with launched():
            expected = run(seed)
        assert expected[0].dtype == dtype
        assert same_bits(run(seed), expected)
        assert same_bits(run(seed, late=True), expected)
    assert kept._kept.replays == 7
    with launched():
        expected = gradients(layer, layer(x := input_of(layer)), (x,))
    for _ in range(3):
        assert same_bits(gradients(layer, layer(x), (x,)), expected)  # without autocast


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("cell", ["RNN", "relu", "GRU", "LSTM"])
def test_every_bit_is_that_of_launched_calls(cell, options, dtype, soon):
    layer = layer_of(cell, dtype, **options)
    other = copy.deepcopy(layer)
    for seed in range(5):
        x, states = input_of(layer, seed), states_of(layer, seed)
        shape = x.shape[:2]
        resets = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).lt(0.2).cuda() if seed % 2 else None
        given = [(x, states), (x,)][seed % 2]
        for chosen in ((0, 1, 2), (0,), (1,), (0, 1)):
            results = layer(*given, resets=resets)
            found = gradients(layer, results, given, chosen)
            with launched():
                expected = other(*given, resets=resets)
                assert same_bits(flat(*results), flat(*expected))
                assert same_bits(found, gradients(other, expected, given, chosen))
        with torch.no_grad():
            for one, two, grad in zip(layer.parameters(), other.parameters(), found, strict=False):
                one.sub_(grad, alpha=0.1)
                two.sub_(grad, alpha=0.1)
    assert kept._kept.replays == 5 * 4 - 2  # of both kinds of calls the first is launched
    assert all(all(x.graphs._backwards.values()) for x in kept._kept._all)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_every_bit_without_gradients(cell, options, dtype, soon):
    layer = layer_of(cell, dtype, **options)
    pairs = []
    for seed in range(6):
        x, states = input_of(layer, seed).detach(), each(torch.Tensor.detach, states_of(layer, seed))
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            layer.requires_grad_(mode is not torch.enable_grad)
            with mode():
                results = [*flat(*layer(x, states))]
                with launched():
                    expected = [*flat(*layer(x, states))]
            assert same_bits(results, expected)
            assert not any(y.requires_grad for y in results)
            assert all(y.is_inference() is (mode is torch.inference_mode) for y in results)
            pairs.append((results, expected))
        with torch.no_grad():
            for weight in layer.parameters():
                weight.neg_()
    for results, expected in pairs:
        assert same_bits(results, expected)  # which no later call has overwritten
    assert kept._kept.replays >= 6 * 3 - 3  # the first call of each mode is launched


@pytest.mark.gpu
def test_frozen_parameters_and_inputs_without_gradients(soon):
    layer = layer_of("LSTM", num_layers=2)
    layer.weight_hh_l0.requires_grad_(False)
    layer.bias_ih_l1.requires_grad_(False)
    x = input_of(layer).detach()
    parameters = [x for x in layer.parameters() if x.requires_grad]

    def run():
        output, _ = layer(x)
        return [output, *torch.autograd.grad(output.square().sum(), parameters)]

    with launched():
        expected = run()
    for _ in range(4):
        assert same_bits(run(), expected)
    assert kept._kept.replays == 3


@pytest.mark.gpu
def test_a_call_before_the_backward_of_another(soon):
    layer = layer_of("GRU")
    first, second = input_of(layer, 1), input_of(layer, 2)
    before = warmed(layer, first)

    def run():
        results = [layer(first), layer(second)]
        return [*gradients(layer, results[0], (first,)), *gradients(layer, results[1], (second,))]

    with launched():
        expected = run()
    assert same_bits(run(), expected)
    assert kept._kept.replays == before + 1  # the second is launched
    assert same_bits(run(), expected)
    results = layer(first)
    del results  # as if it were of no use
    assert same_bits(run(), expected)


@pytest.mark.gpu
def test_a_backward_that_comes_twice_or_late(soon):
    layer = layer_of("LSTM")
    x, other = input_of(layer, 1), input_of(layer, 2)
    warmed(layer, x)
    with launched():
        expected = gradients(layer, layer(x), (x,))
    results = layer(x)
    assert same_bits(gradients(layer, results, (x,), retain_graph=True), expected)
    assert same_bits(gradients(layer, results, (x,), retain_graph=True), expected)
    gradients(layer, layer(other), (other,))  # overwrites the memory
    assert same_bits(gradients(layer, results, (x,)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_gradients_of_gradients(cell, soon):
    layer = layer_of(cell)
    x = input_of(layer)
    before = warmed(layer, x)

    def run():
        output, _ = layer(x)
        (grad,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *layer.parameters()], allow_unused=True)

    with launched():
        expected = run()
    for y, z in zip(run(), expected, strict=True):
        assert (y is None and z is None) or torch.allclose(y, z, rtol=1e-5, atol=1e-6)
    assert kept._kept.replays == before + 1


@pytest.mark.gpu
def test_several_gradients_at_once(soon):
    layer = layer_of("GRU")
    x = input_of(layer)
    warmed(layer, x)
    rows = torch.eye(HIDDEN, device="cuda")[:3]

    def run():
        output, _ = layer(x)
        return torch.autograd.grad(output[-1, 0], x, rows, is_grads_batched=True)

    with launched():
        (expected,) = run()
    torch.testing.assert_close(run()[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("changed", ["weight", "input"])
def test_what_is_changed_before_the_backward_is_an_error(changed, soon):
    layer = layer_of("GRU")
    x = input_of(layer)
    warmed(layer, x)
    results = layer(x)
    with torch.no_grad():
        (layer.weight_hh_l0 if changed == "weight" else x).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(layer, results, ())


@pytest.mark.gpu
def test_weights_that_are_moved_before_the_backward(soon):
    layer = layer_of("GRU")
    x = input_of(layer)
    warmed(layer, x)
    with launched():
        expected = gradients(layer, layer(x), (x,))
    results = layer(x)
    _ = move(layer.weight_hh_l0)
    assert same_bits(gradients(layer, results, (x,)), expected)
    for late in (False, True):
        warmed(layer, x)
        results = layer(x)
        if late:
            gradients(layer, results, (x,), retain_graph=True)
        before, layer.weight_hh_l0.data = layer.weight_hh_l0.data, torch.full_like(layer.weight_hh_l0, float("nan"))
        assert same_bits(gradients(layer, results, (x,)), expected)
        layer.weight_hh_l0.data = before


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_hooks_of_saved_tensors(reentrant, soon):
    layer = layer_of("LSTM", num_layers=2)
    x = input_of(layer)
    warmed(layer, x)
    with launched():
        expected = gradients(layer, layer(x), (x,), (0,))

    def run():
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        output = checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant)
        output.backward(output.detach().cos())
        return [p.grad for p in (*layer.parameters(), x)]

    for _ in range(3):
        assert same_bits(run(), expected)
    with torch.autograd.graph.save_on_cpu():
        results = layer(x)
    assert same_bits(gradients(layer, results, (x,), (0,)), expected)


@pytest.mark.gpu
def test_a_captured_model_and_other_streams(soon):
    layer = layer_of("GRU", num_layers=2)
    x = input_of(layer)
    warmed(layer, x)
    with launched():
        expected = gradients(layer, layer(x), (x,))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            found = gradients(layer, layer(x), (x,))
    torch.cuda.current_stream().wait_stream(stream)
    assert same_bits(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(layer, layer(x), (x,))
    graph.replay()
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_threads_share_a_layer(soon):
    layer = layer_of("LSTM")
    inputs = [input_of(layer, seed) for seed in range(4)]
    with launched():
        expected = [gradients(layer, layer(x), (x,)) for x in inputs]
    warmed(layer, inputs[0])
    found = [[] for _ in inputs]

    def work(index):
        for _ in range(30):
            found[index].append(gradients(layer, layer(inputs[index]), (inputs[index],)))

    in_threads(work, range(4))
    for mine, own in zip(found, expected, strict=True):
        assert len(mine) == 30
        for one in mine:
            assert same_bits(one, own)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["relu", "GRU", "LSTM"])
@pytest.mark.parametrize("options", [{"num_layers": 3}, {"num_layers": 2, "bidirectional": True}])
def test_dropout_is_drawn_anew(cell, options, soon):
    layer = layer_of(cell, dropout=0.5, **options)
    x = input_of(layer)

    def run(seed):
        torch.manual_seed(seed)
        results = layer(x)
        return [*flat(*results), *gradients(layer, results, (x,)), torch.rand(3, device="cuda")]

    with launched():
        expected = [run(seed) for seed in range(4)]
    for _ in range(2):
        for seed in range(4):
            assert same_bits(run(seed), expected[seed])
    assert not torch.equal(expected[0][0], expected[1][0])
    outputs = [layer(x)[0] for _ in range(4)]
    assert all(not torch.equal(one, two) for one, two in itertools.pairwise(outputs))
    assert kept._kept.replays == 7 + 1  # the others came before the backward of the first
    del outputs
    torch.manual_seed(5)
    results = layer(x)
    first = gradients(layer, results, (x,), retain_graph=True)
    torch.manual_seed(6)
    for one, two in zip(gradients(layer, results, (x,)), first, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    before = kept._kept.replays
    layer.eval()
    with torch.no_grad():
        with launched():
            expected = flat(*layer(x))
        layer(x)
        assert same_bits(flat(*layer(x)), expected)
    assert kept._kept.replays == before + 1
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.gpu
def test_graphs_go_with_their_layer_and_its_weights(soon):
    layer = layer_of("GRU")
    x = input_of(layer)
    warmed(layer, x)
    assert len(kept._kept._all) == 1
    layer.cpu()
    assert kept._kept._all == []
    layer.cuda()
    warmed(layer, x)
    assert len(kept._kept._all) == 1
    del layer
    gc.collect()
    assert kept._kept._all == []


@pytest.mark.gpu
def test_what_cannot_be_captured_is_launched(soon, monkeypatch):
    layer = layer_of("GRU")
    x = input_of(layer)
    with launched():
        expected = gradients(layer, layer(x), (x,))

    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(calls, "_captured_gradients", fail)
    for _ in range(4):
        assert same_bits(gradients(layer, layer(x), (x,)), expected)
    assert kept._kept.replays == 1  # then none, as no backward would follow
    monkeypatch.setattr(calls, "CallGraphs", fail)
    other = copy.deepcopy(layer)
    for _ in range(4):
        assert same_bits(gradients(other, other(x), (x,)), expected)
    assert kept._kept.replays == 1


@pytest.mark.gpu
def test_a_pool_of_the_callers_does_not_get_the_memory_of_graphs(soon):
    layer = layer_of("LSTM")
    x = input_of(layer)
    with launched():
        expected = gradients(layer, layer(x), (x,))
    pool = torch.cuda.MemPool()
    for _ in range(4):
        with torch.cuda.use_mem_pool(pool):
            results = layer(x)
            found = gradients(layer, results, (x,))
            others = [torch.full_like(y, float("nan")) for y in (*found, *flat(*results))]
        assert same_bits(found, expected)
        del others


@pytest.mark.gpu
@pytest.mark.parametrize("allocator", ["native", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_allocators(allocator):
    code = """
import torch, ostinato
from ostinato.cuda_graphs import kept
layer, x = ostinato.LSTM(16, 24, 2, device="cuda"), torch.randn(7, 3, 16, device="cuda")

def run():
    return torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))

expected = run()
for _ in range(kept.USES + 4):
    found = run()
    others = [torch.full_like(y, float("nan")) for y in expected]
    assert all(torch.equal(one, two) for one, two in zip(found, expected))
print(kept._kept.replays)
"""
    settings = {} if allocator == "native" else {"PYTORCH_CUDA_ALLOC_CONF": allocator}
    environment = os.environ | settings
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == (0 if "Async" in allocator else 5)
