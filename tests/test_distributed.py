"""A sequence over several processes is the sequence of one: values, and derivatives of every order."""

import copy
import functools
import itertools
from contextlib import contextmanager

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import exchange
import ostinato
import ostinato.distributed
from comparisons import same_bits
from ostinato.distributed import boundary, steps
from ostinato.distributed.collectives import Gathered, Shared
from ostinato.models import CausalConv, LanguageModel
from parallel.job import Job

LENGTHS = {2: [(7, 4), (0, 11), (10, 1)], 4: [(3, 0, 5, 2), (1, 1, 8, 1), (0, 0, 0, 10)]}
SCANS = {"linear": "linear_scan", "log": "log_linear_scan"}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cut(x, lengths, dim=1):
    """This process's part of a whole."""
    return None if x is None else x.split(lengths, dim)[distributed.get_rank()]


def leaf(x):
    return x.detach().clone().requires_grad_()


def compare(name, lengths, options, with_h0, order=1):
    """The largest difference of results and derivatives from one process's, relative to those that are large."""
    rank, size, total = distributed.get_rank(), distributed.get_world_size(), sum(lengths)
    cu_seqlens = options.get("cu_seqlens")
    batch = 2 if cu_seqlens is None else 1
    whole = [leaf(x) for x in random(2, batch, total, 3)]
    mine = [leaf(cut(x, lengths)) for x in whole]
    if with_h0:
        whole.append(leaf(random(batch if cu_seqlens is None else len(cu_seqlens) - 1, 3, seed=1)))
        mine.append(leaf(whole[2]))
    expected = finite(*getattr(ostinato, SCANS[name])(*whole, **options))
    options = {**options, "resets": cut(options.get("resets"), lengths), "group": distributed.group.WORLD}
    found = finite(*getattr(ostinato.distributed, SCANS[name])(*mine, **options))
    pairs = [(found[0], cut(expected[0], lengths)), (found[1], expected[1])]
    weights, of_last = random(*expected[0].shape, seed=2), random(size, *expected[1].shape, seed=3)
    loss = (expected[0].sin() * weights).sum() + (expected[1].sin() * of_last).sum()
    part = (found[0].sin() * cut(weights, lengths)).sum() + (found[1].sin() * of_last[rank]).sum()
    for level in range(order):
        again = level < order - 1
        grads = torch.autograd.grad(loss, whole, create_graph=again)
        parts = torch.autograd.grad(part, mine, create_graph=again)
        pairs += [(x, cut(y, lengths)) for x, y in zip(parts[:2], grads[:2], strict=True)]
        pairs += zip(parts[2:], grads[2:], strict=True)
        if again:
            weights = [random(*x.shape, seed=4 + level) for x in grads]
            loss = sum((x.sin() * y).sum() for x, y in zip(grads, weights, strict=True))
            part = sum((x.sin() * cut(y, lengths)).sum() for x, y in zip(parts[:2], weights[:2], strict=True))
            # All processes have the gradient of h0: each takes its share of what is made of it.
            part = part + sum((x.sin() * y).sum() / size for x, y in zip(parts[2:], weights[2:], strict=True))
    return largest_error(pairs)


def finite(h, h_last):
    """A scan's results; the logarithm of zero is the last state of a sequence without steps."""
    return h, h_last.masked_fill(h_last.isneginf(), -7.0)


def largest_error(pairs):
    """Relative to what is large, and NaN if any is, which Python's max may pass over."""
    errors = [(x - y).abs().max() / y.abs().max().clamp(min=1) for x, y in pairs if x.numel()]
    return torch.stack(errors).max().item()


def kinds(lengths):
    total = sum(lengths)
    resets = torch.rand(2, total, generator=torch.Generator().manual_seed(4)) < 0.2
    bounds = {
        "packed": [0, 2, 2, total - 1, total],
        "one long": [0, 0, total],
        "at the boundaries": [0, *itertools.accumulate(lengths)],
    }
    packed = {kind: {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)} for kind, ends in bounds.items()}
    return {"dense": {}, "resets": {"resets": resets}, **packed, "both": {**packed["packed"], "resets": resets[:1]}}


