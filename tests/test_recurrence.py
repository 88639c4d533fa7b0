"""Recurrences made of functions, against written-out loops over single sequences and steps."""

import copy
import functools
import inspect
import itertools
import math
import pickle

import pytest
import torch
from torch.nn import functional as F

import ostinato
from comparisons import assert_all_close, same_bits
from ostinato.replay import Recorder

BACKENDS = ["auto", "reference", "torch", "cpu"]


@ostinato.recurrence
def rg_lru(x, r, i, log_lambda):
    log_a = -8 * F.softplus(log_lambda) * torch.sigmoid(r)
    return torch.exp(log_a), torch.sqrt(-torch.expm1(2 * log_a)) * torch.sigmoid(i) * x


@ostinato.recurrence
def unnamed(before, x):
    return before + x


@ostinato.recurrence
def of_three(state, x):
    h, c, n = state
    return h + x, c + n


@ostinato.recurrence
def of_one(h, x):
    return h + x, x


@ostinato.recurrence
def rotated(h, x, u, v):
    return torch.sin(u * h + v) + 0.5 * x


@ostinato.recurrence
def peephole(state, x, f, w):
    h, c = state
    c = torch.sigmoid(f + w * h) * c + torch.tanh(x - 0.3 * h)
    return torch.sigmoid(x + c) * torch.tanh(c), c


# The same once more, of one element and with the state as a tuple.
def rg_lru_step(state, x, r, i, log_lambda):
    a = torch.exp(-8 * torch.sigmoid(r) * torch.log(1 + torch.exp(log_lambda)))
    return (a * state[0] + torch.sqrt(1 - a**2) * torch.sigmoid(i) * x,)


def rotated_step(state, x, u, v):
    return ((u * state[0] + v).sin() + x / 2,)


def peephole_step(state, x, f, w):
    c = state[1] / (1 + torch.exp(-f - w * state[0])) + torch.tanh(x - 0.3 * state[0])
    return torch.tanh(c) / (1 + torch.exp(-x - c)), c


# The recurrence, one step of it, its states, and which of its arguments are sequences.
CASES = {
    "linear": (rg_lru, rg_lru_step, 1, (True, True, True, False)),
    "one state": (rotated, rotated_step, 1, (True, True, False)),
    "two states": (peephole, peephole_step, 2, (True, True, False)),
}


def loop(step, arguments, h0, resets, reverse, bounds):
    """(states, last states) of sequences given as (B, T, ...), or as the parts of a single row between bounds."""
    first = next(x for x in arguments if x.dim() == 3)
    rows = [(b, 0, first.shape[1]) for b in range(len(first))]
    if bounds is not None:
        rows = [(0, start, end) for start, end in itertools.pairwise(bounds)]
    outputs, lasts = [], []
    for n, (b, start, end) in enumerate(rows):
        state, states = tuple(x[n] for x in h0), {}
        for t in sorted(range(start, end), reverse=reverse):
            if resets is not None and resets[b, t]:
                state = tuple(torch.zeros_like(x) for x in state)
            state = states[t] = step(state, *(x[b, t] if x.dim() == 3 else x for x in arguments))
        outputs += [states[t] for t in range(start, end)]
        lasts.append(state)
    shape = first.shape
    states = [torch.stack(x).view(shape) if len(x) else first.new_zeros(shape) for x in zip(*outputs, strict=True)]
    return tuple(states), tuple(torch.stack(x) for x in zip(*lasts, strict=True))


def inputs(case, batch=2, length=9, channels=3, sequences=None, dtype=torch.float64):
    torch.manual_seed(0)
    _, _, states, kinds = CASES[case]
    shape = batch, length, channels
    arguments = [torch.randn(shape if kind else channels, dtype=dtype, requires_grad=True) for kind in kinds]
    h0 = tuple(torch.randn(sequences or batch, channels, dtype=dtype, requires_grad=True) for _ in range(states))
    return arguments, h0


