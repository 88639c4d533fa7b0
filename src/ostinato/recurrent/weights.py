"""The parameters of RNN, GRU and LSTM, as they are at a call, with their masks."""

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

    Every call reads the current parameters: ``torch.nn``'s own list of them can be stale.
    """

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    _forced_path: KernelPath | None = None  # the only kernel to consider for a sequence; None for the fastest

    def extra_repr(self) -> str:
        """``torch.nn``'s, and what share of the pruned matrices is kept."""
        shown = super().extra_repr()
        if any(mask.is_meta for mask in self.buffers()):
            return shown
        kept, weights = kept_weights(self)
        return f"{shown}, pruned to {kept / weights:.0%}" if weights else shown

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Register the mask buffers of a pruned layer, which a new one lacks."""
        for name in self._flat_weights_names:
            if "weight" in name and prefix + mask_name(name) in state_dict and mask_of(self, name) is None:
                self.register_buffer(mask_name(name), torch.ones_like(getattr(self, name), dtype=torch.bool))
        super()._load_from_state_dict(state_dict, prefix, *args)
        _keep_pruned_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _keep_pruned_of(self)

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        """``torch.nn``'s, which may be told to swap parameters, and cannot while there are weak references to them."""
        for name in self._flat_weights_names:
            if mask_of(self, name) is not None:
                forget_pruned(self, name)
        try:
            return super()._apply(fn, recurse)
        finally:
            _keep_pruned_of(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """``torch.nn``'s, which puts a parameter into its list, but leaves the reference to the one before."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter):
            names, references = (self.__dict__.get(own, []) for own in ("_flat_weights_names", "_flat_weight_refs"))
            if name in names and len(references) == len(names):
                references[names.index(name)] = weakref.ref(value)


def _keep_pruned_of(layer: MaskedLayers) -> None:
    """Have optimisers keep pruned weights at zero whose parameters are new: compiled calls do not see to it."""
    for name in layer._flat_weights_names:
        if mask_of(layer, name) is not None:
            keep_pruned(layer, name)


def unmasked_weights(layer: MaskedLayers) -> list[Tensor]:
    """All parameters in torch.nn's order, or the list that was put into their place."""
    own: Any = layer._parameters  # faster than getattr, which also finds parametrized ones
    weights = [x if (x := own.get(name)) is not None else _other(layer, name) for name in layer._flat_weights_names]
    if all(map(operator.is_, weights, layer._flat_weights or ())):
        return weights
    return _listed(layer, weights)


def _other(layer: MaskedLayers, name: str) -> Tensor:
    try:
        found: Any = getattr(layer, name)
    except AttributeError:  # deleted: what was listed in its place counts, but not the parameter itself
        index = layer._flat_weights_names.index(name)
        listed, references = layer._flat_weights or [], layer._flat_weight_refs
        if index >= min(len(listed), len(references)):
            raise
        found, reference = listed[index], references[index]
        if reference is None or reference() is found:
            raise
    check_tensor(name, found)
    return found


def _listed(layer: MaskedLayers, weights: list[Tensor]) -> list[Tensor]:
    """The tensors in ``_flat_weights``, where a subclass or a caller has put others there; else `weights`.

    They count, as in ``torch.nn``, while the parameters are those of which the module made its own list.  Otherwise
    it is that list, and old: parameters were replaced without it, or are computed at each read.  A subclass that
    computes the list, not the parameters, does so anew.
    """
    if not _is_list_of(layer, weights):
        if not computes_list(layer):
            return weights
        layer._init_flat_weights()
    listed: list[Any] = layer._flat_weights
    return list(listed)


def _is_list_of(layer: MaskedLayers, weights: list[Tensor]) -> bool:
    """Whether the module made its list of these, which it holds unless others were put into their place."""
    listed: list[Any] = layer._flat_weights
    references = layer._flat_weight_refs
    if not len(weights) == len(listed) == len(references) or not all(isinstance(x, Tensor) for x in listed):
        return False
    for weight, other, reference in zip(weights, listed, references, strict=True):
        if weight is not other and (reference is None or reference() is not weight):
            return False
    return True


def computes_list(layer: MaskedLayers) -> bool:
    """Whether a subclass makes the list of other tensors than the parameters, as adapters of low rank are added."""
    return type(layer)._init_flat_weights is not nn.RNNBase._init_flat_weights


def check_shapes(layer: MaskedLayers, weights: list[Tensor]) -> None:
    """Raise ValueError for a parameter of another shape, or one too many or too few, than the attributes say."""
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
    """All parameters in torch.nn's order, with zeros where pruned.

    Unless ``recurrent``, pruned recurrent weights are returned as they are, for kernels that read only the others.

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
    others = (rows, output), *([(rows,)] * 2 if bias else ()), *([(proj_size, hidden_size)] if proj_size else ())
    return [shape for width in widths for shape in ((rows, width), *others)]
