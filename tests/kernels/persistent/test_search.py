"""Which layers the persistent kernels compute, and by which geometry."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from gpus import H100
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.persistent import backends
from ostinato.kernels.persistent.cuda import launch as cuda_launch
from ostinato.kernels.persistent.cuda import plan as cuda_plan
from ostinato.kernels.persistent.cuda import wavefront
from ostinato.kernels.persistent.cuda.heuristics import cudnn, geometry, search
from ostinato.kernels.persistent.cuda.heuristics.cells import CELLS
from ostinato.kernels.persistent.cuda.heuristics.costs import microseconds
from ostinato.kernels.persistent.cuda.heuristics.cudnn_costs import torchs_microseconds
from ostinato.kernels.persistent.cuda.heuristics.fitting import fill_registers
from ostinato.kernels.persistent.cuda.source import code, macros
from ostinato.kernels.persistent.plan import GATES, Call
from persistent_geometries import candidates

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def planned_for_an_h100(monkeypatch):
    """As if there were one, with all kernels compiled."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H100)
    monkeypatch.setattr(cuda_launch, "kernels", lambda *_, **__: None)
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(
        cuda_plan, "compile_kernels", cuda_launch.compile_kernels.__wrapped__
    )  # which kernels() replaces
    for cached in (cuda_plan._plan_of_share, backends._plan_dense, wavefront.chunks):
        cached.cache_clear()
    yield
    for cached in (cuda_plan._plan_of_share, backends._plan_dense, wavefront.chunks):
        cached.cache_clear()


def plan_of(cell, hidden, batch, dtype, tf32=False, training=True):
    call = Call(torch.device("cuda", 0), cell, hidden, batch, dtype, training, steps=None, compared=True)
    return cuda_plan.make_plan(call, None, None, tf32)


@pytest.mark.parametrize(
    ("layer", "tf32", "ours"),  # measured on an H200, microseconds a step with all products, ours and cuDNN's
    [
        (("gru", 1024, 16, bf16), False, True),  # 4.0, 16.6
        (("gru", 512, 256, bf16), False, True),  # 14.7, 21.7
        (("lstm", 512, 256, bf16), False, True),  # 18.1, 19.8
        (("gru", 1024, 256, bf16), False, True),  # 28.8, 34.0
        (("lstm", 1024, 256, bf16), False, True),  # 36.2, 37.5
        (("lstm", 2048, 64, bf16), False, True),  # 23.9, 39.6
        (("lstm", 2048, 128, bf16), False, True),  # 45.5, 54.1
        (("gru", 512, 256, f32), True, True),  # 23.0, 45.6
        (("gru", 512, 256, f32), False, True),  # 63.3, 95.2
        (("gru", 2048, 4, f32), True, True),  # 10.2, 49.8: a part of the weights comes from L2
        (("gru", 1024, 256, f32), True, True),  # 54.8, 68.1
        (("lstm", 1024, 256, f32), True, True),  # 77.6, 87.3
        (("gru", 128, 1, f32), True, True),  # 1.26, 1.57: cuDNN's kernel for small layers
        (("gru", 128, 16, f32), True, True),  # 1.40, 2.19
        (("lstm", 1879, 85, f16), False, True),  # 56.3, 211.7: rows do not begin at multiples of 16 bytes
        (("gru", 1700, 128, bf16), False, True),  # 49.4, 123.5
    ],
)
def test_a_layer_is_left_to_torch_where_that_is_faster(planned_for_an_h100, layer, tf32, ours):
    assert plan_of(*layer, tf32).has_kernel == ours


SMALL = "gru", 64, 16, f16, 20  # whose launches take the host longer than cuDNN the GPU


