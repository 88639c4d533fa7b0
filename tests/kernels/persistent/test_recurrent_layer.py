"""One layer and direction: the loop over time that defines it, and the operator around a device's kernels."""

import gc
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.kernels.derived import derived_from
from ostinato.kernels.persistent import backends, operators, reference
from ostinato.kernels.persistent.arguments import Arguments
from ostinato.kernels.persistent.plan import GATES, Plan
from ostinato.kernels.persistent.sequences import Sequences

NAMES = ("x", "h0", "c0", "weight_ih", "weight_hh", "bias_ih", "bias_hh")


@pytest.fixture(autouse=True, scope="module")
def reference_kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_kernels_on", lambda device_type: stand_in())
        backends._plan_dense.cache_clear()
        yield
    backends._plan_dense.cache_clear()


def stand_in():
    plan = Plan("dense", reason="a test")
    return SimpleNamespace(**(vars(reference) | {"make_plan": lambda *_: plan}))


def layer(cell, lengths=(3, 3), size=3, hidden=2, absent=("resets",), dtype=torch.float64, seed=0):
    """The operator's first ten arguments, and the batch; `lengths` must not rise."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    batch, gates = len(lengths), GATES[cell] * hidden
    shapes = {
        "x": (sum(lengths), size),
        "h0": (batch, hidden),
        "c0": (batch, hidden),
        "weight_ih": (gates, size),
        "weight_hh": (gates, hidden),
        "bias_ih": (gates,),
        "bias_hh": (gates,),
    }
    absent = set(absent) | ({"c0"} if cell != "lstm" else set())
    tensors = [None if name in absent else some(*shape) for name, shape in shapes.items()]
    offsets = None
    if len(set(lengths)) > 1:
        sizes = [sum(length > t for length in lengths) for t in range(lengths[0])]
        offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    resets = None if "resets" in absent else torch.rand(sum(lengths), generator=generator) < 0.4
    return [*tensors, None, offsets, resets], batch


def run(tensors, batch, cell, reverse, training=True):
    results = operators.recurrent_layer(*tensors, batch, cell, reverse, training, None, 1)
    return [*results[: 3 if cell == "lstm" else 2]]


def random_gradients(results, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in results]


@settings(deadline=None)
@given(
    cell=st.sampled_from(sorted(GATES)),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(lambda x: sorted(x, reverse=True)),
    hidden=st.integers(1, 4),
    reverse=st.booleans(),
    absent=st.sets(st.sampled_from(["h0", "c0", "bias_ih", "bias_hh", "resets"])),
    frozen=st.sets(st.sampled_from(NAMES)),
    unused=st.sets(st.integers(0, 2), max_size=2),
)
def test_gradients_are_those_of_the_loop(cell, lengths, hidden, reverse, absent, frozen, unused):
    tensors, batch = layer(cell, lengths, hidden=hidden, absent=absent)
    for name, x in zip(NAMES, tensors, strict=False):
        if x is not None and name in frozen:
            x.requires_grad_(False)
    inputs = [x for x in tensors[:7] if x is not None and x.requires_grad]
    args = Arguments(*tensors, batch, cell, reverse, True, None, 1)
    loop = reference.forward(args.layer, torch.nn.functional.linear(args.x, args.weight_ih, args.bias_ih))
    expected = [y for y in loop if y is not None]
    results = run(tensors, batch, cell, reverse)
    assert len(results) == len(expected)
    for y, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(y, exact, rtol=0, atol=1e-13)
    if not inputs:
        assert not results[0].requires_grad
        return
    grads = random_gradients(results)
    used = [i for i in range(len(results)) if i not in unused and expected[i].requires_grad]
    if not used:
        return
    ours, exact = (
        torch.autograd.grad([y[i] for i in used], inputs, [grads[i] for i in used], allow_unused=True)
        for y in (results, expected)
    )
    for grad, truth in zip(ours, exact, strict=True):
        truth = torch.zeros_like(grad) if truth is None else truth
        torch.testing.assert_close(grad, truth, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cell", sorted(GATES))
def test_gradients_of_what_is_not_a_number_are_those_of_the_loop(cell):
    tensors, batch = layer(cell, (4, 4), absent=("resets",))
    with torch.no_grad():
        tensors[0][4, 1] = torch.nan  # of a sequence's third step
    args = Arguments(*tensors, batch, cell, False, True, None, 1)
    loop = reference.forward(args.layer, torch.nn.functional.linear(args.x, args.weight_ih, args.bias_ih))
    expected, results = [y for y in loop if y is not None], run(tensors, batch, cell, False)
    grads, inputs = random_gradients(results), [x for x in tensors[:7] if x is not None]
    found, truths = (torch.autograd.grad(y, inputs, grads) for y in (results, expected))
    assert results[0].isnan().any()
    for grad, truth in zip(found, truths, strict=True):
        torch.testing.assert_close(grad, truth, rtol=1e-11, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", [(3, 3), (3, 2, 1)])
@pytest.mark.parametrize("cell", GATES)
def test_gradients_and_their_gradients_by_differences(cell, lengths, reverse):
    tensors, batch = layer(cell, lengths)
    own = [x for x in tensors[:7] if x is not None]

    def function(*changed):
        changed = iter(changed)
        moved = [None if x is None else next(changed) for x in tensors[:7]]
        return tuple(run(moved + tensors[7:], batch, cell, reverse))

    torch.autograd.gradcheck(function, own, fast_mode=True)
    torch.autograd.gradgradcheck(function, own, fast_mode=True)


@pytest.mark.parametrize("cell", GATES)
def test_one_tensor_in_two_places_has_both_gradients(cell):
    """With gradients of gradients, where the operator's own backward is not what runs."""
    tensors, batch = layer(cell, size=2)
    tensors[3] = tensors[4]  # the weights
    grads = [
        torch.autograd.grad(run(tensors, batch, cell, False)[0].sum(), tensors[4], create_graph=create_graph)[0]
        for create_graph in (False, True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("cell", "lengths"), [("rnn_tanh", (3, 2, 1)), ("gru", (3, 3)), ("lstm", (3, 3)), ("lstm", (3, 2, 1))]
)
def test_operators_are_what_pytorch_expects(cell, lengths):
    tensors, batch = layer(cell, lengths, absent=(), dtype=torch.float32)
    for training in (True, False):
        own = tensors if training else [None if x is None else x.detach() for x in tensors]
        torch.library.opcheck(torch.ops.ostinato.recurrent_layer, (*own, batch, cell, True, training, None, 1))
    tensors = [None if x is None else x.detach() for x in tensors]
    output, h_n, c_n, *kept = operators.recurrent_layer(*tensors, batch, cell, True, True, None, 1)
    grads = output, h_n, c_n if cell == "lstm" else None
    arguments = (*tensors, batch, cell, True, True, None, 1, output, *kept, *grads, 0b1011011)
    torch.library.opcheck(
        torch.ops.ostinato.recurrent_layer_backward,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", GATES)
def test_narrow_dtypes_sum_in_float32(cell, dtype):
    tensors, batch = layer(cell, (40,) * 3, size=8, hidden=16, dtype=dtype)
    with torch.no_grad():
        for x in tensors[3:7]:
            x *= 0.25
    exact = [x if x is None or not x.is_floating_point() else x.detach().double().requires_grad_() for x in tensors]
    results = []
    for own in (tensors, exact):
        results.append(run(own, batch, cell, False))
        torch.autograd.backward(results[-1], [grad.to(own[0].dtype) for grad in random_gradients(results[0])])
    assert all(y.dtype == dtype for y in results[0])
    step = torch.finfo(dtype).eps
    for ours, truth in zip(tensors[:7], exact[:7], strict=True):
        if ours is not None:
            error = (ours.grad.double() - truth.grad).abs().max() / truth.grad.abs().max()
            assert ours.grad.dtype == dtype
            assert error < (10 if cell == "rnn_relu" else 6) * step  # a sum near 0 may change its sign


@pytest.mark.parametrize(("cell", "widths"), [("rnn_tanh", 1), ("gru", 1), ("lstm", 2)])
def test_rows_kept_for_the_backward(cell, widths):
    """h, and of an LSTM c."""
    tensors, batch = layer(cell, (7, 5, 5), size=3, hidden=4)
    kept = {}

    def keep(x):
        kept[x.data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = run(tensors, batch, cell, False)[0]
    inputs = {x.data_ptr() for x in tensors if x is not None}
    rows = sum(numbers for address, numbers in kept.items() if address not in inputs)
    assert rows == output.numel() * widths


def test_nothing_is_kept_without_training():
    tensors, batch = layer("lstm")
    with torch.no_grad():
        *_, c, gates = operators.recurrent_layer(*tensors, batch, "lstm", False, False, None, 1)
    assert c.numel() == gates.numel() == 0


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5).map(lambda x: sorted(x, reverse=True)), st.booleans())
def test_the_state_before_each_step(lengths, reverse):
    offsets = layer("gru", lengths)[0][8]
    sequences = Sequences(len(lengths), offsets, reverse=reverse)
    steps = list(pairwise(range(0, sum(lengths) + 1, len(lengths)) if offsets is None else offsets.tolist()))
    rows = torch.arange(1.0, sum(lengths) + 1)[:, None]
    first = -torch.arange(1.0, len(lengths) + 1)[:, None]
    expected = rows.clone()
    for b, length in enumerate(lengths):
        order = range(length)[::-1] if reverse else range(length)
        before = first[b]
        for t in order:
            expected[steps[t][0] + b], before = before, rows[steps[t][0] + b]
    assert torch.equal(reference.previous(rows, first, sequences), expected)
    assert torch.equal(reference.previous(rows, None, sequences), torch.where(expected < 0, 0.0, expected))


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_computed_from_a_mask_is_kept_until_that_changes(inference):
    calls = []

    def compute():
        calls.append(1)
        return len(calls)

    with torch.inference_mode(inference):
        mask = torch.ones(4, 4, dtype=torch.bool)
        assert [derived_from(mask, "a", compute), derived_from(mask, "a", compute)] == [1, 1]
        assert derived_from(mask, "b", compute) == 2
        mask[1, 2] = False
        assert [derived_from(mask, "a", compute), derived_from(mask, "a", compute)] == [3, 3]
    another = torch.ones(4, 4, dtype=torch.bool)
    kept = weakref.ref(derived_from(another, "a", lambda: torch.ones(1)))
    gc.collect()
    assert kept() is not None
    del another
    gc.collect()
    assert kept() is None
