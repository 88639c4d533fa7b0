"""RNN, GRU and LSTM are torch.nn's, whoever computes the forward.

Pruned layers are compared with torch.nn's holding the same weights, zeros included: ``twin``.
"""

import copy
import io
import itertools
import multiprocessing
import os
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import ostinato
from ostinato.kernels.persistent import cpu, operators, reference
from ostinato.kernels.persistent.plan import Plan, no_kernel
from ostinato.masks import masked

CELLS = {"RNN": {}, "relu": {"nonlinearity": "relu"}, "GRU": {}, "LSTM": {}}
BLOCKS = [(1, 1), (16, 1), (8, 4)]


@pytest.fixture(autouse=True, params=["reference"])
def kernels(request, monkeypatch):
    """Who computes what a kernel fits: the loop over time that defines it, or the CPU's loops, whatever they plan."""
    if request.param != "as planned" and not request.node.get_closest_marker("gpu"):
        use_kernels(monkeypatch, {"reference": reference, "the CPU's": cpu}[request.param])
    yield
    operators._plan_dense.cache_clear()


def use_kernels(monkeypatch, module):
    def make_plan(call, mask_hh, block, *_):
        if module is cpu and call.dtype not in (torch.float32, torch.float64):
            return no_kernel("another dtype")
        path = "dense" if block is None or mask_hh.all() else "sparse" if block == (1, 1) else "block"
        return Plan(path, 1, 1, 1, "a test", block)

    stand_in = SimpleNamespace(**(vars(module) | {"make_plan": make_plan}))
    monkeypatch.setattr(operators, "kernels_on", lambda device: stand_in)
    operators._plan_dense.cache_clear()


@pytest.fixture
def fresh_compiler():
    """PyTorch's gives up on code that it has compiled too often, by whatever test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def by(*which):
    return pytest.mark.parametrize("kernels", which, indirect=True)


def make(cell, *args, where=ostinato, **options):
    return getattr(where, "RNN" if cell == "relu" else cell)(*args, **CELLS[cell], **options)


def pruned(cell, *args, density=0.06, block=(16, 1), keep_diagonal=False, **options):
    layer = make(cell, *args, **options)
    return ostinato.prune(layer, density, block=block, keep_diagonal=keep_diagonal)


def twin(layer):
    """The layer of torch.nn with the same weights."""
    base = next(base for base in type(layer).__mro__ if base in (nn.RNN, nn.GRU, nn.LSTM))
    options = {"nonlinearity": layer.nonlinearity} if base is nn.RNN else {}
    other = base(
        layer.input_size,
        layer.hidden_size,
        layer.num_layers,
        bias=layer.bias,
        batch_first=layer.batch_first,
        dropout=layer.dropout,
        bidirectional=layer.bidirectional,
        device=layer.weight_hh_l0.device,
        dtype=layer.weight_hh_l0.dtype,
        **options,
    )
    other.load_state_dict(layer.state_dict(), strict=False)
    return other.train(layer.training)


def flat(result):
    """All tensors of ``output, hidden``."""
    output, hidden = result
    output = output.data if isinstance(output, torch.nn.utils.rnn.PackedSequence) else output
    return [output, *([hidden] if isinstance(hidden, torch.Tensor) else hidden)]


def assert_same(result, expected, tolerance):
    for ours, theirs in zip(flat(result), flat(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, equal_nan=True)


def assert_close_to_exact(result, expected, tolerance):
    """To float64 results."""
    for ours, exact in zip(flat(result), flat(expected), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=tolerance)


def assert_uses_kernel(layer, batch=1, dtype=None):
    assert layer.plan(batch, dtype).path in ("sparse", "block", "dense")


def inputs(layer, batch, length=12, packed=False, device="cpu"):
    """An input and initial state; batch None is unbatched."""
    generator = torch.Generator().manual_seed(1)
    dtype = layer.weight_hh_l0.dtype
    steps = (length,) if batch is None else (batch, length) if layer.batch_first else (length, batch)
    x = torch.randn(*steps, layer.input_size, generator=generator, dtype=torch.float64).to(device, dtype)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    shape = (count, *(() if batch is None else (batch,)), layer.hidden_size)
    states = torch.rand(2, *shape, generator=generator, dtype=torch.float64).to(device, dtype) * 2 - 1
    if packed:
        lengths = torch.arange(batch) * 7 % length + 1
        x = pack_padded_sequence(x, lengths, batch_first=layer.batch_first, enforce_sorted=False)
    return x, tuple(states) if isinstance(layer, nn.LSTM) else states[0]


OPTIONS = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bias": False, "batch_first": True},
    {"bidirectional": True, "batch_first": True},
]
SHAPES = [(1, False), (3, False), (9, False), (None, False), (4, True), (10, True)]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("block", "keep_diagonal"), [*((b, False) for b in BLOCKS), ((16, 1), True), ((1, 1), True)])
def test_pruned_is_torch_with_zeros(cell, block, keep_diagonal):
    torch.manual_seed(0)
    for options in OPTIONS:
        layer = pruned(cell, 5, 37, block=block, keep_diagonal=keep_diagonal, dtype=torch.float64, **options)
        if cell == "LSTM" and block == (1, 1):
            ostinato.prune(layer, 0.03, keep_diagonal=keep_diagonal)
        assert_uses_kernel(layer)
        other = twin(layer)
        for (batch, packed), with_state in itertools.product(SHAPES, (False, True)):
            x, hx = inputs(layer, batch, packed=packed)
            with torch.no_grad():
                ours, theirs = [module(x, hx) if with_state else module(x) for module in (layer, other)]
            assert_same(ours, theirs, 1e-13)
            assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(flat(ours), flat(theirs), strict=True))


@pytest.mark.parametrize("cell", CELLS)
def test_dense_is_torch(cell):
    torch.manual_seed(0)
    for options in OPTIONS:
        other = make(cell, 5, 11, where=nn, **options)
        layer = make(cell, 5, 11, **options)
        assert layer.load_state_dict(other.state_dict()) == other.load_state_dict(layer.state_dict())
        for (batch, packed), grad in itertools.product(SHAPES, (False, True)):
            x, hx = inputs(layer, batch, packed=packed)
            with torch.set_grad_enabled(grad):
                assert_same(layer(x, hx), other(x, hx), 1e-6)


@by("reference", "the CPU's")
@pytest.mark.parametrize("cell", CELLS)
def test_error_against_float64_is_no_larger_than_torchs(cell):
    torch.manual_seed(0)
    layer = pruned(cell, 16, 96, density=0.07)
    other, exact = twin(layer), twin(layer.double())
    layer.float()
    assert_uses_kernel(layer)
    x = torch.randn(2000, 2, 16)
    with torch.no_grad():
        error, torchs = [(module(x)[0] - exact(x.double())[0]).abs().max() for module in (layer, other)]
    assert error <= 1.5 * torchs


@pytest.mark.parametrize("cell", CELLS)
def test_dropout_between_layers(cell):
    layer = pruned(cell, 5, 24, num_layers=3, dropout=0.4, bidirectional=True)
    other, (x, _) = twin(layer), inputs(layer, 3)
    for training in (True, False):
        results = []
        for module in (layer, other):
            torch.manual_seed(3)
            with torch.no_grad():
                results.append(module.train(training)(x))
        assert_same(*results, 1e-6)
    assert layer.dropout == 0.4


def leaves(layer, x, hx):
    """What has a gradient: input, states and parameters."""
    states = [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
    return [x.data if isinstance(x, PackedSequence) else x, *states, *layer.parameters()]


def gradients(layer, x, hx=None, which=slice(None)):
    """Of a random sum of a call's results, or of some of them: of input, states and parameters."""
    generator = torch.Generator().manual_seed(2)
    inputs = leaves(layer, x, hx)
    for tensor in inputs:
        tensor.requires_grad_()
        tensor.grad = None
    results = flat(layer(x, hx))[which]
    factors = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in results]
    sum((y * factor).sum() for y, factor in zip(results, factors, strict=True)).backward()
    return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs]


