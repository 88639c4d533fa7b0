"""Generated linear recurrences against the function itself and a loop, by every backend."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import ostinato
from ostinato.diagonal import rg_lru as griffin
from ostinato.kernels.recurrence.linear.element import print_element
from ostinato.kernels.recurrence.linear.operator import linear_recurrence
from ostinato.kernels.recurrence.symbolic.tracer import trace
from scan_kernels import relative_error

BACKENDS = ("reference", "torch", "cpu")
ON_DEVICES = (*BACKENDS, pytest.param("cuda", marks=pytest.mark.gpu))
TOLERANCE = {torch.float64: 1e-11, torch.float32: 4e-6, torch.bfloat16: 1.6e-2}


def rg_lru(x, r, i, log_lambda):  # arXiv 2402.19427
    log_a = -8 * F.softplus(log_lambda) * torch.sigmoid(r)
    return torch.exp(log_a), torch.sqrt(-torch.expm1(2 * log_a)) * torch.sigmoid(i) * x


def hgrn(f, x):
    a = torch.sigmoid(f)
    return a, (1 - a) * F.silu(x)


def oscillating(scale, x, shift, y):  # of operations that nothing ready-made uses
    turn = torch.sin(3 * x + shift) * torch.cos(y)
    return 0.9 * turn, torch.where(y > 0, torch.log1p(y.abs()), torch.log(1 + x * x)) * scale / (1 + torch.exp(x))


def winding(x, y, width):  # of angles and remainders
    angle = torch.atan2(x, y) + torch.hypot(x, width)
    turns = torch.fmod(angle, 1 + width.abs()) + torch.remainder(x, 0.75) + (2 * y).floor() * x.ceil()
    return 0.9 * torch.cos(angle), turns + (4 * x).round() / 4 + y.trunc()


def constant_gate(x, rate):
    return torch.tanh(rate), x - x.detach() + 1.0


def chosen_by_channel(x, y, which):  # by tests of a parameter alone
    return torch.sigmoid(x), torch.where((which > 0) & (y > 0), x, y) * torch.relu(which)


RECURRENCES = {
    rg_lru: (True, True, True, False),
    hgrn: (True, True),
    oscillating: (False, True, False, True),
    winding: (True, True, False),
    constant_gate: (True, False),
    chosen_by_channel: (True, True, False),
}


def loop(function, arguments, h0, bounds, resets, reverse):
    """The recurrence, one step after the other, of each sequence by itself."""
    a, b = torch.broadcast_tensors(*function(*arguments))
    h, last = torch.zeros_like(b), []
    for n, (first, end) in enumerate(itertools.pairwise(bounds)):
        rows = range(n, n + 1) if len(bounds) > 2 else range(len(b))
        state = h0[rows] if len(bounds) > 2 else h0
        steps = []
        for t in reversed(range(first, end)) if reverse else range(first, end):
            if resets is not None:
                state = state.masked_fill(resets[:, t, None], 0.0)
            state = a[:, t] * state + b[:, t]
            steps.append(state)
        if steps:
            steps = torch.stack(steps[::-1] if reverse else steps, 1)
            h = torch.cat((h[:, :first], steps, h[:, end:]), 1)
        last.append(state)
    return h, torch.cat(last)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("backend", ON_DEVICES)
@pytest.mark.parametrize("function", RECURRENCES, ids=lambda f: f.__name__)
def test_states_and_gradients_equal_a_loop(function, backend, packed):
    check_against_loop(function, backend, packed, 37, 21)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", ON_DEVICES)
def test_rg_lru_has_gradients_where_its_gate_is_shut(backend, dtype):
    """There a is 1, where the root of 1 - a * a has no derivative, but the gate's is zero."""
    torch.manual_seed(0)
    r = torch.tensor([-1e4, -1e3, -200, -100, -90, -40, -20, -5, 0, 5, 1e4]).to(dtype)
    x, i, log_lambda = torch.randn(3, len(r)).to(dtype)
    given = [y.clone()[None, None] for y in (x, r, i)] + [log_lambda]
    given = [y.to("cuda" if backend == "cuda" else "cpu").requires_grad_() for y in given]
    h, _ = griffin.rg_lru(*given, backend=backend)
    got = torch.autograd.grad(h.sum(), given)

    x, r, i, log_lambda = (y.double() for y in (x, r, i, log_lambda))
    log_a = -8 * torch.sigmoid(r) * torch.nn.functional.softplus(log_lambda)
    scale, gate = torch.sqrt(-torch.expm1(2 * log_a)), torch.sigmoid(i)
    slope = torch.where(log_a == 0, 0.0, -torch.exp(2 * log_a) / scale) * gate * x  # by log_a
    want = (
        *(scale * gate, slope * log_a * torch.sigmoid(-r), scale * gate * torch.sigmoid(-i) * x),
        slope * -8 * torch.sigmoid(r) * torch.sigmoid(log_lambda),
    )
    assert scale[0] == 0
    assert relative_error(h.flatten(), scale * gate * x) < TOLERANCE[dtype]
    for one, other in zip(got, want, strict=True):
        assert relative_error(one.flatten(), other) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("steps", "channels"), [(1100, 64), (150, 5)])
