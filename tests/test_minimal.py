"""MinGRU and MinLSTM against written-out equations, their own step, torch.nn's interface, and a peer."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import ostinato
from comparisons import same_bits
from ostinato import packed
from ostinato.minimal.recurrences import recurrence_of

LAYERS = {"mingru": ostinato.MinGRU, "minlstm": ostinato.MinLSTM}
CELLS = {"mingru": ostinato.MinGRUCell, "minlstm": ostinato.MinLSTMCell}
CANDIDATES = ["positive", "linear", "tanh"]
BACKENDS = ["reference", "torch", "cpu"]


def by_hand(cell, candidate, weight, bias, x, h):
    """One layer over x, (T, in), from the state h, by the paper's equations in float64."""
    c = {
        "linear": lambda v: v,
        "tanh": torch.tanh,
        "positive": lambda v: torch.where(v >= 0, v + 0.5, torch.sigmoid(v)),
    }[candidate]
    states = []
    for pre in x @ weight.T + bias:
        if cell == "mingru":
            z, candidate_pre = pre.chunk(2)
            h = (1 - z.sigmoid()) * h + z.sigmoid() * c(candidate_pre)
        else:
            f, i, candidate_pre = pre.chunk(3)
            f, i = f.sigmoid(), i.sigmoid()
            h = f / (f + i) * h + i / (f + i) * c(candidate_pre)
        states.append(h)
    return torch.stack(states)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("cell", LAYERS)
def test_layers_compute_the_papers_equations(cell, candidate, backend):
    torch.manual_seed(0)
    module = LAYERS[cell](3, 5, 2, candidate=candidate, backend=backend, dtype=torch.float64)
    x, hx = torch.randn(20, 3, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    output, h_n = module(x, hx)
    first = by_hand(cell, candidate, module.weight_ih_l0, module.bias_ih_l0, x, hx[0])
    second = by_hand(cell, candidate, module.weight_ih_l1, module.bias_ih_l1, first, hx[1])
    assert torch.allclose(output, second, rtol=1e-12, atol=1e-12)
    assert torch.allclose(h_n, torch.stack((first[-1], second[-1])), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize("cell", LAYERS)
def test_gradients(cell, candidate, backend):
    torch.manual_seed(0)
    module = LAYERS[cell](2, 3, bidirectional=True, candidate=candidate, backend=backend, dtype=torch.float64)
    x = torch.randn(7, 2, 2, dtype=torch.float64, requires_grad=True)
    hx = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in module.named_parameters()]

    def call(x, hx, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x, hx))

    assert torch.autograd.gradcheck(call, (x, hx, *module.parameters()), atol=1e-8, fast_mode=True)


