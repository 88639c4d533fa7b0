"""The CUDA kernels against the float64 reference, over every operation, dtype, packing and shape of block."""

import copy
import functools
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

import ostinato
from gpus import ARCHITECTURES, GPUS
from minimal_layers import GATES, layer, layer_backward
from ostinato.kernels import nvrtc
from ostinato.kernels.recurrence.linear import cuda as recurrence_cuda
from ostinato.kernels.recurrence.linear.element import element_name, print_element
from ostinato.kernels.recurrence.symbolic.trace import parse
from ostinato.kernels.scan import Order, choose_backend, operators, torch_ops
from ostinato.kernels.scan.cuda import chained, choice, launch, streaming
from ostinato.kernels.scan.cuda import scans as cuda
from ostinato.kernels.scan.cuda.choice import choose_geometry
from ostinato.kernels.scan.cuda.criteria import Criteria
from ostinato.kernels.scan.cuda.geometry import Geometry, macros
from ostinato.minimal.recurrences import recurrence_of

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
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


def code_of(element, candidate):
    """The name of an element and the kernel's code around it."""
    if "Scan" in element:
        return element, launch.source()
    trace = parse(recurrence_of(element.removesuffix("Backward"), candidate, bias=True))
    backward = element.endswith("Backward")
    return element_name(trace, backward), launch.source(print_element(trace, backward))


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
                pitches = geometry.pitches(dtype.itemsize, [channels] * inputs, criteria.anywhere)
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
    assert nvrtc.compile_cubin(code, architecture, {**definitions, "RESETS": i % 2, **known})[:4] == b"\x7fELF"


def test_pieces_are_known_to_be_aligned_only_where_all_are():
    strides, batch = ((7 * 4000, 7, 0),) * 2, 3
    problem = launch.Problem("LinearScan", torch.float32, 0, batch, 4000, 7, strides, strides[:1])
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
    cubin = nvrtc.compile_cubin(launch.source(), "sm_90", {**definitions, "RESETS": inputs % 2})
    assert cubin[:4] == b"\x7fELF"


def test_rows_that_begin_anywhere_are_copied_in_pieces_of_each_tensor(monkeypatch):
    """Rows of one tensor may be further apart than another's: parts of longer rows, scanned into rows of their own."""
    pytest.importorskip("cuda.core")
    compiled = []

    def load_kernel(name, source, definitions, device):
        compiled.append(dict(definitions))
        assert nvrtc.compile_cubin(source, "sm_90", compiled[-1])
        return SimpleNamespace(prepared=lambda *_, **__: None)

    monkeypatch.setattr(launch, "describe_device", lambda index: GPUS["H200"])
    monkeypatch.setattr(nvrtc, "load_kernel", load_kernel)
    for apart in ((127, 135), (128, 254), (127, 127)):
        inputs, outputs = tuple((40 * stride, stride, 0) for stride in apart), ((40 * 127, 127, 0),)
        problem = launch.Problem("LinearScan", torch.float16, 0, 11, 40, 127, inputs, outputs)
        launch._prepare.__wrapped__(problem, torch.float16, 2)
        pitches = [int(pitch) for pitch in compiled[-1]["PITCHES"].split(", ")]
        assert [(pitch - 2 * stride) % 16 for pitch, stride in zip(pitches, apart, strict=True)] == [0, 0]
    launch._prepare.__wrapped__(problem._replace(packing="OFFSETS"), torch.float16, 2)
    assert compiled[-1]["PITCHES"] == "0, 0"  # whose rows lie anywhere


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

    monkeypatch.setattr(launch, "describe_device", lambda index: GPUS["H200"])
    monkeypatch.setattr(nvrtc, "load_kernel", load_kernel)
    monkeypatch.setattr(nvrtc, "tensor_map", tensor_map)
    rows, gates = (40000 * 256, 256, 0), (40000 * 512, 512, 0)
    problem = launch.Problem("LinearScanBackward", torch.bfloat16, 0, 2, 40000, 256, (gates, rows, rows), (rows, rows))
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
    monkeypatch.setattr(launch, "describe_device", lambda index: GPUS["A100"])
    assert not is_mapped()


def test_more_steps_than_the_kernel_counts_are_refused():
    strides = ((1, 1, 0),) * 2
    problem = launch.Problem("LinearScan", torch.float32, 0, 1, 1 << 31, 1, strides, strides[:1])
    with pytest.raises(ValueError, match="a GPU scans sequences of at most 2146435072 steps; got 2147483648"):
        launch._prepare(problem, torch.float32, 0)


