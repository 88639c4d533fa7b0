"""The products before and after the loops of small layers, in one launch each.

Launched one after the other, they take the host longer than a GPU.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.kernels.persistent.arguments import DIFFERENTIABLE, NEEDED_BITS, Arguments
from ostinato.kernels.persistent.cuda.passes import previous
from ostinato.kernels.products import NOTHING, Factor, Product, Products

# Rows, numbers in a matrix and multiply-adds of a product, up to which one launch takes an H200 about as long as the
# kernels of cuBLAS, five or more for the gradients.
MOST_ROWS, MOST_WEIGHTS, MOST_ADDED = 1024, 2**19, 2**26
_PRODUCTS = "x", "weight_ih", "weight_hh", "bias_ih", "bias_hh"  # whose gradients are products, or sums
_BITS = dict(zip(DIFFERENTIABLE, NEEDED_BITS, strict=True))


def is_small(rows: int, width: int, channels: int, training: bool) -> bool:
    """Whether products of so many rows with matrices of (width, channels) are computed here.

    In CUDA graphs, too, where the host's time does not count: results are the same bits there.
    """
    weights = width * channels
    within = rows <= MOST_ROWS and weights <= MOST_WEIGHTS
    return within and rows * weights <= (MOST_ADDED if training else MOST_ADDED // 4)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, rounds: bool, out: Tensor | None = None) -> Tensor:
    """``F.linear`` of (rows, channels), written to `out` if given."""
    x, weight, bias = x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()
    sizes = *x.shape, weight.shape[0]
    if out is None:
        out = x.new_empty(sizes[0], sizes[2])
    _linear(*sizes, bias is not None, x.dtype, rounds, x.get_device())(x, weight, bias, out)
    return out


@functools.lru_cache(4096)
def _linear(
    rows: int, channels: int, width: int, biased: bool, dtype: torch.dtype, rounds: bool, device: int
) -> Products:
    x, weight, bias, out = range(4)
    pair = Factor(x, channels, 1), Factor(weight, channels, 1), channels
    return Products([Product([pair], rows, width, out, bias=bias if biased else None)], dtype, rounds, device)


def gradients(
    given: Arguments, h: Tensor, found: Sequence[Tensor], needed: int, rounds: bool
) -> tuple[Tensor | None, ...]:
    """Those of the DIFFERENTIABLE inputs, None unless its bit is set in `needed`; ``found`` by the backward's loop."""
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
    if made:
        rows, hidden = h.shape
        sizes = rows, given.batch, len(totals), hidden, x.shape[1]
        how = shifted, given.reverse, h0 is not None, (*made,)
        run = _prepared(given.cell, *sizes, *how, h.dtype, rounds, h.get_device())
        run(of_gates, totals, x, weight, h, h0, *map(made.get, _PRODUCTS))
    made |= {"h0": of_h0, "c0": of_c0}
    return tuple(made[name] if needed & bit else None for name, bit in _BITS.items())


@functools.lru_cache(4096)
def _prepared(*sizes_and_how: Any) -> Products:
    *described, dtype, rounds, device = sizes_and_how
    return Products(products_of_gradients(*described), dtype, rounds, device)


def products_of_gradients(
    cell: str,
    rows: int,
    batch: int,
    parts: int,
    hidden: int,
    channels: int,
    shifted: bool,
    reverse: bool,
    starts: bool,
    made: Sequence[str],
) -> list[Product]:
    """Those of the gradients `made`, of tensors in the order of :func:`gradients`.

    Args:
        cell, rows, batch, hidden, channels, reverse: the layer's; `rows` and `channels` are its input's.
        parts: the rows of the totals.
        shifted: whether h are the states after each step, not those before.
        starts: whether there is an h0.
        made: of x, weight_ih, weight_hh, bias_ih and bias_hh.
    """
    of_gates, totals, x, weight, h, h0, *results = range(6 + len(_PRODUCTS))
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
