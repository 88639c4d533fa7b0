"""Finds and replaces the tensors that a function captures, such as a module's weights."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only


def captured_tensors(function: Callable, *arguments: Any) -> list[Tensor]:
    """The tensors that ``function(*arguments)`` passes to PyTorch though they are neither arguments nor its results."""
    with _Recording(arguments) as recording:
        function(*arguments)
    return list(recording.captured.values())


class Replacing(TorchFunctionMode):
    """Passes replacements to PyTorch in place of some tensors."""

    def __init__(self, tensors: Sequence[Tensor], replacements: Sequence[Tensor]) -> None:
        super().__init__()
        # By id; keeping the tensor keeps its id from being reused.
        self._replacements = {id(x): (other, x) for x, other in zip(tensors, replacements, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        def replacement(x: Tensor) -> Tensor:
            return self._replacements.get(id(x), (x, x))[0]

        args, kwargs = tree_map_only(Tensor, replacement, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Recording(TorchFunctionMode):
    """Records the tensors that functions take, except for arguments and for what earlier functions returned."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self.captured: dict[int, Tensor] = {}  # by id
        self._known: dict[int, Any] = {}  # by id; keeping the objects keeps their ids from being reused
        self._add_known(arguments)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self._known:
                self.captured[id(x)] = x
        result = func(*args, **(kwargs or {}))
        self._add_known(result)
        return result

    def _add_known(self, tree: Any) -> None:
        self._known.update((id(x), x) for x in tree_leaves(tree))
