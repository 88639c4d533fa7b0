"""The products before and after the loops of small layers, or of both directions of one, in one launch each.

Launched one after the other, they take the host longer than a GPU.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.matmul.grouped import CLUSTER, NOTHING, Factor, Product, Products, cluster_of
from ostinato.kernels.persistent.arguments import DIFFERENTIABLE, NEEDED_BITS, Arguments
from ostinato.kernels.persistent.cuda.states_before import previous
from ostinato.kernels.persistent.interface import LoopGradients

# Rows, by the blocks that can share a sum over them, numbers in a matrix, and multiply-adds of a product, by the bytes
# of a number, up to which one launch takes an H200 no longer than cuBLAS's kernels, five or more for the gradients.
MOST_ROWS, MOST_WEIGHTS, MOST_ADDED = {1: 2**10, CLUSTER: 3 * 2**13}, 2**19, {2: 2**25, 4: 2**26}
# Times as many rows and multiply-adds outside of CUDA graphs: the GPU takes up to 80 microseconds longer, and the host,
# which launches a fifth of the kernels, 250 less.
ROWS_LAUNCHED, ADDED_LAUNCHED = 4, 8
_PRODUCTS = "x", "weight_ih", "weight_hh", "bias_ih", "bias_hh"  # whose gradients are products, or sums
_TENSORS = 6 + len(_PRODUCTS)  # of a direction
_BITS = dict(zip(DIFFERENTIABLE, NEEDED_BITS, strict=True))


def is_small(
    device: int, dtype: torch.dtype, rows: int, width: int, channels: int, training: bool, captured: bool
) -> bool:
    """Whether products of so many rows with matrices of (width, channels) are computed here."""
    weights, most_rows, most = width * channels, MOST_ROWS[cluster_of(device)], MOST_ADDED[dtype.itemsize]
    if not captured:
        most_rows, most = ROWS_LAUNCHED * most_rows, ADDED_LAUNCHED * most
    return rows <= most_rows and weights <= MOST_WEIGHTS and rows * weights <= (most if training else most // 4)


def linear(tf32: bool, *products: tuple[Tensor, Tensor, Tensor | None, Tensor | None]) -> list[Tensor]:
    """``F.linear`` of each input, weight and bias of the same shapes, written to its fourth tensor, if given."""
    x, weight, bias, _ = products[0]
    (rows, channels), width = x.shape, weight.shape[0]
    run = _linear(len(products), rows, channels, width, bias is not None, x.dtype, tf32, x.get_device())
    tensors: list[Any] = []
    for x, weight, bias, out in products:
        bias = None if bias is None else bias.contiguous()
        tensors += x.contiguous(), weight.contiguous(), bias, x.new_empty(rows, width) if out is None else out
    run(*tensors)
    return tensors[3::4]


@functools.lru_cache(4096)
def _linear(
    count: int, rows: int, channels: int, width: int, biased: bool, dtype: torch.dtype, tf32: bool, device: int
) -> Products:
    each = []
    for x, weight, bias, out in (range(first, first + 4) for first in range(0, 4 * count, 4)):
        pair = Factor(x, channels, 1), Factor(weight, channels, 1), channels
        each.append([Product([pair], rows, width, out, bias=bias if biased else None)])
    return Products(each, dtype, tf32, device)


class Sizes(NamedTuple):
    """What the products of the gradients of one direction of a layer depend on."""

    rows: int  # of the input
    channels: int
    hidden: int
    batch: int
    parts: int  # rows of the totals
    shifted: bool  # whether h are the states after each step, not those before
    reverse: bool
    starts: bool  # whether there is an h0
    made: tuple[str, ...]  # the gradients, of _PRODUCTS


def gradients(tf32: bool, *directions: tuple[Arguments, Tensor, LoopGradients, int]) -> list[tuple[Tensor | None, ...]]:
    """Those of the DIFFERENTIABLE inputs of one direction of a layer, or of both.

    Each is given its arguments, h, what the backward's loop has found, and whose gradients are needed, by bits; others
    are None.
    """
    each = [_of_direction(*direction) for direction in directions]
    how = tuple([own for own, _, _ in each])
    if any(own.made for own in how):
        given, h, *_ = directions[0]
        run = _prepared(given.cell, how, h.dtype, tf32, h.get_device())
        run(*[x for _, tensors, _ in each for x in tensors])
    return [gradients for *_, gradients in each]


def _of_direction(
    given: Arguments, h: Tensor, found: LoopGradients, needed: int
) -> tuple[Sizes, list[Tensor | None], tuple[Tensor | None, ...]]:
    """What :func:`products_of_gradients` is asked for, its tensors, and the gradients, which they will be among."""
    of_gates, of_h0, of_c0, totals = found
    x, weight, h0 = given.x.contiguous(), given.weight_ih.contiguous(), given.h0
    shifted = given.offsets is None and given.resets is None  # the states before all steps but the first are rows of h
    if not shifted:
        h, h0 = previous(h, h0, given.sequences), None
    elif h0 is not None:
        h0 = h0.contiguous()
    made: dict[str, Tensor | None] = {
        name: h.new_empty(getattr(given, name).shape) for name in _PRODUCTS if needed & _BITS[name]
    }
    (rows, hidden), parts, channels = h.shape, totals.shape[0], x.shape[1]
    how = Sizes(rows, channels, hidden, given.batch, parts, shifted, given.reverse, h0 is not None, (*made,))
    tensors = [of_gates, totals, x, weight, h, h0, *map(made.get, _PRODUCTS)]
    made |= {"h0": of_h0, "c0": of_c0}
    return how, tensors, tuple([made[name] if needed & bit else None for name, bit in _BITS.items()])


@functools.lru_cache(4096)
def _prepared(cell: str, directions: tuple[Sizes, ...], dtype: torch.dtype, tf32: bool, device: int) -> Products:
    each = [products_of_gradients(cell, number, own) for number, own in enumerate(directions)]
    return Products(each, dtype, tf32, device)


def products_of_gradients(cell: str, number: int, sizes: Sizes) -> list[Product]:
    """Those of a direction, of tensors in the order of :func:`_of_direction`.

    `number` is 0, or 1 of the second direction, whose tensors come after all of the first.
    """
    rows, channels, hidden, batch, parts, shifted, reverse, starts, made = sizes
    of_gates, totals, x, weight, h, h0, *results = range(number * _TENSORS, (number + 1) * _TENSORS)
    out = dict(zip(_PRODUCTS, results, strict=True))
    gru = cell == "gru"
    width = hidden * (1 if cell.startswith("rnn") else 4)
    skipped = hidden if gru else 0  # the gates of the recurrent product alone come first, of the input's alone last
    of_input = width - skipped
    # Where the gates of the recurrent product are, and where its weights: a GRU's n comes last there.
    recurrent = [(hidden, 0, 2 * hidden), (0, 2 * hidden, hidden)] if gru else [(0, 0, width)]

    def gates(column: int, row: int = 0) -> Factor:
        """Their transpose, from a column and row on."""
        return Factor(of_gates, 1, width, row * width + column)

    def with_states(column: int) -> list[tuple[Factor, Factor, int]]:
        """The gates from a column on, with the states before them."""
        if not shifted:
            return [(gates(column), Factor(h, 1, hidden), rows)]
        first, others, earlier = (rows - batch, 0, batch) if reverse else (0, batch, 0)
        later = gates(column, others), Factor(h, 1, hidden, earlier * hidden), rows - batch
        return [later, (gates(column, first), Factor(h0, 1, hidden), batch)] if starts else [later]

    def sum_of(column: int) -> list[tuple[Factor, Factor, int]]:
        return [(NOTHING, Factor(totals, 1, width, column), parts)]

    by_input = Factor(of_gates, width, 1, skipped), Factor(weight, 1, channels), of_input
    products = {
        "x": [Product([by_input], rows, channels, out["x"])],
        "weight_ih": [Product([(gates(skipped), Factor(x, 1, channels), rows)], of_input, channels, out["weight_ih"])],
        "weight_hh": [
            Product(with_states(at), size, hidden, out["weight_hh"], to * hidden) for at, to, size in recurrent
        ],
        "bias_ih": [Product(sum_of(skipped), 1, of_input, out["bias_ih"])],
        "bias_hh": [Product(sum_of(at), 1, size, out["bias_hh"], to) for at, to, size in recurrent],
    }
    return [product for name in made for product in products[name]]
