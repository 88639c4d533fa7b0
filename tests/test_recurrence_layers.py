"""Layers made of recurrences against loops written from their papers, their own step, and torch.nn's interface."""

import math

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import ostinato
from comparisons import assert_all_close, same_bits
from ostinato.slstm import slstm as slstm_recurrence
from private_names import PRIVATE_NAMES

# Each is a step of a layer: from its parameters, an input (in,) and the state, to the output and the next state.


def rg_lru(p, x, state):
    u = p("weight_ih") @ x + p("bias_ih")
    r, i = (
        torch.cat([block @ part for block, part in zip(gate, u.split(gate.shape[-1]), strict=True)])
        for gate in p("weight_gate")
    )
    b_r, b_i = p("bias_gate").chunk(2)
    a = torch.sigmoid(-p("log_lambda")) ** (8 * torch.sigmoid(r + b_r))  # sigmoid(-s) = exp(-softplus(s))
    h = a * state[0] + (1 - a**2).sqrt() * torch.sigmoid(i + b_i) * u
    return h, (h,)


def hgrn(p, x, state):
    c, f, g = (p("weight_ih") @ x + p("bias_ih")).chunk(3)
    shares = torch.stack([p("gamma", layer) for layer in range(p.layers)]).exp()
    shares = shares / shares.sum(0)
    bound = torch.zeros_like(c)
    for layer in range(1, p.layer + 1):
        bound = bound + shares[layer]
    f = bound + (1 - bound) * torch.sigmoid(f)
    h = f * state[0] + (1 - f) * c * torch.sigmoid(c)
    return torch.sigmoid(g) * h, (h,)


def lru(p, x, state):
    h, eigenvalue = torch.complex(*state), torch.exp(torch.complex(-p("log_nu").exp(), p("log_theta").exp()))
    h = eigenvalue * h + p("log_gamma").exp() * (torch.complex(*p("weight_ih").chunk(2)) @ x.to(h.dtype))
    return (torch.complex(*p("weight_ho")) @ h).real + p("weight_io") @ x + p("bias_io"), (h.real, h.imag)


def qrnn(p, x, state):
    z, f, o = (p("weight_ih") @ x + p("bias_ih")).chunk(3)
    c = torch.sigmoid(f) * state[0] + (1 - torch.sigmoid(f)) * torch.tanh(z)
    return torch.sigmoid(o) * c, (c,)


def sru(p, x, state):
    z, f, r, *skip = (p("weight_ih") @ x).split(len(state[0]))
    (v_f, v_r), (b_f, b_r) = p("weight_hh").chunk(2), p("bias_ih").chunk(2)
    f, r = torch.sigmoid(f + v_f * state[0] + b_f), torch.sigmoid(r + v_r * state[0] + b_r)
    c = f * state[0] + (1 - f) * z
    return r * c + (1 - r) * (skip[0] if skip else x) * math.sqrt(3), (c,)


def indrnn(p, x, state):
    h = (p("weight_ih") @ x + p("weight_hh") * state[0] + p("bias_ih")).clamp(min=0)
    return h, (h,)


def indrnn_tanh(p, x, state):
    h = torch.tanh(p("weight_ih") @ x + p("weight_hh") * state[0] + p("bias_ih"))
    return h, (h,)


def para_gru(p, x, state):
    (h,), a = state, p("weight_hh").chunk(3)
    b_z, b_r, b_c = (p("weight_ih") @ x + p("bias_ih")).chunk(3)
    z, r = torch.sigmoid(a[0] * h + b_z), torch.sigmoid(a[1] * h + b_r)
    h = (1 - z) * h + z * torch.tanh(a[2] * (h * r) + b_c)
    return h, (h,)


def para_lstm(p, x, state):
    (h, c), a, peep = state, p("weight_hh").chunk(3), p("weight_ch").chunk(2)
    b_f, b_o, b_c = (p("weight_ih") @ x + p("bias_ih")).chunk(3)
    f = torch.sigmoid(a[0] * h + peep[0] * c + b_f)
    c = f * c + (1 - f) * torch.tanh(a[2] * h + b_c)
    h = torch.sigmoid(a[1] * h + peep[1] * c + b_o) * torch.tanh(c)
    return h, (h, c)


