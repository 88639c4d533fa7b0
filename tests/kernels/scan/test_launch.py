"""What scans compile and launch on a GPU, without one."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from gpus import ARCHITECTURES, GPUS
from ostinato.kernels.cuda import nvrtc
from ostinato.kernels.recurrence.linear.element import element_name, print_element
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.scan.cuda import launch, workspace
from ostinato.kernels.scan.cuda.heuristics.choice import choose_geometry
from ostinato.kernels.scan.cuda.heuristics.criteria import Criteria
from ostinato.kernels.scan.cuda.heuristics.geometry import Geometry, macros
from ostinato.kernels.scan.cuda.heuristics.narrow import sequences_joined
from ostinato.kernels.scan.cuda.problem import Problem, criteria_of, join
from ostinato.minimal.recurrences import recurrence_of

ELEMENTS = (
    "LinearScan",
    "LinearScanBackward",
    "LogLinearScan",
    "LogLinearScanBackward",
    "mingru",
    "mingruBackward",
    "minlstm",
    "minlstmBackward",
)

CHOOSE_KERNEL = launch._choose_kernel.__wrapped__


def code_of(element, candidate):
    """The name of an element and the kernel's code around it."""
    if "Scan" in element:
        return element, launch.source()
    trace = parse(recurrence_of(element.removesuffix("Backward"), candidate, bias=True))
    backward = element.endswith("Backward")
    return element_name(trace, backward), launch.source(print_element(trace, backward))


def on_a(monkeypatch, gpu):
    """Launch as on this GPU; what is chosen for it stays unknown to other tests."""
    monkeypatch.setattr("ostinato.kernels.scan.cuda.problem.describe_device", lambda index: GPUS[gpu])
    monkeypatch.setattr(launch, "_choose_kernel", CHOOSE_KERNEL)


def inputs_of(element):
    """How many tensors it reads."""
    forward, backward = element.removesuffix("Backward"), element.endswith("Backward")
    return {"minlstm": 3, "LinearScan": 2 - backward}.get(forward, 2) + 2 * backward