def assert_same_gradients(layer, other, *call, tolerance=1e-11, **options):
    """Those of torch, and zero where a weight is pruned."""
    pairs = list(zip(gradients(layer, *call, **options), gradients(other, *call, **options), strict=True))
    names = [name for name, _ in layer.named_parameters()]
    masks = [None] * (len(pairs) - len(names)) + [layer._buffers.get(name.replace("weight", "mask")) for name in names]
    for (ours, theirs), mask in zip(pairs, masks, strict=True):
        expected = theirs if mask is None else theirs.masked_fill(~mask, 0)
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
        assert mask is None or not ours[~mask].any()


@by("reference", "the CPU's")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("block", [None, (16, 1), (1, 1)])
@pytest.mark.parametrize("cell", CELLS)
def test_every_gradient_is_torchs(cell, block, options):
    torch.manual_seed(0)
    layer = make(cell, 5, 20, dtype=torch.float64, **options)
    if block:
        ostinato.prune(layer, 0.06, block=block)
    other = twin(layer)
    for (batch, packed), with_state in itertools.product(SHAPES, (False, True)):
        x, hx = inputs(layer, batch, length=7, packed=packed)
        assert_same_gradients(layer, other, x, hx if with_state else None)


@pytest.mark.parametrize("which", range(3))
def test_gradients_through_one_result(which):
    torch.manual_seed(0)
    layer = ostinato.LSTM(5, 8, 2, bidirectional=True, dtype=torch.float64)
    x, hx = inputs(layer, 4, packed=True)
    assert_same_gradients(layer, twin(layer), x, hx, which=slice(which, which + 1))


@settings(deadline=None, max_examples=40)
@given(
    cell=st.sampled_from(list(CELLS)),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    size=st.integers(1, 4),
    hidden=st.integers(1, 6),
    layers=st.integers(1, 3),
    bias=st.booleans(),
    bidirectional=st.booleans(),
    packed=st.booleans(),
)
def test_gradients_of_any_shape(cell, lengths, size, hidden, layers, bias, bidirectional, packed):
    torch.manual_seed(0)
    options = {"num_layers": layers, "bias": bias, "bidirectional": bidirectional, "dtype": torch.float64}
    layer = make(cell, size, hidden, **options)
    x, hx = inputs(layer, len(lengths), length=max(lengths))
    if packed:
        x = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    assert_same_gradients(layer, twin(layer), x, hx)


@pytest.mark.parametrize("trained", ["weight_ih_l0", "weight_hh_l0_reverse", "bias_ih_l1", "bias_hh_l1_reverse", ""])
def test_only_what_is_not_frozen_has_a_gradient(trained):
    torch.manual_seed(0)
    layer = ostinato.GRU(5, 8, 2, bidirectional=True, dtype=torch.float64)
    other = twin(layer)
    for module in (layer, other):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name == trained)
        x, _ = inputs(layer, 3)
        output = module(x.requires_grad_(not trained))[0]
        output.square().sum().backward()
    for (name, ours), theirs in zip(layer.named_parameters(), other.parameters(), strict=True):
        assert (ours.grad is not None) == (theirs.grad is not None) == (name == trained)
        if name == trained:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert (x.grad is None) == bool(trained)