def call(function, arguments, h0, **options):
    """The states and last states as tuples, of whatever number."""
    results = function(*arguments, h0=h0 if function.states == 2 else h0[0], **options)
    return results if function.states == 2 else tuple((x,) for x in results)


def assert_close_with_gradients(got, want, wrt):
    """The results and the gradients of a sum of them with random weights."""
    got, want = (*got[0], *got[1]), (*want[0], *want[1])
    weights = [torch.randn_like(x) for x in want]
    grads = [torch.autograd.grad(x, wrt, weights, materialize_grads=True) for x in (got, want)]
    assert_all_close((*got, *grads[0]), (*want, *grads[1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("layout", ["plain", "resets", "packed", "packed with resets"])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_over_steps(case, layout, reverse, backend):
    function, step, _, _ = CASES[case]
    bounds = [0, 4, 4, 9] if "packed" in layout else None
    batch, sequences = (1, 3) if bounds else (2, 2)
    arguments, h0 = inputs(case, batch, sequences=sequences)
    resets = torch.rand(batch, 9) < 0.3 if "resets" in layout else None
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    got = call(function, arguments, h0, resets=resets, reverse=reverse, cu_seqlens=cu_seqlens, backend=backend)
    assert_close_with_gradients(got, loop(step, arguments, h0, resets, reverse, bounds), [*arguments, *h0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("memory", [lambda u: u[:1].expand(3), lambda u: torch.stack([u, -u], 1)[:, 0]])
def test_arguments_of_channels_may_have_any_stride(memory, backend):
    @ostinato.recurrence
    def decaying(x, decay, gain):  # from a parameter as it is
        return decay, x * gain

    torch.manual_seed(0)
    x, decay, gain = (x.requires_grad_() for x in (torch.randn(2, 9, 3).double(), *torch.rand(2, 3).double()))
    arguments = [x, memory(decay), memory(gain)]
    want = loop(
        lambda state, x, a, gain: (a * state[0] + x * gain,), arguments, [torch.zeros(2, 3).double()], None, False, None
    )
    assert_close_with_gradients(call(decaying, arguments, [None], backend=backend), want, [x, decay, gain])


@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    function = CASES[case][0]
    arguments, h0 = inputs(case, length=5)
    resets = torch.tensor([[False, False, True, False, False], [True, False, False, False, True]])

    def results(*given):
        states, last = call(function, given[: len(arguments)], given[len(arguments) :], resets=resets)
        return (*states, *last)

    assert torch.autograd.gradcheck(results, (*arguments, *h0), fast_mode=True)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [4, 0])
@pytest.mark.parametrize("case", CASES)
def test_derivatives_of_derivatives_and_forward_mode(case, length, reverse):
    function = CASES[case][0]
    arguments, h0 = inputs(case, length=length, channels=2)
    given = (*arguments, *h0)

    def results(*given):
        states, last = call(function, given[: len(arguments)], given[len(arguments) :], reverse=reverse)
        return (*states, *last)

    assert torch.autograd.gradgradcheck(results, given, fast_mode=True)
    tangents = tuple(map(torch.randn_like, given))
    outputs, moved = torch.func.jvp(results, given, tangents)
    weights = tuple(map(torch.randn_like, outputs))
    grads = torch.autograd.grad(results(*given), given, weights)
    forwards = sum((w * m).sum() for w, m in zip(weights, moved, strict=True))
    backwards = sum((g * t).sum() for g, t in zip(grads, tangents, strict=True))
    assert torch.allclose(forwards, backwards, rtol=1e-12)


@pytest.mark.parametrize("packed", [False, True], ids=["one sequence", "packed"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("equation", [lambda h, x: torch.sqrt(h) + x, lambda h, x: torch.sqrt(h) * x + x])
def test_a_slope_that_is_infinite_at_zero_is_not_taken_at_the_first_step(equation, reverse, packed):
    function = ostinato.recurrence(equation)
    x = (torch.rand(1, 6, 2, dtype=torch.float64) + 0.5).requires_grad_()
    options = {"reverse": reverse, "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32) if packed else None}
    found = []
    for backend in ("auto", "torch"):
        run = functools.partial(function, backend=backend, **options)
        states, moved = torch.func.jvp(lambda x, run=run: run(x)[0], (x,), (torch.ones_like(x),))
        (grad,) = torch.autograd.grad(run(x)[0].sum(), x, create_graph=True)
        found.append((states, moved, grad, *torch.autograd.grad(grad.square().sum(), x)))
    assert all(torch.isfinite(value).all() for value in found[1])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def stepped_in_no_grad(h, x, y):
    with torch.no_grad():
        wave = torch.sin(h * y)
    return torch.tanh(h) * wave + x


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (torch.sigmoid(x), x.detach() * torch.tanh(y)),
        lambda x, y: (torch.sigmoid(x), (x + (8 * x).round().div(8).sub(x).detach()) * y),
        lambda h, x, y: torch.tanh(h.detach() * x) * y,
        stepped_in_no_grad,
        lambda x, y: (torch.sigmoid(x), Product.apply(x.detach(), torch.tanh(y))),
        lambda state, x, y: (torch.tanh(state[0].detach() * x + state[1]), state[1] * y.data + torch.sin(state[0])),
    ],
    ids=["linear", "straight through", "of the state", "no_grad", "into a Function", "two states"],
)
def test_all_derivatives_stop_where_the_function_stops_them(function):
    torch.manual_seed(0)
    function = ostinato.recurrence(function)
    arguments = [torch.randn(2, 5, 3).double().requires_grad_() for _ in range(2)]
    h0 = [torch.randn(2, 3).double().requires_grad_() for _ in range(max(1, function.states))]
    given, found = (*arguments, *h0), []
    for backend in ("auto", "torch"):
        torch.manual_seed(1)
        states, _ = call(function, arguments, h0, backend=backend)
        loss = sum((x * torch.randn_like(x)).sum() for x in states)
        grads = torch.autograd.grad(loss, given, create_graph=True, materialize_grads=True)
        moved = sum((g * torch.randn_like(g)).sum() for g in grads)
        found.append((*grads, *torch.autograd.grad(moved, given, materialize_grads=True)))
    assert any(x.any() for x in found[1][len(given) :])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES)
def test_two_halves_with_the_state_carried_equal_the_whole(case):
    function = CASES[case][0]
    arguments, h0 = inputs(case)
    states, last = call(function, arguments, h0)
    first, between = call(function, [x[:, :4] if x.dim() == 3 else x for x in arguments], h0)
    second, end = call(function, [x[:, 4:] if x.dim() == 3 else x for x in arguments], between)
    for whole, *halves in zip(states, first, second, strict=True):
        assert torch.allclose(torch.cat(halves, 1), whole, rtol=1e-13, atol=1e-13)
    for got, want in zip(end, last, strict=True):
        assert torch.allclose(got, want, rtol=1e-13, atol=1e-13)


@torch.no_grad()
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_single_steps_without_gradients(case, given):
    """From arguments of any stride, of which the kernels of a step take some."""
    function, step = CASES[case][:2]
    arguments, h0 = inputs(case, length=2)
    if not given:
        h0 = tuple(torch.zeros_like(x) for x in h0)
    for chosen in (slice(0, 1), slice(1, 2)):
        for narrow in (lambda x: x, lambda x: torch.stack([x, x], -1)[..., 0]):
            single = [narrow(x[:, chosen] if x.dim() == 3 else x) for x in arguments]
            results = function(*single, h0=(h0 if function.states == 2 else h0[0]) if given else None)
            got = results if function.states == 2 else tuple((x,) for x in results)
            expected = loop(step, single, h0, None, False, None)
            copies = [x.clone() for x in got[1]]
            for x in got[1]:
                x.zero_()  # is none of the states
            for x, exact in zip((*got[0], *copies), (*expected[0], *expected[1]), strict=True):
                torch.testing.assert_close(x, exact, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_are_repeated_without_operators_of_recurrences(case):
    function, step = CASES[case][:2]
    arguments, h0 = inputs(case, length=1)
    with Recorder() as recorder:
        states, last = call(function, arguments, h0)
    for x in (*arguments, *h0):
        x.mul_(0.5)
    with torch.profiler.profile() as profile:
        recorder.repeat()
    assert not [event.key for event in profile.key_averages() if "ostinato" in event.key]
    expected = loop(step, arguments, h0, None, False, None)
    for x, exact in zip((*states, *last), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(x, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_without_an_initial_state_it_is_zero(case):
    function = CASES[case][0]
    arguments, h0 = inputs(case)
    got = function(*arguments)
    want = call(function, arguments, tuple(map(torch.zeros_like, h0)))
    for g, w in zip(got, want, strict=True):
        assert same_bits(g if function.states == 2 else (g,), w)


def test_resets_act_before_their_step():
    @ostinato.recurrence
    def total(h, x):
        return h + x

    @ostinato.recurrence
    def linear_total(x):
        return torch.ones_like(x), x

    x, resets = torch.tensor([[[1.0], [2.0], [4.0], [8.0]]]), torch.tensor([[False, False, True, False]])
    for function in (total, linear_total):
        h0 = torch.tensor([[16.0]])
        assert function(x, h0=h0, resets=resets)[0].flatten().tolist() == [17, 19, 4, 12]
        assert function(x, h0=h0, resets=resets, reverse=True)[0].flatten().tolist() == [7, 6, 4, 24]


@pytest.mark.parametrize("case", CASES)
def test_half_precision_is_computed_in_float32(case):
    function, step, _, kinds = CASES[case]
    arguments, h0 = inputs(case, length=200)
    half = [x.bfloat16() if kind else x.float() for x, kind in zip(arguments, kinds, strict=True)]
    h0 = tuple(x.bfloat16().double() for x in h0)
    got = call(function, half, h0)
    want = loop(step, [x.double() for x in half], h0, None, False, None)
    for g, w in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert g.dtype == torch.bfloat16
        assert ((g - w).abs() <= w.abs() * 2**-8 + 1e-5).all()  # rounded once, at the end


@pytest.mark.parametrize("case", CASES)
def test_dtypes_of_sequences_are_promoted(case):
    function, _, _, kinds = CASES[case]
    arguments, h0 = inputs(case)
    mixed = [arguments[0].float(), *arguments[1:]]
    assert call(function, mixed, h0)[0][0].dtype == torch.float64
    single = [x.float() if kind else x for x, kind in zip(arguments, kinds, strict=True)]
    assert call(function, single, h0)[1][-1].dtype == torch.float32


@pytest.mark.parametrize("case", CASES)
def test_no_steps_and_no_sequences(case):
    function, _, _, kinds = CASES[case]
    _, h0 = inputs(case)
    arguments = [torch.randn((2, 0, 3) if kind else 3, dtype=torch.float64) for kind in kinds]
    states, last = call(function, arguments, h0)
    assert states[0].shape == (2, 0, 3)
    assert same_bits(last, h0)
    arguments = [torch.randn((1, 0, 3) if kind else 3, dtype=torch.float64) for kind in kinds]
    none = call(function, arguments, tuple(x[:0] for x in h0), cu_seqlens=torch.zeros(1, dtype=torch.int32))
    assert none[0][0].shape == (1, 0, 3)
    assert none[1][0].shape == (0, 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_no_steps_have_gradients_of_zero(case, backend):
    arguments, h0 = inputs(case, length=0)
    (state, *_), _ = call(CASES[case][0], arguments, tuple(x.detach() for x in h0), backend=backend)
    gradients = torch.autograd.grad(state.sum(), arguments, materialize_grads=True)
    assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(gradients, arguments, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_compile_export_vmap_and_autocast(case):
    function = CASES[case][0]
    arguments, h0 = inputs(case, dtype=torch.float32)
    arguments, h0 = [x.detach() for x in arguments], tuple(x.detach() for x in h0)

    class Module(torch.nn.Module):
        def forward(self, *given):
            states, last = call(function, given, h0, resets=torch.eye(2, 9, dtype=torch.bool))
            return *states, *last

    module = Module()
    want = module(*arguments)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(module, tuple(arguments)).module()
    many = torch.vmap(module, in_dims=(0,) + (None,) * (len(arguments) - 1))
    for got in (compiled(*arguments), exported(*arguments)):
        assert same_bits(got, want)
    sampled = many(torch.stack([arguments[0], 2 * arguments[0]]), *arguments[1:])
    assert all(torch.allclose(g[0], w, atol=1e-6) for g, w in zip(sampled, want, strict=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(module(*arguments), want)


def test_a_compiler_is_told_where_a_recurrence_is_made():
    def forward(x):
        return ostinato.recurrence(lambda h, x: torch.tanh(h + x))(x)[0]

    x = torch.randn(2, 5, 3)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="how a recurrence is made: make it before, as in __init__"):
        torch.compile(forward, fullgraph=True, backend="eager")(x)
    assert torch.equal(torch.compile(forward, backend="eager")(x), forward(x))


def test_compilers_are_refused_packed_sequences_for_a_loop_in_pytorch():
    class Packed(torch.nn.Module):
        def forward(self, x, cu_seqlens):
            return decaying(x, cu_seqlens=cu_seqlens, backend="torch")[0]

    decaying = ostinato.recurrence(lambda h, x: torch.tanh(0.5 * h.flip(-1) + x))
    given = torch.randn(1, 6, 2), torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"is a loop in PyTorch .*: give them padded sequences$"):
        torch.export.export(Packed(), given)
    assert torch.equal(torch.compile(Packed(), backend="eager")(*given), Packed()(*given))


@pytest.mark.parametrize(
    "function",
    [lambda x, u, v: (torch.sigmoid(u), v * x), lambda h, x, u, v: torch.tanh(u * h + v * x)],
    ids=["linear", "not linear"],
)
def test_gradients_of_two_parameters_compiled_and_differentiated_forward(function):
    torch.manual_seed(0)
    function, x = ostinato.recurrence(function), torch.randn(2, 9, 3, dtype=torch.float64)
    uv = torch.randn(2, 3, dtype=torch.float64)

    def loss(u, v, backend="auto"):
        return function(x, u, v, backend=backend)[0].square().sum()

    u, v = (row.clone().requires_grad_() for row in uv)
    want = torch.autograd.grad(loss(u, v, "torch"), (u, v), create_graph=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(u, v), (u, v)), want)

    curvature = torch.autograd.grad(sum(g.sum() for g in want), (u, v))
    pushed = torch.func.jvp(torch.func.grad(loss, (0, 1)), (*uv,), (torch.ones(3, dtype=uv.dtype),) * 2)[1]
    torch.testing.assert_close(pushed, curvature)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_two_and_their_logarithms_are_exact(dtype, backend):
    exponents = torch.arange(-120, 121, dtype=dtype).view(1, 1, -1)

    @ostinato.recurrence
    def scaled(state, x, y):
        return 2.0**x * torch.exp2(-x) + 0.25 ** (-x / 2), torch.log2(y).floor() + torch.log10(y)

    (powers, logarithms), _ = scaled(exponents, 2.0**exponents, backend=backend)
    assert torch.equal(powers, 1 + 2.0**exponents)
    torch.testing.assert_close(logarithms, exponents * (1 + math.log10(2)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, u: ((x > 0).to(x.dtype), u * x),
        lambda x, u: (torch.ones_like(x > 0).to(x.dtype), (u > 0).to(x.dtype) + 0 * x),
        lambda x, u: ((u > 0).to(x.dtype), (x > 0).to(x.dtype) * u),
        lambda h, x, u: (h + x > u).to(x.dtype),
    ],
    ids=["coefficient", "constant", "of a channel", "state"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_may_be_tests(function, dtype):
    torch.manual_seed(0)
    function, x, u = ostinato.recurrence(function), torch.randn(2, 9, 3), torch.randn(3)
    found = [function(x.to(dtype), u.to(dtype), h0=X[:, 0], backend=backend) for backend in ("auto", "torch")]
    assert found[1][0].any()
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


def test_it_stands_for_its_function():
    assert rg_lru.__name__ == "rg_lru"
    assert repr(rg_lru) == "<recurrence rg_lru(x, r, i, log_lambda)>"
    assert pickle.loads(pickle.dumps(rg_lru)) is rg_lru
    assert (rg_lru.states, rotated.states, peephole.states) == (0, 1, 2)
    assert (rg_lru.names, peephole.names) == (("x", "r", "i", "log_lambda"), ("x", "f", "w"))


def scaled(factor, h, x):
    return factor * h + x


class Scaling:
    def __init__(self):
        self.weight = torch.ones(3)
        self.recurrence = ostinato.recurrence(self.step)
        self.__dict__["check"] = None  # an attribute of what is called, as any other

    def step(self, h, x):
        return self.weight * h + x

    def __call__(self, h, x):
        return self.step(h, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copied", "pickled"])
def test_a_copy_of_a_methods_object_has_a_recurrence_of_its_own(copied):
    before = Scaling()
    after = copied(before)
    after.weight.fill_(2.0)
    x = torch.ones(1, 3, 3)
    assert after.recurrence(x, backend="torch")[0][0, :, 0].tolist() == [1, 3, 7]
    assert before.recurrence(x, backend="torch")[0][0, :, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copied", "pickled"])
def test_what_is_called_without_being_a_function_may_be_copied(copied):
    doubling = copied(ostinato.recurrence(functools.partial(scaled, 2.0)))
    assert doubling(torch.ones(1, 3, 1))[0].flatten().tolist() == [1, 3, 7]
    called = copied(ostinato.recurrence(Scaling()))
    assert called(torch.ones(1, 3, 3), backend="torch")[0][0, :, 0].tolist() == [1, 2, 3]


def test_attributes_of_the_function_are_not_those_of_the_recurrence():
    def total(h, x):
        return h + x

    total.check = total.step = total.traced = None
    assert ostinato.recurrence(total)(torch.ones(1, 3, 1))[0].flatten().tolist() == [1, 2, 3]


def halved_in_place(h, x):
    return x.mul_(0.5).add_(h.mul_(0.5))


def test_changes_in_place_that_nothing_counts_stay_within_their_step():
    x = torch.ones(1, 3, 1)
    function = ostinato.recurrence(halved_in_place)

    def states(x):
        return function(x, backend="torch")[0]

    with torch.inference_mode():
        given = x.clone()
        assert states(given).flatten().tolist() == [0.5, 0.75, 0.875]
        assert torch.equal(given, x)
    given = x.clone()
    assert torch.compile(states, backend="aot_eager")(given).flatten().tolist() == [0.5, 0.75, 0.875]
    assert torch.equal(given, x)


X, C = torch.randn(2, 5, 3), torch.randn(3)


def test_its_signature_is_that_of_a_call():
    options = "weight_hh: torch.Tensor | None = None, h0: Any = None, resets: torch.Tensor | None = None, "
    options += "reverse: bool = False, cu_seqlens: torch.Tensor | None = None, backend: str = 'auto'"
    assert str(inspect.signature(rotated)) == f"(x, u, v, *, {options})"
    assert str(inspect.signature(rg_lru)) == f"(x, r, i, log_lambda, *, {options})"


def test_arguments_by_name():
    want = rotated(X, C, C + 1)
    calls = (lambda: rotated(X, v=C + 1, u=C), lambda: rotated(u=C, x=X, v=C + 1))
    for call in (*calls, torch.compile(calls[1], fullgraph=True, backend="aot_eager")):
        assert same_bits(call(), want)


def returns(value):
    def function(x, y):
        return value(x)

    return ostinato.recurrence(function)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: ostinato.recurrence(3), TypeError, "recurrence takes a function; got int"),
        (lambda: ostinato.recurrence(torch.add), TypeError, "a function whose parameters have names; got .*method add"),
        (lambda: ostinato.recurrence(lambda *x: x), TypeError, r"positional parameters.* got \*x"),
        (lambda: ostinato.recurrence(lambda x, *, y: x), TypeError, "positional parameters.* got y"),
        (lambda: ostinato.recurrence(lambda x, resets: x), TypeError, "cannot have a parameter resets"),
        (
            lambda: ostinato.recurrence(lambda x, rate=2.0: x),
            TypeError,
            "cannot have a default of rate: every call gives",
        ),
        (
            lambda: ostinato.recurrence(lambda self, h, x: x),
            TypeError,
            "cannot be a method: write it without self, .* of an object's own method in its __init__, recurrence",
        ),
        (lambda: rotated(X, C), TypeError, r"rotated takes 3 arguments \(x, u, v\); got 2"),
        (lambda: rotated(X, C, C, X[:, 0]), TypeError, r"3 arguments \(x, u, v\), and options by name; got 4"),
        (lambda: rotated(X, C, w=C), TypeError, "rotated takes the arguments x, u, v; got 2 by position and w by name"),
        (lambda: rotated(X, u=C), TypeError, "takes the arguments x, u, v; got 1 by position and u by name"),
        (lambda: rotated(X, C, C, v=C), TypeError, "got 3 by position and v by name"),
        (lambda: unnamed(X), TypeError, r"\(before, x\), a state only if before were named h or state; got 1"),
        (lambda: of_three(X), TypeError, r"of_three is given two states, h and c; not enough .*expected 3, got 2"),
        (lambda: of_three(X, backend="torch"), TypeError, "of_three is given two states, h and c; not enough"),
        (lambda: of_one(X), TypeError, "of_one must return the next state; got 2 values; several states are .* state"),
        (lambda: of_one(X, backend="torch"), TypeError, "of_one must return the next state; got 2 values"),
        (lambda: rotated(X, C, 1.0), TypeError, "v must be a tensor of a floating dtype; got float"),
        (lambda: rotated(X.int(), C, C), TypeError, "x must be a tensor of a floating dtype; got .* torch.int32"),
        (lambda: rotated(X, C.to(torch.float8_e5m2), C), TypeError, "u must be .* a floating dtype; got .*float8_e5m2"),
        (lambda: rotated(X.to(torch.complex64), C, C), TypeError, "x must be real"),
        (lambda: rotated(X.to_sparse(), C, C), TypeError, "x must be a dense tensor"),
        (lambda: rotated(C, C, C), ValueError, r"rotated needs an argument of shape \(B, T, D\)"),
        (lambda: rotated(X, C[:2], C), ValueError, r"u must have shape \(2, 5, 3\) or \(3,\); got \(2,\)"),
        (lambda: rotated(X, X[:, :4], C), ValueError, r"u must have shape .* got \(2, 4, 3\)"),
        (lambda: rotated(X, C.to("meta"), C), ValueError, "u must be on the device of x, cpu; got meta"),
        (lambda: rotated(X, C, C, h0=C), ValueError, r"h0 must have shape \(2, 3\); got \(3,\)"),
        (lambda: rg_lru(X, X, X, C, h0=X), ValueError, r"h0 must have shape \(2, 3\); got \(2, 5, 3\)"),
        (lambda: peephole(X, X, C, h0=X[:, 0]), TypeError, "h0 must be a pair of tensors.* got a tensor"),
        (lambda: rotated(X, C, C, h0=X[:, 0].int()), TypeError, "h0 must be a tensor of a real floating dtype"),
        (lambda: rotated(X, C, C, h0=X[:, 0] * 1j), TypeError, "h0 must be .* a real floating dtype; got .*complex64"),
        (lambda: peephole(X, X, C, h0=(X[:, 0], 1j * X[:, 0])), TypeError, r"h0\[1\] must be .*; got .*complex64"),
        (lambda: rotated(X, C, C, h0=X[:, 0].to_sparse()), TypeError, "h0 must be a dense tensor; got a torch.sparse"),
        (lambda: rotated(X, C, C, h0=X[:, 0].to("meta")), ValueError, "h0 must be on the device of x, cpu; got meta"),
        (lambda: rotated(X, C, C, resets=X[:, :, 0]), TypeError, "resets must be a bool tensor; got a tensor"),
        (lambda: rotated(X, C, C, resets=X > 0), ValueError, r"resets must have shape \(2, 5\), .*; got \(2, 5, 3\)"),
        (lambda: rotated(X, C, C, cu_seqlens=[0, 5]), TypeError, "cu_seqlens must be an int32 tensor; got list"),
        (lambda: rotated(X, C, C, cu_seqlens=torch.tensor([0, 5]).int()), ValueError, "a batch of 1 with cu_seqlens"),
        (
            lambda: rotated(X[:1], C, C, cu_seqlens=torch.tensor([0, 3, 2, 5]).int()),
            ValueError,
            r"cu_seqlens must rise from 0 to the number of time steps, 5; got \[0, 3, 2, 5\]",
        ),
        (lambda: rotated(X, C, C, reverse=1), TypeError, "reverse must be a bool; got int"),
        (lambda: rotated(X, C, C, backend="tpu"), ValueError, "backend must be one of .* got 'tpu'"),
        (lambda: returns(lambda x: x)(X, C), TypeError, "function must return the coefficients .* got"),
        (lambda: returns(lambda x: (x, x, x))(X, C), TypeError, "function must return .* got 3 values"),
        (lambda: returns(lambda x: (x, 1.0))(X, C), TypeError, "function must return .* got float"),
        (lambda: returns(lambda x: (x, x > 0))(X, C), TypeError, "function must return .*float.* got .*torch.bool"),
        (
            lambda: returns(lambda x: (x, x[:, :2]))(X, C, backend="torch"),
            ValueError,
            r"function must be elementwise.* \(2, 2, 3\)",
        ),
        (
            lambda: returns(lambda x: (x.mul_(1), x))(X, C, backend="torch"),
            ValueError,
            "must not change its arguments in place",
        ),
        (
            lambda: ostinato.recurrence(lambda h, x: h.mul_(1) + x)(X, backend="torch"),
            ValueError,
            "<lambda> must not change its arguments in place",
        ),
        (
            lambda: returns(lambda x: (x, x.cumsum(1)))(X, C),
            ValueError,
            r"no kernel can be made of function: aten.cumsum .*test_recurrence.py:\d+: .*x.cumsum\(1\)",
        ),
        (
            lambda: returns(lambda x: (x, x) if x.sum() > 0 else (x, -x))(X, C),
            ValueError,
            r"no kernel can be made of function: .*test_recurrence.py:\d+: .*x.sum\(\) > 0",
        ),
    ],
)
def test_bad_input_is_named(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_last_states_may_be_changed_in_place():
    torch.manual_seed(0)
    a, b = torch.randn(2, 2, 5, 3, requires_grad=True)
    function = ostinato.recurrence(lambda a, b: (torch.sigmoid(a), 2 * b))
    expected = torch.autograd.grad((3 * function(a, b)[1]).square().sum(), (a, b))
    found = torch.autograd.grad(function(a, b)[1].mul_(3).square().sum(), (a, b))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)
