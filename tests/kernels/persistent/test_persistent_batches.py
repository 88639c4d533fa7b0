"""How the sequences of a batch share blocks and threads: few, adjacent units, groups in turn, wide batches."""

import itertools
from functools import partial

import pytest
import torch

from comparisons import same_bits
from gpus import H100
from ostinato.kernels.persistent.cuda.heuristics.cells import CELLS
from ostinato.kernels.persistent.cuda.heuristics.fitting import fill_registers
from ostinato.kernels.persistent.cuda.heuristics.geometry import Geometry
from ostinato.kernels.persistent.cuda.source import macros
from persistent_cases import TOLERANCE, Case, assert_compiles, assert_matches_the_reference
from persistent_geometries import in_pairs, of_any_number, ping_pong, wide

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
FEW = [("gru", 515, bf16), ("lstm", 256, f16), ("rnn_tanh", 101, f32), ("gru", 384, f32)]


@pytest.mark.gpu
@pytest.mark.parametrize("layer", FEW)
def test_fewer_sequences_match_the_reference(layer, nan_memory):
    torch.manual_seed(0)
    tolerance, properties = 1e-3 if layer[2] == f32 else TOLERANCE[layer[2]], torch.cuda.get_device_properties(0)
    for backward in (False, True):
        for kernel, columns in itertools.product(of_any_number(*layer, backward, properties), (2, 3, 7)):
            chosen = kernel._replace(columns=columns, groups=2)  # some of the sequences are of a later launch
            case = Case("dense", *layer[:2], 11, layer[2], **{"back" if backward else "forward": chosen})
            for steps, special in ((9, False), (34, True)):
                inputs = case.inputs(steps, packed=special, resets=0.2 * special)
                given = case.gradients(inputs, special)
                run = partial(case.backward, given) if backward else partial(case.forward, inputs, special)
                assert_matches_the_reference(case, run, tolerance)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layer", FEW)
def test_one_kernel_takes_two_to_eight_sequences(layer, backward):
    found = of_any_number(*layer, backward)
    assert {g.cluster for g in found} == ({1, 2, 4} if backward else {1})
    for kernel, columns in itertools.product(found, range(2, 8)):
        fewer = kernel._replace(columns=columns)
        assert macros(fewer) == macros(kernel)
        assert (fewer.shared_bytes, fewer.group_bytes) == (kernel.shared_bytes, kernel.group_bytes)
    assert macros(found[0]._replace(columns=1)) != macros(found[0])


def test_weights_are_not_streamed_to_make_room_for_sequences_that_do_not_exist():
    start = Geometry("dense", CELLS["lstm"], 2048, f32, 16, 4, 1, exact=False, tiles=128, sum_buffers=1)
    chosen = fill_registers(start, H100.shared_memory_per_block_optin)
    assert chosen.capacity == 4
    assert chosen.streamed < fill_registers(start._replace(columns=8), H100.shared_memory_per_block_optin).streamed


PAIRS = [("gru", 1026, 64, bf16), ("lstm", 514, 64, f16), ("lstm", 1024, 64, bf16)]


@pytest.mark.gpu
@pytest.mark.parametrize("layer", PAIRS)
def test_adjacent_units_match_the_reference(layer, nan_memory):
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    (forward,), backwards = (in_pairs(*layer, back, properties) for back in (False, True))
    assert {g.cluster for g in backwards} >= {1, 2}
    for back in backwards:
        case = Case("dense", *layer, forward=forward, back=back)
        for steps, reverse, packed, resets in ((9, False, False, 0.0), (7, True, True, 0.2), (1, False, False, 0.0)):
            inputs = case.inputs(steps, packed=packed, resets=resets)
            run = partial(case.both, inputs, case.gradients(inputs, reverse), reverse)
            assert_matches_the_reference(case, run, TOLERANCE[case.dtype])


