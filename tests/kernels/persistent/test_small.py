"""The products of small layers in one launch, against the separate ones."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import ostinato
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.matmul import grouped
from ostinato.kernels.persistent import backward, executor, reference
from ostinato.kernels.persistent.arguments import DIFFERENTIABLE, Arguments
from ostinato.kernels.persistent.cuda import small
from ostinato.recurrent import sequences

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
ALL = 2 ** len(DIFFERENTIABLE) - 1
SIZES = ((1, 1, 1, 1), (1, 9, 3, 33), (3, 20, 40, 5), (16, 7, 12, 64), (33, 40, 17, 36))  # B, T, channels, H
CELLS = "rnn_tanh", "gru", "lstm"


def inputs(cell, size, dtype=torch.float64, device="cpu", h0=True, reverse=False, resets=False):
    """The operator's arguments, the states and what the backward's loop returns."""
    batch, steps, channels, hidden = size
    width, gates = hidden * (1 if cell == "rnn_tanh" else 4), hidden * {"gru": 3, "lstm": 4}.get(cell, 1)

    def random(*shape):
        return torch.randn(shape).to(device, dtype)

    rows = steps * batch
    states = random(batch, hidden) if h0 else None, random(batch, hidden) if cell == "lstm" else None
    weights = random(gates, channels), random(gates, hidden), random(gates), random(gates)
    marks = (torch.rand(rows) < 0.2).to(device) if resets else None
    given = Arguments(random(rows, channels), *states, *weights, None, None, marks, batch, cell, reverse, True, None, 1)
    totals = random(batch, width).to(torch.promote_types(dtype, f32))
    return given, random(rows, hidden), (random(rows, width), random(batch, hidden), states[1], totals)


def separate(given, h, found, needed):
    """The same gradients in float64 on the CPU."""

    def widened(x):
        return x.double().cpu() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    marks = given.resets if given.resets is None else given.resets.cpu()
    given = Arguments(*map(widened, given))._replace(resets=marks)
    loop = executor.Executor(reference, None, False, None)
    return backward.gradients(loop, given, widened(h), [*map(widened, found)], needed)


def part(tensor, rows, columns, factor, flipped):
    """A factor of a product as a matrix: (rows, columns), of the second one from (columns, rows)."""
    flat = tensor.reshape(-1)[factor.begin :]
    shape, strides = (rows, columns), (factor.across, factor.along)
    return flat.as_strided(shape[::-1], strides[::-1]) if flipped else flat.as_strided(shape, strides)


def computed(described, tensors):
    """What the kernel does, by PyTorch."""
    for one in described:
        total = torch.zeros(one.rows, one.columns, dtype=torch.float64)
        total += 0 if one.bias is None else tensors[one.bias]
        for a, b, size in one.pairs:
            right = part(tensors[b.tensor], one.columns, size, b, flipped=True)
            if a is grouped.NOTHING:
                total += right.sum(0)
            else:
                total += part(tensors[a.tensor], one.rows, size, a, flipped=False) @ right
        tensors[one.out].reshape(-1)[one.begin : one.begin + total.numel()] = total.reshape(-1)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("h0", "reverse"), [(False, False), (False, True), (True, False), (True, True)])
def test_the_products_of_gradients_are_those_of_the_layer(cell, h0, reverse):
    torch.manual_seed(0)
    for size in SIZES:
        given, h, found = inputs(cell, size, h0=h0, reverse=reverse)
        batch, _, channels, hidden = size
        names = "x", "weight_ih", "weight_hh", "bias_ih", "bias_hh"
        results = [torch.full_like(getattr(given, name), float("nan")) for name in names]
        sizes = small.Sizes(len(h), channels, hidden, batch, batch, True, reverse, h0, names)
        described = small.products_of_gradients(cell, 1, sizes)
        of_another = [None] * 11
        computed(described, [*of_another, found[0], found[3], given.x, given.weight_ih, h, given.h0, *results])
        expected = dict(zip(DIFFERENTIABLE, separate(given, h, found, ALL), strict=True))
        for name, result in zip(names, results, strict=True):
            torch.testing.assert_close(result, expected[name], rtol=1e-12, atol=1e-12)


def forget_products():
    for cached in (small._prepared, small._linear):
        cached.cache_clear()


@pytest.fixture
def by_pytorch(monkeypatch):
    """The products are computed by PyTorch, as they are described; each launch's number of them."""
    launched = []

    def made(groups, *_):
        described = [product for own in groups for product in own]
        return lambda *tensors: launched.append(len(described)) or computed(described, tensors)

    monkeypatch.setattr(small, "Products", made)
    monkeypatch.setattr(small, "previous", reference.previous)
    forget_products()
    yield launched
    forget_products()


@pytest.fixture
def sharing(monkeypatch):
    """Sets how many warps share a tile."""

    def share(sharers):
        monkeypatch.setattr(grouped, "sharers_of", shared_by(sharers))
        forget_products()

    yield share
    forget_products()


def shared_by(sharers):
    return lambda described, *_: [grouped.WARPS if one.adds_rows else sharers for one in described]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("resets", [False, True])
