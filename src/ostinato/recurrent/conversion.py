"""Converts the RNN, GRU and LSTM layers of a model from ``torch.nn`` to this library, in place."""

from typing import TypeVar

import torch
from torch import nn

from ostinato.recurrent.layers import GRU, LSTM, RNN

Module = TypeVar("Module", bound=nn.Module)
COUNTERPARTS: dict[type, type] = {nn.RNN: RNN, nn.GRU: GRU, nn.LSTM: LSTM}


def convert(module: Module) -> Module:
    """Have every ``torch.nn.RNN``, ``GRU`` and ``LSTM`` of a model run, and train, in this library's kernels.

    Only their class changes.  They stay the same objects with the same parameters, so optimisers, checkpoints and all
    other references to them stay valid, and they compute the same function.  To convert one back, load its weights into
    a new layer of ``torch.nn``.

    Convert a model before ``torch.compile``, ``fully_shard`` or a parametrization, which change classes themselves.

    A layer of your own class, derived from ``torch.nn``'s, is converted by a class that derives from both: after
    ``class Converted(Yours, ostinato.LSTM): pass`` and ``layer.__class__ = Converted`` it keeps its own methods, and
    the ``super().forward`` that they call is this library's.

    Args:
        module: a layer, or a model that contains some.  Layers that are this library's already stay as they are, as do
            cells such as ``torch.nn.GRUCell``.

    Returns:
        ``module``, changed in place.

    Raises:
        TypeError: ``module`` is no module, or has a layer of a class derived from ``torch.nn``'s alone, see above.
        ValueError: it has no recurrent layer.

    Example:
        >>> import torch, ostinato
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GRU(8, 16))
        >>> x = torch.randn(100, 2, 3)
        >>> expected = model(x)[0]
        >>> torch.allclose(ostinato.convert(model)(x)[0], expected, atol=1e-6)
        True
        >>> type(model[1]) is ostinato.GRU
        True
    """
    for layer in layers_of(module):
        layer.__class__ = COUNTERPARTS.get(type(layer), type(layer))
    return module


def layers_of(module: nn.Module) -> list[nn.RNNBase]:
    """The recurrent layers of a model; raises ValueError if there are none, TypeError if one cannot be converted."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module; got {type(module).__name__}")
    layers = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    if not layers:
        is_script = any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())
        scripted = ", or with scripted ones, which cannot change: script the model afterwards" if is_script else ""
        kind = type(module).__name__
        raise ValueError(f"module must be or contain an RNN, GRU or LSTM; got {kind} without one{scripted}")
    for layer in layers:
        if type(layer) not in COUNTERPARTS and not isinstance(layer, RNN | GRU | LSTM):
            kind, ours = type(layer).__name__, layer.mode.partition("_")[0]
            if type(layer).__module__.startswith("torch."):  # a class that PyTorch replaces by its base again
                raise TypeError(
                    "module's layers must become ostinato's before a parametrization or fully_shard changes their "
                    f"class; got {kind}"
                )
            raise TypeError(
                "module must consist of torch.nn's or ostinato's RNN, GRU and LSTM, or of classes derived from "
                f"ostinato's; got {kind}, derived from torch.nn's, which may have a forward of its own: to keep that, "
                f"make the layer's __class__ a class of both, class Ours({kind}, ostinato.{ours})"
            )
    return layers