def highway_min_gru(p, x, state):
    z, c, r, *skip = (p("weight_ih") @ x + p("bias_ih")).split(len(state[0]))
    z, r = torch.sigmoid(z), torch.sigmoid(r)
    h = (1 - z) * state[0] + z * torch.where(c >= 0, c + 0.5, torch.sigmoid(c))
    return r * h + (1 - r) * (skip[0] if skip else x), (h,)


def min_gru(p, x, state):
    z, c = (p("weight_ih") @ x + p("bias_ih")).chunk(2)
    h = (1 - torch.sigmoid(z)) * state[0] + torch.sigmoid(z) * torch.tanh(c)
    return h, (h,)


def min_lstm(p, x, state):
    f, i, c = (p("weight_ih") @ x + p("bias_ih")).chunk(3)
    f, i = torch.sigmoid(f), torch.sigmoid(i)
    h = f / (f + i) * state[0] + i / (f + i) * c
    return h, (h,)


def slstm(p, x, state):
    (h, c, n, m), weights = state, p("weight_hh")
    of_heads = [(weight @ part).chunk(4) for weight, part in zip(weights, h.chunk(len(weights)), strict=True)]
    inputs = (p("weight_ih") @ x + p("bias_ih")).chunk(4)
    i, f, z, o = (y + torch.cat(parts) for y, parts in zip(inputs, zip(*of_heads, strict=True), strict=True))
    log_f = m - torch.log(1 + torch.exp(-f))
    largest = torch.where((n == 0) | (i > log_f), i, log_f)
    old, new = torch.exp(log_f - largest), torch.exp(i - largest)
    c, n = old * c + new * torch.tanh(z), old * n + new
    h = torch.sigmoid(o) * (c / n)
    return h, (h, c, n, largest)


LAYERS = {
    "MinGRU": (ostinato.MinGRU, min_gru, {"candidate": "tanh"}),
    "MinLSTM": (ostinato.MinLSTM, min_lstm, {"candidate": "linear"}),
    "RGLRU": (ostinato.RGLRU, rg_lru, {"num_blocks": 3}),
    "HGRN": (ostinato.HGRN, hgrn, {}),
    "LRU": (ostinato.LRU, lru, {}),
    "QRNN": (ostinato.QRNN, qrnn, {}),
    "SRU": (ostinato.SRU, sru, {}),
    "IndRNN": (ostinato.IndRNN, indrnn, {}),
    "IndRNN tanh": (ostinato.IndRNN, indrnn_tanh, {"nonlinearity": "tanh"}),
    "ParaGRU": (ostinato.ParaGRU, para_gru, {}),
    "ParaLSTM": (ostinato.ParaLSTM, para_lstm, {}),
    "HighwayMinGRU": (ostinato.HighwayMinGRU, highway_min_gru, {}),
    "SLSTM": (ostinato.SLSTM, slstm, {"num_heads": 2}),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


class Parameters:
    """A module's parameters by name, those of one layer and direction unless another layer's are asked for."""

    def __init__(self, module, layer, direction):
        self.module, self.layer, self.layers = module, layer, module.num_layers
        self.suffix = "_reverse" if direction else ""

    def __call__(self, name, layer=None):
        return getattr(self.module, f"{name}_l{self.layer if layer is None else layer}{self.suffix}")


def as_tuple(hidden):
    return hidden if isinstance(hidden, tuple) else (hidden,)


def make(name, *sizes, **options):
    """A module whose every parameter is random, and a random state for two sequences."""
    torch.manual_seed(0)
    cls, _, settings = LAYERS[name]
    module = cls(*sizes, **settings, **options, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.7 * torch.randn_like(parameter))
    shape = module.num_layers * module.num_directions, 2, module.hidden_size
    states = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(module.states))
    return module, states if module.states > 1 else states[0]


def by_hand(name, module, x, hx, resets=None):
    """The output (T, H) and last states of one sequence, (T, in), by the paper's equations."""
    step, finals = LAYERS[name][1], []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(module.num_directions):
            p = Parameters(module, layer, direction)
            state = tuple(s[layer * module.num_directions + direction] for s in as_tuple(hx))
            ys = [None] * len(x)
            order = range(len(x) - 1, -1, -1) if direction else range(len(x))
            for t in order:
                # An episode begins at a reset, so that backwards it is entered at the step before the next one's.
                entered = t + 1 if direction else t
                if resets is not None and entered < len(x) and resets[entered]:
                    state = tuple(torch.zeros_like(s) for s in state)
                ys[t], state = step(p, x[t], state)
            outputs.append(torch.stack(ys))
            finals.append(state)
        x = torch.cat(outputs, -1)
    return x, tuple(torch.stack(s) for s in zip(*finals, strict=True))


