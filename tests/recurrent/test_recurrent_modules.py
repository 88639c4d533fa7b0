"""RNN, GRU and LSTM as PyTorch modules: tracing, transforms, copies, several processes."""

import copy
import inspect
import io
from functools import partial
from types import SimpleNamespace
from typing import get_overloads

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import ostinato
from ostinato.kernels.persistent import backends, cpu
from ostinato.kernels.persistent.plan import no_kernel
from private_names import PRIVATE_NAMES
from recurrent_layers import (
    CELLS,
    assert_gradients_close,
    assert_results_close,
    assert_uses_kernel,
    by,
    fit,
    forget_calls,
    gradients,
    inputs,
    make,
    pruned,
    twin,
    use_kernels,
)

F64 = torch.float64


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_the_constructor_is_the_one_that_torch_declares(kind):
    """Which it takes as ``*args, **kwargs``: what asks for a signature, such as ``skip_init``, finds none there."""
    ours, theirs = getattr(ostinato, kind), getattr(nn, kind)
    (_, *declared), *_ = (inspect.signature(each).parameters.values() for each in get_overloads(theirs.__init__))
    own = inspect.signature(ours).parameters.values()
    assert [(p.name, p.kind, p.default) for p in own] == [(p.name, p.kind, p.default) for p in declared]

    values = {"input_size": 5, "hidden_size": 8, "num_layers": 2, "nonlinearity": "relu", "bias": False}
    values |= {"batch_first": True, "dropout": 0.5, "bidirectional": True, "proj_size": 3}
    values |= {"device": "cpu", "dtype": F64}
    values = {p.name: values[p.name] for p in own}
    expected = theirs(**values)
    for layer in (ours(**values), ours(*values.values())):
        assert repr(layer) == repr(expected)
        assert [(p.shape, p.dtype) for p in layer.parameters()] == [(p.shape, F64) for p in expected.parameters()]
        assert layer.mode == expected.mode
    assert nn.utils.skip_init(ours, 5, 8).weight_hh_l0.shape == theirs(5, 8).weight_hh_l0.shape


@by("reference", "the CPU's")
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_a_first_call_may_be_checkpointed(cell, options):
    """Whose recomputation is prepared, and saves as many tensors."""
    layer = make(cell, 5, 8, **options)
    x = torch.randn(20, 2, 5, requires_grad=True)
    (found,) = torch.autograd.grad(checkpoint(lambda x: layer(x)[0], x, use_reentrant=False).sum(), x)
    (expected,) = torch.autograd.grad(layer(x)[0].sum(), x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@by("the CPU's")
@pytest.mark.parametrize("saved", [[], [torch.ops.ostinato.recurrent_layer.default]])
def test_selective_checkpoints_use_the_kernels(saved, monkeypatch):
    layer, x, passes = make("GRU", 5, 32, bidirectional=True), torch.randn(20, 2, 5), []
    expected, loops = gradients(layer, x), backends.kernels_on(x.device)
    run = loops.forward
    monkeypatch.setattr(loops, "forward", lambda *args: passes.append(args) or run(*args))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, hx):
            contexts = partial(create_selective_checkpoint_contexts, saved)
            return checkpoint(self.layer, x, hx, use_reentrant=False, context_fn=contexts)

    for ours, own in zip(gradients(Checkpointed(), x), expected, strict=True):
        torch.testing.assert_close(ours, own, rtol=0, atol=1e-6)
    assert len(passes) == (2 if saved else 4)


@by("the CPU's")
def test_a_layers_operations_are_counted_as_torchs():
    layer, (x, hx) = make("GRU", 5, 32, num_layers=2), inputs(make("GRU", 5, 32, num_layers=2), 2, 20)
    other = twin(layer)

    def counts(*call, backward=True):
        for module in (layer, other):
            with FlopCounterMode(display=False) as counter:
                counter.flop_registry.pop(torch.ops.ostinato.recurrent_layer, None)  # unknown at a process's first call
                result = module(*call)[0]
                if backward:
                    result.sum().backward()
            yield counter.get_total_flops()

    of_inputs, of_first_states = 2 * 20 * 2 * 3 * 32 * 5, 2 * 2 * 2 * 3 * 32 * 32
    of_others = 3 * 10 * of_first_states  # the second layer's inputs, and both's states
    both = of_inputs + of_others
    assert [*counts(x, backward=False)] == [both] * 2
    assert [*counts(x)] == [3 * both - of_inputs - of_first_states] * 2
    assert [*counts(x.requires_grad_(), hx.requires_grad_())] == [3 * both] * 2
    layer.requires_grad_(False), other.requires_grad_(False)
    assert [*counts(x, hx.detach())] == [2 * both - of_first_states] * 2