def test_weights_shared_by_modules_and_several_calls_before_one_backward():
    torch.manual_seed(0)
    layer, sharing = ostinato.LSTM(5, 8, dtype=torch.float64), ostinato.LSTM(5, 8, dtype=torch.float64)
    for name, parameter in layer.named_parameters():
        setattr(sharing, name, parameter)
    other, (x, _) = twin(layer), inputs(layer, 3)
    loss = layer(x)[0].sum() + sharing(2 * x)[0].square().sum() + layer(x[:1])[1][1].sum()
    loss.backward(retain_graph=True)
    loss.backward()
    (other(x)[0].sum() + other(2 * x)[0].square().sum() + other(x[:1])[1][1].sum()).backward()
    for ours, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, 2 * theirs.grad, rtol=1e-11, atol=1e-12)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_weight_changed_before_the_backward_is_an_error():
    layer, other = ostinato.GRU(5, 8), nn.GRU(5, 8)
    for module in (layer, other):
        loss = module(torch.randn(4, 2, 5))[0].sum()
        with torch.no_grad():
            module.weight_hh_l0.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    torch.manual_seed(0)
    layer = ostinato.GRU(5, 8, 2, dropout=0.5, bidirectional=True, dtype=torch.float64)
    x = inputs(layer, 3)[0].requires_grad_()
    results = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=reentrant)):
        layer.zero_grad()
        torch.manual_seed(1)
        call(x)[0].square().sum().backward()
        results.append([parameter.grad.clone() for parameter in layer.parameters()])
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("scaler", [None, torch.GradScaler("cpu", init_scale=2.0**10)])
@pytest.mark.parametrize("cell", CELLS)
def test_autocast_computes_in_its_dtype_and_trains_float32(cell, scaler):
    torch.manual_seed(0)
    layer = make(cell, 8, 16, num_layers=2)
    exact = twin(layer).double()
    x, hx = inputs(layer, 3)
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        results = flat(layer(x, hx))
        loss = results[0].float().square().mean()
    assert {y.dtype for y in results} == {torch.bfloat16}
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    wide_hx = tuple(state.double() for state in hx) if cell == "LSTM" else hx.double()
    exact(x.double(), wide_hx)[0].square().mean().backward()
    largest = max(parameter.grad.abs().max() for parameter in exact.parameters())
    for parameter, old, truth in zip(layer.parameters(), before, exact.parameters(), strict=True):
        assert parameter.dtype == torch.float32
        assert (old.double() - parameter.double() - truth.grad).abs().max() < 0.03 * largest


@by("the CPU's")
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}])
@pytest.mark.parametrize("cell", CELLS)
def test_compiled_in_one_graph(cell, options, fresh_compiler):
    """Which PyTorch allows for these classes where its ``allow_rnn`` says so."""
    torch.manual_seed(0)
    layer = pruned(cell, 5, 16, **options)
    x, hx = inputs(layer, 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="allow_rnn"):
        compiled(x, hx)
    with torch._dynamo.config.patch(allow_rnn=True):
        for ours, expected in zip(gradients(compiled, x, hx), gradients(layer, x, hx), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
        with torch.no_grad():
            assert_same(compiled(x, hx), layer(x, hx), 1e-6)


@by("the CPU's")
def test_export():
    layer = pruned("LSTM", 5, 16, bidirectional=True)
    auto = torch.export.Dim.AUTO
    exported = torch.export.export(layer, (inputs(layer, 3)[0],), dynamic_shapes=({0: auto, 1: auto},))
    nodes = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert sum("recurrent_layer" in str(node.target) for node in nodes) == 2
    x = torch.randn(9, 2, 5)
    assert_same(exported.module()(x), layer(x), 1e-6)


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


def test_gradients_of_gradients_are_torchs():
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 16, num_layers=2, bidirectional=True, dtype=torch.float64)
    results = []
    for module in (layer, twin(layer)):
        x = inputs(layer, 3, length=5)[0].requires_grad_()
        (first,) = torch.autograd.grad(module(x)[0].square().sum(), x, create_graph=True)
        results.append((first, torch.autograd.grad(first.square().sum(), [x, module.weight_ih_l0, module.bias_hh_l1])))
    (ours, ours_twice), (theirs, theirs_twice) = results
    for a, b in zip([ours, *ours_twice], [theirs, *theirs_twice], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_parametrized_weights():
    torch.manual_seed(0)
    layer = ostinato.GRU(5, 8, dtype=torch.float64)
    other = twin(layer)
    x, hx = inputs(layer, 3)
    for module in (layer, other):
        nn.utils.parametrizations.weight_norm(module, "weight_hh_l0")
        nn.utils.parametrizations.spectral_norm(module.eval(), "weight_ih_l0")
    other.load_state_dict(layer.state_dict())
    assert_same_gradients(layer, other, x, hx)


@pytest.mark.parametrize("kernel", [True, False])
def test_weights_put_in_the_parameters_place(kernel, monkeypatch):
    """As FSDP2 does, which leaves torch.nn's list of them behind."""
    if not kernel:
        monkeypatch.setattr(ostinato.GRU, "_plan", lambda *_: no_kernel("a test"))
    layer = ostinato.GRU(5, 8, 2, dtype=torch.float64)
    x, hx = inputs(layer, 3)
    for name in layer._flat_weights_names:
        layer._parameters[name] = nn.Parameter(1.5 * layer._parameters[name].detach())
    assert_same_gradients(layer, twin(layer), x, hx)
    assert_same(copy.deepcopy(layer)(x, hx), twin(layer)(x, hx), 1e-12)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_a_parameter_replaced_by_a_smaller_one_is_an_error(cell, name):
    """Kernels would read beyond its end."""
    layer = make(cell, 5, 8)
    setattr(layer, name, nn.Parameter(getattr(layer, name)[:3].detach()))
    for run in (layer.step, lambda x: layer(x[None]), lambda x: layer(x.expand(40, 2, 5))):
        with torch.no_grad(), pytest.raises(ValueError, match=f"{name} must have shape"):
            run(torch.randn(2, 5))


@by("the CPU's")
@pytest.mark.parametrize("cell", CELLS)
def test_tensors_that_are_not_contiguous(cell):
    torch.manual_seed(0)
    layer = make(cell, 5, 8, dtype=torch.float64)
    other = twin(layer)
    x, hx = inputs(layer, 3)
    for parameter in layer.parameters():
        parameter.data = torch.stack([parameter.data] * 2, -1)[..., 0]
    assert not layer.weight_hh_l0.is_contiguous()
    wide = torch.stack([x] * 3, 1)[:, 1].transpose(0, 2).contiguous().transpose(0, 2)
    states = [torch.stack([state] * 2, -1)[..., 1] for state in (hx if cell == "LSTM" else [hx])]
    assert_same(layer(wide, tuple(states) if cell == "LSTM" else states[0]), other(x, hx), 1e-13)
    layer(wide)[0].sum().backward()
    other(x)[0].sum().backward()
    torch.testing.assert_close(layer.weight_hh_l0.grad, other.weight_hh_l0.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 0, 5), (0, 3, 5), (0, 5), (3, 2, 0)])
