"""Magnitude pruning of recurrent layers: which weights to keep, and what fraction at each step of a training."""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral

import torch
from torch import Tensor, nn

from ostinato.checks import check_flags, check_numbers
from ostinato.kernels.persistent.masks import BLOCKS, cut
from ostinato.masks import keep_pruned, mask_name, masked
from ostinato.recurrent.conversion import Module, convert, layers_of

GATE_NAMES = {"RNN_TANH": ("h",), "RNN_RELU": ("h",), "GRU": ("r", "z", "n"), "LSTM": ("i", "f", "g", "o")}

Density = float | Sequence[float] | Mapping[str, float]


def prune(
    module: Module,
    density: Density | None,
    *,
    block: tuple[int, int] = (1, 1),
    keep_diagonal: bool = False,
    input_weights: bool = False,
) -> Module:
    r"""Keep the largest recurrent weights of every RNN, GRU and LSTM in ``module``, and set the others to zero.

    Each gate's matrix is cut into blocks from its first row and column; those at its edges may be smaller.  The
    round(density * blocks) blocks of largest mean magnitude are kept, but at least one (for single weights, Han et
    al. 2015, arXiv 1506.02626; for blocks, Narang et al. 2017, arXiv 1711.02782).  A density of None keeps every block
    with a weight that is not zero, but at least one: a model that is sparse already stays the same function.

    A mask for each weight becomes a buffer of the layer.  From then on pruned weights count as zero and get no
    gradient, and every optimiser's step leaves them at zero.  Pruning again chooses anew among the weights as they
    are; what was pruned is zero by then.

    Layers of ``torch.nn`` become this library's, as by :func:`ostinato.convert`.  To bring one back, load its weights
    into a new ``torch.nn`` layer with ``strict=False``.

    Args:
        module: a layer, or a model that contains some.
        density: the fraction of the blocks to keep, above 0 and at most 1: one for all gates, or one for each, in the
            order of ``torch.nn`` or by name: r, z, n of a GRU, i, f, g, o of an LSTM, h of an RNN.  None prunes what is
            zero already.
        block: rows and columns of a block, which is kept or pruned as a whole: (1, 1), (16, 1) or (8, 4).
        keep_diagonal: also keep every unit's weight to itself, in addition to the density.  Blocks are then counted and
            compared without these weights.
        input_weights: prune the input weights too, to the same density, in the same blocks.

    Returns:
        ``module``, changed in place.

    Raises:
        TypeError: ``module`` is no module, a density is not a number, a flag is not a bool, or a layer is of a class
            derived from ``torch.nn``'s, which cannot be converted.
        ValueError: the module has no recurrent layer, or one that is on the meta device, sharded, or an LSTM with
            ``proj_size``; or a density, gate or block is not valid.

    Example:
        >>> import torch, ostinato
        >>> gru = ostinato.prune(torch.nn.GRU(64, 128), density=0.1, block=(16, 1))
        >>> gru.mask_hh_l0.float().mean(), (gru.weight_hh_l0 == 0).float().mean()
        (tensor(0.0996), tensor(0.9004))

        Weights that are sparse already, from elsewhere:

        >>> sparse = torch.nn.GRU(64, 128)
        >>> sparse.load_state_dict(gru.state_dict(), strict=False).missing_keys
        []
        >>> torch.equal(ostinato.prune(sparse, None, block=(16, 1)).mask_hh_l0, gru.mask_hh_l0)
        True
    """
    layers = layers_of(module)
    check_flags(keep_diagonal=keep_diagonal, input_weights=input_weights)
    if any(hasattr(part, "unshard") for part in module.modules()):  # FSDPModule, which takes half a second to import
        raise ValueError("module must be pruned before fully_shard; got one that is sharded")
    _check_block(block)
    densities = [_densities(layer, density) for layer in layers]
    for layer in layers:
        _check_layer(layer)
    convert(module)
    for layer, per_gate in zip(layers, densities, strict=True):
        for name in layer._flat_weights_names:
            if name.startswith("weight_hh") or (input_weights and name.startswith("weight_ih")):
                _prune_weight(layer, name, per_gate, block, keep_diagonal and name.startswith("weight_hh"))
    return module


