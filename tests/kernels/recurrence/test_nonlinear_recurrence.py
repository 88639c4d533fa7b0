"""Non-linear recurrences of one to three states, and complex scans: every backend against a loop, and derivatives."""

import functools
import itertools

import pytest
import torch

import ostinato
from comparisons import same_bits
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.recurrence.arguments import concatenated_states
from ostinato.kernels.recurrence.nonlinear import cuda as steps_cuda
from ostinato.kernels.recurrence.nonlinear.operator import nonlinear_recurrence
from ostinato.kernels.recurrence.symbolic.tracer import trace

BACKENDS = ["cpu", "torch", "reference"]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}


def gru(h, z, r, c, a_z, a_r, a_c):
    z, r = torch.sigmoid(z + a_z * h), torch.sigmoid(r + a_r * h)
    return (1 - z) * h + z * torch.tanh(c + a_c * (h * r))


def lstm(state, f, o, c, a_f, a_o, a_c, c_f, c_o):
    h, before = state
    f = torch.sigmoid(f + a_f * h + c_f * before)
    c = f * before + (1 - f) * torch.tanh(c + a_c * h)
    return torch.sigmoid(o + a_o * h + c_o * c) * torch.tanh(c), c


def memory(state, i, f, z, a_i, a_f, a_z):  # of three states, each of which needs all three
    h, c, n = state
    i, f = torch.sigmoid(i + a_i * h - n), torch.sigmoid(f + a_f * c)
    c, n = f * c + i * torch.tanh(z + a_z * n), f * n + i
    return c / (1 + n * n) + h / 4, c, n


CELLS = {
    "gru": (gru, (True,) * 3 + (False,) * 3, 1),
    "lstm": (lstm, (True,) * 3 + (False,) * 5, 2),
    "memory": (memory, (True,) * 3 + (False,) * 3, 3),
}


@functools.cache
def traced(cell):
    return trace(*CELLS[cell])


def loop(cell, initial, arguments, bounds=None, resets=None, reverse=False):
    """The recurrence one step and one sequence after the other, independently of the library."""
    function, _, states = CELLS[cell]
    batch, length, _ = next(x.shape for x in arguments if x.dim() == 3)
    spans = [(n, 0, length) for n in range(batch)]
    if bounds is not None:
        spans = [(0, i, j) for i, j in itertools.pairwise(bounds.tolist())]
    rows = [[[None] * length for _ in range(batch)] for _ in range(states)]
    last = []
    for n, (row, begin, end) in enumerate(spans):
        state = [x[n] for x in initial]
        for t in reversed(range(begin, end)) if reverse else range(begin, end):
            if resets is not None and resets[row, t]:
                state = [torch.zeros_like(x) for x in state]
            given = [x[row, t] if x.dim() == 3 else x for x in arguments]
            state = list(function(state, *given)) if states > 1 else [function(state[0], *given)]
            for k in range(states):
                rows[k][row][t] = state[k]
        last.append(state)
    steps = [torch.stack([torch.stack(x) for x in of_state]) for of_state in rows]
    return steps + [torch.stack([state[k] for state in last]) for k in range(states)]


def inputs(cell, batch, length, width, sequences=None, dtype=torch.float64, scale=1.0, device="cpu"):
    _, kinds, states = CELLS[cell]
    initial = [torch.randn(sequences or batch, width, dtype=torch.float64) for _ in range(states)]
    arguments = [
        torch.randn(batch, length, width, dtype=torch.float64) if sequence else scale * torch.randn(width).double()
        for sequence in kinds
    ]
    return [x.to(dtype).to(device) for x in initial], [x.to(dtype).to(device) for x in arguments]


def call(cell, initial, arguments, bounds=None, resets=None, reverse=False, backend="cpu"):
    h0 = concatenated_states(initial)
    return nonlinear_recurrence(traced(cell).text, h0, bounds, resets, reverse, backend, *arguments)