@pytest.mark.parametrize(
    ("layer", "others", "ours"),  # measured without gradients on an H200, microseconds a step, ours and cuDNN's
    [
        (("rnn_tanh", 96, 512, f32, 400), {}, False),  # 1.20, .71
        (("rnn_tanh", 384, 64, f32, 400), {}, True),  # 1.22, 16.8: not in registers
        (("gru", 16, 4, f32, 400), {}, False),  # .43, .34
        (("gru", 64, 512, f32, 400), {}, True),  # 1.29, 1.63: not all at once
        (("gru", 96, 132, f32, 400), {}, False),  # .97, .79
        (("gru", 96, 264, f32, 400), {}, True),  # 1.32, 1.58
        (("lstm", 64, 200, f32, 400), {}, False),  # 1.01, .63
        (("lstm", 128, 4, f32, 400), {}, True),  # .55, 1.72
        (("lstm", 64, 100, f16, 400), {}, False),  # .57, .46
        (("lstm", 64, 64, f16, 400), {}, True),  # .48, 1.03: on tensor cores
        (("lstm", 48, 96, f16, 400), {}, True),  # wrong
        (("lstm", 48, 100, f16, 400), {}, False),
        (("lstm", 32, 64, f32, 400), {"at_once": 2}, True),  # .59, .66
        (("lstm", 64, 200, f32, None), {}, False),
        (("lstm", 32, 4, f32, 400), {"training": True}, True),
        (("lstm", 64, 200, f32, 400), {"resets": True}, True),
        (("lstm", 64, 200, f32, 400), {"packed": True}, True),
        (("lstm", 64, 200, f32, 400), {"proj_size": 32}, True),  # cuDNN launches every step
        (("lstm", 64, 200, f32, 400), {"path": "dense"}, True),
        (("lstm", 64, 200, f32, 400), {"compared": False}, True),
        (SMALL, {}, True),  # 22 microseconds a call, 39
        (SMALL, {"captured": False}, False),  # 150, 110
        (SMALL, {"captured": False, "replayed": True}, True),
        (SMALL, {"captured": False, "steps": 3}, False),
        (SMALL, {"captured": False, "steps": 3, "replayed": True}, True),
        (("rnn_tanh", 96, 512, f32, 40), {"replayed": True}, True),  # 48, 28: both less than the host
        (("rnn_tanh", 96, 512, f32, 40), {}, False),
        (("rnn_tanh", 96, 512, f32, 400), {"replayed": True}, False),
        (SMALL, {"captured": False, "steps": 200}, True),
        (SMALL, {"captured": False, "dtype": bf16}, True),  # of which cuDNN launches every step
        (SMALL, {"captured": False, "hidden_size": 256}, True),
        (SMALL, {"captured": False, "training": True}, True),
    ],
)
def test_a_small_layer_is_left_to_torch_where_that_is_faster(planned_for_an_h100, layer, others, ours):
    *sizes, steps = layer
    call = Call(torch.device("cuda", 0), *sizes, False, steps, compared=True, captured=True)._replace(**others)
    plan = cuda_plan.make_plan(call, None, None, True)
    assert plan.has_kernel == ours, plan.reason


def test_plans_of_pruned_layers_are_the_same_in_a_cuda_graph(planned_for_an_h100):
    """Where masks cannot be packed: launches do not count."""
    call = Call(torch.device("cuda", 0), "gru", 64, 16, f16, False, 20, compared=True)
    mask = torch.ones(192, 64, dtype=torch.bool)
    assert not cuda_plan.make_plan(call, None, None).has_kernel
    assert cuda_plan.make_plan(call, mask, (16, 1)).has_kernel


@pytest.mark.parametrize(
    ("layer", "blocks", "distributed"),  # the fastest measured on an H200
    [
        (("gru", 256, 1, f16), 16, True),
        (("gru", 128, 16, f16), 4, True),
        (("rnn_tanh", 512, 1, f16), 16, True),
        (("gru", 512, 64, f16), 16, False),  # as many products within clusters take longer than the exchange
        (("gru", 1024, 1, f16), 64, False),  # of 128, all would read the same few lines
        (("gru", 1024, 4, f16), 64, False),
    ],
)
def test_blocks_of_small_layers_form_clusters(layer, blocks, distributed):
    chosen = search.choose_geometry(*layer, None, None, H100).geometry
    assert (chosen.blocks, chosen.distributed) == (blocks, distributed)


