"""The persistent CUDA kernels against the float64 recurrence, over cells, dtypes, sizes and ways to multiply."""

import itertools
import os
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ostinato
from ostinato.kernels import nvrtc
from ostinato.kernels.persistent import cuda as persistent
from ostinato.kernels.persistent.plan import GATES

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
TOLERANCE = {f32: 2e-6, f16: 2e-3, bf16: 1.5e-2}
H100 = SimpleNamespace(
    multi_processor_count=132, shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536, major=9
)


def candidate(path, cell, hidden, batch, dtype, density, rows, properties):
    """The geometry that the plan would choose if there were only this path."""
    found = persistent._candidates(path, cell, hidden, dtype, batch, density, rows, properties)
    return min(found, key=lambda geometry: persistent._microseconds(geometry, batch))


def random_mask(cell, hidden, density, block, device="cpu"):
    down, across = -(-hidden // block[0]), -(-hidden // block[1])
    kept = torch.rand(GATES[cell], down, across, device=device) < density
    kept = kept.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return kept[:, :hidden, :hidden].reshape(-1, hidden)


def recurrence(cell, weight, bias_hh_n, projected, h, c, reverse):
    """The definition, step by step in float64: output, h_n, c_n."""
    weight, projected = weight.double(), projected.double()
    h, c = h.double(), None if c is None else c.double()
    output = torch.empty(*projected.shape[:2], h.shape[1], dtype=torch.float64, device=h.device)
    for t in reversed(range(len(projected))) if reverse else range(len(projected)):
        x, s = projected[t].chunk(GATES[cell], 1), (h @ weight.t()).chunk(GATES[cell], 1)
        if cell == "rnn_tanh":
            h = torch.tanh(x[0] + s[0])
        elif cell == "rnn_relu":
            h = torch.relu(x[0] + s[0])
        elif cell == "gru":
            r, z = torch.sigmoid(x[0] + s[0]), torch.sigmoid(x[1] + s[1])
            h = (1 - z) * torch.tanh(x[2] + r * (s[2] + bias_hh_n.double())) + z * h
        else:
            i, f, g, o = (a + b for a, b in zip(x, s, strict=True))
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        output[t] = h
    return output, h, c


class Case:
    """A layer with random weights, and its inputs."""

    def __init__(self, path, cell, hidden, batch, dtype, density=1.0, block=(1, 1)):
        gates, cuda = GATES[cell], torch.device("cuda", 0)
        bound = (hidden * density) ** -0.5
        self.cell, self.hidden, self.dtype, self.device = cell, hidden, dtype, cuda
        self.weight = ((torch.rand(gates * hidden, hidden, device=cuda) * 2 - 1) * bound).to(dtype)
        self.bias_hh_n = torch.randn(hidden, device=cuda).to(dtype) if cell == "gru" else None
        self.mask = random_mask(cell, hidden, density, block, cuda) if density < 1 else None
        geometry = candidate(
            path, cell, hidden, batch, dtype, density, block[0], torch.cuda.get_device_properties(cuda)
        )
        plan = persistent.Plan(path, 0, 0, 0, "", geometry)
        self.layer = persistent.PersistentLayer(cell, self.weight, self.bias_hh_n, self.mask, block, plan)

    def inputs(self, steps, batch, with_state=True):
        projected = torch.randn(steps, batch, GATES[self.cell] * self.hidden, device=self.device).to(self.dtype)
        if not with_state:
            return projected, None, None
        h = (torch.rand(batch, self.hidden, device=self.device) * 2 - 1).to(self.dtype)
        return projected, h, torch.randn_like(h) if self.cell == "lstm" else None

    def expected(self, projected, h, c, reverse):
        weight = self.weight if self.mask is None else self.weight * self.mask
        zeros = torch.zeros(projected.shape[1], self.hidden, device=self.device)
        return recurrence(
            self.cell, weight, self.bias_hh_n, projected, zeros if h is None else h, zeros if c is None else c, reverse
        )

    def errors(self, found, expected):
        pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None]
        return [float((x.double() - y).norm() / y.norm().clamp(min=1e-30)) for x, y in pairs]


