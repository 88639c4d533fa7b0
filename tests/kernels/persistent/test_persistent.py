"""The persistent CUDA kernels against the loop over time in float64, over cells, dtypes, sizes and ways to multiply."""

import itertools
import os
import random
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ostinato
from gpus import ARCHITECTURES, H100
from ostinato.kernels import nvrtc
from ostinato.kernels.persistent import cuda, reference
from ostinato.kernels.persistent.arguments import Layer, Saved
from ostinato.kernels.persistent.cuda import geometry, passes, search
from ostinato.kernels.persistent.cuda import launch as cuda_launch
from ostinato.kernels.persistent.cuda import plan as cuda_plan
from ostinato.kernels.persistent.cuda.costs import microseconds
from ostinato.kernels.persistent.cuda.fitting import fill_registers
from ostinato.kernels.persistent.cuda.geometry import Geometry
from ostinato.kernels.persistent.plan import GATES, Plan
from ostinato.kernels.persistent.sequences import Sequences
from persistent_layers import candidate, candidates, random_mask

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
CELLS = ("rnn_tanh", "rnn_relu", "gru", "lstm")
TOLERANCE = {f32: 2e-6, f16: 2e-3, bf16: 1.5e-2}


class Case:
    """A layer with random weights, and its inputs."""

    def __init__(self, path, cell, hidden, batch, dtype, density=1.0, block=None, forward=None, back=None):
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
        forward = forward or candidate(path, *layer, properties=properties)
        if back is None:  # what is kept in strips forward may not fit in strips of the transposed matrix
            paths = (path, "dense") if path == "block" else (path,)
            ways = (candidates(name, *layer, properties=properties, backward=True) for name in paths)
            back = min(itertools.chain(*ways), key=lambda g: microseconds(g, batch), default=None)
        self.is_trained = back is not None
        self.plan = Plan(path, geometry=cuda_plan.Geometries(forward, back))

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
        return projected, h, c, Sequences(batch, offsets if packed else None, begins)

    def layer(self, inputs, reverse):
        _, h, c, sequences = inputs
        return Layer(self.cell, self.weight, self.bias, self.mask, h, c, sequences._replace(reverse=reverse))

    def forward(self, inputs, reverse, kernels=cuda, wide=lambda x: x):
        projected = inputs[0].clone()  # which a forward may write to
        return kernels.forward(wide(self.layer(inputs, reverse)), wide(projected), self.plan, True)

    def gradients(self, inputs, reverse):
        """What backward gets; the states and arguments of gates are any numbers."""
        projected, h, c, _ = inputs
        states = self.uniform(len(projected), self.hidden)
        rnn, gru, lstm = self.cell.startswith("rnn"), self.cell == "gru", self.cell == "lstm"
        saved = Saved(
            states if rnn else projected,
            self.uniform(*states.shape) if gru else None,
            states,
            torch.randn_like(states, dtype=torch.float32) if lstm else None,
        )
        upstream = torch.randn_like(states), *(None if x is None else torch.randn_like(x) for x in (h, c))
        return self.layer(inputs, reverse), saved, upstream, self.plan

    @staticmethod
    def backward(gradients, kernels=cuda, wide=lambda x: x):
        """What backward returns, but the sum of the rows to be summed, of which the reference has another number."""
        *others, rows = kernels.backward(*map(wide, gradients))
        return (*others, rows.sum(0))

    def both(self, inputs, gradients, reverse, kernels=cuda, wide=lambda x: x):
        """All that forward and backward return; forward alone where no kernel fits backward."""
        results = self.forward(inputs, reverse, kernels, wide)
        return (*results, *self.backward(gradients, kernels, wide)) if self.is_trained else results

    def expected(self, inputs, reverse):
        return self.forward(inputs, reverse, reference, double)

    def check(self):
        torch.cuda.synchronize()
        cuda_launch.check(self.plan.geometry.forward, 0)


