"""Helpers of tests of RNN, GRU and LSTM: layers, ``torch.nn``'s with the same weights, inputs, comparisons, kernels."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import ostinato
from ostinato.kernels.operators.eager import Prepared
from ostinato.kernels.persistent import backends, cpu
from ostinato.kernels.persistent.plan import Plan, no_kernel
from ostinato.recurrent import sequences, steps

CELLS = {"RNN": {}, "relu": {"nonlinearity": "relu"}, "GRU": {}, "LSTM": {}}
BLOCKS = [(1, 1), (16, 1), (8, 4)]
OPTIONS = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"num_layers": 2, "bias": False, "batch_first": True},
    {"bidirectional": True, "batch_first": True},
]
# Batch, and whether it is packed.  On a CPU these are one sequence, and full and partial tiles of four sequences.
SHAPES = [(1, False), (5, False), (None, False), (6, True)]


class Stopped(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def use_kernels(monkeypatch, module):
    """Use a module's kernels on any device, for all calls that they can compute, faster or not."""

    def make_plan(call, mask_hh, block, *_):
        if module is cpu and call.dtype not in (torch.float32, torch.float64):
            return no_kernel("another dtype")
        path = "dense" if block is None or mask_hh.all() else "sparse" if block == (1, 1) else "block"
        return Plan(path, reason="a test", geometry=block)

    stand_in = SimpleNamespace(**(vars(module) | {"make_plan": make_plan}))
    monkeypatch.setattr(backends, "_kernels_on", lambda device_type: stand_in)
    backends._plan_dense.cache_clear()
    forget_calls(monkeypatch)


def forget_calls(monkeypatch):
    """Empty the caches of checked and planned calls, until the end of the test."""
    monkeypatch.setattr(sequences, "_CALLS", Prepared())
    monkeypatch.setattr(steps, "_STEPS", Prepared())


def by(*which):
    """Mark a test in ``recurrent/`` to run with these kernels."""
    return pytest.mark.parametrize("kernels", which, indirect=True)


def make(cell, *args, where=ostinato, **options):
    return getattr(where, "RNN" if cell == "relu" else cell)(*args, **CELLS[cell], **options)


def pruned(cell, *args, density=0.06, block=(16, 1), keep_diagonal=False, **options):
    layer = make(cell, *args, **options)
    return ostinato.prune(layer, density, block=block, keep_diagonal=keep_diagonal)


def twin(layer):
    """Return the ``torch.nn`` layer with the same weights."""
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
        **({"proj_size": layer.proj_size} if layer.proj_size else {}),
        device=layer.weight_hh_l0.device,
        dtype=layer.weight_hh_l0.dtype,
        **options,
    )
    other.load_state_dict(layer.state_dict(), strict=False)
    return other.train(layer.training)


def flat(result):
    """List all tensors of ``output, hidden``."""
    output, hidden = result
    output = output.data if isinstance(output, torch.nn.utils.rnn.PackedSequence) else output
    return [output, *([hidden] if isinstance(hidden, torch.Tensor) else hidden)]


def assert_results_close(result, expected, tolerance):
    """Assert that results are close to another layer's, by absolute error, with NaN in the same places."""
    for ours, theirs in zip(flat(result), flat(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, equal_nan=True)


def assert_close_to_exact(result, expected, tolerance):
    """Assert that results are close to float64 ones, by absolute error."""
    for ours, exact in zip(flat(result), flat(expected), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=tolerance)


def assert_uses_kernel(layer, batch=1, dtype=None):
    assert layer.plan(batch, dtype).path in ("sparse", "block", "dense")


def inputs(layer, batch, length=12, packed=False, device="cpu"):
    """Draw an input and initial state; a batch of None is unbatched."""
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
    h = states[0][..., : layer.proj_size or None]
    return x, (h, states[1]) if isinstance(layer, nn.LSTM) else h


def leaves(layer, x, hx):
    """List the tensors that have gradients: input, states and parameters."""
    states = [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
    return [x.data if isinstance(x, PackedSequence) else x, *states, *layer.parameters()]


def gradients(layer, x, hx=None, which=slice(None)):
    """Return the gradients of input, states and parameters, by a random linear combination of a call's results."""
    generator = torch.Generator().manual_seed(2)
    inputs = leaves(layer, x, hx)
    for tensor in inputs:
        tensor.requires_grad_()
        tensor.grad = None
    results = flat(layer(x, hx))[which]
    factors = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in results]
    sum((y * factor).sum() for y, factor in zip(results, factors, strict=True)).backward()
    return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in inputs]


def fit(module, x):
    """Train a module on some batches."""
    optimizer = torch.optim.AdamW(module.parameters(), 0.05)
    for batch in x:
        optimizer.zero_grad()
        module(batch)[0].square().mean().backward()
        optimizer.step()


def assert_gradients_close(layer, other, *call, tolerance=1e-11, **options):
    """Assert that gradients are close to those of ``torch.nn``'s layer, and zero where a weight is pruned."""
    pairs = list(zip(gradients(layer, *call, **options), gradients(other, *call, **options), strict=True))
    names = [name for name, _ in layer.named_parameters()]
    masks = [None] * (len(pairs) - len(names)) + [layer._buffers.get(name.replace("weight", "mask")) for name in names]
    for (ours, theirs), mask in zip(pairs, masks, strict=True):
        expected = theirs if mask is None else theirs.masked_fill(~mask, 0)
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
        assert mask is None or not ours[~mask].any()
