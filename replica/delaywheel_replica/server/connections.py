"""The connections of callers, as the kernel has them: which may stay. Closes the others.

gRPC's server bounds their number alone, ends none, and gathers what a connection sends before any
call of it has begun: one header block that goes on for ever took 30 MiB, and 400 of them 2.9 GiB.
`max_connection_idle` counts no pings, and `max_metadata_size` bounds only what reaches us.

| a connection | is closed |
|---|---|
| whose caller was admitted to a call | once the certificate that it shows has expired |
| of a stranger: no call was admitted yet | once it has sent `STRANGER_BYTES` |
| the same | once its address, or its certificate, has called more than it may |
| the same, at a port that asks for no certificates | after `STRANGER_S` in which no call waited |
| the same, one of more than a quarter of a port's, from one address | the oldest first |

Health checks and reflection, which everybody may call, make nobody known, nor does `WhoAmI` of who
has no rights. A caller whose connection is closed opens another with its next call.

Of such calls strangers have a share between two looks, `STRANGER_CALLS`: each connection that shows
a certificate, and otherwise each address. What is beyond it is dropped as it comes. 15,000 health
checks from 150 connections made a probe wait for 4 s, and senders for 2 s.
"""

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISSOCK
from struct import unpack_from
from threading import Event, Thread
from typing import Final, NamedTuple, cast
from urllib.parse import unquote

from delaywheel_replica.server.shown_certificate import LEAF

STRANGER_S: Final = 15.0
STRANGER_BYTES: Final = 512 << 10
"""Handshake and headers of a call are some KiB; its message is read once it is admitted."""
STRANGER_CALLS: Final = 64
_LOOK_S: Final = 0.5
_PAUSES: Final = 40
"""A pause is so many times as long as the look before: there may be thousands of open files."""
_RECEIVED_AT: Final = 128
"""Where `tcpi_bytes_received` lies in the kernel's `struct tcp_info`."""


class _AdmittedConnection(NamedTuple):
    """A connection whose caller was admitted, as noted at `noted_s` of the monotonic clock.

    `expires_s` is when its certificate does, Unix seconds.
    """

    expires_s: float
    noted_s: float


class _OpenConnection(NamedTuple):
    """An open connection of a caller, from their address to our port.

    Attributes:
        since_s: When it was seen first, by how long the event loop had begun calls as they came.
    """

    address: str
    port: int
    since_s: float


