"""Which kernels are planned for a call of RNN, GRU or LSTM, and what is prepared for equal calls."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import ostinato
from ostinato.kernels.persistent import backends, reference
from ostinato.kernels.persistent.cuda import launch
from ostinato.kernels.persistent.plan import Plan, no_kernel
from ostinato.recurrent import sequences
from recurrent_layers import (
    CELLS,
    assert_gradients_close,
    assert_results_close,
    by,
    flat,
    forget_calls,
    inputs,
    make,
    pruned,
    twin,
)


@by("as planned")
def test_packed_sequences_of_one_length_are_planned_as_the_operator_takes_them(monkeypatch):
    """Without offsets: planned as packed, those of an LSTM that torch runs ended in the loop that defines it."""
    monkeypatch.setattr(reference, "forward", None)
    layer, planned = make("LSTM", 5, 272), []
    plan = type(layer)._plan_call
    monkeypatch.setattr(type(layer), "_plan_call", lambda self, *args: planned.append(plan(self, *args)) or planned[-1])
    for lengths in ([12, 12], [12, 11]):
        x = pack_sequence([torch.randn(length, 5) for length in lengths])
        assert_results_close(layer(x), twin(layer)(x), 1e-6)
    assert [plan.path for plan in planned] == ["steps", "dense"]


@by("as planned")
@pytest.mark.parametrize("kind", ["resets", "packed"])
def test_a_plan_is_of_packed_sequences_and_of_those_with_resets(kind):
    """Which torch's kernels slice, or do not take."""
    layer = make("LSTM", 5, 272)
    assert not layer.plan(2, steps=12).has_kernel
    assert layer.plan(2, steps=12, **{kind: True}).has_kernel


def test_which_calls_are_planned_as_replayed(monkeypatch):
    asked = []
    monkeypatch.setattr(sequences, "plan_layer", lambda mask, call: asked.append(call) or Plan("dense"))
    monkeypatch.setattr(sequences, "worth_capturing", lambda weights, rows: rows <= 400)
    layer = make("GRU", 5, 8)
    repeated = {}, {"resets": True}, {"training": True}, {"steps": 2}
    others = {"packed": True}, {"steps": None}, {"steps": 101}, {"batch": 1, "steps": 513}
    for options in (*repeated, *others):
        layer.plan(**{"batch": 4, "steps": 100} | options)
    pruned("GRU", 5, 8).plan(4, steps=100)
    assert [call.replayed for call in asked[:-1]] == [True] * len(repeated) + [False] * len(others)
    assert not asked[-1].replayed
    monkeypatch.setattr(sequences, "is_captured", lambda device: True)
    layer.plan(4, steps=100)
    assert asked[-1].captured
    assert not asked[-1].replayed


def test_two_or_three_steps_are_planned_where_they_may_be_replayed(monkeypatch):
    layer, planned = make("GRU", 5, 8), []
    monkeypatch.setattr("ostinato.recurrent.layers.least_steps", lambda *_: 4)
    monkeypatch.setattr(type(layer), "_forward_single_steps", lambda *_: None)
    monkeypatch.setattr(type(layer), "_kernels_for", lambda self, *given: planned.append(given))
    for may_be in (False, True):
        monkeypatch.setattr(sequences, "worth_capturing", lambda weights, rows, may_be=may_be: may_be)
        for steps in (2, 3):
            x = torch.randn(steps, 2, 5)
            assert_results_close(layer(x), twin(layer)(x), 1e-6)
        assert len(planned) == 2 * may_be


@pytest.mark.parametrize("drops", [False, True])
def test_calls_with_dropout_are_planned_as_trained(drops, monkeypatch):
    """By whom drops the same when a checkpoint, whose first call has no gradients, computes them."""
    asked = []
    monkeypatch.setattr(sequences, "plan_layer", lambda mask, call: asked.append(call) or no_kernel("a test"))
    forget_calls(monkeypatch)
    layer = ostinato.GRU(5, 8, 2, dropout=0.5).train(drops)
    with torch.no_grad():
        layer(torch.randn(7, 3, 5))
    assert [call.training for call in asked] == [drops]
    layer(torch.randn(7, 3, 5))
    assert [call.training for call in asked] == [drops, True]


