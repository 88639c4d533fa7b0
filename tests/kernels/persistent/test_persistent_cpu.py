"""The CPU's loops of recurrent layers against the loop over time that defines them, in float64."""

import itertools
import math

import pytest
import torch

import ostinato
from comparisons import assert_all_close, assert_close, same_bits
from ostinato.kernels.cpu import threads as kernel_threads
from ostinato.kernels.cpu.intrinsics import NUMPY_DTYPES
from ostinato.kernels.persistent import backends, cpu, reference
from ostinato.kernels.persistent.arguments import Layer, Saved
from ostinato.kernels.persistent.cpu import passes, products
from ostinato.kernels.persistent.cpu import plan as cpu_plan
from ostinato.kernels.persistent.plan import GATES, Call, Plan
from ostinato.kernels.persistent.sequences import Sequences
from persistent_geometries import random_mask

F32, F64 = torch.float32, torch.float64
DENSE = Plan("dense", reason="a test")
TOLERANCE = {F32: 5e-6, F64: 1e-12}
# cell, dtype, block (None: dense), density, B, H.  A loop is of a cell, a dtype, a kind of products and a tile, and the
# same in other tests: in float32, what cells and products have of their own, not each with each.
LAYERS = [
    ("rnn_tanh", F32, None, 1, 1, 37),
    ("rnn_tanh", F64, None, 1, 5, 130),
    ("rnn_relu", F64, None, 1, 3, 16),
    ("gru", F64, None, 1, 1, 130),
    ("gru", F64, None, 1, 3, 3),
    ("gru", F32, None, 1, 6, 64),
    ("gru", F64, None, 1, 19, 37),
    ("gru", F64, None, 1, 2, 1),
    ("lstm", F64, None, 1, 1, 16),
    ("lstm", F32, None, 1, 17, 70),
    ("rnn_relu", F64, (16, 1), 0.3, 2, 48),
    ("rnn_relu", F64, (1, 1), 0.2, 2, 21),
    ("gru", F64, (16, 1), 0.3, 1, 64),
    ("gru", F32, (16, 1), 0.3, 9, 37),
    ("gru", F64, (8, 4), 0.3, 11, 40),
    ("gru", F64, (1, 1), 0.2, 1, 50),
    ("lstm", F32, (8, 4), 0.3, 2, 24),
    ("lstm", F64, (16, 1), 0.2, 10, 32),
    ("lstm", F64, (1, 1), 0.05, 8, 35),
]


def random_layer(cell, block, density, batch, hidden, steps, packed, diagonal=False, resets=False, reverse=False):
    """Arguments of the reference's forward, a layer and its projected input, in float64."""
    gates, offsets, rows = GATES[cell], None, batch * steps
    if packed:
        lengths = torch.randint(1, steps + 1, (batch,)).sort(descending=True)[0]
        lengths[0] = steps
        sizes = (lengths[None] > torch.arange(steps)[:, None]).sum(1)
        offsets = torch.tensor([0, *sizes.cumsum(0).tolist()], dtype=torch.int32)
        rows = int(offsets[-1])
    weight, mask = torch.randn(gates * hidden, hidden, dtype=F64) / hidden**0.5, None
    if block is not None:
        mask = random_mask(cell, hidden, density, block)
        if diagonal:
            mask |= torch.eye(hidden, dtype=torch.bool).repeat(gates, 1)
        weight *= mask
    h0 = torch.randn(batch, hidden, dtype=F64)
    c0 = torch.randn(batch, hidden, dtype=F64) if cell == "lstm" else None
    projected, bias = torch.randn(rows, gates * hidden, dtype=F64), torch.randn(gates * hidden, dtype=F64)
    begins = torch.rand(rows) < 0.3 if resets else None
    return Layer(cell, weight, bias, mask, h0, c0, Sequences(batch, offsets, begins, reverse)), projected


def plan_of(block):
    return DENSE if block is None else Plan("sparse" if block == (1, 1) else "block", reason="a test", geometry=block)


def to(dtype, tensors):
    return [x.to(dtype, copy=True) if getattr(x, "dtype", None) == F64 else x for x in tensors]


