"""Episodes that end inside a sequence: each is computed as if it were alone, in every layer, layout and direction."""

import copy
import itertools
import random

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import ostinato
from ostinato.kernels.persistent import backends, cpu, reference
from ostinato.kernels.persistent.plan import no_kernel
from ostinato.recurrent import sequences
from ostinato.recurrent.torch_layers import state_sizes
from ostinato.states import states_of
from recurrent_layers import forget_calls, twin, use_kernels

CELLS = ("RNN", "GRU", "LSTM")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 0.03, torch.float16: 0.004}


def random_resets(lengths):
    """(T, B), more often than not at a sequence's first and last step, which are easily forgotten."""
    resets = torch.rand(max(lengths), len(lengths)) < 0.3
    for b, length in enumerate(lengths):
        resets[0, b] = b % 2 == 0
        resets[length - 1, b] |= b % 3 == 0
    return resets


def by_episodes(layer, x, states, lengths, resets):
    """(T, B, features) through the layer, each episode alone, and the last states.

    A layer and direction at a time, so that each sees exactly one episode of one sequence.
    """
    states = [state.clone() for state in states]
    directions = 2 if layer.bidirectional else 1
    outputs, last = [], []
    for b, length in enumerate(lengths):
        cuts = [t for t in range(1, length) if resets[t, b]]
        pieces = list(itertools.pairwise([0, *cuts, length]))
        parts, finals = [], []
        for begin, end in pieces:
            hidden = [torch.zeros_like(state[:, b : b + 1]) for state in states]
            for own, given in zip(hidden, states, strict=True):
                if begin == 0 and not resets[0, b]:
                    own[0::directions] = given[0::directions, b : b + 1]
                if directions == 2 and end == length:
                    own[1::2] = given[1::2, b : b + 1]
            hx = tuple(hidden) if layer.mode == "LSTM" else hidden[0]
            part, final = layer(x[begin:end, b : b + 1], hx)
            parts.append(part)
            finals.append(final if layer.mode == "LSTM" else (final,))
        output = torch.cat(parts)
        outputs.append(nn.functional.pad(output, (0, 0, 0, 0, 0, len(x) - length)))
        rows = []
        for which in range(len(states)):
            ends = [finals[-1 if i % directions == 0 else 0][which][i] for i in range(len(states[0]))]
            rows.append(torch.stack(ends))
        last.append(rows)
    return torch.cat(outputs, 1), [torch.cat([rows[i] for rows in last], 1) for i in range(len(states))]


@pytest.fixture(params=["reference", "the CPU's", "torch"])
def kernels(request, monkeypatch):
    if request.param == "torch":
        forget_calls(monkeypatch)
        monkeypatch.setattr(backends, "_plan", lambda *_: no_kernel("a test"))
        monkeypatch.setattr(sequences, "plan_layer", lambda *_: no_kernel("a test"))
    else:
        use_kernels(monkeypatch, {"reference": reference, "the CPU's": cpu}[request.param])
    yield request.param
    backends._plan_dense.cache_clear()


def make(cell, block=None, **options):
    torch.manual_seed(0)
    layer = getattr(ostinato, cell)(5, 16, **options)
    return layer if block is None else ostinato.prune(layer, 0.3, block=block)


