"""Stacked layers in a wavefront: several run concurrently, each one chunk of steps behind the layer below."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import ostinato
from comparisons import same_bits
from ostinato.kernels.cuda import streams
from ostinato.kernels.cuda.streams import in_wavefront
from ostinato.kernels.operators import several
from ostinato.kernels.persistent import backends, cpu, cuda, reference, stacks, wavefront
from ostinato.kernels.persistent.backends import layers_at_once
from ostinato.kernels.persistent.plan import Call, Plan, no_kernel
from ostinato.recurrent import sequences
from recurrent_layers import (
    CELLS,
    assert_gradients_close,
    assert_results_close,
    flat,
    gradients,
    inputs,
    leaves,
    make,
    twin,
)

LENGTH = 43  # so that no division into chunks is even
KERNELS = {"reference": reference, "the CPU's": cpu}


def as_of_gpu(module):
    """A module's kernels as a GPU's, which write a chunk of whole tensors."""

    def forward(layer, projected, plan, keep, into=None):
        output, h_n, c_n, c = module.forward(layer, projected, plan, keep)
        for whole, part in zip(into or (), (output, c), strict=False):
            if part is not None:
                whole.copy_(part)
        return output, h_n, c_n, c

    def backward(layer, saved, upstream, plan, into=None):
        grads, *states, totals = module.backward(layer, saved, upstream, plan)
        if into is not None:
            into[0].copy_(grads)
            into[1].copy_(totals.view(-1, *into[1].shape).sum(0))
        return grads, *states, totals

    plan = Plan("dense", reason="a test")
    own = {"forward": forward, "backward": backward, "make_plan": lambda *_: plan, "chunks": lambda *_: 3}
    return SimpleNamespace(**(vars(module) | own))


@pytest.fixture(params=[("reference", 3), ("the CPU's", 2)], ids=lambda x: f"{x[0]}-{x[1]}")
def at_once(request, monkeypatch, kernels):
    """How many layers run at once."""
    name, count = request.param
    together(monkeypatch, count)
    stand_in = as_of_gpu(KERNELS[name])
    monkeypatch.setattr(backends, "_kernels_on", lambda device_type: stand_in)
    return count


def together(monkeypatch, count):
    for module in (sequences, stacks):
        monkeypatch.setattr(module, "layers_at_once", lambda mask, call, layers: min(count, layers))
    backends._plan_dense.cache_clear()
    monkeypatch.setattr(sequences, "_CALLS", type(sequences._CALLS)())


def stack(cell, **options):
    torch.manual_seed(0)
    return make(cell, 5, 6, **({"num_layers": 3, "dtype": torch.float64} | options))


@pytest.mark.parametrize("options", [{}, {"bias": False, "batch_first": True}, {"num_layers": 2}, {"num_layers": 5}])
@pytest.mark.parametrize("cell", CELLS)
def test_equals_torch(cell, options, at_once):
    layer = stack(cell, **options)
    other = twin(layer)
    x, hx = inputs(layer, 4, LENGTH)
    for state in (hx, None):
        with torch.no_grad():
            assert_results_close(layer(x, state), other(x, state), 1e-12)
        assert_gradients_close(layer, other, x, state)


def test_the_plan_tells(at_once):
    assert stack("GRU").plan(4).at_once == at_once
    assert stack("GRU", num_layers=1).plan(4).at_once == 1


@pytest.mark.parametrize("others", [1, 2])
def test_torch_runs_all_layers_if_no_kernel_fits_the_last(others, at_once, monkeypatch):
    """Those beyond the last whole group: fewer at once."""
    kernels = backends.kernels_on(torch.device("cpu"))
    plan = kernels.make_plan()
    monkeypatch.setattr(kernels, "make_plan", lambda call, *_: no_kernel("a test") if call.at_once == others else plan)
    monkeypatch.setattr(kernels, "forward", None)
    together(monkeypatch, 3)
    layer = stack("GRU", num_layers=3 + others)
    assert layer.plan(4).reason == "a test"
    x, hx = inputs(layer, 4, LENGTH)
    assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-12)
    assert stack("GRU", num_layers=3).plan(4).at_once == 3


def test_unbatched_and_a_batch_of_one(at_once):
    layer = stack("LSTM")
    for batch in (None, 1):
        x, hx = inputs(layer, batch, LENGTH)
        assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-12)
        assert_gradients_close(layer, twin(layer), x, hx)


@pytest.mark.parametrize("cell", CELLS)
def test_resets_equal_layer_after_layer(cell, at_once, monkeypatch):
    layer = stack(cell)
    x, hx = inputs(layer, 4, LENGTH)
    resets = torch.rand(LENGTH, 4, generator=torch.Generator().manual_seed(3)) < 0.2

    def found():
        wanted = [t.requires_grad_() for t in leaves(layer, x, hx)]
        results = flat(layer(x, hx, resets=resets))
        return *results, *torch.autograd.grad(sum((y**2).sum() for y in results), wanted)

    ours = found()
    together(monkeypatch, 1)
    torch.testing.assert_close(ours, found(), rtol=1e-11, atol=1e-11)


def test_dropout_is_that_of_layer_after_layer(at_once, monkeypatch):
    layer = stack("GRU", dropout=0.4)
    x, hx = inputs(layer, 4, LENGTH)

    def found():
        torch.manual_seed(5)
        return gradients(layer, x, hx)

    ours = found()
    together(monkeypatch, 1)
    torch.testing.assert_close(ours, found(), rtol=1e-11, atol=1e-11)
    assert torch.equal(layer.eval()(x, hx)[0], layer(x, hx)[0])


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(2, 3)])
def test_gradients_of_some_results(which, at_once):
    layer = stack("LSTM")
    assert_gradients_close(layer, twin(layer), *inputs(layer, 4, LENGTH), which=which)


def test_gradients_of_a_lower_layers_state_alone(at_once):
    layer, other = stack("GRU"), twin(stack("GRU"))
    x, _ = inputs(layer, 4, LENGTH)
    for module in (layer, other):
        module(x)[1][0].square().sum().backward()
    for ours, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        expected = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(torch.zeros_like(ours) if ours.grad is None else ours.grad, expected)


@pytest.mark.parametrize("frozen", [("l0",), ("l0", "l1"), ("l2",), ("l1",)])
def test_frozen_layers(frozen, at_once):
    layer = stack("LSTM")
    other = twin(layer)
    for module in (layer, other):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.endswith(frozen))
    x, _ = inputs(layer, 4, LENGTH)
    for module in (layer, other):
        module(x)[0].square().sum().backward()
    for (name, ours), theirs in zip(layer.named_parameters(), other.parameters(), strict=True):
        assert (ours.grad is None) == name.endswith(frozen)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_second_derivatives(dropout, at_once, monkeypatch):
    layer = stack("GRU", dropout=dropout)
    x, hx = inputs(layer, 2, 19)
    wanted = [t.requires_grad_() for t in leaves(layer, x, hx)]

    def found():
        torch.manual_seed(5)
        first = torch.autograd.grad(layer(x, hx)[0].square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    ours = found()
    together(monkeypatch, 1)
    torch.testing.assert_close(ours, found(), rtol=1e-9, atol=1e-9)


def test_transforms_and_several_calls_before_a_backward(at_once):
    layer = stack("GRU")
    other = twin(layer)
    x, hx = inputs(layer, 4, LENGTH)
    xs = torch.stack([x, x + 1])
    expected = torch.stack([other(x)[0], other(x + 1)[0]])
    torch.testing.assert_close(torch.vmap(lambda x: layer(x)[0])(xs), expected, rtol=1e-11, atol=1e-11)
    total = layer(x, hx)[0].sum() + layer(x + 1, hx)[0].square().sum()
    total.backward(retain_graph=True)
    once = [p.grad.clone() for p in layer.parameters()]
    total.backward()
    for p, grad in zip(layer.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 2 * grad)


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("at_once", [("reference", 2)], indirect=True)
def test_compiled_autograd_takes_several_layers_in_one_graph(options, at_once, fresh_compiler):
    layer = stack("GRU", **options)
    x, hx = inputs(layer, 2, 20)
    wanted = list(layer.parameters())
    loss = layer(x, hx)[0].square().sum()
    expected = torch.autograd.grad(loss, wanted, retain_graph=True)
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        loss.backward()
    torch.testing.assert_close([w.grad for w in wanted], list(expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("at_once", [("the CPU's", 2)], indirect=True)
@pytest.mark.parametrize(
    ("cell", "options"),
    [
        *(("GRU", {}), ("LSTM", {"bias": False}), ("RNN", {"dropout": 1.0})),
        ("LSTM", {"bidirectional": True, "batch_first": True}),
    ],
)
def test_compiled_stacks_are_one_operator_when_trained(cell, options, at_once, monkeypatch, fresh_compiler):
    """Which decides when it runs how many layers run at once; both directions are one without gradients, too."""
    monkeypatch.setattr(sequences, "WAVEFRONT_DEVICES", ("cpu",))
    layer, operators = stack(cell, **options), []

    def backend(graph, given):
        operators.append([str(node.target) for node in graph.graph.nodes if "ostinato" in str(node.target)])
        return torch._dynamo.lookup_backend("aot_eager")(graph, given)

    compiled, other = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend), twin(layer)
    for batch, length in ((4, LENGTH), (3, 24)):
        x, hx = inputs(layer, batch, length)
        with torch._dynamo.config.patch(allow_rnn=True):
            if not layer.dropout:
                with torch.no_grad():
                    assert_results_close(compiled(x, hx), other(x, hx), 1e-12)
            for ours, expected in zip(gradients(compiled, x, hx), gradients(other, x, hx), strict=True):
                torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)
    trained = ("recurrent_layers", layer.num_layers) if layer.bidirectional else ("stacked_layers", 1)
    others = trained if layer.bidirectional else ("recurrent_layer", layer.num_layers)
    allowed = [[f"ostinato.{name}.default"] * count for name, count in (trained, others)]
    assert allowed[0] in operators
    assert all(found in allowed for found in operators)


@pytest.mark.parametrize("at_once", [("the CPU's", 2)], indirect=True)
def test_compiled_layers_run_one_by_one_where_no_kernel_fits_them_at_once(at_once, monkeypatch, fresh_compiler):
    kernels = backends.kernels_on(torch.device("cpu"))
    plan = kernels.make_plan()
    monkeypatch.setattr(kernels, "make_plan", lambda call, *_: no_kernel("a test") if call.at_once == 2 else plan)
    monkeypatch.setattr(kernels, "chunks", None)
    monkeypatch.setattr(sequences, "WAVEFRONT_DEVICES", ("cpu",))
    layer = stack("GRU")
    compiled, other = torch.compile(layer, fullgraph=True, backend="aot_eager"), twin(layer)
    x, hx = inputs(layer, 4, LENGTH)
    with torch._dynamo.config.patch(allow_rnn=True):
        for ours, expected in zip(gradients(compiled, x, hx), gradients(other, x, hx), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("at_once", [("the CPU's", 2)], indirect=True)
def test_operators_of_several_layers_are_well_formed(at_once):
    torch.manual_seed(0)
    shapes = (4 * LENGTH, 6), (24, 6), (24, 6)
    x, *weights = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    rest = None, None, None, None, None, 4, "lstm", False, True, None, 3
    calls = [(first, None, None, *weights, *rest) for first in (x, None, None)]
    torch.library.opcheck(torch.ops.ostinato.stacked_layers, several._flattened(calls))
    of_rnn = [weight[:6].detach().requires_grad_() for weight in weights]  # which keeps neither c nor gates
    for cell, own in (("lstm", weights), ("rnn_tanh", of_rnn)):
        both = [(x, None, None, *own, *rest[:-5], cell, reverse, True, None, 2) for reverse in (False, True)]
        torch.library.opcheck(torch.ops.ostinato.recurrent_layers, several._flattened(both))


def test_compiled_samples_of_both_directions(fresh_compiler):
    layer = stack("GRU", num_layers=1, bidirectional=True)
    x = torch.randn(3, 7, 2, 5, dtype=torch.float64)
    with torch._dynamo.config.patch(allow_rnn=True):
        every = torch.compile(torch.vmap(lambda one: layer(one)[0]), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(every, torch.stack([layer(one)[0] for one in x]))


ONE_OPERATOR = [{"num_layers": 1, "bidirectional": True}, {"num_layers": 3}]


@pytest.mark.parametrize("options", ONE_OPERATOR)
@pytest.mark.parametrize("at_once", [("reference", 2)], indirect=True)
def test_compiled_tangents(options, at_once, monkeypatch, fresh_compiler):
    monkeypatch.setattr(sequences, "WAVEFRONT_DEVICES", ("cpu",))
    layer, x = stack("GRU", **options), torch.randn(LENGTH, 2, 5, dtype=torch.float64)

    def pushed(x, tangent):
        return torch.func.jvp(lambda x: layer(x)[0], (x,), (tangent,))

    with torch._dynamo.config.patch(allow_rnn=True):
        found = torch.compile(pushed, backend="eager")(x, x.cos())
    torch.testing.assert_close(found, pushed(x, x.cos()), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", ONE_OPERATOR)
@pytest.mark.parametrize("at_once", [("reference", 2)], indirect=True)
def test_compiled_derivatives_of_gradients_and_jacobians(options, at_once, monkeypatch, fresh_compiler):
    """Where the backend leaves gradients to autograd."""
    monkeypatch.setattr(sequences, "WAVEFRONT_DEVICES", ("cpu",))
    layer = stack("LSTM", **options)
    x, hx = inputs(layer, 2, 19)
    wanted = [t.requires_grad_() for t in leaves(layer, x, hx)]

    def found(module):
        output = module(x, hx)[0].square().sum((0, 1))
        rows = torch.autograd.grad(output, wanted, torch.eye(len(output)).double(), True, is_grads_batched=True)
        first = torch.autograd.grad(output.sum(), wanted, create_graph=True)
        return rows, torch.autograd.grad(sum(g.square().sum() for g in first), wanted)

    with torch._dynamo.config.patch(allow_rnn=True):
        ours = found(torch.compile(layer, fullgraph=True, backend="eager"))
    torch.testing.assert_close(ours, found(layer), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("at_once", [("the CPU's", 2)], indirect=True)
@pytest.mark.parametrize("options", [{"num_layers": 1}, *ONE_OPERATOR])
def test_gradients_lie_in_memory_as_compilers_are_told(options, at_once, monkeypatch, fresh_compiler):
    """Contiguous, also of inputs that are not, and of states in memory that loops pad."""
    monkeypatch.setattr(sequences, "WAVEFRONT_DEVICES", ("cpu",))
    layer, strides = stack("GRU", **options), []
    x, hx = inputs(layer, 2, LENGTH)
    x, hx = x.flatten(0, 1).T.contiguous().T.unflatten(0, (LENGTH, 2)), hx.mT.contiguous().mT

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            results = function(*args, **(kwargs or {}))
            if function._schema.name.endswith("_backward") and function.namespace == "ostinato":
                with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    fake = function(*tree_map_only(torch.Tensor, mode.from_tensor, args))
                strides.extend((y.stride(), z.stride()) for y, z in zip(results, fake, strict=True))
            return results

    with torch._dynamo.config.patch(allow_rnn=True):
        output, _ = torch.compile(layer, fullgraph=True, backend="eager")(x.requires_grad_(), hx.requires_grad_())
    with Watch():
        output.sum().backward()
    assert len(strides) >= 5
    assert all(ours == told for ours, told in strides)


def test_pruned_layers(at_once):
    layer = ostinato.prune(make("LSTM", 16, 32, num_layers=3, dtype=torch.float64), 0.3, block=(1, 1))
    x, hx = inputs(layer, 4, LENGTH)
    assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-12)
    assert_gradients_close(layer, twin(layer), x, hx)


def test_packed_sequences_and_both_directions_are_not_divided(at_once):
    layer, both = stack("GRU"), stack("GRU", bidirectional=True)
    assert_results_close(layer(*inputs(layer, 6, packed=True)), twin(layer)(*inputs(layer, 6, packed=True)), 1e-12)
    x, hx = inputs(layer, 6, LENGTH)
    x = pack_padded_sequence(x, [LENGTH] * 6)  # which is divided, as it has the same rows as the padded one
    assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-12)
    assert_results_close(both(*inputs(both, 6)), twin(both)(*inputs(both, 6)), 1e-12)
    assert both.plan(4).at_once == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("hidden", "batch", "steps", "layers", "count"),
    [(64, 3, 50, 2, 2), (37, 5, 61, 3, 3), (256, 16, 100, 3, 2), (512, 1, 80, 4, 4), (1024, 9, 33, 2, 2)],
)
@pytest.mark.parametrize("cell", CELLS)
def test_on_a_gpu(cell, hidden, batch, steps, layers, count, dtype, monkeypatch, nan_memory):
    """As exact as layer after layer, with dropout and resets, too; the same bits twice, and in a CUDA graph."""
    monkeypatch.setattr(cuda, "chunks", lambda *_: 3)
    for times in ("ROWS_LAUNCHED", "ADDED_LAUNCHED"):  # products by the same kernels in a graph and outside
        monkeypatch.setattr(cuda.small, times, 1)
    torch.manual_seed(0)
    layer = make(cell, 24, hidden, num_layers=layers, dropout=0.3, device="cuda", dtype=dtype)
    x, hx = inputs(layer, batch, steps, device="cuda")
    resets = torch.rand(steps, batch, device="cuda") < 0.05
    wanted = [t.requires_grad_() for t in leaves(layer, x, hx)]

    def found(module, wanted, x, hx, **options):
        results = flat(module(x, hx, **options))
        grads = torch.autograd.grad(sum(y.square().sum() for y in results), wanted)
        return [y.detach() for y in (*results, *grads)]

    def all_found():
        layer.train()
        torch.manual_seed(5)
        dropped = found(layer, wanted, x, hx, resets=resets)
        layer.eval()
        return [*found(layer, wanted, x, hx), *dropped]

    other = twin(layer).double()
    other.dropout = 0.0  # cuDNN has gradients in training alone
    x64, *h64 = (t.detach().double() for t in (x, *(hx if isinstance(hx, tuple) else [hx])))
    h64 = tuple(h64) if isinstance(hx, tuple) else h64[0]
    right = found(other, [t.requires_grad_() for t in leaves(other, x64, h64)], x64, h64)
    together(monkeypatch, 1)
    one_by_one = all_found()
    together(monkeypatch, count)
    assert layer.plan(batch, training=True).at_once == count
    ours = all_found()
    for mine, theirs, exact in zip(ours, one_by_one, right, strict=False):
        assert (mine - exact).norm() <= 1.5 * (theirs - exact).norm() + 1e-6 * exact.norm()
    for mine, theirs in zip(ours[len(right) :], one_by_one[len(right) :], strict=True):
        assert (mine - theirs).norm() <= (1e-4 if dtype == torch.float32 else 0.05) * theirs.norm()
    assert same_bits(ours, all_found())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = found(layer, wanted, x, hx)
    graph.replay()
    assert same_bits(ours[: len(right)], captured)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(1, 1), (16, 1)])
def test_pruned_layers_on_a_gpu(block, monkeypatch, nan_memory):
    monkeypatch.setattr(cuda, "chunks", lambda *_: 3)
    torch.manual_seed(0)
    layer = make("LSTM", 64, 640, num_layers=3, device="cuda", dtype=torch.float16)
    ostinato.prune(layer, 0.1, block=block)
    x, hx = inputs(layer, 4, 50, device="cuda")
    other = twin(layer).double()
    want = flat(other(x.double(), tuple(h.double() for h in hx)))
    together(monkeypatch, 2)
    with torch.no_grad():
        for ours, right in zip(flat(layer(x, hx)), want, strict=True):
            assert (ours - right).norm() <= 2e-3 * right.norm()
    assert_gradients_close(layer.float(), other.float(), x.float(), tuple(h.float() for h in hx), tolerance=2e-3)


@pytest.mark.gpu
def test_under_autocast(monkeypatch):
    torch.manual_seed(0)
    layer = make("LSTM", 64, 128, num_layers=3, device="cuda")
    x, hx = inputs(layer, 8, 100, device="cuda")
    found = []
    for count in (1, 3):
        together(monkeypatch, count)
        with torch.autocast("cuda", torch.bfloat16):
            found.append(gradients(layer, x, hx))
    for one_by_one, at_once in zip(*found, strict=True):
        assert at_once.dtype == torch.float32
        assert (one_by_one - at_once).norm() <= 0.02 * one_by_one.norm()


@pytest.mark.gpu
def test_more_layers_at_once_in_a_cuda_graph():
    """Whose launches take the host no time: kernels that have not run before are compiled while it is captured."""
    layer = make("GRU", 96, 96, num_layers=3, device="cuda", dtype=torch.float16)
    x, _ = inputs(layer, 1, 200, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        eager = layer(x)
        with torch.cuda.graph(graph):
            call = Call(x.device, "gru", 96, 1, x.dtype, False, 200, captured=True)
            assert layer.plan(1, steps=200).at_once == layers_at_once(None, call, 3) == 3
            captured = layer(x)
    assert layer.plan(1, steps=200).at_once == 1
    graph.replay()
    assert_results_close(captured, eager, 2e-3)


@pytest.mark.gpu
def test_kernels_of_another_stream_still_read(monkeypatch):
    """What is freed between two calls on different streams is not overwritten by the second."""
    monkeypatch.setattr(cuda, "chunks", lambda *_: 3)
    together(monkeypatch, 2)
    layer = make("GRU", 64, 64, num_layers=2, device="cuda", dtype=torch.bfloat16)
    xs = torch.randn(6, 200, 8, 64, device="cuda", dtype=torch.bfloat16)
    expected = [layer(x)[0].detach() for x in xs]
    torch.cuda.synchronize()
    currents, results = [torch.cuda.Stream() for _ in range(2)], []
    for i in range(24):
        with torch.cuda.stream(currents[i % 2]):
            results.append(layer(xs[i % 6])[0].detach().clone())
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected[i % 6]) for i, result in enumerate(results))


@pytest.mark.gpu
def test_what_the_current_stream_reads_is_not_overwritten(monkeypatch):
    """By what another thread with the same current stream, and so with the same others, computes."""
    monkeypatch.setattr(cuda, "chunks", lambda *_: 3)
    together(monkeypatch, 2)
    layer = make("GRU", 64, 64, num_layers=2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(200, 8, 64, device="cuda", dtype=torch.bfloat16)

    def then_wait(device, *args):
        in_wavefront(device, *args)
        torch.cuda._sleep(500_000_000)  # cycles, before the states are read

    with torch.no_grad():
        _, expected = layer(x)
        torch.cuda.synchronize()
        monkeypatch.setattr(wavefront, "in_wavefront", then_wait)
        _, found = layer(x)
        current = torch.cuda.current_stream()
        (other,), _ = streams._streams_beside(current.device, current.cuda_stream, 2)
        with torch.cuda.stream(other):
            overwriting = [torch.full_like(expected[0], torch.nan) for _ in range(4000)]
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
    assert overwriting[-1].isnan().all()


@pytest.mark.parametrize(("chains", "links"), [(1, 1), (2, 1), (1, 3), (2, 5), (4, 3)])
def test_waves_keep_the_order_of_chains_and_links(chains, links):
    ran = []

    def run(chain, link):
        assert link == 0 or (chain, link - 1) in ran
        assert chain == 0 or (chain - 1, link) in ran
        assert (chain - 1, link + 1) not in ran  # a stream is waited for as it is then
        ran.append((chain, link))

        return ()

    in_wavefront(torch.device("cpu"), chains, links, run)
    assert len(ran) == len(set(ran)) == chains * links


def test_what_leaves_a_chain_is_kept_for_the_current_stream(monkeypatch):
    current, sides, events = Mock(), [Mock(), Mock()], [Mock(), Mock(), Mock()]
    monkeypatch.setattr(streams, "_streams_beside", lambda *_: (sides, events))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "set_stream", Mock())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = {(chain, link): Mock() for chain in range(3) for link in range(2)}
    in_wavefront(torch.device("cuda", 0), 3, 2, lambda *at: (made[at], None))
    for (chain, _), x in made.items():
        assert x.record_stream.mock_calls == ([call(current)] if chain else [])
    assert torch.cuda.set_stream.mock_calls[-1] == call(current)
