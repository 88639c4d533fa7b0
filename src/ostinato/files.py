"""Writing files whole or not at all, into folders that nobody else writes to."""

import errno
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write to, of the same name, which takes the place of ``path`` when the block ends without an error.

    Makes the folder if there is none.  Where ``path`` is a symbolic link, what it leads to is replaced; a stream, which
    cannot be, gets the content written into it.  An OSError of the block names ``path``.

    >>> with replacing(Path("table.json")) as temporary:  # doctest: +SKIP
    ...     temporary.write_text("{}")
    """
    stream = is_stream(path)
    target = path if stream else _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that it can be moved there; hidden, so that nobody takes it for a file of theirs.
        with tempfile.TemporaryDirectory(prefix=".", dir=None if stream else target.parent) as folder:
            temporary = Path(folder) / target.name
            yield temporary
            if stream:
                with temporary.open("rb") as source, path.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
            else:
                os.replace(temporary, target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_stream(path: Path) -> bool:
    """Whether there is something at ``path`` to write into that is no file: a FIFO, a device, a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


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
    if not is_stream(path):
        check_folder(_target(path).parent)
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for the block; raises OSError if it is held already, by this process or another.

    The lock ends with the process, however that ends.  Where there are no locks a warning says so.
    """
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # Windows
        _warn_unlocked(folder)
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise OSError(f"{folder}: expected a folder that no other process writes to; one does now") from None
        except OSError:  # not on this file system
            _warn_unlocked(folder)
        yield
    finally:
        os.close(descriptor)


def _warn_unlocked(folder: Path) -> None:
    warnings.warn(f"{folder} cannot be locked here: see to it that no other process writes to it", stacklevel=4)


def _target(path: Path) -> Path:
    """The file that ``path`` stands for: where it leads to, if it is a symbolic link."""
    return path.resolve() if path.is_symlink() else path