def assert_close(got, want, tolerance=None):
    assert_all_close(as_tuple(got), as_tuple(want), tolerance)


@pytest.mark.parametrize("sizes", [(4, 6, 2), (6, 6, 3)], ids=str)
@every_layer
def test_layers_compute_their_papers_equations(name, sizes):
    module, hx = make(name, *sizes)
    x = torch.randn(7, 2, sizes[0], dtype=torch.float64, requires_grad=True)
    output, h_n = module(x, hx)
    wanted = [by_hand(name, module, x[:, b], tuple(s[:, b] for s in as_tuple(hx))) for b in range(2)]
    want = torch.stack([y for y, _ in wanted], 1)
    want_n = tuple(torch.stack(s, 1) for s in zip(*(last for _, last in wanted), strict=True))
    assert_close(output, want)
    assert_close(h_n, want_n)
    leaves = [x, *as_tuple(hx), *module.parameters()]
    weights = [torch.randn_like(y) for y in (want, *want_n)]
    got = torch.autograd.grad((output, *as_tuple(h_n)), leaves, weights)
    assert_close(got, torch.autograd.grad((want, *want_n), leaves, weights), 1e-11)


@every_layer
def test_both_directions_packed_with_resets(name):
    module, hx = make(name, 4, 6, 2, bidirectional=True)
    lengths = (3, 5)
    sequences = [torch.randn(n, 4, dtype=torch.float64) for n in lengths]
    resets = [torch.tensor([True, False, True]), torch.tensor([False, False, True, False, True])]
    packed = pack_sequence(sequences, enforce_sorted=False)
    begins = pack_sequence(resets, enforce_sorted=False).data
    for with_resets in (False, True):
        output, h_n = module(packed, hx, resets=begins if with_resets else None)
        padded, _ = pad_packed_sequence(output)
        for n, x in enumerate(sequences):
            start = tuple(s[:, n] for s in as_tuple(hx))
            want, want_n = by_hand(name, module, x, start, resets[n] if with_resets else None)
            assert_close(padded[: lengths[n], n], want)
            assert_close(tuple(s[:, n] for s in as_tuple(h_n)), want_n)
            state = start if module.states > 1 else start[0]
            assert_close(module(x, state, resets=resets[n] if with_resets else None)[0], want)


@pytest.mark.parametrize("batch", [1, 3])
@every_layer
def test_a_frozen_stepper_repeats_the_loops(name, batch):
    module, _ = make(name, 4, 6, 2)
    stepper, x = ostinato.Stepper(module, batch, frozen=True), torch.randn(5, batch, 4, dtype=torch.float64)
    outputs = [stepper(x_t) for x_t in x]
    assert stepper._replay is not None
    assert_close(torch.stack(outputs), module(x)[0])
    stepper.reset(torch.arange(batch) == 0)
    assert_close(stepper(x[0])[0], outputs[0][0])


@every_layer
def test_step_halves_and_layouts_compute_the_same(name):
    module, hx = make(name, 4, 6, 2, batch_first=True)
    x, resets = torch.randn(2, 8, 4, dtype=torch.float64), torch.rand(2, 8) < 0.3
    output, h_n = module(x, hx)
    h, steps = hx, []
    for t in range(8):
        y, h = module.step(x[:, t], h)
        steps.append(y)
    assert_close(torch.stack(steps, 1), output)
    assert_close(h, h_n)
    h, steps = hx, []
    with torch.no_grad():  # on a CPU by loops of a single step
        for t in range(8):
            y, h = module.step(x[:, t], h)
            steps.append(y)
        assert_close(torch.stack(steps, 1), output)
        assert_close(h, h_n)
        assert_close(module.step(x[:, 0])[0], module(x[:, :1])[0][:, 0])
        assert_close(module.step(x[0, 0])[0], module(x[0, :1])[0][0])
        assert_close(module.step(x[:, 0].t().contiguous().t(), hx)[0], steps[0])
    first, state = module(x[:, :3], hx)
    second, state = module(x[:, 3:], state)
    assert_close(torch.cat((first, second), 1), output)
    assert_close(state, h_n)
    output, h_n = module(x, hx, resets=resets)
    module.batch_first = False
    other, last = module(x.transpose(0, 1), hx, resets=resets.t())
    assert_close(other.transpose(0, 1), output)
    assert_close(last, h_n)


