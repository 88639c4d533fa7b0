"""An LSTM with projections, which kernels run as one without: its results and derivatives are torch.nn's."""

import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

import ostinato
from ostinato.cuda_graphs import kept
from ostinato.recurrent import sequences
from recurrent_layers import (
    OPTIONS,
    SHAPES,
    assert_close_to_exact,
    assert_gradients_close,
    assert_results_close,
    assert_uses_kernel,
    by,
    gradients,
    inputs,
    twin,
)
from simulated_graphs import simulate

EVERYWHERE = by("reference", "the CPU's")


def make(input_size=5, hidden_size=16, proj_size=6, **options):
    torch.manual_seed(0)
    return ostinato.LSTM(input_size, hidden_size, proj_size=proj_size, **{"dtype": torch.float64, **options})


@EVERYWHERE
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_and_every_gradient_are_torchs(options):
    layer = make(**options)
    assert_uses_kernel(layer)
    other = twin(layer)
    for (batch, packed), with_state in itertools.product(SHAPES, (False, True)):
        x, hx = inputs(layer, batch, length=7, packed=packed)
        hx = hx if with_state else None
        with torch.no_grad():
            assert_results_close(layer(x, hx), other(x, hx), 1e-13)
        assert_gradients_close(layer, other, x, hx)


@pytest.mark.parametrize("which", range(3))
def test_gradients_through_one_result(which):
    layer = make(num_layers=2, bidirectional=True)
    assert_gradients_close(layer, twin(layer), *inputs(layer, 4, packed=True), which=slice(which, which + 1))