def test_kernels_are_compared_with_cudnns_only_if_these_would_run(monkeypatch):
    layer, asked = make("GRU", 5, 8), []
    monkeypatch.setattr(sequences, "plan_layer", lambda mask, call: asked.append(call) or Plan("dense"))
    monkeypatch.setattr(sequences, "is_captured", lambda device: False)
    for enabled in (True, False):
        with torch.backends.cudnn.flags(enabled=enabled):
            for device in ("cuda", "cpu"):
                layer._plan_call(torch.device(device), 4, torch.float32, False, 20)
    assert [call.compared for call in asked] == [True, True, False, True]


@by("as planned")
def test_plan():
    layer = ostinato.GRU(5, 32)
    assert layer.plan(1) == Plan("dense", reason="the weights stay in the CPU's caches for all steps")
    for block, path in (((16, 1), "block"), ((8, 4), "block"), ((1, 1), "sparse")):
        for training in (False, True):
            plan = ostinato.prune(layer, 0.03, block=block).plan(1, training=training, steps=100)
            assert (plan.path, plan.has_kernel) == (path, True)
            assert plan.reason.endswith("% of the weights are left, and only these are read")
        assert layer.plan(1, steps=1).path == layer.plan(8, steps=1).path == path
        assert layer.plan(256, steps=1).path == "dense"  # read once for all sequences, with zeros
        assert layer.plan(257, steps=1).path == layer.plan(1, steps=2).path == "steps"
        assert layer.plan(1, steps=1, training=True).path == "steps"
    for dtype in (torch.bfloat16, torch.float16):
        plan = layer.plan(1, dtype)
        assert (plan.path, plan.has_kernel) == ("steps", False)
        assert str(dtype) in plan.reason
    assert layer.to("meta").plan(1).reason == "layers on meta run in torch's own kernels"
    layer = pruned("GRU", 5, 32)
    with torch.device("meta"), torch.no_grad():  # a default device is for the user's tensors
        layer(torch.zeros(30, 1, 5, device="cpu"))
    assert ostinato.prune(ostinato.GRU(5, 32), 0.9).plan(1).path == "dense"
    with pytest.raises(ValueError, match="batch must be at least 1; got 0"):
        layer.plan(0)
    with pytest.raises(TypeError, match="batch must be an int; got float"):
        layer.plan(1.5)
    with pytest.raises(ValueError, match="steps must be at least 1; got -2"):
        layer.plan(1, steps=-2)
    for dtype in ("float32", torch.int32):
        with pytest.raises(TypeError, match=rf"dtype must be a floating-point torch\.dtype; got {dtype!r}"):
            layer.plan(1, dtype)
    for name in ("training", "resets", "packed"):
        with pytest.raises(TypeError, match=f"{name} must be a bool; got str"):
            layer.plan(1, **{name: "no"})


def test_torch_runs_all_layers_or_none(monkeypatch):
    def make_plan(call, mask_hh, *_):
        return Plan("dense", reason="dense") if mask_hh is None else no_kernel("pruned")

    monkeypatch.setattr(backends.kernels_on(torch.device("cpu")), "make_plan", make_plan)
    layer = ostinato.GRU(5, 8, 2)
    assert layer.plan(1).reason == "dense"
    layer.register_buffer("mask_hh_l1", torch.ones_like(layer.weight_hh_l1, dtype=torch.bool))
    assert layer.plan(1).reason == "pruned"