def run(layer, projected, grads, plan, dtype=F64, kernels=cpu):
    """What forward and backward return, the backward as the operator calls it after a forward of the reference."""
    own, cell, hidden = Layer(*to(dtype, layer)), layer.cell, layer.weight_hh.shape[1]
    given = projected.to(dtype, copy=True)
    forward = kernels.forward(own, given, plan, True)
    h, _, _, c = reference.forward(layer, projected, None, True)
    h_prev, weight, bias = reference.previous(h, layer.h0, layer.sequences), layer.weight_hh, layer.bias_hh
    arguments, candidate = projected + h_prev @ weight.T + bias, None
    if cell == "gru":
        arguments[:, 2 * hidden :] = projected[:, 2 * hidden :]
        candidate = h_prev @ weight[2 * hidden :].T + bias[2 * hidden :]
    saved = Saved(*to(dtype, [h if cell.startswith("rnn") else arguments, candidate, h, c]))
    gradients = kernels.backward(own, saved, to(dtype, grads), plan)
    kept = [given, forward[3]] if kernels is cpu else [arguments, candidate if cell == "gru" else c]
    return *forward[:3], *([] if cell.startswith("rnn") else kept), *gradients


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("cell", "dtype", "block", "density", "batch", "hidden"), LAYERS)
def test_layers_equal_the_loop_over_time(cell, dtype, block, density, batch, hidden, packed):
    torch.manual_seed(0)
    for steps, some, reverse in ((1, True, False), (13, True, True), (6, False, False)):
        special = {"diagonal": steps == 13, "resets": steps != 13, "reverse": reverse}
        layer, projected = random_layer(cell, block, density, batch, hidden, steps, packed, **special)
        grads = [torch.randn(len(projected), hidden, dtype=F64), *torch.randn(2, batch, hidden, dtype=F64)]
        if cell != "lstm":
            grads[2] = None
        if not some:
            layer, grads = layer._replace(h0=None, c0=None), [None, grads[1], None]
        expected = run(layer, projected, grads, DENSE, kernels=reference)
        found = run(layer, projected, grads, plan_of(block), dtype)
        assert_all_close(found, to(dtype, expected), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("cell", "block", "batch"),  # who computes what depends on the batch, and on whether the layer is dense
    [
        *(("gru", block, batch) for block in (None, (16, 1)) for batch in (1, 5)),
        *(("gru", None, 16), ("lstm", (16, 1), 10), ("lstm", None, 1), ("gru", (8, 4), 11), ("gru", (1, 1), 5)),
    ],
)
def test_results_do_not_depend_on_the_number_of_threads(monkeypatch, cell, block, batch):
    """Sequences are shared out to them, or, if these are fewer or the dense layer is large, units."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernel_threads, "PARALLEL", 0)
    monkeypatch.setattr(passes, "PART", 1)
    for hidden, steps, reverse in ((48, 20, True), (37, 9, False)):
        given = random_layer(cell, block, 0.3, batch, hidden, steps, reverse, resets=not reverse, reverse=reverse)
        grads = [torch.randn(len(given[1]), hidden, dtype=F64), *torch.randn(2, batch, hidden, dtype=F64)]
        results = []
        for threads, large in itertools.product((1, 2, 3, 7), (0, passes.BEYOND_CACHE)):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)  # not those of torch's sums
            monkeypatch.setattr(passes, "BEYOND_CACHE", large)
            results.append(run(*given, grads, plan_of(block)))
        for other in results[1:]:
            assert same_bits(results[0], other)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_tiles_fit_the_sequences_of_a_thread(monkeypatch, cell):
    """Products of each tile, with sequences in every place of it and in several tiles, equal the loop over time."""
    of_nine = 5 if cell == "gru" or products.FEW_REGISTERS else 3  # by how many rows fill whole panels
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    tiles = []
    for batch in (1, 2, 3, 4, 5, 6, 7, 9, 12, 16):
        layer, projected = random_layer(cell, None, 1.0, batch, 80, 4, False)
        grads = [torch.randn(len(projected), 80, dtype=F64), *torch.randn(2, batch, 80, dtype=F64)]
        tiles.append(passes._share(layer.weight_hh, batch, 4, DENSE).tile)
        expected = run(layer, projected, grads, DENSE, kernels=reference)
        assert_all_close(run(layer, projected, grads, DENSE, F32), to(F32, expected), TOLERANCE[F32])
    assert tiles == [1, 2, 3, 4, 5, 6, 8, of_nine, 6, 8]


@pytest.mark.parametrize(
    ("hidden", "batch", "parts"), [(256, 1, 2), (256, 2, 1), (512, 2, 2), (512, 16, 2), (512, 17, 1)]
)
def test_threads_divide_units_of_few_sequences_whose_weights_no_cache_holds(monkeypatch, hidden, batch, parts):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert passes._share(torch.empty(3 * hidden, hidden), batch, 1000, DENSE).parts == parts


@pytest.mark.parametrize(
    ("cell", "hidden", "block", "batch", "training", "steps"),
    [
        *(("LSTM", 1024, (16, 1), 8, training, 4) for training in (False, True)),
        *(("LSTM", 256, (16, 1), 1, training, 32 >> training) for training in (False, True)),
        *(("GRU", 512, (8, 4), 2, training, 16 >> training) for training in (False, True)),
        *(("RNN", 512, (1, 1), 1, training, 24 >> training) for training in (False, True)),
    ],
)
def test_pruned_layers_are_read_in_entries_from_few_steps_on(cell, hidden, block, batch, training, steps):
    layer = ostinato.prune(getattr(ostinato, cell)(hidden, hidden), 0.1, block=block)
    if training and block == (1, 1):  # dense loops are faster with more
        layer = ostinato.prune(layer, 0.04, block=block)
        steps = round(steps * 0.7)
    before, after = (layer.plan(batch, steps=n, training=training) for n in (steps - 1, steps))
    assert (before.path, after.path) == ("steps", "sparse" if block == (1, 1) else "block")


@pytest.mark.parametrize(
    ("intel", "cell", "hidden", "one_by_one", "few"),
    [
        *((False, "gru", 256, 23, 24), (False, "gru", 512, 39, 40), (False, "rnn_tanh", 1024, 87, 88)),
        *((True, "gru", 256, 37, 38), (True, "gru", 512, 0, 64), (True, "rnn_tanh", 1024, 0, 140)),
    ],
)
def test_what_few_steps_of_a_dense_layer_are_depends_on_the_processor(
    monkeypatch, intel, cell, hidden, one_by_one, few
):
    monkeypatch.setattr(cpu_plan, "INTEL", intel)
    assert cpu_plan.most_single_steps(cell, hidden, 1, torch.float32) == one_by_one
    call = Call(torch.device("cpu"), cell, hidden, 1, torch.float32, False, None, compared=True)
    plans = [cpu_plan.make_plan(call._replace(steps=steps), None, None) for steps in (2, few - 1, few)]
    assert [plan.has_kernel for plan in plans] == [one_by_one > 0, one_by_one > 0, True]
    assert [plan.reason.startswith("each of") for plan in plans] == [one_by_one > 0, one_by_one > 0, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("block", [(16, 1), (8, 4), (1, 1)])
@pytest.mark.parametrize("where", ["state", "input", "gradient"])
def test_what_is_not_finite_spreads_as_in_a_dense_layer(block, bad, where):
    torch.manual_seed(0)
    layer, projected = random_layer("rnn_relu", block, 0.3, 2, 16, 5, packed=False)
    grads = [torch.randn(10, 16, dtype=F64), None, None]
    clean = run(layer, projected, grads, plan_of(block))
    {"state": layer.h0, "input": projected, "gradient": grads[0]}[where][1, 3:9] = bad
    got, expected = (run(layer, projected, grads, plan) for plan in (plan_of(block), DENSE))
    assert not all(x is None or x.isfinite().all() for x in expected)
    for x, y, z in zip(got, expected, clean, strict=True):
        if x is not None:
            torch.testing.assert_close(x, y, equal_nan=True, rtol=1e-11, atol=1e-11)
            torch.testing.assert_close(x[::2], z[::2], rtol=1e-11, atol=1e-11)  # the other sequence


def test_what_a_pruned_forward_has_overwritten_is_there_for_the_dense_one():
    torch.manual_seed(0)
    layer, given = random_layer("gru", (16, 1), 0.3, 2, 16, 5, packed=False)
    given[7, 40] = math.nan  # at the fourth step
    results = []
    for plan in (plan_of((16, 1)), DENSE):
        projected = given.clone()
        results.append((*cpu.forward(layer, projected, plan, True), projected))
    assert results[0][0].isnan().any()
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("block", [(16, 1), (1, 1)])
def test_weights_and_masks_are_those_of_the_call(monkeypatch, block):
    monkeypatch.setattr("ostinato.kernels.persistent.cpu.plan.FEW_STEPS", dict.fromkeys(GATES, -100))
    backends._plan_dense.cache_clear()
    torch.manual_seed(0)
    layer = ostinato.prune(ostinato.GRU(5, 32, dtype=F64), 0.1, block=block)
    x = torch.randn(9, 1, 5, dtype=F64)
    assert layer.plan(1).path == ("sparse" if block == (1, 1) else "block")
    for change in (
        lambda: layer.weight_hh_l0.data.mul_(2),
        lambda: layer.weight_hh_l0.detach().numpy().__imul__(0.7),
        lambda: layer.mask_hh_l0.logical_and_(torch.rand(96, 32) < 0.5),
    ):
        with torch.no_grad():
            before = layer(x)[0]
            change()
            got = layer(x)[0]
            other = torch.nn.GRU(5, 32, dtype=F64)
            other.load_state_dict({k: v for k, v in layer.state_dict().items() if "mask" not in k})
            other.weight_hh_l0 *= layer.mask_hh_l0
            assert_close(got, other(x)[0], 1e-12)
            assert (got - before).abs().max() > 1e-6
    backends._plan_dense.cache_clear()


PLANS = {  # cell, H, B, dtype, training, steps
    ("gru", 256, 1, F32, False, 1000): "dense",
    ("gru", 256, 16, F32, True, None): "dense",
    ("gru", 1024, 16, F32, True, 200): "dense",
    ("gru", 1024, 1, F32, False, 200): "dense",
    ("gru", 1024, 1, F32, False, 50): "dense",
    ("gru", 64, 1, F32, False, 1): "dense",
    ("lstm", 64, 256, F32, True, 1): "dense",
    ("gru", 64, 257, F32, False, 1): "steps",
    ("gru", 64, 16, F64, False, 1): "dense",
    ("gru", 64, 17, F64, False, 1): "steps",
    ("gru", 64, 1, torch.float16, False, 1): "steps",
    ("gru", 64, 1, F32, False, 11): "dense",
    ("gru", 64, 257, F32, False, 11): "steps",
    ("gru", 64, 1, F32, True, 5): "steps",
    ("gru", 64, 1, F32, True, 11): "dense",
    ("lstm", 64, 8, F32, False, 6): "dense",
    ("lstm", 64, 9, F32, False, 6): "steps",
    ("rnn_relu", 256, 1, F32, False, 4): "dense",
    ("rnn_relu", 256, 1, F32, False, 5): "steps",
    ("rnn_tanh", 512, 1, F32, False, 55): "dense",
    ("rnn_tanh", 256, 3, F32, False, 15): "steps",
    ("rnn_tanh", 256, 3, F32, False, 16): "dense",
    ("gru", 64, 1, F32, False, 12): "dense",
    ("lstm", 256, 1, F32, True, 1000): "dense",
    ("lstm", 256, 1, F32, False, 371): "steps",
    ("lstm", 256, 4, F32, False, 372): "dense",
    ("lstm", 256, 9, F32, False, 1000): "steps",
    ("lstm", 256, 1, F32, False, 372): "dense",
    ("lstm", 128, 1, F32, False, 1000): "steps",
    ("lstm", 64, 1, F32, False, 17): "steps",
    ("lstm", 64, 1, F32, False, 18): "dense",
    ("lstm", 32, 15, F32, False, 20): "dense",
    ("lstm", 40, 15, F32, False, 1000): "steps",
    ("lstm", 80, 32, F32, False, 32): "dense",
    ("lstm", 88, 32, F32, False, 1000): "steps",
    ("lstm", 16, 33, F32, False, 1000): "steps",
    ("lstm", 128, 4, F32, True, 455): "steps",
    ("lstm", 128, 4, F32, True, 456): "dense",
    ("lstm", 132, 4, F32, True, 1000): "steps",
    ("lstm", 256, 2, F32, True, 1000): "steps",
    ("lstm", 512, 1, F32, True, 1000): "steps",
    ("lstm", 256, 16, F32, False, 200): "steps",
    ("lstm", 256, 16, F32, True, 200): "dense",
    ("lstm", 256, 8, F32, True, 64): "steps",
    ("gru", 512, 4, F32, True, 9): "steps",
    ("gru", 512, 4, F32, True, 10): "dense",
    ("rnn_tanh", 128, 1, F32, True, 10): "steps",
    ("rnn_tanh", 128, 1, F32, True, 11): "dense",
    ("gru", 512, 4, F32, True, 200): "dense",
    ("gru", 512, 4, F32, False, 200): "dense",
    ("lstm", 256, 1, F64, False, 1000): "dense",
    ("gru", 64, 1, torch.bfloat16, False, 100): "steps",
}


@pytest.mark.parametrize(
    ("intel", "cell", "hidden", "training", "few"),
    [
        *((False, "lstm", 512, training, 9 if training else 12) for training in (False, True)),
        *((False, "gru", 64, False, 8), (False, "rnn_tanh", 256, False, 16), (False, "rnn_tanh", 256, True, 10)),
        *((True, "lstm", 512, False, 64), (True, "gru", 512, False, 64), (True, "lstm", 512, True, 10)),
    ],
)
def test_sequences_of_several_lengths_run_in_loops_from_few_steps_on(monkeypatch, intel, cell, hidden, training, few):
    """Whose steps torch takes one by one, those of an LSTM, too."""
    monkeypatch.setattr(cpu_plan, "INTEL", intel)
    call = Call(torch.device("cpu"), cell, hidden, 4, F32, training, None, packed=True, compared=True)
    before, after = (cpu.make_plan(call._replace(steps=steps), None, None) for steps in (few - 1, few))
    assert (before.path, after.path) == ("steps", "dense")
    assert before.reason == f"weights are worth preparing for {few} steps or more"


def test_one_thread_leaves_small_lstms_to_onednn(monkeypatch):
    """Whatever was planned, or called, with another number of threads."""
    layer, x, ours = ostinato.LSTM(5, 64), torch.randn(1000, 1, 5), []
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *args: ours.append(args) or forward(*args))
    for threads in (1, 2, 1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        ours.clear()
        with torch.no_grad():
            layer(x)
        assert (len(ours) > 0) == layer.plan(1, steps=1000).has_kernel == (threads > 1)


@pytest.mark.parametrize(
    ("hidden", "proj_size", "batch", "inference", "training"),  # measured: torch's time over ours
    [
        (64, 16, 1, True, True),  # 2.7, 8.2
        (256, 64, 1, False, True),  # 1.0, 2.6
        (512, 64, 1, False, True),  # .7, 1.7
        (256, 192, 64, False, False),  # .8, .8
        (512, 128, 16, False, False),  # .5, .5
        (2048, 640, 1, False, False),  # .2, .4
    ],
)
def test_projections_that_save_much_are_left_to_torch(hidden, proj_size, batch, inference, training):
    for trained, ours in ((False, inference), (True, training)):
        call = Call(torch.device("cpu"), "lstm", hidden, batch, F32, trained, 100, compared=True, proj_size=proj_size)
        plan = cpu.make_plan(call, None, None)
        assert plan.has_kernel == ours
        assert ours or plan.reason.startswith("the projections save")
        assert cpu.make_plan(call._replace(resets=True), None, None).has_kernel


def test_plans(monkeypatch):
    monkeypatch.setattr(cpu_plan, "INTEL", False)
    for (cell, hidden, batch, dtype, training, steps), path in PLANS.items():
        call = Call(torch.device("cpu"), cell, hidden, batch, dtype, training, steps, compared=True, threads=2)
        plan = cpu.make_plan(call, None, None)
        assert plan.path == path, plan
        assert plan.reason
    mask = random_mask("gru", 64, 0.1, (16, 1))
    call = Call(torch.device("cpu"), "gru", 64, 4, F32, training=True, steps=100, compared=True)
    assert cpu.make_plan(call, mask, (16, 1))[::5] == ("block", (16, 1))
    assert cpu.make_plan(call, mask, (1, 1)).path == "dense"
    step = call._replace(training=False, steps=1)  # of 4 sequences
    for block, density, path in (((16, 1), 0.1, "block"), ((16, 1), 0.2, "dense"), ((1, 1), 0.05, "sparse")):
        assert cpu.make_plan(step, random_mask("gru", 64, density, block), block).path == path
    assert cpu.make_plan(step, random_mask("gru", 64, 0.1, (1, 1)), (1, 1)).path == "dense"
    assert cpu.make_plan(step._replace(training=True), mask, (16, 1)).path == "steps"
    assert cpu.make_plan(step._replace(batch=1), random_mask("gru", 64, 0.23, (1, 1)), (1, 1)).path == "sparse"
    assert cpu.make_plan(call._replace(steps=1, path="sparse"), mask, (1, 1))[::5] == ("sparse", (1, 1))
    assert cpu.make_plan(call._replace(steps=1, path="dense"), mask, (1, 1)).path == "dense"
    assert cpu.make_plan(call, torch.ones_like(mask), (16, 1)).path == "dense"
    with pytest.raises(ValueError, match="path must be 'dense' or 'sparse'; got 'block'"):
        cpu.make_plan(call._replace(path="block"), mask, (1, 1))


def test_tiles_fill_the_registers():
    for tile, dtype in itertools.product(products.TILES, (F32, F64)):
        assert products.panel_rows(NUMPY_DTYPES[dtype], tile) * dtype.itemsize % 64 == 0
        assert 1 <= products.vectors_of(tile) * tile <= 16
