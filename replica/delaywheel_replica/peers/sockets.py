"""Sets up sockets between nodes. Times in seconds, lengths in bytes.

A peer that hangs (stopped, or its machine is cut off) keeps its connections. So each node sends
something on each connection that it opened at least every `PING_S`; if a peer is silent on one for
`SILENCE_S`, the receiving node ends all connections of that peer. A peer that does not accept what
was sent for `_UNTAKEN_MS` also loses its connection, since it no longer reads. Elections do not
wait for any of that: a leader counts as silent when its heartbeats are missing for a second.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from delaywheel_replica.peers.framing import Part

if TYPE_CHECKING:
    from delaywheel_replica.peers.encryption import Cipher

PING_S: Final = 1.0
SILENCE_S: Final = 3.0
_UNTAKEN_MS: Final = 3_000

_CONNECT_S: Final = 1.0

_CONTROL_WINDOW_BYTES: Final = 128 << 10
"""What the kernel buffers of a control stream at either end: heartbeats that wait there are stale,
and no newer one can replace them. The kernel's default for data streams is megabytes."""

_LEAST_FRAME_BYTES: Final = 64 << 20
"""Room for older frames, which were made with greater settings than today's."""

_BESIDE_FRAME_BYTES: Final = 16 << 20
"""What a message carries besides a frame's rows: topics, the wheel's card. No other message is as
long: frames share a message only while they are short, and heartbeats have some bytes per wheel."""

_MOST_BUFFERS: Final = 1_024
"""The kernel accepts no more parts than this in one call."""

CONTROL_BYTES: Final = 8 << 20
"""The longest message on a control stream: a heartbeat has some hundred bytes for each wheel."""


def data_bytes(frame_bytes: int) -> int:
    """Returns the greatest length of one message on a data stream, by the greatest frame.

    Messages are held in memory, so the limit follows from the settings (`transaction_bytes`), and
    is no higher than needed.
    """
    return max(frame_bytes, _LEAST_FRAME_BYTES) + _BESIDE_FRAME_BYTES


class Channel:
    """One connection: any thread may end it, only its reading thread closes it.

    `remote` is the other side's address, without its port; no `cipher`: nothing is encrypted.
    """

    def __init__(self, connected: socket.socket, remote: str) -> None:
        self.socket = connected
        self.remote = remote
        self.cipher: Cipher | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def until(self, deadline_s: float) -> Callable[[memoryview], int]:
        """Returns a receive function that raises TimeoutError at a monotonic time."""

        def receive_into(view: memoryview) -> int:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self.socket.settimeout(left_s)
            return self.socket.recv_into(view)

        return self._decrypting(receive_into)

    def unless_silent(self) -> Callable[[memoryview], int]:
        """Returns a receive function that raises BlockingIOError after too long a silence.

        The kernel does the waiting: Python's own timeout costs two system calls per read.
        """
        self.socket.settimeout(None)
        silence = struct.pack("ll", int(SILENCE_S), int(SILENCE_S % 1 * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
        return self._decrypting(self.socket.recv_into)

    def send_all(self, data: bytes) -> None:
        """Sends all of it, as the socket's timeout allows."""
        if self.cipher is None:
            self.socket.sendall(data)
        else:
            self.cipher.write_all(data)

    def send_some(self, buffers: Sequence[Part]) -> int:
        """Sends as much as there is room for; returns how many bytes.

        Raises:
            BlockingIOError: There is no room.
            OSError: The connection broke.
        """
        if self.cipher is None:
            return self.socket.sendmsg(buffers[:_MOST_BUFFERS], (), socket.MSG_DONTWAIT)
        return self.cipher.write_some(buffers)

    @property
    def has_unsent(self) -> bool:
        """Whether bytes that `send_some` took wait for room."""
        return self.cipher is not None and self.cipher.has_unsent

    def push(self) -> None:
        """Sends those as far as there is room; raises OSError if the connection broke."""
        if self.cipher is not None:
            self.cipher.push()

    def _decrypting(self, receive_into: Callable[[memoryview], int]) -> Callable[[memoryview], int]:
        if self.cipher is None:
            return receive_into
        return partial(self.cipher.read_into, receive_into)

    def keep_short_queues(self) -> None:
        """Makes the socket's buffers small, so that little waits in them."""
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, buffer, _CONTROL_WINDOW_BYTES)

    def end(self) -> None:
        """Shuts the connection down, which both ends notice; for any thread."""
        with self._lock, contextlib.suppress(OSError):
            if not self._is_closed:
                self.socket.shutdown(socket.SHUT_RDWR)

    def is_gone(self) -> bool:
        """Whether the other side has closed the connection, or its process has ended.

        Also while bytes that it sent before are still to be read. A network that fails, or a
        machine, does not show here.
        """
        with self._lock:
            if self._is_closed:
                return True
            poll = select.poll()
            poll.register(self.socket, select.POLLRDHUP)
            return bool(poll.poll(0))

    def close(self) -> None:
        """Closes the socket; no thread may use it afterwards, since its number may be reused."""
        with self._lock:
            self._is_closed = True
            self.socket.close()


def dial(address: str) -> Channel:
    """Connects, or raises OSError: nothing listens there, or the address is invalid."""
    connected = socket.create_connection(_host_and_port(address), timeout=_CONNECT_S)
    channel = Channel(connected, address)
    try:
        _set_up(connected)
    except OSError:
        channel.close()
        raise
    return channel


def _set_up(connected: socket.socket) -> None:
    if connected.getsockname() == connected.getpeername():
        # If nothing listens, the kernel may have given this end that very port.
        raise ConnectionRefusedError("the connection leads to itself")
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNTAKEN_MS)


def listen(address: str) -> socket.socket:
    """Listens on host:port, or raises OSError; port 0: any free one."""
    host, port = _host_and_port(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, bound = found[0]
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((str(bound[0]), int(bound[1])), family=family, dualstack_ipv6=both)


def host_of(address: str) -> str:
    """Returns the host of host:port, an IPv6 address without its brackets."""
    return address.rpartition(":")[0].strip("[]")


def why_not(error: OSError) -> str:
    """Returns the system's reason alone: libraries add the address, which our callers name."""
    is_the_systems = error.errno is not None and not isinstance(error, socket.gaierror)
    return os.strerror(error.errno or 0) if is_the_systems else str(error)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise OSError(f"{address}: {error}") from error
    if int(port) >> 16:
        raise OSError(f"{address}: there is no such port")
    return host.strip("[]"), int(port)
