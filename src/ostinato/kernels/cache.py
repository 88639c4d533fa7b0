"""The disk cache of compiled kernels: one file each, written atomically and verified when read."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ostinato.files import replacing

_DIGEST_SIZE = hashlib.sha256().digest_size


def key_of(*parts: str) -> str:
    """The cache key of what is compiled from these parts: sources, options, versions."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load(name: str) -> bytes | None:
    """The data stored under this name; None if there is none, or it is damaged or unreadable."""
    try:
        stored = (_folder() / name).read_bytes()
    except (OSError, RuntimeError):
        return None
    digest, data = stored[:_DIGEST_SIZE], stored[_DIGEST_SIZE:]
    return data if data and hashlib.sha256(data).digest() == digest else None


def store(name: str, data: bytes) -> None:
    """Store the data if possible; if not, other processes only compile again."""
    try:
        with replacing(_folder() / name) as temporary:
            temporary.write_bytes(hashlib.sha256(data).digest() + data)
    except (OSError, RuntimeError):
        pass


@contextmanager
def alone(name: str) -> Iterator[None]:
    """A lock per name between this machine's processes: one compiles, the others wait and load the result.

    Without file locks nobody waits, and several may compile the same.
    """
    try:
        descriptor = _lock(_folder() / f".{name}.lock")
    except (ImportError, OSError, RuntimeError):
        yield
        return
    try:
        yield
    finally:
        # Waiters on this file continue when it is unlocked; later ones create a new file, and find the data stored.
        with suppress(OSError, RuntimeError):
            (_folder() / f".{name}.lock").unlink()
        _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    from fcntl import LOCK_UN, flock

    with suppress(OSError):
        flock(descriptor, LOCK_UN)  # closing is not enough: a process forked meanwhile has the file open, too
    os.close(descriptor)


def _lock(path: Path) -> int:
    from fcntl import LOCK_EX, flock  # not on Windows

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        flock(descriptor, LOCK_EX)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _folder() -> Path:
    """Raises RuntimeError if there is no home."""
    root = os.environ.get("OSTINATO_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "ostinato"
