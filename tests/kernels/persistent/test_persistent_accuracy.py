"""The errors of recurrent layers on a GPU beside cuDNN's, and where float32 is rounded to tf32."""

import itertools

import pytest
import torch
from torch import nn

import ostinato
from comparisons import same_bits
from ostinato.kernels.persistent import cuda, reference
from ostinato.kernels.persistent.cuda import passes
from ostinato.kernels.persistent.cuda import plan as cuda_plan
from persistent_cases import TOLERANCE, Case, double, errors

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.gpu
def test_tf32_only_where_it_is_allowed():
    torch.manual_seed(0)
    for exact, least, most in ((True, 0, 2e-6), (False, 1e-5, 1e-3)):
        case = Case("dense", "lstm", 515, 5, f32)
        forward, backward = (g._replace(exact=exact) for g in case.plan.geometry)
        case.plan = case.plan._replace(geometry=cuda_plan.Geometries(forward, backward))
        inputs = case.inputs(33)
        gradients = case.gradients(inputs, False)
        assert least <= errors(case.forward(inputs, False), case.expected(inputs, False)).max() < most
        assert least <= errors(case.backward(gradients), case.backward(gradients, reference, double)).max() < most


@pytest.mark.gpu
def test_error_is_no_larger_than_cudnns(monkeypatch):
    """Over 2,000 steps, of the output and of every gradient; of GRU and LSTM rounded to tf32, too."""
    torch.manual_seed(0)
    cases = [*itertools.product((nn.RNN, nn.GRU, nn.LSTM), (f16, bf16, f32), [256], [8]), (nn.RNN, f32, 512, 5)]
    for (kind, dtype, hidden, batch), tf32 in itertools.product(cases, (False, True)):
        if tf32 and (dtype is not f32 or kind is nn.RNN):
            continue
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
        theirs = kind(64, hidden).cuda().to(dtype)
        ours = getattr(ostinato, kind.__name__)(64, hidden).cuda().to(dtype)
        exact = kind(64, hidden).cuda().double()
        for layer in (ours, exact):
            layer.load_state_dict(theirs.state_dict())
        assert ours.plan(batch, dtype, training=True).path == "dense"
        x = torch.randn(2000, batch, 64, device="cuda", dtype=dtype)
        grad = torch.randn(2000, batch, hidden, device="cuda", dtype=dtype)

        def results(layer, x=x, grad=grad):
            dtype = layer.weight_hh_l0.dtype
            x = x.to(dtype).requires_grad_()
            output = layer(x)[0]
            output.backward(grad.to(dtype))
            return [y.double() for y in (output, x.grad, *(p.grad for p in layer.parameters()))]

        with torch.backends.cudnn.flags(enabled=False):
            expected = results(exact)
        for mine, cudnns, right in zip(results(ours), results(theirs), expected, strict=True):
            assert (mine - right).norm() <= 1.5 * (cudnns - right).norm() + 2e-7 * right.norm(), (kind, dtype, tf32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize(("products", "layers"), [*itertools.product([False, True], repeat=2)])
def test_float32_is_as_exact_as_the_switch_of_torchs_layers_says(kind, products, layers, monkeypatch):
    """Whatever that of products says, forward and backward, in cuDNN and here."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", products)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", layers)
    theirs, exact = kind(96, 256).cuda(), kind(96, 256).double().cuda()
    ours = getattr(ostinato, kind.__name__)(96, 256).cuda()
    for layer in (ours, exact):
        layer.load_state_dict(theirs.state_dict())
    assert ours.plan(16, training=True).path == "dense"
    x, grad = torch.randn(100, 16, 96, device="cuda"), torch.randn(100, 16, 256, device="cuda")

    def results(layer):
        leaf = x.to(layer.weight_hh_l0.dtype, copy=True).requires_grad_()
        output = layer(leaf)[0]
        return [output, *torch.autograd.grad(output, [leaf, *layer.parameters()], grad.to(output.dtype))]

    with torch.backends.cudnn.flags(enabled=False):
        expected = results(exact)
    for mine, cudnns, right in zip(results(ours), results(theirs), expected, strict=True):
        error, theirs_is = ((y.double() - right).norm() / right.norm() for y in (mine, cudnns))
        assert error <= 1.5 * theirs_is + 2e-7
        assert (error > 1e-5) == layers


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("nonlinearity", "hidden", "batch"),
    [*((f, *sizes) for f in ("relu", "tanh") for sizes in ((192, 30), (256, 8), (384, 16))), ("relu", 512, 16)],
)
def test_error_in_tf32_is_no_larger_than_cudnns_where_states_count_most(nonlinearity, hidden, batch, monkeypatch):
    """With tiny inputs, whose products both round.

    The least of several: where a unit of relu is within rounding of zero, one library passes on its gradient by chance.
    """
    for library in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(library, "allow_tf32", True)

    def errors(seed):
        """Ours and cuDNN's, of the output and all gradients."""
        torch.manual_seed(seed)
        layers = [kind(64, hidden, nonlinearity=nonlinearity).cuda() for kind in (nn.RNN, ostinato.RNN, nn.RNN)]
        theirs, ours, exact = layers
        for layer in (ours, exact.double()):
            layer.load_state_dict(theirs.state_dict())
        x, h0 = 1e-3 * torch.randn(100, batch, 64, device="cuda"), torch.randn(1, batch, hidden, device="cuda")
        grad = torch.randn(100, batch, hidden, device="cuda")

        def results(layer):
            leaves = [y.to(layer.weight_hh_l0.dtype, copy=True).requires_grad_() for y in (x, h0)]
            output = layer(*leaves)[0]
            return [output, *torch.autograd.grad(output, [*leaves, *layer.parameters()], grad.to(output.dtype))]

        with torch.backends.cudnn.flags(enabled=False):
            expected = results(exact)
        found = (zip(results(layer), expected, strict=True) for layer in (ours, theirs))
        return torch.tensor([[(y - right).norm() / right.norm() for y, right in pairs] for pairs in found])

    mine, cudnns = torch.stack([errors(seed) for seed in range(6)]).amin(0)
    assert (mine <= 1.5 * cudnns + 5e-7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("resets", [None, 0.2])
def test_gradients_by_kept_gates_are_as_exact_as_by_recomputed_ones(kind, dtype, resets, monkeypatch):
    torch.manual_seed(0)
    layer = getattr(ostinato, kind.__name__)(64, 133).cuda().to(dtype)
    exact = getattr(ostinato, kind.__name__)(64, 133).cuda().double()
    exact.load_state_dict(layer.state_dict())
    x, grad = torch.randn(50, 9, 64).cuda().to(dtype), torch.randn(50, 9, 133).cuda().to(dtype)
    begins = None if resets is None else (torch.rand(50, 9) < resets).cuda()

    def results(layer):
        inputs = x.to(layer.weight_hh_l0.dtype, copy=True).requires_grad_()
        layer.zero_grad()
        output = layer(inputs, resets=begins)[0]
        output.backward(grad.to(output.dtype))
        return [y.double().clone() for y in (output, inputs.grad, *(p.grad for p in layer.parameters()))]

    expected, errors = results(exact), {}
    for keeps in (True, False):
        for module in (cuda, passes):
            monkeypatch.setattr(module, "keeps_gates", lambda *_, keeps=keeps: keeps)
        found = [results(layer) for _ in range(2)]
        assert same_bits(*found)
        errors[keeps] = [(y - right).norm() / right.norm() for y, right in zip(found[0], expected, strict=True)]
    assert all(kept < 1.2 * recomputed < TOLERANCE[dtype] for kept, recomputed in zip(*errors.values(), strict=True))
