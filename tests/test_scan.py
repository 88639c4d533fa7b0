"""linear_scan and log_linear_scan: every backend against the float64 loop, and the properties a scan must have."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

import ostinato
from comparisons import same_bits
from ostinato.kernels.scan import reference

BACKENDS = ["reference", "torch", "cpu"]
SCANS = [ostinato.linear_scan, ostinato.log_linear_scan]


def loop(a, b, h0=None, reverse=False, resets=None):
    """The recurrence in float64, written out once more, independently of the library."""
    a, b = a.double(), b.double()
    h = torch.zeros(a.shape[0], a.shape[2], dtype=torch.float64) if h0 is None else h0.double()
    out = torch.empty_like(b)
    for t in reversed(range(a.shape[1])) if reverse else range(a.shape[1]):
        if resets is not None:
            h = torch.where(resets[:, t, None], 0.0, h)
        h = a[:, t] * h + b[:, t]
        out[:, t] = h
    return out, h


def inputs(batch, length, width, sequences=None, dtype=torch.float64):
    a = torch.rand(batch, length, width, dtype=dtype)
    b = torch.randn(batch, length, width, dtype=dtype)
    return a, b, torch.randn(sequences or batch, width, dtype=dtype)


def error(got, want):
    return ((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30)).item() if want.numel() else 0.0


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(0, 70),
    width=st.integers(1, 20),
    reverse=st.booleans(),
    with_state=st.booleans(),
    resetting=st.sampled_from([None, 0.0, 0.2, 1.0]),
    backend=st.sampled_from(BACKENDS),
    seed=st.integers(0, 99),
)
def test_matches_the_loop(batch, length, width, reverse, with_state, resetting, backend, seed):
    torch.manual_seed(seed)
    a, b, h0 = inputs(batch, length, width)
    h0 = h0 if with_state else None
    resets = None if resetting is None else torch.rand(batch, length) < resetting
    want, want_last = loop(a, b, h0, reverse, resets)
    h, h_last = ostinato.linear_scan(a, b, h0, resets=resets, reverse=reverse, backend=backend)
    assert h.shape == want.shape
    assert error(h, want) < 1e-12
    assert error(h_last, want_last) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes_accumulate_in_float32(dtype, backend):
    torch.manual_seed(0)
    a, b, h0 = (x.to(dtype) for x in inputs(2, 300, 5))
    h, h_last = ostinato.linear_scan(a, b, h0, backend=backend)
    assert h.dtype == h_last.dtype == dtype
    want, _ = loop(a, b, h0)
    rounded_once = (want.to(dtype).double() - want).abs()
    assert ((h.double() - want).abs() <= 1.001 * rounded_once + 1e-5).all()


def test_float32_error_does_not_grow_with_length():
    torch.manual_seed(0)
    uniform = torch.rand(1, 65536, 8, dtype=torch.float64)
    a, b = torch.cat((uniform, 1 - 1e-4 * uniform, 2 * uniform - 1), 2).float(), torch.randn(1, 65536, 24)
    want = loop(a, b)[0].split(8, 2)
    for backend in ("torch", "cpu"):
        h = ostinato.linear_scan(a, b, backend=backend)[0].split(8, 2)
        assert all(error(*both) < 2e-6 for both in zip(h, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_space_reaches_beyond_the_range_of_float32(backend):
    torch.manual_seed(0)
    log_a, log_b = 3 * torch.rand(1, 400, 4), torch.randn(1, 400, 4)
    want = reference.log_linear_scan(log_a.double(), log_b.double(), torch.full((1, 4), -torch.inf).double())[0]
    log_h, _ = ostinato.log_linear_scan(log_a, log_b, backend=backend)
    assert want.max() > 500  # e^500 is no float32
    assert log_h.isfinite().all()
    assert error(log_h, want) < 1e-5


def test_the_error_of_log_space_does_not_grow_with_length():
    torch.manual_seed(0)
    log_a = torch.cat((-1e-4 * torch.rand(1, 65536, 8), torch.full((1, 65536, 8), 0.1)), 2)
    log_b, empty = torch.randn(1, 65536, 16), torch.full((1, 16), -torch.inf, dtype=torch.float64)
    want = reference.log_linear_scan(log_a.double(), log_b.double(), empty)[0].split(8, 2)
    for backend in ("torch", "cpu"):
        log_h = ostinato.log_linear_scan(log_a, log_b, backend=backend)[0].split(8, 2)
        assert all(error(*both) < 1e-6 for both in zip(log_h, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_error_of_log_space_gradients_does_not_grow_with_length(backend):
    torch.manual_seed(0)
    log_b, empty = torch.randn(1, 4000, 3), torch.full((1, 3), -torch.inf, dtype=torch.float64)
    for log_a in (torch.full((1, 4000, 3), 0.1), torch.full((1, 4000, 3), -1e-4), torch.randn(1, 4000, 3)):
        wide = [x.double().requires_grad_() for x in (log_a, log_b)]
        narrow = [x.clone().requires_grad_() for x in (log_a, log_b)]
        want = torch.autograd.grad(reference.log_linear_scan(*wide, empty)[1].sum(), wide)
        got = torch.autograd.grad(ostinato.log_linear_scan(*narrow, backend=backend)[1].sum(), narrow)
        for g, w in zip(got, want, strict=True):
            assert error(g, w) < 4e-6
        assert (got[1].double().sum(1) - 1).abs().max() < 1e-6  # log_b + x makes of log_h log_h + x


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_space_gradients_where_a_share_is_nothing_or_all(backend):
    inf = torch.inf
    steps = [(0.0, -inf), (-inf, -inf), (1.0, 2.0), (-inf, 3.0), (3.0, -inf), (0.0, -500.0), (0.0, 500.0)]
    log_a, log_b = (torch.tensor(x).view(1, -1, 1).requires_grad_() for x in zip(*steps, strict=True))
    log_h, _ = ostinato.log_linear_scan(log_a, log_b, backend=backend)
    shares = [torch.autograd.grad(log_h[0, t, 0], (log_a, log_b), retain_graph=True) for t in range(len(steps))]
    assert [g[0][0, t, 0].item() for t, g in enumerate(shares)] == [0, 0, 0, 0, 1, 1, 0]
    assert [g[1][0, t, 0].item() for t, g in enumerate(shares)] == [0, 0, 1, 1, 0, 0, 1]
    assert shares[4][1].flatten().tolist() == [0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_log_space_has_the_gradients_of_a_wide_one(dtype, backend):
    # States near 1,000, where bfloat16 numbers are 4 apart: the gradient is made of their differences.
    log_a = torch.full((1, 500, 1), 2.0, dtype=dtype, requires_grad=True)
    log_b = torch.zeros(1, 500, 1, dtype=dtype)
    wide = log_a.detach().double().requires_grad_()
    ostinato.log_linear_scan(wide, log_b.double())[0].mean().backward()
    log_h, log_last = ostinato.log_linear_scan(log_a, log_b, backend=backend)
    assert log_h.dtype == log_last.dtype == dtype
    log_h.mean().backward()
    assert error(log_a.grad, wide.grad) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_log_space_is_the_linear_scan_of_the_exponentials(backend, reverse):
    torch.manual_seed(0)
    a, b, h0 = (x.abs() for x in inputs(2, 60, 3))
    want, want_last = ostinato.linear_scan(a, b, h0, reverse=reverse, backend="reference")
    log_h, log_last = ostinato.log_linear_scan(a.log(), b.log(), h0.log(), reverse=reverse, backend=backend)
    assert error(log_h.exp(), want) < 1e-12
    assert error(log_last.exp(), want_last) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 4, 4, 5, 19]])
def test_gradients(scan, backend, reverse, cu_seqlens):
    torch.manual_seed(0)
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    tensors = inputs(2 if bounds is None else 1, 19, 2, None if bounds is None else 4)
    call = functools.partial(scan, reverse=reverse, cu_seqlens=bounds, backend=backend)
    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in tensors], atol=1e-8, fast_mode=True)


RESETS = torch.zeros(2, 60, dtype=torch.bool)
RESETS[0, [0, 7, 8, 40, 59]] = RESETS[1, [16, 31, 32]] = True


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_reset_starts_anew(scan, backend, reverse):
    torch.manual_seed(0)
    a, b, h0 = (x.requires_grad_() for x in inputs(2, 60, 3))
    start = torch.full((1, 3), 0.0 if scan is SCANS[0] else -torch.inf, dtype=torch.float64)
    pieces, lasts = [], []
    for n in range(2):  # a loop over the sequences between resets, each in a call of its own
        cuts = (RESETS[n].nonzero().flatten() + reverse).tolist()
        bounds = [0, *(t for t in cuts if 0 < t < 60), 60]
        states = [start] * (len(bounds) - 1)
        if not RESETS[n, 59 if reverse else 0]:
            states[-1 if reverse else 0] = h0[n : n + 1]
        parts = [
            scan(a[n : n + 1, i:j], b[n : n + 1, i:j], h, reverse=reverse, backend="reference")
            for i, j, h in zip(bounds, bounds[1:], states, strict=False)
        ]
        pieces.append(torch.cat([h for h, _ in parts], 1))
        lasts.append(parts[0 if reverse else -1][1])
    want = torch.cat(pieces), torch.cat(lasts)
    got = scan(a, b, h0, resets=RESETS, reverse=reverse, backend=backend)
    packed = [x.detach().flatten(0, 1)[None].requires_grad_() for x in (a, b)]
    bounds = torch.tensor([0, 60, 120], dtype=torch.int32)
    mask = RESETS.t().contiguous().t().reshape(1, 120)
    flat = scan(*packed, h0, resets=mask, cu_seqlens=bounds, reverse=reverse, backend=backend)
    weights = torch.randn_like(want[0]), torch.randn_like(want[1])

    def gradients(outputs, wanted):
        return torch.autograd.grad(sum((y.view_as(w) * w).sum() for y, w in zip(outputs, weights, strict=True)), wanted)

    expected = gradients(want, (a, b, h0))
    for outputs, wanted in ((got, (a, b, h0)), (flat, (*packed, h0))):
        for y, w in zip(outputs, want, strict=True):
            assert error(y, w.view_as(y)) < 1e-12
        grads = gradients(outputs, wanted)
        for g, w in zip(grads, expected, strict=True):
            assert error(g, w.view_as(g)) < 1e-12
        assert not grads[0].view(2, 60, 3)[RESETS].any()
    assert expected[2][1].abs().min() > 0  # only the sequence that is reset before its first step forgets h0
    assert grads[2][0].any() == (not RESETS[0, 59 if reverse else 0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scan", SCANS)
def test_nothing_not_even_nan_crosses_a_reset(scan, backend):
    torch.manual_seed(0)
    a, b, _ = inputs(2, 60, 3)
    want = scan(a[:1, 40:59], b[:1, 40:59], backend=backend)[0]
    h, _ = scan(a, b.index_fill(1, torch.tensor([35]), torch.nan), resets=RESETS, backend=backend)
    assert error(h[:1, 40:59], want) < 1e-12
    assert h[0, 35:40].isnan().all()
    for bad in (torch.nan, torch.inf):
        h, _ = scan(a.index_fill(1, torch.tensor([35]), bad), b, resets=RESETS, backend=backend)
        assert error(h[:1, 40:59], want) < 1e-12
        assert not h[0, 35].isfinite().any()
    h, _ = scan(a.requires_grad_(), b.requires_grad_(), resets=RESETS, backend=backend)
    grad = torch.zeros_like(h).index_fill_(1, torch.tensor([45]), torch.nan)
    for g in torch.autograd.grad(h, (a, b), grad):
        assert g[0, 41:46].isnan().all()
        assert not g[0, :40].any()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_equal_autograd_through_the_loop(backend, reverse):
    torch.manual_seed(0)
    tensors = [x.requires_grad_() for x in inputs(2, 200, 4)]
    weights = torch.randn(2, 200, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)

    def gradients(outputs):
        return torch.autograd.grad(sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)), tensors)

    start = (tensors[0].transpose(0, 1).unbind(), tensors[1].transpose(0, 1).unbind())
    h, steps = tensors[2], [None] * 200
    for t in reversed(range(200)) if reverse else range(200):
        h = start[0][t] * h + start[1][t]
        steps[t] = h
    want = gradients((torch.stack(steps, 1), h))
    got = gradients(ostinato.linear_scan(*tensors, reverse=reverse, backend=backend))
    for g, w in zip(got, want, strict=True):
        assert error(g, w) < 1e-10


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("reverse", [False, True])
def test_packed_equals_separate(scan, backend, reverse):
    torch.manual_seed(0)
    bounds = torch.tensor([0, 0, 7, 8, 8, 40], dtype=torch.int32)
    a, b, h0 = inputs(1, 40, 3, 5)
    h, h_last = scan(a, b, h0, reverse=reverse, cu_seqlens=bounds, backend=backend)
    for n in range(5):
        piece = slice(bounds[n], bounds[n + 1])
        want, want_last = scan(a[:, piece], b[:, piece], h0[n : n + 1], reverse=reverse, backend=backend)
        assert torch.allclose(h[:, piece], want, rtol=1e-12, atol=0)
        assert torch.allclose(h_last[n], want_last[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_halves_with_the_state_carried_over_are_the_whole(backend):
    torch.manual_seed(0)
    a, b, h0 = inputs(2, 101, 3)
    whole, last = ostinato.linear_scan(a, b, h0, backend=backend)
    first, state = ostinato.linear_scan(a[:, :40], b[:, :40], h0, backend=backend)
    second, state = ostinato.linear_scan(a[:, 40:], b[:, 40:], state, backend=backend)
    assert error(torch.cat((first, second), 1), whole) < 1e-12
    assert error(state, last) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_reverse_is_the_scan_of_the_flipped_sequence(backend):
    torch.manual_seed(0)
    a, b, h0 = inputs(2, 33, 3)
    want, want_last = ostinato.linear_scan(a.flip(1), b.flip(1), h0, backend=backend)
    h, h_last = ostinato.linear_scan(a, b, h0, reverse=True, backend=backend)
    assert error(h, want.flip(1)) < 1e-12
    assert error(h_last, want_last) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend):
    torch.manual_seed(0)
    a, b, h0 = inputs(2, 30, 4)
    want, _ = loop(a, b, h0)
    channels_before_time = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (a, b)]
    every_other = [torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0] for x in (a, b)]
    time_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (a, b)]
    for strided in (channels_before_time, every_other, time_first):
        assert error(ostinato.linear_scan(*strided, h0, backend=backend)[0], want) < 1e-12
    expanded = a[:, :1, :1].expand(2, 30, 4)
    assert error(ostinato.linear_scan(expanded, b, h0, backend=backend)[0], loop(expanded, b, h0)[0]) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("scan", "zero"), [(SCANS[0], 0.0), (SCANS[1], -torch.inf)])
def test_no_steps_leave_the_state_as_it_was(scan, zero, backend):
    a, b, h0 = inputs(2, 0, 3)
    h0.requires_grad_()
    h, h_last = scan(a, b, h0, backend=backend)
    assert h.shape == (2, 0, 3)
    assert torch.equal(h_last, h0)
    weights = torch.randn(2, 3, dtype=torch.float64)
    (h_last * weights).sum().backward()
    assert torch.equal(h0.grad, weights)
    assert torch.equal(scan(a, b, backend=backend)[1], torch.full((2, 3), zero, dtype=torch.float64))


@pytest.mark.parametrize("scan", SCANS)
def test_whatever_device_is_the_default(scan):
    torch.manual_seed(0)
    a, b, h0 = (x.abs().requires_grad_() for x in inputs(2, 40, 3))
    want = scan(a, b, h0)[0]
    gradients = torch.autograd.grad(want.sum(), (a, b, h0))
    with torch.device("meta"):
        got = scan(a, b, h0)[0]
        assert torch.equal(got, want)
        assert same_bits(torch.autograd.grad(got.sum(), (a, b, h0)), gradients)


@pytest.mark.parametrize("scan", SCANS)
def test_a_negation_left_to_do_is_done(scan):
    torch.manual_seed(0)
    a, b, h0 = inputs(2, 30, 3)
    lazy = [torch._neg_view(-x) for x in (a.abs(), b, h0)]
    assert lazy[0].is_neg()
    want, got = scan(a.abs(), b, h0), scan(*lazy)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    x, y = b.clone().requires_grad_(), b.clone().requires_grad_()
    scan(a.abs(), x)[0].backward(b)
    scan(a.abs(), y)[0].backward(lazy[1])
    assert torch.equal(x.grad, y.grad)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_traced_equals_eager():
    torch.manual_seed(0)
    (a, b, h0), others = inputs(2, 20, 3), inputs(2, 20, 3)
    traced = torch.jit.trace(lambda *tensors: ostinato.linear_scan(*tensors), (a, b, h0))
    assert same_bits(traced(*others), ostinato.linear_scan(*others))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_stay_in_their_channel_and_their_future(backend, bad):
    torch.manual_seed(0)
    a, b, _ = inputs(1, 90, 3)
    b[0, 50, 1] = bad
    h, _ = ostinato.linear_scan(a, b, backend=backend)
    touched = torch.zeros(1, 90, 3, dtype=torch.bool)
    touched[0, 50:, 1] = True
    assert torch.equal(~h.isfinite(), touched)
    bounds = torch.tensor([0, 60, 90], dtype=torch.int32)
    h, _ = ostinato.linear_scan(a, b, cu_seqlens=bounds, backend=backend)
    touched[0, 60:] = False
    assert torch.equal(~h.isfinite(), touched)


@pytest.mark.parametrize("name", ["linear_scan", "log_linear_scan"])
def test_operators_are_well_formed(name):
    torch.manual_seed(0)
    a, b, h0 = inputs(1, 9, 3, 2)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    operator = getattr(torch.ops.ostinato, name).default
    for arguments in ((a, b, None, None, None), (a, b, h0, bounds, torch.rand(1, 9) < 0.3)):
        arguments = [x.clone().requires_grad_() if x is not None and x.is_floating_point() else x for x in arguments]
        torch.library.opcheck(operator, (*arguments, True, "cpu"))


def test_compiled_equals_eager():
    torch.manual_seed(0)
    a, b, h0 = (x.requires_grad_() for x in inputs(2, 30, 3))

    def loss(a, b, h0):
        h, h_last = ostinato.linear_scan(a, b, h0)
        return h.square().sum() + h_last.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b, h0), loss(a, b, h0))
    want = torch.autograd.grad(loss(a, b, h0), (a, b, h0))
    assert same_bits(torch.autograd.grad(compiled(a, b, h0), (a, b, h0)), want)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 3, 3, 6]])
@pytest.mark.parametrize("resetting", [False, True])
def test_second_and_forward_mode_derivatives(scan, backend, reverse, cu_seqlens, resetting):
    torch.manual_seed(0)
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    a, b, h0 = inputs(2 if bounds is None else 1, 6, 2, None if bounds is None else 3)
    resets = torch.rand(a.shape[:2]) < 0.3 if resetting else None
    call = functools.partial(scan, resets=resets, reverse=reverse, cu_seqlens=bounds, backend=backend)
    tensors = [x.requires_grad_() for x in (a, b, h0)]
    torch.autograd.gradcheck(call, tensors, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    torch.autograd.gradgradcheck(call, tensors, check_fwd_over_rev=True, fast_mode=True)


def cubes(scan, x):
    """A scalar of third order in everything that a scan takes."""
    h, h_last = scan(x, x.sin(), x[:, 0])
    return (h.sin() * x).sum() + h_last.square().sum()


@pytest.mark.parametrize("scan", SCANS)
def test_derivatives_by_every_order_of_transforms(scan):
    torch.manual_seed(0)
    x = torch.rand(1, 4, 2, dtype=torch.float64) / 2 + 0.2
    kernels, loops = (functools.partial(cubes, functools.partial(scan, backend=name)) for name in ("cpu", "reference"))
    want = torch.autograd.functional.hessian(loops, x)
    jacrev, jacfwd = torch.func.jacrev, torch.func.jacfwd
    for outer in (jacrev, jacfwd):
        for inner in (jacrev, jacfwd):
            assert error(outer(inner(kernels))(x), want) < 1e-12
    third = jacfwd(jacfwd(jacrev(kernels)))(x)
    assert error(jacrev(jacrev(jacfwd(loops)))(x), third) < 1e-12
    step = 1e-5 * torch.ones_like(x)
    difference = (jacrev(jacrev(kernels))(x + step) - jacrev(jacrev(kernels))(x - step)) / 2e-5
    assert error(third.sum((-3, -2, -1)), difference) < 1e-8
    assert error(torch.vmap(torch.func.hessian(kernels))(torch.stack((x, 2 * x)))[0], want) < 1e-12


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("mode", ["eager", "vmap", "export"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_second_derivatives_of_what_is_not_eager(scan, mode):
    a, b, _ = (x.abs().requires_grad_() for x in inputs(1, 5, 2))

    class Scan(torch.nn.Module):
        def forward(self, a, b):
            return scan(a, b)

    def second(run, x, y):
        gradients = torch.autograd.grad(run(x, y)[0].square().sum(), (a, b), create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in gradients), (a, b))

    x, y = (a[None], b[None]) if mode == "vmap" else (a, b)
    run = {"eager": scan, "vmap": torch.vmap(scan), "export": torch.export.export(Scan(), (a, b)).module()}[mode]
    for got, want in zip(second(run, x, y), second(functools.partial(scan, backend="reference"), a, b), strict=True):
        assert error(got, want) < 1e-12


@pytest.mark.parametrize("name", ["linear_scan", "log_linear_scan", "minimal_scan"])
@pytest.mark.parametrize("mode", ["dual", "jvp", "jacfwd", "jvp of vmap", "vmap of jvp", "compiled jvp"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_forward_mode_derivatives(name, mode):
    torch.compiler.reset()  # what another test compiled may hide that tangents are lost
    torch.manual_seed(0)
    layer = ostinato.MinGRU(3, 4).double()

    def function(x):
        return layer(x)[0] if name == "minimal_scan" else getattr(ostinato, name)(x, x)[0]

    def jvp(x):
        return torch.func.jvp(function, (x,), (x,))[1]

    def dual(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent

    x = torch.rand(2, 5, 3, dtype=torch.float64)
    calls = {
        "dual": lambda: dual(x),
        "jvp": lambda: jvp(x),
        "jacfwd": lambda: (torch.func.jacfwd(function)(x) * x).sum((-3, -2, -1)),
        "jvp of vmap": lambda: torch.func.jvp(torch.vmap(function), (x[None],), (x[None],))[1][0],
        "vmap of jvp": lambda: torch.vmap(jvp)(x[None])[0],
        "compiled jvp": lambda: torch.compile(jvp, backend="eager")(x),
    }
    want = (function(x * (1 + 1e-6)) - function(x * (1 - 1e-6))) / 2e-6
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert error(calls[mode](), want) < 1e-8


def test_a_scan_of_constants_beside_a_forward_mode_derivative():
    x = torch.rand(2, 5, 3)
    h = ostinato.linear_scan(x, x)[0]
    got, tangent = torch.func.jvp(lambda y: y * ostinato.linear_scan(x, x)[0], (x,), (x,))
    assert torch.equal(got, x * h)
    assert torch.equal(tangent, x * h)
    scan = torch.vmap(lambda row: ostinato.linear_scan(row[None], row[None])[0])
    assert torch.equal(torch.func.jvp(lambda y: y * scan(x).squeeze(1), (x,), (x,))[1], x * h)


FINE = torch.rand(1, 6, 3)


@pytest.mark.parametrize(
    ("arguments", "keywords", "kind", "message"),
    [
        ((FINE[0], FINE[0]), {}, ValueError, r"a must have shape \(B, T, D\); got \(6, 3\)"),
        ((FINE, FINE[:, :5]), {}, ValueError, r"b must have the shape of a, \(1, 6, 3\); got \(1, 5, 3\)"),
        ((FINE.int(), FINE), {}, TypeError, "a must be a tensor of a floating dtype; got a tensor of torch.int32"),
        ((FINE, [1.0]), {}, TypeError, "b must be a tensor .* got list"),
        ((FINE, FINE.to_sparse()), {}, TypeError, "b must be a dense tensor; got a torch.sparse_coo one"),
        ((FINE, FINE), {"reverse": "no"}, TypeError, "reverse must be a bool; got str"),
        ((FINE, FINE.to("meta")), {}, ValueError, "b must be on the device of a, cpu; got meta"),
        ((FINE, FINE, FINE[0]), {}, ValueError, r"h0 must have shape \(1, 3\); got \(6, 3\)"),
        ((FINE, FINE), {"backend": "gpu"}, ValueError, "backend must be one of .*'auto'.* got 'gpu'"),
        ((FINE, FINE), {"backend": np.array(["auto"] * 2)}, ValueError, r"backend must be one of .*; got array"),
        ((FINE, FINE), {"backend": "cuda"}, RuntimeError, "backend 'cuda' runs on cuda tensors; got tensors on cpu"),
        ((FINE, FINE), {"resets": [True] * 6}, TypeError, "resets must be a bool tensor; got list"),
        ((FINE, FINE), {"resets": torch.ones(1, 6)}, TypeError, "resets must be .* got a tensor of torch.float32"),
        ((FINE, FINE), {"resets": FINE > 0}, ValueError, r"resets must have shape \(1, 6\), .*; got \(1, 6, 3\)"),
        ((FINE, FINE), {"resets": (FINE > 0)[..., 0].to("meta")}, ValueError, "resets must be on the device of a, cpu"),
        ((FINE, FINE), {"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens must be an int32 tensor; got list"),
        ((FINE, FINE), {"cu_seqlens": torch.tensor([0, 6])}, TypeError, "cu_seqlens must be .* torch.int64"),
        ((FINE, FINE), {"cu_seqlens": torch.tensor([[0, 6]]).int()}, ValueError, r"cu_seqlens must have shape \(N"),
        ((FINE, FINE), {"cu_seqlens": torch.tensor([0, 5]).int()}, ValueError, r"rise from 0 to .* 6; got \[0, 5\]"),
        ((FINE, FINE), {"cu_seqlens": torch.tensor([0, 4, 3, 6]).int()}, ValueError, "cu_seqlens must rise"),
        ((FINE, FINE), {"cu_seqlens": torch.tensor([1, 6]).int()}, ValueError, "cu_seqlens must rise"),
        ((torch.cat((FINE, FINE)),) * 2, {"cu_seqlens": torch.tensor([0, 6]).int()}, ValueError, "a must have a batch"),
    ],
)
def test_bad_input_is_named(arguments, keywords, kind, message):
    with pytest.raises(kind, match=message):
        ostinato.linear_scan(*arguments, **keywords)


def test_boundaries_changed_in_place_are_checked_again():
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    ostinato.linear_scan(FINE, FINE, cu_seqlens=bounds)
    bounds[1] = 7
    with pytest.raises(ValueError, match="cu_seqlens must rise"):
        ostinato.linear_scan(FINE, FINE, cu_seqlens=bounds)
    bounds[1] = 3
    a = FINE.clone().requires_grad_()
    h, _ = ostinato.linear_scan(a, FINE, cu_seqlens=bounds)
    bounds.numpy()[1] = 1 << 30  # no version counts this
    for run in (lambda: ostinato.linear_scan(FINE, FINE, cu_seqlens=bounds), h.sum().backward):
        with pytest.raises(ValueError, match="cu_seqlens must rise"):
            run()


@torch.inference_mode()
def test_boundaries_made_in_inference_mode():
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    h, _ = ostinato.linear_scan(FINE, FINE, cu_seqlens=bounds)
    assert torch.equal(h[:, 2:], ostinato.linear_scan(FINE[:, 2:], FINE[:, 2:])[0])


def test_what_was_checked_once_is_looked_at_again_where_it_differs():
    a, b, h0 = inputs(2, 5, 3)
    want = loop(a, b, h0)
    for _ in range(2):
        for got, y in zip(ostinato.linear_scan(a, b, h0), want, strict=True):
            torch.testing.assert_close(got, y)
    for x in (a.mT.contiguous().mT, a[:, :, :1].expand(2, 5, 3)):
        torch.testing.assert_close(ostinato.linear_scan(x, b, h0)[0], loop(x, b, h0)[0])
    for arguments, options in (
        ((a, b, h0), {"reverse": 0}),
        ((a, b, h0[:1]), {}),
        ((a, b[:, :4], h0), {}),
        ((a, b, h0), {"backend": "cudnn"}),
        ((a, b, h0), {"resets": torch.zeros(2, 5)}),
        ((a.tolist(), b, h0), {}),
    ):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)):
                ostinato.linear_scan(*arguments, **options)


def test_what_was_checked_once_still_has_gradients_and_transforms():
    a, b, _ = inputs(2, 5, 3)
    ostinato.linear_scan(a, b)
    leaf = a.clone().requires_grad_()
    for _ in range(2):
        h, _ = ostinato.linear_scan(leaf, b)
        (grad,) = torch.autograd.grad(h.sum(), leaf, create_graph=True)
        torch.testing.assert_close(grad, torch.func.grad(lambda x: ostinato.linear_scan(x, b)[0].sum())(a))
        assert torch.autograd.grad(grad.sum(), leaf)[0].abs().sum() > 0
        with torch.no_grad():
            assert not ostinato.linear_scan(leaf, b)[0].requires_grad
        batched = torch.vmap(lambda x: ostinato.linear_scan(x, b)[0])(torch.stack([a, a]))
        torch.testing.assert_close(batched[1], h)