def check(layer, lengths, layout, dtype=torch.float64, with_state=True):
    """All results and gradients of a layer against those of its episodes, each alone, in float64."""
    torch.manual_seed(1)
    layer, exact = layer.to(dtype), twin(layer.to(dtype)).double()
    exact.batch_first = False  # for episodes in rows of steps
    resets, directions = random_resets(lengths), 2 if layer.bidirectional else 1
    x = torch.randn(max(lengths), len(lengths), 5).to(dtype)
    count = 2 if layer.mode == "LSTM" else 1
    shapes = [(layer.num_layers * directions, len(lengths), size) for size in state_sizes(layer)[:count]]
    states = [torch.randn(shape).to(dtype) for shape in shapes] if with_state else []
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    own = [tensor.clone().requires_grad_() for tensor in (x, *states)]
    given = [tensor.double().requires_grad_() for tensor in (x, *states)]

    expected = by_episodes(exact, given[0], given[1:] or zeros, lengths, resets)
    input, marks, hidden = own[0], resets, own[1:]
    if layout == "packed":
        input = pack_padded_sequence(input, lengths, enforce_sorted=False)
        marks = pack_padded_sequence(resets, lengths, enforce_sorted=False).data
    elif layout == "batch_first":
        input, marks = input.transpose(0, 1), marks.t()
    elif layout == "unbatched":
        input, marks, hidden = input[:, 0], marks[:, 0], [state[:, 0] for state in hidden]
    hx = None if not hidden else tuple(hidden) if count == 2 else hidden[0]
    output, last = layer(input, hx, resets=marks)
    last = list(last) if count == 2 else [last]
    if layout == "packed":
        output, _ = pad_packed_sequence(output, total_length=max(lengths))
    elif layout == "batch_first":
        output = output.transpose(0, 1)
    elif layout == "unbatched":
        output, last = output[:, None], [state[:, None] for state in last]

    ours, exacts = [output, *last], [expected[0], *expected[1]]
    weights = [torch.randn(y.shape, dtype=torch.float64) for y in exacts]
    for results, wide in ((ours, False), (exacts, True)):
        torch.autograd.backward(results, [w if wide else w.to(dtype) for w in weights])
    ours += [tensor.grad for tensor in (*own, *layer.parameters())]
    exacts += [tensor.grad for tensor in (*given, *exact.parameters())]
    masks = dict(layer.named_buffers())
    for (name, _), grad in zip(exact.named_parameters(), exacts[-len(list(exact.parameters())) :], strict=True):
        if name.replace("weight", "mask") in masks:
            grad.mul_(masks[name.replace("weight", "mask")])
    for got, truth in zip(ours, exacts, strict=True):
        scale = truth.abs().max().clamp(min=0.1)
        assert got.isfinite().all()
        assert (got.double() - truth).abs().max() <= TOLERANCE[dtype] * scale


LAYOUTS = {"time first": (4, 4, 4, 4, 4), "batch_first": (6, 6, 6, 6), "packed": (3, 7, 1, 5), "unbatched": (8,)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("cell", "options", "block"),  # products, which differ by blocks, know nothing of cells
    [
        *((cell, {}, None) for cell in CELLS),
        *(("RNN", {"nonlinearity": "relu"}, None), ("GRU", {}, (16, 1)), ("LSTM", {}, (1, 1))),
        ("LSTM", {"proj_size": 6}, None),
    ],
    ids=str,
)
def test_an_episode_is_computed_as_if_it_were_alone(cell, options, block, layout, kernels):
    options = options | {"batch_first": layout == "batch_first", "num_layers": 2, "bidirectional": True}
    check(make(cell, block, **options), LAYOUTS[layout], layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", CELLS)
def test_in_every_dtype(cell, dtype):
    check(make(cell), (30, 30), "time first", dtype)


@pytest.mark.parametrize("cell", CELLS)
def test_without_a_state_and_in_one_direction(cell, kernels):
    check(make(cell, num_layers=2), LAYOUTS["packed"], "packed", with_state=False)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_one_step(cell, bidirectional):
    """As in a rollout: where an episode begins, the state that is given is not seen."""
    check(make(cell, bidirectional=bidirectional, num_layers=2), (1, 1, 1), "time first")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_episode(value, kernels):
    layer = make("LSTM", bidirectional=True).double()
    x, resets = torch.randn(9, 4, 5, dtype=torch.float64), torch.zeros(9, 4, dtype=torch.bool)
    resets[3, 0] = resets[6, 0] = True
    clean = layer(x, resets=resets)[0]
    x[4, 0, 1] = value
    x.requires_grad_()
    output = layer(x, resets=resets)[0]
    others = torch.ones(9, 4, dtype=torch.bool)
    others[3:6, 0] = False
    torch.testing.assert_close(output[others], clean[others], rtol=0, atol=1e-13)
    assert not torch.equal(output[4, 0], clean[4, 0])
    output.sum().backward()
    assert x.grad[others].isfinite().all()


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_and_their_gradients_by_differences(cell, kernels):
    layer = make(cell, bidirectional=True).double()
    x, resets = torch.randn(4, 4, 5, dtype=torch.float64, requires_grad=True), random_resets((4, 4, 4, 4))
    h = torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)
    hx = (h, h.detach() * 2) if cell == "LSTM" else h

    def function(x, h):
        output, last = layer(x, (h, hx[1]) if cell == "LSTM" else h, resets=resets)
        return output, *(last if cell == "LSTM" else (last,))

    assert torch.autograd.gradcheck(function, (x, h), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (x, h), fast_mode=True)


