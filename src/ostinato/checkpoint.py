"""Checkpoints: a safetensors file with a model's weights, settings and vocabulary, and the state of its training."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ostinato.files import replacing
from ostinato.models import LanguageModel
from ostinato.processes import is_first, whole
from ostinato.text import Vocabulary

FORMAT = "ostinato language model 1"


@dataclass
class Checkpoint:
    """A model with its vocabulary, and optionally the state of its training.

    Attributes:
        model, vocabulary: what is needed to use the model.
        training: a JSON object with whatever the training stores.
        training_tensors: the training's tensors by name; without them training cannot be resumed.

    Example:
        >>> from ostinato.checkpoint import Checkpoint
        >>> from ostinato.models import LanguageModel
        >>> from ostinato.text import Vocabulary
        >>> Checkpoint(LanguageModel(vocab_size=3, width=8), Vocabulary.of("banana"), {"steps": 100}).training
        {'steps': 100}
    """

    model: LanguageModel
    vocabulary: Vocabulary
    training: dict[str, Any] = field(default_factory=dict)
    training_tensors: dict[str, Tensor] = field(default_factory=dict)


def save_checkpoint(path: Path | str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically.

    A collective: sharded tensors are gathered, and the first process writes.

    Args:
        path: the file; its folder is created if needed.
        checkpoint: what to write.

    Raises:
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from ostinato.checkpoint import Checkpoint, save_checkpoint
        >>> from ostinato.models import LanguageModel
        >>> from ostinato.text import Vocabulary
        >>> checkpoint = Checkpoint(LanguageModel(vocab_size=3, width=8), Vocabulary.of("banana"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/models/new.safetensors", checkpoint)
        ...     [path.name for path in Path(folder, "models").iterdir()]
        ['new.safetensors']
    """
    tensors = {f"model.{name}": tensor for name, tensor in checkpoint.model.state_dict().items()}
    tensors |= {f"training.{name}": tensor for name, tensor in checkpoint.training_tensors.items()}
    gathered = {}
    for name, tensor in tensors.items():
        tensor = whole(tensor)  # one at a time, which the other processes then free
        if is_first():
            gathered[name] = tensor.cpu().contiguous()
    if not is_first():
        return
    metadata = {
        "format": FORMAT,
        "model": json.dumps(checkpoint.model.settings),
        "vocabulary": json.dumps(checkpoint.vocabulary.characters),
        "training": json.dumps(checkpoint.training),
    }
    content = save(gathered, metadata)
    with replacing(Path(path)) as temporary:
        temporary.write_bytes(content)


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint onto the CPU, in the dtypes that it was saved in.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a truncated file, one that is not a checkpoint of this library, or weights that do not match the
            model of its settings.

    Example:
        >>> import tempfile
        >>> from ostinato.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
        >>> from ostinato.models import LanguageModel
        >>> from ostinato.text import Vocabulary
        >>> model = LanguageModel(vocab_size=3, width=8, num_layers=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/model.safetensors", Checkpoint(model, Vocabulary.of("banana")))
        ...     loaded = load_checkpoint(f"{folder}/model.safetensors")
        >>> loaded.model.settings == model.settings, loaded.vocabulary.decode([1, 0, 2])
        (True, 'ban')
    """
    metadata, tensors = _read(Path(path))
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: expected a checkpoint of format {FORMAT!r}; got {metadata.get('format', 'none')!r}")
    try:
        settings, training = json.loads(metadata["model"]), json.loads(metadata["training"])
        vocabulary = Vocabulary(json.loads(metadata["vocabulary"]))
        model = _on_meta_device(settings, len(tensors))
    except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected a checkpoint's settings and vocabulary; {error}") from None
    if not isinstance(training, dict):
        raise ValueError(f"{path}: expected the state of a training as a JSON object; got {type(training).__name__}")
    weights, training_tensors = _with_prefix(tensors, "model."), _with_prefix(tensors, "training.")
    _check_weights(path, model, weights)
    if len(vocabulary) != settings["vocab_size"]:
        raise ValueError(f"{path}: expected a vocabulary of {settings['vocab_size']} characters; got {len(vocabulary)}")
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(weights[name].dtype)
    model.to_empty(device="cpu").load_state_dict(weights)
    return Checkpoint(model, vocabulary, training, training_tensors)


def _check_weights(path: Path | str, model: LanguageModel, weights: dict[str, Tensor]) -> None:
    """Raise ValueError unless the weights are the model's, in any floating dtype, with masks of any of them."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    masks = {name: name.replace(".mask_", ".weight_") for name in weights if ".mask_" in name}
    expected |= {name: expected[weight] for name, weight in masks.items() if weight in expected}
    for name in sorted(expected.keys() | weights.keys()):
        actual = tuple(weights[name].shape) if name in weights else None
        if actual != expected.get(name):
            raise ValueError(
                f"{path}: expected the weights of a model with {model.settings}; "
                f"{name} should be {expected.get(name, 'absent')} and is {actual or 'absent'}"
            )
        dtype, kind = weights[name].dtype, "bool" if name in masks else "floating-point"
        if not (dtype == torch.bool if name in masks else dtype.is_floating_point):
            raise ValueError(f"{path}: expected {name} to be {kind}; got {dtype}")


def _on_meta_device(settings: dict[str, Any], tensors: int) -> LanguageModel:
    """The model on the meta device, as a damaged file may declare one that is larger than the memory."""
    num_layers = settings.get("num_layers", 0)
    if num_layers > tensors:
        raise ValueError(f"num_layers is {num_layers} in a file of {tensors} tensors")
    with torch.device("meta"):
        return LanguageModel(**settings)


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if path.is_dir():
        files = ", ".join(sorted(file.name for file in path.glob("*.safetensors")))
        raise IsADirectoryError(f"{path}: expected a checkpoint; got a folder{files and ' with '}{files}")
    path.open("rb").close()  # for an OSError that names the file
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:  # OSError: a pipe, say, cannot be mapped into memory
        raise ValueError(f"{path}: expected a whole safetensors file; {error}") from None


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
