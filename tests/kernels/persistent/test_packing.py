"""Packed weights are the matrix, and fit where their geometry says so."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from gpus import H100
from ostinato.kernels.persistent.cuda import packing
from ostinato.kernels.persistent.cuda.heuristics import search
from ostinato.kernels.persistent.cuda.heuristics.cells import CELLS
from ostinato.kernels.persistent.cuda.heuristics.costs import microseconds
from ostinato.kernels.persistent.cuda.heuristics.fitting import fill_registers
from ostinato.kernels.persistent.cuda.heuristics.geometry import Geometry
from ostinato.kernels.persistent.plan import GATES
from persistent_cases import STREAMED
from persistent_geometries import candidates, random_mask, streamed


def packed_matrix(mask, chosen):
    """The rows of each block as its packing has them, the columns in order, of the numbers of the mask's places."""
    pack = packing.pack(mask, chosen, H100)
    chosen, numbers = pack.geometry, pack.indices
    places = pack.places.long() & 0xFFFF
    order = torch.cat((packing._column_of_place(chosen), torch.full((packing.ZERO_PLACES,), chosen.slice)))
    matrix = torch.zeros(chosen.blocks, chosen.rows + 128, chosen.slice + 1, dtype=torch.int64)
    if chosen.path == "sparse":
        spans = pack.spans.int() & 0xFFFF
        for block, row in itertools.product(range(chosen.blocks), range(chosen.rows)):
            first, last = int(spans[block, row]) & 255, int(spans[block, row]) >> 8
            mine = (block, slice(None), slice(None), slice(first, last + 1))
            matrix[block, row].index_add_(0, order[places[mine].flatten()], numbers[mine].flatten().long())
        return pack, matrix
    tiles = numbers.permute(0, 1, 2, 6, 3, 5, 4, 7).flatten(5).flatten(3, 4)  # (blocks, warps, tiles, 16, columns)
    columns = order[places.flatten(2)[..., : chosen.tiles * chosen.tile_columns]].view(*tiles.shape[:3], -1)
    for block, warp, tile in itertools.product(*map(range, tiles.shape[:3])):
        turn = sum(end <= tile for end in itertools.accumulate(chosen.strips.tiles))
        strip = (turn * packing.WARPS + warp) // chosen.strips.shares
        rows = matrix[block, strip * 16 : strip * 16 + 16]
        rows.index_add_(1, columns[block, warp, tile], tiles[block, warp, tile].long())
    return pack, matrix