def test_compiled_and_exported():
    layer = make("GRU", bidirectional=True, num_layers=2).double()
    x, resets = torch.randn(6, 3, 5, dtype=torch.float64), random_resets((6, 6, 6))
    expected = layer(x, resets=resets)
    program = torch.export.export(layer, (x,), {"resets": resets})
    torch.compiler.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for call in (program.module(), compiled):
            for got, truth in zip(call(x, resets=resets), expected, strict=True):
                torch.testing.assert_close(got, truth, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated, and warns of every branch
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_takes_other_episodes_and_sizes(layout):
    """Also if its example is a single episode."""
    layer = make("LSTM", bidirectional=True, batch_first=layout == "batch_first").double()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, h, c, resets):  # a trace makes PackedSequences plain tuples
            return self.layer(PackedSequence(*x) if layout == "packed" else x, (h, c), resets=resets)

    def arguments(lengths, resets):
        steps, batch = resets.shape
        x, (h, c) = torch.randn(steps, batch, 5, dtype=torch.float64), torch.randn(2, 2, batch, 16, dtype=torch.float64)
        if layout == "packed":
            x, resets = (pack_padded_sequence(each, lengths, enforce_sorted=False) for each in (x, resets))
            return x, h, c, resets.data
        if layout == "batch_first":
            return x.transpose(0, 1), h, c, resets.t()
        if layout == "unbatched":
            return x[:, 0], h[:, 0], c[:, 0], resets[:, 0]
        return x, h, c, resets

    one, several = ([6], torch.zeros(6, 1, dtype=torch.bool)), ([2, 9, 4], random_resets((2, 9, 4)))
    for example, other in ((one, several), (several, one)):
        given = arguments(*other)
        results = torch.jit.trace(Model(), arguments(*example))(*given)
        torch.testing.assert_close(results, Model()(*given), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", ["RNN", "LSTM"])
def test_the_transform_in_forward_mode_names_the_context_that_takes_them(cell):
    layer, x = make(cell).double(), torch.randn(6, 3, 5, dtype=torch.float64)
    resets, packed = random_resets((6, 6, 6)), pack_padded_sequence(x, [6, 4, 2])

    def run(x):
        return layer(x, resets=resets)[0]

    for function, primal in ((run, x), (lambda data: layer(packed._replace(data=data))[0].data, packed.data)):
        with pytest.raises(NotImplementedError, match=f"PackedSequence through {cell}, nor resets.*forward_ad can"):
            torch.func.jvp(function, (primal,), (primal,))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, x))).tangent
    difference = (run((1 + 1e-6) * x) - run((1 - 1e-6) * x)) / 2e-6
    assert (tangent - difference).abs().max() < 1e-8


