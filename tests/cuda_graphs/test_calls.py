"""When calls are replayed, and what they save for the backward pass, with simulated graphs on a CPU."""

import copy
import gc
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from comparisons import same_bits
from ostinato.cuda_graphs import calls, capture, function, kept
from recurrent_layers import Stopped
from simulated_graphs import Recorded, move, simulate
from threads import in_threads

BYTES = 2 * (3 + 3 * 3) * 4 * 4 * 2 + 2 * 2 * 3 * 3 * 4  # of a call and its gradients: as many as are estimated


class Layer(nn.Module):
    """h[t] = tanh(W x[t] + U h[t-1]), zero before a step that resets it."""

    def __init__(self, width=3):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(width, width) / 2) for _ in range(2)])
        self.calls = calls.RepeatedCalls(self.launched, draws=False)

    def __deepcopy__(self, memo):
        other = Layer()
        other.load_state_dict(self.state_dict())
        return other

    @staticmethod
    def launched(x, states, weights, resets):
        h, outputs = states[0] if states else x.new_zeros(x.shape[1:]), []
        for t, step in enumerate(x):
            if resets is not None:
                h = h.masked_fill(resets[t, :, None], 0)
            h = torch.tanh(step @ weights[0].T + h @ weights[1].T)
            outputs.append(h)
        return [torch.stack(outputs), h]

    def forward(self, x, *states, resets=None):
        weights, states = [*self.weights], [*states]
        training = torch.is_grad_enabled()
        found = self.calls.replay(self, x, states, weights, resets, training)
        return self.launched(x, states, weights, resets) if found is None else found


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    simulate(monkeypatch, BYTES)
    torch.manual_seed(0)


class Dropout(Layer):
    """Of outputs."""

    def __init__(self):
        super().__init__()
        self.calls = calls.RepeatedCalls(self.launched, draws=True)

    @staticmethod
    def launched(x, states, weights, resets):
        output, h = Layer.launched(x, states, weights, resets)
        return [nn.functional.dropout(output, 0.5), h]


def x_of(seed=0):
    return torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(layer, results, *inputs, chosen=(0, 1), **options):
    loss = sum((results[i] * results[i].detach().cos()).sum() for i in chosen)
    return torch.autograd.grad(loss, [*inputs, *layer.parameters()], **options)


def expected_of(layer, x, *states, resets=None, chosen=(0, 1)):
    results = layer.launched(x, [*states], [*layer.weights], resets)
    return gradients(layer, results, x, *states, chosen=chosen)


def warmed(layer, x):
    """So that the next call replays."""
    for _ in range(2):
        gradients(layer, layer(x))
    return kept._kept.replays


@pytest.mark.parametrize("given", ["input", "state", "resets"])
def test_results_and_gradients_are_those_of_launched_calls(given):
    layer = Layer()
    for seed in range(6):
        x = x_of(seed)
        states = [torch.randn(2, 3).requires_grad_()] if given == "state" else []
        resets = torch.rand(4, 2) < 0.3 if given == "resets" else None
        for chosen in ((0, 1), (0,), (1,)):
            results = layer(x, *states, resets=resets)
            assert same_bits(results, layer.launched(x, states, [*layer.weights], resets))
            found = gradients(layer, results, x, *states, chosen=chosen)
            assert same_bits(found, expected_of(layer, x, *states, resets=resets, chosen=chosen))
        with torch.no_grad():
            for weight, grad in zip(layer.weights, found[-2:], strict=True):
                weight.sub_(grad)
    assert kept._kept.replays == 6 * 3 - 1
    assert all(all(x.graphs._backwards.values()) for x in kept._kept._all)


def test_what_is_given_is_not_overwritten():
    layer, given = Layer(), [(x_of(seed), torch.randn(2, 3), torch.rand(4, 2) < 0.5) for seed in range(4)]
    before = [[x.clone() for x in tensors] for tensors in given]
    for x, state, resets in given:
        gradients(layer, layer(x, state, resets=resets))
    assert kept._kept.replays == 3
    for tensors, values in zip(given, before, strict=True):
        assert same_bits(tensors, values)


def test_results_without_gradients_are_not_overwritten():
    layer, pairs = Layer(), []
    for seed in range(4):
        x = x_of(seed)
        with torch.no_grad() if seed % 2 else torch.inference_mode():
            pairs.append((layer(x), layer.launched(x, [], [*layer.weights], None)))
    for results, expected in pairs:
        assert same_bits(results, expected)
        assert not any(y.requires_grad for y in results)
    assert kept._kept.replays == 3