@settings(max_examples=25, deadline=None)
@given(
    cell=st.sampled_from(list(LAYERS)),
    candidate=st.sampled_from(CANDIDATES),
    layers=st.integers(1, 3),
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    cut=st.integers(0, 40),
    bias=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
def test_parallel_step_and_split_compute_the_same(cell, candidate, layers, batch, length, cut, bias, backend):
    torch.manual_seed(0)
    module = LAYERS[cell](
        4, 6, layers, bias, batch_first=True, candidate=candidate, backend=backend, dtype=torch.float64
    )
    x, hx = torch.randn(batch, length, 4, dtype=torch.float64), torch.rand(layers, batch, 6, dtype=torch.float64)
    output, h_n = module(x, hx)
    h, steps = hx, []
    for t in range(length):
        y, h = module.step(x[:, t], h)
        steps.append(y)
    cut = min(cut, length)
    first, state = module(x[:, :cut], hx)
    second, state = module(x[:, cut:], state)
    for other, last in ((torch.stack(steps, 1), h), (torch.cat((first, second), 1), state)):
        assert torch.allclose(other, output, rtol=1e-12, atol=1e-12)
        assert torch.allclose(last, h_n, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", LAYERS)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_sequence_of_one_step_is_run_as_one(cell, num_layers, monkeypatch):
    torch.manual_seed(0)
    steps, step = [], LAYERS[cell].step
    monkeypatch.setattr(LAYERS[cell], "step", lambda *args: steps.append(1) or step(*args))
    for batch_first in (False, True):
        hidden = 35 + batch_first  # of no other test, whose steps are known
        module = LAYERS[cell](3, hidden, num_layers, batch_first=batch_first, dtype=torch.float64)
        x = torch.randn((4, 1, 3) if batch_first else (1, 4, 3), dtype=torch.float64)
        for hx in (None, torch.randn(num_layers, 4, hidden, dtype=torch.float64)):
            expected = module(x, hx)
            assert not steps  # with gradients
            with torch.no_grad():
                for _ in range(2):  # checked, then prepared
                    output, h_n = found = module(x, hx)
                    for ours, right in zip(found, expected, strict=True):
                        torch.testing.assert_close(ours, right, rtol=0, atol=1e-14)
                    output.zero_()
                    torch.testing.assert_close(h_n, expected[1], rtol=0, atol=1e-14)
                module(x, hx, resets=torch.zeros(x.shape[:2], dtype=torch.bool))
            assert len(steps) == num_layers  # of one layer, the second call needs none
            steps.clear()


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated
@pytest.mark.parametrize("cell", LAYERS)
def test_a_trace_of_one_step_takes_sequences(cell):
    module, x = LAYERS[cell](3, 5), torch.randn(7, 2, 3)
    with torch.no_grad():
        module(x[:1])
        traced = torch.jit.trace(module, (x[:1],))
        for ours, right in zip(traced(x), module(x), strict=True):
            torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("cell", LAYERS)
def test_cells_are_steps(cell):
    torch.manual_seed(0)
    module, single = LAYERS[cell](4, 6, dtype=torch.float64), CELLS[cell](4, 6, dtype=torch.float64)
    single.load_state_dict({name.removesuffix("_l0"): value for name, value in module.state_dict().items()})
    x, h = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    assert torch.equal(single(x, h), module.step(x, h[None])[0])
    assert torch.allclose(single(x[0], h[0]), single(x, h)[0], rtol=1e-14, atol=0)
    assert torch.equal(single(x), single(x, torch.zeros_like(h)))


@pytest.mark.parametrize("cell", LAYERS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_shapes_and_names_are_those_of_nn_gru(cell, bidirectional, batch_first, num_layers):
    arguments = (3, 5, num_layers, True, batch_first, 0.0, bidirectional)
    module, peer = LAYERS[cell](*arguments), torch.nn.GRU(*arguments)
    for x in (torch.randn(4, 2, 3), torch.randn(7, 3)):
        for got, want in zip(module(x), peer(x), strict=True):
            assert got.shape == want.shape
    names = {name for name, _ in peer.named_parameters() if "_ih_" in name}
    assert {name for name, _ in module.named_parameters()} == names
    clone = copy.deepcopy(module)
    assert torch.equal(clone(x)[0], module(x)[0])


@pytest.mark.parametrize("cell", LAYERS)
def test_bidirectional_is_two_layers_one_of_them_backwards(cell):
    torch.manual_seed(0)
    both = LAYERS[cell](3, 5, bidirectional=True, dtype=torch.float64)
    ahead, back = (LAYERS[cell](3, 5, dtype=torch.float64) for _ in range(2))
    state = both.state_dict()
    ahead.load_state_dict({name: state[name] for name in ahead.state_dict()})
    back.load_state_dict({name: state[f"{name}_reverse"] for name in back.state_dict()})
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    output, h_n = both(x)
    forwards, backwards = ahead(x), back(x.flip(0))
    assert torch.allclose(output, torch.cat((forwards[0], backwards[0].flip(0)), -1), rtol=1e-13, atol=1e-14)
    assert torch.allclose(h_n, torch.cat((forwards[1], backwards[1])), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("lengths", [(4, 9, 1, 9), (9, 7, 2, 1)], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("cell", LAYERS)
def test_packed_sequences_equal_separate_ones(cell, lengths, bidirectional, backend):
    torch.manual_seed(0)
    module = LAYERS[cell](3, 5, 2, bidirectional=bidirectional, backend=backend, dtype=torch.float64)
    sequences = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    hx = torch.randn(2 * module.num_directions, 4, 5, dtype=torch.float64)
    output, h_n = module(pack_sequence(sequences, enforce_sorted=False), hx)
    assert isinstance(output, PackedSequence)
    padded, got_lengths = pad_packed_sequence(output)
    assert got_lengths.tolist() == list(lengths)
    for n, sequence in enumerate(sequences):
        want, want_last = module(sequence, hx[:, n])
        assert torch.allclose(padded[: lengths[n], n], want, rtol=1e-12, atol=1e-13)
        assert torch.allclose(h_n[:, n], want_last, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "length", "limit"), [(torch.float32, 64, 1e-5), (torch.float64, 300, 1e-10)], ids=str
)
def test_equals_mingru_pytorch(dtype, length, limit):
    peer_package = pytest.importorskip("minGRU_pytorch")
    torch.manual_seed(0)
    peer = peer_package.minGRU(32).to(dtype)
    module = ostinato.MinGRU(32, 32, bias=False, batch_first=True, dtype=dtype)
    hidden, gate = peer.to_hidden_and_gate.weight.detach().chunk(2)
    module.load_state_dict({"weight_ih_l0": torch.cat((gate, hidden))})
    x = torch.randn(2, length, 32, dtype=dtype, requires_grad=True)
    got, want = module(x)[0], peer(x)
    assert (got - want).abs().max() < limit
    direction = torch.randn_like(got)
    got_x, got_w = torch.autograd.grad(got, (x, module.weight_ih_l0), direction)
    want_x, want_w = torch.autograd.grad(want, (x, peer.to_hidden_and_gate.weight), direction)
    want_w = torch.cat(want_w.chunk(2)[::-1])
    assert (got_x - want_x).abs().max() / want_x.abs().max() < 10 * limit
    assert (got_w - want_w).abs().max() / want_w.abs().max() < 10 * limit


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cell", LAYERS)
def test_closed_and_open_gates_are_exact(cell, backend):
    module, exact = LAYERS[cell](1, 4, backend=backend), LAYERS[cell](1, 4, backend="reference", dtype=torch.float64)
    for scale in (1e4, -1e4):
        results = []
        for layer in (module, exact):
            with torch.no_grad():
                layer.weight_ih_l0.fill_(scale)
                layer.bias_ih_l0.fill_(0.25)
            x = torch.tensor([[1.0], [-1.0], [1.0]], dtype=layer.weight_ih_l0.dtype, requires_grad=True)
            output, _ = layer(x, x.new_ones(1, 4))
            results.append((output, *torch.autograd.grad(output.sum(), (x, layer.weight_ih_l0, layer.bias_ih_l0))))
        for got, want, largest in zip(*results, (1e4, 1e8, 1e4, 1e4), strict=True):  # of the terms of each sum
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6 * largest)


def test_what_is_shown_of_a_module():
    assert repr(ostinato.MinGRU(3, 5)) == "MinGRU(3, 5)"
    shown = repr(ostinato.MinLSTM(3, 5, 2, bias=False, batch_first=True, candidate="tanh", backend="torch"))
    assert shown == "MinLSTM(3, 5, num_layers=2, bias=False, batch_first=True, candidate='tanh', backend='torch')"
    assert repr(ostinato.MinGRUCell(3, 5, candidate="tanh")) == "MinGRUCell(3, 5, bias=True, candidate='tanh')"


@pytest.mark.parametrize("cell", LAYERS)
def test_projections_are_refused(cell):
    torch.manual_seed(0)
    module = LAYERS[cell](3, 5)
    torch.manual_seed(0)
    same, x = LAYERS[cell](3, 5, proj_size=0), torch.randn(7, 3)
    assert torch.equal(same(x)[0], module(x)[0])
    for proj_size in (2, -1):
        with pytest.raises(ValueError, match=f"proj_size must be 0, projections are not supported; got {proj_size}"):
            LAYERS[cell](3, 5, proj_size=proj_size)
    with pytest.raises(TypeError, match="proj_size must be an int; got ndarray"):
        LAYERS[cell](3, 5, proj_size=np.zeros(2))


def test_dropout_acts_between_layers_and_only_in_training():
    torch.manual_seed(0)
    module = ostinato.MinGRU(3, 64, 2, dropout=0.3)
    first, second = ostinato.MinGRU(3, 64), ostinato.MinGRU(64, 64)
    for layer, number in ((first, 0), (second, 1)):
        layer.load_state_dict({f"{name}_l0": getattr(module, f"{name}_l{number}") for name in ("weight_ih", "bias_ih")})
    x = torch.randn(5, 3)
    for dropout in (0.3, 0.0):
        torch.manual_seed(1)
        output, stepped = module(x)[0], module.step(x[0])[0]
        torch.manual_seed(1)
        between = torch.nn.functional.dropout(first(x)[0], dropout)
        assert torch.equal(output, second(between)[0])
        between = torch.nn.functional.dropout(first.step(x[:1])[0], dropout)
        assert torch.equal(stepped, second.step(between)[0][0])
        module.eval()
    with pytest.warns(UserWarning, match="num_layers is 1"):
        ostinato.MinGRU(3, 4, dropout=0.5)


@pytest.mark.parametrize("cell", LAYERS)
def test_autocast_and_compile(cell):
    torch.manual_seed(0)
    module = LAYERS[cell](8, 16, 2)
    x = torch.randn(30, 2, 8)
    want, _ = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, h_n = module(x)
    assert half.dtype == h_n.dtype == torch.bfloat16
    assert (half.float() - want).abs().max() / want.abs().max() < 2e-2
    torch.compiler.reset()  # which counts the layers' common forward as one function
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x)[0], want)
    sizes = {0: torch.export.Dim("time"), 1: torch.export.Dim("batch")}
    exported = torch.export.export(module, (x,), dynamic_shapes=(sizes,)).module()
    for batch in (2, 16):  # one of them the hidden size
        x = torch.randn(9, batch, 8)
        assert torch.equal(exported(x)[0], module(x)[0])


@pytest.mark.parametrize("cell", LAYERS)
def test_compiled_steps_and_their_gradients(cell):
    torch.manual_seed(0)
    module, x, h = CELLS[cell](3, 5, dtype=torch.float64), torch.randn(4, 3).double(), torch.randn(4, 5).double()
    layer = LAYERS[cell](3, 5, dtype=torch.float64)

    def steps(x, h):
        return torch.cat((module(x, h), layer.step(x, h[None])[0]))

    torch.compiler.reset()
    got, want = torch.compile(steps, fullgraph=True, backend="aot_eager")(x, h), steps(x, h)
    assert torch.allclose(got, want, rtol=1e-13, atol=1e-14)
    weights = module.weight_ih, layer.weight_ih_l0
    for g, w in zip(*(torch.autograd.grad(y.sin().sum(), weights) for y in (got, want)), strict=True):
        assert torch.allclose(g, w, rtol=1e-13, atol=1e-14)


def test_minimal_operator_is_well_formed():
    torch.manual_seed(0)
    pre, bias = torch.randn(3, 4, 12, requires_grad=True), torch.randn(12, requires_grad=True)
    h0 = torch.randn(2, 4, 3, requires_grad=True)
    torch.library.opcheck(
        torch.ops.ostinato.layer_scan.default,
        (pre, bias, h0, None, None, recurrence_of("mingru", "positive", True), False, 2, "cpu"),
    )


def test_no_steps_and_no_sequences():
    module = ostinato.MinLSTM(3, 5, batch_first=True)
    hx, weights = torch.randn(1, 2, 5, requires_grad=True), torch.randn(1, 2, 5)
    output, h_n = module(torch.randn(2, 0, 3), hx)
    assert output.shape == (2, 0, 5)
    assert torch.equal(h_n, hx)
    (h_n * weights).sum().backward()
    assert torch.equal(hx.grad, weights)
    assert torch.equal(module.bias_ih_l0.grad, torch.zeros(15))
    assert module(torch.randn(0, 4, 3))[1].shape == (1, 0, 5)


@pytest.mark.parametrize("cell", LAYERS)
def test_whatever_device_is_the_default(cell):
    torch.manual_seed(0)
    module, x = LAYERS[cell](3, 5), torch.randn(20, 2, 3)
    want = module(x)[0]
    gradients = torch.autograd.grad(want.sum(), list(module.parameters()))
    with torch.device("meta"):
        got = module(x)[0]
        assert torch.equal(got, want)
        assert same_bits(torch.autograd.grad(got.sum(), list(module.parameters())), gradients)


@pytest.mark.parametrize("sizes", [[3], [1, 1, 1], [5, 5, 2, 2, 2, 1], [4, 3, 2, 1]])
def test_where_steps_begin_is_the_same_in_a_capture(sizes):
    batch_sizes, device = torch.tensor(sizes), torch.device("cpu")
    expected = [0, *itertools.accumulate(sizes)]
    for offsets in (packed.offsets_of(batch_sizes, device), packed.constant_offsets(batch_sizes, device)):
        assert offsets.dtype == torch.int32
        assert offsets.tolist() == expected


@pytest.mark.gpu
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", LAYERS)
def test_packed_sequences_are_trained_in_a_cuda_graph(cell, bidirectional):
    torch.manual_seed(0)
    module = LAYERS[cell](7, 12, num_layers=2, bidirectional=bidirectional).cuda()
    rows = torch.randn(14, 7, device="cuda", requires_grad=True)
    batch_sizes = torch.tensor([4, 4, 3, 2, 1])

    def train():
        for leaf in (rows, *module.parameters()):
            leaf.grad = None
        output, _ = module(PackedSequence(rows, batch_sizes))
        output.data.sin().sum().backward()
        return [output.data.detach(), rows.grad, *(p.grad for p in module.parameters())]

    expected = [x.clone() for x in train()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train()
    for x in captured:
        x.detach().fill_(float("nan"))
    graph.replay()
    for x, y in zip(captured, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [[3, 2, 2], [3], [2, 0, 3], [1, 4], [0], [10**6, 10**6], []])
def test_a_packed_sequence_that_does_not_fit_its_rows(sizes):
    packed = PackedSequence(torch.randn(5, 7), torch.tensor(sizes, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"input\.batch_sizes must be positive, never rise, and add up to its 5 rows"):
        ostinato.MinGRU(7, 4)(packed)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: ostinato.MinGRU(0, 4), ValueError, "input_size must be at least 1; got 0"),
        (lambda: ostinato.MinGRU(4, -1), ValueError, "hidden_size must be at least 1; got -1"),
        (lambda: ostinato.MinGRU(4, 2.5), TypeError, "hidden_size must be an int; got float"),
        (lambda: ostinato.MinLSTM(4, 4, 0), ValueError, "num_layers must be at least 1; got 0"),
        (lambda: ostinato.MinGRU(4, 4, 2, 0.1), TypeError, "bias must be a bool; got float"),
        (lambda: ostinato.MinGRU(4, 4, bidirectional="no"), TypeError, "bidirectional must be a bool; got str"),
        (lambda: ostinato.MinGRUCell(4, 4, bias=None), TypeError, "bias must be a bool; got NoneType"),
        (lambda: ostinato.MinGRUCell(4, 4, dtype=torch.int64), TypeError, "dtype must be None or .*; got torch.int64"),
        (lambda: ostinato.MinGRU(4, 4, dtype=torch.complex64), TypeError, "None or .*; got torch.complex64"),
        (lambda: ostinato.MinGRU(4, 4, dtype="float32"), TypeError, "dtype must be None or .*; got 'float32'"),
        (lambda: ostinato.MinGRU(4, 4, 2, dropout=1.5), ValueError, "dropout must be a probability.* got 1.5"),
        (lambda: ostinato.MinGRU(4, 4, 2, dropout="0.5"), TypeError, "dropout must be a number; got str"),
        (lambda: ostinato.MinGRU(4, 4, dtype=np.zeros(2)), TypeError, "dtype must be None or .*; got array"),
        (lambda: ostinato.MinGRU(4, 4, candidate="relu"), ValueError, "candidate must be one of .* got 'relu'"),
        (lambda: ostinato.MinGRUCell(4, 4, backend="tpu"), ValueError, "backend must be one of .* got 'tpu'"),
        (lambda: ostinato.MinGRU(4, 4)(torch.randn(4)), ValueError, r"input must have shape .* got \(4,\)"),
        (lambda: ostinato.MinGRU(4, 4)(torch.randn(5, 3)), ValueError, r"input_size = 4 .* got shape \(5, 3\)"),
        (lambda: ostinato.MinGRU(4, 4)(torch.ones(5, 4).int()), TypeError, "input must be .* torch.int32"),
        (lambda: ostinato.MinGRU(4, 4)(torch.ones(5, 4).double()), TypeError, "parameters' dtype.* torch.float64"),
        (lambda: ostinato.MinGRU(4, 4)(torch.ones(5, 4, device="meta")), ValueError, "module's device, cpu; got meta"),
        (
            lambda: ostinato.MinGRU(4, 6)(torch.randn(5, 2, 4), torch.randn(2, 2, 6)),
            ValueError,
            r"hx must have shape \(1, 2, 6\); got \(2, 2, 6\)",
        ),
        (
            lambda: ostinato.MinGRU(4, 6).step(torch.randn(2, 4), torch.randn(2, 6)),
            ValueError,
            r"state must have shape \(1, 2, 6\); got \(2, 6\)",
        ),
        (
            lambda: ostinato.MinGRU(4, 6)(torch.randn(5, 2, 4), torch.zeros(1, 2, 6).double()),
            TypeError,
            "hx must have the parameters' dtype, torch.float32; got torch.float64",
        ),
        (
            lambda: ostinato.MinLSTM(4, 6).step(torch.randn(2, 4), torch.zeros(1, 2, 6).half()),
            TypeError,
            "state must have the parameters' dtype, torch.float32; got torch.float16",
        ),
        (lambda: ostinato.MinGRU(4, 4, bidirectional=True).step(torch.randn(4)), ValueError, "bidirectional"),
        (
            lambda: ostinato.MinGRUCell(4, 6)(torch.randn(4), torch.randn(2, 6)),
            ValueError,
            r"hx must have shape \(6,\); got \(2, 6\)",
        ),
        (
            lambda: ostinato.MinGRUCell(4, 6)(torch.randn(4), torch.zeros(6).double()),
            TypeError,
            "hx must have the parameters' dtype, torch.float32; got torch.float64",
        ),
        (
            lambda: ostinato.MinLSTMCell(4, 6)(torch.randn(4), torch.zeros(6, device="meta")),
            ValueError,
            "hx must be on the module's device, cpu; got meta",
        ),
    ],
)
def test_bad_input_is_named(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize("cell", [ostinato.MinGRU, ostinato.MinLSTM])
def test_a_gradient_penalty_trains_the_weights(cell):
    """As of WGAN-GP: the loss is made of the gradient with respect to the input."""
    torch.manual_seed(0)
    critic = cell(3, 4, num_layers=2, bidirectional=True, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 6, 3, dtype=torch.float64).requires_grad_()

    def penalty():
        (gradient,) = torch.autograd.grad(critic(x)[0].sum(), x, create_graph=True)
        return (gradient.flatten(1).norm(dim=1) - 1).square().mean()

    penalty().backward()
    for p in critic.parameters():
        got, step = p.grad.clone(), torch.randn_like(p)
        with torch.no_grad():
            p.add_(1e-6 * step)
            with torch.enable_grad():
                ahead = penalty().item()
            p.sub_(2e-6 * step)
            with torch.enable_grad():
                behind = penalty().item()
            p.add_(1e-6 * step)
        assert abs((got * step).sum().item() - (ahead - behind) / 2e-6) < 1e-7
    assert critic.weight_ih_l0.grad.abs().max() > 1e-3


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_a_step_that_was_checked_once_is_looked_at_again_where_it_differs(bias, layers):
    layer, x, h = ostinato.MinGRU(3, 4, layers, bias=bias), torch.randn(2, 3), torch.rand(layers, 2, 4)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(layer.step(x, h)[0], layer(x[None], h)[0][0])
            torch.testing.assert_close(layer.step(x)[1], layer(x[None])[1])
        for bad in ((x[:, :2], h), (x, h[:, :1]), (x.double(), h), (x, h.double()), (x, h[0]), (x.tolist(), h)):
            with pytest.raises((TypeError, ValueError)):
                layer.step(*bad)
        torch.testing.assert_close(layer.step(x[0], h[:, 0])[0], layer.step(x, h)[0][0])
        with pytest.raises(ValueError, match="bidirectional"):
            ostinato.MinGRU(3, 4, layers, bias=bias, bidirectional=True).step(x, h)
        layer.get_parameter(f"weight_ih_l{layers - 1}").mul_(2)
        torch.testing.assert_close(layer.step(x, h)[0], layer(x[None], h)[0][0])
        with torch.autocast("cpu", torch.bfloat16):
            assert layer.step(x, h)[0].dtype == layer(x[None], h)[0].dtype
        layer.double()
        torch.testing.assert_close(layer.step(x.double(), h.double())[0], layer(x.double()[None], h.double())[0][0])
    assert layer.step(x.double(), h.double())[0].requires_grad


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_cells_step_that_was_checked_once_is_looked_at_again_where_it_differs(bias, cell):
    module, layer = CELLS[cell](3, 4, bias=bias), LAYERS[cell](3, 4, bias=bias)
    x, h = torch.randn(2, 3), torch.rand(2, 4)

    def assert_equals_layer():
        layer.load_state_dict({f"{name}_l0": x for name, x in module.state_dict().items()})
        torch.testing.assert_close(module(x, h), layer(x[None], h[None])[0][0])
        torch.testing.assert_close(module(x), layer(x[None])[0][0])

    with torch.no_grad():
        for _ in range(2):
            assert_equals_layer()
            torch.testing.assert_close(module(x, h), layer.step(x, h[None])[0])
        for bad in ((x[:, :2], h), (x, h[:1]), (x.double(), h), (x, h.double()), (x, h[None]), (x.tolist(), h)):
            with pytest.raises((TypeError, ValueError)):
                module(*bad)
        with pytest.raises(ValueError, match=r"state must have shape \(1, 2, 4\)"):
            layer.step(x, h)
        torch.testing.assert_close(module(x[0], h[0]), module(x, h)[0])
        module.weight_ih.mul_(2)
        assert_equals_layer()
        module.candidate = layer.candidate = "tanh"
        assert_equals_layer()
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x, h).dtype == torch.bfloat16
        kept = module(x, h)
        module(x, 2 * h)
        torch.testing.assert_close(module(x, h), kept, rtol=0, atol=0)
    assert module(x, h).requires_grad


def test_a_cell_remembers_its_step(monkeypatch):
    module, x, h = ostinato.MinGRUCell(3, 4), torch.randn(2, 3), torch.rand(2, 4)
    with torch.no_grad():
        expected = module(x, h)
        monkeypatch.setattr("ostinato.minimal.cells.next_state", None)
        assert torch.equal(module(x, h), expected)


def test_a_state_is_not_taken_for_the_bias_of_a_remembered_step():
    x, state = torch.randn(2, 3), torch.nn.Parameter(torch.rand(8))  # as many numbers as two states, or a bias, have
    with torch.no_grad():
        for _ in range(2):
            ostinato.MinGRUCell(3, 4)(x)
        with pytest.raises(ValueError, match=r"hx must have shape \(2, 4\); got \(8,\)"):
            ostinato.MinGRUCell(3, 4, bias=False)(x, state)


def test_each_layer_of_a_stack_remembers_its_step(monkeypatch):
    layer, x = ostinato.MinGRU(3, 4, 2), torch.randn(2, 3)
    with torch.no_grad():
        state = layer.step(x)[1]
        expected = layer.step(x, state)
        monkeypatch.setattr("ostinato.minimal.layers.next_state", None)
        assert same_bits(layer.step(x, state), expected)