def cubic_density(step: int, final: float, *, begin: int = 0, end: int, initial: float = 1.0) -> float:
    r"""The density at a step of a gradual pruning (Zhu and Gupta 2017, arXiv 1710.01878, equation 1).

    .. math:: d_t = d_{final} + (d_{initial} - d_{final}) \left(1 - \frac{t - begin}{end - begin}\right)^3

    It falls fast while many weights are redundant and slowly at the end; it is ``initial`` up to ``begin`` and
    ``final`` from ``end`` on.

    Args:
        step: of the training.
        final, initial: densities, above 0 and at most 1.
        begin, end: the steps between which it falls.

    Raises:
        TypeError: a step or density that is not a number.
        ValueError: ``end`` not after ``begin``, any of the steps not finite, or a density out of range.

    Example:
        >>> import ostinato
        >>> [round(ostinato.cubic_density(step, 0.1, end=100), 4) for step in (0, 50, 100)]
        [1.0, 0.2125, 0.1]

        In a training, after the optimiser's step, every hundred steps::

            if step % 100 == 0:
                ostinato.prune(model, cubic_density(step, final=0.1, begin=1000, end=8000), block=(16, 1))
    """
    _check_density("final", final)
    _check_density("initial", initial)
    check_numbers(step=step, begin=begin, end=end)
    for name, value in {"step": step, "begin": begin, "end": end}.items():
        if not abs(value) < math.inf:
            raise ValueError(f"{name} must be finite; got {value}")
        if abs(value) >= 1 << 63:  # differences and quotients could overflow
            raise ValueError(f"{name} must be below 2**63 in magnitude; got {value}")
    if not begin < end:
        raise ValueError(f"end must come after begin, {begin}; got {end}")
    left = (1 - min(max((step - begin) / (end - begin), 0.0), 1.0)) ** 3
    return left * initial + (1 - left) * final


def _densities(layer: nn.RNNBase, density: Density | None) -> Sequence[float | None]:
    """The density of each gate, in the order of ``torch.nn``."""
    gates = GATE_NAMES[layer.mode]
    if density is None:
        return [None] * len(gates)
    if isinstance(density, Mapping):
        if set(density) != set(gates):
            raise ValueError(f"density must name the gates {', '.join(gates)}; got {', '.join(map(str, density))}")
        values = [density[gate] for gate in gates]
    elif isinstance(density, Sequence) and not isinstance(density, str):
        if len(density) != len(gates):
            raise ValueError(f"density must be one number, or {len(gates)} for {', '.join(gates)}; got {len(density)}")
        values = list(density)
    else:
        values = [density] * len(gates)
    for value in values:
        _check_density("density", value)
    return values


def _check_density(name: str, value: float) -> None:
    check_numbers(**{name: value})
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be a number above 0 and at most 1; got {value!r}")


def _check_block(block: object) -> None:
    # Floats and bools can be equal to these integers, and arrays compare element by element.
    whole = isinstance(block, tuple) and all(isinstance(n, Integral) and not isinstance(n, bool) for n in block)
    if not whole or block not in BLOCKS:
        raise ValueError(f"block must be one of {', '.join(map(str, BLOCKS))}; got {block!r}")


def _check_layer(layer: nn.RNNBase) -> None:
    if layer.proj_size:
        raise ValueError(
            f"proj_size must be 0, projections of the hidden state cannot be pruned; got {layer.proj_size}"
        )
    if layer.weight_hh_l0.is_meta:
        raise ValueError("module must have weights with values, to keep the largest; got a layer on the meta device")


@torch.inference_mode(False)  # masks made in inference mode could not be trained with
@torch.no_grad()
def _prune_weight(
    layer: nn.RNNBase, name: str, densities: Sequence[float | None], block: tuple[int, int], keep_diagonal: bool
) -> None:
    gates = masked(layer, name).unflatten(0, (len(densities), -1))
    free = torch.zeros_like(gates, dtype=torch.bool)
    if keep_diagonal:
        free.diagonal(dim1=1, dim2=2).fill_(True)
    mask = (_chosen(gates, free, densities, block) | free).flatten(0, 1)
    layer.register_buffer(mask_name(name), mask)
    parameter = getattr(layer, name)
    with torch.inference_mode(parameter.is_inference()), torch.no_grad():
        parameter.masked_fill_(~mask, 0.0)
    keep_pruned(layer, name)


def _chosen(weight: Tensor, free: Tensor, densities: Sequence[float | None], block: tuple[int, int]) -> Tensor:
    """The mask of the blocks to keep, shaped as ``weight``, (gates, R, C); ties go to the earlier block.

    Weights marked ``free`` are kept in any case.  They do not count in a block's mean, and a block of nothing else does
    not count as a block.
    """
    sizes = cut((~free).float(), block).sum(3)
    magnitudes = weight.abs().to(torch.promote_types(weight.dtype, torch.float32)).masked_fill(free, 0.0)
    sums = cut(magnitudes, block).sum(3)
    scores = torch.where(sizes > 0, sums / sizes, -1.0).flatten(1)
    kept = sums.flatten(1) != 0
    for gate, density in enumerate(densities):
        count = 1
        if density is not None:
            kept[gate] = False
            count = max(1, round(density * int((sizes[gate] > 0).sum())))
        kept[gate, scores[gate].sort(descending=True, stable=True).indices[:count]] = True
    whole = kept.view(sums.shape).repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return whole[:, : weight.shape[1], : weight.shape[2]]