def errors(size):
    found = {}
    for (number, lengths), name, reverse in itertools.product(enumerate(LENGTHS[size]), SCANS, (False, True)):
        with_h0 = reverse == bool(number % 2)  # each direction with and without, of other lengths
        for kind, options in kinds(lengths).items():
            options = {"reverse": reverse, **options}
            found[name, lengths, kind, reverse, with_h0] = compare(name, lengths, options, with_h0)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_equal_to_one_process(processes, size):
    for found in processes.run(size, errors, size):
        wrong = {case: error for case, error in found.items() if not error < 1e-12}
        assert not wrong, "\n".join(f"{case}: {error}" for case, error in wrong.items())


def errors_of_orders():
    found, lengths = {}, (4, 3)
    flags = (False, True)
    for name, reverse, with_h0, (kind, options) in itertools.product(SCANS, flags, flags, kinds(lengths).items()):
        case = name, lengths, {"reverse": reverse, **options}, with_h0
        order = 3 if kind == "dense" and name == "linear" else 2
        found[name, kind, reverse, with_h0] = compare(*case, order=order)
    return found


def test_derivatives_of_higher_order(processes):
    for found in processes.run(2, errors_of_orders):
        wrong = {case: error for case, error in found.items() if not error < 1e-12}
        assert not wrong, "\n".join(f"{case}: {error}" for case, error in wrong.items())


def gradients_hold(name):
    """gradcheck in step on all processes, of what they all make of the same whole sequence."""
    world, size, rank = distributed.group.WORLD, distributed.get_world_size(), distributed.get_rank()
    resets = torch.tensor([[False, False, False], [False, rank == 1, False]])

    def of_all(a, b, h0):
        own = (Shared.apply(x, world)[rank] for x in (a, b))
        h, h_last = getattr(ostinato.distributed, SCANS[name])(*own, h0, resets=resets, group=world)
        results = Gathered.apply(h, world), h_last
        # All processes take the gradient of the same results: each of its share.
        return tuple(x / size + (x - x / size).detach() for x in results)

    a, b = random(2, size, 2, 3, 2)
    return torch.autograd.gradcheck(of_all, [leaf(x) for x in (a, b, random(2, 2, seed=1))])


@pytest.mark.parametrize("name", SCANS)
def test_gradcheck(processes, name):
    assert processes.run(2, gradients_hold, name) == [True, True]


def compare_of(whole, lengths, reverse, resets=None):
    whole = [leaf(x) for x in whole]
    mine = [leaf(cut(x, lengths)) for x in whole[:2]] + [leaf(whole[2])]
    expected = ostinato.linear_scan(*whole, resets=resets, reverse=reverse)
    options = {"resets": cut(resets, lengths), "group": distributed.group.WORLD, "reverse": reverse}
    found = ostinato.distributed.linear_scan(*mine, **options)
    weights = random(*whole[0].shape, seed=2)
    grads = torch.autograd.grad((expected[0] * weights).sum(), whole)
    parts = torch.autograd.grad((found[0] * cut(weights, lengths)).sum(), mine)
    pairs = [(found[0], cut(expected[0], lengths)), (found[1], expected[1])]
    pairs += [(x, cut(y, lengths)) for x, y in zip(parts[:2], grads[:2], strict=True)] + [(parts[2], grads[2])]
    return largest_error(pairs)


@contextmanager
def small(first_reach, longest_reach=0.5):
    """As if shards were long: the steps within which each was found to forget what enters it."""
    found = []
    find = boundary.Boundary.find_reach
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary, "FIRST_REACH", first_reach)
        patch.setattr(boundary, "LONGEST_REACH", longest_reach)
        patch.setattr(boundary.Boundary, "find_reach", lambda *x: found.append(find(*x)) or found[-1])
        yield found


