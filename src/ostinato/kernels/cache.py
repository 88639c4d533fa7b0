"""Compiled kernels kept between processes, in files of their own that are written whole and checked when read."""

import hashlib
import os
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


def _folder() -> Path:
    """Raises RuntimeError if there is no home."""
    root = os.environ.get("OSTINATO_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "ostinato"
