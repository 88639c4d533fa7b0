"""The dropout between stacked layers."""

from typing import Protocol


class Stacked(Protocol):
    """Stacked layers with dropout between them in training, as ``torch.nn``'s."""

    dropout: float
    training: bool
    num_layers: int


def dropout_of(layers: Stacked) -> float:
    """The probability with which a call drops the outputs of each layer but the last."""
    return layers.dropout if layers.training and layers.num_layers > 1 else 0.0