def test_the_gradients_of_both_directions_are_one_launch(cell, resets, by_pytorch):
    torch.manual_seed(0)
    for needed in ((ALL, ALL), (0b1010101, 0b0101010), (0, ALL), (0b110, 0)):
        size, options = SIZES[2], itertools.product((False, True), repeat=2)
        given = [(*inputs(cell, size, h0=h0, reverse=reverse, resets=resets), 0) for h0, reverse in options]
        for pair in itertools.combinations(given, 2):
            directions = [(*own, bits) for (*own, _), bits in zip(pair, needed, strict=True)]
            by_pytorch.clear()
            for found, direction in zip(small.gradients(False, *directions), directions, strict=True):
                for one, expected in zip(found, separate(*direction), strict=True):
                    assert (one is None) == (expected is None)
                    if one is not None:
                        torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-12)
            assert len(by_pytorch) == (needed != (0b110, 0))  # without products there is nothing to launch


@pytest.mark.parametrize("biased", [False, True])
def test_the_inputs_products_of_both_directions_are_one_launch(biased, by_pytorch):
    torch.manual_seed(0)
    x, weights, biases = torch.randn(6, 5).double(), torch.randn(2, 5, 7).double().mT, torch.randn(2, 7).double()
    into = torch.empty(6, 7, dtype=torch.float64)
    pairs = [(x, weight, bias if biased else None) for weight, bias in zip(weights, biases, strict=True)]
    found = small.linear(False, (*pairs[0], None), (*pairs[1], into))
    assert found[1] is into
    assert by_pytorch == [2]
    for one, pair in zip(found, pairs, strict=True):
        torch.testing.assert_close(one, F.linear(*pair), rtol=1e-12, atol=1e-12)


def test_captures_prepare_for_kernels_alone(monkeypatch):
    """What they call may not be installed where none runs."""
    monkeypatch.setattr(executor, "is_captured", lambda _: True)
    monkeypatch.setattr(executor.cublas, "create_handle", None)
    given, *_ = inputs("gru", (3, 20, 4, 5), dtype=f16)  # which no loop on a CPU takes
    assert executor.executor_of(*given).kernels is reference


@pytest.mark.parametrize(("architecture", "cluster"), [("sm_80", 1), ("sm_100", grouped.CLUSTER)])
@pytest.mark.parametrize(("dtype", "tf32"), [(f32, False), (f32, True), (f16, False), (bf16, False)])
def test_products_compile_without_a_gpu(architecture, cluster, dtype, tf32):
    pytest.importorskip("cuda.core")
    code, macros = grouped.source(dtype, tf32, cluster)
    assert nvrtc.compile_cubin(code, architecture, dict(macros))[:4] == b"\x7fELF"


TOLERANCE = {(f32, False): 3e-6, (f32, True): 3e-3, (f16, False): 2e-3, (bf16, False): 1e-2}  # of the largest, or of 1


def described(rows, summed, columns):
    """A product of these sizes."""
    factors = grouped.Factor(0, 1, 1), grouped.Factor(1, 1, 1), summed
    return grouped.Product([factors], rows, columns, 2)


def test_as_many_warps_share_a_tile_as_a_gpu_has_room_for():
    warps, cluster = grouped.WARPS, grouped.CLUSTER
    many, few, large = described(32768, 32, 96), described(96, 8192, 32), described(768, 512, 256)
    assert grouped.sharers_of([many], cluster, 132) == [1]  # tiles of short sums
    assert grouped.sharers_of([described(64, 256, 64)], cluster, 132) == [warps]
    assert grouped.sharers_of([few], cluster, 132) == [warps * cluster]  # of long ones
    assert grouped.sharers_of([few], 1, 108) == [warps]
    assert grouped.sharers_of([large] * 2, cluster, 132) == [warps] * 2
    sums = grouped.Product([(grouped.NOTHING, grouped.Factor(0, 1, 1), 8192)], 1, 96, 1)
    assert grouped.sharers_of([many, sums, few], cluster, 132) == [1, warps, warps * cluster]


