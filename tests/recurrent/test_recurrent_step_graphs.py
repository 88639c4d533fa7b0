"""Gradients of single steps in CUDA graphs have the bits of launched ones."""

import gc
import time

import pytest
import torch

import ostinato
from comparisons import same_bits
from ostinato.cuda_graphs import kept
from ostinato.recurrent import gradients as step_gradients
from ostinato.recurrent import steps
from recurrent_graphs import BATCH, DTYPES, HIDDEN, INPUT, STEPS, gradients, input_of, layer_of, states_of
from simulated_graphs import Recorded, simulate
from threads import in_threads


def test_steps_of_many_weights_have_no_graphs(monkeypatch):
    weights, found = [torch.nn.Parameter(torch.empty(72, 16))], []
    monkeypatch.setattr(step_gradients, "worth_capturing", lambda *args: True)
    monkeypatch.setattr(step_gradients, "Repeated", lambda: found.append(1))
    for most in (72 * 16 * 4, 72 * 16 * 4 - 1):
        monkeypatch.setattr(step_gradients, "_MOST_BYTES", most)
        step_gradients.differentiable("GRU", None, None, weights, BATCH)
    assert len(found) == 1


def loop(layer, seed):
    """The outputs of steps, with a state that is given, and gradients of the parameters, the input and that state."""
    x, state = input_of(layer, seed), states_of(layer, seed)
    hidden, outputs = state, []
    for t in range(STEPS):
        y, hidden = layer.step(x[t], hidden)
        outputs.append(y)
    return [*outputs, *gradients(layer, (*outputs, hidden), (x, state), chosen=range(1, STEPS + 2))]


@pytest.mark.parametrize("options", [{}, {"num_layers": 3}, {"bias": False}], ids=["one layer", "three", "no biases"])
def test_gradients_of_steps_in_simulated_graphs(options, monkeypatch):
    simulate(monkeypatch, 100)
    layer = ostinato.RNN(INPUT, HIDDEN, **options)
    weights = [x.detach() for x in layer.parameters()]
    step = step_gradients._Step("RNN_TANH", None, None, kept.Repeated())
    layers, needed = layer.num_layers, (True,) * (2 + len(weights))
    for seed, present in enumerate([(True, False)] * 4 + [(False, True), (True, True)] * 3):
        torch.manual_seed(seed)
        shapes = (BATCH, INPUT), (layers, BATCH, HIDDEN), (BATCH, HIDDEN), (layers, BATCH, HIDDEN)
        x, h, *grads = map(torch.randn, shapes)
        grads = [grad if is_present else None for grad, is_present in zip(grads, present, strict=True)]
        expected = step_gradients._by_kernels("RNN_TANH", x, [h], weights, grads, needed)
        graph = step_gradients._graph_of(step, layer.weight_ih_l0, x, [h], weights, grads, needed)
        if graph is not None:
            found = graph.replay(x, [h], grads)
            assert same_bits(found, expected)
            assert found[0].untyped_storage().data_ptr() != found[-1].untyped_storage().data_ptr()  # of an input
    assert kept._kept.replays == 3 + 2 + 2
    # As many as of the gradients of the weights, and of these as one tensor.
    assert [x.graphs.bytes for x in kept._kept._all] == [2 * sum(weight.nbytes for weight in weights)] * 3
    with monkeypatch.context() as switched:
        switched.setattr(step_gradients, "product_switches", lambda: ("other",))
        assert step_gradients._graph_of(step, layer.weight_ih_l0, x, [h], weights, grads, needed) is None
    others = [*weights[:-1], weights[-1].clone()]  # another layer's
    assert step_gradients._graph_of(step, layer.weight_ih_l0, x, [h], others, grads, needed) is None
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7)
    assert step_gradients._graph_of(step, layer.weight_ih_l0, x, [h], weights, grads, needed) is None


