"""A sequence over several processes is the sequence of one: values, and derivatives of every order."""

import itertools

import pytest
import torch
from torch import distributed

import ostinato
import ostinato.distributed

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
    """The largest difference of results and gradients from one process's."""
    rank, size, total = distributed.get_rank(), distributed.get_world_size(), sum(lengths)
    cu_seqlens = options.get("cu_seqlens")
    batch = 2 if cu_seqlens is None else 1
    whole = [leaf(x) for x in random(2, batch, total, 3)]
    mine = [leaf(cut(x, lengths)) for x in whole]
    if with_h0:
        whole.append(leaf(random(batch if cu_seqlens is None else len(cu_seqlens) - 1, 3, seed=1)))
        mine.append(leaf(whole[2]))
    expected = getattr(ostinato, SCANS[name])(*whole, **options)
    options = {**options, "resets": cut(options.get("resets"), lengths), "group": distributed.group.WORLD}
    found = getattr(ostinato.distributed, SCANS[name])(*mine, **options)
    differences = [found[0] - cut(expected[0], lengths), found[1] - expected[1]]
    weights, of_last = random(*expected[0].shape, seed=2), random(size, *expected[1].shape, seed=3)
    loss = (expected[0].sin() * weights).sum() + (expected[1].sin() * of_last).sum()
    part = (found[0].sin() * cut(weights, lengths)).sum() + (found[1].sin() * of_last[rank]).sum()
    for level in range(order):
        again = level < order - 1
        grads = torch.autograd.grad(loss, whole, create_graph=again)
        parts = torch.autograd.grad(part, mine, create_graph=again)
        differences += [x - cut(y, lengths) for x, y in zip(parts[:2], grads[:2], strict=True)]
        differences += [x - y for x, y in zip(parts[2:], grads[2:], strict=True)]
        if again:
            weights = [random(*x.shape, seed=4 + level) for x in grads]
            loss = sum((x.sin() * y).sum() for x, y in zip(grads, weights, strict=True))
            part = sum((x.sin() * cut(y, lengths)).sum() for x, y in zip(parts[:2], weights[:2], strict=True))
            # All processes have the gradient of h0: each takes its share of what is made of it.
            part = part + sum((x.sin() * y).sum() / size for x, y in zip(parts[2:], weights[2:], strict=True))
    return max(x.abs().max().item() if x.numel() else 0.0 for x in differences)


def kinds(lengths):
    total = sum(lengths)
    resets = torch.rand(2, total, generator=torch.Generator().manual_seed(4)) < 0.2
    bounds = {
        "packed": [0, 2, 2, total - 1, total],
        "one long": [0, 0, total],
        "at the seams": [0, *itertools.accumulate(lengths)],
    }
    packed = {kind: {"cu_seqlens": torch.tensor(ends, dtype=torch.int32)} for kind, ends in bounds.items()}
    return {"dense": {}, "resets": {"resets": resets}, **packed, "both": {**packed["packed"], "resets": resets[:1]}}


def errors(size):
    found = {}
    for lengths, name, reverse, with_h0 in itertools.product(LENGTHS[size], SCANS, (False, True), (False, True)):
        for kind, options in kinds(lengths).items():
            options = {"reverse": reverse, **options}
            found[name, lengths, kind, reverse, with_h0] = compare(name, lengths, options, with_h0)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_equal_to_one_process(processes, size):
    for found in processes.run(size, errors, size):
        wrong = {case: error for case, error in found.items() if not error < 1e-12}
        assert not wrong, "\n".join(f"{case}: {error}" for case, error in wrong.items())