def double(x):
    """A tensor of floating point numbers, or all in a tuple, in float64."""
    if isinstance(x, Layer | Saved):
        return type(x)(*map(double, x))
    if type(x) is tuple:
        return tuple(map(double, x))
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
            code = nvrtc.source(*geometry.files(chosen))
            macros = dict(chosen.macros(resets=path != "sparse", packed=backward))
            assert nvrtc.compile_cubin(code, architecture, macros)[:4] == b"\x7fELF"


def test_both_kernels_of_a_layer_are_compiled_at_the_same_time(monkeypatch):
    started, asked = threading.Barrier(2, timeout=20), []

    def compiled(geometry, device, resets, packed, keeps):
        asked.append((geometry.backward, device, resets, packed, keeps))
        started.wait()

    monkeypatch.setattr(cuda_launch, "kernels", compiled)
    layer = "dense", "gru", 130, 4, f32
    cuda_launch.compile_kernels(0, True, False, True, candidate(*layer), candidate(*layer, backward=True))
    assert sorted(asked) == [(False, 0, True, False, True), (True, 0, True, False, False)]


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_of_rounded_numbers_compile_without_a_gpu(backward):
    pytest.importorskip("cuda.core")
    for chosen in rounded("gru", 130, 20, backward)[backward::2]:
        code, macros = nvrtc.source(*geometry.files(chosen)), dict(chosen.macros())
        assert nvrtc.compile_cubin(code, "sm_90", macros)[:4] == b"\x7fELF"


def rounded(cell, hidden, batch, backward, properties=H100):
    """Geometries in tf32, with one and with two buffers of partial sums."""
    start = Geometry("dense", cell, hidden, f32, 0, 0, 0, backward, exact=False)
    found = search.candidates(start, batch, 1.0, None, properties)
    found = {(g.cluster, g.loads_early): g for g in found if g.turns == 1 and not g.distributed}
    return [g._replace(sum_buffers=n) for g in found.values() for n in (1, 2)]


def test_rounded_states_show_their_step_unless_slices_are_padded():
    for cluster, hidden, tagged in ((1, 130, True), (2, 128, True), (2, 130, False)):
        start = Geometry("dense", "gru", hidden, f32, 16, 8, 1, True, exact=False, cluster=cluster)
        assert start.tagged == tagged
        assert not start._replace(exact=True).tagged
        assert not start._replace(dtype=f16).tagged


def test_the_memory_of_the_exchange_backward_does_not_grow_with_the_steps(monkeypatch):
    monkeypatch.setattr(cuda_launch, "kernels", lambda *_: SimpleNamespace(processors=132))
    for layer in (("dense", "gru", 515, 23, f16), ("dense", "lstm", 1024, 64, f32)):
        chosen = candidate(*layer, backward=True)
        launch_of = partial(cuda_launch._launch_of.__wrapped__, chosen, 0)
        few, many = (launch_of(n, layer[3], False, False, False).bytes["states"] for n in (1, 999))
        assert few == many == 8 * geometry.ceil_div(layer[3], chosen.columns) * chosen.group_bytes


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
        (33, False, False, True, 0.2),
        (64, True, True, False, 0.2),
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
        yield rows, first if with_first else None, Sequences(32, offsets, marks, reverse)


def on_gpu(x):
    """A tensor, or the sequences with their tensors, there."""
    if isinstance(x, Sequences):
        return Sequences(*map(on_gpu, x))
    return x.cuda() if isinstance(x, torch.Tensor) else x


@pytest.mark.gpu
def test_the_state_before_each_step_equals_the_reference(nan_memory):
    torch.manual_seed(0)
    for given in states_to_shift():
        assert torch.equal(cuda.previous(*map(on_gpu, given)).cpu(), reference.previous(*given))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
