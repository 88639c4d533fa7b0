"""The gradients of RNN, GRU and LSTM are torch.nn's, and zero where a weight is pruned."""

import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import ostinato
from comparisons import same_bits
from recurrent_layers import (
    CELLS,
    OPTIONS,
    SHAPES,
    assert_gradients_close,
    assert_uses_kernel,
    by,
    flat,
    gradients,
    inputs,
    make,
    pruned,
    twin,
)


@by("reference", "the CPU's")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("cell", "block"),  # products, which differ by blocks, know nothing of cells
    [*((cell, None) for cell in CELLS), ("GRU", (16, 1)), ("GRU", (1, 1)), ("LSTM", (1, 1)), ("RNN", (16, 1))],
)
def test_every_gradient_is_torchs(cell, block, options):
    torch.manual_seed(0)
    layer = make(cell, 5, 20, dtype=torch.float64, **options)
    if block:
        ostinato.prune(layer, 0.06, block=block)
    other = twin(layer)
    for (batch, packed), with_state in itertools.product(SHAPES, (False, True)):
        x, hx = inputs(layer, batch, length=7, packed=packed)
        assert_gradients_close(layer, other, x, hx if with_state else None)


@pytest.mark.parametrize("which", range(3))
def test_gradients_through_one_result(which):
    torch.manual_seed(0)
    layer = ostinato.LSTM(5, 8, 2, bidirectional=True, dtype=torch.float64)
    x, hx = inputs(layer, 4, packed=True)
    assert_gradients_close(layer, twin(layer), x, hx, which=slice(which, which + 1))


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
    assert_gradients_close(layer, twin(layer), x, hx)


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


def test_gradient_of_input_and_state_when_weights_have_none():
    layer = pruned("GRU", 5, 20).requires_grad_(False)
    x, hx = inputs(layer, 3)
    for tensor in (x, hx):
        tensor.requires_grad_()
        layer(x, hx)[0].sum().backward()
        assert tensor.grad.abs().sum() > 0
        tensor.requires_grad_(False)
    assert not layer(x, hx)[0].requires_grad


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


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_states_detached_in_place_cut_the_gradient(cell):
    torch.manual_seed(0)
    layer = make(cell, 5, 8, dtype=torch.float64)
    other, (x, hx) = twin(layer), inputs(layer, 3)
    for module in (layer, other):
        state = hx
        for part in x.split([3, 1, len(x) - 4]):  # of one step, too
            output, state = module(part, state)
            output.square().sum().backward()
            for tensor in state if cell == "LSTM" else (state,):
                tensor.detach_()
    for ours, theirs in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)


def test_a_weight_changed_before_the_backward_is_an_error():
    layer, other = ostinato.GRU(5, 8), nn.GRU(5, 8)
    for module in (layer, other):
        loss = module(torch.randn(4, 2, 5))[0].sum()
        with torch.no_grad():
            module.weight_hh_l0.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@by("reference", "the CPU's")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("options", "length", "packed"),
    [
        ({}, 12, True),
        ({"num_layers": 2}, 12, False),
        ({"num_layers": 2}, 1, False),
        ({"bidirectional": True}, 12, False),
    ],
    ids=str,
)
def test_weights_given_other_data_before_the_backward(cell, options, length, packed):
    """As by classes that draw weights anew at each call, of which several come before one backward."""
    torch.manual_seed(0)
    layer = make(cell, 5, 16, dtype=torch.float64, **options)
    x, hx = inputs(layer, 4, length, packed)
    expected = [gradients(twin(layer), x, hx), gradients(layer, x, hx)]
    ours = layer.forward

    def forward(*args):
        result = ours(*args)
        for weight in layer.parameters():
            weight.data = torch.full_like(weight, 7.0)
        return result

    layer.forward = forward
    for found, of_torch, undisturbed in zip(gradients(layer, x, hx), *expected, strict=True):
        assert torch.equal(found, undisturbed)
        torch.testing.assert_close(found, of_torch, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("length", [1, 12])
@pytest.mark.parametrize("cell", CELLS)
@by("as planned")
def test_gradients_of_gradients_with_weights_given_other_data_before(cell, length):
    layer = make(cell, 5, 16, dtype=torch.float64)
    x = inputs(layer, 4, length)[0].requires_grad_()
    found = []
    for changed in ({}, dict(layer.named_parameters())):
        output = layer(x)[0]
        for weight in changed.values():
            weight.data = torch.full_like(weight, 7.0)
        (first,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), layer.weight_ih_l0)])
    assert same_bits(*found)


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


def test_forward_mode_derivative_of_a_pruned_layer_is_torchs():
    layer = ostinato.GRU(8, 16).double().requires_grad_(False)
    ostinato.prune(layer, 0.25, block=(16, 1))
    x, v = torch.randn(2, 7, 3, 8, dtype=torch.float64)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v))[0]).tangent
    step = 1e-6
    difference = (layer(x + step * v)[0] - layer(x - step * v)[0]) / (2 * step)
    assert (tangent - difference).abs().max() < 1e-8


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
    assert same_bits(*results)


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


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("length", [3, 50])  # torch's kernels and ours
def test_gpu_takes_what_cudnn_does_not(batch, length):
    """A backward of an evaluation, and states that are not contiguous."""
    torch.manual_seed(0)
    layer = make("LSTM", 5, 16, num_layers=2, dropout=0.9).cuda().eval()
    x, hx = inputs(layer, batch, length, device="cuda")
    hx = tuple(state.transpose(0, -1).contiguous().transpose(0, -1) for state in hx)
    other = twin(layer).cpu().double()
    expected = gradients(other, x.cpu().double(), tuple(state.cpu().double() for state in hx))
    for ours, own in zip(gradients(layer, x, hx), expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), own, rtol=1e-2, atol=1e-3)  # cuDNN rounds to tf32


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