def test_derivatives_of_every_kind_are_torchs():
    layer = make(hidden_size=5, proj_size=2)
    other = twin(layer)
    x, hx = inputs(layer, 2, length=4)
    torch.autograd.gradgradcheck(lambda x, h, c: layer(x, (h, c))[0], [y.requires_grad_() for y in (x, *hx)])
    with torch.no_grad():
        directions = [torch.randn_like(y) for y in (x, *hx)]
        pushed = [
            torch.func.jvp(lambda x, h, c, call=call: call(x, (h, c))[0], (x, *hx), tuple(directions))[1]
            for call in (layer, other)
        ]
    torch.testing.assert_close(*pushed)
    samples = torch.randn(3, 4, 2, 5, dtype=torch.float64)
    mapped = torch.vmap(lambda x: layer(x, hx)[0])(samples)
    torch.testing.assert_close(mapped, torch.stack([other(x, hx)[0] for x in samples]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    layer = make(num_layers=2)
    x, hx = inputs(layer, 3)
    expected = gradients(layer, x, hx)

    def flat(x, *hx):
        output, last = layer(x, hx)
        return output, *last

    def checkpointed(x, hx):
        output, *last = checkpoint(flat, x, *hx, use_reentrant=reentrant)
        return output, last

    checkpointed.parameters = layer.parameters
    for got, right in zip(gradients(checkpointed, x, hx), expected, strict=True):
        torch.testing.assert_close(got, right)


def test_weights_given_other_data_before_the_backward():
    layer = make()
    x, hx = inputs(layer, 3)
    output, _ = layer(x, hx)
    expected = torch.autograd.grad(output.square().sum(), [*layer.parameters()])
    output, _ = layer(x, hx)
    for weight in layer.parameters():
        weight.data = torch.full_like(weight, torch.nan)
    for got, right in zip(torch.autograd.grad(output.square().sum(), [*layer.parameters()]), expected, strict=True):
        torch.testing.assert_close(got, right)


def test_stacks_run_one_layer_after_the_other(fresh_compiler, monkeypatch):
    """Also where others run at once, as a layer's input is the projection of the one below."""
    monkeypatch.setattr(sequences, "WAVEFRONT_DEVICES", ("cpu",))
    monkeypatch.setattr(sequences, "layers_at_once", lambda *_: 2)
    layer = make(num_layers=2)
    x, hx = inputs(layer, 3)
    assert_gradients_close(layer, twin(layer), x, hx)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_results_close(compiled(x, hx), twin(layer)(x, hx), 1e-13)


@by("as planned")
@pytest.mark.parametrize("bias", [True, False])
def test_calls_that_torch_runs(bias):
    """With few steps; also with a state, a single step, unbatched and packed."""
    layer = make(num_layers=2, bias=bias)
    other = twin(layer)
    x, hx = inputs(layer, 4, length=9)
    assert not layer.plan(4, steps=9).has_kernel
    for call in ((x,), (x, hx), (x[:1], hx), (x[:, 0],), (pack_sequence([x[:7, 0], x[:3, 1]]),)):
        assert_results_close(layer(*call), other(*call), 1e-12)
        with torch.no_grad():
            assert_results_close(layer(*call), other(*call), 1e-12)


@by("as planned")
@pytest.mark.parametrize("frozen", [True, False])
def test_steps(frozen):
    layer = make(num_layers=2)
    x, _ = inputs(layer, 4)
    stepper = ostinato.Stepper(layer, 4, frozen=frozen)
    torch.testing.assert_close(torch.stack([stepper(x_t) for x_t in x]), twin(layer)(x)[0])


@pytest.mark.parametrize("options", OPTIONS[1:3], ids=str)
def test_compiled(options, fresh_compiler):
    """As one operator a layer, for any number of steps."""
    layer, graphs = make(**options), []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        compiled.parameters = layer.parameters
        for x, hx in (inputs(layer, 3, 7), (inputs(layer, 3, 9)[0], None), inputs(layer, 6, 7, packed=True)):
            expected = gradients(layer, x, hx)
            assert_results_close(compiled(x, hx), layer(x, hx), 1e-13)
            for got, right in zip(gradients(compiled, x, hx), expected, strict=True):
                torch.testing.assert_close(got, right)
    for graph in graphs:
        assert len([node for node in graph.graph.nodes if "recurrent_layer" in str(node.target)]) == 2


def test_errors():
    layer = make()
    x, hx = inputs(layer, 4)
    with pytest.raises(ValueError, match="proj_size must be 0"):
        ostinato.prune(layer, 0.5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'proj_size'"):
        ostinato.GRU(5, 16, proj_size=8)
    with pytest.raises(RuntimeError, match=r"Expected hidden\[0\] size \(1, 4, 6\), got \[1, 4, 16\]"):
        layer(x, (hx[1], hx[1]))
    layer.weight_hr_l0 = nn.Parameter(layer.weight_hr_l0[:, :3].detach())
    with pytest.raises(ValueError, match=r"weight_hr_l0 must have shape \(6, 16\); got \(6, 3\)"):
        layer(x)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_simulated_graphs(options, monkeypatch):
    simulate(monkeypatch, 100)
    monkeypatch.setattr(sequences, "worth_capturing", lambda *_: True)
    layer = make(**options)
    other = twin(layer)
    for seed in range(3):
        torch.manual_seed(seed)
        x, hx = inputs(layer, 3)
        assert_gradients_close(layer, other, x + seed, hx)
        assert_results_close(layer(x, hx), other(x, hx), 1e-13)
    assert kept._kept.replays > 2


GPU_TOLERANCE = {torch.float32: 3e-3, torch.bfloat16: 0.03, torch.float16: 4e-3}  # tf32


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", GPU_TOLERANCE, ids=str)
def test_gpu(dtype, options):
    for hidden, projected in ((96, 40), (37, 5)):
        layer = make(24, hidden, projected, dtype=dtype, **options).cuda()
        assert_uses_kernel(layer)
        exact = twin(layer).double()
        for (batch, packed), with_state in itertools.product(SHAPES, (False, True)):
            x, hx = inputs(layer, batch, 33, packed, device="cuda")
            hx = hx if with_state else None
            wide = x.to(torch.float64), None if hx is None else tuple(y.double() for y in hx)
            assert_close_to_exact(layer(x, hx), exact(*wide), GPU_TOLERANCE[dtype])
            for got, right in zip(gradients(layer, x, hx), gradients(exact, *wide), strict=True):
                scale = right.abs().max().clamp(min=1)
                assert (got.double() - right).abs().max() <= 2 * GPU_TOLERANCE[dtype] * scale


@pytest.mark.gpu
def test_gpu_graphs(soon):
    layer = make(64, 128, 32, dtype=torch.float32, num_layers=2).cuda()
    x = torch.randn(20, 4, 64, device="cuda")
    first = gradients(layer, x)
    for _ in range(3):
        for got, right in zip(gradients(layer, x), first, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-4)
    assert kept._kept.replays > 0


@pytest.mark.gpu
def test_gpu_compiled(fresh_compiler):
    layer = make(24, 64, 16, dtype=torch.bfloat16, num_layers=2).cuda()
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        compiled.parameters = layer.parameters
        for length in (20, 31):
            x, hx = inputs(layer, 4, length, device="cuda")
            assert_results_close(compiled(x, hx), layer(x, hx), 0.02)
            for got, right in zip(gradients(compiled, x, hx), gradients(layer, x, hx), strict=True):
                assert (got - right).abs().max() <= 0.02 * right.abs().max().clamp(min=1)