@pytest.fixture
def poisoned():
    """Fill every torch.empty with NaN, so that an element nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


GEOMETRIES = {
    "chosen": None,
    "streaming": {"chained": False, "looks_back": False},
    "chained": {"chained": True, "looks_back": False, "warps": 2, "rows": 2},
    "looking back": {"chained": True, "looks_back": True, "warps": 2, "rows": 2, "stages": 1},
    "lanes 4": {"lanes": 4, "vec": 1, "warps": 2, "rows": 3, "narrow": 0},
    "lanes 8 chained": {"lanes": 8, "vec": 1, "warps": 4, "rows": 2, "chained": True, "narrow": 0, "stages": 1},
    "wide copies": {"lanes": 8, "vec": 1, "warps": 2, "rows": 8, "chained": True, "narrow": 0, "stages": 1},
    "tensor maps": {"lanes": 8, "vec": 1, "warps": 2, "rows": 8, "chained": True, "narrow": 0, "stages": 1}
    | {"looks_back": False, "mapped": True},
    "one warp": {"warps": 1, "rows": 1},
    "in clusters": {"chained": False, "looks_back": False, "warps": 2, "rows": 2, "stages": 1, "cluster": 3},
}
# Rows that begin anywhere.  Of single 16-bit channels: in one wave of tiles by two warps, nine and 32; by look-back;
# streamed.
ODD = [(16, 300, 31), (4, 2100, 65), (8, 300, 1023), (1, 1100, 1025), (150, 70, 33), (3, 700, 130)]
# Few channels or steps: by look-back over whole rows, by one wave of tiles of them, by a warp a sequence.
FEW = [(12, 700, 5), (3, 900, 19), (1, 3000, 20), (600, 6, 24), (140, 3, 300), (600, 29, 33)]
SHAPES = [(2, 1, 5), (1, 777, 1), (2, 300, 8), (3, 130, 33), (1, 1000, 72), (2, 257, 6), (2, 190, 12)]


def force(monkeypatch, name):
    for prepared in (launch._prepare, cuda._prepare_scan, recurrence_cuda._prepare_layer):
        prepared.cache_clear()  # with another geometry
    changes = GEOMETRIES[name]
    if changes is None:
        return
    choose = launch.choose_geometry.__wrapped__
    monkeypatch.setattr(choice, "staying", lambda *_: None)  # whose tiles have no other algorithm

    def forced(scan):
        geometry = choose(scan)._replace(**changes)
        return geometry._replace(mapped=geometry.mapped and scan.mappable)

    monkeypatch.setattr(launch, "choose_geometry", forced)


def relative_error(got, want):
    want = want.double()
    scale = want.abs().max().clamp(min=1e-2)  # below, float16 is subnormal
    return ((got.double().cpu() - want).abs().max() / scale).item()


def gpu(*tensors):
    return [None if x is None else x.cuda() for x in tensors]


def boundaries(steps, sequences=5):
    inner = torch.randint(0, steps + 1, (sequences - 1,)).sort().values
    return torch.cat((torch.tensor([0]), inner, torch.tensor([steps]))).int()


def check_scans(batch, steps, channels, dtype, reverse, packed):
    batch = 1 if packed else batch
    cu_seqlens = boundaries(steps) if packed else None
    sequences = 5 if packed else batch
    a = torch.rand(batch, steps, channels).to(dtype)
    b, grad = (torch.randn(batch, steps, channels).to(dtype) for _ in range(2))
    h0, grad_last = (torch.randn(sequences, channels).to(dtype) for _ in range(2))
    kernels, reference = choose_backend("cuda", "cuda"), torch_ops.REFERENCE
    mask = (torch.rand(steps, batch) < 0.1).t()
    cases = ((h0, grad, grad_last, None), (None, grad, None, mask), (h0, None, grad_last, None))
    for initial, dh, dlast, resets in (*cases, (h0, grad, grad_last, mask)):
        for scan, backward, x, y in (
            ("linear_scan", "linear_scan_backward", a, b),
            ("log_linear_scan", "log_linear_scan_backward", a.log(), b),
        ):
            order = Order(cu_seqlens, resets, reverse)
            order_on_gpu = Order(*gpu(cu_seqlens), None if resets is None else mask.cuda(), reverse)
            want = getattr(reference, scan)(*(z if z is None else z.double() for z in (x, y, initial)), order)
            got = getattr(kernels, scan)(*gpu(x, y, initial), order_on_gpu)
            for g, w in zip(got, want, strict=True):
                assert not g.isnan().any()
                finite = w.isfinite()
                assert torch.equal(g.isfinite().cpu(), finite)
                assert relative_error(g[finite.cuda()], w[finite]) < TOLERANCE[dtype]
            h = want[0].to(dtype)
            inputs = (x, h) if scan == "linear_scan" else (x, y, h)
            arguments = (*inputs, initial, dh, dlast)
            wide = [z if z is None else z.double() for z in arguments]
            want = getattr(reference, backward)(*wide, order)
            got = getattr(kernels, backward)(*gpu(*arguments), order_on_gpu)
            for g, w in zip(got, want, strict=True):
                assert (g is None) == (w is None)
                assert g is None or relative_error(g, w) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_scans_match_the_reference(dtype, reverse, packed, geometry, poisoned, monkeypatch):
    force(monkeypatch, geometry)
    torch.manual_seed(0)
    for shape in SHAPES:
        check_scans(*shape, dtype, reverse, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_of_any_strides_are_scanned_in_place_by_tensor_maps(dtype, poisoned, monkeypatch):
    """Parts of wider rows, sequences within rows, and sequences or steps that lie in one place."""
    force(monkeypatch, "tensor maps")
    torch.manual_seed(0)
    kernels, reference = choose_backend("cuda", "cuda"), torch_ops.REFERENCE
    wide, b = torch.rand(3, 300, 16).to(dtype), torch.randn(300, 3, 8).to(dtype).transpose(0, 1)
    for a in (wide[..., 8:], wide[:1, :, :8], wide[:, :1, :8], wide[:1, :1, :8]):
        want = reference.linear_scan(a.double().expand(b.shape), b.double(), None, Order())
        got = kernels.linear_scan(a.cuda().expand(b.shape), b.cuda(), None, Order())
        for g, w in zip(got, want, strict=True):
            assert relative_error(g, w) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(148, 150, 136), (40, 600, 200)], ids=str)
def test_16_bit_scans_of_many_channels_match_the_reference(shape, dtype, reverse, poisoned):
    torch.manual_seed(0)
    check_scans(*shape, dtype, reverse, packed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_numbers_of_16_bit_channels_match_the_reference(shape, reverse, packed, poisoned):
    torch.manual_seed(0)
    check_scans(*shape, torch.bfloat16, reverse, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*FEW, *ODD], ids=str)
def test_few_or_odd_channels_or_steps_match_the_reference(shape, dtype, reverse, poisoned):
    torch.manual_seed(0)
    check_scans(*shape, dtype, reverse, packed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("gap", [0, 8, 13], ids="gap {}".format)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_16_bit_rows_begin_at_any_address(shape, gap, poisoned):
    torch.manual_seed(0)
    kernels, reference = choose_backend("cuda", "cuda"), torch_ops.REFERENCE
    a, b, grad = (torch.rand(shape).half() for _ in range(3))
    wide = [x.double() for x in (a, b, grad)]
    want = reference.linear_scan(wide[0], wide[1], None, Order())
    h = want[0].half()
    want += reference.linear_scan_backward(wide[0], h.double(), None, wide[2], None, Order())

    def moved(x, start):
        if gap == 0:
            return torch.cat((x.new_zeros(start), x.flatten())).cuda()[start:].view(shape)
        return torch.nn.functional.pad(x, (start, gap - start)).cuda()[..., start : start + shape[2]]

    for first, second, third in ((1, 1, 1), (3, 0, 6), (0, 7, 2)):
        x, y, z = moved(a, first), moved(h, second), moved(grad, third)
        got = kernels.linear_scan(x, moved(b, second), None, Order())
        got += kernels.linear_scan_backward(x, y, None, z, None, Order())
        for g, w in zip(got, want, strict=True):
            assert (g is None) == (w is None)
            assert g is None or relative_error(g, w) < TOLERANCE[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize("long", [4096, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(110, 150, 128), (150, 300, 128), (16, 12000, 64), (1, 5000, 64)], ids=str)
def test_scans_of_many_channels_or_steps_match_the_reference(dtype, shape, long, poisoned, monkeypatch):
    for rules in (streaming, chained):
        monkeypatch.setattr(rules, "LONG", long)
    monkeypatch.setattr(launch, "choose_geometry", choose_geometry.__wrapped__)
    force(monkeypatch, "chosen")
    torch.manual_seed(0)
    a, b, grad = (x.to(dtype) for x in (0.8 + 0.2 * torch.rand(shape), torch.randn(shape), torch.randn(shape)))
    kernels, reference = choose_backend("cuda", "cuda"), torch_ops.REFERENCE
    want = reference.linear_scan(a.double(), b.double(), None, Order())
    h = want[0].to(dtype)
    got = kernels.linear_scan(*gpu(a, b), None, Order())
    want += reference.linear_scan_backward(a.double(), h.double(), None, grad.double(), None, Order())[:2]
    got += kernels.linear_scan_backward(*gpu(a, h), None, grad.cuda(), None, Order())[:2]
    for g, w in zip(got, want, strict=True):
        assert relative_error(g, w) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_time_contiguous_tensors_are_scanned_in_place(dtype, poisoned):
    torch.manual_seed(0)
    kernels, reference = choose_backend("cuda", "cuda"), torch_ops.REFERENCE
    for batch, steps, channels, start in ((2, 300, 5, 0), (1, 4097, 3, 1), (3, 31, 64, 3)):
        a, b, grad = (torch.rand(batch, channels, steps + start).to(dtype) for _ in range(3))
        h0, grad_last = (torch.randn(batch, channels).to(dtype) for _ in range(2))
        for order in (Order(), Order(reverse=True)):
            # Views that begin in the middle of 16 bytes, and one of which sequences have gaps.
            x, y, z = (t.cuda()[..., start:].transpose(1, 2) for t in (a, b, grad))
            want = reference.linear_scan(*(t.double().cpu() for t in (x, y)), h0.double(), order)
            got = kernels.linear_scan(x, y, h0.cuda(), order)
            assert got[0].stride() == (channels * steps, 1, steps)
            for g, w in zip(got, want, strict=True):
                assert relative_error(g, w) < TOLERANCE[dtype]
            h = want[0].to(dtype).transpose(1, 2).contiguous().cuda().transpose(1, 2)
            wide = [t.double().cpu() for t in (x, h)]
            want = reference.linear_scan_backward(*wide, h0.double(), z.double().cpu(), grad_last.double(), order)
            got = kernels.linear_scan_backward(x, h, h0.cuda(), z, grad_last.cuda(), order)
            for g, w in zip(got, want, strict=True):
                assert relative_error(g, w) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 2, 7, 8])
@pytest.mark.parametrize("geometry", ["chosen", "streaming", "chained", "looking back"])
def test_masks_lie_at_any_address(geometry, channels, poisoned, monkeypatch):
    force(monkeypatch, geometry)
    torch.manual_seed(0)
    kernels, reference = choose_backend("cuda", "cuda"), torch_ops.REFERENCE
    a, b, grad = torch.rand(2, 3000, channels), torch.randn(2, 3000, channels), torch.randn(2, 3000, channels)
    mask = torch.rand(2, 6001) < torch.tensor([[0.05], [0.5]])
    for resets in (None, mask[:, :3000], mask[:, 5:3005], mask[:, 1::2], mask[:1, 3:3003].expand(2, 3000)):
        marks = None
        if resets is not None:
            marks = mask.cuda().as_strided(resets.shape, resets.stride(), resets.storage_offset())
        for reverse in (False, True):
            order, order_on_gpu = Order(None, resets, reverse), Order(None, marks, reverse)
            want = reference.linear_scan(a.double(), b.double(), None, order)
            got = kernels.linear_scan(a.cuda(), b.cuda(), None, order_on_gpu)
            for g, w in zip(got, want, strict=True):
                assert relative_error(g, w) < TOLERANCE[torch.float32]
            h = want[0]
            want = reference.linear_scan_backward(a.double(), h, None, grad.double(), None, order)
            got = kernels.linear_scan_backward(*gpu(a, h.float(), None, grad, None), order_on_gpu)
            for g, w in zip(got[:2], want[:2], strict=True):
                assert relative_error(g, w) < TOLERANCE[torch.float32]


@pytest.mark.gpu
def test_packed_sequences_of_all_lengths():
    torch.manual_seed(0)
    lengths = torch.cat((torch.randint(0, 40, (300,)), torch.tensor([9000]), torch.randint(1, 3, (50,))))
    bounds = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    for channels in (3, 72):
        a, b, grad = (torch.rand(1, int(bounds[-1]), channels) for _ in range(3))
        h0 = torch.randn(len(lengths), channels)
        for reverse in (False, True):
            inputs = [x.double().requires_grad_() for x in (a, b, h0)]
            want = ostinato.linear_scan(*inputs, cu_seqlens=bounds, reverse=reverse, backend="cpu")
            wanted = torch.autograd.grad(want, inputs, (grad.double(), h0.double()))
            on_gpu = [x.cuda().requires_grad_() for x in (a, b, h0)]
            got = ostinato.linear_scan(*on_gpu, cu_seqlens=bounds.cuda(), reverse=reverse)
            gradients = torch.autograd.grad(got, on_gpu, (grad.cuda(), h0.cuda()))
            for g, w in zip((*got, *gradients), (*want, *wanted), strict=True):
                assert relative_error(g.detach(), w.detach()) < 3e-6


@pytest.mark.gpu
@pytest.mark.parametrize("steps_before", [1, 3, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(128, 300, 256), (2, 300, 64), (1, 9000, 64), (1, 9000, 3), (1, 9000, 1), (3, 5000, 1000)], ids=str
)
def test_a_state_that_has_diverged_ends_at_a_reset(shape, dtype, steps_before):
    """Also if it diverged in the same thread's steps, from infinite inputs or by growth."""
    torch.manual_seed(0)
    a, b = torch.rand(shape).to(dtype).cuda(), torch.randn(shape).to(dtype).cuda()
    resets = torch.zeros(shape[:2], dtype=torch.bool).cuda()
    resets[:, 150] = True
    diverging, growing = b.clone(), a.clone()
    diverging[:, 150 - steps_before, ::2] = torch.inf
    diverging[:, 150 - steps_before, 1::2] = 1e38
    growing[:, 151 - steps_before : 150, 1::2] = 100
    got, last = ostinato.linear_scan(growing, diverging, resets=resets)
    want, _ = ostinato.linear_scan(a[:, 150:].double(), b[:, 150:].double())
    assert relative_error(got[:, 150:], want.cpu()) < TOLERANCE[dtype]
    assert torch.equal(last, got[:, -1])
    assert got[:, 150 - steps_before, ::2].isinf().all()
    assert not got[:, 149, ::2].isfinite().any()
    grad = torch.randn(shape).to(dtype).cuda()
    wanted = grad[:, :150].double()
    grad[:, 149 + steps_before] = torch.inf  # which ends there on its way back
    inputs, before = [a.requires_grad_(), b.requires_grad_()], [x[:, :150].double() for x in (a, b)]
    got = torch.autograd.grad(ostinato.linear_scan(*inputs, resets=resets)[0], inputs, grad)
    want = torch.autograd.grad(ostinato.linear_scan(*before)[0], before, wanted)
    for g, w in zip(got, want, strict=True):
        assert relative_error(g[:, :150], w.cpu()) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(300, 2000, 3), (4, 3000, 515), (1, 9000, 12), (2, 9000, 7)], ids=str)
