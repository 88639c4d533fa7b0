"""The dropout between stacked layers."""

from typing import Protocol


class Stacked(Protocol):
    """Layers that drop outputs in training, as ``torch.nn``'s."""

    dropout: float
    training: bool
    num_layers: int


def dropout_of(layers: Stacked) -> float:
    """The probability with which a call drops outputs of all layers but the last."""
    return layers.dropout if layers.training and layers.num_layers > 1 else 0.0