@every_layer
def test_states_detached_in_place_cut_the_gradient(name):
    module, _ = make(name, 4, 6, 1)
    halves, grads = torch.randn(2, 5, 3, 4, dtype=torch.float64), []
    for in_place in (True, False):
        h = module(halves[0])[1]
        states = h if isinstance(h, tuple) else (h,)
        states = tuple(state.detach_() if in_place else state.detach() for state in states)
        output = module(halves[1], states if isinstance(h, tuple) else states[0])[0]
        grads.append(torch.autograd.grad(output.square().sum(), list(module.parameters())))
    assert_close(*grads)


@every_layer
def test_shapes_are_those_of_torch_nn(name):
    cls, _, settings = LAYERS[name]
    for arguments in ((3, 6, 2, True, True, 0.0, True), (3, 6, 1, False)):
        module, peer = cls(*arguments, backend="torch", **settings), torch.nn.GRU(*arguments)
        for x in (
            torch.randn(4, 2, 3),
            torch.randn(7, 3),
            torch.randn(4, 0, 3) if arguments[4:5] else torch.randn(0, 4, 3),
        ):
            if not x.numel():
                assert module(x)[0].shape == (*x.shape[:2], 6 * module.num_directions)
                continue
            (output, h_n), (want, want_n) = module(x), peer(x)
            assert output.shape == want.shape
            assert [s.shape for s in as_tuple(h_n)] == [want_n.shape] * cls.states
        assert any(key.startswith("bias") for key in module.state_dict()) == arguments[3]


@every_layer
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (0, 4)], ids=str)
def test_nothing_to_do_with_resets_in_both_directions(name, shape):
    cls, _, settings = LAYERS[name]
    for batch_first in (False, True):
        module = cls(4, 6, 2, batch_first=batch_first, bidirectional=True, **settings)
        output, h_n = module(torch.zeros(shape), resets=torch.zeros(shape[:-1], dtype=torch.bool))
        want, want_n = module(torch.zeros(shape))
        assert output.shape == want.shape == (*shape[:-1], 12)
        assert same_bits(as_tuple(h_n), as_tuple(want_n))


@every_layer
def test_a_new_layer_keeps_its_signal(name):
    torch.manual_seed(0)
    cls = LAYERS[name][0]
    module = cls(64, 64, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(4, 200, 64, dtype=torch.float64, requires_grad=True)
    output, _ = module(x)
    (grad,) = torch.autograd.grad(output[:, -1].sum(), x)
    assert 0.02 < output[:, -1].std() < 50  # IndRNN's relu adds up
    assert grad.isfinite().all()
    assert grad[:, -1].abs().max() > 1e-4


def test_rg_lru_begins_with_the_papers_decays():
    torch.manual_seed(0)
    layer = ostinato.RGLRU(4, 4096)
    decay = torch.exp(-8 * torch.nn.functional.softplus(layer.log_lambda_l0.double()))
    assert 0.9 - 1e-6 < decay.min() < 0.901
    assert 0.998 < decay.max() < 0.999 + 1e-6
    assert abs(decay.mean() - 0.9495) < 0.003
    assert layer.num_blocks == 16


def test_rg_lru_has_gradients_for_inputs_of_any_size():
    torch.manual_seed(0)
    layer = ostinato.RGLRU(4, 32)
    x = 1e4 * torch.randn(20, 4)
    layer(x)[0].square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    assert layer.weight_gate_l0.grad.abs().max() > 0


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(("shift", "scale"), [(-1e4, 1.0), (1e4, 1.0), (0.0, 1e4), (0.0, 1.0)])
def test_slstm_has_results_for_gates_of_any_size(shift, scale, backend):
    torch.manual_seed(0)
    gates = torch.randn(4, 2, 9, 6, dtype=torch.float64) * torch.tensor([scale, scale, 1.0, 1.0])[:, None, None, None]
    gates[0] += shift
    i, f, z, o = gates = [gate.requires_grad_() for gate in gates.unbind()]
    (h, *_), _ = slstm_recurrence(*gates, backend=backend)
    kept = torch.nn.functional.logsigmoid(f).cumsum(1)  # without recurrent weights, h is a weighted mean of the past
    exponents = i[:, None] + kept[:, :, None] - kept[:, None]
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)[:, :, None]
    shares = exponents.masked_fill(later, -torch.inf).softmax(2)
    want = torch.sigmoid(o) * (shares * torch.tanh(z)[:, None]).sum(2)
    weights = torch.randn_like(h)
    assert_close((h, *torch.autograd.grad(h, gates, weights)), (want, *torch.autograd.grad(want, gates, weights)), 1e-9)


