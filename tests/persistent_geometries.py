"""Geometries of the persistent kernels, and masks of their weights, for their tests."""

import torch

from gpus import H100
from ostinato.kernels.persistent.cuda.heuristics import search
from ostinato.kernels.persistent.cuda.heuristics.cells import CELLS
from ostinato.kernels.persistent.cuda.heuristics.costs import microseconds
from ostinato.kernels.persistent.cuda.heuristics.geometry import Geometry
from ostinato.kernels.persistent.plan import GATES


def candidates(path, cell, hidden, batch, dtype, density=1.0, block=None, *, properties=H100, backward=False):
    """Return all candidates but those that alternate between two groups, which have their own tests."""
    start = Geometry(path, CELLS[cell], hidden, dtype, 0, 0, 0, backward)
    return [g for g in search.candidates(start, batch, density, block, properties) if g.block_groups == 1]


def candidate(path, cell, hidden, batch, *others, **options):
    """Return the geometry that the plan would choose among the candidates of this path."""
    found = candidates(path, cell, hidden, batch, *others, **options)
    return min(found, key=lambda g: microseconds(g, batch))


def dense(cell, hidden, batch, dtype, backward, exact, properties):
    """Return all geometries of a dense layer."""
    start = Geometry("dense", CELLS[cell], hidden, dtype, 0, 0, 0, backward, exact)
    return search.candidates(start, batch, 1.0, None, properties)


def within_clusters(cell, hidden, batch, dtype, exact=True, backward=False, properties=H100):
    """Return geometries that exchange everything within clusters, of all cluster sizes, with few and many columns."""
    found = [g for g in dense(cell, hidden, batch, dtype, backward, exact, properties) if g.distributed]
    sizes = {g.blocks: [x for x in found if x.blocks == g.blocks] for g in found}
    return [of_size[k] for of_size in sizes.values() for k in {0, len(of_size) - 1}]


def in_pairs(cell, hidden, batch, dtype, backward, properties=H100):
    """Return geometries whose threads process adjacent units in pairs, one of each cluster size."""
    found = dense(cell, hidden, batch, dtype, backward, True, properties)
    found = [g for g in found if g.block_groups == 1 and g.adjacent == 2]
    return list({g.cluster: g for g in sorted(found, key=lambda g: -microseconds(g, batch))}.values())


def of_any_number(cell, hidden, dtype, backward, properties=H100):
    """Return geometries, one of each cluster size, whose kernels also accept fewer sequences."""
    found = dense(cell, hidden, 8, dtype, backward, False, properties)
    return list({g.cluster: g for g in found if g.takes_fewer and g.columns == 8}.values())


def rounded(cell, hidden, batch, backward, properties=H100):
    """Return geometries in tf32, with one and with two buffers of partial sums."""
    found = dense(cell, hidden, batch, torch.float32, backward, False, properties)
    found = {(g.cluster, g.loads_early): g for g in found if g.block_groups == 1 and not g.distributed}
    return [g._replace(sum_buffers=n) for g in found.values() for n in (1, 2)]


def ping_pong(cell, hidden, batch, dtype, backward, properties=H100):
    """Return geometries whose blocks alternate between two groups, one of each group size, count and cluster size."""
    found = dense(cell, hidden, batch, dtype, backward, False, properties)
    return list({(g.columns, g.groups, g.cluster): g for g in found if g.block_groups == 2 and not g.wide}.values())


def wide(cell, hidden, batch, dtype, backward, properties=H100):
    """Return geometries whose products are warpgroups' (`wgmma`), of each group size."""
    return [g for g in dense(cell, hidden, batch, dtype, backward, True, properties) if g.wide]


def generated(cell, hidden, batch, dtype, backward, exact=False, properties=H100):
    """Return the fastest geometry of each kind for a generated cell: without clusters, in clusters, with two groups."""
    start = Geometry("dense", cell, hidden, dtype, 0, 0, 0, backward, exact)
    found = search.candidates(start, batch, 1.0, None, properties)
    kinds = {
        (g.block_groups, g.distributed, g.cluster > 1): g for g in sorted(found, key=lambda g: -microseconds(g, batch))
    }
    return list(kinds.values())


def streamed(path, *layer, properties=H100, backward=False):
    """Return geometries for so few multiprocessors that weights are read from L2, one of each cluster size."""
    device = search.Device(*(getattr(properties, name) for name in search.Device._fields))
    few = device._replace(multi_processor_count=16 if path == "sparse" else 8)
    found = candidates(path, *layer, properties=few, backward=backward)
    return list({g.cluster: g for g in sorted(found, key=lambda g: -g.streamed) if g.streamed}.values())


def random_mask(cell, hidden, density, block, device="cpu"):
    down, across = -(-hidden // block[0]), -(-hidden // block[1])
    kept = torch.rand(GATES[cell], down, across, device=device) < density
    kept = kept.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return kept[:, :hidden, :hidden].reshape(-1, hidden)