def test_threads_share_gradients_of_steps(monkeypatch):
    simulate(monkeypatch, 100)
    replay = Recorded.replay
    monkeypatch.setattr(Recorded, "replay", lambda self: time.sleep(1e-3) or replay(self))  # others go on
    layer = ostinato.RNN(INPUT, HIDDEN)
    weights, owner = [x.detach() for x in layer.parameters()], layer.weight_ih_l0
    step, needed = step_gradients._Step("RNN_TANH", None, None, kept.Repeated()), (True,) * 6
    x, h, grad = torch.randn(4, BATCH, INPUT), torch.randn(4, 1, BATCH, HIDDEN), torch.randn(4, BATCH, HIDDEN)
    expected = [
        step_gradients._by_kernels("RNN_TANH", x[i], [h[i]], weights, (grad[i], None), needed) for i in range(4)
    ]
    while (graph := step_gradients._graph_of(step, owner, x[0], [h[0]], weights, (grad[0], None), needed)) is None:
        pass
    found = [None] * 4

    def run(i):
        found[i] = [graph.replay(x[i], [h[i]], (grad[i], None)) for _ in range(5)]

    in_threads(run, range(4))
    for mine, right in zip(found, expected, strict=True):
        for one in mine:
            assert same_bits(one, right)


@pytest.mark.parametrize("end", ["deleted", "converted", "replaced", "other data"])
def test_graphs_of_steps_go_with_their_layer(end, monkeypatch):
    simulate(monkeypatch, 100)
    layer = ostinato.RNN(INPUT, HIDDEN)
    step = step_gradients._Step("RNN_TANH", None, None, kept.Repeated())
    needed = (True,) * (2 + len(layer._flat_weights))

    def run(present):
        grads = [torch.randn(BATCH, HIDDEN), torch.randn(1, BATCH, HIDDEN) if present else None]
        x, h = torch.randn(BATCH, INPUT), torch.randn(1, BATCH, HIDDEN)
        weights = [y.detach() for y in layer.parameters()]
        step_gradients._graph_of(step, layer.weight_ih_l0, x, [h], weights, grads, needed)

    for present in (True, True, False, False):
        run(present)
    assert len(kept._kept._all) == 2
    if end == "deleted":
        del layer
        gc.collect()
    elif end == "converted":
        layer.double()
    elif end == "replaced":
        held = layer.weight_ih_l0  # as by an optimiser
        layer.weight_ih_l0 = torch.nn.Parameter(held.detach().clone())
    else:
        layer.weight_hh_l0.data = layer.weight_hh_l0.data.clone()
        for _ in range(2):
            run(True)
    assert len(kept._kept._all) == (1 if end == "other data" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"num_layers": 3}, {"bias": False}], ids=["one layer", "three", "no biases"])
@pytest.mark.parametrize("cell", ["RNN", "relu", "GRU", "LSTM"])
def test_gradients_of_steps(cell, options, dtype, soon, monkeypatch):
    layer = layer_of(cell, dtype, **options)
    with monkeypatch.context() as without:
        without.setattr(step_gradients, "_graph_of", lambda *args: None)
        expected = [loop(layer, seed) for seed in range(3)]
    for seed in (0, 1, 2, 0):
        assert same_bits(loop(layer, seed), expected[seed])
    assert kept._kept.replays >= 4 * STEPS - 6
    layer.weight_hh_l0.data = layer.weight_hh_l0.data.clone()
    assert same_bits(loop(layer, 0), expected[0])
    layer.weight_ih_l0.requires_grad_(False)
    found = torch.autograd.grad(layer.step(input_of(layer)[0])[0].sum(), layer.weight_hh_l0)
    assert found[0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["RNN", "relu", "GRU", "LSTM"])
def test_gradients_of_steps_without_a_kernel(cell, soon, monkeypatch):
    """As of large layers and batches."""
    monkeypatch.setattr(steps, "_steps_of_layers", lambda *args: None)
    layer = layer_of(cell, torch.float64, num_layers=2)
    with monkeypatch.context() as without:  # by autograd
        without.setattr(steps, "differentiable", lambda mode, step, cells, *_: cells)
        expected = loop(layer, 0)
    steps._STEPS = steps.Prepared()
    for _ in range(3):
        for found, right in zip(loop(layer, 0), expected, strict=True):
            torch.testing.assert_close(found, right)
    assert kept._kept.replays >= 3 * STEPS - 6


@pytest.mark.gpu
def test_gradients_of_steps_at_another_precision(soon, monkeypatch):
    layer = ostinato.LSTM(64, 256, device="cuda")
    x = torch.randn(32, 64, device="cuda")

    def run():
        return torch.autograd.grad(layer.step(x)[0].square().sum(), list(layer.parameters()))

    for precision in ("ieee", "tf32", "ieee", "tf32"):
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
        with monkeypatch.context() as without:
            without.setattr(step_gradients, "_graph_of", lambda *args: None)
            expected = run()
        for _ in range(4):
            assert same_bits(run(), expected)
    assert kept._kept.replays > 8
