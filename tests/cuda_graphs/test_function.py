"""Functions in simulated graphs, with results of several groups and dtypes."""

import torch

from ostinato.cuda_graphs.function import CapturedFunction
from simulated_graphs import simulate


def test_results_in_groups_and_dtypes(monkeypatch):
    simulate(monkeypatch, 100)
    x = torch.zeros(2, 3)

    def compute():
        return [[x + 1, None, (x + 2).bfloat16(), x[0] * 3], [x.sum(1), None]]

    function, calls = CapturedFunction(compute, [x], (0, 0)), []
    for given in (torch.ones(2, 3), torch.arange(6.0).view(2, 3)):
        calls.append((given, function([given.clone()])))
    for given, found in calls:  # which the next call has not overwritten
        expected = [given + 1, None, (given + 2).bfloat16(), given[0] * 3, given.sum(1), None]
        for y, right in zip(found, expected, strict=True):
            assert y is right is None or (y.dtype == right.dtype and torch.equal(y, right))
    memory = [None if y is None else y.untyped_storage().data_ptr() for _, found in calls for y in found]
    assert len({*memory} - {None}) == 6  # of each call, and in it of each group and dtype
    assert memory[0] == memory[3]
