"""Which calls are eager, and which find what was prepared for an earlier one."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from ostinato.kernels.operators.eager import Prepared, is_eager

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_plain_tensors_are_eager(device):
    x = torch.rand(3, 4, device=device)
    with torch.inference_mode():
        made_in_inference = torch.rand(3, device=device)
    plain = [x, x.bfloat16(), x[:, 1], x.t(), x.expand(2, 3, 4), x.requires_grad_() * 2, torch.nn.Parameter(x.detach())]
    for tensor in (*plain, torch.nn.Buffer(x), x.detach(), made_in_inference, torch.empty(0, device=device)):
        assert is_eager([tensor])
    assert is_eager([])
    assert is_eager(plain)


def not_plain():
    class Subclass(torch.Tensor):
        pass

    x = torch.rand(3, 4)
    yield "zero without memory", torch._efficientzerotensor((3, 4))
    yield "negation", torch._neg_view(x)
    yield "conjugation", torch.complex(x, x).conj()
    yield "subclass", x.as_subclass(Subclass)
    yield "meta", x.to("meta")
    yield "sparse", x.to_sparse()
    yield "sparse rows", x.to_sparse_csr()
    yield "oneDNN's layout", x.to_mkldnn()
    yield "nested", torch.nested.nested_tensor([x, x])
    yield "jagged", torch.nested.nested_tensor([x, x], layout=torch.jagged)
    yield "quantised", torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    yield "functional", torch._to_functional_tensor(x)
    with torch._subclasses.FakeTensorMode():
        yield "fake", torch.rand(3, 4)


@pytest.mark.filterwarnings("ignore")
def test_no_other_tensor_is_eager():
    found = []
    for kind, tensor in not_plain():
        assert not is_eager([torch.rand(2), tensor]), kind
        found.append(kind)
    assert len(found) == 13


def test_no_tensor_is_eager_under_transforms_tangents_and_modes():
    x, seen = torch.rand(3, 4), []

    def look(y):
        seen.append(is_eager([torch.rand(3, 4) if y is None else y]))
        return x.sum() if y is None else y.sum()

    vmap(look, randomness="same")(x)
    vmap(lambda _: look(None), randomness="same")(x)
    grad(look)(x)
    with forward_ad.dual_level():
        look(forward_ad.make_dual(x, x))
    with FlopCounterMode(display=False):
        look(x)
    leaf = x.clone().requires_grad_()
    doubled = leaf * 2
    doubled.register_hook(lambda g: seen.append(is_eager([g])))
    torch.autograd.grad(doubled, leaf, torch.rand(5, 3, 4), is_grads_batched=True)
    assert seen == [False] * 6


@pytest.mark.filterwarnings("ignore")
def test_only_like_tensors_find_what_was_prepared():
    x, weight = torch.rand(3, 4), torch.nn.Parameter(torch.rand(4, 4))
    prepared = Prepared()
    prepared.add(lambda: "run", (x, weight), "setting")
    prepared.add(lambda: "never", (x, x), "setting")
    assert prepared.find((torch.rand(3, 4), torch.nn.Parameter(torch.rand(4, 4))), "setting") == "run"
    assert prepared.find((x.requires_grad_().detach(), weight), "setting") == "run"
    weight.data.mul_(2)
    assert prepared.find((x.detach(), weight), "setting") == "run"

    y, fixed = torch.rand(3, 4), torch.nn.Parameter(weight.detach(), requires_grad=False)
    others = [(y, fixed), (x, weight), (y, weight.detach()), (y.double(), weight), (y.t(), weight), (y[:2], weight)]
    others += [(torch.rand(4, 3).t(), weight), (y, weight, y), (y,), (None, weight), (y, None), (y, y), (3, weight)]
    for _, tensor in not_plain():
        others += [(tensor, weight), (y, tensor)]
    assert not any(prepared.find(tensors, "setting") for tensors in others)
    assert prepared.find((y, weight), "another setting") is None

    for change in (weight.double, weight.t, lambda: weight[:, :3]):
        old, weight.data = weight.data, change().detach()
        assert prepared.find((y, weight), "setting") is None
        weight.data = old
    for context in torch.no_grad(), torch.inference_mode(), FlopCounterMode(display=False), torch.autocast("cpu"):
        with context:
            assert prepared.find((y, weight), "setting") is None
    with forward_ad.dual_level():
        assert prepared.find((forward_ad.make_dual(y, y), weight), "setting") is None
    vmap(lambda row: [] if prepared.find((y, weight), "setting") is None else 1 / 0)(y)