def test_slstm_begins_with_long_and_short_memories_in_each_head():
    """Biases of forget gates are 5 - 12 x^(0.3 + 1.3 l), where x is 0 to 1 over a head's units, l over the layers."""
    layer = ostinato.SLSTM(4, 10, 3, bidirectional=True, num_heads=2)
    exponents = [0.3, 0.95, 1.6]
    for name in layer.state_dict():
        if not name.startswith("bias"):
            continue
        exponent = exponents[int(name.removesuffix("_reverse")[-1])]
        of_head = torch.tensor([5 - 12 * (unit / 4) ** exponent for unit in range(5)])
        i, f, z, o = getattr(layer, name).detach().unflatten(0, (4, 10))
        torch.testing.assert_close(f, torch.cat([of_head, of_head]))
        assert not any(y.any() for y in (i, z, o))
    for name in ("weight_ih_l0", "weight_hh_l0", "weight_hh_l2_reverse"):  # as those of torch.nn.LSTM
        assert 0.25 < getattr(layer, name).detach().abs().max() <= 10**-0.5
    (only,) = (y.detach() for name, y in ostinato.SLSTM(4, 3).named_parameters() if name.startswith("bias"))
    torch.testing.assert_close(only[3:6], torch.tensor([5, 5 - 12 * 0.5**0.3, -7]))  # one head, of an odd number


def test_lru_begins_on_the_ring():
    torch.manual_seed(0)
    layer = ostinato.LRU(4, 4096, radius=(0.6, 0.9), max_phase=1.0)
    modulus = torch.exp(-torch.exp(layer.log_nu_l0))
    assert 0.6 - 1e-6 < modulus.min() < 0.602
    assert 0.899 < modulus.max() < 0.9 + 1e-6
    assert abs(modulus.square().mean() - (0.36 + 0.81) / 2) < 0.01  # uniform in area
    assert torch.allclose(layer.log_gamma_l0.exp().square() + modulus.square(), torch.ones(4096), atol=1e-5)
    assert 0.999 < layer.log_theta_l0.exp().max() <= 1.0 + 1e-6


@pytest.mark.parametrize("num_blocks", [1, 2, 4, 8])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_rg_lru_steps_by_blocks_of_any_size(bias, num_blocks):
    torch.manual_seed(0)
    layer = ostinato.RGLRU(6, 8, bias=bias, num_blocks=num_blocks, dtype=torch.float64)
    x, h = torch.randn(1, 3, 6, dtype=torch.float64), torch.randn(1, 3, 8, dtype=torch.float64)
    assert_close(layer.step(x[0], h)[0], layer(x, h)[0][0])