def far_apart(reverse):
    """Parts that forget at once what enters them, later, or never, beside such as are too short to tell."""
    errors = []
    with small(1024, 1 / 8) as reaches:
        for lowest, lengths in ((0.0, (9000, 4000)), (0.9, (9000, 270_000)), (0.9999, (9000, 10_000))):
            a, b = torch.rand(2, 1, sum(lengths), 2, generator=torch.Generator().manual_seed(5))
            errors.append(compare_of((lowest + (1 - lowest) * a, b, random(1, 2, seed=1)), lengths, reverse))
    return errors, reaches


@pytest.mark.parametrize("reverse", [False, True])
def test_parts_in_which_the_past_vanishes_and_parts_in_which_it_does_not(processes, reverse):
    (errors, first), (others, second) = processes.run(2, far_apart, reverse)
    assert all(error < 1e-12 for error in errors + others)
    assert (first, second) == ([1024, 0, 0], [0, 32 * 1024, 0])


def compose(a, b, resets=None, *, reverse, before=False):
    """What the kernel of GPUs does."""
    P, L = torch.ones_like(a[:, 0]), torch.zeros_like(a[:, 0])
    for step in reversed(range(a.shape[1])) if reverse else range(a.shape[1]):
        if resets is not None:
            P, L = (x.masked_fill(resets[:, step, None], 0.0) for x in (P, L))
        L = a[:, step] * (L + b[:, step]) if before else a[:, step] * L + b[:, step]
        P = P * a[:, step]
    return P, L


def pass_on(P, L, start, of, reverse):
    state, states = start.double(), {}
    for part in reversed(range(len(P))) if reverse else range(len(P)):
        states[part] = state
        state = P[part] * state + L[part]
    return states[of].to(start.dtype), state.to(start.dtype)


@contextmanager
def kernels_of_a_gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.Steps, "has_kernel", True)
        patch.setattr(steps.kernel, "compose", compose)
        patch.setattr(steps.kernel, "pass_on", pass_on)
        yield


def errors_as_on_a_gpu(size):
    with kernels_of_a_gpu(), small(2):
        return errors(size)


def test_equal_to_one_process_with_the_kernels_of_a_gpu(processes):
    for found in processes.run(2, errors_as_on_a_gpu, 2):
        wrong = {case: error for case, error in found.items() if not error < 1e-12}
        assert not wrong, "\n".join(f"{case}: {error}" for case, error in wrong.items())


def errors_where_coefficients_are_zero(reverse, resets):
    a, b, h0 = random(2, 71, 3), random(2, 71, 3, seed=1), random(2, 3, seed=2)
    if not resets:
        a[:, ::2] = 0
    mask = torch.arange(71).expand(2, 71) % 3 == 0 if resets else None
    with kernels_of_a_gpu(), small(8) as reaches:
        return compare_of((a, b, h0), (30, 41), reverse, mask), reaches


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_the_gradient_at_a_boundary_is_of_the_state_that_came_late(processes, reverse, resets):
    for error, reaches in processes.run(2, errors_where_coefficients_are_zero, reverse, resets):
        assert error < 1e-12
        assert reaches == [8]


def of_a_nan():
    a, b = torch.full((1, 6, 2), 0.5), torch.ones(1, 6, 2)
    b[0, 1, 0] = torch.nan
    resets = torch.tensor([[False] * 4 + [True, False]])
    options = {"group": distributed.group.WORLD, "resets": cut(resets, (3, 3))}
    h, h_last = ostinato.distributed.linear_scan(cut(a, (3, 3)), cut(b, (3, 3)), **options)
    return h.isnan().flatten().tolist(), h_last.isnan().flatten().tolist()


def test_a_nan_stays_in_its_channel_and_before_the_reset(processes):
    nan, none = [True, False], [False, False]
    assert processes.run(2, of_a_nan) == [(none + nan * 2, none), (nan + none * 2, none)]