def test_the_copy_of_states_compiles_without_a_gpu(architecture):
    pytest.importorskip("cuda.core")
    for macros in map(passes.macros_of_copy, passes.UNITS):
        code = nvrtc.source("persistent/cuda/previous.cu")
        assert nvrtc.compile_cubin(code, architecture, dict(macros))[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize(("batch", "hidden"), [(1, 1), (3, 8), (17, 33), (200, 515)])
@pytest.mark.parametrize("cell", ["rnn_tanh", "gru", "lstm"])
def test_gradients_of_biases_equal_the_reference(cell, batch, hidden, dtype, nan_memory):
    torch.manual_seed(0)
    totals = torch.randn(batch, hidden * (1 if cell == "rnn_tanh" else 4), device="cuda")
    exact = reference.gradients_of_biases(totals.double(), torch.float64, cell)
    for ours, expected in zip(cuda.gradients_of_biases(totals, dtype, cell), exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=torch.finfo(dtype).eps, atol=batch * 1e-6)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
def test_the_sums_of_biases_compile_without_a_gpu(architecture, dtype):
    pytest.importorskip("cuda.core")
    code, macros = cuda_launch.source_of_biases(dtype)
    assert nvrtc.compile_cubin(code, architecture, dict(macros))[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("layer", [("lstm", 515, 23, f16), ("gru", 1024, 16, bf16), ("rnn_tanh", 256, 3, f32)])
def test_clusters_match_the_reference(layer, cluster, nan_memory):
    torch.manual_seed(0)
    for back in candidates("dense", *layer, properties=torch.cuda.get_device_properties(0), backward=True)[::7]:
        if back.cluster == cluster:
            case = Case("dense", *layer, back=back)
            gradients = case.gradients(case.inputs(9), False)
            found, expected = case.backward(gradients), case.backward(gradients, reference, double)
            assert max(errors(found, expected)) < TOLERANCE[case.dtype], back


def within_clusters(cell, hidden, batch, dtype, exact=True, backward=False, properties=H100):
    """Geometries that exchange everything within clusters, of all sizes, with few and with many columns."""
    start = Geometry("dense", cell, hidden, dtype, 0, 0, 0, backward, exact)
    found = [g for g in search.candidates(start, batch, 1.0, None, properties) if g.distributed]
    sizes = {g.blocks: [x for x in found if x.blocks == g.blocks] for g in found}
    return [of_size[k] for of_size in sizes.values() for k in {0, len(of_size) - 1}]


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        ("gru", 256, 5, f16),
        ("lstm", 130, 23, bf16),
        ("rnn_tanh", 101, 16, f32),
        ("lstm", 512, 3, f16),
        ("gru", 200, 1, f32),
        ("rnn_relu", 5, 40, f16),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_exchanges_within_clusters_match_the_reference(layer, exact, backward, nan_memory):
    torch.manual_seed(0)
    if not exact and layer[3] != f32:
        pytest.skip("only float32 is rounded")
    tolerance = TOLERANCE[layer[3]] if exact else 1e-3
    for chosen in within_clusters(*layer, exact, backward, torch.cuda.get_device_properties(0)):
        case = Case("dense", *layer, **{"back" if backward else "forward": chosen})
        for steps, reverse, packed, resets in ((17, False, False, 0.0), (64, True, True, 0.2), (1, False, False, 0.0)):
            inputs = case.inputs(steps, packed=packed, resets=resets)
            given = case.gradients(inputs, reverse)
            run = partial(case.backward, given) if backward else partial(case.forward, inputs, reverse)
            found, again = run(), run()
            case.check()
            assert all(x is None or torch.equal(x, y) for x, y in zip(found, again, strict=True))
            assert max(errors(found, run(reference, double))) < tolerance, chosen


@pytest.mark.parametrize(
    ("layer", "backward"),
    [(("gru", 256, 5, f16), False), (("lstm", 130, 23, bf16), True), (("rnn_tanh", 101, 16, f32), False)],
)
def test_kernels_within_clusters_compile_without_a_gpu(layer, backward):
    pytest.importorskip("cuda.core")
    for chosen in within_clusters(*layer, backward=backward)[::2]:
        code, macros = nvrtc.source(*geometry.files(chosen)), dict(chosen.macros(resets=True, keeps=not backward))
        assert nvrtc.compile_cubin(code, "sm_90", macros)[:4] == b"\x7fELF"


PAIRS = [("gru", 1026, 64, bf16), ("lstm", 514, 64, f16), ("lstm", 1024, 64, bf16)]


def in_pairs(cell, hidden, batch, dtype, backward, properties=H100):
    """Geometries whose threads take adjacent units together, of each size of clusters."""
    start = Geometry("dense", cell, hidden, dtype, 0, 0, 0, backward)
    found = [g for g in search.candidates(start, batch, 1.0, None, properties) if g.turns == 1 and g.adjacent == 2]
    return list({g.cluster: g for g in sorted(found, key=lambda g: -microseconds(g, batch))}.values())


@pytest.mark.gpu
@pytest.mark.parametrize("layer", PAIRS)
def test_adjacent_units_match_the_reference(layer, nan_memory):
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    (forward,), backwards = (in_pairs(*layer, back, properties) for back in (False, True))
    assert {g.cluster for g in backwards} >= {1, 2}
    for back in backwards:
        case = Case("dense", *layer, forward=forward, back=back)
        for steps, reverse, packed, resets in ((9, False, False, 0.0), (7, True, True, 0.2), (1, False, False, 0.0)):
            inputs = case.inputs(steps, packed=packed, resets=resets)
            gradients = case.gradients(inputs, reverse)
            found, again = (case.both(inputs, gradients, reverse) for _ in range(2))
            case.check()
            assert all(x is None or torch.equal(x, y) for x, y in zip(found, again, strict=True))
            expected = case.both(inputs, gradients, reverse, reference, double)
            assert max(errors(found, expected)) < TOLERANCE[case.dtype], back


@pytest.mark.gpu
def test_adjacent_units_of_tensors_that_are_not_aligned():
    torch.manual_seed(0)
    layer = "lstm", 512, 64, bf16
    forward, backward = (in_pairs(*layer, back)[0] for back in (False, True))
    case = Case("dense", *layer, forward=forward, back=backward)
    inputs = case.inputs(5)
    gradients = case.gradients(inputs, False)

    def shifted(x):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    right = case.both(inputs, gradients, False)
    found = case.both(tuple(map(shifted, inputs)), tuple(map(shifted, gradients)), False)
    assert all(x is None or torch.equal(x, y) for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_of_adjacent_units_compile_without_a_gpu(backward):
    pytest.importorskip("cuda.core")
    for layer in PAIRS[backward::2]:
        chosen = in_pairs(*layer, backward)[0]
        code, macros = nvrtc.source(*geometry.files(chosen)), dict(chosen.macros(resets=True, packed=True))
        assert nvrtc.compile_cubin(code, "sm_90", macros)[:4] == b"\x7fELF"


def test_adjacent_units_where_every_thread_has_pairs_of_them():
    whole = Geometry("dense", "gru", 1024, bf16, 32, 16, 4)
    assert whole.adjacent == 2
    others = {"hidden_size": 1023, "units": 31, "columns": 8, "dtype": f32, "cell": "rnn_tanh", "distributed": True}
    assert all(whole._replace(**{name: x}).adjacent == 1 for name, x in others.items())


FEW = [("gru", 515, bf16), ("lstm", 256, f16), ("rnn_tanh", 101, f32), ("gru", 384, f32)]


def of_any_number(cell, hidden, dtype, backward, properties=H100):
    """Geometries of each size of clusters, whose kernels take fewer sequences, too."""
    start = Geometry("dense", cell, hidden, dtype, 0, 0, 0, backward, exact=False)
    found = [g for g in search.candidates(start, 8, 1.0, None, properties) if g.takes_fewer and g.columns == 8]
    return list({g.cluster: g for g in found}.values())


@pytest.mark.gpu
@pytest.mark.parametrize("layer", FEW)
def test_fewer_sequences_match_the_reference(layer, nan_memory):
    torch.manual_seed(0)
    tolerance, properties = 1e-3 if layer[2] == f32 else TOLERANCE[layer[2]], torch.cuda.get_device_properties(0)
    for backward in (False, True):
        for kernel, columns in itertools.product(of_any_number(*layer, backward, properties), (2, 3, 7)):
            chosen = kernel._replace(columns=columns, groups=2)  # some of the sequences are of a later launch
            case = Case("dense", *layer[:2], 11, layer[2], **{"back" if backward else "forward": chosen})
            for steps, special in ((9, False), (34, True)):
                inputs = case.inputs(steps, packed=special, resets=0.2 * special)
                given = case.gradients(inputs, special)
                run = partial(case.backward, given) if backward else partial(case.forward, inputs, special)
                found, again = run(), run()
                case.check()
                assert all(x is None or torch.equal(x, y) for x, y in zip(found, again, strict=True))
                assert max(errors(found, run(reference, double))) < tolerance, chosen


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layer", FEW)
def test_one_kernel_takes_two_to_eight_sequences(layer, backward):
    found = of_any_number(*layer, backward)
    assert {g.cluster for g in found} == ({1, 2, 4} if backward else {1})
    for kernel, columns in itertools.product(found, range(2, 8)):
        fewer = kernel._replace(columns=columns)
        assert fewer.macros() == kernel.macros()
        assert (fewer.shared_bytes, fewer.group_bytes) == (kernel.shared_bytes, kernel.group_bytes)
    assert found[0]._replace(columns=1).macros() != found[0].macros()


def test_weights_are_not_streamed_to_make_room_for_sequences_that_do_not_exist():
    start = Geometry("dense", "lstm", 2048, f32, 16, 4, 1, exact=False, tiles=128, sum_buffers=1)
    chosen = fill_registers(start, H100.shared_memory_per_block_optin)
    assert chosen.capacity == 4
    assert chosen.streamed < fill_registers(start._replace(columns=8), H100.shared_memory_per_block_optin).streamed


IN_TURNS = [
    ("gru", 2048, 16, bf16),
    ("lstm", 2048, 30, f16),
    ("lstm", 1024, 48, f32),
    ("gru", 1280, 32, f32),
    ("gru", 1024, 64, bf16),
    ("lstm", 512, 64, bf16),
    ("lstm", 1333, 40, f16),  # padded to whole copies, as those that follow
    ("gru", 1500, 40, bf16),
    ("gru", 650, 100, f32),
]


def in_turns(cell, hidden, batch, dtype, backward, properties=H100):
    """Geometries whose blocks compute two groups in turn, of each size of groups and clusters and number at once."""
    start = Geometry("dense", cell, hidden, dtype, 0, 0, 0, backward, exact=False)
    found = [g for g in search.candidates(start, batch, 1.0, None, properties) if g.turns == 2 and not g.wide]
    return list({(g.columns, g.groups, g.cluster): g for g in found}.values())


@pytest.mark.gpu
@pytest.mark.parametrize("layer", IN_TURNS)
def test_groups_in_turn_match_the_reference(layer, nan_memory):
    torch.manual_seed(0)
    tolerance = 1e-3 if layer[3] == f32 else TOLERANCE[layer[3]]  # float32 is rounded
    properties = torch.cuda.get_device_properties(0)
    forwards, backwards = (in_turns(*layer, back, properties)[:2] for back in (False, True))
    for forward, back in itertools.zip_longest(forwards, backwards):
        case = Case("dense", *layer, forward=forward, back=back)
        for steps, batch, special in ((13, layer[2], False), (34, layer[2], True), (3, 5, False), (1, 9, True)):
            inputs = case.inputs(steps, batch, packed=special, resets=0.2 * special)
            gradients = case.gradients(inputs, special)
            found, again = (case.both(inputs, gradients, special) for _ in range(2))
            case.check()
            assert all(x is None or torch.equal(x, y) for x, y in zip(found, again, strict=True))
            expected = case.both(inputs, gradients, special, reference, double)
            assert max(errors(found, expected)) < tolerance, (forward, back)


WIDE = [("lstm", 1152, 150, bf16), ("lstm", 2048, 128, f16), ("lstm", 1502, 100, bf16)]  # the last is padded


def wide(cell, hidden, batch, dtype, backward, properties=H100):
    """Geometries whose warpgroups multiply, of each size of groups."""
    start = Geometry("dense", cell, hidden, dtype, 0, 0, 0, backward)
    return [g for g in search.candidates(start, batch, 1.0, None, properties) if g.wide]


@pytest.mark.gpu
@pytest.mark.parametrize("layer", WIDE)
def test_wide_batches_match_the_reference(layer, nan_memory):
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    if properties.major != 9:
        pytest.skip("only Hopper multiplies by warpgroups")
    for forward, back in zip(*(wide(*layer, back, properties) for back in (False, True)), strict=True):
        case = Case("dense", *layer, forward=forward, back=back)
        case.bias = case.uniform(4 * case.hidden)
        for steps, batch, reverse, packed, resets in (
            (13, layer[2], False, False, 0.0),
            (34, layer[2], True, True, 0.2),
            (9, 37, True, False, 0.2),
            (17, 300, False, False, 0.0),
            (1, 3, False, False, 0.0),
        ):
            inputs = case.inputs(steps, batch, with_state=steps != 9, packed=packed, resets=resets)
            gradients = case.gradients(inputs, reverse)
            found, again = (case.both(inputs, gradients, reverse) for _ in range(2))
            case.check()
            assert all(x is None or torch.equal(x, y) for x, y in zip(found, again, strict=True))
            expected = case.both(inputs, gradients, reverse, reference, double)
            assert max(errors(found, expected)) < TOLERANCE[case.dtype], (forward, back, batch)


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_of_wide_batches_compile_without_a_gpu(backward):
    pytest.importorskip("cuda.core")
    for chosen in wide(*WIDE[backward], backward):
        code, macros = nvrtc.source(*geometry.files(chosen)), chosen.macros(True, True, keeps=not backward)
        assert nvrtc.compile_cubin(code, "sm_90" + chosen.feature, dict(macros))[:4] == b"\x7fELF"


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_of_groups_in_turn_compile_without_a_gpu(backward):
    pytest.importorskip("cuda.core")
    for layer in IN_TURNS[backward::2]:
        for chosen in in_turns(*layer, backward)[:1]:
            code, macros = nvrtc.source(*geometry.files(chosen)), chosen.macros(True, True, keeps=not backward)
            assert nvrtc.compile_cubin(code, "sm_90" + chosen.feature, dict(macros))[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [("gru", 512, 37), ("gru", 512, 32), ("lstm", 130, 23), ("rnn_tanh", 101, 5)])
def test_rounded_states_match_the_reference(layer, nan_memory):
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    forwards, backwards = (rounded(*layer, backward, properties) for backward in (False, True))
    case = Case("dense", *layer, f32)
    for k, ((steps, packed, resets), backward) in enumerate(
        itertools.product(((19, False, 0.0), (7, True, 0.2)), backwards)
    ):
        case.plan = case.plan._replace(geometry=cuda_plan.Geometries(forwards[k % len(forwards)], backward))
        inputs = case.inputs(steps, packed=packed, resets=resets)
        gradients = case.gradients(inputs, packed)
        found, expected = (case.both(inputs, gradients, packed, *how) for how in ((), (reference, double)))
        case.check()
        assert max(errors(found, expected)) < 1e-3, case.plan.geometry


@pytest.mark.gpu
def test_a_step_that_no_longer_fits_into_the_spare_bits(nan_memory):
    torch.manual_seed(0)
    case = Case("dense", "gru", 8, 2, f32)
    forward, backward = (rounded("gru", 8, 2, back, torch.cuda.get_device_properties(0))[0] for back in (False, True))
    case.plan = case.plan._replace(geometry=cuda_plan.Geometries(forward, backward))
    inputs = case.inputs(2**13 + 6)
    gradients = case.gradients(inputs, False)
    found, expected = (case.both(inputs, gradients, False, *how) for how in ((), (reference, double)))
    case.check()
    assert max(errors(found, expected)) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [("lstm", 512, 16, f16), ("gru", 1024, 8, bf16), ("lstm", 256, 16, f32)])
def test_gradients_keep_their_bits_beside_other_traffic(layer):
    """Blocks exchange words in buffers taken in turn: one that came too late would be taken for a later one."""
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    half = properties.multi_processor_count // 2  # the other has room for copies
    found = candidates("dense", *layer, properties=properties, backward=True)
    found = (g for g in found if g.state_buffers and not g.distributed and g.blocks * g.groups <= half)
    case = Case("dense", *layer, back=min(found, key=lambda g: microseconds(g, layer[2])))
    gradients = case.gradients(case.inputs(41), False)
    expected = case.backward(gradients)
    torch.cuda.synchronize()
    first, second = (torch.cuda.Stream(priority=priority) for priority in (-1, 0))
    memory = torch.empty(2, 1 << 28, device="cuda")
    different = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(300):
        with torch.cuda.stream(second):
            memory[0].copy_(memory[1])
        with torch.cuda.stream(first):
            for _ in range(4):
                for x, y in zip(case.backward(gradients), expected, strict=True):
                    if x is not None:
                        different |= (x != y).any()
    case.check()
    assert not different


@pytest.mark.gpu
def test_tf32_only_where_it_is_allowed():
    torch.manual_seed(0)
    for exact, least, most in ((True, 0, 2e-6), (False, 1e-5, 1e-3)):
        case = Case("dense", "lstm", 515, 5, f32)
        forward, backward = (g._replace(exact=exact) for g in case.plan.geometry)
        case.plan = case.plan._replace(geometry=cuda_plan.Geometries(forward, backward))
        inputs = case.inputs(33)
        gradients = case.gradients(inputs, False)
        assert least <= max(errors(case.forward(inputs, False), case.expected(inputs, False))) < most
        assert least <= max(errors(case.backward(gradients), case.backward(gradients, reference, double))) < most


@pytest.mark.gpu
def test_error_is_no_larger_than_cudnns(monkeypatch):
    """Over 2,000 steps, of the output and of every gradient; of GRU and LSTM rounded to tf32, too."""
    torch.manual_seed(0)
    cases = [*itertools.product((nn.RNN, nn.GRU, nn.LSTM), (f16, bf16, f32), [256], [8]), (nn.RNN, f32, 512, 5)]
    for (kind, dtype, hidden, batch), tf32 in itertools.product(cases, (False, True)):
        if tf32 and (dtype is not f32 or kind is nn.RNN):
            continue
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
        theirs = kind(64, hidden).cuda().to(dtype)
        ours = getattr(ostinato, kind.__name__)(64, hidden).cuda().to(dtype)
        exact = kind(64, hidden).cuda().double()
        for layer in (ours, exact):
            layer.load_state_dict(theirs.state_dict())
        assert ours.plan(batch, dtype, training=True).path == "dense"
        x = torch.randn(2000, batch, 64, device="cuda", dtype=dtype)
        grad = torch.randn(2000, batch, hidden, device="cuda", dtype=dtype)

        def results(layer, x=x, grad=grad):
            dtype = layer.weight_hh_l0.dtype
            x = x.to(dtype).requires_grad_()
            output = layer(x)[0]
            output.backward(grad.to(dtype))
            return [y.double() for y in (output, x.grad, *(p.grad for p in layer.parameters()))]

        with torch.backends.cudnn.flags(enabled=False):
            expected = results(exact)
        for mine, cudnns, right in zip(results(ours), results(theirs), expected, strict=True):
            assert (mine - right).norm() <= 1.5 * (cudnns - right).norm() + 2e-7 * right.norm(), (kind, dtype, tf32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
@pytest.mark.parametrize(("products", "layers"), [*itertools.product([False, True], repeat=2)])
def test_float32_is_as_exact_as_the_switch_of_torchs_layers_says(kind, products, layers, monkeypatch):
    """Whatever that of products says, forward and backward, in cuDNN and here."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", products)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", layers)
    theirs, exact = kind(96, 256).cuda(), kind(96, 256).double().cuda()
    ours = getattr(ostinato, kind.__name__)(96, 256).cuda()
    for layer in (ours, exact):
        layer.load_state_dict(theirs.state_dict())
    assert ours.plan(16, training=True).path == "dense"
    x, grad = torch.randn(100, 16, 96, device="cuda"), torch.randn(100, 16, 256, device="cuda")

    def results(layer):
        leaf = x.to(layer.weight_hh_l0.dtype, copy=True).requires_grad_()
        output = layer(leaf)[0]
        return [output, *torch.autograd.grad(output, [leaf, *layer.parameters()], grad.to(output.dtype))]

    with torch.backends.cudnn.flags(enabled=False):
        expected = results(exact)
    for mine, cudnns, right in zip(results(ours), results(theirs), expected, strict=True):
        error, theirs_is = ((y.double() - right).norm() / right.norm() for y in (mine, cudnns))
        assert error <= 1.5 * theirs_is + 2e-7
        assert (error > 1e-5) == layers


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("nonlinearity", "hidden", "batch"),
    [*((f, *sizes) for f in ("relu", "tanh") for sizes in ((192, 30), (256, 8), (384, 16))), ("relu", 512, 16)],
)
def test_error_in_tf32_is_no_larger_than_cudnns_where_states_count_most(nonlinearity, hidden, batch, monkeypatch):
    """With tiny inputs, whose products both round."""
    torch.manual_seed(0)
    for library in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(library, "allow_tf32", True)
    layers = [kind(64, hidden, nonlinearity=nonlinearity).cuda() for kind in (nn.RNN, ostinato.RNN, nn.RNN)]
    theirs, ours, exact = layers
    for layer in (ours, exact.double()):
        layer.load_state_dict(theirs.state_dict())
    x, h0 = 1e-3 * torch.randn(100, batch, 64, device="cuda"), torch.randn(1, batch, hidden, device="cuda")
    grad = torch.randn(100, batch, hidden, device="cuda")

    def results(layer):
        leaves = [y.to(layer.weight_hh_l0.dtype, copy=True).requires_grad_() for y in (x, h0)]
        output = layer(*leaves)[0]
        return [output, *torch.autograd.grad(output, [*leaves, *layer.parameters()], grad.to(output.dtype))]

    with torch.backends.cudnn.flags(enabled=False):
        expected = results(exact)
    for mine, cudnns, right in zip(results(ours), results(theirs), expected, strict=True):
        assert (mine - right).norm() <= 1.5 * (cudnns - right).norm() + 5e-7 * right.norm()


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
        for module in (cuda, passes):
            monkeypatch.setattr(module, "keeps_gates", lambda *_, keeps=keeps: keeps)
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
        gradients = case.gradients(inputs, False)
        gradients[2][0].view(20, 4, -1)[7, 2, 5] = bad
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

    cuda_launch._failure(0).flag[0] = 1
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