@pytest.mark.parametrize("function", [rg_lru, oscillating, winding], ids=lambda f: f.__name__)
def test_every_kind_of_kernel_equals_a_loop(function, steps, channels, packed):
    check_against_loop(function, "cuda", packed, steps, channels)


@pytest.mark.gpu
@pytest.mark.parametrize("resetting", [False, True], ids=["continuing", "resetting"])
@pytest.mark.parametrize("channels", [3, 11])
@pytest.mark.parametrize("function", [hgrn, oscillating], ids=lambda f: f.__name__)
def test_short_sequences_scanned_as_one_equal_those_on_a_cpu(function, channels, resetting):
    torch.manual_seed(0)
    recurrence, shape = trace(function, RECURRENCES[function]).text, (6000, 9, channels)
    inputs = [torch.randn(shape if sequence else shape[2:]) for sequence in RECURRENCES[function]]
    grad, resets = torch.randn(shape), torch.rand(shape[:2]) < 0.1 if resetting else None
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        given = [x.to(device, dtype).requires_grad_() for x in inputs]
        mask = None if resets is None else resets.to(device)
        h, h_last = linear_recurrence(recurrence, None, None, mask, False, device, *given)
        results.append((h, h_last, *torch.autograd.grad(h, given, grad.to(device, dtype))))
    for want, got in zip(*results, strict=True):
        assert relative_error(got, want) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(128, 300, 256), (1, 9000, 64), (3, 5000, 1000)], ids=str)
def test_a_state_that_has_diverged_ends_at_a_reset(shape, dtype):
    torch.manual_seed(0)
    recurrence = trace(oscillating, RECURRENCES[oscillating]).text
    clean = [torch.randn(shape if sequence else shape[2:]).to(dtype) for sequence in RECURRENCES[oscillating]]
    h0, grad = torch.zeros(shape[0], shape[2]).to(dtype), torch.randn(shape).to(dtype)
    resets = torch.zeros(shape[:2], dtype=torch.bool)
    resets[:, 150] = True
    diverging = [x.clone().cuda() for x in clean]
    diverging[1][:, 148] = torch.inf
    got, _ = linear_recurrence(recurrence, h0.cuda(), None, resets.cuda(), False, "cuda", *diverging)
    after = [x[:, 150:].double() if x.dim() == 3 else x.double() for x in clean]
    want, _ = linear_recurrence(recurrence, h0.double(), None, None, False, "cpu", *after)
    assert relative_error(got[:, 150:], want) < TOLERANCE[dtype]
    assert not got[:, 149].isfinite().any()
    inputs = [x.cuda().requires_grad_() for x in clean]
    before = [(x[:, :150] if x.dim() == 3 else x).double().requires_grad_() for x in clean]
    h, _ = linear_recurrence(recurrence, h0.double(), None, None, False, "cpu", *before)
    (want,) = torch.autograd.grad(h, before[1], grad[:, :150].double())
    grad[:, 151] = torch.inf  # which ends there on its way back
    h, _ = linear_recurrence(recurrence, h0.cuda(), None, resets.cuda(), False, "cuda", *inputs)
    (got,) = torch.autograd.grad(h, inputs[1], grad.cuda())
    assert relative_error(got[:, :150], want) < 10 * TOLERANCE[dtype]


