"""The results of RNN, GRU and LSTM are torch.nn's, whichever kernels compute them."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence

import ostinato
from comparisons import same_bits
from ostinato.kernels.persistent import directions
from recurrent_layers import (
    BLOCKS,
    CELLS,
    OPTIONS,
    SHAPES,
    assert_close_to_exact,
    assert_results_close,
    assert_uses_kernel,
    by,
    flat,
    gradients,
    inputs,
    make,
    pruned,
    twin,
)
from threads import in_threads


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
            assert_results_close(ours, theirs, 1e-13)
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
                assert_results_close(layer(x, hx), other(x, hx), 1e-6)


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
        assert_results_close(*results, 1e-6)
    assert layer.dropout == 0.4


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
    assert_results_close(layer(wide, tuple(states) if cell == "LSTM" else states[0]), other(x, hx), 1e-13)
    layer(wide)[0].sum().backward()
    other(x)[0].sum().backward()
    torch.testing.assert_close(layer.weight_hh_l0.grad, other.weight_hh_l0.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 0, 5), (3, 2, 0)])
def test_no_elements(shape):
    layer = ostinato.GRU(5, 8)
    outcomes = []
    for module in (layer, twin(layer)):
        try:
            outcomes.append([y.shape for y in flat(module(torch.zeros(shape)))])
        except (RuntimeError, ValueError) as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_no_steps_leave_the_state_as_it_was(cell, batch_first):
    """As in other layers, though torch.nn's refuse them."""
    layer = make(cell, 5, 8, 2, batch_first=batch_first, bidirectional=True)
    for shape in ((3, 0, 5) if batch_first else (0, 3, 5), (0, 5), (0, 0, 5)):
        x = torch.zeros(shape)
        for resets in (None, torch.zeros(shape[:-1], dtype=torch.bool)):
            output, *last = flat(layer(x, resets=resets))
            assert output.shape == (*shape[:-1], 16)
            assert not any(map(torch.any, last))
            assert not any(map(torch.any, torch.autograd.grad(sum(h.sum() for h in last), layer.parameters())))
            hx = [torch.randn(h.shape, requires_grad=True) for h in last]
            output, *last = flat(layer(x, tuple(hx) if len(hx) > 1 else hx[0], resets=resets))
            assert same_bits(last, hx)
            grads = torch.autograd.grad(sum(h.sum() for h in last), hx)
            assert same_bits(grads, map(torch.ones_like, hx))


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
            assert_results_close(bad(bad_x, bad_hx), expected, 1e-6)


@by("as planned")
def test_narrow_dtypes_are_torchs():
    for dtype in (torch.bfloat16, torch.float16):
        layer = pruned("GRU", 5, 32).to(dtype)
        x, hx = inputs(layer, 2)
        with torch.no_grad():
            assert layer.plan(2).path == "steps"
            assert_results_close(layer(x, hx), twin(layer)(x, hx), 0)
    layer = pruned("GRU", 5, 32)
    other, (x, _) = twin(layer), inputs(layer, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert_results_close(layer(x), other(x), 0)


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
    with FakeTensorMode():
        fake, x = layer(3, 4, 2), torch.randn(5, 2, 3)
        output, _ = fake(x, fake(x)[1], resets=torch.zeros(5, 2, dtype=torch.bool))
        assert output.shape == (5, 2, 4)
    layer, x = layer(3, 4, 2, device="meta"), torch.randn(5, 2, 3, device="meta")
    output, states = layer(x)
    assert output.device.type == "meta"
    assert output.shape == (5, 2, 4)
    output, _ = layer(x, states, resets=torch.zeros(5, 2, dtype=torch.bool, device="meta"))
    assert output.shape == (5, 2, 4)
    y, _ = layer.step(x[0], states)
    assert y.shape == (2, 4)
    with pytest.raises(TypeError, match=r"^x must have the parameters'"):
        layer.step(x[0].double(), states)


@by("the CPU's")
def test_the_same_call_gives_the_same_bits_in_many_threads():
    torch.manual_seed(0)
    layer = pruned("GRU", 64, 256, density=0.1)
    x, hx = inputs(layer, 16, length=50)
    with torch.no_grad():
        expected = layer(x, hx)[0]
    wrong = []

    def call(_):
        with torch.no_grad():
            for _ in range(10):
                if not torch.equal(layer(x, hx)[0], expected):
                    wrong.append(1)

    in_threads(call, range(8))
    assert not wrong


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
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("hidden", [40, 80, 168])
@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_few_steps_are_right_where_cudnns_are_wrong(cell, hidden, steps):
    torch.manual_seed(0)
    layer = make(cell, 24, hidden, device="cuda", dtype=torch.float16)
    x, hx = inputs(layer, 16, steps, device="cuda")
    exact = twin(layer).cpu().double()
    wide_x, wide_hx = inputs(exact, 16, steps)

    def assert_right(found, expected, tolerance=1e-2):
        for y, right in zip(found, expected, strict=True):
            assert (y.cpu().double() - right).abs().max() < tolerance * right.abs().max()

    with torch.no_grad():
        expected = flat(exact(wide_x, wide_hx))
        assert_right(flat(layer(x, hx)), expected)
        layer.float()
        for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
            with torch.autocast("cuda", dtype):
                assert_right(flat(layer(x, hx)), expected, tolerance)
    layer.half()
    assert_right(gradients(layer, x, hx), gradients(exact, wide_x, wide_hx))


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_both_directions_at_once_are_those_in_turn(cell, monkeypatch):
    """Memory of the direction that runs beside is not given to the other one meanwhile."""
    torch.manual_seed(0)
    layer = make(cell, 64, 256, 2, bidirectional=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(200, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert_uses_kernel(layer, 8)

    def both():
        results = flat(layer(x))
        return *results, *torch.autograd.grad(sum(y.float().sum() for y in results), [x, *layer.parameters()])

    with monkeypatch.context() as context:
        context.setattr(directions, "beside", lambda call, *directions: [call(*args) for args in directions])
        expected = both()
    for _ in range(20):
        poison = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(10, 25)]
        del poison
        assert same_bits(both(), expected)
