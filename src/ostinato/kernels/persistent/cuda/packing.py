"""Sparse formats of pruned layers: index arrays that depend only on the mask.

The weights themselves are read from the parameter at every launch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ostinato.kernels.persistent.cuda.heuristics.fitting import fill_registers, most_streamed, split_strips
from ostinato.kernels.persistent.cuda.heuristics.geometry import THREADS, WARPS, ZERO_PLACES, Geometry
from ostinato.kernels.persistent.plan import KernelPath


class Packing(NamedTuple):
    """The index arrays by which a kernel reads a pruned matrix; see ``Product`` in ``block.cuh`` and ``sparse.cuh``."""

    geometry: Geometry  # with the actual number of tiles
    indices: Tensor  # int32, the 1-based index into the matrix of each packed weight, 0 for padding
    places: Tensor  # int16, the index into the state of each packed weight or column
    spans: Tensor | None = None  # int16, of the sparse kernel: the first and the last thread of each row


def pack(mask: Tensor, geometry: Geometry, properties: Any) -> Packing:
    """The packing of the weights that a (gates * H, H) mask keeps, for the geometry's "block" or "sparse" kernel.

    Raises MemoryError if the mask is so uneven that the weights do not fit the device with these `properties`.
    """
    numbers = torch.arange(1, mask.numel() + 1, dtype=torch.int32, device=mask.device).view(mask.shape)
    rows = _rows_of_blocks(torch.where(mask.bool(), numbers, 0), geometry)
    return (_pack_block if geometry.path == "block" else _pack_sparse)(rows, geometry, properties)


def _fitting(geometry: Geometry | None, path: KernelPath, properties: Any) -> Geometry:
    """The geometry; raises MemoryError if there is none, or if it streams more weights than fit in L2."""
    if geometry is None or geometry.bytes_streamed > most_streamed(properties):
        raise MemoryError(f"the recurrent weights that this mask leaves do not fit on the chip in the {path} kernel")
    return geometry


def _rows_of_blocks(matrix: Tensor, geometry: Geometry) -> Tensor:
    """Each block's part of a (gates * H, H) matrix, (blocks, rows, columns), zeros beyond H; backward transposed."""
    hidden, pitch, cluster = geometry.hidden_size, geometry.pitch, geometry.cluster
    gates = matrix.view(-1, hidden, hidden)
    units = geometry.blocks * geometry.units
    if not geometry.backward:
        rows = F.pad(gates, (0, pitch - hidden, 0, units - hidden))
        return rows.view(-1, geometry.blocks, geometry.units, pitch).transpose(0, 1).flatten(1, 2)
    columns = F.pad(gates, (0, units - hidden, 0, pitch - hidden)).flatten(0, 1)
    columns = F.pad(columns, (0, 0, 0, cluster * geometry.slice - len(columns)))
    slices = columns.t().view(-1, geometry.rows, cluster, geometry.slice)  # of each cluster
    return slices.transpose(1, 2).flatten(0, 1)


def _pack_block(rows: Tensor, geometry: Geometry, properties: Any) -> Packing:
    """Strips of 16 rows with their nonzero columns, split into shares of equal numbers of tiles, assigned to warps."""
    blocks, width, banks, pitch = rows.shape[0], geometry.tile_columns, geometry.banks, geometry.slice
    column = _column_of_place(geometry).to(rows.device)
    strips = rows.view(blocks, -1, 16, pitch)[..., column]
    needed = (strips > 0).any(2)
    counts = needed.sum(2)
    split = split_strips(geometry, counts.amax(0).tolist(), properties.shared_memory_per_block_optin)
    geometry = _fitting(split, "block", properties)

    # Columns are sorted by their rank within their bank, so that consecutive places are in different banks.
    ranks = F.pad(needed, (0, -pitch % banks)).unflatten(2, (-1, banks)).cumsum(2).flatten(2)[..., :pitch]
    bank = torch.arange(pitch, device=rows.device) % banks
    order = (ranks * banks + bank).masked_fill(~needed, pitch * banks * 2).argsort(2)
    size = geometry.strips.shares * width * max(geometry.strips.tiles)
    order = F.pad(order, (0, max(0, size - pitch)))[..., :size]
    real = torch.arange(size, device=rows.device) < counts.unsqueeze(2)
    numbers = strips.gather(3, order.unsqueeze(2).expand(-1, -1, 16, -1))
    numbers = torch.where(real.unsqueeze(2), numbers, 0)
    places = torch.where(real, order, pitch + torch.arange(size, device=rows.device) % ZERO_PLACES)

    at_once = WARPS // geometry.strips.shares
    missing = -strips.shape[1] % at_once
    numbers, places = F.pad(numbers, (0, 0) * 2 + (0, missing)), F.pad(places, (0, 0, 0, missing), value=pitch)

    def shares_of_round(i: int, tiles: int) -> tuple[Tensor, Tensor]:
        """The warps' shares of the strips in round i, (blocks, WARPS, tiles, 16, width), and their places."""
        strip, columns = slice(i * at_once, (i + 1) * at_once), slice(0, geometry.strips.shares * tiles * width)
        shares = (
            numbers[:, strip, :, columns].unflatten(3, (geometry.strips.shares, tiles, width)).permute(0, 1, 3, 4, 2, 5)
        )
        return shares.flatten(1, 2), places[:, strip, columns].reshape(blocks, WARPS, tiles * width)

    rounds = [shares_of_round(i, tiles) for i, tiles in enumerate(geometry.strips.tiles)]
    packed, all_places = torch.cat([w for w, _ in rounds], 2), torch.cat([p for _, p in rounds], 2)
    all_places = F.pad(all_places, (0, -all_places.shape[2] % 64), value=pitch)  # an even number for each lane
    number = 4 // geometry.dtype.itemsize
    packed = packed.reshape(blocks, WARPS, geometry.tiles, 2, 8, 2, 4, number)  # row half, row, column half, lane
    packed = packed.permute(0, 1, 2, 4, 6, 5, 3, 7).contiguous()
    return Packing(geometry, packed, _narrow(all_places))


