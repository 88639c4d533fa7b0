"""Writing files whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to, which takes its place when the block ends and is removed if it fails.

    Makes the folder if there is none.

    >>> with replacing(Path("table.json")) as temporary:  # doctest: +SKIP
    ...     temporary.write_text("{}")
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last, because writers such as matplotlib choose their format by it.
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Make the folder ``path`` if there is none; raises OSError if a file cannot be written in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = "it is a file" if path.is_file() else error.strerror
        raise OSError(f"{path}: expected a folder to write in; {reason}") from error


def check_file(path: Path) -> None:
    """Make the folder of ``path`` if there is none; raises OSError if the file cannot be written."""
    if path.is_dir():
        raise OSError(f"{path}: expected a file to write; it is a folder")
    check_folder(path.parent)