def variants():
    """Kernels of every kind that the choice of geometry can ask for, of which the test below compiles a part."""
    for element, dtype in itertools.product(ELEMENTS, nvrtc.SCALARS):
        minimal = element.startswith("min")
        name, _ = code_of(element, "linear")
        for packing in ("DENSE", "OFFSETS" if minimal else "CU_SEQLENS"):
            for sequences, steps, channels in (
                (4096, 512, 64),
                (99, 512, 65),
                (1, 65536, 64),
                (1, 65536, 3),
                (64, 1, 64),
                (8, 2048, 255),
            ):
                aligned = min(16 // dtype.itemsize, channels & -channels)
                scalar = nvrtc.SCALARS[dtype]
                inputs, shape = inputs_of(element), (sequences, steps, channels)
                case = dtype.itemsize, aligned, not minimal, *shape, GPUS["H100"], packing == "CU_SEQLENS"
                criteria = Criteria(name, inputs, *case, by_offsets=packing == "OFFSETS")
                geometry = choose_geometry(criteria)
                copies = geometry.copies_16_bytes(dtype.itemsize, aligned)
                pitches = geometry.pitches(dtype.itemsize, [channels] * inputs, criteria.unaligned_rows)
                shared = geometry.shared_bytes(inputs, 3 if minimal else 0, dtype.itemsize, True, True, pitches[0])
                yield element, macros(name, scalar, scalar, packing, geometry, shared, steps == 1, copies, pitches)


@pytest.mark.parametrize(("element", "architecture"), list(zip(ELEMENTS, itertools.cycle(ARCHITECTURES), strict=False)))
def test_kernels_compile_without_a_gpu(element, architecture):
    pytest.importorskip("cuda.core")
    chosen = sorted({v for name, v in variants() if name == element}, key=str)
    i = len(ARCHITECTURES) * ELEMENTS.index(element) + ARCHITECTURES.index(architecture)
    definitions = dict(chosen[25 * i % len(chosen)])  # of all dtypes, packings and shapes
    _, code = code_of(element, ("positive", "linear", "tanh")[(i + i // 3) % 3])
    known = {"DESCENDING": i % 2, "ALIGNED": i // 2 % 2} if definitions["NARROW"] and i % 4 else {}
    if architecture == "sm_80":
        definitions["MAPPED"] = 0
    assert nvrtc.compile_cubin(code, architecture, {**definitions, "MASK": i % 2, **known})[:4] == b"\x7fELF"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("element", ["LinearScan", "LinearScanBackward"])
@pytest.mark.parametrize("shape", [(4, 4096, 1024), (1, 100000, 256)], ids=["clusters", "maps"])
def test_kernels_of_hopper_compile_without_a_gpu(element, dtype, shape):
    pytest.importorskip("cuda.core")
    inputs, scalar, aligned = inputs_of(element), nvrtc.SCALARS[dtype], 16 // dtype.itemsize
    geometry = choose_geometry(Criteria(element, inputs, dtype.itemsize, aligned, True, *shape, GPUS["H200"]))
    assert (geometry.cluster, geometry.mapped) == ((2, False) if shape[0] == 4 else (1, True))
    shared = geometry.shared_bytes(inputs, 0, dtype.itemsize, resets=True)
    copies = geometry.copies_16_bytes(dtype.itemsize, aligned)
    definitions = dict(macros(element, scalar, scalar, "DENSE", geometry, shared, False, copies, (0,) * inputs))
    cubin = nvrtc.compile_cubin(launch.source(), "sm_90", {**definitions, "MASK": inputs % 2})
    assert cubin[:4] == b"\x7fELF"


def test_pieces_are_known_to_be_aligned_only_where_all_are():
    strides, batch = ((7 * 4000, 7, 0),) * 2, 3
    problem = Problem("LinearScan", torch.float32, 0, batch, 4000, 7, strides, strides[:1])
    geometry = Geometry(1, 8, 16, 16, True, 1, 7, 2)
    backward = {"element": "LinearScanBackward", "inputs": strides[:1] * 3, "outputs": strides}
    for changes, alignment, known in (
        ({}, 0, (0, 1)),
        ({"reverse": True}, 0, (1, 1)),
        (backward, 0, (1, 1)),
        ({"steps": 4001}, 0, (0, 1)),  # each sequence begins 4000 steps after the last
        ({"steps": 4001, **backward}, 0, (1, 0)),  # but the strips begin at its end
        ({"inputs": ((7 * 4001, 7, 0),) * 2}, 0, (0, 0)),
        ({"inputs": ((7 * 4001, 7, 0),) * 2, "batch": 1}, 0, (0, 1)),
        ({}, 4, (0, 0)),
    ):
        found = launch._addressing(problem._replace(**changes), geometry, alignment)
        assert found == (("DESCENDING", known[0]), ("ALIGNED", known[1]), ("SINGLE", int("batch" in changes)))
    assert launch._addressing(problem, geometry._replace(rows=15), 0)[1] == ("ALIGNED", 1)
    assert launch._addressing(problem._replace(channels=1), geometry._replace(rows=1, lanes=32), 0)[1] == ("ALIGNED", 0)


def test_rows_that_begin_anywhere_are_copied_in_pieces_of_each_tensor(monkeypatch):
    """Rows of one tensor may be further apart than another's: parts of longer rows, scanned into rows of their own."""
    pytest.importorskip("cuda.core")
    compiled = []

    def load_kernel(name, source, definitions, device):
        compiled.append(dict(definitions))
        assert nvrtc.compile_cubin(source, "sm_90", compiled[-1])
        return SimpleNamespace(prepared=lambda *_, **__: None)

    on_a(monkeypatch, "H200")
    monkeypatch.setattr(nvrtc, "load_kernel", load_kernel)
    for apart in ((127, 135), (128, 254), (127, 127)):
        inputs, outputs = tuple((40 * stride, stride, 0) for stride in apart), ((40 * 127, 127, 0),)
        problem = Problem("LinearScan", torch.float16, 0, 11, 40, 127, inputs, outputs)
        launch._prepare.__wrapped__(problem, torch.float16, 2)
        pitches = [int(pitch) for pitch in compiled[-1]["PITCHES"].split(", ")]
        assert [(pitch - 2 * stride) % 16 for pitch, stride in zip(pitches, apart, strict=True)] == [0, 0]
    launch._prepare.__wrapped__(problem._replace(packing="OFFSETS"), torch.float16, 2)
    assert compiled[-1]["PITCHES"] == "0, 0"  # whose rows are found by offsets


def test_aligned_inputs_are_copied_by_tensor_maps(monkeypatch):
    """The maps stand before all other parameters; only inputs have them."""
    described, compiled, parameters = [], [], []

    def tensor_map(*description):
        described.append(description)
        return bytes([len(described)]) * 128

    def load_kernel(name, source, definitions, device):
        compiled.append(dict(definitions))

        def prepared(device, blocks, threads, shared, pack, rest, cooperative):
            return lambda *first: parameters.append(pack(*first) + rest)

        return SimpleNamespace(prepared=prepared)

    on_a(monkeypatch, "H200")
    monkeypatch.setattr(nvrtc, "load_kernel", load_kernel)
    monkeypatch.setattr(nvrtc, "tensor_map", tensor_map)
    rows, gates = (40000 * 256, 256, 0), (40000 * 512, 512, 0)
    problem = Problem("LinearScanBackward", torch.bfloat16, 0, 2, 40000, 256, (gates, rows, rows), (rows, rows))
    launch._prepare.__wrapped__(problem, torch.bfloat16, 0).start(1024, 2048, 0, *range(4096, 4107), 4, 8)
    sizes, box = (256, 40000, 2, 1), (64, 12, 1, 1)
    assert described == [
        (1024, 2, sizes, (512, 40000 * 512, 16), box),
        (2048, 2, sizes, (256, 40000 * 256, 16), box),
    ]
    assert parameters[0][:384] == b"\1" * 128 + b"\2" * 128 + bytes(128)
    assert parameters[0][384:392] == (1024).to_bytes(8, "little")
    assert len(parameters[0]) % 64 == 0

    def is_mapped(alignment=0, **changes):
        launch._prepare.__wrapped__(problem._replace(**changes), torch.bfloat16, alignment)
        return compiled[-1]["MAPPED"]

    expanded = (0, 256, 0), rows, rows
    assert is_mapped()
    assert is_mapped(inputs=expanded, batch=1)  # of a single sequence
    assert not is_mapped(inputs=expanded)
    assert not is_mapped(inputs=((256, 0, 0), rows, rows))
    assert not is_mapped(packing="OFFSETS")
    assert not is_mapped(alignment=8)
    on_a(monkeypatch, "A100")
    assert not is_mapped()


def test_short_sequences_are_scanned_as_one_where_they_are_adjacent_and_have_no_states(monkeypatch):
    pytest.importorskip("cuda.core")
    launched = []

    def load_kernel(name, source, definitions, device):
        assert nvrtc.compile_cubin(source, "sm_90", dict(definitions))
        joined = dict(definitions).get("JOINED", 0)
        return SimpleNamespace(
            prepared=lambda device, blocks, *_, **__: lambda *given: launched.append((joined, blocks))
        )

    on_a(monkeypatch, "H200")
    monkeypatch.setattr(nvrtc, "load_kernel", load_kernel)
    launch._prepare.cache_clear()
    strides = ((12 * 3, 3, 0),) * 2
    problem = Problem("LinearScan", torch.float32, 0, 6000, 12, 3, strides, strides[:1], resets=(12, 1, 0))
    scan, like = launch.Scan(problem), torch.zeros(1)
    scan.launch(like, (16, 32, 48, 0, 0, 64, 0))
    scan.launch(like, (16, 32, 48, 0, 80, 64, 0))  # from a given state
    scan.launch(like, (16, 32, 48, 0, 0, 0, 0))  # without a place for the last one, which joined sequences write
    backward = {"element": "LinearScanBackward", "dtype": torch.bfloat16, "inputs": strides[:1] * 3, "outputs": strides}
    gradient = launch.Scan(problem._replace(**backward, reverse=True, resets=None))
    gradient.launch(like, (16, 32, 48, 64, 80, 0, 0, 0, 0))
    assert launched == [(1, 1500), (0, 6000), (0, 6000), (1, 1500)]
    whole = ((48 * 3, 3, 0),) * 2
    changes = {"batch": 1500, "steps": 48, "inputs": whole, "outputs": whole[:1], "resets": (48, 1, 0), "period": 12}
    assert join(problem) == problem._replace(**changes)
    for apart in (
        {"inputs": (strides[0], (13 * 3, 3, 0))},
        {"inputs": (strides[0], (0, 3, 0))},
        {"outputs": ((13 * 3, 3, 0),)},
        {"resets": (1, 6000, 0)},
        {"packing": "OFFSETS"},
        {"directions": 2},
        {"batch": 1},
        {"batch": 0},
    ):
        assert join(problem._replace(**apart)) is None
    launch._prepare.cache_clear()


def test_what_was_joined_is_not_joined_again(monkeypatch):
    """It would be reset only where a sequence of several begins: of these, two would be taken for one."""
    on_a(monkeypatch, "H200")
    strides = ((13 * 5, 5, 0),) * 3
    problem = Problem("LinearScanBackward", torch.float32, 0, 13200, 13, 5, strides, strides[:2])
    joined = launch.Scan(problem)._joined
    assert (joined.problem.period, joined.problem.steps) == (13, 26)
    assert sequences_joined(criteria_of(joined.problem, 0)) == 2  # as any others of these sizes
    assert joined._joined is None


def test_steps_are_divided_by_the_period_of_joined_sequences():
    for period in (*range(1, 200), 4095, 4096, 8191, 1 << 14):
        for step in {*range(100), *(n * period + d for n in range(-(-(1 << 15) // period)) for d in (0, period - 1))}:
            if step < 1 << 15:
                assert (2 * step + 1) * launch._reciprocal(period) >> 32 == step // period


@pytest.mark.parametrize("steps", [1, 7, 130, 1000])
@pytest.mark.parametrize("gap", [0, 3, 1000])
def test_tiles_of_inner_sequences_do_not_reach_beyond_all(steps, gap):
    geometry, sequence = Geometry(1, 4, 2, 9, narrow=3), 3 * steps + gap
    strides = (2000 * sequence, 3, 0), (sequence, 3, 0)
    problem = Problem("LinearScan", torch.float32, 0, 60, steps, 3, strides, strides[:1])
    outer, reach = launch._outer(problem, geometry), 3 * geometry.tile + 16
    assert 0 < outer <= 60
    assert outer == 60 or outer * sequence >= reach
    assert (outer - 1) * sequence < reach  # no more sequences than that
    expanded = problem._replace(inputs=(strides[1], (0, 3, 0)))
    assert launch._outer(expanded, geometry) == 60


def test_more_steps_than_the_kernel_counts_are_refused():
    strides = ((1, 1, 0),) * 2
    problem = Problem("LinearScan", torch.float32, 0, 1, 1 << 31, 1, strides, strides[:1])
    with pytest.raises(ValueError, match="a GPU scans sequences of at most 2146435072 steps; got 2147483648"):
        launch._prepare(problem, torch.float32, 0)


@pytest.fixture
def workspaces(monkeypatch):
    """Workspaces in the host's memory, for launches that are not captured."""

    class Workspace:
        def __init__(self, words, device):
            self.memory, self.counter = torch.zeros(words), torch.zeros(1)
            self.epoch, self.drawn, self.drawing = 0, 0, False

    monkeypatch.setattr(workspace, "_Workspace", Workspace)
    monkeypatch.setattr(workspace, "_workspaces", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return workspace._workspaces


def test_launches_share_a_streams_workspace_in_different_epochs(workspaces):
    given = []

    def start(*arguments):
        given.append(arguments)
        if len(given) == 2:
            raise KeyboardInterrupt  # without a counter, nothing is unknown afterwards

    for words, draws in ((4, 0), (4, 0), (3, 5), (4, 6), (8, 0)):
        with pytest.raises(KeyboardInterrupt) if len(given) == 1 else nullcontext():
            workspace.start_in_workspace(start, 0, words, draws, (1, 2))
    addresses = {arguments[2:4] for arguments in given[:4]}
    assert len(addresses) == 1
    (large,) = workspaces.values()
    assert given[4][2:4] == (large.memory.data_ptr(), large.counter.data_ptr())
    assert addresses.isdisjoint([given[4][2:4]])
    # The first arguments, the epochs, and the counter's values; a larger workspace begins anew.
    assert [(*x[:2], *x[4:]) for x in given] == [(1, 2, *x) for x in ((4, 0), (8, 0), (12, 0), (16, 5), (4, 0))]


def test_an_interrupted_launch_leaves_no_counter_behind(monkeypatch, workspaces):
    begins = []

    def start(*given):
        begins.append(given[-1])
        if len(begins) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_prepare", lambda *_: launch._Launch(start, 4, 100, 1))
    scan = launch.Scan(Problem("LinearScan", torch.float32, 0, 1, 8, 1, ((8, 1, 0),) * 2, ((8, 1, 0),)))
    like = torch.zeros(1, 8, 1)
    for _ in range(2):
        scan.launch(like, (16, 32))
    with pytest.raises(KeyboardInterrupt):
        scan.launch(like, (16, 32))
    for _ in range(2):
        scan.launch(like, (16, 32))
    assert begins == [0, 100, 200, 0, 100]  # of a workspace whose counter is at none after the interrupted one