def test_torch_runs_a_call_that_cannot_be_planned_and_the_next_is_planned_again(monkeypatch):
    layer, answers = ostinato.GRU(5, 8), iter([True, False])
    x, hx = inputs(layer, 2)

    def plan_layer(*call):
        if next(answers):
            raise torch.OutOfMemoryError("no room\nat this moment")
        return Plan("dense", reason="dense")

    monkeypatch.setattr(sequences, "plan_layer", plan_layer)
    assert [layer.plan(1).reason for _ in range(2)] == ["no room", "dense"]
    answers = iter([True])
    assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-6)
    assert next(answers, None) is None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_a_call_and_its_gradients_have_one_plan(monkeypatch, packed, resets):
    """But for that of the call's kernels, which are not compared with torch's again."""
    asked = []

    def make_plan(call, *_):
        asked.append(call)
        return Plan("dense", reason="dense")

    monkeypatch.setattr(backends.kernels_on(torch.device("cpu")), "make_plan", make_plan)
    backends._plan_dense.cache_clear()
    layer = ostinato.GRU(5, 8)
    x = torch.randn(7, 5, requires_grad=True)
    x = pack_sequence([x[:4], x[4:]]) if packed else x[:, None]
    marks = torch.zeros(7, dtype=torch.bool) if packed else torch.zeros(7, 1, dtype=torch.bool)
    flat(layer(x, resets=marks if resets else None))[0].sum().backward()
    backends._plan_dense.cache_clear()
    call, of_kernels = asked
    assert of_kernels == call._replace(compared=False, threads=1)  # threads matter to the comparison alone
    assert (call.compared, call.training, call.resets, call.packed) == (True, True, resets, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_gpu_runs_torchs_kernels_when_ours_cannot_be_made(monkeypatch, error):
    def fail(*_, **__):
        raise error("no room\nat all")

    monkeypatch.setattr(launch, "kernels", fail)
    launch.compile_kernels.cache_clear()  # of what other tests have compiled
    layer = pruned("GRU", 5, 64, device="cuda")
    x, hx = inputs(layer, 4, device="cuda")
    plan = layer.plan(4)
    assert (plan.path, plan.reason, plan.blocks) == ("steps", "no room", 0)
    with torch.no_grad():
        assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-5)


@by("reference", "the CPU's")
@pytest.mark.parametrize("options", [{}, {"num_layers": 3, "batch_first": True}, {"bidirectional": True}])
@pytest.mark.parametrize("cell", CELLS)
def test_calls_like_earlier_ones_are_torchs(cell, options):
    """Each of several calls before one backward, kept for another, by weights that change, some of them frozen."""
    layer = make(cell, 5, 8, dtype=torch.float64, **options)
    x, hx = inputs(layer, 3)
    for turn in range(4):
        layer.weight_ih_l0.requires_grad_(turn < 3)
        with torch.no_grad():
            layer.weight_hh_l0.mul_(0.9)
        module, gradients = twin(layer), []
        module.weight_ih_l0.requires_grad_(turn < 3)
        for each in (layer, module):
            results = [flat(each(scale * x, None if turn == 2 else hx)) for scale in (1, 2)]
            trained = [p for p in each.parameters() if p.requires_grad]
            loss = sum(y.square().sum() for result in results for y in result)
            torch.autograd.grad(loss, trained, retain_graph=True)
            gradients.append([*results[0], *results[1], *torch.autograd.grad(loss, trained)])
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_layers_whose_tensors_have_the_same_shapes_are_told_apart():
    torch.manual_seed(0)
    layers = make("RNN", 8, 8, 2), make("relu", 8, 8, 2), make("RNN", 8, 8, bidirectional=True)
    x, hx = inputs(layers[0], 3)
    for layer in layers * 2:
        assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-6)


@by("the CPU's")
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_call_runs_what_was_prepared_for_one_like_it(bidirectional, monkeypatch):
    layer = ostinato.GRU(5, 8, bidirectional=bidirectional)
    x, hx = inputs(layer, 3)
    never = torch.zeros(x.shape[:2], dtype=torch.bool)
    for _ in range(2):
        layer(x, hx), layer(x, hx, resets=never)
    for name in ("recurrent_layer", "recurrent_layers"):
        monkeypatch.setattr(sequences, name, None)
    for resets in (None, never):
        assert_results_close(layer(2 * x, hx, resets=resets), twin(layer)(2 * x, hx), 1e-6)
    with pytest.raises(AttributeError, match="NoneType"):
        layer(x[:2], hx)