def test_a_call_before_the_backward_of_another_is_launched():
    layer, first, second = Layer(), x_of(1), x_of(2)
    before = warmed(layer, first)
    for times in (1, 2):
        one, two = layer(first), layer(second)
        assert kept._kept.replays == before + times
        assert same_bits(gradients(layer, one, first), expected_of(layer, first))
        assert same_bits(gradients(layer, two, second), expected_of(layer, second))
    unused = layer(first)
    layer(second)
    assert kept._kept.replays == before + 3
    del unused
    assert same_bits(gradients(layer, layer(first), first), expected_of(layer, first))
    assert kept._kept.replays == before + 4


def test_a_backward_may_come_twice_and_late(monkeypatch):
    layer, x, other = Layer(), x_of(1), x_of(2)
    warmed(layer, x)
    replayed, replay = [], function.CapturedFunction.__call__
    monkeypatch.setattr(function.CapturedFunction, "__call__", lambda *args: replayed.append(args) or replay(*args))
    results = layer(x)
    assert same_bits(gradients(layer, results, x, retain_graph=True), expected_of(layer, x))
    assert len(replayed) == 1
    assert same_bits(gradients(layer, results, x, retain_graph=True), expected_of(layer, x))
    assert len(replayed) == 1
    gradients(layer, layer(other))
    assert same_bits(gradients(layer, results, x), expected_of(layer, x))
    assert len(replayed) == 2


def test_dropout_draws_what_launched_calls_do():
    layer, x = Dropout(), x_of()
    for seed in range(4):
        torch.manual_seed(seed)
        results = layer(x)
        found = [*results, *gradients(layer, results, x), torch.rand(3)]
        torch.manual_seed(seed)
        expected = layer.launched(x, [], [*layer.weights], None)
        assert same_bits(found, [*expected, *gradients(layer, expected, x), torch.rand(3)])
        if kept._kept.replays:
            torch.manual_seed(seed)
            with torch.no_grad():
                assert same_bits(layer(x), expected)
    assert kept._kept.replays == 3 + 3


@pytest.mark.parametrize("how", ["twice", "late", "differentiable"])
def test_a_backward_computed_again_drops_the_same(how):
    layer, x = Dropout(), x_of()
    before = warmed(layer, x)
    torch.manual_seed(7)
    results = layer(x)
    expected = gradients(layer, results, x, retain_graph=True)
    if how == "twice":
        gradients(layer, results, x, retain_graph=True)
    elif how == "late":
        with torch.no_grad():
            x.data, value = x_of(1), x.data
        gradients(layer, layer(x))
        x.data = value
    torch.manual_seed(8)
    found = gradients(layer, results, x, create_graph=how == "differentiable")
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)
    assert kept._kept.replays == before + 1 + (how == "late")
    after = torch.rand(3)
    torch.manual_seed(8)
    assert torch.equal(after, torch.rand(3))  # of what is drawn next, the backward takes none


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_with_dropout(reentrant):
    layer, x = Dropout(), x_of()
    for seed in range(4):
        torch.manual_seed(seed)
        output = layer.launched(x, [], [*layer.weights], None)[0]
        expected = torch.autograd.grad(output.square().sum(), x)[0]
        torch.manual_seed(seed)
        x.grad = None
        checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(x.grad, expected)


def test_gradients_of_gradients():
    layer, x = Layer(), x_of()
    warmed(layer, x)

    def second(output):
        (grad,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, *layer.parameters()])

    for y, z in zip(second(layer(x)[0]), second(layer.launched(x, [], [*layer.weights], None)[0]), strict=True):
        torch.testing.assert_close(y, z)


@pytest.mark.parametrize("kind", [Layer, Dropout])
def test_several_gradients_at_once(kind):
    layer, x, rows = kind(), x_of(), torch.eye(3)
    before, leaves = warmed(layer, x), [x, *layer.parameters()]
    torch.manual_seed(7)
    output = layer.launched(x, [], [*layer.weights], None)[0]
    expected = torch.autograd.grad(output[-1, 0], leaves, rows, retain_graph=True, is_grads_batched=True)
    torch.manual_seed(7)
    output = layer(x)[0]
    assert kept._kept.replays == before + 1
    together = torch.autograd.grad(output[-1, 0], leaves, rows, retain_graph=True, is_grads_batched=True)
    mapped = torch.vmap(lambda row: torch.autograd.grad(output[-1, 0], leaves, row, retain_graph=True))(rows)
    for found in (together, mapped):
        for y, z in zip(found, expected, strict=True):
            torch.testing.assert_close(y, z)


