"""The text of a training run: reading it, finding it again on resuming, and telling it apart from other texts."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostinato.text import Corpus


def read_text(text: Path | None) -> "Corpus":
    """Read the text of a file or folder, or else the source of Python's standard library."""
    from ostinato.text import read_corpus, standard_library

    return read_corpus(text) if text else standard_library()


def place_of_text(checkpoint: Path, saved: object) -> Path | None:
    """Return the path of the text that a checkpoint was trained on; None for the standard library.

    Raises ValueError if `saved` is not a path, or nothing is there, as in another working directory.
    """
    if saved is not None and not isinstance(saved, str):
        raise ValueError(f"{checkpoint}: expected the path of the text that it was trained on; got {saved!r}")
    if saved and not Path(saved).exists():
        raise ValueError(f"{saved}: expected the text that {checkpoint} was trained on; --text may say where it is now")
    return Path(saved) if saved else None


def digest_of(corpus: "Corpus") -> str:
    """Return a hash that tells this text apart from others."""
    return hashlib.sha256(corpus.text.encode()).hexdigest()