@by("the CPU's")
def test_tensors_of_a_class_of_their_own_use_the_kernels(monkeypatch):
    class Subclass(torch.Tensor):
        pass

    layer, x, calls = make("LSTM", 5, 32), torch.randn(20, 2, 5), []
    expected, run = layer(x), ostinato.LSTM._forward_kernels
    monkeypatch.setattr(ostinato.LSTM, "_forward_kernels", lambda *args: calls.append(args) or run(*args))
    output, states = layer(x.as_subclass(Subclass))
    assert len(calls) == 1
    assert {type(y) for y in (output, *states)} == {Subclass}
    assert torch.equal(output.as_subclass(torch.Tensor), expected[0])


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated, and warns of every branch
def test_graph_breaks_and_traces(fresh_compiler):
    layer = pruned("GRU", 5, 32)
    other, (x, _) = twin(layer), inputs(layer, 2)
    with torch.no_grad():
        expected = other(x)
        assert_results_close(torch.compile(layer, backend="eager")(x), expected, 1e-6)
        assert_results_close(torch.jit.trace(layer, (x,))(x), expected, 1e-6)


@by("as planned")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", [None, (1, 1), (16, 1)])
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_a_layer_that_was_never_called_is_traced(cell, block):
    layer = getattr(ostinato, cell)(5, 16, 2, bidirectional=True)
    if block is not None:
        ostinato.prune(layer, 0.3, block=block)
    traced, x = torch.jit.trace(layer, (torch.randn(5, 2, 5),)), torch.randn(9, 3, 5)
    assert_results_close(traced(x), layer(x), 1e-6)


@by("as planned")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_a_trace_from_a_state_passes_torchs_check_of_it(cell):
    layer = make(cell, 5, 8)
    traced, (x, hx) = torch.jit.trace(layer, inputs(layer, 3, 6)), inputs(layer, 2, 9)
    assert_results_close(traced(x, hx), layer(x, hx), 1e-6)


@by("as planned")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_trace_of_few_steps_inside_a_model_passes_torchs_check_of_it(steps):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.gru = nn.Linear(5, 5), ostinato.GRU(5, 8)

        def forward(self, x):
            return self.gru(self.linear(x))

    model, x = Model(), torch.randn(steps, 2, 5)
    assert_results_close(torch.jit.trace(model, (x,))(x), model(x), 1e-6)


@by("the CPU's")
def test_export():
    layer = pruned("LSTM", 5, 16, bidirectional=True)
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(layer, (inputs(layer, 3)[0],), dynamic_shapes=({0: auto, 1: auto},))
    nodes = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert sum("recurrent_layer" in str(node.target) for node in nodes) == 2
    x = torch.randn(9, 2, 5)
    assert_results_close(exported.module()(x), layer(x), 1e-6)


@by("the CPU's")
@pytest.mark.parametrize("strict", [False, True])
def test_an_lstm_exported_without_gradients_refuses_them(strict, fresh_compiler):
    """Whose backward would read beyond the end of what is not kept."""
    layer, x = make("LSTM", 5, 8, bidirectional=True), torch.randn(20, 2, 5)
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        exported = torch.export.export(layer, (x,), strict=strict).module()
    assert_results_close(exported(x), layer(x), 1e-6)
    with pytest.raises(RuntimeError, match="export it with gradients enabled"):
        exported(x)[0].sum().backward()


@by("the CPU's")
def test_gradients_that_could_be_differentiated_use_the_kernels(monkeypatch):
    layer, x, passes = make("GRU", 5, 32, dtype=F64), torch.randn(3, 20, 1, 5, dtype=F64), []
    loops = backends.kernels_on(x.device)
    run = loops.backward
    monkeypatch.setattr(loops, "backward", lambda *args: passes.append(args) or run(*args))
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(weights, x):
        return functional_call(layer, weights, (x,))[0].square().sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    assert len(passes) == 3
    parameters = list(layer.parameters())
    total = torch.autograd.grad(sum(layer(one)[0].square().sum() for one in x), parameters, create_graph=True)
    assert len(passes) == 6
    for ours, own in zip(each.values(), total, strict=True):
        torch.testing.assert_close(ours.sum(0), own, rtol=1e-11, atol=1e-11)