def test_results_that_nothing_depends_on_have_no_gradient():
    layer, x = Layer(), x_of()
    warmed(layer, x)
    found = torch.autograd.grad(Stopped.apply(layer(x)[0]).sum(), [x, *layer.parameters()], allow_unused=True)
    assert found == (None, None, None)


@pytest.mark.parametrize("changed", ["weight", "input"])
def test_what_is_changed_before_the_backward_is_an_error(changed):
    layer, x = Layer(), x_of()
    warmed(layer, x)
    results = layer(x)
    with torch.no_grad():
        (layer.weights[1] if changed == "weight" else x).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(layer, results)


def test_weights_that_are_elsewhere_in_the_backward():
    layer, x = Layer(), x_of()
    before = warmed(layer, x)
    expected = expected_of(layer, x)
    results = layer(x)
    _ = move(layer.weights[1])
    assert same_bits(gradients(layer, results, x), expected)
    assert kept._kept.replays == before + 1
    assert None in layer.calls.graphs.calls.values()  # weights that moved may move again


def test_gradients_are_those_of_the_weights_of_the_forward():
    layer, x = Layer(), x_of()
    before, expected = warmed(layer, x), expected_of(layer, x)
    for late in (False, True):
        results = layer(x)
        if late:
            gradients(layer, results, x, retain_graph=True)
        old, layer.weights[1].data = layer.weights[1].data, torch.full((3, 3), float("nan"))
        assert same_bits(gradients(layer, results, x), expected)
        layer.weights[1].data = old
    assert kept._kept.replays == before + 2


@pytest.mark.parametrize("late", [False, True])
def test_autocast_around_a_backward_alone(late):
    layer, x = Layer(), x_of()
    expected = expected_of(layer, x)
    for _ in range(2):
        results = layer(x)
    for is_on in (True, False):  # the backward is captured where it is on
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            if late:
                gradients(layer, results, x, retain_graph=True)
            assert same_bits(gradients(layer, results, x), expected)
        results = layer(x)
    assert kept._kept.replays == 3


@pytest.mark.parametrize("frozen", ["weights", "input"])
@pytest.mark.parametrize("how", ["in time", "late", "differentiable"])
def test_what_is_frozen_before_the_backward(how, frozen):
    layer, x = Layer(), x_of()
    before, expected = warmed(layer, x), expected_of(layer, x)
    leaves, results = [x, *layer.parameters()], layer(x)
    if how == "late":
        gradients(layer, results, retain_graph=True)
    for leaf in leaves[1:] if frozen == "weights" else leaves[:1]:
        leaf.requires_grad_(False)
    loss = sum((y * y.detach().cos()).sum() for y in results)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a cycle, which the test frees
        loss.backward(create_graph=how == "differentiable")
    for leaf, grad in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, grad) if leaf.requires_grad else leaf.grad is None
        leaf.grad = None
    assert kept._kept.replays == before + 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    layer, x = Layer(), x_of()
    warmed(layer, x)
    expected = expected_of(layer, x, chosen=(0,))
    for _ in range(3):
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        output = checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant)
        output.backward(output.detach().cos())
        assert same_bits([x.grad, *(p.grad for p in layer.parameters())], expected)


