"""Writes files whole or not at all, and locks folders."""

import errno
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# The prefix of temporary folders.  They are hidden, so that nobody takes them for their own, and have the machine's
# name, as on a shared file system the locks of other machines may not be visible.
_TEMPORARY = f".ostinato-{platform.node()}-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write to, of the same name, which takes the place of ``path`` when the block ends without an error.

    Makes the folder if there is none.  Where ``path`` is a symbolic link, its target is replaced; a stream cannot be
    replaced, so the content is written into it.  The new file keeps the old one's permissions.  An OSError of the block
    names ``path``.  Half-written files that killed processes have left in the folder are removed.

    >>> with replacing(Path("table.json")) as temporary:  # doctest: +SKIP
    ...     temporary.write_text("{}")
    """
    stream = is_stream(path)
    target = path if stream else _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if not stream:
            _remove_abandoned(target.parent)
        # Beside the target, so that it can be moved there.
        beside = None if stream else target.parent
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=beside) as folder, _lock(Path(folder), wait=True):
            temporary = Path(folder) / target.name
            yield temporary
            if stream:
                with temporary.open("rb") as source, path.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
            else:
                with suppress(OSError):  # there is no file yet, or its permissions cannot be given
                    shutil.copymode(target, temporary)
                os.replace(temporary, target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_stream(path: Path) -> bool:
    """Whether ``path`` is something to write into that is not a regular file: a FIFO, a device, a socket."""
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
    """Lock ``folder`` for the block; raises OSError if it is locked already, by this process or another.

    Warns where there are no locks.
    """
    with _lock(folder) as is_locked:
        if is_locked is False:
            raise OSError(f"{folder}: expected a folder that no other process writes to; one does now")
        if is_locked is None:
            warnings.warn(f"{folder} cannot be locked here: see to it that no other process writes to it", stacklevel=3)
        yield


@contextmanager
def _lock(folder: Path, wait: bool = False) -> Iterator[bool | None]:
    """Lock ``folder`` for the block: yields False if it is locked already, None where there are no locks.

    The lock ends with the process, however that ends.
    """
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # Windows
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_locked: bool | None = True
        try:
            flock(descriptor, LOCK_EX if wait else LOCK_EX | LOCK_NB)
        except BlockingIOError:
            is_locked = False
        except OSError:  # not on this file system
            is_locked = None
        yield is_locked
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove unlocked temporary folders in ``folder``, except for empty ones, which may be about to be locked."""
    with suppress(OSError):  # the folder cannot be listed, or another process removes it, too
        for path in folder.iterdir():
            if path.name.startswith(_TEMPORARY):
                with _lock(path) as is_locked:
                    if is_locked and any(path.iterdir()):
                        shutil.rmtree(path, ignore_errors=True)


def _target(path: Path) -> Path:
    """The file that ``path`` stands for: the target, if it is a symbolic link."""
    return path.resolve() if path.is_symlink() else path
