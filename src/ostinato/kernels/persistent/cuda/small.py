"""The matrix products before and after the loops of small layers, or of both directions of one, in one launch each.

Launched one after the other, they take the host longer than the GPU.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.matmul.grouped import CLUSTER, NOTHING, Factor, Product, Products, cluster_of
from ostinato.kernels.persistent.arguments import DIFFERENTIABLE, NEEDED_BITS, Arguments
from ostinato.kernels.persistent.cuda.states_before import previous
from ostinato.kernels.persistent.interface import LoopGradients

# The most rows, by the number of blocks that can share a sum over them, numbers in a matrix, and multiply-adds of a
# product, by the bytes of a number, for which one launch takes an H200 no longer than cuBLAS's kernels, of which there
# are five or more for the gradients.
MOST_ROWS, MOST_WEIGHTS, MOST_ADDED = {1: 2**10, CLUSTER: 3 * 2**13}, 2**19, {2: 2**25, 4: 2**26}
# Factors of the most rows and multiply-adds outside of CUDA graphs: there the GPU takes up to 80 microseconds longer,
# but the host, which launches a fifth of the kernels, 250 less.
ROWS_LAUNCHED, ADDED_LAUNCHED = 4, 8
_PRODUCTS = "x", "weight_ih", "weight_hh", "bias_ih", "bias_hh"  # inputs whose gradients are products, or sums
_TENSORS = 6 + len(_PRODUCTS)  # the number of tensors of a direction
_BITS = dict(zip(DIFFERENTIABLE, NEEDED_BITS, strict=True))


def is_small(
    device: int, dtype: torch.dtype, rows: int, width: int, channels: int, training: bool, captured: bool
) -> bool:
    """Whether the products of so many rows with (width, channels) matrices are faster here."""
    weights, most_rows, most = width * channels, MOST_ROWS[cluster_of(device)], MOST_ADDED[dtype.itemsize]
    if not captured:
        most_rows, most = ROWS_LAUNCHED * most_rows, ADDED_LAUNCHED * most
    return rows <= most_rows and weights <= MOST_WEIGHTS and rows * weights <= (most if training else most // 4)


def linear(tf32: bool, *products: tuple[Tensor, Tensor, Tensor | None, Tensor | None]) -> list[Tensor]:
    """``F.linear`` of the input, weight and bias of each of `products`, written to its fourth tensor, if given.

    All products have the same shapes.
    """
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
    """The sizes and options that the products of the gradients of one direction of a layer depend on."""

    rows: int  # of the input
    channels: int
    hidden: int
    batch: int
    parts: int  # rows of the totals
    shifted: bool  # whether h has the states after each step rather than before
    reverse: bool
    has_h0: bool
    computed: tuple[str, ...]  # the inputs among _PRODUCTS whose gradients are computed


def gradients(tf32: bool, *directions: tuple[Arguments, Tensor, LoopGradients, int]) -> list[tuple[Tensor | None, ...]]:
    """The gradients of the DIFFERENTIABLE inputs of one direction of a layer, or of both; None if not needed.

    Each direction has its arguments, h, what the kernels' backward returned, and the bits of the needed gradients.
    """
    each = [_sizes_and_tensors(*direction) for direction in directions]
    sizes = tuple([of_direction for of_direction, _, _ in each])
    if any(of_direction.computed for of_direction in sizes):
        arguments, h, *_ = directions[0]
        run = _prepared(arguments.cell, sizes, h.dtype, tf32, h.get_device())
        run(*[x for _, tensors, _ in each for x in tensors])
    return [gradients for *_, gradients in each]


def _sizes_and_tensors(
    arguments: Arguments, h: Tensor, loop_grads: LoopGradients, needed: int
) -> tuple[Sizes, list[Tensor | None], tuple[Tensor | None, ...]]:
    """What a direction's products depend on, the tensors that they read and write, and the gradients of all inputs.

    Those that the products compute are among the tensors.
    """
    grad_gates, grad_h0, grad_c0, totals = loop_grads
    x, weight, h0 = arguments.x.contiguous(), arguments.weight_ih.contiguous(), arguments.h0
    # Without packing and resets, the states before all steps but the first are rows of h.
    shifted = arguments.offsets is None and arguments.resets is None
    if not shifted:
        h, h0 = previous(h, h0, arguments.sequences), None
    elif h0 is not None:
        h0 = h0.contiguous()
    grads: dict[str, Tensor | None] = {
        name: h.new_empty(getattr(arguments, name).shape) for name in _PRODUCTS if needed & _BITS[name]
    }
    (rows, hidden), parts, channels = h.shape, totals.shape[0], x.shape[1]
    options = shifted, arguments.reverse, h0 is not None, (*grads,)
    sizes = Sizes(rows, channels, hidden, arguments.batch, parts, *options)
    tensors = [grad_gates, totals, x, weight, h, h0, *map(grads.get, _PRODUCTS)]
    grads |= {"h0": grad_h0, "c0": grad_c0}
    return sizes, tensors, tuple([grads[name] if needed & bit else None for name, bit in _BITS.items()])


@functools.lru_cache(4096)
def _prepared(cell: str, directions: tuple[Sizes, ...], dtype: torch.dtype, tf32: bool, device: int) -> Products:
    each = [products_of_gradients(cell, index, sizes) for index, sizes in enumerate(directions)]
    return Products(each, dtype, tf32, device)


def products_of_gradients(cell: str, index: int, sizes: Sizes) -> list[Product]:
    """The products of one direction's gradients, of tensors in the order of :func:`_sizes_and_tensors`.

    `index` is 0, or 1 for the second direction, whose tensors come after all of the first.
    """
    rows, channels, hidden, batch, parts, shifted, reverse, has_h0, computed = sizes
    grad_gates, totals, x, weight, h, h0, *results = range(index * _TENSORS, (index + 1) * _TENSORS)
    out = dict(zip(_PRODUCTS, results, strict=True))
    gru = cell == "gru"
    width = hidden * (1 if cell.startswith("rnn") else 4)
    skipped = hidden if gru else 0  # a GRU's first gate is that of the recurrent product alone, its last of the input's
    input_width = width - skipped
    # The columns of the recurrent product's gates, the rows of their weights, and their number: a GRU's n comes last.
    recurrent = [(hidden, 0, 2 * hidden), (0, 2 * hidden, hidden)] if gru else [(0, 0, width)]

    def gates(column: int, row: int = 0) -> Factor:
        """The transposed gradients of the gates, from a column and row on."""
        return Factor(grad_gates, 1, width, row * width + column)

    def with_states(column: int) -> list[tuple[Factor, Factor, int]]:
        """The gates from a column on, paired with the states before their steps."""
        if not shifted:
            return [(gates(column), Factor(h, 1, hidden), rows)]
        first, others, earlier = (rows - batch, 0, batch) if reverse else (0, batch, 0)
        later = gates(column, others), Factor(h, 1, hidden, earlier * hidden), rows - batch
        return [later, (gates(column, first), Factor(h0, 1, hidden), batch)] if has_h0 else [later]

    def sum_of(column: int) -> list[tuple[Factor, Factor, int]]:
        """The sum of the rows of the totals, from a column on."""
        return [(NOTHING, Factor(totals, 1, width, column), parts)]

    by_input = Factor(grad_gates, width, 1, skipped), Factor(weight, 1, channels), input_width
    by_x = gates(skipped), Factor(x, 1, channels), rows
    products = {
        "x": [Product([by_input], rows, channels, out["x"])],
        "weight_ih": [Product([by_x], input_width, channels, out["weight_ih"])],
        "weight_hh": [
            Product(with_states(at), size, hidden, out["weight_hh"], to * hidden) for at, to, size in recurrent
        ],
        "bias_ih": [Product(sum_of(skipped), 1, input_width, out["bias_ih"])],
        "bias_hh": [Product(sum_of(at), 1, size, out["bias_hh"], to) for at, to, size in recurrent],
    }
    return [product for name in computed for product in products[name]]
