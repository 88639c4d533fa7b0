"""RNN, GRU and LSTM one step at a time."""

import re
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import ostinato
from comparisons import same_bits
from ostinato.recurrent.cells import step_by_cells
from ostinato.recurrent.gradients import differentiable
from recurrent_layers import (
    CELLS,
    Stopped,
    assert_gradients_close,
    assert_results_close,
    by,
    flat,
    inputs,
    make,
    pruned,
    twin,
)
from threads import in_threads


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
    assert_results_close((torch.cat(outputs), hx), (output, last), 1e-6)


@by("as planned")
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"num_layers": 2, "bias": False}])
def test_a_few_steps_on_a_cpu_are_taken_one_by_one(cell, options, monkeypatch):
    """Where no gradient is wanted, nor anything else that a step does not do."""
    torch.manual_seed(0)
    layer = make(cell, 5, 37, **options)
    other, (x, hx), taken = twin(layer), inputs(layer, 3, 4), []
    step = type(layer)._fast_step
    monkeypatch.setattr(type(layer), "_fast_step", lambda self, *args: taken.append(1) or step(self, *args))
    expected = other(x, hx)
    assert layer(x, hx)[0].requires_grad
    layer.requires_grad_(False)
    assert layer(x.clone().requires_grad_(), hx)[0].requires_grad
    assert not taken
    assert_results_close(layer(x, hx), other(x, hx), 1e-6)
    assert len(taken) == 4
    taken.clear()
    with torch.no_grad():
        assert layer.plan(3, steps=4).reason == "each of 4 steps reads the weights where they are"
        few = r"oneDNN's LSTM, .*" if cell == "LSTM" else r"weights are worth preparing for \d+ steps or more"
        assert re.fullmatch(few, layer.plan(300, steps=1).reason)
        for given in ((hx,), ()):
            output, last = layer(x, *given)
            assert_results_close((output, last), other(x, *given), 1e-6)
            assert output.stride() == expected[0].stride()
        assert len(taken) == 8
        one = x[0] if layer.batch_first else x[:, 0]
        assert_results_close(layer(one), other(one), 1e-6)
        assert len(taken) == 12
        assert_results_close(layer(x, resets=torch.zeros(x.shape[:2], dtype=torch.bool)), other(x), 1e-6)
        none = x[:0] if layer.batch_first else x[:, :0]
        assert [y.shape for y in flat(layer(none))] == [y.shape for y in flat(other(none))]
        layer(x.repeat_interleave(20, 1 if layer.batch_first else 0))
        assert len(taken) == 12


@by("as planned")
@pytest.mark.parametrize(
    ("cell", "block", "hidden"),  # each product, which differ by blocks and sizes, once: they know nothing of cells
    [("GRU", (1, 1), 37), ("GRU", (8, 4), 48), ("LSTM", (16, 1), 37), ("RNN", (8, 4), 37), ("relu", (16, 1), 48)],
)
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
        assert layer._fast_step(x[0], hx, x.dim() - 1) is not None
        before = [state.clone() for state in flat((x, hx))]
        assert_results_close(layer(x[:1]), other(x[:1]), 1e-13)
        ours, theirs = hx, hx
        for x_t in x:
            y, ours = layer(x_t[None], ours)
            z, theirs = other(x_t[None], theirs)
            assert_results_close((y, ours), (z, theirs), 1e-13)
        assert same_bits(before, flat((x, hx)))
        assert (exact(x, hx)[0][-1] - y[0]).abs().max() > 1e-4


def not_contiguous(hx):
    return tuple(map(not_contiguous, hx)) if isinstance(hx, tuple) else hx.mT.contiguous().mT


@by("as planned")
@pytest.mark.parametrize("block", [(1, 1), (16, 1)])
def test_pruned_layers_one_step_of_many_sequences(block):
    """All weights are read, with zeros: the kept ones alone would be read again for each sequence."""
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 37, 2, block=block, density=0.3, dtype=torch.float64)
    other, (x, hx) = twin(layer), inputs(layer, 16, 3)
    stepper = ostinato.Stepper(layer, 16, frozen=True)
    stepper.state = hx
    with torch.no_grad():
        for n in range(2):
            layer.get_parameter(f"weight_hh_l{n}")[~layer.get_buffer(f"mask_hh_l{n}")] = 7
        assert layer.plan(16, steps=1).path == "dense"
        assert layer._fast_step(x[0], hx, 2) is not None
        expected, _ = other(x, hx)
        for x_t, y in zip(x, expected, strict=True):
            ours, hx = layer.step(x_t, hx)
            torch.testing.assert_close(ours, y, rtol=0, atol=1e-13)
            torch.testing.assert_close(stepper(x_t), y, rtol=0, atol=1e-13)


