"""RNN, GRU and LSTM in ``torch.compile``, by themselves and inside of models."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import ostinato
from ostinato.kernels.persistent import cpu
from ostinato.recurrent import sequences, steps
from recurrent_layers import assert_results_close, by, flat, forget_calls, gradients, inputs, make, pruned

F32, F64 = torch.float32, torch.float64
STACKED = {"num_layers": 2, "bidirectional": True, "batch_first": True}


@by("the CPU's")
@pytest.mark.parametrize(
    ("cell", "dtype", "options"),  # whose loops others compile, too
    [
        *(("RNN", F64, {}), ("GRU", F64, {}), ("LSTM", F32, {})),
        *(("relu", F64, STACKED), ("LSTM", F32, STACKED)),
    ],
)
def test_compiled_in_one_graph(cell, dtype, options, fresh_compiler):
    """Which PyTorch allows for these classes where its ``allow_rnn`` says so."""
    torch.manual_seed(0)
    layer, tolerance = pruned(cell, 5, 16, dtype=dtype, **options), 1e-12 if dtype == F64 else 1e-6
    x, hx = inputs(layer, 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="allow_rnn"):
        compiled(x, hx)
    with torch._dynamo.config.patch(allow_rnn=True):
        for ours, expected in zip(gradients(compiled, x, hx), gradients(layer, x, hx), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)
        with torch.no_grad():
            assert_results_close(compiled(x, hx), layer(x, hx), tolerance)


@pytest.mark.parametrize("shape", [(4, 0, 5), (0, 2, 5)])
@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_compiled_without_sequences_or_steps(cell, shape, fresh_compiler):
    """Where oneDNN, which PyTorch's compiler takes for an LSTM, divides by zero."""
    layer, x = make(cell, 5, 8, 2, bidirectional=True), torch.zeros(shape)
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert_results_close(compiled(x), layer(x), 0)
        output, *last = flat(compiled(x))
        assert (output.shape, last[0].shape) == ((*shape[:2], 16), (4, shape[1], 8))
        found = torch.autograd.grad(sum(y.sum() for y in (output, *last)), layer.parameters())
        assert not any(map(torch.any, found))


@by("the CPU's")
@pytest.mark.parametrize("cell", [ostinato.GRU, ostinato.MinGRU, ostinato.SRU])
def test_compiled_packed_sequences(cell, fresh_compiler):
    """Of any lengths in one graph.  Beyond what sizes and orders that do not fit say, kernels would read and write."""
    torch.manual_seed(0)
    layer, x = cell(5, 8), torch.randn(6, 5)
    with torch._dynamo.config.patch(allow_rnn=True, capture_scalar_outputs=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for sizes in ([3, 2, 1], [4, 2], [2, 2, 2], [3, 1, 1, 1]):
            packed = PackedSequence(x, torch.tensor(sizes))
            assert_results_close(compiled(packed), layer(packed), 1e-6)
        for sizes in ([2, 4], [1, 900], [3, 2], [4, 4, 4], [-1, 7]):
            with pytest.raises(RuntimeError, match="batch_sizes must be positive, never rise, and add up to the rows"):
                compiled(PackedSequence(x, torch.tensor(sizes)))
        with pytest.raises(RuntimeError, match=r"input\.sorted_indices must have an index for each sequence"):
            compiled(PackedSequence(x, torch.tensor([3, 3]), torch.tensor([0]), torch.arange(3)))


@by("the CPU's")
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "MinGRU", "SRU"])
def test_compiled_packed_sequences_with_a_state(kind, fresh_compiler):
    """In one graph, in which no shape of a state can be compared with how many sequences there are."""
    torch.manual_seed(0)
    layer = getattr(ostinato, kind)(5, 8, 2, bidirectional=True)

    def drawn(*shape):
        return tuple(torch.randn(shape) for _ in range(2)) if kind == "LSTM" else torch.rand(shape)

    with torch._dynamo.config.patch(allow_rnn=True, capture_scalar_outputs=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for lengths in ([3, 1, 4], [2, 2], [5, 4, 3, 1]):
            padded = torch.randn(max(lengths), len(lengths), 5)
            packed = pack_padded_sequence(padded, torch.tensor(lengths), enforce_sorted=False)
            hx = drawn(4, len(lengths), 8)
            assert_results_close(compiled(packed, hx), layer(packed, hx), 1e-6)
        for batch in (3, 5):
            with pytest.raises(RuntimeError, match="hx must have a state for each sequence of input"):
                compiled(packed, drawn(4, batch, 8))
        for shape in ((4, 4, 7), (3, 4, 8), (4, 8)):  # which are ours to raise: PyTorch 2.11 leaves out what they say
            with pytest.raises(torch._dynamo.exc.Unsupported, match="exception"):
                compiled(packed, drawn(*shape))


@by("as planned")
def test_compiled_layers_take_a_kernel_where_torchs_would_be_faster(fresh_compiler, monkeypatch):
    """Which are no operators of a graph: else a layer would be a loop over time."""
    layer, x, calls = make("LSTM", 5, 8), torch.randn(3, 30, 5), []
    assert not layer.plan(30, steps=3).has_kernel
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *args: calls.append(args) or forward(*args))
    with torch._dynamo.config.patch(allow_rnn=True), torch.no_grad():
        expected = layer(x)
        assert not calls
        assert_results_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), expected, 1e-6)
    assert len(calls) == 1