def test_hgrn_bounds_rise_from_layer_to_layer():
    layer = ostinato.HGRN(4, 6, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.weight_ih_l3.zero_()
        layer.bias_ih_l3.copy_(torch.tensor([0.0, -100.0, 0.0]).repeat_interleave(6))  # forgets all that it may
    _, h_n = layer(torch.zeros(1, 4, dtype=torch.float64), torch.ones(4, 6, dtype=torch.float64))
    assert torch.allclose(h_n[3], torch.full((6,), 0.75, dtype=torch.float64))


NOT_MINIMAL = list(LAYERS)[2:]  # of the minimal ones test_minimal does the same


@pytest.mark.parametrize(
    ("name", "backend"),  # the loops of a linear layer and of another
    [*((name, "torch") for name in NOT_MINIMAL), ("RGLRU", "auto"), ("ParaLSTM", "auto")],
)
def test_autocast(name, backend):
    torch.manual_seed(0)
    cls, _, settings = LAYERS[name]
    module, x = cls(8, 12, backend=backend, **settings), torch.randn(6, 2, 8)
    want, _ = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, h_n = module(x)
    assert half.dtype == as_tuple(h_n)[0].dtype == torch.bfloat16
    assert (half.float() - want).abs().max() / want.abs().max() < 3e-2


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_autocast_of_gates_whatever_their_blocks(blocks):
    module, x = ostinato.RGLRU(8, 4, num_blocks=blocks), torch.randn(6, 2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x)[0].dtype == module.step(x[0])[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", NOT_MINIMAL)
def test_compile_and_export(name):
    torch.compiler.reset()  # which counts the layers' common forward as one function
    module, _ = make(name, 8, 12)
    x = torch.randn(6, 2, 8, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x)[0], module(x)[0])
    sizes = {0: torch.export.Dim("time"), 1: torch.export.Dim("batch")}
    exported = torch.export.export(module, (x,), dynamic_shapes=(sizes,)).module()
    for batch in (3, 12):  # one of them the hidden size
        x = torch.randn(9, batch, 8, dtype=torch.float64)
        assert_close(exported(x)[0], module(x)[0])


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated
@every_layer
def test_a_traced_layer_is_the_layer(name):
    module, _ = make(name, 4, 6)
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    traced, leaves, found = torch.jit.trace(module, x), list(module.parameters()), []
    for run in (module, traced):
        output, h_n = run(x)
        found.append([output, *as_tuple(h_n), *torch.autograd.grad(output.cos().sum(), leaves)])
    assert_all_close(*found)


def test_what_is_shown_of_a_module():
    assert repr(ostinato.RGLRU(3, 32)) == "RGLRU(3, 32, num_blocks=16)"
    assert repr(ostinato.IndRNN(3, 5, 2, nonlinearity="tanh")) == "IndRNN(3, 5, num_layers=2, nonlinearity='tanh')"
    assert repr(ostinato.ParaLSTM(3, 5, backend="torch")) == "ParaLSTM(3, 5, backend='torch')"


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: ostinato.RGLRU(4, 6, num_blocks=4), ValueError, "num_blocks must divide hidden_size, 6; got 4"),
        (lambda: ostinato.SLSTM(4, 6, num_heads=4), ValueError, "num_heads must divide hidden_size, 6; got 4"),
        (lambda: ostinato.SLSTM(4, 6, num_heads=2.0), TypeError, "num_heads must be an int; got float"),
        (lambda: ostinato.SLSTM(4, "6"), TypeError, "hidden_size must be an int; got str"),
        (lambda: ostinato.RGLRU(4, 6, num_blocks=0), ValueError, "num_blocks must be at least 1; got 0"),
        (lambda: ostinato.LRU(4, 6, radius=(0.9, 1.1)), ValueError, r"radius must be .* got \(0.9, 1.1\)"),
        (lambda: ostinato.LRU(4, 6, radius=0.9), TypeError, "radius must be a pair of numbers; got 0.9"),
        (lambda: ostinato.LRU(4, 6, radius=(0.9,)), TypeError, r"radius must be a pair of numbers; got \(0.9,\)"),
        (lambda: ostinato.LRU(4, 6, radius=(0, "1")), TypeError, r"radius\[1\] must be a number; got str"),
        (lambda: ostinato.LRU(4, 6, max_phase=None), TypeError, "max_phase must be a number; got NoneType"),
        (lambda: ostinato.LRU(4, 6, max_phase=7.0), ValueError, "max_phase must be above 0, to 2 pi; got 7.0"),
        (lambda: ostinato.IndRNN(4, 6, nonlinearity="elu"), ValueError, "nonlinearity must be one of .* got 'elu'"),
        (lambda: ostinato.SRU(4, 6, batch_first="yes"), TypeError, "batch_first must be a bool; got str"),
        (lambda: ostinato.QRNN(4, 6, candidate="tanh"), TypeError, "unexpected keyword argument 'candidate'"),
        (lambda: ostinato.QRNN(4, 6)(torch.randn(5, 3)), ValueError, r"input_size = 4 .* got shape \(5, 3\)"),
        (
            lambda: ostinato.ParaLSTM(4, 6)(torch.randn(5, 4), torch.zeros(1, 6)),
            TypeError,
            "hx must be a tuple of 2 tensors; got Tensor",
        ),
        (
            lambda: ostinato.ParaLSTM(4, 6).step(torch.randn(4), (torch.zeros(1, 6), torch.zeros(6))),
            ValueError,
            r"state\[1\] must have shape \(1, 6\); got \(6,\)",
        ),
        (lambda: ostinato.SRU(4, 6).step(torch.randn(3)), ValueError, "^x must have input_size = 4 features last"),
        (
            lambda: ostinato.SRU(4, 6)(torch.randn(5, 4), resets=torch.zeros(4, dtype=torch.bool)),
            ValueError,
            r"resets must have shape \(5,\).* got \(4,\)",
        ),
        (
            lambda: ostinato.SRU(4, 6)([1.0], resets=torch.zeros(1, dtype=torch.bool)),
            TypeError,
            "input must be a tensor of a real floating dtype; got list",
        ),
    ],
)
def test_bad_input_is_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@every_layer
def test_a_parameter_replaced_by_a_smaller_one_or_none_is_an_error(name):
    """Kernels would read beyond its end."""
    make = LAYERS[name][0]
    for own in [own for own, _ in make(5, 8).named_parameters()]:
        layer = make(5, 8)
        smaller = torch.nn.Parameter(getattr(layer, own)[:1].detach())
        for other, error, message in ((smaller, ValueError, "have shape"), (None, TypeError, "be a tensor; got None")):
            setattr(layer, own, other)
            for run in (layer.step, lambda x: layer(x[None]), lambda x: layer(x.expand(9, 2, 5))):  # noqa: B023
                with torch.no_grad(), pytest.raises(error, match=f"{own} must {message}"):
                    run(torch.randn(2, 5))


