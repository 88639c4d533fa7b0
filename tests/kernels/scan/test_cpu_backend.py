"""The Numba loops against the float64 reference and its autograd gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comparisons import TOLERANCE, assert_all_close, assert_close, same_bits
from layouts import strided
from minimal_layers import layer, layer_backward
from ostinato.kernels.cpu.intrinsics import NUMPY_DTYPES
from ostinato.kernels.scan import Order, cpu, cpu_loops, cpu_narrow, reference
from ostinato.minimal.recurrences import RECURRENCES

INF = math.inf
CELLS = {"mingru": 2, "minlstm": 3}

few = settings(max_examples=40, deadline=None)
dtypes = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])
seeds = st.integers(0, 2**31)


layouts = st.sampled_from(["contiguous", "time-major", "time-contiguous", "channels apart", "part of a row"])


def scan_inputs(log, shape, states, dtype):
    a = torch.rand(shape, dtype=torch.float64) * 1.5 - 0.3
    b, h0 = torch.randn(shape, dtype=torch.float64), torch.randn(states, dtype=torch.float64)
    if log:
        a, b, h0 = a.abs().log(), b * 3, h0 * 3
    return a.to(dtype), b.to(dtype), h0.to(dtype)


def scan_functions(log):
    if log:
        return cpu.log_linear_scan, cpu.log_linear_scan_backward, reference.log_linear_scan
    return cpu.linear_scan, cpu.linear_scan_backward, reference.linear_scan


def backward_inputs(log, a, b, h):
    return (a, b, h) if log else (a, h)


@few
@given(
    st.booleans(),
    st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 7, 40]), st.sampled_from([1, 3, 16, 37])),
    dtypes,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["both", "h", "h_last"]),
    layouts,
    seeds,
)
def test_scan_and_gradients_equal_the_reference(log, shape, dtype, reverse, with_h0, through, layout, seed):
    torch.manual_seed(seed)
    forward, backward, definition = scan_functions(log)
    a, b, h0 = scan_inputs(log, shape, (shape[0], shape[2]), dtype)
    grad_h = torch.randn(shape).to(dtype) if through != "h_last" else None
    grad_last = torch.randn(shape[0], shape[2]).to(dtype) if through != "h" else None

    zero = torch.full_like(h0, -INF if log else 0.0)
    wide = [x.double().requires_grad_() for x in (a, b, h0 if with_h0 else zero)]
    expected, expected_last = definition(*wide, reverse)
    h, h_last = forward(strided(a, layout), strided(b, layout), h0 if with_h0 else None, Order(reverse=reverse))
    assert h.is_contiguous()
    assert_close(h, expected.to(dtype))
    assert_close(h_last, expected_last.to(dtype))

    pairs = [(y, g.double()) for y, g in ((expected, grad_h), (expected_last, grad_last)) if g is not None]
    expected_grads = torch.autograd.grad([y for y, _ in pairs], wide, [g for _, g in pairs])
    if not with_h0:
        expected_grads = (*expected_grads[:2], None)
    inputs = [strided(x, layout) for x in backward_inputs(log, a, b, expected.detach().to(dtype))]
    grad_h = None if grad_h is None else strided(grad_h, layout)
    grads = backward(*inputs, h0 if with_h0 else None, grad_h, grad_last, Order(reverse=reverse))
    narrow = dtype in (torch.float16, torch.bfloat16)  # the state handed to the gradient is itself rounded
    for got, want in zip(grads, expected_grads, strict=True):
        assert_close(got, None if want is None else want.to(dtype), 10 * TOLERANCE[dtype] if narrow else None)


@few
@given(
    st.booleans(),
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_packed_scan_equals_separate_scans(log, lengths, reverse, with_h0, seed):
    torch.manual_seed(seed)
    forward, backward, _ = scan_functions(log)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    shape = (1, sum(lengths), 19)
    a, b, h0 = scan_inputs(log, shape, (len(lengths), 19), torch.float32)
    grad_h, grad_last = torch.randn(shape), torch.randn(len(lengths), 19)
    start = h0 if with_h0 else None
    h, h_last = forward(a, b, start, Order(bounds, None, reverse))
    grads = backward(*backward_inputs(log, a, b, h), start, grad_h, grad_last, Order(bounds, None, reverse))
    for n, (first, last) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        part = (slice(None), slice(first, last))
        start = h0[n : n + 1] if with_h0 else None
        if first == last:
            assert torch.equal(h_last[n], h0[n] if with_h0 else torch.full_like(h0[n], -INF if log else 0.0))
            assert not with_h0 or torch.equal(grads[2][n], grad_last[n])
            continue
        want = forward(a[part], b[part], start, Order(reverse=reverse))
        assert same_bits((h[part], h_last[n : n + 1]), want)
        inputs = backward_inputs(log, a[part], b[part], h[part])
        want_grads = backward(*inputs, start, grad_h[part], grad_last[n : n + 1], Order(reverse=reverse))
        assert same_bits((grads[0][part], grads[1][part]), want_grads[:2])
        assert not with_h0 or torch.equal(grads[2][n : n + 1], want_grads[2])


@pytest.fixture
def loops_called(monkeypatch):
    """The loops that scans call, in order."""
    loops, run_loop = [], cpu.run_loop
    monkeypatch.setattr(cpu, "run_loop", lambda loop, *args: loops.append(loop) or run_loop(loop, *args))
    return loops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lengths", [None, [101, 0, 3, 40, 233]])
@pytest.mark.parametrize("with_resets", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("batch", "channels", "layout"),
    [
        *((1, 1, "contiguous"), (37, 1, "contiguous"), (7, 3, "contiguous")),
        *((5, 2, "time-contiguous"), (3, 37, "time-contiguous")),
    ],
)
def test_narrow_scans_have_the_bits_of_wide_ones(
    always_parallel, monkeypatch, loops_called, batch, channels, layout, reverse, with_resets, lengths, dtype
):
    torch.manual_seed(0)
    shape = (batch, 101, channels) if lengths is None else (1, sum(lengths), channels)
    states = batch if lengths is None else len(lengths)
    bounds = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    order = Order(bounds, torch.rand(shape[:2]) < 0.1 if with_resets else None, reverse)
    a, b, h0 = scan_inputs(False, shape, (states, channels), dtype)
    grad_h, grad_last = torch.randn(shape, dtype=dtype), torch.randn(states, channels, dtype=dtype)

    def results(layout):
        h, h_last = cpu.linear_scan(strided(a, layout), strided(b, layout), h0, order)
        grads = cpu.linear_scan_backward(strided(a, layout), h, h0, strided(grad_h, layout), grad_last, order)
        return h, h_last, *grads

    got = results(layout)
    assert loops_called == [cpu_narrow.scan(NUMPY_DTYPES[dtype]), cpu_narrow.scan_backward(NUMPY_DTYPES[dtype])]
    monkeypatch.setattr(cpu, "NARROW", 0)
    loops_called.clear()
    wanted = results("contiguous")
    assert cpu_narrow.scan(NUMPY_DTYPES[dtype]) not in loops_called
    assert same_bits(got, wanted)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_narrow_scans_of_ones_count_steps(channels, reverse):
    steps = torch.arange(130)
    reset = (steps >= 31) & ((steps - 31) % 33 == 0)  # around the ends of turns
    count = torch.where(steps < 31, steps + 8, (steps - 31) % 33 + 1)
    left = torch.where(steps < 31, 31 - steps, 33 - (steps - 31) % 33)
    before = torch.where(reset, 0, count - 1)
    if reverse:
        reset, count, left, before = (x.flip(0) for x in (reset, count, left, before))
    ones, h0 = torch.ones(5, 130, channels), torch.full((5, channels), 7.0)
    order = Order(None, reset.expand(5, 130), reverse)
    h, h_last = cpu.linear_scan(ones, ones, h0, order)
    grad_a, grad_b, grad_h0 = cpu.linear_scan_backward(ones, h, h0, ones, None, order)
    for got, want in ((h, count), (grad_a, left * before), (grad_b, left)):
        assert torch.equal(got, want.float()[None, :, None].expand_as(got))
    assert h_last.eq(33).all()
    assert grad_h0.eq(31).all()


@pytest.mark.parametrize(
    ("shape", "narrow"),
    [((9, 12, 3), True), ((9, 11, 3), False), ((9, 4, 1), True), ((9, 3, 1), False), ((9, 99, 4), False)],
)
def test_few_channels_of_many_steps_are_scanned_one_by_one(loops_called, shape, narrow):
    x = torch.ones(shape)
    cpu.linear_scan(x, x, None, Order())
    cpu.linear_scan(x.flatten(0, 1)[None], x.flatten(0, 1)[None], None, Order(torch.arange(10) * shape[1]))
    assert [loop is cpu_narrow.scan(NUMPY_DTYPES[x.dtype]) for loop in loops_called] == [narrow, narrow]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 37, 65), (2, 16, 96), (2, 9, 70)])
def test_time_contiguous_scans_have_the_bits_of_contiguous_ones(always_parallel, log, dtype, shape):
    torch.manual_seed(0)
    forward, backward, _ = scan_functions(log)
    a, b, h0 = scan_inputs(log, shape, (shape[0], shape[2]), dtype)
    grad_h = torch.randn(shape).to(dtype)

    def results(layout):
        h, h_last = forward(strided(a, layout), strided(b, layout), h0, Order())
        inputs = [strided(x, layout) for x in backward_inputs(log, a, b, h)]
        return h, h_last, *backward(*inputs, h0, strided(grad_h, layout), None, Order())

    assert same_bits(results("time-contiguous"), results("contiguous"))


@pytest.mark.parametrize("with_resets", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("channels", [32, 77])
def test_split_log_scans_have_the_bits_of_others(
    always_parallel, monkeypatch, loops_called, channels, reverse, with_resets
):
    torch.manual_seed(0)
    shape = (3, 50, channels)
    a, b, h0 = scan_inputs(True, shape, (3, channels), torch.float32)
    grad_h, grad_last = torch.randn(shape), torch.randn(3, channels)
    for x, value in ((a, -INF), (b, -INF), (a, 200.0), (b, INF), (b, math.nan)):
        x[torch.rand(shape) < 0.01] = value
    b[:, 7], a[:, 7] = -INF, -INF  # nothing is left, and nothing added
    order = Order(None, torch.rand(shape[:2]) < 0.1 if with_resets else None, reverse)

    def results():
        h, h_last = cpu.log_linear_scan(a, b, h0, order)
        return h, h_last, *cpu.log_linear_scan_backward(a, b, h, h0, grad_h, grad_last, order)

    got = results()
    loops = cpu_loops.scan(np.float32, True, True), cpu_loops.scan_backward(np.float32, True, True)
    assert loops_called == [*loops]
    monkeypatch.setattr(cpu, "WIDE", INF)
    wanted = results()
    assert not {*loops_called[2:]} & {*loops}
    assert same_bits(got, wanted, equal_nan=True)


@pytest.mark.parametrize("channels", [16, 24, 2064])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("log", [False, True])
def test_streamed_results_are_the_same(always_parallel, monkeypatch, log, reverse, dtype, channels):
    torch.manual_seed(0)
    forward, backward, _ = scan_functions(log)
    bounds = torch.tensor([0, 7, 7, 31, 40], dtype=torch.int32)
    structures, run_loop = [], cpu.run_loop
    monkeypatch.setattr(cpu, "run_loop", lambda loop, work, n: structures.append(work) or run_loop(loop, work, n))

    def results(streamed, order):
        monkeypatch.setattr(cpu, "STREAMED", streamed)
        h, h_last = forward(a, b, h0, order)
        inputs = backward_inputs(log, a, b, h)
        return h, h_last, *backward(*inputs, h0, grad_h, h_last, order)

    for shape, states, cu_seqlens in (((3, 40, channels), 3, None), ((1, 40, channels), 4, bounds)):
        a, b, h0 = scan_inputs(log, shape, (states, channels), dtype)
        grad_h = torch.randn(shape).to(dtype)
        structures.clear()
        order = Order(cu_seqlens, None, reverse)
        assert same_bits(results(0, order), results(INF, order))
        line = channels % (8 if dtype == torch.float64 else 16) == 0
        assert [work.out_row != 0 for work in structures] == [line, False, False, False]
        assert [work.grad_a_row * work.grad_b_row != 0 for work in structures] == [False, line, False, False]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_nan_and_inf_stay_in_their_channel_and_future(always_parallel, log, bad):
    torch.manual_seed(0)
    forward, backward, _ = scan_functions(log)
    a, b, h0 = scan_inputs(log, (3, 20, 40), (3, 40), torch.float32)
    grad_h = torch.randn(3, 20, 40)
    clean = forward(a, b, h0, Order())
    clean_grads = backward(*backward_inputs(log, a, b, clean[0]), h0, grad_h, None, Order())
    b_bad, grad_bad = b.clone(), grad_h.clone()
    b_bad[1, 8, 5] = grad_bad[1, 8, 5] = bad
    h, h_last = forward(a, b_bad, h0, Order())
    assert not h[1, 8:, 5].isfinite().any()
    grads = backward(*backward_inputs(log, a, b, clean[0]), h0, grad_bad, None, Order())
    h[1, 8:, 5], h_last[1, 5] = clean[0][1, 8:, 5], clean[1][1, 5]
    assert same_bits((h, h_last), clean)
    assert not grads[1][1, 8, 5].isfinite()
    for got, want in zip(grads[:2], clean_grads[:2], strict=True):
        got[1, :9, 5] = want[1, :9, 5]
    grads[2][1, 5] = clean_grads[2][1, 5]
    assert same_bits(grads, clean_grads)


def packed_layout(lengths):
    sizes = (torch.tensor(lengths)[None] > torch.arange(max(lengths))[:, None]).sum(1)
    return torch.tensor([0, *sizes.cumsum(0).tolist()], dtype=torch.int32)


def layer_inputs(layout, batch, length, width, dtype):
    """Pre-activations and the offsets that pack them."""
    if layout == "packed":
        lengths = sorted((1 + (7 * n + length) % length for n in range(batch)), reverse=True)
        offsets = packed_layout(lengths)
        return 3 * torch.randn(int(offsets[-1]), width).to(dtype), offsets
    shape = (batch, length) if layout == "batch-major" else (length, batch)
    return 3 * torch.randn(*shape, width).to(dtype), None


@pytest.mark.parametrize(
    ("cell", "candidate", "with_bias"),  # which makes loops of its own
    [
        *(("mingru", "positive", True), ("mingru", "linear", False), ("mingru", "tanh", True)),
        *(("minlstm", "positive", False), ("minlstm", "linear", True), ("minlstm", "tanh", False)),
    ],
)
@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["batch-major", "time-major", "packed"]),
    st.integers(1, 2),
    st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 9, 70]), st.sampled_from([1, 5, 16, 35])),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),  # float64 is compared with the papers' equations
    st.booleans(),
    st.sampled_from(["both", "h", "h_last"]),
    seeds,
)
def test_layer_and_gradients_equal_the_reference(
    cell, candidate, with_bias, layout, directions, sizes, dtype, with_h0, through, seed
):
    torch.manual_seed(seed)
    batch, length, hidden = sizes
    pre, offsets = layer_inputs(layout, batch, length, directions * CELLS[cell] * hidden, dtype)
    bias = torch.randn(pre.shape[-1]) if with_bias else None  # of a dtype of its own
    h0 = torch.randn(directions, batch, hidden).to(dtype) if with_h0 else None
    settings_ = offsets, cell, candidate, layout == "batch-major", directions
    expected = layer("reference", pre, bias, h0, *settings_)
    got = layer("cpu", pre, bias, h0, *settings_)
    assert_all_close(got, expected)

    grad_h = torch.randn_like(expected[0]) if through != "h_last" else None
    grad_last = torch.randn_like(expected[1]) if through != "h" else None
    grads = layer_backward("cpu", pre, bias, h0, expected[0], grad_h, grad_last, *settings_)
    expected_grads = layer_backward("reference", pre, bias, h0, expected[0], grad_h, grad_last, *settings_)
    assert_all_close(grads, expected_grads, 10 * TOLERANCE[dtype])


@pytest.mark.parametrize("cell", CELLS)
def test_packed_layer_equals_separate_layers(always_parallel, cell):
    torch.manual_seed(0)
    lengths, hidden = [31, 30, 12, 12, 1], 33
    offsets = packed_layout(lengths)
    pre = torch.randn(sum(lengths), 2 * CELLS[cell] * hidden)
    bias, h0 = torch.randn(pre.shape[-1]), torch.randn(2, 5, hidden)
    grad_h, grad_last = torch.randn(sum(lengths), 2 * hidden), torch.randn(2, 5, hidden)
    h, h_last = layer("cpu", pre, bias, h0, offsets, cell, "tanh", False, 2)
    grads = layer_backward("cpu", pre, bias, h0, h, grad_h, grad_last, offsets, cell, "tanh", False, 2)
    grad_bias = torch.zeros_like(bias, dtype=torch.float64)
    for n, length in enumerate(lengths):
        rows, one = offsets[:length].long() + n, slice(n, n + 1)
        want = layer("cpu", pre[rows][None], bias, h0[:, one], None, cell, "tanh", True, 2)
        assert same_bits((h[rows][None], h_last[:, one]), want)
        args = pre[rows][None], bias, h0[:, one], want[0], grad_h[rows][None], grad_last[:, one]
        want = layer_backward("cpu", *args, None, cell, "tanh", True, 2)
        assert same_bits((grads[0][rows][None], grads[2][:, one]), (want[0], want[2]))
        grad_bias += want[1]
    assert_close(grads[1], grad_bias.float(), 1e-6)


def gates_of(cell, *pre):
    """The layer's two gates as one step shows them: of a state of 1, and of a candidate of 1."""
    n = len(pre[0])
    zeros, ones = torch.zeros(n, dtype=pre[0].dtype), torch.ones(n, dtype=pre[0].dtype)
    keep = layer("cpu", torch.cat((*pre, zeros))[None, None], None, ones.view(1, 1, n), None, cell, "linear", True, 1)
    mix = layer("cpu", torch.cat((*pre, ones))[None, None], None, None, None, cell, "linear", True, 1)
    return keep[1].view(n), mix[1].view(n)


