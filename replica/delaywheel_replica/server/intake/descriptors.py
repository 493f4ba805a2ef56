"""Divides the process's descriptors so that callers never take those of the wheel.

| share | of the limit | at most |
|---|---|---|
| reserve: index segments, readers, logs, peers, HTTP, libraries | a quarter | 1,024 |
| connections of callers | a quarter of the rest | 4,096 |
| open slot files | what is left | 8,192 |

gRPC closes connections beyond this number as soon as they are made: the caller sees the node as
unavailable and uses another one. Beyond the number of files, the node closes those that it needs
least.
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
        connections: For connections of callers.
        slot_files: For open slot files.
    """

    connections: int
    slot_files: int

    def connections_of_port(self, ports: int) -> int:
        """Returns how many each of several ports may have: gRPC counts those of each by itself."""
        return max(1, self.connections // ports)


def share_out(limit: int, *, open_files: int | None = None) -> Descriptors:
    """Divides the descriptors that the process may have.

    Args:
        limit: How many there are.
        open_files: Slot files, if the operator has set a number.
    """
    rest = limit - min(limit // 4, _RESERVE_AT_MOST)
    connections = min(rest // 4, _CONNECTIONS_AT_MOST)
    slot_files = open_files or min(rest - connections, _SLOT_FILES_AT_MOST)
    connections = min(connections, rest - slot_files)
    return Descriptors(max(_LEAST, connections), max(_LEAST, slot_files))