@pytest.mark.parametrize(
    ("path", "cell", "hidden", "density", "processors", "turns"),
    [
        ("block", "rnn_tanh", 100, 0.2, 132, 1),
        ("block", "gru", 400, 0.1, 132, 1),
        ("block", "lstm", 400, 0.3, 132, 1),
        ("block", "lstm", 400, 0.1, 8, 2),
        ("sparse", "gru", 133, 0.2, 132, 1),
        ("sparse", "lstm", 70, 0.1, 8, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("backward", [False, True])
def test_a_packing_is_the_matrix(path, cell, hidden, density, processors, turns, dtype, backward):
    device = SimpleNamespace(**{**vars(H100), "multi_processor_count": processors})
    block = (16, 1) if path == "block" else (1, 1)
    if backward:  # blocks of 16 rows and 1 column lie across the strips: nearly all columns of a strip have a weight
        hidden //= 2
    mask = random_mask(cell, hidden, density, block)
    found = candidates(path, cell, hidden, 3, dtype, density, block, properties=device, backward=backward)
    chosen = min((g for g in found if g.cluster == found[-1].cluster), key=lambda g: microseconds(g, 3))
    pack, matrix = packed_matrix(mask, chosen)
    chosen = pack.geometry
    assert path == "sparse" or backward or len(chosen.strips.tiles) >= turns
    numbers = torch.where(mask, torch.arange(1, mask.numel() + 1).view(mask.shape), 0)
    at, row, column = torch.meshgrid(*map(torch.arange, (chosen.blocks, chosen.rows, chosen.slice)), indexing="ij")
    if backward:  # the definition, see matrix.cuh
        k = at % chosen.cluster * chosen.slice + column
        gate, unit, other = k // chosen.pitch, k % chosen.pitch, at // chosen.cluster * chosen.rows + row
    else:
        gate, unit, other = row // chosen.units, at * chosen.units + row % chosen.units, column
    exists = (gate < GATES[cell]) & (unit < hidden) & (other < hidden)
    expected = torch.where(exists, numbers.flatten()[((gate * hidden + unit) * hidden + other).where(exists, 0)], 0)
    assert torch.equal(matrix[:, : chosen.rows, : chosen.slice], expected)
    assert not matrix[:, chosen.rows :].any()
    assert not matrix[..., chosen.slice].any()


@pytest.mark.parametrize(("path", "block"), [("sparse", (1, 1)), ("block", (16, 1)), ("block", (8, 4))])
@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("backward", [False, True])
def test_whatever_a_plan_may_choose_can_be_packed(cell, path, block, backward):
    torch.manual_seed(0)  # the choice goes by what masks nearly always need
    small = SimpleNamespace(**{**vars(H100), "multi_processor_count": 9})
    mask = random_mask(cell, 200, 0.1, block)
    found = candidates(path, cell, 200, 12, torch.float32, 0.1, block, properties=small, backward=backward)
    assert found
    for chosen in found:
        packed = packing.pack(mask, chosen, small)
        assert packed.geometry.blocks * chosen.groups <= 9


@pytest.mark.parametrize(("cell", "block"), [("lstm", (1, 1)), ("gru", (1, 1)), ("rnn_tanh", (8, 4)), ("gru", (8, 4))])
def test_the_sparse_kernel_holds_what_its_estimate_says(cell, block):
    """Evenly random masks of a small GPU's largest layer fit on the chip, and of one a tenth wider do not."""
    torch.manual_seed(0)
    small = SimpleNamespace(**{**vars(H100), "multi_processor_count": 9, "L2_cache_size": 0})
    fitting = [
        n for n in range(512, 3000, 16) if candidates("sparse", cell, n, 4, torch.float16, 0.1, block, properties=small)
    ]
    largest = max(fitting)
    for hidden, fits in ((16 * (largest * 94 // 1600), True), (16 * (largest * 11 // 160), False)):
        start = Geometry("sparse", CELLS[cell], hidden, torch.float16, 0, 0, 0, False, True)
        coverings = [g for g in search._coverings(start, 4, small, 1) if g.columns == 4 and g.groups == 1]
        assert coverings or not fits
        mask = random_mask(cell, hidden, 0.1, block)
        for chosen in coverings[:1]:
            if not fits:
                with pytest.raises(MemoryError, match="do not fit on the chip in the sparse kernel"):
                    packing.pack(mask, chosen, small)
                continue
            packed = packing.pack(mask, chosen, small)
            estimate = candidates("sparse", cell, hidden, 4, torch.float16, 0.1, block, properties=small)[0].tiles
            assert 0.85 * estimate <= packed.geometry.tiles <= 1.02 * estimate


def test_a_mask_with_all_weights_in_few_units_is_not_packed():
    """Each block would have as many as the fullest one, most of them read from L2 at every step."""
    found = candidates("sparse", "lstm", 2304, 4, torch.float16, 0.1, (1, 1))
    mask = torch.zeros(4, 2304, 2304, dtype=torch.bool)
    mask[:, :230] = True
    with pytest.raises(MemoryError, match="do not fit on the chip in the sparse kernel"):
        packing.pack(mask.flatten(0, 1), min(found, key=lambda g: microseconds(g, 4)), H100)


@pytest.mark.parametrize("layer", [layer for path, layer in STREAMED if path == "sparse"], ids=lambda layer: layer[0])
def test_what_is_streamed_is_what_the_mask_leaves_no_room_for(layer):
    """However much the plan had expected."""
    limit = H100.shared_memory_per_block_optin
    planned, *_ = streamed("sparse", *layer)
    for tiles in range(100, 300, 7):
        filled = fill_registers(planned._replace(tiles=tiles), limit)
        assert filled == fill_registers(planned._replace(tiles=tiles, streamed=0), limit)
        assert filled.shared_bytes <= limit < filled.shared_bytes + filled.tile_bytes or not filled.streamed