@pytest.mark.parametrize("kind", ["first", "packed", "tied"])
def test_eager_calls_do_without_the_dispatcher(kind, monkeypatch):
    """Which takes the host longer than a small layer the GPU."""
    layer, dispatched = ostinato.RNN(5, 8, 2), []
    if kind == "tied":
        layer.weight_ih_l1 = layer.weight_hh_l1
    x, hx = inputs(layer, 3)
    given = pack_padded_sequence(x, torch.tensor([len(x), 4, 2])) if kind == "packed" else x
    forget_calls(monkeypatch)

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            dispatched.append(str(function))
            return function(*args, **(kwargs or {}))

    assert layer._kernels_for(given, [hx], list(layer._flat_weights), None).prepared == {}
    with Watched():
        layer(given, hx)
    assert any("recurrent_layer" in name for name in dispatched)
    assert_results_close(layer(given, hx), twin(layer)(given, hx), 1e-6)


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_of_a_pruned_layer_is_checked_unless_one_with_its_masks_was(grad, monkeypatch):
    layer, checked = pruned("GRU", 5, 16, 2, density=0.5), []
    check = ostinato.GRU._find_kernels
    monkeypatch.setattr(ostinato.GRU, "_find_kernels", lambda *args: checked.append(1) or check(*args))
    x, hx = inputs(layer, 3)

    def checks():
        checked.clear()
        expected = twin(layer)
        for name, mask in layer.named_buffers():
            getattr(expected, name.replace("mask", "weight")).data *= mask
        with torch.set_grad_enabled(grad):
            assert_results_close(layer(x, hx), expected(x, hx), 1e-6)
        return len(checked)

    assert [checks(), checks()] == [1, 0]
    layer.mask_hh_l1[:, 3] = False
    assert [checks(), checks()] == [1, 0]
    layer.mask_hh_l0 = layer.mask_hh_l0.clone()
    layer.mask_hh_l0[5] = False
    assert [checks(), checks()] == [1, 0]
    del layer.mask_hh_l1
    assert [checks(), checks()] == [1, 0]


def test_a_call_is_checked_unless_one_like_it_was(monkeypatch):
    layer, checked = ostinato.GRU(5, 8, batch_first=True), []
    check = ostinato.GRU._find_kernels
    monkeypatch.setattr(ostinato.GRU, "_find_kernels", lambda *args: checked.append(1) or check(*args))
    x, hx = inputs(layer, 3)

    def checks(x, hx, **resets):
        checked.clear()
        layer(x, hx, **resets)
        first = len(checked)
        assert_results_close(layer(x, hx, **resets), twin(layer)(x, hx), 1e-6)
        assert len(checked) == first, "the second call is known"
        return first

    assert [checks(x, hx), checks(2 * x, hx)] == [1, 0]
    with torch.backends.cudnn.flags(enabled=False):
        assert checks(x, hx) == 1
    never = torch.zeros(x.shape[:2], dtype=torch.bool)
    assert [checks(x, hx, resets=never), checks(x, hx, resets=never.clone()), checks(x, hx)] == [1, 0, 0]
    never[:, 3] = True
    assert not torch.equal(layer(x, hx, resets=never)[0], layer(x, hx)[0])
    assert checks(x[:2], hx[:, :2]) == 1
    assert checks(x.clone().requires_grad_(), hx) == 1
    assert checks(x, None) == 1
    assert checks(x[:, ::2], hx) == 1
    with torch.no_grad():
        assert checks(x, hx) == 1
    layer.bias_hh_l0.requires_grad_(False)
    assert checks(x, hx) == 1
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            layer(x, hx)
            assert layer(x, hx)[0].dtype == dtype
    layer(x)
    layer.batch_first, hx = False, hx[:, :1].expand(1, 12, 8)
    assert [checks(x, None), checks(x, hx)] == [1, 1]
    layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach()[:23])
    with pytest.raises(ValueError, match=r"weight_hh_l0 must have shape \(24, 8\)"):
        layer(x, hx)


@by("as planned")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("cell", ["RNN", "LSTM"])
def test_a_call_that_torchs_kernels_take_as_it_is_is_checked_once(cell, grad, monkeypatch):
    layer, checked = make(cell, 5, 8, 2), []
    check = type(layer)._find_kernels
    monkeypatch.setattr(type(layer), "_find_kernels", lambda *args: checked.append(1) or check(*args))
    x, hx = inputs(layer, 50, 6)
    assert not layer.plan(50, steps=6, training=grad).has_kernel

    def checks(x, hx):
        checked.clear()
        for _ in range(2):
            assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-6)
        return len(checked)

    with torch.set_grad_enabled(grad):
        assert [checks(x, hx), checks(x, hx), checks(x, None)] == [1, 0, 1]
        for _ in range(2 * grad):
            assert_gradients_close(layer, twin(layer), x, hx, tolerance=1e-5)
        transposed = tree_map(lambda state: state.mT.contiguous().mT, hx)
        assert checks(x, transposed) == 2  # torch's kernels take copies
        layer.dropout = 1.0
        dropped = layer(x, hx)[0]
        layer.eval()
        assert checks(x, hx) == 0
        assert not torch.equal(dropped, layer(x, hx)[0])
        layer.weight_ih_l1 = nn.Parameter(layer.weight_ih_l1[:, :7].clone())
        with pytest.raises(ValueError, match="weight_ih_l1 must have shape"):
            layer(x, hx)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_call_whose_states_are_one_tensor_is_checked_once(bidirectional, monkeypatch):
    layer, checked = ostinato.LSTM(5, 8, 2, bidirectional=bidirectional).double(), []
    check = ostinato.LSTM._find_kernels
    monkeypatch.setattr(ostinato.LSTM, "_find_kernels", lambda *args: checked.append(1) or check(*args))
    x = torch.randn(64, 3, 5, dtype=torch.float64)
    h = torch.randn(4 if bidirectional else 2, 3, 8, dtype=torch.float64, requires_grad=True)

    def results(layer, *states):
        output, (h_n, c_n) = layer(x, states)
        return output, (h_n, c_n, *torch.autograd.grad(output.sum() + h_n.sum() + c_n.sum(), h))

    for states, checks in (((h, h), 1), ((h, h), 1), ((h, h.clone()), 2), ((h, h), 2)):
        assert_results_close(results(layer, *states), results(twin(layer), *states), 1e-12)
        assert len(checked) == checks