def bits_of_one_process():
    a, b, h0 = leaf(random(2, 9, 3)), random(2, 9, 3, seed=1), random(2, 3, seed=2)
    results = []
    for function, options in (
        (ostinato.linear_scan, {}),
        (ostinato.distributed.linear_scan, {"group": distributed.group.WORLD}),
    ):
        h, h_last = function(a, b, h0, reverse=True, **options)
        results.append((h, h_last, *torch.autograd.grad(h.sum() + h_last.sum(), a)))
    return same_bits(*results)


def test_a_group_of_one_has_the_bits_of_one_process(processes):
    assert processes.run(1, bits_of_one_process) == [True]


LAYERS = {
    "MinGRU": lambda: ostinato.MinGRU(3, 4, 2, batch_first=True),
    "MinLSTM, time first": lambda: ostinato.MinLSTM(3, 4, bias=False),
    "both ways": lambda: ostinato.MinGRU(3, 4, bidirectional=True, batch_first=True, candidate="tanh"),
    "RG-LRU": lambda: ostinato.RGLRU(3, 4, batch_first=True),
    "HGRN": lambda: ostinato.HGRN(3, 4, batch_first=True),
    "causal convolution": lambda: CausalConv(3, 4),
}


def errors_of_layers(lengths, scale=1.0):
    found = {}
    for name, make in LAYERS.items():
        torch.manual_seed(0)
        layer, x = make(), scale * random(2, sum(lengths), 3)
        dim = 1 if getattr(layer, "batch_first", True) else 0
        x = leaf(x if dim else x.transpose(0, 1))
        if isinstance(layer, CausalConv):
            initial = random(2, 3, 3, seed=1)
        else:
            initial = random(layer.num_layers * layer.num_directions, 2, 4, seed=1)
        parts = ostinato.distributed.sequence_parallel(copy.deepcopy(layer), distributed.group.WORLD)
        states, own = [leaf(initial), leaf(initial)], leaf(cut(x, lengths, dim))
        expected, results = layer(x, states[0]), parts(own, states[1])
        weights, of_last = random(*expected[0].shape, seed=2), random(*expected[1].shape, seed=3)
        ((expected[0].sin() * weights).sum() + (expected[1].sin() * of_last).sum()).backward()
        loss = (results[0].sin() * cut(weights, lengths, dim)).sum()
        (loss + (results[1].sin() * of_last).sum() / len(lengths)).backward()
        pairs = [(results[0], cut(expected[0], lengths, dim)), (results[1], expected[1])]
        pairs += [(own.grad, cut(x.grad, lengths, dim)), (states[1].grad, states[0].grad)]
        for one, several in zip(layer.parameters(), parts.parameters(), strict=True):
            distributed.all_reduce(several.grad)
            pairs.append((several.grad, one.grad))
        found[name] = largest_error(pairs)
    return found


@pytest.mark.parametrize("lengths", [(6, 5), (2, 1, 0, 8)])
def test_layers_take_parts(processes, lengths):
    for found in processes.run(len(lengths), errors_of_layers, lengths):
        assert all(error < 1e-12 for error in found.values()), found


def errors_of_layers_that_forget(lengths):
    """Of gates that are open or closed."""
    with small(20) as reaches, pytest.MonkeyPatch.context() as patch:
        patch.delitem(LAYERS, "RG-LRU")
        return errors_of_layers(lengths, 1e4), reaches


@pytest.mark.parametrize("lengths", [(45, 41)])
def test_layers_that_forget_are_scanned_before_the_exchange(processes, lengths):
    for found, reaches in processes.run(len(lengths), errors_of_layers_that_forget, lengths):
        assert all(error < 1e-12 for error in found.values()), found
        assert reaches == [20, 0, 20, 20, 20, 20]  # the second layer of one has inputs that open no gate so far