@pytest.mark.parametrize("sharers", grouped.ADDING)
def test_blocks_are_enough_for_all_tiles_in_whole_clusters(sharers):
    for rows, columns, cluster in itertools.product((1, 32, 33, 300), (1, 64, 95), (1, grouped.CLUSTER)):
        one, warps = described(rows, 100, columns), grouped.WARPS
        if sharers > warps * cluster:
            continue
        blocks = one.blocks(sharers, cluster)
        assert blocks % cluster == 0
        assert 0 <= blocks * warps - one.tiles * sharers < warps * cluster
        assert one.tiles == -(-rows // grouped.TILE) * -(-columns // grouped.TILE)


def test_small_layers_have_as_many_rows_as_blocks_can_share(monkeypatch):
    properties = SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for version, most in ((8, 1024), (9, 24576)):
        properties.major = version
        for rows, captured in ((most, True), (4 * most, False)):
            assert small.is_small(0, f32, rows, 96, 16, True, captured)
            assert not small.is_small(0, f32, rows + 1, 96, 16, True, captured)
    for rows, captured in ((2048, True), (16384, False)):
        assert small.is_small(0, f32, rows, 2048, 16, True, captured)
        assert not small.is_small(0, f32, rows, 2048, 17, True, captured)
        assert not small.is_small(0, f32, rows, 2048, 16, False, captured)
        assert not small.is_small(0, f16, rows, 2048, 16, True, captured)


def error(result, expected):
    expected = expected.cpu()
    return float((result.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1))


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("dtype", "tf32"), TOLERANCE)
def test_gradients_of_small_layers_match_float64(cell, dtype, tf32, nan_memory):
    torch.manual_seed(0)
    flags = itertools.cycle(itertools.product((True, False), repeat=3))
    for size, needed in itertools.product((*SIZES, (8, 128, 64, 64)), (ALL, ALL, 0b1010101, 0b0101001)):
        h0, reverse, resets = next(flags)
        given, h, found = inputs(cell, size, dtype, "cuda", h0, reverse, resets)
        other = given, h, found, ALL & ~needed
        (ours,), (again, _) = (small.gradients(tf32, (given, h, found, needed), *more) for more in ((), (other,)))
        exact = separate(given, h, found, needed)
        for name, one, two, expected in zip(DIFFERENTIABLE, ours, again, exact, strict=True):
            assert (one is None) == (expected is None)
            if one is not None:
                assert torch.equal(one, two)
                assert error(one, expected) < TOLERANCE[dtype, tf32], (name, size, h0, reverse, resets)


@pytest.mark.gpu
@pytest.mark.parametrize("sharers", grouped.ADDING)
@pytest.mark.parametrize(("dtype", "tf32"), TOLERANCE)
def test_results_are_the_same_however_many_warps_share_a_tile(sharers, dtype, tf32, sharing, nan_memory):
    if sharers > grouped.WARPS * grouped.cluster_of(torch.cuda.current_device()):
        pytest.skip("this GPU has no clusters")
    torch.manual_seed(0)
    sharing(sharers)
    flags = itertools.cycle(itertools.product((True, False), repeat=3))
    for cell, size in itertools.product(CELLS, (*SIZES, (5, 8 * sharers, 24, 36))):
        h0, reverse, resets = next(flags)
        given, h, found = inputs(cell, size, dtype, "cuda", h0, reverse, resets)
        (ours,), (again,) = (small.gradients(tf32, (given, h, found, ALL)) for _ in range(2))
        exact = separate(given, h, found, ALL)
        (projected,) = small.linear(tf32, (given.x, given.weight_ih, given.bias_ih, None))
        expected = F.linear(*(x.double() for x in (given.x, given.weight_ih, given.bias_ih)))
        for one, two, right in zip((*ours, projected), (*again, projected), (*exact, expected), strict=True):
            if one is not None:
                assert torch.equal(one, two)
                assert error(one, right) < TOLERANCE[dtype, tf32], (cell, size, h0, reverse, resets)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tf32"), TOLERANCE)
def test_projections_of_small_layers_match_float64(dtype, tf32, nan_memory):
    torch.manual_seed(0)
    for (batch, steps, channels, hidden), biased in itertools.product(SIZES, (False, True)):
        x, weight = torch.randn(steps, channels, batch).transpose(1, 2).flatten(0, 1), torch.randn(hidden, channels)
        x, weight, bias = (y.to("cuda", dtype) for y in (x, weight, torch.randn(hidden)))
        bias = bias if biased else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        into = torch.empty(steps * batch, hidden, device="cuda", dtype=dtype)
        product = x, weight, bias
        assert error(*small.linear(tf32, (*product, None)), exact) < TOLERANCE[dtype, tf32]
        first, second = small.linear(tf32, (x + 1, weight, bias, None), (*product, into))
        assert second is into
        assert torch.equal(first, *small.linear(tf32, (x + 1, weight, bias, None)))
        assert error(into, exact) < TOLERANCE[dtype, tf32]


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True), (3, False)])
def test_separate_products_lead_to_the_same_gradients(cell, layers, bidirectional, monkeypatch):
    torch.manual_seed(0)
    layer = getattr(ostinato, cell)(12, 64, layers, bidirectional=bidirectional).cuda()
    x = torch.randn(40, 8, 12, device="cuda", requires_grad=True)
    of_output = torch.randn(40, 8, 64 * (1 + bidirectional), device="cuda")
    found, compute, calls = [], small.gradients, []
    monkeypatch.setattr(small, "gradients", lambda *args: calls.append(args) or compute(*args))
    for most in (0, 1024):
        monkeypatch.setattr(small, "MOST_ROWS", dict.fromkeys(small.MOST_ROWS, most))
        sequences._CALLS._runs.clear()
        output, _ = layer(x)
        found.append((output, *torch.autograd.grad(output, [x, *layer.parameters()], of_output)))
        assert [len(directions) for _, *directions in calls] == ([1 + bidirectional] * layers if most else [])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3 * float(one.abs().max()))
