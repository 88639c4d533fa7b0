"""Recurrences with recurrent weights in the persistent CUDA kernels: their cells, and what runs them on a GPU."""

import contextlib
import functools
import itertools
import math
import random
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from comparisons import same_bits
from gpus import H100
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.persistent import plan
from ostinato.kernels.persistent.cuda import launch as cuda_launch
from ostinato.kernels.persistent.cuda.source import code, macros
from ostinato.kernels.persistent.sequences import Sequences
from ostinato.kernels.recurrence.symbolic.tracer import trace
from ostinato.kernels.recurrence.weighted import operator, persistent, stepwise
from ostinato.kernels.recurrence.weighted.cell import print_cell
from ostinato.kernels.recurrence.weighted.layer import Layer
from persistent_cases import TOLERANCE, assert_compiles, errors
from persistent_geometries import generated
from weighted_cells import CELLS, call, inputs

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


@functools.cache
def traced(cell):
    """The trace of a call, in which all arguments with products are sequences."""
    function, _, kinds, products = CELLS[cell]
    return trace(function.function, (True,) * products + kinds[products:], function.states)


def printed(cell):
    return print_cell(traced(cell), CELLS[cell][3])


# What the text of a cell is evaluated with.
NAMES = {
    "Compute": float,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "hyperbolic_tangent": math.tanh,
    "hyperbolic_tangent_slope": lambda x: 1 - math.tanh(x) ** 2,
    "maximum": max,
    "minimum": min,
    "absolute": abs,
    "exponential": math.exp,
    "log_one_plus": math.log1p,
    "reciprocal_root": lambda x: x**-0.5,
    "square_root": math.sqrt,
    "quotient": lambda x, y: x / y,
    "reciprocal": lambda x: 1 / x,
}


def evaluated(code, method, out, **given):
    """What a method of the struct writes to each array of ``out``, which says how long they are."""
    (body,) = re.findall(rf"void {method}\([^)]*\) {{\n(.*?)\n    }}", code, re.DOTALL)
    arrays = {name: [math.nan] * size for name, size in out.items()}
    lines = re.sub(r"^ *(const (Compute|bool) )?(.*);$", r"\3", body, flags=re.MULTILINE)
    exec(re.sub(r"= (.+) \? (.+) : (.+)$", r"= \2 if \1 else \3", lines, flags=re.MULTILINE), NAMES | given | arrays)
    return arrays


def of_units(state, x, y, gain):
    h, c = state
    c = 0.9 * c + torch.where(x > 0, y, gain * h)
    return torch.relu(c) + h.detach() * x, c


# A function, its kinds of arguments, states, and products; the derivatives of a step that are kept.
PRINTED = {
    "peephole": (CELLS["peephole"][0].function, (True,) * 4 + (False,) * 3, 2, 4, 14),
    "gru": (CELLS["gru"][0].function, (True,) * 4, 1, 3, 5),
    "janet": (CELLS["janet"][0].function, (True, True), 1, 2, 3),
    "elman": (CELLS["elman"][0].function, (True,), 1, 1, 1),  # the state is in the products alone
    "spiking": (CELLS["spiking"][0].function, (True,), 2, 1, 3),
    "leaky": (lambda h, x: 0.9 * h - x, (True,), 1, 1, 0),  # whose derivatives are constants
    "of parameters": (lambda h, x, u, v: F.relu(u * h + x * v), (True, False, False), 1, 1, 4),
    "four states": (CELLS["four states"][0].function, (True,) * 4, 4, 4, 18),
    "of tests": (of_units, (True, True, False), 2, 2, 8),
}


