"""The tensors that a function takes from around it, such as a module's weights, found and replaced."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only


def tensors_around(function: Callable, *given: Any) -> list[Tensor]:
    """Those that ``function(*given)`` hands to PyTorch without having been given or having made them."""
    with _Noting(given) as noted:
        function(*given)
    return list(noted.around.values())


class Replacing(TorchFunctionMode):
    """Hands others to PyTorch in place of some tensors."""

    def __init__(self, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        super().__init__()
        self._others = {id(x): (other, x) for x, other in zip(tensors, others, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        def other(x: Tensor) -> Tensor:
            return self._others.get(id(x), (x, x))[0]

        args, kwargs = tree_map_only(Tensor, other, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Noting(TorchFunctionMode):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.around: dict[int, Tensor] = {}  # by id
        self._known: dict[int, Any] = {}  # with the tensors, so that no others get their ids
        self._know(given)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self._known:
                self.around[id(x)] = x
        result = func(*args, **(kwargs or {}))
        self._know(result)
        return result

    def _know(self, made: Any) -> None:
        self._known.update((id(x), x) for x in tree_leaves(made))
