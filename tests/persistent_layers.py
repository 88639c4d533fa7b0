"""Geometries of the persistent kernels, and masks of their weights, for their tests."""

import torch

from gpus import H100
from ostinato.kernels.persistent.cuda import search
from ostinato.kernels.persistent.cuda.costs import microseconds
from ostinato.kernels.persistent.cuda.geometry import Geometry
from ostinato.kernels.persistent.plan import GATES


def candidates(path, cell, hidden, batch, dtype, density=1.0, block=None, *, properties=H100, backward=False):
    """All but those of groups in turn, which have tests and sanitizer runs of their own."""
    start = Geometry(path, cell, hidden, dtype, 0, 0, 0, backward)
    return [g for g in search.candidates(start, batch, density, block, properties) if g.turns == 1]


def candidate(path, cell, hidden, batch, *others, **options):
    """The geometry that the plan would choose if there were only this path, and no groups in turn."""
    found = candidates(path, cell, hidden, batch, *others, **options)
    return min(found, key=lambda g: microseconds(g, batch))


def random_mask(cell, hidden, density, block, device="cpu"):
    down, across = -(-hidden // block[0]), -(-hidden // block[1])
    kept = torch.rand(GATES[cell], down, across, device=device) < density
    kept = kept.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return kept[:, :hidden, :hidden].reshape(-1, hidden)
