"""Divides the process's descriptors so that callers never take those of the wheel; closes some.

| share | of the limit | at most |
|---|---|---|
| reserve: index segments, readers, logs, peers, HTTP, libraries | a quarter | 1,024 |
| connections of callers | a quarter of the rest | 4,096 |
| open slot files | what is left | 8,192 |

gRPC closes connections beyond this number as soon as they are made: the caller sees the node as
unavailable and uses another one. Beyond the number of files, the node closes those that it needs
least.
"""

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISSOCK
from typing import Final
from urllib.parse import unquote

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


def close_connections(callers: Collection[str]) -> None:
    """Closes the connections of callers, as gRPC names them (`ipv4:10.0.0.7:40213`).

    gRPC's server can close no connection, nor end a call whose answer waits to be read. A socket
    that is shut down it sees as closed by its caller. Goes through all descriptors: for a thread.
    """
    wanted = {unquote(caller).partition(":")[2] for caller in callers}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), _connection(int(entry.name)) as connection:
            if connection is not None and _address_of(connection) in wanted:
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket | None]:
    """Yields the socket of a descriptor; None if it is none.

    Raises:
        OSError: It was closed meanwhile.
    """
    copy = os.dup(descriptor)  # ours stays the same socket, whatever gRPC does with its own
    if not S_ISSOCK(os.fstat(copy).st_mode):
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as connection:
        yield connection


def _address_of(connection: socket.socket) -> str | None:
    """Returns the other end's address as gRPC writes it."""
    if connection.family not in {socket.AF_INET, socket.AF_INET6}:
        return None
    host, port = connection.getpeername()[:2]
    if connection.family == socket.AF_INET6 and host.startswith("::ffff:"):
        return f"{host.removeprefix('::ffff:')}:{port}"
    return f"[{host}]:{port}" if connection.family == socket.AF_INET6 else f"{host}:{port}"
