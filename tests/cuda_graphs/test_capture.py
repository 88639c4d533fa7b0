"""What a captured graph keeps, on a GPU, and the steps around a capture, simulated on a CPU."""

import contextlib
import copy
import gc

import pytest
import torch

import ostinato
from ostinato.cuda_graphs import capture as capturing
from ostinato.cuda_graphs.capture import bytes_of, capture, captured
from simulated_graphs import Recorded

MIB = 1 << 20


def bytes_kept_with(y):
    """Of the graph of which this is a result."""
    segments = torch.cuda.memory_snapshot()
    pools = [x["segment_pool_id"] for x in segments if 0 <= y.data_ptr() - x["address"] < x["total_size"]]
    return bytes_of(*pools, y)


@pytest.mark.gpu
def test_the_memory_of_cublas_is_in_no_graph():
    """Graphs that are captured later use it, too, and may outlive the one with which it was allocated."""
    device, pool = torch.device("cuda", 0), torch.cuda.graph_pool_handle()
    x = torch.randn(256, 256, device=device)
    torch._C._cuda_clearCublasWorkspaces()
    with captured(device, pool) as graph:
        y = x @ x
    replay, z = capture(lambda: x @ x, device)
    assert bytes_kept_with(y) <= 2 * MIB
    assert bytes_kept_with(z) <= 2 * MIB
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    free = [x["total_size"] for x in torch.cuda.memory_snapshot() if not x["active_size"]]
    assert max(free) >= 4 * MIB  # cuBLAS's, which no one else gets
    for result, again in ((y, graph.replay), (z, replay)):
        again()
        torch.testing.assert_close(result, x @ x)


@pytest.mark.gpu
def test_the_memory_of_cublas_beside_is_in_no_graph():
    """Stacked layers at the same time, each on a stream of its own."""
    layer = ostinato.LSTM(256, 256, 4, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    x, device = torch.randn(256, 16, 256, device="cuda", dtype=torch.bfloat16), torch.device("cuda", 0)
    expected = layer(x)[0]

    def captured_bytes():
        pool = torch.cuda.graph_pool_handle()
        with captured(device, pool) as graph:
            y = layer(x)[0]
        graph.replay()
        assert (y.float() - expected.float()).norm() <= 0.02 * expected.float().norm()
        return bytes_of(pool, y)

    captured_bytes()
    torch._C._cuda_clearCublasWorkspaces()
    assert captured_bytes() == captured_bytes()


@pytest.mark.gpu
def test_a_function_may_differentiate_what_is_captured():
    x = torch.randn(5, 7, device="cuda", requires_grad=True)
    replay, (grad,) = capture(lambda: torch.autograd.grad(x.square().sum(), x))
    with torch.no_grad():
        x.fill_(3)
    replay()
    assert torch.equal(grad, torch.full_like(x, 6))


@pytest.mark.gpu
def test_what_a_function_owns_is_kept_with_its_graph():
    replay, y = capture(torch.nn.Linear(1024, 1024, device="cuda").requires_grad_(False).weight.t().square)
    replay()
    expected = y.clone()
    _ = [torch.full((1024, 1024), 7.0, device="cuda") for _ in range(32)]
    replay()
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_a_failed_capture_leaves_the_next_one_whole():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="capturing"):
        capture(lambda: x.sum().item(), warm_ups=0)
    torch.rand(3, device="cuda")
    replay, y = capture(lambda: x + 1)
    x.fill_(4)
    replay()
    assert y.tolist() == [5, 5, 5]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


class Graph(Recorded):
    """Recorded operations with the methods of a CUDA graph."""

    def capture_begin(self, **options):
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """Returns the pools of failed captures."""
    left = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(capturing, "_capture_stream", lambda *_: None)
    monkeypatch.setattr(capturing, "keep_workspace", lambda device: None)
    monkeypatch.setattr(capturing, "_leave_capture", left.append)
    return left


def test_a_graph_reads_no_copies_of_autocast(on_a_cpu):
    """Which are freed where it ends, and know nothing of later changes of a weight."""
    linear, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        linear(x)  # keeps copies
        with captured(None, (0, 1)) as graph:
            y = linear(x)
        linear.weight.neg_()
        graph.replay()
        assert torch.equal(y, copy.deepcopy(linear)(x))
        assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", ["block", "end"])
def test_a_failed_capture_changes_nothing_else(where, error, on_a_cpu, monkeypatch):
    x = torch.ones(3)

    def fail():
        raise error(where)

    def end(graph):
        Recorded.__exit__(graph, None, None, None)
        fail()

    def run():
        with captured(None, (0, 1)):
            if where == "block":
                fail()

    with monkeypatch.context() as failing:
        if where == "end":
            failing.setattr(Graph, "capture_end", end)
        with pytest.raises(error, match=where):
            run()
    assert on_a_cpu == [(0, 1)]
    assert gc.isenabled()
    assert torch.is_autocast_cache_enabled()
    with captured(None, (0, 2)) as graph:
        y = x + 1
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [5, 5, 5]
    assert on_a_cpu == [(0, 1)]