def test_no_elements(shape):
    layer = ostinato.GRU(5, 8)
    outcomes = []
    for module in (layer, twin(layer)):
        try:
            outcomes.append([y.shape for y in flat(module(torch.zeros(shape)))])
        except (RuntimeError, ValueError) as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


# Two processes.


def train(module, x):
    optimizer = torch.optim.AdamW(module.parameters(), 0.05)
    for batch in x:
        optimizer.zero_grad()
        module(batch)[0].square().mean().backward()
        optimizer.step()


def models():
    for make_dense in (False, True):
        torch.manual_seed(0)
        layer = ostinato.GRU(5, 8, 2, bidirectional=True)
        yield layer if make_dense else ostinato.prune(layer, 0.3, block=(8, 4))


def in_one_of_two_processes(rank, file, by_torch, errors):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        if by_torch:
            patch.setattr(ostinato.GRU, "_plan", lambda *_: no_kernel("a test"))
        else:
            use_kernels(patch, cpu)
        x = torch.randn(5, 6, 4, 5, generator=torch.Generator().manual_seed(1))
        mesh = init_device_mesh("cpu", (2,))
        for wrap in (nn.parallel.DistributedDataParallel, lambda layer: fully_shard(layer, mesh=mesh)):
            for single, shared in zip(models(), models(), strict=True):
                train(single, x[:4])
                module = wrap(shared)
                train(module, x[:4, :, 2 * rank : 2 * rank + 2])
                with torch.no_grad():
                    errors.put((module(x[4])[0] - single(x[4])[0]).abs().max().item())
    distributed.barrier()
    os._exit(0)  # what is left of gloo's threads at an ordinary end now and then aborts the process


@pytest.mark.parametrize("by_torch", [False, True])
def test_data_parallel_and_sharded_training_is_one_process_s(tmp_path, by_torch):
    context = torch.multiprocessing.get_context("spawn")
    errors = context.SimpleQueue()
    torch.multiprocessing.start_processes(in_one_of_two_processes, (tmp_path / "store", by_torch, errors), 2)
    found = [errors.get() for _ in range(8)]
    assert max(found) < 2e-6


def test_forward_mode_derivative_of_a_pruned_layer_is_torchs():
    layer = ostinato.GRU(8, 16).double().requires_grad_(False)
    ostinato.prune(layer, 0.25, block=(16, 1))
    x, v = torch.randn(2, 7, 3, 8, dtype=torch.float64)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v))[0]).tangent
    step = 1e-6
    difference = (layer(x + step * v)[0] - layer(x - step * v)[0]) / (2 * step)
    assert (tangent - difference).abs().max() < 1e-8


def test_gradient_of_input_and_state_when_weights_have_none():
    layer = pruned("GRU", 5, 20).requires_grad_(False)
    x, hx = inputs(layer, 3)
    for tensor in (x, hx):
        tensor.requires_grad_()
        layer(x, hx)[0].sum().backward()
        assert tensor.grad.abs().sum() > 0
        tensor.requires_grad_(False)
    assert not layer(x, hx)[0].requires_grad


