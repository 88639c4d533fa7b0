"""The text of a training: read, found again, and told apart from another."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostinato.text import Corpus


def read_text(text: Path | None) -> "Corpus":
    """A file's or folder's text, or the standard library's."""
    from ostinato.text import read_corpus, standard_library

    return read_corpus(text) if text else standard_library()


def place_of_text(checkpoint: Path, saved: object) -> Path | None:
    """Where a checkpoint says that its training's text is; None for the standard library.

    Raises ValueError for what is no path, or if nothing is there, as in another working directory.
    """
    if saved is not None and not isinstance(saved, str):
        raise ValueError(f"{checkpoint}: expected the path of the text that it was trained on; got {saved!r}")
    if saved and not Path(saved).exists():
        raise ValueError(f"{saved}: expected the text that {checkpoint} was trained on; --text may say where it is now")
    return Path(saved) if saved else None


def digest_of(corpus: "Corpus") -> str:
    """What tells this text from another."""
    return hashlib.sha256(corpus.text.encode()).hexdigest()
