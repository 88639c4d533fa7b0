"""Writing files whole or not at all, into folders that nobody else writes to."""

import errno
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# What the names of temporary folders begin with: hidden, so that nobody takes them for theirs; with the machine's name,
# as on a shared file system the locks of other machines may not be seen.
_TEMPORARY = f".ostinato-{platform.node()}-"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write to, of the same name, which takes the place of ``path`` when the block ends without an error.

    Makes the folder if there is none.  Where ``path`` is a symbolic link, what it leads to is replaced; a stream, which
    cannot be, gets the content written into it.  A file keeps the permissions of the one before.  An OSError of the
    block names ``path``.  What killed processes have left half written in the folder is removed.

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

    Where there are no locks a warning says so.
    """
    with _lock(folder) as is_held:
        if is_held is False:
            raise OSError(f"{folder}: expected a folder that no other process writes to; one does now")
        if is_held is None:
            warnings.warn(f"{folder} cannot be locked here: see to it that no other process writes to it", stacklevel=3)
        yield


@contextmanager
def _lock(folder: Path, wait: bool = False) -> Iterator[bool | None]:
    """Hold ``folder`` for the block: False if it is held already, None where there are no locks.

    The lock ends with the process, however that ends.
    """
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # Windows
        yield None
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_held: bool | None = True
        try:
            flock(descriptor, LOCK_EX if wait else LOCK_EX | LOCK_NB)
        except BlockingIOError:
            is_held = False
        except OSError:  # not on this file system
            is_held = None
        yield is_held
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders in ``folder`` that nobody holds, but empty ones: these may be about to be held."""
    with suppress(OSError):  # of a folder that cannot be listed, or that another process removes, too
        for path in folder.iterdir():
            if path.name.startswith(_TEMPORARY):
                with _lock(path) as is_held:
                    if is_held and any(path.iterdir()):
                        shutil.rmtree(path, ignore_errors=True)


def _target(path: Path) -> Path:
    """The file that ``path`` stands for: where it leads to, if it is a symbolic link."""
    return path.resolve() if path.is_symlink() else path
