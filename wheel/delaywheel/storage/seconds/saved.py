"""What a member has saved of a wheel's seconds: F, the floor, and seconds that were passed over.

It lies in two files, written one after the other, so that a sector that goes bad loses neither: a
reader takes the first that is whole. Whatever depends on it (frames that are forgotten, files that
are deleted) is done when both are written, so the older of two that differ is right as well.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from crc32c import crc32c

from delaywheel.storage.folder import layout
from delaywheel.storage.folder.disk import Disk, is_medium_error

_VERSION: Final = 2
_NONE: Final[Mapping[int, int]] = MappingProxyType({})


class SavedDamaged(Exception):
    """Neither file can be read: what a wheel's folder holds is not known, so it is copied anew."""


class SavedSeconds(NamedTuple):
    """What is saved.

    Attributes:
        filled: F: all frames up to it are in their seconds, on the medium.
        floor: Seconds below are finished, and may have been deleted.
        passed_over: Seconds that a fill has passed over, each with F before that.
    """

    filled: int = 0
    floor: int = 0
    passed_over: Mapping[int, int] = _NONE


def save(disk: Disk, folder: Path, saved: SavedSeconds) -> None:
    """Saves it durably."""
    passed_over = [list(pair) for pair in sorted(saved.passed_over.items())]
    body = json.dumps([_VERSION, saved.filled, saved.floor, passed_over]).encode()
    content = b"%08x %b\n" % (crc32c(body), body)
    for path in _paths(folder):
        disk.replace_file(path, content)


def load(disk: Disk, folder: Path) -> SavedSeconds:
    """Returns what was saved last; a wheel saves that nothing is filled before it writes anything.

    Raises:
        FileNotFoundError: Nothing was ever saved, or both files are gone.
        SavedDamaged: It cannot be read.
        OSError: Not the medium's.
    """
    damage: Exception | None = None
    for path in _paths(folder):
        try:
            return _decoded(disk.read_file(path))
        except FileNotFoundError as error:
            damage = damage or error
        except OSError as error:
            if not is_medium_error(error):
                raise
            damage = SavedDamaged(str(error))
        except (ValueError, TypeError) as error:
            damage = SavedDamaged(f"{path}: {error}")
    assert damage is not None
    raise damage


def _paths(folder: Path) -> tuple[Path, Path]:
    path = layout.checkpoint_path(folder)
    return path, path.with_name(path.name + ".2")


def _decoded(content: bytes) -> SavedSeconds:
    check, _, body = content.rstrip(b"\n").partition(b" ")
    if int(check, 16) != crc32c(body):
        raise ValueError("another check value")
    version, filled, floor, passed_over = json.loads(body)
    if version != _VERSION:
        raise ValueError(f"version {version}")
    return SavedSeconds(filled, floor, dict(passed_over))
