"""Saves models for the Hugging Face hub and loads them from it, by the hub's own mixin."""

from typing import Any, NoReturn


class _WithoutHub:
    """Replaces the hub's mixin where that is not installed."""

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()

    def save_pretrained(self, *_: Any, **__: Any) -> NoReturn:
        _ask_for_hub()

    def push_to_hub(self, *_: Any, **__: Any) -> NoReturn:
        _ask_for_hub()

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> NoReturn:
        _ask_for_hub()


def _ask_for_hub() -> NoReturn:
    raise ImportError("models are saved for the Hugging Face hub by huggingface_hub: pip install 'ostinato[hub]'")


def _mixin() -> Any:
    try:
        from huggingface_hub import PyTorchModelHubMixin
    except ImportError:
        return _WithoutHub
    return PyTorchModelHubMixin


_Mixin: Any = _mixin()


class HubMixin(_Mixin):
    """Adds ``save_pretrained``, ``from_pretrained`` and ``push_to_hub`` of a module's arguments and weights.

    The weights are safetensors.  Unlike the hub's own mixin, it refuses pickled weights and, unless ``strict=False``,
    weights that are not the model's, and it keeps the weights' dtypes.
    """

    def __init_subclass__(cls, **card: Any) -> None:
        super().__init_subclass__(**card)

    @classmethod
    def _from_pretrained(cls, *, strict: bool = True, **where: Any) -> Any:
        return super()._from_pretrained(strict=strict, **where).eval()  # older mixins leave it in training mode

    @classmethod
    def _load_as_safetensor(cls, model: Any, model_file: str, *where: Any) -> Any:
        from safetensors import safe_open

        with safe_open(model_file, "pt") as file:
            saved = {*file.keys()}
            for name, parameter in model.named_parameters():
                if name in saved:  # a new model has PyTorch's default dtype, to which weights would be rounded
                    parameter.data = parameter.data.to(file.get_slice(name)[:0].dtype)
        return super()._load_as_safetensor(model, model_file, *where)

    @classmethod
    def _load_as_pickle(cls, _model: Any, model_file: str, *_: Any) -> NoReturn:
        raise ValueError(f"weights must be a safetensors file; got {model_file}, which could run code as it is read")