def errors_in_16_bits():
    """Of one process and of several, from float64."""
    lengths = (50, 70, 0, 80)
    a, b = 0.98 + 0.02 * random(1, 200, 3).sigmoid(), random(1, 200, 3, seed=1)
    a, b = a.bfloat16(), b.bfloat16()
    weights = random(1, 200, 3, seed=2)

    def results(a, b, scan, weights):
        a, b = leaf(a), leaf(b)
        h, _ = scan(a, b)
        return h, *torch.autograd.grad((h * weights).sum(), (a, b))

    exact = results(a.double(), b.double(), ostinato.linear_scan, weights)
    one = results(a, b, ostinato.linear_scan, weights)
    in_parts = functools.partial(ostinato.distributed.linear_scan, group=distributed.group.WORLD)
    several = results(cut(a, lengths), cut(b, lengths), in_parts, cut(weights, lengths))
    pairs = [(x, cut(y, lengths)) for x, y in zip(several, exact, strict=True)]
    return [
        max((x.double() - y).abs().max().item() if x.numel() else 0.0 for x, y in chosen)
        for chosen in (zip(one, exact, strict=True), pairs)
    ]


def test_16_bits_round_at_the_boundaries_no_more_than_elsewhere(processes):
    for one, several in processes.run(4, errors_in_16_bits):
        assert several < 1.5 * one


def shapes_without_numbers():
    world = distributed.group.WORLD
    found = []
    for length in (3, 9000):
        x = torch.zeros(2, length, 0, requires_grad=True)
        h, h_last = ostinato.distributed.linear_scan(x, x, group=world)
        (h.sum() + h_last.sum()).backward()
        found += [h.shape, h_last.shape, x.grad.shape]
    model = ostinato.distributed.sequence_parallel(LanguageModel(4, width=4, num_layers=1), world)
    logits, _ = model(torch.zeros(0, 5, dtype=torch.int64))
    return [tuple(shape) for shape in (*found, logits.shape)]


def test_no_channels_and_no_sequences(processes):
    dense = [shape for length in (3, 9000) for shape in ((2, length, 0), (2, 0), (2, length, 0))]
    assert processes.run(2, shapes_without_numbers) == [[*dense, (0, 5, 4)]] * 2


def error_of_a_copy(lengths):
    layer, x = ostinato.MinGRU(3, 4), random(sum(lengths), 2, 3)
    expected = cut(layer(x)[0], lengths, 0)
    parts = copy.deepcopy(ostinato.distributed.sequence_parallel(layer, distributed.group.WORLD))
    return (parts(cut(x, lengths, 0))[0] - expected).abs().max().item()


def test_copies_of_layers_take_parts(processes):
    assert all(error < 1e-12 for error in processes.run(2, error_of_a_copy, (4, 3)))


@ostinato.recurrence
def relu(h, x):
    return torch.relu(h + x)


@ostinato.recurrence
def decaying(x, decay):
    return torch.sigmoid(decay), x


def error_by_name():
    x, decay, lengths = random(2, 9, 3), random(3, seed=1), (4, 5)
    expected = decaying(x, decay)
    found = ostinato.distributed.run_recurrence(decaying, decay=decay, x=cut(x, lengths), group=distributed.group.WORLD)
    return largest_error([(found[0], cut(expected[0], lengths)), (found[1], expected[1])])


def test_arguments_of_a_recurrence_by_name(processes):
    assert all(error < 1e-12 for error in processes.run(2, error_by_name))