@pytest.mark.parametrize("name", PRINTED)
def test_printed_cells_compute_the_function_and_its_derivatives(name):
    function, kinds, states, products, kept = PRINTED[name]
    cell = print_cell(trace(function, kinds, states), products)
    assert cell[1:-2] == (products, sum(kinds), kinds.count(False), states, states, kept, len(kinds))
    constants = {k: int(v) for k, v in re.findall(r"([A-Z]+) = (\d+)", cell.code)}
    names = "PRODUCTS", "INPUTS", "PARAMETERS", "STATES", "DERIVATIVES"
    assert constants == {name: getattr(cell, name.lower()) for name in names}
    assert len(set(re.findall(r"slope\[\d+\](?= =)", cell.code))) == kept
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        before, grads = torch.randn(2, states, generator=generator, dtype=torch.float64)
        arguments = torch.randn(len(kinds), generator=generator, dtype=torch.float64)
        leaves = [*before.requires_grad_(), *arguments.requires_grad_()]
        after = function(tuple(leaves[:states]) if states > 1 else leaves[0], *leaves[states:])
        after = torch.stack(after if states > 1 else (after,))
        wanted = torch.autograd.grad(after, (before, arguments), grads, allow_unused=True, materialize_grads=True)
        values = arguments.tolist()
        given = {
            "before": before.tolist(),
            "x": [v for v, kind in zip(values, kinds, strict=True) if kind],
            "parameter": [v for v, kind in zip(values, kinds, strict=True) if not kind],
        }
        s = [0.5, -2.0, 0.25, 3.0][:products]
        x = [v - s[k] if k < products else v for k, v in enumerate(given["x"])]
        forward = evaluated(cell.code, "forward", {"after": states}, **given | {"x": x, "s": s})
        assert x == pytest.approx(given["x"], rel=1e-12)  # as differentiate() takes it
        slope = evaluated(cell.code, "differentiate", {"slope": kept}, **given)["slope"]
        out = {"of_states": states, "of_arguments": len(kinds)}
        pulled = evaluated(cell.code, "pull", out, slope=slope, grad=grads.tolist())
        assert forward["after"] == pytest.approx(after.tolist(), rel=1e-12)
        assert pulled["of_states"] == pytest.approx(wanted[0].tolist(), rel=1e-12)
        by_kind = [g for kind in (True, False) for g, own in zip(wanted[1].tolist(), kinds, strict=True) if own == kind]
        assert pulled["of_arguments"] == pytest.approx(by_kind, rel=1e-12)


def test_of_a_derivative_that_is_zero_nothing_is_kept_or_multiplied():
    code = print_cell(trace(lambda state, x: (torch.tanh(state[1] + x), state[1] + x), (True,), 2), 1).code
    pull = code[code.index("void pull") :]
    assert "of_states[0] = 0;" in pull
    assert "of_states[1] = slope[0] * grad[0] + Compute(1.0) * grad[1];" in pull


