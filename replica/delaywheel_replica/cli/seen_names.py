"""What commands have seen of a cluster, for completion: topics, levels, nodes.

Completion asks no node: gRPC alone takes longer to import than a key may take, and a node that
is away would hold the shell. So commands note the names that pass by, and completion reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

KINDS: Final = ("topics", "levels", "nodes")

_MOST_SERVERS: Final = 8
_MOST_NAMES: Final = 500
_LONGEST: Final = 255


def note(server: str, **names: Iterable[str]) -> None:
    """Remembers names seen at this cluster, as it was given to the command; keeps the latest ones.

    Names of levels and nodes replace what was known.
    """
    path = _path()
    known = _read(path)
    before = known.get(server, {})
    seen = dict(before)
    for kind, found in names.items():
        old = before.get(kind, [])
        latest = [name for name in dict.fromkeys(found) if name and len(name) <= _LONGEST]
        if kind == "topics":
            latest = [*old] if set(latest) <= set(old) else [*dict.fromkeys([*latest, *old])]
        seen[kind] = latest[:_MOST_NAMES]
    if seen == before:
        return
    others = {other: noted for other, noted in known.items() if other != server}
    kept = dict([(server, seen), *others.items()][:_MOST_SERVERS])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(kept))
        half.replace(path)
    except OSError:
        return  # nothing depends on it


def names(server: str, kind: str) -> list[str]:
    """Returns the known names of one kind."""
    return list(_read(_path()).get(server, {}).get(kind, ()))


def _path() -> Path:
    home = Path(os.environ.get("HOME", "/"))
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "delaywheel" / "known.json"


def _read(path: Path) -> dict[str, Mapping[str, list[str]]]:
    try:
        read = json.loads(path.read_text())
        return {
            str(server): {
                kind: [str(name) for name in noted[kind]] for kind in KINDS if kind in noted
            }
            for server, noted in read.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
