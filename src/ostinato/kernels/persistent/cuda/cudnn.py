"""How exactly cuDNN computes a layer when PyTorch calls it."""

from ostinato.kernels.persistent.plan import GATES


def most_units_of_small(cell: str, backward: bool) -> int:
    """Units up to which PyTorch takes cuDNN's kernels for small layers, of sequences that are not packed."""
    if GATES[cell] == 1:
        return 256 if backward else 384
    return 128 if backward else 192


def rounds(cell: str, hidden_size: int, batch: int, backward: bool) -> bool:
    """Whether what is multiplied with the recurrent weights is rounded to tf32 in float32 layers, where it may be."""
    return batch > 1 and hidden_size > most_units_of_small(cell, backward)
