"""The persistent CUDA kernels against the loop over time in float64, over cells, dtypes, sizes and ways to multiply."""

import itertools
import os
import random
import threading
from types import SimpleNamespace

import pytest
import torch

from comparisons import same_bits
from gpus import ARCHITECTURES, H100
from ostinato.kernels.persistent import cuda, reference
from ostinato.kernels.persistent.arguments import Layer
from ostinato.kernels.persistent.cuda import launch as cuda_launch
from ostinato.kernels.persistent.cuda.heuristics.fitting import fill_registers
from ostinato.kernels.persistent.sequences import Sequences
from persistent_cases import CELLS, LAYERS, STREAMED, TOLERANCE, Case, assert_compiles, double, errors
from persistent_geometries import candidate, candidates, streamed

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("path", ["dense", "block", "sparse"])
@pytest.mark.parametrize("backward", [False, True])
def test_kernels_compile_without_a_gpu(path, architecture, backward):
    pytest.importorskip("cuda.core")
    index = ARCHITECTURES.index(architecture)
    properties = SimpleNamespace(**{**vars(H100), "major": int(architecture[3:]) // 10})
    for cell, dtype in itertools.islice(zip(CELLS, (f16, f32, bf16, f32), strict=True), index, None, 3):
        found = candidates(path, cell, 130 + index, 5, dtype, 0.3, (16, 1), properties=properties, backward=backward)
        clusters = {g.cluster: g for g in found if not g.distributed}
        assert {1, 2} <= set(clusters) <= {1, 2, 4} if backward and properties.major >= 9 else set(clusters) == {1}
        for chosen in (clusters[min(clusters)], clusters[max(clusters)])[: len(clusters)]:
            if path == "sparse":
                chosen = fill_registers(chosen._replace(tiles=20), H100.shared_memory_per_block_optin)
            assert_compiles(chosen, architecture, resets=path != "sparse", packed=backward)


def test_both_kernels_of_a_layer_are_compiled_at_the_same_time(monkeypatch):
    started, asked = threading.Barrier(2, timeout=20), []

    def compiled(geometry, device, resets, packed, keeps, directions):
        asked.append((geometry.backward, device, resets, packed, keeps, directions))
        started.wait()

    monkeypatch.setattr(cuda_launch, "kernels", compiled)
    layer = "dense", "gru", 130, 4, f32
    cuda_launch.compile_kernels(0, True, False, True, 2, candidate(*layer), candidate(*layer, backward=True))
    assert sorted(asked) == [(False, 0, True, False, True, 2), (True, 0, True, False, False, 2)]


def test_launches_that_share_packed_weights_pack_them_once(monkeypatch):
    given = []

    def launch(*args, **_):
        parameters = cuda_launch._parameters(1)
        address = dict(zip(parameters.pointers, parameters.all.unpack(args[3]), strict=False))
        given.append((address["weight"], address["packed"]))

    kernel = SimpleNamespace(launch=launch)
    monkeypatch.setattr(cuda_launch, "check", lambda device: None)
    monkeypatch.setattr(cuda_launch, "_failure", lambda device: SimpleNamespace(address=1))
    monkeypatch.setattr(cuda_launch, "launch_stream", lambda device, memory: 0)
    monkeypatch.setattr(cuda_launch, "kernels", lambda *_: cuda_launch._Kernels(kernel, kernel, 132))
    chosen, weight, pre = candidate("dense", "gru", 130, 2, f32), torch.zeros(390, 130), torch.zeros(10, 390)
    layer = Layer("gru", weight, None, None, None, None, Sequences(2), {})
    monkeypatch.setattr(cuda_launch, "_launch_of", cuda_launch._launch_of.__wrapped__)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    for each in (layer, layer, layer._replace(packed_weights=None)):
        cuda_launch.launch(chosen, (each, {"pre": pre}))
    (first, packed), _, again, _, (alone, of_its_own), _ = given  # of the kernel that prepares
    assert first == alone == weight.data_ptr()
    assert again == (0, packed)
    assert of_its_own not in (0, packed)


def test_a_timeout_is_told_once_and_not_blamed_on_the_next_kernel(monkeypatch):
    failure = SimpleNamespace(flag=[1])
    monkeypatch.setattr(cuda_launch, "_failure", {2: failure}.get)
    with pytest.raises(RuntimeError, match=r"^an earlier persistent kernel on GPU 2 timed out"):
        cuda_launch.check(2)
    cuda_launch.check(2)
    assert failure.flag == [0]


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
        (33, False, False, True, 0.2),
        (64, True, True, False, 0.2),
        (1, False, True, False, 0.5),
    ):
        inputs = case.inputs(steps, with_state=with_state, packed=packed, resets=resets)
        found = case.both(inputs, gradients := case.gradients(inputs, reverse), reverse)
        for _ in range(20 if steps == 17 else 1):
            again = case.both(inputs, gradients, reverse)
            assert same_bits(found, again)
        case.check()
        expected = case.both(inputs, gradients, reverse, reference, double)
        assert errors(found, expected).max() < TOLERANCE[case.dtype]


@pytest.mark.parametrize(("path", "layer"), STREAMED, ids=lambda x: x if isinstance(x, str) else x[0])
def test_weights_read_from_l2_compile_without_a_gpu(path, layer):
    pytest.importorskip("cuda.core")
    for backward in (False, True):
        for chosen in streamed(path, *layer, backward=backward)[:1]:
            assert_compiles(chosen, "sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize(("path", "layer"), STREAMED, ids=lambda x: x if isinstance(x, str) else x[0])
def test_weights_read_from_l2_match_the_reference(path, layer, nan_memory):
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    forward, *_ = streamed(path, *layer, properties=properties)
    for back in streamed("sparse" if path == "block" else path, *layer, properties=properties, backward=True):
        case = Case(path, *layer, forward=forward, back=back)
        for steps, packed, resets in ((17, False, 0.0), (9, True, 0.2)):
            inputs = case.inputs(steps, packed=packed, resets=resets)
            found = case.both(inputs, gradients := case.gradients(inputs, packed), packed)
            again = case.both(inputs, gradients, packed)
            assert same_bits(found, again)
            case.check()
            expected = case.both(inputs, gradients, packed, reference, double)
            assert errors(found, expected).max() < TOLERANCE[case.dtype]


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
        gradients = case.gradients(inputs, False)
        gradients[2][0].view(20, 4, -1)[7, 2, 5] = bad
        output, grads = (x[0].view(20, 4, -1) for x in (case.forward(inputs, False), cuda.backward(*gradients)))
        case.check()
        others = [0, 1, 3]  # sequences
        expected = case.expected(inputs, False)[0], reference.backward(*map(double, gradients))[0]
        for found, right in zip((output, grads), expected, strict=True):
            assert errors([found[:, others]], [right.view(20, 4, -1)[:, others]]).max() < TOLERANCE[case.dtype]
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
            assert same_bits(x, y)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(*calls[0])
    inputs[0][0].mul_(0.5)
    cases[0].weight.mul_(0.5)  # read at every launch
    graph.replay()
    assert same_bits(captured, both(*calls[0]))

    cuda_launch._failure(0).flag[0] = 1
    with pytest.raises(RuntimeError, match="earlier persistent kernel on GPU 0 timed out"):
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
            worst = errors(found, case.both(inputs, gradients, reverse, reference, double)).max()
            assert worst < TOLERANCE[case.dtype], (layer, size, reverse, worst)
        case.check()
        done += of_a_layer