def check_against_loop(cell, dtype, backend, packed, resetting, reverse, shape=(3, 13, 5), device="cpu"):
    torch.manual_seed(0)
    batch, length, width = (1, *shape[1:]) if packed else shape
    bounds = torch.tensor([0, 4, 4, 5, length], dtype=torch.int32) if packed else None
    initial, arguments = inputs(cell, batch, length, width, 4 if packed else None, dtype)
    resets = torch.rand(length, batch).t() < 0.2 if resetting else None
    if resetting and length % 4 == 0:  # whose bytes a GPU may load four at once
        resets = resets.contiguous()
    wide = [x.double().requires_grad_() for x in (*initial, *arguments)]
    want = loop(cell, wide[: len(initial)], wide[len(initial) :], bounds, resets, reverse)
    tensors = [x.to(device).requires_grad_() for x in (*initial, *arguments)]
    on_device = [None if x is None else x.to(device) for x in (bounds, resets)]
    got = call(cell, tensors[: len(initial)], tensors[len(initial) :], *on_device, reverse, backend)
    weights = [torch.randn_like(y) for y in want]
    gradients = torch.autograd.grad(want, wide, weights, materialize_grads=True)
    ours = torch.autograd.grad(got, tensors, [w.to(device).to(dtype) for w in weights])
    for g, w in zip((*got, *ours), (*want, *gradients), strict=True):
        assert g.dtype == dtype
        assert g.shape == w.shape
        tolerance = TOLERANCE[dtype] * len(initial)  # each state is rounded before the gradient is made of it
        assert (g.cpu().double() - w).abs().max() <= tolerance * w.abs().max().clamp(min=1)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*(("cpu", dtype) for dtype in TOLERANCE), ("torch", torch.float32), ("reference", torch.float64)],
    ids=str,
)
@pytest.mark.parametrize("cell", CELLS)
def test_states_and_gradients_are_those_of_the_loop(cell, dtype, backend):
    for packed, resetting, reverse in itertools.product((False, True), repeat=3):
        check_against_loop(cell, dtype, backend, packed, resetting, reverse)


@pytest.mark.parametrize("layout", ["time-major", "channels apart", "wide rows"])
def test_any_strides(layout):
    torch.manual_seed(0)
    initial, arguments = inputs("gru", 2, 9, 40)
    change = {
        "time-major": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "channels apart": lambda x: x.repeat_interleave(2, 2)[..., ::2],
        "wide rows": lambda x: torch.cat((x, x), 2)[..., 40:],
    }[layout]
    strided = [change(x) if x.dim() == 3 else x for x in arguments]
    for got, want in zip(call("gru", initial, strided), loop("gru", initial, arguments), strict=True):
        assert (got - want).abs().max() < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", CELLS)
def test_no_steps_leave_the_state_as_it_was(cell, backend):
    initial, arguments = inputs(cell, 2, 0, 3)
    tensors = [x.requires_grad_() for x in (*initial, *arguments)]
    results = call(cell, tensors[: len(initial)], tensors[len(initial) :], backend=backend)
    assert results[0].shape == (2, 0, 3)
    assert same_bits(results[len(initial) :], initial)
    gradients = torch.autograd.grad(results[-1].sum(), tensors, materialize_grads=True)
    assert torch.equal(gradients[len(initial) - 1], torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_of_parameters_do_not_lose_digits_with_length(cell):
    torch.manual_seed(0)
    initial, arguments = inputs(cell, 1, 3000, 3, dtype=torch.float32, scale=0.5)
    found = []
    for dtype in (torch.float32, torch.float64):
        tensors = [x.to(dtype).requires_grad_() for x in arguments]
        results = call(cell, [x.to(dtype) for x in initial], tensors)
        found.append(torch.autograd.grad(results[0].square().sum(), [x for x in tensors if x.dim() == 1]))
    for narrow, wide in zip(*found, strict=True):
        assert ((narrow - wide) / wide.abs().max()).abs().max() < 2e-6


@pytest.mark.parametrize(("cell", "backend"), [("gru", "cpu"), ("gru", "torch"), ("lstm", "cpu"), ("memory", "cpu")])
@pytest.mark.parametrize("packed", [False, True])
def test_second_and_forward_mode_derivatives(cell, backend, packed):
    torch.manual_seed(0)
    bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32) if packed else None
    initial, arguments = inputs(cell, 1 if packed else 2, 5, 1, 3 if packed else None)
    resets = torch.tensor([[0, 1, 0, 1, 0]], dtype=torch.bool).expand(arguments[0].shape[:2])
    tensors = [x.requires_grad_() for x in (*initial, *arguments)]

    def function(*tensors):
        return call(cell, tensors[: len(initial)], tensors[len(initial) :], bounds, resets, packed, backend)

    torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("cell", CELLS)
