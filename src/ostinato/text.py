"""Text for a language model: reading files, the vocabulary of their characters, and windows of tokens."""

import platform
import reprlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """A text, its source, and how many files were read, and skipped because they are not UTF-8."""

    text: str
    source: str
    files: int
    skipped: int = 0


def read_corpus(path: Path | str) -> Corpus:
    """The text of a UTF-8 file, or of all UTF-8 files in a folder that are not hidden, sorted by path.

    Args:
        path: the file or folder.

    Raises:
        OSError: it cannot be read.
        ValueError: a file that is not UTF-8, or no text.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from ostinato.text import read_corpus
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name, text in (("a.txt", "one"), ("b.txt", "two")):
        ...         _ = Path(folder, name).write_text(text)
        ...     corpus = read_corpus(folder)
        >>> corpus.text, corpus.files
        ('one\\ntwo', 2)
    """
    path = Path(path)
    if path.is_dir():
        files = (file for file in sorted(path.rglob("*")) if file.is_file())
        return _join((file for file in files if not _is_hidden(file.relative_to(path))), str(path))
    text = _read(path)
    if not text:
        raise ValueError(f"{path}: expected text; the file is empty")
    return Corpus(text, str(path), files=1)


def standard_library(max_bytes: int = 4_000_000) -> Corpus:
    """The top-level modules of Python's standard library: real text that is always available.

    Args:
        max_bytes: the largest total size.

    Raises:
        ValueError: no module is that small.

    Example:
        >>> from ostinato.text import standard_library
        >>> "import" in standard_library(max_bytes=100_000).text
        True
    """
    folder, files, total = Path(sysconfig.get_path("stdlib")), [], 0
    for file in sorted(folder.glob("[!_]*.py")):
        total += file.stat().st_size
        if total > max_bytes:
            break
        files.append(file)
    return _join(files, f"the standard library of Python {platform.python_version()}")


def _join(files: Iterable[Path], source: str) -> Corpus:
    texts, skipped = [], 0
    for file in files:
        try:
            texts.append(_read(file))
        except ValueError:
            skipped += 1
    text = "\n".join(texts)
    if not text.strip():
        raise ValueError(f"{source}: expected UTF-8 text files; found none with text, {skipped} of another kind")
    return Corpus(text, source, len(texts), skipped)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise ValueError(f"{path}: expected UTF-8 text; byte {error.start} is 0x{byte:02x} ({error.reason})") from None


class Vocabulary:
    """A vocabulary of characters: the token of a character is its index.

    Args:
        characters: all of them, sorted by code point; ``Vocabulary.of(text)`` takes those of a text.

    Raises:
        TypeError: characters that are not a str.
        ValueError: no characters, or characters that are not sorted or occur twice.

    Example:
        >>> from ostinato.text import Vocabulary
        >>> vocabulary = Vocabulary.of("banana")
        >>> vocabulary.encode("ban").tolist(), vocabulary.decode([1, 0, 2])
        ([1, 0, 2], 'ban')
    """

    def __init__(self, characters: str) -> None:
        if not isinstance(characters, str):
            raise TypeError(f"characters must be a str; got {type(characters).__name__}")
        if not characters or list(characters) != sorted(set(characters)):
            raise ValueError(
                f"characters must be at least one, each once, sorted by code point; got {reprlib.repr(characters)}"
            )
        self.characters = characters
        self._codes = _code_points(characters)

    @classmethod
    def of(cls, text: str) -> "Vocabulary":
        _check_text(text)
        return cls("".join(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """The tokens of a text, (len(text),) int32.

        Raises:
            TypeError: a text that is no str.
            ValueError: a character that is not in the vocabulary; names the first.
        """
        _check_text(text)
        codes = _code_points(text)
        tokens = np.searchsorted(self._codes, codes).clip(max=len(self) - 1)
        unknown = np.flatnonzero(self._codes[tokens] != codes)
        if unknown.size:
            position = int(unknown[0])
            raise ValueError(
                f"character {text[position]!r} at position {position} is not one of the {len(self)} the model knows"
            )
        return torch.from_numpy(tokens.astype(np.int32))

    def decode(self, tokens: list[int]) -> str:
        """The text of ``tokens``.

        Raises:
            ValueError: a token outside the vocabulary.
        """
        for token in tokens:
            if not 0 <= token < len(self):
                raise ValueError(f"tokens must be from 0 to {len(self) - 1}; got {token}")
        return "".join(self.characters[token] for token in tokens)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text must be a str; got {type(text).__name__}")


def _code_points(text: str) -> np.ndarray:
    # A prompt from a terminal may hold lone surrogates, which strict UTF-32 cannot encode.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def random_windows(tokens: Tensor, batch_size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (batch_size, length) int64, at random positions of ``tokens``; targets are a step later.

    On the tokens' device, which must be that of ``generator``, without synchronisation.
    """
    starts = torch.randint(len(tokens) - length, (batch_size, 1), generator=generator, device=tokens.device)
    windows = tokens[starts + torch.arange(length + 1, device=tokens.device)].long()
    return windows[:, :-1], windows[:, 1:]


def streams(tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, both (rows, steps): ``tokens`` as equal contiguous rows, without the remainder."""
    steps = (len(tokens) - 1) // rows
    return tokens[: rows * steps].view(rows, steps), tokens[1 : rows * steps + 1].view(rows, steps).long()
