"""The geometry chosen for scans on NVIDIA GPUs: what was measured to be fastest, and what fits."""

import itertools

import pytest

from gpus import GPUS
from ostinato.kernels.scan.cuda.heuristics.choice import choose_geometry
from ostinato.kernels.scan.cuda.heuristics.criteria import Criteria
from ostinato.kernels.scan.cuda.heuristics.geometry import Geometry
from ostinato.kernels.scan.cuda.heuristics.narrow import _bank_conflicts, sequences_joined

INPUTS = {  # tensors read by each element
    "LinearScan": 2,
    "LinearScanBackward": 3,
    "LogLinearScan": 2,
    "LogLinearScanBackward": 4,
    "Generated2": 2,
    "Generated2Backward": 4,
    "Generated3": 3,
    "Generated3Backward": 5,
}


def test_streaming_blocks_ask_for_as_much_memory_as_is_on_its_way():
    for name, device in GPUS.items():
        for element, inputs, itemsize in (("LinearScan", 2, 4), ("LinearScanBackward", 3, 4), ("LinearScan", 2, 2)):
            for shape in ((8, 2048, 1536), (128, 512, 256), (64, 2048, 512), (512, 1000, 64)):
                geometry = choose_geometry(Criteria(element, inputs, itemsize, 8, False, *shape, device))
                assert not geometry.chained
                blocks = shape[0] * -(-shape[2] // geometry.group)
                of_block = geometry.stages * inputs * geometry.tile * geometry.group * itemsize
                flying = min(blocks, 4 * device.processors) * of_block
                assert flying >= 0.6e-6 * device.bandwidth, name
                assert geometry.shared_bytes(inputs, 0, itemsize) <= device.shared_of_block


@pytest.mark.parametrize("gpu", ["H200", "H100"])
@pytest.mark.parametrize("shape", [(8, 4096, 1536), (8, 65536, 1536), (128, 512, 256), (16, 4096, 1536)], ids=str)
def test_16_bit_scans_take_what_was_measured_fastest(gpu, shape):
    several = (4, 32, 4, 8, 2)  # rows of two lines; the last number is of stages
    alone = {"H200": ((4, 32, 8, 8, 2), (4, 32, 8, 4, 3)), "H100": ((4, 32, 8, 4, 3), (4, 32, 8, 4, 2))}[gpu]
    split = (2, 16, 4, 8, 2), (2, 16, 4, 4, 2)
    for element, inputs, want in (
        ("LinearScan", (2, 3), alone if shape[0] == 8 else (several, several)),
        ("Generated2", (2, 4), split),
        ("Generated3", (3, 5), split),
    ):
        forward = choose_geometry(Criteria(element, inputs[0], 2, 8, False, *shape, GPUS[gpu]))
        backward = choose_geometry(Criteria(f"{element}Backward", inputs[1], 2, 8, False, *shape, GPUS[gpu]))
        assert tuple((*g[:4], g.stages) for g in (forward, backward)) == want
        assert not forward.chained
        assert forward.copies_16_bytes(2, 8)
        assert backward.copies_16_bytes(2, 8)
        assert not forward.copies_16_bytes(2, 4)


def test_a_block_alone_asks_for_as_much_as_is_on_its_way_and_little_more():
    for name in ("A100", "H100", "H200", "B200"):
        device = GPUS[name]
        for element, inputs in (("LinearScan", 2), ("LinearScanBackward", 3)):
            g = choose_geometry(Criteria(element, inputs, 2, 8, False, device.processors, 4096, 128, device))
            assert (g.warps, g.resident) == (8, 1)
            flying = device.processors * g.stages * inputs * g.tile * g.group * 2
            assert flying >= 1.1e-6 * device.bandwidth
            assert flying <= 1.5 * 1.1e-6 * device.bandwidth or g.stages * g.rows == 8, name  # the least there is


def test_long_32_bit_backward_passes():
    def chosen(gpu, *shape):
        g = choose_geometry(Criteria("LinearScanBackward", 3, 4, 4, True, *shape, GPUS[gpu]))
        return g.vec, g.warps, g.rows, g.stages, "looks back" if g.looks_back else "streams"

    looks_back = 2, 8, 8, 1, "looks back"
    assert chosen("H200", 8, 4096, 1536) == (2, 4, 4, 2, "streams")
    assert chosen("H100", 8, 4096, 1536) == (2, 4, 8, 1, "streams")  # whose memory has less on its way
    assert chosen("H100", 8, 2048, 1536) == chosen("H100", 128, 4096, 256) == (2, 4, 4, 2, "streams")
    for gpu in ("H100", "H200"):
        assert chosen(gpu, 8, 65536, 1536) == looks_back
        assert chosen(gpu, 9, 16384, 1024) == looks_back  # 144 blocks on 132 multiprocessors


def test_chained_blocks_of_whole_rows():
    def chosen(gpu, *shape, **settings):
        g = choose_geometry(Criteria("LinearScanBackward", 3, 4, 4, True, *shape, GPUS[gpu], **settings))
        return g.vec, g.warps, g.rows, g.stages, g.looks_back

    for gpu in ("H100", "H200"):
        assert chosen(gpu, 2, 100000, 384) == (2, 16, 14, 1, True)
        assert chosen(gpu, 2, 100000, 384, resets=True)[:3] == (1, 16, 24)
        assert chosen(gpu, 2, 100000, 352)[0] == 1  # pairs would leave half of a block without channels
        for element, inputs, rows in (("LinearScan", 2, 28), ("LinearScanBackward", 3, 16)):
            arguments = (element, inputs, 2, 8, True, 1, 1 << 20, 64, GPUS[gpu])
            halves = choose_geometry(Criteria(*arguments, resets=True))
            assert (halves.vec, halves.warps, halves.rows, halves.looks_back) == (2, 8, rows, True)
            halves = choose_geometry(Criteria(*arguments))  # no reset cuts the way of the carry short
            assert (halves.vec, halves.warps, halves.rows, halves.looks_back) == (2, 16, max(rows, 20), True)
            for itemsize in (2, 4):  # rows that begin anywhere
                odd = choose_geometry(Criteria(element, inputs, itemsize, 1, True, 2, 60000, 129, GPUS[gpu]))
                assert (odd.vec, odd.warps, odd.rows, odd.looks_back) == (1, 8, 20 if inputs == 3 else 32, True)
    assert chosen("A100", 2, 100000, 384)[0] == 1  # whose shared memory does not hold such a tile


def test_few_chains_that_share_all_multiprocessors_evenly_take_turns():
    def chosen(*shape, gpu="H200", itemsize=2, inputs=2, **settings):
        aligned, element = settings.pop("aligned", 16 // itemsize), "LinearScan" + ("Backward" if inputs == 3 else "")
        g = choose_geometry(Criteria(element, inputs, itemsize, aligned, True, *shape, GPUS[gpu], **settings))
        assert not g.mapped or (g.chained and not g.looks_back and g.stages == 1)
        return (g.vec, g.warps, g.rows) if g.mapped else None

    for gpu in ("H100", "H200"):
        for inputs, rows in ((2, 16), (3, 12)):
            for shape in ((1, 65536, 256), (1, 1 << 20, 64), (1, 31355, 128)):
                assert chosen(*shape, gpu=gpu, itemsize=4, inputs=inputs) == (1, 16, rows)
            for shape in ((1, 65536, 256), (3, 37884, 128)):
                assert chosen(*shape, gpu=gpu, inputs=inputs) == (2, 16, rows)
            assert (chosen(1, 20000, 1024, gpu=gpu, inputs=inputs) is not None) == (gpu == "H200")  # by few blocks
    assert chosen(2, 100000, 384)
    assert not chosen(2, 100000, 384, inputs=3)
    for shape in ((1, 152915, 960), (1, 40000, 2048)):  # 15 chains on 132 multiprocessors; four blocks each
        assert chosen(*shape) is None
    for shape in ((1, 1 << 20, 64), (3, 1 << 18, 64), (1, 1 << 18, 192)):  # with 131 messages to read, or 43
        for inputs in (2, 3):
            assert chosen(*shape, inputs=inputs) is None
    assert chosen(3, 1 << 16, 64)
    assert chosen(1, 1 << 18, 256)
    assert chosen(4, 65536, 96) is None  # a fourth of the lanes would be idle
    assert chosen(4, 84571, 40)  # though some are, if one group has all channels
    assert chosen(4, 84571, 72) is None
    assert chosen(1, 4096, 256) is None
    assert chosen(1, 60000, 2000) is None  # of which blocks would drift apart, and lose lines
    for changes in ({"packed": True}, {"resets": True}, {"by_offsets": True}, {"expanded": True}, {"aligned": 4}):
        assert chosen(2, 20000, 384, **changes) is None
    assert chosen(2, 20000, 384, gpu="A100") is None


def test_two_blocks_of_a_cluster_share_a_chain_where_they_fill_the_gpu():
    def cluster(*shape, gpu="H200", itemsize=2, **settings):
        aligned = settings.pop("aligned", 16 // itemsize)
        element, inputs = settings.pop("element", "LinearScan"), settings.pop("inputs", 2)
        scan = Criteria(element, inputs, itemsize, aligned, True, *shape, GPUS[gpu], **settings)
        return choose_geometry(scan).cluster

    for itemsize, gpu in itertools.product((2, 4), ("H100", "H200")):
        for element, inputs in (("LinearScan", 2), ("LinearScanBackward", 3)):
            for shape in ((8, 2048, 512), (4, 4096, 1024), (1, 65536, 4096)):
                assert cluster(*shape, gpu=gpu, itemsize=itemsize, element=element, inputs=inputs) == 2
    assert cluster(9, 4096, 512, gpu="B200") == 2
    for changes in ({"gpu": "A100"}, {"aligned": 2}, {"packed": True}, {"by_offsets": True}, {"itemsize": 8}):
        assert cluster(4, 4096, 1024, **changes) == 1
    assert cluster(4, 4096, 1024, element="LogLinearScan") == 1
    assert cluster(4, 4096, 1088) == 1  # 68 chains on 132 multiprocessors
    assert cluster(3, 5000, 1000) == 1  # 48
    assert cluster(2, 30000, 2000) == 1  # whose rows share lines
    assert cluster(4, 64, 1024) == 1  # so short that a block scans a chain sooner


def test_a_long_scan_of_unevenly_many_chains_looks_back():
    def looks_back(batch, steps, channels, gpu="H200", aligned=4, packed=False):
        arguments = (True, batch, steps, channels, GPUS[gpu], packed)
        return choose_geometry(Criteria("LinearScan", 2, 4, aligned, *arguments)).looks_back

    assert looks_back(8, 4096, 1536)  # 192 chains on 132 multiprocessors
    assert not looks_back(8, 2048, 1536)
    assert not looks_back(11, 4096, 768)  # 132
    assert not looks_back(64, 4096, 512)  # 512 are near four for each
    assert not looks_back(300, 4096, 32)  # which have half the channels of a tile
    assert looks_back(8, 4096, 1536, aligned=1)
    assert not looks_back(8, 4096, 1536, packed=True)
    assert not looks_back(8, 4096, 1536, "L4")  # whose shared memory does not hold two such tiles


def test_a_long_scan_of_rows_that_share_lines_looks_back():
    def looks_back(itemsize, aligned, *shape, packed=False):
        arguments = (2, itemsize, aligned, True, *shape, GPUS["H200"], packed)
        return choose_geometry(Criteria("LinearScan", *arguments)).looks_back

    assert looks_back(4, 4, 97, 1248, 216)
    assert looks_back(4, 4, 1, 2044, 6444, packed=True)
    assert not looks_back(4, 4, 97, 400, 216)
    assert not looks_back(4, 4, 97, 1248, 224)  # whole lines
    assert looks_back(4, 2, 97, 1248, 218)
    assert not looks_back(4, 2, 400, 1248, 62)  # which one group has
    assert not looks_back(2, 4, 97, 1248, 732)
    assert looks_back(2, 1, 97, 1248, 731)
    assert looks_back(2, 2, 97, 1248, 730)


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_tensor_maps_copy_rows_of_16_bits_that_share_lines_where_blocks_stream(gpu):
    def mapped(*shape, aligned=8, **settings):
        scan = Criteria("LinearScan", 2, 2, aligned, True, *shape, GPUS[gpu], **settings)
        return choose_geometry(scan).mapped

    for shape in ((25, 2472, 1000), (97, 1248, 216), (12, 3000, 1992)):
        assert mapped(*shape)
        assert not mapped(*shape, packed=True)
        assert not mapped(*shape, resets=True)
    assert not mapped(25, 400, 1000)
    assert not mapped(25, 2472, 1024)  # whole lines
    assert not mapped(97, 1248, 212, aligned=4)
    assert not mapped(8, 2048, 1000)  # a block for each multiprocessor


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_16_bit_scans_of_unevenly_many_chains_look_back(gpu):
    def looks_back(*shape):
        return choose_geometry(Criteria("LinearScan", 2, 2, 8, True, *shape, GPUS[gpu])).looks_back

    assert looks_back(20, 2819, 256)  # 160 chains on 132 multiprocessors
    assert looks_back(10, 2076, 512)
    assert not looks_back(20, 1000, 256)
    assert not looks_back(40, 4000, 256)  # 320


def test_lanes_have_several_channels_of_rows_that_begin_anywhere():
    def chosen(itemsize, inputs, *shape, aligned=1, **settings):
        element = "LinearScanBackward" if inputs == 3 else "LinearScan"
        g = choose_geometry(Criteria(element, inputs, itemsize, aligned, True, *shape, GPUS["H200"], **settings))
        return g.vec, g.lanes, g.warps, g.rows, "looks back" if g.looks_back else "turns" if g.chained else "streams"

    assert chosen(2, 2, 3265, 3, 7937) == (4, 32, 1, 4, "streams")
    assert chosen(2, 2, 2888, 61, 105)[:2] == (4, 32)
    assert chosen(4, 3, 43, 111, 1663)[:2] == (2, 32)
    for itemsize, rows in ((2, (16, 12)), (4, (12, 8))):  # putting single elements together takes registers
        for inputs in (2, 3):
            assert chosen(itemsize, inputs, 3, 5000, 1001) == (2, 32, 8, rows[inputs - 2], "looks back")
    assert chosen(2, 2, 8, 4096, 1001) == chosen(2, 2, 32, 2048, 513) == (2, 32, 8, 16, "looks back")
    assert chosen(2, 2, 1, 1 << 20, 33) == (1, 32, 8, 32, "looks back")  # a single chain, with longer tiles
    for sequences, vec in ((16, 2), (17, 4)):  # four groups of 128 channels: half as many as multiprocessors, or more
        assert chosen(2, 3, sequences, 40, 487)[0] == vec
    assert chosen(2, 2, 1, 298775, 481, packed=True)[0] == 2  # which other sequences cut short
    assert chosen(4, 2, 1, 193200, 49, packed=True)[0] == chosen(4, 2, 1806, 56, 29)[0] == 1
    assert chosen(2, 2, 8, 4096, 1001, by_offsets=True)[0] == 1
    assert chosen(2, 2, 2, 100000, 386, aligned=2)[0] == 2
    for shape in ((8, 20000, 70), (3, 5000, 1002)):  # pairs of 32 bits are copied as one
        assert chosen(4, 2, *shape, aligned=2)[::3] == (2, 12)
        assert chosen(4, 3, *shape, aligned=2)[::3] == (2, 8)
    assert chosen(8, 2, 8, 4096, 1001)[0] == 1


def test_no_lanes_are_idle_where_half_as_wide_groups_have_none():
    for shape, itemsize in (((1, 72578, 96), 2), ((4, 65536, 48), 4)):
        g = choose_geometry(Criteria("LinearScan", 2, itemsize, 8, True, *shape, GPUS["H200"]))
        assert (g.lanes, g.looks_back) == (16, True)
    for sequences, steps, lanes in ((1, 5000, 32), (1, 1 << 20, 8), (8, 60000, 8), (16, 60000, 32)):
        for channels in (34, 48):  # a quarter as wide over many tiles of few sequences
            g = choose_geometry(Criteria("LinearScan", 2, 2, 2, False, sequences, steps, channels, GPUS["H200"]))
            assert (g.lanes, g.looks_back) == (lanes, True)


def test_sequences_of_few_channels_are_chained_where_they_are_fewer_than_lanes():
    for sequences, steps, looks_back, narrow in ((388, 6716, True, 8), (388, 931, False, 8), (996, 6716, False, 0)):
        g = choose_geometry(Criteria("LinearScan", 2, 4, 4, True, sequences, steps, 8, GPUS["H200"]))
        assert (g.looks_back, g.narrow) == (looks_back, narrow)


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_16_bit_rows_of_two_lines_fill_the_last_wave(gpu):
    def group(*shape):
        return choose_geometry(Criteria("LinearScan", 2, 2, 8, True, *shape, GPUS[gpu])).group

    assert group(64, 256, 512) == group(347, 113, 2048) == 128
    assert group(70, 567, 448) == 32  # 280 groups of 128 for 264 blocks


def test_16_bit_layers_look_back_with_tiles_as_long_as_registers_hold():
    for resets in (False, True):
        for steps, element, inputs, rows in ((1024, "Generated2", 2, 16), (1024, "Generated2Backward", 4, 8)):
            g = choose_geometry(Criteria(element, inputs, 2, 8, False, 16, steps, 256, GPUS["H200"], resets=resets))
            assert (g.rows, g.looks_back) == (rows, True)


def test_many_sequences_of_few_steps_have_a_warp_each():
    for gpu, itemsize in itertools.product(GPUS, (2, 4)):
        for shape in ((3426, 7, 320), (680, 7, 1792), (2048, 32, 512), (4096, 4, 1024)):
            for element, inputs in (("LinearScan", 2), ("LinearScanBackward", 3)):
                g = choose_geometry(Criteria(element, inputs, itemsize, 16 // itemsize, True, *shape, GPUS[gpu]))
                assert (g.vec * itemsize, g.lanes, g.warps, g.rows) == (8, 32, 1, 4)
                assert g.stages == (1 if shape[1] == 4 else 2)


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_a_block_for_each_multiprocessor_streams_lines_or_pairs_of_them(gpu):
    def vec(itemsize, *shape):
        g = choose_geometry(Criteria("LinearScan", 2, itemsize, 16 // itemsize, True, *shape, GPUS[gpu]))
        return g.vec if not g.chained and (g.warps, g.resident, g.cluster) == (8, 1, 1) else None

    assert vec(4, 8, 4096, 1024) == vec(4, 2, 2048, 4096) == 2
    assert vec(2, 8, 4096, 1024) == vec(2, 2, 2048, 4096) == 2
    assert vec(2, 8, 2048, 2048) == vec(2, 32, 2048, 512) == 4
    assert vec(4, 64, 2048, 512) is vec(4, 2, 2048, 512) is vec(2, 2, 2048, 512) is None


def test_several_sequences_of_few_channels_look_back_over_whole_rows():
    for sequences, channels, itemsize in itertools.product((3, 20, 100), (11, 19, 24), (2, 4)):
        for element, inputs, rows in (("LinearScan", 2, 31), ("LinearScanBackward", 3, 21)):
            arguments = (inputs, itemsize, 1, True, sequences, 60000, channels, GPUS["H200"])
            g = choose_geometry(Criteria(element, *arguments))
            assert (g.narrow, g.rows, g.looks_back) == (channels, rows, True)
            assert choose_geometry(Criteria(element, *arguments, packed=True)).narrow == 0


def test_segments_of_a_warp_read_other_banks():
    """In tiles of whole rows that look back, segments begin at least as many banks apart as a row takes."""
    for element, channels in itertools.product(("LinearScan", "LinearScanBackward"), range(3, 8)):
        g = choose_geometry(Criteria(element, INPUTS[element], 4, 1, True, 300, 30000, channels, GPUS["H200"]))
        assert g.looks_back
        assert channels <= g.rows * channels % 32 <= 32 - channels


def test_a_mask_of_resets_changes_no_tile_of_whole_or_odd_rows_of_a_linear_scan():
    whole = (300, 30000, 4), (8, 375000, 16), (20, 60000, 24), (17, 154131, 24), (300, 60000, 3), (388, 9000, 8)
    turns = (1, 1 << 18, 16), (2, 300000, 24), (1, 400000, 11)
    shapes = *whole, *turns, (8, 181818, 33), (16, 4096, 1537), (2, 60000, 129)
    for element, itemsize, shape in itertools.product(("LinearScan", "LinearScanBackward"), (2, 4), shapes):
        aligned = min(4, shape[2] & -shape[2]) if shape in turns and itemsize == 4 else 1
        scan = Criteria(element, INPUTS[element], itemsize, aligned, True, *shape, GPUS["H200"])
        geometry = choose_geometry(scan)
        assert geometry.looks_back == (shape not in turns)
        assert bool(geometry.narrow) == (shape in whole + turns)
        assert choose_geometry(scan._replace(resets=True)) == geometry


def test_even_numbers_of_few_16_bit_channels_are_scanned_in_pairs():
    for element, channels in itertools.product(("LinearScan", "LinearScanBackward"), range(2, 31, 2)):
        shapes = {"streams": (4000, 300, channels), "turns": (8, 60000, channels), "looks back": (9, 60000, channels)}
        for kind, shape in shapes.items():
            scan = Criteria(element, INPUTS[element], 2, 2, True, *shape, GPUS["H200"])
            geometry = choose_geometry(scan)
            assert (geometry.vec, geometry.narrow, geometry.chained) == (2, channels, kind != "streams")
            assert geometry.looks_back == (kind == "looks back")
            assert channels <= geometry.group < 2 * channels + 1
            assert choose_geometry(scan._replace(resets=True)).vec == 2
            for other in ({"aligned": 1}, {"itemsize": 4}, {"packed": True}, {"element": "LogLinearScan", "inputs": 2}):
                different = choose_geometry(scan._replace(**other))
                assert different.vec == 1 or not different.narrow
        assert choose_geometry(scan._replace(sequences=8, resets=True)).looks_back
        short = choose_geometry(scan._replace(sequences=1, steps=20000 // channels))
        assert (short.rows, short.looks_back) == (11, True)  # one tile for each block


def test_several_sequences_of_few_channels_look_back_sooner_with_a_mask_of_resets():
    for sequences, channels, element in itertools.product(
        (1, 2, 8), (1, 2, 3, 8), ("LinearScan", "LinearScanBackward")
    ):
        scan = Criteria(element, INPUTS[element], 4, 1, True, sequences, 1 << 20, channels, GPUS["H200"])
        assert not choose_geometry(scan).looks_back
        assert choose_geometry(scan._replace(resets=True)).looks_back == (sequences > 1)


def test_a_block_with_a_multiprocessor_to_itself_has_all_registers():
    for (batch, channels), resident in {(8, 1536): 1, (16, 1536): 2}.items():
        for resets in (False, True):
            arguments = (2, 2, 8, True, batch, 4096, channels, GPUS["H200"], False, resets)
            assert choose_geometry(Criteria("LinearScan", *arguments)).resident == resident


def test_aligned_rows_are_copied_in_pieces_of_16_bytes():
    for itemsize in (2, 4, 8):
        geometry = choose_geometry(
            Criteria("LinearScan", 2, itemsize, 16 // itemsize, True, 128, 512, 256, GPUS["H200"])
        )
        assert not geometry.chained
        assert geometry.copies_16_bytes(itemsize, 16 // itemsize)
        assert not geometry.copies_16_bytes(itemsize, 8 // itemsize)


def test_geometries_fit_the_gpu():
    for device in GPUS.values():
        for (element, inputs), itemsize, shape in itertools.product(
            INPUTS.items(),
            (2, 4, 8),
            ((8, 4096, 1536), (1, 1 << 20, 64), (1, 1 << 24, 1), (3, 5000, 1000), (1, 1, 1), (9999, 7, 3)),
        ):
            for contiguous in (False, True):
                geometry = choose_geometry(Criteria(element, inputs, itemsize, 1, contiguous, *shape, device))
                assert geometry.narrow in (0, shape[2])
                assert geometry.lanes * geometry.vec >= min(geometry.narrow, shape[2])
                assert 32 * geometry.warps <= 1024
                if shape[0] * shape[2] >= 64 * device.processors:
                    assert not geometry.chained or geometry.looks_back


def narrow(sequences, steps, channels, itemsize=4, gpu="H200"):
    return choose_geometry(Criteria("LinearScan", 2, itemsize, 1, True, sequences, steps, channels, GPUS[gpu]))


def test_narrow_sequences_have_as_many_warps_as_keep_the_gpu_busy():
    for (sequences, steps, channels), warps in {
        (20000, 130, 3): 1,
        (1_000_000, 16, 1): 1,
        (700, 130, 3): 2,  # few
        (400, 300, 2): 4,
        (150, 300, 1): 8,
        (150, 20, 1): 1,  # of few steps, which are not enough for more
        (4000, 600, 7): 2,  # long
        (4000, 1000, 7): 4,
        (4000, 3000, 7): 8,
    }.items():
        for gpu in ("H100", "H200"):
            g = narrow(sequences, steps, channels, gpu=gpu)
            assert (g.narrow, g.chained, g.warps, g.resident) == (channels, False, warps, 16 // warps)


def test_short_sequences_of_few_channels_are_joined():
    """To as many steps as take a block longer than to begin, in blocks that keep the GPU busy."""
    for (sequences, steps, channels, itemsize), joined in {
        (1 << 20, 16, 1, 4): 64,
        (100_000, 130, 1, 2): 10,
        (3001 * 4, 12, 3, 4): 4,  # their number has no other divisor
        (3001, 12, 3, 4): 1,
        (2000, 16, 1, 4): 1,  # or too few blocks would be left
        (2 * 1320, 16, 1, 4): 2,
        (1 << 20, 1025, 1, 4): 1,  # which are long enough
        (1 << 20, 16, 8, 4): 16,
        (1 << 20, 16, 32, 4): 1,
        (1 << 20, 0, 1, 4): 1,
    }.items():
        criteria = Criteria("LinearScan", 2, itemsize, 1, True, sequences, steps, channels, GPUS["H200"])
        assert sequences_joined(criteria) == joined
        assert sequences_joined(criteria._replace(contiguous=False)) == 1


def test_sequences_of_up_to_31_channels_are_narrow_unless_long():
    """Of many steps, rows of 16 or 32 bytes and more are copied as fast otherwise."""
    for channels, steps, is_narrow in ((31, 40, True), (12, 2000, True), (32, 40, False), (31, 2000, False)):
        assert narrow(4000, steps, channels).narrow == channels * is_narrow
    assert narrow(4000, 20000, 7).narrow == 7  # which no other geometry suits


def test_rows_of_narrow_sequences_have_few_bank_conflicts_and_leave_few_threads_without_steps():
    for channels, itemsize, rows, conflicts in (
        (3, 4, 13, 0),
        (3, 4, 11, 2),
        (6, 2, 11, 2),
        (7, 4, 9, 3),
        (7, 4, 8, 0),
    ):
        tile = Geometry(1, 8 if channels > 4 else 4, 1, rows, narrow=channels)
        assert _bank_conflicts(tile, itemsize) == conflicts
    for channels, itemsize, steps in itertools.product(range(1, 8), (2, 4), (60, 130, 300, 600, 1000)):
        g = narrow(20000, steps, channels, itemsize)
        assert _bank_conflicts(g, itemsize) <= 1
        assert steps < 130 or g.tile * -(-steps // g.tile) < 1.3 * steps
    assert narrow(9320, 600, 3).rows == 13  # which took less time than 15, whose tiles are as many, with conflicts
    for channels in range(3, 8):  # lengths that change share kernels
        assert len({narrow(20000, steps, channels).rows for steps in range(100, 1001, 10)}) <= 6


def test_few_long_narrow_sequences_are_chained_and_those_of_a_last_wave_that_is_not_filled():
    for (sequences, steps, channels), chained in {
        (30, 3000, 3): True,
        (70, 3000, 7): True,
        (70, 1000, 7): False,
        (132, 3000, 7): False,
        (264, 30000, 7): False,  # two blocks a multiprocessor
        (300, 30000, 7): True,
        (300, 3000, 7): False,
    }.items():
        assert narrow(sequences, steps, channels).chained == chained


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("element", "inputs"), [("LinearScan", 2), ("LinearScanBackward", 3)])
def test_tiles_of_two_inputs_a_register_are_longer_where_shared_memory_holds_them(element, inputs, gpu):
    longer = set()
    for shape in ((1, 1 << 24, 1), (2, 1 << 22, 4), (1, 3000000, 7), (4, 1 << 20, 8), (1, 1 << 20, 16)):
        scan = Criteria(element, inputs, 2, 1, True, *shape, GPUS[gpu])
        geometry = choose_geometry(scan)
        if inputs * geometry.rows > 40:
            longer.add(shape[2])
            assert scan.fits(geometry)
    assert 1 in longer
    assert (8 in longer) == (gpu not in ("A100", "L4") or inputs == 3)


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_what_was_measured_to_be_best_is_chosen(name):
    """Lanes, warps and rows of the fastest on an H200, and how blocks find their state."""
    measured = {
        ((1, 65536, 256), 4): (32, 16, 16, "turns"),
        ((1, 1 << 20, 64), 4): (32, 16, 16, "turns"),
        ((4, 1 << 20, 8), 4): (8, 8, 17, "turns"),
        ((1, 1 << 24, 1), 4): (1, 8, 19, "turns"),
        ((1, 1 << 24, 1), 2): (1, 8, 31, "turns"),
        ((1, 3000000, 7), 2): (8, 16, 32, "turns"),
        ((4, 1 << 20, 8), 2): (4, 16, 15, "turns"),
        ((1, 1 << 18, 16), 2): (8, 16, 11, "turns"),  # of 15 rows, a few tiles would begin a third wave
        ((1, 3000000, 7), 4): (8, 16, 17, "turns"),
        ((1, 1 << 18, 16), 4): (16, 16, 17, "turns"),
        ((17, 154131, 24), 4): (32, 8, 31, "looks back"),
        ((137, 36559, 4), 4): (4, 8, 31, "looks back"),
        ((401, 80282, 4), 2): (2, 8, 23, "looks back"),
        ((3, 5000, 1000), 4): (32, 8, 32, "looks back"),
        ((3, 5000, 1000), 2): (32, 8, 32, "looks back"),
        ((2, 100000, 384), 4): (32, 16, 32, "looks back"),
        ((2, 100000, 384), 2): (32, 16, *((16, "turns") if name == "H200" else (32, "looks back"))),
        ((1, 60000, 1536), 2): (32, 16, 32, "looks back"),
        ((1, 60000, 2000), 2): (32, 8, 32, "looks back"),  # of rows that share lines
        ((1, 20000, 1000), 2): (32, 8, 32, "looks back"),
        ((1, 20000, 1000), 4): (32, 8, 32, "looks back"),
        ((2, 9001, 1000), 2): (32, 8, 32, "looks back"),
        ((8, 4096, 1536), 4): (32, 8, 16, "looks back"),
        ((8, 65536, 1536), 4): (32, 8, 16, "looks back"),
        ((8, 512, 1536), 4): (32, 4, 8, "streams"),
        ((128, 512, 256), 4): (32, 4, 8, "streams"),
    }
    with_resets = {
        ((1, 65536, 256), 4): (32, 8, 32, "looks back"),
        ((1, 1 << 20, 64), 4): (32, 16, 16, "turns"),
        ((4, 1 << 20, 8), 4): (8, 8, 31, "looks back"),
        ((1, 3000000, 7), 4): (8, 16, 17, "turns"),
        ((1, 1 << 18, 16), 4): (16, 16, 17, "turns"),
        ((1, 1 << 24, 1), 4): (1, 8, 19, "turns"),
        ((8, 4096, 1536), 4): (32, 8, 16, "looks back"),
        ((2, 100000, 384), 2): (32, 16, 28, "looks back"),
        ((2, 9001, 1000), 2): (32, 8, 28, "looks back"),
        ((1, 65536, 256), 2): (32, 8, 28, "looks back"),
    }
    for resets, cases in ((False, measured), (True, with_resets)):
        for (shape, itemsize), want in cases.items():
            aligned = min(16 // itemsize, shape[2] & -shape[2])
            g = choose_geometry(Criteria("LinearScan", 2, itemsize, aligned, True, *shape, GPUS[name], resets=resets))
            kind = "streams" if not g.chained else "looks back" if g.looks_back else "turns"
            assert (g.lanes, g.warps, g.rows, kind) == want
    backward = choose_geometry(Criteria("LinearScanBackward", 3, 2, 8, True, 3, 2000, 960, GPUS[name]))
    assert (backward.rows, backward.looks_back) == (16, True)
    backward = choose_geometry(Criteria("LinearScanBackward", 3, 4, 4, True, 3, 5000, 1000, GPUS[name]))
    assert (backward.warps, backward.rows, backward.looks_back) == (8, 20, True)
    for itemsize, want in ((2, (2, 8, 16)), (4, (1, 8, 20))):  # rows that share lines
        for resets in (False, True)[: 4 // itemsize]:
            scan = Criteria("LinearScanBackward", 3, itemsize, 8, True, 1, 20000, 1000, GPUS[name], resets=resets)
            backward = choose_geometry(scan)
            assert (backward.vec, backward.warps, backward.rows) == want


@pytest.mark.parametrize("gpu", GPUS)
def test_tiles_stay_in_shared_memory_where_it_holds_all(gpu):
    device, found = GPUS[gpu], []
    many = device.processors // 6  # sequences, of five tiles each
    others = (1, 1100, 65), (3, 5000, 1001), (64, 2048, 255), (2, 900, 1023)
    for sequences, steps, channels in ((8, 2048, 255), (many, 300, 65), *others):
        for element, inputs in (("LinearScan", 2), ("LinearScanBackward", 3)):
            g = choose_geometry(Criteria(element, inputs, 2, 1, True, sequences, steps, channels, device))
            if g.stays:
                found.append((sequences, channels))
                assert g.narrow == channels <= g.lanes
                assert g.threads <= 1024
                assert sequences * -(-steps // g.tile) <= g.resident * device.processors
                assert g.resident * (g.shared_bytes(inputs, 0, 2) + 1024) <= device.shared
                assert g.companions(sequences, -(-steps // g.tile), 4, device.processors) == -(-steps // g.tile)
    assert (many, 65) in found
    assert (1, 65) not in found  # which leaves most multiprocessors without a block
    assert ((8, 255) in found) == (gpu in ("H100", "H200", "B200"))
    assert not {(3, 1001), (64, 255)} & set(found)


def test_rows_copied_in_pieces_do_not_share_any():
    for lanes, stride in itertools.product((32, 64), range(33, 300)):
        g = Geometry(1, lanes, 8, 16, True, 2, 0, 1, True)
        pitch, same, other = g.pitches(2, [stride, stride + 8, stride + 3], True)
        assert pitch == same
        assert (pitch - 2 * stride) % 16 == (other - 2 * (stride + 3)) % 16 == 0
        for first in range(0, 16, 2):
            end = -(-(first + g.group * 2) // 16) * 16  # of the row's last piece
            assert (first + pitch) // 16 * 16 >= end
        assert g.pitches(2, [stride], False) == g._replace(narrow=stride).pitches(2, [stride], True) == (0,)
        assert (g.pitches(4, [stride], True)[0] - 4 * stride) % 16 == 0


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("hidden", [64, 256, 1024])
@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_a_training_over_changing_lengths_compiles_four_kernels(gpu, hidden, itemsize):
    chosen = {
        (element, choose_geometry(Criteria(element, inputs, itemsize, 8, False, batch, steps, hidden, GPUS[gpu])))
        for element, inputs in (("Generated2", 2), ("Generated2Backward", 4))
        for batch in range(1, 65, 7)
        for steps in range(5, 2049, 31)
    }
    assert len(chosen) <= 4