@by("as planned")
@pytest.mark.parametrize("cell", CELLS)
def test_one_step_that_is_not_contiguous(cell):
    torch.manual_seed(0)
    layer = make(cell, 5, 16, 2, batch_first=True, dtype=torch.float64)
    other, (x, hx) = twin(layer), inputs(layer, 3)
    part, hx = x[:, 4:5], not_contiguous(hx)
    assert not part.is_contiguous()
    assert_gradients_close(layer, other, part, hx)
    assert type(layer(part, hx)[0].grad_fn).__name__.startswith("_Differentiable")
    stepper = ostinato.Stepper(layer, 3, frozen=True)
    stepper.state = hx
    with torch.no_grad():
        assert layer._fast_step(part, hx, 2) is not None
        assert_results_close(layer(part, hx), other(part, hx), 1e-12)
        for x_t, y in zip(x.unbind(1), other(x, hx)[0].unbind(1), strict=True):
            torch.testing.assert_close(stepper(not_contiguous(x_t)), y, rtol=0, atol=1e-12)


@by("as planned")
@pytest.mark.parametrize(
    ("block", "dtype"),  # whose loops others compile, too
    [((1, 1), torch.float64), ((16, 1), torch.float32), ((8, 4), torch.float64)],
)
def test_steps_in_several_threads_have_the_bits_of_one(block, dtype):
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 48, block=block, dtype=dtype)
    xs, results = torch.randn(4, 200, 1, 1, 5, dtype=dtype), {}

    def walk(name, sequence):
        hx = torch.zeros(1, 1, 48, dtype=dtype)
        with torch.no_grad():
            for x in sequence:
                hx = layer(x, hx)[1]
        results[name] = hx

    in_threads(walk, range(len(xs)), xs)
    for i, x in enumerate(xs):
        walk("alone", x)
        assert torch.equal(results[i], results["alone"])


@by("as planned")
def test_a_hole_that_a_mask_has_on_the_diagonal_of_a_block():
    torch.manual_seed(0)
    layer = pruned("GRU", 5, 48, block=(8, 4), density=0.3, dtype=torch.float64)
    layer.mask_hh_l0 &= ~torch.eye(48, dtype=torch.bool).repeat(3, 1)
    x, hx = inputs(layer, 1, 1)
    with torch.no_grad():
        other = twin(layer)
        other.weight_hh_l0 *= layer.mask_hh_l0
        assert layer.plan(1, steps=1).path == "block"
        assert (layer(x, hx)[0] - twin(layer)(x, hx)[0]).abs().max() > 1e-6
        assert_results_close(layer(x, hx), other(x, hx), 1e-6)


@by("as planned")
def test_one_step_with_a_state_that_is_not_finite():
    layer = pruned("GRU", 5, 48)
    x, hx = inputs(layer, 1, 1)
    hx[0, 0, 3] = torch.inf
    with torch.no_grad():
        assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-6)


@by("as planned")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("batch", [None, 1, 3, 20])
@pytest.mark.parametrize("cell", CELLS)
def test_one_step_with_gradients(cell, batch, device):
    torch.manual_seed(0)
    for options in ({}, {"num_layers": 2, "bias": False, "batch_first": True}):
        layer = make(cell, 5, 16, **options, device=device, dtype=torch.float64)
        other = twin(layer)
        x, hx = inputs(layer, batch, 1, device=device)
        given = [None, hx, (hx[0],) * 2 if cell == "LSTM" else hx]
        if batch is not None:
            assert_results_close(layer(x, not_contiguous(hx)), layer(x, hx), 1e-12)
            if device == "cpu":  # cuDNN takes no such states
                given.append(not_contiguous(hx))
        for state in given:
            for _ in range(2):  # validated, then prepared
                assert_results_close(layer(x, state), other(x, state), 1e-12)
                assert_gradients_close(layer, other, x, state)
                with torch.no_grad():
                    assert_results_close(layer(x, state), other(x, state), 1e-12)
            output, *last = flat(layer(x, state))
            before = [h.clone() for h in last]
            output.detach().zero_()
            assert same_bits(last, before)
        assert type(layer(x, hx)[0].grad_fn).__name__.startswith("_Differentiable") == (device == "cuda" or batch != 20)


@by("as planned")
@pytest.mark.parametrize("cell", CELLS)
def test_many_gradients_of_one_step_at_once(cell):
    torch.manual_seed(0)
    layer = make(cell, 5, 4, dtype=torch.float64)
    other, (x, hx) = twin(layer), inputs(layer, 2, 1)
    rows = torch.eye(8, dtype=torch.float64).view(8, 1, 2, 4)
    (output, *_), (expected, *_) = (flat(module(x, hx)) for module in (layer, other))
    ours = torch.autograd.grad(output, list(layer.parameters()), rows, is_grads_batched=True)
    for row in range(8):
        theirs = torch.autograd.grad(expected, list(other.parameters()), rows[row], retain_graph=True)
        for found, one in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found[row], one, rtol=0, atol=1e-12)