@pytest.fixture
def nan_memory():
    """Memory that PyTorch hands out is full of NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("path", ["dense", "block", "sparse"])
def test_kernels_compile_without_a_gpu(path, architecture):
    pytest.importorskip("cuda.core")
    code = nvrtc.source(*persistent.files(path))
    index = ("sm_80", "sm_90", "sm_100").index(architecture)
    for cell, dtype in itertools.islice(zip(CELLS, (f16, f32, bf16, f32), strict=True), index, None, 2):
        geometry = candidate(path, cell, 130 + index, 5, dtype, 0.3, 16, H100)
        if path == "sparse":
            geometry = geometry._replace(tiles=20).hold(H100.shared_memory_per_block_optin)
        assert nvrtc.compile_cubin(code, architecture, dict(geometry.macros(True)))[:4] == b"\x7fELF"


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(
    ("path", "density", "block"), [("dense", 1, (1, 1)), ("block", 0.2, (16, 1)), ("sparse", 0.2, (1, 1))]
)
def test_packing_keeps_every_weight_once(cell, path, density, block):
    hidden = 133
    weight = torch.arange(1.0, GATES[cell] * hidden**2 + 1).view(-1, hidden)  # all different
    mask = random_mask(cell, hidden, density, block)
    geometry = candidate(path, cell, hidden, 3, f32, density, block[0], H100)
    packed = persistent.pack(weight, mask, geometry, H100.shared_memory_per_block_optin)
    words = packed.weights if path != "sparse" else packed.weights[:, :, 1:].contiguous().view(torch.float32)
    assert torch.equal(words[words != 0].sort().values, weight[mask].sort().values)


@pytest.mark.parametrize(
    ("cell", "hidden", "density", "processors", "turns"),
    [("rnn_tanh", 100, 0.2, 132, 1), ("gru", 400, 0.1, 132, 1), ("lstm", 400, 0.3, 132, 1), ("lstm", 400, 0.1, 8, 2)],
)
@pytest.mark.parametrize("dtype", [f16, f32])
def test_tiles_of_the_block_kernel_are_the_matrix(cell, hidden, density, processors, turns, dtype):
    device = SimpleNamespace(**{**vars(H100), "multi_processor_count": processors})
    weight = torch.randn(GATES[cell] * hidden, hidden).to(dtype)
    mask = random_mask(cell, hidden, density, (16, 1))
    geometry = candidate("block", cell, hidden, 3, dtype, density, 16, device)
    geometry, weights, places, _ = persistent.pack(weight, mask, geometry, H100.shared_memory_per_block_optin)
    assert len(geometry.share_tiles) >= turns
    tiles = weights.permute(0, 1, 2, 6, 3, 5, 4, 7).flatten(5).flatten(3, 4)  # (blocks, warps, tiles, 16, columns)
    order = torch.cat((persistent._column_of_place(geometry), torch.full((persistent.ZERO_PLACES,), geometry.pitch)))
    columns = order[places.flatten(2)[..., : geometry.tiles * geometry.tile_columns].long()].view(*tiles.shape[:3], -1)
    matrix = torch.zeros(geometry.blocks, geometry.rows + 128, geometry.pitch + 1)
    for block, warp, tile in itertools.product(*map(range, tiles.shape[:3])):
        turn = sum(end <= tile for end in itertools.accumulate(geometry.share_tiles))
        strip = (turn * persistent.WARPS + warp) // geometry.shares
        rows = matrix[block, strip * 16 : strip * 16 + 16]
        rows.index_add_(1, columns[block, warp, tile], tiles[block, warp, tile].float())
    expected = persistent._rows_of_blocks(weight * mask, geometry).float()
    assert torch.equal(matrix[:, : geometry.rows, : geometry.pitch], expected)
    assert not matrix[:, geometry.rows :].any()
    assert not matrix[..., geometry.pitch].any()


@pytest.mark.parametrize(("path", "block"), [("sparse", (1, 1)), ("block", (16, 1)), ("block", (8, 4))])
@pytest.mark.parametrize("cell", CELLS)
def test_whatever_a_plan_may_choose_can_be_packed(cell, path, block):
    small = SimpleNamespace(**{**vars(H100), "multi_processor_count": 6})
    weight, mask = torch.ones(GATES[cell] * 200, 200), random_mask(cell, 200, 0.1, block)
    found = list(persistent._candidates(path, cell, 200, f32, 12, 0.1, block[0], small))
    assert found
    for geometry in found:
        packed = persistent.pack(weight, mask, geometry, small.shared_memory_per_block_optin)
        assert packed.geometry.blocks * geometry.groups <= 6


def test_plan_says_what_fits():
    def plan(cell, hidden, batch=4, dtype=f16, density=None, block=None):
        nnz = None if density is None else int(density * GATES[cell] * hidden**2)
        return persistent.make_plan(cell, hidden, batch, dtype, nnz, block, H100)

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
    batch, dtype = layer[2], layer[3]
    case = Case(path, *layer)
    for steps, reverse, with_state in ((17, False, True), (18, True, True), (1, False, False)):
        inputs = case.inputs(steps, batch, with_state)
        found = case.layer(*inputs, reverse)
        again = [case.layer(*inputs, reverse) for _ in range(20 if steps == 17 else 1)]
        torch.cuda.synchronize()
        case.layer.check()
        assert max(case.errors(found, case.expected(*inputs, reverse))) < TOLERANCE[dtype]
        for other in again:
            assert all(x is None or torch.equal(x, y) for x, y in zip(found, other, strict=True))


@pytest.mark.gpu
def test_tf32_only_where_it_is_allowed(monkeypatch):
    torch.manual_seed(0)
    for allowed, least, most in ((False, 0, 2e-6), (True, 1e-5, 1e-3)):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
        case = Case("dense", "lstm", 515, 5, f32)
        inputs = case.inputs(33, 5)
        error = max(case.errors(case.layer(*inputs, False), case.expected(*inputs, False)))
        assert least <= error < most


@pytest.mark.gpu
def test_error_is_no_larger_than_cudnns():
    """Over 2,000 steps."""
    torch.manual_seed(0)
    for kind, dtype in itertools.product((nn.RNN, nn.GRU, nn.LSTM), (f16, bf16, f32)):
        exact = kind(64, 256).cuda().to(dtype)
        ours = getattr(ostinato, kind.__name__)(64, 256).cuda().to(dtype)
        ours.load_state_dict(exact.state_dict())
        x = torch.randn(2000, 8, 64, device="cuda", dtype=dtype)
        with torch.no_grad():
            cudnn, mine = exact(x)[0].double(), ours(x)[0].double()
            with torch.backends.cudnn.flags(enabled=False):
                expected = exact.double()(x.double())[0]
        assert ours.plan(8, dtype).path == "dense"
        assert (mine - expected).norm() <= 1.5 * (cudnn - expected).norm() + 1e-7 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_hangs_nothing(bad):
    torch.manual_seed(0)
    for layer in (
        ("dense", "gru", 130, 4, f16),
        ("block", "lstm", 130, 4, f16, 0.3, (16, 1)),
        ("sparse", "rnn_tanh", 130, 4, f32, 0.3),
    ):
        case = Case(*layer)
        projected, h, c = case.inputs(20, 4)
        projected[7, 2, 5] = bad
        output = case.layer(projected, h, c, False)[0]
        torch.cuda.synchronize()
        case.layer.check()
        others = [0, 1, 3]  # sequences
        expected = case.expected(projected, h, c, False)[0]
        assert max(case.errors([output[:, others]], [expected[:, others]])) < TOLERANCE[case.dtype]
        if bad != bad:
            assert output[12:, 2].isnan().all()  # a pruned weight times NaN is nothing, so it takes some steps


@pytest.mark.gpu
def test_streams_graph_and_a_wait_given_up():
    torch.manual_seed(0)
    cases = [Case("dense", "gru", 515, 4, f16), Case("dense", "lstm", 256, 4, f16)]
    inputs = [case.inputs(50, 4) for case in cases]
    expected = [case.layer(*x, False)[0] for case, x in zip(cases, inputs, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for case, x, stream in zip(cases, inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(case.layer(*x, False)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cases[0].layer(*inputs[0], False)[0]
    inputs[0][0].mul_(0.5)
    graph.replay()
    assert torch.equal(captured, cases[0].layer(*inputs[0], False)[0])

    cases[0].layer._failure.fill_(1)
    with pytest.raises(RuntimeError, match="persistent dense gru kernel of 515 hidden units waited in vain"):
        cases[0].layer(*inputs[0], False)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_random_layers(seed):
    """A tenth of OSTINATO_RANDOM_RUNS short runs, 40 for each random layer."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(max(1, int(os.environ.get("OSTINATO_RANDOM_RUNS", "400")) // 400)):
        path = draw.choice(("dense", "block", "sparse"))
        hidden, batch = int(2 ** draw.uniform(0, 10.5)), int(2 ** draw.uniform(0, 6))
        layer = path, draw.choice(CELLS), hidden, batch, draw.choice((f16, bf16, f32))
        if path != "dense":
            layer += draw.uniform(0.05, 0.4), {"block": draw.choice(((16, 1), (8, 4))), "sparse": (1, 1)}[path]
        case = Case(*layer)
        for _ in range(40):
            size, reverse = draw.randint(1, 64), draw.random() < 0.5
            inputs = case.inputs(draw.randint(1, 8), size, draw.random() < 0.7)
            errors = case.errors(case.layer(*inputs, reverse), case.expected(*inputs, reverse))
            assert max(errors) < TOLERANCE[case.dtype], (layer, size, reverse, errors)
        case.layer.check()