def check_against_loop(function, backend, packed, steps, channels):
    """Everything that a recurrence gives, in every dtype, direction and with resets."""
    torch.manual_seed(0)
    device = "cuda" if backend == "cuda" else "cpu"
    kinds = RECURRENCES[function]
    recurrence = trace(function, kinds).text
    bounds = [0, 7, 7, 30, steps] if packed else [0, steps]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device) if packed else None
    batch, sequences = (1, 4) if packed else (3, 3)
    for dtype, reverse, resetting in itertools.product(TOLERANCE, (False, True), (False, True)):
        if device == "cuda" and reverse != resetting:  # for each kernel once
            continue
        if backend == "cpu" and dtype != torch.float64 and function not in (rg_lru, oscillating, winding):
            continue  # of the others' operations float32 has no code of its own: another loop, and nothing new
        shapes = [(steps, batch, channels) if sequence else (channels,) for sequence in kinds]  # time-major in memory
        narrow = [torch.randn(shape).to(dtype) for shape in shapes]
        narrow = [x.transpose(0, 1) if x.dim() == 3 else x for x in narrow]
        h0 = torch.randn(sequences, channels).to(dtype)
        resets = torch.rand(batch, steps) < 0.2 if resetting else None
        wide = [x.double().requires_grad_() for x in (*narrow, h0)]
        narrow = [x.to(device).requires_grad_() for x in (*narrow, h0)]
        want = loop(function, wide[:-1], wide[-1], bounds, resets, reverse)
        resets = None if resets is None else resets.to(device)
        got = linear_recurrence(recurrence, narrow[-1], cu_seqlens, resets, reverse, backend, *narrow[:-1])
        weights = [torch.randn_like(x) for x in want]
        wanted = torch.autograd.grad(want, wide, weights, materialize_grads=True)
        found = torch.autograd.grad(got, narrow, [w.to(device, dtype) for w in weights])
        for x, y in zip(got, want, strict=True):
            assert x.dtype == dtype
            assert relative_error(x, y) < TOLERANCE[dtype]
        for x, y in zip(found, wanted, strict=True):
            assert relative_error(x, y) < 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_derivatives_of_any_order(backend):
    torch.manual_seed(0)
    arguments = [torch.randn(2, 5, 3).double().requires_grad_() for _ in range(3)]
    arguments += [torch.randn(n).double().requires_grad_() for n in ((3,), (2, 3))]

    recurrence = trace(rg_lru, RECURRENCES[rg_lru]).text

    def function(*args):
        return linear_recurrence(recurrence, args[-1], None, None, False, backend, *args[:-1])

    torch.autograd.gradcheck(function, arguments, check_forward_ad=True, fast_mode=True)
    torch.autograd.gradgradcheck(function, arguments, fast_mode=True)


def test_operator_is_well_formed_and_compiles():
    torch.manual_seed(0)
    recurrence = trace(hgrn, (True, True)).text
    x, y = torch.randn(2, 2, 5, 3)
    arguments = (recurrence, torch.randn(2, 3).requires_grad_(), None, None, False, "cpu")
    torch.library.opcheck(torch.ops.ostinato.linear_recurrence.default, (*arguments, [x.requires_grad_(), y]))

    def run(x, y):
        return linear_recurrence(recurrence, None, None, None, False, "auto", x, y)[0].sum()

    expected = torch.autograd.grad(run(x, y), x)
    got = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(x, y), x)
    assert torch.equal(got[0], expected[0])


def test_large_angles_in_float32_on_a_cpu():
    recurrence = trace(lambda x: (0 * x, torch.sin(x) + 2 * torch.cos(x)), (True,)).text

    def waves(x):
        return linear_recurrence(recurrence, None, None, None, False, "cpu", x[None, None])[0][0, 0]

    x = torch.logspace(-3, 15.3, 2000)
    x = torch.cat((x, -x, torch.arange(-400, 400) * torch.pi / 4))
    want = x.double().sin() + 2 * x.double().cos()
    assert (waves(x) - want).abs().max() < 4e-7
    assert waves(torch.tensor([torch.inf, -torch.inf, torch.nan])).isnan().all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, z: (torch.tanh(z), torch.addcmul(x, y, z, value=1e-30)),
        lambda x, y, z: (torch.tanh(z), torch.addcmul(x, y, z, value=1e30)),
        lambda x, y, z: (torch.tanh(z), torch.addcdiv(x, y, z, value=1e-30)),
        lambda x, y, z: (torch.tanh(z), torch.addcdiv(x, y, z, value=1e30)),
        lambda x, y, z: (torch.tanh(z), -(y * 1e-30) * z),
    ],
    ids=["addcmul tiny", "addcmul huge", "addcdiv tiny", "addcdiv huge", "product"],
)
def test_huge_and_tiny_constants_keep_their_place_in_a_product(function):
    """Or products overflow that do not in PyTorch, or become zero."""
    numbers = torch.tensor([1e30, 1e-30, 3.0, -1e-10])
    y, z = torch.cartesian_prod(numbers, numbers).t().contiguous().view(2, 1, 1, 16)
    x = torch.full_like(y, 2.0)
    h = linear_recurrence(trace(function, (True,) * 3).text, None, None, None, False, "cpu", x, y, z)[0]
    torch.testing.assert_close(h, function(x, y, z)[1], rtol=1e-6, atol=0)