@pytest.mark.gpu
def test_adjacent_units_of_tensors_that_are_not_aligned():
    torch.manual_seed(0)
    layer = "lstm", 512, 64, bf16
    forward, backward = (in_pairs(*layer, back)[0] for back in (False, True))
    case = Case("dense", *layer, forward=forward, back=backward)
    inputs = case.inputs(5)
    gradients = case.gradients(inputs, False)

    def shifted(x):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    right = case.both(inputs, gradients, False)
    found = case.both(tuple(map(shifted, inputs)), tuple(map(shifted, gradients)), False)
    assert same_bits(found, right)


def test_adjacent_units_where_every_thread_has_pairs_of_them():
    whole = Geometry("dense", CELLS["gru"], 1024, bf16, 32, 16, 4)
    assert whole.adjacent == 2
    others = {
        "hidden_size": 1023,
        "units": 31,
        "columns": 8,
        "dtype": f32,
        "cell": CELLS["rnn_tanh"],
        "distributed": True,
    }
    assert all(whole._replace(**{name: x}).adjacent == 1 for name, x in others.items())


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_of_adjacent_units_compile_without_a_gpu(backward):
    pytest.importorskip("cuda.core")
    for layer in PAIRS[backward::2]:
        assert_compiles(in_pairs(*layer, backward)[0], resets=True, packed=True)


PING_PONG = [
    ("gru", 2048, 16, bf16),
    ("lstm", 2048, 30, f16),
    ("lstm", 1024, 48, f32),
    ("gru", 1280, 32, f32),
    ("gru", 1024, 64, bf16),
    ("lstm", 512, 64, bf16),
    ("lstm", 1333, 40, f16),  # padded to whole copies, as those that follow
    ("gru", 1500, 40, bf16),
    ("gru", 650, 100, f32),
]


@pytest.mark.gpu
@pytest.mark.parametrize("layer", PING_PONG)
def test_groups_in_turn_match_the_reference(layer, nan_memory):
    torch.manual_seed(0)
    tolerance = 1e-3 if layer[3] == f32 else TOLERANCE[layer[3]]  # float32 is rounded
    properties = torch.cuda.get_device_properties(0)
    forwards, backwards = (ping_pong(*layer, back, properties)[:2] for back in (False, True))
    for forward, back in itertools.zip_longest(forwards, backwards):
        case = Case("dense", *layer, forward=forward, back=back)
        for steps, batch, special in ((13, layer[2], False), (34, layer[2], True), (3, 5, False), (1, 9, True)):
            inputs = case.inputs(steps, batch, packed=special, resets=0.2 * special)
            run = partial(case.both, inputs, case.gradients(inputs, special), special)
            assert_matches_the_reference(case, run, tolerance)


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_of_groups_in_turn_compile_without_a_gpu(backward):
    pytest.importorskip("cuda.core")
    for layer in PING_PONG[backward::2]:
        for chosen in ping_pong(*layer, backward)[:1]:
            assert_compiles(chosen, resets=True, packed=True, keeps=not backward)


WIDE = [("lstm", 1152, 150, bf16), ("lstm", 2048, 128, f16), ("lstm", 1502, 100, bf16)]  # the last is padded


@pytest.mark.gpu
@pytest.mark.parametrize("layer", WIDE)
def test_wide_batches_match_the_reference(layer, nan_memory):
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    if properties.major != 9:
        pytest.skip("only Hopper multiplies by warpgroups")
    for forward, back in zip(*(wide(*layer, back, properties) for back in (False, True)), strict=True):
        case = Case("dense", *layer, forward=forward, back=back)
        case.bias = case.uniform(4 * case.hidden)
        for steps, batch, reverse, packed, resets in (
            (13, layer[2], False, False, 0.0),
            (34, layer[2], True, True, 0.2),
            (9, 37, True, False, 0.2),
            (17, 300, False, False, 0.0),
            (1, 3, False, False, 0.0),
        ):
            inputs = case.inputs(steps, batch, with_state=steps != 9, packed=packed, resets=resets)
            run = partial(case.both, inputs, case.gradients(inputs, reverse), reverse)
            assert_matches_the_reference(case, run, TOLERANCE[case.dtype])


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_of_wide_batches_compile_without_a_gpu(backward):
    pytest.importorskip("cuda.core")
    for chosen in wide(*WIDE[backward], backward):
        assert_compiles(chosen, resets=True, packed=True, keeps=not backward)
