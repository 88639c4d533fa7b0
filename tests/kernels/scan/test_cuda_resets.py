"""What a reset or the end of a sequence stops on a GPU: every state, also one that is not finite."""

import pytest
import torch

import ostinato
from ostinato.kernels.scan import Order, choose_backend, torch_ops
from scan_kernels import TOLERANCE, assert_close, force, gpu, relative_error


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 2, 7, 8])
@pytest.mark.parametrize("geometry", ["chosen", "streaming", "chained", "looking back"])
def test_masks_lie_at_any_address(geometry, channels, nan_memory, monkeypatch):
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
            assert_close(got, want, TOLERANCE[torch.float32])
            h = want[0]
            want = reference.linear_scan_backward(a.double(), h, None, grad.double(), None, order)
            got = kernels.linear_scan_backward(*gpu(a, h.float(), None, grad, None), order_on_gpu)
            assert_close(got[:2], want[:2], TOLERANCE[torch.float32])


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
@pytest.mark.parametrize(
    "shape",
    [(300, 2000, 3), (4, 3000, 515), (1, 9000, 12), (2, 9000, 7), (500, 133, 1), (300, 301, 2), (1500, 90, 7)],
    ids=str,
)
def test_infinite_states_end_at_the_next_of_many_resets(shape, dtype, nan_memory):
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
