"""Estimates the time of one step of a layer by a geometry's kernel, in microseconds, to rank geometries.

The models are linear in what a step reads, computes and waits for, with coefficients fitted to measurements.
"""

import functools
from typing import NamedTuple

import torch

from ostinato.kernels.persistent.cuda.heuristics.geometry import THREADS, WARPS, Geometry, ceil_div

SECTOR = 32  # bytes of a sector of the L2 cache


class _Cost(NamedTuple):
    """Microseconds of a step on an H200, fitted to some thousand geometries, four in five within 10 %."""

    step: float  # fixed
    read: float = 0.0  # per 100 kB of state
    row: float = 0.0  # per 10 kB of a sequence's state for every eight sequences, for the loads of a lane
    in_shared: float = 0.0  # per 100 kB of weights read from shared memory
    streamed: float = 0.62  # per 100 kB of weights that a block reads from L2
    multiplied: float = 0.0  # per hundred tiles of a warp or entries of a thread, for every eight sequences
    gathered: float = 0.0  # per thousand entries of a thread, for every byte of a unit's states
    added: float = 0.0  # per thousand entries of a thread, for every sequence
    exact: float = 0.0  # like `multiplied`, for products of split numbers on tensor cores
    updated: float = 0.0  # per ten gates that a thread computes
    summed: float = 0.0  # per 64 row tiles of a sequence, for the reduction of partial sums
    cluster: float = 0.0  # per other block of the cluster, for the exchange between its blocks
    paired: float = 0.0  # fixed, if blocks form clusters
    blocks: float = 0.0  # per 100 blocks of a group, as all wait for the last
    lines: float = 0.0  # per 100 blocks, beyond 32, that read the few cache lines of one sequence
    shared: float = 0.0  # for every eight sequences, if several blocks write parts of one sector
    traffic: float = 0.0  # per MB of the states of all groups
    partial: float = 0.0  # per ten gates of the last item of a thread, if other threads, which wait for it, have none
    uneven: float = 0.0  # fixed, if a thread's items are of different units; with split roles, if lanes are idle


_COSTS = {
    ("dense", False): _Cost(
        step=0.48,
        read=1.37,
        row=0.208,
        in_shared=0.227,
        multiplied=0.437,
        exact=2.77,
        updated=0.485,
        summed=0.36,
        blocks=0.144,
        shared=0.0505,
        partial=0.612,
        uneven=0.0427,
    ),
    ("dense", True): _Cost(
        step=0.563,
        read=0.709,
        row=0.526,
        in_shared=0.224,
        multiplied=0.368,
        exact=3.35,
        updated=0.358,
        summed=0.679,
        cluster=0.0965,
        paired=0.307,
        lines=0.155,
        shared=0.325,
        uneven=0.122,
    ),
    ("block", False): _Cost(step=0.85, read=1.9, in_shared=0.37, multiplied=1.45, exact=4.1, updated=0.26),
    ("block", True): _Cost(step=0.85, read=1.9, in_shared=0.37, multiplied=1.45, exact=6.3, updated=0.26, cluster=0.20),
    ("sparse", False): _Cost(
        step=0.809,
        read=2.12,
        in_shared=0.531,
        streamed=1.02,
        multiplied=0.62,
        gathered=1.98,
        added=2.61,
        updated=2.27,
    ),
    ("sparse", True): _Cost(
        step=1.12,
        read=2.19,
        in_shared=0.627,
        streamed=1.14,
        multiplied=0.211,
        gathered=2.12,
        added=3.18,
        updated=0.812,
        paired=0.138,
    ),
}
# For states that stay in the shared memory of clusters.
_WITHIN_CLUSTERS = _Cost(
    step=0.295,
    read=2.0,
    in_shared=0.2,
    multiplied=0.64,
    exact=2.03,
    updated=0.249,
    summed=0.634,
    blocks=0.719,
    traffic=2.55,
    uneven=0.0364,
)
# For gradients within clusters, whose blocks exchange only sums.
_SCATTERING = _Cost(
    step=0.278, multiplied=0.514, exact=2.65, updated=0.333, summed=0.272, cluster=0.0102, traffic=2.26, uneven=0.0297
)
# For two groups in turn: the products of both, which hide everything else.
_PING_PONG = {
    False: _Cost(step=0.625, row=1.25, in_shared=0.599, multiplied=0.349, summed=0.767, blocks=0.218, partial=0.495),
    True: _Cost(
        step=0.65, row=0.997, in_shared=0.636, updated=0.824, summed=0.504, cluster=0.182, blocks=0.142, uneven=0.205
    ),
}
# For wide batches, forward and backward: fixed, per sequence of a group, and per sequence and tile of a block.
_WIDE = {False: (1.5, 0.108, 0.00045), True: (1.1, 0.175, 0.0004)}
_HALVED = 0.75  # the cost factor of sums if half as many are reduced, as two warps read the same part of the state
_SMALL_CLUSTER = 8  # blocks of a cluster beyond this number count twice
_SPLIT = 0.6  # the cost of splitting weights, once for all sequences, relative to exact products of eight sequences
_BY_FMA = 1.3  # the cost factor of the dense kernel's exact products of one sequence
_SPLIT_STREAMED = 3.5  # the cost factor of streamed weights if these are split
_SECOND_LOAD = 75.0  # microseconds per thousand entries of a thread, if each gathers more than the 16 bytes of one load
_SHORT = 0.186  # microseconds more per other block of a cluster in 16 bits, whose products hide it only in ping-pong
_SHARE = 0.054  # microseconds per share of a strip that a warp of the block kernel has
_MASKED = 1.14  # the cost factor of a dense kernel whose weights are multiplied by a mask at every call
_ROUND_TRIP = 1.3  # microseconds per additional round of loads for which the block kernel waits for the state


