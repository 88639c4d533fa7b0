"""Recurrences with recurrent weights, against written-out loops over single sequences and steps, and torch.nn."""

import contextlib
import copy
import functools
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ostinato
import weighted_cells
from comparisons import TOLERANCE, assert_all_close, assert_close, same_bits
from ostinato.kernels.recurrence.weighted.operator import weighted_recurrence
from weighted_cells import CELLS, call, elman, gru, janet, peephole

BACKENDS = ["auto", "reference", "torch"]
WIDTH, STEPS = 3, 9


# Resets, reverse, boundaries of packed sequences, of which some have no steps, and whether there is an initial state.
LAYOUTS = {
    "plain": (False, False, None, True),
    "from zeros": (False, False, None, False),
    "reverse": (False, True, None, True),
    "resets": (True, False, None, True),
    "packed": (False, False, [0, 0, 4, 4, 5, 9], True),
    "packed, from zeros": (False, True, [0, 5, 9], False),
    "packed, reverse with resets": (True, True, [0, 4, 4, 8, 9, 9], True),
}


def loop(step, weight, arguments, h0, resets, reverse, bounds):
    """(states, last states), a tuple each, one sequence and one step after the other."""
    first = next(x for x in arguments if x.dim() == 3)
    batch, length, width = first.shape
    rows = [(b, 0, length) for b in range(batch)]
    if bounds is not None:
        rows = [(0, start, end) for start, end in itertools.pairwise(bounds)]
    outputs, lasts = [], []
    for n, (b, start, end) in enumerate(rows):
        state, states = tuple(x[n] for x in h0), {}
        for t in sorted(range(start, end), reverse=reverse):
            if resets is not None and resets[b, t]:
                state = tuple(torch.zeros_like(x) for x in state)
            of_step = [x[b, t] if x.dim() == 3 else x for x in arguments]
            for gate in range(len(weight) // width):
                of_step[gate] = of_step[gate] + weight[gate * width : (gate + 1) * width] @ state[0]
            state = states[t] = step(state, *of_step)
        outputs += [states[t] for t in range(start, end)]
        lasts.append(state)
    states = tuple(torch.stack(x).view(first.shape) for x in zip(*outputs, strict=True))
    return states, tuple(torch.stack(x) for x in zip(*lasts, strict=True))


def inputs(cell, batch=2, length=STEPS, width=WIDTH, sequences=None, dtype=torch.float64):
    """The same at every call."""
    torch.manual_seed(0)
    return weighted_cells.inputs(cell, batch, length, width, sequences, dtype)


def expected(cell, weight, arguments, h0, resets=None, reverse=False, bounds=None):
    """The same of :func:`loop`, from zeros if ``h0`` is empty."""
    function, step, *_ = CELLS[cell]
    count = next(len(x) for x in arguments if x.dim() == 3) if bounds is None else len(bounds) - 1
    h0 = h0 or [weight.new_zeros(count, weight.shape[1])] * function.states
    states, last = loop(step, weight, arguments, h0, resets, reverse, bounds)
    return *states, *last


def assert_equals_the_loop(cell, dtype, backend, layout, change=lambda x: x):
    """Results and every gradient; ``change`` makes what is given of the leaves."""
    resetting, reverse, bounds, starts = LAYOUTS[layout]
    batch, sequences = (2, None) if bounds is None else (1, len(bounds) - 1)
    weight, arguments, h0 = inputs(cell, batch, sequences=sequences, dtype=dtype)
    resets = torch.rand(STEPS, batch).t() < 0.3 if resetting else None
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    h0 = h0 if starts else []
    leaves = [weight, *arguments, *h0]
    given = [change(x) for x in leaves]
    split = 1 + len(arguments)
    options = {"resets": resets, "reverse": reverse, "cu_seqlens": cu_seqlens, "backend": backend}
    got = call(cell, given[0], given[1:split], given[split:], **options)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = expected(cell, exact[0], exact[1:split], exact[split:], resets, reverse, bounds)
    weights = [torch.randn_like(x).to(dtype) for x in want]
    grads = torch.autograd.grad(got, leaves, weights)
    of_loop = torch.autograd.grad(want, exact, [x.double() for x in weights], materialize_grads=True)
    # States that are rounded at every step, and by whose differences gradients are computed.
    tolerance = TOLERANCE[dtype] * (1 if dtype == torch.float64 else 2)
    assert_all_close((*got, *grads), [x.to(dtype) for x in (*want, *of_loop)], tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cell", CELLS)
def test_equals_a_loop_over_steps(cell, layout, backend):
    assert_equals_the_loop(cell, torch.float64, backend, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["plain", "packed, reverse with resets"])
@pytest.mark.parametrize("cell", ["peephole", "gru"])
def test_equals_a_loop_in_every_dtype(cell, layout, dtype):
    for backend in BACKENDS:
        assert_equals_the_loop(cell, dtype, backend, layout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["plain", "packed, reverse with resets"])
@pytest.mark.parametrize(("cell", "heads"), [("four states", 1), ("four states", 3), ("gru", 2), ("peephole", 6)])
def test_heads_equal_a_block_diagonal_matrix(cell, heads, layout, backend):
    resetting, reverse, bounds, _ = LAYOUTS[layout]
    torch.manual_seed(0)
    batch, sequences = (2, None) if bounds is None else (1, len(bounds) - 1)
    weight, arguments, h0 = weighted_cells.inputs(cell, batch, STEPS, 6, sequences, heads=heads)
    weight = weight.detach().view(heads, -1, 6 // heads).requires_grad_()
    options = {"resets": torch.rand(STEPS, batch).t() < 0.3 if resetting else None, "reverse": reverse}
    options |= {"backend": backend, "cu_seqlens": None if bounds is None else torch.tensor(bounds, dtype=torch.int32)}
    leaves, found = [weight, *arguments, *h0], []
    for matrix in (weight, weighted_cells.dense(weight, CELLS[cell][3])):
        results = call(cell, matrix, arguments, h0, **options)
        found.append([*results, *torch.autograd.grad(results, leaves, [y.detach().cos() for y in results])])
    assert_all_close(*found)


def test_heads_in_every_transform():
    torch.manual_seed(0)
    weight, arguments, h0 = weighted_cells.inputs("four states", 2, 5, 6, heads=2)
    leaves = [weight, *arguments, *h0]

    def results_of(*tensors, backend="auto"):
        return call("four states", tensors[0], tensors[1:5], tensors[5:], backend=backend)

    def loss(*tensors, backend="auto"):
        return sum(y.cos().sum() for y in results_of(*tensors, backend=backend))

    torch.autograd.gradcheck(results_of, leaves)
    everything = tuple(range(len(leaves)))
    want = torch.func.grad(functools.partial(loss, backend="torch"), everything)(*leaves)
    assert_all_close(torch.func.grad(loss, everything)(*leaves), want)
    tangents = tuple(map(torch.cos, leaves))
    moved = torch.func.jvp(loss, tuple(leaves), tangents)[1]
    assert_all_close([moved], [sum((g * d).sum() for g, d in zip(want, tangents, strict=True))])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert_all_close(torch.autograd.grad(compiled(*leaves), leaves), want)
    batched = torch.vmap(lambda w: loss(w, *leaves[1:]))(torch.stack([weight, 2 * weight]))
    assert_all_close([batched[1]], [loss(2 * weight, *leaves[1:])])
    joined = [torch.cat(x, -1).detach().float().requires_grad_() for x in (arguments, h0)]
    text = CELLS["four states"][0].traced(arguments)
    leaves = weight.detach().float().requires_grad_(), joined[0], joined[0].new_empty(0), joined[1]
    given = text, *leaves, None, None, False, "auto", True
    torch.library.opcheck(torch.ops.ostinato.weighted_recurrence.default, given)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.stack([x, -x], -1)[..., 0],
        lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
        lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
    ],
    ids=["channels apart", "transposed", "part of a row"],
)
@pytest.mark.parametrize("layout", ["plain", "packed, reverse with resets"])
def test_any_memory(layout, change):
    assert_equals_the_loop("peephole", torch.float64, "auto", layout, change)


def of_gates(layer, x):
    """The input's part of a layer of torch.nn, gate by gate, (B, T, D) each."""
    bias = layer.bias_ih_l0 + (0 if isinstance(layer, nn.GRU) else layer.bias_hh_l0)
    return F.linear(x, layer.weight_ih_l0, bias).chunk(len(layer.weight_hh_l0) // layer.hidden_size, -1)


@ostinato.recurrence
def lstm(state, i, f, g, o):
    _, c = state
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def as_rnn(layer, x, h0):
    h, h_last = elman(*of_gates(layer, x), weight_hh=layer.weight_hh_l0, h0=h0[0][0])
    return h, h_last


def as_gru(layer, x, h0):
    (r, z, n), (b_r, b_z, b_n) = of_gates(layer, x), layer.bias_hh_l0.chunk(3)
    return gru(r + b_r, z + b_z, b_n, n, weight_hh=layer.weight_hh_l0, h0=h0[0][0])


def as_lstm(layer, x, h0):
    (h, _), last = lstm(*of_gates(layer, x), weight_hh=layer.weight_hh_l0, h0=tuple(x[0] for x in h0))
    return h, *last


@pytest.mark.parametrize(("kind", "ours"), [(nn.RNN, as_rnn), (nn.GRU, as_gru), (nn.LSTM, as_lstm)])
def test_equals_the_layers_of_torch(kind, ours):
    torch.manual_seed(0)
    layer = kind(4, 5, batch_first=True).double()
    x = torch.randn(3, 7, 4, dtype=torch.float64, requires_grad=True)
    h0 = [torch.randn(1, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2 if kind is nn.LSTM else 1)]
    output, last = layer(x, tuple(h0) if kind is nn.LSTM else h0[0])
    want = (output, *(y[0] for y in (last if kind is nn.LSTM else (last,))))
    got, leaves = ours(layer, x, h0), [x, *h0, *layer.parameters()]
    weights = [torch.randn_like(y) for y in want]
    assert_all_close(got, want)
    assert_all_close(torch.autograd.grad(got, leaves, weights), torch.autograd.grad(want, leaves, weights))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", ["peephole", "gru"])
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0), (1, 1)])
def test_few_or_no_sequences_and_steps(batch, length, cell, backend):
    weight, arguments, h0 = inputs(cell, batch, length)
    leaves = [weight, *arguments, *h0]
    got = call(cell, weight, arguments, h0, backend=backend)
    grads = torch.autograd.grad(sum(y.sum() for y in got), leaves, materialize_grads=True)
    assert got[0].shape == (batch, length, WIDTH)
    if length == 1:
        exact = [x.detach().requires_grad_() for x in leaves]
        want = expected(cell, exact[0], exact[1 : 1 + len(arguments)], exact[1 + len(arguments) :])
        assert_all_close((*got, *grads), (*want, *torch.autograd.grad(sum(y.sum() for y in want), exact)))
        return
    assert same_bits(got[-len(h0) :], h0)
    # The last states are the initial ones, and depend on nothing else.
    wanted = [*map(torch.zeros_like, (weight, *arguments)), *map(torch.ones_like, h0)]
    assert same_bits(grads, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_channels(backend):
    weight, arguments, h0 = inputs("gru", width=0)
    for weights in (weight, weight[None], weight.expand(2, 0, 0)):
        got = call("gru", weights, arguments, h0, backend=backend)
        assert [y.shape for y in got] == [(2, STEPS, 0), (2, 0)]
    for weights in (weight.new_empty(0), weight.new_empty(1, 1, 1, 1), weight.new_empty(0, 0, 0)):
        with pytest.raises(ValueError, match=r"weight_hh must have shape \(G \* 0, 0\), or .* of 4 arguments; got"):
            call("gru", weights, arguments, h0, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_shapes_without_memory(backend):
    got = call("peephole", *weighted_cells.inputs("peephole", 2, 9, 3, device="meta"), backend=backend)
    assert [(y.shape, y.device.type) for y in got] == [((2, 9, 3), "meta")] * 2 + [((2, 3), "meta")] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_of_no_steps_alone(backend):
    weight, arguments, h0 = inputs("peephole", 1, 0, sequences=3)
    got = call("peephole", weight, arguments, h0, cu_seqlens=torch.zeros(4, dtype=torch.int32), backend=backend)
    assert [y.shape for y in got] == [(1, 0, WIDTH)] * 2 + [(3, WIDTH)] * 2
    assert same_bits(got[2:], h0)


@pytest.mark.parametrize("cell", CELLS)
def test_two_halves_with_the_state_carried_equal_the_whole(cell):
    weight, arguments, h0 = inputs(cell)
    count, whole = len(h0), call(cell, weight, arguments, h0)
    first = call(cell, weight, [x[:, :4] if x.dim() == 3 else x for x in arguments], h0)
    second = call(cell, weight, [x[:, 4:] if x.dim() == 3 else x for x in arguments], first[count:])
    joined = [torch.cat(halves, 1) for halves in zip(first[:count], second[:count], strict=True)]
    assert_all_close((*joined, *second[count:]), whole)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences_equal_those_called_alone(cell, reverse):
    bounds = [0, 2, 2, 7, 9]
    weight, arguments, h0 = inputs(cell, 1, sequences=4)
    packed = call(cell, weight, arguments, h0, reverse=reverse, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    alone = []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = [x[:, start:end] if x.dim() == 3 else x for x in arguments]
        alone.append(call(cell, weight, part, [x[n : n + 1] for x in h0], reverse=reverse))
    states, count = zip(*alone, strict=True), len(h0)
    joined = [torch.cat(parts, 1 if k < count else 0) for k, parts in enumerate(states)]
    assert_all_close(packed, joined)


def test_an_episode_after_a_reset_equals_one_called_alone():
    weight, arguments, _ = inputs("peephole")
    resets = torch.zeros(2, STEPS, dtype=torch.bool)
    resets[:, 5] = True
    whole = call("peephole", weight, arguments, [], resets=resets)
    parts = [[x[:, of] if x.dim() == 3 else x for x in arguments] for of in (slice(0, 5), slice(5, None))]
    first, second = (call("peephole", weight, part, []) for part in parts)
    assert_all_close(whole[:2], [torch.cat(x, 1) for x in zip(first[:2], second[:2], strict=True)])
    assert_all_close(whole[2:], second[2:])


def test_frozen_tensors_have_no_gradients_and_change_no_others():
    weight, arguments, h0 = inputs("gru")
    leaves = [weight, *arguments, *h0]
    weights = [torch.randn_like(y) for y in call("gru", weight, arguments, h0)]
    every = torch.autograd.grad(call("gru", weight, arguments, h0), leaves, weights)
    for frozen in range(len(leaves)):
        given = [x.detach().requires_grad_(k != frozen) for k, x in enumerate(leaves)]
        results = call("gru", given[0], given[1:5], given[5:])
        torch.autograd.backward(results, weights)
        assert given[frozen].grad is None
        assert same_bits([x.grad for k, x in enumerate(given) if k != frozen], every[:frozen] + every[frozen + 1 :])


def test_gradients_of_some_results_alone():
    weight, arguments, h0 = inputs("peephole")
    leaves = [weight, *arguments, *h0]
    exact = [x.detach().requires_grad_() for x in leaves]
    for k in range(4):
        got = torch.autograd.grad(call("peephole", weight, arguments, h0)[k].sum(), leaves)
        want = torch.autograd.grad(expected("peephole", exact[0], exact[1:8], exact[8:])[k].sum(), exact)
        assert_all_close(got, want)


def test_the_same_bits_twice_and_from_the_backend_by_name():
    weight, arguments, h0 = inputs("peephole", dtype=torch.float32)
    leaves, found = [weight, *arguments, *h0], []
    for backend in ("auto", "auto", "cpu"):
        results = call("peephole", weight, arguments, h0, backend=backend)
        found.append([*results, *torch.autograd.grad(sum(y.square().sum() for y in results), leaves)])
    assert same_bits(found[1], found[0])
    assert same_bits(found[2], found[0])


def test_nothing_that_is_given_changes():
    weight, arguments, h0 = inputs("peephole", dtype=torch.float32)
    given = [weight, *arguments, *h0]
    before = [x.detach().clone() for x in given]
    results = call("peephole", weight, arguments, h0, resets=torch.rand(2, STEPS) < 0.3)
    torch.autograd.grad(sum(y.sum() for y in results), given)
    assert same_bits([x.detach() for x in given], before)
    for y in results[2:]:
        assert all(y.data_ptr() != x.data_ptr() for x in results[:2])


def test_weights_changed_between_calls():
    weight, arguments, h0 = inputs("janet")
    call("janet", weight, arguments, h0)
    with torch.no_grad():
        weight.mul_(-0.5)
    exact = [x.detach() for x in (weight, *arguments, *h0)]
    assert_all_close(call("janet", weight, arguments, h0), expected("janet", exact[0], exact[1:3], exact[3:]))


def test_boundaries_changed_between_calls():
    weight, arguments, h0 = inputs("janet", 1, sequences=3)
    cu_seqlens = torch.tensor([0, 2, 5, 9], dtype=torch.int32)
    exact = [x.detach() for x in (weight, *arguments, *h0)]
    for bounds in ([0, 2, 5, 9], [0, 6, 6, 9]):
        cu_seqlens.copy_(torch.tensor(bounds))
        want = expected("janet", exact[0], exact[1:3], exact[3:], bounds=bounds)
        assert_all_close(call("janet", weight, arguments, h0, cu_seqlens=cu_seqlens), want)


def test_a_weight_changed_before_backward_is_refused():
    weight, arguments, h0 = inputs("janet")
    results = call("janet", weight, arguments, h0)
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        results[0].sum().backward()


def test_gradients_are_those_of_the_weight_of_the_call():
    weight, arguments, h0 = inputs("janet")
    leaves, found = [weight, *arguments, *h0], []
    for changes in (False, True):
        results = call("janet", weight, arguments, h0)
        if changes:
            weight.data = torch.randn_like(weight)
        found.append(torch.autograd.grad(sum(y.cos().sum() for y in results), leaves))
    assert same_bits(*found)


def test_fewer_products_than_arguments():
    """Products are added to the first arguments alone, whatever follows."""
    weight, arguments, _ = inputs("peephole")
    got = call("peephole", weight[: 2 * WIDTH], arguments, [])
    zeros = torch.cat([weight[: 2 * WIDTH], torch.zeros_like(weight[2 * WIDTH :])])
    assert_all_close(got, call("peephole", zeros, arguments, []))
    assert not torch.allclose(got[0], call("peephole", weight, arguments, [])[0])


def packed_or_not(packed):
    """The options of a small call, and its sequences."""
    if not packed:
        return {"resets": torch.tensor([[False, False, True, False], [True, False, False, True]])}, 2, None
    return {"cu_seqlens": torch.tensor([0, 0, 3, 4], dtype=torch.int32), "reverse": True}, 1, 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cell", [name for name in CELLS if name != "spiking"])  # whose gradients are not its own
def test_derivatives_of_first_and_second_order_in_both_modes(cell, packed):
    options, batch, sequences = packed_or_not(packed)
    weight, arguments, h0 = inputs(cell, batch, 4, 2, sequences)

    def results(*given):
        return call(cell, given[0], given[1 : 1 + len(arguments)], given[1 + len(arguments) :], **options)

    given = weight, *arguments, *h0
    assert torch.autograd.gradcheck(results, given, fast_mode=True, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(results, given, fast_mode=True)


@pytest.mark.parametrize("cell", ["peephole", "gru"])
def test_transforms(cell):
    weight, arguments, h0 = inputs(cell, 2, 5)
    primals = tuple(x.detach() for x in (weight, *arguments, *h0))
    everything, split = tuple(range(len(primals))), 1 + len(arguments)

    def results(*given):
        return call(cell, given[0], given[1:split], given[split:])

    def loss(*given):
        return sum(y.square().sum() for y in results(*given))

    leaves = [x.clone().requires_grad_() for x in primals]
    want = torch.autograd.grad(loss(*leaves), leaves)
    assert_all_close(torch.func.grad(loss, everything)(*primals), want)
    _, moved = torch.func.jvp(loss, primals, tuple(map(torch.cos, primals)))
    assert_close(moved, sum((g * x.cos()).sum() for g, x in zip(want, primals, strict=True)))

    samples = [torch.stack((x, x / 2)) for x in primals]
    for k in everything:  # a sample of one argument at a time, of the weight for one
        dims = tuple(0 if j == k else None for j in everything)
        given = [samples[j] if j == k else x for j, x in enumerate(primals)]
        for n in range(2):
            one = [x[n] if j == k else x for j, x in enumerate(given)]
            assert_all_close([y[n] for y in torch.vmap(results, dims)(*given)], results(*one))
    for g, w in zip(torch.vmap(torch.func.grad(loss, everything))(*samples), want, strict=True):
        assert_close(g[0], w)
    _, moved = torch.func.jvp(torch.func.grad(loss, everything), primals, tuple(map(torch.cos, primals)))
    grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    second = torch.autograd.grad(sum((g * x.cos()).sum() for g, x in zip(grads, primals, strict=True)), leaves)
    assert_all_close(moved, second)

    def loss_of_jvp(*given):
        return torch.func.jvp(loss, given, tuple(map(torch.cos, primals)))[0]

    assert_all_close(torch.func.grad(loss_of_jvp, everything)(*primals), want)


@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_of_the_function_s_own_counts_in_every_mode(packed):
    options, batch, sequences = packed_or_not(packed)
    weight, arguments, h0 = inputs("spiking", batch, 4, 3, sequences)
    leaves = [weight, *arguments, *h0]
    everything, primals = tuple(range(len(leaves))), tuple(x.detach() for x in leaves)

    def results(*given, backend="auto"):
        return call("spiking", given[0], given[1:-2], given[-2:], backend=backend, **options)

    def loss(*given, backend="auto"):
        return sum((y * torch.arange(1.0, 1 + y.numel()).view(y.shape)).sum() for y in results(*given, backend=backend))

    want = torch.autograd.grad(loss(*leaves, backend="torch"), leaves)
    assert want[0].abs().max() > 0.1
    assert_all_close(torch.autograd.grad(loss(*leaves), leaves), want)
    assert_all_close(torch.func.grad(loss, everything)(*primals), want)
    assert_all_close(torch.autograd.functional.jacobian(loss, primals, vectorize=True), want)
    grads = torch.autograd.grad(loss(*leaves), leaves, torch.tensor([1.0, 2.0]), is_grads_batched=True)
    assert_all_close([g[1] / 2 for g in grads], want)
    tangents = tuple(map(torch.cos, primals))
    _, moved = torch.func.jvp(loss, primals, tangents)
    assert_close(moved, sum((g * d).sum() for g, d in zip(want, tangents, strict=True)))
    second = []
    for backend in ("auto", "torch"):  # the derivatives of the function's own backward
        grads = torch.autograd.grad(loss(*leaves, backend=backend), leaves, create_graph=True)
        sums = sum((g * g.detach().cos()).sum() for g in grads)
        second.append(torch.autograd.grad(sums, leaves))
    assert_all_close(*second)
    assert second[0][0].abs().max() > 0.1


def test_gradients_in_batches():
    weight, arguments, h0 = inputs("peephole", 2, 5)
    leaves = [weight, *arguments, *h0]
    results = call("peephole", weight, arguments, h0)
    weights = [torch.randn(3, *y.shape, dtype=y.dtype) for y in results]
    together = torch.autograd.grad(results, leaves, weights, is_grads_batched=True, retain_graph=True)
    for n in range(3):
        one = torch.autograd.grad(results, leaves, [w[n] for w in weights], retain_graph=True)
        assert_all_close([g[n] for g in together], one)


def of_operator(packed, dtype=torch.float64):
    """The arguments of the operators: the trace, the tensors that are differentiated, and the order of the steps."""
    options, batch, sequences = packed_or_not(packed)
    weight, arguments, h0 = inputs("peephole", batch, 4, sequences=sequences, dtype=dtype)
    joined = [torch.cat(arguments[:4], -1), torch.cat(arguments[4:]), torch.cat(h0, -1)]
    leaves = [weight, *(x.detach().requires_grad_() for x in joined)]
    return peephole.traced(arguments), leaves, (options.get("cu_seqlens"), options.get("resets"), packed)


@pytest.mark.parametrize("packed", [False, True])
def test_its_operators_are_as_pytorch_expects_them(packed):
    text, leaves, order = of_operator(packed, torch.float32)
    given = text, *leaves, *order, "auto", True
    torch.library.opcheck(torch.ops.ostinato.weighted_recurrence.default, given)
    results, plain = [x.detach() for x in weighted_recurrence(*given)], [x.detach() for x in leaves]
    tensors = [*map(torch.cos, results[:4]), *results[:2], results[4]]
    backward = text, *plain, *order, "auto", tensors
    torch.library.opcheck(torch.ops.ostinato.weighted_recurrence_backward.default, backward)


@pytest.mark.parametrize("packed", [False, True])
def test_a_call_that_was_not_of_training_has_gradients_too(packed):
    (text, leaves, order), found = of_operator(packed), []
    for training in (True, False):
        for run in (weighted_recurrence, torch.ops.ostinato.weighted_recurrence):
            results = run(text, *leaves, *order, "cpu", training)[:-1]
            found.append([*results, *torch.autograd.grad(results, leaves, [y.detach().cos() for y in results])])
    assert all(same_bits(one, found[0]) for one in found)


@pytest.mark.parametrize("packed", [False, True])
def test_its_operators_need_no_kernels(packed):
    """As on a GPU without the extra "cuda"."""
    (text, leaves, order), found = of_operator(packed), []
    for backend in ("cpu", "torch", "reference"):
        given = text, *leaves, *order, backend, True
        results = weighted_recurrence(*given)
        registered = torch.ops.ostinato.weighted_recurrence(*given)
        assert same_bits(registered, results)
        assert [y.stride() for y in registered] == [y.stride() for y in results]
        weights = [y.detach().cos() for y in results]
        grads = torch.autograd.grad(results, leaves, weights)
        assert same_bits(torch.autograd.grad(registered, leaves, weights), grads)
        found.append([*results[:-1], *grads])
    assert_all_close(found[1], found[0])
    assert_all_close(found[2], found[0])
    strides = [[y.stride() for y in each[:4]] for each in found]
    assert strides[1] == strides[2] == strides[0]


WEIGHTS = {
    "skew": lambda w: (w - w.mT) / 2,
    "of heads": lambda w: torch.block_diag(w[:2, :2], w[2:, 2:]),
    "normed": lambda w: w / w.norm(dim=1, keepdim=True),
    "masked": lambda w: w * (w > 0),
    "scaled": lambda w: w[:, :1] * torch.eye(WIDTH, dtype=w.dtype),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_may_be_an_expression(name):
    weight, arguments, h0 = inputs("elman")
    exact = [x.detach().requires_grad_() for x in (weight, *arguments, *h0)]
    got = call("elman", WEIGHTS[name](weight), arguments, h0)
    want = expected("elman", WEIGHTS[name](exact[0]), exact[1:2], exact[2:])
    found = [torch.autograd.grad(y[0].square().sum(), of) for y, of in ((got, [weight, *arguments]), (want, exact[:2]))]
    assert_all_close((*got, *found[0]), (*want, *found[1]))


class Layer(nn.Module):
    """A peephole LSTM, batch first, as a user would write it."""

    def __init__(self, inputs=4, hidden=6):
        super().__init__()
        self.projection = nn.Linear(inputs, 4 * hidden)
        self.weight_hh = nn.Parameter(torch.randn(4 * hidden, hidden) / hidden**0.5)
        self.peepholes = nn.Parameter(torch.randn(3, hidden))

    def forward(self, x, resets=None, state=None):
        gates = self.projection(x).chunk(4, -1)
        (h, _), last = peephole(*gates, *self.peepholes, weight_hh=self.weight_hh, h0=state, resets=resets)
        return h, *last


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return Layer()


def sequences(batch=2, length=7):
    return torch.randn(batch, length, 4), torch.rand(batch, length) < 0.3


def test_a_compiled_layer_is_the_layer(layer):
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, length in ((2, 7), (3, 5), (1, 1)):
        x, resets = sequences(batch, length)
        found = []
        for run in (layer, compiled):
            results = run(x, resets)
            found.append([*results, *torch.autograd.grad(sum(y.sum() for y in results), list(layer.parameters()))])
        assert_all_close(*found)


DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


@pytest.mark.parametrize("where", [contextlib.nullcontext, ostinato.portable], ids=["operator", "portable"])
def test_an_exported_layer_takes_any_number_of_steps_and_sequences(layer, where):
    with where():
        program = torch.export.export(layer, sequences(), dynamic_shapes=(DYNAMIC, DYNAMIC))
    assert any("ostinato" in str(node.target) for node in program.graph.nodes) == (where is contextlib.nullcontext)
    for batch, length in ((3, 12), (1, 1), (2, 30)):
        given, found = sequences(batch, length), []
        for run in (layer, program.module()):
            results, weights = run(*given), list(run.parameters())
            found.append([*results, *torch.autograd.grad(sum(y.sum() for y in results), weights)])
        assert_all_close(*found)


def test_a_program_exported_without_gradients_has_them(layer):
    x, resets = sequences()
    with torch.no_grad():
        program = torch.export.export(layer.requires_grad_(False), (x, resets)).module()
    x.requires_grad_()
    found = [torch.autograd.grad(sum(y.cos().sum() for y in run(x, resets)), x) for run in (layer, program)]
    assert same_bits(*found)


@torch.no_grad()
def test_onnx_takes_any_number_of_steps_and_sequences(layer, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = tmp_path / "layer.onnx"
    torch.onnx.export(layer.eval(), sequences(), path, dynamic_shapes=(DYNAMIC, DYNAMIC), dynamo=True, verbose=False)
    session = runtime.InferenceSession(path)
    names = [given.name for given in session.get_inputs()]
    for batch, length in ((3, 12), (1, 1)):
        given = sequences(batch, length)
        results = session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})
        assert_all_close(map(torch.from_numpy, results), layer(*given))


class Stepped(Layer):
    """With what a Stepper needs."""

    def initial_state(self, batch_size):
        return (self.weight_hh.new_zeros(batch_size, 6),) * 2

    def step(self, x, state):
        h, *after = self(x[:, None], state=state)
        return h[:, 0], tuple(after)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_has_the_same_gradients(layer, reentrant):
    x = sequences()[0].requires_grad_()
    leaves = [x, *layer.parameters()]

    def gradients(results):
        for leaf in leaves:
            leaf.grad = None
        sum(y.cos().sum() for y in results).backward()
        return [leaf.grad.clone() for leaf in leaves]

    want = gradients(layer(x))
    assert same_bits(gradients(checkpoint(layer, x, use_reentrant=reentrant)), want)


@torch.no_grad()
def test_single_steps_of_a_stepper_equal_the_whole():
    torch.manual_seed(0)
    layer, (x, resets) = Stepped().eval(), sequences(3, 12)
    resets[:, 5], resets[1, 6] = False, True
    stepper, rows = ostinato.Stepper(layer, batch_size=3), []
    for t in range(12):
        stepper.reset(resets[:, t])
        rows.append(stepper(x[:, t]).clone())
    assert_close(torch.stack(rows, 1), layer(x, resets)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copied", "pickled"])
def test_a_copy_of_a_layer_has_weights_of_its_own(layer, copied):
    x, resets = sequences()
    want, other = layer(x, resets), copied(layer)
    assert same_bits(other(x, resets), want)
    with torch.no_grad():
        other.weight_hh.zero_()
    assert same_bits(layer(x, resets), want)
    assert not torch.allclose(other(x, resets)[0], want[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_the_dtype_to_the_arguments(backend):
    """They are in 16 bits where a Linear makes them; in float32 nothing is rounded."""
    weight, arguments, h0 = inputs("peephole", dtype=torch.float32)
    want = call("peephole", weight, arguments, h0, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = call("peephole", weight, arguments, h0, backend=backend)
        assert_all_close(got, want)
        half = [x.bfloat16() if x.dim() == 3 else x for x in arguments]
        assert {y.dtype for y in call("peephole", weight, half, h0, backend=backend)} == {torch.bfloat16}


def test_autocast_leaves_gradients_as_they_are():
    found = []
    for enabled in (False, True):
        weight, arguments, h0 = inputs("peephole", dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results = call("peephole", weight, arguments, h0)
            found.append(torch.autograd.grad(sum(y.square().sum() for y in results), [weight, *arguments, *h0]))
    assert_all_close(*found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_dtype_is_that_of_the_sequences(backend):
    weight, arguments, h0 = inputs("gru")
    half = [x.bfloat16() if x.dim() == 3 else x for x in arguments]
    got = call("gru", weight, half, h0, backend=backend)
    assert {y.dtype for y in got} == {torch.bfloat16}
    rounded = [x.bfloat16().double().detach() for x in (weight, *half[:2], arguments[2], half[3], *h0)]
    assert_all_close(got, [y.bfloat16() for y in expected("gru", rounded[0], rounded[1:5], rounded[5:])])
    grads = torch.autograd.grad(got[0].sum(), [weight, *arguments, *h0])
    assert {g.dtype for g in grads} == {torch.float64}
    mixed = [arguments[0].float(), *arguments[1:]]
    assert call("gru", weight.float(), mixed, h0, backend=backend)[0].dtype == torch.float64


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_rounded_to_the_dtype_of_the_sequences(backend):
    weight, arguments, h0 = inputs("janet", dtype=torch.float32)
    half = [x.bfloat16() for x in arguments]
    got = call("janet", weight, half, h0, backend=backend)
    assert same_bits(got, call("janet", weight.bfloat16(), half, h0, backend=backend))
    assert not same_bits(weight.bfloat16().float(), weight)
    (grad,) = torch.autograd.grad(got[0].sum(), weight)
    assert grad.dtype == torch.float32


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_shapes(data):
    cell = data.draw(st.sampled_from([*CELLS]))
    width, lengths = data.draw(st.integers(1, 9)), data.draw(st.lists(st.integers(0, 6), max_size=5))
    packed = data.draw(st.booleans())
    length = sum(lengths) if packed else data.draw(st.integers(0, 8))
    batch = 1 if packed else data.draw(st.integers(0, 4))
    bounds = [0, *itertools.accumulate(lengths)] if packed else None
    reverse, resetting = data.draw(st.booleans()), data.draw(st.booleans())
    weight, arguments, h0 = inputs(cell, batch, length, width, len(lengths) if packed else None)
    resets = torch.rand(batch, length) < 0.3 if resetting else None
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    leaves = [weight, *arguments, *h0]
    found = []
    for backend in ("auto", "torch"):
        options = {"resets": resets, "reverse": reverse, "cu_seqlens": cu_seqlens, "backend": backend}
        results = call(cell, weight, arguments, h0, **options)
        loss = sum((y * y.detach().cos()).sum() for y in results)
        found.append([*results, *torch.autograd.grad(loss, leaves, materialize_grads=True)])
    assert_all_close(*found)
    if batch * length:
        assert_all_close(found[0][: 2 * len(h0)], expected(cell, weight, arguments, h0, resets, reverse, bounds))


X, C, W = torch.randn(2, 5, 3), torch.randn(3), torch.randn(6, 3)
SHAPE = r"weight_hh must have shape \(G \* 3, 3\), or .* of H heads, for the first G of 2 arguments; got "


@pytest.mark.parametrize(
    ("weight", "kind", "message"),
    [
        (W.tolist(), TypeError, "weight_hh must be a tensor of a real floating dtype; got list"),
        (W.int(), TypeError, "weight_hh must be a tensor of a real floating dtype; got .* torch.int32"),
        (W * 1j, TypeError, "weight_hh must be a tensor of a real floating dtype; got .* torch.complex64"),
        (W.to_sparse(), TypeError, "weight_hh must be a dense tensor; got a torch.sparse_coo one"),
        (W.to("meta"), ValueError, "weight_hh must be on the device of f, cpu; got meta"),
        (W.new_tensor(1.0), ValueError, SHAPE + r"\(\)"),
        (C, ValueError, SHAPE + r"\(3,\)"),
        (W.view(2, 3, 3), ValueError, SHAPE + r"\(2, 3, 3\)"),
        (W.mT, ValueError, SHAPE + r"\(3, 6\)"),
        (W[:5], ValueError, SHAPE + r"\(5, 3\)"),
        (W[:0], ValueError, SHAPE + r"\(0, 3\)"),
        (torch.cat([W, W]), ValueError, SHAPE + r"\(12, 3\)"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_bad_weights_are_named(weight, kind, message, backend):
    with pytest.raises(kind, match=message):
        janet(X, X, weight_hh=weight, backend=backend)


JOINED = r"arguments of janet must be concatenated as \(B, T, G \* D\) and \(2 - G\) \* D; got "


@pytest.mark.parametrize(
    ("sequences", "parameters", "kind", "message"),
    [
        (X.tolist(), C[:0], TypeError, "sequences must be a tensor of a real floating dtype; got list"),
        (X * 1j, C[:0], TypeError, "sequences must be .* real floating dtype; got .* torch.complex64"),
        (X, None, TypeError, "parameters must be a tensor of a real floating dtype; got NoneType"),
        (X[..., 0], C[:0], ValueError, JOINED + r"\(2, 5\) and \(0,\)"),
        (X, C[:0], ValueError, JOINED + r"\(2, 5, 3\) and \(0,\)"),
        (X, C[:2], ValueError, JOINED + r"\(2, 5, 3\) and \(2,\)"),
        (X, C[None], ValueError, JOINED + r"\(2, 5, 3\) and \(1, 3\)"),
        (X[..., :0], C[:0], ValueError, JOINED + r"\(2, 5, 0\) and \(0,\)"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_bad_arguments_of_a_layer_are_named(sequences, parameters, kind, message, backend):
    with pytest.raises(kind, match=message):
        janet.of_layer(sequences, parameters, backend=backend)


def test_a_linear_recurrence_takes_no_weights():
    linear = ostinato.recurrence(lambda a, b: (torch.sigmoid(a), b))
    with pytest.raises(TypeError, match=r"weight_hh needs a state: the first parameter of .* named h or state"):
        linear(X, X, weight_hh=W)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 3, 2, 5]).int()}, ValueError, r"cu_seqlens must rise from 0 to .* 5; got \["),
        ({"cu_seqlens": torch.tensor([0, 5])}, TypeError, "cu_seqlens must be an int32 tensor"),
        ({"h0": torch.zeros(2, 3)}, ValueError, r"h0 must have shape \(1, 3\); got \(2, 3\)"),
        ({"resets": torch.zeros(1, 4, dtype=torch.bool)}, ValueError, r"resets must have shape \(1, 5\)"),
        ({"backend": "gpu"}, ValueError, "backend must be one of"),
        ({"backend": "cuda"}, RuntimeError, "backend 'cuda' runs on cuda tensors; got tensors on cpu"),
    ],
)
def test_other_options_are_checked_with_weights_too(options, kind, message):
    with pytest.raises(kind, match=message):
        janet(X[:1], X[:1], weight_hh=W, **options)


def test_plans_on_a_cpu():
    x, weight = torch.randn(2, 5, 3), torch.randn(6, 3)
    for f in (x, x[0, 0]):  # the latter is expanded, as by a call
        plan = janet.plan(f, x, weight_hh=weight, training=True)
        assert (plan.path, plan.has_kernel) == ("steps", False)
        assert plan.reason == "on a CPU, every step is a matrix product and a generated loop"
    assert janet.plan(x[:0], x[:0], weight_hh=weight).reason == "there is nothing to compute"
    for backend in ("torch", "reference"):
        plan = janet.plan(x, c=x, weight_hh=weight, backend=backend)
        assert plan.reason == "the function itself runs in PyTorch, step by step"
    with pytest.raises(ValueError, match="weight_hh must have shape"):
        janet.plan(x, x, weight_hh=torch.randn(9, 3))
    with pytest.raises(TypeError, match="training must be a bool; got int"):
        janet.plan(x, x, weight_hh=weight, training=1)
    with pytest.raises(TypeError, match="takes the arguments f, c; got 1 by position and x by name"):
        janet.plan(x, x=x, weight_hh=weight)