def test_infinite_states_end_at_the_next_of_many_resets(shape, dtype, poisoned):
    """In tiles of whole rows, and of rows that begin anywhere."""
    torch.manual_seed(0)
    kernels, reference = choose_backend("cuda", "cuda"), torch_ops.REFERENCE
    a, b, grad = torch.rand(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    h = torch.randn(shape).to(dtype)
    for x in (b, grad):
        x[torch.rand(shape) < 0.02] = torch.inf
    resets = torch.rand(shape[:2]) < 0.2
    for reverse in (False, True):
        wide = a.double(), h.double(), None, grad.double()
        order, order_on_gpu = Order(None, resets, reverse), Order(None, resets.cuda(), reverse)
        want = reference.linear_scan_backward(*wide, None, order)[:2]
        want += (reference.linear_scan(a.double(), b.double(), None, order)[0],)
        got = kernels.linear_scan_backward(*gpu(a, h, None, grad, None), order_on_gpu)[:2]
        got += (kernels.linear_scan(a.cuda(), b.cuda(), None, order_on_gpu)[0],)
        for g, w in zip(got, want, strict=True):
            finite = w.isfinite()
            assert torch.equal(g.isfinite().cpu(), finite)
            assert relative_error(g[finite.cuda()], w[finite]) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_that_has_diverged_ends_at_a_reset_of_a_packed_sequence(dtype, channels):
    torch.manual_seed(0)
    bounds = torch.tensor([0, 7, 1000, 5000, 12000, 20000], dtype=torch.int32)
    a, b = torch.rand(1, 20000, channels).to(dtype), torch.randn(1, 20000, channels).to(dtype)
    resets = torch.rand(1, 20000) < 0.01
    resets[:, 4990] = resets[:, 998] = True
    h0 = torch.randn(5, channels).to(dtype)
    inputs = [x.double().requires_grad_() for x in (a, b, h0)]
    want = ostinato.linear_scan(*inputs, cu_seqlens=bounds, resets=resets, backend="cpu")
    b[:, [994, 997, 4985, 4989]] = torch.inf
    got = ostinato.linear_scan(a.cuda(), b.cuda(), h0.cuda(), cu_seqlens=bounds.cuda(), resets=resets.cuda())
    seen = torch.ones(20000, dtype=torch.bool)
    seen[994:998] = seen[4985:4990] = False
    assert relative_error(got[0][:, seen], want[0].detach()[:, seen]) < TOLERANCE[dtype]
    assert relative_error(got[1], want[1].detach()) < TOLERANCE[dtype]


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
        for x, want in zip(replayed, wanted, strict=True):
            assert torch.equal(x, want)


@pytest.mark.gpu
def test_graphs_of_the_compiler_hold_no_workspace(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(launch, "_workspaces", {})
    torch.manual_seed(0)
    a, b = torch.rand(1, 300000, 1, device="cuda"), torch.randn(1, 300000, 1, device="cuda")
    expected = ostinato.linear_scan(a, b)[0] + b
    compiled = torch.compile(lambda a, b: ostinato.linear_scan(a, b)[0] + b, mode="reduce-overhead")
    for _ in range(4):  # warmed up, captured, replayed
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(a, b), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", ["chosen", "streaming", "chained", "one warp"])
@pytest.mark.parametrize("candidate", ["positive", "linear", "tanh"])
@pytest.mark.parametrize("cell", ["mingru", "minlstm"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_layers_match_the_reference(dtype, cell, candidate, geometry, poisoned, monkeypatch):
    force(monkeypatch, geometry)
    torch.manual_seed(0)
    gates = GATES[cell]
    lengths = torch.tensor([4, 4, 3, 2, 2, 1])
    offsets = torch.cat((torch.tensor([0]), lengths.cumsum(0))).int()
    for batch, steps, channels in ((1, 1, 4), (4, 6, 33), (2, 300, 64), (3, 70, 5)):
        for layout, directions, with_bias in (("batch", 1, True), ("time", 2, True), ("offsets", 2, False)):
            batch = 4 if layout == "offsets" else batch
            rows = {"batch": (batch, steps), "time": (steps, batch), "offsets": (int(offsets[-1]),)}[layout]
            pre = (2 * torch.randn(*rows, directions * gates * channels)).to(dtype)
            bias = torch.randn(directions * gates * channels, dtype=torch.promote_types(dtype, torch.float32))
            bias = bias if with_bias else None
            h0, grad_last = (torch.randn(directions, batch, channels).to(dtype) for _ in range(2))
            grad = torch.randn(*rows, directions * channels).to(dtype)
            bounds = offsets if layout == "offsets" else None
            settings = (cell, candidate, layout == "batch", directions)
            wide = [z if z is None else z.double() for z in (pre, bias, h0)]
            want = layer("reference", *wide, bounds, *settings)
            on_gpu = None if bounds is None else bounds.cuda()
            got = layer("cuda", *gpu(pre, bias, h0), on_gpu, *settings)
            for g, w in zip(got, want, strict=True):
                assert relative_error(g, w) < TOLERANCE[dtype]
            arguments = (pre, bias, h0, want[0].to(dtype), grad, grad_last)
            wide = [z if z is None else z.double() for z in arguments]
            want = layer_backward("reference", *wide, bounds, *settings)
            got = layer_backward("cuda", *gpu(*arguments), on_gpu, *settings)
            for g, w in zip(got, want, strict=True):
                assert (g is None) == (w is None)
                assert g is None or relative_error(g, w) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["near one", "signed", "unit"])
def test_float32_error_stays_small_over_long_sequences(kind):
    torch.manual_seed(0)
    uniform = torch.rand(1, 65536, 16, dtype=torch.float64)
    a = {"near one": 1 - 1e-4 * uniform, "signed": 2 * uniform - 1, "unit": uniform}[kind].float()
    b = torch.randn(1, 65536, 16)
    want, _ = ostinato.linear_scan(a.double(), b.double(), backend="cpu")
    got, _ = ostinato.linear_scan(a.cuda(), b.cuda())
    assert relative_error(got, want) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("rate", [0.1, -1e-4, None])
def test_the_error_of_log_space_gradients_does_not_grow_with_length(rate, geometry, monkeypatch):
    force(monkeypatch, geometry)
    torch.manual_seed(0)
    for shape in ((1, 4000, 3), (2, 4000, 64)):
        log_a, log_b = torch.randn(shape) if rate is None else torch.full(shape, rate), torch.randn(shape)
        wide = [x.double().requires_grad_() for x in (log_a, log_b)]
        narrow = [x.cuda().requires_grad_() for x in (log_a, log_b)]
        want = torch.autograd.grad(ostinato.log_linear_scan(*wide, backend="reference")[1].sum(), wide)
        got = torch.autograd.grad(ostinato.log_linear_scan(*narrow)[1].sum(), narrow)
        loop = [x.detach().float().requires_grad_() for x in wide]
        last = loop[1][:, 0]
        for t in range(1, shape[1]):
            last = torch.logaddexp(loop[0][:, t] + last, loop[1][:, t])
        rounded = torch.autograd.grad(last.sum(), loop)  # what rounding the states alone does: 1e-6 to 3e-4
        for g, w, r in zip(got, want, rounded, strict=True):
            assert relative_error(g, w) < max(4e-6, 2 * relative_error(r, w))

        def excess(gradient):
            return (gradient.double().sum(1) - 1).abs().max().item()

        assert excess(got[1]) < max(2e-6, 2 * excess(rounded[1]))


def test_an_interrupted_launch_leaves_no_counter_behind(monkeypatch):
    class Workspace:
        def __init__(self, words, device):
            self.memory, self.counter = torch.zeros(words), torch.zeros(1)
            self.epoch, self.drawn, self.drawing = 0, 0, False

    begins = []

    def start(*given):
        begins.append(given[-1])
        if len(begins) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_Workspace", Workspace)
    monkeypatch.setattr(launch, "_workspaces", {})
    monkeypatch.setattr(launch, "_prepare", lambda *_: launch._Launch(start, 4, 100, 1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    scan = launch.Scan(launch.Problem("LinearScan", torch.float32, 0, 1, 8, 1, ((8, 1, 0),) * 2, ((8, 1, 0),)))
    like = torch.zeros(1, 8, 1)
    for _ in range(2):
        scan.launch(like, (16, 32))
    with pytest.raises(KeyboardInterrupt):
        scan.launch(like, (16, 32))
    for _ in range(2):
        scan.launch(like, (16, 32))
    assert begins == [0, 100, 200, 0, 100]  # of a workspace whose counter is at none after the interrupted one


@pytest.mark.gpu
def test_same_bits_every_time():
    torch.manual_seed(0)
    shapes = (1, 20000, 40), (1, 300000, 1), (64, 300, 256)
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        a, b = torch.rand(shape, device="cuda", dtype=dtype), torch.randn(shape, device="cuda", dtype=dtype)
        first = operators.linear_scan(a, b, None, None, None, False, "cuda")
        for _ in range(20):
            again = operators.linear_scan(a, b, None, None, None, False, "cuda")
            assert torch.equal(first[0], again[0])
            assert torch.equal(first[1], again[1])
    module = ostinato.MinLSTM(32, 48, bidirectional=True).cuda()
    x = torch.randn(5000, 2, 32, device="cuda")
    grads = []
    for _ in range(20):
        module.zero_grad()
        module(x)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    assert all(torch.equal(p, q) for other in grads[1:] for p, q in zip(grads[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 3, 3, 19, 40], dtype=torch.int32)])
def test_gradients_in_float64(cu_seqlens):
    torch.manual_seed(0)
    a, b = (torch.rand(1, 40, 3, dtype=torch.float64, device="cuda").requires_grad_() for _ in range(2))
    h0 = torch.randn(1 if cu_seqlens is None else 4, 3, dtype=torch.float64, device="cuda").requires_grad_()
    bounds = None if cu_seqlens is None else cu_seqlens.cuda()
    for reverse in (False, True):
        for scan in (ostinato.linear_scan, ostinato.log_linear_scan):
            settled = functools.partial(scan, reverse=reverse, cu_seqlens=bounds)
            torch.autograd.gradcheck(settled, (a, b, h0))


@pytest.mark.gpu
def test_operators_are_well_formed():
    a, b = (torch.rand(1, 40, 3, device="cuda").requires_grad_() for _ in range(2))
    torch.library.opcheck(torch.ops.ostinato.linear_scan.default, (a, b, None, None, None, False, "cuda"))
    by_time = [torch.rand(2, 5, 40, device="cuda").transpose(1, 2).requires_grad_() for _ in range(2)]
    torch.library.opcheck(torch.ops.ostinato.linear_scan.default, (*by_time, None, None, None, False, "cuda"))
    pre, bias = torch.randn(2, 9, 12, device="cuda").requires_grad_(), torch.randn(12, device="cuda").requires_grad_()
    arguments = (pre, bias, None, None, None, recurrence_of("minlstm", "positive", True), True, 1, "cuda")
    torch.library.opcheck(torch.ops.ostinato.layer_scan.default, arguments)


@pytest.mark.gpu
def test_nan_stays_in_its_channel_and_future():
    a, b = torch.rand(2, 500, 40, device="cuda"), torch.randn(2, 500, 40, device="cuda")
    b[0, 200, 7] = float("nan")
    h, _ = ostinato.linear_scan(a, b)
    expected = torch.zeros(2, 500, 40, dtype=torch.bool)
    expected[0, 200:, 7] = True
    assert torch.equal(h.isnan().cpu(), expected)
    bounds = torch.tensor([0, 300, 500], dtype=torch.int32, device="cuda")
    h, _ = ostinato.linear_scan(a[:1], b[:1], cu_seqlens=bounds)
    assert not h[:, 300:].isnan().any()


@pytest.mark.gpu
def test_more_elements_than_an_int_can_count():
    steps, channels = 1 << 20, 2100
    a = torch.rand(1, steps, channels, device="cuda", dtype=torch.bfloat16)
    b = torch.rand(1, steps, channels, device="cuda", dtype=torch.bfloat16)
    h, h_last = ostinato.linear_scan(a, b)
    tail = slice(steps - 400, None)  # gates of 1/2 forget everything older
    want, _ = ostinato.linear_scan(a[:, tail].double().cpu(), b[:, tail].double().cpu())
    assert relative_error(h[:, -100:], want[:, -100:]) < TOLERANCE[torch.bfloat16]
    assert torch.equal(h[:, -1], h_last)


@pytest.mark.gpu
def test_many_short_sequences():
    a, b = torch.rand(70000, 3, 2, device="cuda"), torch.rand(70000, 3, 2, device="cuda")
    want, _ = ostinato.linear_scan(a.double().cpu(), b.double().cpu())
    assert relative_error(ostinato.linear_scan(a, b)[0], want) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [ostinato.MinGRU, ostinato.MinLSTM])
def test_compiled_captured_exported_and_autocast_agree(cell):
    torch.manual_seed(0)
    module = cell(16, 24, num_layers=2, batch_first=True).cuda()
    x = torch.randn(3, 50, 16, device="cuda")
    want, last = module(x)
    compiled = torch.compile(module, fullgraph=True)
    assert relative_error(compiled(x)[0], want.cpu()) < 1e-5
    gradients = []
    for run in (module, compiled):
        module.zero_grad()
        run(x)[0].square().sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()])
    for p, q in zip(*gradients, strict=True):
        assert relative_error(q, p.cpu()) < 1e-4
    exported = torch.export.export(module, (x,)).module()
    assert relative_error(exported(x)[0], want.cpu()) < 1e-5
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half, _ = module(x)
    assert half.dtype == torch.bfloat16
    assert relative_error(half, want.cpu()) < 2e-2
    with torch.no_grad():
        graph, h = torch.cuda.CUDAGraph(), last.clone()
        step_input = x[:, 0].clone()
        for _ in range(3):
            module.step(step_input, h)
        with torch.cuda.graph(graph):
            _, after = module.step(step_input, h)
            whole, _ = module(x)
        h.zero_()
        for t in range(50):
            step_input.copy_(x[:, t])
            graph.replay()
            h.copy_(after)
    assert relative_error(h, last.cpu()) < 1e-5
    assert torch.equal(whole, want)


@pytest.mark.parametrize("cell", GATES)
def test_steps_compile_without_a_gpu(cell):
    pytest.importorskip("cuda.core")
    for architecture, dtype, (batch, inputs) in zip(
        ARCHITECTURES, nvrtc.SCALARS, ((1, 64), (3, 33), (8, 6)), strict=False
    ):
        recurrence = recurrence_of(cell, "positive", False)
        code, definitions = (
            recurrence_cuda.step_source(recurrence),
            recurrence_cuda.step_macros(recurrence, dtype, batch, inputs),
        )
        assert nvrtc.compile_cubin(code, architecture, dict(definitions))[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cell", [ostinato.MinGRU, ostinato.MinLSTM])
def test_single_steps(cell, dtype):
    torch.manual_seed(0)
    settings = ("positive", True, True), ("linear", False, True), ("tanh", True, False)
    for batch, inputs, hidden in itertools.product((1, 3, 8, 9), (1, 6, 33, 256), (5, 130)):
        candidate, bias, given = settings[(batch + hidden) % 3]
        module = cell(inputs, hidden, bias=bias, candidate=candidate, device="cuda", dtype=dtype)
        x = torch.randn(batch, inputs + 1, dtype=dtype, device="cuda")[:, 1:]
        x = x if inputs == 6 else x.flatten()[: batch * inputs].view(batch, inputs)
        h = torch.rand(1, batch, hidden, dtype=dtype, device="cuda") if given else None
        exact = copy.deepcopy(module).double().cpu()
        want = exact.step(x.double().cpu(), None if h is None else h.double().cpu())[0].detach()
        with torch.no_grad():
            for _ in range(2):  # checked, then remembered
                y, after = module.step(x, h)
                assert torch.equal(y[None], after)
                assert relative_error(y, want) < TOLERANCE[dtype]
            row, after = module.step(x[-1], None if h is None else h[:, -1])
            assert torch.equal(row[None], after)
            assert relative_error(row, want[-1]) < TOLERANCE[dtype]
            module.weight_ih_l0.data = module.weight_ih_l0.t().contiguous().t()
            assert relative_error(module.step(x, h)[0], want) < TOLERANCE[dtype]
            module.weight_ih_l0.data.zero_()
            assert relative_error(module.step(x, h)[0], want) > 1e-2


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

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
