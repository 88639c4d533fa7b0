"""How blocks exchange the state: within clusters, in float32 that is rounded to show its step, and in few buffers."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ostinato.kernels.persistent import reference
from ostinato.kernels.persistent.cuda import launch as cuda_launch
from ostinato.kernels.persistent.cuda import plan as cuda_plan
from ostinato.kernels.persistent.cuda.heuristics import geometry
from ostinato.kernels.persistent.cuda.heuristics.cells import CELLS
from ostinato.kernels.persistent.cuda.heuristics.costs import microseconds
from ostinato.kernels.persistent.cuda.heuristics.geometry import Geometry
from persistent_cases import TOLERANCE, Case, assert_compiles, assert_matches_the_reference, double, errors
from persistent_geometries import candidate, candidates, rounded, within_clusters

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("layer", [("lstm", 515, 23, f16), ("gru", 1024, 16, bf16), ("rnn_tanh", 256, 3, f32)])
def test_clusters_match_the_reference(layer, cluster, nan_memory):
    torch.manual_seed(0)
    for back in candidates("dense", *layer, properties=torch.cuda.get_device_properties(0), backward=True)[::7]:
        if back.cluster == cluster:
            case = Case("dense", *layer, back=back)
            gradients = case.gradients(case.inputs(9), False)
            found, expected = case.backward(gradients), case.backward(gradients, reference, double)
            assert errors(found, expected).max() < TOLERANCE[case.dtype], back


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        ("gru", 256, 5, f16),
        ("lstm", 130, 23, bf16),
        ("rnn_tanh", 101, 16, f32),
        ("lstm", 512, 3, f16),
        ("gru", 200, 1, f32),
        ("rnn_relu", 5, 40, f16),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_exchanges_within_clusters_match_the_reference(layer, exact, backward, nan_memory):
    torch.manual_seed(0)
    if not exact and layer[3] != f32:
        pytest.skip("only float32 is rounded")
    tolerance = TOLERANCE[layer[3]] if exact else 1e-3
    for chosen in within_clusters(*layer, exact, backward, torch.cuda.get_device_properties(0)):
        case = Case("dense", *layer, **{"back" if backward else "forward": chosen})
        for steps, reverse, packed, resets in ((17, False, False, 0.0), (64, True, True, 0.2), (1, False, False, 0.0)):
            inputs = case.inputs(steps, packed=packed, resets=resets)
            given = case.gradients(inputs, reverse)
            run = partial(case.backward, given) if backward else partial(case.forward, inputs, reverse)
            assert_matches_the_reference(case, run, tolerance)


@pytest.mark.parametrize(
    ("layer", "backward"),
    [(("gru", 256, 5, f16), False), (("lstm", 130, 23, bf16), True), (("rnn_tanh", 101, 16, f32), False)],
)
def test_kernels_within_clusters_compile_without_a_gpu(layer, backward):
    pytest.importorskip("cuda.core")
    for chosen in within_clusters(*layer, backward=backward)[::2]:
        assert_compiles(chosen, resets=True, keeps=not backward)


def test_rounded_states_show_their_step_unless_slices_are_padded():
    for cluster, hidden, tagged in ((1, 130, True), (2, 128, True), (2, 130, False)):
        start = Geometry("dense", CELLS["gru"], hidden, f32, 16, 8, 1, True, exact=False, cluster=cluster)
        assert start.tagged == tagged
        assert not start._replace(exact=True).tagged
        assert not start._replace(dtype=f16).tagged


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [("gru", 512, 37), ("gru", 512, 32), ("lstm", 130, 23), ("rnn_tanh", 101, 5)])
def test_rounded_states_match_the_reference(layer, nan_memory):
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    forwards, backwards = (rounded(*layer, backward, properties) for backward in (False, True))
    case = Case("dense", *layer, f32)
    for k, ((steps, packed, resets), backward) in enumerate(
        itertools.product(((19, False, 0.0), (7, True, 0.2)), backwards)
    ):
        case.plan = case.plan._replace(geometry=cuda_plan.Geometries(forwards[k % len(forwards)], backward))
        inputs = case.inputs(steps, packed=packed, resets=resets)
        gradients = case.gradients(inputs, packed)
        found, expected = (case.both(inputs, gradients, packed, *how) for how in ((), (reference, double)))
        case.check()
        assert errors(found, expected).max() < 1e-3, case.plan.geometry


@pytest.mark.gpu
def test_a_step_that_no_longer_fits_into_the_spare_bits(nan_memory):
    torch.manual_seed(0)
    case = Case("dense", "gru", 8, 2, f32)
    forward, backward = (rounded("gru", 8, 2, back, torch.cuda.get_device_properties(0))[0] for back in (False, True))
    case.plan = case.plan._replace(geometry=cuda_plan.Geometries(forward, backward))
    inputs = case.inputs(2**13 + 6)
    gradients = case.gradients(inputs, False)
    found, expected = (case.both(inputs, gradients, False, *how) for how in ((), (reference, double)))
    case.check()
    assert errors(found, expected).max() < 1e-3


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_of_rounded_numbers_compile_without_a_gpu(backward):
    pytest.importorskip("cuda.core")
    for chosen in rounded("gru", 130, 20, backward)[backward::2]:
        assert_compiles(chosen)


def test_the_memory_of_the_exchange_backward_does_not_grow_with_the_steps(monkeypatch):
    monkeypatch.setattr(cuda_launch, "kernels", lambda *_: SimpleNamespace(processors=132))
    for layer in (("dense", "gru", 515, 23, f16), ("dense", "lstm", 1024, 64, f32)):
        chosen = candidate(*layer, backward=True)
        launch_of = partial(cuda_launch._launch_of.__wrapped__, chosen, 0)
        few, many = (launch_of(n, layer[3], False, False, False, 1).bytes["states"] for n in (1, 999))
        assert few == many == 8 * geometry.ceil_div(layer[3], chosen.columns) * chosen.group_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [("lstm", 512, 16, f16), ("gru", 1024, 8, bf16), ("lstm", 256, 16, f32)])
def test_gradients_keep_their_bits_beside_other_traffic(layer):
    """Blocks exchange words in buffers taken in turn: one that came too late would be taken for a later one."""
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    half = properties.multi_processor_count // 2  # the other has room for copies
    found = candidates("dense", *layer, properties=properties, backward=True)
    found = (g for g in found if g.state_buffers and not g.distributed and g.blocks * g.groups <= half)
    case = Case("dense", *layer, back=min(found, key=lambda g: microseconds(g, layer[2])))
    gradients = case.gradients(case.inputs(41), False)
    expected = case.backward(gradients)
    torch.cuda.synchronize()
    first, second = (torch.cuda.Stream(priority=priority) for priority in (-1, 0))
    memory = torch.empty(2, 1 << 28, device="cuda")
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(300):
        with torch.cuda.stream(second):
            memory[0].copy_(memory[1])
        with torch.cuda.stream(first):
            for _ in range(4):
                for x, y in zip(case.backward(gradients), expected, strict=True):
                    if x is not None:
                        different |= (x != y).any()
    case.check()
    assert not different