def test_other_streams_are_launched(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    assert warmed(Layer(), x_of()) == 0


def test_a_backward_inside_a_capture_is_launched(monkeypatch):
    layer, x = Layer(), x_of()
    warmed(layer, x)
    results = layer(x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(calls.CallGraphs, "backward", None)
    assert same_bits(gradients(layer, results, x), expected_of(layer, x))


@pytest.mark.parametrize("trained", [False, True])
def test_threads_share_a_layer(trained, monkeypatch):
    layer, inputs = Layer(), [x_of(seed) for seed in range(4)]
    replay = Recorded.replay
    monkeypatch.setattr(Recorded, "replay", lambda self: time.sleep(1e-3) or replay(self))  # others go on

    def launched(x):
        return expected_of(layer, x) if trained else layer.launched(x, [], [*layer.weights], None)

    def run(x):
        with torch.set_grad_enabled(trained):
            results = layer(x)
            return gradients(layer, results, x) if trained else results

    expected = [launched(x) for x in inputs]
    run(inputs[0])
    found = [[] for _ in inputs]

    def work(index):
        for _ in range(10):
            found[index].append(run(inputs[index]))

    in_threads(work, range(4))
    for mine, own in zip(found, expected, strict=True):
        assert len(mine) == 10
        for one in mine:
            assert same_bits(one, own)


def test_memory_is_bounded_and_freed_with_the_layer(monkeypatch):
    layers, x = [Layer() for _ in range(3)], x_of()
    monkeypatch.setattr(kept, "MOST_KEPT", 2 * BYTES)
    assert [warmed(layer, x) for layer in layers] == [1, 2, 2]  # no room for the third
    assert [x.graphs.bytes for x in kept._kept._all] == [BYTES] * 2
    del layers[0]
    gc.collect()
    assert len(kept._kept._all) == 1
    kept.forget(layers[0])
    assert kept._kept._all == []
    assert layers[0].calls.graphs.calls == {}
    assert warmed(layers[0], x) == 3
    monkeypatch.setattr(kept, "MOST_KEPT", BYTES)
    monkeypatch.setattr(kept, "_STALE", 1)
    assert warmed(Layer(), x) == 3  # the last replay is of the other
    gradients(layers[0], layers[0](x))
    assert warmed(layer := Layer(), x) == 4
    kept._kept.replays += 1
    assert warmed(layer := copy.deepcopy(layer), x) == 6  # in place of one that was not used for long
    assert layers[0].calls.graphs.calls == {}


def test_several_graphs_make_room_for_one(monkeypatch):
    layers = [Layer() for _ in range(2)]
    assert [warmed(layer, x_of()) for layer in layers] == [1, 2]
    monkeypatch.setattr(kept, "MOST_KEPT", 2 * BYTES)
    monkeypatch.setattr(kept, "_STALE", 0)
    assert kept._kept.make_room(BYTES)
    assert len(kept._kept._all) == 1
    assert warmed(layers[0], x_of()) == 3
    assert not kept._kept.make_room(2 * BYTES + 1)
    assert len(kept._kept._all) == 2
    assert kept._kept.make_room(2 * BYTES)
    assert kept._kept._all == []


@pytest.mark.parametrize("free", [8 * BYTES, 8 * BYTES - 1])
def test_graphs_leave_memory_to_others(free, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    assert warmed(Layer(), x_of()) == (free >= 8 * BYTES)


def test_counts_are_bounded(monkeypatch):
    monkeypatch.setattr(kept, "_MOST_COUNTED", 3)
    layer, x = Layer(), x_of()
    warmed(layer, x)
    before = []
    for _ in range(5):
        before.append(layer.weights[1].data)
        layer.weights[1].data = layer.weights[1].data.clone()
        layer(x)
    assert len(layer.calls.graphs.calls) <= 3
    assert sum(isinstance(x, calls.CallGraphs) for x in layer.calls.graphs.calls.values()) == 1


def test_what_cannot_be_captured_is_launched(monkeypatch):
    layer, x = Layer(), x_of()
    expected = expected_of(layer, x)

    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(calls, "_captured_gradients", fail)
    for _ in range(4):
        assert same_bits(gradients(layer, layer(x), x), expected)
    assert kept._kept.replays == 1  # then none, as no backward would follow
    monkeypatch.setattr(calls, "CallGraphs", fail)
    other = copy.deepcopy(layer)
    for _ in range(4):
        assert same_bits(gradients(other, other(x), x), expected)
    assert kept._kept.replays == 1


def test_gradients_may_be_changed_one_by_one():
    layer, x = Layer(), x_of()
    warmed(layer, x)
    first, second = gradients(layer, layer(x))
    scale = torch.ones((), requires_grad=True)
    scaled = scale * first  # whose backward needs the first
    second.zero_()
    scaled.sum().backward()
    assert scale.grad == first.sum()


def test_gradients_of_gradients_are_those_of_the_weights_of_the_forward():
    layer, x = Layer(), x_of()
    before = warmed(layer, x)

    def second(output):
        (grad,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
        return grad, *torch.autograd.grad(grad.square().sum(), [x, *layer.parameters()])

    expected = second(layer(x)[0])
    output = layer(x)[0]
    layer.weights[1].data = torch.full((3, 3), float("nan"))
    assert same_bits(second(output), expected)
    assert kept._kept.replays == before + 2


def test_compiled_backwards():
    layer, x = Layer(), x_of()
    warmed(layer, x)
    expected = expected_of(layer, x)
    for _ in range(2):
        results = layer(x)
        loss = sum((y * y.detach().cos()).sum() for y in results)
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(torch.Tensor.backward, backend="aot_eager")(loss)
        for leaf, grad in zip((x, *layer.parameters()), expected, strict=True):
            torch.testing.assert_close(leaf.grad, grad)


def test_weights_before_are_freed():
    layer, x = Layer(), x_of()
    warmed(layer, x)
    for _ in range(3):
        layer.weights[1].data = layer.weights[1].data.clone()
        before, expected = warmed(layer, x), expected_of(layer, x)
        assert same_bits(gradients(layer, layer(x), x), expected)
        assert kept._kept.replays == before + 1
        assert [x.key for x in kept._kept._all] == [(calls.addresses_of([*layer.weights]),)]


def test_a_backward_is_captured_only_of_weights_that_have_not_moved():
    layer, x = Layer(), x_of()
    layer(x)
    results = layer(x)
    (own,) = kept._kept._all
    own.graphs._leaves[-1].data = torch.zeros(3, 3)  # as a shard's, whose memory is another's now
    assert same_bits(gradients(layer, results, x), expected_of(layer, x))
    assert kept._kept._all == []
    assert [*layer.calls.graphs.calls.values()] == [None]


def test_the_gradient_of_an_input_does_not_keep_those_of_weights():
    layer, x, state = Layer(), x_of(), torch.randn(2, 3).requires_grad_()
    for _ in range(3):
        found = gradients(layer, layer(x, state), x, state)
    assert kept._kept.replays == 2
    assert found[0].untyped_storage().nbytes() == x.nbytes + state.nbytes
    assert same_bits(found, expected_of(layer, x, state))


def test_graphs_without_memory_of_their_own_are_dropped(monkeypatch):
    segments = [{"segment_pool_id": (0, 0), "address": 0, "total_size": 64}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    for module in (calls, function):
        monkeypatch.setattr(module, "bytes_of", capture.bytes_of)
    layer, x = Layer(), x_of()
    expected = expected_of(layer, x)
    for _ in range(3):
        assert same_bits(gradients(layer, layer(x), x), expected)
    assert kept._kept.replays == 0
    result = torch.ones(16)
    segments.append({"segment_pool_id": (0, 0), "address": result.data_ptr(), "total_size": 4})
    assert capture.bytes_of((0, 0), result) == 68
    with pytest.raises(RuntimeError, match="not its own"):
        capture.bytes_of((0, 1), result)
    with pytest.raises(RuntimeError, match="not its own"):
        capture.bytes_of((0, 0), result[1:])


def test_others_launch_while_a_call_is_captured(monkeypatch):
    layer, x, seen = Layer(), x_of(), []
    captured_call = calls.CallGraphs

    def captured(*args):
        seen.append([*layer.calls.graphs.calls.values()])
        layer(x)
        return captured_call(*args)

    monkeypatch.setattr(calls, "CallGraphs", captured)
    warmed(layer, x)
    assert seen == [[None]]
    assert kept._kept.replays == 1


def test_the_memory_of_a_backward_counts(monkeypatch):
    memory = iter([BYTES - 1, BYTES + 1, BYTES + 2])
    for module in (calls, function):
        monkeypatch.setattr(module, "bytes_of", lambda pool, result: next(memory))
    layer, x = Layer(), x_of()
    layer(x)
    results = layer(x)
    (own,) = kept._kept._all
    assert own.graphs.bytes == BYTES  # from the forward on, as those of other layers come before the first backward
    gradients(layer, results)
    assert own.graphs.bytes == BYTES + 1
    gradients(layer, layer(x), chosen=(0,))  # another graph
    assert own.graphs.bytes == BYTES + 2


def test_the_gradients_of_large_weights_take_room(monkeypatch):
    layer, x = Layer(), x_of()
    monkeypatch.setattr(kept, "MOST_KEPT", BYTES - 1)
    assert warmed(layer, x) == 0
    other = Layer()
    with torch.no_grad():
        for _ in range(2):
            other(x)
    assert kept._kept.replays == 1
    monkeypatch.setattr(kept, "MOST_KEPT", 3 * BYTES)
    layers = [Layer() for _ in range(4)]
    for _ in range(2):
        results = [layer(x) for layer in layers]
    assert kept._kept.replays == 3  # two of four, before any backward
    for layer, result in zip(layers, results, strict=True):
        gradients(layer, result)


def test_many_equal_layers():
    layers, shared = [Layer() for _ in range(200)], calls.RepeatedCalls(Layer.launched, draws=False)
    with torch.no_grad():
        for _ in range(2):
            for layer in layers:
                layer.calls = shared
                layer(x_of())
    assert kept._kept.replays == 200