class CallerConnections:
    """Watches the connections at some ports. `admitted` and `takes` are for any thread."""

    def __init__(self, most_of_port: int) -> None:
        """Begins without ports, of which gRPC takes `most_of_port` connections at each."""
        self._of_address: Final = max(1, most_of_port // 4)
        self._ports: dict[int, bool] = {}
        self._admitted: Final[dict[str, _AdmittedConnection]] = {}
        self._sharers: Final[dict[str, str]] = {}
        self._calls = Counter[str]()
        self._seen: dict[tuple[int, int], _OpenConnection | None] = {}
        self._is_behind: Callable[[], bool]
        self._was_behind = False
        self._loop: asyncio.AbstractEventLoop
        self._is_over: Final = Event()
        self._thread: Final = Thread(target=self._watch, name="connections", daemon=True)

    def start(self, ports: Mapping[int, bool], is_behind: Callable[[], bool]) -> None:
        """Watches ports for callers until `stop`, on the event loop that serves them.

        Args:
            ports: Whether each asks for certificates.
            is_behind: Whether calls wait to be begun: those of a stranger may be among them.
        """
        self._is_behind = is_behind
        self._ports = dict(ports)
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Watches no longer."""
        self._is_over.set()

    def admitted(self, address: str, expires_s: float) -> None:
        """Notes that a caller was admitted to a call by a connection (`ipv4:10.0.0.7:40213`).

        Its certificate expires, or has expired, at `expires_s`, Unix seconds.
        """
        self._admitted[address] = _AdmittedConnection(expires_s, time.monotonic())

    def takes(self, address: str, shown: Callable[[], object]) -> bool:
        """Notes a call that anybody may make; returns whether it is begun."""
        if address in self._admitted:
            return True
        plain = _plain(address)
        if (sharer := self._sharers.get(plain)) is None:
            sharer = plain if LEAF in cast("Mapping[str, object]", shown()) else _host(plain)
            self._sharers[plain] = sharer
        self._calls[sharer] += 1
        return self._calls[sharer] <= STRANGER_CALLS

    def _watch(self) -> None:
        pause_s, served_s = _LOOK_S, 0.0
        answered = self._asked_loop()
        while not self._is_over.wait(pause_s):
            if answered.is_set():
                served_s += 0.0 if self._was_behind else pause_s
                answered = self._asked_loop()
            began_s = time.thread_time()
            self._look(time.monotonic(), time.time(), served_s)
            pause_s = max(_LOOK_S, (time.thread_time() - began_s) * _PAUSES)

    def _asked_loop(self) -> Event:
        """Has the event loop set what is returned: while it does not, no call is begun either."""
        answered = Event()

        def answer() -> None:
            self._was_behind = self._is_behind()
            answered.set()

        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(answer)
        return answered

    def _look(self, now_s: float, wall_s: float, served_s: float) -> None:
        admitted = {_plain(address): each for address, each in self._admitted.copy().items()}
        calls, self._calls = self._calls, Counter()
        opened, strangers = set[str](), list[tuple[float, int, _OpenConnection]]()
        for descriptor, seen in self._open(served_s):
            opened.add(seen.address)
            known = admitted.get(seen.address)
            if known is None:
                strangers.append((seen.since_s, descriptor, seen))
            elif wall_s >= known.expires_s:
                _close(descriptor, seen.address)
        of_address = Counter((seen.port, _host(seen.address)) for _, _, seen in strangers)
        for since_s, descriptor, seen in sorted(strangers):
            sharer = seen.port, _host(seen.address)
            is_old = served_s - since_s >= STRANGER_S and not self._ports[seen.port]
            if (
                is_old
                or calls[self._sharers.get(seen.address, "")] > STRANGER_CALLS
                or of_address[sharer] > self._of_address
                or _received_bytes(descriptor) > STRANGER_BYTES
            ):
                of_address[sharer] -= 1
                _close(descriptor, seen.address)
        for address, each in self._admitted.copy().items():
            if each.noted_s < now_s and _plain(address) not in opened:
                self._admitted.pop(address, None)
        for address in self._sharers.keys() - opened:
            self._sharers.pop(address, None)

    def _open(self, served_s: float) -> list[tuple[int, _OpenConnection]]:
        """Returns callers' connections, each with its descriptor."""
        seen: dict[tuple[int, int], _OpenConnection | None] = {}
        found = []
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - thousands, twice a second
            descriptor = int(name)
            with suppress(OSError):
                status = os.fstat(descriptor)
                if not S_ISSOCK(status.st_mode):
                    continue
                key = descriptor, status.st_ino
                one = (
                    self._seen[key] if key in self._seen else self._first_seen(descriptor, served_s)
                )
                seen[key] = one
                if one is not None:
                    found.append((descriptor, one))
        self._seen = seen
        return found

    def _first_seen(self, descriptor: int, served_s: float) -> _OpenConnection | None:
        """Returns a connection of a caller; None: it is something else."""
        with _connection(descriptor) as connection:
            if connection is None or connection.family not in {socket.AF_INET, socket.AF_INET6}:
                return None
            port = connection.getsockname()[1]
            if port not in self._ports:
                return None
            try:
                address = _address_of(connection)
            except OSError:  # it listens
                return None
            return None if address is None else _OpenConnection(address, port, served_s)


def close_connections(callers: Collection[str]) -> None:
    """Closes the connections of callers, as gRPC names them. Goes through all: for a thread."""
    wanted = set(map(_plain, callers))
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), _connection(int(entry.name)) as connection:
            if connection is not None and _address_of(connection) in wanted:
                connection.shutdown(socket.SHUT_RDWR)


def _close(descriptor: int, address: str) -> None:
    """Closes a connection, unless the descriptor is another one's by now.

    gRPC's server can close none, nor end a call whose answer waits to be read. A socket that is
    shut down it sees as closed by its caller.
    """
    with suppress(OSError), _connection(descriptor) as connection:
        if connection is not None and _address_of(connection) == address:
            connection.shutdown(socket.SHUT_RDWR)


def _received_bytes(descriptor: int) -> int:
    """Returns how much a connection has sent to us so far."""
    with suppress(OSError), _connection(descriptor) as connection:
        if connection is not None:
            length_bytes = _RECEIVED_AT + 8
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, length_bytes)
            return unpack_from("=Q", told, _RECEIVED_AT)[0] if len(told) == length_bytes else 0
    return 0


@contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket | None]:
    """Yields the socket of a descriptor; None if it is none. OSError: it was closed meanwhile."""
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


def _plain(caller: str) -> str:
    """Returns host and port of a caller's connection."""
    return unquote(caller).partition(":")[2]


def _host(address: str) -> str:
    return address.rpartition(":")[0]
