"""A cache of what is computed from a tensor until it changes: a mask, or a packed sequence's batch sizes."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_derived: WeakIdKeyDictionary = WeakIdKeyDictionary()  # from tensors to their version (or a copy) and the results


def derived_from(x: Tensor, key: Hashable, compute: Callable[[], Any], by_value: bool = False) -> Any:
    """``compute()``, cached by tensor and key until the tensor changes.

    ``by_value`` it is compared with a copy, as inference tensors are, which have no version counter: NumPy's changes
    are not counted.
    """
    uncounted = by_value or x.is_inference()
    seen = _derived.get(x)
    if seen is None or not (torch.equal(x, seen[0]) if uncounted else x._version == seen[0]):
        seen = _derived[x] = (x.clone() if uncounted else x._version, {})
    if key not in seen[1]:
        seen[1][key] = compute()
    return seen[1][key]
