"""The persistent CUDA kernels against the loop over time in float64, over cells, dtypes, sizes and ways to multiply."""

import itertools
import os
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ostinato
from ostinato.kernels import nvrtc
from ostinato.kernels.persistent import cuda, geometry, operators, packing, reference, search
from ostinato.kernels.persistent.costs import microseconds
from ostinato.kernels.persistent.geometry import Geometry
from ostinato.kernels.persistent.plan import GATES, Call, Plan

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
TOLERANCE = {f32: 2e-6, f16: 2e-3, bf16: 1.5e-2}
H100 = SimpleNamespace(
    multi_processor_count=132,
    shared_memory_per_block_optin=232448,
    regs_per_multiprocessor=65536,
    L2_cache_size=50 << 20,
    major=9,
)


def candidates(path, cell, hidden, batch, dtype, density=1.0, block=None, *, properties=H100, backward=False):
    start = Geometry(path, cell, hidden, dtype, 0, 0, 0, backward)
    return list(search.candidates(start, batch, density, block, properties))


def candidate(path, cell, hidden, batch, *others, **options):
    """The geometry that the plan would choose if there were only this path."""
    found = candidates(path, cell, hidden, batch, *others, **options)
    return min(found, key=lambda g: microseconds(g, batch))


def random_mask(cell, hidden, density, block, device="cpu"):
    down, across = -(-hidden // block[0]), -(-hidden // block[1])
    kept = torch.rand(GATES[cell], down, across, device=device) < density
    kept = kept.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return kept[:, :hidden, :hidden].reshape(-1, hidden)


class Case:
    """A layer with random weights, and its inputs."""

    def __init__(self, path, cell, hidden, batch, dtype, density=1.0, block=None, back=None):
        self.cell, self.hidden, self.batch, self.dtype, self.device = (
            cell,
            hidden,
            batch,
            dtype,
            torch.device("cuda", 0),
        )
        bound = (hidden * density) ** -0.5
        self.weight = self.uniform(GATES[cell] * hidden, hidden) * bound
        self.bias = self.uniform(GATES[cell] * hidden) if hidden % 2 else None
        self.mask = None
        if density < 1:
            self.mask = random_mask(cell, hidden, density, block, self.device)
            self.weight = self.weight * self.mask
        layer, properties = (cell, hidden, batch, dtype, density, block), torch.cuda.get_device_properties(0)
        forward = candidate(path, *layer, properties=properties)
        if back is None:  # what is kept in strips forward may not fit in strips of the transposed matrix
            paths = (path, "dense") if path == "block" else (path,)
            ways = (candidates(name, *layer, properties=properties, backward=True) for name in paths)
            back = min(itertools.chain(*ways), key=lambda g: microseconds(g, batch), default=None)
        self.is_trained = back is not None
        self.plan = Plan(path, 0, 0, 0, "", cuda.Geometries(forward, back))

    def uniform(self, *shape):
        return (torch.rand(shape, device=self.device) * 2 - 1).to(self.dtype)

    def inputs(self, steps, batch=None, with_state=True, packed=False, resets=0.0):
        """Arguments of forward between the projected input and what the kernels are told beside them."""
        batch = batch or self.batch
        sizes = [batch] * steps
        if packed:
            lengths = [steps, *(random.randint(1, steps) for _ in range(batch - 1))]
            sizes = [sum(length > t for length in lengths) for t in range(steps)]
        offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=self.device)
        projected = torch.randn(sum(sizes), GATES[self.cell] * self.hidden, device=self.device).to(self.dtype)
        h = self.uniform(batch, self.hidden) if with_state else None
        c = torch.randn_like(h) if with_state and self.cell == "lstm" else None
        begins = torch.rand(sum(sizes), device=self.device) < resets if resets else None
        return projected, h, c, offsets if packed else None, begins, batch

    def forward(self, inputs, reverse, kernels=cuda, wide=lambda x: x):
        projected, h, c, offsets, resets, batch = inputs
        projected = projected.clone()  # which a forward may write to
        states = wide(projected), wide(h), wide(c), wide(self.weight), wide(self.bias), self.mask
        return kernels.forward(*states, offsets, resets, batch, self.cell, reverse, self.plan, True)

    def gradients(self, inputs, reverse):
        """What backward gets; the states and arguments of gates are any numbers."""
        projected, h, c, offsets, resets, batch = inputs
        states = self.uniform(len(projected), self.hidden)
        rnn, gru, lstm = self.cell.startswith("rnn"), self.cell == "gru", self.cell == "lstm"
        return (
            states if rnn else projected,
            self.uniform(*states.shape) if gru else None,
            states,
            torch.randn_like(states, dtype=torch.float32) if lstm else None,
            c,
            self.weight,
            self.mask,
            torch.randn_like(states),
            None if h is None else torch.randn_like(h),
            None if c is None else torch.randn_like(c),
            *(offsets, resets, batch, self.cell, reverse, self.plan),
        )

    def both(self, inputs, gradients, reverse, kernels=cuda, wide=lambda x: x):
        """All that forward and backward return; forward alone where no kernel fits backward."""
        results = self.forward(inputs, reverse, kernels, wide)
        return (*results, *kernels.backward(*map(wide, gradients))) if self.is_trained else results

    def expected(self, inputs, reverse):
        return self.forward(inputs, reverse, reference, double)

    def check(self):
        torch.cuda.synchronize()
        cuda.check(self.plan.geometry.forward, 0)