def _pack_sparse(rows: Tensor, geometry: Geometry, properties: Any) -> Packing:
    """Each row's weights, distributed over as many consecutive threads as it needs."""
    blocks, banks, pitch, device = rows.shape[0], geometry.banks, geometry.slice, rows.device
    column = _column_of_place(geometry).to(device)
    rows = rows[..., column]
    kept = rows > 0
    counts = kept.sum(2)
    size = _weights_of_a_thread(counts)
    filled = fill_registers(geometry._replace(tiles=size // 2), properties.shared_memory_per_block_optin)
    geometry = _fitting(filled, "sparse", properties)
    threads = (counts + size - 1) // size
    starts = threads.cumsum(1) - threads

    # A row's weights are sorted in rounds over the banks and assigned to its threads round-robin, so that adjacent
    # threads read different banks; the rounds of the next row start at the bank that follows.
    block, row, place = kept.nonzero(as_tuple=True)
    line, first, share = block * kept.shape[1] + row, starts[block, row], threads[block, row]
    bank = (place - first) % banks
    index = _rank_within(line, _rank_within(line * banks + bank) * banks + bank)
    thread, position = block * THREADS + first + index % share, index // share

    slot = thread * size + position
    all_weights = rows.new_zeros(blocks * THREADS * size)
    all_weights[slot] = rows[kept]
    lane, slots = torch.arange(THREADS, device=device)[:, None], torch.arange(size, device=device)
    padding = pitch + (lane + slots - pitch) % banks  # places beyond the state, which hold zeros, in different banks
    all_places = padding.repeat(blocks, 1, 1).flatten()
    all_places[slot] = place
    by_entry = (blocks, THREADS, -1, 2)
    packed, places = (x.view(by_entry).permute(0, 2, 3, 1).contiguous() for x in (all_weights, all_places))
    spans = torch.where(threads > 0, starts + (starts + threads - 1 << 8), 1)  # an empty span is from 1 to 0
    return Packing(geometry, packed, _narrow(places), _narrow(spans))


def _column_of_place(geometry: Geometry) -> Tensor:
    """The hidden unit at each place of the state in shared memory."""
    word = 8 // geometry.dtype.itemsize
    return torch.arange(geometry.slice, device="cpu").view(-1, word).t().flatten()


def _weights_of_a_thread(counts: Tensor) -> int:
    """The smallest even number of weights per thread for which threads suffice; `counts`: of rows, (blocks, rows)."""
    low, high = 1, int(counts.max()) // 2 + 1  # pairs
    while low < high:
        middle = (low + high) // 2
        enough = int(((counts + 2 * middle - 1) // (2 * middle)).sum(1).max()) <= THREADS
        low, high = (low, middle) if enough else (middle + 1, high)
    return 2 * low


def _rank_within(group: Tensor, key: Tensor | None = None) -> Tensor:
    """The rank of each element within its group, in the order of the keys, or else of the elements."""
    order = group.argsort(stable=True)
    if key is not None:
        order = key.argsort(stable=True)
        order = order[group[order].argsort(stable=True)]
    grouped = group[order]
    index = torch.arange(len(group), device=group.device)
    begins = torch.ones_like(grouped, dtype=torch.bool)
    begins[1:] = grouped[1:] != grouped[:-1]
    first = torch.where(begins, index, 0).cummax(0).values
    rank = torch.empty_like(index)
    rank[order] = index - first
    return rank


def _narrow(numbers: Tensor) -> Tensor:
    """Unsigned 16-bit numbers, reinterpreted as int16."""
    return (numbers - ((numbers >> 15) << 16)).to(torch.int16).contiguous()