def test_functional_call_and_function_transforms():
    torch.manual_seed(0)
    layer = ostinato.LSTM(5, 8, 2, bidirectional=True, dtype=torch.float64)
    other = twin(layer)
    x = torch.randn(2, 4, 3, 5, dtype=torch.float64)

    def loss(module):
        return lambda weights, x: functional_call(module, weights, (x,))[0].square().sum()

    weights = {name: 1.5 * parameter.detach() for name, parameter in layer.named_parameters()}
    ours = torch.vmap(torch.func.grad(loss(layer)), (None, 0))(weights, x)
    for name, theirs in torch.func.grad(loss(other))(weights, x[1]).items():
        torch.testing.assert_close(ours[name][1], theirs, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(torch.vmap(lambda x: layer(x)[0])(x)[1], other(x[1])[0], rtol=0, atol=1e-13)
    row = x[0].clone().requires_grad_()
    jacobians = [
        torch.autograd.functional.jacobian(lambda x, module=module: module(x)[1][0].sum(1), row, vectorize=vectorize)
        for module, vectorize in ((layer, True), (other, False))
    ]
    torch.testing.assert_close(*jacobians, rtol=1e-11, atol=1e-12)


@by("the CPU's")
def test_functionalised_layers_are_torchs():
    layer = make("GRU", 5, 8, 2)
    x = inputs(layer, 3)[0].requires_grad_()
    output, _ = torch.func.functionalize(layer)(x)
    expected, _ = twin(layer)(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (output, expected)))