def test_sigmoids_are_computed_in_pairs():
    def code(function):
        return print_element(trace(function, (True, True, True)), False)

    independent = code(lambda x, y, z: (torch.sigmoid(x), torch.sigmoid(y) * torch.sigmoid(z) * torch.sigmoid(-y)))
    assert independent.count("= sigmoid(") == independent.count(" sigmoids(") == 1
    assert "sigmoids(" not in code(lambda x, y, z: (torch.sigmoid(x), torch.sigmoid(y + z * torch.sigmoid(x))))
    masked = code(lambda x, y, z: (torch.sigmoid(x), torch.where(z > 0, torch.sigmoid(y), 0.0)))  # y may be NaN
    assert "sigmoids(" not in masked


@pytest.mark.parametrize("kinds", [(3,), (2, 4, 3)], ids=["parameters", "sequences"])
def test_more_arguments_than_64(kinds):
    names = [f"x{k}" for k in range(70)]
    code = f"lambda {', '.join(names)}: (torch.sigmoid({' + '.join(names[::2])}), {' + '.join(names[1::2])})"
    function = ostinato.recurrence(eval(code, {"torch": torch}))
    torch.manual_seed(0)
    arguments = [torch.randn(kinds if k else (2, 4, 3), dtype=torch.float64, requires_grad=True) for k in range(70)]
    found = []
    for backend in ("auto", "torch"):
        h, _ = function(*arguments, backend=backend)
        found.append((h, *torch.autograd.grad(h.square().sum(), arguments)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


def test_long_functions_are_printed_at_once():
    def iterated(x, y):  # whose last value depends on the first along 2**60 paths
        start = y
        for _ in range(60):
            y = y + 0.1 * torch.sin(y)
        return torch.sigmoid(start), torch.sigmoid(y) * x

    assert print_element(trace(iterated, (True, True)), False).count("sine(") == 60


def test_vmap_takes_samples_as_channels():
    torch.manual_seed(0)
    recurrence = trace(rg_lru, RECURRENCES[rg_lru]).text
    x, r, i = torch.randn(3, 4, 2, 5, 3)
    log_lambda = torch.randn(4, 3)

    def run(x, r, i, log_lambda):
        return linear_recurrence(recurrence, None, None, None, True, "cpu", x, r, i, log_lambda)[0]

    want = torch.stack([run(*args) for args in zip(x, r, i, log_lambda, strict=True)])
    assert torch.equal(torch.vmap(run)(x, r, i, log_lambda), want)
    gradient = torch.func.grad(lambda *args: run(*args).square().sum(), argnums=3)
    want = torch.stack([gradient(*args) for args in zip(x, r, i, log_lambda, strict=True)])
    torch.testing.assert_close(torch.vmap(gradient)(x, r, i, log_lambda), want)


ELEMENTARY = (
    *(torch.exp, torch.expm1, torch.log, torch.log1p, torch.sqrt, torch.rsqrt, torch.reciprocal),
    *(torch.sigmoid, torch.tanh, F.softplus, F.silu),
)


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def all_of(dtype):
    """Every 16-bit number."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def check_rounding(got, want, x):
    """All error together is less than three quarters of a unit in the last place."""
    limits = torch.finfo(x.dtype)
    shown = want.isfinite() & (want.abs() < limits.max) & (want.abs() > max(limits.smallest_normal, 2.0**-100))
    shown &= x.double().abs() >= torch.finfo(torch.float32).smallest_normal  # below, numbers count as zero
    unit = limits.eps * 2 ** want.abs().log2().floor()
    error = ((got.double().cpu() - want).abs() / unit)[..., shown]
    assert shown.sum() > 5000
    assert error.max() < 0.75


@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize("function", ELEMENTARY, ids=lambda f: f.__name__)
def test_approximations_are_lost_in_the_rounding_to_16_bits(function, dtype):
    recurrence = trace(lambda x: (torch.zeros_like(x), function(x)), (True,)).text
    x = all_of(dtype)
    got = linear_recurrence(recurrence, None, None, None, False, "cuda", x[None, None].cuda())[0][0, 0]
    check_rounding(got, function(x.double()), x)


@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "second"])
def test_a_sigmoid_does_not_depend_on_the_one_computed_with_it(order, dtype):
    def function(*arguments):
        x, y = (torch.sigmoid(arguments[k]) for k in order)
        return y, x

    recurrence = trace(function, (True, True)).text
    x = all_of(dtype)
    others = torch.tensor([-torch.inf, -1e4, -80.0, -1.0, 0.0, 20.0, 1e4, torch.inf], dtype=dtype)
    arguments = [x.repeat(len(others), 1)[:, None].cuda(), others[:, None, None].expand(-1, 1, len(x)).cuda()]
    got, _ = linear_recurrence(recurrence, None, None, None, False, "cuda", *(arguments[k] for k in order))
    check_rounding(got[:, 0], torch.sigmoid(x.double()), x)
