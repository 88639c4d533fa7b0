"""The CUDA scans against the float64 reference, over dtypes, packings, shapes, strides and geometries."""

import pytest
import torch

import ostinato
from ostinato.kernels.scan import Order, choose_backend, torch_ops
from ostinato.kernels.scan.cuda import launch
from ostinato.kernels.scan.cuda.heuristics import chained, streaming
from ostinato.kernels.scan.cuda.heuristics.choice import choose_geometry
from ostinato.minimal.recurrences import recurrence_of
from scan_kernels import FEW, GEOMETRIES, JOINED, ODD, TOLERANCE, assert_close, boundaries, force, gpu, relative_error

SHAPES = [(2, 1, 5), (1, 777, 1), (2, 300, 8), (3, 130, 33), (1, 1000, 72), (2, 257, 6), (2, 190, 12)]


def check_scans(batch, steps, channels, dtype, reverse, packed, states=True):
    batch = 1 if packed else batch
    cu_seqlens = boundaries(steps) if packed else None
    sequences = 5 if packed else batch
    a = torch.rand(batch, steps, channels).to(dtype)
    b, grad = (torch.randn(batch, steps, channels).to(dtype) for _ in range(2))
    h0, grad_last = (torch.randn(sequences, channels).to(dtype) for _ in range(2))
    kernels, reference = choose_backend("cuda", "cuda"), torch_ops.REFERENCE
    mask = (torch.rand(steps, batch) < 0.1).t()
    cases = [(h0, grad, grad_last, None), (None, grad, None, mask), (h0, None, grad_last, None)]
    cases.append((h0, grad, grad_last, mask))
    if not states:
        cases = [(None, grad, None, None), (None, grad, None, mask.contiguous()), (None, grad, grad_last, None)]
    for initial, dh, dlast, resets in cases:
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
            assert_close(got, want, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_scans_match_the_reference(dtype, reverse, packed, geometry, nan_memory, monkeypatch):
    force(monkeypatch, geometry)
    torch.manual_seed(0)
    for shape in SHAPES:
        check_scans(*shape, dtype, reverse, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_of_any_strides_are_scanned_in_place_by_tensor_maps(dtype, nan_memory, monkeypatch):
    """Parts of wider rows, sequences within rows, and sequences or steps that lie in one place."""
    force(monkeypatch, "tensor maps")
    torch.manual_seed(0)
    kernels, reference = choose_backend("cuda", "cuda"), torch_ops.REFERENCE
    wide, b = torch.rand(3, 300, 16).to(dtype), torch.randn(300, 3, 8).to(dtype).transpose(0, 1)
    for a in (wide[..., 8:], wide[:1, :, :8], wide[:, :1, :8], wide[:1, :1, :8]):
        want = reference.linear_scan(a.double().expand(b.shape), b.double(), None, Order())
        got = kernels.linear_scan(a.cuda().expand(b.shape), b.cuda(), None, Order())
        assert_close(got, want, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(148, 150, 136), (40, 600, 200)], ids=str)
def test_16_bit_scans_of_many_channels_match_the_reference(shape, dtype, reverse, nan_memory):
    torch.manual_seed(0)
    check_scans(*shape, dtype, reverse, packed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_numbers_of_16_bit_channels_match_the_reference(shape, reverse, packed, nan_memory):
    torch.manual_seed(0)
    check_scans(*shape, torch.bfloat16, reverse, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*FEW, *ODD], ids=str)
def test_few_or_odd_channels_or_steps_match_the_reference(shape, dtype, reverse, nan_memory):
    torch.manual_seed(0)
    check_scans(*shape, dtype, reverse, packed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", JOINED, ids=str)
def test_short_sequences_scanned_as_one_match_the_reference(shape, dtype, reverse, nan_memory):
    torch.manual_seed(0)
    check_scans(*shape, dtype, reverse, packed=False, states=False)


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True], ids=["ahead", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_few_channels_of_sequences_apart_or_in_one_place_match_the_reference(shape, dtype, reverse, nan_memory):
    torch.manual_seed(0)
    kernels, reference, order = choose_backend("cuda", "cuda"), torch_ops.REFERENCE, Order(reverse=reverse)
    a, b, grad = (torch.rand(shape).to(dtype) for _ in range(3))

    def apart(x):  # and what is between them, or before and after, does not matter
        return torch.nn.functional.pad(x.cuda(), (0, 0, 2, 1), value=torch.nan)[:, 2:-1]

    for lie in (apart, lambda x: x.cuda()[:1].expand(shape)):
        x, y, dh = lie(a), apart(b), lie(grad)
        want = reference.linear_scan(x.double().cpu(), b.double(), None, order)
        assert_close(kernels.linear_scan(x, y, None, order), want, TOLERANCE[dtype])
        h = want[0].to(dtype)
        wide = x.double().cpu(), h.double(), None, dh.double().cpu(), None
        want = reference.linear_scan_backward(*wide, order)
        assert_close(kernels.linear_scan_backward(x, apart(h), None, dh, None, order), want, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("gap", [0, 8, 13], ids="gap {}".format)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_16_bit_rows_begin_at_any_address(shape, gap, nan_memory):
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
        assert_close(got, want, TOLERANCE[torch.float16])


@pytest.mark.gpu
@pytest.mark.parametrize("long", [4096, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(110, 150, 128), (150, 300, 128), (16, 12000, 64), (1, 5000, 64)], ids=str)
def test_scans_of_many_channels_or_steps_match_the_reference(dtype, shape, long, nan_memory, monkeypatch):
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
    assert_close(got, want, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_time_contiguous_tensors_are_scanned_in_place(dtype, nan_memory):
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
            assert_close(got, want, TOLERANCE[dtype])
            h = want[0].to(dtype).transpose(1, 2).contiguous().cuda().transpose(1, 2)
            wide = [t.double().cpu() for t in (x, h)]
            want = reference.linear_scan_backward(*wide, h0.double(), z.double().cpu(), grad_last.double(), order)
            got = kernels.linear_scan_backward(x, h, h0.cuda(), z, grad_last.cuda(), order)
            assert_close(got, want, TOLERANCE[dtype])


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
def test_operators_are_well_formed():
    a, b = (torch.rand(1, 40, 3, device="cuda").requires_grad_() for _ in range(2))
    torch.library.opcheck(torch.ops.ostinato.linear_scan.default, (a, b, None, None, None, False, "cuda"))
    by_time = [torch.rand(2, 5, 40, device="cuda").transpose(1, 2).requires_grad_() for _ in range(2)]
    torch.library.opcheck(torch.ops.ostinato.linear_scan.default, (*by_time, None, None, None, False, "cuda"))
    pre, bias = torch.randn(2, 9, 12, device="cuda").requires_grad_(), torch.randn(12, device="cuda").requires_grad_()
    arguments = (pre, bias, None, None, None, recurrence_of("minlstm", "positive", True), True, 1, "cuda")
    torch.library.opcheck(torch.ops.ostinato.layer_scan.default, arguments)