@by("as planned")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_one_step_in_a_checkpoint(cell, reentrant):
    """One that is not reentrant lets the backward read what was saved only once."""
    layer, x = make(cell, 5, 4), torch.randn(2, 5, requires_grad=True)
    leaves, grads = [x, *layer.parameters()], []
    for y in (layer.step(x)[0], checkpoint(lambda x: layer.step(x)[0], x, use_reentrant=reentrant)):
        assert reentrant or type(y.grad_fn).__name__.startswith("_Differentiable")
        for leaf in leaves:
            leaf.grad = None
        y.square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    assert same_bits(*grads)


@by("as planned")
@pytest.mark.parametrize("cell", CELLS)
def test_a_compiled_backward_of_a_step(cell, fresh_compiler):
    layer, x = make(cell, 5, 4), torch.randn(2, 5, requires_grad=True)
    leaves = [x, *layer.parameters()]
    expected = torch.autograd.grad(layer.step(x)[0].square().sum(), leaves)
    loss = layer.step(x)[0].square().sum()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(torch.Tensor.backward, backend="aot_eager")(loss)
    for leaf, grad in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, grad)


@by("as planned")
@pytest.mark.parametrize("cell", CELLS)
def test_a_kernels_step_has_the_gradients_of_another(cell):
    """As few sequences take one on a GPU."""
    torch.manual_seed(0)
    layer = make(cell, 5, 16, num_layers=2, dtype=torch.float64)
    x, hx = inputs(layer, 3, 1)
    states, weights, shapes = flat((x, hx))[1:], list(layer.parameters()), ((1, 3, 16), (2, 3, 16))
    cells = step_by_cells(layer.mode, 2, *shapes)
    with torch.no_grad():
        kernel = layer._prepared_step(x, hx, weights, 2)
    saving = kernel.with_saved if x.is_cpu else kernel
    for leaves in ([x, *states, *weights], [x, *states[:1] * len(states), *weights]):
        leaves = [leaf.requires_grad_() for leaf in leaves]
        split = 1 + len(states)
        results = []
        for step in (differentiable(layer.mode, saving, cells, weights, len(x)), cells):
            output, new = step(leaves[0], leaves[1:split], leaves[split:])
            loss = (output * output).sum() + sum(y.sum() for y in new[-1:])
            first = torch.autograd.grad(loss, leaves, create_graph=True)
            second = torch.autograd.grad(first[0].square().sum(), weights, allow_unused=True)
            results.append([output, *new, *first, *(y for y in second if y is not None)])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        unused = torch.autograd.grad(Stopped.apply(results[0][0]).sum(), weights, allow_unused=True)
        assert unused == (None,) * len(weights)


CAPTURED = """
import torch, ostinato
torch.set_default_dtype(torch.float64)  # cuDNN rounds float32 to tf32
layer, x = ostinato.{cell}(16, 32, num_layers=2).cuda(), torch.randn(50_000, 16, device="cuda")
state = layer.initial_state(50_000)
with torch.no_grad():
    want, _ = layer.step(x, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = layer.step(x, state)
graph.replay()
torch.testing.assert_close(y, want)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_a_step_is_captured_where_cublas_was_not_used_before(cell):
    """In a new process: the step before the capture, too large for one kernel, is cuDNN's, without a cuBLAS handle."""
    subprocess.run([sys.executable, "-c", CAPTURED.format(cell=cell)], check=True)


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
def test_a_step_names_what_is_wrong_with_a_state(cell):
    layer, x, h = getattr(ostinato, cell)(4, 8), torch.randn(2, 4), torch.zeros(1, 2, 8)
    right, others = ((h, h), (h, [h])) if cell == "LSTM" else (h, ((h,), (h, h), [h, h.clone()]))
    layer.step(x, right)
    layer.step(x)
    for wrong in (*others, (), []):  # also where what was prepared for a right one takes the same tensors
        with pytest.raises(TypeError, match="state must be a t"):
            layer.step(x, wrong)
    for shape in ((2, 8), (1, 3, 8), (1, 2, 9), (2, 2, 8)):
        state = torch.zeros(shape)
        with pytest.raises(ValueError, match=r"state must have shape \(1, 2, 8\); got \("):
            layer.step(x, (h, state) if cell == "LSTM" else state)
    with pytest.raises(ValueError, match=r"state must have shape \(1, 8\); got \(1, 1, 8\)"):
        layer.step(x[0], (h[:, :1], h[0]) if cell == "LSTM" else h[:, :1])
