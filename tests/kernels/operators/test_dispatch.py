"""The operators under zero tensors without memory, function transforms and the compiler."""

import functools

import pytest
import torch
from torch.func import functional_call, grad, jacfwd, jacrev, vjp, vmap
from torch.nn.utils.rnn import pack_sequence

import ostinato
from comparisons import assert_all_close, same_bits
from ostinato.kernels.operators.dispatch import gradient, operator

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCANS = [ostinato.linear_scan, ostinato.log_linear_scan]


def random(*shape, device="cpu"):
    return torch.rand(*shape, dtype=torch.float64, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", [ostinato.MinGRU, ostinato.MinLSTM])
def test_gradients_that_are_zeros_without_memory(layer, device):
    module, x = layer(3, 4, dtype=torch.float64, device=device), random(5, 2, 3, device=device)
    packed = pack_sequence([x[:, 0], x[:3, 1]])
    for run in (
        lambda: torch.sgn(module(x)[0]).sum(),
        lambda: torch.sgn(module(x)[1]).sum() + module(x)[0].sum(),
        lambda: torch.sgn(module(packed)[0].data).sum(),
        lambda: torch.sgn(module.step(x[0])[0]).sum(),
    ):
        module.zero_grad()
        run().backward()
        assert module.weight_ih_l0.grad.isfinite().all()
    module.zero_grad()
    torch.sgn(module(x)[0]).sum().backward()
    assert not module.weight_ih_l0.grad.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scan", SCANS)
def test_zeros_without_memory_are_zeros(scan, device):
    torch.manual_seed(0)
    a, b, h0 = (random(*shape, device=device).requires_grad_() for shape in ((2, 30, 3), (2, 30, 3), (2, 3)))
    h, h_last = scan(a, b, h0)
    for g in torch.autograd.grad(torch.sgn(h).sum() + torch.sgn(h_last).sum(), (a, b, h0)):
        assert not g.any()
    for absent in range(3):
        real = [torch.zeros_like(x) if i == absent else x for i, x in enumerate((a, b, h0))]
        zero = torch._efficientzerotensor(real[absent].shape, dtype=torch.float64, device=device)
        given = [zero if i == absent else x for i, x in enumerate(real)]
        present = [x for i, x in enumerate(real) if i != absent]
        results = [scan(*inputs) for inputs in (real, given)]
        assert same_bits(*results)
        assert same_bits(*(torch.autograd.grad(h.sum() + last.sum(), present) for h, last in results))


@ostinato.recurrence
def decaying(x, f):
    return torch.sigmoid(f), torch.tanh(x)


@ostinato.recurrence
def coupled(state, x, w):
    return torch.tanh(w * state[1] + x), torch.sin(state[0] - x)


def of_both_states(x, w):
    states, last = coupled(x, w)
    return states[0], last[1]


def tensors_of(name, device):
    """A function of tensors, and the tensors."""
    torch.manual_seed(0)
    bounds = torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device)
    if name == "packed scan":
        inputs = random(1, 9, 2, device=device), random(1, 9, 2, device=device), random(3, 2, device=device)
        return functools.partial(ostinato.linear_scan, cu_seqlens=bounds), inputs
    if name in ("linear_scan", "log_linear_scan"):
        inputs = random(2, 6, 3, device=device), random(2, 6, 3, device=device), random(2, 3, device=device)
        return getattr(ostinato, name), inputs
    if name in ("linear recurrence", "two states"):
        inputs = random(2, 6, 3, device=device), random(3, device=device)
        return (decaying if name == "linear recurrence" else of_both_states), inputs
    bidirectional = name == "both directions"
    cell = ostinato.MinGRU if bidirectional else ostinato.MinLSTM
    module = cell(2, 3, bidirectional=bidirectional, batch_first=bidirectional, dtype=torch.float64, device=device)
    names = [name for name, _ in module.named_parameters()]

    def layer(x, *parameters):
        if name != "packed layer":
            return functional_call(module, dict(zip(names, parameters, strict=True)), (x,))
        packed = torch.nn.utils.rnn.PackedSequence(x, torch.tensor([3, 2, 1]))
        output, last = functional_call(module, dict(zip(names, parameters, strict=True)), (packed,))
        return output.data, last

    shape = (6, 2) if name == "packed layer" else (2, 5, 2)
    return layer, (random(*shape, device=device), *(p.detach() for p in module.parameters()))