@pytest.mark.parametrize("layout", ["time first", "packed"])
def test_wrong_resets_are_refused(layout):
    layer, x = make("GRU"), torch.randn(4, 3, 5)
    right = torch.zeros(4, 3, dtype=torch.bool)
    input, shape = x, (4, 3)
    if layout == "packed":
        input, shape = pack_padded_sequence(x, [4, 2, 2]), (8,)
        right = torch.zeros(shape, dtype=torch.bool)
    layer(input, resets=right)
    with pytest.raises(TypeError, match=r"resets must be a bool tensor; got a tensor of torch.int64"):
        layer(input, resets=right.long())
    with pytest.raises(TypeError, match=r"resets must be a bool tensor; got list"):
        layer(input, resets=right.tolist())
    with pytest.raises(ValueError, match=r"resets must have shape \(.*; got \(5,\)"):
        layer(input, resets=torch.zeros(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="resets must be on the device of input, cpu; got meta"):
        layer(input, resets=right.to("meta"))
    with pytest.raises(RuntimeError, match="hidden"):
        layer(input, torch.zeros(1, 2, 16), resets=right)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_gpu_random_layers(seed):
    """Dense and pruned, of any shape, against the same layer in float64 on the CPU."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype = draw.choice((torch.float32, torch.float16, torch.bfloat16))
    cell, size, hidden = draw.choice(CELLS), draw.randint(1, 40), int(2 ** draw.uniform(3, 8))
    options = {"num_layers": draw.randint(1, 2), "bidirectional": draw.random() < 0.5, "batch_first": True}
    layer = getattr(ostinato, cell)(size, hidden, **options).to(dtype)
    if draw.random() < 0.4:
        ostinato.prune(layer, draw.uniform(0.05, 0.5), block=draw.choice(((16, 1), (8, 4), (1, 1))))
    exact = copy.deepcopy(layer).double()
    layer.cuda()
    lengths = [draw.randint(1, 24) for _ in range(int(2 ** draw.uniform(0, 6)))]
    x, resets = torch.randn(len(lengths), max(lengths), size).to(dtype), random_resets(lengths).t()
    packed = draw.random() < 0.5
    x.requires_grad_()
    results = []
    for own, device, wide in ((layer, "cuda", dtype), (exact, "cpu", torch.float64)):
        input, marks = x.to(device, wide), resets.to(device)
        input.retain_grad()
        call = input
        if packed:
            call = pack_padded_sequence(input, lengths, True, enforce_sorted=False)
            marks = pack_padded_sequence(marks, lengths, True, enforce_sorted=False).data
        output, last = own(call, resets=marks)
        output = output.data if packed else output
        torch.manual_seed(seed)
        loss = (output * torch.randn(output.shape, dtype=torch.float64).to(device, wide)).sum()
        loss = loss + sum(state.sum() for state in (last if cell == "LSTM" else (last,)))
        loss.backward()
        grads = [parameter.grad for parameter in own.parameters()]
        results.append([output, *(last if cell == "LSTM" else (last,)), input.grad, *grads])
    bound = {torch.float32: 3e-6, torch.float16: 8e-3, torch.bfloat16: 6e-2}[dtype] * options["num_layers"]
    for found, right in zip(*results, strict=True):
        assert (found.double().cpu() - right).norm() <= bound * right.norm() + 1e-6, (cell, hidden, dtype, options)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
def test_a_captured_call_that_no_kernel_takes_says_so_and_its_steps_can_be_captured(cell):
    layer = getattr(ostinato, cell)(4, 8).double().cuda()  # which no kernel of a GPU takes
    x, resets = torch.randn(5, 2, 4, dtype=torch.float64, device="cuda"), random_resets([5, 5]).cuda()

    def by_steps():
        outputs, states = [], states_of(layer.initial_state(2))
        for x_t, begins in zip(x, resets, strict=True):
            states = [state.where(~begins[:, None], 0.0) for state in states]
            y, after = layer.step(x_t, tuple(states) if cell == "LSTM" else states[0])
            outputs.append(y)
            states = states_of(after)
        return torch.stack(outputs)

    with torch.no_grad():
        want = layer(x, resets=resets)[0]
        refused = pytest.raises(RuntimeError, match=f"cannot capture this {cell} with resets")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            layer(x, resets=resets)
        by_steps()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = by_steps()
        graph.replay()
    torch.testing.assert_close(output, want)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", ["MinGRU", "MinLSTM", "GRU"])
def test_the_host_does_not_wait_for_packed_sequences_with_resets(layer):
    lengths = [9, 7, 7, 2]
    module = getattr(ostinato, layer)(8, 16, 2, bidirectional=True).cuda()
    packed = pack_padded_sequence(torch.randn(9, 4, 8, device="cuda"), lengths)
    marks = pack_padded_sequence(random_resets(lengths).cuda(), lengths).data
    for mode in ("default", "error"):  # kernels are compiled and loaded first
        torch.cuda.set_sync_debug_mode(mode)
        try:
            output = module(packed, resets=marks)[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert output.data.shape == (25, 32)