def test_transforms_compilation_and_export(cell):
    torch.manual_seed(0)
    initial, arguments = inputs(cell, 2, 6, 3)
    tensors, text = (*initial, *arguments), traced(cell).text

    def function(*tensors):
        h0 = concatenated_states(tensors[: len(initial)])
        return nonlinear_recurrence(text, h0, None, None, False, "cpu", *tensors[len(initial) :])

    def loss(*tensors):
        return sum(y.square().sum() for y in function(*tensors))

    operator = torch.ops.ostinato.nonlinear_recurrence.default
    leaves = [x.clone().requires_grad_() for x in arguments]
    options = None, torch.rand(2, 6) < 0.2, True, "cpu"
    torch.library.opcheck(operator, (text, concatenated_states(initial), *options, leaves))
    leaves = [x.clone().requires_grad_() for x in tensors]
    want = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert same_bits(torch.autograd.grad(compiled(*leaves), leaves), want)
    everything = tuple(range(len(tensors)))
    for g, w in zip(torch.func.grad(loss, everything)(*tensors), want, strict=True):
        assert (g - w).abs().max() < 1e-12
    forward = torch.autograd.functional.jacobian(loss, tensors, vectorize=True, strategy="forward-mode")
    for g, w in zip(forward, want, strict=True):
        assert (g - w).abs().max() < 1e-12
    dims = tuple(0 if x.dim() == 3 else None for x in tensors)  # states and parameters shared by the samples
    batched = [torch.stack((x / 2, x)) if dim == 0 else x for x, dim in zip(tensors, dims, strict=True)]
    for y, w in zip(torch.vmap(function, dims)(*batched), function(*tensors), strict=True):
        assert (y[1] - w).abs().max() < 1e-12
    for g, w in zip(torch.vmap(torch.func.grad(loss, everything), dims)(*batched), want, strict=True):
        assert (g[1] - w).abs().max() < 1e-12
    twice = torch.func.hessian(loss)(*tensors), torch.func.jacrev(torch.func.jacrev(loss))(*tensors)
    assert (twice[0] - twice[1]).abs().max() < 1e-12
    assert twice[0].abs().max() > 0.1

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    assert same_bits(torch.export.export(Module(), tensors).module()(*tensors), function(*tensors))


