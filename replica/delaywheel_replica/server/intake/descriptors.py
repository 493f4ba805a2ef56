"""Divides the process's descriptors, so that callers never take those that the wheel needs.

| share | of the limit | at most |
|---|---|---|
| the reserve: index segments, readers, logs, peers, HTTP, libraries | a quarter | 1,024 |
| connections of callers | a quarter of the rest | 4,096 |
| open slot files | what is left | 8,192 |

Beyond its connections gRPC closes each new one as soon as it is made: the caller finds the node
unavailable and goes to another one. Beyond its files the node closes those that it needs least.
"""

from dataclasses import dataclass
from typing import Final

_RESERVE_AT_MOST: Final = 1_024
_CONNECTIONS_AT_MOST: Final = 4_096
_SLOT_FILES_AT_MOST: Final = 8_192
_LEAST: Final = 16


@dataclass(frozen=True, slots=True)
class Descriptors:
    """How many descriptors each part may use.

    Attributes:
        connections: of callers.
        slot_files: kept open.
    """

    connections: int
    slot_files: int


def share_out(limit: int, *, open_files: int | None = None) -> Descriptors:
    """Divides the descriptors that the process may have.

    Args:
        limit: so many.
        open_files: slot files, where the operator has set how many.
    """
    rest = limit - min(limit // 4, _RESERVE_AT_MOST)
    connections = min(rest // 4, _CONNECTIONS_AT_MOST)
    slot_files = open_files or min(rest - connections, _SLOT_FILES_AT_MOST)
    connections = min(connections, rest - slot_files)
    return Descriptors(max(_LEAST, connections), max(_LEAST, slot_files))