@functools.lru_cache(4096)
def microseconds(geometry: Geometry, batch: int, pruned: bool = False) -> float:
    """The estimated time of a step of all sequences; `pruned`: whether the layer has a mask."""
    if geometry.wide:
        fixed, sequence, multiplied = _WIDE[geometry.backward]
        step = fixed + (sequence + multiplied * geometry.tiles) * geometry.columns
        return step * (_MASKED if pruned else 1) * ceil_div(batch, geometry.sequences_at_once)
    cost, row = _COSTS[geometry.path, geometry.backward], geometry.slice * geometry.dtype.itemsize
    items = geometry.units * geometry.capacity
    others, uneven = geometry.cluster - 1, THREADS * geometry.adjacent % geometry.units
    if geometry.distributed:
        cost = _SCATTERING if geometry.backward else _WITHIN_CLUSTERS
        others = geometry.blocks - 1 + max(0, geometry.blocks - _SMALL_CLUSTER)
    if geometry.block_groups > 1:
        cost = _PING_PONG[geometry.backward]
    if geometry.scatters:
        uneven = geometry.units * geometry.columns % 32
    passes, exact = ceil_div(geometry.columns, 8), geometry.exact and geometry.dtype == torch.float32
    splits = exact and (geometry.path == "block" or (geometry.path == "dense" and geometry.columns > 1))
    products = cost.exact * (passes + _SPLIT) if splits else cost.multiplied * passes
    if exact and geometry.path == "dense" and not splits:
        products *= _BY_FMA
    step = cost.step + cost.read * geometry.columns * row / 1e5
    step += cost.row * passes * row / 1e4
    step += cost.in_shared * geometry.in_shared * geometry.tile_bytes / 1e5
    step += cost.streamed * (_SPLIT_STREAMED if splits else 1) * geometry.streamed * geometry.tile_bytes / 1e5
    step += products * geometry.tiles / 1e2
    step += (cost.gathered * geometry.state_bytes + cost.added * geometry.columns) * geometry.tiles / 1e3
    step += cost.updated * geometry.gates / 10
    halved = _HALVED if geometry.column_parts < WARPS else 1
    step += cost.summed * halved * geometry.row_tiles * geometry.columns / 64
    step += cost.cluster * others
    step += cost.paired if geometry.cluster > 1 else 0
    step += cost.blocks * geometry.blocks / 1e2
    step += cost.lines * max(0, geometry.blocks - 32) / geometry.columns / 1e2
    step += cost.shared * geometry.columns / 8 if geometry.units * geometry.dtype.itemsize % SECTOR else 0
    step += cost.traffic * geometry.groups * geometry.columns * row / 1e6
    step += cost.partial * geometry.products / 10 if items > geometry.owners and items % geometry.owners else 0
    step += cost.uneven if uneven else 0
    if geometry.path == "sparse":
        step += _SECOND_LOAD * geometry.tiles / 1e3 if geometry.state_bytes > 16 else 0
    elif geometry.path == "block":
        step += _SHARE * len(geometry.strips.tiles)
        step += _ROUND_TRIP * (ceil_div(geometry.words, geometry.words_in_flight) - 1)
    elif geometry.path == "dense" and not geometry.distributed:
        step += _SHORT * others if geometry.dtype.itemsize == 2 and geometry.block_groups == 1 else 0
    if pruned and geometry.path == "dense":
        step *= _MASKED
    return step * ceil_div(batch, geometry.sequences_at_once)