FUNCTIONS = ["linear_scan", "log_linear_scan", "packed scan", "layer", "both directions", "packed layer"]
FUNCTIONS += ["linear recurrence", "two states"]


def loss(function, *inputs):
    h, h_last = function(*inputs)
    return (h * h.shape[-1]).sin().sum() + h_last.square().sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_by_function_transforms(name, device):
    function, inputs = tensors_of(name, device)
    everything = tuple(range(len(inputs)))
    leaves = [x.clone().requires_grad_() for x in inputs]
    want = torch.autograd.grad(loss(function, *leaves), leaves)
    assert_all_close(grad(functools.partial(loss, function), everything)(*inputs), want)
    value, pull = vjp(functools.partial(loss, function), *inputs)
    assert_all_close([value], [loss(function, *inputs)])
    assert_all_close(pull(torch.ones_like(value)), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jacobians_at_once_are_those_row_by_row(name, device):
    function, inputs = tensors_of(name, device)
    everything = tuple(range(len(inputs)))
    jacobian = functools.partial(torch.autograd.functional.jacobian, function, inputs)
    want, at_once = jacobian(), jacobian(vectorize=True)
    by_transform = jacrev(function, everything)(*inputs)
    forward = jacobian(vectorize=True, strategy="forward-mode")
    for i in range(2):
        assert_all_close(at_once[i], want[i])
        assert_all_close(forward[i], want[i])
        assert_all_close(by_transform[i], want[i])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batch_of_gradients(name, device):
    function, inputs = tensors_of(name, device)
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    for chosen in (outputs, outputs[:1], outputs[1:]):
        batch = [torch.randn(4, *y.shape, dtype=y.dtype, device=device) for y in chosen]
        together = torch.autograd.grad(chosen, leaves, batch, retain_graph=True, is_grads_batched=True)
        for i in range(4):
            want = torch.autograd.grad(chosen, leaves, [g[i] for g in batch], retain_graph=True)
            assert_all_close([g[i] for g in together], want)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_is_a_call_for_each_sample(name, device):
    function, inputs = tensors_of(name, device)
    everything = tuple(range(len(inputs)))
    samples = [torch.stack([x * (1 + k / 8) for k in range(3)]) for x in inputs]
    gradient = grad(functools.partial(loss, function), everything)
    for batched in (everything, *[(i,) for i in everything]):
        given = [samples[i].movedim(0, -1) if i in batched else x for i, x in enumerate(inputs)]
        dims = tuple(-1 if i in batched else None for i in everything)
        got, gradients = vmap(function, dims)(*given), vmap(gradient, dims)(*given)
        total = grad(lambda *x, dims=dims: vmap(functools.partial(loss, function), dims)(*x).sum(), everything)(*given)
        for k in range(3):
            one = [samples[i][k] if i in batched else x for i, x in enumerate(inputs)]
            assert_all_close([y[k] for y in got], function(*one))
            assert_all_close([g[k] for g in gradients], gradient(*one))
        for i in everything:
            assert_all_close([total[i]], [gradients[i].movedim(0, -1) if i in batched else gradients[i].sum(0)])
    twice = vmap(vmap(function))(*[torch.stack((x, 2 * x)) for x in samples])
    assert_all_close([y[1, 2] for y in twice], function(*[2 * x[2] for x in samples]))


def test_vmap_over_boundaries():
    a, b = random(3, 1, 9, 2), random(3, 1, 9, 2)
    bounds = torch.tensor([[0, 4, 4, 9], [0, 1, 2, 9], [0, 0, 0, 9]], dtype=torch.int32)
    got = vmap(lambda a, b, c: ostinato.linear_scan(a, b, cu_seqlens=c))(a, b, bounds)
    for k in range(3):
        assert_all_close([y[k] for y in got], ostinato.linear_scan(a[k], b[k], cu_seqlens=bounds[k]))


def test_vmap_over_an_operator_that_has_no_channels():
    double = operator(
        "test_of_dispatch_double",
        _double,
        lambda x, times: (torch.empty_like(x), torch.empty_like(x)),
        lambda ctx, inputs, output: setattr(ctx, "times", inputs[1]),
        lambda ctx, first, second: ((first + 2 * second) * ctx.times, None),
    )
    x = random(4, 3)
    assert_all_close(vmap(double, (0, None))(x, 5), (5 * x, 10 * x))
    assert torch.equal(vmap(grad(lambda y: sum(double(y, 5)).sum()))(x), torch.full_like(x, 15))


def _double(x: torch.Tensor, times: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x * times, 2 * x * times


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_hessians(name, device):
    function, inputs = tensors_of(name, device)

    def of_two(*first):
        return loss(function, *first, *inputs[2:])

    def of_sum(*first):  # the gradient of which comes in expanded
        return function(*first, *inputs[2:])[0].sum()

    first = inputs[:2]
    want = torch.autograd.functional.hessian(of_sum, first)
    for row, wanted in zip(torch.func.hessian(of_sum, (0, 1))(*first), want, strict=True):
        assert_all_close(row, wanted)
    want = torch.autograd.functional.hessian(of_two, first)
    for transform in (torch.func.hessian, lambda f, i: jacrev(jacrev(f, i), i), lambda f, i: jacfwd(jacfwd(f, i), i)):
        got = transform(of_two, (0, 1))(*first)
        for row, wanted in zip(got, want, strict=True):
            assert_all_close(row, wanted)
    gradients = torch.func.grad(of_two, (0, 1))
    leaves = tuple(x.detach().requires_grad_() for x in first)
    kept = torch.autograd.grad(of_two(*leaves), leaves, create_graph=True)
    want = torch.autograd.grad(sum(g.square().sum() for g in kept), leaves)
    assert_all_close(grad(lambda *xs: sum(g.square().sum() for g in gradients(*xs)), (0, 1))(*first), want)
    step = [1e-6 * torch.randn_like(x) for x in first]
    ahead, behind = (gradients(*(x + sign * y for x, y in zip(first, step, strict=True))) for sign in (1, -1))
    moved = torch.func.jvp(gradients, first, tuple(step))[1]
    for m, x, y in zip(moved, ahead, behind, strict=True):
        torch.testing.assert_close(m, (x - y) / 2, rtol=1e-5, atol=1e-13)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x * 1


def test_what_no_transform_can_do_is_said():
    plain = operator("test_of_dispatch_plain", _same, torch.empty_like, lambda *_: None, lambda ctx, g: g)
    with pytest.raises(NotImplementedError, match="test_of_dispatch_plain has no forward-mode derivative"):
        torch.func.jvp(plain, (random(3),), (random(3),))
    slope = gradient("test_of_dispatch_slope", _same, torch.empty_like)
    with pytest.raises(NotImplementedError, match="test_of_dispatch_slope has no derivative"):
        slope(random(3).requires_grad_()).sum().backward()
    with pytest.raises(ValueError, match="vmap over linear_scan needs samples; got a dimension of size 0"):
        vmap(lambda x: ostinato.linear_scan(x, x))(random(0, 1, 5, 2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_vmap(backend):
    a, b = random(3, 2, 5, 2), random(3, 2, 5, 2)
    compiled = torch.compile(vmap(ostinato.linear_scan), fullgraph=True, backend=backend)
    assert_all_close(compiled(a, b), vmap(ostinato.linear_scan)(a, b))