@by("as planned")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("sizes", [(1, 3, 4), (6, 3, 4), (50, 32, 64)])
def test_vmap_of_layers_that_torchs_kernels_run(cell, sizes, bidirectional):
    """Torch's kernels have no rule for ``vmap``: whether there is one of ours depends on the sizes."""
    torch.manual_seed(0)
    steps, width, hidden = sizes
    layer, x = make(cell, width, hidden, bidirectional=bidirectional), torch.randn(3, steps, 2, width)
    weights = [{name: scale * p.detach() for name, p in layer.named_parameters()} for scale in (1.0, 0.5, 2.0)]
    many = {name: torch.stack([own[name] for own in weights]) for name in weights[0]}
    result = torch.vmap(lambda own, x: functional_call(layer, own, (x,)))(many, x)
    for k, own in enumerate(weights):
        assert_results_close(tree_map(lambda y, k=k: y[k], result), functional_call(layer, own, (x[k],)), 1e-5)

    def loss(own, x):
        return functional_call(layer, own, (x,))[0].square().sum()

    x = x[:, :, 0]
    gradients = torch.vmap(torch.func.grad(loss), (None, 0))(weights[0], x)  # of each sample
    for k, sample in enumerate(x):
        expected = torch.func.grad(loss)(weights[0], sample)
        torch.testing.assert_close({name: g[k] for name, g in gradients.items()}, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("cell", "kernels", "compiled"),  # compilers see operators alone, whichever kernels are in them
    [
        *((cell, name, False) for cell in CELLS for name in ("reference", "the CPU's")),
        *(("RNN", "the CPU's", True), ("GRU", "reference", True), ("LSTM", "the CPU's", True)),
    ],
    indirect=["kernels"],
)
def test_gradients_of_an_ensemble_are_those_of_its_members(cell, kernels, compiled, fresh_compiler):
    """Inside ``vmap`` no tensor tells that a gradient is taken outside of it, by autograd or ``torch.func.grad``."""
    torch.manual_seed(0)
    members = [make(cell, 3, 4, 2, dtype=torch.float64) for _ in range(3)]
    x = torch.randn(12, 2, 3, dtype=torch.float64)
    weights, _ = torch.func.stack_module_state(members)

    def loss(weights):
        return torch.vmap(lambda own: functional_call(members[0], own, (x,))[0])(weights).square().sum()

    with torch._dynamo.config.patch(allow_rnn=True):
        run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
        run(weights).backward()
    detached = {name: weight.detach() for name, weight in weights.items()}
    functional = torch.func.grad(loss)(detached)
    for k, member in enumerate(map(twin, members)):
        member(x)[0].square().sum().backward()
        for name, expected in member.named_parameters():
            torch.testing.assert_close(weights[name].grad[k], expected.grad, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(functional[name][k], expected.grad, rtol=1e-11, atol=1e-12)


@by("reference", "the CPU's")
@pytest.mark.parametrize("cell", CELLS)
def test_a_gradient_may_be_asked_for_after_its_transform_has_ended(cell):
    """As the function that ``vjp`` returns does, and ``jacrev`` with it; the layer's own weights are others'."""
    torch.manual_seed(0)
    layer = make(cell, 3, 4, 2, dtype=torch.float64)
    other = twin(layer)
    x = torch.randn(12, 2, 3, dtype=torch.float64)
    assert_uses_kernel(layer, 2)
    jacobian, expected = (torch.func.jacrev(lambda x, m=m: m(x)[0][-1].sum(0))(x) for m in (layer, other))
    torch.testing.assert_close(jacobian, expected, rtol=0, atol=1e-13)

    leaf = x.clone().requires_grad_()  # a penalty on the Jacobian, row by row
    rows = [torch.autograd.grad(y, leaf, create_graph=True)[0] for y in layer(leaf)[0][-1].sum(0)]
    weights = list(layer.parameters())
    got = torch.autograd.grad(jacobian.square().sum(), weights, materialize_grads=True)
    want = torch.autograd.grad(torch.stack(rows).square().sum(), weights, materialize_grads=True)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", [ostinato.RNN, ostinato.GRU, ostinato.LSTM, ostinato.MinGRU, ostinato.ParaLSTM])
def test_a_symbolic_trace_keeps_a_layer_as_one_node(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([kind(6, 8, batch_first=True), kind(8, 8, batch_first=True)])

        def forward(self, x):
            output, state = self.inner[0](x.relu())
            return self.inner[1](output[:, 1:], state)

    model, x = Model(), torch.randn(2, 9, 6)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["inner.0", "inner.1"]
    assert_results_close(traced(x), model(x), 0)


@pytest.mark.parametrize("kind", [ostinato.GRU, ostinato.LSTM, ostinato.MinGRU, ostinato.ParaLSTM])
def test_a_symbolic_trace_may_follow_the_state_or_resets_alone(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = kind(6, 8)
            self.register_buffer("x", torch.randn(9, 2, 6))

        def forward(self, h, resets):
            has_pair = isinstance(self.inner.initial_state(1), tuple)
            return self.inner(self.x, (h, h) if has_pair else h), self.inner(self.x, resets=resets)

    model, h, resets = Model(), torch.randn(1, 2, 8), torch.rand(9, 2) < 0.5
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["inner", "inner"]
    for ours, theirs in zip(traced(h, resets), model(h, resets), strict=True):
        assert_results_close(ours, theirs, 0)


@pytest.mark.parametrize("kind", [ostinato.GRU, ostinato.MinGRU])
def test_a_symbolic_trace_refuses_what_it_would_run_twice(kind):
    class Doubled(kind):
        def forward(self, x):
            return super().forward(2 * x)

    hooked = kind(6, 8)
    hooked.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    for model in (nn.Sequential(Doubled(6, 8)), nn.Sequential(hooked), kind(6, 8)):
        with pytest.raises(TypeError, match="is_leaf_module"):
            torch.fx.symbolic_trace(model)


def test_parametrized_weights():
    torch.manual_seed(0)
    layer = ostinato.GRU(5, 8, dtype=torch.float64)
    other = twin(layer)
    x, hx = inputs(layer, 3)
    for module in (layer, other):
        nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
        nn.utils.parametrizations.spectral_norm(module.eval(), "weight_ih_l0")
    other.load_state_dict(layer.state_dict())
    assert_gradients_close(layer, other, x, hx)


@pytest.mark.parametrize("kernel", [True, False])
def test_weights_put_in_the_parameters_place(kernel, monkeypatch):
    """As FSDP2 does, which leaves torch.nn's list of them behind."""
    if not kernel:
        monkeypatch.setattr(ostinato.GRU, "_plan_call", lambda *_: no_kernel("a test"))
    layer = ostinato.GRU(5, 8, 2, dtype=torch.float64)
    x, hx = inputs(layer, 3)
    for name in layer._flat_weights_names:
        layer._parameters[name] = nn.Parameter(1.5 * layer._parameters[name].detach())
    assert_gradients_close(layer, twin(layer), x, hx)
    assert_results_close(copy.deepcopy(layer)(x, hx), twin(layer)(x, hx), 1e-12)


def models():
    for make_dense in (False, True):
        torch.manual_seed(0)
        layer = ostinato.GRU(5, 8, 2, bidirectional=True)
        yield layer if make_dense else ostinato.prune(layer, 0.3, block=(8, 4))


def errors_of_training(by_torch):
    rank, errors = distributed.get_rank(), []
    with pytest.MonkeyPatch.context() as patch:
        forget_calls(patch)
        if by_torch:
            patch.setattr(ostinato.GRU, "_plan_call", lambda *_: no_kernel("a test"))
        else:
            use_kernels(patch, cpu)
        x = torch.randn(5, 6, 4, 5, generator=torch.Generator().manual_seed(1))
        mesh = init_device_mesh("cpu", (2,))
        for wrap in (nn.parallel.DistributedDataParallel, lambda layer: fully_shard(layer, mesh=mesh)):
            for single, shared in zip(models(), models(), strict=True):
                fit(single, x[:4])
                module = wrap(shared)
                fit(module, x[:4, :, 2 * rank : 2 * rank + 2])
                with torch.no_grad():
                    errors.append((module(x[4])[0] - single(x[4])[0]).abs().max().item())
    backends._plan_dense.cache_clear()
    return errors


@pytest.mark.parametrize("by_torch", [False, True])
def test_data_parallel_and_sharded_training_is_one_process_s(processes, by_torch):
    for found in processes.run(2, errors_of_training, by_torch):
        assert all(error < 1e-9 for error in found)


def test_copies_and_pickles_after_use():
    layer = pruned("LSTM", 5, 32)
    x, hx = inputs(layer, 2)
    with torch.no_grad():
        expected = layer(x, hx)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        for other in (copy.deepcopy(layer), copy.copy(layer), torch.load(file, weights_only=False)):
            assert_results_close(other(x, hx), expected, 0)
            assert_uses_kernel(other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_dynamic_quantisation_says_that_it_passes_over_a_layer():
    from torch.ao.quantization import quantize_dynamic

    model = nn.Sequential(nn.Linear(8, 8), pruned("GRU", 8, 16))
    message = r"leaves ostinato's GRU as it is; .* load them into a torch\.nn\.GRU first, with strict=False$"
    for spec in (None, {nn.Linear, ostinato.GRU}):
        with pytest.warns(UserWarning, match=message):
            quantised = quantize_dynamic(model, spec)
        assert type(quantised[0]) is torch.ao.nn.quantized.dynamic.Linear
        assert type(quantised[1]) is ostinato.GRU
    assert not hasattr(quantised[1], "qconfig")
    other = nn.GRU(8, 16)
    other.load_state_dict(model[1].state_dict(), strict=False)
    quantised, x = quantize_dynamic(nn.Sequential(other)), torch.randn(5, 3, 8)
    assert (quantised(x)[0] - model[1](x)[0]).abs().max() < 0.05


@by("as planned")
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "dropout": 0.5}, {"bidirectional": True, "batch_first": True}]
)
@pytest.mark.parametrize("cell", CELLS)
def test_derived_classes_may_have_private_names(cell, options):
    layer = make(cell, 5, 8, **options)

    class Derived(type(layer)):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            for name in PRIVATE_NAMES:
                setattr(self, name, 0.5)

        def freeze(self):
            raise AssertionError("a method of its own")

    layer = make(cell, 5, 8, where=SimpleNamespace(**{layer.__class__.__name__: Derived}), **options).eval()
    other = twin(layer)
    assert vars(layer)["_dropout"] == vars(layer)["_path"] == 0.5
    for length in (1, 2, 40):
        for packed in (False, True):
            x, hx = inputs(layer, 3, length, packed)
            with torch.no_grad():
                assert_results_close(layer(x, hx), other(x, hx), 1e-6)
            assert_results_close(layer(x, hx), other(x, hx), 1e-6)
            assert_gradients_close(layer, other, x, hx, tolerance=1e-5)
    x, hx = inputs(layer, 3, 40)
    begins = torch.rand(x.shape[:2]) < 0.1
    assert_results_close(layer(x, hx, resets=begins), type(layer).__base__.forward(layer, x, hx, resets=begins), 1e-6)
    layer.plan(3)
    ostinato.prune(layer, 0.5)
    assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-6)
    if not layer.bidirectional:
        layer.step(x[0], hx)
        stepper = ostinato.Stepper(layer, batch_size=3, frozen=True)
        assert_results_close((stepper(x[0]), stepper.state), layer.step(x[0]), 1e-6)
        assert_results_close((stepper(x[0]), ()), (layer.step(x[0], layer.step(x[0])[1])[0], ()), 1e-6)
