"""The CPU's loops of one step of RNN, GRU and LSTM layers, and of its gradients, against torch's cells in float64."""

import itertools

import pytest
import torch

from comparisons import same_bits
from ostinato.kernels.persistent import cpu
from ostinato.kernels.persistent.cpu.step_matrices import MOST_SEQUENCES
from ostinato.kernels.persistent.plan import GATES
from ostinato.recurrent.cells import step_by_cells
from recurrent_layers import flat

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6}
# Sequences, inputs, units: whole vectors of inputs, rows read at once and groups of units, and with some left over.
SIZES = ((1, 33, 5), (1, 128, 64), (2, 16, 130), (3, 1, 1), (9, 45, 70), (16, 130, 96))


def tensors(cell, batch, inputs, units, dtype, layers=1, bias=True):
    """An input, the states of all layers, and weights."""
    states, weights, rows = (
        [torch.randn(layers, batch, units) for _ in range(1 + (cell == "lstm"))],
        [],
        GATES[cell] * units,
    )
    for width in (inputs, *[units] * (layers - 1)):
        weights += [torch.randn(rows, columns) / units**0.5 for columns in (width, units)]
        weights += [torch.randn(rows) for _ in range(2 * bias)]
    return [x.to(dtype) for x in (torch.randn(batch, inputs), *states, *weights)], 1 + len(states)


def step_of(cell, x, states):
    """A step of dense layers, given an input and states."""
    (layers, batch, units), sizes = states[0].shape, [x.shape[1], *[states[0].shape[2]] * (len(states[0]) - 1)]
    steps = [cpu.step_of(cell, x.dtype, units, inputs, batch, None, None, None) for inputs in sizes]
    assert None not in steps
    return cpu.StepOfLayers(steps, x, (layers, batch, units), len(states))


def cells_of(cell, states):
    layers, batch, units = states[0].shape
    return step_by_cells(cell.upper(), layers, (batch, units), (layers, batch, units))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cell", GATES)
def test_against_float64(cell, dtype):
    torch.manual_seed(0)
    for sizes, bias in itertools.product((*SIZES, (MOST_SEQUENCES[dtype] - 1, 20, 24)), (True, False)):
        all_of_it, split = tensors(cell, *sizes, dtype, bias=bias)
        x, *states = all_of_it[:split]
        weights = all_of_it[split:]
        for given in (states, []):
            y, new = step_of(cell, x, states)(x, given, weights)
            exact = cells_of(cell, states)(x.double(), [s.double() for s in given], [w.double() for w in weights])
            for ours, theirs in zip((y, *new), (exact[0], *exact[1]), strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_depend_neither_on_other_sequences_nor_on_threads(monkeypatch, dtype):
    torch.manual_seed(0)
    (x, h, *weights), _ = tensors("gru", 9, 130, 150, dtype)
    upstream, needed = (torch.randn(9, 150, dtype=dtype), None), [True] * 6
    results = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        cpu.step._make.cache_clear()
        y, new, saved = step_of("gru", x, [h]).with_saved(x, [h], weights)
        results.append([y, *new, *cpu.gradients_of_step("gru", x, [h], weights, saved, upstream, needed)])
    cpu.step._make.cache_clear()
    assert same_bits(*results)
    for b in range(9):
        own, first = x[b : b + 1], h[:, b : b + 1].clone()
        assert torch.equal(step_of("gru", own, [first])(own, [first], weights)[0], y[b : b + 1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cell", GATES)
def test_gradients_against_float64(cell, dtype):
    torch.manual_seed(0)
    for sizes, layers, bias in ((SIZES[0], 1, True), (SIZES[4], 2, True), (SIZES[2], 2, False)):
        leaves, split = tensors(cell, *sizes, dtype, layers, bias)
        x, *states = leaves[:split]
        weights = leaves[split:]
        output, new, saved = step_of(cell, x, states).with_saved(x, states, weights)
        exact = [leaf.double().requires_grad_() for leaf in leaves]
        y, last = cells_of(cell, states)(exact[0], exact[1:split], exact[split:])
        results = [y, *last]
        assert same_bits((output, *new), flat(step_of(cell, x, states)(x, states, weights)))
        upstream = [torch.randn_like(result) for result in (output, *new)]
        for which in itertools.product((True, False), repeat=len(results)):
            if not any(which):
                continue
            grads = [grad if given else None for grad, given in zip(upstream, which, strict=True)]
            needed = [bool(i % 3) or all(which) for i in range(len(leaves))]
            ours = cpu.gradients_of_step(cell, x, states, weights, saved, grads, needed)
            theirs = torch.autograd.grad(
                list(itertools.compress(results, which)),
                exact,
                [grad.double() for grad in itertools.compress(upstream, which)],
                retain_graph=True,
                materialize_grads=True,
            )
            for got, expected, wanted in zip(ours, theirs, needed, strict=True):
                assert (got is not None) == wanted
                if wanted:
                    scale = expected.abs().amax().clamp(min=1)
                    torch.testing.assert_close(got.double() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype])