@pytest.mark.gpu
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_trains_the_same_in_a_cuda_graph(kind, bidirectional):
    torch.manual_seed(0)
    eager = getattr(ostinato, kind)(48, 64, 2, bidirectional=bidirectional).cuda()
    x = torch.randn(16, 8, 48, device="cuda")
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(eager), (torch.zeros_like(x, requires_grad=True),))
    layers = eager, graphed
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.1) for layer in layers]
    for _ in range(4):
        x, results = torch.randn_like(x), []
        for layer, optimizer in zip(layers, optimizers, strict=True):
            optimizer.zero_grad()
            leaf = x.clone().requires_grad_()
            output, _ = layer(leaf)
            output.square().mean().backward()
            optimizer.step()
            results.append([output.clone(), leaf.grad.clone(), *(p.grad.clone() for p in layer.parameters())])
        for mine, other in zip(*results, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.gpu
def test_the_first_call_may_be_captured():
    """In a process that has launched nothing else, as where calls before the capture are left to torch."""
    code = """
import torch, ostinato
layer, x = ostinato.GRU(64, 64, device="cuda"), torch.randn(20, 16, 64, device="cuda")
reference = torch.nn.GRU(64, 64, device="cuda")
reference.load_state_dict(layer.state_dict())
graph = torch.cuda.CUDAGraph()
with torch.no_grad():
    expected, _ = reference(x)
    with torch.cuda.graph(graph):
        captured, _ = layer(x)
graph.replay()
torch.testing.assert_close(captured, expected, rtol=0, atol=1e-3)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["1", "2", "1, bidirectional=True"])
def test_captured_gradients_may_be_the_first_products_of_cublas(options):
    """Launched, they are one kernel of ours at this size, so that the thread of gradients has no handle of cuBLAS."""
    code = f"""
import torch, ostinato
torch.backends.cudnn.allow_tf32 = False
layer, x = ostinato.GRU(80, 80, {options}, device="cuda"), torch.randn(269, 22, 80, device="cuda", requires_grad=True)
leaves = x, *layer.parameters()

def train():
    for leaf in leaves:
        leaf.grad = None
    layer(x)[0].square().mean().backward()

train()
expected = [leaf.grad.clone() for leaf in leaves]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    train()
for leaf in leaves:
    leaf.grad.fill_(float("nan"))
graph.replay()
for leaf, grad in zip(leaves, expected):
    assert (leaf.grad - grad).norm() <= 1e-5 * grad.norm()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"num_layers": 2}, {"bidirectional": True}], ids=str)
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_trains_the_same_where_the_compiler_replays_cuda_graphs(kind, options, fresh_compiler):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    eager = getattr(ostinato, kind)(48, 64, **options, device="cuda")
    compiled = copy.deepcopy(eager)
    compiled.compile(mode="reduce-overhead")
    for _ in range(4):  # of which the third is the first replayed
        x, results = torch.randn(16, 8, 48, device="cuda"), []
        for layer in (eager, compiled):
            with torch._dynamo.config.patch(allow_rnn=True):
                output, *last = flat(layer(x))
                grads = torch.autograd.grad(output.square().mean() + last[0].sum(), layer.parameters())
                results.append([output.clone(), *(state.clone() for state in last), *(grad.clone() for grad in grads)])
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
