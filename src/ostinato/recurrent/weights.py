"""The parameters of RNN, GRU and LSTM at the time of a call, with their masks."""

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ostinato.checks import check_tensor
from ostinato.cuda_graphs.kept import FreesGraphs
from ostinato.kernels.operators.export import constant_to_compilers
from ostinato.kernels.persistent.plan import GATES, KernelPath
from ostinato.masks import forget_pruned, keep_pruned, kept_weights, mask_name, mask_of, masked
from ostinato.recurrent.torch_layers import TorchLayers


class MaskedLayers(FreesGraphs, TorchLayers):
    """Adds masks to ``torch.nn``'s layers.

    Every call reads the current parameters, as ``torch.nn``'s own list of them can be stale.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    _forced_path: KernelPath | None = None  # the only kernel to consider for a sequence; None for the fastest

    def extra_repr(self) -> str:
        """``torch.nn``'s, and the fraction of the pruned matrices' weights that is kept."""
        text = super().extra_repr()
        if any(mask.is_meta for mask in self.buffers()):
            return text
        kept, weights = kept_weights(self)
        return f"{text}, pruned to {kept / weights:.0%}" if weights else text

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load, after registering the mask buffers of a pruned layer, which a new layer lacks."""
        for name in self._flat_weights_names:
            if "weight" in name and prefix + mask_name(name) in state_dict and mask_of(self, name) is None:
                self.register_buffer(mask_name(name), torch.ones_like(getattr(self, name), dtype=torch.bool))
        super()._load_from_state_dict(state_dict, prefix, *args)
        _keep_pruned_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _keep_pruned_of(self)

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        """``torch.nn``'s; meanwhile weak references to parameters, which keep it from swapping these, are dropped."""
        for name in self._flat_weights_names:
            if mask_of(self, name) is not None:
                forget_pruned(self, name)
        try:
            return super()._apply(fn, recurse)
        finally:
            _keep_pruned_of(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """``torch.nn``'s, which updates its list of parameters, but not its weak references to these."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter):
            names, references = (self.__dict__.get(key, []) for key in ("_flat_weights_names", "_flat_weight_refs"))
            if name in names and len(references) == len(names):
                references[names.index(name)] = weakref.ref(value)


def _keep_pruned_of(layer: MaskedLayers) -> None:
    """Have optimisers keep the pruned weights of new parameters at zero, which compiled calls do not ensure."""
    for name in layer._flat_weights_names:
        if mask_of(layer, name) is not None:
            keep_pruned(layer, name)


def unmasked_weights(layer: MaskedLayers) -> list[Tensor]:
    """All parameters in torch.nn's order, or the tensors that were listed in their place."""
    named: Any = layer._parameters  # faster than getattr, which also finds parametrized ones
    names = layer._flat_weights_names
    weights = [x if (x := named.get(name)) is not None else _not_a_parameter(layer, name) for name in names]
    if all(map(operator.is_, weights, layer._flat_weights or ())):
        return weights
    return _listed(layer, weights)


def _not_a_parameter(layer: MaskedLayers, name: str) -> Tensor:
    """A weight that is another attribute, or if there is none, the tensor that was listed in its place."""
    try:
        weight: Any = getattr(layer, name)
    except AttributeError:  # deleted: a tensor listed in its place counts, but not the deleted parameter itself
        index = layer._flat_weights_names.index(name)
        listed, references = layer._flat_weights or [], layer._flat_weight_refs
        if index >= min(len(listed), len(references)):
            raise
        weight, reference = listed[index], references[index]
        if reference is None or reference() is weight:
            raise
    check_tensor(name, weight)
    return weight


def _listed(layer: MaskedLayers, weights: list[Tensor]) -> list[Tensor]:
    """The tensors in ``_flat_weights`` where a subclass or a caller has put others there, else `weights`.

    As in ``torch.nn``, they count as long as the parameters are those from which the module made the list.  Otherwise
    the list is stale: parameters were replaced without it, or are computed at each access.  A subclass that computes
    the list, not the parameters, then computes it again.
    """
    if not _listed_from(layer, weights):
        if not computes_list(layer):
            return weights
        layer._init_flat_weights()
    listed: list[Any] = layer._flat_weights
    return list(listed)


def _listed_from(layer: MaskedLayers, weights: list[Tensor]) -> bool:
    """Whether the module made its list from these weights, even if some have been replaced there since."""
    listed: list[Any] = layer._flat_weights
    references = layer._flat_weight_refs
    if not len(weights) == len(listed) == len(references) or not all(isinstance(x, Tensor) for x in listed):
        return False
    for weight, other, reference in zip(weights, listed, references, strict=True):
        if weight is not other and (reference is None or reference() is not weight):
            return False
    return True


def computes_list(layer: MaskedLayers) -> bool:
    """Whether a subclass lists other tensors than the parameters, such as their sums with low-rank adapters."""
    return type(layer)._init_flat_weights is not nn.RNNBase._init_flat_weights


def check_shapes(layer: MaskedLayers, weights: list[Tensor]) -> None:
    """Raise ValueError unless the parameters' number and shapes are those that the attributes imply."""
    directions = 2 if layer.bidirectional else 1
    sizes = layer.input_size, layer.hidden_size, layer.proj_size, layer.num_layers, directions, layer.bias
    shapes = _shapes_of(layer.mode, *sizes)
    # PyTorch 2.11's compiler compares shapes by == alone, and lists of them not at all.
    if not torch.compiler.is_compiling() and [weight.shape for weight in weights] == shapes:
        return
    if len(weights) != len(shapes):
        raise ValueError(
            f"num_layers, bias, bidirectional and proj_size must be those that {type(layer).__name__} was made with, "
            f"of {len(weights)} parameters; got {layer.num_layers}, {layer.bias}, {layer.bidirectional} and "
            f"{layer.proj_size}, of {len(shapes)}"
        )
    for name, weight, shape in zip(layer._flat_weights_names, weights, shapes, strict=True):
        if not weight.shape == shape:
            raise ValueError(f"{name} must have shape {shape}; got {tuple(weight.shape)}")


def weights_of(layer: MaskedLayers, recurrent: bool = True) -> list[Tensor]:
    """All parameters in torch.nn's order, with zeros where they are pruned.

    Unless ``recurrent``, recurrent weights are returned unmasked, for kernels that read only those that are kept.

    Raises ValueError for a parameter of another shape.
    """
    weights = unmasked_weights(layer)
    check_shapes(layer, weights)
    if layer._buffers:
        for i, name in enumerate(layer._flat_weights_names):
            if mask_name(name) in layer._buffers and (recurrent or "_hh_" not in name):
                weights[i] = masked(layer, name, weights[i])
    return weights


@constant_to_compilers
def _shapes_of(*sizes: Any) -> list[tuple[int, ...]]:
    return _computed_shapes(*sizes)


@functools.lru_cache(4096)
def _computed_shapes(
    mode: str, input_size: int, hidden_size: int, proj_size: int, layers: int, directions: int, bias: bool
) -> list[tuple[int, ...]]:
    rows, output = GATES[mode.lower()] * hidden_size, proj_size or hidden_size
    widths = [input_size] * directions + [directions * output] * (directions * (layers - 1))
    rest = (rows, output), *([(rows,)] * 2 if bias else ()), *([(proj_size, hidden_size)] if proj_size else ())
    return [shape for width in widths for shape in ((rows, width), *rest)]