# A small layer, and one whose blocks may compute two groups in turn.
SMALL, LARGE = ("peephole", 130, 5, f32), ("gru", 512, 128, bf16)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("architecture", "layer", "kinds"),
    [
        ("sm_80", SMALL, {(1, False)}),
        ("sm_90", SMALL, {(1, False), (1, True)}),
        ("sm_90", LARGE, {(1, False), (1, True), (2, False)}),
        ("sm_100", LARGE, {(1, False), (1, True), (2, False)}),
    ],
)
def test_kernels_of_generated_cells_compile_without_a_gpu(architecture, layer, kinds, backward):
    pytest.importorskip("cuda.core")
    cell, *sizes = layer
    properties = SimpleNamespace(**{**vars(H100), "major": int(architecture[3:]) // 10})
    found = generated(printed(cell), *sizes, backward, cell == "peephole", properties)
    assert {(g.block_groups, g.distributed) for g in found} == kinds
    for k, chosen in enumerate(found):
        assert_compiles(chosen, architecture, resets=k % 2 == 0, packed=k % 2 == 0)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_shared_memory_has_room_for_what_threads_hand_to_each_other(cell, backward):
    pytest.importorskip("cuda.core")
    (chosen,) = (g for g in generated(printed(cell), 256, 4, f16, backward) if g.shares_work)
    exchanged = chosen.cell.exchanged(backward)
    numbers = "DERIVATIVES + PULLED" if backward else "OPERANDS + RESULTS"
    for room, fits in ((exchanged, True), (exchanged // 2, False)):
        text = f'{code(chosen)}static_assert({numbers} <= {room}, "no room");'
        with contextlib.nullcontext() if fits else pytest.raises(nvrtc.DoesNotCompile, match="no room"):
            nvrtc.compile_cubin(text, "sm_90", dict(macros(chosen, resets=True, packed=True, keeps=not backward)))


PARAMETERS = 4096  # bytes of a kernel's parameters, as before CUDA 12.1: those of nine heads of four states


@pytest.fixture
def imagined(monkeypatch):
    """An H100 for which nothing is compiled: the geometries that were asked for, in a row."""
    asked = []
    monkeypatch.setattr(nvrtc, "why_no_cuda", lambda: None)
    monkeypatch.setattr(nvrtc, "most_parameter_bytes", lambda: PARAMETERS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H100)
    monkeypatch.setattr(persistent, "compile_kernels", lambda *given: asked.append(given[5:]))
    persistent._plan.cache_clear()
    yield asked
    persistent._plan.cache_clear()


def plan_of(cell, hidden, dtype, backward=False, training=False, batch=4, device="cpu", heads=1):
    # Of the tensors only shapes and dtypes are read.
    weight = torch.empty(1, 1, dtype=dtype, device=device).expand(CELLS[cell][3] * hidden, hidden)
    weight = weight if heads == 1 else weight[None, : len(weight) // heads, : hidden // heads].expand(heads, -1, -1)
    like = torch.empty(1, 1, 1, dtype=dtype, device=device).expand(batch, 3, hidden)
    return persistent.plan_of(
        Layer(traced(cell), weight, like.new_empty(0, hidden), None, Sequences(batch)), like, backward, training
    )


def test_layers_that_fit_on_the_chip_have_a_persistent_kernel(imagined):
    for cell, hidden, dtype in itertools.product(CELLS, (8, 256, 1000), (f32, f16, bf16)):
        for backward in (False, True):
            assert plan_of(cell, hidden, dtype, backward).has_kernel
            assert [g.backward for g in imagined.pop()] == [backward]
    assert not plan_of("gru", 256, torch.float64).has_kernel
    assert not plan_of("peephole", 16384, f16).has_kernel
    assert not imagined


@pytest.mark.parametrize(
    ("hidden", "heads"), [(96, 3), (1024, 4), (768, 12), (1024, 1), (34, 17), (4096, 2), (4096, 4)]
)
def test_heads_are_computed_at_once_where_they_fit(hidden, heads, imagined):
    for backward in (False, True):
        chosen = plan_of("four states", hidden, bf16, backward, heads=heads).geometry
        assert (chosen.hidden_size, chosen.heads) == (hidden // heads, heads)
        assert heads % chosen.heads_at_once == 0
        assert chosen.heads_at_once * chosen.blocks * chosen.groups <= H100.multi_processor_count
        if hidden // heads <= 256:  # they take less time together than one after another
            assert chosen.heads_at_once == max(n for n in range(1, 10) if heads % n == 0)


@pytest.fixture
def launches(monkeypatch):
    """The addresses that each launch is given, by name, for each of its heads; nothing runs."""
    given = []

    def launch(device, grid, block, parameters, *_, rows, **__):
        fields = next(x for x in map(cuda_launch._parameters, (1, 3)) if rows * x.all.size == len(parameters))
        unpacked = fields.all.iter_unpack(parameters)
        given.append([dict(zip(fields.pointers, own, strict=False)) for own in unpacked])

    kernel = SimpleNamespace(launch=launch)
    monkeypatch.setattr(cuda_launch, "kernels", lambda *_: cuda_launch._Kernels(kernel, kernel, 132))
    monkeypatch.setattr(cuda_launch, "check", lambda device: None)
    monkeypatch.setattr(cuda_launch, "_failure", lambda device: SimpleNamespace(address=1))
    monkeypatch.setattr(cuda_launch, "launch_stream", lambda device, memory: 0)
    monkeypatch.setattr(cuda_launch, "_launch_of", cuda_launch._launch_of.__wrapped__)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    return given


def of_four_heads(cell, backward):
    """The executor of a pass, two heads at once, and a layer of 8 units each, of two packed sequences of 5 steps."""
    geometry = next(g for g in generated(printed(cell), 8, 2, f32, backward) if not g.distributed)
    offsets, resets = torch.arange(0, 12, 2, dtype=torch.int32), torch.zeros(10, dtype=torch.bool)
    trace = traced(cell)
    initial = [torch.zeros(2, 32) for _ in range(trace.states)]
    weight, parameters = torch.zeros(4, 32, 8), torch.zeros(trace.sequences.count(False), 32)
    executor = persistent.Persistent(geometry._replace(heads=4, heads_at_once=2))
    return executor, Layer(trace, weight, parameters, initial, Sequences(2, offsets, resets))


def assert_heads_are_apart(launches, executor, layer, tensors):
    """The launches of both halves of the heads have each head's part of the `tensors`, by name, and of the others."""
    assert len(launches) == 4  # of the kernel that prepares, and of the loop, for two heads each
    assert launches[0] == launches[1]
    assert launches[2] == launches[3]
    heads = [*launches[0], *launches[2]]
    assert len(heads) == 4
    assert [own["weight"] for own in heads] == [x.data_ptr() for x in layer.weight_hh]
    for name, x in tensors.items():
        assert [own[name] for own in heads] == [x[:, 8 * k :].data_ptr() for k in range(4)], name
    for name, x in (("offsets", layer.sequences.offsets), ("resets", layer.sequences.resets)):
        assert [own[name] for own in heads] == [x.data_ptr()] * 4
    keeps = not executor._geometry.backward
    for memory, size in cuda_launch._launch_of(executor._geometry, 0, 5, 2, True, True, keeps, 1).bytes.items():
        starts = [own[memory] for own in heads]
        assert all(b - a >= size for a, b in itertools.pairwise(starts))
    return heads


def test_heads_are_launched_forward_with_their_own_parts_of_all_tensors(launches):
    executor, layer = of_four_heads("four states", False)
    rows = torch.zeros(10, 128)
    states, last, kept = executor.forward(layer, rows, True)
    tensors = {"pre": rows, "gates": kept, "output": states[0], "h_n": last[0], "h0": layer.initial[0]}
    for k, name in enumerate(("", "1", "2"), 1):
        tensors |= {f"c{name}": states[k], f"c_n{name}": last[k], f"c0{name}": layer.initial[k]}
    assert_heads_are_apart(launches, executor, layer, tensors)


@pytest.mark.parametrize("cell", ["four states", "peephole"])
def test_heads_are_launched_backward_with_their_own_parts_of_all_tensors(cell, launches):
    executor, layer = of_four_heads(cell, True)
    rows, count = torch.zeros(10, 128), layer.trace.states
    before, grads = ([torch.zeros(10, 32) for _ in range(count)] for _ in range(2))
    grads_last = [torch.zeros(2, 32) for _ in range(count)]
    grad_rows, _, grad_initial = executor.backward(layer, rows, before, grads, grads_last)
    tensors = {"pre": rows, "grads": grad_rows, "before": before[0], "grad_output": grads[0]}
    tensors |= {"grad_h_n": grads_last[0], "grad_h0": grad_initial[0]}
    for k, name in enumerate(("", "1", "2")[: count - 1], 1):
        tensors |= {f"c_before{name}": before[k], f"grad_c{name}": grads[k]}
        tensors |= {f"grad_c_n{name}": grads_last[k], f"grad_c0{name}": grad_initial[k]}
    if len(layer.parameters):
        tensors |= {"parameters": layer.parameters}
    heads = assert_heads_are_apart(launches, executor, layer, tensors)
    if len(layer.parameters):
        assert [own["totals"] - heads[0]["totals"] for own in heads] == [0, 32, 64, 96]  # bytes of 8 numbers each


def test_both_passes_of_training_are_compiled_together(imagined):
    plan_of("gru", 256, f16, training=True)
    assert [g.backward for g in imagined.pop()] == [False, True]


@pytest.mark.parametrize("error", [MemoryError, nvrtc.DoesNotCompile])
def test_what_does_not_compile_is_left_to_other_kernels(error, imagined, monkeypatch):
    def refusing(refuses):
        def compile_kernels(*given):
            imagined.append(given[5:])
            if any(map(refuses, given[5:])):
                raise error("no")

        persistent._plan.cache_clear()
        monkeypatch.setattr(persistent, "compile_kernels", compile_kernels)

    refusing(lambda g: g.distributed)
    assert plan_of("gru", 256, f16, training=True).has_kernel
    assert any(g.distributed for g in imagined[0])
    assert [(g.backward, g.distributed) for g in imagined[-1]] == [(False, False), (True, False)]
    refusing(lambda g: g.backward)
    assert plan_of("gru", 256, f16, training=True).has_kernel
    assert [g.backward for g in imagined[-1]] == [False]
    refusing(lambda g: True)
    assert plan_of("gru", 256, f16) == plan.no_kernel("no")


def test_a_plan_says_what_runs(imagined, monkeypatch):
    one, four = (plan_of("four states", 1024, bf16, heads=heads, batch=16) for heads in (1, 4))
    assert one.reason == "8.4 MB of recurrent weights fit on the chip"
    assert four.reason == "of each of 4 heads, 4 at once, 0.5 MB of recurrent weights fit on the chip"
    assert four.bytes_on_chip >= 4 * 1024 * 256 * 2
    assert four.blocks == 4 * four.geometry.blocks * four.geometry.groups
    wide = plan_of("peephole", 16384, f16)
    assert (wide.path, wide.has_kernel) == ("steps", False)
    assert wide.reason == "2147.5 MB of recurrent weights do not fit on the chip"
    assert "not in torch.float64" in plan_of("gru", 256, torch.float64).reason
    for layer in (("peephole", 16384), ("gru", 256)):  # as for a tensor on a GPU
        monkeypatch.setattr(nvrtc, "why_no_cuda", lambda: "a reason")
        persistent._plan.cache_clear()
        assert plan_of(*layer, f16) == plan.no_kernel("a reason")


class Case:
    """A layer with random weights on a GPU, and random sequences, packed or not."""

    def __init__(self, cell, hidden, batch, dtype, steps, packed=False, resets=0.0, reverse=False, heads=1):
        function, _, _, products = CELLS[cell]
        self.trace, self.dtype = traced(cell), dtype
        sizes = [batch] * steps
        if packed:
            lengths = [steps, *(random.randint(1, steps) for _ in range(batch - 1))]
            sizes = [sum(length > t for length in lengths) for t in range(steps)]
        offsets = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32).cuda() if packed else None
        count, width = sum(sizes), sum(self.trace.sequences) * hidden
        marks = (torch.rand(count) < resets).cuda() if resets else None
        self.sequences = Sequences(batch, offsets, marks, reverse)
        columns = hidden // heads
        self.weight = self.random(heads, products * columns, columns, scale=columns**-0.5)
        self.weight = self.weight[0] if heads == 1 else self.weight
        self.parameters = self.random(self.trace.sequences.count(False), hidden)
        self.initial, self.grads_last = ([self.random(batch, hidden) for _ in range(function.states)] for _ in range(2))
        self.rows, self.sums = self.random(count, width), self.random(count, width)
        self.before, self.grads = ([self.random(count, hidden) for _ in range(function.states)] for _ in range(2))

    def random(self, *shape, scale=1.0):
        return (torch.randn(shape) * scale).to(self.dtype).cuda()

    def forward(self, executor, convert=lambda x: x):
        """All states, the last ones, and the arguments with the products added."""
        states, last, kept = executor.forward(self._layer(convert), convert(self.rows).clone(), True)
        again, *_, nothing = executor.forward(self._layer(convert), convert(self.rows).clone(), False)
        assert same_bits(again, states)
        assert nothing is None
        return [*states, *last, kept]

    def backward(self, executor, convert=lambda x: x):
        """All gradients, of states and sums that are any numbers."""
        tensors = self.before, self.grads, self.grads_last
        given = ([convert(x) for x in own] for own in tensors)
        of_rows, of_parameters, of_initial = executor.backward(self._layer(convert), convert(self.sums).clone(), *given)
        return [of_rows, of_parameters, *of_initial]

    def _layer(self, convert):
        initial = [convert(x) for x in self.initial]
        return Layer(self.trace, convert(self.weight), convert(self.parameters), initial, self.sequences)


WAYS = [  # steps, packed, resets, reverse: two variants of a kernel
    (13, False, 0.0, False),
    (34, True, 0.2, True),
    (1, True, 0.2, False),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layer", "exact"),
    [
        (SMALL, True),
        (SMALL, False),
        (("janet", 101, 23, bf16), True),
        (LARGE, True),
        (("gru", 512, 64, f32), False),
        (("peephole", 515, 70, f16), True),
    ],
    ids=str,
)
def test_every_kind_of_geometry_matches_the_steps_in_float64(layer, exact, nan_memory):
    cell, hidden, batch, dtype = layer
    torch.manual_seed(0)
    random.seed(0)
    properties = torch.cuda.get_device_properties(0)
    for backward in (False, True):
        for geometry in generated(printed(cell), hidden, batch, dtype, backward, exact, properties):
            for steps, packed, resets, reverse in WAYS:
                case = Case(cell, hidden, batch, dtype, steps, packed, resets, reverse)
                run, executor = case.backward if backward else case.forward, persistent.Persistent(geometry)
                assert_matches_the_steps(run, executor, TOLERANCE[dtype] if exact else 4e-3)  # rounded to tf32


def assert_matches_the_steps(run, executor, tolerance):
    """Of a method of a :class:`Case`, in float64; and that it gives the same bits twice."""
    found, again = run(executor), run(executor)
    torch.cuda.synchronize()
    cuda_launch.check(0)
    assert same_bits(found, again)
    expected = run(stepwise, torch.Tensor.double)
    theirs = errors(run(stepwise), expected).max()
    assert errors(found, expected).max() < max(tolerance, 4 * theirs)


HEADS = [  # cell, width, heads, batch, dtype
    ("four states", 96, 3, 5, f32),
    ("peephole", 130, 2, 23, bf16),  # 65 units each
    ("gru", 1024, 4, 128, bf16),  # some geometries compute two groups in turn
    ("four states", 768, 12, 2, f16),
]


def at_odd_addresses(x):
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.gpu
def test_tensors_need_not_be_aligned():
    """Where threads load the numbers of two units at once."""
    torch.manual_seed(0)
    layer, properties = (512, 128, bf16), torch.cuda.get_device_properties(0)
    for backward in (False, True):
        found = generated(printed("four states"), *layer, backward, True, properties)
        assert any(g.adjacent == 2 for g in found)
        case = Case("four states", *layer, 5)
        run = case.backward if backward else case.forward
        for executor in map(persistent.Persistent, found):
            assert same_bits(run(executor, at_odd_addresses), run(executor))


@pytest.mark.gpu
@pytest.mark.parametrize(("cell", "width", "heads", "batch", "dtype"), HEADS)
def test_heads_match_the_steps_in_float64(cell, width, heads, batch, dtype, nan_memory):
    torch.manual_seed(0)
    random.seed(0)
    properties = torch.cuda.get_device_properties(0)
    for backward in (False, True):
        for geometry in generated(printed(cell), width // heads, batch, dtype, backward, True, properties):
            for at_once, (steps, packed, resets, reverse) in itertools.product({1, heads // 2, heads}, WAYS):
                resident = geometry.blocks * geometry.groups * at_once <= properties.multi_processor_count
                if heads % at_once or at_once > cuda_launch.most_heads(printed(cell)) or not resident:
                    continue
                case = Case(cell, width, batch, dtype, steps, packed, resets, reverse, heads)
                executor = persistent.Persistent(geometry._replace(heads=heads, heads_at_once=at_once))
                run = case.backward if backward else case.forward
                assert_matches_the_steps(run, executor, TOLERANCE[dtype])


def options_of(layout, batch, steps):
    """The batch, the sequences, and the options of a call."""
    resets = (torch.rand(1 if layout == "packed" else batch, steps) < 0.2).cuda()
    if layout == "packed":  # some without steps
        cuts = sorted(random.randint(0, steps) for _ in range(batch - 1))
        cu_seqlens = torch.tensor([0, *cuts, steps], dtype=torch.int32).cuda()
        return 1, batch, {"cu_seqlens": cu_seqlens, "resets": resets, "reverse": True}
    return batch, batch, {} if layout == "plain" else {"resets": resets}


def run(cell, leaves, options):
    """The results of a call, and the gradients of a sum of them with the cosine of each."""
    count = len(CELLS[cell][2])
    results = call(cell, leaves[0], leaves[1 : 1 + count], leaves[1 + count :], **options)
    return [*results, *torch.autograd.grad(results, leaves, [y.detach().cos() for y in results])]


def plans_used(monkeypatch):
    """The plans of the passes of all later calls, in a list."""
    used, choose = [], persistent.plan_of
    monkeypatch.setattr(persistent, "plan_of", lambda *given: used.append(choose(*given)) or used[-1])
    return used


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tf32"), [(f32, False), (f32, True), (f16, False), (bf16, False)], ids=str)
@pytest.mark.parametrize(
    ("cell", "hidden", "batch", "layout"),
    [
        ("elman", 8, 3, "packed"),
        ("peephole", 32, 70, "packed"),
        ("gru", 250, 7, "resets"),
        ("janet", 1000, 1, "plain"),
        ("four states", 130, 9, "packed"),
    ],
)
@pytest.mark.parametrize("heads", [1, 2])
def test_calls_match_those_in_float64(cell, hidden, batch, layout, heads, dtype, tf32, nan_memory, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", "tf32" if tf32 else "ieee")
    torch.manual_seed(0)
    random.seed(0)
    rows, sequences, options = options_of(layout, batch, 40)
    weight, arguments, h0 = inputs(cell, rows, 40, hidden, sequences, dtype, "cuda", heads)
    leaves, used = [weight, *arguments, *h0], plans_used(monkeypatch)
    found, again = run(cell, leaves, options), run(cell, leaves, options)
    assert len(used) == 4
    assert all(plan.has_kernel for plan in used)
    assert same_bits(found, again)
    expected = run(cell, [x.detach().double().requires_grad_() for x in leaves], options)
    monkeypatch.setattr(operator, "_executor_of", lambda *_: stepwise)
    theirs = errors(run(cell, leaves, options), expected).max()
    assert errors(found, expected).max() < max(4e-3 if tf32 else TOLERANCE[dtype], 4 * theirs)


@pytest.mark.gpu
def test_what_does_not_fit_on_a_gpu_runs_step_by_step():
    for cell, backward in itertools.product(CELLS, (False, True)):
        assert plan_of(cell, 256, f16, backward, device="cuda").has_kernel
    assert not plan_of("gru", 256, torch.float64, device="cuda").has_kernel
    assert not plan_of("peephole", 16384, f16, device="cuda").has_kernel


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["resets", "packed"])
def test_a_captured_call_equals_one_that_is_launched(layout):
    torch.manual_seed(0)
    random.seed(0)
    rows, sequences, options = options_of(layout, 5, 20)
    weight, arguments, h0 = inputs("peephole", rows, 20, 96, sequences, f16, "cuda")
    leaves = [weight, *arguments, *h0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run("peephole", leaves, options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run("peephole", leaves, options)
    for _ in range(2):
        with torch.no_grad():
            for x in leaves:
                x.mul_(0.9)
        graph.replay()
        assert same_bits(captured, run("peephole", leaves, options))