@every_layer
def test_a_parameter_left_on_the_meta_device_is_an_error(name):
    """As by a checkpoint that lacks it: kernels, and PyTorch's product, read any memory in its place."""
    make = LAYERS[name][0]
    for own in [own for own, _ in make(5, 8).named_parameters() if own != "weight_ih_l0"]:
        layer = make(5, 8)
        setattr(layer, own, torch.nn.Parameter(getattr(layer, own).to("meta")))
        for run in (layer.step, lambda x: layer(x[None]), lambda x: layer(x.expand(9, 2, 5))):  # noqa: B023
            message = f"{own} must be on the device of weight_ih_l0, cpu; got meta"
            with torch.no_grad(), pytest.raises(ValueError, match=message):
                run(torch.randn(2, 5))


@pytest.mark.parametrize("name", ["SRU", "ParaLSTM", "RGLRU"])
@pytest.mark.parametrize("given", [False, True])
def test_gradients_of_an_input_that_is_yet_to_be_negated(name, given):
    torch.manual_seed(0)
    layer = getattr(ostinato, name)(4, 4, dtype=torch.float64)
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    state = layer.initial_state(2) if given else None
    expected = torch.autograd.grad(layer(x, state)[0].square().sum(), list(layer.parameters()))
    found = torch.autograd.grad(layer(torch._neg_view(-x), state)[0].square().sum(), list(layer.parameters()))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["MinGRU", "MinLSTM", *ostinato.diagonal.__all__, "HighwayMinGRU", "SLSTM"])
def test_derived_classes_may_have_private_names(name):
    kind = getattr(ostinato, name)

    class Derived(kind):
        def __init__(self, *args):
            super().__init__(*args)
            for own in PRIVATE_NAMES:
                setattr(self, own, 0.5)

    layer, other, x = Derived(8, 8, 2), kind(8, 8, 2), torch.randn(9, 3, 8)
    other.load_state_dict(layer.state_dict())
    packed = pack_sequence([torch.randn(length, 8) for length in (2, 7, 4)], enforce_sorted=False)
    for given in (x, x[:1], packed):
        for graded in (True, False):
            with torch.set_grad_enabled(graded):
                (y, last), (expected, expected_last) = layer(given), other(given)
                torch.testing.assert_close(
                    list(y) if given is packed else y, list(expected) if given is packed else expected
                )
                torch.testing.assert_close(last, expected_last)
    with torch.no_grad():
        torch.testing.assert_close(layer.step(x[0], layer.initial_state(3)), other.step(x[0]))