@pytest.mark.parametrize(
    ("layer", "exact", "blocks", "scatters"),  # the fastest measured on an H200
    [
        (("gru", 128, 1, f32), True, 4, True),
        (("gru", 128, 64, f32), True, 2, True),  # exact products of several sequences take longer
        (("lstm", 128, 16, f16), True, 4, True),
        (("gru", 256, 4, f16), True, 8, True),
        (("rnn_tanh", 256, 16, f16), True, 4, True),
        (("gru", 256, 16, f32), False, 8, True),
        (("gru", 256, 64, f16), True, 8, False),  # no cluster has registers for the weights of so many units
        (("gru", 512, 16, f16), True, 32, False),
    ],
)
def test_gradients_of_small_layers_are_reduced_within_clusters(layer, exact, blocks, scatters):
    chosen = search.choose_geometry(*layer, None, None, H100, backward=True, exact=exact).geometry
    assert (chosen.blocks, chosen.scatters) == (blocks, scatters)


@pytest.mark.parametrize(
    ("layer", "exact", "block_groups"),  # forward and backward, the faster as measured on an H200
    [
        (("gru", 2048, 16, bf16), True, (2, 2)),
        (("lstm", 2048, 16, bf16), True, (2, 2)),
        (("gru", 2048, 64, bf16), True, (2, 2)),
        (("gru", 1024, 64, bf16), True, (2, 2)),
        (("lstm", 1024, 64, bf16), True, (2, 2)),
        (("gru", 512, 256, bf16), True, (2, 2)),
        (("gru", 1536, 16, f32), False, (2, 2)),
        (("gru", 1024, 64, f32), False, (2, 2)),
        (("lstm", 1024, 64, f32), False, (2, 2)),
        (("lstm", 1024, 64, f32), True, (1, 1)),
        (("gru", 2048, 16, f32), False, (1, 1)),  # weights from L2 would be read twice
        (("gru", 1024, 16, bf16), True, (1, 1)),  # too few products to hide an exchange behind
        (("lstm", 1024, 16, bf16), True, (1, 1)),  # both groups find multiprocessors of their own
        (("lstm", 1024, 8, bf16), True, (1, 1)),
        (("lstm", 512, 64, bf16), True, (2, 1)),
        (("lstm", 2048, 8, bf16), True, (1, 1)),
        (("rnn_tanh", 2048, 16, bf16), True, (1, 1)),
        (("gru", 2048, 4, bf16), True, (1, 1)),
        (("gru", 2000, 64, bf16), True, (2, 2)),  # padded to whole copies, as those that follow
        (("gru", 1900, 20, bf16), True, (2, 2)),
        (("lstm", 1500, 32, bf16), True, (2, 2)),
        (("lstm", 500, 64, f32), False, (2, 2)),
        (("lstm", 1333, 40, f16), True, (1, 1)),  # would be padded to 1536
    ],
)
def test_blocks_take_two_groups_in_turn(layer, exact, block_groups):
    def choose(properties, backward):
        found = search.choose_geometry(*layer, None, None, properties, backward=backward, exact=exact)
        return found.geometry

    chosen = [choose(H100, backward) for backward in (False, True)]
    assert tuple(g.block_groups for g in chosen) == block_groups
    assert all(g.columns % 8 == 0 for g in chosen if g.block_groups > 1)
    before = SimpleNamespace(**{**vars(H100), "major": 8})  # without bulk copies
    assert choose(before, False).block_groups == 1