@pytest.mark.parametrize("backend", ["cpu", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("cell", "time_first"), list(zip(CELLS, (False, True, True), strict=True)))
def test_sequences_side_by_side(cell, time_first, backend):
    """In one tensor, whose gradient lies as it does, and the parameters in another, in every derivative."""
    torch.manual_seed(0)
    device = "cuda" if backend == "cuda" else "cpu"
    initial, arguments = inputs(cell, 3, 29, 7, device=device)
    together = torch.cat(arguments[:3], -1)
    if time_first:
        together = together.transpose(0, 1).contiguous().transpose(0, 1)

    text = traced(cell).text

    def of_parts(*tensors):
        h0 = concatenated_states(tensors[: len(initial)])
        return nonlinear_recurrence(text, h0, None, None, True, backend, *tensors[len(initial) :])

    def apart(*tensors):
        *states, gates, parameters = tensors
        return of_parts(*states, *gates.chunk(3, -1), *parameters.split(7))

    leaves = [x.detach().requires_grad_() for x in (*initial, together, torch.cat(arguments[3:]))]
    results = []
    for function in (of_parts, apart):
        y = function(*leaves)
        results.append([*y, *torch.autograd.grad(y, leaves, [x.cos() for x in y])])
    assert same_bits(*results)
    if backend != "torch":
        assert results[0][-len(leaves) + len(initial)].stride() == together.stride()

    def loss(function):
        return lambda *tensors: sum(y.square().sum() for y in function(*tensors))

    primals, everything = tuple(x.detach() for x in leaves), tuple(range(len(leaves)))
    tangents = tuple(map(torch.cos, primals))
    for ours, right in zip(
        torch.func.jvp(torch.func.grad(loss(of_parts), everything), primals, tangents)[1],
        torch.func.jvp(torch.func.grad(loss(apart), everything), primals, tangents)[1],
        strict=True,
    ):
        assert (ours - right).abs().max() <= 1e-11 * right.abs().max()
    samples = [torch.stack((x, x / 2)) for x in primals]
    assert same_bits(torch.vmap(of_parts)(*samples), torch.vmap(apart)(*samples))
    compiled = torch.compile(loss(of_parts), fullgraph=True, backend="aot_eager")
    compiled(*leaves).backward()
    for leaf, right in zip(leaves, torch.func.grad(loss(apart), everything)(*primals), strict=True):
        assert (leaf.grad - right).abs().max() <= 1e-12 * right.abs().max()


def test_how_time_is_cut_into_chunks():
    assert steps_cuda.choose_chunks(1 << 14, 1 << 16) == 1  # channels enough
    assert steps_cuda.choose_chunks(1, 127) == 1  # too short to cut
    assert steps_cuda.choose_chunks(1024, 1 << 16) == 128
    assert steps_cuda.choose_chunks(1, 1 << 16) == 1024


@pytest.mark.parametrize(
    ("cell", "architecture", "dtype", "backward", "compose", "resets", "long_offsets"),
    [
        ("gru", "sm_80", torch.float16, False, True, 0, True),
        ("gru", "sm_80", torch.float16, False, True, 2, False),
        ("lstm", "sm_90", torch.float32, True, True, 1, False),
        ("lstm", "sm_90", torch.bfloat16, True, False, 2, False),
        ("gru", "sm_100", torch.float64, False, False, 1, False),
        ("memory", "sm_80", torch.bfloat16, False, True, 2, False),
        ("memory", "sm_90", torch.float32, True, True, 1, True),
    ],
)
def test_kernels_compile_without_a_gpu(cell, architecture, dtype, backward, compose, resets, long_offsets):
    pytest.importorskip("cuda.core")
    dense = resets and cell == "gru" and dtype != torch.float64
    macros = dict(steps_cuda.macros(dtype, backward, compose, resets, long_offsets, dense))
    assert nvrtc.compile_cubin(steps_cuda.source(traced(cell)), architecture, macros)[:4] == b"\x7fELF"


@pytest.fixture
def chunked(monkeypatch):
    """Chunks of four steps."""
    monkeypatch.setattr(steps_cuda, "SHORTEST", 4)


@pytest.mark.gpu
@pytest.mark.parametrize("passes", [1, 6])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_chunks_on_a_gpu(cell, dtype, passes, chunked, monkeypatch):
    monkeypatch.setattr(steps_cuda, "PASSES", passes)
    for shape, packed, resetting, reverse in itertools.product(
        ((3, 13, 5), (2, 37, 45), (2, 40, 5)), *itertools.repeat((False, True), 3)
    ):
        check_against_loop(cell, dtype, "cuda", packed, resetting, reverse, shape, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_one_chunk_on_a_gpu(cell, dtype):
    for packed, resetting, reverse in itertools.product((False, True), repeat=3):
        check_against_loop(cell, dtype, "cuda", packed, resetting, reverse, device="cuda")
    check_against_loop(cell, dtype, "cuda", False, True, False, (3, 20, 5), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.03, 1.0, 4.0])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_chunks_equal_one_step_after_the_other(cell, scale, monkeypatch):
    torch.manual_seed(0)
    initial, arguments = inputs(cell, 1, 65536, 64, dtype=torch.float32, scale=scale, device="cuda")
    in_chunks = call(cell, initial, arguments, backend="cuda")
    again = call(cell, initial, arguments, backend="cuda")
    monkeypatch.setattr(steps_cuda, "CHANNELS", 1)
    for g, h, w in zip(in_chunks, again, call(cell, initial, arguments, backend="cuda"), strict=True):
        assert torch.equal(g, h)
        assert (g - w).abs().max() < 1e-5


# Complex scans


def complex_inputs(batch, length, width, sequences=None, dtype=torch.complex128):
    a, b = (torch.randn(batch, length, width, dtype=dtype) for _ in range(2))
    return 0.7 * a, b, torch.randn(sequences or batch, width, dtype=dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("packed", [False, True])
def test_complex_scans_and_their_gradients(backend, packed, device):
    for resetting, reverse in ((False, False), (True, True)):
        torch.manual_seed(0)
        bounds = torch.tensor([0, 3, 3, 7], dtype=torch.int32) if packed else None
        a, b, h0 = complex_inputs(1 if packed else 2, 7, 2, 3 if packed else None)
        a[:, 4:6] = 0  # has a gradient where it is no reset
        resets = torch.rand(a.shape[:2]) < 0.3 if resetting else None
        spans = [(0, 0, 3), (0, 3, 3), (0, 3, 7)] if packed else [(0, 0, 7), (1, 0, 7)]
        want, last = torch.empty_like(b), []
        for n, (row, begin, end) in enumerate(spans):
            h = h0[n]
            for t in reversed(range(begin, end)) if reverse else range(begin, end):
                h = torch.zeros_like(h) if resets is not None and resets[row, t] else h
                h = want[row, t] = a[row, t] * h + b[row, t]
            last.append(h)
        on_device = [None if x is None else x.to(device) for x in (resets, bounds)]
        options = dict(zip(("resets", "cu_seqlens"), on_device, strict=True))
        scan = functools.partial(ostinato.linear_scan, **options, reverse=reverse, backend=backend)
        tensors = [x.to(device).requires_grad_() for x in (a, b, h0)]
        got = scan(*tensors)
        assert (got[0].cpu() - want).abs().max() < 1e-12
        assert (got[1].cpu() - torch.stack(last)).abs().max() < 1e-12
        torch.autograd.gradcheck(scan, tensors, fast_mode=True)
    if backend == "auto":
        torch.autograd.gradgradcheck(scan, tensors, fast_mode=True)


def test_complex_dtypes_conjugates_and_compilation():
    torch.manual_seed(0)
    a, b, _ = complex_inputs(2, 50, 3, dtype=torch.complex64)
    want, _ = ostinato.linear_scan(a.conj().to(torch.complex128).resolve_conj(), b.to(torch.complex128))
    got, last = ostinato.linear_scan(a.conj(), b)
    assert got.dtype == last.dtype == torch.complex64
    assert ((got - want).abs().max() / want.abs().max()) < 1e-6
    mixed, _ = ostinato.linear_scan(a, b.real)
    assert ((mixed - ostinato.linear_scan(a, b.real.to(a.dtype))[0]).abs().max()) == 0

    def power(a, b):
        return torch.view_as_real(ostinato.linear_scan(a, b)[0]).square().sum()

    assert torch.equal(torch.compile(power, fullgraph=True, backend="aot_eager")(a, b), power(a, b))


def test_complex_input_that_is_changed_before_the_backward_is_told_as_real_input_is():
    a, b, _ = complex_inputs(2, 5, 3)
    a = 1 * a.requires_grad_()
    h, _ = ostinato.linear_scan(a, b)
    a.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.abs().sum().backward()


def test_bad_complex_input_is_named():
    a, b, h0 = complex_inputs(2, 5, 3)
    with pytest.raises(TypeError, match="h0 must be real as a and b are; got a tensor of"):
        ostinato.linear_scan(a.real, b.real, h0)
    with pytest.raises(TypeError, match="log_b must be a tensor of a real floating dtype; got"):
        ostinato.log_linear_scan(a.real, b)