@by("reference", "the CPU's")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spreads_as_in_torch(cell, value):
    torch.manual_seed(0)
    layer = pruned(cell, 5, 32, density=0.05, keep_diagonal=True)
    assert_uses_kernel(layer)
    x, hx = inputs(layer, 3)

    def poison(place, layer, x, hx):
        if place == "x":
            x[4, 1, 2] = value
        elif place == "weight":
            layer.weight_hh_l0[layer.mask_hh_l0.nonzero()[7].unbind()] = value
        elif place == "bias":
            layer.bias_ih_l0[3] = value
        elif place == "c":
            hx[1][0, 1, 5] = value
        else:
            (hx[0] if cell == "LSTM" else hx)[0, 1, 5] = value

    for place in ["x", "weight", "bias", "h", *["c"] * (cell == "LSTM")]:
        with torch.no_grad():
            bad, bad_x, bad_hx = copy.deepcopy((layer, x, hx))
            poison(place, bad, bad_x, bad_hx)
            expected = twin(bad)(bad_x, bad_hx)
            assert_same(bad(bad_x, bad_hx), expected, 1e-6)


def test_a_pruned_weight_does_not_count_whatever_it_holds():
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 32)
    x, hx = inputs(layer, 3)
    expected = flat(twin(layer)(x, hx))
    with torch.no_grad():
        layer.weight_hh_l0[~layer.mask_hh_l0] = float("nan")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for ours, theirs in zip(flat(layer(x, hx)), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_masked_weights_are_the_same_with_and_without_gradient(dtype):
    layer = pruned("GRU", 5, 32).to(dtype)
    with torch.no_grad():
        odd = torch.tensor([float("nan"), float("inf"), -0.0, 1.5], dtype=dtype)
        layer.weight_hh_l0.copy_(odd.repeat(layer.weight_hh_l0.numel() // 4).view_as(layer.weight_hh_l0))
        ours = masked(layer, "weight_hh_l0")
        assert not ours.requires_grad
    expected = masked(layer, "weight_hh_l0")
    assert expected.requires_grad
    torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours[~layer.mask_hh_l0], torch.zeros_like(ours[~layer.mask_hh_l0]))


def step_of_optimiser(layer, x):
    layer(x)[0].sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()


def step_of_fused_optimiser(layer, x):
    """Which leaves the count of changes that PyTorch keeps of each tensor as it is."""
    layer(x)[0].sum().backward()
    with torch.no_grad():
        layer(x)  # packs the weights anew
    version = layer.weight_ih_l0._version
    torch.optim.AdamW(layer.parameters(), 0.1, fused=True).step()
    assert layer.weight_ih_l0._version == version


def assign_data(layer, x):
    layer.weight_hh_l0.data = layer.weight_hh_l0.data * 1.5


def edit_data(layer, x):
    """As moving averages and soft updates do; PyTorch counts no change."""
    version = layer.weight_hh_l0._version
    layer.weight_hh_l0.data.mul_(1.5)
    assert layer.weight_hh_l0._version == version


def edit_in_another_process(layer, x):
    layer.share_memory()
    child = multiprocessing.get_context("fork").Process(target=edit_bytes, args=(layer.bias_ih_l0.detach().numpy(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child.start()
    child.join(60)


def edit_bytes(array):
    array += 0.5


CHANGES = {
    "optimiser": step_of_optimiser,
    "fused optimiser": step_of_fused_optimiser,
    "load_state_dict": lambda layer, x: layer.load_state_dict({k: v / 2 for k, v in layer.state_dict().items()}),
    "in place": torch.no_grad()(lambda layer, x: layer.weight_hh_l0.mul_(1.5)),
    "bias in place": torch.no_grad()(lambda layer, x: layer.bias_hh_l0.add_(0.5)),
    "input weight in place": torch.no_grad()(lambda layer, x: layer.weight_ih_l0.mul_(1.5)),
    "other parameter": lambda layer, x: setattr(layer, "weight_hh_l0", nn.Parameter(layer.weight_hh_l0 * 1.5)),
    "data assigned": assign_data,
    "data edited": edit_data,
    "another process": edit_in_another_process,
    "rounded": lambda layer, x: layer.to(torch.bfloat16).to(torch.float32),
    "mask in place": lambda layer, x: layer.mask_hh_l0.logical_and_(layer.mask_hh_l0.roll(16, 1)),
    "pruned again": lambda layer, x: ostinato.prune(layer, 0.02),
}


def without_inference(change):
    return "optimiser" in change or change in ("data edited", "another process")


@by("the CPU's")
@pytest.mark.parametrize(
    ("change", "inference"),
    [(change, mode) for change in CHANGES for mode in (False, True) if not mode or not without_inference(change)],
)
def test_changed_weights_are_noticed(change, inference):
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        layer = pruned("GRU", 5, 32)
        x, hx = inputs(layer, 2)
    with torch.inference_mode():
        before = layer(x, hx)[0]
    with torch.inference_mode(inference):
        CHANGES[change](layer, x)
        layer_zeros = copy.deepcopy(layer)
        with torch.no_grad():
            layer_zeros.weight_hh_l0.masked_fill_(~layer_zeros.mask_hh_l0, 0)
        expected = twin(layer_zeros)(x, hx)
    with torch.inference_mode():
        after = layer(x, hx)
    assert_same(after, expected, 1e-6)
    assert (after[0] - before).abs().max() > 1e-4


@pytest.mark.gpu
def test_gpu_dense_weights_changed_by_a_fused_optimiser_are_noticed():
    torch.manual_seed(0)
    layer = ostinato.LSTM(5, 32, device="cuda")
    x, hx = inputs(layer, 2, device="cuda")
    for _ in range(3):
        layer(x, hx)[0].sum().backward()
        with torch.no_grad():
            layer(x, hx)
        torch.optim.AdamW(layer.parameters(), 0.1, fused=True).step()
        with torch.no_grad():
            exact = twin(layer).double()(x.double(), tuple(state.double() for state in hx))
            assert_close_to_exact(layer(x, hx), exact, 1e-5)


def test_memory_of_an_old_weight_is_not_mistaken_for_it():
    layer = pruned("RNN", 5, 32)
    x, hx = inputs(layer, 1)
    with torch.no_grad():
        for factor in range(1, 20):  # the allocator would give back an address it has given before
            layer.weight_hh_l0.data = torch.full_like(layer.weight_hh_l0, factor / 100) * layer.mask_hh_l0
            assert_same(layer(x, hx), twin(layer)(x, hx), 1e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_steps_one_at_a_time_equal_the_whole(cell):
    torch.manual_seed(0)
    layer = pruned(cell, 5, 40, num_layers=2)
    x, hx = inputs(layer, 2)
    with torch.no_grad():
        output, last = layer(x, hx)
        outputs = []
        for x_t in x:
            y, hx = layer(x_t[None], hx)
            outputs.append(y)
    assert_same((torch.cat(outputs), hx), (output, last), 1e-6)


@by("as planned")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("hidden", [37, 48])
def test_pruned_layers_one_step_at_a_time(cell, block, hidden):
    """What the parameters have at pruned places is not looked at, and what is written past autograd is seen."""
    torch.manual_seed(0)
    layer = pruned(
        *(cell, 5, hidden, 2),
        block=block,
        keep_diagonal=block != (1, 1),
        dtype=torch.float64,
        bias=hidden == 48,
    )
    other, (x, hx) = twin(layer), inputs(layer, 1, 3)
    exact = twin(layer)
    with torch.no_grad():
        assert layer.plan(1, steps=1).path == ("sparse" if block == (1, 1) else "block")
        for module in (layer, other):
            for n in range(2):
                module.get_parameter(f"weight_hh_l{n}").data.mul_(1.5)
        for n in range(2):
            layer.get_parameter(f"weight_hh_l{n}")[~layer.get_buffer(f"mask_hh_l{n}")] = torch.nan
        assert layer._step(x[0], hx, x.dim() - 1) is not None
        before = [state.clone() for state in flat((x, hx))]
        assert_same(layer(x[:1]), other(x[:1]), 1e-13)
        ours, theirs = hx, hx
        for x_t in x:
            y, ours = layer(x_t[None], ours)
            z, theirs = other(x_t[None], theirs)
            assert_same((y, ours), (z, theirs), 1e-13)
        assert all(map(torch.equal, before, flat((x, hx))))
        assert (exact(x, hx)[0][-1] - y[0]).abs().max() > 1e-4


@by("as planned")
@pytest.mark.parametrize("block", BLOCKS)
def test_steps_in_several_threads_have_the_bits_of_one(block):
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 48, block=block)
    xs, results = torch.randn(4, 200, 1, 1, 5), {}

    def walk(name, sequence):
        hx = torch.zeros(1, 1, 48)
        with torch.no_grad():
            for x in sequence:
                hx = layer(x, hx)[1]
        results[name] = hx

    threads = [threading.Thread(target=walk, args=(i, x)) for i, x in enumerate(xs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(xs):
        walk("alone", x)
        assert torch.equal(results[i], results["alone"])


@by("as planned")
def test_a_hole_that_a_mask_has_on_the_diagonal_of_a_block():
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 48, block=(8, 4), density=0.3)
    layer.mask_hh_l0 &= ~torch.eye(48, dtype=torch.bool).repeat(3, 1)
    x, hx = inputs(layer, 1, 1)
    with torch.no_grad():
        other = twin(layer)
        other.weight_hh_l0 *= layer.mask_hh_l0
        assert layer.plan(1, steps=1).path == "block"
        assert (layer(x, hx)[0] - twin(layer)(x, hx)[0]).abs().max() > 1e-6
        assert_same(layer(x, hx), other(x, hx), 1e-6)


@by("as planned")
def test_one_step_with_a_state_that_is_not_finite():
    layer = pruned("GRU", 5, 48)
    x, hx = inputs(layer, 1, 1)
    hx[0, 0, 3] = torch.inf
    with torch.no_grad():
        assert_same(layer(x, hx), twin(layer)(x, hx), 1e-6)


def test_copies_and_pickles_after_use():
    layer = pruned("LSTM", 5, 32)
    x, hx = inputs(layer, 2)
    with torch.no_grad():
        expected = layer(x, hx)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        for other in (copy.deepcopy(layer), copy.copy(layer), torch.load(file, weights_only=False)):
            assert_same(other(x, hx), expected, 0)
            assert_uses_kernel(other)


@by("the CPU's")
def test_the_same_call_gives_the_same_bits_in_many_threads_and_after_a_fork():
    torch.manual_seed(0)
    layer = pruned("GRU", 64, 256, density=0.1)
    x, hx = inputs(layer, 16, length=50)
    with torch.no_grad():
        expected = layer(x, hx)[0]
    wrong = []

    def call():
        with torch.no_grad():
            for _ in range(10):
                if not torch.equal(layer(x, hx)[0], expected):
                    wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking with threads about: that is the test
        child = multiprocessing.get_context("fork").Process(target=call_in_child, args=(layer, x, hx, expected))
        child.start()
    child.join(60)
    assert child.exitcode == 0


def call_in_child(layer, x, hx, expected):
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    with torch.no_grad():
        assert torch.allclose(layer(x, hx)[0], expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated, and warns of every branch
def test_graph_breaks_and_traces(fresh_compiler):
    layer = pruned("GRU", 5, 32)
    other, (x, _) = twin(layer), inputs(layer, 2)
    with torch.no_grad():
        expected = other(x)
        assert_same(torch.compile(layer, backend="eager")(x), expected, 1e-6)
        assert_same(torch.jit.trace(layer, (x,))(x), expected, 1e-6)


@by("as planned")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_a_trace_is_planned(cell):
    layer = getattr(ostinato, cell)(5, 8, 2, bidirectional=True)
    traced, x = torch.jit.trace(layer, (torch.randn(5, 2, 5),)), torch.randn(9, 3, 5)
    assert_same(traced(x), layer(x), 1e-6)


@by("as planned")
def test_narrow_dtypes_are_torchs():
    for dtype in (torch.bfloat16, torch.float16):
        layer = pruned("GRU", 5, 32).to(dtype)
        x, hx = inputs(layer, 2)
        with torch.no_grad():
            assert layer.plan(2).path == "steps"
            assert_same(layer(x, hx), twin(layer)(x, hx), 0)
    layer = pruned("GRU", 5, 32)
    other, (x, _) = twin(layer), inputs(layer, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_same(layer(x), other(x), 0)


@by("as planned")
def test_plan():
    layer = ostinato.GRU(5, 32)
    assert layer.plan(1) == Plan("dense", 0, 0, 0, "the weights stay in the CPU's caches for all steps")
    for block, path in (((16, 1), "block"), ((8, 4), "block"), ((1, 1), "sparse")):
        for training in (False, True):
            plan = ostinato.prune(layer, 0.03, block=block).plan(1, training=training, steps=100)
            assert plan.path == path
            assert plan.reason.endswith("% of the weights are left, and only these are read")
        assert layer.plan(1, steps=1).path == path
        assert layer.plan(2, steps=1).path == layer.plan(1, steps=2).path == "steps"
        assert layer.plan(1, steps=1, training=True).path == "steps"
    for dtype in (torch.bfloat16, torch.float16):
        plan = layer.plan(1, dtype)
        assert plan.path == "steps"
        assert str(dtype) in plan.reason
    assert layer.to("meta").plan(1).reason == "layers on meta run in torch's own kernels"
    layer = pruned("GRU", 5, 32)
    with torch.device("meta"), torch.no_grad():  # a default device is for the user's tensors
        layer(torch.zeros(30, 1, 5, device="cpu"))
    assert ostinato.prune(ostinato.GRU(5, 32), 0.9).plan(1).path == "dense"
    with pytest.raises(ValueError, match="batch must be at least 1; got 0"):
        layer.plan(0)
    with pytest.raises(TypeError, match="batch must be an integer; got float"):
        layer.plan(1.5)
    with pytest.raises(ValueError, match="steps must be at least 1; got -2"):
        layer.plan(1, steps=-2)
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype; got 'float32'"):
        layer.plan(1, "float32")


def test_torch_runs_all_layers_or_none(monkeypatch):
    def make_plan(call, mask_hh, *_):
        return Plan("dense", 1, 1, 1, "dense") if mask_hh is None else no_kernel("pruned")

    monkeypatch.setattr(operators.kernels_on(torch.device("cpu")), "make_plan", make_plan)
    layer = ostinato.GRU(5, 8, 2)
    assert layer.plan(1).reason == "dense"
    layer.register_buffer("mask_hh_l1", torch.ones_like(layer.weight_hh_l1, dtype=torch.bool))
    assert layer.plan(1).reason == "pruned"


BAD = {
    "rank": lambda: (torch.randn(2, 3, 4, 5),),
    "width": lambda: (torch.randn(3, 2, 6),),
    "dtype": lambda: (torch.randn(3, 2, 5).double(),),
    "integers": lambda: (torch.ones(3, 2, 5).long(),),
    "no steps": lambda: (torch.randn(0, 2, 5),),
    "state of another batch": lambda: (torch.randn(3, 2, 5), torch.zeros(1, 3, 32)),
    "state without a batch": lambda: (torch.randn(3, 2, 5), torch.zeros(1, 32)),
    "state of another dtype": lambda: (torch.randn(3, 2, 5), torch.zeros(1, 2, 32).double()),
    "state on another device": lambda: (torch.randn(3, 2, 5), torch.zeros(1, 2, 32, device="meta")),
    "two states": lambda: (torch.randn(3, 2, 5), (torch.zeros(1, 2, 32),) * 2),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_as_by_torch(bad):
    layer = pruned("GRU", 5, 32)
    arguments = BAD[bad]()
    with torch.no_grad():
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            twin(layer)(*arguments)
        with pytest.raises(theirs.type) as ours:
            layer(*arguments)
    assert str(ours.value).replace("tuple", "") == str(theirs.value).replace("tuple", "")


def test_projections_are_refused():
    with pytest.raises(ValueError, match="proj_size must be 0, projections are not supported; got 8"):
        ostinato.LSTM(5, 16, proj_size=8)
    with pytest.raises(ValueError, match="proj_size"):
        ostinato.GRU(5, 16, proj_size=8)


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


@pytest.mark.parametrize("sizes", [[2, 3], [3, 1], [3, 2, 2], [2, 0, 3]])
def test_a_packed_sequence_that_does_not_fit_its_rows(sizes):
    packed = PackedSequence(torch.randn(5, 7), torch.tensor(sizes))
    with torch.no_grad(), pytest.raises(ValueError, match=r"input\.batch_sizes must be positive, never rise"):
        pruned("GRU", 7, 32)(packed)


# On an NVIDIA GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("block", [None, *BLOCKS])
def test_gpu(cell, block, dtype):
    torch.manual_seed(0)
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    for options in OPTIONS:
        layer = make(cell, 5, 67, device="cuda", dtype=torch.float64, **options)
        if block:
            ostinato.prune(layer, 0.1, block=block, keep_diagonal=True)
        exact = twin(layer)
        layer.to(dtype)
        assert_uses_kernel(layer, 4)
        for (batch, packed), with_state in itertools.product(SHAPES, (False, True)):
            x, hx = inputs(layer, batch, packed=packed, device="cuda")
            wide_x, wide_hx = inputs(exact, batch, packed=packed, device="cuda")
            with torch.no_grad():
                ours = layer(x, hx) if with_state else layer(x)
                theirs = exact(wide_x, wide_hx) if with_state else exact(wide_x)
            assert all(y.dtype == dtype for y in flat(ours))
            assert_close_to_exact(ours, theirs, tolerance)


@pytest.mark.gpu
def test_gpu_autocast_and_training():
    torch.manual_seed(0)
    layer = pruned("LSTM", 5, 64, num_layers=2, device="cuda")
    other = twin(layer)
    x, hx = inputs(layer, 4, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        ours, theirs = layer(x, hx), other(x, hx)
        assert_uses_kernel(layer, 4, torch.bfloat16)
    assert {y.dtype for y in flat(ours)} == {torch.bfloat16}  # where torch's layers take float16, whatever is asked for
    for y, expected in zip(flat(ours), flat(theirs), strict=True):
        torch.testing.assert_close(y.float(), expected.float(), rtol=0, atol=3e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (layer, other):
            module(x, hx)[0].square().sum().backward()
    gradient = layer.weight_hh_l0.grad
    torch.testing.assert_close(gradient, other.weight_hh_l0.grad * layer.mask_hh_l0, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change", [change for change in CHANGES if change != "another process"]
)  # shares no GPU memory
def test_gpu_changed_weights_are_noticed(change):
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 32, device="cuda")
    x, hx = inputs(layer, 2, device="cuda")
    with torch.no_grad():
        layer(x, hx)
    CHANGES[change](layer, x)
    with torch.no_grad():
        layer.weight_hh_l0.masked_fill_(~layer.mask_hh_l0, 0)
        assert_same(layer(x, hx), twin(layer)(x, hx), 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["dense", "block", "sparse"])
def test_gpu_pruned_weights_count_as_zero_whatever_they_are(path):
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 64, num_layers=2, device="cuda")
    layer._path = path
    x, hx = inputs(layer, 4, device="cuda")
    assert layer.plan(4).path == path
    with torch.no_grad():
        expected = layer(x, hx)
        assert_same(expected, twin(layer)(x, hx), 1e-3)
    for name in ("weight_hh_l0", "weight_hh_l1"):
        getattr(layer, name).data.masked_fill_(~getattr(layer, name.replace("weight", "mask")), torch.nan)
    with torch.no_grad():
        assert_same(layer(x, hx), expected, 0)
    assert_same(layer(x, hx), expected, 1e-5)  # for gradients other kernels may be chosen


@pytest.mark.gpu
@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_gpu_runs_torchs_kernels_when_ours_cannot_be_made(monkeypatch, error):
    def fail(*_):
        raise error("no room\nat all")

    monkeypatch.setattr("ostinato.kernels.persistent.cuda.kernels", fail)
    layer = pruned("GRU", 5, 64, device="cuda")
    x, hx = inputs(layer, 4, device="cuda")
    plan = layer.plan(4)
    assert (plan.path, plan.reason, plan.blocks) == ("steps", "no room", 0)
    with torch.no_grad():
        assert_same(layer(x, hx), twin(layer)(x, hx), 1e-5)


@pytest.mark.parametrize("kernels", ["as planned"], indirect=True)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layer", [ostinato.RNN, ostinato.GRU, ostinato.LSTM, ostinato.MinGRU])
def test_zeros_without_memory_are_zeros(layer, packed, gradient):
    torch.manual_seed(0)
    layer, x, states = layer(3, 4), torch.randn(5, 2, 3), torch.randn(2, 1, 2, 4)

    def outcome(x, *states):
        x = pack_padded_sequence(x, [5, 3]) if packed else x
        with torch.set_grad_enabled(gradient):
            output, last = layer(x, states if isinstance(layer, ostinato.LSTM) else states[0])
        return output.data if packed else output, *(last if isinstance(last, tuple) else [last])

    for absent in range(3):
        some = [x, *states]
        some[absent] = torch.zeros_like(some[absent])
        expected = outcome(*some)
        some[absent] = torch._efficientzerotensor(some[absent].shape)
        for got, wanted in zip(outcome(*some), expected, strict=True):
            assert torch.allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("layer", [ostinato.RNN, ostinato.GRU, ostinato.LSTM, ostinato.MinGRU])
def test_layers_without_memory_have_shapes(layer):
    layer, x = layer(3, 4, 2, device="meta"), torch.randn(5, 2, 3, device="meta")
    output, states = layer(x)
    assert output.device.type == "meta"
    assert output.shape == (5, 2, 4)
    y, _ = layer.step(x[0], states)
    assert y.shape == (2, 4)