def double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def errors(found, expected):
    """Of all results that both have: of a GRU a kernel may keep what the reference has no use for.

    They are relative, but for a result of one or a few numbers that have nearly cancelled each other.
    """
    pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None]
    return [float((x.double() - y).norm() / y.norm().clamp(min=0.1)) for x, y in pairs]


@pytest.fixture
def nan_memory():
    """Memory that PyTorch hands out is full of NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("path", ["dense", "block", "sparse"])
@pytest.mark.parametrize("backward", [False, True])
def test_kernels_compile_without_a_gpu(path, architecture, backward):
    pytest.importorskip("cuda.core")
    index = ("sm_80", "sm_90", "sm_100").index(architecture)
    properties = SimpleNamespace(**{**vars(H100), "major": int(architecture[3:]) // 10})
    for cell, dtype in itertools.islice(zip(CELLS, (f16, f32, bf16, f32), strict=True), index, None, 2):
        found = candidates(path, cell, 130 + index, 5, dtype, 0.3, (16, 1), properties=properties, backward=backward)
        clusters = {g.cluster: g for g in found}
        assert {1, 2} <= set(clusters) <= {1, 2, 4} if backward and properties.major >= 9 else set(clusters) == {1}
        for chosen in clusters.values():
            if path == "sparse":
                chosen = chosen._replace(tiles=20).hold(H100.shared_memory_per_block_optin)
            code = nvrtc.source(*geometry.files(chosen))
            macros = dict(chosen.macros(resets=path != "sparse", packed=backward))
            assert nvrtc.compile_cubin(code, architecture, macros)[:4] == b"\x7fELF"


def packed_matrix(mask, chosen):
    """The rows of each block as its packing has them, the columns in order, of the numbers of the mask's places."""
    pack = packing.pack(mask, chosen, H100.shared_memory_per_block_optin)
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
        turn = sum(end <= tile for end in itertools.accumulate(chosen.share_tiles))
        strip = (turn * packing.WARPS + warp) // chosen.shares
        rows = matrix[block, strip * 16 : strip * 16 + 16]
        rows.index_add_(1, columns[block, warp, tile], tiles[block, warp, tile].long())
    return pack, matrix