def relative(got, expected):
    return ((got.double() - expected) / expected).abs().max()


def test_float32_gates_are_precise_near_zero_and_near_one():
    x = torch.linspace(-87, 87, 300_001)
    keep, mix = gates_of("mingru", x)
    assert relative(mix, torch.sigmoid(x.double())) < 4e-7
    assert relative(keep, torch.sigmoid(-x.double())) < 4e-7

    f, i = torch.linspace(-20, 20, 1001).repeat(1001), torch.linspace(-20, 20, 1001).repeat_interleave(1001)
    keep, mix = gates_of("minlstm", f, i)
    p, q = 1 + (-i.double()).exp(), 1 + (-f.double()).exp()
    assert relative(keep, p / (p + q)) < 3e-6  # exp(f - i) is as precise as float32 holds f - i
    assert relative(mix, q / (p + q)) < 3e-6


def test_float32_functions_are_precise_where_results_are_small():
    n = 200_001
    x = torch.cat((torch.logspace(-30, 2, n), -torch.logspace(-30, 2, n)))
    pre = torch.cat((torch.full_like(x, INF), x))[None, None]
    h, _ = layer("cpu", pre, None, None, None, "mingru", "tanh", True, 1)
    assert relative(h[0, 0], torch.tanh(x.double())) < 4e-7

    b = torch.linspace(-80, 80, n).view(1, 1, n)
    log_h, _ = cpu.log_linear_scan(torch.zeros_like(b), b, torch.zeros(1, n), Order())
    assert relative(log_h, torch.logaddexp(torch.zeros_like(b).double(), b.double())) < 4e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gates_have_their_limits_at_extreme_pre_activations(dtype):
    z = torch.tensor([-INF, -1e4, -120.0, 120.0, 1e4, INF], dtype=dtype)
    keep, mix = gates_of("mingru", z)
    assert keep.tolist() == [1, 1, 1, pytest.approx(0, abs=1e-40), 0, 0]
    assert mix.tolist() == [0, 0, pytest.approx(0, abs=1e-40), 1, 1, 1]

    cases = {  # (f, i): f'
        (INF, INF): 1 / 2,
        (INF, -INF): 1,
        (-INF, INF): 0,
        (-INF, 0.0): 0,
        (0.0, -INF): 1,
        (INF, 0.0): 2 / 3,
        (0.0, 1e4): 1 / 3,
        (1e4, -1e4): 1,
        (-1e4, -1e4): 1 / 2,
        (-1e4, 1.0 - 1e4): 1 / (1 + math.e),
        (-1e4, INF): 0,
        (-1e4, -INF): 1,
    }
    f, i = (torch.tensor(x, dtype=dtype) for x in zip(*cases, strict=True))
    keep, mix = gates_of("minlstm", f, i)
    assert keep.tolist() == pytest.approx(list(cases.values()), rel=1e-6, abs=1e-40)
    assert mix.tolist() == pytest.approx([1 - x for x in cases.values()], rel=1e-6, abs=1e-40)
    for cell, pre in (("mingru", (z, z)), ("minlstm", (f, i, torch.ones_like(f)))):
        for candidate in ("positive", "tanh") if cell == "minlstm" else ("tanh",):
            args = torch.cat(pre)[None, None], None, None, torch.ones(1, 1, len(pre[0]), dtype=dtype)
            grad_pre, _, _ = layer_backward("cpu", *args, args[3], None, None, cell, candidate, True, 1)
            assert grad_pre.isfinite().all()


