"""Both directions of a layer in one launch of each kernel, against a launch for each."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import ostinato
from ostinato.kernels.persistent import backends, cpu, cuda, directions, reference
from ostinato.kernels.persistent.arguments import Layer
from ostinato.kernels.persistent.cuda import launch as cuda_launch
from ostinato.kernels.persistent.cuda import plan as cuda_plan
from ostinato.kernels.persistent.sequences import Sequences
from ostinato.recurrent import sequences
from persistent_cases import assert_compiles
from persistent_geometries import candidate, candidates, ping_pong, wide
from recurrent_layers import assert_gradients_close, assert_results_close, flat, inputs, twin

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
LAYERS = [  # states in clusters, in clusters of one block, in global memory; groups in turn, products in clusters
    ("RNN", 64, 16, f32),
    ("LSTM", 128, 1, f16),
    ("GRU", 1000, 6, bf16),
    ("GRU", 128, 64, f32),
    ("LSTM", 512, 64, bf16),
    ("LSTM", 768, 16, f16),
    ("RNN", 500, 200, bf16),
]


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_of_both_directions_compile_without_a_gpu(backward):
    pytest.importorskip("cuda.core")
    found = {g.cluster > 1: g for g in candidates("dense", "gru", 130, 4, f32, backward=backward)}
    for geometry in (*found.values(), ping_pong("gru", 512, 128, f16, backward)[0]):
        assert_compiles(geometry, resets=True, rows=2)
    assert_compiles(wide("lstm", 1152, 70, f16, backward)[0], "sm_90", rows=2)


def test_a_launch_of_both_directions_has_the_parameters_of_each(monkeypatch):
    launches, asked = [], []

    def launch(device, grid, block, parameters, *_, rows, **__):
        fields = cuda_launch._parameters(1)
        names, unpacked = (*fields.pointers, "steps", "batch"), [*fields.all.iter_unpack(parameters)]
        assert len(unpacked) == rows == 2
        launches.append([dict(zip(names, own, strict=False)) | {"reverse": own[-1]} for own in unpacked])

    def kernels(geometry, device, *special):
        asked.append(special)
        return cuda_launch._Kernels(SimpleNamespace(launch=launch), SimpleNamespace(launch=launch), 132)

    monkeypatch.setattr(cuda_launch, "kernels", kernels)
    monkeypatch.setattr(cuda_launch, "check", lambda device: None)
    monkeypatch.setattr(cuda_launch, "_failure", lambda device: SimpleNamespace(address=1))
    monkeypatch.setattr(cuda_launch, "launch_stream", lambda device, memory: 0)
    monkeypatch.setattr(cuda_launch, "_launch_of", cuda_launch._launch_of.__wrapped__)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    weights, given = torch.zeros(2, 390, 130), torch.zeros(2, 10, 390)
    layers = [
        Layer("gru", weight, None, None, None, None, Sequences(2, reverse=reverse))
        for weight, reverse in zip(weights, (False, True), strict=True)
    ]
    each = [(layer, {"pre": pre}) for layer, pre in zip(layers, given, strict=True)]
    cuda_launch.launch(candidate("dense", "gru", 130, 2, f32), *each)
    assert asked == [(False, False, False, 2)]
    assert len(launches) == 2  # of the kernel that prepares, and of the loop
    for both in launches:
        assert [(own["steps"], own["batch"], own["reverse"]) for own in both] == [(5, 2, 0), (5, 2, 1)]
        assert [own["pre"] for own in both] == [x.data_ptr() for x in given]
        assert [own["weight"] for own in both] == [x.data_ptr() for x in weights]
        assert len({own[memory] for own in both for memory in ("states", "packed")}) == 4


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_one_launch_leads_to_the_results_and_gradients_of_the_layer(kind, monkeypatch):
    """Of a CPU's kernels, which stand in for a GPU's."""
    launched = []

    def both(function):
        return lambda *each: launched.append(function.__name__) or [function(*own) for own in each]

    monkeypatch.setattr(directions._Both, "in_one_launch", True)
    for kernels in (cpu, reference):
        for name in ("forward", "backward"):
            monkeypatch.setattr(kernels, f"{name}_both", both(getattr(kernels, name)), raising=False)
    layer = getattr(ostinato, kind)(6, 16, 2, bidirectional=True, dtype=torch.float64)
    x, hx = inputs(layer, 3, 30)
    sequences._CALLS._runs.clear()
    assert_results_close(layer(x, hx), twin(layer)(x, hx), 1e-12)
    assert_gradients_close(layer, twin(layer), x, hx)
    sequences._CALLS._runs.clear()
    assert launched == ["forward"] * 4 + ["backward"] * 2


def both_ways(monkeypatch, run):
    """What a function of no arguments returns with both directions in one launch, and with a launch for each."""
    launched, found = [], []

    def counted(function):
        return lambda *given: launched.append(given) or function(*given)

    for name in ("forward_both", "backward_both"):
        monkeypatch.setattr(cuda, name, counted(getattr(cuda, name)))
    for fits in (cuda_plan._fits_at_once, lambda *_: False):
        monkeypatch.setattr(cuda_plan, "_fits_at_once", fits)
        backends._plan_dense.cache_clear()
        sequences._CALLS._runs.clear()
        launched.append(None)
        found.append(run())
    backends._plan_dense.cache_clear()
    sequences._CALLS._runs.clear()
    assert [given is None for given in launched].index(True, 1) > 2, "nothing was launched together"
    assert launched[-1] is None, "something was launched together"
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "hidden", "batch", "dtype"), LAYERS)
@pytest.mark.parametrize("how", ["plain", "resets", "packed"])
def test_both_directions_are_those_of_two_launches(kind, hidden, batch, dtype, how, monkeypatch, nan_memory):
    torch.manual_seed(0)
    layer = getattr(ostinato, kind)(24, hidden, 2, bidirectional=True, device="cuda", dtype=dtype)
    lengths = [20 if how != "packed" else 20 - i % 13 for i in range(batch)]
    x = [torch.randn(length, 24, device="cuda", dtype=dtype) for length in lengths]
    x = pack_sequence(x, enforce_sorted=False) if how == "packed" else torch.stack(x, 1)
    hx = [torch.randn(4, batch, hidden, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2)]
    hx = tuple(hx) if kind == "LSTM" else hx[0]
    resets = torch.rand(20, batch, device="cuda") < 0.1 if how == "resets" else None

    def run():
        results = flat(layer(x, hx, resets=resets))
        wanted = [*(hx if kind == "LSTM" else [hx]), *layer.parameters()]
        torch.manual_seed(1)
        return *results, *torch.autograd.grad(results, wanted, [torch.randn_like(y) for y in results])

    together, apart = both_ways(monkeypatch, run)
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
