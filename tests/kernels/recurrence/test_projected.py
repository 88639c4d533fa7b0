"""Linear recurrences of matrix products on Hopper GPUs, against float64 and the layers' other way."""

import itertools

import pytest
import torch

import ostinato
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.recurrence.linear import projected
from ostinato.minimal.recurrences import CANDIDATES, GATES, recurrence_of
from simulated_graphs import launched

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 4e-3}
RUNS = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize(
    ("cell", "candidate", "resets"),
    [("mingru", "linear", True), ("mingru", "tanh", False), ("minlstm", "positive", True)],
)
def test_the_kernel_compiles_without_a_gpu(cell, candidate, resets):
    pytest.importorskip("cuda.core")
    bias = candidate != "tanh"
    dtype = torch.bfloat16 if candidate == "positive" else torch.float16
    recurrence = recurrence_of(cell, candidate, bias)
    macros = dict(projected.macros(recurrence, dtype, resets))
    cubin = nvrtc.compile_cubin(projected.source(recurrence), "sm_90a", macros)
    assert cubin[:4] == b"\x7fELF"


def test_short_sequences_share_tiles_and_long_ones_have_their_own():
    assert projected.lines_of(16, 4096, True, 256) == (16, 4096)
    assert projected.lines_of(16, 4100, True, 128) == (16, 4100)  # to share one tile in 33 is not worth waiting
    assert projected.lines_of(256, 128, True, 256) == (1, 256 * 128)
    assert projected.lines_of(7, 300, True, 256) == (1, 2100)
    assert projected.lines_of(4096, 16, False, 256) == (16, 4096)
    assert projected.lines_of(128, 256, False, 256) is None  # steps of a sequence are not neighbours
    assert projected.lines_of(100, 15, True, 256) is None  # a run would hold several sequences
    assert projected.lines_of(1, 255, True, 256) is None


SHAPES = {  # batch, steps, input and hidden size
    "one tile": (1, 256, 64, 96),
    "tiles of a sequence": (2, 1024, 128, 256),
    "odd steps": (3, 1517, 264, 1032),
    "odd short steps": (37, 33, 72, 72),
    "sequences of a tile": (256, 128, 256, 256),
    "one long sequence": (1, 16385, 64, 128),
    "more tiles than blocks, little depth": (64, 500, 8, 504),
}


LAYERS = {"mingru": ostinato.MinGRU, "minlstm": ostinato.MinLSTM}


def expected(layer, x, h0, resets):
    """The layer's states in float64."""
    gates = (x.double() @ layer.weight_ih_l0.double().T + layer.bias_ih_l0.double()).chunk(GATES[layer.cell], -1)
    *shares, c = (*map(torch.sigmoid, gates[:-1]), CANDIDATES[layer.candidate](gates[-1]))
    mix = shares[0] if layer.cell == "mingru" else shares[1] / (shares[0] + shares[1])
    h, states = h0[0].double(), []
    for t in range(x.shape[1]):
        h = torch.where(resets[:, t, None], 0, h)
        h = h + mix[:, t] * (c[:, t] - h)
        states.append(h)
    return torch.stack(states, 1)


def drawn(shape, dtype, candidate="positive", batch_first=True, cell="mingru"):
    batch, steps, inputs, hidden = shape
    torch.manual_seed(0)
    how = {"batch_first": batch_first, "candidate": candidate, "device": "cuda", "dtype": dtype}
    layer = LAYERS[cell](inputs, hidden, **how)
    x = torch.randn(batch, steps, inputs, device="cuda").to(dtype)
    resets = torch.rand(batch, steps, device="cuda") < 0.02
    resets[::2, 0] = True  # where the state is zero, given or not
    return layer, x, torch.randn(1, batch, hidden, device="cuda").to(dtype), resets


@pytest.fixture
def launches(monkeypatch):
    """Counts the kernel's launches, which calls that are replayed would not make."""
    count = []
    scan = projected.scan
    monkeypatch.setattr(projected, "scan", lambda *args: count.append(1) or scan(*args))
    with launched():
        yield count


@pytest.mark.gpu
@pytest.mark.skipif(not RUNS, reason="needs a Hopper GPU")
class TestOnHopper:
    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
    @pytest.mark.parametrize("cell", LAYERS)
    def test_layers_are_those_of_float64(self, cell, shape, dtype, nan_memory, launches):
        layer, x, h0, resets = drawn(shape, dtype, list(CANDIDATES)[shape[0] % 3], cell=cell)
        nothing = torch.zeros_like(resets)
        for state, begins in itertools.product((None, h0), (None, resets)):
            with torch.no_grad():
                h, h_last = layer(x, state, resets=begins)
            start, marks = torch.zeros_like(h0) if state is None else h0, nothing if begins is None else begins
            exact = expected(layer, x, start, marks)
            assert (h - exact).norm() <= TOLERANCE[dtype] * exact.norm()
            assert torch.equal(h_last[0], h[:, -1])
            for _ in range(20):
                with torch.no_grad():
                    assert torch.equal(layer(x, state, resets=begins)[0], h)
        assert len(launches) == 4 * 21

    @pytest.mark.parametrize("cell", LAYERS)
    def test_time_may_come_first(self, cell, nan_memory, launches):
        layer, x, h0, resets = drawn((3, 1517, 64, 136), torch.bfloat16, batch_first=False, cell=cell)
        with torch.no_grad():
            h, h_last = layer(x.transpose(0, 1).contiguous(), h0, resets=resets.t())
        exact = expected(layer, x, h0, resets)
        assert (h.transpose(0, 1) - exact).norm() <= TOLERANCE[torch.bfloat16] * exact.norm()
        assert torch.equal(h_last[0], h[-1])
        assert launches

    def test_nan_stays_in_its_channel_and_episode(self, launches):
        layer, x, h0, resets = drawn((8, 128, 64, 128), torch.bfloat16)
        resets[:] = False
        resets[3, 77] = True
        with torch.no_grad():
            layer.bias_ih_l0[5] = float("nan")
            clean, _ = layer(x, h0, resets=resets)
            h0[0, 3:5, 9] = float("nan")
            h, _ = layer(x, h0, resets=resets)
        bad = torch.zeros_like(h, dtype=torch.bool)
        bad[..., 5] = True
        bad[4, :, 9] = bad[3, :77, 9] = True
        assert torch.equal(h.isnan(), bad)
        assert torch.equal(h[~bad], clean[~bad])
        assert launches

    def test_a_captured_layer_can_be_replayed(self, launches):
        layer, x, h0, _ = drawn((2, 4096, 64, 128), torch.bfloat16)
        with torch.no_grad():
            expect, _ = layer(x, h0)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                h, _ = layer(x, h0)
            for _ in range(3):
                h.fill_(float("nan"))
                graph.replay()
                assert torch.equal(h, expect)
        assert len(launches) == 2

    def test_gradients_and_what_does_not_fit_go_the_other_way(self, launches):
        layer, x, *_ = drawn((2, 512, 64, 128), torch.bfloat16)
        layer(x)[0].sum().backward()
        with torch.no_grad():
            layer(x[:, :100])
            ostinato.MinGRU(64, 100, batch_first=True, device="cuda", dtype=torch.bfloat16)(x)
            ostinato.MinGRU(64, 128, batch_first=True, device="cuda")(x.float())
        assert not launches
