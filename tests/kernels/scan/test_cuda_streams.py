"""CUDA scans of several streams, threads and CUDA graphs at a time, which share no workspace."""

import pytest
import torch

import ostinato
from comparisons import same_bits
from ostinato.kernels.scan.cuda import workspace
from threads import in_threads


@pytest.mark.gpu
def test_launches_of_many_shapes_and_streams_share_nothing():
    torch.manual_seed(0)
    shapes = [(1, 9000, 8), (1, 300000, 1), (2, 20000, 3), (1, 5000, 64)]
    cases = [(torch.rand(s, device="cuda"), torch.randn(s, device="cuda")) for s in shapes]
    wanted = [ostinato.linear_scan(*case)[0] for case in cases]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for k in range(200):
        with torch.cuda.stream(streams[k % 4]):
            got = ostinato.linear_scan(*cases[k % 3])[0]
            assert torch.equal(got, wanted[k % 3])
    graph, replayed = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        replayed = [ostinato.linear_scan(*case)[0] for case in cases]
    for _ in range(3):
        graph.replay()
        assert same_bits(replayed, wanted)


@pytest.mark.gpu
def test_graphs_of_the_compiler_hold_no_workspace(monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(workspace, "_workspaces", {})
    torch.manual_seed(0)
    a, b = torch.rand(1, 300000, 1, device="cuda"), torch.randn(1, 300000, 1, device="cuda")
    expected = ostinato.linear_scan(a, b)[0] + b
    compiled = torch.compile(lambda a, b: ostinato.linear_scan(a, b)[0] + b, mode="reduce-overhead")
    for _ in range(4):  # warmed up, captured, replayed
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(a, b), expected)


@pytest.mark.gpu
def test_streams_and_threads():
    torch.manual_seed(0)
    inputs = [(torch.rand(1, 30000, 40, device="cuda"), torch.randn(1, 30000, 40, device="cuda")) for _ in range(8)]
    want = [ostinato.linear_scan(a, b)[0] for a, b in inputs]
    torch.cuda.synchronize()
    got = [None] * len(inputs)

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                got[i] = ostinato.linear_scan(*inputs[i])[0]
            torch.cuda.current_stream().synchronize()

    in_threads(work, range(len(inputs)))
    assert same_bits(got, want)
