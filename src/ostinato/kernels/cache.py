"""Compiled kernels kept between processes, in files of their own that are written whole and checked when read."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ostinato.files import replacing

_DIGEST_SIZE = hashlib.sha256().digest_size


def key_of(*parts: str) -> str:
    """A name for what is compiled of these parts: sources, options, versions, whatever it depends on."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load(name: str) -> bytes | None:
    """What was stored by this name; None if nothing was, or what is there is damaged or cannot be read."""
    try:
        stored = (_folder() / name).read_bytes()
    except (OSError, RuntimeError):
        return None
    digest, data = stored[:_DIGEST_SIZE], stored[_DIGEST_SIZE:]
    return data if data and hashlib.sha256(data).digest() == digest else None


def store(name: str, data: bytes) -> None:
    """Keep the data if they can be written: else another process compiles anew, no more."""
    try:
        with replacing(_folder() / name) as temporary:
            temporary.write_bytes(hashlib.sha256(data).digest() + data)
    except (OSError, RuntimeError):
        pass


@contextmanager
def alone(name: str) -> Iterator[None]:
    """For the block, the one process here that makes what has this name: others wait, and find it stored.

    Where there are no locks nobody waits, and some compile the same.
    """
    try:
        descriptor = _lock(_folder() / f".{name}.lock")
    except (ImportError, OSError, RuntimeError):
        yield
        return
    try:
        yield
    finally:
        # Who waits for this very file goes on when it is closed; who comes later makes a new one, and finds it stored.
        with suppress(OSError, RuntimeError):
            (_folder() / f".{name}.lock").unlink()
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