def refusals():
    world, x = distributed.group.WORLD, torch.zeros(1, 3, 2)
    layer = ostinato.distributed.sequence_parallel(ostinato.MinGRU(2, 2, batch_first=True), world)
    model = ostinato.distributed.sequence_parallel(LanguageModel(2, width=4), world)
    mesh = init_device_mesh("cpu", (1, 2))
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    calls = {
        "mesh": lambda: ostinato.distributed.linear_scan(x, x, group=mesh),
        "no module": lambda: ostinato.distributed.sequence_parallel([layer], world),
        "no recurrence": lambda: ostinato.distributed.run_recurrence(torch.add, x, group=world),
        "step": lambda: layer.step(x[:, 0]),
        "stepper": lambda: ostinato.Stepper(torch.nn.Sequential(layer), 1)(x[:, 0]),
        "model's step": lambda: model.step(torch.zeros(1, dtype=torch.int64), model.initial_state(1)),
        "generate": lambda: model.generate(torch.zeros(1, 1, dtype=torch.int64), 1),
        "group": lambda: ostinato.distributed.linear_scan(x, x, group=None),
        "RNN": lambda: ostinato.distributed.sequence_parallel(LanguageModel(2, width=4, cell="lstm"), world),
        "packed": lambda: layer(torch.nn.utils.rnn.pack_sequence([x[0]])),
        "complex argument": lambda: ostinato.distributed.run_recurrence(decaying, x.cfloat(), x[0, 0], group=world),
        "complex state": lambda: ostinato.distributed.run_recurrence(
            decaying, x, x[0, 0], h0=x[:, 0].cfloat(), group=world
        ),
        "no tensor": lambda: ostinato.distributed.run_recurrence(decaying, x, 1, group=world),
        "other arguments": lambda: ostinato.distributed.run_recurrence(decaying, x, rate=x[0, 0], group=world),
        "not linear": lambda: ostinato.distributed.run_recurrence(relu, x, group=world),
        "weights": lambda: ostinato.distributed.run_recurrence(decaying, x, x, weight_hh=x[0, :2], group=world),
        "boundaries": lambda: ostinato.distributed.linear_scan(x, x, group=world, cu_seqlens=bounds),
        "shape": lambda: ostinato.distributed.linear_scan(x, x, x[0], group=world),
    }
    messages = {}
    for name, call in calls.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        messages[name] = str(caught.value)
    return messages


def test_what_cannot_be_done_is_said(processes):
    for messages in processes.run(2, refusals):
        assert messages["group"].startswith("group must be a process group or a device mesh that this process is in")
        assert "got blocks.0.recurrent, a LSTM" in messages["RNN"]
        assert "a sharded sequence cannot be a PackedSequence" in messages["packed"]
        assert (
            messages["complex argument"]
            == "x must be a tensor of a real floating dtype; got a tensor of torch.complex64"
        )
        assert (
            messages["complex state"] == "h0 must be a tensor of a real floating dtype; got a tensor of torch.complex64"
        )
        assert messages["no tensor"] == "decay must be a tensor of a floating dtype; got int"
        assert messages["other arguments"] == (
            "decaying takes the arguments x, decay; got 1 by position and rate by name"
        )
        assert messages["not linear"].endswith("relu is not")
        assert messages["weights"] == "weight_hh needs a state; decaying is linear and has none"
        assert messages["boundaries"] == "cu_seqlens must rise from 0 to the number of time steps, 6; got [0, 3]"
        assert messages["shape"] == "h0 must have shape (1, 2); got (3, 2)"
        assert messages["mesh"].startswith("group must be a device mesh of one dimension; got DeviceMesh((")
        assert messages["no module"] == "module must be a torch.nn.Module; got list"
        assert messages["no recurrence"].startswith("recurrence must be made by ostinato.recurrence; got ")
        for name, caller in {"step": "step", "stepper": "step", "model's step": "step", "generate": "generate"}.items():
            assert messages[name] == f"{caller} needs a module of whole sequences; this one takes shards of them"


def worst_of_a_nan():
    return Job(0).worst(1e-7, [1e-7, torch.nan][distributed.get_rank()], 1e-6)


def test_the_benchmark_passes_over_no_nan(processes):
    assert all(worst != worst for worst in processes.run(2, worst_of_a_nan))


def test_the_simulated_exchange_composes_the_states_of_one_process():
    for processes in (1, 2, 1000, 1024):
        P, L = torch.rand(2, processes, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        states, _ = ostinato.linear_scan(P[None], L[None])
        torch.testing.assert_close(exchange.log_step_states(P, L), states[0])
    assert exchange.ring(1024, 100)[1] == exchange.doubling(1024, 100)[1] == 1023 * 100
    assert exchange.log_step(1024, 100)[1] == 10 * 100