@pytest.mark.parametrize(
    ("layer", "parts"),  # of the columns, forward and backward, the faster as measured on an H200
    [
        (("lstm", 1024, 64, bf16), (4, 8)),
        (("gru", 512, 256, bf16), (4, 8)),
        (("lstm", 2048, 16, bf16), (8, 8)),  # reading the state twice would take longer than half of the sums
        (("gru", 2048, 64, bf16), (8, 8)),
    ],
)
def test_warps_share_columns_where_the_state_is_short_beside_the_rows(layer, parts):
    chosen = [search.choose_geometry(*layer, None, None, H100, backward=b).geometry for b in (False, True)]
    assert tuple(g.column_parts for g in chosen) == parts
    assert all(g.block_groups == 2 and g.tiles * 8 == g.row_tiles * g.slice * 2 // 32 for g in chosen)  # of eight warps


@pytest.mark.parametrize(
    ("layer", "columns"),  # sequences of a group, forward and backward, the faster as measured on an H200
    [
        (("lstm", 2048, 64, bf16), (32, 32)),
        (("lstm", 2048, 128, f16), (64, 64)),
        (("lstm", 2048, 100, bf16), (64, 64)),
        (("lstm", 2000, 64, bf16), (32, 32)),
        (("lstm", 1500, 100, f16), (64, 64)),
        (("lstm", 1922, 50, f16), (32, 32)),
        (("lstm", 2048, 16, bf16), (None, None)),
        (("lstm", 2048, 64, f32), (None, None)),
        (("lstm", 2049, 64, bf16), (None, None)),
        (("gru", 2048, 64, bf16), (None, None)),
    ],
)
def test_wide_batches_are_multiplied_by_warpgroups(layer, columns):
    before, after = (SimpleNamespace(**{**vars(H100), "major": major}) for major in (8, 10))
    for backward, of_group in zip((False, True), columns, strict=True):
        plan = search.choose_geometry(*layer, None, None, H100, backward=backward)
        assert (plan.geometry.columns if plan.geometry.wide else None) == of_group
        assert ("multiplied by warpgroups" in plan.reason) == (of_group is not None)
        for other in (before, after):
            plan = search.choose_geometry(*layer, None, None, other, backward=backward)
            assert "warpgroups" not in plan.reason


@pytest.mark.parametrize(
    ("layer", "block", "path"),  # the faster as measured on an H200, masks applied
    [
        (("gru", 256, 1, f16), (16, 1), "dense"),
        (("gru", 384, 1, f16), (16, 1), "dense"),
        (("gru", 896, 1, f16), (16, 1), "dense"),
        (("lstm", 1024, 8, f16), (16, 1), "block"),
        (("gru", 2304, 4, f16), (16, 1), "block"),
        (("gru", 2304, 4, f16), (8, 4), "block"),
        (("gru", 2304, 4, f16), (1, 1), "dense"),
    ],
)
def test_a_pruned_layer_takes_tensor_cores_where_that_is_faster(layer, block, path):
    cell, hidden_size = layer[:2]
    kept = GATES[cell] * hidden_size**2 // 10
    assert search.choose_geometry(*layer, kept, block, H100).path == path


def test_blocks_form_no_clusters_where_the_device_cannot_hold_them(planned_for_an_h100, monkeypatch):
    assert plan_of("gru", 256, 4, bf16, training=False).geometry.forward.distributed

    def kernels(geometry, *_, **__):
        if geometry.distributed:
            raise MemoryError("needs 64 resident blocks; the device holds 48")

    monkeypatch.setattr(cuda_launch, "kernels", kernels)
    plan = plan_of("gru", 256, 4, bf16, training=False)
    assert plan.path == "dense"
    assert not plan.geometry.forward.distributed


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_only_the_kernels_that_a_call_launches_are_compiled(planned_for_an_h100, monkeypatch, packed, resets):
    asked = []
    monkeypatch.setattr(
        cuda_launch, "kernels", lambda geometry, device, *special: asked.append((geometry.backward, *special))
    )
    call = Call(torch.device("cuda", 0), "gru", 256, 4, bf16, True, steps=None, resets=resets, packed=packed)
    assert cuda_plan.make_plan(call, None, None).path == "dense"
    assert sorted(asked) == [(False, resets, packed, True, 1), (True, resets, packed, False, 1)]


def test_both_directions_are_one_launch_where_they_fit_at_once(planned_for_an_h100, monkeypatch):
    asked = []

    def kernels(geometry, device, resets, packed, keeps, directions):
        asked.append(directions)
        if geometry.hidden_size == 512 and directions == 2:
            raise MemoryError("needs 128 resident blocks; the device holds 120")

    monkeypatch.setattr(cuda_launch, "kernels", kernels)

    def directions(hidden_size, mask=None, **of_call):
        asked.clear()
        both = {"at_once": 2, "bidirectional": True} | of_call
        call = Call(torch.device("cuda", 0), "gru", hidden_size, 4, bf16, True, steps=None, **both)
        plan = cuda_plan.make_plan(call, mask, None)
        assert plan.has_kernel
        assert asked[-1] == plan.directions
        return plan.directions

    assert directions(256) == 2
    assert directions(256, bidirectional=False) == 1  # two stacked layers
    assert directions(512) == 1  # which are launched apart then
    assert asked == [2, 2, 1, 1]
    assert directions(3000) == 1  # each takes the whole device


def test_a_plan_of_another_length_starts_no_compilation(planned_for_an_h100, monkeypatch):
    """Nor the threads for one, which would take longer than a step."""
    asked, compiled = [], cuda_launch.compile_kernels
    monkeypatch.setattr(cuda_launch, "kernels", lambda *args: asked.append(args))
    monkeypatch.setattr(cuda_plan, "compile_kernels", compiled)
    for steps, count in ((100, 2), (101, 2), (None, 2)):
        call = Call(torch.device("cuda", 0), "gru", 320, 3, bf16, True, steps=steps)
        assert cuda_plan.make_plan(call, None, None).has_kernel
        assert len(asked) == count
    compiled.cache_clear()  # what has been compiled here is nothing


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
def test_only_a_refusal_that_lasts_is_kept(planned_for_an_h100, monkeypatch, pruned, lasts):
    def refuse(*_, **__):
        raise nvrtc.DoesNotCompile("by this compiler") if lasts else torch.OutOfMemoryError("at this moment")

    monkeypatch.setattr(nvrtc, "why_no_cuda", lambda: None)
    monkeypatch.setattr(cuda_plan, "_packed", lambda geometry, _: geometry)
    mask = torch.zeros(3 * 1024, 1024, dtype=torch.bool) if pruned else None
    call = Call(torch.device("cuda", 0), "gru", 1024, 16, bf16, True, steps=None)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_launch, "kernels", refuse)
        if lasts:
            assert backends.plan_layer(mask, call).reason == "by this compiler"
        else:
            with pytest.raises(torch.OutOfMemoryError, match="at this moment"):
                backends.plan_layer(mask, call)
    assert (backends.plan_layer(mask, call).path == "steps") == lasts