@by("the CPU's")
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("name", ["weight_hh_l0", "bias_hh_l0"])
def test_compiled_with_a_parameter_of_another_shape(kind, name, fresh_compiler):
    layer, x = make(kind, 5, 8), torch.randn(20, 2, 5)
    other = getattr(layer, name).detach().repeat_interleave(2, -1)
    setattr(layer, name, nn.Parameter(other))
    with torch._dynamo.config.patch(allow_rnn=True), pytest.raises(ValueError, match=f"{name} must have shape"):
        torch.compile(layer, backend="aot_eager")(x)


def test_compiled_in_torchs_kernels_with_the_weights_of_the_call(fresh_compiler):
    """As in float64 under autocast, which leaves it as it is."""
    torch.manual_seed(0)
    layer, x = ostinato.LSTM(5, 8, dtype=F64), torch.randn(4, 2, 5, dtype=F64)
    nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")

    def scaled(x):
        weights = {name: 1.5 * parameter for name, parameter in layer.named_parameters()}
        return functional_call(layer, weights, (x,))[0].square().sum()

    with torch._dynamo.config.patch(allow_rnn=True), torch.autocast("cpu"):
        for _ in range(2):
            losses = scaled(x), torch.compile(scaled, fullgraph=True, backend="aot_eager")(x)
            expected, got = (torch.autograd.grad(loss, list(layer.parameters())) for loss in losses)
            torch.testing.assert_close((losses[1], got), (losses[0], expected), rtol=1e-11, atol=1e-12)
            with torch.no_grad():
                layer.parametrizations.weight_hh_l0.original0.mul_(2.0)


class Policy(nn.Module):
    """A layer that is called one step at a time, between others."""

    def __init__(self):
        super().__init__()
        self.encoder, self.memory = nn.Linear(5, 5), make("GRU", 5, 32)

    def forward(self, x):
        y, state = self.memory.step(self.encoder(x))
        return self.memory.step(y[:, :5].contiguous(), state)


@by("the CPU's")
@pytest.mark.parametrize(
    ("make_model", "shape", "kernel", "calls"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 5), make("GRU", 5, 32)), (20, 2, 5), (sequences, "recurrent_layer"), 1),
        (Policy, (2, 5), (steps, "step_of_layers"), 2),
    ],
)
def test_a_model_compiled_around_a_layer_uses_its_kernels(
    make_model, shape, kernel, calls, monkeypatch, fresh_compiler
):
    """Without the compiler, which would follow their import too."""
    followed, model, x, run = [], make_model(), torch.randn(shape), getattr(*kernel)
    with torch.no_grad():
        expected = model(x)
        forget_calls(monkeypatch)

        def seen(function):
            return lambda *args: followed.append(torch.compiler.is_compiling()) or function(*args)

        replaced: Any = seen(run)
        if hasattr(run, "prepared"):  # an eager call's
            replaced.prepared = seen(run.prepared)
        monkeypatch.setattr(*kernel, replaced)
        assert_results_close(torch.compile(model, backend="eager")(x), expected, 1e-6)
    assert followed == [False] * calls
