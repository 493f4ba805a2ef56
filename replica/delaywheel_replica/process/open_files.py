"""Keeps what is secret from the other users of the machine: keys, tokens, pending messages."""

import os
import stat
from pathlib import Path


def is_open(path: Path | int) -> bool:
    """Whether users outside its owner and group may use a file or folder, or one that is open."""
    status = os.fstat(path) if isinstance(path, int) else path.stat()
    return bool(status.st_mode & stat.S_IRWXO)


def open_to_all(path: Path) -> str:
    """Returns what to say of such a file or folder."""
    return f"everybody may use it: chmod o= {path}"