@pytest.mark.parametrize("cell", ["rnn_tanh", "gru", "lstm"])
def test_a_thread_of_the_backward_updates_no_more_than_its_registers_hold(cell):
    """With more they were spilled, and 256 sequences took a third longer than in two turns (H200)."""
    for hidden, batch in ((256, 256), (512, 512), (1024, 16)):
        chosen = search.choose_geometry(cell, hidden, batch, bf16, None, None, H100, backward=True).geometry
        assert -(-chosen.units * chosen.columns // geometry.THREADS) * GATES[cell] <= 8


def test_a_block_loads_early_many_rounded_bytes_of_many_sequences():
    """At 256 sequences 5.5 microseconds a step, as two blocks of a cluster take; fewer bytes took a tenth longer."""
    for batch, exact, early in ((256, False, True), (128, False, True), (16, False, False), (256, True, False)):
        for backward in (False, True):
            start = geometry.Geometry("dense", CELLS["gru"], 512, f32, 0, 0, 0, backward, exact)
            found = search.candidates(start, batch, 1.0, None, H100)
            alone = [g for g in found if g.cluster == g.block_groups == 1 and not g.distributed]
            fastest = min(alone, key=lambda g: microseconds(g, batch))
            assert fastest.loads_early == (early and backward)


@pytest.mark.parametrize(
    ("layer", "dtype", "exact", "most"),
    [(("gru", 512), bf16, True, 6), (("gru", 256), f32, True, 12)],
)
def test_few_kernels_serve_the_batches_of_a_training(monkeypatch, layer, dtype, exact, most):
    """With a geometry for each batch they were 19 and 21."""

    def choose(batch, backward):
        return search.choose_geometry(*layer, batch, dtype, None, None, H100, backward=backward, exact=exact).geometry

    batches = itertools.product((*range(1, 20, 2), *range(20, 65, 5), 16, 64), (False, True))
    chosen = {key: choose(*key) for key in batches}
    assert len({(found.backward, macros(found)) for found in chosen.values()}) <= most
    monkeypatch.setattr(search, "ROUNDED", 0)
    for (batch, backward), found in chosen.items():
        fastest = choose(batch, backward)
        assert microseconds(found, batch) <= 1.1 * microseconds(fastest, batch)
        assert found == fastest or batch not in (1, 4, 16, 64)
        assert found.groups <= -(-batch // (found.columns * found.block_groups))


@pytest.mark.parametrize(("columns", "fits"), [(32, True), (64, False)])
def test_states_and_sums_of_a_block_fit_into_registers(columns, fits):
    """With room for no weight, 1,172 bytes a thread were spilled."""
    chosen = geometry.Geometry("dense", CELLS["gru"], 1024, bf16, 32, columns, 4, sum_buffers=1, tiles=48)
    assert (fill_registers(chosen, H100.shared_memory_per_block_optin) is not None) == fits


@pytest.mark.parametrize(
    ("cell", "hidden", "batch", "exact"),  # forward and backward
    [
        ("lstm", 128, 64, [True, True]),
        ("gru", 192, 64, [True, False]),
        ("lstm", 512, 1, [True, True]),
        ("lstm", 256, 4, [False, False]),
        ("rnn_relu", 256, 64, [True, True]),
        ("rnn_tanh", 384, 4, [True, False]),
        ("rnn_tanh", 512, 4, [False, False]),
        ("rnn_relu", 512, 4, [True, False]),
        ("rnn_relu", 640, 4, [False, False]),
    ],
)
def test_products_are_rounded_where_cudnn_rounds_them(planned_for_an_h100, cell, hidden, batch, exact):
    plan = plan_of(cell, hidden, batch, f32, (True, True))
    assert [geometry.exact for geometry in plan.geometry] == exact


@pytest.mark.parametrize(
    ("sizes", "tf32", "measured"),  # hidden size, projection, batch; microseconds a step on an H200, then trained
    [
        ((256, 64, 16, bf16), False, (7.3, 17.7)),
        ((1024, 512, 64, bf16), False, (11.6, 29.3)),
        ((2048, 640, 32, bf16), False, (14.1, 33.7)),
        ((2048, 256, 1, f16), False, (11.2, 24.5)),
        ((1024, 256, 16, f32), True, (15.3, 46.2)),
        ((256, 128, 64, f32), True, (12.6, 35.7)),
    ],
)
def test_estimates_of_cudnns_projections(sizes, tf32, measured):
    hidden, proj_size, batch, dtype = sizes
    for training, step in enumerate(measured):
        call = Call(torch.device("cuda", 0), "lstm", hidden, batch, dtype, bool(training), 512, proj_size=proj_size)
        assert 0.75 < torchs_microseconds(call, tf32, H100.multi_processor_count) / 512 / step < 1.2


@pytest.mark.parametrize(
    ("cell", "hidden", "dtype", "both", "ours"),
    [
        ("lstm", 168, f16, False, True),
        ("gru", 40, f16, True, True),
        ("gru", 80, bf16, False, True),  # under autocast, too
        ("lstm", 168, f32, False, False),
        ("lstm", 160, f16, True, False),
        ("gru", 24, f16, False, False),
        ("gru", 100, f16, False, False),
        ("lstm", 232, f16, False, False),
        ("rnn_tanh", 40, f16, True, False),
        ("rnn_tanh", 64, f16, False, False),
        ("rnn_tanh", 64, f16, True, True),
        ("rnn_relu", 256, f16, True, True),
        ("rnn_relu", 288, f16, True, False),
    ],
)
def test_few_steps_are_torchs_unless_cudnn_errs(planned_for_an_h100, cell, hidden, dtype, both, ours):
    of_layer = torch.device("cuda", 0), cell, hidden, 16, dtype
    call = Call(*of_layer, training=True, steps=2, compared=True, at_once=1 + both, bidirectional=both)
    assert (cuda_plan.make_plan(call, None, None).path == "dense") == ours
    stacked = call._replace(at_once=2, bidirectional=False)
    assert (cuda_plan.make_plan(stacked, None, None).path == "dense") == cudnn.errs(cell, hidden, 16, dtype, False)
    assert (backends.least_steps("cuda", cell, hidden, 16, dtype, both) < 2) == ours
    assert backends.least_steps("cpu", cell, hidden, 16, dtype, both) == 2
    assert cuda_plan.make_plan(call._replace(batch=12), None, None).path == "steps"


def test_plan_says_what_fits():
    def plan(cell, hidden, batch=4, dtype=f16, density=None, block=None):
        nnz = None if density is None else int(density * GATES[cell] * hidden**2)
        return search.choose_geometry(cell, hidden, batch, dtype, nnz, block, H100)

    for layer, path in {
        ("gru", 2304): "dense",
        ("lstm", 2304, 4, f16, 0.3, (1, 1)): "dense",
        ("lstm", 4608, 4, f16, 0.1, (16, 1)): "block",
        ("rnn_tanh", 8192, 4, f16, 0.1, (1, 1)): "sparse",
        ("lstm", 8192): "steps",
    }.items():
        chosen = plan(*layer)
        assert chosen.path == path, chosen.reason
        assert 0 <= chosen.bytes_on_chip <= chosen.bytes_available == 132 * (4 * 65536 + 232448)
        assert chosen.blocks <= 132
    assert "do not fit on the chip" in plan("lstm", 8192).reason
    assert "not in torch.float64" in plan("gru", 64, dtype=torch.float64).reason
    assert plan("gru", 2304).bytes_on_chip >= 3 * 2304**2 * 2


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("dense", ("gru", 2048, 4, f32, None, None)),
        ("block", ("gru", 8192, 4, f16, 3 * 8192**2 // 10, (16, 1))),
        ("sparse", ("lstm", 4608, 4, f16, 4 * 4608**2 // 10, (1, 1))),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_weights_for_which_there_is_no_room_are_read_from_l2(path, layer, backward):
    if path == "block" and backward:
        layer = "gru", 5600, 4, f16, 3 * 5600**2 // 10, (16, 1)
    without = SimpleNamespace(**{**vars(H100), "L2_cache_size": 0})
    assert "do not fit on the chip" in search.choose_geometry(*layer, without, backward=backward).reason
    plan = search.choose_geometry(*layer, H100, backward=backward)
    chosen, share = plan.geometry, plan.geometry.bytes_streamed
    bytes_of_places = 2 * 8 * chosen.tile_columns if chosen.path == "block" else 0  # of one tile of every warp
    assert (chosen.path, chosen.groups) == ("sparse" if path == "block" and backward else path, 1)
    assert 0 < share <= H100.L2_cache_size * 2 / 3
    weights = plan.bytes_on_chip + share - chosen.blocks * chosen.tiles * bytes_of_places
    assert weights == chosen.tiles * chosen.tile_bytes * chosen.blocks >= layer[3].itemsize * (layer[4] or 3 * 2048**2)
    assert f"but for {share / 1e6:.1f} MB, read from L2 at every step" in plan.reason
    pytest.importorskip("cuda.core")
    assert nvrtc.compile_cubin(code(chosen), "sm_90", dict(macros(chosen)))


@pytest.mark.parametrize("processors", [48, 58, 108, 132, 148])  # of an RTX 3070, an L4, an A100, an H100, a B200
@pytest.mark.parametrize("cell", GATES)
def test_all_blocks_can_be_resident_and_cover_the_layer(cell, processors):
    device = SimpleNamespace(**{**vars(H100), "multi_processor_count": processors})
    for hidden, batch, backward in itertools.product((1, 130, 1024), (1, 17), (False, True)):
        for chosen in candidates("dense", cell, hidden, batch, bf16, properties=device, backward=backward):
            size = chosen.blocks_of_a_cluster
            assert size <= (16 if chosen.distributed else 4)
            assert size > 1 or not chosen.distributed
            assert chosen.blocks * chosen.groups <= search.resident_blocks(device, size) <= processors
            assert chosen.blocks % chosen.cluster == 0
            assert chosen.blocks * chosen.units >= hidden
            assert chosen.shared_bytes <= H100.shared_memory_per_block_optin
            if chosen.scatters:
                assert chosen.blocks == chosen.cluster <= hidden
                assert (
                    chosen.blocks - 1
                ) * chosen.units < hidden  # a block without units would not wait for the others
            else:
                width = GATES[cell] * chosen.pitch if backward else chosen.pitch
                assert (chosen.cluster - 1) * chosen.slice < width <= chosen.cluster * chosen.slice


def at_once(cell, hidden, batch, dtype, layers, steps, training=False, captured=False):
    call = Call(torch.device("cuda", 0), cell, hidden, batch, dtype, training, steps, captured=captured)
    return wavefront.layers_at_once(call, layers, None, None, True)


@pytest.mark.parametrize(
    ("stack", "count"),  # measured on an H200, in a CUDA graph: times as fast as layer after layer
    [
        (("gru", 256, 1, f16, 3, 1000), 3),  # 2.1
        (("gru", 1024, 1, bf16, 2, 1000), 2),  # 1.5
        (("lstm", 1024, 16, bf16, 2, 512), 2),  # 1.3
        (("lstm", 256, 16, bf16, 4, 256), 4),  # 1.6
        (("lstm", 1024, 8, f16, 8, 50), 1),  # .9
        (("lstm", 2048, 1, f16, 8, 200), 1),  # .7 to .9: the weights of two layers do not fit
        (("gru", 1024, 64, bf16, 2, 512), 1),  # .9 to 1.05
        (("gru", 128, 64, f32, 2, 100), 1),  # .9
    ],
)
def test_stacked_layers_run_at_once_where_that_is_faster(planned_for_an_h100, stack, count):
    assert [at_once(*stack, training, captured=True) for training in (False, True)] == [count, count]
    assert at_once("gru", 256, 1, f16, 1, 1000, captured=True) == 1


def test_the_host_launches_few_chunks(planned_for_an_h100, monkeypatch):
    """Those of few steps would take it longer than the GPU."""
    assert at_once("gru", 256, 1, f16, 3, 200) == 1 < at_once("gru", 256, 1, f16, 3, 200, captured=True)
    long = Call(torch.device("cuda", 0), "gru", 256, 1, f16, False, 1000, at_once=3)
    plan = cuda_plan.plan_sizes(long, None, None, True)
    in_graph = long._replace(captured=True)
    launched, captured = (wavefront.chunks(call, plan) for call in (long, in_graph))
    assert 2 <= launched < captured <= 16
    few = wavefront.chunks(in_graph._replace(steps=20), plan)
    assert few <= 2  # of eight steps or more
    assert wavefront.chunks(in_graph._replace(at_once=1), plan) == 1
    wavefront.chunks(in_graph, plan)
    monkeypatch.setattr(wavefront, "step_microseconds", None)  # calls of pruned layers ask each time
    assert wavefront.chunks(in_graph, plan) == captured