def test_extreme_candidates():
    x = torch.tensor([-INF, -1e4, -0.0, 1e4, INF])
    pre = torch.cat((torch.full_like(x, INF), x))[None, None]
    limits = {"positive": [0, 0, 0.5, 10000.5, INF], "linear": x.tolist(), "tanh": [-1, -1, 0, 1, 1]}
    for candidate, limit in limits.items():
        h, _ = layer("cpu", pre, None, None, None, "mingru", candidate, True, 1)
        assert h[0, 0].tolist() == limit


def test_log_scan_of_zeros_and_infinities():
    nothing = torch.full((1, 3, 2), -INF)
    h, h_last = cpu.log_linear_scan(nothing, nothing, None, Order())
    assert torch.equal(h, nothing)
    grads = cpu.log_linear_scan_backward(nothing, nothing, h, h_last, torch.ones(1, 3, 2), None, Order())
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)
    h, _ = cpu.log_linear_scan(torch.zeros(1, 2, 1), torch.full((1, 2, 1), INF), None, Order())
    assert torch.equal(h, torch.full((1, 2, 1), INF))
    tall = torch.full((1, 50, 1), 1000.0)  # the state passes exp(50000)
    h, _ = cpu.log_linear_scan(tall, tall, None, Order())
    expected, _ = reference.log_linear_scan(tall.double(), tall.double(), torch.full((1, 1), -INF).double())
    assert relative(h, expected) < 1e-6


def test_the_gates_of_min_lstm_are_exact():
    steps = torch.linspace(-30, 30, 61, dtype=torch.float64)
    f, i = torch.meshgrid(steps, steps, indexing="ij")
    keep, mix = RECURRENCES["minlstm"]["linear"].function(f, i, torch.ones_like(f))
    p_f, p_i = 1 + (-f).exp(), 1 + (-i).exp()
    assert (keep * (p_f + p_i) / p_i - 1).abs().max() < 1e-14
    assert (mix * (p_f + p_i) / p_f - 1).abs().max() < 1e-14