@pytest.fixture
def planned_for_an_h100(monkeypatch):
    """As if there were one, with all kernels compiled."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H100)
    monkeypatch.setattr(cuda, "kernels", lambda *_, **__: None)
    cuda._plan_sizes.cache_clear()
    yield
    cuda._plan_sizes.cache_clear()


def plan_of(cell, hidden, batch, dtype, tf32=(False, False), training=True):
    call = Call(torch.device("cuda", 0), cell, hidden, batch, dtype, training, steps=None)
    return cuda.make_plan(call, None, None, tf32)


@pytest.mark.parametrize(
    ("layer", "tf32", "ours"),  # measured on an H200, microseconds a step with all products, ours and cuDNN's
    [
        (("gru", 1024, 16, bf16), (False, False), True),  # 4.0, 16.6
        (("gru", 512, 256, bf16), (False, False), True),  # 14.7, 21.7
        (("lstm", 512, 256, bf16), (False, False), True),  # 18.1, 19.8
        (("gru", 1024, 256, bf16), (False, False), False),  # 45.8, 33.2
        (("gru", 512, 256, f32), (True, True), True),  # 23.0, 45.6
        (("gru", 512, 256, f32), (False, False), True),  # 63.3, 95.2
        (("gru", 2048, 4, f32), (True, True), True),  # 10.2, 49.8: a part of the weights comes from L2
        (("lstm", 2048, 64, f32), (True, True), False),  # 111.1 in cuDNN's
        (("gru", 512, 256, f32), (False, True), False),  # 63.3, 45.6: by default cuDNN rounds and products do not
        (("lstm", 1024, 256, f32), (True, True), False),  # 108.6, 87.7
        (("gru", 128, 16, f32), (True, True), False),  # 2.2 in cuDNN's kernel for small layers
    ],
)
def test_a_layer_is_left_to_torch_where_that_is_faster(planned_for_an_h100, layer, tf32, ours):
    assert (plan_of(*layer, tf32).path != "steps") == ours


@pytest.mark.parametrize("cell", ["rnn_tanh", "gru", "lstm"])
def test_a_thread_of_the_backward_updates_no_more_than_its_registers_hold(cell):
    """With more they were spilled, and 256 sequences took a third longer than in two turns (H200)."""
    for hidden, batch in itertools.product((256, 512, 1024), (16, 256, 512)):
        chosen = search.choose_geometry(cell, hidden, batch, bf16, None, None, H100, backward=True).geometry
        assert -(-chosen.units * chosen.columns // geometry.THREADS) * GATES[cell] <= 8


@pytest.mark.parametrize(("hidden", "batch", "exact"), [(128, 64, True), (512, 1, True), (256, 4, False)])
def test_products_are_rounded_where_cudnn_rounds_them(planned_for_an_h100, hidden, batch, exact):
    plan = plan_of("lstm", hidden, batch, f32, (True, True))
    assert [geometry.exact for geometry in plan.geometry] == [exact, exact]


def test_what_may_be_rounded_is_asked_of_torch_by_old_and_new_names():
    device, products, layers = torch.device("cuda"), torch.backends.cuda.matmul, torch.backends.cudnn
    assert operators._tf32(torch.device("cpu"), f32) == operators._tf32(device, bf16) == (False, False)
    before = products.allow_tf32, layers.allow_tf32
    try:
        products.allow_tf32, layers.allow_tf32 = True, False
        assert operators._tf32(device, f32) == (True, False)
        products.allow_tf32, layers.allow_tf32 = False, True
        assert operators._tf32(device, f32) == (False, True)
        if hasattr(layers, "rnn"):
            conv, rnn = layers.conv.fp32_precision, layers.rnn.fp32_precision
            layers.conv.fp32_precision, layers.rnn.fp32_precision = "tf32", "ieee"  # the old name cannot say that
            assert operators._tf32(device, f32) == (False, False)
            layers.conv.fp32_precision, layers.rnn.fp32_precision = conv, rnn
    finally:
        products.allow_tf32, layers.allow_tf32 = before


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
@pytest.mark.parametrize("dtype", [f16, f32])
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
    assert path == "sparse" or backward or len(chosen.share_tiles) >= turns
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
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backward", [False, True])
def test_whatever_a_plan_may_choose_can_be_packed(cell, path, block, backward):
    torch.manual_seed(0)  # the choice goes by what masks nearly always need
    small = SimpleNamespace(**{**vars(H100), "multi_processor_count": 9})
    mask = random_mask(cell, 200, 0.1, block)
    found = candidates(path, cell, 200, 12, f32, 0.1, block, properties=small, backward=backward)
    assert found
    for chosen in found:
        packed = packing.pack(mask, chosen, small.shared_memory_per_block_optin)
        assert packed.geometry.blocks * chosen.groups <= 9


@pytest.mark.parametrize(("cell", "block"), [("lstm", (1, 1)), ("gru", (1, 1)), ("rnn_tanh", (8, 4)), ("gru", (8, 4))])
def test_the_sparse_kernel_holds_what_its_estimate_says(cell, block):
    """Evenly random masks of a small GPU's largest layer fit, and of one a tenth wider do not."""
    torch.manual_seed(0)
    small = SimpleNamespace(**{**vars(H100), "multi_processor_count": 9})
    fitting = [n for n in range(512, 3000, 16) if candidates("sparse", cell, n, 4, f16, 0.1, block, properties=small)]
    largest = max(fitting)
    for hidden, fits in ((16 * (largest * 94 // 1600), True), (16 * (largest * 11 // 160), False)):
        start = Geometry("sparse", cell, hidden, f16, 0, 0, 0, False, True)
        coverings = [g for g in search._coverings(start, 4, small, 1) if g.columns == 4 and g.groups == 1]
        assert coverings or not fits
        mask = random_mask(cell, hidden, 0.1, block)
        for chosen in coverings[:1]:
            if not fits:
                with pytest.raises(MemoryError, match="do not fit on the chip in the sparse kernel"):
                    packing.pack(mask, chosen, small.shared_memory_per_block_optin)
                continue
            packed = packing.pack(mask, chosen, small.shared_memory_per_block_optin)
            estimate = candidates("sparse", cell, hidden, 4, f16, 0.1, block, properties=small)[0].tiles
            assert 0.85 * estimate <= packed.geometry.tiles <= 1.02 * estimate


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


@pytest.mark.parametrize("backward", [False, True])
def test_weights_for_which_there_is_no_room_are_read_from_l2(backward):
    layer = "gru", 2048, 4, f32, None, None
    without = SimpleNamespace(**{**vars(H100), "L2_cache_size": 0})
    assert "do not fit on the chip" in search.choose_geometry(*layer, without, backward=backward).reason
    plan = search.choose_geometry(*layer, H100, backward=backward)
    chosen, share = plan.geometry, plan.geometry.bytes_streamed
    assert 0 < share <= H100.L2_cache_size * 2 / 3
    assert plan.bytes_on_chip + share == chosen.tiles * chosen.tile_bytes * chosen.blocks >= 3 * 2048**2 * 4
    assert f"but for {share / 1e6:.1f} MB, read from L2 at every step" in plan.reason
    pytest.importorskip("cuda.core")
    assert nvrtc.compile_cubin(nvrtc.source(*geometry.files(chosen)), "sm_90", dict(chosen.macros()))


@pytest.mark.parametrize("processors", [48, 58, 108, 132, 148])  # of an RTX 3070, an L4, an A100, an H100, a B200
@pytest.mark.parametrize("cell", CELLS)
def test_all_blocks_can_be_resident_and_cover_the_layer(cell, processors):
    device = SimpleNamespace(**{**vars(H100), "multi_processor_count": processors})
    for hidden, batch, backward in itertools.product((1, 130, 1024), (1, 17), (False, True)):
        for chosen in candidates("dense", cell, hidden, batch, bf16, properties=device, backward=backward):
            assert chosen.blocks * chosen.groups <= search.resident_blocks(device, chosen.cluster) <= processors
            assert chosen.blocks % chosen.cluster == 0
            assert chosen.blocks * chosen.units >= hidden
            assert chosen.shared_bytes <= H100.shared_memory_per_block_optin
            width = GATES[cell] * chosen.pitch if backward else chosen.pitch
            assert (chosen.cluster - 1) * chosen.slice < width <= chosen.cluster * chosen.slice


DENSE = [
    ("rnn_tanh", 2304, 4, f16),
    ("gru", 2304, 4, f16),
    ("lstm", 2304, 4, f16),
    ("rnn_relu", 101, 3, f16),
    ("gru", 101, 5, bf16),
    ("lstm", 37, 1, bf16),
    ("lstm", 768, 16, f16),
    ("lstm", 1024, 64, f16),
    ("gru", 515, 23, f16),
    ("lstm", 1, 1, f16),
    ("gru", 2, 2, f32),
    ("gru", 256, 4, f32),
    ("lstm", 1024, 16, f32),
    ("rnn_relu", 515, 23, f32),
    ("lstm", 515, 1, f32),
    ("gru", 2048, 3, f32),
    ("gru", 2048, 1, f32),
]
PRUNED = [
    ("rnn_tanh", 64, 4, f16, 0.3, (16, 1)),
    ("gru", 2304, 4, f16, 0.1, (16, 1)),
    ("gru", 101, 5, bf16, 0.2, (8, 4)),
    ("lstm", 515, 23, f16, 0.15, (8, 4)),
    ("rnn_relu", 37, 1, f16, 0.3, (16, 1)),
    ("gru", 256, 4, f32, 0.1, (16, 1)),
    ("lstm", 130, 9, f32, 0.2, (8, 4)),
    ("rnn_tanh", 8192, 4, f16, 0.1, (16, 1)),
    ("lstm", 2304, 4, bf16, 0.1, (1, 1)),
    ("gru", 515, 7, f16, 0.3, (1, 1)),
]
LAYERS = [("dense", x) for x in DENSE]
LAYERS += [("block", x) for x in PRUNED if x[5] != (1, 1)] + [("sparse", x) for x in PRUNED]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("path", "layer"),
    LAYERS,
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
)
def test_match_the_reference(path, layer, nan_memory):
    torch.manual_seed(0)
    case = Case(path, *layer)
    for steps, reverse, with_state, packed, resets in (
        (17, False, True, False, 0.0),
        (18, True, True, True, 0.0),
        (11, False, False, True, 0.2),
        (12, True, True, False, 0.2),
        (1, False, True, False, 0.5),
    ):
        inputs = case.inputs(steps, with_state=with_state, packed=packed, resets=resets)
        found = case.both(inputs, gradients := case.gradients(inputs, reverse), reverse)
        for _ in range(20 if steps == 17 else 1):
            again = case.both(inputs, gradients, reverse)
            assert all(x is None or torch.equal(x, y) for x, y in zip(found, again, strict=True))
        case.check()
        expected = case.both(inputs, gradients, reverse, reference, double)
        assert max(errors(found, expected)) < TOLERANCE[case.dtype]


def states_to_shift():
    """Arguments of ``previous``: of widths that are multiples of 2 to 16 bytes, and of one part of a step or many."""
    for (hidden, dtype), flags in itertools.product(
        ((1, bf16), (6, f16), (515, bf16), (1024, f16), (33, f32), (64, f32)),
        itertools.product((False, True), repeat=4),
    ):
        packed, reverse, with_first, resets = flags
        lengths = torch.tensor([9] * 20 + [4] * 10 + [3, 1] if packed else [7] * 32)
        sizes = (lengths > torch.arange(lengths[0])[:, None]).sum(1)
        offsets = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int() if packed else None
        rows, first = torch.randn(int(lengths.sum()), hidden).to(dtype), torch.randn(2, 32, hidden).to(dtype)[1]
        marks = torch.rand(len(rows)) < 0.3 if resets else None
        yield rows, first if with_first else None, offsets, 32, reverse, marks


@pytest.mark.gpu
def test_the_state_before_each_step_equals_the_reference(nan_memory):
    torch.manual_seed(0)
    for given in states_to_shift():
        on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in given]
        assert torch.equal(cuda.previous(*on_gpu).cpu(), reference.previous(*given))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
def test_the_copy_of_states_compiles_without_a_gpu(architecture):
    pytest.importorskip("cuda.core")
    for macros in cuda.UNITS.values():
        assert nvrtc.compile_cubin(nvrtc.source("persistent/previous.cu"), architecture, dict(macros))[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("layer", [("lstm", 515, 23, f16), ("gru", 1024, 16, bf16), ("rnn_tanh", 256, 3, f32)])
def test_clusters_match_the_reference(layer, cluster, nan_memory):
    torch.manual_seed(0)
    for back in candidates("dense", *layer, properties=torch.cuda.get_device_properties(0), backward=True)[::7]:
        if back.cluster == cluster:
            case = Case("dense", *layer, back=back)
            gradients = case.gradients(case.inputs(9), False)
            found, expected = cuda.backward(*gradients), reference.backward(*map(double, gradients))
            assert max(errors(found, expected)) < TOLERANCE[case.dtype], back


@pytest.mark.gpu
def test_tf32_only_where_it_is_allowed():
    torch.manual_seed(0)
    for exact, least, most in ((True, 0, 2e-6), (False, 1e-5, 1e-3)):
        case = Case("dense", "lstm", 515, 5, f32)
        forward, backward = (g._replace(exact=exact) for g in case.plan.geometry)
        case.plan = case.plan._replace(geometry=cuda.Geometries(forward, backward))
        inputs = case.inputs(33)
        gradients = case.gradients(inputs, False)
        assert least <= max(errors(case.forward(inputs, False), case.expected(inputs, False))) < most
        expected = reference.backward(*map(double, gradients))
        assert least <= max(errors(cuda.backward(*gradients), expected)) < most


@pytest.mark.gpu
def test_error_is_no_larger_than_cudnns():
    """Over 2,000 steps, of the output and of every gradient."""
    torch.manual_seed(0)
    for kind, dtype in itertools.product((nn.RNN, nn.GRU, nn.LSTM), (f16, bf16, f32)):
        theirs = kind(64, 256).cuda().to(dtype)
        ours = getattr(ostinato, kind.__name__)(64, 256).cuda().to(dtype)
        exact = kind(64, 256).cuda().double()
        for layer in (ours, exact):
            layer.load_state_dict(theirs.state_dict())
        assert ours.plan(8, dtype, training=True).path == "dense"
        x = torch.randn(2000, 8, 64, device="cuda", dtype=dtype)
        grad = torch.randn(2000, 8, 256, device="cuda", dtype=dtype)

        def results(layer, x=x, grad=grad):
            dtype = layer.weight_hh_l0.dtype
            x = x.to(dtype).requires_grad_()
            output = layer(x)[0]
            output.backward(grad.to(dtype))
            return [y.double() for y in (output, x.grad, *(p.grad for p in layer.parameters()))]

        with torch.backends.cudnn.flags(enabled=False):
            expected = results(exact)
        for mine, cudnns, right in zip(results(ours), results(theirs), expected, strict=True):
            assert (mine - right).norm() <= 1.5 * (cudnns - right).norm() + 2e-7 * right.norm(), (kind, dtype)


@pytest.mark.parametrize(
    ("layer", "keeps"),
    [
        ((bf16, "gru", 1024, 64), True),
        ((f16, "lstm", 2048, 8), True),
        ((bf16, "gru", 512, 16), False),
        ((bf16, "rnn_tanh", 2048, 64), False),
        ((f32, "gru", 2, 1), True),
        ((f32, "rnn_relu", 2048, 64), False),
    ],
)
def test_gates_are_kept_where_their_products_are_large(layer, keeps):
    assert cuda.keeps_gates(*layer) == keeps


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize("dtype", [f16, bf16])
@pytest.mark.parametrize("resets", [None, 0.2])
def test_gradients_by_kept_gates_are_as_exact_as_by_recomputed_ones(kind, dtype, resets, monkeypatch):
    torch.manual_seed(0)
    layer = getattr(ostinato, kind.__name__)(64, 133).cuda().to(dtype)
    exact = getattr(ostinato, kind.__name__)(64, 133).cuda().double()
    exact.load_state_dict(layer.state_dict())
    x, grad = torch.randn(50, 9, 64).cuda().to(dtype), torch.randn(50, 9, 133).cuda().to(dtype)
    begins = None if resets is None else (torch.rand(50, 9) < resets).cuda()

    def results(layer):
        inputs = x.to(layer.weight_hh_l0.dtype, copy=True).requires_grad_()
        layer.zero_grad()
        output = layer(inputs, resets=begins)[0]
        output.backward(grad.to(output.dtype))
        return [y.double().clone() for y in (output, inputs.grad, *(p.grad for p in layer.parameters()))]

    expected, errors = results(exact), {}
    for keeps in (True, False):
        monkeypatch.setattr(cuda, "keeps_gates", lambda *_, keeps=keeps: keeps)
        found = [results(layer) for _ in range(2)]
        assert all(map(torch.equal, *found))
        errors[keeps] = [(y - right).norm() / right.norm() for y, right in zip(found[0], expected, strict=True)]
    assert all(kept < 1.2 * recomputed < TOLERANCE[dtype] for kept, recomputed in zip(*errors.values(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_hangs_nothing(bad):
    torch.manual_seed(0)
    for layer in (
        ("dense", "gru", 130, 4, f16),
        ("block", "lstm", 130, 4, f16, 0.3, (16, 1)),
        ("sparse", "rnn_tanh", 130, 4, f32, 0.3, (1, 1)),
    ):
        case = Case(*layer)
        inputs = case.inputs(20)
        inputs[0].view(20, 4, -1)[7, 2, 5] = bad
        gradients = list(case.gradients(inputs, False))
        gradients[7].view(20, 4, -1)[7, 2, 5] = bad
        output, grads = (x[0].view(20, 4, -1) for x in (case.forward(inputs, False), cuda.backward(*gradients)))
        case.check()
        others = [0, 1, 3]  # sequences
        expected = case.expected(inputs, False)[0], reference.backward(*map(double, gradients))[0]
        for found, right in zip((output, grads), expected, strict=True):
            assert max(errors([found[:, others]], [right.view(20, 4, -1)[:, others]])) < TOLERANCE[case.dtype]
        if bad != bad:
            assert output[12:, 2].isnan().all()  # a pruned weight times NaN is nothing, so it takes some steps
            assert grads[:3, 2].isnan().all()


@pytest.mark.gpu
def test_streams_graph_and_a_wait_given_up():
    torch.manual_seed(0)
    cases = [Case("dense", "gru", 515, 4, f16), Case("dense", "lstm", 256, 4, f16)]
    inputs = [case.inputs(50) for case in cases]

    def both(case, inputs, gradients):
        return case.forward(inputs, False)[0], *cuda.backward(*gradients)[:2]

    calls = [(case, x, case.gradients(x, False)) for case, x in zip(cases, inputs, strict=True)]
    expected = [both(*call) for call in calls]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(both(*call))
        torch.cuda.synchronize()
        for x, y in zip(found, expected, strict=True):
            assert all(map(torch.equal, x, y))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(*calls[0])
    inputs[0][0].mul_(0.5)
    cases[0].weight.mul_(0.5)  # read at every launch
    graph.replay()
    assert all(map(torch.equal, captured, both(*calls[0])))

    cuda._failure(0).fill_(1)
    with pytest.raises(RuntimeError, match="persistent dense gru forward kernel of 515 hidden units waited in vain"):
        cases[0].forward(inputs[0], False)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_random_layers(seed):
    """A sixteenth of OSTINATO_RANDOM_RUNS short runs forward and backward, of one to six random layers."""
    runs = int(os.environ.get("OSTINATO_RANDOM_RUNS", "400")) // 16
    of_a_layer = -(-runs // max(1, min(6, runs // 25)))
    draw = random.Random(seed)
    torch.manual_seed(seed)
    random.seed(seed)
    done = 0
    while done < runs:
        path = draw.choice(("dense", "dense", "block", "sparse"))
        hidden, batch = int(2 ** draw.uniform(0, 10.5)), int(2 ** draw.uniform(0, 6))
        layer = path, draw.choice(CELLS), hidden, batch, draw.choice((f16, bf16, f32))
        if path != "dense":
            layer += draw.uniform(0.05, 0.4), {"block": draw.choice(((16, 1), (8, 4))), "sparse": (1, 1)}[path]
        try:
            case = Case(*layer)
        except ValueError:  # no geometry fits
            continue
        for _ in range(of_a_layer):
            size, reverse = draw.randint(1, 64), draw.random() < 0.5
            shape = draw.randint(1, 8), size, draw.random() < 0.7, draw.random() < 0.4
            inputs = case.inputs(*shape, resets=draw.choice((0.0, 0.3)))
            gradients = case.gradients(inputs, reverse)
            found = case.both(inputs, gradients, reverse)
            worst = max(errors(found, case.both(inputs, gradients, reverse, reference, double)))
            assert worst < TOLERANCE[case.dtype], (layer, size, reverse, worst)
        case.check()
        done += of_a_layer
